//! What the pods of one owner have met: they are made of one template, so that what keeps one of them off a node mostly keeps
//! the others off, too. It only says which nodes come last, for pods that start by themselves.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::controller::Moment;
use crate::model::names::NodeName;

/// What makes the pods: a ReplicaSet, a Job. A UID alone is what any pod may say.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct OwnerKey {
    pub namespace: String,
    pub uid: String,
}

/// Owners at a time. With one more, one of the namespace that has the most is forgotten.
const OWNERS_MAX: usize = 256;
/// After so long without a refusal by it, a node comes last no more.
const FORGET: Duration = Duration::from_secs(600);

/// A node has refused one of the pods.
#[derive(Debug)]
struct Met {
    at: Moment,
    /// The zone that it is in, until no other zone is left.
    zone: Option<Box<str>>,
}

#[derive(Debug, Default)]
pub struct Siblings {
    owners: BTreeMap<OwnerKey, BTreeMap<NodeName, Met>>,
}

impl Siblings {
    pub fn is_empty(&self) -> bool {
        self.owners.is_empty()
    }

    /// A node has refused a pod of this owner. `zone`: the one that it is in, if others are to be tried first.
    pub fn note(&mut self, owner: &OwnerKey, node: &NodeName, zone: Option<&str>, now: Moment) {
        if !self.owners.contains_key(owner) && self.owners.len() >= OWNERS_MAX {
            self.drop_one();
        }
        let met = Met { at: now, zone: zone.map(Into::into) };
        self.owners.entry(owner.clone()).or_default().insert(node.clone(), met);
    }

    /// Of the namespace with the most owners the one whose pods were refused first.
    fn drop_one(&mut self) {
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        self.owners.keys().for_each(|owner| *counts.entry(&owner.namespace).or_default() += 1);
        let most = counts.values().copied().max().unwrap_or_default();
        let last = |met: &BTreeMap<NodeName, Met>| met.values().map(|met| met.at).max();
        let theirs =
            self.owners.iter().filter(|(owner, _)| counts.get(owner.namespace.as_str()) == Some(&most));
        let oldest = theirs.min_by_key(|(_, met)| last(met)).map(|(owner, _)| owner.clone());
        oldest.and_then(|oldest| self.owners.remove(&oldest));
    }

    /// Nodes that have refused a pod of this owner.
    pub fn nodes(&self, owner: &OwnerKey) -> impl Iterator<Item = &NodeName> {
        self.owners.get(owner).into_iter().flat_map(BTreeMap::keys)
    }

    /// Zones with such nodes, until there is no place in any other.
    pub fn zones(&self, owner: &OwnerKey) -> impl Iterator<Item = &str> {
        let met = self.owners.get(owner).into_iter().flat_map(BTreeMap::values);
        met.filter_map(|met| met.zone.as_deref())
    }

    /// There is no other place for pods of these owners: zones count again, and when they do, nodes. False: both do.
    pub fn reopen(&mut self, owners: &BTreeSet<OwnerKey>) -> bool {
        let mut any = false;
        for owner in owners {
            let met = self.owners.get_mut(owner).into_iter().flat_map(BTreeMap::values_mut);
            met.for_each(|met| any |= met.zone.take().is_some());
        }
        if !any {
            let before = self.owners.len();
            owners.iter().for_each(|owner| drop(self.owners.remove(owner)));
            any = self.owners.len() < before;
        }
        any
    }

    /// True if something is forgotten now.
    pub fn forget(&mut self, now: Moment) -> bool {
        let mut any = false;
        self.owners.retain(|_, met| {
            let before = met.len();
            met.retain(|_, met| now < met.at + FORGET);
            any |= met.len() < before;
            !met.is_empty()
        });
        any
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owner(nth: usize) -> OwnerKey {
        OwnerKey { namespace: "ml".to_owned(), uid: format!("rs-{nth}") }
    }

    fn at(seconds: u64) -> Moment {
        Moment::default() + Duration::from_secs(seconds)
    }

    #[test]
    fn whose_pods_were_refused_first_is_forgotten_first() {
        let mut siblings = Siblings::default();
        let node = NodeName::new("a");
        (0..OWNERS_MAX).for_each(|nth| siblings.note(&owner(nth), &node, None, at(nth as u64)));
        siblings.note(&owner(0), &NodeName::new("b"), None, at(500));
        siblings.note(&owner(OWNERS_MAX), &node, None, at(501));
        assert_eq!(siblings.owners.len(), OWNERS_MAX);
        assert_eq!([0, 1, 2, OWNERS_MAX].map(|nth| siblings.nodes(&owner(nth)).count()), [2, 0, 1, 1]);
        // Who has many takes nothing from who has few.
        let other = OwnerKey { namespace: "other".to_owned(), uid: "rs".to_owned() };
        siblings.note(&other, &node, None, at(0));
        siblings.note(&owner(OWNERS_MAX + 1), &node, None, at(502));
        assert_eq!(siblings.nodes(&other).count(), 1);
    }

    #[test]
    fn each_node_is_forgotten_by_itself() {
        let mut siblings = Siblings::default();
        siblings.note(&owner(0), &NodeName::new("a"), Some("z"), at(0));
        siblings.note(&owner(0), &NodeName::new("b"), None, at(100));
        assert!(!siblings.forget(at(599)));
        assert!(siblings.forget(at(600)));
        assert_eq!(siblings.nodes(&owner(0)).map(NodeName::as_str).collect::<Vec<_>>(), ["b"]);
        assert_eq!(siblings.zones(&owner(0)).count(), 0);
        assert!(siblings.forget(at(700)));
        assert!(siblings.is_empty());
    }
}
