//! A node and its GPUs: the Node object beside the slices of its pool.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{Device, ResourceSlice};

use super::claim::GpuRef;
use crate::model::names::{DRIVER, DeviceName, NodeName};
use crate::select::DeviceFacts;
use crate::slices::Grantable;

/// Effects of taints that keep new claims off a device.
const KEEPS_OFF: [&str; 2] = ["NoSchedule", "NoExecute"];

/// A GPU that shares can be placed on, as its slice tells of it.
#[derive(Debug, Clone, PartialEq)]
pub struct Gpu {
    pub grantable: Grantable,
    /// Why new claims are kept off it.
    pub tainted: Option<String>,
    /// What selectors see of it.
    pub facts: Arc<DeviceFacts>,
}

/// One slice of our driver.
#[derive(Debug, Clone)]
pub struct Slice {
    pub node: NodeName,
    pub generation: i64,
    pub gpus: BTreeMap<DeviceName, Gpu>,
}

/// None: of no node's pool.
pub fn slice(object: ResourceSlice) -> Option<Slice> {
    let spec = object.spec;
    let node = NodeName::new(spec.node_name.filter(|node| *node == spec.pool.name)?);
    let devices = spec.devices.into_iter().flatten();
    let gpus = devices.filter_map(|device| Some((DeviceName::new(&device.name), gpu(&device)?))).collect();
    Some(Slice { node, generation: spec.pool.generation, gpus })
}

/// None: no shares can be placed on it.
fn gpu(device: &Device) -> Option<Gpu> {
    let mut taints =
        device.taints.iter().flatten().filter(|taint| KEEPS_OFF.contains(&taint.effect.as_str()));
    let grantable = Grantable::of(device).filter(|one| one.memory.mib_floor() > 0 && one.slots > 0)?;
    Some(Gpu {
        grantable,
        tainted: taints.next().map(|taint| taint.key.clone()),
        facts: Arc::new(DeviceFacts::of(DRIVER, device)),
    })
}

/// What is known of a node: either part may be missing.
#[derive(Debug, Clone, Default)]
pub struct NodeState {
    /// Without what takes room and tells nothing here.
    pub object: Option<Arc<Node>>,
    pub gpus: BTreeMap<DeviceName, Gpu>,
}

pub fn reduced(mut node: Node) -> Arc<Node> {
    node.metadata.managed_fields = None;
    node.metadata.annotations = None;
    if let Some(status) = &mut node.status {
        status.images = None;
        status.volumes_attached = None;
        status.volumes_in_use = None;
        // A heartbeat is no news.
        for condition in status.conditions.iter_mut().flatten() {
            condition.last_heartbeat_time = None;
        }
    }
    Arc::new(node)
}

/// The GPUs of a pool: slices of its newest generation count.
pub fn pool<'a>(node: &NodeName, slices: impl Iterator<Item = &'a Slice>) -> BTreeMap<DeviceName, Gpu> {
    let mut of: Vec<&Slice> = slices.filter(|slice| slice.node == *node).collect();
    let newest = of.iter().map(|slice| slice.generation).max().unwrap_or(0);
    of.retain(|slice| slice.generation == newest);
    of.into_iter().flat_map(|slice| slice.gpus.clone()).collect()
}

impl GpuRef {
    pub fn new(node: &NodeName, device: &DeviceName) -> Self {
        Self { node: node.clone(), device: device.clone() }
    }
}
