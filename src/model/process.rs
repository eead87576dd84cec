//! A process of the host.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Which process. PIDs come again; a PID with the time of its start does not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ProcessKey {
    /// As the host numbers it.
    pub pid: u32,
    /// Clock ticks since the boot (proc_pid_stat(5), `starttime`).
    pub started: u64,
}

impl fmt::Display for ProcessKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.pid)
    }
}
