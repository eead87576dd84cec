//! The node as a call sees it: control file and state together, read again
//! whenever one of the files changed.

use std::ffi::{CStr, OsStr, c_void};
use std::fs;
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use crate::abi::Handle;
use crate::board::{self, Board, MigProfile};
use crate::code::{Answer, Code};
use crate::control::{Control, GpuControl, Process, ProcessKind};
use crate::identity::{self, Identity};
use crate::mig::{self, Compute, Instance, Mig};
use crate::state::{self, Change, GpuState, State};

const MIB: u64 = 1 << 20;

/// The whole node at one moment.
#[derive(Debug)]
pub struct Node {
    pub dir: PathBuf,
    pub control: Control,
    pub board: &'static Board,
    pub driver_major: u32,
    pub gpus: Vec<Gpu>,
}

/// One board at one moment.
#[derive(Debug)]
pub struct Gpu {
    pub index: usize,
    pub board: &'static Board,
    pub over: GpuControl,
    pub identity: Identity,
    pub mig: Mig,
    pub compute_mode: u32,
    pub persistence: bool,
    pub accounting: bool,
    pub changed: GpuState,
}

/// A MIG device: a board and what it is on it.
#[derive(Clone, Copy, Debug)]
pub struct MigDevice<'n> {
    pub gpu: &'n Gpu,
    pub instance: &'n Instance,
    pub compute: &'n Compute,
    pub profile: &'static MigProfile,
}

/// What a device handle means.
#[derive(Clone, Copy, Debug)]
pub enum Device<'n> {
    Whole(&'n Gpu),
    Mig(MigDevice<'n>),
}

impl<'n> Device<'n> {
    pub fn gpu(self) -> &'n Gpu {
        match self {
            Device::Whole(gpu) => gpu,
            Device::Mig(mig) => mig.gpu,
        }
    }
}

/// Total, reserved and used bytes.
#[derive(Clone, Copy, Debug)]
pub struct Memory {
    pub total: u64,
    pub reserved: u64,
    pub used: u64,
}

impl Memory {
    pub fn free(self) -> u64 {
        self.total.saturating_sub(self.reserved).saturating_sub(self.used)
    }
}

impl Node {
    pub fn new(dir: &Path, control: Control, state: State) -> Node {
        let board = board::find(&control.profile).unwrap_or(board::BOARDS[0]);
        let state = if state.profile == board.key { state } else { State::default() };
        let gpus = (0..control.count)
            .map(|index| {
                let over = control.gpus.get(&index).cloned().unwrap_or_default();
                let changed = state.gpus.get(&index).cloned().unwrap_or_default();
                let mig = Change::current(changed.mig.as_ref(), &over.mig).unwrap_or_else(|| {
                    let Some(wanted) = &over.mig else { return Mig::default() };
                    let (mig, words) = Mig::from_control(board, wanted);
                    for word in words {
                        eprintln!("fake-nvml: gpu {index}: {word}");
                    }
                    mig
                });
                Gpu {
                    index,
                    board,
                    identity: Identity::new(board, &control.host_seed, index, control.count, &over),
                    compute_mode: Change::current(changed.compute_mode.as_ref(), &over.compute_mode)
                        .unwrap_or(over.compute_mode.unwrap_or(0)),
                    persistence: Change::current(changed.persistence.as_ref(), &over.persistence)
                        .unwrap_or(over.persistence.unwrap_or(true)),
                    accounting: Change::current(changed.accounting.as_ref(), &over.accounting)
                        .unwrap_or(over.accounting.unwrap_or(false)),
                    mig,
                    over,
                    changed,
                }
            })
            .collect();
        let driver_major = crate::driver::series(&control.driver_version);
        Node { dir: dir.to_owned(), control, board, driver_major, gpus }
    }

    /// The board or MIG device behind a handle; lost boards and ended instances are errors.
    pub fn device<T>(&self, handle: *mut T) -> Answer<Device<'_>> {
        match Handle::decode(handle as usize) {
            Some(Handle::Gpu { gpu }) => Ok(Device::Whole(self.present(gpu)?)),
            Some(Handle::Mig { gpu, gi, ci }) => {
                let gpu = self.present(gpu)?;
                let (instance, compute) = gpu.mig.compute(gi, ci).ok_or(Code::INVALID_ARGUMENT)?;
                let profile = gpu.profile(instance).ok_or(Code::INVALID_ARGUMENT)?;
                Ok(Device::Mig(MigDevice { gpu, instance, compute, profile }))
            }
            _ => Err(Code::INVALID_ARGUMENT),
        }
    }

    /// A whole board; calls that MIG devices do not have answer NOT_SUPPORTED.
    pub fn gpu<T>(&self, handle: *mut T) -> Answer<&Gpu> {
        match self.device(handle)? {
            Device::Whole(gpu) => Ok(gpu),
            Device::Mig(_) => Err(Code::NOT_SUPPORTED),
        }
    }

    /// The board by number, if it is there and on the bus.
    pub fn present(&self, index: usize) -> Answer<&Gpu> {
        if index >= crate::session::count_at_init() {
            return Err(Code::INVALID_ARGUMENT);
        }
        match self.gpus.get(index) {
            Some(gpu) if !gpu.over.lost => Ok(gpu),
            _ => Err(Code::GPU_IS_LOST),
        }
    }

    /// May this process change things?
    pub fn need_root(&self) -> Answer {
        // SAFETY: geteuid has no preconditions.
        let root = self.control.privileged.unwrap_or_else(|| unsafe { libc::geteuid() } == 0);
        if root { Ok(()) } else { Err(Code::NO_PERMISSION) }
    }

    /// Changes one board's part of the shared state.
    pub fn change<T>(&self, index: usize, change: impl FnOnce(&mut GpuState) -> Answer<T>) -> Answer<T> {
        state::update(&self.dir, self.board.key, |s| change(s.gpus.entry(index).or_default()))
    }

    /// Changes a board's MIG state, starting from what it is at that moment.
    pub fn change_mig<T>(&self, gpu: &Gpu, change: impl FnOnce(&mut Mig) -> Answer<T>) -> Answer<T> {
        self.change(gpu.index, |s| {
            let mut mig = match Change::current(s.mig.as_ref(), &gpu.over.mig) {
                Some(mig) => mig,
                None => gpu.over.mig.as_ref().map(|w| Mig::from_control(gpu.board, w).0).unwrap_or_default(),
            };
            let answer = change(&mut mig)?;
            s.mig = Change::new(&gpu.over.mig, mig);
            Ok(answer)
        })
    }
}

impl Gpu {
    pub fn handle(&self) -> Handle {
        Handle::Gpu { gpu: self.index }
    }

    pub fn name(&self) -> &str {
        self.over.name.as_deref().unwrap_or(self.board.name)
    }

    pub fn profile(&self, instance: &Instance) -> Option<&'static MigProfile> {
        mig::by_id(self.board, instance.profile)
    }

    pub fn ecc(&self) -> bool {
        self.over.ecc_enabled.unwrap_or(true)
    }

    /// Processes that are listed now.
    pub fn processes(&self) -> impl Iterator<Item = &Process> {
        // SAFETY: signal 0 only asks whether the process exists.
        let alive = |pid: u32| unsafe { libc::kill(pid as libc::pid_t, 0) } == 0
            || std::io::Error::last_os_error().raw_os_error() == Some(libc::EPERM);
        self.over.processes.iter().filter(move |p| !p.only_if_alive || alive(p.pid))
    }

    pub fn memory(&self) -> Memory {
        let total = self.over.memory_mib.unwrap_or(self.board.memory_mib);
        let reserved = self.over.reserved_mib.unwrap_or(self.board.reserved_mib).min(total);
        let listed: u64 = self.processes().filter_map(|p| p.used_mib).fold(0, u64::saturating_add);
        let used = self.over.used_mib.unwrap_or(0).saturating_add(listed).min(total - reserved);
        Memory {
            total: total.saturating_mul(MIB),
            reserved: reserved.saturating_mul(MIB),
            used: used.saturating_mul(MIB),
        }
    }

    /// In MIG mode some questions about the whole board have no answer.
    pub fn refuse_in_mig_mode(&self) -> Answer {
        if self.mig.enabled { Err(Code::NOT_SUPPORTED) } else { Ok(()) }
    }
}

impl MigDevice<'_> {
    pub fn handle(&self) -> Handle {
        Handle::Mig { gpu: self.gpu.index, gi: self.instance.id, ci: self.compute.id }
    }

    pub fn uuid(&self) -> String {
        identity::mig_uuid(
            &self.gpu.identity.uuid,
            self.instance.id,
            self.instance.profile,
            self.instance.start,
            self.compute.id,
            self.compute.start,
        )
    }

    pub fn name(&self) -> String {
        let cut = if self.compute.slices == self.profile.slices {
            String::new()
        } else {
            format!("{}c.", self.compute.slices)
        };
        format!("{} MIG {cut}{}", self.gpu.name(), self.profile.name)
    }

    /// Does a listed process run in this instance?
    pub fn runs(&self, process: &Process) -> bool {
        process.gi == Some(self.instance.id) && process.ci.unwrap_or(0) == self.compute.id
    }

    pub fn memory(&self) -> Memory {
        let total = self.profile.memory_mib * MIB;
        let used = self
            .gpu
            .processes()
            .filter(|p| p.gi == Some(self.instance.id))
            .filter_map(|p| p.used_mib)
            .fold(0, u64::saturating_add);
        Memory { total, reserved: 0, used: used.saturating_mul(MIB).min(total) }
    }

    pub fn multiprocessors(&self) -> u32 {
        mig::compute_profiles(self.gpu.board, self.profile)
            .iter()
            .find(|p| p.slices == self.compute.slices)
            .map_or(self.profile.multiprocessors, |p| p.multiprocessors)
    }
}

/// Is the process in the list of this kind? MPS servers and their clients are compute processes too.
pub fn listed(process: &Process, list: ProcessKind) -> bool {
    let is_of_mps = matches!(process.kind, ProcessKind::Mps | ProcessKind::Server);
    process.kind == list || (list == ProcessKind::Compute && is_of_mps)
}

/// Where the node is described: `FAKE_NVML_DIR`, or beside the library when a
/// control file lies there, or `/run/fake-nvml`.
pub fn dir() -> PathBuf {
    if let Some(dir) = std::env::var_os("FAKE_NVML_DIR") {
        return PathBuf::from(dir);
    }
    match own_dir() {
        Some(own) if own.join("control.json").exists() => own.to_owned(),
        _ => PathBuf::from("/run/fake-nvml"),
    }
}

/// The directory that this library was loaded from.
fn own_dir() -> Option<&'static Path> {
    static OWN: OnceLock<Option<PathBuf>> = OnceLock::new();
    OWN.get_or_init(|| {
        let mut info = MaybeUninit::<libc::Dl_info>::uninit();
        // SAFETY: an address of this object, and room for the answer.
        if unsafe { libc::dladdr(own_dir as *const c_void, info.as_mut_ptr()) } == 0 {
            return None;
        }
        // SAFETY: dladdr succeeded, so it is filled; the name lives as long as the object.
        let name = unsafe { CStr::from_ptr(info.assume_init().dli_fname) };
        Path::new(OsStr::from_bytes(name.to_bytes())).parent().map(Path::to_owned)
    })
    .as_deref()
}

/// What tells one version of a file from the next.
type Stamp = Option<(u64, u64, u64, i64, i64)>;

fn stamp(path: &Path) -> Stamp {
    let m = fs::metadata(path).ok()?;
    Some((m.dev(), m.ino(), m.size(), m.mtime(), m.mtime_nsec()))
}

struct Cached {
    dir: PathBuf,
    control: Stamp,
    state: Stamp,
    node: Option<Arc<Node>>,
}

static CACHE: Mutex<Option<Cached>> = Mutex::new(None);

/// The node now. Without any description there is no driver.
pub fn load() -> Answer<Arc<Node>> {
    let dir = dir();
    let (control, state) = (stamp(&dir.join("control.json")), stamp(&dir.join("state.json")));
    let mut cache = CACHE.lock().unwrap_or_else(PoisonError::into_inner);
    let fresh = cache.as_ref().is_some_and(|c| c.dir == dir && c.control == control && c.state == state);
    if !fresh {
        let last = cache.take().filter(|c| c.dir == dir).and_then(|c| c.node);
        let node = read_control(&dir, last.as_deref())
            .map(|control| Arc::new(Node::new(&dir, control, state::read(&dir))));
        *cache = Some(Cached { dir, control, state, node });
    }
    match cache.as_ref().and_then(|c| c.node.clone()) {
        Some(node) if node.control.driver_loaded => Ok(node),
        _ => Err(Code::DRIVER_NOT_LOADED),
    }
}

/// The control file, or the environment's node, or what was last well written.
fn read_control(dir: &Path, last: Option<&Node>) -> Option<Control> {
    let path = dir.join("control.json");
    match fs::read_to_string(&path) {
        Ok(text) => match Control::parse(&text) {
            Ok(control) => Some(control),
            Err(words) => {
                eprintln!("fake-nvml: {}: {words}; keeping what was there before", path.display());
                last.map(|n| n.control.clone())
            }
        },
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => from_environment(),
        Err(error) => {
            eprintln!("fake-nvml: {}: {error}; keeping what was there before", path.display());
            last.map(|n| n.control.clone())
        }
    }
}

fn from_environment() -> Option<Control> {
    let profile = std::env::var("FAKE_NVML_PROFILE").ok()?;
    let count = std::env::var("FAKE_NVML_COUNT").ok().and_then(|c| c.parse().ok()).unwrap_or(1);
    let control = Control::new(&profile, count);
    match control.check() {
        Ok(()) => Some(control),
        Err(words) => {
            eprintln!("fake-nvml: FAKE_NVML_PROFILE, FAKE_NVML_COUNT: {words}");
            None
        }
    }
}
