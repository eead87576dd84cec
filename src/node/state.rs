//! The state that the process reports: the parts of `/state`, which `tranche inspect` shows, and the gauges.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::discovery::{Discovered, DiscoveryState};
use super::metrics::{DeviceHealth, DeviceType, NodeMetrics};
use super::mig_mode::SwitchedOn;
use super::preparer::Preparer;
use super::publisher::{Publication, PublicationPhase};
use super::reporter::Reporter;
use crate::inventory::{DeviceFault, DeviceFaults, FaultKind, Inventory};
use crate::kubelet::Registration;
use crate::model::gpu::{Device, Health};
use crate::model::names::NodeName;
use crate::ops::server::StateDump;
use crate::supervisor::protocol::DaemonState;

/// Gauges are read by people and scrapers, seldom more often.
const GAUGES_EVERY: Duration = Duration::from_secs(5);

/// The parts that can be asked how they are.
#[derive(Clone)]
pub struct StateSources {
    pub node: NodeName,
    pub discovered: Discovered,
    pub device_faults: watch::Receiver<DeviceFaults>,
    pub published: watch::Receiver<Publication>,
    pub registration: watch::Receiver<Registration>,
    pub preparer: Arc<Preparer>,
    pub reporter: Reporter,
    pub daemons: watch::Receiver<Vec<DaemonState>>,
}

impl StateSources {
    /// Registers every part under its name.
    pub fn describe(&self, dump: &mut StateDump) {
        let node = self.node.clone();
        dump.add("node", move || {
            json!({
                "name": node.as_str(),
                "version": env!("CARGO_PKG_VERSION"),
                "commit": env!("TRANCHE_COMMIT"),
            })
        });
        let inventory = self.discovered.inventory.clone();
        dump.add("inventory", move || json!(*inventory.borrow()));
        let discovery = self.discovered.state.clone();
        dump.add("discovery", move || looks(&discovery.borrow()));
        let (inventory, faults) = (self.discovered.inventory.clone(), self.device_faults.clone());
        dump.add("ailments", move || device_faults(&inventory.borrow(), &faults.borrow()));
        let published = self.published.clone();
        dump.add("slices", move || publication(&published.borrow()));
        let registration = self.registration.clone();
        dump.add("kubelet", move || match &*registration.borrow() {
            Registration::NotYet => json!({"registration": "NotYet"}),
            Registration::Registered => json!({"registration": "Registered"}),
            Registration::Refused(reason) => json!({"registration": "Refused", "reason": reason}),
        });
        let reporter = self.reporter.clone();
        dump.add("reports", move || reports(&reporter));
        let daemons = self.daemons.clone();
        dump.add("mps", move || json!(*daemons.borrow()));
        let preparer = self.preparer.clone();
        dump.add("toolkit", move || {
            json!({"missing": preparer.executor.driver.missing_toolkit().map(|missing| missing.to_string())})
        });
        let preparer = self.preparer.clone();
        dump.add("migModes", move || mig_modes(&preparer));
        let preparer = self.preparer.clone();
        dump.add("claims", move || claims(&preparer));
    }
}

/// Those that were switched on for claims: since when, and when they go off.
fn mig_modes(preparer: &Preparer) -> Value {
    let modes = preparer.executor.mig.modes();
    let one = |one: &SwitchedOn| json!({"gpu": one.gpu, "since": one.since, "offAt": modes.off_at(one)});
    modes.all().iter().map(one).collect()
}

fn looks(state: &DiscoveryState) -> Value {
    json!({
        "looks": state.looks,
        "failures": state.failures,
        "failuresInARow": state.failures_in_a_row,
        "changes": state.changes,
        "lastLookSecondsAgo": state.looked_at.map(|at| at.elapsed().as_secs_f64()),
        "lastLookMs": state.last_look.map(|took| took.as_secs_f64() * 1e3),
        "lastError": state.last_error,
        "leftOut": state.left_out,
        "nextLookInSeconds": state.next_look_in.as_secs_f64(),
        "stuckThreads": state.stuck_threads,
        "eventsMissed": state.events_missed,
    })
}

/// Each with the devices that it concerns.
fn device_faults(inventory: &Inventory, device_faults: &DeviceFaults) -> Value {
    let devices = match inventory {
        Inventory::Found(gpus) => gpus.devices(),
        Inventory::Unknown | Inventory::Unavailable { .. } => Default::default(),
    };
    let one = |fault: &DeviceFault| {
        let concerned = devices.iter().filter(|(_, device)| device_faults.of(device).contains(&fault));
        json!({
            "devices": concerned.map(|(name, _)| name).collect::<Vec<_>>(),
            "kind": fault.kind.word(),
            "effect": fault.kind.effect().as_str(),
            "since": fault.since,
            "words": fault.words,
        })
    };
    device_faults.iter().map(one).collect()
}

fn publication(published: &Publication) -> Value {
    let (phase, error) = match &published.phase {
        PublicationPhase::WaitingForLock => ("WaitingForLock", None),
        PublicationPhase::WaitingForInventory => ("WaitingForInventory", None),
        PublicationPhase::Pending => ("Pending", None),
        PublicationPhase::Published => ("Published", None),
        PublicationPhase::Failing { error } => ("Failing", Some(error)),
        PublicationPhase::Stopped => ("Stopped", None),
    };
    json!({
        "phase": phase,
        "error": error,
        "generation": published.generation,
        "slices": published.slices,
        "devices": published.devices,
        "emptyBecause": published.empty_because,
        "dropped": (!published.dropped.is_empty()).then(|| published.dropped.to_string()),
        "keeps": format!("{:?}", published.keeps),
        "offered": published.offered,
        "writes": published.writes,
        "failures": published.failures,
    })
}

fn reports(reporter: &Reporter) -> Value {
    json!({
        "statusWrites": reporter.written(),
        "failures": reporter.failed(),
        "dropped": reporter.dropped(),
        "droppedEvents": reporter.dropped_events(),
    })
}

fn claims(preparer: &Preparer) -> Value {
    let records = preparer.executor.store.all();
    records
        .iter()
        .map(|record| {
            let claim = &record.intent.claim;
            json!({
                "namespace": claim.namespace,
                "name": claim.name,
                "uid": record.intent.key().to_string(),
                "phase": format!("{:?}", record.phase),
                "withheld": preparer.executor.holders.withheld_of(&record.intent.key()).map(|one| one.holders()),
                "intent": record.intent.as_written(),
                "devices": record.intent.devices.iter().map(|held| json!({
                    "device": held.answer.device,
                    "mode": held.mode.to_string(),
                    "requests": held.answer.requests,
                })).collect::<Vec<_>>(),
            })
        })
        .collect()
}

/// Keeps the gauges true.
pub async fn gauges(
    parts: StateSources,
    metrics: NodeMetrics,
    stop: CancellationToken,
) -> Result<(), Infallible> {
    let mut ticks = tokio::time::interval(GAUGES_EVERY);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut counted = Counted::default();
    loop {
        tokio::select! {
            () = stop.cancelled() => return Ok(()),
            _ = ticks.tick() => {}
        }
        devices(&parts.discovered.inventory.borrow(), &metrics);
        let phases = ["applying", "ready", "releasing"];
        for (phase, count) in phases.into_iter().zip(parts.preparer.executor.store.phases()) {
            metrics.ledger_records(phase, count);
        }
        let withheld = parts.preparer.executor.holders.withheld().borrow().len();
        metrics.withheld_claims.set(i64::try_from(withheld).unwrap_or(i64::MAX));
        for kind in FaultKind::WORDS {
            let count = parts.device_faults.borrow().iter().filter(|fault| fault.kind.word() == kind).count();
            metrics.device_faults(kind, count);
        }
        counted.looks(&parts.discovered.state.borrow(), &metrics);
        counted.publication(&parts.published.borrow(), &metrics);
        counted.reports(&parts.reporter, &metrics);
        let unmade = parts.preparer.executor.mig.failed();
        metrics.mig_creation_failures.inc_by(step(&mut counted.unmade, unmade));
        let (switched, failed) = parts.preparer.executor.mig.modes().counts();
        metrics.mig_mode_switches.inc_by(step(&mut counted.switched, switched));
        metrics.mig_mode_switch_failures.inc_by(step(&mut counted.unswitched, failed));
    }
}

/// What the counters have been told already: the parts count from the start, a counter takes the difference.
#[derive(Default)]
struct Counted {
    looks: u64,
    failed_looks: u64,
    writes: u64,
    failed_writes: u64,
    told: u64,
    failed_tellings: u64,
    dropped_reports: u64,
    dropped_events: u64,
    unmade: u64,
    switched: u64,
    unswitched: u64,
}

impl Counted {
    fn looks(&mut self, state: &DiscoveryState, metrics: &NodeMetrics) {
        metrics.discovery_looks.inc_by(step(&mut self.looks, state.looks));
        metrics.discovery_failures.inc_by(step(&mut self.failed_looks, state.failures));
        metrics.stuck_nvml_threads.set(i64::try_from(state.stuck_threads).unwrap_or(i64::MAX));
        if let Some(took) = state.last_look {
            metrics.discovery_last_look.set(took.as_secs_f64());
        }
    }

    fn publication(&mut self, published: &Publication, metrics: &NodeMetrics) {
        metrics.slice_writes.inc_by(step(&mut self.writes, published.writes));
        metrics.slice_failures.inc_by(step(&mut self.failed_writes, published.failures));
        metrics.slices_published.set(i64::from(published.phase == PublicationPhase::Published));
    }

    fn reports(&mut self, reporter: &Reporter, metrics: &NodeMetrics) {
        metrics.status_writes.inc_by(step(&mut self.told, reporter.written()));
        metrics.status_failures.inc_by(step(&mut self.failed_tellings, reporter.failed()));
        metrics.dropped_reports.inc_by(step(&mut self.dropped_reports, reporter.dropped()));
        metrics.dropped_events.inc_by(step(&mut self.dropped_events, reporter.dropped_events()));
    }
}

fn step(before: &mut u64, now: u64) -> u64 {
    now.saturating_sub(std::mem::replace(before, now))
}

fn devices(inventory: &Inventory, metrics: &NodeMetrics) {
    let Inventory::Found(gpus) = inventory else { return };
    for &kind in DeviceType::ALL {
        for &health in DeviceHealth::ALL {
            let count =
                gpus.devices().values().filter(|device| class(device) == Some((kind, health))).count();
            metrics.devices(kind, health, count);
        }
    }
}

/// None of a board whose MIG devices are counted.
fn class(device: &Device<'_>) -> Option<(DeviceType, DeviceHealth)> {
    let kind = match device {
        Device::Parent(_) => return None,
        Device::Whole(_) => DeviceType::Gpu,
        Device::Mig { .. } | Device::Place { .. } => DeviceType::Mig,
    };
    let health = match device.gpu().health {
        Health::Healthy | Health::Changing(_) => DeviceHealth::Healthy,
        Health::Unhealthy(_) | Health::Lost(_) => DeviceHealth::Unhealthy,
    };
    Some((kind, health))
}
