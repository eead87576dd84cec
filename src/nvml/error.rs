//! Errors of calls into NVML, with messages that say what to do.

use std::path::PathBuf;
use std::time::Duration;

use nvml_wrapper::error::NvmlError as Code;
use thiserror::Error;

use super::ComputeMode;
use crate::model::names::DeviceUuid;

/// Why NVML could not be asked, or did not answer.
#[derive(Debug, Error)]
pub enum NvmlError {
    #[error(
        "no libnvidia-ml.so.1 under the driver root {}: looked in {} below it; install the NVIDIA driver on the node, \
         name the directory that it is installed in as the driver root, or name the directory of its libraries with \
         --driver-library-dirs",
        .root.display(), .searched.join(", ")
    )]
    LibraryMissing { root: PathBuf, searched: Vec<String> },
    #[error("{} cannot be used as NVML: {words}; reinstall the driver, or name another driver root", .path.display())]
    LibraryUnusable { path: PathBuf, words: String },
    #[error(
        "the NVIDIA kernel module is not loaded; load it (modprobe nvidia), or look into dmesg why it is not"
    )]
    DriverNotLoaded,
    #[error(
        "{call} did not return within {} s; the driver hangs: see dmesg for Xid lines, and reset the GPU or the node",
        .limit.as_secs_f32()
    )]
    Timeout { call: String, limit: Duration },
    #[error(
        "{threads} threads wait in NVML calls that do not return; no other is tried until one comes back: see dmesg \
         for Xid lines, and reset the GPU or the node"
    )]
    Stuck { threads: usize },
    #[error("{call}{}: {words}", device(.index))]
    Nvml {
        call: &'static str,
        /// NVML's index of the GPU, for a call about one.
        index: Option<u32>,
        words: String,
        #[source]
        code: Code,
    },
    #[error("{call}{} answered {what}, which cannot be right; the device is left out", device(.index))]
    Nonsense { call: &'static str, index: Option<u32>, what: String },
    #[error(
        "the compute mode of {gpu} is not {} although it was set; does something else set it (nvidia-smi -c)?",
        mode_words(*.wanted)
    )]
    ModeRefused { gpu: DeviceUuid, wanted: ComputeMode },
    #[error("the NVML thread could not be started: {0}; the node has no memory or threads left")]
    NoThread(std::io::Error),
    #[error("the NVML thread ended before it answered; the next look starts another")]
    ThreadGone,
}

impl NvmlError {
    /// The failure of a call, about the GPU with that NVML index if it was about one.
    pub(super) fn of_call(call: &'static str, index: Option<u32>, code: Code) -> Self {
        match code {
            Code::DriverNotLoaded => Self::DriverNotLoaded,
            code => Self::Nvml { call, index, words: words(&code), code },
        }
    }

    /// NVML's own answer, if it is one that calls for nothing special.
    pub(super) fn code(&self) -> Option<&Code> {
        match self {
            Self::Nvml { code, .. } => Some(code),
            _ => None,
        }
    }

    /// True if the library as it is loaded will never answer again: it must be closed and loaded anew.
    pub(super) fn wants_reload(&self) -> bool {
        match self {
            Self::DriverNotLoaded => true,
            Self::Nvml { code, .. } => matches!(code, Code::Uninitialized | Code::LibRmVersionMismatch),
            _ => false,
        }
    }

    /// True if the driver or the board just does not have what was asked for.
    pub(super) fn is_absence(&self) -> bool {
        let Self::Nvml { code, .. } = self else { return false };
        matches!(
            code,
            Code::NotSupported | Code::FailedToLoadSymbol(_) | Code::FunctionNotFound | Code::NoData | Code::NoPermission
                // ARGUMENT_VERSION_MISMATCH and DEPRECATED: the struct or call is not this driver's
                | Code::UnexpectedVariant(25 | 26)
        )
    }

    /// True if the answer is a number that came after nvml-wrapper, such as a new architecture.
    pub(super) fn is_news(&self) -> bool {
        matches!(self, Self::Nvml { code: Code::UnexpectedVariant(_), .. })
    }

    /// True if the board asked about has left the bus.
    pub(super) fn is_lost(&self) -> bool {
        matches!(self, Self::Nvml { code: Code::GpuLost, .. })
    }

    /// True if the thing asked about is not there (any more).
    pub(super) fn is_not_found(&self) -> bool {
        matches!(self, Self::Nvml { code: Code::NotFound | Code::InvalidArg, .. })
    }
}

fn words(code: &Code) -> String {
    match code {
        Code::GpuLost => "the GPU has fallen off the bus; see dmesg for Xid 79, and reset the node".to_owned(),
        Code::ResetRequired => "the GPU must be reset (nvidia-smi --gpu-reset) before it can be used".to_owned(),
        Code::LibRmVersionMismatch => {
            "library and kernel module are of different driver versions; reload the module or restart the node".to_owned()
        }
        Code::NoPermission => "not permitted; the plugin must run as root in a privileged container".to_owned(),
        Code::OperatingSystem => {
            "the operating system blocks the GPU; the container lacks its device files or a cgroup rule".to_owned()
        }
        Code::UnexpectedVariant(number) => format!("error {number}"),
        other => other.to_string(),
    }
}

/// As nvidia-smi has it.
fn mode_words(mode: ComputeMode) -> &'static str {
    match mode {
        ComputeMode::Default => "Default",
        ComputeMode::ExclusiveProcess => "Exclusive_Process",
    }
}

fn device(index: &Option<u32>) -> String {
    index.map(|index| format!(" on the GPU with index {index}")).unwrap_or_default()
}
