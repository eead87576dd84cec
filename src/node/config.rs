//! The settings of the node plugin. `cli::settings` makes them from flags and environment variables.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::host::PidNamespace;
use crate::model::driver::DriverPlace;
use crate::model::names::NodeName;
use crate::model::quantity::Bytes;
use crate::model::selector::GpuSelector;
use crate::ops::addresses::Addresses;
use crate::sharing::SharingPolicy;

/// How to run the node plugin. All paths are absolute and as this process sees them, unless said.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeSettings {
    pub node_name: NodeName,
    pub pod_uid: Option<String>,
    pub pod: Option<OwnPod>,
    pub roots: Roots,
    pub host: HostPaths,
    pub ops_address: Addresses,
    pub kubeconfig: Option<PathBuf>,
    pub discovery_interval: Duration,
    pub sweep_interval: Duration,
    pub sharing: SharingPolicy,
    pub watchdog: Watchdog,
    pub open_descriptors: OpenDescriptors,
    /// Serve the claims' metrics under DCGM's names, too.
    pub dcgm_metrics: bool,
    pub labels: NodeLabels,
    /// GPUs whose MIG devices are made for claims, while they are in MIG mode, or as far as the mode is switched for them.
    pub mig_on_demand: Vec<GpuSelector>,
    /// How long a MIG mode that was switched on for a claim stays on once nothing is cut off its GPU. None: no mode is
    /// switched.
    pub mig_keep: Option<Duration>,
}

/// What becomes of the node's labels that GPU feature discovery sets elsewhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NodeLabels {
    /// They are none of our business, and no permission for them is needed.
    Off,
    /// They say what GPUs the node has.
    On,
    /// Those that we have set go.
    Remove,
}

/// What is done about a process of a pod that has a GPU open and no claim on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OpenDescriptors {
    /// Nobody looks.
    Off,
    /// It is told, and the GPU is given all the same.
    Warn,
    /// The GPU is given to nobody.
    #[default]
    Withhold,
}

/// How claims' memory is watched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Watchdog {
    pub action: WatchdogAction,
    pub period: Duration,
    /// Over the grant by more than this, a process is ended.
    pub grace: Bytes,
    pub pids: PidNamespace,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WatchdogAction {
    Off,
    /// Events, conditions and metrics only.
    Observe,
    /// And processes are ended.
    Terminate,
}

/// The process's own pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwnPod {
    pub namespace: String,
    pub name: String,
}

/// Directories of kubelet, the container runtime and the kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostPaths {
    pub kubelet_dir: PathBuf,
    pub cdi_dir: PathBuf,
    pub state_dir: PathBuf,
    /// Folder of `tranche mps`; the same path on the host.
    pub mps_dir: PathBuf,
    pub boot_id_file: PathBuf,
    pub sysfs_root: PathBuf,
    pub proc_root: PathBuf,
    /// Where the host's processes are shown.
    pub process_root: PathBuf,
}

/// Where NVIDIA's driver is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Roots {
    pub driver: DriverPlace,
    /// The same directory on the host.
    pub driver_root_on_host: PathBuf,
    /// Where the host's own programs are, for NVIDIA's container toolkit, if the driver root is another: as this process
    /// sees it.
    pub toolkit_root: Option<PathBuf>,
    /// The toolkit's folder on the host, as an administrator named it.
    pub toolkit_dir: Option<PathBuf>,
    /// As given; see [`Roots::dev_root`].
    pub dev_root: Option<PathBuf>,
}

/// The directory of the device nodes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DevRoot {
    pub here: PathBuf,
    pub on_host: PathBuf,
}

impl Roots {
    /// Where the device nodes are. To be asked at each look at the GPUs, because a driver container
    /// may bring its device nodes long after this process has started.
    pub fn dev_root(&self, exists: impl Fn(&Path) -> bool) -> DevRoot {
        let here = self.dev_root.clone().unwrap_or_else(|| {
            let in_driver_root = self.driver.root().join("dev");
            match exists(&in_driver_root.join("nvidiactl")) {
                true => in_driver_root,
                false => PathBuf::from("/dev"),
            }
        });
        let on_host = match here.strip_prefix(self.driver.root()) {
            Ok(below) => self.driver_root_on_host.join(below),
            Err(_) => here.clone(),
        };
        DevRoot { here, on_host }
    }
}
