//! What people are told of claims: `status.devices` and events, against an API server in memory.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tranche::cluster::status::{ClaimReports, ReportError};
use tranche::cluster::{KubeCluster, NodeCluster};
use tranche::conditions::{
    Concerned, DetourStage, GpuPart, GrantEvent, GrantEventKind, GrantUsage, MpsDetour, PartHealth,
};
use tranche::inventory::{DeviceFaults, Inventory};
use tranche::ledger::{HeldDevice, HoldMode, Intent, Placer, Standing};
use tranche::model::claim::{ClaimRef, PreparedDevice};
use tranche::model::error_chain;
use tranche::model::gpu::{Gpu, Health, MigCapacity, MigMode, MissingMig, NodeGpus, OnDemand, Placement};
use tranche::model::mig::{MigPlace, PossibleMig};
use tranche::model::names::{BootId, ClaimUid, DeviceName, DeviceUuid, NodeName, PoolName};
use tranche::model::quantity::Bytes;
use tranche::model::share::{Grant, Isolation, MpsGroup, Percent};
use tranche::node::daemon_reports;
use tranche::node::device_faults::DaemonDown;
use tranche::node::reporter::{QUEUE_CAPACITY, ReportPace, Reporter, Reporting};
use tranche::supervisor::protocol::{DaemonPhase, DaemonState};

use crate::mock_api::{Failure, MockApi, PATIENCE, Verb};

const NODE: &str = "node-a";
const CLAIMS: &str = "resourceclaims";
const SHARE: &str = "7d3a4c9e-6f0d-4a53-9c3f-0c8c6a1d2b11";

fn cluster(api: &MockApi) -> NodeCluster {
    let api = KubeCluster::with_client(api.client()).with_limit(api.call_limit());
    NodeCluster::new(api, NodeName::new(NODE))
}

fn claim_ref(name: &str) -> ClaimRef {
    ClaimRef { namespace: "ml".to_owned(), name: name.to_owned(), uid: ClaimUid::new(format!("uid-{name}")) }
}

fn share() -> HoldMode {
    HoldMode::Share(Grant {
        memory: Bytes::from_mib(2000),
        compute: Percent::try_from(25_u8).ok(),
        slots: 1,
        processes: 1,
        isolation: Isolation::Mps,
    })
}

fn intent(name: &str, mode: HoldMode) -> Intent {
    let answer = PreparedDevice {
        requests: vec!["gpu".to_owned()],
        pool: PoolName::new(NODE),
        device: DeviceName::new("gpu-0"),
        cdi_ids: Vec::new(),
        share_id: matches!(mode, HoldMode::Share(_)).then(|| SHARE.to_owned()),
    };
    let gpu = DeviceUuid::new("GPU-0");
    let devices =
        vec![HeldDevice { answer, uuid: gpu.clone(), gpu, mode, placer: Placer::default(), mig: None }];
    Intent {
        claim: claim_ref(name),
        boot: BootId::new("boot"),
        devices,
        steps: Vec::new(),
        pods: Vec::new(),
        standing: Standing::Current,
    }
}

/// The claim as the scheduler left it, with the device of [`intent`], one of another driver, and one pod.
fn put_claim(api: &MockApi, intent: &Intent) {
    let device = &intent.devices[0].answer;
    let mut ours =
        json!({"request": "gpu", "driver": "gpu.nvidia.com", "pool": NODE, "device": device.device});
    if let Some(id) = &device.share_id {
        ours["shareID"] = json!(id);
    }
    let theirs = json!({"request": "nic", "driver": "nic.example.com", "pool": NODE, "device": "nic-0"});
    let told = json!({"driver": "nic.example.com", "pool": NODE, "device": "nic-0", "data": {"vlan": 7}});
    let name = &intent.claim.name;
    api.put(
        CLAIMS,
        json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
            "metadata": {"namespace": "ml", "name": name, "uid": intent.claim.uid},
            "spec": {"devices": {"requests": [{"name": "gpu"}]}},
            "status": {
                "allocation": {"devices": {"results": [ours, theirs]}},
                "reservedFor": [{"resource": "pods", "name": format!("{name}-pod"), "uid": "pod-uid"}],
                "devices": [told],
            },
        }),
    );
}

/// Our entry of the claim's status, if there is one. The other driver's must always be there.
fn entry(api: &MockApi, name: &str) -> Option<Value> {
    let claim = api.list(CLAIMS).into_iter().find(|claim| claim["metadata"]["name"] == name)?;
    let entries = claim["status"]["devices"].as_array().cloned().unwrap_or_default();
    assert!(entries.iter().any(|entry| entry["data"]["vlan"] == 7), "{entries:?}");
    let mut ours = entries.into_iter().filter(|entry| entry["driver"] == "gpu.nvidia.com");
    let entry = ours.next();
    assert!(ours.next().is_none(), "one device, one entry");
    entry
}

fn condition(api: &MockApi, name: &str, type_: &str) -> Option<Value> {
    let entry = entry(api, name)?;
    entry["conditions"].as_array()?.iter().find(|one| one["type"] == type_).cloned()
}

fn status(api: &MockApi, name: &str, type_: &str) -> Option<String> {
    Some(condition(api, name, type_)?["status"].as_str()?.to_owned())
}

/// Events of a reason: kind of the object, and the message.
fn events(api: &MockApi, reason: &str) -> Vec<(String, String)> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let events = api.list("events").into_iter().filter(|event| event["reason"] == reason);
    events.map(|event| (text(&event["involvedObject"]["kind"]), text(&event["message"]))).collect()
}

/// A reporter at work.
struct RunningReporter {
    reporter: Reporter,
    inventory: watch::Sender<Inventory>,
    stop: CancellationToken,
    tasks: Vec<JoinHandle<()>>,
}

fn quick() -> ReportPace {
    let ms = Duration::from_millis;
    ReportPace { retry: ms(5), retry_most: ms(20), ..ReportPace::default() }
}

impl RunningReporter {
    fn start(api: &MockApi, pace: ReportPace, recalled: Vec<Intent>) -> Self {
        let cluster = cluster(api);
        let (events, posting) = cluster.events();
        let (reporter, reporting) = Reporting::new(Arc::new(cluster), events);
        let (inventory, known) = watch::channel(Inventory::Unknown);
        let stop = CancellationToken::new();
        let run = reporting.with_pace(pace).recall(recalled).run(known, stop.clone());
        let tasks = vec![
            tokio::spawn(posting),
            tokio::spawn(async move {
                let Ok(()) = run.await;
            }),
        ];
        Self { reporter, inventory, stop, tasks }
    }

    fn health(&self, health: Health) {
        let gpu = Gpu { health, ..crate::cluster::gpu(0) };
        self.inventory.send_replace(Inventory::Found(NodeGpus { gpus: vec![gpu], ..NodeGpus::default() }));
    }

    async fn stop(mut self) {
        self.stop.cancel();
        let run = self.tasks.pop().unwrap();
        tokio::time::timeout(PATIENCE, run).await.expect("it stops").unwrap();
    }
}

fn grant_event(name: &str, kind: GrantEventKind, used: u64) -> GrantEvent {
    let usage = GrantUsage { used: Bytes::from_mib(used), granted: Bytes::from_mib(2000) };
    GrantEvent { claim: claim_ref(name), gpu: DeviceUuid::new("GPU-0"), usage, kind }
}

#[tokio::test]
async fn a_prepared_share_is_told_in_the_claim_and_in_events() {
    let api = MockApi::new();
    let intent = intent("train", share());
    put_claim(&api, &intent);
    let running = RunningReporter::start(&api, quick(), Vec::new());
    running.reporter.prepared(intent.clone());
    api.until("the entry", |api| entry(api, "train").is_some()).await;
    let told = entry(&api, "train").unwrap();
    assert_eq!(told["shareID"], SHARE);
    assert_eq!(
        told["data"],
        json!({"memoryMiB": 2000, "memoryPerProcessMiB": 2000, "computePercent": 25, "maxProcesses": 1,
               "isolation": "mps", "uuid": "GPU-0"})
    );
    assert_eq!(status(&api, "train", "Ready").as_deref(), Some("True"));
    api.until("two events", |api| events(api, "SharePrepared").len() == 2).await;
    let mut told = events(&api, "SharePrepared");
    told.sort();
    assert_eq!((told[0].0.as_str(), told[1].0.as_str()), ("Pod", "ResourceClaim"));
    assert_eq!(told[0].1, "gpu-0: 2000 MiB, 25 % of compute, isolation mps on GPU-0");

    // Preparing again says nothing new.
    running.reporter.prepared(intent);
    let reads = api.count(Verb::Get, CLAIMS);
    running.reporter.grant_changed(grant_event("train", GrantEventKind::Over, 2300));
    api.until("the turn", |api| status(api, "train", "WithinLimits").as_deref() == Some("False")).await;
    assert_eq!(api.count(Verb::Get, CLAIMS), reads + 1);
    assert_eq!(api.count(Verb::Apply, CLAIMS), 2);
    assert_eq!(events(&api, "SharePrepared").len(), 2);
    running.stop().await;
}

#[tokio::test]
async fn a_whole_gpu_costs_nothing_until_it_is_unhealthy() {
    let api = MockApi::new();
    let intent = intent("train", HoldMode::Whole);
    put_claim(&api, &intent);
    let running = RunningReporter::start(&api, quick(), Vec::new());
    running.health(Health::Healthy);
    running.reporter.prepared(intent);
    running.reporter.grant_changed(grant_event("other", GrantEventKind::Over, 1));
    running.health(Health::Unhealthy("Xid 79".to_owned()));
    api.until("the illness", |api| status(api, "train", "DeviceHealthy").as_deref() == Some("False")).await;
    let unhealthy = condition(&api, "train", "DeviceHealthy").unwrap();
    assert!(unhealthy["message"].as_str().unwrap().contains("Xid 79"), "{unhealthy}");
    assert_eq!((api.count(Verb::Get, CLAIMS), api.count(Verb::Apply, CLAIMS)), (1, 1));
    api.until("its events", |api| events(api, "DeviceUnhealthy").len() == 2).await;

    running.health(Health::Healthy);
    api.until("recovery", |api| status(api, "train", "DeviceHealthy").as_deref() == Some("True")).await;
    api.until("its events", |api| events(api, "DeviceRecovered").len() == 2).await;
    running.stop().await;
}

#[tokio::test]
async fn a_claim_is_told_that_the_drivers_files_are_missing_and_that_they_are_back() {
    let api = MockApi::new();
    let intent = intent("train", HoldMode::Whole);
    put_claim(&api, &intent);
    let running = RunningReporter::start(&api, quick(), vec![intent]);
    let files = |health: Health| {
        running.reporter.health_changed(PartHealth {
            gpu: DeviceUuid::new("GPU-0"),
            concerned: Concerned::EveryClaim,
            part: GpuPart::DriverFiles,
            health,
        });
    };
    files(Health::Unhealthy("libcuda.so is missing".to_owned()));
    api.until("the condition", |api| status(api, "train", "DeviceHealthy").as_deref() == Some("False")).await;
    let unhealthy = condition(&api, "train", "DeviceHealthy").unwrap();
    assert_eq!(unhealthy["reason"], "DriverFilesMissing");
    assert!(unhealthy["message"].as_str().unwrap().contains("libcuda.so is missing"), "{unhealthy}");
    api.until("its events", |api| events(api, "DriverFilesMissing").len() == 2).await;
    let told = events(&api, "DriverFilesMissing");
    assert!(told.iter().all(|(_, message)| message.contains("libcuda.so is missing")), "{told:?}");

    files(Health::Healthy);
    api.until("recovery", |api| status(api, "train", "DeviceHealthy").as_deref() == Some("True")).await;
    assert_eq!(condition(&api, "train", "DeviceHealthy").unwrap()["reason"], "Healthy");
    api.until("its events", |api| events(api, "DriverFilesFound").len() == 2).await;
    let told = events(&api, "DriverFilesFound");
    assert!(told.iter().all(|(_, message)| message.contains("GPU-0 are there again")), "{told:?}");
    running.stop().await;
}

#[tokio::test]
async fn a_claim_whose_gpu_is_not_on_the_node_any_more_is_told_what_to_do() {
    let api = MockApi::new();
    let (held, moved) = (intent("train", HoldMode::Whole), intent("share", share()));
    for intent in [&held, &moved] {
        put_claim(&api, intent);
    }
    let running = RunningReporter::start(&api, quick(), vec![held, moved]);
    running.health(Health::Healthy);
    let others = |mig: MigMode, uuid: &str| {
        let gpu = Gpu { uuid: uuid.into(), mig, ..crate::cluster::gpu(0) };
        running.inventory.send_replace(Inventory::Found(NodeGpus { gpus: vec![gpu], ..NodeGpus::default() }));
    };
    for (mig, uuid, words) in [
        (MigMode::Off, "GPU-new", "a GPU was replaced"),
        (MigMode::On(Vec::new()), "GPU-0", "divided otherwise now (MIG)"),
    ] {
        others(mig, uuid);
        for name in ["train", "share"] {
            let told = |api: &MockApi| {
                let healthy = condition(api, name, "DeviceHealthy")?;
                let message = healthy["message"].as_str()?.to_owned();
                (healthy["status"] == "False" && message.contains(words)).then_some(message)
            };
            api.until("the condition", |api| told(api).is_some()).await;
            let message = told(&api).unwrap();
            assert!(message.contains("Delete the pods that use the claim"), "{message}");
        }
        running.health(Health::Healthy);
        for name in ["train", "share"] {
            api.until("recovery", |api| status(api, name, "DeviceHealthy").as_deref() == Some("True")).await;
        }
    }
    running.stop().await;
}

/// Of one that the controller chose the name is the board's.
#[tokio::test]
async fn a_claim_whose_mig_device_somebody_ended_is_told_and_its_neighbour_is_not() {
    let api = MockApi::new();
    let place = MigPlace { profile_id: 19, placement: Placement { start: 2, size: 1 } };
    let of = |name: &str, device: &str| {
        let mut intent = intent(name, HoldMode::Mig);
        intent.devices[0].uuid = DeviceUuid::new(format!("MIG-{name}"));
        intent.devices[0].answer.device = DeviceName::new(device);
        put_claim(&api, &intent);
        intent
    };
    let (mine, other) = (of("mine", "gpu-0"), of("other", "gpu-0-mig-1g10gb-19-3"));
    let running = RunningReporter::start(&api, quick(), vec![mine, other]);
    let look = |missing: Vec<MissingMig>| {
        let places = (2..4).map(|start| PossibleMig {
            id: DeviceUuid::new(format!("place-{start}")),
            profile: "1g.10gb".into(),
            slices: 1,
            most: 7,
            place: MigPlace { placement: Placement { start, size: 1 }, ..place },
            capacity: MigCapacity::default(),
        });
        let cut = OnDemand { places: places.collect(), missing, ..OnDemand::default() };
        let gpu = Gpu { uuid: "GPU-0".into(), mig: MigMode::OnDemand(cut), ..crate::cluster::gpu(0) };
        running.inventory.send_replace(Inventory::Found(NodeGpus { gpus: vec![gpu], ..NodeGpus::default() }));
    };
    look(vec![]);
    look(vec![MissingMig { place, uuid: "MIG-mine".into() }]);
    let told = |name: &str| Some(condition(&api, name, "DeviceHealthy")?["message"].as_str()?.to_owned());
    api.until("the loss", |api| status(api, "mine", "DeviceHealthy").as_deref() == Some("False")).await;
    let words = told("mine").unwrap();
    assert!(words.contains("ended by somebody") && words.contains("Delete the pod"), "{words}");
    api.until("an event", |api| !events(api, "DeviceUnhealthy").is_empty()).await;
    assert_eq!(told("other"), None);
    look(vec![]);
    api.until("it is back", |api| status(api, "mine", "DeviceHealthy").as_deref() == Some("True")).await;
    running.stop().await;
}

#[tokio::test]
async fn a_claim_that_comes_later_is_told_what_is_unhealthy_already() {
    let api = MockApi::new();
    let intent = intent("train", HoldMode::Mig);
    put_claim(&api, &intent);
    let running = RunningReporter::start(&api, quick(), Vec::new());
    let health = Health::Unhealthy("its server is in state FAULT".to_owned());
    running.reporter.health_changed(PartHealth {
        gpu: DeviceUuid::new("GPU-0"),
        concerned: Concerned::EveryClaim,
        part: GpuPart::Mps,
        health,
    });
    running.reporter.prepared(intent);
    api.until("the illness", |api| status(api, "train", "DeviceHealthy").as_deref() == Some("False")).await;
    running.stop().await;
}

/// What claims are told of their daemons.
struct DaemonNews {
    down: watch::Sender<Vec<DaemonDown>>,
    states: watch::Sender<Vec<DaemonState>>,
    _device_faults: watch::Sender<DeviceFaults>,
}

impl DaemonNews {
    fn start(running: &mut RunningReporter, states: Vec<DaemonState>) -> Self {
        let (down, daemons_down) = watch::channel(Vec::new());
        let (device_faults, faults) = watch::channel(DeviceFaults::default());
        let (states, known) = watch::channel(states);
        let sources = daemon_reports::ReportSources { device_faults: faults, states: known, daemons_down };
        let run = daemon_reports::run(sources, running.reporter.clone(), running.stop.clone());
        running.tasks.insert(0, tokio::spawn(async move { _ = run.await }));
        Self { down, states, _device_faults: device_faults }
    }
}

fn serving(group: MpsGroup, deaths: u32) -> DaemonState {
    DaemonState {
        group,
        exclusive: true,
        phase: DaemonPhase::Serving { pid: 7 + deaths },
        limits: None,
        memory_answers: Vec::new(),
        compute_answer: String::new(),
        deaths,
        servers: Vec::new(),
        shm: None,
    }
}

#[tokio::test]
async fn a_share_whose_mps_daemon_dies_is_told_so_and_of_its_return() {
    let api = MockApi::new();
    let intent = intent("train", share());
    put_claim(&api, &intent);
    let mut running = RunningReporter::start(&api, quick(), vec![intent]);
    let news = DaemonNews::start(&mut running, Vec::new());
    let down = DaemonDown { group: MpsGroup::new(["GPU-0".into()]), reason: "it exited".to_owned() };
    news.down.send_replace(vec![down]);
    api.until("the illness", |api| status(api, "train", "DeviceHealthy").as_deref() == Some("False")).await;
    let unhealthy = condition(&api, "train", "DeviceHealthy").unwrap();
    assert!(unhealthy["message"].as_str().unwrap().contains("it exited"), "{unhealthy}");
    news.down.send_replace(Vec::new());
    api.until("recovery", |api| status(api, "train", "DeviceHealthy").as_deref() == Some("True")).await;
    running.stop().await;
}

#[tokio::test]
async fn the_death_of_one_claims_own_daemon_is_told_to_that_claim_alone() {
    let api = MockApi::new();
    let claims = vec![intent("train", share()), intent("other", share())];
    claims.iter().for_each(|intent| put_claim(&api, intent));
    let own = |name: &str| MpsGroup::new(["GPU-0".into()]).of_claim(claim_ref(name).uid);
    let mut running = RunningReporter::start(&api, quick(), claims);
    let news = DaemonNews::start(&mut running, vec![serving(own("train"), 0), serving(own("other"), 0)]);
    api.until("the claims' conditions", |api| {
        ["train", "other"].iter().all(|claim| status(api, claim, "DeviceHealthy").is_some())
    })
    .await;
    news.down.send_replace(vec![DaemonDown { group: own("train"), reason: "it exited".to_owned() }]);
    api.until("the illness", |api| status(api, "train", "DeviceHealthy").as_deref() == Some("False")).await;
    news.down.send_replace(Vec::new());
    api.until("recovery", |api| status(api, "train", "DeviceHealthy").as_deref() == Some("True")).await;
    // What one look did not see, of the other: it is told after all that was told before.
    news.states.send_replace(vec![serving(own("train"), 0), serving(own("other"), 1)]);
    let of_claims = |api: &MockApi, reason| {
        events(api, reason).into_iter().filter(|(kind, _)| kind == "ResourceClaim").count()
    };
    api.until("the other's return", |api| of_claims(api, "MpsRecovered") == 2).await;
    // Each claim heard of its own daemon.
    let told = events(&api, "MpsUnhealthy");
    for words in
        ["the claim's own MPS daemon does not serve: it exited", "the daemon ended; it was started again"]
    {
        let of_claims = told.iter().filter(|(kind, said)| kind == "ResourceClaim" && said.contains(words));
        assert_eq!(of_claims.count(), 1, "{told:?}");
    }
    assert_eq!(status(&api, "other", "DeviceHealthy").as_deref(), Some("True"));
    running.stop().await;
}

/// A daemon is back a second after its death, which is from one look to the next.
#[tokio::test]
async fn a_death_that_no_look_saw_is_told_all_the_same() {
    let api = MockApi::new();
    let claims = vec![intent("train", share()), intent("slice", HoldMode::Mig)];
    claims.iter().for_each(|intent| put_claim(&api, intent));
    let serving = |deaths| vec![serving(MpsGroup::new(["GPU-0".into()]), deaths)];
    let mut running = RunningReporter::start(&api, quick(), claims);
    let news = DaemonNews::start(&mut running, serving(3));
    api.until("the claim's conditions", |api| status(api, "train", "DeviceHealthy").is_some()).await;
    assert!(events(&api, "MpsUnhealthy").is_empty(), "deaths of before are no news");
    assert_eq!(entry(&api, "slice"), None, "nothing to say of it yet");
    news.states.send_replace(serving(4));
    api.until("the death", |api| events(api, "MpsUnhealthy").len() == 4).await;
    let (_, message) = &events(&api, "MpsUnhealthy")[0];
    assert_eq!(message, "MPS on GPU-0 does not work: the daemon ended; it was started again");
    api.until("the return", |api| events(api, "MpsRecovered").len() == 4).await;
    // Whether or not a visit fell between the two: who finds the events finds what is so now, too.
    for claim in ["train", "slice"] {
        assert_eq!(status(&api, claim, "DeviceHealthy").as_deref(), Some("True"), "{claim}");
    }
    running.stop().await;
}

#[tokio::test]
async fn a_claim_hears_that_one_of_its_processes_went_around_mps_and_what_to_leave_alone() {
    let api = MockApi::new();
    let intent = intent("train", share());
    put_claim(&api, &intent);
    let running = RunningReporter::start(&api, quick(), vec![intent]);
    for stage in [DetourStage::Found, DetourStage::Ended] {
        let detour = MpsDetour { claim: claim_ref("train"), gpu: DeviceUuid::new("GPU-0"), pid: 4711, stage };
        running.reporter.went_around_mps(detour);
    }
    for reason in ["AroundMps", "ProcessEnded"] {
        api.until(reason, |api| events(api, reason).len() == 2).await;
        let told = events(&api, reason);
        assert!(told.iter().all(|(_, message)| message.contains("CUDA_MPS_PIPE_DIRECTORY")), "{told:?}");
    }
    running.stop().await;
}

#[tokio::test]
async fn a_claim_whose_mig_device_could_not_be_made_is_told_why_and_its_pod_hears_of_it_from_kubelet() {
    let api = MockApi::new();
    let intent = intent("train", HoldMode::Mig);
    put_claim(&api, &intent);
    let claim = intent.claim.clone();
    let running = RunningReporter::start(&api, quick(), vec![intent]);
    running.reporter.mig_not_made(&claim, "NVML says that the board is in use");
    api.until("the event", |api| !events(api, "MigDeviceNotMade").is_empty()).await;
    let told = events(&api, "MigDeviceNotMade");
    let [(kind, message)] = &told[..] else { panic!("one event: {told:?}") };
    assert_eq!(kind, "ResourceClaim");
    let words = "could not be made for this claim: NVML says that the board is in use. Kubelet tries again";
    assert!(message.contains(words), "{message}");
    running.stop().await;
}

/// Reports until claim and pod have their second event each.
async fn until_told_again(running: &RunningReporter, api: &MockApi) {
    let again = async {
        while events(api, "GrantExceeded").len() < 4 {
            running.reporter.grant_changed(grant_event("train", GrantEventKind::Over, 2500));
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(PATIENCE, again).await.expect("the next event");
}

#[tokio::test]
async fn a_claim_that_stays_over_its_grant_is_told_once_a_minute_and_no_more() {
    let api = MockApi::new();
    let intent = intent("train", share());
    put_claim(&api, &intent);
    // Long enough for a slow machine to tell of a hundred changes in.
    let pace = ReportPace { again: Duration::from_secs(3), ..quick() };
    let running = RunningReporter::start(&api, pace, Vec::new());
    running.reporter.prepared(intent);
    for used in 0..100 {
        running.reporter.grant_changed(grant_event("train", GrantEventKind::Over, 2300 + used));
    }
    api.until("the events", |api| events(api, "GrantExceeded").len() == 2).await;
    let message = &events(&api, "GrantExceeded")[0].1;
    assert_eq!(message, "uses 2300 MiB of the 2000 MiB that it was granted on GPU-0");
    assert!(api.count(Verb::Apply, CLAIMS) <= 2, "the turn is written, not each number");

    // When the time is over, the next event says how many it stands for.
    until_told_again(&running, &api).await;
    let told = events(&api, "GrantExceeded");
    assert!(
        told.iter().any(|(_, message)| message.contains("more like it since the last event")),
        "{told:?}"
    );

    // Another kind does not wait.
    running.reporter.grant_changed(grant_event("train", GrantEventKind::Ended { pid: 4711 }, 2500));
    api.until("the end", |api| events(api, "ProcessEnded").len() == 2).await;
    running.reporter.grant_changed(grant_event("train", GrantEventKind::Within, 1000));
    api.until("peace", |api| status(api, "train", "WithinLimits").as_deref() == Some("True")).await;
    running.stop().await;
}

#[tokio::test]
async fn a_failure_is_tried_again_until_it_is_told() {
    for (verb, failure) in [
        (Verb::Get, Failure::Status(500, "InternalError")),
        (Verb::Get, Failure::Broken),
        (Verb::Get, Failure::Silent),
        (Verb::Apply, Failure::Status(429, "TooManyRequests")),
        (Verb::Apply, Failure::AnswerLost),
        (Verb::Apply, Failure::Silent),
    ] {
        let api = MockApi::new();
        let intent = intent("train", share());
        put_claim(&api, &intent);
        api.fail(verb, CLAIMS, failure);
        let running = RunningReporter::start(&api, quick(), Vec::new());
        running.reporter.prepared(intent);
        api.until(&format!("the entry after {verb:?} {failure:?}"), |api| entry(api, "train").is_some())
            .await;
        api.until("its events", |api| events(api, "SharePrepared").len() == 2).await;
        running.stop().await;
    }
}

#[tokio::test]
async fn without_the_permission_it_says_which_and_goes_on_with_events() {
    let api = MockApi::new();
    let intents = ["one", "two"].map(|name| intent(name, share()));
    intents.iter().for_each(|intent| put_claim(&api, intent));
    let refused = cluster(&api);
    api.fail(Verb::Apply, CLAIMS, Failure::Status(403, "Forbidden"));
    let error = refused.report(&intents[0].claim, &[]).await.unwrap_err();
    assert_eq!(error.label(), "forbidden");
    let words = error_chain(&error);
    for part in
        ["claim ml/one", "patch on resourceclaims/status", "associated-node:patch", "as the test wants"]
    {
        assert!(words.contains(part), "{words}");
    }

    // As 1.36 and newer say that the second rule is missing.
    api.fail(
        Verb::Apply,
        CLAIMS,
        Failure::Said(422, "changing status.devices requires resource=\"resourceclaims/driver\""),
    );
    let error = refused.report(&intents[0].claim, &[]).await.unwrap_err();
    assert_eq!(error.label(), "forbidden");

    let before = api.count(Verb::Apply, CLAIMS);
    api.fail(Verb::Apply, CLAIMS, Failure::Status(403, "Forbidden"));
    api.fail(Verb::Apply, CLAIMS, Failure::Status(403, "Forbidden"));
    let running = RunningReporter::start(&api, quick(), Vec::new());
    for intent in intents {
        running.reporter.prepared(intent);
    }
    api.until("events of both", |api| events(api, "SharePrepared").len() == 4).await;
    assert_eq!(api.count(Verb::Apply, CLAIMS), before + 2, "for a while nothing more is tried");
    assert_eq!((running.reporter.failed(), running.reporter.written()), (2, 0));
    running.stop().await;

    // Once it is given, all is told.
    let running =
        RunningReporter::start(&api, ReportPace { mute: Duration::from_millis(10), ..quick() }, Vec::new());
    api.fail(Verb::Apply, CLAIMS, Failure::Status(403, "Forbidden"));
    running.reporter.prepared(intent("one", share()));
    running.reporter.prepared(intent("two", share()));
    api.until("both", |api| entry(api, "one").is_some() && entry(api, "two").is_some()).await;
    running.stop().await;
}

#[tokio::test]
async fn an_api_server_that_keeps_no_device_status_is_told_apart() {
    let api = MockApi::new();
    let intent = intent("train", share());
    put_claim(&api, &intent);
    api.drop_fields(&["status.devices"]);
    let running = RunningReporter::start(&api, quick(), Vec::new());
    running.reporter.prepared(intent.clone());
    api.until("the events", |api| events(api, "SharePrepared").len() == 2).await;
    assert_eq!((running.reporter.failed(), running.reporter.written()), (1, 0));
    running.stop().await;
    let entries = tranche::conditions::entries(
        &intent.devices,
        &tranche::conditions::ClaimHealth::default(),
        &[],
        jiff::Timestamp::UNIX_EPOCH,
    );
    let error = cluster(&api).report(&intent.claim, &entries).await.unwrap_err();
    assert!(matches!(error, ReportError::NotKept), "{error:?}");
    assert!(error.to_string().contains("DRAResourceClaimDeviceStatus"), "{error}");
}

#[tokio::test]
async fn a_claim_that_is_gone_or_replaced_is_left_alone() {
    let api = MockApi::new();
    let gone = intent("gone", share());
    let mut replaced = intent("train", share());
    put_claim(&api, &replaced);
    replaced.claim.uid = ClaimUid::new("uid-before");
    let cluster = cluster(&api);
    for intent in [&gone, &replaced] {
        assert_eq!(cluster.reported(&intent.claim).await.unwrap_err().label(), "gone");
        assert_eq!(cluster.report(&intent.claim, &[]).await.unwrap_err().label(), "gone");
    }
    let running = RunningReporter::start(&api, quick(), Vec::new());
    let reads = api.count(Verb::Get, CLAIMS);
    running.reporter.prepared(gone);
    running.reporter.prepared(replaced);
    // One more claim, to know that the two were visited.
    let last = intent("zz", share());
    put_claim(&api, &last);
    running.reporter.prepared(last);
    api.until("the last", |api| entry(api, "zz").is_some()).await;
    assert_eq!(api.count(Verb::Get, CLAIMS), reads + 3);
    assert_eq!(entry(&api, "train"), None);
    assert_eq!(running.reporter.failed(), 0);
    running.stop().await;
}

#[tokio::test]
async fn a_restart_writes_what_is_missing_and_nothing_else() {
    let api = MockApi::new();
    let (told, missed) = (intent("told", share()), intent("missed", share()));
    put_claim(&api, &told);
    put_claim(&api, &missed);
    let running = RunningReporter::start(&api, quick(), Vec::new());
    running.reporter.prepared(told.clone());
    api.until("the entry", |api| entry(api, "told").is_some()).await;
    running.stop().await;
    let before = entry(&api, "told");
    let told_events = api.count(Verb::Create, "events");

    let running = RunningReporter::start(&api, quick(), vec![told, missed]);
    api.until("the missed entry", |api| entry(api, "missed").is_some()).await;
    assert_eq!(entry(&api, "told"), before);
    assert_eq!(api.count(Verb::Apply, CLAIMS), 2);
    running.reporter.grant_changed(grant_event("missed", GrantEventKind::Ended { pid: 4711 }, 100));
    api.until("a first event", |api| events(api, "ProcessEnded").len() == 2).await;
    assert!(events(&api, "SharePrepared").len() <= told_events, "no second event for what was told");
    running.stop().await;
}

#[tokio::test]
async fn a_released_claim_is_not_visited_any_more() {
    let api = MockApi::new();
    let (first, second) = (intent("first", share()), intent("second", share()));
    put_claim(&api, &first);
    put_claim(&api, &second);
    api.fail(Verb::Apply, CLAIMS, Failure::Status(500, "InternalError"));
    let running =
        RunningReporter::start(&api, ReportPace { retry: Duration::from_secs(3600), ..quick() }, Vec::new());
    running.reporter.prepared(first.clone());
    api.until("the failure", |api| api.count(Verb::Apply, CLAIMS) == 1).await;
    running.reporter.released(first.claim);
    running.reporter.prepared(second);
    api.until("the second", |api| entry(api, "second").is_some()).await;
    running.reporter.grant_changed(grant_event("first", GrantEventKind::Over, 2300));
    running.reporter.grant_changed(grant_event("second", GrantEventKind::Over, 2300));
    api.until("the second's turn", |api| status(api, "second", "WithinLimits").as_deref() == Some("False"))
        .await;
    assert_eq!(entry(&api, "first"), None);
    assert!(events(&api, "GrantExceeded").len() <= 2);
    running.stop().await;
}

#[tokio::test]
async fn a_full_queue_costs_a_report_and_never_a_wait() {
    let api = MockApi::new();
    let cluster = cluster(&api);
    let (events, _posting) = cluster.events();
    let (reporter, _nobody_reads) = Reporting::new(Arc::new(cluster), events);
    for _ in 0..QUEUE_CAPACITY + 3 {
        reporter.released(claim_ref("train"));
    }
    assert_eq!(reporter.dropped(), 3);
    let disconnected = Reporter::disconnected();
    disconnected.released(claim_ref("train"));
    assert_eq!(disconnected.dropped(), 1);
}
