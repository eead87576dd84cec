//! MIG on demand: what a board can be cut into, and what was made of it. Names are NVML's: a GPU instance takes a run of
//! the board's memory slices (its placement) and a number of its compute slices.

use serde::{Deserialize, Serialize};

use super::gpu::{MigCapacity, Placement};
use super::names::DeviceUuid;

/// A GPU instance profile as the board's NVML has it, with every placement that NVML calls possible on an empty board.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigProfile {
    /// NVML's id, by which instances are made.
    pub id: u32,
    /// e.g. `1g.10gb`, `1g.10gb+me`.
    pub name: String,
    /// Compute slices.
    pub slices: u32,
    /// How many fit on an empty board.
    pub most: u32,
    pub capacity: MigCapacity,
    pub placements: Vec<Placement>,
}

impl MigProfile {
    /// Without media extensions or graphics, or the want of them: what `1g` alone means.
    pub fn is_plain(&self) -> bool {
        self.name.ends_with("gb")
    }
}

/// Where a GPU instance is, or may be made: what identifies it, whatever ids NVML gives it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct MigPlace {
    pub profile_id: u32,
    pub placement: Placement,
}

impl Placement {
    /// True if the two have a memory slice in common.
    pub fn overlaps(self, other: Self) -> bool {
        self.start < other.end() && other.start < self.end()
    }

    /// The first slice after it.
    pub fn end(self) -> u32 {
        self.start.saturating_add(self.size)
    }
}

/// A GPU instance with one compute instance that has all of it, as a program names it and as its device nodes are
/// numbered.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MadeMig {
    pub uuid: DeviceUuid,
    pub gpu_instance: u32,
    pub compute_instance: u32,
}

/// A GPU instance that is on a board, whoever made it, with its compute instances.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuInstance {
    pub id: u32,
    pub place: MigPlace,
    pub devices: Vec<MadeMig>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn placements_overlap_where_they_share_a_slice() {
        let at = |start, size| Placement { start, size };
        assert!(at(0, 4).overlaps(at(3, 1)) && at(3, 1).overlaps(at(0, 4)) && at(0, 8).overlaps(at(2, 2)));
        assert!(!at(0, 4).overlaps(at(4, 4)) && !at(6, 1).overlaps(at(5, 1)) && !at(0, 0).overlaps(at(0, 8)));
        assert_eq!(at(u32::MAX, 2).end(), u32::MAX, "whatever a driver says");
    }
}
