//! Shares: what an allocation gives a claim of a GPU, how firmly it holds, and whose daemon serves it.

use std::fmt;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::mig::MigPlace;
use super::names::{ClaimUid, DeviceUuid};
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
#[error("{0} is not a valid percentage; write 1 to 100")]
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

/// How a grant of our controller's has its GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum Extent {
    /// A share: others may have shares beside it, and MPS keeps its limits.
    #[default]
    Part,
    /// All of the GPU, for the claim alone and without MPS.
    Whole,
    /// A MIG device that is made at this place of the GPU for the claim alone.
    Mig(MigPlace),
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

/// How full the memory is that the programs of a GPU's shares find as /dev/shm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedMemory {
    pub used: Bytes,
    pub size: Bytes,
    /// Files and folders that there are and that there may be.
    pub files: u64,
    pub files_max: u64,
    /// Who has most of it; told only if it is full.
    #[serde(default)]
    pub most: Option<SharedMemoryUser>,
}

/// What files of one user take of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedMemoryUser {
    pub uid: u32,
    pub used: Bytes,
    pub files: u64,
}

impl SharedMemory {
    /// From 95 % of the bytes or files on: little is left for anybody else.
    pub fn is_full(&self) -> bool {
        self.is_beyond(95)
    }

    /// Below 80 % of both. Between the two it stays what it was, so that it does not turn all the time.
    pub fn is_roomy(&self) -> bool {
        !self.is_beyond(80)
    }

    fn is_beyond(&self, percent: u128) -> bool {
        let beyond = |used: u64, of: u64| of > 0 && u128::from(used) * 100 >= u128::from(of) * percent;
        beyond(self.used.0, self.size.0) || beyond(self.files, self.files_max)
    }
}

impl fmt::Display for SharedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { used, size, files, files_max, most } = self;
        write!(f, "{} of {} MiB and {files} of {files_max} files", used.mib_ceil(), size.mib_floor())?;
        match most {
            Some(SharedMemoryUser { uid, used, files }) => {
                write!(f, ", {} MiB and {files} files of user {uid}", used.mib_ceil())
            }
            None => Ok(()),
        }
    }
}

/// Below an MPS daemon's folder: what a client may see, and the memory that it shares with the server.
pub const CLIENT_FOLDER: &str = "client";
pub const SHM_FOLDER: &str = "shm";

/// The devices that one MPS control daemon serves, in the order in which it and its clients number them; and for
/// whom. One device, save for a claim on several: a process can only be the client of one daemon.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(from = "WrittenGroup", into = "WrittenGroup")]
pub struct MpsGroup {
    devices: Vec<DeviceUuid>,
    /// The only claim that it serves; none: all claims on these devices.
    claim: Option<ClaimUid>,
}

/// As records and requests have it: a list of devices, or an object where the daemon is one claim's own.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum WrittenGroup {
    OfDevices(Vec<DeviceUuid>),
    OfClaim { devices: Vec<DeviceUuid>, claim: ClaimUid },
}

impl From<WrittenGroup> for MpsGroup {
    fn from(written: WrittenGroup) -> Self {
        match written {
            WrittenGroup::OfDevices(devices) => Self { devices, claim: None },
            WrittenGroup::OfClaim { devices, claim } => Self { devices, claim: Some(claim) },
        }
    }
}

impl From<MpsGroup> for WrittenGroup {
    fn from(MpsGroup { devices, claim }: MpsGroup) -> Self {
        match claim {
            None => Self::OfDevices(devices),
            Some(claim) => Self::OfClaim { devices, claim },
        }
    }
}

/// Whom an MPS daemon serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum DaemonScope {
    /// All shares of its GPU. Their programs run at the same time, and fall together.
    #[default]
    Gpu,
    /// One claim. The GPU takes turns between claims, and what ends the programs of one leaves the others alone
    /// (E27 of tests/gpu).
    Share,
}

impl DaemonScope {
    /// As flags and attributes have it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Gpu => "gpu",
            Self::Share => "share",
        }
    }
}

impl MpsGroup {
    /// Sorted, each once: a claim's group does not depend on the order of its requests.
    pub fn new(devices: impl IntoIterator<Item = DeviceUuid>) -> Self {
        let mut devices: Vec<_> = devices.into_iter().collect();
        devices.sort();
        devices.dedup();
        Self { devices, claim: None }
    }

    /// The same devices, served for one claim alone.
    pub fn of_claim(self, claim: ClaimUid) -> Self {
        Self { claim: Some(claim), ..self }
    }

    /// The only claim that the daemon serves, if it is one claim's own.
    pub fn claim(&self) -> Option<&ClaimUid> {
        self.claim.as_ref()
    }

    pub fn scope(&self) -> DaemonScope {
        if self.claim.is_some() { DaemonScope::Share } else { DaemonScope::Gpu }
    }

    /// True if the two daemons cannot serve at the same time: they have a device in common, and not each is one
    /// claim's own.
    pub fn excludes(&self, other: &Self) -> bool {
        let in_common = || self.devices.iter().any(|device| other.devices.contains(device));
        self != other && !(self.claim.is_some() && other.claim.is_some()) && in_common()
    }

    pub fn devices(&self) -> &[DeviceUuid] {
        &self.devices
    }

    /// The number by which the daemon and its clients know a device.
    pub fn ordinal(&self, device: &DeviceUuid) -> Option<usize> {
        self.devices.iter().position(|other| other == device)
    }

    /// True if a folder of this name is that of a claim's own daemon.
    pub fn is_folder_of_claim(name: &str) -> bool {
        name.starts_with(CLAIM_FOLDER)
    }

    /// Name of the daemon's folder: the device's UUID, or a hash (FNV-1a, 64 bits) of several, or of a claim's: a
    /// socket's path has 107 bytes at most.
    pub fn folder(&self) -> String {
        let names = self.devices.iter().flat_map(|device| device.as_str().bytes().chain([b',']));
        match (&self.claim, self.devices.as_slice()) {
            (Some(claim), _) => {
                format!("{CLAIM_FOLDER}{:016x}", super::fnv1a(names.chain(claim.as_str().bytes())))
            }
            (None, [one]) => one.to_string(),
            (None, _) => format!("group-{:016x}", super::fnv1a(names)),
        }
    }
}

/// How names of folders begin whose daemon is one claim's own; no device's UUID does.
const CLAIM_FOLDER: &str = "claim-";

impl fmt::Display for MpsGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.devices.iter().map(DeviceUuid::as_str).collect();
        f.write_str(&names.join("+"))?;
        match &self.claim {
            Some(claim) => write!(f, " for claim {claim}"),
            None => Ok(()),
        }
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
    fn a_claims_own_daemon_stands_beside_those_of_other_claims_alone() {
        let of = |devices: &[&str]| MpsGroup::new(devices.iter().map(|name| DeviceUuid::new(*name)));
        let (one, two) = (of(&["GPU-1"]).of_claim("a".into()), of(&["GPU-1", "GPU-2"]).of_claim("b".into()));
        assert!(!one.excludes(&two) && !two.excludes(&one) && !one.excludes(&one));
        assert!(one.excludes(&of(&["GPU-1"])) && of(&["GPU-1"]).excludes(&one));
        assert!(of(&["GPU-1", "GPU-2"]).excludes(&of(&["GPU-1"])));
        assert!(!of(&["GPU-1"]).excludes(&of(&["GPU-1"])) && !of(&["GPU-1"]).excludes(&of(&["GPU-2"])));
        let folders = [&one, &two, &of(&["GPU-1"]).of_claim("c".into())].map(MpsGroup::folder);
        assert!(folders[0] != folders[1] && folders[0] != folders[2], "{folders:?}");
        assert!(folders.iter().all(|folder| folder.len() <= 40), "{folders:?}");
    }

    #[test]
    fn groups_are_written_as_earlier_versions_read_them_where_they_can_be() {
        let old = MpsGroup::new(["GPU-1".into()]);
        assert_eq!(serde_json::to_string(&old).unwrap(), r#"["GPU-1"]"#);
        let own = old.clone().of_claim("uid-1".into());
        let written = serde_json::to_string(&own).unwrap();
        assert_eq!(written, r#"{"devices":["GPU-1"],"claim":"uid-1"}"#);
        for group in [old, own] {
            let again = serde_json::from_str(&serde_json::to_string(&group).unwrap());
            assert_eq!(again.ok(), Some(group));
        }
    }

    #[test]
    fn memory_is_full_by_bytes_or_by_files_and_says_whose_it_is() {
        let usage = |used, files| SharedMemory {
            used: Bytes::from_mib(used),
            size: Bytes::from_mib(100),
            files,
            files_max: 1000,
            most: None,
        };
        for (used, files, is_full, is_roomy) in [
            (0, 2, false, true),
            (79, 799, false, true),
            (80, 2, false, false),
            (95, 2, true, false),
            (0, 950, true, false),
        ] {
            let usage = usage(used, files);
            assert_eq!((usage.is_full(), usage.is_roomy()), (is_full, is_roomy), "{usage}");
        }
        let most = Some(SharedMemoryUser { uid: 1000, used: Bytes::from_mib(90), files: 7 });
        let told = SharedMemory { most, ..usage(96, 12) }.to_string();
        assert_eq!(told, "96 of 100 MiB and 12 of 1000 files, 90 MiB and 7 files of user 1000");
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
