//! Shares: what an allocation gives a claim of a GPU, how firmly it holds, and whose daemon serves it.

use std::fmt;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::names::DeviceUuid;
use super::quantity::Bytes;

/// The rung of enforcement in force, weakest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Isolation {
    /// Accounting and watchdog.
    None,
    /// MPS limits each process; the watchdog bounds the claim.
    Mps,
    /// The driver limits the container's control group.
    Kernel,
    /// The hardware divides the board.
    Mig,
}

impl Isolation {
    pub const ALL: [Self; 4] = [Self::None, Self::Mps, Self::Kernel, Self::Mig];

    /// As attributes, claims and events have it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Mps => "mps",
            Self::Kernel => "kernel",
            Self::Mig => "mig",
        }
    }
}

impl fmt::Display for Isolation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A part of a GPU's multiprocessors: 1 to 100.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "u8", into = "u8")]
pub struct Percent(u8);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("{0} is no percentage; it is 1 to 100")]
pub struct NoPercent(pub u64);

impl Percent {
    pub fn get(self) -> u8 {
        self.0
    }
}

impl TryFrom<u8> for Percent {
    type Error = NoPercent;
    fn try_from(value: u8) -> Result<Self, NoPercent> {
        match value {
            1..=100 => Ok(Self(value)),
            _ => Err(NoPercent(value.into())),
        }
    }
}

impl TryFrom<u64> for Percent {
    type Error = NoPercent;
    fn try_from(value: u64) -> Result<Self, NoPercent> {
        u8::try_from(value).map_err(|_| NoPercent(value)).and_then(Self::try_from)
    }
}

impl From<Percent> for u8 {
    fn from(percent: Percent) -> Self {
        percent.0
    }
}

impl fmt::Display for Percent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} %", self.0)
    }
}

/// What an allocation gives a claim of one GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grant {
    /// For all processes of the claim together, in whole MiB.
    pub memory: Bytes,
    /// Of the multiprocessors, for each process; none: not capped.
    pub compute: Option<Percent>,
    /// Blocks of client slots of the GPU's MPS server.
    pub slots: u32,
    /// How many processes the claim's author declared; each gets an equal part of the memory.
    pub processes: u32,
    pub isolation: Isolation,
}

impl Grant {
    /// What one process may take: whole MiB, rounded down.
    pub fn memory_per_process(&self) -> Bytes {
        Bytes::from_mib(self.memory.mib_floor() / u64::from(self.processes.max(1)))
    }
}

/// Below an MPS daemon's folder: what a client may see, and the memory that it shares with the server.
pub const CLIENT_FOLDER: &str = "client";
pub const SHM_FOLDER: &str = "shm";

/// The devices that one MPS control daemon serves, in the order in which it and its clients number them.
/// One device, save for a claim on several: a process can only be the client of one daemon.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct MpsGroup(Vec<DeviceUuid>);

impl MpsGroup {
    /// Sorted, each once: a claim's group does not depend on the order of its requests.
    pub fn new(devices: impl IntoIterator<Item = DeviceUuid>) -> Self {
        let mut devices: Vec<_> = devices.into_iter().collect();
        devices.sort();
        devices.dedup();
        Self(devices)
    }

    pub fn devices(&self) -> &[DeviceUuid] {
        &self.0
    }

    /// The number by which the daemon and its clients know a device.
    pub fn ordinal(&self, device: &DeviceUuid) -> Option<usize> {
        self.0.iter().position(|other| other == device)
    }

    /// Name of the daemon's folder: the device's UUID, or a hash of several (FNV-1a, 64 bits): a socket's
    /// path has 107 bytes at most.
    pub fn folder(&self) -> String {
        match self.0.as_slice() {
            [one] => one.to_string(),
            several => {
                let bytes = several.iter().flat_map(|device| device.as_str().bytes().chain([b',']));
                let hash = bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
                    (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
                });
                format!("group-{hash:016x}")
            }
        }
    }
}

impl fmt::Display for MpsGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.0.iter().map(DeviceUuid::as_str).collect();
        f.write_str(&names.join("+"))
    }
}

/// Limits that an MPS daemon gives every client process, as a claim needs them or a daemon has them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MpsLimits {
    /// Per device, in the group's order; none: not limited.
    pub memory: Vec<Option<Bytes>>,
    /// Active thread percentage; none: not limited. MPS has one for all devices of a process.
    pub compute: Option<Percent>,
}

impl MpsLimits {
    /// True if a client that needs `other` finds all of it under these.
    pub fn allow(&self, other: &Self) -> bool {
        let at_least = |mine: Option<Bytes>, theirs: Option<Bytes>| match (mine, theirs) {
            (None, _) => true,
            (Some(_), None) => false,
            (Some(mine), Some(theirs)) => mine >= theirs,
        };
        self.memory.len() == other.memory.len()
            && self.memory.iter().zip(&other.memory).all(|(mine, theirs)| at_least(*mine, *theirs))
            && (self.compute.is_none() || other.compute.is_some_and(|theirs| self.compute >= Some(theirs)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_percentage_is_1_to_100() {
        assert_eq!(Percent::try_from(25_u64).map(Percent::get), Ok(25));
        for bad in [0_u64, 101, 1 << 40] {
            assert_eq!(Percent::try_from(bad), Err(NoPercent(bad)));
        }
        assert!(serde_json::from_str::<Percent>("0").is_err());
    }

    #[test]
    fn processes_divide_the_memory_downwards() {
        let grant = |processes| Grant {
            memory: Bytes::from_mib(1000),
            compute: None,
            slots: 1,
            processes,
            isolation: Isolation::Mps,
        };
        assert_eq!(grant(1).memory_per_process(), Bytes::from_mib(1000));
        assert_eq!(grant(3).memory_per_process(), Bytes::from_mib(333));
    }

    #[test]
    fn a_group_is_the_same_in_any_order_and_its_folder_short() {
        let group = |names: &[&str]| MpsGroup::new(names.iter().map(|name| DeviceUuid::new(*name)));
        assert_eq!(group(&["b", "a", "b"]), group(&["a", "b"]));
        assert_eq!(group(&["GPU-1"]).folder(), "GPU-1");
        assert_ne!(group(&["a", "b"]).folder(), group(&["ab"]).folder());
        assert_ne!(group(&["a", "b"]).folder(), group(&["a", "c"]).folder());
        assert!(group(&["a", "b"]).folder().len() <= 40);
        assert_eq!(group(&["b", "a"]).ordinal(&"b".into()), Some(1));
    }

    #[test]
    fn limits_allow_what_they_are_not_tighter_than() {
        let limits = |memory: Option<u64>, compute: Option<u8>| MpsLimits {
            memory: vec![memory.map(Bytes::from_mib)],
            compute: compute.map(|percent| Percent::try_from(percent).unwrap()),
        };
        assert!(limits(Some(10), Some(50)).allow(&limits(Some(10), Some(25))));
        assert!(limits(None, None).allow(&limits(Some(10), None)));
        assert!(!limits(Some(9), None).allow(&limits(Some(10), None)));
        assert!(!limits(Some(9), None).allow(&limits(None, None)));
        assert!(!limits(None, Some(50)).allow(&limits(None, None)));
        assert!(!limits(None, Some(50)).allow(&limits(None, Some(51))));
    }
}
