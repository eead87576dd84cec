//! Files that are either complete or absent, whenever the process or the machine stops.
//!
//! Temporary files carry [`TEMP_PREFIX`]; a crash can leave one behind, and [`remove_temporaries`] clears it.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::Duration;

/// Starts the names of files that are being written.
pub const TEMP_PREFIX: &str = ".tranche-tmp-";

/// What the written bytes must survive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Durability {
    /// A crash of this process. For folders that do not outlive the boot anyway.
    ProcessCrash,
    /// A power failure: file and folder are flushed to the disk.
    PowerLoss,
}

/// Creates or replaces `folder/name` in one go.
pub fn write(folder: &Path, name: &str, bytes: &[u8], durability: Durability) -> io::Result<()> {
    let temp = folder.join(format!("{TEMP_PREFIX}{name}"));
    let written = write_temp(&temp, bytes, durability).and_then(|()| fs::rename(&temp, folder.join(name)));
    if written.is_err() {
        // The first error is the one to tell; the file is cleared at the next start if this fails too.
        let _ = fs::remove_file(&temp);
    }
    written?;
    match durability {
        Durability::ProcessCrash => Ok(()),
        Durability::PowerLoss => File::open(folder)?.sync_all(),
    }
}

fn write_temp(temp: &Path, bytes: &[u8], durability: Durability) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o644).open(temp)?;
    file.write_all(bytes)?;
    match durability {
        Durability::ProcessCrash => Ok(()),
        Durability::PowerLoss => file.sync_data(),
    }
}

/// Puts `bytes` at `offset` and cuts off whatever stood behind it (the rest of a torn append).
/// The bytes survive a crash of this process, but not a power failure.
pub fn append_at(path: &Path, offset: u64, bytes: &[u8]) -> io::Result<()> {
    let file = OpenOptions::new().write(true).open(path)?;
    if file.metadata()?.len() > offset {
        file.set_len(offset)?;
    }
    file.write_all_at(bytes, offset)
}

/// What a file has, up to so many bytes. None: there is none.
///
/// # Errors
/// It cannot be read.
pub fn read_at_most(path: &Path, most: u64) -> io::Result<Option<Vec<u8>>> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let mut bytes = Vec::new();
    file.take(most).read_to_end(&mut bytes)?;
    Ok(Some(bytes))
}

/// Removes a file; one that is not there is fine. True if it was there.
pub fn remove(path: &Path) -> io::Result<bool> {
    match fs::remove_file(path) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        // A read-only file system refuses before it looks whether there is anything to remove.
        Err(_) if is_absent(path) => Ok(false),
        Err(error) => Err(error),
    }
}

fn is_absent(path: &Path) -> bool {
    fs::symlink_metadata(path).is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
}

/// Removes files that a process which is no more did not finish. `ours` is asked about the final name;
/// what is younger than `age` may still be in the making by another instance and stays.
pub fn remove_temporaries(folder: &Path, age: Duration, ours: impl Fn(&str) -> bool) -> io::Result<usize> {
    let mut removed = 0;
    for name in names(folder)? {
        let path = folder.join(&name);
        if name.strip_prefix(TEMP_PREFIX).is_some_and(&ours) && is_older(&path, age) && remove(&path)? {
            removed += 1;
        }
    }
    Ok(removed)
}

/// False too for a file that is gone, and for one from the future.
fn is_older(path: &Path, age: Duration) -> bool {
    let modified = fs::metadata(path).and_then(|meta| meta.modified()).ok();
    modified.and_then(|time| time.elapsed().ok()).is_some_and(|elapsed| elapsed >= age)
}

/// Names of the entries of a folder, sorted; names that are not UTF-8 are never ours and are left out.
pub fn names(folder: &Path) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder)? {
        if let Ok(name) = entry?.file_name().into_string() {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_in_whole_and_a_torn_tail_is_cut() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "a", b"first, and rather long", Durability::PowerLoss).unwrap();
        write(dir.path(), "a", b"second", Durability::ProcessCrash).unwrap();
        assert_eq!(fs::read(dir.path().join("a")).unwrap(), b"second");
        append_at(&dir.path().join("a"), 3, b"!").unwrap();
        assert_eq!(fs::read(dir.path().join("a")).unwrap(), b"sec!");
        assert_eq!(names(dir.path()).unwrap(), ["a"]);
    }

    #[test]
    fn leftovers_of_a_crash_go_and_other_files_stay() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(format!("{TEMP_PREFIX}ours.json")), "half").unwrap();
        fs::write(dir.path().join(format!("{TEMP_PREFIX}theirs")), "half").unwrap();
        fs::write(dir.path().join("ours.json"), "whole").unwrap();
        assert_eq!(
            remove_temporaries(dir.path(), Duration::ZERO, |name| name.starts_with("ours")).unwrap(),
            1
        );
        fs::write(dir.path().join(format!("{TEMP_PREFIX}ours.young")), "half").unwrap();
        assert_eq!(remove_temporaries(dir.path(), Duration::from_secs(600), |_| true).unwrap(), 0);
        fs::remove_file(dir.path().join(format!("{TEMP_PREFIX}ours.young"))).unwrap();
        assert_eq!(names(dir.path()).unwrap(), [format!("{TEMP_PREFIX}theirs"), "ours.json".to_owned()]);
    }
}
