//! What a unit would take once shares have ended: of the nodes with the most room as few as it takes, and there of
//! the GPUs of which the least is in use.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use crate::allocate::{GpuGrant, Nodes};
use crate::controller::Moment;
use crate::controller::bounds::Amounts;
use crate::controller::capacity::{Aside, Capacity};
use crate::controller::core::Core;
use crate::controller::queue::{Together, Turn};
use crate::controller::steps::place::{PodPart, those};
use crate::controller::view::{GpuRef, Pod};
use crate::controller::wants::UNIT_TRIES_MAX;
use crate::feasible::Resources;
use crate::model::claim::ClaimKey;
use crate::model::names::NodeName;

/// Where a unit is looked for a place.
#[derive(Debug, Clone, Copy)]
pub(in crate::controller) struct Within<'a> {
    /// Shares of this namespace do not end.
    pub stays: Option<&'a str>,
    /// Nodes that are left out.
    pub but: &'a BTreeSet<NodeName>,
}

/// A place for a unit, and how many GPUs could serve it.
pub(in crate::controller) type Chosen = (Aside, usize);

/// What a namespace has.
struct Owned<'a> {
    namespace: &'a str,
    /// What counts for its bounds, on whichever nodes.
    amounts: Vec<(ClaimKey, Amounts)>,
    grants: Vec<(ClaimKey, Vec<(GpuRef, GpuGrant)>)>,
    rooms: Vec<(NodeName, Resources)>,
}

impl Core {
    /// None: the unit would not fit. `emptied`: for all units of a round, made when it is needed.
    pub(in crate::controller) fn choose(
        &mut self,
        turn: &Turn,
        within: Within<'_>,
        emptied: &mut Option<Capacity>,
        now: Moment,
    ) -> Option<Chosen> {
        let mut order: Vec<(Reverse<u64>, NodeName)> = Vec::new();
        for view in self.capacity.index.nodes().filter(|view| !within.but.contains(view.name())) {
            let free = view.gpus().filter(|gpu| !gpu.closed()).map(|gpu| gpu.memory().1.mib_floor()).sum();
            order.push((Reverse(free), view.name().clone()));
        }
        order.sort_unstable();
        let order: Vec<NodeName> = order.into_iter().map(|(_, name)| name).collect();
        let namespace = self.namespace(turn)?.to_owned();
        let ticks = self.purse.allowance(&namespace)?;
        let mut capacity = emptied.take().unwrap_or_else(|| self.emptied(|_| true));
        capacity.index.allow(ticks);
        self.capacity.index.allow(ticks);
        let owned = self.owned(&namespace, within.stays.is_some());
        give(&mut capacity, &owned);
        self.reserves.of_others(&turn.key).for_each(|aside| capacity.set_aside(aside.clone()));
        let found = self.first_nodes(turn, &order, &mut capacity, now);
        self.capacity.index.pay(capacity.index.spent().0);
        self.pay(turn);
        capacity.lift_all();
        take(&mut capacity, &owned);
        *emptied = Some(capacity);
        found
    }

    /// The same on the nodes that are kept for it already. `stays`: shares of this namespace do not end.
    pub(in crate::controller) fn choose_again(
        &mut self,
        turn: &Turn,
        stays: Option<&str>,
        now: Moment,
    ) -> Option<Aside> {
        let nodes = self.reserves.of(&turn.key)?.aside.nodes();
        let namespace = self.namespace(turn)?.to_owned();
        let ticks = self.purse.allowance(&namespace)?;
        self.capacity.index.allow(ticks);
        let mut parts = self.parts(turn, now)?;
        for part in &mut parts {
            let barred = self.barred_nodes(&part.pod);
            let without = self.ports_taken(&part.pod);
            let apart = self.kept_off(&part.pod);
            let out = self.queue.refusals.excluded(&part.pod, now);
            let open = |name: &&NodeName| match &part.nodes {
                Nodes::Only(names) => names.contains(*name),
                // Those that are full may not be once shares have ended.
                Nodes::Any | Nodes::Except(_) => {
                    let shut =
                        [&barred, &without].into_iter().chain(&apart).any(|nodes| nodes.contains(*name));
                    !shut && !out.contains(*name)
                }
            };
            part.nodes = Nodes::Only(nodes.iter().filter(open).cloned().collect());
        }
        let mut capacity = self.emptied(|name| nodes.contains(name));
        capacity.index.allow(ticks);
        let mut owned = self.owned(&namespace, stays.is_some());
        owned.rooms.retain(|(node, _)| nodes.contains(node));
        for (_, grants) in &mut owned.grants {
            grants.retain(|(gpu, _)| nodes.contains(&gpu.node));
        }
        give(&mut capacity, &owned);
        self.reserves.of_others(&turn.key).for_each(|aside| capacity.set_aside(aside.clone()));
        let found = self.freest(turn, &parts, &nodes, &mut capacity);
        self.capacity.index.pay(capacity.index.spent().0);
        self.pay(turn);
        found
    }

    /// The parts of the pods of a unit that are placed together at least; none: one of them can have no place.
    pub(in crate::controller) fn parts(&mut self, turn: &Turn, now: Moment) -> Option<Vec<PodPart>> {
        let (mut parts, mut taken) = (Vec::new(), BTreeSet::new());
        let mut tries = 0;
        for (nth, pod) in turn.pods.iter().enumerate() {
            if nth > 0 && !self.capacity.index.has_left() && !self.is_judged(pod) {
                return None;
            }
            let part = self.part(pod, &taken, now);
            match (part, &turn.together) {
                (Ok(Some(part)), _) => {
                    tries += part.tries();
                    if tries > UNIT_TRIES_MAX {
                        return None;
                    }
                    taken.extend(part.claims().iter().copied());
                    parts.push(part);
                }
                (Ok(None), _) => {}
                (Err(_), Together::AtLeast(_)) => {}
                (Err(_), Together::All | Together::Alone) => return None,
            }
        }
        let least = self.least(turn, &parts)?;
        Some(those(parts, &least)).filter(|parts| !parts.is_empty())
    }

    /// From as few of the first nodes as it takes.
    fn first_nodes(
        &mut self,
        turn: &Turn,
        order: &[NodeName],
        capacity: &mut Capacity,
        now: Moment,
    ) -> Option<Chosen> {
        std::mem::swap(&mut self.capacity, capacity);
        let parts = self.parts(turn, now);
        let found = parts.and_then(|mut parts| {
            let allowed: Vec<Nodes> = parts.iter().map(|part| part.nodes.clone()).collect();
            let serve = order.iter().filter(|name| allowed.iter().any(|nodes| nodes.allow(name)));
            let serve = serve.filter_map(|name| self.capacity.index.node(name));
            let serve = serve.map(|view| view.gpus().filter(|gpu| !gpu.closed()).count()).sum();
            let mut count = 1;
            loop {
                let first = order.get(..count).unwrap_or(order);
                for (part, allowed) in parts.iter_mut().zip(&allowed) {
                    part.nodes =
                        Nodes::Only(first.iter().filter(|name| allowed.allow(name)).cloned().collect());
                }
                match self.first_way(&parts) {
                    Some((_, decision)) => {
                        let nodes = decision.placements.into_iter().map(|one| one.node).collect();
                        break Some((parts, nodes, serve));
                    }
                    None if count < order.len() && self.capacity.index.has_left() => count *= 2,
                    None => break None,
                }
            }
        });
        std::mem::swap(&mut self.capacity, capacity);
        let (mut parts, nodes, serve): (Vec<PodPart>, BTreeSet<NodeName>, usize) = found?;
        for part in &mut parts {
            let of_these = nodes.iter().filter(|name| part.nodes.allow(name)).cloned().collect();
            part.nodes = Nodes::Only(of_these);
        }
        Some((self.freest(turn, &parts, &nodes, capacity)?, serve))
    }

    /// From as few GPUs of these nodes as it takes, those first of which the least is in use. `capacity`: as it is once
    /// shares have ended.
    fn freest(
        &mut self,
        turn: &Turn,
        parts: &[PodPart],
        nodes: &BTreeSet<NodeName>,
        capacity: &mut Capacity,
    ) -> Option<Aside> {
        let kept = self.reserves.of(&turn.key);
        let kept: BTreeSet<GpuRef> =
            kept.into_iter().flat_map(|kept| kept.aside.gpus()).map(|(gpu, _)| gpu).collect();
        let mut order: Vec<(u64, bool, GpuRef)> = Vec::new();
        for view in nodes.iter().filter_map(|name| capacity.index.node(name)) {
            for gpu in view.gpus().filter(|gpu| !gpu.closed()) {
                let gpu = GpuRef::new(view.name(), gpu.device());
                order.push((self.used(&gpu), !kept.contains(&gpu), gpu));
            }
        }
        order.sort_unstable();
        let gpus: Vec<GpuRef> = order.into_iter().map(|(.., gpu)| gpu).collect();
        std::mem::swap(&mut self.capacity, capacity);
        let mut of_first = |open: usize| {
            gpus.iter().skip(open).for_each(|gpu| self.capacity.set_closed(gpu, true));
            let found = self.first_way(parts).map(|(_, decision)| decision.placements);
            gpus.iter().skip(open).for_each(|gpu| self.capacity.set_closed(gpu, false));
            found
        };
        let mut found = of_first(gpus.len());
        let (mut too_few, mut enough) = (0, gpus.len());
        while found.is_some() && too_few + 1 < enough {
            let middle = too_few.midpoint(enough);
            match of_first(middle) {
                Some(places) => (found, enough) = (Some(places), middle),
                None => too_few = middle,
            }
        }
        std::mem::swap(&mut self.capacity, capacity);
        Some(Aside { places: found?, alone: parts.iter().any(PodPart::is_several) })
    }

    /// So many MiB of it are in use.
    pub(in crate::controller) fn used(&self, gpu: &GpuRef) -> u64 {
        let view = self.capacity.index.node(&gpu.node);
        let gpu = view.and_then(|view| view.gpus().find(|one| *one.device() == gpu.device));
        gpu.map_or(0, |gpu| gpu.memory().0.mib_floor().saturating_sub(gpu.memory().1.mib_floor()))
    }

    /// How much is in the way of what is kept: MiB, percent and slots in one number, which is 0 when there is nothing.
    pub(in crate::controller) fn lacking(&self, aside: &Aside) -> u64 {
        let of = |(at, grant): (GpuRef, &GpuGrant)| {
            let view = self.capacity.index.node(&at.node);
            let Some(gpu) = view.and_then(|view| view.gpus().find(|one| *one.device() == at.device)) else {
                return 0;
            };
            let (all, free) = (gpu.memory().0.mib_floor(), gpu.memory().1.mib_floor());
            let alone = aside.alone && self.capacity.has_one_daemon(&at);
            let memory = if alone { all } else { grant.memory.mib_ceil() };
            let percent = grant.compute.map_or(0, |percent| u32::from(percent.get()));
            let rest = percent.saturating_sub(gpu.compute()) + grant.slots.saturating_sub(gpu.slots());
            memory.saturating_sub(free) + u64::from(rest)
        };
        aside.gpus().map(of).sum()
    }

    /// How nodes look: what is left of each GPU.
    pub(in crate::controller) fn looks(&self, nodes: &BTreeSet<NodeName>) -> Vec<[u64; 3]> {
        let mut looks = Vec::new();
        for name in nodes {
            let Some(view) = self.capacity.index.node(name) else {
                looks.push([0; 3]);
                continue;
            };
            looks.push([view.cpu_milli().1, view.memory().1.mib_floor(), view.pods().1]);
            for gpu in view.gpus() {
                let flags = u64::from(gpu.closed()) << 1 | u64::from(gpu.tainted());
                let left = u64::from(gpu.compute()) << 32 | u64::from(gpu.slots());
                looks.push([gpu.memory().1.mib_floor(), left, flags]);
            }
        }
        looks
    }

    /// What there will be on these nodes when all shares have ended. What others have of GPUs and nodes stays: nobody
    /// knows for how long.
    pub(in crate::controller) fn emptied(&self, is_meant: impl Fn(&NodeName) -> bool) -> Capacity {
        let mut capacity = self.capacity.without_grants(&is_meant);
        for (name, state) in self.view.nodes().filter(|(name, _)| is_meant(name)) {
            capacity.set_node(name, Some(state));
        }
        for (pod, (node, room)) in self.pods.places().filter(|(_, (node, _))| is_meant(node)) {
            if !self.view.pod(pod).is_some_and(|pod| self.has_share(pod)) {
                capacity.take_room(node, *room);
            }
        }
        capacity
    }

    fn has_share(&self, pod: &Pod) -> bool {
        self.view.claims_of(pod).into_iter().flatten().any(|claim| claim.is_shares())
    }

    /// What pods with shares of a namespace have. `stays`: they keep it; else it counts for the namespace's bounds alone.
    fn owned<'a>(&self, namespace: &'a str, stays: bool) -> Owned<'a> {
        let is_own =
            |claim: ClaimKey| self.view.claim(claim).is_some_and(|claim| claim.namespace() == namespace);
        let own = |pod: &Pod| pod.at.namespace == namespace && self.has_share(pod);
        let rooms = self
            .pods
            .places()
            .filter(|(pod, _)| self.view.pod(pod).is_some_and(own))
            .map(|(_, at)| at.clone());
        let grants = self.capacity.grants_of(is_own);
        let amounts = grants.iter().map(|(claim, _)| (*claim, self.capacity.usage.of_claim(*claim)));
        let amounts = amounts.collect();
        match stays {
            true => Owned { namespace, amounts, rooms: rooms.collect(), grants },
            false => Owned { namespace, amounts, rooms: Vec::new(), grants: Vec::new() },
        }
    }
}

fn give(capacity: &mut Capacity, owned: &Owned<'_>) {
    let namespace = Some(owned.namespace);
    owned.amounts.iter().for_each(|(claim, amounts)| capacity.usage.set(*claim, namespace, *amounts));
    owned.grants.iter().for_each(|(claim, grants)| capacity.set_grants(*claim, grants.clone()));
    owned.rooms.iter().for_each(|(node, room)| capacity.take_room(node, *room));
}

/// The other way round.
fn take(capacity: &mut Capacity, owned: &Owned<'_>) {
    owned.amounts.iter().for_each(|(claim, _)| capacity.usage.set(*claim, None, Amounts::default()));
    owned.grants.iter().for_each(|(claim, _)| capacity.set_grants(*claim, Vec::new()));
    owned.rooms.iter().for_each(|(node, room)| capacity.give_room(node, *room));
}
