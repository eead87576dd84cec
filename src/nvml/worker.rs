//! The threads that call NVML, of which one works at a time, and the requests to them.
//!
//! A call into a hanging driver cannot be ended. So a thread that misses its deadline is left behind: if its call
//! returns after all, the thread finds its queue closed and ends. Meanwhile another thread takes over. No more than
//! [`MAX_STUCK`] threads may be left behind.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::Duration;

use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError as Code;
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use super::{NvmlError, library};
use crate::model::driver::DriverPlace;

/// Questions that may wait for a thread.
const COMMANDS: usize = 8;
/// Threads that may hang in NVML before no other is tried.
const MAX_STUCK: usize = 3;
/// NVML's calls are shallow; the default of 2 MiB would be address space for nothing.
pub(super) const STACK: usize = 512 * 1024;

/// Where a thread puts its answer.
pub(super) type Reply<T> = oneshot::Sender<Result<T, NvmlError>>;

/// Which call a thread is in, for the words about a hang.
#[derive(Debug, Default)]
pub(super) struct CallProgress {
    call: Mutex<(&'static str, Option<u32>)>,
    left_behind: AtomicBool,
}

impl CallProgress {
    pub fn enter(&self, call: &'static str, index: Option<u32>) {
        *self.call.lock().unwrap_or_else(PoisonError::into_inner) = (call, index);
    }

    /// True if nobody waits for this thread's answers any more.
    pub fn is_left_behind(&self) -> bool {
        self.left_behind.load(Ordering::Relaxed)
    }

    /// The call, in words.
    pub fn words(&self) -> String {
        match *self.call.lock().unwrap_or_else(PoisonError::into_inner) {
            (call, Some(index)) => format!("{call} on the GPU with index {index}"),
            ("", None) => "starting the NVML thread".to_owned(),
            (call, None) => call.to_owned(),
        }
    }
}

/// The threads of one kind, which take commands `C`. None is started before the first question.
#[derive(Debug)]
pub(super) struct Workers<C> {
    name: &'static str,
    threads: Mutex<Threads<C>>,
}

#[derive(Debug)]
struct Threads<C> {
    current: Option<Thread<C>>,
    /// Progress of threads that were left behind; gone when they end.
    stuck: Vec<Weak<CallProgress>>,
}

#[derive(Debug)]
struct Thread<C> {
    commands: mpsc::Sender<C>,
    progress: Arc<CallProgress>,
}

impl<C: Send + 'static> Workers<C> {
    pub fn new(name: &'static str) -> Self {
        Self { name, threads: Mutex::new(Threads { current: None, stuck: Vec::new() }) }
    }

    /// Puts a command before the thread, which is started with `serve` if there is none, and waits for the
    /// answer, at most `limit`.
    pub async fn ask<T>(
        &self,
        limit: Duration,
        serve: impl FnOnce(mpsc::Receiver<C>, Arc<CallProgress>) + Send + 'static,
        command: impl FnOnce(Reply<T>) -> C,
    ) -> Result<T, NvmlError> {
        let (commands, progress) = self.thread(serve)?;
        let (reply, answer) = oneshot::channel();
        let exchange = async {
            commands.send(command(reply)).await.map_err(|_| NvmlError::ThreadGone)?;
            answer.await.map_err(|_| NvmlError::ThreadGone)?
        };
        let Ok(answer) = timeout(limit, exchange).await else {
            let call = progress.words();
            self.leave_behind(&progress);
            return Err(NvmlError::Timeout { call, limit });
        };
        answer
    }

    /// Lets the thread end, and the library with it. The next question starts another.
    pub fn rest(&self) {
        self.lock().current = None;
    }

    /// Threads that wait in a call that did not return within its deadline.
    pub fn stuck(&self) -> usize {
        self.lock().stuck.iter().filter(|progress| progress.strong_count() > 0).count()
    }

    fn thread(
        &self,
        serve: impl FnOnce(mpsc::Receiver<C>, Arc<CallProgress>) + Send + 'static,
    ) -> Result<(mpsc::Sender<C>, Arc<CallProgress>), NvmlError> {
        let mut threads = self.lock();
        if let Some(thread) = threads.current.as_ref().filter(|thread| !thread.commands.is_closed()) {
            return Ok((thread.commands.clone(), thread.progress.clone()));
        }
        threads.stuck.retain(|progress| progress.strong_count() > 0);
        if threads.stuck.len() >= MAX_STUCK {
            return Err(NvmlError::Stuck { threads: threads.stuck.len() });
        }
        let (commands, queue) = mpsc::channel(COMMANDS);
        let progress = Arc::new(CallProgress::default());
        let its = progress.clone();
        let builder = thread::Builder::new().name(self.name.to_owned()).stack_size(STACK);
        builder.spawn(move || serve(queue, its)).map_err(NvmlError::NoThread)?;
        threads.current = Some(Thread { commands: commands.clone(), progress: progress.clone() });
        Ok((commands, progress))
    }

    /// Gives up a thread that missed a deadline: its queue is closed when the last sender goes.
    fn leave_behind(&self, progress: &Arc<CallProgress>) {
        progress.left_behind.store(true, Ordering::Relaxed);
        let mut threads = self.lock();
        if threads.current.as_ref().is_some_and(|current| Arc::ptr_eq(&current.progress, progress)) {
            threads.current = None;
            threads.stuck.push(Arc::downgrade(progress));
        }
    }

    fn lock(&self) -> MutexGuard<'_, Threads<C>> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Loads and initialises the first library under the driver root that can be loaded.
pub(super) fn open(driver: &DriverPlace, progress: &CallProgress) -> Result<Nvml, NvmlError> {
    progress.enter("looking for the library", None);
    let mut unusable = None;
    for path in library::find(driver)? {
        progress.enter("nvmlInit_v2", None);
        match Nvml::builder().lib_path(path.as_os_str()).init() {
            Ok(nvml) => return Ok(nvml),
            Err(code @ (Code::LibloadingError(_) | Code::FailedToLoadSymbol(_))) => {
                unusable.get_or_insert(NvmlError::LibraryUnusable { path, words: code.to_string() });
            }
            Err(code) => return Err(NvmlError::of_call("nvmlInit_v2", None, code)),
        }
    }
    Err(unusable.unwrap_or(NvmlError::ThreadGone))
}
