//! Starts every part of the node plugin, in the order in which they need each other.

use std::convert::Infallible;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use thiserror::Error;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::carver::{self, Carver};
use super::carving::{CarvedByClaims, carved_boards};
use super::config::{NodeLabels, NodeSettings, Roots, WatchdogAction};
use super::containers::{ContainerWatch, Containers};
use super::discovery::{Discovered, Discovery, LookTiming, watch_files};
use super::executor::Executor;
use super::failure_file::FailureFile;
use super::file_looks::FileLooks;
use super::holders::Holders;
use super::labels::LabelKeeper;
use super::lanes::Lanes;
use super::metrics::NodeMetrics;
use super::mig_mode::{self, MigModes};
use super::preparer::Preparer;
use super::publisher::{Publication, Publisher, PublisherLock, TryLock};
use super::reporter::{Reporter, Reporting};
use super::state::{self, StateSources};
use super::store::{Store, StoreError};
use super::watchdog::{self, ClaimMetrics, DcgmMetrics, LISTS_LIMIT, Watchdog};
use super::{daemon_reports, device_faults, findings, health, sweeper};
use crate::cluster::events::EventSubject;
use crate::cluster::{Cluster, ConnectError, Endpoint, KubeCluster, NodeCluster};
use crate::host::device_nodes::DevRoot;
use crate::host::driver_root::{DriverRoot, DriverRootCache, HookChoice, RootView};
use crate::host::{FileLock, LocalHost, LocalProcesses, Processes, boot};
use crate::inventory::{DeviceFaults, Inventory};
use crate::kubelet::{self, Health, PodResources, Registration};
use crate::ledger::Phase;
use crate::model::error_chain;
use crate::model::names::{DRIVER, PodUid, PoolName};
use crate::nvml::{MigCarver, Nvml, ProcessWatch, Settings};
use crate::ops::OpsError;
use crate::ops::drain::Signals;
use crate::ops::logs::LogControl;
use crate::ops::metrics::{self, Registry};
use crate::ops::readiness::{Readiness, Token};
use crate::ops::server::{Ops, StateDump};
use crate::ops::tasks::Tasks;
use crate::supervisor::Client;

/// What everything gets to end in peace: kubelet's own limit for a call is 45 s.
const DRAIN_LIMIT: Duration = Duration::from_secs(50);

/// Why the node plugin did not start, or ended.
#[derive(Debug, Error)]
pub enum NodeError {
    #[error("cannot make the folder {path}; is it mounted writable?")]
    Folder { path: PathBuf, source: io::Error },
    #[error("cannot read the boot id from {path}")]
    Boot { path: PathBuf, source: io::Error },
    #[error("the ledger cannot be opened")]
    Ledger(#[from] StoreError),
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error(transparent)]
    Kubelet(#[from] kubelet::Error),
    #[error(transparent)]
    Ops(#[from] OpsError),
}

/// Runs the node plugin until it is told to end.
///
/// # Errors
/// What kept it from starting, or the first part that failed.
pub async fn run(settings: NodeSettings, logs: LogControl) -> Result<(), NodeError> {
    info!(version = env!("CARGO_PKG_VERSION"), commit = env!("TRANCHE_COMMIT"), ?settings, "starting");
    let signals = Signals::catch()?;
    let stop = CancellationToken::new();
    let mut tasks = Tasks::new(stop.clone());
    let readiness = Readiness::default();
    let registered = readiness.wait_for("registration with kubelet");
    let looked = readiness.wait_for("first look at the GPUs");
    let mut registry = metrics::registry();
    let metrics = NodeMetrics::register(&mut registry);

    let ledger = open_ledger(&settings, &metrics)?;
    let api = Arc::new(connect(&settings).await?);
    let cluster: Arc<dyn Cluster> = api.clone();
    let discovered = discover(&settings, &ledger.executor, &mut tasks, looked);
    keep_labels(&settings, &api, &discovered, &mut registry, &mut tasks);
    let told = watch_device_faults(&settings, &ledger.executor, &discovered, &mut tasks);
    let (device_faults, daemons) = (told.device_faults.clone(), told.states.clone());
    let reporter = report(api, &ledger.executor, told, &mut tasks);
    let preparer = Arc::new(Preparer {
        cluster: cluster.clone(),
        inventory: discovered.inventory.clone(),
        lanes: ledger.lanes,
        executor: ledger.executor,
        lists: ProcessWatch::new(settings.roots.driver.clone(), LISTS_LIMIT),
        metrics: metrics.clone(),
        reporter: reporter.clone(),
    });
    let (sender, devices) = watch::channel(Vec::new());
    let (inventory, pool) = (discovered.inventory.clone(), preparer.executor.pool.clone());
    tasks.spawn("health", health::run(inventory, device_faults.clone(), pool, sender, stop.clone()));
    let registration = serve_kubelet(&settings, &preparer, devices, &mut tasks, registered).await?;
    let published = publish(&settings, cluster, &discovered, &device_faults, &mut tasks);
    tasks.spawn("sweeper", sweeper::run(preparer.clone(), settings.sweep_interval, stop.clone()));
    tasks.spawn("MIG modes", mig_mode::run(preparer.clone(), stop.clone()));
    let mut claims = ClaimMetrics::register(&mut registry);
    let mut dcgm = None;
    if settings.dcgm_metrics {
        let (rows, their_registry) = DcgmMetrics::new(settings.node_name.to_string());
        claims = claims.with_dcgm(rows);
        dcgm = Some(their_registry);
    }
    let containers = watch_containers(&settings, &preparer, &mut tasks);
    let (watchdog, found) = watchdog(&settings, &preparer, claims, containers);
    tasks.spawn("watchdog", watchdog.run(stop.clone()));
    tasks.spawn("findings", findings::run(found, reporter.clone(), stop.clone()));

    let node = settings.node_name.clone();
    let parts = StateSources {
        node,
        discovered,
        device_faults,
        published,
        registration,
        preparer,
        reporter,
        daemons,
    };
    let mut dump = StateDump::default();
    parts.describe(&mut dump);
    tasks.spawn("gauges", state::gauges(parts, metrics, stop.clone()));
    let ops = Ops { registry, dcgm, readiness, stop: stop.clone(), logs, state: dump };
    let ops = ops.bind(settings.ops_address).await?;
    info!(address = %ops.address(), "health, metrics and state are served");
    tasks.spawn("ops server", ops.serve(stop.clone()));
    Ok(tasks.run(signals, DRAIN_LIMIT).await?)
}

/// The loop that asks kubelet for the containers of claims; the watchdog's rows alone name them.
fn watch_containers(
    settings: &NodeSettings,
    preparer: &Preparer,
    tasks: &mut Tasks,
) -> watch::Receiver<Containers> {
    let kubelet = PodResources::new(&settings.host.kubelet_dir);
    let failures = preparer.metrics.failed_container_looks.clone();
    let (containers, told) = ContainerWatch::new(kubelet, preparer.executor.clone(), failures);
    if settings.watchdog.action != WatchdogAction::Off {
        tasks.spawn("containers", containers.run(tasks.stop()));
    }
    told
}

fn watchdog(
    settings: &NodeSettings,
    preparer: &Preparer,
    metrics: ClaimMetrics,
    containers: watch::Receiver<Containers>,
) -> (Watchdog, mpsc::Receiver<watchdog::Finding>) {
    Watchdog::new(watchdog::WatchdogParts {
        settings: settings.watchdog,
        slots_per_share: settings.sharing.slots_per_share,
        executor: preparer.executor.clone(),
        cluster: preparer.cluster.clone(),
        daemons: preparer.executor.daemons.clone(),
        lists: ProcessWatch::new(settings.roots.driver.clone(), LISTS_LIMIT),
        processes: processes(settings),
        lock: settings.host.state_dir.join("watchdog.lock"),
        own_pod: settings.pod_uid.as_deref().map(PodUid::new),
        metrics,
        containers,
    })
}

fn processes(settings: &NodeSettings) -> Arc<dyn Processes> {
    Arc::new(LocalProcesses { root: settings.host.process_root.clone(), nvml_pids: settings.watchdog.pids })
}

struct Ledger {
    lanes: Arc<Lanes>,
    executor: Arc<Executor>,
}

fn open_ledger(settings: &NodeSettings, metrics: &NodeMetrics) -> Result<Ledger, NodeError> {
    let paths = &settings.host;
    let lanes_dir = paths.state_dir.join("lanes");
    for folder in [&lanes_dir, &paths.cdi_dir] {
        make_folder(folder)?;
    }
    let boot = boot::boot_id(&paths.boot_id_file)
        .map_err(|source| NodeError::Boot { path: paths.boot_id_file.clone(), source })?;
    let host = Arc::new(LocalHost { driver: settings.roots.driver.clone() });
    let store = Store::open(paths.state_dir.join("ledger"), &lanes_dir, host.clone())?;
    let [applying, ready, releasing] = store.phases();
    info!(applying, ready, releasing, "ledger opened");
    let folder = paths.state_dir.join(mig_mode::FOLDER);
    let modes = MigModes::new(host.clone(), folder.clone(), boot.clone(), settings.mig_keep)
        .map_err(|source| NodeError::Folder { path: folder, source })?;
    let mig = Carver::new(
        Arc::new(MigCarver::new(settings.roots.driver.clone(), MigCarver::LIMIT)),
        carver::AVOIDED,
        FailureFile::new(host.clone(), paths.state_dir.clone(), boot.clone()),
        modes,
    );
    let files = FileLooks::new(processes(settings), settings.open_descriptors, metrics.file_looks.clone());
    let executor = Executor {
        node: settings.node_name.clone(),
        pool: PoolName::Published(settings.node_name.clone()),
        boot,
        cdi_dir: paths.cdi_dir.clone(),
        store,
        host,
        driver: DriverRootCache::new(driver_root(&settings.roots, &paths.proc_root)),
        daemons: Arc::new(Client::new(&paths.mps_dir)),
        mig,
        holders: Holders::new(processes(settings), settings.pod_uid.as_deref().map(PodUid::new), files),
        sharing: settings.sharing.clone(),
        mps_dir: paths.mps_dir.display().to_string(),
    };
    if let Some(missing) = executor.driver.missing_toolkit() {
        warn!("{missing}");
    }
    Ok(Ledger { lanes: Arc::new(Lanes::new(lanes_dir)), executor: Arc::new(executor) })
}

fn make_folder(path: &Path) -> Result<(), NodeError> {
    fs::create_dir_all(path).map_err(|source| NodeError::Folder { path: path.to_owned(), source })
}

/// Where the driver is, as the plugin looks at it.
pub fn driver_root(roots: &Roots, proc: &Path) -> DriverRoot {
    let view = |inside: &Path, outside: &Path| RootView::new(inside, outside.to_string_lossy());
    let dev = roots.dev_root(|path| path.exists());
    // A node's view has the /dev folder in it.
    let parent = |path: &Path| path.parent().unwrap_or(Path::new("/")).to_owned();
    DriverRoot {
        view: view(roots.driver.root(), &roots.driver_root_on_host),
        place: roots.driver.clone(),
        toolkit: roots.toolkit_root.as_deref().map(|inside| view(inside, Path::new("/"))),
        toolkit_dir: roots.toolkit_dir.clone(),
        hook: HookChoice::Search,
        dev: DevRoot { view: view(&parent(&dev.here), &parent(&dev.on_host)), proc: proc.to_owned() },
    }
}

async fn connect(settings: &NodeSettings) -> Result<NodeCluster, NodeError> {
    let endpoint = settings.kubeconfig.clone().map_or(Endpoint::InCluster, Endpoint::from);
    Ok(NodeCluster::new(KubeCluster::connect(&endpoint).await?, settings.node_name.clone()))
}

fn discover(
    settings: &NodeSettings,
    executor: &Arc<Executor>,
    tasks: &mut Tasks,
    looked: Token,
) -> Discovered {
    let on_demand = carved_boards(&settings.mig_on_demand, executor);
    let nvml = Nvml::new(Settings {
        driver: settings.roots.driver.clone(),
        sys_root: settings.host.sysfs_root.clone(),
        look_limit: Settings::LOOK_LIMIT,
        on_demand: on_demand.clone(),
        switches: settings.mig_keep.is_some(),
    });
    let stop = tasks.stop();
    let dev = settings.roots.dev_root(|path| path.exists()).here;
    let files = watch_files(dev, settings.roots.driver.clone(), stop.clone());
    let policy = LookTiming { every: settings.discovery_interval, ..LookTiming::default() };
    let (discovery, discovered) = Discovery::new(Arc::new(nvml), policy, files);
    let discovery = match on_demand.is_empty() && executor.mig.modes().all().is_empty() {
        true => discovery,
        false => {
            let claims = Arc::new(CarvedByClaims(executor.clone()));
            discovery.with_carved(claims, settings.mig_on_demand.clone())
        }
    };
    tasks.spawn("discovery", async move {
        discovery.run(stop).await;
        Ok::<_, Infallible>(())
    });
    let mut inventory = discovered.inventory.clone();
    let until = tasks.stop();
    tasks.spawn("first look", async move {
        if inventory.wait_for(|known| *known != Inventory::Unknown).await.is_ok() {
            drop(looked);
        }
        until.cancelled().await;
        Ok::<_, Infallible>(())
    });
    discovered
}

/// The loop that tells people about claims, beginning with those that are ready already.
fn report(
    api: Arc<NodeCluster>,
    executor: &Executor,
    told: device_faults::FaultReceivers,
    tasks: &mut Tasks,
) -> Reporter {
    let (events, posting) = api.events();
    let until = tasks.stop();
    tasks.spawn("events", async move {
        tokio::select! {
            () = posting => until.cancelled().await,
            () = until.cancelled() => {}
        }
        Ok::<_, Infallible>(())
    });
    let (reporter, reporting) = Reporting::new(api, events);
    let records = executor.store.all();
    let ready = records.iter().filter(|record| record.phase == Phase::Ready);
    let reporting = reporting.recall(ready.map(|record| record.intent.clone()));
    tasks.spawn("reporter", reporting.run(told.inventory_with_faults.clone(), tasks.stop()));
    let device_faults::FaultReceivers { device_faults, states, daemons_down, .. } = told;
    let sources = daemon_reports::ReportSources { device_faults, states, daemons_down };
    tasks.spawn("daemon reports", daemon_reports::run(sources, reporter.clone(), tasks.stop()));
    reporter
}

/// The loop that labels the node, if that is wanted.
fn keep_labels(
    settings: &NodeSettings,
    api: &Arc<NodeCluster>,
    discovered: &Discovered,
    registry: &mut Registry,
    tasks: &mut Tasks,
) {
    if settings.labels == NodeLabels::Off {
        return;
    }
    let keeper = LabelKeeper::new(api.clone(), settings.labels, discovered.inventory.clone());
    let mut keeper = keeper.counting(registry);
    if let (Some(pod), Some(uid)) = (&settings.pod, &settings.pod_uid) {
        let (events, posting) = api.events();
        let (namespace, name) = (pod.namespace.clone(), pod.name.clone());
        keeper = keeper.telling(EventSubject::Pod { namespace, name, uid: uid.clone() }, events);
        let until = tasks.stop();
        tasks.spawn("label events", async move {
            tokio::select! {
                () = posting => until.cancelled().await,
                () = until.cancelled() => {}
            }
            Ok::<_, Infallible>(())
        });
    }
    tasks.spawn("labels", keeper.run(tasks.stop()));
}

fn watch_device_faults(
    settings: &NodeSettings,
    executor: &Arc<Executor>,
    discovered: &Discovered,
    tasks: &mut Tasks,
) -> device_faults::FaultReceivers {
    let (watch, told) = device_faults::FaultWatcher::new(device_faults::FaultSources {
        discovered: discovered.clone(),
        executor: executor.clone(),
        folder: settings.host.state_dir.clone(),
        sys_root: settings.host.sysfs_root.clone(),
        every: device_faults::FaultSources::EVERY,
    });
    tasks.spawn("ailments", watch.run(tasks.stop()));
    told
}

async fn serve_kubelet(
    settings: &NodeSettings,
    preparer: &Arc<Preparer>,
    devices: watch::Receiver<Vec<kubelet::DeviceHealth>>,
    tasks: &mut Tasks,
    registered: Token,
) -> Result<watch::Receiver<Registration>, NodeError> {
    let config = kubelet::PluginConfig {
        driver: DRIVER.to_owned(),
        kubelet_dir: settings.host.kubelet_dir.clone(),
        pod_uid: settings.pod_uid.clone(),
        timing: kubelet::PluginTiming::default(),
    };
    let health = Health { devices, clock: Arc::new(Timestamp::now) };
    let bound = kubelet::serve(config, preparer.clone(), health, tasks.stop()).await?;
    let registration = bound.registration.clone();
    let mut state = registration.clone();
    tasks.spawn("kubelet", async move { bound.stopped().await.map(|_| ()) });
    let until = tasks.stop();
    tasks.spawn("registration", async move {
        if state.wait_for(|state| *state == Registration::Registered).await.is_ok() {
            drop(registered);
        }
        until.cancelled().await;
        Ok::<_, Infallible>(())
    });
    Ok(registration)
}

fn publish(
    settings: &NodeSettings,
    cluster: Arc<dyn Cluster>,
    discovered: &Discovered,
    device_faults: &watch::Receiver<DeviceFaults>,
    tasks: &mut Tasks,
) -> watch::Receiver<Publication> {
    let path = settings.host.state_dir.join("publisher.lock");
    let lock: TryLock = Box::new(move || match FileLock::try_acquire(&path) {
        Ok(lock) => Ok(lock.map(|lock| Box::new(lock) as PublisherLock)),
        Err(error) => Err(error_chain(&error)),
    });
    let inventory = discovered.inventory.clone();
    let (publisher, published) = Publisher::new(cluster, settings.node_name.clone(), inventory);
    let publisher =
        publisher.with_sharing(settings.sharing.clone()).with_device_faults(device_faults.clone());
    let stop = tasks.stop();
    tasks.spawn("publisher", async move {
        publisher.run(lock, stop).await;
        Ok::<_, Infallible>(())
    });
    published
}

#[cfg(test)]
mod tests {
    use tempfile::{TempDir, tempdir};

    use super::*;
    use crate::host::driver_root::scan;

    #[test]
    fn the_toolkits_hook_is_looked_for_where_the_settings_say() {
        let (driver, host) = (tempdir().unwrap(), tempdir().unwrap());
        let put = |root: &TempDir, place: &str, content: &[u8]| {
            let path = root.path().join(place);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        };
        let mut elf = vec![0; 64];
        elf[..5].copy_from_slice(b"\x7fELF\x02");
        elf[18] = 62;
        put(&driver, "usr/lib64/libcuda.so.550.163.01", &elf);
        put(&driver, "opt/toolkit/nvidia-ctk", b"x");
        put(&host, "opt/toolkit/nvidia-cdi-hook", b"x");
        put(&host, "usr/bin/nvidia-ctk", b"x");
        let found = |toolkit_root: Option<&TempDir>, toolkit_dir: Option<&str>| {
            let roots = Roots {
                driver: driver.path().into(),
                driver_root_on_host: "/run/nvidia/driver".into(),
                toolkit_root: toolkit_root.map(|root| root.path().to_owned()),
                toolkit_dir: toolkit_dir.map(PathBuf::from),
                dev_root: Some("/dev".into()),
            };
            let files = scan(&driver_root(&roots, Path::new("/proc")), None).unwrap();
            files.hook.map(|hook| hook.path.host)
        };
        let folder = Some("/opt/toolkit");
        assert_eq!(found(Some(&host), folder).as_deref(), Some("/opt/toolkit/nvidia-cdi-hook"));
        assert_eq!(found(Some(&host), None).as_deref(), Some("/usr/bin/nvidia-ctk"));
        // The driver root is all that is looked at.
        let in_driver_root = "/run/nvidia/driver/opt/toolkit/nvidia-ctk";
        assert_eq!(found(None, folder).as_deref(), Some(in_driver_root));
        assert_eq!(found(None, None), None);
    }
}
