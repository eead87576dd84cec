//! From what was typed to what it means. Everything that is wrong is told at once.

mod controller;
#[cfg(test)]
mod defaults;
mod webhook;

use std::fmt;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::daemon::{DaemonMounts, shm};
use crate::host::PidNamespace;
use crate::model::driver::DriverPlace;
use crate::model::names::{DRIVER, NodeName};
use crate::model::quantity::{Bytes, Quantity};
use crate::model::share::DaemonScope;
use crate::mps::config::{MpsSettings, Timing};
use crate::node::config::{
    HostPaths, NodeLabels, NodeSettings, OpenDescriptors, OwnPod, Roots, Watchdog, WatchdogAction,
};
use crate::ops::addresses::{Addresses, SOCKET};
use crate::ops::logs::{self, Format};
use crate::sharing::{CLIENT_SLOTS, DefaultRequest, GpuSelector, SharingPolicy, ShmScope};

pub use webhook::log_and_webhook;

use super::args::{
    ControllerArgs, HostArgs, LogArgs, MpsArgs, NodeArgs, OpsArgs, RootArgs, SharingArgs, WatchdogArgs,
};
use super::variables;

pub use controller::{ControllerProcess, controller};

const DRIVER_ROOT: &str = "/driver-root";
const MPS_DIR: &str = "/run/tranche/mps";
/// What container runtimes give a container as /dev/shm.
const SHM_SIZE_MIN: Bytes = Bytes::from_mib(64);
/// Fewer are soon used up; a million take some 800 MiB of the kernel's memory.
const SHM_FILES: std::ops::RangeInclusive<u64> = 1024..=1 << 20;
/// Whatever became of its file.
const THIS_PROGRAM: &str = "/proc/self/exe";
const OPS_ADDRESS: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::UNSPECIFIED), 8080);
/// The client library tells each failed call as an error of its own; ours tells it once, with what follows.
const DEFAULT_FILTER: &str = "info,kube_client=off";
const INTERVAL: Duration = Duration::from_secs(60);
/// A crossing is seen within a second even if one look is missed.
const WATCHDOG_PERIOD: Duration = Duration::from_millis(250);
const WATCHDOG_GRACE: Bytes = Bytes::from_mib(64);
/// Below it the loops would do little else.
const INTERVAL_MIN: Duration = Duration::from_millis(100);
const INTERVAL_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// How to log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogSettings {
    pub format: Format,
    /// A filter that [`logs::init`] takes.
    pub filter: String,
}

/// Everything that is wrong with the flags, with what to do about each.
#[derive(Debug, PartialEq, Eq)]
pub struct BadSettings(Vec<Mistake>);

#[derive(Debug, PartialEq, Eq)]
struct Mistake {
    flag: &'static str,
    words: String,
}

impl std::error::Error for BadSettings {}

impl fmt::Display for BadSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(mistakes) = self;
        write!(f, "the settings cannot be used, {} to change:", mistakes.len())?;
        for Mistake { flag, words } in mistakes {
            write!(f, "\n  {flag} (or {}): {words}", variables::of_flag(flag))?;
        }
        Ok(())
    }
}

/// # Errors
/// Every mistake in the flags.
pub fn log(args: LogArgs) -> Result<LogSettings, BadSettings> {
    let LogArgs { log_format, log_level } = args;
    let mut reader = Reader::default();
    let settings = LogSettings {
        format: reader.parsed("--log-format", log_format, Format::Text, format),
        filter: reader.parsed("--log-level", log_level, DEFAULT_FILTER.to_owned(), |filter| {
            logs::check(filter).map(|()| filter.to_owned()).map_err(|error| error.to_string())
        }),
    };
    reader.finish(settings)
}

/// Both at once, so that a mistake in one does not hide those in the other.
///
/// # Errors
/// Every mistake in the flags.
pub fn log_and_node(log_args: LogArgs, args: NodeArgs) -> Result<(LogSettings, NodeSettings), BadSettings> {
    both(log(log_args), node(args))
}

/// As [`log_and_node`].
///
/// # Errors
/// Every mistake in the flags.
pub fn log_and_mps(log_args: LogArgs, args: MpsArgs) -> Result<(LogSettings, MpsSettings), BadSettings> {
    both(log(log_args), mps(args))
}

/// As [`log_and_node`].
///
/// # Errors
/// Every mistake in the flags.
pub fn log_and_controller(
    log_args: LogArgs,
    args: ControllerArgs,
) -> Result<(LogSettings, ControllerProcess), BadSettings> {
    both(log(log_args), controller(args))
}

fn both<A, B>(a: Result<A, BadSettings>, b: Result<B, BadSettings>) -> Result<(A, B), BadSettings> {
    match (a, b) {
        (Ok(a), Ok(b)) => Ok((a, b)),
        (Err(mistakes), Ok(_)) | (Ok(_), Err(mistakes)) => Err(mistakes),
        (Err(BadSettings(mut all)), Err(BadSettings(more))) => {
            all.extend(more);
            Err(BadSettings(all))
        }
    }
}

/// # Errors
/// Every mistake in the flags.
pub fn mps(args: MpsArgs) -> Result<MpsSettings, BadSettings> {
    let MpsArgs {
        mps_dir,
        driver_root,
        driver_library_dirs,
        mps_control,
        sysfs_root,
        cgroup_root,
        ops,
        keep_warm,
        check_interval,
        mps_mounts,
        shm_size,
        shm_files,
    } = args;
    let mut reader = Reader::default();
    let usual = Timing::DEFAULT;
    let settings = MpsSettings {
        folder: reader.path("--mps-dir", mps_dir, MPS_DIR),
        driver: reader.driver(driver_root, driver_library_dirs),
        control: given(mps_control).map(|path| reader.path("--mps-control", Some(path), "")),
        launcher: THIS_PROGRAM.into(),
        mounts: reader.parsed("--mps-mounts", mps_mounts, DaemonMounts::Own, daemon_mounts),
        shm: shm::Bounds {
            size: reader.parsed("--shm-size", shm_size, shm::Bounds::DEFAULT.size, shm_size_of),
            files: reader.parsed("--shm-files", shm_files, shm::Bounds::DEFAULT.files, shm_files_of),
        },
        sysfs_root: reader.path("--sysfs-root", sysfs_root, "/sys"),
        cgroup_root: reader.path("--cgroup-root", cgroup_root, "/sys/fs/cgroup"),
        ops_address: reader.ops(ops),
        timing: Timing {
            keep_warm: reader.parsed("--keep-warm", keep_warm, usual.keep_warm, interval),
            check_interval: reader.parsed("--check-interval", check_interval, usual.check_interval, interval),
            ..usual
        },
    };
    reader.finish(settings)
}

/// # Errors
/// Every mistake in the flags.
pub fn node(args: NodeArgs) -> Result<NodeSettings, BadSettings> {
    let NodeArgs {
        node_name,
        pod_uid,
        pod_name,
        pod_namespace,
        roots,
        host,
        ops,
        kubeconfig,
        discovery_interval,
        sweep_interval,
        sharing,
        watchdog,
        open_descriptors,
        dcgm_metrics,
        node_labels,
        mig_on_demand,
        mig_keep,
    } = args;
    let mut reader = Reader::default();
    let settings = NodeSettings {
        node_name: reader.node_name(node_name),
        pod_uid: given(pod_uid),
        pod: reader.pod(given(pod_namespace), given(pod_name)),
        roots: reader.roots(roots),
        host: reader.host_paths(host),
        ops_address: reader.ops(ops),
        kubeconfig: given(kubeconfig).map(|path| reader.path("--kubeconfig", Some(path), "")),
        discovery_interval: reader.parsed("--discovery-interval", discovery_interval, INTERVAL, interval),
        sweep_interval: reader.parsed("--sweep-interval", sweep_interval, INTERVAL, interval),
        sharing: reader.sharing(sharing),
        watchdog: reader.watchdog(watchdog),
        open_descriptors: reader.parsed(
            "--open-descriptors",
            open_descriptors,
            OpenDescriptors::default(),
            descriptors,
        ),
        dcgm_metrics: reader.parsed("--dcgm-metrics", dcgm_metrics, false, on_or_off),
        labels: reader.parsed("--node-labels", node_labels, NodeLabels::Off, labels),
        mig_on_demand: reader.parsed("--mig-on-demand", mig_on_demand, Vec::new(), selectors),
        mig_keep: reader.parsed("--mig-keep", mig_keep, None, |text| interval(text).map(Some)),
    };
    reader.finish(settings)
}

/// Reads on after a mistake, so that all of them are found.
#[derive(Debug, Default)]
struct Reader(Vec<Mistake>);

impl Reader {
    fn finish<T>(self, settings: T) -> Result<T, BadSettings> {
        match self.0.is_empty() {
            true => Ok(settings),
            false => Err(BadSettings(self.0)),
        }
    }

    fn mistake(&mut self, flag: &'static str, words: impl Into<String>) {
        self.0.push(Mistake { flag, words: words.into() });
    }

    /// The value's meaning; the default if it was not given or is wrong.
    fn parsed<T>(
        &mut self,
        flag: &'static str,
        value: Option<String>,
        default: T,
        parse: impl Fn(&str) -> Result<T, String>,
    ) -> T {
        match given(value).map(|text| parse(&text)) {
            None => default,
            Some(Ok(meaning)) => meaning,
            Some(Err(words)) => {
                self.mistake(flag, words);
                default
            }
        }
    }

    fn path(&mut self, flag: &'static str, value: Option<String>, default: impl Into<PathBuf>) -> PathBuf {
        self.parsed(flag, value, default.into(), |text| match Path::new(text) {
            path if !path.is_absolute() => Err(format!("{text:?} is not absolute; start it with /")),
            path if path.components().any(|part| part.as_os_str() == "..") => {
                Err(format!("{text:?} contains ..; write the path without it"))
            }
            // Without a trailing or a double slash.
            path => Ok(path.components().collect()),
        })
    }

    fn ops(&mut self, args: OpsArgs) -> Addresses {
        let OpsArgs { ops_address, health_address, ops_socket } = args;
        let open = self.parsed("--ops-address", ops_address, OPS_ADDRESS, address);
        let usual = Addresses::from(open);
        let health = self.parsed("--health-address", health_address, usual.health, address);
        if health == open && open.port() != 0 {
            self.mistake(
                "--health-address",
                format!("{health} is the address of --ops-address, too; choose another port"),
            );
        }
        let socket = match given(ops_socket).as_deref() {
            Some("off") => None,
            path => Some(self.path("--ops-socket", path.map(str::to_owned), SOCKET)),
        };
        Addresses { open, health, socket }
    }

    fn node_name(&mut self, value: Option<String>) -> NodeName {
        const FLAG: &str = "--node-name";
        let name = given(value).unwrap_or_default();
        if name.is_empty() {
            self.mistake(FLAG, "is required; in a pod take it from spec.nodeName");
        } else if let Err(error) = NodeName::parse(&name) {
            self.mistake(FLAG, error.to_string());
        }
        NodeName::new(name)
    }

    fn pod(&mut self, namespace: Option<String>, name: Option<String>) -> Option<OwnPod> {
        match (namespace, name) {
            (Some(namespace), Some(name)) => Some(OwnPod { namespace, name }),
            (None, None) => None,
            (Some(_), None) => {
                self.mistake("--pod-name", "is missing although --pod-namespace is given; give both or none");
                None
            }
            (None, Some(_)) => {
                self.mistake("--pod-namespace", "is missing although --pod-name is given; give both or none");
                None
            }
        }
    }

    fn roots(&mut self, args: RootArgs) -> Roots {
        let RootArgs {
            driver_root,
            driver_root_on_host,
            driver_library_dirs,
            toolkit_root,
            toolkit_dir,
            dev_root,
        } = args;
        Roots {
            driver: self.driver(driver_root, driver_library_dirs),
            toolkit_root: given(toolkit_root).map(|path| self.path("--toolkit-root", Some(path), "")),
            toolkit_dir: given(toolkit_dir).map(|path| self.path("--toolkit-dir", Some(path), "")),
            driver_root_on_host: self.path("--driver-root-on-host", driver_root_on_host, "/"),
            dev_root: given(dev_root).map(|path| self.path("--dev-root", Some(path), "")),
        }
    }

    fn driver(&mut self, root: Option<String>, library_dirs: Option<String>) -> DriverPlace {
        let root = self.path("--driver-root", root, DRIVER_ROOT);
        let own = self.parsed("--driver-library-dirs", library_dirs, Vec::new(), folders_below);
        DriverPlace::new(root, own)
    }

    fn sharing(&mut self, args: SharingArgs) -> SharingPolicy {
        let SharingArgs {
            exclusive_gpus,
            mps_server_memory,
            processes_per_share,
            default_request,
            shm,
            mps_daemon,
        } = args;
        let usual = SharingPolicy::default();
        SharingPolicy {
            exclusive: self.parsed("--exclusive-gpus", exclusive_gpus, usual.exclusive, selectors),
            server_memory: self.parsed("--mps-server-memory", mps_server_memory, usual.server_memory, memory),
            slots_per_share: self.parsed(
                "--processes-per-share",
                processes_per_share,
                usual.slots_per_share,
                processes,
            ),
            default_request: self.parsed(
                "--default-request",
                default_request,
                usual.default_request,
                whole_or_nothing,
            ),
            shm: self.parsed("--shm", shm, usual.shm, shm_scope),
            daemon: self.parsed("--mps-daemon", mps_daemon, usual.daemon, daemon_scope),
        }
    }

    fn watchdog(&mut self, args: WatchdogArgs) -> Watchdog {
        let WatchdogArgs { watchdog, watchdog_period, watchdog_grace, watchdog_pids } = args;
        Watchdog {
            action: self.parsed("--watchdog", watchdog, WatchdogAction::Terminate, action),
            period: self.parsed("--watchdog-period", watchdog_period, WATCHDOG_PERIOD, interval),
            grace: self.parsed("--watchdog-grace", watchdog_grace, WATCHDOG_GRACE, memory),
            pids: self.parsed("--watchdog-pids", watchdog_pids, PidNamespace::Host, pids),
        }
    }

    fn host_paths(&mut self, args: HostArgs) -> HostPaths {
        let HostArgs {
            kubelet_dir,
            cdi_dir,
            state_dir,
            mps_dir,
            boot_id_file,
            sysfs_root,
            proc_root,
            process_root,
        } = args;
        let kubelet_dir = self.path("--kubelet-dir", kubelet_dir, "/var/lib/kubelet");
        HostPaths {
            state_dir: self.path("--state-dir", state_dir, kubelet_dir.join("plugins").join(DRIVER)),
            kubelet_dir,
            cdi_dir: self.path("--cdi-dir", cdi_dir, "/var/run/cdi"),
            mps_dir: self.path("--mps-dir", mps_dir, MPS_DIR),
            boot_id_file: self.path("--boot-id-file", boot_id_file, "/proc/sys/kernel/random/boot_id"),
            sysfs_root: self.path("--sysfs-root", sysfs_root, "/sys"),
            proc_root: self.path("--proc-root", proc_root, "/proc"),
            process_root: self.path("--process-root", process_root, "/proc"),
        }
    }
}

/// An empty value counts as none.
fn given(value: Option<String>) -> Option<String> {
    value.map(|text| text.trim().to_owned()).filter(|text| !text.is_empty())
}

fn on_or_off(text: &str) -> Result<bool, String> {
    match text {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err(format!("{text:?} is neither on nor off")),
    }
}

fn labels(text: &str) -> Result<NodeLabels, String> {
    match text {
        "on" => Ok(NodeLabels::On),
        "off" => Ok(NodeLabels::Off),
        "remove" => Ok(NodeLabels::Remove),
        _ => Err(format!("{text:?} is not known; write on, off or remove")),
    }
}

fn descriptors(text: &str) -> Result<OpenDescriptors, String> {
    match text {
        "withhold" => Ok(OpenDescriptors::Withhold),
        "warn" => Ok(OpenDescriptors::Warn),
        "off" => Ok(OpenDescriptors::Off),
        _ => Err(format!("{text:?} is not known; write withhold, warn or off")),
    }
}

fn format(text: &str) -> Result<Format, String> {
    match text {
        "json" => Ok(Format::Json),
        "text" => Ok(Format::Text),
        _ => Err(format!("{text:?} is not a valid log format; write json or text")),
    }
}

fn address(text: &str) -> Result<SocketAddr, String> {
    text.parse()
        .map_err(|_| format!("{text:?} is not a valid address; write one such as 0.0.0.0:8080 or [::]:8080"))
}

pub(super) fn interval(text: &str) -> Result<Duration, String> {
    let parsed = duration(text).ok_or_else(|| {
        format!(
            "{text:?} is not a valid duration; write a whole number and a unit (ms, s, m, h), such as 60s"
        )
    })?;
    match (INTERVAL_MIN..=INTERVAL_MAX).contains(&parsed) {
        true => Ok(parsed),
        false => Err(format!("{text:?} is out of range; write 100ms to 24h")),
    }
}

/// `60s`, `500ms`, `2m`, `1h30m`: what the chart's schema admits. No unit, a fraction or an overflow is none. By hand,
/// since jiff's friendly format refuses units that are out of order or come twice, and takes fractions and signs.
fn duration(text: &str) -> Option<Duration> {
    let mut rest = text;
    let mut sum = Duration::ZERO;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit())?;
        let (number, after) = rest.split_at(digits);
        let unit = after.find(|c: char| c.is_ascii_digit()).unwrap_or(after.len());
        let (unit, after) = after.split_at(unit);
        let number: u64 = number.parse().ok()?;
        let part = match unit {
            "ms" => Duration::from_millis(number),
            "s" => Duration::from_secs(number),
            "m" => Duration::from_secs(number.checked_mul(60)?),
            "h" => Duration::from_secs(number.checked_mul(3600)?),
            _ => return None,
        };
        sum = sum.checked_add(part)?;
        rest = after;
    }
    (!text.is_empty()).then_some(sum)
}

/// Separated by commas, each relative to the driver root; a slash at the beginning means the driver root as well.
fn folders_below(text: &str) -> Result<Vec<String>, String> {
    let folder = |part: &str| match Path::new(part).components().any(|part| part.as_os_str() == "..") {
        true => Err(format!("{part:?} contains ..; write the path below the driver root without it")),
        false => Ok(part.trim_matches('/').to_owned()),
    };
    let parts = text.split(',').map(str::trim).filter(|part| !part.is_empty());
    parts.map(folder).collect()
}

/// Separated by commas; none is none.
fn selectors(text: &str) -> Result<Vec<GpuSelector>, String> {
    match text.trim() {
        "" => Ok(Vec::new()),
        text => text.split(',').map(str::parse).collect(),
    }
}

fn memory(text: &str) -> Result<Bytes, String> {
    let quantity: Quantity = text.parse().map_err(|error| format!("{error}"))?;
    quantity.units_ceil().map(Bytes).ok_or_else(|| format!("{text:?} is not a valid amount of memory"))
}

fn processes(text: &str) -> Result<u32, String> {
    let most = CLIENT_SLOTS / 2;
    let parsed = text.parse().ok().filter(|count| (1..=most).contains(count));
    parsed.ok_or_else(|| format!("{text:?} is not a valid number of processes; write 1 to {most}"))
}

fn whole_or_nothing(text: &str) -> Result<DefaultRequest, String> {
    match text {
        "whole" => Ok(DefaultRequest::Whole),
        "nothing" => Ok(DefaultRequest::Nothing),
        _ => Err(format!("{text:?} is not known; write whole or nothing")),
    }
}

fn shm_scope(text: &str) -> Result<ShmScope, String> {
    match text {
        "by-driver" => Ok(ShmScope::ByDriver),
        "container" => Ok(ShmScope::Container),
        "gpu" => Ok(ShmScope::Gpu),
        _ => Err(format!("{text:?} is not known; write by-driver, container or gpu")),
    }
}

fn daemon_scope(text: &str) -> Result<DaemonScope, String> {
    let known = [DaemonScope::Gpu, DaemonScope::Share];
    let found = known.into_iter().find(|scope| scope.as_str() == text);
    found.ok_or_else(|| format!("{text:?} is not known; write gpu or share"))
}

fn action(text: &str) -> Result<WatchdogAction, String> {
    match text {
        "off" => Ok(WatchdogAction::Off),
        "observe" => Ok(WatchdogAction::Observe),
        "terminate" => Ok(WatchdogAction::Terminate),
        _ => Err(format!("{text:?} is not known; write terminate, observe or off")),
    }
}

/// `half` is none.
fn shm_size_of(text: &str) -> Result<Option<Bytes>, String> {
    if text == "half" {
        return Ok(None);
    }
    match memory(text)? {
        size if size >= SHM_SIZE_MIN => Ok(Some(size)),
        _ => Err(format!("{text:?} is less than the {} MiB that programs expect", SHM_SIZE_MIN.mib_floor())),
    }
}

fn shm_files_of(text: &str) -> Result<u64, String> {
    let parsed = text.parse().ok().filter(|count| SHM_FILES.contains(count));
    parsed.ok_or_else(|| {
        format!("{text:?} is not a valid number of files; write {} to {}", SHM_FILES.start(), SHM_FILES.end())
    })
}

fn daemon_mounts(text: &str) -> Result<DaemonMounts, String> {
    match text {
        "own" => Ok(DaemonMounts::Own),
        "none" => Ok(DaemonMounts::None),
        _ => Err(format!("{text:?} is not known; write own or none")),
    }
}

fn pids(text: &str) -> Result<PidNamespace, String> {
    match text {
        "host" => Ok(PidNamespace::Host),
        "own" => Ok(PidNamespace::Own),
        _ => Err(format!("{text:?} is not known; write host or own")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::config::DevRoot;

    fn named() -> NodeArgs {
        NodeArgs { node_name: Some("node-1.example".to_owned()), ..NodeArgs::default() }
    }

    #[test]
    fn a_node_name_is_enough() {
        let settings = node(named()).unwrap();
        assert_eq!(settings.node_name.as_str(), "node-1.example");
        assert_eq!(settings.host.state_dir, Path::new("/var/lib/kubelet/plugins/gpu.nvidia.com"));
        assert_eq!(
            settings.ops_address.to_string(),
            "0.0.0.0:8080, 0.0.0.0:8081, /run/tranche-ops/private/ops.sock"
        );
        assert_eq!(settings.discovery_interval, Duration::from_secs(60));
        assert_eq!(settings.kubeconfig, None);
    }

    #[test]
    fn the_state_follows_kubelets_directory_unless_it_is_given() {
        let mut args = named();
        args.host.kubelet_dir = Some("/data/kubelet/".to_owned());
        let paths = node(args.clone()).unwrap().host;
        assert_eq!(paths.kubelet_dir.as_os_str(), "/data/kubelet");
        assert_eq!(paths.state_dir, Path::new("/data/kubelet/plugins/gpu.nvidia.com"));
        args.host.state_dir = Some("/data/ledger".to_owned());
        assert_eq!(node(args).unwrap().host.state_dir, Path::new("/data/ledger"));
    }

    #[test]
    fn empty_values_mean_the_default() {
        let mut args = named();
        args.pod_uid = Some(String::new());
        args.kubeconfig = Some(" ".to_owned());
        args.roots.driver_root = Some(String::new());
        args.sweep_interval = Some(String::new());
        assert_eq!(node(args), node(named()));
    }

    #[test]
    fn library_directories_are_looked_at_below_the_driver_root_before_the_usual_ones() {
        let root = tempfile::tempdir().unwrap();
        for folder in ["opt/one", "two", "usr/lib64"] {
            std::fs::create_dir_all(root.path().join(folder)).unwrap();
        }
        let driver_root = Some(root.path().to_str().unwrap().to_owned());
        let of_node = |dirs: &str| {
            let mut args = named();
            args.roots.driver_root = driver_root.clone();
            args.roots.driver_library_dirs = Some(dirs.to_owned());
            node(args).map(|settings| settings.roots.driver)
        };
        let of_supervisor = |dirs: &str| {
            let driver_library_dirs = Some(dirs.to_owned());
            let args =
                MpsArgs { driver_root: driver_root.clone(), driver_library_dirs, ..MpsArgs::default() };
            mps(args).map(|settings| settings.driver)
        };
        // A slash at the beginning means the driver root, not the root of this process.
        for dirs in ["opt/one,two", "/opt/one,/two", " /opt/one/ ,, two/ ,"] {
            let place = of_node(dirs).unwrap();
            assert_eq!(place, DriverPlace::new(root.path(), vec!["opt/one".to_owned(), "two".to_owned()]));
            assert_eq!(of_supervisor(dirs).unwrap(), place, "{dirs}");
            let (libraries, _) = crate::host::driver_root::search_paths(&place);
            let below = ["opt/one", "two", "usr/lib64"].map(|folder| root.path().join(folder));
            assert_eq!(libraries[..3], below, "{dirs}");
        }
        for dirs in ["", " , "] {
            assert_eq!(of_node(dirs).unwrap(), DriverPlace::from(root.path()), "{dirs:?}");
        }
        for wrong in ["../two", "/opt/../../two", "two/.."] {
            let told = format!(
                "--driver-library-dirs (or TRANCHE_DRIVER_LIBRARY_DIRS): {wrong:?} contains ..; write the path below \
                 the driver root without it"
            );
            let dirs = format!("opt/one,{wrong}");
            let words =
                [of_node(&dirs), of_supervisor(&dirs)].map(|refused| refused.unwrap_err().to_string());
            assert!(words.iter().all(|words| words.contains(&told)), "{words:?}");
        }
        // Two points in a name lead nowhere else.
        assert_eq!(of_node("a..b").unwrap(), DriverPlace::new(root.path(), vec!["a..b".to_owned()]));
    }

    #[test]
    fn the_toolkits_root_and_folder_are_absolute_and_none_by_default() {
        let toolkit = |root: &str, folder: &str| {
            let mut args = named();
            (args.roots.toolkit_root, args.roots.toolkit_dir) =
                (Some(root.to_owned()), Some(folder.to_owned()));
            node(args).map(|settings| (settings.roots.toolkit_root, settings.roots.toolkit_dir))
        };
        let (root, folder) = (PathBuf::from("/toolkit-root"), PathBuf::from("/opt/toolkit"));
        assert_eq!(toolkit("/toolkit-root/", "/opt/toolkit").unwrap(), (Some(root), Some(folder)));
        assert_eq!(toolkit("", " ").unwrap(), (None, None));
        let words = toolkit("toolkit-root", "opt/toolkit").unwrap_err().to_string();
        for part in [
            "--toolkit-root (or TRANCHE_TOOLKIT_ROOT): \"toolkit-root\" is not absolute",
            "--toolkit-dir (or TRANCHE_TOOLKIT_DIR): \"opt/toolkit\" is not absolute",
        ] {
            assert!(words.contains(part), "{part} is missing from\n{words}");
        }
    }

    #[test]
    fn all_mistakes_are_told_at_once_with_flag_variable_and_advice() {
        let mut args = NodeArgs {
            ops: OpsArgs { ops_address: Some("localhost".to_owned()), ..OpsArgs::default() },
            sweep_interval: Some("60".to_owned()),
            pod_name: Some("tranche-node-x".to_owned()),
            ..NodeArgs::default()
        };
        args.host.cdi_dir = Some("var/run/cdi".to_owned());
        let words = node(args).unwrap_err().to_string();
        for part in [
            "5 to change",
            "--node-name (or NODE_NAME): is required",
            "--pod-namespace (or POD_NAMESPACE): is missing",
            "--cdi-dir (or TRANCHE_CDI_DIR): \"var/run/cdi\" is not absolute; start it with /",
            "--ops-address (or TRANCHE_OPS_ADDRESS): \"localhost\" is not a valid address; write one such as",
            "--sweep-interval (or TRANCHE_SWEEP_INTERVAL): \"60\" is not a valid duration",
        ] {
            assert!(words.contains(part), "{part} is missing from\n{words}");
        }
    }

    #[test]
    fn doors_follow_the_address_of_metrics_unless_they_are_given() {
        let doors = |open: &str, health: &str, socket: &str| {
            let [open, health, socket] = [open, health, socket].map(|text| Some(text.to_owned()));
            let ops = OpsArgs { ops_address: open, health_address: health, ops_socket: socket };
            node(NodeArgs { ops, ..named() }).map(|settings| settings.ops_address.to_string())
        };
        assert_eq!(doors("[::]:9000", "", "off").unwrap(), "[::]:9000, [::]:9001");
        assert_eq!(doors("", "[::]:7", "/run/x.sock").unwrap(), "0.0.0.0:8080, [::]:7, /run/x.sock");
        assert_eq!(doors("127.0.0.1:0", "", "off").unwrap(), "127.0.0.1:0, 127.0.0.1:0");
        let words = doors("0.0.0.0:8081", "0.0.0.0:8081", "x.sock").unwrap_err().to_string();
        assert!(
            words.contains("--health-address (or TRANCHE_HEALTH_ADDRESS): 0.0.0.0:8081 is the address of"),
            "{words}"
        );
        assert!(
            words.contains("--ops-socket (or TRANCHE_OPS_SOCKET): \"x.sock\" is not absolute"),
            "{words}"
        );
    }

    #[test]
    fn the_supervisor_needs_no_flag_and_tells_all_mistakes() {
        let settings = mps(MpsArgs::default()).unwrap();
        assert_eq!(settings.folder, node(named()).unwrap().host.mps_dir, "one folder for both");
        assert_eq!(settings.timing, Timing::DEFAULT);
        assert_eq!(settings.mounts, DaemonMounts::Own);
        assert_eq!(settings.shm, shm::Bounds::DEFAULT);
        let bounds = |size: &str, files: &str| {
            let (shm_size, shm_files) = (Some(size.to_owned()), Some(files.to_owned()));
            mps(MpsArgs { shm_size, shm_files, ..MpsArgs::default() })
        };
        let given = bounds("16Gi", "100000").unwrap().shm;
        assert_eq!(given, shm::Bounds { size: Some(Bytes::from_mib(16 << 10)), files: 100_000 });
        assert_eq!(bounds("half", "8192").unwrap().shm, shm::Bounds::DEFAULT);
        let words = bounds("1Mi", "10").unwrap_err().to_string();
        assert!(
            words.contains("64 MiB that programs expect") && words.contains("1024 to 1048576"),
            "{words}"
        );
        let bad = MpsArgs {
            keep_warm: Some("long".to_owned()),
            mps_control: Some("mps".to_owned()),
            mps_mounts: Some("yes".to_owned()),
            ..MpsArgs::default()
        };
        let words = mps(bad).unwrap_err().to_string();
        for part in
            ["3 to change", "--keep-warm (or TRANCHE_KEEP_WARM)", "--mps-control", "write own or none"]
        {
            assert!(words.contains(part), "{part} is missing from\n{words}");
        }
    }

    #[test]
    fn log_mistakes_are_told_at_once() {
        let args = LogArgs { log_format: Some("xml".to_owned()), log_level: Some("loud".to_owned()) };
        let words = log(args).unwrap_err().to_string();
        assert!(words.contains("write json or text") && words.contains("write a level"), "{words}");
    }

    #[test]
    fn durations_are_whole_numbers_with_units() {
        for (text, millis) in [("60s", 60_000), ("500ms", 500), ("2m", 120_000), ("1h30m", 5_400_000)] {
            assert_eq!(duration(text), Some(Duration::from_millis(millis)), "{text}");
        }
        for text in
            ["", "60", "s", "1.5s", "-1s", "1 s", "1d", "s60", "99999999999999999999s", "6000000000000000h"]
        {
            assert_eq!(duration(text), None, "{text}");
        }
        assert!(interval("0s").is_err() && interval("99ms").is_err() && interval("25h").is_err());
    }

    #[test]
    fn the_device_directory_is_found_here_and_on_the_host() {
        let roots = |dev_root: Option<&str>| Roots {
            driver: Path::new("/driver-root").into(),
            toolkit_root: None,
            toolkit_dir: None,
            driver_root_on_host: "/run/nvidia/driver".into(),
            dev_root: dev_root.map(PathBuf::from),
        };
        let pair = |dev: DevRoot| (dev.here.display().to_string(), dev.on_host.display().to_string());
        let with_nodes = |path: &Path| path == Path::new("/driver-root/dev/nvidiactl");
        for (given, exists, here, on_host) in [
            (None, true, "/driver-root/dev", "/run/nvidia/driver/dev"),
            (None, false, "/dev", "/dev"),
            (Some("/driver-root/other"), false, "/driver-root/other", "/run/nvidia/driver/other"),
            (Some("/dev"), true, "/dev", "/dev"),
        ] {
            let found = roots(given).dev_root(|path| exists && with_nodes(path));
            assert_eq!(pair(found), (here.to_owned(), on_host.to_owned()), "{given:?} {exists}");
        }
    }
}
