//! Which pods would have to end on a node so that another fits there. The order is kube-scheduler's (its plugin
//! DefaultPreemption): all that may end are taken away, then one after another comes back, the most important first, as
//! long as the pod still fits. Of two nodes the one whose victims are less important: by the highest of their priorities,
//! the sum of them, their number, and the start of those with the highest. Pods that a PodDisruptionBudget does not let go
//! are no victims here, however many there are of the others.

use std::cmp::Reverse;

use super::ask::Shape;
use super::fit::{Picked, Terms, placement};
use super::index::Index;
use super::node::{Gpu, GpuGrant, Node, Placement};
use super::search::{self, SearchCost};
use crate::model::names::{DeviceName, NodeName};
use crate::model::quantity::Bytes;
use crate::model::share::DaemonScope;

/// Tries of one preemptor, all nodes together. Only wants for several GPUs at once need many.
const STEPS_MAX: u32 = 20_000;
/// Of looking at one candidate, in ticks of [`crate::select::TICKS_PER_UNIT`].
const CANDIDATE_TICKS: u64 = 20;

/// What comes free on a node when pods end there.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Freed {
    /// Their shares. True: of a claim that has several GPUs, which are closed to others.
    pub gpus: Vec<(GpuGrant, bool)>,
    pub cpu_milli: u64,
    pub memory: Bytes,
    pub pods: u64,
}

/// Pods that end together, or not at all.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Candidate {
    /// The highest of them.
    pub priority: i32,
    /// When the first of them was started, in seconds since 1970.
    pub start: i64,
    /// How many there are, here and elsewhere.
    pub pods: u32,
    /// Of all of their priorities; kube-scheduler counts them from the lowest that there is.
    pub sum: i64,
    /// On the node that is looked at.
    pub frees: Freed,
    /// The place of another candidate, before this one in the list, whose pods are these and more: where that ends, this
    /// ends with it and is not named. What the other frees does not count what this one frees.
    pub with: Option<usize>,
    /// Of each pod that a budget is about: the budget's place among the node's.
    pub budgets: Vec<usize>,
}

impl Candidate {
    /// One pod of this priority alone.
    pub fn one(priority: i32, start: i64, frees: Freed) -> Self {
        let sum = rank_of(priority);
        Self { priority, start, pods: 1, sum, frees, with: None, budgets: Vec::new() }
    }
}

/// A priority as it is added up: more pods are never less.
pub fn rank_of(priority: i32) -> i64 {
    i64::from(priority) - i64::from(i32::MIN)
}

/// How a GPU is closed to shares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Closed {
    /// Whatever ends on it.
    pub shut: bool,
    /// Claims with shares of this GPU and of others.
    pub groups: u32,
}

/// A node on which pods may end.
pub struct EvictionSite<'a> {
    pub node: &'a NodeName,
    pub closed: &'a dyn Fn(&DeviceName) -> Closed,
    /// Of pods that are ending anyway.
    pub soon: &'a [Freed],
    /// The most important first.
    pub candidates: &'a [Candidate],
    /// How many pods each budget lets go now.
    pub budgets: &'a [u32],
    /// What is lost elsewhere: a node on which a more important pod has to end is not looked at to its end.
    pub beat: Option<Rank>,
}

/// How much is lost, the least first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rank {
    pub highest: i32,
    pub sum: i64,
    pub pods: u32,
    pub start: Reverse<i64>,
}

impl Rank {
    /// The least that can be lost on a node whose least important candidate has this priority, and whose latest was
    /// started then.
    pub fn least(priority: i32, start: i64) -> Self {
        Self { highest: priority, sum: rank_of(priority), pods: 1, start: Reverse(start) }
    }
}

/// What has to end on a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Victims {
    /// Places of candidates; empty: what ends anyway is enough.
    pub candidates: Vec<usize>,
    /// None: nothing has to end.
    pub rank: Option<Rank>,
    /// Where the pod would go.
    pub placement: Placement,
}

/// A pod for which others may end.
#[derive(Debug)]
pub struct Preemptor {
    shape: Shape,
    terms: Terms,
    /// Its claim has several GPUs: they have no other shares.
    alone: bool,
    tried: SearchCost,
}

impl Index {
    /// `alone`: a claim of the shape has several GPUs.
    pub fn preemptor(&mut self, shape: &Shape, alone: bool) -> Preemptor {
        let terms = Terms::new(shape, &self.nodes, &mut self.score_tables.choices);
        Preemptor { shape: shape.clone(), terms, alone, tried: SearchCost::default() }
    }

    /// The least that has to end on this node; none: it would not fit, or too much was tried already.
    pub fn victims(&mut self, preemptor: &mut Preemptor, site: &EvictionSite<'_>) -> Option<Victims> {
        let before = preemptor.tried.ticks;
        let id = self.ids.get(site.node).copied()?;
        let node = self.nodes.all[id].as_ref()?;
        let found = preemptor.on(node, site);
        let ticks = preemptor.tried.ticks - before;
        self.pay(ticks + CANDIDATE_TICKS * (1 + site.candidates.len() as u64));
        found
    }
}

impl Preemptor {
    fn on(&mut self, node: &Node, site: &EvictionSite<'_>) -> Option<Victims> {
        if self.tried.steps > STEPS_MAX {
            return None;
        }
        let mut stage = NodeTrial::new(node, site, self.alone);
        site.soon.iter().for_each(|freed| stage.free(freed));
        if let Some(placement) = self.place(&mut stage) {
            return Some(Victims { candidates: Vec::new(), rank: None, placement });
        }
        // Those that are more important than the most important one there would all have to stay.
        let beats = |one: &Candidate| site.beat.is_none_or(|beat| one.priority <= beat.highest);
        let may = |one: &Candidate| beats(one) && within(site.budgets, [one].into_iter());
        let mut may_end: Vec<bool> = site.candidates.iter().map(may).collect();
        let before = (!site.budgets.is_empty()).then(|| stage.clone());
        let (mut victims, mut placed) = self.reprieve(&mut stage, site, &may_end)?;
        if let Some(mut stage) = before
            && !within(site.budgets, victims.iter().map(|at| &site.candidates[*at]))
        {
            // Each of them may go, but not all: of each budget only the least important.
            let mut left = site.budgets.to_vec();
            for (may_end, one) in may_end.iter_mut().zip(site.candidates).rev().filter(|(may, _)| **may) {
                *may_end = within(&left, [one].into_iter());
                if *may_end {
                    one.budgets.iter().for_each(|budget| left[*budget] -= 1);
                }
            }
            (victims, placed) = self.reprieve(&mut stage, site, &may_end)?;
            if !within(site.budgets, victims.iter().map(|at| &site.candidates[*at])) {
                return None;
            }
        }
        let rank = rank(victims.iter().map(|at| &site.candidates[*at]));
        Some(Victims { candidates: victims, rank, placement: placed })
    }

    /// Places of those that have to end, and where the pod goes then.
    fn reprieve(
        &mut self,
        stage: &mut NodeTrial,
        site: &EvictionSite<'_>,
        may_end: &[bool],
    ) -> Option<(Vec<usize>, Placement)> {
        let taken: Vec<usize> = (0..site.candidates.len()).filter(|at| may_end[*at]).collect();
        taken.iter().for_each(|at| stage.free(&site.candidates[*at].frees));
        if !self.fits(stage) {
            return None;
        }
        let mut victims: Vec<usize> = Vec::new();
        for at in taken {
            let one = &site.candidates[at];
            if one.with.is_some_and(|with| victims.contains(&with)) {
                continue;
            }
            stage.take(&one.frees);
            if !self.fits(stage) {
                stage.free(&one.frees);
                victims.push(at);
            }
        }
        Some((victims, self.place(stage)?))
    }

    fn fits(&mut self, stage: &mut NodeTrial) -> bool {
        let node = stage.node();
        if !self.terms.node_has_room(node) {
            return false;
        }
        match self.terms.single() {
            Some(want) => {
                node.gpus.iter().filter(|gpu| want.left(gpu).is_some()).take(want.gpus).count() >= want.gpus
            }
            None => search::run(node, &self.terms, &|_, fit| fit.left, &mut self.tried).is_some(),
        }
    }

    /// The GPUs that keep least free.
    fn place(&mut self, stage: &mut NodeTrial) -> Option<Placement> {
        let node = stage.node();
        if !self.terms.node_has_room(node) {
            return None;
        }
        let picks = search::run(node, &self.terms, &|_, fit| fit.left, &mut self.tried)?;
        let picked: Vec<Picked> = picks.iter().map(|pick| pick.picked).collect();
        Some(placement(&self.shape, &self.terms, node, &picked))
    }
}

/// No budget is asked for more than it has.
fn within<'a>(budgets: &[u32], candidates: impl Iterator<Item = &'a Candidate>) -> bool {
    if budgets.is_empty() {
        return true;
    }
    let mut left = budgets.to_vec();
    candidates.flat_map(|one| &one.budgets).all(|budget| {
        let left = left.get_mut(*budget).filter(|left| **left > 0);
        left.map(|left| *left -= 1).is_some()
    })
}

fn rank<'a>(victims: impl Iterator<Item = &'a Candidate> + Clone) -> Option<Rank> {
    let highest = victims.clone().map(|one| one.priority).max()?;
    let start = victims.clone().filter(|one| one.priority == highest).map(|one| one.start).min()?;
    let sum = victims.clone().fold(0, |sum: i64, one| sum.saturating_add(one.sum));
    let pods = victims.fold(0, |sum: u32, one| sum.saturating_add(one.pods));
    Some(Rank { highest, sum, pods, start: Reverse(start) })
}

/// A node as it would be.
#[derive(Clone)]
struct NodeTrial {
    node: Node,
    /// By place of the GPU.
    closed: Vec<Closed>,
    alone: bool,
}

impl NodeTrial {
    fn new(node: &Node, site: &EvictionSite<'_>, alone: bool) -> Self {
        let closed = node.gpus.iter().map(|gpu| (site.closed)(&gpu.device)).collect();
        Self { node: node.clone(), closed, alone }
    }

    fn free(&mut self, freed: &Freed) {
        self.node.cpu_milli = self.node.cpu_milli.saturating_add(freed.cpu_milli);
        self.node.memory_mib = self.node.memory_mib.saturating_add(freed.memory.mib_floor());
        self.node.pods = self.node.pods.saturating_add(freed.pods);
        for (grant, is_group) in &freed.gpus {
            if let Some((gpu, closed)) = self.gpu(&grant.device) {
                gpu.give(grant);
                closed.groups = closed.groups.saturating_sub(u32::from(*is_group));
            }
        }
    }

    /// The other way round.
    fn take(&mut self, freed: &Freed) {
        self.node.cpu_milli = self.node.cpu_milli.saturating_sub(freed.cpu_milli);
        self.node.memory_mib = self.node.memory_mib.saturating_sub(freed.memory.mib_floor());
        self.node.pods = self.node.pods.saturating_sub(freed.pods);
        for (grant, is_group) in &freed.gpus {
            if let Some((gpu, closed)) = self.gpu(&grant.device) {
                gpu.take(grant);
                closed.groups += u32::from(*is_group);
            }
        }
    }

    fn gpu(&mut self, device: &DeviceName) -> Option<(&mut Gpu, &mut Closed)> {
        let mut all = self.node.gpus.iter_mut().zip(&mut self.closed);
        all.find(|(gpu, _)| gpu.device == *device)
    }

    /// The node, with what is closed worked out.
    fn node(&mut self) -> &Node {
        for (gpu, closed) in self.node.gpus.iter_mut().zip(&self.closed) {
            let is_used = self.alone && gpu.daemon == DaemonScope::Gpu && !gpu.sizes.is_empty();
            gpu.closed = closed.shut || closed.groups > 0 || is_used;
        }
        self.node.changed(self.node.changed_at);
        &self.node
    }
}
