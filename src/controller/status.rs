//! How things are: for metrics, and for who asks the process.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::allocate::{NodeView, audit};
use crate::controller::core::Core;
use crate::controller::holds::HoldPhase;
use crate::controller::metrics::{Room, WaitingLabels};
use crate::controller::recorder::Reason;
use crate::controller::view::GpuRef;
use crate::model::claim::PodRef;

/// So many pods that wait are named in metrics: each is a series.
const NAMED_MAX: usize = 50;

impl Core {
    /// What is left for shares on each node.
    pub fn rooms(&self) -> Vec<(&str, Room)> {
        self.capacity.index.nodes().map(|node| (node.name().as_str(), room(node))).collect()
    }

    /// Pods that wait, by reason.
    pub fn waiting(&self) -> BTreeMap<Reason, usize> {
        self.recorder.reasons(|pod| self.queue.contains(pod))
    }

    /// The pods that have waited the longest, 50 at most, each with the time of its creation in seconds since 1970.
    pub fn longest_waiting(&self) -> Vec<(WaitingLabels, i64)> {
        let waiting = self.recorder.each_reason().filter(|(uid, _)| self.queue.contains(uid));
        let pods = waiting.filter_map(|(uid, reason)| {
            let pod = self.view.pod(uid)?;
            Some((pod.created?.as_second(), &pod.at, reason))
        });
        let mut pods: Vec<_> = pods.collect();
        pods.sort_unstable_by_key(|&(created, at, _)| (created, &at.namespace, &at.name));
        pods.truncate(NAMED_MAX);
        let labels = |at: &PodRef, reason: Reason| WaitingLabels {
            namespace: at.namespace.clone(),
            pod: at.name.clone(),
            reason: reason.as_str(),
        };
        pods.into_iter().map(|(created, at, reason)| (labels(at, reason), created)).collect()
    }

    /// GPUs that two parties name, or that more is granted of than they have.
    pub fn overcommitted(&self) -> usize {
        self.holds.gpus.contested().len() + audit(&self.capacity.index).len()
    }

    /// GPUs that are held, and those of them without a share.
    pub fn held_counts(&self) -> (usize, usize) {
        let held = || self.holds.all().filter(|(gpu, _)| self.holds.is_held(gpu));
        (held().count(), held().filter(|(gpu, _)| !self.capacity.is_granted(gpu)).count())
    }

    pub fn state(&self) -> Value {
        let holds: BTreeMap<String, &str> =
            self.holds.all().map(|(gpu, phase)| (gpu.to_string(), word(phase))).collect();
        let waiting: BTreeMap<&str, usize> =
            self.waiting().into_iter().map(|(reason, count)| (reason.as_str(), count)).collect();
        json!({
            "complete": self.view.is_complete(),
            "waiting": {"pods": self.queue.len(), "byReason": waiting},
            "plans": self.tracker.plans(),
            "holds": holds,
            "kept": self.reserves.state(),
            "moves": self.reserves.evictions.moves.state(),
            "contested": self.holds.gpus.contested().iter().map(GpuRef::to_string).collect::<Vec<_>>(),
        })
    }
}

fn room(node: NodeView<'_>) -> Room {
    let mut room = Room::default();
    // Of GPUs that are cut into MIG devices no share is placed on.
    for gpu in node.gpus().filter(|gpu| !gpu.closed() && !gpu.tainted() && !gpu.is_cut()) {
        let free = gpu.memory().1.mib_floor();
        room.free += free;
        match gpu.slots() == 0 || gpu.compute() == 0 {
            true => room.stranded += free,
            false => room.largest = room.largest.max(free),
        }
    }
    room
}

fn word(phase: &HoldPhase) -> &'static str {
    match phase {
        HoldPhase::Writing => "writing",
        HoldPhase::Settling { .. } => "settling",
        HoldPhase::Looking { .. } => "looking",
        HoldPhase::Held { idle: None, .. } => "held",
        HoldPhase::Held { .. } => "idle",
        HoldPhase::Releasing { .. } => "leaving",
    }
}
