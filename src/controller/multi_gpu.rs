//! Claims with shares of several GPUs. On rung `mps` one daemon serves all GPUs of such a claim. Where a GPU has one daemon
//! for all of its shares, they go to GPUs that have no other shares, or that another claim has in the same company. Where
//! each claim has a daemon of its own (`mps.daemon=share`), and on GPUs that are cut into MIG devices, nothing stands in
//! the way of others.

use std::collections::{BTreeMap, BTreeSet};

use crate::allocate::{self, Decision, Explanation, Nodes, PodAsk, Policy};
use crate::controller::capacity::{Aside, Capacity};
use crate::controller::view::GpuRef;

/// Companies that are tried before GPUs without shares.
const COMPANIES_MAX: usize = 16;

/// As [`allocate::decide`].
///
/// # Errors
/// There is no place.
pub fn decide(capacity: &mut Capacity, asks: &[PodAsk], policy: Policy) -> Result<Decision, Explanation> {
    if let [ask] = asks {
        let size = usize::try_from(ask.shape.gpus()).unwrap_or(usize::MAX);
        for company in capacity.groups(size).into_iter().take(COMPANIES_MAX) {
            if let Some(decision) = beside(capacity, ask, &company, policy) {
                return Ok(decision);
            }
        }
    }
    // What one pod gets is set aside while the next is looked at.
    let (mut placements, mut aside) = (Vec::with_capacity(asks.len()), 0);
    let decision = asks.iter().try_for_each(|ask| {
        let taken = capacity.taken_gpus().filter(|gpu| capacity.has_one_daemon(gpu));
        let taken: BTreeMap<GpuRef, bool> = taken.map(|gpu| (gpu, false)).collect();
        let one = std::slice::from_ref(ask);
        let decision = capacity.decide_with(&taken, |index| allocate::decide(index, one, policy));
        let gang = (aside, asks.len());
        let Decision { placements: places } = decision.map_err(|refused| Explanation { gang, ..refused })?;
        placements.extend(places.iter().cloned());
        capacity.set_aside(Aside { places, alone: true });
        aside += 1;
        Ok(())
    });
    (0..aside).for_each(|_| drop(capacity.lift()));
    decision.map(|()| Decision { placements })
}

/// On the same GPUs as another claim, if there is room.
fn beside(
    capacity: &mut Capacity,
    ask: &PodAsk,
    company: &BTreeSet<GpuRef>,
    policy: Policy,
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
    capacity.decide_with(&gpus, |index| allocate::decide(index, &[ask], policy)).ok()
}
