//! Ends processes, and lists the supervisor's own processes.
//!
//! SIGKILL while a kernel runs ends every client of the MPS server; after `terminate_client` it ends the process alone.
//! `terminate_client` frees none of the client's memory, its process's end does. So both, one right after the other
//! (E19 and E26 of tests/gpu, seen with driver 580.159.04).

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tracing::Span;

use super::enders::Enders;
use super::knowledge::Servers;
use super::managed::MappingsReader;
use crate::host::cgroup::ProcessOwner;
use crate::host::{End, Processes};
use crate::model::error_chain;
use crate::model::names::ClaimUid;
use crate::model::process::ProcessKey;
use crate::model::share::MpsGroup;
use crate::node::leavable::{LeavableThread, LeavableThreads, THREADS_MAX};
use crate::sharing::watch::{AccountId, EndMethod, EndReason, ObservedProcess};
use crate::supervisor::protocol::{DaemonPhase, MpsClient};
use crate::supervisor::{Daemons, SupervisorError};

/// A process that is to end.
pub(super) struct EndRequest {
    pub account_id: AccountId,
    pub seen: ObservedProcess,
    pub how: EndMethod,
    pub reason: EndReason,
    pub validity: Validity,
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

/// For how long what was seen of a process counts. Later looks may have found it within its grant, or its pod among those of
/// a claim.
#[derive(Clone)]
pub(super) struct Validity {
    /// Looks that were made so far.
    looks: Arc<AtomicU64>,
    /// How many of them when the process was seen, and when that was.
    seen_at: u64,
    since: Instant,
}

/// It counts until two more looks were made, but no shorter and no longer than this.
const LOOKS: u64 = 2;
const GOOD_AT_LEAST: Duration = Duration::from_secs(1);
const GOOD_AT_MOST: Duration = Duration::from_secs(20);
/// For a question, with one that waits before it: `tranche mps` answers within 40 s, or does not.
const QUESTION_LIMIT: Duration = Duration::from_secs(60);
/// Threads that may be at questions to the supervisor and the ledger: beyond one, because the others were left.
const REQUESTERS_MAX: usize = 4;
/// Daemons that may be asked for their clients at a time; others wait for their turn. `tranche mps` hears 64 at a time,
/// claims that are being prepared among them.
const ASKERS_MAX: usize = 16;
/// For reading of the processes on all GPUs that claims hold what is not known of them. That of a thousand takes some ms.
const READ_LIMIT: Duration = Duration::from_secs(2);

/// The threads for work that blocks. Several, because a request to the supervisor may take long.
#[derive(Clone)]
pub(super) struct WorkerThreads {
    /// Reads /proc and sends signals.
    pub reader: LeavableThread,
    /// Asks the supervisor, and reads the ledger.
    pub requester: LeavableThread,
    /// Ask daemons for their clients, each one: a tenant can keep its daemon busy, and nobody's end and no other daemon may
    /// wait for that.
    askers: LeavableThreads,
    /// Have daemons terminate clients.
    enders: Enders,
    pub mappings: MappingsReader,
    leavable: Arc<Leavable>,
}

/// The threads that something may hold up, counted for as long as the watchdog lives.
struct Leavable {
    readers: LeavableThreads,
    requesters: LeavableThreads,
    askers: LeavableThreads,
    enders: Enders,
    mappings: LeavableThreads,
}

impl Default for Leavable {
    fn default() -> Self {
        Self {
            readers: LeavableThreads::new("watch-processes", THREADS_MAX),
            requesters: LeavableThreads::new("watch-daemons", REQUESTERS_MAX),
            askers: LeavableThreads::new("watch-clients", ASKERS_MAX),
            enders: Enders::default(),
            mappings: LeavableThreads::new("watch-mappings", 1),
        }
    }
}

impl Default for WorkerThreads {
    /// None of them runs before there is something for it to do.
    fn default() -> Self {
        Self::of(Arc::default())
    }
}

impl WorkerThreads {
    /// Other threads, beside those of these that are held up.
    pub fn anew(&self) -> Self {
        Self::of(self.leavable.clone())
    }

    fn of(leavable: Arc<Leavable>) -> Self {
        Self {
            reader: LeavableThread::new(leavable.readers.clone(), READ_LIMIT),
            requester: LeavableThread::new(leavable.requesters.clone(), QUESTION_LIMIT),
            askers: leavable.askers.clone(),
            enders: leavable.enders.clone(),
            mappings: MappingsReader::new(leavable.mappings.clone()),
            leavable,
        }
    }

    /// Asks a daemon for its clients; they are to be waited for.
    ///
    /// # Errors
    /// It was not asked: too many others are being asked.
    pub fn clients(
        &self,
        group: MpsGroup,
        daemons: Arc<dyn Daemons>,
    ) -> Result<impl Future<Output = Result<Vec<MpsClient>, String>> + use<>, String> {
        let clients = self.askers.begin(QUESTION_LIMIT, move || daemons.clients(&group))?;
        Ok(async move { clients.await?.map_err(|error| error_chain(&error)) })
    }
}

impl Validity {
    /// Of what the last of these looks has seen.
    pub fn of(looks: &Arc<AtomicU64>) -> Self {
        Self { looks: looks.clone(), seen_at: looks.load(Ordering::Relaxed), since: Instant::now() }
    }

    fn is_over(&self) -> bool {
        let is_overtaken = self.looks.load(Ordering::Relaxed).saturating_sub(self.seen_at) >= LOOKS;
        let passed = self.since.elapsed();
        passed >= GOOD_AT_MOST || (is_overtaken && passed >= GOOD_AT_LEAST)
    }
}

/// Ends a process by SIGKILL; if it is a daemon's client, after the daemon has terminated the client. Not if its turn comes
/// too late: it is judged anew at each look.
pub(super) async fn end(
    ending: &EndRequest,
    groups: BTreeSet<MpsGroup>,
    daemons: Arc<dyn Daemons>,
    processes: Arc<dyn Processes>,
    threads: WorkerThreads,
) -> EndOutcome {
    let process = ending.seen.process;
    let validity = ending.validity.clone();
    let is_late = move || validity.is_over();
    let outcome = match ending.how {
        EndMethod::Kill => threads.reader.run(move || kill_in_time(process, &*processes, &is_late)).await,
        EndMethod::Terminate => {
            let claims = ending.account_id.claims.clone();
            let work = move || {
                terminate(process, &ordered(&groups, &claims), &*daemons, &*processes, &is_late)
                    .unwrap_or_else(|error| EndOutcome::Failed(error_chain(&error)))
            };
            threads.enders.run(&ending.account_id.gpu, work).await
        }
    };
    outcome.unwrap_or_else(EndOutcome::Failed)
}

/// The daemons of these claims first: asking one takes its time, and a GPU may have one for each of its shares.
fn ordered<'a>(groups: &'a BTreeSet<MpsGroup>, claims: &[ClaimUid]) -> Vec<&'a MpsGroup> {
    let mut ordered: Vec<&MpsGroup> = groups.iter().collect();
    ordered.sort_by_key(|group| !group.claim().is_some_and(|claim| claims.contains(claim)));
    ordered
}

/// Kills a process that is no daemon's client.
fn terminate(
    process: ProcessKey,
    groups: &[&MpsGroup],
    daemons: &dyn Daemons,
    processes: &dyn Processes,
    is_late: &dyn Fn() -> bool,
) -> Result<EndOutcome, SupervisorError> {
    for group in groups {
        // It may have been killed, or have become none to end, while others' ends, or another daemon, were waited for.
        if let Some(outcome) = not_to_end(process, processes, is_late) {
            return Ok(outcome);
        }
        let clients = daemons.clients(group)?;
        let Some(client) = clients.into_iter().find(|client| client.pid == process.pid) else { continue };
        // The daemon knows PIDs only: they must still mean this process.
        if let Some(outcome) = not_to_end(process, processes, is_late) {
            return Ok(outcome);
        }
        daemons.terminate(group, client)?;
        // However long that took: without its client the process can do nothing on the GPU, and keeps the memory.
        return Ok(match kill(process, processes) {
            EndOutcome::Ended(_) | EndOutcome::Gone => EndOutcome::Ended(EndMethod::Terminate),
            failed @ EndOutcome::Failed(_) => failed,
        });
    }
    Ok(kill_in_time(process, processes, is_late))
}

/// Why a process is not ended, if it is not.
fn not_to_end(
    process: ProcessKey,
    processes: &dyn Processes,
    is_late: &dyn Fn() -> bool,
) -> Option<EndOutcome> {
    if !is_there(process, processes) {
        return Some(EndOutcome::Gone);
    }
    is_late().then(too_late)
}

fn too_late() -> EndOutcome {
    let words = "its turn came, or its MPS daemon answered, after what was seen of it had been overtaken by later \
                 looks; they decide";
    EndOutcome::Failed(words.to_owned())
}

fn kill_in_time(process: ProcessKey, processes: &dyn Processes, is_late: &dyn Fn() -> bool) -> EndOutcome {
    if is_late() { too_late() } else { kill(process, processes) }
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

/// The supervisor's servers and daemons, and the pods that they run in.
pub(super) fn servers(daemons: &dyn Daemons, processes: &dyn Processes) -> Result<Servers, SupervisorError> {
    let states = daemons.states()?;
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
    Ok(servers)
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::AtomicUsize;
    use std::sync::mpsc::{Receiver, Sender, channel};

    use tokio::time::timeout;

    use super::*;
    use crate::model::share::MpsLimits;
    use crate::node::holders::tests::Fake;
    use crate::sharing::watch::{AccountId, ProcessAccess};
    use crate::supervisor::protocol::DaemonState;

    /// Each GPU has a daemon with one client. That of GPU-0 does not answer who it is before it is let go.
    struct Fakes {
        let_go: Mutex<Receiver<()>>,
        asked: AtomicUsize,
        terminated: AtomicUsize,
    }

    impl Fakes {
        /// They, and what lets the daemon of GPU-0 go.
        fn new() -> (Arc<Self>, Sender<()>) {
            let (let_go, busy) = channel();
            let zero = AtomicUsize::default;
            (Arc::new(Self { let_go: Mutex::new(busy), asked: zero(), terminated: zero() }), let_go)
        }
    }

    const CLIENT: MpsClient = MpsClient { server: 1, pid: 7 };

    fn groups(gpu: &str) -> BTreeSet<MpsGroup> {
        BTreeSet::from([MpsGroup::new([gpu.into()])])
    }

    impl Daemons for Fakes {
        fn keep(&self, _: &MpsGroup, _: bool, _: &MpsLimits) -> Result<DaemonState, SupervisorError> {
            unimplemented!("the watchdog keeps no daemons")
        }
        fn rest(&self, _: &MpsGroup) -> Result<(), SupervisorError> {
            unimplemented!("the watchdog keeps no daemons")
        }
        fn states(&self) -> Result<Vec<DaemonState>, SupervisorError> {
            Ok(Vec::new())
        }
        fn clients(&self, group: &MpsGroup) -> Result<Vec<MpsClient>, SupervisorError> {
            self.asked.fetch_add(1, Ordering::SeqCst);
            if groups("GPU-0").contains(group) {
                let _ = self.let_go.lock().unwrap().recv();
                return Err(SupervisorError::Timeout { seconds: 20 });
            }
            Ok(vec![CLIENT])
        }
        fn terminate(&self, _: &MpsGroup, _: MpsClient) -> Result<(), SupervisorError> {
            self.terminated.fetch_add(1, Ordering::SeqCst);
            Ok(())
        }
    }

    fn request(gpu: &str, started: u64) -> EndRequest {
        let process = ProcessKey { pid: 7, started };
        EndRequest {
            account_id: AccountId { gpu: gpu.into(), claims: Vec::new() },
            seen: ObservedProcess {
                process,
                used: None,
                access: ProcessAccess::Client,
                pod: crate::model::process::ProcessPod::None,
            },
            how: EndMethod::Terminate,
            reason: EndReason::Foreign,
            validity: Validity::of(&Arc::default()),
            span: Span::none(),
        }
    }

    const PATIENCE: Duration = Duration::from_secs(60);

    #[tokio::test]
    async fn no_question_and_no_end_on_another_gpu_waits_for_a_daemon_that_is_asked_to_end_somebody() {
        let (daemons, let_go) = Fakes::new();
        let (processes, threads) = (Arc::new(Fake::default()), WorkerThreads::default());
        let end_on = |gpu: &'static str, started| {
            let (daemons, processes, threads) = (daemons.clone(), processes.clone(), threads.clone());
            async move { end(&request(gpu, started), groups(gpu), daemons, processes, threads).await }
        };
        let end = |started| end_on("GPU-0", started);
        // All processes of these began at 1.
        let first = tokio::spawn(end(1));
        wait_until_asked(&daemons).await;
        let (asked, known) = (daemons.clone(), processes.clone());
        let servers = threads.requester.run(move || servers(&*asked, &*known));
        assert!(timeout(PATIENCE, servers).await.expect("it waits for the daemon").unwrap().is_ok());
        let other = timeout(PATIENCE, end_on("GPU-1", 1)).await.expect("it waits for another GPU's daemon");
        assert!(matches!(other, EndOutcome::Ended(EndMethod::Terminate)));
        let more = futures::future::join_all((0..100).map(|_| end(1)));
        let (more, ()) =
            timeout(PATIENCE, async { tokio::join!(more, async { drop(let_go) }) }).await.unwrap();
        let turned_away =
            |ended: &&EndOutcome| matches!(ended, EndOutcome::Failed(words) if words.contains("others wait"));
        assert_eq!(more.iter().filter(turned_away).count(), 36, "64 wait behind the first");
        assert!(matches!(first.await.unwrap(), EndOutcome::Failed(words) if words.contains("20 s")));
        let asked = daemons.asked.load(Ordering::SeqCst);
        assert!(matches!(end(2).await, EndOutcome::Gone));
        assert_eq!(daemons.asked.load(Ordering::SeqCst), asked, "it was not there any more");
    }

    fn seen_before(passed: Duration, looks: u64) -> Validity {
        let since = Instant::now().checked_sub(passed).expect("the machine runs for longer");
        Validity { looks: Arc::new(AtomicU64::new(looks)), seen_at: 0, since }
    }

    fn overtaken() -> Validity {
        seen_before(GOOD_AT_LEAST, LOOKS)
    }

    /// On a busy node a look takes seconds: what was seen counts for as long as nobody has looked again.
    #[test]
    fn what_was_seen_counts_until_two_more_looks_were_made() {
        assert!(overtaken().is_over());
        assert!(!seen_before(GOOD_AT_LEAST, LOOKS - 1).is_over());
        assert!(!seen_before(GOOD_AT_MOST / 2, 0).is_over());
        assert!(seen_before(GOOD_AT_MOST, 0).is_over());
        assert!(!Validity::of(&Arc::new(AtomicU64::new(7))).is_over());
    }

    #[tokio::test]
    async fn nobody_is_ended_for_what_was_seen_before_later_looks() {
        let ((daemons, _let_go), processes) = (Fakes::new(), Arc::new(Fake::default()));
        let threads = WorkerThreads::default();
        let is_late =
            |ended: &EndOutcome| matches!(ended, EndOutcome::Failed(words) if words.contains("later looks"));
        for how in [EndMethod::Kill, EndMethod::Terminate] {
            let late = EndRequest { how, validity: overtaken(), ..request("GPU-1", 1) };
            let ended =
                end(&late, groups("GPU-1"), daemons.clone(), processes.clone(), threads.clone()).await;
            assert!(is_late(&ended));
        }
        let terminated = |daemons: &Fakes| daemons.terminated.load(Ordering::SeqCst);
        assert_eq!((daemons.asked.load(Ordering::SeqCst), terminated(&daemons)), (0, 0));
        // The answer comes too late.
        let process = ProcessKey { pid: 7, started: 1 };
        let groups = groups("GPU-1");
        let end_it = |process, is_late: &dyn Fn() -> bool| {
            terminate(process, &ordered(&groups, &[]), &*daemons, &*processes, is_late).unwrap()
        };
        let other = ProcessKey { pid: 8, started: 1 };
        for (asks, process) in [process, other].into_iter().enumerate() {
            let has_answered = || daemons.asked.load(Ordering::SeqCst) > asks;
            assert!(is_late(&end_it(process, &has_answered)), "{process}");
            assert_eq!((daemons.asked.load(Ordering::SeqCst), terminated(&daemons)), (asks + 1, 0));
        }
        assert!(matches!(end_it(process, &|| false), EndOutcome::Ended(EndMethod::Terminate)));
        assert_eq!(terminated(&daemons), 1);
    }

    async fn wait_until_asked(daemons: &Fakes) {
        let asked = async {
            while daemons.asked.load(Ordering::SeqCst) == 0 {
                tokio::task::yield_now().await;
            }
        };
        timeout(PATIENCE, asked).await.unwrap();
    }
}
