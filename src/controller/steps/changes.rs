//! What a change in the API means for each owner of state.

use crate::allocate::Policy;
use crate::cluster::feed::{Change, WatchEvent};
use crate::controller::Moment;
use crate::controller::bounds::Bounds;
use crate::controller::classes::POLICY;
use crate::controller::core::Core;
use crate::controller::holds::HoldPhase;
use crate::controller::tracker::{Arrival, as_grant};
use crate::controller::view::{Claim, GpuRef, News, NodeState, Pod, Use};
use crate::feasible::Demands;
use crate::model::claim::ClaimKey;
use crate::model::names::{NodeName, PodUid};

impl Core {
    pub fn apply(&mut self, change: Change, now: Moment) {
        let listed = matches!(change, Change::Claim(WatchEvent::Complete));
        for news in self.view.apply(change) {
            self.on_change(news, now);
        }
        if listed {
            // Who has come and gone since the last news?
            self.holds.young_ones().iter().for_each(|gpu| self.invalidate_hold(gpu, now));
        }
    }

    fn on_change(&mut self, news: News, now: Moment) {
        match news {
            News::Claim { key, before } => self.claim(key, before.as_deref(), now),
            News::ClaimGone(claim) => self.claim_gone(&claim, now),
            News::Pod { uid, demands_changed } => {
                self.pod(&uid, now);
                if demands_changed {
                    self.queue.again(&uid);
                }
            }
            News::PodGone(pod) => self.pod_gone(&pod, now),
            News::Node(name) => self.node(&name),
            News::Class(name) => self.class(&name),
            News::OtherClass => {
                // A resource may be given by claims now, or no longer.
                self.node_filter.forget();
                self.capacity.news();
                self.note_all_needs();
            }
            News::Bounds(namespace) => self.bounds(&namespace),
            News::Budgets => self.budgets_changed(),
            News::Trouble(words) => self.recorder.trouble(words),
        }
    }

    pub(in crate::controller) fn class(&mut self, name: &str) {
        self.capacity.news();
        // What its selectors cost may be another now.
        self.purse.forget_all();
        let said = self.view.classes().get(name).and_then(|class| class.policy.as_deref());
        let said = said.map(str::parse::<Policy>);
        if let Some(Err(words)) = said {
            self.recorder.trouble(format!(
                "DeviceClass {name}: annotation {POLICY}: {words}; until then it is {}",
                self.rules.policy
            ));
        }
    }

    /// A namespace may have more than before, or less.
    fn bounds(&mut self, namespace: &str) {
        self.capacity.news();
        for problem in self.view.bounds(namespace).into_iter().flat_map(Bounds::problems) {
            self.recorder.trouble(format!(
                "Namespace {namespace}: annotation {problem}; until then no more shares are placed there"
            ));
        }
    }

    // Claims.

    pub(in crate::controller) fn claim(&mut self, key: ClaimKey, before: Option<&Claim>, now: Moment) {
        if before.is_some_and(Claim::is_planned) {
            self.tracker.created(key);
        }
        let Some(claim) = self.view.claim(key) else { return };
        let named =
            before.into_iter().chain([claim]).flat_map(|one| &one.allocation).flat_map(|one| &one.uses);
        let others: Vec<GpuRef> =
            named.clone().filter(|(_, how)| !how.is_ours()).map(|(gpu, _)| gpu.clone()).collect();
        self.holds.gpus.note(named.map(|(gpu, _)| gpu.clone()));
        if let Some(gpu) = claim.hold.clone() {
            self.hold_changed(&gpu, now);
        }
        others.iter().for_each(|gpu| self.invalidate_hold(gpu, now));
        let Some(claim) = self.view.claim(key) else { return };
        let is_same = before.is_some_and(|before| before.is_same_for_pods(claim));
        if before.is_some_and(Claim::is_shares) && !claim.is_shares() {
            self.no_longer_ours(key, now);
        }
        let Some(claim) = self.view.claim(key) else { return };
        if claim.is_shares() {
            match (&claim.allocation, before.filter(|before| before.allocation.is_some())) {
                (Some(_), _) => self.allocated(key, now),
                (None, Some(before)) => self.cleared(key, before, now),
                (None, None) => {}
            }
        }
        // Of a change that means nothing to pods there may be thousands a second.
        if !is_same {
            self.mark_users(key);
        }
        let Some(claim) = self.view.claim(key) else { return };
        if before.is_some_and(|before| before.policy != claim.policy) {
            self.view.pods_of(claim).for_each(|pod| self.queue.again(&pod.at.uid));
        }
    }

    /// Its class is kube-scheduler's now.
    fn no_longer_ours(&mut self, key: ClaimKey, now: Moment) {
        if let Some(unit) = self.tracker.unit_of(key).cloned() {
            self.cancel(&unit, now);
        }
        self.tracker.gone(key, false);
        self.set_grants(key, Vec::new());
    }

    pub(in crate::controller) fn allocated(&mut self, key: ClaimKey, now: Moment) {
        let Some(claim) = self.view.claim(key) else { return };
        let Some(allocation) = &claim.allocation else { return };
        let shares = allocation.uses.iter().filter_map(|(gpu, how)| match how {
            Use::Share(granted) => Some((gpu.clone(), as_grant(granted))),
            _ => None,
        });
        let shares = shares.collect();
        let (node, is_reserved) = (allocation.node.clone(), claim.is_reserved());
        self.set_grants(key, shares);
        match self.tracker.allocated(key, node.as_ref(), is_reserved, now) {
            Arrival::Expected => {}
            // Somebody else was first.
            Arrival::Elsewhere(unit) => self.cancel(&unit, now),
            Arrival::Complete(plan) => self.tell_placed(&plan, now),
        }
    }

    /// An allocation was taken away, by us or by somebody who did not like it.
    pub(in crate::controller) fn cleared(&mut self, key: ClaimKey, before: &Claim, now: Moment) {
        let ours = self.tracker.cleared(key, now);
        match self.tracker.unit_of(key).cloned() {
            Some(unit) => self.cancel(&unit, now),
            None => {
                self.tracker.confirmed(key);
                self.set_grants(key, Vec::new());
            }
        }
        self.take_back_gangs(key, now);
        let node = before.allocation.as_ref().and_then(|allocation| allocation.node.as_ref());
        let Some(node) = node.filter(|_| !ours) else { return };
        // Cleared because its users ended, or for the sake of a pod that cannot go there?
        let meant = |pod: &Pod| before.users.pods.is_empty() || before.users.pods.contains(&pod.at.uid);
        let refused = |pod: &&Pod| pod.node.is_none() && !pod.ending && meant(pod);
        let pods = self.view.claim(key).into_iter().flat_map(|claim| self.view.pods_of(claim));
        let refused: Vec<Pod> = pods.filter(refused).cloned().collect();
        for pod in &refused {
            self.queue.refusals.exclude(&pod.at.uid, node, self.view.zone_of(node), now);
            self.recorder.taken_back(pod, node, now);
        }
        // Of several pods that use the claim nobody knows which it was.
        if let [pod] = &refused[..] {
            self.note_for_siblings(&pod.at.uid, node, now);
        }
    }

    fn claim_gone(&mut self, claim: &Claim, now: Moment) {
        let key = claim.key;
        self.holds.gpus.note(claim.allocation.iter().flat_map(|one| &one.uses).map(|(gpu, _)| gpu.clone()));
        if let Some(gpu) = &claim.hold {
            self.hold_changed(gpu, now);
        }
        let others = claim.allocation.iter().flat_map(|one| &one.uses).filter(|(_, how)| !how.is_ours());
        others.for_each(|(gpu, _)| self.invalidate_hold(gpu, now));
        if let Some(unit) = self.tracker.unit_of(key).cloned() {
            self.cancel(&unit, now);
        }
        if self.tracker.gone(key, claim.is_planned()) {
            self.set_grants(key, Vec::new());
        }
        self.purse.forget(key);
        self.view.pods_of(claim).for_each(|pod| self.pods.mark(&pod.at));
    }

    // Pods.

    pub(in crate::controller) fn pod(&mut self, uid: &PodUid, now: Moment) {
        self.set_unit(uid, now);
        self.recount(uid);
        self.touch_holders(uid);
        self.review(uid, now);
        self.tell_unpromised(uid, now);
    }

    fn set_unit(&mut self, uid: &PodUid, now: Moment) {
        if let Some(key) = self.view.pod(uid).map(|pod| self.unit_of(pod))
            && let Some(old) = self.pods.set_unit(uid, key)
            && self.tracker.node_of(&old, uid).is_some()
        {
            self.cancel(&old, now);
        }
    }

    /// Takes in what the changes since the last round mean for pods as a whole: of each gang of which something else is
    /// said, and of each pod of which a claim has changed. A pod names up to a thousand claims, and any number of pods
    /// name a claim: each pod is looked at once, and no namespace's pods take more than their part of a round.
    pub(in crate::controller) fn review_marked(&mut self, now: Moment) {
        for uid in self.view.take_regrouped() {
            self.set_unit(&uid, now);
            if let Some(pod) = self.view.pod(&uid) {
                self.pods.mark(&pod.at);
            }
        }
        let view = &self.view;
        for pod in self.pods.take_marked(|pod| view.pod(pod).map_or(0, |pod| pod.requested.claims.len())) {
            self.recount(&pod);
            self.touch_holders(&pod);
            self.review(&pod, now);
            self.tell_unpromised(&pod, now);
        }
    }

    /// The same of all, for who asks without a running controller, and the GPUs. `fed`: when the changes came.
    pub(in crate::controller) fn catch_up(&mut self, fed: Moment, now: Moment) {
        self.start(now);
        self.review_marked(fed);
        while self.pods.has_marked() {
            self.review_marked(fed);
        }
        self.reevaluate_gpus(now);
    }

    fn pod_gone(&mut self, pod: &Pod, now: Moment) {
        let uid = &pod.at.uid;
        let key = self.pods.forget_unit(uid);
        self.pods.neighbours.set(&pod.at.namespace, uid, None, None);
        self.queue.forget(uid);
        self.recorder.forget(uid);
        self.pods.demand.forget(uid);
        if self.tracker.node_of(&key, uid).is_some() {
            self.cancel(&key, now);
        }
        self.recount(uid);
        self.touch_claims(pod);
    }

    // GPUs.

    pub(in crate::controller) fn node(&mut self, name: &NodeName) {
        let state = self.view.node(name);
        self.capacity.set_node(name, state);
        let object = state.and_then(|state| state.object.as_deref());
        let view = &self.view;
        let is_barred = |demands: &Demands| object.is_none_or(|node| view.keeps_off(demands, node).is_some());
        self.node_filter.judge(name, is_barred);
        self.pods.neighbours.node_changed();
        self.reserves.evictions.preempting.holders.touch(name);
        let gpus = state.into_iter().flat_map(|state| state.gpus.keys());
        self.holds.gpus.note(gpus.map(|device| GpuRef::new(name, device)));
    }

    fn hold_changed(&mut self, gpu: &GpuRef, now: Moment) {
        self.holds.gpus.note([gpu.clone()]);
        if !self.holds.has_begun()
            || matches!(self.holds.phase(gpu), Some(HoldPhase::Writing | HoldPhase::Releasing { .. }))
        {
            return;
        }
        let hold = self.view.hold(gpu);
        let stands = hold.is_some_and(|hold| hold.allocation.is_some() && !hold.is_ending());
        match (stands, self.holds.phase(gpu)) {
            (true, None) => self.holds.stray(gpu, now),
            (false, _) => {
                if self.holds.gone(gpu) {
                    self.recorder.trouble(format!("the hold of {gpu} was taken away by somebody else"));
                }
                if hold.is_some_and(|hold| !hold.is_ending()) {
                    self.holds.stray(gpu, now);
                }
            }
            (true, Some(_)) => {}
        }
    }

    /// The first time that everything is known: what stands in the API was decided by a leader before us.
    pub(in crate::controller) fn start(&mut self, now: Moment) {
        if !self.holds.begin() {
            return;
        }
        for (gpu, claim) in self.view.holds() {
            match claim.version().filter(|_| claim.allocation.is_some() && !claim.is_ending()) {
                Some(at) => {
                    let shared = self.view.uses(gpu).any(|(_, how)| matches!(how, Use::Share(_)));
                    // Nobody has seen who came and went since it was written.
                    match !shared && self.view.counts_once(gpu) {
                        true => self.holds.stray(gpu, now),
                        false => self.holds.found(gpu, &at.claim, shared, now),
                    }
                }
                None => self.holds.stray(gpu, now),
            }
        }
        self.holds.gpus.note(self.view.used_gpus().cloned());
        let of = |(name, state): (&NodeName, &NodeState)| {
            state.gpus.keys().map(|device| GpuRef::new(name, device)).collect::<Vec<_>>()
        };
        self.holds.gpus.note(self.view.nodes().flat_map(of));
    }
}
