//! A process whose files in /proc cannot be read to their end.

use std::sync::mpsc::{Receiver, channel};

use super::*;

/// Processes of one pod. The first read of one is held up until this lets it go.
struct HeldUp(Mutex<Option<Receiver<()>>>);

impl Processes for HeldUp {
    fn started(&self, _: u32) -> io::Result<Option<u64>> {
        let held_up = self.0.lock().unwrap().take();
        if let Some(held_up) = held_up {
            let _ = held_up.recv();
        }
        Ok(Some(1))
    }
    fn now(&self) -> io::Result<u64> {
        Ok(1)
    }
    fn owner(&self, _: u32) -> io::Result<Option<ProcessOwner>> {
        Ok(Some(ProcessOwner::Pod { pod: MINE.into(), container: None }))
    }
    fn uses_gpu(&self, _: u32) -> io::Result<bool> {
        Ok(true)
    }
    fn managed_memory(&self, _: u32) -> io::Result<ManagedMemory> {
        unimplemented!("nobody has any here")
    }
    fn by_pod(&self, _: Instant) -> io::Result<PodProcesses> {
        unimplemented!("the watchdog looks at processes one by one")
    }
    fn look_at_files(&self, _: &FileLook) {
        unimplemented!("the watchdog looks at processes one by one")
    }
    fn are_all_shown(&self) -> bool {
        true
    }
    fn pids_are_the_hosts(&self) -> bool {
        true
    }
    fn end(&self, _: ProcessKey) -> Result<End, EndError> {
        Ok(End::Gone)
    }
}

#[tokio::test]
async fn a_read_that_does_not_come_back_is_left_and_the_gpus_are_watched() {
    let (let_go, held_up) = channel();
    let mut bench = Bench::new();
    bench.share("mine", MINE).await;
    bench.node.set(control(vec![json!({"pid": 100_000, "used_mib": 5, "kind": "mps"})]));
    bench.start_with(WatchdogAction::Terminate, Arc::new(HeldUp(Mutex::new(Some(held_up)))));
    let row = format!("tranche_claim_gpu_processes{}", labels("mine", MINE));
    until("it is known", || bench.metric(&row) == Some(1.0)).await;
    // A busy machine may take as long for the next one.
    assert!(bench.metric("tranche_watchdog_unmade_reads_total").is_some_and(|count| count >= 1.0));
    drop(let_go);
}
