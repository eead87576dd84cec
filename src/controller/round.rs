//! One round: everything that waits, against everything that there is. What comes out is a plan of writes with
//! every choice made.

use crate::controller::Moment;
use crate::controller::core::Core;
use crate::controller::queue::{Turn, UnitKey};
use crate::controller::recorder::Reason;
use crate::controller::steps::place::Refused;
use crate::controller::write::Round;

impl Core {
    /// `ids`: a fresh UUID at each call, for shares.
    pub fn round(&mut self, now: Moment, ids: &mut dyn FnMut() -> String) -> Round {
        let mut round = Round::default();
        if !self.view.is_complete() {
            return round;
        }
        self.start(now);
        self.review_marked(now);
        self.reevaluate_gpus(now);
        self.reclaim_unused(now);
        if self.queue.refusals.expire(now) {
            self.capacity.news();
        }
        self.decide(now, &mut round);
        let epoch = self.capacity.epoch();
        let given = self.yield_idle_gpus(now);
        self.preempt_for_whole(&given, now);
        self.keep(now, &mut round);
        self.send(now, &mut round, ids);
        self.evict(now, &mut round);
        self.reevaluate_gpus(now);
        // What this round has set free is for the next.
        let more = self.capacity.epoch() != epoch && !self.queue.is_empty();
        let left = self.pods.demand.has_left() || self.pods.has_marked();
        let again = (more || left || self.capacity.index.spent().1).then_some(now);
        let due = [
            again,
            self.left_due(now),
            self.holds.next(now),
            self.queue.next(now),
            self.recorder.next(now),
            self.reserves.next(now),
            self.reserves.evictions.preempting.next(epoch, now),
            self.tracker.next(&self.rules, now),
            self.next_move(epoch, now),
        ];
        round.next = due.into_iter().flatten().min();
        round
    }

    // Decisions.

    pub(in crate::controller) fn decide(&mut self, now: Moment, round: &mut Round) {
        for uid in self.recorder.due(now) {
            self.queue.again(&uid);
            self.tell_unpromised(&uid, now);
        }
        for one in self.queue.gathering(now, |key| self.placed(key)) {
            self.tell_gathering(&one, now);
        }
        self.try_again_beside_others();
        let mut waiting: Vec<UnitKey> = Vec::new();
        let turns = self.queue.turns(now, |key| self.placed(key));
        self.begin_moving(now);
        let mut keeping = self.begin_keeping(&turns, now);
        self.follow_preemptions(now);
        self.open_purse(&turns, now);
        let mut tries = self.begin_preempting(&turns, now);
        for turn in turns {
            let epoch = self.capacity.epoch();
            if turn.tried != Some(epoch) && self.may_try(&turn) {
                let begun = self.purse.trials().begun(&(&turn).into(), epoch);
                let placed = self.try_unit(&turn, now);
                match placed {
                    Ok(true) => {
                        round.decided += 1;
                        self.no_longer_kept(&turn.key, now);
                        self.moved(&turn);
                        // Those before it have its priority, or a higher one.
                        waiting.iter().for_each(|key| self.queue.passed(key));
                        continue;
                    }
                    // It waits for something else than a decision. What others end for is kept meanwhile.
                    Ok(false) => {
                        self.hold_preempted(&turn, &mut keeping, now);
                        continue;
                    }
                    // Nothing is kept for it, nobody else ends for it, and nobody passes it.
                    Err(refused) if refused.reason == Reason::Bound => {
                        round.refused += 1;
                        self.tell(&turn.pods, &refused, now);
                        self.queue.over_bounds(&turn, begun, epoch, now);
                        self.reserves.evictions.preempting.stop(&turn.key, now);
                        self.no_longer_kept(&turn.key, now);
                        continue;
                    }
                    Err(refused) => {
                        round.refused += 1;
                        self.tell(&turn.pods, &refused, now);
                        self.queue.tried(&turn, begun, epoch);
                    }
                }
            }
            if turn.bounded && turn.tried == Some(epoch) {
                continue;
            }
            let moves = self.reserves.evictions.moves.is_served(&turn.key);
            if !moves && self.preempt(&turn, &mut tries, now) {
                round.decided += 1;
                continue;
            }
            // Of pods that start one by one the first has what is kept for their gang.
            let is_kept = turn.starving || self.reserves.is_preempted(&turn.key);
            if is_kept && waiting.last() != Some(&turn.key) {
                self.keep_for(&turn, &mut keeping, now);
            }
            if waiting.last() != Some(&turn.key) {
                waiting.push(turn.key);
            }
        }
        self.end_preempting(&tries, now);
        self.consolidate(now, round);
        self.close_purse();
        self.capacity.lift_all();
    }

    /// Tries a unit; where there is no room, also in zones, and then on nodes, that refused its pods or others of their owners
    /// a while ago.
    fn try_unit(&mut self, turn: &Turn, now: Moment) -> Result<bool, Refused> {
        let mut placed = self.place_beside(turn, now);
        if placed.as_ref().is_err_and(|refused| refused.may_fit_elsewhere) {
            let owners = self.owners_of(&turn.pods);
            while placed.as_ref().is_err_and(|refused| refused.may_fit_elsewhere)
                && self.queue.refusals.reopen(&turn.pods, &owners, now)
            {
                placed = self.place_beside(turn, now);
            }
        }
        self.pay(turn);
        if placed.is_err() {
            self.purse.trials().forget(&turn.into());
        }
        placed
    }
}
