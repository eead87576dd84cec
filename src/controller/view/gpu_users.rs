//! Who has a GPU, as the API tells it and as the scheduler's books may have it.

use crate::cluster::allocation::ClaimVersion;
use crate::controller::view::{Claim, ClusterView, GpuRef, Kind, Use, is_older};
use crate::model::claim::ClaimKey;
use crate::model::names::DeviceName;
use crate::slices::{BoardParts, ShareParts};

/// Has the watch brought a version of a claim, and so all that came before it?
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sight {
    NotYet,
    Seen,
    /// The claim is not there any more.
    Gone,
}

impl ClusterView {
    /// Who names a GPU, and how.
    pub fn uses(&self, gpu: &GpuRef) -> impl Iterator<Item = (ClaimKey, &Use)> {
        self.claims.uses(gpu)
    }

    /// GPUs that somebody names.
    pub fn used_gpus(&self) -> impl Iterator<Item = &GpuRef> {
        self.claims.used_gpus()
    }

    /// A claim that is not ours names it, and leaves nothing of it to us.
    pub fn is_anothers(&self, gpu: &GpuRef) -> bool {
        self.uses(gpu).any(|(_, how)| self.excludes_us(gpu, how))
    }

    /// Such a use of the GPU leaves nothing of it to us. MIG devices that were made for no claim do not: their board says
    /// where they are, and only that is theirs. Of a board that is not there just now nobody knows which they are, and
    /// nothing is placed on it.
    pub fn excludes_us(&self, gpu: &GpuRef, how: &Use) -> bool {
        let Use::Cut(devices) = how else { return !how.is_ours() };
        let Some(BoardParts::Mig(mig)) = self.gpu(gpu).map(|gpu| &gpu.grantable.parts) else { return false };
        let is_there = |device: &DeviceName| {
            let at = device.profile_and_start();
            let mut known = mig.board.foreign.iter().map(|one| (one.profile_id, one.placement.start));
            at.is_some_and(|at| known.any(|one| one == at))
        };
        !devices.iter().all(is_there)
    }

    /// The scheduler's books have the GPU once, however many claims name it. One that is not there just now may come
    /// back as either kind.
    pub fn counts_once(&self, gpu: &GpuRef) -> bool {
        self.gpu(gpu).is_none_or(|gpu| !gpu.grantable.keeps_shares())
    }

    /// What there is of a GPU that kube-scheduler gives parts of, too.
    pub fn given_in_parts(&self, gpu: &GpuRef) -> Option<ShareParts> {
        match &self.gpu(gpu)?.grantable.parts {
            BoardParts::Shares(shares) => shares.keeps_shares.then_some(*shares),
            BoardParts::Mig(_) => None,
        }
    }

    /// The hold of a GPU, allocated or not.
    pub fn hold(&self, gpu: &GpuRef) -> Option<&Claim> {
        self.claims.hold(gpu)
    }

    /// All holds, allocated or not.
    pub fn holds(&self) -> impl Iterator<Item = (&GpuRef, &Claim)> {
        self.claims.holds()
    }

    /// A list of claims is under way: what it has not named yet may be gone.
    pub fn is_listing_claims(&self) -> bool {
        self.lists.under_way.contains_key(&Kind::Claims)
    }

    /// How far the watch of claims has come.
    ///
    /// A claim that cannot be read keeps nobody from seeing the others: it uses the devices that its allocation can
    /// be seen to name ([`claim::unreadable`](crate::controller::view::claim::unreadable)). Of one whose allocation names a device
    /// where nobody can see it, which only those can write who may write a claim's status, the node refuses whichever
    /// claim comes second.
    pub fn sight(&self, of: &ClaimVersion) -> Sight {
        if self.is_listing_claims() {
            return Sight::NotYet;
        }
        let claim = self.claims.key(&of.claim.uid).and_then(|key| self.claims.get(key));
        match claim.and_then(Claim::version) {
            None => Sight::Gone,
            Some(at) if at.resource_version == of.resource_version => Sight::Seen,
            Some(at) if is_older(&of.resource_version, &at.resource_version) => Sight::Seen,
            Some(_) => Sight::NotYet,
        }
    }
}
