//! The watchdog against the fake NVML, with real processes: children of the test that NVML is told to list, in
//! a /proc of the test's making that says whose they are.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tranche::host::cgroup::ProcessOwner;
use tranche::host::{
    End, EndError, FileLock, FileLook, LocalProcesses, ManagedMemory, PidNamespace, PodProcesses, Processes,
};
use tranche::ledger::{HeldDevice, HoldMode, Intent, Placer, Standing, Step};
use tranche::model::claim::{PodRef, PreparedDevice};
use tranche::model::gpu::MigMode;
use tranche::model::names::{DeviceName, DeviceUuid, PoolName};
use tranche::model::process::ProcessKey;
use tranche::model::quantity::Bytes;
use tranche::model::share::{Grant, Isolation, MpsGroup, MpsLimits};
use tranche::node::config::{Watchdog as WatchdogSettings, WatchdogAction};
use tranche::node::containers::Containers;
use tranche::node::watchdog::{
    ClaimMetrics, DcgmMetrics, Finding, FindingKind, LISTS_LIMIT, Watchdog, WatchdogParts,
};
use tranche::nvml::{Gpus, Load, ProcessWatch};
use tranche::ops::metrics::{self, Registry};
use tranche::sharing::watch::{EndMethod, EndReason};
use tranche::supervisor::protocol::{DaemonPhase, DaemonState, MpsClient, Server};
use tranche::supervisor::{Daemons, SupervisorError};

mod busy_daemons;
mod held_up;
mod hidden;
mod kills;

use crate::nvml::Node;
use crate::site::{Claim, NODE, PluginRun, Site};

/// Longer than anything here takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);
const PERIOD: Duration = Duration::from_millis(50);

const MINE: &str = "11111111-0000-4000-8000-000000000001";
const NEIGHBOUR: &str = "22222222-0000-4000-8000-000000000002";
const STRANGER: &str = "33333333-0000-4000-8000-000000000003";
const MPS: &str = "44444444-0000-4000-8000-000000000004";

/// The supervisor: knows clients, and notes whom it was asked to terminate.
#[derive(Default)]
struct FakeDaemons(Mutex<Told>);

#[derive(Default)]
struct Told {
    clients: Vec<MpsClient>,
    servers: Vec<u32>,
    silent: bool,
    terminated: Vec<MpsClient>,
    /// Whose daemon it is; none: that of all shares of GPU-0.
    group: Option<MpsGroup>,
    /// How often it was asked for its clients, and for its servers.
    asked: usize,
    asked_for_servers: usize,
    /// Done at a termination, before it is noted.
    hook: Option<Box<dyn FnMut() + Send>>,
    /// Done when it is asked for its servers, once.
    before_states: Option<Box<dyn FnOnce() + Send>>,
    /// Done when it is asked for its clients.
    before_clients: Option<Box<dyn FnMut() + Send>>,
    /// What each of many daemons answers, in place of all that.
    answers: Option<Arc<Answers>>,
}

type Answers = dyn Fn(&MpsGroup) -> Vec<MpsClient> + Send + Sync;

impl FakeDaemons {
    fn told(&self) -> MutexGuard<'_, Told> {
        self.0.lock().unwrap()
    }

    fn heard(&self) -> Result<MutexGuard<'_, Told>, SupervisorError> {
        let told = self.told();
        match told.silent {
            true => Err(SupervisorError::Timeout { seconds: 20 }),
            false => Ok(told),
        }
    }
}

impl Daemons for FakeDaemons {
    fn keep(&self, _: &MpsGroup, _: bool, _: &MpsLimits) -> Result<DaemonState, SupervisorError> {
        unimplemented!("the watchdog keeps no daemons")
    }
    fn rest(&self, _: &MpsGroup) -> Result<(), SupervisorError> {
        unimplemented!("the watchdog keeps no daemons")
    }
    fn states(&self) -> Result<Vec<DaemonState>, SupervisorError> {
        let hook = self.told().before_states.take();
        if let Some(hook) = hook {
            hook();
        }
        let mut told = self.heard()?;
        told.asked_for_servers += 1;
        let servers = told.servers.iter().map(|pid| Server { pid: *pid, state: "ACTIVE".into() }).collect();
        Ok(vec![DaemonState {
            group: told.group.clone().unwrap_or_else(group),
            exclusive: true,
            phase: DaemonPhase::Serving { pid: u32::MAX },
            limits: None,
            memory_answers: Vec::new(),
            compute_answer: String::new(),
            deaths: 0,
            servers,
            shm: None,
        }])
    }
    fn clients(&self, asked: &MpsGroup) -> Result<Vec<MpsClient>, SupervisorError> {
        let answers = self.told().answers.clone();
        if let Some(answers) = answers {
            return Ok(answers(asked));
        }
        let mut told = self.heard()?;
        assert_eq!(*asked, told.group.clone().unwrap_or_else(group));
        told.asked += 1;
        if let Some(hook) = &mut told.before_clients {
            hook();
        }
        Ok(told.clients.clone())
    }
    fn terminate(&self, _: &MpsGroup, client: MpsClient) -> Result<(), SupervisorError> {
        let mut told = self.heard()?;
        if let Some(hook) = &mut told.hook {
            hook();
        }
        told.terminated.push(client);
        Ok(())
    }
}

fn group() -> MpsGroup {
    MpsGroup::new([gpu(0)])
}

fn gpu(number: u32) -> DeviceUuid {
    DeviceUuid::new(format!("GPU-{number}"))
}

/// A /proc of the test's making.
struct Proc(TempDir);

impl Proc {
    fn new() -> Self {
        let proc = Self(tempfile::tempdir().unwrap());
        let own = std::process::id().to_string();
        fs::create_dir_all(proc.path(&format!("{own}/ns"))).unwrap();
        symlink(&own, proc.path("self")).unwrap();
        symlink("pid:[4026531836]", proc.path(&format!("{own}/ns/pid"))).unwrap();
        fs::copy("/proc/uptime", proc.path("uptime")).unwrap();
        proc
    }

    fn path(&self, below: &str) -> PathBuf {
        self.0.path().join(below)
    }

    /// Shows a process as one of a pod, or of the host.
    fn show(&self, pid: u32, pod: Option<&str>) {
        fs::create_dir_all(self.path(&format!("{pid}/fd"))).unwrap();
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        fs::write(self.path(&format!("{pid}/stat")), stat).unwrap();
        let group = pod.map_or("/system.slice/job.service".to_owned(), |pod| format!("/kubepods/pod{pod}/c"));
        fs::write(self.path(&format!("{pid}/cgroup")), format!("0::{group}\n")).unwrap();
    }

    /// The process has so much managed memory, beside the mapping that every process of CUDA has.
    fn map_managed(&self, pid: u32, mib: u64) {
        let line = |start: u64, mib: u64| {
            format!("{start:x}-{:x} rw-s {start:x} 00:06 144    /dev/nvidia-uvm\n", start + (mib << 20))
        };
        fs::write(self.path(&format!("{pid}/maps")), line(0x2_04a0_0000, 2) + &line(0x7f00_0000_0000, mib))
            .unwrap();
    }

    /// The process holds a GPU's device file open.
    fn open_gpu(&self, pid: u32) {
        symlink("/dev/nvidia0", self.path(&format!("{pid}/fd/7"))).unwrap();
    }

    fn set_started(&self, pid: u32, started: u64) {
        let stat = format!("{pid} (sleep) S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 {started} 0 0\n");
        fs::write(self.path(&format!("{pid}/stat")), stat).unwrap();
    }
}

/// A child that sleeps, ended with the test.
struct Sleeper(Child);

impl Sleeper {
    fn new() -> Self {
        Self(Command::new("sleep").arg("600").spawn().unwrap())
    }

    fn pid(&self) -> u32 {
        self.0.id()
    }

    fn lives(&mut self) -> bool {
        self.0.try_wait().unwrap().is_none()
    }

    fn was_killed(&mut self) -> bool {
        self.0.try_wait().unwrap().is_some_and(|status| status.signal() == Some(9))
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// One GPU process, as the control file has it; gone from the lists when it ends.
fn process(pid: u32, mib: u64, kind: &str) -> Value {
    json!({"pid": pid, "used_mib": mib, "kind": kind, "only_if_alive": true})
}

fn control(processes: Vec<Value>) -> Value {
    json!({"profile": "h100", "log_calls": true,
           "gpus": {"0": {"uuid": "GPU-0", "processes": processes}}})
}

struct Bench {
    node: Arc<Node>,
    site: Site,
    plugin: PluginRun,
    proc: Arc<Proc>,
    daemons: Arc<FakeDaemons>,
    registry: Registry,
    containers: watch::Sender<Containers>,
    /// What is served under DCGM's names.
    dcgm: Registry,
    stop: CancellationToken,
    findings: Option<mpsc::Receiver<Finding>>,
    found: Vec<Finding>,
}

impl Bench {
    fn new() -> Self {
        let site = Site::new();
        let plugin = site.start_plugin();
        Self {
            node: Arc::new(Node::with(control(Vec::new()))),
            plugin,
            site,
            proc: Arc::new(Proc::new()),
            daemons: Arc::default(),
            registry: metrics::registry(),
            containers: watch::Sender::default(),
            dcgm: Registry::default(),
            stop: CancellationToken::new(),
            findings: None,
            found: Vec::new(),
        }
    }

    /// Grants a claim 1000 MiB of GPU-0, as preparing it would, and reserves it for a pod.
    async fn share(&self, name: &str, pod: &str) -> Claim {
        let claim = Claim::new(name, &["gpu-0"]).reserved_for(&[pod]);
        self.site.api.put(&claim);
        self.record(&claim, 0).await;
        claim
    }

    /// The same with an MPS daemon that the claim has for itself.
    async fn own_share(&self, name: &str, pod: &str) -> Claim {
        let claim = Claim::new(name, &["gpu-0"]).reserved_for(&[pod]);
        self.site.api.put(&claim);
        let group = group().of_claim(claim.id().uid);
        self.record_with(&claim, 0, group.clone(), false).await;
        self.daemons.told().group = Some(group);
        claim
    }

    async fn record(&self, claim: &Claim, number: u32) {
        self.record_with(claim, number, MpsGroup::new([gpu(number)]), true).await;
    }

    async fn record_with(&self, claim: &Claim, number: u32, group: MpsGroup, exclusive: bool) {
        let memory = Bytes::from_mib(1000);
        let grant = Grant { memory, compute: None, slots: 1, processes: 1, isolation: Isolation::Mps };
        let needs = MpsLimits { memory: vec![Some(memory)], compute: None };
        let answer = PreparedDevice {
            requests: vec!["r0".into()],
            pool: PoolName::from(NODE),
            device: DeviceName::whole(number),
            cdi_ids: Vec::new(),
            share_id: None,
        };
        let mode = HoldMode::Share(grant);
        let steps = vec![Step::Mps { group, exclusive, needs }];
        self.begin(claim, answer, mode, (steps, Vec::new())).await;
    }

    /// Gives a claim all of GPU-0, reserved for a pod that the ledger names.
    async fn whole(&self, name: &str, pod: &str) -> Claim {
        let claim = Claim::new(name, &["gpu-0"]).reserved_for(&[pod]);
        self.site.api.put(&claim);
        let answer = PreparedDevice {
            requests: vec!["r0".into()],
            pool: PoolName::from(NODE),
            device: DeviceName::whole(0),
            cdi_ids: Vec::new(),
            share_id: None,
        };
        let pods = vec![PodRef { namespace: "team".into(), name: "p".into(), uid: pod.into() }];
        self.begin(&claim, answer, HoldMode::Whole, (Vec::new(), pods)).await;
        claim
    }

    async fn begin(
        &self,
        claim: &Claim,
        answer: PreparedDevice,
        mode: HoldMode,
        (steps, pods): (Vec<Step>, Vec<PodRef>),
    ) {
        let uuid = DeviceUuid::new(answer.device.as_str().replace("gpu-", "GPU-"));
        let gpu = uuid.clone();
        let device = HeldDevice { answer, uuid, gpu, mode, placer: Placer::default(), mig: None };
        self.begin_with(claim, device, (steps, pods)).await;
    }

    async fn begin_with(&self, claim: &Claim, device: HeldDevice, (steps, pods): (Vec<Step>, Vec<PodRef>)) {
        let uuid = device.gpu.clone();
        let (claim, boot) = (claim.id(), self.site.boot());
        let intent = Intent { claim, boot, devices: vec![device], steps, pods, standing: Standing::Current };
        let held = self.plugin.preparer.lanes.queue(vec![uuid]).await.unwrap().hold().unwrap();
        self.plugin.preparer.executor.store.begin(&held, &intent).unwrap();
    }

    async fn release(&self, claim: &Claim) {
        let held = self.plugin.preparer.lanes.queue(vec![gpu(0)]).await.unwrap().hold().unwrap();
        self.plugin.preparer.executor.store.end(&held, &claim.id().uid.into()).unwrap();
    }

    fn start(&mut self, action: WatchdogAction) {
        let processes = Arc::new(LocalProcesses { root: self.proc.path(""), nvml_pids: PidNamespace::Host });
        self.start_with(action, processes);
    }

    fn start_with(&mut self, action: WatchdogAction, processes: Arc<dyn Processes>) {
        self.start_every(PERIOD, action, processes);
    }

    fn start_every(&mut self, period: Duration, action: WatchdogAction, processes: Arc<dyn Processes>) {
        let (rows, dcgm) = DcgmMetrics::new("node-a".into());
        self.dcgm = dcgm;
        let (watchdog, findings) = Watchdog::new(WatchdogParts {
            settings: WatchdogSettings {
                action,
                period,
                grace: Bytes::from_mib(64),
                pids: PidNamespace::Host,
            },
            slots_per_share: 3,
            executor: self.plugin.preparer.executor.clone(),
            cluster: self.site.api.clone(),
            daemons: self.daemons.clone(),
            lists: ProcessWatch::new(self.node.path("root").into(), LISTS_LIMIT),
            processes,
            lock: self.node.path("watchdog.lock"),
            own_pod: None,
            metrics: ClaimMetrics::register(&mut self.registry).with_dcgm(rows),
            containers: self.containers.subscribe(),
        });
        self.findings = Some(findings);
        tokio::spawn(watchdog.run(self.stop.clone()));
    }

    fn looks(&self) -> usize {
        self.node.calls("nvmlDeviceGetComputeRunningProcesses_v3")
    }

    /// Lets the watchdog look at least this often.
    async fn wait_for_looks(&mut self, count: usize) {
        let from = self.looks();
        until("looks", || self.looks() >= from + count).await;
    }

    fn take_findings(&mut self) {
        while let Ok(finding) = self.findings.as_mut().unwrap().try_recv() {
            self.found.push(finding);
        }
    }

    async fn wait_for_finding(&mut self, what: &str, is_it: impl Fn(&Finding) -> bool) -> Finding {
        let began = Instant::now();
        loop {
            self.take_findings();
            if let Some(found) = self.found.iter().find(|finding| is_it(finding)) {
                return found.clone();
            }
            assert!(began.elapsed() < PATIENCE, "no {what} among {:?}", self.found);
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    fn metric(&self, name: &str) -> Option<f64> {
        let text = metrics::text(&self.registry).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.map(|value| value.parse().unwrap())
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

async fn until(what: &str, mut is: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is() {
        assert!(began.elapsed() < PATIENCE, "{what}: still waiting");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn labels(claim: &str, pod: &str) -> String {
    claim_labels(claim, pod, 0)
}

fn claim_labels(claim: &str, pod: &str, number: u32) -> String {
    let pod = &pod[..4];
    format!(
        "{{namespace=\"team\",pod=\"pod-{pod}\",container=\"\",claim=\"{claim}\",request=\"r0\",{}}}",
        device_labels(number)
    )
}

fn device_labels(number: u32) -> String {
    format!("device=\"gpu-{number}\",pool=\"{NODE}\",UUID=\"GPU-{number}\"")
}

#[tokio::test]
async fn who_is_over_is_ended_and_its_neighbour_goes_on() {
    let mut bench = Bench::new();
    let (mut offender, mut neighbour) = (Sleeper::new(), Sleeper::new());
    bench.proc.show(offender.pid(), Some(MINE));
    bench.proc.show(neighbour.pid(), Some(NEIGHBOUR));
    let client = MpsClient { server: 1, pid: offender.pid() };
    bench.daemons.told().clients = vec![MpsClient { server: 1, pid: neighbour.pid() }, client];
    bench.share("mine", MINE).await;
    bench.share("neighbours", NEIGHBOUR).await;
    let used =
        |mib| control(vec![process(offender.pid(), mib, "mps"), process(neighbour.pid(), 1000, "mps")]);
    bench.node.set(used(900));
    bench.start(WatchdogAction::Terminate);
    until("it is shown", || {
        bench.metric(&format!("tranche_claim_memory_used_bytes{}", labels("mine", MINE)))
            == Some(f64::from(900 << 20))
    })
    .await;
    bench.wait_for_looks(5).await;

    let before = bench.looks();
    bench.node.set(used(3000));
    until("the client is terminated", || !bench.daemons.told().terminated.is_empty()).await;
    let looks = bench.looks() - before;
    // One that was under way, two that count, one more while the supervisor is asked, and others on a busy machine.
    assert!(looks <= 20, "{looks} looks");
    // What a terminated client holds is free when its process has gone.
    until("it is killed", || offender.was_killed()).await;
    assert!(neighbour.lives());
    assert_eq!(bench.daemons.told().terminated, [client], "once");

    let over = bench.wait_for_finding("violation", |f| matches!(f.kind, FindingKind::OverGrant(_))).await;
    let FindingKind::OverGrant(numbers) = over.kind else { unreachable!() };
    assert_eq!((numbers.used, numbers.limit), (Bytes::from_mib(3000), Bytes::from_mib(1000)));
    assert_eq!(over.claim.unwrap().name, "mine");
    assert_eq!(over.pods[0].uid.as_str(), MINE);
    bench
        .wait_for_finding("end", |f| matches!(f.kind, FindingKind::Ended { how: EndMethod::Terminate, .. }))
        .await;
    bench.wait_for_finding("recovery", |f| matches!(f.kind, FindingKind::Recovered { .. })).await;
    assert!(bench.found.iter().all(|f| f.claim.as_ref().is_some_and(|claim| claim.name == "mine")));
    let row = |name: &str, claim, pod| bench.metric(&format!("tranche_claim_{name}{}", labels(claim, pod)));
    assert_eq!(row("violations_total", "mine", MINE), Some(1.0));
    assert_eq!(row("terminations_total", "mine", MINE), Some(1.0));
    assert_eq!(row("memory_peak_bytes", "mine", MINE), Some(3000.0 * 1024.0 * 1024.0));
    assert_eq!(row("memory_limit_bytes", "mine", MINE), Some(1000.0 * 1024.0 * 1024.0));
    assert_eq!(row("violations_total", "neighbours", NEIGHBOUR), Some(0.0));
    assert_eq!(row("memory_used_bytes", "neighbours", NEIGHBOUR), Some(1000.0 * 1024.0 * 1024.0));
}

/// NVML counts managed memory on the board and for no process, and a broken limit variable lifts the limit of it, too.
#[tokio::test]
async fn managed_memory_counts_for_whose_it_is() {
    let mut bench = Bench::new();
    let (mut offender, mut neighbour) = (Sleeper::new(), Sleeper::new());
    for (sleeper, pod, managed) in [(&offender, MINE, 3000), (&neighbour, NEIGHBOUR, 500)] {
        bench.proc.show(sleeper.pid(), Some(pod));
        bench.proc.map_managed(sleeper.pid(), managed);
    }
    let client = MpsClient { server: 1, pid: offender.pid() };
    bench.daemons.told().clients = vec![client, MpsClient { server: 1, pid: neighbour.pid() }];
    bench.share("mine", MINE).await;
    bench.share("neighbours", NEIGHBOUR).await;
    let list = [process(offender.pid(), 500, "mps"), process(neighbour.pid(), 400, "mps")];
    bench.node.set(json!({"profile": "h100", "log_calls": true,
        "gpus": {"0": {"uuid": "GPU-0", "processes": list, "used_mib": 3500}}}));
    bench.start(WatchdogAction::Terminate);
    let over = bench.wait_for_finding("violation", |f| matches!(f.kind, FindingKind::OverGrant(_))).await;
    let FindingKind::OverGrant(numbers) = over.kind else { unreachable!() };
    assert_eq!((numbers.used, numbers.limit), (Bytes::from_mib(3500), Bytes::from_mib(1000)));
    until("it is killed", || offender.was_killed()).await;
    // A look that could not read mappings in time may count none.
    let row = format!("tranche_claim_memory_used_bytes{}", labels("neighbours", NEIGHBOUR));
    until("the neighbour's is counted", || bench.metric(&row) == Some(900.0 * MIB)).await;
    bench.wait_for_looks(5).await;
    assert!(neighbour.lives());
    assert!(bench.found.iter().all(|f| f.claim.as_ref().is_some_and(|claim| claim.name == "mine")));
}

#[tokio::test]
async fn observing_tells_all_and_ends_nothing() {
    let mut bench = Bench::new();
    let mut all = [Sleeper::new(), Sleeper::new(), Sleeper::new()];
    let [offender, stranger, host] = [all[0].pid(), all[1].pid(), all[2].pid()];
    bench.proc.show(offender, Some(MINE));
    bench.proc.show(stranger, Some(STRANGER));
    bench.proc.show(host, None);
    bench.proc.open_gpu(host);
    bench.share("mine", MINE).await;
    bench.node.set(control(vec![
        process(offender, 9000, "compute"),
        process(stranger, 5, "compute"),
        process(host, 5, "compute"),
    ]));
    bench.start(WatchdogAction::Observe);
    bench.wait_for_finding("violation", |f| matches!(f.kind, FindingKind::OverGrant(_))).await;
    for pid in [stranger, host] {
        bench
            .wait_for_finding(
                "foreign",
                |f| matches!(&f.kind, FindingKind::Foreign { process, .. } if process.pid == pid),
            )
            .await;
    }
    bench.wait_for_looks(10).await;
    assert!(all.iter_mut().all(Sleeper::lives));
    bench.take_findings();
    assert_eq!(bench.found.len(), 3, "each once: {:?}", bench.found);
}

#[tokio::test]
async fn whoever_belongs_to_no_claim_is_ended_but_servers_and_helpers_are_not() {
    let mut bench = Bench::new();
    let [mut mine, mut stranger, mut host, mut helper, mut server] =
        std::array::from_fn::<_, 5, _>(|_| Sleeper::new());
    for (process, pod) in [
        (&mine, Some(MINE)),
        (&stranger, Some(STRANGER)),
        (&host, None),
        (&helper, None),
        (&server, Some(MPS)),
    ] {
        bench.proc.show(process.pid(), pod);
    }
    bench.proc.open_gpu(host.pid());
    bench.daemons.told().servers = vec![server.pid()];
    bench.share("mine", MINE).await;
    let all = [&mine, &stranger, &host, &helper, &server];
    bench.node.set(control(all.iter().map(|one| process(one.pid(), 100, "compute")).collect()));
    bench.start(WatchdogAction::Terminate);
    until("the stranger is killed", || stranger.was_killed()).await;
    until("the host's process is killed", || host.was_killed()).await;
    bench.wait_for_looks(10).await;
    assert!(mine.lives() && server.lives());
    assert!(helper.lives(), "it holds no device file: NVML's PID may mean another");
    let end = bench
        .wait_for_finding(
            "end",
            |f| matches!(f.kind, FindingKind::Ended { process, .. } if process.pid == stranger.pid()),
        )
        .await;
    assert_eq!(end.claim, None);
    // A process is counted after it was ended.
    let row = format!("tranche_foreign_gpu_process_terminations_total{{{}}}", device_labels(0));
    until("both ends are counted", || bench.metric(&row) == Some(2.0)).await;
    bench.wait_for_looks(2).await;
    assert_eq!(bench.metric(&row), Some(2.0), "and nobody else's");
}

/// A claim with a daemon of its own, one process that is its client, its server, and one that goes around it.
struct Detour {
    bench: Bench,
    client: Sleeper,
    server: Sleeper,
    around: Sleeper,
}

impl Detour {
    async fn new() -> Self {
        let case = Self::without_claim();
        case.bench.own_share("mine", MINE).await;
        case
    }

    fn without_claim() -> Self {
        let bench = Bench::new();
        let [client, server, around] = std::array::from_fn(|_| Sleeper::new());
        for (process, pod) in [(&client, MINE), (&server, MPS), (&around, MINE)] {
            bench.proc.show(process.pid(), Some(pod));
        }
        bench.daemons.told().servers = vec![server.pid()];
        bench.daemons.told().clients = vec![MpsClient { server: server.pid(), pid: client.pid() }];
        let detour = Self { bench, client, server, around };
        detour.bench.node.set(control(detour.processes("compute")));
        detour
    }

    fn processes(&self, around: &str) -> Vec<Value> {
        vec![
            process(self.client.pid(), 100, "mps"),
            process(self.server.pid(), 66, "server"),
            process(self.around.pid(), 100, around),
        ]
    }

    fn row(&self, name: &str) -> Option<f64> {
        let row = format!("tranche_claim_processes_around_mps_{name}{}", labels("mine", MINE));
        self.bench.metric(&row)
    }

    async fn until_found(&mut self) -> Finding {
        let pid = self.around.pid();
        let is_it = |f: &Finding| matches!(f.kind, FindingKind::AroundMps { process } if process.pid == pid);
        self.bench.wait_for_finding("process around MPS", is_it).await
    }
}

#[tokio::test]
async fn who_goes_around_its_claims_own_daemon_is_ended_and_its_clients_go_on() {
    let mut case = Detour::new().await;
    case.bench.start(WatchdogAction::Terminate);
    until("it is killed", || case.around.was_killed()).await;
    let found = case.until_found().await;
    assert_eq!(found.claim.unwrap().name, "mine");
    let end = |f: &Finding| matches!(f.kind, FindingKind::Ended { reason: EndReason::AroundMps, .. });
    let ended = case.bench.wait_for_finding("end", end).await;
    assert_eq!(ended.claim.unwrap().name, "mine");
    case.bench.wait_for_looks(10).await;
    assert!(case.client.lives() && case.server.lives());
    case.bench.take_findings();
    assert_eq!(case.bench.found.len(), 2, "{:?}", case.bench.found);
    assert_eq!((case.row("total"), case.row("terminations_total")), (Some(1.0), Some(1.0)));
    let over = format!("tranche_claim_terminations_total{}", labels("mine", MINE));
    assert_eq!(case.bench.metric(&over), Some(0.0), "that is for memory");
    assert_eq!(case.bench.daemons.told().asked, 1, "the daemon was asked for its clients once");
}

#[tokio::test]
async fn who_goes_around_mps_is_told_of_where_nobody_is_ended() {
    let mut case = Detour::new().await;
    case.bench.start(WatchdogAction::Observe);
    case.until_found().await;
    case.bench.wait_for_looks(10).await;
    assert!(case.around.lives());
    assert_eq!((case.row("total"), case.row("terminations_total")), (Some(1.0), Some(0.0)));
}

#[tokio::test]
async fn whom_the_daemon_names_or_nvml_does_not_tell_apart_does_not_go_around_mps() {
    let mut case = Detour::new().await;
    let named = MpsClient { server: case.server.pid(), pid: case.around.pid() };
    case.bench.daemons.told().clients.push(named);
    case.bench.start(WatchdogAction::Terminate);
    until("the daemon is asked", || case.bench.daemons.told().asked > 0).await;
    case.bench.wait_for_looks(10).await;
    assert!(case.around.lives(), "the daemon names it");

    // A driver without a list of MPS clients.
    let mut case = Detour::new().await;
    let mut without = control(case.processes("compute"));
    without["missing"] = json!(["nvmlDeviceGetMPSComputeRunningProcesses_v3"]);
    case.bench.node.set(without);
    case.bench.start(WatchdogAction::Terminate);
    case.bench.wait_for_looks(10).await;
    assert!(case.around.lives() && case.client.lives());
    assert_eq!(case.bench.daemons.told().asked, 0);
}

#[tokio::test]
async fn a_list_that_fails_once_makes_nobody_forget_who_lost_its_server() {
    let mut case = Detour::new().await;
    // The claim's second server, later on.
    let second = std::mem::replace(&mut case.around, Sleeper::new());
    case.bench.proc.show(second.pid(), Some(MPS));
    let (client, first) = (case.client.pid(), case.server.pid());
    case.bench.node.set(control(vec![process(client, 100, "mps"), process(first, 66, "server")]));
    case.bench.start(WatchdogAction::Terminate);
    until("the server is known", || case.bench.daemons.told().asked_for_servers > 0).await;
    case.bench.wait_for_looks(10).await;

    let after = vec![process(client, 100, "compute"), process(second.pid(), 66, "server")];
    let mut failing = control(after.clone());
    failing["faults"] = json!({"nvmlDeviceGetComputeRunningProcesses_v3": {"return": "UNKNOWN"}});
    case.bench.node.set(failing);
    let failed = |bench: &Bench| bench.metric("tranche_watchdog_failed_looks_total");
    until("a look fails", || failed(&case.bench).is_some_and(|count| count > 0.0)).await;
    let asked = {
        let mut told = case.bench.daemons.told();
        (told.servers, told.clients) = (vec![second.pid()], Vec::new());
        told.asked_for_servers
    };
    case.bench.node.set(control(after));
    until("the daemon is asked for its clients", || case.bench.daemons.told().asked > 0).await;
    until("the second server is known", || case.bench.daemons.told().asked_for_servers > asked).await;
    case.bench.wait_for_looks(10).await;
    assert!(case.client.lives());
    case.bench.take_findings();
    assert!(case.bench.found.is_empty(), "{:?}", case.bench.found);
}

#[tokio::test]
async fn who_was_there_before_the_watchdog_may_have_lost_its_server_and_is_left_alone() {
    for (is_older, claim_is_older) in [(true, true), (false, true), (true, false)] {
        let mut case = Detour::without_claim();
        // Its claim's server is a newer one.
        case.bench.proc.set_started(case.server.pid(), 1 << 40);
        if is_older {
            fs::write(case.bench.proc.path("uptime"), "9000000000.00 1.00\n").unwrap();
        }
        if claim_is_older {
            case.bench.own_share("mine", MINE).await;
            case.bench.start(WatchdogAction::Terminate);
        } else {
            // The watchdog waits for the first claim, so that no claim's process is unknown to it.
            case.bench.start(WatchdogAction::Terminate);
            wait_a_moment().await;
            case.bench.own_share("mine", MINE).await;
        }
        until("the daemon is asked", || case.bench.daemons.told().asked > 0).await;
        if is_older && claim_is_older {
            case.bench.wait_for_looks(10).await;
            assert!(case.around.lives());
        } else {
            until("it is killed", || case.around.was_killed()).await;
        }
    }
}

#[tokio::test]
async fn on_a_gpu_with_one_daemon_for_all_shares_no_process_goes_around_mps() {
    let mut bench = Bench::new();
    let mut bare = Sleeper::new();
    bench.proc.show(bare.pid(), Some(MINE));
    bench.share("mine", MINE).await;
    bench.node.set(control(vec![process(bare.pid(), 100, "compute")]));
    bench.start(WatchdogAction::Terminate);
    bench.wait_for_looks(10).await;
    assert!(bare.lives());
    bench.take_findings();
    assert_eq!(bench.found, []);
}

#[tokio::test]
async fn while_the_api_server_or_the_supervisor_is_silent_nobody_is_foreign() {
    let mut bench = Bench::new();
    let mut late = Sleeper::new();
    bench.proc.show(late.pid(), Some(STRANGER));
    bench.site.api.silent.store(true, Ordering::SeqCst);
    bench.daemons.told().silent = true;
    bench.share("mine", MINE).await;
    bench.node.set(control(vec![process(late.pid(), 100, "compute")]));
    bench.start(WatchdogAction::Terminate);
    bench.wait_for_looks(30).await;
    bench.site.api.silent.store(false, Ordering::SeqCst);
    bench.wait_for_looks(30).await;
    assert!(late.lives());
    bench.take_findings();
    assert_eq!(bench.found, []);
    let unanswered = bench.metric("tranche_watchdog_failed_questions_total");
    assert!(unanswered.is_some_and(|count| count >= 1.0), "{unanswered:?}");
    // Now everybody answers, and it is nobody's.
    bench.daemons.told().silent = false;
    until("it is killed", || late.was_killed()).await;
}

#[tokio::test]
async fn a_question_that_breaks_off_is_asked_again() {
    let mut bench = Bench::new();
    let mut stranger = Sleeper::new();
    bench.proc.show(stranger.pid(), Some(STRANGER));
    bench.daemons.told().before_states = Some(Box::new(|| panic!("as a test")));
    bench.share("mine", MINE).await;
    bench.node.set(control(vec![process(stranger.pid(), 100, "compute")]));
    bench.start(WatchdogAction::Terminate);
    until("it is killed", || stranger.was_killed()).await;
    assert!(bench.metric("tranche_watchdog_failed_questions_total").is_some_and(|count| count >= 1.0));
}

#[tokio::test]
async fn a_pod_that_is_added_to_a_claim_is_found_before_anybody_is_blamed() {
    let mut bench = Bench::new();
    let (mut first, mut second) = (Sleeper::new(), Sleeper::new());
    bench.proc.show(first.pid(), Some(MINE));
    bench.proc.show(second.pid(), Some(STRANGER));
    let mine = bench.share("mine", MINE).await;
    bench.node.set(control(vec![process(first.pid(), 100, "compute")]));
    bench.start(WatchdogAction::Terminate);
    let used = |pod| format!("tranche_claim_memory_used_bytes{}", labels("mine", pod));
    until("the first is known", || bench.metric(&used(MINE)) == Some(f64::from(100 << 20))).await;
    bench.site.api.put(&mine.reserved_for(&[MINE, STRANGER]));
    bench
        .node
        .set(control(vec![process(first.pid(), 100, "compute"), process(second.pid(), 200, "compute")]));
    until("the second is known", || bench.metric(&used(STRANGER)) == Some(f64::from(200 << 20))).await;
    assert!(first.lives() && second.lives());
    bench.take_findings();
    assert_eq!(bench.found, []);
}

#[tokio::test]
async fn a_pid_that_came_again_is_not_ended_for_its_forerunner() {
    let mut bench = Bench::new();
    let mut reborn = Sleeper::new();
    let pid = reborn.pid();
    bench.proc.show(pid, Some(MINE));
    bench.proc.set_started(pid, 1000);
    bench.daemons.told().clients = vec![MpsClient { server: 1, pid }];
    // Between the verdict and its execution the process ends, and its PID comes again.
    let (node, proc) = (bench.node.clone(), bench.proc.clone());
    bench.daemons.told().before_clients = Some(Box::new(move || {
        proc.set_started(pid, 2000);
        node.set(control(vec![process(pid, 100, "mps")]));
    }));
    bench.share("mine", MINE).await;
    bench.node.set(control(vec![process(pid, 3000, "mps")]));
    bench.start(WatchdogAction::Terminate);
    bench.wait_for_finding("recovery", |f| matches!(f.kind, FindingKind::Recovered { .. })).await;
    bench.wait_for_looks(10).await;
    assert!(reborn.lives());
    assert_eq!(bench.daemons.told().terminated, []);
    bench.take_findings();
    assert!(!bench.found.iter().any(|f| matches!(f.kind, FindingKind::Ended { .. })), "{:?}", bench.found);
}

#[tokio::test]
async fn while_no_claim_holds_a_device_nothing_is_asked_and_only_one_instance_watches() {
    let mut bench = Bench::new();
    let mut offender = Sleeper::new();
    bench.proc.show(offender.pid(), Some(MINE));
    bench.node.set(control(vec![process(offender.pid(), 3000, "compute")]));
    let other = FileLock::try_acquire(&bench.node.path("watchdog.lock")).unwrap();
    bench.start(WatchdogAction::Terminate);
    let admin = Claim::new("admin", &["gpu-1"]).admin();
    bench.site.api.put(&admin);
    bench.plugin.prepared(&admin, "an administrator's").await;
    wait_a_moment().await;
    assert_eq!(bench.node.calls("nvmlInit_v2"), 0, "the library is not even loaded");
    let mine = bench.share("mine", MINE).await;
    wait_a_moment().await;
    assert_eq!(bench.looks(), 0, "another instance watches");
    drop(other);
    until("it is killed", || offender.was_killed()).await;

    bench.release(&mine).await;
    let used = format!("tranche_claim_memory_limit_bytes{}", labels("mine", MINE));
    until("its metrics go", || bench.metric(&used).is_none()).await;
    let lock = || FileLock::try_acquire(&bench.node.path("watchdog.lock")).unwrap();
    until("the lock is free", || lock().is_some()).await;
    assert_eq!(bench.node.calls("nvmlInit_v2"), 1);
    bench.share("next", MINE).await;
    until("the library, let go of, is loaded anew", || bench.node.calls("nvmlInit_v2") == 2).await;
}

/// At the period of production. The fastest of three, because this machine may be busy with others' work.
#[tokio::test]
async fn from_crossing_to_the_first_action_it_takes_less_than_a_second() {
    let mut fastest = Duration::MAX;
    // On a busy machine some take longer.
    for _ in 0..10 {
        if fastest < Duration::from_secs(1) {
            break;
        }
        let mut bench = Bench::new();
        let offender = Sleeper::new();
        let pid = offender.pid();
        bench.proc.show(pid, Some(MINE));
        bench.daemons.told().clients = vec![MpsClient { server: 1, pid }];
        bench.share("mine", MINE).await;
        bench.node.set(control(vec![process(pid, 100, "mps")]));
        let processes = Arc::new(LocalProcesses { root: bench.proc.path(""), nvml_pids: PidNamespace::Host });
        bench.start_every(Duration::from_millis(250), WatchdogAction::Terminate, processes);
        let used = format!("tranche_claim_memory_used_bytes{}", labels("mine", MINE));
        until("it is known", || bench.metric(&used) == Some(f64::from(100 << 20))).await;
        let crossing = Instant::now();
        bench.node.set(control(vec![process(pid, 3000, "mps")]));
        until("it is terminated", || !bench.daemons.told().terminated.is_empty()).await;
        fastest = fastest.min(crossing.elapsed());
    }
    println!("{} ms", fastest.as_millis());
    assert!(fastest < Duration::from_secs(1), "{} ms", fastest.as_millis());
}

/// A client whose limit variable is broken gets as much as it asks for (E11 of tests/gpu): it must not have it until
/// the next look but one.
#[tokio::test]
async fn a_process_beyond_what_mps_lets_it_have_does_not_wait_for_the_next_regular_look() {
    let mut bench = Bench::new();
    let mut offender = Sleeper::new();
    let pid = offender.pid();
    bench.proc.show(pid, Some(MINE));
    bench.daemons.told().clients = vec![MpsClient { server: 1, pid }];
    bench.share("mine", MINE).await;
    bench.node.set(control(vec![process(pid, 3000, "mps")]));
    let processes = Arc::new(LocalProcesses { root: bench.proc.path(""), nvml_pids: PidNamespace::Host });
    let period = Duration::from_secs(20);
    bench.start_every(period, WatchdogAction::Terminate, processes);
    let used = format!("tranche_claim_memory_used_bytes{}", labels("mine", MINE));
    until("it is seen", || bench.metric(&used) == Some(3000.0 * 1024.0 * 1024.0)).await;
    let seen = Instant::now();
    until("it is killed", || offender.was_killed()).await;
    assert!(seen.elapsed() < period, "{:?}", seen.elapsed());
    assert_eq!(bench.daemons.told().terminated, [MpsClient { server: 1, pid }]);
}

/// Claims that are being prepared may hold all threads that the process has for blocking work.
#[test]
fn it_does_not_wait_behind_other_peoples_work() {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_all().max_blocking_threads(1).build().unwrap();
    let (done, busy) = std::sync::mpsc::channel::<()>();
    runtime.block_on(async {
        let held = tokio::task::spawn_blocking(move || busy.recv().is_err());
        let mut bench = Bench::new();
        let mut offender = Sleeper::new();
        bench.proc.show(offender.pid(), Some(MINE));
        bench.share("mine", MINE).await;
        bench.node.set(control(vec![process(offender.pid(), 3000, "compute")]));
        bench.start(WatchdogAction::Terminate);
        until("it is killed", || offender.was_killed()).await;
        assert!(!held.is_finished());
        drop(done);
        assert!(held.await.unwrap());
    });
}

/// Long enough for several periods, and for a try at the lock.
async fn wait_a_moment() {
    tokio::time::sleep(8 * PERIOD).await;
}

#[tokio::test]
async fn a_driver_that_fails_for_a_while_ends_nobody_and_is_watched_again() {
    let mut bench = Bench::new();
    let mut offender = Sleeper::new();
    bench.proc.show(offender.pid(), Some(MINE));
    bench.share("mine", MINE).await;
    let mut failing = control(vec![process(offender.pid(), 3000, "compute")]);
    failing["faults"] = json!({"nvmlDeviceGetComputeRunningProcesses_v3": {"return": "UNKNOWN"}});
    bench.node.set(failing);
    bench.start(WatchdogAction::Terminate);
    bench.wait_for_looks(6).await;
    assert!(offender.lives());
    assert!(bench.metric("tranche_watchdog_failed_looks_total").is_some_and(|count| count >= 5.0));
    bench.node.set(control(vec![process(offender.pid(), 3000, "compute")]));
    until("it is killed", || offender.was_killed()).await;
}

#[tokio::test]
async fn who_has_no_claim_of_a_whole_gpu_is_ended_and_its_user_goes_on_though_the_claim_is_gone() {
    for action in [WatchdogAction::Observe, WatchdogAction::Terminate] {
        let mut bench = Bench::new();
        let (mut user, mut stranger, mut host) = (Sleeper::new(), Sleeper::new(), Sleeper::new());
        bench.proc.show(user.pid(), Some(MINE));
        bench.proc.show(stranger.pid(), Some(STRANGER));
        bench.proc.show(host.pid(), None);
        bench.proc.open_gpu(host.pid());
        let claim = bench.whole("mine", MINE).await;
        let list = [user.pid(), stranger.pid(), host.pid()].map(|pid| process(pid, 500, "compute"));
        bench.node.set(control(list.to_vec()));
        // Nobody answers for the claim: nobody is a stranger.
        bench.site.api.silent.store(true, Ordering::SeqCst);
        bench.start(action);
        bench.wait_for_looks(3).await;
        assert!(stranger.lives());
        bench.site.api.remove(&claim);
        bench.site.api.silent.store(false, Ordering::SeqCst);
        let pid = stranger.pid();
        let found = bench
            .wait_for_finding(
                "stranger",
                |f| matches!(&f.kind, FindingKind::Foreign { process, .. } if process.pid == pid),
            )
            .await;
        assert_eq!((found.claim, found.device.as_str()), (None, "gpu-0"));
        if action == WatchdogAction::Terminate {
            until("the stranger is ended", || stranger.was_killed()).await;
        }
        bench.wait_for_looks(2).await;
        assert!(user.lives() && host.lives());
        assert_eq!(stranger.lives(), action == WatchdogAction::Observe);
        let row = format!("tranche_foreign_gpu_processes_total{{{}}}", device_labels(0));
        assert_eq!(bench.metric(&row), Some(1.0));
    }
}

/// Processes that exist only as numbers, and how often each question was asked.
#[derive(Default)]
struct Counted {
    pods: BTreeMap<u32, &'static str>,
    /// The first read is held up until this lets it go.
    held_up: Mutex<Option<Receiver<()>>>,
    started: AtomicUsize,
    other: AtomicUsize,
    ended: AtomicU64,
    /// None of them can be ended.
    stays: bool,
}

impl Processes for Counted {
    fn started(&self, pid: u32) -> io::Result<Option<u64>> {
        let held_up = self.held_up.lock().unwrap().take();
        if let Some(held_up) = held_up {
            let _ = held_up.recv();
        }
        self.started.fetch_add(1, Ordering::SeqCst);
        Ok(self.pods.contains_key(&pid).then_some(1))
    }
    fn now(&self) -> io::Result<u64> {
        Ok(1)
    }
    fn owner(&self, pid: u32) -> io::Result<Option<ProcessOwner>> {
        let Some(pod) = self.pods.get(&pid) else { return Ok(None) };
        self.other.fetch_add(1, Ordering::SeqCst);
        Ok(Some(ProcessOwner::Pod { pod: (*pod).into(), container: None }))
    }
    fn uses_gpu(&self, _: u32) -> io::Result<bool> {
        self.other.fetch_add(1, Ordering::SeqCst);
        Ok(false)
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
    fn end(&self, process: ProcessKey) -> Result<End, EndError> {
        self.ended.fetch_add(1, Ordering::SeqCst);
        if self.stays { Err(EndError::Protected(process.pid)) } else { Ok(End::Gone) }
    }
}

#[tokio::test]
async fn sixty_clients_on_each_of_sixteen_gpus_cost_three_calls_a_gpu_and_one_read_a_client() {
    const GPUS: u32 = 16;
    const CLIENTS: u32 = 60;
    let mut bench = Bench::new();
    let (mut gpus, mut pods) = (BTreeMap::new(), BTreeMap::new());
    for number in 0..GPUS {
        let pids = (0..CLIENTS).map(|client| 100_000 + number * 1000 + client);
        let processes: Vec<Value> =
            pids.clone().map(|pid| json!({"pid": pid, "used_mib": 5, "kind": "mps"})).collect();
        gpus.insert(number.to_string(), json!({"uuid": gpu(number), "processes": processes}));
        pods.extend(pids.map(|pid| (pid, MINE)));
        let claim = Claim::new(&format!("c{number}"), &["gpu-0"]).reserved_for(&[MINE]);
        bench.site.api.put(&claim);
        bench.record(&claim, number).await;
    }
    bench.node.set(json!({"profile": "h100", "count": GPUS, "log_calls": true, "gpus": gpus}));
    let counted = Arc::new(Counted { pods, ..Counted::default() });
    bench.start_with(WatchdogAction::Terminate, counted.clone());
    let last = GPUS - 1;
    let row = format!("tranche_claim_gpu_processes{}", claim_labels(&format!("c{last}"), MINE, last));
    until("all are known", || bench.metric(&row) == Some(f64::from(CLIENTS))).await;
    let ticks = || bench.metric("tranche_watchdog_tick_duration_seconds_count").unwrap();
    let (ticks_before, reads, others) =
        (ticks(), counted.started.load(Ordering::SeqCst), counted.other.load(Ordering::SeqCst));
    until("more looks", || ticks() >= ticks_before + 10.0).await;
    let looks = counted.started.load(Ordering::SeqCst).abs_diff(reads) / (GPUS * CLIENTS) as usize;
    let passed = (ticks() - ticks_before) as usize;
    assert!(looks <= passed + 1, "{looks} rounds of reads in {passed} looks");
    assert_eq!(counted.other.load(Ordering::SeqCst), others, "a process that stays is not read again");
    assert_eq!(others, (GPUS * CLIENTS) as usize, "each was read once");
    bench.stop.cancel();
    let asked = |list: &str| bench.node.calls(&format!("nvmlDeviceGet{list}RunningProcesses_v3"));
    let rounds = asked("Graphics").div_ceil(GPUS as usize);
    for list in ["Compute", "MPSCompute"] {
        let growing = GPUS as usize;
        assert!(asked(list) <= (rounds + 1) * GPUS as usize + growing, "{list}: {} in {rounds}", asked(list));
    }
    assert_eq!(bench.node.calls("nvmlDeviceGetHandleByUUID"), GPUS as usize);
    assert_eq!(counted.ended.load(Ordering::SeqCst), 0);
    let seconds = bench.metric("tranche_watchdog_tick_duration_seconds_sum").unwrap();
    println!("{} looks, {:.1} ms each", ticks(), seconds / ticks() * 1e3);
}

fn busy(pid: u32, mib: u64, kind: &str, sm_util: u32) -> Value {
    json!({"pid": pid, "used_mib": mib, "kind": kind, "only_if_alive": true, "sm_util": sm_util})
}

/// The row of a claim that has GPU-0 or a share of it.
fn claim_row(bench: &Bench, name: &str, claim: &str, pod: &str) -> Option<f64> {
    bench.metric(&format!("tranche_claim_{name}{}", labels(claim, pod)))
}

fn gpu_row(bench: &Bench, name: &str) -> Option<f64> {
    bench.metric(&format!("tranche_gpu_{name}{{{}}}", device_labels(0)))
}

const MIB: f64 = 1_048_576.0;

#[tokio::test]
async fn a_whole_gpu_has_rows_of_its_own_work_and_of_the_gpu() {
    let mut bench = Bench::new();
    let (mine, mut stranger) = (Sleeper::new(), Sleeper::new());
    bench.proc.show(mine.pid(), Some(MINE));
    bench.proc.show(stranger.pid(), Some(STRANGER));
    let claim = bench.whole("mine", MINE).await;
    let with = |processes: Vec<Value>| {
        let zero = json!({"uuid": "GPU-0", "processes": processes, "used_mib": 8,
                          "temperature_c": 47, "power_mw": 312_500});
        json!({"profile": "h100", "log_calls": true, "gpus": {"0": zero}})
    };
    bench.node.set(with(Vec::new()));
    bench.start(WatchdogAction::Observe);
    let of = |bench: &Bench, name: &str| {
        let text = metrics::text(&bench.registry).unwrap();
        let start = format!("tranche_claim_{name}{{");
        let lines: Vec<_> = text.lines().filter(|line| line.starts_with(&start)).collect();
        assert!(lines.len() < 2, "one row: {lines:?}");
        lines.first().and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
    };
    // Before its first process, by the pod that the ledger names.
    until("an idle one is shown", || of(&bench, "multiprocessor_activity_ratio") == Some(0.0)).await;
    assert_eq!((of(&bench, "memory_used_bytes"), of(&bench, "gpu_processes")), (Some(0.0), Some(0.0)));
    assert!(metrics::text(&bench.registry).unwrap().contains("{namespace=\"team\",pod=\"p\","));
    assert_eq!(of(&bench, "multiprocessor_limit_ratio"), Some(1.0));
    assert_eq!(of(&bench, "violations_total"), None, "nothing to exceed");
    let total = gpu_row(&bench, "memory_total_bytes").unwrap();
    let reserved = gpu_row(&bench, "memory_reserved_bytes").unwrap();
    assert_eq!(of(&bench, "memory_limit_bytes"), Some(total - reserved));

    bench
        .node
        .set(with(vec![busy(mine.pid(), 500, "compute", 35), busy(stranger.pid(), 100, "compute", 50)]));
    until("its work is shown", || of(&bench, "multiprocessor_activity_ratio") == Some(0.35)).await;
    assert_eq!(of(&bench, "memory_used_bytes"), Some(500.0 * MIB));
    assert_eq!(of(&bench, "memory_peak_bytes"), Some(500.0 * MIB));
    assert_eq!(gpu_row(&bench, "activity_ratio"), Some(0.85));
    assert_eq!(gpu_row(&bench, "temperature_celsius"), Some(47.0));
    assert_eq!(gpu_row(&bench, "power_watts"), Some(312.5));
    assert!(gpu_row(&bench, "sm_clock_hertz").is_some_and(|hertz| hertz > 1e9));
    assert!(gpu_row(&bench, "memory_clock_hertz").is_some_and(|hertz| hertz > 1e9));
    assert_eq!(gpu_row(&bench, "memory_used_bytes"), Some(608.0 * MIB));
    assert_eq!(gpu_row(&bench, "uncounted_memory_bytes"), Some(8.0 * MIB));
    assert_eq!(gpu_row(&bench, "shares_activity_ratio"), None);

    // Another's load on the same GPU changes nothing but the GPU's own rows.
    bench
        .node
        .set(with(vec![busy(mine.pid(), 500, "compute", 35), busy(stranger.pid(), 100, "compute", 10)]));
    until("the GPU is less busy", || gpu_row(&bench, "activity_ratio") == Some(0.45)).await;
    assert_eq!(of(&bench, "multiprocessor_activity_ratio"), Some(0.35));
    assert!(stranger.lives());
    let dcgm = metrics::plain_text(&bench.dcgm).unwrap();
    for (name, value) in
        [("DEV_GPU_UTIL", "35.0"), ("DEV_FB_USED", "500.0"), ("PROF_GR_ENGINE_ACTIVE", "0.35")]
    {
        let start = format!("DCGM_FI_{name}{{gpu=\"0\",UUID=\"GPU-0\",pci_bus_id=\"");
        let lines: Vec<_> = dcgm.lines().filter(|line| line.starts_with(&start)).collect();
        let [line] = lines[..] else { panic!("{name}: {dcgm}") };
        assert!(line.ends_with(&format!(" {value}")) && line.contains("device=\"nvidia0\""), "{line}");
        assert!(line.contains("Hostname=\"node-a\",namespace=\"team\",pod=\"pod-1111\""), "{line}");
    }
    bench.release(&claim).await;
    until("all rows go", || {
        let text = metrics::text(&bench.registry).unwrap() + &metrics::text(&bench.dcgm).unwrap();
        ["claim_memory_used_bytes{", "gpu_power_watts{", "DEV_FB_USED{"].iter().all(|row| !text.contains(row))
    })
    .await;
}

#[tokio::test]
async fn of_shares_the_work_is_told_for_all_together_and_for_none_alone() {
    let mut bench = Bench::new();
    let (mine, neighbour, server) = (Sleeper::new(), Sleeper::new(), Sleeper::new());
    bench.proc.show(mine.pid(), Some(MINE));
    bench.proc.show(neighbour.pid(), Some(NEIGHBOUR));
    bench.proc.show(server.pid(), Some(MPS));
    bench.daemons.told().servers = vec![server.pid()];
    bench.share("mine", MINE).await;
    bench.share("neighbours", NEIGHBOUR).await;
    bench.node.set(control(vec![
        busy(mine.pid(), 400, "mps", 20),
        busy(neighbour.pid(), 300, "mps", 30),
        process(server.pid(), 66, "server"),
    ]));
    bench.start(WatchdogAction::Terminate);
    until("the server's work is shown", || gpu_row(&bench, "shares_activity_ratio") == Some(0.5)).await;
    assert_eq!(gpu_row(&bench, "activity_ratio"), Some(0.5));
    assert_eq!(gpu_row(&bench, "uncounted_memory_bytes"), Some(0.0));
    for (claim, pod, mib) in [("mine", MINE, 400.0), ("neighbours", NEIGHBOUR, 300.0)] {
        assert_eq!(claim_row(&bench, "memory_used_bytes", claim, pod), Some(mib * MIB));
        assert_eq!(
            claim_row(&bench, "multiprocessor_activity_ratio", claim, pod),
            None,
            "not known, so absent"
        );
    }
}

#[tokio::test]
async fn what_a_driver_does_not_tell_is_absent_and_a_sensor_that_hangs_stops_no_look() {
    let mut bench = Bench::new();
    let mine = Sleeper::new();
    bench.proc.show(mine.pid(), Some(MINE));
    bench.share("mine", MINE).await;
    let with = |more: Value| {
        let mut control = control(vec![process(mine.pid(), 400, "mps")]);
        control.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        control
    };
    bench.node.set(with(json!({"missing": ["nvmlDeviceGetPowerUsage", "nvmlDeviceGetMemoryInfo_v2"],
        "faults": {"nvmlDeviceGetTemperature": {"return": "NOT_SUPPORTED"}}})));
    bench.start(WatchdogAction::Terminate);
    until("a figure is shown", || gpu_row(&bench, "sm_clock_hertz").is_some()).await;
    for absent in ["power_watts", "temperature_celsius", "memory_total_bytes", "uncounted_memory_bytes"] {
        assert_eq!(gpu_row(&bench, absent), None, "{absent}");
    }
    bench.node.set(with(json!({"faults": {"nvmlDeviceGetTemperature": {"delay_ms": 60_000}}})));
    let failed = |bench: &Bench| bench.metric("tranche_watchdog_failed_readings_total");
    until("a reading is given up", || failed(&bench) == Some(1.0)).await;
    until("nothing is shown of it", || gpu_row(&bench, "sm_clock_hertz").is_none()).await;
    bench.wait_for_looks(50).await;
    assert_eq!(failed(&bench), Some(1.0), "while a thread hangs, no other sensor is asked");
    assert_eq!(bench.metric("tranche_watchdog_failed_looks_total"), Some(0.0));
    assert_eq!(claim_row(&bench, "memory_used_bytes", "mine", MINE), Some(400.0 * MIB));
}

#[tokio::test]
async fn figures_cost_seven_calls_a_gpu_in_twenty_looks() {
    let mut bench = Bench::new();
    let mine = Sleeper::new();
    bench.proc.show(mine.pid(), Some(MINE));
    bench.share("mine", MINE).await;
    bench.node.set(control(vec![process(mine.pid(), 400, "mps")]));
    bench.start(WatchdogAction::Terminate);
    let began = Instant::now();
    bench.wait_for_looks(60).await;
    let most = began.elapsed().as_millis() / (PERIOD.as_millis() * 20) + 2;
    for (call, each) in [
        ("nvmlDeviceGetMemoryInfo_v2", 1),
        ("nvmlDeviceGetTemperature", 1),
        ("nvmlDeviceGetPowerUsage", 1),
        // Of the multiprocessors and of the memory.
        ("nvmlDeviceGetClockInfo", 2),
        ("nvmlDeviceGetUtilizationRates", 1),
        ("nvmlDeviceGetProcessUtilization", 1),
    ] {
        let (calls, most) = (bench.node.calls(call) as u128, each * most);
        assert!((1..=most).contains(&calls), "{call}: {calls} calls, at most {most} are due");
    }
    assert_eq!(bench.node.calls("nvmlDeviceGetHandleByUUID"), 1);
}

/// A MIG device of such a GPU, in which a process keeps half of the multiprocessors busy, as its rows tell.
async fn tell_of_a_mig_device(product: &str, activity: Option<f64>) {
    let mut bench = Bench::new();
    let mine = Sleeper::new();
    bench.proc.show(mine.pid(), Some(MINE));
    let with = |processes: Value| {
        let zero =
            json!({"uuid": "GPU-0", "mig": {"instances": [{"profile": "1g.10gb"}]}, "processes": processes});
        json!({"profile": product, "gpus": {"0": zero}})
    };
    bench.node.set(with(json!([])));
    let gpus = bench.node.nvml().look(Load::Keep).await.unwrap().gpus;
    let MigMode::On(migs) = &gpus.gpus[0].mig else { panic!("no MIG devices: {gpus:?}") };
    let mig = migs[0].clone();
    let claim = Claim::new("mine", &["gpu-0-mig"]).reserved_for(&[MINE]);
    bench.site.api.put(&claim);
    let answer = PreparedDevice {
        requests: vec!["r0".into()],
        pool: PoolName::from(NODE),
        device: DeviceName::new("gpu-0-mig"),
        cdi_ids: Vec::new(),
        share_id: None,
    };
    let device = HeldDevice {
        answer,
        uuid: mig.uuid.clone(),
        gpu: gpu(0),
        mode: HoldMode::Mig,
        placer: Placer::default(),
        mig: None,
    };
    let pods = vec![PodRef { namespace: "team".into(), name: "p".into(), uid: MINE.into() }];
    bench.begin_with(&claim, device, (Vec::new(), pods)).await;
    bench
        .node
        .set(with(json!([{"pid": mine.pid(), "used_mib": 700, "gi": mig.gpu_instance, "sm_util": 50}])));
    bench.start(WatchdogAction::Terminate);
    let value = |bench: &Bench, start: &str| {
        let text = metrics::text(&bench.registry).unwrap();
        let line = text.lines().find(|line| line.starts_with(&format!("tranche_{start}"))).map(str::to_owned);
        line.and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
    };
    until("its memory is shown", || value(&bench, "claim_memory_used_bytes{") == Some(700.0 * MIB)).await;
    until("its size is shown", || value(&bench, "claim_memory_limit_bytes{").is_some()).await;
    assert_eq!(value(&bench, "claim_memory_limit_bytes{"), Some(mig.capacity.memory.0 as f64));
    let busy = || value(&bench, "claim_multiprocessor_activity_ratio{") == activity;
    until("its work is told, where there are samples of it", busy).await;
    let board = format!("{{device=\"\",pool=\"{NODE}\",UUID=\"GPU-0\"}}");
    assert!(value(&bench, &format!("gpu_temperature_celsius{board}")).is_some(), "the board is no device");
    assert_eq!(value(&bench, &format!("gpu_activity_ratio{board}")), None, "none in MIG mode");
    assert_eq!(value(&bench, "claim_gpu_activity_ratio{"), None, "its part of the GPU is not known");
    let own = format!("gpu_memory_used_bytes{{device=\"gpu-0-mig\",pool=\"{NODE}\",UUID=\"{}\"}}", mig.uuid);
    assert_eq!(value(&bench, &own), Some(700.0 * MIB));
    let dcgm = metrics::plain_text(&bench.dcgm).unwrap();
    let instance = format!("GPU_I_PROFILE=\"1g.10gb\",GPU_I_ID=\"{}\"", mig.gpu_instance);
    assert!(dcgm.contains(&instance), "{dcgm}");
    let of = |name: &str| {
        dcgm.lines().find(|line| line.starts_with(name)).and_then(|line| line.rsplit(' ').next())
    };
    let told = activity.map(|_| ["50.0", "0.5"]);
    assert_eq!(of("DCGM_FI_DEV_GPU_UTIL{"), told.map(|told| told[0]), "{dcgm}");
    assert_eq!(of("DCGM_FI_PROF_GR_ENGINE_ACTIVE{"), told.map(|told| told[1]), "{dcgm}");
}

#[tokio::test]
async fn a_mig_device_has_memory_and_activity_of_its_own_and_the_rest_is_its_boards() {
    tell_of_a_mig_device("h100", Some(0.5)).await;
}

#[tokio::test]
async fn before_hopper_nobody_tells_how_busy_a_mig_device_is() {
    tell_of_a_mig_device("a100-80gb", None).await;
}
