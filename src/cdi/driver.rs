//! What a node's driver root and device directory hold: plain data, found by the `host` module.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// One file under two names: where this process sees it, and where the container runtime does.
/// Files are checked by the first and written into CDI by the second.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct HostPath {
    pub inside: PathBuf,
    pub host: String,
}

/// Everything that [`super::render`] needs to know of the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriverFiles {
    pub root: Arc<RootFiles>,
    pub nodes: DeviceNodes,
}

/// The driver's user-space part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RootFiles {
    /// Driver version, e.g. `550.163.01`: the suffix of the libraries.
    pub version: String,
    pub arch: Arch,
    /// Sorted by file name.
    pub libraries: Vec<Library>,
    /// `nvidia-smi` and its like, for `/usr/bin`.
    pub binaries: Vec<RootFile>,
    /// Firmware, ICD files, sockets.
    pub files: Vec<RootFile>,
    /// NVIDIA's container toolkit's hook program, where there is one.
    pub hook: Option<Hook>,
}

/// Instruction set of the driver's libraries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arch {
    X86_64,
    Aarch64,
}

impl Arch {
    /// Debian's multiarch directory name.
    pub fn triplet(self) -> &'static str {
        match self {
            Self::X86_64 => "x86_64-linux-gnu",
            Self::Aarch64 => "aarch64-linux-gnu",
        }
    }
}

/// A shared library: the file itself and the names that lead to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Library {
    /// `libcuda.so.550.163.01`, links resolved.
    pub file: RootFile,
    /// Links to the file in a library directory, e.g. `libcuda.so`, `libcuda.so.1`. Sorted.
    pub aliases: Vec<String>,
}

/// A file to mount, and where a container that mirrors the driver root has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RootFile {
    pub host: HostPath,
    /// Absolute path in the container.
    pub container: String,
    pub kind: FileKind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileKind {
    Plain,
    Socket,
}

/// The toolkit's program that makes links and the linker cache in a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hook {
    /// As the runtime executes it, on the host.
    pub path: HostPath,
    pub tool: HookTool,
}

/// Since toolkit 1.16 the hooks have a program of their own; before, `nvidia-ctk hook`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HookTool {
    NvidiaCdiHook,
    NvidiaCtk,
}

/// The device nodes of the devices that were asked for, and the control nodes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DeviceNodes(pub BTreeMap<DriverNode, DeviceNode>);

/// A device node by its meaning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DriverNode {
    /// `/dev/nvidiactl`.
    Control,
    /// `/dev/nvidia-uvm`: CUDA needs it.
    Uvm,
    UvmTools,
    Modeset,
    /// `/dev/nvidia<minor>`.
    Gpu {
        minor: u32,
    },
    /// The right to use a GPU instance: `/dev/nvidia-caps/nvidia-cap<n>`.
    GpuInstance {
        gpu: u32,
        instance: u32,
    },
    /// The right to use a compute instance of it.
    ComputeInstance {
        gpu: u32,
        instance: u32,
        compute: u32,
    },
}

impl DriverNode {
    /// The nodes that every GPU container gets, the required one first.
    pub const CONTROL: [Self; 4] = [Self::Control, Self::Uvm, Self::UvmTools, Self::Modeset];
}

impl fmt::Display for DriverNode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Control => f.write_str("nvidiactl"),
            Self::Uvm => f.write_str("nvidia-uvm"),
            Self::UvmTools => f.write_str("nvidia-uvm-tools"),
            Self::Modeset => f.write_str("nvidia-modeset"),
            Self::Gpu { minor } => write!(f, "nvidia{minor}"),
            Self::GpuInstance { gpu, instance } => {
                write!(f, "the capability node of GPU {gpu}'s GPU instance {instance}")
            }
            Self::ComputeInstance { gpu, instance, compute } => {
                write!(
                    f,
                    "the capability node of GPU {gpu}'s GPU instance {instance}, compute instance {compute}"
                )
            }
        }
    }
}

/// A character device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceNode {
    /// Path in the container, e.g. `/dev/nvidia0`.
    pub container: String,
    pub host: HostPath,
    pub major: u32,
    pub minor: u32,
    pub state: DeviceNodeState,
}

/// Is there a usable node on the host?
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceNodeState {
    /// The runtime reads the numbers from the host's node when it makes the container, so that a
    /// number that a reloaded driver changed is never stale in the CDI file.
    Present,
    /// No node, or one with other numbers than the kernel's: a fresh node where nothing has called
    /// nvidia-modprobe yet. The kernel's numbers go into the CDI file and no host node is needed.
    KernelOnly,
}
