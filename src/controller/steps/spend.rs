//! What the units of a round spend of their namespaces' parts, and what their selectors choose.

use std::collections::BTreeSet;

use crate::allocate::Studied;
use crate::controller::Moment;
use crate::controller::core::Core;
use crate::controller::purse::BESIDE;
use crate::controller::queue::{Turn, UnitKey};
use crate::controller::recorder::Reason;
use crate::controller::steps::place::{PodPart, Refused};
use crate::model::claim::ClaimKey;

impl Core {
    /// Before the first unit of a round is tried.
    pub(in crate::controller) fn open_purse(&mut self, turns: &[Turn], now: Moment) {
        let epoch = self.capacity.epoch();
        let due = turns.iter().filter(|turn| turn.tried != Some(epoch));
        let namespaces = due.map(|turn| self.namespace_of(turn)).collect();
        let left_over =
            turns.iter().filter(|turn| turn.left_over).map(|turn| self.namespace_of(turn)).collect();
        self.purse.open(namespaces, left_over, now);
        let queue = &self.queue;
        self.purse.trials().tidy(|unit, pod| queue.has(unit) && pod.is_none_or(|pod| queue.has_pod(pod)));
        self.queue.nothing_left();
    }

    /// False if the unit is not to be tried in this round: its namespace has spent what it may, or others of it come
    /// first.
    pub(in crate::controller) fn may_try(&mut self, turn: &Turn) -> bool {
        let namespace = self.namespace_of(turn);
        let is_last = self.purse.goes_on(&namespace) && turn.looked_at && !turn.left_over;
        let allowed = self.purse.allowance(&namespace).filter(|_| !is_last);
        match allowed.and_then(|ticks| self.purse.grant(&turn.into(), &namespace, ticks)) {
            Some(ticks) => {
                self.queue.looked_at(&turn.key);
                self.capacity.index.allow(ticks);
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
    pub(in crate::controller) fn pay(&mut self, turn: &Turn) {
        let (spent, _) = self.capacity.index.spent();
        let namespace = self.namespace_of(turn);
        self.purse.pay(&namespace, spent);
    }

    /// After the last unit of a round: the rest is for what else looks at selectors.
    pub(in crate::controller) fn close_purse(&mut self) {
        self.capacity.index.allow(BESIDE);
    }

    /// When there is something to do again of what this round leaves: not before one of its namespaces may spend
    /// something.
    pub(in crate::controller) fn left_due(&self, now: Moment) -> Option<Moment> {
        let mut namespaces = BTreeSet::new();
        for unit in self.queue.left() {
            let namespace = self.namespace_of_unit(unit);
            if self.purse.owes_until(&namespace).is_none_or(|until| until <= now) {
                return Some(now);
            }
            namespaces.insert(namespace);
        }
        namespaces.iter().filter_map(|namespace| self.purse.owes_until(namespace)).min()
    }

    fn namespace_of(&self, turn: &Turn) -> String {
        self.namespace_of_unit(&turn.key)
    }

    fn namespace_of_unit(&self, unit: &UnitKey) -> String {
        match unit {
            UnitKey::Gang { namespace, .. } => namespace.clone(),
            UnitKey::Pod(uid) => self.view.pod(uid).map(|pod| pod.at.namespace.clone()).unwrap_or_default(),
        }
    }

    /// Finds out what the selectors of a part choose. False: not all in this round.
    ///
    /// # Errors
    /// They cannot be used. That is remembered of the claims, and they are not tried again.
    pub(super) fn study(&mut self, part: &PodPart) -> Result<bool, Refused> {
        for (shape, requests) in part.shapes() {
            match self.capacity.index.study(shape) {
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
                    let meant = |claim: &ClaimKey| request.map_or(alone, |(of, _)| of == claim);
                    for claim in part.claims().iter().copied().filter(meant) {
                        self.purse.set_dear(claim, words.clone());
                    }
                    return Err(part.refused(Reason::Claim, words));
                }
            }
        }
        Ok(true)
    }
}
