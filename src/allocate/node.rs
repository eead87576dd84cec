//! A node and its GPUs, and what is granted of them.

use std::sync::Arc;

use super::cut::Cut;
use super::mig::largest;
use crate::model::mig::{MigPlace, MigProfile};
use crate::model::names::{DeviceName, NodeName};
use crate::model::quantity::Bytes;
use crate::model::share::{DaemonScope, Extent, Isolation, Percent};
use crate::select::DeviceFacts;

/// A node as the cluster tells of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeSpec {
    pub name: NodeName,
    /// What pods placed by us may take: thousandths of a CPU, bytes. How many there may be is told by
    /// [`super::Index::set_room`].
    pub cpu_milli: u64,
    pub memory: Bytes,
    pub gpus: Vec<GpuSpec>,
}

/// What can be granted of a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuSpec {
    pub device: DeviceName,
    pub product: String,
    pub division: Division,
    /// What selectors see of it. Empty: no selector chooses it.
    pub facts: Arc<DeviceFacts>,
}

/// How a GPU is given out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Division {
    /// In shares, or whole.
    Shares(ShareRoom),
    /// In MIG devices that are made for it.
    Mig(MigBoard),
}

/// What can be granted of a GPU, all shares together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShareRoom {
    /// Rounded down to whole MiB.
    pub memory: Bytes,
    /// Blocks of client slots.
    pub slots: u32,
    /// Client processes that one block is for.
    pub processes_per_slot: u32,
    /// The rung that shares of it stand on.
    pub isolation: Isolation,
    /// With a daemon for all shares of the GPU, a claim that has shares of several GPUs has each of them for itself.
    pub daemon: DaemonScope,
}

/// What a GPU can be cut into.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MigBoard {
    pub profiles: Arc<[MigProfile]>,
    /// Instances that are there and were made for no claim of ours, and places at which none is to be made.
    pub foreign: Vec<MigPlace>,
    /// What selectors see of every MIG device that the scheduler may cut off it; none: it cuts nothing off.
    pub parts: Option<Arc<DeviceFacts>>,
    /// The scheduler gives it whole, too; we do not.
    pub given_whole: bool,
}

/// Where a pod goes, and what it gets there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    pub node: NodeName,
    /// In the node's order of GPUs, each once per want.
    pub gpus: Vec<GpuGrant>,
    pub cpu_milli: u64,
    pub memory: Bytes,
    pub pods: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuGrant {
    /// Place among the wants of the shape that it answers.
    pub want: usize,
    pub device: DeviceName,
    /// Whole MiB.
    pub memory: Bytes,
    pub compute: Option<Percent>,
    pub slots: u32,
    pub extent: Extent,
}

impl GpuGrant {
    pub(super) fn percent(&self) -> u32 {
        self.compute.map_or(0, |percent| u32::from(percent.get()))
    }
}

/// GPUs of which the same can be granted under the same conditions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct GpuClass {
    /// In small letters.
    pub product: String,
    /// The product as it is published.
    pub name: String,
    pub memory_mib: u64,
    pub slots: u32,
    pub processes_per_slot: u32,
    pub isolation: Isolation,
    pub daemon: DaemonScope,
    /// What GPUs can be cut into that are given out in MIG devices. Memory and slots are then those of the largest, and as
    /// many as there can be.
    pub profiles: Option<Arc<[MigProfile]>>,
    /// See [`MigBoard::given_whole`].
    pub given_whole: bool,
}

impl GpuClass {
    pub fn of(spec: &GpuSpec) -> Self {
        let (product, name) = (spec.product.to_lowercase(), spec.product.clone());
        match &spec.division {
            Division::Shares(room) => Self {
                product,
                name,
                memory_mib: room.memory.mib_floor(),
                slots: room.slots,
                processes_per_slot: room.processes_per_slot,
                isolation: room.isolation,
                daemon: room.daemon,
                profiles: None,
                given_whole: false,
            },
            Division::Mig(MigBoard { profiles, given_whole, .. }) => Self {
                product,
                name,
                memory_mib: largest(profiles.iter()).map_or(0, |profile| profile.capacity.memory.mib_floor()),
                slots: profiles.iter().map(|profile| profile.most).max().unwrap_or(0),
                processes_per_slot: 1,
                isolation: Isolation::Mig,
                // Each device has its own, if any.
                daemon: DaemonScope::Share,
                profiles: Some(Arc::clone(profiles)),
                given_whole: *given_whole,
            },
        }
    }
}

pub(super) const COMPUTE_ALL: u32 = 100;

/// A GPU as the allocator sees it. What is used may exceed what there is: others grant, too.
#[derive(Debug, Clone)]
pub(super) struct Gpu {
    pub device: DeviceName,
    pub class: u32,
    /// Number of its facts.
    pub facts: u32,
    pub isolation: Isolation,
    /// See [`ShareRoom::daemon`].
    pub daemon: DaemonScope,
    /// Somebody else's: no share of ours may go there.
    pub closed: bool,
    /// Number of its set of taints.
    pub taints: u32,
    pub memory_mib: u64,
    pub slots: u32,
    pub used_mib: u64,
    pub used_compute: u32,
    /// Wider than one grant's: what somebody forged is taken off again to the last block, and takes nothing of others along.
    pub used_slots: u64,
    /// Grants of all of it: whatever its numbers become, nothing goes beside them.
    pub used_whole: u32,
    /// Sizes of the shares, in MiB, and how many of each. Few: a GPU has few slots.
    pub sizes: Vec<(u64, u32)>,
    /// Of one that is cut into MIG devices. What is free of it follows from this alone.
    pub cut: Option<Box<Cut>>,
    rest: GpuRest,
}

/// What is left of a GPU, and how it is divided: worked out at each change, since scores read nothing else as often.
#[derive(Debug, Clone, Copy, Default)]
struct GpuRest {
    /// What one grant may have at most.
    mib: u64,
    compute: u32,
    slots: u32,
    sizes: ShareSizes,
}

/// Sizes of the shares on a GPU, in MiB.
#[derive(Debug, Clone, Copy, Default)]
enum ShareSizes {
    #[default]
    None,
    One(u64),
    Several,
}

impl Gpu {
    /// `class`: with its number. `facts`: the number of its own, and of those of what the scheduler may cut off it.
    pub fn new(
        spec: &GpuSpec,
        (number, class): (u32, &GpuClass),
        (facts, parts): (u32, Option<u32>),
    ) -> Self {
        let cut = match &spec.division {
            Division::Shares(_) => None,
            Division::Mig(board) => Some(Box::new(Cut::new(board, parts))),
        };
        let mut gpu = Self {
            device: spec.device.clone(),
            class: number,
            facts,
            isolation: class.isolation,
            daemon: class.daemon,
            closed: false,
            taints: 0,
            memory_mib: class.memory_mib,
            slots: class.slots,
            used_mib: 0,
            used_compute: 0,
            used_slots: 0,
            used_whole: 0,
            sizes: Vec::new(),
            cut,
            rest: GpuRest::default(),
        };
        gpu.changed();
        gpu
    }

    /// After each change.
    fn changed(&mut self) {
        let is_whole = self.used_whole > 0;
        let mib = match &self.cut {
            Some(cut) => cut.largest_mib(),
            None if is_whole => 0,
            None => self.memory_mib.saturating_sub(self.used_mib),
        };
        let compute = if is_whole { 0 } else { COMPUTE_ALL.saturating_sub(self.used_compute) };
        let slots = u64::from(self.slots).saturating_sub(self.used_slots);
        let slots = if is_whole { 0 } else { u32::try_from(slots).unwrap_or(self.slots) };
        let sizes = match self.sizes.as_slice() {
            [] => ShareSizes::None,
            [(size, _)] => ShareSizes::One(*size),
            _ => ShareSizes::Several,
        };
        self.rest = GpuRest { mib, compute, slots, sizes };
    }

    /// What one grant may have at most.
    #[inline]
    pub fn free_mib(&self) -> u64 {
        self.rest.mib
    }
    #[inline]
    pub fn free_compute(&self) -> u32 {
        self.rest.compute
    }
    #[inline]
    pub fn free_slots(&self) -> u32 {
        self.rest.slots
    }

    /// Memory that somebody could still get.
    #[inline]
    pub fn usable_mib(&self) -> u64 {
        let has_slots = self.cut.is_some() || self.free_slots() > 0;
        if has_slots && !self.closed { self.free_mib() } else { 0 }
    }

    /// True if a share of this size would stand beside one of another size.
    #[inline]
    pub fn mixes(&self, mib: u64) -> bool {
        match self.rest.sizes {
            ShareSizes::None => false,
            ShareSizes::One(size) => size != mib,
            ShareSizes::Several => true,
        }
    }

    pub fn take(&mut self, grant: &GpuGrant) {
        let mib = grant.memory.mib_ceil();
        self.used_mib = self.used_mib.saturating_add(mib);
        self.used_compute = self.used_compute.saturating_add(grant.percent());
        self.used_slots = self.used_slots.saturating_add(grant.slots.into());
        self.used_whole += u32::from(grant.extent == Extent::Whole);
        match self.sizes.iter_mut().find(|(size, _)| *size == mib) {
            Some((_, count)) => *count += 1,
            None => self.sizes.push((mib, 1)),
        }
        if let Some(cut) = &mut self.cut {
            cut.take(grant);
        }
        self.changed();
    }

    pub fn give(&mut self, grant: &GpuGrant) {
        let mib = grant.memory.mib_ceil();
        self.used_mib = self.used_mib.saturating_sub(mib);
        self.used_compute = self.used_compute.saturating_sub(grant.percent());
        self.used_slots = self.used_slots.saturating_sub(grant.slots.into());
        self.used_whole = self.used_whole.saturating_sub(u32::from(grant.extent == Extent::Whole));
        if let Some((_, count)) = self.sizes.iter_mut().find(|(size, _)| *size == mib) {
            *count -= 1;
        }
        self.sizes.retain(|(_, count)| *count > 0);
        if let Some(cut) = &mut self.cut {
            cut.give(grant);
        }
        self.changed();
    }
}

/// A node as the allocator sees it.
#[derive(Debug, Clone)]
pub(super) struct Node {
    pub name: NodeName,
    pub cpu_milli: u64,
    pub memory_mib: u64,
    pub pods: u64,
    /// Wider than what one pod asks for, like [`Gpu::used_slots`].
    pub used_cpu_milli: u128,
    pub used_memory_mib: u64,
    pub used_pods: u64,
    pub gpus: Vec<Gpu>,
    /// What its GPUs could still give, in MiB: all together, and the one that has most.
    pub usable_mib: u64,
    pub most_mib: u64,
    /// The class of all its GPUs if each is open, without taints, has slots left and is not cut into MIG devices.
    pub plain: Option<u32>,
    /// The number of its last change, so that kept scores can tell.
    pub changed_at: u64,
}

impl Node {
    /// After each change; its number.
    pub fn changed(&mut self, number: u64) {
        (self.usable_mib, self.most_mib) = (0, 0);
        for usable in self.gpus.iter().map(Gpu::usable_mib) {
            self.usable_mib = self.usable_mib.saturating_add(usable);
            self.most_mib = self.most_mib.max(usable);
        }
        let class = self.gpus.first().map_or(0, |gpu| gpu.class);
        let plain = |gpu: &Gpu| {
            let is_open = !gpu.closed && gpu.taints == 0 && gpu.free_slots() > 0;
            gpu.class == class && gpu.cut.is_none() && is_open
        };
        self.plain = self.gpus.iter().all(plain).then_some(class);
        self.changed_at = number;
    }

    pub fn free_cpu_milli(&self) -> u64 {
        let left = u128::from(self.cpu_milli).saturating_sub(self.used_cpu_milli);
        u64::try_from(left).unwrap_or(self.cpu_milli)
    }
    pub fn free_memory_mib(&self) -> u64 {
        self.memory_mib.saturating_sub(self.used_memory_mib)
    }
    pub fn free_pods(&self) -> u64 {
        self.pods.saturating_sub(self.used_pods)
    }

    pub fn gpu_mut(&mut self, device: &DeviceName) -> Option<&mut Gpu> {
        self.gpus.iter_mut().find(|gpu| gpu.device == *device)
    }

    /// Devices that the node lacks are left out.
    pub fn take(&mut self, placement: &Placement) {
        self.used_cpu_milli = self.used_cpu_milli.saturating_add(placement.cpu_milli.into());
        self.used_memory_mib = self.used_memory_mib.saturating_add(placement.memory.mib_ceil());
        self.used_pods = self.used_pods.saturating_add(placement.pods);
        for grant in &placement.gpus {
            if let Some(gpu) = self.gpu_mut(&grant.device) {
                gpu.take(grant);
            }
        }
    }

    pub fn give(&mut self, placement: &Placement) {
        self.used_cpu_milli = self.used_cpu_milli.saturating_sub(placement.cpu_milli.into());
        self.used_memory_mib = self.used_memory_mib.saturating_sub(placement.memory.mib_ceil());
        self.used_pods = self.used_pods.saturating_sub(placement.pods);
        for grant in &placement.gpus {
            if let Some(gpu) = self.gpu_mut(&grant.device) {
                gpu.give(grant);
            }
        }
    }
}

/// A node as others may look at it.
#[derive(Debug, Clone, Copy)]
pub struct NodeView<'a>(pub(super) &'a Node);

impl<'a> NodeView<'a> {
    pub fn name(&self) -> &'a NodeName {
        &self.0.name
    }
    /// Total and left, in thousandths of a CPU.
    pub fn cpu_milli(&self) -> (u64, u64) {
        (self.0.cpu_milli, self.0.free_cpu_milli())
    }
    /// Total and left.
    pub fn memory(&self) -> (Bytes, Bytes) {
        (Bytes::from_mib(self.0.memory_mib), Bytes::from_mib(self.0.free_memory_mib()))
    }
    /// Total and left.
    pub fn pods(&self) -> (u64, u64) {
        (self.0.pods, self.0.free_pods())
    }
    pub fn gpus(&self) -> impl Iterator<Item = GpuView<'a>> + use<'a> {
        self.0.gpus.iter().map(GpuView)
    }
}

#[derive(Debug, Clone, Copy)]
pub struct GpuView<'a>(&'a Gpu);

impl<'a> GpuView<'a> {
    pub fn device(&self) -> &'a DeviceName {
        &self.0.device
    }
    /// What can be granted in all, and what is left of it.
    pub fn memory(&self) -> (Bytes, Bytes) {
        (Bytes::from_mib(self.0.memory_mib), Bytes::from_mib(self.0.free_mib()))
    }
    /// Percent left.
    pub fn compute(&self) -> u32 {
        self.0.free_compute()
    }
    /// Blocks left.
    pub fn slots(&self) -> u32 {
        self.0.free_slots()
    }
    pub fn closed(&self) -> bool {
        self.0.closed
    }
    /// It is cut into MIG devices; its memory is that of the largest that there could be, and that can still be made.
    pub fn is_cut(&self) -> bool {
        self.0.cut.is_some()
    }
    /// It has taints: only wants that bear them go there.
    pub fn tainted(&self) -> bool {
        self.0.taints > 0
    }
}
