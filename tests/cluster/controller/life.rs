//! What becomes of allocations that are not used, or taken away, and of GPUs that are held.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::{Patch, PatchParams};
use serde_json::json;

use super::{NODE, create, create_waiting, holds, holds_beside, share, wait_not_placed, wait_placed};
use crate::manifests::{as_nobody, claim, gpu, on, user_of};
use crate::rig::wait_until;
use crate::test_cluster::{PATIENCE, sum};

#[tokio::test]
#[ignore = "needs a rig"]
async fn an_allocation_that_is_taken_away_is_made_again_after_a_while() {
    let cluster = super::cluster("an_allocation_that_is_taken_away_is_made_again_after_a_while").await;
    cluster.create(claim("a", share(json!({"memory": "1Gi"})))).await;
    // The controller may not have heard yet that the other node is cordoned.
    let mut pod = on(NODE, as_nobody(user_of("a", "a")));
    pod["spec"]["schedulerName"] = json!("nobody");
    cluster.create(pod).await;
    wait_placed(&cluster, "a").await;
    // As the scheduler does when the pod cannot run there.
    let cleared = Patch::Merge(json!({"status": {"allocation": null}}));
    let begun = std::time::Instant::now();
    cluster
        .api::<ResourceClaim>()
        .patch_status("a", &PatchParams::default(), &cleared)
        .await
        .expect("it is cleared");
    wait_not_placed(&cluster, "a").await;
    wait_placed(&cluster, "a").await;
    assert!(begun.elapsed() > Duration::from_secs(5), "the only node is left out for a while");
    cluster.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn an_allocation_without_a_pod_is_taken_back() {
    let cluster = super::cluster("an_allocation_without_a_pod_is_taken_back").await;
    create_waiting(&cluster, "a", json!({"memory": "1Gi"})).await;
    wait_placed(&cluster, "a").await;
    cluster.rig.kubectl(&["-n", &cluster.namespace, "delete", "pod", "a", "--force", "--grace-period=0"]);
    wait_not_placed(&cluster, "a").await;
    cluster.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn nothing_is_placed_on_a_cordoned_node_and_what_is_not_bound_leaves_it() {
    let cluster =
        super::cluster("nothing_is_placed_on_a_cordoned_node_and_what_is_not_bound_leaves_it").await;
    create_waiting(&cluster, "a", json!({"memory": "1Gi"})).await;
    wait_placed(&cluster, "a").await;
    for node in &cluster.nodes {
        cluster.rig.kubectl(&["cordon", node]);
        cluster.rig.on_end(&["kubectl", "uncordon", node]);
    }
    wait_not_placed(&cluster, "a").await;
    let told = || async { cluster.events("a").await.into_iter().find(|event| event.contains("is cordoned")) };
    wait_until("an event that says why", PATIENCE, told).await;
    for node in &cluster.nodes {
        cluster.rig.kubectl(&["uncordon", node]);
    }
    wait_placed(&cluster, "a").await;
    cluster.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn idle_gpus_are_given_back_at_once_to_pods_that_want_them_whole() {
    let cluster = super::cluster("idle_gpus_are_given_back_at_once_to_pods_that_want_them_whole").await;
    create(&cluster, "a", json!({"memory": "1Gi"})).await;
    cluster.wait_ready("a").await;
    let device = wait_placed(&cluster, "a").await;
    cluster.delete("a").await;
    cluster.rig.kubectl(&["-n", &cluster.namespace, "delete", "resourceclaim", "a"]);
    assert!(holds(&cluster).await.contains(&device), "kept warm");
    // All of them at once, so that the held one is needed.
    let mut all = gpu("gpu");
    all["exactly"]["count"] = json!(cluster.shareable(super::NODE).await.len());
    cluster.create(claim("all", json!({"requests": [all]}))).await;
    cluster.create(as_nobody(user_of("all", "all"))).await;
    cluster.wait_ready("all").await;
    let all = cluster.devices_of("all").await;
    assert_eq!(holds_beside(&cluster, &all).await, [""; 0]);
    cluster.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_gated_pod_takes_no_idle_gpu_away_and_no_share_waits_for_it() {
    let cluster = super::cluster("a_gated_pod_takes_no_idle_gpu_away_and_no_share_waits_for_it").await;
    create(&cluster, "a", json!({"memory": "1Gi"})).await;
    cluster.wait_ready("a").await;
    let device = wait_placed(&cluster, "a").await;
    cluster.delete("a").await;
    cluster.rig.kubectl(&["-n", &cluster.namespace, "delete", "resourceclaim", "a"]);
    let mut all = gpu("gpu");
    all["exactly"]["count"] = json!(cluster.shareable(super::NODE).await.len());
    cluster.create(claim("all", json!({"requests": [all]}))).await;
    let mut gated = as_nobody(user_of("all", "all"));
    gated["spec"]["schedulingGates"] = json!([{"name": "example.com/budget"}]);
    cluster.create(gated).await;
    let told = || async {
        let status = cluster.api::<Pod>().get("all").await.ok()?.status?;
        let conditions = status.conditions?;
        conditions.into_iter().find(|one| one.reason.as_deref() == Some("SchedulingGated"))
    };
    wait_until("kube-scheduler to say that the pod is gated", PATIENCE, told).await;
    let said = super::explain::why(&cluster, "pod/all");
    assert!(said.contains("waits (gated)") && said.contains("scheduling gate example.com/budget"), "{said}");
    // The idle GPU is still there for shares: it is all theirs. The next one has to be taken.
    create(&cluster, "b", json!({"fraction": "1"})).await;
    cluster.wait_ready("b").await;
    assert_eq!(wait_placed(&cluster, "b").await, device, "it was not given back");
    let looks = async || {
        sum(&super::metrics(&cluster).await, "tranche_controller_writes_total{what=\"look\",result=\"ok\"")
    };
    // GPUs that a test before this one has left held are given back after a while; `c` is to take one that nobody holds.
    let only = || async { (holds(&cluster).await == [device.clone()]).then_some(()) };
    wait_until("nothing else to be held", PATIENCE, only).await;
    let before = looks().await;
    create(&cluster, "c", json!({"memory": "1Gi"})).await;
    cluster.wait_ready("c").await;
    assert_ne!(wait_placed(&cluster, "c").await, device);
    assert_eq!(looks().await - before, 1.0, "looked at once, since nobody may get the GPU");

    for name in ["b", "c"] {
        cluster.delete(name).await;
        cluster.rig.kubectl(&["-n", &cluster.namespace, "delete", "resourceclaim", name]);
    }
    let open = ["-n", &cluster.namespace, "patch", "pod", "all", "--type=json"];
    let open = [&open[..], &["-p", r#"[{"op": "remove", "path": "/spec/schedulingGates"}]"#]].concat();
    cluster.rig.kubectl(&open);
    cluster.wait_ready("all").await;
    let all = cluster.devices_of("all").await;
    assert_eq!(holds_beside(&cluster, &all).await, [""; 0], "without its gate it gets what is idle");
    cluster.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_hold_that_somebody_deletes_is_taken_again_under_its_shares() {
    let cluster = super::cluster("a_hold_that_somebody_deletes_is_taken_again_under_its_shares").await;
    create(&cluster, "a", json!({"memory": "1Gi"})).await;
    cluster.wait_ready("a").await;
    let device = wait_placed(&cluster, "a").await;
    let name = format!("hold.{device}.{}", super::NODE);
    // Karpenter goes by what is consumed alone. Older API servers keep no such field.
    let system = crate::test_cluster::SYSTEM;
    let hold = cluster.rig.kubectl(&["-n", system, "get", "resourceclaim", &name, "-o", "json"]);
    assert_eq!(hold.contains("consumedCapacity"), cluster.release().await >= 36, "{hold}");
    cluster.rig.kubectl(&["-n", system, "delete", "resourceclaim", &name]);
    let held = || async { holds(&cluster).await.contains(&device).then_some(()) };
    wait_until("the GPU to be held again", PATIENCE, held).await;
    create(&cluster, "b", json!({"memory": "1Gi"})).await;
    cluster.wait_ready("b").await;
    cluster.end().await;
}

/// Where no share ids are kept the scheduler's books have a device once: the end of one of two claims that named
/// it would free it in them.
#[tokio::test]
#[ignore = "needs a rig"]
async fn the_end_of_one_share_gives_nobody_the_gpu_of_the_other() {
    let cluster = super::cluster("the_end_of_one_share_gives_nobody_the_gpu_of_the_other").await;
    for name in ["a", "b"] {
        create(&cluster, name, json!({"fraction": "0.25"})).await;
        cluster.wait_ready(name).await;
    }
    assert_eq!(wait_placed(&cluster, "a").await, wait_placed(&cluster, "b").await);
    cluster.delete("a").await;
    cluster.rig.kubectl(&["-n", &cluster.namespace, "delete", "resourceclaim", "a"]);
    let mut all = gpu("gpu");
    all["exactly"]["count"] = json!(cluster.shareable(super::NODE).await.len());
    cluster.create(claim("all", json!({"requests": [all]}))).await;
    cluster.create(as_nobody(user_of("all", "all"))).await;
    let waits = || async {
        let events = cluster.events("all").await;
        events.into_iter().find(|event| event.starts_with("FailedScheduling"))
    };
    wait_until("the scheduler to find no place", PATIENCE, waits).await;
    let given = cluster.api::<ResourceClaim>().get("all").await.expect("the claim is there").status;
    assert!(given.and_then(|status| status.allocation).is_none(), "the GPU of b is given away");
    cluster.delete("b").await;
    cluster.rig.kubectl(&["-n", &cluster.namespace, "delete", "resourceclaim", "b"]);
    cluster.wait_ready("all").await;
    cluster.end().await;
}
