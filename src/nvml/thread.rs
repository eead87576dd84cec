//! The thread that talks to NVML, and the handle that the async side holds.
//!
//! A call into a hanging driver cannot be ended. So a thread that misses its deadline is left behind:
//! when its call comes back after all, it finds its queue closed and goes. Meanwhile another thread
//! takes over, but no more than [`MAX_STUCK`] may be left behind.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread;
use std::time::Duration;

use nvml_wrapper::error::NvmlError as Code;
use tokio::sync::{broadcast, mpsc, oneshot};
use tokio::time::timeout;

use crate::inventory::Look;

use super::events::{BoardName, Events};
use super::look::Session;
use super::{GpuEvent, Gpus, Load, NvmlError, library};

/// Questions that may wait for the thread.
const COMMANDS: usize = 8;
/// Events that may wait for a slow reader; it loses the oldest beyond that, and is told how many.
const EVENTS: usize = 64;
/// Threads that may hang in NVML before no other is tried.
const MAX_STUCK: usize = 3;
/// NVML's calls are shallow; the default of 2 MiB would be address space for nothing.
pub(super) const STACK: usize = 512 * 1024;

/// What the edge is told at the start.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Where the node's driver is installed, as this process sees it: `/`, `/driver-root`, ...
    pub driver_root: PathBuf,
    /// Usually `/sys`.
    pub sys_root: PathBuf,
    /// How long a look may take.
    pub look_limit: Duration,
}

impl Settings {
    /// 30 s: the first call after a boot may have to wake eight boards without persistence mode.
    pub const LOOK_LIMIT: Duration = Duration::from_secs(30);
}

/// NVML on a thread of its own. Loads nothing before the first look.
#[derive(Debug)]
pub struct Nvml {
    settings: Arc<Settings>,
    threads: Mutex<Threads>,
    events: broadcast::Sender<GpuEvent>,
}

#[derive(Debug, Default)]
struct Threads {
    current: Option<Thread>,
    /// Progress of threads that were left behind; gone when they end.
    stuck: Vec<Weak<Progress>>,
}

#[derive(Debug, Clone)]
struct Thread {
    commands: mpsc::Sender<Command>,
    progress: Arc<Progress>,
}

#[derive(Debug)]
enum Command {
    Look { load: Load, reply: oneshot::Sender<Result<Look, NvmlError>> },
}

/// Which call a thread is in, for the words about a hang.
#[derive(Debug, Default)]
pub(super) struct Progress {
    call: Mutex<(&'static str, Option<u32>)>,
    left_behind: AtomicBool,
}

impl Progress {
    pub fn enter(&self, call: &'static str, index: Option<u32>) {
        *self.call.lock().unwrap_or_else(PoisonError::into_inner) = (call, index);
    }

    /// True if nobody waits for this thread's answers any more.
    pub fn is_left_behind(&self) -> bool {
        self.left_behind.load(Ordering::Relaxed)
    }

    fn words(&self) -> String {
        match *self.call.lock().unwrap_or_else(PoisonError::into_inner) {
            (call, Some(index)) => format!("{call} on the GPU with index {index}"),
            ("", None) => "starting the NVML thread".to_owned(),
            (call, None) => call.to_owned(),
        }
    }
}

impl Nvml {
    pub fn new(settings: Settings) -> Self {
        let (events, _) = broadcast::channel(EVENTS);
        Self { settings: Arc::new(settings), threads: Mutex::default(), events }
    }

    /// Directories where the library is looked for and that exist: worth watching.
    pub fn library_directories(&self) -> Vec<PathBuf> {
        library::directories(&self.settings.driver_root)
    }

    fn thread(&self) -> Result<Thread, NvmlError> {
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(thread) = threads.current.as_ref().filter(|thread| !thread.commands.is_closed()) {
            return Ok(thread.clone());
        }
        threads.stuck.retain(|progress| progress.strong_count() > 0);
        if threads.stuck.len() >= MAX_STUCK {
            return Err(NvmlError::Stuck { threads: threads.stuck.len() });
        }
        let started = self.start()?;
        threads.current = Some(started.clone());
        Ok(started)
    }

    fn start(&self) -> Result<Thread, NvmlError> {
        let (commands, queue) = mpsc::channel(COMMANDS);
        let progress = Arc::new(Progress::default());
        let room = Room {
            settings: self.settings.clone(),
            progress: progress.clone(),
            sender: self.events.clone(),
            open: None,
        };
        let builder = thread::Builder::new().name("nvml".to_owned()).stack_size(STACK);
        builder.spawn(move || room.serve(queue)).map_err(NvmlError::NoThread)?;
        Ok(Thread { commands, progress })
    }

    /// Gives up a thread that missed a deadline: its queue is closed when the last sender goes.
    fn leave_behind(&self, thread: &Thread) {
        thread.progress.left_behind.store(true, Ordering::Relaxed);
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        if threads.current.as_ref().is_some_and(|current| Arc::ptr_eq(&current.progress, &thread.progress)) {
            threads.current = None;
            threads.stuck.push(Arc::downgrade(&thread.progress));
        }
    }
}

impl Gpus for Nvml {
    async fn look(&self, load: Load) -> Result<Look, NvmlError> {
        let limit = self.settings.look_limit;
        let thread = self.thread()?;
        let (reply, answer) = oneshot::channel();
        let exchange = async {
            let command = Command::Look { load, reply };
            thread.commands.send(command).await.map_err(|_| NvmlError::ThreadGone)?;
            answer.await.map_err(|_| NvmlError::ThreadGone)?
        };
        let Ok(answer) = timeout(limit, exchange).await else {
            let call = thread.progress.words();
            self.leave_behind(&thread);
            return Err(NvmlError::Timeout { call, limit });
        };
        answer
    }

    fn events(&self) -> broadcast::Receiver<GpuEvent> {
        self.events.subscribe()
    }

    fn stuck_threads(&self) -> usize {
        let threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        threads.stuck.iter().filter(|progress| progress.strong_count() > 0).count()
    }
}

/// The thread's own things.
struct Room {
    settings: Arc<Settings>,
    progress: Arc<Progress>,
    sender: broadcast::Sender<GpuEvent>,
    open: Option<Open>,
}

/// A library that is loaded and initialised. NVML is shut down and the library closed when the event
/// thread and this one have let go of it. Fields are dropped in this order.
struct Open {
    events: Option<Events>,
    nvml: Arc<nvml_wrapper::Nvml>,
}

impl Room {
    fn serve(mut self, mut queue: mpsc::Receiver<Command>) {
        while let Some(Command::Look { load, reply }) = queue.blocking_recv() {
            let look = self.look(load);
            // Nobody waits any more: the caller missed its deadline and said so itself.
            let _ = reply.send(look);
        }
        self.close();
    }

    fn look(&mut self, load: Load) -> Result<Look, NvmlError> {
        if load == Load::Anew {
            self.close();
        }
        let mut open = match self.open.take() {
            Some(open) => open,
            None => self.open()?,
        };
        let session =
            Session { nvml: &open.nvml, sys_root: &self.settings.sys_root, progress: &self.progress };
        let (look, boards) = match session.look() {
            Ok(found) => found,
            Err(e) => {
                self.open = Some(open);
                if e.wants_reload() {
                    self.close();
                }
                return Err(e);
            }
        };
        self.listen(&mut open, boards);
        self.open = Some(open);
        Ok(look)
    }

    /// Loads the first library under the driver root that can be loaded.
    fn open(&self) -> Result<Open, NvmlError> {
        self.progress.enter("looking for the library", None);
        let mut unusable = None;
        for path in library::find(&self.settings.driver_root)? {
            self.progress.enter("nvmlInit_v2", None);
            match nvml_wrapper::Nvml::builder().lib_path(path.as_os_str()).init() {
                Ok(nvml) => return Ok(Open { events: None, nvml: Arc::new(nvml) }),
                Err(code @ (Code::LibloadingError(_) | Code::FailedToLoadSymbol(_))) => {
                    unusable.get_or_insert(NvmlError::LibraryUnusable { path, words: code.to_string() });
                }
                Err(code) => return Err(NvmlError::of_call("nvmlInit_v2", None, code)),
            }
        }
        Err(unusable.unwrap_or(NvmlError::ThreadGone))
    }

    /// Sees to it that events of these boards are waited for.
    fn listen(&self, open: &mut Open, boards: Vec<BoardName>) {
        if open.events.as_ref().is_some_and(|events| events.cover(&boards)) {
            return;
        }
        open.events = None;
        match Events::start(open.nvml.clone(), boards, self.sender.clone(), self.progress.clone()) {
            Ok(events) => open.events = Some(events),
            Err(e) => tracing::warn!(error = %e, "GPU events are not waited for: no thread could be started"),
        }
    }

    /// Lets go of the library: the next look loads it anew.
    fn close(&mut self) {
        self.progress.enter("nvmlShutdown", None);
        self.open = None;
    }
}
