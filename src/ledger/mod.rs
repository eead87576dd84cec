//! The durable per-claim record: what a claim holds on this node, and how far its preparation got.
//!
//! One file per claim, so that cost does not grow with live claims. Release reads the record alone: it
//! needs no API server, no NVML, and asks no feature gate. The types here are frozen per version and own
//! nothing of other people's; [`codec`] turns them into bytes and back; [`audit`] looks for contradictions.
//!
//! May import: model. May name: serde_json, crc32fast.

mod audit;
mod codec;
#[cfg(test)]
pub(crate) mod tests;

pub use audit::{LedgerConflict, audit};
pub use codec::{Damage, Decoded, decode, encode_intent, encode_mark};

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::model::claim::{ClaimRef, PodRef, PreparedDevice};
use crate::model::mig::{MadeMig, MigPlace};
use crate::model::names::{BootId, ClaimUid, DeviceUuid};
use crate::model::quantity::Bytes;
use crate::model::share::{Grant, MpsGroup, MpsLimits, Percent};

/// What is written before the first effect: everything that a release will need.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Intent {
    pub claim: ClaimRef,
    /// The boot in which the effects are made. In another boot they are gone.
    pub boot: BootId,
    pub devices: Vec<HeldDevice>,
    /// In the order in which they are applied.
    pub steps: Vec<Step>,
    /// The pods that the claim was reserved for: those whose processes may hold its devices, whatever becomes
    /// of the claim. Empty in records of before they were kept.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pods: Vec<PodRef>,
    /// On disk it is a part of the claim's UID: see [`codec`].
    #[serde(skip)]
    pub standing: Standing,
}

/// What a record is to its claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Standing {
    /// What the claim holds, or is about to hold.
    #[default]
    Current,
    /// What is still to be undone, or held by pods, of an earlier allocation of the claim: one of several, by its number.
    Owed(u32),
}

/// Whose record it is: no two records have the same.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RecordKey {
    /// The claim's own.
    Claim(ClaimUid),
    /// As [`Standing::Owed`].
    Owed { claim: ClaimUid, number: u32 },
}

impl RecordKey {
    /// By its name: the other way round from `Display`.
    pub fn of_name(name: &str) -> Self {
        let parts = name.rsplit_once(OWED).filter(|(claim, _)| !claim.is_empty());
        let owed = parts.and_then(|(claim, number)| Some((ClaimUid::new(claim), number.parse().ok()?)));
        match owed.map(|(claim, number)| Self::Owed { claim, number }) {
            Some(key) if key.to_string() == name => key,
            _ => Self::Claim(ClaimUid::new(name)),
        }
    }
}

impl From<ClaimUid> for RecordKey {
    fn from(claim: ClaimUid) -> Self {
        Self::Claim(claim)
    }
}

/// The name of its file, without the ending. It may be too long for one.
impl fmt::Display for RecordKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Claim(claim) => claim.fmt(f),
            Self::Owed { claim, number } => write!(f, "{claim}{OWED}{number}"),
        }
    }
}

/// Between a claim's UID and a number in the UID that the record of what the claim owes has on disk. No API server makes
/// such a UID.
const OWED: &str = "-owed-";

/// Pods that one record names at most. A claim is reserved for 256 at a time; more than these have used it one
/// after the other, and the first of them are long gone.
pub const PODS_MOST: usize = 1024;

/// One device that the claim holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldDevice {
    /// What kubelet was, or will be, told.
    pub answer: PreparedDevice,
    /// UUID of the device itself, and of the board that it is or is a part of.
    pub uuid: DeviceUuid,
    pub gpu: DeviceUuid,
    pub mode: HoldMode,
    /// Not in records of before the controller: then it was the scheduler.
    #[serde(default, skip_serializing_if = "Placer::is_scheduler")]
    pub placer: Placer,
    /// Of a board that is carved for claims: what the MIG device is. Not in records of before the controller carved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mig: Option<HeldMig>,
}

impl HeldDevice {
    /// The same device in the same way. What is told of a MIG device follows from its step.
    fn holds_as(&self, other: &Self) -> bool {
        let Self { answer, uuid, gpu, mode, placer, mig: _ } = self;
        (answer, uuid, gpu, mode, placer)
            == (&other.answer, &other.uuid, &other.gpu, &other.mode, &other.placer)
    }
}

/// A MIG device of a board that is carved for claims, and what its claim asked for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldMig {
    /// The profile's name, e.g. `1g.10gb`.
    pub profile: String,
    pub place: MigPlace,
    #[serde(default, skip_serializing_if = "MigAsked::is_nothing")]
    pub asked: MigAsked,
}

/// What a claim's `GpuShare` asked for that the controller served with a MIG device.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct MigAsked {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<Bytes>,
    /// Of the board, as the claim's author wrote it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fraction: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compute: Option<Percent>,
}

impl MigAsked {
    /// True if the claim named a device, or its class says how much.
    pub fn is_nothing(&self) -> bool {
        *self == Self::default()
    }
}

/// Who gave the device to the claim. Each keeps books of a board's shares that the other does not trust, so
/// shares of both on one board are refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum Placer {
    /// Any scheduler that reads ResourceSlices.
    #[default]
    Scheduler,
    /// Our controller, with a `ShareGrant`.
    Controller,
}

impl Placer {
    fn is_scheduler(&self) -> bool {
        *self == Self::Scheduler
    }
}

impl fmt::Display for Placer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Scheduler => "the scheduler",
            Self::Controller => "the controller",
        })
    }
}

/// What a held device is to the claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum HoldMode {
    /// The whole board, for this claim alone.
    Whole,
    /// One MIG device, for this claim alone.
    Mig,
    /// A part of the board, beside other claims' parts.
    Share(Grant),
    /// Administrative access: holds nothing, changes nothing.
    Admin,
}

impl fmt::Display for HoldMode {
    /// For people: `Whole`, `2000 MiB`, `20124 MiB, 25 %`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Whole => f.write_str("Whole"),
            Self::Mig => f.write_str("Mig"),
            Self::Admin => f.write_str("Admin"),
            Self::Share(grant) => {
                write!(f, "{} MiB", grant.memory.mib_floor())?;
                grant.compute.map_or(Ok(()), |percent| write!(f, ", {percent}"))
            }
        }
    }
}

/// One effect, with all that its undoing needs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Step {
    /// Make a MIG instance at that place; undone by ending what is there. `made` is written as soon as it is known: an
    /// instance with another device is somebody else's, and stays.
    MakeMig { gpu: DeviceUuid, place: MigPlace, made: Option<MadeMig> },
    /// Set the GPU's time slice; undone by setting the driver's default.
    TimeSlice { gpu: DeviceUuid, level: u8 },
    /// See to it that an MPS daemon serves these devices, its limits not tighter than `needs`; undone by
    /// giving it the limits that the other claims on them need, or letting it rest where there are none.
    Mps { group: MpsGroup, exclusive: bool, needs: MpsLimits },
    /// Write the claim's CDI file; undone by removing it.
    WriteCdi { file: String },
}

/// How far the record's claim got. Marks are appended to the record as it goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Mark {
    /// The step of that index is done.
    Applied(usize),
    /// All steps are done and the answer may be given.
    Ready,
    /// A release has begun.
    Releasing,
}

/// The state that the marks add up to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Steps before this index are done; the one at it may be half done.
    Applying(usize),
    Ready,
    Releasing,
}

impl Phase {
    /// The mark that leads to it; none: a record begins with it.
    pub fn mark(self) -> Option<Mark> {
        match self {
            Self::Applying(next) => next.checked_sub(1).map(Mark::Applied),
            Self::Ready => Some(Mark::Ready),
            Self::Releasing => Some(Mark::Releasing),
        }
    }
}

/// A record as it is read back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    pub intent: Intent,
    pub phase: Phase,
}

impl Record {
    /// The boards whose lanes a change of this record must take, sorted, each once.
    pub fn gpus(&self) -> Vec<DeviceUuid> {
        self.intent.gpus()
    }

    /// The answer for kubelet.
    pub fn answer(&self) -> Vec<PreparedDevice> {
        self.intent.devices.iter().map(|device| device.answer.clone()).collect()
    }

    /// Steps that may have had an effect, last first: what a release undoes.
    pub fn undo(&self) -> impl Iterator<Item = &Step> {
        let touched = match self.phase {
            Phase::Applying(next) => self.intent.steps.len().min(next.saturating_add(1)),
            Phase::Ready | Phase::Releasing => self.intent.steps.len(),
        };
        self.intent.steps[..touched].iter().rev()
    }

    /// The CDI file that the record owns.
    pub fn cdi_file(&self) -> Option<&str> {
        self.intent.steps.iter().find_map(|step| match step {
            Step::WriteCdi { file } => Some(file.as_str()),
            Step::MakeMig { .. } | Step::TimeSlice { .. } | Step::Mps { .. } => None,
        })
    }
}

impl Intent {
    /// True if the claim holds the same in the same way, whoever its pods are.
    pub fn holds_as(&self, other: &Self) -> bool {
        let Self { claim, boot, devices, steps, standing, pods: _ } = self;
        let same = devices.len() == other.devices.len();
        let same = same && devices.iter().zip(&other.devices).all(|(one, other)| one.holds_as(other));
        let other = (&other.claim, &other.boot, &other.steps, &other.standing);
        same && (claim, boot, steps, standing) == other
    }

    /// Where the claim has MIG instances made for it, or is about to.
    pub fn places(&self) -> impl Iterator<Item = (&DeviceUuid, MigPlace)> {
        self.steps.iter().filter_map(|step| match step {
            Step::MakeMig { gpu, place, .. } => Some((gpu, *place)),
            Step::TimeSlice { .. } | Step::Mps { .. } | Step::WriteCdi { .. } => None,
        })
    }

    /// Whose record it is.
    pub fn key(&self) -> RecordKey {
        let claim = self.claim.uid.clone();
        match self.standing {
            Standing::Current => RecordKey::Claim(claim),
            Standing::Owed(number) => RecordKey::Owed { claim, number },
        }
    }

    /// True if it says what this claim holds now, and not what it owes or what another holds.
    pub fn is_current_of(&self, claim: &ClaimUid) -> bool {
        self.standing == Standing::Current && self.claim.uid == *claim
    }

    /// With the UID by which it is known on disk and in the state document.
    #[must_use]
    pub fn as_written(&self) -> Self {
        let uid = ClaimUid::new(self.key().to_string());
        Self { claim: ClaimRef { uid, ..self.claim.clone() }, standing: Standing::Current, ..self.clone() }
    }

    /// The other way round.
    #[must_use]
    fn interpreted(mut self) -> Self {
        if let RecordKey::Owed { claim, number } = RecordKey::of_name(self.claim.uid.as_str()) {
            (self.claim.uid, self.standing) = (claim, Standing::Owed(number));
        }
        self
    }

    /// Its pods and these, each once, the latest of them where they are too many.
    pub fn pods_with(&self, more: &[PodRef]) -> Vec<PodRef> {
        let mut pods = self.pods.clone();
        pods.extend(more.iter().filter(|pod| !self.pods.contains(pod)).cloned());
        let surplus = pods.len().saturating_sub(PODS_MOST);
        pods.drain(..surplus);
        pods
    }

    /// As [`Record::gpus`].
    pub fn gpus(&self) -> Vec<DeviceUuid> {
        let mut gpus: Vec<_> = self.devices.iter().map(|device| device.gpu.clone()).collect();
        gpus.sort();
        gpus.dedup();
        gpus
    }
}
