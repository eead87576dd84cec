//! What became of the writes.

use std::collections::BTreeSet;

use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::cluster::feed::{Change, WatchEvent};
use crate::controller::Moment;
use crate::controller::core::{Core, stored};
use crate::controller::holds::Others;
use crate::controller::tracker::{FailedWrite, RETRY_AFTER};
use crate::controller::view::claim::{reference, version};
use crate::controller::view::{Claim, GpuRef, Sight};
use crate::controller::write::{Failure, WriteOutcome};
use crate::model::claim::{ClaimKey, ClaimRef};

impl Core {
    pub fn done(&mut self, outcome: WriteOutcome, now: Moment) {
        let gone = outcome.gone(|uid| self.view.claim_key(uid));
        self.take_in(outcome, now);
        if let Some(claim) = gone {
            self.not_there(claim, now);
        }
    }

    fn take_in(&mut self, outcome: WriteOutcome, now: Moment) {
        match outcome {
            WriteOutcome::Held(gpu, result) => self.held(&gpu, result.map(|claim| *claim), now),
            // The watch is to bring what was stored: taken in here, it would seem to have.
            WriteOutcome::BarrierWritten(_, Ok(claim)) => self.holds.marked(version(&claim.metadata)),
            WriteOutcome::BarrierWritten(_, Err(_)) => self.looked(false, now),
            WriteOutcome::Released(_, _, Ok(()) | Err(Failure::Gone)) => {}
            WriteOutcome::Released(gpu, _, Err(_)) => self.holds.not_released(&gpu, now + RETRY_AFTER),
            WriteOutcome::Allocated(key, Ok(claim))
            | WriteOutcome::Cleared(key, Ok(claim))
            | WriteOutcome::Marked(key, Ok(claim)) => {
                self.tracker.succeeded(key);
                self.written(key, claim, now);
            }
            WriteOutcome::Evicted(pod, result) => self.evicted(&pod, result, now),
            WriteOutcome::Created(key, Ok(claim)) => {
                // The watch need not have brought it before.
                self.made_by_us(claim, now);
                self.tracker.succeeded(key);
                self.settle_created(key, now);
            }
            WriteOutcome::Allocated(key, Err(failure))
            | WriteOutcome::Cleared(key, Err(failure))
            | WriteOutcome::Marked(key, Err(failure))
            | WriteOutcome::Created(key, Err(failure)) => self.not_written(key, &failure, now),
            WriteOutcome::Moved(pod, result) => {
                self.move_answered(&pod, result.err().map(|failure| failure.words()), now);
            }
        }
    }

    /// The API server does not have the claim any more. The watch need not bring that: an answer that came late may have
    /// told of a claim after the list that it is missing from.
    fn not_there(&mut self, claim: ClaimKey, now: Moment) {
        let Some(at) = self.view.claim(claim).and_then(Claim::version) else { return };
        let ClaimRef { namespace, name, uid } = at.claim.clone();
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
        if self.view.claim_key(&reference(&claim.metadata).uid).is_some() {
            self.apply(Change::Claim(WatchEvent::Stored(claim)), now);
        }
    }

    /// A write of ours on a claim was done. Its version is another now: what was meant for an older one, and is in
    /// doubt, comes to nothing.
    pub(in crate::controller) fn written(&mut self, key: ClaimKey, claim: Box<ResourceClaim>, now: Moment) {
        self.changed(claim, now);
        self.confirm_absent(key);
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
        let requested = self.view.named_by_bind_requests();
        let is_named = |gpu: &GpuRef| self.view.is_anothers(gpu) || requested.contains(gpu);
        let others = |gpu: &GpuRef| match (is_named(gpu), contested.contains(gpu)) {
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

    /// A claim that was planned was created, with its allocation or without.
    fn settle_created(&mut self, claim: ClaimKey, now: Moment) {
        match self.view.claim(claim).is_some_and(|claim| !claim.is_planned()) {
            // Should the allocation have failed, that is to be made sure of.
            true => self.tracker.confirm_at(claim, now),
            // Its pod has gone meanwhile: what was created counts as a claim that nobody planned.
            false => self.confirm_absent(claim),
        }
    }

    /// An allocation that was in doubt does not stand in the API, and will not.
    pub(super) fn confirm_absent(&mut self, claim: ClaimKey) {
        let open = self.view.claim(claim).is_none_or(|claim| claim.allocation.is_none());
        if self.tracker.confirmed(claim) && open {
            self.set_grants(claim, Vec::new());
            self.mark_users(claim);
        }
    }

    fn not_written(&mut self, key: ClaimKey, failure: &Failure, now: Moment) {
        let verdict = self.tracker.failed(key, failure, stored(&self.view, key), now);
        match verdict {
            FailedWrite::Wait => {}
            FailedWrite::NotWritten => self.confirm_absent(key),
            FailedWrite::NotCreated => {
                if let (Failure::Refused(words), Some(claim)) = (failure, self.view.claim(key)) {
                    self.recorder.not_taken(claim, self.view.pods_of(claim), words, now);
                }
                self.confirm_absent(key);
            }
            FailedWrite::Cancel(unit) => self.cancel(&unit, now),
            FailedWrite::Refused(unit) => {
                if let Some(claim) = self.view.claim(key) {
                    self.recorder.not_taken(claim, self.view.pods_of(claim), &failure.words(), now);
                }
                self.cancel(&unit, now);
            }
        }
    }
}
