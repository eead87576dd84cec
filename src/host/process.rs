//! Processes of the host: when they started, who owns them, and how one is ended.
//!
//! A process is found by its PID and identified by PID and start time together, because PIDs are used again. Its
//! owner is named by its control group ([`cgroup`]).

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, ErrorKind};
use std::os::fd::{FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::libc;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use thiserror::Error;

use super::cgroup::{self, ProcessOwner};
use super::managed::{self, ManagedMemory};
use super::numbered::numbered;
use super::open_devices::{self, FileLook};
use crate::model::names::PodUid;
use crate::model::process::ProcessKey;

/// Inode of the first PID namespace, the one whose PIDs NVML tells (the kernel's `PROC_PID_INIT_INO`).
const HOST_PID_NAMESPACE: &str = "pid:[4026531836]";

/// The flag of a thread that is ending (the kernel's `linux/sched.h`).
const PF_EXITING: u32 = 0x4;

/// For processes that come while the others are listed. Those are all listed, whatever somebody starts.
const NEW_FOR: Duration = Duration::from_millis(250);
/// How often the threads of a process are listed of which some had ended before they were asked.
const TRIES: u32 = 8;

/// What is asked of the node's processes. Every verb blocks its thread, briefly.
pub trait Processes: Send + Sync + 'static {
    /// When the process started; none if there is no such process, or only its remains.
    fn started(&self, pid: u32) -> io::Result<Option<u64>>;

    /// The time now, as processes' starts are counted: clock ticks since the boot.
    fn now(&self) -> io::Result<u64>;

    /// Whose process it is; none if there is no such process any more.
    fn owner(&self, pid: u32) -> io::Result<Option<ProcessOwner>>;

    /// Does the process hold a device file of an NVIDIA GPU open?
    fn uses_gpu(&self, pid: u32) -> io::Result<bool>;

    /// How much managed memory the process has, which NVML counts for nobody.
    fn managed_memory(&self, pid: u32) -> io::Result<ManagedMemory>;

    /// All processes that are some pod's. Reads until then at most: how many there are, tenants say.
    fn by_pod(&self, until: Instant) -> io::Result<PodProcesses>;

    /// Looks for processes of pods that have devices open; [`FileLook::found`] has them. May never return.
    fn look_at_files(&self, look: &FileLook);

    /// Are the processes of the whole node shown here? If not, one that is missing proves nothing.
    fn are_all_shown(&self) -> bool;

    /// Are PIDs here those of the host? If not, NVML's may mean others.
    fn pids_are_the_hosts(&self) -> bool;

    /// Ends the process (SIGKILL), but never another one that has its PID now.
    fn end(&self, process: ProcessKey) -> Result<End, EndError>;
}

/// The processes of a node's pods. PIDs are in order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PodProcesses {
    pub by_pod: BTreeMap<PodUid, Vec<u32>>,
    /// May be any pod's: their control groups cannot be read.
    pub untold: Vec<u32>,
    /// Not all processes were looked at that came while the others were: somebody starts very many.
    pub is_cut: bool,
}

impl PodProcesses {
    /// In the place of a pod's UID: processes that may be any pod's.
    pub const UNTOLD: &str = "unreadable-control-group";
}

/// What became of a process that was to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// It was told to; the kernel clears it away.
    Signalled,
    /// It had ended before.
    Gone,
}

/// Why a process was not ended.
#[derive(Debug, Error)]
pub enum EndError {
    #[error("process {0} is never ended from here: it is the first process of the system, or this one")]
    Protected(u32),
    #[error(
        "{root} has other process numbers than this process sees, so process {pid} is not ended; give the \
         plugin the host's PID namespace (hostPID: true) and its own /proc"
    )]
    OtherNumbers { root: PathBuf, pid: u32 },
    #[error("cannot read what process {pid} is")]
    Read { pid: u32, source: io::Error },
    #[error("cannot end process {pid}; does the plugin run as root in a privileged container?")]
    Signal { pid: u32, source: io::Error },
}

/// The PID namespace of the PIDs that NVML reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PidNamespace {
    /// The host's, as with a real driver. Such PIDs are used only if this process is in that namespace.
    #[default]
    Host,
    /// The namespace of this process: simulated GPUs.
    Own,
}

/// The processes below a proc file system, normally /proc.
#[derive(Debug, Clone)]
pub struct LocalProcesses {
    pub root: PathBuf,
    pub nvml_pids: PidNamespace,
}

impl LocalProcesses {
    fn path(&self, pid: u32, name: &str) -> PathBuf {
        self.root.join(pid.to_string()).join(name)
    }

    fn read(&self, pid: u32, name: &str) -> io::Result<Option<String>> {
        match std::fs::read(self.path(pid, name)) {
            // A process may call itself anything.
            Ok(bytes) => Ok(Some(String::from_utf8_lossy(&bytes).into_owned())),
            Err(error) if is_gone(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// A process whose first thread has ended is shown as the remains of one, and goes on with the others.
    fn has_other_threads(&self, pid: u32) -> bool {
        std::fs::read_dir(self.path(pid, "task")).is_ok_and(|tasks| tasks.take(2).count() > 1)
    }

    /// False if it has ended. One of which that cannot be told has not.
    fn is_there(&self, pid: u32) -> bool {
        self.started(pid).map_or(true, |started| started.is_some())
    }

    /// Its first thread has ended, or is ending: closing its files can take for as long as a file server wants.
    fn is_first_ending(&self, pid: u32) -> io::Result<bool> {
        let stat = self.read(pid, "stat")?;
        let has_ended = |stat: &str| started(stat).is_some_and(|(_, first_ended)| first_ended);
        Ok(stat.is_some_and(|stat| has_ended(&stat) || is_ending(&stat)))
    }

    /// The control groups of a process or thread, `folder`; none if it has ended.
    fn groups(folder: &Path) -> io::Result<Option<ControlGroups>> {
        match std::fs::read(folder.join("cgroup")) {
            Ok(bytes) => Ok(Some(ControlGroups::Named(String::from_utf8_lossy(&bytes).into_owned()))),
            Err(error) if is_gone(&error) => Ok(None),
            Err(error) if error.raw_os_error() == Some(Errno::ENAMETOOLONG as i32) => {
                Ok(Some(ControlGroups::Hidden))
            }
            Err(error) => Err(error),
        }
    }

    /// The pod that one of the threads of a process is of; none if all have ended. Where some have ended each time before
    /// they were asked, and others had come instead, nobody knows.
    fn owner_of_threads(
        pid: u32,
        mut listed: impl FnMut() -> io::Result<Vec<PathBuf>>,
    ) -> io::Result<Option<ProcessOwner>> {
        let mut known = BTreeSet::new();
        for nth in 0..TRIES {
            let threads = listed()?;
            if threads.is_empty() {
                return Ok(None);
            }
            let (before, mut has_ended) = (known.len(), false);
            for thread in threads {
                let owner = match Self::groups(&thread)? {
                    None => None,
                    Some(ControlGroups::Hidden) => Some(ProcessOwner::Hidden),
                    // In v1 each thread that is ending is at the root, in whatever group it was.
                    Some(ControlGroups::Named(text)) if cgroup::is_at_a_root(&text) && is_past(&thread) => {
                        None
                    }
                    Some(ControlGroups::Named(text)) => Some(cgroup::owner(&text)),
                };
                match owner {
                    Some(ProcessOwner::Host) => {}
                    Some(owner) => return Ok(Some(owner)),
                    None => has_ended |= !thread.ends_with(pid.to_string()),
                }
                known.insert(thread);
            }
            if !has_ended || (nth > 0 && known.len() == before) {
                return Ok(Some(ProcessOwner::Host));
            }
        }
        Ok(Some(ProcessOwner::Hidden))
    }

    /// The GPUs are, and no driver opens their device nodes.
    pub(super) fn are_simulated(&self) -> bool {
        self.nvml_pids == PidNamespace::Own
    }

    /// What is read below the root must be about the processes that a signal reaches.
    pub(super) fn numbers_as_we_do(&self) -> bool {
        let own = std::fs::read_link(self.root.join("self"));
        own.is_ok_and(|own| own.to_str() == Some(std::process::id().to_string().as_str()))
    }
}

impl Processes for LocalProcesses {
    fn started(&self, pid: u32) -> io::Result<Option<u64>> {
        let Some(stat) = self.read(pid, "stat")? else { return Ok(None) };
        let Some((started, first_ended)) = started(&stat) else {
            let words = format!("{} is not understood", self.path(pid, "stat").display());
            return Err(io::Error::new(ErrorKind::InvalidData, words));
        };
        Ok((!first_ended || self.has_other_threads(pid)).then_some(started))
    }

    fn now(&self) -> io::Result<u64> {
        let path = self.root.join("uptime");
        uptime(&std::fs::read_to_string(&path)?).ok_or_else(|| {
            io::Error::new(ErrorKind::InvalidData, format!("{} is not understood", path.display()))
        })
    }

    fn owner(&self, pid: u32) -> io::Result<Option<ProcessOwner>> {
        let text = match Self::groups(&self.root.join(pid.to_string()))? {
            None => return Ok(None),
            Some(ControlGroups::Hidden) => return Ok(Some(ProcessOwner::Hidden)),
            Some(ControlGroups::Named(text)) => text,
        };
        let owner = cgroup::owner(&text);
        // In v1 a first thread that is ending, or has ended, is shown in no group, while the others go on in theirs.
        if owner == ProcessOwner::Host && cgroup::is_at_a_root(&text) && self.is_first_ending(pid)? {
            return Self::owner_of_threads(pid, || entries(&self.path(pid, "task")));
        }
        Ok(Some(owner))
    }

    fn uses_gpu(&self, pid: u32) -> io::Result<bool> {
        let is_gpu = |link: PathBuf| {
            let name = link.file_name().and_then(|name| name.to_str()).unwrap_or_default().to_owned();
            name.starts_with("nvidia") && link.parent().is_some_and(|folder| folder.ends_with("dev"))
        };
        let files = entries(&self.path(pid, "fd"))?;
        let folders = match files.is_empty() {
            false => vec![files],
            // The first thread may have ended: then its files are shown with the others.
            true => {
                let tasks = entries(&self.path(pid, "task"))?;
                tasks.iter().map(|task| entries(&task.join("fd"))).collect::<io::Result<_>>()?
            }
        };
        // A file that was closed meanwhile is none.
        Ok(folders.iter().flatten().any(|file| std::fs::read_link(file).is_ok_and(is_gpu)))
    }

    fn managed_memory(&self, pid: u32) -> io::Result<ManagedMemory> {
        let devices = std::fs::read_to_string(self.root.join("devices")).unwrap_or_default();
        managed::managed_memory(&self.root.join(pid.to_string()), managed::uvm_number(&devices))
    }

    fn by_pod(&self, until: Instant) -> io::Result<PodProcesses> {
        let mut found = PodProcesses::default();
        let mut listing = numbered(&self.root, NEW_FOR)?;
        for pid in listing.by_ref() {
            if Instant::now() >= until {
                let words = "there are more processes, or remains of some, than can be looked at in time";
                return Err(io::Error::new(ErrorKind::TimedOut, words));
            }
            let pid = pid?;
            // One process that cannot be read hides no other.
            let pids = match self.owner(pid) {
                Ok(None | Some(ProcessOwner::Host)) => continue,
                Ok(Some(ProcessOwner::Pod { pod, .. })) if self.is_there(pid) => {
                    found.by_pod.entry(pod).or_default()
                }
                Ok(Some(ProcessOwner::Hidden)) | Err(_) if self.is_there(pid) => &mut found.untold,
                Ok(Some(ProcessOwner::Pod { .. } | ProcessOwner::Hidden)) | Err(_) => continue,
            };
            pids.push(pid);
        }
        found.is_cut = listing.is_cut();
        for pids in found.by_pod.values_mut().chain([&mut found.untold]) {
            pids.sort_unstable();
            // One can be listed twice where others come and go.
            pids.dedup();
        }
        Ok(found)
    }

    fn look_at_files(&self, look: &FileLook) {
        open_devices::look_at_files(self, look)
    }

    fn are_all_shown(&self) -> bool {
        if self.nvml_pids == PidNamespace::Own {
            return true;
        }
        // Without the host's PID namespace the first process is one of this container: this one, as a rule.
        let group = |pid: u32| self.read(pid, "cgroup").ok().flatten();
        let own = std::process::id();
        own != 1 && group(1).is_some_and(|first| group(own).is_some_and(|own| own != first))
    }

    fn pids_are_the_hosts(&self) -> bool {
        if self.nvml_pids == PidNamespace::Own {
            return true;
        }
        let own = std::fs::read_link(self.root.join("self/ns/pid"));
        own.is_ok_and(|own| own.to_str() == Some(HOST_PID_NAMESPACE))
    }

    fn end(&self, process: ProcessKey) -> Result<End, EndError> {
        let pid = process.pid;
        if pid <= 1 || pid == std::process::id() {
            return Err(EndError::Protected(pid));
        }
        if !self.numbers_as_we_do() {
            return Err(EndError::OtherNumbers { root: self.root.clone(), pid });
        }
        // Opened first and compared afterwards: from then on the handle means this one process, whatever
        // becomes of its PID.
        let handle = match handle(pid) {
            Err(Errno::ESRCH) => return Ok(End::Gone),
            handle => handle.ok(),
        };
        let started = self.started(pid).map_err(|source| EndError::Read { pid, source })?;
        if started != Some(process.started) {
            return Ok(End::Gone);
        }
        let told = match handle {
            Some(handle) => signal(&handle),
            // Kernels before 5.3: the moment between comparing and ending stays.
            None => kill(Pid::from_raw(pid.cast_signed()), Signal::SIGKILL),
        };
        match told {
            Ok(()) => Ok(End::Signalled),
            Err(Errno::ESRCH) => Ok(End::Gone),
            Err(errno) => Err(EndError::Signal { pid, source: errno.into() }),
        }
    }
}

/// What /proc says of the control groups of a process or thread.
enum ControlGroups {
    /// Their lines.
    Named(String),
    /// One has a longer name than the kernel tells.
    Hidden,
}

/// A file of /proc is not there, or its process ended while it was read.
pub(super) fn is_gone(error: &io::Error) -> bool {
    error.kind() == ErrorKind::NotFound || error.raw_os_error() == Some(Errno::ESRCH as i32)
}

/// The paths of what is in a folder of a process; none if the process has ended.
fn entries(folder: &Path) -> io::Result<Vec<PathBuf>> {
    match std::fs::read_dir(folder) {
        Ok(entries) => Ok(entries.flatten().map(|entry| entry.path()).collect()),
        Err(error) if is_gone(&error) => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

/// The start time out of proc_pid_stat(5): field 22; the second field is the process's name, in brackets,
/// and may hold anything. And whether its first thread has ended, and waits for its parent or for the others.
fn started(stat: &str) -> Option<(u64, bool)> {
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_ascii_whitespace();
    let state = fields.next()?;
    // Field 3 is read; 22 is the nineteenth from here.
    let started = fields.nth(18)?.parse().ok()?;
    Some((started, matches!(state, "Z" | "X" | "x")))
}

/// A thread is ending, or has ended.
fn is_past(thread: &Path) -> bool {
    let stat = std::fs::read(thread.join("stat")).unwrap_or_default();
    let stat = String::from_utf8_lossy(&stat);
    started(&stat).is_none_or(|(_, has_ended)| has_ended) || is_ending(&stat)
}

/// `PF_EXITING` in the flags of proc_pid_stat(5): field 9.
fn is_ending(stat: &str) -> bool {
    let fields = stat.rsplit_once(')').map(|(_, rest)| rest.split_ascii_whitespace());
    let flags = fields.and_then(|mut fields| fields.nth(6)?.parse::<u32>().ok());
    flags.is_some_and(|flags| flags & PF_EXITING != 0)
}

/// The first number of proc_uptime(5), seconds with two decimals, in clock ticks: a hundred a second, as Linux has them
/// for programs on every architecture that this one is built for.
fn uptime(text: &str) -> Option<u64> {
    let (seconds, hundredths) = text.split_ascii_whitespace().next()?.split_once('.')?;
    let hundredths: u64 = hundredths.parse().ok().filter(|_| hundredths.len() == 2)?;
    seconds.parse::<u64>().ok()?.checked_mul(100)?.checked_add(hundredths)
}

/// `pidfd_open(2)`
#[allow(unsafe_code)]
fn handle(pid: u32) -> Result<OwnedFd, Errno> {
    // SAFETY: the call takes two numbers and no pointers.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid.cast_signed(), 0) };
    let fd = Errno::result(fd)?;
    let fd = i32::try_from(fd).map_err(|_| Errno::EBADF)?;
    // SAFETY: the kernel gave this file descriptor just now, to nobody else.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// `pidfd_send_signal(2)` with SIGKILL.
#[allow(unsafe_code)]
fn signal(handle: &OwnedFd) -> Result<(), Errno> {
    use std::os::fd::AsRawFd;
    let info = std::ptr::null::<libc::siginfo_t>();
    // SAFETY: the descriptor is open; a null siginfo is allowed and means that of kill(2).
    let told =
        unsafe { libc::syscall(libc::SYS_pidfd_send_signal, handle.as_raw_fd(), libc::SIGKILL, info, 0) };
    Errno::result(told).map(drop)
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Child, Command};

    use super::*;

    fn child() -> Child {
        Command::new("sleep").arg("600").spawn().unwrap()
    }

    fn real() -> LocalProcesses {
        LocalProcesses { root: "/proc".into(), nvml_pids: PidNamespace::Host }
    }

    fn key(child: &Child) -> ProcessKey {
        let pid = child.id();
        ProcessKey { pid, started: real().started(pid).unwrap().unwrap() }
    }

    #[test]
    fn a_name_full_of_brackets_does_not_move_the_fields() {
        let line = |name: &str, state: &str| {
            format!("42 ({name}) {state} 1 42 42 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 987654 0 0")
        };
        assert_eq!(started(&line("sleep", "S")), Some((987_654, false)));
        assert_eq!(started(&line("a) R 1 2 (b", "D")), Some((987_654, false)));
        assert_eq!(started(&line("sleep", "Z")), Some((987_654, true)));
        for bad in ["", "42 sleep S", "42 (sleep) S 1 2 3", "42 (sleep)"] {
            assert_eq!(started(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn the_time_is_counted_as_the_starts_of_processes_are() {
        assert_eq!(uptime("123.45 678.90\n"), Some(12_345));
        for bad in ["", "123 4", "123.4 5", "x.45 6", "184467440737095517.00 1"] {
            assert_eq!(uptime(bad), None, "{bad:?}");
        }
        let before = real().now().unwrap();
        let mut child = child();
        let started = real().started(child.id()).unwrap().unwrap();
        let after = real().now().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        assert!((before..=after).contains(&started), "{before} {started} {after}");
    }

    /// A /proc of the test's making with one process, its state, control group and threads.
    fn shown(pid: u32, state: &str, group: &str, threads: u32) -> (tempfile::TempDir, LocalProcesses) {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join(pid.to_string());
        for thread in 0..threads {
            std::fs::create_dir_all(folder.join(format!("task/{}/fd", pid + thread))).unwrap();
        }
        std::fs::create_dir_all(folder.join("fd")).unwrap();
        let stat = format!("{pid} (x) {state} 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 77 0 0\n");
        std::fs::write(folder.join("stat"), stat).unwrap();
        std::fs::write(folder.join("cgroup"), format!("0::{group}\n")).unwrap();
        let processes = LocalProcesses { root: root.path().to_owned(), nvml_pids: PidNamespace::Own };
        (root, processes)
    }

    const POD: &str = "11111111-0000-4000-8000-000000000001";

    fn by_pod(processes: &LocalProcesses) -> PodProcesses {
        processes.by_pod(Instant::now() + Duration::from_secs(60)).unwrap()
    }

    /// One process of the pod.
    fn one() -> PodProcesses {
        PodProcesses { by_pod: BTreeMap::from([(PodUid::new(POD), vec![4711])]), ..PodProcesses::default() }
    }

    /// Reading that fails as the kernel does for a control group whose name is longer than it tells: the name that this link
    /// leads to is too long as well.
    fn hide(group: &Path) {
        let _ = std::fs::remove_file(group);
        std::os::unix::fs::symlink("x".repeat(300), group).unwrap();
        let error = std::fs::read(group).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(Errno::ENAMETOOLONG as i32));
    }

    /// Shows one more process in the same /proc, and returns its folder.
    fn show_another(root: &Path, pid: u32, state: &str) -> PathBuf {
        let folder = root.join(pid.to_string());
        std::fs::create_dir_all(folder.join(format!("task/{pid}"))).unwrap();
        let stat = format!("{pid} (x) {state} 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 77 0 0\n");
        std::fs::write(folder.join("stat"), stat).unwrap();
        folder
    }

    #[test]
    fn the_processes_of_a_pod_are_found_and_remains_are_none() {
        let pod = format!("/kubepods/pod{POD}/c");
        for (state, group, threads, expected) in [
            ("S", pod.as_str(), 1, true),
            ("D", pod.as_str(), 1, true),
            ("S", "/system.slice/job.service", 1, false),
            ("Z", pod.as_str(), 1, false),
            // The first thread has ended and another one goes on: it holds what the process holds.
            ("Z", pod.as_str(), 2, true),
        ] {
            let (_root, processes) = shown(4711, state, group, threads);
            let wanted = if expected { one() } else { PodProcesses::default() };
            assert_eq!(by_pod(&processes), wanted, "{state} {group} {threads}");
        }
        let real = by_pod(&real());
        assert!(real.by_pod.values().all(|pids| !pids.is_empty()));
        assert_eq!(real.untold, [] as [u32; 0]);
    }

    #[test]
    fn a_process_whose_group_cannot_be_read_is_told_apart_and_hides_no_other() {
        let (root, processes) = shown(4711, "S", &format!("/kubepods/pod{POD}/c"), 1);
        // By any other error than that it has ended, before and behind the other one.
        for pid in [12, 4712] {
            std::fs::create_dir(show_another(root.path(), pid, "S").join("cgroup")).unwrap();
        }
        let hidden = show_another(root.path(), 4713, "S");
        hide(&hidden.join("cgroup"));
        // Its remains hold nothing.
        hide(&show_another(root.path(), 4714, "Z").join("cgroup"));
        assert_eq!(by_pod(&processes), PodProcesses { untold: vec![12, 4712, 4713], ..one() });
        assert_eq!(processes.owner(4713).unwrap(), Some(ProcessOwner::Hidden));
        let error = processes.owner(4712).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(Errno::EISDIR as i32));
        std::fs::remove_dir_all(hidden).unwrap();
        assert_eq!(processes.owner(4713).unwrap(), None, "it has ended");
    }

    #[test]
    fn more_processes_than_there_is_time_for_are_not_taken_for_all() {
        let (_root, processes) = shown(4711, "S", &format!("/kubepods/pod{POD}/c"), 1);
        let error = processes.by_pod(Instant::now()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
    }

    /// As the kernel shows it in v1: the first thread's groups are all `/`.
    #[test]
    fn a_process_whose_first_thread_has_ended_is_still_its_pods() {
        let (root, processes) = shown(4711, "Z", "/", 2);
        assert_eq!(by_pod(&processes), PodProcesses::default(), "its threads have all ended");
        std::fs::write(root.path().join("4711/cgroup"), "8:pids:/\n1:name=systemd:/\n").unwrap();
        let thread = |group: &str| format!("8:pids:{group}\n1:name=systemd:{group}\n");
        let of = |number: u32| root.path().join(format!("4711/task/{number}/cgroup"));
        let stat = |flags: u32| format!("4712 (x) R 1 1 1 0 -1 {flags} 0 0 0 0 0 0 0 0 20 0 1 0 77 0 0\n");
        std::fs::write(of(4712), thread("/")).unwrap();
        // One that is ending is at the root, whosever it was: while others come, it proves nothing.
        for (flags, comes, wanted) in [
            (4_194_564, true, ProcessOwner::Hidden),
            (4_194_564, false, ProcessOwner::Host),
            (4_194_560, false, ProcessOwner::Host),
        ] {
            std::fs::write(of(4712).with_file_name("stat"), stat(flags)).unwrap();
            let mut more = 4713;
            let owner = LocalProcesses::owner_of_threads(4711, || {
                more += u32::from(comes);
                let threads = [4711, 4712, more].map(|number| of(number).parent().unwrap().to_owned());
                Ok(threads.into())
            });
            assert_eq!(owner.unwrap(), Some(wanted), "{flags} {comes}");
        }
        assert_eq!(LocalProcesses::owner_of_threads(4711, || Ok(Vec::new())).unwrap(), None);
        std::fs::write(of(4711), thread("/")).unwrap();
        std::fs::write(of(4712), thread(&format!("/kubepods/pod{POD}/c"))).unwrap();
        assert_eq!(by_pod(&processes), one());
        // Nor is it the host's where the others hide.
        hide(&of(4712));
        assert_eq!(by_pod(&processes), PodProcesses { untold: vec![4711], ..PodProcesses::default() });
    }

    /// Closing files of a server that does not answer, the first thread ends for as long as that wants.
    #[test]
    fn a_process_whose_first_thread_is_ending_is_still_its_pods() {
        let (root, processes) = shown(4711, "D", "/", 2);
        std::fs::write(root.path().join("4711/cgroup"), "8:pids:/\n1:name=systemd:/\n").unwrap();
        let thread = format!("8:pids:/kubepods/pod{POD}/c\n");
        std::fs::write(root.path().join("4711/task/4712/cgroup"), thread).unwrap();
        assert_eq!(by_pod(&processes), PodProcesses::default(), "the host's own, such as one of the kernel");
        let stat = "4711 (x) D 1 1 1 0 -1 4194564 0 0 0 0 0 0 0 0 20 0 1 0 77 0 0\n";
        std::fs::write(root.path().join("4711/stat"), stat).unwrap();
        assert_eq!(by_pod(&processes), one());
        assert!(!is_ending("4711 (x) D 1") && !is_ending(""));
    }

    #[test]
    fn files_of_a_process_whose_first_thread_has_ended_count() {
        let (root, processes) = shown(4711, "Z", "/", 2);
        assert!(!processes.uses_gpu(4711).unwrap());
        std::os::unix::fs::symlink("/dev/nvidia3", root.path().join("4711/task/4712/fd/9")).unwrap();
        assert!(processes.uses_gpu(4711).unwrap());
    }

    #[test]
    fn the_whole_node_is_shown_where_the_first_process_is_not_of_this_container() {
        let own = std::process::id();
        let (root, mut processes) = shown(1, "S", "/init.scope", 1);
        processes.nvml_pids = PidNamespace::Host;
        std::fs::create_dir_all(root.path().join(own.to_string())).unwrap();
        let group = root.path().join(format!("{own}/cgroup"));
        std::fs::write(&group, "0::/kubepods/x\n").unwrap();
        assert!(processes.are_all_shown());
        std::fs::write(&group, "0::/init.scope\n").unwrap();
        assert!(!processes.are_all_shown());
    }

    #[test]
    fn the_process_that_is_meant_ends() {
        let mut child = child();
        assert_eq!(real().end(key(&child)).unwrap(), End::Signalled);
        assert_eq!(child.wait().unwrap().signal(), Some(9));
    }

    #[test]
    fn another_process_with_the_same_pid_is_left_alone() {
        let mut child = child();
        let before = ProcessKey { started: key(&child).started - 1, ..key(&child) };
        assert_eq!(real().end(before).unwrap(), End::Gone);
        assert!(child.try_wait().unwrap().is_none(), "it lives");
        child.kill().unwrap();
        let pid = child.id();
        child.wait().unwrap();
        assert_eq!(real().end(ProcessKey { pid, started: 1 }).unwrap(), End::Gone);
        assert_eq!(real().started(pid).unwrap(), None);
        assert_eq!(real().owner(pid).unwrap(), None);
    }

    #[test]
    fn nothing_is_ended_by_numbers_of_another_namespace() {
        let mut child = child();
        let root = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("1", root.path().join("self")).unwrap();
        let elsewhere = LocalProcesses { root: root.path().to_owned(), nvml_pids: PidNamespace::Host };
        let words = elsewhere.end(key(&child)).unwrap_err().to_string();
        assert!(words.contains("hostPID"), "{words}");
        for own in [0, 1, std::process::id()] {
            let error = real().end(ProcessKey { pid: own, started: 0 }).unwrap_err();
            assert!(matches!(error, EndError::Protected(_)), "{error}");
        }
        assert!(child.try_wait().unwrap().is_none(), "it lives");
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn who_has_a_device_file_open_uses_a_gpu() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("dev")).unwrap();
        let file = std::fs::File::create(folder.path().join("dev/nvidia0")).unwrap();
        let mut user = Command::new("sleep").arg("600").stdin(file).spawn().unwrap();
        let mut other = child();
        assert!(real().uses_gpu(user.id()).unwrap());
        assert!(!real().uses_gpu(other.id()).unwrap());
        for child in [&mut user, &mut other] {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }
}
