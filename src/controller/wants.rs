//! What a claim of our class asks for, request by request; or in words why it cannot be placed.

use std::collections::BTreeSet;

use k8s_openapi::api::resource::v1::{
    DeviceClaim, DeviceClassConfiguration, DeviceRequest, DeviceToleration, ExactDeviceRequest,
};
use serde_json::Value;

use crate::model::claim::ConfigSource;
use crate::model::names::{DRIVER, RequestName, SHARED_CLASS};
use crate::params::{GpuShare, Params, decode};
use crate::select::Toleration;

/// One request: the same share on each of so many GPUs.
#[derive(Debug, Clone, PartialEq)]
pub struct Want {
    pub request: RequestName,
    pub share: GpuShare,
    pub gpus: u32,
    /// CEL, all must hold.
    pub selectors: Vec<String>,
    pub tolerations: Vec<DeviceToleration>,
}

impl Want {
    pub fn bears(&self) -> Vec<Toleration> {
        self.tolerations.iter().filter_map(Toleration::of).collect()
    }
}

/// What a claim asks for as a whole.
#[derive(Debug, Clone, PartialEq)]
pub struct Wants {
    pub requests: Vec<Want>,
    /// Attributes that must be the same, and for the GPUs of which requests (none: of all).
    pub same: Vec<(String, Vec<String>)>,
}

/// A claim has at most so many results.
const RESULTS_MAX: u32 = 32;

/// # Errors
/// In words for the claim's author, with the field's path.
pub fn wants(claim: &DeviceClaim, class: &[DeviceClassConfiguration]) -> Result<Wants, String> {
    let requests: Vec<&DeviceRequest> = claim.requests.iter().flatten().collect();
    let names: BTreeSet<&str> = requests.iter().map(|request| request.name.as_str()).collect();
    let configs = configs(claim, class, &names)?;
    let read = |(at, request): (usize, &&DeviceRequest)| want(at, request, &configs);
    let read: Vec<Want> = requests.iter().enumerate().map(read).collect::<Result<_, _>>()?;
    let gpus = read.iter().fold(0, |sum: u32, want| sum.saturating_add(want.gpus));
    if gpus > RESULTS_MAX {
        return Err(format!(
            "spec.devices.requests: {gpus} GPUs are asked for; a claim has at most {RESULTS_MAX}"
        ));
    }
    Ok(Wants { requests: read, same: same(claim)? })
}

/// One entry of configuration for our driver: for which requests, and what.
struct Entry<'a> {
    requests: &'a [String],
    params: Params,
}

/// Class entries first: later ones win.
fn configs<'a>(
    claim: &'a DeviceClaim,
    class: &'a [DeviceClassConfiguration],
    names: &BTreeSet<&str>,
) -> Result<Vec<Entry<'a>>, String> {
    let mut entries = Vec::new();
    for (at, one) in class.iter().enumerate() {
        if let Some(opaque) = one.opaque.as_ref().filter(|opaque| opaque.driver == DRIVER) {
            let path = format!("DeviceClass {SHARED_CLASS}: spec.config[{at}].opaque.parameters");
            entries.push(Entry {
                requests: &[],
                params: read(&path, &opaque.parameters.0, ConfigSource::FromClass)?,
            });
        }
    }
    for (at, one) in claim.config.iter().flatten().enumerate() {
        let Some(opaque) = one.opaque.as_ref().filter(|opaque| opaque.driver == DRIVER) else { continue };
        let path = format!("spec.devices.config[{at}].opaque.parameters");
        let requests = one.requests.as_deref().unwrap_or_default();
        if let Some(unknown) = requests.iter().find(|name| !names.contains(name.as_str())) {
            return Err(format!("spec.devices.config[{at}].requests: the claim has no request {unknown:?}"));
        }
        entries.push(Entry { requests, params: read(&path, &opaque.parameters.0, ConfigSource::FromClaim)? });
    }
    Ok(entries)
}

fn read(path: &str, parameters: &Value, source: ConfigSource) -> Result<Params, String> {
    let params = decode(parameters).and_then(|params| params.check_source(source).map(|()| params));
    let params = params.map_err(|error| format!("{path}.{error}"))?;
    match (&params, source) {
        // Nobody but the controller grants, and the controller grants in allocations only.
        (Params::Grant(_), ConfigSource::FromClass) => {
            Err(format!("{path}.kind: a ShareGrant is what the controller writes; take it out of the class"))
        }
        _ => Ok(params),
    }
}

fn want(at: usize, request: &DeviceRequest, configs: &[Entry<'_>]) -> Result<Want, String> {
    let path = format!("spec.devices.requests[{at}]");
    let Some(exactly) = request.exactly.as_ref().filter(|_| request.first_available.is_none()) else {
        return Err(format!("{path}.firstAvailable: has no meaning for class {SHARED_CLASS}; use exactly"));
    };
    if exactly.device_class_name != SHARED_CLASS {
        return Err(format!(
            "{path}.exactly.deviceClassName: {:?} is allocated by somebody else than {SHARED_CLASS}; a claim has one \
             allocation, so write two claims",
            exactly.device_class_name
        ));
    }
    plain(&path, exactly)?;
    let gpus = match (exactly.allocation_mode.as_deref(), exactly.count) {
        (None | Some("" | "ExactCount"), count) => count.unwrap_or(1),
        (Some(mode), _) => {
            return Err(format!(
                "{path}.exactly.allocationMode: {mode:?} has no meaning for shares; write a count"
            ));
        }
    };
    let gpus = u32::try_from(gpus).ok().filter(|gpus| *gpus > 0);
    let gpus = gpus.ok_or_else(|| format!("{path}.exactly.count: must be at least 1"))?;
    let share = share(&request.name, configs).ok_or_else(|| {
        format!(
            "{path}: says not how much of a GPU; add a config entry for driver {DRIVER} with a GpuShare that has \
             memory or fraction"
        )
    })?;
    let selectors =
        exactly.selectors.iter().flatten().filter_map(|one| Some(one.cel.as_ref()?.expression.clone()));
    Ok(Want {
        request: RequestName::new(&request.name),
        share,
        gpus,
        selectors: selectors.collect(),
        tolerations: exactly.tolerations.clone().unwrap_or_default(),
    })
}

/// Fields that mean something for the scheduler's shares only.
fn plain(path: &str, exactly: &ExactDeviceRequest) -> Result<(), String> {
    if exactly.admin_access == Some(true) {
        return Err(format!("{path}.exactly.adminAccess: is of class gpu.nvidia.com; shares have none"));
    }
    let capacity = exactly.capacity.as_ref().and_then(|one| one.requests.as_ref());
    if capacity.is_some_and(|requests| !requests.is_empty()) {
        return Err(format!(
            "{path}.exactly.capacity: is for class gpu.nvidia.com; with {SHARED_CLASS} a GpuShare says how much"
        ));
    }
    Ok(())
}

/// The last GpuShare that is meant for the request counts, as a whole.
fn share(request: &str, configs: &[Entry<'_>]) -> Option<GpuShare> {
    let meant =
        |entry: &&Entry<'_>| entry.requests.is_empty() || entry.requests.iter().any(|name| name == request);
    let mut shares = configs.iter().filter(meant).filter_map(|entry| match &entry.params {
        Params::Share(share) => Some(*share),
        _ => None,
    });
    shares.next_back().filter(|share| share.amount.is_some())
}

fn same(claim: &DeviceClaim) -> Result<Vec<(String, Vec<String>)>, String> {
    let constraints = claim.constraints.iter().flatten().enumerate();
    let one = |(at, one): (usize, &k8s_openapi::api::resource::v1::DeviceConstraint)| match &one
        .match_attribute
    {
        Some(name) => Ok((name.clone(), one.requests.clone().unwrap_or_default())),
        None => Err(format!(
            "spec.devices.constraints[{at}]: only matchAttribute is known for shares; GPUs of one claim are different \
             ones anyway"
        )),
    };
    constraints.map(one).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::model::quantity::Bytes;
    use crate::params::Amount;

    fn claim(devices: Value) -> DeviceClaim {
        serde_json::from_value(devices).unwrap()
    }

    fn share_of(fields: Value) -> Value {
        let mut parameters = json!({"apiVersion": "tranche.dev/v1alpha1", "kind": "GpuShare"});
        parameters.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        json!({"opaque": {"driver": DRIVER, "parameters": parameters}})
    }

    fn request(name: &str, more: Value) -> Value {
        let mut exactly = json!({"deviceClassName": SHARED_CLASS});
        exactly.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        json!({"name": name, "exactly": exactly})
    }

    #[test]
    fn each_request_gets_the_last_share_that_is_meant_for_it() {
        let mut second = share_of(json!({"fraction": "0.5"}));
        second["requests"] = json!(["b"]);
        let claim = claim(json!({
            "requests": [request("a", json!({})), request("b", json!({"count": 2}))],
            "config": [share_of(json!({"memory": "2000Mi"})), second],
            "constraints": [{"matchAttribute": "gpu.nvidia.com/productName"}],
        }));
        let wants = wants(&claim, &[]).unwrap();
        assert_eq!(wants.requests[0].share.amount, Some(Amount::Memory(Bytes::from_mib(2000))));
        assert_eq!((wants.requests[0].gpus, wants.requests[1].gpus), (1, 2));
        assert_eq!(wants.requests[1].share.amount, Some(Amount::Fraction("0.5".parse().unwrap())));
        assert_eq!(wants.same, [("gpu.nvidia.com/productName".to_owned(), vec![])]);
    }

    #[test]
    fn a_class_may_say_how_much() {
        let class: DeviceClassConfiguration =
            serde_json::from_value(share_of(json!({"memory": "1Gi"}))).unwrap();
        let claim = claim(json!({"requests": [request("a", json!({}))]}));
        assert_eq!(
            wants(&claim, &[class]).unwrap().requests[0].share.amount,
            Some(Amount::Memory(Bytes::from_mib(1024)))
        );
    }

    #[test]
    fn what_cannot_be_placed_says_why_and_where() {
        let good = || share_of(json!({"memory": "1Gi"}));
        let with = |request: Value, config: Value| json!({"requests": [request], "config": [config]});
        let other = json!({"name": "a", "exactly": {"deviceClassName": "nic.example.com"}});
        let first = json!({"name": "a", "firstAvailable": [{"name": "x", "deviceClassName": SHARED_CLASS}]});
        let mut for_b = good();
        for_b["requests"] = json!(["b"]);
        let grant = json!({"opaque": {"driver": DRIVER, "parameters": {
            "apiVersion": "tranche.dev/v1alpha1", "kind": "ShareGrant", "devices": [
                {"device": "gpu-0", "gpu": "GPU-0", "memory": "1Gi", "slots": 1, "isolation": "mps"}]}}});
        for (devices, words) in [
            (json!({"requests": [request("a", json!({}))]}), "says not how much"),
            (with(request("a", json!({})), share_of(json!({"compute": 20}))), "says not how much"),
            (
                with(request("a", json!({})), share_of(json!({"memory": "0"}))),
                "config[0].opaque.parameters.memory",
            ),
            (with(request("a", json!({})), for_b), "no request \"b\""),
            (with(request("a", json!({})), grant), "ShareGrant"),
            (with(request("a", json!({"count": 0})), good()), "count"),
            (with(request("a", json!({"count": 33})), good()), "at most 32"),
            (with(request("a", json!({"allocationMode": "All"})), good()), "allocationMode"),
            (with(request("a", json!({"adminAccess": true})), good()), "adminAccess"),
            (with(request("a", json!({"capacity": {"requests": {"memory": "1Gi"}}})), good()), "capacity"),
            (with(other, good()), "two claims"),
            (with(first, good()), "firstAvailable"),
        ] {
            let refused = wants(&claim(devices.clone()), &[]).unwrap_err();
            assert!(refused.contains(words), "{devices}: {refused}");
        }
    }
}
