//! From what the watchdog found, and what ails the boards, to what people are told of it.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;

use tokio::sync::{mpsc, watch};

use super::reporter::Reporter;
use super::watchdog::{Finding, FindingKind};
use crate::conditions::{self, Part, Seen, Usage};
use crate::inventory::{Ailment, Ailments, Inventory, Kind, Place};
use crate::model::gpu::Health;
use crate::model::names::{ClaimUid, DeviceUuid};
use crate::model::quantity::Bytes;
use crate::ops::drain::Shutdown;
use crate::sharing::watch::{Numbers, Trouble};

/// Hands on until the shutdown.
pub async fn run(
    mut findings: mpsc::Receiver<Finding>,
    reporter: Reporter,
    shutdown: Shutdown,
) -> Result<(), Infallible> {
    let mut last = BTreeMap::new();
    loop {
        tokio::select! {
            () = shutdown.graceful() => return Ok(()),
            finding = findings.recv() => match finding {
                Some(finding) => {
                    if let Some(told) = told(finding, &mut last) {
                        reporter.found(told);
                    }
                }
                None => {
                    shutdown.graceful().await;
                    return Ok(());
                }
            }
        }
    }
}

type Usages = BTreeMap<(ClaimUid, DeviceUuid), Usage>;

/// What concerns a claim's memory. A process's end is told with the usage for which it was ended. What
/// concerns no claim, and what is tried again, is in the log and the metrics.
fn told(finding: Finding, last: &mut Usages) -> Option<conditions::Finding> {
    let Finding { claim, gpu, kind, .. } = finding;
    let claim = claim?;
    let key = (claim.uid.clone(), gpu.clone());
    let (usage, seen) = match kind {
        FindingKind::OverGrant(numbers) => {
            last.insert(key, usage(numbers));
            (usage(numbers), Seen::Over)
        }
        FindingKind::Ended { process, used, .. } => {
            let known = last.get(&key).copied();
            let alone = Usage { used: used.unwrap_or(Bytes(0)), granted: Bytes(0) };
            (known.unwrap_or(alone), Seen::Ended { pid: process.pid })
        }
        FindingKind::Recovered { from: Trouble::Memory, numbers, .. } => {
            last.remove(&key);
            (usage(numbers), Seen::Within)
        }
        FindingKind::Recovered { .. }
        | FindingKind::TooManyProcesses { .. }
        | FindingKind::Foreign { .. }
        | FindingKind::NotEnded { .. } => return None,
    };
    Some(conditions::Finding { claim, gpu, usage, seen })
}

fn usage(numbers: Numbers) -> Usage {
    Usage { used: numbers.used, granted: numbers.limit }
}

/// Tells of faults and of MPS daemons, until the shutdown. That a board cannot be read is told by its health.
pub async fn ailing(
    mut ailments: watch::Receiver<Ailments>,
    inventory: watch::Receiver<Inventory>,
    reporter: Reporter,
    shutdown: Shutdown,
) -> Result<(), Infallible> {
    let mut before = BTreeSet::new();
    loop {
        let now = by_part(&ailments.borrow_and_update(), &inventory.borrow());
        for (gpu, part) in before.difference(&now.keys().cloned().collect()).cloned() {
            reporter.ailing(conditions::Ailment { gpu, part, health: Health::Healthy });
        }
        before = now.keys().cloned().collect();
        for ((gpu, part), words) in now {
            let health = Health::Unhealthy(words.join("; "));
            reporter.ailing(conditions::Ailment { gpu, part, health });
        }
        tokio::select! {
            () = shutdown.graceful() => return Ok(()),
            changed = ailments.changed() => if changed.is_err() {
                shutdown.graceful().await;
                return Ok(());
            }
        }
    }
}

fn by_part(ailments: &Ailments, inventory: &Inventory) -> BTreeMap<(DeviceUuid, Part), Vec<String>> {
    let mut parts: BTreeMap<_, Vec<String>> = BTreeMap::new();
    for ailment in ailments.iter() {
        let part = match ailment.kind {
            Kind::Xid(_) => Part::Fault,
            Kind::MpsDaemonDown => Part::Mps,
            Kind::Unreachable => continue,
        };
        parts.entry((board(ailment, inventory), part)).or_default().push(ailment.words.clone());
    }
    parts
}

/// The board of an ailment's place; a device that is not known any more stands for itself.
fn board(ailment: &Ailment, inventory: &Inventory) -> DeviceUuid {
    let device = match &ailment.place {
        Place::Board(gpu) | Place::Instance(gpu, _) => return gpu.clone(),
        Place::Device(device) => device,
    };
    let Inventory::Found(found) = inventory else { return device.clone() };
    let devices = found.gpus.iter().flat_map(|gpu| gpu.devices());
    let of = devices.filter(|other| other.uuid() == device).map(|other| other.gpu().uuid.clone()).next();
    of.unwrap_or_else(|| device.clone())
}
