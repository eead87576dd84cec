//! Moves that would make room for what waits: what was found, which moves are under way, and who rests.
//!
//! * [`Proposed`]: who would move where, and what follows. It is looked for again after a while, a unit at a time
//! * [`UnderWay`]: a pod of a proposal ends, whoever has ended it. From then on the places that are left are kept for
//!   who waits, and the places to go to for those that are made anew, until each has its place or the time is over
//! * by itself the controller moves only where it is told to ([`Mode::Auto`]): one unit is served at a time, so many
//!   pods an hour, and none of the same owner again before it has rested

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use serde_json::{Value, json};

use crate::allocate::Placement;
use crate::controller::Moment;
use crate::controller::capacity::Aside;
use crate::controller::config::{Consolidation, Mode};
use crate::controller::queue::{Turn, UnitKey};
use crate::controller::view::movable::{OwnerKey, PodOwner};
use crate::model::claim::PodRef;
use crate::model::names::{NodeName, PodUid};

/// A unit for which was searched is searched for again after so long.
const ANEW: Duration = Duration::from_secs(10);
/// Between two searches, whoever waits.
const SEARCH_EVERY: Duration = Duration::from_secs(1);
/// A unit waits so long before pods are moved for it: what is about to end may make room.
const WAIT_FIRST: Duration = Duration::from_secs(10);
/// Places are kept so long, counted from the last pod that left.
const KEPT_FOR: Duration = Duration::from_secs(180);
/// A search that is due waits so long, and not for the very next round.
const SOON: Duration = Duration::from_millis(50);
/// Units whose moves are under way at a time; of a namespace one.
const UNDER_WAY_MAX: usize = 4;
const HOUR: Duration = Duration::from_secs(3600);
/// Pods that a new leader may move at once: as many as are moved for one unit.
const MOVES_FIRST: u32 = 4;
/// Evictions of an earlier leader that are counted: one in a second.
const SPREAD_MAX: u32 = 3600;
/// A pod that was told to end has so long to be seen ending.
const HEEDED: Duration = Duration::from_secs(30);

/// A pod that would move.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Move {
    pub pod: PodRef,
    pub owner: PodOwner,
    pub from: Placement,
    pub to: Placement,
    /// A claim of it has several GPUs for itself.
    pub alone: bool,
}

/// Who would move where, and what follows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Proposed {
    pub node: NodeName,
    pub moves: Vec<Move>,
    /// Where the pods of what waits go then: of each its place.
    pub then: Vec<(PodUid, Placement)>,
    /// What waits has several GPUs for itself.
    pub alone: bool,
    /// All of the pods are marked: the controller may move them by itself.
    pub marked: bool,
}

impl Lacking {
    /// From when on it may be searched for. None: nothing has changed since it was.
    fn again(&self, epoch: u64) -> Option<Moment> {
        match self.searched {
            None => Some(Moment::ZERO),
            Some((at, seen)) => (seen != epoch).then(|| at.saturating_add(ANEW)),
        }
    }

    /// What was found for it begins. `own`: by the controller.
    fn begins(&self, found: Proposed, own: bool, now: Moment) -> UnderWay {
        let source = found.source();
        let left = found.moves.into_iter().map(|one| Left {
            target: one.target(),
            pod: one.pod,
            owner: one.owner,
            stage: MoveStage::Stays,
        });
        UnderWay {
            unit: self.turn.key.clone(),
            priority: self.turn.priority,
            namespace: self.namespace.clone(),
            source,
            left: left.collect(),
            until: now.saturating_add(KEPT_FOR),
            own,
        }
    }
}

impl UnderWay {
    /// Pods that have not been asked for stay. True if there were any.
    fn has_no_more(&mut self) -> bool {
        let before = self.left.len();
        self.left.retain(|left| left.stage != MoveStage::Stays);
        self.left.len() < before
    }
}

impl Proposed {
    fn source(&self) -> Aside {
        let places = self.then.iter().map(|(_, place)| place.clone()).collect();
        Aside { places, alone: self.alone }
    }
}

impl Move {
    fn target(&self) -> Aside {
        Aside { places: vec![self.to.clone()], alone: self.alone }
    }
}

/// A unit that waits for room.
#[derive(Debug)]
struct Lacking {
    turn: Turn,
    namespace: String,
    /// When it was searched for, and at which epoch.
    searched: Option<(Moment, u64)>,
    found: Option<Proposed>,
}

/// Moves that have begun.
#[derive(Debug)]
struct UnderWay {
    unit: UnitKey,
    /// Of the unit.
    priority: i32,
    namespace: String,
    source: Aside,
    left: Vec<Left>,
    until: Moment,
    /// The controller has begun it; else somebody who has heard of the proposal.
    own: bool,
}

/// A pod that moves.
#[derive(Debug)]
struct Left {
    pod: PodRef,
    owner: PodOwner,
    target: Aside,
    stage: MoveStage,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum MoveStage {
    /// Its turn is yet to come.
    Stays,
    /// The API server was asked to evict it.
    Asked(Moment),
    /// It ends, or has ended: another like it needs its place.
    Leaves,
    /// That has its place.
    Arrived,
}

/// Who moves no pods, and has none moved, until when.
#[derive(Debug, Default)]
struct Rests {
    /// Owners of which pods were moved, and units for which pods were moved in vain.
    owners: BTreeMap<OwnerKey, Moment>,
    units: BTreeMap<UnitKey, Moment>,
    /// Namespaces of such units, where somebody else had begun it.
    namespaces: BTreeMap<String, Moment>,
    /// When this leader has begun. None: it has not.
    began: Option<Moment>,
    /// From when on this leader knows of every owner and unit that rests: one before it may have moved pods.
    knows_from: Option<Moment>,
    /// When this was last looked through.
    tidied: Moment,
}

#[derive(Debug, Default)]
pub struct Moves {
    lacking: BTreeMap<UnitKey, Lacking>,
    /// No search before then.
    next_search: Moment,
    under_way: Vec<UnderWay>,
    rests: Rests,
    /// Evictions within the last hour: when each counts no more, in order.
    evicted: VecDeque<Moment>,
    /// Something new is to be told.
    news: bool,
    counts: MoveCounts,
}

/// Since this was last taken.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MoveCounts {
    pub searches: u64,
    /// Pods that the API server was asked to evict.
    pub evictions: u64,
    /// Units that were served by moves, and units for which pods were moved in vain.
    pub served: u64,
    pub in_vain: u64,
}

impl Moves {
    /// What was counted since this was last called.
    pub fn take_counts(&mut self) -> MoveCounts {
        std::mem::take(&mut self.counts)
    }

    #[cfg(test)]
    pub fn counts(&self) -> &MoveCounts {
        &self.counts
    }

    /// Forgets who does not wait any more, and ends what is over. True if a place is kept no longer.
    pub(super) fn tidy(
        &mut self,
        queued: impl Fn(&UnitKey) -> bool,
        rules: &Consolidation,
        now: Moment,
    ) -> bool {
        let rest = rules.rest;
        let before = std::mem::replace(&mut self.rests.tidied, now);
        let knows_from = self.begin_to_lead(rules, now);
        let has_ended = |until: &Moment| before < *until && *until <= now;
        self.lacking.retain(|key, _| queued(key));
        if rules.mode == Mode::Auto && self.rests.owners.values().chain([&knows_from]).any(has_ended) {
            self.others_may_move();
        }
        self.rests.owners.retain(|_, until| now < *until);
        self.rests.units.retain(|_, until| now < *until);
        self.rests.namespaces.retain(|_, until| now < *until);
        while self.evicted.front().is_some_and(|until| *until <= now) {
            self.evicted.pop_front();
        }
        let before = self.under_way.len();
        let (mut vain, mut is_free) = (Vec::new(), false);
        for one in self.under_way.iter_mut().filter(|one| one.own && !queued(&one.unit)) {
            is_free |= one.has_no_more();
            if !one.source.places.is_empty() {
                one.source.places.clear();
                is_free = true;
                let has_any = !one.left.is_empty();
                vain.extend(has_any.then(|| (one.unit.clone(), one.namespace.clone(), true)));
            }
        }
        self.under_way.retain(|one| {
            let unheeded =
                |left: &Left| matches!(left.stage, MoveStage::Asked(at) if at.saturating_add(HEEDED) <= now);
            let is_queued = queued(&one.unit);
            // Nobody keeps places by asking for them and going away.
            let is_gone = !is_queued && !one.source.places.is_empty() && !one.own;
            let over = one.until <= now || is_gone || one.left.iter().any(unheeded);
            if over && (is_queued || is_gone) {
                vain.push((one.unit.clone(), one.namespace.clone(), one.own));
            }
            let all = one.left.iter().all(|left| left.stage == MoveStage::Arrived);
            !(over || (all && !is_queued))
        });
        self.counts.in_vain += vain.len() as u64;
        for (unit, namespace, own) in vain {
            let until = now.saturating_add(rest);
            self.rests.units.insert(unit, until);
            if !own {
                self.rests.namespaces.insert(namespace, until);
            }
        }
        is_free || self.under_way.len() < before
    }

    /// A leader before this one may have used up the hour, and nobody knows when: its evictions count as if they had been
    /// spread over the hour, all but [`MOVES_FIRST`]. The answer is from when on it is known who rests.
    fn begin_to_lead(&mut self, rules: &Consolidation, now: Moment) -> Moment {
        if let Some(known) = self.rests.knows_from {
            return known;
        }
        let knows_from = now.saturating_add(rules.rest);
        (self.rests.began, self.rests.knows_from) = (Some(now), Some(knows_from));
        let spread = rules.per_hour.saturating_sub(MOVES_FIRST).min(SPREAD_MAX);
        self.evicted.extend((1..=spread).map(|nth| now.saturating_add(HOUR * nth / spread)));
        knows_from
    }

    /// No owner rests but those that are known here.
    pub(super) fn knows_who_rests(&self, now: Moment) -> bool {
        self.rests.knows_from.is_some_and(|from| from <= now)
    }

    /// Who may move may be another now, though no place is another: what was found is searched for anew.
    pub(super) fn others_may_move(&mut self) {
        for (_, epoch) in self.lacking.values_mut().filter_map(|one| one.searched.as_mut()) {
            *epoch = u64::MAX;
        }
    }

    /// The unit waits for room, or for something else.
    pub(super) fn lacks_room(&mut self, turn: &Turn, namespace: &str, lacks: bool) {
        match (lacks, self.lacking.get_mut(&turn.key)) {
            (true, Some(known)) => known.turn = turn.clone(),
            (true, None) => {
                let namespace = namespace.to_owned();
                let lacking = Lacking { turn: turn.clone(), namespace, searched: None, found: None };
                self.lacking.insert(turn.key.clone(), lacking);
            }
            (false, _) => drop(self.lacking.remove(&turn.key)),
        }
    }

    /// The unit that is to be searched for now: of those that were not, or that something has changed for since, the one
    /// whose search is longest ago, then the most urgent. At most one a second.
    /// `is_busy`: others end for the unit already.
    pub(super) fn next_search(
        &mut self,
        is_busy: impl Fn(&UnitKey) -> bool,
        epoch: u64,
        now: Moment,
    ) -> Option<Turn> {
        if now < self.next_search {
            return None;
        }
        let due = self.lacking.iter().filter(|(unit, one)| {
            one.again(epoch).is_some_and(|again| again <= now) && !self.is_served(unit) && !is_busy(unit)
        });
        let order =
            |one: &Lacking| (one.searched.map(|(at, _)| at), -i64::from(one.turn.priority), one.turn.since);
        let turn = due.min_by_key(|(_, one)| order(one)).map(|(_, one)| one.turn.clone())?;
        self.next_search = now.saturating_add(SEARCH_EVERY);
        self.counts.searches += 1;
        Some(turn)
    }

    /// What a search came to. True if that is something else than before.
    pub(super) fn note(&mut self, unit: &UnitKey, found: Option<Proposed>, epoch: u64, now: Moment) -> bool {
        let Some(one) = self.lacking.get_mut(unit) else { return false };
        one.searched = Some((now, epoch));
        let is_new = one.found != found;
        one.found = found;
        self.news |= is_new;
        is_new
    }

    /// What was found for a unit last.
    pub(super) fn of(&self, unit: &UnitKey) -> Option<&Proposed> {
        self.lacking.get(unit)?.found.as_ref()
    }

    /// Somebody's moves for this unit are under way: it waits for them.
    pub(super) fn is_served(&self, unit: &UnitKey) -> bool {
        self.under_way.iter().any(|one| one.unit == *unit)
    }

    /// Pods of this owner are not to be moved now.
    pub(super) fn rests(&self, owner: &PodOwner, now: Moment) -> bool {
        self.rests.owners.get(&owner.key()).is_some_and(|until| now < *until) || self.moves_of(&owner.key())
    }

    fn moves_of(&self, owner: &OwnerKey) -> bool {
        self.under_way.iter().flat_map(|one| &one.left).any(|left| left.owner.key() == *owner)
    }

    /// Pods were moved for the unit a while ago.
    pub(super) fn rests_for(&self, unit: &UnitKey, now: Moment) -> bool {
        self.rests.units.get(unit).is_some_and(|until| now < *until)
    }

    /// When this leader has begun, as long as another before it may have moved pods for those that waited then.
    pub(super) fn began(&self, now: Moment) -> Option<Moment> {
        self.rests.began.filter(|_| !self.knows_who_rests(now))
    }

    /// Pods that may be moved now without more than there are to be in an hour.
    fn left_in_hour(&self, rules: &Consolidation) -> usize {
        usize::try_from(rules.per_hour).unwrap_or(usize::MAX).saturating_sub(self.evicted.len())
    }

    /// The unit for which the controller may begin moves now: nothing has changed since they were found. `is_meant`: it
    /// may have pods moved for it.
    pub(super) fn next_beginning(
        &self,
        rules: &Consolidation,
        is_meant: impl Fn(&Turn) -> bool,
        epoch: u64,
        now: Moment,
    ) -> Option<UnitKey> {
        if rules.mode != Mode::Auto || !self.under_way.is_empty() {
            return None;
        }
        let left = self.left_in_hour(rules);
        let may = |(unit, one): &(&UnitKey, &Lacking)| {
            let found = one.found.as_ref().filter(|found| found.marked);
            found.is_some_and(|found| found.moves.len() <= left)
                && one.searched.is_some_and(|(_, at)| at == epoch)
                && one.turn.since.saturating_add(WAIT_FIRST) <= now
                && !self.rests_for(unit, now)
                && is_meant(&one.turn)
        };
        let may = self.lacking.iter().filter(may);
        may.min_by_key(|(_, one)| (-i64::from(one.turn.priority), one.turn.since))
            .map(|(unit, _)| unit.clone())
    }

    /// The controller begins what was found for the unit: the pods are evicted one after another.
    pub(super) fn begin(&mut self, unit: &UnitKey, rest: Duration, now: Moment) {
        let Some(one) = self.lacking.get_mut(unit) else { return };
        let Some(found) = one.found.take() else { return };
        let begun = one.begins(found.clone(), true, now);
        for one in &found.moves {
            self.rests.owners.insert(one.owner.key(), now.saturating_add(rest));
        }
        // Though it may get its share: whether it is ever bound is another's to say.
        self.rests.units.insert(unit.clone(), now.saturating_add(rest));
        self.under_way.push(begun);
    }

    /// Pods that end, of a proposal: whoever has ended them, it has begun. True if something is kept from now on.
    /// `preempted`: what these leave is another's.
    pub(super) fn notice(
        &mut self,
        ends: impl Fn(&PodUid) -> bool,
        preempted: &BTreeSet<PodUid>,
        now: Moment,
    ) -> bool {
        for one in self.lacking.values_mut() {
            one.found.take_if(|found| found.moves.iter().any(|one| preempted.contains(&one.pod.uid)));
        }
        let begun = |one: &Lacking| {
            one.found.as_ref().is_some_and(|found| found.moves.iter().any(|one| ends(&one.pod.uid)))
        };
        let begun = self.lacking.iter().filter(|(_, one)| begun(one));
        let begun: Vec<UnitKey> = begun.map(|(unit, _)| unit.clone()).collect();
        let before = self.under_way.len();
        for unit in &begun {
            let Some(one) = self.lacking.get_mut(unit) else { continue };
            let Some(found) = one.found.take() else { continue };
            let begun = one.begins(found, false, now);
            // Who ends pods of its own may not keep places for ever with that.
            let is_busy = self.under_way.len() >= UNDER_WAY_MAX
                || self.under_way.iter().any(|one| one.namespace == begun.namespace)
                || self.rests.namespaces.contains_key(&begun.namespace);
            if !is_busy {
                self.under_way.push(begun);
            }
        }
        for one in &mut self.under_way {
            for left in &mut one.left {
                if matches!(left.stage, MoveStage::Stays | MoveStage::Asked(_)) && ends(&left.pod.uid) {
                    left.stage = MoveStage::Leaves;
                    one.until = now.saturating_add(KEPT_FOR);
                }
            }
        }
        self.under_way.len() > before
    }

    /// The pod that is to be evicted next, if one is.
    pub(super) fn next_eviction(&mut self, now: Moment) -> Option<(PodRef, PodOwner)> {
        let one = self.under_way.iter_mut().find(|one| one.own)?;
        if one.left.iter().any(|left| matches!(left.stage, MoveStage::Asked(_))) {
            return None;
        }
        let next = one.left.iter_mut().find(|left| left.stage == MoveStage::Stays)?;
        next.stage = MoveStage::Asked(now);
        self.evicted.push_back(now.saturating_add(HOUR));
        self.counts.evictions += 1;
        Some((next.pod.clone(), next.owner.clone()))
    }

    /// The API server has not evicted it: what has begun is given up.
    pub(super) fn refused(&mut self, pod: &PodUid, rest: Duration, now: Moment) {
        let is_it = |one: &UnderWay| one.left.iter().any(|left| left.pod.uid == *pod);
        for one in self.under_way.iter_mut().filter(|one| is_it(one)) {
            // Those that have left find their places yet.
            one.left.retain(|left| matches!(left.stage, MoveStage::Leaves | MoveStage::Arrived));
            self.rests.units.insert(one.unit.clone(), now.saturating_add(rest));
        }
        let before = self.under_way.len();
        self.under_way.retain(|one| !one.left.is_empty());
        self.counts.in_vain += (before - self.under_way.len()) as u64;
    }

    /// A unit has its place. True if it was kept for it.
    pub(super) fn served(&mut self, unit: &UnitKey) -> bool {
        self.lacking.remove(unit);
        let Some(one) = self.under_way.iter_mut().find(|one| one.unit == *unit) else { return false };
        one.source.places.clear();
        if one.own {
            one.has_no_more();
        }
        self.counts.served += 1;
        true
    }

    /// A pod of this owner has its place: it is the one that was made anew. True if a place was kept for it.
    pub(super) fn arrived(&mut self, owner: &OwnerKey) -> bool {
        let left = self.under_way.iter_mut().flat_map(|one| &mut one.left);
        let mut leaves = left.filter(|left| left.stage == MoveStage::Leaves && left.owner.key() == *owner);
        match leaves.next() {
            Some(left) => {
                left.stage = MoveStage::Arrived;
                left.target.places.clear();
                true
            }
            None => false,
        }
    }

    /// What is kept from a unit of this priority: places of moves that are not for it, nor for one of lower priority.
    /// `owners`: of its pods.
    pub(super) fn kept_from(&self, unit: &UnitKey, priority: i32, owners: &BTreeSet<OwnerKey>) -> Vec<Aside> {
        let mut kept = Vec::new();
        for one in self.under_way.iter().filter(|one| one.priority >= priority) {
            if one.unit != *unit {
                kept.push(one.source.clone());
            }
            let others = one.left.iter().filter(|left| !owners.contains(&left.owner.key()));
            kept.extend(others.map(|left| left.target.clone()));
        }
        kept.retain(|aside| !aside.places.is_empty());
        kept
    }

    /// When time alone changes something.
    pub(super) fn next(
        &mut self,
        rules: &Consolidation,
        is_busy: impl Fn(&UnitKey) -> bool,
        epoch: u64,
        now: Moment,
    ) -> Option<Moment> {
        if rules.mode == Mode::Off {
            return None;
        }
        if std::mem::take(&mut self.news) {
            return Some(now);
        }
        let asked = self.under_way.iter().flat_map(|one| &one.left).filter_map(|left| match left.stage {
            MoveStage::Asked(at) => Some(at.saturating_add(HEEDED)),
            MoveStage::Stays | MoveStage::Leaves | MoveStage::Arrived => None,
        });
        let until = self.under_way.iter().map(|one| one.until);
        let waits = self.lacking.iter().filter(|(unit, _)| !self.is_served(unit) && !is_busy(unit));
        let again = waits.filter_map(|(_, one)| one.again(epoch));
        let again = again.map(|again| again.max(self.next_search).max(now.saturating_add(SOON)));
        let begins = self.lacking.values().filter(|one| one.found.as_ref().is_some_and(|found| found.marked));
        let begins = begins.map(|one| one.turn.since.saturating_add(WAIT_FIRST));
        let rests = self.rest_ends(rules);
        asked.chain(until).chain(again).chain(begins).chain(rests).filter(|due| *due > now).min()
    }

    /// When others may move, or somebody may have others moved again, though nothing happens: while somebody waits.
    fn rest_ends(&self, rules: &Consolidation) -> impl Iterator<Item = Moment> {
        let matters = rules.mode == Mode::Auto && !self.lacking.is_empty();
        let owners = self.rests.owners.values().chain(&self.rests.knows_from).copied();
        let units = self.lacking.keys().filter_map(|unit| self.rests.units.get(unit)).copied();
        let hour = self.evicted.front().copied();
        owners.chain(units).chain(hour).filter(move |_| matters)
    }

    /// For who asks the process.
    pub fn state(&self) -> Value {
        let one = |one: &UnderWay| {
            let pods = one.left.iter().map(|left| format!("{}/{}", left.pod.namespace, left.pod.name));
            let gpus: BTreeSet<String> = one.source.gpus().map(|(gpu, _)| gpu.to_string()).collect();
            json!({"moves": pods.collect::<Vec<_>>(), "keeps": gpus, "byController": one.own,
                "untilSecond": one.until.as_secs()})
        };
        self.under_way.iter().map(one).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_leader_may_move_a_few_pods_and_then_as_many_as_an_hour_brings() {
        for (per_hour, begin, half, later) in [(30, 4, 17, 30), (4, 4, 4, 4), (5, 4, 4, 5), (0, 0, 0, 0)] {
            let rules = Consolidation { mode: Mode::Auto, per_hour, ..Consolidation::default() };
            let mut moves = Moves::default();
            let left = [Duration::ZERO, HOUR / 2, HOUR].map(|at| {
                moves.tidy(|_| true, &rules, at);
                moves.left_in_hour(&rules)
            });
            assert_eq!(left, [begin, half, later], "{per_hour}");
        }
        let rules = Consolidation { per_hour: u32::MAX, ..Consolidation::default() };
        let mut moves = Moves::default();
        moves.tidy(|_| true, &rules, HOUR);
        assert_eq!(moves.evicted.len(), 3600, "what is kept has a limit");
    }
}
