//! MIG as a small model: which instances sit on which slices of one board.
//!
//! A board has memory slices, which are numbered, and compute slices and media
//! engines, which are counted. A GPU instance takes a run of memory slices (its
//! placement); a compute instance takes a run of the compute slices of its GPU
//! instance. Media engines are those of the profile that takes the whole board.

use serde::{Deserialize, Serialize};

use crate::board::{Board, InstanceIds, MigProfile};
use crate::code::{Answer, Code};
use crate::control::MigControl;

#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct Mig {
    pub enabled: bool,
    pub pending: bool,
    pub instances: Vec<Instance>,
}

#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Instance {
    pub id: u32,
    /// Id of the profile.
    pub profile: u32,
    pub start: u32,
    pub compute: Vec<Compute>,
}

#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Compute {
    pub id: u32,
    pub slices: u32,
    pub start: u32,
}

/// One way to cut a GPU instance into compute instances.
#[derive(Clone, Copy, Debug)]
pub struct ComputeProfile {
    /// `NVML_COMPUTE_INSTANCE_PROFILE_*`, which is also the id.
    pub kind: u32,
    pub slices: u32,
    pub instances: u32,
    pub multiprocessors: u32,
}

/// The profile that is asked for by index.
pub fn by_kind(board: &Board, kind: u32) -> Option<&MigProfile> {
    board.mig.iter().find(|p| p.kind == kind)
}

/// The profile that is named by id.
pub fn by_id(board: &Board, id: u32) -> Option<&MigProfile> {
    board.mig.iter().find(|p| p.id == id)
}

fn by_name<'b>(board: &'b Board, name: &str) -> Option<&'b MigProfile> {
    board.mig.iter().find(|p| p.name == name.trim_start_matches("MIG "))
}

/// The number a board gives to an instance at a place.
fn instance_id(board: &Board, start: u32, size: u32) -> u32 {
    let all = board.slices.memory;
    let at = match board.instance_ids {
        InstanceIds::TreeSwapped if size < all => start ^ (all / 2),
        _ => start,
    };
    (all / size.max(1)).saturating_sub(1) + at / size.max(1)
}

/// Media engines of a board: those of the profile that takes all of it.
fn all_engines(board: &Board) -> [u32; 4] {
    board.mig.iter().find(|p| p.size == board.slices.memory).map_or([0; 4], MigProfile::engines)
}

/// Compute profiles of a GPU instance profile.
pub fn compute_profiles(board: &Board, profile: &MigProfile) -> Vec<ComputeProfile> {
    let per_slice = board.mig.first().map_or(0, |p| p.multiprocessors);
    let sizes: &[u32] = match profile.slices {
        1 => &[1],
        2 => &[1, 2],
        3 => &[1, 2, 3],
        4 => &[1, 2, 4],
        _ => &[1, 2, 3, 4, 7],
    };
    sizes
        .iter()
        .map(|&slices| ComputeProfile {
            kind: if slices == 7 { 4 } else { slices - 1 },
            slices,
            instances: profile.slices / slices,
            multiprocessors: if slices == profile.slices {
                profile.multiprocessors
            } else {
                per_slice * slices
            },
        })
        .collect()
}

/// First slices where a compute profile can sit.
pub fn compute_starts(profile: &MigProfile, slices: u32) -> Vec<u32> {
    let step = match slices {
        1 => 1,
        2 => 2,
        _ => 4,
    };
    (0..profile.slices).step_by(step).filter(|s| s + slices <= profile.slices).collect()
}

impl Mig {
    /// What the control file asks for. Instances that do not fit are left out, with words.
    pub fn from_control(board: &Board, wanted: &MigControl) -> (Mig, Vec<String>) {
        let mut words = Vec::new();
        if !board.mig_capable() {
            words.push(format!("{} has no MIG", board.key));
            return (Mig::default(), words);
        }
        let mut mig = Mig { enabled: wanted.enabled, pending: wanted.enabled, instances: Vec::new() };
        for want in &wanted.instances {
            let Some(profile) = by_name(board, &want.profile) else {
                words.push(format!("{} has no MIG profile {}", board.key, want.profile));
                continue;
            };
            let Ok(id) = mig.create(board, profile.id, want.placement) else {
                words.push(format!("{} does not fit at {:?}", want.profile, want.placement));
                continue;
            };
            let whole = [profile.slices];
            for slices in want.compute.as_deref().unwrap_or(&whole) {
                if mig.create_compute(board, id, *slices, None).is_err() {
                    words.push(format!("{slices}c does not fit into {}", want.profile));
                }
            }
        }
        (mig, words)
    }

    pub fn instance(&self, id: u32) -> Option<&Instance> {
        self.instances.iter().find(|i| i.id == id)
    }

    pub fn compute(&self, gi: u32, ci: u32) -> Option<(&Instance, &Compute)> {
        let instance = self.instance(gi)?;
        Some((instance, instance.compute.iter().find(|c| c.id == ci)?))
    }

    /// MIG devices in the order of their index: by GPU instance, then compute instance.
    pub fn devices(&self) -> Vec<(u32, u32)> {
        let mut all: Vec<_> =
            self.instances.iter().flat_map(|i| i.compute.iter().map(move |c| (i.id, c.id))).collect();
        all.sort_unstable();
        all
    }

    /// Starts where one more instance of the profile fits now.
    fn free_starts(&self, board: &Board, profile: &MigProfile) -> Vec<u32> {
        let mut taken = vec![false; board.slices.memory as usize];
        let mut slices = profile.slices;
        let mut engines = profile.engines();
        let mut same = 0;
        for instance in &self.instances {
            let Some(p) = by_id(board, instance.profile) else { continue };
            slices += p.slices;
            same += u32::from(p.id == profile.id);
            for (sum, one) in engines.iter_mut().zip(p.engines()) {
                *sum += one;
            }
            for slot in taken.iter_mut().skip(instance.start as usize).take(p.size as usize) {
                *slot = true;
            }
        }
        let engines_fit = engines.iter().zip(all_engines(board)).all(|(sum, all)| *sum <= all);
        if slices > board.slices.compute || same >= profile.instances || !engines_fit {
            return Vec::new();
        }
        let mut free: Vec<u32> = profile
            .starts
            .iter()
            .copied()
            .filter(|&s| taken.iter().skip(s as usize).take(profile.size as usize).all(|t| !t))
            .collect();
        free.sort_by_key(|&s| instance_id(board, s, profile.size));
        free
    }

    /// How many more instances of the profile fit.
    pub fn remaining(&self, board: &Board, profile: &MigProfile) -> u32 {
        let mut trial = self.clone();
        let mut count = 0;
        while trial.create(board, profile.id, None).is_ok() {
            count += 1;
        }
        count
    }

    /// Makes a GPU instance and tells its id.
    pub fn create(&mut self, board: &Board, profile: u32, start: Option<u32>) -> Answer<u32> {
        let profile = by_id(board, profile).ok_or(Code::NOT_SUPPORTED)?;
        if let Some(start) = start
            && !profile.starts.contains(&start)
        {
            return Err(Code::INVALID_ARGUMENT);
        }
        let free = self.free_starts(board, profile);
        let start = match start {
            Some(wanted) => free.contains(&wanted).then_some(wanted),
            None => free.first().copied(),
        }
        .ok_or(Code::INSUFFICIENT_RESOURCES)?;
        let id = instance_id(board, start, profile.size);
        self.instances.push(Instance { id, profile: profile.id, start, compute: Vec::new() });
        self.instances.sort_by_key(|i| i.id);
        Ok(id)
    }

    /// Sets the mode that is wanted. It is in force at once where the board and those who use it allow; else the
    /// answer says what it waits for, as `nvmlDeviceSetMigMode` tells it by its activation status.
    pub fn set_mode(&mut self, board: &Board, wanted: bool, busy: bool) -> Answer {
        self.pending = wanted;
        if self.enabled == wanted {
            return Ok(());
        }
        if busy || !self.instances.is_empty() {
            return Err(Code::IN_USE);
        }
        if board.mig_wants_reset {
            return Err(Code::RESET_REQUIRED);
        }
        self.enabled = wanted;
        Ok(())
    }

    /// A reset of the board: instances are gone, and the mode is the one that was pending.
    pub fn reset(&mut self) {
        self.instances.clear();
        self.enabled = self.pending;
    }

    /// Ends a GPU instance; not while it has compute instances.
    pub fn destroy(&mut self, id: u32) -> Answer {
        let at = self.instances.iter().position(|i| i.id == id).ok_or(Code::NOT_FOUND)?;
        if self.instances.get(at).is_some_and(|i| !i.compute.is_empty()) {
            return Err(Code::IN_USE);
        }
        self.instances.remove(at);
        Ok(())
    }

    /// Starts where one more compute instance of `slices` fits into a GPU instance now.
    pub fn free_compute_starts(&self, board: &Board, gi: u32, slices: u32) -> Answer<Vec<u32>> {
        let instance = self.instance(gi).ok_or(Code::NOT_FOUND)?;
        let profile = by_id(board, instance.profile).ok_or(Code::NOT_FOUND)?;
        if !compute_profiles(board, profile).iter().any(|p| p.slices == slices) {
            return Err(Code::NOT_SUPPORTED);
        }
        let mut starts = compute_starts(profile, slices);
        starts.retain(|&s| instance.compute.iter().all(|c| s + slices <= c.start || c.start + c.slices <= s));
        Ok(starts)
    }

    /// How many more compute instances of `slices` fit.
    pub fn remaining_compute(&self, board: &Board, gi: u32, slices: u32) -> Answer<u32> {
        let mut trial = self.clone();
        let mut count = 0;
        loop {
            match trial.create_compute(board, gi, slices, None) {
                Ok(_) => count += 1,
                Err(Code::INSUFFICIENT_RESOURCES) => return Ok(count),
                Err(other) => return Err(other),
            }
        }
    }

    /// Makes a compute instance and tells its id.
    pub fn create_compute(&mut self, board: &Board, gi: u32, slices: u32, start: Option<u32>) -> Answer<u32> {
        let free = self.free_compute_starts(board, gi, slices)?;
        let start = match start {
            Some(wanted) => free.contains(&wanted).then_some(wanted),
            None => free.first().copied(),
        }
        .ok_or(Code::INSUFFICIENT_RESOURCES)?;
        let instance = self.instances.iter_mut().find(|i| i.id == gi).ok_or(Code::NOT_FOUND)?;
        let id = (0..8)
            .find(|id| instance.compute.iter().all(|c| c.id != *id))
            .ok_or(Code::INSUFFICIENT_RESOURCES)?;
        instance.compute.push(Compute { id, slices, start });
        instance.compute.sort_by_key(|c| c.id);
        Ok(id)
    }

    pub fn destroy_compute(&mut self, gi: u32, ci: u32) -> Answer {
        let instance = self.instances.iter_mut().find(|i| i.id == gi).ok_or(Code::NOT_FOUND)?;
        let before = instance.compute.len();
        instance.compute.retain(|c| c.id != ci);
        if instance.compute.len() == before { Err(Code::NOT_FOUND) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::board;

    fn fill(key: &str, names: &[&str]) -> (Mig, Vec<String>) {
        let board = board::find(key).expect("a board");
        let instances = names
            .iter()
            .map(|n| crate::control::InstanceControl {
                profile: (*n).to_owned(),
                placement: None,
                compute: None,
            })
            .collect();
        Mig::from_control(board, &MigControl { enabled: true, instances })
    }

    #[test]
    fn seven_small_ones_fit_and_an_eighth_does_not() {
        let (mig, words) = fill("h100", &["1g.10gb"; 8]);
        assert_eq!(mig.instances.iter().map(|i| i.id).collect::<Vec<_>>(), [7, 8, 9, 10, 11, 12, 13]);
        assert_eq!(words.len(), 1);
    }

    #[test]
    fn ampere_counts_the_right_half_first() {
        let (mig, _) = fill("a100-80gb", &["1g.10gb"; 7]);
        assert_eq!(mig.instances.iter().map(|i| i.id).collect::<Vec<_>>(), [7, 8, 9, 11, 12, 13, 14]);
        let (mig, _) = fill("a100-80gb", &["2g.20gb"; 3]);
        assert_eq!(
            mig.instances.iter().map(|i| (i.id, i.start)).collect::<Vec<_>>(),
            [(3, 4), (5, 0), (6, 2)]
        );
    }

    #[test]
    fn compute_slices_bound_what_memory_would_allow() {
        let board = board::find("h100").expect("a board");
        let (mig, words) = fill("h100", &["4g.40gb", "3g.40gb"]);
        assert!(words.is_empty());
        assert_eq!(mig.remaining(board, by_id(board, 19).expect("1g")), 0);
        let (mig, _) = fill("h100", &["3g.40gb"]);
        assert_eq!(mig.remaining(board, by_id(board, 19).expect("1g")), 3);
        assert_eq!(mig.remaining(board, by_id(board, 15).expect("1g double")), 2);
    }

    #[test]
    fn capacity_of_an_empty_board_is_what_the_profile_says() {
        for board in board::BOARDS {
            for profile in board.mig {
                assert_eq!(
                    Mig::default().remaining(board, profile),
                    profile.instances,
                    "{} {}",
                    board.key,
                    profile.name
                );
            }
        }
    }

    #[test]
    fn media_engines_bound_what_slices_would_allow() {
        let board = board::find("rtx-pro-6000").expect("a board");
        let (mig, words) = fill("rtx-pro-6000", &["1g.24gb+me.all"]);
        assert!(words.is_empty(), "{words:?}");
        let left = |name| mig.remaining(board, by_name(board, name).expect("a profile"));
        assert_eq!((left("1g.24gb"), left("1g.24gb-me"), left("2g.48gb-me")), (0, 3, 1));
    }

    #[test]
    fn ampere_waits_for_a_reset_and_hopper_does_not() {
        let (mut mig, _) = fill("h100", &["1g.10gb"]);
        let hopper = board::find("h100").expect("a board");
        assert_eq!(mig.set_mode(hopper, false, false), Err(Code::IN_USE), "an instance");
        let mut off = Mig::default();
        assert_eq!(off.set_mode(hopper, true, true), Err(Code::IN_USE), "a process");
        assert_eq!(off.set_mode(hopper, true, false), Ok(()));
        assert!(off.enabled);
        let mut ampere = Mig::default();
        let board = board::find("a30").expect("a board");
        assert_eq!(ampere.set_mode(board, true, false), Err(Code::RESET_REQUIRED));
        assert!(!ampere.enabled && ampere.pending);
        assert_eq!(ampere.create(board, 14, None).err(), None, "the mode is the caller's to check");
        ampere.reset();
        assert!(ampere.enabled && ampere.instances.is_empty());
    }

    #[test]
    fn a_gpu_instance_in_use_stays() {
        let (mut mig, _) = fill("h100", &["3g.40gb"]);
        let id = mig.instances[0].id;
        assert_eq!(mig.destroy(id), Err(Code::IN_USE));
        mig.destroy_compute(id, 0).expect("there is one");
        mig.destroy(id).expect("now free");
    }
}
