//! Starts the parts of the controller, and turns: changes and answers in, writes and words out.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

use futures::StreamExt;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use serde_json::json;
use thiserror::Error;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tracing::{info, warn};

use super::Moment;
use super::config::ControllerSettings;
use super::core::Core;
use super::lease::{Gate, Leasing};
use super::write::{Outcome, Write};
use super::writer::{QUEUE_CAPACITY, Writer};
use crate::cluster::events::Events;
use crate::cluster::lease::LeaseName;
use crate::cluster::{CallError, ConnectError, Endpoint, KubeCluster};
use crate::model::names::NodeName;
use crate::ops::OpsError;
use crate::ops::drain::{Shutdown, Signals};
use crate::ops::logs::LogControl;
use crate::ops::metrics;
use crate::ops::readiness::Readiness;
use crate::ops::server::{Ops, StateDump};
use crate::ops::tasks::Tasks;

/// Writes under way may end; a pod has 30 s.
const DRAIN_LIMIT: Duration = Duration::from_secs(20);
/// The longest that one call may take: the lease allows for it.
const CALL_LIMIT: Duration = Duration::from_secs(3);
/// Changes that are taken in together before the next round.
const CHANGES_AT_ONCE: usize = 512;
/// Without anything to wait for, a look is taken every so often.
const LOOK_EVERY: Duration = Duration::from_secs(30);

/// Why the controller did not start, or ended.
#[derive(Debug, Error)]
pub enum ControllerError {
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error("the Deployment that is to own the holds cannot be read; its Role needs get on it")]
    Owner(#[source] CallError),
    #[error(transparent)]
    Ops(#[from] OpsError),
}

/// Runs the controller until it is told to end, or until another leads.
///
/// # Errors
/// What kept it from starting, or the first part that failed.
pub async fn run(settings: ControllerSettings, logs: LogControl) -> Result<(), ControllerError> {
    info!(version = env!("CARGO_PKG_VERSION"), commit = env!("TRANCHE_COMMIT"), ?settings, "starting");
    let signals = Signals::catch()?;
    let shutdown = Shutdown::new();
    let mut tasks = Tasks::new(shutdown.clone());
    let endpoint = settings.kubeconfig.clone().map_or(Endpoint::InCluster, Endpoint::Kubeconfig);
    let api = KubeCluster::connect(&endpoint, NodeName::new(&settings.identity)).await?;
    let registry = metrics::registry();
    start(&settings, api.with_limit(CALL_LIMIT), &mut tasks, &shutdown).await?;
    let leads = json!({"identity": settings.identity});
    let mut state = StateDump::default();
    state.add("controller", move || leads.clone());
    let ops = Ops { registry, readiness: Readiness::default(), shutdown: shutdown.clone(), logs, state };
    let ops = ops.bind(settings.ops_address).await?;
    info!(address = %ops.address(), "health, metrics and state are served");
    let until = shutdown.clone();
    tasks.spawn("ops server", ops.serve(async move { until.graceful().await }));
    Ok(tasks.run(signals, DRAIN_LIMIT).await?)
}

/// Starts the lease, the writer and the loop.
///
/// # Errors
/// The owner of the holds cannot be read.
pub async fn start(
    settings: &ControllerSettings,
    api: KubeCluster,
    tasks: &mut Tasks,
    shutdown: &Shutdown,
) -> Result<(), ControllerError> {
    let owner = owner(settings, &api).await.map_err(ControllerError::Owner)?;
    let gate = Gate::closed();
    let (leading, led) = watch::channel(false);
    let (idle, mut is_idle) = watch::channel(false);
    let leasing = Leasing {
        api: api.clone(),
        at: LeaseName { namespace: settings.namespace.clone(), name: settings.lease.name.clone() },
        me: format!("{}_{:016x}", settings.identity, fastrand::u64(..)),
        duration: settings.lease.duration,
        every: settings.lease.renew_every,
        call_limit: api.call_limit(),
        gate: gate.clone(),
        leading,
    };
    let until = shutdown.clone();
    tasks.spawn(
        "lease",
        leasing.run(until, async move {
            // An error: whoever writes is gone.
            let _ = is_idle.wait_for(|idle| *idle).await;
        }),
    );
    let (events, posting) = api.events();
    let until = shutdown.clone();
    tasks.spawn("events", async move {
        tokio::select! {
            () = posting => until.graceful().await,
            () = until.graceful() => {}
        }
        Ok::<_, Infallible>(())
    });
    let (writes, queue) = mpsc::channel(QUEUE_CAPACITY);
    let (answers, outcomes) = mpsc::channel(QUEUE_CAPACITY);
    let writer = Writer { api: api.clone(), gate, namespace: settings.namespace.clone(), owner };
    let until = shutdown.clone();
    tasks.spawn("writer", async move {
        writer.run(queue, answers).await;
        idle.send_replace(true);
        until.graceful().await;
        Ok::<_, Infallible>(())
    });
    let core = Core::new(settings.rules.clone(), &settings.namespace);
    let turning = Turning { core, api, events, writes, outcomes, pending: VecDeque::new() };
    tasks.spawn("controller", turning.run(led, shutdown.clone()));
    Ok(())
}

/// Whose end ends the holds.
async fn owner(
    settings: &ControllerSettings,
    api: &KubeCluster,
) -> Result<Option<OwnerReference>, CallError> {
    let Some(name) = &settings.deployment else { return Ok(None) };
    let uid = api.deployment_uid(&settings.namespace, name).await?;
    if uid.is_none() {
        warn!(deployment = %name, "there is no such Deployment; holds stay when the controller is uninstalled");
    }
    Ok(uid.map(|uid| OwnerReference {
        api_version: "apps/v1".to_owned(),
        kind: "Deployment".to_owned(),
        name: name.clone(),
        uid,
        ..OwnerReference::default()
    }))
}

struct Turning {
    core: Core,
    api: KubeCluster,
    events: Events,
    writes: mpsc::Sender<Write>,
    outcomes: mpsc::Receiver<Outcome>,
    /// Decided, and not yet in the writer's queue.
    pending: VecDeque<Write>,
}

impl Turning {
    /// Knows nothing before it leads: what it then reads is newer than anything that the last leader wrote.
    async fn run(mut self, mut led: watch::Receiver<bool>, shutdown: Shutdown) -> Result<(), Infallible> {
        tokio::select! {
            () = shutdown.graceful() => return Ok(()),
            () = leads(&mut led) => {}
        }
        let start = Instant::now();
        let mut feed = self.api.feed().ready_chunks(CHANGES_AT_ONCE);
        let mut next: Option<Moment> = None;
        loop {
            let due = start + next.unwrap_or(Moment::MAX / 4).min(start.elapsed() + LOOK_EVERY);
            tokio::select! {
                biased;
                () = shutdown.graceful() => return Ok(()),
                permit = self.writes.reserve(), if !self.pending.is_empty() => {
                    if let (Ok(permit), Some(write)) = (permit, self.pending.pop_front()) {
                        permit.send(write);
                    }
                    continue;
                }
                Some(outcome) = self.outcomes.recv() => {
                    let now = start.elapsed();
                    self.core.done(outcome, now);
                    while let Ok(outcome) = self.outcomes.try_recv() {
                        self.core.done(outcome, now);
                    }
                }
                Some(changes) = feed.next() => {
                    let now = start.elapsed();
                    changes.into_iter().for_each(|change| self.core.apply(change, now));
                }
                () = tokio::time::sleep_until(due) => {}
            }
            next = self.turn(start.elapsed());
        }
    }

    fn turn(&mut self, now: Moment) -> Option<Moment> {
        let round = self.core.round(now, &mut share_id);
        self.pending.extend(round.writes);
        let (notes, troubles) = self.core.says.take();
        notes.into_iter().for_each(|note| self.events.tell(note));
        troubles.into_iter().for_each(|words| warn!("{words}"));
        round.next
    }
}

/// Never returns if the lease's task ends before: it tells why, and the process ends.
async fn leads(led: &mut watch::Receiver<bool>) {
    if led.wait_for(|led| *led).await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// A random UUID (RFC 9562, version 4).
fn share_id() -> String {
    let bits = fastrand::u128(..) & !(0xf << 76) & !(0x3 << 62) | (0x4 << 76) | (0x2 << 62);
    let hex = format!("{bits:032x}");
    format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn share_ids_are_random_uuids() {
        let id = share_id();
        let parts: Vec<usize> = id.split('-').map(str::len).collect();
        assert_eq!(parts, [8, 4, 4, 4, 12], "{id}");
        assert_eq!(&id[14..15], "4", "{id}");
        assert!("89ab".contains(&id[19..20]), "{id}");
        assert_ne!(id, share_id());
    }
}
