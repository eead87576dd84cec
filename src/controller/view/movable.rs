//! Pods that somebody makes anew when they end, and whether they may be moved: what is known of them beside what placing
//! needs. A pod that is moved is another pod afterwards.

use std::sync::Arc;

use k8s_openapi::api::core::v1 as core;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;

use crate::controller::view::{Asks, ClusterView, Pod};
use crate::feasible::Demands;
use crate::model::names::{MOVABLE, PodUid};

/// Bytes of an owner's name and of its UID: of what the API server has given there are less.
const TEXT_BYTES_MAX: usize = 253;

/// Who makes a pod anew.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodOwner {
    /// Its own is the pod's.
    pub namespace: String,
    pub kind: OwnerKind,
    pub name: String,
    pub uid: String,
}

/// Tells one owner from another. A UID alone is what a pod of any namespace may say.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct OwnerKey {
    pub namespace: String,
    pub uid: String,
}

impl PodOwner {
    pub fn key(&self) -> OwnerKey {
        OwnerKey { namespace: self.namespace.clone(), uid: self.uid.clone() }
    }
}

/// Kinds of objects that make a pod anew wherever there is room for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum OwnerKind {
    ReplicaSet,
    StatefulSet,
    ReplicationController,
    /// As long as it may fail: a pod that was evicted counts as failed, unless its podFailurePolicy says otherwise.
    Job,
}

impl OwnerKind {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::ReplicaSet => "ReplicaSet",
            Self::StatefulSet => "StatefulSet",
            Self::ReplicationController => "ReplicationController",
            Self::Job => "Job",
        }
    }

    fn of(owner: &OwnerReference) -> Option<Self> {
        match (owner.api_version.as_str(), owner.kind.as_str()) {
            ("apps/v1", "ReplicaSet") => Some(Self::ReplicaSet),
            ("apps/v1", "StatefulSet") => Some(Self::StatefulSet),
            ("v1", "ReplicationController") => Some(Self::ReplicationController),
            ("batch/v1", "Job") => Some(Self::Job),
            _ => None,
        }
    }
}

/// Where a pod comes from that is made anew.
#[derive(Debug, Clone)]
pub struct Origin {
    pub owner: PodOwner,
    /// What the pod's own annotation says: true that it may be moved, false that it may not.
    pub mark: Option<bool>,
    /// Why nobody can tell where another such pod may run.
    pub tie: Option<&'static str>,
    /// Of its node, wherever it is now.
    pub demands: Arc<Demands>,
}

/// None: nobody is known to make it anew, or it names no claim.
pub(super) fn read(object: &core::Pod, pod: &Pod) -> Option<Origin> {
    if pod.requested.claims.is_empty() && !pod.requested.unnamed {
        return None;
    }
    let spec = object.spec.as_ref()?;
    let owners = object.metadata.owner_references.iter().flatten();
    let owner = owners.into_iter().find(|owner| owner.controller == Some(true))?;
    if owner.name.len().max(owner.uid.len()) > TEXT_BYTES_MAX {
        return None;
    }
    let (namespace, name, uid) = (pod.at.namespace.clone(), owner.name.clone(), owner.uid.clone());
    let mark = object.metadata.annotations.as_ref().and_then(|all| all.get(MOVABLE));
    Some(Origin {
        owner: PodOwner { namespace, kind: OwnerKind::of(owner)?, name, uid },
        mark: mark.and_then(|text| text.parse().ok()),
        tie: tie(spec),
        demands: Arc::new(Demands::anywhere(spec)),
    })
}

/// What kube-scheduler looks at and nobody here does.
fn tie(spec: &core::PodSpec) -> Option<&'static str> {
    let affinity = spec.affinity.as_ref();
    let with = affinity.and_then(|one| one.pod_affinity.as_ref());
    let with = with.and_then(|one| one.required_during_scheduling_ignored_during_execution.as_ref());
    let apart = affinity.and_then(|one| one.pod_anti_affinity.as_ref());
    let apart = apart.and_then(|one| one.required_during_scheduling_ignored_during_execution.as_ref());
    let ports = spec.containers.iter().chain(spec.init_containers.iter().flatten());
    let mut ports = ports.flat_map(|one| one.ports.iter().flatten());
    let mut spread = spec.topology_spread_constraints.iter().flatten();
    let is_bound =
        |volume: &core::Volume| volume.persistent_volume_claim.is_some() || volume.ephemeral.is_some();
    if spec.volumes.iter().flatten().any(is_bound) {
        Some("it has a volume that may be bound to where it runs")
    } else if with.into_iter().chain(apart).flatten().next().is_some() {
        Some("it has required affinity to other pods, or from them")
    } else if spread.any(|one| one.when_unsatisfiable == "DoNotSchedule") {
        Some("it is spread over the cluster (topologySpreadConstraints)")
    } else if ports.any(|port| port.host_port.is_some()) || spec.host_network == Some(true) {
        Some("it has ports of its node")
    } else {
        None
    }
}

impl ClusterView {
    /// Who makes the pod anew. None: nobody, as far as is known.
    pub fn origin(&self, pod: &PodUid) -> Option<&Origin> {
        self.pods.origin(pod)
    }

    /// The same, to be told from others.
    pub fn owner_of(&self, pod: &PodUid) -> Option<OwnerKey> {
        self.origin(pod).map(|origin| origin.owner.key())
    }

    /// Somebody has said that the pod may be moved: on the pod, else on its namespace, else on the classes of all its shares.
    pub fn is_marked_movable(&self, pod: &Pod) -> bool {
        if let Some(mark) = self.origin(&pod.at.uid).and_then(|origin| origin.mark) {
            return mark;
        }
        if self.namespaces.movable.contains(&pod.at.namespace) {
            return true;
        }
        let claims = self.claims_of(pod).unwrap_or_default();
        !claims.is_empty()
            && claims.iter().all(|claim| match &claim.asks {
                Asks::Shares(spec) => {
                    let classes = self.classes().of(spec);
                    !classes.is_empty() && classes.iter().all(|(_, class)| class.movable)
                }
                Asks::Scheduler(_) | Asks::Unreadable(_) => false,
            })
    }
}
