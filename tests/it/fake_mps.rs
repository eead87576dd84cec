//! The supervisor of MPS daemons as node sees it: it lives on while node's process comes and goes, and
//! falls with the boot. What it was asked for can be looked at; a run of the plugin can be stopped at each request.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex};

use tranche::ledger::Step;
use tranche::model::share::{CLIENT_FOLDER, MpsGroup, MpsLimits, SHM_FOLDER, SharedMemory};
use tranche::supervisor::protocol::{DaemonPhase, DaemonState, MpsClient};
use tranche::supervisor::{Daemons, SupervisorError};

use crate::stop_at::{StopAt, Verb};

/// See the module's text.
pub struct Supervisor {
    folder: PathBuf,
    kept: Mutex<BTreeMap<MpsGroup, (bool, MpsLimits)>>,
    trouble: Mutex<Option<Trouble>>,
    shm: Mutex<Option<SharedMemory>>,
    /// True while no daemon comes to rest.
    stalled: Mutex<bool>,
    goes_on: Condvar,
}

/// How every question is answered meanwhile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trouble {
    Refuses(&'static str),
    /// It cannot do anything about this GPU.
    Lost(&'static str),
    /// Its pod does not run.
    Away,
}

impl Supervisor {
    pub fn new(folder: PathBuf) -> Self {
        Self {
            folder,
            kept: Mutex::default(),
            trouble: Mutex::default(),
            shm: Mutex::default(),
            stalled: Mutex::default(),
            goes_on: Condvar::new(),
        }
    }

    /// The groups that are kept, with EXCLUSIVE_PROCESS or not, and their limits.
    pub fn kept(&self) -> BTreeMap<MpsGroup, (bool, MpsLimits)> {
        self.kept.lock().unwrap().clone()
    }

    /// A boot, or the end of a daemon behind node's back.
    pub fn forget_all(&self) {
        self.kept.lock().unwrap().clear();
        drop(fs::remove_dir_all(&self.folder));
    }

    pub fn trouble(&self, trouble: Option<Trouble>) {
        *self.trouble.lock().unwrap() = trouble;
    }

    /// Whoever asks that a daemon rests waits until this is dropped: a test that fails meanwhile ends all the same.
    pub fn stall(&self) -> Stall<'_> {
        *self.stalled.lock().unwrap() = true;
        Stall(self)
    }

    /// How full the /dev/shm of each daemon is from here on.
    pub fn shm(&self, usage: Option<SharedMemory>) {
        *self.shm.lock().unwrap() = usage;
    }

    fn answer<T>(&self, group: Option<&MpsGroup>, done: impl FnOnce() -> T) -> Result<T, SupervisorError> {
        let concerns =
            |gpu: &str| group.is_some_and(|group| group.devices().iter().any(|one| one.as_str() == gpu));
        match *self.trouble.lock().unwrap() {
            Some(Trouble::Lost(gpu)) if concerns(gpu) => {
                Err(SupervisorError::Refused(format!("{gpu} is lost")))
            }
            Some(Trouble::Refuses(words)) => Err(SupervisorError::Refused(words.to_owned())),
            Some(Trouble::Away) => {
                let (path, source) = ("the socket".to_owned(), std::io::ErrorKind::NotFound.into());
                Err(SupervisorError::Unreachable { path, source })
            }
            None | Some(Trouble::Lost(_)) => Ok(done()),
        }
    }

    fn keep(&self, group: &MpsGroup, exclusive: bool, limits: &MpsLimits) -> DaemonState {
        for below in [CLIENT_FOLDER, SHM_FOLDER] {
            fs::create_dir_all(self.folder.join(group.folder()).join(below)).unwrap();
        }
        self.kept.lock().unwrap().insert(group.clone(), (exclusive, limits.clone()));
        state(group, exclusive, limits)
    }
}

/// No daemon comes to rest before this is dropped.
pub struct Stall<'a>(&'a Supervisor);

impl Drop for Stall<'_> {
    fn drop(&mut self) {
        *self.0.stalled.lock().unwrap() = false;
        self.0.goes_on.notify_all();
    }
}

fn state(group: &MpsGroup, exclusive: bool, limits: &MpsLimits) -> DaemonState {
    DaemonState {
        group: group.clone(),
        exclusive,
        phase: DaemonPhase::Serving { pid: 1 },
        limits: Some(limits.clone()),
        memory_answers: Vec::new(),
        compute_answer: String::new(),
        deaths: 0,
        servers: Vec::new(),
        shm: None,
    }
}

/// The supervisor's client of one run of the plugin.
pub struct SupervisorClient {
    pub supervisor: Arc<Supervisor>,
    pub host: Arc<StopAt>,
}

impl Daemons for SupervisorClient {
    fn keep(
        &self,
        group: &MpsGroup,
        exclusive: bool,
        limits: &MpsLimits,
    ) -> Result<DaemonState, SupervisorError> {
        self.host.demand(&format!("a daemon for {group}"), |record| {
            record.intent.steps.iter().any(|s| matches!(s, Step::Mps { group: g, .. } if g == group))
        });
        let kept = || self.supervisor.answer(Some(group), || self.supervisor.keep(group, exclusive, limits));
        self.host.around(Verb::Keep, kept)
    }

    fn rest(&self, group: &MpsGroup) -> Result<(), SupervisorError> {
        let stalled = self.supervisor.stalled.lock().unwrap();
        drop(self.supervisor.goes_on.wait_while(stalled, |stalled| *stalled).unwrap());
        let rest = || {
            self.supervisor.answer(Some(group), || drop(self.supervisor.kept.lock().unwrap().remove(group)))
        };
        self.host.around(Verb::Rest, rest)
    }

    fn states(&self) -> Result<Vec<DaemonState>, SupervisorError> {
        let kept = self.supervisor.kept();
        let shm = *self.supervisor.shm.lock().unwrap();
        let states = kept
            .iter()
            .map(|(group, (exclusive, limits))| DaemonState { shm, ..state(group, *exclusive, limits) });
        self.supervisor.answer(None, || states.collect())
    }

    fn clients(&self, _: &MpsGroup) -> Result<Vec<MpsClient>, SupervisorError> {
        unimplemented!("preparing asks for no clients")
    }

    fn terminate(&self, _: &MpsGroup, _: MpsClient) -> Result<(), SupervisorError> {
        unimplemented!("preparing ends no clients")
    }
}
