//! Words: what the other rooms talk about. No decisions, no effects, nothing from outside.
//!
//! * [`names`]: identifiers of the field (driver, pool, device, claim, GPU) and their laws
//! * [`quantity`]: exact Kubernetes quantities, bytes and MiB
//! * [`gpu`]: GPUs and MIG devices as this node has them
//! * [`claim`]: a claim and what was allocated to it
//!
//! May import: nothing of ours. May name: serde, thiserror.

pub mod claim;
pub mod gpu;
pub mod names;
pub mod quantity;
