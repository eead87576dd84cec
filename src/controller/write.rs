//! What the controller writes, and what came of it: the messages between `round` and `writer`.

use k8s_openapi::api::resource::v1::{AllocationResult, ResourceClaim};

use crate::cluster::allocation::{ClaimVersion, Marks};
use crate::cluster::eviction::Eviction;
use crate::controller::Moment;
use crate::controller::holds::ReleaseStep;
use crate::controller::view::GpuRef;
use crate::controller::view::movable::PodOwner;
use crate::model::claim::{ClaimKey, PodRef};
use crate::model::names::{ClaimUid, PodUid};
use crate::slices::ShareParts;

/// The controller-manager clears what has it when its last user has ended.
pub const FINALIZER: &str = "resource.kubernetes.io/delete-protection";

/// What a round comes to.
#[derive(Debug, Default)]
pub struct Round {
    pub writes: Vec<Write>,
    /// When time alone will bring something.
    pub next: Option<Moment>,
    pub decided: usize,
    pub refused: usize,
}

#[derive(Debug, Clone, PartialEq)]
pub enum Write {
    /// Create the hold of a GPU and allocate it, and all that kube-scheduler gives parts of.
    Hold(GpuRef, Option<ShareParts>),
    /// Mark a hold: once the watch brings it, it has brought all that came before.
    WatchBarrier(ClaimVersion),
    /// A step of a hold that is to go.
    Release(GpuRef, ReleaseStep),
    /// Mark the claim, then write its allocation, to which the writer adds the time.
    Allocate { claim: ClaimKey, at: ClaimVersion, marks: Marks, allocation: Box<AllocationResult> },
    /// Take back an allocation of ours that nobody uses.
    Clear(ClaimKey, ClaimVersion),
    /// Tell of a claim on the claim.
    Mark(ClaimKey, ClaimVersion, Marks),
    /// Create a claim that was planned, and write its allocation at once: the scheduler tries the pod as soon as
    /// the claim is there. None: for a pod whose scheduler drops it while a claim that it names is not there.
    Create(ClaimKey, Box<ResourceClaim>, Option<Box<AllocationResult>>),
    /// Evict a pod.
    Evict(PodRef),
    /// Evict a pod so that another like it is made elsewhere, if its owner makes one.
    Move(PodRef, PodOwner),
}

/// The answer to each [`Write`], in any order.
#[derive(Debug)]
pub enum WriteOutcome {
    Held(GpuRef, Result<Box<ResourceClaim>, Failure>),
    BarrierWritten(ClaimUid, Result<Box<ResourceClaim>, Failure>),
    Released(GpuRef, ClaimUid, Result<(), Failure>),
    Allocated(ClaimKey, Result<Box<ResourceClaim>, Failure>),
    Cleared(ClaimKey, Result<Box<ResourceClaim>, Failure>),
    Marked(ClaimKey, Result<Box<ResourceClaim>, Failure>),
    Created(ClaimKey, Result<Box<ResourceClaim>, Failure>),
    Evicted(PodRef, Result<Eviction, Failure>),
    Moved(PodUid, Result<(), Failure>),
}

/// Why a write was not done, or nobody knows whether it was.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Failure {
    /// The object is another by now, or there is one of that name.
    Conflict,
    Gone,
    /// The API server will not have it.
    Refused(String),
    /// No answer: it may have been done.
    Silent(String),
    /// Somebody else may be leading by now: nothing was sent.
    NotLeading,
    /// The API server has too much to do: nothing was done.
    Busy(String),
}

impl Failure {
    pub fn words(&self) -> String {
        match self {
            Self::Conflict => "somebody else was first".to_owned(),
            Self::Gone => "it is gone".to_owned(),
            Self::Refused(words) | Self::Silent(words) | Self::Busy(words) => words.clone(),
            Self::NotLeading => "another controller may be leading".to_owned(),
        }
    }

    /// As a metric label.
    pub fn label(&self) -> &'static str {
        match self {
            Self::Conflict => "conflict",
            Self::Gone => "gone",
            Self::Refused(_) => "refused",
            Self::Silent(_) => "silent",
            Self::NotLeading => "not_leading",
            Self::Busy(_) => "busy",
        }
    }
}

impl WriteOutcome {
    /// The claim that was to be changed, and that the API server does not have. `key`: by its UID.
    pub fn gone(&self, key: impl Fn(&ClaimUid) -> Option<ClaimKey>) -> Option<ClaimKey> {
        match self {
            Self::BarrierWritten(uid, Err(Failure::Gone)) | Self::Released(_, uid, Err(Failure::Gone)) => {
                key(uid)
            }
            Self::Allocated(key, Err(Failure::Gone))
            | Self::Cleared(key, Err(Failure::Gone))
            | Self::Marked(key, Err(Failure::Gone)) => Some(*key),
            _ => None,
        }
    }

    /// What was tried, as a metric label, and how it went.
    pub fn labels(&self) -> (&'static str, &'static str) {
        let of = |failure: Option<&Failure>| failure.map_or("ok", Failure::label);
        match self {
            Self::Held(_, result) => ("hold", of(result.as_ref().err())),
            Self::BarrierWritten(_, result) => ("look", of(result.as_ref().err())),
            Self::Released(_, _, result) => ("leave", of(result.as_ref().err())),
            Self::Allocated(_, result) => ("allocate", of(result.as_ref().err())),
            Self::Cleared(_, result) => ("clear", of(result.as_ref().err())),
            Self::Marked(_, result) => ("mark", of(result.as_ref().err())),
            Self::Created(_, result) => ("create", of(result.as_ref().err())),
            Self::Evicted(_, Ok(Eviction::Evicted)) => ("evict", "ok"),
            Self::Evicted(_, Ok(Eviction::Protected(_))) => ("evict", "protected"),
            Self::Evicted(_, Ok(Eviction::Gone)) => ("evict", "gone"),
            Self::Evicted(_, Err(failure)) => ("evict", failure.label()),
            Self::Moved(_, result) => ("move", of(result.as_ref().err())),
        }
    }
}
