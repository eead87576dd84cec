//! Pods with required anti-affinity, as those see them that it is about.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::{Asker, COMPARE_TICKS, Counts, NODE_TICKS, Neighbour, POD_TICKS, add, on, take};
use crate::controller::view::ClusterView;
use crate::feasible::{Judged, Namespaces, Term, Terms};
use crate::model::names::{NodeName, PodUid};

/// Terms of anti-affinity about pods of other namespaces that are followed: of pods of one namespace, and in all. Others
/// have to look through them.
const FOREIGN_OF_NAMESPACE_MAX: usize = 32;
const FOREIGN_MAX: usize = 1024;

/// A pod with a place and anti-affinity.
#[derive(Debug)]
struct Avoider {
    node: NodeName,
    is_bound: bool,
    terms: Arc<Terms>,
    /// Those of its terms that are followed.
    followed: Vec<Arc<Term>>,
}

#[derive(Debug, Default)]
pub struct Avoiders {
    pods: BTreeMap<PodUid, Avoider>,
    /// Where pods are that have a term.
    terms: BTreeMap<Arc<Term>, Counts>,
    /// The same by the namespace that they are about; under "" those that are about all.
    of_namespaces: BTreeMap<Box<str>, BTreeSet<Arc<Term>>>,
    /// How many pods of a namespace have a term about pods of others.
    foreign: BTreeMap<Box<str>, BTreeMap<Arc<Term>, usize>>,
    /// Terms that are not followed, as there are too many, and that are not counted yet.
    unfollowed: u64,
    /// That there are some was told.
    is_told: bool,
}

impl Avoiders {
    /// The pod is there now, in place of where it was, with these terms. None: it has no place, or no anti-affinity.
    pub fn set(&mut self, namespace: &str, pod: &PodUid, place: Option<(&Neighbour, &Arc<Terms>)>) {
        let known = self.pods.get(pod).map(|one| (&one.node, one.is_bound, &one.terms));
        if known == place.map(|(place, terms)| (&place.node, place.is_bound, terms)) {
            return;
        }
        if let Some(before) = self.pods.remove(pod) {
            before.followed.iter().for_each(|term| self.leave(namespace, &before, term));
        }
        let Some((place, terms)) = place else { return };
        // kube-scheduler finds a pod nowhere before it is bound, which it may never be: until then it keeps nobody off but
        // pods of its own namespace.
        let count = |term: &&Arc<Term>| place.is_bound || term.whom.namespaces.are_only(namespace);
        let mut followed = Vec::new();
        for term in terms.apart.iter().filter(count) {
            if !self.follow_foreign(namespace, term) {
                self.unfollowed = self.unfollowed.saturating_add(1);
                continue;
            }
            if !self.terms.contains_key(term) {
                self.index(term, |terms| terms.insert(term.clone()));
            }
            add(self.terms.entry(term.clone()).or_default(), &place.node, place.is_bound);
            followed.push(term.clone());
        }
        let (node, is_bound, terms) = (place.node.clone(), place.is_bound, terms.clone());
        self.pods.insert(pod.clone(), Avoider { node, is_bound, terms, followed });
    }

    /// One more pod of the namespace has the term. False: there are too many that are about pods of other namespaces.
    fn follow_foreign(&mut self, namespace: &str, term: &Arc<Term>) -> bool {
        if term.whom.namespaces.are_only(namespace) {
            return true;
        }
        let of_namespace = self.foreign.get(namespace);
        if !of_namespace.is_some_and(|terms| terms.contains_key(term)) {
            let all: usize = self.foreign.values().map(BTreeMap::len).sum();
            if of_namespace.is_some_and(|terms| terms.len() >= FOREIGN_OF_NAMESPACE_MAX) || all >= FOREIGN_MAX
            {
                return false;
            }
        }
        *self.foreign.entry(namespace.into()).or_default().entry(term.clone()).or_default() += 1;
        true
    }

    fn leave(&mut self, namespace: &str, pod: &Avoider, term: &Arc<Term>) {
        if let Some(terms) = self.foreign.get_mut(namespace) {
            if let Some(pods) = terms.get_mut(term) {
                *pods -= 1;
            }
            terms.retain(|_, pods| *pods > 0);
            if terms.is_empty() {
                self.foreign.remove(namespace);
            }
        }
        let Some(counts) = self.terms.get_mut(term) else { return };
        take(counts, &pod.node, pod.is_bound);
        if counts.is_empty() {
            self.terms.remove(term);
            self.index(term, |terms| terms.remove(term));
        }
    }

    /// Terms of pods that were not followed when they came to a place, as there were too many, since this was asked last.
    pub fn take_unfollowed(&mut self) -> u64 {
        std::mem::take(&mut self.unfollowed)
    }

    /// Once: some are not followed.
    pub fn has_unfollowed_to_tell(&mut self) -> bool {
        self.unfollowed > 0 && !std::mem::replace(&mut self.is_told, true)
    }

    fn index(&mut self, term: &Term, change: impl Fn(&mut BTreeSet<Arc<Term>>) -> bool) {
        let mut of = |namespace: &str| {
            let terms = self.of_namespaces.entry(namespace.into()).or_default();
            change(terms);
            if terms.is_empty() {
                self.of_namespaces.remove(namespace);
            }
        };
        match &term.whom.namespaces {
            Namespaces::All => of(""),
            Namespaces::These(names) => names.iter().for_each(|name| of(name)),
        }
    }

    /// What terms of other pods have against the pod: for each label of nodes its domains together.
    pub fn judge(&self, asker: &Asker<'_>, view: &ClusterView, ticks: &mut u64) -> Vec<Judged> {
        let mut by_key: BTreeMap<&str, Judged> = BTreeMap::new();
        for term in
            ["", asker.namespace].iter().flat_map(|of| self.of_namespaces.get(*of).into_iter().flatten())
        {
            *ticks += POD_TICKS + COMPARE_TICKS * term.whom.size();
            if !term.whom.are(asker.namespace, asker.labels) {
                continue;
            }
            let Some(counts) = self.terms.get(term) else { continue };
            *ticks += NODE_TICKS * counts.len() as u64;
            by_key.entry(term.key()).or_insert_with(|| Judged::by_others(term)).add_domains(on(counts, view));
        }
        by_key.into_values().filter(Judged::has_domains).collect()
    }
}
