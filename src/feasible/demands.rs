//! What a pod demands of a node, whatever is free there.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{NodeSelector, NodeSelectorTerm, PodSpec, Toleration};

/// Bytes of a pod's demands, an entry counting [`ENTRY`] beside its text. Whoever may create a pod writes them, and they
/// are kept while it waits; what people write has some hundred.
pub const BYTES_MAX: usize = 64 << 10;
const ENTRY: usize = 64;

/// Pods of one template have the same: they are compared by what they say.
#[derive(Debug, Clone)]
pub struct Demands {
    said: Said,
    /// How many bytes they have, if these are more than are kept: then the pod may run nowhere.
    too_large: Option<usize>,
}

#[derive(Debug, Clone)]
struct Said {
    node_name: Option<String>,
    node_selector: BTreeMap<String, String>,
    affinity: Option<NodeSelector>,
    tolerations: Vec<Toleration>,
    others: BTreeMap<String, u64>,
}

impl Demands {
    /// How many single demands they are, at least one.
    pub fn terms(&self) -> u64 {
        let said = &self.said;
        let of_term = |term: &NodeSelectorTerm| {
            let expressions = term.match_expressions.iter().chain(&term.match_fields).flatten();
            1 + expressions.map(|one| 1 + one.values.as_ref().map_or(0, Vec::len)).sum::<usize>()
        };
        let affinity =
            said.affinity.iter().flat_map(|all| &all.node_selector_terms).map(of_term).sum::<usize>();
        let others = said.node_selector.len() + said.tolerations.len() + said.others.len();
        (1 + others).saturating_add(affinity) as u64
    }

    pub fn of(pod: &PodSpec) -> Self {
        let bytes = bytes(pod);
        if bytes > BYTES_MAX {
            let said = Said {
                node_name: None,
                node_selector: BTreeMap::new(),
                affinity: None,
                tolerations: Vec::new(),
                others: BTreeMap::new(),
            };
            return Self { said, too_large: Some(bytes) };
        }
        let affinity = pod.affinity.as_ref().and_then(|affinity| affinity.node_affinity.as_ref());
        let said = Said {
            node_name: pod.node_name.clone().filter(|name| !name.is_empty()),
            node_selector: pod.node_selector.clone().unwrap_or_default(),
            affinity: affinity
                .and_then(|one| one.required_during_scheduling_ignored_during_execution.clone()),
            tolerations: pod.tolerations.clone().unwrap_or_default(),
            others: super::other_requests(pod),
        };
        Self { said, too_large: None }
    }

    /// The same of another pod like one that is bound: which node that has got does not matter.
    pub fn anywhere(pod: &PodSpec) -> Self {
        let mut demands = Self::of(pod);
        demands.said.node_name = None;
        demands
    }

    /// How many bytes they have, if that is more than [`BYTES_MAX`].
    pub fn too_large(&self) -> Option<usize> {
        self.too_large
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

    /// What the pod asks of resources other than CPU and memory, in units.
    pub(super) fn others(&self) -> &BTreeMap<String, u64> {
        &self.said.others
    }

    pub(super) fn tolerations(&self) -> &[Toleration] {
        &self.said.tolerations
    }
}

/// Of what is kept: its text, and [`ENTRY`] for each entry.
fn bytes(pod: &PodSpec) -> usize {
    let text = |all: &[Option<&String>]| ENTRY + all.iter().flatten().map(|text| text.len()).sum::<usize>();
    let labels = pod.node_selector.iter().flatten().map(|(key, value)| text(&[Some(key), Some(value)]));
    let tolerations =
        pod.tolerations.iter().flatten().map(|one| {
            text(&[one.key.as_ref(), one.operator.as_ref(), one.value.as_ref(), one.effect.as_ref()])
        });
    let affinity = pod.affinity.as_ref().and_then(|affinity| affinity.node_affinity.as_ref());
    let required = affinity.and_then(|one| one.required_during_scheduling_ignored_during_execution.as_ref());
    let term = |term: &NodeSelectorTerm| {
        let all = term.match_expressions.iter().chain(&term.match_fields).flatten();
        let one = all.map(|one| {
            let values = one.values.iter().flatten().map(|value| text(&[Some(value)])).sum::<usize>();
            text(&[Some(&one.key), Some(&one.operator)]) + values
        });
        ENTRY + one.sum::<usize>()
    };
    let terms = required.into_iter().flat_map(|required| &required.node_selector_terms).map(term);
    let others = super::other_requests(pod).into_keys().map(|name| text(&[Some(&name)])).sum::<usize>();
    labels.chain(tolerations).chain(terms).sum::<usize>() + others
}

impl PartialEq for Demands {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
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
        self.too_large.cmp(&other.too_large).then_with(|| self.said.order(&other.said))
    }
}

impl Said {
    /// By all of it, field by field: the API's types have no order.
    fn order(&self, other: &Self) -> Ordering {
        let terms = |said: &Self| said.affinity.as_ref().map(|affinity| affinity.node_selector_terms.len());
        self.node_name
            .cmp(&other.node_name)
            .then_with(|| self.node_selector.cmp(&other.node_selector))
            .then_with(|| self.others.cmp(&other.others))
            .then_with(|| borne(&self.tolerations).cmp(borne(&other.tolerations)))
            .then_with(|| terms(self).cmp(&terms(other)))
            .then_with(|| required(self.affinity.as_ref()).cmp(required(other.affinity.as_ref())))
    }
}

fn borne(all: &[Toleration]) -> impl Iterator<Item: Ord> {
    all.iter().map(|one| (&one.key, &one.operator, &one.value, &one.effect, one.toleration_seconds))
}

/// Each requirement, with the number of its term.
fn required(affinity: Option<&NodeSelector>) -> impl Iterator<Item: Ord> {
    let terms = affinity.into_iter().flat_map(|affinity| affinity.node_selector_terms.iter().enumerate());
    let all = terms.flat_map(|(nth, term)| {
        let of_labels = term.match_expressions.iter().flatten().map(move |one| (nth, false, one));
        let of_fields = term.match_fields.iter().flatten().map(move |one| (nth, true, one));
        of_labels.chain(of_fields)
    });
    all.map(|(nth, of_field, one)| (nth, of_field, &one.key, &one.operator, &one.values))
}
