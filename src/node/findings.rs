//! Translates the watchdog's findings into events of claims.

use std::convert::Infallible;

use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::reporter::Reporter;
use super::watchdog::{Finding, FindingKind};
use crate::conditions::{DetourStage, GrantEvent, GrantEventKind, GrantUsage, MpsDetour};
use crate::sharing::watch::{EndReason, Numbers, Trouble};

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
                Some(finding) => match claim_finding(finding) {
                    Some(ClaimFinding::Grant(event)) => reporter.grant_changed(event),
                    Some(ClaimFinding::Detour(detour)) => reporter.went_around_mps(detour),
                    None => {}
                },
                None => {
                    stop.cancelled().await;
                    return Ok(());
                }
            }
        }
    }
}

/// What a claim's users are told.
#[derive(Debug, PartialEq, Eq)]
enum ClaimFinding {
    Grant(GrantEvent),
    Detour(MpsDetour),
}

/// What concerns a claim's memory, or its way to MPS. What concerns no claim, and what is tried again, is in the log and the
/// metrics.
fn claim_finding(finding: Finding) -> Option<ClaimFinding> {
    let Finding { claim, gpu, kind, .. } = finding;
    let claim = claim?;
    let detour =
        |pid, stage| ClaimFinding::Detour(MpsDetour { claim: claim.clone(), gpu: gpu.clone(), pid, stage });
    let (numbers, kind) = match kind {
        FindingKind::OverGrant(numbers) => (numbers, GrantEventKind::Over),
        FindingKind::Ended { process, reason: EndReason::OverGrant(numbers), .. } => {
            (numbers, GrantEventKind::Ended { pid: process.pid })
        }
        FindingKind::AroundMps { process } => return Some(detour(process.pid, DetourStage::Found)),
        FindingKind::Ended { process, reason: EndReason::AroundMps, .. } => {
            return Some(detour(process.pid, DetourStage::Ended));
        }
        FindingKind::Recovered { from: Trouble::Memory, numbers, .. } => (numbers, GrantEventKind::Within),
        FindingKind::Recovered { .. }
        | FindingKind::Ended { reason: EndReason::Foreign, .. }
        | FindingKind::TooManyProcesses { .. }
        | FindingKind::Foreign { .. }
        | FindingKind::NotEnded { .. } => return None,
    };
    Some(ClaimFinding::Grant(GrantEvent { claim, gpu, usage: usage(numbers), kind }))
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
    fn a_claim_hears_what_concerns_its_memory_with_both_numbers_and_who_goes_around_mps() {
        let mib = Bytes::from_mib;
        let numbers =
            Numbers { limit: mib(1000), used: mib(3000), peak: mib(3000), processes: 2, uncounted: 0 };
        let process = ProcessKey { pid: 7, started: 1 };
        let ended =
            |reason| FindingKind::Ended { process, used: Some(mib(2500)), how: EndMethod::Terminate, reason };
        for (kind, expected) in [
            (FindingKind::OverGrant(numbers), GrantEventKind::Over),
            (ended(EndReason::OverGrant(numbers)), GrantEventKind::Ended { pid: 7 }),
            (
                FindingKind::Recovered { from: Trouble::Memory, numbers, lasted: Duration::from_millis(1) },
                GrantEventKind::Within,
            ),
        ] {
            let Some(ClaimFinding::Grant(event)) = claim_finding(finding(true, kind)) else {
                panic!("no event of {expected:?}");
            };
            assert_eq!(event.kind, expected);
            assert_eq!((event.usage.used, event.usage.granted), (mib(3000), mib(1000)));
        }
        let fewer =
            FindingKind::Recovered { from: Trouble::Processes, numbers, lasted: Duration::from_millis(1) };
        assert_eq!(claim_finding(finding(true, fewer)), None);
        assert_eq!(claim_finding(finding(false, ended(EndReason::Foreign))), None, "of no claim");
        for (kind, stage) in [
            (FindingKind::AroundMps { process }, DetourStage::Found),
            (ended(EndReason::AroundMps), DetourStage::Ended),
        ] {
            let Some(ClaimFinding::Detour(detour)) = claim_finding(finding(true, kind)) else {
                panic!("no word of {stage:?}");
            };
            assert_eq!((detour.pid, detour.stage), (7, stage));
        }
    }
}
