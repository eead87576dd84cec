//! The usage of each claim and pod: what dashboards and autoscalers read.

use std::collections::BTreeMap;

use super::watch::{Account, BoardLook, ClaimGrant, ObservedProcess};
use crate::model::names::{ClaimUid, DeviceUuid, PodUid};
use crate::model::quantity::Bytes;

/// One pod's use of one claim on one board. Without a pod: none is known yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Usage {
    pub gpu: DeviceUuid,
    pub claim: ClaimUid,
    pub pod: Option<PodUid>,
    /// Of the claim, for all its pods together.
    pub limit: Option<Bytes>,
    pub used: Bytes,
    pub peak: Bytes,
    pub processes: usize,
}

type Peaks = BTreeMap<(ClaimUid, Option<PodUid>), Bytes>;

/// A row for each claim and pod of the board. Peaks of rows that are gone are forgotten.
pub(super) fn usage(look: &BoardLook, peaks: &mut Peaks) -> Vec<Usage> {
    let mut rows: Vec<Usage> = look.accounts.iter().flat_map(|account| rows(&look.gpu, account)).collect();
    let mut kept = Peaks::new();
    for row in &mut rows {
        let key = (row.claim.clone(), row.pod.clone());
        row.peak = peaks.get(&key).copied().unwrap_or_default().max(row.used);
        kept.insert(key, row.peak);
    }
    *peaks = kept;
    rows
}

fn rows(gpu: &DeviceUuid, account: &Account) -> Vec<Usage> {
    let mut rows = Vec::new();
    for granted in &account.claims {
        let row = |pod: Option<&PodUid>| Usage {
            gpu: gpu.clone(),
            claim: granted.claim.clone(),
            pod: pod.cloned(),
            limit: granted.memory,
            used: Bytes(0),
            peak: Bytes(0),
            processes: 0,
        };
        match granted.pods.as_slice() {
            [] => rows.push(row(None)),
            pods => rows.extend(pods.iter().map(|pod| row(Some(pod)))),
        }
    }
    for seen in &account.processes {
        charge(&mut rows, &account.claims, seen);
    }
    rows
}

/// A pod's several claims on one board are filled in their order, and the last one has what is too much: NVML
/// tells what a process has, not by which claim.
fn charge(rows: &mut [Usage], claims: &[ClaimGrant], seen: &ObservedProcess) {
    let mut left = seen.used.unwrap_or_default().0;
    let taken: Vec<u64> = claims
        .iter()
        .map(|granted| {
            let its = rows.iter().filter(|row| row.claim == granted.claim);
            its.fold(0_u64, |sum, row| sum.saturating_add(row.used.0))
        })
        .collect();
    let mut its = rows.iter_mut().filter(|row| row.pod.as_ref() == seen.pod.known()).peekable();
    let mut first = true;
    while let Some(row) = its.next() {
        let before = claims.iter().zip(&taken).find(|(granted, _)| granted.claim == row.claim);
        let room = before.map_or(0, |(granted, taken)| match granted.memory {
            Some(limit) => limit.0.saturating_sub(*taken),
            None => u64::MAX,
        });
        let part = if its.peek().is_some() { left.min(room) } else { left };
        row.used.0 = row.used.0.saturating_add(part);
        left -= part;
        row.processes += usize::from(std::mem::take(&mut first));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::process::{ProcessKey, ProcessPod};
    use crate::sharing::watch::ProcessAccess;

    fn granted(claim: &str, mib: u64, pods: &[&str]) -> ClaimGrant {
        ClaimGrant {
            claim: ClaimUid::from(claim),
            memory: Some(Bytes::from_mib(mib)),
            part: None,
            processes: 3,
            pods: pods.iter().map(|pod| PodUid::from(*pod)).collect(),
        }
    }

    fn seen(pid: u32, pod: &str, mib: u64) -> ObservedProcess {
        let process = ProcessKey { pid, started: 1 };
        ObservedProcess {
            process,
            used: Some(Bytes::from_mib(mib)),
            access: ProcessAccess::Other,
            pod: ProcessPod::Known(PodUid::from(pod)),
        }
    }

    fn look(claims: Vec<ClaimGrant>, processes: Vec<ObservedProcess>) -> BoardLook {
        BoardLook { gpu: "GPU-0".into(), accounts: vec![Account { claims, processes }], foreign: vec![] }
    }

    fn told(rows: &[Usage]) -> Vec<(&str, &str, u64, u64, usize)> {
        let pod =
            |row: &Usage| row.pod.as_ref().map_or("", |pod| if pod.as_str() == "p" { "p" } else { "q" });
        rows.iter()
            .map(|row| {
                (row.claim.as_str(), pod(row), row.used.mib_floor(), row.peak.mib_floor(), row.processes)
            })
            .collect()
    }

    #[test]
    fn every_pod_has_its_own_row_and_remembers_its_peak() {
        let mut peaks = Peaks::new();
        let claim = || granted("c", 100, &["p", "q"]);
        let first = look(vec![claim()], vec![seen(1, "p", 30), seen(2, "q", 50), seen(3, "p", 5)]);
        assert_eq!(told(&usage(&first, &mut peaks)), [("c", "p", 35, 35, 2), ("c", "q", 50, 50, 1)]);
        let second = look(vec![claim()], vec![seen(1, "p", 10)]);
        assert_eq!(told(&usage(&second, &mut peaks)), [("c", "p", 10, 35, 1), ("c", "q", 0, 50, 0)]);
        let third = look(vec![granted("c", 100, &["q"])], vec![]);
        assert_eq!(told(&usage(&third, &mut peaks)), [("c", "q", 0, 50, 0)]);
        assert_eq!(peaks.len(), 1, "what is gone is forgotten");
    }

    #[test]
    fn several_claims_of_a_pod_are_filled_in_order_and_nothing_is_lost() {
        let claims = vec![granted("a", 100, &["p"]), granted("b", 100, &["p"])];
        let look = look(claims, vec![seen(1, "p", 80), seen(2, "p", 150)]);
        let rows = usage(&look, &mut Peaks::new());
        assert_eq!(told(&rows), [("a", "p", 100, 100, 2), ("b", "p", 130, 130, 0)]);
    }

    #[test]
    fn a_driver_that_tells_absurd_numbers_is_believed_to_the_end_of_them() {
        let absurd = ObservedProcess { used: Some(Bytes(u64::MAX)), ..seen(1, "p", 0) };
        let rows = usage(&look(vec![granted("c", 100, &["p"])], vec![absurd; 2]), &mut Peaks::new());
        assert_eq!((rows[0].used, rows[0].processes), (Bytes(u64::MAX), 2));
    }

    #[test]
    fn a_claim_whose_pods_are_unknown_is_shown_all_the_same() {
        let rows = usage(&look(vec![granted("c", 100, &[])], vec![]), &mut Peaks::new());
        assert_eq!(told(&rows), [("c", "", 0, 0, 0)]);
        assert_eq!(rows[0].limit, Some(Bytes::from_mib(100)));
    }
}
