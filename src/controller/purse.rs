//! What a round may spend, and who may spend it: each namespace the same. Who spends more than that, since what was
//! begun went on, owes it, and goes without for as long as it took.
//!
//! A decision that does not come to its end with what it was given stops. The next time it is given twice as much, up
//! to a whole round's; one that needs more than that is refused.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::controller::Moment;
use crate::controller::queue::UnitKey;
use crate::controller::recorder::Reason;
use crate::model::claim::ClaimKey;
use crate::model::names::PodUid;
use crate::select::TICKS_PER_UNIT;

/// Of a round, in ticks. One evaluation of a selector, or one decision, may come on top.
const ROUND: u64 = 10_000_000 * TICKS_PER_UNIT;
/// For what is no namespace's: GPUs that are held or given back.
pub const BESIDE: u64 = ROUND / 4;
/// What a thread does in a millisecond, about, in ticks.
const MILLISECOND: u64 = 100_000;

/// How far the trial of a unit has come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// All of its pods together, in this of their ways.
    All(usize),
    /// That was in vain: which of the pods fit somewhere by themselves.
    Each(EachPod),
    /// As few of these as start together, in this of their ways.
    Fewest(BTreeSet<PodUid>, usize),
}

/// Pods that are tried by themselves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EachPod {
    pub tried: BTreeSet<PodUid>,
    pub fitting: BTreeSet<PodUid>,
    /// Why all of them together are not placed: of which pod, and in words.
    pub refused: (PodUid, Reason, String),
}

/// Where a unit goes on.
#[derive(Debug)]
struct Stopped {
    step: Step,
    /// It needs at least so much to come further, in ticks.
    needs: u64,
}

/// When the last round began, and what is worked off since, in ticks.
#[derive(Debug)]
struct Clock {
    per_millisecond: u64,
    opened: Option<Moment>,
    /// Namespaces among which the time is divided.
    shared_by: u64,
}

impl Clock {
    /// What a namespace has paid since that has spent so much: its part of the time in which it did nothing.
    fn paid(&self, slice: u64, spent: u64, now: Moment) -> u64 {
        if self.per_millisecond == u64::MAX {
            return slice.saturating_sub(spent);
        }
        let passed = self.opened.map_or(Duration::ZERO, |opened| now.saturating_sub(opened));
        let done = self.per_millisecond.saturating_mul(u64::try_from(passed.as_millis()).unwrap_or(u64::MAX));
        done.saturating_sub(spent) / self.shared_by
    }

    /// When a thread has done so much since.
    fn when(&self, ticks: u64) -> Option<Moment> {
        let milliseconds = (self.per_millisecond < u64::MAX).then(|| ticks.div_ceil(self.per_millisecond))?;
        Some(self.opened? + Duration::from_millis(milliseconds))
    }
}

/// By namespace, in ticks.
#[derive(Debug)]
pub struct Purse {
    /// What a round may spend.
    round: u64,
    left: u64,
    /// Of this round, for each namespace.
    slice: u64,
    spent: BTreeMap<String, u64>,
    /// Spent beyond the slices of earlier rounds.
    debts: BTreeMap<String, u64>,
    /// Namespaces that were not done with when the last round ended: they go on where they stopped.
    going_on: BTreeSet<String>,
    /// Claims that cannot be placed with these classes, and why. What a claim asks for never changes.
    dear: BTreeMap<ClaimKey, String>,
    /// Units that were not tried to the end.
    stopped: BTreeMap<UnitKey, Stopped>,
    /// The unit that is tried may spend so much.
    granted: u64,
    clock: Clock,
}

impl Default for Purse {
    fn default() -> Self {
        Self {
            round: ROUND,
            left: 0,
            slice: 0,
            spent: BTreeMap::new(),
            debts: BTreeMap::new(),
            going_on: BTreeSet::new(),
            dear: BTreeMap::new(),
            stopped: BTreeMap::new(),
            granted: 0,
            clock: Clock { per_millisecond: MILLISECOND, opened: None, shared_by: 1 },
        }
    }
}

impl Purse {
    /// A round may spend so much, and who owes as much has paid it once a round is over, however long that takes.
    #[cfg(test)]
    pub fn bound(&mut self, ticks: u64) {
        (self.round, self.clock.per_millisecond) = (ticks, u64::MAX);
    }

    /// In this round.
    #[cfg(test)]
    pub fn spent_by(&self, namespace: &str) -> u64 {
        self.spent.get(namespace).copied().unwrap_or(0)
    }

    #[cfg(test)]
    pub fn dear_claims(&self) -> usize {
        self.dear.len()
    }

    /// A round begins. `namespaces`: of what waits to be tried; `left_over`: of what the last round did not come to.
    pub fn open(&mut self, namespaces: &BTreeSet<String>, left_over: BTreeSet<String>, now: Moment) {
        for (namespace, spent) in &self.spent {
            let over = spent.saturating_sub(self.slice);
            if over > 0 {
                let debt = self.debts.entry(namespace.clone()).or_default();
                *debt = debt.saturating_add(over);
            }
        }
        for (namespace, debt) in &mut self.debts {
            // What it worked itself pays for nothing.
            let spent = self.spent.get(namespace).copied().unwrap_or(0);
            *debt = debt.saturating_sub(self.clock.paid(self.slice, spent, now));
        }
        self.spent.clear();
        self.debts.retain(|_, debt| *debt > 0);
        self.left = self.round;
        let count = (namespaces.len() as u64).max(1);
        self.slice = self.round / count;
        (self.clock.opened, self.clock.shared_by) = (Some(now), count);
        self.going_on = left_over;
    }

    /// What the namespace may spend now; none: nothing.
    pub fn allowance(&self, namespace: &str) -> Option<u64> {
        let of = |all: &BTreeMap<String, u64>| all.get(namespace).copied().unwrap_or(0);
        let rest = self.slice.saturating_sub(of(&self.spent)).saturating_sub(of(&self.debts));
        Some(rest.min(self.left)).filter(|rest| *rest > 0)
    }

    /// When the namespace may spend something again. None: in the next round, whenever that is.
    pub fn owes_until(&self, namespace: &str) -> Option<Moment> {
        let spent = self.spent.get(namespace).copied().unwrap_or(0);
        let debt = self.debts.get(namespace).copied().unwrap_or(0);
        let rest = debt.saturating_add(spent.saturating_sub(self.slice)).checked_sub(self.slice)?;
        self.clock.when(rest.saturating_add(1).saturating_mul(self.clock.shared_by).saturating_add(spent))
    }

    /// The unit is tried now, and its namespace may spend so much: what the unit may spend. If it stopped at a step that
    /// takes more than it had, it is more.
    pub fn grant(&mut self, unit: &UnitKey, ticks: u64) -> u64 {
        self.granted = ticks.max(self.stopped.get(unit).map_or(0, |stopped| stopped.needs));
        self.granted
    }

    /// The unit goes on with this step when it is tried again. `again`: it began with it, and did not come further.
    pub fn stop(&mut self, unit: &UnitKey, step: Step, again: bool) {
        let needs = if again { self.granted.saturating_mul(2).min(self.round) } else { 0 };
        self.stopped.insert(unit.clone(), Stopped { step, needs });
    }

    /// Before any step: there was not enough to read all that the unit asks for. False: nor will there ever be.
    pub fn stop_reading(&mut self, unit: &UnitKey) -> bool {
        let stopped = self.stopped.entry(unit.clone()).or_insert(Stopped { step: Step::All(0), needs: 0 });
        if self.granted >= self.round && stopped.needs >= self.round {
            self.stopped.remove(unit);
            return false;
        }
        stopped.needs = self.granted.saturating_mul(2).min(self.round);
        true
    }

    /// The step at which the unit goes on. True: it had all that a unit may ever have, and more than it had when it
    /// stopped at that step.
    pub fn resume(&mut self, unit: &UnitKey) -> (Step, bool) {
        match self.stopped.remove(unit) {
            Some(Stopped { step, needs }) => (step, needs > 0 && self.granted >= self.round),
            None => (Step::All(0), false),
        }
    }

    /// Forgets units that do not wait any more.
    pub fn tidy(&mut self, waits: impl Fn(&UnitKey) -> bool) {
        self.stopped.retain(|unit, _| waits(unit));
    }

    /// It was not done with when the last round ended.
    pub fn goes_on(&self, namespace: &str) -> bool {
        self.going_on.contains(namespace)
    }

    /// Why the claim cannot be placed, as far as that was found out.
    pub fn dear(&self, claim: ClaimKey) -> Option<&str> {
        self.dear.get(&claim).map(String::as_str)
    }

    /// The claim cannot be placed with these classes.
    pub fn set_dear(&mut self, claim: ClaimKey, words: String) {
        self.dear.insert(claim, words);
    }

    /// The claim is gone.
    pub fn forget(&mut self, claim: ClaimKey) {
        self.dear.remove(&claim);
    }

    /// What selectors choose may have changed.
    pub fn forget_all(&mut self) {
        self.dear.clear();
    }

    pub fn pay(&mut self, namespace: &str, ticks: u64) {
        self.left = self.left.saturating_sub(ticks);
        let spent = self.spent.entry(namespace.to_owned()).or_default();
        *spent = spent.saturating_add(ticks);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn names(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    fn open(purse: &mut Purse, namespaces: &[&str], now: Moment) {
        purse.open(&names(namespaces), names(&[]), now);
    }

    #[test]
    fn who_spends_more_than_its_part_goes_without_until_others_have_had_as_much() {
        let mut purse = Purse::default();
        purse.bound(ROUND);
        open(&mut purse, &["a", "b"], SECOND);
        assert_eq!(purse.allowance("a"), Some(ROUND / 2));
        purse.pay("a", ROUND);
        assert_eq!((purse.allowance("a"), purse.allowance("b")), (None, None), "the round is spent");
        open(&mut purse, &["a", "b"], SECOND);
        assert_eq!((purse.allowance("a"), purse.allowance("b")), (None, Some(ROUND / 2)));
        purse.pay("b", ROUND / 4);
        assert_eq!(purse.allowance("b"), Some(ROUND / 4));
        open(&mut purse, &["a"], SECOND);
        assert_eq!(purse.allowance("a"), Some(ROUND), "its debt is paid, and nobody else waits");
        purse.pay("a", 3 * ROUND);
        for _ in 0..2 {
            open(&mut purse, &["a"], SECOND);
            assert_eq!(purse.allowance("a"), None);
        }
        open(&mut purse, &["a"], SECOND);
        assert_eq!((purse.allowance("a"), purse.debts.len()), (Some(ROUND), 0));
    }

    /// Rounds in which little is done are over at once.
    #[test]
    fn who_has_taken_ten_seconds_goes_without_for_ten_seconds() {
        let mut purse = Purse::default();
        open(&mut purse, &["a"], SECOND);
        purse.pay("a", 11 * ROUND);
        let mut now = 12 * SECOND;
        let mut rounds = 0;
        loop {
            open(&mut purse, &["a"], now);
            if purse.allowance("a").is_some() {
                break;
            }
            rounds += 1;
            now += Duration::from_millis(50);
        }
        assert!((180..=200).contains(&rounds), "{rounds} of 50 ms each");
        // Whoever waits for that need not look before.
        let mut purse = Purse::default();
        open(&mut purse, &["a"], SECOND);
        assert_eq!(purse.owes_until("a"), None);
        purse.pay("a", 11 * ROUND);
        let until = purse.owes_until("a").unwrap();
        open(&mut purse, &["a"], until - Duration::from_millis(2));
        assert_eq!(purse.allowance("a"), None);
        open(&mut purse, &["a"], until);
        assert!(purse.allowance("a").is_some());
        assert!((20 * SECOND..21 * SECOND).contains(&(until - SECOND)), "{until:?}");
    }

    #[test]
    fn what_is_not_done_with_what_it_had_is_given_twice_as_much_the_next_time() {
        let mut purse = Purse::default();
        let unit = UnitKey::Pod(PodUid::new("p"));
        let mut given = Vec::new();
        loop {
            given.push(purse.grant(&unit, 1000));
            let (step, had_all) = purse.resume(&unit);
            assert_eq!(step, Step::All(0));
            if had_all {
                break;
            }
            purse.stop(&unit, step, true);
        }
        assert_eq!(given[..4], [1000, 2000, 4000, 8000]);
        assert_eq!(given.last(), Some(&ROUND));
        purse.stop(&unit, Step::All(1), false);
        assert_eq!(purse.grant(&unit, 1000), 1000, "it has come further");
    }
}
