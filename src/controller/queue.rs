//! Which pods wait, and in which order they are looked at: by priority, then by age. Pods of a gang are one unit.
//! `refusals`: which nodes have refused a pod, and which pods their scheduler leaves alone; `siblings`: which nodes have
//! refused others of its owner.

mod refusals;
pub mod siblings;

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::Timestamp;

use crate::controller::Moment;
use crate::controller::gang::{Minimum, Need, Obstacle, Placed};
use crate::controller::queue::refusals::Refusals;
use crate::controller::view::groups::Family;
use crate::model::names::PodUid;

/// A gang of which nobody says how many start together is complete when no pod of it has come for so long. Who waits
/// for a PodGroup is told after so long.
const GANG_QUIET: Duration = Duration::from_secs(2);
/// A gang whose oldest pods are to have the shares waits at most so long for more of its pods.
const GATHER_MAX: Duration = Duration::from_secs(10);

/// A pod on its own, or all pods of a gang.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum UnitKey {
    Pod(PodUid),
    Gang { namespace: String, family: Family, name: String },
}

/// When what waits is no longer passed by what came later, and for how long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Patience {
    pub passes: u32,
    pub time: Duration,
    /// For so long at a time its place is kept.
    pub keep: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self { passes: 32, time: Duration::from_secs(60), keep: Duration::from_secs(60) }
    }
}

/// What the order needs to know of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Waiter {
    pub priority: i32,
    pub tried: TriedBy,
    pub created: Option<Timestamp>,
    /// How many pods of its gang start together.
    pub minimum: Minimum,
    /// The part of the gang that it is.
    pub part: Option<String>,
}

/// In which order a pod's scheduler tries the pods of a gang, where it tries no more of them once one has no share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TriedBy {
    /// It does not matter.
    Any,
    /// The pod's number in its part of the gang; they begin with 0.
    Number(u64),
    /// Its age, to the second, then its UID: no pod shows that one before it is missing.
    Age,
}

impl TriedBy {
    fn number(self) -> Option<u64> {
        match self {
            Self::Number(number) => Some(number),
            Self::Any | Self::Age => None,
        }
    }
}

#[derive(Debug, Default)]
pub struct Queue {
    pub patience: Patience,
    units: BTreeMap<UnitKey, Unit>,
    of_pods: BTreeMap<PodUid, UnitKey>,
    pub refusals: Refusals,
}

#[derive(Debug)]
struct Unit {
    pods: BTreeMap<PodUid, Waiter>,
    since: Moment,
    /// When its last pod came.
    grown: Moment,
    passes: u32,
    tried: Option<u64>,
    /// The same of pods that start by themselves.
    each_tried: BTreeMap<PodUid, u64>,
    looked_at: bool,
    left: Left,
    /// Its namespace may not have more: it waits for nobody else.
    bounded: bool,
}

/// What the last round did with a unit that was due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Left {
    /// It was tried, or there was nothing to try.
    Not,
    /// It was not tried, and comes first in the next one.
    Over,
    /// It was not tried, since others of its namespace come first.
    Behind,
}

/// A unit whose turn it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Turn {
    pub key: UnitKey,
    pub priority: i32,
    pub pods: Vec<PodUid>,
    /// It was tried in vain in this epoch.
    pub tried: Option<u64>,
    /// It was tried before, whatever has changed since.
    pub looked_at: bool,
    /// The last round did not come to it.
    pub left_over: bool,
    pub since: Moment,
    /// It has been passed for too long.
    pub starving: bool,
    pub together: Together,
    /// When it was last tried, its namespace could not have more: nobody passes it.
    pub bounded: bool,
}

/// How many of the pods of a turn are placed together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Together {
    All,
    /// All, or so many if not all have room.
    AtLeast(Need),
    /// It is one of a gang of which as many are placed as start together.
    Alone,
}

/// A unit that has no turn, as something is still to come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gathering {
    pub pods: Vec<PodUid>,
    pub lacks: Lacks,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Lacks {
    /// Pods of a gang.
    Pods {
        gang: String,
        there: usize,
        size: usize,
    },
    Cleared(Obstacle),
    /// Its scheduler did not bind a pod of it to the share that it had: no other is chosen before then.
    Paused(Moment),
}

/// Which of a unit's pods may be placed now.
enum Start {
    NotYet,
    Together(Together),
    /// As many are placed as start together: each of the others starts by itself.
    Each,
}

impl Queue {
    pub fn new(patience: Patience) -> Self {
        Self { patience, ..Self::default() }
    }

    pub fn add(&mut self, pod: &PodUid, key: UnitKey, waiter: Waiter, now: Moment) {
        if self.of_pods.get(pod).is_some_and(|old| *old != key) {
            self.remove(pod);
            self.refusals.end_pause(pod);
        }
        let unit = self.units.entry(key.clone()).or_insert_with(|| Unit::new(now));
        if unit.pods.get(pod) != Some(&waiter) {
            if !unit.pods.contains_key(pod) {
                unit.grown = now;
            } else {
                // What it asks for, or what its group says, is another now.
                self.refusals.end_pause(pod);
            }
            unit.pods.insert(pod.clone(), waiter);
            unit.forget_trial(pod);
        }
        self.of_pods.insert(pod.clone(), key);
    }

    pub fn remove(&mut self, pod: &PodUid) {
        let Some(key) = self.of_pods.remove(pod) else { return };
        if let Some(unit) = self.units.get_mut(&key) {
            unit.pods.remove(pod);
            unit.forget_trial(pod);
            if unit.pods.is_empty() {
                self.units.remove(&key);
            }
        }
    }

    /// The pod is gone for good.
    pub fn forget(&mut self, pod: &PodUid) {
        self.remove(pod);
        self.refusals.forget(pod);
    }

    pub fn contains(&self, pod: &PodUid) -> bool {
        self.of_pods.contains_key(pod)
    }

    pub fn has(&self, key: &UnitKey) -> bool {
        self.units.contains_key(key)
    }

    pub fn has_pod(&self, pod: &PodUid) -> bool {
        self.of_pods.contains_key(pod)
    }

    pub fn len(&self) -> usize {
        self.of_pods.len()
    }

    pub fn is_empty(&self) -> bool {
        self.of_pods.is_empty()
    }

    pub fn pods(&self) -> impl Iterator<Item = &PodUid> {
        self.of_pods.keys()
    }

    /// Units in order, and the pods of a unit one by one where each starts by itself. `placed`: which pods of a gang are
    /// placed already.
    pub fn turns(&self, now: Moment, placed: impl Fn(&UnitKey) -> Placed) -> Vec<Turn> {
        let awake =
            self.units.iter().filter(|(_, unit)| self.refusals.paused_until(unit.pods.keys(), now).is_none());
        let starts = awake.map(|(key, unit)| (key, unit, unit.start(key, &placed(key), now)));
        let mut units: Vec<(&UnitKey, &Unit, Start)> =
            starts.filter(|(_, _, start)| !matches!(start, Start::NotYet)).collect();
        units.sort_by_cached_key(|(key, unit, _)| {
            (-i64::from(unit.priority()), unit.created(), unit.since, (*key).clone())
        });
        let turns = units.into_iter().flat_map(|(key, unit, start)| {
            let turn = |pods, together| unit.turn(key, pods, together, self.patience, now);
            match start {
                Start::NotYet => Vec::new(),
                Start::Together(together) => vec![turn(unit.in_order(), together)],
                Start::Each => {
                    let pods = unit.in_order().into_iter();
                    pods.map(|pod| turn(vec![pod], Together::Alone)).collect()
                }
            }
        });
        turns.collect()
    }

    /// Units that wait for something else than room, and what that is. `placed`: which pods of a gang are placed
    /// already.
    pub fn gathering(&self, now: Moment, placed: impl Fn(&UnitKey) -> Placed) -> Vec<Gathering> {
        let one = |(key, unit): (&UnitKey, &Unit)| {
            if let Some(until) = self.refusals.paused_until(unit.pods.keys(), now) {
                return Some(Gathering { pods: unit.in_order(), lacks: Lacks::Paused(until) });
            }
            let placed = placed(key);
            if !matches!(unit.start(key, &placed, now), Start::NotYet) {
                return None;
            }
            let lacks = match (unit.minimum(), key) {
                (Minimum::None(obstacle), _) if unit.is_quiet(now) => Lacks::Cleared(obstacle),
                (Minimum::Pods(_), _) if unit.waits_for_first(&placed, now) => return None,
                (Minimum::Pods(need), UnitKey::Gang { name, .. }) => {
                    let there = unit.pods.len() + placed.counted(&need);
                    Lacks::Pods { gang: name.clone(), there, size: need.count() }
                }
                _ => return None,
            };
            Some(Gathering { pods: unit.in_order(), lacks })
        };
        self.units.iter().filter_map(one).collect()
    }

    /// The unit of the pod is to be tried again, though nothing has changed.
    pub fn again(&mut self, pod: &PodUid) {
        if let Some(unit) = self.of_pods.get(pod).and_then(|key| self.units.get_mut(key)) {
            unit.forget_trial(pod);
        }
    }

    /// It was tried in vain. `begun`: the epoch in which the trial began; `epoch`: this one.
    pub fn tried(&mut self, turn: &Turn, begun: u64, epoch: u64) {
        if let Some(unit) = self.units.get_mut(&turn.key) {
            unit.bounded = false;
            unit.note_trial(turn, begun);
            // What has come since was not there for all of the trial.
            if begun != epoch {
                unit.left = Left::Over;
            }
        }
    }

    /// It was tried, and its namespace may not have more. It is as patient then as one that has just come: others go
    /// before it for no fault of theirs.
    pub fn over_bounds(&mut self, turn: &Turn, begun: u64, epoch: u64, now: Moment) {
        if let Some(unit) = self.units.get_mut(&turn.key) {
            unit.note_trial(turn, begun);
            if begun != epoch {
                unit.left = Left::Over;
            }
            // Of pods that start one by one the others may have what they need.
            if turn.together == Together::Alone {
                return;
            }
            unit.bounded = true;
            (unit.passes, unit.since) = (0, now);
        }
    }

    /// It is being tried.
    pub fn looked_at(&mut self, key: &UnitKey) {
        if let Some(unit) = self.units.get_mut(key) {
            unit.looked_at = true;
        }
    }

    /// It is due, and is not tried in this round. `first`: it comes first in the next one.
    pub fn leave(&mut self, key: &UnitKey, first: bool) {
        if let Some(unit) = self.units.get_mut(key) {
            unit.left = if first { Left::Over } else { Left::Behind };
        }
    }

    /// A round begins.
    pub fn nothing_left(&mut self) {
        self.units.values_mut().for_each(|unit| unit.left = Left::Not);
    }

    /// Something is left for the next round.
    pub fn has_left(&self) -> bool {
        self.left().next().is_some()
    }

    /// What is left for the next round.
    pub fn left(&self) -> impl Iterator<Item = &UnitKey> {
        self.units.iter().filter(|(_, unit)| unit.left != Left::Not).map(|(key, _)| key)
    }

    /// Something that came later was placed before it.
    pub fn passed(&mut self, key: &UnitKey) {
        if let Some(unit) = self.units.get_mut(key) {
            unit.passes = unit.passes.saturating_add(1);
        }
    }

    /// When time alone will let something be tried again.
    pub fn next(&self, now: Moment) -> Option<Moment> {
        let refusals = self.refusals.ends(|pod| self.of_pods.contains_key(pod));
        let quiet = |(key, unit): &(&UnitKey, &Unit)| {
            matches!(key, UnitKey::Gang { .. }) || matches!(unit.minimum(), Minimum::None(_))
        };
        let gangs = self.units.iter().filter(quiet).map(|(_, unit)| unit.grown + GANG_QUIET);
        refusals.chain(gangs).filter(|due| *due > now).min()
    }
}

impl Unit {
    fn new(now: Moment) -> Self {
        Self {
            pods: BTreeMap::new(),
            since: now,
            grown: now,
            passes: 0,
            tried: None,
            each_tried: BTreeMap::new(),
            looked_at: false,
            left: Left::Not,
            bounded: false,
        }
    }

    fn note_trial(&mut self, turn: &Turn, epoch: u64) {
        match turn.together {
            Together::Alone => self.each_tried.extend(turn.pods.iter().map(|pod| (pod.clone(), epoch))),
            Together::All | Together::AtLeast(_) => self.tried = Some(epoch),
        }
    }

    /// Something of a pod is another now.
    fn forget_trial(&mut self, pod: &PodUid) {
        self.tried = None;
        self.each_tried.remove(pod);
    }

    /// The lowest of its pods: a gang is as urgent as its least.
    fn priority(&self) -> i32 {
        self.pods.values().map(|pod| pod.priority).min().unwrap_or(0)
    }

    fn created(&self) -> Option<Timestamp> {
        self.pods.values().filter_map(|pod| pod.created).min()
    }

    fn minimum(&self) -> Minimum {
        let said = self.pods.values().map(|pod| pod.minimum.clone());
        said.reduce(Minimum::stronger).unwrap_or(Minimum::ONE)
    }

    /// No pod of it has come for a while.
    fn is_quiet(&self, now: Moment) -> bool {
        self.grown + GANG_QUIET <= now
    }

    /// Its scheduler tries no more pods once one has no share, and some that it tries before these may be still to come.
    fn waits_for_first(&self, placed: &Placed, now: Moment) -> bool {
        let by_age = || self.pods.values().any(|pod| pod.tried == TriedBy::Age);
        let may_miss = self.has_gap() || (now < self.since.saturating_add(GATHER_MAX) && by_age());
        placed.is_none() && may_miss && !self.is_quiet(now)
    }

    /// Pods are numbered from 0 in each part of a gang, and some with lower numbers than these have are not there.
    fn has_gap(&self) -> bool {
        let mut parts: BTreeMap<Option<&str>, (u64, u64)> = BTreeMap::new();
        for (number, pod) in self.pods.values().filter_map(|pod| Some((pod.tried.number()?, pod))) {
            let (pods, highest) = parts.entry(pod.part.as_deref()).or_default();
            (*pods, *highest) = (*pods + 1, number.max(*highest));
        }
        parts.values().any(|(pods, highest)| highest >= pods)
    }

    /// The most urgent first, then by their numbers those that have one, then the oldest.
    fn in_order(&self) -> Vec<PodUid> {
        let mut pods: Vec<(&PodUid, &Waiter)> = self.pods.iter().collect();
        pods.sort_by_key(|(uid, pod)| {
            (-i64::from(pod.priority), pod.tried.number().unwrap_or(u64::MAX), pod.created, *uid)
        });
        pods.into_iter().map(|(uid, _)| uid.clone()).collect()
    }

    fn start(&self, key: &UnitKey, placed: &Placed, now: Moment) -> Start {
        let all = || Start::Together(Together::All);
        match self.minimum() {
            // A status may be older than what has been started since.
            Minimum::None(Obstacle::Refused { .. }) if !placed.is_none() => Start::Each,
            Minimum::None(_) => Start::NotYet,
            _ if matches!(key, UnitKey::Pod(_)) => all(),
            Minimum::AllThere if !placed.is_none() || self.is_quiet(now) => all(),
            Minimum::AllThere => Start::NotYet,
            Minimum::Pods(need) => {
                let need = need.beside(placed);
                let parts: Vec<Option<&str>> = self.pods.values().map(|pod| pod.part.as_deref()).collect();
                match need.count() {
                    0 => Start::Each,
                    _ if need.choose(&parts).is_some() && self.waits_for_first(placed, now) => Start::NotYet,
                    _ if need.choose(&parts).is_some() => Start::Together(Together::AtLeast(need)),
                    // It was complete once; some of it have ended since.
                    _ if !placed.is_none() => all(),
                    _ => Start::NotYet,
                }
            }
        }
    }

    fn turn(
        &self,
        key: &UnitKey,
        pods: Vec<PodUid>,
        together: Together,
        patience: Patience,
        now: Moment,
    ) -> Turn {
        let waited = now.saturating_sub(self.since);
        let tried = match (&together, pods.first()) {
            (Together::Alone, Some(pod)) => self.each_tried.get(pod).copied(),
            _ => self.tried,
        };
        Turn {
            key: key.clone(),
            priority: self.priority(),
            pods,
            together,
            tried,
            looked_at: self.looked_at,
            left_over: self.left == Left::Over,
            since: self.since,
            starving: self.passes >= patience.passes || (self.passes > 0 && waited >= patience.time),
            bounded: self.bounded,
        }
    }
}
