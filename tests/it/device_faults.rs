//! The faults of a GPU, from what NVML and `tranche mps` tell to the taints in the API server and the words for
//! kubelet, over restarts, reboots and a driver that is loaded anew.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::{broadcast, watch};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tranche::cluster::{KubeCluster, NodeCluster};
use tranche::inventory::{DeviceFaults, Inventory};
use tranche::model::gpu::{Health, MigMode};
use tranche::model::names::{DeviceUuid, NodeName, PoolName};
use tranche::model::quantity::Bytes;
use tranche::model::share::{SharedMemory, SharedMemoryUser};
use tranche::node::device_faults::{FILE, FaultSources, FaultWatcher};
use tranche::node::discovery::{Discovered, DiscoveryState};
use tranche::node::health;
use tranche::node::publisher::{Publication, PublicationPace, Publisher};
use tranche::node::sweeper;
use tranche::nvml::GpuEvent;

use crate::fake_mps::Trouble;
use crate::holders::{Opener, STRANGE, hide_processes, show_processes};
use crate::mock_api::{MockApi, PATIENCE, Verb};
use crate::site::{Claim, NODE, PluginRun, Site, uuid};
use crate::stop_at::{self, EIO, Fault};

const SLICES: &str = "resourceslices";

/// A node whose device faults are watched and published; its process can be started anew.
struct TestNode {
    site: Site,
    api: MockApi,
    events: broadcast::Sender<GpuEvent>,
}

/// One run of the process.
struct Run<'a> {
    node: &'a TestNode,
    plugin: PluginRun,
    device_faults: watch::Receiver<DeviceFaults>,
    /// As the reporter is given it.
    inventory_with_faults: watch::Receiver<Inventory>,
    published: watch::Receiver<Publication>,
    stop: CancellationToken,
    tasks: Vec<JoinHandle<()>>,
}

impl TestNode {
    fn new() -> Self {
        Self::of(Site::with_whole_gpus(2))
    }

    fn of(site: Site) -> Self {
        let api = MockApi::new();
        api.put("nodes", json!({"metadata": {"name": NODE, "uid": "node-uid"}}));
        fs::create_dir_all(site.path("sys/module/nvidia")).unwrap();
        fs::create_dir_all(site.path("state")).unwrap();
        Self { site, api, events: broadcast::channel(8).0 }
    }

    fn start(&self) -> Run<'_> {
        let plugin = self.site.start_plugin();
        let discovered = Discovered {
            inventory: self.site.gpus.subscribe(),
            state: watch::channel(DiscoveryState::default()).1,
            events: self.events.subscribe().into(),
        };
        let (watch, told) = FaultWatcher::new(FaultSources {
            discovered,
            executor: plugin.preparer.executor.clone(),
            folder: self.site.path("state"),
            sys_root: self.site.path("sys"),
            every: Duration::from_millis(10),
        });
        let device_faults = told.device_faults.clone();
        let cluster =
            Arc::new(NodeCluster::new(KubeCluster::with_client(self.api.client()), NodeName::new(NODE)));
        let (publisher, published) = Publisher::new(cluster, NodeName::new(NODE), self.site.gpus.subscribe());
        let publisher = publisher.with_pace(quick()).with_device_faults(device_faults.clone());
        let stop = CancellationToken::new();
        let (until, publishing) = (stop.clone(), stop.clone());
        let tasks = vec![
            tokio::spawn(async move { _ = watch.run(until).await }),
            tokio::spawn(async move { publisher.run(Box::new(|| Ok(Some(Box::new(())))), publishing).await }),
        ];
        Run {
            node: self,
            plugin,
            device_faults,
            inventory_with_faults: told.inventory_with_faults,
            published,
            stop,
            tasks,
        }
    }

    fn xid(&self, minor: u32, code: u64) {
        self.xid_in(minor, None, code);
    }

    fn xid_in(&self, minor: u32, gpu_instance: Option<u32>, code: u64) {
        let compute_instance = None;
        self.events.send(GpuEvent::Xid { gpu: uuid(minor), code, gpu_instance, compute_instance }).unwrap();
    }

    /// `key=value:effect` of each taint of a GPU, as the API server has them; none while it has no slice.
    fn taints(&self, minor: u32) -> Option<Vec<String>> {
        self.taints_of(&format!("gpu-{minor}"))
    }

    /// The same of any device.
    fn taints_of(&self, name: &str) -> Option<Vec<String>> {
        let slices = self.api.list(SLICES);
        let mut devices = slices.iter().filter_map(|slice| slice["spec"]["devices"].as_array()).flatten();
        let device = devices.find(|device| device["name"] == name)?;
        let text = |taint: &Value, key: &str| taint[key].as_str().unwrap_or_default().to_owned();
        let one = |t: &Value| format!("{}={}:{}", text(t, "key"), text(t, "value"), text(t, "effect"));
        Some(device["taints"].as_array().into_iter().flatten().map(one).collect())
    }

    /// The places that the controller goes around, as the board tells it.
    fn avoided(&self) -> Option<String> {
        let slices = self.api.list(SLICES);
        let mut devices = slices.iter().filter_map(|slice| slice["spec"]["devices"].as_array()).flatten();
        let board = devices.find(|device| device["name"] == "gpu-3")?;
        board["attributes"]["migAvoided"]["string"].as_str().map(str::to_owned)
    }

    async fn until_taints(&self, minor: u32, taints: &[&str]) {
        let there = |_: &MockApi| self.taints(minor).is_some_and(|found| found == taints);
        self.api.until(&format!("gpu-{minor} has the taints {taints:?}"), there).await;
    }

    /// Waits until just these devices of the board that is carved have the taint, and the others none.
    async fn until_tainted(&self, devices: &[&str], taint: &str) {
        let all = [CARVED, &PLACES[..]].concat();
        let right = |name: &&str| {
            let expected = if devices.contains(name) { vec![taint.to_owned()] } else { Vec::new() };
            self.taints_of(name) == Some(expected)
        };
        self.api.until(&format!("{taint} of {devices:?}"), |_| all.iter().all(&right)).await;
    }

    fn file_is_there(&self) -> bool {
        self.site.path("state").join(FILE).exists()
    }

    /// What the kernel does when the driver is unloaded and loaded.
    fn load_driver_anew(&self) {
        let modules = self.site.path("sys/module");
        fs::create_dir(modules.join("new")).unwrap();
        fs::rename(modules.join("nvidia"), modules.join("old")).unwrap();
        fs::rename(modules.join("new"), modules.join("nvidia")).unwrap();
    }
}

fn quick() -> PublicationPace {
    let zero = Duration::ZERO;
    let short = Duration::from_millis(10);
    PublicationPace {
        content: zero,
        repair: zero,
        missing: zero,
        look: zero,
        retry: short,
        lock: short,
        ..PublicationPace::default()
    }
}

impl Run<'_> {
    async fn end(self) {
        self.stop.cancel();
        for task in self.tasks {
            tokio::time::timeout(PATIENCE, task).await.expect("it ends").unwrap();
        }
    }

    /// The sweeper beside it, whose sweeps do not come while the test lasts.
    fn with_sweeper(mut self) -> Self {
        let (preparer, stop) = (self.plugin.preparer.clone(), self.stop.clone());
        let hour = Duration::from_secs(3600);
        self.tasks.push(tokio::spawn(async move { _ = sweeper::run(preparer, hour, stop).await }));
        self
    }

    async fn until(&self, what: &str, holds: impl Fn(&DeviceFaults) -> bool) {
        let mut device_faults = self.device_faults.clone();
        let found = tokio::time::timeout(PATIENCE, device_faults.wait_for(holds)).await.is_ok();
        assert!(found, "waited in vain for {what}: {:?}", self.device_faults.borrow());
    }

    async fn until_metric(&self, name: &str, at_least: f64) {
        let there = async {
            while self.plugin.metric(name) < at_least {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        let found = tokio::time::timeout(PATIENCE, there).await.is_ok();
        assert!(found, "{name} is {} and not {at_least}", self.plugin.metric(name));
    }

    async fn until_published(&self, what: &str, holds: impl Fn(&Publication) -> bool) {
        let mut published = self.published.clone();
        let found = tokio::time::timeout(PATIENCE, published.wait_for(holds)).await.is_ok();
        assert!(found, "waited in vain for {what}: {:?}", self.published.borrow());
    }

    /// What kubelet is told of a GPU; none if it is healthy.
    fn unhealthy(&self, minor: u32) -> Option<String> {
        self.unhealthy_device(&format!("gpu-{minor}"))
    }

    fn unhealthy_device(&self, name: &str) -> Option<String> {
        let pool = PoolName::new(NODE);
        let told = health::of(&self.node.site.gpus.borrow(), &self.device_faults.borrow(), &pool);
        let device = told.into_iter().find(|device| device.device.as_str() == name);
        device.unwrap().state.err()
    }
}

const CARVED: &[&str] = &["gpu-3"];
/// Some of its places.
const PLACES: [&str; 4] =
    ["gpu-3-mig-1g10gb-19-0", "gpu-3-mig-1g10gb-19-1", "gpu-3-mig-1g10gb-19-2", "gpu-3-mig-2g20gb-14-2"];
const POD: &str = "11111111-0000-4000-8000-000000000001";
const XID_48: &str = "gpu.nvidia.com/xid=48:NoSchedule";
const WITHHELD: &str = "gpu.nvidia.com/withheld=:NoSchedule";

#[tokio::test]
async fn an_xid_keeps_pods_off_until_the_driver_is_loaded_anew_over_restarts_too() {
    let node = TestNode::new();
    let run = node.start();
    node.until_taints(0, &[]).await;
    node.xid(0, 48);
    node.until_taints(0, &[XID_48]).await;
    let words = run.unhealthy(0).unwrap();
    assert!(words.contains("Xid 48") && words.contains("reset"), "{words}");
    assert_eq!((node.taints(1), run.unhealthy(1)), (Some(vec![]), None), "the other GPU is well");
    node.until_file().await;
    run.end().await;

    let writes = node.api.writes(SLICES);
    let run = node.start();
    run.until("what was remembered", |device_faults| !device_faults.is_empty()).await;
    run.until_published("both GPUs", |p| p.devices == 2).await;
    assert_eq!((node.taints(0).unwrap(), node.api.writes(SLICES)), (vec![XID_48.to_owned()], writes));

    node.load_driver_anew();
    node.until_taints(0, &[]).await;
    assert_eq!(run.unhealthy(0), None);
    run.end().await;
    assert!(!node.file_is_there(), "there is nothing to remember");
}

impl TestNode {
    /// Waits until what is remembered lasts.
    async fn until_file(&self) {
        let there = async {
            while !self.file_is_there() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(PATIENCE, there).await.expect("the file is written");
    }
}

#[tokio::test]
async fn a_reboot_and_a_word_from_the_administrator_clear_xids() {
    let node = TestNode::new();
    let run = node.start();
    node.xid(1, 119);
    node.until_taints(1, &["gpu.nvidia.com/xid=119:NoSchedule"]).await;
    node.until_file().await;
    fs::remove_file(node.site.path("state").join(FILE)).unwrap();
    node.until_taints(1, &[]).await;

    node.xid(1, 95);
    node.until_taints(1, &["gpu.nvidia.com/xid=95:NoSchedule"]).await;
    node.until_file().await;
    run.end().await;
    node.site.reboot();
    let run = node.start();
    node.until_taints(1, &[]).await;
    assert!(run.device_faults.borrow().is_empty());
    run.end().await;
}

#[tokio::test]
async fn a_lost_board_loses_its_pods_and_a_programs_fault_costs_nothing() {
    let node = TestNode::new();
    let run = node.start();
    for code in [13, 31, 43, 45] {
        node.xid(0, code);
    }
    node.xid(0, 63);
    run.until("the worn memory", |device_faults| !device_faults.is_empty()).await;
    assert_eq!(run.device_faults.borrow().iter().count(), 1, "programs' faults are no faults of the device");
    assert_eq!(run.unhealthy(0), None, "what can wait is told elsewhere");
    node.xid(1, 79);
    node.until_taints(1, &["gpu.nvidia.com/gpu-lost=79:NoExecute"]).await;
    let unhealthy = |inventory: &Inventory| {
        let Inventory::Found(gpus) = inventory else { return vec![] };
        gpus.gpus.iter().filter(|gpu| gpu.health != Health::Healthy).map(|gpu| gpu.minor).collect()
    };
    let inventory_with_faults =
        run.inventory_with_faults.clone().wait_for(|inventory| unhealthy(inventory) == [1]).await.is_ok();
    assert!(inventory_with_faults, "claims on the lost board are told");
    assert_eq!(node.taints(0), Some(vec![]));
    run.end().await;
}

#[tokio::test]
async fn a_gpu_that_cannot_be_read_is_tainted_while_that_is_so() {
    let node = TestNode::new();
    let run = node.start();
    node.until_taints(0, &[]).await;
    let set = |health: Health| {
        node.site.gpus.send_modify(|inventory| {
            let Inventory::Found(gpus) = inventory else { unreachable!() };
            gpus.gpus[0].health = health;
        });
    };
    set(Health::Unhealthy("the GPU does not answer".into()));
    node.until_taints(0, &["gpu.nvidia.com/unreachable=:NoSchedule"]).await;
    assert_eq!(run.unhealthy(0).as_deref(), Some("the GPU does not answer"), "said once");
    set(Health::Lost("the GPU has left the bus".into()));
    node.until_taints(0, &["gpu.nvidia.com/gpu-lost=:NoExecute"]).await;
    assert_eq!(run.unhealthy(0).as_deref(), Some("the GPU has left the bus"), "said once");
    set(Health::Healthy);
    node.until_taints(0, &[]).await;
    run.end().await;
}

#[tokio::test]
async fn a_dead_mps_daemon_taints_its_gpu_until_it_serves_again() {
    let node = TestNode::new();
    let run = node.start();
    let claim = Claim::new("train", &["gpu-0"]).share("10Gi", "25");
    node.site.api.put(&claim);
    run.plugin.prepared(&claim, "share").await;
    node.site.mps.forget_all();
    node.until_taints(0, &["gpu.nvidia.com/mps-daemon-down=:NoSchedule"]).await;
    assert!(run.unhealthy(0).unwrap().contains("MPS daemon"));
    run.plugin.sweep().await.unwrap();
    node.until_taints(0, &[]).await;

    node.site.mps.trouble(Some(Trouble::Away));
    run.until("the supervisor's absence", |device_faults| !device_faults.is_empty()).await;
    assert!(run.unhealthy(0).unwrap().contains("tranche mps"), "{:?}", run.unhealthy(0));
    node.site.mps.trouble(None);
    run.until("its return", DeviceFaults::is_empty).await;
    run.end().await;
}

#[tokio::test]
async fn a_full_shm_taints_its_gpu_until_it_has_room_or_nobody_has_it() {
    let node = TestNode::new();
    let run = node.start();
    let claim = Claim::new("train", &["gpu-0"]).share("10Gi", "25");
    node.site.api.put(&claim);
    run.plugin.prepared(&claim, "share").await;
    node.until_taints(0, &[]).await;
    let usage = |used| {
        let (used, size) = (Bytes::from_mib(used), Bytes::from_mib(64));
        let most = Some(SharedMemoryUser { uid: 1000, used, files: 1 });
        Some(SharedMemory { used, size, files: 3, files_max: 8194, most })
    };
    node.site.mps.shm(usage(63));
    node.until_taints(0, &["gpu.nvidia.com/shm-full=:NoSchedule"]).await;
    let told = run.unhealthy(0).unwrap();
    assert!(told.contains("63 of 64 MiB") && told.contains("of user 1000"), "{told}");
    node.site.mps.shm(usage(10));
    node.until_taints(0, &[]).await;
    node.site.mps.shm(usage(64));
    node.until_taints(0, &["gpu.nvidia.com/shm-full=:NoSchedule"]).await;
    run.plugin.unprepare(&claim).await.unwrap();
    node.until_taints(0, &[]).await;
    run.end().await;
}

/// What it holds counts as free by the API server's word: whoever were placed there would find no room.
#[tokio::test]
async fn a_share_that_is_withheld_keeps_new_pods_off_its_gpu_until_its_pod_has_ended() {
    let node = TestNode::new();
    let run = node.start();
    let mine = Claim::new("mine", &["gpu-0"]).share("60Gi", "25").reserved_for(&[POD]);
    let neighbour = Claim::new("neighbour", &["gpu-0"]).share("10Gi", "25");
    for claim in [&mine, &neighbour] {
        node.site.api.put(claim);
        run.plugin.prepared(claim, "before").await;
    }
    node.site.runs(4711, POD);
    node.until_taints(0, &[]).await;
    node.site.api.remove(&mine);
    run.plugin.sweep().await.unwrap();
    node.until_taints(0, &[WITHHELD]).await;
    assert_eq!(node.taints(1), Some(vec![]), "the other GPU is free");
    let words = run.device_faults.borrow().iter().next().unwrap().words.clone();
    assert!(
        words.contains("team/mine") && words.contains("its share of it") && words.contains("4711"),
        "{words}"
    );
    assert_eq!(run.unhealthy(0), None, "the neighbour goes on");
    run.plugin.prepared(&neighbour, "again").await;
    node.site.ends(4711);
    run.plugin.sweep().await.unwrap();
    node.until_taints(0, &[]).await;
    run.end().await;
}

/// Nobody says what became of the claim while the API server is away, and its pod runs: pods would be placed beside it.
#[tokio::test]
async fn what_was_withheld_before_a_start_stays_so_until_the_api_server_answers() {
    let node = TestNode::new();
    let run = node.start();
    let mine = Claim::new("mine", &["gpu-0"]).share("60Gi", "25").reserved_for(&[POD]);
    node.site.api.put(&mine);
    run.plugin.prepared(&mine, "before").await;
    node.site.runs(4711, POD);
    node.site.api.remove(&mine);
    run.plugin.sweep().await.unwrap();
    node.until_taints(0, &[WITHHELD]).await;
    node.until_file().await;
    run.end().await;
    node.site.api.silent.store(true, Ordering::SeqCst);
    let opener = Opener::of(&node.site, (195, 1));
    let run = node.start().with_sweeper();
    // Once this is known, the first sweep is over; and a later look.
    node.until_taints(1, &[WITHHELD]).await;
    drop(opener);
    node.until_taints(1, &[]).await;
    assert_eq!(node.taints(0), Some(vec![WITHHELD.to_owned()]));
    node.site.api.silent.store(false, Ordering::SeqCst);
    run.plugin.sweep().await.unwrap();
    let is_found = |faults: &DeviceFaults| faults.iter().any(|one| one.words.contains("process 4711"));
    run.until("what is found again", is_found).await;
    node.site.ends(4711);
    run.plugin.sweep().await.unwrap();
    node.until_taints(0, &[]).await;
    run.end().await;
}

/// A pod with a small share opens the node of the GPU, hands the descriptor to another pod, and ends. No record names the
/// GPU any more: a claim that gets it whole would wait on this node for ever, and so would the next.
#[tokio::test]
async fn a_gpu_that_nobody_has_and_a_strange_pod_has_open_is_tainted_before_a_claim_comes() {
    for part in [
        Claim::new("mine", &["gpu-0"]).share("1Mi", "1").reserved_for(&[POD]),
        Claim::new("mine", &["gpu-0"]).admin().reserved_for(&[POD]),
    ] {
        let node = TestNode::new();
        let run = node.start().with_sweeper();
        node.site.api.put(&part);
        run.plugin.prepared(&part, "before").await;
        node.until_taints(0, &[]).await;
        let opener = Opener::of(&node.site, (195, 0));
        run.plugin.unprepare(&part).await.unwrap();
        node.until_taints(0, &[WITHHELD]).await;
        assert_eq!(node.taints(1), Some(vec![]), "the other GPU is free");
        let words = run.device_faults.borrow().iter().next().unwrap().words.clone();
        assert!(
            words.contains("no claim has it") && words.contains("process 4712 of pod 33333333"),
            "{words}"
        );
        assert_eq!(run.unhealthy(0), None, "nothing is wrong with it");
        node.until_file().await;
        run.end().await;
        // The next process has not looked yet, and takes no taint away before it has: claims would be placed there.
        let writes = node.api.writes(SLICES);
        let run = node.start();
        run.until_published("both GPUs", |p| p.devices == 2).await;
        assert_eq!((node.taints(0).unwrap(), node.api.writes(SLICES)), (vec![WITHHELD.to_owned()], writes));
        let run = run.with_sweeper();
        let is_found = |faults: &DeviceFaults| faults.iter().any(|one| one.words.contains("process 4712"));
        run.until("what is found again", is_found).await;
        assert_eq!((node.taints(0).unwrap(), node.api.writes(SLICES)), (vec![WITHHELD.to_owned()], writes));
        run.end().await;
        // Nobody has it any more when the next one comes.
        drop(opener);
        let run = node.start().with_sweeper();
        node.until_taints(0, &[]).await;
        run.until("nothing to remember", DeviceFaults::is_empty).await;
        let next = Claim::new("next", &["gpu-0"]).reserved_for(&[POD]);
        node.site.api.put(&next);
        run.plugin.prepared(&next, "free").await;
        run.end().await;
    }
}

/// Looks that fail tell nothing of a device that was open: neither sweeps nor claims get to think that it is free.
#[tokio::test]
async fn a_device_that_was_seen_open_stays_tainted_while_nobody_can_look() {
    let node = TestNode::new();
    let run = node.start();
    let next = Claim::new("next", &["gpu-0"]).reserved_for(&[POD]);
    let other = Claim::new("other", &["gpu-1"]).reserved_for(&[POD]);
    for claim in [&next, &other] {
        node.site.api.put(claim);
    }
    let opener = Opener::of(&node.site, (195, 0));
    run.plugin.refused(&next, &["gpu-0 is not free yet", "process 4712"]).await;
    node.until_taints(0, &[WITHHELD]).await;
    hide_processes(&node.site);
    for _ in 0..2 {
        run.plugin.refused(&next, &["gpu-0 is not free yet", "process 4712", "this was seen before"]).await;
        assert_eq!(run.plugin.sweep().await.unwrap(), sweeper::Sweep::default());
        let kept = run.plugin.preparer.executor.holders.kept_from_others();
        assert!(
            kept.len() == 1 && kept.values().all(|words| words.contains("this was seen before")),
            "{kept:?}"
        );
    }
    run.plugin.prepared(&other, "nobody was seen to have it").await;
    show_processes(&node.site);
    drop(opener);
    run.plugin.sweep().await.unwrap();
    node.until_taints(0, &[]).await;
    run.plugin.prepared(&next, "free").await;
    run.end().await;
}

/// The look of a new process fails: it knows from the one before that the device was held.
#[tokio::test]
async fn what_was_open_before_a_start_stays_tainted_until_a_look_could_tell() {
    let node = TestNode::new();
    let run = node.start();
    let next = Claim::new("next", &["gpu-0"]).reserved_for(&[POD]);
    node.site.api.put(&next);
    let opener = Opener::of(&node.site, (195, 0));
    run.plugin.refused(&next, &["gpu-0 is not free yet"]).await;
    node.until_taints(0, &[WITHHELD]).await;
    node.until_file().await;
    run.end().await;
    hide_processes(&node.site);
    let run = node.start().with_sweeper();
    // The first three are of the first look at both GPUs.
    run.until_metric("tranche_unmade_file_looks_total", 6.0).await;
    assert_eq!((node.taints(0), node.taints(1)), (Some(vec![WITHHELD.to_owned()]), Some(vec![])));
    run.plugin.refused(&next, &["gpu-0 is not free yet", "when this driver was started again"]).await;
    show_processes(&node.site);
    let is_found = |faults: &DeviceFaults| faults.iter().any(|one| one.words.contains("process 4712"));
    run.until("what is found again", is_found).await;
    drop(opener);
    node.until_taints(0, &[]).await;
    run.plugin.prepared(&next, "free").await;
    run.end().await;
}

/// A record that could not be dealt with at the start says nothing of who holds its device.
#[tokio::test]
async fn what_was_withheld_before_a_start_stays_so_until_its_record_was_looked_at() {
    let node = TestNode::new();
    let run = node.start();
    let mine = Claim::new("mine", &["gpu-0"]).reserved_for(&[POD]);
    node.site.api.put(&mine);
    run.plugin.prepared(&mine, "before").await;
    node.site.runs(4711, POD);
    run.plugin.unprepare(&mine).await.unwrap();
    node.until_taints(0, &[WITHHELD]).await;
    node.until_file().await;
    run.end().await;
    let opener = Opener::of(&node.site, (195, 1));
    let run = node.start();
    run.plugin.host.faults(|_, verb| (verb == stop_at::Verb::Remove).then_some(Fault::Fails(EIO)));
    let run = run.with_sweeper();
    // Once this is known, the first sweep is over; and a later look.
    node.until_taints(1, &[WITHHELD]).await;
    drop(opener);
    node.until_taints(1, &[]).await;
    assert_eq!(node.taints(0), Some(vec![WITHHELD.to_owned()]));
    run.plugin.host.no_faults();
    run.plugin.sweep().await.unwrap();
    let is_found = |faults: &DeviceFaults| faults.iter().any(|one| one.words.contains("process 4711"));
    run.until("what is found again", is_found).await;
    node.site.ends(4711);
    run.plugin.sweep().await.unwrap();
    node.until_taints(0, &[]).await;
    run.end().await;
}

/// What a new process hears of first, the GPUs or what is withheld, is left to chance.
#[tokio::test]
async fn a_start_takes_no_taint_away_for_a_moment() {
    let node = TestNode::new();
    let run = node.start().with_sweeper();
    let _opener = Opener::of(&node.site, (195, 0));
    let part = Claim::new("mine", &["gpu-0"]).admin().reserved_for(&[POD]);
    node.site.api.put(&part);
    run.plugin.prepared(&part, "before").await;
    run.plugin.unprepare(&part).await.unwrap();
    node.until_taints(0, &[WITHHELD]).await;
    node.until_file().await;
    run.end().await;
    for start in 0..30 {
        let mut run = node.start();
        let mut told = run.device_faults.clone();
        let free = tokio::spawn(async move { told.wait_for(DeviceFaults::is_empty).await.is_ok() });
        let known = run.inventory_with_faults.wait_for(|known| matches!(known, Inventory::Found(_)));
        tokio::time::timeout(PATIENCE, known).await.expect("the GPUs are known").unwrap();
        assert!(!run.device_faults.borrow().is_empty());
        run.end().await;
        assert!(!free.await.unwrap(), "start {start}: for a moment nothing was withheld");
    }
}

/// NVML gives numbers of instances again: who has the new device by right has the same numbers open.
#[tokio::test]
async fn a_mig_device_that_is_gone_is_held_by_nobody() {
    let node = TestNode::of(Site::new());
    let _opener = Opener::of(&node.site, (237, 66));
    let run = node.start().with_sweeper();
    let is_open = |faults: &DeviceFaults| faults.iter().any(|one| one.words.contains("process 4712"));
    run.until("a device that is open", is_open).await;
    let name = "gpu-2-mig-1g10gb-19-0";
    node.api.until("its taint", |_| node.taints_of(name) == Some(vec![WITHHELD.to_owned()])).await;
    // An administrator makes it anew, and a claim of the same pod gets it.
    node.site.gpus.send_modify(|inventory| {
        let Inventory::Found(gpus) = inventory else { panic!("there are GPUs") };
        let MigMode::On(devices) = &mut gpus.gpus[2].mig else { panic!("gpu-2 is in MIG mode") };
        devices[0].uuid = DeviceUuid::new("MIG-anew");
    });
    let claim = Claim::new("anew", &[name]).reserved_for(&[STRANGE]);
    node.site.api.put(&claim);
    run.plugin.prepared(&claim, "anew").await;
    run.until("nothing that is held", DeviceFaults::is_empty).await;
    node.api.until("no taint", |_| node.taints_of(name) == Some(vec![])).await;
    run.end().await;
}

/// A look waits for the lane of its GPU, and whoever has many processes makes each look long.
#[tokio::test]
async fn the_sweeper_ends_when_it_is_told_whatever_it_waits_for() {
    let node = TestNode::new();
    let run = node.start();
    let _held = run.plugin.preparer.lanes.queue(vec![uuid(1)]).await.unwrap();
    let _opener = Opener::of(&node.site, (195, 0));
    let run = run.with_sweeper();
    // The other GPU is next.
    node.until_taints(0, &[WITHHELD]).await;
    let told = std::time::Instant::now();
    run.end().await;
    assert!(told.elapsed() < PATIENCE / 2, "after {:?}", told.elapsed());
}

/// A neighbour's share is there still when the first ends: the watchdog sees to who else works on a shared GPU.
#[tokio::test]
async fn only_the_last_claim_of_a_gpu_leaves_it_to_be_looked_at() {
    let node = TestNode::new();
    let run = node.start().with_sweeper();
    let share = |name| Claim::new(name, &["gpu-0"]).share("1Gi", "1").reserved_for(&[POD]);
    let [first, last] = [share("first"), share("last")];
    for claim in [&first, &last] {
        node.site.api.put(claim);
        run.plugin.prepared(claim, "before").await;
    }
    node.until_taints(0, &[]).await;
    let _opener = Opener::of(&node.site, (195, 0));
    run.plugin.unprepare(&first).await.unwrap();
    assert_eq!(run.plugin.sweep().await.unwrap(), sweeper::Sweep::default());
    assert!(run.device_faults.borrow().is_empty() && node.taints(0) == Some(vec![]));
    run.plugin.unprepare(&last).await.unwrap();
    node.until_taints(0, &[WITHHELD]).await;
    // A share that was allocated before that is nobody's alone.
    node.site.api.put(&last);
    run.plugin.prepared(&last, "beside others").await;
    node.until_taints(0, &[]).await;
    run.end().await;
}

/// One who was not there when the claim before ended. Kubelet asks again and again: nobody else is to be sent there.
#[tokio::test]
async fn a_device_that_is_refused_because_a_strange_pod_has_it_open_is_tainted_until_it_is_free() {
    let node = TestNode::new();
    let run = node.start().with_sweeper();
    let next = Claim::new("next", &["gpu-0", "gpu-1"]).reserved_for(&[POD]);
    node.site.api.put(&next);
    node.until_taints(1, &[]).await;
    let opener = Opener::of(&node.site, (195, 1));
    run.plugin.refused(&next, &["gpu-1 is not free yet", "process 4712 of pod 33333333"]).await;
    assert_eq!(run.plugin.metric("tranche_refused_double_allocations_total"), 1.0);
    node.until_taints(1, &[WITHHELD]).await;
    assert_eq!(node.taints(0), Some(vec![]));
    drop(opener);
    node.until_taints(1, &[]).await;
    run.plugin.prepared(&next, "free").await;
    run.end().await;
}

#[tokio::test]
async fn a_mig_device_made_where_a_strange_pod_has_its_nodes_open_keeps_pods_off_its_memory_slices() {
    let node = TestNode::of(Site::carved());
    let run = node.start().with_sweeper();
    let claim = Claim::new("mine", &[PLACES[2]]).reserved_for(&[POD]);
    node.site.api.put(&claim);
    run.plugin.prepared(&claim, "before").await;
    let instance = node.site.mig.on(&uuid(3))[0].id;
    run.plugin.unprepare(&claim).await.unwrap();
    node.until_tainted(&[], "").await;
    let openers: Vec<_> = [Opener::of(&node.site, (237, u64::from(200 + 2 * instance)))].into();
    for _ in 0..2 {
        run.plugin.refused(&claim, &["process 4712 of pod 33333333"]).await;
        // The second time, the taint is there already.
        let kept = run.plugin.preparer.executor.holders.kept_from_others();
        assert_eq!(kept.len(), 1, "also of a MIG device with another UUID: {kept:?}");
        node.until_tainted(&["gpu-3", PLACES[2], PLACES[3]], WITHHELD).await;
        assert_eq!(run.device_faults.borrow().iter().count(), 1);
    }
    drop(openers);
    node.until_tainted(&[], "").await;
    run.plugin.prepared(&claim, "free").await;
    run.end().await;
}

#[tokio::test]
async fn an_api_server_that_drops_taints_is_not_written_to_over_and_over() {
    let node = TestNode::new();
    node.api.drop_fields(&["taints"]);
    let run = node.start();
    node.until_taints(0, &[]).await;
    node.xid(0, 48);
    run.until_published("the loss", |p| p.dropped.to_string().contains("DRADeviceTaints")).await;
    assert!(run.unhealthy(0).is_some(), "kubelet is told all the same");
    let writes = node.api.writes(SLICES);
    for code in [62, 119] {
        node.xid(1, code);
        run.until("the Xid", |device_faults| {
            device_faults.iter().any(|a| a.words.contains(&format!("Xid {code}")))
        })
        .await;
    }
    // The first lists may be of what the Xids called for, and what comes of a look is over before the next begins.
    for _ in 0..3 {
        let looks = node.api.count(Verb::List, SLICES);
        node.api.cut_watches(true);
        node.api.until("a look", |api| api.count(Verb::List, SLICES) >= looks + 2).await;
    }
    assert_eq!(node.api.writes(SLICES), writes);
    run.end().await;
}

#[tokio::test]
async fn a_damaged_file_forgets_and_does_not_stop_the_start() {
    let node = TestNode::new();
    for text in
        ["", "{\"version\":", "{\"version\":99,\"run\":{\"boot\":\"b\",\"driver\":1},\"ailments\":[]}"]
    {
        fs::write(node.site.path("state").join(FILE), text).unwrap();
        let run = node.start();
        assert!(run.device_faults.borrow().is_empty());
        node.xid(0, 48);
        run.until("the Xid", |device_faults| !device_faults.is_empty()).await;
        run.end().await;
        fs::remove_file(node.site.path("state").join(FILE)).unwrap();
    }
}

#[tokio::test]
async fn a_place_where_no_device_can_be_made_is_avoided_until_one_is() {
    let node = TestNode::of(Site::carved());
    let run = node.start();
    let claim = Claim::new("a", &[PLACES[0]]);
    node.site.api.put(&claim);
    node.until_tainted(&[], "").await;
    node.site.mig.have_no_room(true);
    run.plugin.refused(&claim, &["no room left"]).await;
    node.until_tainted(&[PLACES[0]], "gpu.nvidia.com/mig-not-made=:NoSchedule").await;
    assert_eq!(run.unhealthy_device(PLACES[0]), None, "nothing is wrong with what is there");
    assert_eq!(run.plugin.preparer.executor.mig.failed(), 1);
    // Over a restart too.
    run.end().await;
    let run = node.start();
    run.until("what was remembered", |faults| !faults.is_empty()).await;
    node.until_tainted(&[PLACES[0]], "gpu.nvidia.com/mig-not-made=:NoSchedule").await;
    node.site.mig.have_no_room(false);
    run.plugin.prepared(&claim, "there is room").await;
    node.until_tainted(&[], "").await;
    run.end().await;
}

#[tokio::test]
async fn an_xid_of_a_device_that_was_made_for_a_claim_taints_what_has_its_memory_slices() {
    let node = TestNode::of(Site::carved());
    let run = node.start();
    let claim = Claim::new("a", &[PLACES[2]]);
    node.site.api.put(&claim);
    run.plugin.prepared(&claim, "before").await;
    let instance = node.site.mig.on(&uuid(3))[0].id;
    node.xid_in(3, Some(instance), 48);
    node.until_tainted(&["gpu-3", PLACES[2], PLACES[3]], XID_48).await;
    assert!(run.unhealthy_device(PLACES[2]).is_some_and(|words| words.contains("Xid 48")));
    assert_eq!(run.unhealthy(3), None, "who has another part of the board");
    node.until_file().await;
    run.end().await;
    let run = node.start();
    run.until("what was remembered", |device_faults| !device_faults.is_empty()).await;
    node.xid(3, 62);
    run.until("the board's", |device_faults| device_faults.iter().count() == 2).await;
    node.api
        .until("all", |_| PLACES.iter().all(|name| node.taints_of(name).is_some_and(|all| !all.is_empty())))
        .await;
    assert!(run.unhealthy(3).is_some());
    run.end().await;
}

#[tokio::test]
async fn a_device_that_was_made_and_is_held_without_a_claim_keeps_pods_off_its_memory_slices() {
    let node = TestNode::of(Site::carved());
    let run = node.start();
    let claim = Claim::new("mine", &[PLACES[2]]).reserved_for(&[POD]);
    node.site.api.put(&claim);
    run.plugin.prepared(&claim, "before").await;
    node.site.runs(4711, POD);
    node.site.api.remove(&claim);
    run.plugin.sweep().await.unwrap();
    node.until_tainted(&["gpu-3", PLACES[2], PLACES[3]], WITHHELD).await;
    node.site.ends(4711);
    run.plugin.sweep().await.unwrap();
    node.until_tainted(&[], "").await;
    assert_eq!(node.site.mig.all(), []);
    run.end().await;
}

#[tokio::test]
async fn a_device_that_somebody_on_the_host_holds_keeps_others_off_its_memory_slices_alone() {
    let node = TestNode::of(Site::carved());
    let run = node.start();
    let first = Claim::new("first", &[PLACES[2]]).reserved_for(&[POD]);
    node.site.api.put(&first);
    run.plugin.prepared(&first, "before").await;
    node.site.mig.be_held(true);
    run.plugin.unprepare(&first).await.expect("kubelet may end the pod");
    node.site.api.remove(&first);
    let not_ended = "gpu.nvidia.com/mig-not-ended=:NoSchedule";
    node.until_tainted(&[PLACES[2], PLACES[3]], not_ended).await;
    node.api.until("the controller's word", |_| node.avoided().as_deref() == Some("19:1@2")).await;
    assert_eq!(run.unhealthy_device(PLACES[2]), None, "nothing is wrong with it");
    let words = run.device_faults.borrow().iter().map(|fault| fault.words.clone()).collect::<String>();
    for part in ["claim team/first", "in use by a process", "DCGM", "tried again every minute"] {
        assert!(words.contains(part), "{words}");
    }
    // Sent there before the taint was seen.
    let second = Claim::new("second", &[PLACES[3]]);
    node.site.api.put(&second);
    run.plugin.refused(&second, &["team/first", "could not be ended", "in use by a process"]).await;
    let beside = Claim::new("beside", &[PLACES[0]]);
    node.site.api.put(&beside);
    run.plugin.prepared(&beside, "beside it").await;
    // The next process learns it from the ledger.
    run.end().await;
    let run = node.start();
    assert_eq!(run.plugin.sweep().await.unwrap().failed, 1);
    run.until("the same", |faults| !faults.is_empty()).await;
    node.until_tainted(&[PLACES[2], PLACES[3]], not_ended).await;
    node.site.mig.be_held(false);
    run.plugin.sweep().await.unwrap();
    node.until_tainted(&[], "").await;
    node.api.until("nothing to be avoided", |_| node.avoided().is_none()).await;
    run.plugin.prepared(&second, "once it is ended").await;
    run.end().await;
}
