//! What is decided about several pods together, and in which order: gangs, claims that pods share, policies,
//! priorities. On nodes without a machine.

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::ListParams;
use serde_json::{Value, json};

use super::{WAITS, create_hollow, end_hollow, results, share, urgent_class, wait_placed, wait_told};
use crate::hollow::{self, on_hollow, wait_bound, wait_node};
use crate::manifests::{as_nobody, claim, user_of};
use crate::rig::wait_until;
use crate::test_cluster::{PATIENCE, TestCluster, node_of};

/// Most of a GPU: two of these do not fit on one.
fn most() -> Value {
    share(json!({"fraction": "0.9"}))
}

/// Names of claims that are placed.
async fn placed(cluster: &TestCluster) -> Vec<String> {
    let claims = cluster.api::<ResourceClaim>().list(&ListParams::default()).await.expect("claims").items;
    let placed = claims.into_iter().filter(|claim| !results(claim).is_empty());
    placed.filter_map(|claim| claim.metadata.name).collect()
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_gang_is_placed_as_a_whole_or_waits_as_a_whole() {
    let cluster = super::bed_beside("a_gang_is_placed_as_a_whole_or_waits_as_a_whole", 2).await;
    cluster.rig.kubectl(&["cordon", "hollow-1"]);
    // KAI's label; one more than a node has GPUs.
    let size = cluster.published("hollow-0").await.len() + 1;
    let names: Vec<String> = (0..size).map(|nth| format!("worker-{nth}")).collect();
    for name in &names {
        let of_gang = |pod: &mut Value| {
            pod["metadata"]["labels"] = json!({"pod-group-name": "train"});
            pod["metadata"]["annotations"] = json!({"tranche.dev/gang-size": size.to_string()});
        };
        create_hollow(&cluster, name, most(), of_gang).await;
    }
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    wait_told(&cluster, names[0], WAITS).await;
    // One that asks for the same, and is no part of it, passes: nothing is kept for the gang yet.
    create_hollow(&cluster, "alone", most(), |_| {}).await;
    assert_eq!(wait_node(&cluster, "alone").await, "hollow-0");
    assert_eq!(placed(&cluster).await, ["alone"]);
    cluster.rig.kubectl(&["uncordon", "hollow-1"]);
    wait_bound(&cluster, size + 1).await;
    hollow::end(cluster).await;
}

/// A pod of this gang, of which at least so many start together.
async fn member(cluster: &TestCluster, name: &str, gang: &str, least: usize) {
    let of_gang = |pod: &mut Value| {
        pod["metadata"]["labels"] = json!({"pod-group-name": gang});
        pod["metadata"]["annotations"] = json!({"tranche.dev/gang-size": least.to_string()});
    };
    create_hollow(cluster, name, most(), of_gang).await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn of_a_gang_at_least_so_many_start_together_and_the_rest_as_there_is_room() {
    let test = "of_a_gang_at_least_so_many_start_together_and_the_rest_as_there_is_room";
    let cluster = super::bed_beside(test, 1).await;
    let gpus = cluster.published("hollow-0").await.len();
    // One GPU is left, and two are to start together.
    for nth in 0..gpus - 1 {
        create_hollow(&cluster, &format!("other-{nth}"), most(), |_| {}).await;
    }
    wait_bound(&cluster, gpus - 1).await;
    for nth in 0..3 {
        member(&cluster, &format!("worker-{nth}"), "train", 2).await;
    }
    wait_told(&cluster, "worker-0", WAITS).await;
    let is_worker = |name: &String| name.starts_with("worker-");
    assert!(!placed(&cluster).await.iter().any(is_worker), "one alone does not start");
    end_hollow(&cluster, "other-0").await;
    wait_bound(&cluster, gpus).await;
    assert_eq!(placed(&cluster).await.into_iter().filter(is_worker).count(), 2, "the third has no GPU");
    hollow::end(cluster).await;
}

/// Each has half of its pods when the other has half of its own; there is room for one of them.
#[tokio::test]
#[ignore = "needs a rig"]
async fn of_two_gangs_that_come_in_two_batches_one_starts_whole() {
    let cluster = super::bed_beside("of_two_gangs_that_come_in_two_batches_one_starts_whole", 1).await;
    let gpus = cluster.published("hollow-0").await.len();
    for round in 0..3 {
        let name = |gang: &str, nth: usize| format!("{gang}{round}-{nth}");
        let gang = |gang: &str| format!("{gang}{round}");
        for batch in [0..gpus / 2, gpus / 2..gpus] {
            for of in ["a", "b"] {
                for nth in batch.clone() {
                    member(&cluster, &name(of, nth), &gang(of), gpus).await;
                }
            }
        }
        wait_bound(&cluster, gpus).await;
        let all = placed(&cluster).await;
        let first = if all.contains(&name("a", 0)) { "a" } else { "b" };
        let mut whole: Vec<String> = (0..gpus).map(|nth| name(first, nth)).collect();
        whole.sort();
        assert_eq!(all, whole, "one of them, and nothing of the other");
        hollow::clear(&cluster).await;
    }
    hollow::end(cluster).await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn pods_that_name_one_claim_are_where_it_is() {
    let cluster = super::bed_beside("pods_that_name_one_claim_are_where_it_is", 2).await;
    cluster.create(claim("common", share(json!({"memory": "4Gi"})))).await;
    for name in ["one", "two", "three"] {
        cluster.create(on_hollow(as_nobody(user_of("common", name)))).await;
    }
    wait_bound(&cluster, 3).await;
    let pods = cluster.api::<Pod>().list(&ListParams::default()).await.expect("pods").items;
    let first = node_of(&pods[0]);
    assert!(pods.iter().all(|pod| node_of(pod) == first), "one node");
    let reserved = || async {
        let users = cluster.api::<ResourceClaim>().get("common").await.ok()?.status?.reserved_for?;
        (users.len() == 3).then_some(())
    };
    wait_until("the claim to be reserved for all three", PATIENCE, reserved).await;
    hollow::end(cluster).await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_claim_says_by_which_policy_it_is_placed() {
    let cluster = super::bed_beside("a_claim_says_by_which_policy_it_is_placed", 1).await;
    let mut devices = Vec::new();
    for (name, policy) in [("a", "pack"), ("b", "pack"), ("c", "spread"), ("d", "spread")] {
        let mut claim = claim(name, share(json!({"memory": "4Gi"})));
        claim["metadata"]["annotations"] = json!({"tranche.dev/policy": policy});
        cluster.create(claim).await;
        cluster.create(on_hollow(as_nobody(user_of(name, name)))).await;
        devices.push(wait_placed(&cluster, name).await);
    }
    assert_eq!(devices[0], devices[1], "packed");
    assert!(devices[2] != devices[0] && devices[3] != devices[0] && devices[2] != devices[3], "{devices:?}");
    hollow::end(cluster).await;
}

/// Under MPS a limit is exact where all shares of a GPU have one size.
#[tokio::test]
#[ignore = "needs a rig"]
async fn shares_of_one_size_are_together() {
    let cluster = super::bed_beside("shares_of_one_size_are_together", 1).await;
    let mut devices = Vec::new();
    for (name, memory) in [("a", "30Gi"), ("b", "34Gi"), ("c", "30Gi"), ("d", "34Gi")] {
        create_hollow(&cluster, name, share(json!({"memory": memory})), |_| {}).await;
        devices.push(wait_placed(&cluster, name).await);
    }
    assert!(devices[0] == devices[2] && devices[1] == devices[3] && devices[0] != devices[1], "{devices:?}");
    hollow::end(cluster).await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn who_is_more_urgent_goes_first_though_it_came_later() {
    let cluster = super::bed_beside("who_is_more_urgent_goes_first_though_it_came_later", 1).await;
    let class = urgent_class(&cluster);
    let gpus = cluster.published("hollow-0").await.len();
    for nth in 0..gpus {
        create_hollow(&cluster, &format!("first-{nth}"), most(), |_| {}).await;
    }
    wait_bound(&cluster, gpus).await;
    create_hollow(&cluster, "patient", most(), |_| {}).await;
    wait_told(&cluster, "patient", WAITS).await;
    create_hollow(&cluster, "urgent", most(), |pod| pod["spec"]["priorityClassName"] = json!(class)).await;
    wait_told(&cluster, "urgent", WAITS).await;
    for (gone, next) in [("first-0", "urgent"), ("first-1", "patient")] {
        assert!(!placed(&cluster).await.iter().any(|name| name == next), "{next}");
        end_hollow(&cluster, gone).await;
        wait_node(&cluster, next).await;
    }
    hollow::end(cluster).await;
}
