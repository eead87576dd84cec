//! Checks claims beside the thread that speaks with callers: a claim's selectors may take tenths of a second, and pods
//! must not wait for them. One claim is checked at a time. A claim that would wait for long is answered at once: a small
//! one without a try of its selectors, a larger one unread. It is let through with a warning then, since the controller
//! and the node check all of it again, within bounds.

use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Semaphore;

use super::metrics::WebhookMetrics;
use super::selector_budgets::SelectorBudgets;
use crate::admission::{self, KnownClasses, ReviewAnswer, ReviewError, SelectorBudget};

/// Reviews that wait for their turn, and for how long. The API server waits for 3 s by default.
const WAITING_MAX: usize = 64;
const TURN_DEADLINE: Duration = Duration::from_secs(1);
/// Reviews that are read on the serving thread, in bytes: of a claim as people write them, with its selectors. What it
/// costs to hold all entries of a claim against each other grows with the square of this.
const READ_AT_ONCE: usize = 8 << 10;

/// What was decided, and how long that took.
pub(super) struct Decided {
    pub answer: Result<ReviewAnswer, ReviewError>,
    pub took: Duration,
}

/// Clones share the turn and the budgets.
#[derive(Clone)]
pub(super) struct Validator {
    turn: Arc<Semaphore>,
    queue: Arc<Semaphore>,
    budgets: Arc<Mutex<SelectorBudgets>>,
    metrics: WebhookMetrics,
}

impl Validator {
    pub fn new(metrics: WebhookMetrics) -> Self {
        let budgets = Arc::new(Mutex::new(SelectorBudgets::new(Instant::now())));
        let (turn, queue) = (Arc::new(Semaphore::new(1)), Arc::new(Semaphore::new(WAITING_MAX)));
        Self { turn, queue, budgets, metrics }
    }

    /// None: a bug, which was told where it happened.
    pub async fn check(&self, peer: IpAddr, body: Vec<u8>, classes: Arc<KnownClasses>) -> Option<Decided> {
        let place = self.queue.try_acquire();
        let turn = match &place {
            Ok(_) => tokio::time::timeout(TURN_DEADLINE, self.turn.clone().acquire_owned()).await,
            Err(_) => return Some(self.at_once(&body, &classes)),
        };
        let Ok(Ok(turn)) = turn else { return Some(self.at_once(&body, &classes)) };
        drop(place);
        let this = self.clone();
        let checked = tokio::task::spawn_blocking(move || {
            let decided = this.tried(peer, &body, &classes);
            // Only now: the caller may have gone, and its review would still be under way.
            drop(turn);
            decided
        });
        checked.await.ok()
    }

    fn tried(&self, peer: IpAddr, body: &[u8], classes: &KnownClasses) -> Decided {
        let start = Instant::now();
        let mut asked = None;
        let found = admission::validate_within(body, classes, |namespace| {
            let (units, bound) = self.budgets().left(peer, namespace, start);
            asked = Some((namespace.to_owned(), bound));
            SelectorBudget::of(units)
        });
        let answer = found.map(|(answer, spent)| {
            if let Some((spent, (namespace, bound))) = spent.zip(asked) {
                self.budgets().pay(peer, &namespace, spent.spent(), start);
                if spent.is_short() {
                    self.metrics.untried(bound.as_str());
                }
            }
            answer
        });
        Decided { answer, took: start.elapsed() }
    }

    fn at_once(&self, body: &[u8], classes: &KnownClasses) -> Decided {
        let start = Instant::now();
        let (answer, is_short) = match body.len() {
            ..=READ_AT_ONCE => {
                let found = admission::validate_within(body, classes, |_| SelectorBudget::of(0));
                let is_short =
                    found.as_ref().is_ok_and(|(_, spent)| spent.as_ref().is_some_and(|s| s.is_short()));
                (found.map(|(answer, _)| answer), is_short)
            }
            _ => (admission::pass_unchecked(body), true),
        };
        if is_short {
            self.metrics.untried("queue");
        }
        Decided { answer, took: start.elapsed() }
    }

    fn budgets(&self) -> MutexGuard<'_, SelectorBudgets> {
        self.budgets.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
