//! Allocations of ours that nobody uses: their pod is gone, or cannot be bound where they are.

use crate::controller::Moment;
use crate::controller::core::Core;
use crate::controller::tracker::Because;
use crate::controller::view::{Claim, Pod};
use crate::model::claim::ClaimKey;
use crate::model::names::NodeName;
use crate::select::untolerated;

impl Core {
    pub(in crate::controller) fn reclaim_unused(&mut self, now: Moment) {
        self.tracker.wake(now);
        if !self.tracker.may_review(now) {
            return;
        }
        for key in self.tracker.unused() {
            let Some(claim) = self.view.claim(key) else { continue };
            let because = self.why_unused(claim);
            if let Some(because) = self.tracker.judge(key, because, &self.rules, now) {
                self.take_back(key, because, now);
            }
        }
    }

    fn why_unused(&self, claim: &Claim) -> Because {
        let Some(node) = claim.allocation.as_ref().and_then(|allocation| allocation.node.as_ref()) else {
            return Because::Settled;
        };
        let pods: Vec<&Pod> = self.view.pods_of(claim).filter(|pod| !pod.ending).collect();
        if claim.ending || claim.is_reserved() {
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

    fn take_back(&mut self, key: ClaimKey, because: Because, now: Moment) {
        let is_young = because == Because::Young;
        let why = match because {
            Because::Unfit(why) => why,
            Because::Young => "the scheduler has not bound the pod to it".to_owned(),
            Because::NoPods | Because::Settled => return,
        };
        let Some(claim) = self.view.claim(key) else { return };
        let Some(node) = claim.allocation.as_ref().and_then(|allocation| allocation.node.as_ref()) else {
            return;
        };
        for pod in self.view.pods_of(claim).filter(|pod| !pod.ending) {
            // Who starts pods by groups keeps out what is over a queue's limit, wherever it would go.
            if is_young && self.view.is_grouped(pod) {
                self.queue.pause(&pod.at.uid, now);
            }
            self.queue.exclude(&pod.at.uid, node, self.view.zone_of(node), now);
            self.recorder.moved(pod, node, &why, now);
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
