//! Which MIG instance is made for an ask, and where on the board: the smallest profile that suffices, at the placement
//! that keeps the largest profiles possible as long as they can be.
//!
//! Everything here follows from what NVML says of the board ([`MigProfile`]): there is no table of products. A board has as
//! many compute slices and engines as the instances of one profile have together that have most of them.

use thiserror::Error;

use crate::model::mig::{MigPlace, MigProfile};
use crate::model::quantity::Bytes;

/// What is asked of one instance. At least one byte of memory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MigAsk {
    pub memory: Bytes,
    /// Of the board's compute slices, in percent; 0: no matter how many.
    pub percent: u32,
}

/// A GPU instance that may be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MigChoice<'a> {
    pub profile: &'a MigProfile,
    pub place: MigPlace,
}

/// Why no instance can be made.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum NoMig {
    #[error(
        "no MIG profile of this GPU has {mib} MiB and {percent} % of its multiprocessors; the largest is {largest} with \
         {most} MiB"
    )]
    TooLarge { mib: u64, percent: u32, largest: String, most: u64 },
    #[error("the MIG profiles that suffice ({profiles}) have no free placement")]
    NoRoom { profiles: String },
    #[error("NVML lists no MIG profile of this GPU")]
    NoProfiles,
}

/// What a board can be cut into, and the instances that are on it, whoever made them.
#[derive(Debug, Clone)]
pub struct MigLayout<'a> {
    profiles: &'a [MigProfile],
    instances: Vec<MigPlace>,
}

/// What instances take of a board beside memory slices: compute slices, then each kind of engine.
type Units = [u32; 6];

fn units(profile: &MigProfile) -> Units {
    let capacity = &profile.capacity;
    [
        profile.slices,
        capacity.copy_engines,
        capacity.decoders,
        capacity.encoders,
        capacity.jpeg_engines,
        capacity.ofa_engines,
    ]
}

fn plus(a: Units, b: Units) -> Units {
    std::array::from_fn(|i| a[i].saturating_add(b[i]))
}

impl<'a> MigLayout<'a> {
    /// `instances` may be of profiles that are not listed: their memory slices are taken all the same.
    pub fn new(profiles: &'a [MigProfile], instances: impl IntoIterator<Item = MigPlace>) -> Self {
        Self { profiles, instances: instances.into_iter().collect() }
    }

    /// Notes an instance that was made.
    pub fn add(&mut self, place: MigPlace) {
        self.instances.push(place);
    }

    /// Notes that an instance was ended. False if it was not there.
    pub fn remove(&mut self, place: MigPlace) -> bool {
        let before = self.instances.len();
        self.instances.retain(|one| *one != place);
        self.instances.len() != before
    }

    pub fn instances(&self) -> &[MigPlace] {
        &self.instances
    }

    fn profile(&self, id: u32) -> Option<&'a MigProfile> {
        self.profiles.iter().find(|profile| profile.id == id)
    }

    /// Placements at which one more instance of the profile can be made now, in their order.
    pub fn free(&self, profile: &'a MigProfile) -> impl Iterator<Item = MigPlace> + '_ {
        let fits = self.units_suffice(profile);
        let possible = profile.placements.iter().filter(move |_| fits);
        let free = possible.filter(|at| !self.instances.iter().any(|one| one.placement.overlaps(**at)));
        free.map(|at| MigPlace { profile_id: profile.id, placement: *at })
    }

    fn units_suffice(&self, profile: &MigProfile) -> bool {
        let made = || self.instances.iter().filter_map(|one| self.profile(one.profile_id));
        let same = made().filter(|one| one.id == profile.id).count();
        let taken = made().map(units).fold(units(profile), plus);
        let together = |one: &MigProfile| units(one).map(|count| count.saturating_mul(one.most));
        let most = |most: Units, one: Units| std::array::from_fn(|i| most[i].max(one[i]));
        let all = self.profiles.iter().map(together).fold(Units::default(), most);
        u32::try_from(same).is_ok_and(|same| same < profile.most)
            && taken.iter().zip(all).all(|(t, a)| *t <= a)
    }

    /// The instance to make for `ask`. Profiles with a suffix (`+me`, `+gfx`, `-me`) are for those who name them.
    ///
    /// # Errors
    /// No profile suffices, or those that do have no room.
    pub fn choose(&self, ask: MigAsk) -> Result<MigChoice<'a>, NoMig> {
        let compute = self.profiles.iter().map(|profile| profile.slices).max().ok_or(NoMig::NoProfiles)?;
        let suffices = |profile: &&MigProfile| {
            let percent = u64::from(profile.slices) * 100;
            profile.is_plain()
                && profile.capacity.memory >= ask.memory
                && percent >= u64::from(ask.percent) * u64::from(compute)
        };
        let mut enough: Vec<&'a MigProfile> = self.profiles.iter().filter(suffices).collect();
        enough.sort_by_key(|profile| rank(profile));
        if enough.is_empty() {
            let largest =
                self.profiles.iter().max_by_key(|profile| rank(profile)).ok_or(NoMig::NoProfiles)?;
            let most = largest.capacity.memory.mib_floor();
            let (mib, percent) = (ask.memory.mib_ceil(), ask.percent);
            return Err(NoMig::TooLarge { mib, percent, largest: largest.name.clone(), most });
        }
        let found = enough.iter().find_map(|profile| self.place(profile));
        found.ok_or_else(|| {
            let names: Vec<_> = enough.iter().map(|profile| profile.name.as_str()).collect();
            NoMig::NoRoom { profiles: names.join(", ") }
        })
    }

    /// The best free placement of a profile: the one after which most placements of the largest profile are free; where
    /// that is no difference, of the next largest, and so on; then the first.
    pub fn place(&self, profile: &'a MigProfile) -> Option<MigChoice<'a>> {
        let mut by_size: Vec<&'a MigProfile> = self.profiles.iter().collect();
        by_size.sort_by_key(|profile| std::cmp::Reverse(rank(profile)));
        let mut best: Option<(Vec<usize>, MigPlace)> = None;
        for place in self.free(profile) {
            let mut after = self.clone();
            after.add(place);
            let left = by_size.iter().map(|other| after.free(other).count()).collect();
            if best.as_ref().is_none_or(|(most, _)| left > *most) {
                best = Some((left, place));
            }
        }
        best.map(|(_, place)| MigChoice { profile, place })
    }

    /// The largest profile that can still be made.
    pub fn largest(&self) -> Option<&'a MigProfile> {
        self.profiles.iter().filter(|profile| self.free(profile).next().is_some()).max_by_key(|one| rank(one))
    }
}

/// Small to large: what an instance takes of the board's memory, then of its multiprocessors, then of its engines.
fn rank(profile: &MigProfile) -> (u32, u32, Units, u32) {
    let slices = profile.placements.first().map_or(0, |at| at.size);
    (slices, profile.slices, units(profile), profile.id)
}

#[cfg(test)]
#[path = "mig_tests.rs"]
mod tests;
