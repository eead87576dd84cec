//! Programs of the driver, where it has no library call for what is needed: only the time slice.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use thiserror::Error;

use super::driver_root::{self, RootView};
use crate::model::driver::DriverPlace;
use crate::model::names::DeviceUuid;

/// nvidia-smi answers in tens to hundreds of milliseconds; kubelet waits 45 s for the whole claim.
const LIMIT: Duration = Duration::from_secs(10);
const POLL: Duration = Duration::from_millis(5);
/// More of its output than this is not told.
const OUTPUT_MAX: u64 = 2_000;

#[derive(Debug, Error)]
pub enum ProgramError {
    #[error("nvidia-smi is not below the driver root {root}; it is needed to set the time slice")]
    Missing { root: PathBuf },
    #[error("cannot start {path}")]
    Start { path: PathBuf, source: std::io::Error },
    #[error("{path} did not end within {} s", LIMIT.as_secs())]
    Timeout { path: PathBuf },
    #[error("{path} compute-policy ended with {status}: {output}")]
    Failed { path: PathBuf, status: String, output: String },
}

/// Sets a GPU's time slice: 0 default, 1 short, 2 medium, 3 long. Blocks the thread, at most 10 s.
///
/// There is no NVML call for it; `nvidia-smi compute-policy` is the driver's own way.
pub fn set_time_slice(driver: &DriverPlace, gpu: &DeviceUuid, level: u8) -> Result<(), ProgramError> {
    let root = driver.root();
    let path = driver_root::program(&RootView::new(root, ""), "nvidia-smi")
        .map(|below| root.join(below))
        .ok_or_else(|| ProgramError::Missing { root: root.to_owned() })?;
    let mut command = Command::new(&path);
    command
        .args(["compute-policy", "-i", gpu.as_str(), "--set-timeslice", &level.to_string()])
        .env("LD_LIBRARY_PATH", library_path(driver));
    run(&path, &mut command)
}

/// Where nvidia-smi finds libnvidia-ml.so.1.
fn library_path(driver: &DriverPlace) -> String {
    let (libraries, _) = driver_root::search_paths(driver);
    libraries.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(":")
}

#[expect(clippy::disallowed_methods, reason = "its callers have a thread for what blocks")]
fn run(path: &Path, command: &mut Command) -> Result<(), ProgramError> {
    let start = |source| ProgramError::Start { path: path.to_owned(), source };
    let mut child =
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().map_err(start)?;
    let deadline = Instant::now() + LIMIT;
    let status = loop {
        if let Some(status) = child.try_wait().map_err(start)? {
            break status;
        }
        if Instant::now() >= deadline {
            // It is our own child; if it cannot be killed there is nothing more to do than to say so.
            let _ = child.kill();
            let _ = child.wait();
            return Err(ProgramError::Timeout { path: path.to_owned() });
        }
        std::thread::sleep(POLL);
    };
    if status.success() {
        return Ok(());
    }
    let mut output = String::new();
    for pipe in [child.stdout.take().map(read), child.stderr.take().map(read)].into_iter().flatten() {
        output.push_str(&pipe);
    }
    let output = output.split_whitespace().collect::<Vec<_>>().join(" ");
    Err(ProgramError::Failed { path: path.to_owned(), status: status.to_string(), output })
}

fn read(pipe: impl Read) -> String {
    let mut bytes = Vec::new();
    // What cannot be read of a failed program's words is left out.
    let _ = pipe.take(OUTPUT_MAX).read_to_end(&mut bytes);
    String::from_utf8_lossy(&bytes).into_owned()
}
