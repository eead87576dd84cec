//! What the node plugin says of itself at `/state`, read back. Parts that are missing count as not known,
//! so that a state written by another release can be shown as well.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::inventory::Inventory;
use crate::ledger::Intent;
use crate::model::names::{DeviceName, DeviceUuid};
use crate::slices::Offered;
use crate::supervisor::protocol::DaemonState;

/// The parts that people are shown; `node::state` writes them.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct NodeState {
    pub node: NodeIdentity,
    pub inventory: Inventory,
    pub discovery: DiscoveryLooks,
    pub slices: Published,
    #[serde(rename = "ailments")]
    pub device_faults: Vec<DeviceFault>,
    pub kubelet: Kubelet,
    pub claims: Vec<RecordedClaim>,
    /// MPS daemons, while claims need them.
    pub mps: Vec<DaemonState>,
    pub toolkit: Toolkit,
    /// MIG modes that were switched on for claims.
    #[serde(rename = "migModes")]
    pub mig_modes: Vec<MigModeOn>,
}

/// NVIDIA's container toolkit.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct Toolkit {
    /// It is not where an administrator said.
    pub missing: Option<String>,
}

/// A MIG mode that was switched on for claims. Times in seconds since 1970.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MigModeOn {
    pub gpu: DeviceUuid,
    pub since: u64,
    /// None while claims have MIG devices of the GPU.
    pub off_at: Option<u64>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct NodeIdentity {
    pub name: String,
    pub version: String,
    pub commit: String,
}

/// How discovery is doing.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct DiscoveryLooks {
    pub failures_in_a_row: u32,
    pub last_look_seconds_ago: Option<f64>,
    pub last_error: Option<String>,
    pub left_out: Vec<String>,
    /// From the end of the last look on.
    pub next_look_in_seconds: f64,
    pub stuck_threads: usize,
}

/// Something that is wrong with devices.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct DeviceFault {
    pub devices: Vec<DeviceName>,
    pub effect: String,
    /// Seconds since 1970.
    pub since: i64,
    pub words: String,
}

/// What has become of the ResourceSlices.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Published {
    pub phase: String,
    pub error: Option<String>,
    pub generation: i64,
    pub slices: usize,
    pub devices: usize,
    pub dropped: Option<String>,
    /// How each board is offered.
    pub offered: BTreeMap<DeviceName, Offered>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct Kubelet {
    pub registration: String,
    pub reason: Option<String>,
}

/// A claim with a ledger record.
#[derive(Debug, Clone, Deserialize)]
pub struct RecordedClaim {
    /// `Applying(<step>)`, `Ready` or `Releasing`.
    pub phase: String,
    pub intent: Intent,
}
