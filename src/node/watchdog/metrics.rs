//! Metrics of shares, by claim: what the watchdog sees and does. An autoscaler finds its pods by `namespace`
//! and `pod`; a row goes when its claim or pod does.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;

use crate::ops::metrics::{Registry, gauge_value};

/// Bounds in seconds; the period is 0.25 s unless configured otherwise.
const TICK_SECONDS: [f64; 11] = [0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0];

/// A claim's share of a GPU, as one pod has it. Without a name of the pod: it is not known yet.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, EncodeLabelSet)]
pub struct ShareLabels {
    pub namespace: String,
    pub pod: String,
    pub claim: String,
    /// UUID of the GPU.
    pub gpu: String,
    /// The device's name in the ResourceSlice.
    pub device: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct GpuLabels {
    gpu: String,
    device: String,
}

/// One row's figures, in bytes and processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShareUse {
    /// None: its memory is not counted.
    pub limit: Option<u64>,
    pub used: u64,
    pub peak: u64,
    pub processes: usize,
}

/// What the watchdog counts. Clones count into the same metrics.
#[derive(Debug, Clone)]
pub struct ClaimMetrics {
    limit: Family<ShareLabels, Gauge>,
    used: Family<ShareLabels, Gauge>,
    peak: Family<ShareLabels, Gauge>,
    processes: Family<ShareLabels, Gauge>,
    violations: Family<ShareLabels, Counter>,
    terminations: Family<ShareLabels, Counter>,
    foreign: Family<GpuLabels, Counter>,
    foreign_terminations: Family<GpuLabels, Counter>,
    tick: Histogram,
    /// Looks that were due while another was not done.
    pub missed_ticks: Counter,
    /// Looks, at all GPUs that claims hold or at one, that NVML did not answer.
    pub failed_looks: Counter,
    /// Findings that nobody took in time.
    pub dropped_findings: Counter,
    /// Processes that were to end and could not be ended.
    pub failed_terminations: Counter,
    shown: Arc<Mutex<BTreeSet<ShareLabels>>>,
}

impl ClaimMetrics {
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self {
            limit: Family::default(),
            used: Family::default(),
            peak: Family::default(),
            processes: Family::default(),
            violations: Family::default(),
            terminations: Family::default(),
            foreign: Family::default(),
            foreign_terminations: Family::default(),
            tick: Histogram::new(TICK_SECONDS),
            missed_ticks: Counter::default(),
            failed_looks: Counter::default(),
            dropped_findings: Counter::default(),
            failed_terminations: Counter::default(),
            shown: Arc::default(),
        };
        metrics.register_claims(registry);
        metrics.register_watchdog(registry);
        metrics
    }

    /// All rows as they are now: those that are not among them go, their counters too.
    pub fn show(&self, rows: Vec<(ShareLabels, ShareUse)>) {
        let mut shown = self.shown.lock().unwrap_or_else(PoisonError::into_inner);
        let mut now = BTreeSet::new();
        for (labels, row) in rows {
            match row.limit {
                Some(limit) => drop(self.limit.get_or_create(&labels).set(gauge_value(limit))),
                None => drop(self.limit.remove(&labels)),
            }
            self.used.get_or_create(&labels).set(gauge_value(row.used));
            self.peak.get_or_create(&labels).set(gauge_value(row.peak));
            self.processes.get_or_create(&labels).set(i64::try_from(row.processes).unwrap_or(i64::MAX));
            // From 0 on, so that a rate has a first value.
            drop(self.violations.get_or_create(&labels));
            drop(self.terminations.get_or_create(&labels));
            now.insert(labels);
        }
        for gone in shown.difference(&now) {
            self.remove(gone);
        }
        *shown = now;
    }

    /// A claim was found over its grant, or with too many processes. Counted while its row is shown.
    pub fn violation(&self, labels: &ShareLabels) {
        if self.is_shown(labels) {
            self.violations.get_or_create(labels).inc();
        }
    }

    /// A process of the claim was ended.
    pub fn termination(&self, labels: &ShareLabels) {
        if self.is_shown(labels) {
            self.terminations.get_or_create(labels).inc();
        }
    }

    /// A process that belongs to no claim was found on a GPU that claims hold.
    pub fn foreign(&self, gpu: &str, device: &str) {
        self.foreign.get_or_create(&gpu_labels(gpu, device)).inc();
    }

    /// It was ended.
    pub fn foreign_termination(&self, gpu: &str, device: &str) {
        self.foreign_terminations.get_or_create(&gpu_labels(gpu, device)).inc();
    }

    /// How long one look, with all that followed at once, took.
    pub fn tick(&self, took: Duration) {
        self.tick.observe(took.as_secs_f64());
    }

    fn is_shown(&self, labels: &ShareLabels) -> bool {
        self.shown.lock().unwrap_or_else(PoisonError::into_inner).contains(labels)
    }

    fn remove(&self, labels: &ShareLabels) {
        for family in [&self.limit, &self.used, &self.peak, &self.processes] {
            family.remove(labels);
        }
        for family in [&self.violations, &self.terminations] {
            family.remove(labels);
        }
    }

    fn register_claims(&self, registry: &mut Registry) {
        let gauges = [
            (
                "claim_memory_limit_bytes",
                "GPU memory that a claim was granted, all its pods together",
                &self.limit,
            ),
            ("claim_memory_used_bytes", "GPU memory that a pod uses of a claim", &self.used),
            ("claim_memory_peak_bytes", "The most that the watchdog saw a pod use of a claim", &self.peak),
            ("claim_gpu_processes", "Processes of a pod on a claim's GPU", &self.processes),
        ];
        for (name, help, family) in gauges {
            registry.register(name, help, family.clone());
        }
        registry.register(
            "claim_violations",
            "Times that a claim was found over its grant, or with more processes than it has slots for",
            self.violations.clone(),
        );
        registry.register(
            "claim_terminations",
            "Processes of a claim that were ended because it was over its grant",
            self.terminations.clone(),
        );
        registry.register(
            "foreign_gpu_processes",
            "Processes of no claim that were found on a GPU that claims hold",
            self.foreign.clone(),
        );
        registry.register(
            "foreign_gpu_process_terminations",
            "Processes of no claim on a GPU that claims hold that were ended",
            self.foreign_terminations.clone(),
        );
    }

    fn register_watchdog(&self, registry: &mut Registry) {
        registry.register(
            "watchdog_tick_duration_seconds",
            "How long a look of the watchdog at all GPUs that claims hold took",
            self.tick.clone(),
        );
        let counters = [
            ("watchdog_missed_ticks", "Looks that were due while another was not done", &self.missed_ticks),
            ("watchdog_failed_looks", "Looks at GPUs that NVML did not answer", &self.failed_looks),
            (
                "watchdog_dropped_findings",
                "Findings dropped because nobody took them",
                &self.dropped_findings,
            ),
            (
                "watchdog_failed_terminations",
                "Processes that were to end and could not be ended; the reason is in the log",
                &self.failed_terminations,
            ),
        ];
        for (name, help, counter) in counters {
            registry.register(name, help, counter.clone());
        }
    }
}

fn gpu_labels(gpu: &str, device: &str) -> GpuLabels {
    GpuLabels { gpu: gpu.to_owned(), device: device.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::metrics::{registry, text};

    fn row(claim: &str, used: u64) -> (ShareLabels, ShareUse) {
        let labels = ShareLabels {
            namespace: "team".into(),
            pod: "train-0".into(),
            claim: claim.into(),
            gpu: "GPU-1".into(),
            device: "gpu-0".into(),
        };
        (labels, ShareUse { limit: Some(2 << 30), used, peak: used, processes: 1 })
    }

    #[test]
    fn a_claim_is_shown_with_all_labels_and_goes_with_its_counters() {
        let mut registry = registry();
        let metrics = ClaimMetrics::register(&mut registry);
        let (a, b) = (row("a", 1024), row("b", 0));
        metrics.show(vec![a.clone(), b.clone()]);
        metrics.violation(&a.0);
        metrics.termination(&a.0);
        metrics.foreign("GPU-1", "gpu-0");
        let shown = text(&registry).unwrap();
        let labels = |claim| {
            format!("{{namespace=\"team\",pod=\"train-0\",claim=\"{claim}\",gpu=\"GPU-1\",device=\"gpu-0\"}}")
        };
        for line in [
            format!("tranche_claim_memory_limit_bytes{} 2147483648", labels("a")),
            format!("tranche_claim_memory_used_bytes{} 1024", labels("a")),
            format!("tranche_claim_memory_peak_bytes{} 1024", labels("a")),
            format!("tranche_claim_gpu_processes{} 1", labels("a")),
            format!("tranche_claim_violations_total{} 1", labels("a")),
            format!("tranche_claim_terminations_total{} 1", labels("a")),
            format!("tranche_claim_violations_total{} 0", labels("b")),
            "tranche_foreign_gpu_processes_total{gpu=\"GPU-1\",device=\"gpu-0\"} 1".into(),
        ] {
            assert!(shown.lines().any(|have| have == line), "{line} is missing from\n{shown}");
        }
        metrics.show(vec![b]);
        metrics.violation(&a.0);
        let shown = text(&registry).unwrap();
        assert!(!shown.contains("claim=\"a\"") && shown.contains("claim=\"b\""), "{shown}");
    }
}
