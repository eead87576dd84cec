//! Keeps what is known of the node's GPUs up to date.
//!
//! Looks once at the start, then on a timer, sooner after a failure (with back-off), and at once when
//! device files, the library or MIG devices change. What it finds is published on a watch channel that
//! anybody may read without waiting: a missing or hanging driver delays nobody.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::broadcast::error::RecvError;
use tokio::sync::{broadcast, mpsc, watch};
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;

use crate::inventory::{Change, Inventory, Known};
use crate::nvml::{DeviceFiles, FilesChanged, GpuEvent, Gpus, Load};

/// Changes of files that may wait; more say nothing new.
const CHANGES: usize = 8;
/// How often directories that did not exist are tried again.
const REFRESH: Duration = Duration::from_secs(30);

/// When to look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Policy {
    /// From one complete look to the next.
    pub every: Duration,
    /// The first pause after a failure; it doubles from failure to failure,
    pub first_retry: Duration,
    /// up to this.
    pub longest_retry: Duration,
    /// Changes come in bursts: how long it must be quiet before a look,
    pub quiet: Duration,
    /// and how long a burst can put a look off.
    pub patience: Duration,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            every: Duration::from_secs(60),
            first_retry: Duration::from_millis(500),
            longest_retry: Duration::from_secs(30),
            quiet: Duration::from_millis(300),
            patience: Duration::from_secs(3),
        }
    }
}

impl Policy {
    /// How long to wait after so many looks in a row that were not complete.
    fn pause(&self, incomplete: u32) -> Duration {
        match incomplete {
            0 => self.every,
            n => self.first_retry.saturating_mul(1 << (n - 1).min(16)).min(self.longest_retry),
        }
    }
}

/// How discovery is doing, for metrics and `tranche inspect`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DiscoveryState {
    /// Looks that ended, well or not.
    pub looks: u64,
    /// Looks that failed altogether.
    pub failures: u64,
    /// Of the last looks, how many in a row failed altogether.
    pub failures_in_a_row: u32,
    /// Changes that were found since the start.
    pub changes: u64,
    /// How long the last look took.
    pub last_look: Option<Duration>,
    /// Why the last look failed.
    pub last_error: Option<String>,
    /// Devices that NVML tells of and that are not listed, in words.
    pub left_out: Vec<String>,
    /// How long after the last look the next one is due, unless something happens before.
    pub next_look_in: Duration,
    /// Threads that hang in a call into the driver.
    pub stuck_threads: usize,
    /// GPU events that came too fast to be read.
    pub events_missed: u64,
}

/// What discovery publishes. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Discovered {
    pub inventory: watch::Receiver<Inventory>,
    pub state: watch::Receiver<DiscoveryState>,
}

/// The loop. Made by [`Discovery::new`], driven by [`Discovery::run`].
#[derive(Debug)]
pub struct Discovery<G> {
    gpus: Arc<G>,
    policy: Policy,
    events: Option<broadcast::Receiver<GpuEvent>>,
    files: Option<mpsc::Receiver<FilesChanged>>,
    known: Known,
    /// Looks in a row that failed, or in which a GPU failed.
    incomplete: u32,
    inventory: watch::Sender<Inventory>,
    state: watch::Sender<DiscoveryState>,
}

impl<G: Gpus> Discovery<G> {
    /// `files`: from [`watch_files`].
    pub fn new(gpus: Arc<G>, policy: Policy, files: mpsc::Receiver<FilesChanged>) -> (Self, Discovered) {
        let (inventory, inventory_out) = watch::channel(Inventory::Unknown);
        let (state, state_out) = watch::channel(DiscoveryState::default());
        let events = Some(gpus.events());
        let (files, known) = (Some(files), Known::default());
        let discovery = Self { gpus, policy, events, files, known, incomplete: 0, inventory, state };
        (discovery, Discovered { inventory: inventory_out, state: state_out })
    }

    /// Looks until `stop`. Never fails: what goes wrong is in the inventory and the state.
    pub async fn run(mut self, stop: CancellationToken) {
        let mut load = Load::Keep;
        loop {
            let Some(()) = stop.run_until_cancelled(self.look(load)).await else { return };
            let Some(next) = stop.run_until_cancelled(self.reason_to_look()).await else { return };
            load = next;
        }
    }

    async fn look(&mut self, load: Load) {
        let started = Instant::now();
        let look = self.gpus.look(load).await;
        let took = started.elapsed();
        let complete = look.as_ref().is_ok_and(|look| look.failed.is_empty());
        self.incomplete = if complete { 0 } else { self.incomplete.saturating_add(1) };
        let look = look.map_err(|e| e.to_string());
        let error = look.as_ref().err().cloned();
        let (known, changes) = self.known.fold(look);
        self.known = known;
        self.publish(took, error, &changes);
    }

    fn publish(&mut self, took: Duration, error: Option<String>, changes: &[Change]) {
        for change in changes {
            tracing::info!(target: "tranche::discovery", "{change}");
        }
        let retry = self.policy.pause(self.incomplete);
        self.state.send_modify(|state| {
            if error.is_some() && error != state.last_error {
                let words = error.as_deref().unwrap_or_default();
                tracing::warn!(target: "tranche::discovery", retry_in = ?retry, "the GPUs cannot be looked at: {words}");
            }
            state.looks += 1;
            state.failures += u64::from(error.is_some());
            state.failures_in_a_row = self.known.failed_looks();
            state.changes += changes.len() as u64;
            state.last_look = Some(took);
            state.last_error = error;
            state.left_out = self.known.left_out().to_vec();
            state.next_look_in = retry;
            state.stuck_threads = self.gpus.stuck_threads();
        });
        self.inventory.send_if_modified(|inventory| {
            let differs = inventory != self.known.inventory();
            if differs {
                *inventory = self.known.inventory().clone();
            }
            differs
        });
    }

    /// Waits until it is time, or something happened and the burst is over.
    async fn reason_to_look(&mut self) -> Load {
        let due = Instant::now() + self.policy.pause(self.incomplete);
        let mut load = tokio::select! {
            () = sleep_until(due) => return self.timed(),
            load = self.something_happened() => load,
        };
        let latest = Instant::now() + self.policy.patience;
        loop {
            let quiet = (Instant::now() + self.policy.quiet).min(latest);
            tokio::select! {
                () = sleep_until(quiet) => return load,
                more = self.something_happened() => load = load.max(more),
            }
        }
    }

    /// A GPU that still fails at the second look may need NVML to be loaded anew to be seen again.
    fn timed(&self) -> Load {
        if self.incomplete > 1 { Load::Anew } else { Load::Keep }
    }

    async fn something_happened(&mut self) -> Load {
        loop {
            tokio::select! {
                change = next_change(&mut self.files) => match change {
                    FilesChanged::Capabilities => return Load::Keep,
                    FilesChanged::Boards | FilesChanged::Library => return Load::Anew,
                },
                event = next_event(&mut self.events) => match event {
                    Ok(event) if tell(&event) => return Load::Keep,
                    Ok(_) => {}
                    Err(missed) => {
                        self.state.send_modify(|state| state.events_missed += missed);
                        return Load::Keep;
                    }
                },
            }
        }
    }
}

/// The next change of files; never, once nobody watches them.
async fn next_change(files: &mut Option<mpsc::Receiver<FilesChanged>>) -> FilesChanged {
    if let Some(receiver) = files {
        if let Some(change) = receiver.recv().await {
            return change;
        }
        *files = None;
    }
    std::future::pending().await
}

/// The next event, or how many were missed; never, once there will be none.
async fn next_event(events: &mut Option<broadcast::Receiver<GpuEvent>>) -> Result<GpuEvent, u64> {
    if let Some(receiver) = events {
        match receiver.recv().await {
            Ok(event) => return Ok(event),
            Err(RecvError::Lagged(missed)) => return Err(missed),
            Err(RecvError::Closed) => *events = None,
        }
    }
    std::future::pending().await
}

/// Logs an event; true if the GPUs may look different now.
fn tell(event: &GpuEvent) -> bool {
    match event {
        GpuEvent::Xid { gpu, code, gpu_instance, .. } => {
            tracing::warn!(target: "tranche::discovery", %gpu, code, ?gpu_instance, "critical Xid");
        }
        GpuEvent::EccDoubleBit { gpu } => {
            tracing::warn!(target: "tranche::discovery", %gpu, "double-bit ECC error");
        }
        GpuEvent::MigChanged { gpu } => {
            tracing::info!(target: "tranche::discovery", %gpu, "MIG devices are being changed");
        }
        GpuEvent::Deaf { words } => {
            tracing::warn!(target: "tranche::discovery", "GPU events are not heard: {words}");
            return false;
        }
    }
    true
}

/// Watches the driver's files until `stop`, and tells what changed. Where the node cannot watch files,
/// the timer alone has to do.
pub fn watch_files(
    dev_root: PathBuf,
    driver_root: PathBuf,
    stop: CancellationToken,
) -> mpsc::Receiver<FilesChanged> {
    let (sender, receiver) = mpsc::channel(CHANGES);
    tokio::spawn(async move {
        let watched = stop.run_until_cancelled(pass_on(dev_root, driver_root, sender)).await;
        if let Some(Err(error)) = watched {
            tracing::warn!(
                target: "tranche::discovery", %error,
                "device files cannot be watched, changes are found by the timer only; raise fs.inotify.max_user_instances"
            );
        }
    });
    receiver
}

async fn pass_on(
    dev_root: PathBuf,
    driver_root: PathBuf,
    sender: mpsc::Sender<FilesChanged>,
) -> std::io::Result<()> {
    let mut files = DeviceFiles::new(&dev_root, &driver_root)?;
    loop {
        tokio::select! {
            change = files.changed() => {
                if sender.send(change?).await.is_err() {
                    return Ok(());
                }
            }
            () = sleep(REFRESH) => {}
        }
        files.refresh();
    }
}
