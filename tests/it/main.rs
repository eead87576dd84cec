//! The contract tests: each module speaks to one of the driver's edges as its real peer would.
//! `deploy` looks at the manifests and the chart.
//! One binary, because each further one links the whole driver again.

// A test may be long, spawn and measure; its pauses are looked at by tests/tidy.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::too_many_lines, clippy::disallowed_methods)]

mod carving;
mod cdi;
mod cluster;
mod containers;
mod controller;
mod crash;
mod deploy;
mod device_faults;
mod explain;
mod fake_kubelet;
mod fake_mig;
mod fake_mps;
mod feed;
mod holders;
mod kubelet;
mod labels;
mod logs;
mod memory;
mod metrics;
mod mig_mode;
mod mig_walk;
mod mock_api;
mod monitoring;
mod mps;
mod node;
mod nvml;
mod nvml_mig;
mod objects;
#[path = "../fuzz/driver/pace.rs"]
mod pace;
mod plan;
mod podrules;
mod release;
mod reporter;
mod rig;
mod shares;
mod simulate;
mod site;
mod slow_disk;
mod stop_at;
mod tools;
mod variables;
mod watchdog;
mod webhook;
