//! What the pods of a unit are told: where their shares are, or why they wait.

use crate::controller::Moment;
use crate::controller::core::Core;
use crate::controller::gang::Obstacle;
use crate::controller::queue::{Gathering, Lacks};
use crate::controller::recorder::{Reason, gathering, obstacle_words, short};
use crate::controller::steps::place::Refused;
use crate::controller::tracker::Plan;
use crate::model::names::PodUid;
use crate::model::share::Extent;
use crate::params::GrantedDevice;

impl Core {
    /// Where its shares are, once they stand in the API.
    pub(super) fn tell_placed(&mut self, plan: &Plan, now: Moment) {
        for (uid, node) in &plan.pods {
            let Some(pod) = self.view.pod(uid) else { continue };
            let claims = self.view.claims_of(pod).into_iter().flatten();
            let planned = claims.filter_map(|claim| plan.claims.get(&claim.key));
            let devices = planned.flat_map(|claim| &claim.given).flat_map(|given| &given.devices);
            let words = |device: &GrantedDevice| match device.extent {
                Extent::Part => format!("{} MiB of {}", device.memory.mib_floor(), device.device),
                Extent::Whole => format!("all of {}", device.device),
                Extent::Mig(_) => {
                    format!("a MIG device of {} MiB of {}", device.memory.mib_floor(), device.device)
                }
            };
            let words: Vec<String> = devices.map(words).collect();
            self.recorder.placed(pod, format!("{} on node {node}", words.join(", ")), now);
        }
    }

    /// Why the webhook's annotation comes to nothing, if the pod has it and it does.
    pub(in crate::controller) fn tell_unpromised(&mut self, uid: &PodUid, now: Moment) {
        let Some(pod) = self.view.pod(uid) else { return };
        if let Some(words) = self.view.not_promised(pod) {
            self.recorder.waiting(pod, Reason::Claim, &words, now);
        }
    }

    /// Tells the pods of a unit what is still to come before they have a turn.
    pub(in crate::controller) fn tell_gathering(&mut self, one: &Gathering, now: Moment) {
        let words = match &one.lacks {
            Lacks::Pods { gang, there, size } => gathering(gang, *there, &size.to_string()),
            Lacks::Cleared(obstacle) => self.obstacle(one.pods.first(), obstacle),
            Lacks::Paused(until) => self.paused(one.pods.first(), *until),
        };
        let reason = match one.lacks {
            Lacks::Paused(_) => Reason::Scheduler,
            Lacks::Pods { .. } | Lacks::Cleared(_) => Reason::Gang,
        };
        for uid in &one.pods {
            let refused = Refused::new(uid.clone(), reason, words.clone());
            self.tell(std::slice::from_ref(uid), &refused, now);
        }
    }

    /// Why a pod may not start, in words. `pod`: of the unit.
    pub(in crate::controller) fn obstacle(&self, pod: Option<&PodUid>, obstacle: &Obstacle) -> String {
        let gang = pod.and_then(|uid| self.view.pod(uid)?.gang()).map(|gang| gang.name.as_str());
        obstacle_words(gang.unwrap_or_default(), obstacle)
    }

    fn paused(&self, pod: Option<&PodUid>, until: Moment) -> String {
        let scheduler = pod.and_then(|uid| self.view.pod(uid)).map(|pod| pod.grouping.scheduler.as_str());
        let until = self.recorder.time_of(until).map(|until| format!(" before {until}")).unwrap_or_default();
        format!(
            "{} did not bind it to the share that it had, and may keep it out on any node (a queue's limit?); no other \
             share is chosen{until}",
            scheduler.unwrap_or("its scheduler")
        )
    }

    /// Tells all pods of a unit, each once: they wait together, whichever of them could not be placed.
    pub(in crate::controller) fn tell(&mut self, pods: &[PodUid], refused: &Refused, now: Moment) {
        let name = self.view.pod(&refused.pod).map(|pod| pod.at.name.as_str()).unwrap_or_default();
        let together = format!("it is placed together with pod {name}: {}", refused.words);
        for uid in pods {
            let words = if *uid == refused.pod { &refused.words } else { &together };
            let Some(pod) = self.view.pod(uid) else { continue };
            if !self.recorder.waiting(pod, refused.reason, words, now) {
                continue;
            }
            for claim in self.view.claims_of(pod).into_iter().flatten() {
                let Some(at) = claim.version() else { continue };
                let open = claim.is_shares() && claim.allocation.is_none() && !claim.is_ending();
                let text = short(words);
                if open && claim.waiting.as_ref() != Some(&text) {
                    self.recorder.about(&at.claim, words);
                    self.tracker.wait_reason(claim.key, text);
                }
            }
        }
    }
}
