//! Taints and tolerations, cordon, and the Ready condition.

use k8s_openapi::api::core::v1::{Taint, Toleration};

use super::{Demands, Node, Unfit};

const UNSCHEDULABLE: &str = "node.kubernetes.io/unschedulable";
const NOT_READY: &str = "node.kubernetes.io/not-ready";
const UNREACHABLE: &str = "node.kubernetes.io/unreachable";
const NO_SCHEDULE: &str = "NoSchedule";
const NO_EXECUTE: &str = "NoExecute";

/// A cordoned node carries the taint, too; but only once the node controller has seen the cordon.
pub fn cordoned(pod: &Demands, node: &Node) -> Option<Unfit> {
    (node.is_cordoned && !tolerates(pod, UNSCHEDULABLE, "", NO_SCHEDULE)).then_some(Unfit::Cordoned)
}

/// kube-scheduler only looks at the taints that the node controller makes of this condition. Looking at the
/// condition itself saves the moments until they are there; a pod that tolerates the taint is let through. A node
/// without the condition counts as ready, as there.
pub fn not_ready(pod: &Demands, node: &Node) -> Option<Unfit> {
    let ready = node.ready.as_ref()?;
    let taint = match ready.status.as_str() {
        "True" => return None,
        "False" => NOT_READY,
        _ => UNREACHABLE,
    };
    if tolerates(pod, taint, "", NO_SCHEDULE) {
        return None;
    }
    let told = !ready.words.is_empty();
    Some(Unfit::NotReady(if told { ready.words.clone() } else { format!("Ready is {}", ready.status) }))
}

/// The first taint that keeps the pod off. `PreferNoSchedule` only matters for scores.
pub fn untolerated(pod: &Demands, node: &Node) -> Option<Unfit> {
    let keeps_off = |taint: &&Taint| {
        let value = taint.value.as_deref().unwrap_or_default();
        [NO_SCHEDULE, NO_EXECUTE].contains(&taint.effect.as_str())
            && !tolerates(pod, &taint.key, value, &taint.effect)
    };
    let Taint { key, value, effect, .. } = node.taints.iter().find(keeps_off)?;
    let value = value.clone().unwrap_or_default();
    Some(Unfit::Taint { key: key.clone(), value, effect: effect.clone() })
}

fn tolerates(pod: &Demands, key: &str, value: &str, effect: &str) -> bool {
    pod.tolerations().iter().any(|toleration| matches(toleration, key, value, effect))
}

/// An empty key or effect means any. Operators of later releases (`Lt`, `Gt`) tolerate nothing: the pod is kept
/// off a node that it might use, never put on one that it may not.
fn matches(toleration: &Toleration, key: &str, value: &str, effect: &str) -> bool {
    let any_or =
        |wanted: &Option<String>, is: &str| wanted.as_deref().is_none_or(|w| w.is_empty() || w == is);
    if !any_or(&toleration.effect, effect) || !any_or(&toleration.key, key) {
        return false;
    }
    match toleration.operator.as_deref().unwrap_or_default() {
        "" | "Equal" => toleration.value.as_deref().unwrap_or_default() == value,
        "Exists" => true,
        _ => false,
    }
}
