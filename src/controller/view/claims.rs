//! The claims that are known, and the tables by which they are found: by UID and by name, by the GPUs that they name, and
//! our holds by theirs. A claim keeps its key from when it is planned until it is gone. Only this module changes them, all together.

use std::collections::{BTreeMap, VecDeque};

use crate::controller::view::{Claim, GpuRef, Use};
use crate::model::claim::{ClaimKey, ClaimKeys, ClaimRef};
use crate::model::names::ClaimUid;

/// Deleted claims that are remembered: more than there are writes on their way.
const GONE_MAX: usize = 1024;

#[derive(Debug, Default)]
pub(super) struct ClaimTable {
    keys: ClaimKeys,
    all: BTreeMap<ClaimKey, Claim>,
    /// Of those that exist.
    uids: BTreeMap<ClaimUid, ClaimKey>,
    /// By namespace and name.
    names: BTreeMap<String, BTreeMap<String, ClaimKey>>,
    uses: BTreeMap<GpuRef, BTreeMap<ClaimKey, Use>>,
    /// Our holds, allocated or not.
    holds: BTreeMap<GpuRef, ClaimKey>,
    /// Claims that were deleted last, by the watch's word or because a list did not have them any more.
    gone: VecDeque<ClaimUid>,
    #[cfg(test)]
    lookups: std::sync::atomic::AtomicU64,
}

impl ClaimTable {
    pub fn get(&self, key: ClaimKey) -> Option<&Claim> {
        self.all.get(&key)
    }

    pub fn key(&self, uid: &ClaimUid) -> Option<ClaimKey> {
        self.uids.get(uid).copied()
    }

    /// UIDs of those that exist.
    pub fn uids(&self) -> impl Iterator<Item = &ClaimUid> {
        self.uids.keys()
    }

    /// The key of a claim that exists: the one that it has, that of the planned claim of its name, or a new one.
    pub fn key_for(&mut self, claim: &ClaimRef) -> ClaimKey {
        let planned = || self.named(&claim.namespace, &claim.name).filter(|known| known.is_planned());
        let known = self.key(&claim.uid).or_else(|| planned().map(|planned| planned.key));
        known.unwrap_or_else(|| self.new_key())
    }

    pub fn new_key(&mut self) -> ClaimKey {
        self.keys.issue()
    }

    pub fn iter(&self) -> impl Iterator<Item = &Claim> + Clone {
        self.all.values()
    }

    pub fn named(&self, namespace: &str, name: &str) -> Option<&Claim> {
        #[cfg(test)]
        self.lookups.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        self.all.get(self.names.get(namespace)?.get(name)?)
    }

    /// How often a claim was looked up by name.
    #[cfg(test)]
    pub fn lookups(&self) -> u64 {
        self.lookups.load(std::sync::atomic::Ordering::Relaxed)
    }

    /// Who names a GPU, and how.
    pub fn uses(&self, gpu: &GpuRef) -> impl Iterator<Item = (ClaimKey, &Use)> {
        self.uses.get(gpu).into_iter().flatten().map(|(key, how)| (*key, how))
    }

    /// GPUs that somebody names.
    pub fn used_gpus(&self) -> impl Iterator<Item = &GpuRef> {
        self.uses.keys()
    }

    pub fn hold(&self, gpu: &GpuRef) -> Option<&Claim> {
        self.all.get(self.holds.get(gpu)?)
    }

    pub fn holds(&self) -> impl Iterator<Item = (&GpuRef, &Claim)> {
        self.holds.iter().filter_map(|(gpu, key)| Some((gpu, self.all.get(key)?)))
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
        let key = claim.key;
        for (gpu, how) in claim.allocation.iter().flat_map(|one| &one.uses) {
            self.uses.entry(gpu.clone()).or_default().insert(key, how.clone());
        }
        if let Some(gpu) = &claim.hold {
            self.holds.insert(gpu.clone(), key);
        }
        if let Some(at) = claim.version() {
            self.uids.insert(at.claim.uid.clone(), key);
        }
        let names = self.names.entry(claim.namespace().to_owned()).or_default();
        names.insert(claim.name().to_owned(), key);
        self.all.insert(key, claim);
    }

    pub fn remove(&mut self, key: ClaimKey) -> Option<Claim> {
        let claim = self.all.remove(&key)?;
        for (gpu, _) in claim.allocation.iter().flat_map(|one| &one.uses) {
            if let Some(claims) = self.uses.get_mut(gpu) {
                claims.remove(&key);
                if claims.is_empty() {
                    self.uses.remove(gpu);
                }
            }
        }
        if let Some(gpu) = claim.hold.as_ref().filter(|gpu| self.holds.get(gpu) == Some(&key)) {
            self.holds.remove(gpu);
        }
        if let Some(at) = claim.version() {
            self.uids.remove(&at.claim.uid);
        }
        // Another claim may have the name by now.
        if let Some(names) = self.names.get_mut(claim.namespace())
            && names.get(claim.name()) == Some(&key)
        {
            names.remove(claim.name());
            if names.is_empty() {
                self.names.remove(claim.namespace());
            }
        }
        Some(claim)
    }
}
