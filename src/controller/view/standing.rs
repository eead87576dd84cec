//! What decides whether a pod may end for another, and whether others may end for it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1 as core;

use crate::controller::view::pod::DEFAULT_SCHEDULER;
use crate::feasible::PodLabels;

/// A static pod: kubelet has it from a file, and whoever deletes what the API shows of it ends nothing.
const MIRROR: &str = "kubernetes.io/config.mirror";
/// Volcano's mark, as annotation or label: `false` keeps a pod.
const OF_VOLCANO: &str = "volcano.sh/preemptable";
/// KAI's, as label or annotation; without one pods of its scheduler stay from [`KAI_STAYS`] on.
const OF_KAI: &str = "kai.scheduler/preemptibility";
const KAI: &str = "kai-scheduler";
const KAI_STAYS: i32 = 100;
/// Bytes of a pod's labels that are kept. A pod with more is as if a budget were about it, and no selector is about it.
const LABELS_BYTES_MAX: usize = 16 << 10;

/// The reason in the condition `PodScheduled` of a pod for which its scheduler has found no node. Other reasons
/// (`SchedulingGated`, `SchedulerError`) say nothing of room.
const UNSCHEDULABLE: &str = "Unschedulable";
/// Volcano's for pods of a group that starts together: one would fit, or was not looked at since another does not.
const BESIDE_ANOTHER: [&str; 2] = ["Schedulable", "Undetermined"];
/// What kube-scheduler says of a pod begins with `0/N nodes are available:`.
const OF_KUBE_SCHEDULER: (&str, &str) = ("0/", " nodes are available:");
/// What follows says what its own preemption came to.
const OF_PREEMPTION: &str = "preemption:";
/// kube-scheduler's words (1.34.4, 1.37.0) for what pods that end may cure here: devices, claims, resources, number of
/// pods. It looks at claims last of all, so that one of these words means that nothing else is in the way on some node.
const OF_ROOM: [&str; 5] = ["claim", "device", "insufficient ", "too many pods", "cannot fit resource"];
/// Volumes are no devices.
const OF_VOLUMES: &str = "persistentvolumeclaim";
/// What the API server writes where a pod does not say how long it takes to end.
const GRACE: Duration = Duration::from_secs(30);
/// Bytes of the message that are read.
const MESSAGE_BYTES_MAX: usize = 16 << 10;

/// What its scheduler says of a pod (condition `PodScheduled`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tried {
    /// Nothing of room.
    No,
    /// Its group waits for another of its pods (Volcano).
    BesideAnother,
    /// No node has room for it, or nobody knows here what it waits for.
    InVain,
    /// Something else keeps it off all nodes: affinity to pods, a volume.
    ForOther,
}

impl Tried {
    fn of(object: &core::Pod) -> Self {
        let conditions = object.status.iter().flat_map(|status| status.conditions.iter().flatten());
        let refused = |one: &&core::PodCondition| one.type_ == "PodScheduled" && one.status == "False";
        let Some(found) = conditions.into_iter().find(refused) else { return Self::No };
        match found.reason.as_deref() {
            Some(UNSCHEDULABLE) if waits_for_other(found.message.as_deref().unwrap_or_default()) => {
                Self::ForOther
            }
            Some(UNSCHEDULABLE) => Self::InVain,
            Some(reason) if BESIDE_ANOTHER.contains(&reason) => Self::BesideAnother,
            Some(_) | None => Self::No,
        }
    }
}

/// kube-scheduler says so. Of other schedulers' words nothing is made.
fn waits_for_other(message: &str) -> bool {
    let (before, after) = OF_KUBE_SCHEDULER;
    let Some((nodes, why)) = message.strip_prefix(before).and_then(|rest| rest.split_once(after)) else {
        return false;
    };
    if nodes.is_empty() || !nodes.bytes().all(|byte| byte.is_ascii_digit()) || why.len() > MESSAGE_BYTES_MAX {
        return false;
    }
    let why = why.split_once(OF_PREEMPTION).map_or(why, |(why, _)| why);
    let why = why.to_ascii_lowercase().replace(OF_VOLUMES, "");
    !OF_ROOM.iter().any(|word| why.contains(word))
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Standing {
    pub priority: i32,
    pub tried: Tried,
    /// Pods of lower priority may end for it (`preemptionPolicy`).
    pub preempts: bool,
    /// kube-scheduler by its usual name is to bind it.
    pub is_usual: bool,
    /// It does not end for others, whatever their priority.
    pub stays: bool,
    /// In seconds since 1970. Not known: it has just been started.
    pub started: i64,
    /// What it is given to end (`terminationGracePeriodSeconds`).
    pub grace: Duration,
    /// When it is to have ended.
    pub ends: Option<Timestamp>,
    /// PodDisruptionBudgets choose by them, and other pods. None: they are too long.
    pub labels: Option<Arc<PodLabels>>,
}

impl Standing {
    pub fn of(object: &core::Pod) -> Self {
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
        let labels = meta.labels.iter().flatten().map(|(name, text)| (name.as_str(), text.as_str()));
        let bytes = labels.clone().map(|(name, text)| name.len() + text.len()).sum::<usize>();
        let is_kept = bytes <= LABELS_BYTES_MAX;
        let grace = spec.and_then(|spec| spec.termination_grace_period_seconds);
        let grace = grace.and_then(|seconds| u64::try_from(seconds).ok());
        let started = object.status.as_ref().and_then(|status| status.start_time.as_ref());
        Self {
            priority,
            tried: Tried::of(object),
            preempts: spec.and_then(|spec| spec.preemption_policy.as_deref()) != Some("Never"),
            is_usual: scheduler == DEFAULT_SCHEDULER,
            stays: text(MIRROR).is_some() || of_kai || of_volcano || (is_bound && !is_kept),
            started: started.map_or(i64::MAX, |time| time.0.as_second()),
            grace: grace.map_or(GRACE, Duration::from_secs),
            ends: meta.deletion_timestamp.as_ref().map(|time| time.0),
            labels: is_kept.then(|| Arc::new(labels.collect())),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn standing(metadata: Value, spec: Value) -> Standing {
        let pod = json!({"metadata": metadata, "spec": spec});
        Standing::of(&serde_json::from_value(pod).unwrap())
    }

    #[test]
    fn only_what_schedulers_say_of_room_counts_as_tried_in_vain() {
        let tried = |condition: Value| {
            let pod = json!({"metadata": {}, "status": {"conditions": [condition]}});
            Standing::of(&serde_json::from_value(pod).unwrap()).tried
        };
        let with = |reason: &str| tried(json!({"type": "PodScheduled", "status": "False", "reason": reason}));
        assert_eq!(with("Unschedulable"), Tried::InVain);
        for reason in ["SchedulingGated", "SchedulerError", "unschedulable", "Whatever", ""] {
            assert_eq!(with(reason), Tried::No, "{reason}");
        }
        assert_eq!((with("Undetermined"), with("Schedulable")), (Tried::BesideAnother, Tried::BesideAnother));
        assert_eq!(tried(json!({"type": "PodScheduled", "status": "False"})), Tried::No);
        let scheduled = json!({"type": "PodScheduled", "status": "True", "reason": "Unschedulable"});
        assert_eq!(tried(scheduled), Tried::No);
        let says = |message: &str| {
            let reason = "Unschedulable";
            tried(json!({"type": "PodScheduled", "status": "False", "reason": reason, "message": message}))
        };
        // Messages as kube-scheduler 1.34.4 and 1.37.0 make them.
        let after = "preemption: 0/3 nodes are available: 1 Insufficient cpu, 2 Preemption is not helpful for scheduling.";
        for (why, is) in [
            ("3 cannot allocate all claims.", Tried::InVain),
            ("1 cannot allocate all claims, 2 node(s) didn't match pod affinity rules.", Tried::InVain),
            ("1 Insufficient cpu, 2 node(s) didn't match Pod's node affinity/selector.", Tried::InVain),
            ("3 Too many pods.", Tried::InVain),
            ("3 Insufficient nvidia.com/gpu.", Tried::InVain),
            ("3 node(s) didn't match pod affinity rules.", Tried::ForOther),
            ("3 node(s) didn't match pod topology spread constraints.", Tried::ForOther),
            ("pod has unbound immediate PersistentVolumeClaims.", Tried::ForOther),
            ("persistentvolumeclaim \"data\" not found.", Tried::ForOther),
            ("2 node(s) had volume node affinity conflict, 1 node(s) were unschedulable.", Tried::ForOther),
        ] {
            assert_eq!(says(&format!("0/3 nodes are available: {why} {after}")), is, "{why}");
            assert_eq!(says(&format!("0/3 nodes are available: {why}")), is, "{why}");
        }
        for other in [
            "",
            "no nodes available to schedule pods",
            "0/3 nodes are unavailable: 3 pod affinity.",
            "0/x nodes are available: no.",
        ] {
            assert_eq!(says(other), Tried::InVain, "{other}");
        }
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
