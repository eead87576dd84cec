//! At start, every minute, and when the driver is another one: makes records, CDI files and the API agree again.
//!
//! | found | done |
//! |---|---|
//! | a record whose claim is gone, replaced, no longer allocated, or allocated elsewhere | released once no process of its pods runs ([`super::holders`]), withheld until then |
//! | a record that a crash left between two steps | reverted; kubelet asks again if the claim is still wanted |
//! | a ready record of an allocated claim whose CDI file is gone | prepared again, with the same names |
//! | a ready record whose CDI file names what has changed: libraries of another version, a socket that is gone, a device node | the file is written again, and the claim's pods are told; where it cannot be, the claim's devices are reported as not healthy |
//! | a CDI file of this driver that no record owns | removed |
//! | an MPS daemon that is not as the ledger's claims need it, or that none needs | set, or left to rest |
//!
//! A claim about which the API server does not answer is left alone: a missing answer proves nothing. That a claim is
//! gone says nothing about its device either, because a user who may edit the claim can delete it. Each finding is
//! checked again with the lane of the GPU held before anything is done, because kubelet may have been faster.
//! Withheld devices, and those that a pod has open without a claim ([`super::unclaimed`]), are checked again every
//! [`AGAIN`].

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{error, info, instrument, warn};

use super::daemons;
use super::executor::{ExecuteError, ReleaseError};
use super::holders::{self, AGAIN, IN_ONE_GO, ReleaseCause, in_turn};
use super::preparer::{PrepareError, Preparer};
use super::unclaimed::Which;
use crate::cdi;
use crate::cluster::ClaimState;
use crate::conditions::{Concerned, GpuPart, PartHealth};
use crate::host::{durable, memory};
use crate::inventory::Inventory;
use crate::ledger::{self, Phase, Record, RecordKey};
use crate::model::claim::{AllocatedClaim, PodRef};
use crate::model::error_chain;
use crate::model::gpu::{Health, NodeGpus};
use crate::model::names::{DeviceUuid, PoolName};

/// No write takes as long; what is older was left by a process that is no more.
const UNFINISHED_AGE: Duration = Duration::from_secs(60);

/// What one sweep came to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Sweep {
    pub released: usize,
    /// Claims that nobody should have any more, and whose devices are held.
    pub withheld: usize,
    pub rolled_back: usize,
    pub restored: usize,
    /// Claims whose container edits were written again because of what they name.
    pub renewed: usize,
    pub orphans_removed: usize,
    /// MPS daemons that were not as they should be.
    pub daemons: usize,
    pub failed: usize,
}

/// Sweeps at once, whenever the GPUs are found with another driver than before, and every `interval`, until the process is
/// to end.
pub async fn run(
    preparer: Arc<Preparer>,
    interval: Duration,
    stop: CancellationToken,
) -> Result<(), Infallible> {
    let mut ticks = tokio::time::interval(interval);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut withheld = preparer.executor.holders.withheld();
    let mut unclaimed = preparer.executor.holders.unclaimed().changes();
    unclaimed.mark_changed();
    let (mut inventory, mut driver) = (preparer.inventory.clone(), None);
    let (mut again, mut turn) = (Instant::now(), 0_usize);
    loop {
        let records: Vec<RecordKey> = withheld.borrow_and_update().keys().cloned().collect();
        let is_any = !records.is_empty() || !unclaimed.borrow().is_empty();
        let what = tokio::select! {
            () = stop.cancelled() => return Ok(()),
            // The sender is the executor's, which is ours too.
            Ok(()) = withheld.changed() => continue,
            Ok(()) = unclaimed.changed() => NextSweep::Unclaimed,
            // Whatever changes meanwhile: tenants can see to it that something does.
            () = tokio::time::sleep_until(again), if is_any => NextSweep::Withheld(in_turn(records, turn)),
            _ = ticks.tick() => NextSweep::All,
            // Container edits name files by the driver's version, and a container may start at any moment.
            gpus = another_driver(&mut inventory, driver.as_deref()) => {
                let is_first = driver.replace(gpus.driver.driver.clone()).is_none();
                if is_first { NextSweep::First(gpus) } else { NextSweep::All }
            }
        };
        // A look at many processes takes long. Whatever is under way goes on on its own thread, or is done again at the start.
        let is_again = matches!(what, NextSweep::Withheld(_));
        match stop.run_until_cancelled(what.work(&preparer)).await {
            None => return Ok(()),
            Some(looked_at) => turn = turn.wrapping_add(looked_at),
        }
        if is_again {
            again = Instant::now() + AGAIN;
        }
    }
}

/// What the sweeper has to do next.
enum NextSweep {
    /// The GPUs are known for the first time: all is swept, and what no claim has is looked at.
    First(NodeGpus),
    All,
    /// What no claim has, as far as nobody has looked at it.
    Unclaimed,
    /// What is withheld, by these records or without one.
    Withheld(Vec<RecordKey>),
}

impl NextSweep {
    /// Returns how many records that are withheld were looked at.
    async fn work(self, preparer: &Preparer) -> usize {
        match self {
            Self::First(gpus) => {
                sweep_all(preparer).await;
                preparer.look_at_all_unclaimed(&gpus);
                preparer.look_at_unclaimed(Which::Due).await;
                preparer.executor.holders.unclaimed().was_looked_at();
            }
            Self::All => sweep_all(preparer).await,
            Self::Unclaimed => preparer.look_at_unclaimed(Which::Due).await,
            Self::Withheld(records) => {
                let (sweep, looked_at) = look_again(preparer, &records).await;
                if sweep.released + sweep.rolled_back > 0 {
                    info!(?sweep, "what was withheld is free");
                }
                preparer.look_at_unclaimed(Which::All).await;
                return looked_at;
            }
        }
        0
    }
}

/// Waits until GPUs are found with a driver of another version than this, and returns these.
async fn another_driver(inventory: &mut watch::Receiver<Inventory>, than: Option<&str>) -> NodeGpus {
    loop {
        match &*inventory.borrow_and_update() {
            Inventory::Found(gpus) if Some(gpus.driver.driver.as_str()) != than => return gpus.clone(),
            Inventory::Found(_) | Inventory::Unknown | Inventory::Unavailable { .. } => {}
        }
        if inventory.changed().await.is_err() {
            // Nobody looks any more.
            std::future::pending::<()>().await;
        }
    }
}

async fn sweep_all(preparer: &Preparer) {
    let sweep = sweep(preparer).await;
    if sweep != Sweep::default() {
        info!(?sweep, "sweep done");
    }
    memory::give_back();
}

/// One sweep over all records and files.
pub async fn sweep(preparer: &Preparer) -> Sweep {
    let mut sweep = Sweep::default();
    let executor = &preparer.executor;
    let records = records(preparer).await;
    for finding in ledger::audit(&records) {
        error!(%finding, "the ledger contradicts itself");
        preparer.metrics.repair("contradiction");
    }
    executor.holders.keep(|key| records.iter().any(|record| record.intent.key() == *key));
    let mut files = DriverFiles::default();
    let mut undecided = BTreeSet::new();
    let look = executor.holders.look_at_withheld();
    for record in records {
        let on: Vec<_> = record.intent.devices.iter().map(holders::location).collect();
        if !settle(preparer, record, &mut sweep, &mut files).await {
            undecided.extend(on);
        }
    }
    drop(look);
    executor.holders.unclaimed().records_were_looked_at(undecided);
    files.report(preparer);
    preparer.look_at_unclaimed(Which::All).await;
    daemons::sweep(preparer, &mut sweep).await;
    for removed in [remove_orphans(preparer), remove_unfinished(preparer)] {
        match removed {
            Ok(removed) => sweep.orphans_removed += removed,
            Err(error) => warn!(error = error_chain(&error), "cannot look for orphaned files"),
        }
    }
    sweep
}

/// One look at these records alone, as many as there is time for; beside what it came to, how many those are.
async fn look_again(preparer: &Preparer, records: &[RecordKey]) -> (Sweep, usize) {
    let (mut sweep, mut files) = (Sweep::default(), DriverFiles::default());
    let _look = preparer.executor.holders.look_at_withheld();
    let (begun, mut looked_at) = (Instant::now(), 0);
    for key in records {
        // One at least, or nothing would move.
        if looked_at > 0 && begun.elapsed() > IN_ONE_GO {
            break;
        }
        looked_at += 1;
        match preparer.executor.store.get(key) {
            Some(record) => _ = settle(preparer, record, &mut sweep, &mut files).await,
            None => preparer.executor.holders.settle(key),
        }
    }
    files.report(preparer);
    (sweep, looked_at)
}

/// Deals with one record. False if nobody could be asked whether it is wanted, or nobody looked whether it is held.
#[instrument(
    level = "error",
    name = "sweep",
    skip_all,
    fields(
        claim.uid = %record.intent.claim.uid,
        claim.namespace = record.intent.claim.namespace,
        claim.name = record.intent.claim.name,
    )
)]
async fn settle(preparer: &Preparer, record: Record, sweep: &mut Sweep, files: &mut DriverFiles) -> bool {
    let (executor, claim) = (&preparer.executor, record.intent.claim.clone());
    let verdict = verdict(preparer, &record, &executor.pool).await;
    let is_wanted = matches!(verdict, RecordVerdict::Fine(_));
    let (what, result) = match verdict {
        RecordVerdict::Unknown => return false,
        RecordVerdict::Fine(allocated) => {
            executor.holders.settle(&record.intent.key());
            let gpus = record.gpus();
            let key = record.intent.key();
            review(preparer, record.clone(), allocated.pods.clone()).await;
            // With other pods it is another record now.
            let record = executor.store.get(&key).unwrap_or(record);
            let renewed = renew(preparer, record, allocated).await;
            files.note(gpus, &renewed);
            if matches!(renewed, Ok(false)) {
                return true;
            }
            (Repair::Renewed, renewed)
        }
        RecordVerdict::Release(why) => (Repair::Released, release(preparer, record, why).await),
        // Kubelet has been told that it is released, or never that it is ready.
        RecordVerdict::RollBack => {
            (Repair::RolledBack, preparer.take_back(record, ReleaseCause::Kubelet).await)
        }
        RecordVerdict::Restore(allocated) => (Repair::Restored, preparer.restore(record, allocated).await),
    };
    if matches!(result, Ok(false)) {
        return true;
    }
    sweep.count(what, &result);
    let is_decided = is_wanted || is_looked_at(&result);
    match result {
        // The preparer has said so, once.
        Err(PrepareError::Release(ReleaseError::Held(_))) => {}
        Err(error) => {
            preparer.metrics.repair(what.word());
            warn!(%claim, error = error_chain(&error), "sweep could not repair; tried again at the next sweep");
        }
        Ok(_) => preparer.metrics.repair(what.word()),
    }
    is_decided
}

/// A setting is put back after that look.
fn is_looked_at(released: &Result<bool, PrepareError>) -> bool {
    let looked_at = |error: &ReleaseError| matches!(error, ReleaseError::Held(_) | ReleaseError::Owing(_));
    match released {
        Ok(_) => true,
        Err(PrepareError::Release(error)) => looked_at(error),
        Err(_) => false,
    }
}

/// Writes the container edits of a ready claim again, if what they name has changed.
async fn renew(preparer: &Preparer, record: Record, claim: AllocatedClaim) -> Result<bool, PrepareError> {
    match preparer.has_changed_edits(record.clone(), claim.clone()).await? {
        true => preparer.renew(record, claim).await,
        false => Ok(false),
    }
}

/// GPUs whose ready claims were looked at, each with what keeps their container edits from being written.
#[derive(Default)]
struct DriverFiles(BTreeMap<DeviceUuid, Health>);

impl DriverFiles {
    fn note(&mut self, gpus: Vec<DeviceUuid>, renewed: &Result<bool, PrepareError>) {
        let health = match renewed {
            Ok(_) => Health::Healthy,
            Err(PrepareError::Execute(error @ (ExecuteError::Driver(_) | ExecuteError::Edits { .. }))) => {
                Health::Unhealthy(error_chain(error))
            }
            // Says nothing of the files.
            Err(_) => return,
        };
        for gpu in gpus {
            let known = self.0.entry(gpu).or_insert(Health::Healthy);
            if *known == Health::Healthy {
                *known = health.clone();
            }
        }
    }

    /// To the claims on these GPUs; what they know already is no news to them.
    fn report(self, preparer: &Preparer) {
        for (gpu, health) in self.0 {
            preparer.reporter.health_changed(PartHealth {
                gpu,
                concerned: Concerned::EveryClaim,
                part: GpuPart::DriverFiles,
                health,
            });
        }
    }
}

/// Releases a claim that the API server knows nothing of any more, if nothing holds its devices.
async fn release(preparer: &Preparer, mut record: Record, why: &str) -> Result<bool, PrepareError> {
    let claim = record.intent.claim.clone();
    let (executor, looked_at) = (preparer.executor.clone(), record.clone());
    // It may be in use until its edits are removed, and then that is asked again.
    let looked = tokio::task::spawn_blocking(move || executor.holders.running(&looked_at, false)).await;
    let free = looked.is_ok_and(|found| found.is_ok_and(|by| by.is_empty()));
    if free && record.intent.boot == preparer.executor.boot {
        let more = preparer.unrecorded_users(&record).await;
        if !more.is_empty() {
            let pods = record.intent.pods_with(&more);
            preparer.review_pods(record.clone(), pods.clone()).await?;
            record.intent.pods = pods;
        }
    }
    if preparer.executor.holders.withheld_of(&record.intent.key()).is_none() {
        info!(%claim, why, "nothing should use this any longer");
    }
    preparer.take_back(record, ReleaseCause::Api).await
}

/// Pods that came to the claim, or have left it, are recorded: what they hold is theirs, whatever becomes of it.
async fn review(preparer: &Preparer, record: Record, pods: Vec<PodRef>) {
    let recorded = &record.intent.pods;
    let same = pods.len() == recorded.len() && pods.iter().all(|pod| recorded.contains(pod));
    if same {
        return;
    }
    let claim = record.intent.claim.clone();
    if let Err(error) = preparer.review_pods(record, pods).await {
        warn!(%claim, error = error_chain(&error), "cannot record the claim's pods; tried again at the next sweep");
    }
}

/// All records as they are on the disk: another process may have written or released some.
async fn records(preparer: &Preparer) -> Vec<Record> {
    let executor = preparer.executor.clone();
    let read = move || {
        if let Err(error) = executor.store.read_again() {
            error!(error = error_chain(&error), "cannot read the ledger again; sweeping what is known of it");
        }
        executor.store.all()
    };
    // A task that panicked was no sweep; the next one begins anew.
    tokio::task::spawn_blocking(read).await.unwrap_or_default()
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Repair {
    Released,
    RolledBack,
    Restored,
    Renewed,
}

impl Repair {
    /// As the metric's label has it.
    fn word(self) -> &'static str {
        match self {
            Self::Released => "released",
            Self::RolledBack => "rolled_back",
            Self::Restored => "restored",
            Self::Renewed => "renewed",
        }
    }
}

impl Sweep {
    fn count(&mut self, what: Repair, result: &Result<bool, PrepareError>) {
        let counter = match (result, what) {
            (Err(PrepareError::Release(ReleaseError::Held(_))), _) => &mut self.withheld,
            (Err(_), _) => &mut self.failed,
            (Ok(_), Repair::RolledBack) => &mut self.rolled_back,
            (Ok(_), Repair::Restored) => &mut self.restored,
            (Ok(_), Repair::Renewed) => &mut self.renewed,
            (Ok(_), Repair::Released) => &mut self.released,
        };
        *counter += 1;
    }
}

enum RecordVerdict {
    /// Nobody could be asked.
    Unknown,
    Fine(AllocatedClaim),
    Release(&'static str),
    RollBack,
    Restore(AllocatedClaim),
}

async fn verdict(preparer: &Preparer, record: &Record, pool: &PoolName) -> RecordVerdict {
    if record.phase != Phase::Ready {
        return RecordVerdict::RollBack;
    }
    match preparer.cluster.claim_state(&record.intent.claim).await {
        ClaimState::Gone => RecordVerdict::Release("the claim is gone"),
        ClaimState::Replaced { .. } => {
            RecordVerdict::Release("the claim was replaced by another of its name")
        }
        ClaimState::NotAllocated => RecordVerdict::Release("the claim is no longer allocated"),
        ClaimState::NoneOfOurs => RecordVerdict::Release("the claim is allocated to other drivers' devices"),
        ClaimState::Allocated(claim)
            if claim.results.iter().all(|result| result.pool.node() != pool.node()) =>
        {
            RecordVerdict::Release("the claim is allocated on another node")
        }
        ClaimState::Allocated(claim) if !preparer.executor.is_real(record) => RecordVerdict::Restore(claim),
        ClaimState::Allocated(claim) => RecordVerdict::Fine(claim),
        ClaimState::Unknown { .. } => RecordVerdict::Unknown,
    }
}

/// Removes CDI files that carry our name and that no record owns, and unfinished ones.
fn remove_orphans(preparer: &Preparer) -> std::io::Result<usize> {
    let executor = &preparer.executor;
    let folder: &Path = &executor.cdi_dir;
    // Listed before the records are read: a file is always younger than its record.
    let files = durable::names(folder)?.into_iter();
    let ours = files.filter_map(|file| cdi::claim_of(&file).map(|claim| (file, claim)));
    let orphans = ours.filter(|(_, claim)| matches!(executor.store.read(claim), Ok(None)));
    let mut removed = 0;
    for (file, _) in orphans {
        match executor.host.remove(&folder.join(&file)) {
            Ok(true) => {
                info!(file, "removed container edits that no claim owns");
                preparer.metrics.repair("orphan");
                removed += 1;
            }
            Ok(false) => {}
            Err(error) => warn!(file, %error, "cannot remove container edits that no claim owns"),
        }
    }
    Ok(removed)
}

/// Removes files that a process which is no more did not finish writing.
fn remove_unfinished(preparer: &Preparer) -> std::io::Result<usize> {
    let executor = &preparer.executor;
    let ours = |name: &str| cdi::claim_of(name).is_some();
    let edits = durable::remove_temporaries(&executor.cdi_dir, UNFINISHED_AGE, ours)?;
    Ok(edits + executor.store.remove_temporaries(UNFINISHED_AGE)?)
}
