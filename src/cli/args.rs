//! What was typed or set in the environment, as text. [`super::settings`] says what it means, so that
//! everything that is wrong is told at once and not one mistake per start.
//!
//! An empty value counts as not given: a chart that renders `value: ""` means the default.

mod webhook;

use clap::Args;

pub use webhook::{WebhookArgs, WebhookRunArgs};

/// How to log.
#[derive(Debug, Clone, Default, Args)]
pub struct LogArgs {
    /// How log lines look: json or text [default: text].
    #[arg(long, env = "LOG_FORMAT", global = true, hide_env_values = true)]
    pub log_format: Option<String>,
    /// What is logged, e.g. debug, or info,tranche::node=debug [default: info,kube_client=off].
    #[arg(long, env = "LOG_LEVEL", global = true, hide_env_values = true)]
    pub log_level: Option<String>,
}

/// Where the process can be asked.
#[derive(Debug, Clone, Default, Args)]
pub struct OpsArgs {
    /// Where metrics and health are served; port 0 takes any [default: 0.0.0.0:8080].
    #[arg(long, env = "OPS_ADDRESS", hide_env_values = true)]
    pub ops_address: Option<String>,
    /// Where health alone is served, for kubelet's probes; port 0 takes any [default: the port after --ops-address].
    #[arg(long, env = "HEALTH_ADDRESS", hide_env_values = true)]
    pub health_address: Option<String>,
    /// Unix socket that serves the state and the log level, to this user alone; off serves them nowhere
    /// [default: /run/tranche-ops/private/ops.sock].
    #[arg(long, env = "OPS_SOCKET", hide_env_values = true)]
    pub ops_socket: Option<String>,
}

/// How to run the node plugin.
#[derive(Debug, Clone, Default, Args)]
pub struct NodeArgs {
    /// Name of the Node object that this process runs on (required).
    #[arg(long, env = "NODE_NAME", hide_env_values = true)]
    pub node_name: Option<String>,
    /// UID of this process's own pod: lets kubelet tell an old plugin from a new one during an update.
    #[arg(long, env = "POD_UID", hide_env_values = true)]
    pub pod_uid: Option<String>,
    /// Name of this process's own pod, for events.
    #[arg(long, env = "POD_NAME", hide_env_values = true)]
    pub pod_name: Option<String>,
    /// Namespace of this process's own pod, for events.
    #[arg(long, env = "POD_NAMESPACE", hide_env_values = true)]
    pub pod_namespace: Option<String>,
    #[command(flatten)]
    pub roots: RootArgs,
    #[command(flatten)]
    pub host: HostArgs,
    #[command(flatten)]
    pub ops: OpsArgs,
    /// Kubeconfig to use instead of the pod's service account.
    #[arg(long, env = "KUBECONFIG", hide_env_values = true)]
    pub kubeconfig: Option<String>,
    /// How often to look at the GPUs when nothing else asks for it [default: 60s].
    #[arg(long, env = "DISCOVERY_INTERVAL", hide_env_values = true)]
    pub discovery_interval: Option<String>,
    /// How often to compare ledger, CDI files and claims [default: 60s].
    #[arg(long, env = "SWEEP_INTERVAL", hide_env_values = true)]
    pub sweep_interval: Option<String>,
    #[command(flatten)]
    pub sharing: SharingArgs,
    #[command(flatten)]
    pub watchdog: WatchdogArgs,
}

/// How to supervise MPS daemons.
#[derive(Debug, Clone, Default, Args)]
pub struct MpsArgs {
    /// Folder of the socket and the daemons, here and on the host [default: /run/tranche/mps].
    #[arg(long, env = "MPS_DIR", hide_env_values = true)]
    pub mps_dir: Option<String>,
    /// Root of the driver's files as this process sees it [default: /driver-root].
    #[arg(long, env = "DRIVER_ROOT", hide_env_values = true)]
    pub driver_root: Option<String>,
    /// The program nvidia-cuda-mps-control, as this process sees it [default: looked for below the driver
    /// root].
    #[arg(long, env = "MPS_CONTROL", hide_env_values = true)]
    pub mps_control: Option<String>,
    /// The host's /sys as this process sees it [default: /sys].
    #[arg(long, env = "SYSFS_ROOT", hide_env_values = true)]
    pub sysfs_root: Option<String>,
    /// The host's control groups as this process sees them [default: /sys/fs/cgroup].
    #[arg(long, env = "CGROUP_ROOT", hide_env_values = true)]
    pub cgroup_root: Option<String>,
    #[command(flatten)]
    pub ops: OpsArgs,
    /// How long a daemon is kept that nobody needs [default: 10m].
    #[arg(long, env = "KEEP_WARM", hide_env_values = true)]
    pub keep_warm: Option<String>,
    /// How often daemons are looked at [default: 2s].
    #[arg(long, env = "CHECK_INTERVAL", hide_env_values = true)]
    pub check_interval: Option<String>,
    /// Whether each daemon gets a small file system and mounts of its own: own, or none where mounting is
    /// not permitted [default: own].
    #[arg(long, env = "MPS_MOUNTS", hide_env_values = true)]
    pub mps_mounts: Option<String>,
    /// How much all shares of a GPU may put into the /dev/shm that they have together, such as 16Gi; half is half
    /// of the node's memory [default: half].
    #[arg(long, env = "SHM_SIZE", hide_env_values = true)]
    pub shm_size: Option<String>,
    /// How many files and folders they may have there, 1024 to 1048576 [default: 8192].
    #[arg(long, env = "SHM_FILES", hide_env_values = true)]
    pub shm_files: Option<String>,
}

/// How to place claims over the cluster.
#[derive(Debug, Clone, Default, Args)]
pub struct ControllerArgs {
    /// Name of this process's own pod: who holds the lease (required).
    #[arg(long, env = "POD_NAME", hide_env_values = true)]
    pub pod_name: Option<String>,
    /// Namespace of the lease and of the claims that hold GPUs (required).
    #[arg(long, env = "POD_NAMESPACE", hide_env_values = true)]
    pub pod_namespace: Option<String>,
    /// The Deployment that this process belongs to: deleting it gives all held GPUs back [default: none].
    #[arg(long, env = "DEPLOYMENT", hide_env_values = true)]
    pub deployment: Option<String>,
    /// Name of the lease [default: tranche-controller].
    #[arg(long, env = "LEASE_NAME", hide_env_values = true)]
    pub lease_name: Option<String>,
    /// After so long without a sign of life another controller takes over; at least 5s [default: 10s].
    #[arg(long, env = "LEASE_DURATION", hide_env_values = true)]
    pub lease_duration: Option<String>,
    #[command(flatten)]
    pub ops: OpsArgs,
    /// Kubeconfig to use instead of the pod's service account.
    #[arg(long, env = "KUBECONFIG", hide_env_values = true)]
    pub kubeconfig: Option<String>,
    /// How GPUs are chosen unless a claim says otherwise: pack, spread or fragmentation [default: pack].
    #[arg(long, env = "POLICY", hide_env_values = true)]
    pub policy: Option<String>,
    #[command(flatten)]
    pub holds: HoldArgs,
    #[command(flatten)]
    pub webhook: WebhookArgs,
    /// A pod is passed by ones that are not more urgent at most so often before room is kept for it [default: 32].
    #[arg(long, env = "PASSES", hide_env_values = true)]
    pub passes: Option<String>,
    /// Or for at most so long [default: 60s].
    #[arg(long, env = "PATIENCE", hide_env_values = true)]
    pub patience: Option<String>,
    /// Then its place is kept for so long at a time, and again as long while something of what is in the way ends, up
    /// to five times; in between others are placed there [default: 60s].
    #[arg(long, env = "KEEP", hide_env_values = true)]
    pub keep: Option<String>,
}

/// How the controller takes GPUs and gives them back.
#[derive(Debug, Clone, Default, Args)]
pub struct HoldArgs {
    /// Between the taking of a GPU and its first share, while there is somebody to whom the scheduler may be giving
    /// that GPU; else 200ms, or this if it is less [default: 2s].
    #[arg(long, env = "SETTLE", hide_env_values = true)]
    pub settle: Option<String>,
    /// How long a GPU is kept after its last share [default: 60s].
    #[arg(long, env = "KEEP_WARM", hide_env_values = true)]
    pub keep_warm: Option<String>,
    /// GPUs that are held before anybody needs them [default: 0].
    #[arg(long, env = "HOLD_AHEAD", hide_env_values = true)]
    pub hold_ahead: Option<String>,
    /// GPUs that are never held, separated by commas: nodes' names, UUIDs, or parts of a product's name
    /// [default: none].
    #[arg(long, env = "NEVER_HOLD", hide_env_values = true)]
    pub never_hold: Option<String>,
    /// GPUs that are held for good, named in the same way [default: none].
    #[arg(long, env = "ALWAYS_HOLD", hide_env_values = true)]
    pub always_hold: Option<String>,
}

/// Which GPUs are shared, and how they are counted.
#[derive(Debug, Clone, Default, Args)]
pub struct SharingArgs {
    /// GPUs that are only given whole, separated by commas: all, minor numbers, UUIDs, or parts of a
    /// product's name [default: none].
    #[arg(long, env = "EXCLUSIVE_GPUS", hide_env_values = true)]
    pub exclusive_gpus: Option<String>,
    /// Memory of each shared GPU that is kept back for its MPS server [default: 512Mi].
    #[arg(long, env = "MPS_SERVER_MEMORY", hide_env_values = true)]
    pub mps_server_memory: Option<String>,
    /// MPS client processes that a share may have; a GPU has 48 [default: 3].
    #[arg(long, env = "PROCESSES_PER_SHARE", hide_env_values = true)]
    pub processes_per_share: Option<String>,
    /// What a request gets that names no capacity: whole (the whole GPU), or nothing (no memory is counted
    /// and nothing is enforced, as with NVIDIA's driver) [default: whole].
    #[arg(long, env = "UNASKED", hide_env_values = true)]
    pub unasked: Option<String>,
}

/// How the memory of claims is watched.
#[derive(Debug, Clone, Default, Args)]
pub struct WatchdogArgs {
    /// What is done about a claim that is over its grant: terminate, observe or off [default: terminate].
    #[arg(long, env = "WATCHDOG", hide_env_values = true)]
    pub watchdog: Option<String>,
    /// How often shared GPUs are looked at; where none is shared, GPUs in use are 20 times rarer [default: 250ms].
    #[arg(long, env = "WATCHDOG_PERIOD", hide_env_values = true)]
    pub watchdog_period: Option<String>,
    /// How far over its grant a claim is left alone [default: 64Mi].
    #[arg(long, env = "WATCHDOG_GRACE", hide_env_values = true)]
    pub watchdog_grace: Option<String>,
    /// Whose process numbers NVML tells: host, or own (simulated GPUs in a PID namespace) [default: host].
    #[arg(long, env = "WATCHDOG_PIDS", hide_env_values = true)]
    pub watchdog_pids: Option<String>,
}

/// Where NVIDIA's driver is, as this process sees it and as the host does.
#[derive(Debug, Clone, Default, Args)]
pub struct RootArgs {
    /// Root of the driver's files as this process sees it [default: /driver-root].
    #[arg(long, env = "DRIVER_ROOT", hide_env_values = true)]
    pub driver_root: Option<String>,
    /// The same directory's path on the host: it is what CDI files name [default: /].
    #[arg(long, env = "DRIVER_ROOT_ON_HOST", hide_env_values = true)]
    pub driver_root_on_host: Option<String>,
    /// Directory of the device nodes as this process sees it [default: <driver-root>/dev if
    /// nvidiactl is there, else /dev].
    #[arg(long, env = "DEV_ROOT", hide_env_values = true)]
    pub dev_root: Option<String>,
}

/// Directories of kubelet, the container runtime and the kernel.
#[derive(Debug, Clone, Default, Args)]
pub struct HostArgs {
    /// Kubelet's directory: sockets are found below it [default: /var/lib/kubelet].
    #[arg(long, env = "KUBELET_DIR", hide_env_values = true)]
    pub kubelet_dir: Option<String>,
    /// Where the container runtime reads CDI files [default: /var/run/cdi].
    #[arg(long, env = "CDI_DIR", hide_env_values = true)]
    pub cdi_dir: Option<String>,
    /// Where the ledger is kept [default: <kubelet-dir>/plugins/gpu.nvidia.com].
    #[arg(long, env = "STATE_DIR", hide_env_values = true)]
    pub state_dir: Option<String>,
    /// Folder of `tranche mps`, here and on the host [default: /run/tranche/mps].
    #[arg(long, env = "MPS_DIR", hide_env_values = true)]
    pub mps_dir: Option<String>,
    /// File with the kernel's boot id [default: /proc/sys/kernel/random/boot_id].
    #[arg(long, env = "BOOT_ID_FILE", hide_env_values = true)]
    pub boot_id_file: Option<String>,
    /// The host's /sys as this process sees it [default: /sys].
    #[arg(long, env = "SYSFS_ROOT", hide_env_values = true)]
    pub sysfs_root: Option<String>,
    /// Where the driver's kernel modules tell of themselves [default: /proc].
    #[arg(long, env = "PROC_ROOT", hide_env_values = true)]
    pub proc_root: Option<String>,
    /// Where the host's processes are shown; needs the host's PID namespace [default: /proc].
    #[arg(long, env = "PROCESS_ROOT", hide_env_values = true)]
    pub process_root: Option<String>,
}
