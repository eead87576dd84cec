//! The controller: claims of class shared.gpu.nvidia.com, placed over the whole cluster.
//!
//! docs/architecture.md follows a claim through it. Pure, time being an argument:
//! * [`view`]: what the API server has told, reduced; `classes`: whose claims are ours; `requests`, `wants`: what a claim asks for; `ask`: the same, as the
//!   allocator is asked; `grant`: the answer, as an allocation says it
//! * owners of state, each with private fields: `bounds` (what namespaces may have), `capacity` with `usage` (what they have), [`holds`] with `gpus`,
//!   [`queue`] with `refusals`, `tracker`, `reserve` with `moves`, `preempt` (for whom pods end) with `holders` (who takes what of nodes) and `looks`,
//!   `purse`, `pods` with `host_ports` (who has which port of nodes) and `neighbours` (who keeps whom off which nodes) and `demand`, `node_filter`, `recorder`; [`core`]: all of
//!   them; `gang`: how many pods start together
//! * `steps`: what reads and changes them; `round`: in which order; `multi_gpu`: shares of several GPUs in one claim
//! * [`explain`]: why a claim waits, or where it went, for people who ask without a running controller; `status`: how
//!   things are
//! * [`mod@write`]: what is to be written, and the answers; `pending`: in which order; `backlog`: when people are told
//!
//! With effects: `lease` (who may write), `writer` (the writes), `mirror` and `templates` (for queues that count shares), [`run()`] (the loop), [`config`], `metrics`.
//!
//! A module uses only modules that stand before it in the order of `tests/tidy/controller.rs`.
//!
//! May import: model, params, admission, slices, select, allocate, feasible, cluster, ops. May name: k8s-openapi (as data), jiff, tokio,
//! futures, fastrand, prometheus_client, serde_json, tracing, thiserror.

mod ask;
mod backlog;
pub mod bounds;
mod capacity;
pub mod classes;
pub mod config;
pub mod core;
mod demand;
pub mod explain;
mod gang;
mod gpus;
mod grant;
mod holders;
pub mod holds;
mod host_ports;
mod lease;
mod looks;
mod metrics;
mod mirror;
pub mod moves;
mod multi_gpu;
mod neighbours;
mod node_filter;
mod pending;
mod pods;
mod preempt;
mod purse;
pub mod queue;
mod recorder;
mod requests;
mod reserve;
mod round;
mod run;
mod status;
mod steps;
mod templates;
#[cfg(test)]
mod tests;
mod tracker;
pub mod view;
mod wants;
pub mod write;
mod writer;

pub use metrics::{ControllerMetrics, Room, WaitingLabels};
pub use run::{ControllerError, ProcessContext, run, start};

use crate::model::time::Moment;
