//! Edge to the node's own system: files that last, locks between processes, the driver's files, programs,
//! and the processes that run.
//! Knows how to do things safely; decides nothing about claims or GPUs.
//!
//! [`Host`] is what the loops see of it; [`LocalHost`] is the real one. Tests wrap it to stop at any verb.
//!
//! May import: model, and cdi's plain data ([`crate::cdi::DriverFiles`]). May name: nix, rustix, std::fs, std::process.

pub mod boot;
pub mod cgroup;
mod descriptor;
pub mod device_nodes;
pub mod driver_root;
pub mod durable;
pub mod lock;
mod managed;
pub mod memory;
mod numbered;
mod open_devices;
pub mod process;
pub mod program;

use std::io;
use std::path::Path;

pub use durable::Durability;
pub use lock::{FileLock, LockError};
pub use managed::ManagedMemory;
pub use open_devices::{DeviceNumber, FileLook, OpenDevices};
pub use process::{End, EndError, LocalProcesses, PidNamespace, PodProcesses, Processes};
pub use program::ProgramError;

use crate::model::driver::DriverPlace;
use crate::model::names::DeviceUuid;

/// What the loops do to the node. Every verb blocks its thread.
pub trait Host: Send + Sync + 'static {
    /// Creates or replaces `folder/name` in one go.
    fn write(&self, folder: &Path, name: &str, bytes: &[u8], durability: Durability) -> io::Result<()>;
    /// Puts `bytes` at `offset` of a file and cuts off what stood behind.
    fn append_at(&self, path: &Path, offset: u64, bytes: &[u8]) -> io::Result<()>;
    /// Removes a file; one that is not there is fine. True if it was there.
    fn remove(&self, path: &Path) -> io::Result<bool>;
    /// Sets a GPU's time slice: 0 (the driver's default) to 3.
    fn set_time_slice(&self, gpu: &DeviceUuid, level: u8) -> Result<(), ProgramError>;
}

/// This machine.
#[derive(Debug, Clone)]
pub struct LocalHost {
    /// Where the driver's files are, as this process sees them.
    pub driver: DriverPlace,
}

impl Host for LocalHost {
    fn write(&self, folder: &Path, name: &str, bytes: &[u8], durability: Durability) -> io::Result<()> {
        durable::write(folder, name, bytes, durability)
    }
    fn append_at(&self, path: &Path, offset: u64, bytes: &[u8]) -> io::Result<()> {
        durable::append_at(path, offset, bytes)
    }
    fn remove(&self, path: &Path) -> io::Result<bool> {
        durable::remove(path)
    }
    fn set_time_slice(&self, gpu: &DeviceUuid, level: u8) -> Result<(), ProgramError> {
        program::set_time_slice(&self.driver, gpu, level)
    }
}
