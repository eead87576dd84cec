//! What every process of ours needs around its work: logs, metrics, readiness, an orderly end, tasks
//! that cannot die unseen, and a small HTTP server where people and probes can ask.
//!
//! * [`logs`]: one subscriber, its level adjustable while the process runs; error chains for people
//! * [`metrics`]: the registry and its text; each loop registers its own metrics there
//! * [`readiness`]: named tokens; ready when the last one is released
//! * [`drain`]: signals, and the process's token (`tokio_util`'s) that they cancel
//! * [`tasks`]: a task that ends too early ends the process
//! * [`server`]: /healthz, /readyz, /metrics, /state, /log-level, each at the addresses that it is for
//! * [`addresses`]: the addresses that a process listens on
//! * [`connection_slots`]: limits on connections, so that one peer cannot take all of them
//!
//! May import: nothing of ours. May be imported by the other loops, cli and main.
//! May name: tokio, tokio_util, tracing, tracing-subscriber, prometheus-client, axum, hyper.

pub mod addresses;
pub mod connection_slots;
pub mod drain;
mod exposition;
pub mod logs;
pub mod metrics;
pub mod readiness;
mod scrape;
pub mod server;
pub mod tasks;

use std::error::Error;
use std::io;
use std::net::SocketAddr;

/// What can go wrong around the work.
#[derive(Debug, thiserror::Error)]
pub enum OpsError {
    #[error(
        "log filter {filter:?} is not understood; write a level (off, error, warn, info, debug, trace) \
         or pairs such as info,tranche::node=debug"
    )]
    LogFilter { filter: String, source: Option<tracing_subscriber::filter::ParseError> },
    #[error("logging is set up twice in this process")]
    LogTwice(#[source] tracing_subscriber::util::TryInitError),
    #[error("the log filter can no longer be changed")]
    LogReload(#[source] tracing_subscriber::reload::Error),
    #[error("cannot serve {what} on {address}; choose another with {flag}")]
    Listen { what: &'static str, flag: &'static str, address: SocketAddr, source: io::Error },
    #[error("thread {name:?} cannot be started")]
    Thread { name: &'static str, source: io::Error },
    #[error("cannot listen for SIGTERM and SIGINT")]
    Signals(#[source] io::Error),
    #[error("task {name:?} failed")]
    TaskFailed { name: &'static str, source: Box<dyn Error + Send + Sync> },
    #[error("task {0:?} ended although it was not asked to: this is a bug, please report it with the log")]
    TaskEnded(&'static str),
    #[error("task {name:?} panicked: this is a bug, please report it with the log")]
    TaskPanicked { name: &'static str, source: tokio::task::JoinError },
    #[error("stopped with tasks still at work: {}", .0.join(", "))]
    DrainCutShort(Vec<&'static str>),
}
