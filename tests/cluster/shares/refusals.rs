//! Allocations that cannot be: whatever the control plane says, the node counts again.

use serde_json::json;

use super::{Board, cluster};
use crate::manifests::{allocation, allocation_of_share, as_nobody, claim, gpu, of_gpu, share, user_of};
use crate::rig::wait_until;
use crate::test_cluster::{PATIENCE, minor_of, sum};

const REFUSED: &str = "tranche_refused_double_allocations_total";

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_share_beyond_the_rest_is_refused_with_the_numbers() {
    let Some(cluster) = cluster("a_share_beyond_the_rest_is_refused_with_the_numbers").await else { return };
    let board = Board::first(&cluster).await;
    board.tenant(&cluster, "first", "40Gi", 40).await;
    board.tenant(&cluster, "second", "20Gi", 20).await;
    let before = board.standing(&cluster, &["first", "second"]).await;
    let refused = sum(&cluster.metrics(&board.node).await, REFUSED);
    let given = |memory, compute| allocation_of_share(&board.node, &board.device, memory, compute);
    cluster.create_with_status("memory", share("30Gi", 0), given("30Gi", 0)).await;
    cluster.create_with_status("compute", share("1Gi", 50), given("1Gi", 50)).await;
    for name in ["memory", "compute"] {
        cluster.create(as_nobody(user_of(name, name))).await;
    }
    let numbers = format!("61440 of {} MiB are granted to 2 other claims", board.grantable_mib);
    cluster.wait_refused("memory", &[&board.device, "30720 MiB does not fit", &numbers]).await;
    cluster
        .wait_refused("compute", &[&board.device, "50 % of compute does not fit", "60 % are granted to 2"])
        .await;
    assert_eq!(board.standing(&cluster, &["first", "second"]).await, before, "those that are right go on");
    let counted = sum(&cluster.metrics(&board.node).await, REFUSED);
    assert!(counted >= refused + 2.0, "refused {refused} times before and {counted} times now");
    // Kubelet asks again and again: once there is room, they have their turn.
    cluster.delete("first").await;
    cluster.wait_ready("memory").await;
    cluster.wait_ready("compute").await;
    cluster.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_gpu_is_whole_or_shared_and_never_both() {
    let Some(cluster) = cluster("a_gpu_is_whole_or_shared_and_never_both").await else { return };
    let board = Board::first(&cluster).await;
    board.tenant(&cluster, "part", "10Gi", 0).await;
    let before = board.standing(&cluster, &["part"]).await;
    cluster.create_with_status("all", gpu("gpu"), allocation(&board.node, &board.device)).await;
    cluster.create(as_nobody(user_of("all", "all"))).await;
    let holder = |name: &str| format!("{}/{name}", cluster.namespace);
    cluster.wait_refused("all", &[&board.device, "in use by claim", &holder("part")]).await;
    assert_eq!(board.standing(&cluster, &["part"]).await, before, "the share goes on");
    cluster.delete("part").await;
    cluster.wait_ready("all").await;
    let back = || async { (!board.is_exclusive(&cluster)).then_some(()) };
    wait_until("the whole GPU to be in DEFAULT mode", PATIENCE, back).await;

    let given = allocation_of_share(&board.node, &board.device, "1Gi", 0);
    cluster.create_with_status("late", share("1Gi", 0), given).await;
    cluster.create(as_nobody(user_of("late", "late"))).await;
    cluster.wait_refused("late", &[&board.device, "in use by claim", &holder("all")]).await;
    assert!(!board.is_exclusive(&cluster), "the whole GPU's mode was changed for a share that was refused");
    assert_eq!(cluster.inside("all", "main").gpus, [minor_of(&board.device)]);
    cluster.end().await;
}

/// The scheduler itself never gives too much: the last MiB is placed, and one more is not.
#[tokio::test]
#[ignore = "needs a rig"]
async fn the_scheduler_gives_all_of_a_gpu_and_no_more() {
    let Some(cluster) = cluster("the_scheduler_gives_all_of_a_gpu_and_no_more").await else { return };
    let board = Board::first(&cluster).await;
    board.tenant(&cluster, "most", "70000Mi", 60).await;
    let rest = board.grantable_mib - 70_000;
    board.tenant(&cluster, "rest", &format!("{rest}Mi"), 40).await;
    for (name, memory) in [("more", "1Mi")] {
        let request = of_gpu(&board.uuid, share(memory, 0));
        cluster.create(claim(name, json!({"requests": [request]}))).await;
        cluster.create(as_nobody(user_of(name, name))).await;
        super::wait_unschedulable(&cluster, name).await;
    }
    cluster.end().await;
}
