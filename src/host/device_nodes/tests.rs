//! Device nodes of a synthetic dev root and proc root.

use nix::sys::stat::{Mode, SFlag, makedev, mknod};

use super::*;

const DEVICES: &str = "Character devices:
  1 mem
195 nvidia
195 nvidiactl
195 nvidia-modeset
237 nvidia-caps
511 nvidia-uvm

Block devices:
195 nvidia-uvm
";

fn put(root: &Path, place: &str, text: &str) {
    let path = root.join(place);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

fn dev_root(dir: &tempfile::TempDir) -> DevRoot {
    DevRoot { view: RootView::new(dir.path(), "/run/nvidia/driver"), proc: dir.path().join("proc") }
}

/// A node that the kernel has loaded the driver on, and nothing has made device nodes.
fn fresh() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    put(dir.path(), "proc/devices", DEVICES);
    let capabilities = "proc/driver/nvidia/capabilities/gpu2/mig/gi7";
    let access = |minor| format!("DeviceFileMinor: {minor}\nDeviceFileMode: 292\nDeviceFileModify: 1\n");
    put(dir.path(), &format!("{capabilities}/access"), &access(30));
    put(dir.path(), &format!("{capabilities}/ci0/access"), &access(31));
    dir
}

fn make_node(dir: &tempfile::TempDir, place: &str, major: u64, minor: u64) {
    let path = dir.path().join(place);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    mknod(&path, SFlag::S_IFCHR, Mode::from_bits_truncate(0o600), makedev(major, minor)).unwrap();
}

fn summary(nodes: &DeviceNodes, node: DriverNode) -> Option<(&str, u32, u32, DeviceNodeState)> {
    nodes.0.get(&node).map(|found| (found.container.as_str(), found.major, found.minor, found.state))
}

const WHOLE: CdiNodes = CdiNodes::Whole { minor: 2 };
const MIG: CdiNodes = CdiNodes::Mig { parent_minor: 2, gpu_instance: 7, compute_instance: 0 };

#[test]
fn a_fresh_node_gives_the_kernels_numbers() {
    let dir = fresh();
    let nodes = look(&dev_root(&dir), &[WHOLE, MIG]).unwrap();
    let kernel = |path, major, minor| Some((path, major, minor, DeviceNodeState::KernelOnly));
    assert_eq!(summary(&nodes, DriverNode::Control), kernel("/dev/nvidiactl", 195, 255));
    assert_eq!(summary(&nodes, DriverNode::Uvm), kernel("/dev/nvidia-uvm", 511, 0));
    assert_eq!(summary(&nodes, DriverNode::UvmTools), kernel("/dev/nvidia-uvm-tools", 511, 1));
    assert_eq!(summary(&nodes, DriverNode::Modeset), kernel("/dev/nvidia-modeset", 195, 254));
    assert_eq!(summary(&nodes, DriverNode::Gpu { minor: 2 }), kernel("/dev/nvidia2", 195, 2));
    let gpu_instance = DriverNode::GpuInstance { gpu: 2, instance: 7 };
    assert_eq!(summary(&nodes, gpu_instance), kernel("/dev/nvidia-caps/nvidia-cap30", 237, 30));
    let compute_instance = DriverNode::ComputeInstance { gpu: 2, instance: 7, compute: 0 };
    assert_eq!(summary(&nodes, compute_instance), kernel("/dev/nvidia-caps/nvidia-cap31", 237, 31));
}

#[test]
fn capabilities_come_from_the_table_where_there_are_no_access_files() {
    let dir = tempfile::tempdir().unwrap();
    put(dir.path(), "proc/devices", DEVICES);
    let table = "config 1\nmonitor 2\ngpu2/gi7/access 66\ngpu2/gi7/ci0/access 67\ngpu2/gi71/access 99\n";
    put(dir.path(), "proc/driver/nvidia-caps/mig-minors", table);
    let nodes = look(&dev_root(&dir), &[MIG]).unwrap();
    assert_eq!(nodes.0[&DriverNode::GpuInstance { gpu: 2, instance: 7 }].minor, 66);
    assert_eq!(nodes.0[&DriverNode::ComputeInstance { gpu: 2, instance: 7, compute: 0 }].minor, 67);
}

#[test]
#[ignore = "needs CAP_MKNOD"]
fn existing_nodes_are_used_and_absent_optional_ones_left_out() {
    let dir = tempfile::tempdir().unwrap();
    make_node(&dir, "dev/nvidiactl", 195, 255);
    make_node(&dir, "dev/nvidia2", 195, 2);
    let nodes = look(&dev_root(&dir), &[WHOLE]).unwrap();
    assert_eq!(nodes.0.len(), 2);
    let board = &nodes.0[&DriverNode::Gpu { minor: 2 }];
    assert_eq!(board.state, DeviceNodeState::Present);
    assert_eq!(board.host.host, "/run/nvidia/driver/dev/nvidia2");
    assert_eq!(board.host.inside, dir.path().join("dev/nvidia2"));
}

#[test]
#[ignore = "needs CAP_MKNOD"]
fn a_node_with_another_major_than_the_kernels_is_not_trusted() {
    let dir = fresh();
    make_node(&dir, "dev/nvidia-uvm", 510, 0);
    let nodes = look(&dev_root(&dir), &[]).unwrap();
    assert_eq!(
        summary(&nodes, DriverNode::Uvm),
        Some(("/dev/nvidia-uvm", 511, 0, DeviceNodeState::KernelOnly))
    );
}

#[test]
fn what_is_missing_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let error = look(&dev_root(&dir), &[WHOLE]).unwrap_err().to_string();
    assert!(error.contains("/run/nvidia/driver/dev/nvidiactl") && error.contains("kernel module"), "{error}");

    let dir = fresh();
    let gone = CdiNodes::Mig { parent_minor: 2, gpu_instance: 9, compute_instance: 0 };
    let error = look(&dev_root(&dir), &[gone]).unwrap_err().to_string();
    assert!(error.contains("GPU instance 9"), "{error}");

    put(dir.path(), "proc/driver/nvidia/capabilities/gpu2/mig/gi7/access", "DeviceFileMinor: many\n");
    let error = look(&dev_root(&dir), &[MIG]).unwrap_err().to_string();
    assert!(error.contains("\"many\""), "{error}");

    put(dir.path(), "dev/nvidiactl", "");
    let error = look(&dev_root(&dir), &[]).unwrap_err().to_string();
    assert!(error.contains("not a character device"), "{error}");
}

#[test]
#[ignore = "needs CAP_MKNOD"]
fn wsl_has_one_node_for_all_gpus() {
    let dir = tempfile::tempdir().unwrap();
    make_node(&dir, "dev/dxg", 10, 63);
    let nodes = look(&dev_root(&dir), &[WHOLE, CdiNodes::Whole { minor: 0 }]).unwrap();
    let dxg = Some(("/dev/dxg", 10, 63, DeviceNodeState::Present));
    assert_eq!(summary(&nodes, DriverNode::Gpu { minor: 2 }), dxg);
    assert_eq!(summary(&nodes, DriverNode::Gpu { minor: 0 }), dxg);
    assert_eq!(nodes.0.len(), 2, "none of NVIDIA's");
    // Where NVIDIA's own nodes are there, they count.
    put(dir.path(), "proc/devices", DEVICES);
    let nodes = look(&dev_root(&dir), &[WHOLE]).unwrap();
    assert_eq!(
        summary(&nodes, DriverNode::Gpu { minor: 2 }),
        Some(("/dev/nvidia2", 195, 2, DeviceNodeState::KernelOnly))
    );
}
