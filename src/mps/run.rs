//! Starts every part of the supervisor, in the order in which they need each other.

use std::convert::Infallible;
use std::fs;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use thiserror::Error;
use tokio_util::sync::CancellationToken;
use tracing::info;

use super::config::MpsSettings;
use super::metrics::MpsMetrics;
use super::supervise::Supervisor;
use super::tools::Tools;
use crate::host::{FileLock, LockError};
use crate::nvml::{Nvml, Settings};
use crate::ops::OpsError;
use crate::ops::drain::Signals;
use crate::ops::logs::LogControl;
use crate::ops::metrics;
use crate::ops::readiness::Readiness;
use crate::ops::server::{Ops, StateDump};
use crate::ops::tasks::Tasks;
use crate::supervisor::{ListenError, Listener};

/// Questions under way may take their time; a pod has 30 s.
const DRAIN_LIMIT: Duration = Duration::from_secs(25);
/// For an older supervisor of this node to end.
const LOCK_LIMIT: Duration = Duration::from_secs(10);

/// Why the supervisor did not start, or ended.
#[derive(Debug, Error)]
pub enum MpsError {
    #[error("cannot use the folder {}; is it mounted writable, at the same path as on the host?", .path.display())]
    Folder { path: PathBuf, source: io::Error },
    #[error("another `tranche mps` supervises this node's MPS daemons")]
    Lock(#[source] LockError),
    #[error(transparent)]
    Listen(#[from] ListenError),
    #[error(transparent)]
    Ops(#[from] OpsError),
}

/// Runs the supervisor until it is told to end. Daemons that serve claims outlive it.
///
/// # Errors
/// What kept it from starting, or the first part that failed.
pub async fn run(settings: MpsSettings, logs: LogControl) -> Result<(), MpsError> {
    info!(version = env!("CARGO_PKG_VERSION"), commit = env!("TRANCHE_COMMIT"), ?settings, "starting");
    let signals = Signals::catch()?;
    let stop = CancellationToken::new();
    let mut tasks = Tasks::new(stop.clone());
    let readiness = Readiness::default();
    let adopted = readiness.wait_for("daemons of an earlier supervisor");
    let mut registry = metrics::registry();
    let metrics = MpsMetrics::register(&mut registry);

    let folder = settings.folder.clone();
    let unusable = |source| MpsError::Folder { path: folder.clone(), source };
    fs::create_dir_all(&folder).map_err(unusable)?;
    // Held to the end of this process.
    let _lock = FileLock::acquire(&folder.join("tranche-mps.lock"), LOCK_LIMIT).map_err(MpsError::Lock)?;
    let listener = Listener::bind(&folder).await?;
    let interval = settings.timing.check_interval;
    let ops_address = settings.ops_address.clone();
    let nvml = Nvml::new(Settings {
        driver: settings.driver.clone(),
        sys_root: settings.sysfs_root.clone(),
        look_limit: Settings::LOOK_LIMIT,
        on_demand: Vec::new(),
        switches: false,
    });
    let supervisor = Arc::new(Supervisor::new(Tools::new(settings, nvml, metrics)));

    let mut dump = StateDump::default();
    let described = supervisor.clone();
    dump.add("daemons", move || json!(described.states()));
    dump.add("mps", || json!({"version": env!("CARGO_PKG_VERSION"), "commit": env!("TRANCHE_COMMIT")}));
    let ops = Ops { registry, dcgm: None, readiness, stop: stop.clone(), logs, state: dump };
    let ops = ops.bind(ops_address).await?;
    info!(address = %ops.address(), "health, metrics and state are served");
    tasks.spawn("ops server", ops.serve(stop.clone()));

    // Before the first question, so that nobody is told of less than there is.
    supervisor.adopt().await.map_err(unusable)?;
    drop(adopted);
    info!(socket = %listener.path().display(), "questions are answered");
    let (answers, until) = (supervisor.clone(), stop.clone().cancelled_owned());
    tasks.spawn("listener", async move {
        listener.serve(answers, until).await;
        Ok::<_, Infallible>(())
    });
    tasks.spawn("checks", checks(supervisor, interval, stop));
    Ok(tasks.run(signals, DRAIN_LIMIT).await?)
}

async fn checks(
    supervisor: Arc<Supervisor<Nvml>>,
    interval: Duration,
    stop: CancellationToken,
) -> Result<(), Infallible> {
    let mut ticks = tokio::time::interval(interval);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = stop.cancelled() => break,
            _ = ticks.tick() => supervisor.check().await,
        }
    }
    supervisor.end_resting().await;
    Ok(())
}
