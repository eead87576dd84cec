//! What is looked at of a node, read once: a cluster has thousands, and its Node objects say a hundred times as much.

use k8s_openapi::api::core::v1::{Node as ApiNode, Taint};

use super::room::{Resources, units_of_others};
use crate::model::named::Named;
use crate::model::names::NodeName;

const ZONE: &str = "topology.kubernetes.io/zone";

/// Labels, taints, cordon, the Ready condition and what is allocatable.
#[derive(Debug, Clone, PartialEq)]
pub struct Node {
    name: NodeName,
    pub(super) labels: Named<str, str>,
    pub(super) taints: Box<[Taint]>,
    pub(super) is_cordoned: bool,
    /// None: it has no such condition.
    pub(super) ready: Option<Ready>,
    allocatable: Resources,
    /// In units; no entry: the node has none.
    others: Named<str, u64>,
}

/// The condition `Ready`, without its times: a heartbeat is no news.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Ready {
    pub status: String,
    /// Reason and message, as far as there are any.
    pub words: String,
}

impl Node {
    pub fn of(object: &ApiNode) -> Self {
        let spec = object.spec.as_ref();
        let status = object.status.as_ref();
        let conditions = status.and_then(|status| status.conditions.as_deref()).unwrap_or_default();
        let ready = conditions.iter().find(|condition| condition.type_ == "Ready");
        let allocatable = status.and_then(|status| status.allocatable.as_ref());
        let labels = object.metadata.labels.iter().flatten();
        Self {
            name: NodeName::new(object.metadata.name.as_deref().unwrap_or_default()),
            labels: labels.map(|(key, value)| (key.as_str(), value.as_str())).collect(),
            taints: spec.and_then(|spec| spec.taints.as_deref()).unwrap_or_default().into(),
            is_cordoned: spec.and_then(|spec| spec.unschedulable).unwrap_or(false),
            ready: ready.map(|one| {
                let words = [one.reason.as_deref(), one.message.as_deref()];
                let words: Vec<&str> =
                    words.into_iter().flatten().filter(|words| !words.is_empty()).collect();
                Ready { status: one.status.clone(), words: words.join(": ") }
            }),
            allocatable: Resources::of(allocatable),
            others: units_of_others(allocatable).collect(),
        }
    }

    pub fn label(&self, key: &str) -> Option<&str> {
        self.labels.get(key)
    }

    /// Takes what the other has as well from there: in memory it is then there once.
    pub fn share(&mut self, other: &Self) {
        self.labels.share(&other.labels);
        self.others.share(&other.others);
    }

    /// By its label.
    pub fn zone(&self) -> Option<&str> {
        self.labels.get(ZONE).filter(|zone| !zone.is_empty())
    }

    pub fn name(&self) -> &NodeName {
        &self.name
    }

    /// What pods may take of the node in all.
    pub fn allocatable(&self) -> Resources {
        self.allocatable
    }

    /// What pods may take of a resource other than CPU and memory, in units; 0: the node has none.
    pub fn allocatable_of(&self, resource: &str) -> u64 {
        self.others.get(resource).copied().unwrap_or(0)
    }
}
