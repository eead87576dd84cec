//! Decisions that are on their way: made, but not yet seen in the API. They count as granted from the moment that
//! they are made, so that the next decision knows of them.

use std::collections::{BTreeMap, BTreeSet};

use crate::allocate::GpuGrant;
use crate::controller::Moment;
use crate::controller::grant::RequestGrant;
use crate::controller::queue::UnitKey;
use crate::controller::view::{GpuRef, Presence};
use crate::model::claim::ClaimKey;
use crate::model::names::{NodeName, PodUid};
use crate::params::GrantedDevice;

/// Where the pods of a unit go, and what their claims get.
#[derive(Debug, Clone)]
pub struct Plan {
    pub pods: BTreeMap<PodUid, NodeName>,
    pub claims: BTreeMap<ClaimKey, PlannedClaim>,
    /// Since when its pods have waited.
    pub since: Moment,
}

#[derive(Debug, Clone)]
pub struct PlannedClaim {
    pub node: NodeName,
    pub given: Vec<RequestGrant>,
}

impl PlannedClaim {
    fn devices(&self) -> impl Iterator<Item = &GrantedDevice> {
        self.given.iter().flat_map(|given| &given.devices)
    }

    /// One for each share.
    pub fn gpus(&self) -> impl Iterator<Item = GpuRef> + use<'_> {
        self.devices().map(|device| GpuRef::new(&self.node, &device.device))
    }

    pub fn grants(&self) -> Vec<(GpuRef, GpuGrant)> {
        self.devices().map(|device| (GpuRef::new(&self.node, &device.device), as_grant(device))).collect()
    }
}

/// A share as the allocator counts it.
pub fn as_grant(device: &GrantedDevice) -> GpuGrant {
    GpuGrant {
        want: 0,
        device: device.device.clone(),
        memory: device.memory,
        compute: device.compute,
        slots: device.slots,
        extent: device.extent,
    }
}

/// A unit with a plan.
#[derive(Debug)]
pub(super) struct Unit {
    pub pods: BTreeMap<PodUid, NodeName>,
    pub claims: BTreeSet<ClaimKey>,
    pub since: Moment,
}

impl Unit {
    pub fn new(since: Moment) -> Self {
        Self { pods: BTreeMap::new(), claims: BTreeSet::new(), since }
    }

    pub fn add(&mut self, plan: Plan) {
        self.pods.extend(plan.pods);
        self.claims.extend(plan.claims.into_keys());
    }
}

/// How far a planned claim has come.
#[derive(Debug)]
pub(super) struct PlanProgress {
    pub unit: UnitKey,
    pub claim: PlannedClaim,
    pub next: Next,
    /// A write of its allocation was not answered.
    pub lost: bool,
    /// Its allocation stands in the API.
    pub done: bool,
}

impl PlanProgress {
    pub fn new(unit: &UnitKey, claim: PlannedClaim, now: Moment) -> Self {
        Self { unit: unit.clone(), claim, next: Next::From(now), lost: false, done: false }
    }
}

/// When the allocation of a claim may be written, or written again.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// However the claim stands by then.
    From(Moment),
    /// This version was tried; none: it did not exist. A newer one may be at once; the same again at `again`, if no newer
    /// one comes.
    Newer { than: Option<String>, again: Option<Moment> },
}

impl Next {
    pub fn may(&self, at: &Presence, now: Moment) -> bool {
        match self {
            Self::From(from) => *from <= now,
            Self::Newer { than, again } => {
                than.as_deref() != at.resource_version() || again.is_some_and(|again| again <= now)
            }
        }
    }

    /// When time alone lets it be tried.
    pub fn due(&self) -> Option<Moment> {
        match self {
            Self::From(from) => Some(*from),
            Self::Newer { again, .. } => *again,
        }
    }
}
