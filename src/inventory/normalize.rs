//! Sorts the devices, and keeps one device per name and per UUID.

use std::collections::BTreeSet;

use crate::model::gpu::{Device, Gpu, MigMode, OnDemand};
use crate::model::names::{DeviceName, DeviceUuid};

/// Sorts the GPUs by minor number and their MIG devices by name, and keeps the first of those that
/// share a name or a UUID. `left_out` gets a text for each device that was removed.
pub(super) fn normalize(mut gpus: Vec<Gpu>, left_out: &mut Vec<String>) -> Vec<Gpu> {
    // A driver that lists one board twice may tell different things of it: any fixed order will do.
    gpus.sort_by(|a, b| order(a).cmp(&order(b)).then_with(|| format!("{a:?}").cmp(&format!("{b:?}"))));
    let mut taken = TakenNames::default();
    gpus.retain(|gpu| taken.take(DeviceName::whole(gpu.minor), &gpu.uuid, left_out));
    for index in 0..gpus.len() {
        normalize_mig(&mut gpus, index, &mut taken, left_out);
    }
    gpus
}

/// By minor number; the rest only decides who is first of two with the same number.
fn order(gpu: &Gpu) -> (u32, &str, &DeviceUuid) {
    (gpu.minor, &gpu.pci.bus_id, &gpu.uuid)
}

fn normalize_mig(gpus: &mut [Gpu], index: usize, taken: &mut TakenNames, left_out: &mut Vec<String>) {
    let Some(gpu) = gpus.get_mut(index) else { return };
    let (MigMode::On(devices) | MigMode::OnDemand(OnDemand { devices, .. })) = &gpu.mig else { return };
    let mut named: Vec<_> =
        devices.iter().map(|mig| (Device::Mig { parent: gpu, mig }.name(), mig.clone())).collect();
    named.sort_by(|(name_a, a), (name_b, b)| {
        (name_a, a.gpu_instance, a.compute_instance, &a.uuid).cmp(&(
            name_b,
            b.gpu_instance,
            b.compute_instance,
            &b.uuid,
        ))
    });
    named.retain(|(name, mig)| taken.take(name.clone(), &mig.uuid, left_out));
    let named = named.into_iter().map(|(_, mig)| mig).collect();
    match &mut gpu.mig {
        MigMode::Off => {}
        MigMode::On(devices) | MigMode::OnDemand(OnDemand { devices, .. }) => *devices = named,
    }
}

#[derive(Default)]
struct TakenNames {
    names: BTreeSet<DeviceName>,
    uuids: BTreeSet<DeviceUuid>,
}

impl TakenNames {
    fn take(&mut self, name: DeviceName, uuid: &DeviceUuid, left_out: &mut Vec<String>) -> bool {
        if self.names.contains(&name) {
            left_out.push(format!("{uuid}: another device is already called {name}"));
            return false;
        }
        if self.uuids.contains(uuid) {
            left_out.push(format!("{name}: another device already has the UUID {uuid}"));
            return false;
        }
        self.uuids.insert(uuid.clone());
        self.names.insert(name)
    }
}
