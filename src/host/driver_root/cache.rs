//! Scanning costs hundreds of system calls, so its result is kept for as long as no directory that it
//! looked into has changed. Being right costs a few dozen `lstat` calls on the warm path.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::{DriverRoot, MissingToolkit, ScanError, missing_toolkit, traced_scan};
use crate::cdi::{CdiNodes, DriverFiles, RootFiles};
use crate::host::device_nodes::{self, NodeError};

/// A directory changed more recently than this may change again within the same timestamp, unseen:
/// what was found in it is not kept.
const SETTLED: Duration = Duration::from_secs(2);

/// The driver root with a memory.
#[derive(Debug)]
pub struct DriverRootCache {
    root: DriverRoot,
    kept: Mutex<Option<CachedFiles>>,
    scans: AtomicU64,
}

#[derive(Debug)]
struct CachedFiles {
    version: Option<String>,
    files: Arc<RootFiles>,
    directories: Vec<(PathBuf, Option<Stamp>)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp {
    device: u64,
    inode: u64,
    modified: (i64, i64),
}

/// Why the driver's files could not be told.
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    #[error(transparent)]
    Scan(#[from] ScanError),
    #[error(transparent)]
    Nodes(#[from] NodeError),
}

impl DriverRootCache {
    pub fn new(root: DriverRoot) -> Self {
        Self { root, kept: Mutex::new(None), scans: AtomicU64::new(0) }
    }

    /// What [`crate::cdi::render`] needs for devices with these nodes. The version is the one that
    /// NVML reports (None: whichever driver is there). Nodes are looked up anew in each call: MIG
    /// instances come and go. Blocks on file calls; keep it off async threads.
    pub fn files(&self, version: Option<&str>, wanted: &[CdiNodes]) -> Result<DriverFiles, DriverError> {
        let root = self.root_files(version)?;
        Ok(DriverFiles { root, nodes: device_nodes::look(&self.root.dev, wanted)? })
    }

    /// The driver's user-space files alone.
    #[expect(clippy::disallowed_methods, reason = "the time is compared with those of files")]
    pub fn root_files(&self, version: Option<&str>) -> Result<Arc<RootFiles>, ScanError> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kept) =
            kept.as_ref().filter(|kept| kept.version.as_deref() == version && kept.is_current())
        {
            return Ok(kept.files.clone());
        }
        *kept = None;
        let begun = SystemTime::now();
        self.scans.fetch_add(1, Ordering::Relaxed);
        let (files, directories) = traced_scan(&self.root, version)?;
        let files = Arc::new(files);
        *kept = CachedFiles::settled(version, files.clone(), directories, begun);
        Ok(files)
    }

    /// What is to be told of a toolkit that an administrator named and that is not there. Looks anew, with a few calls
    /// for files.
    pub fn missing_toolkit(&self) -> Option<MissingToolkit> {
        missing_toolkit(&self.root)
    }

    /// Forgets what is kept: after [`super::check`] found a path missing.
    pub fn forget(&self) {
        *self.kept.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Scans done so far, for a metric.
    pub fn scans(&self) -> u64 {
        self.scans.load(Ordering::Relaxed)
    }
}

impl CachedFiles {
    fn settled(
        version: Option<&str>,
        files: Arc<RootFiles>,
        directories: BTreeSet<PathBuf>,
        begun: SystemTime,
    ) -> Option<Self> {
        let directories: Vec<_> = directories.into_iter().map(|path| (path.clone(), stamp(&path))).collect();
        let limit = begun.checked_sub(SETTLED)?.duration_since(UNIX_EPOCH).ok()?;
        let limit = (i64::try_from(limit.as_secs()).ok()?, i64::from(limit.subsec_nanos()));
        let old = directories.iter().all(|(_, stamp)| stamp.is_none_or(|stamp| stamp.modified < limit));
        old.then(|| Self { version: version.map(str::to_owned), files, directories })
    }

    fn is_current(&self) -> bool {
        self.directories.iter().all(|(path, then)| stamp(path) == *then)
    }
}

fn stamp(path: &PathBuf) -> Option<Stamp> {
    let meta = fs::symlink_metadata(path).ok()?;
    Some(Stamp { device: meta.dev(), inode: meta.ino(), modified: (meta.mtime(), meta.mtime_nsec()) })
}
