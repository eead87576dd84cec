//! Where pods take room and ports of nodes, which pods a gang has, which wait for whole GPUs of kube-scheduler's, and
//! which are to be looked at since their claims have changed.

use std::collections::{BTreeMap, BTreeSet};

use crate::controller::demand::Demand;
use crate::controller::host_ports::HostPorts;
use crate::controller::neighbours::Neighbours;
use crate::controller::queue::UnitKey;
use crate::feasible::Resources;
use crate::model::claim::PodRef;
use crate::model::names::{NodeName, PodUid};

/// Claims of marked pods that are looked up for a namespace in one round: some milliseconds.
const LOOKUPS_MAX: usize = 16_384;

/// A node, and what a pod takes of it.
pub type TakenRoom = (NodeName, Resources);

/// What a pod of a gang asks for, as it was when the pod was last looked at.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum MemberAsks {
    /// Not all of its claims are known.
    #[default]
    Unknown,
    /// A claim of it is for a share.
    Shares,
    /// None is, such as of a launcher.
    Nothing,
}

#[derive(Debug, Default)]
pub struct Pods {
    places: BTreeMap<PodUid, TakenRoom>,
    on_nodes: BTreeMap<NodeName, BTreeSet<PodUid>>,
    pub ports: HostPorts,
    pub neighbours: Neighbours,
    pub demand: Demand,
    gangs: BTreeMap<UnitKey, BTreeMap<PodUid, MemberAsks>>,
    /// The gangs that pods are members of. No entry: the pod is a unit by itself.
    gang_of: BTreeMap<PodUid, UnitKey>,
    /// By namespace.
    marked: BTreeMap<String, BTreeSet<PodUid>>,
}

impl Pods {
    /// The pod takes this room now. Returns the room that it took before, if that is another.
    pub fn set_place(&mut self, pod: &PodUid, place: Option<TakenRoom>) -> RoomChange {
        if self.places.get(pod) == place.as_ref() {
            return RoomChange::default();
        }
        let given = self.places.remove(pod);
        if let Some((node, _)) = &given
            && let Some(pods) = self.on_nodes.get_mut(node)
        {
            pods.remove(pod);
            if pods.is_empty() {
                self.on_nodes.remove(node);
            }
        }
        if let Some(place) = &place {
            self.places.insert(pod.clone(), place.clone());
            self.on_nodes.entry(place.0.clone()).or_default().insert(pod.clone());
        }
        RoomChange { given, taken: place }
    }

    /// It takes room of some node.
    pub fn has_place(&self, pod: &PodUid) -> bool {
        self.places.contains_key(pod)
    }

    /// Where it takes room.
    pub fn node_of(&self, pod: &PodUid) -> Option<&NodeName> {
        self.places.get(pod).map(|(node, _)| node)
    }

    /// Those that take room of a node.
    pub fn on(&self, node: &NodeName) -> impl Iterator<Item = &PodUid> {
        self.on_nodes.get(node).into_iter().flatten()
    }

    /// The room that it takes, and of which node.
    pub fn place(&self, pod: &PodUid) -> Option<&TakenRoom> {
        self.places.get(pod)
    }

    /// All that take room.
    pub fn places(&self) -> impl Iterator<Item = (&PodUid, &TakenRoom)> {
        self.places.iter()
    }

    /// The pod is of this unit now. Returns the unit that it was of before, if that is another.
    pub fn set_unit(&mut self, pod: &PodUid, unit: UnitKey) -> Option<UnitKey> {
        if self.gang_of.get(pod).is_some_and(|gang| *gang == unit) {
            return None;
        }
        let old = self.forget_unit(pod);
        if let UnitKey::Gang { .. } = &unit {
            self.gangs.entry(unit.clone()).or_default().insert(pod.clone(), MemberAsks::default());
            self.gang_of.insert(pod.clone(), unit.clone());
        }
        (old != unit).then_some(old)
    }

    /// The pod is a unit by itself, or gone. Returns the unit that it was of.
    pub fn forget_unit(&mut self, pod: &PodUid) -> UnitKey {
        let Some(gang) = self.gang_of.remove(pod) else { return UnitKey::Pod(pod.clone()) };
        if let Some(members) = self.gangs.get_mut(&gang) {
            members.remove(pod);
            if members.is_empty() {
                self.gangs.remove(&gang);
            }
        }
        gang
    }

    /// The unit that the pod is of.
    pub fn unit_of(&self, pod: &PodUid) -> UnitKey {
        self.gang_of.get(pod).cloned().unwrap_or_else(|| UnitKey::Pod(pod.clone()))
    }

    /// A claim of the pod has changed: the next round looks at the pod, once for all of its claims.
    pub fn mark(&mut self, pod: &PodRef) {
        let marked = match self.marked.get_mut(&pod.namespace) {
            Some(marked) => marked,
            None => self.marked.entry(pod.namespace.clone()).or_default(),
        };
        if !marked.contains(&pod.uid) {
            marked.insert(pod.uid.clone());
        }
    }

    /// Marked pods for one round, of each namespace as many as have [`LOOKUPS_MAX`] claims together, at least one. The
    /// others stay marked. `claims`: how many a pod has.
    pub fn take_marked(&mut self, claims: impl Fn(&PodUid) -> usize) -> Vec<PodUid> {
        let mut taken = Vec::new();
        self.marked.retain(|_, marked| {
            let mut lookups = 0;
            while lookups < LOOKUPS_MAX
                && let Some(pod) = marked.pop_first()
            {
                lookups += claims(&pod).max(1);
                taken.push(pod);
            }
            !marked.is_empty()
        });
        taken
    }

    /// Some are marked still.
    pub fn has_marked(&self) -> bool {
        !self.marked.is_empty()
    }

    /// How many there are.
    #[cfg(test)]
    pub fn gangs(&self) -> usize {
        self.gangs.len()
    }

    /// A pod asks for this. Kept of those that are in a gang.
    pub fn set_asks(&mut self, pod: &PodUid, asks: MemberAsks) {
        let members = self.gang_of.get(pod).and_then(|gang| self.gangs.get_mut(gang));
        if let Some(known) = members.and_then(|members| members.get_mut(pod)) {
            *known = asks;
        }
    }

    /// Those of a gang, whether they wait or not, and what they ask for.
    pub fn members(&self, gang: &UnitKey) -> impl Iterator<Item = (&PodUid, MemberAsks)> {
        self.gangs.get(gang).into_iter().flatten().map(|(pod, asks)| (pod, *asks))
    }
}

/// Resources that a pod gives back, and room that it takes.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct RoomChange {
    pub given: Option<TakenRoom>,
    pub taken: Option<TakenRoom>,
}
