//! A node and its GPUs: the Node object beside the slices of its pool.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{Device, ResourceSlice};

use super::claim::GpuRef;
use crate::model::names::{DeviceName, DeviceUuid, NodeName};
use crate::model::quantity::{Bytes, Quantity};
use crate::model::share::Isolation;

/// Effects of taints that keep new claims off a device.
const KEEPS_OFF: [&str; 2] = ["NoSchedule", "NoExecute"];

/// A whole GPU as its slice tells of it.
#[derive(Debug, Clone, PartialEq)]
pub struct Gpu {
    pub uuid: DeviceUuid,
    pub product: String,
    /// What can be granted of it; none: it is only given whole.
    pub shareable: Option<Shareable>,
    /// Why new claims are kept off it.
    pub tainted: Option<String>,
    /// The API server keeps share ids and consumed capacities.
    pub keeps_shares: bool,
    pub device: Arc<Device>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shareable {
    pub memory: Bytes,
    pub slots: u32,
    pub isolation: Isolation,
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
    let gpus = devices.filter_map(|device| Some((DeviceName::new(&device.name), gpu(device)?))).collect();
    Some(Slice { node, generation: spec.pool.generation, gpus })
}

/// None: no whole GPU.
fn gpu(device: Device) -> Option<Gpu> {
    let attribute = |name: &str| device.attributes.as_ref().and_then(|all| all.get(name));
    let text = |name: &str| attribute(name).and_then(|one| one.string.clone());
    if text("type").as_deref() != Some("gpu") {
        return None;
    }
    let capacity = |name: &str| {
        let value = &device.capacity.as_ref()?.get(name)?.value.0;
        value.parse::<Quantity>().ok()?.units_ceil()
    };
    let isolation = text("isolation").unwrap_or_default();
    let isolation = Isolation::ALL.into_iter().find(|rung| rung.as_str() == isolation);
    let shareable = || {
        let slots = u32::try_from(capacity("shares")?).ok()?;
        let memory = Bytes(capacity("memory")?);
        Some(Shareable { memory, slots, isolation: isolation? })
    };
    let mut taints =
        device.taints.iter().flatten().filter(|taint| KEEPS_OFF.contains(&taint.effect.as_str()));
    Some(Gpu {
        uuid: DeviceUuid::new(text("uuid")?),
        product: text("productName").unwrap_or_default(),
        shareable: shareable().filter(|one| one.memory.mib_floor() > 0 && one.slots > 0),
        tainted: taints.next().map(|taint| taint.key.clone()),
        keeps_shares: device.allow_multiple_allocations == Some(true),
        device: Arc::new(device),
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
