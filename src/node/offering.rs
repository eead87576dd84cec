//! Decides whether GPUs are offered in shares: by the node's settings, and by what this API server is known to keep.
//!
//! An API server without the feature drops the fields of shares without an error (KEP-5075). A dry run asks the API
//! server before the first slice with shares is written, so that such a cluster sees whole GPUs from the first write
//! on; the result of a real write counts in the same way. An answer holds for this process, and is asked for again
//! every [`super::publisher::PublicationPace::ask_again`] while fields are missing.

use tokio::time::Instant;

use crate::sharing::SharingPolicy;
use crate::slices::{Counters, Dropped, ExistingSlices, Offer};

/// What the API server does with shares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keeps {
    /// Nothing has shown it yet.
    Untold,
    Shares,
    /// It drops their fields: GPUs are published whole.
    WholeOnly,
}

#[derive(Debug)]
pub(super) struct Offering {
    policy: SharingPolicy,
    keeps: Keeps,
    /// What was dropped of shares when they were last tried.
    dropped: Dropped,
    /// What the API server does with counters, once it was asked.
    counters: Option<Counters>,
    /// What was dropped of counters when they were last tried.
    counters_dropped: Dropped,
    /// When the API server was last asked, or told by itself.
    pub told: Option<Instant>,
}

impl Offering {
    pub fn new(policy: SharingPolicy) -> Self {
        Self {
            policy,
            keeps: Keeps::Untold,
            dropped: Dropped::default(),
            counters: None,
            counters_dropped: Dropped::default(),
            told: None,
        }
    }

    pub fn keeps(&self) -> Keeps {
        self.keeps
    }

    /// How boards are to be published now.
    pub fn offer(&self) -> Offer<'_> {
        match self.keeps {
            Keeps::Untold | Keeps::Shares => self.with_shares(),
            Keeps::WholeOnly => Offer::WholeOnly(&self.policy),
        }
    }

    /// How boards would be published if the API server kept shares.
    pub fn with_shares(&self) -> Offer<'_> {
        Offer::Shares(&self.policy)
    }

    /// What is known to be dropped though it is not sent any more.
    pub fn dropped(&self) -> Dropped {
        let mut dropped = self.dropped.clone();
        dropped.merge(self.counters_dropped.clone());
        dropped
    }

    /// Counters are published only where they are known to be kept: without them, all that may be made of a board looks
    /// as if it could be had at once.
    pub fn counters(&self) -> Counters {
        self.counters.unwrap_or(Counters::NotKept)
    }

    /// True if the API server was not asked about counters.
    pub fn counters_untold(&self) -> bool {
        self.counters.is_none()
    }

    /// What of slices with counters in them was not kept. True if boards are to be published otherwise now.
    pub fn learn_counters(&mut self, lost: &Dropped) -> bool {
        self.counters_dropped = lost.of_counters();
        let now = if lost.counters() { Counters::NotKept } else { Counters::Kept };
        let before = self.counters();
        self.counters = Some(now);
        before != now
    }

    /// Shares and counters that are stored are kept. True if boards are to be published otherwise now.
    pub fn observe(&mut self, seen: &ExistingSlices) -> bool {
        let mut devices = seen.readable.iter().flat_map(|slice| slice.spec.devices.iter().flatten());
        if self.keeps == Keeps::Untold
            && devices.any(|device| device.allow_multiple_allocations == Some(true))
        {
            self.keeps = Keeps::Shares;
        }
        let counted = seen.readable.iter().any(|slice| slice.spec.shared_counters.is_some());
        let otherwise = counted && self.counters.is_none();
        if otherwise {
            self.counters = Some(Counters::Kept);
        }
        otherwise
    }

    /// What of slices with shares in them was not kept. True if boards are to be published otherwise now.
    pub fn learn(&mut self, lost: &Dropped) -> bool {
        self.told = Some(Instant::now());
        self.dropped = lost.of_shares();
        let keeps = if lost.shares() { Keeps::WholeOnly } else { Keeps::Shares };
        let before = std::mem::replace(&mut self.keeps, keeps);
        (before == Keeps::WholeOnly) != (keeps == Keeps::WholeOnly)
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::resource::v1::{Device, ResourceSlice, ResourceSliceSpec};

    use super::*;
    use crate::slices::dropped;

    fn spec(shared: Option<bool>) -> ResourceSliceSpec {
        let device = Device { name: "gpu-0".into(), allow_multiple_allocations: shared, ..Device::default() };
        ResourceSliceSpec { devices: Some(vec![device]), ..ResourceSliceSpec::default() }
    }

    fn is_whole_only(offering: &Offering) -> bool {
        matches!(offering.offer(), Offer::WholeOnly(_))
    }

    #[tokio::test]
    async fn shares_are_offered_until_they_are_seen_to_be_dropped() {
        let mut offering = Offering::new(SharingPolicy::default());
        assert!(!is_whole_only(&offering));
        let lost = dropped(&spec(Some(true)), &spec(None));
        assert!(offering.learn(&lost) && is_whole_only(&offering));
        assert!(!offering.learn(&lost), "no news");
        assert_eq!(offering.dropped(), lost);
        assert!(offering.learn(&Dropped::default()) && !is_whole_only(&offering));
        assert!(offering.dropped().is_empty());
    }

    #[tokio::test]
    async fn counters_are_not_published_before_they_are_known_to_be_kept() {
        let mut offering = Offering::new(SharingPolicy::default());
        assert_eq!((offering.counters(), offering.counters_untold()), (Counters::NotKept, true));
        assert!(offering.learn_counters(&Dropped::default()));
        assert_eq!((offering.counters(), offering.counters_untold()), (Counters::Kept, false));
        let set = serde_json::from_value(serde_json::json!([{"name": "s", "counters": {}}])).unwrap();
        let sent = ResourceSliceSpec { shared_counters: Some(set), ..ResourceSliceSpec::default() };
        let lost = dropped(&sent, &ResourceSliceSpec::default());
        assert!(lost.counters() && offering.learn_counters(&lost));
        assert_eq!((offering.counters(), offering.dropped()), (Counters::NotKept, lost));
    }

    #[tokio::test]
    async fn what_is_stored_answers_the_question() {
        let mut offering = Offering::new(SharingPolicy::default());
        let slice = ResourceSlice { spec: spec(Some(true)), ..ResourceSlice::default() };
        let seen = |slice| ExistingSlices { readable: vec![slice], ..ExistingSlices::default() };
        assert!(!offering.observe(&seen(slice)), "they were offered before");
        assert_eq!((offering.keeps(), offering.counters()), (Keeps::Shares, Counters::NotKept));
        let spec = ResourceSliceSpec { shared_counters: Some(Vec::new()), ..ResourceSliceSpec::default() };
        assert!(offering.observe(&seen(ResourceSlice { spec, ..ResourceSlice::default() })));
        assert_eq!(offering.counters(), Counters::Kept);
    }
}
