//! What NVML's figures mean for those who hold a device: how busy each pod is, and what memory no process accounts for.
//! Pure.

use std::collections::BTreeMap;

use super::knowledge::Knowledge;
use super::shares::WatchedDevice;
use super::table::KnownProcess;
use crate::host::cgroup::ProcessOwner;
use crate::model::names::{ClaimUid, DeviceUuid, PodUid};
use crate::model::quantity::Bytes;
use crate::nvml::{Figures, FiguresSubject, GpuProcess, MigHolder, ProcessActivity};

/// A device's figures, and what the processes on it have to do with them.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct Measured {
    pub figures: Figures,
    pub activity: PodActivity,
    /// Of MPS servers, for all shares of the board together.
    pub of_servers: Option<f64>,
    /// In use on the board, and by none of the processes that NVML lists.
    pub uncounted: Option<Bytes>,
}

/// How busy the multiprocessors are with whose work: 0 to 1 of the device.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) enum PodActivity {
    /// NVML does not tell, as of shares that an MPS server works for.
    #[default]
    Unknown,
    /// Who is not among them did nothing.
    Known(BTreeMap<PodUid, f64>),
    /// Everything is the work of the one pod that there is.
    OfThePod(PodUid, f64),
    /// By the MPS servers of claims that have one of their own. Of who is not among them nothing is known.
    ByOwnServer(BTreeMap<PodUid, f64>),
}

impl PodActivity {
    pub fn of(&self, pod: Option<&PodUid>) -> Option<f64> {
        match self {
            Self::Unknown => None,
            Self::Known(by_pod) => Some(pod.and_then(|pod| by_pod.get(pod)).copied().unwrap_or(0.0)),
            Self::OfThePod(only, all) => (pod? == only).then_some(*all),
            Self::ByOwnServer(by_pod) => by_pod.get(pod?).copied(),
        }
    }
}

/// What is read for these devices: of a MIG device its memory and how busy it is, and the rest of its board.
pub(super) fn subjects(
    devices: &BTreeMap<DeviceUuid, WatchedDevice>,
    knowledge: &Knowledge,
) -> Vec<FiguresSubject> {
    let mut subjects = std::collections::BTreeSet::new();
    for (uuid, device) in devices {
        if device.is_mig {
            let pod = only_pod(device, knowledge).cloned();
            let holder = device.alone.first().map(|claim| MigHolder { claim: claim.uid.clone(), pod });
            subjects.insert(FiguresSubject::Mig { uuid: uuid.clone(), holder });
        }
        subjects.insert(FiguresSubject::Board(device.board.clone()));
    }
    subjects.into_iter().collect()
}

/// Folds the figures of a device that claims hold with the processes on it.
pub(super) fn measure<'a>(
    device: &WatchedDevice,
    figures: Figures,
    listed: &[GpuProcess],
    knowledge: &Knowledge,
    process: impl Fn(u32) -> Option<&'a KnownProcess>,
) -> Measured {
    let counted =
        listed.iter().filter_map(|one| one.used).fold(0_u64, |sum, used| sum.saturating_add(used.0));
    let uncounted = figures.memory.map(|memory| Bytes(memory.used.0.saturating_sub(counted)));
    if device.is_mig {
        // Of the instance, all processes together: whose work it is can be told where there is one pod.
        let busy = figures.busy_percent.zip(only_pod(device, knowledge));
        let activity =
            busy.map(|(percent, pod)| PodActivity::OfThePod(pod.clone(), capped(f64::from(percent) / 100.0)));
        return Measured { figures, activity: activity.unwrap_or_default(), ..Measured::default() };
    }
    let ProcessActivity::Known(by_pid) = &figures.processes else {
        return Measured { figures, uncounted, ..Measured::default() };
    };
    let mut by_pod: BTreeMap<PodUid, f64> = BTreeMap::new();
    let (mut of_servers, mut by_claim) = (None, BTreeMap::new());
    for known in listed.iter().filter_map(|one| process(one.pid)) {
        let busy = by_pid.get(&known.process.pid).copied().unwrap_or(0.0);
        if knowledge.is_server(known) {
            of_servers = Some(capped(of_servers.unwrap_or(0.0) + busy));
            if let Some(claim) = knowledge.served_claim(known) {
                *by_claim.entry(claim).or_insert(0.0) += busy;
            }
        } else if let (ProcessOwner::Pod { pod, .. }, true) = (&known.owner, known.believed) {
            let sum = by_pod.entry(pod.clone()).or_default();
            *sum = capped(*sum + busy);
        }
    }
    let activity = match (device.groups.is_empty(), of_servers) {
        (true, _) => PodActivity::Known(by_pod),
        _ if device.groups.iter().all(|group| group.claim().is_some()) => {
            PodActivity::ByOwnServer(by_own_server(&by_claim, &by_pod, knowledge))
        }
        // A server works for all of its clients: whose work it is can be told where there is one pod.
        (false, Some(of_servers)) => match only_pod(device, knowledge) {
            Some(pod) => {
                let own = by_pod.get(pod).copied().unwrap_or(0.0);
                PodActivity::OfThePod(pod.clone(), capped(own + of_servers))
            }
            None => PodActivity::Unknown,
        },
        (false, None) => PodActivity::Unknown,
    };
    Measured { figures, activity, of_servers, uncounted }
}

/// A claim's server works for all pods of the claim: whose work it is can be told where there is one.
fn by_own_server(
    by_claim: &BTreeMap<&ClaimUid, f64>,
    by_pod: &BTreeMap<PodUid, f64>,
    knowledge: &Knowledge,
) -> BTreeMap<PodUid, f64> {
    let of_pod = |(claim, busy): (&&ClaimUid, &f64)| match knowledge.named_pods(claim) {
        [pod] => {
            let own = by_pod.get(&pod.uid).copied().unwrap_or(0.0);
            Some((pod.uid.clone(), capped(own + busy)))
        }
        _ => None,
    };
    by_claim.iter().filter_map(of_pod).collect()
}

/// The one pod of the one claim that has the device for itself.
fn only_pod<'a>(device: &WatchedDevice, knowledge: &'a Knowledge) -> Option<&'a PodUid> {
    let [claim] = device.alone.as_slice() else { return None };
    match knowledge.named_pods(&claim.uid) {
        [pod] if device.is_alone() => Some(&pod.uid),
        _ => None,
    }
}

fn capped(ratio: f64) -> f64 {
    ratio.clamp(0.0, 1.0)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::super::knowledge::{ClaimUsers, Servers};
    use super::super::shares::tests::board;
    use super::*;
    use crate::model::claim::{ClaimRef, PodRef};
    use crate::model::process::ProcessKey;
    use crate::model::share::{Grant, Isolation, MpsGroup};
    use crate::model::time::Moment;
    use crate::nvml::{ContextKind, DeviceMemory};

    const SERVER: u32 = 9;

    fn claim(name: &str) -> ClaimRef {
        ClaimRef { namespace: "team".into(), name: name.into(), uid: name.into() }
    }

    fn knowledge(device: &WatchedDevice, pods: &[&str]) -> Knowledge {
        let mut knowledge = Knowledge::new(None);
        knowledge.keep(device.claims());
        let pod = |uid: &&str| PodRef { namespace: "team".into(), name: "p".into(), uid: (*uid).into() };
        for claim in device.claims() {
            let users = ClaimUsers { pods: pods.iter().map(pod).collect(), others: false };
            knowledge.users_answered(&claim.uid, Moment::ZERO, Some(users));
        }
        let served = device.groups.iter().find_map(|group| group.claim().cloned());
        let processes = BTreeMap::from([(ProcessKey { pid: SERVER, started: 1 }, served)]);
        knowledge.servers_answered(Moment::ZERO, Some(Servers { processes, pods: BTreeSet::new() }));
        knowledge
    }

    fn figures(by_pid: &[(u32, f64)], used: u64) -> Figures {
        let memory = DeviceMemory {
            total: Bytes::from_mib(1000),
            reserved: Bytes::from_mib(100),
            used: Bytes::from_mib(used),
        };
        let processes = ProcessActivity::Known(by_pid.iter().copied().collect());
        Figures { memory: Some(memory), processes, ..Figures::default() }
    }

    /// Processes with 100 MiB each: 1 and 2 of pod p, 3 of pod q, the server.
    fn measured(device: &WatchedDevice, pods: &[&str], figures: Figures) -> Measured {
        let owner = |pid| match pid {
            1 | 2 => ProcessOwner::Pod { pod: "p".into(), container: None },
            3 => ProcessOwner::Pod { pod: "q".into(), container: None },
            _ => ProcessOwner::Host,
        };
        let all: Vec<_> = [1, 2, 3, SERVER]
            .map(|pid| KnownProcess {
                process: ProcessKey { pid, started: 1 },
                owner: owner(pid),
                believed: true,
            })
            .into();
        let listed = all.iter().map(|known| GpuProcess {
            pid: known.process.pid,
            used: Some(Bytes::from_mib(100)),
            context: ContextKind::Compute,
        });
        let listed: Vec<_> = listed.collect();
        let find = |pid| all.iter().find(|known| known.process.pid == pid);
        measure(device, figures, &listed, &knowledge(device, pods), find)
    }

    #[test]
    fn a_pod_is_as_busy_as_its_processes_and_no_busier_than_the_device() {
        let device = WatchedDevice { alone: vec![claim("a")], ..board("gpu-0", "GPU-0") };
        let found = measured(&device, &["p", "q"], figures(&[(1, 0.25), (2, 0.5), (77, 1.0)], 0));
        let of = |pod: &str| found.activity.of(Some(&pod.into()));
        assert_eq!((of("p"), of("q"), of("idle")), (Some(0.75), Some(0.0), Some(0.0)));
        let found = measured(&device, &["p"], figures(&[(1, 0.75), (2, 0.75)], 0));
        assert_eq!(found.activity.of(Some(&"p".into())), Some(1.0));
    }

    #[test]
    fn of_shares_the_server_alone_is_known() {
        let groups = BTreeSet::from([MpsGroup::new(["GPU-0".into()])]);
        let memory = Bytes::from_mib(100);
        let grant = Grant { memory, compute: None, slots: 1, processes: 1, isolation: Isolation::Mps };
        let shared = WatchedDevice {
            shares: vec![(claim("a"), grant)],
            groups: groups.clone(),
            ..board("gpu-0", "GPU-0")
        };
        let found = measured(&shared, &["p"], figures(&[(SERVER, 0.5)], 0));
        assert_eq!((found.activity.of(Some(&"p".into())), found.of_servers), (None, Some(0.5)));
        // A whole GPU that one pod's clients share: all is that pod's work, the server's and what goes around it.
        let alone = WatchedDevice { alone: vec![claim("a")], groups, ..board("gpu-0", "GPU-0") };
        let of = |pods: &[&str]| measured(&alone, pods, figures(&[(SERVER, 0.5), (1, 0.25)], 0)).activity;
        assert_eq!(
            (of(&["p"]), of(&["p", "q"])),
            (PodActivity::OfThePod("p".into(), 0.75), PodActivity::Unknown)
        );
    }

    #[test]
    fn a_share_with_a_server_of_its_own_is_as_busy_as_the_server() {
        let grant = |isolation| Grant {
            memory: Bytes::from_mib(100),
            compute: None,
            slots: 1,
            processes: 1,
            isolation,
        };
        let own = |claim: &str| MpsGroup::new(["GPU-0".into()]).of_claim(claim.into());
        let device = WatchedDevice {
            shares: ["a", "b"].map(|name| (claim(name), grant(Isolation::Mps))).into(),
            groups: BTreeSet::from([own("a"), own("b")]),
            ..board("gpu-0", "GPU-0")
        };
        let of = |pods: &[&str], pod: &str| {
            measured(&device, pods, figures(&[(SERVER, 0.5)], 0)).activity.of(Some(&pod.into()))
        };
        assert_eq!(of(&["p"], "p"), Some(0.5));
        assert_eq!(of(&["p"], "q"), None, "of the other share's server nothing is known yet");
        assert_eq!(of(&["p", "q"], "p"), None, "one server for two pods");
        // Beside a share of the GPU's common daemon, as while the setting changes, nothing is told.
        let mixed =
            WatchedDevice { groups: BTreeSet::from([own("a"), MpsGroup::new(["GPU-0".into()])]), ..device };
        assert_eq!(measured(&mixed, &["p"], figures(&[(SERVER, 0.5)], 0)).activity, PodActivity::Unknown);
    }

    #[test]
    fn memory_that_no_process_has_is_told_of_boards() {
        let device = WatchedDevice { alone: vec![claim("a")], ..board("gpu-0", "GPU-0") };
        let uncounted = |device: &WatchedDevice, used| measured(device, &[], figures(&[], used)).uncounted;
        assert_eq!(uncounted(&device, 408), Some(Bytes::from_mib(8)));
        assert_eq!(uncounted(&device, 300), Some(Bytes(0)), "the lists are a moment older");
        assert_eq!(uncounted(&WatchedDevice { is_mig: true, ..device }, 408), None);
    }

    #[test]
    fn the_work_of_a_mig_device_is_its_pods_if_there_is_one() {
        let device = WatchedDevice { alone: vec![claim("c")], is_mig: true, ..board("gpu-0-mig", "GPU-0") };
        let busy = |percent| Figures { busy_percent: percent, ..Figures::default() };
        let of = |pods: &[&str], percent| measured(&device, pods, busy(percent)).activity;
        assert_eq!(of(&["p"], Some(40)), PodActivity::OfThePod("p".into(), 0.4));
        assert_eq!(of(&["p"], Some(4_000)), PodActivity::OfThePod("p".into(), 1.0));
        assert_eq!(of(&["p"], None), PodActivity::Unknown);
        assert_eq!(of(&["p", "q"], Some(40)), PodActivity::Unknown, "whose it is, nobody tells");
    }

    #[test]
    fn what_nvml_does_not_tell_is_absent() {
        let device = WatchedDevice { alone: vec![claim("a")], ..board("gpu-0", "GPU-0") };
        let found = measured(&device, &["p"], Figures::default());
        assert_eq!(found, Measured::default());
        assert_eq!(found.activity.of(Some(&"p".into())), None);
    }

    #[test]
    fn a_mig_device_has_its_boards_figures_read_once() {
        let mig = |uuid: &str| (uuid.into(), WatchedDevice { is_mig: true, ..board("gpu-0-mig", "GPU-0") });
        let whole = ("GPU-1".into(), board("gpu-1", "GPU-1"));
        let devices = BTreeMap::from([mig("MIG-a"), mig("MIG-b"), whole]);
        let expected = [
            FiguresSubject::Board("GPU-0".into()),
            FiguresSubject::Board("GPU-1".into()),
            FiguresSubject::Mig { uuid: "MIG-a".into(), holder: None },
            FiguresSubject::Mig { uuid: "MIG-b".into(), holder: None },
        ];
        assert_eq!(subjects(&devices, &Knowledge::new(None)), expected);
    }

    /// Pods use a claim one after the other: what one did is none of the next one's work.
    #[test]
    fn a_mig_device_is_held_by_its_claim_and_the_claims_only_pod() {
        let device = WatchedDevice { alone: vec![claim("c")], is_mig: true, ..board("gpu-0-mig", "GPU-0") };
        let devices = BTreeMap::from([("MIG-a".into(), device)]);
        let holder = |pods: &[&str]| {
            let subjects = subjects(&devices, &knowledge(&devices[&"MIG-a".into()], pods));
            subjects.into_iter().find_map(|subject| match subject {
                FiguresSubject::Mig { holder, .. } => holder,
                FiguresSubject::Board(_) => None,
            })
        };
        let with = |pod: Option<&str>| Some(MigHolder { claim: "c".into(), pod: pod.map(Into::into) });
        assert_eq!(holder(&["p"]), with(Some("p")));
        assert_eq!(holder(&["q"]), with(Some("q")));
        assert_eq!(holder(&["p", "q"]), with(None));
    }
}
