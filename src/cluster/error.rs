//! What can go wrong between us and the API server, in words for a pod's event.

use std::time::Duration;

use thiserror::Error;

use crate::model::claim::{AllocatedClaim, ClaimRef};
use crate::model::names::{ClaimUid, DRIVER};

type Source = Box<dyn std::error::Error + Send + Sync>;

/// Why a claim could not be read, or is not one that we can prepare.
#[derive(Debug, Error)]
pub enum ClaimError {
    #[error("claim {claim} no longer exists; nothing to prepare")]
    Gone { claim: ClaimRef },

    #[error(
        "claim {claim} was replaced: the claim of that name now has UID {found_uid}; \
         kubelet retries once the old claim's pods are gone"
    )]
    Replaced { claim: ClaimRef, found_uid: ClaimUid },

    #[error("claim {claim} is not allocated: status.allocation is empty; wait for the scheduler")]
    NotAllocated { claim: ClaimRef },

    #[error(
        "claim {claim} is allocated, but none of its devices is of driver {DRIVER}; nothing for this driver to prepare"
    )]
    NoneOfOurs { claim: ClaimRef },

    #[error(
        "claim {claim}: {field}: {problem}; the component that wrote the allocation must correct it: delete \
         the pod so that it is allocated again"
    )]
    Malformed { claim: ClaimRef, field: Box<str>, problem: Box<str> },

    #[error("claim {claim} could not be read: {call}; it will be tried again", call = .source.what_failed())]
    Call {
        claim: ClaimRef,
        #[source]
        source: Box<CallError>,
    },
}

/// Why one call to the API server failed.
#[derive(Debug, Error)]
pub enum CallError {
    #[error("{what}: no answer from the API server within {} s; check that the node reaches it", .limit.as_secs_f32())]
    TimedOut { what: String, limit: Duration },

    #[error(
        "{what}: the API server cannot be reached; check the node's network and the API server's address"
    )]
    Unreachable {
        what: String,
        #[source]
        source: Source,
    },

    #[error("{what}: someone else changed the object at the same time ({message}); read it again")]
    Conflict { what: String, message: String },

    #[error("{what}: it does not exist ({message})")]
    NotFound { what: String, message: String },

    #[error(
        "{what}: forbidden ({message}); check the ClusterRole of tranche-node or tranche-controller, whichever this is, and the quotas of the namespace"
    )]
    Forbidden { what: String, message: String },

    #[error("{what}: refused with status {code} ({message})")]
    Refused { what: String, code: u16, message: String },

    #[error("{what}: the answer does not fit the {kind} type")]
    Unreadable {
        what: String,
        kind: &'static str,
        #[source]
        source: Source,
    },
}

impl CallError {
    /// What was being done, e.g. `GET resourceclaims default/a`.
    pub fn what_failed(&self) -> &str {
        match self {
            Self::TimedOut { what, .. }
            | Self::Unreachable { what, .. }
            | Self::Conflict { what, .. }
            | Self::NotFound { what, .. }
            | Self::Forbidden { what, .. }
            | Self::Refused { what, .. }
            | Self::Unreadable { what, .. } => what,
        }
    }

    /// The kind, as a metric label.
    pub fn label(&self) -> &'static str {
        match self {
            Self::TimedOut { .. } => "timeout",
            Self::Unreachable { .. } => "unreachable",
            Self::Conflict { .. } => "conflict",
            Self::NotFound { .. } => "not_found",
            Self::Forbidden { .. } => "forbidden",
            Self::Refused { .. } => "refused",
            Self::Unreadable { .. } => "unreadable",
        }
    }
}

impl ClaimError {
    pub fn claim(&self) -> &ClaimRef {
        match self {
            Self::Gone { claim }
            | Self::Replaced { claim, .. }
            | Self::NotAllocated { claim }
            | Self::NoneOfOurs { claim }
            | Self::Malformed { claim, .. }
            | Self::Call { claim, .. } => claim,
        }
    }

    /// The kind, as a metric label.
    pub fn label(&self) -> &'static str {
        match self {
            Self::Gone { .. } => "gone",
            Self::Replaced { .. } => "replaced",
            Self::NotAllocated { .. } => "not_allocated",
            Self::NoneOfOurs { .. } => "none_of_ours",
            Self::Malformed { .. } => "malformed",
            Self::Call { source, .. } => source.label(),
        }
    }
}

/// What has become of a claim, for the sweeper. Only the first five are facts; `Unknown` is none, and
/// nothing may be torn down because of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClaimState {
    /// Allocated with devices of our driver. They may be another node's: compare the pool.
    Allocated(AllocatedClaim),
    /// Allocated, without a device of our driver.
    NoneOfOurs,
    NotAllocated,
    Gone,
    /// Another claim has its name.
    Replaced {
        found_uid: ClaimUid,
    },
    /// The API server did not answer, or the claim cannot be read.
    Unknown {
        reason: String,
    },
}

impl From<Result<AllocatedClaim, ClaimError>> for ClaimState {
    fn from(answer: Result<AllocatedClaim, ClaimError>) -> Self {
        match answer {
            Ok(claim) => Self::Allocated(claim),
            Err(ClaimError::Gone { .. }) => Self::Gone,
            Err(ClaimError::Replaced { found_uid, .. }) => Self::Replaced { found_uid },
            Err(ClaimError::NotAllocated { .. }) => Self::NotAllocated,
            Err(ClaimError::NoneOfOurs { .. }) => Self::NoneOfOurs,
            Err(ClaimError::Call { source, .. }) => Self::Unknown { reason: source.to_string() },
            Err(malformed @ ClaimError::Malformed { .. }) => Self::Unknown { reason: malformed.to_string() },
        }
    }
}
