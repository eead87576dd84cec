//! Nodes that are kept free for what has been passed for too long, a pod or a gang: those where it fits once the
//! shares there have ended. For what would not fit even then nothing is kept, so that it holds nobody up.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::time::Duration;

use super::Moment;
use super::core::Core;
use super::queue::{Kept, Turn};
use super::round::Part;
use super::stock::Stock;
use crate::allocate::Nodes;
use crate::model::names::NodeName;

/// After so long it is looked anew.
const ANEW: Duration = Duration::from_secs(10);

impl Core {
    /// The nodes that are to be kept for a unit, beside those that are kept for others. `emptied`: for all units of
    /// a round, made when it is needed.
    pub(super) fn nodes_for(
        &mut self,
        turn: &Turn,
        kept: &BTreeSet<NodeName>,
        emptied: &mut Option<Stock>,
        now: Moment,
    ) -> BTreeSet<NodeName> {
        let before = turn.kept.as_ref();
        if let Some(Kept { nodes, since }) = before
            && now < *since + ANEW
            && nodes.is_disjoint(kept)
        {
            return nodes.clone();
        }
        let mut order: Vec<(Reverse<bool>, Reverse<u64>, NodeName)> = Vec::new();
        for view in self.stock.index.nodes().filter(|view| !kept.contains(view.name())) {
            let free = view.gpus().filter(|gpu| !gpu.closed()).map(|gpu| gpu.memory().1.mib_floor()).sum();
            let again = before.is_some_and(|before| before.nodes.contains(view.name()));
            order.push((Reverse(again), Reverse(free), view.name().clone()));
        }
        order.sort_unstable();
        let order: Vec<NodeName> = order.into_iter().map(|(.., name)| name).collect();
        let mut stock = emptied.take().unwrap_or_else(|| self.emptied());
        std::mem::swap(&mut self.stock, &mut stock);
        let nodes = self.first_nodes(turn, kept, &order, now).unwrap_or_default();
        std::mem::swap(&mut self.stock, &mut stock);
        *emptied = Some(stock);
        self.queue.keep(&turn.key, Kept { nodes: nodes.clone(), since: now });
        nodes
    }

    /// The nodes that a decision takes, from as few of the first ones as it takes; none: all of them will not do.
    fn first_nodes(
        &mut self,
        turn: &Turn,
        kept: &BTreeSet<NodeName>,
        order: &[NodeName],
        now: Moment,
    ) -> Option<BTreeSet<NodeName>> {
        let mut parts: Vec<Part> = Vec::new();
        for pod in &turn.pods {
            let part = self.part(pod, kept, &parts, now).ok()?;
            parts.extend(part);
        }
        if parts.is_empty() {
            return None;
        }
        let allowed: Vec<Nodes> = parts.iter().map(|part| part.nodes.clone()).collect();
        let mut count = 1;
        loop {
            let first = order.get(..count).unwrap_or(order);
            for (part, allowed) in parts.iter_mut().zip(&allowed) {
                part.nodes = Nodes::Only(first.iter().filter(|name| allowed.allow(name)).cloned().collect());
            }
            match self.first_way(&parts, kept) {
                Ok((_, decision)) => {
                    return Some(decision.placements.into_iter().map(|one| one.node).collect());
                }
                Err(_) if count < order.len() => count *= 2,
                Err(_) => return None,
            }
        }
    }

    /// What there will be when all shares have ended. What others have of GPUs and nodes stays: nobody knows for how
    /// long.
    fn emptied(&self) -> Stock {
        let mut stock = self.stock.without_grants();
        for (name, state) in &self.world.nodes {
            stock.set_node(name, Some(state));
        }
        let has_share = |pod| {
            let claims = self.world.pods.get(pod).and_then(|pod| self.world.claims_of(pod));
            claims.into_iter().flatten().any(|claim| claim.is_shares())
        };
        for (_, (node, room)) in self.assigned.iter().filter(|(pod, _)| !has_share(pod)) {
            stock.take_room(node, *room);
        }
        stock
    }
}
