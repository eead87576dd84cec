//! What became of the writes.

use std::collections::BTreeSet;

use k8s_openapi::api::resource::v1::ResourceClaim;

use super::{AFTER_REFUSAL, ASK_AGAIN, Core};
use crate::cluster::feed::{Change, Seen};
use crate::controller::Moment;
use crate::controller::world::GpuRef;
use crate::controller::world::claim::reference;
use crate::controller::write::{Failure, Outcome};
use crate::model::names::ClaimUid;

impl Core {
    pub fn done(&mut self, outcome: Outcome, now: Moment) {
        match outcome {
            Outcome::Held(gpu, result) => self.held(&gpu, result.map(|claim| *claim), now),
            Outcome::Looked(claims) => self.looked(claims.ok().as_deref(), now),
            Outcome::Left(gpu, result) => {
                if result.is_err() {
                    self.holds.not_left(&gpu);
                }
            }
            Outcome::Allocated(uid, result) => {
                self.in_flight.remove(&uid);
                match result {
                    Ok(claim) => self.apply(Change::Claim(Seen::Stored(claim)), now),
                    Err(failure) => self.not_allocated(&uid, failure, now),
                }
            }
            Outcome::Cleared(uid, result) => {
                self.in_flight.remove(&uid);
                match result {
                    Ok(claim) => self.apply(Change::Claim(Seen::Stored(claim)), now),
                    // If it still is to go, the next look says so again.
                    Err(_) => drop(self.to_clear.remove(&uid)),
                }
            }
            Outcome::Marked(uid, result) => {
                self.in_flight.remove(&uid);
                match result {
                    Ok(claim) => {
                        self.apply(Change::Claim(Seen::Stored(claim)), now);
                        // Its version is another now: what was meant for an older one comes to nothing.
                        self.sure(&uid, now);
                    }
                    Err(_) => {
                        let again = self.doubtful.get_mut(&uid);
                        again.into_iter().for_each(|again| *again = Some(now + ASK_AGAIN));
                    }
                }
            }
            Outcome::Created(uid, result) => {
                self.in_flight.remove(&uid);
                match result {
                    Ok(claim) => self.apply(Change::Claim(Seen::Stored(claim)), now),
                    // There is one of that name already: the watch brings it.
                    Err(Failure::Conflict) => self.not_allocated(&uid, Failure::Silent(String::new()), now),
                    Err(failure) => self.not_allocated(&uid, failure, now),
                }
            }
        }
    }

    fn held(&mut self, gpu: &GpuRef, result: Result<ResourceClaim, Failure>, now: Moment) {
        match result {
            Ok(claim) => {
                let at = reference(&claim.metadata);
                self.holds.written(gpu, &at, now);
                self.apply(Change::Claim(Seen::Stored(Box::new(claim))), now);
            }
            Err(failure) => {
                self.says.trouble(format!("{gpu} cannot be held: {}", failure.words()));
                self.holds.failed(gpu, now);
                for key in self.plans.on(gpu) {
                    self.cancel(&key, now);
                }
            }
        }
    }

    fn looked(&mut self, claims: Option<&[ResourceClaim]>, now: Moment) {
        let others = claims.map(|claims| {
            let read = claims.iter().filter_map(|claim| self.world.read(claim).allocation);
            let uses = read.flat_map(|allocation| allocation.uses);
            uses.filter(|(_, how)| !how.is_ours()).map(|(gpu, _)| gpu).collect::<BTreeSet<_>>()
        });
        for gpu in self.holds.looked(others.as_ref(), now) {
            for key in self.plans.on(&gpu) {
                self.cancel(&key, now);
            }
        }
    }

    /// An allocation that was in doubt does not stand in the API, and will not.
    fn sure(&mut self, uid: &ClaimUid, now: Moment) {
        let open = self.world.claims.get(uid).is_none_or(|claim| claim.allocation.is_none());
        if self.doubtful.remove(uid).is_some() && open && self.plans.of(uid).is_none() {
            self.stock.set_grants(uid, Vec::new());
            self.review_users(uid, now);
        }
    }

    fn not_allocated(&mut self, uid: &ClaimUid, failure: Failure, now: Moment) {
        let Some(key) = self.plans.key(uid).cloned() else {
            match failure {
                Failure::Silent(_) => drop(self.doubtful.insert(uid.clone(), Some(now))),
                _ => self.sure(uid, now),
            }
            return;
        };
        match failure {
            // Its next version is tried; it is on its way.
            Failure::Conflict | Failure::NotLeading => {}
            Failure::Silent(_) => {
                if let Some(planned) = self.plans.of_mut(uid) {
                    (planned.tried, planned.after, planned.lost) = (None, now + ASK_AGAIN, true);
                }
            }
            Failure::Gone => self.cancel(&key, now),
            Failure::Refused(words) => {
                self.not_before.insert(uid.clone(), now + AFTER_REFUSAL);
                if let Some(claim) = self.world.claims.get(uid) {
                    self.says.not_taken(claim, &words);
                }
                self.cancel(&key, now);
            }
        }
    }
}
