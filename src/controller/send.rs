//! What of the plans can be written now, and in which state of its claim.

use k8s_openapi::api::resource::v1::{AllocationResult, DeviceClaim, ResourceClaim, ResourceClaimSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};

use super::Moment;
use super::core::Core;
use super::grant::allocation;
use super::plan::{Next, PlannedClaim};
use super::round::Round;
use super::world::claim::{GIVEN_UP, WAITING};
use super::world::{Asks, Claim};
use super::write::Write;
use crate::cluster::allocation::Marks;
use crate::model::names::ClaimUid;

/// Claims that are written at once, or wait for it.
const IN_FLIGHT_MAX: usize = 256;
/// With so many under way nothing is written for people only.
const MARKS_IN_FLIGHT_MAX: usize = 16;
/// The controller-manager clears what has it when its last user has ended.
const FINALIZER: &str = "resource.kubernetes.io/delete-protection";

impl Core {
    pub(super) fn send(&mut self, now: Moment, round: &mut Round, ids: &mut dyn FnMut() -> String) {
        for uid in self.due(now) {
            if let Some(write) = self.allocate(&uid, ids) {
                self.in_flight.insert(uid);
                round.writes.push(write);
            }
        }
        self.make_sure(now, round);
        let clear: Vec<ClaimUid> =
            self.to_clear.iter().filter(|uid| !self.in_flight.contains(*uid)).cloned().collect();
        for uid in clear {
            match self.world.claims.get(&uid).filter(|claim| claim.is_placed() && !claim.is_reserved()) {
                Some(claim) if self.in_flight.len() < IN_FLIGHT_MAX => {
                    round.writes.push(Write::Clear(claim.at.clone()));
                    self.in_flight.insert(uid);
                }
                Some(_) => {}
                None => drop(self.to_clear.remove(&uid)),
            }
        }
        self.mark(now, round);
    }

    /// Claims whose allocation can be written now, as many as there is room for.
    fn due(&self, now: Moment) -> Vec<ClaimUid> {
        let room = IN_FLIGHT_MAX.saturating_sub(self.in_flight.len());
        let mut due = Vec::new();
        for (_, plan) in self.plans.iter() {
            if due.len() >= room {
                break;
            }
            let open = plan.claims.iter().filter(|(uid, claim)| self.is_due(uid, claim, now));
            let open: Vec<ClaimUid> = open.map(|(uid, _)| uid.clone()).collect();
            // A unit comes together, as soon as all of its GPUs are ours.
            let held = |claim: &PlannedClaim| claim.done || claim.gpus().all(|gpu| self.holds.is_held(&gpu));
            if !open.is_empty() && plan.claims.values().all(held) {
                due.extend(open);
            }
        }
        due.truncate(room);
        due
    }

    fn is_due(&self, uid: &ClaimUid, planned: &PlannedClaim, now: Moment) -> bool {
        let writable = |claim: &Claim| {
            planned.next.may(&claim.at.resource_version, now)
                && !claim.ending
                && matches!(claim.asks, Asks::Shares(_))
        };
        !planned.done && !self.in_flight.contains(uid) && self.world.claims.get(uid).is_some_and(writable)
    }

    /// Writes on claims why they wait, a few at a time: those that can be placed go first.
    fn mark(&mut self, now: Moment, round: &mut Round) {
        if self.marks_after.is_some_and(|after| now < after) {
            return;
        }
        let room = MARKS_IN_FLIGHT_MAX.saturating_sub(self.in_flight.len());
        let free = self.to_mark.keys().filter(|uid| !self.in_flight.contains(*uid));
        let due: Vec<ClaimUid> = free.take(room).cloned().collect();
        for uid in due {
            let (Some(text), Some(claim)) = (self.to_mark.remove(&uid), self.world.claims.get(&uid)) else {
                continue;
            };
            let waits = claim.allocation.is_none() && !claim.ending && self.plans.of(&uid).is_none();
            if waits && claim.waiting.as_ref() != Some(&text) {
                self.marking.insert(uid.clone(), text.clone());
                let marks = Marks { finalizers: None, annotations: vec![(WAITING.to_owned(), Some(text))] };
                round.writes.push(Write::Mark(claim.at.clone(), marks));
                self.in_flight.insert(uid);
            }
        }
    }

    /// Changes claims whose last write was not answered: after that it cannot be done any more.
    fn make_sure(&mut self, now: Moment, round: &mut Round) {
        let due = |due: &Option<Moment>| due.is_some_and(|due| due <= now);
        let lost = self.doubtful.iter().filter(|(uid, lost)| due(lost) && !self.in_flight.contains(*uid));
        let lost: Vec<ClaimUid> = lost.map(|(uid, _)| uid.clone()).collect();
        for uid in lost {
            let Some(claim) = self.world.claims.get(&uid).filter(|claim| !claim.is_new()) else {
                self.sure(&uid, now);
                continue;
            };
            let version = Some(claim.at.resource_version.clone());
            let marks = Marks { finalizers: None, annotations: vec![(GIVEN_UP.to_owned(), version)] };
            round.writes.push(Write::Mark(claim.at.clone(), marks));
            self.in_flight.insert(uid);
        }
    }

    fn allocate(&mut self, uid: &ClaimUid, ids: &mut dyn FnMut() -> String) -> Option<Write> {
        let claim = self.world.claims.get(uid)?;
        let planned = self.plans.of(uid)?;
        let Asks::Shares(spec) = &claim.asks else { return None };
        let keeps =
            planned.gpus().all(|gpu| self.world.gpu(&gpu).is_some_and(|gpu| gpu.grantable.keeps_shares));
        let made = allocation(
            &planned.node,
            &planned.given,
            (spec, &self.world.class.config),
            keeps.then_some(ids as _),
        );
        if let Some(planned) = self.plans.of_mut(uid) {
            planned.next = Next::Newer { than: claim.at.resource_version.clone(), again: None };
        }
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
    fn created(&self, claim: &Claim, spec: &DeviceClaim, allocation: AllocationResult) -> Option<Write> {
        let pod = self.world.pods.get(claim.owner.as_ref()?)?;
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
