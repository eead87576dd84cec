//! The node plugin: one process per node.
//!
//! ```text
//! NVML ─→ discovery ─→ watch<Inventory> ─→ publisher ─→ ResourceSlices
//!             │              ├──────────→ health ────→ kubelet's health stream
//!             │              ├──────────→ labels ────→ the Node's labels (off by default)
//!             └→ device_faults ─→ watch<DeviceFaults>: to both
//!                            └──────────→ preparer ←── kubelet's calls
//!                                           └→ lanes → executor (carving) → ledger (store), CDI file, GPU
//!                                                ↑
//!                                             sweeper (start, every minute) ←── holders, unclaimed ←── /proc
//!                                             mig_mode (a change of the ledger, time): modes off that nobody needs
//! prepared, grant changed, health changed ─→ reporter ─→ status.devices and events of claims
//! ledger, NVML's process lists, /proc ─→ watchdog ─→ findings, metrics, ends of processes
//! kubelet's list of pods ─→ containers ────┘
//! ```
//! [`run`] wires it. Every part is a task of `ops::tasks`: one that ends by itself ends the process.
//!
//! May import: model, inventory, slices, cdi, sharing, prepare, ledger, conditions, nvml, kubelet, cluster, supervisor,
//! host, ops. May name: tokio, prometheus_client, tracing.

pub mod carver;
mod carving;
pub mod config;
pub mod containers;
pub mod daemon_reports;
mod daemons;
pub mod device_faults;
pub mod discovery;
mod exclusive;
pub mod executor;
pub mod failure_file;
pub mod file_looks;
mod findings;
pub mod health;
pub mod holders;
pub mod labels;
pub mod lanes;
mod metrics;
pub mod mig_mode;
pub mod offering;
pub mod preparer;
pub mod publication;
pub mod publisher;
pub mod reporter;
mod run;
pub mod state;
pub mod store;
mod stored;
pub mod sweeper;
pub mod unclaimed;
pub mod watchdog;

pub use metrics::NodeMetrics;
pub use run::{NodeError, driver_root, run};
