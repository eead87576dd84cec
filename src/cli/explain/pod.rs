//! What a pod's own object tells: that it has ended, how its containers fare, what it needs and does not have. Reads one
//! object and decides nothing else.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{ContainerStatus, Pod};

use crate::cluster::ToldEvent;
use crate::model::names::{OPT_IN_LABEL, OPT_IN_VALUE};

/// What KAI's users write on pods; the webhook makes a claim of it where it is asked to.
const KAI: [&str; 2] = ["gpu-memory", "gpu-fraction"];
/// Events of one object that are told.
const EVENTS_TOLD: usize = 5;
/// Characters of a message that are shown.
const MESSAGE_CHARS_MAX: usize = 400;
/// What the controller told: it is told of anew here.
const OF_CONTROLLER: &str = "WaitingForGpuShare";
/// kube-scheduler found no node. Of a pod that is bound that is history.
const OF_SCHEDULER: &str = "FailedScheduling";

/// A template that a pod names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Template {
    Missing,
    /// In words what of the namespace's quotas a claim of it would exceed.
    There {
        full: Vec<String>,
    },
    /// The caller may not read it.
    Unknown,
}

/// Words for a pod that has ended.
pub fn ended(pod: &Pod) -> Option<String> {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref())?;
    matches!(phase, "Succeeded" | "Failed")
        .then(|| format!("the pod has ended ({phase}): its devices were released"))
}

/// Names of templates of which the pod has no claim yet.
pub fn templates(pod: &Pod) -> Vec<String> {
    unmade(pod).map(|(_, template)| template.to_owned()).collect()
}

/// The pod's entries whose claims were not made yet, with their templates.
fn unmade(pod: &Pod) -> impl Iterator<Item = (&str, &str)> {
    let entries = pod.spec.iter().flat_map(|spec| spec.resource_claims.iter().flatten());
    let made = || pod.status.iter().flat_map(|status| status.resource_claim_statuses.iter().flatten());
    let unmade = entries.filter(move |entry| {
        entry.resource_claim_name.is_none() && made().all(|made| made.name != entry.name)
    });
    unmade
        .map(|entry| (entry.name.as_str(), entry.resource_claim_template_name.as_deref().unwrap_or_default()))
}

/// Claims that the pod is to have and does not name yet. `found`: what is known of their templates.
pub fn lacks(pod: &Pod, found: &BTreeMap<String, Template>) -> Vec<String> {
    let mut lacks = Vec::new();
    let entries = || pod.spec.iter().flat_map(|spec| spec.resource_claims.iter().flatten());
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    for (entry, template) in unmade(pod) {
        let begin = format!(
            "kube-controller-manager has not created the claim of its entry {entry} from the template {template} yet"
        );
        lacks.push(match found.get(template) {
            Some(Template::Missing) => {
                format!("{begin}: there is no ResourceClaimTemplate {template} in namespace {namespace}; create it")
            }
            Some(Template::There { full }) if !full.is_empty() => format!("{begin}: {}", full.join("; ")),
            Some(Template::There { .. }) => format!("{begin}: the pod's events tell why"),
            Some(Template::Unknown) | None => format!(
                "{begin}: does the template exist? (kubectl -n {namespace} get resourceclaimtemplates)"
            ),
        });
    }
    if let (Some(kai), None) = (kai(pod), entries().next()) {
        lacks.push(format!(
            "the pod has the annotation {kai} and no claim: the webhook makes one for pods that are created in a \
             namespace labelled {OPT_IN_LABEL}={OPT_IN_VALUE}"
        ));
    }
    lacks
}

fn kai(pod: &Pod) -> Option<&'static str> {
    let annotations = pod.metadata.annotations.as_ref()?;
    KAI.into_iter().find(|name| annotations.contains_key(*name))
}

/// Of a pod that is not created the webhook has made no claim.
pub fn kai_in_file(pod: &Pod) -> Option<String> {
    let kai = kai(pod)?;
    Some(format!(
        "the annotation {kai}: what the webhook would make of it is not looked at; give the pod a claim with a GpuShare, or \
         create the pod and ask for pod/NAME"
    ))
}

/// Containers that have ended with an error, in words.
pub fn ends(pod: &Pod) -> Vec<String> {
    let status = pod.status.iter();
    let of = |status: &ContainerStatus| {
        let state = |state: Option<&k8s_openapi::api::core::v1::ContainerState>| state?.terminated.clone();
        let ended = state(status.state.as_ref()).or_else(|| state(status.last_state.as_ref()))?;
        if ended.exit_code == 0 {
            return None;
        }
        let reason = ended.reason.filter(|reason| reason != "Error");
        let reason = reason.map_or(String::new(), |reason| format!(" ({reason})"));
        let restarts = match status.restart_count {
            0 => String::new(),
            1 => "; it was started again once".to_owned(),
            times => format!("; it was started again {times} times"),
        };
        let signal = match ended.exit_code - 128 {
            signal @ 1..=64 => format!(", which is signal {signal}"),
            _ => String::new(),
        };
        let (name, code) = (&status.name, ended.exit_code);
        Some(format!("container {name} ended with exit code {code}{signal}{reason}{restarts}"))
    };
    let all = status.flat_map(|status| {
        status.init_container_statuses.iter().flatten().chain(status.container_statuses.iter().flatten())
    });
    all.filter_map(of).collect()
}

/// Of what was told of an object what is worth to be told again, the newest of each reason, the newest last.
pub fn worth_telling(told: &[ToldEvent], is_bound: bool) -> Vec<ToldEvent> {
    let mut worth: Vec<ToldEvent> = Vec::new();
    for one in told.iter().filter(|one| one.is_warning && one.reason != OF_CONTROLLER) {
        if is_bound && one.reason == OF_SCHEDULER {
            continue;
        }
        worth.retain(|other| other.reason != one.reason);
        let message = match one.message.char_indices().nth(MESSAGE_CHARS_MAX) {
            Some((end, _)) => format!("{}…", &one.message[..end]),
            None => one.message.clone(),
        };
        worth.push(ToldEvent { message, ..one.clone() });
    }
    worth.drain(..worth.len().saturating_sub(EVENTS_TOLD));
    worth
}
