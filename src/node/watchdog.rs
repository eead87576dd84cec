//! The watchdog: ensures that claims which share a GPU keep to their grants, and that no process uses a device that
//! claims hold without a claim of its own.
//!
//! ```text
//! ledger ─→ held devices ─→ NVML's process lists ─→ host PIDs ─→ pods ─→ claims
//!                                                                            │ sharing::watch::fold
//!                       metrics, log, findings (to the reporter) ←── verdicts ←───┘
//!                                  `tranche mps`, SIGKILL ←──┘
//! ```
//! The watchdog runs only while claims hold devices: other nodes do not even load the library. Where no device is shared,
//! the looks are rare. Of two instances in a rolling update, the one that holds the lock file watches.
//!
//! * `shares`: the held devices, from the ledger · `table`: PIDs → processes · `knowledge`: the owners of processes
//! * `questions`: who is asked beside the looks
//! * `looks`: the processes of one look · `detours`: which of them go around MPS
//! * `managed`: memory that NVML counts for no process · `accounts`: claims → what is counted together · `act`: how a process is ended, `enders`: on which threads · `finding`: what is reported
//! * `measured`: NVML's figures → how busy each pod is · `rows`: what is shown of claims and GPUs · `showing`: when
//! * `metrics`: what is counted · `dcgm`: the same under other names
//!
//! Work that blocks has threads of the watchdog's own (`act`): it must not wait behind claims that are being prepared.

mod accounts;
mod act;
mod dcgm;
mod detours;
mod enders;
mod finding;
mod knowledge;
mod looks;
mod managed;
mod measured;
mod metrics;
mod questions;
mod rows;
mod shares;
mod showing;
mod table;

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;
use tracing::{Instrument, info, warn};

use self::act::{EndOutcome, EndRequest, Validity, WorkerThreads};
use self::detours::Detours;
use self::knowledge::{ClaimUsers, Knowledge, Servers};
use self::looks::LookCounts;
use self::shares::{HeldDevices, WatchedDevice};
use self::showing::LatestFigures;
use self::table::ProcessTable;
use super::config;
use super::containers::Containers;
use super::executor::Executor;
use crate::cluster::Cluster;
use crate::host::{FileLock, Processes};
use crate::model::error_chain;
use crate::model::names::{ClaimUid, DeviceUuid, PodUid};
use crate::model::share::MpsGroup;
use crate::model::time::Moment;
use crate::nvml::{BoardProcesses, GpuProcess, NvmlError, ProcessWatch};
use crate::sharing::watch::{EndReason, Verdict, Watch, WatchPolicy};
use crate::supervisor::Daemons;
use crate::supervisor::protocol::MpsClient;

pub use dcgm::DcgmMetrics;
pub use finding::{Finding, FindingKind};
pub use metrics::ClaimMetrics;
pub use rows::{ClaimFigures, ClaimLabels, ClaimRow, GpuFigures, GpuLabels, HoldKind, Rows};

/// Findings that may wait for whoever reports them; beyond that they are dropped and counted.
pub const FINDINGS: usize = 256;
/// How long NVML's lists of all shared devices may take.
pub const LISTS_LIMIT: Duration = Duration::from_secs(2);
/// Between two tries for the lock.
const LOCK_RETRY: Duration = Duration::from_millis(250);
/// Where nobody shares a device there is no grant to exceed, only strangers to find: a look in so many ticks. The figures of
/// devices are read as often: they are for metrics alone.
const ALONE_TICKS: u32 = 20;
/// Until the look that confirms what is urgent: a process that alone has more than MPS lets it have. Long enough for
/// NVML's lists of another moment.
const UNTIL_CONFIRMED: Duration = Duration::from_millis(50);
/// Looks in a row with processes that /proc does not show, after which it is said so.
const UNSEEN_LOOKS: u32 = 8;

/// What the watchdog works with.
pub struct WatchdogParts {
    pub settings: config::Watchdog,
    /// Client processes in one block of slots.
    pub slots_per_share: u32,
    /// Whose ledger is watched.
    pub executor: Arc<Executor>,
    pub cluster: Arc<dyn Cluster>,
    pub daemons: Arc<dyn Daemons>,
    pub lists: ProcessWatch,
    pub processes: Arc<dyn Processes>,
    pub lock: PathBuf,
    /// Our own pod: its processes are no tenant's.
    pub own_pod: Option<PodUid>,
    pub metrics: ClaimMetrics,
    /// Which containers use claims.
    pub containers: watch::Receiver<Containers>,
}

/// The watchdog's loop. Made by [`Watchdog::new`], driven by [`Watchdog::run`].
pub struct Watchdog {
    parts: WatchdogParts,
    findings: mpsc::Sender<Finding>,
    devices: HeldDevices,
    /// None only while it is read with, and while nothing is watched.
    table: Option<ProcessTable>,
    threads: WorkerThreads,
    knowledge: Knowledge,
    detours: Detours,
    watch: Watch,
    looks: LookCounts,
    shown: LatestFigures,
    tasks: JoinSet<TaskResult>,
    logged_failures: LoggedFailures,
}

/// What a look is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LookKind {
    /// All that is held.
    Regular,
    /// What the last look found urgent.
    Confirming,
}

/// What there was before the watchdog looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Before {
    /// No claim held a device when it was last seen.
    Nothing,
    /// Claims held devices and this watchdog did not look: it was not there, or another one had the lock.
    Claims,
}

/// The result of a task that runs beside the looks.
enum TaskResult {
    Users { claim: ClaimUid, asked: Moment, users: Option<ClaimUsers> },
    Ledger { asked: Moment, read: Result<(), String> },
    Servers { asked: Moment, servers: Result<Servers, String> },
    Clients { group: MpsGroup, asked: Moment, clients: Result<Vec<MpsClient>, String> },
    Ended(EndRequest, EndOutcome),
}

/// Failures that were logged, so that each is logged once and not at every look.
#[derive(Default)]
struct LoggedFailures {
    lists: Option<String>,
    figures: Option<String>,
    devices: BTreeMap<DeviceUuid, String>,
    lock: bool,
    /// NVML does not tell which processes are MPS clients.
    untold_clients: bool,
    /// Mappings cannot be read in time.
    mappings: bool,
    /// Processes cannot be read in time.
    reads: bool,
    /// Who does not answer.
    questions: BTreeSet<&'static str>,
    unseen_looks: u32,
}

impl Watchdog {
    /// The watchdog, and what it finds.
    pub fn new(parts: WatchdogParts) -> (Self, mpsc::Receiver<Finding>) {
        let (findings, found) = mpsc::channel(FINDINGS);
        let watchdog = Self {
            findings,
            devices: HeldDevices::new(parts.executor.store.changes()),
            table: None,
            threads: WorkerThreads::default(),
            knowledge: Knowledge::new(parts.own_pod.clone()),
            detours: Detours::default(),
            watch: Watch::default(),
            looks: LookCounts::new(Instant::now()),
            shown: LatestFigures::default(),
            tasks: JoinSet::new(),
            logged_failures: LoggedFailures::default(),
            parts,
        };
        (watchdog, found)
    }

    /// Runs until the process is to end.
    pub async fn run(mut self, stop: CancellationToken) -> Result<(), Infallible> {
        if self.parts.settings.action == config::WatchdogAction::Off {
            stop.cancelled().await;
            return Ok(());
        }
        loop {
            let before = tokio::select! {
                biased;
                () = stop.cancelled() => return Ok(()),
                before = self.until_held() => before,
            };
            tokio::select! {
                biased;
                () = stop.cancelled() => return Ok(()),
                () = self.while_held(before) => {}
            }
        }
    }

    /// Waits for the first claim. A change is looked into a period later: a burst of claims is looked at once,
    /// and no container starts within that time.
    async fn until_held(&mut self) -> Before {
        self.parts.lists.rest();
        // Those that have nothing to do end.
        self.threads = self.threads.anew();
        self.table = None;
        (self.watch, self.detours, self.shown) = Default::default();
        self.show();
        let mut before = Before::Claims;
        loop {
            self.read_ledger();
            if !self.devices.is_empty() {
                return before;
            }
            before = Before::Nothing;
            self.devices.until_changed().await;
            tokio::time::sleep(self.parts.settings.period).await;
        }
    }

    /// Watches until no claim holds a device.
    async fn while_held(&mut self, before: Before) {
        let (_lock, before) = self.lock(before).await;
        self.detours = match before {
            Before::Nothing => Detours::default(),
            Before::Claims => detours_from_now(&self.threads, self.parts.processes.clone()).await,
        };
        let table = ProcessTable::new(self.parts.processes.clone());
        if !self.parts.processes.pids_are_the_hosts() {
            warn!(
                "this process does not have the host's PID namespace (hostPID: true): NVML's PIDs may mean other \
                 processes here, so only processes that hold a GPU's device file open count"
            );
        }
        self.table = Some(table);
        info!(devices = self.devices.len(), action = ?self.parts.settings.action, "watching GPUs that claims hold");
        let period = self.parts.settings.period;
        let mut ticks = tokio::time::interval(period);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut turn = LookKind::Regular;
        while !self.devices.is_empty() {
            tokio::select! {
                biased;
                Some(result) = self.tasks.join_next() => match result {
                    Ok(result) => self.take_result(result),
                    Err(error) => warn!(%error, "a task of the watchdog failed"),
                },
                _ = ticks.tick() => {
                    let began = Instant::now();
                    self.tick(turn).await;
                    let took = began.elapsed();
                    self.parts.metrics.tick(took);
                    // Never two in a row between regular ones.
                    let hurry = self.is_confirmed_next(turn);
                    turn = if hurry { LookKind::Confirming } else { LookKind::Regular };
                    if hurry {
                        ticks.reset_after(UNTIL_CONFIRMED);
                    }
                    let missed = took.as_micros() / period.as_micros().max(1);
                    self.parts.metrics.missed_ticks.inc_by(u64::try_from(missed).unwrap_or(u64::MAX));
                }
            }
        }
        info!("no claim holds a GPU any more");
    }

    /// Waits until no other instance watches.
    async fn lock(&mut self, mut before: Before) -> (FileLock, Before) {
        loop {
            match FileLock::try_acquire(&self.parts.lock) {
                Ok(Some(lock)) => return (lock, before),
                Ok(None) => {}
                Err(error) if !std::mem::replace(&mut self.logged_failures.lock, true) => {
                    warn!(error = error_chain(&error), "cannot take the watchdog's lock; trying again");
                }
                Err(_) => {}
            }
            before = Before::Claims;
            tokio::time::sleep(LOCK_RETRY).await;
        }
    }

    /// After this look another one comes at once, which confirms what is urgent.
    fn is_confirmed_next(&self, turn: LookKind) -> bool {
        turn == LookKind::Regular && self.watch.is_urgent() && UNTIL_CONFIRMED < self.parts.settings.period
    }

    fn policy(&self) -> WatchPolicy {
        let settings = &self.parts.settings;
        WatchPolicy { terminate: settings.action == config::WatchdogAction::Terminate, grace: settings.grace }
    }

    /// Takes over what the ledger says now.
    fn read_ledger(&mut self) {
        let intents = self.devices.read(&self.parts.executor.store);
        self.knowledge.keep(self.devices.values().flat_map(WatchedDevice::claims));
        self.knowledge.record(shares::pods(intents));
        self.watch.keep(&self.devices.keys().cloned().collect());
        self.looks.keep(&self.devices);
        self.shown.keep(&self.devices);
        self.logged_failures.devices.retain(|device, _| self.devices.contains_key(device));
    }

    /// One look at all devices that are held, if it is time.
    async fn tick(&mut self, turn: LookKind) {
        if self.devices.have_changed() {
            self.read_ledger();
        }
        let rests = turn == LookKind::Regular && self.devices.values().all(WatchedDevice::is_alone);
        if !self.looks.take_turn(rests) {
            return;
        }
        let devices: Vec<DeviceUuid> = self.devices.keys().cloned().collect();
        let answers = self.parts.lists.processes(devices).await;
        let answers = self.note_failures(answers);
        if !self.read_processes(&answers).await {
            // Nothing is known of anybody: what was seen before counts on.
            return;
        }
        let now = self.looks.now();
        let policy = self.policy();
        let listed = self.figures_are_due().then(|| answers.clone());
        let looks = self.observe(answers, now);
        let verdicts = match turn {
            LookKind::Regular => {
                looks.iter().for_each(|look| self.looks.note(&look.gpu));
                let (verdicts, usage) = self.watch.fold(&policy, now, &looks);
                self.shown.note_usage(&looks, usage);
                self.show();
                verdicts
            }
            LookKind::Confirming => self.watch.confirm(&policy, now, &looks),
        };
        for verdict in verdicts {
            self.carry_out(verdict);
        }
        self.ask(now);
        // Last, so that a sensor that hangs does not keep the look from what it is for, nor the one that confirms it.
        if let Some(listed) = listed.filter(|_| !self.is_confirmed_next(turn)) {
            self.read_figures(listed).await;
            self.show();
        }
    }

    /// What devices answered. Failures are told when they begin, change or end.
    fn note_failures(
        &mut self,
        answers: Result<Vec<BoardProcesses>, NvmlError>,
    ) -> Vec<(DeviceUuid, Vec<GpuProcess>)> {
        let answers = match answers {
            Ok(answers) => answers,
            Err(error) => {
                self.parts.metrics.failed_looks.inc();
                let words = error_chain(&error);
                if self.logged_failures.lists.replace(words.clone()).as_ref() != Some(&words) {
                    warn!(error = words, "GPUs cannot be watched; tried again at every look");
                }
                return Vec::new();
            }
        };
        if self.logged_failures.lists.take().is_some() {
            info!("GPUs are watched again");
        }
        let mut found = Vec::new();
        for BoardProcesses { board, processes } in answers {
            match processes {
                Ok(processes) => {
                    if self.logged_failures.devices.remove(&board).is_some() {
                        info!(device = %board, "a GPU is watched again");
                    }
                    found.push((board, processes));
                }
                Err(error) => {
                    self.parts.metrics.failed_looks.inc();
                    let words = error_chain(&error);
                    if self.logged_failures.devices.insert(board.clone(), words.clone()).as_ref()
                        != Some(&words)
                    {
                        warn!(device = %board, error = words, "a GPU cannot be watched");
                    }
                }
            }
        }
        found
    }

    fn take_result(&mut self, result: TaskResult) {
        match result {
            TaskResult::Users { claim, asked, users } => {
                self.knowledge.users_answered(&claim, asked, users);
            }
            TaskResult::Ledger { asked, read } => {
                let read = self.answer("the ledger", read).is_some();
                self.knowledge.ledger_answered(asked, read);
            }
            TaskResult::Servers { asked, servers } => {
                let servers = self.answer("tranche mps", servers);
                self.knowledge.servers_answered(asked, servers);
            }
            TaskResult::Clients { group, asked, clients } => {
                // Not told: a tenant can keep its daemon from answering as often as it likes.
                if clients.is_err() {
                    self.parts.metrics.failed_questions.inc();
                }
                self.detours.answered(&group, asked, clients.ok().as_deref());
            }
            TaskResult::Ended(ending, outcome) => self.note_end(ending, outcome),
        }
    }

    fn carry_out(&mut self, verdict: Verdict) {
        if let Verdict::End { account_id, seen, how, reason } = verdict {
            let threads = self.threads.clone();
            let groups = self.devices.get(&account_id.gpu).map(|device| device.groups.clone());
            let span = finding::end_span(&self.devices, &account_id, seen.process);
            let validity = Validity::of(self.looks.of(&account_id.gpu));
            let ending = EndRequest { account_id, seen, how, reason, validity, span: span.clone() };
            let (daemons, processes) = (self.parts.daemons.clone(), self.parts.processes.clone());
            let end = async move {
                let outcome =
                    act::end(&ending, groups.unwrap_or_default(), daemons, processes, threads).await;
                TaskResult::Ended(ending, outcome)
            };
            self.tasks.spawn(end.instrument(span));
            return;
        }
        for (labels, finding) in finding::of_verdict(&self.devices, &self.knowledge, &verdict) {
            match (&finding.kind, labels) {
                (FindingKind::Foreign { .. }, _) => {
                    self.of_gpu(&finding, |gpu| self.parts.metrics.foreign(gpu));
                }
                (FindingKind::OverGrant(_) | FindingKind::TooManyProcesses { .. }, Some(labels)) => {
                    self.parts.metrics.violation(&labels);
                }
                (FindingKind::AroundMps { .. }, Some(labels)) => self.parts.metrics.detour(&labels),
                _ => {}
            }
            self.tell(finding);
        }
    }

    fn note_end(&mut self, ending: EndRequest, outcome: EndOutcome) {
        let _entered = ending.span.clone().entered();
        if let EndOutcome::Failed(_) = outcome {
            self.parts.metrics.failed_terminations.inc();
            self.watch.end_failed(&ending.account_id.gpu, ending.seen.process, ending.how);
        }
        for (labels, finding) in finding::of_end(&self.devices, &self.knowledge, &ending, outcome) {
            match (&finding.kind, labels) {
                (FindingKind::Ended { reason: EndReason::AroundMps, .. }, Some(labels)) => {
                    self.parts.metrics.detour_termination(&labels);
                }
                (FindingKind::Ended { .. }, Some(labels)) => self.parts.metrics.termination(&labels),
                (FindingKind::Ended { .. }, None) => {
                    self.of_gpu(&finding, |gpu| self.parts.metrics.foreign_termination(gpu));
                }
                _ => {}
            }
            self.tell(finding);
        }
    }

    fn tell(&self, finding: Finding) {
        finding.log();
        if let Err(mpsc::error::TrySendError::Full(_)) = self.findings.try_send(finding) {
            self.parts.metrics.dropped_findings.inc();
        }
    }
}

/// What is remembered when the watchdog begins to look: nothing, and since when. Where the time cannot be told, every
/// process counts as older than the watchdog, so that nobody is ended for what may have happened before.
async fn detours_from_now(threads: &WorkerThreads, processes: Arc<dyn Processes>) -> Detours {
    let began = match threads.reader.run(move || processes.now()).await {
        Ok(Ok(now)) => now,
        Ok(Err(error)) => {
            warn!(%error, "cannot tell which processes are older than this watchdog; all are taken for older");
            u64::MAX
        }
        Err(_) => u64::MAX,
    };
    Detours::since(began)
}
