//! The claims' rows under the names and labels that dcgm-exporter gives the boards' values, for dashboards and autoscalers
//! that were made for those. Each row has its own pod's value, also where several pods share a GPU.
//!
//! What DCGM counts in MiB and percent is in MiB and percent here. A value that is not known is absent.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

use prometheus_client::encoding::{EncodeLabelSet, LabelSetEncoder};
use prometheus_client::metrics::family::Family;

use super::metrics::set_float;
use super::rows::ClaimRow;
use crate::model::quantity::MIB;
use crate::ops::metrics::{FloatGauge, Registry};

/// Before the profile, in NVML's name of a MIG device.
const MIG: &str = " MIG ";

/// The rows under DCGM's names. Clones show the same ones.
#[derive(Debug, Clone)]
pub struct DcgmMetrics {
    node: String,
    utilisation: Family<DcgmLabels, FloatGauge>,
    used: Family<DcgmLabels, FloatGauge>,
    free: Family<DcgmLabels, FloatGauge>,
    engine: Family<DcgmLabels, FloatGauge>,
    shown: Arc<Mutex<BTreeMap<DcgmLabels, DcgmFigures>>>,
}

/// Labels as dcgm-exporter has them.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct DcgmLabels {
    /// NVML's index of the board.
    gpu: String,
    /// Of the board, for MIG devices, too.
    uuid: String,
    pci_bus_id: String,
    device: String,
    model_name: String,
    node: String,
    /// Profile and id of the GPU instance, for MIG devices.
    mig: Option<(String, String)>,
    namespace: String,
    pod: String,
    container: String,
}

impl EncodeLabelSet for DcgmLabels {
    fn encode(&self, encoder: &mut LabelSetEncoder<'_>) -> Result<(), std::fmt::Error> {
        let mut labels = vec![
            ("gpu", self.gpu.as_str()),
            ("UUID", &self.uuid),
            ("pci_bus_id", &self.pci_bus_id),
            ("device", &self.device),
            ("modelName", &self.model_name),
        ];
        if let Some((profile, id)) = &self.mig {
            labels.extend([("GPU_I_PROFILE", profile.as_str()), ("GPU_I_ID", id)]);
        }
        labels.extend([
            ("Hostname", self.node.as_str()),
            ("namespace", &self.namespace),
            ("pod", &self.pod),
            ("container", &self.container),
        ]);
        labels.as_slice().encode(encoder)
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
struct DcgmFigures {
    used_mib: f64,
    free_mib: Option<f64>,
    activity: Option<f64>,
}

impl DcgmMetrics {
    /// A registry of their own, because their names have no prefix of ours. `node`: the label Hostname.
    pub fn new(node: String) -> (Self, Registry) {
        let metrics = Self {
            node,
            utilisation: Family::default(),
            used: Family::default(),
            free: Family::default(),
            engine: Family::default(),
            shown: Arc::default(),
        };
        let mut registry = Registry::default();
        for (name, help, family) in [
            ("DCGM_FI_DEV_GPU_UTIL", "GPU utilization of the pod (in %)", &metrics.utilisation),
            ("DCGM_FI_DEV_FB_USED", "Framebuffer memory used by the pod (in MiB)", &metrics.used),
            ("DCGM_FI_DEV_FB_FREE", "Framebuffer memory of the claim that is free (in MiB)", &metrics.free),
            (
                "DCGM_FI_PROF_GR_ENGINE_ACTIVE",
                "Ratio of time in which a kernel of the pod ran",
                &metrics.engine,
            ),
        ] {
            registry.register(name, help, family.clone());
        }
        (metrics, registry)
    }

    /// All rows as they are now; the others go.
    pub(super) fn show(&self, rows: &[ClaimRow]) {
        let mut shown = self.shown.lock().unwrap_or_else(PoisonError::into_inner);
        let now = self.figures(rows);
        if *shown == now {
            return;
        }
        for gone in shown.keys().filter(|labels| !now.contains_key(labels)) {
            for family in [&self.utilisation, &self.used, &self.free, &self.engine] {
                family.remove(gone);
            }
        }
        for (labels, figures) in &now {
            set_float(&self.used, labels, Some(figures.used_mib));
            set_float(&self.free, labels, figures.free_mib);
            set_float(&self.utilisation, labels, figures.activity.map(|ratio| (ratio * 100.0).round()));
            set_float(&self.engine, labels, figures.activity);
        }
        *shown = now;
    }

    /// A pod's several claims on one device are one row: DCGM knows no claims.
    fn figures(&self, rows: &[ClaimRow]) -> BTreeMap<DcgmLabels, DcgmFigures> {
        let claim = |row: &ClaimRow| {
            (row.labels.namespace.clone(), row.labels.claim.clone(), row.labels.uuid.clone())
        };
        let mut used: HashMap<_, u64> = HashMap::new();
        for row in rows {
            let sum = used.entry(claim(row)).or_default();
            *sum = sum.saturating_add(row.figures.used);
        }
        let mut all: BTreeMap<DcgmLabels, DcgmFigures> = BTreeMap::new();
        for row in rows.iter().filter(|row| row.board.index.is_some()) {
            let used = used.get(&claim(row)).copied().unwrap_or_default();
            let free = row.figures.limit.map(|limit| mib(limit.saturating_sub(used)));
            let used_mib = mib(row.figures.used);
            let figures = DcgmFigures { used_mib, free_mib: free, activity: row.figures.activity };
            all.entry(self.labels(row))
                .and_modify(|same| {
                    same.used_mib += figures.used_mib;
                    same.free_mib = same.free_mib.zip(figures.free_mib).map(|(a, b)| a + b);
                })
                .or_insert(figures);
        }
        all
    }

    fn labels(&self, row: &ClaimRow) -> DcgmLabels {
        let index = row.board.index.unwrap_or_default();
        let mig = row.mig.as_ref().map(|mig| {
            let profile = mig.name.split_once(MIG).map_or("", |(_, profile)| profile);
            (profile.to_owned(), mig.gpu_instance.map(|id| id.to_string()).unwrap_or_default())
        });
        DcgmLabels {
            gpu: index.to_string(),
            uuid: row.board_uuid.clone(),
            pci_bus_id: row.board.pci_bus_id.clone().unwrap_or_default(),
            device: format!("nvidia{index}"),
            model_name: row.board.name.clone(),
            node: self.node.clone(),
            mig,
            namespace: row.labels.namespace.clone(),
            pod: row.labels.pod.clone(),
            container: row.labels.container.clone(),
        }
    }
}

fn mib(bytes: u64) -> f64 {
    (bytes / MIB) as f64
}

#[cfg(test)]
mod tests {
    use super::super::rows::{ClaimFigures, ClaimLabels, HoldKind};
    use super::*;
    use crate::nvml::DeviceIdentity;
    use crate::ops::metrics::text;

    fn row(pod: &str, kind: HoldKind, used_mib: u64, activity: Option<f64>) -> ClaimRow {
        let labels = ClaimLabels {
            namespace: "team".into(),
            pod: pod.into(),
            container: "main".into(),
            claim: "c".into(),
            request: "gpu".into(),
            device: "gpu-3".into(),
            pool: "node-a".into(),
            uuid: "GPU-3".into(),
        };
        let figures = ClaimFigures {
            kind,
            limit: Some(1000 * MIB),
            used: used_mib * MIB,
            peak: 0,
            processes: 1,
            activity,
            compute_limit: None,
        };
        let board = DeviceIdentity {
            index: Some(3),
            name: "NVIDIA H100".into(),
            pci_bus_id: Some("00000000:1B:00.0".into()),
            gpu_instance: None,
        };
        ClaimRow { labels, figures, board, board_uuid: "GPU-3".into(), mig: None }
    }

    fn shown(rows: &[ClaimRow]) -> String {
        let (metrics, registry) = DcgmMetrics::new("node-a".into());
        metrics.show(&[row("gone", HoldKind::Whole, 5, Some(0.5))]);
        metrics.show(rows);
        text(&registry).unwrap()
    }

    #[test]
    fn each_pod_has_its_own_values_under_dcgms_names() {
        let (a, b) = (row("a", HoldKind::Whole, 100, Some(0.25)), row("b", HoldKind::Whole, 200, Some(0.0)));
        let text = shown(&[a, b]);
        let labels = |pod| {
            format!(
                "{{gpu=\"3\",UUID=\"GPU-3\",pci_bus_id=\"00000000:1B:00.0\",device=\"nvidia3\",modelName=\"NVIDIA H100\",\
                 Hostname=\"node-a\",namespace=\"team\",pod=\"{pod}\",container=\"main\"}}"
            )
        };
        for line in [
            format!("DCGM_FI_DEV_GPU_UTIL{} 25.0", labels("a")),
            format!("DCGM_FI_DEV_GPU_UTIL{} 0.0", labels("b")),
            format!("DCGM_FI_DEV_FB_USED{} 100.0", labels("a")),
            format!("DCGM_FI_DEV_FB_FREE{} 700.0", labels("a")),
            format!("DCGM_FI_PROF_GR_ENGINE_ACTIVE{} 0.25", labels("a")),
        ] {
            assert!(text.lines().any(|have| have == line), "{line} is missing from\n{text}");
        }
        assert!(!text.contains("gone"), "{text}");
    }

    #[test]
    fn a_mig_device_names_its_instance_and_what_is_not_known_is_absent() {
        let name = "NVIDIA H100 MIG 1g.10gb".to_owned();
        let mig = DeviceIdentity { index: None, name, pci_bus_id: None, gpu_instance: Some(7) };
        let text = shown(&[ClaimRow { mig: Some(mig), ..row("a", HoldKind::Mig, 100, None) }]);
        assert!(
            text.contains("modelName=\"NVIDIA H100\",GPU_I_PROFILE=\"1g.10gb\",GPU_I_ID=\"7\""),
            "{text}"
        );
        assert!(!text.contains("DCGM_FI_DEV_GPU_UTIL{"), "{text}");
    }
}
