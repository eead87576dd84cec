//! Tests on a real cluster: a rig (hack/rig) named by TRANCHE_RIG, which has to be up. Without it
//! each test prints one loud line and passes. hack/test-cluster.sh does all of it:
//!
//!     RIG_NAME=test RIG_NODES=2 RIG_FAKE_NVML=target/fake/release/libfake_nvml.so hack/rig/rig up
//!     TRANCHE_RIG=test cargo test --test cluster -- deploy:: api:: webhook::  # on the bare cluster
//!     RIG_NAME=test hack/stage.sh node-a=h100:8:7=1g.10gb,1g.10gb,2g.20gb node-b=l40s:2
//!     TRANCHE_RIG=test cargo test --test cluster -- --skip deploy:: --skip api:: --skip webhook::  # the driver at work
//!
//! A test takes the rig by `Rig::bare` or `Bed::of_env`, which keep the others waiting: they run one at a
//! time. It makes what it needs and takes it away again, also when it fails (`Rig::on_end`).
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod api;
mod bad_input;
mod bed;
mod churn;
mod controller;
mod deploy;
mod discovery;
mod hollow;
mod manifests;
mod pods;
mod restarts;
mod rig;
mod shares;
mod sharing;
mod upgrade;
mod webhook;
