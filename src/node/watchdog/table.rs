//! Host PIDs → processes and their owners, remembered for as long as the processes run.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use tracing::{info, warn};

use super::{UNSEEN_LOOKS, Watchdog};
use crate::host::cgroup::ProcessOwner;
use crate::host::{ManagedMemory, Processes};
use crate::model::names::DeviceUuid;
use crate::model::process::ProcessKey;
use crate::nvml::GpuProcess;

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
pub(super) struct Table {
    processes: Arc<dyn Processes>,
    known: HashMap<u32, KnownProcess>,
    /// Of those that were asked about it.
    managed: HashMap<u32, ManagedMemory>,
    on_host: bool,
}

impl Table {
    pub fn new(processes: Arc<dyn Processes>) -> Self {
        let on_host = processes.pids_are_the_hosts();
        Self { processes, known: HashMap::new(), managed: HashMap::new(), on_host }
    }

    /// Learns of these processes and forgets the others.
    pub fn look(&mut self, pids: &BTreeSet<u32>) {
        let mut before = std::mem::take(&mut self.known);
        for &pid in pids {
            // A process that cannot be read is one that is not known: nothing follows from it.
            let Ok(Some(started)) = self.processes.started(pid) else { continue };
            let process = ProcessKey { pid, started };
            let same = before.remove(&pid).filter(|known| known.process == process && known.is_settled());
            if let Some(known) = same.or_else(|| self.read(process)) {
                self.known.insert(pid, known);
            }
        }
    }

    /// Notes what managed memory those have that were asked about it.
    pub fn note_managed(&mut self, found: HashMap<u32, ManagedMemory>) {
        self.managed = found;
    }

    /// Returns those of these processes that have ended. A process that cannot be read has not.
    pub fn ended(&self, processes: &[ProcessKey]) -> Vec<ProcessKey> {
        let has_ended = |process: &&ProcessKey| {
            let is_known = self.get(process.pid).is_some_and(|known| known.process == **process);
            !is_known
                && self.processes.started(process.pid).is_ok_and(|started| started != Some(process.started))
        };
        processes.iter().filter(has_ended).copied().collect()
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
    /// Finds out what stands behind the PIDs. False if that cannot be read in time.
    pub(super) async fn read_processes(&mut self, answers: &[(DeviceUuid, Vec<GpuProcess>)]) -> bool {
        let pids: BTreeSet<u32> = answers.iter().flat_map(|(_, list)| list.iter().map(|p| p.pid)).collect();
        // A reader that was left took its memory along: all is read anew.
        let table = self.table.take();
        let mut table = table.unwrap_or_else(|| Table::new(self.parts.processes.clone()));
        let (asked, remembered) = (pids.clone(), self.detours.take_due(pids.len()));
        let read = move || {
            table.look(&asked);
            let ended = table.ended(&remembered);
            (table, ended)
        };
        let (mut table, ended) = match self.threads.reader.run(read).await {
            Ok(read) => read,
            Err(problem) => {
                self.parts.metrics.unmade_reads.inc();
                if !std::mem::replace(&mut self.logged_failures.reads, true) {
                    warn!(problem, "processes on GPUs cannot be read; tried again at every look");
                }
                return false;
            }
        };
        if std::mem::take(&mut self.logged_failures.reads) {
            info!("processes on GPUs are read again");
        }
        table.note_managed(self.read_managed(answers).await);
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
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::host::{LocalProcesses, PidNamespace};

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
        let mut table = Table::new(Arc::new(processes.clone()));
        let pids = BTreeSet::from([11, 12]);
        let process = ProcessKey { pid: 11, started: 7 };
        let known = KnownProcess { process, owner: ProcessOwner::Hidden, believed: true };
        for _ in 0..2 {
            table.look(&pids);
            assert_eq!((table.get(11), table.get(12)), (Some(&known), None));
            let _ = fs::remove_file(&group);
            fs::write(&group, "0::/kubepods/pod11111111-0000-4000-8000-000000000001/c\n").unwrap();
        }
        table.look(&BTreeSet::new());
        table.look(&pids);
        assert!(matches!(table.get(11).unwrap().owner, ProcessOwner::Pod { .. }), "not listed in between");
        // Where the numbers may mean others, it takes a device file.
        fs::remove_file(&group).unwrap();
        std::os::unix::fs::symlink("x".repeat(300), &group).unwrap();
        processes.nvml_pids = PidNamespace::Host;
        let mut table = Table::new(Arc::new(processes));
        table.look(&pids);
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
        let table = Table::new(Arc::new(processes));
        let key = |pid| ProcessKey { pid, started: 7 };
        assert_eq!(table.ended(&[11, 12, 13, 14].map(key)), [12, 14].map(key));
    }
}
