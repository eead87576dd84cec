//! `state.json`: what set-calls have changed, shared by all processes.
//!
//! Changed only under a lock on `lock` in the same directory, and replaced as a
//! whole. Each change remembers what the control file said at that time and
//! holds only as long as it says the same: the operator has the last word.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::Write as _;
use std::os::fd::AsRawFd as _;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

use crate::code::{Answer, Code};
use crate::control::Control;
use crate::mig::Mig;

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct State {
    /// The board that all of this is about.
    pub profile: String,
    pub gpus: BTreeMap<usize, GpuState>,
    /// How often each counted fault has been met.
    pub fault_hits: BTreeMap<String, u64>,
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct GpuState {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mig: Option<Change<Mig>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compute_mode: Option<Change<u32>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub persistence: Option<Change<bool>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accounting: Option<Change<bool>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub power_limit_mw: Option<u32>,
    /// As `nvidia-smi compute-policy` numbers it: 0 default to 3 long.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub time_slice: Option<u32>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub limits: BTreeMap<String, Limit>,
}

/// A value, and what the control file said when it was set.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Change<T> {
    pub over: String,
    pub value: T,
}

impl<T: Clone> Change<T> {
    pub fn new(said: &impl Serialize, value: T) -> Option<Change<T>> {
        Some(Change { over: word(said), value })
    }

    /// The value, if the control file still says the same.
    pub fn current(change: Option<&Change<T>>, said: &impl Serialize) -> Option<T> {
        change.filter(|c| c.over == word(said)).map(|c| c.value.clone())
    }
}

fn word(said: &impl Serialize) -> String {
    serde_json::to_string(said).unwrap_or_default()
}

/// A memory limit of one cgroup on one board, in bytes.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct Limit {
    pub soft: u64,
    pub hard: u64,
}

impl State {
    /// Forgets what the control file overrules. It would come back once the file says again what it said before. True if
    /// there was any.
    fn forget_overruled(&mut self, control: &Control) -> bool {
        let mut forgot = false;
        for (index, state) in &mut self.gpus {
            let said = control.gpus.get(index).cloned().unwrap_or_default();
            forgot |= forget(&mut state.mig, &said.mig);
            forgot |= forget(&mut state.compute_mode, &said.compute_mode);
            forgot |= forget(&mut state.persistence, &said.persistence);
            forgot |= forget(&mut state.accounting, &said.accounting);
        }
        forgot
    }
}

fn forget<T: Clone>(change: &mut Option<Change<T>>, said: &impl Serialize) -> bool {
    change.is_some() && Change::current(change.as_ref(), said).is_none() && change.take().is_some()
}

/// Forgets what the control file overrules, before it says something else. The caller has the lock.
pub fn forget_overruled(dir: &Path, control: &Control) -> std::io::Result<()> {
    let mut state = read(dir);
    if !state.forget_overruled(control) {
        return Ok(());
    }
    replace(dir, "state.json", &serde_json::to_string_pretty(&state)?)
}

/// Reads the state; none or a damaged one is an empty one.
pub fn read(dir: &Path) -> State {
    fs::read_to_string(dir.join("state.json"))
        .ok()
        .and_then(|t| serde_json::from_str(&t).ok())
        .unwrap_or_default()
}

/// Changes the state under the lock. Nothing is written when `change` fails.
pub fn update<T>(dir: &Path, profile: &str, change: impl FnOnce(&mut State) -> Answer<T>) -> Answer<T> {
    let _lock = Lock::take(dir).map_err(|_| Code::UNKNOWN)?;
    let mut state = read(dir);
    if state.profile != profile {
        state = State { profile: profile.to_owned(), ..State::default() };
    }
    let answer = change(&mut state)?;
    let text = serde_json::to_string_pretty(&state).map_err(|_| Code::UNKNOWN)?;
    replace(dir, "state.json", &text).map_err(|_| Code::UNKNOWN)?;
    Ok(answer)
}

/// Writes a file of the directory so that readers see the old one or the new one.
pub fn replace(dir: &Path, name: &str, text: &str) -> std::io::Result<()> {
    fs::create_dir_all(dir)?;
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let temporary = dir.join(format!(".{name}.{}.{number}", std::process::id()));
    let mut file = File::create(&temporary)?;
    file.write_all(text.as_bytes())?;
    drop(file);
    fs::rename(&temporary, dir.join(name))
}

/// An exclusive lock on the directory's state, held until dropped.
pub struct Lock {
    _file: File,
}

impl Lock {
    pub fn take(dir: &Path) -> std::io::Result<Lock> {
        fs::create_dir_all(dir)?;
        let file = OpenOptions::new().create(true).truncate(false).write(true).open(dir.join("lock"))?;
        loop {
            // SAFETY: the descriptor is open as long as `file` lives.
            if unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX) } == 0 {
                return Ok(Lock { _file: file });
            }
            let error = std::io::Error::last_os_error();
            if error.kind() != std::io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
    }
}
