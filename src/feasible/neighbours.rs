//! Which nodes other pods keep a pod off, as kube-scheduler's filters InterPodAffinity and PodTopologySpread have it:
//! required affinity and anti-affinity between pods, and `topologySpreadConstraints` with `DoNotSchedule`.
//!
//! A pod's [`Terms`] name other pods ([`Whom`]) and a label of nodes. Nodes with the same value of that label are one domain.
//! Who counts which pods are where asks [`Whom::are`] of each, and then for what follows from the counts: [`Judged`].

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::core::v1::{PodAffinityTerm, PodSpec, TopologySpreadConstraint};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use thiserror::Error;

use super::{Demands, Node, Unfit, affinity, taint};
use crate::model::named::Named;

/// Labels of a pod.
pub type PodLabels = Named<str, str>;

/// Bytes of a pod's terms, an entry counting [`ENTRY`] beside its text: people write some hundred.
const BYTES_MAX: usize = 16 << 10;
const ENTRY: usize = 64;
/// Required terms of a pod, of affinity and anti-affinity, and its constraints that are required. Each is looked up when
/// the pod is placed; people write one or two.
const TERMS_MAX: usize = 16;
const CONSTRAINTS_MAX: usize = 8;
/// The label that the API server gives each namespace: its name.
const NAME_OF_NAMESPACE: &str = "kubernetes.io/metadata.name";
const DO_NOT_SCHEDULE: &str = "DoNotSchedule";

/// Which labels are meant. Sorted, so that equal ones are equal.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Selector {
    Nothing,
    /// All of these must hold; none: any labels will do.
    All(Box<[Requirement]>),
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Requirement {
    key: Box<str>,
    is: Is,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Is {
    In(Box<[Box<str>]>),
    /// Also without the label.
    NotIn(Box<[Box<str>]>),
    There,
    NotThere,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Namespaces {
    All,
    /// In order.
    These(Box<[Box<str>]>),
}

/// Pods that a term is about.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Whom {
    pub namespaces: Namespaces,
    selector: Selector,
}

/// A term of required affinity or anti-affinity.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Term {
    /// The label of nodes whose values are the domains.
    key: Box<str>,
    pub whom: Whom,
}

/// A topology spread constraint that is required.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Spread {
    key: Box<str>,
    max_skew: i64,
    min_domains: usize,
    pub whom: Whom,
    /// Nodes that the pod's node selector or node affinity rules out are in no domain.
    by_affinity: bool,
    /// Nodes with taints that the pod does not tolerate are in no domain.
    by_taints: bool,
}

/// What a pod requires of other pods. Pods of one template have the same.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Terms {
    /// Affinity: a domain where pods run that all of these are about.
    pub near: Box<[Term]>,
    pub apart: Box<[Arc<Term>]>,
    pub spread: Box<[Spread]>,
}

/// Pods of a node that a term is about.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Count {
    pub bound: u32,
    /// They have been placed there, and their scheduler has not bound them yet.
    pub placed: u32,
}

/// Why a pod's terms are not read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum TooLarge {
    #[error("have {0} bytes ({ENTRY} more for each entry), and {BYTES_MAX} are read at most")]
    Bytes(usize),
    #[error(
        "are {terms} terms and {constraints} constraints, and {TERMS_MAX} and {CONSTRAINTS_MAX} are read at most"
    )]
    Many { terms: usize, constraints: usize },
}

impl Selector {
    /// None: an operator that is not known.
    fn of(selector: Option<&LabelSelector>) -> Option<Self> {
        let Some(selector) = selector else { return Some(Self::Nothing) };
        let equal = selector.match_labels.iter().flatten();
        let equal = equal.map(|(key, value)| Requirement::equal(key, value));
        let mut all: Vec<Requirement> = equal.collect();
        for one in selector.match_expressions.iter().flatten() {
            let mut values: Vec<Box<str>> =
                one.values.iter().flatten().map(|value| (**value).into()).collect();
            values.sort();
            let is = match one.operator.as_str() {
                "In" => Is::In(values.into()),
                "NotIn" => Is::NotIn(values.into()),
                "Exists" => Is::There,
                "DoesNotExist" => Is::NotThere,
                _ => return None,
            };
            all.push(Requirement { key: one.key.as_str().into(), is });
        }
        all.sort();
        all.dedup();
        Some(Self::All(all.into()))
    }

    pub fn matches(&self, labels: &PodLabels) -> bool {
        match self {
            Self::Nothing => false,
            Self::All(all) => all.iter().all(|one| one.holds(labels.get(&*one.key))),
        }
    }

    /// Any labels will do.
    fn is_any(&self) -> bool {
        matches!(self, Self::All(all) if all.is_empty())
    }

    fn with(self, more: impl Iterator<Item = Requirement>) -> Self {
        match self {
            Self::Nothing => Self::Nothing,
            Self::All(all) => {
                let all: BTreeSet<Requirement> = all.into_iter().chain(more).collect();
                Self::All(all.into_iter().collect())
            }
        }
    }
}

impl Requirement {
    fn equal(key: &str, value: &str) -> Self {
        Self { key: key.into(), is: Is::In([value.into()].into()) }
    }

    fn holds(&self, found: Option<&str>) -> bool {
        let listed =
            |values: &[Box<str>], found: &str| values.binary_search_by(|one| (**one).cmp(found)).is_ok();
        match (&self.is, found) {
            (Is::In(values), found) => found.is_some_and(|found| listed(values, found)),
            (Is::NotIn(values), found) => !found.is_some_and(|found| listed(values, found)),
            (Is::There, found) => found.is_some(),
            (Is::NotThere, found) => found.is_none(),
        }
    }
}

impl Namespaces {
    /// None: which ones is not known here.
    fn of(term: &PodAffinityTerm, own: &str) -> Option<Self> {
        let named = term.namespaces.iter().flatten().map(String::as_str);
        let mut names: BTreeSet<&str> = named.collect();
        match &term.namespace_selector {
            None if names.is_empty() => names.extend([own]),
            None => {}
            Some(selector) => {
                let labels = selector.match_labels.iter().flatten();
                let expressions = selector.match_expressions.iter().flatten();
                if labels.clone().count() + expressions.clone().count() == 0 {
                    return Some(Self::All);
                }
                // Of several requirements all must hold.
                let by_label = labels.map(|(key, value)| (key, vec![value.as_str()]));
                let by_list = expressions.map(|one| {
                    let values = one.values.iter().flatten().map(String::as_str);
                    (&one.key, if one.operator == "In" { values.collect() } else { Vec::new() })
                });
                let mut all = by_label.chain(by_list);
                let (Some((key, values)), None) = (all.next(), all.next()) else { return None };
                if key != NAME_OF_NAMESPACE || values.is_empty() {
                    return None;
                }
                names.extend(values);
            }
        }
        Some(Self::These(names.into_iter().map(Into::into).collect()))
    }

    /// It is this one and no other.
    pub fn are_only(&self, name: &str) -> bool {
        matches!(self, Self::These(names) if matches!(&**names, [one] if **one == *name))
    }

    pub fn have(&self, name: &str) -> bool {
        match self {
            Self::All => true,
            Self::These(names) => names.binary_search_by(|one| (**one).cmp(name)).is_ok(),
        }
    }
}

impl Whom {
    /// The term is about pods of this namespace with these labels.
    pub fn are(&self, namespace: &str, labels: &PodLabels) -> bool {
        self.namespaces.have(namespace) && self.selector.matches(labels)
    }

    /// How many single comparisons it takes to find out, at least one.
    pub fn size(&self) -> u64 {
        let all = if let Selector::All(all) = &self.selector { all.len() } else { 0 };
        1 + all as u64
    }
}

impl Term {
    /// The label of nodes whose values are the domains.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// None: it cannot be read here.
    fn of(term: &PodAffinityTerm, namespace: &str) -> Option<Self> {
        let namespaces = Namespaces::of(term, namespace)?;
        let whom = Whom { namespaces, selector: Selector::of(term.label_selector.as_ref())? };
        Some(Self { key: term.topology_key.as_str().into(), whom })
    }
}

impl Spread {
    fn of(one: &TopologySpreadConstraint, namespace: &str, labels: &PodLabels) -> Option<Self> {
        let honors = |policy: &Option<String>, usual: &str| policy.as_deref().unwrap_or(usual) == "Honor";
        // From 1.34 on the API server writes these into the selector itself.
        let keys = one.match_label_keys.iter().flatten();
        let more = keys.filter_map(|key| Some(Requirement::equal(key, labels.get(key.as_str())?)));
        let selector = Selector::of(one.label_selector.as_ref())?.with(more);
        Some(Self {
            key: one.topology_key.as_str().into(),
            max_skew: one.max_skew.into(),
            min_domains: usize::try_from(one.min_domains.unwrap_or(1)).unwrap_or(1),
            whom: Whom { namespaces: Namespaces::These([namespace.into()].into()), selector },
            by_affinity: honors(&one.node_affinity_policy, "Honor"),
            by_taints: honors(&one.node_taints_policy, "Ignore"),
        })
    }
}

impl Terms {
    /// Those of a pod with these labels. Of one that is bound only anti-affinity counts, for others. Terms of namespaces that
    /// are chosen by labels cannot be read here, but for their names: of affinity nothing is read then, since all terms are
    /// about the same pods.
    ///
    /// # Errors
    /// They are longer than what is read.
    pub fn of(pod: &PodSpec, namespace: &str, labels: &PodLabels) -> Result<Self, TooLarge> {
        let is_bound = pod.node_name.as_deref().is_some_and(|name| !name.is_empty());
        let affinity = pod.affinity.as_ref();
        let apart = affinity.and_then(|one| one.pod_anti_affinity.as_ref());
        let apart = apart.and_then(|one| one.required_during_scheduling_ignored_during_execution.as_deref());
        let near = affinity.and_then(|one| one.pod_affinity.as_ref()).filter(|_| !is_bound);
        let near = near.and_then(|one| one.required_during_scheduling_ignored_during_execution.as_deref());
        let spread = pod.topology_spread_constraints.iter().flatten().filter(|_| !is_bound);
        let spread: Vec<_> = spread.filter(|one| one.when_unsatisfiable == DO_NOT_SCHEDULE).collect();
        let (near, apart) = (near.unwrap_or_default(), apart.unwrap_or_default());
        let of_terms = near.iter().chain(apart).map(bytes_of_term).sum::<usize>();
        let bytes = of_terms + spread.iter().map(|one| bytes_of_spread(one)).sum::<usize>();
        if bytes > BYTES_MAX {
            return Err(TooLarge::Bytes(bytes));
        }
        let (terms, constraints) = (near.len() + apart.len(), spread.len());
        if terms > TERMS_MAX || constraints > CONSTRAINTS_MAX {
            return Err(TooLarge::Many { terms, constraints });
        }
        let read = |term: &PodAffinityTerm| Term::of(term, namespace);
        // Each belongs to the others: a node in no domain of one is in none of any.
        let spread: Option<Box<[Spread]>> =
            spread.into_iter().map(|one| Spread::of(one, namespace, labels)).collect();
        Ok(Self {
            near: near.iter().map(read).collect::<Option<_>>().unwrap_or_default(),
            apart: apart.iter().filter_map(read).map(Arc::new).collect(),
            spread: spread.unwrap_or_default(),
        })
    }

    pub fn is_none(&self) -> bool {
        self.near.is_empty() && self.apart.is_empty() && self.spread.is_empty()
    }

    /// In memory, about.
    pub fn bytes(&self) -> usize {
        let near = self.near.iter().map(|term| bytes_of_whom(&term.key, &term.whom));
        let apart = self.apart.iter().map(|term| bytes_of_whom(&term.key, &term.whom));
        let spread = self.spread.iter().map(|one| bytes_of_whom(&one.key, &one.whom));
        near.chain(apart).chain(spread).sum()
    }

    /// The pod is one of those that all terms of its affinity are about.
    pub fn is_near_itself(&self, namespace: &str, labels: &PodLabels) -> bool {
        !self.near.is_empty() && self.near.iter().all(|term| term.whom.are(namespace, labels))
    }
}

fn bytes_of_whom(key: &str, whom: &Whom) -> usize {
    let names = if let Namespaces::These(names) = &whom.namespaces { names.len() } else { 0 };
    let values = match &whom.selector {
        Selector::Nothing => 0,
        Selector::All(all) => all.iter().map(|one| one.key.len() + ENTRY + one.values()).sum(),
    };
    ENTRY + key.len() + names * ENTRY + values
}

impl Requirement {
    fn values(&self) -> usize {
        match &self.is {
            Is::In(values) | Is::NotIn(values) => values.iter().map(|one| ENTRY + one.len()).sum(),
            Is::There | Is::NotThere => 0,
        }
    }
}

fn bytes_of_term(term: &PodAffinityTerm) -> usize {
    let names: usize = term.namespaces.iter().flatten().map(|one| ENTRY + one.len()).sum();
    let selectors = bytes_of_selector(term.label_selector.as_ref());
    ENTRY + term.topology_key.len() + names + selectors + bytes_of_selector(term.namespace_selector.as_ref())
}

fn bytes_of_spread(one: &TopologySpreadConstraint) -> usize {
    let keys: usize = one.match_label_keys.iter().flatten().map(|one| 2 * ENTRY + one.len()).sum();
    ENTRY + one.topology_key.len() + keys + bytes_of_selector(one.label_selector.as_ref())
}

fn bytes_of_selector(selector: Option<&LabelSelector>) -> usize {
    let labels = selector.iter().flat_map(|one| one.match_labels.iter().flatten());
    let labels: usize = labels.map(|(key, value)| ENTRY + key.len() + value.len()).sum();
    let expressions = selector.iter().flat_map(|one| one.match_expressions.iter().flatten());
    let of =
        |values: &Option<Vec<String>>| values.iter().flatten().map(|one| ENTRY + one.len()).sum::<usize>();
    labels + expressions.map(|one| ENTRY + one.key.len() + of(&one.values)).sum::<usize>()
}

/// What follows from where pods are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Judged {
    /// Domains that are ruled out, and how many pods are the reason.
    Apart {
        key: Box<str>,
        domains: BTreeMap<Box<str>, u32>,
        /// It is their anti-affinity, not the pod's.
        by_others: bool,
    },
    /// Labels, and which of their values are domains with pods that are meant.
    Near {
        keys: Box<[Box<str>]>,
        domains: BTreeSet<(Box<str>, Box<str>)>,
        /// There are no such pods, and the pod is one itself: it may go anywhere where all labels are.
        is_first: bool,
    },
    /// Domains that have too many pods already.
    Spread { key: Box<str>, full: BTreeMap<Box<str>, u32>, least: u32, max_skew: i64 },
}

impl Judged {
    /// `on`: nodes with pods that the term is about.
    pub fn apart<'a>(term: &Term, on: impl Iterator<Item = (&'a Node, Count)>) -> Self {
        let domains = BTreeMap::new();
        let mut judged = Self::Apart { key: term.key.clone(), domains, by_others: false };
        judged.add_domains(on);
        judged
    }

    /// Of the same label as the term, and of no domain yet.
    pub fn by_others(term: &Term) -> Self {
        Self::Apart { key: term.key.clone(), domains: BTreeMap::new(), by_others: true }
    }

    /// `on`: nodes with pods that a term of the same label is about, or where it is by others pods that have it.
    pub fn add_domains<'a>(&mut self, on: impl Iterator<Item = (&'a Node, Count)>) {
        let Self::Apart { key, domains, .. } = self else { return };
        for (node, count) in on.filter(|(_, count)| !count.is_none()) {
            let Some(value) = node.labels.get(&**key) else { continue };
            let all = domains.entry(value.into()).or_default();
            *all = all.saturating_add(count.all());
        }
    }

    /// It has something against a node.
    pub fn has_domains(&self) -> bool {
        !matches!(self, Self::Apart { domains, .. } if domains.is_empty())
    }

    /// `on`: nodes with pods that all terms are about. `is_own`: the pod is one of those itself. `together`: it starts with
    /// others, maybe with those. Else who is placed and not bound does not count: kube-scheduler would not find it there yet.
    pub fn near<'a>(
        terms: &[Term],
        (is_own, together): (bool, bool),
        on: impl Iterator<Item = (&'a Node, Count)>,
    ) -> Self {
        let mut domains = BTreeSet::new();
        for (node, count) in on {
            let counts_placed = is_own || together;
            if count.bound == 0 && (!counts_placed || count.placed == 0) {
                continue;
            }
            let values =
                terms.iter().filter_map(|term| Some((term.key.clone(), node.labels.get(&*term.key)?)));
            domains.extend(values.map(|(key, value)| (key, Box::<str>::from(value))));
        }
        let keys = terms.iter().map(|term| term.key.clone()).collect();
        Self::Near { keys, is_first: is_own && domains.is_empty(), domains }
    }

    /// The `nth` of the pod's constraints. `nodes`: all, each with the pods of it that the constraint is about. `is_own`: the
    /// pod is one of those itself. `together`: those that are placed and not bound count in each domain; else in the one
    /// alone that the pod would come to, as if the others were bound last. In whatever order they are bound, none is
    /// refused then.
    pub fn spread<'a>(
        (all, nth): (&[Spread], usize),
        (is_own, together): (bool, bool),
        pod: &Demands,
        nodes: impl Iterator<Item = (&'a Node, Count)>,
    ) -> Self {
        let Some(one) = all.get(nth) else { return Self::nothing() };
        let mut domains = BTreeMap::<&str, Count>::new();
        for (node, count) in nodes {
            let Some(value) = node.labels.get(&*one.key) else { continue };
            if !all.iter().all(|other| node.labels.get(&*other.key).is_some())
                || (one.by_affinity && affinity::unmatched(pod, node).is_some())
                || (one.by_taints && taint::untolerated(pod, node).is_some())
            {
                continue;
            }
            // A selector of any labels counts nobody there.
            let count = if one.whom.selector.is_any() { Count::default() } else { count };
            let sum = domains.entry(value).or_default();
            sum.bound = sum.bound.saturating_add(count.bound);
            sum.placed = sum.placed.saturating_add(count.placed);
        }
        let of_others = |count: &Count| if together { count.all() } else { count.bound };
        let least = domains.values().map(of_others).min().filter(|_| domains.len() >= one.min_domains);
        let least = least.unwrap_or(0);
        let most = one.max_skew + i64::from(least) - i64::from(is_own);
        let full = domains.iter().filter(|(_, count)| i64::from(count.all()) > most);
        let full = full.map(|(value, count)| ((*value).into(), count.all())).collect();
        Self::Spread { key: one.key.clone(), full, least, max_skew: one.max_skew }
    }

    fn nothing() -> Self {
        Self::Near { keys: Box::default(), domains: BTreeSet::new(), is_first: true }
    }

    /// The pod cannot go to the node.
    pub fn rules_out(&self, node: &Node) -> bool {
        let value = |key: &str| node.labels.get(key);
        match self {
            Self::Apart { key, domains, .. } => value(key).is_some_and(|value| domains.contains_key(value)),
            Self::Near { .. } => self.why(node).is_some(),
            Self::Spread { key, full, .. } => value(key).is_none_or(|value| full.contains_key(value)),
        }
    }

    /// Why the pod cannot go to the node; none: that rule has nothing against it.
    pub fn why(&self, node: &Node) -> Option<Unfit> {
        match self {
            Self::Apart { key, domains, by_others } => {
                let value = node.labels.get(&**key)?;
                let pods = *domains.get(value)?;
                let (key, value) = (key.to_string(), value.to_owned());
                Some(match by_others {
                    true => Unfit::AvoidedBy { key, value, pods },
                    false => Unfit::Avoids { key, value, pods },
                })
            }
            Self::Near { keys, domains, is_first } => {
                if let Some(key) = keys.iter().find(|key| node.labels.get(&***key).is_none()) {
                    return Some(Unfit::NearLabel(key.to_string()));
                }
                keys.iter().filter(|_| !is_first).find_map(|key| {
                    let value = node.labels.get(&**key)?;
                    let is_there = domains.contains(&(key.clone(), value.into()));
                    (!is_there).then(|| Unfit::Near { key: key.to_string(), value: value.to_owned() })
                })
            }
            Self::Spread { key, full, least, max_skew } => {
                let Some(value) = node.labels.get(&**key) else {
                    return Some(Unfit::SpreadLabel(key.to_string()));
                };
                let pods = *full.get(value)?;
                let (key, value) = (key.to_string(), value.to_owned());
                Some(Unfit::Spread { key, value, pods, least: *least, max_skew: *max_skew })
            }
        }
    }
}

impl Count {
    pub fn all(self) -> u32 {
        self.bound.saturating_add(self.placed)
    }

    pub fn is_none(self) -> bool {
        self.all() == 0
    }
}
