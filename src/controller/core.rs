//! All that the controller knows and has decided, without any effect: changes and answers in, writes and words out.
//!
//! Time is an argument. Nothing that is not in the API is needed to begin anew: holds and grants are read from it.

use crate::admission::ShareClasses;
use crate::controller::capacity::Capacity;
use crate::controller::config::Rules;
use crate::controller::gang::Minimum;
use crate::controller::holds::Holds;
use crate::controller::node_filter::NodeFilterCache;
use crate::controller::pods::Pods;
use crate::controller::purse::Purse;
use crate::controller::queue::{Queue, UnitKey};
use crate::controller::recorder::EventRecorder;
use crate::controller::reserve::Reserves;
use crate::controller::tracker::{Stored, Tracker};
use crate::controller::view::{Claim, ClusterView, Pod};
use crate::model::claim::ClaimKey;

#[derive(Debug)]
pub struct Core {
    pub rules: Rules,
    pub view: ClusterView,
    pub capacity: Capacity,
    pub(super) node_filter: NodeFilterCache,
    pub holds: Holds,
    pub queue: Queue,
    pub tracker: Tracker,
    pub recorder: EventRecorder,
    pub reserves: Reserves,
    pub(super) pods: Pods,
    pub(super) purse: Purse,
}

impl Core {
    /// The DeviceClasses of claims that KAI's annotations ask for; without this, the shipped one.
    pub fn promising(mut self, classes: ShareClasses) -> Self {
        self.view = self.view.promising(classes);
        self
    }

    /// `namespace`: of the holds.
    pub fn new(rules: Rules, namespace: &str) -> Self {
        Self {
            view: ClusterView::new(namespace, &rules.grouping_schedulers),
            capacity: Capacity::default(),
            node_filter: NodeFilterCache::default(),
            holds: Holds::new(rules.holds),
            queue: Queue::new(rules.patience),
            tracker: Tracker::default(),
            recorder: EventRecorder::default(),
            reserves: Reserves::new(rules.patience.keep),
            pods: Pods::default(),
            purse: Purse::default(),
            rules,
        }
    }
}

impl Core {
    /// The unit that a pod belongs to.
    pub(super) fn unit_of(&self, pod: &Pod) -> UnitKey {
        unit(pod, &self.view.minimum(pod))
    }
}

/// A claim, as far as plans depend on it.
pub(super) fn stored(view: &ClusterView, claim: ClaimKey) -> Stored {
    match view.claim(claim).filter(|claim| !claim.is_planned()) {
        None => Stored::No,
        Some(Claim { allocation: None, .. }) => Stored::Open,
        Some(claim) => Stored::Allocated { reserved: claim.is_reserved() },
    }
}

/// The unit that a pod belongs to. A gang of which each pod may start by itself is none.
pub(super) fn unit(pod: &Pod, minimum: &Minimum) -> UnitKey {
    match pod.gang().filter(|_| !minimum.is_one()) {
        Some(gang) => UnitKey::Gang {
            namespace: pod.at.namespace.clone(),
            family: gang.family,
            name: gang.name.clone(),
        },
        None => UnitKey::Pod(pod.at.uid.clone()),
    }
}
