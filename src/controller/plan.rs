//! Decisions that are on their way: made, but not yet seen in the API. They count as granted from the moment that
//! they are made, so that the next decision knows of them.

use std::collections::BTreeMap;

use super::Moment;
use super::grant::Given;
use super::queue::UnitKey;
use super::world::GpuRef;
use crate::allocate::GpuGrant;
use crate::model::names::{ClaimUid, NodeName, PodUid};

#[derive(Debug, Clone)]
pub struct Plan {
    pub pods: BTreeMap<PodUid, NodeName>,
    pub claims: BTreeMap<ClaimUid, PlannedClaim>,
    /// Since when its pods have waited.
    pub since: Moment,
}

#[derive(Debug, Clone)]
pub struct PlannedClaim {
    pub node: NodeName,
    pub given: Vec<Given>,
    pub next: Next,
    /// A try was not answered.
    pub lost: bool,
    /// The allocation stands in the API.
    pub done: bool,
}

/// When its allocation may be written, or written again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Next {
    /// Whatever version of it is known by then.
    From(Moment),
    /// This version was tried. A newer one may be at once; this one again at `again`, if no newer one comes.
    Newer { than: String, again: Option<Moment> },
}

impl Next {
    pub fn may(&self, version: &str, now: Moment) -> bool {
        match self {
            Self::From(from) => *from <= now,
            Self::Newer { than, again } => than != version || again.is_some_and(|again| again <= now),
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

impl PlannedClaim {
    pub fn gpus(&self) -> impl Iterator<Item = GpuRef> + use<'_> {
        let devices = self.given.iter().flat_map(|given| &given.devices);
        devices.map(|device| GpuRef::new(&self.node, &device.device))
    }

    pub fn grants(&self) -> Vec<(GpuRef, GpuGrant)> {
        let devices = self.given.iter().flat_map(|given| &given.devices);
        let grant = |device: &crate::params::GrantedDevice| {
            let gpu = GpuRef::new(&self.node, &device.device);
            (gpu, as_grant(device))
        };
        devices.map(grant).collect()
    }
}

/// A share as the allocator counts it.
pub fn as_grant(device: &crate::params::GrantedDevice) -> GpuGrant {
    GpuGrant {
        want: 0,
        device: device.device.clone(),
        memory: device.memory,
        compute: device.compute,
        slots: device.slots,
    }
}

/// All that are under way.
#[derive(Debug, Default)]
pub struct Plans {
    all: BTreeMap<UnitKey, Plan>,
    of_claims: BTreeMap<ClaimUid, UnitKey>,
}

impl Plans {
    pub fn insert(&mut self, key: UnitKey, plan: Plan) {
        for claim in plan.claims.keys() {
            self.of_claims.insert(claim.clone(), key.clone());
        }
        match self.all.get_mut(&key) {
            // More pods of a gang.
            Some(known) => {
                known.pods.extend(plan.pods);
                known.claims.extend(plan.claims);
            }
            None => {
                self.all.insert(key, plan);
            }
        }
    }

    pub fn remove(&mut self, key: &UnitKey) -> Option<Plan> {
        let plan = self.all.remove(key)?;
        for claim in plan.claims.keys() {
            self.of_claims.remove(claim);
        }
        Some(plan)
    }

    /// A claim that was promised has a UID of its own now.
    pub fn rename(&mut self, from: &ClaimUid, to: &ClaimUid) {
        let Some(key) = self.of_claims.remove(from) else { return };
        if let Some(plan) = self.all.get_mut(&key)
            && let Some(claim) = plan.claims.remove(from)
        {
            plan.claims.insert(to.clone(), claim);
        }
        self.of_claims.insert(to.clone(), key);
    }

    pub fn of(&self, claim: &ClaimUid) -> Option<&PlannedClaim> {
        self.all.get(self.of_claims.get(claim)?)?.claims.get(claim)
    }

    pub fn of_mut(&mut self, claim: &ClaimUid) -> Option<&mut PlannedClaim> {
        self.all.get_mut(self.of_claims.get(claim)?)?.claims.get_mut(claim)
    }

    pub fn key(&self, claim: &ClaimUid) -> Option<&UnitKey> {
        self.of_claims.get(claim)
    }

    pub fn get(&self, key: &UnitKey) -> Option<&Plan> {
        self.all.get(key)
    }

    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    pub fn iter(&self) -> impl Iterator<Item = (&UnitKey, &Plan)> {
        self.all.iter()
    }

    /// Units that are to have a part of a GPU.
    pub fn on(&self, gpu: &GpuRef) -> Vec<UnitKey> {
        let uses = |plan: &Plan| {
            plan.claims.values().any(|claim| !claim.done && claim.gpus().any(|one| one == *gpu))
        };
        self.all.iter().filter(|(_, plan)| uses(plan)).map(|(key, _)| key.clone()).collect()
    }

    /// Where a pod is to go.
    pub fn node_of(&self, key: &UnitKey, pod: &PodUid) -> Option<&NodeName> {
        self.all.get(key)?.pods.get(pod)
    }
}
