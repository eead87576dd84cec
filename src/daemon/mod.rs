//! Edge to one MPS control daemon, the driver's `nvidia-cuda-mps-control`: where it lives, how it starts,
//! what it says, when it is gone. Decides nothing.
//!
//! * [`Folder`]: its folder, a small file system of its own; the part of it that tenants see
//! * [`shm`]: another file system, what tenants have as /dev/shm: bounded, emptied
//! * [`launch`]: starts it; `launch::Launch::enter` is the part that runs in the child
//! * [`ask`], [`tell`]: commands to it, each question a child process with a deadline
//! * [`protocol`]: commands and answers as text. The program's exit status is always 0: only text tells
//! * [`Process`]: alive or not, whatever became of its number
//!
//! May import: model. May name: nix (mounts, namespaces, chroot, signals), tokio (child processes),
//! std::fs, std::process, serde, serde_json, thiserror.

mod ask;
mod cgroup;
mod folder;
pub mod launch;
mod process;
pub mod protocol;
pub mod shm;

use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use thiserror::Error;

pub use ask::{ask, tell};
pub use folder::{DaemonMounts, Folder};
pub use process::Process;

/// The program's name.
pub const PROGRAM: &str = "nvidia-cuda-mps-control";

/// The driver's program, and what it needs to run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Program {
    /// As this process sees it.
    pub path: PathBuf,
    /// A root with a dynamic loader of its own, below which the program lies: the daemon runs with it as its
    /// `/`, so that program and libraries fit together.
    pub root: Option<PathBuf>,
    /// Where the server finds the driver's libraries, and the daemon its server. Not used below a `root`.
    pub libraries: Vec<PathBuf>,
    pub programs: Vec<PathBuf>,
}

/// Why a daemon could not be started or asked.
#[derive(Debug, Error)]
pub enum DaemonError {
    #[error("cannot {verb} {}", .path.display())]
    Files { verb: &'static str, path: PathBuf, source: io::Error },
    #[error("cannot start {}", .path.display())]
    Start { path: PathBuf, source: io::Error },
    #[error("the MPS daemon did not start: {words}")]
    Launch { words: String },
    #[error("the MPS daemon did not answer within {seconds} s")]
    Mute { seconds: u64 },
    /// It lives, and limits that were in force are: only root on the node changes them.
    #[error(
        "the MPS daemon serves one client at a time and served another for {seconds} s ({words}); is \
         nvidia-cuda-mps-control open in a pod of this GPU or on the node?"
    )]
    Busy { seconds: u64, words: String },
    #[error("the MPS daemon is not there: {words}")]
    Gone { words: String },
    #[error("the MPS daemon refused {command:?}: {words}")]
    Refused { command: String, words: String },
    #[error("the MPS daemon answered {answer:?} to {command:?}, which is not understood")]
    NotUnderstood { command: String, answer: String },
}

/// `cannot <verb> <path>`, as an error.
fn files(verb: &'static str, path: &Path) -> impl FnOnce(io::Error) -> DaemonError {
    move |source| DaemonError::Files { verb, path: path.to_owned(), source }
}
