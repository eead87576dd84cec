//! How long a decision takes: pods of a few dozen templates come and go on a cluster that stays about full.

mod mig;
mod moves;

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::json;

mod preempt;

use super::report::micros_at;
use crate::allocate::{Division, GpuSpec, Index, NodeSpec, Part, Policy, Shape, ShareRoom, Want, decide};
use crate::cli::table;
use crate::model::names::{DRIVER, DeviceName, NodeName, PodUid};
use crate::model::quantity::Bytes;
use crate::model::share::{DaemonScope, Isolation};
use crate::select::{AttributeValue, DeviceFacts, QualifiedName};

const GPUS: u32 = 8;
const TEMPLATES: u64 = 64;
const DECISIONS: usize = 20_000;
/// Decisions for a template that was never seen before.
const NEW: usize = 500;
/// Each is measured so often, and the least of each figure counts: what else the machine does only adds to it.
const ROUNDS: usize = 3;
/// What a DeviceClass and a claim may say.
const SELECTORS: [&str; 2] = [
    "device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == 'gpu'",
    "device.attributes['gpu.nvidia.com'].productName.lowerAscii().matches('^.*(h100|l40s).*$')",
];

/// A policy on a cluster of so many nodes, in µs.
struct Figures {
    nodes: u32,
    policy: Policy,
    selectors: bool,
    /// p50, p99 and most.
    known: [f64; 3],
    /// p50 and p99.
    new: [f64; 2],
}

/// A table, or one JSON object per line.
pub fn run(as_json: bool) -> String {
    let mut all = Vec::new();
    for nodes in [100, 1_000, 5_000] {
        let plain = Policy::ALL.map(|policy| (policy, &[][..]));
        for (policy, selectors) in plain.into_iter().chain([(Policy::Pack, &SELECTORS[..])]) {
            all.push(measure(nodes, policy, selectors));
        }
    }
    let (preempted, moves, mig) = (preempt::measure(), moves::measure(), mig::measure());
    match as_json {
        true => {
            let figures = all.iter().map(Figures::json).chain([preempted.json()]);
            figures.collect::<String>() + &moves::json(&moves) + &mig.json()
        }
        false => table(&all) + &preempted.words() + &moves::table(&moves) + &mig.words(),
    }
}

fn table(all: &[Figures]) -> String {
    let rows = all.iter().map(|one| {
        let more = if one.selectors { " + selectors" } else { "" };
        let mut row = vec![one.nodes.to_string(), format!("{}{more}", one.policy)];
        row.extend(one.known.iter().chain(&one.new).map(|micros| format!("{micros:.1}")));
        row
    });
    let header = ["NODES", "POLICY", "P50 µs", "P99 µs", "MOST µs", "NEW P50 µs", "NEW P99 µs"];
    let note = format!(
        "\n{GPUS} GPUs a node, {TEMPLATES} templates, {DECISIONS} decisions while pods come and go; new: {NEW} \
         decisions for a template never seen before. Each figure is the least of {ROUNDS} rounds. Recording the \
         result is not counted.\n"
    );
    table::render(&header, rows) + &note
}

impl Figures {
    fn json(&self) -> String {
        let ([p50, p99, most], [new_p50, new_p99]) = (self.known, self.new);
        let object = json!({
            "nodes": self.nodes,
            "gpus_per_node": GPUS,
            "policy": self.policy.as_str(),
            "selectors": self.selectors,
            "decisions": DECISIONS,
            "rounds": ROUNDS,
            "p50_us": p50,
            "p99_us": p99,
            "most_us": most,
            "new_p50_us": new_p50,
            "new_p99_us": new_p99,
        });
        format!("{object}\n")
    }
}

fn cluster(nodes: u32) -> Index {
    let mut index = Index::new();
    for nth in 0..nodes {
        let (product, mib) = if nth % 4 == 0 { ("NVIDIA L40S", 45_000) } else { ("NVIDIA H100", 80_000) };
        let gpu = |minor| GpuSpec {
            device: DeviceName::whole(minor),
            product: product.to_owned(),
            division: Division::Shares(ShareRoom {
                memory: Bytes::from_mib(mib),
                slots: 16,
                processes_per_slot: 3,
                isolation: Isolation::Mps,
                daemon: DaemonScope::Gpu,
            }),
            facts: Arc::new(facts(product, &format!("GPU-{nth}-{minor}"))),
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

/// No two GPUs have the same.
fn facts(product: &str, uuid: &str) -> DeviceFacts {
    let attributes = [("type", "gpu"), ("productName", product), ("uuid", uuid)];
    let named = |(name, value): (&str, &str)| {
        (QualifiedName::of(name, DRIVER), AttributeValue::String(value.to_owned()))
    };
    let attributes = attributes.into_iter().map(named).collect();
    DeviceFacts { driver: DRIVER.to_owned(), attributes, ..DeviceFacts::default() }
}

/// A pod's template, by number.
fn template(nth: u64) -> Shape {
    let part = match nth % 8 {
        0 => Part::Whole,
        rest => Part::Memory(Bytes::from_mib(2_000 * rest + 10 * nth)),
    };
    let gpus = if nth % 16 == 8 { 4 } else { 1 };
    let cpu_milli = 1_000 + 500 * (nth % 16);
    let want = Want { part, ..Want::whole(gpus) };
    Shape { cpu_milli, memory: Bytes::from_mib(4096), ..Shape::one(want) }
}

/// Decides for known templates, and for new ones.
fn measure(nodes: u32, policy: Policy, selectors: &[&str]) -> Figures {
    let mut churn = Churn::new(nodes, policy, selectors);
    churn.fill();
    let (mut known, mut new) = ([f64::MAX; 3], [f64::MAX; 2]);
    for round in 0..ROUNDS {
        lower(&mut known, &mut churn.known(), [0.5, 0.99, 1.0]);
        lower(&mut new, &mut churn.new_ones(round), [0.5, 0.99]);
    }
    Figures { nodes, policy, selectors: !selectors.is_empty(), known, new }
}

fn lower<const N: usize>(least: &mut [f64; N], took: &mut [Duration], shares: [f64; N]) {
    for (least, share) in least.iter_mut().zip(shares) {
        *least = least.min(micros_at(took, share));
    }
}

/// Pods that come and go.
struct Churn<'a> {
    index: Index,
    policy: Policy,
    selectors: &'a [&'a str],
    random: fastrand::Rng,
    live: Vec<PodUid>,
    pods: u64,
}

impl<'a> Churn<'a> {
    fn new(nodes: u32, policy: Policy, selectors: &'a [&'a str]) -> Self {
        let random = fastrand::Rng::with_seed(1);
        Self { index: cluster(nodes), policy, selectors, random, live: Vec::new(), pods: 0 }
    }

    /// Until pods are turned away now and then.
    fn fill(&mut self) {
        let mut refused = 0;
        while refused < 50 {
            let shape = template(self.random.u64(..TEMPLATES));
            refused += u32::from(!self.step(shape).1);
        }
    }

    fn known(&mut self) -> Vec<Duration> {
        let mut took = Vec::with_capacity(DECISIONS);
        while took.len() < DECISIONS {
            while self.live.len() > 1 && self.random.bool() {
                self.end_one();
            }
            let shape = template(self.random.u64(..TEMPLATES));
            took.push(self.step(shape).0);
        }
        took
    }

    fn new_ones(&mut self, round: usize) -> Vec<Duration> {
        let first = round * NEW;
        let mut took = Vec::with_capacity(NEW);
        for nth in first as u64..(first + NEW) as u64 {
            self.end_one();
            let part = Part::Memory(Bytes::from_mib(1_001 + 2 * nth));
            let want = Want { part, ..Want::whole(1) };
            took.push(self.step(Shape { wants: vec![want], ..template(1) }).0);
        }
        took
    }

    fn end_one(&mut self) {
        let gone = self.live.swap_remove(self.random.usize(..self.live.len()));
        self.index.remove(&gone);
    }

    /// Decides for one pod and records the result: how long the decision took, and whether there was a place.
    fn step(&mut self, mut shape: Shape) -> (Duration, bool) {
        shape.wants[0].selectors = self.selectors.iter().map(|text| (*text).to_owned()).collect();
        self.index.seen(&shape);
        let pod = [shape.into()];
        let start = Instant::now();
        let decision = decide(&mut self.index, &pod, self.policy);
        let took = start.elapsed();
        let placement = decision.ok().and_then(|mut decision| decision.placements.pop());
        if let Some(placement) = &placement {
            self.pods += 1;
            let uid = PodUid::new(self.pods.to_string());
            if self.index.apply(&uid, placement).is_ok() {
                self.live.push(uid);
            }
        }
        (took, placement.is_some())
    }
}
