//! Starts the parts of the controller, and turns: changes and answers in, writes and words out.

use std::convert::Infallible;
use std::time::Duration;

use futures::{FutureExt, StreamExt};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use serde_json::{Value, json};
use thiserror::Error;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::cluster::events::Events;
use crate::cluster::events::ReportingInstance;
use crate::cluster::feed::Change;
use crate::cluster::lease::LeaseName;
use crate::cluster::{CallError, ConnectError, Endpoint, KubeCluster};
use crate::controller::Moment;
use crate::controller::backlog::EventBacklog;
use crate::controller::config::ControllerSettings;
use crate::controller::core::Core;
use crate::controller::lease::{Gate, Leasing};
use crate::controller::metrics::ControllerMetrics;
use crate::controller::mirror::{Mirror, WantedProducts, products};
use crate::controller::pending::Pending;
use crate::controller::preempt::PutOff;
use crate::controller::templates::Templates;
use crate::controller::write::{Write, WriteOutcome};
use crate::controller::writer::{ANSWERS_MAX, QUEUE_CAPACITY, Writer};
use crate::ops::OpsError;
use crate::ops::drain::Signals;
use crate::ops::logs::LogControl;
use crate::ops::metrics::{self, Registry, gauge_value};
use crate::ops::readiness::{Readiness, Token};
use crate::ops::server::{Ops, StateDump};
use crate::ops::tasks::{Tasks, Thread};

/// Writes under way may end; a pod has 30 s.
const DRAIN_LIMIT: Duration = Duration::from_secs(20);
/// The longest that one call may take: the lease allows for it.
const CALL_LIMIT: Duration = Duration::from_secs(3);
/// Changes that are taken in, one by one, before the next round.
const CHANGES_AT_ONCE: usize = 512;
/// Without anything to wait for, a look is taken every so often.
const LOOK_EVERY: Duration = Duration::from_secs(30);
/// They are taken in for no longer, since others wait: the largest objects take ten milliseconds each.
const TAKE_IN: Duration = Duration::from_millis(50);
/// After a round a rest so many times as long: while much happens, the next round takes it in together, and rounds
/// take no more than a fifth of a processor, but for those of more than 12 ms.
const REST: u32 = 4;
/// Nothing waits longer than this for its round to begin.
const REST_MAX: Duration = Duration::from_millis(50);
/// How often metrics of the whole cluster are made.
const TELL_EVERY: Duration = Duration::from_secs(5);

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

/// What else runs in the process finds here what it needs.
pub struct ProcessContext<'a> {
    pub api: &'a KubeCluster,
    pub tasks: &'a mut Tasks,
    pub registry: &'a mut Registry,
    pub readiness: &'a Readiness,
}

/// Runs the controller until it is told to end, or until another leads. `beside` starts what is to run with it,
/// whoever leads.
///
/// # Errors
/// What kept it from starting, or the first part that failed.
pub async fn run(
    settings: ControllerSettings,
    logs: LogControl,
    beside: impl FnOnce(ProcessContext<'_>) -> Result<(), ControllerError>,
) -> Result<(), ControllerError> {
    info!(version = env!("CARGO_PKG_VERSION"), commit = env!("TRANCHE_COMMIT"), ?settings, "starting");
    let signals = Signals::catch()?;
    let stop = CancellationToken::new();
    let mut tasks = Tasks::new(stop.clone());
    let endpoint = settings.kubeconfig.clone().map_or(Endpoint::InCluster, Endpoint::from);
    let api = KubeCluster::connect(&endpoint).await?;
    let api = api.with_limit(CALL_LIMIT);
    let mut registry = metrics::registry();
    let readiness = Readiness::default();
    let metrics = ControllerMetrics::register(&mut registry);
    let around =
        ProcessContext { api: &api, tasks: &mut tasks, registry: &mut registry, readiness: &readiness };
    beside(around)?;
    let looked = readiness.wait_for("a look at the lease");
    let told = start(&settings, api, metrics, Some(looked), &mut tasks).await?;
    let mut state = StateDump::default();
    state.add("controller", move || told.borrow().clone());
    let ops = Ops { registry, dcgm: None, readiness, stop: stop.clone(), logs, state };
    let ops = ops.bind(settings.ops_address).await?;
    info!(address = %ops.address(), "health, metrics and state are served");
    tasks.spawn("ops server", ops.serve(stop.clone()));
    Ok(tasks.run(signals, DRAIN_LIMIT).await?)
}

/// Starts the lease, the writer and the loop, on two threads of their own; what it returns tells how things are.
/// `looked` is dropped once the lease was looked at.
///
/// # Errors
/// The owner of the holds cannot be read, or there is no thread for it.
pub async fn start(
    settings: &ControllerSettings,
    api: KubeCluster,
    metrics: ControllerMetrics,
    looked: Option<Token>,
    tasks: &mut Tasks,
) -> Result<watch::Receiver<Value>, ControllerError> {
    let owner = owner(settings, &api).await.map_err(ControllerError::Owner)?;
    let gate = Gate::closed();
    let (leading, led) = watch::channel(false);
    let (idle, mut is_idle) = watch::channel(false);
    // Whatever a round takes, the lease is renewed in time: by a thread that does nothing else.
    let thread = tasks.thread("lease")?;
    let leasing = Leasing {
        api: on_thread(&thread, &api)?,
        at: LeaseName { namespace: settings.namespace.clone(), name: settings.lease.name.clone() },
        me: format!("{}_{:016x}", settings.identity, fastrand::u64(..)),
        duration: settings.lease.duration,
        every: settings.lease.renew_every,
        call_limit: api.call_limit(),
        gate: gate.clone(),
        leading,
        looked,
    };
    let until = tasks.stop();
    let is_idle = async move {
        // An error: whoever writes is gone.
        let _ = is_idle.wait_for(|idle| *idle).await;
    };
    tasks.spawn_on(&thread, "lease", leasing.run(until, is_idle));
    let thread = tasks.thread("controller")?;
    let api = on_thread(&thread, &api)?;
    let (events, posting) = api.events(ReportingInstance::of_pod(&settings.identity));
    let until = tasks.stop();
    tasks.spawn_on(&thread, "events", async move {
        tokio::select! {
            () = posting => until.cancelled().await,
            () = until.cancelled() => {}
        }
        Ok::<_, Infallible>(())
    });
    let (writes, queue) = mpsc::channel(QUEUE_CAPACITY);
    let (answers, outcomes) = mpsc::channel(ANSWERS_MAX);
    let writer =
        Writer { api: api.clone(), gate: gate.clone(), namespace: settings.namespace.clone(), owner };
    let until = tasks.stop();
    tasks.spawn_on(&thread, "writer", async move {
        writer.run(queue, answers).await;
        idle.send_replace(true);
        until.cancelled().await;
        Ok::<_, Infallible>(())
    });
    let (products, wanted) = watch::channel(None);
    let mirror = Mirror { api: api.clone(), gate: gate.clone(), wanted };
    tasks.spawn_on(&thread, "mirror", mirror.run(tasks.stop()));
    let templates = Templates {
        api: api.clone(),
        gate,
        kinds: settings.makers.clone(),
        classes: settings.share_classes.clone(),
        metrics: metrics.templates.clone(),
    };
    tasks.spawn_on(&thread, "templates", templates.run(led.clone(), tasks.stop()));
    let core =
        Core::new(settings.rules.clone(), &settings.namespace).promising(settings.share_classes.clone());
    let (state, told) = watch::channel(json!({"leading": false}));
    let (pending, notes) = (Pending::default(), EventBacklog::default());
    let failed_events = 0;
    let shown = PublicState { state, products, mirrored: settings.mirror };
    let turning =
        ControllerLoop { core, api, events, notes, failed_events, writes, outcomes, pending, metrics, shown };
    tasks.spawn_on(&thread, "controller", turning.run(led, tasks.stop()));
    Ok(told)
}

/// A client whose connections that thread serves.
fn on_thread(thread: &Thread, api: &KubeCluster) -> Result<KubeCluster, ConnectError> {
    let _entered = thread.enter();
    api.with_own_connections()
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

/// What a turn begins with.
enum Wakeup {
    Outcome(WriteOutcome),
    Change(Box<Change>),
    Tick,
    Nothing,
}

/// What others are told of how things are.
struct PublicState {
    state: watch::Sender<Value>,
    products: watch::Sender<WantedProducts>,
    mirrored: bool,
}

struct ControllerLoop {
    core: Core,
    api: KubeCluster,
    events: Events,
    notes: EventBacklog,
    failed_events: u64,
    writes: mpsc::Sender<Write>,
    outcomes: mpsc::Receiver<WriteOutcome>,
    /// Decided, and not yet in the writer's queue.
    pending: Pending,
    metrics: ControllerMetrics,
    shown: PublicState,
}

impl ControllerLoop {
    /// Knows nothing before it leads: what it then reads is newer than anything that the last leader wrote.
    async fn run(
        mut self,
        mut led: watch::Receiver<bool>,
        stop: CancellationToken,
    ) -> Result<(), Infallible> {
        tokio::select! {
            () = stop.cancelled() => return Ok(()),
            () = leads(&mut led) => {}
        }
        let start = Instant::now();
        self.core.recorder.begins(Timestamp::now());
        let mut feed = self.api.feed();
        let (writes, events) = (self.writes.clone(), self.events.clone());
        let mut next: Option<Moment> = None;
        // Until when no round begins, and whether something was heard that none has seen.
        let (mut rested, mut news) = (start, false);
        let mut ticks = tokio::time::interval(TELL_EVERY);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        self.metrics.leading.set(1);
        loop {
            let due = start + next.unwrap_or(Moment::MAX / 4).min(start.elapsed() + LOOK_EVERY);
            let due = if news { rested } else { due.max(rested) };
            let heard = tokio::select! {
                biased;
                () = stop.cancelled() => return Ok(()),
                permit = writes.reserve(), if !self.pending.is_empty() => {
                    if let (Ok(permit), Some(write)) = (permit, self.pending.take()) {
                        permit.send(write);
                    }
                    continue;
                }
                Some(outcome) = self.outcomes.recv() => Wakeup::Outcome(outcome),
                Some(change) = feed.next() => Wakeup::Change(Box::new(change)),
                permit = events.room(), if self.notes.is_due(self.is_busy(), start.elapsed()) => {
                    match (permit, self.notes.take()) {
                        (Some(permit), Some(note)) => permit.send(note),
                        // Nobody posts any more.
                        (_, lost) => drop(self.metrics.dropped_events.inc_by(u64::from(lost.is_some()))),
                    }
                    continue;
                }
                _ = ticks.tick() => Wakeup::Tick,
                () = tokio::time::sleep_until(due) => Wakeup::Nothing,
            };
            let more = if let Wakeup::Change(_) = heard { CHANGES_AT_ONCE } else { 0 };
            self.hear(heard, start.elapsed());
            let until = Instant::now() + TAKE_IN;
            for _ in 1..more {
                if Instant::now() >= until {
                    break;
                }
                let Some(Some(change)) = feed.next().now_or_never() else { break };
                self.hear(Wakeup::Change(Box::new(change)), start.elapsed());
            }
            let begun = Instant::now();
            news = begun < rested;
            if !news {
                next = self.turn(start.elapsed());
                rested = Instant::now() + (begun.elapsed() * REST).min(REST_MAX);
            }
        }
    }

    /// Claims are being written, or are to be.
    fn is_busy(&self) -> bool {
        !self.pending.is_empty() || self.core.tracker.is_busy()
    }

    fn hear(&mut self, heard: Wakeup, now: Moment) {
        match heard {
            Wakeup::Outcome(outcome) => {
                self.done(outcome, now);
                while let Ok(outcome) = self.outcomes.try_recv() {
                    self.done(outcome, now);
                }
            }
            Wakeup::Change(change) => {
                self.metrics.feed.changes.inc();
                self.core.apply(*change, now);
            }
            Wakeup::Tick => self.tell(),
            Wakeup::Nothing => {}
        }
    }

    fn done(&mut self, outcome: WriteOutcome, now: Moment) {
        let (what, result) = outcome.labels();
        self.metrics.write(what, result);
        self.core.done(outcome, now);
    }

    /// How things are, for metrics and whoever asks.
    fn tell(&mut self) {
        let metrics = &self.metrics;
        metrics.gpus.room(self.core.rooms().into_iter());
        for (reason, count) in self.core.waiting() {
            metrics.waiting.count(reason.as_str(), count);
        }
        metrics.waiting.name(self.core.longest_waiting().into_iter());
        let (held, idle) = self.core.held_counts();
        metrics.gpus.held.set(gauge_value(held));
        metrics.gpus.held_idle.set(gauge_value(idle));
        let (units, gpus) = self.core.reserves.counts();
        metrics.kept.units.set(gauge_value(units));
        metrics.kept.gpus.set(gauge_value(gpus));
        metrics.kept.in_vain.inc_by(self.core.reserves.take_in_vain());
        let preemption = &metrics.kept.preemption;
        let counts = self.core.reserves.evictions.preempting.take_counts();
        preemption.under_way.set(gauge_value(self.core.reserves.evictions.preempting.evicting()));
        preemption.result("begun", counts.begun);
        preemption.result("served", counts.served);
        preemption.result("in-vain", counts.in_vain);
        for reason in PutOff::ALL {
            let times = counts.put_off.get(&reason).copied().unwrap_or(0);
            preemption.put_off(reason.as_str(), times);
        }
        let moves = self.core.reserves.evictions.moves.take_counts();
        metrics.kept.moves.searches.inc_by(moves.searches);
        metrics.kept.moves.evictions.inc_by(moves.evictions);
        metrics.kept.moves.served.inc_by(moves.served);
        metrics.kept.moves.in_vain.inc_by(moves.in_vain);
        metrics.feed.unreadable.set(gauge_value(self.core.view.unreadables()));
        metrics.feed.unfollowed.inc_by(self.core.pods.neighbours.take_unfollowed());
        let over = self.core.overcommitted();
        metrics.gpus.overcommitted.set(gauge_value(over));
        let failed = self.events.failed();
        metrics.dropped_events.inc_by(failed - std::mem::replace(&mut self.failed_events, failed));
        let mut state = self.core.state();
        state["leading"] = true.into();
        self.shown.state.send_replace(state);
        if self.core.view.is_complete() {
            let nodes = self.core.view.nodes().map(|(_, node)| node).filter(|_| self.shown.mirrored);
            let fresh = Some(products(nodes));
            self.shown.products.send_if_modified(|known| {
                let is_other = *known != fresh;
                *known = fresh;
                is_other
            });
        }
    }

    fn turn(&mut self, now: Moment) -> Option<Moment> {
        let begun = Instant::now();
        let round = self.core.round(now, &mut share_id);
        self.metrics.round(begun.elapsed().as_secs_f64(), round.decided + round.refused);
        self.metrics.decisions.inc_by(round.decided as u64);
        self.metrics.refusals.inc_by(round.refused as u64);
        for waited in self.core.tracker.take_waits() {
            self.metrics.placed(waited.as_secs_f64());
        }
        self.pending.add(round.writes);
        let (notes, troubles) = self.core.recorder.take();
        self.metrics.dropped_events.inc_by(self.notes.add(notes, now));
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
