//! Nodes that come last for a pod: those that have refused it, or others of its owner.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::{KEPT_TICKS, NodeSet, TERM_TICKS};
use crate::allocate::Index;
use crate::controller::Moment;
use crate::controller::core::Core;
use crate::controller::queue::{Queue, UnitKey};
use crate::controller::view::movable::OwnerKey;
use crate::controller::view::{Asks, Claim, ClusterView};
use crate::controller::wants::ways_of;
use crate::model::names::{NodeName, PodUid};

impl Core {
    /// What makes the pod, if it learns of what others of its owner have met: it starts by itself, and asks for one thing. Of
    /// several alternatives the best that fits anywhere is taken, wherever that is.
    pub(super) fn owner_key(&self, pod: &PodUid) -> Option<OwnerKey> {
        let owner = self.view.owner_of(pod)?;
        if let UnitKey::Gang { .. } = self.pods.unit_of(pod) {
            return None;
        }
        let is_one = |claim: &&Claim| match &claim.asks {
            Asks::Shares(spec) => ways_of(spec) == 1,
            Asks::Unreadable(_) | Asks::Scheduler(_) => true,
        };
        let claims = self.view.claims_of(self.view.pod(pod)?)?;
        claims.iter().all(is_one).then_some(owner)
    }

    /// A node has refused the pod: it comes last for others of its owner, too.
    pub(in crate::controller::steps) fn note_for_siblings(
        &mut self,
        pod: &PodUid,
        node: &NodeName,
        now: Moment,
    ) {
        if let Some(owner) = self.owner_key(pod) {
            self.queue.refusals.siblings.note(&owner, node, self.view.zone_of(node), now);
        }
    }

    /// Of the pods of a unit those that learn, and from whom. To look it up costs as much as reading the pod, which was paid.
    pub(in crate::controller) fn owners_of(&self, pods: &[PodUid]) -> Vec<(PodUid, OwnerKey)> {
        if self.queue.refusals.siblings.is_empty() {
            return Vec::new();
        }
        pods.iter().filter_map(|pod| Some((pod.clone(), self.owner_key(pod)?))).collect()
    }
}

/// Nodes of zones with a node that has refused the pod or others of its owner, and what refused these, as long as there may
/// be a place elsewhere.
pub(super) fn nodes(
    pod: &PodUid,
    owner: Option<&OwnerKey>,
    view: &ClusterView,
    queue: &Queue,
    index: &mut Index,
) -> NodeSet {
    let siblings = &queue.refusals.siblings;
    let mut shunned: BTreeSet<NodeName> =
        owner.into_iter().flat_map(|owner| siblings.nodes(pod, owner)).cloned().collect();
    let mut zones = queue.refusals.excluded_zones(pod);
    zones.extend(owner.into_iter().flat_map(|owner| siblings.zones(pod, owner)));
    if !zones.is_empty() {
        let mut nodes = 0;
        let all = view.nodes().map(|(name, _)| name).inspect(|_| nodes += 1);
        let there = all.filter(|name| view.zone_of(name).is_some_and(|zone| zones.contains(zone)));
        shunned.extend(there.cloned());
        index.pay(TERM_TICKS.saturating_mul(nodes));
    }
    index.pay(KEPT_TICKS.saturating_mul(shunned.len() as u64));
    Arc::new(shunned)
}
