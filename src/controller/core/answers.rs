//! What became of the writes.

use std::collections::BTreeSet;
use std::time::Duration;

use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::{AFTER_REFUSAL, ASK_AGAIN, Core, NEVER_COMES};
use crate::cluster::feed::{Change, Seen};
use crate::controller::Moment;
use crate::controller::hold::Others;
use crate::controller::plan::Next;
use crate::controller::world::claim::reference;
use crate::controller::world::{Claim, GpuRef, Sight};
use crate::controller::write::{Failure, Outcome};
use crate::model::claim::ClaimRef;
use crate::model::names::ClaimUid;

impl Core {
    pub fn done(&mut self, outcome: Outcome, now: Moment) {
        let gone = outcome.gone().cloned();
        self.take_in(outcome, now);
        if let Some(uid) = gone {
            self.not_there(&uid, now);
        }
    }

    fn take_in(&mut self, outcome: Outcome, now: Moment) {
        match outcome {
            Outcome::Held(gpu, result) => self.held(&gpu, result.map(|claim| *claim), now),
            // The watch is to bring what was stored: taken in here, it would seem to have.
            Outcome::Looked(_, Ok(claim)) => self.look = Some(self.world.read(&claim).at),
            Outcome::Looked(_, Err(_)) => self.looked(false, now),
            Outcome::Left(_, _, Ok(()) | Err(Failure::Gone)) => {}
            Outcome::Left(gpu, _, Err(_)) => self.holds.not_left(&gpu, now + ASK_AGAIN),
            Outcome::Allocated(uid, result) => {
                self.in_flight.remove(&uid);
                match result {
                    Ok(claim) => self.written(&uid, claim, now),
                    Err(failure) => self.not_allocated(&uid, failure, now),
                }
            }
            Outcome::Cleared(uid, result) => {
                self.in_flight.remove(&uid);
                match result {
                    Ok(claim) => self.written(&uid, claim, now),
                    Err(_) => {
                        // If it still is to go, the next look says so again.
                        self.to_clear.remove(&uid);
                        // What was decided and given up meanwhile.
                        self.doubtful.get_mut(&uid).into_iter().for_each(|due| *due = Some(now));
                    }
                }
            }
            Outcome::Marked(uid, result) => {
                self.in_flight.remove(&uid);
                let text = self.marking.remove(&uid);
                match result {
                    Ok(claim) => self.written(&uid, claim, now),
                    Err(failure) => {
                        if let (Some(text), false) =
                            (text, matches!(failure, Failure::Gone | Failure::Refused(_)))
                        {
                            self.to_mark.entry(uid.clone()).or_insert(text);
                            self.marks_after = Some(now + ASK_AGAIN);
                        }
                        let again = self.doubtful.get_mut(&uid);
                        again.into_iter().for_each(|again| *again = Some(now + ASK_AGAIN));
                    }
                }
            }
            Outcome::Created(uid, result) => {
                let uid = self.renamed.remove(&uid).unwrap_or(uid);
                self.in_flight.remove(&uid);
                match result {
                    Ok(claim) => {
                        self.made_by_us(claim, now);
                        let uid = self.renamed.remove(&uid).unwrap_or(uid);
                        self.in_flight.remove(&uid);
                        self.settle_created(&uid, now);
                    }
                    Err(failure) => self.not_allocated(&uid, failure, now),
                }
            }
        }
    }

    /// The API server does not have the claim any more. The watch need not bring that: an answer that came late may have
    /// told of a claim after the list that it is missing from.
    fn not_there(&mut self, uid: &ClaimUid, now: Moment) {
        let Some(claim) = self.world.claims.get(uid).filter(|claim| !claim.is_new()) else { return };
        let ClaimRef { namespace, name, uid } = claim.at.claim.clone();
        let meta = ObjectMeta {
            namespace: Some(namespace),
            name: Some(name),
            uid: Some(uid.to_string()),
            ..ObjectMeta::default()
        };
        self.apply(Change::Claim(Seen::Deleted(Box::new(meta))), now);
    }

    /// What a write of ours made of a claim. Told late, it may have been deleted since: then it is not there again.
    fn changed(&mut self, claim: Box<ResourceClaim>, now: Moment) {
        if self.world.claims.contains_key(&reference(&claim.metadata).uid) {
            self.apply(Change::Claim(Seen::Stored(claim)), now);
        }
    }

    /// A write of ours on a claim was done. Its version is another now: what was meant for an older one, and is in
    /// doubt, comes to nothing.
    fn written(&mut self, uid: &ClaimUid, claim: Box<ResourceClaim>, now: Moment) {
        self.changed(claim, now);
        self.sure(uid, now);
    }

    /// What came of a claim that we made. Nobody need know it yet.
    fn made_by_us(&mut self, claim: Box<ResourceClaim>, now: Moment) {
        if !self.world.is_gone(&reference(&claim.metadata).uid) {
            self.apply(Change::Claim(Seen::Stored(claim)), now);
        }
    }

    fn held(&mut self, gpu: &GpuRef, result: Result<ResourceClaim, Failure>, now: Moment) {
        let is_gone = |claim: &ResourceClaim| self.world.is_gone(&reference(&claim.metadata).uid);
        match result.and_then(|claim| if is_gone(&claim) { Err(Failure::Gone) } else { Ok(claim) }) {
            Ok(claim) => {
                let at = reference(&claim.metadata);
                self.holds.written(gpu, &at, now);
                self.made_by_us(Box::new(claim), now);
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

    /// Ends the look under way once the watch has brought its mark.
    pub(in crate::controller) fn look(&mut self, now: Moment) {
        match self.look.as_ref().map_or(Sight::NotYet, |mark| self.world.sight(mark)) {
            Sight::NotYet => {}
            Sight::Seen => self.looked(true, now),
            Sight::Gone => self.looked(false, now),
        }
    }

    /// `well`: the world is at least as of when the look began.
    pub(in crate::controller) fn looked(&mut self, well: bool, now: Moment) {
        self.look = None;
        let contested = if well { self.contestable(self.holds.looking()) } else { BTreeSet::new() };
        let others = |gpu: &GpuRef| match (self.world.is_anothers(gpu), contested.contains(gpu)) {
            (true, _) => Others::Named,
            (false, true) => Others::MayCome,
            (false, false) => Others::Nobody,
        };
        for gpu in self.holds.looked(well.then_some(&others as _), now) {
            for key in self.plans.on(&gpu) {
                self.cancel(&key, now);
            }
        }
    }

    /// A claim that was promised exists, with its allocation or without.
    fn settle_created(&mut self, uid: &ClaimUid, now: Moment) {
        match self.world.claims.get(uid).is_some_and(|claim| !claim.is_new()) {
            // Under its own name: should the allocation have failed, that is to be made sure of.
            true => self.doubtful.get_mut(uid).into_iter().for_each(|due| *due = Some(now)),
            // Its pod has gone meanwhile: what it has counts under its own name.
            false => self.sure(uid, now),
        }
    }

    /// An allocation that was in doubt does not stand in the API, and will not.
    pub(in crate::controller) fn sure(&mut self, uid: &ClaimUid, now: Moment) {
        let open = self.world.claims.get(uid).is_none_or(|claim| claim.allocation.is_none());
        if self.doubtful.remove(uid).is_some() && open && self.plans.of(uid).is_none() {
            self.stock.set_grants(uid, Vec::new());
            self.review_users(uid, now);
        }
    }

    fn not_allocated(&mut self, uid: &ClaimUid, failure: Failure, now: Moment) {
        let Some(key) = self.plans.key(uid).cloned() else {
            match failure {
                Failure::Silent(_) => {
                    let new = self.world.claims.get(uid).is_none_or(Claim::is_new);
                    let due = now + if new { NEVER_COMES } else { Duration::ZERO };
                    self.doubtful.insert(uid.clone(), Some(due));
                }
                _ => self.sure(uid, now),
            }
            return;
        };
        let new = self.world.claims.get(uid).is_some_and(Claim::is_new);
        match failure {
            // Its next version is on its way, and tried as soon as it is known. None need come where somebody else's
            // admission answered.
            Failure::Conflict if !new => {
                if let Some(Next::Newer { again, .. }) =
                    self.plans.of_mut(uid).map(|planned| &mut planned.next)
                {
                    *again = Some(now + ASK_AGAIN);
                }
            }
            // Nothing was done, so that no next version need come. Of one that is promised there is none: its name is
            // taken, which the watch will tell, or its namespace's quota was being counted.
            Failure::Conflict | Failure::NotLeading | Failure::Busy(_) => {
                if let Some(planned) = self.plans.of_mut(uid) {
                    planned.next = Next::From(now + ASK_AGAIN);
                }
            }
            Failure::Silent(_) => {
                if let Some(planned) = self.plans.of_mut(uid) {
                    (planned.next, planned.lost) = (Next::From(now + ASK_AGAIN), true);
                }
            }
            Failure::Gone => self.cancel(&key, now),
            Failure::Refused(words) => {
                self.not_before.insert(uid.clone(), now + AFTER_REFUSAL);
                if let Some(claim) = self.world.claims.get(uid) {
                    self.says.not_taken(claim, self.world.pods_of(claim), &words, now);
                }
                self.cancel(&key, now);
            }
        }
    }
}
