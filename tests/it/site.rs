//! A node in a folder: driver root, ledger, lanes, CDI files and an API server that stores claims, with
//! the real plugin on top. A [`PluginRun`] is one run of its process; it can be stopped at any verb of its host.

use std::collections::BTreeMap;
use std::fs::{self, File, FileTimes};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use futures::FutureExt;
use futures::future::BoxFuture;
use futures::stream::{BoxStream, StreamExt};
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use serde_json::{Value, json};
use tokio::sync::watch;

use tranche::cdi;
use tranche::cluster::{CallError, ClaimError, Cluster, SliceEvent, SliceRef, StoredSlice, read_claim};
use tranche::host::driver_root::{DriverRoot, DriverRootCache};
use tranche::host::{LocalHost, LocalProcesses, PidNamespace, durable};
use tranche::inventory::Inventory;
use tranche::kubelet::{Claims, Prepared};
use tranche::ledger::{self, HoldMode, Phase, Record, Step};
use tranche::model::claim::{AllocatedClaim, ClaimRef};
use tranche::model::gpu::*;
use tranche::model::mig::PossibleMig;
use tranche::model::names::{BootId, ClaimUid, DRIVER, DeviceUuid, NodeName, PoolName};
use tranche::model::quantity::Bytes;
use tranche::model::share::{MpsGroup, MpsLimits};
use tranche::node::NodeMetrics;
use tranche::node::carver::{self, Carver};
use tranche::node::config::OpenDescriptors;
use tranche::node::executor::Executor;
use tranche::node::failure_file::FailureFile;
use tranche::node::file_looks::FileLooks;
use tranche::node::holders::Holders;
use tranche::node::lanes::Lanes;
use tranche::node::mig_mode::{self, MigModes};
use tranche::node::preparer::Preparer;
use tranche::node::reporter::Reporter;
use tranche::node::store::{Store, StoreError};
use tranche::node::sweeper::{self, Sweep};
use tranche::nvml::ProcessWatch;
use tranche::ops::metrics::{self, Registry};
use tranche::sharing::SharingPolicy;

use crate::fake_mig::{self, FakeMig, MigBoards};
use crate::fake_mps::{Supervisor, SupervisorClient};
use crate::stop_at::{StopAt, read_records};

pub const NODE: &str = "node-a";
pub const VERSION: &str = "550.163.01";

/// Notes what it is told, as the driver would. A fifo `<uuid>.gate` makes it wait, a file `fail` makes it fail.
const NVIDIA_SMI: &str = r#"#!/bin/sh
here="${0%/*}/../../gpus"
[ "$1 $2 $4" = "compute-policy -i --set-timeslice" ] || { echo "not understood: $*" >&2; exit 2; }
[ ! -p "$here/$3.gate" ] || read -r _ < "$here/$3.gate"
[ ! -e "$here/fail" ] || { cat "$here/fail" >&2; exit 15; }
echo "$5" > "$here/$3.slice"
"#;

/// A claim as its author and the scheduler wrote it.
#[derive(Debug, Clone)]
pub struct Claim(pub Value);

impl Claim {
    /// One request per device, all of this node, all for this claim alone.
    pub fn new(name: &str, devices: &[&str]) -> Self {
        let numbered = || devices.iter().enumerate();
        let requests: Vec<Value> = numbered()
            .map(|(n, _)| json!({"name": format!("r{n}"), "exactly": {"deviceClassName": DRIVER}}))
            .collect();
        let results: Vec<Value> = numbered()
            .map(|(n, device)| json!({"request": format!("r{n}"), "driver": DRIVER, "pool": NODE, "device": device}))
            .collect();
        Self(json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
            "metadata": {"namespace": "team", "name": name, "uid": format!("uid-{name}")},
            "spec": {"devices": {"requests": requests}},
            "status": {"allocation": {"devices": {"results": results, "config": []}}},
        }))
    }

    pub fn with(mut self, pointer: &str, value: Value) -> Self {
        *self.0.pointer_mut(pointer).unwrap() = value;
        self
    }

    pub fn uid(self, uid: &str) -> Self {
        self.with("/metadata/uid", json!(uid))
    }

    /// A configuration for some requests, all if none is named.
    pub fn config(mut self, requests: &[&str], parameters: Value) -> Self {
        let config = json!({"source": "FromClaim", "requests": requests,
            "opaque": {"driver": DRIVER, "parameters": parameters}});
        self.0["status"]["allocation"]["devices"]["config"].as_array_mut().unwrap().push(config);
        self
    }

    /// Pods that may use it, by UID; their names are made from it.
    pub fn reserved_for(mut self, pods: &[&str]) -> Self {
        let pod = |uid: &&str| json!({"resource": "pods", "name": format!("pod-{}", &uid[..4]), "uid": uid});
        self.0["status"]["reservedFor"] = pods.iter().map(pod).collect();
        self
    }

    pub fn interval(self, interval: &str) -> Self {
        let sharing = json!({"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": interval}});
        self.config(&[], gpu_config(sharing))
    }

    /// Every result becomes a share, as the scheduler writes it.
    pub fn share(mut self, memory: &str, compute: &str) -> Self {
        let results = self.0["status"]["allocation"]["devices"]["results"].as_array_mut().unwrap();
        for (n, result) in results.iter_mut().enumerate() {
            result["shareID"] = json!(format!("share-{n}"));
            result["consumedCapacity"] = json!({"memory": memory, "compute": compute, "shares": "1"});
        }
        self
    }

    /// Every result becomes a part of its GPU that the controller gave: one entry for each request. Before
    /// or after [`Claim::share`], which adds what API servers keep from 1.36 on.
    pub fn granted(mut self, mib: u64, compute: u8) -> Self {
        let results = self.0["status"]["allocation"]["devices"]["results"].as_array().unwrap().clone();
        for result in results {
            let device = result["device"].as_str().unwrap();
            let gpu = format!("GPU-{}", device.trim_start_matches("gpu-"));
            let part = json!({"device": device, "gpu": gpu, "memory": format!("{mib}Mi"), "compute": compute,
                "slots": 1, "isolation": "mps"});
            let parameters =
                json!({"apiVersion": "tranche.dev/v1alpha1", "kind": "ShareGrant", "devices": [part]});
            self = self.config(&[result["request"].as_str().unwrap()], parameters);
            let configs = self.0["status"]["allocation"]["devices"]["config"].as_array_mut().unwrap();
            configs.last_mut().unwrap()["source"] = json!("FromClass");
        }
        self
    }

    /// The controller chose a place on the GPU for a MIG device: after [`Claim::granted`].
    pub fn carved(mut self, profile: u32, start: u32, size: u32) -> Self {
        let configs = self.0["status"]["allocation"]["devices"]["config"].as_array_mut().unwrap();
        for part in configs.iter_mut().filter_map(|config| config.pointer_mut("/opaque/parameters/devices/0"))
        {
            part["mig"] = json!({"profile": profile, "start": start, "size": size});
            part["isolation"] = json!("mig");
            part.as_object_mut().unwrap().remove("compute");
        }
        self
    }

    /// The controller gave all of the GPUs, for the fraction 1: after [`Claim::granted`].
    pub fn whole(mut self) -> Self {
        let configs = self.0["status"]["allocation"]["devices"]["config"].as_array_mut().unwrap();
        for config in configs.iter_mut().filter(|config| config["source"] == "FromClass") {
            config["opaque"]["parameters"]["devices"][0]["whole"] = json!(true);
        }
        let share = json!({"apiVersion": "tranche.dev/v1alpha1", "kind": "GpuShare", "fraction": "1"});
        self.config(&[], share)
    }

    /// Changes the first configuration, as nobody should.
    pub fn tampered(self, field: &str, value: Value) -> Self {
        self.with(&format!("/status/allocation/devices/config/0/{field}"), value)
    }

    pub fn admin(mut self) -> Self {
        for result in self.0["status"]["allocation"]["devices"]["results"].as_array_mut().unwrap() {
            result["adminAccess"] = json!(true);
        }
        self
    }

    pub fn id(&self) -> ClaimRef {
        let text = |key: &str| self.0["metadata"][key].as_str().unwrap().to_owned();
        ClaimRef { namespace: text("namespace"), name: text("name"), uid: ClaimUid::new(text("uid")) }
    }

    /// What kubelet must be told, whatever happened before: fixed by the claim's UID and its devices.
    pub fn cdi_ids(&self) -> Vec<String> {
        let results = self.0["status"]["allocation"]["devices"]["results"].as_array().unwrap();
        let uid = self.id().uid;
        let device = |result: &Value| {
            let share = result["shareID"].as_str().map(|id| format!("-{id}")).unwrap_or_default();
            format!("{}{share}", result["device"].as_str().unwrap())
        };
        results.iter().map(|r| format!("k8s.gpu.nvidia.com/claim={uid}-{}", device(r))).collect()
    }
}

pub fn gpu_config(sharing: Value) -> Value {
    json!({"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig", "sharing": sharing})
}

/// The API server: stores claims, and can fall silent.
#[derive(Default)]
pub struct Api {
    claims: Mutex<BTreeMap<(String, String), ResourceClaim>>,
    pub silent: AtomicBool,
    /// What happens while the next answer is on its way.
    meanwhile: Mutex<Option<BoxFuture<'static, ()>>>,
}

impl Api {
    /// Creates a claim, or replaces the one of that name.
    pub fn put(&self, claim: &Claim) {
        let id = claim.id();
        let object = serde_json::from_value(claim.0.clone()).unwrap();
        self.claims.lock().unwrap().insert((id.namespace, id.name), object);
    }

    pub fn remove(&self, claim: &Claim) {
        let id = claim.id();
        self.claims.lock().unwrap().remove(&(id.namespace, id.name));
    }

    /// Has something happen after the next question is answered, and before the answer arrives.
    pub fn meanwhile(&self, what: impl Future<Output = ()> + Send + 'static) {
        *self.meanwhile.lock().unwrap() = Some(what.boxed());
    }

    fn read(&self, claim: &ClaimRef) -> Result<AllocatedClaim, ClaimError> {
        if self.silent.load(Ordering::SeqCst) {
            let source =
                CallError::Unreachable { what: "GET claim".into(), source: "no route to host".into() };
            return Err(ClaimError::Call { claim: claim.clone(), source: Box::new(source) });
        }
        let claims = self.claims.lock().unwrap();
        let found = claims.get(&(claim.namespace.clone(), claim.name.clone()));
        found.map_or_else(|| Err(ClaimError::Gone { claim: claim.clone() }), |o| read_claim::read(claim, o))
    }
}

impl Cluster for Api {
    fn claim<'a>(&'a self, claim: &'a ClaimRef) -> BoxFuture<'a, Result<AllocatedClaim, ClaimError>> {
        async move {
            let answer = self.read(claim);
            let meanwhile = self.meanwhile.lock().unwrap().take();
            if let Some(meanwhile) = meanwhile {
                meanwhile.await;
            }
            answer
        }
        .boxed()
    }
    fn node_uid(&self) -> BoxFuture<'_, Result<String, CallError>> {
        unimplemented!("preparing asks for claims only")
    }
    fn slices(&self) -> BoxFuture<'_, Result<Vec<StoredSlice>, CallError>> {
        unimplemented!("preparing asks for claims only")
    }
    fn watch_slices(&self) -> BoxStream<'static, SliceEvent> {
        futures::stream::pending().boxed()
    }
    fn create_slice<'a>(&'a self, _: &'a ResourceSlice) -> BoxFuture<'a, Result<ResourceSlice, CallError>> {
        unimplemented!("preparing asks for claims only")
    }
    fn try_slice<'a>(&'a self, _: &'a ResourceSlice) -> BoxFuture<'a, Result<ResourceSlice, CallError>> {
        unimplemented!("preparing asks for claims only")
    }
    fn update_slice<'a>(&'a self, _: &'a ResourceSlice) -> BoxFuture<'a, Result<ResourceSlice, CallError>> {
        unimplemented!("preparing asks for claims only")
    }
    fn delete_slice<'a>(&'a self, _: &'a SliceRef) -> BoxFuture<'a, Result<(), CallError>> {
        unimplemented!("preparing asks for claims only")
    }
}

/// See the module's text.
pub struct Site {
    dir: tempfile::TempDir,
    pub api: Arc<Api>,
    pub gpus: watch::Sender<Inventory>,
    pub mps: Arc<Supervisor>,
    pub mig: Arc<MigBoards>,
    /// How long MIG modes stay on that nobody needs, for processes that start from now on.
    pub keep: Mutex<Duration>,
    pub open_descriptors: Mutex<OpenDescriptors>,
    /// Driver root of the library that is asked who uses the GPUs; the site's own has none that works.
    pub lists_root: PathBuf,
    boots: AtomicU32,
}

/// One run of the plugin's process, from its start until it is dropped.
pub struct PluginRun {
    pub preparer: Arc<Preparer>,
    pub host: Arc<StopAt>,
    registry: Registry,
}

impl Site {
    /// gpu-0 and gpu-1 whole, gpu-2 cut into two MIG devices.
    pub fn new() -> Self {
        Self::with(vec![
            board(0, MigMode::Off),
            board(1, MigMode::Off),
            board(2, MigMode::On(vec![mig(0), mig(1)])),
        ])
    }

    /// gpu-3 is carved on demand.
    pub fn carved() -> Self {
        let places = PossibleMig::all(&uuid(3), &fake_mig::profiles());
        Self::with(vec![board(3, MigMode::OnDemand(OnDemand { places, ..OnDemand::default() }))])
    }

    /// gpu-3 is whole, and cut when a MIG device is asked for.
    pub fn whole_or_cut() -> Self {
        let places = PossibleMig::all(&uuid(3), &fake_mig::profiles());
        let cut = OnDemand { switch: MigSwitch::Off, places, ..OnDemand::default() };
        let site = Self::with(vec![board(3, MigMode::OnDemand(cut))]);
        site.mig.be_whole(&uuid(3));
        site
    }

    pub fn with_whole_gpus(count: u32) -> Self {
        Self::with((0..count).map(|minor| board(minor, MigMode::Off)).collect())
    }

    fn with(gpus: Vec<Gpu>) -> Self {
        // In memory where that is possible: hundreds of sites flush thousands of files.
        let memory = Path::new("/dev/shm");
        let dir = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }.unwrap();
        let carved = gpus.iter().any(|gpu| matches!(gpu.mig, MigMode::OnDemand(_)));
        let driver = DriverVersions { driver: VERSION.into(), cuda: "12.4".into() };
        let gpus = watch::channel(Inventory::Found(NodeGpus { driver, gpus })).0;
        let mps = Arc::new(Supervisor::new(dir.path().join("mps")));
        let lists_root = dir.path().join("driver");
        let (api, mig) = Default::default();
        let keep = Mutex::new(Duration::from_secs(3600));
        let (open_descriptors, boots) = (Mutex::default(), AtomicU32::new(1));
        let site = Self { dir, api, gpus, mps, mig, keep, open_descriptors, lists_root, boots };
        for folder in ["ledger", "lanes", "cdi", "driver/gpus", "processes", "state"] {
            fs::create_dir_all(site.path(folder)).unwrap();
        }
        let mut elf = vec![0; 64];
        elf[..5].copy_from_slice(b"\x7fELF\x02");
        elf[18] = 62;
        let put = |place: &str, bytes: &[u8]| {
            let path = site.path("driver").join(place);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, bytes).unwrap();
        };
        put(&format!("usr/lib64/libcuda.so.{VERSION}"), &elf);
        put(&format!("usr/lib64/libnvidia-ml.so.{VERSION}"), &elf);
        put("proc/devices", b"Character devices:\n195 nvidia\n237 nvidia-caps\n511 nvidia-uvm\n");
        put(
            "proc/driver/nvidia-caps/mig-minors",
            b"gpu2/gi7/access 66\ngpu2/gi7/ci0/access 67\ngpu2/gi8/access 75\ngpu2/gi8/ci0/access 76\n",
        );
        if carved {
            let line = |gi: u32| {
                let minor = 200 + 2 * gi;
                format!("gpu3/gi{gi}/access {minor}\ngpu3/gi{gi}/ci0/access {}\n", minor + 1)
            };
            let lines: String = (3..14).map(line).collect();
            put("proc/driver/nvidia-caps/mig-minors", lines.as_bytes());
        }
        site.put_nvidia_smi();
        site
    }

    /// Written by a child: a file that this process has open for writing, if only in a child that another
    /// test is just starting, cannot be executed.
    fn put_nvidia_smi(&self) {
        let place = self.path("driver/usr/bin");
        fs::create_dir_all(&place).unwrap();
        let write = "printf '%s' \"$1\" > nvidia-smi && chmod +x nvidia-smi";
        let status = Command::new("/bin/sh")
            .args(["-c", write, "sh", NVIDIA_SMI])
            .current_dir(place)
            .status()
            .unwrap();
        assert!(status.success());
    }

    pub fn path(&self, below: &str) -> PathBuf {
        self.dir.path().join(below)
    }

    pub fn boot(&self) -> BootId {
        BootId::new(format!("boot-{}", self.boots.load(Ordering::SeqCst)))
    }

    /// What a boot does to the node: the CDI folder is empty, the driver's settings are its defaults.
    pub fn reboot(&self) {
        self.reboot_with_lasting_edits();
        fs::remove_dir_all(self.path("cdi")).unwrap();
        fs::create_dir_all(self.path("cdi")).unwrap();
    }

    /// A node whose CDI folder is on a disk.
    pub fn reboot_with_lasting_edits(&self) {
        self.boots.fetch_add(1, Ordering::SeqCst);
        self.mps.forget_all();
        self.mig.boot();
        fs::remove_dir_all(self.path("driver/gpus")).unwrap();
        fs::create_dir_all(self.path("driver/gpus")).unwrap();
    }

    pub fn start_plugin(&self) -> PluginRun {
        self.try_start_plugin().unwrap()
    }

    /// The node's processes, as its /proc shows them.
    fn processes(&self) -> Arc<LocalProcesses> {
        Arc::new(LocalProcesses { root: self.path("processes"), nvml_pids: PidNamespace::Own })
    }

    /// A process of a pod begins.
    pub fn runs(&self, pid: u32, pod: &str) {
        let folder = self.path(&format!("processes/{pid}"));
        fs::create_dir_all(&folder).unwrap();
        let stat = format!("{pid} (x) S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 77 0 0\n");
        fs::write(folder.join("stat"), stat).unwrap();
        fs::write(folder.join("cgroup"), format!("0::/kubepods/burstable/pod{pod}/c\n")).unwrap();
    }

    /// A process ends.
    pub fn ends(&self, pid: u32) {
        fs::remove_dir_all(self.path(&format!("processes/{pid}"))).unwrap();
    }

    /// Starts the plugin.
    pub fn try_start_plugin(&self) -> Result<PluginRun, StoreError> {
        let real = LocalHost { driver: self.path("driver").into() };
        let host = Arc::new(StopAt::new(real, self.path("ledger")));
        let store = Store::open(self.path("ledger"), &self.path("lanes"), host.clone())?;
        let mut root = DriverRoot::new(self.path("driver"), self.path("driver").to_str().unwrap());
        root.dev.proc = self.path("driver/proc");
        let modes = self.path("state").join(mig_mode::FOLDER);
        let mut registry = metrics::registry();
        let metrics = NodeMetrics::register(&mut registry);
        let policy = *self.open_descriptors.lock().unwrap();
        let files = FileLooks::new(self.processes(), policy, metrics.file_looks.clone());
        let executor = Executor {
            node: NodeName::from(NODE),
            pool: PoolName::from(NODE),
            boot: self.boot(),
            cdi_dir: self.path("cdi"),
            store,
            host: host.clone(),
            driver: DriverRootCache::new(root),
            daemons: Arc::new(SupervisorClient { supervisor: self.mps.clone(), host: host.clone() }),
            mig: Carver::new(
                Arc::new(FakeMig { boards: self.mig.clone(), host: host.clone(), modes: modes.clone() }),
                carver::AVOIDED,
                FailureFile::new(host.clone(), self.path("state"), self.boot()),
                MigModes::new(host.clone(), modes, self.boot(), Some(*self.keep.lock().unwrap())).unwrap(),
            ),
            holders: Holders::new(self.processes(), None, files),
            sharing: SharingPolicy::default(),
            mps_dir: self.path("mps").display().to_string(),
        };
        let preparer = Preparer {
            cluster: self.api.clone(),
            inventory: self.gpus.subscribe(),
            lanes: Arc::new(Lanes::new(self.path("lanes"))),
            executor: Arc::new(executor),
            metrics,
            lists: ProcessWatch::new(self.lists_root.clone().into(), Duration::from_secs(2)),
            reporter: Reporter::disconnected(),
        };
        Ok(PluginRun { preparer: Arc::new(preparer), host, registry })
    }

    /// The ledger, as it is on the disk.
    pub fn records(&self) -> Vec<Record> {
        read_records(&self.path("ledger")).map(Result::unwrap).collect()
    }

    /// Is the claim recorded as ready?
    pub fn is_ready(&self, claim: &Claim) -> bool {
        let uid = claim.id().uid;
        self.records().iter().any(|record| record.intent.claim.uid == uid && record.phase == Phase::Ready)
    }

    /// Files in the CDI folder, unfinished ones too.
    pub fn files(&self) -> Vec<String> {
        durable::names(&self.path("cdi")).unwrap()
    }

    /// A claim's container edits, free of this site's own path.
    pub fn edits(&self, claim: &Claim) -> Option<Value> {
        let text = fs::read_to_string(self.path("cdi").join(cdi::file_name(&claim.id().uid))).ok()?;
        Some(serde_json::from_str(&text.replace(self.dir.path().to_str().unwrap(), "")).unwrap())
    }

    /// The time slice that a GPU was last set to in this boot.
    pub fn time_slice(&self, minor: u32) -> u8 {
        let text = fs::read_to_string(self.path(&format!("driver/gpus/GPU-{minor}.slice")));
        text.map_or(0, |text| text.trim().parse().unwrap())
    }

    /// As if the last process had died ten minutes ago.
    pub fn age_temporaries(&self) {
        let then = FileTimes::new().set_modified(SystemTime::now() - Duration::from_secs(600));
        for folder in ["ledger", "cdi"] {
            for name in durable::names(&self.path(folder)).unwrap() {
                if name.starts_with(durable::TEMP_PREFIX) {
                    File::open(self.path(folder).join(name)).unwrap().set_times(then).unwrap();
                }
            }
        }
    }

    /// What must hold at every moment between two verbs.
    pub fn check(&self, at: &str) {
        let records = self.records();
        assert_eq!(ledger::audit(&records), [], "{at}");
        let uids: Vec<&ClaimUid> = records.iter().map(|record| &record.intent.claim.uid).collect();
        for file in self.files() {
            if let Some(uid) = cdi::claim_of(&file).filter(|_| !file.starts_with('.')) {
                assert!(uids.contains(&&uid), "{at}: {file} without a record among {uids:?}");
            }
        }
        for minor in 0..8 {
            let slice = |step: &Step| matches!(step, Step::TimeSlice { gpu, .. } if *gpu == uuid(minor));
            let wanted = records.iter().any(|record| record.intent.steps.iter().any(slice));
            assert!(wanted || self.time_slice(minor) == 0, "{at}: nobody's time slice on GPU-{minor}");
        }
        self.check_daemons(&records, at);
        let made = self.mig.all();
        for (gpu, place) in &made {
            let recorded =
                records.iter().any(|record| record.intent.places().any(|one| one == (gpu, *place)));
            assert!(recorded, "{at}: nobody's instance on {gpu} at {place:?}");
        }
        for record in records.iter().filter(|r| r.phase == Phase::Ready && r.intent.boot == self.boot()) {
            for (gpu, place) in record.intent.places() {
                assert!(made.contains(&(gpu.clone(), place)), "{at}: no instance at {place:?}");
            }
        }
        self.check_modes(&records, at);
    }

    /// The boards whose MIG mode is ours to switch.
    fn check_modes(&self, records: &[Record], at: &str) {
        let Inventory::Found(gpus) = self.gpus.borrow().clone() else { return };
        for gpu in gpus.gpus.iter().filter(|gpu| gpu.is_whole_or_cut()) {
            let on = self.mig.is_on(&gpu.uuid);
            let recorded = self.path("state").join(mig_mode::FOLDER).join(format!("{}.json", gpu.uuid));
            assert!(!on || recorded.exists(), "{at}: MIG mode of {} is on, and nothing says why", gpu.uuid);
            let ready = records.iter().filter(|r| r.phase == Phase::Ready && r.intent.boot == self.boot());
            for held in ready.flat_map(|record| &record.intent.devices).filter(|held| held.gpu == gpu.uuid) {
                let wants = held.mode == HoldMode::Mig;
                assert!(held.mode == HoldMode::Admin || on == wants, "{at}: {held:?} with MIG mode {on}");
            }
        }
    }

    /// A daemon is kept only for claims, never looser than the loosest of them needs, and no claim that is
    /// ready has less than it was granted.
    fn check_daemons(&self, records: &[Record], at: &str) {
        let kept = self.mps.kept();
        for (group, (_, limits)) in &kept {
            let needs = |record: &Record| needs_of(record, group);
            let loosest = tranche::sharing::loosest(&records.iter().filter_map(needs).collect::<Vec<_>>());
            let loosest = loosest.unwrap_or_else(|| panic!("{at}: a daemon for {group} that nobody needs"));
            assert!(
                loosest.allow(limits),
                "{at}: {group} has {limits:?}, the loosest claim needs {loosest:?}"
            );
        }
        let boot = self.boot();
        for record in records.iter().filter(|r| r.phase == Phase::Ready && r.intent.boot == boot) {
            for step in &record.intent.steps {
                if let Step::Mps { group, needs, .. } = step {
                    let limits = kept.get(group).map(|(_, limits)| limits);
                    assert!(limits.is_some_and(|limits| limits.allow(needs)), "{at}: {group}: {limits:?}");
                }
            }
        }
    }

    /// Nothing of any claim is left.
    pub fn check_empty(&self, at: &str) {
        self.check(at);
        assert_eq!(durable::names(&self.path("ledger")).unwrap(), [""; 0], "{at}");
        assert_eq!(self.files(), [""; 0], "{at}");
        assert!(self.mps.kept().is_empty(), "{at}");
    }
}

fn needs_of(record: &Record, group: &MpsGroup) -> Option<MpsLimits> {
    record.intent.steps.iter().find_map(|step| match step {
        Step::Mps { group: other, needs, .. } if other == group => Some(needs.clone()),
        _ => None,
    })
}

impl PluginRun {
    pub async fn prepare(&self, claim: &Claim) -> Prepared {
        let id = claim.id();
        self.preparer.prepare(vec![id.clone()]).await.remove(&id.uid).unwrap()
    }

    /// Prepares, and takes only the right answer.
    pub async fn prepared(&self, claim: &Claim, at: &str) {
        let devices = self.prepare(claim).await.unwrap_or_else(|error| panic!("{at}: {error}"));
        let ids: Vec<String> = devices.iter().flat_map(|device| device.cdi_ids.clone()).collect();
        assert_eq!(ids, claim.cdi_ids(), "{at}");
        for (index, device) in devices.iter().enumerate() {
            assert_eq!(device.requests, [format!("r{index}")], "{at}");
            assert_eq!(device.pool, PoolName::from(NODE), "{at}");
        }
    }

    pub async fn refused(&self, claim: &Claim, words: &[&str]) {
        let error = self.prepare(claim).await.unwrap_err();
        for word in words {
            assert!(error.contains(word), "{word:?} is not in: {error}");
        }
    }

    pub async fn unprepare(&self, claim: &Claim) -> Result<(), String> {
        let record = self.preparer.executor.store.read(&claim.id().uid).ok().flatten();
        let released = self.released(claim).await;
        self.settle(record.map(|record| record.gpus()).unwrap_or_default()).await;
        released
    }

    /// The answer to kubelet, which more may follow.
    pub async fn released(&self, claim: &Claim) -> Result<(), String> {
        let id = claim.id();
        self.preparer.unprepare(vec![id.clone()]).await.remove(&id.uid).unwrap()
    }

    /// Waits until nothing is done to these GPUs.
    pub async fn settle(&self, gpus: Vec<DeviceUuid>) {
        drop(self.preparer.lanes.queue(gpus).await.unwrap());
    }

    /// One look at the MIG modes that were switched for claims.
    pub async fn review_modes(&self) {
        mig_mode::review(&self.preparer, &mut BTreeMap::new()).await;
    }

    /// None if the process was stopped amid it.
    pub async fn sweep(&self) -> Option<Sweep> {
        let preparer = self.preparer.clone();
        let swept = tokio::spawn(async move { sweeper::sweep(&preparer).await }).await;
        (!self.host.stopped()).then(|| swept.unwrap())
    }

    /// A metric's value: name and labels as they are printed.
    pub fn metric(&self, name: &str) -> f64 {
        let text = metrics::text(&self.registry).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("no {name} in\n{text}")).parse().unwrap()
    }

    /// I1, as the host saw it.
    pub fn check(&self, at: &str) {
        assert_eq!(self.host.broken(), [""; 0], "{at}");
    }
}

pub fn uuid(minor: u32) -> DeviceUuid {
    DeviceUuid::new(format!("GPU-{minor}"))
}

pub fn board(minor: u32, mig: MigMode) -> Gpu {
    Gpu {
        uuid: uuid(minor),
        minor,
        product_name: "NVIDIA H100 80GB HBM3".into(),
        brand: "Nvidia".into(),
        architecture: "Hopper".into(),
        compute_capability: (9, 0),
        memory: Memory::Known { total: Bytes(80 << 30), reserved: Bytes(0) },
        multiprocessors: Some(132),
        addressing_mode: None,
        pci: Pci::default(),
        mig,
        health: Health::Healthy,
    }
}

pub fn mig(start: u32) -> MigDevice {
    MigDevice {
        uuid: DeviceUuid::new(format!("MIG-{start}")),
        profile: "1g.10gb".into(),
        gpu_instance: 7 + start,
        compute_instance: 0,
        profile_id: 19,
        placement: Placement { start, size: 1 },
        capacity: MigCapacity::default(),
    }
}
