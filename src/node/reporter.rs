//! Reports the state of claims: in `status.devices`, and by events on the claim and its pods.
//!
//! Reporting is best effort. A caller never waits: a full queue drops the report and counts it, and a claim works
//! whatever happens to its report. The loop remembers the grant and the health of each claim of this node. A change
//! makes a visit due: one GET (the stored status and the pods) and, if the status differs, one PATCH. There is one
//! visit at a time; failed visits are repeated with growing pauses.
//!
//! A claim without a share is written once there is an event of it, even if its devices are healthy again by the time
//! of the visit: a user who finds the event also finds the present state. Nothing is removed when a claim is
//! released: the API server removes the status together with the allocation.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures::future::BoxFuture;
use jiff::Timestamp;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use super::holders::Withheld;
use crate::cluster::events::{EventSubject, Events, Note, Severity};
use crate::cluster::status::{ClaimReports, ReportError};
use crate::conditions::{
    self, ClaimEvent, ClaimHealth, Concerned, EventType, GpuPart, GrantEvent, MpsDetour, PartHealth,
};
use crate::inventory::Inventory;
use crate::ledger::{HeldDevice, HoldMode, Intent, Placer};
use crate::model::claim::{ClaimRef, PodRef};
use crate::model::error_chain;
use crate::model::gpu::{Device, Gpu, Health};
use crate::model::names::{ClaimUid, DeviceUuid};

/// Reports that may wait: a batch of claims, and a GPU with 48 shares that becomes unhealthy meanwhile.
pub const QUEUE_CAPACITY: usize = 256;

/// Pods that get an event at once, of one claim.
const EVENTS_MOST: usize = 8;

/// What there is to tell.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClaimReport {
    /// The claim is ready, and this is what it holds.
    Prepared(Intent),
    /// The claim holds nothing any more.
    Released(ClaimRef),
    /// The watchdog found the claim over its grant, or within the grant again.
    GrantChanged(GrantEvent),
    /// A process of the claim went around its MPS daemon.
    WentAroundMps(MpsDetour),
    /// The health of a part of a GPU changed.
    HealthChanged(PartHealth),
}

/// The way in. Clones are cheap, and no method waits.
#[derive(Debug, Clone)]
pub struct Reporter {
    queue: mpsc::Sender<ClaimReport>,
    counts: Arc<ReportCounts>,
    events: Option<Events>,
}

#[derive(Debug, Default)]
struct ReportCounts {
    dropped: AtomicU64,
    written: AtomicU64,
    failed: AtomicU64,
}

/// How often what is done.
#[derive(Debug, Clone, Copy)]
pub struct ReportPace {
    /// Pause after a first failure; doubled after each further one, up to the second.
    pub retry: Duration,
    pub retry_most: Duration,
    /// Of one kind, a claim gets one event in this time.
    pub again: Duration,
    /// For which a claim is left alone once the API server said that it may not be written, and all are
    /// once it keeps nothing.
    pub mute: Duration,
}

impl Default for ReportPace {
    fn default() -> Self {
        let s = Duration::from_secs;
        Self { retry: s(1), retry_most: s(120), again: s(60), mute: s(600) }
    }
}

impl Reporter {
    /// A reporter without a loop behind it: every report counts as dropped.
    pub fn disconnected() -> Self {
        Self { queue: mpsc::channel(1).0, counts: Arc::default(), events: None }
    }

    pub fn prepared(&self, intent: Intent) {
        self.tell(ClaimReport::Prepared(intent));
    }

    pub fn released(&self, claim: ClaimRef) {
        self.tell(ClaimReport::Released(claim));
    }

    pub fn grant_changed(&self, event: GrantEvent) {
        self.tell(ClaimReport::GrantChanged(event));
    }

    pub fn went_around_mps(&self, detour: MpsDetour) {
        self.tell(ClaimReport::WentAroundMps(detour));
    }

    pub fn health_changed(&self, changed: PartHealth) {
        self.tell(ClaimReport::HealthChanged(changed));
    }

    /// The container edits of a ready claim were written again.
    pub fn edits_renewed(&self, intent: &Intent) {
        let event = conditions::edits_renewed();
        let named = intent.pods.iter().filter(|pod| !pod.name.is_empty());
        self.post(&intent.claim, named, Severity::Normal, event.reason, &event.message);
    }

    /// A MIG device could not be made for the claim.
    pub fn mig_not_made(&self, claim: &ClaimRef, words: &str) {
        let message = format!(
            "a MIG device could not be made for this claim: {words}. Kubelet tries again; other claims are kept off that \
             place for a while"
        );
        self.post(claim, std::iter::empty(), Severity::Warning, "MigDeviceNotMade", &message);
    }

    /// Devices that are free by the API server's word, and held by processes: told to their pods and the claim
    /// that is gone, whether or not anybody can read them still.
    pub fn withheld(&self, withheld: &Withheld) {
        let by = withheld.by.holders.as_slice();
        let named = by.iter().map(|holder| &holder.pod).filter(|pod| !pod.name.is_empty());
        let message = conditions::withheld(&withheld.claim, &withheld.to_string());
        self.post(&withheld.claim, named, Severity::Warning, "DeviceWithheld", &message);
    }

    /// A claim has ended, and a pod without a claim has its device open: which and who, as `who` says.
    pub fn held_after(&self, claim: &ClaimRef, who: &str) {
        let message = conditions::withheld(claim, who);
        self.post(claim, std::iter::empty(), Severity::Warning, "DeviceWithheld", &message);
    }

    /// Posts an event at once: on some of the pods, and on the claim.
    fn post<'a>(
        &self,
        claim: &ClaimRef,
        pods: impl Iterator<Item = &'a PodRef>,
        severity: Severity,
        reason: &'static str,
        message: &str,
    ) {
        let Some(events) = &self.events else { return };
        let pod = |pod: &PodRef| EventSubject::Pod {
            namespace: pod.namespace.clone(),
            name: pod.name.clone(),
            uid: pod.uid.to_string(),
        };
        for subject in pods.take(EVENTS_MOST).map(pod).chain([EventSubject::Claim(claim.clone())]) {
            events.tell(Note { subject, severity, reason, message: message.to_owned() });
        }
    }

    /// Reports lost because the queue was full.
    pub fn dropped(&self) -> u64 {
        self.counts.dropped.load(Ordering::Relaxed)
    }

    /// Times that a claim's device status was written.
    pub fn written(&self) -> u64 {
        self.counts.written.load(Ordering::Relaxed)
    }

    /// Visits to a claim that failed; most are tried again.
    pub fn failed(&self) -> u64 {
        self.counts.failed.load(Ordering::Relaxed)
    }

    /// Events that the API server did not get.
    pub fn dropped_events(&self) -> u64 {
        self.events.as_ref().map_or(0, |events| events.dropped() + events.failed())
    }

    fn tell(&self, report: ClaimReport) {
        if self.queue.try_send(report).is_err() {
            self.counts.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// The loop behind a [`Reporter`].
pub struct Reporting {
    claims: Arc<dyn ClaimReports>,
    events: Events,
    queue: mpsc::Receiver<ClaimReport>,
    counts: Arc<ReportCounts>,
    pace: ReportPace,
    known: BTreeMap<ClaimUid, KnownClaim>,
    /// The unhealthy parts of GPUs, for claims that are prepared later.
    unhealthy: BTreeMap<(DeviceUuid, GpuPart, Concerned), PartHealth>,
    /// Nothing is written before.
    muted: Option<Instant>,
    /// When a failure was last logged as a warning: they come in crowds.
    warned: Option<Instant>,
}

/// A claim of this node.
struct KnownClaim {
    claim: ClaimRef,
    devices: Vec<HeldDevice>,
    claim_health: ClaimHealth,
    /// When to visit it; none: all is told.
    due: Option<Instant>,
    /// Failures in a row.
    failures: u32,
    /// To be posted by the next visit, which reads who the claim's pods are.
    pending_events: Vec<ClaimEvent>,
    last_events: BTreeMap<&'static str, LastEvent>,
}

/// The last event of a kind.
struct LastEvent {
    at: Instant,
    /// Events of the same kind that were not posted since.
    suppressed: u32,
}

/// What came of a visit.
enum Visit {
    /// The claim could not be read.
    Unread(ReportError),
    Read {
        pods: Vec<EventSubject>,
        written: Result<bool, ReportError>,
    },
}

impl Reporting {
    pub fn new(claims: Arc<dyn ClaimReports>, events: Events) -> (Reporter, Self) {
        let (sender, queue) = mpsc::channel(QUEUE_CAPACITY);
        let counts = Arc::new(ReportCounts::default());
        let reporter = Reporter { queue: sender, counts: counts.clone(), events: Some(events.clone()) };
        let (known, unhealthy) = (BTreeMap::new(), BTreeMap::new());
        let pace = ReportPace::default();
        (reporter, Self { claims, events, queue, counts, pace, known, unhealthy, muted: None, warned: None })
    }

    pub fn with_pace(self, pace: ReportPace) -> Self {
        Self { pace, ..self }
    }

    /// Claims that were ready before this process began: what was not written is, without events.
    pub fn recall(mut self, intents: impl IntoIterator<Item = Intent>) -> Self {
        for intent in intents {
            self.known.insert(intent.claim.uid.clone(), KnownClaim::new(intent.claim, intent.devices));
        }
        self
    }

    /// Runs until `stop`. What is not told by then is told after the next start.
    pub async fn run(
        mut self,
        mut inventory: watch::Receiver<Inventory>,
        stop: CancellationToken,
    ) -> Result<(), Infallible> {
        inventory.mark_changed();
        let mut visit: Option<BoxFuture<'static, (ClaimUid, Visit)>> = None;
        loop {
            let due = if visit.is_none() { self.next_due() } else { None };
            tokio::select! {
                () = stop.cancelled() => return Ok(()),
                Some(report) = self.queue.recv() => self.take(report),
                Ok(()) = inventory.changed() => self.look(&inventory.borrow_and_update()),
                (claim, outcome) = under_way(&mut visit) => {
                    visit = None;
                    self.visited(&claim, outcome);
                }
                claim = at(due) => visit = self.visit(claim),
            }
        }
    }

    fn take(&mut self, report: ClaimReport) {
        match report {
            ClaimReport::Prepared(intent) => self.prepared(intent),
            ClaimReport::Released(claim) => _ = self.known.remove(&claim.uid),
            ClaimReport::GrantChanged(event) => {
                let Some(known) = self.known.get_mut(&event.claim.uid) else { return };
                let turned = known.claim_health.apply(&event);
                known.news(turned, conditions::grant_event(&event), self.pace.again);
            }
            ClaimReport::WentAroundMps(detour) => {
                if let Some(known) = self.known.get_mut(&detour.claim.uid) {
                    known.news(false, conditions::detour_event(&detour), self.pace.again);
                }
            }
            ClaimReport::HealthChanged(changed) => self.health_changed(changed),
        }
    }

    fn prepared(&mut self, Intent { claim, devices, .. }: Intent) {
        if self.known.get(&claim.uid).is_some_and(|known| known.devices == devices) {
            return;
        }
        let mut known = KnownClaim::new(claim, devices);
        // Nothing to say of a whole board that is well.
        known.due = known.has_share().then(Instant::now);
        if let Some(event) = conditions::prepared(&known.devices) {
            known.news(true, event, self.pace.again);
        }
        for changed in self.unhealthy.values() {
            known.health_changed(changed, self.pace.again);
        }
        self.known.insert(known.claim.uid.clone(), known);
    }

    fn health_changed(&mut self, changed: PartHealth) {
        let key = (changed.gpu.clone(), changed.part, changed.concerned.clone());
        let before = self.unhealthy.get(&key);
        let is_news = match changed.health.problem() {
            None => before.is_some(),
            Some(_) => before != Some(&changed),
        };
        if !is_news {
            return;
        }
        for known in self.known.values_mut() {
            known.health_changed(&changed, self.pace.again);
        }
        match changed.health.problem() {
            None => _ = self.unhealthy.remove(&key),
            Some(_) => _ = self.unhealthy.insert(key, changed),
        }
    }

    /// The boards' own health, as the inventory has it; and devices that claims hold and that the node does not have any
    /// more.
    fn look(&mut self, inventory: &Inventory) {
        let Inventory::Found(gpus) = inventory else { return };
        let boards = gpus.gpus.iter().map(|gpu| (gpu.uuid.clone(), gpu.health.clone()));
        let mut health: BTreeMap<DeviceUuid, Health> = boards.collect();
        let present: BTreeSet<DeviceUuid> =
            gpus.devices().into_values().map(|device| device.uuid().clone()).collect();
        let held = self.known.values().flat_map(|known| &known.devices);
        // What was made for the claim is published as what may be made.
        let is_made = |held: &&HeldDevice| match gpus.device(&held.answer.device) {
            Some(Device::Place { .. } | Device::Parent(_)) => true,
            Some(Device::Whole(gpu)) => gpu.is_whole_or_cut() && held.mode == HoldMode::Mig,
            Some(Device::Mig { .. }) | None => false,
        };
        let gone = held.filter(|held| held.mode != HoldMode::Admin && !present.contains(&held.uuid));
        let (made, gone): (Vec<_>, Vec<_>) = gone.partition(is_made);
        let missing: BTreeMap<_, _> =
            gpus.gpus.iter().flat_map(Gpu::missing).map(|missing| (&missing.uuid, missing)).collect();
        for held in made {
            let ended = missing.get(&held.uuid);
            let now = ended.map_or(Health::Healthy, |missing| Health::Unhealthy(missing.words()));
            health.insert(held.uuid.clone(), now);
        }
        for held in gone {
            let has_board = gpus.gpus.iter().any(|gpu| gpu.uuid == held.gpu);
            let problem = conditions::gone(&held.uuid, has_board);
            health.insert(held.uuid.clone(), Health::Unhealthy(problem));
        }
        // What was gone, and is there again or held by nobody.
        let boards = self.unhealthy.keys().filter(|(_, part, _)| *part == GpuPart::Board);
        for gpu in boards.map(|(gpu, _, _)| gpu.clone()) {
            health.entry(gpu).or_insert(Health::Healthy);
        }
        for (gpu, health) in health {
            let concerned = Concerned::EveryClaim;
            self.health_changed(PartHealth { gpu, concerned, part: GpuPart::Board, health });
        }
    }

    fn next_due(&self) -> Option<(Instant, ClaimUid)> {
        let due = self.known.iter().filter_map(|(uid, known)| Some((known.due?, uid)));
        due.min().map(|(due, uid)| (due, uid.clone()))
    }

    fn visit(&mut self, uid: ClaimUid) -> Option<BoxFuture<'static, (ClaimUid, Visit)>> {
        let known = self.known.get_mut(&uid)?;
        known.due = None;
        let claims = self.claims.clone();
        let may_write = self.muted.is_none_or(|until| until <= Instant::now());
        let (claim, devices, claim_health) =
            (known.claim.clone(), known.devices.clone(), known.claim_health.clone());
        let has_news = known.has_share() || !known.last_events.is_empty();
        Some(Box::pin(async move {
            let reported = match claims.reported(&claim).await {
                Ok(reported) => reported,
                Err(error) => return (uid, Visit::Unread(error)),
            };
            let before = &reported.entries;
            let entries = conditions::entries(&devices, &claim_health, before, Timestamp::now());
            let worth_it = has_news || !before.is_empty();
            let written = match worth_it && may_write && conditions::differ(before, &entries) {
                true => claims.report(&claim, &entries).await.map(|()| true),
                false => Ok(false),
            };
            (uid, Visit::Read { pods: reported.pods, written })
        }))
    }

    fn visited(&mut self, uid: &ClaimUid, visit: Visit) {
        // Released meanwhile: nothing of it is of interest any more.
        let Some(known) = self.known.get_mut(uid) else { return };
        match visit {
            Visit::Unread(ReportError::Gone { .. }) => _ = self.known.remove(uid),
            Visit::Unread(ReportError::NotAllocated { .. }) => known.pending_events.clear(),
            Visit::Unread(error) => self.failed(uid, &error),
            Visit::Read { pods, written } => {
                known.post(&pods, &self.events);
                match written {
                    Ok(wrote) => {
                        known.failures = 0;
                        if let Some(until) = self.muted.filter(|until| Instant::now() < *until) {
                            known.due.get_or_insert(until);
                        }
                        self.counts.written.fetch_add(wrote.into(), Ordering::Relaxed);
                    }
                    Err(error) => self.failed(uid, &error),
                }
            }
        }
    }

    fn failed(&mut self, uid: &ClaimUid, error: &ReportError) {
        self.counts.failed.fetch_add(1, Ordering::Relaxed);
        let Some(known) = self.known.get_mut(uid) else { return };
        let now = Instant::now();
        let later = match error {
            // Of the API server, so that no claim's will be.
            ReportError::NotKept => {
                self.muted = Some(now + self.pace.mute);
                now + self.pace.mute
            }
            // Often of all claims, but also of one whose allocation is not bound to this node alone.
            ReportError::Forbidden { .. } => now + self.pace.mute,
            _ => now + doubled(self.pace.retry, known.failures).min(self.pace.retry_most),
        };
        if known.failures == 0 && self.warned.is_none_or(|at| now >= at + self.pace.again) {
            warn!(error = error_chain(error), "a claim's device status is told later; the claim works");
            self.warned = Some(now);
        } else {
            debug!(error = error_chain(error), "a claim's device status is told later");
        }
        known.failures = known.failures.saturating_add(1);
        known.due = Some(known.due.map_or(later, |due| due.min(later)));
    }
}

impl KnownClaim {
    /// Of which everything may be news to people.
    fn new(claim: ClaimRef, devices: Vec<HeldDevice>) -> Self {
        Self {
            claim,
            devices,
            claim_health: ClaimHealth::default(),
            due: Some(Instant::now()),
            failures: 0,
            pending_events: Vec::new(),
            last_events: BTreeMap::new(),
        }
    }

    fn has_share(&self) -> bool {
        // A MIG device that our controller chose says what it came to.
        self.devices.iter().any(|held| match held.mode {
            HoldMode::Share(_) => true,
            HoldMode::Mig => held.placer == Placer::Controller,
            HoldMode::Whole | HoldMode::Admin => false,
        })
    }

    /// Applies the change if the claim holds a device of that GPU.
    fn health_changed(&mut self, changed: &PartHealth, again: Duration) {
        let is_on = |held: &HeldDevice| held.gpu == changed.gpu || held.uuid == changed.gpu;
        if changed.concerned.has(&self.claim.uid) && self.devices.iter().any(is_on) {
            let turned = self.claim_health.set_part_health(changed);
            self.news(turned, conditions::health_event(changed), again);
        }
    }

    /// Something happened: an event, unless one of its kind was told just now; a visit, if `turned` or for
    /// the event.
    fn news(&mut self, turned: bool, mut event: ClaimEvent, again: Duration) {
        let now = Instant::now();
        let last = self.last_events.get_mut(event.reason);
        let told = match last {
            Some(last) if now < last.at + again => {
                last.suppressed += 1;
                false
            }
            last => {
                if let Some(LastEvent { suppressed: more @ 1.., .. }) = last {
                    event.message.push_str(&format!(" ({more} more like it since the last event)"));
                }
                self.last_events.insert(event.reason, LastEvent { at: now, suppressed: 0 });
                self.pending_events.push(event);
                true
            }
        };
        if turned || told {
            self.due = Some(now);
        }
    }

    /// Posts what waits, on the claim and on its pods.
    fn post(&mut self, pods: &[EventSubject], events: &Events) {
        for event in self.pending_events.drain(..) {
            let severity = match event.event_type {
                EventType::Normal => Severity::Normal,
                EventType::Warning => Severity::Warning,
            };
            let subjects =
                std::iter::once(EventSubject::Claim(self.claim.clone())).chain(pods.iter().cloned());
            for subject in subjects {
                let (reason, message) = (event.reason, event.message.clone());
                events.tell(Note { subject, severity, reason, message });
            }
        }
    }
}

fn doubled(pause: Duration, times: u32) -> Duration {
    pause.saturating_mul(1 << times.min(16))
}

/// Ends when the visit does; never without one.
async fn under_way(visit: &mut Option<BoxFuture<'static, (ClaimUid, Visit)>>) -> (ClaimUid, Visit) {
    match visit {
        Some(visit) => visit.await,
        None => std::future::pending().await,
    }
}

/// The claim, when its time has come; never without one.
async fn at(due: Option<(Instant, ClaimUid)>) -> ClaimUid {
    match due {
        Some((due, claim)) => {
            tokio::time::sleep_until(due).await;
            claim
        }
        None => std::future::pending().await,
    }
}
