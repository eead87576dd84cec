//! What namespaces have spent beyond their parts of rounds. A namespace goes without for as long as that took, since its
//! time is what the others had to wait.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::controller::Moment;

/// What a thread does in a millisecond, about, in ticks.
const MILLISECOND: u64 = 100_000;

/// What is worked off as time passes.
#[derive(Debug, Clone, Copy)]
enum Rate {
    /// Ticks in a millisecond.
    PerMillisecond(u64),
    /// A part in each round.
    #[cfg(test)]
    PerRound,
}

/// By namespace, in ticks.
#[derive(Debug)]
pub struct Debts {
    of: BTreeMap<String, u64>,
    rate: Rate,
    /// When the last round began.
    opened: Option<Moment>,
    /// Namespaces among which the time is divided.
    shared_by: u64,
}

impl Default for Debts {
    fn default() -> Self {
        Self { of: BTreeMap::new(), rate: Rate::PerMillisecond(MILLISECOND), opened: None, shared_by: 1 }
    }
}

impl Debts {
    /// Whoever owes as much as a part of a round has paid that once a round is over, however long that takes.
    #[cfg(test)]
    pub fn paid_by_rounds() -> Self {
        Self { rate: Rate::PerRound, ..Self::default() }
    }

    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.of.len()
    }

    pub fn of(&self, namespace: &str) -> u64 {
        self.of.get(namespace).copied().unwrap_or(0)
    }

    /// A round is over in which namespaces have spent so much of `slice`, which each of them had.
    pub fn settle(&mut self, spent: &BTreeMap<String, u64>, slice: u64, now: Moment) {
        for (namespace, spent) in spent {
            let over = spent.saturating_sub(slice);
            if over > 0 {
                let debt = self.of.entry(namespace.clone()).or_default();
                *debt = debt.saturating_add(over);
            }
        }
        let (rate, shared_by, passed) = (self.rate, self.shared_by, self.passed(now));
        for (namespace, debt) in &mut self.of {
            // What it worked itself pays for nothing.
            let spent = spent.get(namespace).copied().unwrap_or(0);
            *debt = debt.saturating_sub(match rate {
                Rate::PerMillisecond(ticks) => done(ticks, passed).saturating_sub(spent) / shared_by,
                #[cfg(test)]
                Rate::PerRound => slice.saturating_sub(spent),
            });
        }
        self.of.retain(|_, debt| *debt > 0);
    }

    /// The next one begins, among so many.
    pub fn open(&mut self, shared_by: u64, now: Moment) {
        (self.shared_by, self.opened) = (shared_by, Some(now));
    }

    /// When a namespace that has spent so much in this round has less to pay than its part of a round. None: it has now,
    /// or nobody knows.
    pub fn until(&self, namespace: &str, spent: u64, slice: u64) -> Option<Moment> {
        let debt = self.of(namespace).saturating_add(spent.saturating_sub(slice));
        let rest = debt.checked_sub(slice)?.saturating_add(1);
        let ticks = rest.saturating_mul(self.shared_by).saturating_add(spent);
        match self.rate {
            Rate::PerMillisecond(each) => Some(self.opened? + Duration::from_millis(ticks.div_ceil(each))),
            #[cfg(test)]
            Rate::PerRound => None,
        }
    }

    fn passed(&self, now: Moment) -> Duration {
        self.opened.map_or(Duration::ZERO, |opened| now.saturating_sub(opened))
    }
}

/// What a thread does in that time.
fn done(per_millisecond: u64, passed: Duration) -> u64 {
    let microseconds = u64::try_from(passed.as_micros()).unwrap_or(u64::MAX);
    per_millisecond.saturating_mul(microseconds) / 1000
}
