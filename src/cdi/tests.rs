//! Rendering, against golden files in tests/data/cdi.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;

use super::*;
use crate::model::names::{ClaimUid, DeviceName};

const UID: &str = "0b7a2d5e-1f5d-4e55-9c43-8f6f3a1f5f10";

fn claim() -> ClaimUid {
    ClaimUid::from(UID)
}

fn host(path: &str) -> HostPath {
    HostPath { inside: PathBuf::from(format!("/driver-root{path}")), host: path.to_owned() }
}

fn file(path: &str, container: &str, kind: FileKind) -> RootFile {
    RootFile { host: host(path), container: container.to_owned(), kind }
}

fn library(name: &str, aliases: &[&str]) -> Library {
    let path = format!("/usr/lib/x86_64-linux-gnu/{name}");
    Library {
        file: file(&path, &path, FileKind::Plain),
        aliases: aliases.iter().map(|a| (*a).to_owned()).collect(),
    }
}

fn root(hook: Option<Hook>) -> RootFiles {
    RootFiles {
        version: "550.163.01".to_owned(),
        arch: Arch::X86_64,
        libraries: vec![
            library("libcuda.so.550.163.01", &["libcuda.so", "libcuda.so.1"]),
            library("libnvidia-ml.so.550.163.01", &[]),
            library("libnvidia-rtcore.so.550.163.01", &[]),
        ],
        binaries: vec![file("/usr/lib/nvidia/current/nvidia-smi", "/usr/bin/nvidia-smi", FileKind::Plain)],
        files: vec![file(
            "/run/nvidia-persistenced/socket",
            "/run/nvidia-persistenced/socket",
            FileKind::Socket,
        )],
        hook,
    }
}

fn node(container: &str, major: u32, minor: u32, state: DeviceNodeState) -> DeviceNode {
    DeviceNode { container: container.to_owned(), host: host(container), major, minor, state }
}

fn nodes() -> DeviceNodes {
    use DeviceNodeState::{KernelOnly, Present};
    let cap = |n| node(&format!("/dev/nvidia-caps/nvidia-cap{n}"), 237, n, KernelOnly);
    DeviceNodes(BTreeMap::from([
        (DriverNode::Control, node("/dev/nvidiactl", 195, 255, Present)),
        (DriverNode::Uvm, node("/dev/nvidia-uvm", 511, 0, Present)),
        (DriverNode::Gpu { minor: 0 }, node("/dev/nvidia0", 195, 0, Present)),
        (DriverNode::Gpu { minor: 3 }, node("/dev/nvidia3", 195, 3, Present)),
        (DriverNode::GpuInstance { gpu: 3, instance: 7 }, cap(30)),
        (DriverNode::ComputeInstance { gpu: 3, instance: 7, compute: 0 }, cap(31)),
    ]))
}

fn driver() -> DriverFiles {
    DriverFiles { root: Arc::new(root(None)), nodes: nodes() }
}

fn with_hook(tool: HookTool, path: &str) -> DriverFiles {
    DriverFiles { root: Arc::new(root(Some(Hook { path: host(path), tool }))), nodes: nodes() }
}

fn whole(minor: u32) -> CdiDevice {
    CdiDevice {
        name: DeviceName::whole(minor),
        share_id: None,
        nodes: CdiNodes::Whole { minor },
        env: Vec::new(),
        mounts: Vec::new(),
    }
}

fn share(id: &str) -> CdiDevice {
    let pipes = Mount {
        host: host("/run/tranche/mps/GPU-1/pipe"),
        container: "/run/nvidia-mps".to_owned(),
        access: MountAccess::ReadWrite,
    };
    CdiDevice {
        share_id: Some(id.to_owned()),
        env: vec![
            ("CUDA_MPS_PIPE_DIRECTORY".to_owned(), "/run/nvidia-mps".to_owned()),
            ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE".to_owned(), "25".to_owned()),
        ],
        mounts: vec![pipes],
        ..whole(0)
    }
}

/// Renders and compares with tests/data/cdi/NAME.json, which the integration test gives to an
/// independent reader of CDI files.
macro_rules! golden {
    ($name:literal, $devices:expr, $driver:expr) => {{
        let expected = include_str!(concat!("../../tests/data/cdi/", $name, ".json"));
        let rendered = render(&claim(), $devices, $driver).unwrap();
        let differs = concat!("tests/data/cdi/", $name, ".json differs; if that is meant, make it");
        assert!(rendered.content == expected, "{differs}:\n{}", rendered.content);
        rendered
    }};
}

fn json(file: &CdiFile) -> serde_json::Value {
    serde_json::from_str(&file.content).unwrap()
}

fn device_paths(file: &CdiFile, device: usize) -> Vec<String> {
    let nodes = json(file)["devices"][device]["containerEdits"]["deviceNodes"].clone();
    nodes.as_array().unwrap().iter().map(|node| node["path"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn a_whole_gpu() {
    let file = golden!("whole-gpu", &[whole(0)], &driver());
    assert_eq!(file.file_name, format!("k8s.gpu.nvidia.com-claim_{UID}.json"));
    assert_eq!(file.ids, [format!("k8s.gpu.nvidia.com/claim={UID}-gpu-0")]);
    assert_eq!(json(&file)["containerEdits"]["env"][0], "NVIDIA_VISIBLE_DEVICES=void");
}

#[test]
fn two_gpus_keep_their_nodes_apart() {
    let file = golden!("two-gpus", &[whole(3), whole(0)], &driver());
    assert_eq!(file.ids.len(), 2);
    assert!(file.ids[0].ends_with("gpu-3"), "ids come in the order of the devices: {:?}", file.ids);
    assert_eq!(device_paths(&file, 0), ["/dev/nvidia3"]);
    assert_eq!(device_paths(&file, 1), ["/dev/nvidia0"]);
    let common = json(&file)["containerEdits"]["deviceNodes"].to_string();
    assert!(!common.contains("/dev/nvidia0") && !common.contains("/dev/nvidia3"), "{common}");
}

#[test]
fn a_mig_device_has_its_boards_node_and_both_capabilities() {
    let mig = CdiDevice {
        name: DeviceName::mig(3, "1g.10gb", 19, 0),
        nodes: CdiNodes::Mig { parent_minor: 3, gpu_instance: 7, compute_instance: 0 },
        ..whole(3)
    };
    let file = golden!("mig", &[mig], &driver());
    let nodes = ["/dev/nvidia3", "/dev/nvidia-caps/nvidia-cap30", "/dev/nvidia-caps/nvidia-cap31"];
    assert_eq!(device_paths(&file, 0), nodes);
    let checked: Vec<_> = file.paths.iter().map(|path| path.host.as_str()).collect();
    assert!(checked.contains(&"/dev/nvidia3"), "{checked:?}");
    assert!(!checked.iter().any(|path| path.contains("caps")), "a node known by number need not exist");
}

#[test]
fn two_shares_of_one_gpu_are_two_devices() {
    let file = golden!("shares", &[share("b2d1"), share("c3e2")], &driver());
    assert_eq!(file.ids.iter().collect::<BTreeSet<_>>().len(), 2);
    assert_eq!(file.ids[0], id(&claim(), &DeviceName::whole(0), Some("b2d1")));
    assert!(file.paths.iter().any(|path| path.host == "/run/tranche/mps/GPU-1/pipe"));
}

#[test]
fn with_the_toolkits_hook_libraries_stay_in_place_and_the_hook_makes_links() {
    let file = golden!("hook", &[whole(0)], &with_hook(HookTool::NvidiaCdiHook, "/usr/bin/nvidia-cdi-hook"));
    let mounts = json(&file)["containerEdits"]["mounts"].to_string();
    assert!(mounts.contains("\"containerPath\":\"/usr/lib/x86_64-linux-gnu/libcuda.so.550.163.01\""));
    assert!(!mounts.contains("/usr/lib64/"), "{mounts}");
    assert!(file.paths.iter().any(|path| path.host == "/usr/bin/nvidia-cdi-hook"));

    let older =
        render(&claim(), &[whole(0)], &with_hook(HookTool::NvidiaCtk, "/usr/bin/nvidia-ctk")).unwrap();
    let hook = json(&older)["containerEdits"]["hooks"][0].clone();
    assert_eq!(hook["args"][1], "hook");
    assert_eq!(hook["args"][2], "create-symlinks");
}

#[test]
fn without_a_hook_libraries_have_loader_names_for_debian_and_rhel_images() {
    let file = render(&claim(), &[whole(0)], &driver()).unwrap();
    let mounts = json(&file)["containerEdits"]["mounts"].clone();
    let paths: BTreeSet<String> =
        mounts.as_array().unwrap().iter().map(|m| m["containerPath"].as_str().unwrap().to_owned()).collect();
    for directory in ["/usr/lib/x86_64-linux-gnu", "/usr/lib64"] {
        // Linked in the root, known without a link, and one that is loaded by its full name.
        for name in ["libcuda.so", "libcuda.so.1", "libnvidia-ml.so.1", "libnvidia-rtcore.so.550.163.01"] {
            assert!(paths.contains(&format!("{directory}/{name}")), "{directory}/{name} not in {paths:?}");
        }
    }
    assert!(json(&file)["containerEdits"].get("hooks").is_none());
}

#[test]
fn a_dev_root_elsewhere_is_named_as_host_path() {
    let mut driver = driver();
    let control = driver.nodes.0.get_mut(&DriverNode::Control).unwrap();
    control.host.host = "/run/nvidia/driver/dev/nvidiactl".to_owned();
    let file = render(&claim(), &[whole(0)], &driver).unwrap();
    let nodes = &json(&file)["containerEdits"]["deviceNodes"];
    assert_eq!(nodes[0]["path"], "/dev/nvidiactl");
    assert_eq!(nodes[0]["hostPath"], "/run/nvidia/driver/dev/nvidiactl");
    assert!(nodes[1].get("hostPath").is_none());
}

#[test]
fn what_cannot_be_rendered_is_refused_with_the_reason() {
    let refused = |devices: &[CdiDevice]| render(&claim(), devices, &driver()).unwrap_err().to_string();
    assert!(refused(&[]).contains("no device"));
    assert!(refused(&[whole(0), whole(0)]).contains("twice"));
    assert!(refused(&[whole(5)]).contains("nvidia5"), "{}", refused(&[whole(5)]));

    let named = |name: &str| CdiDevice { name: DeviceName::from(name), ..whole(0) };
    assert!(refused(&[named("../../etc/passwd")]).contains("not a valid CDI device name"));
    assert!(refused(&[named("gpu-0-")]).contains("not a valid CDI device name"));

    let env =
        |name: &str, value: &str| CdiDevice { env: vec![(name.to_owned(), value.to_owned())], ..whole(0) };
    for (name, value) in [("", "x"), ("A=B", "x"), ("A", "x\0y"), ("NVIDIA_VISIBLE_DEVICES", "all")] {
        assert!(refused(&[env(name, value)]).contains("cannot be set"), "{name:?}={value:?}");
    }
    let mount = Mount { host: host("relative"), container: "/x".to_owned(), access: MountAccess::ReadOnly };
    assert!(refused(&[CdiDevice { mounts: vec![mount], ..whole(0) }]).contains("absolute"));
}

#[test]
fn the_same_input_gives_the_same_bytes() {
    let once = render(&claim(), &[share("b2d1"), whole(3)], &driver()).unwrap();
    assert_eq!(once, render(&claim(), &[share("b2d1"), whole(3)], &driver()).unwrap());
}
