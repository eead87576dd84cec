//! Metrics of claims and GPUs: what the watchdog sees and does. An autoscaler finds its pods by `namespace`
//! and `pod`; a row goes when its claim or pod does.

use std::collections::BTreeMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;

use super::dcgm::DcgmMetrics;
use super::rows::{ClaimFigures, ClaimLabels, GpuFigures, GpuLabels, HoldKind, Rows};
use crate::ops::metrics::{FloatGauge, Registry, gauge_value};

/// Bounds in seconds; the period is 0.25 s unless configured otherwise.
const TICK_SECONDS: [f64; 11] = [0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0];

/// What the watchdog counts. Clones count into the same metrics.
#[derive(Debug, Clone)]
pub struct ClaimMetrics {
    claims: ClaimGauges,
    gpus: GpuGauges,
    violations: Family<ClaimLabels, Counter>,
    terminations: Family<ClaimLabels, Counter>,
    detours: Family<ClaimLabels, Counter>,
    detour_terminations: Family<ClaimLabels, Counter>,
    foreign: Family<GpuLabels, Counter>,
    foreign_terminations: Family<GpuLabels, Counter>,
    tick: Histogram,
    /// Looks that were due while another was not done.
    pub missed_ticks: Counter,
    /// Looks, at all GPUs that claims hold or at one, that NVML did not answer.
    pub failed_looks: Counter,
    /// Looks at which the processes on GPUs could not be read in time.
    pub unmade_reads: Counter,
    /// Questions that were not answered.
    pub failed_questions: Counter,
    /// Questions to MPS daemons that waited, because as many were being asked as may.
    pub postponed_questions: Counter,
    /// Readings of figures that NVML did not answer, and of mappings that were not read in time.
    pub failed_readings: Counter,
    /// Findings that nobody took in time.
    pub dropped_findings: Counter,
    /// Processes that were to end and could not be ended.
    pub failed_terminations: Counter,
    shown: Arc<Mutex<ShownRows>>,
    dcgm: Option<DcgmMetrics>,
}

/// What the gauges say now, so that only what has changed is touched.
#[derive(Debug, Default)]
struct ShownRows {
    claims: BTreeMap<ClaimLabels, ClaimFigures>,
    gpus: BTreeMap<GpuLabels, GpuFigures>,
}

#[derive(Debug, Clone, Default)]
struct ClaimGauges {
    limit: Family<ClaimLabels, Gauge>,
    used: Family<ClaimLabels, Gauge>,
    peak: Family<ClaimLabels, Gauge>,
    processes: Family<ClaimLabels, Gauge>,
    activity: Family<ClaimLabels, FloatGauge>,
    activity_of_gpu: Family<ClaimLabels, FloatGauge>,
    compute_limit: Family<ClaimLabels, FloatGauge>,
}

#[derive(Debug, Clone, Default)]
struct GpuGauges {
    memory_total: Family<GpuLabels, Gauge>,
    memory_reserved: Family<GpuLabels, Gauge>,
    memory_used: Family<GpuLabels, Gauge>,
    memory_uncounted: Family<GpuLabels, Gauge>,
    temperature: Family<GpuLabels, FloatGauge>,
    power: Family<GpuLabels, FloatGauge>,
    sm_clock: Family<GpuLabels, FloatGauge>,
    memory_clock: Family<GpuLabels, FloatGauge>,
    activity: Family<GpuLabels, FloatGauge>,
    shares_activity: Family<GpuLabels, FloatGauge>,
}

impl ClaimMetrics {
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self {
            claims: ClaimGauges::default(),
            gpus: GpuGauges::default(),
            violations: Family::default(),
            terminations: Family::default(),
            detours: Family::default(),
            detour_terminations: Family::default(),
            foreign: Family::default(),
            foreign_terminations: Family::default(),
            tick: Histogram::new(TICK_SECONDS),
            missed_ticks: Counter::default(),
            failed_looks: Counter::default(),
            unmade_reads: Counter::default(),
            failed_questions: Counter::default(),
            postponed_questions: Counter::default(),
            failed_readings: Counter::default(),
            dropped_findings: Counter::default(),
            failed_terminations: Counter::default(),
            shown: Arc::default(),
            dcgm: None,
        };
        metrics.claims.register(registry);
        metrics.register_counters(registry);
        metrics.gpus.register(registry);
        metrics.register_watchdog(registry);
        metrics
    }

    /// Shows the claims' rows under DCGM's names, too.
    pub fn with_dcgm(self, dcgm: DcgmMetrics) -> Self {
        Self { dcgm: Some(dcgm), ..self }
    }

    /// All rows as they are now: those that are not among them go, their counters too.
    pub fn show(&self, rows: &Rows) {
        let claims: BTreeMap<_, _> =
            rows.claims.iter().map(|row| (row.labels.clone(), row.figures)).collect();
        let mut shown = self.shown();
        self.keep_counts(&shown.claims, &claims);
        update(&mut shown.claims, claims, |labels, figures| self.show_claim(labels, figures));
        update(&mut shown.gpus, rows.gpus.clone(), |labels, figures| self.gpus.show(labels, figures));
        drop(shown);
        if let Some(dcgm) = &self.dcgm {
            dcgm.show(&rows.claims);
        }
    }

    /// What was counted before kubelet had named the containers counts under their names, too.
    fn keep_counts(
        &self,
        before: &BTreeMap<ClaimLabels, ClaimFigures>,
        now: &BTreeMap<ClaimLabels, ClaimFigures>,
    ) {
        for labels in now.keys().filter(|labels| !labels.container.is_empty() && !before.contains_key(labels))
        {
            let unnamed = ClaimLabels { container: String::new(), ..labels.clone() };
            for family in self.counters() {
                let count = family.get(&unnamed).map_or(0, |counter| counter.get());
                if count > 0 {
                    family.get_or_create(labels).inc_by(count);
                }
            }
        }
    }

    fn counters(&self) -> [&Family<ClaimLabels, Counter>; 4] {
        [&self.violations, &self.terminations, &self.detours, &self.detour_terminations]
    }

    fn show_claim(&self, labels: &ClaimLabels, figures: Option<&ClaimFigures>) {
        self.claims.show(labels, figures);
        // From 0 on, so that a rate has a first value. Only a share has a grant that it can exceed.
        for family in self.counters() {
            match figures.map(|figures| figures.kind) {
                Some(HoldKind::Share) => drop(family.get_or_create(labels)),
                Some(HoldKind::Whole | HoldKind::Mig) | None => drop(family.remove(labels)),
            }
        }
    }

    /// A claim was found over its grant, or with too many processes. Counted while its row is shown.
    pub fn violation(&self, labels: &ClaimLabels) {
        self.count(&self.violations, labels);
    }

    /// A process of the claim was ended.
    pub fn termination(&self, labels: &ClaimLabels) {
        self.count(&self.terminations, labels);
    }

    /// A process of the claim was found that goes around the claim's MPS daemon.
    pub fn detour(&self, labels: &ClaimLabels) {
        self.count(&self.detours, labels);
    }

    /// It was ended.
    pub fn detour_termination(&self, labels: &ClaimLabels) {
        self.count(&self.detour_terminations, labels);
    }

    /// Who counts need not know the containers.
    fn count(&self, family: &Family<ClaimLabels, Counter>, labels: &ClaimLabels) {
        let shown = self.shown();
        if let Some(row) = shown.claims.keys().find(|row| row.is_row_of(labels)) {
            family.get_or_create(row).inc();
        }
    }

    /// A process that belongs to no claim was found on a GPU that claims hold.
    pub fn foreign(&self, gpu: &GpuLabels) {
        self.foreign.get_or_create(gpu).inc();
    }

    /// It was ended.
    pub fn foreign_termination(&self, gpu: &GpuLabels) {
        self.foreign_terminations.get_or_create(gpu).inc();
    }

    /// How long one look, with all that followed at once, took.
    pub fn tick(&self, took: Duration) {
        self.tick.observe(took.as_secs_f64());
    }

    fn shown(&self) -> MutexGuard<'_, ShownRows> {
        self.shown.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn register_counters(&self, registry: &mut Registry) {
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
            "claim_processes_around_mps",
            "Processes of a claim that were found on its GPU around the MPS daemon that the claim has for itself",
            self.detours.clone(),
        );
        registry.register(
            "claim_processes_around_mps_terminations",
            "Processes of a claim that were ended because they went around its MPS daemon",
            self.detour_terminations.clone(),
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
                "watchdog_unmade_reads",
                "Looks at which the processes on GPUs could not be read in time, or not all of them",
                &self.unmade_reads,
            ),
            (
                "watchdog_failed_questions",
                "Questions to tranche mps, to MPS daemons and to the ledger that were not answered; they are asked again",
                &self.failed_questions,
            ),
            (
                "watchdog_postponed_questions",
                "Questions to MPS daemons that had to wait because as many others were being asked as may be",
                &self.postponed_questions,
            ),
            (
                "watchdog_failed_readings",
                "Readings of the figures of GPUs that NVML did not answer, and of mappings that were not read in time",
                &self.failed_readings,
            ),
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

impl ClaimGauges {
    fn register(&self, registry: &mut Registry) {
        let gauges = [
            (
                "claim_memory_limit_bytes",
                "GPU memory that a claim was granted, all its pods together; of a device that it has for itself, all",
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
            "claim_multiprocessor_activity_ratio",
            "Part of the time in which a kernel of the pod ran on the claim's GPU; absent where NVML does not tell",
            self.activity.clone(),
        );
        registry.register(
            "claim_gpu_activity_ratio",
            "The same as part of the whole GPU: times the part of its multiprocessors that the claim may use",
            self.activity_of_gpu.clone(),
        );
        registry.register(
            "claim_multiprocessor_limit_ratio",
            "Part of the GPU's multiprocessors that each process of the claim may use; absent without a limit",
            self.compute_limit.clone(),
        );
    }

    fn show(&self, labels: &ClaimLabels, figures: Option<&ClaimFigures>) {
        let whole = |value: Option<u64>| value.map(gauge_value);
        set(&self.limit, labels, whole(figures.and_then(|figures| figures.limit)));
        set(&self.used, labels, whole(figures.map(|figures| figures.used)));
        set(&self.peak, labels, whole(figures.map(|figures| figures.peak)));
        set(&self.processes, labels, figures.map(|figures| gauge_value(figures.processes)));
        set_float(&self.activity, labels, figures.and_then(|figures| figures.activity));
        set_float(&self.activity_of_gpu, labels, figures.and_then(ClaimFigures::activity_of_gpu));
        set_float(&self.compute_limit, labels, figures.and_then(|figures| figures.compute_limit));
    }
}

impl GpuGauges {
    fn register(&self, registry: &mut Registry) {
        let whole = [
            ("gpu_memory_total_bytes", "Memory of a GPU or MIG device", &self.memory_total),
            ("gpu_memory_reserved_bytes", "Memory that driver and firmware keep", &self.memory_reserved),
            ("gpu_memory_used_bytes", "Memory in use, without what is reserved", &self.memory_used),
            (
                "gpu_uncounted_memory_bytes",
                "Memory in use that NVML counts for no process, such as managed memory",
                &self.memory_uncounted,
            ),
        ];
        for (name, help, family) in whole {
            registry.register(name, help, family.clone());
        }
        let floats = [
            ("gpu_temperature_celsius", "Temperature of a GPU", &self.temperature),
            ("gpu_power_watts", "Power that a GPU draws", &self.power),
            ("gpu_sm_clock_hertz", "Clock of a GPU's multiprocessors", &self.sm_clock),
            ("gpu_memory_clock_hertz", "Clock of a GPU's memory", &self.memory_clock),
            ("gpu_activity_ratio", "Part of the time in which a kernel of anybody ran", &self.activity),
            (
                "gpu_shares_activity_ratio",
                "Part of the time in which a kernel of a share ran, all shares of the GPU together",
                &self.shares_activity,
            ),
        ];
        for (name, help, family) in floats {
            registry.register(name, help, family.clone());
        }
    }

    fn show(&self, labels: &GpuLabels, figures: Option<&GpuFigures>) {
        let figures = figures.copied().unwrap_or_default();
        set(&self.memory_total, labels, figures.memory_total.map(gauge_value));
        set(&self.memory_reserved, labels, figures.memory_reserved.map(gauge_value));
        set(&self.memory_used, labels, figures.memory_used.map(gauge_value));
        set(&self.memory_uncounted, labels, figures.memory_uncounted.map(gauge_value));
        set_float(&self.temperature, labels, figures.temperature_celsius);
        set_float(&self.power, labels, figures.power_watts);
        set_float(&self.sm_clock, labels, figures.sm_clock_hertz);
        set_float(&self.memory_clock, labels, figures.memory_clock_hertz);
        set_float(&self.activity, labels, figures.activity);
        set_float(&self.shares_activity, labels, figures.shares_activity);
    }
}

/// Shows what has changed; what is not there any more is shown as nothing.
fn update<L: Ord, F: PartialEq>(
    before: &mut BTreeMap<L, F>,
    now: BTreeMap<L, F>,
    mut show: impl FnMut(&L, Option<&F>),
) {
    for (labels, figures) in &now {
        if before.get(labels) != Some(figures) {
            show(labels, Some(figures));
        }
    }
    for gone in before.keys().filter(|labels| !now.contains_key(labels)) {
        show(gone, None);
    }
    *before = now;
}

/// A figure that is not known has no row.
fn set<L: Clone + Hash + Eq>(family: &Family<L, Gauge>, labels: &L, value: Option<i64>) {
    match value {
        Some(value) => drop(family.get_or_create(labels).set(value)),
        None => drop(family.remove(labels)),
    }
}

pub(super) fn set_float<L: Clone + Hash + Eq>(
    family: &Family<L, FloatGauge>,
    labels: &L,
    value: Option<f64>,
) {
    match value {
        Some(value) => drop(family.get_or_create(labels).set(value)),
        None => drop(family.remove(labels)),
    }
}

#[cfg(test)]
mod tests {
    use super::super::rows::ClaimRow;
    use super::*;
    use crate::nvml::DeviceIdentity;
    use crate::ops::metrics::{registry, text};

    fn row(claim: &str, kind: HoldKind, used: u64) -> ClaimRow {
        let labels = ClaimLabels {
            namespace: "team".into(),
            pod: "train-0".into(),
            container: "main".into(),
            claim: claim.into(),
            request: "gpu".into(),
            device: "gpu-0".into(),
            pool: "node-a".into(),
            uuid: "GPU-1".into(),
        };
        let figures = ClaimFigures {
            kind,
            limit: Some(2 << 30),
            used,
            peak: used,
            processes: 1,
            activity: (kind == HoldKind::Whole).then_some(0.5),
            compute_limit: Some(0.25),
        };
        let board = DeviceIdentity::default();
        ClaimRow { labels, figures, board, board_uuid: "GPU-1".into(), mig: None }
    }

    #[test]
    fn what_was_counted_before_the_container_had_a_name_is_not_lost() {
        let mut registry = registry();
        let metrics = ClaimMetrics::register(&mut registry);
        let named = row("a", HoldKind::Share, 1024);
        let mut unnamed = named.clone();
        unnamed.labels.container = String::new();
        metrics.show(&Rows { claims: vec![unnamed.clone()], gpus: BTreeMap::new() });
        metrics.violation(&unnamed.labels);
        for _ in 0..2 {
            metrics.show(&Rows { claims: vec![named.clone()], gpus: BTreeMap::new() });
        }
        metrics.violation(&unnamed.labels);
        let shown = text(&registry).unwrap();
        let counts: Vec<_> =
            shown.lines().filter(|line| line.starts_with("tranche_claim_violations_total{")).collect();
        assert!(
            matches!(counts[..], [one] if one.contains("container=\"main\"") && one.ends_with(" 2")),
            "{shown}"
        );
    }

    fn gpu() -> GpuLabels {
        GpuLabels { device: "gpu-0".into(), pool: "node-a".into(), uuid: "GPU-1".into() }
    }

    #[test]
    fn a_claim_is_shown_with_all_labels_and_goes_with_its_counters() {
        let mut registry = registry();
        let metrics = ClaimMetrics::register(&mut registry);
        let (a, b) = (row("a", HoldKind::Share, 1024), row("b", HoldKind::Whole, 0));
        let figures = GpuFigures { power_watts: Some(70.5), ..GpuFigures::default() };
        let gpus = BTreeMap::from([(gpu(), figures)]);
        metrics.show(&Rows { claims: vec![a.clone(), b.clone()], gpus });
        metrics.violation(&a.labels);
        metrics.termination(&a.labels);
        metrics.foreign(&gpu());
        let shown = text(&registry).unwrap();
        let of_gpu = "device=\"gpu-0\",pool=\"node-a\",UUID=\"GPU-1\"";
        let labels = |claim| {
            let of_pod = "namespace=\"team\",pod=\"train-0\",container=\"main\"";
            format!("{{{of_pod},claim=\"{claim}\",request=\"gpu\",{of_gpu}}}")
        };
        for line in [
            format!("tranche_claim_memory_limit_bytes{} 2147483648", labels("a")),
            format!("tranche_claim_memory_used_bytes{} 1024", labels("a")),
            format!("tranche_claim_memory_peak_bytes{} 1024", labels("a")),
            format!("tranche_claim_gpu_processes{} 1", labels("a")),
            format!("tranche_claim_violations_total{} 1", labels("a")),
            format!("tranche_claim_terminations_total{} 1", labels("a")),
            format!("tranche_claim_multiprocessor_activity_ratio{} 0.5", labels("b")),
            format!("tranche_claim_gpu_activity_ratio{} 0.125", labels("b")),
            format!("tranche_foreign_gpu_processes_total{{{of_gpu}}} 1"),
            format!("tranche_gpu_power_watts{{{of_gpu}}} 70.5"),
        ] {
            assert!(shown.lines().any(|have| have == line), "{line} is missing from\n{shown}");
        }
        for absent in [
            format!("tranche_claim_violations_total{}", labels("b")),
            format!("tranche_claim_multiprocessor_activity_ratio{}", labels("a")),
            format!("tranche_gpu_temperature_celsius{{{of_gpu}}}"),
        ] {
            assert!(!shown.contains(&absent), "{absent} is in\n{shown}");
        }
        metrics.show(&Rows { claims: vec![b], gpus: BTreeMap::new() });
        metrics.violation(&a.labels);
        let shown = text(&registry).unwrap();
        assert!(!shown.contains("claim=\"a\"") && shown.contains("claim=\"b\""), "{shown}");
        assert!(!shown.contains("tranche_gpu_power_watts{"), "{shown}");
    }
}
