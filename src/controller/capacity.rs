//! The allocator's index, kept in step with the view: what GPUs and nodes have, what of it is granted, and what
//! is closed to shares. `usage`: what the shares of each namespace come to.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::allocate::victims::Closed;
use crate::allocate::{
    Division, GpuGrant, GpuSpec, Index, MigBoard, NodeSpec, Placement, PlacementKey, ShareRoom, Unknown,
};
use crate::controller::bounds::NamespaceUsage;
use crate::controller::view::{GpuRef, NodeState};
use crate::feasible::{Node, Resources};
use crate::model::claim::ClaimKey;
use crate::model::names::{DeviceName, NodeName};
use crate::model::quantity::Bytes;
use crate::model::share::{DaemonScope, Extent};
use crate::slices::{BoardParts, MigParts};

#[derive(Debug, Default)]
pub struct Capacity {
    pub index: Index,
    /// What claims have, or are to have, of each GPU.
    grants: BTreeMap<GpuRef, BTreeMap<ClaimKey, GpuGrant>>,
    of_claims: BTreeMap<ClaimKey, Vec<GpuRef>>,
    /// What the claims of each namespace have, or are to have.
    pub usage: NamespaceUsage,
    rooms: NodeRooms,
    /// Closed for other reasons than those of [`Self::is_grouped`].
    closed: BTreeMap<GpuRef, bool>,
    specs: BTreeMap<NodeName, NodeSpec>,
    /// What is kept for others while somebody's turn is; the last is lifted first.
    aside: Vec<SetAside>,
    /// GPUs of these that are kept for themselves, and how many times.
    shut: BTreeMap<GpuRef, u32>,
    /// Grows whenever something may fit that did not fit before.
    epoch: u64,
}

/// What is kept for a unit: where its pods would go. It counts as if it were granted, so that there is room beside it
/// for whatever is no part of it; where the GPUs are in use yet, there may be less than none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Aside {
    pub places: Vec<Placement>,
    /// A claim of several GPUs has those of them for itself that have one MPS daemon.
    pub alone: bool,
}

impl Aside {
    /// Each GPU, once for each of the shares there.
    pub fn gpus(&self) -> impl Iterator<Item = (GpuRef, &GpuGrant)> {
        let of = |place: &'_ Placement| place.node.clone();
        self.places.iter().flat_map(move |place| {
            let node = of(place);
            place.gpus.iter().map(move |grant| (GpuRef::new(&node, &grant.device), grant))
        })
    }

    pub fn nodes(&self) -> BTreeSet<NodeName> {
        self.places.iter().map(|place| place.node.clone()).collect()
    }
}

#[derive(Debug)]
struct SetAside {
    aside: Aside,
    /// Its GPUs that nobody else may have shares of.
    shut: Vec<GpuRef>,
}

/// CPU, memory and pods of a node.
#[derive(Debug, Clone, Copy, Default)]
struct NodeRoom {
    all: Resources,
    used: Resources,
}

impl NodeRoom {
    fn left(&self) -> Resources {
        self.all.minus(self.used)
    }
}

/// The room of all nodes.
#[derive(Debug, Default)]
struct NodeRooms {
    rooms: BTreeMap<NodeName, NodeRoom>,
    /// Nodes that have as many pods as they may.
    full: Arc<BTreeSet<NodeName>>,
}

impl NodeRooms {
    /// Changes a node's room. What is left of it then.
    fn change(&mut self, node: &NodeName, change: impl FnOnce(&mut NodeRoom)) -> Resources {
        let room = self.rooms.entry(node.clone()).or_default();
        change(room);
        let left = room.left();
        match (left.pods == 0, self.full.contains(node)) {
            (true, false) => drop(Arc::make_mut(&mut self.full).insert(node.clone())),
            (false, true) => drop(Arc::make_mut(&mut self.full).remove(node)),
            _ => {}
        }
        left
    }

    fn left(&self, node: &NodeName) -> Resources {
        self.rooms.get(node).copied().unwrap_or_default().left()
    }
}

impl Capacity {
    /// What is closed on these nodes for reasons of others, and what is known of selectors; nothing else: no nodes, no
    /// grants.
    pub fn without_grants(&self, is_meant: impl Fn(&NodeName) -> bool) -> Self {
        let closed = self.closed.iter().filter(|(gpu, _)| is_meant(&gpu.node));
        let closed = closed.map(|(gpu, closed)| (gpu.clone(), *closed)).collect();
        Self { closed, index: self.index.beside(), ..Self::default() }
    }

    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// All that has changed since then was only tried, and is undone.
    pub fn back_to(&mut self, epoch: u64) {
        self.epoch = epoch;
    }

    /// Something else than what is counted here has changed that may let a pod fit.
    pub fn news(&mut self) {
        self.epoch += 1;
    }

    /// What is known of a node now. One without a Node object has no room; one without GPUs is none.
    pub fn set_node(&mut self, name: &NodeName, state: Option<&NodeState>) {
        self.epoch += 1;
        let all = state.and_then(|state| state.object.as_deref()).map(Node::allocatable).unwrap_or_default();
        let left = self.rooms.change(name, |of_node| of_node.all = all);
        let gpus = state.map(gpus).unwrap_or_default();
        if gpus.is_empty() {
            self.index.remove_node(name);
            self.specs.remove(name);
            return;
        }
        let spec = NodeSpec { name: name.clone(), cpu_milli: left.cpu_milli, memory: left.memory, gpus };
        // A new list of GPUs costs more than new numbers.
        if self.specs.get(name).is_none_or(|known| known.gpus != spec.gpus) {
            self.index.insert_node(&spec);
            self.specs.insert(name.clone(), spec.clone());
            self.catch_up(&spec);
        }
        let _ = self.set_room(name, left);
        for (device, gpu) in state.into_iter().flat_map(|state| &state.gpus) {
            let _ = self.index.set_taints(name, device, &gpu.taints);
        }
    }

    /// What was granted or closed before the GPUs were known.
    fn catch_up(&mut self, spec: &NodeSpec) {
        for gpu in &spec.gpus {
            let at = GpuRef::new(&spec.name, &gpu.device);
            for (claim, grant) in self.grants.get(&at).into_iter().flatten() {
                if self.index.placement(key(*claim, &gpu.device)).is_none() {
                    apply(&mut self.index, *claim, &at, grant);
                }
            }
            self.refresh(&at);
        }
    }

    /// A pod takes so much of a node now, beside or instead of what it took.
    pub fn take_room(&mut self, node: &NodeName, room: Resources) {
        let left = self.rooms.change(node, |of_node| of_node.used = of_node.used.plus(room));
        // Unknown: it has no GPUs.
        let _ = self.set_room(node, left);
    }

    pub fn give_room(&mut self, node: &NodeName, room: Resources) {
        let left = self.rooms.change(node, |of_node| of_node.used = of_node.used.minus(room));
        self.epoch += 1;
        let _ = self.set_room(node, left);
    }

    fn set_room(&mut self, node: &NodeName, left: Resources) -> Result<(), Unknown> {
        self.index.set_room(node, left.cpu_milli, left.memory, left.pods)
    }

    /// Nodes that have as many pods as they may.
    pub fn full(&self) -> Arc<BTreeSet<NodeName>> {
        self.rooms.full.clone()
    }

    pub fn left(&self, node: &NodeName) -> Resources {
        self.rooms.left(node)
    }

    /// What a claim has of GPUs, planned or allocated; in place of what it had.
    pub fn set_grants(&mut self, claim: ClaimKey, grants: Vec<(GpuRef, GpuGrant)>) {
        let same = self.of_claims.get(&claim).is_some_and(|known| {
            known.len() == grants.len()
                && grants.iter().all(|(gpu, grant)| self.granted(gpu, claim).is_some_and(|old| old == grant))
        });
        if same || (grants.is_empty() && !self.of_claims.contains_key(&claim)) {
            return;
        }
        let before = self.of_claims.remove(&claim).unwrap_or_default();
        let touched: BTreeSet<GpuRef> =
            before.iter().chain(grants.iter().map(|(gpu, _)| gpu)).cloned().collect();
        for gpu in before {
            self.epoch += 1;
            self.index.remove(key(claim, &gpu.device));
            if let Some(claims) = self.grants.get_mut(&gpu) {
                claims.remove(&claim);
                if claims.is_empty() {
                    self.grants.remove(&gpu);
                }
            }
        }
        for (gpu, grant) in grants {
            apply(&mut self.index, claim, &gpu, &grant);
            self.of_claims.entry(claim).or_default().push(gpu.clone());
            self.grants.entry(gpu).or_default().insert(claim, grant);
        }
        if touched.len() > 1 {
            touched.iter().for_each(|gpu| self.refresh(gpu));
        }
    }

    fn granted(&self, gpu: &GpuRef, claim: ClaimKey) -> Option<&GpuGrant> {
        self.grants.get(gpu)?.get(&claim)
    }

    /// Somebody has a part of the GPU, or is to have one.
    pub fn is_granted(&self, gpu: &GpuRef) -> bool {
        self.grants.contains_key(gpu)
    }

    /// One MPS daemon serves all shares of it, so that a claim with shares of several GPUs has it for itself. That is
    /// taken for granted of a GPU that is not known.
    pub fn has_one_daemon(&self, gpu: &GpuRef) -> bool {
        let spec = self.specs.get(&gpu.node);
        let spec = spec.and_then(|spec| spec.gpus.iter().find(|one| one.device == gpu.device));
        match spec.map(|spec| &spec.division) {
            Some(Division::Shares(room)) => room.daemon == DaemonScope::Gpu,
            Some(Division::Mig(_)) => false,
            None => true,
        }
    }

    /// GPUs of which somebody has a part, or for whom one is kept.
    pub fn taken_gpus(&self) -> impl Iterator<Item = GpuRef> {
        let kept = self.aside.iter().flat_map(|SetAside { aside, .. }| aside.gpus().map(|(gpu, _)| gpu));
        self.grants.keys().cloned().chain(kept)
    }

    /// What these claims have.
    pub fn grants_of(&self, is: impl Fn(ClaimKey) -> bool) -> Vec<(ClaimKey, Vec<(GpuRef, GpuGrant)>)> {
        let claims = self.of_claims.iter().filter(|(claim, _)| is(**claim));
        let of = |(&claim, gpus): (&ClaimKey, &Vec<GpuRef>)| {
            let grants = gpus.iter().filter_map(|gpu| Some((gpu.clone(), self.granted(gpu, claim)?.clone())));
            (claim, grants.collect())
        };
        claims.map(of).collect()
    }

    /// The same of claims that are named.
    pub fn grants_of_these(&self, claims: &[ClaimKey]) -> Vec<(ClaimKey, Vec<(GpuRef, GpuGrant)>)> {
        let of = |claim: &ClaimKey| {
            let gpus = self.of_claims.get(claim).into_iter().flatten();
            let grants = gpus.filter_map(|gpu| Some((gpu.clone(), self.granted(gpu, *claim)?.clone())));
            (*claim, grants.collect())
        };
        claims.iter().map(of).collect()
    }

    /// The same with so much of each GPU as keeps others from what is kept. Shares there that do not fit beside it must
    /// end before it comes: what fits beside it and the others holds nobody up.
    pub fn beside(&self, aside: &Aside) -> Aside {
        let mut asked: BTreeMap<GpuRef, u64> = BTreeMap::new();
        for (gpu, grant) in aside.gpus() {
            let asked = asked.entry(gpu).or_default();
            *asked = asked.saturating_add(grant.memory.mib_ceil());
        }
        let mut kept = aside.clone();
        for place in &mut kept.places {
            // A MIG device has its place, beside which nothing else has to end.
            for grant in place.gpus.iter_mut().filter(|grant| !matches!(grant.extent, Extent::Mig(_))) {
                // Once for each GPU.
                let gpu = GpuRef::new(&place.node, &grant.device);
                let asked = asked.remove(&gpu).map_or(0, |asked| self.keeps_off(&gpu, asked));
                grant.memory = Bytes::from_mib(asked);
            }
        }
        kept
    }

    /// So many MiB of what is free now.
    fn keeps_off(&self, gpu: &GpuRef, asked: u64) -> u64 {
        let view = self.index.node(&gpu.node);
        let Some(view) = view.and_then(|view| view.gpus().find(|one| *one.device() == gpu.device)) else {
            return asked;
        };
        let (all, free) = (view.memory().0.mib_floor(), view.memory().1.mib_floor());
        let rest = all.saturating_sub(asked);
        let shares = self.grants.get(gpu).into_iter().flatten().map(|(_, grant)| grant.memory.mib_ceil());
        let stay = shares.filter(|mib| *mib <= rest).fold(0, u64::saturating_add);
        free.saturating_sub(rest.saturating_sub(stay))
    }

    /// From now on everything is placed beside this, until it is lifted.
    pub fn set_aside(&mut self, aside: Aside) {
        let depth = self.aside.len();
        for (nth, place) in aside.places.iter().enumerate() {
            // Unknown: where there is no such node any more, nothing can be placed there.
            let _ = self.index.apply(PlacementKey::Kept { depth, nth }, place);
        }
        let gpus = aside.gpus().filter(|_| aside.alone).map(|(gpu, _)| gpu);
        let shut: Vec<GpuRef> = gpus.filter(|gpu| self.has_one_daemon(gpu)).collect();
        for gpu in &shut {
            *self.shut.entry(gpu.clone()).or_default() += 1;
            self.refresh(gpu);
        }
        self.aside.push(SetAside { aside, shut });
    }

    /// The last that was set aside is so no longer.
    pub fn lift(&mut self) -> Option<Aside> {
        let SetAside { aside, shut } = self.aside.pop()?;
        for nth in 0..aside.places.len() {
            self.index.remove(PlacementKey::Kept { depth: self.aside.len(), nth });
        }
        for gpu in shut {
            let last = self.shut.get_mut(&gpu).is_none_or(|times| {
                *times -= 1;
                *times == 0
            });
            if last {
                self.shut.remove(&gpu);
            }
            self.refresh(&gpu);
        }
        Some(aside)
    }

    /// All of it, the first first: to be set aside again.
    pub fn lift_all(&mut self) -> Vec<Aside> {
        let mut all: Vec<Aside> = std::iter::from_fn(|| self.lift()).collect();
        all.reverse();
        all
    }

    pub fn set_closed(&mut self, gpu: &GpuRef, closed: bool) {
        if self.closed.insert(gpu.clone(), closed) != Some(closed) {
            self.epoch += u64::from(!closed);
            self.refresh(gpu);
        }
    }

    /// Tells the index whether the GPU is closed.
    fn refresh(&mut self, gpu: &GpuRef) {
        let closed = self.is_shut(gpu) || self.is_grouped(gpu);
        // Unknown: it is told when the GPU is.
        let _ = self.index.set_closed(&gpu.node, &gpu.device, closed);
    }

    /// How it is closed to shares.
    pub fn closed(&self, gpu: &GpuRef) -> Closed {
        let claims = self.grants.get(gpu).into_iter().flatten();
        let groups = claims.filter(|(claim, grant)| self.is_of_group(**claim, gpu, grant)).count();
        Closed { shut: self.is_shut(gpu), groups: u32::try_from(groups).unwrap_or(u32::MAX) }
    }

    /// What a claim has of the GPUs of a node, and whether it is one of shares of several GPUs.
    pub fn grants_on(&self, claim: ClaimKey, node: &NodeName) -> Vec<(GpuGrant, bool)> {
        let gpus = self.of_claims.get(&claim).map(Vec::as_slice).unwrap_or_default();
        let here = gpus.iter().filter(|gpu| gpu.node == *node);
        let grants = here.filter_map(|gpu| Some((gpu, self.granted(gpu, claim)?)));
        grants.map(|(gpu, grant)| (grant.clone(), self.is_of_group(claim, gpu, grant))).collect()
    }

    /// The GPUs that a claim has parts of.
    pub fn gpus_of(&self, claim: ClaimKey) -> &[GpuRef] {
        self.of_claims.get(&claim).map(Vec::as_slice).unwrap_or_default()
    }

    fn is_shut(&self, gpu: &GpuRef) -> bool {
        self.closed.get(gpu).copied().unwrap_or(false) || self.shut.contains_key(gpu)
    }

    /// A claim has shares of this GPU and of others, and each of them has one MPS daemon: the same serves all of them, and
    /// a process is the client of one daemon only, so that shares of this GPU alone cannot be there. Nor can they beside a
    /// claim that has the GPU whole, which the index knows.
    pub fn is_grouped(&self, gpu: &GpuRef) -> bool {
        let mut claims = self.grants.get(gpu).into_iter().flatten();
        claims.any(|(claim, grant)| self.is_of_group(*claim, gpu, grant))
    }

    /// The grant is one of a claim's shares of several GPUs that have one MPS daemon.
    fn is_of_group(&self, claim: ClaimKey, gpu: &GpuRef, grant: &GpuGrant) -> bool {
        let is_share = grant.extent == Extent::Part && self.gpus_of(claim).len() > 1;
        is_share && self.has_one_daemon(gpu) && self.shares_of(claim).nth(1).is_some()
    }

    /// The sets of so many GPUs of which claims have shares together, by one MPS daemon.
    pub fn groups(&self, size: usize) -> BTreeSet<BTreeSet<GpuRef>> {
        let several = self.of_claims.iter().filter(|(_, gpus)| size > 1 && gpus.len() >= size);
        let several = several.map(|(claim, _)| self.shares_of(*claim).cloned().collect::<BTreeSet<_>>());
        several.filter(|gpus| gpus.len() == size).collect()
    }

    /// The GPUs with one MPS daemon of which the claim has a share, and not all.
    fn shares_of(&self, claim: ClaimKey) -> impl Iterator<Item = &GpuRef> {
        let is_part =
            move |gpu: &&GpuRef| self.granted(gpu, claim).is_some_and(|grant| grant.extent == Extent::Part);
        self.gpus_of(claim).iter().filter(is_part).filter(|gpu| self.has_one_daemon(gpu))
    }

    /// Decides with other GPUs open than usual; the index is afterwards as before.
    pub fn decide_with<T>(
        &mut self,
        open: &BTreeMap<GpuRef, bool>,
        decide: impl FnOnce(&mut Index) -> T,
    ) -> T {
        for (gpu, open) in open {
            let closed = !open || self.is_shut(gpu);
            let _ = self.index.set_closed(&gpu.node, &gpu.device, closed);
        }
        let decision = decide(&mut self.index);
        open.keys().for_each(|gpu| self.refresh(gpu));
        decision
    }
}

fn key(claim: ClaimKey, device: &DeviceName) -> PlacementKey {
    PlacementKey::Share { claim, device: device.clone() }
}

fn apply(index: &mut Index, claim: ClaimKey, gpu: &GpuRef, grant: &GpuGrant) {
    let placement = Placement {
        node: gpu.node.clone(),
        gpus: vec![grant.clone()],
        cpu_milli: 0,
        memory: Bytes(0),
        pods: 0,
    };
    // Unknown: it is applied when the node's GPUs are told of.
    let _ = index.apply(key(claim, &gpu.device), &placement);
}

fn gpus(state: &NodeState) -> Vec<GpuSpec> {
    let spec = |gpu: &Arc<crate::controller::view::PublishedGpu>| {
        let one = &gpu.grantable;
        let division = match &one.parts {
            BoardParts::Shares(shares) => Division::Shares(ShareRoom {
                memory: shares.memory,
                slots: shares.slots,
                processes_per_slot: shares.processes_per_slot,
                isolation: shares.isolation,
                daemon: shares.daemon,
            }),
            BoardParts::Mig(MigParts { board, given_whole, .. }) => Division::Mig(MigBoard {
                given_whole: *given_whole,
                profiles: board.profiles.as_slice().into(),
                foreign: board.taken(),
                parts: gpu.parts_facts.clone(),
            }),
        };
        GpuSpec {
            device: one.device.clone(),
            product: one.product.clone(),
            division,
            facts: gpu.facts.clone(),
        }
    };
    state.gpus.values().map(spec).collect()
}
