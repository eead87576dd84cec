//! What the webhook tells the controller of a pod's share: one annotation, and the claim that follows from it.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::{CapacityRequirements, ResourceClaimSpec};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use thiserror::Error;

use crate::admission::classes::OF_THE_SCHEDULER;
use crate::model::names::{DRIVER, SHARED_CLASS, WORKLOAD_ANNOTATION, is_dns_subdomain};
use crate::params::{self, Amount, GpuShare, Params, ParamsError};

pub use crate::model::names::SHARE_ANNOTATION;

/// In place of the annotation's text, where a queue has admitted the pod without counting its share. The webhook writes no
/// such text.
pub const UNCOUNTED: &str = "uncounted";
/// The only request of such a claim.
const REQUEST: &str = "gpu";
/// The API server allocates no more devices to one claim (KEP-4381).
pub(super) const COUNT_MAX: u32 = 32;

/// Why an annotation makes no claim. The text is for the pod's events.
#[derive(Debug, Error)]
pub enum ShareAnnotationError {
    #[error(
        "the annotation {SHARE_ANNOTATION} cannot be read; it is written by Tranche's webhook: remove it and ask \
         with gpu-fraction or gpu-memory"
    )]
    Unreadable(#[source] serde_json::Error),
    #[error("the annotation {SHARE_ANNOTATION}: share")]
    Params(#[source] ParamsError),
    #[error(
        "the annotation {SHARE_ANNOTATION}: share is a {0} without an amount; it is a GpuShare with memory or fraction"
    )]
    NoShare(&'static str),
    #[error(
        "the annotation {SHARE_ANNOTATION}: share says more than memory or fraction, which is all that gpu-memory and \
         gpu-fraction can ask for; remove the rest, or create a claim with it"
    )]
    More,
    #[error(
        "the annotation {SHARE_ANNOTATION} makes no claim: a queue of Kueue has admitted what this pod is of \
         ({WORKLOAD_ANNOTATION}) without counting the share; name a ResourceClaimTemplate in the pod's template instead"
    )]
    Uncounted,
    #[error("the annotation {SHARE_ANNOTATION}: count is {0}; a claim has 1 to {COUNT_MAX} GPUs")]
    Count(u32),
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    /// The parameters as a claim's author would write them.
    share: Value,
    count: u32,
}

/// The DeviceClasses of the claims that KAI's annotations ask for: of amounts of memory, and of fractions. A queue counts a
/// class in one unit. Who may write annotations does not choose among classes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShareClasses {
    memory: String,
    fraction: String,
}

impl Default for ShareClasses {
    fn default() -> Self {
        Self { memory: SHARED_CLASS.to_owned(), fraction: SHARED_CLASS.to_owned() }
    }
}

impl ShareClasses {
    /// Names for which [`Self::checked`] stands.
    pub fn new(memory: String, fraction: String) -> Self {
        Self { memory, fraction }
    }

    /// A class that shares can be of, as far as its name tells.
    ///
    /// # Errors
    /// In words: it is no name of an object, or that of a class that is always kube-scheduler's.
    pub fn checked(name: &str) -> Result<String, String> {
        match name {
            _ if OF_THE_SCHEDULER.contains(&name) => Err(format!(
                "DeviceClass {name} is kube-scheduler's, which gives whole devices of it; name {SHARED_CLASS} or a class \
                 of your own that the controller places"
            )),
            _ if !is_dns_subdomain(name) => Err(format!(
                "{name:?} is not a valid name of a DeviceClass; write one such as shares.example.com"
            )),
            _ => Ok(name.to_owned()),
        }
    }

    pub fn has(&self, class: &str) -> bool {
        self.memory == class || self.fraction == class
    }

    fn of(&self, amount: &Amount) -> &str {
        match amount {
            Amount::Memory(_) => &self.memory,
            Amount::Fraction(_) => &self.fraction,
        }
    }
}

/// The annotation's text.
pub(super) fn annotation(share: Value, count: u32) -> String {
    // Fields in the order in which they are declared: the same text for the same share.
    serde_json::to_string(&Written { share, count }).unwrap_or_default()
}

/// `GpuShare` parameters that say so much: `memory: 2000Mi` or `fraction: "0.25"`.
pub(super) fn parameters(field: &str, amount: &str) -> Value {
    json!({"apiVersion": "tranche.dev/v1alpha1", "kind": "GpuShare", field: amount})
}

/// The claim that the annotation asks for: one request of the class for such amounts, `count` GPUs of one node with the
/// same share on each.
///
/// # Errors
/// The text is none that the webhook writes: anyone who may create a pod may write annotations, and is to get nothing by
/// them that the webhook would not have given.
pub fn claim_spec(
    annotation: &str,
    classes: &ShareClasses,
) -> Result<ResourceClaimSpec, ShareAnnotationError> {
    if annotation == UNCOUNTED {
        return Err(ShareAnnotationError::Uncounted);
    }
    let Written { share, count } =
        serde_json::from_str(annotation).map_err(ShareAnnotationError::Unreadable)?;
    let class = match params::decode(&share).map_err(ShareAnnotationError::Params)? {
        Params::Share(GpuShare {
            amount: Some(amount),
            compute: None,
            minimum_isolation: None,
            max_processes: None,
        }) => classes.of(&amount),
        Params::Share(GpuShare { amount: Some(_), .. }) => return Err(ShareAnnotationError::More),
        other => return Err(ShareAnnotationError::NoShare(other.kind())),
    };
    if !(1..=COUNT_MAX).contains(&count) {
        return Err(ShareAnnotationError::Count(count));
    }
    let spec = json!({"devices": {
        "requests": [{"name": REQUEST, "exactly": {
            "deviceClassName": class, "allocationMode": "ExactCount", "count": count}}],
        "config": [{"requests": [REQUEST], "opaque": {"driver": DRIVER, "parameters": share}}]}});
    serde_json::from_value(spec).map_err(ShareAnnotationError::Unreadable)
}

/// The same for a template that a queue counts: the request says the amount itself as well, in MiB, or in thousandths of a
/// GPU where the fraction is so many.
///
/// # Errors
/// As [`claim_spec`].
pub fn template_spec(
    annotation: &str,
    classes: &ShareClasses,
) -> Result<ResourceClaimSpec, ShareAnnotationError> {
    let mut spec = claim_spec(annotation, classes)?;
    let devices = spec.devices.get_or_insert_default();
    let share = devices.config.iter().flatten().filter_map(|one| one.opaque.as_ref()).next();
    let share = share.and_then(|opaque| match params::decode(&opaque.parameters.0) {
        Ok(Params::Share(share)) => share.amount,
        _ => None,
    });
    let Some((name, quantity)) = share.and_then(params::capacity_of) else { return Ok(spec) };
    for exactly in devices.requests.iter_mut().flatten().filter_map(|request| request.exactly.as_mut()) {
        let requests = Some(BTreeMap::from([(name.to_owned(), Quantity(quantity.clone()))]));
        exactly.capacity = Some(CapacityRequirements { requests });
    }
    Ok(spec)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admission::{KnownClasses, problems};

    #[test]
    fn the_claim_says_what_the_annotation_says_and_passes_the_webhook() {
        let text = annotation(parameters("memory", "2000Mi"), 2);
        assert!(text.starts_with(r#"{"share":{"#) && text.ends_with(r#""count":2}"#), "{text}");
        let spec = serde_json::to_value(claim_spec(&text, &ShareClasses::default()).unwrap()).unwrap();
        assert_eq!(problems(&spec, "spec", &KnownClasses::of(&[])), []);
        let request = &spec["devices"]["requests"][0]["exactly"];
        assert_eq!((&request["deviceClassName"], &request["count"]), (&json!(SHARED_CLASS), &json!(2)));
        assert_eq!(spec["devices"]["config"][0]["opaque"]["parameters"]["memory"], "2000Mi");
    }

    #[test]
    fn a_template_says_its_amount_where_a_queue_counts_it_and_passes_the_webhook() {
        for (field, amount, capacity) in [
            ("memory", "2000Mi", json!({"memory": "2000Mi"})),
            ("fraction", "0.25", json!({"thousandths": "250"})),
            ("fraction", "0.333333333", Value::Null),
        ] {
            let text = annotation(parameters(field, amount), 2);
            let spec = serde_json::to_value(template_spec(&text, &ShareClasses::default()).unwrap()).unwrap();
            assert_eq!(spec["devices"]["requests"][0]["exactly"]["capacity"]["requests"], capacity);
            assert_eq!(spec["devices"]["config"][0]["opaque"]["parameters"][field], amount);
            assert_eq!(problems(&spec, "spec", &KnownClasses::of(&[])), []);
        }
        assert!(
            claim_spec(UNCOUNTED, &ShareClasses::default())
                .unwrap_err()
                .to_string()
                .contains("without counting the share")
        );
    }

    #[test]
    fn annotations_of_other_hands_are_refused_with_words() {
        let of = |share: Value, count: i64| json!({"share": share, "count": count}).to_string();
        let with = |field: &str, value: Value| {
            let mut share = parameters("memory", "1Gi");
            share[field] = value;
            share
        };
        let gpu_config = json!({"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig"});
        for (text, words) in [
            ("".to_owned(), "cannot be read"),
            ("{}".to_owned(), "cannot be read"),
            (of(parameters("memory", "1Gi"), -1), "cannot be read"),
            (json!({"share": {}, "count": 1, "node": "a"}).to_string(), "cannot be read"),
            (of(json!({}), 1), "share"),
            (of(parameters("memory", "0"), 1), "share"),
            (of(gpu_config, 1), "GpuConfig"),
            (of(with("maxProcesses", json!(48)), 1), "says more than memory or fraction"),
            (of(with("compute", json!(100)), 1), "says more than memory or fraction"),
            (of(with("minimumIsolation", json!("none")), 1), "says more than memory or fraction"),
            (of(parameters("memory", "1Gi"), 0), "count is 0"),
            (of(parameters("memory", "1Gi"), 33), "count is 33"),
        ] {
            let error = claim_spec(&text, &ShareClasses::default()).expect_err(&text);
            assert!(error.to_string().contains(words), "{text}: {error}");
        }
    }

    #[test]
    fn amounts_and_fractions_may_have_classes_of_their_own_and_none_of_the_schedulers() {
        let classes = ShareClasses::new("gib.example.com".to_owned(), "parts.example.com".to_owned());
        assert!(classes.has("gib.example.com") && !classes.has(SHARED_CLASS));
        for (field, amount, class) in
            [("memory", "2000Mi", "gib.example.com"), ("fraction", "0.25", "parts.example.com")]
        {
            let text = annotation(parameters(field, amount), 1);
            for spec in [claim_spec(&text, &classes), template_spec(&text, &classes)] {
                let spec = serde_json::to_value(spec.unwrap()).unwrap();
                assert_eq!(spec["devices"]["requests"][0]["exactly"]["deviceClassName"], class);
            }
        }
        assert_eq!(ShareClasses::checked("gib.example.com").as_deref(), Ok("gib.example.com"));
        for (name, words) in [
            ("gpu.nvidia.com", "is kube-scheduler's"),
            ("mig.nvidia.com", "is kube-scheduler's"),
            ("Team A", "is not a valid name of a DeviceClass"),
            ("", "is not a valid name of a DeviceClass"),
        ] {
            assert!(ShareClasses::checked(name).unwrap_err().contains(words), "{name}");
        }
    }
}
