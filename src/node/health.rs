//! The health of every allocatable device, as kubelet shows it: the device's health by inventory and device faults.

use std::borrow::Cow;
use std::convert::Infallible;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::inventory::{DeviceFault, DeviceFaults, FaultEffect, FaultLocation, Inventory};
use crate::kubelet::DeviceHealth;
use crate::model::gpu::Device;
use crate::model::names::PoolName;

/// The complete set of devices with their health. What is only told leaves a device healthy.
pub fn of(inventory: &Inventory, device_faults: &DeviceFaults, pool: &PoolName) -> Vec<DeviceHealth> {
    let Inventory::Found(gpus) = inventory else { return Vec::new() };
    let devices = gpus.devices();
    devices
        .into_iter()
        .map(|(name, device)| DeviceHealth {
            pool: pool.clone(),
            device: name,
            state: state(&device, device_faults),
        })
        .collect()
}

fn state(device: &Device<'_>, device_faults: &DeviceFaults) -> Result<(), String> {
    // Of a board that is carved pods have parts, which kubelet cannot tell apart: what is wrong with one of them is not
    // told to all.
    let concerns_all = |fault: &DeviceFault| match device {
        Device::Parent(_) => matches!(fault.location, FaultLocation::Board(_)),
        Device::Whole(gpu) if gpu.is_whole_or_cut() => {
            matches!(fault.location, FaultLocation::Board(_) | FaultLocation::Device(_))
        }
        Device::Whole(_) | Device::Mig { .. } | Device::Place { .. } => true,
    };
    let is_reported = |fault: &&DeviceFault| {
        fault.kind.is_malfunction() && fault.kind.effect() > FaultEffect::ReportOnly && concerns_all(fault)
    };
    let found = device_faults.of(device).into_iter().filter(is_reported);
    let mut words: Vec<Cow<'_, str>> = found.map(|fault| fault.words.as_str().into()).collect();
    if let Device::Place { parent, place } = device {
        let missing = parent.missing().iter().filter(|missing| missing.place == place.place);
        words.extend(missing.map(|missing| missing.words().into()));
    }
    // Reported here without waiting for the device faults to be published.
    if let Some(reason) = device.gpu().health.problem()
        && !words.iter().any(|known| known == reason)
    {
        words.push(reason.into());
    }
    if words.is_empty() { Ok(()) } else { Err(words.join("; ")) }
}

/// Keeps `health` up to date with inventory and device faults.
pub async fn run(
    mut inventory: watch::Receiver<Inventory>,
    mut device_faults: watch::Receiver<DeviceFaults>,
    pool: PoolName,
    health: watch::Sender<Vec<DeviceHealth>>,
    stop: CancellationToken,
) -> Result<(), Infallible> {
    loop {
        let now = of(&inventory.borrow_and_update(), &device_faults.borrow_and_update(), &pool);
        health.send_if_modified(|before| {
            let changed = *before != now;
            *before = now;
            changed
        });
        tokio::select! {
            () = stop.cancelled() => return Ok(()),
            Ok(()) = device_faults.changed() => {}
            changed = inventory.changed() => if changed.is_err() {
                // Discovery has ended: so does the process, or is about to.
                stop.cancelled().await;
                return Ok(());
            }
        }
    }
}
