//! The NVML edge: asks NVIDIA's management library, and decides nothing.
//!
//! NVML may be missing, slow or hang, and it may be replaced while it is loaded. So the library is loaded at run time from
//! a driver root, one thread makes all calls, from a bounded queue, and every request has a deadline.
//!
//! * [`Gpus`]: what discovery asks for; [`ComputeModes`]: what the MPS supervisor does; [`Nvml`] is both
//! * [`ProcessWatch`]: the processes that use the GPUs, asked for several times a second, apart from the looks; and the
//!   [`Figures`] of devices for metrics
//! * [`DeviceFiles`]: reports changes of device files and of the library
//! * [`MigInstances`], [`MigCarver`]: MIG instances made and ended, and MIG modes switched (`mode`), a thread for each board
//! * `worker`: threads and their deadlines; `thread`, `look`, `mig`, `events`: the looks and the events
//! * `raw`, `raw_mig`, `raw_gpm`: the calls that nvml-wrapper lacks or gets wrong; the only unsafe code
//! * `library`, `sysfs`: files; `convert`: NVML's values as those of the model
//!
//! May import: model, inventory (for the shape of a look). May name: nvml-wrapper, nvml-wrapper-sys
//! (nobody else does), nix (inotify), tokio (channels, deadlines, AsyncFd), tracing, thiserror.

mod carve;
mod convert;
mod error;
mod events;
mod figures;
mod library;
mod look;
mod mig;
mod mode;
mod processes;
mod raw;
mod raw_gpm;
mod raw_mig;
mod sysfs;
mod thread;
mod watch;
mod worker;

use std::future::Future;

use tokio::sync::broadcast;

use crate::inventory::Look;
use crate::model::names::DeviceUuid;

pub use carve::{MigCarver, MigError, MigInstances};
pub use error::NvmlError;
pub use figures::{DeviceIdentity, DeviceMemory, Figures, FiguresSubject, MigHolder, ProcessActivity};
pub use mode::ModeError;
pub use processes::{BoardProcesses, ContextKind, GpuProcess, ProcessWatch};
pub use thread::{Nvml, Settings};
pub use watch::{DeviceFiles, FilesChanged};

/// The node's GPUs, as far as discovery and health need them.
pub trait Gpus: Send + Sync + 'static {
    /// Looks at every GPU and MIG device once. Answers, or fails, within its own deadline; a GPU that
    /// fails by itself is in the look's `failed`.
    fn look(&self, load: Load) -> impl Future<Output = Result<Look, NvmlError>> + Send;

    /// What happens to the GPUs between two looks, best effort: a slow reader loses the oldest.
    fn events(&self) -> broadcast::Receiver<GpuEvent>;

    /// Threads that wait in a call that did not return within its deadline.
    fn stuck_threads(&self) -> usize;
}

/// Who may use a board.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ComputeMode {
    /// Any number of processes.
    Default,
    /// One process: with MPS its server, so that nobody gets past it.
    ExclusiveProcess,
}

/// The compute modes of boards; MIG devices have none. A mode is lost when the driver is reloaded.
pub trait ComputeModes: Send + Sync + 'static {
    /// The mode in force; `None` is one that we never set.
    fn compute_mode(
        &self,
        gpu: &DeviceUuid,
    ) -> impl Future<Output = Result<Option<ComputeMode>, NvmlError>> + Send;

    /// Sets a mode and reads it back. One that is in force already is left alone.
    fn set_compute_mode(
        &self,
        gpu: &DeviceUuid,
        mode: ComputeMode,
    ) -> impl Future<Output = Result<(), NvmlError>> + Send;
}

/// Which library a look uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Load {
    /// The one that is loaded, if there is one.
    Keep,
    /// The file as it is now: the driver may have been replaced.
    Anew,
}

/// Something that NVML reports by itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GpuEvent {
    /// A critical Xid; the instances are those of a MIG device, where the driver tells.
    Xid { gpu: DeviceUuid, code: u64, gpu_instance: Option<u32>, compute_instance: Option<u32> },
    /// A double-bit ECC error.
    EccDoubleBit { gpu: DeviceUuid },
    /// MIG devices were made or ended.
    MigChanged { gpu: DeviceUuid },
    /// Waiting for events failed, with the reason as text; reported once until it works again.
    EventWaitFailed { words: String },
}
