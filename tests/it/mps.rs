//! The supervisor with NVIDIA's real control daemon, which runs without a GPU: as far as limits, life and
//! death go. It is found by TRANCHE_TEST_MPS_CONTROL, or in the cache that the rig fills; else these tests are
//! skipped, loudly. Boards are ours, and so are servers where a test needs them.

mod pipe;
mod shm;

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tranche::daemon::shm::Bounds;
use tranche::daemon::{DaemonMounts, Folder, Process};
use tranche::model::names::DeviceUuid;
use tranche::model::quantity::Bytes;
use tranche::model::share::{MpsGroup, MpsLimits, Percent};
use tranche::mps::config::{MpsSettings, Timing};
use tranche::mps::{GroupError, MpsMetrics, Supervisor, Tools};
use tranche::nvml::{ComputeMode, ComputeModes, NvmlError};
use tranche::ops::metrics::registry;
use tranche::supervisor::protocol::{DaemonPhase, DaemonState, MpsClient};
use tranche::supervisor::{CLIENT_FOLDER, Client, Daemons, SHM_FOLDER};

/// What a test waits for must have come within this time.
const DEADLINE: Duration = Duration::from_secs(30);

/// The real program.
fn control() -> PathBuf {
    let path = std::env::var_os("TRANCHE_TEST_MPS_CONTROL").map(PathBuf::from);
    path.expect("TRANCHE_TEST_MPS_CONTROL names usr/bin/nvidia-cuda-mps-control below what hack/rig/rig build-driver prints")
}

/// Boards that remember their mode.
#[derive(Clone, Default)]
struct Boards(Arc<Mutex<BoardsState>>);

#[derive(Default)]
struct BoardsState {
    modes: BTreeMap<String, ComputeMode>,
    sets: usize,
    broken: bool,
}

impl Boards {
    fn mode(&self, gpu: &str) -> ComputeMode {
        self.0.lock().unwrap().modes.get(gpu).copied().unwrap_or(ComputeMode::Default)
    }
    fn sets(&self) -> usize {
        self.0.lock().unwrap().sets
    }
    fn forget(&self) {
        self.0.lock().unwrap().modes.clear();
    }
    fn broken(&self, broken: bool) {
        self.0.lock().unwrap().broken = broken;
    }
}

impl ComputeModes for Boards {
    async fn compute_mode(&self, gpu: &DeviceUuid) -> Result<Option<ComputeMode>, NvmlError> {
        let broken = self.0.lock().unwrap().broken;
        if broken { Err(NvmlError::DriverNotLoaded) } else { Ok(Some(self.mode(gpu.as_str()))) }
    }
    async fn set_compute_mode(&self, gpu: &DeviceUuid, mode: ComputeMode) -> Result<(), NvmlError> {
        let mut state = self.0.lock().unwrap();
        if state.broken {
            return Err(NvmlError::DriverNotLoaded);
        }
        state.sets += 1;
        state.modes.insert(gpu.to_string(), mode);
        Ok(())
    }
}

/// A node with a folder for daemons.
struct TestNode {
    dir: TempDir,
    control: PathBuf,
    /// Where the program is looked for, if it is.
    driver_root: Option<PathBuf>,
    boards: Boards,
    mounts: DaemonMounts,
    bounds: Bounds,
    keep_warm: Duration,
    backoff: Duration,
}

/// Daemons outlive their supervisor, but not the test.
impl Drop for TestNode {
    fn drop(&mut self) {
        for entry in fs::read_dir(self.mps()).into_iter().flatten().flatten() {
            let folder = Folder::new(entry.path());
            if let Some(daemon) = Process::daemon_of(&folder) {
                daemon.kill().unwrap();
            }
            if entry.path().is_dir() {
                let _ = folder.remove();
            }
        }
    }
}

impl TestNode {
    fn new() -> Self {
        Self::with(control())
    }

    fn with(control: PathBuf) -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("mps")).unwrap();
        Self {
            dir,
            control,
            driver_root: None,
            boards: Boards::default(),
            mounts: DaemonMounts::None,
            bounds: Bounds::DEFAULT,
            keep_warm: Duration::from_secs(600),
            backoff: Duration::from_millis(20),
        }
    }

    /// Where other users reach the folders, as they do in a container.
    fn in_the_open() -> Self {
        let node = Self::new();
        fs::set_permissions(node.dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        node
    }

    fn mps(&self) -> PathBuf {
        self.dir.path().join("mps")
    }

    /// A supervisor; another one is what a restart is.
    fn supervisor(&self) -> Supervisor<Boards> {
        let settings = MpsSettings {
            folder: self.mps(),
            control: self.driver_root.is_none().then(|| self.control.clone()),
            driver: self.driver_root.clone().unwrap_or("/nonexistent".into()).into(),
            launcher: env!("CARGO_BIN_EXE_tranche").into(),
            mounts: self.mounts,
            shm: self.bounds,
            sysfs_root: "/sys".into(),
            cgroup_root: self.dir.path().join("no-cgroups"),
            ops_address: "127.0.0.1:0".parse().unwrap(),
            timing: Timing {
                keep_warm: self.keep_warm,
                check_interval: Duration::from_secs(3600),
                backoff: self.backoff,
            },
        };
        let metrics = MpsMetrics::register(&mut registry());
        Supervisor::new(Tools::new(settings, self.boards.clone(), metrics))
    }

    fn folder(&self, group: &MpsGroup) -> Folder {
        Folder::new(self.mps().join(group.folder()))
    }

    /// What is wanted of the group, as it is written down.
    fn record(&self, group: &MpsGroup) -> PathBuf {
        self.mps().join(".records").join(format!("{}.json", group.folder()))
    }

    fn clients_find_it(&self, group: &MpsGroup) -> bool {
        let files = ["control", "log"].map(|name| self.folder(group).client().join(name).exists());
        assert_eq!(files[0], files[1], "both or none");
        files[0]
    }

    /// What somebody else asks of the daemon.
    fn ask(&self, group: &MpsGroup, command: &str) -> String {
        let output = Command::new("sh")
            .args(["-c", "echo \"$1\" | \"$2\"", "sh", command])
            .arg(&self.control)
            .env("CUDA_MPS_PIPE_DIRECTORY", self.folder(group).pipe())
            .output()
            .unwrap();
        String::from_utf8(output.stdout).unwrap()
    }
}

fn group(names: &[&str]) -> MpsGroup {
    MpsGroup::new(names.iter().map(|name| DeviceUuid::new(*name)))
}

/// 0 is no limit.
fn limits(mib: &[u64], compute: u8) -> MpsLimits {
    let memory = mib.iter().map(|mib| (*mib != 0).then(|| Bytes::from_mib(*mib))).collect();
    MpsLimits { memory, compute: Percent::try_from(compute).ok() }
}

fn pid(state: &DaemonState) -> u32 {
    match state.phase {
        DaemonPhase::Serving { pid } | DaemonPhase::Settling { pid } | DaemonPhase::Resting { pid } => pid,
        DaemonPhase::Down { ref reason } => panic!("down: {reason}"),
    }
}

fn only(supervisor: &Supervisor<Boards>) -> DaemonState {
    let mut states = supervisor.states();
    assert_eq!(states.len(), 1, "{states:?}");
    states.remove(0)
}

/// Looks again and again until the only daemon is as it should be.
async fn checked_until(supervisor: &Supervisor<Boards>, what: impl Fn(&DaemonState) -> bool) -> DaemonState {
    let deadline = Instant::now() + DEADLINE;
    loop {
        supervisor.check().await;
        let state = only(supervisor);
        if what(&state) {
            return state;
        }
        assert!(Instant::now() < deadline, "{state:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn is_serving(state: &DaemonState) -> bool {
    matches!(state.phase, DaemonPhase::Serving { .. })
}

fn kill(pid: u32, signal: &str) {
    assert!(Command::new("kill").args(["-s", signal, &pid.to_string()]).status().unwrap().success());
}

#[tokio::test]
#[ignore = "needs NVIDIA's MPS control daemon"]
async fn a_daemon_serves_with_exactly_the_limits_and_asking_again_starts_nothing() {
    let node = TestNode::new();
    let (supervisor, gpu) = (node.supervisor(), group(&["GPU-1"]));
    let state = supervisor.keep(&gpu, true, &limits(&[2000], 25)).await.unwrap();
    assert!(is_serving(&state), "{state:?}");
    assert_eq!(node.ask(&gpu, "get_default_device_pinned_mem_limit 0"), "1G\n");
    assert_eq!(node.ask(&gpu, "get_default_active_thread_percentage"), "25.0\n");
    assert_eq!(
        (state.memory_answers.as_slice(), state.compute_answer.as_str()),
        (&["1G".to_owned()][..], "25.0")
    );
    assert_eq!(node.boards.mode("GPU-1"), ComputeMode::ExclusiveProcess);
    assert!(node.clients_find_it(&gpu));
    let folder = node.folder(&gpu);
    assert_eq!(folder.client(), folder.path().join(CLIENT_FOLDER), "where node looks for it");
    assert_eq!(folder.shm(), folder.path().join(SHM_FOLDER));

    let sets = node.boards.sets();
    let again = supervisor.keep(&gpu, true, &limits(&[2000], 25)).await.unwrap();
    assert_eq!(again, state);
    assert_eq!(node.boards.sets(), sets);
}

#[tokio::test]
#[ignore = "needs NVIDIA's MPS control daemon"]
async fn limits_change_on_the_same_daemon_down_to_none() {
    let node = TestNode::new();
    let (supervisor, gpus) = (node.supervisor(), group(&["GPU-1", "GPU-2"]));
    let first = supervisor.keep(&gpus, false, &limits(&[500, 20000], 50)).await.unwrap();
    assert_eq!(first.memory_answers, ["500M", "19G"]);
    let second = supervisor.keep(&gpus, false, &limits(&[0, 700], 0)).await.unwrap();
    assert_eq!(second.memory_answers, ["", "700M"]);
    assert_eq!(second.compute_answer, "100.0");
    assert_eq!(pid(&second), pid(&first));
    assert_eq!(node.ask(&gpus, "get_default_device_pinned_mem_limit 0"), "");
    assert!(node.clients_find_it(&gpus));
}

#[tokio::test]
#[ignore = "needs NVIDIA's MPS control daemon"]
async fn a_killed_daemon_is_noticed_and_comes_back_with_its_limits() {
    let mut node = TestNode::new();
    // Long enough to be seen by whoever looks after the check that notices.
    node.backoff = Duration::from_secs(1);
    let (supervisor, gpu) = (node.supervisor(), group(&["GPU-1"]));
    let first = pid(&supervisor.keep(&gpu, true, &limits(&[3000], 30)).await.unwrap());
    kill(first, "KILL");
    wait_until_gone(first);
    let down = checked_until(&supervisor, |state| !is_serving(state)).await;
    let DaemonPhase::Down { reason } = &down.phase else { panic!("{down:?}") };
    assert!(reason.contains(&format!("process {first}")), "{reason}");
    assert!(!node.clients_find_it(&gpu), "nobody comes in before the limits are in force");
    let back = checked_until(&supervisor, is_serving).await;
    assert_eq!(back.deaths, 1);
    assert_ne!(pid(&back), first);
    assert_eq!(node.ask(&gpu, "get_default_device_pinned_mem_limit 0"), "2G\n");
    assert!(node.clients_find_it(&gpu));
}

#[tokio::test]
#[ignore = "needs NVIDIA's MPS control daemon"]
async fn a_daemon_with_a_shorter_number_than_the_last_one_is_known() {
    let node = TestNode::new();
    let (supervisor, gpu) = (node.supervisor(), group(&["GPU-1"]));
    let first = pid(&supervisor.keep(&gpu, false, &limits(&[3000], 30)).await.unwrap());
    kill(first, "KILL");
    wait_until_gone(first);
    fs::write(node.folder(&gpu).pipe().join("nvidia-cuda-mps-control.pid"), "4194303999").unwrap();
    let state = supervisor.keep(&gpu, false, &limits(&[3000], 30)).await.unwrap();
    assert_eq!(node.ask(&gpu, "get_default_active_thread_percentage"), "30.0\n");
    assert_ne!(pid(&state), first);
}

#[tokio::test]
#[ignore = "needs NVIDIA's MPS control daemon"]
async fn a_keep_finds_out_about_a_death_by_itself() {
    let node = TestNode::new();
    let (supervisor, gpu) = (node.supervisor(), group(&["GPU-1"]));
    let first = pid(&supervisor.keep(&gpu, false, &limits(&[3000], 30)).await.unwrap());
    kill(first, "KILL");
    wait_until_gone(first);
    let state = supervisor.keep(&gpu, false, &limits(&[3000], 30)).await.unwrap();
    assert_ne!(pid(&state), first);
    assert_eq!(state.deaths, 1);
    assert!(node.clients_find_it(&gpu));
}

fn wait_until_gone(pid: u32) {
    let deadline = Instant::now() + DEADLINE;
    while Process::of(pid).is_some() {
        assert!(Instant::now() < deadline, "{pid} ends");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[tokio::test]
#[ignore = "needs NVIDIA's MPS control daemon"]
async fn a_supervisor_that_starts_again_adopts_what_lives() {
    let node = TestNode::new();
    let gpu = group(&["GPU-1"]);
    let first = node.supervisor().keep(&gpu, true, &limits(&[2000], 25)).await.unwrap();
    let log = node.folder(&gpu).log().join("control.log");
    let sets_before = fs::read_to_string(&log).unwrap().matches("Cmd:set").count();

    let supervisor = node.supervisor();
    supervisor.adopt().await.unwrap();
    assert_eq!(only(&supervisor), first);
    let sets = fs::read_to_string(&log).unwrap().matches("Cmd:set").count();
    assert_eq!(sets, sets_before, "it was only looked at");
    assert!(node.clients_find_it(&gpu));
}

#[tokio::test]
#[ignore = "needs NVIDIA's MPS control daemon"]
async fn a_daemon_that_died_meanwhile_comes_back_after_a_restart() {
    let node = TestNode::new();
    let gpu = group(&["GPU-1"]);
    let first = pid(&node.supervisor().keep(&gpu, true, &limits(&[2000], 25)).await.unwrap());
    kill(first, "KILL");
    wait_until_gone(first);
    let supervisor = node.supervisor();
    supervisor.adopt().await.unwrap();
    assert!(!node.clients_find_it(&gpu));
    let back = checked_until(&supervisor, is_serving).await;
    assert_eq!((back.deaths, back.limits), (1, Some(limits(&[2000], 25))));
}

#[tokio::test]
#[ignore = "needs NVIDIA's MPS control daemon"]
async fn a_daemon_that_was_started_and_not_noted_is_adopted_too() {
    let node = TestNode::new();
    let gpu = group(&["GPU-1"]);
    let first = pid(&node.supervisor().keep(&gpu, false, &limits(&[2000], 25)).await.unwrap());
    // As a crash between start and note would leave it.
    let note = node.record(&gpu);
    let mut record: serde_json::Value = serde_json::from_slice(&fs::read(&note).unwrap()).unwrap();
    record["daemon"] = serde_json::Value::Null;
    fs::write(&note, record.to_string()).unwrap();
    let supervisor = node.supervisor();
    supervisor.adopt().await.unwrap();
    assert_eq!(pid(&only(&supervisor)), first);
}

#[tokio::test]
#[ignore = "needs NVIDIA's MPS control daemon"]
async fn what_somebody_else_changed_is_set_again() {
    let node = TestNode::new();
    let (supervisor, gpu) = (node.supervisor(), group(&["GPU-1"]));
    let first = supervisor.keep(&gpu, true, &limits(&[2000], 25)).await.unwrap();
    node.ask(&gpu, "set_default_device_pinned_mem_limit 0 80G");
    node.ask(&gpu, "set_default_active_thread_percentage 100");
    node.boards.forget();
    supervisor.check().await;
    assert_eq!(only(&supervisor), first);
    assert_eq!(node.ask(&gpu, "get_default_device_pinned_mem_limit 0"), "1G\n");
    assert_eq!(node.ask(&gpu, "get_default_active_thread_percentage"), "25.0\n");
    assert_eq!(node.boards.mode("GPU-1"), ComputeMode::ExclusiveProcess);
}

#[tokio::test]
#[ignore = "needs NVIDIA's MPS control daemon"]
async fn a_group_that_rests_gives_its_boards_back_and_its_daemon_is_warm_for_the_next() {
    let node = TestNode::new();
    let (supervisor, gpu) = (node.supervisor(), group(&["GPU-1"]));
    supervisor.rest(&gpu).await.expect("a group that is not known is fine");
    let first = pid(&supervisor.keep(&gpu, true, &limits(&[2000], 25)).await.unwrap());
    supervisor.rest(&gpu).await.unwrap();
    supervisor.rest(&gpu).await.unwrap();
    let resting = only(&supervisor);
    assert_eq!(resting.phase, DaemonPhase::Resting { pid: first });
    assert_eq!(resting.limits, None);
    assert!(!node.clients_find_it(&gpu));
    assert_eq!(node.boards.mode("GPU-1"), ComputeMode::Default);
    supervisor.check().await;
    let next = supervisor.keep(&gpu, true, &limits(&[5000], 50)).await.unwrap();
    assert_eq!((pid(&next), next.memory_answers), (first, vec!["4G".to_owned()]));
    assert!(node.clients_find_it(&gpu));
}

#[tokio::test]
#[ignore = "needs NVIDIA's MPS control daemon"]
async fn a_daemon_that_nobody_needs_for_long_goes_with_its_folder() {
    let mut node = TestNode::new();
    node.keep_warm = Duration::ZERO;
    let (supervisor, gpu) = (node.supervisor(), group(&["GPU-1"]));
    let first = pid(&supervisor.keep(&gpu, true, &limits(&[2000], 25)).await.unwrap());
    supervisor.check().await;
    assert_eq!(pid(&only(&supervisor)), first, "one that is needed stays");
    supervisor.rest(&gpu).await.unwrap();
    supervisor.check().await;
    assert_eq!(supervisor.states(), []);
    assert!(Process::of(first).is_none() && !node.folder(&gpu).path().exists());
    let next = supervisor.keep(&gpu, true, &limits(&[2000], 25)).await.unwrap();
    assert_ne!(pid(&next), first);
}

#[tokio::test]
#[ignore = "needs NVIDIA's MPS control daemon"]
async fn one_board_has_one_daemon() {
    let node = TestNode::new();
    let supervisor = node.supervisor();
    let (one, both) = (group(&["GPU-1"]), group(&["GPU-1", "GPU-2"]));
    let first = pid(&supervisor.keep(&one, true, &limits(&[2000], 25)).await.unwrap());
    let refused = supervisor.keep(&both, true, &limits(&[2000, 2000], 25)).await.unwrap_err();
    assert!(matches!(&refused, GroupError::Overlap { .. }), "{refused}");
    assert_eq!(node.boards.mode("GPU-2"), ComputeMode::Default);
    supervisor.rest(&one).await.unwrap();
    supervisor.keep(&both, true, &limits(&[2000, 2000], 25)).await.unwrap();
    assert!(Process::of(first).is_none(), "the one that rested made room");
    assert!(supervisor.keep(&one, true, &limits(&[2000], 25)).await.is_err());
}

#[tokio::test]
#[ignore = "needs NVIDIA's MPS control daemon"]
async fn claims_may_each_have_a_daemon_on_one_board() {
    let node = TestNode::new();
    let supervisor = node.supervisor();
    let shared = group(&["GPU-1"]);
    supervisor.keep(&shared, true, &limits(&[2000], 25)).await.unwrap();
    let [one, two] = ["uid-1", "uid-2"].map(|claim| group(&["GPU-1"]).of_claim(claim.into()));
    let refused = supervisor.keep(&one, false, &limits(&[2000], 25)).await.unwrap_err();
    assert!(matches!(&refused, GroupError::Overlap { .. }), "the board's daemon is at work: {refused}");
    supervisor.rest(&shared).await.unwrap();

    let first = supervisor.keep(&one, false, &limits(&[2000], 25)).await.unwrap();
    let second = supervisor.keep(&two, false, &limits(&[5000], 50)).await.unwrap();
    assert_ne!(pid(&first), pid(&second));
    let answers = [&first, &second].map(|state| state.memory_answers.clone());
    assert_eq!(answers, [vec!["1G".to_owned()], vec!["4G".to_owned()]], "each has its own default");
    assert_eq!(node.boards.mode("GPU-1"), ComputeMode::Default, "the board takes both servers");
    assert!(node.clients_find_it(&one) && node.clients_find_it(&two));
    assert!(supervisor.keep(&shared, true, &limits(&[2000], 25)).await.is_err(), "theirs are at work");

    // A mode that somebody else sets would keep the next server out.
    node.boards.set_compute_mode(&"GPU-1".into(), ComputeMode::ExclusiveProcess).await.unwrap();
    kill(pid(&second), "KILL");
    let deadline = Instant::now() + DEADLINE;
    let restarted = loop {
        supervisor.check().await;
        let states = supervisor.states();
        let find = |group: &MpsGroup| states.iter().find(|state| state.group == *group).cloned();
        assert_eq!(find(&one).map(|state| pid(&state)), Some(pid(&first)), "the other claim's goes on");
        match find(&two).filter(is_serving) {
            Some(state) if pid(&state) != pid(&second) => break state,
            _ => assert!(Instant::now() < deadline, "{states:?}"),
        }
    };
    assert_eq!(restarted.memory_answers, ["4G"]);
    assert_eq!(node.boards.mode("GPU-1"), ComputeMode::Default);

    // A claim that has gone does not come back: nothing is kept warm for it.
    supervisor.rest(&two).await.unwrap();
    supervisor.check().await;
    assert!(Process::of(pid(&restarted)).is_none() && !node.folder(&two).path().exists());
    assert_eq!(only(&supervisor).group, one);
    // A crash came between the folder and the record of a third.
    let third = node.folder(&group(&["GPU-1"]).of_claim("uid-3".into()));
    std::fs::create_dir_all(third.path().join("pipe")).unwrap();
    let again = node.supervisor();
    again.adopt().await.unwrap();
    assert_eq!(only(&again).group, one, "a supervisor that starts again knows whose it is");
    assert!(!third.path().exists() && node.folder(&one).path().exists());
}

#[tokio::test]
async fn what_cannot_be_meant_is_refused() {
    let node = TestNode::with("/nonexistent".into());
    let supervisor = node.supervisor();
    for (devices, memory) in [(&[][..], &[][..]), (&["../x"], &[1]), (&["GPU-1"], &[1, 2]), (&["GPU-1"], &[])]
    {
        let refused = supervisor.keep(&group(devices), false, &limits(memory, 0)).await.unwrap_err();
        assert!(matches!(&refused, GroupError::Invalid(_)), "{refused}");
    }
    let tiny = MpsLimits { memory: vec![Some(Bytes(1000))], compute: None };
    let refused = supervisor.keep(&group(&["GPU-1"]), false, &tiny).await.unwrap_err();
    assert!(refused.to_string().contains("below 1 MiB"), "{refused}");
    assert_eq!(supervisor.states(), []);
}

#[tokio::test]
async fn a_first_keep_that_fails_leaves_nothing_wanted() {
    let node = TestNode::with("/nonexistent".into());
    let (supervisor, gpu) = (node.supervisor(), group(&["GPU-1"]));
    let failed = supervisor.keep(&gpu, true, &limits(&[2000], 25)).await.unwrap_err();
    assert!(failed.to_string().contains("correct --mps-control"), "{failed}");
    assert_eq!(node.boards.mode("GPU-1"), ComputeMode::Default);
    assert!(!node.clients_find_it(&gpu));
    supervisor.check().await;
    assert_eq!(supervisor.states(), [], "nothing is tried again that nobody has");
}

#[tokio::test]
#[ignore = "needs NVIDIA's MPS control daemon"]
async fn boards_that_cannot_be_set_fail_a_keep_and_are_given_back_later() {
    let node = TestNode::new();
    let (supervisor, gpu) = (node.supervisor(), group(&["GPU-1"]));
    supervisor.keep(&gpu, true, &limits(&[2000], 25)).await.unwrap();
    node.boards.broken(true);
    let failed = supervisor.rest(&gpu).await.unwrap_err();
    assert!(failed.to_string().contains("compute mode of GPU-1"), "{failed}");
    assert!(!node.clients_find_it(&gpu));
    assert!(supervisor.keep(&gpu, true, &limits(&[2000], 25)).await.is_err());
    node.boards.broken(false);
    supervisor.check().await;
    assert_eq!(node.boards.mode("GPU-1"), ComputeMode::Default);
}

#[tokio::test]
#[ignore = "needs NVIDIA's MPS control daemon"]
async fn a_mute_daemon_without_servers_is_replaced() {
    let node = TestNode::new();
    let (supervisor, gpu) = (node.supervisor(), group(&["GPU-1"]));
    let first = pid(&supervisor.keep(&gpu, false, &limits(&[2000], 25)).await.unwrap());
    kill(first, "STOP");
    supervisor.check().await;
    assert!(!node.clients_find_it(&gpu));
    assert!(Process::of(first).is_some(), "it may just be slow");
    let back = checked_until(&supervisor, is_serving).await;
    assert_ne!(pid(&back), first);
    assert!(Process::of(first).is_none());
}

/// Somebody who has the daemon's one session open, as a tenant can.
struct Session(Child);

impl Session {
    fn open(node: &TestNode, group: &MpsGroup) -> Self {
        let mut session = Self(Self::start(node, group));
        let deadline = Instant::now() + DEADLINE;
        // It answers others until it has heard this one.
        while !node.ask(group, "get_default_active_thread_percentage").is_empty() {
            assert!(Instant::now() < deadline, "the session does not begin");
            // It came while another was heard.
            if session.0.try_wait().unwrap().is_some() {
                session.0 = Self::start(node, group);
            }
        }
        session
    }

    fn start(node: &TestNode, group: &MpsGroup) -> Child {
        let mut child = Command::new(&node.control)
            .env("CUDA_MPS_PIPE_DIRECTORY", node.folder(group).client())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        // One that was turned away reads nothing.
        let _ = writeln!(child.stdin.as_mut().unwrap(), "get_default_active_thread_percentage");
        child
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// Somebody who asks again and again.
struct Talker {
    shell: Child,
    log: tempfile::NamedTempFile,
}

impl Talker {
    fn start(node: &TestNode, group: &MpsGroup) -> Self {
        let log = tempfile::NamedTempFile::new().unwrap();
        let shell = Command::new("sh")
            .args(["-c", r#"while :; do [ "$(echo get_server_list | "$1" 2>&1)" ] && echo no >>"$2"; done"#])
            .arg("sh")
            .args([&node.control, log.path()])
            .env("CUDA_MPS_PIPE_DIRECTORY", node.folder(group).pipe())
            .spawn()
            .unwrap();
        Self { shell, log }
    }

    /// How often it was told that it cannot be heard.
    fn turned_away(&self) -> usize {
        fs::read_to_string(self.log.path()).unwrap().lines().count()
    }
}

impl Drop for Talker {
    fn drop(&mut self) {
        self.shell.kill().unwrap();
        self.shell.wait().unwrap();
    }
}

#[tokio::test]
#[ignore = "needs NVIDIA's MPS control daemon"]
async fn a_session_that_somebody_keeps_open_takes_nothing_from_those_who_have_their_shares() {
    let node = TestNode::new();
    let (supervisor, gpu) = (node.supervisor(), group(&["GPU-1"]));
    let before = supervisor.keep(&gpu, true, &limits(&[2000], 25)).await.unwrap();
    let session = Session::open(&node, &gpu);
    supervisor.check().await;
    assert_eq!(only(&supervisor), before);
    assert!(node.clients_find_it(&gpu), "their next processes come in");
    // Nobody gets what is not in force; the others keep what they have.
    let refused = supervisor.keep(&gpu, true, &limits(&[4000], 50)).await.unwrap_err();
    assert!(refused.to_string().contains("serves one client at a time"), "{refused}");
    assert_eq!(only(&supervisor), before);
    assert!(node.clients_find_it(&gpu));
    drop(session);
    let after = supervisor.keep(&gpu, true, &limits(&[4000], 50)).await.unwrap();
    assert_eq!((pid(&after), after.deaths), (pid(&before), 0));
    assert_eq!(after.memory_answers, ["3G"]);
}

#[tokio::test]
#[ignore = "needs NVIDIA's MPS control daemon"]
async fn a_daemon_is_heard_among_those_who_talk_to_it_without_end() {
    let node = TestNode::new();
    let (supervisor, gpu) = (node.supervisor(), group(&["GPU-1"]));
    let before = supervisor.keep(&gpu, true, &limits(&[2000], 25)).await.unwrap();
    let talkers: Vec<_> = (0..3).map(|_| Talker::start(&node, &gpu)).collect();
    let deadline = Instant::now() + 3 * DEADLINE;
    let (mut percent, mut was_refused) = (25, false);
    while talkers.iter().any(|talker| talker.turned_away() < 10) || percent < 30 {
        assert!(Instant::now() < deadline, "they are heard all the time");
        supervisor.check().await;
        let seen = only(&supervisor);
        match &seen.phase {
            DaemonPhase::Serving { .. } => assert!(node.clients_find_it(&gpu)),
            DaemonPhase::Down { reason } => assert!(is_of_a_busy_machine(reason), "{seen:?}"),
            // Its limits were being changed when it could not be asked any more.
            _ => assert!(was_refused, "{seen:?}"),
        }
        let next = (percent + 1).min(90);
        match supervisor.keep(&gpu, true, &limits(&[2000], next)).await {
            Ok(now) => {
                assert!(is_serving(&now) && node.clients_find_it(&gpu), "{now:?}");
                assert_eq!((pid(&now), now.deaths), (pid(&before), 0));
                assert_eq!(now.compute_answer, format!("{next}.0"));
                (percent, was_refused) = (next, false);
            }
            Err(refused) => {
                assert!(is_of_a_busy_machine(&refused.to_string()), "{refused}");
                was_refused = true;
            }
        }
    }
}

/// On a busy machine the talkers may have the daemon for as long as one question may take, or the program that asks may
/// take that long by itself. Whoever wants a share asks again.
fn is_of_a_busy_machine(words: &str) -> bool {
    ["serves one client at a time", "did not answer within"].iter().any(|known| words.contains(known))
}

/// A control program that has servers: those that a file lists. All else is the real one's business.
/// A server does not end in peace if a file says so.
fn with_servers(real: &Path, dir: &Path) -> PathBuf {
    let path = dir.join("nvidia-cuda-mps-control");
    let script = format!(
        r#"#!/bin/sh
real={real} dir={dir}
[ "$1" = -d ] && exec "$real" -d
while read -r command server rest; do
  echo "$command $server $rest" >>"$dir/asked"
  case $command in
    get_server_list) cat "$dir/servers" ;;
    get_server_status) echo ACTIVE ;;
    get_device_pinned_mem_limit) cat "$dir/memory" ;;
    get_active_thread_percentage) cat "$dir/percent" ;;
    set_device_pinned_mem_limit) echo "${{rest#* }}" >"$dir/memory" ;;
    set_active_thread_percentage) echo "$rest.0" >"$dir/percent" ;;
    get_client_list) [ "$server" = 11 ] && echo 501 && echo 502 ;;
    terminate_client) [ "$rest" = 501 ] || echo "Invalid process $rest!" ;;
    shutdown_server) [ -e "$dir/stubborn" ] && [ "$rest" != -f ] || : >"$dir/servers" ;;
    *) echo "$command $server $rest" | "$real" ;;
  esac
done
"#,
        real = real.display(),
        dir = dir.display()
    );
    fs::write(&path, script).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    for (name, text) in [("servers", ""), ("memory", ""), ("percent", "100.0\n"), ("asked", "")] {
        fs::write(dir.join(name), text).unwrap();
    }
    path
}

fn bed_with_servers() -> (TestNode, TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let node = TestNode::with(with_servers(&control(), dir.path()));
    (node, dir)
}

#[tokio::test]
#[ignore = "needs NVIDIA's MPS control daemon"]
async fn a_running_server_gets_the_limits_too_and_keeps_them() {
    let (node, files) = bed_with_servers();
    let (supervisor, gpu) = (node.supervisor(), group(&["GPU-1"]));
    fs::write(files.path().join("servers"), "11\n").unwrap();
    let state = supervisor.keep(&gpu, false, &limits(&[500], 25)).await.unwrap();
    assert_eq!((state.servers[0].pid, state.servers[0].state.as_str()), (11, "ACTIVE"));
    let read = |name: &str| fs::read_to_string(files.path().join(name)).unwrap();
    assert_eq!((read("memory"), read("percent")), ("500M\n".to_owned(), "25.0\n".to_owned()));
    // Somebody who may command the daemon loosens what new clients of the server get.
    fs::write(files.path().join("memory"), "80G\n").unwrap();
    supervisor.check().await;
    assert_eq!(read("memory"), "500M\n");
    assert!(node.clients_find_it(&gpu));
}

#[tokio::test]
#[ignore = "needs NVIDIA's MPS control daemon"]
async fn clients_are_told_and_terminated() {
    let (node, files) = bed_with_servers();
    let (supervisor, gpu) = (node.supervisor(), group(&["GPU-1"]));
    assert_eq!(supervisor.clients(&gpu).await.unwrap(), []);
    supervisor.keep(&gpu, false, &limits(&[500], 25)).await.unwrap();
    fs::write(files.path().join("servers"), "11\n").unwrap();
    let clients = supervisor.clients(&gpu).await.unwrap();
    assert_eq!(clients, [MpsClient { server: 11, pid: 501 }, MpsClient { server: 11, pid: 502 }]);
    supervisor.terminate(&gpu, clients[0]).await.unwrap();
    let refused = supervisor.terminate(&gpu, clients[1]).await.unwrap_err();
    assert!(refused.to_string().contains("Invalid process 502!"), "{refused}");
}

#[tokio::test]
#[ignore = "needs NVIDIA's MPS control daemon"]
async fn servers_end_before_a_group_rests_by_force_if_need_be() {
    let (node, files) = bed_with_servers();
    let (supervisor, gpu) = (node.supervisor(), group(&["GPU-1"]));
    supervisor.keep(&gpu, true, &limits(&[500], 25)).await.unwrap();
    for name in ["servers", "stubborn"] {
        fs::write(files.path().join(name), "11\n").unwrap();
    }
    supervisor.rest(&gpu).await.unwrap();
    let asked = fs::read_to_string(files.path().join("asked")).unwrap();
    let peaceful = asked.find("shutdown_server 11 \n").expect("asked first");
    assert!(asked[peaceful..].contains("shutdown_server 11 -f"), "{asked}");
    assert!(matches!(only(&supervisor).phase, DaemonPhase::Resting { .. }));
    assert_eq!(node.boards.mode("GPU-1"), ComputeMode::Default);
}

/// A process of `tranche mps`, ended with the test.
struct Served {
    child: Child,
    log: PathBuf,
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl TestNode {
    fn serve(&self) -> Served {
        let log = self.dir.path().join("log");
        let child = Command::new(env!("CARGO_BIN_EXE_tranche"))
            .args([
                "mps",
                "--ops-address",
                "127.0.0.1:0",
                "--ops-socket",
                "off",
                "--check-interval",
                "100ms",
                "--mps-mounts",
                "none",
            ])
            .args(["--driver-root", "/nonexistent", "--cgroup-root", "/nonexistent"])
            .arg("--mps-dir")
            .arg(self.mps())
            .arg("--mps-control")
            .arg(&self.control)
            .stdin(Stdio::null())
            .stderr(fs::File::create(&log).unwrap())
            .spawn()
            .unwrap();
        Served { child, log }
    }
}

impl Served {
    fn wait_until_it_says(&mut self, what: &str) {
        let deadline = Instant::now() + DEADLINE;
        while !fs::read_to_string(&self.log).unwrap().contains(what) {
            let ended = self.child.try_wait().unwrap();
            let log = || fs::read_to_string(&self.log).unwrap();
            assert!(ended.is_none() && Instant::now() < deadline, "{what:?} never came: {}", log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn wait_until_it_ends(&mut self) -> std::process::ExitStatus {
        let deadline = Instant::now() + DEADLINE;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < deadline, "it ends: {}", fs::read_to_string(&self.log).unwrap());
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

#[test]
#[ignore = "needs NVIDIA's MPS control daemon"]
fn the_process_answers_ends_what_rests_and_leaves_what_serves() {
    let node = TestNode::new();
    let (one, two) = (group(&["GPU-1"]), group(&["GPU-2"]));
    let mut served = node.serve();
    served.wait_until_it_says("questions are answered");
    let client = Client::new(&node.mps());
    let serving = pid(&client.keep(&one, false, &limits(&[2000], 25)).unwrap());
    let resting = pid(&client.keep(&two, false, &limits(&[2000], 25)).unwrap());
    client.rest(&two).unwrap();
    // Without a driver there are no boards to set.
    let refused = client.keep(&two, true, &limits(&[2000], 25)).unwrap_err().to_string();
    assert!(refused.contains("compute mode of GPU-2") && refused.contains("libnvidia-ml"), "{refused}");

    kill(served.child.id(), "TERM");
    assert!(served.wait_until_it_ends().success());
    assert!(Process::of(serving).is_some(), "it holds tenants");
    assert!(Process::of(resting).is_none(), "it held nobody");

    let mut next = node.serve();
    next.wait_until_it_says("questions are answered");
    let state = client.keep(&one, false, &limits(&[2000], 25)).unwrap();
    assert_eq!((pid(&state), state.deaths), (serving, 0));
    kill(serving, "KILL");
    wait_until_asked(&client, |state| state.deaths == 1 && is_serving(state));
}

fn wait_until_asked(client: &Client, what: impl Fn(&DaemonState) -> bool) {
    let deadline = Instant::now() + DEADLINE;
    loop {
        let states = client.states().unwrap();
        if states.iter().any(&what) {
            return;
        }
        assert!(Instant::now() < deadline, "{states:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[tokio::test]
#[ignore = "needs NVIDIA's MPS control daemon"]
async fn with_mounts_of_its_own_a_daemon_has_memory_of_its_own_and_all_goes_with_it() {
    let mut node = TestNode::new();
    (node.mounts, node.keep_warm) = (DaemonMounts::Own, Duration::ZERO);
    let (supervisor, gpu) = (node.supervisor(), group(&["GPU-1"]));
    let daemon = pid(&supervisor.keep(&gpu, true, &limits(&[2000], 25)).await.unwrap());
    let folder = node.folder(&gpu);
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    let path = folder.path().display().to_string();
    let lines: Vec<_> = mounts.lines().filter(|line| line.contains(&path)).collect();
    assert_eq!(lines.len(), 2, "a file system of its own, and one for what tenants write: {lines:?}");
    let has = |line: &str, all: &[&str]| all.iter().all(|part| line.contains(part));
    assert!(has(lines[0], &["tmpfs", "size=65536k", "nr_inodes=1024", "nosuid,nodev"]), "{lines:?}");
    assert!(has(lines[1], &["/shm tmpfs", "nr_inodes=8194", "nosuid,nodev,noexec"]), "{lines:?}");
    assert!(node.clients_find_it(&gpu));
    let theirs = format!("/proc/{daemon}/root/dev/shm/mark");
    fs::write(&theirs, "").unwrap();
    assert!(folder.shm().join("mark").exists() && !Path::new("/dev/shm/mark").exists());
    supervisor.rest(&gpu).await.unwrap();
    supervisor.check().await;
    assert!(!folder.path().exists() && !fs::read_to_string("/proc/self/mounts").unwrap().contains(&path));
}

/// A root as a driver container has it: the program with a C library of its own.
fn driver_root(control: &Path, root: &Path) {
    for name in ["usr/bin", "dev", "proc", "tmp", "lib64"] {
        fs::create_dir_all(root.join(name)).unwrap();
    }
    fs::copy(control, root.join("usr/bin/nvidia-cuda-mps-control")).unwrap();
    let listing = Command::new("ldd").arg(control).output().unwrap();
    let listing = String::from_utf8(listing.stdout).unwrap();
    for library in listing.split_whitespace().filter(|word| word.starts_with('/')) {
        let inside = root.join(library.trim_start_matches('/'));
        fs::create_dir_all(inside.parent().unwrap()).unwrap();
        fs::copy(library, inside).unwrap();
    }
}

#[tokio::test]
#[ignore = "needs NVIDIA's MPS control daemon"]
async fn a_driver_root_with_a_loader_of_its_own_is_the_daemons_root() {
    let mut node = TestNode::new();
    let root = node.dir.path().join("driver");
    driver_root(&node.control, &root);
    (node.mounts, node.driver_root) = (DaemonMounts::Own, Some(root.clone()));
    let (supervisor, gpu) = (node.supervisor(), group(&["GPU-1"]));
    let state = supervisor.keep(&gpu, true, &limits(&[2000], 25)).await.unwrap();
    assert_eq!(fs::read_link(format!("/proc/{}/root", pid(&state))).unwrap(), root);
    assert_eq!(state.memory_answers, ["1G"]);
    assert!(node.clients_find_it(&gpu));
    assert!(
        fs::read_to_string(node.folder(&gpu).log().join("control.log")).unwrap().contains("Starting control")
    );
    assert_eq!(fs::read_dir(root.join("tmp")).unwrap().count(), 0, "its mounts are its own");
    supervisor.check().await;
    assert_eq!(only(&supervisor), state);
}
