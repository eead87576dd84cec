//! Reads from the ledger which devices are held, by which claims, and which MPS daemons serve them.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Deref;

use tokio::sync::watch;

use crate::ledger::{HoldMode, Intent, Step};
use crate::model::claim::{ClaimRef, PodRef};
use crate::model::names::{ClaimUid, DeviceName, DeviceUuid, PoolName};
use crate::model::share::{Grant, MpsGroup};
use crate::node::store::Store;

/// A device that claims hold: shares of it, or one claim all of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct WatchedDevice {
    /// Its name in the ResourceSlice.
    pub device: DeviceName,
    pub pool: PoolName,
    /// The board that it is, or is a part of.
    pub board: DeviceUuid,
    pub is_mig: bool,
    /// By which of a claim's requests it is held.
    pub requests: BTreeMap<ClaimUid, BTreeSet<String>>,
    pub shares: Vec<(ClaimRef, Grant)>,
    /// Claims that have it for themselves: one, unless the ledger contradicts itself.
    pub alone: Vec<ClaimRef>,
    /// Claims that look at it as administrators: their processes are nobody's tenants.
    pub admins: Vec<ClaimRef>,
    /// Whose daemons serve it.
    pub groups: BTreeSet<MpsGroup>,
}

/// The devices that claims hold, as the ledger said when it was last read.
pub(super) struct HeldDevices {
    devices: BTreeMap<DeviceUuid, WatchedDevice>,
    /// Of the ledger. The sender lives as long as the ledger, which the watchdog keeps.
    changes: watch::Receiver<u64>,
}

impl HeldDevices {
    /// None yet.
    pub fn new(changes: watch::Receiver<u64>) -> Self {
        Self { devices: BTreeMap::new(), changes }
    }

    /// The ledger has changed since it was read.
    pub fn have_changed(&self) -> bool {
        self.changes.has_changed().unwrap_or(false)
    }

    pub async fn until_changed(&mut self) {
        let _ = self.changes.changed().await;
    }

    /// Takes over what the ledger says now, and returns it.
    pub fn read(&mut self, store: &Store) -> Vec<Intent> {
        self.changes.mark_unchanged();
        let intents = store.intents();
        self.devices = watched(&intents);
        intents
    }
}

impl Deref for HeldDevices {
    type Target = BTreeMap<DeviceUuid, WatchedDevice>;

    fn deref(&self) -> &Self::Target {
        &self.devices
    }
}

/// Devices that anybody holds, administrators aside.
pub(super) fn watched(intents: &[Intent]) -> BTreeMap<DeviceUuid, WatchedDevice> {
    let mut devices: BTreeMap<DeviceUuid, WatchedDevice> = BTreeMap::new();
    for (intent, held) in intents.iter().flat_map(|intent| intent.devices.iter().map(move |d| (intent, d))) {
        let device = devices.entry(held.uuid.clone()).or_insert_with(|| WatchedDevice {
            device: held.answer.device.clone(),
            pool: held.answer.pool.clone(),
            board: held.gpu.clone(),
            is_mig: held.uuid != held.gpu,
            requests: BTreeMap::new(),
            shares: Vec::new(),
            alone: Vec::new(),
            admins: Vec::new(),
            groups: BTreeSet::new(),
        });
        let requests = device.requests.entry(intent.claim.uid.clone()).or_default();
        requests.extend(held.answer.requests.iter().cloned());
        match held.mode {
            HoldMode::Share(grant) => {
                device.shares.push((intent.claim.clone(), grant));
                device.groups.extend(groups(intent, &held.uuid));
            }
            HoldMode::Admin => device.admins.push(intent.claim.clone()),
            HoldMode::Whole | HoldMode::Mig => {
                device.alone.push(intent.claim.clone());
                device.groups.extend(groups(intent, &held.uuid));
            }
        }
    }
    devices.retain(|_, device| !device.shares.is_empty() || !device.alone.is_empty());
    devices
}

/// The pods that the ledger names, by claim.
pub(super) fn pods(intents: Vec<Intent>) -> HashMap<ClaimUid, Vec<PodRef>> {
    let mut pods: HashMap<ClaimUid, Vec<PodRef>> = HashMap::new();
    for intent in intents {
        pods.entry(intent.claim.uid).or_default().extend(intent.pods);
    }
    pods
}

fn groups<'a>(intent: &'a Intent, device: &'a DeviceUuid) -> impl Iterator<Item = MpsGroup> + 'a {
    intent.steps.iter().filter_map(move |step| match step {
        Step::Mps { group, .. } if group.devices().contains(device) => Some(group.clone()),
        _ => None,
    })
}

impl WatchedDevice {
    /// Every claim that may have processes here.
    pub fn claims(&self) -> impl Iterator<Item = &ClaimRef> {
        self.shares.iter().map(|(claim, _)| claim).chain(&self.alone).chain(&self.admins)
    }

    /// A claim that has it, or a share of it.
    pub fn holder(&self, uid: &ClaimUid) -> Option<&ClaimRef> {
        self.shares.iter().map(|(claim, _)| claim).chain(&self.alone).find(|claim| claim.uid == *uid)
    }

    /// It is shared, and each claim has an MPS daemon of its own there.
    pub fn has_own_daemons(&self) -> bool {
        let is_own = |group: &MpsGroup| group.claim().is_some();
        !self.is_alone() && !self.groups.is_empty() && self.groups.iter().all(is_own)
    }

    /// Nobody shares it.
    pub fn is_alone(&self) -> bool {
        self.shares.is_empty()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A GPU that nobody holds.
    pub fn board(device: &str, uuid: &str) -> WatchedDevice {
        WatchedDevice {
            device: device.into(),
            pool: PoolName::new("node-a"),
            board: uuid.into(),
            is_mig: false,
            requests: BTreeMap::new(),
            shares: Vec::new(),
            alone: Vec::new(),
            admins: Vec::new(),
            groups: BTreeSet::new(),
        }
    }
}
