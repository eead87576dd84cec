//! The API server's edge and the publisher, against an API server in memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::StreamExt;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tranche::cluster::events::{EventSubject, Note, Severity};
use tranche::cluster::eviction::Eviction;
use tranche::cluster::{CallError, ClaimState, Cluster, KubeCluster, NodeCluster, SliceEvent, StoredSlice};
use tranche::inventory::Inventory;
use tranche::model::claim::{Access, ClaimRef, PodRef};
use tranche::model::gpu::{
    DriverVersions, Gpu, Health, Memory, MigCapacity, MigMode, NodeGpus, OnDemand, Pci, Placement,
};
use tranche::model::mig::{MigProfile, PossibleMig};
use tranche::model::names::{ClaimUid, DeviceUuid, NodeName, PodUid};
use tranche::model::quantity::Bytes;
use tranche::node::offering::Keeps;
use tranche::node::publisher::{Publication, PublicationPace, PublicationPhase, Publisher};
use tranche::sharing::SharingPolicy;
use tranche::slices::Offered;

use crate::mock_api::{Failure, MockApi, PATIENCE, SHORT_CALL, Verb};

const NODE: &str = "node-a";
const SLICES: &str = "resourceslices";
const CLAIMS: &str = "resourceclaims";

fn api() -> MockApi {
    let api = MockApi::new();
    api.put("nodes", json!({"metadata": {"name": NODE, "uid": "node-uid"}}));
    api
}

fn cluster(api: &MockApi) -> NodeCluster {
    cluster_within(api, api.call_limit())
}

fn cluster_within(api: &MockApi, call_limit: Duration) -> NodeCluster {
    let api = KubeCluster::with_client(api.client()).with_limit(call_limit);
    NodeCluster::new(api, NodeName::new(NODE))
}

fn claim_ref(uid: &str) -> ClaimRef {
    ClaimRef { namespace: "ml".to_owned(), name: "train".to_owned(), uid: ClaimUid::new(uid) }
}

fn put_claim(api: &MockApi, status: Value) {
    api.put(
        CLAIMS,
        json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
            "metadata": {"namespace": "ml", "name": "train", "uid": "uid-1"},
            "spec": {"devices": {"requests": [{"name": "gpu"}]}}, "status": status,
        }),
    );
}

fn allocated() -> Value {
    json!({"allocation": {"devices": {"results": [
        {"request": "gpu", "driver": "gpu.nvidia.com", "pool": NODE, "device": "gpu-0"},
    ]}}})
}

#[tokio::test]
async fn a_claim_is_read_as_it_is_now() {
    let api = api();
    let cluster = cluster(&api);
    assert_eq!(cluster.claim_state(&claim_ref("uid-1")).await, ClaimState::Gone);

    put_claim(&api, json!({}));
    assert_eq!(cluster.claim_state(&claim_ref("uid-1")).await, ClaimState::NotAllocated);

    put_claim(&api, allocated());
    let claim = cluster.claim(&claim_ref("uid-1")).await.unwrap();
    assert_eq!(claim.results[0].device.as_str(), "gpu-0");
    assert_eq!(claim.results[0].access, Access::Exclusive);

    let found_uid = ClaimUid::new("uid-1");
    assert_eq!(cluster.claim_state(&claim_ref("uid-0")).await, ClaimState::Replaced { found_uid });
    assert_eq!(api.writes(CLAIMS), 0, "claims are never written");
}

#[tokio::test]
async fn what_is_not_known_of_a_claim_is_not_made_up() {
    let api = api();
    put_claim(&api, allocated());
    let cluster = cluster_within(&api, SHORT_CALL);
    for (failure, words) in [
        (Failure::Silent, "no answer from the API server within 2 s"),
        (Failure::Broken, "cannot be reached"),
        (Failure::Status(500, "InternalError"), "refused with status 500 (as the test wants)"),
        (Failure::Status(403, "Forbidden"), "check the ClusterRole of tranche-node"),
    ] {
        api.fail(Verb::Get, CLAIMS, failure);
        match cluster.claim_state(&claim_ref("uid-1")).await {
            ClaimState::Unknown { reason } => {
                assert!(reason.contains(words) && reason.contains("ml/train"), "{reason}");
            }
            other => panic!("{failure:?} was taken for {other:?}"),
        }
    }
    api.unserve(CLAIMS);
    let state = cluster.claim_state(&claim_ref("uid-1")).await;
    assert!(matches!(state, ClaimState::Unknown { .. }), "a path that is not served: {state:?}");
}

#[tokio::test]
async fn an_event_reaches_the_claim_and_a_full_queue_is_counted() {
    let api = api();
    let (events, task) = cluster(&api).events();
    let note = |reason| Note {
        subject: EventSubject::Claim(claim_ref("uid-1")),
        severity: Severity::Warning,
        reason,
        message: "GPU gpu-0 is in use".to_owned(),
    };
    // Nobody posts yet: 64 fit, one more does not.
    for _ in 0..65 {
        events.tell(note("PrepareFailed"));
    }
    assert_eq!(events.dropped(), 1);
    api.fail(Verb::Create, "events", Failure::Status(500, "InternalError"));
    let task = tokio::spawn(task);
    api.until("63 events", |api| api.list("events").len() == 63).await;
    drop((events.posted(), task));
    assert_eq!(events.failed(), 1);
    let event = &api.list("events")[0];
    assert_eq!(event["involvedObject"]["kind"], "ResourceClaim");
    assert_eq!(event["involvedObject"]["uid"], "uid-1");
    assert_eq!(event["metadata"]["namespace"], "ml");
    assert_eq!(event["message"], "GPU gpu-0 is in use");
    assert_eq!(event["source"]["host"], NODE);
}

#[tokio::test]
async fn a_slice_that_does_not_fit_our_types_hides_nothing() {
    let api = api();
    put_foreign_slice(&api, "good", json!(1));
    put_foreign_slice(&api, "odd", json!("not a number"));
    let cluster = cluster(&api);
    let slices = cluster.slices().await.unwrap();
    let unreadable =
        |slice: &&StoredSlice| matches!(slice, StoredSlice::Unreadable { slice, .. } if slice.name == "odd");
    assert_eq!((slices.len(), slices.iter().filter(unreadable).count()), (2, 1));

    let mut events = cluster.watch_slices();
    assert_eq!(next(&mut events).await, SliceEvent::Restarted);
    put_foreign_slice(&api, "odder", json!({}));
    assert!(matches!(next(&mut events).await, SliceEvent::Stored(slice) if slice.name == "odder"));
    api.cut_watches(true);
    api.remove(SLICES, "odder");
    // The watch comes back by itself, whatever was forgotten.
    while next(&mut events).await != SliceEvent::Restarted {}
}

async fn next(events: &mut (impl StreamExt<Item = SliceEvent> + Unpin)) -> SliceEvent {
    tokio::time::timeout(PATIENCE, events.next()).await.expect("an event").expect("no end")
}

fn put_foreign_slice(api: &MockApi, name: &str, generation: Value) {
    api.put(
        SLICES,
        json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": name},
            "spec": {
                "driver": "gpu.nvidia.com", "nodeName": NODE,
                "pool": {"name": NODE, "generation": generation, "resourceSliceCount": 1},
            },
        }),
    );
}

/// A publisher at work.
struct Rig {
    api: MockApi,
    inventory: watch::Sender<Inventory>,
    state: watch::Receiver<Publication>,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

fn quick() -> PublicationPace {
    let ms = Duration::from_millis;
    PublicationPace {
        content: ms(0),
        repair: ms(0),
        missing: ms(0),
        look: ms(0),
        retry: ms(10),
        retry_most: ms(100),
        lock: ms(10),
        ask_again: Duration::from_secs(3600),
    }
}

/// A lock that one instance holds at a time.
#[derive(Clone, Default)]
struct OneOnly(Arc<AtomicBool>);

struct Held(OneOnly);

impl Drop for Held {
    fn drop(&mut self) {
        self.0.0.store(false, Ordering::SeqCst);
    }
}

impl OneOnly {
    fn try_lock(&self) -> Option<Box<dyn Send>> {
        let free = !self.0.swap(true, Ordering::SeqCst);
        free.then(|| Box::new(Held(self.clone())) as Box<dyn Send>)
    }
}

impl Rig {
    fn start(api: &MockApi, pace: PublicationPace) -> Self {
        Self::with_lock(api, pace, OneOnly::default())
    }

    fn with_lock(api: &MockApi, pace: PublicationPace, lock: OneOnly) -> Self {
        let (inventory, receiver) = watch::channel(Inventory::Unknown);
        let (publisher, state) = Publisher::new(Arc::new(cluster(api)), NodeName::new(NODE), receiver);
        let stop = CancellationToken::new();
        let run = publisher.with_pace(pace).run(Box::new(move || Ok(lock.try_lock())), stop.clone());
        Self { api: api.clone(), inventory, state, stop, task: tokio::spawn(run) }
    }

    fn find(&self, gpus: NodeGpus) {
        self.inventory.send_replace(Inventory::Found(gpus));
    }

    #[track_caller]
    fn until(&self, what: &str, holds: impl Fn(&Publication) -> bool) -> impl Future<Output = Publication> {
        let mut state = self.state.clone();
        let (what, caller) = (what.to_owned(), std::panic::Location::caller());
        async move {
            let found = tokio::time::timeout(PATIENCE, state.wait_for(holds)).await;
            let found = found.map(|state| state.expect("the publisher ended").clone());
            found.unwrap_or_else(|_| panic!("{caller}: waited in vain for {what}: {:?}", state.borrow()))
        }
    }

    async fn published(&self, generation: i64) -> Publication {
        let there = |p: &Publication| p.phase == PublicationPhase::Published && p.generation == generation;
        self.until(&format!("generation {generation}"), there).await
    }

    async fn stop(self) -> Publication {
        self.stop.cancel();
        tokio::time::timeout(PATIENCE, self.task).await.expect("it stops").unwrap();
        self.state.borrow().clone()
    }

    /// Ends it as SIGKILL would: between any two awaits.
    async fn kill(self) {
        self.task.abort();
        let _ = self.task.await;
    }
}

pub fn gpu(minor: u32) -> Gpu {
    Gpu {
        uuid: DeviceUuid::new(format!("GPU-{minor}")),
        minor,
        product_name: "NVIDIA H100 80GB HBM3".to_owned(),
        brand: "Nvidia".to_owned(),
        architecture: "Hopper".to_owned(),
        compute_capability: (9, 0),
        memory: Memory::Known { total: Bytes(80 << 30), reserved: Bytes(0) },
        multiprocessors: Some(132),
        addressing_mode: None,
        pci: Pci { bus_id: format!("0000:{minor:02x}:00.0"), root: None, numa_node: None },
        mig: MigMode::Off,
        health: Health::Healthy,
    }
}

fn gpus(count: u32) -> NodeGpus {
    NodeGpus {
        driver: DriverVersions { driver: "550.163.01".to_owned(), cuda: "12.4".to_owned() },
        gpus: (0..count).map(gpu).collect(),
    }
}

/// Device names by slice, in order of the slices' names, as a scheduler sees the pool; `None` if it is
/// incomplete.
fn pool(api: &MockApi) -> Option<Vec<Vec<String>>> {
    let slices = api.list(SLICES);
    let generation = |slice: &Value| slice["spec"]["pool"]["generation"].as_i64();
    let top = slices.iter().filter_map(generation).max()?;
    let slices: Vec<_> = slices.iter().filter(|slice| generation(slice) == Some(top)).collect();
    let count = slices.len() as u64;
    let complete = slices.iter().all(|s| s["spec"]["pool"]["resourceSliceCount"].as_u64() == Some(count));
    let names = |slice: &&Value| {
        let devices = slice["spec"]["devices"].as_array().cloned().unwrap_or_default();
        devices.iter().map(|device| device["name"].as_str().unwrap().to_owned()).collect()
    };
    complete.then(|| slices.iter().map(names).collect())
}

fn devices(api: &MockApi) -> Option<usize> {
    pool(api).map(|slices| slices.iter().map(Vec::len).sum())
}

#[tokio::test]
async fn the_first_look_is_published_at_once_and_then_nothing_more() {
    let api = api();
    // The pace of production: the first publication does not wait for it.
    let rig = Rig::start(&api, PublicationPace::default());
    rig.until("the wait for GPUs", |p| p.phase == PublicationPhase::WaitingForInventory).await;
    assert_eq!(api.writes(SLICES), 0, "nothing is known yet");

    rig.find(gpus(8));
    let state = rig.published(1).await;
    assert_eq!((state.slices, state.devices, state.writes), (1, 8, 1));
    let slice = &api.list(SLICES)[0];
    assert_eq!(slice["spec"]["nodeName"], NODE);
    assert_eq!(slice["metadata"]["ownerReferences"][0]["uid"], "node-uid");
    assert_eq!(slice["metadata"]["ownerReferences"][0]["controller"], true);

    // The same GPUs, an unhealthy one, a watch that starts anew: nothing to write.
    rig.find(gpus(8));
    let mut ill = gpus(8);
    ill.gpus[3].health = Health::Unhealthy("Xid 79".to_owned());
    rig.find(ill);
    let looks = api.count(Verb::List, SLICES);
    api.cut_watches(true);
    api.until("a new look", |api| api.count(Verb::List, SLICES) >= looks + 2).await;
    assert_eq!(api.writes(SLICES), 1);

    let state = rig.stop().await;
    assert_eq!(state.phase, PublicationPhase::Stopped);
    assert_eq!(devices(&api), Some(8), "the slices stay");
}

#[tokio::test]
async fn a_restart_finds_its_slices_and_writes_nothing() {
    let api = api();
    let rig = Rig::start(&api, quick());
    rig.find(gpus(2));
    rig.published(1).await;
    rig.stop().await;
    let rig = Rig::start(&api, quick());
    rig.find(gpus(2));
    let state = rig.published(1).await;
    assert_eq!((state.writes, api.writes(SLICES)), (0, 1));
}

#[tokio::test]
async fn a_node_without_gpus_publishes_an_empty_pool() {
    let api = api();
    let rig = Rig::start(&api, quick());
    rig.inventory.send_replace(Inventory::Unavailable { reason: "no NVIDIA driver".to_owned() });
    let state = rig.published(1).await;
    assert_eq!((state.slices, state.devices), (1, 0));
    assert_eq!(state.empty_because.as_deref(), Some("no NVIDIA driver"));
    assert_eq!(pool(&api), Some(vec![vec![]]));
    rig.find(gpus(1));
    rig.until("the GPU", |p| p.devices == 1 && p.empty_because.is_none()).await;
    assert_eq!(pool(&api), Some(vec![vec!["gpu-0".to_owned()]]));
}

#[tokio::test]
async fn slices_that_kubelet_wipes_come_back_at_once() {
    let api = api();
    let rig = Rig::start(&api, PublicationPace::default());
    rig.find(gpus(2));
    rig.published(1).await;
    api.remove(SLICES, "");
    let state = rig.published(2).await;
    assert_eq!(state.writes, 2);
    assert_eq!(devices(&api), Some(2));
}

#[tokio::test]
async fn a_watch_that_never_comes_back_leaves_nobody_deaf() {
    let api = api();
    for _ in 0..100 {
        api.fail(Verb::Watch, SLICES, Failure::Status(410, "Expired"));
    }
    let rig = Rig::start(&api, quick());
    rig.find(gpus(2));
    rig.published(1).await;
    api.remove(SLICES, "");
    rig.published(2).await;
    assert_eq!(devices(&api), Some(2));
}

#[tokio::test]
async fn an_edit_by_hand_is_undone_but_only_once_in_a_while() {
    let api = api();
    let rig = Rig::start(&api, PublicationPace { repair: Duration::from_secs(3600), ..quick() });
    rig.find(gpus(2));
    rig.published(1).await;
    let cut = |slice: &mut Value| _ = slice["spec"]["devices"].as_array_mut().unwrap().pop();
    api.edit(SLICES, cut);
    rig.until("the repair", |p| p.writes == 2).await;
    api.until("the repair", |api| devices(api) == Some(2)).await;

    // Someone insists: that is looked at, and left for later.
    api.edit(SLICES, cut);
    rig.until("the wait", |p| p.phase == PublicationPhase::Pending).await;
    assert_eq!((devices(&api), api.writes(SLICES)), (Some(1), 2));

    // A deletion does not wait for that.
    api.remove(SLICES, "");
    api.until("the slice", |api| devices(api) == Some(2)).await;
}

#[tokio::test]
async fn content_that_flaps_is_written_once_per_pause() {
    let api = api();
    let rig = Rig::start(&api, PublicationPace { content: Duration::from_secs(3600), ..quick() });
    rig.find(gpus(2));
    rig.published(1).await;
    rig.find(gpus(1));
    rig.until("the wait", |p| p.phase == PublicationPhase::Pending).await;
    rig.find(gpus(2));
    rig.until("peace", |p| p.phase == PublicationPhase::Published).await;
    assert_eq!(api.writes(SLICES), 1);
}

#[tokio::test]
async fn an_annotation_of_somebody_elses_is_none_of_our_business() {
    let api = api();
    let rig = Rig::start(&api, quick());
    rig.find(gpus(1));
    rig.published(1).await;
    let looks = api.count(Verb::List, SLICES);
    api.edit(SLICES, |slice| slice["metadata"]["annotations"] = json!({"by": "hand"}));
    api.until("a look", |api| api.count(Verb::List, SLICES) > looks).await;
    rig.find(gpus(2));
    rig.until("the second GPU", |p| p.devices == 2).await;
    assert_eq!(api.writes(SLICES), 2);
    assert_eq!(api.list(SLICES)[0]["metadata"]["annotations"]["by"], "hand", "it survives our write");
}

#[tokio::test]
async fn fields_that_the_server_drops_cause_no_second_write() {
    let api = api();
    api.drop_fields(&["multiprocessors"]);
    let rig = Rig::start(&api, quick());
    rig.find(gpus(2));
    let state = rig.published(1).await;
    let dropped: Vec<_> = state.dropped.paths().collect();
    assert_eq!(dropped, ["spec.devices[].attributes.multiprocessors"]);
    // Whatever happens to the watch, that is not repaired.
    for _ in 0..5 {
        let looks = api.count(Verb::List, SLICES);
        api.cut_watches(true);
        // The watcher's own, and the publisher's.
        api.until("a look", |api| api.count(Verb::List, SLICES) >= looks + 2).await;
    }
    assert_eq!(api.writes(SLICES), 1);

    // The server learns the field, and the next write that is due brings it.
    api.drop_fields(&[]);
    api.remove(SLICES, "");
    let state = rig.published(2).await;
    assert!(state.dropped.is_empty());
    assert_eq!(api.list(SLICES)[0]["spec"]["devices"][0]["attributes"]["multiprocessors"]["int"], 132);
}

/// What an API server without DRAConsumableCapacity leaves out.
const SHARES: [&str; 2] = ["allowMultipleAllocations", "requestPolicy"];

fn first_device(api: &MockApi) -> Value {
    api.list(SLICES)[0]["spec"]["devices"][0].clone()
}

#[track_caller]
fn assert_shared(device: &Value) {
    assert_eq!(device["allowMultipleAllocations"], true, "{device}");
    assert_eq!(device["attributes"]["isolation"]["string"], "mps", "{device}");
    assert_eq!(device["capacity"]["memory"]["value"], "81408Mi", "{device}");
    assert_eq!(device["capacity"]["compute"]["requestPolicy"]["default"], "0", "{device}");
}

/// As the scheduler sees it. `isolation` is that of shares which our controller may place.
#[track_caller]
fn assert_whole(device: &Value, isolation: &str) {
    assert!(device["allowMultipleAllocations"].is_null(), "{device}");
    assert_eq!(device["attributes"]["isolation"]["string"], isolation, "{device}");
    let grantable = &device["attributes"]["grantableMemoryMiB"]["int"];
    assert_eq!(grantable.as_u64(), (isolation == "mps").then_some(81_408), "{device}");
    assert_eq!(device["capacity"], json!({"memory": {"value": "80Gi"}}), "{device}");
}

/// Twice: what comes of the first look is over before the second begins.
async fn looked_again(api: &MockApi) {
    for _ in 0..2 {
        let looks = api.count(Verb::List, SLICES);
        api.cut_watches(true);
        api.until("a look", |api| api.count(Verb::List, SLICES) >= looks + 2).await;
    }
}

#[tokio::test]
async fn gpus_are_offered_in_shares_as_the_policy_has_it() {
    let api = api();
    let (inventory, receiver) = watch::channel(Inventory::Found(gpus(2)));
    let (publisher, state) = Publisher::new(Arc::new(cluster(&api)), NodeName::new(NODE), receiver);
    let policy = SharingPolicy { exclusive: vec!["1".parse().unwrap()], ..SharingPolicy::default() };
    let stop = CancellationToken::new();
    let run = publisher
        .with_pace(quick())
        .with_sharing(policy)
        .run(Box::new(|| Ok(Some(Box::new(())))), stop.clone());
    let rig = Rig { api: api.clone(), inventory, state, stop, task: tokio::spawn(run) };
    let state = rig.published(1).await;
    assert_eq!((state.writes, state.keeps), (1, Keeps::Shares));
    let devices = api.list(SLICES)[0]["spec"]["devices"].clone();
    assert_shared(&devices[0]);
    assert_whole(&devices[1], "none");
    assert!(matches!(state.offered[&"gpu-0".into()], Offered::Shares { slots: 16, .. }));
    let why = format!("{:?}", state.offered[&"gpu-1".into()]);
    assert!(why.contains("--exclusive-gpus 1"), "{why}");
}

#[tokio::test]
async fn an_api_server_without_shares_gets_whole_gpus_in_one_write() {
    let api = api();
    api.drop_fields(&SHARES);
    let rig = Rig::start(&api, quick());
    rig.find(gpus(2));
    let state = rig.published(1).await;
    assert_eq!((state.writes, state.keeps), (1, Keeps::WholeOnly));
    assert!(state.dropped.shares() && state.dropped.to_string().contains("DRAConsumableCapacity"));
    assert_whole(&first_device(&api), "mps");
    for _ in 0..3 {
        looked_again(&api).await;
    }
    rig.find(gpus(3));
    let state = rig.until("the third GPU", |p| p.devices == 3).await;
    assert!(state.dropped.shares(), "it is remembered");
    let why = format!("{:?}", state.offered[&"gpu-2".into()]);
    assert!(why.contains("DRAConsumableCapacity"), "{why}");
    assert_eq!((api.writes(SLICES), api.count(Verb::DryRun, SLICES)), (2, 1));

    // A restart finds them as they are to be, and writes nothing.
    rig.stop().await;
    let rig = Rig::start(&api, quick());
    rig.find(gpus(3));
    let state = rig.published(1).await;
    assert_eq!((state.writes, state.keeps), (0, Keeps::WholeOnly));
}

#[tokio::test]
async fn a_dry_run_that_fails_leaves_it_to_the_first_write() {
    for failure in [Failure::Status(400, "BadRequest"), Failure::Broken] {
        let api = api();
        api.drop_fields(&SHARES);
        api.fail(Verb::DryRun, SLICES, failure);
        // The pace of production: the second write does not wait for it.
        let rig = Rig::start(&api, PublicationPace::default());
        rig.find(gpus(1));
        let state = rig
            .until("whole GPUs", |p| p.phase == PublicationPhase::Published && p.keeps == Keeps::WholeOnly)
            .await;
        assert_eq!(state.writes, 2, "{failure:?}");
        assert_whole(&first_device(&api), "mps");
        looked_again(&api).await;
        assert_eq!(api.writes(SLICES), 2, "{failure:?}");
    }
}

#[tokio::test]
async fn an_api_server_that_learns_shares_is_found_out_and_one_that_forgets_them_too() {
    let api = api();
    api.drop_fields(&SHARES);
    let rig = Rig::start(&api, PublicationPace { ask_again: Duration::from_millis(50), ..quick() });
    rig.find(gpus(1));
    rig.until("whole GPUs", |p| p.phase == PublicationPhase::Published && p.keeps == Keeps::WholeOnly).await;
    api.until("it is asked again", |api| api.count(Verb::DryRun, SLICES) >= 3).await;
    assert_eq!(api.writes(SLICES), 1, "asking writes nothing");
    api.drop_fields(&[]);
    let state =
        rig.until("shares", |p| p.phase == PublicationPhase::Published && p.keeps == Keeps::Shares).await;
    assert!(state.dropped.is_empty(), "{}", state.dropped);
    assert_shared(&first_device(&api));

    api.drop_fields(&SHARES);
    rig.find(gpus(2));
    rig.until("whole GPUs", |p| p.phase == PublicationPhase::Published && p.keeps == Keeps::WholeOnly).await;
    assert_whole(&first_device(&api), "mps");
}

#[tokio::test]
async fn failures_and_conflicts_are_got_over() {
    for (verb, failure) in [
        (Verb::List, Failure::Status(500, "InternalError")),
        (Verb::List, Failure::Silent),
        (Verb::Create, Failure::Broken),
        (Verb::Create, Failure::AnswerLost),
        (Verb::Create, Failure::Status(403, "Forbidden")),
    ] {
        let api = api();
        api.fail(verb, SLICES, failure);
        let rig = Rig::start(&api, quick());
        rig.find(gpus(2));
        rig.until(&format!("{verb:?} after {failure:?}"), |p| p.phase == PublicationPhase::Published).await;
        assert_eq!(devices(&api), Some(2), "{verb:?} after {failure:?}");
        assert_eq!(api.list(SLICES).len(), 1, "{verb:?} after {failure:?}");
    }
}

#[tokio::test]
async fn a_conflict_is_read_again_and_resolved() {
    let api = api();
    let rig = Rig::start(&api, quick());
    rig.find(gpus(2));
    rig.published(1).await;
    for failure in [Failure::Status(409, "Conflict"), Failure::AnswerLost] {
        api.fail(Verb::Update, SLICES, failure);
    }
    rig.find(gpus(3));
    let state = rig.until("three GPUs", |p| p.devices == 3).await;
    assert_eq!(state.generation, 1);
    assert_eq!(devices(&api), Some(3));
    assert!(state.failures >= 1);
}

#[tokio::test]
async fn the_words_of_a_failure_say_what_to_do() {
    let api = api();
    for _ in 0..100 {
        api.fail(Verb::Create, SLICES, Failure::Status(403, "Forbidden"));
    }
    let rig = Rig::start(&api, quick());
    rig.find(gpus(1));
    let state = rig.until("words", |p| matches!(p.phase, PublicationPhase::Failing { .. })).await;
    let PublicationPhase::Failing { error } = state.phase else { panic!() };
    assert!(error.contains("CREATE resourceslices 00000-gpu.nvidia.com-node-a-"), "{error}");
    assert!(error.contains("check the ClusterRole of tranche-node"), "{error}");
}

#[tokio::test]
async fn a_pod_is_evicted_if_it_is_the_one_that_was_meant_and_no_budget_forbids_it() {
    let api = api();
    let cluster = KubeCluster::with_client(api.client()).with_limit(SHORT_CALL);
    let put = |name: &str, app: &str| {
        api.put(
            "pods",
            json!({"metadata": {"namespace": "ml", "name": name, "uid": format!("uid-{name}"),
            "labels": {"app": app}}, "spec": {"nodeName": NODE}}),
        )
    };
    let budget = |name: &str, app: &str, allowed: u32| {
        api.put(
            "poddisruptionbudgets",
            json!({"metadata": {"namespace": "ml", "name": name},
            "spec": {"selector": {"matchLabels": {"app": app}}}, "status": {"disruptionsAllowed": allowed}}),
        )
    };
    let pod = |name: &str, uid: &str| PodRef {
        namespace: "ml".to_owned(),
        name: name.to_owned(),
        uid: PodUid::new(uid),
    };
    ["a", "b", "c", "d"].iter().for_each(|name| drop(put(name, name)));
    budget("b", "b", 0);
    budget("c", "c", 1);
    budget("c-too", "c", 1);
    let is_ending = |name: &str| {
        let pods = api.list("pods").into_iter();
        pods.filter(|pod| pod["metadata"]["name"] == name)
            .any(|pod| pod["metadata"]["deletionTimestamp"].is_string())
    };
    assert_eq!(cluster.evict_pod(&pod("a", "uid-other")).await.unwrap(), Eviction::Gone);
    assert!(!is_ending("a"), "another pod than the one that was meant");
    assert_eq!(cluster.evict_pod(&pod("a", "uid-a")).await.unwrap(), Eviction::Evicted);
    assert!(is_ending("a"));
    assert_eq!(cluster.evict_pod(&pod("nobody", "uid")).await.unwrap(), Eviction::Gone);
    let Eviction::Protected(words) = cluster.evict_pod(&pod("b", "uid-b")).await.unwrap() else { panic!() };
    assert!(words.contains("disruption budget") && words.contains("needs 1 healthy pods"), "{words}");
    let Eviction::Protected(words) = cluster.evict_pod(&pod("c", "uid-c")).await.unwrap() else { panic!() };
    assert!(words.contains("more than one PodDisruptionBudget"), "{words}");
    assert!(!is_ending("b") && !is_ending("c"));
    for failure in [
        Failure::Status(429, "TooManyRequests"),
        Failure::Status(403, "Forbidden"),
        Failure::Silent,
        Failure::Status(409, "Conflict"),
    ] {
        api.fail(Verb::Create, "pods", failure);
    }
    let mut failed = Vec::new();
    for _ in 0..4 {
        failed.push(cluster.evict_pod(&pod("d", "uid-d")).await.unwrap_err());
    }
    let labels: Vec<&str> = failed.iter().map(CallError::label).collect();
    assert_eq!(labels, ["refused", "forbidden", "timeout", "conflict"]);
    assert!(failed[1].to_string().starts_with("EVICT pods ml/d: forbidden"), "{}", failed[1]);
    assert!(!is_ending("d"));
}

#[tokio::test]
async fn two_slices_change_together_under_a_new_generation() {
    let api = api();
    let rig = Rig::start(&api, quick());
    rig.find(gpus(70));
    let state = rig.published(1).await;
    assert_eq!((state.slices, state.devices, state.writes), (2, 70, 2));
    let split = |api: &MockApi| pool(api).map(|s| s.iter().map(Vec::len).collect::<Vec<_>>());
    assert_eq!(split(&api), Some(vec![64, 6]));
    // The last one grows: one write. All move up: two writes and a new generation.
    rig.find(gpus(71));
    rig.until("71", |p| p.devices == 71).await;
    assert_eq!((api.writes(SLICES), split(&api)), (3, Some(vec![64, 7])));
    let mut less = gpus(71);
    less.gpus.remove(0);
    rig.find(less);
    let state = rig.published(2).await;
    assert_eq!((state.writes, split(&api)), (5, Some(vec![64, 6])));
    rig.find(gpus(3));
    rig.published(3).await;
    assert_eq!(split(&api), Some(vec![3]));
}

#[tokio::test]
async fn killed_between_two_writes_the_next_one_recovers() {
    let api = api();
    let rig = Rig::start(&api, quick());
    rig.find(gpus(70));
    rig.published(1).await;
    let mut less = gpus(71);
    less.gpus.remove(0);
    // The second of the two updates hangs, and there it dies.
    let before = api.writes(SLICES);
    api.fail(Verb::Update, SLICES, Failure::AnswerLost);
    api.fail(Verb::Update, SLICES, Failure::Silent);
    rig.find(less.clone());
    api.until("the second update", |api| api.writes(SLICES) >= before + 2).await;
    rig.kill().await;
    assert_eq!(devices(&api), None, "half a pool is no pool");

    let rig = Rig::start(&api, quick());
    rig.find(less);
    rig.until("it recovers", |p| p.phase == PublicationPhase::Published).await;
    assert_eq!(devices(&api), Some(70));
    assert!(rig.state.borrow().generation >= 2);
}

#[tokio::test]
async fn what_is_left_of_an_earlier_driver_is_taken_over() {
    let api = api();
    put_foreign_slice(&api, "node-a-gpu.nvidia.com-x7k2p", json!(7));
    put_foreign_slice(&api, "odd", json!("not a number"));
    let rig = Rig::start(&api, quick());
    rig.find(gpus(1));
    let state = rig.until("publication", |p| p.phase == PublicationPhase::Published).await;
    assert!(state.generation > 7, "{state:?}");
    assert_eq!(pool(&api), Some(vec![vec!["gpu-0".to_owned()]]));
    assert_eq!(api.list(SLICES).len(), 1);
}

#[tokio::test]
async fn other_drivers_and_nodes_slices_are_never_touched() {
    let api = api();
    for (name, driver, node) in [("nic", "nic.example.com", NODE), ("far", "gpu.nvidia.com", "node-b")] {
        api.put(
            SLICES,
            json!({"metadata": {"name": name}, "spec": {"driver": driver, "nodeName": node,
                   "pool": {"name": node, "generation": 1, "resourceSliceCount": 1}}}),
        );
    }
    let before = api.list(SLICES);
    let rig = Rig::start(&api, quick());
    rig.find(gpus(1));
    rig.published(1).await;
    for slice in before {
        assert!(api.list(SLICES).contains(&slice), "{slice}");
    }
    assert_eq!((api.count(Verb::Delete, SLICES), api.count(Verb::Update, SLICES)), (0, 0));
}

#[tokio::test]
async fn of_two_instances_one_publishes_and_hands_over_on_stop() {
    let api = api();
    let lock = OneOnly::default();
    let old = Rig::with_lock(&api, quick(), lock.clone());
    old.find(gpus(1));
    old.published(1).await;

    let new = Rig::with_lock(&api, quick(), lock);
    new.find(gpus(2));
    new.until("its turn", |p| p.phase == PublicationPhase::WaitingForLock).await;
    old.find(gpus(3));
    old.until("the old one still publishes", |p| p.devices == 3).await;
    assert_eq!(devices(&api), Some(3));

    old.stop().await;
    new.until("the new one publishes", |p| p.devices == 2).await;
    assert_eq!(devices(&api), Some(2));
}

#[tokio::test]
async fn a_node_that_was_created_anew_owns_the_new_slices() {
    let api = api();
    let rig = Rig::start(&api, quick());
    rig.find(gpus(1));
    rig.published(1).await;
    api.remove("nodes", NODE);
    api.put("nodes", json!({"metadata": {"name": NODE, "uid": "second-uid"}}));
    api.remove(SLICES, "");
    rig.published(2).await;
    assert_eq!(api.list(SLICES)[0]["metadata"]["ownerReferences"][0]["uid"], "second-uid");
}

#[tokio::test]
async fn when_the_api_server_is_away_it_is_tried_again_until_it_is_back() {
    let api = api();
    for _ in 0..8 {
        api.fail(Verb::List, SLICES, Failure::Broken);
    }
    let rig = Rig::start(&api, quick());
    rig.find(gpus(1));
    rig.until("trouble", |p| matches!(p.phase, PublicationPhase::Failing { .. })).await;
    rig.published(1).await;
    assert_eq!(rig.api.list(SLICES).len(), 1);
}

/// What an API server without DRAPartitionableDevices leaves out.
const COUNTERS: [&str; 2] = ["consumesCounters", "sharedCounters"];

/// gpu-0 whole, gpu-1 carved on demand: four instances of one memory slice each can be made of it.
fn carved() -> NodeGpus {
    let profile = MigProfile {
        id: 14,
        name: "1g.6gb".into(),
        slices: 1,
        most: 4,
        capacity: MigCapacity {
            memory: Bytes::from_mib(5952),
            multiprocessors: 14,
            ..MigCapacity::default()
        },
        placements: (0..4).map(|start| Placement { start, size: 1 }).collect(),
    };
    let mut gpus = gpus(2);
    let places = PossibleMig::all(&gpus.gpus[1].uuid, &[profile]);
    gpus.gpus[1].mig = MigMode::OnDemand(OnDemand { places, ..OnDemand::default() });
    gpus
}

#[tokio::test]
async fn what_can_be_made_of_a_board_is_published_with_counters() {
    let api = api();
    let rig = Rig::start(&api, quick());
    rig.find(carved());
    let state = rig.published(1).await;
    assert_eq!((state.slices, state.devices, state.writes), (2, 6, 2), "in the first writes");
    let slices = api.list(SLICES);
    let [devices, counters] = ["devices", "sharedCounters"].map(|field| {
        let found: Vec<_> =
            slices.iter().filter_map(|slice| slice["spec"][field].as_array().cloned()).collect();
        assert_eq!(found.len(), 1, "{field} in a slice of its own: {slices:?}");
        found[0].clone()
    });
    let names: Vec<_> = devices.iter().map(|device| device["name"].as_str().unwrap().to_owned()).collect();
    assert_eq!(names[1], "gpu-1", "the board itself");
    assert_eq!(names[2..], [3, 2, 1, 0].map(|start| format!("gpu-1-mig-1g6gb-14-{start}")));
    assert_eq!(devices[3]["consumesCounters"][0]["counterSet"], counters[0]["name"]);
    assert_eq!(counters[0]["counters"]["compute-slices"]["value"], "4", "as many as the four have together");
    let mut all = counters[0]["counters"].clone();
    all.as_object_mut().unwrap().retain(|_, counter| counter["value"] != "0");
    let taken = json!([{"counterSet": counters[0]["name"], "counters": all}]);
    assert_eq!(devices[1]["consumesCounters"], taken, "all that there is of it");
}

#[tokio::test]
async fn an_api_server_without_counters_is_told_nothing_of_what_can_be_made() {
    let api = api();
    api.drop_fields(&COUNTERS);
    let rig = Rig::start(&api, quick());
    rig.find(carved());
    let state = rig.published(1).await;
    assert_eq!((state.slices, state.devices), (1, 2), "or all four would be given out at once, and more");
    let names = api.list(SLICES)[0]["spec"]["devices"].as_array().cloned().unwrap_or_default();
    let names: Vec<_> =
        names.iter().map(|device| (&device["name"], &device["attributes"]["type"]["string"])).collect();
    assert_eq!(names, [(&json!("gpu-0"), &json!("gpu")), (&json!("gpu-1"), &json!("mig-parent"))]);
    assert!(state.dropped.features().contains("DRAPartitionableDevices"), "{}", state.dropped);
    looked_again(&api).await;
    assert_eq!(api.writes(SLICES), 1);
}

/// The node is configured anew, and what is stored already is what would be stored without counters.
#[tokio::test]
async fn counters_are_asked_about_though_nothing_else_is_to_be_written() {
    let api = api();
    let rig = Rig::start(&api, quick());
    rig.find(gpus(1));
    rig.published(1).await;
    rig.find(carved());
    rig.until("what can be made", |p| p.devices == 6 && p.slices == 2).await;
}

#[tokio::test]
async fn a_dry_run_about_counters_that_fails_is_tried_again_before_anything_is_written() {
    for failure in [
        Failure::Status(429, "TooManyRequests"),
        Failure::Status(500, "InternalError"),
        Failure::Broken,
        Failure::Silent,
    ] {
        let api = api();
        api.fail(Verb::DryRun, SLICES, failure);
        api.fail(Verb::DryRun, SLICES, failure);
        let rig = Rig::start(&api, quick());
        rig.find(carved());
        let state = rig.published(1).await;
        assert_eq!(
            (state.devices, state.writes),
            (6, 2),
            "nothing was written without counters: {failure:?}"
        );
        assert!(state.failures >= 1 && api.has_failed(), "{failure:?}");
    }
}

#[tokio::test]
async fn counters_that_are_stored_are_kept_whatever_becomes_of_a_dry_run() {
    let api = api();
    let rig = Rig::start(&api, quick());
    rig.find(carved());
    rig.published(1).await;
    rig.stop().await;
    let asked = api.count(Verb::DryRun, SLICES);
    for _ in 0..20 {
        api.fail(Verb::DryRun, SLICES, Failure::Status(400, "BadRequest"));
    }
    let rig = Rig::start(&api, quick());
    rig.find(carved());
    let state = rig.published(1).await;
    assert_eq!((state.devices, state.writes), (6, 0), "what may be allocated stays published");
    assert_eq!(api.count(Verb::DryRun, SLICES), asked, "there is nothing to ask");
}

#[tokio::test]
async fn an_api_server_that_refuses_counters_gets_the_rest() {
    let api = api();
    for _ in 0..20 {
        api.fail(Verb::DryRun, SLICES, Failure::Status(422, "Invalid"));
    }
    let rig = Rig::start(&api, quick());
    rig.find(carved());
    let state = rig.published(1).await;
    assert_eq!((state.slices, state.devices), (1, 2));
}
