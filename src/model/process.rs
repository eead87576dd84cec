//! A process of the host.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::names::PodUid;

/// Which process. PIDs come again; a PID with the time of its start does not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ProcessKey {
    /// As the host numbers it.
    pub pid: u32,
    /// Clock ticks since the boot (proc_pid_stat(5), `starttime`).
    pub started: u64,
}

/// The pod of a process, as far as the node tells.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProcessPod {
    Known(PodUid),
    /// A process of the host.
    None,
    /// A pod's, nobody can say which: the process hides in a control group with a name that is too long to be told.
    Hidden,
}

impl ProcessPod {
    /// The one that is known.
    pub fn known(&self) -> Option<&PodUid> {
        match self {
            Self::Known(pod) => Some(pod),
            Self::None | Self::Hidden => None,
        }
    }
}

impl fmt::Display for ProcessKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.pid)
    }
}
