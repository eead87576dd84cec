//! What decides whether a pod may end for another, and whether others may end for it.

use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::core::v1 as core;

use crate::controller::view::pod::DEFAULT_SCHEDULER;

/// A static pod: kubelet has it from a file, and whoever deletes what the API shows of it ends nothing.
const MIRROR: &str = "kubernetes.io/config.mirror";
/// Volcano's mark, as annotation or label: `false` keeps a pod.
const OF_VOLCANO: &str = "volcano.sh/preemptable";
/// KAI's, as label or annotation; without one pods of its scheduler stay from [`KAI_STAYS`] on.
const OF_KAI: &str = "kai.scheduler/preemptibility";
const KAI: &str = "kai-scheduler";
const KAI_STAYS: i32 = 100;
/// Bytes of a pod's labels that are kept. A pod with more is as if a budget were about it.
const LABELS_BYTES_MAX: usize = 16 << 10;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Standing {
    /// The scheduler has tried it in vain.
    pub unschedulable: bool,
    /// Pods of lower priority may end for it (`preemptionPolicy`).
    pub preempts: bool,
    /// kube-scheduler by its usual name is to bind it.
    pub is_usual: bool,
    /// It does not end for others, whatever their priority.
    pub stays: bool,
    /// In seconds since 1970. Not known: it has just been started.
    pub started: i64,
    /// When it is to have ended.
    pub ends: Option<Timestamp>,
    /// Of a pod that is bound: PodDisruptionBudgets choose by them.
    pub labels: Arc<BTreeMap<String, String>>,
}

impl Standing {
    pub fn of(object: &core::Pod, unschedulable: bool) -> Self {
        let (meta, spec) = (&object.metadata, object.spec.as_ref());
        let scheduler = spec.and_then(|spec| spec.scheduler_name.as_deref()).unwrap_or(DEFAULT_SCHEDULER);
        let text = |name: &str| {
            let of = |map: Option<&'_ BTreeMap<String, String>>| map.and_then(|all| all.get(name)).cloned();
            of(meta.annotations.as_ref()).or_else(|| of(meta.labels.as_ref()))
        };
        let priority = spec.and_then(|spec| spec.priority).unwrap_or(0);
        let of_kai = match text(OF_KAI).as_deref() {
            Some("preemptible") => false,
            Some(_) => true,
            None => scheduler == KAI && priority >= KAI_STAYS,
        };
        let of_volcano = text(OF_VOLCANO).is_some_and(|text| !text.eq_ignore_ascii_case("true"));
        let is_bound = spec.is_some_and(|spec| spec.node_name.is_some());
        let labels = meta.labels.as_ref().filter(|_| is_bound);
        let bytes = labels.into_iter().flatten().map(|(name, text)| name.len() + text.len()).sum::<usize>();
        let started = object.status.as_ref().and_then(|status| status.start_time.as_ref());
        Self {
            unschedulable,
            preempts: spec.and_then(|spec| spec.preemption_policy.as_deref()) != Some("Never"),
            is_usual: scheduler == DEFAULT_SCHEDULER,
            stays: text(MIRROR).is_some() || of_kai || of_volcano || bytes > LABELS_BYTES_MAX,
            started: started.map_or(i64::MAX, |time| time.0.as_second()),
            ends: meta.deletion_timestamp.as_ref().map(|time| time.0),
            labels: labels.filter(|_| bytes <= LABELS_BYTES_MAX).cloned().map(Arc::new).unwrap_or_default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn standing(metadata: Value, spec: Value) -> Standing {
        let pod = json!({"metadata": metadata, "spec": spec});
        Standing::of(&serde_json::from_value(pod).unwrap(), false)
    }

    #[test]
    fn marks_of_other_schedulers_keep_a_pod() {
        let spec = || json!({"containers": [], "nodeName": "n"});
        assert!(!standing(json!({}), spec()).stays);
        for (mark, text, stays) in [
            (OF_VOLCANO, "false", true),
            (OF_VOLCANO, "true", false),
            (OF_KAI, "non-preemptible", true),
            (OF_KAI, "preemptible", false),
            (MIRROR, "x", true),
        ] {
            let annotated = standing(json!({"annotations": {mark: text}}), spec());
            let labelled = standing(json!({"labels": {mark: text}}), spec());
            assert_eq!((annotated.stays, labelled.stays), (stays, stays), "{mark}: {text}");
        }
        let of_kai = |priority: i32| {
            let spec = json!({"containers": [], "nodeName": "n", "schedulerName": KAI, "priority": priority});
            standing(json!({}), spec).stays
        };
        assert!(of_kai(100) && !of_kai(75));
        assert!(!standing(json!({}), json!({"containers": [], "preemptionPolicy": "Never"})).preempts);
    }
}
