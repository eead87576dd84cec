//! The thread that looks at the GPUs, and the handle that the async side holds.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{broadcast, mpsc};

use crate::inventory::Look;
use crate::model::driver::DriverPlace;
use crate::model::names::DeviceUuid;
use crate::model::selector::GpuSelector;

use super::events::{EventSource, Events};
use super::look::Session;
use super::worker::{CallProgress, Reply, Workers};
use super::{ComputeMode, ComputeModes, GpuEvent, Gpus, Load, NvmlError, library, worker};

/// Events that may wait for a slow reader; it loses the oldest beyond that, and is told how many.
const EVENTS: usize = 64;
/// How long a board's compute mode may take. The first call loads the library and wakes the boards.
const MODE_LIMIT: Duration = Duration::from_secs(10);

/// What the edge is told at the start.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Where the node's driver is installed, as this process sees it: `/`, `/driver-root`, ...
    pub driver: DriverPlace,
    /// Usually `/sys`.
    pub sys_root: PathBuf,
    /// How long a look may take.
    pub look_limit: Duration,
    /// Boards that are carved on demand, while MIG is on.
    pub on_demand: Vec<GpuSelector>,
    /// Those of them whose MIG is off are told with what they can be cut into, where the mode can be switched without a
    /// reset.
    pub switches: bool,
}

impl Settings {
    /// 30 s: the first call after a boot may have to wake eight boards without persistence mode.
    pub const LOOK_LIMIT: Duration = Duration::from_secs(30);
}

/// NVML on a thread of its own. Loads nothing before the first look.
#[derive(Debug)]
pub struct Nvml {
    settings: Arc<Settings>,
    workers: Workers<Command>,
    events: broadcast::Sender<GpuEvent>,
}

#[derive(Debug)]
enum Command {
    Look {
        load: Load,
        reply: Reply<Look>,
    },
    /// Reads a board's mode, after setting it if one is given.
    Mode {
        gpu: DeviceUuid,
        set: Option<ComputeMode>,
        reply: Reply<Option<ComputeMode>>,
    },
}

impl Nvml {
    pub fn new(settings: Settings) -> Self {
        let (events, _) = broadcast::channel(EVENTS);
        Self { settings: Arc::new(settings), workers: Workers::new("nvml"), events }
    }

    /// Directories where the library is looked for and that exist: worth watching.
    pub fn library_directories(&self) -> Vec<PathBuf> {
        library::directories(&self.settings.driver)
    }
}

impl Nvml {
    /// Hands a command to the thread and waits for its answer, at most `limit`.
    async fn exchange<T>(
        &self,
        limit: Duration,
        command: impl FnOnce(Reply<T>) -> Command,
    ) -> Result<T, NvmlError> {
        let (settings, sender) = (self.settings.clone(), self.events.clone());
        let serve = move |queue, progress| NvmlThread { settings, progress, sender, open: None }.serve(queue);
        self.workers.ask(limit, serve, command).await
    }
}

impl ComputeModes for Nvml {
    async fn compute_mode(&self, gpu: &DeviceUuid) -> Result<Option<ComputeMode>, NvmlError> {
        let gpu = gpu.clone();
        self.exchange(MODE_LIMIT, |reply| Command::Mode { gpu, set: None, reply }).await
    }

    async fn set_compute_mode(&self, gpu: &DeviceUuid, mode: ComputeMode) -> Result<(), NvmlError> {
        let (board, set) = (gpu.clone(), Some(mode));
        let found = self.exchange(MODE_LIMIT, |reply| Command::Mode { gpu: board, set, reply }).await?;
        match found == set {
            true => Ok(()),
            false => Err(NvmlError::ModeRefused { gpu: gpu.clone(), wanted: mode }),
        }
    }
}

impl Gpus for Nvml {
    async fn look(&self, load: Load) -> Result<Look, NvmlError> {
        self.exchange(self.settings.look_limit, |reply| Command::Look { load, reply }).await
    }

    fn events(&self) -> broadcast::Receiver<GpuEvent> {
        self.events.subscribe()
    }

    fn stuck_threads(&self) -> usize {
        self.workers.stuck()
    }
}

/// The state of the thread.
struct NvmlThread {
    settings: Arc<Settings>,
    progress: Arc<CallProgress>,
    sender: broadcast::Sender<GpuEvent>,
    open: Option<LoadedLibrary>,
}

/// A library that is loaded and initialised. NVML is shut down and the library closed when the event
/// thread and this one have let go of it. Fields are dropped in this order.
struct LoadedLibrary {
    events: Option<Events>,
    nvml: Arc<nvml_wrapper::Nvml>,
}

impl NvmlThread {
    fn serve(mut self, mut queue: mpsc::Receiver<Command>) {
        while let Some(command) = queue.blocking_recv() {
            // An answer that cannot be sent: the caller missed its deadline and said so itself.
            match command {
                Command::Look { load, reply } => drop(reply.send(self.look(load))),
                Command::Mode { gpu, set, reply } => drop(reply.send(self.mode(&gpu, set))),
            }
        }
        self.close();
    }

    fn mode(&mut self, gpu: &DeviceUuid, set: Option<ComputeMode>) -> Result<Option<ComputeMode>, NvmlError> {
        let open = match self.open.take() {
            Some(open) => open,
            None => self.open()?,
        };
        let session = Session::new(&open.nvml, &self.settings, &self.progress);
        let mode = session.mode(gpu, set);
        self.open = Some(open);
        if mode.as_ref().is_err_and(NvmlError::wants_reload) {
            self.close();
        }
        mode
    }

    fn look(&mut self, load: Load) -> Result<Look, NvmlError> {
        if load == Load::Anew {
            self.close();
        }
        let mut open = match self.open.take() {
            Some(open) => open,
            None => self.open()?,
        };
        let session = Session::new(&open.nvml, &self.settings, &self.progress);
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

    fn open(&self) -> Result<LoadedLibrary, NvmlError> {
        let nvml = worker::open(&self.settings.driver, &self.progress)?;
        Ok(LoadedLibrary { events: None, nvml: Arc::new(nvml) })
    }

    /// Sees to it that events of these boards are waited for.
    fn listen(&self, open: &mut LoadedLibrary, boards: Vec<EventSource>) {
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
