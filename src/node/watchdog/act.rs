//! Ends processes, and lists the supervisor's own processes.
//!
//! SIGKILL while a kernel runs ends every client of the MPS server; after `terminate_client` it ends the process alone.
//! `terminate_client` frees none of the client's memory, its process's end does. So both, one right after the other
//! (E19 and E26 of tests/gpu, seen with driver 580.159.04).

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;

use tracing::Span;

use super::knowledge::Servers;
use super::managed::MappingsReader;
use super::worker_thread::WorkerThread;
use crate::host::cgroup::ProcessOwner;
use crate::host::{End, Processes};
use crate::model::error_chain;
use crate::model::names::ClaimUid;
use crate::model::process::ProcessKey;
use crate::model::share::MpsGroup;
use crate::sharing::watch::{AccountId, EndMethod, EndReason, ObservedProcess};
use crate::supervisor::protocol::DaemonPhase;
use crate::supervisor::{Daemons, SupervisorError};

/// A process that is to end.
pub(super) struct EndRequest {
    pub account_id: AccountId,
    pub seen: ObservedProcess,
    pub how: EndMethod,
    pub reason: EndReason,
    /// Within which it is ended, and its end is logged.
    pub span: Span,
}

/// What became of it.
pub(super) enum EndOutcome {
    Ended(EndMethod),
    /// It was not there any more.
    Gone,
    /// Why not, in words. It is tried more firmly at a later look.
    Failed(String),
}

/// The threads for work that blocks. Several, because a request to the supervisor may take long.
#[derive(Clone)]
pub(super) struct WorkerThreads {
    /// Reads /proc and sends signals.
    pub reader: WorkerThread,
    /// Asks the supervisor, and reads the ledger.
    pub requester: WorkerThread,
    /// Asks daemons for their clients. A tenant can keep a daemon busy, and nobody's end may wait for that.
    pub asker: WorkerThread,
    pub mappings: MappingsReader,
}

impl WorkerThreads {
    /// # Errors
    /// The node has no memory or threads left.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            reader: WorkerThread::new("watch-processes")?,
            requester: WorkerThread::new("watch-daemons")?,
            asker: WorkerThread::new("watch-clients")?,
            mappings: MappingsReader::new()?,
        })
    }
}

/// Ends a process by SIGKILL; if it is a daemon's client, after the daemon has terminated the client.
pub(super) async fn end(
    ending: &EndRequest,
    groups: BTreeSet<MpsGroup>,
    daemons: Arc<dyn Daemons>,
    processes: Arc<dyn Processes>,
    threads: WorkerThreads,
) -> EndOutcome {
    let process = ending.seen.process;
    let outcome = match ending.how {
        EndMethod::Kill => threads.reader.run(move || kill(process, &*processes)).await,
        EndMethod::Terminate => {
            let claims = ending.account_id.claims.clone();
            let work = move || match terminate(process, &ordered(&groups, &claims), &*daemons, &*processes) {
                Ok(Some(outcome)) => outcome,
                Ok(None) => kill(process, &*processes),
                Err(error) => EndOutcome::Failed(error_chain(&error)),
            };
            threads.requester.run(work).await
        }
    };
    outcome.unwrap_or_else(|| EndOutcome::Failed("a thread of the watchdog failed".to_owned()))
}

/// The daemons of these claims first: asking one takes its time, and a GPU may have one for each of its shares.
fn ordered<'a>(groups: &'a BTreeSet<MpsGroup>, claims: &[ClaimUid]) -> Vec<&'a MpsGroup> {
    let mut ordered: Vec<&MpsGroup> = groups.iter().collect();
    ordered.sort_by_key(|group| !group.claim().is_some_and(|claim| claims.contains(claim)));
    ordered
}

/// None if the process is no daemon's client.
fn terminate(
    process: ProcessKey,
    groups: &[&MpsGroup],
    daemons: &dyn Daemons,
    processes: &dyn Processes,
) -> Result<Option<EndOutcome>, SupervisorError> {
    for group in groups {
        let clients = daemons.clients(group)?;
        let Some(client) = clients.into_iter().find(|client| client.pid == process.pid) else { continue };
        // The daemon knows PIDs only: they must still mean this process.
        if !is_there(process, processes) {
            return Ok(Some(EndOutcome::Gone));
        }
        daemons.terminate(group, client)?;
        return Ok(Some(match kill(process, processes) {
            EndOutcome::Ended(_) | EndOutcome::Gone => EndOutcome::Ended(EndMethod::Terminate),
            failed @ EndOutcome::Failed(_) => failed,
        }));
    }
    Ok(None)
}

fn is_there(process: ProcessKey, processes: &dyn Processes) -> bool {
    processes.started(process.pid).is_ok_and(|started| started == Some(process.started))
}

fn kill(process: ProcessKey, processes: &dyn Processes) -> EndOutcome {
    match processes.end(process) {
        Ok(End::Signalled) => EndOutcome::Ended(EndMethod::Kill),
        Ok(End::Gone) => EndOutcome::Gone,
        Err(error) => EndOutcome::Failed(error_chain(&error)),
    }
}

/// The supervisor's servers and daemons, and the pods that they run in; none if it does not answer.
pub(super) fn servers(daemons: &dyn Daemons, processes: &dyn Processes) -> Option<Servers> {
    let states = daemons.states().ok()?;
    let mut servers = Servers::default();
    for state in states {
        let daemon = match state.phase {
            DaemonPhase::Serving { pid } | DaemonPhase::Settling { pid } | DaemonPhase::Resting { pid } => {
                Some(pid)
            }
            DaemonPhase::Down { .. } => None,
        };
        for pid in state.servers.iter().map(|server| server.pid).chain(daemon) {
            if let Ok(Some(started)) = processes.started(pid) {
                servers.processes.insert(ProcessKey { pid, started }, state.group.claim().cloned());
            }
            if let Ok(Some(ProcessOwner::Pod { pod, .. })) = processes.owner(pid) {
                servers.pods.insert(pod);
            }
        }
    }
    Some(servers)
}
