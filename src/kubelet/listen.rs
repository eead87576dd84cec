//! A listening Unix socket whose file comes back when somebody deletes it.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;
use tokio::time::{Interval, MissedTickBehavior, interval, sleep};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::Error;

/// Accepted connections that wait for the server. Kubelet opens one or two.
pub(super) const WAITING_CONNECTIONS: usize = 16;

/// After a failed accept (out of file descriptors, mostly).
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Connections in the shape that tonic takes them.
pub(super) type Connections = mpsc::Sender<io::Result<UnixStream>>;

/// A socket that listens.
pub(super) struct Listener {
    socket: UnixListener,
    file: SocketFile,
}

/// A socket's file, which stays when the socket is closed.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct SocketFile {
    path: PathBuf,
    /// Device and inode: tells our file from a later one under the same name.
    id: (u64, u64),
}

impl Listener {
    /// Listens on `path`, for root alone. A socket that is there already is one of our own name
    /// from an earlier life, and goes; anything that is no socket stays and is an error.
    pub(super) fn bind(path: &Path) -> Result<Self, Error> {
        let listen = || {
            unlink_socket(path)?;
            let socket = UnixListener::bind(path)?;
            fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
            Ok(Self { socket, file: SocketFile { path: path.to_owned(), id: file_id(path)? } })
        };
        listen().map_err(|source| Error::Bind { path: path.to_owned(), source })
    }

    pub(super) fn path(&self) -> &Path {
        &self.file.path
    }

    /// Accepts until `stop`, and puts the file back when a look every `check` finds it missing:
    /// `lost` is called first. Gives the file back, to be unlinked in due time.
    pub(super) async fn keep(
        mut self,
        connections: Connections,
        check: Duration,
        stop: CancellationToken,
        lost: impl Fn() + Send,
    ) -> SocketFile {
        let mut look = every(check);
        loop {
            tokio::select! {
                () = stop.cancelled() => return self.file,
                accepted = self.socket.accept() => {
                    if !self.hand_over(accepted.map(|(stream, _)| stream), &connections).await {
                        return self.file;
                    }
                }
                _ = look.tick() => self.restore_if_missing(&lost),
            }
        }
    }

    /// False when nobody takes connections any more.
    async fn hand_over(&self, accepted: io::Result<UnixStream>, connections: &Connections) -> bool {
        match accepted {
            Ok(stream) => connections.send(Ok(stream)).await.is_ok(),
            Err(error) => {
                warn!(path = %self.path().display(), %error, "cannot accept kubelet's connection; trying again");
                sleep(ACCEPT_PAUSE).await;
                true
            }
        }
    }

    fn restore_if_missing(&mut self, lost: &impl Fn()) {
        let looked = fs::symlink_metadata(self.path());
        if !looked.is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
            return;
        }
        lost();
        match Self::bind(self.path()) {
            Ok(again) => {
                info!(path = %self.path().display(), "the socket's file was deleted; it is back");
                *self = again;
            }
            Err(error) => {
                warn!(path = %self.path().display(), %error, "the socket's file was deleted and cannot be put back yet");
            }
        }
    }
}

impl SocketFile {
    /// Removes the file, unless another instance has taken the name since.
    pub(super) fn unlink(&self) {
        if file_id(&self.path).is_ok_and(|id| id == self.id)
            && let Err(error) = fs::remove_file(&self.path)
        {
            warn!(path = %self.path.display(), %error, "cannot remove the socket's file");
        }
    }
}

fn every(period: Duration) -> Interval {
    let mut look = interval(period);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    look
}

fn file_id(path: &Path) -> io::Result<(u64, u64)> {
    let meta = fs::symlink_metadata(path)?;
    Ok((meta.dev(), meta.ino()))
}

fn unlink_socket(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Ok(meta) if meta.file_type().is_socket() => fs::remove_file(path),
        Ok(_) => {
            Err(io::Error::new(io::ErrorKind::AlreadyExists, "something that is not a socket has this name"))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_stale_socket_gives_way_and_the_new_one_is_for_root_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("dra.sock");
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let listener = Listener::bind(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        UnixStream::connect(&path).await.unwrap();
        listener.file.unlink();
        assert!(!path.exists());
    }

    #[tokio::test]
    async fn what_is_no_socket_stays_and_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("dra.sock");
        fs::write(&path, "precious").unwrap();
        let Err(error) = Listener::bind(&path) else { panic!("bound over a file") };
        assert!(error.to_string().contains("dra.sock"), "{error}");
        assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
    }

    #[tokio::test]
    async fn another_instances_file_is_not_unlinked() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("dra.sock");
        let old = Listener::bind(&path).unwrap();
        let _new = Listener::bind(&path).unwrap();
        old.file.unlink();
        UnixStream::connect(&path).await.unwrap();
    }
}
