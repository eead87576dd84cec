//! Pods of lower priority end for a pod of higher priority that finds no room for its share: who, and what follows.
//!
//! A pod has others end only if it could be bound then, as far as is known here: nothing keeps it off the node, its
//! namespace may have the share, and its scheduler has tried it. Where only the CPU, the memory or the number of pods
//! lacks that pods of lower priority have, its share is placed, and kube-scheduler preempts.

mod candidates;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use crate::allocate::victims::{Closed, Freed, Preemptor, Rank, Site, Victims};
use crate::allocate::{AttributeConstraint, Nodes, Placement, Shape, Want};
use crate::cluster::eviction::Eviction;
use crate::controller::Moment;
use crate::controller::capacity::Aside;
use crate::controller::core::Core;
use crate::controller::holders::Holders;
use crate::controller::preempt::{Preemption, PutOff, Stage, Step, Told, VICTIMS_MAX, Victim};
use crate::controller::queue::{Turn, UnitKey};
use crate::controller::reserve::Kept;
use crate::controller::steps::place::Part;
use crate::controller::view::{Pod, Presence};
use crate::controller::write::{Failure, Round, Write};
use crate::feasible::Resources;
use crate::model::claim::PodRef;
use crate::model::names::{DeviceName, NodeName, PodUid};
use crate::model::quantity::Bytes;

/// Pods of a gang for which others end together.
const TOGETHER_MAX: usize = 32;
/// Units that are looked at in a round, at most.
const LOOKS_MAX: u32 = 4;
/// Nodes that are looked at closely for one unit, those first where the least may be lost: as many as kube-scheduler looks
/// at by default (`minCandidateNodesAbsolute`).
const NODES_MAX: usize = 100;
/// Pods are to have ended so long after they were told, or after the time that they were given.
const END_WITHIN: Duration = Duration::from_secs(60);
const AFTER_END: Duration = Duration::from_secs(30);
/// Whatever time they were given, nothing is kept for longer.
const KEEP_MAX: Duration = Duration::from_secs(600);
/// After the last has ended the unit is placed within this time, or not at all.
const PLACED_WITHIN: Duration = Duration::from_secs(10);

/// How many units a round still looks at.
#[derive(Debug)]
pub struct Tries(u32);

/// Who asks.
struct Asker {
    pod: PodRef,
    priority: i32,
    /// kube-scheduler is to bind it.
    is_usual: bool,
    room: Resources,
}

/// What a look came to.
enum Found {
    /// What ends anyway will be enough.
    Soon,
    /// Only what pods of lower priority have of CPU, memory and number lacks: kube-scheduler preempts them.
    Room {
        nth: usize,
        place: Placement,
    },
    Victims {
        place: Placement,
        victims: Vec<PodUid>,
    },
}

/// Where others may end for a unit.
struct Look<'a> {
    /// Of each of its pods.
    nodes: Vec<Nodes>,
    asker: &'a Asker,
    /// What it may cost, in ticks of [`crate::select::TICKS_PER_UNIT`].
    ticks: u64,
    now: Moment,
}

impl Look<'_> {
    fn allows(&self, node: &NodeName) -> bool {
        self.nodes.iter().all(|nodes| nodes.allow(node))
    }
}

impl Core {
    pub(in crate::controller) fn begin_preempting(&self) -> Tries {
        Tries(if self.rules.preemption { LOOKS_MAX } else { 0 })
    }

    /// A unit was refused: others end for it, or the scheduler sees to that. True: it has its place.
    pub(in crate::controller) fn preempt(&mut self, turn: &Turn, tries: &mut Tries, now: Moment) -> bool {
        let epoch = self.capacity.epoch();
        let Some(asker) = self.asker(turn) else { return false };
        if tries.0 == 0 || !self.reserves.evictions.preempting.may_look(&turn.key, epoch, now) {
            return false;
        }
        let Some(ticks) = self.purse.allowance(&asker.pod.namespace) else { return false };
        self.capacity.index.allow(ticks);
        let usual = self.set_all_aside(turn, &asker.pod.namespace);
        let is_placed = self.look_for_victims(turn, (&asker, ticks), tries, now);
        self.back_to_usual(usual);
        self.pay(turn);
        is_placed
    }

    /// Who may have others end: pods that their scheduler has tried. kube-scheduler does not try a pod before all of its
    /// claims exist; for other schedulers promised claims are created early (`grouping_schedulers`).
    fn asker(&self, turn: &Turn) -> Option<Asker> {
        let pods: Option<Vec<&Pod>> = turn.pods.iter().map(|uid| self.view.pod(uid)).collect();
        let pods = pods.filter(|pods| pods.len() <= TOGETHER_MAX)?;
        let may = |pod: &&Pod| {
            let claims = self.view.claims_of(pod).into_iter().flatten();
            let promised = || claims.into_iter().any(|claim| matches!(claim.at, Presence::Planned { .. }));
            let is_tried = pod.standing.unschedulable || (pod.standing.is_usual && promised());
            pod.standing.preempts && is_tried
        };
        if !pods.iter().all(may) {
            return None;
        }
        let first = pods.first()?;
        Some(Asker {
            pod: first.at.clone(),
            priority: pods.iter().map(|pod| pod.priority).min()?,
            is_usual: pods.len() == 1 && first.standing.is_usual,
            room: first.room,
        })
    }

    fn look_for_victims(
        &mut self,
        turn: &Turn,
        (asker, ticks): (&Asker, u64),
        tries: &mut Tries,
        now: Moment,
    ) -> bool {
        let Some(parts) = self.parts(turn, now) else { return false };
        // GPUs of a claim that has several are for that claim alone.
        let alone = parts.iter().any(Part::is_several);
        if (alone && parts.len() > 1) || self.check_bounds(&parts).is_err() {
            return false;
        }
        let mut nodes = Vec::new();
        for part in &parts {
            if !matches!(self.study(part), Ok(true)) {
                return false;
            }
            nodes.push(match &part.nodes {
                Nodes::Only(names) => Nodes::Only(names.clone()),
                // Those that are full need not be once pods have ended.
                Nodes::Any | Nodes::Except(_) => {
                    let out = self.queue.excluded(&part.pod, now).into_iter().cloned().collect();
                    Nodes::Except(vec![Arc::new(out), self.barred_nodes(&part.pod)])
                }
            });
        }
        tries.0 -= 1;
        self.refresh_holders();
        let holders = std::mem::take(&mut self.reserves.evictions.preempting.holders);
        let look = Look { nodes, asker, ticks, now };
        let ways = parts.iter().map(Part::ways).max().unwrap_or(1);
        let found = (0..ways).find_map(|nth| {
            let shape = together(&parts, nth);
            let preemptor = self.capacity.index.preemptor(&shape, alone);
            self.look_at_way(&look, (nth, &shape), &holders, preemptor)
        });
        self.reserves.evictions.preempting.holders = holders;
        // What it did not come to is looked at another time, though nothing may have changed.
        let is_cut_short = found.is_none() && self.has_spent(&look);
        let mut put_off = is_cut_short.then(|| self.reserves.evictions.preempting.put_off(PutOff::Spent));
        let is_placed = match found {
            Some(Found::Room { nth, place })
                if self.beyond_bounds(&parts, std::slice::from_ref(&place)).is_none() =>
            {
                self.adopt_places(turn, &parts, nth, &[place], now);
                self.no_longer_kept(&turn.key, now);
                true
            }
            Some(Found::Victims { place, victims })
                if self.beyond_bounds(&parts, std::slice::from_ref(&place)).is_none() =>
            {
                put_off = self.begin_evicting(turn, asker, (place, alone), &victims, now).err();
                false
            }
            Some(_) | None => false,
        };
        let epoch = self.capacity.epoch();
        let put_off = put_off.map(|why| (why, asker.pod.namespace.as_str()));
        self.reserves.evictions.preempting.looked(&turn.key, epoch, put_off, now);
        is_placed
    }

    fn look_at_way(
        &mut self,
        look: &Look<'_>,
        (nth, shape): (usize, &Shape),
        holders: &Holders,
        mut preemptor: Preemptor,
    ) -> Option<Found> {
        let ending: Vec<&NodeName> = holders.ending().filter(|node| look.allows(node)).collect();
        for node in ending.into_iter().take(NODES_MAX) {
            if self.has_spent(look) {
                return None;
            }
            if self
                .victims_on(look, node, holders, (&mut preemptor, None))
                .is_some_and(|found| found.rank.is_none())
            {
                return Some(Found::Soon);
            }
        }
        if let Some(place) = self.room_alone(look, shape, holders, &mut preemptor) {
            return Some(Found::Room { nth, place });
        }
        let mut order: Vec<(Rank, &NodeName)> =
            holders.least(look.asker.priority).filter(|(_, node)| look.allows(node)).collect();
        order.sort_unstable();
        let mut best: Option<(Rank, Placement, Vec<PodUid>)> = None;
        // Told only where there is no other: it is put off.
        let mut too_many: Option<Found> = None;
        for (least, node) in order.into_iter().take(NODES_MAX) {
            if best.as_ref().is_some_and(|(rank, ..)| *rank <= least) || self.has_spent(look) {
                break;
            }
            let beat = best.as_ref().map(|(rank, ..)| *rank);
            let found = self.victims_on(look, node, holders, (&mut preemptor, beat));
            let Some(found) = found else { continue };
            let Some(rank) = found.rank else { return Some(Found::Soon) };
            if found.pods.len() > VICTIMS_MAX {
                too_many = Some(Found::Victims { place: found.placement, victims: found.pods });
                continue;
            }
            if best.as_ref().is_none_or(|(known, ..)| rank < *known) {
                best = Some((rank, found.placement, found.pods));
            }
        }
        best.map(|(_, place, victims)| Found::Victims { place, victims }).or(too_many)
    }

    /// The look has cost what it may.
    fn has_spent(&self, look: &Look<'_>) -> bool {
        self.capacity.index.spent().0 >= look.ticks
    }

    /// What has to end on one node.
    fn victims_on(
        &mut self,
        look: &Look<'_>,
        node: &NodeName,
        holders: &Holders,
        (preemptor, beat): (&mut Preemptor, Option<Rank>),
    ) -> Option<OnNode> {
        let there = self.candidates(look, holders.on(node));
        self.capacity.index.pay(there.ticks);
        let closed = self.closed_on(node);
        let closed = |device: &DeviceName| closed_in(&closed, device);
        let site = Site {
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

    /// A place whose node lacks only what pods of lower priority have of CPU, memory and number. kube-scheduler preempts
    /// them only where no other node is left to it by then: else it takes the claim's allocation back.
    fn room_alone(
        &mut self,
        look: &Look<'_>,
        shape: &Shape,
        holders: &Holders,
        preemptor: &mut Preemptor,
    ) -> Option<Placement> {
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
            let site =
                Site { node, closed: &closed, soon: &[soon], candidates: &[], budgets: &[], beat: None };
            let found = self.capacity.index.victims(preemptor, &site);
            if let Some(found) = found
                && self.is_only_node(look.asker, node)
            {
                return Some(found.placement);
            }
        }
        None
    }

    /// The pod could run on no other node now, as far as is known here.
    fn is_only_node(&self, asker: &Asker, but: &NodeName) -> bool {
        let Some(pod) = self.view.pod(&asker.pod.uid) else { return false };
        let open = |node: &NodeName| {
            let pods_only = Resources { pods: 1, ..asker.room };
            has(self.capacity.left(node), pods_only) && self.barred(pod, node).is_none()
        };
        !self.view.nodes().any(|(node, _)| node != but && open(node))
    }

    fn begin_evicting(
        &mut self,
        turn: &Turn,
        asker: &Asker,
        (place, alone): (Placement, bool),
        victims: &[PodUid],
        now: Moment,
    ) -> Result<(), PutOff> {
        let PodRef { namespace, .. } = &asker.pod;
        self.reserves.evictions.preempting.may_begin(namespace, victims.len(), now)?;
        let whom = self.name_of(&turn.key);
        let mut chosen: Vec<(bool, Victim)> = Vec::new();
        for pod in victims.iter().filter_map(|uid| self.view.pod(uid)) {
            // Those that a budget may keep come first: nobody ends for nothing before that is known.
            let unguarded = self.view.budgets_of(pod).is_unguarded();
            let words = self.gives(pod, asker, &whom);
            chosen.push((unguarded, Victim { at: pod.at.clone(), words, step: Step::ToAsk(now) }));
        }
        chosen.sort_by_key(|(unguarded, _)| *unguarded);
        let victims: Vec<Victim> = chosen.into_iter().map(|(_, victim)| victim).collect();
        let some =
            if victims.len() == 1 { "pod of lower priority ends" } else { "pods of lower priority end" };
        let words = format!(
            "{} {some} for it on node {}, and it is kept {}; its share is chosen once they have ended",
            victims.len(),
            place.node,
            amounts(place.gpus.iter().map(|grant| (grant.memory.mib_ceil(), grant.device.to_string()))),
        );
        for pod in turn.pods.iter().filter_map(|uid| self.view.pod(uid)) {
            self.recorder.preempts(pod, words.clone());
        }
        let until = now + END_WITHIN;
        let kept = Kept {
            namespace: namespace.clone(),
            name: whom,
            aside: Aside { places: vec![place], alone },
            own: false,
            preempted: true,
            since: now,
            until,
            least: 0,
            seen: Vec::new(),
            lost: None,
        };
        self.reserves.begin(&turn.key, kept);
        let (namespace, pods) = (namespace.clone(), turn.pods.clone());
        let preemption = Preemption { namespace, pods, victims, since: now, until, stage: Stage::Evicting };
        self.reserves.evictions.preempting.begin(turn.key.clone(), preemption);
        Ok(())
    }

    /// What a victim is told.
    fn gives(&self, pod: &Pod, asker: &Asker, whom: &str) -> String {
        let claims = self.view.claims_of(pod).into_iter().flatten();
        let mut given = Vec::new();
        for claim in claims.filter(|claim| claim.is_shares()) {
            for gpu in self.capacity.gpus_of(claim.key) {
                for (grant, _) in self.capacity.grants_on(claim.key, &gpu.node) {
                    if grant.device == gpu.device {
                        given.push((grant.memory.mib_ceil(), gpu.to_string()));
                    }
                }
            }
        }
        // Names of others' pods are nobody's business.
        let whom = match asker.pod.namespace == pod.at.namespace {
            true => whom.to_owned(),
            false => "a pod of another namespace".to_owned(),
        };
        let (own, its) = (pod.priority, asker.priority);
        format!("gives {} to {whom}, of priority {its}; its own is {own}", amounts(given.into_iter()))
    }

    /// What has become of those for whom pods end.
    pub(in crate::controller) fn follow_preemptions(&mut self, now: Moment) {
        let all: Vec<UnitKey> =
            self.reserves.evictions.preempting.under_way().map(|(key, _)| key.clone()).collect();
        for key in all {
            let Some((_, one)) =
                self.reserves.evictions.preempting.under_way().find(|(known, _)| **known == key)
            else {
                continue;
            };
            let pods = one.pods.iter().filter_map(|uid| self.view.pod(uid)).filter(|pod| !pod.ending);
            let (mut waits, mut is_placed, mut is_bound) = (false, false, false);
            for pod in pods {
                let is_queued = self.queue.contains(&pod.at.uid);
                waits |= is_queued;
                is_placed |= !is_queued && self.is_decided(pod);
                is_bound |= pod.node.is_some();
            }
            match one.stage {
                _ if is_bound => {
                    self.reserves.evictions.preempting.served(&key);
                    self.end_preempted(&key);
                }
                Stage::Evicting if is_placed => {
                    self.reserves.evictions.preempting.placed(&key);
                    self.end_preempted(&key);
                }
                Stage::Evicting if waits => {
                    let (until, outlived) = (self.ends_by(one, now), self.has_time_left(one, now));
                    self.reserves.evictions.preempting.set_until(&key, until);
                    self.reserves.keep_until(&key, until);
                    if until <= now {
                        match outlived {
                            true => self.reserves.evictions.preempting.outlived(&key),
                            false => self.reserves.evictions.preempting.in_vain(&key, now),
                        }
                        self.end_preempted(&key);
                    }
                }
                Stage::Placed if is_placed => {}
                Stage::Evicting | Stage::Placed => {
                    self.reserves.evictions.preempting.in_vain(&key, now);
                    self.end_preempted(&key);
                }
            }
        }
    }

    /// A claim of the pod has its share, or is to have a share that is decided.
    fn is_decided(&self, pod: &Pod) -> bool {
        let claims = self.view.claims_of(pod).into_iter().flatten().filter(|claim| claim.is_shares());
        claims.into_iter().any(|claim| claim.allocation.is_some() || self.tracker.is_decided(claim.key))
    }

    /// One of the victims was given more time to end than has passed (`terminationGracePeriodSeconds`).
    fn has_time_left(&self, one: &Preemption, now: Moment) -> bool {
        let Some(present) = self.recorder.time_of(now) else { return false };
        let there = one.victims.iter().filter_map(|victim| self.view.pod(&victim.at.uid));
        there.filter_map(|pod| pod.standing.ends).any(|ends| ends > present)
    }

    fn end_preempted(&mut self, key: &UnitKey) {
        if self.reserves.is_preempted(key) {
            self.reserves.end_preempted(key);
            self.capacity.news();
        }
    }

    /// When the last of the pods is to have ended, and its room is to have found its pod.
    fn ends_by(&self, one: &Preemption, now: Moment) -> Moment {
        let there = one.victims.iter().filter_map(|victim| self.view.pod(&victim.at.uid));
        let mut until = one.until;
        let mut is_over = true;
        for pod in there {
            is_over = false;
            let (Some(ends), Some(present)) = (pod.standing.ends, self.recorder.time_of(now)) else {
                continue;
            };
            let left = u64::try_from(ends.as_second() - present.as_second()).unwrap_or(0);
            until = until.max(now + Duration::from_secs(left.min(KEEP_MAX.as_secs())) + AFTER_END);
        }
        let last = one.since + KEEP_MAX;
        if is_over { until.min(now + PLACED_WITHIN).min(last) } else { until.min(last) }
    }

    /// Evictions that are asked for now.
    pub(in crate::controller) fn evict(&mut self, now: Moment, round: &mut Round) {
        // This round may have placed the pod elsewhere: then nobody else ends for it.
        self.follow_preemptions(now);
        for pod in self.reserves.evictions.preempting.due(now) {
            match self.view.pod(&pod.uid) {
                Some(known) if !known.ending => round.writes.push(Write::Evict(pod)),
                // It has ended, or is ending, anyway.
                _ => drop(self.reserves.evictions.preempting.answered(&pod, Ok(Eviction::Gone), now)),
            }
        }
    }

    pub(super) fn evicted(&mut self, pod: &PodRef, result: Result<Eviction, Failure>, now: Moment) {
        match self.reserves.evictions.preempting.answered(pod, result, now) {
            Told::Nothing => {}
            Told::Ends(pod, words) => self.recorder.preempted(&pod, words),
            Told::Stays { unit, words } => {
                self.recorder.trouble(format!("pod {pod} is not evicted for another: {words}"));
                self.reserves.evictions.preempting.stop(&unit, now);
                self.end_preempted(&unit);
            }
        }
    }

    /// Something of the pod may be another that decides whether it ends for others.
    pub(super) fn touch_holders(&mut self, uid: &PodUid) {
        if let Some(node) = self.pods.node_of(uid) {
            self.reserves.evictions.preempting.holders.touch(node);
        }
        if let Some(pod) = self.view.pod(uid) {
            let holders = &mut self.reserves.evictions.preempting.holders;
            let claims = self.view.claims_of(pod).into_iter().flatten();
            let gpus = claims.flat_map(|claim| self.capacity.gpus_of(claim.key));
            gpus.for_each(|gpu| holders.touch(&gpu.node));
        }
    }

    /// A pod is gone: its claims may be used by one other alone now.
    pub(super) fn touch_claims(&mut self, pod: &Pod) {
        let holders = &mut self.reserves.evictions.preempting.holders;
        let claims = self.view.claims_of(pod).into_iter().flatten();
        let gpus = claims.flat_map(|claim| self.capacity.gpus_of(claim.key));
        gpus.for_each(|gpu| holders.touch(&gpu.node));
    }
}

/// What has to end on a node, by pods.
struct OnNode {
    pods: Vec<PodUid>,
    rank: Option<Rank>,
    placement: Placement,
}

/// What pods ask for together, of one node.
fn together(parts: &[Part], nth: usize) -> Shape {
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

/// MiB by GPU, in words.
fn amounts(given: impl Iterator<Item = (u64, String)>) -> String {
    let words: BTreeSet<String> = given.map(|(mib, gpu)| format!("{mib} MiB of {gpu}")).collect();
    let words: Vec<String> = words.into_iter().collect();
    match words.len() {
        0 => "its room".to_owned(),
        _ => words.join(", "),
    }
}
