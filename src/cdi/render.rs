//! From a claim's devices and the driver's files to the CDI file.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::common::{self, VISIBLE_DEVICES};
use super::driver::{DeviceNodeState, DriverFiles, DriverNode, HostPath};
use super::{names, spec};
use crate::model::names::{ClaimUid, DeviceName};

/// One device (or share of one) that was allocated to the claim.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CdiDevice {
    pub name: DeviceName,
    /// Set for shares, from the allocation result.
    pub share_id: Option<String>,
    pub nodes: CdiNodes,
    /// Name and value. `NVIDIA_VISIBLE_DEVICES` is not for callers to set.
    pub env: Vec<(String, String)>,
    pub mounts: Vec<Mount>,
}

/// Which device nodes a device stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum CdiNodes {
    /// `/dev/nvidia<minor>`.
    Whole { minor: u32 },
    /// The board's node and the capability nodes of both instances.
    Mig { parent_minor: u32, gpu_instance: u32, compute_instance: u32 },
}

impl CdiNodes {
    /// The nodes by meaning, the board's first.
    pub fn nodes(&self) -> Vec<DriverNode> {
        match *self {
            Self::Whole { minor } => vec![DriverNode::Gpu { minor }],
            Self::Mig { parent_minor: gpu, gpu_instance: instance, compute_instance: compute } => vec![
                DriverNode::Gpu { minor: gpu },
                DriverNode::GpuInstance { gpu, instance },
                DriverNode::ComputeInstance { gpu, instance, compute },
            ],
        }
    }
}

/// A bind mount that comes with one device, e.g. the directory of its MPS daemon's pipes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mount {
    pub host: HostPath,
    /// Absolute path in the container.
    pub container: String,
    pub access: MountAccess,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum MountAccess {
    ReadOnly,
    ReadWrite,
    /// Written by several tenants: what one puts there no other may load or run, as on a container runtime's own
    /// /dev/shm.
    NoExecute,
}

/// The rendered file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CdiFile {
    /// For the runtime's directory of files that do not outlive a boot, usually /var/run/cdi.
    pub file_name: String,
    /// JSON; the same input gives the same bytes.
    pub content: String,
    /// Qualified CDI ids, in the order of the devices.
    pub ids: Vec<String>,
    /// Everything on the host that the file speaks of. Check that it exists before the file is
    /// written (`host::driver_root::check`): a runtime reports a missing path only when the
    /// container starts, and then over and over.
    pub paths: Vec<HostPath>,
}

/// Why no file was rendered.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CdiError {
    #[error("the claim has no device of this driver: nothing to render")]
    NoDevices,
    #[error(
        "\"{name}\" is not a valid CDI device name: only ASCII letters, digits and _-.: are allowed, a letter \
         or digit at both ends"
    )]
    Name { name: String },
    #[error("device {name} is in the claim twice, and its share ids do not differ")]
    Duplicate { name: String },
    #[error("no device node known for {node}, which device {device} needs: look it up before rendering")]
    Node { node: DriverNode, device: DeviceName },
    #[error("environment variable \"{name}\" of device {device} cannot be set through CDI")]
    Env { name: String, device: DeviceName },
    #[error("mount of {path} for device {device}: both of its paths must be absolute")]
    Mount { path: String, device: DeviceName },
    #[error("the CDI file could not be written as JSON: {why}")]
    Json { why: String },
}

/// Renders the claim's CDI file. Errors: see [`CdiError`]; nothing is half done.
pub fn render(claim: &ClaimUid, devices: &[CdiDevice], driver: &DriverFiles) -> Result<CdiFile, CdiError> {
    if devices.is_empty() {
        return Err(CdiError::NoDevices);
    }
    let mut seen = BTreeSet::new();
    let mut entries = Vec::with_capacity(devices.len());
    for device in devices {
        let name = names::checked(names::local_name(claim, &device.name, device.share_id.as_deref()))?;
        if !seen.insert(name.clone()) {
            return Err(CdiError::Duplicate { name });
        }
        entries.push(spec::Device { name, container_edits: edits(device, driver)? });
    }
    let file = spec::Spec {
        cdi_version: spec::VERSION,
        kind: names::KIND,
        devices: entries,
        container_edits: common::edits(driver),
    };
    let mut content =
        serde_json::to_string_pretty(&file).map_err(|error| CdiError::Json { why: error.to_string() })?;
    content.push('\n');
    Ok(CdiFile {
        file_name: names::file_name(claim),
        content,
        ids: devices.iter().map(|d| names::id(claim, &d.name, d.share_id.as_deref())).collect(),
        paths: paths(devices, driver),
    })
}

fn edits(device: &CdiDevice, driver: &DriverFiles) -> Result<spec::Edits, CdiError> {
    let mut edits = spec::Edits::default();
    for node in device.nodes.nodes() {
        let found = driver.nodes.0.get(&node);
        let found = found.ok_or_else(|| CdiError::Node { node, device: device.name.clone() })?;
        edits.device_nodes.push(common::device_node(found));
    }
    for (name, value) in &device.env {
        if name.is_empty() || name.contains(['=', '\0']) || value.contains('\0') || name == VISIBLE_DEVICES {
            return Err(CdiError::Env { name: name.clone(), device: device.name.clone() });
        }
        edits.env.push(format!("{name}={value}"));
    }
    for mount in &device.mounts {
        edits.mounts.push(mount_edit(mount, &device.name)?);
    }
    Ok(edits)
}

fn mount_edit(mount: &Mount, device: &DeviceName) -> Result<spec::Mount, CdiError> {
    if !mount.host.host.starts_with('/') || !mount.container.starts_with('/') {
        return Err(CdiError::Mount { path: mount.host.host.clone(), device: device.clone() });
    }
    let access: &[&str] = match mount.access {
        MountAccess::ReadOnly => &["ro"],
        MountAccess::ReadWrite => &["rw"],
        MountAccess::NoExecute => &["rw", "noexec"],
    };
    Ok(spec::Mount {
        host_path: mount.host.host.clone(),
        container_path: mount.container.clone(),
        options: [access, &["nosuid", "nodev", "rbind", "rprivate"]].concat(),
    })
}

/// Every host path of the file, once, in path order.
fn paths(devices: &[CdiDevice], driver: &DriverFiles) -> Vec<HostPath> {
    let root = &*driver.root;
    let libraries = root.libraries.iter().map(|library| &library.file);
    let files = libraries.chain(&root.binaries).chain(&root.files).map(|file| &file.host);
    let hook = root.hook.iter().map(|hook| &hook.path);
    let wanted =
        DriverNode::CONTROL.into_iter().chain(devices.iter().flat_map(|device| device.nodes.nodes()));
    let nodes = wanted.filter_map(|node| driver.nodes.0.get(&node));
    let nodes = nodes.filter(|node| node.state == DeviceNodeState::Present).map(|node| &node.host);
    let mounts = devices.iter().flat_map(|device| device.mounts.iter().map(|mount| &mount.host));
    let all: BTreeSet<&HostPath> = files.chain(hook).chain(nodes).chain(mounts).collect();
    all.into_iter().cloned().collect()
}
