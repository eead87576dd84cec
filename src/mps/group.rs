//! One group: its desired state, its daemon, its GPUs. Every change of a group is made with the group's lock held.

mod check;
mod end;
mod limits;
mod outage;
mod shm;

use std::collections::HashMap;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use thiserror::Error;
use tokio::time::Instant;
use tracing::{info, warn};

use self::outage::Outage;
use super::record::{DesiredState, GroupRecord};
use super::tools::Tools;
use crate::daemon::{DaemonError, Folder, Process, protocol};
use crate::model::error_chain;
use crate::model::names::DeviceUuid;
use crate::model::share::{DaemonScope, MpsGroup, MpsLimits, SharedMemory};
use crate::nvml::{ComputeMode, ComputeModes, NvmlError};
use crate::supervisor::protocol::{DaemonPhase, DaemonState, Server};

/// Why a group is not as it was wanted.
#[derive(Debug, Error)]
pub enum GroupError {
    #[error(
        "nvidia-cuda-mps-control is not below the driver root {}; install the driver's MPS programs there, or name \
         the program with --mps-control", .root.display()
    )]
    NoDriver { root: PathBuf },
    #[error("there is no program at {}; correct --mps-control", .path.display())]
    NoProgram { path: PathBuf },
    #[error(transparent)]
    Daemon(#[from] DaemonError),
    #[error("the MPS daemon was started but does not answer{}", bracketed(.said))]
    NotUp { said: String, source: DaemonError },
    #[error("the MPS daemon was given {wanted} but reports {found}; the limits are not in force")]
    NotTaken { wanted: String, found: String },
    #[error("cannot record what the MPS daemon of {group} is to do")]
    Record { group: MpsGroup, source: io::Error },
    #[error("the compute mode of {gpu} cannot be set")]
    Boards { gpu: DeviceUuid, source: NvmlError },
    #[error(
        "what earlier tenants of {0} left in /dev/shm cannot be removed; look at the log of `tranche mps`"
    )]
    NotEmpty(MpsGroup),
    #[error("processes {pids:?} of the MPS daemon of {group} do not end; reset the GPU or the node")]
    Lingering { group: MpsGroup, pids: Vec<u32> },
    #[error("{group} cannot be served: the MPS daemon of {other} has one of its devices and is in use")]
    Overlap { group: MpsGroup, other: MpsGroup },
    #[error("{0}")]
    Invalid(String),
    /// The group was given up meanwhile: ask for a new one.
    #[error("the MPS daemon is being ended; try again")]
    Retired,
}

impl GroupError {
    /// Somebody else talks to the daemon: nothing is known, and nothing is wrong with it.
    fn is_busy(&self) -> bool {
        matches!(self, Self::Daemon(DaemonError::Busy { .. }))
    }
}

fn bracketed(words: &str) -> String {
    if words.is_empty() { String::new() } else { format!(" (it said: {words})") }
}

/// The daemon of one group of devices, and what is wanted of it.
pub struct Group<B> {
    tools: Arc<Tools<B>>,
    group: MpsGroup,
    folder: Folder,
    /// A claim wants the group, or is about to: no other group may have its devices.
    wanted: AtomicBool,
    /// The last state, for callers that do not wait for the lock.
    snapshot: Mutex<Snapshot>,
    state: tokio::sync::Mutex<GroupState>,
}

struct Snapshot {
    state: DaemonState,
    daemon: Option<Process>,
}

struct GroupState {
    record: GroupRecord,
    /// The desired limits are in force, as read back from the daemon, and clients find the daemon.
    in_force: bool,
    answers: protocol::Limits,
    servers: Vec<Server>,
    /// Since the last time that it came up.
    serving_since: Option<Instant>,
    resting_since: Instant,
    outage: Outage,
    logged: LoggedProblems,
    shm: TenantsMemory,
    retired: bool,
}

/// The problems that were logged last, so that each is logged once.
#[derive(Default)]
struct LoggedProblems {
    /// Another client occupies the daemon.
    busy: bool,
    boards: Option<String>,
    /// Of the memory that tenants share.
    shm: Option<String>,
}

/// What tenants share as /dev/shm.
struct TenantsMemory {
    usage: Option<SharedMemory>,
    /// They may have left something there.
    to_empty: bool,
}

impl<B: ComputeModes> Group<B> {
    /// As the record of an earlier supervisor has it.
    pub fn adopted(tools: Arc<Tools<B>>, record: GroupRecord) -> Self {
        // It may have ended between the note and what follows.
        let to_empty = record.desired == DesiredState::Rest;
        Self::made(tools, record, to_empty)
    }

    /// Nobody wants it yet, as far as is written down: who works with a daemon that lives all the same is not known.
    pub fn new(tools: Arc<Tools<B>>, group: MpsGroup) -> Self {
        Self::made(tools, GroupRecord::new(group), false)
    }

    /// A daemon that lives is taken over as it is. The next check tells how it is.
    fn made(tools: Arc<Tools<B>>, mut record: GroupRecord, to_empty: bool) -> Self {
        let folder = tools.folder(&record.group);
        if !record.daemon.is_some_and(Process::is_alive)
            && let Some(found) = Process::daemon_of(&folder)
        {
            record.daemon = Some(found);
        }
        let state = GroupState {
            in_force: false,
            answers: protocol::Limits::default(),
            servers: Vec::new(),
            serving_since: None,
            resting_since: Instant::now(),
            outage: Outage::default(),
            logged: LoggedProblems::default(),
            shm: TenantsMemory { usage: None, to_empty },
            retired: false,
            record,
        };
        Self {
            group: state.record.group.clone(),
            folder,
            wanted: AtomicBool::new(state.record.desired != DesiredState::Rest),
            snapshot: Mutex::new(Snapshot { state: state.describe(), daemon: state.record.daemon }),
            state: tokio::sync::Mutex::new(state),
            tools,
        }
    }

    pub fn group(&self) -> &MpsGroup {
        &self.group
    }

    pub fn is_wanted(&self) -> bool {
        self.wanted.load(Ordering::Relaxed)
    }

    /// Says that it is about to be wanted; a keep or a rest follows.
    pub fn reserve(&self) {
        self.wanted.store(true, Ordering::Relaxed);
    }

    /// Takes a reservation back: it is wanted if the record says so.
    pub async fn settle(&self) {
        let state = self.state.lock().await;
        self.wanted.store(state.record.desired != DesiredState::Rest, Ordering::Relaxed);
    }

    /// As it was last.
    pub fn snapshot(&self) -> DaemonState {
        self.snapshot.lock().unwrap_or_else(PoisonError::into_inner).state.clone()
    }

    /// The same with servers that have started since the daemon was asked last.
    pub fn snapshot_with(&self, running: &HashMap<u32, Vec<Process>>) -> DaemonState {
        let snapshot = self.snapshot.lock().unwrap_or_else(PoisonError::into_inner);
        let mut state = snapshot.state.clone();
        let running = snapshot.daemon.and_then(|daemon| running.get(&daemon.pid)).into_iter().flatten();
        for process in running {
            if state.servers.iter().all(|server| server.pid != process.pid) {
                state.servers.push(Server { pid: process.pid, state: String::new() });
            }
        }
        state
    }

    pub async fn is_retired(&self) -> bool {
        self.state.lock().await.retired
    }

    /// See to it that the daemon serves with these limits. What was wanted before still is if that fails.
    pub async fn keep(&self, exclusive: bool, limits: &MpsLimits) -> Result<DaemonState, GroupError> {
        if let Some(state) = self.warm(exclusive, limits) {
            return Ok(state);
        }
        let mut state = self.state.lock().await;
        if state.retired {
            return Err(GroupError::Retired);
        }
        if state.shm.to_empty && !self.empty_shm(&mut state).await {
            self.retire(&mut state).await;
            self.publish(&state);
            return Err(if state.retired {
                GroupError::Retired
            } else {
                GroupError::NotEmpty(self.group.clone())
            });
        }
        // A rest may have been first.
        self.reserve();
        let desired = DesiredState::Serve { exclusive, limits: limits.clone() };
        let before = std::mem::replace(&mut state.record.desired, desired);
        let kept = match self.note_before_effect(&mut state, exclusive) {
            Ok(()) => self.serve(&mut state).await,
            Err(error) => Err(error),
        };
        if kept.is_err() {
            self.take_back(&mut state, before).await;
        }
        self.wanted.store(state.record.desired != DesiredState::Rest, Ordering::Relaxed);
        let described = self.publish(&state);
        kept.map(|()| described)
    }

    /// The answer without a lock, a file or a child: nothing is to be done.
    fn warm(&self, exclusive: bool, limits: &MpsLimits) -> Option<DaemonState> {
        let snapshot = self.snapshot.lock().unwrap_or_else(PoisonError::into_inner);
        let state = &snapshot.state;
        let same = matches!(state.phase, DaemonPhase::Serving { .. })
            && state.exclusive == exclusive
            && state.limits.as_ref() == Some(limits);
        (same && snapshot.daemon.is_some_and(Process::is_alive)).then(|| state.clone())
    }

    fn note_before_effect(&self, state: &mut GroupState, exclusive: bool) -> Result<(), GroupError> {
        self.tools.make(&self.folder)?;
        state.record.boards_taken |= exclusive;
        self.note(state)
    }

    fn note(&self, state: &GroupState) -> Result<(), GroupError> {
        let written = self.tools.records.write(&state.record);
        written.map_err(|source| GroupError::Record { group: self.group.clone(), source })
    }

    /// Boards, daemon, limits, links: in this order, each only if it is not so already.
    async fn serve(&self, state: &mut GroupState) -> Result<(), GroupError> {
        let DesiredState::Serve { exclusive, limits } = state.record.desired.clone() else { return Ok(()) };
        if !exclusive {
            self.release_boards(state).await?;
        }
        if let Some(mode) = self.mode(exclusive) {
            self.set_boards(mode).await?;
        }
        if let Some(daemon) = state.record.daemon.filter(|daemon| !daemon.is_alive()) {
            self.died(state, daemon);
        }
        if state.record.daemon.is_none() {
            self.start(state).await?;
        }
        self.put_in_force(state, &limits).await?;
        state.outage.end();
        state.serving_since.get_or_insert_with(Instant::now);
        state.shm.usage = state.shm.usage.or_else(|| self.folder.shm_usage());
        Ok(())
    }

    async fn start(&self, state: &mut GroupState) -> Result<(), GroupError> {
        state.in_force = false;
        state.serving_since = None;
        self.folder.close()?;
        state.record.daemon = match Process::daemon_of(&self.folder) {
            Some(found) => Some(found),
            None => {
                self.folder.forget_daemon()?;
                let started = self.tools.launch(&self.group, &self.folder).await?;
                self.tools.metrics.starts.inc();
                Some(started)
            }
        };
        self.note(state)
    }

    async fn take_back(&self, state: &mut GroupState, before: DesiredState) {
        state.record.desired = before;
        // It rests since it did: a keep that fails again and again does not put off its end.
        if state.record.desired == DesiredState::Rest
            && let Err(error) = self.release_boards(state).await
        {
            warn!(group = %self.group, error = error_chain(&error), "boards are not back in DEFAULT mode yet; tried again");
        }
        if let Err(error) = self.note(state) {
            warn!(group = %self.group, error = error_chain(&error), "the wanted state cannot be recorded");
        }
    }

    /// The compute mode that the devices need while the daemon serves; none: MIG devices have no mode.
    fn mode(&self, exclusive: bool) -> Option<ComputeMode> {
        match (exclusive, self.group.scope()) {
            (true, _) => Some(ComputeMode::ExclusiveProcess),
            // In another mode a board takes the server of the first daemon alone.
            (false, DaemonScope::Share) => Some(ComputeMode::Default),
            (false, DaemonScope::Gpu) => None,
        }
    }

    /// Back to DEFAULT, if they were taken.
    async fn release_boards(&self, state: &mut GroupState) -> Result<(), GroupError> {
        if !state.record.boards_taken {
            return Ok(());
        }
        self.set_boards(ComputeMode::Default).await?;
        state.record.boards_taken = false;
        self.note(state)
    }

    /// All of them, whatever fails; the first error.
    async fn set_boards(&self, mode: ComputeMode) -> Result<(), GroupError> {
        let mut first = Ok(());
        for gpu in self.group.devices() {
            let set = self.tools.boards.set_compute_mode(gpu, mode).await;
            let set = set.map_err(|source| GroupError::Boards { gpu: gpu.clone(), source });
            first = first.and(set);
        }
        first
    }

    /// Every client process of every server.
    pub async fn clients(&self) -> Result<Vec<crate::supervisor::protocol::MpsClient>, GroupError> {
        if !self.has_daemon() {
            return Ok(Vec::new());
        }
        let mut clients = Vec::new();
        for server in self.pids("get_server_list".to_owned()).await? {
            let pids = self.pids(format!("get_client_list {server}")).await?;
            clients
                .extend(pids.into_iter().map(|pid| crate::supervisor::protocol::MpsClient { server, pid }));
        }
        Ok(clients)
    }

    fn has_daemon(&self) -> bool {
        let snapshot = self.snapshot.lock().unwrap_or_else(PoisonError::into_inner);
        snapshot.daemon.is_some_and(Process::is_alive)
    }

    /// A list of process ids; none of a server that ended meanwhile.
    async fn pids(&self, command: String) -> Result<Vec<u32>, GroupError> {
        let answer = self.tools.ask(&self.folder, std::slice::from_ref(&command)).await?;
        match protocol::pids(&answer) {
            Some(pids) => Ok(pids),
            None if protocol::is_not_found(&answer) => Ok(Vec::new()),
            None => Err(DaemonError::NotUnderstood { command, answer }.into()),
        }
    }

    /// Ends one client. One that is gone is fine.
    pub async fn terminate(&self, client: crate::supervisor::protocol::MpsClient) -> Result<(), GroupError> {
        let command = format!("terminate_client {} {}", client.server, client.pid);
        let answer = self.tools.ask(&self.folder, std::slice::from_ref(&command)).await?;
        info!(group = %self.group, ?client, answer = answer.trim(), "client terminated");
        if protocol::is_not_found(&answer) {
            return Ok(());
        }
        match answer.trim().parse::<i64>() {
            Ok(status) if status != 0 => Err(DaemonError::NotUnderstood { command, answer }.into()),
            _ => {
                self.tools.metrics.termination("client");
                Ok(())
            }
        }
    }

    /// Shows the state to those who do not wait.
    fn publish(&self, state: &GroupState) -> DaemonState {
        let described = state.describe();
        let mut snapshot = self.snapshot.lock().unwrap_or_else(PoisonError::into_inner);
        *snapshot = Snapshot { state: described.clone(), daemon: state.record.daemon };
        described
    }
}

impl GroupState {
    fn describe(&self) -> DaemonState {
        let (exclusive, limits) = match &self.record.desired {
            DesiredState::Rest => (self.record.boards_taken, None),
            DesiredState::Serve { exclusive, limits } => (*exclusive, Some(limits.clone())),
        };
        DaemonState {
            group: self.record.group.clone(),
            exclusive,
            phase: self.phase(),
            limits,
            memory_answers: self.answers.memory.clone(),
            compute_answer: self.answers.compute.clone(),
            deaths: self.record.deaths,
            servers: self.servers.clone(),
            shm: self.shm.usage,
        }
    }

    fn phase(&self) -> DaemonPhase {
        let reason = |usual: &str| self.outage.reason().unwrap_or(usual).to_owned();
        match (&self.record.desired, self.record.daemon) {
            (DesiredState::Serve { .. }, Some(daemon)) if self.in_force => {
                DaemonPhase::Serving { pid: daemon.pid }
            }
            (DesiredState::Serve { .. }, Some(daemon)) if self.outage.reason().is_none() => {
                DaemonPhase::Settling { pid: daemon.pid }
            }
            (DesiredState::Serve { .. }, _) => DaemonPhase::Down { reason: reason("it is being started") },
            (DesiredState::Rest, Some(daemon)) => DaemonPhase::Resting { pid: daemon.pid },
            (DesiredState::Rest, None) => DaemonPhase::Down { reason: reason("no claim needs it") },
        }
    }
}
