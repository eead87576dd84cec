//! Nodes that have refused a pod, and pods that their scheduler leaves alone: for how long, and which nodes are tried last.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::controller::Moment;
use crate::controller::queue::siblings::Siblings;
use crate::controller::view::movable::OwnerKey;
use crate::model::names::{NodeName, PodUid};
use crate::model::time::back_off;

/// First exclusion of a node for a pod; doubled each time, up to the last.
const EXCLUDE_FIRST: Duration = Duration::from_secs(10);
const EXCLUDE_LAST: Duration = Duration::from_secs(300);
/// First pause of a pod that its scheduler did not bind; doubled each time, up to the last.
const PAUSE_FIRST: Duration = Duration::from_secs(30);
const PAUSE_LAST: Duration = Duration::from_secs(480);
/// After so long without a refusal, an exclusion or a pause begins anew.
const FORGET: Duration = Duration::from_secs(600);

#[derive(Debug, Clone)]
struct Exclusion {
    times: u32,
    until: Moment,
    over: bool,
    /// Of a node: it counts again, since no other was left.
    open: bool,
    /// Of a node: the zone that it is in, until no other zone is left. What keeps a pod off a node often keeps it off its
    /// neighbours.
    zone: Option<Box<str>>,
}

#[derive(Debug, Default)]
pub struct Refusals {
    excluded: BTreeMap<PodUid, BTreeMap<NodeName, Exclusion>>,
    pub siblings: Siblings,
    paused: BTreeMap<PodUid, Exclusion>,
    /// Pods that have given their share to these older ones.
    gave_way: BTreeMap<PodUid, BTreeSet<PodUid>>,
}

impl Refusals {
    /// A node has refused a pod. `zone`: the one that it is in, if others are to be tried first.
    pub fn exclude(&mut self, pod: &PodUid, node: &NodeName, zone: Option<&str>, now: Moment) {
        let of_pod = self.excluded.entry(pod.clone()).or_default();
        let times = of_pod.get(node).filter(|one| now < one.until + FORGET).map_or(0, |one| one.times);
        let until = now + back_off(EXCLUDE_FIRST, times + 1, EXCLUDE_LAST);
        let times = times.saturating_add(1).min(16);
        let zone = zone.map(Into::into);
        of_pod.insert(node.clone(), Exclusion { times, until, over: false, open: false, zone });
    }

    /// A pod was not bound though it had its share: it keeps no GPU for a while.
    pub fn pause(&mut self, pod: &PodUid, now: Moment) {
        let before = self.paused.get(pod).filter(|one| now < one.until + FORGET);
        if before.is_some_and(|one| now < one.until) {
            return;
        }
        let times = before.map_or(0, |one| one.times);
        let until = now + back_off(PAUSE_FIRST, times + 1, PAUSE_LAST);
        let times = times.saturating_add(1).min(16);
        let pause = Exclusion { times, until, over: false, open: false, zone: None };
        self.paused.insert(pod.clone(), pause);
    }

    /// What it asks for, or what its group says, is another now.
    pub(super) fn end_pause(&mut self, pod: &PodUid) {
        self.paused.remove(pod);
    }

    /// The pod is gone for good.
    pub(super) fn forget(&mut self, pod: &PodUid) {
        self.excluded.remove(pod);
        self.paused.remove(pod);
        self.gave_way.remove(pod);
        self.siblings.forget_pod(pod);
    }

    /// The pod's share is taken back for an older one.
    pub fn gives_way(&mut self, pod: &PodUid, to: &PodUid) {
        self.gave_way.entry(pod.clone()).or_default().insert(to.clone());
    }

    pub fn has_given_way(&self, pod: &PodUid, to: &PodUid) -> bool {
        self.gave_way.get(pod).is_some_and(|older| older.contains(to))
    }

    /// Until when a unit of these pods is left out: they start together, so the last of their pauses counts.
    pub(super) fn paused_until<'a>(
        &self,
        pods: impl Iterator<Item = &'a PodUid>,
        now: Moment,
    ) -> Option<Moment> {
        if self.paused.is_empty() {
            return None;
        }
        let pauses = pods.filter_map(|pod| self.paused.get(pod)).map(|one| one.until);
        pauses.filter(|until| *until > now).max()
    }

    /// True if a node is open again to a pod, or comes last no more, since this was last asked.
    pub fn expire(&mut self, now: Moment) -> bool {
        let mut any = false;
        for one in self
            .excluded
            .values_mut()
            .flat_map(BTreeMap::values_mut)
            .chain(self.paused.values_mut())
            .filter(|one| !one.over && one.until <= now)
        {
            one.over = true;
            any = true;
        }
        self.excluded.retain(|_, of_pod| {
            let before = of_pod.len();
            of_pod.retain(|_, one| now < one.until + FORGET);
            any |= of_pod.len() < before;
            !of_pod.is_empty()
        });
        self.paused.retain(|_, one| now < one.until + FORGET);
        any |= self.siblings.forget(now);
        any
    }

    /// Nodes that have refused the pod: for a time each, and then until the pod has no place on any other.
    pub fn excluded(&self, pod: &PodUid, now: Moment) -> BTreeSet<&NodeName> {
        let of_pod = self.excluded.get(pod).into_iter().flatten();
        of_pod.filter(|(_, one)| one.until > now || !one.open).map(|(node, _)| node).collect()
    }

    /// Something but room may keep the pod from a share: a node has refused it, or its scheduler has left it alone.
    pub fn is_kept_from_nodes(&self, pod: &PodUid) -> bool {
        self.excluded.contains_key(pod) || self.paused.contains_key(pod)
    }

    /// Zones with a node that has refused the pod: until the pod has no place in any other.
    pub fn excluded_zones(&self, pod: &PodUid) -> BTreeSet<&str> {
        let of_pod = self.excluded.get(pod).into_iter().flat_map(BTreeMap::values);
        of_pod.filter_map(|one| one.zone.as_deref()).collect()
    }

    /// There is no other place for these pods. Zones with nodes that refused others of their owners count again, then these
    /// nodes, then zones with nodes that refused the pods themselves, and last nodes that did so a while ago. `owners`: of
    /// those that start by themselves. False: there is nothing more.
    pub fn reopen(&mut self, pods: &[PodUid], owners: &[(PodUid, OwnerKey)], now: Moment) -> bool {
        if owners.iter().fold(false, |any, (pod, owner)| self.siblings.reopen(pod, owner) || any) {
            return true;
        }
        if self.reopen_zones(pods) {
            return true;
        }
        let mut any = false;
        for pod in pods {
            let of_pod = self.excluded.get_mut(pod).into_iter().flat_map(BTreeMap::values_mut);
            for one in of_pod.filter(|one| one.until <= now && !one.open) {
                one.open = true;
                any = true;
            }
        }
        any
    }

    /// Zones with nodes that refused these pods count again: only the nodes themselves come last. False: there are none.
    pub fn reopen_zones(&mut self, pods: &[PodUid]) -> bool {
        let mut any = false;
        for pod in pods {
            let of_pod = self.excluded.get_mut(pod).into_iter().flat_map(BTreeMap::values_mut);
            of_pod.for_each(|one| any |= one.zone.take().is_some());
        }
        any
    }

    /// When nodes are open again to pods, and pauses end.
    pub(super) fn ends(&self, waits: impl Fn(&PodUid) -> bool) -> impl Iterator<Item = Moment> {
        let all = self.excluded.iter().flat_map(|(pod, of_pod)| of_pod.values().map(move |one| (pod, one)));
        all.chain(&self.paused).filter(move |(pod, _)| waits(pod)).map(|(_, one)| one.until)
    }
}
