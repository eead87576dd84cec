//! The rows of the metrics, from what the looks found: one for each claim, device and pod, one for each GPU. Pure.
//!
//! A figure that is not known is absent, and never 0: an autoscaler would believe it.

use std::collections::BTreeMap;

use prometheus_client::encoding::{EncodeLabelSet, LabelSetEncoder};

use super::knowledge::Knowledge;
use super::measured::Measured;
use super::shares::WatchedDevice;
use crate::model::claim::{ClaimRef, PodRef};
use crate::model::names::DeviceUuid;
use crate::node::containers::Containers;
use crate::nvml::DeviceIdentity;
use crate::sharing::Usage;

/// A claim's device, as one pod has it. Without a name of the pod: it is not known yet.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClaimLabels {
    pub namespace: String,
    pub pod: String,
    /// The pod's containers that use the claim, with commas between them; empty until kubelet has told.
    pub container: String,
    pub claim: String,
    /// The claim's requests that the device is for, with commas between them.
    pub request: String,
    /// The device's name in the ResourceSlice, and the pool there.
    pub device: String,
    pub pool: String,
    /// UUID of the GPU or MIG device.
    pub uuid: String,
}

impl ClaimLabels {
    /// The same pod, claim and device, whatever is known of the containers.
    pub(super) fn is_row_of(&self, other: &Self) -> bool {
        let Self { namespace, pod, container: _, claim, request, device, pool, uuid } = self;
        (namespace, pod, claim, request) == (&other.namespace, &other.pod, &other.claim, &other.request)
            && (device, pool, uuid) == (&other.device, &other.pool, &other.uuid)
    }
}

impl EncodeLabelSet for ClaimLabels {
    fn encode(&self, encoder: &mut LabelSetEncoder<'_>) -> Result<(), std::fmt::Error> {
        [
            ("namespace", self.namespace.as_str()),
            ("pod", &self.pod),
            // A label without a value keeps a scraper from naming our own container here.
            ("container", &self.container),
            ("claim", &self.claim),
            ("request", &self.request),
            ("device", &self.device),
            ("pool", &self.pool),
            ("UUID", &self.uuid),
        ]
        .encode(encoder)
    }
}

/// A GPU, or a MIG device. Boards in MIG mode are no devices: they have no name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GpuLabels {
    pub device: String,
    pub pool: String,
    pub uuid: String,
}

impl EncodeLabelSet for GpuLabels {
    fn encode(&self, encoder: &mut LabelSetEncoder<'_>) -> Result<(), std::fmt::Error> {
        [("device", self.device.as_str()), ("pool", &self.pool), ("UUID", &self.uuid)].encode(encoder)
    }
}

/// One claim's figures: bytes, parts of 1, processes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ClaimFigures {
    pub kind: HoldKind,
    /// None: its memory is not counted, or the device's is not known.
    pub limit: Option<u64>,
    pub used: u64,
    pub peak: u64,
    pub processes: usize,
    /// The part of the time in which a kernel of the pod ran.
    pub activity: Option<f64>,
    /// The part of the multiprocessors that each process may use.
    pub compute_limit: Option<f64>,
}

impl ClaimFigures {
    /// The part of the whole GPU's multiprocessors, over the time, that the pod can have kept busy at most: its kernels run
    /// on those alone that it may use. None of a MIG device, whose part of the GPU's multiprocessors is not known here.
    pub fn activity_of_gpu(&self) -> Option<f64> {
        match self.kind {
            HoldKind::Share | HoldKind::Whole => Some(self.activity? * self.compute_limit.unwrap_or(1.0)),
            HoldKind::Mig => None,
        }
    }
}

/// How a claim has a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HoldKind {
    /// With a grant that it can exceed.
    Share,
    Whole,
    Mig,
}

/// One GPU's figures.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct GpuFigures {
    /// Bytes.
    pub memory_total: Option<u64>,
    pub memory_reserved: Option<u64>,
    pub memory_used: Option<u64>,
    pub memory_uncounted: Option<u64>,
    pub temperature_celsius: Option<f64>,
    pub power_watts: Option<f64>,
    pub sm_clock_hertz: Option<f64>,
    pub memory_clock_hertz: Option<f64>,
    /// Parts of 1: of the time in which a kernel of anybody ran, and one of a share.
    pub activity: Option<f64>,
    pub shares_activity: Option<f64>,
}

/// A row with what the device is called outside Kubernetes.
#[derive(Debug, Clone, PartialEq)]
pub struct ClaimRow {
    pub labels: ClaimLabels,
    pub figures: ClaimFigures,
    pub board: DeviceIdentity,
    pub board_uuid: String,
    /// None: not a MIG device.
    pub mig: Option<DeviceIdentity>,
}

/// All rows that there are at one moment.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Rows {
    pub claims: Vec<ClaimRow>,
    pub gpus: BTreeMap<GpuLabels, GpuFigures>,
}

/// What the rows are made of.
pub(super) struct RowSources<'a> {
    pub devices: &'a BTreeMap<DeviceUuid, WatchedDevice>,
    pub knowledge: &'a Knowledge,
    pub usage: &'a BTreeMap<DeviceUuid, Vec<Usage>>,
    pub measured: &'a BTreeMap<DeviceUuid, Measured>,
    pub containers: &'a Containers,
}

impl RowSources<'_> {
    pub fn rows(&self) -> Rows {
        let mut claims: BTreeMap<ClaimLabels, ClaimRow> = BTreeMap::new();
        for (uuid, usages) in self.usage {
            let Some(device) = self.devices.get(uuid) else { continue };
            for row in usages.iter().filter_map(|usage| self.claim(uuid, device, usages, usage)) {
                match claims.get_mut(&row.labels) {
                    // Several shares of one GPU in one claim are one row.
                    Some(same) => same.figures.add(&row.figures),
                    None => drop(claims.insert(row.labels.clone(), row)),
                }
            }
        }
        let gpus = self.measured.iter().filter_map(|(uuid, measured)| self.gpu(uuid, measured));
        Rows { claims: claims.into_values().collect(), gpus: gpus.collect() }
    }

    fn claim(
        &self,
        uuid: &DeviceUuid,
        device: &WatchedDevice,
        all: &[Usage],
        usage: &Usage,
    ) -> Option<ClaimRow> {
        let claim = device.holder(&usage.claim)?;
        let pods = self.knowledge.named_pods(&claim.uid);
        let pod = pods.iter().find(|pod| Some(&pod.uid) == usage.pod.as_ref());
        let grant = device.shares.iter().find(|(share, _)| share.uid == claim.uid).map(|(_, grant)| grant);
        let measured = self.measured.get(uuid);
        let identity = |of: &DeviceUuid| {
            self.measured.get(of).map(|measured| measured.figures.identity.clone()).unwrap_or_default()
        };
        let kind = match (grant, device.is_mig) {
            (Some(_), _) => HoldKind::Share,
            (None, true) => HoldKind::Mig,
            (None, false) => HoldKind::Whole,
        };
        let memory = measured.and_then(|measured| measured.figures.memory);
        let usable = memory.map(|memory| memory.total.0.saturating_sub(memory.reserved.0));
        // NVML tells of a process, not by which of its pod's claims it works.
        let is_only = all.iter().filter(|one| one.pod == usage.pod && one.claim != usage.claim).count() == 0;
        let activity =
            measured.filter(|_| is_only).and_then(|measured| measured.activity.of(usage.pod.as_ref()));
        let figures = ClaimFigures {
            kind,
            limit: if kind == HoldKind::Share { usage.limit.map(|limit| limit.0) } else { usable },
            used: usage.used.0,
            peak: usage.peak.0,
            processes: usage.processes,
            activity,
            compute_limit: match kind {
                HoldKind::Share => {
                    grant.and_then(|grant| grant.compute).map(|part| f64::from(part.get()) / 100.0)
                }
                HoldKind::Whole => Some(1.0),
                HoldKind::Mig => None,
            },
        };
        Some(ClaimRow {
            labels: ClaimLabels {
                container: pod.map(|pod| self.containers.named(claim, pod)).unwrap_or_default(),
                ..labels(uuid, device, claim, pod)
            },
            figures,
            board: identity(&device.board),
            board_uuid: device.board.to_string(),
            mig: device.is_mig.then(|| identity(uuid)),
        })
    }

    fn gpu(&self, uuid: &DeviceUuid, measured: &Measured) -> Option<(GpuLabels, GpuFigures)> {
        let labels = match self.devices.get(uuid) {
            Some(device) => gpu_labels(uuid, device),
            None => {
                let part = self.devices.values().find(|device| device.board == *uuid)?;
                GpuLabels { device: String::new(), ..gpu_labels(uuid, part) }
            }
        };
        let figures = &measured.figures;
        let thousand = |milli: u32| f64::from(milli) / 1e3;
        let million = |mega: u32| f64::from(mega) * 1e6;
        let figures = GpuFigures {
            memory_total: figures.memory.map(|memory| memory.total.0),
            memory_reserved: figures.memory.map(|memory| memory.reserved.0),
            memory_used: figures.memory.map(|memory| memory.used.0),
            memory_uncounted: measured.uncounted.map(|bytes| bytes.0),
            temperature_celsius: figures.temperature_celsius.map(f64::from),
            power_watts: figures.power_milliwatts.map(thousand),
            sm_clock_hertz: figures.sm_clock_megahertz.map(million),
            memory_clock_hertz: figures.memory_clock_megahertz.map(million),
            activity: figures.busy_percent.map(|percent| f64::from(percent.min(100)) / 100.0),
            shares_activity: measured.of_servers,
        };
        Some((labels, figures))
    }
}

impl ClaimFigures {
    fn add(&mut self, other: &Self) {
        self.limit = self.limit.zip(other.limit).map(|(a, b)| a.saturating_add(b));
        self.used = self.used.saturating_add(other.used);
        self.peak = self.peak.saturating_add(other.peak);
        self.processes = self.processes.saturating_add(other.processes);
    }
}

/// The names of a claim's row, without those of containers.
pub(super) fn labels(
    uuid: &DeviceUuid,
    device: &WatchedDevice,
    claim: &ClaimRef,
    pod: Option<&PodRef>,
) -> ClaimLabels {
    let requests = device.requests.get(&claim.uid).into_iter().flatten();
    ClaimLabels {
        namespace: claim.namespace.clone(),
        pod: pod.map_or_else(String::new, |pod| pod.name.clone()),
        container: String::new(),
        claim: claim.name.clone(),
        request: requests.map(String::as_str).collect::<Vec<_>>().join(","),
        device: device.device.to_string(),
        pool: device.pool.node().to_string(),
        uuid: uuid.to_string(),
    }
}

pub(super) fn gpu_labels(uuid: &DeviceUuid, device: &WatchedDevice) -> GpuLabels {
    let (pool, device) = (device.pool.node().to_string(), device.device.to_string());
    GpuLabels { device, pool, uuid: uuid.to_string() }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::super::knowledge::ClaimUsers;
    use super::super::measured::PodActivity;
    use super::super::shares::tests::board;
    use super::*;
    use crate::kubelet::ContainerClaim;
    use crate::model::quantity::Bytes;
    use crate::model::share::{Grant, Isolation, Percent};
    use crate::model::time::Moment;
    use crate::nvml::{DeviceMemory, Figures};

    fn claim(name: &str) -> ClaimRef {
        ClaimRef { namespace: "team".into(), name: name.into(), uid: name.into() }
    }

    fn usage(gpu: &str, claim: &str, pod: &str, used: u64) -> Usage {
        Usage {
            gpu: gpu.into(),
            claim: claim.into(),
            pod: Some(pod.into()),
            limit: None,
            used: Bytes(used),
            peak: Bytes(used),
            processes: 1,
        }
    }

    fn measured(activity: PodActivity) -> Measured {
        let memory = DeviceMemory { total: Bytes(1000), reserved: Bytes(100), used: Bytes(500) };
        let figures = Figures {
            memory: Some(memory),
            temperature_celsius: Some(31),
            power_milliwatts: Some(70_500),
            sm_clock_megahertz: Some(1980),
            memory_clock_megahertz: Some(2619),
            busy_percent: Some(40),
            ..Figures::default()
        };
        Measured { figures, activity, of_servers: None, uncounted: Some(Bytes(8)) }
    }

    /// Rows of these devices; each claim has a pod of its name and `-pod`.
    fn rows(devices: Vec<(&str, WatchedDevice)>, usages: &[Usage], all: Vec<(&str, Measured)>) -> Rows {
        let devices: BTreeMap<DeviceUuid, _> =
            devices.into_iter().map(|(uuid, device)| (uuid.into(), device)).collect();
        let mut knowledge = Knowledge::new(None);
        knowledge.keep(devices.values().flat_map(WatchedDevice::claims));
        for claim in devices.values().flat_map(WatchedDevice::claims) {
            let pod = PodRef {
                namespace: "team".into(),
                name: format!("{}-pod", claim.name),
                uid: format!("{}-uid", claim.name).as_str().into(),
            };
            let users = ClaimUsers { pods: vec![pod], others: false };
            knowledge.users_answered(&claim.uid, Moment::ZERO, Some(users));
        }
        let mut usage: BTreeMap<DeviceUuid, Vec<Usage>> = BTreeMap::new();
        for one in usages {
            usage.entry(one.gpu.clone()).or_default().push(one.clone());
        }
        let measured = all.into_iter().map(|(uuid, one)| (uuid.into(), one)).collect();
        let main = ContainerClaim {
            namespace: "team".into(),
            pod: "a-pod".into(),
            container: "main".into(),
            claim: "a".into(),
        };
        let side = ContainerClaim { container: "helper".into(), ..main.clone() };
        let containers = Containers::new(vec![main, side]);
        let (devices, knowledge, usage, measured) = (&devices, &knowledge, &usage, &measured);
        RowSources { devices, knowledge, usage, measured, containers: &containers }.rows()
    }

    #[test]
    fn a_whole_gpu_a_share_and_a_mig_device_each_have_their_row() {
        let requests = BTreeMap::from([("a".into(), BTreeSet::from(["r1".to_owned(), "r0".to_owned()]))]);
        let whole = WatchedDevice { alone: vec![claim("a")], requests, ..board("gpu-0", "GPU-0") };
        let grant = Grant {
            memory: Bytes(300),
            compute: Some(Percent::try_from(25_u8).unwrap()),
            slots: 1,
            processes: 1,
            isolation: Isolation::Mps,
        };
        let shared = WatchedDevice { shares: vec![(claim("b"), grant)], ..board("gpu-1", "GPU-1") };
        let mig =
            WatchedDevice { alone: vec![claim("c")], is_mig: true, ..board("gpu-2-mig-1g10gb", "GPU-2") };
        let share = Usage { limit: Some(Bytes(300)), ..usage("GPU-1", "b", "b-uid", 20) };
        let usages = [usage("GPU-0", "a", "a-uid", 10), share, usage("MIG-2", "c", "c-uid", 30)];
        let busy = PodActivity::Known(BTreeMap::from([("a-uid".into(), 0.75)]));
        let found = rows(
            vec![("GPU-0", whole), ("GPU-1", shared), ("MIG-2", mig)],
            &usages,
            vec![
                ("GPU-0", measured(busy)),
                ("GPU-1", measured(PodActivity::Unknown)),
                ("GPU-2", measured(PodActivity::Unknown)),
                ("MIG-2", Measured { uncounted: None, ..measured(PodActivity::Unknown) }),
            ],
        );
        let figures: Vec<_> = found
            .claims
            .iter()
            .map(|ClaimRow { labels, figures: f, .. }| {
                let names = (labels.pod.as_str(), labels.container.as_str(), labels.request.as_str());
                let names = (names, labels.uuid.as_str());
                (names, f.kind, f.limit, f.used, f.activity_of_gpu(), f.compute_limit)
            })
            .collect();
        let expected = [
            (
                (("a-pod", "helper,main", "r0,r1"), "GPU-0"),
                HoldKind::Whole,
                Some(900),
                10,
                Some(0.75),
                Some(1.0),
            ),
            ((("b-pod", "", ""), "GPU-1"), HoldKind::Share, Some(300), 20, None, Some(0.25)),
            ((("c-pod", "", ""), "MIG-2"), HoldKind::Mig, Some(900), 30, None, None),
        ];
        assert_eq!(figures, expected);
        let gpus: Vec<_> =
            found.gpus.iter().map(|(of, f)| (of.device.as_str(), of.uuid.as_str(), f.power_watts)).collect();
        let expected = [
            ("", "GPU-2", Some(70.5)),
            ("gpu-0", "GPU-0", Some(70.5)),
            ("gpu-1", "GPU-1", Some(70.5)),
            ("gpu-2-mig-1g10gb", "MIG-2", Some(70.5)),
        ];
        assert_eq!(gpus, expected, "the board in MIG mode is no device");
        let one = found.gpus.values().next().unwrap();
        assert_eq!(
            (one.sm_clock_hertz, one.memory_clock_hertz, one.activity, one.memory_uncounted),
            (Some(1.98e9), Some(2.619e9), Some(0.4), Some(8))
        );
    }

    #[test]
    fn what_was_not_measured_is_absent_and_a_pod_that_is_not_known_has_no_name() {
        let whole = WatchedDevice { alone: vec![claim("a")], ..board("gpu-0", "GPU-0") };
        let found = rows(vec![("GPU-0", whole)], &[usage("GPU-0", "a", "other", 10)], Vec::new());
        let row = &found.claims[0];
        assert_eq!((row.labels.pod.as_str(), row.figures.limit, row.figures.activity), ("", None, None));
        assert_eq!(found.gpus, BTreeMap::new());
    }

    #[test]
    fn a_share_is_as_busy_on_the_whole_gpu_as_the_part_that_it_may_use() {
        let figures = |activity, compute_limit| ClaimFigures {
            kind: HoldKind::Share,
            limit: None,
            used: 0,
            peak: 0,
            processes: 1,
            activity,
            compute_limit,
        };
        assert_eq!(figures(Some(0.5), Some(0.25)).activity_of_gpu(), Some(0.125));
        assert_eq!(figures(Some(0.5), None).activity_of_gpu(), Some(0.5), "nobody bounds it");
        assert_eq!(figures(None, Some(0.25)).activity_of_gpu(), None, "it is not known");
        let mig = ClaimFigures { kind: HoldKind::Mig, ..figures(Some(0.5), None) };
        assert_eq!(mig.activity_of_gpu(), None, "its part of the GPU is not known");
    }

    #[test]
    fn of_a_pod_with_two_claims_on_one_gpu_it_is_not_known_which_works() {
        let grant =
            Grant { memory: Bytes(0), compute: None, slots: 1, processes: 1, isolation: Isolation::None };
        let shares = vec![(claim("a"), grant), (claim("b"), grant)];
        let device = WatchedDevice { shares, ..board("gpu-0", "GPU-0") };
        let busy = PodActivity::Known(BTreeMap::from([("a-uid".into(), 0.5)]));
        let activity = |usages: &[Usage]| {
            let found =
                rows(vec![("GPU-0", device.clone())], usages, vec![("GPU-0", measured(busy.clone()))]);
            found.claims.iter().map(|row| row.figures.activity).collect::<Vec<_>>()
        };
        let (a, b) = (usage("GPU-0", "a", "a-uid", 1), usage("GPU-0", "b", "a-uid", 1));
        assert_eq!(activity(&[a.clone(), b]), [None, None]);
        assert_eq!(activity(&[a, usage("GPU-0", "b", "b-uid", 1)]), [Some(0.5), Some(0.0)]);
    }
}
