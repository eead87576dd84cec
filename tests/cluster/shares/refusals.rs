//! Allocations that cannot be: whatever the control plane says, the node counts again.

use serde_json::json;

use super::{Board, bed};
use crate::test_cluster::{PATIENCE, minor_of, sum};
use crate::manifests::{allocation, allocation_of_share, as_nobody, claim, gpu, of_gpu, share, user_of};
use crate::rig::wait_until;

const REFUSED: &str = "tranche_refused_double_allocations_total";

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_share_beyond_the_rest_is_refused_with_the_numbers() {
    let Some(bed) = bed("a_share_beyond_the_rest_is_refused_with_the_numbers").await else { return };
    let board = Board::first(&bed).await;
    board.tenant(&bed, "first", "40Gi", 40).await;
    board.tenant(&bed, "second", "20Gi", 20).await;
    let before = board.standing(&bed, &["first", "second"]).await;
    let refused = sum(&bed.metrics(&board.node).await, REFUSED);
    let given = |memory, compute| allocation_of_share(&board.node, &board.device, memory, compute);
    bed.create_with_status("memory", share("30Gi", 0), given("30Gi", 0)).await;
    bed.create_with_status("compute", share("1Gi", 50), given("1Gi", 50)).await;
    for name in ["memory", "compute"] {
        bed.create(as_nobody(user_of(name, name))).await;
    }
    let numbers = format!("61440 of {} MiB are granted to 2 other claims", board.grantable_mib);
    bed.wait_refused("memory", &[&board.device, "30720 MiB does not fit", &numbers]).await;
    bed.wait_refused("compute", &[&board.device, "50 % of compute does not fit", "60 % are granted to 2"])
        .await;
    assert_eq!(board.standing(&bed, &["first", "second"]).await, before, "those that are right go on");
    let counted = sum(&bed.metrics(&board.node).await, REFUSED);
    assert!(counted >= refused + 2.0, "refused {refused} times before and {counted} times now");
    // Kubelet asks again and again: once there is room, they have their turn.
    bed.delete("first").await;
    bed.wait_ready("memory").await;
    bed.wait_ready("compute").await;
    bed.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_gpu_is_whole_or_shared_and_never_both() {
    let Some(bed) = bed("a_gpu_is_whole_or_shared_and_never_both").await else { return };
    let board = Board::first(&bed).await;
    board.tenant(&bed, "part", "10Gi", 0).await;
    let before = board.standing(&bed, &["part"]).await;
    bed.create_with_status("all", gpu("gpu"), allocation(&board.node, &board.device)).await;
    bed.create(as_nobody(user_of("all", "all"))).await;
    let holder = |name: &str| format!("{}/{name}", bed.namespace);
    bed.wait_refused("all", &[&board.device, "in use by claim", &holder("part")]).await;
    assert_eq!(board.standing(&bed, &["part"]).await, before, "the share goes on");
    bed.delete("part").await;
    bed.wait_ready("all").await;
    let back = || async { (!board.is_exclusive(&bed)).then_some(()) };
    wait_until("the whole GPU to be in DEFAULT mode", PATIENCE, back).await;

    let given = allocation_of_share(&board.node, &board.device, "1Gi", 0);
    bed.create_with_status("late", share("1Gi", 0), given).await;
    bed.create(as_nobody(user_of("late", "late"))).await;
    bed.wait_refused("late", &[&board.device, "in use by claim", &holder("all")]).await;
    assert!(!board.is_exclusive(&bed), "the whole GPU's mode was changed for a share that was refused");
    assert_eq!(bed.inside("all", "main").gpus, [minor_of(&board.device)]);
    bed.end().await;
}

/// The scheduler itself never gives too much: the last MiB is placed, and one more is not.
#[tokio::test]
#[ignore = "needs a rig"]
async fn the_scheduler_gives_all_of_a_gpu_and_no_more() {
    let Some(bed) = bed("the_scheduler_gives_all_of_a_gpu_and_no_more").await else { return };
    let board = Board::first(&bed).await;
    board.tenant(&bed, "most", "70000Mi", 60).await;
    let rest = board.grantable_mib - 70_000;
    board.tenant(&bed, "rest", &format!("{rest}Mi"), 40).await;
    for (name, memory) in [("more", "1Mi")] {
        let request = of_gpu(&board.uuid, share(memory, 0));
        bed.create(claim(name, json!({"requests": [request]}))).await;
        bed.create(as_nobody(user_of(name, name))).await;
        super::wait_unschedulable(&bed, name).await;
    }
    bed.end().await;
}
