//! Allocations of ours that nobody uses: their pod is gone, or cannot be bound where they are.

use std::collections::BTreeMap;

use crate::controller::Moment;
use crate::controller::core::Core;
use crate::controller::queue::TriedBy;
use crate::controller::steps::units::tried_by;
use crate::controller::tracker::Because;
use crate::controller::view::{Asks, Claim, Pod};
use crate::model::claim::ClaimKey;
use crate::model::names::{NodeName, PodUid};
use crate::select::untolerated;

/// A pod that gives its share to an older one.
struct GivesWay {
    pod: PodUid,
    to: PodUid,
}

/// Pods of one group of which the oldest is tried first.
#[derive(Default)]
struct InOrder<'a> {
    waiting: Vec<&'a Pod>,
    /// With a share that nobody uses.
    placed: Vec<(&'a Pod, ClaimKey)>,
}

impl Core {
    pub(in crate::controller) fn reclaim_unused(&mut self, now: Moment) {
        self.tracker.wake(now);
        if !self.tracker.may_review(now) {
            return;
        }
        let unused = self.tracker.unused();
        let give_way = self.overtakers(&unused);
        for key in unused {
            let Some(claim) = self.view.claim(key) else { continue };
            let because = match self.why_unused(claim) {
                Because::Young if give_way.contains_key(&key) => Because::Overtook,
                because => because,
            };
            match self.tracker.judge(key, because, &self.rules, now) {
                Some(Because::Overtook) => {
                    give_way.get(&key).into_iter().for_each(|pair| self.give_way(pair, now));
                }
                Some(because) => self.take_back(key, because, now),
                None => {}
            }
        }
    }

    fn why_unused(&self, claim: &Claim) -> Because {
        let Some(node) = claim.allocation.as_ref().and_then(|allocation| allocation.node.as_ref()) else {
            return Because::Settled;
        };
        let pods: Vec<&Pod> = self.view.pods_of(claim).filter(|pod| !pod.ending).collect();
        if claim.is_ending() || claim.is_reserved() {
            return Because::Settled;
        }
        if pods.is_empty() {
            return Because::NoPods;
        }
        // The controller-manager reserves it for a pod that is bound there.
        if pods.iter().any(|pod| pod.node.as_ref() == Some(node)) {
            return Because::Settled;
        }
        self.unfit(claim, &pods, node).map_or(Because::Young, Because::Unfit)
    }

    /// Unused claims of pods of which older ones of the same group wait, for the same and for nothing but room: their
    /// scheduler binds none of them before the oldest. The youngest give way, as many as wait. Pods of a gang that start
    /// together have their shares together, too.
    fn overtakers(&self, unused: &[ClaimKey]) -> BTreeMap<ClaimKey, GivesWay> {
        let mut groups: BTreeMap<(&str, &str), InOrder> = BTreeMap::new();
        for (key, claim) in unused.iter().filter_map(|key| Some((*key, self.view.claim(*key)?))) {
            for pod in self.view.pods_of(claim).filter(|pod| !pod.ending && pod.requested.claims.len() == 1) {
                let Some(group) = self.in_order_of_age(pod) else { continue };
                groups.entry(group).or_default().placed.push((pod, key));
            }
        }
        if groups.is_empty() {
            return BTreeMap::new();
        }
        for pod in self.queue.pods().filter_map(|pod| self.view.pod(pod)) {
            let group = self.in_order_of_age(pod).and_then(|group| groups.get_mut(&group));
            if let Some(group) = group.filter(|_| !self.queue.refusals.is_kept_from_nodes(&pod.at.uid)) {
                group.waiting.push(pod);
            }
        }
        let age = |pod: &Pod| (pod.created, pod.at.uid.clone());
        let mut give_way = BTreeMap::new();
        for InOrder { mut waiting, mut placed } in groups.into_values() {
            waiting.sort_by_cached_key(|pod| age(pod));
            placed.sort_by_cached_key(|(pod, _)| std::cmp::Reverse(age(pod)));
            let pairs = waiting.into_iter().zip(placed);
            let overtaken = pairs.take_while(|(first, (pod, _))| age(first) < age(pod));
            let same = overtaken.filter(|(first, (pod, _))| {
                self.may_go_where(first, pod)
                    && !self.view.is_being_bound(pod)
                    && !self.queue.refusals.has_given_way(&pod.at.uid, &first.at.uid)
            });
            let pair =
                |first: &Pod, pod: &Pod| GivesWay { pod: pod.at.uid.clone(), to: first.at.uid.clone() };
            give_way.extend(same.map(|(first, (pod, key))| (key, pair(first, pod))));
        }
        give_way
    }

    /// The group of a pod whose scheduler tries the oldest first, where each pod of it starts by itself.
    fn in_order_of_age<'a>(&self, pod: &'a Pod) -> Option<(&'a str, &'a str)> {
        let gang = pod.gang().filter(|_| tried_by(pod) == TriedBy::Age && self.view.minimum(pod).is_one())?;
        Some((&pod.at.namespace, &gang.name))
    }

    /// What suits the one suits the other, and it is no less urgent.
    fn may_go_where(&self, first: &Pod, pod: &Pod) -> bool {
        self.asks_of(first) == self.asks_of(pod)
            && first.standing.priority >= pod.standing.priority
            && (first.room, &first.demands, &first.requested.resources)
                == (pod.room, &pod.demands, &pod.requested.resources)
            && self.view.terms_of(&first.at.uid) == self.view.terms_of(&pod.at.uid)
            && self.view.ports_of(&first.at.uid) == self.view.ports_of(&pod.at.uid)
    }

    fn asks_of(&self, pod: &Pod) -> Vec<Option<&Asks>> {
        let claims = pod.requested.claims.iter().map(|claim| self.view.claim_named(&pod.at.namespace, claim));
        claims.map(|claim| claim.map(|claim| &claim.asks)).collect()
    }

    fn take_back(&mut self, key: ClaimKey, because: Because, now: Moment) {
        let is_young = because == Because::Young;
        let why = match because {
            Because::Unfit(why) => why,
            Because::Young => "the scheduler has not bound the pod to it".to_owned(),
            Because::NoPods | Because::Settled | Because::Overtook => return,
        };
        let Some(claim) = self.view.claim(key) else { return };
        let Some(node) = claim.allocation.as_ref().and_then(|allocation| allocation.node.as_ref()) else {
            return;
        };
        for pod in self.view.pods_of(claim).filter(|pod| !pod.ending) {
            self.queue.refusals.exclude(&pod.at.uid, node, self.view.zone_of(node), now);
            // Who starts pods by groups keeps out what is over a queue's limit, wherever it would go.
            if is_young && self.view.is_grouped(pod) {
                self.queue.refusals.pause(&pod.at.uid, now);
            }
            self.recorder.moved(pod, node, &why, now);
        }
    }

    /// The share is the older pod's, which comes first when both wait. Once: if that pod does not take it, nothing is gained.
    fn give_way(&mut self, pair: &GivesWay, now: Moment) {
        self.queue.refusals.gives_way(&pair.pod, &pair.to);
        if let Some(pod) = self.view.pod(&pair.pod) {
            self.recorder.gave_way(pod, now);
        }
    }

    /// Why the allocation can never be used where it is.
    pub(in crate::controller) fn unfit(
        &self,
        claim: &Claim,
        pods: &[&Pod],
        node: &NodeName,
    ) -> Option<String> {
        let allocation = claim.allocation.as_ref()?;
        for (gpu, _) in &allocation.uses {
            match self.view.gpu(gpu) {
                None => return Some(format!("{} is not offered any more", gpu.device)),
                Some(found) => {
                    let bears = allocation.bears.get(gpu).map_or(&[][..], Vec::as_slice);
                    if let Some(taint) = untolerated(&found.taints, bears) {
                        return Some(format!("{} has the taint {taint}", gpu.device));
                    }
                }
            }
        }
        let elsewhere = pods.iter().filter_map(|pod| pod.node.as_ref()).next();
        if let Some(elsewhere) = elsewhere {
            return Some(format!("the pod runs on node {elsewhere}"));
        }
        let why = pods.iter().map(|pod| self.barred(pod, node)).collect::<Option<Vec<String>>>()?;
        why.first().map(|why| format!("node {node} {why}"))
    }
}
