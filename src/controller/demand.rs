//! Pods that kube-scheduler found no place for, and the devices that they ask it for (whole GPUs, maybe). Filled and
//! read by `steps::holding`. What a claim asks for is kept once, however many pods name the claim.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use crate::controller::view::{GpuRef, Need};
use crate::model::claim::ClaimKey;
use crate::model::names::PodUid;

/// One need of a pod, by number.
pub type NeedAt = (PodUid, usize);

/// Needs of a pod that are looked at: no node has devices for more.
pub const NEEDS_MAX: usize = 256;
/// Claims that nobody waits for any more are forgotten at the latest when there are so many, and twice those that are.
const FORGOTTEN_MAX: usize = 64;

#[derive(Debug, Default)]
pub struct Demand {
    needs: BTreeMap<PodUid, Vec<Arc<[Need]>>>,
    claims: BTreeMap<ClaimKey, Weak<[Need]>>,
    /// Claims that were waited for when the others were last forgotten.
    waited_for: usize,
    /// The idle GPU to which the last round did not come: the next one begins there.
    first_idle: Option<GpuRef>,
}

impl Demand {
    /// What the pod waits for now: of each of its claims what that asks for.
    pub fn set(&mut self, pod: &PodUid, needs: Vec<Arc<[Need]>>) {
        match needs.is_empty() {
            true => drop(self.needs.remove(pod)),
            false => drop(self.needs.insert(pod.clone(), needs)),
        }
    }

    /// What a claim asks for, if it is known.
    pub fn of_claim(&self, claim: ClaimKey) -> Option<Arc<[Need]>> {
        self.claims.get(&claim)?.upgrade()
    }

    /// What a claim asks for never changes, as long as its classes do not.
    pub fn note_claim(&mut self, claim: ClaimKey, needs: &Arc<[Need]>) {
        if self.claims.len() >= FORGOTTEN_MAX + 2 * self.waited_for {
            self.claims.retain(|_, needs| needs.strong_count() > 0);
            self.waited_for = self.claims.len();
        }
        self.claims.insert(claim, Arc::downgrade(needs));
    }

    /// Classes have changed.
    pub fn forget_claims(&mut self) {
        self.claims.clear();
        self.waited_for = 0;
    }

    /// None: all idle GPUs were looked at.
    pub fn begin_at(&mut self, gpu: Option<GpuRef>) {
        self.first_idle = gpu;
    }

    pub fn begins_at(&self, gpu: &GpuRef) -> bool {
        self.first_idle.as_ref() == Some(gpu)
    }

    /// There is more to look at.
    pub fn has_left(&self) -> bool {
        self.first_idle.is_some()
    }

    pub fn forget(&mut self, pod: &PodUid) {
        self.needs.remove(pod);
    }

    pub fn contains(&self, pod: &PodUid) -> bool {
        self.needs.contains_key(pod)
    }

    pub fn is_empty(&self) -> bool {
        self.needs.is_empty()
    }

    /// What a pod needs, in order.
    pub fn of(&self, pod: &PodUid) -> impl Iterator<Item = &Need> {
        self.needs.get(pod).into_iter().flatten().flat_map(|needs| needs.iter()).take(NEEDS_MAX)
    }

    /// Lists of needs that are kept, and claims that are remembered.
    #[cfg(test)]
    pub fn kept(&self) -> (usize, usize) {
        let all: std::collections::BTreeSet<*const Need> =
            self.needs.values().flatten().map(|needs| needs.as_ptr()).collect();
        (all.len(), self.claims.len())
    }

    /// Pods in order.
    pub fn pods(&self) -> impl Iterator<Item = &PodUid> {
        self.needs.keys()
    }

    /// What a pod needs, if that is one thing.
    pub fn single(&self, pod: &PodUid) -> Option<&Need> {
        let mut all = self.of(pod);
        all.next().filter(|_| all.next().is_none())
    }
}
