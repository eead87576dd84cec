//! The search: what has to end on which node so that what waits finds room there.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use crate::allocate::victims::{Closed, EvictionSite, Freed, Preemptor, Rank, Victims};
use crate::allocate::{AttributeConstraint, Nodes, Placement, Shape, Want};
use crate::controller::Moment;
use crate::controller::bounds::Amounts;
use crate::controller::capacity::Aside;
use crate::controller::core::Core;
use crate::controller::holders::Holders;
use crate::controller::preempt::VICTIMS_MAX;
use crate::controller::queue::{Turn, UnitKey};
use crate::controller::steps::bounded::{least, of_places};
use crate::controller::steps::place::PodPart;
use crate::controller::steps::preempting::candidates::There;
use crate::controller::view::{Claim, GpuRef, Pod};
use crate::feasible::Resources;
use crate::model::claim::{ClaimKey, PodRef};
use crate::model::names::{DeviceName, NodeName, PodUid};
use crate::model::quantity::Bytes;

/// Nodes that are looked at closely for one unit, those first where the least may be lost: as many as kube-scheduler looks
/// at by default (`minCandidateNodesAbsolute`).
const NODES_MAX: usize = 100;

/// Of looking whether a pod is ending, in ticks of [`crate::select::TICKS_PER_UNIT`].
const POD_TICKS: u64 = 1;

/// Who asks.
#[derive(Debug)]
pub struct Asker {
    pub pod: PodRef,
    pub priority: i32,
    /// kube-scheduler is to bind it to the share that is placed for it.
    pub is_usual: bool,
    pub room: Resources,
}

/// What a look came to.
pub enum VictimsFound {
    /// What ends anyway on this node will be enough.
    Soon(NodeName),
    /// A whole GPU of this node is free, or on its way back to kube-scheduler.
    Free(NodeName),
    /// Only what pods of lower priority have of CPU, memory and number lacks: kube-scheduler preempts them.
    Room {
        nth: usize,
        place: Placement,
    },
    Victims {
        place: Placement,
        victims: Vec<PodUid>,
    },
    /// All places that there would be are more than the namespace may have, as these words say.
    Bound(String),
}

/// What pods want that find no room.
pub struct WantedRoom {
    pub parts: Vec<PodPart>,
    /// Where each of them may go once others have ended.
    pub nodes: Vec<Nodes>,
    /// GPUs of a claim that has several are for that claim alone.
    pub alone: bool,
}

/// What PodDisruptionBudgets say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Budgets {
    Kept,
    /// Only asked whether it is they that stand in the way.
    Passed,
}

/// Where others may end for a unit.
pub struct VictimSearch<'a> {
    /// Of each of its pods.
    pub nodes: &'a [Nodes],
    pub asker: &'a Asker,
    /// What its namespace may have counts, beside what else its units are to have. None: it is for a whole GPU, which nobody
    /// counts.
    pub unit: Option<&'a UnitKey>,
    /// Places that its other pods have by then.
    pub beside: &'a [Placement],
    pub budgets: Budgets,
    /// GPUs that are none for it, whatever ends there.
    pub without: &'a BTreeSet<GpuRef>,
    /// What it may cost, in ticks of [`crate::select::TICKS_PER_UNIT`].
    pub ticks: u64,
    /// So many nodes were looked at before, where nobody was found.
    pub from: usize,
    pub now: Moment,
}

/// What a look at one way to serve a unit came to know of what the namespace may have that asks.
#[derive(Debug, Default)]
struct AtBound {
    /// Why the first place is more than that.
    words: Option<String>,
    /// What those of its pods have that will soon have ended. Summed when the first place is more than it may have now.
    ending: Option<Amounts>,
}

/// Other nodes on which a pod could run, GPUs aside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Others {
    None,
    Some,
}

/// No answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Nobody {
    /// All nodes were looked at, in this look and those that it goes on from.
    Anywhere,
    /// So many were; there are more.
    Until(usize),
}

impl VictimSearch<'_> {
    fn allows(&self, node: &NodeName) -> bool {
        self.nodes.iter().all(|nodes| nodes.allow(node))
    }
}

impl Core {
    /// What a unit wants, if others may end for it. None: it is not for room on one node that it waits.
    pub(super) fn wanted(&mut self, turn: &Turn, now: Moment) -> Option<WantedRoom> {
        let parts = self.parts(turn, now)?;
        let alone = parts.iter().any(PodPart::is_several);
        // All who end are pods of one node.
        let is_several = alone && parts.len() > 1;
        if is_several || self.are_apart(&parts) || self.check_bounds(&parts).is_err() {
            return None;
        }
        let mut nodes = Vec::new();
        for part in &parts {
            if !matches!(self.study(part), Ok(true)) {
                return None;
            }
            nodes.push(self.nodes_then(&part.pod, &part.nodes, now));
        }
        Some(WantedRoom { parts, nodes, alone })
    }

    /// As [`Self::find`]; where pods that start together find no room on one node, also for those of them that have none
    /// anywhere, on one node, beside the places that there are for the others: these places come back, too. Capacity is
    /// afterwards as before.
    pub(super) fn find_with_places(
        &mut self,
        wanted: &WantedRoom,
        look: &VictimSearch<'_>,
    ) -> (Result<VictimsFound, Nobody>, Vec<Placement>) {
        let found = self.find(wanted, look);
        let is_in_vain = matches!(found, Err(Nobody::Anywhere) | Ok(VictimsFound::Bound(_)));
        if wanted.parts.len() < 2 || !is_in_vain {
            return (found, Vec::new());
        }
        let mut order: Vec<usize> = (0..wanted.parts.len()).collect();
        order.sort_by_key(|at| Reverse(least(wanted.parts[*at].shape(0)).mib));
        let (mut places, mut rest) = (Vec::new(), Vec::new());
        for at in order {
            let place = self.first_way(std::slice::from_ref(&wanted.parts[at]));
            match place.and_then(|(_, decision)| decision.placements.into_iter().next()) {
                Some(place) => {
                    self.capacity.set_aside(Aside { places: vec![place.clone()], alone: false });
                    places.push(place);
                }
                None => rest.push(at),
            }
        }
        let found = match places.is_empty() || rest.is_empty() || self.has_spent(look) {
            true => found,
            false => {
                let parts: Vec<&PodPart> = rest.iter().map(|at| &wanted.parts[*at]).collect();
                let nodes: Vec<Nodes> = rest.iter().map(|at| wanted.nodes[*at].clone()).collect();
                let look = VictimSearch { nodes: &nodes, from: 0, beside: &places, ..*look };
                match (self.find_for((&parts, false), &look), found) {
                    (Ok(of_rest), _) => Ok(of_rest),
                    // Where to go on is a matter of all of them.
                    (Err(_), found) => found,
                }
            }
        };
        places.iter().for_each(|_| drop(self.capacity.lift()));
        (found, places)
    }

    /// The first of the ways to serve a unit for which there is an answer. Capacity is afterwards as before.
    pub(super) fn find(
        &mut self,
        wanted: &WantedRoom,
        look: &VictimSearch<'_>,
    ) -> Result<VictimsFound, Nobody> {
        let parts: Vec<&PodPart> = wanted.parts.iter().collect();
        self.find_for((&parts, wanted.alone), look)
    }

    fn find_for(
        &mut self,
        (parts, alone): (&[&PodPart], bool),
        look: &VictimSearch<'_>,
    ) -> Result<VictimsFound, Nobody> {
        self.refresh_holders();
        let holders = std::mem::take(&mut self.reserves.evictions.preempting.holders);
        let ways = parts.iter().map(|part| part.ways()).max().unwrap_or(1);
        let mut bound = None;
        let found = first(0..ways, |nth| {
            if self.beyond_bounds_at_least(parts, nth).is_some() {
                return Err(Nobody::Anywhere);
            }
            let shape = together(parts, nth);
            let preemptor = self.capacity.index.preemptor(&shape, alone);
            match self.look_at_way(look, (nth, &shape), &holders, preemptor) {
                Ok(VictimsFound::Bound(words)) => {
                    bound.get_or_insert(words);
                    Err(Nobody::Anywhere)
                }
                found => found,
            }
        });
        self.reserves.evictions.preempting.holders = holders;
        match (found, bound) {
            (Err(Nobody::Anywhere), Some(words)) => Ok(VictimsFound::Bound(words)),
            (found, _) => found,
        }
    }

    pub(super) fn look_at_way(
        &mut self,
        look: &VictimSearch<'_>,
        (nth, shape): (usize, &Shape),
        holders: &Holders,
        mut preemptor: Preemptor,
    ) -> Result<VictimsFound, Nobody> {
        let ending: Vec<&NodeName> = holders.ending().filter(|node| look.allows(node)).collect();
        let mut bound = AtBound::default();
        for node in ending.into_iter().take(NODES_MAX) {
            if self.has_spent(look) {
                break;
            }
            let found = self.victims_on(look, node, holders, (&mut preemptor, None));
            if let Some(found) = found.filter(|found| found.rank.is_none())
                && self.is_allowed_soon(look, &found.placement, &mut bound)
            {
                return Ok(VictimsFound::Soon(node.clone()));
            }
        }
        let of_scheduler = (Others::None, &mut bound);
        if let Some((place, _)) = self.room_alone(look, shape, (holders, &mut preemptor), of_scheduler) {
            return Ok(VictimsFound::Room { nth, place });
        }
        let mut order: Vec<(Rank, &NodeName)> =
            holders.least(look.asker.priority).filter(|(_, node)| look.allows(node)).collect();
        order.sort_unstable();
        let mut best: Option<(Rank, Placement, Vec<PodUid>)> = None;
        // Told only where there is no other: it is put off.
        let mut too_many: Option<VictimsFound> = None;
        let from = if look.from < order.len() { look.from } else { 0 };
        let mut left_at = None;
        for (nth, (least, node)) in order.into_iter().enumerate().skip(from) {
            if best.as_ref().is_some_and(|(rank, ..)| *rank <= least) {
                break;
            }
            // One in each look: else nobody would get on whose nodes cost all that there is.
            if nth >= from + NODES_MAX || (nth > from && self.has_spent(look)) {
                left_at = Some(nth);
                break;
            }
            let beat = best.as_ref().map(|(rank, ..)| *rank);
            let found = self.victims_on(look, node, holders, (&mut preemptor, beat));
            let Some(found) = found else { continue };
            let Some(rank) = found.rank else {
                if self.is_allowed_soon(look, &found.placement, &mut bound) {
                    return Ok(VictimsFound::Soon(node.clone()));
                }
                continue;
            };
            if !self.is_allowed(look, &found.placement, &mut bound) {
                continue;
            }
            if found.pods.len() > VICTIMS_MAX {
                too_many = Some(VictimsFound::Victims { place: found.placement, victims: found.pods });
                continue;
            }
            if best.as_ref().is_none_or(|(known, ..)| rank < *known) {
                best = Some((rank, found.placement, found.pods));
            }
        }
        let found = best.map(|(_, place, victims)| VictimsFound::Victims { place, victims });
        match left_at {
            Some(nodes) => found.ok_or(Nobody::Until(nodes)),
            None => found.or(too_many).or(bound.words.map(VictimsFound::Bound)).ok_or(Nobody::Anywhere),
        }
    }

    /// The namespace of who asks may have this place as well once those of its pods that are ending have ended. If it may
    /// not have it now, `bound` says why.
    fn is_allowed_soon(&mut self, look: &VictimSearch<'_>, place: &Placement, bound: &mut AtBound) -> bool {
        let Some(unit) = look.unit.filter(|_| !self.is_allowed(look, place, bound)) else { return true };
        let namespace = look.asker.pod.namespace.as_str();
        let ending = *bound.ending.get_or_insert_with(|| self.ending_of(namespace, look.now));
        let asked = of_places(look.beside.iter().chain([place]));
        self.may_have(namespace, ending, self.to_be_had(namespace, unit).plus(asked))
    }

    /// What those pods of a namespace have that will soon have ended, and that no other pod has.
    fn ending_of(&mut self, namespace: &str, now: Moment) -> Amounts {
        let is_near = self.near(now);
        let ends = |pod: &&Pod| pod.ending && pod.standing.ends.is_some_and(|ends| is_near(ends.as_second()));
        let pods = self.view.pods().inspect(|_| self.capacity.index.pay(POD_TICKS));
        let ending = pods.filter(|pod| pod.at.namespace == namespace).filter(ends);
        let claims = ending.filter_map(|pod| self.view.claims_of(pod)).flatten();
        // Once each: thousands of pods may name one.
        let mut claims: BTreeMap<ClaimKey, &Claim> = claims.map(|claim| (claim.key, claim)).collect();
        claims.retain(|_, claim| !claim.users.others && self.view.pods_of(claim).all(|pod| ends(&pod)));
        let claims: Vec<ClaimKey> = claims.into_keys().collect();
        self.usage_of(&claims)
    }

    /// The namespace of who asks may have this place as well. If it may not, `bound` says why.
    fn is_allowed(&self, look: &VictimSearch<'_>, place: &Placement, bound: &mut AtBound) -> bool {
        let Some(unit) = look.unit else { return true };
        let places = look.beside.iter().chain([place]);
        let words = self.beyond_bounds_then((&look.asker.pod.namespace, unit), places);
        let is_allowed = words.is_none();
        bound.words = bound.words.take().or(words);
        is_allowed
    }

    /// The look has cost what it may.
    pub(super) fn has_spent(&self, look: &VictimSearch<'_>) -> bool {
        self.capacity.index.spent().0 >= look.ticks
    }

    /// What has to end on one node.
    fn victims_on(
        &mut self,
        look: &VictimSearch<'_>,
        node: &NodeName,
        holders: &Holders,
        (preemptor, beat): (&mut Preemptor, Option<Rank>),
    ) -> Option<OnNode> {
        let there: There = self.candidates(look, holders.on(node));
        self.capacity.index.pay(there.ticks);
        let closed = self.closed_on(node);
        let is_without = |device: &DeviceName| look.without.contains(&GpuRef::new(node, device));
        let closed = |device: &DeviceName| match is_without(device) {
            true => Closed { shut: true, groups: 0 },
            false => closed_in(&closed, device),
        };
        let site = EvictionSite {
            node,
            closed: &closed,
            soon: &there.soon,
            candidates: &there.candidates,
            budgets: &there.budgets,
            beat,
        };
        let found = self.capacity.index.victims(preemptor, &site);
        found.map(|Victims { candidates, rank, placement }| OnNode {
            pods: candidates.iter().flat_map(|at| there.pods[*at].clone()).collect(),
            rank,
            placement,
        })
    }

    /// Where a place was found that kube-scheduler would have to make room of, and where it does not, since another node
    /// has the room.
    pub(super) fn room_beside_others(
        &mut self,
        wanted: &WantedRoom,
        look: &VictimSearch<'_>,
    ) -> Option<(NodeName, NodeName)> {
        let [part] = &wanted.parts[..] else { return None };
        let holders = std::mem::take(&mut self.reserves.evictions.preempting.holders);
        let found = (0..part.ways()).find_map(|nth| {
            if self.beyond_bounds_at_least(&[part], nth).is_some() {
                return None;
            }
            let shape = part.shape(nth);
            let mut preemptor = self.capacity.index.preemptor(shape, wanted.alone);
            self.room_alone(look, shape, (&holders, &mut preemptor), (Others::Some, &mut AtBound::default()))
        });
        self.reserves.evictions.preempting.holders = holders;
        found.and_then(|(place, other)| Some((place.node, other?)))
    }

    /// A place whose node lacks only what pods of lower priority have of CPU, memory and number. kube-scheduler preempts
    /// them only where no other node is left to it by then: else it takes the claim's allocation back. `others`: whether
    /// there is to be such a node, which comes back, too.
    fn room_alone(
        &mut self,
        look: &VictimSearch<'_>,
        shape: &Shape,
        (holders, preemptor): (&Holders, &mut Preemptor),
        (others, bound): (Others, &mut AtBound),
    ) -> Option<(Placement, Option<NodeName>)> {
        if !look.asker.is_usual {
            return None;
        }
        let asked = Resources { cpu_milli: shape.cpu_milli, memory: shape.memory, pods: shape.pods };
        let mut looks = 0;
        for (node, all) in holders.nodes().filter(|(node, _)| look.allows(node)) {
            let left = self.capacity.left(node);
            if has(left, asked) || looks >= NODES_MAX || self.has_spent(look) {
                continue;
            }
            let lower = all.iter().filter(|one| one.gives_way(look.asker.priority));
            let freed = lower.fold(Resources::default(), |sum, one| sum.plus(one.room));
            if !has(left.plus(freed), asked) {
                continue;
            }
            looks += 1;
            let soon = Freed {
                gpus: Vec::new(),
                cpu_milli: freed.cpu_milli,
                memory: freed.memory,
                pods: freed.pods,
            };
            let closed = self.closed_on(node);
            let closed = |device: &DeviceName| closed_in(&closed, device);
            let site = EvictionSite {
                node,
                closed: &closed,
                soon: &[soon],
                candidates: &[],
                budgets: &[],
                beat: None,
            };
            let found = self.capacity.index.victims(preemptor, &site);
            let found = found.filter(|found| self.is_allowed(look, &found.placement, bound));
            let Some(found) = found else { continue };
            match (self.other_node(look.asker, node).cloned(), others) {
                (None, Others::None) => return Some((found.placement, None)),
                (Some(other), Others::Some) => return Some((found.placement, Some(other))),
                (None, Others::Some) | (Some(_), Others::None) => {}
            }
        }
        None
    }

    /// Another node on which the pod could run now, GPUs aside, as far as is known here.
    fn other_node(&self, asker: &Asker, but: &NodeName) -> Option<&NodeName> {
        let pod = self.view.pod(&asker.pod.uid)?;
        let open = |node: &NodeName| {
            let pods_only = Resources { pods: 1, ..asker.room };
            has(self.capacity.left(node), pods_only) && self.barred(pod, node).is_none()
        };
        self.view.nodes().map(|(node, _)| node).find(|node| *node != but && open(node))
    }
}

/// The first answer of several ways; else how far those came that had to stop.
pub(super) fn first(
    mut ways: impl Iterator<Item = usize>,
    mut look: impl FnMut(usize) -> Result<VictimsFound, Nobody>,
) -> Result<VictimsFound, Nobody> {
    let mut nobody = Nobody::Anywhere;
    let found = ways.find_map(|nth| match look(nth) {
        Ok(found) => Some(found),
        Err(Nobody::Anywhere) => None,
        Err(Nobody::Until(nodes)) => {
            // One that had nothing left to spend has come no farther than where the look began.
            nobody = match nobody {
                Nobody::Until(before) => Nobody::Until(nodes.max(before)),
                Nobody::Anywhere => Nobody::Until(nodes),
            };
            None
        }
    });
    found.ok_or(nobody)
}

/// What has to end on a node, by pods.
struct OnNode {
    pods: Vec<PodUid>,
    rank: Option<Rank>,
    placement: Placement,
}

/// What pods ask for together, of one node.
fn together(parts: &[&PodPart], nth: usize) -> Shape {
    let mut all = Shape::default();
    let mut claims = 0;
    for shape in parts.iter().map(|part| part.shape(nth)) {
        let first = all.wants.len();
        let moved = |want: &Want| Want { claim: claims + want.claim, ..want.clone() };
        all.wants.extend(shape.wants.iter().map(moved));
        let moved = |alike: &AttributeConstraint| AttributeConstraint {
            wants: alike.wants.iter().map(|want| first + want).collect(),
            ..alike.clone()
        };
        all.alike.extend(shape.alike.iter().map(moved));
        claims += shape.wants.iter().map(|want| want.claim + 1).max().unwrap_or(0);
        all.cpu_milli = all.cpu_milli.saturating_add(shape.cpu_milli);
        all.memory = Bytes(all.memory.0.saturating_add(shape.memory.0));
        all.pods = all.pods.saturating_add(shape.pods);
    }
    all
}

fn closed_in(all: &[(DeviceName, Closed)], device: &DeviceName) -> Closed {
    let found = all.iter().find(|(known, _)| known == device);
    found.map_or(Closed { shut: true, groups: 0 }, |(_, closed)| *closed)
}

fn has(left: Resources, asked: Resources) -> bool {
    left.cpu_milli >= asked.cpu_milli && left.memory >= asked.memory && left.pods >= asked.pods
}
