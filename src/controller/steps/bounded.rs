//! Whether a namespace may have more shares: what its annotations allow, against what its claims have and are to have.

use std::borrow::Borrow;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::allocate::{GpuGrant, NodeView, Part as Amount, Placement, Shape, Want};
use crate::controller::bounds::Amounts;
use crate::controller::core::Core;
use crate::controller::queue::UnitKey;
use crate::controller::recorder::Reason;
use crate::controller::steps::place::{KEPT_TICKS, PodPart, Refused};
use crate::controller::view::GpuRef;
use crate::model::claim::ClaimKey;
use crate::model::names::{NodeName, PodUid};

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
            match self.beyond_bounds_at_least(parts, nth) {
                Some(words) => refused = Some(words),
                None => return Ok(()),
            }
        }
        refused.map_or(Ok(()), |words| Err(parts[0].refused(Reason::Bound, words)))
    }

    /// Why this way to serve the unit is more than its namespace may have, wherever it is served.
    pub(super) fn beyond_bounds_at_least<P: Borrow<PodPart>>(
        &self,
        parts: &[P],
        nth: usize,
    ) -> Option<String> {
        let least = parts.iter().map(|part| least(part.borrow().shape(nth)));
        self.exceeded(parts, least.fold(Amounts::default(), Amounts::plus))
    }

    /// Why these places are more than the namespace may have.
    pub(super) fn beyond_bounds(&self, parts: &[PodPart], places: &[Placement]) -> Option<String> {
        self.exceeded(parts, of_places(places))
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

    /// Why these places are more than the namespace may have once all of its units have their shares for which pods end;
    /// `unit`: but for this one.
    pub(super) fn beyond_bounds_then<'a>(
        &self,
        (namespace, unit): (&str, &UnitKey),
        places: impl IntoIterator<Item = &'a Placement>,
    ) -> Option<String> {
        let bounds = self.view.bounds(namespace)?;
        let asked = self.to_be_had(namespace, unit).plus(of_places(places));
        bounds.exceeded(namespace, self.capacity.usage.of(namespace), asked)
    }

    /// What the units of a namespace are to have for which pods end, but for one unit.
    pub(super) fn to_be_had(&self, namespace: &str, but: &UnitKey) -> Amounts {
        of_places(self.reserves.preempted_places(namespace, but))
    }

    /// All namespaces may have what they have once pods have moved for a unit of `namespace`. `then`: where its pods come to;
    /// `moves`: of each pod that moves what it has now, and where it goes.
    pub(super) fn may_all_have<'a>(
        &'a self,
        (namespace, unit): (&'a str, &UnitKey),
        then: impl IntoIterator<Item = &'a Placement>,
        moves: impl IntoIterator<Item = (&'a PodUid, Amounts, &'a Placement)>,
    ) -> bool {
        let mut changes: BTreeMap<&str, (Amounts, Amounts)> = BTreeMap::new();
        changes.insert(namespace, (Amounts::default(), of_places(then)));
        for (uid, before, to) in moves {
            let Some(pod) = self.view.pod(uid) else { return false };
            let (had, asked) = changes.entry(&pod.at.namespace).or_default();
            (*had, *asked) = (had.plus(before), asked.plus(of_places([to])));
        }
        changes.into_iter().all(|(namespace, (had, asked))| {
            self.may_have(namespace, had, self.to_be_had(namespace, unit).plus(asked))
        })
    }

    /// A namespace may have these beside what it has, less these.
    pub(super) fn may_have(&self, namespace: &str, less: Amounts, asked: Amounts) -> bool {
        let used = || self.capacity.usage.of(namespace).minus(less);
        let bounds = self.view.bounds(namespace);
        bounds.is_none_or(|bounds| bounds.exceeded(namespace, used(), asked).is_none())
    }

    /// What claims count for now.
    pub(super) fn usage_of(&self, claims: &[ClaimKey]) -> Amounts {
        let of_each = claims.iter().map(|claim| self.capacity.usage.of_claim(*claim));
        of_each.fold(Amounts::default(), Amounts::plus)
    }

    /// All parts of a unit are of one namespace.
    fn exceeded<P: Borrow<PodPart>>(&self, parts: &[P], asked: Amounts) -> Option<String> {
        let namespace = &self.view.pod(&parts.first()?.borrow().pod)?.at.namespace;
        self.view.bounds(namespace)?.exceeded(namespace, self.capacity.usage.of(namespace), asked)
    }
}

/// What shares at these places come to.
pub(in crate::controller) fn of_places<'a>(places: impl IntoIterator<Item = &'a Placement>) -> Amounts {
    let grants = places.into_iter().flat_map(|place| &place.gpus);
    grants.map(of_grant).fold(Amounts::default(), Amounts::plus)
}

fn of_grant(grant: &GpuGrant) -> Amounts {
    Amounts { mib: grant.memory.mib_ceil(), gpus: 1 }
}

/// What a pod asks for at the least: how much memory a fraction comes to is known once the GPU is.
pub(super) fn least(shape: &Shape) -> Amounts {
    let of = |want: &Want| {
        let each = match want.part {
            Amount::Memory(bytes) => bytes.mib_ceil(),
            Amount::Fraction(_) | Amount::Whole => 1,
        };
        let gpus = u64::from(want.gpus);
        Amounts { mib: each.saturating_mul(gpus), gpus }
    };
    shape.wants.iter().map(of).fold(Amounts::default(), Amounts::plus)
}
