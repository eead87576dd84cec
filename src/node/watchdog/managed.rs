//! CUDA managed memory on shared GPUs: NVML counts it on the board and for no process, and so a process whose limit is
//! broken could take any amount of it unseen. Where a board has more in use than its processes account for, the
//! processes' mappings tell whose it is ([`crate::host::ManagedMemory`]). MPS counts managed memory into a client's limit:
//! a client that keeps its limit is never over its grant for it. Pure, but for [`MappingsReader`].

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use super::measured::Measured;
use super::shares::WatchedDevice;
use crate::host::{ManagedMemory, Processes};
use crate::model::names::DeviceUuid;
use crate::model::quantity::Bytes;
use crate::node::leavable::{LeavableThread, LeavableThreads};
use crate::nvml::GpuProcess;

/// So much may be in use that no process accounts for, and nobody is asked: 9 MiB are on an H100 with a server and a client.
const UNASKED: Bytes = Bytes::from_mib(64);

type Lists = [(DeviceUuid, Vec<GpuProcess>)];

/// What managed memory there may be, on which boards that claims share, and on how many of these each process is.
pub(super) struct Managed<'a> {
    on: BTreeMap<&'a DeviceUuid, Bytes>,
    /// The boards that each process is on.
    boards: HashMap<u32, BTreeSet<DeviceUuid>>,
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
        for (gpu, list) in lists.iter().filter(|(gpu, _)| on.contains_key(gpu)) {
            for process in list {
                boards.entry(process.pid).or_default().insert(gpu.clone());
            }
        }
        Self { on, boards }
    }

    /// Whose mappings are to be read.
    pub fn suspects(&self) -> BTreeSet<u32> {
        self.boards.keys().copied().collect()
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

/// So long may it take to read mappings. Those of thousands of files take some ms.
const READ_LIMIT: Duration = Duration::from_millis(100);

/// Reads mappings on a thread of its own: a process can make that take for ever, and no look may wait for it.
#[derive(Clone)]
pub(super) struct MappingsReader(LeavableThread);

impl MappingsReader {
    /// `threads`: one.
    pub fn new(threads: LeavableThreads) -> Self {
        Self(LeavableThread::new(threads, READ_LIMIT))
    }

    /// What these processes have, as far as it can be read. None: it takes too long, or the last time has not ended yet.
    pub async fn read(
        &self,
        processes: Arc<dyn Processes>,
        suspects: BTreeSet<u32>,
    ) -> Option<HashMap<u32, ManagedMemory>> {
        if suspects.is_empty() {
            return Some(HashMap::new());
        }
        let read = move |pid: u32| Some((pid, processes.managed_memory(pid).ok()?));
        self.0.run(move || suspects.into_iter().filter_map(read).collect()).await.ok()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

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
        assert_eq!(managed.suspects(), BTreeSet::from([1, 2]));
        let of = |gpu: &str, pid, found| managed.of(&gpu.into(), pid, found);
        let mapped = |mib| Some(ManagedMemory::Mapped(MIB(mib)));
        assert_eq!(of("GPU-0", 2, mapped(40)), MIB(40));
        assert_eq!(of("GPU-0", 2, mapped(4000)), MIB(65), "the rest is in the node's memory");
        assert_eq!(of("GPU-0", 2, Some(ManagedMemory::Untold)), MIB(65));
        assert_eq!(of("GPU-0", 2, None), Bytes(0), "it could not be read");
        assert_eq!(of("GPU-1", 3, mapped(40)), Bytes(0));
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

    #[tokio::test]
    async fn a_process_whose_mappings_cannot_be_read_stops_no_look() {
        let (let_go, hangs) = std::sync::mpsc::channel();
        let fake = Fake { held_up: Mutex::new(Some(hangs)), ..Fake::default() };
        let processes: Arc<dyn Processes> = Arc::new(fake);
        let reader = MappingsReader::new(LeavableThreads::new("test", 1));
        let read = |pid: u32| reader.read(processes.clone(), BTreeSet::from([pid]));
        assert_eq!(read(1).await, None, "it hangs");
        assert_eq!(read(2).await, None, "and still does");
        assert_eq!(reader.read(processes.clone(), BTreeSet::new()).await, Some(HashMap::new()));
        let_go.send(()).unwrap();
        let began = std::time::Instant::now();
        let found = loop {
            if let Some(found) = read(2).await {
                break found;
            }
            assert!(began.elapsed() < Duration::from_secs(10), "it is not read again");
            tokio::task::yield_now().await;
        };
        assert_eq!(found, HashMap::from([(2, ManagedMemory::Mapped(MIB(7)))]));
    }
}
