//! Tests on a real cluster: a rig (hack/rig). `hack/test-cluster.sh` brings rigs up and runs all of them, several
//! rigs side by side; `hack/test-cluster.sh NAME` runs those with NAME in their names. On a rig of one's own:
//!
//!     RIG_NAME=mine RIG_NODES=2 RIG_FAKE_NVML=target/fake/release/libfake_nvml.so hack/rig/rig up
//!     TRANCHE_RIG=mine cargo test --test cluster -- --ignored deploy:: api:: webhook::  # on the bare cluster
//!     RIG_NAME=mine hack/stage.sh node-a=h100:8:7=1g.10gb,1g.10gb,2g.20gb node-b=l40s:2
//!     TRANCHE_RIG=mine cargo test --test cluster -- --ignored sharing::                 # the driver at work
//!
//! Every test is `ignore`d, because none can run without a rig; `plan.tsv` says where each belongs. A test takes
//! the rig by `Rig::bare` or `TestCluster::of_env`, which keep other tests of this process waiting: they run one at a
//! time on a rig. It makes what it needs and takes it away again, also when it fails (`Rig::on_end`).
// A test may be long, spawn and measure; its pauses are looked at by tests/tidy.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::too_many_lines, clippy::disallowed_methods)]

mod api;
mod autoscaling;
mod bad_input;
mod churn;
mod controller;
mod deploy;
mod discovery;
mod hollow;
mod labels;
mod machine;
mod manifests;
mod mig;
mod mig_controller;
mod mig_switch;
mod monitoring;
mod nvidia;
mod pods;
mod restarts;
mod rig;
mod shares;
mod sharing;
mod tenants;
mod test_cluster;
mod tools;
mod tried;
mod upgrade;
mod webhook;
