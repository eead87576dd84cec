//! How much of the processor the selectors of claims may take: for each namespace, for each address that calls, and in
//! all. A budget grows with time, up to what one burst may take. Knows no clock: the time is an argument.

use std::collections::HashMap;
use std::hash::Hash;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use crate::admission::REVIEW_UNITS_MAX;

/// Units at once, and units in a second. An optimised build evaluates some ten million units in a second.
#[derive(Debug, Clone, Copy)]
struct Rate {
    burst: u64,
    per_second: u64,
}

/// One claim whose selector is dearer than any may be; afterwards some hundred ordinary claims in a second.
const OF_NAMESPACE: Rate = Rate { burst: REVIEW_UNITS_MAX, per_second: 200_000 };
/// An API server speaks for many namespaces.
const OF_PEER: Rate = Rate { burst: 2 * REVIEW_UNITS_MAX, per_second: 500_000 };
const OF_ALL: Rate = Rate { burst: 3 * REVIEW_UNITS_MAX, per_second: 1_000_000 };
/// Namespaces and addresses that are remembered. Whoever calls may name any: what is forgotten begins anew, and is held
/// by the next wider budget.
const REMEMBERED: usize = 1024;
/// Of a namespace's name. A longer one is none.
const NAME_BYTES_MAX: usize = 63;

/// Which budget was the smallest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BudgetScope {
    Namespace,
    Peer,
    All,
    /// What one claim may cost.
    Review,
}

impl BudgetScope {
    /// As a metric's label.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Namespace => "namespace",
            Self::Peer => "peer",
            Self::All => "all",
            Self::Review => "review",
        }
    }
}

#[derive(Debug)]
pub(super) struct SelectorBudgets {
    namespaces: HashMap<String, Budget>,
    peers: HashMap<IpAddr, Budget>,
    all: Budget,
}

/// What was left at a time.
#[derive(Debug, Clone, Copy)]
struct Budget {
    left: u64,
    at: Instant,
}

impl Budget {
    fn full(rate: Rate, now: Instant) -> Self {
        Self { left: rate.burst, at: now }
    }

    fn level(&self, rate: Rate, now: Instant) -> u64 {
        let millis = now.saturating_duration_since(self.at).min(Duration::from_secs(3600)).as_millis();
        let grown = u64::try_from(millis).unwrap_or(u64::MAX).saturating_mul(rate.per_second) / 1000;
        self.left.saturating_add(grown).min(rate.burst)
    }

    fn pay(&mut self, units: u64, rate: Rate, now: Instant) {
        *self = Self { left: self.level(rate, now).saturating_sub(units), at: now };
    }
}

impl SelectorBudgets {
    pub fn new(now: Instant) -> Self {
        Self { namespaces: HashMap::new(), peers: HashMap::new(), all: Budget::full(OF_ALL, now) }
    }

    /// What a review may cost now, in units, and what bounds it.
    pub fn left(&self, peer: IpAddr, namespace: &str, now: Instant) -> (u64, BudgetScope) {
        let of_namespace = self.namespaces.get(known(namespace));
        let levels = [
            (
                of_namespace.map_or(OF_NAMESPACE.burst, |one| one.level(OF_NAMESPACE, now)),
                BudgetScope::Namespace,
            ),
            (self.peers.get(&peer).map_or(OF_PEER.burst, |one| one.level(OF_PEER, now)), BudgetScope::Peer),
            (self.all.level(OF_ALL, now), BudgetScope::All),
        ];
        let least = levels.into_iter().min_by_key(|(left, _)| *left);
        least.filter(|(left, _)| *left < REVIEW_UNITS_MAX).unwrap_or((REVIEW_UNITS_MAX, BudgetScope::Review))
    }

    /// A review has cost so much.
    pub fn pay(&mut self, peer: IpAddr, namespace: &str, units: u64, now: Instant) {
        if units == 0 {
            return;
        }
        budget_of(&mut self.namespaces, known(namespace).to_owned(), OF_NAMESPACE, now).pay(
            units,
            OF_NAMESPACE,
            now,
        );
        budget_of(&mut self.peers, peer, OF_PEER, now).pay(units, OF_PEER, now);
        self.all.pay(units, OF_ALL, now);
    }
}

fn known(namespace: &str) -> &str {
    if namespace.len() > NAME_BYTES_MAX { "" } else { namespace }
}

/// The one whose last review is longest ago makes room for a new one.
fn budget_of<K: Clone + Eq + Hash>(
    budgets: &mut HashMap<K, Budget>,
    whose: K,
    rate: Rate,
    now: Instant,
) -> &mut Budget {
    if budgets.len() >= REMEMBERED && !budgets.contains_key(&whose) {
        let oldest = budgets.iter().min_by_key(|(_, budget)| budget.at).map(|(whose, _)| whose.clone());
        oldest.and_then(|oldest| budgets.remove(&oldest));
    }
    budgets.entry(whose).or_insert_with(|| Budget::full(rate, now))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(last: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, last])
    }

    #[test]
    fn a_namespace_that_has_spent_its_budget_waits_for_it_and_others_have_theirs() {
        let now = Instant::now();
        let mut budgets = SelectorBudgets::new(now);
        assert_eq!(budgets.left(peer(1), "a", now), (REVIEW_UNITS_MAX, BudgetScope::Review));
        budgets.pay(peer(1), "a", REVIEW_UNITS_MAX, now);
        assert_eq!(budgets.left(peer(1), "a", now), (0, BudgetScope::Namespace));
        assert_eq!(budgets.left(peer(1), "b", now).0, REVIEW_UNITS_MAX);
        let later = now + Duration::from_secs(2);
        assert_eq!(budgets.left(peer(1), "a", later), (400_000, BudgetScope::Namespace));
        let long_after = now + Duration::from_secs(1_000_000);
        assert_eq!(budgets.left(peer(1), "a", long_after), (REVIEW_UNITS_MAX, BudgetScope::Review));
    }

    #[test]
    fn who_names_many_namespaces_is_held_by_the_address_and_many_addresses_by_the_whole() {
        let now = Instant::now();
        let mut budgets = SelectorBudgets::new(now);
        let mut spend = |from: u8, until: u64| {
            let mut spent = 0;
            for nth in 0..5_000 {
                let namespace = format!("{from}-{nth}");
                let (left, _) = budgets.left(peer(from), &namespace, now);
                budgets.pay(peer(from), &namespace, left.min(until), now);
                spent += left.min(until);
            }
            spent
        };
        assert_eq!(spend(1, 10_000), OF_PEER.burst);
        assert_eq!((2..50).map(|from| spend(from, 10_000)).sum::<u64>(), OF_ALL.burst - OF_PEER.burst);
        assert_eq!(budgets.left(peer(200), "new", now), (0, BudgetScope::All));
        assert!(budgets.namespaces.len() <= REMEMBERED && budgets.peers.len() <= REMEMBERED);
        // A name of any length takes no more room than none.
        let later = now + Duration::from_secs(60);
        budgets.pay(peer(1), &"x".repeat(100_000), 7, later);
        assert!(budgets.namespaces.keys().all(|name| name.len() <= NAME_BYTES_MAX));
    }
}
