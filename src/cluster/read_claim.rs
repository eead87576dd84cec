//! A ResourceClaim, reduced to what our driver has to know. Strict about our own part, blind to the rest:
//! other drivers' results and configuration are none of our business, however odd they look.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::{
    AllocationResult, DeviceAllocationConfiguration, DeviceRequestAllocationResult, ResourceClaim,
    ResourceClaimConsumerReference,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as ApiQuantity;

use super::ClaimError;
use crate::model::claim::{Access, Allocated, AllocatedClaim, ClaimRef, Config, ConfigSource, PodRef};
use crate::model::names::{ClaimUid, DRIVER, DeviceName, PodUid, PoolName, RequestName};
use crate::model::quantity::Quantity;

/// Reads `object`, the claim that now has `claim`'s name.
///
/// # Errors
/// `Replaced`, `NotAllocated`, `NoneOfOurs`, or `Malformed` with the field's path.
pub fn read(claim: &ClaimRef, object: &ResourceClaim) -> Result<AllocatedClaim, ClaimError> {
    let at = ClaimReader { claim };
    let found_uid = object.metadata.uid.as_deref().unwrap_or_default();
    if found_uid.is_empty() {
        return Err(at.malformed("metadata.uid", "is missing"));
    }
    if found_uid != claim.uid.as_str() {
        return Err(ClaimError::Replaced { claim: claim.clone(), found_uid: ClaimUid::new(found_uid) });
    }
    let Some(allocation) = object.status.as_ref().and_then(|status| status.allocation.as_ref()) else {
        return Err(ClaimError::NotAllocated { claim: claim.clone() });
    };
    let results = at.results(allocation)?;
    if results.is_empty() {
        return Err(ClaimError::NoneOfOurs { claim: claim.clone() });
    }
    let configs = at.configs(allocation)?;
    let (pods, reserved_for_others) = consumers(claim, object);
    let requests = requests(object);
    Ok(AllocatedClaim { claim: claim.clone(), requests, results, configs, pods, reserved_for_others })
}

/// The claim is reserved for a pod, and not for something else.
pub fn is_pod(one: &ResourceClaimConsumerReference) -> bool {
    one.api_group.as_deref().unwrap_or_default().is_empty() && one.resource == "pods"
}

/// The pods that the claim is reserved for (all of its namespace), and whether it is reserved for something
/// else as well.
fn consumers(claim: &ClaimRef, object: &ResourceClaim) -> (Vec<PodRef>, bool) {
    let reserved = object.status.iter().flat_map(|status| status.reserved_for.iter().flatten());
    let (pods, others): (Vec<_>, Vec<_>) = reserved.partition(|one| is_pod(one));
    let pod = |one: &ResourceClaimConsumerReference| PodRef {
        namespace: claim.namespace.clone(),
        name: one.name.clone(),
        uid: PodUid::new(&one.uid),
    };
    (pods.into_iter().map(pod).collect(), !others.is_empty())
}

/// The names of all requests in the spec; of one with alternatives (`firstAvailable`), every alternative.
fn requests(object: &ResourceClaim) -> Vec<RequestName> {
    let devices = object.spec.as_ref().and_then(|spec| spec.devices.as_ref());
    let mut names = Vec::new();
    for request in devices.iter().flat_map(|devices| devices.requests.iter().flatten()) {
        match request.first_available.as_deref() {
            None | Some([]) => names.push(RequestName::new(&request.name)),
            Some(alternatives) => names.extend(
                alternatives.iter().map(|sub| RequestName::new(format!("{}/{}", request.name, sub.name))),
            ),
        }
    }
    names
}

/// Which claim is being read, for the errors.
struct ClaimReader<'a> {
    claim: &'a ClaimRef,
}

impl ClaimReader<'_> {
    fn malformed(&self, field: impl Into<Box<str>>, problem: impl Into<Box<str>>) -> ClaimError {
        ClaimError::Malformed { claim: self.claim.clone(), field: field.into(), problem: problem.into() }
    }

    fn results(&self, allocation: &AllocationResult) -> Result<Vec<Allocated>, ClaimError> {
        let results = allocation.devices.iter().flat_map(|devices| devices.results.iter().flatten());
        results
            .enumerate()
            .filter(|(_, result)| result.driver == DRIVER)
            .map(|(index, result)| self.result(index, result))
            .collect()
    }

    fn result(&self, index: usize, result: &DeviceRequestAllocationResult) -> Result<Allocated, ClaimError> {
        let path = format!("status.allocation.devices.results[{index}]");
        for (field, value) in
            [("request", &result.request), ("pool", &result.pool), ("device", &result.device)]
        {
            if value.is_empty() {
                return Err(self.malformed(format!("{path}.{field}"), "is empty"));
            }
        }
        Ok(Allocated {
            request: RequestName::new(&result.request),
            pool: PoolName::new(&result.pool),
            device: DeviceName::new(&result.device),
            access: self.access(&path, result)?,
        })
    }

    fn access(&self, path: &str, result: &DeviceRequestAllocationResult) -> Result<Access, ClaimError> {
        if result.admin_access == Some(true) {
            return Ok(Access::Admin);
        }
        match &result.share_id {
            None => Ok(Access::Exclusive),
            Some(id) if id.is_empty() => Err(self.malformed(format!("{path}.shareID"), "is empty")),
            Some(id) => {
                let consumed = result.consumed_capacity.as_ref();
                let consumed = self.consumed(&format!("{path}.consumedCapacity"), consumed)?;
                Ok(Access::Share { id: id.clone(), consumed })
            }
        }
    }

    fn consumed(
        &self,
        path: &str,
        consumed: Option<&BTreeMap<String, ApiQuantity>>,
    ) -> Result<Vec<(String, Quantity)>, ClaimError> {
        consumed
            .into_iter()
            .flatten()
            .map(|(name, quantity)| match quantity.0.parse::<Quantity>() {
                Ok(quantity) => Ok((name.clone(), quantity)),
                Err(error) => Err(self.malformed(format!("{path}[{name}]"), error.to_string())),
            })
            .collect()
    }

    fn configs(&self, allocation: &AllocationResult) -> Result<Vec<Config>, ClaimError> {
        let configs = allocation.devices.iter().flat_map(|devices| devices.config.iter().flatten());
        let mut ours = configs
            .enumerate()
            .filter_map(|(index, config)| self.config(index, config).transpose())
            .collect::<Result<Vec<_>, _>>()?;
        // The allocator writes class entries first; the order decides who wins, so it is made sure of.
        ours.sort_by_key(|config| match config.source {
            ConfigSource::FromClass => 0,
            ConfigSource::FromClaim => 1,
        });
        Ok(ours)
    }

    /// `None` if the entry is not for us.
    fn config(
        &self,
        index: usize,
        config: &DeviceAllocationConfiguration,
    ) -> Result<Option<Config>, ClaimError> {
        let Some(opaque) = config.opaque.as_ref().filter(|opaque| opaque.driver == DRIVER) else {
            return Ok(None);
        };
        let source = match config.source.as_str() {
            "FromClass" => ConfigSource::FromClass,
            "FromClaim" => ConfigSource::FromClaim,
            other => {
                let field = format!("status.allocation.devices.config[{index}].source");
                return Err(self.malformed(field, format!("{other:?} is neither FromClass nor FromClaim")));
            }
        };
        let requests = config.requests.clone().unwrap_or_default();
        Ok(Some(Config { source, requests, parameters: opaque.parameters.0.clone() }))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn reference() -> ClaimRef {
        ClaimRef { namespace: "ml".to_owned(), name: "train".to_owned(), uid: ClaimUid::new("uid-1") }
    }

    fn claim(allocation: Value) -> ResourceClaim {
        serde_json::from_value(json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
            "metadata": {"namespace": "ml", "name": "train", "uid": "uid-1"},
            "spec": {"devices": {"requests": [{"name": "gpu"}]}},
            "status": {"allocation": allocation},
        }))
        .unwrap()
    }

    fn read_devices(devices: Value) -> Result<AllocatedClaim, ClaimError> {
        read(&reference(), &claim(json!({"devices": devices})))
    }

    fn result(extra: Value) -> Value {
        let mut result = json!({"request": "gpu", "driver": DRIVER, "pool": "node-a", "device": "gpu-0"});
        result.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        result
    }

    #[test]
    fn a_whole_gpu_is_exclusive() {
        let claim = read_devices(json!({"results": [result(json!({}))]})).unwrap();
        assert_eq!(
            claim.results,
            [Allocated {
                request: RequestName::new("gpu"),
                pool: PoolName::new("node-a"),
                device: DeviceName::new("gpu-0"),
                access: Access::Exclusive,
            }]
        );
        assert!(claim.configs.is_empty());
    }

    #[test]
    fn a_share_carries_its_exact_capacities() {
        let share = json!({
            "shareID": "a7c8e2c4-2a3c-4c26-9e0f-0d1d7f3f3b11",
            "consumedCapacity": {"memory": "10Gi", "compute": "25", "shares": "1500m"},
        });
        let claim = read_devices(json!({"results": [result(share)]})).unwrap();
        let Access::Share { id, consumed } = &claim.results[0].access else { panic!("{claim:?}") };
        assert_eq!(id, "a7c8e2c4-2a3c-4c26-9e0f-0d1d7f3f3b11");
        let consumed: BTreeMap<_, _> = consumed.iter().cloned().collect();
        assert_eq!(consumed["memory"], Quantity::from_units(10 << 30));
        assert_eq!(consumed["compute"], Quantity::from_units(25));
        assert_eq!(consumed["shares"], "1.5".parse().unwrap());
    }

    #[test]
    fn admin_access_is_neither_exclusive_nor_a_share() {
        let admin = result(json!({"adminAccess": true, "shareID": "x"}));
        let plain = result(json!({"adminAccess": false}));
        let claim = read_devices(json!({"results": [admin, plain]})).unwrap();
        assert_eq!(claim.results[0].access, Access::Admin);
        assert_eq!(claim.results[1].access, Access::Exclusive);
    }

    #[test]
    fn other_drivers_parts_are_left_out_however_odd() {
        let claim = read_devices(json!({
            "results": [
                {"request": "nic", "driver": "nic.example.com", "pool": "", "device": "nic-0",
                 "shareID": "s", "consumedCapacity": {"bandwidth": "not a quantity"}},
                result(json!({"request": "gpu/large"})),
            ],
            "config": [
                {"source": "SomethingNew", "opaque": {"driver": "nic.example.com", "parameters": [1]}},
                {"source": "FromClass"},
                {"source": "FromClaim", "requests": ["gpu"],
                 "opaque": {"driver": DRIVER, "parameters": {"kind": "GpuConfig"}}},
            ],
        }))
        .unwrap();
        assert_eq!(claim.results.len(), 1);
        assert_eq!(claim.results[0].request.base(), "gpu");
        assert_eq!(
            claim.configs,
            [Config {
                source: ConfigSource::FromClaim,
                requests: vec!["gpu".to_owned()],
                parameters: json!({"kind": "GpuConfig"}),
            }]
        );
    }

    #[test]
    fn every_request_is_named_whoever_serves_it() {
        let mut object = claim(json!({"devices": {"results": [result(json!({}))]}}));
        object.spec = serde_json::from_value(json!({"devices": {"requests": [
            {"name": "nic", "exactly": {"deviceClassName": "nic"}},
            {"name": "gpu", "firstAvailable": [
                {"name": "large", "deviceClassName": "a"}, {"name": "small", "deviceClassName": "b"},
            ]},
        ]}}))
        .unwrap();
        let claim = read(&reference(), &object).unwrap();
        let names: Vec<_> = claim.requests.iter().map(RequestName::as_str).collect();
        assert_eq!(names, ["nic", "gpu/large", "gpu/small"]);
    }

    #[test]
    fn the_pods_that_may_use_it_are_named_and_others_told_of() {
        let mut object = claim(json!({"devices": {"results": [result(json!({}))]}}));
        let read_with = |object: &ResourceClaim| read(&reference(), object).unwrap();
        assert_eq!((read_with(&object).pods, read_with(&object).reserved_for_others), (vec![], false));
        let pod = json!({"resource": "pods", "name": "train-0", "uid": "pod-1"});
        let group =
            json!({"apiGroup": "scheduling.k8s.io", "resource": "podgroups", "name": "g", "uid": "group-1"});
        object.status.as_mut().unwrap().reserved_for = serde_json::from_value(json!([pod, group])).unwrap();
        let found = read_with(&object);
        let train = PodRef { namespace: "ml".into(), name: "train-0".into(), uid: PodUid::from("pod-1") };
        assert_eq!((found.pods, found.reserved_for_others), (vec![train], true));
    }

    #[test]
    fn class_configuration_comes_before_the_claims() {
        let entry = |source: &str, n: u32| json!({"source": source, "opaque": {"driver": DRIVER, "parameters": {"n": n}}});
        let claim = read_devices(json!({
            "results": [result(json!({}))],
            "config": [entry("FromClaim", 1), entry("FromClass", 2), entry("FromClaim", 3)],
        }))
        .unwrap();
        let order: Vec<_> = claim.configs.iter().map(|config| config.parameters["n"].as_u64()).collect();
        assert_eq!(order, [Some(2), Some(1), Some(3)]);
    }

    #[test]
    fn a_claim_of_the_same_name_is_another_claim() {
        let mut object = claim(json!({"devices": {"results": [result(json!({}))]}}));
        object.metadata.uid = Some("uid-2".to_owned());
        let error = read(&reference(), &object).unwrap_err();
        assert_eq!(error.label(), "replaced");
        let words = error.to_string();
        assert!(words.contains("ml/train (uid-1)") && words.contains("uid-2"), "{words}");
    }

    #[test]
    fn nothing_to_prepare_is_said_apart() {
        let mut unallocated = claim(json!({"devices": {}}));
        unallocated.status = None;
        assert_eq!(read(&reference(), &unallocated).unwrap_err().label(), "not_allocated");
        let foreign = read_devices(json!({
            "results": [{"request": "nic", "driver": "nic.example.com", "pool": "p", "device": "d"}]
        }));
        assert_eq!(foreign.unwrap_err().label(), "none_of_ours");
        assert_eq!(read_devices(json!({})).unwrap_err().label(), "none_of_ours");
    }

    #[test]
    fn what_is_malformed_is_named_by_its_path() {
        for (devices, path) in [
            (
                json!({"results": [result(json!({"pool": ""}))]}),
                "status.allocation.devices.results[0].pool: is empty",
            ),
            (json!({"results": [result(json!({"shareID": ""}))]}), "results[0].shareID: is empty"),
            (
                json!({"results": [
                    {"request": "nic", "driver": "nic.example.com", "pool": "p", "device": "d"},
                    result(json!({"shareID": "s", "consumedCapacity": {"memory": "10GiB"}})),
                ]}),
                "results[1].consumedCapacity[memory]: \"10GiB\" is not a quantity",
            ),
            (
                json!({"results": [result(json!({}))],
                       "config": [{"source": "FromUser", "opaque": {"driver": DRIVER, "parameters": {}}}]}),
                "config[0].source: \"FromUser\" is neither",
            ),
        ] {
            let words = read_devices(devices).unwrap_err().to_string();
            assert!(words.contains(path), "{words}");
            assert!(words.starts_with("claim ml/train (uid-1): "), "{words}");
        }
    }
}
