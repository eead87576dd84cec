//! The machine, with a switch: stops the process at any verb that it does to its host, or makes the verb fail.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use tranche::host::{Durability, Host, LocalHost, ProgramError, durable};
use tranche::ledger::{self, Damage, Record, Step};
use tranche::model::names::DeviceUuid;
use tranche::node::mig_mode::FOLDER;

/// What a life does to its host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verb {
    WriteRecord,
    Mark,
    WriteEdits,
    Remove,
    TimeSlice,
    Keep,
    Rest,
    MakeMig,
    EndMig,
    /// A record of a MIG mode.
    WriteMode,
    SwitchMig,
}

impl Verb {
    /// Can it be cut off in the middle?
    pub fn divisible(self) -> bool {
        matches!(
            self,
            Self::WriteRecord
                | Self::Mark
                | Self::WriteEdits
                | Self::MakeMig
                | Self::EndMig
                | Self::WriteMode
        )
    }
}

/// Where the process stops: at a verb, before, amid or after its effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum When {
    Before,
    Half,
    After,
}

/// A verb's answer instead of its effect.
#[derive(Debug, Clone, Copy)]
pub enum Fault {
    /// Nothing was done but, for an append, its first half.
    Fails(i32),
    /// It was done, and then the disk did not confirm it.
    DoneButFails(i32),
}

pub const ENOSPC: i32 = 28;
pub const EIO: i32 = 5;

type Stops = Box<dyn Fn(usize, Verb) -> Option<When> + Send>;
type Faults = Box<dyn Fn(usize, Verb) -> Option<Fault> + Send>;

/// The machine, with a switch. Also watches that no effect comes before its record.
pub struct StopAt {
    real: LocalHost,
    ledger: PathBuf,
    state: Mutex<StopState>,
}

#[derive(Default)]
struct StopState {
    log: Vec<Verb>,
    stop: Option<Stops>,
    faults: Option<Faults>,
    stopped: bool,
    broken: Vec<String>,
}

enum Act {
    Go,
    Half,
    GoAndStop,
    Fault(Fault),
}

/// Ends the thread as a killed process would: without a word.
fn stop() -> ! {
    std::panic::resume_unwind(Box::new("stopped"))
}

impl StopAt {
    pub fn new(real: LocalHost, ledger: PathBuf) -> Self {
        Self { real, ledger, state: Mutex::default() }
    }

    /// What came before its record.
    pub fn broken(&self) -> Vec<String> {
        self.state.lock().unwrap().broken.clone()
    }

    /// From now on counted: stops at the `index`th verb.
    pub fn stop_at(&self, index: usize, when: When) {
        self.stop(move |at, _| (at == index).then_some(when));
    }

    /// Stops at the next verb of that kind.
    pub fn stop_at_next(&self, verb: Verb, when: When) {
        self.stop(move |_, now| (now == verb).then_some(when));
    }

    fn stop(&self, stop: impl Fn(usize, Verb) -> Option<When> + Send + 'static) {
        let mut state = self.state.lock().unwrap();
        state.stop = Some(Box::new(stop));
        state.log.clear();
    }

    pub fn faults(&self, faults: impl Fn(usize, Verb) -> Option<Fault> + Send + 'static) {
        let mut state = self.state.lock().unwrap();
        state.faults = Some(Box::new(faults));
        state.log.clear();
    }

    pub fn no_faults(&self) {
        self.state.lock().unwrap().faults = None;
    }

    pub fn stopped(&self) -> bool {
        self.state.lock().unwrap().stopped
    }

    /// The verbs so far.
    pub fn log(&self) -> Vec<Verb> {
        self.state.lock().unwrap().log.clone()
    }

    fn enter(&self, verb: Verb) -> Act {
        let mut state = self.state.lock().unwrap();
        let index = state.log.len();
        let at = state.stop.as_ref().and_then(|stop| stop(index, verb));
        if state.stopped || at == Some(When::Before) {
            state.stopped = true;
            drop(state);
            stop();
        }
        state.log.push(verb);
        state.stopped = at.is_some();
        match at {
            Some(When::Half) => Act::Half,
            Some(_) => Act::GoAndStop,
            None => state.faults.as_ref().and_then(|f| f(index, verb)).map_or(Act::Go, Act::Fault),
        }
    }

    /// I1: the intent is durable before the first effect.
    pub fn demand(&self, what: &str, recorded: impl Fn(&Record) -> bool) {
        // What a dead process would have done next does not count.
        if self.stopped() {
            return;
        }
        if !read_records(&self.ledger).flatten().any(|record| recorded(&record)) {
            self.state.lock().unwrap().broken.push(format!("{what} without a record that says so"));
        }
    }

    /// The same of another record.
    pub fn require(&self, what: &str, recorded: bool) {
        if !recorded && !self.stopped() {
            self.state.lock().unwrap().broken.push(format!("{what} without a record that says so"));
        }
    }

    /// A question to another process: it is answered whole or not at all.
    pub fn around<T>(&self, verb: Verb, effect: impl FnOnce() -> T) -> T {
        let act = self.enter(verb);
        let done = effect();
        if matches!(act, Act::GoAndStop | Act::Half) {
            stop();
        }
        done
    }

    /// A call that can be cut off when its first half is done.
    pub fn halves<T>(&self, verb: Verb, half: impl FnOnce(), whole: impl FnOnce() -> T) -> T {
        match self.enter(verb) {
            Act::Half => {
                half();
                stop()
            }
            Act::GoAndStop => {
                whole();
                stop()
            }
            Act::Go | Act::Fault(_) => whole(),
        }
    }

    fn io<T>(&self, verb: Verb, half: impl FnOnce(), whole: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        match self.enter(verb) {
            Act::Go => whole(),
            Act::Half => {
                half();
                stop()
            }
            Act::GoAndStop => {
                whole().unwrap();
                stop()
            }
            Act::Fault(Fault::Fails(errno)) => {
                if verb == Verb::Mark {
                    half();
                }
                Err(io::Error::from_raw_os_error(errno))
            }
            Act::Fault(Fault::DoneButFails(errno)) => {
                whole()?;
                Err(io::Error::from_raw_os_error(errno))
            }
        }
    }
}

impl Host for StopAt {
    fn write(&self, folder: &Path, name: &str, bytes: &[u8], durability: Durability) -> io::Result<()> {
        let verb = match folder {
            folder if folder == self.ledger => Verb::WriteRecord,
            folder if folder.ends_with(FOLDER) => Verb::WriteMode,
            _ => Verb::WriteEdits,
        };
        match verb {
            Verb::WriteRecord if durability != Durability::PowerLoss => {
                self.state.lock().unwrap().broken.push(format!("{name} would not outlast a power failure"));
            }
            Verb::WriteEdits => self.demand(name, |record| record.cdi_file() == Some(name)),
            _ => {}
        }
        let temporary = folder.join(format!("{}{name}", durable::TEMP_PREFIX));
        let half = || fs::write(temporary, &bytes[..bytes.len() / 2]).unwrap();
        self.io(verb, half, || self.real.write(folder, name, bytes, durability))
    }

    fn append_at(&self, path: &Path, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let half = || self.real.append_at(path, offset, &bytes[..bytes.len() / 2]).unwrap();
        self.io(Verb::Mark, half, || self.real.append_at(path, offset, bytes))
    }

    fn remove(&self, path: &Path) -> io::Result<bool> {
        self.io(Verb::Remove, || (), || self.real.remove(path))
    }

    fn set_time_slice(&self, gpu: &DeviceUuid, level: u8) -> Result<(), ProgramError> {
        self.demand(&format!("time slice {level} of {gpu}"), |record| {
            record.intent.steps.iter().any(|s| matches!(s, Step::TimeSlice { gpu: g, .. } if g == gpu))
        });
        let act = self.enter(Verb::TimeSlice);
        let done = self.real.set_time_slice(gpu, level);
        if matches!(act, Act::GoAndStop | Act::Half) {
            stop();
        }
        done
    }
}

/// The ledger, as it is on the disk.
pub fn read_records(ledger: &Path) -> impl Iterator<Item = Result<Record, Damage>> + '_ {
    let names = durable::names(ledger).unwrap().into_iter();
    let records = names.filter(|name| name.ends_with(".rec") && !name.starts_with('.'));
    // A record may go away between the listing and the reading.
    let bytes = records.filter_map(move |name| fs::read(ledger.join(name)).ok());
    bytes.map(|bytes| ledger::decode(&bytes).map(|decoded| decoded.record))
}
