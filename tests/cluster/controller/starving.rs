//! What waits is not passed for ever: its place is kept free for it after 32 that came later, for a time. For what would
//! not fit on an empty cluster either, none is. On a node without a machine.

use k8s_openapi::api::resource::v1::ResourceClaim;
use serde_json::{Value, json};

use super::explain::explain;
use super::{WAITS, create_hollow, end_hollow, results, settings, share, urgent_class, wait_told};
use crate::hollow::{self, wait_bound, wait_node};
use crate::test_cluster::TestCluster;

/// So many may pass.
const PASSES: usize = 32;
/// GPUs that are free for them: one has client slots for 22.
const FREE: usize = 2;
/// What is told whom the gang goes before.
const KEPT: &str = "kept for gang train, which goes first, until ";
/// Nearly a GPU.
const MOST: &str = "0.97";
const LITTLE: &str = "0.02";

/// A gang of so many pods, of the default priority or of this class.
#[derive(Clone, Copy)]
struct Gang<'a> {
    size: usize,
    class: Option<&'a str>,
}

async fn create(cluster: &TestCluster, name: &str, fraction: &str, gang: Option<Gang<'_>>) {
    let of_gang = |pod: &mut Value| {
        if let Some(Gang { size, class }) = gang {
            pod["metadata"]["labels"] = json!({"pod-group-name": "train"});
            pod["metadata"]["annotations"] = json!({"tranche.dev/gang-size": size.to_string()});
            pod["spec"]["priorityClassName"] = json!(class);
        }
    };
    create_hollow(cluster, name, share(json!({"fraction": fraction})), of_gang).await;
}

/// All GPUs of the node but two are in use. How many pods have a node then.
async fn fill(cluster: &TestCluster) -> usize {
    let others = cluster.published("hollow-0").await.len() - FREE;
    for nth in 0..others {
        create(cluster, &format!("other-{nth}"), MOST, None).await;
    }
    wait_bound(cluster, others).await;
    others
}

async fn is_placed(cluster: &TestCluster, name: &str) -> bool {
    !results(&cluster.api::<ResourceClaim>().get(name).await.expect("the claim is there")).is_empty()
}

/// As many small shares as may pass, after a gang that waits. How many pods have a node then.
async fn passed(cluster: &TestCluster, before: usize, gang: Gang<'_>) -> usize {
    for nth in 0..gang.size {
        create(cluster, &format!("worker-{nth}"), MOST, Some(gang)).await;
    }
    wait_told(cluster, "worker-0", WAITS).await;
    for nth in 0..PASSES {
        create(cluster, &format!("little-{nth}"), LITTLE, None).await;
    }
    wait_bound(cluster, before + PASSES).await;
    before + PASSES
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_gang_that_was_passed_for_long_gets_the_gpus_that_come_free() {
    let test = "a_gang_that_was_passed_for_long_gets_the_gpus_that_come_free";
    let cluster = super::bed_beside(test, 1).await;
    let others = fill(&cluster).await;
    let bound = passed(&cluster, others, Gang { size: FREE + 1, class: None }).await;
    // There is room for the small one, and soon for the large one; it is kept.
    create(&cluster, "late", LITTLE, None).await;
    wait_told(&cluster, "late", KEPT).await;
    // explain has it from what the claim was told: what is kept, the controller alone remembers.
    let said = explain(&cluster, &["late"]).unwrap_or_else(|said| said);
    assert!(said.contains(KEPT), "{said}");
    end_hollow(&cluster, "other-0").await;
    create(&cluster, "thief", MOST, None).await;
    wait_told(&cluster, "thief", WAITS).await;
    create(&cluster, "later", LITTLE, None).await;
    wait_told(&cluster, "later", WAITS).await;
    end_hollow(&cluster, "other-1").await;
    create(&cluster, "last", LITTLE, None).await;
    wait_told(&cluster, "last", WAITS).await;
    let little = ["late", "later", "last"];
    for name in ["worker-0", "worker-1", "worker-2", "thief"].iter().chain(&little) {
        assert!(
            !is_placed(&cluster, name).await,
            "{name}: two GPUs are not enough for the gang, and kept for it"
        );
    }
    end_hollow(&cluster, "other-2").await;
    // The gang, and the small ones in what is left; three have ended.
    wait_bound(&cluster, bound - 3 + 3 + little.len()).await;
    for name in ["worker-0", "worker-1", "worker-2"].iter().chain(&little) {
        wait_node(&cluster, name).await;
    }
    assert!(!is_placed(&cluster, "thief").await, "no GPU is left");
    hollow::end(cluster).await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn what_is_kept_for_a_gang_that_gets_no_room_is_given_to_others_after_a_while() {
    let test = "what_is_kept_for_a_gang_that_gets_no_room_is_given_to_others_after_a_while";
    let cluster = super::bed_beside(test, 1).await;
    settings::set(&cluster, "TRANCHE_RESERVATION_DURATION", "40s", "60s").await;
    let others = fill(&cluster).await;
    passed(&cluster, others, Gang { size: FREE + 1, class: None }).await;
    create(&cluster, "late", LITTLE, None).await;
    wait_told(&cluster, "late", KEPT).await;
    assert_eq!(wait_node(&cluster, "late").await, "hollow-0");
    hollow::end(cluster).await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn less_urgent_ones_do_not_pass_for_ever_either() {
    let cluster = super::bed_beside("less_urgent_ones_do_not_pass_for_ever_either", 1).await;
    let class = urgent_class(&cluster);
    let others = fill(&cluster).await;
    let bound = passed(&cluster, others, Gang { size: FREE + 1, class: Some(&class) }).await;
    create(&cluster, "late", LITTLE, None).await;
    wait_told(&cluster, "late", KEPT).await;
    for nth in 0..=FREE {
        end_hollow(&cluster, &format!("other-{nth}")).await;
    }
    // The gang, and the small one in what is left; three have ended.
    wait_bound(&cluster, bound + 1).await;
    for name in ["worker-0", "worker-1", "worker-2", "late"] {
        wait_node(&cluster, name).await;
    }
    hollow::end(cluster).await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn for_a_gang_that_no_node_could_hold_nothing_is_kept() {
    let test = "for_a_gang_that_no_node_could_hold_nothing_is_kept";
    let cluster = super::bed_beside(test, 1).await;
    let gpus = cluster.published("hollow-0").await.len();
    let bound = passed(&cluster, 0, Gang { size: gpus + 1, class: None }).await;
    for name in ["one-more", "another"] {
        create(&cluster, name, MOST, None).await;
        assert_eq!(wait_node(&cluster, name).await, "hollow-0");
    }
    wait_bound(&cluster, bound + 2).await;
    for nth in 0..=gpus {
        assert!(!is_placed(&cluster, &format!("worker-{nth}")).await);
    }
    hollow::end(cluster).await;
}
