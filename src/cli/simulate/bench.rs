//! How long a decision takes: pods of a few dozen templates come and go on a cluster that stays about full.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::report::micros_at;
use crate::allocate::{GpuSpec, Index, NodeSpec, Part, Policy, Shape, Want, decide};
use crate::cli::table;
use crate::model::names::{DRIVER, DeviceName, NodeName, PodUid};
use crate::model::quantity::Bytes;
use crate::model::share::Isolation;
use crate::select::{AttributeValue, DeviceFacts, QualifiedName};

const GPUS: u32 = 8;
const TEMPLATES: u64 = 64;
const DECISIONS: usize = 20_000;
/// Decisions for a template that was never seen before.
const NEW: usize = 500;
/// What a DeviceClass and a claim may say.
const SELECTORS: [&str; 2] = [
    "device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == 'gpu'",
    "device.attributes['gpu.nvidia.com'].productName.lowerAscii().matches('^.*(h100|l40s).*$')",
];

/// A table: nodes and policies, p50, p99 and most, in µs.
pub fn run() -> String {
    let mut rows = Vec::new();
    for nodes in [100, 1_000, 5_000] {
        let plain = Policy::ALL.map(|policy| (policy, "", &[][..]));
        for (policy, more, selectors) in
            plain.into_iter().chain([(Policy::Pack, " + selectors", &SELECTORS[..])])
        {
            let (mut known, mut new) = measure(nodes, policy, selectors);
            let mut row = vec![nodes.to_string(), format!("{policy}{more}")];
            row.extend([0.5, 0.99, 1.0].map(|share| format!("{:.1}", micros_at(&mut known, share))));
            row.extend([0.5, 0.99].map(|share| format!("{:.1}", micros_at(&mut new, share))));
            rows.push(row);
        }
    }
    let header = ["NODES", "POLICY", "P50 µs", "P99 µs", "MOST µs", "NEW P50 µs", "NEW P99 µs"];
    let note = format!(
        "\n{GPUS} GPUs a node, {TEMPLATES} templates, {DECISIONS} decisions while pods come and go; new: {NEW} \
         decisions for a template never seen before. Recording the result is not counted.\n"
    );
    table::render(&header, rows) + &note
}

fn cluster(nodes: u32) -> Index {
    let mut index = Index::new();
    for nth in 0..nodes {
        let (product, mib) = if nth % 4 == 0 { ("NVIDIA L40S", 45_000) } else { ("NVIDIA H100", 80_000) };
        let gpu = |minor| GpuSpec {
            device: DeviceName::whole(minor),
            product: product.to_owned(),
            memory: Bytes::from_mib(mib),
            slots: 16,
            isolation: Isolation::Mps,
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

/// Decisions for known templates, and for new ones.
fn measure(nodes: u32, policy: Policy, selectors: &[&str]) -> (Vec<Duration>, Vec<Duration>) {
    let mut index = cluster(nodes);
    let mut random = fastrand::Rng::with_seed(1);
    let (mut live, mut took, mut pods) = (Vec::new(), Vec::new(), 0_u64);
    let mut step = |index: &mut Index, shape: Shape, live: &mut Vec<PodUid>| {
        let mut shape = shape;
        shape.wants[0].selectors = selectors.iter().map(|text| (*text).to_owned()).collect();
        index.seen(&shape);
        let pod = [shape.into()];
        let start = Instant::now();
        let decision = decide(index, &pod, policy);
        let took = start.elapsed();
        let placement = decision.ok().and_then(|mut decision| decision.placements.pop());
        if let Some(placement) = &placement {
            pods += 1;
            let uid = PodUid::new(pods.to_string());
            if index.apply(&uid, placement).is_ok() {
                live.push(uid);
            }
        }
        (took, placement.is_some())
    };
    // Filled until pods are turned away now and then.
    let mut refused = 0;
    while refused < 50 {
        let shape = template(random.u64(..TEMPLATES));
        refused += u32::from(!step(&mut index, shape, &mut live).1);
    }
    while took.len() < DECISIONS {
        while live.len() > 1 && random.bool() {
            let gone = live.swap_remove(random.usize(..live.len()));
            index.remove(&gone);
        }
        let shape = template(random.u64(..TEMPLATES));
        took.push(step(&mut index, shape, &mut live).0);
    }
    let mut new = Vec::new();
    for nth in 0..NEW as u64 {
        let gone = live.swap_remove(random.usize(..live.len()));
        index.remove(&gone);
        let part = Part::Memory(Bytes::from_mib(1_001 + 2 * nth));
        let want = Want { part, ..Want::whole(1) };
        new.push(step(&mut index, Shape { wants: vec![want], ..template(1) }, &mut live).0);
    }
    (took, new)
}
