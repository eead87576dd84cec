//! Waiting for a change in the node's directory without asking over and over.

use std::ffi::CString;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::time::Duration;

/// How long to sleep at most where the kernel cannot tell of changes.
const WITHOUT: Duration = Duration::from_millis(50);

/// A watch on one directory. Without one, it looks often.
#[derive(Debug)]
pub struct Watch {
    descriptor: Option<OwnedFd>,
}

impl Watch {
    pub fn new(dir: &Path) -> Watch {
        Watch { descriptor: open(dir) }
    }

    /// Returns after a change, after `limit`, or a little earlier for no reason.
    pub fn wait(&self, limit: Duration) {
        let Some(descriptor) = &self.descriptor else {
            std::thread::sleep(limit.min(WITHOUT));
            return;
        };
        let mut poll = libc::pollfd { fd: descriptor.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        let millis = limit.as_millis().clamp(1, i32::MAX as u128) as i32;
        // SAFETY: one pollfd, valid for the call.
        let ready = unsafe { libc::poll(&raw mut poll, 1, millis) };
        if ready > 0 {
            let mut heap = [0_u8; 4096];
            // SAFETY: the buffer is valid for its length; the descriptor does not block.
            while unsafe { libc::read(descriptor.as_raw_fd(), heap.as_mut_ptr().cast(), heap.len()) } > 0 {}
        }
    }
}

fn open(dir: &Path) -> Option<OwnedFd> {
    let path = CString::new(dir.as_os_str().as_bytes()).ok()?;
    // SAFETY: no preconditions.
    let raw = unsafe { libc::inotify_init1(libc::IN_CLOEXEC | libc::IN_NONBLOCK) };
    if raw < 0 {
        return None;
    }
    // SAFETY: just opened and owned by nobody else.
    let descriptor = unsafe { OwnedFd::from_raw_fd(raw) };
    let mask = libc::IN_MOVED_TO | libc::IN_CLOSE_WRITE | libc::IN_DELETE;
    // SAFETY: an open descriptor and a path ended by a zero.
    let watch = unsafe { libc::inotify_add_watch(descriptor.as_raw_fd(), path.as_ptr(), mask) };
    (watch >= 0).then_some(descriptor)
}
