//! What the controller counts.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;

use crate::model::quantity::Bytes;
use crate::ops::metrics::{Registry, gauge_value};

/// Bounds in seconds: a decision takes microseconds, a claim that waits for a GPU to settle seconds.
const DECISION_SECONDS: [f64; 10] =
    [0.000_01, 0.000_02, 0.000_05, 0.000_1, 0.000_2, 0.000_5, 0.001, 0.005, 0.025, 0.1];
const PLACED_SECONDS: [f64; 12] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 30.0, 300.0];

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabels {
    reason: &'static str,
}

/// A pod that waits, and why.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct WaitingLabels {
    pub namespace: String,
    pub pod: String,
    pub reason: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct WriteLabels {
    what: &'static str,
    result: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ResultLabels {
    result: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct NodeLabels {
    node: String,
}

/// Clones count into the same metrics.
#[derive(Debug, Clone)]
pub struct ControllerMetrics {
    /// 1 while this process leads.
    pub leading: Gauge,
    pub decisions: Counter,
    pub refusals: Counter,
    decision: Histogram,
    placed: Histogram,
    pub waiting: WaitingMetrics,
    writes: Family<WriteLabels, Counter>,
    pub feed: FeedMetrics,
    pub dropped_events: Counter,
    pub gpus: GpuMetrics,
    pub kept: KeptMetrics,
    pub templates: TemplateMetrics,
}

/// Pods that wait for a share.
#[derive(Debug, Clone, Default)]
pub struct WaitingMetrics {
    reasons: Family<ReasonLabels, Gauge>,
    /// When each was created, in seconds since 1970.
    pods: Family<WaitingLabels, Gauge>,
}

/// What the API server tells.
#[derive(Debug, Clone, Default)]
pub struct FeedMetrics {
    /// Changes that were taken in.
    pub changes: Counter,
    /// Objects that are there and cannot be read.
    pub unreadable: Gauge,
    /// Terms of required anti-affinity that are not followed, because there are too many.
    pub unfollowed: Counter,
}

/// ResourceClaimTemplates that are created for queued Jobs and the like.
#[derive(Debug, Clone, Default)]
pub struct TemplateMetrics {
    results: Family<ResultLabels, Counter>,
}

/// The GPUs of the cluster, and what is left of them for shares.
#[derive(Debug, Clone, Default)]
pub struct GpuMetrics {
    /// GPUs that are held, idle ones among them.
    pub held: Gauge,
    pub held_idle: Gauge,
    /// GPUs that two parties name, or that more is granted of than they have. Must read 0.
    pub overcommitted: Gauge,
    free: Family<NodeLabels, Gauge>,
    largest: Family<NodeLabels, Gauge>,
    stranded: Family<NodeLabels, Gauge>,
    cluster_free: Gauge,
    cluster_largest: Gauge,
    cluster_stranded: Gauge,
}

/// Places that are kept free for pods and gangs which were passed for too long.
#[derive(Debug, Clone, Default)]
pub struct KeptMetrics {
    /// Pods and gangs that a place is kept free for.
    pub units: Gauge,
    /// GPUs of which a part is kept.
    pub gpus: Gauge,
    /// How often one was kept and the time was over.
    pub in_vain: Counter,
    pub preemption: PreemptionMetrics,
    pub moves: MoveMetrics,
}

/// Pods that end for others of higher priority.
#[derive(Debug, Clone, Default)]
pub struct PreemptionMetrics {
    /// Pods and gangs for which others are ending.
    pub under_way: Gauge,
    results: Family<ResultLabels, Counter>,
    put_off: Family<ReasonLabels, Counter>,
}

/// Room that moves of other pods make.
#[derive(Debug, Clone, Default)]
pub struct MoveMetrics {
    /// For pods or gangs that wait.
    pub searches: Counter,
    /// Pods that the API server was asked to evict.
    pub evictions: Counter,
    /// Pods and gangs that got a place by it, and that did not.
    pub served: Counter,
    pub in_vain: Counter,
}

/// MiB of one node's GPUs that shares can be placed on; shown in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Room {
    pub free: u64,
    /// On one GPU.
    pub largest: u64,
    /// Free, but of no use: no client slots or no compute are left.
    pub stranded: u64,
}

impl ControllerMetrics {
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self {
            leading: Gauge::default(),
            decisions: Counter::default(),
            refusals: Counter::default(),
            decision: Histogram::new(DECISION_SECONDS),
            placed: Histogram::new(PLACED_SECONDS),
            waiting: WaitingMetrics::default(),
            writes: Family::default(),
            feed: FeedMetrics::default(),
            dropped_events: Counter::default(),
            gpus: GpuMetrics::default(),
            kept: KeptMetrics::default(),
            templates: TemplateMetrics::default(),
        };
        metrics.register_work(registry.sub_registry_with_prefix("controller"));
        metrics.gpus.register(registry.sub_registry_with_prefix("controller"));
        metrics.kept.register(registry.sub_registry_with_prefix("controller"));
        metrics.templates.register(registry.sub_registry_with_prefix("controller"));
        metrics
    }

    fn register_work(&self, registry: &mut Registry) {
        registry.register("leading", "1 while this process places claims", self.leading.clone());
        registry.register("decisions", "Pods and gangs that were placed", self.decisions.clone());
        registry.register("refusals", "Attempts that found no place", self.refusals.clone());
        registry.register(
            "decision_seconds",
            "Time that one round took, divided by the pods and gangs that it looked at",
            self.decision.clone(),
        );
        registry.register(
            "placed_seconds",
            "From the first sight of a waiting pod to the allocation of its claims",
            self.placed.clone(),
        );
        self.waiting.register(registry);
        registry.register("writes", "Writes to the API server, by kind and result", self.writes.clone());
        registry.register(
            "changes",
            "Changes from the API server that were taken in",
            self.feed.changes.clone(),
        );
        registry.register(
            "unreadable_objects",
            "Objects of the API server that are there and cannot be read",
            self.feed.unreadable.clone(),
        );
        registry.register(
            "unfollowed_anti_affinity_terms",
            "Terms of required anti-affinity of pods that other pods are placed without, because there are too many",
            self.feed.unfollowed.clone(),
        );
        registry.register(
            "dropped_events",
            "Events that the API server did not get",
            self.dropped_events.clone(),
        );
    }

    /// One round looked at so many pods and gangs.
    pub fn round(&self, seconds: f64, looked_at: usize) {
        for _ in 0..looked_at {
            // As many observations as decisions, each of the mean: a round is timed once.
            self.decision.observe(seconds / looked_at as f64);
        }
    }

    pub fn placed(&self, seconds: f64) {
        self.placed.observe(seconds);
    }

    pub fn write(&self, what: &'static str, result: &'static str) {
        self.writes.get_or_create(&WriteLabels { what, result }).inc();
    }
}

impl WaitingMetrics {
    fn register(&self, registry: &mut Registry) {
        registry.register("waiting", "Pods that wait for a share, by reason", self.reasons.clone());
        registry.register(
            "waiting_pod_created_timestamp_seconds",
            "When a pod that waits was created; of the pods that have waited the longest",
            self.pods.clone(),
        );
    }

    /// How many pods wait for this reason.
    pub fn count(&self, reason: &'static str, count: usize) {
        self.reasons.get_or_create(&ReasonLabels { reason }).set(gauge_value(count));
    }

    /// These pods are named, and no others; each with the second of 1970's count in which it was created.
    pub fn name(&self, pods: impl Iterator<Item = (WaitingLabels, i64)>) {
        self.pods.clear();
        for (labels, created) in pods {
            self.pods.get_or_create(&labels).set(created);
        }
    }
}

impl TemplateMetrics {
    fn register(&self, registry: &mut Registry) {
        registry.register(
            "templates",
            "ResourceClaimTemplates for queued Jobs, by what came of each try",
            self.results.clone(),
        );
        // Shown before anything is counted.
        drop(self.results.get_or_create(&ResultLabels { result: "created" }));
    }

    /// One try, or one object that cannot be read, with what came of it.
    pub fn count(&self, result: &'static str) {
        self.results.get_or_create(&ResultLabels { result }).inc();
    }
}

impl GpuMetrics {
    fn register(&self, registry: &mut Registry) {
        registry.register("held_gpus", "GPUs that are held for shares", self.held.clone());
        registry.register("held_idle_gpus", "Held GPUs without a share", self.held_idle.clone());
        registry.register(
            "overcommitted_gpus",
            "GPUs that two parties name, or that more is granted of than they have; must be 0",
            self.overcommitted.clone(),
        );
        registry.register("node_free_bytes", "Memory of a node's GPUs left for shares", self.free.clone());
        registry.register(
            "node_largest_bytes",
            "The largest share that a node can take",
            self.largest.clone(),
        );
        registry.register(
            "node_stranded_bytes",
            "Memory of a node's GPUs that is left but cannot be used, for lack of client slots or compute",
            self.stranded.clone(),
        );
        registry.register("free_bytes", "Memory of all GPUs left for shares", self.cluster_free.clone());
        registry.register(
            "largest_bytes",
            "The largest share that fits anywhere",
            self.cluster_largest.clone(),
        );
        registry.register(
            "stranded_bytes",
            "Memory of all GPUs that is left but cannot be used, for lack of client slots or compute",
            self.cluster_stranded.clone(),
        );
    }

    /// All nodes as they are now; those that are not named have gone.
    pub fn room<'a>(&self, nodes: impl Iterator<Item = (&'a str, Room)>) {
        for family in [&self.free, &self.largest, &self.stranded] {
            family.clear();
        }
        let mut all = Room::default();
        for (node, room) in nodes {
            let labels = NodeLabels { node: node.to_owned() };
            self.free.get_or_create(&labels).set(bytes(room.free));
            self.largest.get_or_create(&labels).set(bytes(room.largest));
            self.stranded.get_or_create(&labels).set(bytes(room.stranded));
            all.free += room.free;
            all.stranded += room.stranded;
            all.largest = all.largest.max(room.largest);
        }
        self.cluster_free.set(bytes(all.free));
        self.cluster_largest.set(bytes(all.largest));
        self.cluster_stranded.set(bytes(all.stranded));
    }
}

fn bytes(mib: u64) -> i64 {
    gauge_value(Bytes::from_mib(mib).0)
}

impl KeptMetrics {
    fn register(&self, registry: &mut Registry) {
        registry.register(
            "kept_units",
            "Pods and gangs that were passed over for too long, and that a place is kept free for",
            self.units.clone(),
        );
        registry.register(
            "kept_gpus",
            "GPUs of which a part is kept free for such pods and gangs",
            self.gpus.clone(),
        );
        registry.register(
            "kept_in_vain",
            "Times that a place was kept free until its time was over, and its pod or gang was not placed",
            self.in_vain.clone(),
        );
        self.preemption.register(registry);
        self.moves.register(registry);
    }
}

impl PreemptionMetrics {
    fn register(&self, registry: &mut Registry) {
        registry.register(
            "preempting_units",
            "Pods and gangs for which pods of lower priority are ending",
            self.under_way.clone(),
        );
        registry.register(
            "preemptions",
            "Pods and gangs for which pods of lower priority were told to end, by what came of it",
            self.results.clone(),
        );
        registry.register(
            "preemptions_put_off",
            "Times that pods of lower priority could have ended and did not, by reason",
            self.put_off.clone(),
        );
    }

    /// So often this came of it.
    pub fn result(&self, result: &'static str, times: u64) {
        self.results.get_or_create(&ResultLabels { result }).inc_by(times);
    }

    pub fn put_off(&self, reason: &'static str, times: u64) {
        self.put_off.get_or_create(&ReasonLabels { reason }).inc_by(times);
    }
}

impl MoveMetrics {
    fn register(&self, registry: &mut Registry) {
        registry.register(
            "move_searches",
            "Searches for pods that would have to move so that what waits finds room",
            self.searches.clone(),
        );
        registry.register(
            "move_evictions",
            "Pods that the controller has asked the API server to evict so that they are made anew elsewhere",
            self.evictions.clone(),
        );
        registry.register(
            "moves_served",
            "Pods and gangs that were placed where others had left for them",
            self.served.clone(),
        );
        registry.register(
            "moves_in_vain",
            "Pods and gangs for which others were to leave, and that were not placed",
            self.in_vain.clone(),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::metrics::{registry, text};

    #[test]
    fn rooms_add_up_and_nodes_that_went_are_not_told_of() {
        let mut registry = registry();
        let metrics = ControllerMetrics::register(&mut registry);
        let room = |free, largest, stranded| Room { free, largest, stranded };
        metrics.gpus.room([("gone", room(1, 1, 0))].into_iter());
        metrics.gpus.room([("a", room(100, 60, 0)), ("b", room(50, 50, 7))].into_iter());
        metrics.waiting.count("memory", 3);
        for pod in ["gone-too", "p"] {
            let labels = WaitingLabels { namespace: "ml".into(), pod: pod.into(), reason: "memory" };
            metrics.waiting.name([(labels, 1_700_000_000)].into_iter());
        }
        metrics.write("hold", "ok");
        let text = text(&registry).unwrap();
        for line in [
            "tranche_controller_free_bytes 157286400",
            "tranche_controller_largest_bytes 62914560",
            "tranche_controller_stranded_bytes 7340032",
            "tranche_controller_node_free_bytes{node=\"a\"} 104857600",
            "tranche_controller_waiting{reason=\"memory\"} 3",
            "tranche_controller_waiting_pod_created_timestamp_seconds{namespace=\"ml\",pod=\"p\",reason=\"memory\"} 1700000000",
            "tranche_controller_writes_total{what=\"hold\",result=\"ok\"} 1",
            "tranche_controller_overcommitted_gpus 0",
            "tranche_controller_kept_gpus 0",
            "tranche_controller_kept_in_vain_total 0",
        ] {
            assert!(text.lines().any(|have| have == line), "{line} is missing from\n{text}");
        }
        assert!(!text.contains("gone"), "{text}");
    }
}
