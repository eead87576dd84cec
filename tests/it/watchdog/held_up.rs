//! A process whose files in /proc cannot be read to their end.

use std::sync::mpsc::channel;

use super::*;

#[tokio::test]
async fn a_read_that_does_not_come_back_is_left_and_the_gpus_are_watched() {
    let (let_go, held_up) = channel();
    let mut bench = Bench::new();
    bench.share("mine", MINE).await;
    bench.node.set(control(vec![json!({"pid": 100_000, "used_mib": 5, "kind": "mps"})]));
    let pods = BTreeMap::from([(100_000, MINE)]);
    let counted = Counted { pods, held_up: Mutex::new(Some(held_up)), ..Counted::default() };
    bench.start_with(WatchdogAction::Terminate, Arc::new(counted));
    let row = format!("tranche_claim_gpu_processes{}", labels("mine", MINE));
    until("it is known", || bench.metric(&row) == Some(1.0)).await;
    // A busy machine may take as long for the next one.
    assert!(bench.metric("tranche_watchdog_unmade_reads_total").is_some_and(|count| count >= 1.0));
    drop(let_go);
}
