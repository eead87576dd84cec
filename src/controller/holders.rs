//! Which pods take room of each node with GPUs, and what comes free where they end: kept by node, so that a decision need
//! not look for it. Filled and read by `steps::preempting`.

use std::collections::{BTreeMap, BTreeSet};

use crate::allocate::victims::{Freed, Rank};
use crate::controller::queue::UnitKey;
use crate::feasible::Resources;
use crate::model::names::{NodeName, PodUid};

/// A pod that is bound to its node.
#[derive(Debug, Clone, PartialEq)]
pub struct BoundPod {
    pub pod: PodUid,
    pub priority: i32,
    /// In seconds since 1970.
    pub start: i64,
    pub room: Resources,
    /// Its shares, each with whether its claim has several GPUs. Empty: it has none.
    pub shares: Freed,
    /// None: a pod by itself.
    pub gang: Option<UnitKey>,
    /// It does not end for others, or its end would free nothing: others use its claims.
    pub stays: bool,
    /// When it is to have ended, in seconds since 1970. None: it is not ending.
    pub ends: Option<i64>,
}

impl BoundPod {
    pub fn has_shares(&self) -> bool {
        !self.shares.gpus.is_empty()
    }

    /// A pod of this priority may have it end, as far as it is up to the pod itself.
    pub fn gives_way(&self, priority: i32) -> bool {
        !self.stays && self.ends.is_none() && self.priority < priority
    }
}

#[derive(Debug, Default)]
pub struct Holders {
    nodes: BTreeMap<NodeName, Vec<BoundPod>>,
    stale: BTreeSet<NodeName>,
    /// Grows whenever something may end that could not, or has a place that had none.
    version: u64,
}

impl Holders {
    /// Something has changed on the node.
    pub fn touch(&mut self, node: &NodeName) {
        self.version += 1;
        if !self.stale.contains(node) {
            self.stale.insert(node.clone());
        }
    }

    /// Something else has changed that decides who may end.
    pub fn news(&mut self) {
        self.version += 1;
    }

    pub fn version(&self) -> u64 {
        self.version
    }

    /// Nodes that are to be filled anew.
    pub fn take_stale(&mut self) -> BTreeSet<NodeName> {
        std::mem::take(&mut self.stale)
    }

    pub fn fill(&mut self, node: NodeName, holders: Vec<BoundPod>) {
        match holders.is_empty() {
            true => drop(self.nodes.remove(&node)),
            false => drop(self.nodes.insert(node, holders)),
        }
    }

    pub fn on(&self, node: &NodeName) -> &[BoundPod] {
        self.nodes.get(node).map(Vec::as_slice).unwrap_or_default()
    }

    /// Nodes where a pod of this priority may have others with shares end, and the least that is lost there at best.
    pub fn least(&self, priority: i32) -> impl Iterator<Item = (Rank, &NodeName)> {
        self.nodes.iter().filter_map(move |(node, holders)| {
            let mut least: Option<i32> = None;
            let mut latest = i64::MIN;
            for one in holders.iter().filter(|one| one.has_shares() && one.gives_way(priority)) {
                least = Some(least.map_or(one.priority, |least| least.min(one.priority)));
                latest = latest.max(one.start);
            }
            Some((Rank::least(least?, latest), node))
        })
    }

    /// Nodes where pods with shares are ending.
    pub fn ending(&self) -> impl Iterator<Item = &NodeName> {
        let ends = |one: &BoundPod| one.ends.is_some() && one.has_shares();
        self.nodes.iter().filter(move |(_, holders)| holders.iter().any(ends)).map(|(node, _)| node)
    }

    /// All nodes, with the pods on them.
    pub fn nodes(&self) -> impl Iterator<Item = (&NodeName, &[BoundPod])> {
        self.nodes.iter().map(|(node, holders)| (node, holders.as_slice()))
    }
}
