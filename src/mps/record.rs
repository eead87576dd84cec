//! The desired state of a group, which outlives the supervisor: one file per group in [`FOLDER`]. Tenants do not see
//! the folder, and it is on no file system of theirs. A record is valid for one boot, because daemons and the compute
//! modes of GPUs do not outlive a boot either.

use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::daemon::Process;
use crate::host::{Durability, boot, durable};
use crate::model::names::BootId;
use crate::model::share::{MpsGroup, MpsLimits};

/// Beside the daemons' folders. A device's UUID has no dot.
pub const FOLDER: &str = ".records";
const ENDING: &str = ".json";
/// In a daemon's own folder: where earlier versions kept it.
const EARLIER: &str = "state.json";
/// Grows when an older reader would misunderstand.
const FORMAT: u32 = 1;
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupRecord {
    pub format: u32,
    pub group: MpsGroup,
    /// The name in the file is that of earlier versions.
    #[serde(rename = "wish")]
    pub desired: DesiredState,
    /// True from before a board is made exclusive until all are known to be back in DEFAULT mode.
    pub boards_taken: bool,
    /// The daemon as it was last started; another may live if a crash came between start and note.
    pub daemon: Option<Process>,
    pub deaths: u32,
    /// In which boot it was written; none where an earlier version wrote it.
    #[serde(default)]
    boot: Option<BootId>,
}

/// What is wanted of a group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum DesiredState {
    Rest,
    Serve { exclusive: bool, limits: MpsLimits },
}

impl GroupRecord {
    pub fn new(group: MpsGroup) -> Self {
        Self {
            format: FORMAT,
            group,
            desired: DesiredState::Rest,
            boards_taken: false,
            daemon: None,
            deaths: 0,
            boot: None,
        }
    }

    fn understand(bytes: &[u8]) -> io::Result<Self> {
        let record: Self = serde_json::from_slice(bytes)?;
        match record.format {
            FORMAT => Ok(record),
            other => Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("format {other} of a later version; this version reads {FORMAT}"),
            )),
        }
    }
}

/// All records of this boot.
#[derive(Debug)]
pub struct Records {
    root: PathBuf,
    boot: Option<BootId>,
}

impl Records {
    /// Those of the daemons below `root`.
    pub fn new(root: &Path) -> Self {
        Self { root: root.to_owned(), boot: boot::boot_id(Path::new(BOOT_ID)).ok() }
    }

    fn folder(&self) -> PathBuf {
        self.root.join(FOLDER)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder().join(format!("{name}{ENDING}"))
    }

    pub fn write(&self, record: &GroupRecord) -> io::Result<()> {
        let record = GroupRecord { boot: self.boot.clone(), ..record.clone() };
        let (folder, name) = (self.folder(), record.group.folder());
        let write = || {
            durable::write(
                &folder,
                &format!("{name}{ENDING}"),
                &serde_json::to_vec(&record)?,
                Durability::ProcessCrash,
            )
        };
        match write() {
            // Made once, and again if somebody took it away.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                std::fs::create_dir_all(&folder)?;
                write()
            }
            done => done,
        }
    }

    pub fn remove(&self, name: &str) -> io::Result<()> {
        durable::remove(&self.path(name)).map(drop)
    }

    /// The names of the groups that there may be a record of, sorted.
    pub fn names(&self) -> io::Result<Vec<String>> {
        let mut names: Vec<String> = match durable::names(&self.folder()) {
            Ok(files) => {
                files.iter().filter_map(|file| file.strip_suffix(ENDING)).map(str::to_owned).collect()
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(error),
        };
        names.retain(|name| !name.starts_with(durable::TEMP_PREFIX));
        let folders = durable::names(&self.root)?;
        names.extend(folders.into_iter().filter(|name| self.root.join(name).join(EARLIER).is_file()));
        names.sort();
        names.dedup();
        Ok(names)
    }

    /// None if the group has none of this boot. One where earlier versions kept it moves here, and is the newer one if
    /// there are two: that version ran in between, or the move was not finished.
    pub fn read(&self, name: &str) -> io::Result<Option<GroupRecord>> {
        let earlier = self.root.join(name).join(EARLIER);
        if let Some(bytes) = read(&earlier)? {
            let record = GroupRecord::understand(&bytes)?;
            self.write(&record)?;
            std::fs::remove_file(&earlier)?;
            return Ok(Some(record));
        }
        let Some(bytes) = read(&self.path(name))? else { return Ok(None) };
        let record = GroupRecord::understand(&bytes)?;
        if record.boot.is_some() && self.boot.is_some() && record.boot != self.boot {
            self.remove(name)?;
            return Ok(None);
        }
        Ok(Some(record))
    }
}

fn read(path: &Path) -> io::Result<Option<Vec<u8>>> {
    match std::fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::model::quantity::Bytes;

    fn record() -> GroupRecord {
        let limits = MpsLimits { memory: vec![Some(Bytes::from_mib(2000)), None], compute: None };
        GroupRecord {
            desired: DesiredState::Serve { exclusive: true, limits },
            boards_taken: true,
            daemon: Some(Process { pid: 7, started: 9 }),
            ..GroupRecord::new(MpsGroup::new(["GPU-1".into(), "GPU-2".into()]))
        }
    }

    fn records(root: &Path, boot: &str) -> Records {
        Records { root: root.to_owned(), boot: Some(BootId::new(boot)) }
    }

    #[test]
    fn a_record_is_read_as_it_was_written_and_a_damaged_one_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let (records, record) = (records(dir.path(), "a"), record());
        let name = record.group.folder();
        assert_eq!((records.names().unwrap(), records.read(&name).unwrap()), (vec![], None));
        records.write(&record).unwrap();
        assert_eq!(records.names().unwrap(), std::slice::from_ref(&name));
        let written = GroupRecord { boot: records.boot.clone(), ..record.clone() };
        assert_eq!(records.read(&name).unwrap(), Some(written));
        records.write(&GroupRecord { format: 2, ..record }).unwrap();
        assert!(records.read(&name).unwrap_err().to_string().contains("format 2"));
        fs::write(records.path(&name), "{").unwrap();
        assert!(records.read(&name).is_err());
        records.remove(&name).unwrap();
        records.remove(&name).unwrap();
        assert_eq!(records.names().unwrap(), [""; 0]);
    }

    #[test]
    fn a_record_of_an_earlier_version_is_understood() {
        let text =
            br#"{"format":1,"group":["GPU-1"],"wish":"Rest","boards_taken":false,"daemon":null,"deaths":3}"#;
        let record = GroupRecord::understand(text).unwrap();
        assert_eq!((&record.desired, record.deaths), (&DesiredState::Rest, 3));
        assert_eq!(serde_json::to_value(&record).unwrap()["wish"], "Rest");
    }

    #[test]
    fn one_of_another_boot_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let name = record().group.folder();
        records(dir.path(), "a").write(&record()).unwrap();
        assert_eq!(records(dir.path(), "b").read(&name).unwrap(), None);
        assert_eq!(records(dir.path(), "a").read(&name).unwrap(), None, "it is gone");
    }

    #[test]
    fn one_of_the_earlier_place_moves_here_and_wins() {
        let dir = tempfile::tempdir().unwrap();
        let (records, record) = (records(dir.path(), "a"), record());
        let name = record.group.folder();
        let earlier = dir.path().join(&name).join(EARLIER);
        fs::create_dir(dir.path().join(&name)).unwrap();
        let mut text = serde_json::to_value(&record).unwrap();
        text.as_object_mut().unwrap().remove("boot");
        records.write(&GroupRecord::new(record.group.clone())).unwrap();
        fs::write(&earlier, text.to_string()).unwrap();
        assert_eq!(records.names().unwrap(), std::slice::from_ref(&name));
        assert_eq!(records.read(&name).unwrap(), Some(record.clone()));
        assert!(!earlier.exists());
        assert_eq!(
            records.read(&name).unwrap().map(|read| read.desired),
            Some(record.desired),
            "here by now"
        );
    }
}
