//! What a claim of our classes asks for, request by request; or in words why it cannot be placed.

use std::sync::Arc;

use k8s_openapi::api::resource::v1::{
    DeviceClaim, DeviceConstraint, DeviceRequest, DeviceSubRequest, DeviceToleration, ExactDeviceRequest,
};
use serde_json::Value;

use crate::admission::messages;
use crate::allocate::Rule;
use crate::controller::classes::OurClasses;
use crate::controller::requests::{exact, expressions};
use crate::model::claim::ConfigSource;
use crate::model::names::{DRIVER, RequestName};
use crate::params::{self, AskedError, GpuShare, Params, ShareSource, decode};
use crate::select::{CLAIM_BYTES_MAX, Toleration};

mod size;

pub use size::{Size, ways_of};

/// One request: the same share on each of so many GPUs.
#[derive(Debug, Clone, PartialEq)]
pub struct Want {
    pub request: RequestName,
    pub share: GpuShare,
    pub gpus: u32,
    /// CEL, all must hold.
    pub selectors: Arc<[String]>,
    pub tolerations: Tolerations,
}

/// A request's tolerations: there may be many, and each way to serve a pod has them.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Tolerations {
    pub as_written: Arc<[DeviceToleration]>,
    /// Those that can be read.
    pub read: Arc<[Toleration]>,
}

impl From<Vec<DeviceToleration>> for Tolerations {
    fn from(all: Vec<DeviceToleration>) -> Self {
        Self { read: all.iter().filter_map(Toleration::of).collect(), as_written: all.into() }
    }
}

/// What a claim asks for as a whole, of each request with alternatives one.
#[derive(Debug, Clone, PartialEq)]
pub struct Wants {
    pub requests: Vec<Want>,
    pub constraints: Arc<[Constraint]>,
}

/// What the GPUs of several requests have to do with one another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Constraint {
    pub rule: Rule,
    pub attribute: String,
    /// None: all.
    pub requests: Vec<String>,
}

impl Constraint {
    pub fn is_for(&self, request: &RequestName) -> bool {
        self.requests.is_empty() || self.requests.iter().any(|name| request.is_meant_by(name))
    }
}

/// A claim has at most so many results.
const RESULTS_MAX: u32 = 32;
/// So many combinations of alternatives are tried for a pod at most.
pub const WAYS_MAX: usize = 64;
/// The claims of a pod have at most so many requests together: more than the shares that any node has for one pod.
pub const POD_REQUESTS_MAX: usize = 256;
/// So many requests of a pod in all of its combinations of alternatives.
pub const POD_TRIES_MAX: usize = 4096;
/// The same of all pods that are placed together.
pub const UNIT_TRIES_MAX: usize = 16_384;

/// The ways to serve the claim, the first that can be is to be taken (KEP-4816): requests in their order, of each its
/// alternatives in theirs, the last request's changing first. Without `firstAvailable` there is one.
///
/// # Errors
/// In words for the claim's author, with the field's path.
pub fn wants(claim: &DeviceClaim, classes: &OurClasses) -> Result<Vec<Wants>, String> {
    let too_many = || {
        format!(
            "spec.devices.requests: firstAvailable: more than {WAYS_MAX} combinations of alternatives; name fewer, or \
             write several claims"
        )
    };
    if ways_of(claim) > WAYS_MAX {
        return Err(too_many());
    }
    let requests: Vec<Vec<NamedRequest>> =
        claim.requests.iter().flatten().enumerate().map(asked).collect::<Result<_, _>>()?;
    let selectors = requests.iter().flatten().flat_map(|asked| asked.exactly.selectors.iter().flatten());
    let texts = selectors.filter_map(|selector| selector.cel.as_ref()).map(|cel| cel.expression.len());
    let bytes = texts.fold(0, usize::saturating_add);
    if bytes > CLAIM_BYTES_MAX {
        return Err(format!("spec.devices.requests: {}", messages::selectors(bytes)));
    }
    let names: Vec<RequestName> = requests.iter().flatten().map(|asked| asked.name.clone()).collect();
    let configs = configs(claim, classes, &names)?;
    let constraints = constraints(claim)?;
    let read = |all: &Vec<NamedRequest>| {
        all.iter().map(|asked| want(asked, classes, &configs)).collect::<Result<Vec<_>, _>>()
    };
    let read: Vec<Vec<Want>> = requests.iter().map(read).collect::<Result<_, _>>()?;
    let ways = combinations(&read).ok_or_else(too_many)?;
    for way in &ways {
        let gpus = way.iter().fold(0, |sum: u32, want| sum.saturating_add(want.gpus));
        if gpus > RESULTS_MAX {
            return Err(format!(
                "spec.devices.requests: {gpus} GPUs are asked for; a claim has at most {RESULTS_MAX}"
            ));
        }
    }
    let wants = |requests| Wants { requests, constraints: Arc::clone(&constraints) };
    Ok(ways.into_iter().map(wants).collect())
}

/// One of each list, in every way, the last list's changing first; none: there are too many ways.
pub fn combinations<T: Clone>(lists: &[Vec<T>]) -> Option<Vec<Vec<T>>> {
    let mut ways: Vec<Vec<T>> = vec![Vec::new()];
    for list in lists {
        if ways.len().saturating_mul(list.len()) > WAYS_MAX {
            return None;
        }
        // Most requests have no alternatives.
        if let [one] = list.as_slice() {
            ways.iter_mut().for_each(|way| way.push(one.clone()));
            continue;
        }
        let with = |way: &Vec<T>| {
            list.iter().map(|one| [way.as_slice(), std::slice::from_ref(one)].concat()).collect::<Vec<_>>()
        };
        ways = ways.iter().flat_map(with).collect();
    }
    Some(ways)
}

/// A request, or one alternative of a request.
struct NamedRequest {
    name: RequestName,
    /// Where it stands.
    path: String,
    exactly: ExactDeviceRequest,
}

fn asked((at, request): (usize, &DeviceRequest)) -> Result<Vec<NamedRequest>, String> {
    let path = format!("spec.devices.requests[{at}]");
    match (&request.exactly, request.first_available.as_deref()) {
        (Some(exactly), None | Some([])) => Ok(vec![NamedRequest {
            name: RequestName::new(&request.name),
            path: format!("{path}.exactly"),
            exactly: exactly.clone(),
        }]),
        (None, Some(alternatives)) if !alternatives.is_empty() => {
            let one = |(at, sub): (usize, &DeviceSubRequest)| NamedRequest {
                name: RequestName::new(format!("{}/{}", request.name, sub.name)),
                path: format!("{path}.firstAvailable[{at}]"),
                exactly: exact(sub),
            };
            Ok(alternatives.iter().enumerate().map(one).collect())
        }
        _ => Err(format!("{path}: must have either exactly or firstAvailable")),
    }
}

/// One entry of configuration for our driver: for which requests, and what.
struct Entry<'a> {
    /// Of its parameters.
    path: String,
    requests: &'a [String],
    /// For requests of this class only.
    class: Option<&'a str>,
    params: Params,
}

impl Entry<'_> {
    fn is_for(&self, request: &NamedRequest) -> bool {
        let named = || self.requests.iter().any(|name| request.name.is_meant_by(name));
        let of_class = self.class.is_none_or(|class| class == request.exactly.device_class_name);
        of_class && (self.requests.is_empty() || named())
    }
}

/// Class entries first: later ones win.
fn configs<'a>(
    claim: &'a DeviceClaim,
    classes: &'a OurClasses,
    names: &[RequestName],
) -> Result<Vec<Entry<'a>>, String> {
    let mut entries = Vec::new();
    for (class, said) in classes.of(claim) {
        for (at, one) in said.config.iter().enumerate() {
            if let Some(opaque) = one.opaque.as_ref().filter(|opaque| opaque.driver == DRIVER) {
                let path = format!("DeviceClass {class}: spec.config[{at}].opaque.parameters");
                let params = read(&path, &opaque.parameters.0, ConfigSource::FromClass)?;
                entries.push(Entry { path, requests: &[], class: Some(class), params });
            }
        }
    }
    for (at, one) in claim.config.iter().flatten().enumerate() {
        let Some(opaque) = one.opaque.as_ref().filter(|opaque| opaque.driver == DRIVER) else { continue };
        let path = format!("spec.devices.config[{at}].opaque.parameters");
        let requests = one.requests.as_deref().unwrap_or_default();
        if let Some(unknown) = requests.iter().find(|name| !names.iter().any(|one| one.is_meant_by(name))) {
            return Err(format!("spec.devices.config[{at}].requests: the claim has no request {unknown:?}"));
        }
        let params = read(&path, &opaque.parameters.0, ConfigSource::FromClaim)?;
        entries.push(Entry { path, requests, class: None, params });
    }
    Ok(entries)
}

/// Can the claim's own parameters be read?
///
/// # Errors
/// In the words of [`wants`].
pub fn check_parameters(claim: &DeviceClaim) -> Result<(), String> {
    for (at, one) in claim.config.iter().flatten().enumerate() {
        let Some(opaque) = one.opaque.as_ref().filter(|opaque| opaque.driver == DRIVER) else { continue };
        let path = format!("spec.devices.config[{at}].opaque.parameters");
        read(&path, &opaque.parameters.0, ConfigSource::FromClaim)?;
    }
    Ok(())
}

fn read(path: &str, parameters: &Value, source: ConfigSource) -> Result<Params, String> {
    let params = decode(parameters).and_then(|params| params.check_source(source).map(|()| params));
    let params = params.map_err(|error| match error.path.as_str() {
        "parameters" => format!("{path}: {}", error.problem),
        _ => format!("{path}.{error}"),
    })?;
    match (&params, source) {
        // Nobody but the controller grants, and the controller grants in allocations only.
        (Params::Grant(_), ConfigSource::FromClass) => {
            Err(format!("{path}.kind: a ShareGrant is what the controller writes; take it out of the class"))
        }
        _ => Ok(params),
    }
}

fn want(request: &NamedRequest, classes: &OurClasses, configs: &[Entry<'_>]) -> Result<Want, String> {
    let NamedRequest { name, path, exactly } = request;
    let Some(class) = classes.get(&exactly.device_class_name) else {
        return Err(format!("{path}.deviceClassName: {}", messages::other_class(&exactly.device_class_name)));
    };
    plain(path, exactly)?;
    let gpus = match (exactly.allocation_mode.as_deref(), exactly.count) {
        (None | Some("" | "ExactCount"), count) => count.unwrap_or(1),
        (Some(mode), _) => {
            return Err(format!("{path}.allocationMode: {mode:?} {}", messages::ALLOCATION_MODE));
        }
    };
    let gpus = u32::try_from(gpus).ok().filter(|gpus| *gpus > 0);
    let gpus = gpus.ok_or_else(|| format!("{path}.count: must be at least 1"))?;
    let share = params::asked(said(request, configs)?, capacity(exactly)).map_err(|error| match (error.field(), &error) {
        (Some(field), _) => format!("{path}.{field}: {error}"),
        (None, AskedError::LimitOfWhole { field }) => format!("{path}: GpuShare.{field} {error}"),
        (None, _) => format!(
            "{path}: {error}; add a config entry for driver {DRIVER} with a GpuShare that has memory or fraction, or \
             write capacity.requests.memory in the request (Kubernetes 1.36 and newer); {}",
            messages::CAPACITY_DROPPED
        ),
    })?;
    Ok(Want {
        request: name.clone(),
        share,
        gpus,
        selectors: class.selectors.iter().cloned().chain(expressions(exactly.selectors.as_deref())).collect(),
        tolerations: exactly.tolerations.clone().unwrap_or_default().into(),
    })
}

/// Fields that mean something for the scheduler's shares only.
fn plain(path: &str, exactly: &ExactDeviceRequest) -> Result<(), String> {
    if exactly.admin_access == Some(true) {
        return Err(format!("{path}.adminAccess: {}", messages::ADMIN_ACCESS));
    }
    Ok(())
}

/// Names and quantities of a request's capacities.
fn capacity(exactly: &ExactDeviceRequest) -> impl Iterator<Item = (&str, &str)> {
    let requests = exactly.capacity.iter().flat_map(|capacity| capacity.requests.iter().flatten());
    requests.map(|(name, quantity)| (name.as_str(), quantity.0.as_str()))
}

/// The last GpuShare that is meant for the request counts, as a whole.
fn said<'a>(request: &NamedRequest, configs: &'a [Entry<'_>]) -> Result<ShareSource<'a>, String> {
    let mut last = ShareSource::Nowhere;
    for entry in configs.iter().filter(|entry| entry.is_for(request)) {
        match &entry.params {
            Params::Share(share) if entry.class.is_some() => last = ShareSource::ByClass(share),
            Params::Share(share) => last = ShareSource::ByClaim(share),
            other if messages::may_stand_beside_shares(other, entry.requests.is_empty()) => {}
            // The node would refuse it, again and again.
            other => {
                return Err(format!("{}.kind: {}", entry.path, messages::other_kind(other, &request.name)));
            }
        }
    }
    Ok(last)
}

fn constraints(claim: &DeviceClaim) -> Result<Arc<[Constraint]>, String> {
    let one = |(at, one): (usize, &DeviceConstraint)| {
        let (rule, attribute) = match (&one.match_attribute, &one.distinct_attribute) {
            (Some(attribute), None) => (Rule::Same, attribute),
            (None, Some(attribute)) => (Rule::Different, attribute),
            _ => {
                return Err(format!(
                    "spec.devices.constraints[{at}]: must have either matchAttribute or distinctAttribute; others are \
                     not known for shares"
                ));
            }
        };
        let requests = one.requests.clone().unwrap_or_default();
        Ok(Constraint { rule, attribute: attribute.clone(), requests })
    };
    claim.constraints.iter().flatten().enumerate().map(one).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::controller::classes::OurClass;
    use crate::model::names::SHARED_CLASS;
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

    fn nvidias(kind: &str, fields: Value) -> Value {
        let mut parameters = json!({"apiVersion": "resource.nvidia.com/v1beta1", "kind": kind});
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
        let wants = wants(&claim, &OurClasses::default()).unwrap().remove(0);
        assert_eq!(wants.requests[0].share.amount, Some(Amount::Memory(Bytes::from_mib(2000))));
        assert_eq!((wants.requests[0].gpus, wants.requests[1].gpus), (1, 2));
        assert_eq!(wants.requests[1].share.amount, Some(Amount::Fraction("0.5".parse().unwrap())));
        let attribute = "gpu.nvidia.com/productName".to_owned();
        assert_eq!(wants.constraints, [Constraint { rule: Rule::Same, attribute, requests: vec![] }].into());
    }

    #[test]
    fn alternatives_are_ways_to_serve_a_claim_in_their_order() {
        let sub = |name: &str| json!({"name": name, "deviceClassName": SHARED_CLASS});
        let mut small = share_of(json!({"memory": "1Gi"}));
        small["requests"] = json!(["a/small"]);
        let claim = claim(json!({
            "requests": [{"name": "a", "firstAvailable": [sub("big"), sub("small")]},
                {"name": "b", "firstAvailable": [sub("x"), sub("y")]}],
            "config": [share_of(json!({"memory": "4Gi"})), small],
            "constraints": [{"distinctAttribute": "gpu.nvidia.com/uuid", "requests": ["a", "b/y"]}],
        }));
        let ways = wants(&claim, &OurClasses::default()).unwrap();
        let names = |way: &Wants| {
            let words = way.requests.iter().map(|want| match want.share.amount {
                Some(Amount::Memory(bytes)) => format!("{}={}", want.request, bytes.mib_floor()),
                _ => String::new(),
            });
            words.collect::<Vec<_>>().join(" ")
        };
        let names: Vec<String> = ways.iter().map(names).collect();
        assert_eq!(
            names,
            ["a/big=4096 b/x=4096", "a/big=4096 b/y=4096", "a/small=1024 b/x=4096", "a/small=1024 b/y=4096"]
        );
        let constraint = &ways[0].constraints[0];
        assert_eq!(constraint.rule, Rule::Different);
        let is_for = |name: &str| constraint.is_for(&RequestName::new(name));
        assert_eq!(["a/big", "a/small", "b/x", "b/y"].map(is_for), [true, true, false, true]);
    }

    #[test]
    fn what_is_said_of_whole_gpus_in_general_is_no_mistake() {
        let claim = claim(json!({"requests": [request("a", json!({}))],
            "config": [nvidias("GpuConfig", json!({})), share_of(json!({"memory": "4Mi", "maxProcesses": 4}))]}));
        assert_eq!(
            wants(&claim, &OurClasses::default()).unwrap()[0].requests[0].share.max_processes,
            Some(4)
        );
    }

    #[test]
    fn a_class_may_say_how_much() {
        let mut classes = OurClasses::default();
        let config = serde_json::from_value(json!([share_of(json!({"memory": "1Gi"}))])).unwrap();
        classes.set(SHARED_CLASS, OurClass { config, ..OurClass::default() });
        let claim = claim(json!({"requests": [request("a", json!({}))]}));
        assert_eq!(
            wants(&claim, &classes).unwrap()[0].requests[0].share.amount,
            Some(Amount::Memory(Bytes::from_mib(1024)))
        );
    }

    #[test]
    fn the_amount_may_stand_in_the_request_itself() {
        let capacity = |quantity: &str| request("a", json!({"capacity": {"requests": {"memory": quantity}}}));
        let mut classes = OurClasses::default();
        let config =
            serde_json::from_value(json!([share_of(json!({"memory": "1Gi", "compute": 7}))])).unwrap();
        classes.set(SHARED_CLASS, OurClass { config, ..OurClass::default() });
        for (config, classes, compute) in [
            (vec![], OurClasses::default(), None),
            (vec![share_of(json!({"compute": 20}))], OurClasses::default(), Some(20)),
            (vec![share_of(json!({"memory": "20Gi"}))], OurClasses::default(), None),
            // As with a GpuShare of the claim's, what the class says is for claims that do not say it.
            (vec![], classes, Some(7)),
        ] {
            let claim = claim(json!({"requests": [capacity("20Gi")], "config": config}));
            let want = wants(&claim, &classes).unwrap().remove(0).requests.remove(0);
            assert_eq!(want.share.amount, Some(Amount::Memory(Bytes::from_mib(20_480))));
            assert_eq!(want.share.compute.map(|percent| percent.get()), compute);
        }
        let part = json!({"capacity": {"requests": {"thousandths": "250"}}});
        let claim = claim(json!({"requests": [request("a", part)]}));
        let share = wants(&claim, &OurClasses::default()).unwrap()[0].requests[0].share;
        assert_eq!(share.amount, Some(Amount::Fraction("0.25".parse().unwrap())));
    }

    #[test]
    fn what_cannot_be_placed_says_why_and_where() {
        let good = || share_of(json!({"memory": "1Gi"}));
        let with = |request: Value, config: Value| json!({"requests": [request], "config": [config]});
        let other = json!({"name": "a", "exactly": {"deviceClassName": "nic.example.com"}});
        let first = json!({"name": "a", "firstAvailable": [{"name": "x", "deviceClassName": SHARED_CLASS},
            {"name": "y", "deviceClassName": "gpu.nvidia.com"}]});
        let eight: Vec<Value> =
            (0..8).map(|n| json!({"name": format!("s{n}"), "deviceClassName": SHARED_CLASS})).collect();
        let many: Vec<Value> =
            (0..3).map(|n| json!({"name": format!("r{n}"), "firstAvailable": eight})).collect();
        let constraint = json!({"requests": [request("a", json!({}))], "config": [good()],
            "constraints": [{"requests": ["a"]}]});
        let mut for_b = good();
        for_b["requests"] = json!(["b"]);
        let grant = json!({"opaque": {"driver": DRIVER, "parameters": {
            "apiVersion": "tranche.dev/v1alpha1", "kind": "ShareGrant", "devices": [
                {"device": "gpu-0", "gpu": "GPU-0", "memory": "1Gi", "slots": 1, "isolation": "mps"}]}}});
        for (devices, words) in [
            (json!({"requests": [request("a", json!({}))]}), "does not say how much"),
            (with(request("a", json!({})), share_of(json!({"compute": 20}))), "gate DRAConsumableCapacity"),
            (
                with(request("a", json!({})), share_of(json!({"memory": "0"}))),
                "config[0].opaque.parameters.memory",
            ),
            (with(request("a", json!({})), for_b), "no request \"b\""),
            (
                with(request("a", json!({})), share_of(json!({"memory": "3Mi", "maxProcesses": 4}))),
                "config[0].opaque.parameters.maxProcesses: 3 MiB divided by 4",
            ),
            (
                json!({"requests": [request("a", json!({}))], "config": [good(), nvidias("GpuConfig", json!({
                    "sharing": {"strategy": "TimeSlicing"}}))]}),
                "config[1].opaque.parameters.kind: GpuConfig does not go with request \"a\"",
            ),
            (
                json!({"requests": [request("a", json!({}))], "config": [good(), {
                    "requests": ["a"], "opaque": nvidias("MigDeviceConfig", json!({}))["opaque"]}]}),
                "config[1].opaque.parameters.kind: MigDeviceConfig does not go with request \"a\"",
            ),
            (
                with(request("a", json!({})), json!({"opaque": {"driver": DRIVER, "parameters": 5}})),
                "config[0].opaque.parameters: ",
            ),
            (with(request("a", json!({})), grant), "ShareGrant"),
            (
                with(request("a", json!({})), share_of(json!({"fraction": 1, "maxProcesses": 4}))),
                "requests[0].exactly: GpuShare.maxProcesses limits a share, but the fraction 1 is the whole GPU",
            ),
            (with(request("a", json!({"count": 0})), good()), "count"),
            (with(request("a", json!({"count": 33})), good()), "at most 32"),
            (with(request("a", json!({"allocationMode": "All"})), good()), "allocationMode"),
            (with(request("a", json!({"adminAccess": true})), good()), "adminAccess"),
            (
                with(request("a", json!({"capacity": {"requests": {"memory": "2Gi"}}})), good()),
                "requests[0].exactly.capacity.requests[memory]: asks for 2048 MiB, but the claim's GpuShare says 1024 MiB",
            ),
            (
                with(request("a", json!({"capacity": {"requests": {"compute": "20"}}})), good()),
                "requests[0].exactly.capacity.requests[compute]",
            ),
            (with(other, good()), "two claims"),
            (with(first, good()), "requests[0].firstAvailable[1].deviceClassName: \"gpu.nvidia.com\""),
            (json!({"requests": many, "config": [good()]}), "more than 64 combinations"),
            (with(json!({"name": "a"}), good()), "either exactly or firstAvailable"),
            (constraint, "constraints[0]"),
        ] {
            let refused = wants(&claim(devices.clone()), &OurClasses::default()).unwrap_err();
            assert!(refused.contains(words), "{devices}: {refused}");
        }
    }
}
