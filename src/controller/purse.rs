//! What a round may spend, and who may spend it: each namespace the same. Who spends more than that, since what was
//! begun goes to its end, goes without until the others have had as much.

use std::collections::{BTreeMap, BTreeSet};

use super::core::Core;
use super::queue::{Turn, UnitKey};
use super::round::{Part, Refused};
use super::say::Reason;
use crate::allocate::Studied;
use crate::model::names::ClaimUid;
use crate::select::TICKS_PER_UNIT;

/// Of a round, in ticks. One evaluation of a selector, or one decision, may come on top.
const ROUND: u64 = 10_000_000 * TICKS_PER_UNIT;
/// For what is no namespace's: GPUs that are held or given back.
const BESIDE: u64 = ROUND / 4;

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
    pub(super) dear: BTreeMap<ClaimUid, String>,
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
        }
    }
}

impl Purse {
    #[cfg(test)]
    pub fn bound(&mut self, ticks: u64) {
        self.round = ticks;
    }

    /// A round begins. `namespaces`: of what waits to be tried; `left_over`: of what the last round did not come to.
    fn open(&mut self, namespaces: &BTreeSet<String>, left_over: BTreeSet<String>) {
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
    fn allowance(&self, namespace: &str) -> Option<u64> {
        let of = |all: &BTreeMap<String, u64>| all.get(namespace).copied().unwrap_or(0);
        let rest = self.slice.saturating_sub(of(&self.spent)).saturating_sub(of(&self.debts));
        Some(rest.min(self.left)).filter(|rest| *rest > 0)
    }

    fn pay(&mut self, namespace: &str, ticks: u64) {
        self.left = self.left.saturating_sub(ticks);
        let spent = self.spent.entry(namespace.to_owned()).or_default();
        *spent = spent.saturating_add(ticks);
    }
}

impl Core {
    /// Before the first unit of a round is tried.
    pub(super) fn open_purse(&mut self, turns: &[Turn]) {
        let epoch = self.stock.epoch();
        let due = turns.iter().filter(|turn| turn.tried != Some(epoch));
        let namespaces = due.map(|turn| self.namespace_of(turn)).collect();
        let left_over =
            turns.iter().filter(|turn| turn.left_over).map(|turn| self.namespace_of(turn)).collect();
        self.purse.open(&namespaces, left_over);
        self.queue.nothing_left();
    }

    /// False if the unit is not to be tried in this round: its namespace has spent what it may, or others of it come
    /// first.
    pub(super) fn may_try(&mut self, turn: &Turn) -> bool {
        let namespace = self.namespace_of(turn);
        let is_last = self.purse.going_on.contains(&namespace) && turn.looked_at && !turn.left_over;
        match self.purse.allowance(&namespace).filter(|_| !is_last) {
            Some(ticks) => {
                self.queue.looked_at(&turn.key);
                self.stock.index.allow(ticks);
                true
            }
            None => {
                // Those that wait for others of their namespace are due once nothing is left over.
                self.queue.leave(&turn.key, !is_last);
                false
            }
        }
    }

    /// After it was tried.
    pub(super) fn pay(&mut self, turn: &Turn) {
        let (spent, _) = self.stock.index.spent();
        let namespace = self.namespace_of(turn);
        self.purse.pay(&namespace, spent);
    }

    /// After the last unit of a round: the rest is for what else looks at selectors.
    pub(super) fn close_purse(&mut self) {
        self.stock.index.allow(BESIDE);
    }

    fn namespace_of(&self, turn: &Turn) -> String {
        match &turn.key {
            UnitKey::Gang { namespace, .. } => namespace.clone(),
            UnitKey::Pod(uid) => {
                self.world.pods.get(uid).map(|pod| pod.at.namespace.clone()).unwrap_or_default()
            }
        }
    }

    /// Finds out what the selectors of a part choose. False: not all in this round.
    ///
    /// # Errors
    /// They cannot be used. That is remembered of the claims, and they are not tried again.
    pub(super) fn study(&mut self, part: &Part) -> Result<bool, Refused> {
        for (shape, requests) in part.shapes() {
            match self.stock.index.study(shape) {
                Studied::Done => {}
                Studied::NotYet => return Ok(false),
                Studied::Refused { want, words } => {
                    let request = want.and_then(|want| requests.get(want));
                    let words = match request {
                        Some((_, request)) => format!("request {request}: {words}"),
                        None => words,
                    };
                    // Of several claims together each may be good with others.
                    let alone = part.claims().len() == 1;
                    let meant = |claim: &&ClaimUid| request.map_or(alone, |(of, _)| of == claim);
                    for claim in part.claims().iter().filter(meant) {
                        self.purse.dear.insert(claim.clone(), words.clone());
                    }
                    return Err(part.refused(Reason::Claim, words));
                }
            }
        }
        Ok(true)
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
