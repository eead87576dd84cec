//! What becomes of allocations that are not used, or taken away, and of GPUs that are held.

use std::time::Duration;

use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::{Patch, PatchParams};
use serde_json::json;

use super::{NODE, create, create_waiting, holds, holds_beside, share, wait_not_placed, wait_placed};
use crate::test_cluster::PATIENCE;
use crate::manifests::{as_nobody, claim, gpu, on, user_of};
use crate::rig::wait_until;

#[tokio::test]
#[ignore = "needs a rig"]
async fn an_allocation_that_is_taken_away_is_made_again_after_a_while() {
    let bed = super::bed("an_allocation_that_is_taken_away_is_made_again_after_a_while").await;
    bed.create(claim("a", share(json!({"memory": "1Gi"})))).await;
    // The controller may not have heard yet that the other node is cordoned.
    let mut pod = on(NODE, as_nobody(user_of("a", "a")));
    pod["spec"]["schedulerName"] = json!("nobody");
    bed.create(pod).await;
    wait_placed(&bed, "a").await;
    // As the scheduler does when the pod cannot run there.
    let cleared = Patch::Merge(json!({"status": {"allocation": null}}));
    bed.api::<ResourceClaim>()
        .patch_status("a", &PatchParams::default(), &cleared)
        .await
        .expect("it is cleared");
    wait_not_placed(&bed, "a").await;
    let begun = std::time::Instant::now();
    wait_placed(&bed, "a").await;
    assert!(begun.elapsed() > Duration::from_secs(5), "the only node is left out for a while");
    bed.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn an_allocation_without_a_pod_is_taken_back() {
    let bed = super::bed("an_allocation_without_a_pod_is_taken_back").await;
    create_waiting(&bed, "a", json!({"memory": "1Gi"})).await;
    wait_placed(&bed, "a").await;
    bed.rig.kubectl(&["-n", &bed.namespace, "delete", "pod", "a", "--force", "--grace-period=0"]);
    wait_not_placed(&bed, "a").await;
    bed.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn nothing_is_placed_on_a_cordoned_node_and_what_is_not_bound_leaves_it() {
    let bed = super::bed("nothing_is_placed_on_a_cordoned_node_and_what_is_not_bound_leaves_it").await;
    create_waiting(&bed, "a", json!({"memory": "1Gi"})).await;
    wait_placed(&bed, "a").await;
    for node in &bed.nodes {
        bed.rig.kubectl(&["cordon", node]);
        bed.rig.on_end(&["kubectl", "uncordon", node]);
    }
    wait_not_placed(&bed, "a").await;
    let told = || async { bed.events("a").await.into_iter().find(|event| event.contains("is cordoned")) };
    wait_until("an event that says why", PATIENCE, told).await;
    for node in &bed.nodes {
        bed.rig.kubectl(&["uncordon", node]);
    }
    wait_placed(&bed, "a").await;
    bed.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn idle_gpus_are_given_back_at_once_to_pods_that_want_them_whole() {
    let bed = super::bed("idle_gpus_are_given_back_at_once_to_pods_that_want_them_whole").await;
    create(&bed, "a", json!({"memory": "1Gi"})).await;
    bed.wait_ready("a").await;
    let device = wait_placed(&bed, "a").await;
    bed.delete("a").await;
    bed.rig.kubectl(&["-n", &bed.namespace, "delete", "resourceclaim", "a"]);
    assert!(holds(&bed).await.contains(&device), "kept warm");
    // All of them at once, so that the held one is needed.
    let mut all = gpu("gpu");
    all["exactly"]["count"] = json!(bed.shareable(super::NODE).await.len());
    bed.create(claim("all", json!({"requests": [all]}))).await;
    bed.create(as_nobody(user_of("all", "all"))).await;
    bed.wait_ready("all").await;
    let all = bed.devices_of("all").await;
    assert_eq!(holds_beside(&bed, &all).await, [""; 0]);
    bed.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_hold_that_somebody_deletes_is_taken_again_under_its_shares() {
    let bed = super::bed("a_hold_that_somebody_deletes_is_taken_again_under_its_shares").await;
    create(&bed, "a", json!({"memory": "1Gi"})).await;
    bed.wait_ready("a").await;
    let device = wait_placed(&bed, "a").await;
    let name = format!("hold.{device}.{}", super::NODE);
    bed.rig.kubectl(&["-n", crate::test_cluster::SYSTEM, "delete", "resourceclaim", &name]);
    let held = || async { holds(&bed).await.contains(&device).then_some(()) };
    wait_until("the GPU to be held again", PATIENCE, held).await;
    create(&bed, "b", json!({"memory": "1Gi"})).await;
    bed.wait_ready("b").await;
    bed.end().await;
}

/// Where no share ids are kept the scheduler's books have a device once: the end of one of two claims that named
/// it would free it in them.
#[tokio::test]
#[ignore = "needs a rig"]
async fn the_end_of_one_share_gives_nobody_the_gpu_of_the_other() {
    let bed = super::bed("the_end_of_one_share_gives_nobody_the_gpu_of_the_other").await;
    for name in ["a", "b"] {
        create(&bed, name, json!({"fraction": "0.25"})).await;
        bed.wait_ready(name).await;
    }
    assert_eq!(wait_placed(&bed, "a").await, wait_placed(&bed, "b").await);
    bed.delete("a").await;
    bed.rig.kubectl(&["-n", &bed.namespace, "delete", "resourceclaim", "a"]);
    let mut all = gpu("gpu");
    all["exactly"]["count"] = json!(bed.shareable(super::NODE).await.len());
    bed.create(claim("all", json!({"requests": [all]}))).await;
    bed.create(as_nobody(user_of("all", "all"))).await;
    let waits = || async {
        let events = bed.events("all").await;
        events.into_iter().find(|event| event.starts_with("FailedScheduling"))
    };
    wait_until("the scheduler to find no place", PATIENCE, waits).await;
    let given = bed.api::<ResourceClaim>().get("all").await.expect("the claim is there").status;
    assert!(given.and_then(|status| status.allocation).is_none(), "the GPU of b is given away");
    bed.delete("b").await;
    bed.rig.kubectl(&["-n", &bed.namespace, "delete", "resourceclaim", "b"]);
    bed.wait_ready("all").await;
    bed.end().await;
}
