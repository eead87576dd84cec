//! How each GPU of each node looks to a pod's wants, one by one: for people who ask why it waits. The decision is
//! `decide`'s; this goes by the same terms, and rates nothing.

use std::sync::Arc;

use super::ask::{Shape, Want};
use super::choice::Choice;
use super::fit::{Terms, Unfit, WantTerms, needs};
use super::index::{Index, Nodes};
use super::mig::MigAsk;
use super::node::Gpu;
use crate::model::names::{DeviceName, NodeName};
use crate::model::share::Isolation;
use crate::select::untolerated;

/// A node, as one pod's wants see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeVerdict {
    pub node: NodeName,
    /// What the node itself lacks.
    pub short: Option<NodeShort>,
    /// Of each want, in the shape's order: how it finds each GPU.
    pub wants: Vec<Vec<(DeviceName, GpuVerdict)>>,
}

/// What a node has too little of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NodeShort {
    /// Thousandths of a CPU.
    Cpu { needed: u64, left: u64 },
    /// MiB.
    Memory { needed: u64, left: u64 },
}

/// What keeps a want off a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GpuVerdict {
    Fits,
    /// Not open to shares of ours.
    Closed,
    Product,
    Isolation {
        needed: Isolation,
        is: Isolation,
    },
    /// A selector does not choose it.
    NotSelected,
    /// A selector fails on it: how.
    Failed(Arc<str>),
    /// The first of its taints that the want does not tolerate.
    Tainted(String),
    /// MiB: even idle it has less.
    Small {
        needed: u64,
        all: u64,
    },
    /// The part of it that is asked leaves less than 1 MiB for each of so many processes.
    Sliver {
        processes: u32,
    },
    /// Client processes: even idle it has slots for less.
    Processes {
        needed: u32,
        all: u32,
    },
    /// MiB.
    Memory {
        needed: u64,
        free: u64,
    },
    /// Percent.
    Compute {
        needed: u32,
        free: u32,
    },
    /// Blocks of client slots.
    Slots {
        needed: u32,
        free: u32,
    },
    /// It is cut into MIG devices, and none is asked for.
    Cut,
    /// All of it is asked for, which only the scheduler gives.
    ByScheduler,
    /// No MIG device that will do can be made. MiB of the largest that can, 0 if none.
    NoMig {
        asked: MigAsk,
        largest: u64,
    },
}

/// All nodes of the index, in the order in which they were added.
pub fn verdicts(index: &mut Index, shape: &Shape) -> Vec<NodeVerdict> {
    let Index { nodes, score_tables, .. } = index;
    let terms = Terms::new(shape, nodes, &mut score_tables.choices);
    let wants: Vec<_> = terms.wants.iter().zip(&shape.wants).collect();
    let look = |node: &super::node::Node| {
        let of_want = |(terms, want): &(&WantTerms, &Want)| {
            node.gpus.iter().map(|gpu| (gpu.device.clone(), verdict(gpu, terms, want, nodes))).collect()
        };
        let (cpu, memory) = (node.free_cpu_milli(), node.free_memory_mib());
        let short = if cpu < terms.cpu_milli {
            Some(NodeShort::Cpu { needed: terms.cpu_milli, left: cpu })
        } else if memory < terms.memory_mib {
            Some(NodeShort::Memory { needed: terms.memory_mib, left: memory })
        } else {
            None
        };
        NodeVerdict { node: node.name.clone(), short, wants: wants.iter().map(of_want).collect() }
    };
    nodes.all.iter().flatten().map(look).collect()
}

fn verdict(gpu: &Gpu, terms: &WantTerms, want: &Want, nodes: &Nodes) -> GpuVerdict {
    if gpu.closed {
        return GpuVerdict::Closed;
    }
    let Some(class) = nodes.classes.get(gpu.class as usize) else { return GpuVerdict::Closed };
    match needs(want, class) {
        Err(Unfit::Product) => GpuVerdict::Product,
        Err(Unfit::Isolation) => {
            GpuVerdict::Isolation { needed: want.minimum_isolation, is: class.isolation }
        }
        Err(Unfit::Small) => {
            GpuVerdict::Small { needed: want.part.mib(class.memory_mib), all: class.memory_mib }
        }
        Err(Unfit::Cut) => GpuVerdict::Cut,
        Err(Unfit::ByScheduler) => GpuVerdict::ByScheduler,
        Err(Unfit::Sliver) => GpuVerdict::Sliver { processes: want.processes },
        Err(Unfit::Processes) => {
            let all = class.slots.saturating_mul(class.processes_per_slot);
            GpuVerdict::Processes { needed: want.processes, all }
        }
        Ok(_) if !terms.chooses(gpu) => not_chosen(gpu, terms.choice.as_ref()),
        Ok(_) if !terms.tolerates(gpu) => {
            let taint = untolerated(nodes.taints.get(gpu.taints), &want.tolerations);
            GpuVerdict::Tainted(taint.map(ToString::to_string).unwrap_or_default())
        }
        Ok(_) if gpu.cut.is_some() => match want.mig() {
            Some(asked) if terms.need(gpu).is_none() => GpuVerdict::NoMig { asked, largest: gpu.free_mib() },
            _ => GpuVerdict::Fits,
        },
        Ok((needed, _)) if gpu.free_mib() < needed => GpuVerdict::Memory { needed, free: gpu.free_mib() },
        Ok(_) if gpu.free_compute() < terms.compute => {
            GpuVerdict::Compute { needed: terms.compute, free: gpu.free_compute() }
        }
        Ok((_, needed)) if gpu.free_slots() < needed => GpuVerdict::Slots { needed, free: gpu.free_slots() },
        Ok(_) => GpuVerdict::Fits,
    }
}

fn not_chosen(gpu: &Gpu, choice: Option<&Choice>) -> GpuVerdict {
    let failed = choice.filter(|choice| choice.failed.has(gpu.facts));
    match failed.and_then(|choice| choice.words.clone()) {
        Some(words) => GpuVerdict::Failed(words),
        None => GpuVerdict::NotSelected,
    }
}
