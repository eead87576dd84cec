//! Allocations of ours that nobody uses: their pod is gone, or cannot be bound where they are.

use std::time::Duration;

use super::Moment;
use super::config::Rules;
use super::core::Core;
use super::world::{Claim, Pod};
use crate::model::names::{ClaimUid, NodeName};
use crate::select::untolerated;

/// How long a node, a GPU or a pod may look unfit before anything is moved: most of it passes.
const UNFIT_FOR: Duration = Duration::from_secs(5);
/// No oftener are unused allocations looked at: what is found counts after seconds only, and while a thousand pods
/// are being bound there are many.
const REVIEW_EVERY: Duration = Duration::from_millis(500);

/// An allocation that nobody has reserved: why, and since when.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Unused {
    because: Because,
    since: Moment,
}

impl Unused {
    pub fn new(now: Moment) -> Self {
        Self { because: Because::Young, since: now }
    }

    /// When the allocation is to be taken back.
    fn due(&self, rules: &Rules) -> Option<Moment> {
        match self.because {
            Because::Settled => None,
            Because::Young => Some(self.since + rules.stuck),
            Because::NoPods => Some(self.since + rules.unused),
            Because::Unfit(_) => Some(self.since + UNFIT_FOR),
        }
    }
}

#[derive(Debug, Clone, PartialEq)]
enum Because {
    /// The scheduler has not come to it yet.
    Young,
    NoPods,
    /// The pods cannot run where it is.
    Unfit(String),
    /// It is as it should be.
    Settled,
}

impl Core {
    pub(super) fn live(&mut self, now: Moment) {
        self.not_before.retain(|_, until| *until > now);
        if let Some(next) = self.reviewed.map(|reviewed| reviewed + REVIEW_EVERY).filter(|next| now < *next) {
            self.review_at = Some(next);
            return;
        }
        (self.reviewed, self.review_at) = (Some(now), None);
        let unused: Vec<ClaimUid> =
            self.unused.keys().filter(|uid| !self.to_clear.contains(*uid)).cloned().collect();
        for uid in unused {
            let Some(claim) = self.world.claims.get(&uid) else { continue };
            let because = self.why_unused(claim);
            let Some(known) = self.unused.get_mut(&uid) else { continue };
            if std::mem::discriminant(&known.because) != std::mem::discriminant(&because) {
                *known = Unused { because, since: now };
            }
            if known.due(&self.rules).is_some_and(|due| due <= now) {
                self.take_back(&uid, now);
            }
        }
    }

    fn why_unused(&self, claim: &Claim) -> Because {
        let Some(node) = claim.allocation.as_ref().and_then(|allocation| allocation.node.as_ref()) else {
            return Because::Settled;
        };
        let pods: Vec<&Pod> = self.world.pods_of(claim).filter(|pod| !pod.ending).collect();
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

    fn take_back(&mut self, uid: &ClaimUid, now: Moment) {
        self.to_clear.insert(uid.clone());
        let why = match self.unused.get(uid).map(|unused| &unused.because) {
            Some(Because::Unfit(why)) => why.clone(),
            Some(Because::Young) => "the scheduler has not bound the pod to it".to_owned(),
            _ => return,
        };
        let Some(claim) = self.world.claims.get(uid) else { return };
        let Some(node) = claim.allocation.as_ref().and_then(|allocation| allocation.node.as_ref()) else {
            return;
        };
        for pod in self.world.pods_of(claim).filter(|pod| !pod.ending) {
            self.queue.exclude(&pod.at.uid, node, now);
            self.says.moved(pod, node, &why);
        }
    }

    /// Why the allocation can never be used where it is.
    pub(super) fn unfit(&self, claim: &Claim, pods: &[&Pod], node: &NodeName) -> Option<String> {
        let allocation = claim.allocation.as_ref()?;
        for (gpu, _) in &allocation.uses {
            match self.world.gpu(gpu) {
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

    /// When something of an allocation without a user is due.
    pub(super) fn next_of_life(&self, now: Moment) -> Option<Moment> {
        let unused = self.unused.values().filter_map(|unused| unused.due(&self.rules));
        let rests = self.not_before.values().copied();
        let again =
            self.plans.iter().flat_map(|(_, plan)| plan.claims.values()).filter_map(|claim| claim.next.due());
        let doubts = self.doubtful.values().flatten().copied();
        let review = self.review_at.filter(|_| !self.unused.is_empty());
        let marks = self.marks_after.filter(|_| !self.to_mark.is_empty());
        unused
            .chain(rests)
            .chain(marks)
            .chain(again)
            .chain(doubts)
            .chain(review)
            .filter(|due| *due > now)
            .min()
    }
}
