//! Other pods that keep a pod off nodes, by what they require of one another.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use super::trial::asks;
use super::{KEPT_TICKS, NodeSet, PodPart, TERM_TICKS};
use crate::allocate::{self, Decision, Explanation, Index, Nodes, Placement, PodAsk, Shortage, Skipped};
use crate::controller::capacity::Aside;
use crate::controller::core::Core;
use crate::controller::multi_gpu;
use crate::controller::neighbours::{Asker, Neighbour, Ruled};
use crate::controller::pods::Pods;
use crate::controller::queue::UnitKey;
use crate::controller::view::{ClusterView, Pod};
use crate::feasible::{Demands, Term, Terms, Unfit, Whom};
use crate::model::names::{NodeName, PodUid};
use crate::model::quantity::Bytes;

/// Sets of nodes that are looked through one by one. Of more one is made.
const SETS_MAX: usize = 4;
/// Domains that pods which must be near one another are tried in, beside the one that the first of them goes to: in which
/// one of them has a place, and in all.
const DOMAINS_MAX: usize = 4;
const DOMAINS_TRIED_MAX: usize = 64;
/// Of taking in a pod that has a place, in ticks of [`crate::select::TICKS_PER_UNIT`].
const POD_TICKS: u64 = 20;

/// Why not all of some pods have a place.
struct InTurn {
    why: Explanation,
    /// Which of those that are to be near one another came first, by its place in the list, and where it would have gone.
    first: Option<(usize, NodeName)>,
}

impl InTurn {
    fn is_unsearched(&self) -> bool {
        matches!(self.why.shortage, Shortage::Unsearched { .. })
    }
}

/// There was nothing left to spend.
fn unsearched(wants: usize) -> Explanation {
    Explanation { gang: (0, 1), shortage: Shortage::Unsearched { wants }, skipped: Skipped::default() }
}

impl Core {
    /// The pod has this node now.
    pub(in crate::controller) fn note_neighbour(&mut self, uid: &PodUid, node: Option<&NodeName>) {
        let Some(pod) = self.view.pod(uid) else { return };
        let neighbour = node.and_then(|node| neighbour(pod, node));
        self.pods.neighbours.set(&pod.at.namespace, uid, neighbour, self.view.terms_of(uid));
        if self.pods.neighbours.has_unfollowed_to_tell() {
            let words = "too many different terms of anti-affinity are about pods of other namespaces: other pods may be placed \
                         where these keep them off, until kube-scheduler refuses them there";
            self.recorder.trouble(format!("pod {}/{}: {words}", pod.at.namespace, pod.at.name));
        }
    }

    /// As if a pod that has no place had this one. None: it has none again.
    fn assume(&mut self, uid: &PodUid, node: Option<&NodeName>) {
        let Some(pod) = self.view.pod(uid).filter(|_| !self.pods.has_place(uid)) else { return };
        let neighbour = node.and_then(|node| neighbour(pod, node));
        self.pods.neighbours.assume(&pod.at.namespace, uid, neighbour, self.view.terms_of(uid));
    }

    /// As if a pod had asked for the first time.
    #[cfg(test)]
    pub(in crate::controller) fn wake_neighbours(&mut self) {
        if !self.pods.neighbours.is_awake() {
            let all = with_places(&self.view, &self.pods);
            self.pods.neighbours.wake(all.into_iter());
        }
    }

    /// What was followed is what there is.
    #[cfg(test)]
    pub(in crate::controller) fn check_neighbours(&self) {
        let Some(known) = self.pods.neighbours.all() else { return };
        let mut right = with_places(&self.view, &self.pods);
        right.sort_by_key(|(namespace, uid, _)| (*namespace, *uid));
        let right: Vec<_> = right.iter().map(|(namespace, uid, place)| (*namespace, *uid, place)).collect();
        assert_eq!(known, right);
    }

    /// Pods that were tried in vain may find room since others have come to a place, or left one.
    pub(in crate::controller) fn try_again_beside_others(&mut self) {
        let stirred = self.pods.neighbours.take_stirred();
        if stirred.is_none() {
            return;
        }
        let concerned = |uid: &&PodUid| self.view.terms_of(uid).is_some_and(|terms| stirred.concerns(terms));
        let concerned: Vec<PodUid> = self.queue.pods().filter(concerned).cloned().collect();
        concerned.iter().for_each(|uid| self.queue.again(uid));
    }

    /// What other pods have against a pod that has no place.
    pub(in crate::controller) fn ruled(&mut self, uid: &PodUid) -> Vec<Ruled> {
        ruled(uid, &self.view, &mut self.pods, &mut self.capacity.index)
    }

    /// Where others keep the pod off.
    pub(in crate::controller) fn kept_off(&mut self, uid: &PodUid) -> Vec<NodeSet> {
        let ruled = self.ruled(uid);
        sets(&ruled, &mut self.capacity.index)
    }

    /// The same of a pod that is to be made anew in place of this one, and requires nothing of others.
    pub(in crate::controller) fn kept_off_anew(
        &mut self,
        uid: &PodUid,
        demands: &Arc<Demands>,
    ) -> Vec<NodeSet> {
        let Some(pod) = self.view.pod(uid) else { return Vec::new() };
        let ruled = ask((pod, demands, None), &self.view, &mut self.pods, &mut self.capacity.index);
        sets(&ruled, &mut self.capacity.index)
    }

    /// What one of these has against the node.
    pub(in crate::controller) fn why_apart(&self, ruled: &[Ruled], node: &NodeName) -> Option<Unfit> {
        let object = self.view.node(node)?.object.as_deref()?;
        ruled.iter().filter(|one| one.nodes.contains(node)).find_map(|one| one.judged.why(object))
    }

    /// Some of the pods that start together require something of others, maybe of each other.
    pub(super) fn is_mutual(&self, parts: &[PodPart]) -> bool {
        parts.len() > 1 && parts.iter().any(|part| self.view.terms_of(&part.pod).is_some())
    }

    /// Some of them must not be together.
    pub(in crate::controller::steps) fn are_apart(&self, parts: &[PodPart]) -> bool {
        let is_apart = |terms: &Arc<Terms>| !terms.apart.is_empty() || !terms.spread.is_empty();
        parts.len() > 1 && parts.iter().any(|part| self.view.terms_of(&part.pod).is_some_and(is_apart))
    }

    /// Places pods that start together one after another, each as if those before it were there. Where they must be near one
    /// another, the first of these decides where all go, and it goes where it fits best by itself: if the others do not fit
    /// there, the domains with the most room are tried. `had_all`: there will never be more to spend for it.
    ///
    /// # Errors
    /// One of them has no place, or there was nothing left to spend before all was tried.
    pub(super) fn decide_in_turn(
        &mut self,
        parts: &[PodPart],
        nth: usize,
        had_all: bool,
    ) -> Result<Decision, Explanation> {
        let Some(together) = self.near_one_another(parts) else { return Err(unsearched(parts.len())) };
        let mut refused = match self.in_turn(parts, nth, (&together, None)) {
            Err(refused) if !refused.is_unsearched() => refused,
            decided => return decided.map_err(|refused| refused.why),
        };
        let Some((first, there)) = refused.first.take() else { return Err(refused.why) };
        let (mut with_a_place, is_several) = (0, asks(parts, nth).1);
        for domain in self.other_domains(parts, (first, &there)) {
            if with_a_place >= DOMAINS_MAX {
                break;
            }
            let outside = self.nodes_outside(&domain);
            if self.capacity.index.goes_on() && !self.fits_there(&parts[first], nth, is_several, &outside) {
                continue;
            }
            with_a_place += 1;
            let other = match self.capacity.index.goes_on() {
                true => self.in_turn(parts, nth, (&together, Some(&outside))),
                false => Err(Box::new(InTurn { why: unsearched(parts.len()), first: None })),
            };
            match other {
                Ok(decision) => return Ok(decision),
                // What is known of the first domain says more than that others were not looked at.
                Err(other) if other.is_unsearched() => {
                    return Err(if had_all { refused.why } else { other.why });
                }
                Err(other) if other.why.gang.0 > refused.why.gang.0 => refused = other,
                Err(_) => {}
            }
        }
        // The last of them may not have been searched to its end.
        if !had_all && self.capacity.index.spent().1 {
            return Err(unsearched(parts.len()));
        }
        Err(refused.why)
    }

    /// All nodes but those of a domain.
    fn nodes_outside(&mut self, domain: &BTreeSet<NodeName>) -> NodeSet {
        let all = self.capacity.index.nodes().map(|node| node.name());
        let outside: BTreeSet<NodeName> = all.filter(|name| !domain.contains(*name)).cloned().collect();
        self.capacity.index.pay(KEPT_TICKS.saturating_mul(outside.len() as u64));
        Arc::new(outside)
    }

    /// The pod by itself has a place there.
    fn fits_there(&mut self, part: &PodPart, nth: usize, is_several: bool, outside: &NodeSet) -> bool {
        let nodes = part.nodes_beside(part.apart.iter().chain([outside]).cloned().collect());
        let asks = [PodAsk { shape: part.way(nth).shape.clone(), nodes }];
        match is_several {
            false => allocate::places(&mut self.capacity.index, &asks, part.policy).is_some(),
            true => multi_gpu::places(&mut self.capacity, &asks, part.policy).is_some(),
        }
    }

    /// Those of these pods that must be near others, and those whom they must be near, by their places in the list. None:
    /// there is not enough left to spend for finding out.
    fn near_one_another(&mut self, parts: &[PodPart]) -> Option<BTreeSet<usize>> {
        let view = &self.view;
        let near = |part: &PodPart| view.terms_of(&part.pod).filter(|terms| !terms.near.is_empty());
        // Equal ones are kept once.
        let mut terms: Vec<&Arc<Terms>> = parts.iter().filter_map(near).collect();
        terms.sort_unstable_by_key(|terms| Arc::as_ptr(terms));
        terms.dedup_by_key(|terms| Arc::as_ptr(terms));
        let whom = || terms.iter().flat_map(|terms| &terms.near).map(|term| &term.whom);
        let looks = whom().map(Whom::size).sum::<u64>().saturating_mul(parts.len() as u64);
        if looks == 0 {
            return Some(BTreeSet::new());
        }
        self.capacity.index.pay(TERM_TICKS.saturating_mul(looks));
        if !self.capacity.index.goes_on() {
            return None;
        }
        let is_meant = |pod: &Pod| {
            let labels = pod.standing.labels.as_ref();
            labels.is_some_and(|labels| whom().any(|whom| whom.are(&pod.at.namespace, labels)))
        };
        let is_one = |part: &PodPart| near(part).is_some() || view.pod(&part.pod).is_some_and(is_meant);
        Some(parts.iter().enumerate().filter(|(_, part)| is_one(part)).map(|(at, _)| at).collect())
    }

    /// The nodes of each domain, as the labels have them by which these pods must be near others, but of the one in which
    /// `first` would go there: those where it may go by itself, those with the most GPU memory left on its nodes first.
    fn other_domains(
        &mut self,
        parts: &[PodPart],
        (first, there): (usize, &NodeName),
    ) -> Vec<BTreeSet<NodeName>> {
        let terms = parts.iter().filter_map(|part| self.view.terms_of(&part.pod));
        let keys: BTreeSet<&str> = terms.flat_map(|terms| terms.near.iter().map(Term::key)).collect();
        let nodes = parts[first].nodes_beside(Vec::new());
        let mut domains: BTreeMap<Vec<&str>, (Bytes, BTreeSet<NodeName>)> = BTreeMap::new();
        let mut looked = 0;
        for node in self.capacity.index.nodes() {
            looked += 1;
            let object = self.view.node(node.name()).and_then(|state| state.object.as_deref());
            let values = object.and_then(|object| keys.iter().map(|key| object.label(key)).collect());
            let Some(values) = values else { continue };
            let (left, names) = domains.entry(values).or_default();
            if nodes.allow(node.name()) {
                left.0 += node.gpus().filter(|gpu| !gpu.closed()).map(|gpu| gpu.memory().1.0).sum::<u64>();
            }
            names.insert(node.name().clone());
        }
        let is_other = |(left, names): &(Bytes, BTreeSet<NodeName>)| left.0 > 0 && !names.contains(there);
        let mut others: Vec<_> = domains.into_values().filter(is_other).collect();
        others.sort_by_key(|(left, _)| Reverse(*left));
        self.capacity.index.pay(looked * KEPT_TICKS);
        others.into_iter().take(DOMAINS_TRIED_MAX).map(|(_, names)| names).collect()
    }

    /// One trial. `together`: the pods that are to be near one another; `outside`: where these do not go, if that is said.
    fn in_turn(
        &mut self,
        parts: &[PodPart],
        nth: usize,
        (together, outside): (&BTreeSet<usize>, Option<&NodeSet>),
    ) -> Result<Decision, Box<InTurn>> {
        let (asks, is_several) = asks(parts, nth);
        let mut placed: Vec<(usize, Placement)> = Vec::with_capacity(parts.len());
        let mut refused = None;
        let mut left: VecDeque<usize> = allocate::in_order(&self.capacity.index, &asks).into();
        // How many were put behind the others since one was placed.
        let (mut is_first, mut behind) = (true, 0);
        while let Some(at) = left.pop_front() {
            let outside = outside.filter(|_| together.contains(&at));
            let decided = self.decide_next(&parts[at], asks[at].clone(), is_several, (is_first, outside));
            is_first = false;
            match decided {
                Ok(place) => {
                    self.assume(&parts[at].pod, Some(&place.node));
                    self.capacity.set_aside(Aside { places: vec![place.clone()], alone: is_several });
                    placed.push((at, place));
                    behind = 0;
                }
                // Who it must be near may be one of those that come after it.
                Err(_) if behind < left.len() && self.is_near_others(&parts[at].pod) => {
                    left.push_back(at);
                    behind += 1;
                }
                Err(explanation) => {
                    refused = Some(Explanation { gang: (placed.len(), parts.len()), ..explanation });
                    break;
                }
            }
        }
        for (at, _) in &placed {
            self.capacity.lift();
            self.assume(&parts[*at].pod, None);
        }
        let first = placed.iter().find(|(at, _)| together.contains(at));
        let first = first.map(|(at, place)| (*at, place.node.clone()));
        placed.sort_by_key(|(at, _)| *at);
        let placements = placed.into_iter().map(|(_, place)| place).collect();
        refused.map_or(Ok(Decision { placements }), |why| Err(Box::new(InTurn { why, first })))
    }

    fn is_near_others(&self, pod: &PodUid) -> bool {
        self.view.terms_of(pod).is_some_and(|terms| !terms.near.is_empty())
    }

    fn decide_next(
        &mut self,
        part: &PodPart,
        mut ask: PodAsk,
        is_several: bool,
        (is_first, outside): (bool, Option<&NodeSet>),
    ) -> Result<Placement, Explanation> {
        let spent = |ask: &PodAsk| unsearched(ask.shape.wants.len());
        if !is_first && !self.capacity.index.goes_on() {
            return Err(spent(&ask));
        }
        let mut apart = self.kept_off(&part.pod);
        apart.extend(outside.cloned());
        ask.nodes = part.nodes_beside(apart);
        let asks = std::slice::from_ref(&ask);
        let decision = match is_several {
            false => allocate::decide(&mut self.capacity.index, asks, part.policy),
            true => multi_gpu::decide(&mut self.capacity, asks, part.policy),
        };
        decision?.placements.into_iter().next().ok_or_else(|| spent(&ask))
    }
}

impl PodPart {
    /// Where the pod may go if others keep it off these.
    pub(super) fn nodes_beside(&self, apart: Vec<NodeSet>) -> Nodes {
        match &self.nodes {
            Nodes::Only(names) => {
                let is_open = |name: &&NodeName| !apart.iter().any(|nodes| nodes.contains(*name));
                Nodes::Only(names.iter().filter(is_open).cloned().collect())
            }
            Nodes::Any => Nodes::Except(apart),
            Nodes::Except(sets) => {
                let of_others = |set: &&NodeSet| self.apart.iter().any(|one| Arc::ptr_eq(one, set));
                Nodes::Except(sets.iter().filter(|set| !of_others(set)).cloned().chain(apart).collect())
            }
        }
    }
}

/// None: no selector can be about it, or it has ended.
fn neighbour(pod: &Pod, node: &NodeName) -> Option<Neighbour> {
    let labels = pod.standing.labels.as_ref().filter(|_| pod.room.pods > 0)?;
    Some(Neighbour {
        node: node.clone(),
        labels: labels.clone(),
        is_bound: pod.node.is_some(),
        is_ending: pod.ending,
    })
}

/// What other pods have against a pod that has no place. That is looked up for each pod and paid for.
pub(super) fn ruled(uid: &PodUid, view: &ClusterView, pods: &mut Pods, index: &mut Index) -> Vec<Ruled> {
    let Some(pod) = view.pod(uid).filter(|_| !pods.has_place(uid)) else { return Vec::new() };
    let Some(demands) = &pod.demands else { return Vec::new() };
    ask((pod, demands, view.terms_of(uid)), view, pods, index)
}

fn ask(
    (pod, demands, terms): (&Pod, &Arc<Demands>, Option<&Arc<Terms>>),
    view: &ClusterView,
    pods: &mut Pods,
    index: &mut Index,
) -> Vec<Ruled> {
    let Some(labels) = pod.standing.labels.as_deref() else { return Vec::new() };
    if terms.is_some() && !pods.neighbours.is_awake() {
        let all = with_places(view, pods);
        index.pay(POD_TICKS * all.len() as u64);
        pods.neighbours.wake(all.into_iter());
    }
    let together = terms.is_some() && matches!(pods.unit_of(&pod.at.uid), UnitKey::Gang { .. });
    let asker = Asker { namespace: &pod.at.namespace, labels, terms, demands, together };
    let (ruled, ticks) = pods.neighbours.of(&asker, view);
    index.pay(ticks);
    ruled
}

fn with_places<'a>(view: &'a ClusterView, pods: &Pods) -> Vec<(&'a str, &'a PodUid, Neighbour)> {
    let there = |pod: &'a Pod| {
        let place = neighbour(pod, pods.node_of(&pod.at.uid)?)?;
        Some((pod.at.namespace.as_str(), &pod.at.uid, place))
    };
    view.pods().filter_map(there).collect()
}

/// Where they keep the pod off.
pub(super) fn sets(ruled: &[Ruled], index: &mut Index) -> Vec<NodeSet> {
    if ruled.len() <= SETS_MAX {
        return ruled.iter().map(|one| one.nodes.clone()).collect();
    }
    let all = ruled.iter().map(|one| one.nodes.len() as u64).sum::<u64>();
    index.pay(KEPT_TICKS.saturating_mul(all));
    let one: BTreeSet<NodeName> = ruled.iter().flat_map(|one| one.nodes.iter()).cloned().collect();
    vec![Arc::new(one)]
}
