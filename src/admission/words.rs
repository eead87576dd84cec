//! What is told of requests that cannot be for shares: here, and by the controller of claims that came by unchecked.
//! The words stand behind the field's path.

use crate::model::names::SHARED_CLASS;

pub const ALLOCATION_MODE: &str = "has no meaning for shares; write a count";
pub const ADMIN_ACCESS: &str = "is of class gpu.nvidia.com; shares have none";
pub const CAPACITY: &str = "is for class gpu.nvidia.com; for a share a GpuShare says how much";

/// Of `deviceClassName`, beside requests for shares.
pub fn other_class(class: &str) -> String {
    format!(
        "{class:?} is allocated by somebody else than {SHARED_CLASS}; a claim has one allocation, so write two claims"
    )
}
