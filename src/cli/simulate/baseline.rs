//! A model of kube-scheduler's default for claims of a DRA driver: nodes rated by NodeResourcesFit
//! (LeastAllocated) and NodeResourcesBalancedAllocation over CPU and memory, GPUs not rated, the first that fits
//! taken. Left out: taints, topology, images, and the random choice among equal nodes (the first is taken).

use super::trace::{MILLI, TracePod};
use crate::allocate::{GpuView, Index, NodeView, Placement, Want};
use crate::model::names::NodeName;
use crate::model::quantity::Bytes;

pub fn place(index: &Index, pod: &TracePod) -> Option<Placement> {
    let mut fitting: Vec<(u64, usize, &NodeName)> = Vec::new();
    for (nth, node) in index.nodes().enumerate() {
        if let Some(score) = rate(&node, pod) {
            fitting.push((u64::MAX - score, nth, node.name()));
        }
    }
    // The best is nearly always enough; the rest is only for models of GPUs that do not match.
    while let Some(best) = fitting.iter().enumerate().min_by_key(|(_, one)| **one).map(|(at, _)| at) {
        let (.., name) = fitting.swap_remove(best);
        if let Some(placement) = index.first_fit(name, &pod.shape) {
            return Some(placement);
        }
    }
    None
}

/// The sum of both scores, 0 to 200; none: the pod does not fit.
fn rate(node: &NodeView<'_>, pod: &TracePod) -> Option<u64> {
    let (cpu, free_cpu) = node.cpu_milli();
    let (memory, free_memory) = node.memory();
    let left = (free_cpu.checked_sub(pod.shape.cpu_milli)?, free_memory.0.checked_sub(pod.shape.memory.0)?);
    let need = Bytes::from_mib(pod.gpu_milli.min(MILLI));
    let is_mig = pod.shape.wants.iter().any(Want::is_mig);
    // What fits on a GPU that is cut, its profiles say.
    let suits =
        |gpu: &GpuView<'_>| if is_mig { gpu.is_cut() } else { !gpu.is_cut() && gpu.memory().1 >= need };
    let gpus = node.gpus().filter(suits).take(pod.shape.gpus() as usize).count();
    if gpus < pod.shape.gpus() as usize {
        return None;
    }
    let least = (percent(left.0, cpu) + percent(left.1, memory.0)) / 2;
    // The standard deviation of two numbers is half their difference.
    let apart = (left.0 as f64 / cpu.max(1) as f64 - left.1 as f64 / memory.0.max(1) as f64).abs() / 2.0;
    Some(least + ((1.0 - apart) * 100.0) as u64)
}

fn percent(left: u64, all: u64) -> u64 {
    left.saturating_mul(100) / all.max(1)
}
