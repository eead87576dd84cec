//! Nodes, GPUs, and what is granted of them. A change costs O(log n); scores that it touches are renewed when
//! somebody asks for them.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::Arc;

use thiserror::Error;

use super::ask::Shape;
use super::choice::Studied;
use super::facts::Facts;
use super::fit::first;
use super::fragment::Workload;
use super::node::{Division, Gpu, GpuClass, GpuSpec, Node, NodeSpec, NodeView, Placement};
use super::score_table::ScoreTables;
use super::taints::Taints;
use crate::model::claim::ClaimKey;
use crate::model::names::{DeviceName, NodeName, PodUid};
use crate::model::quantity::Bytes;
use crate::select::Taint;

/// Something is spoken of that the index does not have.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Unknown {
    #[error("node {0} is not in the index; it has no GPUs, or its slices have not been seen yet")]
    Node(NodeName),
    #[error("node {0} has no device {1} in the index; look at its slices")]
    Device(NodeName, DeviceName),
    #[error("{0} is placed already; remove its placement first")]
    Placed(PlacementKey),
}

/// Whose placement it is.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum PlacementKey {
    Pod(PodUid),
    /// A claim's share of one GPU. One for each GPU: one that is not known (any more) keeps no other from being
    /// counted.
    Share {
        claim: ClaimKey,
        device: DeviceName,
    },
    /// A place that is kept free, by when it was set aside and its number there.
    Kept {
        depth: usize,
        nth: usize,
    },
}

impl From<&PodUid> for PlacementKey {
    fn from(pod: &PodUid) -> Self {
        Self::Pod(pod.clone())
    }
}

impl fmt::Display for PlacementKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pod(pod) => write!(f, "pod {pod}"),
            Self::Share { claim, device } => write!(f, "the share of claim {claim} on {device}"),
            Self::Kept { depth, nth } => write!(f, "kept place {depth}/{nth}"),
        }
    }
}

#[derive(Debug, Default)]
pub struct Index {
    pub(super) nodes: Nodes,
    pub(super) ids: BTreeMap<NodeName, usize>,
    /// Places in `nodes` that are free again.
    gaps: Vec<usize>,
    pub(super) placements: BTreeMap<PlacementKey, Placement>,
    pub(super) workload: Workload,
    pub(super) score_tables: ScoreTables,
}

/// What scores are made from.
#[derive(Debug, Default)]
pub(super) struct Nodes {
    pub all: Vec<Option<Node>>,
    pub classes: Vec<GpuClass>,
    pub facts: Facts,
    pub taints: Taints,
    /// Nodes in the order in which they changed; the first is that of change number `forgotten`.
    changed: VecDeque<u32>,
    forgotten: u64,
}

impl Nodes {
    /// The number of the next change.
    pub fn now(&self) -> u64 {
        self.forgotten + self.changed.len() as u64
    }

    /// The changes since, each with its number; none: it is as cheap to look at all nodes.
    pub fn since(&self, number: u64) -> Option<impl Iterator<Item = (u64, usize)>> {
        let from = usize::try_from(number.checked_sub(self.forgotten)?).ok()?;
        let changes = self.changed.range(from.min(self.changed.len())..);
        Some((number..).zip(changes.map(|id| *id as usize)))
    }

    fn touch(&mut self, id: usize) {
        let now = self.now();
        if let Some(node) = &mut self.all[id] {
            node.changed(now);
        }
        // More nodes than a u32 counts fit into no cluster.
        self.changed.push_back(id as u32);
        // The oldest only: to forget all at once would make all boards start anew at the same time.
        while self.changed.len() > self.all.len() {
            self.changed.pop_front();
            self.forgotten += 1;
        }
    }

    fn class(&mut self, class: GpuClass) -> u32 {
        let known = self.classes.iter().position(|known| *known == class);
        let at = known.unwrap_or_else(|| {
            self.classes.push(class);
            self.classes.len() - 1
        });
        // There are no more classes than GPUs.
        at as u32
    }

    fn gpu(&mut self, spec: &GpuSpec) -> Gpu {
        let facts = self.facts.number(&spec.facts);
        let parts = match &spec.division {
            Division::Mig(board) => board.parts.as_ref().map(|parts| self.facts.number(parts)),
            Division::Shares(_) => None,
        };
        let class = self.class(GpuClass::of(spec));
        Gpu::new(spec, (class, &self.classes[class as usize]), (facts, parts))
    }

    /// Facts of GPUs that have gone need not be kept for ever.
    fn tidy(&mut self) {
        if self.facts.crowded() {
            let gpus = self.all.iter_mut().flatten().flat_map(|node| &mut node.gpus);
            let numbers = gpus.flat_map(|gpu| {
                let parts = gpu.cut.as_mut().and_then(|cut| cut.parts.as_mut());
                [Some(&mut gpu.facts), parts].into_iter().flatten()
            });
            self.facts.renumber(numbers);
        }
        if self.taints.crowded() {
            let gpus = self.all.iter_mut().flatten().flat_map(|node| &mut node.gpus);
            self.taints.renumber(gpus.map(|gpu| &mut gpu.taints));
        }
    }

    pub fn take(&mut self, id: usize, placement: &Placement) {
        if let Some(node) = &mut self.all[id] {
            node.take(placement);
        }
        self.touch(id);
    }

    pub fn give(&mut self, id: usize, placement: &Placement) {
        if let Some(node) = &mut self.all[id] {
            node.give(placement);
        }
        self.touch(id);
    }
}

impl Index {
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a node, or replaces what was known of one. Placements on it stay; they count for devices of the
    /// same name. GPUs that were closed stay closed, and taints stay, as does the number of pods: a new node may
    /// have any, until [`Self::set_room`] says otherwise.
    pub fn insert_node(&mut self, spec: &NodeSpec) {
        let known = self.ids.get(&spec.name).copied();
        let gpus = spec.gpus.iter().map(|gpu| self.nodes.gpu(gpu)).collect();
        let mut node = Node {
            name: spec.name.clone(),
            cpu_milli: spec.cpu_milli,
            memory_mib: spec.memory.mib_floor(),
            pods: u64::MAX,
            used_cpu_milli: 0,
            used_memory_mib: 0,
            used_pods: 0,
            gpus,
            usable_mib: 0,
            most_mib: 0,
            plain: None,
            changed_at: 0,
        };
        for placement in self.placements.values().filter(|placement| placement.node == spec.name) {
            node.take(placement);
        }
        let id = known.or_else(|| self.gaps.pop()).unwrap_or(self.nodes.all.len());
        match self.nodes.all.get_mut(id) {
            Some(place) => {
                if let Some(old) = place.take() {
                    node.pods = old.pods;
                    for gpu in &old.gpus {
                        if let Some(same) = node.gpu_mut(&gpu.device) {
                            (same.closed, same.taints) = (gpu.closed, gpu.taints);
                        }
                    }
                }
                *place = Some(node);
            }
            None => self.nodes.all.push(Some(node)),
        }
        self.ids.insert(spec.name.clone(), id);
        self.nodes.touch(id);
        self.nodes.tidy();
        self.workload.classes_changed(&self.nodes.classes);
    }

    /// Forgets a node. Placements on it stay until they are removed, and count again if it comes back.
    pub fn remove_node(&mut self, name: &NodeName) {
        if let Some(id) = self.ids.remove(name) {
            self.nodes.all[id] = None;
            self.nodes.touch(id);
            self.gaps.push(id);
        }
    }

    /// Says how much CPU and memory our pods may take on a node, and how many they may be: what it has, less what
    /// other pods take.
    ///
    /// # Errors
    /// There is no such node.
    pub fn set_room(
        &mut self,
        name: &NodeName,
        cpu_milli: u64,
        memory: Bytes,
        pods: u64,
    ) -> Result<(), Unknown> {
        let (id, node) = self.node_mut(name)?;
        node.cpu_milli = cpu_milli;
        node.memory_mib = memory.mib_floor();
        node.pods = pods;
        self.nodes.touch(id);
        Ok(())
    }

    /// Closes a GPU to our shares (somebody else has it), or opens it again.
    ///
    /// # Errors
    /// There is no such node or device.
    pub fn set_closed(&mut self, name: &NodeName, device: &DeviceName, closed: bool) -> Result<(), Unknown> {
        let (id, node) = self.node_mut(name)?;
        let gpu = node.gpu_mut(device).ok_or_else(|| Unknown::Device(name.clone(), device.clone()))?;
        gpu.closed = closed;
        self.nodes.touch(id);
        Ok(())
    }

    /// Says which taints a GPU has now.
    ///
    /// # Errors
    /// There is no such node or device.
    pub fn set_taints(
        &mut self,
        name: &NodeName,
        device: &DeviceName,
        taints: &[Taint],
    ) -> Result<(), Unknown> {
        let number = self.nodes.taints.number(taints);
        let (id, node) = self.node_mut(name)?;
        let gpu = node.gpu_mut(device).ok_or_else(|| Unknown::Device(name.clone(), device.clone()))?;
        if std::mem::replace(&mut gpu.taints, number) != number {
            self.nodes.touch(id);
            self.nodes.tidy();
        }
        Ok(())
    }

    /// Records what a pod or a claim has. What there is does not matter here: a grant that somebody gave is a fact, and
    /// [`super::audit()`] tells if it is too much.
    ///
    /// # Errors
    /// There is no such node or device, or `key` is placed already. Nothing has changed then.
    pub fn apply(&mut self, key: impl Into<PlacementKey>, placement: &Placement) -> Result<(), Unknown> {
        let key = key.into();
        if self.placements.contains_key(&key) {
            return Err(Unknown::Placed(key));
        }
        let (id, node) = self.node_mut(&placement.node)?;
        for grant in &placement.gpus {
            if node.gpu_mut(&grant.device).is_none() {
                return Err(Unknown::Device(placement.node.clone(), grant.device.clone()));
            }
        }
        self.nodes.take(id, placement);
        self.placements.insert(key, placement.clone());
        Ok(())
    }

    /// Takes back what a pod or a claim had; what that was.
    pub fn remove(&mut self, key: impl Into<PlacementKey>) -> Option<Placement> {
        let placement = self.placements.remove(&key.into())?;
        if let Some(id) = self.ids.get(&placement.node) {
            self.nodes.give(*id, &placement);
        }
        Some(placement)
    }

    /// Counts a pod that arrived, once: the policies `pack` and `fragmentation` expect more like it.
    pub fn seen(&mut self, shape: &Shape) {
        self.workload.seen(shape, &self.nodes, &self.score_tables.choices);
    }

    pub fn placement(&self, key: impl Into<PlacementKey>) -> Option<&Placement> {
        self.placements.get(&key.into())
    }

    /// In the order in which they were added.
    pub fn nodes(&self) -> impl Iterator<Item = NodeView<'_>> {
        self.nodes.all.iter().flatten().map(NodeView)
    }

    pub fn node(&self, name: &NodeName) -> Option<NodeView<'_>> {
        self.ids.get(name).and_then(|id| self.nodes.all[*id].as_ref()).map(NodeView)
    }

    fn node_mut(&mut self, name: &NodeName) -> Result<(usize, &mut Node), Unknown> {
        let id = self.ids.get(name).copied();
        let node = id.and_then(|id| self.nodes.all[id].as_mut().map(|node| (id, node)));
        node.ok_or_else(|| Unknown::Node(name.clone()))
    }
}

impl Index {
    /// Another index, without nodes, that knows what is known of GPUs and selectors here.
    pub fn beside(&self) -> Self {
        let nodes =
            Nodes { facts: self.nodes.facts.clone(), taints: self.nodes.taints.clone(), ..Nodes::default() };
        Self { nodes, score_tables: ScoreTables::with(self.score_tables.choices.beside()), ..Self::default() }
    }

    /// From now on decisions and selectors may cost so much, in ticks of [`crate::select::TICKS_PER_UNIT`]. When that is
    /// spent, [`Self::study`] stops, and so does a decision for several wants at once or for several pods; one for a
    /// single want goes to its end. Until this is called nothing is bounded.
    pub fn allow(&mut self, ticks: u64) {
        self.score_tables.choices.allow(ticks);
    }

    /// Work that is not the allocator's is paid from what is allowed, too.
    pub fn pay(&mut self, ticks: u64) {
        self.score_tables.choices.pay(ticks);
    }

    /// Not all that was allowed is spent. If it is, something is left undone.
    pub fn goes_on(&mut self) -> bool {
        self.score_tables.choices.is_open()
    }

    /// Not all that was allowed is spent.
    pub fn has_left(&self) -> bool {
        self.score_tables.choices.has_left()
    }

    /// What was spent since, in ticks, and whether something was left undone for lack of more.
    pub fn spent(&self) -> (u64, bool) {
        self.score_tables.choices.spent()
    }

    /// Finds out which GPUs the selectors of a shape choose, and reads the attributes of its constraints, as far as what is
    /// allowed will do. To be done before a decision: in one, a GPU that was not looked at is not chosen.
    pub fn study(&mut self, shape: &Shape) -> Studied {
        let lists = shape.wants.iter().map(|want| &want.selectors);
        match self.score_tables.choices.study(lists, &self.nodes.facts) {
            Studied::Done => self.score_tables.choices.study_attributes(&shape.alike, &self.nodes.facts),
            other => other,
        }
    }

    /// All of these CEL expressions choose the GPU. Not if there is no such GPU, one of them fails on it, or it was not
    /// looked at yet. Answers are kept by the expressions' texts.
    pub fn chooses(&mut self, selectors: &Arc<[String]>, name: &NodeName, device: &DeviceName) -> bool {
        let Some(facts) = self.facts_of(name, device) else { return false };
        let choice = self.score_tables.choices.of(selectors, &self.nodes.facts);
        choice.is_none_or(|choice| choice.chosen.has(facts))
    }

    /// Nothing is known against it: they choose the GPU, one of them fails on it here, it was not looked at yet, or
    /// there is no such GPU.
    pub fn may_choose(&mut self, selectors: &Arc<[String]>, name: &NodeName, device: &DeviceName) -> bool {
        let Some(facts) = self.facts_of(name, device) else { return true };
        let choice = self.score_tables.choices.of(selectors, &self.nodes.facts);
        choice.is_none_or(|choice| choice.may_choose(facts))
    }

    /// The same of the MIG devices that the scheduler may cut off the GPU. Not if it cuts nothing off.
    pub fn may_choose_part(
        &mut self,
        selectors: &Arc<[String]>,
        name: &NodeName,
        device: &DeviceName,
    ) -> bool {
        let parts = self.gpu(name, device).and_then(|gpu| gpu.cut.as_ref()?.parts);
        let Some(parts) = parts else { return false };
        let choice = self.score_tables.choices.of(selectors, &self.nodes.facts);
        choice.is_none_or(|choice| choice.may_choose(parts))
    }

    /// The number of what is known of a GPU.
    fn facts_of(&self, name: &NodeName, device: &DeviceName) -> Option<u32> {
        self.gpu(name, device).map(|gpu| gpu.facts)
    }

    fn gpu(&self, name: &NodeName, device: &DeviceName) -> Option<&Gpu> {
        let node = self.ids.get(name).and_then(|id| self.nodes.all[*id].as_ref());
        node.and_then(|node| node.gpus.iter().find(|gpu| gpu.device == *device))
    }

    /// Where the pod would go on a node if GPUs were taken in their order, without any score: how a scheduler
    /// chooses that does not rate devices.
    pub fn first_fit(&self, node: &NodeName, shape: &Shape) -> Option<Placement> {
        first(&self.nodes, self.ids.get(node).copied()?, shape)
    }
}
