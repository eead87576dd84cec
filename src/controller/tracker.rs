//! What the controller has decided and is writing for each claim: one record per claim, which only this module changes.
//!
//! ```text
//!         plan                    the watch shows all allocations of the unit
//! Open ─────────→ Planned ──────────────────────────────────────→ Open
//!  ▲ ↖─────────────┘ │ cancelled while its allocation is being written, or after an answer was lost
//!  │    cancelled    │
//!  │                 ▼
//!  └─────────── Unconfirmed: the allocation may stand in the API soon; it counts as granted
//!     shown, or confirmed not to come
//! ```
//!
//! Beside the decision a record has the claim's write under way (one at a time), the reason that is to be written on
//! the claim, the time before which the claim is not decided again, and, for an allocation that no pod has reserved,
//! since when it has been unreserved ([`Unused`]).
//!
//! Changes of the API come in by [`Tracker::allocated`], [`Tracker::cleared`], [`Tracker::created`] and
//! [`Tracker::gone`], answers to writes by [`Tracker::succeeded`] and [`Tracker::failed`]. Each returns what its caller
//! is to do: the tracker knows neither capacity nor queue.

mod plan;
mod unused;

use std::collections::BTreeMap;
use std::time::Duration;

pub use plan::{Plan, PlannedClaim, as_grant};
pub use unused::Because;

use plan::{Next, PlanProgress, Unit};
use unused::Unused;

use crate::controller::Moment;
use crate::controller::config::Rules;
use crate::controller::queue::UnitKey;
use crate::controller::view::{GpuRef, Presence};
use crate::controller::write::Failure;
use crate::model::claim::ClaimKey;
use crate::model::names::{NodeName, PodUid};

/// Between a clearing and the next allocation of a claim: watchers that would see both as one change would miss
/// it (kube-scheduler's allocator follows only the coming and going of allocations).
const REST_AFTER_CLEARING: Duration = Duration::from_secs(1);
/// Before a write that failed or was not answered is tried again.
pub const RETRY_AFTER: Duration = Duration::from_secs(2);
/// An object whose creation was not answered is seen by then, or never.
const CREATION_SHOWS_WITHIN: Duration = Duration::from_secs(10);
/// Before a claim is tried again that the API server refused.
const AFTER_REFUSAL: Duration = Duration::from_secs(30);
/// Claims that are being written at once.
const UNDER_WAY_MAX: usize = 256;
/// With so many under way no reason is written.
const REASONS_UNDER_WAY_MAX: usize = 16;
/// Between two reviews of unused allocations: what is found counts after seconds only, and while a thousand pods are
/// being bound there are many.
const REVIEW_EVERY: Duration = Duration::from_millis(500);

/// See the module's text.
#[derive(Debug, Default)]
pub struct Tracker {
    claims: BTreeMap<ClaimKey, ClaimRecord>,
    units: BTreeMap<UnitKey, Unit>,
    /// How many records have a write under way.
    under_way: usize,
    /// After a reason could not be written: none is before then.
    reasons_after: Option<Moment>,
    reviewed: Option<Moment>,
    review_at: Option<Moment>,
    /// How long the pods of plans have waited that were completed since this was last taken.
    waits: Vec<Duration>,
}

#[derive(Debug, Default)]
struct ClaimRecord {
    decision: ClaimDecision,
    write: Option<Writing>,
    rests_until: Option<Moment>,
    /// Why the claim waits, still to be written on it.
    reason: Option<String>,
    unused: Option<Unused>,
}

impl ClaimRecord {
    fn is_empty(&self) -> bool {
        matches!(self.decision, ClaimDecision::Open)
            && self.write.is_none()
            && self.rests_until.is_none()
            && self.reason.is_none()
            && self.unused.is_none()
    }
}

#[derive(Debug, Default)]
enum ClaimDecision {
    #[default]
    Open,
    Planned(PlanProgress),
    /// Its plan was cancelled, and its allocation may stand in the API soon.
    Unconfirmed {
        /// When to make sure that it does not; none: the answer to its write is still to come.
        confirm_at: Option<Moment>,
    },
}

/// The write of a claim that is under way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Writing {
    Allocation,
    /// Without an allocation, which is written later.
    Creation,
    Clearing,
    /// Why it waits.
    Reason(String),
    /// Anything, so that an unanswered write of an older version can no longer be done.
    Confirmation,
}

/// A claim in the API, as far as the cancelling of a plan depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stored {
    /// It does not exist (yet).
    No,
    Open,
    Allocated {
        reserved: bool,
    },
}

/// What an allocation that appears means for the plan of its claim.
#[derive(Debug)]
pub enum Arrival {
    /// Nothing, or not all claims of the unit have theirs.
    Expected,
    /// All claims of the unit have their allocations.
    Complete(Plan),
    /// The claim was allocated on another node than planned: the unit's plan is to be cancelled.
    Elsewhere(UnitKey),
}

/// What a plan leaves behind that was cancelled.
#[derive(Debug)]
pub struct Cancelled {
    pub pods: Vec<PodUid>,
    pub claims: Vec<ClaimKey>,
    /// Claims of these that have nothing of a GPU any more.
    pub freed: Vec<ClaimKey>,
}

/// What follows from a write that failed.
#[derive(Debug, PartialEq, Eq)]
pub enum FailedWrite {
    /// It is tried again, or need not be.
    Wait,
    /// The allocation was not written, and will not be ([`Tracker::confirmed`]).
    NotWritten,
    /// The claim was not created, which is tried again after a rest; no allocation was written.
    NotCreated,
    /// The plan of this unit comes to nothing.
    Cancel(UnitKey),
    /// The same: the API server refuses the claim's allocation.
    Refused(UnitKey),
}

impl Tracker {
    fn record(&mut self, claim: ClaimKey) -> &mut ClaimRecord {
        self.claims.entry(claim).or_default()
    }

    /// Changes a record that there is; one that says nothing any more goes.
    fn update<T>(&mut self, claim: ClaimKey, change: impl FnOnce(&mut ClaimRecord) -> T) -> Option<T> {
        let record = self.claims.get_mut(&claim)?;
        let result = change(record);
        if record.is_empty() {
            self.claims.remove(&claim);
        }
        Some(result)
    }

    fn progress(&self, claim: ClaimKey) -> Option<&PlanProgress> {
        match &self.claims.get(&claim)?.decision {
            ClaimDecision::Planned(progress) => Some(progress),
            _ => None,
        }
    }

    fn progress_mut(&mut self, claim: ClaimKey) -> Option<&mut PlanProgress> {
        match &mut self.claims.get_mut(&claim)?.decision {
            ClaimDecision::Planned(progress) => Some(progress),
            _ => None,
        }
    }

    // Decisions.

    /// Takes over a decision for claims that were open. More pods of a gang join the plan that there is.
    pub fn plan(&mut self, key: UnitKey, plan: Plan, now: Moment) {
        for (claim, planned) in &plan.claims {
            self.record(*claim).decision =
                ClaimDecision::Planned(PlanProgress::new(&key, planned.clone(), now));
        }
        self.units.entry(key).or_insert_with(|| Unit::new(plan.since)).add(plan);
    }

    /// What was decided for a claim whose allocation may still be written.
    pub fn planned(&self, claim: ClaimKey) -> Option<&PlannedClaim> {
        self.progress(claim).map(|progress| &progress.claim)
    }

    /// The claim is planned, or its allocation is unconfirmed.
    pub fn is_decided(&self, claim: ClaimKey) -> bool {
        self.claims.get(&claim).is_some_and(|record| !matches!(record.decision, ClaimDecision::Open))
    }

    /// The unit that the claim is planned with.
    pub fn unit_of(&self, claim: ClaimKey) -> Option<&UnitKey> {
        self.progress(claim).map(|progress| &progress.unit)
    }

    /// The node that a pod is planned for.
    pub fn node_of(&self, key: &UnitKey, pod: &PodUid) -> Option<&NodeName> {
        self.units.get(key)?.pods.get(pod)
    }

    /// Units that are planned with a part of the GPU.
    pub fn units_on(&self, gpu: &GpuRef) -> Vec<UnitKey> {
        let uses = |progress: &PlanProgress| !progress.done && progress.claim.gpus().any(|one| one == *gpu);
        let on = |unit: &Unit| unit.claims.iter().filter_map(|claim| self.progress(*claim)).any(uses);
        self.units.iter().filter(|(_, unit)| on(unit)).map(|(key, _)| key.clone()).collect()
    }

    /// Units with a plan.
    pub fn plans(&self) -> usize {
        self.units.len()
    }

    #[cfg(test)]
    pub fn planned_claims(&self) -> impl Iterator<Item = ClaimKey> {
        self.units.values().flat_map(|unit| unit.claims.iter().copied())
    }

    /// Claims are planned, or being written.
    pub fn is_busy(&self) -> bool {
        !self.units.is_empty() || self.under_way > 0
    }

    /// Gives up the plan of a unit. Allocations of a gang that stand in the API already are to be cleared.
    pub fn cancel(
        &mut self,
        key: &UnitKey,
        stored: impl Fn(ClaimKey) -> Stored,
        now: Moment,
    ) -> Option<Cancelled> {
        let unit = self.units.remove(key)?;
        let claims: Vec<ClaimKey> = unit.claims.into_iter().collect();
        let mut freed = Vec::new();
        for claim in claims.iter().copied() {
            let lost = self.progress(claim).is_some_and(|progress| progress.lost);
            let stored = stored(claim);
            let is_written = self.is_under_way(claim);
            let decision = match stored {
                Stored::No | Stored::Open if is_written || lost => {
                    let confirm_at = (!is_written).then_some(now + unanswered_for(stored));
                    ClaimDecision::Unconfirmed { confirm_at }
                }
                _ => ClaimDecision::Open,
            };
            let (open, is_gang) =
                (matches!(decision, ClaimDecision::Open), matches!(key, UnitKey::Gang { .. }));
            self.update(claim, |record| record.decision = decision);
            match stored {
                Stored::No | Stored::Open if open => freed.push(claim),
                Stored::Allocated { reserved: false } if is_gang => self.clear(claim, now),
                _ => {}
            }
        }
        Some(Cancelled { pods: unit.pods.into_keys().collect(), claims, freed })
    }

    // Changes in the API.

    /// The claim has an allocation. `node`: where; none: usable on several nodes.
    pub fn allocated(
        &mut self,
        claim: ClaimKey,
        node: Option<&NodeName>,
        reserved: bool,
        now: Moment,
    ) -> Arrival {
        if reserved {
            self.update(claim, |record| record.unused = None);
        } else {
            self.record(claim).unused.get_or_insert(Unused::new(now));
        }
        self.confirmed(claim);
        let Some(progress) = self.progress_mut(claim) else { return Arrival::Expected };
        progress.done = true;
        let key = progress.unit.clone();
        if Some(&progress.claim.node) != node {
            return Arrival::Elsewhere(key);
        }
        let is_done = |claim: &ClaimKey| self.progress(*claim).is_some_and(|progress| progress.done);
        match self.units.get(&key).is_some_and(|unit| unit.claims.iter().all(is_done)) {
            true => {
                let Some(plan) = self.take(&key) else { return Arrival::Expected };
                self.waits.push(now.saturating_sub(plan.since));
                Arrival::Complete(plan)
            }
            false => Arrival::Expected,
        }
    }

    /// How long pods have waited for the claims that were allocated since this was last asked for.
    pub fn take_waits(&mut self) -> Vec<Duration> {
        std::mem::take(&mut self.waits)
    }

    /// Ends a plan that is complete.
    fn take(&mut self, key: &UnitKey) -> Option<Plan> {
        let unit = self.units.remove(key)?;
        let mut plan = Plan { pods: unit.pods, claims: BTreeMap::new(), since: unit.since };
        for claim in unit.claims {
            let decision = self.update(claim, |record| std::mem::take(&mut record.decision));
            if let Some(ClaimDecision::Planned(progress)) = decision {
                plan.claims.insert(claim, progress.claim);
            }
        }
        Some(plan)
    }

    /// The claim's allocation was taken away. True if that was our decision.
    pub fn cleared(&mut self, claim: ClaimKey, now: Moment) -> bool {
        let record = self.record(claim);
        record.rests_until = Some(now + REST_AFTER_CLEARING);
        record.unused.take().is_some_and(|unused| unused.clear)
    }

    /// A claim that was planned exists now: what its creation met says nothing of it any more.
    pub fn created(&mut self, claim: ClaimKey) {
        self.update(claim, |record| record.rests_until = None);
    }

    /// The claim is not there any more; its plan was cancelled. `planned`: it never was, and it may be created even
    /// now. True if it has nothing of a GPU any more.
    pub fn gone(&mut self, claim: ClaimKey, planned: bool) -> bool {
        let gone = self.update(claim, |record| {
            (record.unused, record.rests_until, record.reason) = (None, None, None);
            let comes = planned && matches!(record.decision, ClaimDecision::Unconfirmed { .. });
            if !comes {
                record.decision = ClaimDecision::Open;
            }
            !comes
        });
        gone.unwrap_or(true)
    }

    // Writes.

    fn is_under_way(&self, claim: ClaimKey) -> bool {
        self.claims.get(&claim).is_some_and(|record| record.write.is_some())
    }

    /// How many more claims may be written at once.
    fn room(&self) -> usize {
        UNDER_WAY_MAX.saturating_sub(self.under_way)
    }

    /// Another claim may be written beside those that are.
    pub fn has_room(&self) -> bool {
        self.room() > 0
    }

    /// Claims whose allocation can be written now, as many as there is room for. A unit comes together, as soon as all
    /// of its GPUs are held. `at`: how a claim stands that may be written; none: it may not.
    pub fn due<'a>(
        &self,
        is_held: impl Fn(&GpuRef) -> bool,
        at: impl Fn(ClaimKey) -> Option<&'a Presence>,
        now: Moment,
    ) -> Vec<ClaimKey> {
        let room = self.room();
        let mut due = Vec::new();
        for unit in self.units.values() {
            if due.len() >= room {
                break;
            }
            let may = |claim: &ClaimKey| {
                let progress = self.progress(*claim).filter(|progress| !progress.done);
                let Some(progress) = progress.filter(|_| !self.is_under_way(*claim)) else { return false };
                at(*claim).is_some_and(|at| progress.next.may(at, now))
            };
            let open: Vec<ClaimKey> = unit.claims.iter().copied().filter(may).collect();
            let held =
                |progress: &PlanProgress| progress.done || progress.claim.gpus().all(|gpu| is_held(&gpu));
            if !open.is_empty() && unit.claims.iter().filter_map(|claim| self.progress(*claim)).all(held) {
                due.extend(open);
            }
        }
        due.truncate(room);
        due
    }

    /// The claim is tried as it stands: it is not again before the watch brings a newer one, or an answer says so.
    pub fn tries(&mut self, claim: ClaimKey, at: &Presence) {
        if let Some(progress) = self.progress_mut(claim) {
            progress.next = Next::Newer { than: at.resource_version().map(str::to_owned), again: None };
        }
    }

    /// A claim that does not exist may be created now: nothing of it is being written, and it was not refused a moment ago.
    pub fn may_create(&self, claim: ClaimKey, now: Moment) -> bool {
        !self.is_under_way(claim) && !self.rests(claim, now)
    }

    /// A write of the claim begins.
    pub fn begin(&mut self, claim: ClaimKey, write: Writing) {
        if self.record(claim).write.replace(write).is_none() {
            self.under_way += 1;
        }
    }

    /// Ends the claim's write, and returns what it was.
    fn end(&mut self, claim: ClaimKey) -> Option<Writing> {
        let ended = self.update(claim, |record| record.write.take()).flatten()?;
        self.under_way = self.under_way.saturating_sub(1);
        Some(ended)
    }

    /// The claim's write was done.
    pub fn succeeded(&mut self, claim: ClaimKey) {
        self.end(claim);
    }

    /// The claim's write was not done, or nobody knows. `stored`: the claim as it is known now.
    pub fn failed(&mut self, claim: ClaimKey, failure: &Failure, stored: Stored, now: Moment) -> FailedWrite {
        match self.end(claim) {
            Some(Writing::Allocation) => return self.not_allocated(claim, failure, stored, now),
            Some(Writing::Creation) => {
                // If it was created all the same, the watch tells, and ends the rest.
                let rest = if matches!(failure, Failure::Refused(_)) { AFTER_REFUSAL } else { RETRY_AFTER };
                self.record(claim).rests_until = Some(now + rest);
                let Some(progress) = self.progress_mut(claim) else { return FailedWrite::NotCreated };
                if matches!(failure, Failure::Refused(_)) {
                    return FailedWrite::Refused(progress.unit.clone());
                }
                progress.next = Next::From(now + rest);
            }
            Some(Writing::Clearing) => {
                // If it still is to go, the next review says so again.
                self.keep(claim);
                self.confirm_at(claim, now);
            }
            Some(Writing::Reason(text)) => {
                if !matches!(failure, Failure::Gone | Failure::Refused(_)) {
                    self.record(claim).reason.get_or_insert(text);
                    self.reasons_after = Some(now + RETRY_AFTER);
                }
                self.confirm_at(claim, now + RETRY_AFTER);
            }
            Some(Writing::Confirmation) => self.confirm_at(claim, now + RETRY_AFTER),
            None => {}
        }
        FailedWrite::Wait
    }

    fn not_allocated(
        &mut self,
        claim: ClaimKey,
        failure: &Failure,
        stored: Stored,
        now: Moment,
    ) -> FailedWrite {
        let Some(progress) = self.progress_mut(claim) else {
            if !matches!(failure, Failure::Silent(_)) {
                return FailedWrite::NotWritten;
            }
            let confirm_at = Some(now + unanswered_for(stored));
            self.record(claim).decision = ClaimDecision::Unconfirmed { confirm_at };
            return FailedWrite::Wait;
        };
        let unit = progress.unit.clone();
        match failure {
            // Its next version is on its way, and tried as soon as it is known. None need come where somebody else's
            // admission answered.
            Failure::Conflict if stored != Stored::No => {
                if let Next::Newer { again, .. } = &mut progress.next {
                    *again = Some(now + RETRY_AFTER);
                }
            }
            // Nothing was done, so that no next version need come. Of one that is only planned there is none: its name is
            // taken, which the watch will tell, or its namespace's quota was being counted.
            Failure::Conflict | Failure::NotLeading | Failure::Busy(_) => {
                progress.next = Next::From(now + RETRY_AFTER);
            }
            Failure::Silent(_) => {
                (progress.next, progress.lost) = (Next::From(now + RETRY_AFTER), true);
            }
            Failure::Gone => return FailedWrite::Cancel(unit),
            Failure::Refused(_) => {
                self.record(claim).rests_until = Some(now + AFTER_REFUSAL);
                return FailedWrite::Refused(unit);
            }
        }
        FailedWrite::Wait
    }

    // Unconfirmed allocations.

    /// When to make sure of an allocation that is unconfirmed.
    pub fn confirm_at(&mut self, claim: ClaimKey, at: Moment) {
        self.update(claim, |record| {
            if let ClaimDecision::Unconfirmed { confirm_at } = &mut record.decision {
                *confirm_at = Some(at);
            }
        });
    }

    /// Whether the allocation stands in the API is known now. True if it was not.
    pub fn confirmed(&mut self, claim: ClaimKey) -> bool {
        let confirmed = self.update(claim, |record| {
            let unconfirmed = matches!(record.decision, ClaimDecision::Unconfirmed { .. });
            if unconfirmed {
                record.decision = ClaimDecision::Open;
            }
            unconfirmed
        });
        confirmed.unwrap_or(false)
    }

    /// Claims whose allocation it is time to make sure of.
    pub fn to_confirm(&self, now: Moment) -> Vec<ClaimKey> {
        let due = |record: &ClaimRecord| match record.decision {
            ClaimDecision::Unconfirmed { confirm_at } => confirm_at.is_some_and(|at| at <= now),
            _ => false,
        };
        self.free(due).collect()
    }

    /// Claims without a write under way of which this is true.
    fn free(&self, is: impl Fn(&ClaimRecord) -> bool) -> impl Iterator<Item = ClaimKey> {
        let free = self.claims.iter().filter(move |(_, record)| record.write.is_none() && is(record));
        free.map(|(claim, _)| *claim)
    }

    // Reasons.

    /// Why the claim waits is to be written on it.
    pub fn wait_reason(&mut self, claim: ClaimKey, text: String) {
        self.record(claim).reason = Some(text);
    }

    /// Reasons to be written now, a few at a time: claims that can be placed go first.
    pub fn take_reasons(&mut self, now: Moment) -> Vec<(ClaimKey, String)> {
        if self.reasons_after.is_some_and(|after| now < after) {
            return Vec::new();
        }
        let room = REASONS_UNDER_WAY_MAX.saturating_sub(self.under_way);
        let due: Vec<ClaimKey> = self.free(|record| record.reason.is_some()).take(room).collect();
        let take = |claim: ClaimKey| {
            let reason = self.update(claim, |record| record.reason.take()).flatten()?;
            Some((claim, reason))
        };
        due.into_iter().filter_map(take).collect()
    }

    // Time.

    /// The claim was cleared or refused a moment ago, and is not decided now.
    pub fn rests(&self, claim: ClaimKey, now: Moment) -> bool {
        self.claims.get(&claim).and_then(|record| record.rests_until).is_some_and(|until| now < until)
    }

    /// Forgets rests that are over.
    pub fn wake(&mut self, now: Moment) {
        self.claims.retain(|_, record| {
            record.rests_until = record.rests_until.filter(|until| *until > now);
            !record.is_empty()
        });
    }

    /// When time alone brings something, after `now`.
    pub fn next(&self, rules: &Rules, now: Moment) -> Option<Moment> {
        let of = |record: &ClaimRecord| {
            let decision = match &record.decision {
                ClaimDecision::Open => None,
                ClaimDecision::Planned(progress) => progress.next.due(),
                ClaimDecision::Unconfirmed { confirm_at } => *confirm_at,
            };
            let unused = record.unused.as_ref().and_then(|unused| unused.due(rules));
            let reason = self.reasons_after.filter(|_| record.reason.is_some());
            let review = self.review_at.filter(|_| record.unused.is_some());
            [decision, record.rests_until, unused, reason, review]
        };
        self.claims.values().flat_map(of).flatten().filter(|due| *due > now).min()
    }
}

/// How long to wait before making sure of an unanswered write: not at all if the claim exists.
fn unanswered_for(stored: Stored) -> Duration {
    if stored == Stored::No { CREATION_SHOWS_WITHIN } else { Duration::ZERO }
}
