//! What a pod demands of a node, whatever is free there.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{NodeSelector, NodeSelectorTerm, PodSpec, Toleration};

use super::volume::Volume;

/// Bytes of a pod's demands, an entry counting [`ENTRY`] beside its text. Whoever may create a pod writes them, and they
/// are kept while it waits; what people write has some hundred.
pub const BYTES_MAX: usize = 64 << 10;
const ENTRY: usize = 64;

/// Pods of one template have the same: they are compared by what they say.
#[derive(Debug, Clone)]
pub struct Demands {
    said: SpecDemands,
    /// How many bytes they have, without volumes.
    bytes: usize,
    /// That many are more than are kept: then the pod may run nowhere.
    is_too_large: bool,
    /// In the order of what they demand, and of those that demand the same one.
    volumes: Vec<Volume>,
    /// Volumes that did not fit beside the rest: what they demand is not known here.
    left_out: usize,
}

#[derive(Debug, Clone)]
struct SpecDemands {
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
        let affinity = said.affinity.as_ref().map_or(0, terms_of);
        let volumes = self.volumes.iter().map(|one| one.reach.terms()).fold(0, u64::saturating_add);
        let others = said.node_selector.len() + said.tolerations.len() + said.others.len();
        (1 + others as u64).saturating_add(affinity).saturating_add(volumes)
    }

    pub fn of(pod: &PodSpec) -> Self {
        let bytes = bytes(pod);
        if bytes > BYTES_MAX {
            let said = SpecDemands {
                node_name: None,
                node_selector: BTreeMap::new(),
                affinity: None,
                tolerations: Vec::new(),
                others: BTreeMap::new(),
            };
            return Self { said, bytes, is_too_large: true, volumes: Vec::new(), left_out: 0 };
        }
        let affinity = pod.affinity.as_ref().and_then(|affinity| affinity.node_affinity.as_ref());
        let said = SpecDemands {
            node_name: pod.node_name.clone().filter(|name| !name.is_empty()),
            node_selector: pod.node_selector.clone().unwrap_or_default(),
            affinity: affinity
                .and_then(|one| one.required_during_scheduling_ignored_during_execution.clone()),
            tolerations: pod.tolerations.clone().unwrap_or_default(),
            others: super::other_requests(pod),
        };
        Self { said, bytes, is_too_large: false, volumes: Vec::new(), left_out: 0 }
    }

    /// The same beside these volumes, in place of any before. Those that do not fit into [`BYTES_MAX`] are left out: the
    /// pod may then be put where one of them cannot be reached, which kube-scheduler refuses.
    pub fn with_volumes(mut self, volumes: impl Iterator<Item = Volume>) -> Self {
        self.volumes.clear();
        self.left_out = 0;
        if self.is_too_large {
            return self;
        }
        let mut all: Vec<Volume> = volumes.collect();
        all.sort_by(|one, other| one.reach.cmp(&other.reach));
        all.dedup_by(|one, other| one.reach == other.reach);
        let mut bytes = self.bytes;
        for one in all {
            let with = bytes.saturating_add(ENTRY + one.claim.len() + one.reach.bytes());
            if with <= BYTES_MAX {
                bytes = with;
                self.volumes.push(one);
            } else {
                self.left_out += 1;
            }
        }
        self
    }

    /// What bound volumes of the pod demand.
    pub fn volumes(&self) -> &[Volume] {
        &self.volumes
    }

    /// How many of its volumes are not among them for want of room.
    pub fn left_out(&self) -> usize {
        self.left_out
    }

    /// The same of another pod like one that is bound: which node that has got does not matter.
    pub fn anywhere(pod: &PodSpec) -> Self {
        let mut demands = Self::of(pod);
        demands.said.node_name = None;
        demands
    }

    /// How many bytes they have, if that is more than [`BYTES_MAX`].
    pub fn too_large(&self) -> Option<usize> {
        self.is_too_large.then_some(self.bytes)
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
    let affinity = required.map_or(0, bytes_of);
    let others = super::other_requests(pod).into_keys().map(|name| text(&[Some(&name)])).sum::<usize>();
    labels.chain(tolerations).sum::<usize>() + affinity + others
}

/// The same of a node selector.
pub(super) fn bytes_of(selector: &NodeSelector) -> usize {
    let term = |term: &NodeSelectorTerm| {
        let all = term.match_expressions.iter().chain(&term.match_fields).flatten();
        let one = all.map(|one| {
            let values = one.values.iter().flatten().map(|value| ENTRY + value.len()).sum::<usize>();
            ENTRY + one.key.len() + one.operator.len() + values
        });
        ENTRY + one.sum::<usize>()
    };
    selector.node_selector_terms.iter().map(term).sum()
}

/// How many single demands a node selector has.
pub(super) fn terms_of(selector: &NodeSelector) -> u64 {
    let of_term = |term: &NodeSelectorTerm| {
        let expressions = term.match_expressions.iter().chain(&term.match_fields).flatten();
        1 + expressions.map(|one| 1 + one.values.as_ref().map_or(0, Vec::len) as u64).sum::<u64>()
    };
    selector.node_selector_terms.iter().map(of_term).sum()
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
        self.too_large()
            .cmp(&other.too_large())
            .then_with(|| self.said.order(&other.said))
            .then_with(|| reaches(&self.volumes).cmp(reaches(&other.volumes)))
    }
}

impl SpecDemands {
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

fn reaches(all: &[Volume]) -> impl Iterator<Item: Ord> {
    all.iter().map(|one| &one.reach)
}

fn borne(all: &[Toleration]) -> impl Iterator<Item: Ord> {
    all.iter().map(|one| (&one.key, &one.operator, &one.value, &one.effect, one.toleration_seconds))
}

/// Each requirement, with the number of its term.
pub(super) fn required(affinity: Option<&NodeSelector>) -> impl Iterator<Item: Ord> {
    let terms = affinity.into_iter().flat_map(|affinity| affinity.node_selector_terms.iter().enumerate());
    let all = terms.flat_map(|(nth, term)| {
        let of_labels = term.match_expressions.iter().flatten().map(move |one| (nth, false, one));
        let of_fields = term.match_fields.iter().flatten().map(move |one| (nth, true, one));
        of_labels.chain(of_fields)
    });
    all.map(|(nth, of_field, one)| (nth, of_field, &one.key, &one.operator, &one.values))
}
