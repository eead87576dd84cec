//! Processes, told apart from later ones of the same number by when they started. Reads /proc.

use std::collections::HashMap;
use std::fs;
use std::io;

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};

use super::Folder;

/// The kernel keeps 15 bytes of a program's name: control daemon and server begin alike.
const NAME: &str = "nvidia-cuda-mps";
pub(super) const PID_FILE: &str = "nvidia-cuda-mps-control.pid";

/// A process that was alive when it was looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    pub pid: u32,
    /// Clock ticks from the boot to its start.
    pub started: u64,
}

/// What /proc/PID/stat says, as far as it is of use (proc(5)).
struct Stat {
    name: String,
    is_zombie: bool,
    session: u32,
    started: u64,
}

impl Process {
    /// The process of that number, if there is one; a zombie is none.
    pub fn of(pid: u32) -> Option<Self> {
        let stat = stat(pid).filter(|stat| !stat.is_zombie)?;
        Some(Self { pid, started: stat.started })
    }

    /// The daemon of a folder by its own pid file.
    pub fn daemon_of(folder: &Folder) -> Option<Self> {
        let text = fs::read_to_string(folder.pipe().join(PID_FILE)).ok()?;
        let pid: u32 = text.trim().parse().ok()?;
        let stat = stat(pid).filter(|stat| !stat.is_zombie && stat.name.starts_with(NAME))?;
        Some(Self { pid, started: stat.started })
    }

    pub fn is_alive(self) -> bool {
        Self::of(self.pid) == Some(self)
    }

    /// What a daemon has started and what may outlive it: its servers. They are in its session, and the
    /// kernel gives a session's number to nobody else while one of them lives.
    pub fn servers(self) -> Vec<Self> {
        Self::servers_by_daemon().remove(&self.pid).unwrap_or_default()
    }

    /// The servers that run now, by their daemons' PIDs.
    pub fn servers_by_daemon() -> HashMap<u32, Vec<Self>> {
        let mut found = HashMap::<_, Vec<Self>>::new();
        let Ok(entries) = fs::read_dir("/proc") else { return found };
        for pid in entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok()) {
            let Some(stat) = stat(pid) else { continue };
            if stat.session != pid && !stat.is_zombie && stat.name.starts_with(NAME) {
                found.entry(stat.session).or_default().push(Self { pid, started: stat.started });
            }
        }
        found
    }

    /// Ends it at once. One that is gone is fine.
    pub fn kill(self) -> io::Result<()> {
        if !self.is_alive() {
            return Ok(());
        }
        let Ok(pid) = i32::try_from(self.pid) else { return Ok(()) };
        match kill(Pid::from_raw(pid), Signal::SIGKILL) {
            Ok(()) | Err(Errno::ESRCH) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }
}

fn stat(pid: u32) -> Option<Stat> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name is in brackets and may itself have brackets and spaces.
    let (before, after) = text.rsplit_once(')')?;
    let (_, name) = before.split_once('(')?;
    let fields: Vec<&str> = after.split_whitespace().collect();
    // proc(5) counts from 1 and from the pid: state 3, session 6, start time 22.
    let field = |number: usize| fields.get(number - 3).copied();
    Some(Stat {
        name: name.to_owned(),
        is_zombie: matches!(field(3)?, "Z" | "X"),
        session: field(6)?.parse().ok()?,
        started: field(22)?.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_server_is_its_daemons_from_its_start_on() {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("nvidia-cuda-mps-test");
        // By another process: one that this process forks meanwhile would have a descriptor of it that can be written to,
        // and it could not be executed.
        let copied = Command::new("cp").arg("/bin/sleep").arg(&program).status().unwrap();
        assert!(copied.success());
        // A daemon leads a session, and its server is a process of it.
        let mut daemon = Command::new("setsid")
            .args(["sh", "-c", "\"$0\" 600 & echo; wait"])
            .arg(&program)
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
        let servers = loop {
            let servers = Process::of(daemon.id()).unwrap().servers();
            if !servers.is_empty() {
                break servers;
            }
            assert!(std::time::Instant::now() < deadline, "no server was found");
            std::thread::yield_now();
        };
        assert_eq!(servers.len(), 1);
        assert!(servers[0].pid != daemon.id() && servers[0].is_alive());
        servers[0].kill().unwrap();
        daemon.kill().unwrap();
        daemon.wait().unwrap();
    }

    #[test]
    fn a_process_is_alive_until_it_is_a_zombie() {
        let mut child = Command::new("sleep").arg("600").spawn().unwrap();
        let process = Process::of(child.id()).unwrap();
        assert!(process.is_alive());
        assert!(
            !Process { started: process.started + 1, ..process }.is_alive(),
            "a later one of that number"
        );
        process.kill().unwrap();
        // Not waited for: it ends as a zombie.
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
        while process.is_alive() {
            assert!(std::time::Instant::now() < deadline, "it ends");
            std::thread::yield_now();
        }
        process.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn only_a_daemon_counts_as_the_daemon_of_a_pid_file() {
        let dir = tempfile::tempdir().unwrap();
        let folder = Folder::new(dir.path());
        fs::create_dir(folder.pipe()).unwrap();
        assert_eq!(Process::daemon_of(&folder), None);
        for text in ["", "x", "4294967295", &std::process::id().to_string()] {
            fs::write(folder.pipe().join(PID_FILE), text).unwrap();
            assert_eq!(Process::daemon_of(&folder), None, "{text}");
        }
    }
}
