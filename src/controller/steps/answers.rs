//! What became of the writes.

use std::collections::BTreeSet;

use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::cluster::feed::{Change, WatchEvent};
use crate::controller::Moment;
use crate::controller::core::{Core, stored};
use crate::controller::holds::Others;
use crate::controller::tracker::{RETRY_AFTER, Verdict};
use crate::controller::view::claim::reference;
use crate::controller::view::{GpuRef, Sight};
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
            Outcome::BarrierWritten(_, Ok(claim)) => self.holds.marked(self.view.read(&claim).at),
            Outcome::BarrierWritten(_, Err(_)) => self.looked(false, now),
            Outcome::Released(_, _, Ok(()) | Err(Failure::Gone)) => {}
            Outcome::Released(gpu, _, Err(_)) => self.holds.not_released(&gpu, now + RETRY_AFTER),
            Outcome::Allocated(uid, Ok(claim))
            | Outcome::Cleared(uid, Ok(claim))
            | Outcome::Marked(uid, Ok(claim)) => {
                self.tracker.succeeded(&uid);
                self.written(&uid, claim, now);
            }
            Outcome::Allocated(uid, Err(failure))
            | Outcome::Cleared(uid, Err(failure))
            | Outcome::Marked(uid, Err(failure)) => self.not_written(&uid, &failure, now),
            Outcome::Created(uid, result) => {
                let uid = self.tracker.answers(uid);
                match result {
                    Ok(claim) => {
                        self.made_by_us(claim, now);
                        // The watch need not have brought it before.
                        let uid = self.tracker.answers(uid);
                        self.tracker.succeeded(&uid);
                        self.settle_created(&uid, now);
                    }
                    Err(failure) => self.not_written(&uid, &failure, now),
                }
            }
        }
    }

    /// The API server does not have the claim any more. The watch need not bring that: an answer that came late may have
    /// told of a claim after the list that it is missing from.
    fn not_there(&mut self, uid: &ClaimUid, now: Moment) {
        let Some(claim) = self.view.claim(uid).filter(|claim| !claim.is_new()) else { return };
        let ClaimRef { namespace, name, uid } = claim.at.claim.clone();
        let meta = ObjectMeta {
            namespace: Some(namespace),
            name: Some(name),
            uid: Some(uid.to_string()),
            ..ObjectMeta::default()
        };
        self.apply(Change::Claim(WatchEvent::Deleted(Box::new(meta))), now);
    }

    /// What a write of ours made of a claim. Told late, it may have been deleted since: then it is not there again.
    pub(in crate::controller) fn changed(&mut self, claim: Box<ResourceClaim>, now: Moment) {
        if self.view.claim(&reference(&claim.metadata).uid).is_some() {
            self.apply(Change::Claim(WatchEvent::Stored(claim)), now);
        }
    }

    /// A write of ours on a claim was done. Its version is another now: what was meant for an older one, and is in
    /// doubt, comes to nothing.
    pub(in crate::controller) fn written(&mut self, uid: &ClaimUid, claim: Box<ResourceClaim>, now: Moment) {
        self.changed(claim, now);
        self.confirm_absent(uid, now);
    }

    /// What came of a claim that we made. Nobody need know it yet.
    fn made_by_us(&mut self, claim: Box<ResourceClaim>, now: Moment) {
        if !self.view.is_gone(&reference(&claim.metadata).uid) {
            self.apply(Change::Claim(WatchEvent::Stored(claim)), now);
        }
    }

    pub(in crate::controller) fn held(
        &mut self,
        gpu: &GpuRef,
        result: Result<ResourceClaim, Failure>,
        now: Moment,
    ) {
        let is_gone = |claim: &ResourceClaim| self.view.is_gone(&reference(&claim.metadata).uid);
        match result.and_then(|claim| if is_gone(&claim) { Err(Failure::Gone) } else { Ok(claim) }) {
            Ok(claim) => {
                let at = reference(&claim.metadata);
                self.holds.written(gpu, &at, now);
                self.made_by_us(Box::new(claim), now);
            }
            Err(failure) => {
                self.recorder.trouble(format!("{gpu} cannot be held: {}", failure.words()));
                self.holds.failed(gpu, now);
                for key in self.tracker.units_on(gpu) {
                    self.cancel(&key, now);
                }
            }
        }
    }

    /// Ends the look under way once the watch has brought its mark.
    pub(in crate::controller) fn look(&mut self, now: Moment) {
        match self.holds.mark().map_or(Sight::NotYet, |mark| self.view.sight(mark)) {
            Sight::NotYet => {}
            Sight::Seen => self.looked(true, now),
            Sight::Gone => self.looked(false, now),
        }
    }

    /// `well`: what is known is at least as of when the look began.
    pub(in crate::controller) fn looked(&mut self, well: bool, now: Moment) {
        let contested = if well { self.contestable(self.holds.looking()) } else { BTreeSet::new() };
        let others = |gpu: &GpuRef| match (self.view.is_anothers(gpu), contested.contains(gpu)) {
            (true, _) => Others::Named,
            (false, true) => Others::MayCome,
            (false, false) => Others::Nobody,
        };
        for gpu in self.holds.looked(well.then_some(&others as _), now) {
            for key in self.tracker.units_on(&gpu) {
                self.cancel(&key, now);
            }
        }
    }

    /// A claim that was promised exists, with its allocation or without.
    fn settle_created(&mut self, uid: &ClaimUid, now: Moment) {
        match self.view.claim(uid).is_some_and(|claim| !claim.is_new()) {
            // Under its own name: should the allocation have failed, that is to be made sure of.
            true => self.tracker.confirm_at(uid, now),
            // Its pod has gone meanwhile: what it has counts under its own name.
            false => self.confirm_absent(uid, now),
        }
    }

    /// An allocation that was in doubt does not stand in the API, and will not.
    pub(super) fn confirm_absent(&mut self, uid: &ClaimUid, now: Moment) {
        let open = self.view.claim(uid).is_none_or(|claim| claim.allocation.is_none());
        if self.tracker.confirmed(uid) && open {
            self.capacity.set_grants(uid, Vec::new());
            self.review_users(uid, now);
        }
    }

    fn not_written(&mut self, uid: &ClaimUid, failure: &Failure, now: Moment) {
        let verdict = self.tracker.failed(uid, failure, stored(&self.view, uid), now);
        match verdict {
            Verdict::Wait => {}
            Verdict::NotWritten => self.confirm_absent(uid, now),
            Verdict::Cancel(key) => self.cancel(&key, now),
            Verdict::Refused(key) => {
                if let Some(claim) = self.view.claim(uid) {
                    self.recorder.not_taken(claim, self.view.pods_of(claim), &failure.words(), now);
                }
                self.cancel(&key, now);
            }
        }
    }
}
