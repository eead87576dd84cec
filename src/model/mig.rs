//! MIG on demand: what a board can be cut into, and what was made of it. Names are NVML's: a GPU instance takes a run of
//! the board's memory slices (its placement) and a number of its compute slices.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::gpu::{MigCapacity, MigDevice, OnDemand, Placement};
use super::names::{DeviceName, DeviceUuid};

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

/// A MIG device that can be made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PossibleMig {
    /// Stands for the device's UUID, which nobody knows before it is made.
    pub id: DeviceUuid,
    /// The profile's name.
    pub profile: String,
    /// Compute slices.
    pub slices: u32,
    /// How many of the profile fit on an empty board.
    pub most: u32,
    pub place: MigPlace,
    pub capacity: MigCapacity,
}

impl OnDemand {
    /// The profiles of the places, by id, as NVML would tell them of an empty board.
    pub fn profiles(&self) -> Vec<MigProfile> {
        let mut profiles = BTreeMap::<u32, MigProfile>::new();
        for one in &self.places {
            let PossibleMig { profile, slices, most, place, capacity, id: _ } = one;
            let MigPlace { profile_id: id, placement } = *place;
            let empty = || MigProfile {
                id,
                name: profile.clone(),
                slices: *slices,
                most: *most,
                capacity: *capacity,
                placements: Vec::new(),
            };
            profiles.entry(id).or_insert_with(empty).placements.push(placement);
        }
        profiles.into_values().collect()
    }
}

impl PossibleMig {
    /// All that can be made of a board, in the order of placements, large before small.
    pub fn all(gpu: &DeviceUuid, profiles: &[MigProfile]) -> Vec<Self> {
        let of = |profile: &MigProfile| {
            let one = |placement: &Placement| {
                let place = MigPlace { profile_id: profile.id, placement: *placement };
                Self {
                    id: place.stands_for(gpu),
                    profile: profile.name.clone(),
                    slices: profile.slices,
                    most: profile.most,
                    place,
                    capacity: profile.capacity,
                }
            };
            profile.placements.iter().map(one).collect::<Vec<_>>()
        };
        let mut all: Vec<Self> = profiles.iter().flat_map(of).collect();
        all.sort_by_key(|one| {
            (one.place.placement.start, std::cmp::Reverse(one.place.placement.size), one.place)
        });
        all
    }

    /// The MIG device, once it is made.
    pub fn as_made(&self, made: &MadeMig) -> MigDevice {
        MigDevice {
            uuid: made.uuid.clone(),
            profile: self.profile.clone(),
            gpu_instance: made.gpu_instance,
            compute_instance: made.compute_instance,
            profile_id: self.place.profile_id,
            placement: self.place.placement,
            capacity: self.capacity,
        }
    }

    /// As the MIG device is called once it is made.
    pub fn device_name(&self, minor: u32) -> DeviceName {
        DeviceName::mig(minor, &self.profile, self.place.profile_id, self.place.placement.start)
    }
}

impl MigPlace {
    /// Where a MIG device is.
    pub fn of(mig: &MigDevice) -> Self {
        Self { profile_id: mig.profile_id, placement: mig.placement }
    }

    /// What stands for the UUID of the MIG device there until it is made.
    pub fn stands_for(&self, gpu: &DeviceUuid) -> DeviceUuid {
        DeviceUuid::new(format!("{gpu}-mig-{}-{}", self.profile_id, self.placement.start))
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
    fn what_can_be_made_is_named_as_it_will_be() {
        let at = |start| Placement { start, size: 4 };
        let profile = MigProfile {
            id: 9,
            name: "3g.40gb".into(),
            slices: 3,
            most: 2,
            capacity: MigCapacity::default(),
            placements: vec![at(4), at(0)],
        };
        let all = PossibleMig::all(&"GPU-1".into(), std::slice::from_ref(&profile));
        let names: Vec<_> =
            all.iter().map(|one| (one.device_name(2).to_string(), one.id.to_string())).collect();
        let expected = |start| (format!("gpu-2-mig-3g40gb-9-{start}"), format!("GPU-1-mig-9-{start}"));
        assert_eq!(names, [expected(0), expected(4)]);
        let cut = OnDemand { places: all, ..OnDemand::default() };
        assert_eq!(cut.profiles(), [MigProfile { placements: vec![at(0), at(4)], ..profile }], "and back");
    }

    #[test]
    fn placements_overlap_where_they_share_a_slice() {
        let at = |start, size| Placement { start, size };
        assert!(at(0, 4).overlaps(at(3, 1)) && at(3, 1).overlaps(at(0, 4)) && at(0, 8).overlaps(at(2, 2)));
        assert!(!at(0, 4).overlaps(at(4, 4)) && !at(6, 1).overlaps(at(5, 1)) && !at(0, 0).overlaps(at(0, 8)));
        assert_eq!(at(u32::MAX, 2).end(), u32::MAX, "whatever a driver says");
    }
}
