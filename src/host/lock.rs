//! Locks between processes: during a rolling update two instances of the plugin live side by side.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use thiserror::Error;

/// How often a held lock is tried again. Locks are held by another process only during an update.
const RETRY: Duration = Duration::from_millis(5);

#[derive(Debug, Error)]
pub enum LockError {
    #[error("cannot open the lock file {path}")]
    Open { path: PathBuf, source: io::Error },
    #[error("cannot lock {path}")]
    Lock { path: PathBuf, source: io::Error },
    #[error("{path} is held by another process for more than {waited_s} s; is an old instance hanging?")]
    Held { path: PathBuf, waited_s: u64 },
}

/// A held lock on a file. The file also carries a number that whoever holds the lock may change, by which
/// the holder learns whether another process was here since.
#[derive(Debug)]
pub struct FileLock {
    file: Flock<File>,
}

impl FileLock {
    /// Waits for the lock, at most `limit`. Blocks the thread.
    #[expect(clippy::disallowed_methods, reason = "its callers have a thread for what blocks")]
    pub fn acquire(path: &Path, limit: Duration) -> Result<Self, LockError> {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(lock) = Self::try_acquire(path)? {
                return Ok(lock);
            }
            if Instant::now() >= deadline {
                return Err(LockError::Held { path: path.to_owned(), waited_s: limit.as_secs() });
            }
            std::thread::sleep(RETRY);
        }
    }

    /// The lock, or `None` if another process holds it.
    pub fn try_acquire(path: &Path) -> Result<Option<Self>, LockError> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)
            .map_err(|source| LockError::Open { path: path.to_owned(), source })?;
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(file) => Ok(Some(Self { file })),
            Err((_, Errno::EWOULDBLOCK)) => Ok(None),
            Err((_, errno)) => Err(LockError::Lock { path: path.to_owned(), source: errno.into() }),
        }
    }

    /// The number in the file; 0 if there is none yet.
    pub fn number(&self) -> io::Result<u64> {
        let mut bytes = [0; 8];
        match self.file.read_exact_at(&mut bytes, 0) {
            Ok(()) => Ok(u64::from_le_bytes(bytes)),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(0),
            Err(error) => Err(error),
        }
    }

    /// Changes the number in the file.
    pub fn set_number(&self, number: u64) -> io::Result<()> {
        self.file.write_all_at(&number.to_le_bytes(), 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_held_lock_is_waited_for_until_the_deadline_and_keeps_its_number() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lane");
        let held = FileLock::acquire(&path, Duration::ZERO).unwrap();
        assert_eq!(held.number().unwrap(), 0);
        held.set_number(7).unwrap();
        assert!(FileLock::try_acquire(&path).unwrap().is_none());
        let error = FileLock::acquire(&path, Duration::from_millis(20)).unwrap_err();
        assert!(matches!(error, LockError::Held { .. }), "{error}");
        drop(held);
        assert_eq!(FileLock::acquire(&path, Duration::ZERO).unwrap().number().unwrap(), 7);
    }
}
