//! Which devices are shared, by whom, and which daemons serve them: the ledger, as the watchdog needs it.

use std::collections::{BTreeMap, BTreeSet};

use crate::ledger::{HoldMode, Intent, Step};
use crate::model::claim::ClaimRef;
use crate::model::names::{DeviceName, DeviceUuid};
use crate::model::share::{Grant, MpsGroup};

/// A device with shares.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Shared {
    /// Its name in the ResourceSlice.
    pub device: DeviceName,
    pub shares: Vec<(ClaimRef, Grant)>,
    /// Claims that look at it as administrators: their processes are nobody's tenants.
    pub admins: Vec<ClaimRef>,
    /// Whose daemons serve it.
    pub groups: BTreeSet<MpsGroup>,
}

/// Devices with at least one share.
pub(super) fn shared(intents: &[Intent]) -> BTreeMap<DeviceUuid, Shared> {
    let mut devices: BTreeMap<DeviceUuid, Shared> = BTreeMap::new();
    for (intent, held) in intents.iter().flat_map(|intent| intent.devices.iter().map(move |d| (intent, d))) {
        let entry = || Shared {
            device: held.answer.device.clone(),
            shares: Vec::new(),
            admins: Vec::new(),
            groups: BTreeSet::new(),
        };
        match held.mode {
            HoldMode::Share(grant) => {
                let device = devices.entry(held.uuid.clone()).or_insert_with(entry);
                device.shares.push((intent.claim.clone(), grant));
                device.groups.extend(groups(intent, &held.uuid));
            }
            HoldMode::Admin => {
                let device = devices.entry(held.uuid.clone()).or_insert_with(entry);
                device.admins.push(intent.claim.clone());
            }
            HoldMode::Whole | HoldMode::Mig => {}
        }
    }
    devices.retain(|_, device| !device.shares.is_empty());
    devices
}

fn groups<'a>(intent: &'a Intent, device: &'a DeviceUuid) -> impl Iterator<Item = MpsGroup> + 'a {
    intent.steps.iter().filter_map(move |step| match step {
        Step::Mps { group, .. } if group.devices().contains(device) => Some(group.clone()),
        _ => None,
    })
}

impl Shared {
    /// Every claim that may have processes here.
    pub fn claims(&self) -> impl Iterator<Item = &ClaimRef> {
        self.shares.iter().map(|(claim, _)| claim).chain(&self.admins)
    }
}
