//! Keeps the inventory of the node's GPUs up to date.
//!
//! Discovery looks at the GPUs at the start and then on a timer, sooner after a failure (with back-off), and at once
//! when device files, the library or MIG devices change. The inventory is published on a watch channel that can be
//! read without waiting: a missing or hanging driver delays no reader.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::broadcast::error::RecvError;
use tokio::sync::{broadcast, mpsc, watch};
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;

use crate::inventory::{self, Change, Claimed, ClaimedAround, Inventory, InventoryTracker};
use crate::model::driver::DriverPlace;
use crate::model::names::DeviceUuid;
use crate::model::selector::GpuSelector;
use crate::model::time::back_off;
use crate::nvml::{DeviceFiles, FilesChanged, GpuEvent, Gpus, Load};
use crate::slices;

/// Changes of files that may wait; more say nothing new.
const CHANGES: usize = 8;
/// The first pause before a look because waiting for events failed; it doubles up to the second.
const EVENT_RETRY_PAUSE: Duration = Duration::from_secs(10);
const LONGEST_EVENT_RETRY_PAUSE: Duration = Duration::from_secs(600);
/// How often directories that did not exist are tried again.
const REFRESH: Duration = Duration::from_secs(30);

/// When to look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LookTiming {
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

impl Default for LookTiming {
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

impl LookTiming {
    /// How long to wait after so many looks in a row that were not complete, and at most.
    fn pause(&self, incomplete: u32, longest: Duration) -> Duration {
        match incomplete {
            0 => self.every,
            failures => back_off(self.first_retry, failures, longest),
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
    /// When the last look ended.
    pub looked_at: Option<Instant>,
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
    pub events: GpuEvents,
}

/// What the GPUs tell by themselves, for whoever asks.
#[derive(Debug)]
pub struct GpuEvents(broadcast::Receiver<GpuEvent>);

impl GpuEvents {
    /// The events from now on.
    pub fn subscribe(&self) -> broadcast::Receiver<GpuEvent> {
        self.0.resubscribe()
    }
}

impl Clone for GpuEvents {
    fn clone(&self) -> Self {
        Self(self.subscribe())
    }
}

impl From<broadcast::Receiver<GpuEvent>> for GpuEvents {
    fn from(events: broadcast::Receiver<GpuEvent>) -> Self {
        Self(events)
    }
}

/// Who knows what claims have of boards that are carved for them. Blocks on file calls.
pub trait CarvedPlaces: std::fmt::Debug + Send + Sync + 'static {
    /// What claims have of boards, had a moment ago, or are about to have.
    fn claimed(&self) -> Vec<Claimed>;

    /// Boards whose MIG mode was switched on for claims, or is about to be.
    fn switched(&self) -> Vec<DeviceUuid> {
        Vec::new()
    }
}

/// Boards that are carved on demand.
#[derive(Debug)]
struct Carved {
    claims: Arc<dyn CarvedPlaces>,
    wanted: Vec<GpuSelector>,
}

/// The loop. Made by [`Discovery::new`], driven by [`Discovery::run`].
#[derive(Debug)]
pub struct Discovery<G> {
    gpus: Arc<G>,
    policy: LookTiming,
    events: Option<broadcast::Receiver<GpuEvent>>,
    files: Option<mpsc::Receiver<FilesChanged>>,
    known: InventoryTracker,
    /// Looks in a row that failed, or in which a GPU failed.
    incomplete: u32,
    /// From the last look to the next.
    pause: Duration,
    event_retry: EventRetry,
    carved: Option<Carved>,
    inventory: watch::Sender<Inventory>,
    state: watch::Sender<DiscoveryState>,
}

impl<G: Gpus> Discovery<G> {
    /// `files`: from [`watch_files`].
    pub fn new(gpus: Arc<G>, policy: LookTiming, files: mpsc::Receiver<FilesChanged>) -> (Self, Discovered) {
        let (inventory, inventory_out) = watch::channel(Inventory::Unknown);
        let (state, state_out) = watch::channel(DiscoveryState::default());
        let events = Some(gpus.events());
        let (files, known) = (Some(files), InventoryTracker::default());
        let pause = Duration::ZERO;
        let out = Discovered { inventory: inventory_out, state: state_out, events: gpus.events().into() };
        let event_retry = EventRetry::default();
        let (incomplete, carved) = (0, None);
        let discovery = Self {
            gpus,
            policy,
            events,
            files,
            known,
            incomplete,
            pause,
            event_retry,
            carved,
            inventory,
            state,
        };
        (discovery, out)
    }

    /// On boards that are carved on demand, instances of claims are told from others. `wanted`: the boards that are to be
    /// carved; others are only until the last claim on them has gone.
    pub fn with_carved(self, claims: Arc<dyn CarvedPlaces>, wanted: Vec<GpuSelector>) -> Self {
        Self { carved: Some(Carved { claims, wanted }), ..self }
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
        // Asked before and after: an instance that comes or goes while NVML is asked is a claim's all the same.
        let (before, mut switched) = self.claimed().await;
        let mut look = self.gpus.look(load).await;
        let took = started.elapsed();
        if let (Ok(look), Some(carved)) = (&mut look, &self.carved) {
            let (after, more) = self.claimed().await;
            switched.extend(more);
            let claims = ClaimedAround { before, after, switched };
            for gpu in &mut look.gpus.gpus {
                let wanted = carved.wanted.iter().any(|selector| selector.matches(gpu));
                self.known.keep_places(gpu);
                inventory::settle(gpu, &claims, wanted);
            }
            look.left_out.extend(slices::unseen_parents(&look.gpus));
        }
        let complete = look.as_ref().is_ok_and(|look| look.failed.is_empty());
        self.incomplete = if complete { 0 } else { self.incomplete.saturating_add(1) };
        // A board that is gone for good must not cost a reload of the library every half minute.
        let longest = if look.is_ok() { self.policy.every } else { self.policy.longest_retry };
        self.pause = self.policy.pause(self.incomplete, longest);
        let look = look.map_err(|e| e.to_string());
        let error = look.as_ref().err().cloned();
        let (known, changes) = self.known.fold(look);
        self.known = known;
        self.publish(took, error, &changes);
    }

    async fn claimed(&self) -> (Vec<Claimed>, BTreeSet<DeviceUuid>) {
        let Some(claims) = self.carved.as_ref().map(|carved| carved.claims.clone()) else {
            return Default::default();
        };
        let ask = move || (claims.claimed(), claims.switched().into_iter().collect());
        tokio::task::spawn_blocking(ask).await.unwrap_or_default()
    }

    fn publish(&mut self, took: Duration, error: Option<String>, changes: &[Change]) {
        for change in changes {
            tracing::info!(target: "tranche::discovery", "{change}");
        }
        let retry = self.pause;
        self.state.send_modify(|state| {
            if error.is_some() && error != state.last_error {
                let words = error.as_deref().unwrap_or_default();
                tracing::warn!(target: "tranche::discovery", retry_in = ?retry, "the GPUs cannot be looked at: {words}");
            }
            state.looks += 1;
            state.failures += u64::from(error.is_some());
            state.failures_in_a_row = self.known.failed_looks();
            state.changes += changes.len() as u64;
            state.looked_at = Some(Instant::now());
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
        let due = Instant::now() + self.pause;
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
                    Ok(event) => if tell(&event) {
                        return Load::Keep
                    } else {
                        self.event_retry.wait_failed(Instant::now());
                    },
                    Err(missed) => {
                        self.state.send_modify(|state| state.events_missed += missed);
                        return Load::Keep;
                    }
                },
                () = until(self.event_retry.due) => {
                    self.event_retry.looked(Instant::now());
                    // Waits for events with the library as it is now.
                    return Load::Anew;
                }
            }
        }
    }
}

/// A failed wait for events is a reason to look soon: the driver may have been replaced. The wait may fail with the new
/// library, too, so each such look is put off for longer than the one before.
#[derive(Debug, Default)]
struct EventRetry {
    due: Option<Instant>,
    last: Option<EventRetryLook>,
}

/// A look for this reason.
#[derive(Debug, Clone, Copy)]
struct EventRetryLook {
    at: Instant,
    /// How many there were in a row, this one among them.
    nth: u32,
}

impl EventRetryLook {
    /// The next one is not before this.
    fn next(self) -> Instant {
        self.at + back_off(EVENT_RETRY_PAUSE, self.nth, LONGEST_EVENT_RETRY_PAUSE)
    }
}

impl EventRetry {
    fn wait_failed(&mut self, now: Instant) {
        let at = self.last.map_or(now, |last| now.max(last.next()));
        self.due.get_or_insert(at);
    }

    fn looked(&mut self, now: Instant) {
        self.due = None;
        // One that comes long after the last one is new.
        let recent = self.last.filter(|last| now < last.next() + LONGEST_EVENT_RETRY_PAUSE);
        let nth = recent.map_or(1, |last| last.nth.saturating_add(1));
        self.last = Some(EventRetryLook { at: now, nth });
    }
}

async fn until(due: Option<Instant>) {
    match due {
        Some(at) => sleep_until(at).await,
        None => std::future::pending().await,
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
        GpuEvent::EventWaitFailed { words } => {
            tracing::warn!(target: "tranche::discovery", "GPU events are not received: {words}");
            return false;
        }
    }
    true
}

/// Watches the driver's files until `stop`, and tells what changed. Where the node cannot watch files,
/// the timer alone has to do.
#[expect(clippy::disallowed_methods, reason = "the watch may end: it says so, and the timer does without it")]
pub fn watch_files(
    dev_root: PathBuf,
    driver: DriverPlace,
    stop: CancellationToken,
) -> mpsc::Receiver<FilesChanged> {
    let (sender, receiver) = mpsc::channel(CHANGES);
    tokio::spawn(async move {
        let watched = stop.run_until_cancelled(pass_on(dev_root, driver, sender)).await;
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
    driver: DriverPlace,
    sender: mpsc::Sender<FilesChanged>,
) -> std::io::Result<()> {
    let mut files = DeviceFiles::new(&dev_root, driver)?;
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

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::sync::Mutex;

    use super::*;
    use crate::inventory::{FailedGpu, Look, UNHEALTHY_AFTER};
    use crate::model::gpu::{Gpu, Health, Memory, MigMode, NodeGpus, Pci};
    use crate::nvml::NvmlError;

    fn gpu(minor: u32) -> Gpu {
        Gpu {
            uuid: format!("GPU-{minor}").as_str().into(),
            minor,
            product_name: "NVIDIA L40S".to_owned(),
            brand: "Nvidia".to_owned(),
            architecture: "Ada Lovelace".to_owned(),
            compute_capability: (8, 9),
            memory: Memory::Unknown,
            multiprocessors: None,
            addressing_mode: None,
            pci: Pci::default(),
            mig: MigMode::Off,
            health: Health::Healthy,
        }
    }

    fn found(count: u32) -> Look {
        Look {
            gpus: NodeGpus { gpus: (0..count).map(gpu).collect(), ..NodeGpus::default() },
            ..Look::default()
        }
    }

    /// A driver that behaves as the script says; the last line of the script goes on for ever.
    struct Driver {
        script: Mutex<VecDeque<(Duration, Option<Look>)>>,
        looks: watch::Sender<Vec<(Duration, Load)>>,
        start: Instant,
        events: broadcast::Sender<GpuEvent>,
    }

    impl Gpus for Driver {
        async fn look(&self, load: Load) -> Result<Look, NvmlError> {
            self.looks.send_modify(|looks| looks.push((self.start.elapsed(), load)));
            let (takes, look) = {
                let mut script = self.script.lock().unwrap();
                let next = script.pop_front().unwrap();
                if script.is_empty() {
                    script.push_back(next.clone());
                }
                next
            };
            sleep(takes).await;
            look.ok_or(NvmlError::DriverNotLoaded)
        }

        fn events(&self) -> broadcast::Receiver<GpuEvent> {
            self.events.subscribe()
        }

        fn stuck_threads(&self) -> usize {
            0
        }
    }

    struct Running {
        driver: Arc<Driver>,
        files: mpsc::Sender<FilesChanged>,
        out: Discovered,
        looks: watch::Receiver<Vec<(Duration, Load)>>,
        stop: CancellationToken,
    }

    fn start(script: Vec<(Duration, Option<Look>)>) -> Running {
        let (looks, looks_out) = watch::channel(Vec::new());
        let (events, _) = broadcast::channel(2);
        let driver =
            Arc::new(Driver { script: Mutex::new(script.into()), looks, start: Instant::now(), events });
        let (files, changes) = mpsc::channel(CHANGES);
        let (discovery, out) = Discovery::new(driver.clone(), LookTiming::default(), changes);
        let stop = CancellationToken::new();
        tokio::spawn(discovery.run(stop.clone()));
        Running { driver, files, out, looks: looks_out, stop }
    }

    impl Running {
        /// When the first `count` looks began, in milliseconds, and how the library was loaded.
        async fn looks(&mut self, count: usize) -> Vec<(u128, Load)> {
            let looks = self.looks.wait_for(|looks| looks.len() >= count).await.unwrap();
            looks.iter().map(|(at, load)| (at.as_millis(), *load)).collect()
        }

        async fn until(&mut self, what: impl Fn(&Inventory) -> bool) -> Inventory {
            let wait = self.out.inventory.wait_for(what);
            tokio::time::timeout(Duration::from_secs(3600), wait)
                .await
                .expect("it is published")
                .unwrap()
                .clone()
        }
    }

    fn healthy(inventory: &Inventory) -> Option<usize> {
        let Inventory::Found(node) = inventory else { return None };
        Some(node.gpus.iter().filter(|gpu| gpu.health == Health::Healthy).count())
    }

    const AT_ONCE: Duration = Duration::ZERO;

    #[tokio::test(start_paused = true)]
    async fn looks_at_once_and_then_every_minute() {
        let mut node = start(vec![(AT_ONCE, Some(found(2)))]);
        assert_eq!(node.looks(3).await, [(0, Load::Keep), (60_000, Load::Keep), (120_000, Load::Keep)]);
        assert_eq!(healthy(&node.until(|i| *i != Inventory::Unknown).await), Some(2));
    }

    #[tokio::test(start_paused = true)]
    async fn a_missing_driver_is_looked_for_less_and_less_often_and_found() {
        let mut script = vec![(AT_ONCE, None); 8];
        script.push((AT_ONCE, Some(found(1))));
        let mut node = start(script);
        let reason = node.until(|i| matches!(i, Inventory::Unavailable { .. })).await;
        assert!(format!("{reason:?}").contains("load it (modprobe nvidia)"), "{reason:?}");
        let first = node.out.state.borrow().clone();
        assert_eq!((first.failures, first.next_look_in), (1, Duration::from_millis(500)));
        assert!(first.last_error.unwrap().contains("modprobe"));

        let starts: Vec<_> = node.looks(10).await.into_iter().map(|(at, _)| at).collect();
        let pauses: Vec<_> = starts.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert_eq!(pauses, [500, 1_000, 2_000, 4_000, 8_000, 16_000, 30_000, 30_000, 60_000]);
        assert_eq!(healthy(&node.until(|i| healthy(i).is_some()).await), Some(1));
        let now = node.out.state.borrow().clone();
        assert_eq!((now.failures, now.failures_in_a_row, now.last_error), (8, 0, None));
    }

    #[tokio::test(start_paused = true)]
    async fn a_hiccup_changes_nothing_and_an_outage_makes_the_gpus_unhealthy() {
        let mut script = vec![(AT_ONCE, Some(found(2))), (AT_ONCE, None), (AT_ONCE, Some(found(2)))];
        script.push((AT_ONCE, None));
        let mut node = start(script);
        node.until(|i| healthy(i) == Some(2)).await;
        node.out.inventory.mark_unchanged();
        node.looks(4).await;
        assert!(!node.out.inventory.has_changed().unwrap(), "one failed look was published");
        assert_eq!(healthy(&node.until(|i| healthy(i) == Some(0)).await), Some(0));
        assert_eq!(node.out.state.borrow().failures_in_a_row, UNHEALTHY_AFTER);
    }

    #[tokio::test(start_paused = true)]
    async fn a_burst_of_changes_is_one_look_with_the_library_loaded_anew() {
        let mut node = start(vec![(AT_ONCE, Some(found(1))), (AT_ONCE, Some(found(2)))]);
        node.until(|i| healthy(i) == Some(1)).await;
        for change in [FilesChanged::Capabilities, FilesChanged::Library, FilesChanged::Capabilities] {
            node.files.send(change).await.unwrap();
            sleep(Duration::from_millis(200)).await;
        }
        assert_eq!(healthy(&node.until(|i| healthy(i) != Some(1)).await), Some(2));
        assert_eq!(node.looks(2).await, [(0, Load::Keep), (700, Load::Anew)]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_burst_without_end_does_not_put_the_look_off_for_ever() {
        let mut node = start(vec![(AT_ONCE, Some(found(1)))]);
        node.until(|i| healthy(i) == Some(1)).await;
        let files = node.files.clone();
        let noise = tokio::spawn(async move {
            while files.send(FilesChanged::Capabilities).await.is_ok() {
                sleep(Duration::from_millis(100)).await;
            }
        });
        let second = node.looks(2).await[1].0;
        noise.abort();
        assert!((3_000..3_200).contains(&second), "{second}");
    }

    #[tokio::test(start_paused = true)]
    async fn events_ask_for_a_look_and_missed_ones_are_counted() {
        let mut node = start(vec![(AT_ONCE, Some(found(1)))]);
        node.until(|i| healthy(i) == Some(1)).await;
        node.driver.events.send(GpuEvent::MigChanged { gpu: "GPU-0".into() }).unwrap();
        assert_eq!(node.looks(2).await[1], (300, Load::Keep));
        for _ in 0..5 {
            node.driver.events.send(GpuEvent::MigChanged { gpu: "GPU-0".into() }).unwrap();
        }
        let missed = node.out.state.wait_for(|state| state.events_missed > 0).await.unwrap();
        assert_eq!(missed.events_missed, 3);
    }

    #[tokio::test(start_paused = true)]
    async fn a_failed_wait_for_events_is_a_reason_to_look_but_not_over_and_over() {
        let mut node = start(vec![(AT_ONCE, Some(found(1)))]);
        let fail = |node: &Running| {
            node.driver.events.send(GpuEvent::EventWaitFailed { words: "not supported".into() }).unwrap();
        };
        node.until(|i| healthy(i) == Some(1)).await;
        fail(&node);
        assert_eq!(node.looks(2).await[1], (300, Load::Anew));
        // With the new library the wait fails at once, each time.
        for count in 3..6 {
            fail(&node);
            node.looks(count).await;
        }
        let looks = node.looks(5).await;
        let anew: Vec<_> = looks.iter().filter(|(_, load)| *load == Load::Anew).map(|(at, _)| *at).collect();
        assert_eq!(anew[..3], [300, 10_300, 30_300], "{looks:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn one_failing_gpu_is_retried_with_a_fresh_library() {
        let (uuid, reason) = (Some("GPU-1".into()), "broken".to_owned());
        let failed = FailedGpu { index: 1, uuid, reason, lost: false };
        let broken = Look { failed: vec![failed], ..found(1) };
        let script =
            vec![(AT_ONCE, Some(found(2))), (AT_ONCE, Some(broken.clone())), (AT_ONCE, Some(broken))];
        let mut node = start([script, vec![(AT_ONCE, Some(found(2)))]].concat());
        node.until(|i| healthy(i) == Some(1)).await;
        node.until(|i| healthy(i) == Some(2)).await;
        let loads: Vec<_> = node.looks(4).await.into_iter().map(|(_, load)| load).collect();
        assert_eq!(loads, [Load::Keep, Load::Keep, Load::Keep, Load::Anew]);
    }

    #[tokio::test(start_paused = true)]
    async fn stops_in_the_middle_of_a_slow_look_and_publishes_unknown_until_then() {
        let mut node = start(vec![(Duration::from_secs(1000), Some(found(1)))]);
        node.looks(1).await;
        assert_eq!(*node.out.inventory.borrow(), Inventory::Unknown);
        node.stop.cancel();
        let ended = tokio::time::timeout(Duration::from_secs(1), node.out.inventory.changed()).await;
        assert!(ended.expect("it ends").is_err());
    }
}
