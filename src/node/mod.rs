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
pub mod holding;
pub mod labels;
pub mod lanes;
mod leavable;
mod listing;
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

/// Threads for work that blocks. While a claim is prepared or released on a GPU, one is taken for as long as its processes
/// are listed and looked at, and its lane is waited for: half a minute. A node has 16 GPUs at most; the sweeper takes one or
/// two more. Claims on other GPUs, and faults that are to be saved, need theirs meanwhile. A thread that idles ends.
pub const BLOCKING_THREADS_MAX: usize = 64;

pub use metrics::NodeMetrics;
pub use run::{NodeError, driver_root, run};

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::BLOCKING_THREADS_MAX;

    #[test]
    fn a_release_that_waits_on_each_of_sixteen_gpus_leaves_threads_for_claims_and_faults() {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_all().max_blocking_threads(BLOCKING_THREADS_MAX).build().unwrap();
        let (let_go, held_up) = std::sync::mpsc::channel::<()>();
        let held_up = std::sync::Arc::new(std::sync::Mutex::new(held_up));
        runtime.block_on(async {
            // Their lanes, the sweeper's look and the one at devices that nobody has.
            for _ in 0..16 + 2 {
                let held_up = held_up.clone();
                tokio::task::spawn_blocking(move || held_up.lock().unwrap().recv().is_err());
            }
            let other = tokio::task::spawn_blocking(|| 7);
            let other = tokio::time::timeout(Duration::from_secs(60), other).await;
            drop(let_go);
            assert_eq!(other.expect("it waits for the others").unwrap(), 7);
        });
    }
}
