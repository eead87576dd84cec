//! Host PIDs → processes and their owners, remembered for as long as the processes run.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::{info, warn};

use super::{UNSEEN_LOOKS, Watchdog};
use crate::host::cgroup::ProcessOwner;
use crate::host::{ManagedMemory, Processes};
use crate::model::names::DeviceUuid;
use crate::model::process::ProcessKey;
use crate::nvml::GpuProcess;

/// So long may one look read; shorter than what its thread is given, so that it brings along what it has read. Where that is
/// not enough (thousands of processes, and little CPU for this one), several looks read a part each.
const LOOK_LIMIT: Duration = Duration::from_secs(1);

/// What is known of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct KnownProcess {
    pub process: ProcessKey,
    pub owner: ProcessOwner,
    /// It really is a process that uses a GPU: NVML's PIDs are the host's, and where ours are others, or where
    /// the process is the host's own, it must hold a GPU's device file open to be believed one.
    pub believed: bool,
}

/// Blocks its thread while it reads. A process that stays costs one read at each look.
pub(super) struct ProcessTable {
    processes: Arc<dyn Processes>,
    known: HashMap<u32, KnownProcess>,
    /// Those that a look did get to which had not time enough for all.
    looked_at: BTreeSet<u32>,
    /// Of those that were asked about it.
    managed: HashMap<u32, ManagedMemory>,
    on_host: bool,
}

impl ProcessTable {
    pub fn new(processes: Arc<dyn Processes>) -> Self {
        let on_host = processes.pids_are_the_hosts();
        let (known, managed) = (HashMap::new(), HashMap::new());
        Self { processes, known, looked_at: BTreeSet::new(), managed, on_host }
    }

    /// Learns of these processes, until then or of one at least, and forgets the others. False: it did not get to all, and
    /// the next look goes on with the rest.
    pub fn look(&mut self, pids: &BTreeSet<u32>, until: Instant) -> bool {
        let mut before = std::mem::take(&mut self.known);
        let mut looked_at = std::mem::take(&mut self.looked_at);
        looked_at.retain(|pid| pids.contains(pid));
        let mut is_over = false;
        for &pid in pids {
            let known = before.remove(&pid);
            let known = if is_over || !looked_at.insert(pid) {
                known
            } else {
                let now = self.look_at(pid, known);
                is_over = Instant::now() >= until;
                now
            };
            if let Some(known) = known {
                self.known.insert(pid, known);
            }
        }
        let is_whole = looked_at.len() == pids.len();
        if !is_whole {
            self.looked_at = looked_at;
        }
        is_whole
    }

    /// What is known of a process now. One that cannot be read is not known: nothing follows from it.
    fn look_at(&self, pid: u32, before: Option<KnownProcess>) -> Option<KnownProcess> {
        let process = ProcessKey { pid, started: self.processes.started(pid).ok().flatten()? };
        let same = before.filter(|known| known.process == process && known.is_settled());
        same.or_else(|| self.read(process))
    }

    /// Notes what managed memory those have that were asked about it.
    pub fn note_managed(&mut self, found: HashMap<u32, ManagedMemory>) {
        self.managed = found;
    }

    /// Returns those of these processes that have ended, as far as that can be told until then. A process that cannot be read
    /// has not.
    pub fn ended(&self, processes: &[ProcessKey], until: Instant) -> Vec<ProcessKey> {
        let has_ended = |process: &&ProcessKey| {
            let is_known = self.get(process.pid).is_some_and(|known| known.process == **process);
            !is_known
                && self.processes.started(process.pid).is_ok_and(|started| started != Some(process.started))
        };
        let in_time = processes.iter().take_while(|_| Instant::now() < until);
        in_time.filter(has_ended).copied().collect()
    }

    fn read(&self, process: ProcessKey) -> Option<KnownProcess> {
        let owner = self.processes.owner(process.pid).ok().flatten()?;
        let sure = self.on_host && owner != ProcessOwner::Host;
        let believed = sure || self.processes.uses_gpu(process.pid).unwrap_or(false);
        Some(KnownProcess { process, owner, believed })
    }

    pub fn get(&self, pid: u32) -> Option<&KnownProcess> {
        self.known.get(&pid)
    }

    /// None: it was not asked about, or cannot be read.
    pub fn managed(&self, pid: u32) -> Option<ManagedMemory> {
        self.managed.get(&pid).copied()
    }
}

impl KnownProcess {
    /// Nothing about it changes any more. A process of the host may yet be moved into a pod. One that has hidden stays
    /// hidden, or it would show itself at every other look.
    fn is_settled(&self) -> bool {
        self.believed && self.owner != ProcessOwner::Host
    }
}

impl Watchdog {
    /// Finds out what stands behind the PIDs. False if that cannot be read in time, or not all of it.
    pub(super) async fn read_processes(&mut self, answers: &[(DeviceUuid, Vec<GpuProcess>)]) -> bool {
        let pids: BTreeSet<u32> = answers.iter().flat_map(|(_, list)| list.iter().map(|p| p.pid)).collect();
        // A reader that was left took its memory along: all is read anew.
        let table = self.table.take();
        let mut table = table.unwrap_or_else(|| ProcessTable::new(self.parts.processes.clone()));
        let (asked, remembered) = (pids.clone(), self.detours.take_due(pids.len()));
        let until = Instant::now() + LOOK_LIMIT;
        let read = move || {
            let is_whole = table.look(&asked, until);
            let ended = table.ended(&remembered, until);
            (table, is_whole, ended)
        };
        let (mut table, ended) = match self.threads.reader.run(read).await {
            Ok((table, true, ended)) => (table, ended),
            Ok((table, false, _)) => {
                self.table = Some(table);
                self.note_unread(format!("{} are too many to be read within {LOOK_LIMIT:?}", pids.len()));
                return false;
            }
            Err(problem) => {
                self.note_unread(problem);
                return false;
            }
        };
        if std::mem::take(&mut self.logged_failures.reads) {
            info!("processes on GPUs are read again");
        }
        let managed = self.read_managed(answers, &table).await;
        table.note_managed(managed);
        self.detours.forget(&ended);
        let unseen = pids.iter().filter(|pid| table.get(**pid).is_none()).count();
        self.table = Some(table);
        self.logged_failures.unseen_looks =
            if unseen == 0 { 0 } else { self.logged_failures.unseen_looks + 1 };
        if self.logged_failures.unseen_looks == UNSEEN_LOOKS {
            warn!(
                processes = unseen,
                "NVML reports processes on GPUs that /proc does not show; what they use is not counted: \
                 give the plugin the host's PID namespace (hostPID: true)"
            );
        }
        true
    }

    fn note_unread(&mut self, problem: String) {
        self.parts.metrics.unmade_reads.inc();
        if !std::mem::replace(&mut self.logged_failures.reads, true) {
            warn!(problem, "processes on GPUs cannot be read; the next look goes on");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::host::{LocalProcesses, PidNamespace};

    fn later() -> Instant {
        Instant::now() + Duration::from_secs(600)
    }

    #[test]
    fn looks_without_time_for_all_processes_get_to_each_of_them() {
        let root = tempfile::tempdir().unwrap();
        let start_again = |pid: u32, started: u32| {
            let folder = root.path().join(pid.to_string());
            fs::create_dir_all(&folder).unwrap();
            let stat = format!("{pid} (x) S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 {started} 0 0\n");
            fs::write(folder.join("stat"), stat).unwrap();
            let pod = "0::/kubepods/pod11111111-0000-4000-8000-000000000001/c\n";
            fs::write(folder.join("cgroup"), pod).unwrap();
        };
        let pids: BTreeSet<u32> = (11..=14).collect();
        pids.iter().for_each(|pid| start_again(*pid, 7));
        let processes = LocalProcesses { root: root.path().to_owned(), nvml_pids: PidNamespace::Own };
        let mut table = ProcessTable::new(Arc::new(processes));
        let started = |table: &ProcessTable| {
            let known = pids.iter().map(|pid| table.get(*pid).map(|known| known.process.started));
            known.collect::<Vec<_>>()
        };
        let over = Instant::now();
        let whole: Vec<bool> = (0..4).map(|_| table.look(&pids, over)).collect();
        assert_eq!((whole, started(&table)), (vec![false, false, false, true], vec![Some(7); 4]));
        // Round by round, and what is known of one stays until its turn.
        pids.iter().for_each(|pid| start_again(*pid, 8));
        assert!(!table.look(&pids, over));
        assert_eq!(started(&table), [Some(8), Some(7), Some(7), Some(7)]);
        // Who is not listed any more is forgotten, and need not be looked at.
        let fewer = BTreeSet::from([11, 14]);
        assert!(table.look(&fewer, over));
        assert_eq!(started(&table), [Some(8), None, None, Some(8)]);
        assert_eq!(table.ended(&[ProcessKey { pid: 14, started: 7 }], over), [], "there is no time left");
    }

    /// Or it would show itself at every other look. Of one that cannot be read for another reason nothing follows.
    #[test]
    fn who_was_seen_to_hide_stays_hidden() {
        let root = tempfile::tempdir().unwrap();
        let mut processes = LocalProcesses { root: root.path().to_owned(), nvml_pids: PidNamespace::Own };
        for pid in ["11", "12"] {
            fs::create_dir_all(root.path().join(pid).join("fd")).unwrap();
            let stat = format!("{pid} (x) S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 7 0 0\n");
            fs::write(root.path().join(pid).join("stat"), stat).unwrap();
        }
        let group = root.path().join("11/cgroup");
        // Reading it fails as the kernel does: the name is too long.
        std::os::unix::fs::symlink("x".repeat(300), &group).unwrap();
        fs::create_dir(root.path().join("12/cgroup")).unwrap();
        let mut table = ProcessTable::new(Arc::new(processes.clone()));
        let pids = BTreeSet::from([11, 12]);
        let process = ProcessKey { pid: 11, started: 7 };
        let known = KnownProcess { process, owner: ProcessOwner::Hidden, believed: true };
        for _ in 0..2 {
            assert!(table.look(&pids, later()));
            assert_eq!((table.get(11), table.get(12)), (Some(&known), None));
            let _ = fs::remove_file(&group);
            fs::write(&group, "0::/kubepods/pod11111111-0000-4000-8000-000000000001/c\n").unwrap();
        }
        table.look(&BTreeSet::new(), later());
        table.look(&pids, later());
        assert!(matches!(table.get(11).unwrap().owner, ProcessOwner::Pod { .. }), "not listed in between");
        // Where the numbers may mean others, it takes a device file.
        fs::remove_file(&group).unwrap();
        std::os::unix::fs::symlink("x".repeat(300), &group).unwrap();
        processes.nvml_pids = PidNamespace::Host;
        let mut table = ProcessTable::new(Arc::new(processes));
        table.look(&pids, later());
        assert!(!table.get(11).unwrap().believed);
    }

    #[test]
    fn a_process_has_ended_if_proc_says_so_and_not_if_it_cannot_be_read() {
        let root = tempfile::tempdir().unwrap();
        let stat = |started: &str| format!("1 (x) S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 {started} 0 0\n");
        // One that goes on, one whose PID came again, one that cannot be read.
        for (pid, text) in [("11", stat("7")), ("12", stat("9")), ("13", "?".to_owned())] {
            fs::create_dir(root.path().join(pid)).unwrap();
            fs::write(root.path().join(pid).join("stat"), text).unwrap();
        }
        let processes = LocalProcesses { root: root.path().to_owned(), nvml_pids: PidNamespace::Own };
        let table = ProcessTable::new(Arc::new(processes));
        let key = |pid| ProcessKey { pid, started: 7 };
        assert_eq!(table.ended(&[11, 12, 13, 14].map(key), later()), [12, 14].map(key));
    }
}
