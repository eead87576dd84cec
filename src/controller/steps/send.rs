//! What of the plans can be written now, and in which state of its claim.

use k8s_openapi::api::resource::v1::{AllocationResult, DeviceClaim, ResourceClaim, ResourceClaimSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};

use crate::cluster::allocation::Marks;
use crate::controller::Moment;
use crate::controller::core::Core;
use crate::controller::grant::{Configs, allocation};
use crate::controller::tracker::Writing;
use crate::controller::view::claim::{GIVEN_UP, WAITING};
use crate::controller::view::{Asks, Claim};
use crate::controller::write::{FINALIZER, Round, Write};
use crate::model::names::ClaimUid;

impl Core {
    pub(in crate::controller) fn send(
        &mut self,
        now: Moment,
        round: &mut Round,
        ids: &mut dyn FnMut() -> String,
    ) {
        let (view, holds) = (&self.view, &self.holds);
        let writable = |claim: &&Claim| !claim.ending && matches!(claim.asks, Asks::Shares(_));
        let version = |uid: &ClaimUid| {
            let claim = view.claim(uid).filter(writable)?;
            Some(claim.at.resource_version.as_str())
        };
        for uid in self.tracker.due(|gpu| holds.is_held(gpu), version, now) {
            if let Some(write) = self.allocate(&uid, ids) {
                self.tracker.begin(&uid, Writing::Allocation);
                round.writes.push(write);
            }
        }
        self.make_sure(now, round);
        for uid in self.tracker.to_clear() {
            match self.view.claim(&uid).filter(|claim| claim.is_placed() && !claim.is_reserved()) {
                Some(claim) if self.tracker.has_room() => {
                    round.writes.push(Write::Clear(claim.at.clone()));
                    self.tracker.begin(&uid, Writing::Clearing);
                }
                Some(_) => {}
                None => self.tracker.keep(&uid),
            }
        }
        self.mark(now, round);
    }

    /// Writes on claims why they wait, a few at a time: those that can be placed go first.
    pub(in crate::controller) fn mark(&mut self, now: Moment, round: &mut Round) {
        for (uid, text) in self.tracker.take_reasons(now) {
            let Some(claim) = self.view.claim(&uid) else { continue };
            let waits = claim.allocation.is_none() && !claim.ending && self.tracker.planned(&uid).is_none();
            if waits && claim.waiting.as_ref() != Some(&text) {
                let annotations = vec![(WAITING.to_owned(), Some(text.clone()))];
                let marks = Marks { finalizers: None, annotations };
                round.writes.push(Write::Mark(claim.at.clone(), marks));
                self.tracker.begin(&uid, Writing::Reason(text));
            }
        }
    }

    /// Changes claims whose last write was not answered: after that it cannot be done any more.
    fn make_sure(&mut self, now: Moment, round: &mut Round) {
        for uid in self.tracker.to_confirm(now) {
            let Some(claim) = self.view.claim(&uid).filter(|claim| !claim.is_new()) else {
                self.confirm_absent(&uid, now);
                continue;
            };
            let version = Some(claim.at.resource_version.clone());
            let marks = Marks { finalizers: None, annotations: vec![(GIVEN_UP.to_owned(), version)] };
            round.writes.push(Write::Mark(claim.at.clone(), marks));
            self.tracker.begin(&uid, Writing::Confirmation);
        }
    }

    pub(in crate::controller) fn allocate(
        &mut self,
        uid: &ClaimUid,
        ids: &mut dyn FnMut() -> String,
    ) -> Option<Write> {
        let claim = self.view.claim(uid)?;
        let planned = self.tracker.planned(uid)?;
        let Asks::Shares(spec) = &claim.asks else { return None };
        let keeps =
            planned.gpus().all(|gpu| self.view.gpu(&gpu).is_some_and(|gpu| gpu.grantable.keeps_shares));
        let made = allocation(
            &planned.node,
            &planned.given,
            Configs { claim: spec, class: &self.view.class().config },
            keeps.then_some(ids as _),
        );
        self.tracker.tries(uid, &claim.at.resource_version);
        if claim.is_new() {
            return self.created(claim, spec, made);
        }
        let mut finalizers = claim.finalizers.clone();
        let protected = finalizers.iter().any(|one| one == FINALIZER);
        finalizers.push(FINALIZER.to_owned());
        let marks = Marks {
            finalizers: (!protected).then_some(finalizers),
            annotations: claim.waiting.iter().map(|_| (WAITING.to_owned(), None)).collect(),
        };
        Some(Write::Allocate { at: claim.at.clone(), marks, allocation: Box::new(made) })
    }

    /// A claim that was promised to a pod, with everything that it needs from the beginning.
    pub(in crate::controller) fn created(
        &self,
        claim: &Claim,
        spec: &DeviceClaim,
        allocation: AllocationResult,
    ) -> Option<Write> {
        let pod = self.view.pod(claim.owner.as_ref()?)?;
        let owner = OwnerReference {
            api_version: "v1".to_owned(),
            kind: "Pod".to_owned(),
            name: pod.at.name.clone(),
            uid: pod.at.uid.to_string(),
            controller: Some(true),
            ..OwnerReference::default()
        };
        let metadata = ObjectMeta {
            namespace: Some(claim.at.claim.namespace.clone()),
            name: Some(claim.at.claim.name.clone()),
            finalizers: Some(vec![FINALIZER.to_owned()]),
            owner_references: Some(vec![owner]),
            ..ObjectMeta::default()
        };
        let spec = ResourceClaimSpec { devices: Some(spec.clone()) };
        let made = ResourceClaim { metadata, spec: Some(spec), status: None };
        Some(Write::Create(claim.uid().clone(), Box::new(made), Box::new(allocation)))
    }
}
