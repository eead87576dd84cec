//! A decision, as the allocation of a claim says it.

use k8s_openapi::api::core::v1::{NodeSelector, NodeSelectorRequirement, NodeSelectorTerm};
use k8s_openapi::api::resource::v1::{
    AllocationResult, DeviceAllocationConfiguration, DeviceAllocationResult, DeviceClaim,
    DeviceRequestAllocationResult, DeviceToleration, OpaqueDeviceConfiguration,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::runtime::RawExtension;

use crate::controller::classes::{OurClasses, of_request};
use crate::model::names::{DRIVER, NodeName, PoolName, RequestName};
use crate::model::share::Extent;
use crate::params::{GrantedDevice, ShareGrant};
use crate::slices::ShareParts;

/// Capacities of a device that is shared.
const MEMORY: &str = "memory";
const SHARES: &str = "shares";

/// What one request was given.
#[derive(Debug, Clone, PartialEq)]
pub struct RequestGrant {
    pub request: RequestName,
    pub devices: Vec<GrantedDevice>,
    pub tolerations: Vec<DeviceToleration>,
}

/// The configuration that goes into an allocation: the claim's, and its classes'.
#[derive(Clone, Copy)]
pub struct Configs<'a> {
    pub claim: &'a DeviceClaim,
    pub classes: &'a OurClasses,
}

impl Configs<'_> {
    /// Of each class, for the requests that are of it; where all are of one class, for all.
    fn of_classes(&self, given: &[RequestGrant]) -> Vec<DeviceAllocationConfiguration> {
        let class_of = |one: &RequestGrant| of_request(self.claim, &one.request);
        let mut made = Vec::new();
        for (name, class) in self.classes.of(self.claim) {
            let meant = given.iter().filter(|one| class_of(one) == Some(name));
            let meant: Vec<String> = meant.map(|one| one.request.as_str().to_owned()).collect();
            if meant.is_empty() {
                continue;
            }
            let requests = (meant.len() < given.len()).then_some(meant);
            let opaque = class.config.iter().filter_map(|one| one.opaque.clone());
            made.extend(opaque.map(|opaque| entry("FromClass", requests.clone(), opaque)));
        }
        made
    }
}

/// The allocation of a claim on `node`. Whoever writes it adds the time. Share ids are taken from `ids`; none:
/// the API server keeps none.
pub fn allocation(
    node: &NodeName,
    given: &[RequestGrant],
    configs: Configs<'_>,
    mut ids: Option<&mut dyn FnMut() -> String>,
) -> AllocationResult {
    let mut results = Vec::new();
    for one in given {
        for device in &one.devices {
            // The counters of the board are the hold's: to kube-scheduler a MIG device is nothing of its own.
            let has_id = !matches!(device.extent, Extent::Mig(_));
            let id = ids.as_mut().filter(|_| has_id).map(|ids| ids());
            results.push(result(node, one, device, id));
        }
    }
    let grants = given.iter().map(grant);
    let class = configs.of_classes(given).into_iter();
    // Other drivers have nothing to prepare here, and what they are told is not known here.
    let claim = configs.claim.config.iter().flatten();
    let claim = claim.filter(|one| one.opaque.as_ref().is_some_and(|opaque| opaque.driver == DRIVER));
    let claim = claim.filter_map(|one| Some(entry("FromClaim", one.requests.clone(), one.opaque.clone()?)));
    AllocationResult {
        allocation_timestamp: None,
        devices: Some(DeviceAllocationResult {
            config: Some(class.chain(grants).chain(claim).collect()),
            results: Some(results),
        }),
        node_selector: Some(only(node)),
    }
}

/// The allocation of a hold: the whole device, without a share id, which keeps kube-scheduler off it. `parts`: what
/// kube-scheduler gives parts of, if it does. All of that is named as consumed, for those who go by this alone
/// (Karpenter 1.15.0).
pub fn hold(node: &NodeName, request: &str, device: &str, parts: Option<ShareParts>) -> AllocationResult {
    let all = |parts: ShareParts| {
        let named = [(MEMORY, parts.memory.to_quantity_string()), (SHARES, parts.slots.to_string())];
        named.into_iter().map(|(name, text)| (name.to_owned(), Quantity(text))).collect()
    };
    let result = DeviceRequestAllocationResult {
        consumed_capacity: parts.map(all),
        driver: DRIVER.to_owned(),
        pool: node.to_string(),
        device: device.to_owned(),
        request: request.to_owned(),
        ..DeviceRequestAllocationResult::default()
    };
    AllocationResult {
        allocation_timestamp: None,
        devices: Some(DeviceAllocationResult { config: None, results: Some(vec![result]) }),
        node_selector: Some(only(node)),
    }
}

fn result(
    node: &NodeName,
    given: &RequestGrant,
    device: &GrantedDevice,
    id: Option<String>,
) -> DeviceRequestAllocationResult {
    let pool = match id {
        Some(_) => PoolName::Published(node.clone()),
        None => PoolName::Shares(node.clone()),
    };
    let consumed = [
        (MEMORY, device.memory.to_quantity_string()),
        ("compute", device.compute.map_or(0, |percent| percent.get()).to_string()),
        (SHARES, device.slots.to_string()),
    ];
    let consumed = consumed.into_iter().map(|(name, text)| (name.to_owned(), Quantity(text))).collect();
    DeviceRequestAllocationResult {
        consumed_capacity: id.is_some().then_some(consumed),
        share_id: id,
        driver: DRIVER.to_owned(),
        pool: pool.to_string(),
        device: device.device.to_string(),
        request: given.request.as_str().to_owned(),
        tolerations: (!given.tolerations.is_empty()).then(|| given.tolerations.clone()),
        ..DeviceRequestAllocationResult::default()
    }
}

fn grant(given: &RequestGrant) -> DeviceAllocationConfiguration {
    let parameters = ShareGrant { devices: given.devices.clone() }.to_parameters();
    let opaque =
        OpaqueDeviceConfiguration { driver: DRIVER.to_owned(), parameters: RawExtension(parameters) };
    entry("FromClass", Some(vec![given.request.as_str().to_owned()]), opaque)
}

fn entry(
    source: &str,
    requests: Option<Vec<String>>,
    opaque: OpaqueDeviceConfiguration,
) -> DeviceAllocationConfiguration {
    DeviceAllocationConfiguration { opaque: Some(opaque), requests, source: source.to_owned() }
}

/// The form that the scheduler writes, and the only one that the API server lets the node's plugin write the device
/// status of (DRAResourceClaimGranularStatusAuthorization).
fn only(node: &NodeName) -> NodeSelector {
    let name = NodeSelectorRequirement {
        key: "metadata.name".to_owned(),
        operator: "In".to_owned(),
        values: Some(vec![node.to_string()]),
    };
    let term = NodeSelectorTerm { match_fields: Some(vec![name]), match_expressions: None };
    NodeSelector { node_selector_terms: vec![term] }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::controller::classes::OurClass;
    use crate::model::names::SHARED_CLASS;
    use crate::model::quantity::Bytes;
    use crate::model::share::{Isolation, Percent};

    fn given() -> RequestGrant {
        let device = GrantedDevice {
            device: "gpu-3".into(),
            gpu: "GPU-3".into(),
            memory: Bytes::from_mib(2000),
            compute: Percent::try_from(25_u8).ok(),
            slots: 1,
            isolation: Isolation::Mps,
            extent: Extent::Part,
        };
        RequestGrant { request: RequestName::new("gpu"), devices: vec![device], tolerations: vec![] }
    }

    fn claim() -> DeviceClaim {
        serde_json::from_value(json!({"requests": [{"name": "gpu", "exactly": {"deviceClassName": SHARED_CLASS}}],
            "config": [{"opaque": {"driver": DRIVER, "parameters": {"kind": "GpuShare"}}, "requests": ["gpu"]},
        ]}))
        .unwrap()
    }

    #[test]
    fn an_allocation_says_the_numbers_twice_where_the_api_server_keeps_them() {
        let mut ids = || "a7c8e2c4-2a3c-4c26-9e0f-0d1d7f3f3b11".to_owned();
        let config = json!([{"opaque": {"driver": DRIVER, "parameters": {"kind": "Class"}}}]);
        let mut classes = OurClasses::default();
        let config = serde_json::from_value(config).unwrap();
        classes.set(SHARED_CLASS, OurClass { config, ..OurClass::default() });
        let configs = Configs { claim: &claim(), classes: &classes };
        let made = allocation(&"a".into(), &[given()], configs, Some(&mut ids));
        assert_eq!(
            serde_json::to_value(&made).unwrap(),
            json!({
                "devices": {
                    "config": [
                        {"source": "FromClass", "opaque": {"driver": DRIVER, "parameters": {"kind": "Class"}}},
                        {"source": "FromClass", "requests": ["gpu"], "opaque": {"driver": DRIVER, "parameters": {
                            "apiVersion": "tranche.dev/v1alpha1", "kind": "ShareGrant", "devices": [
                                {"device": "gpu-3", "gpu": "GPU-3", "memory": "2000Mi", "compute": 25, "slots": 1,
                                 "isolation": "mps"}]}}},
                        {"source": "FromClaim", "requests": ["gpu"],
                         "opaque": {"driver": DRIVER, "parameters": {"kind": "GpuShare"}}},
                    ],
                    "results": [{
                        "request": "gpu", "driver": DRIVER, "pool": "a", "device": "gpu-3",
                        "shareID": "a7c8e2c4-2a3c-4c26-9e0f-0d1d7f3f3b11",
                        "consumedCapacity": {"memory": "2000Mi", "compute": "25", "shares": "1"},
                    }],
                },
                "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [
                    {"key": "metadata.name", "operator": "In", "values": ["a"]}]}]},
            })
        );
    }

    #[test]
    fn without_share_ids_the_scheduler_is_not_to_count_the_share_as_the_device() {
        let made = allocation(
            &"a".into(),
            &[given()],
            Configs { claim: &claim(), classes: &OurClasses::default() },
            None,
        );
        let results = made.devices.unwrap().results.unwrap();
        assert_eq!((results[0].pool.as_str(), results[0].device.as_str()), ("a/shares", "gpu-3"));
        assert_eq!((&results[0].share_id, &results[0].consumed_capacity), (&None, &None));
    }
}
