//! How well a pod would sit on a node. Lower is better; equal scores go to the node that was added first.

use std::fmt;
use std::str::FromStr;

use super::cut;
use super::fit::{Picked, Terms};
use super::fragment::{Lost, Tally, Targets};
use super::mig::Carving;
use super::node::{Gpu, Node};
use super::search::{self, Fit, SearchCost};
use crate::model::share::Isolation;

/// What placements aim at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum Policy {
    /// Leave as little as possible on the GPU, then on the node: whole GPUs and whole nodes stay free.
    #[default]
    Pack,
    /// Leave as much as possible: neighbours are few.
    Spread,
    /// Make as little as possible unusable for pods like those seen so far.
    Fragmentation,
}

impl Policy {
    pub const ALL: [Self; 3] = [Self::Pack, Self::Spread, Self::Fragmentation];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pack => "pack",
            Self::Spread => "spread",
            Self::Fragmentation => "fragmentation",
        }
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Policy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|policy| policy.as_str() == text);
        found.ok_or_else(|| format!("{text:?} is not a valid policy; use pack, spread or fragmentation"))
    }
}

/// Three numbers in one, the first outweighs the second, the second the third.
pub(super) type Score = u128;
/// The pod does not fit.
pub(super) const DOES_NOT_FIT: Score = u128::MAX;

const SECOND_BITS: u32 = 40;
const THIRD_BITS: u32 = 24;

fn score(first: u64, second: u64, third: u64) -> Score {
    let second = u128::from(second.min((1 << SECOND_BITS) - 1));
    let third = u128::from(third.min((1 << THIRD_BITS) - 1));
    // The largest first would collide with `DOES_NOT_FIT`.
    let first = u128::from(first.min(u64::MAX - 1));
    first << (SECOND_BITS + THIRD_BITS) | second << THIRD_BITS | third
}

/// Work space, so that scoring allocates nothing.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    /// Fitting GPUs: cost, place.
    fitting: Vec<(u64, usize)>,
    /// The GPUs chosen last.
    pub picked: Vec<Picked>,
    /// Places of nodes that changed, and their old scores.
    pub changed: Vec<(usize, Score)>,
    /// What this decision has tried to serve several wants together.
    pub tried: SearchCost,
    #[cfg(test)]
    pub rated: usize,
    tally: Tally,
    lost: Lost,
}

/// The pod's score on a node, with the best of the node's GPUs, which are left in `scratch.picked`.
pub(super) fn rate(
    policy: Policy,
    node: &Node,
    terms: &Terms,
    targets: &Targets,
    scratch: &mut Scratch,
) -> Score {
    #[cfg(test)]
    {
        scratch.rated += 1;
    }
    scratch.picked.clear();
    scratch.fitting.clear();
    if !terms.node_has_room(node) {
        return DOES_NOT_FIT;
    }
    let Some(want) = terms.single() else { return rate_several(policy, node, terms, targets, scratch) };
    for (at, gpu) in node.gpus.iter().enumerate().take(if want.gpus == 0 { 0 } else { usize::MAX }) {
        match &gpu.cut {
            None => {
                if let Some(left) = want.left(gpu) {
                    scratch.fitting.push((cost(policy, targets, gpu, left, gpu.free_mib() - left), at));
                }
            }
            Some(cut) => {
                if let Some(carving) = want.carving(gpu, cut) {
                    let left = cut.left(carving, gpu.memory_mib);
                    scratch.fitting.push((cost_of_carving(policy, targets, gpu, carving, left), at));
                }
            }
        }
    }
    if scratch.fitting.len() < want.gpus {
        return DOES_NOT_FIT;
    }
    match want.gpus {
        1 if policy == Policy::Fragmentation && !want.is_mig => {
            return by_fragmentation(node, terms, targets, scratch);
        }
        1 => keep_least(&mut scratch.fitting),
        _ => scratch.fitting.sort_unstable(),
    }
    let picked = |(_, at): &(u64, usize)| {
        let gpu = &node.gpus[*at];
        let carving = gpu.cut.as_ref().and_then(|cut| want.carving(gpu, cut));
        Picked { gpu: *at, want: 0, place: carving.map(|carving| carving.place) }
    };
    scratch.picked.extend(scratch.fitting.iter().take(want.gpus).map(picked));
    let mib = |one: &Picked| one.mib(terms, &node.gpus[one.gpu]);
    let taken = scratch.picked.iter().map(mib).fold(0, u64::saturating_add);
    let costs =
        scratch.fitting.iter().take(want.gpus).fold(0_u64, |sum, (cost, _)| sum.saturating_add(*cost));
    whole_score(policy, Candidate { node, terms, targets }, Price { costs, taken }, scratch)
}

fn keep_least(fitting: &mut Vec<(u64, usize)>) {
    let least = fitting.iter().copied().min();
    fitting.clear();
    fitting.extend(least);
}

/// The same for several wants, or GPUs that must be alike.
fn rate_several(
    policy: Policy,
    node: &Node,
    terms: &Terms,
    targets: &Targets,
    scratch: &mut Scratch,
) -> Score {
    let cost = |gpu: &Gpu, fit: Fit| match fit.carving {
        None => cost(policy, targets, gpu, fit.left, fit.mib),
        Some(carving) => cost_of_carving(policy, targets, gpu, carving, fit.left),
    };
    let found = search::run(node, terms, &cost, &mut scratch.tried);
    let Some(picks) = found else { return DOES_NOT_FIT };
    scratch.picked.extend(picks.iter().map(|pick| pick.picked));
    let costs = picks.iter().fold(0_u64, |sum, pick| sum.saturating_add(pick.cost));
    let taken = picks.iter().map(|pick| pick.mib).fold(0, u64::saturating_add);
    whole_score(policy, Candidate { node, terms, targets }, Price { costs, taken }, scratch)
}

/// A node that a pod may go to.
#[derive(Clone, Copy)]
struct Candidate<'a> {
    node: &'a Node,
    terms: &'a Terms,
    targets: &'a Targets,
}

/// What the picked GPUs cost by the policy, all together, and the MiB that are taken of them.
#[derive(Clone, Copy)]
struct Price {
    costs: u64,
    taken: u64,
}

/// The score of the GPUs in `scratch.picked`, for their price.
fn whole_score(
    policy: Policy,
    Candidate { node, terms, targets }: Candidate<'_>,
    Price { costs, taken }: Price,
    scratch: &mut Scratch,
) -> Score {
    // Of a GPU that is cut the largest MIG device counts, of which two may be more.
    let free = node.usable_mib.saturating_sub(taken);
    let cpu = node.free_cpu_milli() - terms.cpu_milli;
    match policy {
        Policy::Pack => score(costs, free, cpu),
        Policy::Fragmentation if terms.single().is_some_and(|want| want.is_mig) => score(costs, free, cpu),
        Policy::Spread => score(costs, MAX_SECOND - free.min(MAX_SECOND), MAX_THIRD - cpu.min(MAX_THIRD)),
        Policy::Fragmentation => {
            let Scratch { picked, tally, lost, .. } = scratch;
            tally.count(targets, node, None);
            let before = lost.of(targets, node, tally);
            tally.count(targets, node, Some((terms, picked)));
            tally.feed(targets, node, terms.cpu_milli, terms.memory_mib);
            let after = tally.lost(targets);
            score(gradient(before, after), free, cpu)
        }
    }
}

/// To turn "the more the better" round.
const MAX_SECOND: u64 = (1 << SECOND_BITS) - 1;
const MAX_THIRD: u64 = (1 << THIRD_BITS) - 1;

/// What it costs to use a GPU of a node, for choosing among them.
fn cost(policy: Policy, targets: &Targets, gpu: &Gpu, left: u64, mib: u64) -> u64 {
    match policy {
        Policy::Pack => {
            // On this rung a limit is exact where all shares have one size: mixing two weighs as much as leaving
            // room for one more share.
            let mixed = if gpu.isolation == Isolation::Mps && gpu.mixes(mib) { mib } else { 0 };
            left.saturating_add(mixed).min(MAX_SECOND) | targets.sought.rank(gpu.class) << SECOND_BITS
        }
        Policy::Fragmentation => left,
        Policy::Spread => MAX_SECOND - left.min(MAX_SECOND),
    }
}

/// The same for a MIG device that is made of it. What it makes impossible is counted exactly, so that the policies `pack` and
/// `fragmentation` are one here.
fn cost_of_carving(policy: Policy, targets: &Targets, gpu: &Gpu, carving: Carving, left: u64) -> u64 {
    match policy {
        Policy::Pack => cut::cost(carving, targets.sought.rank(gpu.class), left),
        Policy::Fragmentation => cut::cost(carving, 0, left),
        Policy::Spread => MAX_SECOND - left.min(MAX_SECOND),
    }
}

/// A share goes to the GPU where it makes least unusable.
fn by_fragmentation(node: &Node, terms: &Terms, targets: &Targets, scratch: &mut Scratch) -> Score {
    let Scratch { fitting, picked, tally, lost, .. } = scratch;
    tally.count(targets, node, None);
    let before = lost.of(targets, node, tally);
    tally.feed(targets, node, terms.cpu_milli, terms.memory_mib);
    let mut best: Option<(u64, u64, usize)> = None;
    for (nth, &(left, at)) in fitting.iter().enumerate() {
        let class = node.gpus[at].class;
        // GPUs in the same state score the same.
        if fitting[..nth].iter().any(|&(other, seen)| other == left && node.gpus[seen].class == class) {
            continue;
        }
        let free = node.gpus[at].usable_mib();
        let after = tally.lost_with(targets, class, free, left);
        let candidate = (gradient(before, after), left, at);
        if best.is_none_or(|best| candidate < best) {
            best = Some(candidate);
        }
    }
    let Some((gradient, left, at)) = best else { return DOES_NOT_FIT };
    picked.push(Picked { gpu: at, want: 0, place: None });
    let taken = node.gpus[at].free_mib() - left;
    score(gradient, node.usable_mib - taken, node.free_cpu_milli() - terms.cpu_milli)
}

/// What more is lost, as a number that is never negative.
fn gradient(before: u64, after: u64) -> u64 {
    (1_u64 << 62).saturating_add(after).saturating_sub(before)
}
