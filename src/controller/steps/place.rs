//! Where a unit goes: its pods' open claims, in each way to serve them, against what GPUs and nodes have left.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;

use crate::allocate::{self, Decision, Explanation, Nodes, Placement, PodAsk, Policy, Shape, Shortage};
use crate::controller::classes::{Class, POLICY};
use crate::controller::core::Core;
use crate::controller::grant::Given;
use crate::controller::queue::{Together, Turn, UnitKey};
use crate::controller::recorder::Reason;
use crate::controller::tracker::{Plan, PlannedClaim};

use crate::controller::view::groups::GangSize;
use crate::controller::view::{Asks, Claim, GpuRef, Pod};
use crate::controller::wants::{
    POD_REQUESTS_MAX, POD_TRIES_MAX, UNIT_TRIES_MAX, WAYS_MAX, Wants, combinations, wants,
};
use crate::controller::{Moment, ask, multi_gpu};
use crate::feasible::{self, Demands};
use crate::model::claim::ClaimKey;
use crate::model::names::{NodeName, PodUid, RequestName};
use crate::params::GrantedDevice;
use crate::select;

/// Of asking a node whether it meets one of a pod's demands, in ticks of [`crate::select::TICKS_PER_UNIT`].
const TERM_TICKS: u64 = 10;
/// What it costs to read one request in one combination of alternatives, in ticks.
const WANT_TICKS: u64 = 50;

/// A pod's part of a decision: its open claims and the ways to serve them.
pub(in crate::controller) struct Part {
    pub(in crate::controller) pod: PodUid,
    claims: Vec<ClaimKey>,
    /// Best first; at least one.
    ways: Vec<Way>,
    pub(in crate::controller) nodes: Nodes,
    policy: Policy,
}

/// What each claim asks for, of all alternatives one.
struct Way {
    wants: Vec<Wants>,
    shape: Shape,
}

impl Part {
    /// Pods of a gang have the same template: they take the same alternative.
    fn way(&self, nth: usize) -> &Way {
        &self.ways[nth.min(self.ways.len() - 1)]
    }

    pub(super) fn ways(&self) -> usize {
        self.ways.len()
    }

    /// Its requests in all of the ways.
    pub(super) fn tries(&self) -> usize {
        self.ways.iter().map(|way| way.shape.wants.len()).sum()
    }

    pub(super) fn shape(&self, nth: usize) -> &Shape {
        &self.way(nth).shape
    }

    /// A claim of it wants several GPUs, in one of the ways.
    pub(in crate::controller) fn is_several(&self) -> bool {
        self.ways.iter().any(|way| ask::is_several(&way.shape))
    }

    /// What each way asks for, with claim and name of the request of each of its wants.
    pub(super) fn shapes(&self) -> impl Iterator<Item = (&Shape, Vec<(ClaimKey, &RequestName)>)> {
        self.ways.iter().map(|way| {
            let mut requests = Vec::new();
            for (claim, wants) in self.claims.iter().zip(&way.wants) {
                requests.extend(wants.requests.iter().map(|want| (*claim, &want.request)));
            }
            (&way.shape, requests)
        })
    }

    pub(in crate::controller) fn claims(&self) -> &[ClaimKey] {
        &self.claims
    }

    pub(in crate::controller) fn refused(&self, reason: Reason, words: String) -> Refused {
        Refused { pod: self.pod.clone(), reason, words }
    }

    /// As the allocator is asked for the last of the ways.
    pub(in crate::controller) fn into_last_ask(mut self) -> PodAsk {
        let shape = self.ways.pop().map(|way| way.shape).unwrap_or_default();
        PodAsk { shape, nodes: self.nodes }
    }
}

/// What the parts ask the allocator for in one of their ways, and whether a claim wants several GPUs.
fn asks(parts: &[Part], nth: usize) -> (Vec<PodAsk>, bool) {
    let ask = |part: &Part| PodAsk { shape: part.way(nth).shape.clone(), nodes: part.nodes.clone() };
    let asks: Vec<PodAsk> = parts.iter().map(ask).collect();
    let is_several = asks.iter().any(|ask| ask::is_several(&ask.shape));
    (asks, is_several)
}

/// Those of the parts that stand at these places, which are in order.
pub(super) fn those(parts: Vec<Part>, places: &[usize]) -> Vec<Part> {
    let chosen = parts.into_iter().enumerate().filter(|(at, _)| places.binary_search(at).is_ok());
    chosen.map(|(_, part)| part).collect()
}

impl Turn {
    /// A pod cannot be placed as it is: others may start without it. The first refusal is kept.
    fn may_go_without(&self, refused: Refused, first: &mut Option<Refused>) -> Result<(), Refused> {
        match self.together {
            Together::AtLeast(_) => {
                first.get_or_insert(refused);
                Ok(())
            }
            Together::All | Together::Alone => Err(refused),
        }
    }
}

/// What came of trying the ways to serve the pods of a unit.
enum Ways {
    /// Which of the ways, and where.
    Fits(usize, Decision),
    Refused(Refused),
    /// What its namespace may spend is spent: the way that is next.
    Spent(usize),
}

/// Why a unit is not placed.
#[derive(Debug, Clone)]
pub(in crate::controller) struct Refused {
    pub(in crate::controller) pod: PodUid,
    pub(in crate::controller) reason: Reason,
    pub(in crate::controller) words: String,
}

impl Core {
    /// True if the unit was placed, false if there is nothing to decide now.
    pub(in crate::controller) fn place(&mut self, turn: &Turn, now: Moment) -> Result<bool, Refused> {
        let Some(mut parts) = self.ready_parts(turn, now)? else { return Ok(false) };
        let from = self.purse.resume(&turn.key);
        let found = match self.check_bounds(&parts) {
            Ok(()) => self.try_ways(&parts, from),
            Err(refused) => Ways::Refused(refused),
        };
        let (nth, decision) = match found {
            Ways::Fits(nth, decision) => (nth, decision),
            Ways::Spent(nth) => {
                self.purse.stop(&turn.key, nth);
                self.queue.leave(&turn.key, true);
                return Ok(false);
            }
            Ways::Refused(refused) => {
                let words = refused.clone();
                parts = self.fewest(turn, parts, refused)?;
                self.check_bounds(&parts)?;
                match self.try_ways(&parts, 0) {
                    Ways::Fits(nth, decision) => (nth, decision),
                    Ways::Refused(refused) => return Err(refused),
                    Ways::Spent(_) => return Err(words),
                }
            }
        };
        self.adopt_places(turn, &parts, nth, &decision.placements, now);
        Ok(true)
    }

    /// The unit's parts go to these places, each in this of its ways.
    pub(super) fn adopt_places(
        &mut self,
        turn: &Turn,
        parts: &[Part],
        nth: usize,
        places: &[Placement],
        now: Moment,
    ) {
        let mut plan = Plan { pods: BTreeMap::new(), claims: BTreeMap::new(), since: turn.since };
        for (part, placement) in parts.iter().zip(places) {
            let node = &placement.node;
            plan.pods.insert(part.pod.clone(), node.clone());
            let wants = &part.way(nth).wants;
            let given = ask::parts(wants, placement);
            for ((claim, wants), given) in part.claims.iter().zip(wants).zip(given) {
                let given = self.given(node, wants, &given);
                let planned = PlannedClaim { node: node.clone(), given };
                plan.claims.insert(*claim, planned);
            }
        }
        parts.iter().for_each(|part| self.capacity.index.seen(&part.way(nth).shape));
        self.adopt(turn.key.clone(), plan, now);
    }

    /// The parts of a unit's pods, as many as start together at least. None: nothing is to be decided now.
    ///
    /// # Errors
    /// A pod cannot be placed as it is, and without it there are too few.
    fn ready_parts(&mut self, turn: &Turn, now: Moment) -> Result<Option<Vec<Part>>, Refused> {
        let (mut parts, mut first): (Vec<Part>, Option<Refused>) = (Vec::new(), None);
        let (mut taken, mut tries) = (BTreeSet::new(), 0);
        for pod in &turn.pods {
            let part = match self.part(pod, &taken, now) {
                Ok(Some(part)) => part,
                Ok(None) if matches!(turn.key, UnitKey::Gang { .. }) => continue,
                Ok(None) => return Ok(None),
                Err(refused) => {
                    turn.may_go_without(refused, &mut first)?;
                    continue;
                }
            };
            tries += part.tries();
            if tries > UNIT_TRIES_MAX {
                let words = format!(
                    "the pods of its gang have more than {UNIT_TRIES_MAX} requests together, in all combinations of \
                     alternatives (firstAvailable); name fewer alternatives, or make several gangs"
                );
                return Err(part.refused(Reason::Claim, words));
            }
            match self.study(&part) {
                Ok(true) => {
                    taken.extend(part.claims.iter().copied());
                    parts.push(part);
                }
                Ok(false) => {
                    self.queue.leave(&turn.key, true);
                    return Ok(None);
                }
                Err(refused) => turn.may_go_without(refused, &mut first)?,
            }
        }
        let enough = !parts.is_empty() && self.least(turn, &parts).is_some();
        match first {
            Some(refused) if !enough => Err(refused),
            _ => Ok(enough.then_some(parts)),
        }
    }

    /// Of parts that cannot be placed all together as few as start together: of those that fit somewhere by themselves.
    ///
    /// # Errors
    /// As many as there are start together, or too few of them fit anywhere.
    fn fewest(&mut self, turn: &Turn, parts: Vec<Part>, refused: Refused) -> Result<Vec<Part>, Refused> {
        match self.least(turn, &parts) {
            Some(least) if least.len() < parts.len() => {}
            _ => return Err(refused),
        }
        let fits = |core: &mut Self, part: &Part| core.first_way(std::slice::from_ref(part)).is_some();
        let fitting: Vec<usize> = (0..parts.len()).filter(|at| fits(self, &parts[*at])).collect();
        let parts = those(parts, &fitting);
        match self.least(turn, &parts) {
            Some(least) => Ok(those(parts, &least)),
            None => Err(refused),
        }
    }

    /// Which of the parts are to be placed together at least, by their places in the list. None: too few of the pods can
    /// be placed now.
    pub(super) fn least(&self, turn: &Turn, parts: &[Part]) -> Option<Vec<usize>> {
        let Together::AtLeast(need) = &turn.together else { return Some((0..parts.len()).collect()) };
        let of = |part: &Part| self.view.pod(&part.pod).and_then(|pod| pod.gang()?.part.as_deref());
        let there: Vec<Option<&str>> = parts.iter().map(of).collect();
        need.choose(&there)
    }

    /// Tries the ways in which all of the parts can be served, from this one on, as long as there is something left to
    /// spend.
    fn try_ways(&mut self, parts: &[Part], from: usize) -> Ways {
        let ways = parts.iter().map(Part::ways).max().unwrap_or(1);
        let from = if from < ways { from } else { 0 };
        for nth in from..ways - 1 {
            if let Some(decision) = self.fits_in_way(parts, nth) {
                return Ways::Fits(nth, decision);
            }
            if !self.capacity.index.has_left() {
                return Ways::Spent(nth + 1);
            }
        }
        let (last, policy) = (ways - 1, parts[0].policy);
        let (asks, is_several) = asks(parts, last);
        let decision = match is_several {
            false => allocate::decide(&mut self.capacity.index, &asks, policy),
            true => multi_gpu::decide(&mut self.capacity, &asks, policy),
        };
        match decision {
            Ok(decision) => match self.beyond_bounds(parts, &decision.placements) {
                None => Ways::Fits(last, decision),
                Some(words) => Ways::Refused(parts[0].refused(Reason::Bound, words)),
            },
            Err(explanation) => {
                let mut refused = self.explained(&parts[0], &explanation);
                if ways > 1 {
                    refused.words = format!("none of {ways} alternatives fits; the last {}", refused.words);
                }
                Ways::Refused(refused)
            }
        }
    }

    /// Where the parts are served in this way.
    fn fits_in_way(&mut self, parts: &[Part], nth: usize) -> Option<Decision> {
        let policy = parts[0].policy;
        let (asks, is_several) = asks(parts, nth);
        let decision = match is_several {
            false => allocate::places(&mut self.capacity.index, &asks, policy)
                .map(|placements| Decision { placements }),
            true => multi_gpu::places(&mut self.capacity, &asks, policy),
        };
        decision.filter(|decision| self.beyond_bounds(parts, &decision.placements).is_none())
    }

    /// The first of the ways in which all of the parts can be served, and how. None: there is none, or there was nothing
    /// left to spend before the last was tried.
    pub(super) fn first_way(&mut self, parts: &[Part]) -> Option<(usize, Decision)> {
        let ways = parts.iter().map(Part::ways).max().unwrap_or(1);
        for nth in 0..ways {
            if nth > 0 && !self.capacity.index.has_left() {
                return None;
            }
            if let Some(decision) = self.fits_in_way(parts, nth) {
                return Some((nth, decision));
            }
        }
        None
    }

    /// The ways to serve claims of a pod together, best first, the last claim's changing first.
    pub(in crate::controller) fn ways(&self, open: &[&Claim]) -> Result<Vec<Vec<Wants>>, String> {
        let requests = |claim: &&Claim| match &claim.asks {
            Asks::Shares(spec) => spec.requests.as_deref().unwrap_or_default().len(),
            Asks::Unreadable(_) | Asks::Scheduler(_) => 0,
        };
        let requests: usize = open.iter().map(requests).sum();
        if requests > POD_REQUESTS_MAX {
            return Err(format!(
                "its claims have {requests} requests together; a pod is placed with at most {POD_REQUESTS_MAX}"
            ));
        }
        let mut each = Vec::new();
        for claim in open {
            match &claim.asks {
                Asks::Unreadable(words) if claim.is_planned() => return Err(words.clone()),
                Asks::Unreadable(words) => return Err(format!("claim {}: {words}", claim.name())),
                Asks::Shares(spec) => {
                    let ways = wants(spec, self.view.classes());
                    each.push(ways.map_err(|words| format!("claim {}: {words}", claim.name()))?);
                }
                Asks::Scheduler(_) => {}
            }
        }
        let ways = each.iter().map(Vec::len).fold(1, usize::saturating_mul);
        if ways <= WAYS_MAX && ways.saturating_mul(requests) > POD_TRIES_MAX {
            return Err(format!(
                "its claims have {requests} requests in {ways} combinations of alternatives (firstAvailable); \
                 {POD_TRIES_MAX} are the most of both multiplied: name fewer"
            ));
        }
        combinations(&each).ok_or_else(|| {
            format!("its claims have more than {WAYS_MAX} combinations of alternatives (firstAvailable); name fewer")
        })
    }

    /// None: nothing of the pod is to be decided now.
    pub(in crate::controller) fn part(
        &mut self,
        uid: &PodUid,
        taken: &BTreeSet<ClaimKey>,
        now: Moment,
    ) -> Result<Option<Part>, Refused> {
        let barred = self.barred_nodes(uid);
        let Some(pod) = self.view.pod(uid) else { return Ok(None) };
        let Some(claims) = self.view.claims_of(pod) else { return Ok(None) };
        let open = |claim: &&&Claim| {
            claim.is_shares()
                && claim.allocation.is_none()
                && !self.tracker.is_decided(claim.key)
                && !taken.contains(&claim.key)
        };
        let open: Vec<&Claim> = claims.iter().filter(open).copied().collect();
        if open.is_empty() || open.iter().any(|claim| self.tracker.rests(claim.key, now)) {
            return Ok(None);
        }
        let bad = |words| Refused { pod: uid.clone(), reason: Reason::Claim, words };
        if let Some(words) = open.iter().find_map(|claim| self.purse.dear(claim.key)) {
            return Err(bad(words.to_owned()));
        }
        if let Some(GangSize::Unreadable { name, text }) = pod.gang().map(|gang| &gang.size) {
            return Err(bad(format!("{name}: {text:?} is no number of pods; write how many the gang has")));
        }
        // Where it is counted already, the pod needs no second place among the pods.
        let pods = if self.pods.has_place(uid) { 0 } else { pod.room.pods };
        let room = feasible::Resources { pods, ..pod.room };
        let way = |wants: Vec<Wants>| Ok(Way { shape: ask::shape(&wants, room)?, wants });
        let ways: Result<Vec<Way>, String> =
            self.ways(&open).and_then(|all| all.into_iter().map(way).collect());
        let ways = ways.map_err(bad)?;
        let wants: usize = ways.iter().map(|way| way.shape.wants.len()).sum();
        let nodes = self.nodes(pod, &claims, barred, now);
        let policy = open.iter().find_map(|claim| claim.policy.as_deref());
        let policy = match policy {
            None => self.usual_policy(&open),
            Some(name) => name.parse().map_err(|words| bad(format!("annotation {POLICY}: {words}")))?,
        };
        let claims = open.iter().map(|claim| claim.key).collect();
        self.capacity.index.pay(WANT_TICKS.saturating_mul(wants as u64));
        Ok(Some(Part { pod: uid.clone(), claims, ways, nodes, policy }))
    }

    /// Of claims that do not say how their GPUs are to be chosen: what the class says, else what we were started with.
    fn usual_policy(&self, claims: &[&Claim]) -> Policy {
        let classes = self.classes(claims.iter().copied());
        let mut said = classes.into_iter().filter_map(|(_, class)| class.policy.as_deref()?.parse().ok());
        said.next().unwrap_or(self.rules.policy)
    }

    /// The classes of claims.
    fn classes<'a>(&'a self, claims: impl Iterator<Item = &'a Claim>) -> Vec<(&'a str, &'a Class)> {
        let of = |claim: &'a Claim| match &claim.asks {
            Asks::Shares(spec) => self.view.classes().of(spec),
            Asks::Unreadable(_) | Asks::Scheduler(_) => Vec::new(),
        };
        claims.flat_map(of).collect()
    }

    /// Where a pod may go: where its other claims are, else wherever the scheduler would let it.
    pub(in crate::controller) fn nodes(
        &self,
        pod: &Pod,
        claims: &[&Claim],
        barred: Arc<BTreeSet<NodeName>>,
        now: Moment,
    ) -> Nodes {
        let placed = |claim: &&Claim| {
            let stored = claim.allocation.as_ref().and_then(|allocation| allocation.node.clone());
            stored.or_else(|| self.tracker.planned(claim.key).map(|planned| planned.node.clone()))
        };
        let bound: BTreeSet<NodeName> =
            pod.node.iter().cloned().chain(claims.iter().filter_map(placed)).collect();
        if !bound.is_empty() {
            // Two places at once are none.
            return Nodes::Only(if bound.len() == 1 { bound } else { BTreeSet::new() });
        }
        let for_now = self.queue.excluded(&pod.at.uid, now).into_iter().cloned().collect();
        Nodes::Except(vec![Arc::new(for_now), self.capacity.full(), barred])
    }

    /// Where a pod may go once others have left: what is full need not be full then. `nodes`: where it may go now.
    pub(super) fn nodes_then(&mut self, pod: &PodUid, nodes: &Nodes, now: Moment) -> Nodes {
        if let Nodes::Only(names) = nodes {
            return Nodes::Only(names.clone());
        }
        let barred = self.barred_nodes(pod);
        let out = self.queue.excluded(pod, now).into_iter().cloned().collect();
        Nodes::Except(vec![Arc::new(out), barred])
    }

    /// Where the pod cannot run, however empty it is.
    pub(super) fn barred_nodes(&mut self, pod: &PodUid) -> Arc<BTreeSet<NodeName>> {
        let demands = self.view.pod(pod).and_then(|pod| pod.demands.clone());
        demands.map(|demands| self.barred_for(&demands)).unwrap_or_default()
    }

    /// Where no pod with these demands can run.
    pub(super) fn barred_for(&mut self, demands: &Arc<Demands>) -> Arc<BTreeSet<NodeName>> {
        let object = |name: &NodeName| self.view.node(name)?.object.as_deref();
        let is_barred =
            |name: &NodeName| object(name).is_none_or(|node| self.view.keeps_off(demands, node).is_some());
        let mut nodes = 0;
        let all = self.capacity.index.nodes().map(|view| view.name()).inspect(|_| nodes += 1);
        let barred = self.node_filter.by(demands, all, is_barred);
        self.capacity.index.pay(TERM_TICKS.saturating_mul(demands.terms()).saturating_mul(nodes));
        barred
    }

    /// Why a pod cannot be put on a node, whatever its GPUs; none: it can.
    pub(in crate::controller) fn why_not(&self, pod: &Pod, node: &NodeName) -> Option<String> {
        let crowded = || (self.capacity.left(node).pods == 0).then(|| feasible::Unfit::Pods.to_string());
        self.barred(pod, node).or_else(crowded)
    }

    /// Why a pod cannot run on a node, however empty it is.
    pub(in crate::controller) fn barred(&self, pod: &Pod, node: &NodeName) -> Option<String> {
        let object = self.view.node(node).and_then(|state| state.object.as_deref());
        let Some(object): Option<&Node> = object else { return Some("is not there".to_owned()) };
        self.view.keeps_off(pod.demands.as_deref()?, object).map(|unfit| unfit.to_string())
    }

    pub(in crate::controller) fn explained(&self, part: &Part, explanation: &Explanation) -> Refused {
        let mut words = explanation.to_string();
        if let (Some(pod), true) = (self.view.pod(&part.pod), explanation.skipped.nodes_not_allowed > 0) {
            let mut names = self.capacity.index.nodes().map(|view| view.name());
            let first = names.find_map(|name| Some(format!("; node {name} {}", self.why_not(pod, name)?)));
            words.push_str(&first.unwrap_or_default());
        }
        if explanation.skipped.not_selected.is_some() || explanation.skipped.failed.is_some() {
            let claims = part.claims.iter().filter_map(|key| self.view.claim(*key));
            let with = self.classes(claims).into_iter().filter(|(_, class)| !class.selectors.is_empty());
            if let Some((name, _)) = with.into_iter().next() {
                words.push_str(&format!("; the selectors of DeviceClass {name} count, too"));
            }
        }
        let unshared = self.view.unshared_devices();
        if let (Shortage::Candidates { .. }, 1..) = (&explanation.shortage, unshared.all()) {
            words.push_str(&format!("; not shared, whatever the claim selects: {unshared}"));
        }
        if let (Shortage::Candidates { .. }, Some(left)) =
            (&explanation.shortage, explanation.skipped.not_selected.as_ref())
            && select::is_by_memory_capacity(&left.selector)
        {
            words.push_str(&format!("; {}", select::BY_TOTAL_MEMORY));
        }
        let reason = Reason::of(&explanation.shortage);
        Refused { pod: part.pod.clone(), reason, words }
    }

    pub(in crate::controller) fn given(
        &self,
        node: &NodeName,
        wants: &Wants,
        grants: &[Vec<allocate::GpuGrant>],
    ) -> Vec<Given> {
        let device = |grant: &allocate::GpuGrant| {
            let gpu = self.view.gpu(&GpuRef::new(node, &grant.device))?;
            Some(GrantedDevice {
                device: grant.device.clone(),
                gpu: gpu.grantable.gpu.clone(),
                memory: grant.memory,
                compute: grant.compute,
                slots: grant.slots,
                isolation: gpu.grantable.isolation(),
                extent: grant.extent,
            })
        };
        let given = wants.requests.iter().zip(grants).map(|(want, grants)| Given {
            request: want.request.clone(),
            devices: grants.iter().filter_map(device).collect(),
            tolerations: want.tolerations.as_written.to_vec(),
        });
        given.collect()
    }
}
