//! Which pods of a node may end for another, and which of them only together: a gang ends whole, or down to its minimum.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Duration;

use crate::allocate::GpuView;
use crate::allocate::victims::{Candidate, Closed, Freed, rank_of};
use crate::controller::Moment;
use crate::controller::core::Core;
use crate::controller::gang::Minimum;
use crate::controller::holders::BoundPod;
use crate::controller::preempt::VICTIMS_MAX;
use crate::controller::queue::UnitKey;
use crate::controller::steps::preempting::KEEP_MAX;
use crate::controller::steps::preempting::search::{Budgets, VictimSearch};
use crate::controller::view::{BudgetGuard, Claim, GpuRef, Pod};
use crate::model::names::{DeviceName, NodeName, PodUid};
use crate::model::quantity::Bytes;

/// What is ending counts as free for so long after it was to have ended: after that nobody knows when it will be. So it
/// does from [`KEEP_MAX`] before that on.
const ENDS_LATE: Duration = Duration::from_secs(60);

/// Who may end on a node.
pub(super) struct There {
    pub soon: Vec<Freed>,
    /// The most important first.
    pub candidates: Vec<Candidate>,
    /// Of each candidate, whichever node they are on.
    pub pods: Vec<Vec<PodUid>>,
    /// How many pods each budget lets go.
    pub budgets: Vec<u32>,
    /// What the budgets' selectors have cost.
    pub ticks: u64,
}

/// The budgets of a node's pods, each with its number.
#[derive(Default)]
struct BudgetsOfNode {
    /// As if there were none.
    passed: bool,
    names: BTreeMap<String, usize>,
    allowed: Vec<u32>,
    ticks: u64,
}

/// A gang that may end.
struct Gang {
    /// The most important first.
    members: Vec<PodUid>,
    whole: Candidate,
    /// So many of its pods may go, and the others go on.
    spare: usize,
}

impl Core {
    /// Whether what is to have ended at this second, in Unix time, has done so soon: before that nobody counts on it, and
    /// long after that neither.
    pub(super) fn near(&self, now: Moment) -> impl Fn(i64) -> bool + use<> {
        let present = self.recorder.time_of(now).map(|time| time.as_second());
        let (late, early) = (seconds(ENDS_LATE), seconds(KEEP_MAX));
        move |ends| {
            present.is_none_or(|now| now <= ends.saturating_add(late) && ends <= now.saturating_add(early))
        }
    }

    pub(super) fn candidates(&self, look: &VictimSearch<'_>, holders: &[BoundPod]) -> There {
        let (priority, now) = (look.asker.priority, look.now);
        let chosen = self.reserves.evictions.preempting.chosen();
        let is_near = self.near(now);
        let mut soon = Vec::new();
        let mut known = BudgetsOfNode { passed: look.budgets == Budgets::Passed, ..BudgetsOfNode::default() };
        let mut all: Vec<(Candidate, Vec<PodUid>, Option<&UnitKey>)> = Vec::new();
        let mut gangs: BTreeMap<&UnitKey, Option<Gang>> = BTreeMap::new();
        for one in holders.iter().filter(|one| one.has_shares()) {
            let is_soon = match chosen.get(&one.pod) {
                // What is kept for whom it ends counts as taken: the rest is for others.
                Some(unit) if self.reserves.is_in_force(unit) => true,
                Some(_) => continue,
                None => !one.stays && one.ends.is_some_and(&is_near),
            };
            if is_soon {
                soon.push(freed(one));
                continue;
            }
            if !one.gives_way(priority) || self.reserves.evictions.preempting.is_spared(&one.pod, now) {
                continue;
            }
            let Some(pod) = self.view.pod(&one.pod) else { continue };
            match &one.gang {
                None => {
                    let Some(budgets) = known.of(self, pod) else { continue };
                    let candidate =
                        Candidate { budgets, ..Candidate::one(one.priority, one.start, freed(one)) };
                    all.push((candidate, vec![one.pod.clone()], None));
                }
                Some(key) => {
                    if !gangs.contains_key(key) {
                        gangs.insert(key, self.gang(key, look, &mut known));
                    }
                }
            }
        }
        for (key, gang) in gangs.iter().filter_map(|(key, gang)| Some((*key, gang.as_ref()?))) {
            all.extend(self.of_gang(key, gang, holders, &mut known));
        }
        // Stable: a gang stands before its pods.
        all.sort_by_key(|(one, ..)| (Reverse(one.priority), one.start));
        let places: BTreeMap<&UnitKey, usize> = all
            .iter()
            .enumerate()
            .filter(|(_, (_, pods, gang))| pods.len() > 1 && gang.is_some())
            .filter_map(|(at, (.., gang))| Some(((*gang)?, at)))
            .collect();
        let with: Vec<Option<usize>> = all
            .iter()
            .enumerate()
            .map(|(at, (.., gang))| {
                gang.and_then(|gang| places.get(gang).copied()).filter(|whole| *whole != at)
            })
            .collect();
        let (mut candidates, mut pods) = (Vec::new(), Vec::new());
        for ((candidate, of_it, _), with) in all.into_iter().zip(with) {
            candidates.push(Candidate { with, ..candidate });
            pods.push(of_it);
        }
        There { soon, candidates, pods, budgets: known.allowed, ticks: known.ticks }
    }

    /// None: it does not end for this pod, or nobody knows what that would mean.
    fn gang(&self, key: &UnitKey, look: &VictimSearch<'_>, known: &mut BudgetsOfNode) -> Option<Gang> {
        if self.pods.unit_of(&look.asker.pod.uid) == *key {
            return None;
        }
        let chosen = self.reserves.evictions.preempting.chosen();
        let mut members: Vec<&Pod> = Vec::new();
        let mut whole = Candidate { priority: i32::MIN, start: i64::MAX, ..Candidate::default() };
        for pod in self.pods.members(key).filter_map(|(uid, _)| self.view.pod(uid)) {
            if pod.ending || pod.node.is_none() || chosen.contains_key(&pod.at.uid) {
                continue;
            }
            let spared = self.reserves.evictions.preempting.is_spared(&pod.at.uid, look.now);
            if pod.standing.priority >= look.asker.priority || pod.standing.stays || spared {
                return None;
            }
            whole.priority = whole.priority.max(pod.standing.priority);
            whole.start = whole.start.min(pod.standing.started);
            whole.sum = whole.sum.saturating_add(rank_of(pod.standing.priority));
            whole.pods += 1;
            members.push(pod);
        }
        // One with more does not end whole, and what its budgets say costs nobody anything.
        if members.len() <= VICTIMS_MAX {
            for pod in &members {
                whole.budgets.extend(known.of(self, pod)?);
            }
        }
        members.sort_by_key(|pod| (Reverse(pod.standing.priority), pod.standing.started));
        let minimum = members.iter().map(|pod| self.view.minimum(pod)).reduce(Minimum::stronger)?;
        let spare = match minimum {
            Minimum::Pods(need) if !need.has_parts() => {
                let counts = |pod: &&&Pod| need.counts_all() || self.has_shares(pod);
                members.iter().filter(counts).count().saturating_sub(need.count())
            }
            Minimum::Pods(_) | Minimum::AllThere | Minimum::None(_) => 0,
        };
        let members = members.into_iter().map(|pod| pod.at.uid.clone()).collect();
        Some(Gang { members, whole, spare })
    }

    fn has_shares(&self, pod: &Pod) -> bool {
        self.view.claims_of(pod).into_iter().flatten().any(Claim::is_shares)
    }

    /// The gang as a whole, and those of its pods on the node that it can do without.
    fn of_gang<'a>(
        &self,
        key: &'a UnitKey,
        gang: &Gang,
        holders: &[BoundPod],
        known: &mut BudgetsOfNode,
    ) -> Vec<(Candidate, Vec<PodUid>, Option<&'a UnitKey>)> {
        let here: Vec<&BoundPod> = gang
            .members
            .iter()
            .filter_map(|uid| holders.iter().find(|one| one.pod == *uid && one.has_shares()))
            .collect();
        // A claim that others use, too.
        let is_bound_up = here.iter().any(|one| one.stays);
        let single = here.len().saturating_sub(gang.spare);
        let mut all = Vec::new();
        let rest = here[..single].iter().fold(Freed::default(), |sum, one| plus(sum, freed(one)));
        if single > 0 && gang.members.len() <= VICTIMS_MAX && !is_bound_up {
            let whole = Candidate { frees: rest, ..gang.whole.clone() };
            all.push((whole, gang.members.clone(), Some(key)));
        }
        for one in here[single..].iter().filter(|one| !one.stays) {
            let budgets = self.view.pod(&one.pod).and_then(|pod| known.of(self, pod));
            if let Some(budgets) = budgets {
                let candidate = Candidate { budgets, ..Candidate::one(one.priority, one.start, freed(one)) };
                all.push((candidate, vec![one.pod.clone()], Some(key)));
            }
        }
        all
    }

    /// How each GPU of a node is closed.
    pub(super) fn closed_on(&self, node: &NodeName) -> Vec<(DeviceName, Closed)> {
        let view = self.capacity.index.node(node);
        let of = |gpu: GpuView<'_>| {
            let closed = match gpu.closed() {
                true => self.capacity.closed(&GpuRef::new(node, gpu.device())),
                false => Closed { shut: false, groups: 0 },
            };
            (gpu.device().clone(), closed)
        };
        view.into_iter().flat_map(|view| view.gpus()).map(of).collect()
    }

    /// Learns who is on the nodes on which something has changed.
    pub(super) fn refresh_holders(&mut self) {
        for node in self.reserves.evictions.preempting.holders.take_stale() {
            let has_gpus = self.capacity.index.node(&node).is_some();
            let pods = self.pods.on(&node).filter(|_| has_gpus).filter_map(|uid| self.view.pod(uid));
            let bound = pods.filter(|pod| pod.node.as_ref() == Some(&node));
            let holders: Vec<BoundPod> = bound.map(|pod| self.holder(pod, &node)).collect();
            self.reserves.evictions.preempting.holders.fill(node, holders);
        }
    }

    fn holder(&self, pod: &Pod, node: &NodeName) -> BoundPod {
        let named =
            pod.requested.claims.iter().filter_map(|name| self.view.claim_named(&pod.at.namespace, name));
        let mut shares = Freed::default();
        // Marks keep nobody who is ending.
        let mut stays = pod.standing.stays && !pod.ending;
        for claim in named.filter(|claim| claim.is_shares()) {
            let grants = self.capacity.grants_on(claim.key, node);
            let others = claim.users.others || claim.users.pods.iter().any(|user| *user != pod.at.uid);
            let named = self.view.pods_of(claim).take(2).count() > 1;
            stays |= !grants.is_empty() && (others || named);
            shares.gpus.extend(grants);
        }
        let key = self.pods.unit_of(&pod.at.uid);
        BoundPod {
            pod: pod.at.uid.clone(),
            priority: pod.standing.priority,
            start: pod.standing.started,
            room: pod.room,
            shares,
            gang: matches!(key, UnitKey::Gang { .. }).then_some(key),
            stays,
            ends: pod.ending.then(|| pod.standing.ends.map_or(i64::MAX, |time| time.as_second())),
        }
    }
}

impl BudgetsOfNode {
    /// The numbers of the budgets that are about a pod. None: it stays, since they are several, of which the API server
    /// lets no pod go, or since not all of them are known.
    fn of(&mut self, core: &Core, pod: &Pod) -> Option<Vec<usize>> {
        if self.passed {
            return Some(Vec::new());
        }
        let mut all = Vec::new();
        let found = core.view.budgets_of(pod);
        self.ticks = self.ticks.saturating_add(found.ticks);
        let BudgetGuard::By(budgets) = found.guard else { return None };
        for (name, allowed) in budgets {
            let number = match self.names.get(name) {
                Some(number) => *number,
                None => {
                    self.allowed.push(allowed);
                    self.names.insert(name.to_owned(), self.allowed.len() - 1);
                    self.allowed.len() - 1
                }
            };
            all.push(number);
        }
        (all.len() <= 1).then_some(all)
    }
}

fn seconds(time: Duration) -> i64 {
    i64::try_from(time.as_secs()).unwrap_or(i64::MAX)
}

fn freed(one: &BoundPod) -> Freed {
    Freed {
        gpus: one.shares.gpus.clone(),
        cpu_milli: one.room.cpu_milli,
        memory: one.room.memory,
        pods: one.room.pods,
    }
}

fn plus(mut sum: Freed, other: Freed) -> Freed {
    sum.gpus.extend(other.gpus);
    sum.cpu_milli = sum.cpu_milli.saturating_add(other.cpu_milli);
    sum.memory = Bytes(sum.memory.0.saturating_add(other.memory.0));
    sum.pods = sum.pods.saturating_add(other.pods);
    sum
}
