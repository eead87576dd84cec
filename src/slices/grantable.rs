//! A published board, read back: what may be granted of it, whatever the API server kept.

use std::sync::Arc;

use k8s_openapi::api::resource::v1::{Device as ApiDevice, DeviceAttribute};

use crate::model::names::{DeviceName, DeviceUuid};
use crate::model::quantity::Bytes;
use crate::model::share::{DaemonScope, Isolation};
use crate::sharing::{DAEMON, GRANTABLE_MIB, ISOLATION, MIG_PARENT, MigBoard, PROCESSES_PER_SLOT, SLOTS};

/// A board of which our controller can place parts, as its slice has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grantable {
    pub device: DeviceName,
    pub gpu: DeviceUuid,
    pub product: String,
    pub parts: BoardParts,
}

/// What parts a board is given out in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BoardParts {
    Shares(ShareParts),
    Mig(MigParts),
}

/// Of a board that is shared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShareParts {
    /// For all shares together; whole MiB.
    pub memory: Bytes,
    /// Blocks of client slots, for all shares together.
    pub slots: u32,
    /// Client processes in one block.
    pub processes_per_slot: u32,
    pub isolation: Isolation,
    /// Whom MPS daemons of the board serve. Releases that do not say so had one for all of its shares.
    pub daemon: DaemonScope,
    /// True if the API server keeps `shareID` and `consumedCapacity` of the device's results (KEP-5075):
    /// then the scheduler may place shares on it too.
    pub keeps_shares: bool,
}

/// Of a board that is cut into MIG devices on demand.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MigParts {
    pub board: Arc<MigBoard>,
    /// True if the API server keeps counters (KEP-4815): then its MIG devices are published beside it, and the scheduler may
    /// cut them off too.
    pub keeps_counters: bool,
    /// The scheduler gives it whole, too, as long as nothing is cut off it.
    pub given_whole: bool,
}

impl Grantable {
    /// Reads a device of a slice of our driver. `None` if no part of it can be placed: a MIG device, a board
    /// that is only given whole, one that was published by a release without shares, or one of which it is not known for
    /// certain what it can be cut into.
    pub fn of(device: &ApiDevice) -> Option<Self> {
        let attribute = |name: &str| device.attributes.as_ref()?.get(name);
        let text = |name: &str| attribute(name).and_then(|a: &DeviceAttribute| a.string.clone());
        let number = |name: &str| attribute(name).and_then(|a| a.int);
        let count = |name: &str| number(name).and_then(|n| u32::try_from(n).ok());
        let shares = || {
            let rung = text(ISOLATION)?;
            Some(ShareParts {
                memory: Bytes::from_mib(u64::try_from(number(GRANTABLE_MIB)?).ok()?),
                slots: count(SLOTS)?,
                processes_per_slot: count(PROCESSES_PER_SLOT)?,
                isolation: Isolation::ALL.into_iter().find(|known| known.as_str() == rung)?,
                daemon: match text(DAEMON).as_deref() == Some(DaemonScope::Share.as_str()) {
                    true => DaemonScope::Share,
                    false => DaemonScope::Gpu,
                },
                keeps_shares: device.allow_multiple_allocations == Some(true),
            })
        };
        let mig = || {
            let texts = device.attributes.iter().flatten();
            let texts = texts.filter_map(|(name, value)| Some((name.as_str(), value.string.as_deref()?)));
            Some(MigParts {
                board: Arc::new(MigBoard::read(texts)?),
                keeps_counters: device.consumes_counters.as_ref().is_some_and(|all| !all.is_empty()),
                given_whole: text("type").as_deref() != Some(MIG_PARENT),
            })
        };
        Some(Self {
            device: DeviceName::new(&device.name),
            gpu: DeviceUuid::new(text("uuid")?),
            product: text("productName").unwrap_or_default(),
            parts: match text("type").as_deref() {
                Some(MIG_PARENT) => BoardParts::Mig(mig()?),
                // One that is given whole or cut says what it can be cut into, and nothing of shares.
                _ => mig().map(BoardParts::Mig).or_else(|| shares().map(BoardParts::Shares))?,
            },
        })
    }

    /// The rung that parts of it stand on.
    pub fn isolation(&self) -> Isolation {
        match &self.parts {
            BoardParts::Shares(shares) => shares.isolation,
            BoardParts::Mig(_) => Isolation::Mig,
        }
    }

    /// The scheduler may place shares on it too, and its results carry share ids.
    pub fn keeps_shares(&self) -> bool {
        matches!(&self.parts, BoardParts::Shares(shares) if shares.keeps_shares)
    }

    /// MiB that parts of it may come to; of a board that is cut, of its largest MIG device.
    pub fn mib(&self) -> u64 {
        match &self.parts {
            BoardParts::Shares(shares) => shares.memory.mib_floor(),
            BoardParts::Mig(mig) => mig.most_mib(),
        }
    }
}

impl MigParts {
    /// MiB of the largest MIG device.
    pub fn most_mib(&self) -> u64 {
        let all = self.board.profiles.iter().map(|profile| profile.capacity.memory.mib_floor());
        all.max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::super::content::tests::{mig, node_gpus, shared, whole};
    use super::super::{Offer, desired};
    use super::*;
    use crate::model::gpu::MigMode;
    use crate::model::names::NodeName;
    use crate::sharing::SharingPolicy;
    use crate::slices::PublishOptions;

    fn read(gpus: &crate::model::gpu::NodeGpus, how: PublishOptions<'_>) -> Vec<Option<Grantable>> {
        let slices = desired(gpus, &NodeName::new("n"), how);
        slices[0].devices.iter().map(Grantable::of).collect()
    }

    #[test]
    fn what_is_published_is_read_back_on_both_kinds_of_clusters() {
        let policy = SharingPolicy::default();
        let board = |keeps_shares| Grantable {
            device: "gpu-0".into(),
            gpu: "GPU-00000000-0000-0000-0000-000000000000".into(),
            product: "NVIDIA H100 80GB HBM3".into(),
            parts: BoardParts::Shares(ShareParts {
                memory: Bytes::from_mib(80_808),
                slots: 16,
                processes_per_slot: 3,
                isolation: Isolation::Mps,
                daemon: DaemonScope::Gpu,
                keeps_shares,
            }),
        };
        assert_eq!(read(&node_gpus(1), shared(&policy)), [Some(board(true))]);
        assert_eq!(read(&node_gpus(1), whole()), [Some(board(false))]);
    }

    #[test]
    fn what_cannot_be_shared_is_nothing_to_grant_of() {
        let mut gpus = node_gpus(2);
        gpus.gpus[0].mig = MigMode::On(vec![mig(0, 1)]);
        let policy = SharingPolicy { exclusive: vec!["1".parse().unwrap()], ..SharingPolicy::default() };
        assert_eq!(read(&gpus, shared(&policy)), [None, None]);
        assert_eq!(read(&gpus, PublishOptions { offer: Offer::WholeOnly(&policy), ..whole() }), [None, None]);
    }
}
