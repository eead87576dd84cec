//! Groups the claims of one device into accounts: claims that one pod has are counted together. A claim that has the
//! device for itself has an account without limits, for the metrics.

use std::collections::{BTreeMap, HashMap};

use super::knowledge::Knowledge;
use super::shares::WatchedDevice;
use crate::model::claim::{ClaimRef, PodRef};
use crate::model::names::PodUid;
use crate::model::quantity::Bytes;
use crate::model::share::{Grant, Isolation};
use crate::sharing::watch::{Account, ClaimGrant, ObservedProcess};

/// A device's accounts without their processes, and whose account a pod's processes are on.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Roster {
    accounts: Vec<Vec<ClaimGrant>>,
    of_pod: HashMap<PodUid, usize>,
}

impl Roster {
    /// `slots_per_share`: client processes in one block of slots.
    pub fn new(device: &WatchedDevice, knowledge: &Knowledge, slots_per_share: u32) -> Self {
        let mut accounts: BTreeMap<usize, Vec<ClaimGrant>> = BTreeMap::new();
        let mut of_pod: HashMap<PodUid, usize> = HashMap::new();
        for (number, granted) in all_granted(device, knowledge, slots_per_share).into_iter().enumerate() {
            let pods = granted.pods.clone();
            let mut together = vec![granted];
            for pod in &pods {
                if let Some(others) = of_pod.get(pod).and_then(|number| accounts.remove(number)) {
                    together.extend(others);
                }
            }
            together.sort_by(|a, b| a.claim.cmp(&b.claim));
            of_pod
                .extend(together.iter().flat_map(|claim| claim.pods.iter().map(|pod| (pod.clone(), number))));
            accounts.insert(number, together);
        }
        let numbers: HashMap<usize, usize> =
            accounts.keys().enumerate().map(|(now, was)| (*was, now)).collect();
        of_pod.values_mut().for_each(|number| *number = numbers.get(number).copied().unwrap_or_default());
        Self { accounts: accounts.into_values().collect(), of_pod }
    }

    /// The accounts with these processes, each on its pod's.
    pub fn fill(&self, processes: Vec<ObservedProcess>) -> Vec<Account> {
        let empty = |claims: &Vec<ClaimGrant>| Account { claims: claims.clone(), processes: Vec::new() };
        let mut accounts: Vec<Account> = self.accounts.iter().map(empty).collect();
        for seen in processes {
            let number = seen.pod.known().and_then(|pod| self.of_pod.get(pod));
            if let Some(account) = number.and_then(|number| accounts.get_mut(*number)) {
                account.processes.push(seen);
            }
        }
        accounts
    }
}

fn all_granted(device: &WatchedDevice, knowledge: &Knowledge, slots_per_share: u32) -> Vec<ClaimGrant> {
    let uids = |pods: &[PodRef]| pods.iter().map(|pod| pod.uid.clone()).collect::<Vec<PodUid>>();
    if device.is_alone() {
        let alone = device.alone.iter();
        return alone.map(|claim| unlimited(claim, uids(knowledge.named_pods(&claim.uid)))).collect();
    }
    let shares = device.shares.iter();
    shares
        .map(|(claim, grant)| granted(claim, grant, &uids(knowledge.pods(&claim.uid)), slots_per_share))
        .collect()
}

fn unlimited(claim: &ClaimRef, pods: Vec<PodUid>) -> ClaimGrant {
    ClaimGrant { claim: claim.uid.clone(), memory: None, part: None, processes: u32::MAX, pods }
}

fn granted(claim: &ClaimRef, grant: &Grant, pods: &[PodUid], slots_per_share: u32) -> ClaimGrant {
    // Slots are those of an MPS server; without one nobody runs out of them.
    let processes = match grant.isolation {
        Isolation::Mps | Isolation::Kernel => grant.slots.saturating_mul(slots_per_share),
        Isolation::None | Isolation::Mig => u32::MAX,
    };
    ClaimGrant {
        claim: claim.uid.clone(),
        memory: (grant.memory != Bytes(0)).then_some(grant.memory),
        part: (grant.memory != Bytes(0)).then(|| grant.memory_per_process()),
        processes,
        pods: pods.to_vec(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::knowledge::ClaimUsers;
    use super::super::shares::tests::board;
    use super::*;
    use crate::model::process::{ProcessKey, ProcessPod};
    use crate::sharing::watch::ProcessAccess;

    fn claim(name: &str) -> ClaimRef {
        ClaimRef { namespace: "team".into(), name: name.into(), uid: name.into() }
    }

    /// Claims and their pods.
    fn roster(claims: &[(&str, &[&str])]) -> Roster {
        let memory = Bytes::from_mib(1000);
        let grant = Grant { memory, compute: None, slots: 2, processes: 2, isolation: Isolation::Mps };
        let shares: Vec<_> = claims.iter().map(|(name, _)| (claim(name), grant)).collect();
        let device = WatchedDevice { shares, ..board("gpu-0", "GPU-0") };
        let mut knowledge = Knowledge::new(None);
        knowledge.keep(device.claims());
        for (name, pods) in claims {
            let pod = |uid: &&str| PodRef { namespace: "team".into(), name: "p".into(), uid: (*uid).into() };
            let users = ClaimUsers { pods: pods.iter().map(pod).collect(), others: false };
            knowledge.users_answered(&(*name).into(), crate::model::time::Moment::ZERO, Some(users));
        }
        Roster::new(&device, &knowledge, 3)
    }

    fn names(roster: &Roster) -> Vec<String> {
        let name = |account: &Vec<ClaimGrant>| {
            account.iter().map(|granted| granted.claim.to_string()).collect::<Vec<_>>().join("+")
        };
        let mut names: Vec<_> = roster.accounts.iter().map(name).collect();
        names.sort();
        names
    }

    #[test]
    fn claims_are_counted_together_if_a_pod_has_both() {
        assert_eq!(names(&roster(&[("a", &["p"]), ("b", &["q"])])), ["a", "b"]);
        assert_eq!(names(&roster(&[("a", &["p"]), ("b", &["p"])])), ["a+b"]);
        let chain = roster(&[("a", &["p"]), ("x", &[]), ("b", &["q"]), ("c", &["q", "p"]), ("d", &["r"])]);
        assert_eq!(names(&chain), ["a+b+c", "d", "x"]);
        let seen = |pid, pod: &str| ObservedProcess {
            process: ProcessKey { pid, started: 1 },
            used: None,
            access: ProcessAccess::Other,
            pod: ProcessPod::Known(pod.into()),
        };
        let filled = chain.fill(vec![seen(1, "p"), seen(2, "q"), seen(3, "r"), seen(4, "nobody's")]);
        let of = |count: usize| filled.iter().filter(|account| account.processes.len() == count).count();
        assert_eq!((of(2), of(1), of(0)), (1, 1, 1));
    }

    #[test]
    fn a_grant_becomes_a_limit_a_part_and_a_number_of_processes() {
        let granted = &roster(&[("a", &["p"])]).accounts[0][0];
        assert_eq!(granted.memory, Some(Bytes::from_mib(1000)));
        assert_eq!(granted.part, Some(Bytes::from_mib(500)));
        assert_eq!(granted.processes, 6);
    }
}
