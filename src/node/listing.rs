//! Lists the processes of the node's pods. One listing serves all who asked before it began, if it fails as well. It runs on
//! a thread that is left when something holds it up, because claims wait for it: nobody waits longer than two listings take.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tracing::warn;

use super::leavable::{LeavableThreads, THREADS_MAX};
use crate::host::{PodProcesses, Processes};

/// For listing the node's processes. Kubelet waits 45 s. A release lists them twice, each time behind a listing that had
/// begun before (12 s), and looks at files twice (8 s each); so does a claim that gets devices alone which were seen open.
pub(super) const LIST_LIMIT: Duration = Duration::from_secs(5);
/// A listing that ends by itself, because there are too many processes, does so within that time.
const STALL: Duration = Duration::from_secs(1);

/// What a look has found, or why there was none, in words.
pub(super) type Listing = Result<Arc<PodProcesses>, String>;

/// See the module's text.
pub(super) struct Listings {
    processes: Arc<dyn Processes>,
    threads: LeavableThreads,
    stall: Duration,
    state: Mutex<ListingState>,
    /// A listing has ended, or was left.
    ended: Condvar,
    /// The last listing was: that is told once.
    was_cut: AtomicBool,
}

#[derive(Default)]
struct ListingState {
    /// When it had begun, and what it came to.
    last: Option<(Instant, Listing)>,
    /// Somebody lists.
    under_way: bool,
}

impl Listings {
    pub fn new(processes: Arc<dyn Processes>) -> Self {
        let threads = LeavableThreads::new("list-processes", THREADS_MAX);
        Self {
            processes,
            threads,
            stall: LIST_LIMIT + STALL,
            state: Mutex::default(),
            ended: Condvar::new(),
            was_cut: AtomicBool::new(false),
        }
    }

    /// The processes as a listing finds them that has begun at `since` or later. Blocks its thread.
    ///
    /// # Errors
    /// In words, if they cannot be listed in time.
    pub fn since(&self, since: Instant) -> Listing {
        // Behind one that had begun before, and another one's that serves both.
        let until = Instant::now() + 2 * (self.stall + STALL);
        let mut state = self.state();
        loop {
            if let Some((_, found)) = state.last.as_ref().filter(|(began, _)| *began >= since) {
                return found.clone();
            }
            if !state.under_way {
                break;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(
                    "the node's processes are being listed for others, and that takes too long".to_owned()
                );
            }
            state = self.ended.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        state.under_way = true;
        drop(state);
        let began = Instant::now();
        let found = self.list(began);
        let mut state = self.state();
        *state = ListingState { last: Some((began, found.clone())), under_way: false };
        self.ended.notify_all();
        found
    }

    fn list(&self, began: Instant) -> Listing {
        let processes = self.processes.clone();
        let listed = self.threads.run(self.stall, move || processes.by_pod(began + LIST_LIMIT));
        let listed = listed.inspect_err(|problem| {
            warn!(
                problem,
                "the node's processes were not listed: until they are, who uses a GPU cannot be told"
            );
        });
        let found = listed.map_err(|problem| format!("cannot list processes: {problem}"))?;
        let is_cut = found.as_ref().is_ok_and(|found| found.is_cut);
        let was_cut = self.was_cut.swap(is_cut, Ordering::Relaxed);
        if is_cut && !was_cut {
            warn!(
                "not all processes that start on the node could be listed: too many start, or their numbers begin anew"
            );
        }
        found.map(Arc::new).map_err(|error| format!("cannot look at processes: {error}"))
    }

    /// What a panic leaves behind is an older listing.
    fn state(&self) -> MutexGuard<'_, ListingState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
#[path = "listing/tests.rs"]
mod tests;
