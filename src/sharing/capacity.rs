//! The capacity of a GPU that may be granted.

use thiserror::Error;

use crate::model::gpu::{Gpu, Memory, MigMode};
use crate::model::quantity::Bytes;
pub use crate::model::selector::GpuSelector;
use crate::model::share::{DaemonScope, Isolation};

/// Names of the capacities: bytes, percent, and blocks of client slots.
pub const MEMORY: &str = "memory";
pub const COMPUTE: &str = "compute";
pub const SHARES: &str = "shares";

/// Names of the attributes of a board that can be shared: the rung (a word), and for all shares together
/// whole MiB, blocks of client slots, and client processes in one block. Attributes and not capacities,
/// because API servers without KEP-5075 keep them too, and because a capacity would be consumed.
pub const ISOLATION: &str = "isolation";
pub const GRANTABLE_MIB: &str = "grantableMemoryMiB";
pub const SLOTS: &str = "shareSlots";
pub const PROCESSES_PER_SLOT: &str = "processesPerSlot";
/// Whom one MPS daemon of the board serves: `gpu` or `share`.
pub const DAEMON: &str = "mpsDaemon";

/// Client contexts that an MPS server takes on one device: 48, 60 from CUDA 13 on (MPS guide, "Limits").
pub const CLIENT_SLOTS: u32 = 48;

/// Which boards are shared on this node, and how they are counted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharingPolicy {
    /// Boards that are only given whole.
    pub exclusive: Vec<GpuSelector>,
    /// Kept back on each board for the MPS server, or for all of its servers, beside what the driver keeps for itself.
    pub server_memory: Bytes,
    /// Client processes in one block; a share has one block unless it asks for more.
    pub slots_per_share: u32,
    pub default_request: DefaultRequest,
    pub shm: ShmScope,
    /// Of boards that have no share yet.
    pub daemon: DaemonScope,
}

/// Of one of several MPS servers on a board; 66 MiB each were seen on an H100 (E27 of tests/gpu).
const EACH_SERVER: Bytes = Bytes::from_mib(80);

impl SharingPolicy {
    /// What MPS servers may take of a board that has so many blocks of client slots.
    fn servers(&self, slots: u32) -> Bytes {
        match self.daemon {
            DaemonScope::Gpu => self.server_memory,
            DaemonScope::Share => {
                self.server_memory.max(Bytes(EACH_SERVER.0.saturating_mul(u64::from(slots))))
            }
        }
    }
}

impl Default for SharingPolicy {
    fn default() -> Self {
        Self {
            exclusive: Vec::new(),
            server_memory: Bytes::from_mib(512),
            slots_per_share: 3,
            default_request: DefaultRequest::Whole,
            shm: ShmScope::ByDriver,
            daemon: DaemonScope::Gpu,
        }
    }
}

/// What a request gets that names no capacity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DefaultRequest {
    /// The whole board, for itself.
    #[default]
    Whole,
    /// As NVIDIA's driver has it: no memory is counted, and nothing is enforced.
    Nothing,
}

/// Whose memory the programs of a share find at /dev/shm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ShmScope {
    /// Their container's own with drivers from 580 on, else their GPU's.
    #[default]
    ByDriver,
    /// Their container's own, as without a share.
    Container,
    /// One for all shares of their GPU, and for its MPS server.
    Gpu,
}

impl ShmScope {
    /// The first major version of the driver of which it was seen that neither clients of MPS nor its server use
    /// /dev/shm (580.159.04 on an H100: E35 of tests/gpu). Of older ones it is not known.
    const UNUSED_SINCE: u32 = 580;

    /// `driver`: the driver's version, such as 580.159.04.
    pub fn is_the_gpus(self, driver: &str) -> bool {
        match self {
            Self::Container => false,
            Self::Gpu => true,
            Self::ByDriver => {
                let major = driver.split('.').next().and_then(|major| major.parse::<u32>().ok());
                major.is_none_or(|major| major < Self::UNUSED_SINCE)
            }
        }
    }
}

/// What may be granted of a board, over all shares together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shareable {
    /// Whole MiB.
    pub memory: Bytes,
    /// Blocks of client slots.
    pub slots: u32,
    /// Processes in one block.
    pub slots_per_share: u32,
    pub isolation: Isolation,
}

/// Why a board is only given whole.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum NotShareable {
    #[error("the node's configuration does not share it (--exclusive-gpus {0})")]
    Configured(GpuSelector),
    #[error("it is in MIG mode; its MIG devices are its parts")]
    Mig,
    #[error("NVML does not report its memory, so nothing could be counted")]
    MemoryUnknown,
    #[error("its memory of {total} MiB is less than what the driver and the MPS server keep for themselves")]
    TooSmall { total: u64 },
    #[error(
        "MPS gives each client limits of its own only from Volta (compute capability 7.0) on; this is {0}.{1}"
    )]
    BeforeVolta(u32, u32),
}

/// The rung that shares of the board stand on.
pub fn rung(gpu: &Gpu) -> Isolation {
    match gpu.compute_capability >= (7, 0) {
        true => Isolation::Mps,
        false => Isolation::None,
    }
}

/// What may be granted of the board: total less the driver's reserve less the MPS server's own.
pub fn shareable(gpu: &Gpu, policy: &SharingPolicy) -> Result<Shareable, NotShareable> {
    if let Some(selector) = policy.exclusive.iter().find(|selector| selector.matches(gpu)) {
        return Err(NotShareable::Configured(selector.clone()));
    }
    if gpu.mig != MigMode::Off {
        return Err(NotShareable::Mig);
    }
    let isolation = rung(gpu);
    if isolation == Isolation::None {
        return Err(NotShareable::BeforeVolta(gpu.compute_capability.0, gpu.compute_capability.1));
    }
    let Memory::Known { total, reserved } = gpu.memory else { return Err(NotShareable::MemoryUnknown) };
    let slots_per_share = policy.slots_per_share.clamp(1, CLIENT_SLOTS / 2);
    let slots = CLIENT_SLOTS / slots_per_share;
    let kept = reserved.0.saturating_add(policy.servers(slots).0);
    let memory = Bytes::from_mib(Bytes(total.0.saturating_sub(kept)).mib_floor());
    // A step of 1 MiB needs room for two values.
    if memory < Bytes::from_mib(2) {
        return Err(NotShareable::TooSmall { total: total.mib_floor() });
    }
    Ok(Shareable { memory, slots, slots_per_share, isolation })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::gpu::{Health, Pci};

    fn gpu() -> Gpu {
        Gpu {
            uuid: "GPU-1".into(),
            minor: 1,
            product_name: "NVIDIA H100 80GB HBM3".into(),
            brand: "Nvidia".into(),
            architecture: "Hopper".into(),
            compute_capability: (9, 0),
            memory: Memory::Known { total: Bytes::from_mib(81_559), reserved: Bytes::from_mib(551) },
            multiprocessors: Some(132),
            addressing_mode: None,
            pci: Pci::default(),
            mig: MigMode::Off,
            health: Health::Healthy,
        }
    }

    #[test]
    fn what_the_driver_and_the_server_keep_is_not_granted() {
        let found = shareable(&gpu(), &SharingPolicy::default()).unwrap();
        assert_eq!(found.memory, Bytes::from_mib(81_559 - 551 - 512));
        assert_eq!((found.slots, found.slots_per_share, found.isolation), (16, 3, Isolation::Mps));
    }

    #[test]
    fn where_each_share_has_a_daemon_all_servers_have_room() {
        let own = SharingPolicy { daemon: DaemonScope::Share, ..SharingPolicy::default() };
        assert_eq!(shareable(&gpu(), &own).unwrap().memory, Bytes::from_mib(81_559 - 551 - 16 * 80));
        let much = SharingPolicy { server_memory: Bytes::from_mib(4096), ..own };
        assert_eq!(shareable(&gpu(), &much).unwrap().memory, Bytes::from_mib(81_559 - 551 - 4096));
    }

    #[test]
    fn odd_bytes_are_rounded_down_to_whole_mib() {
        let total = Bytes(Bytes::from_mib(1000).0 + 5);
        let gpu = Gpu { memory: Memory::Known { total, reserved: Bytes(7) }, ..gpu() };
        let found = shareable(&gpu, &SharingPolicy::default()).unwrap();
        assert_eq!(found.memory, Bytes::from_mib(1000 - 512 - 1));
    }

    #[test]
    fn boards_that_cannot_or_must_not_be_shared_say_why() {
        let policy = |exclusive: &[&str]| SharingPolicy {
            exclusive: exclusive.iter().map(|text| text.parse().unwrap()).collect(),
            ..SharingPolicy::default()
        };
        for selector in ["all", "1", "GPU-1", "h100"] {
            let refused = shareable(&gpu(), &policy(&["7", selector])).unwrap_err();
            assert!(refused.to_string().contains(selector), "{refused}");
        }
        assert!(shareable(&gpu(), &policy(&["2", "GPU-2", "T4"])).is_ok());
        let tiny = Memory::Known { total: Bytes::from_mib(513), reserved: Bytes(0) };
        for (gpu, word) in [
            (Gpu { mig: MigMode::On(vec![]), ..gpu() }, "MIG"),
            (Gpu { memory: Memory::Unknown, ..gpu() }, "NVML"),
            (Gpu { memory: tiny, ..gpu() }, "513 MiB"),
            (Gpu { compute_capability: (6, 1), ..gpu() }, "6.1"),
        ] {
            let refused = shareable(&gpu, &SharingPolicy::default()).unwrap_err().to_string();
            assert!(refused.contains(word), "{refused}");
        }
    }
}
