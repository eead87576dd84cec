//! Processes that cannot be killed.

use super::*;

/// It was tried again 20 looks later, each time: a read of `/proc` that was held up once cost 5 s.
#[tokio::test]
async fn a_kill_that_fails_is_tried_again_soon() {
    let mut bench = Bench::new();
    bench.share("mine", MINE).await;
    bench.node.set(control(vec![json!({"pid": 100_000, "used_mib": 3000, "kind": "compute"})]));
    let pods = BTreeMap::from([(100_000, MINE)]);
    let counted = Arc::new(Counted { pods, stays: true, ..Counted::default() });
    bench.start_every(Duration::from_millis(250), WatchdogAction::Terminate, counted.clone());
    let tried = |times: u64| move |counted: &Counted| counted.ended.load(Ordering::SeqCst) >= times;
    until("it is tried", || tried(1)(&counted)).await;
    let from = bench.looks();
    until("it is tried three times more", || tried(4)(&counted)).await;
    let looks = bench.looks() - from;
    assert!(looks < 40, "{looks} looks passed: 7, and what the answers took");
    let is_it =
        |f: &Finding| matches!(&f.kind, FindingKind::NotEnded { process, .. } if process.pid == 100_000);
    let found = bench.wait_for_finding("failure", is_it).await;
    assert!(found.kind.to_string().contains("is never ended from here"), "{}", found.kind);
    assert!(bench.metric("tranche_watchdog_failed_terminations_total").is_some_and(|count| count >= 3.0));
}
