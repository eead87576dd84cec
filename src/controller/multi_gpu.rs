//! Claims with shares of several GPUs. On rung `mps` one daemon serves all GPUs of such a claim. Where a GPU has one daemon
//! for all of its shares, they go to GPUs that have no other shares, or that another claim has in the same company. Where
//! each claim has a daemon of its own (`mps.daemon=share`), and on GPUs that are cut into MIG devices, nothing stands in
//! the way of others.

use std::collections::{BTreeMap, BTreeSet};

use crate::allocate::{self, Decision, Explanation, Index, Nodes, PodAsk, Policy, Shortage, Skipped};
use crate::controller::capacity::{Aside, Capacity};
use crate::controller::view::GpuRef;

/// Companies that are tried before GPUs without shares.
const COMPANIES_MAX: usize = 16;

/// Of looking whether a GPU has shares, in ticks of [`crate::select::TICKS_PER_UNIT`].
const GPU_TICKS: u64 = 5;

/// As [`allocate::decide`].
///
/// # Errors
/// There is no place.
pub fn decide(capacity: &mut Capacity, asks: &[PodAsk], policy: Policy) -> Result<Decision, Explanation> {
    let decide = |index: &mut Index, asks: &[PodAsk]| allocate::decide(index, asks, policy);
    let spent = |gang, ask: &PodAsk| Explanation {
        gang,
        shortage: Shortage::Unsearched { wants: ask.shape.wants.len() },
        skipped: Skipped::default(),
    };
    all(capacity, asks, decide, (|refused, gang| Explanation { gang, ..refused }, spent))
}

/// The same without an explanation, as [`allocate::places`].
pub fn places(capacity: &mut Capacity, asks: &[PodAsk], policy: Policy) -> Option<Decision> {
    let places = |index: &mut Index, asks: &[PodAsk]| {
        allocate::places(index, asks, policy).map(|placements| Decision { placements }).ok_or(())
    };
    all(capacity, asks, places, (|(), _| (), |_, _: &PodAsk| ())).ok()
}

/// `one`: decides for one pod. `of_gang`: its refusal, with how many of how many pods had their place. `spent`: that of a
/// pod for which nothing was left to spend.
fn all<E>(
    capacity: &mut Capacity,
    asks: &[PodAsk],
    one: impl Fn(&mut Index, &[PodAsk]) -> Result<Decision, E>,
    (of_gang, spent): (impl Fn(E, (usize, usize)) -> E, impl Fn((usize, usize), &PodAsk) -> E),
) -> Result<Decision, E> {
    if let [ask] = asks {
        let size = usize::try_from(ask.shape.gpus()).unwrap_or(usize::MAX);
        for company in capacity.groups(size).into_iter().take(COMPANIES_MAX) {
            if let Some(decision) = beside(capacity, ask, &company, &one) {
                return Ok(decision);
            }
            if !capacity.index.goes_on() {
                return Err(spent((0, 1), ask));
            }
        }
    }
    // What one pod gets is set aside while the next is looked at.
    let (mut placements, mut aside) = (Vec::with_capacity(asks.len()), 0);
    let decision = asks.iter().try_for_each(|ask| {
        if aside > 0 && !capacity.index.goes_on() {
            return Err(spent((aside, asks.len()), ask));
        }
        let taken = capacity.taken_gpus().filter(|gpu| capacity.has_one_daemon(gpu));
        let taken: BTreeMap<GpuRef, bool> = taken.map(|gpu| (gpu, false)).collect();
        capacity.index.pay(GPU_TICKS.saturating_mul(taken.len() as u64));
        let decision = capacity.decide_with(&taken, |index| one(index, std::slice::from_ref(ask)));
        let gang = (aside, asks.len());
        let Decision { placements: places } = decision.map_err(|refused| of_gang(refused, gang))?;
        placements.extend(places.iter().cloned());
        capacity.set_aside(Aside { places, alone: true });
        aside += 1;
        Ok(())
    });
    (0..aside).for_each(|_| drop(capacity.lift()));
    decision.map(|()| Decision { placements })
}

/// On the same GPUs as another claim, if there is room.
fn beside<E>(
    capacity: &mut Capacity,
    ask: &PodAsk,
    company: &BTreeSet<GpuRef>,
    one: &impl Fn(&mut Index, &[PodAsk]) -> Result<Decision, E>,
) -> Option<Decision> {
    let node = &company.first()?.node;
    if !ask.nodes.allow(node) {
        return None;
    }
    let gpus = capacity.index.nodes().find(|view| view.name() == node)?;
    let gpus: BTreeMap<GpuRef, bool> = gpus
        .gpus()
        .map(|gpu| GpuRef::new(node, gpu.device()))
        .map(|gpu| (gpu.clone(), company.contains(&gpu)))
        .collect();
    let ask = PodAsk { nodes: Nodes::Only([node.clone()].into()), shape: ask.shape.clone() };
    capacity.decide_with(&gpus, |index| one(index, &[ask])).ok()
}
