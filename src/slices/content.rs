//! The node's GPUs as slice contents.

use std::collections::BTreeSet;

use k8s_openapi::api::resource::v1::{CounterSet, Device as ApiDevice};

use super::{COUNTER_SETS_PER_SLICE, DEVICES_PER_SLICE, PublishOptions, device, partition};
use crate::model::gpu::{Device, Gpu, MigMode, NodeGpus};
use crate::model::names::{DeviceName, NodeName, PoolName};
use crate::slices::Counters;

/// What one slice of this node's pool lists.
#[derive(Debug, Clone, PartialEq)]
pub struct SliceContent {
    pub node: NodeName,
    /// The node's name, as NVIDIA's driver has it.
    pub pool: PoolName,
    pub devices: Vec<ApiDevice>,
    /// In a slice without devices: what devices of the pool consume (KEP-4815).
    pub counters: Vec<CounterSet>,
}

/// The slices to publish: sorted, stable, at most [`DEVICES_PER_SLICE`] devices each, at least one slice
/// (an empty pool is published as a slice without devices, so that it is seen to be empty). Counter sets follow in slices
/// of their own. Where the API server does not keep counters, what may be made of a board is not published: it would
/// look as if all of it could be had at once. The board itself is, for our controller, which keeps books of its own.
///
/// A GPU that is not healthy stays listed: pods that use it keep their device, kubelet learns of its health
/// from the health stream, and a taint keeps others off.
pub fn desired(gpus: &NodeGpus, node: &NodeName, how: PublishOptions<'_>) -> Vec<SliceContent> {
    let slice = |devices: Vec<ApiDevice>, counters: Vec<CounterSet>| SliceContent {
        node: node.clone(),
        pool: PoolName::Published(node.clone()),
        devices,
        counters,
    };
    let counters: Vec<CounterSet> = match how.counters {
        Counters::NotKept => Vec::new(),
        Counters::Kept => gpus.gpus.iter().filter_map(partition::counter_set).collect(),
    };
    let has_set = |gpu: &Gpu| counters.iter().any(|counters| counters.name == partition::set_name(gpu));
    let is_listed = |one: &Device<'_>| match one {
        Device::Place { parent, .. } => has_set(parent),
        Device::Parent(gpu) => {
            device::cut_of(gpu).is_some() && (how.counters == Counters::NotKept || has_set(gpu))
        }
        Device::Whole(_) | Device::Mig { .. } => true,
    };
    let devices = in_order(gpus).into_iter().filter(is_listed);
    let devices: Vec<ApiDevice> = devices.map(|one| device::published(&gpus.driver, one, how)).collect();
    if devices.is_empty() {
        return vec![slice(Vec::new(), Vec::new())];
    }
    let mut slices: Vec<_> =
        devices.chunks(DEVICES_PER_SLICE).map(|chunk| slice(chunk.to_vec(), Vec::new())).collect();
    slices.extend(counters.chunks(COUNTER_SETS_PER_SLICE).map(|chunk| slice(Vec::new(), chunk.to_vec())));
    slices
}

/// The boards that are carved on demand and that our controller does not see, each in words.
pub fn unseen_parents(gpus: &NodeGpus) -> Vec<String> {
    let unseen = gpus.gpus.iter().filter(|gpu| match &gpu.mig {
        MigMode::OnDemand(cut) => !cut.places.is_empty() && device::cut_of(gpu).is_none(),
        MigMode::Off | MigMode::On(_) => false,
    });
    let words = |gpu: &Gpu| {
        format!(
            "GPU {} for class shared.gpu.nvidia.com: its memory, or what it can be cut into, does not fit in a published device",
            gpu.uuid
        )
    };
    unseen.map(words).collect()
}

/// By minor number, then placement, whatever the order of the look was. A name is given once. What may be made comes in
/// the order in which it is best made, because the scheduler takes the first that fits: small before large, and from the
/// end of the board, where the largest cannot be.
fn in_order(gpus: &NodeGpus) -> Vec<Device<'_>> {
    let mut devices: Vec<Device<'_>> = gpus.gpus.iter().flat_map(|gpu| gpu.devices()).collect();
    devices.sort_by_cached_key(|device| {
        let place = match device {
            Device::Whole(_) | Device::Parent(_) => (0, 0, 0),
            Device::Mig { mig, .. } => (1, mig.placement.start, 0),
            Device::Place { place, .. } => {
                let at = place.place.placement;
                (2, at.size, u32::MAX - at.start)
            }
        };
        (device.gpu().minor, place, device.name(), device.uuid().clone())
    });
    let mut names: BTreeSet<DeviceName> = BTreeSet::new();
    devices.retain(|device| names.insert(device.name()));
    devices
}

#[cfg(test)]
pub(super) mod tests {
    use std::sync::LazyLock;

    use proptest::prelude::*;

    use super::*;
    use crate::model::gpu::{DriverVersions, Health, Memory, MigCapacity, MigDevice, Pci, Placement};
    use crate::model::names::DeviceUuid;
    use crate::model::quantity::Bytes;
    use crate::sharing::{DefaultRequest, SharingPolicy};
    use crate::slices::{Offer, Taints, violations};

    /// As a whole, without taints.
    pub fn whole() -> PublishOptions<'static> {
        static NONE: Taints = Taints::new();
        static POLICY: LazyLock<SharingPolicy> = LazyLock::new(SharingPolicy::default);
        PublishOptions { offer: Offer::WholeOnly(&POLICY), taints: &NONE, counters: Counters::NotKept }
    }

    /// In shares, without taints.
    pub fn shared(policy: &SharingPolicy) -> PublishOptions<'_> {
        PublishOptions { offer: Offer::Shares(policy), ..whole() }
    }

    pub fn gpu(minor: u32) -> Gpu {
        Gpu {
            uuid: DeviceUuid::new(format!("GPU-00000000-0000-0000-0000-{minor:012}")),
            minor,
            product_name: "NVIDIA H100 80GB HBM3".to_owned(),
            brand: "Nvidia".to_owned(),
            architecture: "Hopper".to_owned(),
            compute_capability: (9, 0),
            memory: Memory::Known { total: Bytes(80 << 30), reserved: Bytes::from_mib(600) },
            multiprocessors: Some(132),
            addressing_mode: Some("HMM".to_owned()),
            pci: Pci {
                bus_id: format!("0000:{:02x}:00.0", minor + 0x10),
                root: Some("pci0000:15".to_owned()),
                numa_node: Some(1),
            },
            mig: MigMode::Off,
            health: Health::Healthy,
        }
    }

    pub fn node_gpus(count: u32) -> NodeGpus {
        NodeGpus {
            driver: DriverVersions { driver: "550.163.01".to_owned(), cuda: "12.4".to_owned() },
            gpus: (0..count).map(gpu).collect(),
        }
    }

    pub fn mig(start: u32, size: u32) -> MigDevice {
        MigDevice {
            uuid: DeviceUuid::new(format!("MIG-{start}")),
            profile: "1g.10gb".to_owned(),
            gpu_instance: start,
            compute_instance: 0,
            profile_id: 19,
            placement: Placement { start, size },
            capacity: MigCapacity {
                memory: Bytes::from_mib(9728),
                multiprocessors: 16,
                copy_engines: 1,
                decoders: 1,
                ..MigCapacity::default()
            },
        }
    }

    fn names(slices: &[SliceContent]) -> Vec<Vec<String>> {
        slices.iter().map(|slice| slice.devices.iter().map(|device| device.name.clone()).collect()).collect()
    }

    #[test]
    fn gpus_are_listed_by_number() {
        let mut gpus = node_gpus(12);
        gpus.gpus.reverse();
        let slices = desired(&gpus, &NodeName::new("node-a"), whole());
        let expected: Vec<_> = (0..12).map(|minor| format!("gpu-{minor}")).collect();
        assert_eq!(names(&slices), [expected]);
        assert_eq!(slices[0].pool.to_string(), "node-a");
    }

    #[test]
    fn no_gpu_is_one_empty_slice() {
        assert_eq!(
            names(&desired(&NodeGpus::default(), &NodeName::new("n"), whole())),
            [Vec::<String>::new()]
        );
    }

    #[test]
    fn more_than_64_devices_take_more_slices() {
        let mut gpus = node_gpus(16);
        for gpu in &mut gpus.gpus {
            gpu.mig = MigMode::On((0..7).rev().map(|start| mig(start, 1)).collect());
        }
        let slices = desired(&gpus, &NodeName::new("n"), whole());
        assert_eq!(slices.iter().map(|slice| slice.devices.len()).collect::<Vec<_>>(), [64, 48]);
        assert_eq!(slices[0].devices[0].name, "gpu-0-mig-1g10gb-19-0");
        assert_eq!(slices[1].devices[47].name, "gpu-15-mig-1g10gb-19-6");
        assert_eq!(violations(&slices), []);
    }

    #[test]
    fn an_unhealthy_gpu_stays_listed() {
        let mut gpus = node_gpus(2);
        gpus.gpus[1].health = Health::Unhealthy("Xid 79".to_owned());
        assert_eq!(
            desired(&gpus, &NodeName::new("n"), whole()),
            desired(&node_gpus(2), &NodeName::new("n"), whole()),
            "health is told by taints, not by what it is"
        );
    }

    #[test]
    fn two_boards_of_one_number_give_one_device() {
        let mut gpus = node_gpus(1);
        gpus.gpus.push(gpu(0));
        assert_eq!(names(&desired(&gpus, &NodeName::new("n"), whole())), [["gpu-0"]]);
    }

    prop_compose! {
        fn any_gpu()(
            minor in 0..200_u32,
            text in ".{0,100}",
            version in "[0-9.a-z-]{0,80}",
            total in proptest::option::of(any::<u64>()),
            sms in proptest::option::of(any::<u32>()),
            sizes in proptest::collection::vec((any::<u32>(), any::<u32>()), 0..10),
            capability in any::<(u32, u32)>(),
            whole in any::<bool>(),
            reserved in prop_oneof![Just(0), any::<u64>()],
        ) -> (Gpu, String) {
            let mut gpu = gpu(minor);
            gpu.product_name.clone_from(&text);
            gpu.brand = text.clone();
            gpu.pci.bus_id = text.clone();
            gpu.addressing_mode = Some(text);
            gpu.multiprocessors = sms;
            gpu.compute_capability = capability;
            gpu.memory = match total {
                Some(total) => Memory::Known { total: Bytes(total), reserved: Bytes(reserved) },
                None => Memory::Unknown,
            };
            if !whole {
                gpu.mig = MigMode::On(sizes.into_iter().map(|(start, size)| mig(start, size)).collect());
            }
            (gpu, version)
        }
    }

    proptest! {
        /// Whatever NVML says, the API server takes it.
        #[test]
        fn whatever_is_found_can_be_published(
            found in proptest::collection::vec(any_gpu(), 0..20),
            slots_per_share in any::<u32>(),
            server_memory in prop_oneof![Just(0), any::<u64>()],
            whole in any::<bool>(),
        ) {
            let versions = found.first().map_or(String::new(), |(_, version)| version.clone());
            let gpus = NodeGpus {
                driver: DriverVersions { driver: versions.clone(), cuda: versions },
                gpus: found.into_iter().map(|(gpu, _)| gpu).collect(),
            };
            let default_request = if whole { DefaultRequest::Whole } else { DefaultRequest::Nothing };
            let server_memory = Bytes(server_memory);
            let policy =
                SharingPolicy { server_memory, slots_per_share, default_request, ..SharingPolicy::default() };
            let slices = desired(&gpus, &NodeName::new("node-a"), shared(&policy));
            prop_assert_eq!(violations(&slices), []);
            let how = PublishOptions { offer: Offer::WholeOnly(&policy), ..self::whole() };
            let slices = desired(&gpus, &NodeName::new("node-a"), how);
            prop_assert_eq!(violations(&slices), []);
        }
    }
}
