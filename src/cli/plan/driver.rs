//! The driver's files: looked for where they are, or stood in for.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::DriverArgs;
use crate::cdi::{
    Arch, CdiNodes, DeviceNode, DeviceNodeState, DeviceNodes, DriverFiles, DriverNode, HostPath, RootFiles,
};
use crate::host::driver_root::{DriverError, DriverRootCache};
use crate::node::config::Roots;

/// What is missing from a CDI file that was made with [`stand_in`].
pub const STAND_IN: &str = "The driver's files were not looked for, so the CDI file lacks libraries and \
                            programs, and its device nodes are assumed: give --driver-root to find them.";

/// What the node plugin would find; `None` without a driver root.
pub fn found(
    args: &DriverArgs,
    version: &str,
    wanted: &[CdiNodes],
) -> Result<Option<DriverFiles>, DriverError> {
    let Some(driver_root) = args.driver_root.clone() else { return Ok(None) };
    let roots = Roots {
        driver: driver_root.into(),
        toolkit_root: args.toolkit_root.clone(),
        toolkit_dir: args.toolkit_dir.clone(),
        driver_root_on_host: args.driver_root_on_host.clone(),
        dev_root: args.dev_root.clone(),
    };
    let version = (!version.is_empty()).then_some(version);
    let root = DriverRootCache::new(crate::node::driver_root(&roots, &args.proc_root));
    root.files(version, wanted).map(Some)
}

/// A driver without files, whose device nodes are all there under their usual names.
pub fn stand_in(version: &str, wanted: &[CdiNodes]) -> DriverFiles {
    let nodes = DriverNode::CONTROL.into_iter().chain(wanted.iter().flat_map(CdiNodes::nodes));
    let nodes: BTreeMap<_, _> = nodes.map(|node| (node, present(node))).collect();
    let root = RootFiles {
        version: version.to_owned(),
        arch: if cfg!(target_arch = "aarch64") { Arch::Aarch64 } else { Arch::X86_64 },
        libraries: Vec::new(),
        binaries: Vec::new(),
        files: Vec::new(),
        hook: None,
    };
    DriverFiles { root: Arc::new(root), nodes: DeviceNodes(nodes) }
}

fn present(node: DriverNode) -> DeviceNode {
    let path = match node {
        // The kernel alone knows the number behind nvidia-cap.
        DriverNode::GpuInstance { gpu, instance } => {
            format!("/dev/nvidia-caps/nvidia-cap-of-gpu{gpu}-gi{instance}")
        }
        DriverNode::ComputeInstance { gpu, instance, compute } => {
            format!("/dev/nvidia-caps/nvidia-cap-of-gpu{gpu}-gi{instance}-ci{compute}")
        }
        plain => format!("/dev/{plain}"),
    };
    let host = HostPath { inside: path.clone().into(), host: path.clone() };
    // A node that is present is written by its path; its numbers are the runtime's to find.
    DeviceNode { container: path, host, major: 0, minor: 0, state: DeviceNodeState::Present }
}
