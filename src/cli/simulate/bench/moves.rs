//! How long it takes to find which pods have to move: on a cluster with room that is in too small pieces, for pods that
//! wait.

use std::time::{Duration, Instant};

use serde_json::json;

use super::super::report::micros_at;
use super::{GPUS, cluster};
use crate::allocate::moves::{Mover, MovesFound, OfIndex, SEARCH_TICKS, WaitingUnit, search};
use crate::allocate::{
    GpuGrant, GpuView, Index, NodeView, Part, Placement, PlacementKey, PodAsk, Policy, Shape, Want,
};
use crate::cli::table;
use crate::model::names::PodUid;
use crate::model::quantity::Bytes;
use crate::model::share::Extent;

const NODES: u32 = 1_000;
/// MiB of the pods that are there.
const SIZES: [u64; 6] = [4_000, 9_000, 14_000, 20_000, 30_000, 38_000];
const SEARCHES: usize = 100;
/// Where so many pods have to leave a GPU: MiB of each.
const SMALL: [u64; 5] = [4_000, 6_000, 8_000, 10_000, 12_000];

/// Pods that wait for the same, in µs.
pub struct MoveFigures {
    what: &'static str,
    moves: Option<usize>,
    p50: f64,
    p99: f64,
    most: f64,
}

/// What is on each GPU.
#[derive(Clone, Copy)]
enum Filled {
    /// Pods until so many percent of the memory are in use at most, half as many at least.
    Percent(u64),
    /// So many small pods, all of which have to leave before the GPU is whole.
    Pods(usize),
}

/// What waits, and how full the GPUs are.
const CASES: [(&str, WaitingAmount, Filled); 8] = [
    ("one whole GPU, 30 to 60 % in use", WaitingAmount::Whole(1), Filled::Percent(60)),
    ("one whole GPU, 48 to 97 % in use", WaitingAmount::Whole(1), Filled::Percent(97)),
    ("4 whole GPUs, 30 to 60 % in use", WaitingAmount::Whole(4), Filled::Percent(60)),
    ("8 whole GPUs, 30 to 60 % in use", WaitingAmount::Whole(8), Filled::Percent(60)),
    ("a share of 70000 MiB, 30 to 60 % in use", WaitingAmount::Mib(70_000), Filled::Percent(60)),
    ("one whole GPU, 2 small pods on each", WaitingAmount::Whole(1), Filled::Pods(2)),
    ("one whole GPU, 3 small pods on each", WaitingAmount::Whole(1), Filled::Pods(3)),
    ("one whole GPU, 4 small pods on each", WaitingAmount::Whole(1), Filled::Pods(4)),
];

#[derive(Clone, Copy)]
enum WaitingAmount {
    Whole(u32),
    Mib(u64),
}

impl WaitingAmount {
    fn shape(self) -> Shape {
        Shape::one(match self {
            Self::Whole(gpus) => Want::whole(gpus),
            Self::Mib(mib) => part(mib),
        })
    }
}

fn part(mib: u64) -> Want {
    Want { part: Part::Memory(Bytes::from_mib(mib)), ..Want::whole(1) }
}

pub fn measure() -> Vec<MoveFigures> {
    CASES.iter().map(|(what, shape, full)| one(what, &shape.shape(), *full)).collect()
}

/// Every GPU has pods.
fn filled(how: Filled) -> (Index, Vec<Mover>, Vec<(PlacementKey, PodAsk)>) {
    let mut index = cluster(NODES);
    let mut random = fastrand::Rng::with_seed(1);
    let (mut movers, mut pods) = (Vec::new(), Vec::new());
    let gpu = |node: &NodeView<'_>, gpu: &GpuView<'_>| {
        (node.name().clone(), gpu.device().clone(), gpu.memory().0.mib_floor())
    };
    let gpus: Vec<_> =
        index.nodes().flat_map(|node| node.gpus().map(|one| gpu(&node, &one)).collect::<Vec<_>>()).collect();
    for (node, device, all) in gpus {
        let mut sizes = Vec::new();
        match how {
            Filled::Percent(percent) => {
                let (mut used, most) = (0, all * random.u64(percent / 2..=percent) / 100);
                while used == 0 || used < most {
                    let size = SIZES[random.usize(..SIZES.len())].min(all - used);
                    used += size;
                    sizes.push(size);
                }
            }
            Filled::Pods(count) => sizes.extend((0..count).map(|_| SMALL[random.usize(..SMALL.len())])),
        }
        for size in sizes {
            let memory = Bytes::from_mib(size);
            let shape = Shape { cpu_milli: 500, memory: Bytes::from_mib(1024), ..Shape::one(part(size)) };
            let grant = GpuGrant {
                want: 0,
                device: device.clone(),
                memory,
                compute: None,
                slots: 1,
                extent: Extent::Part,
            };
            let (cpu_milli, memory, pods_of) = (shape.cpu_milli, shape.memory, 1);
            let has = Placement { node: node.clone(), gpus: vec![grant], cpu_milli, memory, pods: pods_of };
            let key = PlacementKey::Pod(PodUid::new(pods.len().to_string()));
            if index.apply(key.clone(), &has).is_ok() {
                movers.push(Mover { has, several: false });
                pods.push((key, shape.into()));
            }
        }
    }
    (index, movers, pods)
}

fn one(what: &'static str, shape: &Shape, how: Filled) -> MoveFigures {
    let (mut index, movers, pods) = filled(how);
    let (mut took, mut moves) = (Vec::with_capacity(SEARCHES), None);
    for nth in 0..SEARCHES {
        // What has come and gone since the last one.
        let (key, _) = &pods[nth * 37 % pods.len()];
        if let Some(place) = index.remove(key.clone()) {
            let _ = index.apply(key.clone(), &place);
        }
        let waiting = WaitingUnit { asks: vec![shape.clone().into()], alone: false };
        let start = Instant::now();
        let found =
            search(&mut OfIndex::new(&mut index, Policy::Pack, &pods), &waiting, &movers, SEARCH_TICKS);
        took.push(start.elapsed());
        moves = match found {
            MovesFound::Moves(found) => Some(found.moves.len()),
            MovesFound::Nothing | MovesFound::Spent => None,
        };
    }
    let most = took.iter().max().copied().unwrap_or(Duration::ZERO).as_secs_f64() * 1e6;
    MoveFigures { what, moves, p50: micros_at(&mut took, 0.5), p99: micros_at(&mut took, 0.99), most }
}

pub fn table(all: &[MoveFigures]) -> String {
    let rows = all.iter().map(|one| {
        let moves = one.moves.map_or("none".to_owned(), |moves| moves.to_string());
        let ms = |micros: f64| format!("{:.1}", micros / 1e3);
        [one.what.to_owned(), moves, ms(one.p50), ms(one.p99), ms(one.most)]
    });
    let note = format!(
        "\nWhich pods have to move: {NODES} nodes with {GPUS} GPUs, each GPU with pods; {SEARCHES} searches each, the \
         first with nothing known of the pods' scores.\n"
    );
    format!("\n{}{note}", table::render(&["WAITS FOR", "MOVES", "P50 ms", "P99 ms", "MOST ms"], rows))
}

pub fn json(all: &[MoveFigures]) -> String {
    let line = |one: &MoveFigures| {
        let object = json!({"what": "moves", "nodes": NODES, "gpus_per_node": GPUS, "waits_for": one.what,
            "moves": one.moves, "searches": SEARCHES, "p50_us": one.p50, "p99_us": one.p99, "most_us": one.most});
        format!("{object}\n")
    };
    all.iter().map(line).collect()
}
