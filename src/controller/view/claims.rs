//! The claims that are known, and the tables by which they are found: by name, by the GPUs that they name, and our holds
//! by theirs. Only this module changes them, all together.

use std::collections::{BTreeMap, VecDeque};

use crate::controller::view::{Claim, GpuRef, Use};
use crate::model::names::ClaimUid;

/// Deleted claims that are remembered: more than there are writes on their way.
const GONE_MAX: usize = 1024;

#[derive(Debug, Default)]
pub(super) struct ClaimTable {
    all: BTreeMap<ClaimUid, Claim>,
    names: BTreeMap<(String, String), ClaimUid>,
    uses: BTreeMap<GpuRef, BTreeMap<ClaimUid, Use>>,
    /// Our holds, allocated or not.
    holds: BTreeMap<GpuRef, ClaimUid>,
    /// Claims that were deleted last, by the watch's word or because a list did not have them any more.
    gone: VecDeque<ClaimUid>,
}

impl ClaimTable {
    pub fn get(&self, uid: &ClaimUid) -> Option<&Claim> {
        self.all.get(uid)
    }

    pub fn iter(&self) -> impl Iterator<Item = &Claim> + Clone {
        self.all.values()
    }

    pub fn named(&self, namespace: &str, name: &str) -> Option<&Claim> {
        self.all.get(self.names.get(&(namespace.to_owned(), name.to_owned()))?)
    }

    /// Who names a GPU, and how.
    pub fn uses(&self, gpu: &GpuRef) -> impl Iterator<Item = (&ClaimUid, &Use)> {
        self.uses.get(gpu).into_iter().flatten()
    }

    /// GPUs that somebody names.
    pub fn used_gpus(&self) -> impl Iterator<Item = &GpuRef> {
        self.uses.keys()
    }

    pub fn hold(&self, gpu: &GpuRef) -> Option<&Claim> {
        self.all.get(self.holds.get(gpu)?)
    }

    pub fn holds(&self) -> impl Iterator<Item = (&GpuRef, &Claim)> {
        self.holds.iter().filter_map(|(gpu, uid)| Some((gpu, self.all.get(uid)?)))
    }

    pub fn is_gone(&self, uid: &ClaimUid) -> bool {
        self.gone.contains(uid)
    }

    /// The claim was there, and was deleted.
    pub fn note_gone(&mut self, uid: ClaimUid) {
        self.gone.truncate(GONE_MAX - 1);
        self.gone.push_front(uid);
    }

    /// Adds a claim that was not there, or that was removed.
    pub fn insert(&mut self, claim: Claim) {
        let uid = claim.uid().clone();
        for (gpu, how) in claim.allocation.iter().flat_map(|one| &one.uses) {
            self.uses.entry(gpu.clone()).or_default().insert(uid.clone(), how.clone());
        }
        if let Some(gpu) = &claim.hold {
            self.holds.insert(gpu.clone(), uid.clone());
        }
        self.names.insert(name(&claim), uid.clone());
        self.all.insert(uid, claim);
    }

    pub fn remove(&mut self, uid: &ClaimUid) -> Option<Claim> {
        let claim = self.all.remove(uid)?;
        for (gpu, _) in claim.allocation.iter().flat_map(|one| &one.uses) {
            if let Some(claims) = self.uses.get_mut(gpu) {
                claims.remove(uid);
                if claims.is_empty() {
                    self.uses.remove(gpu);
                }
            }
        }
        if let Some(gpu) = claim.hold.as_ref().filter(|gpu| self.holds.get(gpu) == Some(uid)) {
            self.holds.remove(gpu);
        }
        let name = name(&claim);
        // Another claim may have the name by now.
        if self.names.get(&name) == Some(uid) {
            self.names.remove(&name);
        }
        Some(claim)
    }
}

fn name(claim: &Claim) -> (String, String) {
    (claim.at.claim.namespace.clone(), claim.at.claim.name.clone())
}
