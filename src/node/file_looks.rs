//! Looks at the files of pods: who has a device open without a claim on it? A descriptor can be handed to a process of
//! another pod, where no record knows of it.
//!
//! A look costs its caller [`LOOK_LIMIT`] and a [`STALL`] at most, whatever tenants do. It runs on a thread of its own. If
//! nothing moves for [`STALL`], the process that it stands at holds it up: that thread is left, and the next one passes that
//! process over, as do later looks until the thread comes back. It goes on with the pods that were not looked through, that
//! process's last, so that no pod with several such processes hides the pods behind it. Several looks can stand still at
//! one process, if they began before the first was left. Pods that were not looked through are told and counted, and keep
//! nobody off a device: a tenant with a million files, or with a file server that does not answer, would keep everybody off
//! all GPUs of the node.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use tracing::warn;

use super::config::OpenDescriptors;
use super::holding::{holders_of, listed};
use super::metrics::FileLookCounts;
use crate::host::{DeviceNumber, FileLook, OpenDevices, Processes};
use crate::model::names::PodUid;

/// Kubelet waits 45 s for a claim.
const LOOK_LIMIT: Duration = Duration::from_secs(6);
/// Between two files no look rests for so long, unless it is held up.
const STALL: Duration = Duration::from_secs(2);
/// Processes that may hold looks up at the same time, and threads that may stand still at them.
const STUCK_MAX: usize = 8;
const STUCK_THREADS_MAX: usize = 64;
/// Reading /proc is shallow.
const STACK: usize = 256 * 1024;
/// Between two looks at whether a look moves.
const POLL: Duration = Duration::from_millis(100);

/// Processes by pod.
pub type ByPod = BTreeMap<PodUid, Vec<u32>>;

/// Processes that have a device open, by pod; each with the first that it has.
pub type Openers = BTreeMap<PodUid, BTreeMap<u32, DeviceNumber>>;

/// See the module's text.
pub struct FileLooks {
    processes: Arc<dyn Processes>,
    policy: OpenDescriptors,
    counts: FileLookCounts,
    /// Looks that stand still, each at a process.
    stuck: Arc<Mutex<Vec<Arc<FileLook>>>>,
    limit: Duration,
    stall: Duration,
}

impl FileLooks {
    pub fn new(processes: Arc<dyn Processes>, policy: OpenDescriptors, counts: FileLookCounts) -> Self {
        Self { processes, policy, counts, stuck: Arc::default(), limit: LOOK_LIMIT, stall: STALL }
    }

    /// Those of these pods, with processes, that have one of the devices open, as far as that keeps others off the devices; and
    /// those that were not looked through. Blocks its thread for [`LOOK_LIMIT`] and a stall at most.
    ///
    /// # Errors
    /// In words, if nobody can look.
    pub fn openers(&self, pods: ByPod, devices: &BTreeSet<DeviceNumber>) -> Result<OpenDevices, String> {
        if pods.is_empty() {
            return Ok(OpenDevices::default());
        }
        let looked = self.look(&pods, devices).inspect_err(|_| self.count_unmade());
        let OpenDevices { mut openers, unfinished, unreached } = looked?;
        if !unfinished.is_empty() {
            self.counts.unfinished.inc_by(unfinished.len() as u64);
            let pods: Vec<_> = unfinished.iter().take(8).map(PodUid::as_str).collect();
            let (some, all) = (pods.join(", "), unfinished.len());
            warn!(
                pods = some,
                all,
                "these pods' open files were not all looked at (too many, changing all the time, or held up): \
                 they may have a GPU open"
            );
        }
        if openers.is_empty() {
            return Ok(OpenDevices { openers, unfinished, unreached });
        }
        self.counts.strangers.inc();
        if self.policy == OpenDescriptors::Warn {
            let openers = in_words(std::mem::take(&mut openers));
            warn!(openers, "pods have a GPU open without a claim on it, and it is given all the same");
        }
        Ok(OpenDevices { openers, unfinished, unreached })
    }

    /// A look could not be made.
    pub fn count_unmade(&self) {
        self.counts.unmade.inc();
    }

    #[cfg(test)]
    pub fn unmade(&self) -> u64 {
        self.counts.unmade.get()
    }

    /// So many processes hold looks up that nobody looks; or none does any more.
    #[cfg(test)]
    pub fn hold_up(&self, held_up: bool) {
        let at = |pid: usize| {
            let look = FileLook::new(ByPod::new(), BTreeSet::new(), BTreeSet::new(), Instant::now());
            look.stands_at(u32::try_from(pid).unwrap());
            Arc::new(look)
        };
        let most = if held_up { STUCK_MAX } else { 0 };
        *locked(&self.stuck) = (1..=most).map(at).collect();
    }

    /// False: nobody is to look.
    pub fn is_on(&self) -> bool {
        self.policy != OpenDescriptors::Off
    }

    fn look(&self, pods: &ByPod, devices: &BTreeSet<DeviceNumber>) -> Result<OpenDevices, String> {
        let until = Instant::now() + self.limit;
        let mut left: Option<Arc<FileLook>> = None;
        loop {
            let (threads, skipped) = self.stuck_at();
            if skipped.len() >= STUCK_MAX || threads >= STUCK_THREADS_MAX {
                if let Some(left) = left {
                    return Ok(left.found());
                }
                let processes = skipped.len();
                return Err(format!("{processes} processes hold up {threads} looks at their open files"));
            }
            let look = Arc::new(match &left {
                None => FileLook::new(pods.clone(), devices.clone(), skipped, until),
                Some(left) => FileLook::after(left, skipped),
            });
            if self.is_done(&look, until)? || Instant::now() >= until {
                return Ok(look.found());
            }
            left = Some(look);
        }
    }

    /// How many looks stand still, and the processes they stand at.
    fn stuck_at(&self) -> (usize, BTreeSet<u32>) {
        let stuck = locked(&self.stuck);
        (stuck.len(), stuck.iter().map(|look| look.at()).collect())
    }

    /// Begins a look, and waits for it. False if it is held up, or its time is over.
    fn is_done(&self, look: &Arc<FileLook>, until: Instant) -> Result<bool, String> {
        let (reply, result) = mpsc::channel();
        let (processes, its, stuck) = (self.processes.clone(), look.clone(), self.stuck.clone());
        let work = move || {
            processes.look_at_files(&its);
            // Under the lock, so that a look which has ended is not taken for one that stands still.
            let mut stuck = locked(&stuck);
            stuck.retain(|one| !Arc::ptr_eq(one, &its));
            let _ = reply.send(());
        };
        let thread = thread::Builder::new().name("open-files".to_owned()).stack_size(STACK).spawn(work);
        thread.map_err(|error| format!("no thread can be started to look at open files: {error}"))?;
        let (mut steps, mut moved) = (look.steps(), Instant::now());
        loop {
            match result.recv_timeout(POLL) {
                Ok(()) => return Ok(true),
                Err(RecvTimeoutError::Disconnected) => {
                    return Err("a look at open files broke off".to_owned());
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
            if look.steps() != steps {
                (steps, moved) = (look.steps(), Instant::now());
            }
            if moved.elapsed() >= self.stall || Instant::now() >= until + self.stall {
                let mut stuck = locked(&self.stuck);
                if result.try_recv().is_ok() {
                    return Ok(true);
                }
                // It ends by itself, some time, and finds that nobody waits.
                warn!(pid = look.at(), "a process holds up the look at its open files, and is passed over");
                stuck.push(look.clone());
                return Ok(false);
            }
        }
    }
}

/// Of many the first: they may be a pod's without end.
fn in_words(openers: Openers) -> String {
    listed(&holders_of(openers))
}

fn locked(stuck: &Mutex<Vec<Arc<FileLook>>>) -> MutexGuard<'_, Vec<Arc<FileLook>>> {
    stuck.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
#[path = "file_looks/tests.rs"]
mod tests;
