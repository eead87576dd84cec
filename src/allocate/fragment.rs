//! What of a node's free GPU memory is of no use to pods that may come.
//!
//! Fragmentation after "Beware of Fragmentation" (USENIX ATC 2023): for each shape of pod that is expected,
//! the free memory that such a pod cannot use, weighted by how often the shape is seen; a placement is rated by
//! how much it adds. As there, all of a node is lost to a pod that does not fit on it, and else the GPUs on
//! which its part does not fit.
//! Ours looks further on the node's CPU and memory: those feed only so many pods of the shape, and what the GPUs
//! hold beyond those and one more is lost to the shape, too. So a node's last CPUs are kept for its free GPUs
//! before the first pod is turned away.
//!
//! All in whole numbers, so that an answer never depends on the order of additions.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use super::ask::{Shape, Want};
use super::choice::Choices;
use super::fit::{Picked, Terms, needs};
use super::index::Nodes;
use super::node::{Gpu, GpuClass, Node};
use super::score::Policy;
use super::sought::Sought;

/// Most frequent shapes that are looked at: bounds the cost of a score.
const TARGETS_MAX: usize = 128;
/// Distinct shapes that are counted.
const SHAPES_MAX: usize = 1024;
/// Beyond so many pods the counts are halved: the past fades.
const SEEN_MAX: u64 = 1 << 16;

/// Pods seen so far.
#[derive(Debug, Default)]
pub(super) struct Workload {
    counts: BTreeMap<Shape, u64>,
    total: u64,
    /// When the targets are looked at again.
    next: u64,
    shapes: Vec<(Shape, u64)>,
    pub targets: Targets,
}

/// Shapes that are expected, field by field: what is lost is summed over all of them at once, and every score
/// needs that a few times. Numbers are `i32` because processors compare those several at a time.
#[derive(Debug, Default)]
pub(super) struct Targets {
    /// Grows with each change.
    epoch: u64,
    pub sought: Sought,
    weights: Vec<u32>,
    weight: u64,
    gpus: Vec<i32>,
    cpu_milli: TargetDemand,
    memory_mib: TargetDemand,
    by_class: Vec<Needs>,
    /// For classes that are not known yet.
    never: Needs,
}

/// What the targets need of GPUs of a class.
#[derive(Debug, Default)]
struct Needs {
    /// MiB; `NEVER`: no GPU of the class will do.
    mib: Vec<i32>,
    /// Of all GPUs of a pod together; with `NEVER`, a pod is served by another of a node's GPUs, and is not limited.
    pod_mib: Vec<i32>,
    /// So many pods, and one more, need no more than an `i32` holds.
    pods: Vec<i32>,
}

/// More than any GPU has.
const NEVER: i32 = i32::MAX;

impl Workload {
    /// Pods without GPUs leave the same GPU memory unused wherever they are.
    pub fn seen(&mut self, shape: &Shape, nodes: &Nodes, choices: &Choices) {
        if shape.gpus() == 0 {
            return;
        }
        if let Some(count) = self.counts.get_mut(shape) {
            *count += 1;
        } else if self.counts.len() < SHAPES_MAX {
            self.counts.insert(shape.clone(), 1);
        } else {
            return;
        }
        self.total += 1;
        if self.total >= SEEN_MAX {
            self.counts.values_mut().for_each(|count| *count /= 2);
            self.counts.retain(|_, count| *count > 0);
            self.total = self.counts.values().sum();
            self.next = self.total;
        }
        if self.total >= self.next {
            self.next = self.total + self.total.div_ceil(4);
            self.renew(&nodes.classes);
            self.targets.sought.renew(&self.shapes, nodes, choices);
        }
    }

    /// New targets, if they are other than the old ones by more than a fiftieth: each change makes every score
    /// stale.
    fn renew(&mut self, classes: &[GpuClass]) {
        let mut shapes: Vec<_> = self.counts.iter().map(|(shape, count)| (shape.clone(), *count)).collect();
        shapes.sort_by(|one, other| other.1.cmp(&one.1).then_with(|| one.0.cmp(&other.0)));
        shapes.truncate(TARGETS_MAX);
        if differ(&self.shapes, &shapes) {
            self.shapes = shapes;
            self.make(classes);
        }
    }

    /// Scores by a policy are of no use once this has changed.
    pub fn epoch(&self, policy: Policy) -> u64 {
        match policy {
            Policy::Pack => self.targets.sought.epoch,
            Policy::Spread => 0,
            Policy::Fragmentation => self.targets.epoch,
        }
    }

    pub fn classes_changed(&mut self, classes: &[GpuClass]) {
        if self.targets.by_class.len() != classes.len() {
            self.make(classes);
        }
    }

    fn make(&mut self, classes: &[GpuClass]) {
        let largest = classes.iter().map(|class| class.memory_mib).max().unwrap_or(0);
        // A pod with several wants counts as if all were like the largest. Selectors do not count.
        let large =
            |shape: &Shape| shape.wants.iter().rev().max_by_key(|want| want.part.mib(largest)).cloned();
        let wants: Vec<_> = self.shapes.iter().map(|(shape, _)| (large(shape), shape.gpus())).collect();
        let of_class = |class: &GpuClass| {
            let need = |want: &Want| needs(want, class).map_or(NEVER, |(mib, _)| narrow(mib));
            let mib: Vec<_> = wants.iter().map(|(want, _)| want.as_ref().map_or(NEVER, need)).collect();
            let pod = |(mib, (_, gpus)): (&i32, &(_, u32))| mib.saturating_mul(narrow(u64::from(*gpus)));
            Needs::new(mib.iter().zip(&wants).map(pod).collect(), mib)
        };
        // They are halved before they grow too large.
        let weights = self.shapes.iter().map(|(_, weight)| *weight as u32);
        self.targets = Targets {
            epoch: self.targets.epoch + 1,
            sought: std::mem::take(&mut self.targets.sought),
            weights: weights.collect(),
            weight: self.shapes.iter().map(|(_, weight)| weight).sum(),
            gpus: wants.iter().map(|(_, gpus)| narrow(u64::from(*gpus))).collect(),
            cpu_milli: TargetDemand::of(self.shapes.iter().map(|(shape, _)| shape.cpu_milli)),
            memory_mib: TargetDemand::of(self.shapes.iter().map(|(shape, _)| shape.memory.mib_ceil())),
            by_class: classes.iter().map(of_class).collect(),
            never: Needs::new(vec![NEVER; wants.len()], vec![NEVER; wants.len()]),
        };
    }
}

/// Half the sum of differences of frequencies, over a fiftieth?
fn differ(old: &[(Shape, u64)], new: &[(Shape, u64)]) -> bool {
    let sum = |list: &[(Shape, u64)]| list.iter().map(|(_, weight)| u128::from(*weight)).sum::<u128>();
    let (of_old, of_new) = (sum(old), sum(new));
    if of_old == 0 {
        return true;
    }
    let old: BTreeMap<_, _> = old.iter().map(|(shape, weight)| (shape, u128::from(*weight))).collect();
    let mut more = 0;
    for (shape, weight) in new {
        let was = old.get(shape).copied().unwrap_or(0) * of_new;
        more += (u128::from(*weight) * of_old).saturating_sub(was);
    }
    more * 50 > of_old * of_new
}

/// A node's free GPU memory, as the targets see it.
#[derive(Debug, Default)]
pub(super) struct Tally {
    total_mib: i32,
    /// By target: MiB on GPUs where its part fits, and how many those are.
    mib: Vec<i32>,
    gpus: Vec<i32>,
    /// By target: the MiB that the node's CPU and memory can feed.
    fed: Vec<i32>,
    /// A GPU counts as having no more than this, so that no sum is too large.
    most_mib: i32,
}

impl Tally {
    /// Counts a node's GPUs, as if the pod of these terms had taken what it wants of the GPUs `taken`.
    pub fn count(&mut self, targets: &Targets, node: &Node, taken: Option<(&Terms, &[Picked])>) {
        let mib = |(terms, picked): (&Terms, &[Picked]), at: usize, gpu: &Gpu| -> u64 {
            let of_it = picked.iter().filter(|one| one.gpu == at);
            of_it.map(|one| one.mib(terms, gpu)).fold(0, u64::saturating_add)
        };
        self.most_mib = i32::MAX / 2 / narrow(node.gpus.len() as u64).max(1);
        for counts in [&mut self.mib, &mut self.gpus] {
            counts.clear();
            counts.resize(targets.weights.len(), 0);
        }
        self.total_mib = 0;
        for (at, gpu) in node.gpus.iter().enumerate() {
            let used = taken.map_or(0, |taken| mib(taken, at, gpu));
            let free = self.clamp(gpu.usable_mib().saturating_sub(used));
            if free == 0 {
                continue;
            }
            self.total_mib += free;
            let needs = &targets.needs(gpu.class).mib;
            for ((mib, gpus), need) in self.mib.iter_mut().zip(&mut self.gpus).zip(needs) {
                let fits = i32::from(*need <= free);
                *mib += free & -fits;
                *gpus += fits;
            }
        }
    }

    fn clamp(&self, mib: u64) -> i32 {
        narrow(mib).min(self.most_mib)
    }

    /// Counts what so much less CPU and memory can feed: MiB that pods of a shape may use before either is short, for
    /// as many as there is room, and one more. Nothing if there is no room for one.
    pub fn feed(&mut self, targets: &Targets, node: &Node, cpu_milli: u64, memory_mib: u64) {
        let cpu = narrow(node.free_cpu_milli().saturating_sub(cpu_milli)).min(LEFT_MAX);
        let memory = narrow(node.free_memory_mib().saturating_sub(memory_mib)).min(LEFT_MAX);
        // A node's GPUs are nearly always of one class; the first stands for all.
        let needs = targets.needs(node.gpus.first().map_or(0, |gpu| gpu.class));
        let of_cpu = targets.cpu_milli.numbers.iter().zip(&targets.cpu_milli.inverses);
        let of_memory = targets.memory_mib.numbers.iter().zip(&targets.memory_mib.inverses);
        let of_gpus = needs.pod_mib.iter().zip(&needs.pods);
        self.fed.resize(targets.weights.len(), 0);
        for (((fed, cpus), mib), pod) in self.fed.iter_mut().zip(of_cpu).zip(of_memory).zip(of_gpus) {
            let pods = times(cpu, *cpus.1).min(times(memory, *mib.1)).min(*pod.1);
            let room = i32::from(*cpus.0 <= cpu) & i32::from(*mib.0 <= memory);
            *fed = ((pods + 1) * *pod.0) & -room;
        }
    }

    /// What is lost: MiB, times the weights.
    pub fn lost(&self, targets: &Targets) -> u64 {
        self.lost_with(targets, 0, 0, 0)
    }

    /// The same with one GPU of a class changed from so much free memory to another.
    pub fn lost_with(&self, targets: &Targets, class: u32, before: u64, after: u64) -> u64 {
        let (before, after) = (self.clamp(before), self.clamp(after));
        let mut used = 0;
        let counts = self.mib.iter().zip(&self.gpus).zip(&self.fed);
        let each = counts.zip(&targets.needs(class).mib).zip(&targets.gpus).zip(&targets.weights);
        for (((((mib, gpus), fed), need), least), weight) in each {
            let (was, is) = (i32::from(*need <= before), i32::from(*need <= after));
            let mib = mib - (before & -was) + (after & -is);
            let enough = -i32::from(gpus - was + is >= *least);
            // Neither is negative.
            used += u64::from((mib.min(*fed) & enough) as u32) * u64::from(*weight);
        }
        let total = u64::from((self.total_mib - before + after) as u32);
        total * targets.weight - used
    }
}

/// What is lost of nodes as they are, by the number of their last change: shapes that are rated on a node one after
/// another find it as it was.
#[derive(Debug, Default)]
pub(super) struct Lost {
    epoch: u64,
    kept: Vec<(u64, u64)>,
}

/// A power of two: nodes in a cluster of which that is kept.
const LOST_KEPT: usize = 1 << 14;

impl Lost {
    /// Of a node whose GPUs are counted.
    pub fn of(&mut self, targets: &Targets, node: &Node, tally: &mut Tally) -> u64 {
        if self.epoch != targets.epoch || self.kept.is_empty() {
            self.epoch = targets.epoch;
            self.kept.clear();
            self.kept.resize(LOST_KEPT, (u64::MAX, 0));
        }
        let kept = &mut self.kept[node.changed_at as usize % LOST_KEPT];
        if kept.0 != node.changed_at {
            tally.feed(targets, node, 0, 0);
            *kept = (node.changed_at, tally.lost(targets));
        }
        kept.1
    }
}

impl Needs {
    fn new(pod_mib: Vec<i32>, mib: Vec<i32>) -> Self {
        let pods = pod_mib.iter().map(|mib| i32::MAX / mib.max(&1) - 1).collect();
        Self { mib, pod_mib, pods }
    }
}

impl Targets {
    fn needs(&self, class: u32) -> &Needs {
        self.by_class.get(class as usize).unwrap_or(&self.never)
    }
}

fn narrow(number: u64) -> i32 {
    i32::try_from(number).unwrap_or(i32::MAX)
}

/// What pods of each target ask of a node's CPU, or of its memory.
#[derive(Debug, Default)]
struct TargetDemand {
    numbers: Vec<i32>,
    inverses: Vec<f32>,
}

/// What a node has left beyond 4,000 cores or 4 TiB does not count: up to here [`times`] is exact.
const LEFT_MAX: i32 = 1 << 22;

impl TargetDemand {
    fn of(numbers: impl Iterator<Item = u64>) -> Self {
        // What no node has need not be told apart.
        let numbers: Vec<i32> = numbers.map(|number| narrow(number).min(LEFT_MAX + 1)).collect();
        let inverses = numbers.iter().map(|number| 1.0 / (*number).max(1) as f32).collect();
        Self { numbers, inverses }
    }
}

/// Divides by multiplying, which processors do several at a time. The half keeps the product away from whole numbers,
/// further than rounding can move it.
fn times(left: i32, inverse: f32) -> i32 {
    // Beside so large a number there is no room for a fraction, and the whole stands in the last bits.
    const WHOLE: f32 = 12_582_912.0;
    ((left as f32 + 0.5) * inverse - 0.5 + WHOLE).to_bits() as i32 - WHOLE.to_bits() as i32
}
