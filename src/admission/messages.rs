//! Messages about requests that cannot be for shares. Admission uses them, and the controller for claims that were not
//! checked at admission. The field's path comes before each message.

use crate::model::names::{RequestName, SHARED_CLASS};
use crate::params::Params;
use crate::select::{CLAIM_BYTES_MAX, CLAIM_ENTRIES_MAX, CONSTRAINED_MAX};

pub const ALLOCATION_MODE: &str = "has no meaning for shares; write a count";
pub const ADMIN_ACCESS: &str = "is for class gpu.nvidia.com; shares have no administrative access";
/// The API server may cut a warning after 256 characters.
pub const SEVERAL_SHARES: &str = "the claim has shares of several GPUs, which one MPS daemon serves: while it lasts, no \
                                  share of a single GPU can be used on them, whoever places it, unless their node has \
                                  mps.daemon=share. Write a claim for each GPU if programs use them apart";
/// Behind the words about a request without an amount. The API server leaves the field out before anybody sees it.
pub const CAPACITY_DROPPED: &str = "if the request had capacity.requests, the API server has dropped it: Kubernetes 1.34 \
                                    and 1.35 keep it only with the feature gate DRAConsumableCapacity";

pub const CLASS_NOT_READ: &str = "the claim names a DeviceClass that is not among the 500 that the webhook reads: whose \
                                  it is, and whether it says how much a share is, the controller finds out later";

pub const CLAIM_UNCHECKED: &str = "the claim was not checked: too many are being checked just now. If something is \
                                   wrong with it, its pod waits, and the pod's event says what; apply it again to have \
                                   it checked";

pub const SELECTORS_UNTRIED: &str = "not all selectors of the claim were tried: the webhook spends so much on selectors \
                                     and no more. If one costs more than it may on a device, the claim waits, and its \
                                     pod's event says so";

/// Parameters of other kinds than GpuShare that are no mistake beside a share: they name no request, and ask for
/// nothing that a share cannot have.
pub fn may_stand_beside_shares(params: &Params, names_no_request: bool) -> bool {
    names_no_request && matches!(params, Params::Gpu(None) | Params::Mig(_))
}

/// Of `kind`, for a request of shares.
pub fn other_kind(params: &Params, request: &RequestName) -> String {
    format!("{} does not go with request \"{request}\" of class {SHARED_CLASS}; use GpuShare", params.kind())
}

/// Of `deviceClassName`, beside requests for shares.
pub fn other_class(class: &str) -> String {
    format!(
        "{class:?} is not allocated by the controller, as {SHARED_CLASS} is; a claim has one allocation, so \
         write two claims"
    )
}

/// Of all requests: so many of themselves, their selectors and tolerations.
pub fn entries(count: usize) -> String {
    format!(
        "the requests of the claim have {count} alternatives, selectors and tolerations in all; {CLAIM_ENTRIES_MAX} are \
         the most; write several claims"
    )
}

/// Of all constraints: they name so many requests.
pub fn constrained(count: usize) -> String {
    format!(
        "the constraints of the claim name {count} requests, each counted as often as it is named (one that names none is \
         about all); {CONSTRAINED_MAX} are the most; write fewer constraints, or name fewer requests in them"
    )
}

/// Of all requests: so many bytes of selectors.
pub fn selectors(bytes: usize) -> String {
    format!(
        "the selectors of the claim have {bytes} bytes in all; the limit is {CLAIM_BYTES_MAX}; write several \
         claims, or shorter selectors"
    )
}
