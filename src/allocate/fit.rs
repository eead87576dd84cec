//! Does a pod fit on a node, and on which of its GPUs?

use super::ask::{Part, Shape, Want};
use super::choice::{Choice, Choices};
use super::facts::ConstraintTerms;
use super::index::Nodes;
use super::node::{Class, Gpu, GpuGrant, Node, Placement};
use super::search;
use crate::model::quantity::Bytes;
use crate::model::share::Extent;

/// Of reading an attribute of one GPU, in ticks of [`crate::select::TICKS_PER_UNIT`].
const ALIKE_TICKS: u64 = 50;

/// A shape, worked out for each class of GPUs once.
#[derive(Debug, Clone)]
pub(super) struct Terms {
    /// As in the shape; never empty: a pod without wants has one for no GPU.
    pub wants: Vec<WantTerms>,
    pub alike: Vec<ConstraintTerms>,
    pub cpu_milli: u64,
    pub memory_mib: u64,
    pub pods: u64,
    /// The facts and taints that `alike` and the wants know of.
    known: [(u64, usize); 2],
    /// What the selectors choose is known of all facts.
    complete: bool,
}

#[derive(Debug, Clone)]
pub(super) struct WantTerms {
    pub claim: u32,
    pub gpus: usize,
    pub compute: u32,
    /// By class: MiB and blocks on each GPU; none: no GPU of the class will do.
    pub needs: Vec<Option<(u64, u32)>>,
    /// The least of the needs: a node on which no GPU has so much free need not be looked at.
    pub least_mib: u64,
    /// None: there are no selectors.
    pub choice: Option<Choice>,
    /// By number of the set of taints; what is not there is not borne.
    tolerates: Vec<bool>,
}

/// Why no GPU of a class will do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unfit {
    Product,
    Isolation,
    /// Less can be granted of it than is asked.
    Small,
    /// What is asked of it leaves less than 1 MiB for a process, which no limit can express.
    Sliver,
    /// It has fewer client slots than the share has processes, all in all.
    Processes,
}

pub(super) fn needs(want: &Want, class: &Class) -> Result<(u64, u32), Unfit> {
    let named = |part: &String| class.product.contains(&part.to_lowercase());
    if !want.products.is_empty() && !want.products.iter().any(named) {
        return Err(Unfit::Product);
    }
    if class.isolation < want.minimum_isolation {
        return Err(Unfit::Isolation);
    }
    let mib = want.part.mib(class.memory_mib);
    if mib > class.memory_mib {
        return Err(Unfit::Small);
    }
    if mib == 0 || mib < u64::from(want.processes) {
        return Err(Unfit::Sliver);
    }
    if want.part == Part::Whole {
        return Ok((mib, class.slots.max(1)));
    }
    // A share takes a block of client slots, whatever it says.
    let slots = want.processes.div_ceil(class.processes_per_slot.max(1)).max(1);
    if slots > class.slots.max(1) { Err(Unfit::Processes) } else { Ok((mib, slots)) }
}

impl Terms {
    pub fn new(shape: &Shape, nodes: &Nodes, choices: &mut Choices) -> Self {
        let none = [Want::whole(0)];
        let wants = if shape.wants.is_empty() { &none } else { shape.wants.as_slice() };
        let mut terms = Self {
            wants: wants.iter().map(|want| WantTerms::new(want, &nodes.classes)).collect(),
            alike: Vec::new(),
            cpu_milli: shape.cpu_milli,
            memory_mib: shape.memory.mib_ceil(),
            pods: shape.pods,
            known: [(0, 0); 2],
            complete: false,
        };
        terms.follow(shape, nodes, choices);
        terms
    }

    /// Learns what there is of new facts and taints.
    pub fn follow(&mut self, shape: &Shape, nodes: &Nodes, choices: &mut Choices) {
        let state = [nodes.facts.state(), nodes.taints.state()];
        if self.known == state && self.complete {
            return;
        }
        (self.known, self.complete) = (state, true);
        for (terms, want) in self.wants.iter_mut().zip(&shape.wants) {
            terms.choice = choices.of(&want.selectors, &nodes.facts);
            self.complete &= terms.choice.as_ref().is_none_or(|choice| choice.complete);
            terms.tolerates = nodes.taints.borne(&want.tolerations);
        }
        self.alike = shape.alike.iter().map(|alike| ConstraintTerms::new(alike, &nodes.facts)).collect();
        choices.pay(ALIKE_TICKS * (shape.alike.len() * nodes.facts.all().len()) as u64);
    }

    /// False: scores that are made by these terms are not worth keeping.
    pub fn is_complete(&self) -> bool {
        self.complete
    }

    /// Made for other classes than there are now.
    pub fn outdated(&self, nodes: &Nodes) -> bool {
        self.wants.iter().any(|want| want.needs.len() != nodes.classes.len())
    }

    /// The only want, if that is all there is to look at.
    pub fn single(&self) -> Option<&WantTerms> {
        match self.wants.as_slice() {
            [want] if self.alike.is_empty() => Some(want),
            _ => None,
        }
    }

    /// Are there CPU, memory and a place among its pods, and for each want a GPU that might do?
    pub fn node_has_room(&self, node: &Node) -> bool {
        node.free_cpu_milli() >= self.cpu_milli
            && node.free_memory_mib() >= self.memory_mib
            && node.free_pods() >= self.pods
            && self.wants.iter().all(|want| want.least_mib <= node.most_mib)
    }
}

impl WantTerms {
    pub fn new(want: &Want, classes: &[Class]) -> Self {
        let needs: Vec<_> = classes.iter().map(|class| needs(want, class).ok()).collect();
        let least = needs.iter().flatten().map(|(mib, _)| *mib).min().unwrap_or(u64::MAX);
        Self {
            claim: want.claim,
            gpus: want.gpus as usize,
            compute: want.compute.map_or(0, |percent| u32::from(percent.get())),
            needs,
            least_mib: if want.gpus == 0 { 0 } else { least },
            choice: None,
            tolerates: Vec::new(),
        }
    }

    // Inlined: with the four below it is most of what a score costs.
    #[inline]
    pub fn need(&self, gpu: &Gpu) -> Option<(u64, u32)> {
        self.needs.get(gpu.class as usize).copied().flatten()
    }

    /// Do the selectors choose it?
    #[inline]
    pub fn chooses(&self, gpu: &Gpu) -> bool {
        self.choice.as_ref().is_none_or(|choice| choice.chosen.has(gpu.facts))
    }

    /// Are its taints tolerated?
    #[inline]
    pub fn tolerates(&self, gpu: &Gpu) -> bool {
        gpu.taints == 0 || self.tolerates.get(gpu.taints as usize).is_some_and(|borne| *borne)
    }

    /// What the GPU would have left, in MiB; none: it does not fit.
    #[inline]
    pub fn left(&self, gpu: &Gpu) -> Option<u64> {
        let (mib, slots) = self.need(gpu)?;
        let fits = !gpu.closed && gpu.free_slots() >= slots && gpu.free_compute() >= self.compute;
        if fits && self.tolerates(gpu) && self.chooses(gpu) { gpu.free_mib().checked_sub(mib) } else { None }
    }

    #[inline]
    pub fn mib(&self, gpu: &Gpu) -> u64 {
        self.need(gpu).map_or(0, |(mib, _)| mib)
    }
}

/// The placement of a shape on these GPUs of a node: places of GPU and want.
pub(super) fn placement(shape: &Shape, terms: &Terms, node: &Node, picked: &[(usize, usize)]) -> Placement {
    let mut picked = picked.to_vec();
    picked.sort_unstable();
    let grant = |&(at, want): &(usize, usize)| {
        let gpu = &node.gpus[at];
        let (mib, slots) = terms.wants[want].need(gpu).unwrap_or((0, 0));
        let (device, memory) = (gpu.device.clone(), Bytes::from_mib(mib));
        let extent = if shape.wants[want].part == Part::Whole { Extent::Whole } else { Extent::Part };
        GpuGrant { want, device, memory, compute: shape.wants[want].compute, slots, extent }
    };
    Placement {
        node: node.name.clone(),
        gpus: picked.iter().map(grant).collect(),
        cpu_milli: shape.cpu_milli,
        memory: shape.memory,
        pods: shape.pods,
    }
}

/// The first GPUs that will do, in the node's order: what a scheduler without scores for devices takes.
pub(super) fn first(nodes: &Nodes, id: usize, shape: &Shape) -> Option<Placement> {
    let node = nodes.all.get(id)?.as_ref()?;
    let terms = Terms::new(shape, nodes, &mut Choices::default());
    if !terms.node_has_room(node) {
        return None;
    }
    let picks = search::run(node, &terms, &|_, _, _| 0, &mut 0)?;
    let picked: Vec<_> = picks.iter().map(|pick| (pick.gpu, pick.want)).collect();
    Some(placement(shape, &terms, node, &picked))
}
