//! A node and its GPUs: the Node object beside the slices of its pool.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::resource::v1::{
    Device, DeviceAttribute, DeviceTaintRule, DeviceTaintSelector, ResourceSlice,
};

use crate::controller::view::claim::GpuRef;
use crate::controller::view::unshared::{TYPE_OF_MIG, UnsharedDevice};
use crate::feasible::Node;
use crate::model::names::{DRIVER, DeviceName, NodeName};
use crate::select::{DeviceFacts, Taint};
use crate::slices::{BoardParts, Grantable};

/// A GPU that shares can be placed on, as its slice tells of it.
#[derive(Debug, Clone, PartialEq)]
pub struct PublishedGpu {
    pub grantable: Grantable,
    /// Keep claims off it that do not tolerate them: those of its slice, then those of rules.
    pub taints: Vec<Taint>,
    /// What selectors see of it.
    pub facts: Arc<DeviceFacts>,
    /// What selectors see of every MIG device that the scheduler may cut off it; none: it cuts nothing off.
    pub parts_facts: Option<Arc<DeviceFacts>>,
}

/// One slice of our driver.
#[derive(Debug, Clone)]
pub struct Slice {
    pub node: NodeName,
    pub generation: i64,
    pub gpus: Vec<Arc<PublishedGpu>>,
    /// Devices beside these that no shares can be placed on; they are kept apart.
    pub unshared: Vec<UnsharedDevice>,
}

/// None: of no node's pool. `like`: facts of some device that was read before; what others have in common with it,
/// and with one another, is kept once.
pub fn slice(object: ResourceSlice, like: &mut Arc<DeviceFacts>) -> Option<Slice> {
    let spec = object.spec;
    let node = NodeName::new(spec.node_name.filter(|node| *node == spec.pool.name)?);
    let devices = spec.devices.unwrap_or_default();
    let (mut gpus, mut unshared) = (Vec::new(), Vec::new());
    for device in &devices {
        match gpu(device, like) {
            Some(gpu) => gpus.push(gpu),
            None => unshared.push(UnsharedDevice::of(device, like)),
        }
    }
    Some(Slice { node, generation: spec.pool.generation, gpus, unshared })
}

/// None: no shares can be placed on it.
fn gpu(device: &Device, like: &mut Arc<DeviceFacts>) -> Option<Arc<PublishedGpu>> {
    let usable = |one: &Grantable| match &one.parts {
        BoardParts::Shares(shares) => shares.memory.mib_floor() > 0 && shares.slots > 0,
        BoardParts::Mig(_) => true,
    };
    let grantable = Grantable::of(device).filter(usable)?;
    let mut facts = DeviceFacts::of(DRIVER, device);
    facts.share(like);
    *like = Arc::new(facts);
    let keeps_counters = matches!(&grantable.parts, BoardParts::Mig(mig) if mig.keeps_counters);
    Some(Arc::new(PublishedGpu {
        parts_facts: keeps_counters.then(|| Arc::new(facts_of_parts(device))),
        grantable,
        taints: device.taints.iter().flatten().filter_map(Taint::of).collect(),
        facts: Arc::clone(like),
    }))
}

/// What a board has in common with each MIG device that is published beside it. Selectors on anything else fail on these
/// facts, and nobody knows what they would choose.
const OF_PARTS: [&str; 7] = [
    "productName",
    "brand",
    "architecture",
    "cudaComputeCapability",
    "driverVersion",
    "cudaDriverVersion",
    "isolation",
];

fn facts_of_parts(board: &Device) -> DeviceFacts {
    let common = board.attributes.iter().flatten().filter(|(name, _)| OF_PARTS.contains(&name.as_str()));
    let mut attributes: BTreeMap<String, DeviceAttribute> =
        common.map(|(name, value)| (name.clone(), value.clone())).collect();
    let of_type = DeviceAttribute { string: Some(TYPE_OF_MIG.to_owned()), ..DeviceAttribute::default() };
    attributes.insert("type".to_owned(), of_type);
    DeviceFacts::of(DRIVER, &Device { attributes: Some(attributes), ..Device::default() })
}

/// A DeviceTaintRule: which devices have the taint. The empty selector means all devices, none at all means none.
#[derive(Debug, Clone, PartialEq)]
pub struct TaintRule {
    devices: Option<DeviceTaintSelector>,
    taint: Option<Taint>,
}

impl TaintRule {
    pub fn of(rule: DeviceTaintRule) -> Self {
        Self { taint: Taint::of(&rule.spec.taint), devices: rule.spec.device_selector }
    }

    /// The taint that it gives a device of the node's pool.
    pub fn taint(&self, node: &NodeName, device: &DeviceName) -> Option<&Taint> {
        let DeviceTaintSelector { driver, pool, device: named } = self.devices.as_ref()?;
        let is = |wanted: &Option<String>, found: &str| wanted.as_ref().is_none_or(|one| one == found);
        let meant = is(driver, DRIVER) && is(pool, node.as_str()) && is(named, device.as_str());
        self.taint.as_ref().filter(|_| meant)
    }
}

/// What is known of a node: either part may be missing.
#[derive(Debug, Clone, Default)]
pub struct NodeState {
    pub object: Option<Arc<Node>>,
    pub gpus: BTreeMap<DeviceName, Arc<PublishedGpu>>,
}

/// The GPUs of a pool, of these slices: those of its newest generation count.
pub fn pool<'a>(
    node: &NodeName,
    slices: impl Iterator<Item = &'a Slice>,
    rules: &BTreeMap<String, TaintRule>,
) -> BTreeMap<DeviceName, Arc<PublishedGpu>> {
    let mut of: Vec<&Slice> = slices.collect();
    let newest = of.iter().map(|slice| slice.generation).max().unwrap_or(0);
    of.retain(|slice| slice.generation == newest);
    let all = of.into_iter().flat_map(|slice| &slice.gpus);
    let mut gpus: BTreeMap<_, Arc<PublishedGpu>> =
        all.map(|gpu| (gpu.grantable.device.clone(), Arc::clone(gpu))).collect();
    for (device, gpu) in &mut gpus {
        let taints: Vec<Taint> =
            rules.values().filter_map(|rule| rule.taint(node, device)).cloned().collect();
        if !taints.is_empty() {
            Arc::make_mut(gpu).taints.extend(taints);
        }
    }
    gpus
}

impl GpuRef {
    pub fn new(node: &NodeName, device: &DeviceName) -> Self {
        Self { node: node.clone(), device: device.clone() }
    }
}
