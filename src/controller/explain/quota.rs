//! What the ResourceQuotas of a namespace leave for a claim or a pod that is still to be created. As kube-apiserver counts
//! (pkg/quota/v1/evaluator/core); quotas with scopes are not looked at, which is told.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{PodSpec, ResourceQuota, ResourceRequirements};
use k8s_openapi::api::resource::v1::{DeviceClaim, DeviceRequest};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as ApiQuantity;

use crate::controller::view::class::OtherClass;
use crate::feasible;
use crate::model::quantity::Quantity;

const CLAIMS: &str = "count/resourceclaims.resource.k8s.io";
const PER_CLASS: &str = ".deviceclass.resource.k8s.io/devices";
const IMPLICIT: &str = "requests.deviceclass.resource.kubernetes.io/";
/// What allocation mode All counts as: the most results that a claim can have.
const ALL: u64 = 32;
const MILLI: u64 = 1000;

/// What an object would add to each resource of a quota, in thousandths.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct QuotaUsage(BTreeMap<String, u64>);

impl QuotaUsage {
    pub fn plus(mut self, other: Self) -> Self {
        other.0.into_iter().for_each(|(name, milli)| self.add(name, milli));
        self
    }

    fn add(&mut self, name: String, milli: u64) {
        let sum = self.0.entry(name).or_default();
        *sum = sum.saturating_add(milli);
    }

    fn count(&mut self, name: impl Into<String>, units: u64) {
        self.add(name.into(), units.saturating_mul(MILLI));
    }
}

/// Of a claim that somebody creates.
pub fn of_claim(claim: &DeviceClaim, classes: &BTreeMap<String, OtherClass>) -> QuotaUsage {
    let mut devices: BTreeMap<&str, u64> = BTreeMap::new();
    for (class, count) in claim.requests.iter().flatten().flat_map(of_request) {
        let sum = devices.entry(class).or_default();
        *sum = sum.saturating_add(count);
    }
    let mut usage = QuotaUsage::default();
    usage.count(CLAIMS, 1);
    for (class, count) in devices {
        usage.count(format!("{class}{PER_CLASS}"), count);
        usage.count(format!("{IMPLICIT}{class}"), count);
        if let Some(resource) = classes.get(class).and_then(OtherClass::resource) {
            usage.count(format!("requests.{resource}"), count);
        }
    }
    usage
}

/// Of the claim that kube-scheduler makes for so many devices of each class: the rest was counted with its pod.
pub fn of_limits<'a>(classes: impl Iterator<Item = (&'a str, u32)>) -> QuotaUsage {
    let mut usage = QuotaUsage::default();
    usage.count(CLAIMS, 1);
    classes.for_each(|(class, count)| usage.count(format!("{class}{PER_CLASS}"), count.into()));
    usage
}

/// Of each class the most devices that the request may come to.
fn of_request(request: &DeviceRequest) -> BTreeMap<&str, u64> {
    let devices = |mode: Option<&str>, count: Option<i64>| match mode {
        None | Some("" | "ExactCount") => u64::try_from(count.unwrap_or(1)).unwrap_or(0),
        Some("All") => ALL,
        Some(_) => 0,
    };
    let mut most: BTreeMap<&str, u64> = BTreeMap::new();
    let exactly = request
        .exactly
        .iter()
        .map(|one| (one.device_class_name.as_str(), devices(one.allocation_mode.as_deref(), one.count)));
    let alternatives = request
        .first_available
        .iter()
        .flatten()
        .map(|one| (one.device_class_name.as_str(), devices(one.allocation_mode.as_deref(), one.count)));
    for (class, count) in exactly.chain(alternatives) {
        let known = most.entry(class).or_default();
        *known = count.max(*known);
    }
    most
}

/// Of a pod that somebody creates.
pub fn of_pod(spec: &PodSpec) -> QuotaUsage {
    let mut usage = QuotaUsage::default();
    usage.count("pods", 1);
    usage.count("count/pods", 1);
    for (prefix, list) in [("requests.", false), ("limits.", true)] {
        for (name, milli) in feasible::all_requests(spec, &|one| chosen(one, list)) {
            let is_native = matches!(name.as_str(), "cpu" | "memory" | "ephemeral-storage");
            if !is_native && list {
                continue;
            }
            usage.add(format!("{prefix}{name}"), milli);
            if is_native && !list {
                usage.add(name, milli);
            }
        }
    }
    usage
}

type Quantities = BTreeMap<String, ApiQuantity>;

fn chosen(resources: &ResourceRequirements, limits: bool) -> Option<&Quantities> {
    if limits { resources.limits.as_ref() } else { resources.requests.as_ref() }
}

/// What keeps it from being created, in words: each resource of each quota that it would exceed.
pub fn exceeded(quotas: &[ResourceQuota], usage: &QuotaUsage) -> Vec<String> {
    quotas.iter().filter(|quota| !is_scoped(quota)).flat_map(|quota| of_quota(quota, usage)).collect()
}

/// Words about the quotas that [`exceeded`] knows nothing of.
pub fn not_looked_at(quotas: &[ResourceQuota]) -> impl Iterator<Item = String> {
    let scoped = quotas.iter().filter(|quota| is_scoped(quota));
    scoped.map(|quota| {
        let name = quota.metadata.name.as_deref().unwrap_or_default();
        format!("ResourceQuota {name} has scopes, which are not looked at")
    })
}

fn is_scoped(quota: &ResourceQuota) -> bool {
    let spec = quota.spec.as_ref();
    spec.is_some_and(|spec| spec.scope_selector.is_some() || spec.scopes.iter().flatten().next().is_some())
}

fn of_quota(quota: &ResourceQuota, usage: &QuotaUsage) -> Vec<String> {
    let status = quota.status.as_ref();
    let hard = status.and_then(|status| status.hard.as_ref());
    let hard = hard.or_else(|| quota.spec.as_ref()?.hard.as_ref());
    let used = status.and_then(|status| status.used.as_ref());
    let mut words = Vec::new();
    for (name, limit) in hard.into_iter().flatten() {
        let Some(needed) = usage.0.get(name).filter(|needed| **needed > 0) else { continue };
        let taken = used.and_then(|used| used.get(name));
        let (Some(most), Some(has)) = (milli(limit), taken.map_or(Some(0), milli)) else { continue };
        if has.saturating_add(*needed) > most {
            words.push(format!(
                "ResourceQuota {}: {name}: {} of {} used, {} needed",
                quota.metadata.name.as_deref().unwrap_or_default(),
                taken.map_or("0", |taken| taken.0.as_str()),
                limit.0,
                units(name, *needed)
            ));
        }
    }
    words
}

fn milli(quantity: &ApiQuantity) -> Option<u64> {
    quantity.0.parse::<Quantity>().ok()?.millis_ceil()
}

/// Thousandths, as people write them.
fn units(name: &str, milli: u64) -> String {
    match (milli / MILLI, milli % MILLI) {
        (whole, 0) if name.ends_with("memory") || name.ends_with("storage") => {
            crate::model::quantity::Bytes(whole).to_quantity_string()
        }
        (whole, 0) => whole.to_string(),
        _ => format!("{milli}m"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn quota(hard: Value, used: Value) -> ResourceQuota {
        serde_json::from_value(json!({"metadata": {"name": "team"}, "spec": {"hard": hard},
            "status": {"hard": hard, "used": used}}))
        .unwrap()
    }

    fn gpu_class() -> BTreeMap<String, OtherClass> {
        let class = json!({"metadata": {"name": "gpu.nvidia.com"}, "spec": {"extendedResourceName": "nvidia.com/gpu"}});
        [("gpu.nvidia.com".to_owned(), OtherClass::of(&serde_json::from_value(class).unwrap()))].into()
    }

    #[test]
    fn a_claim_counts_by_its_classes_and_of_alternatives_the_most() {
        let claim: DeviceClaim = serde_json::from_value(json!({"requests": [
            {"name": "a", "exactly": {"deviceClassName": "gpu.nvidia.com", "count": 2}},
            {"name": "b", "firstAvailable": [
                {"name": "x", "deviceClassName": "gpu.nvidia.com", "count": 1},
                {"name": "y", "deviceClassName": "gpu.nvidia.com", "allocationMode": "All"}]}]}))
        .unwrap();
        let usage = of_claim(&claim, &gpu_class());
        let full =
            |name: &str, hard: &str| exceeded(&[quota(json!({name: hard}), json!({name: "0"}))], &usage);
        for name in [
            "gpu.nvidia.com.deviceclass.resource.k8s.io/devices",
            "requests.deviceclass.resource.kubernetes.io/gpu.nvidia.com",
            "requests.nvidia.com/gpu",
        ] {
            assert_eq!(full(name, "34"), [""; 0]);
            assert_eq!(full(name, "33"), [format!("ResourceQuota team: {name}: 0 of 33 used, 34 needed")]);
        }
        assert_eq!(full(CLAIMS, "1"), [""; 0]);
        assert_eq!(full(CLAIMS, "0").len(), 1);
        assert_eq!(full("other.deviceclass.resource.k8s.io/devices", "0"), [""; 0]);
    }

    #[test]
    fn a_pod_counts_with_what_its_containers_ask() {
        let spec: PodSpec = serde_json::from_value(json!({"containers": [{"name": "a", "resources": {
            "requests": {"cpu": "500m", "memory": "2Gi", "nvidia.com/gpu": "1"},
            "limits": {"memory": "4Gi", "nvidia.com/gpu": "1"}}}]}))
        .unwrap();
        let usage = of_pod(&spec);
        let told = |name: &str, hard: &str, used: &str| {
            exceeded(&[quota(json!({name: hard}), json!({name: used}))], &usage).join("; ")
        };
        assert_eq!(told("requests.cpu", "2", "1500m"), "");
        assert_eq!(
            told("requests.cpu", "2", "1600m"),
            "ResourceQuota team: requests.cpu: 1600m of 2 used, 500m needed"
        );
        assert_eq!(told("cpu", "2", "2"), "ResourceQuota team: cpu: 2 of 2 used, 500m needed");
        assert_eq!(
            told("limits.memory", "10Gi", "7Gi"),
            "ResourceQuota team: limits.memory: 7Gi of 10Gi used, 4Gi needed"
        );
        assert_eq!(
            told("requests.nvidia.com/gpu", "1", "1"),
            "ResourceQuota team: requests.nvidia.com/gpu: 1 of 1 used, 1 needed"
        );
        assert_eq!(told("pods", "3", "3"), "ResourceQuota team: pods: 3 of 3 used, 1 needed");
        let mut scoped = quota(json!({"pods": "0"}), json!({"pods": "0"}));
        scoped.spec.as_mut().unwrap().scopes = Some(vec!["BestEffort".to_owned()]);
        let all = [scoped, quota(json!({"pods": "3"}), json!({"pods": "0"}))];
        assert_eq!(exceeded(&all[..1], &usage), [""; 0]);
        let told: Vec<_> = not_looked_at(&all).collect();
        assert_eq!(told, ["ResourceQuota team has scopes, which are not looked at"]);
    }
}
