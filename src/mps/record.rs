//! What is wanted of a group, as it outlives the supervisor. In the daemon's own folder: a boot takes both.

use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::daemon::Process;
use crate::host::{Lasting, durable};
use crate::model::share::{MpsGroup, MpsLimits};

const FILE: &str = "state.json";
/// Grows when an older reader would misunderstand.
const FORMAT: u32 = 1;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    pub format: u32,
    pub group: MpsGroup,
    pub wish: Wish,
    /// True from before a board is made exclusive until all are known to be back in DEFAULT mode.
    pub boards_taken: bool,
    /// The daemon as it was last started; another may live if a crash came between start and note.
    pub daemon: Option<Process>,
    pub deaths: u32,
}

/// What is wanted of a group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Wish {
    Rest,
    Serve { exclusive: bool, limits: MpsLimits },
}

impl Record {
    pub fn new(group: MpsGroup) -> Self {
        Self { format: FORMAT, group, wish: Wish::Rest, boards_taken: false, daemon: None, deaths: 0 }
    }

    pub fn write(&self, folder: &Path) -> io::Result<()> {
        durable::write(folder, FILE, &serde_json::to_vec(self)?, Lasting::Process)
    }

    /// None if the folder has no record.
    pub fn read(folder: &Path) -> io::Result<Option<Self>> {
        let bytes = match std::fs::read(folder.join(FILE)) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let record: Self = serde_json::from_slice(&bytes)?;
        match record.format {
            FORMAT => Ok(Some(record)),
            other => Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("format {other} of a later version; this one knows {FORMAT}"),
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::quantity::Bytes;

    #[test]
    fn a_record_is_read_as_it_was_written_and_a_damaged_one_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        assert!(Record::read(dir.path()).unwrap().is_none());
        let limits = MpsLimits { memory: vec![Some(Bytes::from_mib(2000)), None], compute: None };
        let record = Record {
            wish: Wish::Serve { exclusive: true, limits },
            boards_taken: true,
            daemon: Some(Process { pid: 7, started: 9 }),
            ..Record::new(MpsGroup::new(["GPU-1".into(), "GPU-2".into()]))
        };
        record.write(dir.path()).unwrap();
        assert_eq!(Record::read(dir.path()).unwrap(), Some(record.clone()));
        Record { format: 2, ..record }.write(dir.path()).unwrap();
        assert!(Record::read(dir.path()).unwrap_err().to_string().contains("format 2"));
        std::fs::write(dir.path().join(FILE), "{").unwrap();
        assert!(Record::read(dir.path()).is_err());
    }
}
