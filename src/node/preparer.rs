//! Handles kubelet's calls: reads each claim from the API server and takes its lanes; the executor does the rest on a
//! thread of its own. Claims are independent: a claim that fails or waits does not delay others.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::future::join_all;
use thiserror::Error;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;
use tracing::{Span, debug, info, instrument, warn};

use super::executor::{ExecuteError, Executor, PrepareOutcome, ReleaseError, gpus_of};
use super::holders::{ReleaseCause, Withheld};
use super::lanes::{Held, LaneError, Lanes};
use super::metrics::{NodeMetrics, Operation, Outcome as Class};
use super::reporter::Reporter;
use super::store::StoreError;
use crate::cluster::{ClaimError, Cluster};
use crate::inventory::Inventory;
use crate::kubelet::{Claims, Prepared};
use crate::ledger::{HeldDevice, HoldMode, Phase, Record, RecordKey, Step};
use crate::model::claim::{AllocatedClaim, ClaimRef, PodRef, PreparedDevice};
use crate::model::error_chain;
use crate::model::gpu::NodeGpus;
use crate::model::names::{ClaimUid, DeviceUuid};
use crate::nvml::ProcessWatch;

/// How long a claim waits for the first look at the GPUs. Kubelet gives the call 45 s and asks again.
const FIRST_LOOK_WAIT_S: u64 = 20;

/// Why a claim is not prepared; shown in the pod's events.
#[derive(Debug, Error)]
pub enum PrepareError {
    #[error(
        "the GPUs of this node are not known after {FIRST_LOOK_WAIT_S} s ({reason}); kubelet tries again"
    )]
    NoGpus { reason: String },
    #[error(transparent)]
    Claim(#[from] ClaimError),
    #[error(transparent)]
    Lane(#[from] LaneError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Execute(#[from] ExecuteError),
    #[error(transparent)]
    Release(#[from] ReleaseError),
    #[error("the work stopped half-way (a defect in this driver); it is cleared at the next attempt")]
    Broken,
}

impl PrepareError {
    /// The class, as a metric label.
    fn class(&self) -> Class {
        match self {
            Self::NoGpus { .. } | Self::Lane(_) => Class::NotYet,
            Self::Claim(error) => match error {
                ClaimError::Call { .. } => Class::Io,
                ClaimError::NotAllocated { .. } => Class::NotYet,
                _ => Class::Invalid,
            },
            Self::Execute(ExecuteError::Refused(refusal)) if refusal.is_double_allocation() => {
                Class::Conflict
            }
            Self::Execute(ExecuteError::Refused(_)) => Class::Invalid,
            Self::Execute(ExecuteError::Ended { .. }) | Self::Release(ReleaseError::Held(_)) => Class::NotYet,
            Self::Store(_) | Self::Execute(_) | Self::Release(_) => Class::Io,
            Self::Broken => Class::Bug,
        }
    }
}

/// See the module's text.
pub struct Preparer {
    pub cluster: Arc<dyn Cluster>,
    pub inventory: watch::Receiver<Inventory>,
    pub lanes: Arc<Lanes>,
    pub executor: Arc<Executor>,
    /// Who uses the GPUs, by the driver's word.
    pub lists: ProcessWatch,
    pub metrics: NodeMetrics,
    pub reporter: Reporter,
}

impl Claims for Preparer {
    fn prepare(
        &self,
        claims: Vec<ClaimRef>,
    ) -> Pin<Box<dyn Future<Output = BTreeMap<ClaimUid, Prepared>> + Send + '_>> {
        Box::pin(async move {
            let all = claims.into_iter().map(|claim| async move {
                let prepared = self.prepare_timed(&claim).await.map_err(|error| error_chain(&error));
                (claim.uid, prepared)
            });
            join_all(all).await.into_iter().collect()
        })
    }

    fn unprepare(
        &self,
        claims: Vec<ClaimRef>,
    ) -> Pin<Box<dyn Future<Output = BTreeMap<ClaimUid, Result<(), String>>> + Send + '_>> {
        Box::pin(async move {
            let all = claims.into_iter().map(|claim| async move {
                let released = self.unprepare_timed(&claim).await.map_err(|error| error_chain(&error));
                (claim.uid, released)
            });
            join_all(all).await.into_iter().collect()
        })
    }
}

impl Preparer {
    #[instrument(level = "error", name = "prepare", skip_all, fields(claim.uid = %claim.uid, claim.namespace = claim.namespace, claim.name = claim.name))]
    async fn prepare_timed(&self, claim: &ClaimRef) -> Result<Vec<PreparedDevice>, PrepareError> {
        let start = Instant::now();
        let result = self.prepare_one(claim).await;
        let class = result.as_ref().map_or_else(PrepareError::class, |_| Class::Ok);
        self.metrics.operation(Operation::Prepare, class, start.elapsed());
        if class == Class::Conflict {
            self.metrics.refused_double_allocations.inc();
        }
        match result {
            Ok(PrepareOutcome::Already(devices) | PrepareOutcome::Renewed(devices)) => Ok(devices),
            Ok(PrepareOutcome::Made(devices)) => {
                info!(%claim, devices = names(&devices), took_ms = millis(start), "claim prepared");
                Ok(devices)
            }
            Err(error) => {
                // Its pod has kubelet's event, with each try.
                if let Some(words) = self.executor.mig.untold(&claim.uid) {
                    self.reporter.mig_not_made(claim, &words);
                }
                warn!(%claim, error = error_chain(&error), "claim not prepared");
                Err(error)
            }
        }
    }

    /// Also used by the sweeper, to restore what a ready claim lacks.
    pub async fn prepare_one(&self, claim: &ClaimRef) -> Result<PrepareOutcome, PrepareError> {
        let gpus = self.gpus().await?;
        // The record is looked for while the API server is asked: both only say which lanes to take.
        let claim_read = async { Ok::<_, PrepareError>(self.cluster.claim(claim).await?) };
        let (allocated, recorded) = tokio::try_join!(claim_read, self.recorded_gpus(&claim.uid))?;
        let mut lanes = gpus_of(&allocated, &gpus);
        lanes.extend(recorded);
        let prepare = move |executor: &Executor, held: &Held| Ok(executor.prepare(held, &allocated, &gpus)?);
        let outcome = self.within(lanes, prepare).await?;
        self.tell(claim, &outcome);
        Ok(outcome)
    }

    /// Prepares again what a ready claim lacks. False, and nothing done, if its record is no longer as it was
    /// `expected`: what kubelet has released meanwhile, it does not release again.
    pub async fn restore(&self, expected: Record, allocated: AllocatedClaim) -> Result<bool, PrepareError> {
        let (gpus, claim) = (self.gpus().await?, expected.intent.claim.clone());
        let mut lanes = gpus_of(&allocated, &gpus);
        lanes.extend(expected.gpus());
        let restore = move |executor: &Executor, held: &Held| match executor.is_still(held, &expected)? {
            true => Ok(Some(executor.prepare(held, &allocated, &gpus)?)),
            false => Ok(None),
        };
        let outcome = self.within(lanes, restore).await?;
        outcome.iter().for_each(|outcome| self.tell(&claim, outcome));
        Ok(outcome.is_some())
    }

    /// Writes the container edits of a ready claim again. False, and nothing done, if its record is no longer as it was
    /// `expected`, or they name nothing that has changed.
    pub async fn renew(&self, expected: Record, allocated: AllocatedClaim) -> Result<bool, PrepareError> {
        let (gpus, claim, lanes) = (self.gpus().await?, expected.intent.claim.clone(), expected.gpus());
        // What is being released has no edits any more.
        let is_ready = expected.phase == Phase::Ready;
        let renew =
            move |executor: &Executor, held: &Held| match executor.is_still(held, &expected)? && is_ready {
                true => Ok(executor.renew(&expected, &allocated, &gpus)?.then(|| expected.answer())),
                false => Ok(None),
            };
        let outcome = self.within(lanes, renew).await?.map(PrepareOutcome::Renewed);
        outcome.iter().for_each(|outcome| self.tell(&claim, outcome));
        Ok(outcome.is_some())
    }

    /// False, and nothing else, if the container edits of a ready claim are as they would be written now.
    ///
    /// # Errors
    /// They cannot be written now: the driver's files cannot be found, say.
    pub async fn has_changed_edits(
        &self,
        record: Record,
        claim: AllocatedClaim,
    ) -> Result<bool, PrepareError> {
        // Without GPUs to compare with nothing is known to have changed.
        let gpus = match &*self.inventory.borrow() {
            Inventory::Found(gpus) => gpus.clone(),
            _ => return Ok(false),
        };
        let executor = self.executor.clone();
        let compare = move || executor.changed_edits(&record, &claim, &gpus).map(|edits| edits.is_some());
        Ok(tokio::task::spawn_blocking(compare).await.map_err(|_| PrepareError::Broken)??)
    }

    fn tell(&self, claim: &ClaimRef, outcome: &PrepareOutcome) {
        let record = || self.executor.store.get(&RecordKey::Claim(claim.uid.clone()));
        match outcome {
            PrepareOutcome::Already(_) => {}
            PrepareOutcome::Made(_) => _ = record().map(|record| self.reporter.prepared(record.intent)),
            PrepareOutcome::Renewed(_) => {
                info!(%claim, "container edits written again: the driver's files or device nodes have changed");
                _ = record().map(|record| self.reporter.edits_renewed(&record.intent));
            }
        }
    }

    /// Does something that blocks while the lanes of `gpus` are held, within the span of the caller.
    pub(super) async fn within<T: Send + 'static>(
        &self,
        gpus: Vec<DeviceUuid>,
        act: impl FnOnce(&Executor, &Held) -> Result<T, PrepareError> + Send + 'static,
    ) -> Result<T, PrepareError> {
        self.start_within(gpus, act).await?.await.map_err(|_| PrepareError::Broken)?
    }

    /// The same, begun once the lanes are taken.
    async fn start_within<T: Send + 'static>(
        &self,
        gpus: Vec<DeviceUuid>,
        act: impl FnOnce(&Executor, &Held) -> Result<T, PrepareError> + Send + 'static,
    ) -> Result<JoinHandle<Result<T, PrepareError>>, PrepareError> {
        let queued = self.lanes.queue(gpus).await?;
        let executor = self.executor.clone();
        let span = Span::current();
        Ok(tokio::task::spawn_blocking(move || span.in_scope(|| act(&executor, &queued.hold()?))))
    }

    #[instrument(level = "error", name = "unprepare", skip_all, fields(claim.uid = %claim.uid, claim.namespace = claim.namespace, claim.name = claim.name))]
    async fn unprepare_timed(&self, claim: &ClaimRef) -> Result<(), PrepareError> {
        let start = Instant::now();
        let result = self.release_one(claim).await;
        let class = result.as_ref().map_or_else(PrepareError::class, |_| Class::Ok);
        self.metrics.operation(Operation::Unprepare, class, start.elapsed());
        match result {
            Ok(true) => info!(%claim, took_ms = millis(start), "claim released"),
            Ok(false) => {}
            // The pod may go: nothing of the claim can be used anew. The sweeper goes on trying.
            Err(PrepareError::Release(owing @ (ReleaseError::Owing(_) | ReleaseError::Held(_)))) => {
                warn!(%claim, error = error_chain(&owing), "claim released, its GPU is not free yet");
            }
            Err(error) => {
                warn!(%claim, error = error_chain(&error), "claim not released");
                return Err(error);
            }
        }
        Ok(())
    }

    /// Takes a claim back by its record alone. False if it had none. Settings of its GPUs may be put back after the
    /// answer (an MPS daemon takes milliseconds): the lanes are held until then, so that whoever is given the GPU next
    /// waits, and the record stays, so that a process that ends meanwhile leaves nothing behind.
    pub async fn release_one(&self, claim: &ClaimRef) -> Result<bool, PrepareError> {
        let gpus = self.recorded_gpus(&claim.uid).await?;
        self.reporter.released(claim.clone());
        if gpus.is_empty() {
            return Ok(false);
        }
        let key = RecordKey::Claim(claim.uid.clone());
        let before = self.executor.holders.withheld_of(&key);
        let (tell, certain) = oneshot::channel();
        let claim = claim.clone();
        let release = move |executor: &Executor, held: &Held| {
            let mut told = false;
            // Nobody listens: kubelet has given up waiting.
            let tell = || told = tell.send(()).is_ok();
            let released = executor.release_telling(held, &key, ReleaseCause::Kubelet, tell);
            // The record stays, and the sweeper goes on.
            if told && let Err(error) = &released {
                warn!(%claim, error = error_chain(error), "claim released, its GPU is not free yet");
            }
            Ok(released?)
        };
        let work = self.start_within(gpus, release).await?;
        // An error: it ended without that word, well or not.
        if certain.await.is_ok() {
            return Ok(true);
        }
        let released = work.await.map_err(|_| PrepareError::Broken)?;
        self.tell_withheld(before.as_ref(), &released);
        released.map(|()| true)
    }

    /// Takes a claim back, if its record still is as it was `expected`. False, and nothing done, if it is not:
    /// kubelet has released it meanwhile, or prepared it for another allocation.
    pub async fn take_back(&self, expected: Record, cause: ReleaseCause) -> Result<bool, PrepareError> {
        let (gpus, claim, key) = (expected.gpus(), expected.intent.claim.clone(), expected.intent.key());
        let is_current = expected.intent.is_current_of(&claim.uid);
        let before = self.executor.holders.withheld_of(&key);
        let release = move |executor: &Executor, held: &Held| match executor.is_still(held, &expected)? {
            true => Ok(executor.release(held, &key, cause).map(|()| true)?),
            false => Ok(false),
        };
        let done = self.within(gpus, release).await;
        self.tell_withheld(before.as_ref(), &done);
        // What it owes is not what it has.
        if is_current && !matches!(done, Ok(false)) {
            self.reporter.released(claim);
        }
        done
    }

    /// Says once who holds what should be free, and again when others do.
    fn tell_withheld<T>(&self, before: Option<&Withheld>, done: &Result<T, PrepareError>) {
        let Err(PrepareError::Release(ReleaseError::Held(withheld))) = done else { return };
        let pods = |withheld: &Withheld| {
            let holders = withheld.by.holders.iter().map(|one| one.pod.uid.clone());
            (holders.collect::<Vec<_>>(), withheld.by.untold.is_some())
        };
        if before.is_none_or(|before| pods(before) != pods(withheld)) {
            warn!(claim = %withheld.claim, "ended or taken away, but held: {withheld}; no other claim gets its devices");
            self.reporter.withheld(withheld);
        }
    }

    /// Brings the pods of a ready claim's record up to date; `now`: those that it is reserved for.
    pub async fn review_pods(&self, expected: Record, now: Vec<PodRef>) -> Result<(), PrepareError> {
        let gpus = expected.gpus();
        self.within(gpus, move |executor, held| Ok(executor.review_pods(held, &expected, &now)?)).await
    }

    /// Pods that the driver shows on devices which a claim alone has, and that its record does not name: they came
    /// after it was last looked at. None if the driver does not tell.
    pub async fn unrecorded_users(&self, record: &Record) -> Vec<PodRef> {
        let alone = |held: &&HeldDevice| matches!(held.mode, HoldMode::Whole | HoldMode::Mig);
        let devices: Vec<_> =
            record.intent.devices.iter().filter(alone).map(|held| held.uuid.clone()).collect();
        // A daemon of ours is on the device as well.
        let daemon = record.intent.steps.iter().any(|step| matches!(step, Step::Mps { .. }));
        if devices.is_empty() || daemon {
            return Vec::new();
        }
        let listed = self.lists.processes(devices).await;
        self.lists.rest();
        let boards = listed.unwrap_or_else(|error| {
            debug!(error = error_chain(&error), "the driver does not report who uses a device");
            Vec::new()
        });
        let lists = boards.into_iter().filter_map(|board| board.processes.ok());
        let pids: Vec<u32> = lists.flatten().map(|process| process.pid).collect();
        let executor = self.executor.clone();
        let pods = tokio::task::spawn_blocking(move || executor.holders.pods_of(pids)).await;
        let known: Vec<_> =
            self.executor.store.intents().into_iter().flat_map(|intent| intent.pods).collect();
        let mut pods = pods.unwrap_or_default();
        pods.retain(|pod| known.iter().all(|one| one.uid != *pod));
        pods.into_iter().map(|uid| PodRef { namespace: String::new(), name: String::new(), uid }).collect()
    }

    /// The boards that the claim's record names; none without a record.
    async fn recorded_gpus(&self, claim: &ClaimUid) -> Result<Vec<DeviceUuid>, PrepareError> {
        let (executor, claim) = (self.executor.clone(), claim.clone());
        let read = move || executor.store.read(&claim);
        match tokio::task::spawn_blocking(read).await.map_err(|_| PrepareError::Broken)? {
            // A claim that cannot have a record has none: releasing it succeeds, preparing it does not.
            Ok(None) | Err(StoreError::Name(_)) => Ok(Vec::new()),
            Ok(Some(record)) => Ok(record.gpus()),
            Err(error) => Err(error.into()),
        }
    }

    async fn gpus(&self) -> Result<Arc<NodeGpus>, PrepareError> {
        let mut inventory = self.inventory.clone();
        let known = inventory.wait_for(|inventory| matches!(inventory, Inventory::Found(_)));
        let found = match tokio::time::timeout(Duration::from_secs(FIRST_LOOK_WAIT_S), known).await {
            Ok(Ok(found)) => match &*found {
                Inventory::Found(gpus) => Some(Arc::new(gpus.clone())),
                _ => None,
            },
            _ => None,
        };
        found.ok_or_else(|| PrepareError::NoGpus {
            reason: match &*self.inventory.borrow() {
                Inventory::Unavailable { reason } => reason.clone(),
                _ => "the first look at the GPUs is not finished".to_owned(),
            },
        })
    }
}

fn names(devices: &[PreparedDevice]) -> String {
    devices.iter().map(|device| device.device.as_str()).collect::<Vec<_>>().join(",")
}

fn millis(start: Instant) -> f64 {
    (start.elapsed().as_secs_f64() * 1e6).round() / 1e3
}
