//! Looks over all records for what must never be (invariants I3 and I4 of src/README.md).

use std::collections::BTreeMap;
use std::fmt;

use super::{HeldDevice, HoldMode, Record, RecordKey, Step};
use crate::model::mig::MigPlace;
use crate::model::names::DeviceUuid;
use crate::model::share::MpsGroup;

/// A contradiction between records.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LedgerConflict {
    /// Two claims hold one device, or a part of a board that another holds as a whole, or shares of it that
    /// the scheduler and our controller placed.
    HeldTwice { device: DeviceUuid, claims: (RecordKey, RecordKey) },
    /// Two claims need different MPS daemons for one device.
    ServedTwice { device: DeviceUuid, claims: (RecordKey, RecordKey) },
}

impl fmt::Display for LedgerConflict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::HeldTwice { device, claims: (a, b) } => {
                write!(f, "claims {a} and {b} both hold {device}")
            }
            Self::ServedTwice { device, claims: (a, b) } => {
                write!(f, "claims {a} and {b} need different MPS daemons for {device}")
            }
        }
    }
}

/// All contradictions among the records, in the order of devices.
pub fn audit<'a>(records: impl IntoIterator<Item = &'a Record> + Clone) -> Vec<LedgerConflict> {
    let mut findings = held_twice(records.clone());
    findings.extend(carved_twice(records.clone()));
    findings.extend(served_twice(records));
    findings
}

/// Instances of two claims that have a memory slice in common.
fn carved_twice<'a>(records: impl IntoIterator<Item = &'a Record>) -> Vec<LedgerConflict> {
    let mut known: Vec<(RecordKey, &DeviceUuid, MigPlace)> = Vec::new();
    let mut findings = Vec::new();
    for record in records {
        for (gpu, place) in record.intent.places() {
            let claim = record.intent.key();
            let over = known.iter().find(|(other, on, at)| {
                *other != claim && *on == gpu && at.placement.overlaps(place.placement)
            });
            if let Some((other, _, _)) = over {
                let claims = (other.clone(), claim.clone());
                findings.push(LedgerConflict::HeldTwice { device: place.stands_for(gpu), claims });
            }
            known.push((claim, gpu, place));
        }
    }
    findings
}

fn served_twice<'a>(records: impl IntoIterator<Item = &'a Record>) -> Vec<LedgerConflict> {
    let mut daemons: BTreeMap<&DeviceUuid, Vec<(RecordKey, &MpsGroup)>> = BTreeMap::new();
    let mut findings = Vec::new();
    for record in records {
        let claim = record.intent.key();
        for step in &record.intent.steps {
            let Step::Mps { group, .. } = step else { continue };
            for device in group.devices() {
                let known = daemons.entry(device).or_default();
                if let Some((other, _)) = known.iter().find(|(_, other)| group.excludes(other)) {
                    let claims = (other.clone(), claim.clone());
                    findings.push(LedgerConflict::ServedTwice { device: device.clone(), claims });
                } else {
                    known.push((claim.clone(), group));
                }
            }
        }
    }
    findings
}

fn held_twice<'a>(records: impl IntoIterator<Item = &'a Record>) -> Vec<LedgerConflict> {
    let mut by_gpu: BTreeMap<&DeviceUuid, Vec<(RecordKey, &HeldDevice)>> = BTreeMap::new();
    for record in records {
        for held in &record.intent.devices {
            if held.mode != HoldMode::Admin {
                by_gpu.entry(&held.gpu).or_default().push((record.intent.key(), held));
            }
        }
    }
    let mut findings = Vec::new();
    for holds in by_gpu.values() {
        for (index, (claim, held)) in holds.iter().enumerate() {
            for (other_claim, other) in &holds[..index] {
                if claim != other_claim && exclude(held, other) {
                    findings.push(LedgerConflict::HeldTwice {
                        device: held.uuid.clone(),
                        claims: (other_claim.clone(), claim.clone()),
                    });
                }
            }
        }
    }
    findings
}

/// Two holds on one board that must not be there for two claims.
fn exclude(one: &HeldDevice, other: &HeldDevice) -> bool {
    let shares = [one, other].map(|held| matches!(held.mode, HoldMode::Share(_)));
    let mixed = shares[0] != shares[1] || [one.mode, other.mode].contains(&HoldMode::Whole);
    let twice = one.uuid == other.uuid && shares != [true, true];
    mixed || twice || (shares == [true, true] && one.placer != other.placer)
}
