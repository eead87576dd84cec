//! Where pods take room of nodes, and which pods a gang has.

use std::collections::{BTreeMap, BTreeSet};

use crate::controller::queue::UnitKey;
use crate::feasible::Resources;
use crate::model::names::{NodeName, PodUid};

/// A node, and what a pod takes of it.
pub type Place = (NodeName, Resources);

#[derive(Debug, Default)]
pub struct Pods {
    places: BTreeMap<PodUid, Place>,
    on_nodes: BTreeMap<NodeName, BTreeSet<PodUid>>,
    gangs: BTreeMap<UnitKey, BTreeSet<PodUid>>,
    /// The gangs that pods are members of. No entry: the pod is a unit by itself.
    gang_of: BTreeMap<PodUid, UnitKey>,
}

impl Pods {
    /// The pod takes this room now. Returns the room that it took before, if that is another.
    pub fn set_place(&mut self, pod: &PodUid, place: Option<Place>) -> Change {
        if self.places.get(pod) == place.as_ref() {
            return Change::default();
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
        Change { given, taken: place }
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
    pub fn place(&self, pod: &PodUid) -> Option<&Place> {
        self.places.get(pod)
    }

    /// All that take room.
    pub fn places(&self) -> impl Iterator<Item = (&PodUid, &Place)> {
        self.places.iter()
    }

    /// The pod is of this unit now. Returns the unit that it was of before, if that is another.
    pub fn set_unit(&mut self, pod: &PodUid, unit: UnitKey) -> Option<UnitKey> {
        if self.gang_of.get(pod).is_some_and(|gang| *gang == unit) {
            return None;
        }
        let old = self.forget_unit(pod);
        if let UnitKey::Gang { .. } = &unit {
            self.gangs.entry(unit.clone()).or_default().insert(pod.clone());
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

    /// How many there are.
    #[cfg(test)]
    pub fn gangs(&self) -> usize {
        self.gangs.len()
    }

    /// Those of a gang, whether they wait or not.
    pub fn members(&self, gang: &UnitKey) -> impl Iterator<Item = &PodUid> {
        self.gangs.get(gang).into_iter().flatten()
    }
}

/// Resources that a pod gives back, and room that it takes.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Change {
    pub given: Option<Place>,
    pub taken: Option<Place>,
}
