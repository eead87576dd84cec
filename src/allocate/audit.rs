//! Is anything granted twice? The sum of placements against what there is, and against the index's own counts.

use std::collections::BTreeMap;

use thiserror::Error;

use super::index::Index;
use super::node::{COMPUTE_ALL, Gpu, GpuGrant};
use crate::model::mig::MigPlace;
use crate::model::names::{DeviceName, NodeName};
use crate::model::share::Extent;

/// What must never be.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum AuditFinding {
    #[error("{node}/{device}: {granted} MiB are granted, and the device has {all}; delete one of its claims")]
    Memory { node: NodeName, device: DeviceName, granted: u64, all: u64 },
    #[error(
        "{node}/{device}: {granted} % of compute is granted, which is more than all of it; delete one of its \
         claims"
    )]
    Compute { node: NodeName, device: DeviceName, granted: u32 },
    #[error(
        "{node}/{device}: {granted} blocks of client slots are granted, and the device has {all}; delete one \
         of its claims"
    )]
    Slots { node: NodeName, device: DeviceName, granted: u64, all: u32 },
    #[error(
        "{node}/{device}: {grants} claims are granted it, and one of them has all of it for itself; delete one of its \
         claims"
    )]
    Whole { node: NodeName, device: DeviceName, grants: u32 },
    #[error(
        "{node}/{device}: {grants} claims are granted MIG devices of it, and two of these have memory slices in common; \
         delete one of its claims"
    )]
    Overlap { node: NodeName, device: DeviceName, grants: u32 },
    #[error(
        "{node}/{device}: {grants} claims are granted it, which is cut into MIG devices, and one of them has none of \
         these; delete that claim"
    )]
    NoMig { node: NodeName, device: DeviceName, grants: u32 },
    #[error("{node}/{device}: the index does not agree with the sum of its placements; this is a bug")]
    Count { node: NodeName, device: DeviceName },
}

/// Every GPU that is granted beyond what it has; nothing if all is well.
pub fn audit(index: &Index) -> Vec<AuditFinding> {
    let mut sums: BTreeMap<(&NodeName, &DeviceName), Granted> = BTreeMap::new();
    for placement in index.placements.values() {
        for grant in &placement.gpus {
            sums.entry((&placement.node, &grant.device)).or_default().add(grant);
        }
    }
    let mut findings = Vec::new();
    for node in index.nodes.all.iter().flatten() {
        for gpu in &node.gpus {
            let sum = sums.remove(&(&node.name, &gpu.device)).unwrap_or_default();
            findings.extend(check(&node.name, gpu, &sum));
        }
    }
    findings
}

/// What is granted of one GPU, all placements together.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct Granted {
    mib: u64,
    percent: u32,
    slots: u64,
    /// Grants of something, and grants of all of it.
    grants: u32,
    whole: u32,
    places: Vec<MigPlace>,
}

impl Granted {
    /// As the index counts: what somebody forged may be more than a number holds.
    fn add(&mut self, grant: &GpuGrant) {
        self.mib = self.mib.saturating_add(grant.memory.mib_ceil());
        self.percent = self.percent.saturating_add(grant.percent());
        self.slots = self.slots.saturating_add(grant.slots.into());
        self.grants += u32::from(grant.memory.0 > 0);
        self.whole += u32::from(grant.extent == Extent::Whole);
        if let Extent::Mig(place) = grant.extent {
            self.places.push(place);
        }
    }
}

fn check(node: &NodeName, gpu: &Gpu, sum: &Granted) -> Vec<AuditFinding> {
    let Granted { mib, percent, slots, grants, whole, ref places } = *sum;
    let name = || (node.clone(), gpu.device.clone());
    let mut findings = Vec::new();
    let is_cut = gpu.cut.is_some();
    // What NVML says of the memory of MIG devices may be more together than that of the largest.
    if mib > gpu.memory_mib && !is_cut {
        let (node, device) = name();
        findings.push(AuditFinding::Memory { node, device, granted: mib, all: gpu.memory_mib });
    }
    if percent > COMPUTE_ALL && !is_cut {
        let (node, device) = name();
        findings.push(AuditFinding::Compute { node, device, granted: percent });
    }
    if slots > u64::from(gpu.slots) && !is_cut {
        let (node, device) = name();
        findings.push(AuditFinding::Slots { node, device, granted: slots, all: gpu.slots });
    }
    if whole > 0 && grants > 1 {
        let (node, device) = name();
        findings.push(AuditFinding::Whole { node, device, grants });
    }
    let overlaps = |(at, one): (usize, &MigPlace)| {
        places[at + 1..].iter().any(|other| other.placement.overlaps(one.placement))
    };
    if places.iter().enumerate().any(overlaps) {
        let (node, device) = name();
        findings.push(AuditFinding::Overlap { node, device, grants });
    }
    if is_cut && grants as usize > places.len() {
        let (node, device) = name();
        findings.push(AuditFinding::NoMig { node, device, grants });
    }
    let counts = gpu.cut.as_ref().is_none_or(|cut| cut.counts(places));
    if (mib, percent, slots, whole) != (gpu.used_mib, gpu.used_compute, gpu.used_slots, gpu.used_whole)
        || !counts
    {
        let (node, device) = name();
        findings.push(AuditFinding::Count { node, device });
    }
    findings
}
