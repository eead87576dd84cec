//! GPUs and MIG devices as this node has them, and the devices that are published for them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::mig::{MigPlace, PossibleMig};
use super::names::{DeviceName, DeviceUuid};
use super::quantity::Bytes;

/// What one complete look at the node's GPUs found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
pub struct NodeGpus {
    pub driver: DriverVersions,
    /// Sorted by minor number.
    pub gpus: Vec<Gpu>,
}

/// Versions as NVML prints them, e.g. `550.163.01` and `12.4`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
pub struct DriverVersions {
    pub driver: String,
    pub cuda: String,
}

/// One board.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gpu {
    pub uuid: DeviceUuid,
    /// The N of /dev/nvidiaN; NVML's index where there are no such nodes (WSL).
    pub minor: u32,
    pub product_name: String,
    pub brand: String,
    pub architecture: String,
    /// CUDA compute capability: major, minor.
    pub compute_capability: (u32, u32),
    pub memory: Memory,
    /// Streaming multiprocessors, where NVML tells.
    pub multiprocessors: Option<u32>,
    /// `HMM`, `ATS` or `None`, where NVML tells.
    pub addressing_mode: Option<String>,
    pub pci: Pci,
    pub mig: MigMode,
    pub health: Health,
}

/// Board memory. A GPU whose NVML cannot tell its memory is never shareable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Memory {
    Unknown,
    Known {
        total: Bytes,
        /// What the driver keeps for itself; 0 where NVML does not separate it.
        reserved: Bytes,
    },
}

/// Where the board sits.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
pub struct Pci {
    /// `0000:1a:00.0`, lower case.
    pub bus_id: String,
    /// `pci0000:15`, where sysfs tells.
    pub root: Option<String>,
    pub numa_node: Option<u32>,
}

/// A board is either whole or cut into MIG devices, never both.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum MigMode {
    /// Cannot do MIG, or MIG is off.
    Off,
    /// MIG is on: only the MIG devices can be used. Sorted by name.
    On(Vec<MigDevice>),
    /// Instances are made for claims.
    OnDemand(OnDemand),
}

/// Whose the MIG mode of a board is on which MIG devices are made for claims.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
pub enum MigSwitch {
    /// An administrator's, who has switched it on: it stays on.
    #[default]
    Fixed,
    /// Ours, and off: the board is whole, and can be cut.
    Off,
    /// Ours, and on.
    On,
    /// An administrator's, who has switched it off: the board is whole once no claim has a MIG device of it.
    OffByOthers,
}

impl MigSwitch {
    fn is_fixed(&self) -> bool {
        *self == Self::Fixed
    }

    /// True if the mode is switched for claims.
    pub fn is_ours(self) -> bool {
        matches!(self, Self::Off | Self::On)
    }

    pub fn is_off(self) -> bool {
        matches!(self, Self::Off | Self::OffByOthers)
    }
}

/// A board that is carved for claims.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
pub struct OnDemand {
    #[serde(default, skip_serializing_if = "MigSwitch::is_fixed")]
    pub switch: MigSwitch,
    /// Every instance that NVML calls possible on an empty board, whether it is made or not.
    pub places: Vec<PossibleMig>,
    /// Instances that are there and were made for no claim: used as they are, and in the way of others.
    pub foreign: Vec<MigPlace>,
    /// The MIG devices of those instances.
    pub devices: Vec<MigDevice>,
    /// What was made for the claim at hand: known to who prepares it, and to nobody else.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub made: Vec<MigDevice>,
    /// What was made for claims that have it still, and is not there any more: somebody ended it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub missing: Vec<MissingMig>,
}

/// A MIG device that somebody ended under its claim.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct MissingMig {
    pub place: MigPlace,
    pub uuid: DeviceUuid,
}

impl MissingMig {
    /// What is wrong with it, and what to do.
    pub fn words(&self) -> String {
        let MigPlace { profile_id, placement } = self.place;
        format!(
            "MIG device {} (profile {profile_id} at memory slice {}) was ended by somebody while its claim has it: what uses \
             it fails. Delete the pod; a new one gets another",
            self.uuid, placement.start
        )
    }
}

/// One MIG device: a GPU instance with a compute instance.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigDevice {
    pub uuid: DeviceUuid,
    /// e.g. `1g.10gb`.
    pub profile: String,
    pub gpu_instance: u32,
    pub compute_instance: u32,
    /// NVML's id of the GPU instance profile.
    pub profile_id: u32,
    /// First memory slice, and how many.
    pub placement: Placement,
    pub capacity: MigCapacity,
}

impl MigDevice {
    /// The compute instance is a part of its GPU instance, beside which there may be others (`1c.2g.20gb`).
    pub fn is_part_of_instance(&self) -> bool {
        self.profile.split_once('.').is_some_and(|(slices, _)| slices.ends_with('c'))
    }
}

/// A run of a board's memory slices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Placement {
    pub start: u32,
    pub size: u32,
}

/// Engine counts and memory of a MIG device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
pub struct MigCapacity {
    pub memory: Bytes,
    pub multiprocessors: u32,
    pub copy_engines: u32,
    pub decoders: u32,
    pub encoders: u32,
    pub jpeg_engines: u32,
    pub ofa_engines: u32,
}

/// Can the board be used?
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Health {
    Healthy,
    /// It works, and is to be used otherwise once the claims that it has have gone: it takes no new ones. Why, in words.
    Changing(String),
    /// Why not, in words.
    Unhealthy(String),
    /// NVML says that it has left the bus (`NVML_ERROR_GPU_IS_LOST`): nothing on it goes on.
    Lost(String),
}

impl Health {
    /// What is wrong, in words; none of a board that works.
    pub fn problem(&self) -> Option<&str> {
        match self {
            Self::Healthy | Self::Changing(_) => None,
            Self::Unhealthy(reason) | Self::Lost(reason) => Some(reason),
        }
    }
}

/// Something that can be allocated: what a ResourceSlice lists under a name.
/// (A share is no device of its own: it names its GPU's device with a share id.)
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Device<'a> {
    /// Also of a board that is given whole or cut ([`Gpu::is_whole_or_cut`]), with the places on it beside.
    Whole(&'a Gpu),
    Mig {
        parent: &'a Gpu,
        mig: &'a MigDevice,
    },
    /// A MIG device that is made when a claim is prepared.
    Place {
        parent: &'a Gpu,
        place: &'a PossibleMig,
    },
    /// A board that is carved on demand, for who chooses the places on it by themselves: our controller.
    Parent(&'a Gpu),
}

impl<'a> Device<'a> {
    pub fn name(&self) -> DeviceName {
        match self {
            Self::Whole(gpu) | Self::Parent(gpu) => DeviceName::whole(gpu.minor),
            Self::Mig { parent, mig } => {
                let name = DeviceName::mig(parent.minor, &mig.profile, mig.profile_id, mig.placement.start);
                if mig.is_part_of_instance() { name.of_compute_instance(mig.compute_instance) } else { name }
            }
            Self::Place { parent, place } => place.device_name(parent.minor),
        }
    }

    /// The UUID that CUDA programs see; of a MIG device that is yet to be made, what stands for it.
    pub fn uuid(&self) -> &'a DeviceUuid {
        match self {
            Self::Whole(gpu) | Self::Parent(gpu) => &gpu.uuid,
            Self::Mig { mig, .. } => &mig.uuid,
            Self::Place { place, .. } => &place.id,
        }
    }

    /// The board that the device is, or is a part of.
    pub fn gpu(&self) -> &'a Gpu {
        match self {
            Self::Whole(gpu) | Self::Parent(gpu) => gpu,
            Self::Mig { parent, .. } | Self::Place { parent, .. } => parent,
        }
    }
}

impl NodeGpus {
    /// Every allocatable device by name, in name order of boards, then placements.
    pub fn devices(&self) -> BTreeMap<DeviceName, Device<'_>> {
        self.gpus.iter().flat_map(Gpu::devices).map(|device| (device.name(), device)).collect()
    }

    pub fn device(&self, name: &DeviceName) -> Option<Device<'_>> {
        self.gpus.iter().flat_map(Gpu::devices).find(|device| device.name() == *name)
    }
}

impl Gpu {
    /// The board, what is there of others', then what may be made. An instance of others' takes the name of what it is.
    fn carved<'a>(&'a self, cut: &'a OnDemand) -> Vec<Device<'a>> {
        let found = cut.devices.iter().chain(&cut.made).map(|mig| Device::Mig { parent: self, mig });
        let board = if self.is_whole_or_cut() { Device::Whole(self) } else { Device::Parent(self) };
        let mut devices: Vec<_> = [board].into_iter().chain(found).collect();
        let names: Vec<_> = devices.iter().map(Device::name).collect();
        let free = cut.places.iter().filter(|place| !names.contains(&place.device_name(self.minor)));
        devices.extend(free.map(|place| Device::Place { parent: self, place }));
        devices
    }

    /// True of a board that is given whole or cut, whichever is asked for first: its MIG mode is ours to switch.
    pub fn is_whole_or_cut(&self) -> bool {
        matches!(&self.mig, MigMode::OnDemand(cut) if cut.switch.is_ours())
    }

    /// MIG devices that somebody ended under their claims.
    pub fn missing(&self) -> &[MissingMig] {
        match &self.mig {
            MigMode::Off | MigMode::On(_) => &[],
            MigMode::OnDemand(cut) => &cut.missing,
        }
    }

    /// The board itself, its MIG devices where MIG is on, or both where it is cut on demand.
    pub fn devices(&self) -> Vec<Device<'_>> {
        match &self.mig {
            MigMode::Off => vec![Device::Whole(self)],
            MigMode::On(devices) => devices.iter().map(|mig| Device::Mig { parent: self, mig }).collect(),
            MigMode::OnDemand(cut) => self.carved(cut),
        }
    }
}
