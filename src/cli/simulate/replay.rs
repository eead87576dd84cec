//! One run: pods in a random order of their own, one after another, none leaves.

use std::fmt;
use std::str::FromStr;
use std::time::{Duration, Instant};

use super::baseline;
use super::trace::{Trace, TracePod};
use crate::allocate::{Index, Placement, Policy, decide};
use crate::model::names::PodUid;

/// Who places the pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scheduler {
    Ours(Policy),
    /// A model of what kube-scheduler does by default.
    Kube,
}

impl Scheduler {
    pub fn all() -> Vec<Self> {
        Policy::ALL.into_iter().map(Self::Ours).chain([Self::Kube]).collect()
    }

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ours(policy) => policy.as_str(),
            Self::Kube => "kube-default",
        }
    }
}

impl fmt::Display for Scheduler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Scheduler {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::all().into_iter().find(|one| one.as_str() == text);
        found.ok_or_else(|| {
            let names: Vec<_> = Self::all().iter().map(|one| one.as_str()).collect();
            format!("{text:?} is not a valid policy; use {}", names.join(", "))
        })
    }
}

/// All runs of one scheduler.
#[derive(Debug)]
pub struct Series {
    pub scheduler: Scheduler,
    pub runs: Vec<Run>,
}

#[derive(Debug)]
pub struct Run {
    /// Percent of all GPUs that were allocated when 1, 2, 3 ... percent of them had been requested; at last
    /// when the load was reached.
    pub allocated: Vec<f64>,
    /// How long each decision took.
    pub took: Vec<Duration>,
}

impl Run {
    pub fn last(&self) -> f64 {
        self.allocated.last().copied().unwrap_or(0.0)
    }
}

/// Pods in random order, again and again, until the load is requested. The one that would exceed it is left out.
fn arrivals(trace: &Trace, load: f64, seed: u32) -> Vec<&TracePod> {
    let most = (trace.capacity_milli() as f64 * load) as u64;
    let mut random = fastrand::Rng::with_seed(u64::from(seed));
    let (mut list, mut requested) = (Vec::new(), 0);
    loop {
        let mut round: Vec<&TracePod> = trace.pods.iter().collect();
        random.shuffle(&mut round);
        for pod in round {
            requested += pod.milli();
            if requested > most {
                return list;
            }
            list.push(pod);
        }
    }
}

pub fn run(trace: &Trace, scheduler: Scheduler, load: f64, seed: u32) -> Run {
    let mut index = Index::new();
    trace.nodes.iter().for_each(|node| index.insert_node(node));
    let capacity = trace.capacity_milli();
    let (mut requested, mut granted) = (0, 0);
    let mut run = Run { allocated: Vec::new(), took: Vec::new() };
    let percent = |milli: u64| milli as f64 * 100.0 / capacity as f64;
    for (nth, pod) in arrivals(trace, load, seed).into_iter().enumerate() {
        // What was allocated before this pod stands for each percent that its request passes.
        requested += pod.milli();
        while percent(requested) > (run.allocated.len() + 1) as f64 {
            run.allocated.push(percent(granted));
        }
        let start = Instant::now();
        let placement = place(&mut index, pod, scheduler);
        run.took.push(start.elapsed());
        if let Some(placement) = placement {
            let uid = PodUid::new(nth.to_string());
            if index.apply(&uid, &placement).is_ok() {
                granted += pod.milli();
            }
        }
    }
    run.allocated.push(percent(granted));
    run
}

fn place(index: &mut Index, pod: &TracePod, scheduler: Scheduler) -> Option<Placement> {
    match scheduler {
        Scheduler::Ours(policy) => {
            index.seen(&pod.shape);
            let decision = decide(index, &[pod.shape.clone().into()], policy);
            decision.ok().and_then(|mut decision| decision.placements.pop())
        }
        Scheduler::Kube => baseline::place(index, pod),
    }
}
