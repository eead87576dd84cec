//! Failures to make MIG devices, as they outlast a process: in [`FILE`], with the boot in which they were seen. Another
//! boot may make what this one could not, so nothing of another boot counts.
//!
//! Losing the file costs little: a place is tried again, and fails again. So it stops nothing, whatever is in it.

use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tracing::warn;

use crate::host::{Durability, Host, durable};
use crate::model::mig::MigPlace;
use crate::model::names::{BootId, ClaimUid, DeviceUuid};

/// In the state folder.
pub const FILE: &str = "mig-failures.json";
const VERSION: u32 = 1;
/// No file of ours has more.
const MOST_BYTES: u64 = 1 << 20;

/// See the module's text.
pub struct FailureFile {
    host: Arc<dyn Host>,
    folder: PathBuf,
    boot: BootId,
    /// Held while the file is written: the last to write knows all that was there before.
    writing: Mutex<()>,
}

/// The last try at a place.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredFailure {
    pub gpu: DeviceUuid,
    pub place: MigPlace,
    pub claim: ClaimUid,
    pub words: String,
    /// When: seconds since 1970.
    pub at: u64,
}

#[derive(Debug, Serialize, Deserialize)]
struct Content {
    version: u32,
    boot: BootId,
    failures: Vec<StoredFailure>,
}

impl FailureFile {
    pub fn new(host: Arc<dyn Host>, folder: PathBuf, boot: BootId) -> Self {
        Self { host, folder, boot, writing: Mutex::default() }
    }

    /// What was seen in this boot less than `limit` before `now` (seconds since 1970), with its age; the `most` youngest.
    /// Blocks its thread.
    pub fn read(&self, now: u64, limit: Duration, most: usize) -> Vec<(StoredFailure, Duration)> {
        let read = self.content().inspect_err(
            |error| warn!(file = FILE, %error, "where MIG devices could not be made before cannot be read; such places are tried again"),
        );
        match read {
            Ok(Some(content)) => fresh(content, &self.boot, now, limit, most),
            Ok(None) | Err(_) => Vec::new(),
        }
    }

    fn content(&self) -> io::Result<Option<Content>> {
        let bytes = durable::read_at_most(&self.folder.join(FILE), MOST_BYTES)?;
        Ok(bytes.map(|bytes| serde_json::from_slice(&bytes)).transpose()?)
    }

    /// Writes what `all` gives; without anything to remember there is no file. Blocks its thread.
    pub fn write(&self, all: impl FnOnce() -> Vec<StoredFailure>) {
        let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let failures = all();
        if let Err(error) = self.replace(failures) {
            warn!(file = FILE, %error, "where MIG devices could not be made cannot be recorded; the next start does not know");
        }
    }

    fn replace(&self, failures: Vec<StoredFailure>) -> io::Result<()> {
        if failures.is_empty() {
            return self.host.remove(&self.folder.join(FILE)).map(drop);
        }
        let bytes = serde_json::to_vec(&Content { version: VERSION, boot: self.boot.clone(), failures })?;
        // After a power failure the boot is another one: there is nothing to flush for.
        self.host.write(&self.folder, FILE, &bytes, Durability::ProcessCrash)
    }
}

/// A failure that is to come, by its time, was told before the clock was set back: how old it is nobody knows.
fn fresh(
    content: Content,
    boot: &BootId,
    now: u64,
    limit: Duration,
    most: usize,
) -> Vec<(StoredFailure, Duration)> {
    if content.version != VERSION || content.boot != *boot {
        return Vec::new();
    }
    let aged = |one: StoredFailure| {
        let age = Duration::from_secs(now.checked_sub(one.at)?);
        (age < limit).then_some((one, age))
    };
    let mut found: Vec<_> = content.failures.into_iter().filter_map(aged).collect();
    found.sort_by_key(|(_, age)| *age);
    found.truncate(most);
    found
}

#[cfg(test)]
pub(super) mod tests {
    use std::path::Path;

    use super::*;
    use crate::host::LocalHost;
    use crate::model::gpu::Placement;

    const LIMIT: Duration = Duration::from_secs(600);

    pub fn file(folder: &Path, boot: &str) -> FailureFile {
        let host = Arc::new(LocalHost { driver: folder.to_owned().into() });
        FailureFile::new(host, folder.to_owned(), boot.into())
    }

    fn failure(start: u32, at: u64) -> StoredFailure {
        StoredFailure {
            gpu: "GPU-1".into(),
            place: MigPlace { profile_id: 19, placement: Placement { start, size: 1 } },
            claim: "c-1".into(),
            words: "no room".into(),
            at,
        }
    }

    #[test]
    fn what_is_written_is_read_in_the_same_boot_while_it_is_fresh() {
        let dir = tempfile::tempdir().unwrap();
        let (one, two) = (failure(0, 1_000), failure(1, 1_300));
        file(dir.path(), "a").write(|| vec![one.clone(), two.clone()]);
        let read = |boot: &str, now, most| file(dir.path(), boot).read(now, LIMIT, most);
        let secs = Duration::from_secs;
        assert_eq!(read("a", 1_400, 9), [(two.clone(), secs(100)), (one.clone(), secs(400))]);
        assert_eq!(read("a", 1_400, 1), [(two.clone(), secs(100))], "the youngest");
        assert_eq!(read("a", 1_600, 9), [(two.clone(), secs(300))]);
        assert_eq!(read("a", 1_200, 9), [(one, secs(200))], "the clock was set back");
        assert_eq!((read("a", 10, 9), read("a", 1_900, 9), read("b", 1_400, 9)), (vec![], vec![], vec![]));
        file(dir.path(), "a").write(Vec::new);
        assert!(!dir.path().join(FILE).exists(), "there is nothing to remember");
        assert_eq!(read("a", 1_400, 9), []);
    }

    #[test]
    fn whatever_is_in_the_file_stops_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let all = file(dir.path(), "a");
        all.write(|| vec![failure(0, 1_000)]);
        let good = std::fs::read_to_string(dir.path().join(FILE)).unwrap();
        let newer = good.replace("\"version\":1", "\"version\":2");
        let long = format!("{good}{}", " ".repeat(1 << 20));
        assert_eq!(all.read(1_000, LIMIT, 9).len(), 1, "{good}");
        for text in ["", "{", "[]", "\u{0}", &good[1..], &good[..good.len() - 1], &newer] {
            std::fs::write(dir.path().join(FILE), text).unwrap();
            assert_eq!(all.read(1_000, LIMIT, 9), [], "{text:?}");
        }
        std::fs::write(dir.path().join(FILE), &long[1..]).unwrap();
        assert_eq!(all.read(1_000, LIMIT, 9), []);
        // Nor does a folder that is not there.
        std::fs::remove_dir_all(dir.path()).unwrap();
        all.write(|| vec![failure(0, 1_000)]);
        assert_eq!(all.read(1_000, LIMIT, 9), []);
    }
}
