//! Which GPUs are kept for shares: those in use, some in advance; an idle one goes to a pod that waits for it whole.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::PodSpec;

use super::Moment;
use super::core::Core;
use super::hold::{Act, Loss, Worth};
use super::round::Round;
use super::world::{GpuRef, NodeState, Pod};
use super::write::Write;
use crate::feasible::{self, Demands, Unfit};
use crate::model::names::PodUid;
use crate::select::untolerated;

/// Which need of which pod, by number.
type NeedAt = (PodUid, usize);

impl Core {
    /// Notes what a pod waits for.
    pub(super) fn note_needs(&mut self, uid: &PodUid) {
        let refused = self.world.pods.get(uid).filter(|pod| is_refused(pod));
        match refused.map(|pod| self.world.needs(pod)).filter(|needs| !needs.is_empty()) {
            Some(needs) => drop(self.whole.insert(uid.clone(), needs)),
            None => drop(self.whole.remove(uid)),
        }
    }

    /// The same of all, since classes have changed.
    pub(super) fn note_all_needs(&mut self) {
        let refused = self.world.pods.values().filter(|pod| is_refused(pod));
        let needs = refused.map(|pod| (pod.at.uid.clone(), self.world.needs(pod)));
        self.whole = needs.filter(|(_, needs)| !needs.is_empty()).collect();
    }

    /// Gives idle GPUs back where pods wait for whole ones.
    pub(super) fn make_way(&mut self, now: Moment) {
        if self.whole.is_empty() {
            return;
        }
        let mut given = BTreeMap::new();
        for gpu in self.holds.idle_ones() {
            if self.for_good.contains(&gpu) || self.stock.is_granted(&gpu) {
                continue;
            }
            if let Some(need) = self.who_waits(&gpu, &given) {
                *given.entry(need).or_insert(0) += 1;
                self.holds.lose(&gpu, Loss::Whole, now);
            }
        }
    }

    /// The first need that the GPU could serve: the pod may run there, and the request chooses it. `given`: how many
    /// GPUs are on their way to a need.
    fn who_waits(&mut self, gpu: &GpuRef, given: &BTreeMap<NeedAt, u32>) -> Option<NeedAt> {
        let taints = &self.world.gpu(gpu)?.taints;
        for (uid, needs) in &self.whole {
            let open =
                |at: usize, devices| given.get(&(uid.clone(), at)).is_none_or(|count| *count < devices);
            let index = &mut self.stock.index;
            let found = needs.iter().enumerate().find(|(at, need)| {
                open(*at, need.devices)
                    && need.kinds.iter().any(|kind| {
                        untolerated(taints, &kind.tolerations).is_none()
                            && index.chooses(&kind.selectors, &gpu.node, &gpu.device)
                    })
            });
            let Some((at, _)) = found else { continue };
            if self.world.pods.get(uid).is_some_and(|pod| self.why_not(pod, &gpu.node).is_none()) {
                return Some((uid.clone(), at));
            }
        }
        None
    }

    pub(super) fn keep(&mut self, now: Moment, round: &mut Round) {
        self.take_ahead();
        self.look(now);
        let (world, stock, for_good) = (&self.world, &self.stock, &self.for_good);
        let worth = |gpu: &GpuRef| match stock.is_granted(gpu) || for_good.contains(gpu) {
            true => Worth::InUse,
            false if world.nodes.get(&gpu.node).is_some_and(takes_pods) => Worth::InAdvance,
            false => Worth::Nothing,
        };
        let acts = self.holds.step(now, worth, |gpu| world.standing(gpu));
        for act in acts {
            match act {
                Act::Take(gpu) => round.writes.push(Write::Hold(gpu)),
                Act::Look(gpu) => match self.world.hold(&gpu) {
                    Some(hold) => {
                        round.writes.push(Write::Look(hold.at.clone()));
                        self.note_rivals();
                    }
                    None => self.looked(false, now),
                },
                Act::Leave(gpu, parting) => round.writes.push(Write::Leave(gpu, parting)),
            }
        }
    }

    /// Holds GPUs that nobody needs yet, so that the next share need not wait. Not where a pod waits for a whole one.
    fn take_ahead(&mut self) {
        if self.holds.pace.ahead == 0 {
            return;
        }
        let serves = |node| self.world.nodes.get(node).is_some_and(takes_pods);
        let idle = |gpu: &GpuRef| !self.stock.is_granted(gpu);
        let ready = self.holds.all().map(|(gpu, _)| gpu);
        let ready = ready.filter(|gpu| self.holds.is_ours(gpu) && idle(gpu) && serves(&gpu.node)).count();
        let missing = self.holds.pace.ahead.saturating_sub(ready);
        if missing == 0 {
            return;
        }
        let gpus = self.stock.index.nodes().filter(|view| serves(view.name())).flat_map(|view| {
            let free = view.gpus().filter(|gpu| !gpu.closed() && !gpu.tainted());
            free.map(move |gpu| GpuRef::new(view.name(), gpu.device()))
        });
        let free: Vec<GpuRef> = gpus.filter(|gpu| self.holds.phase(gpu).is_none() && idle(gpu)).collect();
        let mut wanted = Vec::new();
        for gpu in free {
            if wanted.len() == missing {
                break;
            }
            if self.who_waits(&gpu, &BTreeMap::new()).is_none() {
                wanted.push(gpu);
            }
        }
        wanted.iter().for_each(|gpu| self.holds.want(gpu));
    }
}

/// The scheduler has found no place for it.
fn is_refused(pod: &Pod) -> bool {
    pod.unschedulable && pod.node.is_none() && !pod.ending
}

/// A GPU that is held in advance on any other node would help nobody.
fn takes_pods(node: &NodeState) -> bool {
    let Some(node) = node.object.as_deref() else { return false };
    let any = Demands::of(&PodSpec::default());
    !matches!(feasible::why_not(&any, node), Some(Unfit::Cordoned | Unfit::NotReady(_)))
}
