//! Why a pod fits nowhere, with numbers: what was needed, the most that there is, and where.

use std::collections::BTreeSet;
use std::fmt;

use super::ask::{AttributeConstraint, Part, PodAsk, Rule, Want};
use super::choice::Choice;
use super::fit::{Terms, Unfit, WantTerms, needs};
use super::index::Index;
use super::mig::MigAsk;
use super::node::{Gpu, GpuClass, Node};
use super::taints::Taints;
use crate::select::{Taint, untolerated};

/// Of looking at a node for one want, in ticks of [`crate::select::TICKS_PER_UNIT`].
const EXPLAIN_TICKS: u64 = 20;

/// Why a pod, or the first pod of a gang that did not fit, was not placed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Explanation {
    /// Pods of the gang that were placed before it, and all of them; 0 of 1 for a single pod.
    pub gang: (usize, usize),
    pub shortage: Shortage,
    pub skipped: Skipped,
}

/// What was short, of the candidates that were left.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Shortage {
    /// There is no GPU, or no node, that the pod might use.
    Candidates { gpus: u32 },
    /// MiB on one GPU.
    Memory { needed: u64, largest: u64, candidates: usize, at: String },
    /// The GPU must be idle.
    Whole { candidates: usize },
    /// Percent on one GPU.
    Compute { needed: u32, largest: u32, candidates: usize, at: String },
    /// Blocks of client slots on one GPU.
    Slots { needed: u32, largest: u32, candidates: usize, at: String },
    /// No GPU of the cluster is cut into MIG devices.
    NoMig { asked: MigAsk },
    /// A MIG device.
    Mig(Box<MigShortage>),
    /// GPUs of one node that fit.
    Gpus { needed: usize, most: usize, node: String },
    /// Each want fits somewhere, but not all on one node, or not with these attributes alike.
    Together { gpus: u32, wants: usize, alike: Vec<String> },
    /// What was allowed was spent before all ways were tried to find GPUs for all wants of a pod, or of a gang.
    Unsearched { wants: usize },
}

/// A MIG device was asked for that no candidate can make now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MigShortage {
    pub asked: MigAsk,
    /// Profile and MiB of the largest that can still be made; none: none can.
    pub largest: Option<(String, u64)>,
    pub candidates: usize,
    /// Where the largest is.
    pub at: String,
}

impl fmt::Display for MigShortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { asked, largest, candidates, at } = self;
        write!(f, "needs a MIG device with {asked}; ")?;
        match largest {
            Some((profile, mib)) => {
                write!(f, "the largest that node {at} can still make has {mib} MiB ({profile})")
            }
            None => write!(f, "{candidates} candidate GPU{} can make no more", s(*candidates as u32)),
        }
    }
}

/// What was no candidate, each counted once, by the first reason.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Skipped {
    pub nodes: SkippedNodes,
    pub gpus: SkippedGpus,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SkippedNodes {
    /// Nodes that the pod may not run on.
    pub not_allowed: usize,
    /// Nodes that have as many pods as they may, those placed before in this decision among them.
    pub pods: usize,
    /// Nodes without the CPU: how many, what is needed, the most that is left (thousandths), and where.
    pub cpu: Option<(usize, u64, u64, String)>,
    /// The same for memory, in MiB.
    pub memory: Option<(usize, u64, u64, String)>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SkippedGpus {
    pub closed: usize,
    pub unfit: UnfitGpus,
    /// A selector does not choose them.
    pub not_selected: Option<Box<NotSelected>>,
    /// A selector fails on them: how many, and the first failure.
    pub failed: Option<Box<(usize, String)>>,
    /// A taint is not tolerated: how many, and the first such taint.
    pub tainted: Option<Box<(usize, String)>>,
}

/// GPUs of classes of which none will do.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UnfitGpus {
    pub other_product: usize,
    pub isolation: usize,
    /// Less can be granted of them than is asked, even idle.
    pub too_small: Option<Box<TooSmall>>,
    /// What is asked of them is less than 1 MiB for each process.
    pub sliver: u32,
    /// They have fewer client slots than the share has processes, even idle.
    pub processes: u32,
    /// They are cut into MIG devices, and none is asked for.
    pub cut: u32,
    /// They are given whole by the scheduler only, and all of one is asked for.
    pub by_scheduler: u32,
}

/// GPUs of which less can be granted than is asked, in MiB.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TooSmall {
    pub count: usize,
    pub asked: u64,
    pub largest: u64,
}

/// GPUs that a selector leaves out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotSelected {
    pub count: usize,
    /// The request's last selector; the DeviceClass's stand before the request's.
    pub selector: String,
    /// How many selectors there are.
    pub selectors: usize,
    /// What these GPUs are.
    pub products: BTreeSet<String>,
}

/// Characters of a selector that are told.
const SELECTOR_CHARS_MAX: usize = 120;
/// Products that are told.
const PRODUCTS_MAX: usize = 4;

/// Looks at everything once more: only done for a refusal.
///
/// Of several wants, the first that fits nowhere is what is told.
pub(super) fn explain(index: &mut Index, pod: &PodAsk, gang: (usize, usize)) -> Explanation {
    let Index { nodes, score_tables, .. } = index;
    let terms = Terms::new(&pod.shape, nodes, &mut score_tables.choices);
    score_tables.choices.pay(EXPLAIN_TICKS * (nodes.all.len() * terms.wants.len()) as u64);
    let none = Want::whole(0);
    let mut told = None;
    for (at, one) in terms.wants.iter().enumerate() {
        let want = pod.shape.wants.get(at).unwrap_or(&none);
        let fit: Vec<_> = nodes.classes.iter().map(|class| needs(want, class)).collect();
        let sought =
            WantByClass { want, terms: one, fit: &fit, taints: &nodes.taints, classes: &nodes.classes };
        let (mut skipped, mut most) = (Skipped::default(), Most::default());
        for node in nodes.all.iter().flatten() {
            if !pod.nodes.allow(&node.name) {
                skipped.nodes.not_allowed += 1;
            } else if node.free_pods() < terms.pods {
                skipped.nodes.pods += 1;
            } else if node.free_cpu_milli() < terms.cpu_milli {
                more(&mut skipped.nodes.cpu, terms.cpu_milli, node.free_cpu_milli(), node);
            } else if node.free_memory_mib() < terms.memory_mib {
                more(&mut skipped.nodes.memory, terms.memory_mib, node.free_memory_mib(), node);
            } else {
                most.look(node, &sought, &mut skipped.gpus);
            }
        }
        if most.candidates == 0 || most.fitting < one.gpus {
            return Explanation { gang, shortage: most.shortage(want, one), skipped };
        }
        told.get_or_insert(skipped);
    }
    let words = |alike: &AttributeConstraint| match alike.rule {
        Rule::Same => format!("the same {}", alike.attribute),
        Rule::Different => format!("a different {} each", alike.attribute),
    };
    let alike = pod.shape.alike.iter().map(words).collect();
    let shortage = Shortage::Together { gpus: pod.shape.gpus(), wants: terms.wants.len(), alike };
    Explanation { gang, shortage, skipped: told.unwrap_or_default() }
}

fn more(entry: &mut Option<(usize, u64, u64, String)>, needed: u64, left: u64, node: &Node) {
    let (count, _, most, _) = entry.get_or_insert_with(|| (0, needed, left, node.name.to_string()));
    *count += 1;
    if left > *most {
        *entry = Some((*count, needed, left, node.name.to_string()));
    }
}

/// MiB and blocks on a GPU of a class, or why none of it will do.
type Fit = Result<(u64, u32), Unfit>;

/// The most there is of each thing, and where.
#[derive(Default)]
struct Most<'a> {
    candidates: usize,
    with_memory: usize,
    memory: Option<Top<'a, u64>>,
    compute: Option<Top<'a, u32>>,
    /// Of GPUs with the memory and the compute.
    slots: Option<Top<'a, u32>>,
    fitting: usize,
    fitting_on: Option<&'a Node>,
    /// GPUs that are cut into MIG devices; and of the candidates the one that can make the largest.
    cut: usize,
    mig: Option<Top<'a, u64>>,
}

struct Top<'a, T> {
    free: T,
    needed: T,
    at: GpuPlace<'a>,
}

/// Where a GPU is.
#[derive(Clone, Copy)]
struct GpuPlace<'a> {
    node: &'a Node,
    gpu: &'a Gpu,
}

/// What is looked for, and what is known of it on each class of GPU.
struct WantByClass<'a> {
    want: &'a Want,
    terms: &'a WantTerms,
    fit: &'a [Fit],
    taints: &'a Taints,
    classes: &'a [GpuClass],
}

impl<'a, T: PartialOrd> Top<'a, T> {
    /// The first of equals stays.
    fn raise(top: &mut Option<Self>, free: T, needed: T, at: GpuPlace<'a>) {
        if top.as_ref().is_none_or(|top| free > top.free) {
            *top = Some(Self { free, needed, at });
        }
    }

    fn at(&self) -> String {
        format!("{}/{}", self.at.node.name, self.at.gpu.device)
    }
}

impl<'a> Most<'a> {
    fn look(
        &mut self,
        node: &'a Node,
        WantByClass { want, terms, fit, taints, classes }: &WantByClass<'_>,
        skipped: &mut SkippedGpus,
    ) {
        if self.all_too_full(node, terms, fit) {
            return;
        }
        let mut fitting = 0;
        for gpu in &node.gpus {
            let class = &classes[gpu.class as usize];
            self.cut += usize::from(gpu.cut.is_some());
            let (mib, slots) = match fit[gpu.class as usize] {
                _ if gpu.closed => {
                    skipped.closed += 1;
                    continue;
                }
                Ok(_) if !terms.tolerates(gpu) => {
                    skipped.not_borne(taints.get(gpu.taints), want);
                    continue;
                }
                Ok(_) if !terms.chooses(gpu) => {
                    skipped.not_chosen(terms.choice.as_ref(), gpu, want, class);
                    continue;
                }
                Ok(needs) => needs,
                Err(unfit) => {
                    skipped.unfit.note(unfit, want, class);
                    continue;
                }
            };
            self.candidates += 1;
            let at = GpuPlace { node, gpu };
            if gpu.cut.is_some() {
                Top::raise(&mut self.mig, gpu.free_mib(), mib, at);
                fitting += usize::from(terms.need(gpu).is_some());
                continue;
            }
            Top::raise(&mut self.memory, gpu.free_mib(), mib, at);
            if gpu.free_mib() < mib {
                continue;
            }
            self.with_memory += 1;
            Top::raise(&mut self.compute, gpu.free_compute(), terms.compute, at);
            if gpu.free_compute() >= terms.compute {
                Top::raise(&mut self.slots, gpu.free_slots(), slots, at);
                fitting += usize::from(gpu.free_slots() >= slots);
            }
        }
        if fitting > self.fitting {
            (self.fitting, self.fitting_on) = (fitting, Some(node));
        }
    }

    /// Looks at a node whose GPUs are all candidates, and none has the memory: most are like that where a pod is
    /// refused, and need no look at each GPU.
    fn all_too_full(&mut self, node: &'a Node, terms: &WantTerms, fit: &[Fit]) -> bool {
        let needed = node.plain.filter(|_| terms.choice.is_none()).and_then(|class| fit[class as usize].ok());
        let Some((mib, _)) = needed.filter(|(mib, _)| node.most_mib < *mib) else { return false };
        self.candidates += node.gpus.len();
        if self.memory.as_ref().is_none_or(|top| node.most_mib > top.free) {
            let gpu = node.gpus.iter().find(|gpu| gpu.free_mib() == node.most_mib);
            gpu.into_iter()
                .for_each(|gpu| Top::raise(&mut self.memory, node.most_mib, mib, GpuPlace { node, gpu }));
        }
        true
    }

    fn shortage(&self, want: &Want, terms: &WantTerms) -> Shortage {
        if let Some(node) = self.fitting_on {
            let node = node.name.to_string();
            return Shortage::Gpus { needed: terms.gpus, most: self.fitting, node };
        }
        match (want.mig(), &self.mig) {
            (Some(asked), Some(top)) => {
                let largest = top.at.gpu.cut.as_ref().and_then(|cut| cut.largest());
                let largest =
                    largest.map(|profile| (profile.name.clone(), profile.capacity.memory.mib_floor()));
                let short = MigShortage { asked, largest, candidates: self.candidates, at: top.at() };
                return Shortage::Mig(Box::new(short));
            }
            (Some(asked), None) if self.cut == 0 => return Shortage::NoMig { asked },
            _ => {}
        }
        let Some(memory) = &self.memory else { return Shortage::Candidates { gpus: want.gpus } };
        if want.part == Part::Whole {
            return Shortage::Whole { candidates: self.candidates };
        }
        let candidates = self.with_memory;
        if let Some(top) = &self.slots {
            return Shortage::Slots { needed: top.needed, largest: top.free, candidates, at: top.at() };
        }
        if let Some(top) = &self.compute {
            return Shortage::Compute { needed: top.needed, largest: top.free, candidates, at: top.at() };
        }
        let (needed, largest, candidates) = (memory.needed, memory.free, self.candidates);
        Shortage::Memory { needed, largest, candidates, at: memory.at() }
    }
}

impl SkippedGpus {
    fn not_borne(&mut self, taints: &[Taint], want: &Want) {
        let first = || untolerated(taints, &want.tolerations).map(ToString::to_string).unwrap_or_default();
        self.tainted.get_or_insert_with(|| Box::new((0, first()))).0 += 1;
    }

    fn not_chosen(&mut self, choice: Option<&Choice>, gpu: &Gpu, want: &Want, class: &GpuClass) {
        let failure =
            choice.filter(|choice| choice.failed.has(gpu.facts)).and_then(|choice| choice.words.as_ref());
        match failure {
            Some(words) => self.failed.get_or_insert_with(|| Box::new((0, words.to_string()))).0 += 1,
            None => {
                let left_out = self.not_selected.get_or_insert_with(|| Box::new(NotSelected::by(want)));
                left_out.count += 1;
                if !left_out.products.contains(&class.name) {
                    left_out.products.insert(class.name.clone());
                }
            }
        }
    }
}

impl UnfitGpus {
    fn note(&mut self, unfit: Unfit, want: &Want, class: &GpuClass) {
        match unfit {
            Unfit::Product => self.other_product += 1,
            Unfit::Isolation => self.isolation += 1,
            Unfit::Small => {
                let asked = want.part.mib(class.memory_mib);
                let none = || Box::new(TooSmall { count: 0, asked, largest: 0 });
                let small = self.too_small.get_or_insert_with(none);
                small.count += 1;
                small.largest = small.largest.max(class.memory_mib);
            }
            Unfit::Sliver => self.sliver += 1,
            Unfit::Processes => self.processes += 1,
            Unfit::Cut => self.cut += 1,
            Unfit::ByScheduler => self.by_scheduler += 1,
        }
    }
}

impl NotSelected {
    fn by(want: &Want) -> Self {
        let last = want.selectors.last().map(String::as_str).unwrap_or_default();
        let words = last.split_whitespace().collect::<Vec<&str>>().join(" ");
        let selector = match words.char_indices().nth(SELECTOR_CHARS_MAX) {
            Some((end, _)) => format!("{}…", &words[..end]),
            None => words,
        };
        Self { count: 0, selector, selectors: want.selectors.len(), products: BTreeSet::new() }
    }
}

impl fmt::Display for NotSelected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { count, selector, selectors, products } = self;
        write!(f, "{count} GPU{} that a selector leaves out (\"{selector}\"", s(*count as u32))?;
        if *selectors > 1 {
            write!(f, ", the last of {selectors}")?;
        }
        let named: Vec<&str> = products.iter().map(String::as_str).take(PRODUCTS_MAX).collect();
        let more = products.len().saturating_sub(PRODUCTS_MAX);
        let more = if more == 0 { String::new() } else { format!(" and {more} more products") };
        write!(f, "; they are {}{more})", named.join(", "))
    }
}

impl fmt::Display for TooSmall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { count, asked, largest } = self;
        let s = s(*count as u32);
        write!(f, "{count} GPU{s} too small even idle (largest {largest} MiB, asked {asked})")
    }
}

impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Candidates { gpus: 0 } => f.write_str("no node has room for the pod"),
            Self::Candidates { gpus } => write!(f, "needs {gpus} GPU{}; there is no candidate", s(*gpus)),
            Self::Memory { needed, largest, candidates, at } => write!(
                f,
                "needs {needed} MiB; largest free on {candidates} candidate GPU{} is {largest} MiB on node {at}",
                s(*candidates as u32)
            ),
            Self::Whole { candidates } => {
                write!(
                    f,
                    "needs a whole GPU; none of {candidates} candidate{} is idle",
                    s(*candidates as u32)
                )
            }
            Self::Compute { needed, largest, candidates, at } => write!(
                f,
                "needs {needed} % of compute; most free on {candidates} GPU{} with the memory is {largest} % \
                 on node {at}",
                s(*candidates as u32)
            ),
            Self::Slots { needed, largest, candidates, at } => write!(
                f,
                "needs {needed} block{} of client slots; most free on {candidates} GPU{} with the memory is \
                 {largest} on node {at}",
                s(*needed),
                s(*candidates as u32)
            ),
            Self::NoMig { asked } => write!(
                f,
                "needs a MIG device with {asked}, and no GPU of the cluster is set to be cut into MIG devices on demand"
            ),
            Self::Mig(short) => write!(f, "{short}"),
            Self::Gpus { needed, most, node } => {
                write!(f, "needs {needed} GPUs of one node; at most {most} fit, on node {node}")
            }
            Self::Together { gpus, wants, alike } => {
                write!(f, "needs {gpus} GPU{} of one node", s(*gpus))?;
                if *wants > 1 {
                    write!(
                        f,
                        " for {wants} requests; each fits somewhere, but no node was found that has room for all at once"
                    )?;
                } else {
                    f.write_str("; no node has so many")?;
                }
                if alike.is_empty() { Ok(()) } else { write!(f, " with {}", alike.join(" and ")) }
            }
            Self::Unsearched { wants } => write!(
                f,
                "it takes too long to try all ways to place {wants} request{} on one node; ask for fewer requests, \
                 for equal amounts, or for less",
                s(*wants as u32)
            ),
        }
    }
}

fn s(count: u32) -> &'static str {
    if count == 1 { "" } else { "s" }
}

impl fmt::Display for Skipped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (unfit, SkippedNodes { not_allowed, pods, cpu, memory }) = (&self.gpus.unfit, &self.nodes);
        let gpus = [
            (unfit.sliver as usize, "of which the share is less than 1 MiB for each process"),
            (unfit.processes as usize, "with fewer client slots than maxProcesses, even idle"),
            (unfit.other_product, "of another product"),
            (unfit.isolation, "below the isolation asked for"),
            (unfit.cut as usize, "cut into MIG devices, which minimumIsolation mig asks for"),
            (
                unfit.by_scheduler as usize,
                "given whole or cut (mig.keep), which only kube-scheduler gives whole: ask by class gpu.nvidia.com",
            ),
            (self.gpus.closed, "not open to shares"),
        ];
        let nodes = [(*not_allowed, "that the pod may not run on"), (*pods, "at the pod limit")];
        let counted = |count: usize, what: &str, words: &str| {
            (count > 0).then(|| format!("{count} {what}{} {words}", s(count as u32)))
        };
        let gpus = gpus.into_iter().filter_map(|(count, words)| counted(count, "GPU", words));
        let nodes = nodes.into_iter().filter_map(|(count, words)| counted(count, "node", words));
        let small = unfit.too_small.iter().map(ToString::to_string);
        let left_out = self.gpus.not_selected.iter().map(ToString::to_string);
        let mut words: Vec<String> = small.chain(gpus).chain(left_out).chain(nodes).collect();
        if let Some((count, needed, most, node)) = cpu {
            let without = format!("without {needed}m CPU (most left is {most}m on node {node})");
            words.extend(counted(*count, "node", &without));
        }
        if let Some((count, needed, most, node)) = memory {
            let without = format!("without {needed} MiB of memory (most left is {most} MiB on node {node})");
            words.extend(counted(*count, "node", &without));
        }
        if let Some((count, taint)) = self.gpus.tainted.as_deref() {
            let with = format!("with a taint that the request does not tolerate (the first is {taint})");
            words.extend(counted(*count, "GPU", &with));
        }
        if let Some((count, failure)) = self.gpus.failed.as_deref() {
            words.extend(counted(*count, "GPU", &format!("on which {failure}")));
        }
        f.write_str(&words.join(", "))
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (placed, all) = self.gang;
        if all > 1 {
            write!(f, "the gang's {all} pods do not fit together: beside {placed} of them, the next ")?;
        }
        write!(f, "{}", self.shortage)?;
        if self.skipped != Skipped::default() {
            write!(f, "; left out: {}", self.skipped)?;
        }
        Ok(())
    }
}

impl std::error::Error for Explanation {}
