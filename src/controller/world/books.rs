//! Who has a GPU, as the API tells it and as the scheduler's books may have it.

use super::{Claim, GpuRef, Kind, World, is_older};
use crate::cluster::allocation::ClaimVersion;
use crate::controller::hold::{Parting, Standing};

/// Has the watch brought a version of a claim, and so all that came before it?
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sight {
    NotYet,
    Seen,
    /// The claim is not there any more.
    Gone,
}

impl World {
    /// A claim that is not ours names it.
    pub fn is_anothers(&self, gpu: &GpuRef) -> bool {
        self.books.get(gpu).is_some_and(|names| names.values().any(|how| !how.is_ours()))
    }

    /// The scheduler's books have the GPU once, however many claims name it. One that is not there just now may come
    /// back as either kind.
    pub fn counts_once(&self, gpu: &GpuRef) -> bool {
        self.gpu(gpu).is_none_or(|gpu| !gpu.grantable.keeps_shares)
    }

    /// The hold of a GPU, allocated or not.
    pub fn hold(&self, gpu: &GpuRef) -> Option<&Claim> {
        self.claims.get(self.holds.get(gpu)?)
    }

    /// How the hold of a GPU stands that is to go.
    pub fn standing(&self, gpu: &GpuRef) -> Standing {
        let Some(hold) = self.hold(gpu) else { return Standing::No };
        if hold.ending || self.lists.under_way.contains_key(&Kind::Claims) {
            return Standing::By;
        }
        let at = hold.at.clone();
        match (hold.allocation.is_some(), self.is_anothers(gpu)) {
            _ if !self.counts_once(gpu) => Standing::Due(Parting::Delete(at)),
            (true, true) => Standing::By,
            (true, false) => Standing::Due(Parting::Clear(at)),
            (false, true) => Standing::Due(Parting::Restore(at)),
            (false, false) => Standing::Due(Parting::Delete(at)),
        }
    }

    /// How far the watch of claims has come.
    ///
    /// A claim that cannot be read keeps nobody from seeing the others: it uses the devices that its allocation can
    /// be seen to name ([`claim::unreadable`](super::claim::unreadable)). Of one whose allocation names a device
    /// where nobody can see it, which only those can write who may write a claim's status, the node refuses whichever
    /// claim comes second.
    pub fn sight(&self, of: &ClaimVersion) -> Sight {
        if self.lists.under_way.contains_key(&Kind::Claims) {
            return Sight::NotYet;
        }
        match self.claims.get(&of.claim.uid) {
            None => Sight::Gone,
            Some(claim) if claim.at.resource_version == of.resource_version => Sight::Seen,
            Some(claim) if is_older(&of.resource_version, &claim.at.resource_version) => Sight::Seen,
            Some(_) => Sight::NotYet,
        }
    }
}
