//! What kubelet shows of the devices' health: every allocatable device, as inventory and ailments have it.

use std::convert::Infallible;

use tokio::sync::watch;

use crate::inventory::{Ailment, Ailments, Effect, Inventory};
use crate::kubelet::DeviceHealth;
use crate::model::gpu::Device;
use crate::model::names::PoolName;
use crate::ops::drain::Shutdown;

/// The complete set of devices with their health. What is only told leaves a device healthy.
pub fn of(inventory: &Inventory, ailments: &Ailments, pool: &PoolName) -> Vec<DeviceHealth> {
    let Inventory::Found(gpus) = inventory else { return Vec::new() };
    let devices = gpus.devices();
    devices
        .into_iter()
        .map(|(name, device)| DeviceHealth {
            pool: pool.clone(),
            device: name,
            state: state(&device, ailments),
        })
        .collect()
}

fn state(device: &Device<'_>, ailments: &Ailments) -> Result<(), String> {
    let ails = |ailment: &&Ailment| ailment.kind.is_fault() && ailment.kind.effect() > Effect::Told;
    let found = ailments.of(device).into_iter().filter(ails);
    let mut words: Vec<&str> = found.map(|ailment| ailment.words.as_str()).collect();
    // Said here without waiting for the ailments to be told.
    if let Some(reason) = device.gpu().health.problem()
        && !words.contains(&reason)
    {
        words.push(reason);
    }
    if words.is_empty() { Ok(()) } else { Err(words.join("; ")) }
}

/// Keeps `health` up to date with inventory and ailments.
pub async fn run(
    mut inventory: watch::Receiver<Inventory>,
    mut ailments: watch::Receiver<Ailments>,
    pool: PoolName,
    health: watch::Sender<Vec<DeviceHealth>>,
    shutdown: Shutdown,
) -> Result<(), Infallible> {
    loop {
        let now = of(&inventory.borrow_and_update(), &ailments.borrow_and_update(), &pool);
        health.send_if_modified(|before| {
            let changed = *before != now;
            *before = now;
            changed
        });
        tokio::select! {
            () = shutdown.graceful() => return Ok(()),
            Ok(()) = ailments.changed() => {}
            changed = inventory.changed() => if changed.is_err() {
                // Discovery has ended: so does the process, or is about to.
                shutdown.graceful().await;
                return Ok(());
            }
        }
    }
}
