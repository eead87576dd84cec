//! What a round may spend, and who may spend it: each namespace the same. Who spends more than that, since what was
//! begun goes to its end, goes without until the others have had as much.

use std::collections::{BTreeMap, BTreeSet};

use crate::controller::queue::UnitKey;
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
    spent: BTreeMap<String, u64>,
    /// Spent beyond the slices of earlier rounds.
    debts: BTreeMap<String, u64>,
    /// Namespaces that were not done with when the last round ended: they go on where they stopped.
    going_on: BTreeSet<String>,
    /// Claims whose selectors cannot be used, and why. What a claim asks for never changes.
    dear: BTreeMap<ClaimKey, String>,
    /// Units of which not all ways were tried, with the way that is next.
    stopped: BTreeMap<UnitKey, usize>,
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
        }
    }
}

impl Purse {
    #[cfg(test)]
    pub fn bound(&mut self, ticks: u64) {
        self.round = ticks;
    }

    #[cfg(test)]
    pub fn dear_claims(&self) -> usize {
        self.dear.len()
    }

    /// A round begins. `namespaces`: of what waits to be tried; `left_over`: of what the last round did not come to.
    pub fn open(&mut self, namespaces: &BTreeSet<String>, left_over: BTreeSet<String>) {
        for (namespace, spent) in std::mem::take(&mut self.spent) {
            let debt = self.debts.entry(namespace).or_default();
            *debt = debt.saturating_add(spent);
        }
        for debt in self.debts.values_mut() {
            *debt = debt.saturating_sub(self.slice);
        }
        self.debts.retain(|_, debt| *debt > 0);
        self.left = self.round;
        self.slice = self.round / (namespaces.len() as u64).max(1);
        self.going_on = left_over;
    }

    /// What the namespace may spend now; none: nothing.
    pub fn allowance(&self, namespace: &str) -> Option<u64> {
        let of = |all: &BTreeMap<String, u64>| all.get(namespace).copied().unwrap_or(0);
        let rest = self.slice.saturating_sub(of(&self.spent)).saturating_sub(of(&self.debts));
        Some(rest.min(self.left)).filter(|rest| *rest > 0)
    }

    /// The unit is tried from this way on when it is tried again.
    pub fn stop(&mut self, unit: &UnitKey, way: usize) {
        self.stopped.insert(unit.clone(), way);
    }

    /// The way at which the unit goes on.
    pub fn resume(&mut self, unit: &UnitKey) -> usize {
        self.stopped.remove(unit).unwrap_or(0)
    }

    /// Forgets units that do not wait any more.
    pub fn tidy(&mut self, waits: impl Fn(&UnitKey) -> bool) {
        self.stopped.retain(|unit, _| waits(unit));
    }

    /// It was not done with when the last round ended.
    pub fn goes_on(&self, namespace: &str) -> bool {
        self.going_on.contains(namespace)
    }

    /// Why the claim's selectors cannot be used, as far as that was found out.
    pub fn dear(&self, claim: ClaimKey) -> Option<&str> {
        self.dear.get(&claim).map(String::as_str)
    }

    /// The claim's selectors cannot be used.
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

    fn names(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn who_spends_more_than_its_part_goes_without_until_others_have_had_as_much() {
        let mut purse = Purse::default();
        purse.open(&names(&["a", "b"]), names(&[]));
        assert_eq!(purse.allowance("a"), Some(ROUND / 2));
        purse.pay("a", ROUND);
        assert_eq!((purse.allowance("a"), purse.allowance("b")), (None, None), "the round is spent");
        purse.open(&names(&["a", "b"]), names(&[]));
        assert_eq!((purse.allowance("a"), purse.allowance("b")), (None, Some(ROUND / 2)));
        purse.pay("b", ROUND / 4);
        assert_eq!(purse.allowance("b"), Some(ROUND / 4));
        purse.open(&names(&["a"]), names(&[]));
        assert_eq!(purse.allowance("a"), Some(ROUND), "its debt is paid, and nobody else waits");
        purse.pay("a", 3 * ROUND);
        for _ in 0..2 {
            purse.open(&names(&["a"]), names(&[]));
            assert_eq!(purse.allowance("a"), None);
        }
        purse.open(&names(&["a"]), names(&[]));
        assert_eq!((purse.allowance("a"), purse.debts.len()), (Some(ROUND), 0));
    }
}
