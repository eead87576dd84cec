//! The publisher's timing, and the state that it reports.

use std::collections::BTreeMap;
use std::time::Duration;

use super::offering::Keeps;
use crate::model::names::DeviceName;
use crate::slices::{Dropped, Offered};

/// How long things wait. The defaults are for production; tests take shorter ones.
#[derive(Debug, Clone, Copy)]
pub struct Pace {
    /// Between two writes of changed content. The first, and what is missing, does not wait.
    pub content: Duration,
    /// Between two repairs of what somebody else edited.
    pub repair: Duration,
    /// Between two repairs of what somebody else deleted; the first does not wait.
    pub missing: Duration,
    /// Between two looks that somebody else's writes cause.
    pub look: Duration,
    /// After the first failure; doubles up to `retry_most`.
    pub retry: Duration,
    pub retry_most: Duration,
    /// Between two tries to get the lock.
    pub lock: Duration,
    /// Until an API server that does not keep everything is asked whether it does now.
    pub ask_again: Duration,
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            content: Duration::from_secs(10),
            repair: Duration::from_secs(30),
            missing: Duration::from_secs(1),
            look: Duration::from_secs(1),
            retry: Duration::from_millis(200),
            retry_most: Duration::from_secs(30),
            lock: Duration::from_millis(250),
            ask_again: Duration::from_secs(3600),
        }
    }
}

/// What has been published, for readiness, metrics and `tranche inspect`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Publication {
    pub phase: Phase,
    /// The pool's generation in the API server; 0 as long as it is not known.
    pub generation: i64,
    pub slices: usize,
    pub devices: usize,
    /// Why the pool is published empty, if the inventory is unavailable.
    pub empty_because: Option<String>,
    /// Creations, replacements and deletions since the start.
    pub writes: u64,
    /// Failed tries since the start.
    pub failures: u64,
    /// What this API server does not keep.
    pub dropped: Dropped,
    /// And whether it keeps shares.
    pub keeps: Keeps,
    /// How each board is offered.
    pub offered: BTreeMap<DeviceName, Offered>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Phase {
    /// Another instance publishes.
    WaitingForLock,
    /// The GPUs have not been looked at yet.
    WaitingForInventory,
    /// The inventory is to be written: now, or as soon as the pace allows.
    Pending,
    /// The API server has what the inventory wants.
    Published,
    /// The last try failed; it is tried again.
    Failing { error: String },
    /// The slices stay as they are.
    Stopped,
}
