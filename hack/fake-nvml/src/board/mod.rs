//! What each board model answers: the fixed data behind a profile name.
//!
//! Figures come from public output of the vendor's own tools and its MIG guide.
//! Where a figure could not be found in public it says `uncertain`.

mod a100;
mod a30;
mod b200;
mod hopper;
mod l40s;
mod rtx;
mod t4;

/// One MIG profile of a board, as `nvmlDeviceGetGpuInstanceProfileInfo` tells it.
#[derive(Debug)]
pub struct MigProfile {
    /// The index by which the profile is asked for (`NVML_GPU_INSTANCE_PROFILE_*`).
    pub kind: u32,
    /// The id that the answer carries and that creation wants.
    pub id: u32,
    /// Name without the leading `MIG `.
    pub name: &'static str,
    pub slices: u32,
    /// How many fit on an empty board.
    pub instances: u32,
    pub multiprocessors: u32,
    pub copy_engines: u32,
    pub decoders: u32,
    pub encoders: u32,
    pub jpeg: u32,
    pub ofa: u32,
    pub memory_mib: u64,
    /// First memory slices where it can sit.
    pub starts: &'static [u32],
    /// Memory slices that it takes.
    pub size: u32,
}

impl MigProfile {
    /// Decoders, encoders, JPEG and optical-flow engines: a board has no more than its largest profile.
    pub fn engines(&self) -> [u32; 4] {
        [self.decoders, self.encoders, self.jpeg, self.ofa]
    }
}

/// How a board names GPU instances after the memory slices they sit on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InstanceIds {
    /// Node numbers of a binary tree over the slices, left to right (Hopper, Blackwell).
    Tree,
    /// The same with the two halves of the board swapped (Ampere).
    TreeSwapped,
}

/// A board model.
#[derive(Debug)]
pub struct Board {
    /// Word in the control file.
    pub key: &'static str,
    pub name: &'static str,
    pub brand: u32,
    pub architecture: u32,
    pub compute: (i32, i32),
    pub memory_mib: u64,
    pub reserved_mib: u64,
    pub bar1_mib: u64,
    pub multiprocessors: u32,
    pub cores: u32,
    pub pci_device: u32,
    pub pci_subsystem: u32,
    pub vbios: &'static str,
    pub part: &'static str,
    pub power_limit_mw: u32,
    pub power_min_mw: u32,
    pub power_idle_mw: u32,
    pub clock_sm: u32,
    pub clock_memory: u32,
    pub bus_width: u32,
    pub pcie_generation: u32,
    pub nvlinks: u32,
    pub nvlink_version: u32,
    /// Remaps rows (Ampere and later) instead of retiring pages.
    pub remaps_rows: bool,
    /// Driver-side unified addressing that the open kernel modules offer.
    pub hmm: bool,
    pub mig: &'static [MigProfile],
    pub slices: MigSlices,
    /// A change of the MIG mode waits for a reset of the board (Ampere).
    pub mig_wants_reset: bool,
    pub instance_ids: InstanceIds,
}

/// What MIG cuts a board into.
#[derive(Clone, Copy, Debug)]
pub struct MigSlices {
    /// Placements count these.
    pub memory: u32,
    pub compute: u32,
}

const EIGHTHS: MigSlices = MigSlices { memory: 8, compute: 7 };

impl Board {
    pub fn mig_capable(&self) -> bool {
        !self.mig.is_empty()
    }
}

/// All boards.
pub static BOARDS: &[&Board] = &[
    &t4::T4,
    &a30::A30,
    &a100::A100_40GB,
    &a100::A100_80GB,
    &hopper::H100,
    &hopper::H200,
    &b200::B200,
    &rtx::RTX_PRO_6000,
    &l40s::L40S,
];

/// The board behind a profile word.
pub fn find(key: &str) -> Option<&'static Board> {
    let key = match key {
        "a100-80" => "a100-80gb",
        "a100-40" => "a100-40gb",
        other => other,
    };
    BOARDS.iter().copied().find(|b| b.key.eq_ignore_ascii_case(key))
}

/// The numbers of a MIG profile in the order of the columns of the vendor's listing.
#[allow(clippy::too_many_arguments)]
const fn mig(
    kind: u32,
    id: u32,
    name: &'static str,
    slices: u32,
    instances: u32,
    multiprocessors: u32,
    engines: [u32; 5],
    memory_mib: u64,
    starts: &'static [u32],
    size: u32,
) -> MigProfile {
    let [copy_engines, decoders, encoders, jpeg, ofa] = engines;
    MigProfile {
        kind,
        id,
        name,
        slices,
        instances,
        multiprocessors,
        copy_engines,
        decoders,
        encoders,
        jpeg,
        ofa,
        memory_mib,
        starts,
        size,
    }
}

const ONE: &[u32] = &[0, 1, 2, 3, 4, 5, 6];
const ONE_DOUBLE: &[u32] = &[0, 2, 4, 6];
const TWO: &[u32] = &[0, 2, 4];
const HALF: &[u32] = &[0, 4];
const WHOLE: &[u32] = &[0];

/// `NVML_BRAND_NVIDIA`: what all these boards answer since series 470.
const BRAND_NVIDIA: u32 = 14;
