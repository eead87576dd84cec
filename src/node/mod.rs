//! The node plugin: discovery, publishing, preparing, sweeping.
//!
//! May import: everything below, and ops. May name: tokio, tracing.

pub mod discovery;
pub mod publisher;
