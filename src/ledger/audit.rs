//! Looks over all records for what must never be (invariants I3 and I4 of src/README.md).

use std::collections::BTreeMap;
use std::fmt;

use super::{HoldMode, Record};
use crate::model::names::{ClaimUid, DeviceUuid};

/// A contradiction between records.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Finding {
    /// Two claims hold one device, or a part of a board that another holds as a whole.
    HeldTwice { device: DeviceUuid, claims: (ClaimUid, ClaimUid) },
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::HeldTwice { device, claims: (a, b) } => {
                write!(f, "claims {a} and {b} both hold {device}")
            }
        }
    }
}

/// All contradictions among the records, in the order of devices.
pub fn audit<'a>(records: impl IntoIterator<Item = &'a Record>) -> Vec<Finding> {
    let mut by_gpu: BTreeMap<&DeviceUuid, Vec<(&ClaimUid, &DeviceUuid, HoldMode)>> = BTreeMap::new();
    for record in records {
        for held in &record.intent.devices {
            if held.mode != HoldMode::Admin {
                by_gpu.entry(&held.gpu).or_default().push((&record.intent.claim.uid, &held.uuid, held.mode));
            }
        }
    }
    let mut findings = Vec::new();
    for holds in by_gpu.values() {
        for (index, (claim, uuid, mode)) in holds.iter().enumerate() {
            for (other_claim, other_uuid, other_mode) in &holds[..index] {
                let whole = [*mode, *other_mode].contains(&HoldMode::Whole);
                if claim != other_claim && (whole || uuid == other_uuid) {
                    findings.push(Finding::HeldTwice {
                        device: (*uuid).clone(),
                        claims: ((*other_claim).clone(), (*claim).clone()),
                    });
                }
            }
        }
    }
    findings
}
