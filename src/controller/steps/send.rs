//! What of the plans can be written now, and in which state of its claim.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::{AllocationResult, DeviceClaim, ResourceClaim, ResourceClaimSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};

use crate::cluster::allocation::Marks;
use crate::controller::Moment;
use crate::controller::core::Core;
use crate::controller::grant::{Configs, allocation};
use crate::controller::tracker::Writing;
use crate::controller::view::claim::{GIVEN_UP, WAITING};
use crate::controller::view::groups::QUEUE_OF_KAI;
use crate::controller::view::{Asks, Claim, Presence, PublishedGpu};
use crate::controller::write::{FINALIZER, Round, Write};
use crate::model::claim::{ClaimKey, PodRef};
use crate::slices::BoardParts;

impl Core {
    pub(in crate::controller) fn send(
        &mut self,
        now: Moment,
        round: &mut Round,
        ids: &mut dyn FnMut() -> String,
    ) {
        let (view, holds) = (&self.view, &self.holds);
        let writable = |claim: &&Claim| !claim.is_ending() && matches!(claim.asks, Asks::Shares(_));
        let at = |claim: ClaimKey| view.claim(claim).filter(writable).map(|claim| &claim.at);
        for claim in self.tracker.due(|gpu| holds.is_held(gpu), at, now) {
            if let Some(write) = self.allocate(claim, ids) {
                self.tracker.begin(claim, Writing::Allocation);
                round.writes.push(write);
            }
        }
        self.create_early(now, round);
        self.make_sure(now, round);
        for key in self.tracker.to_clear() {
            let claim = self.view.claim(key).filter(|claim| claim.is_placed() && !claim.is_reserved());
            match claim.and_then(Claim::version) {
                Some(at) if self.tracker.has_room() => {
                    round.writes.push(Write::Clear(key, at.clone()));
                    self.tracker.begin(key, Writing::Clearing);
                }
                Some(_) => {}
                None => self.tracker.keep(key),
            }
        }
        self.mark(now, round);
    }

    /// Writes on claims why they wait, a few at a time: those that can be placed go first.
    pub(in crate::controller) fn mark(&mut self, now: Moment, round: &mut Round) {
        for (key, text) in self.tracker.take_reasons(now) {
            let Some(claim) = self.view.claim(key) else { continue };
            let Some(at) = claim.version() else { continue };
            let waits =
                claim.allocation.is_none() && !claim.is_ending() && self.tracker.planned(key).is_none();
            if waits && claim.waiting.as_ref() != Some(&text) {
                let annotations = vec![(WAITING.to_owned(), Some(text.clone()))];
                let marks = Marks { finalizers: None, annotations };
                round.writes.push(Write::Mark(key, at.clone(), marks));
                self.tracker.begin(key, Writing::Reason(text));
            }
        }
    }

    /// Creates claims before they have a place, for pods whose scheduler has forgotten them by then.
    fn create_early(&mut self, now: Moment, round: &mut Round) {
        for key in self.view.wanted_early() {
            if !self.tracker.has_room() || !self.tracker.may_create(key, now) {
                continue;
            }
            let Some(claim) = self.view.claim(key) else { continue };
            let (Presence::Planned { pod, name }, Asks::Shares(spec)) = (&claim.at, &claim.asks) else {
                continue;
            };
            if let Some(write) = self.created(key, (pod, name), spec, None) {
                self.tracker.begin(key, Writing::Creation);
                round.writes.push(write);
            }
        }
    }

    /// Changes claims whose last write was not answered: after that it cannot be done any more.
    fn make_sure(&mut self, now: Moment, round: &mut Round) {
        for key in self.tracker.to_confirm(now) {
            let Some(at) = self.view.claim(key).and_then(Claim::version).cloned() else {
                self.confirm_absent(key);
                continue;
            };
            let version = Some(at.resource_version.clone());
            let marks = Marks { finalizers: None, annotations: vec![(GIVEN_UP.to_owned(), version)] };
            round.writes.push(Write::Mark(key, at, marks));
            self.tracker.begin(key, Writing::Confirmation);
        }
    }

    pub(in crate::controller) fn allocate(
        &mut self,
        key: ClaimKey,
        ids: &mut dyn FnMut() -> String,
    ) -> Option<Write> {
        let claim = self.view.claim(key)?;
        let planned = self.tracker.planned(key)?;
        let Asks::Shares(spec) = &claim.asks else { return None };
        // A GPU that is cut into MIG devices has no shares, and its results no share ids.
        let keeps = |gpu: &PublishedGpu| {
            gpu.grantable.keeps_shares() || matches!(gpu.grantable.parts, BoardParts::Mig(_))
        };
        let keeps = planned.gpus().all(|gpu| self.view.gpu(&gpu).is_some_and(keeps));
        let made = allocation(
            &planned.node,
            &planned.given,
            Configs { claim: spec, classes: self.view.classes() },
            keeps.then_some(ids as _),
        );
        self.tracker.tries(key, &claim.at);
        let at = match &claim.at {
            Presence::Planned { pod, name } => return self.created(key, (pod, name), spec, Some(made)),
            Presence::Exists(at) => at.clone(),
        };
        let mut finalizers = claim.meta.finalizers.clone();
        let protected = finalizers.iter().any(|one| one == FINALIZER);
        finalizers.push(FINALIZER.to_owned());
        let marks = Marks {
            finalizers: (!protected).then_some(finalizers),
            annotations: claim.waiting.iter().map(|_| (WAITING.to_owned(), None)).collect(),
        };
        Some(Write::Allocate { claim: key, at, marks, allocation: Box::new(made) })
    }

    /// The claim of this name that is planned for a pod, with everything that it needs from the beginning: the queue that
    /// KAI charges it to, too, without which KAI does not bind a pod that names its claim.
    pub(in crate::controller) fn created(
        &self,
        key: ClaimKey,
        (pod, name): (&PodRef, &str),
        spec: &DeviceClaim,
        allocation: Option<AllocationResult>,
    ) -> Option<Write> {
        let pod = self.view.pod(&pod.uid)?;
        let queue = pod.grouping.queue.as_ref().filter(|_| self.view.is_grouped(pod));
        let labels = queue.map(|queue| BTreeMap::from([(QUEUE_OF_KAI.to_owned(), queue.clone())]));
        let pod = &pod.at;
        let owner = OwnerReference {
            api_version: "v1".to_owned(),
            kind: "Pod".to_owned(),
            name: pod.name.clone(),
            uid: pod.uid.to_string(),
            controller: Some(true),
            ..OwnerReference::default()
        };
        let metadata = ObjectMeta {
            namespace: Some(pod.namespace.clone()),
            name: Some(name.to_owned()),
            labels,
            finalizers: Some(vec![FINALIZER.to_owned()]),
            owner_references: Some(vec![owner]),
            ..ObjectMeta::default()
        };
        let spec = ResourceClaimSpec { devices: Some(spec.clone()) };
        let made = ResourceClaim { metadata, spec: Some(spec), status: None };
        Some(Write::Create(key, Box::new(made), allocation.map(Box::new)))
    }
}
