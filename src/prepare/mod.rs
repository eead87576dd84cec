//! What preparing a claim means: checks, then a plan in which every name, path and limit is chosen.
//!
//! ```text
//! claim ─→ targets (does it exist, is it free?) ─→ plan (steps, CDI file, answer)
//! ```
//! The executor (node::preparer) decides nothing: it records the plan's intent, applies its steps in order,
//! and gives its answer. A plan made twice from the same facts is the same plan.
//!
//! May import: model, params, cdi, ledger. May name: thiserror.

mod plan;
mod targets;
#[cfg(test)]
mod tests;

pub use plan::{Facts, Plan, nodes, plan};
pub use targets::{Site, Target, targets};

use thiserror::Error;

use crate::cdi::CdiError;
use crate::model::claim::ClaimRef;
use crate::model::names::{DeviceName, NodeName, PoolName, RequestName};
use crate::params::ResolveError;

/// Why a claim is not prepared. The text is shown in the pod's events; nothing was changed.
#[derive(Debug, Clone, PartialEq, Error)]
pub enum Refusal {
    #[error("the allocation has no result for driver gpu.nvidia.com")]
    NothingAllocated,
    #[error(
        "request \"{request}\" was given device {device} of pool {pool}, but this is node {node} and prepares only \
         devices of pool {node}; delete the claim so that it is allocated again"
    )]
    OtherPool { request: RequestName, device: DeviceName, pool: PoolName, node: NodeName },
    #[error(
        "request \"{request}\" was given device {device}, which this node does not have (it has {present}); \
         if the GPU was re-partitioned, delete the claim so that it is allocated again"
    )]
    NoSuchDevice { request: RequestName, device: DeviceName, present: String },
    #[error("device {device} cannot be used: {reason}")]
    Unhealthy { device: DeviceName, reason: String },
    #[error(
        "device {device} is in use by claim {holder} on this node; it was allocated twice. \
         The claim that holds it goes on undisturbed; delete one of the two"
    )]
    InUse { device: DeviceName, holder: ClaimRef },
    #[error("device {device} was given as a share, but GPUs of this node are not shareable")]
    NotShareable { device: DeviceName },
    #[error(
        "sharing.strategy MPS is asked for {device}, but this release does not set up MPS inside a claim"
    )]
    MpsNotServed { device: DeviceName },
    #[error(transparent)]
    Params(#[from] ResolveError),
    #[error("the container edits for its devices cannot be made")]
    Cdi(#[from] CdiError),
}

impl Refusal {
    /// True for two claims on one device: the control plane's mistake, counted apart.
    pub fn is_double_allocation(&self) -> bool {
        matches!(self, Self::InUse { .. })
    }
}
