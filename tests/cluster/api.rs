//! The API server's edge, the publisher and the limits of slices, on a rig without the driver.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::rig::{Rig, SLOWER};
use k8s_openapi::api::core::v1::{Event, Node};
use k8s_openapi::api::resource::v1::{Device, ResourceClaim, ResourceSlice};
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tranche::cluster::events::{EventSubject, Note, Severity};
use tranche::cluster::{ClaimState, Cluster, Endpoint, KubeCluster, NodeCluster};
use tranche::inventory::Inventory;
use tranche::model::claim::{Access, ClaimRef};
use tranche::model::gpu::{
    DriverVersions, Gpu, Health, Memory, MigCapacity, MigDevice, MigMode, NodeGpus, Pci, Placement,
};
use tranche::model::names::{ClaimUid, DeviceUuid, NodeName, PoolName};
use tranche::model::quantity::{Bytes, Quantity};
use tranche::node::publisher::{Publication, PublicationPace, PublicationPhase, Publisher};
use tranche::sharing::{DefaultRequest, SharingPolicy};
use tranche::slices::{
    Counters, DesiredPool, Dropped, ExistingSlices, Offer, PublishOptions, SliceContent, SliceOwner, Taints,
    Write, desired, diff, dropped, violations,
};

const PATIENCE: Duration = Duration::from_secs(60);

/// The API server, and a node of this test's own on it.
struct Real {
    /// Keeps other tests off it.
    _rig: Rig,
    client: Client,
    cluster: NodeCluster,
    node: NodeName,
    owner: SliceOwner,
    minor: u32,
}

impl Real {
    async fn connect(test: &str) -> Self {
        let rig = Rig::bare(test);
        let path = PathBuf::from(rig.run(&["kubeconfig"]).trim());
        let node = NodeName::new(format!("tranche-{test}-{}", std::process::id()));
        // The product's own way in; it also chooses the TLS provider for the second client.
        let endpoint = Endpoint::from(path.clone());
        let cluster = NodeCluster::new(KubeCluster::connect(&endpoint).await.unwrap(), node.clone());
        let kubeconfig = Kubeconfig::read_from(path).unwrap();
        let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await.unwrap();
        let client = Client::try_from(config).unwrap();
        let object: Node = serde_json::from_value(json!({"metadata": {"name": node.as_str()}})).unwrap();
        Api::all(client.clone()).create(&PostParams::default(), &object).await.unwrap();
        let node_uid = cluster.node_uid().await.unwrap();
        let minor = client.apiserver_version().await.unwrap().minor.parse().unwrap();
        let owner = SliceOwner { node: node.clone(), node_uid };
        Self { _rig: rig, client, cluster, node, owner, minor }
    }

    fn slices(&self) -> Api<ResourceSlice> {
        Api::all(self.client.clone())
    }

    fn mine(&self) -> ListParams {
        ListParams::default().fields(&format!("spec.nodeName={}", self.node))
    }

    async fn stored(&self) -> Vec<ResourceSlice> {
        self.slices().list(&self.mine()).await.unwrap().items
    }

    /// As kubelet does it.
    async fn wipe(&self) {
        self.slices().delete_collection(&DeleteParams::default(), &self.mine()).await.unwrap();
    }

    /// What would be created for `contents`.
    fn creations(&self, contents: &[SliceContent]) -> Vec<ResourceSlice> {
        let dropped = Dropped::default();
        let target = DesiredPool { contents, owner: &self.owner, dropped: &dropped, known_generation: 0 };
        let change = diff(&target, &ExistingSlices::default());
        let slice = |write| match write {
            Write::Create(slice) => *slice,
            Write::Update(slice) => panic!("{slice:?}"),
        };
        change.writes.into_iter().map(slice).collect()
    }

    /// What the API server would store, or why not.
    async fn dry_run(&self, slice: &ResourceSlice) -> Result<ResourceSlice, String> {
        let params = PostParams { dry_run: true, field_manager: None };
        self.slices().create(&params, slice).await.map_err(|error| error.to_string())
    }

    async fn clean_up(self) {
        self.wipe().await;
        let nodes: Api<Node> = Api::all(self.client);
        nodes.delete(self.node.as_str(), &DeleteParams::default()).await.unwrap();
    }
}

fn gpu(minor: u32, product: &str, architecture: &str, capability: (u32, u32), mib: u64) -> Gpu {
    Gpu {
        uuid: DeviceUuid::new(format!("GPU-5a7f0c3e-0000-4000-8000-{minor:012}")),
        minor,
        product_name: product.to_owned(),
        brand: "Nvidia".to_owned(),
        architecture: architecture.to_owned(),
        compute_capability: capability,
        memory: Memory::Known { total: Bytes::from_mib(mib), reserved: Bytes(0) },
        multiprocessors: Some(132),
        addressing_mode: Some("None".to_owned()),
        pci: Pci {
            bus_id: format!("0000:{minor:02x}:00.0"),
            root: Some("pci0000:00".to_owned()),
            numa_node: Some(0),
        },
        mig: MigMode::Off,
        health: Health::Healthy,
    }
}

fn node_gpus(driver: &str, cuda: &str, gpus: Vec<Gpu>) -> NodeGpus {
    NodeGpus { driver: DriverVersions { driver: driver.to_owned(), cuda: cuda.to_owned() }, gpus }
}

fn h100(count: u32) -> NodeGpus {
    let gpu = |minor| gpu(minor, "NVIDIA H100 80GB HBM3", "Hopper", (9, 0), 81_559);
    node_gpus("550.163.01", "12.4", (0..count).map(gpu).collect())
}

fn cut(mut gpus: NodeGpus, profile: &str, placements: &[(u32, u32)]) -> NodeGpus {
    for gpu in &mut gpus.gpus {
        let mig = |(start, size): &(u32, u32)| MigDevice {
            uuid: DeviceUuid::new(format!("MIG-5a7f0c3e-{}-{start}", gpu.minor)),
            profile: profile.to_owned(),
            gpu_instance: 7 + start,
            compute_instance: 0,
            profile_id: 19,
            placement: Placement { start: *start, size: *size },
            capacity: MigCapacity {
                memory: Bytes::from_mib(9728),
                multiprocessors: 1000,
                copy_engines: 1,
                ..MigCapacity::default()
            },
        };
        gpu.mig = MigMode::On(placements.iter().map(mig).collect());
    }
    gpus
}

/// What nodes have, by name.
fn profiles() -> Vec<(&'static str, NodeGpus)> {
    let boards = |count: u32, make: &dyn Fn(u32) -> Gpu| (0..count).map(make).collect::<Vec<_>>();
    let eighth: Vec<(u32, u32)> = (0..7).map(|start| (start, 1)).collect();
    let no_memory =
        |minor| Gpu { memory: Memory::Unknown, ..gpu(minor, "NVIDIA GB10", "Blackwell", (12, 1), 0) };
    vec![
        ("nothing", NodeGpus::default()),
        ("t4", node_gpus("470.256.02", "11.4", boards(1, &|m| gpu(m, "Tesla T4", "Turing", (7, 5), 15_360)))),
        (
            "a100-80",
            node_gpus(
                "535.104.05",
                "12.2",
                boards(8, &|m| gpu(m, "NVIDIA A100-SXM4-80GB", "Ampere", (8, 0), 81_920)),
            ),
        ),
        ("h100", h100(8)),
        (
            "h200",
            node_gpus("570.86.15", "12.8", boards(8, &|m| gpu(m, "NVIDIA H200", "Hopper", (9, 0), 143_771))),
        ),
        (
            "b200",
            node_gpus("580", "13", boards(8, &|m| gpu(m, "NVIDIA B200", "Blackwell", (10, 0), 183_359))),
        ),
        (
            "l40s",
            node_gpus(
                "615.01",
                "13.1",
                boards(4, &|m| gpu(m, "NVIDIA L40S", "Ada Lovelace", (8, 9), 46_068)),
            ),
        ),
        ("gb10, memory unknown", node_gpus("580.95.05", "13.0", boards(1, &no_memory))),
        ("h100 in sevenths", cut(h100(16), "1g.10gb", &eighth)),
        ("h100 in one", cut(h100(1), "7g.80gb", &[(0, 8)])),
        ("h100 with media extensions", cut(h100(1), "1g.10gb+me", &[(0, 1)])),
        ("names without end", node_gpus("550.163.01", "12.4", vec![gpu(0, &"é".repeat(99), "", (9, 0), 1)])),
    ]
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn every_profile_is_taken_and_kept_as_it_is() {
    let real = Real::connect("profiles").await;
    for (name, gpus) in profiles() {
        let policy = |default_request| SharingPolicy { default_request, ..SharingPolicy::default() };
        let (all, nothing) = (policy(DefaultRequest::Whole), policy(DefaultRequest::Nothing));
        for offer in [Offer::WholeOnly(&all), Offer::Shares(&all), Offer::Shares(&nothing)] {
            let how = PublishOptions { offer, taints: &Taints::new(), counters: Counters::NotKept };
            let contents = desired(&gpus, &real.node, how);
            assert_eq!(violations(&contents), [], "{name}");
            for slice in real.creations(&contents) {
                let stored = real.dry_run(&slice).await.unwrap_or_else(|error| panic!("{name}: {error}"));
                let lost = dropped(&slice.spec, &stored.spec);
                assert!(lost.is_empty() || (lost.shares() && real.minor < 36), "{name}: {lost}");
            }
        }
    }
    real.clean_up().await;
}

/// A device with something added or replaced.
fn device(change: Value) -> Value {
    let mut device = json!({"name": "gpu-0"});
    device.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
    device
}

/// Devices within and beyond the limits.
fn devices() -> Vec<Value> {
    let attribute = |name: &str, value: Value| device(json!({"attributes": {name: value}}));
    let policy = |policy: Value| {
        device(json!({
            "allowMultipleAllocations": true,
            "capacity": {"memory": {"value": "80Gi", "requestPolicy": policy}},
        }))
    };
    let range = |min: &str, max: &str, step: &str, default: &str| {
        policy(json!({"default": default, "validRange": {"min": min, "max": max, "step": step}}))
    };
    let taint = |key: &str, value: &str, effect: &str| {
        device(json!({"taints": [{"key": key, "value": value, "effect": effect}]}))
    };
    let many = |count: usize| {
        let entries: serde_json::Map<_, _> =
            (0..count).map(|i| (format!("a{i}"), json!({"int": i}))).collect();
        device(json!({"attributes": entries}))
    };
    let mut all = vec![many(32), many(33)];
    all.extend(["gpu-0", "0", "GPU-0", "gpu.0", "-gpu", ""].map(|name| device(json!({"name": name}))));
    all.extend([63, 64].map(|length| device(json!({"name": "x".repeat(length)}))));
    let long = "x".repeat(33);
    for name in ["a", "_a1", "1a", "a-b", "", &long, &long[1..], "x.y/a", "/a", "x.y/"] {
        all.push(attribute(name, json!({"int": 1})));
    }
    all.push(attribute(&format!("{}/a", "x".repeat(64)), json!({"int": 1})));
    all.push(attribute(&format!("{}/a", "x".repeat(63)), json!({"int": 1})));
    for length in [0, 64, 65] {
        all.push(attribute("a", json!({"string": "x".repeat(length)})));
    }
    all.push(attribute("a", json!({"string": "é".repeat(33)})));
    all.push(attribute("a", json!({})));
    all.push(attribute("a", json!({"int": 1, "bool": true})));
    for version in [
        "1.2.3",
        "1.2",
        "1",
        "01.2.3",
        "1.2.3.4",
        "1.2.3-",
        "1.2.3-01",
        "1.2.3-rc.1+b.2",
        "v1.2.3",
        "1.2.3+",
        "",
    ] {
        all.push(attribute("a", json!({"version": version})));
    }
    all.extend(
        ["80Gi", "0", "1.5Gi", "100m", "-1"].map(|q| device(json!({"capacity": {"memory": {"value": q}}}))),
    );
    all.push(device(json!({"capacity": {"memory": {"value": "1", "requestPolicy": {"default": "1"}}}})));
    all.extend([
        range("1Mi", "80Gi", "1Mi", "80Gi"),
        range("0", "80Gi", "1Mi", "0"),
        range("1Mi", "81Gi", "1Mi", "80Gi"),
        range("2Gi", "1Gi", "1Mi", "1Gi"),
        range("1Mi", "80Gi", "1Mi", "0"),
        range("1Mi", "80Gi", "3Mi", "1Mi"),
        range("1Mi", "80Gi", "2Mi", "80Gi"),
        range("1Mi", "80Gi", "80Gi", "1Mi"),
        policy(json!({"default": "1Gi", "validRange": {"min": "1Gi"}})),
        policy(json!({"default": "1Gi"})),
        policy(json!({"validRange": {"min": "1Gi"}})),
        policy(json!({"default": "1", "validValues": ["1", "2"]})),
        policy(json!({"default": "3", "validValues": ["1", "2"]})),
        policy(json!({"default": "1", "validValues": ["1", "1"]})),
        policy(json!({"default": "1", "validValues": ["1", "81Gi"]})),
        policy(json!({"default": "1", "validValues": ["1"], "validRange": {"min": "1"}})),
    ]);
    all.extend([
        taint("gpu.nvidia.com/health", "xid-79", "NoSchedule"),
        taint("health", "", "NoExecute"),
        taint("health", "", "None"),
        taint("health", "", "Explode"),
        taint("a/b/c", "", "NoSchedule"),
        taint("", "", "NoSchedule"),
        taint("health", "a b", "NoSchedule"),
    ]);
    all
}

/// Devices that the API server takes and we do not: nobody could select such an attribute, and a default
/// that nothing can hold makes the device useless.
fn devices_for_nobody() -> Vec<Value> {
    vec![
        device(json!({"attributes": {"X.y/a": {"int": 1}}})),
        device(json!({"attributes": {"x.y/a/b": {"int": 1}}})),
        device(json!({
            "allowMultipleAllocations": true,
            "capacity": {"memory": {"value": "80Gi", "requestPolicy": {"default": "81Gi"}}},
        })),
    ]
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn our_limits_are_those_of_the_api_server() {
    let real = Real::connect("limits").await;
    let mut wrong = Vec::new();
    let mut refused = 0;
    for device in devices() {
        let contents = vec![content(&real, json!([device]))];
        let ours = violations(&contents);
        let theirs = real.dry_run(&real.creations(&contents)[0]).await;
        refused += usize::from(theirs.is_err());
        // An API server without a gate drops the field and judges what is left; only one that knows all
        // fields can be compared with.
        let comparable = real.minor >= 36 || !(device.get("taints").is_some() || shares(&device));
        if comparable && ours.is_empty() != theirs.is_ok() {
            wrong.push(format!("{device}: ours {ours:?}, theirs {:?}", theirs.err()));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    for device in devices_for_nobody() {
        assert!(!violations(&[content(&real, json!([device]))]).is_empty(), "{device}");
    }
    assert!(refused > 20, "the table has devices beyond the limits: {refused}");
    for count in [64, 65] {
        let devices: Vec<Value> = (0..count)
            .map(|i| json!({"name": format!("gpu-{i}"), "taints": [{"key": "a", "effect": "None"}]}))
            .collect();
        let contents = vec![content(&real, json!(devices))];
        let theirs = real.dry_run(&real.creations(&contents)[0]).await;
        assert_eq!(violations(&contents).is_empty(), count == 64);
        assert!(real.minor < 36 || theirs.is_ok() == (count == 64), "{count}: {theirs:?}");
    }
    real.clean_up().await;
}

fn shares(device: &Value) -> bool {
    device.to_string().contains("requestPolicy") || device.to_string().contains("allowMultipleAllocations")
}

fn content(real: &Real, devices: Value) -> SliceContent {
    SliceContent {
        node: real.node.clone(),
        pool: PoolName::new(real.node.as_str()),
        devices: serde_json::from_value(devices).unwrap(),
        counters: Vec::new(),
    }
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn what_a_release_does_not_keep_is_noticed() {
    let real = Real::connect("dropped").await;
    let shareable = device(json!({
        "allowMultipleAllocations": true,
        "capacity": {"memory": {"value": "80Gi", "requestPolicy": {"default": "80Gi"}}},
        "taints": [{"key": "a", "effect": "None"}],
    }));
    let sent = &real.creations(&[content(&real, json!([shareable]))])[0];
    let stored = real.cluster.create_slice(sent).await.unwrap();
    let dropped = dropped(&sent.spec, &stored.spec);
    eprintln!("1.{} drops: {dropped}", real.minor);
    assert_eq!(dropped.shares(), real.minor < 36);
    real.clean_up().await;
}

async fn until(
    state: &watch::Receiver<Publication>,
    what: &str,
    holds: impl Fn(&Publication) -> bool,
) -> Publication {
    let mut state = state.clone();
    let found = tokio::time::timeout(PATIENCE * SLOWER, state.wait_for(holds)).await;
    let found = found.map(|state| state.expect("the publisher ended").clone());
    found.unwrap_or_else(|_| panic!("waited in vain for {what}: {:?}", state.borrow()))
}

type Running = (watch::Receiver<Publication>, CancellationToken, tokio::task::JoinHandle<()>);

fn publish(real: &Real, inventory: watch::Receiver<Inventory>) -> Running {
    let cluster = Arc::new(real.cluster.clone());
    let (publisher, state) = Publisher::new(cluster, real.node.clone(), inventory);
    let pace =
        PublicationPace { content: Duration::ZERO, repair: Duration::ZERO, ..PublicationPace::default() };
    let stop = CancellationToken::new();
    let lock = Box::new(|| Ok(Some(Box::new(()) as Box<dyn Send>)));
    let task = tokio::spawn(publisher.with_pace(pace).run(lock, stop.clone()));
    (state, stop, task)
}

fn names(slices: &[ResourceSlice]) -> BTreeMap<i64, usize> {
    let mut devices = BTreeMap::new();
    for slice in slices {
        let count = slice.spec.devices.iter().flatten().count();
        *devices.entry(slice.spec.pool.generation).or_default() += count;
    }
    devices
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn slices_are_kept_as_the_inventory_wants_them() {
    let real = Real::connect("publisher").await;
    let (inventory, receiver) = watch::channel(Inventory::Found(h100(8)));
    let begun = std::time::Instant::now();
    let (state, stop, task) = publish(&real, receiver.clone());
    until(&state, "publication", |p| p.phase == PublicationPhase::Published).await;
    eprintln!("published after {} ms", begun.elapsed().as_millis());
    assert_eq!(names(&real.stored().await), BTreeMap::from([(1, 8)]));

    // A restart finds all in order, whatever form the server has stored it in.
    stop.cancel();
    task.await.unwrap();
    let (state, stop, task) = publish(&real, receiver);
    let publication = until(&state, "publication", |p| p.phase == PublicationPhase::Published).await;
    assert_eq!((publication.writes, publication.generation), (0, 1));
    assert_eq!(publication.dropped.shares(), real.minor < 36, "{}", publication.dropped);
    let shared = |device: &Device| device.allow_multiple_allocations == Some(true);
    let stored = real.stored().await;
    assert!(stored[0].spec.devices.iter().flatten().all(|device| shared(device) == (real.minor >= 36)));

    real.wipe().await;
    until(&state, "what was wiped", |p| p.generation == 2).await;
    assert_eq!(names(&real.stored().await), BTreeMap::from([(2, 8)]));

    let slice = real.stored().await.remove(0);
    let name = slice.metadata.name.unwrap();
    let edit = Patch::Json::<()>(
        serde_json::from_value(json!([{"op": "remove", "path": "/spec/devices/7"}])).unwrap(),
    );
    real.slices().patch(&name, &PatchParams::default(), &edit).await.unwrap();
    until(&state, "the repair", |p| p.writes == 2).await;
    assert_eq!(names(&real.stored().await), BTreeMap::from([(2, 8)]));

    let sevenths: Vec<(u32, u32)> = (0..7).map(|start| (start, 1)).collect();
    inventory.send_replace(Inventory::Found(cut(h100(16), "1g.10gb", &sevenths)));
    until(&state, "112 MIG devices", |p| p.devices == 112).await;
    assert_eq!(names(&real.stored().await), BTreeMap::from([(3, 112)]));

    inventory.send_replace(Inventory::Unavailable { reason: "driver unloaded".to_owned() });
    until(&state, "an empty pool", |p| p.devices == 0 && p.phase == PublicationPhase::Published).await;
    assert_eq!(names(&real.stored().await), BTreeMap::from([(4, 0)]));
    let writes = state.borrow().writes;
    // The wipe's one, the repair's one, the two of the new generation, and the last: one gone, one new.
    assert_eq!(writes, 6);
    stop.cancel();
    task.await.unwrap();
    real.clean_up().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_claim_is_read_through_its_life_and_told_an_event() {
    let real = Real::connect("claims").await;
    let api = Api::<ResourceClaim>::namespaced(real.client.clone(), "default");
    let name = real.node.to_string();
    let object: ResourceClaim = serde_json::from_value(json!({
        "metadata": {"name": name},
        "spec": {"devices": {"requests": [
            {"name": "gpu", "exactly": {"deviceClassName": "gpu.nvidia.com"}},
            {"name": "nic", "exactly": {"deviceClassName": "nic.example.com"}},
        ]}},
    }))
    .unwrap();
    let uid = api.create(&PostParams::default(), &object).await.unwrap().metadata.uid.unwrap();
    let claim = ClaimRef { namespace: "default".to_owned(), name: name.clone(), uid: ClaimUid::new(&uid) };
    assert_eq!(real.cluster.claim_state(&claim).await, ClaimState::NotAllocated);

    let share = "29af2b5c-5d0f-4a6d-8f3f-5b7a8a3f3f10";
    let keeps_shares = real.minor >= 36;
    let mut ours = json!({"request": "gpu", "driver": "gpu.nvidia.com", "pool": name, "device": "gpu-0"});
    if keeps_shares {
        ours["shareID"] = share.into();
        ours["consumedCapacity"] = json!({"memory": "10Gi", "compute": "25"});
    }
    let status = json!({"status": {"allocation": {"devices": {"results": [
        {"request": "nic", "driver": "nic.example.com", "pool": "p", "device": "nic-0"}, ours,
    ], "config": [
        {"source": "FromClaim", "opaque": {"driver": "gpu.nvidia.com", "parameters": {"kind": "GpuConfig"}}},
    ]}}}});
    api.patch_status(&name, &PatchParams::default(), &Patch::Merge(&status)).await.unwrap();
    let read = real.cluster.claim(&claim).await.unwrap();
    assert_eq!(read.requests.iter().map(|r| r.as_str()).collect::<Vec<_>>(), ["gpu", "nic"]);
    assert_eq!(read.results.len(), 1);
    assert_eq!(read.configs[0].parameters["kind"], "GpuConfig");
    let expected = if keeps_shares {
        let consumed = [("compute", Quantity::from_units(25)), ("memory", Quantity::from_units(10 << 30))];
        let consumed = consumed.map(|(name, amount)| (name.to_owned(), amount)).to_vec();
        Access::Share { id: share.to_owned(), consumed }
    } else {
        Access::Exclusive
    };
    assert_eq!(read.results[0].access, expected);

    let (events, task) = real.cluster.events();
    let task = tokio::spawn(task);
    let subject = EventSubject::Claim(claim.clone());
    let message = "from the tests".to_owned();
    events.tell(Note { subject, severity: Severity::Warning, reason: "PrepareFailed", message });
    drop(events);
    task.await.unwrap();
    let of_claim = ListParams::default().fields(&format!("involvedObject.uid={uid}"));
    let told = Api::<Event>::namespaced(real.client.clone(), "default").list(&of_claim).await.unwrap();
    assert_eq!(told.items.len(), 1);

    let replaced = ClaimRef { uid: ClaimUid::new("another"), ..claim.clone() };
    let found_uid = claim.uid.clone();
    assert_eq!(real.cluster.claim_state(&replaced).await, ClaimState::Replaced { found_uid });
    api.delete(&name, &DeleteParams::default()).await.unwrap();
    assert_eq!(real.cluster.claim_state(&claim).await, ClaimState::Gone);
    real.clean_up().await;
}
