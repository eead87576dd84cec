//! What pods are asked for a rule, and what follows from where they are.

use std::sync::Arc;

use super::{Asker, Counts, NODE_TICKS, Neighbour, on};
use crate::controller::view::ClusterView;
use crate::feasible::{Count, Demands, Judged, Namespaces, Term, Terms, Whom};

/// One thing that a pod requires of others. Equal ones are about the same pods, and rule the same nodes out.
///
/// `of`: the pod's namespace, where it is about pods of others as well. Of these it counts the bound alone: kube-scheduler
/// finds a pod nowhere before it is bound, which it may never be.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum NeighbourRule {
    Apart {
        term: Arc<Term>,
        of: Option<Box<str>>,
    },
    /// All terms of its affinity, and whether they are about the pod itself.
    Near {
        terms: Arc<Terms>,
        of: Option<Box<str>>,
        is_own: bool,
        together: bool,
    },
    /// The nth constraint.
    Spread {
        terms: Arc<Terms>,
        nth: usize,
        is_own: bool,
        together: bool,
        demands: Arc<Demands>,
    },
}

impl NeighbourRule {
    /// Those of a pod.
    pub fn of(asker: &Asker<'_>) -> Vec<Self> {
        let Some(terms) = asker.terms else { return Vec::new() };
        let of = |term: &Term| {
            let is_own = term.whom.namespaces.are_only(asker.namespace);
            (!is_own).then(|| asker.namespace.into())
        };
        let apart = |term: &Arc<Term>| Self::Apart { term: term.clone(), of: of(term) };
        let mut all: Vec<Self> = terms.apart.iter().map(apart).collect();
        if !terms.near.is_empty() {
            let is_own = terms.is_near_itself(asker.namespace, asker.labels);
            let of = terms.near.iter().find_map(of);
            all.push(Self::Near { terms: terms.clone(), of, is_own, together: asker.together });
        }
        let spread = terms.spread.iter().enumerate().map(|(nth, one)| Self::Spread {
            terms: terms.clone(),
            nth,
            is_own: one.whom.are(asker.namespace, asker.labels),
            together: asker.together,
            demands: asker.demands.clone(),
        });
        all.extend(spread);
        all
    }

    /// All pods that it is about are meant by each of these.
    fn whom(&self) -> impl Iterator<Item = &Whom> {
        let (one, near, spread) = match self {
            Self::Apart { term, .. } => (Some(&term.whom), &[][..], None),
            Self::Near { terms, .. } => (None, &*terms.near, None),
            Self::Spread { terms, nth, .. } => (None, &[][..], terms.spread.get(*nth)),
        };
        let near = near.iter().map(|term| &term.whom);
        one.into_iter().chain(near).chain(spread.map(|one| &one.whom))
    }

    /// It counts pods of this namespace.
    pub fn looks_at(&self, namespace: &str) -> bool {
        self.whom().all(|whom| whom.namespaces.have(namespace))
    }

    /// Those of which it counts pods, or some more; none: all.
    pub fn namespaces(&self) -> Option<&[Box<str>]> {
        self.whom().find_map(|whom| match &whom.namespaces {
            Namespaces::All => None,
            Namespaces::These(names) => Some(&**names),
        })
    }

    /// It counts this pod. One that is ending counts for affinity and anti-affinity until it is gone.
    pub fn counts(&self, namespace: &str, pod: &Neighbour) -> bool {
        let (is_past, of) = match self {
            // It is about pods of its own namespace.
            Self::Spread { .. } => (pod.is_ending, None),
            Self::Apart { of, .. } | Self::Near { of, .. } => (false, of.as_deref()),
        };
        let is_found = pod.is_bound || of.is_none_or(|of| of == namespace);
        !is_past && is_found && self.whom().all(|whom| whom.are(namespace, &pod.labels))
    }

    /// How many single comparisons a pod may take.
    pub fn size(&self) -> u64 {
        self.whom().map(Whom::size).sum()
    }

    pub fn judge(&self, counts: &Counts, view: &ClusterView, ticks: &mut u64) -> Judged {
        *ticks += NODE_TICKS * counts.len() as u64;
        match self {
            Self::Apart { term, .. } => Judged::apart(term, on(counts, view)),
            Self::Near { terms, is_own, together, .. } => {
                Judged::near(&terms.near, (*is_own, *together), on(counts, view))
            }
            Self::Spread { terms, nth, is_own, together, demands } => {
                let mut looked = 0;
                let nodes = view.nodes().filter_map(|(name, state)| {
                    looked += 1;
                    let count = counts.get(name).copied().unwrap_or(Count::default());
                    Some((state.object.as_deref()?, count))
                });
                let judged = Judged::spread((&terms.spread, *nth), (*is_own, *together), demands, nodes);
                *ticks += NODE_TICKS * (terms.spread.len() as u64 + demands.terms()) * looked;
                judged
            }
        }
    }
}
