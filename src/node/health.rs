//! What kubelet shows of the devices' health: every allocatable device, as the inventory has it.

use std::convert::Infallible;

use tokio::sync::watch;

use crate::inventory::Inventory;
use crate::kubelet::DeviceHealth;
use crate::model::gpu::Health;
use crate::model::names::PoolName;
use crate::ops::drain::Shutdown;

/// The complete set of devices with their health.
pub fn of(inventory: &Inventory, pool: &PoolName) -> Vec<DeviceHealth> {
    let Inventory::Found(gpus) = inventory else { return Vec::new() };
    let devices = gpus.devices();
    devices
        .into_iter()
        .map(|(name, device)| DeviceHealth {
            pool: pool.clone(),
            device: name,
            state: match &device.gpu().health {
                Health::Healthy => Ok(()),
                Health::Unhealthy(reason) => Err(reason.clone()),
            },
        })
        .collect()
}

/// Keeps `health` up to date with the inventory.
pub async fn run(
    mut inventory: watch::Receiver<Inventory>,
    pool: PoolName,
    health: watch::Sender<Vec<DeviceHealth>>,
    shutdown: Shutdown,
) -> Result<(), Infallible> {
    loop {
        let now = of(&inventory.borrow_and_update(), &pool);
        health.send_if_modified(|before| {
            let changed = *before != now;
            *before = now;
            changed
        });
        tokio::select! {
            () = shutdown.graceful() => return Ok(()),
            changed = inventory.changed() => if changed.is_err() {
                // Discovery has ended: so does the process, or is about to.
                shutdown.graceful().await;
                return Ok(());
            }
        }
    }
}
