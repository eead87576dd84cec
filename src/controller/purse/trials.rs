//! Trials of units that were not done in one round. A trial that spends all that it may stops, and goes on there. If it
//! comes no further with that, it is given twice as much the next time, up to a whole round's; one that needs more than
//! that is refused.

use std::collections::{BTreeMap, BTreeSet};

use crate::controller::queue::{Together, Turn, UnitKey};
use crate::controller::recorder::Reason;
use crate::model::names::PodUid;

/// What is tried: a unit, or of pods of a gang that start one by one one of them.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct TrialKey {
    unit: UnitKey,
    alone: Option<PodUid>,
}

impl From<&Turn> for TrialKey {
    fn from(turn: &Turn) -> Self {
        let alone = turn.together == Together::Alone;
        Self { unit: turn.key.clone(), alone: turn.pods.first().filter(|_| alone).cloned() }
    }
}

/// How far a trial has come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TrialStep {
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

/// Where a trial goes on.
#[derive(Debug)]
struct Stopped {
    step: TrialStep,
    /// It needs at least so much to come further, in ticks.
    needs: u64,
    /// In which epoch of the capacity it began.
    begun: u64,
}

#[derive(Debug)]
pub struct Trials {
    stopped: BTreeMap<TrialKey, Stopped>,
    /// The one that is tried now may spend so much, in ticks.
    granted: u64,
    /// No trial is given more.
    most: u64,
}

impl Trials {
    pub fn up_to(most: u64) -> Self {
        Self { stopped: BTreeMap::new(), granted: 0, most }
    }

    /// What it takes at least to come further, in ticks; 0 where that is not known.
    pub fn needs(&self, trial: &TrialKey) -> u64 {
        self.stopped.get(trial).map_or(0, |stopped| stopped.needs)
    }

    /// The one that is tried now may spend so much, in ticks.
    pub fn grant(&mut self, ticks: u64) {
        self.granted = ticks;
    }

    /// In which epoch it began; in this one if it begins now.
    pub fn begun(&self, trial: &TrialKey, epoch: u64) -> u64 {
        self.stopped.get(trial).map_or(epoch, |stopped| stopped.begun)
    }

    /// The trial, which began in this epoch, goes on with this step. `again`: it began with it, and did not come further.
    pub fn stop(&mut self, trial: TrialKey, step: TrialStep, again: bool, begun: u64) {
        let needs = if again { self.twice() } else { 0 };
        self.stopped.insert(trial, Stopped { step, needs, begun });
    }

    /// Before any step: there was not enough to read all that the unit asks for. False: nor will there ever be.
    pub fn stop_reading(&mut self, trial: TrialKey, epoch: u64) -> bool {
        let needs = self.twice();
        let first = Stopped { step: TrialStep::All(0), needs: 0, begun: epoch };
        let stopped = self.stopped.entry(trial.clone()).or_insert(first);
        if self.granted >= self.most && stopped.needs >= self.most {
            self.stopped.remove(&trial);
            return false;
        }
        stopped.needs = needs;
        true
    }

    /// The step at which the trial goes on. True: it had all that one may ever have, and more than it had when it stopped
    /// at that step.
    pub fn resume(&mut self, trial: &TrialKey) -> (TrialStep, bool) {
        match self.stopped.remove(trial) {
            Some(Stopped { step, needs, .. }) => (step, needs > 0 && self.granted >= self.most),
            None => (TrialStep::All(0), false),
        }
    }

    /// It has come to its end.
    pub fn forget(&mut self, trial: &TrialKey) {
        self.stopped.remove(trial);
    }

    /// Forgets what does not wait any more. `waits`: the unit does, and the pod where there is one.
    pub fn tidy(&mut self, waits: impl Fn(&UnitKey, Option<&PodUid>) -> bool) {
        self.stopped.retain(|trial, _| waits(&trial.unit, trial.alone.as_ref()));
    }

    fn twice(&self) -> u64 {
        self.granted.saturating_mul(2).min(self.most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_done_with_what_it_had_is_given_twice_as_much_the_next_time() {
        const MOST: u64 = 100_000;
        let mut trials = Trials::up_to(MOST);
        let trial = TrialKey { unit: UnitKey::Pod(PodUid::new("p")), alone: None };
        let mut given = Vec::new();
        loop {
            let granted = trials.needs(&trial).max(1000);
            trials.grant(granted);
            given.push(granted);
            let (step, had_all) = trials.resume(&trial);
            assert_eq!(step, TrialStep::All(0));
            if had_all {
                break;
            }
            trials.stop(trial.clone(), step, true, 1);
        }
        assert_eq!(given[..4], [1000, 2000, 4000, 8000]);
        assert_eq!(given.last(), Some(&MOST));
        trials.stop(trial.clone(), TrialStep::All(1), false, 1);
        assert_eq!(trials.needs(&trial), 0, "it has come further");
        assert_eq!(trials.begun(&trial, 2), 1);
    }
}
