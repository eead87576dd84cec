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
    /// Format of log lines: json or text [default: text].
    #[arg(long, env = "TRANCHE_LOG_FORMAT", global = true, hide_env_values = true)]
    pub log_format: Option<String>,
    /// What is logged, e.g. debug, or info,tranche::node=debug [default: info,kube_client=off].
    #[arg(long, env = "TRANCHE_LOG_LEVEL", global = true, hide_env_values = true)]
    pub log_level: Option<String>,
}

/// Where the process can be asked.
#[derive(Debug, Clone, Default, Args)]
pub struct OpsArgs {
    /// Where metrics and health are served; port 0 takes any [default: 0.0.0.0:8080].
    #[arg(long, env = "TRANCHE_OPS_ADDRESS", hide_env_values = true)]
    pub ops_address: Option<String>,
    /// Where health alone is served, for kubelet's probes; port 0 takes any [default: the port after --ops-address].
    #[arg(long, env = "TRANCHE_HEALTH_ADDRESS", hide_env_values = true)]
    pub health_address: Option<String>,
    /// Unix socket on which the state and the log level are served to this user alone; off serves them nowhere
    /// [default: /run/tranche-ops/private/ops.sock].
    #[arg(long, env = "TRANCHE_OPS_SOCKET", hide_env_values = true)]
    pub ops_socket: Option<String>,
}

/// How to run the node plugin.
#[derive(Debug, Clone, Default, Args)]
pub struct NodeArgs {
    /// Name of the Node object that this process runs on (required).
    #[arg(long, env = "NODE_NAME", hide_env_values = true)]
    pub node_name: Option<String>,
    /// UID of this process's own pod, by which kubelet tells an old plugin from a new one during an update.
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
    #[arg(long, env = "TRANCHE_DISCOVERY_INTERVAL", hide_env_values = true)]
    pub discovery_interval: Option<String>,
    /// How often to compare ledger, CDI files and claims [default: 60s].
    #[arg(long, env = "TRANCHE_SWEEP_INTERVAL", hide_env_values = true)]
    pub sweep_interval: Option<String>,
    #[command(flatten)]
    pub sharing: SharingArgs,
    #[command(flatten)]
    pub watchdog: WatchdogArgs,
    /// What is done while a process of a pod has a whole GPU or MIG device open and no claim on it: withhold (no claim gets
    /// the device), warn or off [default: withhold].
    #[arg(long, env = "TRANCHE_OPEN_DESCRIPTORS", hide_env_values = true)]
    pub open_descriptors: Option<String>,
    /// Whether the metrics of claims are served under the names of NVIDIA's DCGM exporter as well, at /metrics/dcgm: on
    /// or off [default: off].
    #[arg(long, env = "TRANCHE_DCGM_METRICS", hide_env_values = true)]
    pub dcgm_metrics: Option<String>,
    /// Whether the node gets the labels nvidia.com/gpu.product, .count, .memory and .present: on, off, or remove, which
    /// takes those away that this program has set [default: off].
    #[arg(long, env = "TRANCHE_NODE_LABELS", hide_env_values = true)]
    pub node_labels: Option<String>,
    /// GPUs whose MIG devices are made for the claims that get them and end with these, while the GPUs are in MIG mode,
    /// separated by commas: all, minor numbers, UUIDs, or parts of a product's name. kube-scheduler places them from
    /// Kubernetes 1.36 on, the controller from 1.34 on [default: none].
    #[arg(long, env = "TRANCHE_MIG_ON_DEMAND", hide_env_values = true)]
    pub mig_on_demand: Option<String>,
    /// Switch MIG mode on and off by itself on those GPUs, from Hopper on: on when the first MIG device is made for a claim,
    /// off when a claim gets the whole GPU, or once no MIG device has been there for so long, such as 10m [default: none].
    #[arg(long, env = "TRANCHE_MIG_KEEP", hide_env_values = true)]
    pub mig_keep: Option<String>,
}

/// How to supervise MPS daemons.
#[derive(Debug, Clone, Default, Args)]
pub struct MpsArgs {
    /// Folder of the socket and the daemons, here and on the host [default: /run/tranche/mps].
    #[arg(long, env = "TRANCHE_MPS_DIR", hide_env_values = true)]
    pub mps_dir: Option<String>,
    /// Root of the driver's files as this process sees it [default: /driver-root].
    #[arg(long, env = "TRANCHE_DRIVER_ROOT", hide_env_values = true)]
    pub driver_root: Option<String>,
    /// Directories of the driver's libraries below the driver root, separated by commas, where they are not in one of the
    /// usual ones [default: none].
    #[arg(long, env = "TRANCHE_DRIVER_LIBRARY_DIRS", hide_env_values = true)]
    pub driver_library_dirs: Option<String>,
    /// The program nvidia-cuda-mps-control, as this process sees it [default: looked for below the driver
    /// root].
    #[arg(long, env = "TRANCHE_MPS_CONTROL", hide_env_values = true)]
    pub mps_control: Option<String>,
    /// The host's /sys as this process sees it [default: /sys].
    #[arg(long, env = "TRANCHE_SYSFS_ROOT", hide_env_values = true)]
    pub sysfs_root: Option<String>,
    /// The host's control groups as this process sees them [default: /sys/fs/cgroup].
    #[arg(long, env = "TRANCHE_CGROUP_ROOT", hide_env_values = true)]
    pub cgroup_root: Option<String>,
    #[command(flatten)]
    pub ops: OpsArgs,
    /// How long a daemon that no claim needs is kept [default: 10m].
    #[arg(long, env = "TRANCHE_KEEP_WARM", hide_env_values = true)]
    pub keep_warm: Option<String>,
    /// How often daemons are checked [default: 2s].
    #[arg(long, env = "TRANCHE_CHECK_INTERVAL", hide_env_values = true)]
    pub check_interval: Option<String>,
    /// Whether each daemon gets a small file system and mounts of its own: own, or none where mounting is not
    /// permitted [default: own].
    #[arg(long, env = "TRANCHE_MPS_MOUNTS", hide_env_values = true)]
    pub mps_mounts: Option<String>,
    /// How much all shares of a GPU together may put into their common /dev/shm, such as 16Gi; half is half of the
    /// node's memory [default: half].
    #[arg(long, env = "TRANCHE_SHM_SIZE", hide_env_values = true)]
    pub shm_size: Option<String>,
    /// How many files and folders they may have there together, 1024 to 1048576 [default: 8192].
    #[arg(long, env = "TRANCHE_SHM_FILES", hide_env_values = true)]
    pub shm_files: Option<String>,
}

/// How to place claims over the cluster.
#[derive(Debug, Clone, Default, Args)]
pub struct ControllerArgs {
    /// Name of this process's own pod, which holds the lease (required).
    #[arg(long, env = "POD_NAME", hide_env_values = true)]
    pub pod_name: Option<String>,
    /// Namespace of the lease and of the claims that hold GPUs (required).
    #[arg(long, env = "POD_NAMESPACE", hide_env_values = true)]
    pub pod_namespace: Option<String>,
    /// The Deployment that this process belongs to; deleting the Deployment gives all held GPUs back [default: none].
    #[arg(long, env = "TRANCHE_DEPLOYMENT", hide_env_values = true)]
    pub deployment: Option<String>,
    /// Name of the lease [default: tranche-controller].
    #[arg(long, env = "TRANCHE_LEASE_NAME", hide_env_values = true)]
    pub lease_name: Option<String>,
    /// How long the leader may fail to renew the lease before another controller takes over; at least 5s
    /// [default: 10s].
    #[arg(long, env = "TRANCHE_LEASE_DURATION", hide_env_values = true)]
    pub lease_duration: Option<String>,
    #[command(flatten)]
    pub ops: OpsArgs,
    /// Kubeconfig to use instead of the pod's service account.
    #[arg(long, env = "KUBECONFIG", hide_env_values = true)]
    pub kubeconfig: Option<String>,
    /// How GPUs are chosen unless a claim says otherwise: pack, spread or fragmentation [default: pack].
    #[arg(long, env = "TRANCHE_POLICY", hide_env_values = true)]
    pub policy: Option<String>,
    #[command(flatten)]
    pub holds: HoldArgs,
    /// Publish slices that no node has, by which queues such as Kueue count shares: true or false [default: false].
    #[arg(long, env = "TRANCHE_MIRROR_SLICES", hide_env_values = true)]
    pub mirror_slices: Option<String>,
    /// What makes pods of a template at spec.template, and gets a ResourceClaimTemplate where the webhook has named one,
    /// separated by commas; none: nothing [default: batch/v1/jobs/Job].
    #[arg(long, env = "TRANCHE_POD_TEMPLATES", hide_env_values = true)]
    pub pod_templates: Option<String>,
    #[command(flatten)]
    pub kai: KaiArgs,
    #[command(flatten)]
    pub webhook: WebhookArgs,
    /// How many pods that are not more urgent may overtake a waiting pod before room is kept for it [default: 32].
    #[arg(long, alias = "passes", env = "TRANCHE_MAX_OVERTAKES", hide_env_values = true)]
    pub max_overtakes: Option<String>,
    /// How long such pods may overtake it before room is kept for it [default: 60s].
    #[arg(long, alias = "patience", env = "TRANCHE_STARVATION_TIMEOUT", hide_env_values = true)]
    pub starvation_timeout: Option<String>,
    /// How long room is kept for it at a time: it is kept again while shares in its way end, up to five times, and
    /// others are placed there in between [default: 60s].
    #[arg(long, alias = "keep", env = "TRANCHE_RESERVATION_DURATION", hide_env_values = true)]
    pub reservation_duration: Option<String>,
    /// Schedulers that put every pod into a PodGroup, separated by commas, or none. For pods of theirs nothing is placed
    /// before their PodGroup says how many start together [default: volcano,kai-scheduler].
    #[arg(long, env = "TRANCHE_GROUPING_SCHEDULERS", hide_env_values = true)]
    pub grouping_schedulers: Option<String>,
    /// Whether pods of lower priority end for pods of higher priority whose shares find no room [default: true].
    #[arg(long, env = "TRANCHE_PREEMPTION", hide_env_values = true)]
    pub preemption: Option<String>,
    #[command(flatten)]
    pub moves: MoveArgs,
}

/// The claims of pods with KAI's annotations. A queue such as Kueue counts a class in one unit: MiB, or thousandths.
#[derive(Debug, Clone, Default, Args)]
pub struct KaiArgs {
    /// DeviceClass of the claims that gpu-memory asks for: one that the controller places [default:
    /// shared.gpu.nvidia.com].
    #[arg(long, value_name = "CLASS", env = "TRANCHE_KAI_MEMORY_CLASS", hide_env_values = true)]
    pub kai_memory_class: Option<String>,
    /// The same of gpu-fraction.
    #[arg(long, value_name = "CLASS", env = "TRANCHE_KAI_FRACTION_CLASS", hide_env_values = true)]
    pub kai_fraction_class: Option<String>,
}

/// What is done about room that moves of other pods would make.
#[derive(Debug, Clone, Default, Args)]
pub struct MoveArgs {
    /// Room that would be there if other pods moved: off, propose (tell who waits which pods) or auto (evict those that are
    /// marked with tranche.dev/movable, if there is room for them elsewhere) [default: propose].
    #[arg(long, env = "TRANCHE_CONSOLIDATION", hide_env_values = true)]
    pub consolidation: Option<String>,
    /// How many pods may be moved in an hour [default: 30].
    #[arg(long, env = "TRANCHE_MOVES_PER_HOUR", hide_env_values = true)]
    pub moves_per_hour: Option<String>,
    /// How long no other pod of the same owner is moved, and none for a pod that got nothing by it [default: 10m].
    #[arg(long, env = "TRANCHE_MOVE_REST", hide_env_values = true)]
    pub move_rest: Option<String>,
}

/// How the controller takes GPUs and gives them back.
#[derive(Debug, Clone, Default, Args)]
pub struct HoldArgs {
    /// How long to wait between taking a GPU and placing its first share while there are claims or pods to which the
    /// scheduler may be giving that GPU; otherwise 200ms, or this if it is less [default: 2s].
    #[arg(long, alias = "settle", env = "TRANCHE_HOLD_SETTLE_DURATION", hide_env_values = true)]
    pub hold_settle_duration: Option<String>,
    /// How long a GPU is kept after its last share [default: 60s].
    #[arg(long, env = "TRANCHE_KEEP_WARM", hide_env_values = true)]
    pub keep_warm: Option<String>,
    /// How many GPUs are held before a share needs them [default: 0].
    #[arg(long, env = "TRANCHE_HOLD_AHEAD", hide_env_values = true)]
    pub hold_ahead: Option<String>,
    /// GPUs that are never held, separated by commas: nodes' names, UUIDs, or parts of a product's name
    /// [default: none].
    #[arg(long, env = "TRANCHE_NEVER_HOLD", hide_env_values = true)]
    pub never_hold: Option<String>,
    /// GPUs that are always held, named in the same way [default: none].
    #[arg(long, env = "TRANCHE_ALWAYS_HOLD", hide_env_values = true)]
    pub always_hold: Option<String>,
}

/// Which GPUs are shared, and how they are counted.
#[derive(Debug, Clone, Default, Args)]
pub struct SharingArgs {
    /// GPUs that are never shared, separated by commas: all, minor numbers, UUIDs, or parts of a product's name
    /// [default: none].
    #[arg(long, env = "TRANCHE_EXCLUSIVE_GPUS", hide_env_values = true)]
    pub exclusive_gpus: Option<String>,
    /// Memory of each shared GPU that is kept back for its MPS server [default: 512Mi].
    #[arg(long, env = "TRANCHE_MPS_SERVER_MEMORY", hide_env_values = true)]
    pub mps_server_memory: Option<String>,
    /// MPS client processes that a share may have; a GPU has 48 [default: 3].
    #[arg(long, env = "TRANCHE_PROCESSES_PER_SHARE", hide_env_values = true)]
    pub processes_per_share: Option<String>,
    /// What a request without capacity gets: whole (the whole GPU), or nothing (no memory is counted and nothing is
    /// enforced, as with NVIDIA's driver) [default: whole].
    #[arg(long, alias = "unasked", env = "TRANCHE_DEFAULT_REQUEST", hide_env_values = true)]
    pub default_request: Option<String>,
    /// Whose memory the programs of a share find at /dev/shm: container (their own), gpu (one for all shares of a GPU),
    /// or by-driver (container from driver 580 on, which does not use it for MPS; else gpu) [default: by-driver].
    #[arg(long, env = "TRANCHE_SHM", hide_env_values = true)]
    pub shm: Option<String>,
    /// Whom an MPS daemon serves: gpu (all shares of its GPU: their programs run at the same time and fall together) or
    /// share (one claim: the GPU takes turns, and what ends one share's programs leaves the others alone) [default: gpu].
    #[arg(long, env = "TRANCHE_MPS_DAEMON", hide_env_values = true)]
    pub mps_daemon: Option<String>,
}

/// How the memory of claims is watched.
#[derive(Debug, Clone, Default, Args)]
pub struct WatchdogArgs {
    /// What is done about a claim that exceeds its grant: terminate, observe or off [default: terminate].
    #[arg(long, env = "TRANCHE_WATCHDOG", hide_env_values = true)]
    pub watchdog: Option<String>,
    /// How often shared GPUs are checked; where none is shared, GPUs in use are checked 20 times less often
    /// [default: 250ms].
    #[arg(long, env = "TRANCHE_WATCHDOG_PERIOD", hide_env_values = true)]
    pub watchdog_period: Option<String>,
    /// How far a claim may exceed its grant before anything is done [default: 64Mi].
    #[arg(long, env = "TRANCHE_WATCHDOG_GRACE", hide_env_values = true)]
    pub watchdog_grace: Option<String>,
    /// Whose process numbers NVML reports: host, or own (simulated GPUs in a PID namespace) [default: host].
    #[arg(long, env = "TRANCHE_WATCHDOG_PIDS", hide_env_values = true)]
    pub watchdog_pids: Option<String>,
}

/// Where NVIDIA's driver is, as this process sees it and as the host does.
#[derive(Debug, Clone, Default, Args)]
pub struct RootArgs {
    /// Root of the driver's files as this process sees it [default: /driver-root].
    #[arg(long, env = "TRANCHE_DRIVER_ROOT", hide_env_values = true)]
    pub driver_root: Option<String>,
    /// The same directory's path on the host: it is what CDI files name [default: /].
    #[arg(long, env = "TRANCHE_DRIVER_ROOT_ON_HOST", hide_env_values = true)]
    pub driver_root_on_host: Option<String>,
    /// Directories of the driver's libraries below the driver root, separated by commas, where they are not in one of the
    /// usual ones [default: none].
    #[arg(long, env = "TRANCHE_DRIVER_LIBRARY_DIRS", hide_env_values = true)]
    pub driver_library_dirs: Option<String>,
    /// The host's root as this process sees it, to look for NVIDIA's container toolkit in, where the driver root is
    /// another [default: none].
    #[arg(long, env = "TRANCHE_TOOLKIT_ROOT", hide_env_values = true)]
    pub toolkit_root: Option<String>,
    /// The folder of NVIDIA's container toolkit on the host, below the toolkit root, or else below the driver root; it is
    /// looked at first [default: none].
    #[arg(long, env = "TRANCHE_TOOLKIT_DIR", hide_env_values = true)]
    pub toolkit_dir: Option<String>,
    /// Directory of the device nodes as this process sees it [default: <driver-root>/dev if
    /// nvidiactl is there, else /dev].
    #[arg(long, env = "TRANCHE_DEV_ROOT", hide_env_values = true)]
    pub dev_root: Option<String>,
}

/// Directories of kubelet, the container runtime and the kernel.
#[derive(Debug, Clone, Default, Args)]
pub struct HostArgs {
    /// Kubelet's directory: sockets are found below it [default: /var/lib/kubelet].
    #[arg(long, env = "TRANCHE_KUBELET_DIR", hide_env_values = true)]
    pub kubelet_dir: Option<String>,
    /// Where the container runtime reads CDI files [default: /var/run/cdi].
    #[arg(long, env = "TRANCHE_CDI_DIR", hide_env_values = true)]
    pub cdi_dir: Option<String>,
    /// Where the ledger is kept [default: <kubelet-dir>/plugins/gpu.nvidia.com].
    #[arg(long, env = "TRANCHE_STATE_DIR", hide_env_values = true)]
    pub state_dir: Option<String>,
    /// Folder of `tranche mps`, here and on the host [default: /run/tranche/mps].
    #[arg(long, env = "TRANCHE_MPS_DIR", hide_env_values = true)]
    pub mps_dir: Option<String>,
    /// File with the kernel's boot id [default: /proc/sys/kernel/random/boot_id].
    #[arg(long, env = "TRANCHE_BOOT_ID_FILE", hide_env_values = true)]
    pub boot_id_file: Option<String>,
    /// The host's /sys as this process sees it [default: /sys].
    #[arg(long, env = "TRANCHE_SYSFS_ROOT", hide_env_values = true)]
    pub sysfs_root: Option<String>,
    /// Where the driver's kernel modules show their state [default: /proc].
    #[arg(long, env = "TRANCHE_PROC_ROOT", hide_env_values = true)]
    pub proc_root: Option<String>,
    /// Where the host's processes are listed; needs the host's PID namespace [default: /proc].
    #[arg(long, env = "TRANCHE_PROCESS_ROOT", hide_env_values = true)]
    pub process_root: Option<String>,
}
