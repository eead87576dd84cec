//! Processes whose control groups cannot be read.

use tranche::model::process::ProcessPod;

use super::*;

/// Its memory would be on nobody's account. It needs no API server to be found, which could name nobody who hides.
#[tokio::test]
async fn a_process_that_hides_its_pod_is_a_stranger_and_one_that_cannot_be_read_is_left_alone() {
    for (is_shared, action) in [
        (true, WatchdogAction::Terminate),
        (false, WatchdogAction::Terminate),
        (true, WatchdogAction::Observe),
    ] {
        let mut bench = Bench::new();
        let (mut mine, mut hidden, mut unread) = (Sleeper::new(), Sleeper::new(), Sleeper::new());
        for one in [&mine, &hidden, &unread] {
            bench.proc.show(one.pid(), Some(MINE));
        }
        let group = |pid: u32| bench.proc.path(&format!("{pid}/cgroup"));
        // Fails as the kernel does where a name is longer than it tells.
        fs::remove_file(group(hidden.pid())).unwrap();
        symlink("x".repeat(300), group(hidden.pid())).unwrap();
        fs::remove_file(group(unread.pid())).unwrap();
        fs::create_dir(group(unread.pid())).unwrap();
        match is_shared {
            true => bench.share("mine", MINE).await,
            false => bench.whole("mine", MINE).await,
        };
        let all = [&mine, &hidden, &unread];
        bench.node.set(control(all.iter().map(|one| process(one.pid(), 500, "compute")).collect()));
        bench.site.api.silent.store(true, Ordering::SeqCst);
        bench.start(action);
        let pid = hidden.pid();
        let found = bench.wait_for_finding("stranger", |f| {
            matches!(&f.kind, FindingKind::Foreign { process, pod: ProcessPod::Hidden, .. } if process.pid == pid)
        });
        let found = found.await;
        assert_eq!((&found.claim, found.device.as_str()), (&None, "gpu-0"));
        let words = found.kind.to_string();
        assert!(words.contains("its pod is hidden: the name of its control group is longer"), "{words}");
        if action == WatchdogAction::Terminate {
            until("it is ended", || hidden.was_killed()).await;
            let row = format!("tranche_foreign_gpu_process_terminations_total{{{}}}", device_labels(0));
            until("its end is counted", || bench.metric(&row) == Some(1.0)).await;
        }
        bench.wait_for_looks(3).await;
        assert!(mine.lives() && unread.lives());
        assert_eq!(hidden.lives(), action == WatchdogAction::Observe);
        let row = format!("tranche_foreign_gpu_processes_total{{{}}}", device_labels(0));
        assert_eq!(bench.metric(&row), Some(1.0));
    }
}
