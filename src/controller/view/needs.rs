//! What claims and pods want of kube-scheduler, as far as that is known here.

use super::class::{self, Need, Sought};
use super::{Asks, Claim, ClusterView, Pod};

impl ClusterView {
    /// What a claim wants of the scheduler.
    pub fn needs_of(&self, claim: &Claim) -> impl Iterator<Item = Need> {
        let requests = match &claim.asks {
            Asks::Scheduler(requests) => &requests[..],
            Asks::Shares(_) | Asks::Unreadable(_) => &[],
        };
        requests.iter().filter_map(|request| class::need(request, self.classes.others()))
    }

    /// Claims that a pod names and that have nothing yet.
    pub fn unallocated_claims(&self, pod: &Pod) -> impl Iterator<Item = &Claim> {
        let claims = pod.requested.claims.iter().filter_map(|name| self.claim_named(&pod.at.namespace, name));
        claims.filter(|claim| claim.allocation.is_none())
    }

    /// What a pod wants of the scheduler by its containers' limits. Of classes that are known: there is nothing of the
    /// others.
    pub fn needs_of_limits(&self, pod: &Pod) -> impl Iterator<Item = Need> {
        let resources = pod.requested.resources.iter();
        resources.filter_map(|(name, count)| class::need_of_resource(name, *count, self.classes.others()))
    }

    /// It was given all that it wants of the scheduler.
    pub fn needs_nothing(&self, pod: &Pod) -> bool {
        let mut of_claims = self.unallocated_claims(pod).flat_map(|claim| self.needs_of(claim));
        of_claims.next().is_none() && self.needs_of_limits(pod).next().is_none()
    }

    /// All pods that name the claim are gated. False: there is none, and who names it may not be known yet.
    fn is_gated(&self, claim: &Claim) -> bool {
        self.pods.are_gated(claim.namespace(), claim.name())
    }

    /// What the scheduler may be giving to claims just now: those without an allocation. Holds of ours that are being
    /// written are no pod's, and the scheduler gives nothing to pods that are gated.
    pub fn sought_by_claims(&self) -> Sought {
        let mut sought = Sought::default();
        let open =
            |claim: &&Claim| claim.allocation.is_none() && claim.hold.is_none() && !self.is_gated(claim);
        for claim in self.claims.iter().filter(open) {
            match &claim.asks {
                Asks::Scheduler(requests) => {
                    let choices = requests.iter().flatten();
                    choices.for_each(|one| sought.add(class::selectors(one, self.classes.others())));
                }
                // We refuse it; the scheduler would take the alternative.
                Asks::Shares(devices) if class::goes_without(devices, self.classes()) => sought.add(None),
                Asks::Shares(_) | Asks::Unreadable(_) => {}
            }
        }
        sought
    }

    /// The same of pods alone that ask by their containers' limits: their claims are made as they are bound.
    pub fn sought_by_limits(&self) -> Sought {
        let mut sought = Sought::default();
        for name in self.pods.iter().filter(|pod| !pod.gated).flat_map(|pod| pod.requested.resources.keys()) {
            if let Some(class) = class::of_resource(name, self.classes.others()) {
                sought.add(Some(class.selectors.clone().into()));
            }
        }
        sought
    }
}
