//! Namespaces → what their annotations let shares come to, and what they come to, summed as the controller does
//! ([`crate::controller::bounds`]). Pure.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::api::resource::v1::ResourceClaim;
use serde::Serialize;

use super::map::{granted, is_hold};
use crate::controller::bounds::{Amounts, Bounds};
use crate::model::names::DRIVER;

/// A namespace that has a bound.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NamespaceBounds {
    pub name: String,
    /// What shares and MIG devices of the controller's are granted, in the whole cluster.
    #[serde(rename = "usedMiB")]
    pub used_mib: u64,
    /// Each share counts once for each GPU that it is on.
    pub used_gpus: u64,
    /// None: no bound of memory, or one that cannot be read.
    #[serde(rename = "maxMiB")]
    pub max_mib: Option<u64>,
    pub max_gpus: Option<u64>,
    /// Why the controller places nothing here at all: annotations that cannot be read.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<String>,
}

/// Those that have a bound, by name.
pub fn bounds(namespaces: &[Namespace], claims: &[ResourceClaim]) -> Vec<NamespaceBounds> {
    let of = |namespace: &Namespace| Bounds::of(namespace.metadata.annotations.as_ref());
    let bounded = namespaces.iter().map(|one| (one, of(one))).filter(|(_, bounds)| !bounds.is_none());
    let mut found: BTreeMap<&str, NamespaceBounds> = BTreeMap::new();
    for (namespace, bounds) in bounded {
        let name = namespace.metadata.name.as_deref().unwrap_or_default();
        let entry = NamespaceBounds {
            name: name.to_owned(),
            used_mib: 0,
            used_gpus: 0,
            max_mib: bounds.max_mib(),
            max_gpus: bounds.max_gpus(),
            problems: bounds.problems().collect(),
        };
        found.insert(name, entry);
    }
    for claim in claims {
        let namespace = claim.metadata.namespace.as_deref().unwrap_or_default();
        if let Some(entry) = found.get_mut(namespace) {
            let Amounts { mib, gpus } = amounts(claim);
            entry.used_mib = entry.used_mib.saturating_add(mib);
            entry.used_gpus = entry.used_gpus.saturating_add(gpus);
        }
    }
    found.into_values().collect()
}

/// What the controller gave a claim.
fn amounts(claim: &ResourceClaim) -> Amounts {
    let allocation = claim.status.as_ref().and_then(|status| status.allocation.as_ref());
    let devices = allocation.and_then(|allocation| allocation.devices.as_ref()).filter(|_| !is_hold(claim));
    let Some(devices) = devices else { return Amounts::default() };
    let configs = devices.config.as_deref().unwrap_or_default();
    let ours = devices.results.iter().flatten().filter(|result| result.driver == DRIVER);
    ours.filter_map(|result| granted(result, configs))
        .map(|device| Amounts { mib: device.memory.mib_ceil(), gpus: 1 })
        .fold(Amounts::default(), Amounts::plus)
}
