//! The publisher's timing: how soon it looks and writes; and the state that it reports.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use tokio::time::Instant;

use super::offering::Keeps;
use crate::model::names::{DeviceName, NodeName};
use crate::model::time::back_off;
use crate::slices::{Dropped, Offered};

/// How long things wait. The defaults are for production; tests take shorter ones.
#[derive(Debug, Clone, Copy)]
pub struct PublicationPace {
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

impl Default for PublicationPace {
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

/// Why slices are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WriteCause {
    /// Other content than before.
    Content,
    /// Somebody else edited them.
    Repair,
    /// One is gone without our doing.
    Missing,
}

/// When the publisher tries next, and when it may write.
pub(super) struct Schedule {
    pace: PublicationPace,
    due: Option<Instant>,
    failures_in_row: u32,
    last_look: Option<Instant>,
    /// The last writes, by cause.
    content: Option<Instant>,
    repair: Option<Instant>,
    missing: Option<Instant>,
}

impl Schedule {
    pub fn new(pace: PublicationPace) -> Self {
        Self {
            pace,
            due: None,
            failures_in_row: 0,
            last_look: None,
            content: None,
            repair: None,
            missing: None,
        }
    }

    pub fn pace(&self) -> &PublicationPace {
        &self.pace
    }

    /// When to try next.
    pub fn due(&self) -> Option<Instant> {
        self.due
    }

    pub fn try_now(&mut self) {
        self.due = Some(Instant::now());
    }

    pub fn try_at(&mut self, at: Instant) {
        self.due = Some(at);
    }

    /// Unless another try is due: once this pause is over since the last look.
    pub fn look_soon(&mut self, pause: Duration) {
        let at = after(self.last_look, pause, Instant::now());
        self.due.get_or_insert(at);
    }

    pub fn begin_look(&mut self) {
        self.due = None;
        self.last_look = Some(Instant::now());
    }

    pub fn succeeded(&mut self) {
        self.failures_in_row = 0;
    }

    /// True if it is the first failure in a row. `again`: it is tried again by itself.
    pub fn failed(&mut self, again: bool, node: &NodeName) -> bool {
        self.failures_in_row += 1;
        self.due = again.then(|| Instant::now() + self.back_off(node));
        self.failures_in_row == 1
    }

    /// Doubles with each failure. Nodes differ, so that they do not all come back at once.
    fn back_off(&self, node: &NodeName) -> Duration {
        let full = back_off(self.pace.retry, self.failures_in_row, self.pace.retry_most);
        let mut hasher = DefaultHasher::new();
        (node.as_str(), self.failures_in_row).hash(&mut hasher);
        full.mul_f64(0.5 + (hasher.finish() % 512) as f64 / 1024.0)
    }

    /// When the next write is allowed.
    pub fn earliest(&self, cause: WriteCause, now: Instant) -> Instant {
        match cause {
            WriteCause::Content => after(self.content, self.pace.content, now),
            WriteCause::Repair => after(self.repair, self.pace.repair, now),
            WriteCause::Missing => after(self.missing, self.pace.missing, now),
        }
    }

    /// What is written next is no change of content, and does not wait for the pace.
    pub fn let_content_go(&mut self) {
        self.content = None;
    }

    /// Slices were written. `settled`: their content was in the API server before; `wiped`: one was gone.
    pub fn note_writes(&mut self, settled: bool, wiped: bool) {
        let now = Some(Instant::now());
        if !settled {
            self.content = now;
        } else if !wiped {
            self.repair = now;
        }
        if wiped {
            self.missing = now;
        }
    }
}

/// `now`, but not before `pause` is over since `last`.
fn after(last: Option<Instant>, pause: Duration, now: Instant) -> Instant {
    last.map_or(now, |last| now.max(last + pause))
}

/// What has been published, for readiness, metrics and `tranche inspect`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Publication {
    pub phase: PublicationPhase,
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
pub enum PublicationPhase {
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
