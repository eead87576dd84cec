//! What kubelet may rely on, seen from kubelet's side of the sockets.

use std::collections::BTreeMap;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::process::{Child, Command};
use tokio::sync::{Semaphore, watch};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tonic::Code;

use tranche::kubelet::pb::dra::Claim;
use tranche::kubelet::pb::health::HealthStatus;
use tranche::kubelet::{
    Answering, Claims, DeviceHealth, Health, MAX_CLAIMS, PluginConfig, PluginTiming, Registration,
    ServedPlugin, serve,
};
use tranche::model::claim::{ClaimRef, PreparedDevice};
use tranche::model::names::{ClaimUid, DRIVER};

use crate::fake_kubelet::raw_grpc::{PROTOCOL_ERROR, RawError};
use crate::fake_kubelet::{
    FakeKubelet, PATIENCE, Release, V1_33, V1_34, V1_37, authority, claim, get_info, get_info_as,
};

/// What the desk below does with a claim, time after time; the last one stays.
#[derive(Clone)]
enum Answer {
    Refuse(&'static str),
    /// No entry for this claim.
    Forget,
    /// An entry for some other claim besides.
    Ramble,
    /// Not before the test opens the gate.
    Wait,
    Panic,
}

/// Prepares claims as the node would, with one partition per claim; keeps count, and can be told to
/// misbehave.
struct FakeClaims {
    script: Mutex<BTreeMap<String, Vec<Option<Answer>>>>,
    partitions: Mutex<BTreeMap<ClaimUid, usize>>,
    created: Mutex<usize>,
    gate: Semaphore,
    calls: watch::Sender<usize>,
    finished: watch::Sender<usize>,
}

impl FakeClaims {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            script: Mutex::default(),
            partitions: Mutex::default(),
            created: Mutex::default(),
            gate: Semaphore::new(0),
            calls: watch::Sender::new(0),
            finished: watch::Sender::new(0),
        })
    }

    fn scripted(uid: &str, answers: &[Option<Answer>]) -> Arc<Self> {
        let fake_claims = Self::new();
        fake_claims.script.lock().unwrap().insert(uid.to_owned(), answers.to_vec());
        fake_claims
    }

    fn next(&self, uid: &ClaimUid) -> Option<Answer> {
        let mut script = self.script.lock().unwrap();
        let answers = script.get_mut(uid.as_str())?;
        if answers.len() > 1 { answers.remove(0) } else { answers.first().cloned().flatten() }
    }

    fn partition(&self, claim: &ClaimRef) -> PreparedDevice {
        let mut partitions = self.partitions.lock().unwrap();
        let number = *partitions.entry(claim.uid.clone()).or_insert_with(|| {
            let mut created = self.created.lock().unwrap();
            *created += 1;
            *created
        });
        PreparedDevice {
            requests: vec!["gpu/large".into()],
            pool: "node-a".into(),
            device: "gpu-0".into(),
            cdi_ids: vec![format!("tranche.dev/claim={}-{number}", claim.uid)],
            share_id: Some("0b0e".into()),
        }
    }

    async fn reach(counter: &watch::Sender<usize>, count: usize) {
        let mut changes = counter.subscribe();
        timeout(PATIENCE, changes.wait_for(|now| *now >= count)).await.expect("in time").unwrap();
    }
}

impl Claims for FakeClaims {
    fn prepare(&self, claims: Vec<ClaimRef>) -> Answering<'_, Vec<PreparedDevice>> {
        Box::pin(async move {
            self.calls.send_modify(|calls| *calls += 1);
            let mut answers = BTreeMap::new();
            for claim in claims {
                match self.next(&claim.uid) {
                    Some(Answer::Refuse(why)) => drop(answers.insert(claim.uid, Err(why.to_owned()))),
                    Some(Answer::Forget) => {}
                    Some(Answer::Panic) => panic!("told to"),
                    Some(Answer::Wait) => {
                        self.gate.acquire().await.unwrap().forget();
                        answers.insert(claim.uid.clone(), Ok(vec![self.partition(&claim)]));
                    }
                    Some(Answer::Ramble) => {
                        answers.insert("nobody-asked".into(), Ok(Vec::new()));
                        answers.insert(claim.uid.clone(), Ok(vec![self.partition(&claim)]));
                    }
                    None => drop(answers.insert(claim.uid.clone(), Ok(vec![self.partition(&claim)]))),
                }
            }
            self.finished.send_modify(|finished| *finished += 1);
            answers
        })
    }

    fn unprepare(&self, claims: Vec<ClaimRef>) -> Answering<'_, ()> {
        Box::pin(async move {
            let mut partitions = self.partitions.lock().unwrap();
            claims
                .into_iter()
                .map(|claim| {
                    partitions.remove(&claim.uid);
                    (claim.uid, Ok(()))
                })
                .collect()
        })
    }
}

/// A served plugin, the health it reports, and the switch to stop it.
struct Served {
    bound: ServedPlugin,
    health: watch::Sender<Vec<DeviceHealth>>,
    stop: CancellationToken,
}

const UID: &str = "9b2f3c1e-6a7d-4f10-8a43-0d4f2f7c1b22";
const OTHER_UID: &str = "11111111-6a7d-4f10-8a43-0d4f2f7c1b22";

fn quick() -> PluginTiming {
    PluginTiming {
        socket_check: Duration::from_millis(10),
        sweep_settle: Duration::from_millis(1),
        ..PluginTiming::default()
    }
}

fn config(root: &Path, uid: &str, timing: PluginTiming) -> PluginConfig {
    PluginConfig { driver: DRIVER.into(), kubelet_dir: root.into(), pod_uid: Some(uid.into()), timing }
}

async fn served_as(config: PluginConfig, fake_claims: &Arc<FakeClaims>) -> Served {
    let (health, devices) = watch::channel(vec![healthy("gpu-0"), healthy("gpu-1")]);
    let stop = CancellationToken::new();
    let health_source = Health { devices, clock: Arc::new(jiff::Timestamp::now) };
    let fake_claims: Arc<dyn Claims> = Arc::clone(fake_claims) as _;
    let bound = serve(config, fake_claims, health_source, stop.clone()).await.unwrap();
    Served { bound, health, stop }
}

async fn served(root: &Path, fake_claims: &Arc<FakeClaims>) -> Served {
    served_as(config(root, UID, quick()), fake_claims).await
}

impl Served {
    async fn stopped(self) -> usize {
        self.stop.cancel();
        timeout(PATIENCE, self.bound.stopped()).await.expect("stops in time").unwrap().unfinished_calls
    }

    async fn told(&self, expected: impl FnMut(&Registration) -> bool) -> Registration {
        let mut state = self.bound.registration.clone();
        timeout(PATIENCE, state.wait_for(expected)).await.expect("told in time").unwrap().clone()
    }
}

fn healthy(device: &str) -> DeviceHealth {
    DeviceHealth { pool: "node-a".into(), device: device.into(), state: Ok(()) }
}

/// A root directory for kubelet.
fn root() -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(root.path().join("plugins_registry")).unwrap();
    root
}

async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < deadline, "never {what}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test]
async fn kubelet_registers_the_plugin_and_prepares_in_either_version() {
    for (release, version) in [(V1_33, "v1beta1.DRAPlugin"), (V1_37, "v1.DRAPlugin")] {
        let root = root();
        let kubelet = FakeKubelet::start_release(root.path(), release);
        let fake_claims = FakeClaims::new();
        let served = served(root.path(), &fake_claims).await;
        let plugin = kubelet.registered(DRIVER).await;
        assert_eq!(plugin.dra, version);
        assert_eq!(served.told(|state| *state != Registration::NotYet).await, Registration::Registered);

        let prepared = kubelet.prepare(DRIVER, &[claim("a"), claim("b")]).await.unwrap();
        let device = &prepared["b"][0];
        assert_eq!(device.request_names, ["gpu"], "kubelet matches base names only");
        assert_eq!((device.pool_name.as_str(), device.device_name.as_str()), ("node-a", "gpu-0"));
        assert_eq!(device.cdi_device_ids, ["tranche.dev/claim=b-2"]);
        assert_eq!(device.share_id.as_deref(), Some("0b0e"));
        kubelet.unprepare(DRIVER, &[claim("a"), claim("b")]).await.unwrap();
        kubelet.unprepare(DRIVER, &[claim("never-seen")]).await.unwrap();
        assert!(fake_claims.partitions.lock().unwrap().is_empty());
    }
}

#[tokio::test]
async fn a_kubelet_without_a_common_version_is_reported_with_its_reason() {
    let root = root();
    let release = Release { dra: &["v7.DRAPlugin"], health: &[] };
    let _kubelet = FakeKubelet::start_release(root.path(), release);
    let served = served(root.path(), &FakeClaims::new()).await;
    let Registration::Refused(why) = served.told(|state| *state != Registration::NotYet).await else {
        panic!("registered");
    };
    assert!(why.contains("v1.DRAPlugin"), "{why}");
}

/// Kubelet dials the endpoint as soon as it knows it: it must be there before the registration
/// socket is.
#[tokio::test]
async fn the_endpoint_accepts_the_moment_the_registration_socket_is_seen() {
    let root = root();
    let fake_claims = FakeClaims::new();
    let sockets = served(root.path(), &fake_claims).await;
    let (registration, endpoint) =
        (sockets.bound.sockets.registration.clone(), sockets.bound.sockets.dra.clone());
    sockets.stopped().await;

    let (rounds, wanted) = std::sync::mpsc::channel::<()>();
    let (results, mut outcomes) = tokio::sync::mpsc::unbounded_channel();
    let watcher = std::thread::spawn(move || {
        for () in wanted {
            while !registration.exists() {
                std::thread::yield_now();
            }
            results.send(UnixStream::connect(&endpoint).map(drop)).unwrap();
        }
    });
    for round in 0..1000 {
        rounds.send(()).unwrap();
        let served = served(root.path(), &fake_claims).await;
        let outcome = timeout(PATIENCE, outcomes.recv()).await.expect("seen in time").unwrap();
        assert!(outcome.is_ok(), "round {round}: {outcome:?}");
        served.stopped().await;
    }
    drop(rounds);
    watcher.join().unwrap();
}

#[tokio::test]
async fn grpc_gos_authority_is_accepted_because_of_the_at_sign() {
    let root = root();
    let served = served(root.path(), &FakeClaims::new()).await;
    let socket = &served.bound.sockets.registration;
    let sent = authority(socket);
    assert!(sent.starts_with("%2F") && sent.contains('@'), "{sent}");
    assert_eq!(get_info(socket).await.unwrap().name, DRIVER);
    assert_eq!(get_info_as(socket, None).await.unwrap().name, DRIVER);
    assert_eq!(get_info_as(socket, Some("localhost")).await.unwrap().name, DRIVER);
    // Were this to be accepted, the @ would no longer be needed in the name.
    let refused = get_info_as(socket, Some(&sent.replace('@', "-"))).await;
    assert!(matches!(refused, Err(RawError::Reset(PROTOCOL_ERROR))), "{refused:?}");
}

#[tokio::test]
async fn get_info_answers_at_once_while_a_prepare_hangs() {
    let root = root();
    let kubelet = FakeKubelet::start(root.path());
    let fake_claims = FakeClaims::scripted("slow", &[Some(Answer::Wait)]);
    let served = served(root.path(), &fake_claims).await;
    let plugin = kubelet.registered(DRIVER).await;
    let hanging = tokio::spawn(async move { plugin.prepare(vec![claim("slow")]).await });
    FakeClaims::reach(&fake_claims.calls, 1).await;

    // The best of a few: the machine may be busy, the plugin may not.
    let mut best = Duration::MAX;
    for _ in 0..5 {
        let began = Instant::now();
        let info = get_info(&served.bound.sockets.registration).await.unwrap();
        best = best.min(began.elapsed());
        assert_eq!(info.r#type, "DRAPlugin");
        assert_eq!(Path::new(&info.endpoint), served.bound.sockets.dra);
        assert_eq!(info.supported_versions[0], "v1.DRAPlugin");
    }
    assert!(best < Duration::from_millis(100), "{best:?}");
    assert!(!hanging.is_finished());
    fake_claims.gate.add_permits(1);
    assert_eq!(hanging.await.unwrap().unwrap().claims["slow"].error, "");
}

#[tokio::test]
async fn a_batch_that_fails_in_part_is_repeated_without_a_second_partition() {
    let root = root();
    let kubelet = FakeKubelet::start(root.path());
    let fake_claims = FakeClaims::scripted("b", &[Some(Answer::Refuse("GPU is busy")), None]);
    let _served = served(root.path(), &fake_claims).await;
    kubelet.registered(DRIVER).await;
    let batch = [claim("a"), claim("b")];
    let error = kubelet.prepare(DRIVER, &batch).await.unwrap_err();
    assert!(error.contains("GPU is busy"), "{error}");
    let first = fake_claims.partitions.lock().unwrap()[&ClaimUid::new("a")];
    let prepared = kubelet.prepare_until_ready(DRIVER, &batch).await;
    assert_eq!(prepared["a"][0].cdi_device_ids, [format!("tranche.dev/claim=a-{first}")]);
    assert_eq!(*fake_claims.created.lock().unwrap(), 2);
}

#[tokio::test]
async fn every_asked_claim_has_one_entry_whatever_the_driver_says() {
    let root = root();
    let kubelet = FakeKubelet::start(root.path());
    let fake_claims = FakeClaims::scripted("forgotten", &[Some(Answer::Forget)]);
    let script = [("rambling", Answer::Ramble), ("mute", Answer::Refuse(""))];
    for (uid, answer) in script {
        fake_claims.script.lock().unwrap().insert(uid.into(), vec![Some(answer)]);
    }
    let served = served(root.path(), &fake_claims).await;
    let plugin = kubelet.registered(DRIVER).await;

    let renamed = Claim { name: "other".into(), ..claim("twins") };
    let asked = vec![
        claim("good"),
        claim("good"),
        claim("forgotten"),
        claim("rambling"),
        claim("mute"),
        claim("twins"),
        renamed,
        claim("../../etc/passwd"),
        Claim { uid: String::new(), ..claim("x") },
    ];
    let answer = plugin.prepare(asked).await.unwrap().claims;
    let mut keys: Vec<&str> = answer.keys().map(String::as_str).collect();
    keys.sort_unstable();
    assert_eq!(keys, ["", "../../etc/passwd", "forgotten", "good", "mute", "rambling", "twins"]);
    for (uid, entry) in &answer {
        let fine = ["good", "rambling"].contains(&uid.as_str());
        assert_eq!(entry.error.is_empty(), fine, "{uid}: {}", entry.error);
        assert_eq!(entry.devices.len(), usize::from(fine), "{uid}");
    }
    assert!(answer["forgotten"].error.contains("default/claim-forgotten"));
    assert!(answer["twins"].error.contains("claim-twins") && answer["twins"].error.contains("other"));
    assert_eq!(served.bound.counters.missing_answers.load(Relaxed), 1);
    assert!(plugin.prepare(Vec::new()).await.unwrap().claims.is_empty());

    let released = plugin.unprepare(vec![claim("good"), claim("good"), claim("a b")]).await.unwrap().claims;
    assert_eq!(released.len(), 2);
    assert_eq!(released["good"].error, "");
    assert!(!released["a b"].error.is_empty());
}

#[tokio::test]
async fn a_driver_that_breaks_off_fails_its_claims_and_serves_the_next() {
    let root = root();
    let kubelet = FakeKubelet::start(root.path());
    let fake_claims = FakeClaims::scripted("bad", &[Some(Answer::Panic), None]);
    let _served = served(root.path(), &fake_claims).await;
    kubelet.registered(DRIVER).await;
    let error = kubelet.prepare(DRIVER, &[claim("bad")]).await.unwrap_err();
    assert!(error.contains("the driver failed"), "{error}");
    kubelet.prepare(DRIVER, &[claim("bad")]).await.unwrap();
}

#[tokio::test]
async fn too_large_a_call_is_refused_with_words() {
    let root = root();
    let kubelet = FakeKubelet::start(root.path());
    let fake_claims = FakeClaims::new();
    let served = served(root.path(), &fake_claims).await;
    let plugin = kubelet.registered(DRIVER).await;
    let many = |count: usize| (0..count).map(|n| claim(&format!("c{n}"))).collect::<Vec<_>>();
    assert_eq!(plugin.prepare(many(MAX_CLAIMS)).await.unwrap().claims.len(), MAX_CLAIMS);
    let status = plugin.prepare(many(MAX_CLAIMS + 1)).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    assert!(status.message().contains("257") && status.message().contains("256"), "{status}");
    assert_eq!(served.bound.counters.refused_calls.load(Relaxed), 1);
    assert_eq!(*fake_claims.calls.borrow(), 1, "a refused call reaches nobody");
}

#[tokio::test]
async fn a_late_call_is_answered_by_the_deadline_and_its_work_goes_on() {
    let root = root();
    let kubelet = FakeKubelet::start(root.path());
    let fake_claims = FakeClaims::scripted("slow", &[Some(Answer::Wait)]);
    let timing = PluginTiming { call: Duration::from_millis(50), ..quick() };
    let served = served_as(config(root.path(), UID, timing), &fake_claims).await;
    let plugin = kubelet.registered(DRIVER).await;
    let answer = plugin.prepare(vec![claim("slow"), claim("a")]).await.unwrap().claims;
    for uid in ["slow", "a"] {
        assert!(answer[uid].error.contains("0.05 s, the deadline"), "{}", answer[uid].error);
    }
    assert_eq!(served.bound.counters.late_calls.load(Relaxed), 1);
    assert_eq!(*fake_claims.finished.borrow(), 0);
    fake_claims.gate.add_permits(1);
    FakeClaims::reach(&fake_claims.finished, 1).await;
}

#[tokio::test]
async fn a_caller_that_leaves_does_not_cancel_the_work() {
    let root = root();
    let kubelet = FakeKubelet::start(root.path());
    let fake_claims = FakeClaims::scripted("slow", &[Some(Answer::Wait)]);
    let _served = served(root.path(), &fake_claims).await;
    let plugin = kubelet.registered(DRIVER).await;
    let caller = tokio::spawn(async move { plugin.prepare(vec![claim("slow")]).await });
    FakeClaims::reach(&fake_claims.calls, 1).await;
    caller.abort();
    assert!(caller.await.unwrap_err().is_cancelled());
    drop(kubelet);
    fake_claims.gate.add_permits(1);
    FakeClaims::reach(&fake_claims.finished, 1).await;
    assert_eq!(fake_claims.partitions.lock().unwrap().len(), 1);
}

#[tokio::test]
async fn health_reaches_kubelet_in_either_version() {
    for (release, version) in [(V1_34, "v1alpha1.DRAResourceHealth"), (V1_37, "v1.DRAResourceHealth")] {
        let root = root();
        let kubelet = FakeKubelet::start_release(root.path(), release);
        let served = served(root.path(), &FakeClaims::new()).await;
        let plugin = kubelet.registered(DRIVER).await;
        assert_eq!(plugin.health, Some(version));
        let mut messages = plugin.watch_health().await.unwrap();
        let first = messages.message().await.unwrap().unwrap();
        assert_eq!(first.devices.len(), 2);
        assert!(first.devices.iter().all(|device| device.health() == HealthStatus::Healthy));

        let state = Err(format!("XID 79: {}", "€".repeat(2000)));
        served.health.send_replace(vec![DeviceHealth { state, ..healthy("gpu-0") }, healthy("gpu-1")]);
        let change = timeout(Duration::from_secs(5), messages.message()).await.expect("told at once");
        let devices = change.unwrap().unwrap().devices;
        assert_eq!(devices.len(), 2, "a device left out turns Unknown");
        assert_eq!(devices[0].device.as_ref().unwrap().device_name, "gpu-0");
        assert_eq!(devices[0].health(), HealthStatus::Unhealthy);
        assert!(devices[0].message.starts_with("XID 79") && devices[0].message.len() <= 1024);
        assert_eq!(devices[1].health(), HealthStatus::Healthy);

        let _devices = served.health.clone();
        let began = Instant::now();
        assert_eq!(served.stopped().await, 0);
        let drain = PluginTiming::default().drain;
        assert!(began.elapsed() < drain, "an open health stream does not hold up the stop");
        assert!(matches!(messages.message().await, Ok(None)), "the stream ends cleanly");
    }
}

#[tokio::test]
async fn deleted_sockets_come_back_and_kubelet_registers_again() {
    let root = root();
    let kubelet = FakeKubelet::start(root.path());
    let served = served(root.path(), &FakeClaims::new()).await;
    let sockets = served.bound.sockets.clone();
    kubelet.registered(DRIVER).await;

    std::fs::remove_file(&sockets.registration).unwrap();
    std::fs::remove_file(&sockets.dra).unwrap();
    until("both back", || sockets.registration.exists() && sockets.dra.exists()).await;
    served.told(|state| *state == Registration::Registered).await;
    kubelet.restart(); // so that it dials the endpoint anew
    kubelet.registered(DRIVER).await;
    kubelet.prepare(DRIVER, &[claim("a")]).await.unwrap();

    let registry = sockets.registration.parent().unwrap();
    std::fs::remove_dir_all(registry).unwrap();
    kubelet.instances(DRIVER, 0).await;
    std::fs::create_dir(registry).unwrap();
    kubelet.registered(DRIVER).await;
    assert!(served.bound.counters.restored_sockets.load(Relaxed) >= 3);
    kubelet.prepare(DRIVER, &[claim("b")]).await.unwrap();
}

#[tokio::test]
async fn a_stop_unlinks_the_registration_first_and_lets_calls_finish() {
    let root = root();
    let kubelet = FakeKubelet::start(root.path());
    let fake_claims = FakeClaims::scripted("slow", &[Some(Answer::Wait)]);
    let served = served(root.path(), &fake_claims).await;
    let sockets = served.bound.sockets.clone();
    let plugin = kubelet.registered(DRIVER).await;
    let call = tokio::spawn(async move { plugin.prepare(vec![claim("slow")]).await });
    FakeClaims::reach(&fake_claims.calls, 1).await;

    served.stop.cancel();
    until("deregistered", || !sockets.registration.exists()).await;
    kubelet.instances(DRIVER, 0).await;
    assert!(sockets.dra.exists(), "a call is under way");
    fake_claims.gate.add_permits(1);
    assert_eq!(call.await.unwrap().unwrap().claims["slow"].error, "");
    assert_eq!(served.stopped().await, 0);
    assert!(!sockets.dra.exists() && !sockets.registration.exists());
}

#[tokio::test]
async fn a_stop_does_not_wait_for_ever() {
    let root = root();
    let kubelet = FakeKubelet::start(root.path());
    let fake_claims = FakeClaims::scripted("slow", &[Some(Answer::Wait)]);
    let timing = PluginTiming { drain: Duration::from_millis(50), ..quick() };
    let served = served_as(config(root.path(), UID, timing), &fake_claims).await;
    let sockets = served.bound.sockets.clone();
    let plugin = kubelet.registered(DRIVER).await;
    let _call = tokio::spawn(async move { plugin.prepare(vec![claim("slow")]).await });
    FakeClaims::reach(&fake_claims.calls, 1).await;
    assert_eq!(served.stopped().await, 1, "the unfinished call is owned up to");
    assert!(!sockets.dra.exists() && !sockets.registration.exists());
}

#[tokio::test]
async fn during_an_update_one_of_two_instances_always_serves() {
    let root = root();
    let kubelet = FakeKubelet::start(root.path());
    let fake_claims = FakeClaims::new();
    let old = served_as(config(root.path(), OTHER_UID, quick()), &fake_claims).await;
    kubelet.registered(DRIVER).await;
    let new = served(root.path(), &fake_claims).await;
    let both = kubelet.instances(DRIVER, 2).await;
    assert_eq!(Path::new(&both[1].info.endpoint), new.bound.sockets.dra);
    assert!(old.bound.sockets.dra.exists(), "a living instance's socket is not swept");
    kubelet.prepare(DRIVER, &[claim("a")]).await.unwrap();
    old.stopped().await;
    let left = kubelet.instances(DRIVER, 1).await;
    assert_eq!(Path::new(&left[0].info.endpoint), new.bound.sockets.dra);
    kubelet.prepare(DRIVER, &[claim("b")]).await.unwrap();
}

/// Where the child process of the next test serves.
const CHILD_ROOT: &str = "TRANCHE_TEST_KUBELET_DIR";

#[tokio::test]
#[ignore = "not a test: the process that the next test kills"]
async fn child_serves_until_killed() {
    let root = PathBuf::from(std::env::var_os(CHILD_ROOT).expect("run by another test"));
    let _served = served(&root, &FakeClaims::new()).await;
    std::future::pending::<()>().await;
}

fn child(root: &Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "kubelet::child_serves_until_killed", "--ignored", "--quiet"])
        .env(CHILD_ROOT, root)
        .stdout(std::process::Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .unwrap()
}

#[tokio::test]
async fn after_kill_9_the_same_pod_registers_again_and_another_pod_clears_the_remains() {
    let root = root();
    let kubelet = FakeKubelet::start(root.path());
    let mut first = child(root.path());
    let registered = kubelet.registered(DRIVER).await;
    first.kill().await.unwrap();
    let (registration, endpoint) = (registered.socket, PathBuf::from(registered.info.endpoint));
    assert!(registration.exists() && endpoint.exists(), "a killed process leaves its sockets");
    assert!(UnixStream::connect(&endpoint).is_err());

    // The container restarts in the same pod: same names.
    let mut again = child(root.path());
    until("served anew", || UnixStream::connect(&endpoint).is_ok()).await;
    kubelet.registered(DRIVER).await;
    kubelet.prepare_until_ready(DRIVER, &[claim("a")]).await;
    again.kill().await.unwrap();

    // The pod is replaced: other names, and nobody else will ever remove the old ones.
    let served = served_as(config(root.path(), OTHER_UID, quick()), &FakeClaims::new()).await;
    until("cleared away", || !registration.exists() && !endpoint.exists()).await;
    let own = served.bound.sockets.registration.clone();
    let is_alone = || kubelet.plugins().iter().map(|plugin| &plugin.socket).eq([&own]);
    until("alone with kubelet", is_alone).await;
    kubelet.prepare(DRIVER, &[claim("b")]).await.unwrap();
}
