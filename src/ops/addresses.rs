//! The addresses that a process listens on for health, metrics and state, the Unix socket among them.

use std::fmt;
use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::net::{AddrParseError, SocketAddr};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::os::unix::net::{UnixListener as StdListener, UnixStream};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use tokio::net::UnixListener;

/// The socket in a pod, in a folder of its own below a volume of the pod's.
pub const SOCKET: &str = "/run/tranche-ops/private/ops.sock";

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Addresses {
    /// Metrics, and health for whoever looks from outside.
    pub open: SocketAddr,
    /// Health alone, for kubelet.
    pub health: SocketAddr,
    /// All of it, state and log level included. None: nowhere.
    pub socket: Option<PathBuf>,
}

impl From<SocketAddr> for Addresses {
    /// Health at the port after that of metrics, or at any where they are at any; no socket.
    fn from(open: SocketAddr) -> Self {
        let mut health = open;
        health.set_port(if open.port() == 0 {
            0
        } else {
            open.port().checked_add(1).unwrap_or(open.port() - 1)
        });
        Self { open, health, socket: None }
    }
}

impl FromStr for Addresses {
    type Err = AddrParseError;

    fn from_str(open: &str) -> Result<Self, Self::Err> {
        open.parse::<SocketAddr>().map(Self::from)
    }
}

impl fmt::Display for Addresses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}", self.open, self.health)?;
        match &self.socket {
            Some(path) => write!(f, ", {}", path.display()),
            None => Ok(()),
        }
    }
}

/// A socket that this user alone can open, in a folder that this user alone can enter. One that an earlier process
/// left behind is replaced, one that somebody answers is not.
pub(super) fn listen(path: &Path) -> io::Result<UnixListener> {
    if let Some(folder) = path.parent().filter(|folder| !folder.is_dir()) {
        DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    }
    if UnixStream::connect(path).is_ok() {
        return Err(io::Error::new(io::ErrorKind::AddrInUse, "another process answers there"));
    }
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = StdListener::bind(path)?;
    fs::set_permissions(path, Permissions::from_mode(0o600))?;
    listener.set_nonblocking(true)?;
    UnixListener::from_std(listener)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn health_is_beside_metrics() {
        for (open, health) in [
            ("0.0.0.0:8080", "0.0.0.0:8081"),
            ("[::]:9000", "[::]:9001"),
            ("127.0.0.1:0", "127.0.0.1:0"),
            ("0.0.0.0:65535", "0.0.0.0:65534"),
        ] {
            assert_eq!(open.parse::<Addresses>().unwrap().health.to_string(), health);
        }
    }

    #[tokio::test]
    async fn a_socket_is_for_its_user_alone_and_one_that_was_left_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("new/private/ops.sock");
        let first = listen(&path).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&path), mode(path.parent().unwrap())), (0o600, 0o700));
        assert_eq!(listen(&path).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        drop(first);
        drop(listen(&path).unwrap());
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        assert!(listen(&path).is_err(), "what is no socket is left alone");
    }
}
