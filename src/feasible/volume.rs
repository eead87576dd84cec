//! What a bound PersistentVolume demands of the nodes where its pods run: the required part of its node affinity.

use std::cmp::Ordering;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{NodeSelector, NodeSelectorTerm};

use super::demands::{bytes_of, required, terms_of};

/// Bytes of a volume's node affinity, counted as a pod's demands are. A volume of one zone, or of one node, has some
/// hundred.
const BYTES_MAX: usize = 16 << 10;
/// Labels of nodes that are no longer in use.
const REPLACED: &str = "failure-domain.beta.kubernetes.io/";

/// From which nodes a volume can be reached. Volumes of one zone have the same.
#[derive(Debug, Clone)]
pub struct Reach {
    required: NodeSelector,
    bytes: usize,
}

/// What is not kept: its node affinity has so many bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TooLong(pub usize);

impl TooLong {
    pub const MAX: usize = BYTES_MAX;
}

/// A volume by the PersistentVolumeClaim that is bound to it. Which one that is changes nothing about where the pod may
/// run: volumes are compared by their reach alone.
#[derive(Debug, Clone)]
pub struct Volume {
    pub claim: Box<str>,
    pub reach: Arc<Reach>,
}

impl Reach {
    /// None: from all.
    ///
    /// kube-scheduler holds labels against a volume's node affinity, and passes over its requirements of fields. Of volumes of
    /// old kinds it puts other labels in place of those that begin with `failure-domain.beta.kubernetes.io/`: what these
    /// demand is not known here.
    ///
    /// # Errors
    /// It is longer than what is kept.
    pub fn of(mut required: NodeSelector) -> Result<Option<Self>, TooLong> {
        let bytes = bytes_of(&required);
        if bytes > BYTES_MAX {
            return Err(TooLong(bytes));
        }
        let expressions =
            required.node_selector_terms.iter().flat_map(|term| term.match_expressions.iter().flatten());
        if expressions.into_iter().any(|one| one.key.starts_with(REPLACED)) {
            return Ok(None);
        }
        for term in &mut required.node_selector_terms {
            let of_fields = term.match_fields.take().is_some_and(|all| !all.is_empty());
            if of_fields && term.match_expressions.as_ref().is_none_or(Vec::is_empty) {
                return Ok(None);
            }
        }
        Ok(Some(Self { required, bytes }))
    }

    /// In memory, about.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn terms(&self) -> u64 {
        terms_of(&self.required)
    }

    pub(super) fn node_selector_terms(&self) -> &[NodeSelectorTerm] {
        &self.required.node_selector_terms
    }
}

impl PartialEq for Reach {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Reach {}

impl PartialOrd for Reach {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Reach {
    fn cmp(&self, other: &Self) -> Ordering {
        let terms = |one: &Self| one.required.node_selector_terms.len();
        let by_terms = terms(self).cmp(&terms(other));
        by_terms.then_with(|| required(Some(&self.required)).cmp(required(Some(&other.required))))
    }
}
