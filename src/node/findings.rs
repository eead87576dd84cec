//! Translates the watchdog's findings into events of claims.

use std::convert::Infallible;

use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::reporter::Reporter;
use super::watchdog::{Finding, FindingKind};
use crate::conditions::{GrantEvent, GrantEventKind, GrantUsage};
use crate::sharing::watch::{Numbers, Trouble};

/// Forwards findings to the reporter until `stop`.
pub async fn run(
    mut findings: mpsc::Receiver<Finding>,
    reporter: Reporter,
    stop: CancellationToken,
) -> Result<(), Infallible> {
    loop {
        tokio::select! {
            () = stop.cancelled() => return Ok(()),
            finding = findings.recv() => match finding {
                Some(finding) => {
                    if let Some(event) = grant_event(finding) {
                        reporter.grant_changed(event);
                    }
                }
                None => {
                    stop.cancelled().await;
                    return Ok(());
                }
            }
        }
    }
}

/// What concerns a claim's memory. What concerns no claim, and what is tried again, is in the log and the
/// metrics.
fn grant_event(finding: Finding) -> Option<GrantEvent> {
    let Finding { claim, gpu, kind, .. } = finding;
    let (numbers, kind) = match kind {
        FindingKind::OverGrant(numbers) => (numbers, GrantEventKind::Over),
        FindingKind::Ended { process, numbers: Some(numbers), .. } => {
            (numbers, GrantEventKind::Ended { pid: process.pid })
        }
        FindingKind::Recovered { from: Trouble::Memory, numbers, .. } => (numbers, GrantEventKind::Within),
        FindingKind::Recovered { .. }
        | FindingKind::Ended { .. }
        | FindingKind::TooManyProcesses { .. }
        | FindingKind::Foreign { .. }
        | FindingKind::NotEnded { .. } => return None,
    };
    Some(GrantEvent { claim: claim?, gpu, usage: usage(numbers), kind })
}

fn usage(numbers: Numbers) -> GrantUsage {
    GrantUsage { used: numbers.used, granted: numbers.limit }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::model::claim::ClaimRef;
    use crate::model::process::ProcessKey;
    use crate::model::quantity::Bytes;
    use crate::sharing::watch::EndMethod;

    fn finding(claim: bool, kind: FindingKind) -> Finding {
        let claim = claim.then(|| ClaimRef { namespace: "team".into(), name: "c".into(), uid: "c".into() });
        Finding { claim, pods: Vec::new(), gpu: "GPU-0".into(), device: "gpu-0".into(), kind }
    }

    #[test]
    fn a_claim_hears_what_concerns_its_memory_with_both_numbers() {
        let mib = Bytes::from_mib;
        let numbers =
            Numbers { limit: mib(1000), used: mib(3000), peak: mib(3000), processes: 2, uncounted: 0 };
        let process = ProcessKey { pid: 7, started: 1 };
        let ended = |numbers| FindingKind::Ended {
            process,
            used: Some(mib(2500)),
            how: EndMethod::Terminate,
            numbers,
        };
        for (kind, expected) in [
            (FindingKind::OverGrant(numbers), GrantEventKind::Over),
            (ended(Some(numbers)), GrantEventKind::Ended { pid: 7 }),
            (
                FindingKind::Recovered { from: Trouble::Memory, numbers, lasted: Duration::from_millis(1) },
                GrantEventKind::Within,
            ),
        ] {
            let event = grant_event(finding(true, kind)).unwrap();
            assert_eq!(event.kind, expected);
            assert_eq!((event.usage.used, event.usage.granted), (mib(3000), mib(1000)));
        }
        let fewer =
            FindingKind::Recovered { from: Trouble::Processes, numbers, lasted: Duration::from_millis(1) };
        assert_eq!(grant_event(finding(true, fewer)), None);
        assert_eq!(grant_event(finding(false, ended(None))), None, "of no claim");
    }
}
