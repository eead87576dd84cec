//! The processes that use the GPUs: NVML's process lists, read on a thread of their own, because a look at the GPUs
//! may take half a minute and the watchdog must not be without figures meanwhile.
//!
//! NVML reports host PIDs. A GPU has three lists: compute (bare processes, MPS servers, MPS clients), MPS compute
//! (the clients once more) and graphics. From Volta on, the memory of an MPS client is reported for the client, and
//! the server is a process beside it. So the lists are merged by PID, the larger figure counts, and nothing is
//! counted twice.
//!
//! The same thread reads the figures for metrics ([`super::figures`]), by questions of their own: what hangs there does
//! not take the lists along.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError as Code;
use tokio::sync::mpsc;

use super::NvmlError;
use super::figures::{self, Figures, FiguresSubject, Memo};
use super::raw::{self, ProcessListKind};
use super::worker::{self, CallProgress, Reply, Workers};
use crate::model::driver::DriverPlace;
use crate::model::names::DeviceUuid;
use crate::model::quantity::Bytes;

/// A process that uses a board.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuProcess {
    /// In the host's PID namespace.
    pub pid: u32,
    /// Device memory of all its contexts; none: the driver cannot tell.
    pub used: Option<Bytes>,
    pub context: ContextKind,
}

/// What the lists tell of a process's contexts. That it is an MPS server they do not tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ContextKind {
    /// A client of an MPS server.
    MpsClient,
    /// A compute process that is no client: without MPS, or an MPS server.
    Compute,
    /// A compute process, and the driver has no list of the MPS clients among them.
    ComputeOfUnknownKind,
    Graphics,
}

/// The processes of one board, by PID.
#[derive(Debug)]
pub struct BoardProcesses {
    pub board: DeviceUuid,
    pub processes: Result<Vec<GpuProcess>, NvmlError>,
}

/// Asks NVML for process lists. Loads nothing before the first question.
#[derive(Debug)]
pub struct ProcessWatch {
    driver: DriverPlace,
    limit: Duration,
    workers: Workers<ProcessQuery>,
}

#[derive(Debug)]
enum ProcessQuery {
    Lists { boards: Vec<DeviceUuid>, reply: Reply<Vec<BoardProcesses>> },
    Figures { subjects: Vec<FiguresSubject>, reply: Reply<Vec<(DeviceUuid, Figures)>> },
}

impl ProcessWatch {
    /// `limit`: how long the answer about all boards of a question may take.
    pub fn new(driver: DriverPlace, limit: Duration) -> Self {
        Self { driver, limit, workers: Workers::new("nvml-processes") }
    }

    /// The processes of these boards, in their order. A board that fails by itself does not spoil the others.
    ///
    /// # Errors
    /// The library cannot be used, or did not answer in time.
    pub async fn processes(&self, boards: Vec<DeviceUuid>) -> Result<Vec<BoardProcesses>, NvmlError> {
        self.workers.ask(self.limit, self.serve(), |reply| ProcessQuery::Lists { boards, reply }).await
    }

    /// Figures of these devices. One that cannot be asked at all is left out.
    ///
    /// # Errors
    /// The library cannot be used, or did not answer in time.
    pub async fn figures(
        &self,
        subjects: Vec<FiguresSubject>,
    ) -> Result<Vec<(DeviceUuid, Figures)>, NvmlError> {
        self.workers.ask(self.limit, self.serve(), |reply| ProcessQuery::Figures { subjects, reply }).await
    }

    fn serve(&self) -> impl FnOnce(mpsc::Receiver<ProcessQuery>, Arc<CallProgress>) + Send + 'static {
        let driver = self.driver.clone();
        move |queue, progress| ProcessThread { driver, progress, open: None }.serve(queue)
    }

    /// Lets go of the thread and the library until the next question.
    pub fn rest(&self) {
        self.workers.rest();
    }

    /// Threads that wait in a call that did not return within its deadline.
    pub fn stuck_threads(&self) -> usize {
        self.workers.stuck()
    }
}

/// The state of the thread.
struct ProcessThread {
    driver: DriverPlace,
    progress: Arc<CallProgress>,
    open: Option<LoadedLibrary>,
}

/// A library that is loaded and initialised, and the handles that it gave. Fields are dropped in this order.
struct LoadedLibrary {
    boards: HashMap<DeviceUuid, raw::DeviceHandle>,
    memos: HashMap<DeviceUuid, Memo>,
    buffer: raw::Buffer,
    samples: raw::Samples,
    nvml: Nvml,
}

impl ProcessThread {
    fn serve(mut self, mut queue: mpsc::Receiver<ProcessQuery>) {
        // A reply that fails has nobody who waits any more: the caller missed its deadline and said so itself.
        while let Some(query) = queue.blocking_recv() {
            match query {
                ProcessQuery::Lists { boards, reply } => {
                    let answer = self.answer(|open, progress| open.all_lists(boards, progress));
                    let _ = reply.send(answer);
                }
                ProcessQuery::Figures { subjects, reply } => {
                    let answer = self.answer(|open, progress| open.all_figures(subjects, progress));
                    let _ = reply.send(answer);
                }
            }
        }
        self.close();
    }

    /// Asks the library, which is loaded first if need be, and let go of if it will never answer again.
    fn answer<T>(
        &mut self,
        ask: impl FnOnce(&mut LoadedLibrary, &CallProgress) -> Result<T, NvmlError>,
    ) -> Result<T, NvmlError> {
        let mut open = match self.open.take() {
            Some(open) => open,
            None => self.open()?,
        };
        let answer = ask(&mut open, &self.progress);
        self.open = Some(open);
        if answer.as_ref().is_err_and(NvmlError::wants_reload) {
            self.close();
        }
        answer
    }

    fn open(&self) -> Result<LoadedLibrary, NvmlError> {
        let nvml = worker::open(&self.driver, &self.progress)?;
        Ok(LoadedLibrary {
            boards: HashMap::new(),
            memos: HashMap::new(),
            buffer: raw::Buffer::default(),
            samples: raw::Samples::default(),
            nvml,
        })
    }

    fn close(&mut self) {
        self.progress.enter("nvmlShutdown", None);
        self.open = None;
    }
}

impl LoadedLibrary {
    /// An error is of the library: a board that fails by itself is in the answer.
    fn all_lists(
        &mut self,
        boards: Vec<DeviceUuid>,
        progress: &CallProgress,
    ) -> Result<Vec<BoardProcesses>, NvmlError> {
        let mut answers = Vec::with_capacity(boards.len());
        for board in boards {
            match self.board(&board, progress) {
                Err(error) if error.wants_reload() => return Err(error),
                processes => answers.push(BoardProcesses { board, processes }),
            }
        }
        Ok(answers)
    }

    fn all_figures(
        &mut self,
        subjects: Vec<FiguresSubject>,
        progress: &CallProgress,
    ) -> Result<Vec<(DeviceUuid, Figures)>, NvmlError> {
        self.memos.retain(|known, _| subjects.iter().any(|subject| subject.uuid() == known));
        let mut answers = Vec::with_capacity(subjects.len());
        for subject in subjects {
            let uuid = subject.uuid();
            let handle = match self.handle(uuid, progress) {
                Ok(handle) => handle,
                Err(error) if error.wants_reload() => return Err(error),
                // The lists say so.
                Err(_) => continue,
            };
            let memo = self.memos.entry(uuid.clone()).or_default();
            let room = (memo, &mut self.samples);
            let figures = figures::read(&self.nvml, &subject, &handle, room, progress)?;
            // A board that is away, or a stale handle, answers nothing.
            if figures.memory.is_some() {
                self.boards.insert(uuid.clone(), handle);
            }
            answers.push((uuid.clone(), figures));
        }
        Ok(answers)
    }

    fn board(&mut self, uuid: &DeviceUuid, progress: &CallProgress) -> Result<Vec<GpuProcess>, NvmlError> {
        let board = self.handle(uuid, progress)?;
        // A handle that failed is asked for anew: the board may have been away.
        let merged = self.lists(&board, progress)?;
        self.boards.insert(uuid.clone(), board);
        Ok(merged)
    }

    /// The device's handle, taken out: who finds it good puts it back.
    fn handle(&mut self, uuid: &DeviceUuid, progress: &CallProgress) -> Result<raw::DeviceHandle, NvmlError> {
        if let Some(board) = self.boards.remove(uuid) {
            return Ok(board);
        }
        let name = "nvmlDeviceGetHandleByUUID";
        progress.enter(name, None);
        raw::board(&self.nvml, uuid.as_str()).map_err(|code| NvmlError::of_call(name, None, code))
    }

    fn lists(
        &mut self,
        board: &raw::DeviceHandle,
        progress: &CallProgress,
    ) -> Result<Vec<GpuProcess>, NvmlError> {
        let mut merged = BTreeMap::new();
        let mut tells_clients = true;
        for (name, list) in [
            ("nvmlDeviceGetComputeRunningProcesses_v3", ProcessListKind::Compute),
            ("nvmlDeviceGetMPSComputeRunningProcesses_v3", ProcessListKind::Mps),
            ("nvmlDeviceGetGraphicsRunningProcesses_v3", ProcessListKind::Graphics),
        ] {
            progress.enter(name, None);
            let listed = raw::processes(&self.nvml, board, list, &mut self.buffer)
                .map_err(|code: Code| NvmlError::of_call(name, None, code));
            match listed {
                Ok(listed) => merge(&mut merged, list, &listed),
                // A driver or board without MPS or graphics has no such processes.
                Err(e) if list != ProcessListKind::Compute && e.is_absence() => {
                    tells_clients &= list != ProcessListKind::Mps
                }
                Err(e) => return Err(e),
            }
        }
        Ok(processes(merged, tells_clients))
    }
}

/// A process, and which lists it is in.
#[derive(Debug, Default)]
struct Merged {
    used: Option<Bytes>,
    compute: bool,
    mps: bool,
}

fn merge(merged: &mut BTreeMap<u32, Merged>, list: ProcessListKind, listed: &[raw::Listed]) {
    for process in listed {
        let known = merged.entry(process.pid).or_default();
        known.used = known.used.max(process.used.map(Bytes));
        known.compute |= list == ProcessListKind::Compute;
        known.mps |= list == ProcessListKind::Mps;
    }
}

fn processes(merged: BTreeMap<u32, Merged>, tells_clients: bool) -> Vec<GpuProcess> {
    let kind = |found: &Merged| match (found.mps, found.compute) {
        (true, _) => ContextKind::MpsClient,
        (false, true) if tells_clients => ContextKind::Compute,
        (false, true) => ContextKind::ComputeOfUnknownKind,
        (false, false) => ContextKind::Graphics,
    };
    let process = |(pid, found): (u32, Merged)| GpuProcess { pid, used: found.used, context: kind(&found) };
    merged.into_iter().map(process).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_in_several_lists_counts_once_with_its_larger_figure() {
        use ContextKind::{Compute, ComputeOfUnknownKind, Graphics, MpsClient};
        let listed = |pid, used: Option<u64>| raw::Listed { pid, used };
        let found = |clients: Option<&[raw::Listed]>| {
            let mut merged = BTreeMap::new();
            merge(
                &mut merged,
                ProcessListKind::Compute,
                &[listed(1, Some(418)), listed(2, Some(438)), listed(3, None)],
            );
            merge(&mut merged, ProcessListKind::Mps, clients.unwrap_or_default());
            merge(&mut merged, ProcessListKind::Graphics, &[listed(1, None), listed(4, Some(7))]);
            let found = processes(merged, clients.is_some()).into_iter();
            found.map(|p| (p.pid, p.used.map(|used| used.0), p.context)).collect::<Vec<_>>()
        };
        assert_eq!(
            found(Some(&[listed(2, Some(440)), listed(3, None)])),
            [
                (1, Some(418), Compute),
                (2, Some(440), MpsClient),
                (3, None, MpsClient),
                (4, Some(7), Graphics)
            ]
        );
        let untold = ComputeOfUnknownKind;
        assert_eq!(
            found(None),
            [(1, Some(418), untold), (2, Some(438), untold), (3, None, untold), (4, Some(7), Graphics)]
        );
    }
}
