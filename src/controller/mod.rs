//! The controller: claims of class shared.gpu.nvidia.com, placed over the whole cluster.
//!
//! Pure, each a file of its own, time being an argument:
//! * [`world`]: what the API server has told, reduced; `wants`: what a claim asks for
//! * `stock`: the allocator's index kept in step; `ask`: what waits, as the allocator is asked; `apart`: shares of
//!   several GPUs in one claim; `kept_off`: which nodes a pod cannot have
//! * [`hold`]: whose GPU is it; `rivals`: who may get one that we have just taken; `keep`: which are kept, and for whom
//!   they are given back
//! * [`queue`]: who waits, in which order; `purse`: what a round may spend on whom; `plan`: decisions on their way
//! * [`core`]: changes and answers in; [`round`]: one round of decisions, `send`: its writes, `pending`:
//!   in which order; `reserve`: what is kept free for whom, and for how long; `life`: what nobody uses
//! * [`explain`]: why a claim waits, or where it went, for people who ask without a running controller
//! * `grant`: a decision as an allocation says it; `say`: what people are told, `notes`: when; `state`: how things are
//!
//! With effects: `lease` (who may write), `writer` (the writes), [`run()`] (the loop), [`config`].
//!
//! May import: model, params, admission, slices, select, allocate, feasible, cluster, ops. May name: k8s-openapi (as data), jiff, tokio,
//! futures, fastrand, serde_json, tracing, thiserror.

mod apart;
mod ask;
pub mod config;
pub mod core;
pub mod explain;
mod grant;
pub mod hold;
mod keep;
mod kept_off;
mod lease;
mod life;
mod notes;
mod pending;
mod plan;
mod purse;
pub mod queue;
mod reserve;
mod rivals;
pub mod round;
mod run;
mod say;
mod send;
mod state;
mod stock;
#[cfg(test)]
mod tests;
mod wants;
pub mod world;
pub mod write;
mod writer;

use std::time::Duration;

pub use run::{Around, ControllerError, run, start};

/// Since the start of the process.
pub type Moment = Duration;
