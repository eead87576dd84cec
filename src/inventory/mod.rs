//! The node's GPUs as they are believed to be, folded from one look after another.
//!
//! * [`Inventory`]: what is known; the publisher and the preparer read this
//! * [`Look`]: what one complete look at the node found, and what failed in it
//! * [`InventoryTracker`]: the inventory with the memory that tells a short failure from a loss
//! * [`Change`]: what became different, in words for logs and events
//! * [`DeviceFaults`]: what is wrong with GPUs, computed from Xids, looks and MPS daemons; [`xid()`]: what an
//!   Xid says of its board
//! * [`labels`]: the node's labels as GPU feature discovery has them
//!
//! Pure. May import: model. May name: serde.

mod change;
mod claimed;
mod device_fault;
mod fold;
pub mod labels;
mod normalize;
#[cfg(test)]
mod tests;
mod xid;

use serde::{Deserialize, Serialize};

use crate::model::gpu::NodeGpus;
use crate::model::names::DeviceUuid;

pub use change::Change;
pub use claimed::{Claimed, ClaimedAround, ClaimedPart, settle};
pub use device_fault::{
    DaemonsDown, DeviceFault, DeviceFaults, DriverSession, FaultEffect, FaultKind, FaultLocation, ShmFull,
    Xid,
};
pub use fold::{ABSENT_LOOKS, FORGET_AFTER, InventoryTracker, UNHEALTHY_AFTER};
pub use xid::{XidClass, xid};

/// What is known of the node's GPUs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
pub enum Inventory {
    /// No look has ended yet.
    #[default]
    Unknown,
    /// The GPUs, sorted by minor number; device names and UUIDs are unique.
    Found(NodeGpus),
    /// There is nothing to work with, and why: the pool is published empty.
    Unavailable { reason: String },
}

/// What one look at the node found.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Look {
    /// What could be read, in any order.
    pub gpus: NodeGpus,
    /// GPUs that NVML counts but that could not be read.
    pub failed: Vec<FailedGpu>,
    /// Devices that were passed over, in words.
    pub left_out: Vec<String>,
}

/// A GPU that NVML counts but that could not be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FailedGpu {
    /// NVML's index.
    pub index: u32,
    /// Where the look got as far as that.
    pub uuid: Option<DeviceUuid>,
    /// What failed, in words.
    pub reason: String,
    /// NVML says that it has left the bus (`NVML_ERROR_GPU_IS_LOST`).
    pub lost: bool,
}
