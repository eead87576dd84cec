//! Who takes more than was granted is ended, and nobody else.

use std::process::Command;

use k8s_openapi::api::core::v1::Pod;

use super::{Board, cluster, wait_event};
use crate::rig::wait_until;
use crate::test_cluster::{SOON, TestCluster, container_run, minor_of, sum};

/// A simulated process of a pod on the board, gone when dropped.
pub struct Process<'a> {
    cluster: &'a TestCluster,
    board: &'a Board,
    pid: String,
}

impl<'a> Process<'a> {
    /// A client of an MPS server.
    pub fn of(cluster: &'a TestCluster, board: &'a Board, pod: &Pod, mib: u32) -> Self {
        Self::of_kind(cluster, board, pod, (mib, "mps"))
    }

    /// `kind`: in which of NVML's lists it is.
    pub fn of_kind(cluster: &'a TestCluster, board: &'a Board, pod: &Pod, (mib, kind): (u32, &str)) -> Self {
        let process = Self { cluster, board, pid: cluster.pid_of(&board.node, pod).to_string() };
        let (minor, mib) = (minor_of(&board.device).to_string(), mib.to_string());
        let words = ["process", "add", &minor, &process.pid, &mib, "--kind", kind, "--only-if-alive"];
        cluster.fake(&board.node, &words);
        process
    }
}

impl Drop for Process<'_> {
    fn drop(&mut self) {
        let minor = minor_of(&self.board.device).to_string();
        if let Err(said) = self.cluster.try_fake(&self.board.node, &["process", "remove", &minor, &self.pid])
        {
            println!("putting the node right: {said}");
        }
    }
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn who_takes_more_than_its_share_is_ended_and_its_neighbour_is_not() {
    let Some(cluster) = cluster("who_takes_more_than_its_share_is_ended_and_its_neighbour_is_not").await
    else {
        return;
    };
    let board = Board::first(&cluster).await;
    let greedy = board.tenant(&cluster, "greedy", "2000Mi", 25).await;
    let modest = board.tenant(&cluster, "modest", "10Gi", 25).await;
    let modests = Process::of(&cluster, &board, &modest, 10_000);
    let row = |name: &str, pod: &str| {
        format!("tranche_claim_{name}{{namespace=\"{}\",pod=\"{pod}\"", cluster.namespace)
    };
    let used = |mib: u32, pod: &'static str| {
        let (cluster, row) = (&cluster, &row);
        move || async move {
            let metrics = cluster.metrics(super::NODE).await;
            (sum(&metrics, &row("memory_used_bytes", pod)) == f64::from(mib) * 1_048_576.0).then_some(())
        }
    };
    wait_until("the modest one's use to be told", SOON, used(10_000, "modest")).await;
    // Within the grant, and up to 64 MiB beyond, nothing happens.
    let greedys = Process::of(&cluster, &board, &greedy, 1990);
    wait_until("the greedy one's use to be told", SOON, used(1990, "greedy")).await;
    let looks = sum(&cluster.metrics(super::NODE).await, "tranche_watchdog_tick_duration_seconds_count");
    let more = || async {
        let now = sum(&cluster.metrics(super::NODE).await, "tranche_watchdog_tick_duration_seconds_count");
        (now >= looks + 8.0).then_some(())
    };
    wait_until("eight more looks", SOON, more).await;
    assert_eq!(
        container_run(&cluster.wait_ready("greedy").await),
        container_run(&greedy),
        "ended though it was within its grant"
    );
    drop(greedys);

    let greedys = Process::of(&cluster, &board, &greedy, 4096);
    let begin = std::time::Instant::now();
    let ended = || async {
        let pod: Pod = cluster.api().get("greedy").await.ok()?;
        let status = pod.status?.container_statuses?.into_iter().next()?;
        let code = status.last_state?.terminated?.exit_code;
        (status.restart_count == container_run(&greedy).1 + 1 && code == 137).then_some(())
    };
    wait_until("the greedy one to be ended", SOON, ended).await;
    println!("seen ended after {:.1} s", begin.elapsed().as_secs_f64());
    let event = wait_event(&cluster, "greedy", "ProcessEnded").await;
    assert!(event.contains("4096 MiB of the 2000 MiB"), "{event}");
    // Whoever asks why is told both, though the pod has its share.
    let kubeconfig = cluster.rig.run(&["kubeconfig"]);
    let explained = || async {
        let out = Command::new(env!("CARGO_BIN_EXE_tranche"))
            .args(["explain", "pod/greedy", "-n", &cluster.namespace, "--kubeconfig", kubeconfig.trim()])
            .output()
            .expect("the program can be run");
        let said = String::from_utf8_lossy(&out.stdout).into_owned();
        let words = ["container main ended with exit code 137", "ProcessEnded"];
        (out.status.success() && words.iter().all(|words| said.contains(words))).then_some(())
    };
    wait_until("explain to tell that the process was ended", SOON, explained).await;
    let metrics = cluster.metrics(super::NODE).await;
    let counted = |name: &str, pod: &str| sum(&metrics, &row(name, pod));
    assert_eq!((counted("violations_total", "greedy"), counted("terminations_total", "greedy")), (1.0, 1.0));
    assert_eq!((counted("violations_total", "modest"), counted("terminations_total", "modest")), (0.0, 0.0));
    assert_eq!(counted("memory_limit_bytes", "greedy"), 2000.0 * 1_048_576.0);
    assert_eq!(
        container_run(&cluster.wait_ready("modest").await),
        container_run(&modest),
        "the neighbour was disturbed"
    );
    drop((greedys, modests));
    cluster.wait_ready("greedy").await;
    cluster.end().await;
}
