//! Claims with shares of several GPUs. On rung `mps` one daemon serves all GPUs of such a claim, and no GPU can
//! have two daemons: they go to GPUs that have no other shares, or that another claim has in the same company.

use std::collections::{BTreeMap, BTreeSet};

use crate::allocate::{self, Decision, Explanation, Nodes, Placement, PodAsk, Policy};
use crate::controller::capacity::Capacity;
use crate::controller::view::GpuRef;
use crate::feasible::Resources;
use crate::model::names::NodeName;

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
    // Shares that are placed within this decision must not meet either: each pod has its GPUs for itself. What else
    // it takes of its node is not there for the next one.
    // GPUs that are cut into MIG devices have no daemon.
    let has_daemon = |gpu: &GpuRef| !capacity.is_cut(gpu);
    let mut taken: BTreeMap<GpuRef, bool> =
        capacity.taken_gpus().filter(has_daemon).map(|gpu| (gpu, false)).collect();
    let mut rooms: BTreeMap<NodeName, Resources> = BTreeMap::new();
    let mut placements = Vec::with_capacity(asks.len());
    for ask in asks {
        let one = std::slice::from_ref(ask);
        let decision = capacity.decide_with(&taken, &rooms, |index| allocate::decide(index, one, policy));
        let gang = (placements.len(), asks.len());
        let decision = decision.map_err(|refused| Explanation { gang, ..refused })?;
        for placement in &decision.placements {
            taken.extend(
                placement.gpus.iter().map(|grant| (GpuRef::new(&placement.node, &grant.device), false)),
            );
            let room = rooms.entry(placement.node.clone()).or_default();
            *room = room.plus(room_of(placement));
        }
        placements.extend(decision.placements);
    }
    Ok(Decision { placements })
}

fn room_of(placement: &Placement) -> Resources {
    Resources { cpu_milli: placement.cpu_milli, memory: placement.memory, pods: placement.pods }
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
    capacity.decide_with(&gpus, &BTreeMap::new(), |index| allocate::decide(index, &[ask], policy)).ok()
}
