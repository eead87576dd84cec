//! A /dev/shm of one's own: this program moves into a mount namespace of its own, mounts there, and becomes
//! another program. Nothing is mounted outside, so nothing has to be unmounted: the mounts end with the last
//! process of the namespace.

use std::ffi::OsString;
use std::fmt;
use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::str::FromStr;

use anyhow::{Context, Result, bail};
use nix::errno::Errno;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, setns, unshare};
use nix::unistd::{chdir, getegid, geteuid};

const SHM: &str = "/dev/shm";

/// What a program finds at /dev/shm.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Shm {
    /// An empty tmpfs of so many KiB.
    Empty { kib: u64 },
    /// The same, for so many files.
    Few { kib: u64, files: u64 },
    /// One that nobody can write to.
    ReadOnly,
    /// That of a process which has its own.
    Of { pid: u32 },
}

impl fmt::Display for Shm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty { kib } => write!(f, "empty:{kib}"),
            Self::Few { kib, files } => write!(f, "few:{kib}:{files}"),
            Self::ReadOnly => f.write_str("read-only"),
            Self::Of { pid } => write!(f, "of:{pid}"),
        }
    }
}

impl FromStr for Shm {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        match text.split_once(':') {
            // A tmpfs of size 0 has no limit at all.
            Some(("empty", kib)) if kib != "0" => Ok(Self::Empty { kib: kib.parse()? }),
            Some(("few", sizes)) if !sizes.split(':').any(|size| size == "0") => {
                let (kib, files) = sizes.split_once(':').context("few:KIB:FILES")?;
                Ok(Self::Few { kib: kib.parse()?, files: files.parse()? })
            }
            Some(("of", pid)) => Ok(Self::Of { pid: pid.parse()? }),
            None if text == "read-only" => Ok(Self::ReadOnly),
            _ => bail!("{text:?} is not empty:KIB, few:KIB:FILES, read-only or of:PID"),
        }
    }
}

/// Becomes the command; comes back only with an error.
pub fn become_within(shm: &Shm, command: &[OsString]) -> Result<()> {
    let (program, arguments) = command.split_first().context("a command")?;
    enter(shm).with_context(|| format!("take a {SHM} of one's own ({shm})"))?;
    let error = Command::new(program).args(arguments).exec();
    Err(error).with_context(|| format!("start {}", program.display()))
}

/// This program as the beginning of a command line: what is appended runs with that /dev/shm.
pub fn within(shm: &Shm) -> Result<Command> {
    let mut command = Command::new(std::env::current_exe().context("find this program")?);
    command.args(["within", "--shm", &shm.to_string(), "--"]);
    Ok(command)
}

fn enter(shm: &Shm) -> Result<()> {
    let (kib, files, flags) = match shm {
        Shm::Of { pid } => return join(*pid),
        Shm::Empty { kib } => (*kib, None, MsFlags::empty()),
        Shm::Few { kib, files } => (*kib, Some(*files), MsFlags::empty()),
        Shm::ReadOnly => (4, None, MsFlags::MS_RDONLY),
    };
    new_namespace()?;
    let files = files.map(|files| format!(",nr_inodes={files}")).unwrap_or_default();
    let options = format!("size={kib}k,mode=1777{files}");
    let flags = flags | MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    mount(Some("tmpfs"), SHM, Some("tmpfs"), flags, Some(options.as_str())).context("mount a tmpfs")
}

fn new_namespace() -> Result<()> {
    let (uid, gid) = (geteuid(), getegid());
    match unshare(CloneFlags::CLONE_NEWNS) {
        Ok(()) => {}
        // Root of a container has no right to mount, unless in a user namespace of its own.
        Err(Errno::EPERM) => {
            unshare(CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNS)
                .context("take a user and a mount namespace")?;
            match fs::write("/proc/self/setgroups", "deny") {
                // A kernel without the file has no such condition.
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(error).context("write setgroups");
                }
                _ => {}
            }
            fs::write("/proc/self/uid_map", format!("{uid} {uid} 1")).context("write uid_map")?;
            fs::write("/proc/self/gid_map", format!("{gid} {gid} 1")).context("write gid_map")?;
        }
        Err(errno) => return Err(errno).context("take a mount namespace"),
    }
    // What is mounted here stays here.
    mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)
        .context("keep mounts to oneself")
}

fn join(pid: u32) -> Result<()> {
    let folder = std::env::current_dir().context("the current folder")?;
    let of = |who: &str, name: &str| Path::new("/proc").join(who).join("ns").join(name);
    let theirs = pid.to_string();
    let open = |name: &str| File::open(of(&theirs, name)).with_context(|| format!("namespaces of {pid}"));
    let (user, mounts) = (open("user")?, open("mnt")?);
    if fs::read_link(of("self", "user"))? != fs::read_link(of(&theirs, "user"))? {
        setns(user, CloneFlags::CLONE_NEWUSER).context("join a user namespace")?;
    }
    setns(mounts, CloneFlags::CLONE_NEWNS).context("join a mount namespace")?;
    chdir(&folder).with_context(|| format!("go back to {}", folder.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_at_dev_shm_survives_the_command_line() {
        let few = Shm::Few { kib: 64, files: 8 };
        for shm in [Shm::Empty { kib: 64 }, few, Shm::ReadOnly, Shm::Of { pid: 12 }] {
            assert_eq!(shm.to_string().parse::<Shm>().unwrap(), shm);
        }
        for bad in ["empty:0", "empty:", "few:64", "few:64:0", "few:64:", "of:x", "tmpfs", ""] {
            assert!(bad.parse::<Shm>().is_err(), "{bad}");
        }
    }
}
