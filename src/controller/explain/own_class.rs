//! What the selectors of an administrator's class have to do with a share that finds no place.

use k8s_openapi::api::resource::v1::DeviceClaim;

use super::chosen::Spent;
use crate::controller::core::Core;
use crate::controller::view::PublishedGpu;
use crate::select::Selector;

/// Why there is no place, the controller having said this: because of a class's selectors, if they choose nothing.
pub(super) fn words(core: &Core, claim: &DeviceClaim, said: &str) -> String {
    unmatched(core, claim).unwrap_or_else(|| said.to_owned())
}

/// Words for the first class of the claim whose selectors choose none of the cluster's shareable GPUs. None: each
/// chooses one at least, or has no selectors of its own.
fn unmatched(core: &Core, claim: &DeviceClaim) -> Option<String> {
    let gpus = || core.view.nodes().flat_map(|(_, node)| node.gpus.values());
    let mut spent = Spent::default();
    core.view.classes().of(claim).into_iter().find_map(|(name, class)| {
        let compiled = class.selectors.iter().map(|text| Selector::compile(text));
        let selectors: Vec<Selector> = match compiled.collect() {
            Ok(selectors) => selectors,
            Err(error) => return Some(format!("DeviceClass {name}: {error}")),
        };
        let mut chooses =
            |gpu: &PublishedGpu| selectors.iter().all(|one| spent.on(one, &gpu.facts).unwrap_or(false));
        if selectors.is_empty() || gpus().any(|gpu| chooses(gpu)) {
            return None;
        }
        let count = gpus().count();
        let s = if count == 1 { "" } else { "s" };
        Some(format!(
            "the selectors of DeviceClass {name} choose none of {count} shareable GPU{s} of the cluster"
        ))
    })
}
