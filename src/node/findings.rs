//! From what the watchdog found to what people are told of it.

use std::convert::Infallible;

use tokio::sync::mpsc;

use super::reporter::Reporter;
use super::watchdog::{Finding, FindingKind};
use crate::conditions::{self, Seen, Usage};
use crate::ops::drain::Shutdown;
use crate::sharing::watch::{Numbers, Trouble};

/// Hands on until the shutdown.
pub async fn run(
    mut findings: mpsc::Receiver<Finding>,
    reporter: Reporter,
    shutdown: Shutdown,
) -> Result<(), Infallible> {
    loop {
        tokio::select! {
            () = shutdown.graceful() => return Ok(()),
            finding = findings.recv() => match finding {
                Some(finding) => {
                    if let Some(told) = told(finding) {
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

/// What concerns a claim's memory. What concerns no claim, and what is tried again, is in the log and the
/// metrics.
fn told(finding: Finding) -> Option<conditions::Finding> {
    let Finding { claim, gpu, kind, .. } = finding;
    let (numbers, seen) = match kind {
        FindingKind::OverGrant(numbers) => (numbers, Seen::Over),
        FindingKind::Ended { process, numbers: Some(numbers), .. } => {
            (numbers, Seen::Ended { pid: process.pid })
        }
        FindingKind::Recovered { from: Trouble::Memory, numbers, .. } => (numbers, Seen::Within),
        FindingKind::Recovered { .. }
        | FindingKind::Ended { .. }
        | FindingKind::TooManyProcesses { .. }
        | FindingKind::Foreign { .. }
        | FindingKind::NotEnded { .. } => return None,
    };
    Some(conditions::Finding { claim: claim?, gpu, usage: usage(numbers), seen })
}

fn usage(numbers: Numbers) -> Usage {
    Usage { used: numbers.used, granted: numbers.limit }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::claim::ClaimRef;
    use crate::model::process::ProcessKey;
    use crate::model::quantity::Bytes;
    use crate::sharing::watch::How;

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
        let ended =
            |numbers| FindingKind::Ended { process, used: Some(mib(2500)), how: How::Terminate, numbers };
        for (kind, expected) in [
            (FindingKind::OverGrant(numbers), Seen::Over),
            (ended(Some(numbers)), Seen::Ended { pid: 7 }),
            (FindingKind::Recovered { from: Trouble::Memory, numbers, lasted_ms: 1 }, Seen::Within),
        ] {
            let told = told(finding(true, kind)).unwrap();
            assert_eq!(told.seen, expected);
            assert_eq!((told.usage.used, told.usage.granted), (mib(3000), mib(1000)));
        }
        let fewer = FindingKind::Recovered { from: Trouble::Processes, numbers, lasted_ms: 1 };
        assert_eq!(told(finding(true, fewer)), None);
        assert_eq!(told(finding(false, ended(None))), None, "of no claim");
    }
}
