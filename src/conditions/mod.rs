//! What people are told of a claim on this node: its entries of `status.devices` (KEP-4817), and events.
//!
//! * [`standing`]: what is known of a claim beside its grant: over it or not, boards that ail
//! * [`entries`]: ledger record + standing → one entry per device, with conditions and the grant as data
//! * [`words`]: the events
//!
//! Numbers are those of the ledger and of whoever measured, never of what was asked for.
//!
//! May import: model, ledger. May name: k8s-openapi and jiff as data, serde_json.

mod entries;
mod standing;
mod words;

pub use entries::{CONDITIONS, differ, entries};
pub use standing::{Ailment, Finding, Part, Seen, Standing, Usage};
pub use words::{Telling, Tone, ailing, found, prepared, withheld};
