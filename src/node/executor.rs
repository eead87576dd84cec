//! Executes plans and reverts them. The executor decides nothing: the plan holds every choice, the ledger every undo.
//!
//! ```text
//! prepare: recorded and real? ─yes→ write the container edits anew if they name what has changed → answer
//!          ─no→ clear what is half done → plan → ledger.begin (durable) → step, mark, step, mark … → ready → answer
//!                                                                      └ a step fails → undo all, last first
//! release: container edits away → held by a process, or not to be told? then it stays → ledger.releasing → [kubelet may be answered]
//!          → undo all, last first, each tried → ledger.end
//! ```
//! Every function here blocks its thread, and is called with the lanes of the GPUs concerned held.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use thiserror::Error;
use tracing::{debug, warn};

use super::carver::Carver;
use super::carving::{self, Planned};
use super::holders::{Holders, ReleaseCause, Withheld};
use super::lanes::Held;
use super::store::{Store, StoreError};
use crate::cdi::CdiFile;
use crate::host::driver_root::{DriverError, DriverRootCache, MissingPath, check};
use crate::host::{Durability, Host, ProgramError};
use crate::ledger::{Intent, Mark, Phase, Record, RecordKey, Step};
use crate::model::claim::{AllocatedClaim, PodRef, PreparedDevice};
use crate::model::error_chain;
use crate::model::gpu::NodeGpus;
use crate::model::names::{BootId, DeviceUuid, NodeName, PoolName};
use crate::model::share::{MpsGroup, MpsLimits};
use crate::nvml::MigError;
use crate::prepare::{self, Facts, Refusal, Site};
use crate::sharing::{self, SharingPolicy};
use crate::supervisor::{Daemons, SupervisorError};

/// The driver's default time slice: what every release leaves behind.
const DEFAULT_TIME_SLICE: u8 = 0;

/// Why a claim could not be prepared. Nothing stays half done, unless it says so.
#[derive(Debug, Error)]
pub enum ExecuteError {
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error("the driver's files cannot be found")]
    Driver(#[from] DriverError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("{what}")]
    Step { what: String, source: StepError },
    #[error("writing the container edits of a prepared claim again")]
    Edits { source: StepError },
    #[error(
        "a MIG device of this claim was ended by somebody, and pods of the claim still run ({pods}): delete them; it is made \
         again once they have ended"
    )]
    Ended { pods: String },
    #[error("{problem}; undoing it failed as well and is tried again every minute ({leftover})")]
    Stuck { problem: String, leftover: String },
}

/// Why one step, or its undoing, failed.
#[derive(Debug, Error)]
pub enum StepError {
    #[error(transparent)]
    Io(#[from] std::io::Error),
    #[error(transparent)]
    Program(#[from] ProgramError),
    #[error(transparent)]
    Supervisor(#[from] SupervisorError),
    #[error(transparent)]
    Mig(#[from] MigError),
    #[error("the MPS daemon of {group} was left with tighter limits than were granted")]
    Tight { group: MpsGroup },
    #[error("a file that the container needs is missing")]
    Missing(#[source] MissingPath),
}

/// Why a release is not complete: every step was tried, these failed. It is tried again.
#[derive(Debug, Error)]
pub enum ReleaseError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("not everything could be undone: {}", .0.join("; "))]
    Undo(Vec<String>),
    /// No container can use the devices any more, but a GPU's setting could not be put back (the GPU or its
    /// driver is gone, say). The record stays, so that nobody else is given the GPU until it is.
    #[error("a setting of the GPU could not be put back: {}", .0.join("; "))]
    Owing(Vec<String>),
    /// No new container can use the devices, but processes that run do. The record stays until they have ended.
    #[error("its devices are still held: {0}")]
    Held(Box<Withheld>),
}

/// How a claim came to be ready.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PrepareOutcome {
    /// It was, and still is.
    Already(Vec<PreparedDevice>),
    Made(Vec<PreparedDevice>),
    /// It was, and its container edits were written again: what they named had changed.
    Renewed(Vec<PreparedDevice>),
}

/// See the module's text.
pub struct Executor {
    pub node: NodeName,
    pub pool: PoolName,
    pub boot: BootId,
    pub cdi_dir: PathBuf,
    pub store: Store,
    pub host: Arc<dyn Host>,
    pub driver: DriverRootCache,
    pub daemons: Arc<dyn Daemons>,
    pub mig: Carver,
    pub holders: Holders,
    pub sharing: SharingPolicy,
    /// Folder of `tranche mps`, here and on the host.
    pub mps_dir: String,
}

impl Executor {
    /// Prepares a claim, or finds it prepared.
    pub fn prepare(
        &self,
        held: &Held,
        claim: &AllocatedClaim,
        gpus: &NodeGpus,
    ) -> Result<PrepareOutcome, ExecuteError> {
        self.store.refresh(held)?;
        let key = RecordKey::Claim(claim.claim.uid.clone());
        let recorded = match self.store.get(&key) {
            Some(record) if record.phase == Phase::Ready && means(&record, claim) => {
                let same = prepare::as_recorded(claim, &record.intent);
                let real = self.is_real(&record) && self.has_its_instances(&record);
                if same && real && self.serve_again(&record).is_ok() {
                    let changed = self.changed_edits(&record, claim, gpus)?;
                    self.note_pods(held, &record, &claim.pods)?;
                    self.holders.settle(&key);
                    let Some(edits) = changed else { return Ok(PrepareOutcome::Already(record.answer())) };
                    self.write_cdi(&edits).map_err(|source| ExecuteError::Edits { source })?;
                    return Ok(PrepareOutcome::Renewed(record.answer()));
                }
                Some(record)
            }
            Some(record) => {
                let same = means(&record, claim);
                self.clear(held, &record, &gpus_of(claim, gpus), same)?;
                same.then_some(record)
            }
            None => None,
        };
        let ready = recorded.as_ref().filter(|record| record.phase == Phase::Ready);
        let mut planned = self.plan(claim, gpus, ready)?;
        let same = ready
            .is_some_and(|record| record.intent.holds_as(planned.intent()) && self.has_its_instances(record));
        if let Some(record) = ready.filter(|_| !same) {
            self.check_left(record)?;
            let why = "an earlier preparation is no longer valid";
            self.release(held, &key, ReleaseCause::Anew).map_err(stuck(why))?;
            // Its instances have gone with it.
            if record.intent.places().next().is_some() {
                planned = self.plan(claim, gpus, None)?;
            }
        }
        // Pods that had the devices before may have them still.
        if let Some(record) = recorded.as_ref().filter(|record| record.intent.boot == self.boot) {
            planned.intent_mut().pods = record.intent.pods_with(&claim.pods);
        }
        let devices = match planned {
            Planned::Ready(plan) => {
                if !same {
                    self.check_unopened(&plan.exclusive, &plan.intent)?;
                    self.be_whole(&plan.intent, gpus)?;
                }
                self.carry_out(held, &plan.intent, &plan.cdi, same)?;
                plan.intent.devices
            }
            Planned::ToMake(intent) => self.make(held, *intent, claim, gpus)?,
        };
        if let Some(record) = recorded.filter(|_| same) {
            self.note_pods(held, &record, &claim.pods)?;
        }
        self.holders.settle(&key);
        Ok(PrepareOutcome::Made(devices.into_iter().map(|device| device.answer).collect()))
    }

    /// What preparing a claim means now, with the MIG instances that its record says were made for it. Blocks on file
    /// calls.
    fn plan(
        &self,
        claim: &AllocatedClaim,
        gpus: &NodeGpus,
        record: Option<&Record>,
    ) -> Result<Planned, ExecuteError> {
        let made = record.filter(|record| record.intent.boot == self.boot);
        let gpus = &*carving::with_made(gpus, made.map_or(&[], |record| &record.intent.steps));
        self.plan_on(claim, gpus)
    }

    /// The same on these GPUs, as they are.
    pub(super) fn plan_on(&self, claim: &AllocatedClaim, gpus: &NodeGpus) -> Result<Planned, ExecuteError> {
        let on = self.store.held_on(&gpus_of(claim, gpus));
        let site = Site { node: &self.node, pool: &self.pool, gpus, sharing: &self.sharing, held: &on };
        // Checked before the driver's files are looked for: the clearer word comes first.
        let targets = prepare::targets(claim, site).map_err(|refusal| self.explained(refusal))?;
        if let Some(intent) = prepare::to_make(claim, &targets, &self.boot) {
            return Ok(Planned::ToMake(Box::new(intent)));
        }
        let driver = self.driver.files(Some(&gpus.driver.driver), &prepare::nodes(&targets))?;
        let facts = Facts { boot: &self.boot, driver: &driver, mps_dir: &self.mps_dir };
        Ok(Planned::Ready(Box::new(prepare::plan(claim, &targets, site, facts)?)))
    }

    /// The container edits of a ready claim, if what is written is not what would be written now. The driver's files,
    /// its sockets and its device nodes can be replaced while pods run, and the container runtime reads the edits each
    /// time that it starts one of their containers. Blocks on file calls.
    ///
    /// # Errors
    /// The driver's files or device nodes cannot be found.
    pub fn changed_edits(
        &self,
        record: &Record,
        claim: &AllocatedClaim,
        gpus: &NodeGpus,
    ) -> Result<Option<CdiFile>, ExecuteError> {
        let plan = match self.plan(claim, gpus, Some(record)) {
            Ok(Planned::Ready(plan)) => plan,
            Ok(Planned::ToMake(_)) => return Ok(None),
            // A device that would not be given out now (it is not healthy, say) keeps its edits.
            Err(ExecuteError::Refused(_)) => return Ok(None),
            Err(error) => return Err(error),
        };
        if !record.intent.holds_as(&plan.intent) {
            return Ok(None);
        }
        let written = std::fs::read(self.cdi_dir.join(&plan.cdi.file_name)).unwrap_or_default();
        Ok((written != plan.cdi.content.as_bytes()).then_some(plan.cdi))
    }

    /// Writes the container edits of a ready claim again, if they name what has changed. False if they do not. Nothing else
    /// is touched, since the claim's pods run: a MIG device that they lost stays theirs, so that nobody gets its place.
    pub fn renew(
        &self,
        record: &Record,
        claim: &AllocatedClaim,
        gpus: &NodeGpus,
    ) -> Result<bool, ExecuteError> {
        let Some(edits) = self.changed_edits(record, claim, gpus)? else { return Ok(false) };
        self.write_cdi(&edits).map_err(|source| ExecuteError::Edits { source })?;
        Ok(true)
    }

    /// Records pods that were not known to use the claim, before they are given anything.
    fn note_pods(&self, held: &Held, record: &Record, pods: &[PodRef]) -> Result<(), StoreError> {
        match pods.iter().all(|pod| record.intent.pods.contains(pod)) {
            true => Ok(()),
            false => self.store.set_pods(held, &record.intent.key(), record.intent.pods_with(pods)),
        }
    }

    /// Brings a ready record's pods to those that the claim is reserved for now, and those that were and still run.
    pub fn review_pods(&self, held: &Held, expected: &Record, now: &[PodRef]) -> Result<(), StoreError> {
        self.store.refresh(held)?;
        let key = expected.intent.key();
        let Some(record) = self.store.get(&key).filter(|record| record.intent == expected.intent) else {
            return Ok(());
        };
        let gone: Vec<_> = record.intent.pods.iter().filter(|pod| !now.contains(pod)).cloned().collect();
        let pods = Intent { pods: self.holders.left_of(&gone), ..record.intent.clone() }.pods_with(now);
        let same =
            pods.len() == record.intent.pods.len() && pods.iter().all(|pod| record.intent.pods.contains(pod));
        if same { Ok(()) } else { self.store.set_pods(held, &key, pods) }
    }

    /// A refusal in the words that are known here only: who holds the device, if its claim does not.
    fn explained(&self, refusal: Refusal) -> Refusal {
        match refusal {
            Refusal::InUse { device, holder } => match self.holders.withheld_by(&holder.uid, &device) {
                Some(withheld) => Refusal::Withheld { device, holder, by: withheld.holders() },
                None => match self.unended_of(&holder.uid) {
                    Some(why) => Refusal::NotEnded { device, holder, why },
                    None => Refusal::InUse { device, holder },
                },
            },
            Refusal::OtherPlacer { device, holder, placer } => {
                match self.holders.withheld_by(&holder.uid, &device) {
                    Some(withheld) => Refusal::Withheld { device, holder, by: withheld.holders() },
                    None => Refusal::OtherPlacer { device, holder, placer },
                }
            }
            Refusal::Share { device, source } if source.is_for_want_of_room() => {
                match self.holders.withheld_on(&device) {
                    Some(withheld) => {
                        let by = withheld.holders();
                        Refusal::WithheldShare { device, holder: withheld.claim, by }
                    }
                    None => Refusal::Share { device, source },
                }
            }
            refusal => refusal,
        }
    }

    /// Takes back what the claim had before. What it owes a GPU that it is not given now (one that was lost, say)
    /// keeps it from no other GPU.
    /// What its earlier pods hold still, of devices that it is not given now (`same`), is recorded apart as well.
    fn clear(
        &self,
        held: &Held,
        record: &Record,
        gpus: &[DeviceUuid],
        same: bool,
    ) -> Result<(), ExecuteError> {
        let (uid, key) = (&record.intent.claim.uid, record.intent.key());
        let cause =
            if same && record.phase != Phase::Releasing { ReleaseCause::Anew } else { ReleaseCause::Kubelet };
        match self.release(held, &key, cause) {
            Err(ReleaseError::Held(withheld)) if !same => {
                warn!(claim = %record.intent.claim, %withheld, "still held, and recorded separately");
                let aside = self.store.set_aside(held, uid)?;
                // Or the next look that can tell nothing would take it for free.
                aside.into_iter().for_each(|aside| self.holders.withhold_as(&withheld, aside));
                self.holders.settle(&key);
                Ok(())
            }
            Err(ReleaseError::Owing(words)) if !record.gpus().iter().any(|gpu| gpus.contains(gpu)) => {
                warn!(claim = %record.intent.claim, words = words.join("; "), "still to be undone, and recorded separately");
                self.store.set_aside(held, uid)?;
                Ok(())
            }
            released => Ok(released.map_err(stuck("an earlier attempt was cut off"))?),
        }
    }

    /// Takes back what a record says. Needs nothing but the record and a look at the node's processes; none is fine.
    pub fn release(&self, held: &Held, key: &RecordKey, cause: ReleaseCause) -> Result<(), ReleaseError> {
        self.release_telling(held, key, cause, || {})
    }

    /// The same, and calls `certain` once nothing can keep the claim from being taken back in the end, though settings
    /// of its GPUs are yet to be put back: no container can get its devices, no process of its pods runs, and a process
    /// that ends here leaves a record which the next start takes back. Until then the lanes keep others off its GPUs.
    pub fn release_telling(
        &self,
        held: &Held,
        key: &RecordKey,
        cause: ReleaseCause,
        certain: impl FnOnce(),
    ) -> Result<(), ReleaseError> {
        self.store.refresh(held)?;
        let Some(record) = self.store.get(key) else {
            self.holders.settle(key);
            return Ok(());
        };
        if !held.covers(&record.gpus()) {
            return Err(StoreError::NoLane(key.clone()).into());
        }
        // What only the API server calls gone stays ready until it is free, and its MPS daemon as it is. What kubelet
        // has seen end needs no daemon; its memory stays granted until it is free.
        if cause != ReleaseCause::Api {
            self.mark_releasing(held, &record);
        }
        let same_boot = record.intent.boot == self.boot;
        let mut looked = if same_boot { self.held_still(&record, cause) } else { Ok(None) };
        if cause == ReleaseCause::Api
            && let Err(problem) = &looked
        {
            // Nothing may be undone under pods that may run: the record stays as it is.
            looked = Ok(self.holders.not_looked_at(&record, cause, problem));
        }
        if let Ok(Some(withheld)) = looked {
            self.holders.withhold(&withheld);
            return Err(ReleaseError::Held(Box::new(withheld)));
        }
        if cause == ReleaseCause::Api {
            self.mark_releasing(held, &record);
        }
        let (edits, settings): (Vec<_>, Vec<_>) =
            record.undo().partition(|step| matches!(step, Step::WriteCdi { .. }));
        let undo_all = |steps: Vec<&Step>| -> Vec<String> {
            steps.into_iter().filter_map(|step| self.undo(step, key, same_boot).err()).collect()
        };
        let mut usable = undo_all(edits);
        // Taken away only now: who got the devices until then was not looked for.
        if usable.is_empty() {
            usable.extend(looked.err());
        }
        // A ready record without its mark would be kept by the next start.
        let is_marked = self.store.get(key).is_some_and(|record| record.phase != Phase::Ready);
        if usable.is_empty() && is_marked && !settings.is_empty() {
            certain();
        }
        let owing = undo_all(settings);
        match (usable.is_empty(), owing.is_empty()) {
            (true, true) => {
                self.store.end(held, key)?;
                self.holders.settle(key);
                self.leave(&record, cause);
                Ok(())
            }
            (false, _) => Err(ReleaseError::Undo([usable, owing].concat())),
            (true, false) => Err(ReleaseError::Owing(owing)),
        }
    }

    /// The steps of an unfinished preparation stay known by its phase until they are undone.
    fn mark_releasing(&self, held: &Held, record: &Record) {
        let key = record.intent.key();
        if record.phase == Phase::Ready
            && let Err(error) = self.store.mark(held, &key, Mark::Releasing)
        {
            // A full disk keeps no pod from ending. Only a crash in the next moments would miss the mark.
            warn!(claim = %key, error = error_chain(&error), "the release goes on without its mark in the ledger");
        }
    }

    /// True if the claim's record is the one that was judged before its lanes were taken.
    pub fn is_still(&self, held: &Held, expected: &Record) -> Result<bool, StoreError> {
        self.store.refresh(held)?;
        let same = |record: Record| {
            record.intent == expected.intent
                && (record.phase == Phase::Ready) == (expected.phase == Phase::Ready)
        };
        Ok(self.store.get(&expected.intent.key()).is_some_and(same))
    }

    /// True if the claim is ready, in this boot, and its container edits are where the runtime looks.
    pub fn is_real(&self, record: &Record) -> bool {
        let file = record.cdi_file().map(|file| self.cdi_dir.join(file));
        record.phase == Phase::Ready
            && record.intent.boot == self.boot
            && file.is_none_or(|file| file.is_file())
    }

    /// `ready`: this very intent is recorded and was carried out; only reality is restored.
    fn carry_out(
        &self,
        held: &Held,
        intent: &Intent,
        cdi: &CdiFile,
        ready: bool,
    ) -> Result<(), ExecuteError> {
        let key = intent.key();
        if ready {
            let lasting = |step: &&Step| matches!(step, Step::Mps { .. } | Step::WriteCdi { .. });
            for step in intent.steps.iter().filter(lasting) {
                self.apply(step, &key, cdi).map_err(|source| step_error(step, source))?;
            }
            return Ok(());
        }
        self.apply_all(held, intent, cdi).map_err(|problem| {
            match self.release(held, &key, ReleaseCause::Anew) {
                Ok(()) => problem,
                Err(left) => stuck(&error_chain(&problem))(left),
            }
        })
    }

    /// Stops at the first failure, with whatever was done until then in the ledger.
    fn apply_all(&self, held: &Held, intent: &Intent, cdi: &CdiFile) -> Result<(), ExecuteError> {
        let key = intent.key();
        self.store.begin(held, intent)?;
        for (index, step) in intent.steps.iter().enumerate() {
            self.apply(step, &key, cdi).map_err(|source| step_error(step, source))?;
            self.store.mark(held, &key, Mark::Applied(index))?;
        }
        Ok(self.store.mark(held, &key, Mark::Ready)?)
    }

    pub(super) fn apply(&self, step: &Step, key: &RecordKey, cdi: &CdiFile) -> Result<(), StepError> {
        debug!(step = describe(step), "begun");
        match step {
            // Made before the rest was planned: see `carving`.
            Step::MakeMig { .. } => Ok(()),
            Step::TimeSlice { gpu, level } => Ok(self.host.set_time_slice(gpu, *level)?),
            Step::Mps { group, exclusive, needs } => self.serve(group, *exclusive, key, needs),
            Step::WriteCdi { .. } => self.write_cdi(cdi),
        }
    }

    fn write_cdi(&self, cdi: &CdiFile) -> Result<(), StepError> {
        check(&cdi.paths).map_err(|missing| {
            self.driver.forget();
            StepError::Missing(missing)
        })?;
        // The folder does not outlive the boot, so there is nothing to flush for.
        Ok(self.host.write(
            &self.cdi_dir,
            &cdi.file_name,
            cdi.content.as_bytes(),
            Durability::ProcessCrash,
        )?)
    }

    /// Gives the group's daemon what the claim of `key` and all others on it need together.
    fn serve(
        &self,
        group: &MpsGroup,
        exclusive: bool,
        key: &RecordKey,
        needs: &MpsLimits,
    ) -> Result<(), StepError> {
        let others = self.store.mps_needs(group, Some(key), &self.boot);
        let limits = sharing::loosest(others.iter().chain([needs])).unwrap_or_else(|| needs.clone());
        let state = self.daemons.keep(group, exclusive, &limits)?;
        match state.limits.as_ref().is_some_and(|kept| kept.allow(needs)) {
            true => Ok(()),
            false => Err(StepError::Tight { group: group.clone() }),
        }
    }

    /// The daemons of a ready claim, asked for again: they may have ended meanwhile.
    fn serve_again(&self, record: &Record) -> Result<(), StepError> {
        let key = record.intent.key();
        record.intent.steps.iter().try_for_each(|step| match step {
            Step::Mps { group, exclusive, needs } => self.serve(group, *exclusive, &key, needs),
            Step::MakeMig { .. } | Step::TimeSlice { .. } | Step::WriteCdi { .. } => Ok(()),
        })
    }

    /// Brings a group's daemon to what the recorded claims need; lets it rest if there are none.
    pub fn settle(&self, group: &MpsGroup, exclusive: bool) -> Result<(), StepError> {
        self.leave_to(&self.store.mps_needs(group, None, &self.boot), group, exclusive)
    }

    fn leave_to(&self, others: &[MpsLimits], group: &MpsGroup, exclusive: bool) -> Result<(), StepError> {
        match sharing::loosest(others) {
            Some(limits) => self.daemons.keep(group, exclusive, &limits).map(|_| ())?,
            None => match self.daemons.rest(group) {
                // The supervisor makes a group's folder before anything else: there is no daemon to rest. One that is not
                // there, or is too old to know such a group, has none either.
                Err(_) if !Path::new(&self.mps_dir).join(group.folder()).exists() => {}
                rested => rested?,
            },
        }
        Ok(())
    }

    fn undo(&self, step: &Step, key: &RecordKey, same_boot: bool) -> Result<(), String> {
        debug!(step = describe(step), "is undone");
        let undone = match step {
            // Daemons and modes do not outlive a boot; others that need the daemon ask for it themselves.
            Step::Mps { .. } if !same_boot => Ok(()),
            Step::Mps { group, exclusive, .. } => {
                self.leave_to(&self.store.mps_needs(group, Some(key), &self.boot), group, *exclusive)
            }
            // No instance outlives a boot.
            Step::MakeMig { .. } if !same_boot => Ok(()),
            Step::MakeMig { gpu, place, made } => self.end_mig(key, gpu, *place, made.as_ref()),
            // The driver was loaded anew since: its default is in force.
            Step::TimeSlice { .. } if !same_boot => Ok(()),
            Step::TimeSlice { gpu, .. } => {
                self.host.set_time_slice(gpu, DEFAULT_TIME_SLICE).map_err(StepError::from)
            }
            Step::WriteCdi { file } => {
                self.host.remove(&self.cdi_dir.join(file)).map(|_| ()).map_err(StepError::from)
            }
        };
        undone.map_err(|error| format!("undo of {}: {}", describe(step), error_chain(&error)))
    }
}

/// The boards that a claim's results name, as far as they exist.
pub fn gpus_of(claim: &AllocatedClaim, gpus: &NodeGpus) -> Vec<DeviceUuid> {
    let devices = claim.results.iter().filter_map(|result| gpus.device(&result.device));
    devices.map(|device| device.gpu().uuid.clone()).collect()
}

/// True if the record is for the devices of the allocation as it is now, not of one that was cleared since.
fn means(record: &Record, claim: &AllocatedClaim) -> bool {
    let recorded: BTreeSet<_> = record.intent.devices.iter().map(|device| &device.answer.device).collect();
    let allocated: BTreeSet<_> = claim.results.iter().map(|result| &result.device).collect();
    recorded == allocated
}

pub(super) fn stuck(problem: &str) -> impl FnOnce(ReleaseError) -> ExecuteError {
    let problem = problem.to_owned();
    move |left| ExecuteError::Stuck { problem, leftover: error_chain(&left) }
}

pub(super) fn step_error(step: &Step, source: StepError) -> ExecuteError {
    ExecuteError::Step { what: describe(step), source }
}

fn describe(step: &Step) -> String {
    match step {
        Step::MakeMig { gpu, place, .. } => {
            format!("making a MIG instance at memory slice {} of {gpu}", place.placement.start)
        }
        Step::TimeSlice { gpu, level } => format!("setting the time slice of {gpu} to level {level}"),
        Step::Mps { group, .. } => format!("setting up MPS for {group}"),
        Step::WriteCdi { file } => format!("writing the container edits {file}"),
    }
}
