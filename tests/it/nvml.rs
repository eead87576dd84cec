//! The NVML edge and discovery against a library: the fake one, loaded as the real one is.
//!
//! Every test has a driver root of its own with its own copy of the library, and beside it the file
//! that says what the node is made of.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tranche::inventory::{Inventory, Look};
use tranche::model::gpu::{Gpu, Health, Memory, MigDevice, MigMode};
use tranche::model::names::DeviceUuid;
use tranche::model::quantity::Bytes;
use tranche::model::selector::GpuSelector;
use tranche::node::discovery::{Discovered, Discovery, LookTiming, watch_files};
use tranche::nvml::{
    BoardProcesses, ComputeMode, ComputeModes, ContextKind, GpuEvent, Gpus, Load, Nvml, NvmlError,
    ProcessWatch, Settings,
};

/// What a test waits for must have come within this time.
const DEADLINE: Duration = Duration::from_secs(30);

/// The fake library, beside its tool: the one that TRANCHE_FAKE_NVML names, or else built here.
fn library() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        if let Some(path) = std::env::var_os("TRANCHE_FAKE_NVML") {
            return path.into();
        }
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let target = here.join("target/fake-nvml");
        let status = Command::new(env!("CARGO"))
            .args(["build", "--quiet", "--manifest-path"])
            .arg(here.join("hack/fake-nvml/Cargo.toml"))
            .arg("--target-dir")
            .arg(&target)
            .status()
            .expect("cargo runs");
        assert!(status.success(), "the fake library does not build");
        target.join("debug/libfake_nvml.so")
    })
}

/// A node: a driver root, a /sys and a /dev.
pub struct Node {
    dir: TempDir,
}

impl Node {
    /// A node without a driver.
    fn bare() -> Self {
        assert!(std::env::var_os("FAKE_NVML_DIR").is_none(), "FAKE_NVML_DIR would be that of all nodes");
        let dir = tempfile::tempdir().unwrap();
        for name in ["root/usr/lib64", "sys/bus/pci/devices", "dev"] {
            fs::create_dir_all(dir.path().join(name)).unwrap();
        }
        Self { dir }
    }

    /// A node with a driver, and what its control file says.
    pub fn with(control: Value) -> Self {
        let node = Self::bare();
        node.set(control);
        node.install("580.159.04");
        node
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn lib64(&self) -> PathBuf {
        self.path("root/usr/lib64")
    }

    /// Installs the library of a driver version as a package does: the file, then the link. The link is absolute, as
    /// some packages have it.
    fn install(&self, version: &str) {
        let mut tool = Command::new(library().with_file_name("fake-nvml"));
        tool.args(["install", "--driver", version, "--lib"]).arg(library()).arg(self.lib64());
        let out = tool.output().expect("fake-nvml runs");
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        let link = self.lib64().join("libnvidia-ml.so.1");
        fs::remove_file(&link).unwrap();
        symlink(format!("/usr/lib64/libnvidia-ml.so.{version}"), link).unwrap();
    }

    pub fn set(&self, control: Value) {
        let new = self.path("control.new");
        fs::write(&new, control.to_string()).unwrap();
        fs::rename(new, self.lib64().join("control.json")).unwrap();
    }

    pub fn nvml(&self) -> Nvml {
        self.nvml_within(DEADLINE)
    }

    fn nvml_within(&self, look_limit: Duration) -> Nvml {
        self.nvml_carving(look_limit, Vec::new())
    }

    /// One that knows of boards which are carved on demand.
    pub fn nvml_carving(&self, look_limit: Duration, on_demand: Vec<GpuSelector>) -> Nvml {
        self.nvml_with(look_limit, on_demand, false)
    }

    /// One that switches the MIG mode of such boards, if `switches`.
    pub fn nvml_with(&self, look_limit: Duration, on_demand: Vec<GpuSelector>, switches: bool) -> Nvml {
        let (driver, sys_root) = (self.path("root").into(), self.path("sys"));
        Nvml::new(Settings { driver, sys_root, look_limit, on_demand, switches })
    }

    /// Calls of this function that the library has noted, where the control file says `log_calls`.
    pub fn calls(&self, function: &str) -> usize {
        let log = fs::read_to_string(self.lib64().join("calls.log")).unwrap_or_default();
        log.lines().filter(|line| line.split(' ').nth(2) == Some(function)).count()
    }

    fn processes(&self, limit: Duration) -> ProcessWatch {
        ProcessWatch::new(self.path("root").into(), limit)
    }

    /// Discovery that looks at once, and then only when there is a reason.
    fn discover(&self, watched: bool) -> (Discovered, CancellationToken) {
        let stop = CancellationToken::new();
        let policy = LookTiming { every: Duration::from_secs(3600), ..LookTiming::default() };
        let files = if watched {
            watch_files(self.path("dev"), self.path("root").into(), stop.clone())
        } else {
            mpsc::channel(1).1
        };
        let (discovery, out) = Discovery::new(Arc::new(self.nvml()), policy, files);
        tokio::spawn(discovery.run(stop.clone()));
        (out, stop)
    }
}

async fn look(nvml: &Nvml) -> Look {
    nvml.look(Load::Keep).await.unwrap()
}

fn migs(gpu: &Gpu) -> &[MigDevice] {
    match &gpu.mig {
        MigMode::On(devices) => devices,
        MigMode::OnDemand(_) => panic!("nobody asked to carve GPU {}", gpu.minor),
        MigMode::Off => panic!("MIG is off on GPU {}", gpu.minor),
    }
}

fn profiles(gpus: &[Gpu]) -> Vec<String> {
    gpus.iter().flat_map(migs).map(|mig| mig.profile.clone()).collect()
}

async fn until(out: &mut Discovered, what: impl Fn(&[Gpu]) -> bool) -> Vec<Gpu> {
    let found =
        out.inventory.wait_for(|inventory| matches!(inventory, Inventory::Found(node) if what(&node.gpus)));
    match timeout(DEADLINE, found).await.expect("it is published in time").unwrap().clone() {
        Inventory::Found(node) => node.gpus,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn eight_h100s_are_found_with_all_their_facts() {
    let node = Node::with(json!({"profile": "h100", "count": 8}));
    let real = node.path("sys/devices/pci0000:15/0000:1b:00.0");
    fs::create_dir_all(&real).unwrap();
    fs::write(real.join("numa_node"), "1\n").unwrap();
    symlink(&real, node.path("sys/bus/pci/devices/0000:1b:00.0")).unwrap();

    let look = look(&node.nvml()).await;
    assert_eq!((look.failed, look.left_out), (vec![], Vec::<String>::new()));
    assert_eq!((look.gpus.driver.driver.as_str(), look.gpus.driver.cuda.as_str()), ("580.159.04", "13.0"));
    assert_eq!(look.gpus.gpus.iter().map(|gpu| gpu.minor).collect::<Vec<_>>(), (0..8).collect::<Vec<_>>());
    let first = &look.gpus.gpus[0];
    let total = Bytes::from_mib(81_559);
    assert!(first.uuid.as_str().starts_with("GPU-"), "{}", first.uuid);
    assert_eq!(first.product_name, "NVIDIA H100 80GB HBM3");
    assert_eq!((first.brand.as_str(), first.architecture.as_str()), ("Nvidia", "Hopper"));
    assert_eq!((first.compute_capability, first.multiprocessors), ((9, 0), Some(132)));
    assert!(matches!(first.memory, Memory::Known { total: t, reserved } if t == total && reserved.0 > 0));
    assert_eq!(first.addressing_mode.as_deref(), Some("HMM"));
    assert_eq!((first.pci.bus_id.as_str(), first.pci.root.as_deref()), ("0000:1b:00.0", Some("pci0000:15")));
    assert_eq!((first.pci.numa_node, look.gpus.gpus[1].pci.numa_node), (Some(1), None));
    assert_eq!((&first.mig, &first.health), (&MigMode::Off, &Health::Healthy));
}

#[tokio::test]
async fn multiprocessors_are_those_of_the_data_sheets() {
    for (profile, expected) in [("t4", 40), ("a100-80gb", 108), ("h200", 132), ("b200", 148), ("l40s", 142)] {
        let node = Node::with(json!({"profile": profile}));
        assert_eq!(look(&node.nvml()).await.gpus.gpus[0].multiprocessors, Some(expected), "{profile}");
    }
}

#[tokio::test]
async fn mig_devices_are_found_with_profile_place_and_engines() {
    let instances = json!([
        {"profile": "1g.10gb+me", "placement": 0}, {"profile": "1g.10gb", "placement": 1},
        {"profile": "2g.20gb", "placement": 2}, {"profile": "3g.40gb", "placement": 4, "compute": [2, 1]},
    ]);
    let node =
        Node::with(json!({"profile": "h100", "count": 2, "gpus": {"1": {"mig": {"instances": instances}}}}));
    let look = look(&node.nvml()).await;
    assert_eq!(look.gpus.gpus[0].mig, MigMode::Off);
    let found: Vec<_> =
        migs(&look.gpus.gpus[1]).iter().map(|m| (m.profile.as_str(), m.placement.start)).collect();
    let mut sorted = found.clone();
    sorted.sort_unstable();
    assert_eq!(
        sorted,
        [("1c.3g.40gb", 4), ("1g.10gb", 1), ("1g.10gb+me", 0), ("2c.3g.40gb", 4), ("2g.20gb", 2)]
    );
    let names: Vec<_> = look.gpus.devices().into_keys().map(|name| name.to_string()).collect();
    assert!(names.contains(&"gpu-1-mig-1g10gb-me-20-0".to_owned()), "{names:?}");
    assert!(names.contains(&"gpu-1-mig-2g20gb-14-2".to_owned()), "{names:?}");
    let two = migs(&look.gpus.gpus[1]).iter().find(|m| m.profile == "2g.20gb").unwrap();
    assert!(two.uuid.as_str().starts_with("MIG-"));
    assert_eq!((two.profile_id, two.placement.size), (14, 2));
    assert_eq!((two.capacity.memory, two.capacity.multiprocessors), (Bytes::from_mib(20_096), 32));
    assert_eq!((two.capacity.copy_engines, two.capacity.decoders, two.capacity.jpeg_engines), (2, 2, 2));
}

#[tokio::test]
async fn each_compute_instance_of_a_gpu_instance_is_a_device_of_its_own() {
    let instances = json!([{"profile": "2g.20gb", "placement": 0, "compute": [1, 1]},
        {"profile": "3g.40gb", "placement": 4, "compute": [1, 1, 1]}]);
    let node = Node::with(json!({"profile": "h100", "gpus": {"0": {"mig": {"instances": instances}}}}));
    let gpus = look(&node.nvml()).await.gpus;
    let names: Vec<_> = gpus.devices().into_keys().map(|name| name.to_string()).collect();
    let (two, three) = ("gpu-0-mig-1c2g20gb-14-0", "gpu-0-mig-1c3g40gb-9-4");
    let more = [format!("{two}-1"), format!("{three}-1"), format!("{three}-2")];
    assert_eq!(names, [two, &more[0], three, &more[1], &more[2]]);
}

#[tokio::test]
async fn every_profile_has_the_name_of_nvidias_listing() {
    let all = [
        ("a30", "1g.6gb 1g.6gb+me 2g.12gb 2g.12gb+me 4g.24gb"),
        ("a100-40gb", "1g.5gb 1g.5gb+me 1g.10gb 2g.10gb 3g.20gb 4g.20gb 7g.40gb"),
        (
            "rtx-pro-6000",
            "1g.24gb 1g.24gb+me 1g.24gb+gfx 1g.24gb+me.all 1g.24gb-me 2g.48gb 2g.48gb+gfx 2g.48gb+me.all 2g.48gb-me \
             4g.96gb 4g.96gb+gfx",
        ),
        ("a100-80gb", "1g.10gb 1g.10gb+me 1g.20gb 2g.20gb 3g.40gb 4g.40gb 7g.80gb"),
        ("h100", "1g.10gb 1g.10gb+me 1g.20gb 2g.20gb 3g.40gb 4g.40gb 7g.80gb"),
        ("h200", "1g.18gb 1g.18gb+me 1g.35gb 2g.35gb 3g.71gb 4g.71gb 7g.141gb"),
        ("b200", "1g.23gb 1g.23gb+me 1g.45gb 2g.45gb 3g.90gb 4g.90gb 7g.180gb"),
    ];
    for (board, names) in all {
        let node = Node::with(json!({"profile": board}));
        let nvml = node.nvml();
        for name in names.split(' ') {
            let mig = json!({"instances": [{"profile": name}]});
            node.set(json!({"profile": board, "gpus": {"0": {"mig": mig}}}));
            assert_eq!(profiles(&look(&nvml).await.gpus.gpus), [name], "{board}");
        }
    }
}

#[tokio::test]
async fn without_a_library_the_words_say_where_it_was_looked_for() {
    let node = Node::bare();
    let words = node.nvml().look(Load::Keep).await.unwrap_err().to_string();
    for place in ["usr/lib64", "usr/lib/x86_64-linux-gnu", "lib64", "usr/lib/x86_64-linux-gnu/nvidia/current"]
    {
        assert!(words.contains(&format!("{place}, ")), "{words}");
    }
    assert!(words.contains(node.path("root").to_str().unwrap()), "{words}");
    assert!(words.contains("install the NVIDIA driver on the node"), "{words}");
}

#[tokio::test]
async fn a_file_that_is_no_library_is_named() {
    let node = Node::bare();
    fs::write(node.lib64().join("libnvidia-ml.so.1"), "half a download").unwrap();
    let nvml = node.nvml();
    let words = nvml.look(Load::Keep).await.unwrap_err().to_string();
    assert!(words.contains("usr/lib64/libnvidia-ml.so.1 cannot be used as NVML"), "{words}");
    node.set(json!({"profile": "l40s"}));
    node.install("580.159.04");
    assert_eq!(look(&nvml).await.gpus.gpus.len(), 1);
}

#[tokio::test]
async fn a_hanging_call_costs_one_deadline_and_not_the_driver() {
    let node = Node::with(json!({"profile": "l40s"}));
    let nvml = node.nvml_within(Duration::from_secs(2));
    look(&nvml).await;
    node.set(json!({"profile": "l40s", "faults": {"nvmlDeviceGetName": {"delay_ms": 5_000}}}));
    let error = nvml.look(Load::Keep).await.unwrap_err();
    assert!(matches!(error, NvmlError::Timeout { .. }), "{error}");
    assert!(
        error.to_string().starts_with("nvmlDeviceGetName on the GPU with index 0 did not return"),
        "{error}"
    );
    assert_eq!(nvml.stuck_threads(), 1);

    node.set(json!({"profile": "l40s"}));
    assert_eq!(look(&nvml).await.gpus.gpus.len(), 1, "another thread takes over");
    let mut again = tokio::time::interval(Duration::from_millis(20));
    let gone = async {
        while nvml.stuck_threads() > 0 {
            again.tick().await;
        }
    };
    timeout(DEADLINE, gone).await.expect("the thread ends when its call returns");
}

#[tokio::test]
async fn no_more_than_three_threads_are_left_hanging() {
    let faults = json!({"nvmlDeviceGetCount_v2": {"delay_ms": 6_000}});
    let node = Node::with(json!({"profile": "l40s", "faults": faults}));
    let nvml = node.nvml_within(Duration::from_millis(300));
    for stuck in 1..=3 {
        assert!(matches!(nvml.look(Load::Keep).await, Err(NvmlError::Timeout { .. })));
        assert_eq!(nvml.stuck_threads(), stuck);
    }
    let error = nvml.look(Load::Keep).await.unwrap_err();
    assert!(matches!(error, NvmlError::Stuck { threads: 3 }), "{error}");
    node.set(json!({"profile": "l40s"}));
    let mut again = tokio::time::interval(Duration::from_millis(20));
    let recovered = async {
        while nvml.look(Load::Keep).await.is_err() {
            again.tick().await;
        }
    };
    timeout(DEADLINE, recovered).await.expect("it goes on when a thread comes back");
}

#[tokio::test]
async fn one_lost_gpu_does_not_take_the_others_along() {
    let node = Node::with(json!({"profile": "h100", "count": 8}));
    let (mut out, stop) = node.discover(false);
    let before = until(&mut out, |gpus| gpus.len() == 8).await;
    stop.cancel();

    node.set(json!({"profile": "h100", "count": 8, "gpus": {"3": {"lost": true}}}));
    let broken = look(&node.nvml()).await;
    assert_eq!(broken.gpus.gpus.len(), 7);
    assert_eq!(broken.failed[0].index, 3);
    assert!(broken.failed[0].reason.contains("fallen off the bus"), "{}", broken.failed[0].reason);
    assert!(!broken.gpus.gpus.iter().any(|gpu| gpu.uuid == before[3].uuid));
}

#[tokio::test]
async fn a_gpu_that_fails_while_running_stays_listed_and_recovers() {
    let node = Node::with(json!({"profile": "h100", "count": 4}));
    let (mut out, _stop) = node.discover(true);
    until(&mut out, |gpus| gpus.len() == 4).await;
    node.set(json!({"profile": "h100", "count": 4, "gpus": {"3": {"lost": true}}}));
    fs::create_dir_all(node.path("dev")).unwrap();
    fs::write(node.path("dev/nvidia3"), "").unwrap();
    let unhealthy = |gpu: &Gpu| gpu.health != Health::Healthy;
    let broken = until(&mut out, |gpus| gpus.iter().any(unhealthy)).await;
    assert_eq!(broken.iter().map(unhealthy).collect::<Vec<_>>(), [false, false, false, true]);
    node.set(json!({"profile": "h100", "count": 4}));
    until(&mut out, |gpus| gpus.len() == 4 && !gpus.iter().any(unhealthy)).await;
}

#[tokio::test]
async fn an_unloaded_driver_is_found_again_when_it_is_back() {
    let node = Node::with(json!({"profile": "t4", "driver_version": "570.10"}));
    let nvml = node.nvml();
    assert_eq!(look(&nvml).await.gpus.driver.cuda, "12.8");
    node.set(json!({"profile": "t4", "driver_loaded": false}));
    let words = nvml.look(Load::Keep).await.unwrap_err().to_string();
    assert!(words.contains("modprobe nvidia"), "{words}");
    // NVML counts boards at its start: the second one shows that it was started again.
    node.set(json!({"profile": "t4", "count": 2, "driver_version": "580.65"}));
    let back = look(&nvml).await.gpus;
    assert_eq!((back.driver.driver.as_str(), back.gpus.len()), ("580.65", 2));
}

#[tokio::test]
async fn a_driver_that_is_installed_later_is_used_without_a_restart() {
    let node = Node::bare();
    let (mut out, _stop) = node.discover(true);
    let missing = out.inventory.wait_for(|inventory| matches!(inventory, Inventory::Unavailable { .. }));
    timeout(DEADLINE, missing).await.expect("it says that there is no driver").unwrap();
    node.set(json!({"profile": "l40s", "driver_version": "570.10"}));
    node.install("570.10");
    until(&mut out, |gpus| gpus.len() == 1).await;

    // An upgrade: the kernel's driver first, then the library.
    node.set(json!({"profile": "l40s", "count": 2, "driver_version": "580.65"}));
    node.install("580.65");
    until(&mut out, |gpus| gpus.len() == 2).await;
    let inventory = out.inventory.borrow().clone();
    assert!(format!("{inventory:?}").contains("580.65"), "{inventory:?}");
}

#[tokio::test]
async fn another_mig_layout_shows_up_when_device_files_change() {
    let control =
        |profile| json!({"profile": "h100", "gpus": {"0": {"mig": {"instances": [{"profile": profile}]}}}});
    let node = Node::with(control("7g.80gb"));
    fs::create_dir(node.path("dev/nvidia-caps")).unwrap();
    let (mut out, _stop) = node.discover(true);
    until(&mut out, |gpus| profiles(gpus) == ["7g.80gb"]).await;
    node.set(control("3g.40gb"));
    fs::write(node.path("dev/nvidia-caps/nvidia-cap21"), "").unwrap();
    until(&mut out, |gpus| profiles(gpus) == ["3g.40gb"]).await;
}

#[tokio::test]
async fn another_mig_layout_shows_up_when_nvml_tells() {
    let control = |profile: &str, seq: u64| {
        json!({
            "profile": "h100", "gpus": {"0": {"mig": {"instances": [{"profile": profile}]}}},
            "events": [{"seq": seq, "gpu": 0, "kind": "mig-config"}],
        })
    };
    let node = Node::with(control("7g.80gb", 1));
    let (mut out, _stop) = node.discover(false);
    until(&mut out, |gpus| profiles(gpus) == ["7g.80gb"]).await;
    // Whether events are waited for by now cannot be seen from here: told again until it is heard.
    for seq in 2.. {
        assert!(seq < 60, "the new layout is never published");
        node.set(control("2g.20gb", seq));
        let seen =
            out.inventory.wait_for(|i| matches!(i, Inventory::Found(n) if profiles(&n.gpus) == ["2g.20gb"]));
        if timeout(Duration::from_millis(800), seen).await.is_ok() {
            break;
        }
    }
}

#[tokio::test]
async fn an_xid_is_told_with_the_gpu_and_the_mig_device() {
    let node = Node::with(json!({"profile": "h100", "count": 2}));
    let nvml = node.nvml();
    let mut events = nvml.events();
    let gpus = look(&nvml).await.gpus.gpus;
    let heard = async {
        for seq in 1.. {
            let event = json!({"seq": seq, "gpu": 1, "kind": "xid", "value": 79, "gi": 3, "ci": 0});
            node.set(json!({"profile": "h100", "count": 2, "events": [event]}));
            if let Ok(event) = timeout(Duration::from_millis(300), events.recv()).await {
                return event.unwrap();
            }
        }
        unreachable!()
    };
    let event = timeout(DEADLINE, heard).await.expect("the Xid is told");
    let gpu = gpus[1].uuid.clone();
    assert_eq!(event, GpuEvent::Xid { gpu, code: 79, gpu_instance: Some(3), compute_instance: Some(0) });
}

#[tokio::test]
async fn what_an_old_driver_lacks_is_left_out() {
    let missing = ["nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetAddressingMode", "nvmlDeviceGetNumGpuCores"];
    let node = Node::with(json!({"profile": "h100", "missing": missing}));
    let nvml = node.nvml();
    let gpu = look(&nvml).await.gpus.gpus.remove(0);
    assert_eq!(gpu.memory, Memory::Known { total: Bytes::from_mib(81_559), reserved: Bytes(0) });
    assert_eq!((gpu.addressing_mode, gpu.multiprocessors), (None, None));

    let refuse = json!({"return": "NOT_SUPPORTED"});
    let faults = json!({"nvmlDeviceGetMemoryInfo_v2": refuse, "nvmlDeviceGetMemoryInfo": refuse});
    node.set(json!({"profile": "h100", "faults": faults}));
    assert_eq!(look(&nvml).await.gpus.gpus[0].memory, Memory::Unknown);
}

/// As on WSL.
#[tokio::test]
async fn boards_without_minor_numbers_have_nvmls_own() {
    let faults = json!({"nvmlDeviceGetMinorNumber": {"return": "NOT_SUPPORTED"}});
    let node = Node::with(json!({"profile": "l40s", "count": 2, "faults": faults}));
    let look = look(&node.nvml()).await;
    assert_eq!(look.failed.len(), 0, "{:?}", look.failed);
    assert_eq!(look.gpus.gpus.iter().map(|gpu| gpu.minor).collect::<Vec<_>>(), [0, 1]);
}

#[tokio::test]
async fn hostile_texts_stay_texts_and_hostile_uuids_are_refused() {
    let name = format!("\u{1b}[31mevil\n{}", "x".repeat(80));
    let gpus = json!({
        "0": {"name": name}, "1": {"uuid": "GPU-../../etc/passwd"},
        "2": {"uuid": format!("GPU-{}", "0".repeat(70))}, "3": {"uuid": ""},
    });
    let node = Node::with(json!({"profile": "h100", "count": 5, "gpus": gpus}));
    let look = look(&node.nvml()).await;
    assert_eq!(look.gpus.gpus.iter().map(|gpu| gpu.minor).collect::<Vec<_>>(), [0, 4]);
    let name = &look.gpus.gpus[0].product_name;
    assert!(name.len() <= 64 && name.contains("evil") && !name.chars().any(char::is_control), "{name:?}");
    assert_eq!(look.failed.iter().map(|failed| failed.index).collect::<Vec<_>>(), [1, 2, 3]);
    assert!(look.failed[0].reason.contains("GPU-../../etc/passwd"), "{}", look.failed[0].reason);
}

#[tokio::test]
async fn a_call_that_fails_for_a_moment_is_in_the_words() {
    let fault = json!({"nvmlDeviceGetUUID": {"return": "UNKNOWN", "gpu": 1}});
    let node = Node::with(json!({"profile": "a100-80gb", "count": 2, "faults": fault}));
    let look = look(&node.nvml()).await;
    let words = &look.failed[0].reason;
    assert_eq!(words, "nvmlDeviceGetUUID on the GPU with index 1: an internal driver error occurred");
}

#[tokio::test]
async fn a_boards_compute_mode_is_set_read_back_and_its_loss_seen() {
    let node = Node::with(json!({"profile": "h100", "count": 2}));
    let nvml = node.nvml();
    let boards: Vec<_> = look(&nvml).await.gpus.gpus.into_iter().map(|gpu| gpu.uuid).collect();
    assert_eq!(nvml.compute_mode(&boards[1]).await.unwrap(), Some(ComputeMode::Default));
    nvml.set_compute_mode(&boards[1], ComputeMode::ExclusiveProcess).await.unwrap();
    assert_eq!(nvml.compute_mode(&boards[1]).await.unwrap(), Some(ComputeMode::ExclusiveProcess));
    assert_eq!(nvml.compute_mode(&boards[0]).await.unwrap(), Some(ComputeMode::Default), "one board's alone");
    // Somebody else sets it to what we never set.
    node.set(json!({"profile": "h100", "count": 2, "gpus": {"1": {"compute_mode": 2}}}));
    assert_eq!(nvml.compute_mode(&boards[1]).await.unwrap(), None);
    nvml.set_compute_mode(&boards[1], ComputeMode::Default).await.unwrap();
    assert_eq!(nvml.compute_mode(&boards[1]).await.unwrap(), Some(ComputeMode::Default));
    let unknown = nvml.compute_mode(&"GPU-none".into()).await.unwrap_err();
    assert!(matches!(unknown, NvmlError::Nvml { .. }), "{unknown}");
}

fn boards(names: &[&str]) -> Vec<DeviceUuid> {
    names.iter().map(|name| DeviceUuid::from(*name)).collect()
}

/// PID, MiB and whether it is an MPS client.
fn listed(board: &BoardProcesses) -> Vec<(u32, Option<u64>, bool)> {
    let processes = board.processes.as_ref().unwrap();
    processes
        .iter()
        .map(|p| (p.pid, p.used.map(Bytes::mib_floor), p.context == ContextKind::MpsClient))
        .collect()
}

#[tokio::test]
async fn a_process_is_listed_once_whatever_it_does_on_the_board() {
    let processes = json!([
        {"pid": 10, "used_mib": 418}, {"pid": 11, "used_mib": 438, "kind": "mps"},
        {"pid": 12, "used_mib": 438, "kind": "mps"}, {"pid": 13, "used_mib": 7, "kind": "graphics"},
        {"pid": 14, "kind": "compute"},
    ]);
    let gpus = json!({"0": {"uuid": "GPU-0", "processes": processes}, "1": {"uuid": "GPU-1"}});
    let node = Node::with(json!({"profile": "h100", "count": 2, "gpus": gpus}));
    let watch = node.processes(DEADLINE);
    let answer = watch.processes(boards(&["GPU-1", "GPU-0"])).await.unwrap();
    assert_eq!(listed(&answer[0]), []);
    let expected = [
        (10, Some(418), false),
        (11, Some(438), true),
        (12, Some(438), true),
        (13, Some(7), false),
        (14, None, false),
    ];
    assert_eq!(listed(&answer[1]), expected);
}

#[tokio::test]
async fn a_list_that_grew_is_read_again_and_a_failing_board_spoils_no_other() {
    let control = |count: u32, extra: Value| {
        let processes: Vec<Value> = (1..=count).map(|pid| json!({"pid": pid, "used_mib": pid})).collect();
        let mut zero = json!({"uuid": "GPU-0", "processes": processes});
        zero.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        json!({"profile": "h100", "count": 2, "log_calls": true,
               "gpus": {"0": zero, "1": {"uuid": "GPU-1", "processes": [{"pid": 9, "used_mib": 9}]}}})
    };
    let node = Node::with(control(1, json!({})));
    let watch = node.processes(DEADLINE);
    let both = || boards(&["GPU-0", "GPU-1", "GPU-nowhere"]);
    for count in [1, 31, 32, 33, 200, 1000, 3] {
        node.set(control(count, json!({})));
        let answer = watch.processes(both()).await.unwrap();
        assert_eq!(listed(&answer[0]).len(), count as usize);
        assert_eq!(listed(&answer[1]), [(9, Some(9), false)]);
        let words = answer[2].processes.as_ref().unwrap_err().to_string();
        assert!(words.contains("nvmlDeviceGetHandleByUUID"), "{words}");
    }
    assert_eq!(node.calls("nvmlDeviceGetHandleByUUID"), 2 + 7, "handles are kept, but not a missing one's");
    node.set(control(5, json!({"lost": true})));
    let answer = watch.processes(both()).await.unwrap();
    assert!(answer[0].processes.as_ref().unwrap_err().to_string().contains("fallen off the bus"));
    assert_eq!(listed(&answer[1]), [(9, Some(9), false)]);
    node.set(control(5, json!({})));
    assert_eq!(listed(&watch.processes(both()).await.unwrap()[0]).len(), 5, "it is back");
}

#[tokio::test]
async fn an_old_driver_without_mps_or_graphics_lists_still_tells_its_processes() {
    let missing = ["nvmlDeviceGetMPSComputeRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v3"];
    let gpus = json!({"0": {"uuid": "GPU-0", "processes": [{"pid": 10, "used_mib": 418}]}});
    let control = json!({"profile": "t4", "gpus": gpus, "missing": missing});
    let node = Node::with(control.clone());
    let watch = node.processes(DEADLINE);
    let answer = watch.processes(boards(&["GPU-0"])).await.unwrap();
    assert_eq!(listed(&answer[0]), [(10, Some(418), false)]);
    // The driver goes and comes back: the library is started anew.
    let mut unloaded = control.clone();
    unloaded["driver_loaded"] = json!(false);
    node.set(unloaded);
    let words = watch.processes(boards(&["GPU-0"])).await.unwrap_err().to_string();
    assert!(words.contains("modprobe nvidia"), "{words}");
    node.set(control);
    assert_eq!(listed(&watch.processes(boards(&["GPU-0"])).await.unwrap()[0]).len(), 1);
}

#[tokio::test]
async fn process_lists_do_not_wait_for_a_look_and_a_hang_is_told_in_time() {
    let control = |faults: Value| {
        let zero = json!({"uuid": "GPU-0", "processes": [{"pid": 10, "used_mib": 418}]});
        json!({"profile": "h100", "gpus": {"0": zero}, "faults": faults})
    };
    let node = Node::with(control(json!({"nvmlDeviceGetName": {"delay_ms": 5_000}})));
    let (nvml, watch) = (node.nvml(), node.processes(Duration::from_secs(2)));
    let look = tokio::spawn(async move { nvml.look(Load::Keep).await });
    for _ in 0..3 {
        let answer = watch.processes(boards(&["GPU-0"])).await.unwrap();
        assert_eq!(listed(&answer[0]).len(), 1);
    }
    assert!(!look.is_finished(), "the look is still at it");
    node.set(control(json!({"nvmlDeviceGetComputeRunningProcesses_v3": {"delay_ms": 4_000}})));
    let error = watch.processes(boards(&["GPU-0"])).await.unwrap_err();
    assert!(error.to_string().starts_with("nvmlDeviceGetComputeRunningProcesses_v3"), "{error}");
    assert_eq!(watch.stuck_threads(), 1);
    node.set(control(json!({})));
    assert_eq!(listed(&watch.processes(boards(&["GPU-0"])).await.unwrap()[0]).len(), 1);
    timeout(DEADLINE, look).await.unwrap().unwrap().unwrap();
}
