//! What became different between two inventories.

use std::fmt;

use crate::model::gpu::{Gpu, MigDevice, MigMode, NodeGpus};
use crate::model::names::DeviceUuid;

use super::Inventory;

/// A difference, for logs, events and triggers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    GpuAppeared {
        minor: u32,
        uuid: DeviceUuid,
        product: String,
    },
    GpuLost {
        minor: u32,
        uuid: DeviceUuid,
    },
    GpuUnhealthy {
        minor: u32,
        uuid: DeviceUuid,
        reason: String,
    },
    GpuHealthy {
        minor: u32,
        uuid: DeviceUuid,
    },
    /// Facts of a GPU that is still there: which ones.
    GpuChanged {
        minor: u32,
        uuid: DeviceUuid,
        facts: Vec<&'static str>,
    },
    /// MIG was switched, or MIG devices came and went: profiles at their first memory slice.
    MigChanged {
        minor: u32,
        uuid: DeviceUuid,
        appeared: Vec<String>,
        gone: Vec<String>,
    },
    DriverChanged {
        from: String,
        to: String,
    },
    /// A device that NVML tells of is not listed.
    LeftOut {
        words: String,
    },
    Unavailable {
        reason: String,
    },
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::GpuAppeared { minor, uuid, product } => {
                write!(f, "GPU {minor} ({uuid}, {product}) appeared")
            }
            Self::GpuLost { minor, uuid } => write!(f, "GPU {minor} ({uuid}) is gone"),
            Self::GpuUnhealthy { minor, uuid, reason } => {
                write!(f, "GPU {minor} ({uuid}) is unhealthy: {reason}")
            }
            Self::GpuHealthy { minor, uuid } => write!(f, "GPU {minor} ({uuid}) is healthy again"),
            Self::GpuChanged { minor, uuid, facts } => {
                write!(f, "GPU {minor} ({uuid}) has a different {}", facts.join(", "))
            }
            Self::MigChanged { minor, uuid, appeared, gone } => {
                write!(f, "MIG devices of GPU {minor} ({uuid}): new {}, gone {}", list(appeared), list(gone))
            }
            Self::DriverChanged { from, to } => write!(f, "driver {from} was replaced by {to}"),
            Self::LeftOut { words } => write!(f, "left out: {words}"),
            Self::Unavailable { reason } => write!(f, "no GPUs can be offered: {reason}"),
        }
    }
}

fn list(words: &[String]) -> String {
    if words.is_empty() { "none".to_owned() } else { words.join(" ") }
}

/// Everything that differs, in the order of the GPUs.
pub(super) fn changes(before: &Inventory, after: &Inventory) -> Vec<Change> {
    let nothing = NodeGpus::default();
    let (old, new) = match (before, after) {
        (_, Inventory::Unknown) => return Vec::new(),
        (Inventory::Unavailable { reason: old }, Inventory::Unavailable { reason }) if old == reason => {
            return Vec::new();
        }
        (_, Inventory::Unavailable { reason }) => {
            return vec![Change::Unavailable { reason: reason.clone() }];
        }
        (Inventory::Found(old), Inventory::Found(new)) => (old, new),
        (_, Inventory::Found(new)) => (&nothing, new),
    };
    let mut changes = Vec::new();
    if !old.driver.driver.is_empty() && old.driver != new.driver {
        changes
            .push(Change::DriverChanged { from: old.driver.driver.clone(), to: new.driver.driver.clone() });
    }
    for gpu in &old.gpus {
        if !new.gpus.iter().any(|g| g.uuid == gpu.uuid) {
            changes.push(Change::GpuLost { minor: gpu.minor, uuid: gpu.uuid.clone() });
        }
    }
    for gpu in &new.gpus {
        match old.gpus.iter().find(|g| g.uuid == gpu.uuid) {
            Some(old) => of_one(old, gpu, &mut changes),
            None => appeared(gpu, &mut changes),
        }
    }
    changes
}

fn appeared(gpu: &Gpu, changes: &mut Vec<Change>) {
    changes.push(Change::GpuAppeared {
        minor: gpu.minor,
        uuid: gpu.uuid.clone(),
        product: gpu.product_name.clone(),
    });
    if let Some(reason) = gpu.health.problem() {
        let (minor, uuid) = (gpu.minor, gpu.uuid.clone());
        changes.push(Change::GpuUnhealthy { minor, uuid, reason: reason.to_owned() });
    }
}

fn of_one(old: &Gpu, new: &Gpu, changes: &mut Vec<Change>) {
    let (minor, uuid) = (new.minor, &new.uuid);
    match (old.health.problem(), new.health.problem()) {
        (None, Some(reason)) => {
            changes.push(Change::GpuUnhealthy { minor, uuid: uuid.clone(), reason: reason.to_owned() });
        }
        (Some(_), None) => {
            changes.push(Change::GpuHealthy { minor, uuid: uuid.clone() });
        }
        _ => {}
    }
    let facts = facts(old, new);
    if !facts.is_empty() {
        changes.push(Change::GpuChanged { minor, uuid: uuid.clone(), facts });
    }
    if old.mig != new.mig {
        let (before, after) = (mig_devices(old), mig_devices(new));
        let missing_in = |all: &[MigDevice], mig: &MigDevice| !all.iter().any(|m| m == mig);
        let appeared = after.iter().filter(|m| missing_in(before, m)).map(place).collect();
        let gone = before.iter().filter(|m| missing_in(after, m)).map(place).collect();
        changes.push(Change::MigChanged { minor, uuid: uuid.clone(), appeared, gone });
    }
}

fn facts(old: &Gpu, new: &Gpu) -> Vec<&'static str> {
    [
        ("minor number", old.minor != new.minor),
        ("product name", old.product_name != new.product_name),
        ("brand", old.brand != new.brand),
        ("architecture", old.architecture != new.architecture),
        ("compute capability", old.compute_capability != new.compute_capability),
        ("memory", old.memory != new.memory),
        ("multiprocessor count", old.multiprocessors != new.multiprocessors),
        ("addressing mode", old.addressing_mode != new.addressing_mode),
        ("place on the PCI bus", old.pci != new.pci),
    ]
    .into_iter()
    .filter_map(|(fact, differs)| differs.then_some(fact))
    .collect()
}

fn mig_devices(gpu: &Gpu) -> &[MigDevice] {
    match &gpu.mig {
        MigMode::Off => &[],
        MigMode::On(devices) => devices,
        MigMode::OnDemand(cut) => &cut.devices,
    }
}

fn place(mig: &MigDevice) -> String {
    format!("{}@{}", mig.profile, mig.placement.start)
}
