//! Whether a namespace may have more shares: what its annotations allow, against what its claims have and are to have.

use crate::allocate::{GpuGrant, Part as Amount, Placement};
use crate::controller::bounds::Amounts;
use crate::controller::core::Core;
use crate::controller::queue::UnitKey;
use crate::controller::recorder::Reason;
use crate::controller::steps::place::{PodPart, Refused};
use crate::controller::view::GpuRef;
use crate::model::claim::ClaimKey;

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
