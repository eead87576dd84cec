//! Whether a namespace may have more shares: what its annotations allow, against what its claims have and are to have.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::allocate::{GpuGrant, NodeView, Part as Amount, Placement};
use crate::controller::bounds::Amounts;
use crate::controller::core::Core;
use crate::controller::queue::UnitKey;
use crate::controller::recorder::Reason;
use crate::controller::steps::place::{KEPT_TICKS, PodPart, Refused};
use crate::controller::view::GpuRef;
use crate::model::claim::ClaimKey;
use crate::model::names::NodeName;

impl Core {
    /// A claim has these parts of GPUs from now on, or is to have them.
    pub(in crate::controller) fn set_grants(&mut self, key: ClaimKey, grants: Vec<(GpuRef, GpuGrant)>) {
        let namespace = self.view.claim(key).map(|claim| claim.namespace());
        let sum = grants.iter().map(|(_, grant)| of_grant(grant)).fold(Amounts::default(), Amounts::plus);
        self.capacity.usage.set(key, namespace, sum);
        let holders = &mut self.reserves.evictions.preempting.holders;
        self.capacity.gpus_of(key).iter().for_each(|gpu| holders.touch(&gpu.node));
        grants.iter().for_each(|(gpu, _)| holders.touch(&gpu.node));
        self.capacity.set_grants(key, grants);
    }

    /// What a unit asks for at least, in each of its ways, is more than its namespace may have: it need not be tried.
    pub(super) fn check_bounds(&self, parts: &[PodPart]) -> Result<(), Refused> {
        let ways = parts.iter().map(PodPart::ways).max().unwrap_or(1);
        let mut refused = None;
        for nth in 0..ways {
            let least = parts.iter().map(|part| least(part, nth)).fold(Amounts::default(), Amounts::plus);
            match self.exceeded(parts, least) {
                Some(words) => refused = Some(words),
                None => return Ok(()),
            }
        }
        refused.map_or(Ok(()), |words| Err(parts[0].refused(Reason::Bound, words)))
    }

    /// Why these places are more than the namespace may have.
    pub(super) fn beyond_bounds(&self, parts: &[PodPart], places: &[Placement]) -> Option<String> {
        let grants = places.iter().flat_map(|place| &place.gpus);
        self.exceeded(parts, grants.map(of_grant).fold(Amounts::default(), Amounts::plus))
    }

    /// These parts, kept off nodes on which the fractions that they ask for would be more memory than their namespace may still
    /// have, whatever GPUs of the node they were of. None: all nodes are such ones, or none is, so that there is nothing smaller
    /// to look for.
    pub(super) fn kept_off_large_gpus(&mut self, parts: &[PodPart], nth: usize) -> Option<Vec<PodPart>> {
        let namespace = &self.view.pod(&parts.first()?.pod)?.at.namespace;
        let most = self.view.bounds(namespace)?.max_mib()?;
        let wants = || parts.iter().flat_map(|part| &part.shape(nth).wants);
        let fixed = wants().map(|want| match want.part {
            Amount::Memory(bytes) => bytes.mib_ceil().saturating_mul(u64::from(want.gpus)),
            Amount::Fraction(_) | Amount::Whole => 0,
        });
        let of_gpu = || wants().filter(|want| !matches!(want.part, Amount::Memory(_)));
        let gpus: u64 = of_gpu().map(|want| u64::from(want.gpus)).sum();
        let used = self.capacity.usage.of(namespace).mib.saturating_add(fixed.fold(0, u64::saturating_add));
        // Each has the same part of what is left.
        let left = most.saturating_sub(used).checked_div(gpus)?;
        let fractions: BTreeSet<Amount> = of_gpu().map(|want| want.part).collect();
        let index = &mut self.capacity.index;
        let is_large = |node: &NodeView<'_>| {
            let gpus = node.gpus().filter(|gpu| !gpu.closed());
            let least = gpus.map(|gpu| gpu.memory().0.mib_floor()).min();
            least.is_none_or(|least| fractions.iter().any(|fraction| fraction.mib(least) > left))
        };
        let nodes = index.nodes().count();
        let large: BTreeSet<NodeName> =
            index.nodes().filter(is_large).map(|node| node.name().clone()).collect();
        let looks = nodes.saturating_mul(fractions.len()).saturating_add(parts.len()) as u64;
        index.pay(KEPT_TICKS.saturating_mul(looks));
        if large.is_empty() || large.len() == nodes {
            return None;
        }
        let large = Arc::new(large);
        Some(parts.iter().map(|part| part.kept_off(&large)).collect())
    }

    /// The same once all units of the namespace have their shares for which pods end; `unit`: but for this one.
    pub(super) fn beyond_bounds_then(
        &self,
        unit: &UnitKey,
        parts: &[PodPart],
        places: &[Placement],
    ) -> Option<String> {
        let namespace = &self.view.pod(&parts.first()?.pod)?.at.namespace;
        let others = self.reserves.preempted_places(namespace, unit);
        let grants = others.chain(places).flat_map(|place| &place.gpus);
        self.exceeded(parts, grants.map(of_grant).fold(Amounts::default(), Amounts::plus))
    }

    /// All parts of a unit are of one namespace.
    fn exceeded(&self, parts: &[PodPart], asked: Amounts) -> Option<String> {
        let namespace = &self.view.pod(&parts.first()?.pod)?.at.namespace;
        self.view.bounds(namespace)?.exceeded(namespace, self.capacity.usage.of(namespace), asked)
    }
}

fn of_grant(grant: &GpuGrant) -> Amounts {
    Amounts { mib: grant.memory.mib_ceil(), gpus: 1 }
}

/// How much memory a fraction comes to is known once the GPU is.
pub(super) fn least(part: &PodPart, nth: usize) -> Amounts {
    let of = |want: &crate::allocate::Want| {
        let each = match want.part {
            Amount::Memory(bytes) => bytes.mib_ceil(),
            Amount::Fraction(_) | Amount::Whole => 1,
        };
        let gpus = u64::from(want.gpus);
        Amounts { mib: each.saturating_mul(gpus), gpus }
    };
    part.shape(nth).wants.iter().map(of).fold(Amounts::default(), Amounts::plus)
}
