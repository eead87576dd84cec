//! A daemon that does not serve: why, how often in a row, and when it is tried again.

use std::time::Duration;

use tokio::time::Instant;

use crate::model::time::back_off;

const BACKOFF_MAX: Duration = Duration::from_secs(60);

#[derive(Default)]
pub(super) struct Outage {
    /// Why it does not serve, and when it is tried again; none: it serves, or nobody wants it to.
    now: Option<(String, Instant)>,
    /// Since it last served for long.
    failures: u32,
    /// The daemon did not answer the last time; it may be slow only.
    missed_answer: bool,
}

impl Outage {
    pub fn reason(&self) -> Option<&str> {
        self.now.as_ref().map(|(reason, _)| reason.as_str())
    }

    /// It is not tried again yet.
    pub fn is_pausing(&self) -> bool {
        self.now.as_ref().is_some_and(|(_, retry_at)| Instant::now() < *retry_at)
    }

    /// It failed once more. `pause`: after a first failure.
    pub fn begin(&mut self, reason: String, pause: Duration) {
        self.failures = self.failures.saturating_add(1);
        self.now = Some((reason, Instant::now() + back_off(pause, self.failures, BACKOFF_MAX)));
    }

    /// It did not answer. True if that is the first time: a machine that was busy for a moment gets a second chance at
    /// once.
    pub fn may_be_slow(&mut self, reason: &str) -> bool {
        let is_first = !std::mem::replace(&mut self.missed_answer, true);
        if is_first {
            self.now = Some((reason.to_owned(), Instant::now()));
        }
        is_first
    }

    pub fn answered(&mut self) {
        self.missed_answer = false;
    }

    /// It serves, or nobody wants it to.
    pub fn end(&mut self) {
        self.now = None;
        self.missed_answer = false;
    }

    /// It has served for long: the next failure is a first one.
    pub fn forget_failures(&mut self) {
        self.failures = 0;
    }
}
