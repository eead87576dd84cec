//! The requests of `node` and the responses of `mps`. One JSON object per line; [`VERSION`] comes first in each.

use serde::{Deserialize, Serialize};

use super::SupervisorError;
use crate::model::share::{MpsGroup, MpsLimits, SharedMemory};

/// Grows when an older reader would misunderstand. Fields that are added do not count.
pub const VERSION: u32 = 1;
/// The most bytes of a line. Real lines are far shorter.
pub const LINE_MAX: usize = 1 << 20;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestMessage {
    pub version: u32,
    /// The name on the wire is that of the first version.
    #[serde(rename = "ask")]
    pub request: Request,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    Keep { group: MpsGroup, exclusive: bool, limits: MpsLimits },
    Rest { group: MpsGroup },
    States,
    Clients { group: MpsGroup },
    Terminate { group: MpsGroup, client: MpsClient },
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResponseMessage {
    pub version: u32,
    /// The name on the wire is that of the first version.
    #[serde(rename = "say")]
    pub response: Response,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Response {
    Done,
    Kept(Box<DaemonState>),
    States(Vec<DaemonState>),
    Clients(Vec<MpsClient>),
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

/// One MPS server process of a daemon, with the state that the daemon reports (`ACTIVE`, `FAULT`, ...); empty: the daemon
/// was not asked since it started.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Server {
    pub pid: u32,
    pub state: String,
}

/// A client process, by host PIDs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct MpsClient {
    pub server: u32,
    pub pid: u32,
}

#[derive(Deserialize)]
struct Version {
    version: u32,
}

/// Parses a request.
///
/// # Errors
/// Why the line is no request, as text for the client. The version of the response tells a client of another version.
pub fn parse_request(line: &[u8]) -> Result<Request, String> {
    let bad = |error: serde_json::Error| format!("the request is not understood: {error}");
    let theirs = serde_json::from_slice::<Version>(line).map_err(bad)?.version;
    if theirs != VERSION {
        return Err(format!(
            "`tranche mps` speaks version {VERSION} and was asked in version {theirs}; update the older one"
        ));
    }
    serde_json::from_slice::<RequestMessage>(line).map(|message| message.request).map_err(bad)
}

/// Parses a response.
///
/// # Errors
/// The line is no response, or one of another version.
pub fn parse_response(line: &[u8]) -> Result<Response, SupervisorError> {
    let bad = |error: serde_json::Error| SupervisorError::Answer { problem: error.to_string() };
    let theirs = serde_json::from_slice::<Version>(line).map_err(bad)?.version;
    if theirs != VERSION {
        return Err(SupervisorError::Version { theirs, ours: VERSION });
    }
    serde_json::from_slice::<ResponseMessage>(line).map(|message| message.response).map_err(bad)
}
