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

use std::collections::BTreeMap;

use super::ask::{Shape, Want};
use super::fit::{Terms, needs};
use super::node::{Class, Gpu, Node};

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
    /// Grows with each change of the targets.
    pub epoch: u64,
}

/// Shapes that are expected.
#[derive(Debug, Default)]
pub(super) struct Targets(Vec<Target>);

#[derive(Debug)]
struct Target {
    weight: u64,
    gpus: u64,
    cpu_milli: u32,
    memory_mib: u32,
    /// By class, MiB; `NEVER`: no GPU of the class will do.
    needs: Vec<u64>,
}

const NEVER: u64 = u64::MAX;

impl Workload {
    /// Pods without GPUs leave the same GPU memory unused wherever they are.
    pub fn seen(&mut self, shape: &Shape, classes: &[Class]) {
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
            self.renew(classes);
        }
    }

    /// New targets, if they are other than the old ones by more than a fiftieth: each change makes every score
    /// stale.
    fn renew(&mut self, classes: &[Class]) {
        let mut shapes: Vec<_> = self.counts.iter().map(|(shape, count)| (shape.clone(), *count)).collect();
        shapes.sort_by(|one, other| other.1.cmp(&one.1).then_with(|| one.0.cmp(&other.0)));
        shapes.truncate(TARGETS_MAX);
        if differ(&self.shapes, &shapes) {
            self.shapes = shapes;
            self.make(classes);
        }
    }

    pub fn classes_changed(&mut self, classes: &[Class]) {
        let known = self.targets.0.first().map_or(classes.len(), |target| target.needs.len());
        if known != classes.len() {
            self.make(classes);
        }
    }

    fn make(&mut self, classes: &[Class]) {
        let largest = classes.iter().map(|class| class.memory_mib).max().unwrap_or(0);
        let need = |want: Option<&Want>, class| want.and_then(|want| needs(want, class).ok());
        let target = |(shape, weight): &(Shape, u64)| {
            // A pod with several wants counts as if all were like the largest. Selectors do not count.
            let want = shape.wants.iter().rev().max_by_key(|want| want.part.mib(largest));
            Target {
                weight: *weight,
                gpus: u64::from(shape.gpus()),
                cpu_milli: narrow(shape.cpu_milli),
                memory_mib: narrow(shape.memory.mib_ceil()),
                needs: classes.iter().map(|class| need(want, class).map_or(NEVER, |(mib, _)| mib)).collect(),
            }
        };
        self.targets = Targets(self.shapes.iter().map(target).collect());
        self.epoch += 1;
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

/// A node's free GPU memory, as each target sees it.
#[derive(Debug, Default)]
pub(super) struct Tally {
    total_mib: u64,
    /// By target: MiB on GPUs where its part fits, and how many those are.
    fits: Vec<(u64, u64)>,
    /// By target: the MiB that the node's CPU and memory can feed.
    fed: Vec<u64>,
}

impl Tally {
    /// Counts a node, as if the pod of these terms had taken what it wants of the GPUs `taken` (places of GPU and
    /// want), and its CPU and memory.
    pub fn count(&mut self, targets: &Targets, node: &Node, taken: Option<(&Terms, &[(usize, usize)])>) {
        let (cpu, memory) = taken.map_or((0, 0), |(terms, _)| (terms.cpu_milli, terms.memory_mib));
        let mib = |(terms, picked): (&Terms, &[(usize, usize)]), at: usize, gpu: &Gpu| -> u64 {
            let of_it = picked.iter().filter(|(gpu, _)| *gpu == at);
            of_it.map(|(_, want)| terms.wants[*want].mib(gpu)).sum()
        };
        self.feed(targets, node, cpu, memory);
        self.fits.clear();
        self.fits.resize(targets.0.len(), (0, 0));
        self.total_mib = 0;
        for (at, gpu) in node.gpus.iter().enumerate() {
            let used = taken.map_or(0, |taken| mib(taken, at, gpu));
            let free = gpu.usable_mib().saturating_sub(used);
            if free == 0 {
                continue;
            }
            self.total_mib += free;
            for (target, (mib, gpus)) in targets.0.iter().zip(&mut self.fits) {
                let fits = u64::from(free >= target.need(gpu.class));
                *mib += free * fits;
                *gpus += fits;
            }
        }
    }

    /// Counts what so much less CPU and memory can feed.
    pub fn feed(&mut self, targets: &Targets, node: &Node, cpu_milli: u64, memory_mib: u64) {
        let cpu = narrow(node.free_cpu_milli().saturating_sub(cpu_milli));
        let memory = narrow(node.free_memory_mib().saturating_sub(memory_mib));
        // A node's GPUs are nearly always of one class; the first stands for all.
        let class = node.gpus.first().map_or(0, |gpu| gpu.class);
        self.fed.clear();
        self.fed.extend(targets.0.iter().map(|target| target.fed(cpu, memory, class)));
    }

    /// What is lost: MiB, times the weights.
    pub fn lost(&self, targets: &Targets) -> u64 {
        let each = targets.0.iter().zip(&self.fits).zip(&self.fed);
        each.map(|((target, fits), fed)| target.lost(*fits, self.total_mib, *fed)).sum()
    }

    /// The same with one GPU of a class changed from so much free memory to another.
    pub fn lost_with(&self, targets: &Targets, class: u32, before: u64, after: u64) -> u64 {
        let total = self.total_mib - (before - after);
        let mut sum = 0;
        for ((target, &(mib, gpus)), fed) in targets.0.iter().zip(&self.fits).zip(&self.fed) {
            let need = target.need(class);
            let (was, is) = (u64::from(before >= need), u64::from(after >= need));
            let fits = (mib - before * was + after * is, gpus - was + is);
            sum += target.lost(fits, total, *fed);
        }
        sum
    }
}

/// CPU and memory as numbers that divide fast: no node has 4 million cores or 4 PiB.
fn narrow(number: u64) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

impl Target {
    fn need(&self, class: u32) -> u64 {
        self.needs.get(class as usize).copied().unwrap_or(NEVER)
    }

    /// MiB that pods of this shape may use before CPU or memory is short: for as many as there is room, and one
    /// more. Nothing if there is no room for one.
    fn fed(&self, cpu: u32, memory: u32, class: u32) -> u64 {
        if cpu < self.cpu_milli || memory < self.memory_mib {
            return 0;
        }
        let pods = (cpu / self.cpu_milli.max(1)).min(memory / self.memory_mib.max(1));
        match self.need(class) {
            NEVER => u64::MAX, // another of the node's GPUs serves it, and is not limited
            need => (u64::from(pods) + 1) * need * self.gpus,
        }
    }

    fn lost(&self, (mib, gpus): (u64, u64), total: u64, fed: u64) -> u64 {
        let usable = if gpus < self.gpus { 0 } else { mib.min(fed) };
        (total - usable) * self.weight
    }
}
