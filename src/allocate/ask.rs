//! What a pod asks for.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::mig::MigAsk;
use crate::model::names::NodeName;
use crate::model::quantity::Bytes;
use crate::model::share::{Isolation, Percent};
use crate::params::{Amount, Fraction, GpuShare};
use crate::select::{QualifiedName, Toleration};

/// One pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodAsk {
    pub shape: Shape,
    /// Nodes that the pod may run on, as far as its selectors, affinity, taints and past refusals tell.
    pub nodes: Nodes,
}

impl From<Shape> for PodAsk {
    fn from(shape: Shape) -> Self {
        Self { shape, nodes: Nodes::Any }
    }
}

/// Everything that pods made from one template have in common. All of it is found on one node.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Shape {
    /// One per request of the pod's claims; none: the pod only needs room.
    pub wants: Vec<Want>,
    pub alike: Vec<AttributeConstraint>,
    /// What the pod asks of its node: thousandths of a CPU, bytes.
    pub cpu_milli: u64,
    pub memory: Bytes,
    /// Of the number of pods that its node may have: one, or none if it is counted there already.
    pub pods: u64,
}

/// One request of a claim.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Want {
    /// Number of the claim among the pod's. GPUs of one claim are different ones; two claims may meet on one GPU.
    pub claim: u32,
    /// How many GPUs, the same part of each.
    pub gpus: u32,
    pub part: Part,
    /// Of each GPU's multiprocessors; none: nothing is kept for it. A MIG device has at least so much of them.
    pub compute: Option<Percent>,
    /// Client processes on each GPU, among which the memory is divided; they take as many blocks of client slots as hold
    /// them. A whole GPU takes all.
    pub processes: u32,
    /// On rung `mig` the part is a MIG device.
    pub minimum_isolation: Isolation,
    /// Parts of products' names, in any case: one must be in the GPU's. Empty: any GPU.
    pub products: Vec<String>,
    /// CEL on the GPU's facts, of the DeviceClass and of the request: all must hold.
    pub selectors: Arc<[String]>,
    /// GPUs with taints that these do not bear are left out.
    pub tolerations: Arc<[Toleration]>,
}

/// A `matchAttribute` or `distinctAttribute`: the GPUs of these wants, all of one claim, have the attribute, and have it
/// as the rule says.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct AttributeConstraint {
    pub rule: Rule,
    pub attribute: QualifiedName,
    /// Places in [`Shape::wants`].
    pub wants: Vec<usize>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rule {
    /// All have the same value.
    Same,
    /// No two have the same value.
    Different,
}

/// How much of each GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// The GPU for itself.
    Whole,
    /// Rounded up to whole MiB.
    Memory(Bytes),
    /// Of what can be granted of the GPU that is chosen; of a MIG device, of its GPU's memory slices.
    Fraction(Fraction),
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Nodes {
    #[default]
    Any,
    Only(BTreeSet<NodeName>),
    /// What is in none of these.
    Except(Vec<Arc<BTreeSet<NodeName>>>),
}

impl Nodes {
    pub fn allow(&self, name: &NodeName) -> bool {
        match self {
            Self::Any => true,
            Self::Only(names) => names.contains(name),
            Self::Except(sets) => !sets.iter().any(|names| names.contains(name)),
        }
    }
}

impl Shape {
    /// GPUs of all wants together.
    pub fn gpus(&self) -> u32 {
        self.wants.iter().fold(0, |sum, want| sum.saturating_add(want.gpus))
    }

    /// About so many bytes, with what is worked out of it for so many classes of GPUs. Texts that others have, too, count
    /// here all the same: they stay as long as the shape does.
    pub(super) fn weight(&self, classes: usize) -> usize {
        let texts = |all: &[String]| all.iter().map(|text| text.len() + size_of::<String>()).sum::<usize>();
        let of = |want: &Want| {
            let tolerations: usize = want.tolerations.iter().map(Toleration::weight).sum();
            let worked_out = 3 * size_of::<Want>() + classes * 2 * size_of::<Option<(u64, u32)>>();
            worked_out + texts(&want.selectors) + texts(&want.products) + tolerations
        };
        let alike = |one: &AttributeConstraint| {
            2 * (size_of::<AttributeConstraint>() + one.wants.len() * size_of::<usize>())
        };
        self.wants.iter().map(of).sum::<usize>() + self.alike.iter().map(alike).sum::<usize>()
    }

    /// A pod that only wants this.
    pub fn one(want: Want) -> Self {
        Self { wants: vec![want], ..Self::default() }
    }
}

impl Want {
    /// Whole GPUs, any: to be filled in.
    pub fn whole(gpus: u32) -> Self {
        Self {
            claim: 0,
            gpus,
            part: Part::Whole,
            compute: None,
            processes: 1,
            minimum_isolation: Isolation::None,
            products: Vec::new(),
            selectors: Arc::default(),
            tolerations: Arc::default(),
        }
    }

    /// A MIG device that is made for it: no GPU is given whole or in shares on that rung.
    pub fn is_mig(&self) -> bool {
        self.minimum_isolation == Isolation::Mig && self.part != Part::Whole
    }

    /// What it asks of a MIG device; none: it wants none.
    pub(super) fn mig(&self) -> Option<MigAsk> {
        let percent = self.compute.map_or(0, |percent| u32::from(percent.get()));
        let ask = |amount| MigAsk { amount, percent };
        match self.part {
            _ if !self.is_mig() => None,
            Part::Whole => None,
            Part::Memory(bytes) => Some(ask(Amount::Memory(bytes))),
            Part::Fraction(fraction) => Some(ask(Amount::Fraction(fraction))),
        }
    }

    /// What a claim's parameters ask of each of `gpus` GPUs. No amount: whole GPUs. A fraction's compute
    /// follows from it unless it is given. The fraction 1 is the whole GPU, which nobody else uses: it meets every
    /// level of isolation.
    pub fn of(share: &GpuShare, gpus: u32) -> Self {
        if share.is_whole() {
            return Self { compute: Percent::try_from(100_u8).ok(), ..Self::whole(gpus) };
        }
        let (part, follows) = match share.amount {
            None => (Part::Whole, None),
            Some(Amount::Memory(bytes)) => (Part::Memory(bytes), None),
            Some(Amount::Fraction(fraction)) => (Part::Fraction(fraction), fraction.percent()),
        };
        let minimum_isolation = share.minimum_isolation.unwrap_or(Isolation::None);
        let (compute, processes) = (share.compute.or(follows), share.max_processes.unwrap_or(1));
        Self { part, compute, processes, minimum_isolation, ..Self::whole(gpus) }
    }
}

impl Part {
    /// In whole MiB of a GPU of which `grantable` MiB can be granted.
    pub fn mib(self, grantable: u64) -> u64 {
        match self {
            Self::Whole => grantable,
            Self::Memory(bytes) => bytes.mib_ceil(),
            Self::Fraction(fraction) => fraction.of(Bytes::from_mib(grantable)).mib_ceil(),
        }
    }
}
