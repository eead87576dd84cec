//! Shares on one held GPU end for a pod of higher priority that waits for a whole one: the GPU is given back once they
//! have ended, and kube-scheduler gives it to the pod. Until then it takes no other shares.
//!
//! Only for a pod that asks for one GPU and nothing else of kube-scheduler's devices: how several GPUs have to go together
//! is known to kube-scheduler alone. And only for one that starts by itself: how many GPUs come free for a gang, nobody
//! here decides, and of a gang that its queue keeps out no pod is bound to one.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use crate::allocate::{Nodes, Placement, PodAsk, Shape, Studied, Want, places};
use crate::controller::Moment;
use crate::controller::core::Core;
use crate::controller::holds::HoldPhase;
use crate::controller::preempt::{Goal, LookOutcome, PutOff};
use crate::controller::queue::UnitKey;
use crate::controller::steps::preempting::Prospect;
use crate::controller::steps::preempting::prospect::TICKS;
use crate::controller::steps::preempting::search::{
    Asker, Budgets, Nobody, VictimSearch, VictimsFound, first,
};
use crate::controller::view::{Asks, GpuRef, Need, Pod, Tried};
use crate::model::names::{NodeName, PodUid};
use crate::model::quantity::Bytes;

/// Alternatives (`firstAvailable`) of its request that are looked at.
const KINDS_MAX: usize = 8;

/// A pod that waits for a whole GPU, and may be looked at.
struct WholeGpuWaiter {
    key: UnitKey,
    uid: PodUid,
    namespace: String,
    need: Need,
}

/// What a pod wants that waits for a whole GPU.
struct Whole {
    /// One for each alternative.
    shapes: Vec<Shape>,
    nodes: Nodes,
    /// GPUs that are never given back.
    pinned: BTreeSet<GpuRef>,
}

impl Core {
    /// After idle GPUs were given back. `given`: pods that one is on its way to.
    pub(in crate::controller) fn preempt_for_whole(&mut self, given: &BTreeSet<PodUid>, now: Moment) {
        if !self.rules.preemption || self.pods.demand.is_empty() {
            return;
        }
        let epoch = self.capacity.epoch();
        let mut waiting = Vec::new();
        for uid in self.pods.demand.pods().filter(|uid| !given.contains(*uid)) {
            let Some(need) = self.pods.demand.single(uid).filter(|need| is_one(need)) else { continue };
            let may = |pod: &&Pod| {
                pod.standing.preempts
                    && pod.standing.tried == Tried::InVain
                    && self.is_all_known(pod)
                    && self.view.minimum(pod).is_one()
            };
            let Some(pod) = self.view.pod(uid).filter(may) else { continue };
            let key = UnitKey::Pod(uid.clone());
            // One whose namespace has spent its part takes no look of another's.
            let may_pay = self.purse.allowance(&pod.at.namespace).is_some();
            let may_look = self.reserves.evictions.preempting.may_look(&key, epoch, now);
            if may_pay && may_look && !self.queue.contains(uid) {
                let (namespace, need) = (pod.at.namespace.clone(), need.clone());
                let one = WholeGpuWaiter { key, uid: uid.clone(), namespace, need };
                waiting.push((Reverse(pod.standing.priority), pod.created, one));
            }
        }
        waiting.sort_by(|a, b| (a.0, a.1, &a.2.key).cmp(&(b.0, b.1, &b.2.key)));
        let units = waiting.iter().map(|(.., one)| (&one.key, one.namespace.as_str()));
        let (first, are_left) = self.reserves.evictions.preempting.looks.first(units);
        if are_left {
            self.reserves.evictions.preempting.looks.leave(now);
        }
        for (.., one) in waiting.into_iter().filter(|(.., one)| first.contains(&one.key)) {
            self.look_for_whole(&one.uid, &one.need, now);
        }
        self.close_purse();
    }

    fn look_for_whole(&mut self, uid: &PodUid, need: &Need, now: Moment) {
        let Some(asker) = self.asker_of_whole(uid) else { return };
        let namespace = asker.pod.namespace.clone();
        let Some(ticks) = self.purse.allowance(&namespace) else { return };
        self.capacity.index.allow(ticks);
        let key = UnitKey::Pod(uid.clone());
        let mut outcome = LookOutcome::default();
        let from = self.reserves.evictions.preempting.looks.from(&key);
        match self.victims_for_whole(&asker, need, (Budgets::Kept, ticks, from), now) {
            Ok(VictimsFound::Victims { place, victims }) => {
                let gpus = gpus_of(&place);
                let begun = self.begin_evicting_for(
                    (&key, std::slice::from_ref(uid)),
                    &asker,
                    (&place, Goal::Whole(gpus.clone())),
                    &victims,
                    now,
                );
                outcome.put_off = begun.err();
                // No share comes there any more.
                self.holds.gpus.note(gpus);
                self.reevaluate_gpus(now);
            }
            Ok(
                VictimsFound::Soon(_)
                | VictimsFound::Free(_)
                | VictimsFound::Bound(_)
                | VictimsFound::Room { .. },
            )
            | Err(Nobody::Anywhere) => {}
            Err(Nobody::Until(nodes)) => {
                let why = self.reserves.evictions.preempting.put_off(PutOff::Spent);
                outcome = LookOutcome { put_off: Some(why), left_at: Some(nodes) };
            }
        }
        let (spent, _) = self.capacity.index.spent();
        self.purse.pay(&namespace, spent);
        let epoch = self.capacity.epoch();
        self.reserves.evictions.preempting.looked((&key, &namespace), epoch, outcome, now);
    }

    /// Its claims are there, and of classes that are. Of another pod nobody here knows that a GPU is all it waits for.
    fn is_all_known(&self, pod: &Pod) -> bool {
        pod.requested.claims.iter().all(|name| {
            let claim = self.view.claim_named(&pod.at.namespace, name);
            claim.is_some_and(|claim| match &claim.asks {
                _ if claim.allocation.is_some() => true,
                Asks::Scheduler(requests) => self.view.needs_of(claim).count() == requests.len(),
                Asks::Shares(_) | Asks::Unreadable(_) => false,
            })
        })
    }

    fn asker_of_whole(&self, uid: &PodUid) -> Option<Asker> {
        let pod = self.view.pod(uid)?;
        // Its node's CPU is kube-scheduler's to make room of.
        Some(Asker { pod: pod.at.clone(), priority: pod.standing.priority, is_usual: false, room: pod.room })
    }

    /// What has to end. Nothing where a GPU is free for it: nobody here knows what it waits for then.
    fn victims_for_whole(
        &mut self,
        asker: &Asker,
        need: &Need,
        (budgets, ticks, from): (Budgets, u64, usize),
        now: Moment,
    ) -> Result<VictimsFound, Nobody> {
        let whole = self.whole(asker, need, now).ok_or(Nobody::Anywhere)?;
        if let Some(node) = self.is_returning(asker, need).or_else(|| self.is_free(&whole)) {
            return Ok(VictimsFound::Free(node));
        }
        let nodes = std::slice::from_ref(&whole.nodes);
        let without = &whole.pinned;
        let look = VictimSearch { nodes, asker, unit: None, beside: &[], budgets, without, ticks, from, now };
        let usual = self.set_aside_for_others(&UnitKey::Pod(asker.pod.uid.clone()), asker.priority);
        self.refresh_holders();
        let holders = std::mem::take(&mut self.reserves.evictions.preempting.holders);
        let found = first(0..whole.shapes.len(), |nth| {
            let shape = &whole.shapes[nth];
            let preemptor = self.capacity.index.preemptor(shape, false);
            self.look_at_way(&look, (nth, shape), &holders, preemptor)
        });
        self.reserves.evictions.preempting.holders = holders;
        self.back_to_usual(usual);
        found
    }

    /// None: its selectors cannot be used, or not all of them were looked at.
    fn whole(&mut self, asker: &Asker, need: &Need, now: Moment) -> Option<Whole> {
        let uid = &asker.pod.uid;
        let shut = [self.barred_nodes(uid), self.ports_taken(uid)].into_iter();
        let pod = self.view.pod(uid)?;
        let claims = self.view.claims_of(pod).unwrap_or_default();
        let nodes = self.nodes(pod, &claims, shut, now);
        let nodes = self.nodes_then(uid, &nodes, now);
        let pods = if self.pods.has_place(uid) { 0 } else { asker.room.pods };
        let mut shapes = Vec::new();
        for kind in need.kinds.iter().take(KINDS_MAX) {
            let (selectors, tolerations) = (kind.selectors.clone(), kind.tolerations.as_slice().into());
            let shape = Shape {
                cpu_milli: asker.room.cpu_milli,
                memory: Bytes(asker.room.memory.0),
                pods,
                ..Shape::one(Want { selectors, tolerations, ..Want::whole(need.devices) })
            };
            if self.capacity.index.study(&shape) != Studied::Done {
                return None;
            }
            shapes.push(shape);
        }
        Some(Whole { shapes, nodes, pinned: self.holds.gpus.pinned().cloned().collect() })
    }

    /// A node with a GPU that nobody has, or that we hold and nobody uses.
    fn is_free(&mut self, whole: &Whole) -> Option<NodeName> {
        let shut: BTreeMap<GpuRef, bool> = whole.pinned.iter().map(|gpu| (gpu.clone(), false)).collect();
        let policy = self.rules.policy;
        let ask = |shape: &Shape| [PodAsk { shape: shape.clone(), nodes: whole.nodes.clone() }];
        let found = self.capacity.decide_with(&shut, |index| {
            whole.shapes.iter().find_map(|shape| places(index, &ask(shape), policy))
        });
        found?.pop().map(|place| place.node)
    }

    /// A node with a GPU that was given back a moment ago, and that the pod may be given.
    fn is_returning(&mut self, asker: &Asker, need: &Need) -> Option<NodeName> {
        let is_returning = |phase: &HoldPhase| matches!(phase, HoldPhase::Releasing { .. });
        let all = self.holds.all().filter(|(_, phase)| is_returning(phase)).map(|(gpu, _)| gpu);
        let all: Vec<GpuRef> = all.filter(|gpu| !self.view.is_anothers(gpu)).cloned().collect();
        let found = all.into_iter().find(|gpu| {
            let pod = self.view.pod(&asker.pod.uid);
            pod.is_some_and(|pod| self.why_not(pod, &gpu.node).is_none()) && self.serves(gpu, need)
        });
        found.map(|gpu| gpu.node)
    }

    /// What would be done for a pod that waits for a whole GPU, for people who ask. None: it waits for something else.
    pub(in crate::controller) fn prospect_of_whole(&mut self, uid: &PodUid, now: Moment) -> Option<Prospect> {
        let need = self.pods.demand.single(uid).filter(|need| is_one(need))?.clone();
        let starts_alone = |pod: &&Pod| self.view.minimum(pod).is_one();
        let pod = self.view.pod(uid).filter(|pod| self.is_all_known(pod)).filter(starts_alone)?;
        let (preempts, tried) = (pod.standing.preempts, pod.standing.tried);
        let asker = self.asker_of_whole(uid).filter(|_| !self.queue.contains(uid))?;
        self.refresh_holders();
        let any = self.reserves.evictions.preempting.holders.least(asker.priority).next().is_some();
        match any {
            false => return (asker.priority > 0).then_some(Prospect::Nobody { any }),
            true if !self.rules.preemption => return Some(Prospect::Off),
            true if !preempts => return Some(Prospect::Never { pod: asker.pod }),
            true if tried == Tried::ForOther => return Some(Prospect::WaitsForOther { pod: asker.pod }),
            true => {}
        }
        let mut prospect = Prospect::Nobody { any };
        for budgets in [Budgets::Kept, Budgets::Passed] {
            self.capacity.index.allow(TICKS);
            match self.victims_for_whole(&asker, &need, (budgets, TICKS, 0), now) {
                Ok(found) => {
                    prospect = self.prospect_for(found, budgets, |place| {
                        let names: Vec<String> =
                            gpus_of(place).iter().map(|gpu| gpu.device.to_string()).collect();
                        format!("{} is given back to kube-scheduler then", names.join(", "))
                    });
                    break;
                }
                Err(Nobody::Until(_)) => prospect = Prospect::Spent,
                Err(Nobody::Anywhere) => {}
            }
        }
        self.capacity.index.allow(u64::MAX);
        Some(prospect)
    }
}

/// One whole GPU.
fn is_one(need: &Need) -> bool {
    need.devices == 1 && need.whole
}

fn gpus_of(place: &Placement) -> BTreeSet<GpuRef> {
    place.gpus.iter().map(|grant| GpuRef::new(&place.node, &grant.device)).collect()
}
