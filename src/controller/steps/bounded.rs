//! Whether a namespace may have more shares: what its annotations allow, against what its claims have and are to have.

use std::collections::BTreeSet;

use crate::allocate::{GpuGrant, Index, Placement, Shape, Want};
use crate::controller::bounds::{Amounts, Bounds};
use crate::controller::core::Core;
use crate::controller::queue::UnitKey;
use crate::controller::recorder::Reason;
use crate::controller::steps::place::{PodPart, Refused};
use crate::controller::view::GpuRef;
use crate::model::claim::ClaimKey;

/// Of finding out what a fraction comes to on one kind of GPU, in ticks of [`crate::select::TICKS_PER_UNIT`].
const LOOK_TICKS: u64 = 10;

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

    /// What a unit asks for at least, in each of its ways, is more than its namespace may have: it need not be tried. Of
    /// fractions it is what they come to on the smallest GPUs that will do.
    pub(super) fn check_bounds(&self, parts: &[PodPart]) -> Result<(), Refused> {
        let ways = parts.iter().map(PodPart::ways).max().unwrap_or(1);
        let mut refused = None;
        for nth in 0..ways {
            let least = parts
                .iter()
                .map(|part| self.least_amounts(part, nth))
                .fold(Amounts::default(), Amounts::plus);
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

    /// Nothing that these parts ask for comes to more memory than their namespace may still have: GPUs of which a fraction would
    /// are left out, and smaller ones may do. Where they ask for several fractions, each may have as much of what is left as
    /// its size says.
    pub(in crate::controller) fn keep_within_bounds(&mut self, parts: &mut [PodPart]) {
        let Some(left) = self.left_of_bounds(parts) else { return };
        let ways = parts.iter().map(PodPart::ways).max().unwrap_or(1);
        let mut looked = 0;
        for nth in 0..ways {
            // Pods with fewer alternatives stay with their last.
            let others =
                parts.iter().filter(|part| part.ways() <= nth).map(|part| self.least_amounts(part, nth));
            let left = left.saturating_sub(others.fold(Amounts::default(), Amounts::plus).mib);
            let shapes: Vec<&mut Shape> = parts.iter_mut().filter_map(|part| part.shape_mut(nth)).collect();
            looked += keep_within(&self.capacity.index, shapes, left);
        }
        self.capacity.index.pay(LOOK_TICKS.saturating_mul(looked));
    }

    /// The same for a pod that is to be made anew in place of one with these claims, which has ended then.
    pub(super) fn keep_anew_within_bounds(
        &mut self,
        namespace: &str,
        claims: &[ClaimKey],
        shape: &mut Shape,
    ) {
        let Some(most) = self.view.bounds(namespace).and_then(Bounds::max_mib) else { return };
        let own =
            claims.iter().map(|claim| self.capacity.usage.of_claim(*claim).mib).fold(0, u64::saturating_add);
        let others = self.capacity.usage.of(namespace).mib.saturating_sub(own);
        let looked = keep_within(&self.capacity.index, vec![shape], most.saturating_sub(others));
        self.capacity.index.pay(LOOK_TICKS.saturating_mul(looked));
    }

    /// How much memory the namespace of these parts may still have, in MiB; none: as much as there is.
    fn left_of_bounds(&self, parts: &[PodPart]) -> Option<u64> {
        let namespace = &self.view.pod(&parts.first()?.pod)?.at.namespace;
        let most = self.view.bounds(namespace)?.max_mib()?;
        Some(most.saturating_sub(self.capacity.usage.of(namespace).mib))
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

    /// What a part comes to at least in one of its ways.
    pub(super) fn least_amounts(&self, part: &PodPart, nth: usize) -> Amounts {
        let of = |want: &Want| {
            // Of one that no GPU will do for something else is told.
            let possible = || self.capacity.index.possible_mib(want).first().copied().unwrap_or(1);
            let each = want.fixed_mib().unwrap_or_else(possible);
            let gpus = u64::from(want.gpus);
            Amounts { mib: each.saturating_mul(gpus), gpus }
        };
        part.shape(nth).wants.iter().map(of).fold(Amounts::default(), Amounts::plus)
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

/// What these shapes ask for, all of them together, comes to no more than so many MiB, as far as each want by itself can tell.
/// How many amounts were looked at.
fn keep_within(index: &Index, mut shapes: Vec<&mut Shape>, left: u64) -> u64 {
    let (mut fixed, mut least, mut looked) = (0_u64, 0_u64, 0);
    let mut possible = Vec::new();
    for want in shapes.iter().flat_map(|shape| &shape.wants) {
        let gpus = u64::from(want.gpus);
        if let Some(mib) = want.fixed_mib() {
            fixed = fixed.saturating_add(mib.saturating_mul(gpus));
            continue;
        }
        let amounts = index.possible_mib(want);
        looked += 1 + amounts.len() as u64;
        least = least.saturating_add(amounts.first().map_or(0, |mib| mib.saturating_mul(gpus)));
        possible.push(amounts);
    }
    let left = u128::from(left.saturating_sub(fixed));
    let varying =
        shapes.iter_mut().flat_map(|shape| &mut shape.wants).filter(|want| want.fixed_mib().is_none());
    for (want, amounts) in varying.zip(possible) {
        let share = |first: &u64| left * u128::from(*first) / u128::from(least.max(1));
        let most = amounts.first().map(|first| u64::try_from(share(first)).unwrap_or(u64::MAX));
        want.most_mib = most.and_then(|most| at_most(&amounts, most));
    }
    looked
}

/// Of all that a want may come to, the largest that is allowed: the same for all limits between two kinds of GPUs. The least if
/// all is more. None: all is allowed.
fn at_most(amounts: &BTreeSet<u64>, most: u64) -> Option<u64> {
    if amounts.last().is_none_or(|last| *last <= most) {
        return None;
    }
    amounts.range(..=most).next_back().or_else(|| amounts.first()).copied()
}
