//! Does a pod fit on a node, and on which of its GPUs?

use std::collections::BTreeMap;
use std::sync::Arc;

use super::ask::{Part, Rule, Shape, Want};
use super::choice::{Choice, Choices};
use super::cut::Cut;
use super::facts::Column;
use super::index::Nodes;
use super::mig::{Carving, enough};
use super::node::{Gpu, GpuClass, GpuGrant, Node, Placement};
use super::search::{self, SearchCost};
use crate::model::mig::MigPlace;
use crate::model::quantity::Bytes;
use crate::model::share::Extent;
use crate::select::QualifiedName;

/// A shape, worked out for each class of GPUs once.
#[derive(Debug, Clone)]
pub(super) struct Terms {
    /// As in the shape; never empty: a pod without wants has one for no GPU.
    pub wants: Vec<WantTerms>,
    pub alike: Vec<ConstraintTerms>,
    /// Of the attributes of `alike`, each once.
    pub columns: Vec<Column>,
    /// By want: places in `alike` of the constraints that it is in. Wants behind the last are in none.
    alike_of: Vec<Vec<usize>>,
    pub cpu_milli: u64,
    pub memory_mib: u64,
    pub pods: u64,
    /// The facts and taints that `alike` and the wants know of.
    known: [(u64, usize); 2],
    /// What the selectors choose is known of all facts.
    complete: bool,
}

/// An [`super::AttributeConstraint`]; which wants it is about is in [`Terms`].
#[derive(Debug, Clone, Copy)]
pub(super) struct ConstraintTerms {
    rule: Rule,
    /// Place in [`Terms::columns`]; none: no GPU has the attribute.
    column: Option<usize>,
}

#[derive(Debug, Clone)]
pub(super) struct WantTerms {
    pub claim: u32,
    pub gpus: usize,
    pub compute: u32,
    /// By class: MiB and blocks on each GPU; none: no GPU of the class will do. Of GPUs that are cut into MIG devices the
    /// least.
    pub needs: Vec<Option<(u64, u32)>>,
    /// By class: places of the MIG profiles that will do, the smallest first. Empty: the class is not cut.
    profiles: Vec<Arc<[usize]>>,
    /// It is for MIG devices.
    pub is_mig: bool,
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
    /// It is cut into MIG devices, and none is asked for.
    Cut,
    /// All of it is asked for, which only the scheduler gives.
    ByScheduler,
}

pub(super) fn needs(want: &Want, class: &GpuClass) -> Result<(u64, u32), Unfit> {
    let named = |part: &String| class.product.contains(&part.to_lowercase());
    if !want.products.is_empty() && !want.products.iter().any(named) {
        return Err(Unfit::Product);
    }
    if let Some(profiles) = &class.profiles {
        let by_scheduler = class.given_whole && want.part == Part::Whole;
        let ask = want.mig().ok_or(if by_scheduler { Unfit::ByScheduler } else { Unfit::Cut })?;
        let least = enough(profiles, ask).first().map(|at| profiles[*at].capacity.memory.mib_floor());
        return least.map(|mib| (mib, 1)).ok_or(Unfit::Small);
    }
    if class.isolation < want.minimum_isolation || want.is_mig() {
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
            columns: Vec::new(),
            alike_of: Vec::new(),
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
        let mut places: BTreeMap<&QualifiedName, Option<usize>> = BTreeMap::new();
        (self.alike, self.columns, self.alike_of) = (Vec::new(), Vec::new(), Vec::new());
        for (nth, one) in shape.alike.iter().enumerate() {
            let column = *places.entry(&one.attribute).or_insert_with(|| {
                let column = choices.column(&one.attribute, &nodes.facts)?;
                self.columns.push(column);
                Some(self.columns.len() - 1)
            });
            self.alike.push(ConstraintTerms { rule: one.rule, column });
            let of = one.wants.iter().copied().max().map_or(0, |last| last + 1);
            self.alike_of.resize(self.alike_of.len().max(of), Vec::new());
            one.wants.iter().for_each(|want| self.alike_of[*want].push(nth));
        }
    }

    /// Places of the constraints that a want is in.
    pub fn constraints_of(&self, want: usize) -> &[usize] {
        self.alike_of.get(want).map(Vec::as_slice).unwrap_or_default()
    }

    /// What a constraint says, and the value of its attribute; none: the GPU lacks it.
    pub fn asked(&self, constraint: usize, facts: u32) -> (Rule, Option<u32>) {
        let one = self.alike[constraint];
        (one.rule, one.column.and_then(|column| self.columns[column].value(facts)))
    }

    /// Bytes of the attributes' values. Others may have them, too: they stay as long as these terms do.
    pub fn weight(&self) -> usize {
        self.columns.iter().map(Column::bytes).sum()
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
    pub fn new(want: &Want, classes: &[GpuClass]) -> Self {
        let needs: Vec<_> = classes.iter().map(|class| needs(want, class).ok()).collect();
        let least = needs.iter().flatten().map(|(mib, _)| *mib).min().unwrap_or(u64::MAX);
        let mig = want.mig();
        let enough = |(class, need): (&GpuClass, &Option<(u64, u32)>)| match (&class.profiles, mig, need) {
            (Some(profiles), Some(ask), Some(_)) => enough(profiles, ask).into(),
            _ => Arc::default(),
        };
        // What a MIG device has of the multiprocessors follows from its profile.
        let compute = want.compute.filter(|_| mig.is_none());
        Self {
            claim: want.claim,
            gpus: want.gpus as usize,
            compute: compute.map_or(0, |percent| u32::from(percent.get())),
            profiles: classes.iter().zip(&needs).map(enough).collect(),
            is_mig: mig.is_some(),
            needs,
            least_mib: if want.gpus == 0 { 0 } else { least },
            choice: None,
            tolerates: Vec::new(),
        }
    }

    // Inlined: with those below it is most of what a score costs.
    #[inline]
    pub fn need(&self, gpu: &Gpu) -> Option<(u64, u32)> {
        match &gpu.cut {
            None => self.needs.get(gpu.class as usize).copied().flatten(),
            Some(cut) => self.next(gpu, cut).map(|carving| (cut.mib(carving.place), 1)),
        }
    }

    /// The instance that would be made for it on a GPU that is cut; none: there is no room for any that will do.
    fn next(&self, gpu: &Gpu, cut: &Cut) -> Option<Carving> {
        cut.next(self.enough(gpu))
    }

    /// Places of the profiles that will do, of a GPU that is cut.
    pub fn enough(&self, gpu: &Gpu) -> &[usize] {
        self.profiles.get(gpu.class as usize).map(|enough| &**enough).unwrap_or_default()
    }

    /// The same where the GPU is open to it.
    pub fn carving(&self, gpu: &Gpu, cut: &Cut) -> Option<Carving> {
        let carving = self.next(gpu, cut)?;
        (!gpu.closed && self.tolerates(gpu) && self.chooses(gpu)).then_some(carving)
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
    #[inline(always)]
    pub fn left(&self, gpu: &Gpu) -> Option<u64> {
        if let Some(cut) = &gpu.cut {
            return self.carving(gpu, cut).map(|carving| cut.left(carving, gpu.memory_mib));
        }
        let (mib, slots) = self.need(gpu)?;
        let fits = !gpu.closed && gpu.free_slots() >= slots && gpu.free_compute() >= self.compute;
        if fits && self.tolerates(gpu) && self.chooses(gpu) { gpu.free_mib().checked_sub(mib) } else { None }
    }

    #[inline]
    pub fn mib(&self, gpu: &Gpu) -> u64 {
        self.need(gpu).map_or(0, |(mib, _)| mib)
    }
}

/// A GPU for a want.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Picked {
    /// Place among the node's.
    pub gpu: usize,
    /// Place in the shape.
    pub want: usize,
    /// Where the MIG device is to be made, of a GPU that is cut.
    pub place: Option<MigPlace>,
}

impl Picked {
    /// MiB that it takes.
    pub fn mib(&self, terms: &Terms, gpu: &Gpu) -> u64 {
        match (self.place, &gpu.cut) {
            (Some(place), Some(cut)) => cut.mib(place),
            _ => terms.wants[self.want].mib(gpu),
        }
    }
}

/// The placement of a shape on these GPUs of a node.
pub(super) fn placement(shape: &Shape, terms: &Terms, node: &Node, picked: &[Picked]) -> Placement {
    let mut picked = picked.to_vec();
    picked.sort_by_key(|one| (one.gpu, one.want));
    let grant = |one: &Picked| {
        let gpu = &node.gpus[one.gpu];
        let want = &shape.wants[one.want];
        let (_, slots) = terms.wants[one.want].need(gpu).unwrap_or((0, 0));
        let (device, memory) = (gpu.device.clone(), Bytes::from_mib(one.mib(terms, gpu)));
        let (compute, slots, extent) = match one.place {
            Some(place) => (None, 1, Extent::Mig(place)),
            None if want.part == Part::Whole => (want.compute, slots, Extent::Whole),
            None => (want.compute, slots, Extent::Part),
        };
        GpuGrant { want: one.want, device, memory, compute, slots, extent }
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
    let picks = search::run(node, &terms, &|_, _| 0, &mut SearchCost::default())?;
    let picked: Vec<_> = picks.iter().map(|pick| pick.picked).collect();
    Some(placement(shape, &terms, node, &picked))
}
