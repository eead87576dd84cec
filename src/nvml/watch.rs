//! Reports changes of the driver's device files and of its library.
//!
//! Uses inotify directly, with a mask for names that come and go: a watcher that also asks for opens and writes would
//! be woken by every use of /dev/null on the node.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, InotifyEvent, WatchDescriptor};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::library;
use crate::model::driver::DriverPlace;

/// What changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum FilesChanged {
    /// MIG devices may have come or gone.
    Capabilities,
    /// Boards may have come or gone: NVML counts them when it is loaded, and not again.
    Boards,
    /// The driver may have been installed or replaced: the library must be loaded anew.
    Library,
}

/// A watch on device files and library directories.
#[derive(Debug)]
pub struct DeviceFiles {
    inotify: AsyncFd<Fd>,
    dev_root: PathBuf,
    driver: DriverPlace,
    watches: HashMap<WatchDescriptor, FilesChanged>,
}

#[derive(Debug)]
struct Fd(Inotify);

impl AsRawFd for Fd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

impl DeviceFiles {
    /// `dev_root`: usually `/dev`. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// The node has no inotify instances left (`fs.inotify.max_user_instances`).
    pub fn new(dev_root: &Path, driver: DriverPlace) -> io::Result<Self> {
        let inotify = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC)?;
        // SAFETY: the descriptor is owned by `Fd`, which the `AsyncFd` owns and never gives away: it
        // stays open and the same for as long as it is registered.
        let inotify = unsafe { AsyncFd::register_with_interest(Fd(inotify), Interest::READABLE) }?;
        let dev_root = dev_root.to_owned();
        let mut files = Self { inotify, dev_root, driver, watches: HashMap::new() };
        files.refresh();
        Ok(files)
    }

    /// Watches directories that came into being since the last time. To be called now and then: what
    /// does not exist cannot be watched.
    pub fn refresh(&mut self) {
        let names = AddWatchFlags::IN_CREATE
            | AddWatchFlags::IN_DELETE
            | AddWatchFlags::IN_MOVED_FROM
            | AddWatchFlags::IN_MOVED_TO
            | AddWatchFlags::IN_ONLYDIR;
        self.add(&self.dev_root.clone(), names, FilesChanged::Boards);
        self.add(&self.dev_root.join("nvidia-caps"), names, FilesChanged::Capabilities);
        for directory in library::directories(&self.driver) {
            // A file that is copied is of use only when it is complete.
            self.add(&directory, names | AddWatchFlags::IN_CLOSE_WRITE, FilesChanged::Library);
        }
    }

    fn add(&mut self, directory: &Path, mask: AddWatchFlags, means: FilesChanged) {
        // A directory that is missing, or out of reach, is tried again at the next refresh.
        if let Ok(descriptor) = self.inotify.get_ref().0.add_watch(directory, mask) {
            self.watches.insert(descriptor, means);
        }
    }

    /// Waits until something changed that concerns GPUs. Cancel safe.
    ///
    /// # Errors
    /// The watch itself broke, and will not tell anything any more.
    pub async fn changed(&mut self) -> io::Result<FilesChanged> {
        loop {
            let mut ready = self.inotify.readable().await?;
            let events = match self.inotify.get_ref().0.read_events() {
                Ok(events) => events,
                Err(Errno::EAGAIN | Errno::EINTR) => {
                    ready.clear_ready();
                    continue;
                }
                Err(e) => return Err(e.into()),
            };
            let change = events.iter().filter_map(|event| self.meaning(event)).max();
            for event in events.iter().filter(|event| event.mask.contains(AddWatchFlags::IN_IGNORED)) {
                self.watches.remove(&event.wd);
            }
            if let Some(change) = change {
                return Ok(change);
            }
        }
    }

    fn meaning(&self, event: &InotifyEvent) -> Option<FilesChanged> {
        if event.mask.contains(AddWatchFlags::IN_Q_OVERFLOW) {
            return Some(FilesChanged::Library);
        }
        let means = *self.watches.get(&event.wd)?;
        if event.mask.contains(AddWatchFlags::IN_IGNORED) {
            return Some(means);
        }
        let name = event.name.as_ref()?.to_str()?;
        let rest = name.strip_prefix(match means {
            FilesChanged::Capabilities | FilesChanged::Boards => "nvidia",
            FilesChanged::Library => "libnvidia-ml.so",
        })?;
        let is_number = !rest.is_empty() && rest.bytes().all(|b| b.is_ascii_digit());
        match means {
            FilesChanged::Boards if is_number || rest == "ctl" => Some(FilesChanged::Boards),
            FilesChanged::Boards => Some(FilesChanged::Capabilities),
            other => Some(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;

    async fn next(files: &mut DeviceFiles) -> FilesChanged {
        timeout(Duration::from_secs(10), files.changed()).await.expect("a change is told").unwrap()
    }

    #[tokio::test]
    async fn tells_boards_from_libraries_and_is_silent_about_the_rest() {
        let (dev, root) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        fs::write(dev.path().join("null"), "").unwrap();
        let mut files = DeviceFiles::new(dev.path(), root.path().into()).unwrap();
        fs::write(dev.path().join("null"), "written").unwrap();
        fs::write(dev.path().join("sda"), "").unwrap();
        fs::write(dev.path().join("nvidia0"), "").unwrap();
        assert_eq!(next(&mut files).await, FilesChanged::Boards);

        let library = root.path().join("usr/lib64");
        fs::create_dir_all(&library).unwrap();
        files.refresh();
        fs::write(library.join("libother.so"), "").unwrap();
        fs::write(library.join("libnvidia-ml.so.1"), "").unwrap();
        assert_eq!(next(&mut files).await, FilesChanged::Library);
    }

    #[tokio::test]
    async fn a_capability_directory_that_appears_is_watched_after_a_refresh() {
        let (dev, root) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let mut files = DeviceFiles::new(dev.path(), root.path().into()).unwrap();
        fs::create_dir(dev.path().join("nvidia-caps")).unwrap();
        assert_eq!(next(&mut files).await, FilesChanged::Capabilities);
        files.refresh();
        fs::write(dev.path().join("nvidia-caps/nvidia-cap21"), "").unwrap();
        assert_eq!(next(&mut files).await, FilesChanged::Capabilities);
    }
}
