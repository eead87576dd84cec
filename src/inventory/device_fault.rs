//! The faults of this node's GPUs, computed from Xids, looks at the GPUs and the states of MPS daemons.
//!
//! * An Xid is remembered until its GPU was certainly reset: by another boot, or by loading the driver again. NVML
//!   reports an Xid once, and a GPU that must be reset looks healthy otherwise. An administrator who resets a single
//!   GPU clears its Xids by hand ([`DeviceFaults::without_xids`]).
//! * That a device is withheld is remembered as well: the next process has to look before it knows.
//! * A GPU that cannot be read or is lost, an MPS daemon that does not serve, and a full /dev/shm are faults for as
//!   long as the condition lasts. NVML may never report Xid 79: once a GPU has left the bus, NVML's wait for events
//!   fails instead.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::Inventory;
use super::xid::{XidClass, xid};
use crate::model::gpu::{Device, Gpu, Health, Placement};
use crate::model::names::{BootId, DeviceUuid};
use crate::model::share::{MpsGroup, SharedMemory};

/// The most Xids that are remembered for one GPU; further ones add nothing.
const XIDS_PER_BOARD: usize = 16;

/// Something that is wrong with a board or a part of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceFault {
    #[serde(rename = "place")]
    pub location: FaultLocation,
    pub kind: FaultKind,
    /// When it was first seen: seconds since 1970.
    pub since: u64,
    /// What is wrong, for people.
    pub words: String,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum FaultLocation {
    Board(DeviceUuid),
    /// A GPU instance of a board in MIG mode: the MIG devices in it.
    Instance(DeviceUuid, u32),
    /// One device, whole or MIG.
    Device(DeviceUuid),
    /// Memory slices of a board that is carved for claims: what is, or may be, made of them, and the board itself.
    Slices(DeviceUuid, Placement),
    /// The same without the board itself: something is there, and beside it the board can be used.
    Taken(DeviceUuid, Placement),
}

impl FaultLocation {
    fn holds(&self, device: &Device<'_>) -> bool {
        match (self, device) {
            (Self::Board(gpu), _) => *gpu == device.gpu().uuid,
            (Self::Device(uuid), _) => uuid == device.uuid(),
            // MIG was turned off since: the fault is somewhere on the board.
            (Self::Slices(gpu, _), Device::Whole(board) | Device::Parent(board)) => *gpu == board.uuid,
            // Beside it the board can be cut, and cannot be given whole.
            (Self::Taken(gpu, _), Device::Whole(board)) => *gpu == board.uuid && board.is_whole_or_cut(),
            (Self::Taken(..), Device::Parent(_)) => false,
            (Self::Slices(gpu, at) | Self::Taken(gpu, at), Device::Mig { parent, mig }) => {
                *gpu == parent.uuid && at.overlaps(mig.placement)
            }
            (Self::Slices(gpu, at) | Self::Taken(gpu, at), Device::Place { parent, place }) => {
                *gpu == parent.uuid && at.overlaps(place.place.placement)
            }
            // MIG was turned off since: the fault is somewhere on the board.
            (Self::Instance(gpu, _), Device::Whole(whole)) => *gpu == whole.uuid,
            (Self::Instance(gpu, instance), Device::Mig { parent, mig }) => {
                *gpu == parent.uuid && *instance == mig.gpu_instance
            }
            // Which instance will be made there, if any, is not known.
            (Self::Instance(..), Device::Place { .. } | Device::Parent(_)) => false,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum FaultKind {
    Xid(u64),
    /// NVML says that the board has left the bus, whether or not its Xid was told.
    Lost,
    /// NVML cannot read the board, or does not list it any more.
    Unreachable,
    /// The MPS daemon of the claims on the device does not serve, or none of their daemons does.
    MpsDaemonDown,
    /// The /dev/shm that claims on the device share is full.
    ShmFull,
    /// The device works, but processes use it without an allocation.
    Withheld,
    /// The last try to make the MIG device failed, not long ago.
    NotMade,
    /// A MIG device that was made here for a claim could not be ended after the claim, and is there still.
    NotEnded,
}

/// What a fault means for pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum FaultEffect {
    /// The fault is reported only; the device stays in use.
    ReportOnly,
    /// No new pods.
    NoNewPods,
    /// No new pods, and the pods that use the device should leave it.
    NoPods,
}

impl FaultEffect {
    /// The name in the state document and the log.
    pub fn as_str(self) -> &'static str {
        match self {
            // The name that earlier versions show.
            Self::ReportOnly => "Told",
            Self::NoNewPods => "NoNewPods",
            Self::NoPods => "NoPods",
        }
    }
}

impl FaultKind {
    pub const WORDS: [&'static str; 9] = [
        "worn",
        "xid",
        "gpu-lost",
        "unreachable",
        "mps-daemon-down",
        "shm-full",
        "withheld",
        "mig-not-made",
        "mig-not-ended",
    ];

    /// A short word for taints and metrics; one of [`Self::WORDS`].
    pub fn word(self) -> &'static str {
        match self {
            Self::Xid(code) => match xid(code).0 {
                XidClass::Harmless | XidClass::Degraded => "worn",
                XidClass::Broken => "xid",
                XidClass::Lost => "gpu-lost",
            },
            Self::Lost => "gpu-lost",
            Self::Unreachable => "unreachable",
            Self::MpsDaemonDown => "mps-daemon-down",
            Self::ShmFull => "shm-full",
            Self::Withheld => "withheld",
            Self::NotMade => "mig-not-made",
            Self::NotEnded => "mig-not-ended",
        }
    }

    /// True if the device does not work as it should.
    pub fn is_malfunction(self) -> bool {
        !matches!(self, Self::Withheld | Self::NotMade | Self::NotEnded)
    }

    fn is_persistent(self) -> bool {
        matches!(self, Self::Xid(_) | Self::Withheld)
    }

    pub fn effect(self) -> FaultEffect {
        match self {
            Self::Xid(code) => match xid(code).0 {
                XidClass::Harmless | XidClass::Degraded => FaultEffect::ReportOnly,
                XidClass::Broken => FaultEffect::NoNewPods,
                XidClass::Lost => FaultEffect::NoPods,
            },
            Self::Lost => FaultEffect::NoPods,
            Self::Unreachable
            | Self::MpsDaemonDown
            | Self::ShmFull
            | Self::Withheld
            | Self::NotMade
            | Self::NotEnded => FaultEffect::NoNewPods,
        }
    }
}

/// An Xid as NVML tells of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Xid {
    pub gpu: DeviceUuid,
    pub code: u64,
    /// Of a board in MIG mode, where the driver tells.
    pub gpu_instance: Option<u32>,
}

/// A device of which no claim has an MPS daemon that serves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DaemonsDown {
    pub device: DeviceUuid,
    pub reason: String,
}

/// The /dev/shm that a daemon's claims share is full.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShmFull {
    pub group: MpsGroup,
    /// How full, and whose it is.
    pub usage: SharedMemory,
}

/// The boot and the load of the driver in which Xids were seen. A new one proves that every GPU was reset.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DriverSession {
    pub boot: BootId,
    /// A number of the kernel module's load; none where it cannot be told.
    pub driver: Option<u64>,
}

impl DriverSession {
    /// True if what was remembered of `earlier` still holds.
    fn continues(&self, earlier: &Self) -> bool {
        let same_driver = match (self.driver, earlier.driver) {
            (Some(now), Some(then)) => now == then,
            // Not loaded, or not to be told: no proof of a reset.
            _ => true,
        };
        self.boot == earlier.boot && same_driver
    }
}

/// All faults of this node's GPUs. Each location has each kind at most once.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DeviceFaults(BTreeMap<(FaultLocation, FaultKind), DeviceFault>);

impl DeviceFaults {
    pub fn iter(&self) -> impl Iterator<Item = &DeviceFault> {
        self.0.values()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The faults that concern a device, the worst first.
    pub fn of(&self, device: &Device<'_>) -> Vec<&DeviceFault> {
        let mut found: Vec<_> = self.iter().filter(|fault| fault.location.holds(device)).collect();
        found.sort_by_key(|fault| std::cmp::Reverse(fault.kind.effect()));
        found
    }

    /// The inventory, with each GPU marked unhealthy that new pods must not use, and the faults of the whole GPU as the
    /// reason.
    pub fn applied_to(&self, inventory: &Inventory) -> Inventory {
        let Inventory::Found(gpus) = inventory else { return inventory.clone() };
        let mut gpus = gpus.clone();
        for gpu in gpus.gpus.iter_mut().filter(|gpu| gpu.health.problem().is_none()) {
            let location = FaultLocation::Board(gpu.uuid.clone());
            let ills = self
                .iter()
                .filter(|one| one.location == location && one.kind.effect() > FaultEffect::ReportOnly);
            let words: Vec<&str> = ills.map(|fault| fault.words.as_str()).collect();
            if !words.is_empty() {
                gpu.health = Health::Unhealthy(words.join("; "));
            }
        }
        Inventory::Found(gpus)
    }

    /// The faults that must outlast this process. Why a device is withheld the next one finds out for itself: the words
    /// change with each process that comes or ends, and are left out.
    pub fn persistent(&self) -> Vec<DeviceFault> {
        let persistent = self.iter().filter(|fault| fault.kind.is_persistent()).cloned();
        let without_words = |fault: DeviceFault| match fault.kind {
            FaultKind::Withheld => DeviceFault { words: String::new(), ..fault },
            _ => fault,
        };
        persistent.map(without_words).collect()
    }

    /// What is withheld.
    pub fn withheld(&self) -> BTreeSet<FaultLocation> {
        let withheld = self.iter().filter(|fault| fault.kind == FaultKind::Withheld);
        withheld.map(|fault| fault.location.clone()).collect()
    }

    pub fn has_xids(&self) -> bool {
        self.iter().any(|fault| matches!(fault.kind, FaultKind::Xid(_)))
    }

    /// The faults that were stored in the session `earlier`, if `now` is still the same session.
    pub fn restored(remembered: Vec<DeviceFault>, earlier: &DriverSession, now: &DriverSession) -> Self {
        let persistent = remembered.into_iter().filter(|fault| fault.kind.is_persistent());
        let entry = |fault: DeviceFault| ((fault.location.clone(), fault.kind), fault);
        match now.continues(earlier) {
            true => Self(persistent.map(entry).collect()),
            false => Self::default(),
        }
    }

    /// The same faults without Xids: the GPUs have been reset.
    pub fn without_xids(&self) -> Self {
        let others = self.0.iter().filter(|((_, kind), _)| !matches!(kind, FaultKind::Xid(_)));
        Self(others.map(|(key, fault)| (key.clone(), fault.clone())).collect())
    }

    /// Adds an Xid that was seen `now`. A harmless Xid is no fault.
    pub fn with_xid(&self, event: &Xid, now: u64) -> Self {
        self.with_xid_at(event, None, now)
    }

    /// The same of a GPU instance that was made for a claim, `at` these memory slices.
    pub fn with_xid_at(&self, event: &Xid, at: Option<Placement>, now: u64) -> Self {
        let (class, meaning) = xid(event.code);
        let mut next = self.clone();
        let of_board = |location: &FaultLocation| match location {
            FaultLocation::Board(gpu)
            | FaultLocation::Instance(gpu, _)
            | FaultLocation::Slices(gpu, _)
            | FaultLocation::Taken(gpu, _) => *gpu == event.gpu,
            FaultLocation::Device(_) => false,
        };
        let known =
            self.0.keys().filter(|(location, kind)| matches!(kind, FaultKind::Xid(_)) && of_board(location));
        if class == XidClass::Harmless || known.count() >= XIDS_PER_BOARD {
            return next;
        }
        let gpu = event.gpu.clone();
        let location = match (at, event.gpu_instance) {
            // What has left the bus has left it in whole.
            _ if class == XidClass::Lost => FaultLocation::Board(gpu),
            (Some(at), _) => FaultLocation::Slices(gpu, at),
            (None, Some(instance)) => FaultLocation::Instance(gpu, instance),
            (None, None) => FaultLocation::Board(gpu),
        };
        let words = format!("Xid {}: {meaning}{}", event.code, remedy(class));
        next.insert_new(location, FaultKind::Xid(event.code), words, now);
        next
    }

    /// Replaces the faults from earlier looks and MPS daemon states by those of `now`.
    pub fn with_facts(&self, inventory: &Inventory, down: &[DaemonsDown], now: u64) -> Self {
        // The others are no matter of looks and daemons.
        let apart = |kind: FaultKind| {
            matches!(kind, FaultKind::Xid(_) | FaultKind::Withheld | FaultKind::NotMade | FaultKind::NotEnded)
        };
        let kept = self.iter().filter(|fault| apart(fault.kind)).cloned().collect();
        let mut next = Self::from_faults(kept);
        for (gpu, kind, reason) in unhealthy_gpus(inventory) {
            let location = FaultLocation::Board(gpu.clone());
            // Its Xid says so already.
            if kind == FaultKind::Lost && next.of_place(&location).any(|known| known.word() == kind.word()) {
                continue;
            }
            let since = self.since(&location, kind).unwrap_or(now);
            next.insert_new(location, kind, reason.to_owned(), since);
        }
        for DaemonsDown { device, reason } in down {
            let words = format!("its MPS daemon does not serve: {reason}");
            let location = FaultLocation::Device(device.clone());
            let since = self.since(&location, FaultKind::MpsDaemonDown).unwrap_or(now);
            next.insert_new(location, FaultKind::MpsDaemonDown, words, since);
        }
        next
    }

    /// Adds the full /dev/shm of MPS groups. The figures stay those of the first report (in `before`): they change all
    /// the time, and each change would be written to the API server.
    #[must_use]
    pub fn with_full_shm(mut self, before: &Self, full: &[ShmFull], now: u64) -> Self {
        // That of one claim's own daemon is nobody else's concern.
        let common = full.iter().filter(|one| one.group.claim().is_none());
        for ShmFull { group, usage } in common {
            for device in group.devices() {
                let (location, kind) = (FaultLocation::Device(device.clone()), FaultKind::ShmFull);
                let known = before.0.get(&(location.clone(), kind));
                let words = known.map_or_else(
                    || format!("the /dev/shm that its shares have together is full: {usage}; delete files there, or end the pod that has them"),
                    |known| known.words.clone(),
                );
                self.insert_new(location, kind, words, known.map_or(now, |known| known.since));
            }
        }
        self
    }

    /// Replaces what is withheld; each has its reason as text.
    pub fn with_withheld(&self, withheld: &BTreeMap<FaultLocation, String>, now: u64) -> Self {
        self.with_all(FaultKind::Withheld, withheld, now)
    }

    /// Replaces the MIG devices that could not be made lately; each has its reason as text.
    pub fn with_unmade(&self, unmade: &BTreeMap<FaultLocation, String>, now: u64) -> Self {
        self.with_all(FaultKind::NotMade, unmade, now)
    }

    /// Replaces the MIG devices that claims left and that could not be ended; each has its reason as text.
    pub fn with_unended(&self, unended: &BTreeMap<FaultLocation, String>, now: u64) -> Self {
        self.with_all(FaultKind::NotEnded, unended, now)
    }

    /// Replaces the faults of a kind.
    fn with_all(&self, kind: FaultKind, all: &BTreeMap<FaultLocation, String>, now: u64) -> Self {
        let others = self.0.iter().filter(|((_, other), _)| *other != kind);
        let mut next = Self(others.map(|(key, fault)| (key.clone(), fault.clone())).collect());
        for (location, words) in all {
            let since = self.since(location, kind).unwrap_or(now);
            next.insert_new(location.clone(), kind, words.clone(), since);
        }
        next
    }

    fn from_faults(device_faults: Vec<DeviceFault>) -> Self {
        Self(device_faults.into_iter().map(|fault| ((fault.location.clone(), fault.kind), fault)).collect())
    }

    fn of_place(&self, location: &FaultLocation) -> impl Iterator<Item = FaultKind> {
        self.0.keys().filter(move |(own, _)| own == location).map(|(_, kind)| *kind)
    }

    fn since(&self, location: &FaultLocation, kind: FaultKind) -> Option<u64> {
        self.0.get(&(location.clone(), kind)).map(|fault| fault.since)
    }

    /// The first one of a place and kind stays.
    fn insert_new(&mut self, location: FaultLocation, kind: FaultKind, words: String, since: u64) {
        let fault = DeviceFault { location: location.clone(), kind, since, words };
        self.0.entry((location, kind)).or_insert(fault);
    }
}

fn unhealthy_gpus(inventory: &Inventory) -> impl Iterator<Item = (&DeviceUuid, FaultKind, &str)> {
    let gpus = match inventory {
        Inventory::Found(found) => found.gpus.as_slice(),
        Inventory::Unknown | Inventory::Unavailable { .. } => &[],
    };
    gpus.iter().filter_map(|gpu: &Gpu| match &gpu.health {
        Health::Healthy | Health::Changing(_) => None,
        Health::Unhealthy(reason) => Some((&gpu.uuid, FaultKind::Unreachable, reason.as_str())),
        Health::Lost(reason) => Some((&gpu.uuid, FaultKind::Lost, reason.as_str())),
    })
}

fn remedy(class: XidClass) -> &'static str {
    match class {
        XidClass::Harmless => "",
        XidClass::Degraded => "; reset the GPU when that is convenient",
        XidClass::Broken => "; drain and reset the GPU (nvidia-smi --gpu-reset), or restart the node",
        XidClass::Lost => "; restart the node, and have the board inspected if that does not help",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inventory::tests::{gpu, look};
    use crate::model::gpu::{MigCapacity, MigDevice, MigMode, NodeGpus, Placement};
    use crate::model::quantity::Bytes;

    fn found(count: u32) -> NodeGpus {
        look((0..count).map(gpu).collect()).gpus
    }

    fn event(code: u64) -> Xid {
        Xid { gpu: gpu(0).uuid, code, gpu_instance: None }
    }

    fn run(boot: &str, driver: Option<u64>) -> DriverSession {
        DriverSession { boot: BootId::new(boot), driver }
    }

    fn kinds(device_faults: &DeviceFaults, device: &Device<'_>) -> Vec<FaultKind> {
        device_faults.of(device).iter().map(|fault| fault.kind).collect()
    }

    fn mig(instance: u32) -> MigDevice {
        MigDevice {
            uuid: DeviceUuid::new(format!("MIG-{instance}")),
            profile: "1g.10gb".into(),
            gpu_instance: instance,
            compute_instance: 0,
            profile_id: 19,
            placement: Placement { start: instance, size: 1 },
            capacity: MigCapacity::default(),
        }
    }

    #[test]
    fn an_xid_stays_with_its_board_whatever_looks_say_until_the_driver_is_loaded_anew() {
        let device_faults = DeviceFaults::default().with_xid(&event(48), 100).with_xid(&event(48), 200);
        let device_faults = device_faults.with_facts(&Inventory::Found(found(2)), &[], 300);
        let (sick, well) = (gpu(0), gpu(1));
        assert_eq!(kinds(&device_faults, &Device::Whole(&sick)), [FaultKind::Xid(48)]);
        assert_eq!(kinds(&device_faults, &Device::Whole(&well)), []);
        let told = device_faults.of(&Device::Whole(&sick))[0];
        assert_eq!(told.since, 100, "when it was first seen");
        assert!(told.words.contains("Xid 48") && told.words.contains("reset"), "{}", told.words);

        let restore =
            |now: DriverSession| DeviceFaults::restored(device_faults.persistent(), &run("a", Some(1)), &now);
        assert_eq!(restore(run("a", Some(1))), device_faults);
        assert_eq!(restore(run("a", None)), device_faults, "a driver that is not loaded has not been reset");
        assert!(restore(run("a", Some(2))).is_empty());
        assert!(restore(run("b", Some(1))).is_empty());
        assert!(device_faults.without_xids().is_empty());
    }

    #[test]
    fn a_programs_fault_is_no_fault_of_the_device_and_xids_have_an_end() {
        let mut device_faults = DeviceFaults::default().with_xid(&event(31), 1);
        assert!(device_faults.is_empty());
        for code in 0..10_000 {
            device_faults = device_faults.with_xid(&event(1000 + code), 1);
        }
        assert_eq!(device_faults.iter().count(), XIDS_PER_BOARD);
    }

    #[test]
    fn the_worst_comes_first() {
        let device_faults =
            DeviceFaults::default().with_xid(&event(48), 1).with_xid(&event(63), 1).with_xid(&event(79), 1);
        let gpu = gpu(0);
        assert_eq!(
            kinds(&device_faults, &Device::Whole(&gpu)),
            [FaultKind::Xid(79), FaultKind::Xid(48), FaultKind::Xid(63)]
        );
        let effects: Vec<_> =
            device_faults.of(&Device::Whole(&gpu)).iter().map(|a| a.kind.effect()).collect();
        assert_eq!(effects, [FaultEffect::NoPods, FaultEffect::NoNewPods, FaultEffect::ReportOnly]);
    }

    #[test]
    fn an_xid_of_a_gpu_instance_spares_the_others() {
        let parent = Gpu { mig: MigMode::On(vec![mig(7), mig(8)]), ..gpu(0) };
        let of = |device_faults: &DeviceFaults, index: usize| {
            let MigMode::On(devices) = &parent.mig else { unreachable!() };
            kinds(device_faults, &Device::Mig { parent: &parent, mig: &devices[index] })
        };
        let at = |code, gpu_instance| Xid { gpu_instance, ..event(code) };
        let one = DeviceFaults::default().with_xid(&at(48, Some(8)), 1);
        assert_eq!((of(&one, 0), of(&one, 1)), (vec![], vec![FaultKind::Xid(48)]));
        let all = DeviceFaults::default().with_xid(&at(79, Some(8)), 1).with_xid(&at(48, None), 1);
        assert_eq!(of(&all, 0), [FaultKind::Xid(79), FaultKind::Xid(48)]);
        let whole = gpu(0);
        assert_eq!(kinds(&one, &Device::Whole(&whole)), [FaultKind::Xid(48)], "MIG was turned off since");
    }

    #[test]
    fn what_a_look_and_the_daemons_tell_goes_when_they_tell_it_no_more() {
        let mut sick: NodeGpus = found(2);
        sick.gpus[1].health = Health::Unhealthy("it fails".into());
        let (sick, well) = (Inventory::Found(sick), Inventory::Found(found(2)));
        let down =
            [gpu(0).uuid, "MIG-7".into()].map(|device| DaemonsDown { device, reason: "it exited".into() });
        let first = DeviceFaults::default().with_facts(&sick, &down, 5);
        let again = first.with_facts(&sick, &down, 9);
        assert_eq!(first, again, "since 5");
        let (zero, one) = (gpu(0), gpu(1));
        assert_eq!(kinds(&again, &Device::Whole(&zero)), [FaultKind::MpsDaemonDown]);
        assert_eq!(kinds(&again, &Device::Whole(&one)), [FaultKind::Unreachable]);
        assert!(again.of(&Device::Whole(&zero))[0].words.contains("it exited"));
        assert!(again.persistent().is_empty(), "the next process sees for itself");
        assert!(again.with_facts(&well, &[], 10).is_empty());
    }

    #[test]
    fn a_full_shm_is_told_with_the_numbers_of_when_it_was_seen() {
        let usage = |files| SharedMemory {
            used: Bytes::from_mib(64),
            size: Bytes::from_mib(64),
            files,
            files_max: 8194,
            most: None,
        };
        let full = |files| [ShmFull { group: MpsGroup::new([gpu(0).uuid]), usage: usage(files) }];
        let looked = Inventory::Found(found(2));
        let take = |before: &DeviceFaults, full: &[ShmFull], now| {
            before.with_facts(&looked, &[], now).with_full_shm(before, full, now)
        };
        let first = take(&DeviceFaults::default(), &full(3), 5);
        let board = gpu(0);
        assert_eq!(kinds(&first, &Device::Whole(&board)), [FaultKind::ShmFull]);
        let told = first.of(&Device::Whole(&board))[0];
        assert!(told.words.contains("64 of 64 MiB and 3 of 8194 files"), "{}", told.words);
        assert_eq!(told.kind.effect(), FaultEffect::NoNewPods);
        assert_eq!(take(&first, &full(4), 9), first, "since 5");
        assert!(first.persistent().is_empty() && take(&first, &[], 10).is_empty());
    }

    #[test]
    fn a_board_that_nvml_calls_lost_is_lost_whether_or_not_its_xid_was_told() {
        let mut gone: NodeGpus = found(1);
        gone.gpus[0].health = Health::Lost("it has left the bus".into());
        let (gone, back) = (Inventory::Found(gone), Inventory::Found(found(1)));
        let gpu = gpu(0);
        let untold = DeviceFaults::default().with_facts(&gone, &[], 5);
        assert_eq!(kinds(&untold, &Device::Whole(&gpu)), [FaultKind::Lost]);
        assert_eq!(untold.of(&Device::Whole(&gpu))[0].kind.effect(), FaultEffect::NoPods);
        assert!(untold.with_facts(&back, &[], 6).is_empty(), "a look sees for itself");
        let told = untold.with_xid(&event(79), 6).with_facts(&gone, &[], 7);
        assert_eq!(kinds(&told, &Device::Whole(&gpu)), [FaultKind::Xid(79)], "once");
    }

    #[test]
    fn a_board_that_should_not_be_used_is_judged_unhealthy() {
        let device_faults = DeviceFaults::default().with_xid(&event(48), 1).with_xid(&event(62), 1);
        let device_faults =
            device_faults.with_xid(&Xid { gpu: gpu(1).uuid, code: 63, gpu_instance: None }, 1);
        let Inventory::Found(updated) = device_faults.applied_to(&Inventory::Found(found(2))) else {
            panic!()
        };
        let Health::Unhealthy(words) = &updated.gpus[0].health else { panic!() };
        assert!(words.contains("Xid 48") && words.contains("Xid 62"), "{words}");
        assert_eq!(updated.gpus[1].health, Health::Healthy, "degraded is not unhealthy");
        assert_eq!(device_faults.applied_to(&Inventory::Unknown), Inventory::Unknown);
    }

    #[test]
    fn what_is_remembered_is_read_back() {
        let device_faults = DeviceFaults::default().with_xid(&event(48), 100);
        let text = serde_json::to_string(&device_faults.persistent()).unwrap();
        let back = serde_json::from_str(&text).unwrap();
        assert_eq!(DeviceFaults::restored(back, &run("a", None), &run("a", None)), device_faults);
    }

    #[test]
    fn faults_are_stored_under_the_names_of_earlier_versions() {
        let text = r#"{"place":{"Board":"GPU-0"},"kind":{"Xid":48},"since":100,"words":"Xid 48"}"#;
        let fault: DeviceFault = serde_json::from_str(text).unwrap();
        assert_eq!(
            (&fault.location, fault.kind),
            (&FaultLocation::Board("GPU-0".into()), FaultKind::Xid(48))
        );
        assert_eq!(serde_json::to_string(&fault).unwrap(), text);
        assert_eq!(FaultEffect::ReportOnly.as_str(), "Told");
    }

    #[test]
    fn a_device_is_withheld_as_long_as_it_is_said_and_nothing_is_wrong_with_it() {
        let board = gpu(0);
        let withheld =
            BTreeMap::from([(FaultLocation::Device(board.uuid.clone()), "process 7 holds it".to_owned())]);
        let device_faults =
            DeviceFaults::default().with_withheld(&withheld, 100).with_withheld(&withheld, 200);
        let found = device_faults.of(&Device::Whole(&board));
        assert_eq!((found[0].kind, found[0].since), (FaultKind::Withheld, 100));
        assert_eq!(found[0].kind.effect(), FaultEffect::NoNewPods);
        let updated = device_faults.applied_to(&Inventory::Found(found_boards()));
        let Inventory::Found(updated) = updated else { unreachable!() };
        assert_eq!(updated.gpus[0].health, Health::Healthy);
        // The words would change with each process.
        let remembered = device_faults.persistent();
        assert_eq!((remembered.len(), remembered[0].words.as_str()), (1, ""));
        let run = |driver| DriverSession { boot: BootId::new("a"), driver: Some(driver) };
        let again = DeviceFaults::restored(remembered.clone(), &run(1), &run(1));
        assert_eq!(again.withheld(), BTreeSet::from([FaultLocation::Device(board.uuid.clone())]));
        assert!(DeviceFaults::restored(remembered, &run(1), &run(2)).is_empty(), "nobody outlasts that");
        assert!(!again.has_xids());
        assert!(device_faults.with_withheld(&BTreeMap::new(), 300).is_empty());
    }

    fn found_boards() -> NodeGpus {
        found(1)
    }

    #[test]
    fn every_kind_has_a_word_of_the_list() {
        let xids = [63, 48, 79].map(FaultKind::Xid);
        for kind in xids.into_iter().chain([
            FaultKind::Lost,
            FaultKind::Unreachable,
            FaultKind::MpsDaemonDown,
            FaultKind::ShmFull,
            FaultKind::Withheld,
            FaultKind::NotMade,
            FaultKind::NotEnded,
        ]) {
            assert!(FaultKind::WORDS.contains(&kind.word()), "{kind:?}");
        }
    }
}
