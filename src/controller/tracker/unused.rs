//! Allocations of ours that nobody has reserved: why, since when, and until when they stay.

use std::time::Duration;

use crate::controller::Moment;
use crate::controller::config::Rules;
use crate::controller::tracker::{REVIEW_EVERY, Tracker};
use crate::model::claim::ClaimKey;

/// How long a node, a GPU or a pod may look unfit before anything is moved: most of it passes.
const UNFIT_FOR: Duration = Duration::from_secs(5);

/// An allocation that nobody has reserved: why, and since when.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Unused {
    because: Because,
    since: Moment,
    /// It is to be taken back.
    pub(super) clear: bool,
}

impl Unused {
    pub(super) fn new(now: Moment) -> Self {
        Self { because: Because::Young, since: now, clear: false }
    }

    /// When the allocation is to be taken back.
    pub(super) fn due(&self, rules: &Rules) -> Option<Moment> {
        match self.because {
            Because::Settled => None,
            Because::Young => Some(self.since + rules.stuck),
            Because::NoPods => Some(self.since + rules.unused),
            Because::Unfit(_) | Because::Overtook => Some(self.since + UNFIT_FOR),
        }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub enum Because {
    /// The scheduler has not come to it yet.
    Young,
    NoPods,
    /// The pods cannot run where it is.
    Unfit(String),
    /// An older pod of its group has no share, and their scheduler tries the oldest first, and no other.
    Overtook,
    /// It is as it should be.
    Settled,
}

impl Tracker {
    /// It is time to look at unused allocations again.
    pub fn may_review(&mut self, now: Moment) -> bool {
        if let Some(next) = self.reviewed.map(|reviewed| reviewed + REVIEW_EVERY).filter(|next| now < *next) {
            self.review_at = Some(next);
            return false;
        }
        (self.reviewed, self.review_at) = (Some(now), None);
        true
    }

    /// Claims with an unused allocation that is not being taken back.
    pub fn unused(&self) -> Vec<ClaimKey> {
        let unused = self
            .claims
            .iter()
            .filter(|(_, record)| record.unused.as_ref().is_some_and(|unused| !unused.clear));
        unused.map(|(claim, _)| *claim).collect()
    }

    /// Why the claim's allocation is unused now. The reason is returned once the allocation is to be taken back.
    pub fn judge(
        &mut self,
        claim: ClaimKey,
        because: Because,
        rules: &Rules,
        now: Moment,
    ) -> Option<Because> {
        let unused = self.claims.get_mut(&claim)?.unused.as_mut()?;
        if std::mem::discriminant(&unused.because) != std::mem::discriminant(&because) {
            *unused = Unused { because, since: now, clear: false };
        }
        unused.clear = unused.due(rules).is_some_and(|due| due <= now);
        unused.clear.then(|| unused.because.clone())
    }

    /// The claim's allocation is to be taken back.
    pub fn clear(&mut self, claim: ClaimKey, now: Moment) {
        self.record(claim).unused.get_or_insert(Unused::new(now)).clear = true;
    }

    /// The claim's allocation is not to be taken back, for now.
    pub fn keep(&mut self, claim: ClaimKey) {
        self.update(claim, |record| {
            record.unused.iter_mut().for_each(|unused| unused.clear = false);
        });
    }

    /// Claims whose allocation is to be taken back, and that are not being written.
    pub fn to_clear(&self) -> Vec<ClaimKey> {
        self.free(|record| record.unused.as_ref().is_some_and(|unused| unused.clear)).collect()
    }
}
