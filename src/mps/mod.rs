//! The supervisor of MPS daemons: one process per node, apart from the node plugin, because a daemon that
//! stops takes every tenant of its GPU with it: updating the plugin must not.
//!
//! ```text
//! node ─socket→ supervisor::Listener ─→ Supervisor ─→ Group (one lock each) ─→ daemon, its folder
//!                                           ↑            ↑                └──→ compute modes of the boards
//!                                      .records       checks (every 2 s): alive? answers? limits, modes as asked?
//! ```
//! A group is the set of devices that one daemon serves. Its desired state is written to disk before anything is done, so
//! that a supervisor that starts again finds its daemons, and adopts the live ones without touching them.
//!
//! | when | what becomes of the daemons |
//! |---|---|
//! | SIGTERM | those that serve claims stay and outlive this process; those that rest are ended |
//! | one died | clients are kept out, what it left is ended; started again after 1 s, 2 s, … 60 s |
//! | one is mute | as if dead if it has no servers; else left alone, since tenants may still work |
//! | the last claim left | servers end, boards go back to DEFAULT; what tenants left in /dev/shm goes, with the daemon if it does not go without; else the daemon is kept warm for a while |
//!
//! Clients find a daemon only while its limits are known to be in force ([`crate::daemon::Folder::open`]).
//!
//! May import: model, daemon, supervisor (the socket's protocol), nvml, host, ops. May name: tokio, futures,
//! serde, serde_json, prometheus_client, thiserror, tracing.

pub mod config;
mod group;
mod metrics;
mod record;
mod run;
mod supervise;
mod tools;

pub use group::GroupError;
pub use metrics::MpsMetrics;
pub use run::{MpsError, run};
pub use supervise::Supervisor;
pub use tools::Tools;
