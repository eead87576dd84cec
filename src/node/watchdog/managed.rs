//! CUDA managed memory on shared GPUs: NVML counts it on the board and for no process, and so a process whose limit is
//! broken could take any amount of it unseen. Where a board has more in use than its processes account for, the
//! processes' mappings tell whose it is ([`crate::host::ManagedMemory`]). MPS counts managed memory into a client's limit:
//! a client that keeps its limit is never over its grant for it. Pure, but for [`MappingsReader`].

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;
use tokio::time::timeout;

use super::measured::Measured;
use super::shares::WatchedDevice;
use crate::host::{ManagedMemory, Processes};
use crate::model::names::DeviceUuid;
use crate::model::process::ProcessKey;
use crate::model::quantity::Bytes;
use crate::node::leavable::LeavableThreads;
use crate::nvml::GpuProcess;

/// So much may be in use that no process accounts for, and nobody is asked: 9 MiB are on an H100 with a server and a client.
const UNASKED: Bytes = Bytes::from_mib(64);

type Lists = [(DeviceUuid, Vec<GpuProcess>)];

/// What managed memory there may be, on which boards that claims share, and on how many of these each process is.
pub(super) struct Managed<'a> {
    on: BTreeMap<&'a DeviceUuid, Bytes>,
    /// The boards that each process is on.
    boards: HashMap<u32, BTreeSet<DeviceUuid>>,
    /// What NVML counts of each there, all boards together.
    counted: BTreeMap<u32, Bytes>,
}

impl<'a> Managed<'a> {
    /// By the last figures.
    pub fn new(
        devices: &'a BTreeMap<DeviceUuid, WatchedDevice>,
        measured: &BTreeMap<DeviceUuid, Measured>,
        lists: &Lists,
    ) -> Self {
        let shared = devices.iter().filter(|(_, device)| !device.is_alone() && !device.is_mig);
        let uncounted = shared.filter_map(|(uuid, _)| Some((uuid, measured.get(uuid)?.uncounted?)));
        let on: BTreeMap<_, _> = uncounted.filter(|(_, uncounted)| *uncounted > UNASKED).collect();
        let mut boards: HashMap<u32, BTreeSet<DeviceUuid>> = HashMap::new();
        let mut counted: BTreeMap<u32, Bytes> = BTreeMap::new();
        for (gpu, list) in lists.iter().filter(|(gpu, _)| on.contains_key(gpu)) {
            for process in list {
                boards.entry(process.pid).or_default().insert(gpu.clone());
                let sum = counted.entry(process.pid).or_default();
                *sum = Bytes(sum.0.saturating_add(process.used.unwrap_or_default().0));
            }
        }
        Self { on, boards, counted }
    }

    /// Whose mappings are to be read, with what NVML counts of them now.
    pub fn suspects(self) -> BTreeMap<u32, Bytes> {
        self.counted
    }

    /// What a process may have on a board beside what NVML counts: never more than nobody accounts for there. Of several
    /// boards each is taken to have the same part, or what the others have no room for.
    pub fn of(&self, gpu: &DeviceUuid, pid: u32, found: Option<ManagedMemory>) -> Bytes {
        let (Some(uncounted), Some(boards)) = (self.on.get(gpu), self.boards.get(&pid)) else {
            return Bytes(0);
        };
        match found {
            None => Bytes(0),
            Some(ManagedMemory::Mapped(all)) => {
                let others =
                    boards.iter().filter(|other| *other != gpu).filter_map(|other| self.on.get(other));
                let others = others.fold(0_u64, |sum, other| sum.saturating_add(other.0));
                let part = all.0 / boards.len().max(1) as u64;
                Bytes(part.max(all.0.saturating_sub(others))).min(*uncounted)
            }
            Some(ManagedMemory::Untold) => *uncounted,
        }
    }
}

/// So long a look waits for mappings. Those of thousands of files take some ms.
const READ_LIMIT: Duration = Duration::from_millis(100);
/// For so long what was read of a process counts, from the moment at which that began: the process may have given back what
/// it had.
const GOOD_FOR: Duration = Duration::from_secs(2);

/// Reads mappings on a thread of its own: a process can make that take for ever, and no look may wait for it. A reading that
/// takes longer, or begins late, goes on, and what it finds counts at the next look.
#[derive(Clone)]
pub(super) struct MappingsReader {
    /// One at a time.
    threads: LeavableThreads,
    known: Arc<Mutex<KnownMappings>>,
}

/// What the last readings found of the processes that the last look asked about, or the reading that goes on.
#[derive(Debug)]
struct KnownMappings {
    good_for: Duration,
    processes: HashMap<ProcessKey, Mappings>,
}

#[derive(Debug)]
struct Mappings {
    last: Reading,
    began: Instant,
    /// A look has had it.
    is_used: bool,
    /// What the reading before it found.
    before: Option<Reading>,
}

#[derive(Debug, Clone, Copy)]
struct Reading {
    found: ManagedMemory,
    /// What NVML counted of the process at the look that asked for it.
    counted: Bytes,
}

impl Reading {
    /// What may be managed memory still, now that NVML counts so much: what it counts more may have been that.
    fn beside(self, counted: Bytes) -> Option<ManagedMemory> {
        let more = counted.0.saturating_sub(self.counted.0);
        match self.found {
            ManagedMemory::Mapped(all) => Some(ManagedMemory::Mapped(Bytes(all.0.saturating_sub(more)))),
            ManagedMemory::Untold => (more == 0).then_some(ManagedMemory::Untold),
        }
    }
}

impl KnownMappings {
    fn note(&mut self, process: ProcessKey, last: Reading, began: Instant) {
        let before = self.processes.remove(&process).map(|known| known.last);
        self.processes.insert(process, Mappings { last, began, is_used: false, before });
    }

    /// What a look may count. A state counts after two looks in a row, and these must have seen it twice: what a look has had
    /// counts for another one as far as the reading before it found the same.
    fn take(&mut self, process: ProcessKey, counted: Bytes, now: Instant) -> Option<ManagedMemory> {
        let known = self.processes.get_mut(&process)?;
        if now.saturating_duration_since(known.began) > self.good_for {
            return None;
        }
        match std::mem::replace(&mut known.is_used, true) {
            false => known.last.beside(counted),
            true => Some(known.last.beside(counted)?.min(known.before?.beside(counted)?)),
        }
    }
}

/// What a look knows of managed memory.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct FoundMappings {
    pub by_pid: HashMap<u32, ManagedMemory>,
    /// Some could not be read in time, and a reading before them has to do, if it may.
    pub is_late: bool,
}

impl MappingsReader {
    /// `threads`: one.
    pub fn new(threads: LeavableThreads) -> Self {
        Self::remembering(threads, GOOD_FOR)
    }

    fn remembering(threads: LeavableThreads, good_for: Duration) -> Self {
        let known = KnownMappings { good_for, processes: HashMap::new() };
        Self { threads, known: Arc::new(Mutex::new(known)) }
    }

    /// What these processes have beside what NVML counts of them now, as far as it can be read. Nothing begins while the last
    /// reading goes on.
    pub async fn read(
        &self,
        processes: Arc<dyn Processes>,
        suspects: BTreeMap<ProcessKey, Bytes>,
    ) -> FoundMappings {
        locked(&self.known).processes.retain(|process, _| suspects.contains_key(process));
        if suspects.is_empty() {
            return FoundMappings::default();
        }
        let (known, asked) = (self.known.clone(), suspects.clone());
        let (done, has_ended) = oneshot::channel();
        let work = move || {
            for (process, counted) in asked {
                let began = Instant::now();
                let Ok(found) = processes.managed_memory(process.pid) else { continue };
                // By now the PID may be another one's.
                if processes.started(process.pid).is_ok_and(|started| started == Some(process.started)) {
                    locked(&known).note(process, Reading { found, counted }, began);
                }
            }
            // Of a reading that is late nobody waits for the end.
            let _ = done.send(());
        };
        let in_time = self.threads.start(work).is_ok()
            && timeout(READ_LIMIT, has_ended).await.is_ok_and(|ended| ended.is_ok());
        let (now, mut known) = (Instant::now(), locked(&self.known));
        let found = suspects
            .iter()
            .filter_map(|(process, counted)| Some((process.pid, known.take(*process, *counted, now)?)));
        FoundMappings { by_pid: found.collect(), is_late: !in_time }
    }
}

/// No change of it can panic halfway.
fn locked(known: &Mutex<KnownMappings>) -> MutexGuard<'_, KnownMappings> {
    known.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Sender, channel};

    use super::super::shares::tests::board;
    use super::*;
    use crate::model::claim::ClaimRef;
    use crate::model::share::{Grant, Isolation};
    use crate::node::holders::tests::Fake;
    use crate::nvml::ContextKind;

    const MIB: fn(u64) -> Bytes = Bytes::from_mib;

    fn shared(name: &str, uuid: &str) -> (DeviceUuid, WatchedDevice) {
        let claim = ClaimRef { namespace: "team".into(), name: "a".into(), uid: "a".into() };
        let grant =
            Grant { memory: MIB(100), compute: None, slots: 1, processes: 1, isolation: Isolation::Mps };
        (uuid.into(), WatchedDevice { shares: vec![(claim, grant)], ..board(name, uuid) })
    }

    fn uncounted(uuid: &str, mib: u64) -> (DeviceUuid, Measured) {
        (uuid.into(), Measured { uncounted: Some(MIB(mib)), ..Measured::default() })
    }

    fn list(uuid: &str, pids: &[u32]) -> (DeviceUuid, Vec<GpuProcess>) {
        let process = |pid: &u32| GpuProcess { pid: *pid, used: None, context: ContextKind::MpsClient };
        (uuid.into(), pids.iter().map(process).collect())
    }

    #[test]
    fn processes_are_asked_where_a_shared_board_has_memory_that_nobody_accounts_for() {
        let alone = ("GPU-2".into(), WatchedDevice { shares: vec![], ..shared("gpu-2", "GPU-2").1 });
        let devices = BTreeMap::from([shared("gpu-0", "GPU-0"), shared("gpu-1", "GPU-1"), alone]);
        let lists = [list("GPU-0", &[1, 2, 2]), list("GPU-1", &[3]), list("GPU-2", &[4])];
        let figures =
            BTreeMap::from([uncounted("GPU-0", 65), uncounted("GPU-1", 64), uncounted("GPU-2", 1000)]);
        let managed = Managed::new(&devices, &figures, &lists);
        let of = |gpu: &str, pid, found| managed.of(&gpu.into(), pid, found);
        let mapped = |mib| Some(ManagedMemory::Mapped(MIB(mib)));
        assert_eq!(of("GPU-0", 2, mapped(40)), MIB(40));
        assert_eq!(of("GPU-0", 2, mapped(4000)), MIB(65), "the rest is in the node's memory");
        assert_eq!(of("GPU-0", 2, Some(ManagedMemory::Untold)), MIB(65));
        assert_eq!(of("GPU-0", 2, None), Bytes(0), "it could not be read");
        assert_eq!(of("GPU-1", 3, mapped(40)), Bytes(0));
        assert_eq!(managed.suspects().into_keys().collect::<Vec<_>>(), [1, 2]);
        assert!(Managed::new(&devices, &BTreeMap::new(), &lists).suspects().is_empty());
    }

    #[test]
    fn a_process_on_two_boards_has_half_of_it_on_each() {
        let devices = BTreeMap::from([shared("gpu-0", "GPU-0"), shared("gpu-1", "GPU-1")]);
        let lists = [list("GPU-0", &[1]), list("GPU-1", &[1])];
        let figures = BTreeMap::from([uncounted("GPU-0", 500), uncounted("GPU-1", 500)]);
        let managed = Managed::new(&devices, &figures, &lists);
        let of = |managed: &Managed<'_>, mib| {
            managed.of(&"GPU-1".into(), 1, Some(ManagedMemory::Mapped(MIB(mib))))
        };
        assert_eq!(of(&managed, 600), MIB(300));
        assert_eq!(of(&managed, 900), MIB(450), "either may have it");
        let figures = BTreeMap::from([uncounted("GPU-0", 100), uncounted("GPU-1", 5000)]);
        let managed = Managed::new(&devices, &figures, &lists);
        assert_eq!(of(&managed, 4000), MIB(3900), "the other has no more than 100");
    }

    /// Longer than anything here takes on a busy machine.
    const PATIENCE: Duration = Duration::from_secs(60);

    fn key(pid: u32) -> ProcessKey {
        ProcessKey { pid, started: 1 }
    }

    /// Processes of which each has 7 MiB, and the reader.
    struct Slow {
        fake: Arc<Fake>,
        threads: LeavableThreads,
        reader: MappingsReader,
    }

    impl Slow {
        fn new(good_for: Duration) -> Self {
            let threads = LeavableThreads::new("test", 1);
            let reader = MappingsReader::remembering(threads.clone(), good_for);
            Self { fake: Arc::default(), threads, reader }
        }

        /// The same while this look's reading is held up, and what lets it go.
        async fn read_slowly(&self, pids: &[u32]) -> ((Vec<u32>, bool), Sender<()>) {
            let (let_go, hangs) = channel();
            *self.fake.held_up.lock().unwrap() = Some(hangs);
            let found = self.read(pids).await;
            // On a busy machine the thread may not have begun in time.
            let began = Instant::now();
            while self.fake.held_up.lock().unwrap().is_some() {
                assert!(began.elapsed() < PATIENCE, "nothing is read");
                tokio::task::yield_now().await;
            }
            (found, let_go)
        }

        /// What is found of these processes, and whether that was late.
        async fn read(&self, pids: &[u32]) -> (Vec<u32>, bool) {
            let suspects = pids.iter().map(|pid| (key(*pid), MIB(1))).collect();
            let found = self.reader.read(self.fake.clone(), suspects).await;
            assert!(found.by_pid.values().all(|found| *found == ManagedMemory::Mapped(MIB(7))), "{found:?}");
            let mut pids: Vec<u32> = found.by_pid.into_keys().collect();
            pids.sort_unstable();
            (pids, found.is_late)
        }

        async fn wait_until_it_has_ended(&self, let_go: Sender<()>) {
            drop(let_go);
            let began = Instant::now();
            while self.threads.running() > 0 {
                assert!(began.elapsed() < PATIENCE, "the reading goes on");
                tokio::task::yield_now().await;
            }
        }
    }

    #[tokio::test]
    async fn a_process_whose_mappings_cannot_be_read_stops_no_look() {
        let slow = Slow::new(PATIENCE);
        let (found, let_go) = slow.read_slowly(&[1]).await;
        assert_eq!(found, (vec![], true), "it hangs");
        assert_eq!(slow.read(&[2]).await, (vec![], true), "and still does");
        assert_eq!(slow.read(&[]).await, (vec![], false));
        slow.wait_until_it_has_ended(let_go).await;
        let began = Instant::now();
        while slow.read(&[2]).await != (vec![2], false) {
            assert!(began.elapsed() < PATIENCE, "it is not read again");
        }
        assert_eq!(locked(&slow.reader.known).processes.len(), 1, "of others nothing is kept");
    }

    /// What took more than 100 ms was lost, so that whoever had many mappings had no managed memory.
    #[tokio::test]
    async fn what_is_read_late_counts_at_the_next_look() {
        let slow = Slow::new(PATIENCE);
        let (found, first) = slow.read_slowly(&[1, 2]).await;
        assert_eq!(found, (vec![], true));
        slow.wait_until_it_has_ended(first).await;
        let (found, second) = slow.read_slowly(&[1, 2]).await;
        assert_eq!(found, (vec![1, 2], true), "of the first reading");
        assert_eq!(slow.read(&[1, 2]).await, (vec![], true), "one reading is not two looks");
        slow.wait_until_it_has_ended(second).await;
        let (found, third) = slow.read_slowly(&[1, 2]).await;
        assert_eq!(found, (vec![1, 2], true), "of the second reading");
        assert_eq!(slow.read(&[1, 2]).await, (vec![1, 2], true), "both have seen it");
        // Another process with the PID.
        let reborn = BTreeMap::from([(ProcessKey { pid: 1, started: 77 }, MIB(1))]);
        let found = slow.reader.read(slow.fake.clone(), reborn).await;
        assert_eq!(found, FoundMappings { is_late: true, ..FoundMappings::default() });
        drop(third);
    }

    #[tokio::test]
    async fn what_was_read_too_long_ago_does_not_count() {
        let slow = Slow::new(Duration::ZERO);
        let (found, first) = slow.read_slowly(&[1]).await;
        assert_eq!(found, (vec![], true));
        slow.wait_until_it_has_ended(first).await;
        let (found, second) = slow.read_slowly(&[1]).await;
        assert_eq!(found, (vec![], true));
        drop(second);
    }

    #[test]
    fn a_look_that_has_nothing_new_counts_what_two_readings_have_seen() {
        use ManagedMemory::{Mapped, Untold};
        let mut known = KnownMappings { good_for: PATIENCE, processes: HashMap::new() };
        let now = Instant::now();
        assert_eq!(known.take(key(1), MIB(1), now), None);
        for (read, new, again) in [
            (Mapped(MIB(9)), Mapped(MIB(9)), None),
            (Mapped(MIB(5)), Mapped(MIB(5)), Some(Mapped(MIB(5)))),
            (Untold, Untold, Some(Mapped(MIB(5)))),
            (Untold, Untold, Some(Untold)),
            (Mapped(MIB(7)), Mapped(MIB(7)), Some(Mapped(MIB(7)))),
        ] {
            known.note(key(1), Reading { found: read, counted: MIB(1) }, now);
            assert_eq!([(); 3].map(|()| known.take(key(1), MIB(1), now)), [Some(new), again, again]);
        }
        assert_eq!(known.take(key(1), MIB(1), now + 2 * PATIENCE), None);
    }

    /// Who gives managed memory back and takes as much of the other kind has it once.
    #[test]
    fn what_nvml_counts_more_than_when_it_was_read_may_have_been_managed_memory() {
        use ManagedMemory::{Mapped, Untold};
        let now = Instant::now();
        let taken = |found, counted| {
            let mut known = KnownMappings { good_for: PATIENCE, processes: HashMap::new() };
            known.note(key(1), Reading { found, counted: MIB(2) }, now);
            known.note(key(1), Reading { found, counted: MIB(2) }, now);
            let mut take = || known.take(key(1), counted, now);
            let first = take();
            assert_eq!(take(), first, "both readings have seen it");
            first
        };
        assert_eq!(taken(Mapped(MIB(8)), MIB(2)), Some(Mapped(MIB(8))));
        assert_eq!(taken(Mapped(MIB(8)), MIB(1)), Some(Mapped(MIB(8))));
        assert_eq!(taken(Mapped(MIB(8)), MIB(5)), Some(Mapped(MIB(5))));
        assert_eq!(taken(Mapped(MIB(8)), MIB(10)), Some(Mapped(Bytes(0))));
        assert_eq!(taken(Untold, MIB(2)), Some(Untold));
        assert_eq!(taken(Untold, MIB(3)), None);
    }
}
