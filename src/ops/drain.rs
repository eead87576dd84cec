//! How a process ends. A first signal, or a task that ended too early, cancels the process's token: whoever has work
//! takes no more, and finishes what is under way. A second signal, or a deadline, drops everything that is left; the
//! ledger remembers it.

use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::sync::CancellationToken;

use super::OpsError;

/// SIGTERM and SIGINT, caught from the moment this exists.
#[derive(Debug)]
pub struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    /// # Errors
    /// The handlers cannot be installed.
    pub fn catch() -> Result<Self, OpsError> {
        Self::of(SignalKind::terminate(), SignalKind::interrupt())
    }

    fn of(terminate: SignalKind, interrupt: SignalKind) -> Result<Self, OpsError> {
        Ok(Self {
            terminate: signal(terminate).map_err(OpsError::Signals)?,
            interrupt: signal(interrupt).map_err(OpsError::Signals)?,
        })
    }

    /// The next signal's name.
    async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}

/// Cancels the process's token. Says why in the log, the first time.
pub(super) fn begin(stop: &CancellationToken, why: &str) {
    if !stop.is_cancelled() {
        tracing::info!(why, "draining");
        stop.cancel();
    }
}

/// Cancels `stop` at the first signal. Ends at the next one, or when `deadline` has passed since `stop` was cancelled,
/// by whomever.
pub(super) async fn drive(mut signals: Signals, stop: &CancellationToken, deadline: Duration) {
    tokio::select! {
        name = signals.next() => begin(stop, name),
        () = stop.cancelled() => {}
    }
    let why = tokio::select! {
        name = signals.next() => name,
        () = tokio::time::sleep(deadline) => "the drain deadline has passed",
    };
    tracing::warn!(why, "stopping at once");
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEADLINE: Duration = Duration::from_secs(20);

    fn send_to_self(name: &str) {
        let pid = std::process::id().to_string();
        let sent = std::process::Command::new("kill").args(["-s", name, &pid]).status().unwrap();
        assert!(sent.success());
    }

    #[tokio::test]
    async fn a_first_signal_drains_and_a_second_stops_at_once() {
        // Signals of its own: other tests of this process listen to the real ones.
        let signals = Signals::of(SignalKind::user_defined1(), SignalKind::user_defined2()).unwrap();
        let stop = CancellationToken::new();
        let story = async {
            assert!(!stop.is_cancelled());
            send_to_self("USR1");
            stop.cancelled().await;
            send_to_self("USR2");
        };
        let both = async { tokio::join!(drive(signals, &stop, DEADLINE), story) };
        tokio::time::timeout(DEADLINE / 2, both).await.expect("signals arrive");
    }
}
