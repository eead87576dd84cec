//! What people are told of a claim on this node: its entries of `status.devices` (KEP-4817), and events.
//!
//! * [`claim_health`]: the state of a claim beside its grant: within the grant or not, unhealthy GPUs
//! * [`entries`]: ledger record + claim health → one entry per device, with conditions and the grant as data
//! * [`messages`]: the texts of events and conditions
//!
//! Numbers are what the ledger records as granted and what was measured, never what the claim asked for.
//!
//! May import: model, ledger. May name: k8s-openapi and jiff as data, serde_json.

mod claim_health;
mod entries;
mod messages;

pub use claim_health::{
    ClaimHealth, Concerned, DetourStage, GpuPart, GrantEvent, GrantEventKind, GrantUsage, MpsDetour,
    PartHealth,
};
pub use entries::{CONDITIONS, differ, entries};
pub use messages::{
    ClaimEvent, EventType, detour_event, edits_renewed, gone, grant_event, health_event, prepared, withheld,
};
