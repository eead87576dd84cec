//! CUDA managed memory on shared GPUs: NVML counts it on the board and for no process, and so a process whose limit is
//! broken could take any amount of it unseen. Where a board has more in use than its processes account for, the
//! processes' mappings tell whose it is ([`crate::host::ManagedMemory`]). MPS counts managed memory into a client's limit:
//! a client that keeps its limit is never over its grant for it. Pure.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::measured::Measured;
use super::shares::WatchedDevice;
use crate::host::ManagedMemory;
use crate::model::names::DeviceUuid;
use crate::model::quantity::Bytes;
use crate::nvml::GpuProcess;

/// So much may be in use that no process accounts for, and nobody is asked: 9 MiB are on an H100 with a server and a client.
const UNASKED: Bytes = Bytes::from_mib(64);

type Lists = [(DeviceUuid, Vec<GpuProcess>)];

/// What managed memory there may be, on which boards that claims share, and on how many of these each process is.
pub(super) struct Managed<'a> {
    on: BTreeMap<&'a DeviceUuid, Bytes>,
    boards: HashMap<u32, u64>,
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
        let mut boards = HashMap::new();
        for (_, list) in lists.iter().filter(|(gpu, _)| on.contains_key(gpu)) {
            for pid in list.iter().map(|process| process.pid).collect::<BTreeSet<_>>() {
                *boards.entry(pid).or_insert(0) += 1;
            }
        }
        Self { on, boards }
    }

    /// Whose mappings are to be read.
    pub fn suspects(&self) -> BTreeSet<u32> {
        self.boards.keys().copied().collect()
    }

    /// What a process may have on a board beside what NVML counts: never more than nobody accounts for there. Of several
    /// boards each is taken to have the same part.
    pub fn of(&self, gpu: &DeviceUuid, pid: u32, found: Option<ManagedMemory>) -> Bytes {
        let (Some(uncounted), Some(boards)) = (self.on.get(gpu), self.boards.get(&pid)) else {
            return Bytes(0);
        };
        match found {
            None => Bytes(0),
            Some(ManagedMemory::Mapped(all)) => Bytes(all.0 / boards).min(*uncounted),
            Some(ManagedMemory::Untold) => *uncounted,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::shares::tests::board;
    use super::*;
    use crate::model::claim::ClaimRef;
    use crate::model::share::{Grant, Isolation};
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
        assert_eq!(managed.of(&"GPU-1".into(), 1, Some(ManagedMemory::Mapped(MIB(600)))), MIB(300));
    }
}
