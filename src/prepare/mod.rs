//! What preparing a claim means: checks, then a plan in which every name, path and limit is chosen.
//!
//! ```text
//! claim ─→ targets (does it exist, is it free?) ─→ plan (steps, CDI file, answer)
//! ```
//! The executor (node::executor) decides nothing: it records the plan's intent, applies its steps in order,
//! and gives its answer. A plan made twice from the same facts is the same plan.
//!
//! May import: model, params, sharing, cdi, ledger. May name: thiserror.

mod carved;
mod mps;
mod plan;
mod share;
mod targets;
#[cfg(test)]
mod tests;

pub use plan::{ExclusiveDevice, Facts, Plan, exclusive_of, nodes, nodes_of, plan, to_make};
pub use share::as_recorded;
pub use targets::{Site, Target, is_carved_over, targets};

use thiserror::Error;

use crate::cdi::CdiError;
use crate::ledger::Placer;
use crate::model::claim::ClaimRef;
use crate::model::mig::MigPlace;
use crate::model::names::{DeviceName, DeviceUuid, NodeName, PoolName, RequestName};
use crate::model::quantity::Bytes;
use crate::model::share::{Isolation, MpsGroup};
use crate::params::{ResolveError, limit_of_scheduled_share, limit_of_whole};
use crate::sharing::{NotShareable, ShareError};

/// Why a claim is not prepared. The text is shown in the pod's events; nothing was changed.
#[derive(Debug, Clone, PartialEq, Error)]
pub enum Refusal {
    #[error("the allocation has no result for driver gpu.nvidia.com")]
    NothingAllocated,
    #[error(
        "request \"{request}\" was given device {device} of pool {pool}, but this is node {node} and prepares only \
         devices of pool {node}; delete the pods that use the claim, and new ones get it allocated again"
    )]
    OtherPool { request: RequestName, device: DeviceName, pool: PoolName, node: NodeName },
    #[error(
        "request \"{request}\" was given device {device}, which this node does not have (it has {present}); \
         if the GPU was re-partitioned, delete the pods that use the claim, and new ones get it allocated again"
    )]
    NoSuchDevice { request: RequestName, device: DeviceName, present: String },
    #[error(
        "device {device} is not there yet: it is made when the claim that it is allocated to is prepared, and what a \
         container gets of it is known only then. Administrative access needs a device that is there"
    )]
    NotMade { device: DeviceName },
    #[error("device {device} cannot be used: {reason}")]
    Unhealthy { device: DeviceName, reason: String },
    #[error("device {device} takes no new claims: {why}. Delete the pod, and a new one gets another device")]
    Changing { device: DeviceName, why: String },
    #[error(
        "device {device} is in use by claim {holder} on this node, which goes on undisturbed. \
         If that claim is just ending, kubelet's next attempt succeeds; otherwise the device was allocated twice: \
         delete one of the two"
    )]
    InUse { device: DeviceName, holder: ClaimRef },
    #[error(
        "device {device} is not free yet: claim {holder} has ended or was taken away, but the device is held: {by}. \
         Once these processes have ended kubelet's next attempt succeeds"
    )]
    Withheld { device: DeviceName, holder: ClaimRef, by: String },
    #[error(
        "device {device} is not free yet: it is held by {by}. Once these processes have ended kubelet's next attempt succeeds. If they \
         only watch the GPU, give their pods a claim with adminAccess, or set node.openDescriptors=warn"
    )]
    Open { device: DeviceName, by: String },
    #[error(
        "the share of device {device} finds no room beside a share that is not free yet: claim {holder} has ended \
         or was taken away, but its share is held: {by}. Once these processes have ended kubelet tries again"
    )]
    WithheldShare { device: DeviceName, holder: ClaimRef, by: String },
    #[error(
        "device {device} is not free yet: the MIG device that was made for claim {holder} could not be ended: {why}. Once \
         it is ended, kubelet's next attempt succeeds; or delete the pod, and a new one gets another device"
    )]
    NotEnded { device: DeviceName, holder: ClaimRef, why: String },
    #[error("device {device} was given as a share, but it is not shareable: {reason}")]
    NotShareable { device: DeviceName, reason: NotShareable },
    #[error("the share of device {device}")]
    Share { device: DeviceName, source: ShareError },
    #[error(
        "the share of device {device} has no memory, so nothing could be enforced; \
         ask for some with capacity.requests.memory"
    )]
    Uncounted { device: DeviceName },
    #[error(
        "sharing.strategy is for a device that the claim has for itself, but {device} was given as a share; \
         remove it: a share has its limits from the allocation"
    )]
    SharingOfAShare { device: DeviceName },
    #[error("{}", limit_of_scheduled_share(field, &format!("device {device}")))]
    LimitOfScheduledShare { device: DeviceName, field: &'static str },
    #[error("{}", limit_of_whole(field, &format!("device {device}")))]
    LimitOfWhole { device: DeviceName, field: &'static str },
    #[error(
        "the controller granted a share of {granted}, which is another GPU of this node now than {device} ({found}): a name \
         moves with the board's number, a UUID does not; delete the pods that use the claim, and new ones get it allocated again"
    )]
    OtherBoard { device: DeviceName, granted: DeviceUuid, found: DeviceUuid },
    #[error(
        "the controller granted a MIG device of {device}, which is not carved for claims here (any more): GPUs are by \
         --mig-on-demand, in MIG mode; delete the pods that use the claim, and new ones get it allocated again"
    )]
    NotCarved { device: DeviceName },
    #[error(
        "the controller granted a MIG device of {device}, and the allocation has it as a share beside; delete the pods \
         that use the claim, and new ones get it allocated again"
    )]
    CarvedShare { device: DeviceName },
    #[error(
        "the controller granted a MIG device of profile {profile} at memory slice {start} ({size} of them) of {device}, which \
         that GPU cannot be cut into (it has {known}); delete the pods that use the claim, and new ones get it allocated again",
        profile = .place.profile_id, start = .place.placement.start, size = .place.placement.size
    )]
    NoPlacement { device: DeviceName, place: MigPlace, known: String },
    #[error(
        "the controller granted {} MiB, but the MIG device of {device} that it chose has {} MiB; delete the pods that use \
         the claim, and new ones get it allocated again", .granted.mib_ceil(), .found.mib_floor()
    )]
    Smaller { device: DeviceName, granted: Bytes, found: Bytes },
    #[error(
        "GPU {device} is carved into MIG devices for claims, and is given to nobody as it is; ask for a MIG device by \
         class mig.nvidia.com, or by class shared.gpu.nvidia.com with minimumIsolation mig"
    )]
    NotGiven { device: DeviceName },
    #[error(
        "the controller promised isolation {promised}, but {device} offers {offered}; \
         delete the pods that use the claim, and new ones get it allocated again"
    )]
    Promised { device: DeviceName, promised: Isolation, offered: Isolation },
    #[error(
        "shares of {device}, and MIG devices made of it, cannot come from the scheduler and from the controller at once, \
         and claim {holder} has one that {placer} placed, which goes on undisturbed. If that claim is just ending, kubelet's next \
         attempt succeeds; otherwise delete one of the two"
    )]
    OtherPlacer { device: DeviceName, holder: ClaimRef, placer: Placer },
    #[error(
        "minimumIsolation is {demanded}, but {device} offers {offered}; select devices by their attribute \
         isolation, or ask for less"
    )]
    Isolation { device: DeviceName, demanded: Isolation, offered: Isolation },
    #[error(
        "shares of {device} with and without limits cannot be mixed, and claim {holder} has the other kind; \
         delete one of the two"
    )]
    OtherMechanism { device: DeviceName, holder: ClaimRef },
    #[error(
        "the claim needs one MPS daemon for {group}, but claim {holder} uses one for {other}: shares of one \
         GPU, and shares of several GPUs in one claim, cannot meet on a GPU; delete one of the two"
    )]
    OtherGroup { group: MpsGroup, other: MpsGroup, holder: ClaimRef },
    #[error(
        "MPS has one active thread percentage for all GPUs of a process, but the claim's GPUs have different \
         ones; give them the same"
    )]
    ComputeDiffers,
    #[error(transparent)]
    Params(#[from] ResolveError),
    #[error("the container edits for its devices cannot be made")]
    Cdi(#[from] CdiError),
}

impl Refusal {
    /// True if somebody else holds the device, another claim mostly: that is counted apart.
    pub fn is_double_allocation(&self) -> bool {
        match self {
            Self::InUse { .. }
            | Self::Withheld { .. }
            | Self::WithheldShare { .. }
            | Self::Open { .. }
            | Self::NotEnded { .. }
            | Self::OtherPlacer { .. } => true,
            Self::Share { source, .. } => source.is_for_want_of_room(),
            _ => false,
        }
    }
}
