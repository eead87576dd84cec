//! Which MIG instance is made for an ask, and where on the board: the smallest profile that suffices, at the placement
//! that keeps the largest profiles possible as long as they can be.
//!
//! Everything here follows from what NVML says of the board ([`MigProfile`]): there is no table of products. A board has as
//! many compute slices and engines as the instances of one profile have together that have most of them.

use std::fmt;

use thiserror::Error;

use crate::model::gpu::Placement;
use crate::model::mig::{MigPlace, MigProfile};
use crate::model::quantity::Bytes;
use crate::params::Amount;

/// What is asked of one instance. At least one byte of memory is, or a part of the board's memory slices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MigAsk {
    pub amount: Amount,
    /// Of the board's compute slices, in percent; 0: no matter how many.
    pub percent: u32,
}

/// As it stands behind "a MIG device with".
impl fmt::Display for MigAsk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.amount {
            Amount::Memory(bytes) => write!(f, "{} MiB", bytes.mib_ceil())?,
            Amount::Fraction(fraction) => write!(f, "the fraction {fraction} of the GPU's memory")?,
        }
        if self.percent > 0 { write!(f, " and {} % of its multiprocessors", self.percent) } else { Ok(()) }
    }
}

/// A GPU instance that may be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MigChoice<'a> {
    pub profile: &'a MigProfile,
    pub place: MigPlace,
}

/// The same, with what it costs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Carving {
    pub place: MigPlace,
    /// Placements that are free no longer: of the largest profile in the highest digit, of the next in the next one.
    pub loss: u32,
}

/// Digits of a loss, and the bits and the most of one: boards have six sizes of profiles, of seven placements at most.
const DIGITS: u32 = 8;
const DIGIT_BITS: u32 = 3;
const DIGIT_MAX: usize = (1 << DIGIT_BITS) - 1;
/// Bits of a loss.
pub(super) const LOSS_BITS: u32 = DIGITS * DIGIT_BITS;
/// A memory slice in the units in which fractions of a board are compared.
const PARTS_OF_SLICE: u64 = 1_000_000;

/// Why no instance can be made.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum NoMig {
    #[error("no MIG profile of this GPU has {asked}; the largest is {largest} with {most} MiB")]
    TooLarge { asked: MigAsk, largest: String, most: u64 },
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
        self.units_suffice_beside(profile, None)
    }

    /// For one more instance of the profile, once one of another has been made.
    fn units_suffice_beside(&self, profile: &MigProfile, other: Option<&MigProfile>) -> bool {
        let made = || self.instances.iter().filter_map(|one| self.profile(one.profile_id)).chain(other);
        let same = made().filter(|one| one.id == profile.id).count();
        let taken = made().map(units).fold(units(profile), plus);
        let together = |one: &MigProfile| units(one).map(|count| count.saturating_mul(one.most));
        let most = |most: Units, one: Units| std::array::from_fn(|i| most[i].max(one[i]));
        let all = self.profiles.iter().map(together).fold(Units::default(), most);
        u32::try_from(same).is_ok_and(|same| same < profile.most)
            && taken.iter().zip(all).all(|(t, a)| *t <= a)
    }

    /// The instance to make for `ask`.
    ///
    /// # Errors
    /// No profile suffices, or those that do have no room.
    pub fn choose(&self, ask: MigAsk) -> Result<MigChoice<'a>, NoMig> {
        let enough = enough(self.profiles, ask);
        if enough.is_empty() {
            let largest = largest(self.profiles).ok_or(NoMig::NoProfiles)?;
            let most = largest.capacity.memory.mib_floor();
            return Err(NoMig::TooLarge { asked: ask, largest: largest.name.clone(), most });
        }
        let found = enough.iter().find_map(|at| self.place(&self.profiles[*at]));
        found.ok_or_else(|| {
            let names: Vec<_> = enough.iter().map(|at| self.profiles[*at].name.as_str()).collect();
            NoMig::NoRoom { profiles: names.join(", ") }
        })
    }

    /// The best free placement of a profile: the one after which most placements of the largest profile are free; where
    /// that is no difference, of the next largest, and so on; then the first.
    pub fn place(&self, profile: &'a MigProfile) -> Option<MigChoice<'a>> {
        let carving = self.carve(profile, &self.all_free())?;
        Some(MigChoice { profile, place: carving.place })
    }

    /// Of each profile, in their order, the instance that would be made next; none: none can be.
    pub(super) fn outlook(&self) -> Vec<Option<Carving>> {
        let free = self.all_free();
        self.profiles.iter().map(|profile| self.carve(profile, &free)).collect()
    }

    /// All profiles, the largest first, with their free placements.
    fn all_free(&self) -> Vec<(&'a MigProfile, Vec<Placement>)> {
        let of = |profile| (profile, self.free(profile).map(|at| at.placement).collect());
        let mut all: Vec<_> = self.profiles.iter().map(of).collect();
        all.sort_by_key(|(profile, _)| std::cmp::Reverse(rank(profile)));
        all
    }

    fn carve(&self, profile: &MigProfile, free: &[(&MigProfile, Vec<Placement>)]) -> Option<Carving> {
        let own = free.iter().find(|(one, _)| one.id == profile.id).map(|(_, own)| own)?;
        let still: Vec<bool> =
            free.iter().map(|(one, _)| self.units_suffice_beside(one, Some(profile))).collect();
        let left_after = |at: Placement| -> Vec<usize> {
            let of = |((_, free), still): (&(_, Vec<Placement>), &bool)| match still {
                true => free.iter().filter(|one| !one.overlaps(at)).count(),
                false => 0,
            };
            free.iter().zip(&still).map(of).collect()
        };
        let mut best: Option<(Vec<usize>, Placement)> = None;
        for at in own {
            let left = left_after(*at);
            if best.as_ref().is_none_or(|(most, _)| left > *most) {
                best = Some((left, *at));
            }
        }
        let (left, placement) = best?;
        let lost = free.iter().zip(&left).map(|((_, free), left)| free.len() - left);
        let digits = lost.chain(std::iter::repeat(0)).take(DIGITS as usize);
        // No digit is more than its bits hold.
        let loss = digits.fold(0, |sum, digit| sum << DIGIT_BITS | digit.min(DIGIT_MAX) as u32);
        Some(Carving { place: MigPlace { profile_id: profile.id, placement }, loss })
    }

    /// The largest profile that can still be made.
    pub fn largest(&self) -> Option<&'a MigProfile> {
        largest(self.profiles.iter().filter(|profile| self.free(profile).next().is_some()))
    }
}

/// Places in the list of those profiles that suffice, the smallest first. Profiles with a suffix (`+me`, `+gfx`, `-me`) are
/// for those who name them.
pub(super) fn enough(profiles: &[MigProfile], ask: MigAsk) -> Vec<usize> {
    let compute = profiles.iter().map(|profile| profile.slices).max().unwrap_or(0);
    let has_memory = |profile: &MigProfile| match ask.amount {
        Amount::Memory(bytes) => profile.capacity.memory >= bytes,
        Amount::Fraction(fraction) => {
            // NVML's figures of two halves do not add up to those of the whole; memory slices do.
            let all = Bytes::from_mib(u64::from(memory_slices(profiles)).saturating_mul(PARTS_OF_SLICE));
            size(profile).saturating_mul(PARTS_OF_SLICE) >= fraction.of(all).mib_floor()
        }
    };
    let suffices = |profile: &MigProfile| {
        let percent = u64::from(profile.slices) * 100;
        profile.is_plain() && has_memory(profile) && percent >= u64::from(ask.percent) * u64::from(compute)
    };
    let mut enough: Vec<usize> = (0..profiles.len()).filter(|at| suffices(&profiles[*at])).collect();
    enough.sort_by_key(|at| rank(&profiles[*at]));
    enough
}

/// The largest profile.
pub(super) fn largest<'a>(profiles: impl IntoIterator<Item = &'a MigProfile>) -> Option<&'a MigProfile> {
    profiles.into_iter().max_by_key(|profile| rank(profile))
}

/// Memory slices of the board.
pub fn memory_slices(profiles: &[MigProfile]) -> u32 {
    profiles.iter().flat_map(|profile| &profile.placements).map(|at| at.end()).max().unwrap_or(0)
}

/// Memory slices of an instance.
fn size(profile: &MigProfile) -> u64 {
    profile.placements.first().map_or(0, |at| at.size.into())
}

/// Small to large: what an instance takes of the board's memory, then of its multiprocessors, then of its engines.
fn rank(profile: &MigProfile) -> (u64, u32, Units, u32) {
    (size(profile), profile.slices, units(profile), profile.id)
}

#[cfg(test)]
#[path = "mig_tests.rs"]
mod tests;
