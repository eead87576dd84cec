//! Pods of lower priority end for a pod of higher priority that finds no room for its share: who, and what follows.
//! `candidates`: who may end; `search`: who has to; `whole`: for pods that wait for whole GPUs of kube-scheduler's;
//! `prospect`: the same for people who ask.
//!
//! A pod has others end only if it could be bound then, as far as is known here: nothing keeps it off the node, its
//! namespace may have the share, and its scheduler has tried it. Where only the CPU, the memory or the number of pods
//! lacks that pods of lower priority have, its share is placed, and kube-scheduler preempts.

mod candidates;
mod prospect;
mod search;
mod whole;

pub use prospect::Prospect;

use std::collections::BTreeSet;
use std::time::Duration;

use crate::allocate::Placement;
use crate::cluster::eviction::Eviction;
use crate::controller::Moment;
use crate::controller::capacity::Aside;
use crate::controller::core::Core;
use crate::controller::preempt::{
    EvictionResult, EvictionStep, Goal, LookOutcome, Preemption, PreemptionStage, PutOff, Victim,
};
use crate::controller::queue::{Turn, UnitKey};
use crate::controller::reserve::Reservation;
use crate::controller::view::{GpuRef, Pod, Presence, Tried};
use crate::controller::write::{Failure, Round, Write};
use crate::model::claim::PodRef;
use crate::model::names::PodUid;
use search::{Asker, Budgets, Nobody, VictimSearch, VictimsFound};

/// Pods of a gang for which others end together.
const TOGETHER_MAX: usize = 32;
/// Pods are to have ended so long after they were told, or after the time that they were given.
const END_WITHIN: Duration = Duration::from_secs(60);
const AFTER_END: Duration = Duration::from_secs(30);
/// Whatever time they were given, nothing is kept for longer.
const KEEP_MAX: Duration = Duration::from_secs(600);
/// After the last has ended the unit is placed within this time, or not at all.
const PLACED_WITHIN: Duration = Duration::from_secs(10);
/// The same for one that kube-scheduler gives a whole GPU, and tries again after 10 s at the latest.
const BOUND_WITHIN: Duration = Duration::from_secs(30);

/// The units that a round looks at.
#[derive(Debug)]
pub struct UnitsToTry(BTreeSet<UnitKey>);

/// Why no others end for a unit, wherever they are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Unable {
    /// It is not known any more.
    Gone,
    /// So many pods start together.
    TooMany(usize),
    /// The pod's `preemptionPolicy`.
    Never(PodRef),
    /// Its scheduler has not tried it in vain.
    NotTried(PodRef),
    /// By its scheduler's words it waits for something else than room.
    WaitsForOther(PodRef),
}

impl Core {
    /// `turns`: those of the round.
    pub(in crate::controller) fn begin_preempting(&mut self, turns: &[Turn], now: Moment) -> UnitsToTry {
        if !self.rules.preemption {
            return UnitsToTry(BTreeSet::new());
        }
        let (preempting, epoch) = (&self.reserves.evictions.preempting, self.capacity.epoch());
        // Those that have no turn in which others could end take nobody's look.
        let moves = &self.reserves.evictions.moves;
        let is_idle = |turn: &Turn| (turn.bounded && turn.tried == Some(epoch)) || moves.is_served(&turn.key);
        let may = |turn: &&Turn| {
            preempting.may_look(&turn.key, epoch, now) && !is_idle(turn) && self.asker(turn).is_ok()
        };
        let due = turns.iter().filter(may).filter_map(|turn| Some((&turn.key, self.namespace(turn)?)));
        let due = due.filter(|(_, namespace)| self.purse.allowance(namespace).is_some());
        let (first, are_left) = preempting.looks.first(due);
        self.reserves.evictions.preempting.looks.begin();
        if are_left {
            self.reserves.evictions.preempting.looks.leave(now);
        }
        UnitsToTry(first)
    }

    /// After the turns of a round. Units that were to be looked at and had no such turn come after others next time.
    pub(in crate::controller) fn end_preempting(&mut self, turns: &UnitsToTry, now: Moment) {
        let epoch = self.capacity.epoch();
        for key in &turns.0 {
            let namespace = match key {
                UnitKey::Gang { namespace, .. } => Some(namespace.clone()),
                UnitKey::Pod(uid) => self.view.pod(uid).map(|pod| pod.at.namespace.clone()),
            };
            if let Some(namespace) = namespace {
                self.reserves.evictions.preempting.passed_over((key, &namespace), epoch, now);
            }
        }
    }

    /// A unit was refused: others end for it, or the scheduler sees to that. True: it has its place.
    pub(in crate::controller) fn preempt(
        &mut self,
        turn: &Turn,
        tries: &mut UnitsToTry,
        now: Moment,
    ) -> bool {
        let epoch = self.capacity.epoch();
        if !tries.0.contains(&turn.key) || !self.reserves.evictions.preempting.may_look(&turn.key, epoch, now)
        {
            return false;
        }
        // Of pods that start one by one another may ask.
        let Ok(asker) = self.asker(turn) else { return false };
        let Some(ticks) = self.purse.allowance(&asker.pod.namespace) else { return false };
        tries.0.remove(&turn.key);
        self.capacity.index.allow(ticks);
        let usual = self.set_all_aside(turn, &asker.pod.namespace);
        let is_placed = self.look_for_victims(turn, (&asker, ticks), now);
        self.back_to_usual(usual);
        self.pay(turn);
        is_placed
    }

    /// Who may have others end: pods that their scheduler has tried.
    fn asker(&self, turn: &Turn) -> Result<Asker, Unable> {
        if turn.pods.len() > TOGETHER_MAX {
            return Err(Unable::TooMany(turn.pods.len()));
        }
        let pods: Option<Vec<&Pod>> = turn.pods.iter().map(|uid| self.view.pod(uid)).collect();
        let pods = pods.ok_or(Unable::Gone)?;
        if let Some(pod) = pods.iter().find(|pod| !pod.standing.preempts) {
            return Err(Unable::Never(pod.at.clone()));
        }
        self.is_tried(turn)?;
        let first = pods.first().ok_or(Unable::Gone)?;
        Ok(Asker {
            pod: first.at.clone(),
            priority: pods.iter().map(|pod| pod.standing.priority).min().unwrap_or(first.standing.priority),
            is_usual: pods.len() == 1 && first.standing.is_usual,
            room: first.room,
        })
    }

    /// Its scheduler has tried the unit in vain. kube-scheduler does not try a pod before all of its claims exist; for
    /// other schedulers promised claims are created early (`grouping_schedulers`).
    pub(super) fn is_tried(&self, turn: &Turn) -> Result<(), Unable> {
        let pods: Option<Vec<&Pod>> = turn.pods.iter().map(|uid| self.view.pod(uid)).collect();
        let pods = pods.ok_or(Unable::Gone)?;
        let mut is_tried = false;
        for pod in &pods {
            let claims = || self.view.claims_of(pod).into_iter().flatten();
            let promised = || claims().any(|claim| matches!(claim.at, Presence::Planned { .. }));
            match pod.standing.tried {
                Tried::InVain => is_tried = true,
                // Its group waits for one that was tried.
                Tried::BesideAnother => {}
                Tried::No if pod.standing.is_usual && promised() => is_tried = true,
                Tried::No => return Err(Unable::NotTried(pod.at.clone())),
                Tried::ForOther => return Err(Unable::WaitsForOther(pod.at.clone())),
            }
        }
        let first = pods.first().ok_or(Unable::Gone)?;
        if is_tried { Ok(()) } else { Err(Unable::NotTried(first.at.clone())) }
    }

    fn look_for_victims(&mut self, turn: &Turn, (asker, ticks): (&Asker, u64), now: Moment) -> bool {
        let namespace = asker.pod.namespace.as_str();
        let (mut outcome, mut is_placed) = (LookOutcome::default(), false);
        if let Some(wanted) = self.wanted(turn, now) {
            let parts = &wanted.parts;
            let without = BTreeSet::new();
            let (nodes, budgets) = (&wanted.nodes[..], Budgets::Kept);
            let from = self.reserves.evictions.preempting.looks.from(&turn.key);
            let unit = Some(&turn.key);
            let look = VictimSearch {
                nodes,
                asker,
                unit,
                beside: &[],
                budgets,
                without: &without,
                ticks,
                from,
                now,
            };
            let (found, free) = self.find_with_places(&wanted, &look);
            match found {
                Ok(VictimsFound::Room { nth, place }) => {
                    self.adopt_places(turn, parts, nth, &[place], now);
                    self.no_longer_kept(&turn.key, now);
                    is_placed = true;
                }
                Ok(VictimsFound::Victims { place, victims }) => {
                    let places = std::iter::once(place).chain(free).collect();
                    let begun = self.begin_evicting(
                        turn,
                        asker,
                        Aside { places, alone: wanted.alone },
                        &victims,
                        now,
                    );
                    outcome.put_off = begun.err();
                }
                Ok(VictimsFound::Soon(_) | VictimsFound::Free(_) | VictimsFound::Bound(_))
                | Err(Nobody::Anywhere) => {}
                // What it did not come to is looked at another time, though nothing may have changed.
                Err(Nobody::Until(nodes)) => {
                    outcome.left_at = Some(nodes);
                    outcome.put_off = Some(self.reserves.evictions.preempting.put_off(PutOff::Spent));
                }
            }
        }
        let epoch = self.capacity.epoch();
        self.reserves.evictions.preempting.looked((&turn.key, namespace), epoch, outcome, now);
        is_placed
    }

    /// `aside`: what is kept for it; pods end for the first of the places.
    fn begin_evicting(
        &mut self,
        turn: &Turn,
        asker: &Asker,
        aside: Aside,
        victims: &[PodUid],
        now: Moment,
    ) -> Result<(), PutOff> {
        let (unit, Some(place)) = ((&turn.key, &turn.pods[..]), aside.places.first()) else { return Ok(()) };
        self.begin_evicting_for(unit, asker, (place, Goal::Share), victims, now)?;
        let kept = Reservation {
            namespace: asker.pod.namespace.clone(),
            name: self.name_of(&turn.key),
            aside,
            own: false,
            preempted: Some(asker.priority),
            since: now,
            until: now + END_WITHIN,
            least: 0,
            seen: Vec::new(),
            lost: None,
        };
        self.reserves.begin(&turn.key, kept);
        Ok(())
    }

    fn begin_evicting_for(
        &mut self,
        (key, pods): (&UnitKey, &[PodUid]),
        asker: &Asker,
        (place, goal): (&Placement, Goal),
        victims: &[PodUid],
        now: Moment,
    ) -> Result<(), PutOff> {
        let PodRef { namespace, .. } = &asker.pod;
        self.reserves.evictions.preempting.may_begin(key, namespace, victims.len(), now)?;
        let whom = self.name_of(key);
        let mut chosen: Vec<((bool, bool), Victim)> = Vec::new();
        for pod in victims.iter().filter_map(|uid| self.view.pod(uid)) {
            // Nobody ends for nothing before it is known whether all do: first those that may take longer than others are
            // waited for, then those that a budget may keep.
            let slow = pod.standing.grace > END_WITHIN;
            let unguarded = self.view.budgets_of(pod).is_unguarded();
            let words = self.gives(pod, asker, &whom);
            let (at, step) = (pod.at.clone(), EvictionStep::ToAsk(now));
            chosen.push(((!slow, unguarded), Victim { at, words, slow, unsure: false, step }));
        }
        chosen.sort_by_key(|(order, _)| *order);
        let victims: Vec<Victim> = chosen.into_iter().map(|(_, victim)| victim).collect();
        let some =
            if victims.len() == 1 { "pod of lower priority ends" } else { "pods of lower priority end" };
        let follows = match &goal {
            Goal::Share => {
                format!(", and it is kept {}; its share is chosen once they have ended", kept_words(place))
            }
            Goal::Whole(gpus) => {
                let names: Vec<&str> = gpus.iter().map(|gpu| gpu.device.as_str()).collect();
                let names = names.join(", ");
                format!(
                    ": {names} takes no other shares, and is given back to kube-scheduler once they have ended"
                )
            }
        };
        let words = format!("{} {some} for it on node {}{follows}", victims.len(), place.node);
        for pod in pods.iter().filter_map(|uid| self.view.pod(uid)) {
            self.recorder.preempts(pod, words.clone());
        }
        let (namespace, pods, until) = (namespace.clone(), pods.to_vec(), now + END_WITHIN);
        let stage = PreemptionStage::Evicting;
        let preemption = Preemption { namespace, pods, goal, victims, since: now, until, stage };
        self.reserves.evictions.preempting.begin(key.clone(), preemption);
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
        let (own, its) = (pod.standing.priority, asker.priority);
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
            let gpus = self.reserves.evictions.preempting.gpus_for(&key);
            let pods = one.pods.iter().filter_map(|uid| self.view.pod(uid)).filter(|pod| !pod.ending);
            let (mut waits, mut is_placed, mut is_bound) = (false, false, false);
            for pod in pods {
                let is_queued = self.queue.contains(&pod.at.uid);
                waits |= is_queued;
                is_placed |= !is_queued && self.is_decided(pod);
                is_bound |= pod.node.is_some();
                if let Goal::Whole(_) = one.goal {
                    waits = self.pods.demand.contains(&pod.at.uid);
                    // Its claim has a GPU, wherever that is: nobody else ends.
                    is_placed = !waits && self.view.needs_nothing(pod);
                }
            }
            match one.stage {
                _ if is_bound => {
                    self.reserves.evictions.preempting.served(&key);
                    self.end_preempted(&key, gpus);
                }
                PreemptionStage::Evicting if is_placed => {
                    self.reserves.evictions.preempting.placed(&key);
                    self.end_preempted(&key, gpus);
                }
                PreemptionStage::Evicting
                    if waits && one.goal == Goal::Share && !self.reserves.is_preempted(&key) =>
                {
                    // Another pod of its gang has the room. Whether that one is bound says whether it was in vain.
                    let others = self.has_place_of(&key);
                    self.reserves.evictions.preempting.went_to(&key, others);
                }
                PreemptionStage::Evicting if waits => {
                    let (until, outlived) = (self.ends_by(one, now), self.has_time_left(one, now));
                    self.reserves.evictions.preempting.set_until(&key, until);
                    self.reserves.keep_until(&key, until);
                    if until <= now {
                        match outlived {
                            true => self.reserves.evictions.preempting.outlived(&key, now),
                            false => self.reserves.evictions.preempting.in_vain(&key, now),
                        }
                        self.end_preempted(&key, gpus);
                    }
                }
                PreemptionStage::Placed if is_placed => {}
                PreemptionStage::Evicting | PreemptionStage::Placed => {
                    self.reserves.evictions.preempting.in_vain(&key, now);
                    self.end_preempted(&key, gpus);
                }
            }
        }
    }

    /// A claim of the pod has its share, or is to have a share that is decided.
    fn is_decided(&self, pod: &Pod) -> bool {
        let claims = self.view.claims_of(pod).into_iter().flatten().filter(|claim| claim.is_shares());
        claims.into_iter().any(|claim| claim.allocation.is_some() || self.tracker.is_decided(claim.key))
    }

    /// Pods of a gang that have their place, and are not bound yet.
    fn has_place_of(&self, key: &UnitKey) -> Vec<PodUid> {
        let members = self.pods.members(key).filter_map(|(uid, _)| self.view.pod(uid));
        let is_placed = |pod: &&Pod| {
            pod.node.is_none() && !pod.ending && !self.queue.contains(&pod.at.uid) && self.is_decided(pod)
        };
        members.filter(is_placed).map(|pod| pod.at.uid.clone()).collect()
    }

    /// One of the victims was given more time to end than has passed (`terminationGracePeriodSeconds`).
    fn has_time_left(&self, one: &Preemption, now: Moment) -> bool {
        let Some(present) = self.recorder.time_of(now) else { return false };
        let there = one.victims.iter().filter_map(|victim| self.view.pod(&victim.at.uid));
        there.filter_map(|pod| pod.standing.ends).any(|ends| ends > present)
    }

    /// Nothing is kept for it any more. `gpus`: those that were to be given back.
    fn end_preempted(&mut self, key: &UnitKey, gpus: Vec<GpuRef>) {
        if self.reserves.is_preempted(key) {
            self.reserves.end_preempted(key);
            self.capacity.news();
        }
        self.holds.gpus.note(gpus);
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
        let within = match one.goal {
            Goal::Share => PLACED_WITHIN,
            Goal::Whole(_) => BOUND_WITHIN,
        };
        if is_over { until.min(now + within).min(last) } else { until.min(last) }
    }

    /// Evictions that are asked for now.
    pub(in crate::controller) fn evict(&mut self, now: Moment, round: &mut Round) {
        // This round may have placed the pod elsewhere: then nobody else ends for it.
        self.follow_preemptions(now);
        let is_there = |uid: &PodUid| self.view.pod(uid).is_some();
        for pod in self.reserves.evictions.preempting.due(is_there, now) {
            match self.view.pod(&pod.uid) {
                Some(known) if !known.ending => round.writes.push(Write::Evict(pod)),
                // It has ended, or is ending, anyway.
                _ => self.evicted(&pod, Ok(Eviction::Gone), now),
            }
        }
    }

    pub(super) fn evicted(&mut self, pod: &PodRef, result: Result<Eviction, Failure>, now: Moment) {
        match self.reserves.evictions.preempting.answered(pod, result, now) {
            EvictionResult::Nothing => {}
            EvictionResult::Ends(pod, words) => self.recorder.preempted(&pod, words),
            EvictionResult::Stays { unit, words } => {
                self.recorder.trouble(format!("pod {pod} is not evicted for another: {words}"));
                let gpus = self.reserves.evictions.preempting.gpus_for(&unit);
                self.reserves.evictions.preempting.stop(&unit, now);
                self.end_preempted(&unit, gpus);
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

/// What is kept of GPUs, in words.
fn kept_words(place: &Placement) -> String {
    amounts(place.gpus.iter().map(|grant| (grant.memory.mib_ceil(), grant.device.to_string())))
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
