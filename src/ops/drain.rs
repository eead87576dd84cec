//! How a process ends: first *graceful* (take no new work, finish what is under way), then, at a
//! second signal or a deadline, *immediate* (drop everything; the ledger remembers).

use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;

use super::OpsError;

/// How far the end has come. Only ever moves forward.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    Running,
    Graceful,
    Immediate,
}

/// Told to everyone who has work to end. Clones share one stage.
#[derive(Debug, Clone)]
pub struct Shutdown(watch::Sender<Stage>);

impl Default for Shutdown {
    fn default() -> Self {
        Self(watch::Sender::new(Stage::Running))
    }
}

impl Shutdown {
    pub fn new() -> Self {
        Self::default()
    }

    pub fn stage(&self) -> Stage {
        *self.0.borrow()
    }

    /// Asks for a graceful end. Says why in the log, the first time.
    pub fn begin(&self, why: &str) {
        if self.advance(Stage::Graceful) {
            tracing::info!(why, "draining");
        }
    }

    /// Asks for an end now.
    pub fn force(&self, why: &str) {
        if self.advance(Stage::Immediate) {
            tracing::warn!(why, "stopping at once");
        }
    }

    /// Waits until the process is to end, in whatever way.
    pub async fn graceful(&self) {
        self.reached(Stage::Graceful).await;
    }

    /// Waits until the process is to end at once.
    pub async fn immediate(&self) {
        self.reached(Stage::Immediate).await;
    }

    fn advance(&self, to: Stage) -> bool {
        self.0.send_if_modified(|stage| {
            let forward = *stage < to;
            *stage = to.max(*stage);
            forward
        })
    }

    async fn reached(&self, stage: Stage) {
        // Cannot fail: self holds a sender.
        let _ = self.0.subscribe().wait_for(|now| *now >= stage).await;
    }
}

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

/// Turns signals and the deadline into stages. Ends when the stage is immediate.
pub(super) async fn drive(mut signals: Signals, shutdown: &Shutdown, deadline: Duration) {
    tokio::select! {
        name = signals.next() => shutdown.begin(name),
        () = shutdown.graceful() => {}
    }
    tokio::select! {
        name = signals.next() => shutdown.force(name),
        () = tokio::time::sleep(deadline) => shutdown.force("the drain deadline has passed"),
        () = shutdown.immediate() => {}
    }
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
        let shutdown = Shutdown::new();
        let story = async {
            assert_eq!(shutdown.stage(), Stage::Running);
            send_to_self("USR1");
            shutdown.graceful().await;
            assert_eq!(shutdown.stage(), Stage::Graceful);
            send_to_self("USR2");
            shutdown.immediate().await;
        };
        let both = async { tokio::join!(drive(signals, &shutdown, DEADLINE), story) };
        tokio::time::timeout(DEADLINE / 2, both).await.expect("signals arrive");
    }

    #[tokio::test]
    async fn the_stage_never_goes_back() {
        let shutdown = Shutdown::new();
        shutdown.force("test");
        shutdown.begin("test");
        assert_eq!(shutdown.clone().stage(), Stage::Immediate);
        tokio::time::timeout(DEADLINE, shutdown.graceful()).await.expect("immediate is graceful, too");
    }
}
