//! How long it takes to find out who ends for a pod that fits nowhere, on a cluster that is full of pods of lower
//! priority: the allocator's part, as the controller calls it for each node that it looks at.

use std::time::{Duration, Instant};

use serde_json::json;

use super::{GPUS, ROUNDS, cluster, lower};
use crate::allocate::victims::{Candidate, Closed, EvictionSite, Freed, Rank};
use crate::allocate::{GpuGrant, Index, Part, Placement, Shape, Want};
use crate::model::names::{DeviceName, NodeName, PodUid};
use crate::model::quantity::Bytes;
use crate::model::share::Extent;

const NODES: u32 = 1_000;
/// Nodes that are looked at for one pod at most.
const LOOKED_AT: usize = 100;
const SHARES_PER_GPU: u32 = 4;
const DECISIONS: usize = 1_000;

/// In µs: p50, p99 and most.
pub(super) struct Preempted([f64; 3]);

impl Preempted {
    pub(super) fn words(&self) -> String {
        let [p50, p99, most] = self.0;
        format!(
            "\nWho ends for a pod, {NODES} nodes full of {SHARES_PER_GPU} shares on each GPU, {LOOKED_AT} of them looked \
             at, {DECISIONS} times: p50 {p50:.1} µs, p99 {p99:.1} µs, most {most:.1} µs.\n"
        )
    }

    pub(super) fn json(&self) -> String {
        let [p50, p99, most] = self.0;
        let object = json!({
            "preempt": true,
            "nodes": NODES,
            "gpus_per_node": GPUS,
            "decisions": DECISIONS,
            "rounds": ROUNDS,
            "p50_us": p50,
            "p99_us": p99,
            "most_us": most,
        });
        format!("{object}\n")
    }
}

pub(super) fn measure() -> Preempted {
    let mut random = fastrand::Rng::with_seed(1);
    let mut index = cluster(NODES);
    let nodes: Vec<(NodeName, Vec<Candidate>)> =
        (0..NODES).map(|nth| fill(&mut index, nth, &mut random)).collect();
    let mut least = [f64::MAX; 3];
    for _ in 0..ROUNDS {
        let mut took: Vec<Duration> = (0..DECISIONS).map(|nth| decide(&mut index, &nodes, nth)).collect();
        lower(&mut least, &mut took, [0.5, 0.99, 1.0]);
    }
    Preempted(least)
}

/// A node without room, and who may end there.
fn fill(index: &mut Index, nth: u32, random: &mut fastrand::Rng) -> (NodeName, Vec<Candidate>) {
    let node = NodeName::new(format!("node-{nth}"));
    let all = if nth.is_multiple_of(4) { 45_000 } else { 80_000 };
    let mut candidates = Vec::new();
    for (gpu, share) in (0..GPUS).flat_map(|gpu| (0..SHARES_PER_GPU).map(move |share| (gpu, share))) {
        let grant = GpuGrant {
            want: 0,
            device: DeviceName::whole(gpu),
            memory: Bytes::from_mib(all / u64::from(SHARES_PER_GPU)),
            compute: None,
            slots: 1,
            extent: Extent::Part,
        };
        let place = Placement {
            node: node.clone(),
            gpus: vec![grant.clone()],
            cpu_milli: 0,
            memory: Bytes(0),
            pods: 0,
        };
        // There is no other of this name.
        let _ = index.apply(&PodUid::new(format!("{nth}-{gpu}-{share}")), &place);
        let frees = Freed { gpus: vec![(grant, false)], cpu_milli: 1000, memory: Bytes(0), pods: 1 };
        candidates.push(Candidate::one(random.i32(0..10), random.i64(0..1_000_000), frees));
    }
    candidates.sort_by_key(|one| (std::cmp::Reverse(one.priority), one.start));
    (node, candidates)
}

/// For a pod that takes one, two or three shares of a GPU.
fn decide(index: &mut Index, nodes: &[(NodeName, Vec<Candidate>)], nth: usize) -> Duration {
    let part = Part::Memory(Bytes::from_mib(10_000 * (1 + nth as u64 % 3)));
    let shape = Shape { cpu_milli: 1_000, ..Shape::one(Want { part, ..Want::whole(1) }) };
    let open = |_: &DeviceName| Closed { shut: false, groups: 0 };
    let begun = Instant::now();
    let mut preemptor = index.preemptor(&shape, false);
    let mut order: Vec<(Rank, usize)> = Vec::with_capacity(nodes.len());
    for (at, (_, candidates)) in nodes.iter().enumerate() {
        let least = candidates.iter().map(|one| one.priority).min();
        let latest = candidates.iter().map(|one| one.start).max();
        order.extend(least.zip(latest).map(|(least, latest)| (Rank::least(least, latest), at)));
    }
    order.sort_unstable();
    let mut best: Option<Rank> = None;
    for (least, at) in order.into_iter().take(LOOKED_AT) {
        if best.is_some_and(|best| best <= least) {
            break;
        }
        let (node, candidates) = &nodes[at];
        let site = EvictionSite { node, closed: &open, soon: &[], candidates, budgets: &[], beat: best };
        let rank = index.victims(&mut preemptor, &site).and_then(|found| found.rank);
        best = match (best, rank) {
            (Some(best), Some(rank)) => Some(best.min(rank)),
            (best, rank) => best.or(rank),
        };
    }
    begun.elapsed()
}
