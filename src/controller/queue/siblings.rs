//! What the pods of one owner have met: they are made of one template, so that what keeps one of them off a node mostly keeps
//! the others off, too. It only says which nodes come last, for pods that start by themselves. A pod that finds no other
//! place goes there all the same; for the others they come last still.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::controller::Moment;
use crate::controller::view::movable::OwnerKey;
use crate::model::names::{NodeName, PodUid};

/// Owners at a time. With one more, one of the namespace that has the most is forgotten.
const OWNERS_MAX: usize = 256;
/// After so long without a refusal by it, a node comes last no more.
const FORGET: Duration = Duration::from_secs(600);

/// A node has refused one of the pods.
#[derive(Debug)]
struct Met {
    at: Moment,
    /// The zone that it is in, if others are to be tried first.
    zone: Option<Box<str>>,
}

/// What the pods of an owner have met.
#[derive(Debug, Default)]
struct Notes {
    nodes: BTreeMap<NodeName, Met>,
    /// Number of the last one.
    last: u64,
}

/// What counts no more for a pod, of the notes up to a number.
#[derive(Debug, Clone, Copy)]
struct Reopened {
    last: u64,
    nodes: bool,
}

#[derive(Debug, Default)]
pub struct Siblings {
    owners: BTreeMap<OwnerKey, Notes>,
    /// Pods that have found no other place: zones count again for them, and maybe nodes.
    reopened: BTreeMap<PodUid, Reopened>,
    /// Notes that were made.
    count: u64,
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
        self.count += 1;
        let notes = self.owners.entry(owner.clone()).or_default();
        notes.last = self.count;
        notes.nodes.insert(node.clone(), Met { at: now, zone: zone.map(Into::into) });
    }

    /// Of the namespace with the most owners the one whose pods were refused first.
    fn drop_one(&mut self) {
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        self.owners.keys().for_each(|owner| *counts.entry(&owner.namespace).or_default() += 1);
        let most = counts.values().copied().max().unwrap_or_default();
        let theirs =
            self.owners.iter().filter(|(owner, _)| counts.get(owner.namespace.as_str()) == Some(&most));
        let oldest = theirs.min_by_key(|(_, notes)| notes.last).map(|(owner, _)| owner.clone());
        oldest.and_then(|oldest| self.owners.remove(&oldest));
    }

    /// What pods of the owner have met, and what of it counts no more for this one.
    fn of(&self, pod: &PodUid, owner: &OwnerKey) -> Option<(&Notes, Option<Reopened>)> {
        let notes = self.owners.get(owner)?;
        Some((notes, self.reopened.get(pod).copied().filter(|reopened| reopened.last == notes.last)))
    }

    /// Nodes that have refused a pod of this owner: for this pod, until it has no place on any other.
    pub fn nodes(&self, pod: &PodUid, owner: &OwnerKey) -> impl Iterator<Item = &NodeName> {
        let met = self.of(pod, owner).filter(|(_, reopened)| reopened.is_none_or(|reopened| !reopened.nodes));
        met.into_iter().flat_map(|(notes, _)| notes.nodes.keys())
    }

    /// Zones with such nodes: for this pod, until it has no place in any other.
    pub fn zones(&self, pod: &PodUid, owner: &OwnerKey) -> impl Iterator<Item = &str> {
        let met = self.of(pod, owner).filter(|(_, reopened)| reopened.is_none());
        met.into_iter().flat_map(|(notes, _)| notes.nodes.values()).filter_map(|met| met.zone.as_deref())
    }

    /// There is no other place for this pod of the owner: zones count again for it, and when they do, nodes. False: both do.
    pub fn reopen(&mut self, pod: &PodUid, owner: &OwnerKey) -> bool {
        let Some((notes, reopened)) = self.of(pod, owner) else { return false };
        let nodes = reopened.is_some() || notes.nodes.values().all(|met| met.zone.is_none());
        if reopened.is_some_and(|reopened| reopened.nodes) {
            return false;
        }
        let reopened = Reopened { last: notes.last, nodes };
        self.reopened.insert(pod.clone(), reopened);
        true
    }

    /// The pod is gone for good.
    pub(super) fn forget_pod(&mut self, pod: &PodUid) {
        self.reopened.remove(pod);
    }

    /// True if something is forgotten now.
    pub fn forget(&mut self, now: Moment) -> bool {
        let mut any = false;
        self.owners.retain(|_, notes| {
            let before = notes.nodes.len();
            notes.nodes.retain(|_, met| now < met.at + FORGET);
            any |= notes.nodes.len() < before;
            !notes.nodes.is_empty()
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

    fn pod() -> PodUid {
        PodUid::new("pod")
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
        assert_eq!(
            [0, 1, 2, OWNERS_MAX].map(|nth| siblings.nodes(&pod(), &owner(nth)).count()),
            [2, 0, 1, 1]
        );
        // Who has many takes nothing from who has few.
        let other = OwnerKey { namespace: "other".to_owned(), uid: "rs".to_owned() };
        siblings.note(&other, &node, None, at(0));
        siblings.note(&owner(OWNERS_MAX + 1), &node, None, at(502));
        assert_eq!(siblings.nodes(&pod(), &other).count(), 1);
    }

    #[test]
    fn each_node_is_forgotten_by_itself() {
        let mut siblings = Siblings::default();
        siblings.note(&owner(0), &NodeName::new("a"), Some("z"), at(0));
        siblings.note(&owner(0), &NodeName::new("b"), None, at(100));
        assert!(!siblings.forget(at(599)));
        assert!(siblings.forget(at(600)));
        assert_eq!(siblings.nodes(&pod(), &owner(0)).map(NodeName::as_str).collect::<Vec<_>>(), ["b"]);
        assert_eq!(siblings.zones(&pod(), &owner(0)).count(), 0);
        assert!(siblings.forget(at(700)));
        assert!(siblings.is_empty());
    }

    /// What one pod has had to give up counts for the others still, and for that one again once there is something new.
    #[test]
    fn each_pod_goes_to_what_comes_last_by_itself() {
        let mut siblings = Siblings::default();
        siblings.note(&owner(0), &NodeName::new("a"), Some("z"), at(0));
        let counts = |siblings: &Siblings, pod: &str| {
            let pod = PodUid::new(pod);
            (siblings.zones(&pod, &owner(0)).count(), siblings.nodes(&pod, &owner(0)).count())
        };
        let one = PodUid::new("one");
        assert!(siblings.reopen(&one, &owner(0)));
        assert_eq!((counts(&siblings, "one"), counts(&siblings, "other")), ((0, 1), (1, 1)));
        assert!(siblings.reopen(&one, &owner(0)));
        assert_eq!((counts(&siblings, "one"), counts(&siblings, "other")), ((0, 0), (1, 1)));
        assert!(!siblings.reopen(&one, &owner(0)));
        siblings.note(&owner(0), &NodeName::new("b"), None, at(1));
        assert_eq!((counts(&siblings, "one"), counts(&siblings, "other")), ((1, 2), (1, 2)));
        siblings.forget_pod(&one);
        assert!(siblings.reopened.is_empty());
        // Without zones nodes are all that there is.
        siblings.note(&owner(1), &NodeName::new("a"), None, at(2));
        assert!(siblings.reopen(&one, &owner(1)));
        assert!(!siblings.reopen(&one, &owner(1)));
        assert!(!siblings.reopen(&one, &owner(2)), "nobody has met anything");
    }
}
