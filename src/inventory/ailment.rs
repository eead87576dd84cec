//! What ails the boards: folded from Xids, looks at the GPUs, and the states of MPS daemons.
//!
//! * An Xid is remembered until its board was reset for sure: another boot, or the driver loaded anew. NVML
//!   tells of an Xid once, and a board that must be reset looks well otherwise. An administrator who has
//!   reset a board alone says so ([`Ailments::cured`]).
//! * A board that cannot be read or is lost, an MPS daemon that does not serve, or a full /dev/shm ails as long
//!   as that is so. Xid 79 may never be told: once a board has left the bus, NVML's wait for events fails instead.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::Inventory;
use super::xid::{Class, xid};
use crate::model::gpu::{Device, Gpu, Health};
use crate::model::names::{BootId, DeviceUuid};
use crate::model::share::{MpsGroup, SharedMemory};

/// Xids remembered of one board; more say nothing new.
const XIDS_PER_BOARD: usize = 16;

/// Something that is wrong with a board or a part of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ailment {
    pub place: Place,
    pub kind: Kind,
    /// When it was first seen: seconds since 1970.
    pub since: u64,
    /// What is wrong, for people.
    pub words: String,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Place {
    Board(DeviceUuid),
    /// A GPU instance of a board in MIG mode: the MIG devices in it.
    Instance(DeviceUuid, u32),
    /// One device, whole or MIG.
    Device(DeviceUuid),
}

impl Place {
    fn holds(&self, device: &Device<'_>) -> bool {
        match (self, device) {
            (Self::Board(gpu), _) => *gpu == device.gpu().uuid,
            (Self::Device(uuid), _) => uuid == device.uuid(),
            // MIG was turned off since: the fault is somewhere on the board.
            (Self::Instance(gpu, _), Device::Whole(whole)) => *gpu == whole.uuid,
            (Self::Instance(gpu, instance), Device::Mig { parent, mig }) => {
                *gpu == parent.uuid && *instance == mig.gpu_instance
            }
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Kind {
    Xid(u64),
    /// NVML says that the board has left the bus, whether or not its Xid was told.
    Lost,
    /// NVML cannot read the board, or does not list it any more.
    Unreachable,
    /// The MPS daemon of claims on the device does not serve.
    MpsDaemonDown,
    /// The /dev/shm that claims on the device share is full.
    ShmFull,
    /// Nothing is wrong with it, but processes hold it that no allocation gives it to any more.
    Withheld,
}

/// How far an ailment goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Effect {
    /// It is told; the device stays in use.
    Told,
    /// No new pods.
    NoNewPods,
    /// The pods that have it had better go.
    NoPods,
}

impl Kind {
    pub const WORDS: [&'static str; 7] =
        ["worn", "xid", "gpu-lost", "unreachable", "mps-daemon-down", "shm-full", "withheld"];

    /// A short word for taints and metrics; one of [`Self::WORDS`].
    pub fn word(self) -> &'static str {
        match self {
            Self::Xid(code) => match xid(code).0 {
                Class::Harmless | Class::Worn => "worn",
                Class::Broken => "xid",
                Class::Lost => "gpu-lost",
            },
            Self::Lost => "gpu-lost",
            Self::Unreachable => "unreachable",
            Self::MpsDaemonDown => "mps-daemon-down",
            Self::ShmFull => "shm-full",
            Self::Withheld => "withheld",
        }
    }

    /// True if the device does not work as it should.
    pub fn is_fault(self) -> bool {
        self != Self::Withheld
    }

    pub fn effect(self) -> Effect {
        match self {
            Self::Xid(code) => match xid(code).0 {
                Class::Harmless | Class::Worn => Effect::Told,
                Class::Broken => Effect::NoNewPods,
                Class::Lost => Effect::NoPods,
            },
            Self::Lost => Effect::NoPods,
            Self::Unreachable | Self::MpsDaemonDown | Self::ShmFull | Self::Withheld => Effect::NoNewPods,
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

/// An MPS daemon that claims need and that does not serve.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DaemonDown {
    pub group: MpsGroup,
    pub reason: String,
}

/// The /dev/shm that a daemon's claims share is full.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShmFull {
    pub group: MpsGroup,
    /// How full, and whose it is.
    pub usage: SharedMemory,
}

/// In which run of kernel and driver Xids were seen: a reset that is sure begins another.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    pub boot: BootId,
    /// A number of the kernel module's load; none where it cannot be told.
    pub driver: Option<u64>,
}

impl Run {
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

/// Everything that ails this node's boards. Each place has each kind once.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Ailments(BTreeMap<(Place, Kind), Ailment>);

impl Ailments {
    pub fn iter(&self) -> impl Iterator<Item = &Ailment> {
        self.0.values()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Those that concern a device, the worst first.
    pub fn of(&self, device: &Device<'_>) -> Vec<&Ailment> {
        let mut found: Vec<_> = self.iter().filter(|ailment| ailment.place.holds(device)).collect();
        found.sort_by_key(|ailment| std::cmp::Reverse(ailment.kind.effect()));
        found
    }

    /// The inventory with boards unhealthy that should not be used: in words, what ails the whole of each.
    pub fn judged(&self, inventory: &Inventory) -> Inventory {
        let Inventory::Found(gpus) = inventory else { return inventory.clone() };
        let mut gpus = gpus.clone();
        for gpu in gpus.gpus.iter_mut().filter(|gpu| gpu.health == Health::Healthy) {
            let place = Place::Board(gpu.uuid.clone());
            let ills = self.iter().filter(|one| one.place == place && one.kind.effect() > Effect::Told);
            let words: Vec<&str> = ills.map(|ailment| ailment.words.as_str()).collect();
            if !words.is_empty() {
                gpu.health = Health::Unhealthy(words.join("; "));
            }
        }
        Inventory::Found(gpus)
    }

    /// What must outlast this process.
    pub fn lasting(&self) -> Vec<Ailment> {
        self.iter().filter(|ailment| matches!(ailment.kind, Kind::Xid(_))).cloned().collect()
    }

    /// What was remembered of `earlier`, if that run goes on in `now`.
    pub fn recalled(remembered: Vec<Ailment>, earlier: &Run, now: &Run) -> Self {
        let lasting = remembered.into_iter().filter(|ailment| matches!(ailment.kind, Kind::Xid(_)));
        let entry = |ailment: Ailment| ((ailment.place.clone(), ailment.kind), ailment);
        match now.continues(earlier) {
            true => Self(lasting.map(entry).collect()),
            false => Self::default(),
        }
    }

    /// Without the Xids: their boards have been reset.
    pub fn cured(&self) -> Self {
        let others = self.0.iter().filter(|((_, kind), _)| !matches!(kind, Kind::Xid(_)));
        Self(others.map(|(key, ailment)| (key.clone(), ailment.clone())).collect())
    }

    /// And one more Xid, seen `now`. A harmless one ails nobody.
    pub fn and_xid(&self, event: &Xid, now: u64) -> Self {
        let (class, meaning) = xid(event.code);
        let mut next = self.clone();
        let of_board = |place: &Place| match place {
            Place::Board(gpu) | Place::Instance(gpu, _) => *gpu == event.gpu,
            Place::Device(_) => false,
        };
        let known = self.0.keys().filter(|(place, kind)| matches!(kind, Kind::Xid(_)) && of_board(place));
        if class == Class::Harmless || known.count() >= XIDS_PER_BOARD {
            return next;
        }
        let place = match event.gpu_instance {
            // What has left the bus has left it in whole.
            Some(instance) if class != Class::Lost => Place::Instance(event.gpu.clone(), instance),
            _ => Place::Board(event.gpu.clone()),
        };
        let words = format!("Xid {}: {meaning}{}", event.code, remedy(class));
        next.put(place, Kind::Xid(event.code), words, now);
        next
    }

    /// With what the last look and the MPS daemons tell `now` in place of what they told before.
    pub fn and_facts(&self, inventory: &Inventory, down: &[DaemonDown], now: u64) -> Self {
        let mut next = Self::recalled_as_is(self.lasting());
        for (gpu, kind, reason) in ill_boards(inventory) {
            let place = Place::Board(gpu.clone());
            // Its Xid says so already.
            if kind == Kind::Lost && next.of_place(&place).any(|known| known.word() == kind.word()) {
                continue;
            }
            let since = self.since(&place, kind).unwrap_or(now);
            next.put(place, kind, reason.to_owned(), since);
        }
        let mut devices = BTreeSet::new();
        for daemon in down {
            let words = format!("its MPS daemon does not serve: {}", daemon.reason);
            for device in daemon.group.devices().iter().filter(|device| devices.insert((*device).clone())) {
                let place = Place::Device(device.clone());
                let since = self.since(&place, Kind::MpsDaemonDown).unwrap_or(now);
                next.put(place, Kind::MpsDaemonDown, words.clone(), since);
            }
        }
        next
    }

    /// And these that are full, in place of those `before`. Numbers stay those of when it was first seen: they
    /// never stand still, and each change would be written to the API server.
    #[must_use]
    pub fn and_full(mut self, before: &Self, full: &[ShmFull], now: u64) -> Self {
        for ShmFull { group, usage } in full {
            for device in group.devices() {
                let (place, kind) = (Place::Device(device.clone()), Kind::ShmFull);
                let known = before.0.get(&(place.clone(), kind));
                let words = known.map_or_else(
                    || format!("the /dev/shm that its shares have together is full: {usage}; delete files there, or end the pod that has them"),
                    |known| known.words.clone(),
                );
                self.put(place, kind, words, known.map_or(now, |known| known.since));
            }
        }
        self
    }

    /// And with these devices withheld, each for a reason in words.
    pub fn and_withheld(&self, withheld: &BTreeMap<DeviceUuid, String>, now: u64) -> Self {
        let others = self.0.iter().filter(|((_, kind), _)| *kind != Kind::Withheld);
        let mut next = Self(others.map(|(key, ailment)| (key.clone(), ailment.clone())).collect());
        for (device, words) in withheld {
            let place = Place::Device(device.clone());
            let since = self.since(&place, Kind::Withheld).unwrap_or(now);
            next.put(place, Kind::Withheld, words.clone(), since);
        }
        next
    }

    fn recalled_as_is(ailments: Vec<Ailment>) -> Self {
        Self(ailments.into_iter().map(|ailment| ((ailment.place.clone(), ailment.kind), ailment)).collect())
    }

    fn of_place(&self, place: &Place) -> impl Iterator<Item = Kind> {
        self.0.keys().filter(move |(own, _)| own == place).map(|(_, kind)| *kind)
    }

    fn since(&self, place: &Place, kind: Kind) -> Option<u64> {
        self.0.get(&(place.clone(), kind)).map(|ailment| ailment.since)
    }

    /// The first one of a place and kind stays.
    fn put(&mut self, place: Place, kind: Kind, words: String, since: u64) {
        let ailment = Ailment { place: place.clone(), kind, since, words };
        self.0.entry((place, kind)).or_insert(ailment);
    }
}

fn ill_boards(inventory: &Inventory) -> impl Iterator<Item = (&DeviceUuid, Kind, &str)> {
    let gpus = match inventory {
        Inventory::Found(found) => found.gpus.as_slice(),
        Inventory::Unknown | Inventory::Unavailable { .. } => &[],
    };
    gpus.iter().filter_map(|gpu: &Gpu| match &gpu.health {
        Health::Healthy => None,
        Health::Unhealthy(reason) => Some((&gpu.uuid, Kind::Unreachable, reason.as_str())),
        Health::Lost(reason) => Some((&gpu.uuid, Kind::Lost, reason.as_str())),
    })
}

fn remedy(class: Class) -> &'static str {
    match class {
        Class::Harmless => "",
        Class::Worn => "; reset the GPU when it suits",
        Class::Broken => "; drain and reset the GPU (nvidia-smi --gpu-reset), or restart the node",
        Class::Lost => "; restart the node, and have the board looked at if that does not help",
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

    fn run(boot: &str, driver: Option<u64>) -> Run {
        Run { boot: BootId::new(boot), driver }
    }

    fn kinds(ailments: &Ailments, device: &Device<'_>) -> Vec<Kind> {
        ailments.of(device).iter().map(|ailment| ailment.kind).collect()
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
        let ailments = Ailments::default().and_xid(&event(48), 100).and_xid(&event(48), 200);
        let ailments = ailments.and_facts(&Inventory::Found(found(2)), &[], 300);
        let (sick, well) = (gpu(0), gpu(1));
        assert_eq!(kinds(&ailments, &Device::Whole(&sick)), [Kind::Xid(48)]);
        assert_eq!(kinds(&ailments, &Device::Whole(&well)), []);
        let told = ailments.of(&Device::Whole(&sick))[0];
        assert_eq!(told.since, 100, "when it was first seen");
        assert!(told.words.contains("Xid 48") && told.words.contains("reset"), "{}", told.words);

        let recall = |now: Run| Ailments::recalled(ailments.lasting(), &run("a", Some(1)), &now);
        assert_eq!(recall(run("a", Some(1))), ailments);
        assert_eq!(recall(run("a", None)), ailments, "a driver that is not loaded has not been reset");
        assert!(recall(run("a", Some(2))).is_empty());
        assert!(recall(run("b", Some(1))).is_empty());
        assert!(ailments.cured().is_empty());
    }

    #[test]
    fn a_programs_fault_ails_nobody_and_xids_have_an_end() {
        let mut ailments = Ailments::default().and_xid(&event(31), 1);
        assert!(ailments.is_empty());
        for code in 0..10_000 {
            ailments = ailments.and_xid(&event(1000 + code), 1);
        }
        assert_eq!(ailments.iter().count(), XIDS_PER_BOARD);
    }

    #[test]
    fn the_worst_comes_first() {
        let ailments =
            Ailments::default().and_xid(&event(48), 1).and_xid(&event(63), 1).and_xid(&event(79), 1);
        let gpu = gpu(0);
        assert_eq!(kinds(&ailments, &Device::Whole(&gpu)), [Kind::Xid(79), Kind::Xid(48), Kind::Xid(63)]);
        let effects: Vec<_> = ailments.of(&Device::Whole(&gpu)).iter().map(|a| a.kind.effect()).collect();
        assert_eq!(effects, [Effect::NoPods, Effect::NoNewPods, Effect::Told]);
    }

    #[test]
    fn an_xid_of_a_gpu_instance_spares_the_others() {
        let parent = Gpu { mig: MigMode::On(vec![mig(7), mig(8)]), ..gpu(0) };
        let of = |ailments: &Ailments, index: usize| {
            let MigMode::On(devices) = &parent.mig else { unreachable!() };
            kinds(ailments, &Device::Mig { parent: &parent, mig: &devices[index] })
        };
        let at = |code, gpu_instance| Xid { gpu_instance, ..event(code) };
        let one = Ailments::default().and_xid(&at(48, Some(8)), 1);
        assert_eq!((of(&one, 0), of(&one, 1)), (vec![], vec![Kind::Xid(48)]));
        let all = Ailments::default().and_xid(&at(79, Some(8)), 1).and_xid(&at(48, None), 1);
        assert_eq!(of(&all, 0), [Kind::Xid(79), Kind::Xid(48)]);
        let whole = gpu(0);
        assert_eq!(kinds(&one, &Device::Whole(&whole)), [Kind::Xid(48)], "MIG was turned off since");
    }

    #[test]
    fn what_a_look_and_the_daemons_tell_goes_when_they_tell_it_no_more() {
        let mut sick: NodeGpus = found(2);
        sick.gpus[1].health = Health::Unhealthy("it fails".into());
        let (sick, well) = (Inventory::Found(sick), Inventory::Found(found(2)));
        let group = MpsGroup::new([gpu(0).uuid, "MIG-7".into()]);
        let down = [DaemonDown { group, reason: "it exited".into() }];
        let first = Ailments::default().and_facts(&sick, &down, 5);
        let again = first.and_facts(&sick, &down, 9);
        assert_eq!(first, again, "since 5");
        let (zero, one) = (gpu(0), gpu(1));
        assert_eq!(kinds(&again, &Device::Whole(&zero)), [Kind::MpsDaemonDown]);
        assert_eq!(kinds(&again, &Device::Whole(&one)), [Kind::Unreachable]);
        assert!(again.of(&Device::Whole(&zero))[0].words.contains("it exited"));
        assert!(again.lasting().is_empty(), "the next process sees for itself");
        assert!(again.and_facts(&well, &[], 10).is_empty());
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
        let take = |before: &Ailments, full: &[ShmFull], now| {
            before.and_facts(&looked, &[], now).and_full(before, full, now)
        };
        let first = take(&Ailments::default(), &full(3), 5);
        let board = gpu(0);
        assert_eq!(kinds(&first, &Device::Whole(&board)), [Kind::ShmFull]);
        let told = first.of(&Device::Whole(&board))[0];
        assert!(told.words.contains("64 of 64 MiB and 3 of 8194 files"), "{}", told.words);
        assert_eq!(told.kind.effect(), Effect::NoNewPods);
        assert_eq!(take(&first, &full(4), 9), first, "since 5");
        assert!(first.lasting().is_empty() && take(&first, &[], 10).is_empty());
    }

    #[test]
    fn a_board_that_nvml_calls_lost_is_lost_whether_or_not_its_xid_was_told() {
        let mut gone: NodeGpus = found(1);
        gone.gpus[0].health = Health::Lost("it has left the bus".into());
        let (gone, back) = (Inventory::Found(gone), Inventory::Found(found(1)));
        let gpu = gpu(0);
        let untold = Ailments::default().and_facts(&gone, &[], 5);
        assert_eq!(kinds(&untold, &Device::Whole(&gpu)), [Kind::Lost]);
        assert_eq!(untold.of(&Device::Whole(&gpu))[0].kind.effect(), Effect::NoPods);
        assert!(untold.and_facts(&back, &[], 6).is_empty(), "a look sees for itself");
        let told = untold.and_xid(&event(79), 6).and_facts(&gone, &[], 7);
        assert_eq!(kinds(&told, &Device::Whole(&gpu)), [Kind::Xid(79)], "once");
    }

    #[test]
    fn a_board_that_should_not_be_used_is_judged_unhealthy() {
        let ailments = Ailments::default().and_xid(&event(48), 1).and_xid(&event(62), 1);
        let ailments = ailments.and_xid(&Xid { gpu: gpu(1).uuid, code: 63, gpu_instance: None }, 1);
        let Inventory::Found(judged) = ailments.judged(&Inventory::Found(found(2))) else { panic!() };
        let Health::Unhealthy(words) = &judged.gpus[0].health else { panic!() };
        assert!(words.contains("Xid 48") && words.contains("Xid 62"), "{words}");
        assert_eq!(judged.gpus[1].health, Health::Healthy, "worn is not ill");
        assert_eq!(ailments.judged(&Inventory::Unknown), Inventory::Unknown);
    }

    #[test]
    fn what_is_remembered_is_read_back() {
        let ailments = Ailments::default().and_xid(&event(48), 100);
        let text = serde_json::to_string(&ailments.lasting()).unwrap();
        let back = serde_json::from_str(&text).unwrap();
        assert_eq!(Ailments::recalled(back, &run("a", None), &run("a", None)), ailments);
    }

    #[test]
    fn a_device_is_withheld_as_long_as_it_is_said_and_nothing_is_wrong_with_it() {
        let board = gpu(0);
        let withheld = BTreeMap::from([(board.uuid.clone(), "process 7 holds it".to_owned())]);
        let ailments = Ailments::default().and_withheld(&withheld, 100).and_withheld(&withheld, 200);
        let found = ailments.of(&Device::Whole(&board));
        assert_eq!((found[0].kind, found[0].since), (Kind::Withheld, 100));
        assert_eq!(found[0].kind.effect(), Effect::NoNewPods);
        let judged = ailments.judged(&Inventory::Found(found_boards()));
        let Inventory::Found(judged) = judged else { unreachable!() };
        assert_eq!(judged.gpus[0].health, Health::Healthy);
        assert!(ailments.lasting().is_empty());
        assert!(ailments.and_withheld(&BTreeMap::new(), 300).is_empty());
    }

    fn found_boards() -> NodeGpus {
        found(1)
    }

    #[test]
    fn every_kind_has_a_word_of_the_list() {
        let xids = [63, 48, 79].map(Kind::Xid);
        for kind in xids.into_iter().chain([
            Kind::Lost,
            Kind::Unreachable,
            Kind::MpsDaemonDown,
            Kind::ShmFull,
            Kind::Withheld,
        ]) {
            assert!(Kind::WORDS.contains(&kind.word()), "{kind:?}");
        }
    }
}
