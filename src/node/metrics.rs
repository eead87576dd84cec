//! What the node plugin counts; what the watchdog counts is in `watchdog/metrics.rs`.

use std::fmt;
use std::time::Duration;

use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::{Family, MetricConstructor};
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;

use crate::ops::metrics::{FloatGauge, Registry, gauge_value};

/// Bounds in seconds. Fine round 1 ms, where a warm prepare should be; 45 s is kubelet's own limit
/// for one call, so that what lies beyond it was given up by the caller.
const OPERATION_SECONDS: [f64; 14] =
    [0.000_25, 0.000_5, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 10.0];
const KUBELET_GIVES_UP_SECONDS: f64 = 45.0;

/// Declares an enum that is a label's value, with the words to print.
macro_rules! label_value {
    ($(#[$doc:meta])* $name:ident { $($variant:ident => $word:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum $name { $($variant),+ }

        impl $name {
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            pub fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $word),+ }
            }
        }
        impl EncodeLabelValue for $name {
            fn encode(&self, encoder: &mut LabelValueEncoder) -> Result<(), fmt::Error> {
                EncodeLabelValue::encode(&self.as_str(), encoder)
            }
        }
    };
}

label_value!(
    /// What kubelet asks for.
    Operation { Prepare => "prepare", Unprepare => "unprepare" }
);
label_value!(
    /// How it went: well, or the class of the error.
    Outcome {
        Ok => "ok",
        Invalid => "invalid",
        Conflict => "conflict",
        NotYet => "not_yet",
        Io => "io",
        Bug => "bug",
    }
);
label_value!(DeviceType { Gpu => "gpu", Mig => "mig" });
label_value!(DeviceHealth { Healthy => "healthy", Unhealthy => "unhealthy" });
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OperationLabels {
    operation: Operation,
    result: Outcome,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DeviceLabels {
    r#type: DeviceType,
    health: DeviceHealth,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PhaseLabels {
    phase: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct KindLabels {
    kind: &'static str,
}

#[derive(Debug, Clone)]
struct OperationHistogram;

impl MetricConstructor<Histogram> for OperationHistogram {
    fn new_metric(&self) -> Histogram {
        Histogram::new(OPERATION_SECONDS.into_iter().chain([KUBELET_GIVES_UP_SECONDS]))
    }
}

/// What was seen of the files of pods that have no claim on a GPU. Clones count into the same metrics.
#[derive(Debug, Clone, Default)]
pub struct FileLookCounts {
    /// Looks that found a device open or mapped.
    pub strangers: Counter,
    /// Pods not all of whose files were looked at.
    pub unfinished: Counter,
    /// Looks that could not be made.
    pub unmade: Counter,
}

/// What the node process counts. Clones count into the same metrics.
#[derive(Debug, Clone)]
pub struct NodeMetrics {
    operations: Family<OperationLabels, Histogram, OperationHistogram>,
    devices: Family<DeviceLabels, Gauge>,
    device_faults: Family<KindLabels, Gauge>,
    ledger_records: Family<PhaseLabels, Gauge>,
    /// Creations, replacements and deletions of this node's slices.
    pub slice_writes: Counter,
    pub slice_failures: Counter,
    /// 1 while the API server has what the inventory wants.
    pub slices_published: Gauge,
    pub discovery_looks: Counter,
    pub discovery_failures: Counter,
    pub discovery_last_look: FloatGauge,
    sweeper_repairs: Family<KindLabels, Counter>,
    /// MIG devices that could not be made for claims.
    pub mig_creation_failures: Counter,
    /// MIG modes that were switched for claims, and that could not be.
    pub mig_mode_switches: Counter,
    pub mig_mode_switch_failures: Counter,
    /// Claims that are not allocated any more, and whose devices are held by processes.
    pub withheld_claims: Gauge,
    /// Looks at the files of pods.
    pub file_looks: FileLookCounts,
    /// Claims that were refused because somebody else holds the device.
    pub refused_double_allocations: Counter,
    /// Events that the API server did not get.
    pub dropped_events: Counter,
    /// Times that a claim's status.devices was written, visits to claims for it that failed, and reports
    /// that were dropped because their queue was full.
    pub status_writes: Counter,
    pub status_failures: Counter,
    pub dropped_reports: Counter,
    /// Threads that wait in an NVML call past its deadline.
    pub stuck_nvml_threads: Gauge,
    /// Times that kubelet did not tell which containers have claims.
    pub failed_container_looks: Counter,
}

impl NodeMetrics {
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self::zeroed();
        metrics.register_claims(registry);
        metrics.register_reports(registry);
        metrics.register_slices(registry);
        metrics.register_discovery(registry);
        metrics
    }

    /// One claim's prepare or unprepare.
    pub fn operation(&self, operation: Operation, result: Outcome, took: Duration) {
        let labels = OperationLabels { operation, result };
        self.operations.get_or_create(&labels).observe(took.as_secs_f64());
    }

    /// How many devices there are now of a type in a state of health.
    pub fn devices(&self, r#type: DeviceType, health: DeviceHealth, count: usize) {
        self.devices.get_or_create(&DeviceLabels { r#type, health }).set(gauge_value(count));
    }

    /// How many faults of a kind the devices have now. To be called for every kind, absent ones included.
    pub fn device_faults(&self, kind: &'static str, count: usize) {
        self.device_faults.get_or_create(&KindLabels { kind }).set(gauge_value(count));
    }

    /// How many records the ledger has now in a phase. Tell every phase, the empty ones too.
    pub fn ledger_records(&self, phase: &'static str, count: usize) {
        self.ledger_records.get_or_create(&PhaseLabels { phase }).set(gauge_value(count));
    }

    /// The sweeper put something right.
    pub fn repair(&self, kind: &'static str) {
        self.sweeper_repairs.get_or_create(&KindLabels { kind }).inc();
    }

    /// Everything that can be listed beforehand starts at 0, so that a rate has a first value.
    fn zeroed() -> Self {
        let metrics = Self {
            operations: Family::new_with_constructor(OperationHistogram),
            devices: Family::default(),
            device_faults: Family::default(),
            ledger_records: Family::default(),
            slice_writes: Counter::default(),
            slice_failures: Counter::default(),
            slices_published: Gauge::default(),
            discovery_looks: Counter::default(),
            discovery_failures: Counter::default(),
            discovery_last_look: FloatGauge::default(),
            sweeper_repairs: Family::default(),
            withheld_claims: Gauge::default(),
            mig_creation_failures: Counter::default(),
            mig_mode_switches: Counter::default(),
            mig_mode_switch_failures: Counter::default(),
            file_looks: FileLookCounts::default(),
            refused_double_allocations: Counter::default(),
            dropped_events: Counter::default(),
            status_writes: Counter::default(),
            status_failures: Counter::default(),
            dropped_reports: Counter::default(),
            stuck_nvml_threads: Gauge::default(),
            failed_container_looks: Counter::default(),
        };
        for &operation in Operation::ALL {
            drop(metrics.operations.get_or_create(&OperationLabels { operation, result: Outcome::Ok }));
        }
        for &r#type in DeviceType::ALL {
            for &health in DeviceHealth::ALL {
                metrics.devices(r#type, health, 0);
            }
        }
        metrics
    }

    fn register_claims(&self, registry: &mut Registry) {
        registry.register(
            "claim_operation_duration_seconds",
            "How long preparing or unpreparing one claim took, by result",
            self.operations.clone(),
        );
        registry.register("ledger_records", "Claims in the ledger, by phase", self.ledger_records.clone());
        registry.register(
            "refused_double_allocations",
            "Claims refused because somebody else holds the device",
            self.refused_double_allocations.clone(),
        );
        registry.register(
            "withheld_claims",
            "Claims that are not allocated any more, and whose devices are held by processes",
            self.withheld_claims.clone(),
        );
        registry.register(
            "open_device_findings",
            "Looks that found a whole GPU or MIG device open in a pod that has no claim on it",
            self.file_looks.strangers.clone(),
        );
        registry.register(
            "unfinished_file_looks",
            "Pods not all of whose open files were looked at, at each look: they have too many, change them all the time, or hold the look up",
            self.file_looks.unfinished.clone(),
        );
        registry.register(
            "unmade_file_looks",
            "Looks at the open files of pods that could not be made: whole GPUs and MIG devices were given all the same",
            self.file_looks.unmade.clone(),
        );
        registry.register(
            "mig_creation_failures",
            "MIG devices for claims that could not be made, each try counted",
            self.mig_creation_failures.clone(),
        );
        registry.register(
            "mig_mode_switches",
            "MIG modes switched on or off for claims",
            self.mig_mode_switches.clone(),
        );
        registry.register(
            "mig_mode_switch_failures",
            "MIG modes that could not be switched for claims, each try counted",
            self.mig_mode_switch_failures.clone(),
        );
        registry.register(
            "sweeper_repairs",
            "Differences between the ledger and the host that the sweeper put right, by kind",
            self.sweeper_repairs.clone(),
        );
    }

    fn register_reports(&self, registry: &mut Registry) {
        registry.register(
            "dropped_events",
            "Kubernetes events lost: their queue was full, or the API server did not take them",
            self.dropped_events.clone(),
        );
        registry.register(
            "claim_status_writes",
            "Times that a claim's status.devices was written",
            self.status_writes.clone(),
        );
        registry.register(
            "claim_status_failures",
            "Failed attempts to write a claim's status.devices; the reason is in the log",
            self.status_failures.clone(),
        );
        registry.register(
            "dropped_reports",
            "Reports about claims dropped because their queue was full",
            self.dropped_reports.clone(),
        );
    }

    fn register_slices(&self, registry: &mut Registry) {
        registry.register("devices", "Devices of this node, by type and health", self.devices.clone());
        registry.register(
            "ailments",
            "What is wrong with this node's GPUs (worn, xid, gpu-lost, unreachable, mps-daemon-down, shm-full), GPUs that processes hold without a claim (withheld), and MIG devices that could not be made or ended (mig-not-made, mig-not-ended), by kind",
            self.device_faults.clone(),
        );
        registry.register(
            "slice_writes",
            "ResourceSlices of this node created, replaced or deleted",
            self.slice_writes.clone(),
        );
        registry.register(
            "slice_failures",
            "Failed attempts to publish this node's ResourceSlices",
            self.slice_failures.clone(),
        );
        registry.register(
            "slices_published",
            "1 while the API server has the slices that this node wants there",
            self.slices_published.clone(),
        );
    }

    fn register_discovery(&self, registry: &mut Registry) {
        registry.register(
            "discovery_looks",
            "Looks at the node's GPUs, failed ones too",
            self.discovery_looks.clone(),
        );
        registry.register(
            "discovery_failures",
            "Looks at the node's GPUs that failed; the reason is in the log and in /state",
            self.discovery_failures.clone(),
        );
        registry.register(
            "discovery_last_look_seconds",
            "How long the last look at the node's GPUs took",
            self.discovery_last_look.clone(),
        );
        registry.register(
            "stuck_nvml_threads",
            "Threads that wait in an NVML call past its deadline",
            self.stuck_nvml_threads.clone(),
        );
        registry.register(
            "failed_container_looks",
            "Times that kubelet did not tell which containers have claims",
            self.failed_container_looks.clone(),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::metrics::{registry, text};

    fn has(text: &str, line: &str) -> bool {
        text.lines().any(|have| have == line)
    }

    #[test]
    fn a_fresh_node_shows_zeroes() {
        let mut registry = registry();
        let _metrics = NodeMetrics::register(&mut registry);
        let text = text(&registry).unwrap();
        for line in [
            "tranche_devices{type=\"mig\",health=\"unhealthy\"} 0",
            "tranche_slice_writes_total 0",
            "tranche_discovery_failures_total 0",
            "tranche_refused_double_allocations_total 0",
            "tranche_claim_operation_duration_seconds_count{operation=\"prepare\",result=\"ok\"} 0",
        ] {
            assert!(has(&text, line), "{line} is missing from\n{text}");
        }
    }

    #[test]
    fn what_is_counted_is_shown() {
        let mut registry = registry();
        let metrics = NodeMetrics::register(&mut registry);
        metrics.operation(Operation::Prepare, Outcome::NotYet, Duration::from_micros(1500));
        metrics.devices(DeviceType::Gpu, DeviceHealth::Healthy, 8);
        metrics.ledger_records("ready", 3);
        metrics.device_faults("xid", 2);
        metrics.slice_writes.inc();
        metrics.discovery_looks.inc_by(2);
        metrics.discovery_last_look.set(0.25);
        metrics.repair("orphaned_cdi_file");
        metrics.refused_double_allocations.inc();
        metrics.stuck_nvml_threads.set(1);
        let text = text(&registry).unwrap();
        for line in [
            "tranche_claim_operation_duration_seconds_bucket{le=\"0.001\",operation=\"prepare\",result=\"not_yet\"} 0",
            "tranche_claim_operation_duration_seconds_bucket{le=\"0.002\",operation=\"prepare\",result=\"not_yet\"} 1",
            "tranche_devices{type=\"gpu\",health=\"healthy\"} 8",
            "tranche_ledger_records{phase=\"ready\"} 3",
            "tranche_ailments{kind=\"xid\"} 2",
            "tranche_slice_writes_total 1",
            "tranche_discovery_looks_total 2",
            "tranche_discovery_last_look_seconds 0.25",
            "tranche_sweeper_repairs_total{kind=\"orphaned_cdi_file\"} 1",
            "tranche_refused_double_allocations_total 1",
            "tranche_stuck_nvml_threads 1",
        ] {
            assert!(has(&text, line), "{line} is missing from\n{text}");
        }
    }

    #[test]
    fn buckets_rise_and_end_where_kubelet_gives_up() {
        assert!(OPERATION_SECONDS.is_sorted_by(|a, b| a < b));
        assert!(OPERATION_SECONDS.iter().all(|bound| *bound < KUBELET_GIVES_UP_SECONDS));
    }
}
