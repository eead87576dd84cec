//! What a pod demands of a node, whatever is free there.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{NodeSelector, PodSpec, Toleration};

/// Pods of one template have the same: they are compared by what they say.
#[derive(Debug, Clone)]
pub struct Demands {
    said: Said,
    /// The same, for comparison: the API's types have no order.
    text: String,
}

#[derive(Debug, Clone)]
struct Said {
    node_name: Option<String>,
    node_selector: BTreeMap<String, String>,
    affinity: Option<NodeSelector>,
    tolerations: Vec<Toleration>,
}

impl Demands {
    pub fn of(pod: &PodSpec) -> Self {
        let affinity = pod.affinity.as_ref().and_then(|affinity| affinity.node_affinity.as_ref());
        let said = Said {
            node_name: pod.node_name.clone().filter(|name| !name.is_empty()),
            node_selector: pod.node_selector.clone().unwrap_or_default(),
            affinity: affinity
                .and_then(|one| one.required_during_scheduling_ignored_during_execution.clone()),
            tolerations: pod.tolerations.clone().unwrap_or_default(),
        };
        let text = format!("{said:?}");
        Self { said, text }
    }

    /// `spec.nodeName`.
    pub fn node_name(&self) -> Option<&str> {
        self.said.node_name.as_deref()
    }

    pub(super) fn node_selector(&self) -> &BTreeMap<String, String> {
        &self.said.node_selector
    }

    /// The required part of node affinity.
    pub(super) fn affinity(&self) -> Option<&NodeSelector> {
        self.said.affinity.as_ref()
    }

    pub(super) fn tolerations(&self) -> &[Toleration] {
        &self.said.tolerations
    }
}

impl PartialEq for Demands {
    fn eq(&self, other: &Self) -> bool {
        self.text == other.text
    }
}

impl Eq for Demands {}

impl PartialOrd for Demands {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Demands {
    fn cmp(&self, other: &Self) -> Ordering {
        self.text.cmp(&other.text)
    }
}
