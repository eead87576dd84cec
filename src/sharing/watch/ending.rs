//! When a process that was told to end, and is still there, is told again.

use super::EndMethod;

/// Looks after which a client that was to be terminated, and still holds memory, is killed without its daemon.
const UNTIL_KILL: u32 = 2;
/// Looks after which a killed process that is still there is killed again: one that hangs in the kernel
/// cannot go at once.
const UNTIL_AGAIN: u32 = 20;

/// A process that was told to end.
#[derive(Debug)]
pub(super) struct EndAttempt {
    how: EndMethod,
    /// Looks since then.
    looks: u32,
    /// It could not be killed.
    has_failed: bool,
    /// Kills in a row that failed, this one among them.
    failures: u32,
}

impl EndAttempt {
    pub fn new(how: EndMethod) -> Self {
        Self { how, looks: 0, has_failed: false, failures: 0 }
    }

    /// At a look that shows the process still. Returns how it is to be told now, if it is.
    pub fn look(&mut self) -> Option<EndMethod> {
        self.looks = self.looks.saturating_add(1);
        if self.looks < self.patience() {
            return None;
        }
        let failures = if self.has_failed { self.failures } else { 0 };
        *self = Self { failures, ..Self::new(EndMethod::Kill) };
        Some(self.how)
    }

    /// What it was told so came to nothing. A daemon that does not answer is given [`UNTIL_KILL`] anyway.
    pub fn fail(&mut self, how: EndMethod) {
        if how == EndMethod::Kill && self.how == EndMethod::Kill && !self.has_failed {
            self.has_failed = true;
            self.failures = self.failures.saturating_add(1);
        }
    }

    /// A kill that failed is tried again at the next look, and each time after twice as many: one that always fails is told
    /// of as seldom as one that hangs in the kernel.
    fn patience(&self) -> u32 {
        match (self.how, self.has_failed) {
            (EndMethod::Terminate, _) => UNTIL_KILL,
            (EndMethod::Kill, false) => UNTIL_AGAIN,
            (EndMethod::Kill, true) => {
                let doubled = 1_u32.checked_shl(self.failures.saturating_sub(1));
                doubled.unwrap_or(UNTIL_AGAIN).min(UNTIL_AGAIN)
            }
        }
    }
}
