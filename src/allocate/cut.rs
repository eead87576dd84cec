//! A GPU that is cut into MIG devices, as the index counts it: what is on it, and what would be made next of each profile.

use std::sync::Arc;

use super::mig::{Carving, LOSS_BITS, MigLayout, largest, memory_slices};
use super::node::{GpuGrant, MigBoard};
use crate::model::mig::{MigPlace, MigProfile};
use crate::model::share::Extent;

/// Bits of what is left of a GPU, in MiB, in what it costs to use it.
const LEFT_BITS: u32 = 32;
/// Bits of the rank of its class there.
const RANK_BITS: u32 = 4;

#[derive(Debug, Clone)]
pub(super) struct Cut {
    profiles: Arc<[MigProfile]>,
    /// What was made for no claim of ours, and where nothing is to be made.
    foreign: Vec<MigPlace>,
    /// All that is there, or granted. In order; one that is granted twice stands here twice.
    instances: Vec<MigPlace>,
    /// Grants that are no MIG device: nothing goes beside them.
    strange: u32,
    /// By place in the profiles; none: no more can be made of it.
    next: Vec<Option<Carving>>,
    largest: Option<usize>,
    /// Memory slices that nobody has.
    spare: u32,
    /// Number of the facts of what the scheduler may cut off it; none: it cuts nothing off.
    pub parts: Option<u32>,
}

impl Cut {
    pub fn new(board: &MigBoard, parts: Option<u32>) -> Self {
        let mut cut = Self {
            profiles: Arc::clone(&board.profiles),
            foreign: board.foreign.clone(),
            instances: Vec::new(),
            strange: 0,
            next: Vec::new(),
            largest: None,
            spare: 0,
            parts,
        };
        cut.instances.clone_from(&cut.foreign);
        cut.changed();
        cut
    }

    pub fn take(&mut self, grant: &GpuGrant) {
        match grant.extent {
            Extent::Mig(place) => self.instances.push(place),
            Extent::Part | Extent::Whole => self.strange += 1,
        }
        self.changed();
    }

    pub fn give(&mut self, grant: &GpuGrant) {
        match grant.extent {
            Extent::Mig(place) => {
                let count = |all: &[MigPlace]| all.iter().filter(|one| **one == place).count();
                let at = self.instances.iter().position(|one| *one == place);
                if let Some(at) = at.filter(|_| count(&self.instances) > count(&self.foreign)) {
                    self.instances.remove(at);
                }
            }
            Extent::Part | Extent::Whole => self.strange = self.strange.saturating_sub(1),
        }
        self.changed();
    }

    fn changed(&mut self) {
        self.instances.sort_unstable();
        self.next = match self.strange {
            0 => self.layout(&[]).outlook(),
            _ => vec![None; self.profiles.len()],
        };
        let possible = self.profiles.iter().zip(&self.next).filter(|(_, next)| next.is_some());
        let id = largest(possible.map(|(profile, _)| profile)).map(|profile| profile.id);
        self.largest = id.and_then(|id| self.profiles.iter().position(|profile| profile.id == id));
        let taken = |slice: &u32| {
            let has = |one: &MigPlace| (one.placement.start..one.placement.end()).contains(slice);
            self.instances.iter().any(has)
        };
        let all = memory_slices(&self.profiles).min(SLICES_MAX);
        self.spare = (0..all).filter(|slice| !taken(slice)).count() as u32;
    }

    /// With these beside. What is granted where nothing more is to be made counts once.
    fn layout(&self, more: &[MigPlace]) -> MigLayout<'_> {
        let distinct = self.instances.chunk_by(|one, other| one == other).filter_map(|same| same.first());
        MigLayout::new(&self.profiles, distinct.chain(more).copied())
    }

    /// The first of these profiles, by their places, of which one more can be made, and where.
    #[inline]
    pub fn next(&self, enough: &[usize]) -> Option<Carving> {
        enough.iter().find_map(|at| self.next.get(*at).copied().flatten())
    }

    /// Of each profile, by its place, what would be made next once these have been made, too.
    pub fn outlook_beside(&self, more: &[MigPlace]) -> Vec<Option<Carving>> {
        match self.strange {
            0 => self.layout(more).outlook(),
            _ => vec![None; self.profiles.len()],
        }
    }

    pub fn profile(&self, id: u32) -> Option<&MigProfile> {
        self.profiles.iter().find(|profile| profile.id == id)
    }

    /// MiB of an instance.
    pub fn mib(&self, place: MigPlace) -> u64 {
        self.profile(place.profile_id).map_or(0, |profile| profile.capacity.memory.mib_floor())
    }

    /// The largest instance that can still be made.
    pub fn largest(&self) -> Option<&MigProfile> {
        self.largest.map(|at| &self.profiles[at])
    }

    pub fn largest_mib(&self) -> u64 {
        self.largest().map_or(0, |profile| profile.capacity.memory.mib_floor())
    }

    pub fn instances(&self) -> &[MigPlace] {
        &self.instances
    }

    /// Beside what is nobody's of ours it has these, each so often.
    pub fn counts(&self, granted: &[MigPlace]) -> bool {
        let mut all: Vec<MigPlace> = self.foreign.iter().chain(granted).copied().collect();
        all.sort_unstable();
        all == self.instances
    }

    /// Memory slices that are left once an instance is made there, in MiB of a GPU that has so many in all.
    pub fn left(&self, carving: Carving, all_mib: u64) -> u64 {
        let left = u64::from(self.spare.saturating_sub(carving.place.placement.size));
        let all = u64::from(memory_slices(&self.profiles).max(1));
        u64::try_from(u128::from(left) * u128::from(all_mib) / u128::from(all)).unwrap_or(all_mib)
    }
}

/// No board has more memory slices; what a slice says is read with care.
const SLICES_MAX: u32 = 128;

/// What it costs to make an instance where that leaves so much: first what can no longer be made, then how much the class
/// is sought by others, then what is left. Below 2^60: costs of several GPUs are added up.
pub(super) fn cost(carving: Carving, rank: u64, left: u64) -> u64 {
    const { assert!(LOSS_BITS + RANK_BITS + LEFT_BITS <= 60) };
    let rank = rank.min((1 << RANK_BITS) - 1);
    let left = left.min((1 << LEFT_BITS) - 1);
    u64::from(carving.loss) << (RANK_BITS + LEFT_BITS) | rank << LEFT_BITS | left
}
