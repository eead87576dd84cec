//! The products of the cluster, as slices that no node has: devices of the type that the controller's classes select, with
//! what all GPUs of a product have in common. Queues that ask the API which devices a class chooses, and how much of them
//! a request takes, find the answer there; kube-scheduler passes over slices that no node matches (KEP-4381).

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{NodeSelector, NodeSelectorRequirement, NodeSelectorTerm};
use k8s_openapi::api::resource::v1::{
    CapacityRequestPolicy, CapacityRequestPolicyRange, Device, DeviceAttribute, DeviceCapacity, ResourcePool,
    ResourceSlice, ResourceSliceSpec,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::controller::view::{NodeState, PublishedGpu};
use crate::model::names::{DRIVER, MIRROR_LABEL};
use crate::model::{fnv1a, quantity};
use crate::params::{MEMORY, THOUSANDTHS};
use crate::select::{AttributeValue, QualifiedName, TYPE_OF_SHARES};
use crate::slices::BoardParts;

/// Of the slices' names, and of their pools': no pool of a node has a name like these.
const NAME: &str = "tranche-mirror-";
const POOL: &str = "mirror.tranche.dev/";
/// A claim has at most so many results, and a queue wants as many devices as a request counts.
const DEVICES: usize = 32;
/// Products beyond these are left out: whoever publishes GPUs names their products.
const PRODUCTS_MAX: usize = 64;
/// What selectors may look at that is no single board's.
const ATTRIBUTES: [&str; 9] = [
    "productName",
    "brand",
    "architecture",
    "cudaComputeCapability",
    "driverVersion",
    "cudaDriverVersion",
    "multiprocessors",
    "totalMemoryMiB",
    "isolation",
];

/// GPUs that are called the same.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Product {
    name: String,
    /// What all of them have, by [`ATTRIBUTES`].
    attributes: BTreeMap<&'static str, AttributeValue>,
    /// What may be granted of the one that has most.
    memory_mib: u64,
    /// The API server keeps what only consumable capacity has (KEP-5075).
    keeps_shares: bool,
}

/// The products of all GPUs that shares can be placed on, by name.
pub fn products<'a>(nodes: impl Iterator<Item = &'a NodeState>) -> Vec<Product> {
    let mut all: BTreeMap<&str, Product> = BTreeMap::new();
    for gpu in nodes.flat_map(|node| node.gpus.values()) {
        let name = gpu.grantable.product.as_str();
        let is_full = all.len() >= PRODUCTS_MAX;
        match all.get_mut(name) {
            Some(known) => known.take_in(gpu),
            None if name.is_empty() || is_full => {}
            None => drop(all.insert(name, Product::of(gpu))),
        }
    }
    all.into_values().collect()
}

impl Product {
    fn of(gpu: &PublishedGpu) -> Self {
        let of = |name| Some((name, attribute(gpu, name)?.clone()));
        Self {
            name: gpu.grantable.product.clone(),
            attributes: ATTRIBUTES.into_iter().filter_map(of).collect(),
            memory_mib: gpu.grantable.mib(),
            keeps_shares: keeps_shares(gpu),
        }
    }

    fn take_in(&mut self, gpu: &PublishedGpu) {
        self.attributes.retain(|name, value| attribute(gpu, name) == Some(value));
        self.memory_mib = self.memory_mib.max(gpu.grantable.mib());
        self.keeps_shares &= keeps_shares(gpu);
    }

    /// Its slice, in the first generation of its pool.
    pub fn slice(&self) -> ResourceSlice {
        let hash = fnv1a(self.name.bytes());
        let device = |nth: usize| Device { name: format!("share-{nth}"), ..self.device() };
        ResourceSlice {
            metadata: ObjectMeta {
                name: Some(format!("{NAME}{hash:016x}")),
                labels: Some(labels()),
                ..ObjectMeta::default()
            },
            spec: ResourceSliceSpec {
                driver: DRIVER.to_owned(),
                pool: ResourcePool {
                    name: format!("{POOL}{hash:016x}"),
                    generation: 1,
                    resource_slice_count: 1,
                },
                node_selector: Some(no_node()),
                devices: Some((0..DEVICES).map(device).collect()),
                ..ResourceSliceSpec::default()
            },
        }
    }

    fn device(&self) -> Device {
        let mut attributes: BTreeMap<String, DeviceAttribute> = self
            .attributes
            .iter()
            .filter_map(|(name, value)| Some(((*name).to_owned(), plain(value)?)))
            .collect();
        let of_type =
            DeviceAttribute { string: Some(TYPE_OF_SHARES.to_owned()), ..DeviceAttribute::default() };
        attributes.insert("type".to_owned(), of_type);
        let memory = format!("{}Mi", self.memory_mib);
        let capacity = [(MEMORY, self.capacity(&memory, "1Mi")), (THOUSANDTHS, self.capacity("1000", "1"))];
        Device {
            attributes: Some(attributes),
            capacity: Some(capacity.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()),
            allow_multiple_allocations: self.keeps_shares.then_some(true),
            ..Device::default()
        }
    }

    /// So much of it may be asked for as a multiple of `step`; who does not say how much is counted with all.
    fn capacity(&self, all: &str, step: &str) -> DeviceCapacity {
        let quantity = |text: &str| Quantity(text.to_owned());
        let range = CapacityRequestPolicyRange {
            min: quantity(step),
            max: Some(quantity(all)),
            step: Some(quantity(step)),
        };
        let policy = CapacityRequestPolicy {
            default: Some(quantity(all)),
            valid_range: Some(range),
            ..CapacityRequestPolicy::default()
        };
        DeviceCapacity { value: quantity(all), request_policy: self.keeps_shares.then_some(policy) }
    }
}

/// GPUs that are cut into MIG devices say nothing of what API servers keep of shares; one that keeps nothing drops what it
/// does not know.
fn keeps_shares(gpu: &PublishedGpu) -> bool {
    match &gpu.grantable.parts {
        BoardParts::Shares(shares) => shares.keeps_shares,
        BoardParts::Mig(_) => true,
    }
}

fn attribute<'a>(gpu: &'a PublishedGpu, name: &str) -> Option<&'a AttributeValue> {
    gpu.facts.attributes.get(&QualifiedName::of(name, DRIVER))
}

fn plain(value: &AttributeValue) -> Option<DeviceAttribute> {
    let none = DeviceAttribute::default();
    Some(match value.clone() {
        AttributeValue::Bool(value) => DeviceAttribute { bool: Some(value), ..none },
        AttributeValue::Int(value) => DeviceAttribute { int: Some(value), ..none },
        AttributeValue::String(value) => DeviceAttribute { string: Some(value), ..none },
        AttributeValue::Version(value) => DeviceAttribute { version: Some(value), ..none },
        _ => return None,
    })
}

/// Of all slices of this kind.
pub fn labels() -> BTreeMap<String, String> {
    let all = [(MIRROR_LABEL, "true"), ("app.kubernetes.io/name", "tranche")];
    all.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

/// True of no node, whatever its labels.
fn no_node() -> NodeSelector {
    let of = |operator: &str| NodeSelectorRequirement {
        key: MIRROR_LABEL.to_owned(),
        operator: operator.to_owned(),
        values: None,
    };
    let both = NodeSelectorTerm {
        match_expressions: Some(vec![of("Exists"), of("DoesNotExist")]),
        ..NodeSelectorTerm::default()
    };
    NodeSelector { node_selector_terms: vec![both] }
}

/// The slice that is there says what is wanted, as far as the API server keeps it.
pub fn is_same(stored: &ResourceSlice, wanted: &ResourceSlice) -> bool {
    type SliceDevice<'a> = (
        &'a str,
        &'a Option<BTreeMap<String, DeviceAttribute>>,
        Vec<(&'a str, Result<quantity::Quantity, &'a str>)>,
    );
    fn seen(slice: &ResourceSlice) -> Vec<SliceDevice<'_>> {
        let devices = slice.spec.devices.iter().flatten();
        devices
            .map(|device| {
                let all = device.capacity.iter().flatten();
                // The API server writes amounts in its own form: 80Gi for 81920Mi.
                let amount = |one: &'_ DeviceCapacity| one.value.0.parse::<quantity::Quantity>();
                let values = all
                    .map(|(name, one)| (name.as_str(), amount(one).map_err(|_| one.value.0.as_str())))
                    .collect();
                (device.name.as_str(), &device.attributes, values)
            })
            .collect()
    }
    let (a, b) = (&stored.spec, &wanted.spec);
    (&a.driver, &a.pool.name, &a.node_selector) == (&b.driver, &b.pool.name, &b.node_selector)
        && seen(stored) == seen(wanted)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::{Value, json};

    use super::*;
    use crate::controller::view::node;
    use crate::select::{DeviceFacts, NOT_FOR_THE_SCHEDULER, Selector};
    use crate::slices::{SliceContent, violations};

    fn node(boards: &[Value], keeps: bool) -> NodeState {
        let devices: Vec<Value> = boards
            .iter()
            .enumerate()
            .map(|(nth, more)| {
                let mut attributes = json!({"type": {"string": "gpu"}, "uuid": {"string": format!("GPU-{nth}")},
                    "productName": {"string": "NVIDIA H100 80GB HBM3"}, "architecture": {"string": "Hopper"},
                    "driverVersion": {"version": "580.0.0"}, "isolation": {"string": "mps"},
                    "grantableMemoryMiB": {"int": 80_000}, "shareSlots": {"int": 16}, "processesPerSlot": {"int": 3}});
                attributes.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
                json!({"name": format!("gpu-{nth}"), "attributes": attributes, "allowMultipleAllocations": keeps})
            })
            .collect();
        let slice = json!({"metadata": {"name": "s"}, "spec": {"driver": DRIVER, "nodeName": "a", "devices": devices,
            "pool": {"name": "a", "generation": 1, "resourceSliceCount": 1}}});
        let slice = node::slice(serde_json::from_value(slice).unwrap(), &mut Arc::default()).unwrap();
        NodeState { object: None, gpus: node::pool(&"a".into(), [&slice].into_iter(), &BTreeMap::new()) }
    }

    #[test]
    fn each_product_has_devices_that_our_classes_choose_and_no_node_has() {
        let l40s = json!({"productName": {"string": "NVIDIA L40S"}, "grantableMemoryMiB": {"int": 45_000}});
        let one = json!({"driverVersion": {"version": "550.0.0"}, "grantableMemoryMiB": {"int": 79_000}});
        let made = products([node(&[json!({}), one, l40s], true)].iter());
        assert_eq!(made.len(), 2);
        let slice = made[0].slice();
        let devices = slice.spec.devices.clone().unwrap();
        assert_eq!(devices.len(), 32, "as many as any request can count");
        for device in &devices {
            let facts = DeviceFacts::of(DRIVER, device);
            for cel in [NOT_FOR_THE_SCHEDULER, "device.attributes['gpu.nvidia.com'].architecture == 'Hopper'"]
            {
                assert_eq!(Selector::compile(cel).unwrap().look(&facts).0.ok(), Some(true), "{cel}");
            }
            let whole =
                "device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == 'gpu'";
            assert_eq!(Selector::compile(whole).unwrap().look(&facts).0.ok(), Some(false), "it is no GPU");
            let attributes = device.attributes.as_ref().unwrap();
            assert!(
                !attributes.contains_key("uuid") && !attributes.contains_key("driverVersion"),
                "{attributes:?}"
            );
        }
        let memory = &devices[0].capacity.as_ref().unwrap()["memory"];
        assert_eq!(memory.value.0, "80000Mi");
        let range = memory.request_policy.as_ref().unwrap().valid_range.as_ref().unwrap();
        assert_eq!((range.min.0.as_str(), range.max.as_ref().unwrap().0.as_str()), ("1Mi", "80000Mi"));
        let content = SliceContent { node: "a".into(), pool: "a".into(), devices, counters: Vec::new() };
        assert_eq!(violations(&[content]), [], "what the API server would refuse");
        assert_ne!(slice.metadata.name, made[1].slice().metadata.name);
        assert_eq!(slice.spec.node_name, None);
        assert!(
            node::slice(slice, &mut Arc::default()).is_none(),
            "it is no GPU of any node to the controller"
        );
    }

    #[test]
    fn where_the_api_server_drops_consumable_capacity_it_is_not_sent_and_nothing_is_written_again() {
        let wanted = products([node(&[json!({})], false)].iter())[0].slice();
        let device = &wanted.spec.devices.as_ref().unwrap()[0];
        assert_eq!(device.allow_multiple_allocations, None);
        assert!(device.capacity.as_ref().unwrap().values().all(|one| one.request_policy.is_none()));
        let kept = products([node(&[json!({})], true)].iter())[0].slice();
        assert!(is_same(&wanted, &kept), "the fields that may be dropped do not count");
        let mut canonical = kept.clone();
        for device in canonical.spec.devices.iter_mut().flatten() {
            device.capacity.as_mut().unwrap().get_mut("thousandths").unwrap().value =
                Quantity("1k".to_owned());
        }
        assert!(is_same(&canonical, &wanted), "1k is 1000");
        let other = products([node(&[json!({"architecture": {"string": "Ada"}})], true)].iter())[0].slice();
        assert!(!is_same(&kept, &other));
        assert_eq!(products([NodeState::default()].iter()), []);
    }
}
