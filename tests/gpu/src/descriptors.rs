//! File descriptors from one process to another over a Unix socket: one message each, with the chunk's bytes.

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::cmsg_space;
use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};

const PAUSE: Duration = Duration::from_millis(5);

/// Waits for one process that connects, and sends it all.
pub fn send(socket: &Path, chunks: &[(OwnedFd, u64)], limit: Duration) -> Result<()> {
    let listener = UnixListener::bind(socket).with_context(|| format!("bind {}", socket.display()))?;
    listener.set_nonblocking(true)?;
    let peer = until(limit, || listener.accept().ok()).context("nobody connected")?.0;
    peer.set_nonblocking(false)?;
    peer.set_write_timeout(Some(limit))?;
    for (fd, bytes) in chunks {
        let text = bytes.to_le_bytes();
        let fds = [fd.as_raw_fd()];
        let rights = [ControlMessage::ScmRights(&fds)];
        sendmsg::<()>(peer.as_raw_fd(), &[IoSlice::new(&text)], &rights, MsgFlags::empty(), None)?;
        // One at a time: a stream may put messages together.
        let mut ack = [0];
        std::io::Read::read_exact(&mut &peer, &mut ack).context("the receiver went away")?;
    }
    std::fs::remove_file(socket).context("remove the socket")
}

/// Connects as soon as there is somebody, and receives all.
pub fn receive(socket: &Path, limit: Duration) -> Result<Vec<(OwnedFd, u64)>> {
    let peer = until(limit, || UnixStream::connect(socket).ok()).context("nobody listens")?;
    peer.set_read_timeout(Some(limit))?;
    let mut chunks = Vec::new();
    loop {
        let mut text = [0; 8];
        let mut space = cmsg_space!([RawFd; 1]);
        let (length, fd) = {
            let mut parts = [IoSliceMut::new(&mut text)];
            let message =
                recvmsg::<()>(peer.as_raw_fd(), &mut parts, Some(&mut space), MsgFlags::MSG_CMSG_CLOEXEC)?;
            let mut fds = message.cmsgs()?.filter_map(|one| match one {
                ControlMessageOwned::ScmRights(fds) => fds.into_iter().next(),
                _ => None,
            });
            (message.bytes, fds.next())
        };
        match (length, fd) {
            (0, _) => return Ok(chunks),
            (8, Some(fd)) => {
                std::io::Write::write_all(&mut &peer, &[1])?;
                chunks.push((owned(fd), u64::from_le_bytes(text)));
            }
            (length, _) => bail!("a message of {length} bytes, with a descriptor or without"),
        }
    }
}

#[allow(unsafe_code)]
fn owned(fd: RawFd) -> OwnedFd {
    // SAFETY: the kernel opened it for this message just now and nobody else has the number.
    unsafe { std::os::fd::FromRawFd::from_raw_fd(fd) }
}

fn until<T>(limit: Duration, mut attempt: impl FnMut() -> Option<T>) -> Option<T> {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(done) = attempt() {
            return Some(done);
        }
        if Instant::now() >= deadline {
            return None;
        }
        thread::sleep(PAUSE);
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read, Write};

    use super::*;

    #[test]
    fn descriptors_arrive_in_order_with_their_sizes() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("chunks");
        let chunks: Vec<(OwnedFd, u64)> = (1..=3_u64)
            .map(|number| {
                let path = folder.path().join(number.to_string());
                File::create(&path).unwrap().write_all(number.to_string().as_bytes()).unwrap();
                (OwnedFd::from(File::open(path).unwrap()), number << 20)
            })
            .collect();
        let sender = {
            let socket = socket.clone();
            thread::spawn(move || send(&socket, &chunks, Duration::from_secs(10)))
        };
        let received = receive(&socket, Duration::from_secs(10)).unwrap();
        sender.join().unwrap().unwrap();
        assert_eq!(received.iter().map(|(_, bytes)| bytes >> 20).collect::<Vec<_>>(), [1, 2, 3]);
        for (fd, bytes) in received {
            let mut text = String::new();
            File::from(fd).read_to_string(&mut text).unwrap();
            assert_eq!(text, (bytes >> 20).to_string());
        }
        assert!(!socket.exists());
    }

    #[test]
    fn nobody_there_is_told_within_the_limit() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("chunks");
        let words = receive(&socket, Duration::from_millis(20)).unwrap_err().to_string();
        assert_eq!(words, "nobody listens");
    }
}
