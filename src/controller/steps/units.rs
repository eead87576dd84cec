//! Units: where their pods take room, whether they wait, and the plans that they get and lose.

use std::collections::BTreeSet;

use crate::controller::Moment;
use crate::controller::core::{Core, stored, unit};
use crate::controller::gang::{Minimum, Placed};
use crate::controller::pods::{MemberAsks, RoomChange};
use crate::controller::queue::{TriedBy, UnitKey, Waiter};
use crate::controller::tracker::Plan;
use crate::controller::view::groups::Family;
use crate::controller::view::{Claim, Pod};
use crate::model::claim::ClaimKey;
use crate::model::names::{NodeName, PodUid};

impl Core {
    /// A claim has changed: the next round looks at the pods that name it.
    pub(super) fn mark_users(&mut self, claim: ClaimKey) {
        self.mark_users_but(claim, &BTreeSet::new());
    }

    /// The same of those that are not among these pods.
    fn mark_users_but(&mut self, claim: ClaimKey, but: &BTreeSet<PodUid>) {
        let Some(claim) = self.view.claim(claim) else { return };
        let holders = &mut self.reserves.evictions.preempting.holders;
        self.capacity.gpus_of(claim.key).iter().for_each(|gpu| holders.touch(&gpu.node));
        let pods = self.view.pods_of(claim).filter(|pod| !but.contains(&pod.at.uid));
        pods.for_each(|pod| self.pods.mark(&pod.at));
    }

    /// Where the pod takes room: on its node, or on the one that its claims are for.
    pub(super) fn recount(&mut self, uid: &PodUid) {
        let place = self.view.pod(uid).and_then(|pod| Some((self.place_of(pod)?, pod.room)));
        let ports = place.as_ref().zip(self.view.ports_of(uid)).map(|((node, _), ports)| (node, ports));
        self.pods.ports.set(uid, ports);
        self.note_neighbour(uid, place.as_ref().map(|(node, _)| node));
        let RoomChange { given, taken } = self.pods.set_place(uid, place);
        let changed = given.iter().chain(&taken);
        changed.for_each(|(node, _)| self.reserves.evictions.preempting.holders.touch(node));
        if let Some((node, room)) = given {
            self.capacity.give_room(&node, room);
        }
        if let Some((node, room)) = taken {
            self.capacity.take_room(&node, room);
        }
    }

    fn place_of(&self, pod: &Pod) -> Option<NodeName> {
        if let Some(node) = &pod.node {
            return Some(node.clone());
        }
        if let Some(node) = self.tracker.node_of(&self.pods.unit_of(&pod.at.uid), &pod.at.uid) {
            return Some(node.clone());
        }
        // One that is gated goes nowhere yet, whoever else has its claims.
        let names = pod.requested.claims.iter().filter(|_| !pod.gated);
        let claims = names.filter_map(|name| self.view.claim_named(&pod.at.namespace, name));
        let placed = claims.filter(|claim| claim.is_placed());
        placed.filter_map(|claim| claim.allocation.as_ref()?.node.clone()).next()
    }

    /// Does the pod wait for us? Or for a whole GPU?
    pub(in crate::controller) fn review(&mut self, uid: &PodUid, now: Moment) {
        let Some(pod) = self.view.pod(uid) else { return };
        let claims = self.view.claims_of(pod);
        let open = |claim: &&Claim| {
            claim.is_shares()
                && claim.allocation.is_none()
                && !claim.is_ending()
                && !self.tracker.is_decided(claim.key)
        };
        let asks = match &claims {
            Some(claims) if claims.iter().any(|claim| claim.is_shares()) => MemberAsks::Shares,
            Some(_) if !pod.requested.unnamed => MemberAsks::Nothing,
            Some(_) | None => MemberAsks::Unknown,
        };
        self.pods.set_asks(uid, asks);
        let waits = pod.is_ready() && claims.as_ref().is_some_and(|claims| claims.iter().any(open));
        match waits {
            true => {
                let minimum = self.view.minimum(pod);
                let key = unit(pod, &minimum);
                self.queue.add(uid, key, waiter(pod, minimum), now);
            }
            false => self.queue.remove(uid),
        }
        self.note_needs(uid);
    }

    /// Pods of a gang that have their place, and those that ask for no share (a launcher). In each round each gang is
    /// asked: no claim is looked up here.
    pub(in crate::controller) fn placed(&self, key: &UnitKey) -> Placed {
        let has_place = |pod: &PodUid| !self.queue.contains(pod) && self.pods.has_place(pod);
        let mut placed = Placed::default();
        if let UnitKey::Pod(_) = key {
            return placed;
        }
        for (uid, asks) in self.pods.members(key) {
            let Some(pod) = self.view.pod(uid).filter(|pod| !pod.ending) else { continue };
            let part = pod.gang().and_then(|gang| gang.part.as_deref());
            match asks {
                MemberAsks::Shares if has_place(uid) => placed.add(part),
                MemberAsks::Nothing => placed.add_other(part),
                MemberAsks::Shares | MemberAsks::Unknown => {}
            }
        }
        placed
    }

    /// A claim has lost its allocation: of a gang of which no pod is bound, the others lose theirs too. A part of it that
    /// kept its GPUs would keep them from whoever could start.
    pub(super) fn take_back_gangs(&mut self, claim: ClaimKey, now: Moment) {
        let Some(claim) = self.view.claim(claim) else { return };
        let units = self.view.pods_of(claim).map(|pod| self.pods.unit_of(&pod.at.uid));
        let gangs: BTreeSet<UnitKey> = units.filter(|key| matches!(key, UnitKey::Gang { .. })).collect();
        for gang in gangs {
            let pods: Vec<&Pod> =
                self.pods.members(&gang).filter_map(|(uid, _)| self.view.pod(uid)).collect();
            let claims = pods.iter().flat_map(|pod| self.view.claims_of(pod).into_iter().flatten());
            let claims: Vec<&Claim> = claims.filter(|claim| claim.is_shares()).collect();
            let is_bound = pods.iter().any(|pod| pod.node.is_some() && !pod.ending);
            if is_bound || claims.iter().any(|claim| claim.is_reserved()) {
                continue;
            }
            let given = claims.iter().filter(|claim| claim.allocation.is_some() && !claim.is_ending());
            let given: Vec<ClaimKey> = given.map(|claim| claim.key).collect();
            given.into_iter().for_each(|claim| self.tracker.clear(claim, now));
        }
    }

    // Plans.

    pub(in crate::controller) fn adopt(&mut self, key: UnitKey, plan: Plan, now: Moment) {
        let claims: Vec<ClaimKey> = plan.claims.keys().copied().collect();
        let pods: BTreeSet<PodUid> = plan.pods.keys().cloned().collect();
        for (key, claim) in &plan.claims {
            self.set_grants(*key, claim.grants());
            claim.gpus().for_each(|gpu| self.holds.want(&gpu));
        }
        self.tracker.plan(key, plan, now);
        self.review_all(&pods, &claims, now);
    }

    /// Gives up what was decided for a unit and is not in the API yet. What is there of a gang is taken back.
    pub(in crate::controller) fn cancel(&mut self, key: &UnitKey, now: Moment) {
        let Some(cancelled) = self.tracker.cancel(key, |claim| stored(&self.view, claim), now) else {
            return;
        };
        cancelled.freed.into_iter().for_each(|claim| self.set_grants(claim, Vec::new()));
        self.review_all(&cancelled.pods.into_iter().collect(), &cancelled.claims, now);
    }

    /// Something was decided for a unit, or taken back: its pods are looked at, and whoever else names its claims is in
    /// the next round.
    fn review_all(&mut self, pods: &BTreeSet<PodUid>, claims: &[ClaimKey], now: Moment) {
        for pod in pods {
            self.recount(pod);
            self.review(pod, now);
        }
        claims.iter().for_each(|claim| self.mark_users_but(*claim, pods));
    }
}

fn waiter(pod: &Pod, minimum: Minimum) -> Waiter {
    let part = pod.gang().and_then(|gang| gang.part.clone());
    Waiter { priority: pod.standing.priority, tried: tried_by(pod), created: pod.created, minimum, part }
}

/// Volcano tries the pods of a group by the number at the end of their names, where that has three parts or more, KAI the
/// oldest first. Both try no others where one of the first has no node: these have to be the ones with shares.
pub(super) fn tried_by(pod: &Pod) -> TriedBy {
    match pod.gang().map(|gang| gang.family) {
        Some(Family::Volcano) => number(pod.at.name.as_str()).map_or(TriedBy::Any, TriedBy::Number),
        // kube-scheduler has no such order, whatever name the group goes by.
        Some(Family::Kai) if !pod.grouping.scheduler.is_empty() => TriedBy::Age,
        Some(Family::Kai | Family::Ours | Family::Kubernetes | Family::Kueue) | None => TriedBy::Any,
    }
}

fn number(name: &str) -> Option<u64> {
    let mut parts = name.rsplitn(3, '-');
    let number = parts.next()?;
    parts.nth(1)?;
    number.parse().ok()
}
