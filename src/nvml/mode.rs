//! The MIG mode of a board, switched where no reset is needed: on Hopper and newer it is in force at once.

use nvml_wrapper::Device;
use thiserror::Error;

use super::carve::{self, MigError};
use super::look::Session;
use super::raw::{self, ProcessListKind};
use super::{NvmlError, raw_mig};
use crate::model::names::DeviceUuid;

/// `NVML_ERROR_IN_USE`, as an activation status has it.
const IN_USE: u32 = 19;
/// Processes that are told by their number; of others how many they are.
const TOLD: usize = 8;

/// Why a MIG mode was not switched: it is as it was.
#[derive(Debug, Error)]
pub enum ModeError {
    #[error("GPU {gpu} has no MIG mode that could be switched")]
    None { gpu: DeviceUuid },
    #[error(
        "the MIG mode of GPU {gpu} is not switched {to} while processes run on it (process {processes}); that is tried again"
    )]
    Running { gpu: DeviceUuid, to: &'static str, processes: String },
    #[error(
        "the MIG mode of GPU {gpu} is not switched off while there are GPU instances on it: {count}; end those that were \
         made by hand (nvidia-smi mig -dci, -dgi)"
    )]
    Cut { gpu: DeviceUuid, count: usize },
    #[error(
        "GPU {gpu} is in MIG mode, which somebody else has switched on: it is not given whole, and published as it is within a \
         minute; delete the pods that use the claim, or switch MIG off (nvidia-smi -i {gpu} -mig 0)"
    )]
    Others { gpu: DeviceUuid },
    #[error(
        "the driver does not switch the MIG mode of GPU {gpu} {to} while others have the GPU open (a tool on the host that \
         watches GPUs, nvidia-smi or DCGM, say: end it); the mode is as it was"
    )]
    Open { gpu: DeviceUuid, to: &'static str },
    #[error(
        "the driver would switch the MIG mode of GPU {gpu} {to} at the next reset of the GPU only, and Tranche resets none; the \
         mode is as it was. Have --mig-on-demand not name this GPU, or put it into MIG mode by hand"
    )]
    Reset { gpu: DeviceUuid, to: &'static str },
}

fn word(on: bool) -> &'static str {
    if on { "on" } else { "off" }
}

/// True if MIG is on, whatever is pending. A board that cannot do MIG has it off.
pub(super) fn is_on(session: &Session<'_>, gpu: &DeviceUuid) -> Result<bool, NvmlError> {
    Ok(read(session, gpu)? == Some(true))
}

/// None of a board that cannot do MIG.
fn read(session: &Session<'_>, gpu: &DeviceUuid) -> Result<Option<bool>, NvmlError> {
    let board = board(session, gpu)?;
    match session.call("nvmlDeviceGetMigMode", None, || board.mig_mode()) {
        Ok(mode) => Ok(Some(mode.current != 0)),
        Err(error) if error.is_absence() => Ok(None),
        Err(error) => Err(error),
    }
}

fn board<'a>(session: &'a Session<'_>, gpu: &DeviceUuid) -> Result<Device<'a>, NvmlError> {
    session.call("nvmlDeviceGetHandleByUUID", None, || session.nvml.device_by_uuid(gpu.as_str()))
}

/// Switches the mode, and takes it back where it would be in force after a reset only.
pub(super) fn set(session: &Session<'_>, gpu: &DeviceUuid, on: bool) -> Result<(), MigError> {
    let gpu_of = || gpu.clone();
    match read(session, gpu)? {
        None => return Err(ModeError::None { gpu: gpu_of() }.into()),
        Some(mode) if mode == on => return Ok(()),
        Some(_) => {}
    }
    let to = word(on);
    if on {
        let processes = processes(session, gpu)?;
        if !processes.is_empty() {
            return Err(ModeError::Running { gpu: gpu_of(), to, processes: listed(&processes) }.into());
        }
    } else {
        let count = carve::places(session, gpu)?.len();
        if count > 0 {
            return Err(ModeError::Cut { gpu: gpu_of(), count }.into());
        }
    }
    let board = board(session, gpu)?;
    let call = "nvmlDeviceSetMigMode";
    let status = session.call(call, None, || raw_mig::set_mode(&board, on))?;
    if is_on(session, gpu)? == on {
        return Ok(());
    }
    session.call(call, None, || raw_mig::set_mode(&board, !on))?;
    Err(match status {
        IN_USE => ModeError::Open { gpu: gpu_of(), to },
        _ => ModeError::Reset { gpu: gpu_of(), to },
    }
    .into())
}

/// Processes on a board whose MIG mode is off.
fn processes(session: &Session<'_>, gpu: &DeviceUuid) -> Result<Vec<u32>, NvmlError> {
    let handle =
        session.call("nvmlDeviceGetHandleByUUID", None, || raw::board(session.nvml, gpu.as_str()))?;
    let (mut found, mut buffer) = (Vec::new(), raw::Buffer::default());
    for (name, list) in [
        ("nvmlDeviceGetComputeRunningProcesses_v3", ProcessListKind::Compute),
        ("nvmlDeviceGetMPSComputeRunningProcesses_v3", ProcessListKind::Mps),
        ("nvmlDeviceGetGraphicsRunningProcesses_v3", ProcessListKind::Graphics),
    ] {
        let listed = session.call(name, None, || raw::processes(session.nvml, &handle, list, &mut buffer));
        match listed {
            Ok(listed) => found.extend(listed.into_iter().map(|one| one.pid)),
            // A driver or board without MPS or graphics has no such processes.
            Err(error) if list != ProcessListKind::Compute && error.is_absence() => {}
            Err(error) => return Err(error),
        }
    }
    found.sort_unstable();
    found.dedup();
    Ok(found)
}

fn listed(processes: &[u32]) -> String {
    let told: Vec<String> = processes.iter().take(TOLD).map(u32::to_string).collect();
    match processes.len().saturating_sub(TOLD) {
        0 => told.join(", "),
        more => format!("{} and {more} more", told.join(", ")),
    }
}
