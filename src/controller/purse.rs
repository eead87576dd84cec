//! What a round may spend, and who may spend it: each namespace the same. Who spends more than that, since what was
//! begun went on, owes it ([`debts`]). A decision that does not come to its end with what it was given goes on in a later
//! round ([`trials`]), and may need more than its namespace's part ([`overdraft`]).

mod debts;
mod overdraft;
mod trials;

use std::collections::{BTreeMap, BTreeSet};

pub use trials::{EachPod, TrialKey, TrialStep};

use self::debts::Debts;
use self::overdraft::Overdraft;
use self::trials::Trials;
use crate::controller::Moment;
use crate::model::claim::ClaimKey;
use crate::select::TICKS_PER_UNIT;

/// Of a round, in ticks. One evaluation of a selector, or one decision, may come on top.
const ROUND: u64 = 10_000_000 * TICKS_PER_UNIT;
/// For what is no namespace's: GPUs that are held or given back.
pub const BESIDE: u64 = ROUND / 4;

/// By namespace, in ticks.
#[derive(Debug)]
pub struct Purse {
    /// What a round may spend.
    round: u64,
    left: u64,
    /// Of this round, for each namespace.
    slice: u64,
    /// Among these the round is divided: each has its part, whatever others have spent.
    due: BTreeSet<String>,
    spent: BTreeMap<String, u64>,
    debts: Debts,
    /// Namespaces that were not done with when the last round ended: they go on where they stopped.
    going_on: BTreeSet<String>,
    /// Claims that cannot be placed with these classes, and why. What a claim asks for never changes.
    dear: BTreeMap<ClaimKey, String>,
    trials: Trials,
    overdraft: Overdraft,
}

impl Default for Purse {
    fn default() -> Self {
        Self {
            round: ROUND,
            left: 0,
            slice: 0,
            due: BTreeSet::new(),
            spent: BTreeMap::new(),
            debts: Debts::default(),
            going_on: BTreeSet::new(),
            dear: BTreeMap::new(),
            trials: Trials::up_to(ROUND),
            overdraft: Overdraft::default(),
        }
    }
}

impl Purse {
    /// A round may spend so much, and who owes as much has paid it once a round is over, however long that takes.
    #[cfg(test)]
    pub fn bound(&mut self, ticks: u64) {
        self.round = ticks;
        self.debts = Debts::paid_by_rounds();
        self.trials = Trials::up_to(ticks);
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

    /// Where units were stopped.
    pub fn trials(&mut self) -> &mut Trials {
        &mut self.trials
    }

    /// A round begins. `due`: namespaces of what waits to be tried; `left_over`: of what the last round did not come to.
    pub fn open(&mut self, due: BTreeSet<String>, left_over: BTreeSet<String>, now: Moment) {
        self.debts.settle(&self.spent, self.slice, now);
        self.spent.clear();
        self.left = self.round;
        let count = (due.len() as u64).max(1);
        self.slice = self.round / count;
        self.debts.open(count, now);
        self.overdraft.open(&due);
        (self.due, self.going_on) = (due, left_over);
    }

    /// What the namespace may spend now; none: nothing.
    pub fn allowance(&self, namespace: &str) -> Option<u64> {
        let spent = self.spent.get(namespace).copied().unwrap_or(0);
        let rest = self.slice.saturating_sub(spent).saturating_sub(self.debts.of(namespace));
        let rest = if self.due.contains(namespace) { rest } else { rest.min(self.left) };
        Some(rest).filter(|rest| *rest > 0)
    }

    /// When the namespace may spend something again. None: in the next round, whenever that is.
    pub fn owes_until(&self, namespace: &str) -> Option<Moment> {
        let spent = self.spent.get(namespace).copied().unwrap_or(0);
        self.debts.until(namespace, spent, self.slice)
    }

    /// The trial goes on now, and its namespace may spend so much: what the trial may spend. If it stopped at a step that
    /// takes more than it had, it is more; none where the round has nothing left for that, and others come first.
    pub fn grant(&mut self, trial: &TrialKey, namespace: &str, ticks: u64) -> Option<u64> {
        let needs = self.trials.needs(trial);
        let is_more = needs > ticks;
        if is_more && !self.overdraft.grants(namespace, needs, self.left) {
            return None;
        }
        let granted = needs.max(ticks);
        self.trials.grant(granted);
        Some(granted)
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
    use std::time::Duration;

    use super::*;
    use crate::model::names::PodUid;

    const SECOND: Duration = Duration::from_secs(1);

    fn names(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    fn open(purse: &mut Purse, namespaces: &[&str], now: Moment) {
        purse.open(names(namespaces), names(&[]), now);
    }

    fn turn(name: &str) -> crate::controller::queue::Turn {
        use crate::controller::queue::{Together, Turn, UnitKey};
        let uid = PodUid::new(name);
        Turn {
            key: UnitKey::Pod(uid.clone()),
            priority: 0,
            pods: vec![uid],
            tried: None,
            looked_at: false,
            left_over: false,
            since: SECOND,
            starving: false,
            together: Together::All,
            bounded: false,
        }
    }

    #[test]
    fn who_spends_more_than_its_part_goes_without_until_others_have_had_as_much() {
        let mut purse = Purse::default();
        purse.bound(ROUND);
        open(&mut purse, &["a", "b"], SECOND);
        assert_eq!(purse.allowance("a"), Some(ROUND / 2));
        purse.pay("a", ROUND);
        assert_eq!((purse.allowance("a"), purse.allowance("b")), (None, Some(ROUND / 2)));
        assert_eq!(purse.allowance("c"), None, "the round is spent, and it is none of those that it is for");
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

    /// Each of these owes once it has had its turn, and has paid before the victim is asked for.
    #[test]
    fn who_owes_nothing_has_its_part_whatever_others_have_spent() {
        let mut purse = Purse::default();
        let debtors: Vec<String> = (0..9).map(|nth| format!("evil-{nth}")).collect();
        let due: BTreeSet<String> = debtors.iter().cloned().chain(["victim".to_owned()]).collect();
        for round in 0..20 {
            purse.open(due.clone(), names(&[]), Duration::from_millis(1250 * (round + 1)));
            for debtor in &debtors {
                if purse.allowance(debtor).is_some() {
                    purse.pay(debtor, ROUND);
                }
            }
            assert_eq!(purse.allowance("victim"), Some(ROUND / 10), "in round {round}");
        }
    }

    /// Others with older trials, which came first in each round, had all of it where rounds take longer than they should.
    #[test]
    fn a_trial_that_needs_more_than_its_part_is_not_kept_out_by_older_ones_of_others() {
        let mut purse = Purse::default();
        let evil: Vec<String> = (0..4).map(|nth| format!("evil-{nth}")).collect();
        let due: BTreeSet<String> = evil.iter().cloned().chain(["victim".to_owned()]).collect();
        let slice = ROUND / 5;
        let trial = |namespace: &str| TrialKey::from(&turn(namespace));
        let mut had = BTreeMap::<String, u32>::new();
        for round in 0..20 {
            purse.open(due.clone(), names(&[]), 3 * SECOND * (round + 1));
            for namespace in evil.iter().map(String::as_str).chain(["victim"]) {
                let Some(ticks) = purse.allowance(namespace) else { continue };
                let Some(granted) = purse.grant(&trial(namespace), namespace, ticks) else { continue };
                purse.pay(namespace, granted);
                // It comes no further, and needs twice as much.
                let (step, _) = purse.trials().resume(&trial(namespace));
                purse.trials().stop(trial(namespace), step, true, 1);
                *had.entry(namespace.to_owned()).or_default() += u32::from(granted > slice);
            }
        }
        assert!(had.get("victim").is_some_and(|times| *times >= 2), "{had:?}");
    }

    /// More than a part of a round is given to one trial after another, and only while something is left.
    #[test]
    fn what_a_trial_needs_beyond_its_part_is_given_once_in_a_round() {
        let mut purse = Purse::default();
        let trial = |name: &str| TrialKey::from(&turn(name));
        open(&mut purse, &["a", "b"], SECOND);
        for name in ["a", "b"] {
            purse.grant(&trial(name), name, ROUND / 2);
            purse.trials().stop(trial(name), TrialStep::All(0), true, 1);
        }
        assert_eq!(purse.grant(&trial("a"), "a", ROUND / 2), Some(ROUND));
        purse.pay("a", ROUND);
        assert_eq!(purse.grant(&trial("b"), "b", ROUND / 2), None);
        assert_eq!(purse.grant(&trial("c"), "c", ROUND / 2), Some(ROUND / 2), "it needs no more");
    }

    #[test]
    fn short_rounds_pay_for_the_time_that_they_take() {
        let mut purse = Purse::default();
        open(&mut purse, &["a"], SECOND);
        purse.pay("a", ROUND + 100_000);
        // Half a millisecond each.
        for nth in 1..=8 {
            open(&mut purse, &["a"], SECOND + Duration::from_secs(1) + Duration::from_micros(500 * nth));
        }
        assert_eq!(purse.allowance("a"), Some(ROUND));
    }
}
