//! Edge between `tranche node` and `tranche mps`, the supervisor of MPS daemons: protocol, client, listener.
//!
//! One line of JSON each way over a Unix socket ([`SOCKET`] in the supervisor's folder), with deadlines.
//! What is asked for is a state, not a change: asking twice is asking once.
//!
//! * [`protocol`]: requests and responses, versioned
//! * [`Daemons`]: the requests as methods, which `node` calls; [`Client`] sends them to the real supervisor
//! * [`Listener`]: the supervisor's side; it passes requests to a [`RequestHandler`]
//!
//! May import: model. May name: tokio, serde_json, nix, socket2, std::os::unix::net.

mod client;
mod listener;
pub mod protocol;

pub use crate::model::share::{CLIENT_FOLDER, SHM_FOLDER};
pub use client::Client;
pub use listener::{ListenError, Listener, RequestHandler};

use thiserror::Error;

use crate::model::share::{MpsGroup, MpsLimits};
use protocol::{DaemonState, MpsClient};

/// File name of the socket in the supervisor's folder.
pub const SOCKET: &str = "tranche-mps.sock";

/// Why the supervisor did not do it. Nothing is half done that the next question would not repair.
#[derive(Debug, Error)]
pub enum SupervisorError {
    #[error("`tranche mps` does not answer on this node ({path}); is its DaemonSet running here?")]
    Unreachable { path: String, source: std::io::Error },
    #[error("`tranche mps` did not answer within {seconds} s")]
    Timeout { seconds: u64 },
    #[error("`tranche mps` speaks version {theirs} and this is version {ours}; update the older one")]
    Version { theirs: u32, ours: u32 },
    #[error("the answer of `tranche mps` is not understood: {problem}")]
    Answer { problem: String },
    #[error("{0}")]
    Refused(String),
}

/// What `node` asks of the supervisor. Every question blocks its thread, with a deadline.
pub trait Daemons: Send + Sync + 'static {
    /// See to it that a daemon serves the group with exactly these limits as its defaults, read back;
    /// `exclusive`: the devices are boards and are put into EXCLUSIVE_PROCESS mode first.
    fn keep(
        &self,
        group: &MpsGroup,
        exclusive: bool,
        limits: &MpsLimits,
    ) -> Result<DaemonState, SupervisorError>;

    /// Nobody needs the group any more: its servers end, the boards go back to DEFAULT mode. The daemon
    /// may stay for a while. A group that is not known is fine.
    fn rest(&self, group: &MpsGroup) -> Result<(), SupervisorError>;

    /// All daemons as they are.
    fn states(&self) -> Result<Vec<DaemonState>, SupervisorError>;

    /// Every client process of the group's servers.
    fn clients(&self, group: &MpsGroup) -> Result<Vec<MpsClient>, SupervisorError>;

    /// Ends one client cleanly (`terminate_client`): its memory is freed, its neighbours go on.
    fn terminate(&self, group: &MpsGroup, client: MpsClient) -> Result<(), SupervisorError>;
}
