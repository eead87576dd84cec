//! How many GPUs MIG devices of a made mix of sizes take: placed as the controller does, and each at the first placement of
//! the first GPU, as a scheduler does that does not rate them. Counts, no times.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::json;

use super::GPUS;
use crate::allocate::mig::MigLayout;
use crate::allocate::{Division, GpuSpec, Index, MigBoard, NodeSpec, Part, Policy, Shape, Want, decide};
use crate::model::gpu::{MigCapacity, Placement};
use crate::model::mig::{MigPlace, MigProfile};
use crate::model::names::{DeviceName, NodeName, PodUid};
use crate::model::quantity::Bytes;
use crate::model::share::{Isolation, Percent};

const NODES: u32 = 40;
/// Pods that are there at a time, and that come in place of others.
#[derive(Debug, Clone, Copy)]
struct Pods {
    at_once: usize,
    changes: usize,
}

const PODS: Pods = Pods { at_once: 400, changes: 4_000 };
/// MiB, percent of the multiprocessors, and how many of ten pods: 1g, 2g, 3g, 4g and 7g of an H100.
const MIX: [(u64, u8, u32); 5] =
    [(9_000, 0, 5), (19_000, 25, 2), (40_000, 0, 1), (40_000, 50, 1), (80_000, 0, 1)];
/// Id, name, compute slices, how many fit, MiB, where it may begin, memory slices.
type ProfileRow = (u32, &'static str, u32, u32, u64, &'static [u32], u32);
const H100: [ProfileRow; 6] = [
    (0, "7g.80gb", 7, 1, 81_152, &[0], 8),
    (5, "4g.40gb", 4, 1, 40_448, &[0], 4),
    (9, "3g.40gb", 3, 2, 40_448, &[0, 4], 4),
    (14, "2g.20gb", 2, 3, 20_096, &[0, 2, 4], 2),
    (15, "1g.20gb", 1, 4, 20_096, &[0, 2, 4, 6], 2),
    (19, "1g.10gb", 1, 7, 9_984, &[0, 1, 2, 3, 4, 5, 6], 1),
];

/// The most GPUs that are in use at a time.
pub(super) struct Used {
    ours: usize,
    first_fit: usize,
}

impl Used {
    pub(super) fn words(&self) -> String {
        format!(
            "\nGPUs in use by {} MIG devices of a made mix, in place of which {} others come: {} at most, with \
             the first placement of the first GPU {}.\n",
            PODS.at_once, PODS.changes, self.ours, self.first_fit
        )
    }

    pub(super) fn json(&self) -> String {
        let object = json!({
            "mig": true,
            "pods": PODS.at_once,
            "changes": PODS.changes,
            "mig_gpus_used": self.ours,
            "mig_gpus_first_fit": self.first_fit,
        });
        format!("{object}\n")
    }
}

/// Places pods, by number, and ends them.
trait PodPlacer {
    fn place(&mut self, pod: usize, mib: u64, percent: u8);
    fn end(&mut self, pod: usize);
    fn used(&self) -> usize;
}

pub(super) fn measure() -> Used {
    of(PODS)
}

fn of(pods: Pods) -> Used {
    let (mut ours, mut first) = (Ours(cluster()), FirstFit::new());
    Used { ours: most(&mut ours, pods), first_fit: most(&mut first, pods) }
}

fn most(placer: &mut impl PodPlacer, Pods { at_once, changes }: Pods) -> usize {
    let mut random = fastrand::Rng::with_seed(1);
    let (mut live, mut most) = (Vec::new(), 0);
    for pod in 0..at_once + changes {
        if live.len() >= at_once {
            placer.end(live.swap_remove(random.usize(..live.len())));
        }
        let all: u32 = MIX.iter().map(|(.., weight)| *weight).sum();
        let mut roll = random.u32(..all);
        let kind = MIX.iter().find(|(.., weight)| {
            let is_it = roll < *weight;
            roll = roll.saturating_sub(*weight);
            is_it
        });
        let (mib, percent, _) = kind.copied().unwrap_or(MIX[0]);
        placer.place(pod, mib, percent);
        live.push(pod);
        most = most.max(placer.used());
    }
    most
}

fn profiles() -> Arc<[MigProfile]> {
    let profile = |(id, name, slices, most, mib, starts, size): ProfileRow| MigProfile {
        id,
        name: name.to_owned(),
        slices,
        most,
        capacity: MigCapacity { memory: Bytes::from_mib(mib), ..MigCapacity::default() },
        placements: starts.iter().map(|start| Placement { start: *start, size }).collect(),
    };
    H100.into_iter().map(profile).collect()
}

fn cluster() -> Index {
    let mut index = Index::new();
    let board = MigBoard { profiles: profiles(), foreign: Vec::new(), parts: None, given_whole: false };
    for nth in 0..NODES {
        let gpu = |minor| GpuSpec {
            device: DeviceName::whole(minor),
            product: "NVIDIA H100".to_owned(),
            division: Division::Mig(board.clone()),
            facts: Arc::default(),
        };
        index.insert_node(&NodeSpec {
            name: NodeName::new(format!("node-{nth}")),
            cpu_milli: 128_000,
            memory: Bytes::from_mib(1 << 20),
            gpus: (0..GPUS).map(gpu).collect(),
        });
    }
    index
}

struct Ours(Index);

impl PodPlacer for Ours {
    fn place(&mut self, pod: usize, mib: u64, percent: u8) {
        let want = Want {
            part: Part::Memory(Bytes::from_mib(mib)),
            compute: Percent::try_from(percent).ok(),
            minimum_isolation: Isolation::Mig,
            ..Want::whole(1)
        };
        let shape = Shape::one(want);
        self.0.seen(&shape);
        let placed = decide(&mut self.0, &[shape.into()], Policy::Pack).ok();
        if let Some(placement) = placed.and_then(|mut placed| placed.placements.pop()) {
            // Neither unknown nor placed before.
            let _ = self.0.apply(&PodUid::new(pod.to_string()), &placement);
        }
    }

    fn end(&mut self, pod: usize) {
        self.0.remove(&PodUid::new(pod.to_string()));
    }

    fn used(&self) -> usize {
        let is_used = |node: &crate::allocate::NodeView<'_>| {
            node.gpus().filter(|gpu| gpu.memory().0 != gpu.memory().1).count()
        };
        self.0.nodes().map(|node| is_used(&node)).sum()
    }
}

struct FirstFit {
    profiles: Arc<[MigProfile]>,
    gpus: Vec<Vec<MigPlace>>,
    pods: BTreeMap<usize, (usize, MigPlace)>,
}

impl FirstFit {
    fn new() -> Self {
        let gpus = vec![Vec::new(); (NODES * GPUS) as usize];
        Self { profiles: profiles(), gpus, pods: BTreeMap::new() }
    }
}

impl PodPlacer for FirstFit {
    fn place(&mut self, pod: usize, mib: u64, percent: u8) {
        let slices = self.profiles.iter().map(|one| one.slices).max().unwrap_or(0);
        let suffices = |one: &&MigProfile| {
            one.capacity.memory >= Bytes::from_mib(mib) && one.slices * 100 >= u32::from(percent) * slices
        };
        // The profiles stand in the order of their size, the largest first.
        let enough: Vec<&MigProfile> = self.profiles.iter().rev().filter(suffices).collect();
        let first = self.gpus.iter().enumerate().find_map(|(at, instances)| {
            let layout = MigLayout::new(&self.profiles, instances.iter().copied());
            let first = enough.iter().find_map(|profile| layout.free(profile).next());
            first.map(|first| (at, first))
        });
        if let Some((at, place)) = first {
            self.gpus[at].push(place);
            self.pods.insert(pod, (at, place));
        }
    }

    fn end(&mut self, pod: usize) {
        if let Some((at, place)) = self.pods.remove(&pod) {
            self.gpus[at].retain(|one| *one != place);
        }
    }

    fn used(&self) -> usize {
        self.gpus.iter().filter(|instances| !instances.is_empty()).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::share::Extent;

    #[test]
    fn fewer_gpus_are_used_than_by_a_first_fit() {
        let Used { ours, first_fit } = of(Pods { at_once: 60, changes: 240 });
        assert!(ours <= first_fit, "{ours} and {first_fit}");
        assert!(first_fit < (NODES * GPUS) as usize, "nobody is refused");
    }

    #[test]
    fn a_grant_is_of_a_mig_device() {
        let mut ours = Ours(cluster());
        ours.place(1, 9_000, 0);
        let placement = ours.0.placement(&PodUid::new("1"));
        assert!(matches!(placement.map(|one| one.gpus[0].extent), Some(Extent::Mig(_))));
        assert_eq!(ours.used(), 1);
    }
}
