//! The settings of the supervisor. `cli::settings` makes them from flags and environment variables.

use std::path::PathBuf;
use std::time::Duration;

use crate::daemon::{DaemonMounts, shm};
use crate::model::driver::DriverPlace;
use crate::ops::addresses::Addresses;

/// How to run the supervisor. All paths are absolute and as this process sees them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MpsSettings {
    /// Folder of the socket and of all daemons; the same path on the host.
    pub folder: PathBuf,
    pub driver: DriverPlace,
    /// The control program, where it is not to be looked for below the driver root.
    pub control: Option<PathBuf>,
    /// This program, which is started again for each daemon.
    pub launcher: PathBuf,
    pub mounts: DaemonMounts,
    /// Of what the tenants of a GPU have as /dev/shm.
    pub shm: shm::Bounds,
    pub sysfs_root: PathBuf,
    pub cgroup_root: PathBuf,
    pub ops_address: Addresses,
    pub timing: Timing,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timing {
    /// How long a daemon that nobody needs is kept.
    pub keep_warm: Duration,
    /// How often every daemon is looked at.
    pub check_interval: Duration,
    /// Before the first try to start a dead daemon again; doubled after each failure.
    pub backoff: Duration,
}

impl Timing {
    pub const DEFAULT: Self = Self {
        keep_warm: Duration::from_secs(600),
        check_interval: Duration::from_secs(2),
        backoff: Duration::from_secs(1),
    };
}
