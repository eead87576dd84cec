//! Processes of the host: when they started, whose they are, and how one is ended.
//!
//! A process is found by its PID and known by PID and start time together, because PIDs come again. Whose it
//! is, its control group tells ([`cgroup`]).

use std::io::{self, ErrorKind};
use std::os::fd::{FromRawFd, OwnedFd};
use std::path::PathBuf;

use nix::errno::Errno;
use nix::libc;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use thiserror::Error;

use super::cgroup::{self, Place};
use crate::model::process::ProcessKey;

/// Inode of the first PID namespace, the one whose PIDs NVML tells (the kernel's `PROC_PID_INIT_INO`).
const HOST_PID_NAMESPACE: &str = "pid:[4026531836]";

/// What is asked of the node's processes. Every verb blocks its thread, briefly.
pub trait Processes: Send + Sync + 'static {
    /// When the process started; none if there is no such process, or only its remains.
    fn started(&self, pid: u32) -> io::Result<Option<u64>>;

    /// Whose process it is; none if there is no such process any more.
    fn place(&self, pid: u32) -> io::Result<Option<Place>>;

    /// Does the process hold a device file of an NVIDIA GPU open?
    fn uses_gpu(&self, pid: u32) -> io::Result<bool>;

    /// Are PIDs here those of the host? If not, NVML's may mean others.
    fn pids_are_the_hosts(&self) -> bool;

    /// Ends the process (SIGKILL), but never another one that has its PID now.
    fn end(&self, process: ProcessKey) -> Result<End, EndError>;
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
        "{root} numbers processes otherwise than this process does, so process {pid} is not ended; give the \
         plugin the host's PID namespace (hostPID: true) and its own /proc"
    )]
    OtherNumbers { root: PathBuf, pid: u32 },
    #[error("cannot read what process {pid} is")]
    Read { pid: u32, source: io::Error },
    #[error("cannot end process {pid}; does the plugin run as root in a privileged container?")]
    Signal { pid: u32, source: io::Error },
}

/// Whose numbers NVML tells processes by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PidNumbers {
    /// The host's, as the driver does: believed only in the host's PID namespace.
    #[default]
    OfHost,
    /// Those of whatever PID namespace this process is in: simulated GPUs.
    AsSeen,
}

/// The processes below a proc file system, normally /proc.
#[derive(Debug, Clone)]
pub struct LocalProcesses {
    pub root: PathBuf,
    pub numbers: PidNumbers,
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

    /// What is read below the root must be about the processes that a signal reaches.
    fn numbers_as_we_do(&self) -> bool {
        let own = std::fs::read_link(self.root.join("self"));
        own.is_ok_and(|own| own.to_str() == Some(std::process::id().to_string().as_str()))
    }
}

impl Processes for LocalProcesses {
    fn started(&self, pid: u32) -> io::Result<Option<u64>> {
        let Some(stat) = self.read(pid, "stat")? else { return Ok(None) };
        started(&stat).map_err(|()| {
            let words = format!("{} is not understood", self.path(pid, "stat").display());
            io::Error::new(ErrorKind::InvalidData, words)
        })
    }

    fn place(&self, pid: u32) -> io::Result<Option<Place>> {
        Ok(self.read(pid, "cgroup")?.map(|text| cgroup::place(&text)))
    }

    fn uses_gpu(&self, pid: u32) -> io::Result<bool> {
        let entries = match std::fs::read_dir(self.path(pid, "fd")) {
            Ok(entries) => entries,
            Err(error) if is_gone(&error) => return Ok(false),
            Err(error) => return Err(error),
        };
        let is_gpu = |link: PathBuf| {
            let name = link.file_name().and_then(|name| name.to_str()).unwrap_or_default().to_owned();
            name.starts_with("nvidia") && link.parent().is_some_and(|folder| folder.ends_with("dev"))
        };
        // A file that was closed meanwhile is none.
        Ok(entries.flatten().any(|entry| std::fs::read_link(entry.path()).is_ok_and(is_gpu)))
    }

    fn pids_are_the_hosts(&self) -> bool {
        if self.numbers == PidNumbers::AsSeen {
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

/// A file of /proc is not there, or its process ended while it was read.
fn is_gone(error: &io::Error) -> bool {
    error.kind() == ErrorKind::NotFound || error.raw_os_error() == Some(Errno::ESRCH as i32)
}

/// The start time out of proc_pid_stat(5): field 22; the second field is the process's name, in brackets,
/// and may hold anything. None for a process that has ended and only waits for its parent.
fn started(stat: &str) -> Result<Option<u64>, ()> {
    let (_, rest) = stat.rsplit_once(')').ok_or(())?;
    let mut fields = rest.split_ascii_whitespace();
    let state = fields.next().ok_or(())?;
    if matches!(state, "Z" | "X" | "x") {
        return Ok(None);
    }
    // Field 3 is read; 22 is the nineteenth from here.
    fields.nth(18).and_then(|field| field.parse().ok()).map(Some).ok_or(())
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
        LocalProcesses { root: "/proc".into(), numbers: PidNumbers::OfHost }
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
        assert_eq!(started(&line("sleep", "S")), Ok(Some(987_654)));
        assert_eq!(started(&line("a) R 1 2 (b", "D")), Ok(Some(987_654)));
        assert_eq!(started(&line("sleep", "Z")), Ok(None), "remains of a process hold nothing");
        for bad in ["", "42 sleep S", "42 (sleep) S 1 2 3", "42 (sleep)"] {
            assert_eq!(started(bad), Err(()), "{bad:?}");
        }
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
        assert_eq!(real().place(pid).unwrap(), None);
    }

    #[test]
    fn nothing_is_ended_by_numbers_of_another_namespace() {
        let mut child = child();
        let root = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("1", root.path().join("self")).unwrap();
        let elsewhere = LocalProcesses { root: root.path().to_owned(), numbers: PidNumbers::OfHost };
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
