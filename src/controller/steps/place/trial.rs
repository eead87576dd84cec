//! How a unit is tried: all of its pods together, in each way to serve them; if that is in vain and fewer may start, as few
//! of those that fit somewhere. A trial that spends all that it may stops, and the next round goes on there.

use std::collections::BTreeSet;

use super::{PodPart, Refused, those};
use crate::allocate::{self, Decision, Explanation, PodAsk, Shortage};
use crate::controller::core::Core;
use crate::controller::purse::{EachPod, TrialKey, TrialStep};
use crate::controller::queue::{Together, Turn};
use crate::controller::recorder::Reason;
use crate::controller::{Moment, ask, multi_gpu};
use crate::model::names::PodUid;

/// What the parts ask the allocator for in one of their ways, and whether a claim wants several GPUs.
pub(super) fn asks(parts: &[PodPart], nth: usize) -> (Vec<PodAsk>, bool) {
    let ask = |part: &PodPart| PodAsk { shape: part.way(nth).shape.clone(), nodes: part.nodes.clone() };
    let asks: Vec<PodAsk> = parts.iter().map(ask).collect();
    let is_several = asks.iter().any(|ask| ask::is_several(&ask.shape));
    (asks, is_several)
}

/// What came of trying the ways to serve the pods of a unit.
enum Ways {
    /// Which of the ways, and where.
    Fits(usize, Decision),
    Refused(Refused),
    /// What its namespace may spend is spent: the way that is next.
    Spent(usize),
}

/// What came of a step of a unit's trial.
enum Trial {
    /// In which of the ways, and where.
    Fits(usize, Decision),
    Refused(Refused),
    Next(TrialStep),
    /// What its namespace may spend is spent: the step that is next.
    Spent(TrialStep),
}

impl Core {
    /// True if the unit was placed, false if there is nothing to decide now, or not all of it in this round.
    pub(in crate::controller) fn place(&mut self, turn: &Turn, now: Moment) -> Result<bool, Refused> {
        let Some(mut parts) = self.ready_parts(turn, now)? else { return Ok(false) };
        let (trial, epoch) = (TrialKey::from(turn), self.capacity.epoch());
        let begun_in = self.purse.trials().begun(&trial, epoch);
        let (mut step, mut had_all) = self.purse.trials().resume(&trial);
        let begun = step.clone();
        loop {
            let found = match step {
                TrialStep::All(from) => self.try_all(turn, &parts, from, had_all),
                TrialStep::Each(each) => self.try_each(turn, &parts, each, had_all),
                TrialStep::Fewest(fitting, from) => {
                    parts = self.fewest(turn, parts, &fitting);
                    self.try_fewest(&parts, fitting, from, had_all)
                }
            };
            match found {
                Trial::Fits(nth, decision) => {
                    self.adopt_places(turn, &parts, nth, &decision.placements, now);
                    return Ok(true);
                }
                Trial::Refused(refused) => return Err(refused),
                Trial::Next(next) => (step, had_all) = (next, false),
                Trial::Spent(next) => {
                    let again = next == begun;
                    self.purse.trials().stop(trial, next, again, begun_in);
                    self.queue.leave(&turn.key, true);
                    return Ok(false);
                }
            }
        }
    }

    /// All parts together, from this of their ways on. `had_all`: there will never be more to spend for it.
    fn try_all(&mut self, turn: &Turn, parts: &[PodPart], from: usize, had_all: bool) -> Trial {
        let found = match self.check_bounds(parts) {
            Ok(()) => self.try_ways(parts, from, had_all),
            Err(refused) => Ways::Refused(refused),
        };
        let refused = match found {
            Ways::Fits(nth, decision) => return Trial::Fits(nth, decision),
            Ways::Spent(nth) => return Trial::Spent(TrialStep::All(nth)),
            Ways::Refused(refused) => refused,
        };
        match self.least(turn, parts) {
            Some(least) if least.len() < parts.len() => {
                let refused = (refused.pod, refused.reason, refused.words);
                let (tried, fitting) = (BTreeSet::new(), BTreeSet::new());
                Trial::Next(TrialStep::Each(EachPod { tried, fitting, refused }))
            }
            _ => Trial::Refused(refused),
        }
    }

    /// Of parts that cannot be placed all together those that fit somewhere by themselves.
    fn try_each(&mut self, turn: &Turn, parts: &[PodPart], mut each: EachPod, mut had_all: bool) -> Trial {
        for part in parts {
            if each.tried.contains(&part.pod) {
                continue;
            }
            if !had_all && !self.capacity.index.has_left() {
                return Trial::Spent(TrialStep::Each(each));
            }
            let fits = self.first_way(std::slice::from_ref(part)).is_some();
            if !fits && !had_all && self.capacity.index.spent().1 {
                return Trial::Spent(TrialStep::Each(each));
            }
            had_all = false;
            each.tried.insert(part.pod.clone());
            each.fitting.extend(fits.then(|| part.pod.clone()));
        }
        let fitting: Vec<usize> =
            (0..parts.len()).filter(|at| each.fitting.contains(&parts[*at].pod)).collect();
        let there: Vec<&PodPart> = fitting.iter().map(|at| &parts[*at]).collect();
        match self.least_of(turn, &there) {
            Some(_) => Trial::Next(TrialStep::Fewest(each.fitting, 0)),
            None => {
                let (pod, reason, words) = each.refused;
                Trial::Refused(Refused::new(pod, reason, words))
            }
        }
    }

    /// As few of these as start together; none if some of them have gone, and there are too few.
    fn fewest(&self, turn: &Turn, parts: Vec<PodPart>, fitting: &BTreeSet<PodUid>) -> Vec<PodPart> {
        let fitting: Vec<usize> = (0..parts.len()).filter(|at| fitting.contains(&parts[*at].pod)).collect();
        let parts = those(parts, &fitting);
        match self.least(turn, &parts) {
            Some(least) => those(parts, &least),
            None => Vec::new(),
        }
    }

    /// These parts together, from this of their ways on.
    fn try_fewest(
        &mut self,
        parts: &[PodPart],
        fitting: BTreeSet<PodUid>,
        from: usize,
        had_all: bool,
    ) -> Trial {
        if parts.is_empty() {
            // Its pods are others now.
            return Trial::Spent(TrialStep::All(0));
        }
        if let Err(refused) = self.check_bounds(parts) {
            return Trial::Refused(refused);
        }
        match self.try_ways(parts, from, had_all) {
            Ways::Fits(nth, decision) => Trial::Fits(nth, decision),
            Ways::Refused(refused) => Trial::Refused(refused),
            Ways::Spent(nth) => Trial::Spent(TrialStep::Fewest(fitting, nth)),
        }
    }

    /// Which of the parts are to be placed together at least, by their places in the list. None: too few of the pods can
    /// be placed now.
    pub(in crate::controller::steps) fn least(&self, turn: &Turn, parts: &[PodPart]) -> Option<Vec<usize>> {
        self.least_of(turn, &parts.iter().collect::<Vec<_>>())
    }

    fn least_of(&self, turn: &Turn, parts: &[&PodPart]) -> Option<Vec<usize>> {
        let Together::AtLeast(need) = &turn.together else { return Some((0..parts.len()).collect()) };
        let of = |part: &&PodPart| self.view.pod(&part.pod).and_then(|pod| pod.gang()?.part.as_deref());
        let there: Vec<Option<&str>> = parts.iter().map(of).collect();
        need.choose(&there)
    }

    /// Tries the ways in which all of the parts can be served, from this one on, as long as there is something left to
    /// spend. `had_all`: a way that takes more than what is allowed now is given up.
    fn try_ways(&mut self, parts: &[PodPart], from: usize, mut had_all: bool) -> Ways {
        let ways = parts.iter().map(PodPart::ways).max().unwrap_or(1);
        let from = if from < ways { from } else { 0 };
        for nth in from..ways - 1 {
            if let Some(decision) = self.fits_in_way(parts, nth) {
                return Ways::Fits(nth, decision);
            }
            if self.capacity.index.spent().1 && !had_all {
                return Ways::Spent(nth);
            }
            had_all = false;
            if !self.capacity.index.has_left() {
                return Ways::Spent(nth + 1);
            }
        }
        let last = ways - 1;
        match self.decide_way(parts, last, had_all) {
            Err(Explanation { shortage: Shortage::Unsearched { .. }, .. }) if !had_all => Ways::Spent(last),
            Ok(decision) => match self.beyond_bounds(parts, &decision.placements) {
                None => Ways::Fits(last, decision),
                Some(words) => match self.try_smaller(parts, last, had_all, words) {
                    Ways::Refused(bound) => self.for_room_of_another(parts, last, had_all, bound),
                    found => found,
                },
            },
            Err(explanation) => {
                let mut refused = self.explained(&parts[0], &explanation);
                if self.is_mutual(parts) && explanation.skipped.nodes.not_allowed > 0 {
                    refused
                        .words
                        .push_str("; what pods of its gang require of other pods keeps them off nodes");
                }
                if ways > 1 {
                    refused.words = format!("none of {ways} alternatives fits; the last {}", refused.words);
                }
                Ways::Refused(refused)
            }
        }
    }

    /// Where the parts go in this way, whatever their namespace may have, or why they go nowhere.
    fn decide_way(&mut self, parts: &[PodPart], nth: usize, had_all: bool) -> Result<Decision, Explanation> {
        let (asks, is_several) = asks(parts, nth);
        match is_several {
            _ if self.is_mutual(parts) => self.decide_in_turn(parts, nth, had_all),
            false => allocate::decide(&mut self.capacity.index, &asks, parts[0].policy),
            true => multi_gpu::decide(&mut self.capacity, &asks, parts[0].policy),
        }
    }

    /// The last way is more than the namespace may have, as `bound` says. If one before it is not and lacks room, it is for
    /// room that the unit waits.
    fn for_room_of_another(&mut self, parts: &[PodPart], last: usize, had_all: bool, bound: Refused) -> Ways {
        for nth in 0..last {
            if self.beyond_bounds_at_least(parts, nth).is_some() {
                continue;
            }
            if !had_all && !self.capacity.index.has_left() {
                return Ways::Spent(last);
            }
            let Err(explanation) = self.decide_way(parts, nth, had_all) else { continue };
            match explanation.shortage {
                Shortage::Unsearched { .. } if !had_all => return Ways::Spent(last),
                // It has no place, whoever ends.
                Shortage::Unsearched { .. } | Shortage::Candidates { .. } => continue,
                _ => {}
            }
            let refused = self.explained(&parts[0], &explanation);
            let words = format!(
                "none of {} alternatives fits; one {}; of the last, {}",
                last + 1,
                refused.words,
                bound.words
            );
            return Ways::Refused(Refused { words, ..refused });
        }
        Ways::Refused(bound)
    }

    /// The best GPUs are more than the namespace may still have, as the words say: smaller ones may not be.
    fn try_smaller(&mut self, parts: &[PodPart], nth: usize, had_all: bool, words: String) -> Ways {
        let kept_off = self.kept_off_large_gpus(parts, nth);
        if let Some(decision) = kept_off.as_ref().and_then(|parts| self.within_bounds(parts, nth)) {
            return Ways::Fits(nth, decision);
        }
        if kept_off.is_some() && self.capacity.index.spent().1 && !had_all {
            return Ways::Spent(nth);
        }
        let may_fit_elsewhere = kept_off.is_some();
        Ways::Refused(Refused { may_fit_elsewhere, ..parts[0].refused(Reason::Bound, words) })
    }

    /// Where the parts are served in this way, within what their namespace may have.
    fn fits_in_way(&mut self, parts: &[PodPart], nth: usize) -> Option<Decision> {
        let decision = self.places_in_way(parts, nth)?;
        if self.beyond_bounds(parts, &decision.placements).is_none() {
            return Some(decision);
        }
        let kept_off = self.kept_off_large_gpus(parts, nth)?;
        self.within_bounds(&kept_off, nth)
    }

    fn within_bounds(&mut self, parts: &[PodPart], nth: usize) -> Option<Decision> {
        let decision = self.places_in_way(parts, nth)?;
        self.beyond_bounds(parts, &decision.placements).is_none().then_some(decision)
    }

    /// The best places for the parts in this way, whatever their namespace may have.
    fn places_in_way(&mut self, parts: &[PodPart], nth: usize) -> Option<Decision> {
        let policy = parts[0].policy;
        let (asks, is_several) = asks(parts, nth);
        match is_several {
            _ if self.is_mutual(parts) => self.decide_in_turn(parts, nth, false).ok(),
            false => allocate::places(&mut self.capacity.index, &asks, policy)
                .map(|placements| Decision { placements }),
            true => multi_gpu::places(&mut self.capacity, &asks, policy),
        }
    }

    /// The first of the ways in which all of the parts can be served, and how. None: there is none, or there was nothing
    /// left to spend before all was tried.
    pub(in crate::controller::steps) fn first_way(&mut self, parts: &[PodPart]) -> Option<(usize, Decision)> {
        let ways = parts.iter().map(PodPart::ways).max().unwrap_or(1);
        for nth in 0..ways {
            if nth > 0 && !self.capacity.index.goes_on() {
                return None;
            }
            if let Some(decision) = self.fits_in_way(parts, nth) {
                return Some((nth, decision));
            }
        }
        None
    }
}
