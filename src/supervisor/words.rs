//! What `node` asks and `mps` answers. One JSON object per line; [`VERSION`] comes first in each.

use serde::{Deserialize, Serialize};

use super::SupervisorError;
use crate::model::share::{MpsGroup, MpsLimits, SharedMemory};

/// Grows when an older reader would misunderstand. Fields that are added do not count.
pub const VERSION: u32 = 1;
/// No honest line comes near.
pub const LINE_MAX: usize = 1 << 20;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Question {
    pub version: u32,
    pub ask: Ask,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ask {
    Keep { group: MpsGroup, exclusive: bool, limits: MpsLimits },
    Rest { group: MpsGroup },
    States,
    Clients { group: MpsGroup },
    Terminate { group: MpsGroup, client: Client },
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    pub version: u32,
    pub say: Say,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Say {
    Done,
    Kept(Box<DaemonState>),
    States(Vec<DaemonState>),
    Clients(Vec<Client>),
    /// Why not, in words for people.
    Refused(String),
}

/// One daemon, as the supervisor sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DaemonState {
    pub group: MpsGroup,
    pub exclusive: bool,
    pub phase: DaemonPhase,
    /// What was asked for; none while it rests.
    pub limits: Option<MpsLimits>,
    /// The daemon's own words when it was asked for them, e.g. `1G` per device: it rounds down to whole G.
    pub memory_answers: Vec<String>,
    pub compute_answer: String,
    /// Times that it died and was started again, since the supervisor knows it.
    pub deaths: u32,
    pub servers: Vec<Server>,
    /// How full its tenants' /dev/shm is; none where it has no bound, or an older supervisor does not tell.
    #[serde(default)]
    pub shm: Option<SharedMemory>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum DaemonPhase {
    /// Answers, with the limits that were asked for.
    Serving { pid: u32 },
    /// Alive and well; other limits are being set, or were not taken and are set again soon.
    Settling { pid: u32 },
    /// Alive, and nobody needs it.
    Resting { pid: u32 },
    /// Dead or mute, for the reason given; it is started again after a while.
    Down { reason: String },
}

/// One MPS server process of a daemon, with the state that the daemon reports (`ACTIVE`, `FAULT`, ...).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Server {
    pub pid: u32,
    pub state: String,
}

/// A client process, by host PIDs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Client {
    pub server: u32,
    pub pid: u32,
}

#[derive(Deserialize)]
struct Version {
    version: u32,
}

/// What a line asks.
///
/// # Errors
/// Why that cannot be told, in words for the asker. The answer's version tells the asker of another one.
pub fn question(line: &[u8]) -> Result<Ask, String> {
    let bad = |error: serde_json::Error| format!("the question is not understood: {error}");
    let theirs = serde_json::from_slice::<Version>(line).map_err(bad)?.version;
    if theirs != VERSION {
        return Err(format!(
            "`tranche mps` speaks version {VERSION} and was asked in version {theirs}; let the older one be updated"
        ));
    }
    serde_json::from_slice::<Question>(line).map(|question| question.ask).map_err(bad)
}

/// What a line says.
///
/// # Errors
/// It is no answer, or one of another version.
pub fn answer(line: &[u8]) -> Result<Say, SupervisorError> {
    let bad = |error: serde_json::Error| SupervisorError::Answer { problem: error.to_string() };
    let theirs = serde_json::from_slice::<Version>(line).map_err(bad)?.version;
    if theirs != VERSION {
        return Err(SupervisorError::Version { theirs, ours: VERSION });
    }
    serde_json::from_slice::<Answer>(line).map(|answer| answer.say).map_err(bad)
}
