//! Tests on a real cluster: a rig (hack/rig) named by TRANCHE_RIG, which has to be up. Without it
//! each test prints one loud line and passes.
//!
//!     RIG_NAME=test hack/rig/rig up
//!     TRANCHE_RIG=test cargo test --test cluster
//!
//! A test takes the rig by `Rig::of_env`, which keeps the others waiting: they run one at a time. It
//! makes what it needs and takes it away again, also when it fails (`Rig::on_end`).
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod deploy;
mod rig;
