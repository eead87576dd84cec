//! Allocations of ours that nobody uses: their pod is gone, or cannot be bound where they are.

use super::Moment;
use super::core::Core;
use super::world::{Claim, Pod};
use crate::model::names::{ClaimUid, NodeName, PodUid};

/// How long a node, a GPU or a pod may look unfit before anything is moved: most of it passes.
const UNFIT_FOR: std::time::Duration = std::time::Duration::from_secs(5);

/// What is to become of an allocation that nobody has reserved.
enum Fate {
    Stay,
    /// To be looked at again then.
    Wait(Moment),
    /// Nobody is there to use it.
    Free,
    /// These pods go elsewhere.
    Move(Vec<PodUid>, NodeName, String),
}

impl Core {
    pub(super) fn live(&mut self, now: Moment) {
        self.not_before.retain(|_, until| *until > now);
        let unused: Vec<(ClaimUid, Moment)> =
            self.unused.iter().map(|(uid, since)| (uid.clone(), *since)).collect();
        for (uid, since) in unused {
            let fate = match self.world.claims.get(&uid) {
                Some(claim) if !self.to_clear.contains(&uid) => self.fate(claim, since, now),
                _ => Fate::Stay,
            };
            match fate {
                Fate::Stay | Fate::Wait(_) => {}
                Fate::Free => drop(self.to_clear.insert(uid)),
                Fate::Move(pods, node, why) => {
                    for pod in pods {
                        self.queue.exclude(&pod, &node, now);
                        if let Some(pod) = self.world.pods.get(&pod) {
                            self.says.moved(pod, &node, &why);
                        }
                    }
                    self.to_clear.insert(uid);
                }
            }
        }
    }

    fn fate(&self, claim: &Claim, since: Moment, now: Moment) -> Fate {
        let Some(allocation) = &claim.allocation else { return Fate::Stay };
        if claim.ending || claim.is_reserved() {
            return Fate::Stay;
        }
        let pods: Vec<&Pod> = self.world.pods_of(claim).filter(|pod| !pod.ending).collect();
        if pods.is_empty() {
            return due(since + self.rules.unused, now, || Fate::Free);
        }
        let Some(node) = &allocation.node else { return Fate::Stay };
        // The controller-manager reserves it for a pod that is bound there.
        if pods.iter().any(|pod| pod.node.as_ref() == Some(node)) {
            return Fate::Stay;
        }
        let all = || pods.iter().map(|pod| pod.at.uid.clone()).collect::<Vec<_>>();
        if let Some(why) = self.unfit(claim, &pods, node) {
            return due(since + UNFIT_FOR, now, || Fate::Move(all(), node.clone(), why));
        }
        due(since + self.rules.stuck, now, || {
            let why = "the scheduler has not bound the pod to it".to_owned();
            Fate::Move(all(), node.clone(), why)
        })
    }

    /// Why the allocation can never be used where it is.
    fn unfit(&self, claim: &Claim, pods: &[&Pod], node: &NodeName) -> Option<String> {
        let allocation = claim.allocation.as_ref()?;
        for (gpu, _) in &allocation.uses {
            match self.world.gpu(gpu) {
                None => return Some(format!("{} is not offered any more", gpu.device)),
                Some(found) => {
                    if let Some(taint) = &found.tainted {
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

    /// When an allocation without a user is due to be looked at.
    pub(super) fn next_of_life(&self, now: Moment) -> Option<Moment> {
        let fates = self.unused.iter().filter_map(|(uid, since)| {
            match self.fate(self.world.claims.get(uid)?, *since, now) {
                Fate::Wait(until) => Some(until),
                _ => None,
            }
        });
        let rests = self.not_before.values().copied();
        let again = self.plans.iter().flat_map(|(_, plan)| plan.claims.values()).map(|claim| claim.after);
        fates.chain(rests).chain(again).filter(|due| *due > now).min()
    }
}

fn due(at: Moment, now: Moment, fate: impl FnOnce() -> Fate) -> Fate {
    if at <= now { fate() } else { Fate::Wait(at) }
}
