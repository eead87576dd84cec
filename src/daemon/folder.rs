//! A daemon's folder:
//!
//! | below it | what | who sees it |
//! |---|---|---|
//! | `pipe/` | the daemon's own sockets, its pid file | the daemon, us |
//! | `log/` | control.log, server.log | the daemon, us |
//! | `shm/` | memory that servers and clients exchange | the daemon, tenants (as /dev/shm) |
//! | `client/` | a hard link to the one socket of `pipe/` that a client uses, and a `log` that leads nowhere | tenants, read-only |
//!
//! They are made only when the limits are in force, so that no client can come before them.
//!
//! `pipe/log` is a FIFO that everybody may write (mode 0777; what is mounted read-only can be written all the same, as
//! far as FIFOs go). The daemon's reader of it ends at the first bytes that are no message of its own, and from then on
//! the daemon and its clients, which write there without O_NONBLOCK, stand still as soon as 64 KiB are in it (seen with
//! 550.163.01). So tenants do not see it: libcuda opens `log` for writing alone, and writes what it has to say into the
//! container's /dev/null.
//! The folder is a tmpfs of bounded size, and `shm/` is another one ([`super::shm`]): however much tenants write there,
//! there is room for the daemon's files and for the links. Folders made by earlier versions are a single tmpfs; they stay
//! so while they are in use, because a container keeps the memory that it started with.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use serde::{Deserialize, Serialize};

use super::process::PID_FILE;
use super::shm::{self, Bounds};
use super::{DaemonError, files};
use crate::model::share::SharedMemory;

/// For logs, sockets and links.
const TMPFS_OPTIONS: &str = "size=64m,nr_inodes=1024,mode=0755";
const SHM_MODE: u32 = 0o1777;
/// What a client uses of a pipe directory (the names are in libcuda): the socket, and where it tells what it does.
const CLIENT_SOCKET: &str = "control";
const CLIENT_LOG: &str = "log";
/// In the container.
const NOWHERE: &str = "/dev/null";
/// A log beyond this is cut; the newest part stays beside it under another name.
const LOG_BYTES_MAX: u64 = 4 << 20;
const LOG_BYTES_KEPT: u64 = 1 << 20;

/// Which mounts a daemon has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum DaemonMounts {
    /// A tmpfs of bounded size, and a mount namespace of its own.
    #[serde(rename = "Mounted")]
    Own,
    /// None: a plain folder, and the namespaces of the parent process. For places where mounting is not permitted.
    #[serde(rename = "Plain")]
    None,
}

/// The folder of one daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Folder(PathBuf);

impl Folder {
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self(path.into())
    }
    pub fn path(&self) -> &Path {
        &self.0
    }
    pub fn pipe(&self) -> PathBuf {
        self.0.join("pipe")
    }
    pub fn log(&self) -> PathBuf {
        self.0.join("log")
    }
    pub fn shm(&self) -> PathBuf {
        self.0.join("shm")
    }
    pub fn client(&self) -> PathBuf {
        self.0.join("client")
    }

    /// Makes the folder with all that is fixed in it. One that is there stays as it is.
    pub fn make(&self, mounts: DaemonMounts, bounds: Bounds) -> Result<(), DaemonError> {
        folder(&self.0, 0o755)?;
        let has_mounts = mounts == DaemonMounts::Own;
        if has_mounts && !is_mounted(&self.0)? {
            let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
            mount(Some("tmpfs"), &self.0, Some("tmpfs"), flags, Some(TMPFS_OPTIONS))
                .map_err(|errno| files("mount a tmpfs on", &self.0)(errno.into()))?;
        }
        // Mounted before anything else is made: a folder that has a pipe and no such mount is an old one in use.
        let shm = self.shm();
        if has_mounts && !self.pipe().exists() {
            folder(&shm, 0o755)?;
            if !is_mounted(&shm)? {
                shm::mount_at(&shm, bounds).map_err(files("mount a tmpfs on", &shm))?;
            }
        }
        // A server runs as its first client's user and passes through; what is in it nobody needs to list.
        folder(&self.pipe(), 0o711)?;
        folder(&self.log(), 0o755)?;
        folder(&shm, SHM_MODE)?;
        self.guard_shm()?;
        folder(&self.client(), 0o755)
    }

    /// Takes from tenants the name by which one could say what the others' programs load, and opens the memory to
    /// all of them again if one who is root has closed it. Without room for it, it is done at the next look.
    pub fn guard_shm(&self) -> Result<(), DaemonError> {
        let path = self.shm();
        let guard = || {
            if fs::metadata(&path)?.permissions().mode() & 0o7777 != SHM_MODE {
                fs::set_permissions(&path, Permissions::from_mode(SHM_MODE))?;
            }
            match shm::reserve(&path) {
                Err(error) if matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded) => {
                    Ok(())
                }
                done => done,
            }
        };
        guard().map_err(files("look after", &path))
    }

    /// True if what tenants write has a file system of its own.
    pub fn is_apart(&self) -> bool {
        is_mounted(&self.shm()).unwrap_or(false)
    }

    /// How full what tenants write is. None if it is in no file system of ours.
    pub fn shm_usage(&self) -> Option<SharedMemory> {
        let bounded = is_mounted(&self.0).unwrap_or(false) || self.is_apart();
        bounded.then(|| shm::usage(&self.shm()).ok())?
    }

    /// Removes all that tenants wrote. True if nothing is left of it. Blocks: memory is given back.
    pub fn empty_shm(&self) -> bool {
        shm::empty(&self.shm())
    }

    /// Removes what users wrote who have no process any more that sees it; `own` are the daemon's processes.
    pub fn clear_departed(&self, own: &[u32]) -> Result<usize, DaemonError> {
        shm::clear_departed(&self.shm(), own).map_err(files("look for abandoned files in", &self.shm()))
    }

    /// Lets clients in.
    pub fn open(&self) -> Result<(), DaemonError> {
        self.hide_log()?;
        if self.is_open() {
            return Ok(());
        }
        let (from, to) = (self.pipe().join(CLIENT_SOCKET), self.client().join(CLIENT_SOCKET));
        absent_is_fine(fs::remove_file(&to)).map_err(files("remove", &to))?;
        fs::hard_link(&from, &to).map_err(files("link", &from))
    }

    /// Folders of earlier versions have a link to the daemon's own: that goes without anybody being kept out.
    fn hide_log(&self) -> Result<(), DaemonError> {
        let path = self.client().join(CLIENT_LOG);
        if fs::read_link(&path).is_ok_and(|to| to == Path::new(NOWHERE)) {
            return Ok(());
        }
        let new = self.client().join(format!(".{CLIENT_LOG}"));
        absent_is_fine(fs::remove_file(&new))
            .and_then(|()| symlink(NOWHERE, &new))
            .and_then(|()| fs::rename(&new, &path))
            .map_err(files("make", &path))
    }

    /// True if clients find this daemon, and not one that is dead.
    pub fn is_open(&self) -> bool {
        let id = |path: PathBuf| fs::symlink_metadata(path).map(|meta| (meta.dev(), meta.ino())).ok();
        let daemons = id(self.pipe().join(CLIENT_SOCKET));
        daemons.is_some() && daemons == id(self.client().join(CLIENT_SOCKET))
    }

    /// Lets no further client in. Those that are connected stay.
    pub fn close(&self) -> Result<(), DaemonError> {
        for name in [CLIENT_SOCKET, CLIENT_LOG] {
            let path = self.client().join(name);
            absent_is_fine(fs::remove_file(&path)).map_err(files("remove", &path))?;
        }
        Ok(())
    }

    /// Removes the number of a daemon that is gone. The next one writes its own over it and cuts nothing off: of
    /// 25617 and then 4439 would become 44397 (seen with 550), which is nobody.
    pub fn forget_daemon(&self) -> Result<(), DaemonError> {
        let path = self.pipe().join(PID_FILE);
        absent_is_fine(fs::remove_file(&path)).map_err(files("remove", &path))
    }

    /// Keeps the daemon's logs small: every question leaves lines in them.
    pub fn trim_logs(&self) -> Result<(), DaemonError> {
        for name in ["control.log", "server.log"] {
            let path = self.log().join(name);
            absent_is_fine(trim(&path)).map_err(files("cut", &path))?;
        }
        Ok(())
    }

    /// Removes the folder with all that is in it. No daemon may live there any more.
    pub fn remove(&self) -> Result<(), DaemonError> {
        // A plain folder is no mount point: EINVAL. Anything else shows when the folder is removed.
        let _ = umount2(&self.0, MntFlags::MNT_DETACH);
        absent_is_fine(fs::remove_dir_all(&self.0)).map_err(files("remove", &self.0))
    }
}

fn is_mounted(path: &Path) -> Result<bool, DaemonError> {
    let device = |path: &Path| fs::metadata(path).map(|meta| meta.dev()).map_err(files("look at", path));
    let parent = path.parent().unwrap_or(Path::new("/"));
    Ok(device(path)? != device(parent)?)
}

fn folder(path: &Path, mode: u32) -> Result<(), DaemonError> {
    fs::create_dir_all(path)
        .and_then(|()| fs::set_permissions(path, Permissions::from_mode(mode)))
        .map_err(files("make the folder", path))
}

fn absent_is_fine(done: io::Result<()>) -> io::Result<()> {
    match done {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// The daemon appends, so it goes on at the new end. What it writes between copy and cut is lost.
fn trim(path: &Path) -> io::Result<()> {
    let mut log = OpenOptions::new().read(true).write(true).open(path)?;
    if log.metadata()?.len() <= LOG_BYTES_MAX {
        return Ok(());
    }
    log.seek(SeekFrom::End(-i64::try_from(LOG_BYTES_KEPT).unwrap_or(i64::MAX)))?;
    let mut newest = Vec::new();
    (&log).take(LOG_BYTES_KEPT).read_to_end(&mut newest)?;
    File::create(path.with_extension("log.1"))?.write_all(&newest)?;
    log.set_len(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made() -> (tempfile::TempDir, Folder) {
        let dir = tempfile::tempdir().unwrap();
        let folder = Folder::new(dir.path().join("GPU-1"));
        folder.make(DaemonMounts::None, Bounds::DEFAULT).unwrap();
        (dir, folder)
    }

    fn daemon_comes_up(folder: &Folder) {
        for name in ["control", "log", "control_privileged"] {
            let path = folder.pipe().join(name);
            let _ = fs::remove_file(&path);
            fs::write(path, "").unwrap();
        }
    }

    #[test]
    fn clients_see_two_files_while_it_is_open_and_none_when_it_is_closed() {
        let (_dir, folder) = made();
        assert!(folder.open().is_err(), "no daemon yet");
        daemon_comes_up(&folder);
        assert!(!folder.is_open());
        folder.open().unwrap();
        assert!(folder.is_open());
        assert_eq!(fs::read_dir(folder.client()).unwrap().count(), 2);
        folder.close().unwrap();
        folder.close().unwrap();
        assert_eq!(fs::read_dir(folder.client()).unwrap().count(), 0);
    }

    #[test]
    fn clients_do_not_see_the_daemons_log_not_even_in_a_folder_of_an_earlier_version() {
        let (_dir, folder) = made();
        daemon_comes_up(&folder);
        for name in ["control", "log"] {
            fs::hard_link(folder.pipe().join(name), folder.client().join(name)).unwrap();
        }
        let socket = || fs::symlink_metadata(folder.client().join("control")).unwrap().ino();
        let before = socket();
        folder.open().unwrap();
        assert!(folder.is_open());
        assert_eq!(socket(), before);
        assert_eq!(fs::read_link(folder.client().join("log")).unwrap(), Path::new("/dev/null"));
        assert_eq!(fs::read_dir(folder.client()).unwrap().count(), 2);
    }

    #[test]
    fn links_of_a_dead_daemon_are_replaced() {
        let (_dir, folder) = made();
        daemon_comes_up(&folder);
        folder.open().unwrap();
        // Under another name, so that the new file cannot have the old one's number.
        fs::rename(folder.pipe().join("control"), folder.pipe().join("old")).unwrap();
        daemon_comes_up(&folder);
        assert!(!folder.is_open());
        folder.open().unwrap();
        assert!(folder.is_open());
    }

    #[test]
    fn a_long_log_is_cut_and_its_newest_part_kept() {
        let (_dir, folder) = made();
        folder.trim_logs().unwrap();
        let path = folder.log().join("control.log");
        let mut text = vec![b'.'; usize::try_from(LOG_BYTES_MAX).unwrap()];
        fs::write(&path, &text).unwrap();
        folder.trim_logs().unwrap();
        assert_eq!(fs::metadata(&path).unwrap().len(), LOG_BYTES_MAX, "not yet too long");
        text.extend(b"the end");
        fs::write(&path, &text).unwrap();
        folder.trim_logs().unwrap();
        assert_eq!(fs::metadata(&path).unwrap().len(), 0);
        let kept = fs::read(folder.log().join("control.log.1")).unwrap();
        assert!(kept.ends_with(b"the end"));
        assert_eq!(u64::try_from(kept.len()).unwrap(), LOG_BYTES_KEPT);
    }

    #[test]
    fn making_twice_keeps_what_is_there_and_removing_takes_all() {
        let (_dir, folder) = made();
        daemon_comes_up(&folder);
        folder.make(DaemonMounts::None, Bounds::DEFAULT).unwrap();
        assert!(folder.pipe().join("control").exists());
        let mode = fs::metadata(folder.shm()).unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, 0o1777);
        folder.remove().unwrap();
        folder.remove().unwrap();
        assert!(!folder.path().exists());
    }
}
