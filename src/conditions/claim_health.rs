//! The state of a claim beside its grant: whether its processes keep to the grant, and which parts of its GPUs are
//! unhealthy. The state starts empty; the watchdog and the health sources update it.

use std::collections::BTreeMap;

use crate::model::claim::ClaimRef;
use crate::model::gpu::Health;
use crate::model::names::{ClaimUid, DeviceUuid};
use crate::model::quantity::Bytes;

/// What the watchdog found out about one claim's memory on one GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GrantEvent {
    pub claim: ClaimRef,
    pub gpu: DeviceUuid,
    pub usage: GrantUsage,
    pub kind: GrantEventKind,
}

/// A process of a claim worked around the MPS daemon that the claim has for itself on a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MpsDetour {
    pub claim: ClaimRef,
    pub gpu: DeviceUuid,
    /// As the host counts.
    pub pid: u32,
    pub stage: DetourStage,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DetourStage {
    Found,
    /// The process was ended for it.
    Ended,
}

/// Memory on one GPU, of all processes of a claim together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GrantUsage {
    pub used: Bytes,
    pub granted: Bytes,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GrantEventKind {
    /// Over the grant, and not for one sample only.
    Over,
    /// A process was ended for it, the usage being that before.
    Ended {
        /// As the host counts.
        pid: u32,
    },
    /// Within the grant again.
    Within,
}

/// The health of one part of a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PartHealth {
    pub gpu: DeviceUuid,
    pub concerned: Concerned,
    pub part: GpuPart,
    pub health: Health,
}

/// Which claims on a GPU something concerns.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Concerned {
    EveryClaim,
    OneClaim(ClaimUid),
}

impl Concerned {
    pub fn has(&self, claim: &ClaimUid) -> bool {
        match self {
            Self::EveryClaim => true,
            Self::OneClaim(one) => one == claim,
        }
    }
}

/// A part of a GPU that can be unhealthy by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum GpuPart {
    /// The GPU itself.
    Board,
    /// The MPS daemon or server that its shares need.
    Mps,
    /// The /dev/shm that its shares have together.
    Shm,
    /// The driver's files that its containers mount.
    DriverFiles,
}

/// The violations and unhealthy parts that concern one claim.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ClaimHealth {
    /// GPUs of which the claim takes more than it was granted.
    over: BTreeMap<DeviceUuid, GrantUsage>,
    unhealthy: BTreeMap<(DeviceUuid, GpuPart), String>,
}

impl ClaimHealth {
    /// Applies an event. Returns true if a condition of the claim changes.
    pub fn apply(&mut self, event: &GrantEvent) -> bool {
        match event.kind {
            GrantEventKind::Within => self.over.remove(&event.gpu).is_some(),
            GrantEventKind::Over | GrantEventKind::Ended { .. } => {
                self.over.insert(event.gpu.clone(), event.usage).is_none()
            }
        }
    }

    /// Records the health of a part. Returns true if a condition of the claim changes.
    pub fn set_part_health(&mut self, part_health: &PartHealth) -> bool {
        let key = (part_health.gpu.clone(), part_health.part);
        match part_health.health.problem() {
            None => self.unhealthy.remove(&key).is_some(),
            Some(reason) => self.unhealthy.insert(key, reason.to_owned()).as_deref() != Some(reason),
        }
    }

    /// What the claim uses of the GPU, if that is more than it was granted.
    pub(super) fn over(&self, gpu: &DeviceUuid) -> Option<GrantUsage> {
        self.over.get(gpu).copied()
    }

    /// The unhealthy parts of a GPU or a MIG device, each with the reason.
    pub(super) fn unhealthy_parts(&self, gpu: &DeviceUuid) -> impl Iterator<Item = (GpuPart, &str)> {
        let of_board = move |entry: &(&(DeviceUuid, GpuPart), &String)| entry.0.0 == *gpu;
        self.unhealthy.iter().filter(of_board).map(|((_, part), reason)| (*part, reason.as_str()))
    }
}
