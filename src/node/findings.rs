//! From what the watchdog found to what people are told of it.

use std::collections::BTreeMap;
use std::convert::Infallible;

use tokio::sync::mpsc;

use super::reporter::Reporter;
use super::watchdog::{Finding, FindingKind};
use crate::conditions::{self, Seen, Usage};
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
