//! ResourceSlices: what is published for the node's GPUs, and the writes that get the API server there.
//!
//! * [`desired`]: GPUs to slice contents; names, attributes and capacities are those of NVIDIA's driver,
//!   so that users' manifests and selectors work unchanged, plus ours; boards in shares or whole ([`Offer`])
//! * `partition`: a board that is carved on demand, as devices that consume counters (KEP-4815)
//! * [`violations`]: the API server's limits, checked before anything is sent
//! * [`Grantable`]: a published board, read back by who places shares on it, or cuts it into MIG devices
//! * [`taints`]: the faults of devices as taints, which keep pods off
//! * [`diff`]: contents and what is stored to the fewest writes; a pool's generation never goes back
//! * [`dropped`]: which fields an API server without a feature gate has silently left out
//!
//! May import: model, inventory (device faults), sharing (what a board can grant). May name: k8s-openapi (as data only), serde,
//! serde_json, thiserror.

mod compare;
mod content;
mod device;
mod diff;
mod grantable;
mod offer;
mod partition;
mod policy;
mod taint;
mod validate;

pub use compare::{Dropped, dropped};
pub use content::{SliceContent, desired, unseen_parents};
pub use diff::{DesiredPool, ExistingSlices, Obsolete, SliceOwner, Write, WritePlan, diff};
pub use grantable::{BoardParts, Grantable, MigParts, ShareParts};
pub use offer::{Counters, Effect, Offer, Offered, PublishOptions, Taint, Taints, offered};
pub use taint::taints;
pub use validate::{Violation, violations};

/// Devices per slice, always: the API server takes 128, but only 64 once one of them has a taint, and a
/// full slice that gets its first taint must not become invalid at that moment (KEP-5055).
pub const DEVICES_PER_SLICE: usize = 64;
/// Counter sets per slice (KEP-4815).
pub const COUNTER_SETS_PER_SLICE: usize = 8;
/// Counters of one set.
pub const COUNTERS_PER_SET: usize = 32;
/// Attributes and capacities of one device together.
pub const ENTRIES_PER_DEVICE: usize = 32;
/// Longest attribute value, in bytes.
pub const VALUE_BYTES: usize = 64;
/// Taints of one device.
pub const TAINTS_PER_DEVICE: usize = 16;
