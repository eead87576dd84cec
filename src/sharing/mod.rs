//! Shares of a GPU, as arithmetic: what a board can grant, what an allocation asks, whether it fits beside
//! the others, and which MPS limits follow.
//!
//! * [`capacity`]: a board and the node's policy → what may be granted of it, or why nothing
//! * [`share_request`]: `consumedCapacity` (KEP-5075) → whole board, share, or nothing counted; [`fits`]; [`agree`]
//! * [`watch`]: looks at the boards' processes → who is over its grant, and who is to be ended
//! * [`MigBoard`]: what a board in MIG mode says of itself to the controller
//! * [`mps`]: grants → what a client needs, what a daemon is set to, the client's environment
//!
//! May import: model. May name: thiserror.

mod capacity;
mod mig_board;
mod mps;
mod request;
mod usage;
pub mod watch;

pub use capacity::{
    CLIENT_SLOTS, COMPUTE, DAEMON, DefaultRequest, GRANTABLE_MIB, GpuSelector, ISOLATION, MEMORY,
    NotShareable, PROCESSES_PER_SLOT, SHARES, SLOTS, Shareable, SharingPolicy, ShmScope, rung, shareable,
};
pub use mig_board::{MIG_AVOIDED, MIG_INSTANCES, MIG_PARENT, MIG_PROFILE, MigBoard};
pub use mps::{CLIENT_DIRECTORY, SHM_DIRECTORY, client_env, loosest};
pub use request::{ShareError, ShareRequest, agree, fits, share_request};
pub use usage::Usage;
