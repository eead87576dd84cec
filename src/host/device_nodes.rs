//! Device nodes below the dev root, and the kernel's word on them below the proc root.
//!
//! The kernel tells majors in `<proc>/devices` and the minors of MIG capability nodes in
//! `<proc>/driver/nvidia/capabilities/gpu<minor>/mig/gi<n>[/ci<m>]/access` (`DeviceFileMinor: <n>`),
//! with `<proc>/driver/nvidia-caps/mig-minors` (`gpu0/gi1/ci0/access 13`) as the second source
//! (NVIDIA's MIG user guide, "Device Nodes and Capabilities"). A simulated node puts files of the same
//! shape below a directory of its own and names that as the proc root.
//!
//! WSL has one node for all GPUs, `/dev/dxg`, and none of NVIDIA's.
//!
//! Nodes that the driver makes lazily may be absent: where the kernel tells their numbers, the
//! container gets them by number. `nvidiactl` and the boards' nodes are required, by node or number.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use nix::sys::stat::{major, minor};

use super::driver_root::{Looker, RootView};
use crate::cdi::{CdiNodes, DeviceNode, DeviceNodeState, DeviceNodes, DriverNode};

/// The root that has the `dev` directory with NVIDIA's nodes, and the proc file system.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DevRoot {
    pub view: RootView,
    /// Usually `/proc`.
    pub proc: PathBuf,
}

/// Why a device node cannot be told.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    #[error(
        "{host} does not exist, and the kernel lists no NVIDIA device in {}: load the nvidia kernel module (nvidia-modprobe does it) or correct the dev root",
        devices.display()
    )]
    Missing { host: String, devices: PathBuf },
    #[error("{host} is not a character device: remove it and let nvidia-modprobe make it")]
    NotADevice { host: String },
    #[error(
        "no number for {node} below {}: the MIG instance is gone, or the proc root is not the driver's",
        proc.display()
    )]
    Capability { node: DriverNode, proc: PathBuf },
    #[error("{} says \"{text}\" where a device number was expected", path.display())]
    Malformed { path: PathBuf, text: String },
    #[error("cannot read {}", path.display())]
    Read { path: PathBuf, source: io::Error },
}

/// Majors and minors, fixed by the driver.
pub const NVIDIA_MAJOR: u32 = 195;
const CONTROL_MINOR: u32 = 255;
const MODESET_MINOR: u32 = 254;

/// The control nodes and the nodes of the devices asked for. Blocks on a few file calls.
pub fn look(root: &DevRoot, wanted: &[CdiNodes]) -> Result<DeviceNodes, NodeError> {
    let look = Looker::new(&root.view);
    let kernel = Kernel::read(&root.proc)?;
    if let Some(dxg) = dxg(&look, &kernel)? {
        let boards =
            wanted.iter().flat_map(CdiNodes::nodes).filter(|node| matches!(node, DriverNode::Gpu { .. }));
        return Ok(DeviceNodes(boards.map(|node| (node, dxg.clone())).collect()));
    }
    let mut nodes = BTreeMap::new();
    for node in DriverNode::CONTROL.into_iter().chain(wanted.iter().flat_map(CdiNodes::nodes)) {
        let (name, numbers) = kernel.place(node)?;
        match find(&look, &format!("dev/{name}"), numbers)? {
            Some(found) => drop(nodes.insert(node, found)),
            None if matches!(node, DriverNode::Uvm | DriverNode::UvmTools | DriverNode::Modeset) => {}
            None => {
                let host = format!("{}/dev/{name}", root.view.outside.trim_end_matches('/'));
                return Err(NodeError::Missing { host, devices: root.proc.join("devices") });
            }
        }
    }
    Ok(DeviceNodes(nodes))
}

/// WSL's way to all of its GPUs, where the kernel has none of NVIDIA's own devices.
fn dxg(look: &Looker<'_>, kernel: &Kernel<'_>) -> Result<Option<DeviceNode>, NodeError> {
    if kernel.has_boards() || look.resolve("dev/nvidiactl").is_some() {
        return Ok(None);
    }
    find(look, "dev/dxg", None)
}

/// One node: from the file if there is one whose numbers the kernel does not contradict, else from
/// the kernel, else none.
fn find(look: &Looker<'_>, place: &str, kernel: Option<(u32, u32)>) -> Result<Option<DeviceNode>, NodeError> {
    let container = format!("/{place}");
    let path = look.resolve(place);
    let Some(host) = look.view.host_path(path.as_deref().unwrap_or(Path::new(place))) else {
        return Ok(None);
    };
    let numbers = match &path {
        None => None,
        Some(_) => Some(numbers(&host.inside, &host.host)?),
    };
    Ok(match (numbers, kernel) {
        (Some((major, minor)), kernel) if kernel.is_none_or(|known| known == (major, minor)) => {
            Some(DeviceNode { container, host, major, minor, state: DeviceNodeState::Present })
        }
        (_, Some((major, minor))) => {
            Some(DeviceNode { container, host, major, minor, state: DeviceNodeState::KernelOnly })
        }
        (_, None) => None,
    })
}

fn numbers(path: &Path, host: &str) -> Result<(u32, u32), NodeError> {
    let meta =
        fs::symlink_metadata(path).map_err(|source| NodeError::Read { path: path.to_owned(), source })?;
    if !meta.file_type().is_char_device() {
        return Err(NodeError::NotADevice { host: host.to_owned() });
    }
    let part = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
    Ok((part(major(meta.rdev())), part(minor(meta.rdev()))))
}

/// What the proc root tells.
struct Kernel<'a> {
    proc: &'a Path,
    /// Character devices: name to major.
    majors: BTreeMap<String, u32>,
}

impl<'a> Kernel<'a> {
    /// A missing `devices` file is no error: then only nodes that exist count.
    fn read(proc: &'a Path) -> Result<Self, NodeError> {
        let text = read(&proc.join("devices"))?.unwrap_or_default();
        let characters = text.lines().take_while(|line| !line.starts_with("Block devices"));
        let pairs = characters.filter_map(|line| line.trim().split_once(' '));
        let majors = pairs.filter_map(|(major, name)| Some((name.trim().to_owned(), major.parse().ok()?)));
        Ok(Self { proc, majors: majors.collect() })
    }

    /// The node's path below `/dev`, and its numbers where the kernel tells them.
    fn place(&self, node: DriverNode) -> Result<(String, Option<(u32, u32)>), NodeError> {
        let board = |minor| self.has_boards().then_some((NVIDIA_MAJOR, minor));
        let uvm = |minor| self.majors.get("nvidia-uvm").map(|major| (*major, minor));
        Ok(match node {
            DriverNode::Control => ("nvidiactl".to_owned(), board(CONTROL_MINOR)),
            DriverNode::Modeset => (
                "nvidia-modeset".to_owned(),
                self.majors.contains_key("nvidia-modeset").then_some((NVIDIA_MAJOR, MODESET_MINOR)),
            ),
            DriverNode::Uvm => ("nvidia-uvm".to_owned(), uvm(0)),
            DriverNode::UvmTools => ("nvidia-uvm-tools".to_owned(), uvm(1)),
            DriverNode::Gpu { minor } => (format!("nvidia{minor}"), board(minor)),
            DriverNode::GpuInstance { .. } | DriverNode::ComputeInstance { .. } => {
                let minor = self.capability(node)?;
                let major = self.majors.get("nvidia-caps");
                (format!("nvidia-caps/nvidia-cap{minor}"), major.map(|major| (*major, minor)))
            }
        })
    }

    /// Older drivers list one name for the major, newer ones one per kind of node.
    fn has_boards(&self) -> bool {
        self.majors.iter().any(|(name, major)| *major == NVIDIA_MAJOR && name.starts_with("nvidia"))
    }

    /// The minor number of a MIG capability.
    fn capability(&self, node: DriverNode) -> Result<u32, NodeError> {
        let (file, entry) = match node {
            DriverNode::GpuInstance { gpu, instance } => {
                (format!("gpu{gpu}/mig/gi{instance}/access"), format!("gpu{gpu}/gi{instance}/access"))
            }
            DriverNode::ComputeInstance { gpu, instance, compute } => (
                format!("gpu{gpu}/mig/gi{instance}/ci{compute}/access"),
                format!("gpu{gpu}/gi{instance}/ci{compute}/access"),
            ),
            _ => return Err(NodeError::Capability { node, proc: self.proc.to_owned() }),
        };
        let access = self.proc.join("driver/nvidia/capabilities").join(file);
        if let Some(text) = read(&access)? {
            let value = text.lines().find_map(|line| line.strip_prefix("DeviceFileMinor:"));
            return number(&access, value.unwrap_or(&text));
        }
        let table = self.proc.join("driver/nvidia-caps/mig-minors");
        let text = read(&table)?.unwrap_or_default();
        let value =
            text.lines().find_map(|line| line.strip_prefix(&entry).filter(|rest| rest.starts_with(' ')));
        let missing = || NodeError::Capability { node, proc: self.proc.to_owned() };
        value.ok_or_else(missing).and_then(|value| number(&table, value))
    }
}

fn number(path: &Path, text: &str) -> Result<u32, NodeError> {
    let malformed =
        |_| NodeError::Malformed { path: path.to_owned(), text: text.trim().chars().take(80).collect() };
    text.trim().parse().map_err(malformed)
}

/// A file's text; None if there is no such file.
fn read(path: &Path) -> Result<Option<String>, NodeError> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(NodeError::Read { path: path.to_owned(), source }),
    }
}

#[cfg(test)]
#[path = "device_nodes/tests.rs"]
mod tests;
