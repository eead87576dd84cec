//! Does a pod fit on a node, and on which of its GPUs?

use super::ask::Shape;
use super::index::Nodes;
use super::node::{Class, Gpu, GpuGrant, Node, Placement};
use crate::model::quantity::Bytes;

/// A shape, worked out for each class of GPUs once.
#[derive(Debug, Clone)]
pub(super) struct Terms {
    pub gpus: usize,
    pub cpu_milli: u64,
    pub memory_mib: u64,
    pub compute: u32,
    /// By class: MiB and blocks on each GPU; none: no GPU of the class will do.
    pub needs: Vec<Option<(u64, u32)>>,
}

/// Why no GPU of a class will do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unfit {
    Product,
    Isolation,
    /// Less can be granted of it than is asked.
    Small,
}

pub(super) fn needs(shape: &Shape, class: &Class) -> Result<(u64, u32), Unfit> {
    let named = |part: &String| class.product.contains(&part.to_lowercase());
    if !shape.products.is_empty() && !shape.products.iter().any(named) {
        return Err(Unfit::Product);
    }
    if class.isolation < shape.minimum_isolation {
        return Err(Unfit::Isolation);
    }
    let mib = shape.part.mib(class.memory_mib);
    if mib > class.memory_mib || mib == 0 {
        return Err(Unfit::Small);
    }
    let whole = shape.part == super::Part::Whole;
    // A share takes a client slot, whatever it says.
    Ok((mib, if whole { class.slots.max(1) } else { shape.slots.max(1) }))
}

impl Terms {
    pub fn new(shape: &Shape, classes: &[Class]) -> Self {
        Self {
            gpus: shape.gpus as usize,
            cpu_milli: shape.cpu_milli,
            memory_mib: shape.memory.mib_ceil(),
            compute: shape.compute.map_or(0, |percent| u32::from(percent.get())),
            needs: classes.iter().map(|class| needs(shape, class).ok()).collect(),
        }
    }

    pub fn node_has_room(&self, node: &Node) -> bool {
        node.free_cpu_milli() >= self.cpu_milli && node.free_memory_mib() >= self.memory_mib
    }

    /// What the GPU would have left, in MiB; none: it does not fit.
    pub fn left(&self, gpu: &Gpu) -> Option<u64> {
        let (mib, slots) = self.needs.get(gpu.class).copied().flatten()?;
        let fits = !gpu.closed && gpu.free_slots() >= slots && gpu.free_compute() >= self.compute;
        if fits { gpu.free_mib().checked_sub(mib) } else { None }
    }

    pub fn mib(&self, gpu: &Gpu) -> u64 {
        self.needs.get(gpu.class).copied().flatten().map_or(0, |(mib, _)| mib)
    }
}

/// The placement of a shape on these GPUs of a node.
pub(super) fn placement(shape: &Shape, terms: &Terms, node: &Node, gpus: &[usize]) -> Placement {
    let mut gpus = gpus.to_vec();
    gpus.sort_unstable();
    let grant = |at: &usize| {
        let gpu = &node.gpus[*at];
        let (mib, slots) = terms.needs.get(gpu.class).copied().flatten().unwrap_or((0, 0));
        let memory = Bytes::from_mib(mib);
        GpuGrant { device: gpu.device.clone(), memory, compute: shape.compute, slots }
    };
    Placement {
        node: node.name.clone(),
        gpus: gpus.iter().map(grant).collect(),
        cpu_milli: shape.cpu_milli,
        memory: shape.memory,
    }
}

/// The first GPUs that will do, in the node's order: what a scheduler without scores for devices takes.
pub(super) fn first(nodes: &Nodes, id: usize, shape: &Shape) -> Option<Placement> {
    let node = nodes.all.get(id)?.as_ref()?;
    let terms = Terms::new(shape, &nodes.classes);
    if !terms.node_has_room(node) {
        return None;
    }
    let fitting = (0..node.gpus.len()).filter(|at| terms.left(&node.gpus[*at]).is_some());
    let gpus: Vec<usize> = fitting.take(terms.gpus).collect();
    (gpus.len() == terms.gpus).then(|| placement(shape, &terms, node, &gpus))
}
