//! Keeps this node's ResourceSlices in the API server equal to the inventory.
//!
//! Only differences are written. A slice that is missing (wiped by kubelet at its start or after 30 s without the
//! plugin, or deleted by a user) is created again at once. A slice that another writer edited is repaired, at most
//! once per [`PublicationPace::repair`]. Content that changes back and forth is written at most once per
//! [`PublicationPace::content`], because each write makes the scheduler look at all waiting pods again. On stop the
//! slices stay: kubelet wipes them if the plugin does not come back. Fields that the API server does not keep (shares,
//! taints) are not sent again and again; see [`super::offering`].

use std::collections::BTreeMap;
use std::sync::Arc;

use futures::StreamExt;
use thiserror::Error;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::offering::{Keeps, Offering};
pub use super::publication::{Publication, PublicationPace, PublicationPhase};
use super::publication::{Schedule, WriteCause};
use super::stored::{StoredSlices, seen, slice_ref};
use crate::cluster::{CallError, Cluster, SliceEvent};
use crate::inventory::{DeviceFaults, Inventory};
use crate::model::error_chain;
use crate::model::gpu::{MigMode, NodeGpus};
use crate::model::names::NodeName;
use crate::sharing::SharingPolicy;
use crate::slices::{
    Counters, DesiredPool, Dropped, ExistingSlices, Offer, PublishOptions, SliceContent, SliceOwner, Taints,
    Write, WritePlan, desired, diff, dropped, offered, taints, violations,
};

/// Held while this instance publishes; dropping it lets the next one.
pub type PublisherLock = Box<dyn Send>;

/// Tries to become the one instance that publishes: `None` while another one is (two live side by side
/// during a roll-over with surge). Never waits. The words of an error are shown to people.
pub type TryLock = Box<dyn Fn() -> Result<Option<PublisherLock>, String> + Send>;

/// Why one try failed.
#[derive(Debug, Error)]
enum PublishError {
    #[error(transparent)]
    Call(#[from] CallError),
    #[error("the API server would refuse the slices: {0}; this is a bug in Tranche: please report it")]
    Invalid(String),
}

/// How one try ended.
enum PublishOutcome {
    Settled,
    /// There is something to write, but not before then.
    NotBefore(Instant),
    /// The API server does not keep shares: something else is to be written.
    Otherwise,
}

/// The loop. One per node and driver.
pub struct Publisher {
    cluster: Arc<dyn Cluster>,
    node: NodeName,
    observed: ObservedNode,
    state: watch::Sender<Publication>,
    offering: Offering,
    contents: DesiredContents,
    owner: Option<SliceOwner>,
    stored: StoredSlices,
    schedule: Schedule,
}

/// What the node's other parts tell of its GPUs.
struct ObservedNode {
    inventory: watch::Receiver<Inventory>,
    device_faults: Option<watch::Receiver<DeviceFaults>>,
    /// By the faults that were last taken.
    taints: Taints,
}

impl ObservedNode {
    /// Waits for something new.
    ///
    /// # Errors
    /// There will be no other inventory.
    async fn changed(&mut self) -> Result<(), watch::error::RecvError> {
        tokio::select! {
            changed = self.inventory.changed() => changed,
            () = changed(&mut self.device_faults) => Ok(()),
        }
    }

    /// The GPUs, or why there are none to publish. None: nobody has looked yet.
    fn take(&mut self) -> Option<(NodeGpus, Option<String>)> {
        let (gpus, empty_because) = match &*self.inventory.borrow_and_update() {
            Inventory::Unknown => return None,
            Inventory::Found(gpus) => (gpus.clone(), None),
            Inventory::Unavailable { reason } => (NodeGpus::default(), Some(reason.clone())),
        };
        if let Some(device_faults) = &mut self.device_faults {
            self.taints = taints(&gpus, &device_faults.borrow_and_update());
        }
        Some((gpus, empty_because))
    }

    /// The GPUs, if some were found.
    fn gpus(&self) -> Option<NodeGpus> {
        match &*self.inventory.borrow() {
            Inventory::Found(gpus) => Some(gpus.clone()),
            Inventory::Unknown | Inventory::Unavailable { .. } => None,
        }
    }
}

/// What the slices are to say.
#[derive(Default)]
struct DesiredContents {
    /// `None` before the first look.
    slices: Option<Vec<SliceContent>>,
    /// They have been in the API server: what differs from them now is somebody else's doing.
    settled: bool,
}

impl DesiredContents {
    /// True if that is something new.
    fn set(&mut self, slices: Vec<SliceContent>) -> bool {
        let slices = Some(slices);
        let is_new = self.slices != slices;
        if is_new {
            *self = Self { slices, settled: false };
        }
        is_new
    }

    fn slices(&self) -> &[SliceContent] {
        self.slices.as_deref().unwrap_or_default()
    }

    fn have_shares(&self) -> bool {
        let mut devices = self.slices().iter().flat_map(|content| &content.devices);
        devices.any(|device| device.allow_multiple_allocations == Some(true))
    }
}

impl Publisher {
    pub fn new(
        cluster: Arc<dyn Cluster>,
        node: NodeName,
        inventory: watch::Receiver<Inventory>,
    ) -> (Self, watch::Receiver<Publication>) {
        let (state, receiver) = watch::channel(Publication {
            phase: PublicationPhase::WaitingForLock,
            generation: 0,
            slices: 0,
            devices: 0,
            empty_because: None,
            writes: 0,
            failures: 0,
            dropped: Dropped::default(),
            keeps: Keeps::Untold,
            offered: BTreeMap::new(),
        });
        let publisher = Self {
            cluster,
            node,
            observed: ObservedNode { inventory, device_faults: None, taints: Taints::new() },
            state,
            offering: Offering::new(SharingPolicy::default()),
            contents: DesiredContents::default(),
            owner: None,
            stored: StoredSlices::default(),
            schedule: Schedule::new(PublicationPace::default()),
        };
        (publisher, receiver)
    }

    pub fn with_pace(self, pace: PublicationPace) -> Self {
        Self { schedule: Schedule::new(pace), ..self }
    }

    /// Another policy than the default one.
    pub fn with_sharing(self, policy: SharingPolicy) -> Self {
        Self { offering: Offering::new(policy), ..self }
    }

    /// Devices with faults are tainted.
    pub fn with_device_faults(mut self, device_faults: watch::Receiver<DeviceFaults>) -> Self {
        self.observed.device_faults = Some(device_faults);
        self
    }

    /// Publishes until `stop`, or until the inventory's sender is gone. The lock is given back at once
    /// then, so that the next instance can go on while this one finishes its claims.
    pub async fn run(mut self, lock: TryLock, stop: CancellationToken) {
        let guard = tokio::select! {
            biased;
            () = stop.cancelled() => None,
            guard = self.take(lock) => Some(guard),
        };
        if guard.is_some() {
            tokio::select! {
                biased;
                () = stop.cancelled() => (),
                () = self.publish() => (),
            }
        }
        drop(guard);
        self.phase(PublicationPhase::Stopped);
    }

    async fn take(&self, lock: TryLock) -> PublisherLock {
        loop {
            match lock() {
                Ok(Some(guard)) => return guard,
                Ok(None) => self.phase(PublicationPhase::WaitingForLock),
                Err(error) => {
                    warn!(%error, "the publisher's lock cannot be taken");
                    self.phase(PublicationPhase::Failing { error });
                }
            }
            tokio::time::sleep(self.schedule.pace().lock).await;
        }
    }

    async fn publish(&mut self) {
        self.phase(PublicationPhase::WaitingForInventory);
        let mut events = self.cluster.watch_slices();
        self.observed.inventory.mark_changed();
        loop {
            let due = self.schedule.due().filter(|_| self.contents.slices.is_some());
            let ask_again = self.ask_again_at();
            tokio::select! {
                changed = self.observed.changed() => match changed {
                    Ok(()) => self.take_inventory(),
                    Err(_) => return,
                },
                Some(event) = events.next() => self.take_event(&event),
                () = until(due) => {
                    let outcome = self.attempt().await;
                    self.conclude(outcome);
                }
                () = until(ask_again) => self.ask_again().await,
            }
        }
    }

    fn take_inventory(&mut self) {
        let Some((gpus, empty_because)) = self.observed.take() else { return };
        let offered = offered(&gpus, self.offering.offer());
        let keeps = self.offering.keeps();
        self.state.send_if_modified(|state| {
            let empty = std::mem::replace(&mut state.empty_because, empty_because.clone()) != empty_because;
            let keeping = std::mem::replace(&mut state.keeps, keeps) != keeps;
            let offers = state.offered != offered;
            state.offered = offered;
            empty || keeping || offers
        });
        let contents = self.contents_of(&gpus, self.offering.offer(), self.offering.counters());
        // Asked about with the next look, though it may change nothing.
        if self.offering.counters_untold() && self.wants_counters() {
            self.schedule.try_now();
        }
        if self.contents.set(contents) {
            self.schedule.try_now();
            self.phase(PublicationPhase::Pending);
        }
    }

    fn contents_of(&self, gpus: &NodeGpus, offer: Offer<'_>, counters: Counters) -> Vec<SliceContent> {
        desired(gpus, &self.node, PublishOptions { offer, taints: &self.observed.taints, counters })
    }

    fn take_event(&mut self, event: &SliceEvent) {
        match event {
            SliceEvent::Restarted => self.schedule.try_now(),
            SliceEvent::Stored(slice) => {
                if !self.stored.has_version(slice) {
                    self.schedule.look_soon(self.schedule.pace().look);
                }
            }
            SliceEvent::Deleted(slice) => {
                if self.stored.has(slice) {
                    info!(slice = slice.name, "a slice of ours was deleted; publishing it again");
                    self.schedule.try_now();
                }
            }
            SliceEvent::Interrupted { problem } => {
                // Deaf as long as it lasts: look from time to time.
                debug!(problem, "the watch of our slices is interrupted");
                self.schedule.look_soon(self.schedule.pace().repair);
            }
        }
    }

    fn conclude(&mut self, outcome: Result<PublishOutcome, PublishError>) {
        match outcome {
            Ok(PublishOutcome::Settled) => {
                self.contents.settled = true;
                self.schedule.succeeded();
                self.tell_published();
            }
            Ok(PublishOutcome::NotBefore(at)) => {
                self.schedule.succeeded();
                self.schedule.try_at(at);
                self.phase(PublicationPhase::Pending);
            }
            Ok(PublishOutcome::Otherwise) => {
                self.schedule.succeeded();
                self.schedule.let_content_go();
                self.take_inventory();
                self.schedule.try_now();
            }
            Err(error) => {
                // What is invalid stays so until the inventory changes.
                let again = matches!(error, PublishError::Call(_));
                let is_first = self.schedule.failed(again, &self.node);
                let error = error_chain(&error);
                if is_first {
                    warn!(error, "the slices could not be published; trying again");
                }
                self.state.send_modify(|state| {
                    state.failures += 1;
                    state.phase = PublicationPhase::Failing { error };
                });
            }
        }
    }

    /// One look, and the writes it calls for.
    async fn attempt(&mut self) -> Result<PublishOutcome, PublishError> {
        self.schedule.begin_look();
        let seen = seen(self.cluster.slices().await?);
        self.stored.remember(&seen);
        if self.offering.observe(&seen) {
            return Ok(PublishOutcome::Otherwise);
        }
        // Even where nothing is to be written without counters.
        if self.offering.counters_untold() && self.wants_counters() {
            self.ensure_owner().await?;
            match self.ask().await {
                Ok(true) => return Ok(PublishOutcome::Otherwise),
                // Refused for what is in it: the rest is published.
                Ok(false) | Err(CallError::Refused { code: 400 | 422, .. }) => {}
                // What may be made is not taken back, nor left out, because nobody knows.
                Err(error) => return Err(error.into()),
            }
        }
        let change = self.diff(&seen);
        if change.is_empty() {
            self.stored.take_wiped();
            return Ok(PublishOutcome::Settled);
        }
        self.check()?;
        let now = Instant::now();
        let at = self.schedule.earliest(self.cause(), now);
        if at > now {
            return Ok(PublishOutcome::NotBefore(at));
        }
        if change.missing {
            // A Node that was created anew has another UID; slices owned by the old one would be
            // collected again and again.
            self.owner = None;
        }
        self.ensure_owner().await?;
        if self.offering.keeps() == Keeps::Untold
            && self.contents.have_shares()
            && self.ask().await.unwrap_or(false)
        {
            return Ok(PublishOutcome::Otherwise);
        }
        let change = self.diff(&seen);
        let otherwise = self.carry_out(&change).await?;
        self.schedule.note_writes(self.contents.settled, self.stored.take_wiped());
        Ok(if otherwise { PublishOutcome::Otherwise } else { PublishOutcome::Settled })
    }

    async fn ensure_owner(&mut self) -> Result<(), PublishError> {
        if self.owner.is_none() {
            let node_uid = self.cluster.node_uid().await?;
            self.owner = Some(SliceOwner { node: self.node.clone(), node_uid });
        }
        Ok(())
    }

    /// True if a board is carved on demand.
    fn wants_counters(&self) -> bool {
        let Inventory::Found(gpus) = &*self.observed.inventory.borrow() else { return false };
        gpus.gpus.iter().any(|gpu| matches!(gpu.mig, MigMode::OnDemand(_)))
    }

    /// When the API server is to be asked whether it keeps more than it did.
    fn ask_again_at(&self) -> Option<Instant> {
        let open = !self.state.borrow().dropped.is_empty()
            || self.offering.counters_untold() && self.wants_counters();
        let told = self.offering.told.filter(|_| open);
        told.map(|told| told + self.schedule.pace().ask_again)
    }

    async fn ask_again(&mut self) {
        if self.ask().await.unwrap_or(false) {
            info!(keeps = ?self.offering.keeps(), "the API server treats shares differently from before");
            self.schedule.let_content_go();
        }
        self.take_inventory();
        // What was dropped and is not any more differs from what is stored.
        self.schedule.try_now();
    }

    /// Asks the API server, in a dry run, what it would keep. True if boards are to be published otherwise
    /// than before. Without an answer about shares a real write will tell.
    ///
    /// # Errors
    /// The API server gave no answer, and nothing was learnt.
    async fn ask(&mut self) -> Result<bool, CallError> {
        self.offering.told = Some(Instant::now());
        let Some(gpus) = self.observed.gpus() else { return Ok(false) };
        let contents = self.contents_of(&gpus, self.offering.with_shares(), Counters::Kept);
        let owner = self.owner.clone().unwrap_or_else(|| self.nobody());
        let known = Dropped::default();
        let target = DesiredPool { contents: &contents, owner: &owner, dropped: &known, known_generation: 0 };
        let mut lost = Dropped::default();
        for write in diff(&target, &ExistingSlices::default()).writes {
            let (Write::Create(slice) | Write::Update(slice)) = write;
            match self.cluster.try_slice(&slice).await {
                Ok(stored) => lost.merge(dropped(&slice.spec, &stored.spec)),
                Err(error) => {
                    debug!(error = error_chain(&error), "what the API server keeps could not be asked");
                    return Err(error);
                }
            }
        }
        // What was not in them says nothing.
        let mut devices = contents.iter().flat_map(|content| &content.devices);
        let with_shares = devices.any(|device| device.allow_multiple_allocations == Some(true));
        let mut otherwise = with_shares && self.offering.learn(&lost);
        if self.wants_counters() {
            otherwise |= self.offering.learn_counters(&lost);
        }
        self.tell_dropped(lost);
        Ok(otherwise)
    }

    fn nobody(&self) -> SliceOwner {
        SliceOwner { node: self.node.clone(), node_uid: String::new() }
    }

    fn diff(&self, seen: &ExistingSlices) -> WritePlan {
        let nobody = self.nobody();
        let target = DesiredPool {
            contents: self.contents.slices(),
            owner: self.owner.as_ref().unwrap_or(&nobody),
            dropped: &self.state.borrow().dropped,
            known_generation: self.stored.generation(),
        };
        diff(&target, seen)
    }

    fn check(&self) -> Result<(), PublishError> {
        let violations = violations(self.contents.slices());
        if violations.is_empty() {
            return Ok(());
        }
        let words: Vec<String> = violations.iter().map(ToString::to_string).collect();
        Err(PublishError::Invalid(words.join("; ")))
    }

    /// Why the slices are written.
    fn cause(&self) -> WriteCause {
        match (self.stored.is_wiped(), self.contents.settled) {
            (true, _) => WriteCause::Missing,
            (false, true) => WriteCause::Repair,
            (false, false) => WriteCause::Content,
        }
    }

    /// True if the API server turned out to treat shares otherwise than was believed.
    async fn carry_out(&mut self, change: &WritePlan) -> Result<bool, PublishError> {
        for gone in &change.deletes {
            info!(slice = gone.name, "deleting a slice that is not wanted");
            self.stored.forget(&gone.name);
            self.cluster.delete_slice(&slice_ref(gone)).await?;
            self.count_write();
        }
        let mut lost = Dropped::default();
        for write in &change.writes {
            let (sent, stored) = match write {
                Write::Create(slice) => (slice, self.cluster.create_slice(slice).await?),
                Write::Update(slice) => (slice, self.cluster.update_slice(slice).await?),
            };
            self.count_write();
            lost.merge(dropped(&sent.spec, &stored.spec));
            self.stored.note(&stored);
        }
        let otherwise = self.learn(lost, change);
        info!(generation = change.generation, writes = change.writes.len(), "slices published");
        Ok(otherwise)
    }

    /// Takes note of what the API server did not keep. A rewrite of every slice tells anew; one slice
    /// alone can only add to what is known. True as for [`Self::carry_out`].
    fn learn(&mut self, lost: Dropped, change: &WritePlan) -> bool {
        let all = change.writes.len() == self.contents.slices().len();
        let shares = self.contents.have_shares();
        let mut otherwise = (all && shares || lost.shares()) && self.offering.learn(&lost);
        if lost.counters() {
            otherwise |= self.offering.learn_counters(&lost);
        }
        let mut now = if all { self.offering.dropped() } else { self.state.borrow().dropped.clone() };
        now.merge(lost);
        self.tell_dropped(now);
        otherwise
    }

    fn tell_dropped(&mut self, now: Dropped) {
        if self.state.borrow().dropped == now {
            return;
        }
        if !now.is_empty() {
            self.offering.told.get_or_insert_with(Instant::now);
            warn!(fields = %now, "the API server does not keep all that was published");
        }
        self.state.send_modify(|state| state.dropped = now);
    }

    /// The API server has it all.
    fn tell_published(&self) {
        let contents = self.contents.slices();
        let devices = contents.iter().map(|content| content.devices.len()).sum();
        self.state.send_if_modified(|state| {
            let before = state.clone();
            (state.phase, state.keeps) = (PublicationPhase::Published, self.offering.keeps());
            (state.generation, state.slices, state.devices) =
                (self.stored.generation(), contents.len(), devices);
            before != *state
        });
    }

    fn count_write(&self) {
        self.state.send_modify(|state| state.writes += 1);
    }

    fn phase(&self, phase: PublicationPhase) {
        self.state.send_if_modified(|state| {
            let changed = state.phase != phase;
            state.phase = phase;
            changed
        });
    }
}

/// Waits for the next change of the device faults; forever, once there will be none.
async fn changed(device_faults: &mut Option<watch::Receiver<DeviceFaults>>) {
    if let Some(receiver) = device_faults
        && receiver.changed().await.is_ok()
    {
        return;
    }
    // The last ones stay.
    std::future::pending().await
}

async fn until(due: Option<Instant>) {
    match due {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}
