//! What explanations need of the cluster that the controller does not keep: every device of our driver, whole objects of the
//! namespace that is asked about, resources that kube-scheduler alone counts, quotas, and what the caller may not see.
//! Fed with the same changes as the core.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Pod, ResourceQuota};
use k8s_openapi::api::resource::v1::{
    Device as ApiDevice, DeviceClass, DeviceRequestAllocationResult, ResourceClaim, ResourceSlice,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as ApiQuantity;

use crate::cluster::Denied;
use crate::cluster::feed::{Change, WatchEvent};
use crate::controller::view::class::{self, OtherClass};
use crate::controller::view::{GpuRef, TaintRule};
use crate::feasible::{self, Demands, Node, Resources, Unfit};
use crate::model::names::{DRIVER, DeviceName, HOLD_LABEL, NodeName, PoolName};
use crate::model::quantity::{Bytes, Quantity};
use crate::select::{DeviceFacts, Taint};

const MEMORY: &str = "memory";
const COMPUTE: &str = "compute";

/// One device of our driver, as its slice has it.
#[derive(Debug, Clone)]
pub struct ListedDevice {
    pub facts: DeviceFacts,
    pub taints: Vec<Taint>,
    /// May be given to several claims, each with a part of each capacity.
    pub multiple: bool,
    pub capacity: BTreeMap<String, Capacity>,
}

/// In whole units.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacity {
    pub value: u64,
    /// What a request takes that does not say.
    pub default: u64,
}

/// A device that a claim has, or a part of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeldDevicePart {
    pub namespace: String,
    pub claim: String,
    /// The claim is one with which the controller keeps the GPU for shares.
    pub is_hold: bool,
    /// None: all of the device.
    pub consumed: Option<BTreeMap<String, u64>>,
}

/// What bound pods take of a node.
#[derive(Debug, Clone, Default)]
struct Taken {
    room: Resources,
    others: BTreeMap<String, u64>,
}

/// What a node lacks for a pod, of resources that no GPU is chosen by.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lack {
    pub resource: String,
    pub needed: u64,
    pub left: u64,
}

impl std::fmt::Display for Lack {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: needs {}, {} left", self.resource, self.needed, self.left)
    }
}

/// Of one pool the slices, by name.
type Slices = BTreeMap<String, (i64, BTreeMap<DeviceName, ListedDevice>)>;

#[derive(Debug, Default)]
pub struct Listing {
    /// Of which objects are kept.
    namespace: String,
    pods: BTreeMap<String, Pod>,
    claims: BTreeMap<String, ResourceClaim>,
    pools: BTreeMap<NodeName, Slices>,
    rules: Vec<TaintRule>,
    classes: BTreeMap<String, OtherClass>,
    given: BTreeMap<GpuRef, Vec<HeldDevicePart>>,
    taken: BTreeMap<NodeName, Taken>,
    quotas: Vec<ResourceQuota>,
    denied: Vec<Denied>,
}

impl Listing {
    pub fn new(namespace: &str) -> Self {
        Self { namespace: namespace.to_owned(), ..Self::default() }
    }

    /// Takes in what a list names. Each object comes once: what is deleted or changed later is not followed.
    pub fn see(&mut self, change: &Change) {
        match change {
            Change::Pod(WatchEvent::Listed(pod) | WatchEvent::Stored(pod)) => self.see_pod(pod),
            Change::Claim(WatchEvent::Listed(claim) | WatchEvent::Stored(claim)) => self.see_claim(claim),
            Change::Slice(WatchEvent::Listed(slice) | WatchEvent::Stored(slice)) => self.see_slice(slice),
            Change::Class(WatchEvent::Listed(class) | WatchEvent::Stored(class)) => self.see_class(class),
            Change::TaintRule(WatchEvent::Listed(rule) | WatchEvent::Stored(rule)) => {
                self.rules.push(TaintRule::of((**rule).clone()));
            }
            _ => {}
        }
    }

    fn see_pod(&mut self, pod: &Pod) {
        let node =
            pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).filter(|name| !name.is_empty());
        if let (Some(node), Some(spec)) = (node, &pod.spec) {
            let taken = self.taken.entry(NodeName::new(node)).or_default();
            taken.room = taken.room.plus(feasible::taken(pod));
            for (name, units) in feasible::other_requests(spec) {
                let sum = taken.others.entry(name).or_default();
                *sum = sum.saturating_add(units);
            }
        }
        let meta = &pod.metadata;
        if let (Some(name), true) = (&meta.name, meta.namespace.as_ref() == Some(&self.namespace)) {
            self.pods.insert(name.clone(), pod.clone());
        }
    }

    fn see_claim(&mut self, claim: &ResourceClaim) {
        let meta = &claim.metadata;
        let (namespace, name) =
            (meta.namespace.clone().unwrap_or_default(), meta.name.clone().unwrap_or_default());
        let is_hold =
            meta.labels.as_ref().and_then(|all| all.get(HOLD_LABEL)).is_some_and(|one| one == "true");
        let allocation = claim.status.as_ref().and_then(|status| status.allocation.as_ref());
        let results = allocation.and_then(|allocation| allocation.devices.as_ref());
        for result in results.iter().flat_map(|devices| devices.results.iter().flatten()) {
            if result.driver != DRIVER || result.admin_access == Some(true) {
                continue;
            }
            let gpu = GpuRef::new(PoolName::new(&result.pool).node(), &DeviceName::new(&result.device));
            let (namespace, claim) = (namespace.clone(), name.clone());
            let given = HeldDevicePart { namespace, claim, is_hold, consumed: consumed(result) };
            self.given.entry(gpu).or_default().push(given);
        }
        if namespace == self.namespace {
            self.claims.insert(name, claim.clone());
        }
    }

    fn see_slice(&mut self, slice: &ResourceSlice) {
        let spec = &slice.spec;
        let Some(node) = spec.node_name.as_ref().filter(|node| **node == spec.pool.name) else { return };
        let name = |device: &ApiDevice| DeviceName::new(&device.name);
        let devices = spec.devices.iter().flatten().map(|one| (name(one), device(one))).collect();
        let slices = self.pools.entry(NodeName::new(node)).or_default();
        slices.insert(slice.metadata.name.clone().unwrap_or_default(), (spec.pool.generation, devices));
    }

    fn see_class(&mut self, class: &DeviceClass) {
        self.classes.insert(class.metadata.name.clone().unwrap_or_default(), OtherClass::of(class));
    }

    pub fn set_quotas(&mut self, quotas: Vec<ResourceQuota>) {
        self.quotas = quotas;
    }

    pub fn quotas(&self) -> &[ResourceQuota] {
        &self.quotas
    }

    /// Kinds that the caller may not list in the whole cluster.
    pub fn deny(&mut self, kinds: Vec<Denied>) {
        self.denied = kinds;
    }

    pub fn denied(&self) -> &[Denied] {
        &self.denied
    }

    /// A pod of the namespace that is asked about.
    pub fn pod(&self, name: &str) -> Option<&Pod> {
        self.pods.get(name)
    }

    pub fn pods(&self) -> impl Iterator<Item = &Pod> {
        self.pods.values()
    }

    /// A claim of that namespace.
    pub fn claim(&self, name: &str) -> Option<&ResourceClaim> {
        self.claims.get(name)
    }

    pub fn classes(&self) -> &BTreeMap<String, OtherClass> {
        &self.classes
    }

    /// What a pod's limits are the devices of, by name of the resource: the class, and how many. Where the caller may not
    /// see classes, any extended resource may be one's: the class is then empty.
    pub fn limits<'a>(&'a self, pod: &Pod) -> Vec<(String, &'a str, u32)> {
        let Some(spec) = &pod.spec else { return Vec::new() };
        let unseen = self.denied.contains(&Denied::of::<DeviceClass>());
        let found = class::resources(spec).into_iter().filter_map(|(resource, count)| {
            let class = class::named_of_resource(&resource, &self.classes).map(|(class, _)| class.as_str());
            Some((resource, class.or(unseen.then_some(""))?, count))
        });
        found.collect()
    }

    /// The devices of a node's pool, of its newest generation, with the taints of rules.
    pub fn devices(&self, node: &NodeName) -> BTreeMap<DeviceName, ListedDevice> {
        let slices = || self.pools.get(node).into_iter().flat_map(BTreeMap::values);
        let newest = slices().map(|(generation, _)| *generation).max();
        let current = slices().filter(|(generation, _)| Some(*generation) == newest);
        let mut all: BTreeMap<_, _> = current.flat_map(|(_, devices)| devices.clone()).collect();
        for (name, device) in &mut all {
            device.taints.extend(self.rules.iter().filter_map(|rule| rule.taint(node, name)).cloned());
        }
        all
    }

    /// Nodes with devices.
    pub fn pools(&self) -> impl Iterator<Item = &NodeName> {
        self.pools.keys()
    }

    pub fn given(&self, gpu: &GpuRef) -> &[HeldDevicePart] {
        self.given.get(gpu).map_or(&[], Vec::as_slice)
    }

    /// What a claim has of a device. None: nothing that is known.
    pub fn part(&self, gpu: &GpuRef, namespace: &str, claim: &str) -> Option<&HeldDevicePart> {
        self.given(gpu).iter().find(|one| one.claim == claim && one.namespace == namespace)
    }

    /// The claim has all of the device: exclusively, or as kube-scheduler gives a whole GPU where GPUs are shared
    /// (KEP-5075): all of the memory, and compute not capped.
    pub fn has_all(&self, gpu: &GpuRef, namespace: &str, claim: &str) -> bool {
        let Some(consumed) = self.part(gpu, namespace, claim).map(|given| &given.consumed) else {
            return false;
        };
        let slices = self.pools.get(&gpu.node).into_iter().flat_map(BTreeMap::values);
        let device = slices.filter_map(|(_, devices)| devices.get(&gpu.device)).next();
        let all = device.and_then(|device| device.capacity.get(MEMORY)).map(|capacity| capacity.value);
        consumed.as_ref().is_none_or(|consumed| {
            let has = |name: &str| consumed.get(name).copied().unwrap_or(0);
            all.is_some_and(|all| has(MEMORY) >= all) && has(COMPUTE) == 0
        })
    }

    /// What keeps a pod off a node, whatever its GPUs: what the pod demands of nodes, then CPU, memory and pods.
    pub fn unfit(&self, pod: &Pod, demands: &Demands, node: &Node) -> Option<Unfit> {
        let spec = pod.spec.as_ref()?;
        if spec.node_name.as_deref() == Some(node.name().as_str()) {
            return None;
        }
        let left = || {
            let taken = self.taken_of(node).map(|taken| taken.room).unwrap_or_default();
            node.allocatable().minus(taken)
        };
        feasible::why_not(demands, node).or_else(|| feasible::short_of(feasible::requests(spec), left()))
    }

    /// What a node lacks for a pod of the resources that are neither CPU nor memory nor served by claims.
    pub fn lack(&self, pod: &Pod, node: &Node) -> Option<Lack> {
        let spec =
            pod.spec.as_ref().filter(|spec| spec.node_name.as_deref().unwrap_or_default().is_empty())?;
        feasible::other_requests(spec).into_iter().find_map(|(resource, needed)| {
            let all = node.allocatable_of(&resource);
            let taken = self.taken_of(node).and_then(|taken| taken.others.get(&resource)).copied();
            let left = all.saturating_sub(taken.unwrap_or(0));
            let by_claim = all == 0 && class::of_resource(&resource, &self.classes).is_some();
            (left < needed && !by_claim).then_some(Lack { resource, needed, left })
        })
    }

    /// A device plugin of the node offers the resource: kube-scheduler makes no claim for it there.
    pub fn is_by_plugin(&self, resource: &str, node: &Node) -> bool {
        node.allocatable_of(resource) > 0
    }

    fn taken_of(&self, node: &Node) -> Option<&Taken> {
        self.taken.get(node.name())
    }
}

fn units(quantity: &ApiQuantity) -> Option<u64> {
    quantity.0.parse::<Quantity>().ok()?.units_ceil()
}

fn consumed(result: &DeviceRequestAllocationResult) -> Option<BTreeMap<String, u64>> {
    result.share_id.as_ref()?;
    let all = result.consumed_capacity.iter().flatten();
    Some(all.filter_map(|(name, one)| Some((name.clone(), units(one)?))).collect())
}

fn device(device: &ApiDevice) -> ListedDevice {
    let capacity = device.capacity.iter().flatten().filter_map(|(name, one)| {
        let value = units(&one.value)?;
        let default = one.request_policy.as_ref().and_then(|policy| units(policy.default.as_ref()?));
        Some((name.clone(), Capacity { value, default: default.unwrap_or(value) }))
    });
    ListedDevice {
        facts: DeviceFacts::of(DRIVER, device),
        taints: device.taints.iter().flatten().filter_map(Taint::of).collect(),
        multiple: device.allow_multiple_allocations == Some(true),
        capacity: capacity.collect(),
    }
}

/// MiB and percent of a share that kube-scheduler gave.
pub fn amounts(consumed: &BTreeMap<String, u64>) -> (Option<u64>, Option<u64>) {
    let memory = consumed.get(MEMORY).map(|bytes| Bytes(*bytes).mib_floor());
    (memory, consumed.get(COMPUTE).copied().filter(|percent| *percent > 0))
}
