//! The GPU's compute mode, put back whatever happens: its first value is in a file before it is changed, and
//! the next start puts it back where this one could not.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use anyhow::{Context, Result, bail};
use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};

use crate::nvml::{Mode, ModeSetter};

const FILE: &str = "compute-mode.json";
const LOCK: &str = "lock";

/// Who can set compute modes.
pub trait SetMode {
    fn mode(&self, uuid: &str) -> Result<Mode>;
    fn set_mode(&self, uuid: &str, mode: Mode) -> Result<()>;
}

impl SetMode for ModeSetter {
    fn mode(&self, uuid: &str) -> Result<Mode> {
        ModeSetter::mode(self, uuid)
    }
    fn set_mode(&self, uuid: &str, mode: Mode) -> Result<()> {
        ModeSetter::set_mode(self, uuid, mode)
    }
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    uuid: String,
    mode: u32,
}

/// One run at a time.
pub fn lock(folder: &Path) -> Result<Flock<File>> {
    fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
    let path = folder.join(LOCK);
    let file = OpenOptions::new().create(true).truncate(false).write(true).open(&path);
    let file = file.with_context(|| format!("open {}", path.display()))?;
    match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => Ok(lock),
        Err((_, error)) => {
            bail!("another gpu-check runs ({}: {error}); wait for it, or end it", path.display())
        }
    }
}

/// An error if a run that was cut off has left a compute mode to be put back.
pub fn nothing_left(folder: &Path) -> Result<()> {
    let path = folder.join(FILE);
    if path.exists() {
        bail!(
            "an earlier run was cut off and has left the compute mode of a GPU changed ({}): \
             `gpu-check restore` puts it back; this run may set none",
            path.display()
        );
    }
    Ok(())
}

/// Puts back what a run that was cut off has left; says what it did.
pub fn recover(modes: &dyn SetMode, folder: &Path) -> Result<Option<String>> {
    let path = folder.join(FILE);
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error).with_context(|| format!("read {}", path.display())),
    };
    let record: Record = serde_json::from_str(&text).with_context(|| {
        format!(
            "{} is damaged: look with `nvidia-smi -q -d COMPUTE`, set the mode that the GPU had, remove the file",
            path.display()
        )
    })?;
    let (now, then) = (modes.mode(&record.uuid)?, Mode::of(record.mode));
    if now != then {
        modes.set_mode(&record.uuid, then)?;
    }
    fs::remove_file(&path).with_context(|| format!("remove {}", path.display()))?;
    Ok((now != then).then(|| {
        format!("{} was left in {now} by a run that was cut off; it is in {then} again", record.uuid)
    }))
}

/// Holds a GPU's compute mode until it is dropped.
pub struct Guard {
    modes: Rc<dyn SetMode>,
    uuid: String,
    original: Mode,
    path: PathBuf,
}

impl Guard {
    /// The mode as it is now is what will be put back.
    pub fn take(modes: Rc<dyn SetMode>, folder: &Path, uuid: &str) -> Result<Self> {
        let path = folder.join(FILE);
        let original = modes.mode(uuid)?;
        let record = Record { uuid: uuid.to_owned(), mode: original.number() };
        let mut file = File::create_new(&path).with_context(|| {
            format!("create {}, which only a run that was cut off leaves", path.display())
        })?;
        file.write_all(&serde_json::to_vec(&record)?)?;
        file.sync_all()?;
        Ok(Self { modes, uuid: uuid.to_owned(), original, path })
    }

    /// Sets a mode, read back.
    pub fn set(&self, mode: Mode) -> Result<()> {
        if self.modes.mode(&self.uuid)? != mode {
            self.modes.set_mode(&self.uuid, mode)?;
        }
        match self.modes.mode(&self.uuid)? {
            now if now == mode => Ok(()),
            now => bail!("the GPU was set to {mode} and says {now}"),
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        match self.set(self.original).and_then(|()| Ok(fs::remove_file(&self.path)?)) {
            Ok(()) => {}
            Err(error) => eprintln!(
                "gpu-check: the compute mode of {} could not be put back to {}: {error:#}; run `gpu-check restore`, \
                 or `nvidia-smi -i {} -c {}`",
                self.uuid,
                self.original,
                self.uuid,
                self.original.number()
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    struct Board {
        mode: RefCell<Mode>,
        refuses: RefCell<bool>,
    }

    impl SetMode for Board {
        fn mode(&self, _: &str) -> Result<Mode> {
            Ok(*self.mode.borrow())
        }
        fn set_mode(&self, _: &str, mode: Mode) -> Result<()> {
            if *self.refuses.borrow() {
                bail!("not permitted");
            }
            *self.mode.borrow_mut() = mode;
            Ok(())
        }
    }

    fn board() -> Rc<Board> {
        Rc::new(Board { mode: RefCell::new(Mode::Default), refuses: RefCell::new(false) })
    }

    #[test]
    fn the_mode_is_put_back_when_all_is_done_and_on_a_panic() {
        let (folder, board) = (tempfile::tempdir().unwrap(), board());
        for panics in [false, true] {
            let guard = Guard::take(board.clone(), folder.path(), "GPU-1").unwrap();
            guard.set(Mode::ExclusiveProcess).unwrap();
            assert_eq!(*board.mode.borrow(), Mode::ExclusiveProcess);
            assert!(folder.path().join(FILE).exists());
            let end = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                let _held = guard;
                assert!(!panics, "on purpose");
            }));
            assert_eq!(end.is_err(), panics);
            assert_eq!(*board.mode.borrow(), Mode::Default);
            assert!(!folder.path().join(FILE).exists());
        }
    }

    #[test]
    fn a_run_that_was_cut_off_is_made_good_by_the_next() {
        let (folder, board) = (tempfile::tempdir().unwrap(), board());
        let guard = Guard::take(board.clone(), folder.path(), "GPU-1").unwrap();
        guard.set(Mode::ExclusiveProcess).unwrap();
        std::mem::forget(guard);
        assert!(Guard::take(board.clone(), folder.path(), "GPU-1").is_err(), "never over an old record");
        let words = nothing_left(folder.path()).unwrap_err().to_string();
        assert!(words.contains("gpu-check restore"), "{words}");
        let words = recover(&*board, folder.path()).unwrap().unwrap();
        assert!(words.contains("GPU-1 was left in EXCLUSIVE_PROCESS"), "{words}");
        assert_eq!(*board.mode.borrow(), Mode::Default);
        assert_eq!(recover(&*board, folder.path()).unwrap(), None);
        nothing_left(folder.path()).unwrap();
    }

    #[test]
    fn the_record_stays_while_the_mode_cannot_be_put_back() {
        let (folder, board) = (tempfile::tempdir().unwrap(), board());
        let guard = Guard::take(board.clone(), folder.path(), "GPU-1").unwrap();
        guard.set(Mode::ExclusiveProcess).unwrap();
        *board.refuses.borrow_mut() = true;
        drop(guard);
        assert!(recover(&*board, folder.path()).is_err());
        *board.refuses.borrow_mut() = false;
        assert!(recover(&*board, folder.path()).unwrap().is_some());
    }

    #[test]
    fn a_damaged_record_says_what_to_do() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join(FILE), "{").unwrap();
        let words = format!("{:#}", recover(&*board(), folder.path()).unwrap_err());
        assert!(words.contains("nvidia-smi -q -d COMPUTE"), "{words}");
    }

    #[test]
    fn two_runs_at_once_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let _first = lock(folder.path()).unwrap();
        let words = format!("{:#}", lock(folder.path()).unwrap_err());
        assert!(words.contains("another gpu-check runs"), "{words}");
    }
}
