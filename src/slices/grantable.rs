//! A published board, read back: what may be granted of it, whatever the API server kept.

use k8s_openapi::api::resource::v1::{Device as ApiDevice, DeviceAttribute};

use crate::model::names::{DeviceName, DeviceUuid};
use crate::model::quantity::Bytes;
use crate::model::share::Isolation;
use crate::sharing::{GRANTABLE_MIB, ISOLATION, PROCESSES_PER_SLOT, SLOTS};

/// A board that shares can be placed on, as its slice has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grantable {
    pub device: DeviceName,
    pub gpu: DeviceUuid,
    pub product: String,
    /// For all shares together; whole MiB.
    pub memory: Bytes,
    /// Blocks of client slots, for all shares together.
    pub slots: u32,
    /// Client processes in one block.
    pub processes_per_slot: u32,
    pub isolation: Isolation,
    /// True if the API server keeps `shareID` and `consumedCapacity` of the device's results (KEP-5075):
    /// then the scheduler may place shares on it too.
    pub keeps_shares: bool,
}

impl Grantable {
    /// Reads a device of a slice of our driver. `None` if shares of it cannot be placed: a MIG device, a board
    /// that is only given whole, or one that was published by a release without shares.
    pub fn of(device: &ApiDevice) -> Option<Self> {
        let attribute = |name: &str| device.attributes.as_ref()?.get(name);
        let text = |name: &str| attribute(name).and_then(|a: &DeviceAttribute| a.string.clone());
        let number = |name: &str| attribute(name).and_then(|a| a.int);
        let count = |name: &str| number(name).and_then(|n| u32::try_from(n).ok());
        let rung = text(ISOLATION)?;
        Some(Self {
            device: DeviceName::new(&device.name),
            gpu: DeviceUuid::new(text("uuid")?),
            product: text("productName").unwrap_or_default(),
            memory: Bytes::from_mib(u64::try_from(number(GRANTABLE_MIB)?).ok()?),
            slots: count(SLOTS)?,
            processes_per_slot: count(PROCESSES_PER_SLOT)?,
            isolation: Isolation::ALL.into_iter().find(|known| known.as_str() == rung)?,
            keeps_shares: device.allow_multiple_allocations == Some(true),
        })
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
            memory: Bytes::from_mib(80_808),
            slots: 16,
            processes_per_slot: 3,
            isolation: Isolation::Mps,
            keeps_shares,
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
