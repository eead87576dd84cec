//! Who may write. One controller of several holds the Lease; the others watch it. A lease is taken over when it has
//! shown no sign of life for its duration by our own clock, and even then nothing is written for another duration:
//! a write that the old leader began may still be under way (optimistic locks are per claim, GPUs have none).

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use thiserror::Error;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::cluster::lease::{LeaseHolder, LeaseName, StoredLease};
use crate::cluster::{CallError, KubeCluster};
use crate::controller::Moment;
use crate::ops::readiness::Token;

/// Beyond the longest that a call may take: for the time between the check and the call.
const MARGIN: Duration = Duration::from_secs(1);
/// For writes under way to end before the lease is given up.
const DRAIN: Duration = Duration::from_secs(8);

/// Why this process leads no longer. It ends: what it knows may be decided anew by another already.
#[derive(Debug, Error)]
pub enum LeaseError {
    #[error("the lease {0} belongs to {1} now; another controller leads")]
    Taken(String, String),
    #[error("the lease {0} could not be renewed in time; another controller may lead soon")]
    Late(String, #[source] Option<Box<CallError>>),
}

/// Opens and closes the way for writes.
#[derive(Debug, Clone)]
pub struct Gate {
    start: Instant,
    /// Milliseconds after `start` until which writes may begin.
    until: Arc<AtomicU64>,
}

impl Gate {
    pub fn closed() -> Self {
        Self { start: Instant::now(), until: Arc::new(AtomicU64::new(0)) }
    }

    /// True if a write that begins now is over, or given up, before anybody else may write.
    pub fn is_open(&self) -> bool {
        let now = u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX);
        now < self.until.load(Ordering::Acquire)
    }

    fn open_until(&self, moment: Moment) {
        self.until.store(u64::try_from(moment.as_millis()).unwrap_or(0), Ordering::Release);
    }
}

/// What is to be done about a lease that was just read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LeaseAction {
    /// Write our name. `fence`: somebody may still be writing.
    Take {
        fence: bool,
    },
    Renew,
    Wait,
    Lost,
}

/// What is known of the lease, by our own clock.
#[derive(Debug)]
struct Elector {
    me: String,
    duration: Duration,
    seen: Option<(String, Moment)>,
    leading: bool,
}

impl Elector {
    fn look(&mut self, stored: Option<&StoredLease>, now: Moment) -> LeaseAction {
        let Some(stored) = stored else {
            // Deleted by somebody: whoever had it may not know yet.
            return if self.leading { LeaseAction::Lost } else { LeaseAction::Take { fence: true } };
        };
        match &stored.holder {
            Some(holder) if *holder == self.me => LeaseAction::Renew,
            _ if self.leading => LeaseAction::Lost,
            None => LeaseAction::Take { fence: false },
            Some(_) => {
                let version = &stored.resource_version;
                let since = match &self.seen {
                    Some((known, since)) if known == version => *since,
                    _ => {
                        self.seen = Some((version.clone(), now));
                        now
                    }
                };
                match now >= since + stored.duration.max(self.duration) {
                    true => LeaseAction::Take { fence: true },
                    false => LeaseAction::Wait,
                }
            }
        }
    }
}

/// Keeps the lease, or tries to get it.
pub struct Leasing {
    pub api: KubeCluster,
    pub at: LeaseName,
    pub me: String,
    pub duration: Duration,
    pub every: Duration,
    pub call_limit: Duration,
    pub gate: Gate,
    /// Told once: we lead, and everything is to be read now.
    pub leading: watch::Sender<bool>,
    /// Dropped once the lease was looked at.
    pub looked: Option<Token>,
}

impl Leasing {
    /// Until `stop`, or until the lease is lost. `idle` ends when nothing is being written any more.
    pub async fn run(
        mut self,
        stop: CancellationToken,
        idle: impl Future<Output = ()>,
    ) -> Result<(), LeaseError> {
        let mut elector =
            Elector { me: self.me.clone(), duration: self.duration, seen: None, leading: false };
        let (mut renewed, mut fence): (Moment, Option<Moment>) = (Moment::ZERO, None);
        let mut held = None;
        let mut ticks = tokio::time::interval(self.every);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = stop.cancelled() => break,
                _ = ticks.tick() => {}
            }
            let begun = self.gate.start.elapsed();
            let turn = self.turn(&mut elector, begun).await;
            if turn.is_ok() {
                drop(self.looked.take());
            }
            let trouble = match turn {
                Ok(LeaseTurn::Ours { lease, fence: fenced }) => {
                    if let Some(fenced) = fenced {
                        let wait = if fenced { self.duration } else { Duration::ZERO };
                        info!(lease = %self.name(), wait_s = wait.as_secs_f32(), "this controller leads");
                        fence = Some(begun + wait);
                    }
                    (renewed, held) = (begun, Some(lease));
                    None
                }
                Ok(LeaseTurn::Theirs) => None,
                Ok(LeaseTurn::Lost(holder)) => return Err(LeaseError::Taken(self.name(), holder)),
                Err(error) => {
                    warn!(%error, "the lease could not be looked at");
                    Some(error)
                }
            };
            let now = self.gate.start.elapsed();
            if elector.leading {
                let until = (renewed + self.duration).saturating_sub(self.call_limit + MARGIN);
                if now >= renewed + self.duration {
                    return Err(LeaseError::Late(self.name(), trouble.map(Box::new)));
                }
                if fence.is_some_and(|fence| fence <= now) {
                    self.gate.open_until(until);
                    self.leading.send_replace(true);
                }
            }
        }
        self.give_up(held, idle).await;
        Ok(())
    }

    async fn turn(&self, elector: &mut Elector, now: Moment) -> Result<LeaseTurn, CallError> {
        let stored = self.api.lease(&self.at).await?;
        let step = elector.look(stored.as_ref(), now);
        let holder = LeaseHolder { identity: Some(self.me.clone()), duration: self.duration };
        let fence = match step {
            LeaseAction::Wait => return Ok(LeaseTurn::Theirs),
            LeaseAction::Lost => {
                let holder = stored.and_then(|stored| stored.holder);
                return Ok(LeaseTurn::Lost(holder.unwrap_or_else(|| "nobody".to_owned())));
            }
            LeaseAction::Renew if elector.leading => None,
            // Our own name, but not by this run of the loop: an answer was lost.
            LeaseAction::Renew => Some(true),
            LeaseAction::Take { fence } => Some(fence),
        };
        match self.api.write_lease(&self.at, stored.as_ref(), &holder).await {
            Ok(lease) => {
                elector.leading = true;
                Ok(LeaseTurn::Ours { lease, fence })
            }
            // Somebody was faster; the next look tells who.
            Err(CallError::Conflict { .. }) => Ok(LeaseTurn::Theirs),
            Err(error) => Err(error),
        }
    }

    /// Once nothing is being written any more, the next leader need not wait.
    async fn give_up(&self, held: Option<StoredLease>, idle: impl Future<Output = ()>) {
        let drained = tokio::time::timeout(DRAIN, idle).await.is_ok();
        self.gate.open_until(Moment::ZERO);
        let (Some(held), true) = (held, drained) else { return };
        let nobody = LeaseHolder { identity: None, duration: self.duration };
        if let Err(error) = self.api.write_lease(&self.at, Some(&held), &nobody).await {
            warn!(%error, "the lease is not given up; the next leader waits for it to expire");
        }
    }

    fn name(&self) -> String {
        format!("{}/{}", self.at.namespace, self.at.name)
    }
}

enum LeaseTurn {
    /// `fence`: taken just now, and whether somebody may still be writing.
    Ours {
        lease: StoredLease,
        fence: Option<bool>,
    },
    Theirs,
    Lost(String),
}
