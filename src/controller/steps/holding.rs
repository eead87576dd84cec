//! Which GPUs are kept for shares: those in use, some in advance; an idle one goes to a pod that waits for it whole.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::core::v1::PodSpec;

use crate::controller::Moment;
use crate::controller::core::Core;
use crate::controller::demand::{NEEDS_MAX, NeedAt};
use crate::controller::holds::{Act, HoldStanding, Loss, ReleaseStep, Worth};
use crate::controller::view::{Claim, ClusterView, GpuRef, Need, NodeState, Pod, Tried};
use crate::controller::write::{Round, Write};
use crate::feasible::{self, Demands, Unfit};
use crate::model::names::PodUid;
use crate::select::untolerated;

/// Of asking whether a GPU would serve a kind of devices that a pod waits for, in ticks of
/// [`crate::select::TICKS_PER_UNIT`].
const KIND_TICKS: u64 = 10;

impl Core {
    /// Notes what a pod waits for.
    pub(super) fn note_needs(&mut self, uid: &PodUid) {
        let refused = self.view.pod(uid).filter(|pod| is_unschedulable(pod));
        let Some(pod) = refused else { return self.pods.demand.forget(uid) };
        let mut needs: Vec<Arc<[Need]>> = Vec::new();
        for claim in self.view.unallocated_claims(pod).take(NEEDS_MAX) {
            let of_claim = self.pods.demand.of_claim(claim.key).unwrap_or_else(|| {
                let of_claim: Arc<[Need]> = self.view.needs_of(claim).collect();
                self.pods.demand.note_claim(claim.key, &of_claim);
                of_claim
            });
            needs.extend((!of_claim.is_empty()).then_some(of_claim));
        }
        let of_limits: Arc<[Need]> = self.view.needs_of_limits(pod).take(NEEDS_MAX).collect();
        needs.extend((!of_limits.is_empty()).then_some(of_limits));
        self.pods.demand.set(uid, needs);
    }

    /// The same of all, since classes have changed.
    pub(super) fn note_all_needs(&mut self) {
        self.pods.demand.forget_claims();
        let pods: Vec<PodUid> = self.view.pods().map(|pod| pod.at.uid.clone()).collect();
        pods.iter().for_each(|pod| self.note_needs(pod));
    }

    /// Gives idle GPUs back where pods wait for whole ones. The pods that GPUs are on their way to.
    pub(in crate::controller) fn yield_idle_gpus(&mut self, now: Moment) -> BTreeSet<PodUid> {
        if self.pods.demand.is_empty() {
            return BTreeSet::new();
        }
        let order = self.by_priority();
        let mut given: BTreeMap<NeedAt, u32> = BTreeMap::new();
        // Others have ended for who is to have shares there.
        let kept = self.reserves.preempted_gpus();
        // Those that this round does not come to are looked at in the next ones.
        let mut idle = self.holds.idle_ones();
        let first = idle.iter().position(|gpu| self.pods.demand.begins_at(gpu)).unwrap_or(0);
        idle.rotate_left(first);
        let mut stops_at = None;
        for gpu in idle {
            if !self.capacity.index.has_left() {
                stops_at = Some(gpu);
                break;
            }
            if self.holds.gpus.is_pinned(&gpu) || self.capacity.is_granted(&gpu) || kept.contains(&gpu) {
                continue;
            }
            if let Some(need) = self.who_waits(&gpu, &order, &given) {
                *given.entry(need).or_insert(0) += 1;
                self.holds.lose(&gpu, Loss::Whole, now);
            }
        }
        self.pods.demand.begin_at(stops_at);
        given.into_keys().map(|(pod, _)| pod).collect()
    }

    /// Who waits, those of higher priority in front: they may have had others end.
    pub(in crate::controller) fn by_priority(&self) -> Vec<PodUid> {
        let mut order: Vec<PodUid> = self.pods.demand.pods().cloned().collect();
        order.sort_by_key(|uid| Reverse(self.view.pod(uid).map(|pod| pod.standing.priority)));
        order
    }

    /// A request for devices of kube-scheduler's chooses the GPU.
    pub(super) fn serves(&mut self, gpu: &GpuRef, need: &Need) -> bool {
        let Some(taints) = self.view.gpu(gpu).map(|gpu| &gpu.taints) else { return false };
        let index = &mut self.capacity.index;
        need.kinds.iter().any(|kind| {
            untolerated(taints, &kind.tolerations).is_none()
                && index.chooses(&kind.selectors, &gpu.node, &gpu.device)
        })
    }

    /// The first need, in the order of these pods, that the GPU could serve: the pod may run there, and the request chooses
    /// it. `given`: how many GPUs are on their way to a need.
    fn who_waits(&mut self, gpu: &GpuRef, order: &[PodUid], given: &BTreeMap<NeedAt, u32>) -> Option<NeedAt> {
        let taints = &self.view.gpu(gpu)?.taints;
        for uid in order {
            let needs = self.pods.demand.of(uid);
            let open =
                |at: usize, devices| given.get(&(uid.clone(), at)).is_none_or(|count| *count < devices);
            let index = &mut self.capacity.index;
            let found = needs.enumerate().find(|(at, need)| {
                open(*at, need.devices)
                    && need.kinds.iter().any(|kind| {
                        index.pay(KIND_TICKS);
                        untolerated(taints, &kind.tolerations).is_none()
                            && (index.chooses(&kind.selectors, &gpu.node, &gpu.device)
                                || index.may_choose_part(&kind.selectors, &gpu.node, &gpu.device))
                    })
            });
            let Some((at, _)) = found else { continue };
            if self.view.pod(uid).is_some_and(|pod| self.why_not(pod, &gpu.node).is_none()) {
                return Some((uid.clone(), at));
            }
        }
        None
    }

    pub(in crate::controller) fn keep(&mut self, now: Moment, round: &mut Round) {
        self.take_ahead();
        self.look(now);
        let (view, capacity) = (&self.view, &self.capacity);
        let worth = |gpu: &GpuRef| match capacity.is_granted(gpu) {
            true => Worth::InUse,
            false if view.node(&gpu.node).is_some_and(takes_pods) => Worth::InAdvance,
            false => Worth::Nothing,
        };
        let acts = self.holds.step(now, worth, |gpu| standing(view, gpu));
        for act in acts {
            match act {
                Act::Take(gpu) => {
                    let parts = self.view.given_in_parts(&gpu);
                    round.writes.push(Write::Hold(gpu, parts));
                }
                Act::Look(gpu) => match self.view.hold(&gpu).and_then(Claim::version) {
                    Some(hold) => {
                        round.writes.push(Write::WatchBarrier(hold.clone()));
                        self.holds.look_begins(self.view.sought_by_limits());
                    }
                    None => self.looked(false, now),
                },
                Act::Release(gpu, step) => round.writes.push(Write::Release(gpu, step)),
            }
        }
    }

    /// Holds GPUs that nobody needs yet, so that the next share need not wait. Not where a pod waits for a whole one.
    fn take_ahead(&mut self) {
        if self.holds.pace.ahead == 0 {
            return;
        }
        let serves = |node| self.view.node(node).is_some_and(takes_pods);
        let idle = |gpu: &GpuRef| !self.capacity.is_granted(gpu);
        let ready = self.holds.all().map(|(gpu, _)| gpu);
        let ready = ready.filter(|gpu| self.holds.is_ours(gpu) && idle(gpu) && serves(&gpu.node)).count();
        let missing = self.holds.pace.ahead.saturating_sub(ready);
        if missing == 0 {
            return;
        }
        let gpus = self.capacity.index.nodes().filter(|view| serves(view.name())).flat_map(|view| {
            let free = view.gpus().filter(|gpu| !gpu.closed() && !gpu.tainted());
            free.map(move |gpu| GpuRef::new(view.name(), gpu.device()))
        });
        let free: Vec<GpuRef> = gpus.filter(|gpu| self.holds.phase(gpu).is_none() && idle(gpu)).collect();
        let (order, mut wanted) = (self.by_priority(), Vec::new());
        for gpu in free {
            if wanted.len() == missing {
                break;
            }
            if self.who_waits(&gpu, &order, &BTreeMap::new()).is_none() {
                wanted.push(gpu);
            }
        }
        wanted.iter().for_each(|gpu| self.holds.want(gpu));
    }
}

/// The scheduler has found no place for it.
fn is_unschedulable(pod: &Pod) -> bool {
    matches!(pod.standing.tried, Tried::InVain | Tried::ForOther)
        && pod.node.is_none()
        && !pod.ending
        && !pod.gated
}

/// A GPU that is held in advance on any other node would help nobody.
fn takes_pods(node: &NodeState) -> bool {
    let Some(node) = node.object.as_deref() else { return false };
    let any = Demands::of(&PodSpec::default());
    !matches!(feasible::why_not(&any, node), Some(Unfit::Cordoned | Unfit::NotReady(_)))
}

/// How the hold of a GPU stands that is to go.
fn standing(view: &ClusterView, gpu: &GpuRef) -> HoldStanding {
    let Some(hold) = view.hold(gpu) else { return HoldStanding::No };
    let Some(at) = hold.version().cloned() else { return HoldStanding::No };
    if hold.is_ending() || view.is_listing_claims() {
        return HoldStanding::StandBy;
    }
    match (hold.allocation.is_some(), view.is_anothers(gpu)) {
        _ if !view.counts_once(gpu) => HoldStanding::Due(ReleaseStep::Delete(at)),
        (true, true) => HoldStanding::StandBy,
        (true, false) => HoldStanding::Due(ReleaseStep::Clear(at)),
        (false, true) => HoldStanding::Due(ReleaseStep::Restore(at)),
        (false, false) => HoldStanding::Due(ReleaseStep::Delete(at)),
    }
}
