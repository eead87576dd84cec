//! Which processes still use a claim's devices, as the node sees it, whatever the API server says of the claim.
//!
//! A user who may edit a claim can remove its finalizers and delete it under a running pod. So a claim that is gone,
//! replaced or no longer allocated is released only when no process of its pods runs. The pods are those of the
//! claim's ledger record; the processes are those in the pods' control groups, the pause process among them. The
//! container edits are removed before the processes are listed, so that no new container gets the device meanwhile.
//!
//! A process can hand a descriptor of a device to one of another pod, which goes on using it. So a whole GPU is free only
//! when no other pod has its device node open either, and a device that is a claim's alone is given only then.
//!
//! A process whose control group cannot be read may be any pod's: so where there are such, no pod is known to have ended
//! but by kubelet's word, and a device that one of them has open is given to nobody.
//!
//! Where nobody can look, kubelet's word counts, and who may have a GPU open keeps nobody off it. What a look has seen held is
//! held until another one could tell that it is not ([`Holding`]).
//!
//! A device that is not free yet is withheld: its record stays, so that no other claim gets the device; the device is
//! tainted, its pods get an event, and the processes are listed again every [`AGAIN`]. A share taints its board only if
//! its claim was taken away, not if kubelet has ended its pod. What no record names is [`super::unclaimed`]'s.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::watch;

use super::file_looks::{ByPod, FileLooks};
use super::holding::{
    Hold, Holder, Holding, KnownOpeners, NAMED, had_open, has_open, holders_of, may_be_theirs,
};
use super::leavable::{LeavableThreads, THREADS_MAX};
use super::listing::{LIST_LIMIT, Listing, Listings};
use super::unclaimed::UnclaimedDevices;
use crate::host::cgroup::ProcessOwner;
use crate::host::device_nodes::NVIDIA_MAJOR;
use crate::host::{DeviceNumber, OpenDevices, PodProcesses, Processes};
use crate::inventory::FaultLocation;
use crate::ledger::{HeldDevice, HoldMode, Record, RecordKey};
use crate::model::claim::{ClaimRef, PodRef};
use crate::model::names::{ClaimUid, DeviceName, PodUid};

/// Between two looks at what is withheld.
pub const AGAIN: Duration = Duration::from_secs(2);
/// For how long what is withheld by records is looked at in one go, and then what no record names. The others come first in
/// the next one; claims and sweeps wait meanwhile.
pub(super) const IN_ONE_GO: Duration = Duration::from_secs(15);
/// Why nobody knows whether those who had a device open have it open still.
const NOT_ALL_LOOKED_AT: &str = "their open files could not all be looked at";

/// Why a listing says nothing of processes that it lacks.
const NOT_ALL_LISTED: &str = "not all processes that start on the node could be listed";

/// A claim whose devices are not free, though nobody should have them any more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Withheld {
    pub key: RecordKey,
    pub claim: ClaimRef,
    pub cause: ReleaseCause,
    pub devices: Vec<HeldDevice>,
    pub by: Holding,
}

/// Who causes a release: whether the devices are free is believed accordingly.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReleaseCause {
    /// Kubelet, which has seen the claim's pods end.
    Kubelet,
    /// The state of the API server, which does not prove that the pods have ended.
    Api,
    /// The claim gets the same devices again, for the same pods.
    Anew,
}

/// Looks at the node's processes, and keeps what is withheld.
pub struct Holders {
    processes: Arc<dyn Processes>,
    files: FileLooks,
    own_pod: Option<PodUid>,
    listings: Listings,
    /// They ask whose processes are.
    askers: LeavableThreads,
    withheld: watch::Sender<BTreeMap<RecordKey, Withheld>>,
    /// Records that were withheld when a look at all of them began, and are since then: a listing that began later tells who
    /// has them still. Until they were withheld, containers could get their devices.
    looked_at: Mutex<Option<(Instant, BTreeSet<RecordKey>)>>,
    unclaimed: UnclaimedDevices,
}

impl Holders {
    pub fn new(processes: Arc<dyn Processes>, own_pod: Option<PodUid>, files: FileLooks) -> Self {
        let withheld = watch::Sender::new(BTreeMap::new());
        let unclaimed = UnclaimedDevices::default();
        let listings = Listings::new(processes.clone());
        let askers = LeavableThreads::new("owners", THREADS_MAX);
        Self { processes, files, own_pod, listings, askers, withheld, looked_at: Mutex::default(), unclaimed }
    }

    /// False: nobody looks at who has a device open.
    pub fn looks_at_files(&self) -> bool {
        self.files.is_on()
    }

    /// The pods of the record that have processes. `in_use`: a container may have been given the devices a moment ago. Blocks
    /// its thread.
    ///
    /// # Errors
    /// In words, if the node's processes cannot be seen; or if none of the pods is seen to have any, and there are processes
    /// that may be theirs.
    pub fn running(&self, record: &Record, in_use: bool) -> Result<Vec<Holder>, String> {
        let (found, untold) = self.listed(record, in_use)?;
        match found.is_empty() && !untold.is_empty() {
            true => Err(may_be_theirs(&untold)),
            false => Ok(found),
        }
    }

    /// The same, where kubelet has said that the pods have ended: it knows of processes that hide their pods, unless they were
    /// seen in the claim's. Where nobody can look, it is believed, unless a look has seen the devices held before (`was_seen`).
    fn running_by_kubelet(
        &self,
        record: &Record,
        in_use: bool,
        was_seen: bool,
        known: &[Holder],
    ) -> Result<Vec<Holder>, String> {
        match self.listed(record, in_use) {
            Err(problem) if !was_seen => {
                let claim = &record.intent.claim;
                tracing::debug!(%claim, problem, "kubelet's word is taken that the pods have ended");
                Ok(Vec::new())
            }
            Err(problem) => Err(problem),
            Ok((found, mut untold)) => {
                let ran =
                    |pid: &u32| known.iter().any(|one| one.hold == Hold::Runs && one.pids.contains(pid));
                untold.retain(ran);
                match found.is_empty() && !untold.is_empty() {
                    true => Err(may_be_theirs(&untold)),
                    false => Ok(found),
                }
            }
        }
    }

    /// The pods of the record that have processes, and the processes of which nobody knows whose they are.
    fn listed(&self, record: &Record, in_use: bool) -> Result<(Vec<Holder>, Vec<u32>), String> {
        let pods = &record.intent.pods;
        if pods.is_empty() {
            return Ok((Vec::new(), Vec::new()));
        }
        self.check_shown()?;
        let asked = Instant::now();
        let key = record.intent.key();
        let since = self.looked_at().as_ref().filter(|(_, all)| !in_use && all.contains(&key)).map(|go| go.0);
        let now = self.listings.since(since.unwrap_or(asked))?;
        let holder = |pod: &PodRef| {
            Some(Holder { pod: pod.clone(), pids: now.by_pod.get(&pod.uid)?.clone(), hold: Hold::Runs })
        };
        let found: Vec<Holder> = pods.iter().filter_map(holder).collect();
        if found.is_empty() && now.is_cut {
            return Err(NOT_ALL_LISTED.to_owned());
        }
        Ok((found, now.untold.clone()))
    }

    /// Those of these pods that may have processes, as far as can be told. Blocks its thread.
    pub fn left_of(&self, pods: &[PodRef]) -> Vec<PodRef> {
        if pods.is_empty() {
            return Vec::new();
        }
        match self.look(Instant::now()) {
            Ok(now) if now.untold.is_empty() && !now.is_cut => {
                pods.iter().filter(|pod| now.by_pod.contains_key(&pod.uid)).cloned().collect()
            }
            Ok(_) | Err(_) => pods.to_vec(),
        }
    }

    /// The pods, but ours and these, that have one of these devices open and were not let administrate the node, and those of
    /// which that is not known. Blocks its thread while all open files of the other pods are looked at ([`FileLooks`]).
    ///
    /// # Errors
    /// In words, if nobody can look.
    pub fn openers(
        &self,
        devices: &BTreeSet<DeviceNumber>,
        rightful: &[PodRef],
    ) -> Result<OpenDevices, String> {
        Ok(self.openers_listed(devices, rightful)?.0)
    }

    /// The same, and whether more processes were starting than were listed.
    fn openers_listed(
        &self,
        devices: &BTreeSet<DeviceNumber>,
        rightful: &[PodRef],
    ) -> Result<(OpenDevices, bool), String> {
        if devices.is_empty() || !self.looks_at_files() {
            return Ok((OpenDevices::default(), false));
        }
        let (strangers, is_cut) = self.strangers(rightful, Instant::now())?;
        Ok((self.files.openers(strangers, devices)?, is_cut))
    }

    /// As [`Self::openers`]; a look that finds nobody, and does not come to all pods and processes, is none.
    pub fn openers_of_all(
        &self,
        devices: &BTreeSet<DeviceNumber>,
        rightful: &[PodRef],
    ) -> Result<OpenDevices, String> {
        let (found, is_cut) = self.openers_listed(devices, rightful)?;
        match found.not_reached() {
            _ if !found.openers.is_empty() => Ok(found),
            Some(problem) => Err(problem),
            None if is_cut => {
                self.files.count_unmade();
                Err(NOT_ALL_LISTED.to_owned())
            }
            None => Ok(found),
        }
    }

    /// The processes of all pods but ours and these, as a listing tells that has begun at `since` or later, and whether more
    /// were starting than were listed.
    fn strangers(&self, rightful: &[PodRef], since: Instant) -> Result<(ByPod, bool), String> {
        let listed = self.look(since).inspect_err(|_| self.files.count_unmade())?;
        let PodProcesses { by_pod: mut pods, untold, is_cut } = (*listed).clone();
        if !untold.is_empty() {
            pods.insert(PodProcesses::UNTOLD.into(), untold);
        }
        pods.retain(|pod, _| {
            Some(pod) != self.own_pod.as_ref() && !rightful.iter().any(|known| known.uid == *pod)
        });
        Ok((pods, is_cut))
    }

    /// Who has devices open that are to be free. Those are looked at first who had them open the last time (`known`), by a
    /// listing that has begun at `since` or later. Where nobody can look, nobody is kept off a device but one that was seen
    /// open, or held by an earlier process (`before`): who had it open may have handed it on and ended.
    pub fn openers_again(
        &self,
        devices: &BTreeSet<DeviceNumber>,
        rightful: &[PodRef],
        known: &[Holder],
        (before, since): (bool, Instant),
    ) -> Holding {
        let still = self.known_openers(devices, rightful, known, since).into_holding();
        if !still.is_none() {
            return still;
        }
        // By a new listing: processes may have come while the known ones were looked at, which lasts as long as these like.
        match self.openers_of_all(devices, rightful) {
            Ok(found) => Holding::by(holders_of(found.openers)),
            Err(problem) => {
                let holders = had_open(known, rightful);
                let before = before && holders.is_empty();
                if before || !holders.is_empty() {
                    return Holding { holders, untold: Some(problem), before };
                }
                tracing::warn!(
                    problem,
                    "who else has a GPU open cannot be told, and it is given all the same"
                );
                Holding::default()
            }
        }
    }

    /// Those of the known holders who have one of the devices open still, and those of whom that cannot be told. Blocks as
    /// [`Self::openers`] does. The listing of the processes may be older, if it has begun at `since` or later: nobody is free
    /// of a device by this look alone.
    pub fn known_openers(
        &self,
        devices: &BTreeSet<DeviceNumber>,
        rightful: &[PodRef],
        known: &[Holder],
        since: Instant,
    ) -> KnownOpeners {
        let known = had_open(known, rightful);
        if known.is_empty() || devices.is_empty() || !self.looks_at_files() {
            return KnownOpeners::default();
        }
        let mut pods = match self.strangers(rightful, since) {
            Ok((pods, _)) => pods,
            Err(problem) => return KnownOpeners::untold(known, problem),
        };
        // A process may have handed it to any other of its pod. One that hides its pod since, or no longer, may be the one
        // that was seen.
        pods.retain(|pod, pids| {
            let hides = pod.as_str() == PodProcesses::UNTOLD;
            pids.retain(|pid| {
                known.iter().any(|one| match hides || one.hides() {
                    true => one.pids.contains(pid),
                    false => one.pod.uid == *pod,
                })
            });
            !pids.is_empty()
        });
        match self.files.openers(pods.clone(), devices) {
            Err(problem) => KnownOpeners::untold(pods.into_iter().map(has_open).collect(), problem),
            Ok(OpenDevices { openers: open, unfinished, .. }) => {
                pods.retain(|pod, _| unfinished.contains(pod));
                let unseen = match pods.is_empty() {
                    true => KnownOpeners::default(),
                    false => KnownOpeners::untold(
                        pods.into_iter().map(has_open).collect(),
                        NOT_ALL_LOOKED_AT.to_owned(),
                    ),
                };
                KnownOpeners { open, ..unseen }
            }
        }
    }

    fn check_shown(&self) -> Result<(), String> {
        let words = "the node's processes cannot be seen from here; give the plugin the host's PID namespace \
                     (hostPID: true)";
        if self.processes.are_all_shown() { Ok(()) } else { Err(words.to_owned()) }
    }

    fn look(&self, since: Instant) -> Listing {
        self.check_shown()?;
        self.listings.since(since)
    }

    /// The pods of these processes, ours left out, as far as can be told. Blocks its thread.
    pub fn pods_of(&self, pids: Vec<u32>) -> Vec<PodUid> {
        if !self.processes.pids_are_the_hosts() {
            return Vec::new();
        }
        let processes = self.processes.clone();
        let owner = move |pid: u32| match processes.owner(pid) {
            Ok(Some(ProcessOwner::Pod { pod, .. })) => Some(pod),
            _ => None,
        };
        let asked = self.askers.run(LIST_LIMIT, move || pids.into_iter().filter_map(owner).collect());
        let mut pods: Vec<_> = asked.unwrap_or_else(|problem| {
            tracing::warn!(problem, "which pods use a device, by the driver's word, cannot be told");
            Vec::new()
        });
        pods.retain(|pod| Some(pod) != self.own_pod.as_ref());
        pods.sort();
        pods.dedup();
        pods
    }

    /// What keeps a record's devices from being free; none: nothing does. `in_use`: as of [`Self::running`]. `rightful`: pods
    /// that have the devices by other claims.
    pub fn hold(
        &self,
        record: &Record,
        cause: ReleaseCause,
        in_use: bool,
        rightful: &[PodRef],
    ) -> Option<Withheld> {
        let devices = kept_devices(record);
        if devices.is_empty() || cause == ReleaseCause::Anew {
            return None;
        }
        let (key, claim, since) = (record.intent.key(), record.intent.claim.clone(), Instant::now());
        let Holding { holders: known, before, .. } = self.known_of(&key, &devices);
        let running = match cause {
            ReleaseCause::Kubelet => {
                self.running_by_kubelet(record, in_use, before || !known.is_empty(), &known)
            }
            ReleaseCause::Api | ReleaseCause::Anew => self.running(record, in_use),
        };
        let by = match running {
            Err(problem) => Holding { holders: known, untold: Some(problem), before },
            Ok(by) if by.is_empty() => {
                self.openers_again(&whole_gpus(&devices), rightful, &known, (before, since))
            }
            // Nobody has looked whether those have it open still who had.
            Ok(by) => Holding::by([by, had_open(&known, rightful)].concat()),
        };
        (!by.is_none()).then_some(Withheld { key, claim, cause, devices, by })
    }

    /// The same of a record whose processes cannot be looked at.
    pub fn not_looked_at(&self, record: &Record, cause: ReleaseCause, problem: &str) -> Option<Withheld> {
        let (key, claim, devices) = (record.intent.key(), record.intent.claim.clone(), kept_devices(record));
        let by = Holding { untold: Some(problem.to_owned()), ..self.known_of(&key, &devices) };
        (!devices.is_empty()).then_some(Withheld { key, claim, cause, devices, by })
    }

    /// What the last look at what the record withholds has found, or an earlier process.
    fn known_of(&self, key: &RecordKey, devices: &[HeldDevice]) -> Holding {
        let known = self.withheld_of(key).map(|withheld| withheld.by).unwrap_or_default();
        let before = known.before || self.were_held_before(devices.iter().map(location));
        Holding { before, ..known }
    }

    /// One of these was held when an earlier process ended, and this one has not looked yet. Where no process is ever shown,
    /// there is nothing to wait for.
    pub(super) fn were_held_before(&self, locations: impl Iterator<Item = FaultLocation>) -> bool {
        self.processes.are_all_shown() && self.unclaimed.were_held_before(locations)
    }

    /// By device, why nobody new is to get it.
    pub fn kept_from_others(&self) -> BTreeMap<FaultLocation, String> {
        let mut kept = by_device(&self.withheld.borrow());
        for (location, words) in self.unclaimed.changes().borrow().by_location() {
            let told = kept.entry(location).or_default();
            *told = if told.is_empty() { words } else { format!("{told}; {words}") };
        }
        kept
    }

    /// What no record names.
    pub fn unclaimed(&self) -> &UnclaimedDevices {
        &self.unclaimed
    }

    /// What is withheld, by record.
    pub fn withheld(&self) -> watch::Receiver<BTreeMap<RecordKey, Withheld>> {
        self.withheld.subscribe()
    }

    /// What is withheld by a record.
    pub fn withheld_of(&self, key: &RecordKey) -> Option<Withheld> {
        self.withheld.borrow().get(key).cloned()
    }

    /// What is withheld by a claim, or what it owes; of several records the one with this device.
    pub fn withheld_by(&self, claim: &ClaimUid, device: &DeviceName) -> Option<Withheld> {
        let all = self.withheld.borrow();
        let of_claim = || all.values().filter(|one| one.claim.uid == *claim);
        of_claim().find(|one| one.has(device)).or_else(|| of_claim().next()).cloned()
    }

    /// A claim of which the device, or a share of it, is withheld.
    pub fn withheld_on(&self, device: &DeviceName) -> Option<Withheld> {
        let all = self.withheld.borrow();
        all.values().find(|one| one.has(device)).cloned()
    }

    pub fn withhold(&self, what: &Withheld) {
        self.withheld
            .send_if_modified(|all| all.insert(what.key.clone(), what.clone()).as_ref() != Some(what));
    }

    /// Until the answer is dropped, what is withheld now is looked at: one listing is enough for all of it.
    pub fn look_at_withheld(&self) -> LookAtWithheld<'_> {
        // What is settled between the two would stay in it.
        let mut looked_at = self.looked_at();
        let all = self.withheld.borrow().keys().cloned().collect();
        *looked_at = Some((Instant::now(), all));
        drop(looked_at);
        LookAtWithheld(self)
    }

    /// What is withheld by a record is recorded anew, with this key. Its holders were not looked at since.
    pub fn withhold_as(&self, withheld: &Withheld, key: RecordKey) {
        let untold =
            Some("its claim was given other devices since, and this one was not looked at".to_owned());
        let by = Holding { untold, ..withheld.by.clone() };
        self.withhold(&Withheld { key, by, ..withheld.clone() });
    }

    /// What the record names is held by right, or by nobody any more.
    pub fn settle(&self, key: &RecordKey) {
        self.withheld.send_if_modified(|all| all.remove(key).is_some());
        self.looked_at().as_mut().map(|(_, all)| all.remove(key));
    }

    fn looked_at(&self) -> MutexGuard<'_, Option<(Instant, BTreeSet<RecordKey>)>> {
        self.looked_at.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets records that are no more: another process has released them.
    pub fn keep(&self, recorded: impl Fn(&RecordKey) -> bool) {
        self.withheld.send_if_modified(|all| {
            let before = all.len();
            all.retain(|key, _| recorded(key));
            all.len() != before
        });
    }
}

/// A look at all that is withheld, under way.
pub struct LookAtWithheld<'a>(&'a Holders);

impl Drop for LookAtWithheld<'_> {
    fn drop(&mut self) {
        *self.0.looked_at() = None;
    }
}

/// Which devices, and who holds them.
impl fmt::Display for Withheld {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let devices = self.devices.iter().map(|held| format!("{} ({})", held.answer.device, held.uuid));
        write!(f, "{}: {}", devices.collect::<Vec<_>>().join(", "), self.holders())
    }
}

impl Withheld {
    fn has(&self, device: &DeviceName) -> bool {
        self.devices.iter().any(|held| held.answer.device == *device)
    }

    /// Who holds the devices, in words.
    pub fn holders(&self) -> String {
        self.by.to_string()
    }
}

/// The `turn`th comes first.
pub(super) fn in_turn<T>(mut all: Vec<T>, turn: usize) -> Vec<T> {
    let first = turn.checked_rem(all.len()).unwrap_or(0);
    all.rotate_left(first);
    all
}

/// What others are kept off while the record's devices are held.
fn kept_devices(record: &Record) -> Vec<HeldDevice> {
    record.intent.devices.iter().filter(|held| held.mode != HoldMode::Admin).cloned().collect()
}

/// The device nodes of the whole GPUs among these, by the minor numbers in their names.
fn whole_gpus(devices: &[HeldDevice]) -> BTreeSet<DeviceNumber> {
    let whole = devices.iter().filter(|held| held.mode == HoldMode::Whole);
    whole.filter_map(|held| Some((NVIDIA_MAJOR, held.answer.device.minor()?))).collect()
}

/// Of a board that is carved: whatever may be made over it would find it there.
pub(super) fn location(held: &HeldDevice) -> FaultLocation {
    match &held.mig {
        Some(mig) => FaultLocation::Slices(held.gpu.clone(), mig.place.placement),
        None => FaultLocation::Device(held.uuid.clone()),
    }
}

/// By device, why nobody new is to get it. Of a device with several claims [`NAMED`] are told. The share of a pod that
/// kubelet has ended keeps nobody off the device: its processes end within moments, at each pod that is deleted without a
/// grace period.
fn by_device(withheld: &BTreeMap<RecordKey, Withheld>) -> BTreeMap<FaultLocation, String> {
    let mut found = BTreeMap::<FaultLocation, Vec<String>>::new();
    for one in withheld.values() {
        let keeps_off = |held: &&HeldDevice| match held.mode {
            HoldMode::Share(_) => one.cause == ReleaseCause::Api,
            HoldMode::Whole | HoldMode::Mig => true,
            HoldMode::Admin => false,
        };
        for held in one.devices.iter().filter(keeps_off) {
            let what = match held.mode {
                HoldMode::Share(_) => "its share of it",
                HoldMode::Whole | HoldMode::Mig | HoldMode::Admin => "it",
            };
            let holders = one.holders();
            let words =
                format!("claim {} has ended or was taken away, but {what} is held: {holders}", one.claim);
            let told = found.entry(location(held)).or_default();
            // A claim may have several shares of one board.
            if told.last() != Some(&words) {
                told.push(words);
            }
        }
    }
    let told = |words: Vec<String>| match words.len().checked_sub(NAMED) {
        None | Some(0) => words.join("; "),
        Some(more) => format!("{}; and {more} more claims", words[..NAMED].join("; ")),
    };
    found.into_iter().map(|(device, words)| (device, told(words))).collect()
}

#[cfg(test)]
#[path = "holders/tests.rs"]
pub(super) mod tests;
