//! How each node of the cluster looks to a pod that waits, in words with numbers.

use std::collections::BTreeMap;
use std::fmt;

use super::listing::{Lack, Listing};
use crate::allocate::{self, GpuVerdict, NodeShort, NodeVerdict, Nodes, PodAsk};
use crate::controller::core::Core;
use crate::controller::neighbours::Ruled;
use crate::controller::view::{Claim, GpuRef, Pod, Use};
use crate::controller::{Moment, ask};
use crate::feasible::{self, Node, Unfit};
use crate::model::names::{DeviceName, NodeName, PodUid};

/// Of a selector that chooses nothing, so much is shown.
const SELECTOR_CHARS_MAX: usize = 80;
/// Reasons beside the nearest that are told of one node.
const TAIL_MAX: usize = 3;
/// So many names are listed; of more only the number.
const NAMES_MAX: usize = 3;

/// What keeps a pod off a node. As text it stands behind the node's name.
#[derive(Debug, Clone, PartialEq)]
pub enum NodeObstacle {
    /// For this pod alone.
    Room,
    /// GPUs of it that one request of the pod could have are too few.
    Gpus(TooFewGpus),
    /// Each request fits by itself.
    Together,
    Short(NodeShort),
    /// It has as many pods as it may.
    Pods,
    Barred(Unfit),
    /// The pod, or another claim of it, is there.
    Elsewhere(NodeName),
    /// It has slices, and no Node object.
    NoNode,
    /// None that shares can be placed on.
    NoGpus,
    /// None of the class that is asked for.
    NoDevices,
    /// There would be room, but for a resource that kube-scheduler counts.
    Lacks(Lack),
}

/// The GPUs of a node, as the first request that lacks some finds them.
#[derive(Debug, Clone, PartialEq)]
pub struct TooFewGpus {
    needed: usize,
    fit: Vec<DeviceName>,
    /// The nearest first: those with equal words together.
    misses: Vec<(Miss, Vec<DeviceName>)>,
}

/// Why a GPU does not fit. The order is that of nearness.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Miss {
    Slots {
        needed: u32,
        free: u32,
    },
    Compute {
        needed: u32,
        free: u32,
    },
    Memory {
        needed: u64,
        free: u64,
    },
    /// MiB of the largest MIG device that can still be made, 0 if none can; and what is needed.
    Mig {
        needed: String,
        largest: u64,
    },
    /// Of some other capacity.
    Capacity {
        needed: u64,
        free: u64,
        name: String,
    },
    Closed(String),
    Small {
        needed: u64,
        all: u64,
    },
    Sliver {
        processes: u32,
    },
    Processes {
        needed: u32,
        all: u32,
    },
    Isolation {
        needed: &'static str,
        is: &'static str,
    },
    Product,
    /// It is cut into MIG devices.
    Cut,
    /// All of it is asked for, which only the scheduler gives.
    ByScheduler,
    NotSelected(String),
    Failed(String),
    Tainted(String),
}

/// Verdicts that are told in one line where there are many. The order is that of nearness.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ObstacleKind {
    Room,
    Together,
    Slots,
    Compute,
    Memory,
    Closed,
    Small,
    Isolation,
    Selector,
    GpuTaint,
    Cpu,
    NodeMemory,
    Pods,
    Resource,
    Elsewhere,
    OtherNode,
    NodeSelector,
    Affinity,
    Volume,
    Port,
    Spread,
    PodAffinity,
    PodAntiAffinity,
    Taint,
    Cordoned,
    NotReady,
    NoNode,
    NoGpus,
}

impl ObstacleKind {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Room => "room",
            Self::Together => "together",
            Self::Slots => "slots",
            Self::Compute => "compute",
            Self::Memory => "memory",
            Self::Closed => "closed",
            Self::Small => "too-small",
            Self::Isolation => "isolation",
            Self::Selector => "selector",
            Self::GpuTaint => "gpu-taint",
            Self::Cpu => "node-cpu",
            Self::NodeMemory => "node-memory",
            Self::Pods => "node-pods",
            Self::Resource => "node-resource",
            Self::Elsewhere => "elsewhere",
            Self::OtherNode => "node-name",
            Self::NodeSelector => "node-selector",
            Self::Affinity => "affinity",
            Self::Volume => "volume",
            Self::Port => "host-port",
            Self::Spread => "topology-spread",
            Self::PodAffinity => "pod-affinity",
            Self::PodAntiAffinity => "pod-anti-affinity",
            Self::Taint => "taint",
            Self::Cordoned => "cordoned",
            Self::NotReady => "not-ready",
            Self::NoNode => "no-node",
            Self::NoGpus => "no-gpus",
        }
    }
}

impl NodeObstacle {
    pub fn kind(&self) -> ObstacleKind {
        match self {
            Self::Room => ObstacleKind::Room,
            Self::Together => ObstacleKind::Together,
            Self::Gpus(gpus) => gpus.misses.first().map_or(ObstacleKind::Closed, |(miss, _)| miss.kind()),
            Self::Short(NodeShort::Cpu { .. }) | Self::Barred(Unfit::Cpu { .. }) => ObstacleKind::Cpu,
            Self::Short(NodeShort::Memory { .. }) | Self::Barred(Unfit::Memory { .. }) => {
                ObstacleKind::NodeMemory
            }
            Self::Pods | Self::Barred(Unfit::Pods) => ObstacleKind::Pods,
            Self::Elsewhere(_) => ObstacleKind::Elsewhere,
            Self::NoNode => ObstacleKind::NoNode,
            Self::NoGpus | Self::NoDevices => ObstacleKind::NoGpus,
            Self::Lacks(_) | Self::Barred(Unfit::Resource { .. }) => ObstacleKind::Resource,
            Self::Barred(Unfit::Cordoned) => ObstacleKind::Cordoned,
            Self::Barred(Unfit::OtherNode(_)) => ObstacleKind::OtherNode,
            Self::Barred(Unfit::NotReady(_)) => ObstacleKind::NotReady,
            Self::Barred(Unfit::Taint { .. }) => ObstacleKind::Taint,
            Self::Barred(Unfit::Selector { .. } | Unfit::SelectorLabel { .. }) => ObstacleKind::NodeSelector,
            Self::Barred(Unfit::Affinity { .. } | Unfit::TooLarge(_)) => ObstacleKind::Affinity,
            Self::Barred(Unfit::Volume { .. }) => ObstacleKind::Volume,
            Self::Barred(Unfit::Port { .. }) => ObstacleKind::Port,
            Self::Barred(Unfit::Spread { .. } | Unfit::SpreadLabel(_)) => ObstacleKind::Spread,
            Self::Barred(Unfit::Near { .. } | Unfit::NearLabel(_)) => ObstacleKind::PodAffinity,
            Self::Barred(Unfit::Avoids { .. } | Unfit::AvoidedBy { .. }) => ObstacleKind::PodAntiAffinity,
        }
    }

    /// How near it is, among verdicts of its kind; none: there is no more or less.
    pub fn measure(&self) -> Option<u64> {
        match self {
            Self::Gpus(gpus) => match gpus.misses.first()?.0 {
                Miss::Slots { free, .. } | Miss::Compute { free, .. } => Some(u64::from(free)),
                Miss::Memory { free, .. } | Miss::Mig { largest: free, .. } => Some(free),
                Miss::Small { all, .. } => Some(all),
                _ => None,
            },
            Self::Short(NodeShort::Cpu { left, .. } | NodeShort::Memory { left, .. }) => Some(*left),
            Self::Lacks(lack) => Some(lack.left),
            _ => None,
        }
    }

    pub(super) fn lack(&self) -> Option<&Lack> {
        if let Self::Lacks(lack) = self { Some(lack) } else { None }
    }

    /// How many GPUs of the node one request could have.
    pub(super) fn fits(&self) -> usize {
        if let Self::Gpus(gpus) = self { gpus.fit.len() } else { 0 }
    }
}

impl TooFewGpus {
    pub(super) fn new(needed: usize, fit: Vec<DeviceName>, misses: BTreeMap<Miss, Vec<DeviceName>>) -> Self {
        let mut misses: Vec<_> = misses.into_iter().collect();
        misses.sort_by_key(|(miss, _)| (miss.kind(), std::cmp::Reverse(free(miss))));
        Self { needed, fit, misses }
    }
}

/// Why a pod can go to none of these nodes, which lack a resource each; none: there are none.
pub(super) fn lacking(lacks: &[(&NodeName, &Lack)]) -> Option<String> {
    let (node, most) = lacks.iter().max_by_key(|(_, lack)| lack.left)?;
    let Lack { resource, needed, left } = most;
    Some(match left {
        0 => format!(
            "the pod needs {needed} {resource}, and no node with room on its GPUs has any left; kube-scheduler \
             refuses it there"
        ),
        _ => format!(
            "the pod needs {needed} {resource}; of nodes with room on their GPUs node {node} has most left: {left}"
        ),
    })
}

impl Miss {
    fn kind(&self) -> ObstacleKind {
        match self {
            Self::Slots { .. } => ObstacleKind::Slots,
            Self::Compute { .. } => ObstacleKind::Compute,
            Self::Memory { .. } | Self::Mig { .. } => ObstacleKind::Memory,
            Self::Closed(_) | Self::Capacity { .. } => ObstacleKind::Closed,
            Self::Small { .. } | Self::Sliver { .. } | Self::Processes { .. } => ObstacleKind::Small,
            Self::Isolation { .. } | Self::Cut | Self::ByScheduler => ObstacleKind::Isolation,
            Self::Product | Self::NotSelected(_) | Self::Failed(_) => ObstacleKind::Selector,
            Self::Tainted(_) => ObstacleKind::GpuTaint,
        }
    }

    /// As the nearest: with numbers, and where.
    fn nearest(&self, gpus: &[DeviceName]) -> String {
        let at = list(gpus);
        match self {
            Self::Slots { needed, free } => {
                format!("most blocks of client slots free {free} of {at}, needs {needed}")
            }
            Self::Compute { needed, free } => format!("most compute free {free} % of {at}, needs {needed} %"),
            Self::Memory { needed, free } => format!("largest free {free} MiB of {at}, needs {needed}"),
            Self::Mig { needed, largest: 0 } => {
                format!("no more MIG device can be made of {at}, needs one with {needed}")
            }
            Self::Mig { needed, largest } => {
                format!("largest MIG device that can be made {largest} MiB of {at}, needs {needed}")
            }
            Self::Capacity { needed, free, name } => {
                format!("largest free {name} {free} of {at}, needs {needed}")
            }
            Self::Small { needed, all } => format!("too small even idle: {all} MiB of {at}, needs {needed}"),
            Self::Sliver { processes: 0 | 1 } => format!("the share would be less than 1 MiB of {at}"),
            Self::Sliver { processes } => {
                format!("the share of {at} would be less than 1 MiB for each of {processes} processes")
            }
            Self::Processes { needed, all } => {
                format!("client slots for {all} processes on {at} even idle, needs {needed}")
            }
            Self::Isolation { needed, is } => format!("isolation of {at} is {is}, needs {needed}"),
            Self::Product => format!("{at}: another product"),
            Self::Cut => format!("{at}: cut into MIG devices, which minimumIsolation mig asks for"),
            Self::ByScheduler => format!(
                "{at}: given whole or cut (mig.keep), which only kube-scheduler gives whole: ask by class gpu.nvidia.com"
            ),
            Self::NotSelected(selector) => format!("no GPU matches selector {selector}"),
            Self::Failed(words) => format!("{at}: {words}"),
            Self::Tainted(taint) => format!("{at}: has the taint {taint}, which is not tolerated"),
            Self::Closed(words) => format!("{at}: {words}"),
        }
    }

    /// Beside a nearer one.
    fn beside(&self) -> &str {
        match self {
            Self::Slots { .. } => "no client slot",
            Self::Compute { .. } => "too little compute",
            Self::Memory { .. } => "too little memory",
            Self::Mig { .. } => "no MIG device of that size",
            Self::Cut => "cut into MIG devices",
            Self::ByScheduler => "given whole by kube-scheduler only",
            Self::Capacity { .. } => "too little capacity",
            Self::Small { .. } => "too small even idle",
            Self::Sliver { .. } => "the share would be less than 1 MiB",
            Self::Processes { .. } => "too few client slots even idle",
            Self::Isolation { .. } => "isolation too low",
            Self::Product => "another product",
            Self::NotSelected(_) => "not selected",
            Self::Failed(_) => "a selector fails",
            Self::Tainted(_) => "has a taint",
            Self::Closed(words) => words,
        }
    }
}

/// Up to three names, else how many.
pub(super) fn list<T: fmt::Display>(names: &[T]) -> String {
    match names.len() <= NAMES_MAX {
        true => names.iter().map(T::to_string).collect::<Vec<_>>().join(", "),
        false => format!("{} GPUs", names.len()),
    }
}

impl fmt::Display for TooFewGpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts = Vec::new();
        if self.needed > 1 {
            let fit = if self.fit.is_empty() {
                "none fits".to_owned()
            } else {
                format!("fit: {}", list(&self.fit))
            };
            parts.push(format!("needs {} GPUs, {fit}", self.needed));
        }
        let mut misses = self.misses.iter();
        let first = misses.next();
        parts.extend(first.map(|(miss, gpus)| miss.nearest(gpus)));
        let others: Vec<_> =
            misses.filter(|(miss, _)| first.is_none_or(|(near, _)| apart(near, miss))).collect();
        parts.extend(
            others.iter().take(TAIL_MAX).map(|(miss, gpus)| format!("{}: {}", list(gpus), miss.beside())),
        );
        if let Some(more) = others.len().checked_sub(TAIL_MAX).filter(|more| *more > 0) {
            parts.push(format!("{more} more reasons"));
        }
        f.write_str(&parts.join("; "))
    }
}

/// Of numbers only the nearest is told.
fn apart(near: &Miss, miss: &Miss) -> bool {
    matches!(miss, Miss::Closed(_)) || std::mem::discriminant(near) != std::mem::discriminant(miss)
}

impl fmt::Display for NodeObstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Room => f.write_str("has room for this pod alone"),
            Self::Together => f.write_str("each request fits by itself, but not all at once"),
            Self::Gpus(gpus) => gpus.fmt(f),
            Self::Short(NodeShort::Cpu { needed, left }) => {
                write!(f, "CPU: needs {}, {} left", cores(*needed), cores(*left))
            }
            Self::Short(NodeShort::Memory { needed, left }) => {
                write!(f, "memory: needs {needed} MiB, {left} left")
            }
            Self::Pods => Unfit::Pods.fmt(f),
            Self::Barred(unfit) => unfit.fmt(f),
            Self::Elsewhere(node) => write!(f, "the pod, or another claim of it, is on node {node}"),
            Self::NoNode => f.write_str("has GPUs in its slices, but there is no such Node"),
            Self::NoGpus => f.write_str("no GPU that shares can be placed on"),
            Self::NoDevices => f.write_str("no device of the class"),
            Self::Lacks(lack) => lack.fmt(f),
        }
    }
}

/// Thousandths of a CPU as people write them.
fn cores(milli: u64) -> String {
    match milli % 1000 {
        0 => (milli / 1000).to_string(),
        rest => format!("{}.{}", milli / 1000, format!("{rest:03}").trim_end_matches('0')),
    }
}

/// Each node of the cluster, by name. None: the pod cannot be asked for anything now.
pub(super) fn verdicts(
    core: &mut Core,
    listing: &Listing,
    pod: &PodUid,
    now: Moment,
) -> Option<Vec<(NodeName, NodeObstacle)>> {
    // Of alternatives the last: it is the one that is told of.
    let PodAsk { shape, nodes } = core.part(pod, &Default::default(), now).ok().flatten()?.into_last_ask();
    let found = allocate::verdicts(&mut core.capacity.index, &shape);
    let mut found: BTreeMap<NodeName, NodeVerdict> =
        found.into_iter().map(|verdict| (verdict.node.clone(), verdict)).collect();
    let ruled = core.ruled(pod);
    let pod = core.view.pod(pod)?;
    let several = ask::is_several(&shape);
    let one = |(name, state): (&NodeName, &crate::controller::view::NodeState)| {
        let verdict = match (elsewhere(&nodes, name), found.remove(name)) {
            (_, None) => NodeObstacle::NoGpus,
            (Some(there), _) => NodeObstacle::Elsewhere(there),
            (None, Some(found)) => {
                let barred = barred(core, pod, (name, state.object.as_deref()), &ruled);
                let verdict = barred.unwrap_or_else(|| of_node(core, listing, &shape, found, several));
                let lacks = || lack(listing, pod, state.object.as_deref()).map(NodeObstacle::Lacks);
                match &verdict {
                    NodeObstacle::Room | NodeObstacle::Together => lacks().unwrap_or(verdict),
                    _ => verdict,
                }
            }
        };
        (name.clone(), verdict)
    };
    Some(core.view.nodes().map(one).collect())
}

/// What a node lacks for a pod that only kube-scheduler counts.
pub(super) fn lack(listing: &Listing, pod: &Pod, node: Option<&Node>) -> Option<Lack> {
    let object = listing
        .pod(&pod.at.name)
        .filter(|object| object.metadata.uid.as_deref() == Some(pod.at.uid.as_str()));
    listing.lack(object?, node?)
}

/// The node that the pod is bound to by what it has already.
fn elsewhere(nodes: &Nodes, name: &NodeName) -> Option<NodeName> {
    match nodes {
        Nodes::Only(names) if !names.contains(name) => names.first().cloned(),
        _ => None,
    }
}

fn barred(
    core: &Core,
    pod: &Pod,
    (name, object): (&NodeName, Option<&Node>),
    ruled: &[Ruled],
) -> Option<NodeObstacle> {
    let Some(object) = object else { return Some(NodeObstacle::NoNode) };
    if let Some(unfit) = pod.demands.as_deref().and_then(|demands| feasible::why_not(demands, object)) {
        return Some(NodeObstacle::Barred(unfit));
    }
    if let Some(unfit) = core.port_taken(pod, name).filter(|_| pod.node.is_none()) {
        return Some(NodeObstacle::Barred(unfit));
    }
    if pod.node.is_none() && core.capacity.left(name).pods == 0 {
        return Some(NodeObstacle::Pods);
    }
    core.why_apart(ruled, name).map(NodeObstacle::Barred)
}

fn of_node(
    core: &Core,
    listing: &Listing,
    shape: &allocate::Shape,
    found: NodeVerdict,
    several: bool,
) -> NodeObstacle {
    if let Some(short) = found.short {
        return NodeObstacle::Short(short);
    }
    for (want, gpus) in shape.wants.iter().zip(found.wants) {
        let needed = want.gpus as usize;
        let (mut fit, mut misses) = (Vec::new(), BTreeMap::<Miss, Vec<DeviceName>>::new());
        for (device, verdict) in gpus {
            let gpu = GpuRef::new(&found.node, &device);
            match miss(core, listing, &gpu, verdict, &want.selectors, several) {
                None => fit.push(device),
                Some(miss) => misses.entry(miss).or_default().push(device),
            }
        }
        if fit.len() < needed {
            return NodeObstacle::Gpus(TooFewGpus::new(needed, fit, misses));
        }
    }
    match shape.wants.len() > 1 || !shape.alike.is_empty() {
        true => NodeObstacle::Together,
        false => NodeObstacle::Room,
    }
}

fn free(miss: &Miss) -> u64 {
    match miss {
        Miss::Slots { free, .. } | Miss::Compute { free, .. } => u64::from(*free),
        Miss::Memory { free, .. } | Miss::Mig { largest: free, .. } => *free,
        Miss::Small { all, .. } => *all,
        _ => 0,
    }
}

/// None: the GPU fits.
fn miss(
    core: &Core,
    listing: &Listing,
    gpu: &GpuRef,
    verdict: GpuVerdict,
    selectors: &[String],
    several: bool,
) -> Option<Miss> {
    Some(match verdict {
        GpuVerdict::Closed => Miss::Closed(closed(core, listing, gpu)),
        GpuVerdict::Cut => Miss::Cut,
        GpuVerdict::ByScheduler => Miss::ByScheduler,
        GpuVerdict::NoMig { asked, largest } => Miss::Mig { needed: asked.to_string(), largest },
        // The claim's GPUs are served by one daemon, and this GPU by one only.
        _ if several && core.capacity.is_granted(gpu) && core.capacity.has_one_daemon(gpu) => {
            Miss::Closed("has other shares, and a claim of several GPUs has them for itself".to_owned())
        }
        GpuVerdict::Fits => return None,
        GpuVerdict::Product => Miss::Product,
        GpuVerdict::Isolation { needed, is } => Miss::Isolation { needed: needed.as_str(), is: is.as_str() },
        GpuVerdict::NotSelected => Miss::NotSelected(cut(&selectors.join(" && "))),
        GpuVerdict::Failed(words) => Miss::Failed(words.to_string()),
        GpuVerdict::Tainted(taint) => Miss::Tainted(taint),
        GpuVerdict::Small { needed, all } => Miss::Small { needed, all },
        GpuVerdict::Sliver { processes } => Miss::Sliver { processes },
        GpuVerdict::Processes { needed, all } => Miss::Processes { needed, all },
        GpuVerdict::Memory { needed, free } => Miss::Memory { needed, free },
        GpuVerdict::Compute { needed, free } => Miss::Compute { needed, free },
        GpuVerdict::Slots { needed, free } => Miss::Slots { needed, free },
    })
}

pub(super) fn cut(text: &str) -> String {
    match text.char_indices().nth(SELECTOR_CHARS_MAX) {
        Some((end, _)) => format!("{:?}…", &text[..end]),
        None => format!("{text:?}"),
    }
}

/// Words for a GPU that a claim has for itself.
pub(super) fn whole(core: &Core, listing: &Listing, gpu: &GpuRef) -> Option<String> {
    let has_all = |claim: &Claim| listing.has_all(gpu, claim.namespace(), claim.name());
    let is_whole =
        |claim: &Claim, how: &Use| *how == Use::Whole || (*how == Use::Scheduled && has_all(claim));
    let whole = names(core, gpu, is_whole);
    (!whole.is_empty()).then(|| format!("whole GPU of {whole}"))
}

/// Why no share may go to a GPU.
fn closed(core: &Core, listing: &Listing, gpu: &GpuRef) -> String {
    if let Some(words) = whole(core, listing, gpu) {
        return words;
    }
    let scheduled = names(core, gpu, |_, how| *how == Use::Scheduled);
    if !scheduled.is_empty() {
        return format!("shared by kube-scheduler, with {scheduled}");
    }
    let cut = names(core, gpu, |_, how| matches!(how, Use::Cut(_)) && core.view.excludes_us(gpu, how));
    if !cut.is_empty() {
        return format!("kube-scheduler cuts it, with {cut}");
    }
    if !core.holds.is_open(gpu) {
        return "is just being taken or given back".to_owned();
    }
    if core.capacity.is_grouped(gpu) {
        return "has shares of a claim with several GPUs, which has them for itself".to_owned();
    }
    "the controller's settings leave it to others".to_owned()
}

/// The claims that name a GPU in such a way.
pub(super) fn names(core: &Core, gpu: &GpuRef, is: impl Fn(&Claim, &Use) -> bool) -> String {
    let uses = core.view.uses(gpu).filter_map(|(claim, how)| Some((core.view.claim(claim)?, how)));
    let claims = uses.filter(|(claim, how)| is(claim, how)).map(|(claim, _)| claim);
    let names: Vec<String> = claims.map(|claim| format!("{}/{}", claim.namespace(), claim.name())).collect();
    match names.as_slice() {
        [] => String::new(),
        [one] => format!("claim {one}"),
        several if several.len() <= NAMES_MAX => format!("claims {}", several.join(", ")),
        [first, ..] => format!("claim {first} and {} others", names.len() - 1),
    }
}
