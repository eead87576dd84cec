//! The watchdog's findings, with the names that users know: for events, conditions, metrics and the log.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use tracing::{Span, debug, error_span, info, warn};

use super::act::{EndOutcome, EndRequest};
use super::knowledge::Knowledge;
use super::rows::{self, ClaimLabels};
use super::shares::WatchedDevice;
use crate::model::claim::{ClaimRef, PodRef};
use crate::model::names::{DeviceName, DeviceUuid, PodUid};
use crate::model::process::{ProcessKey, ProcessPod};
use crate::model::quantity::Bytes;
use crate::sharing::watch::{AccountId, EndMethod, EndReason, Numbers, ObservedProcess, Trouble, Verdict};

/// Something to be told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// The claim that it is about; none: a process of no claim.
    pub claim: Option<ClaimRef>,
    /// The claim's pods, as far as they are known.
    pub pods: Vec<PodRef>,
    pub gpu: DeviceUuid,
    pub device: DeviceName,
    pub kind: FindingKind,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FindingKind {
    /// The claim uses more than it was granted: told once, until it recovers.
    OverGrant(Numbers),
    /// More processes than the claim's client slots are for.
    TooManyProcesses {
        processes: usize,
        allowed: u32,
    },
    Recovered {
        from: Trouble,
        numbers: Numbers,
        lasted: Duration,
    },
    /// A process of no claim uses a GPU that claims hold.
    Foreign {
        process: ProcessKey,
        used: Option<Bytes>,
        pod: ProcessPod,
    },
    /// A process of a share works on the GPU around the claim's own MPS daemon.
    AroundMps {
        process: ProcessKey,
    },
    Ended {
        process: ProcessKey,
        used: Option<Bytes>,
        how: EndMethod,
        reason: EndReason,
    },
    /// A process should have been ended, and is tried again.
    NotEnded {
        process: ProcessKey,
        problem: String,
    },
}

impl fmt::Display for FindingKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OverGrant(numbers) => write!(
                f,
                "uses {} MiB and was granted {} MiB ({} processes)",
                numbers.used.mib_ceil(),
                numbers.limit.mib_floor(),
                numbers.processes
            ),
            Self::TooManyProcesses { processes, allowed } => {
                write!(f, "has {processes} processes on the GPU and client slots for {allowed}")
            }
            Self::Recovered { from, numbers, lasted } => {
                let seconds = lasted.as_secs();
                match from {
                    Trouble::Memory => write!(
                        f,
                        "uses {} of its {} MiB again, after {seconds} s over its grant",
                        numbers.used.mib_ceil(),
                        numbers.limit.mib_floor()
                    ),
                    Trouble::Processes => {
                        write!(f, "has {} processes again, after {seconds} s of too many", numbers.processes)
                    }
                }
            }
            Self::Foreign { process, used, pod } => {
                write!(f, "process {process} uses {} of a GPU that was given to others", mib(*used))?;
                match pod {
                    ProcessPod::Known(pod) => write!(f, "; its pod ({pod}) has no claim for it"),
                    ProcessPod::None => f.write_str("; it belongs to no pod"),
                    ProcessPod::Hidden => f.write_str(
                        "; its pod is hidden: the name of its control group is longer than the kernel tells",
                    ),
                }
            }
            Self::AroundMps { process } => {
                write!(
                    f,
                    "process {process} works on the GPU around the claim's MPS daemon, without its limits"
                )
            }
            Self::Ended { process, used, how, reason } => {
                let how = match how {
                    EndMethod::Terminate => "terminated by the MPS daemon and killed",
                    EndMethod::Kill => "killed",
                };
                let why = match reason {
                    EndReason::OverGrant(_) => ": the claim was over its grant",
                    EndReason::AroundMps => ": it went around the claim's MPS daemon",
                    EndReason::Foreign => ": it was of no claim",
                };
                write!(f, "process {process} with {} was {how}{why}", mib(*used))
            }
            Self::NotEnded { process, problem } => {
                write!(f, "process {process} should have been ended, but was not: {problem}")
            }
        }
    }
}

fn mib(used: Option<Bytes>) -> String {
    used.map_or("an unknown amount of memory".to_owned(), |used| format!("{} MiB", used.mib_ceil()))
}

impl Finding {
    pub(super) fn log(&self) {
        let (device, gpu, kind) = (&self.device, &self.gpu, &self.kind);
        let claim = self.claim.as_ref().map_or("none".to_owned(), ToString::to_string);
        match kind {
            FindingKind::Recovered { .. } => info!(claim, %device, %gpu, "{kind}"),
            _ => warn!(claim, %device, %gpu, "{kind}"),
        }
    }
}

type Devices = BTreeMap<DeviceUuid, WatchedDevice>;
/// A finding, and the row of the metrics that it counts on, if it is a claim's.
type Labelled = (Option<ClaimLabels>, Finding);

/// What a verdict means to people: one finding for each claim concerned.
pub(super) fn of_verdict(devices: &Devices, knowledge: &Knowledge, verdict: &Verdict) -> Vec<Labelled> {
    let context = FindingContext { devices, knowledge };
    match verdict {
        Verdict::Over { account_id, numbers } => {
            context.findings_for(account_id, None, &FindingKind::OverGrant(*numbers))
        }
        Verdict::Crowded { account_id, processes, allowed } => {
            let kind = FindingKind::TooManyProcesses { processes: *processes, allowed: *allowed };
            context.findings_for(account_id, None, &kind)
        }
        Verdict::Recovered { account_id, from, numbers, lasted } => {
            let kind = FindingKind::Recovered { from: *from, numbers: *numbers, lasted: *lasted };
            context.findings_for(account_id, None, &kind)
        }
        Verdict::Foreign { gpu, seen } => {
            let ObservedProcess { process, used, pod, .. } = seen.clone();
            let nobody = AccountId { gpu: gpu.clone(), claims: Vec::new() };
            context.findings_for(&nobody, None, &FindingKind::Foreign { process, used, pod })
        }
        Verdict::AroundMps { account_id, seen } => {
            let kind = FindingKind::AroundMps { process: seen.process };
            context.findings_for(account_id, seen.pod.known(), &kind)
        }
        Verdict::End { .. } => Vec::new(),
    }
}

/// Within which a process is ended: with the claim that it is ended for; several if they are counted together, none if
/// it is of no claim.
pub(super) fn end_span(devices: &Devices, account_id: &AccountId, process: ProcessKey) -> Span {
    let device = devices.get(&account_id.gpu);
    let claims = account_id.claims.iter().filter_map(|uid| device?.holder(uid));
    let claims: Vec<&ClaimRef> = claims.collect();
    let all = |of: fn(&ClaimRef) -> &str| claims.iter().map(|one| of(one)).collect::<Vec<_>>().join(",");
    error_span!(
        "end",
        claim.uid = all(|claim| claim.uid.as_str()),
        claim.namespace = all(|claim| &claim.namespace),
        claim.name = all(|claim| &claim.name),
        pid = process.pid,
    )
}

/// What the end of a process means to people.
pub(super) fn of_end(
    devices: &Devices,
    knowledge: &Knowledge,
    ending: &EndRequest,
    outcome: EndOutcome,
) -> Vec<Labelled> {
    let EndRequest { account_id, seen: ObservedProcess { process, used, pod, .. }, reason, .. } = ending;
    let (process, used, reason) = (*process, *used, *reason);
    let kind = match outcome {
        EndOutcome::Ended(how) => FindingKind::Ended { process, used, how, reason },
        EndOutcome::Failed(problem) => FindingKind::NotEnded { process, problem },
        EndOutcome::Gone => {
            debug!(%process, "it had already ended");
            return Vec::new();
        }
    };
    FindingContext { devices, knowledge }.findings_for(account_id, pod.known(), &kind)
}

struct FindingContext<'a> {
    devices: &'a Devices,
    knowledge: &'a Knowledge,
}

impl FindingContext<'_> {
    /// One finding for each claim of the holder, or one about nobody. Counted on the row of that pod, or of
    /// the claim's first.
    fn findings_for(
        &self,
        account_id: &AccountId,
        pod: Option<&PodUid>,
        kind: &FindingKind,
    ) -> Vec<Labelled> {
        let Some(device) = self.devices.get(&account_id.gpu) else { return Vec::new() };
        let finding = |claim: Option<ClaimRef>, pods: &[PodRef]| Finding {
            claim,
            pods: pods.to_vec(),
            gpu: account_id.gpu.clone(),
            device: device.device.clone(),
            kind: kind.clone(),
        };
        if account_id.claims.is_empty() {
            return vec![(None, finding(None, &[]))];
        }
        let claims = account_id.claims.iter().filter_map(|uid| device.holder(uid));
        let mut told = Vec::new();
        for claim in claims {
            let pods = self.knowledge.pods(&claim.uid);
            let pod = pods.iter().find(|one| Some(&one.uid) == pod).or(pods.first());
            let row = rows::labels(&account_id.gpu, device, claim, pod);
            told.push((Some(row), finding(Some(claim.clone()), pods)));
        }
        told
    }
}
