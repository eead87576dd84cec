//! Where a unit goes: its pods' open claims, in each way to serve them, against what GPUs and nodes have left.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::allocate::{self, Explanation, Index, Nodes, Placement, PodAsk, Policy, Shape, Shortage};
use crate::controller::classes::{OurClass, POLICY};
use crate::controller::core::Core;
use crate::controller::grant::RequestGrant;
use crate::controller::node_filter::NodeFilterCache;
use crate::controller::pods::Pods;
use crate::controller::queue::{Together, Turn, UnitKey};
use crate::controller::recorder::Reason;
use crate::controller::tracker::{Plan, PlannedClaim};
use crate::controller::view::groups::GangSize;
use crate::controller::view::unshared::SelectorLists;
use crate::controller::view::{Asks, Claim, ClusterView, GpuRef, Pod};
use crate::controller::wants::{Size, UNIT_TRIES_MAX, WAYS_MAX, Wants, combinations, wants, ways_of};
use crate::controller::{Moment, ask};
use crate::feasible::{self, Demands, Node, Unfit};
use crate::model::claim::ClaimKey;
use crate::model::names::{NodeName, PodUid, RequestName};
use crate::params::GrantedDevice;
use crate::select;

mod apart;
mod shunned;
mod trial;

const TOO_MANY_DEMANDS: &str = "the pods of its gang have too many different node affinities and selectors to be looked \
                                at together; give them the same, or make several gangs";

/// Of asking a node whether it meets one of a pod's demands, in ticks of [`crate::select::TICKS_PER_UNIT`].
const TERM_TICKS: u64 = 10;
/// Of keeping the name of a node that a single pod may not go to, in the same.
pub(super) const KEPT_TICKS: u64 = 100;

/// Of looking up a claim that a pod names, in the same.
const LOOK_UP_TICKS: u64 = 5;

type NodeSet = Arc<BTreeSet<NodeName>>;

/// A pod's part of a decision: its open claims and the ways to serve them.
#[derive(Clone)]
pub(in crate::controller) struct PodPart {
    pub(in crate::controller) pod: PodUid,
    claims: Vec<ClaimKey>,
    /// Best first; at least one.
    ways: Vec<Way>,
    pub(in crate::controller) nodes: Nodes,
    /// Of the nodes that are left out those that other pods keep it off.
    apart: Vec<NodeSet>,
    policy: Policy,
}

/// What each claim asks for, of all alternatives one.
#[derive(Clone)]
struct Way {
    wants: Vec<Wants>,
    shape: Shape,
}

impl PodPart {
    /// Pods of a gang have the same template: they take the same alternative.
    fn way(&self, nth: usize) -> &Way {
        &self.ways[nth.min(self.ways.len() - 1)]
    }

    pub(super) fn ways(&self) -> usize {
        self.ways.len()
    }

    /// The same part, kept off these nodes as well.
    pub(super) fn kept_off(&self, nodes: &NodeSet) -> Self {
        let nodes = self.nodes_beside(self.apart.iter().chain([nodes]).cloned().collect());
        Self { nodes, ..self.clone() }
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
        Refused::new(self.pod.clone(), reason, words)
    }

    /// As the allocator is asked for the last of the ways.
    pub(in crate::controller) fn into_last_ask(mut self) -> PodAsk {
        let shape = self.ways.pop().map(|way| way.shape).unwrap_or_default();
        PodAsk { shape, nodes: self.nodes }
    }
}

/// Those of the parts that stand at these places, which are in order.
pub(super) fn those(parts: Vec<PodPart>, places: &[usize]) -> Vec<PodPart> {
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

/// Why claims of a pod cannot be read together.
struct BadClaims {
    words: String,
    /// The claim that nobody can place, whatever others there are.
    of: Option<ClaimKey>,
}

/// Why a unit is not placed.
#[derive(Debug, Clone)]
pub(in crate::controller) struct Refused {
    pub(in crate::controller) pod: PodUid,
    pub(in crate::controller) reason: Reason,
    pub(in crate::controller) words: String,
    /// Another GPU may do, such as one on a node that comes last.
    pub(in crate::controller) may_fit_elsewhere: bool,
}

impl Refused {
    pub(in crate::controller) fn new(pod: PodUid, reason: Reason, words: String) -> Self {
        Self { pod, reason, words, may_fit_elsewhere: reason.is_for_room() }
    }
}

impl Core {
    /// The unit's parts go to these places, each in this of its ways.
    pub(super) fn adopt_places(
        &mut self,
        turn: &Turn,
        parts: &[PodPart],
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
    fn ready_parts(&mut self, turn: &Turn, now: Moment) -> Result<Option<Vec<PodPart>>, Refused> {
        let (mut parts, mut first): (Vec<PodPart>, Option<Refused>) = (Vec::new(), None);
        let (mut taken, mut tries) = (BTreeSet::new(), 0);
        for (nth, pod) in turn.pods.iter().enumerate() {
            // One is read, whatever it costs.
            if nth > 0 && !self.capacity.index.has_left() && !self.is_judged(pod) {
                return self.read_no_further(turn, pod);
            }
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
            let has_left = self.capacity.index.has_left();
            match self.study(&part) {
                Ok(true) => {
                    taken.extend(part.claims.iter().copied());
                    parts.push(part);
                }
                // To read what it asks for has taken all: its selectors were not looked at.
                Ok(false) if !has_left => return self.read_no_further(turn, pod),
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

    /// What the unit may spend was not enough to read what its pods ask for, up to this one: it has more the next time.
    ///
    /// # Errors
    /// There is no more to have.
    fn read_no_further<T>(&mut self, turn: &Turn, pod: &PodUid) -> Result<Option<T>, Refused> {
        let epoch = self.capacity.epoch();
        if self.purse.trials().stop_reading(turn.into(), epoch) {
            self.queue.leave(&turn.key, true);
            return Ok(None);
        }
        // What keeps them off the zones where they were refused costs as well. It counts no more.
        if self.queue.refusals.reopen_zones(&turn.pods) {
            self.queue.leave(&turn.key, true);
            return Ok(None);
        }
        Err(Refused::new(pod.clone(), Reason::Claim, TOO_MANY_DEMANDS.to_owned()))
    }

    /// The ways to serve claims of a pod together, best first, the last claim's changing first.
    pub(in crate::controller) fn ways(&self, open: &[&Claim]) -> Result<Vec<Vec<Wants>>, String> {
        self.read_ways(open).0.map_err(|bad| bad.words)
    }

    /// The same, and what it cost to read, in ticks.
    fn read_ways(&self, open: &[&Claim]) -> (Result<Vec<Vec<Wants>>, BadClaims>, u64) {
        let spec = |claim: &&'_ Claim| match &claim.asks {
            Asks::Shares(spec) => Some(Arc::clone(spec)),
            Asks::Unreadable(_) | Asks::Scheduler(_) => None,
        };
        let specs: Vec<_> = open.iter().filter_map(spec).collect();
        let size = Size::of(specs.iter().map(Arc::as_ref));
        // One with too many alternatives by itself has words of its own.
        let alone = specs.iter().any(|spec| ways_of(spec) > WAYS_MAX);
        let ways = if alone { 0 } else { size.ways };
        if let Err(words) = (Size { ways, ..size }).check() {
            return (Err(BadClaims { words, of: None }), size.counted);
        }
        let mut each = Vec::new();
        for claim in open {
            match &claim.asks {
                Asks::Unreadable(words) => {
                    let words = match claim.is_planned() {
                        true => words.clone(),
                        false => format!("claim {}: {words}", claim.name()),
                    };
                    return (Err(BadClaims { words, of: None }), size.counted + size.read);
                }
                Asks::Shares(spec) => match wants(spec, self.view.classes()) {
                    Ok(ways) => each.push(ways),
                    Err(words) => {
                        let words = format!("claim {}: {words}", claim.name());
                        // What a promise says may change.
                        let of = (!claim.is_planned()).then_some(claim.key);
                        return (Err(BadClaims { words, of }), size.counted + size.read);
                    }
                },
                Asks::Scheduler(_) => {}
            }
        }
        let ways = combinations(&each).ok_or_else(|| BadClaims {
            words: format!("its claims have more than {WAYS_MAX} combinations of alternatives; name fewer"),
            of: None,
        });
        (ways, size.counted + size.read)
    }

    /// None: nothing of the pod is to be decided now.
    pub(in crate::controller) fn part(
        &mut self,
        uid: &PodUid,
        taken: &BTreeSet<ClaimKey>,
        now: Moment,
    ) -> Result<Option<PodPart>, Refused> {
        let Some(pod) = self.view.pod(uid) else { return Ok(None) };
        self.capacity.index.pay(LOOK_UP_TICKS * pod.requested.claims.len() as u64);
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
        let bad = |words| Refused::new(uid.clone(), Reason::Claim, words);
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
        let (ways, ticks) = self.read_ways(&open);
        self.capacity.index.pay(ticks);
        if let Err(BadClaims { words, of: Some(claim) }) = &ways {
            self.purse.set_dear(*claim, words.clone());
        }
        let ways = ways.map_err(|claims| bad(claims.words))?;
        let ways: Result<Vec<Way>, String> = ways.into_iter().map(way).collect();
        let ways = ways.map_err(bad)?;
        let policy = open.iter().find_map(|claim| claim.policy.as_deref());
        let policy = match policy {
            None => self.usual_policy(&open),
            Some(name) => name.parse().map_err(|words| bad(format!("annotation {POLICY}: {words}")))?,
        };
        let barred = pod
            .demands
            .as_ref()
            .map(|demands| barred_for(demands, &self.view, &mut self.capacity.index, &mut self.node_filter));
        let without = ports_taken(uid, &self.view, &mut self.pods, &mut self.capacity.index);
        let learns = !self.queue.refusals.siblings.is_empty();
        let owner = if learns { self.owner_key(uid) } else { None };
        let zones = shunned::nodes(uid, owner.as_ref(), &self.view, &self.queue, &mut self.capacity.index);
        let ruled = apart::ruled(uid, &self.view, &mut self.pods, &mut self.capacity.index);
        let apart = apart::sets(&ruled, &mut self.capacity.index);
        let shut = [barred.unwrap_or_default(), without, zones].into_iter().chain(apart.iter().cloned());
        let nodes = self.nodes(pod, &claims, shut, now);
        let claims = open.iter().map(|claim| claim.key).collect();
        Ok(Some(PodPart { pod: uid.clone(), claims, ways, nodes, apart, policy }))
    }

    /// Of claims that do not say how their GPUs are to be chosen: what the class says, else what we were started with.
    fn usual_policy(&self, claims: &[&Claim]) -> Policy {
        let classes = self.classes(claims.iter().copied());
        let mut said = classes.into_iter().filter_map(|(_, class)| class.policy.as_deref()?.parse().ok());
        said.next().unwrap_or(self.rules.policy)
    }

    /// The classes of claims.
    fn classes<'a>(&'a self, claims: impl Iterator<Item = &'a Claim>) -> Vec<(&'a str, &'a OurClass)> {
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
        shut: impl Iterator<Item = NodeSet>,
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
        let for_now = self.queue.refusals.excluded(&pod.at.uid, now).into_iter().cloned().collect();
        let closed = [Arc::new(for_now), self.capacity.full()].into_iter().chain(shut);
        Nodes::Except(closed.filter(|nodes| !nodes.is_empty()).collect())
    }

    /// Where a pod may go once others have left: what is full need not be full then. Ports that are taken are left to who
    /// has them, and who keeps it off a node does so as if nobody had left. `nodes`: where it may go now.
    pub(super) fn nodes_then(&mut self, pod: &PodUid, nodes: &Nodes, now: Moment) -> Nodes {
        if let Nodes::Only(names) = nodes {
            return Nodes::Only(names.clone());
        }
        let barred = self.barred_nodes(pod);
        let without = self.ports_taken(pod);
        let apart = self.kept_off(pod);
        let out = self.queue.refusals.excluded(pod, now).into_iter().cloned().collect();
        Nodes::Except([Arc::new(out), barred, without].into_iter().chain(apart).collect())
    }

    /// Where others have a port that the pod takes of its node.
    pub(super) fn ports_taken(&mut self, pod: &PodUid) -> Arc<BTreeSet<NodeName>> {
        ports_taken(pod, &self.view, &mut self.pods, &mut self.capacity.index)
    }

    /// Where the pod cannot run, however empty it is.
    pub(super) fn barred_nodes(&mut self, pod: &PodUid) -> Arc<BTreeSet<NodeName>> {
        let demands = self.view.pod(pod).and_then(|pod| pod.demands.clone());
        demands.map(|demands| self.barred_for(&demands)).unwrap_or_default()
    }

    /// Which nodes the pod is kept off is known: it takes no ports, requires nothing of other pods, and no zones are left for
    /// last, which is looked up for each pod.
    pub(super) fn is_judged(&self, pod: &PodUid) -> bool {
        let is_looked_up = self.view.ports_of(pod).is_some() || self.view.terms_of(pod).is_some();
        if is_looked_up || !self.queue.refusals.excluded_zones(pod).is_empty() {
            return false;
        }
        let demands = self.view.pod(pod).and_then(|pod| pod.demands.as_ref());
        demands.is_none_or(|demands| self.node_filter.knows(demands))
    }

    /// Where no pod with these demands can run.
    pub(super) fn barred_for(&mut self, demands: &Arc<Demands>) -> Arc<BTreeSet<NodeName>> {
        barred_for(demands, &self.view, &mut self.capacity.index, &mut self.node_filter)
    }

    /// Why a pod cannot be put on a node, whatever its GPUs; none: it can.
    pub(in crate::controller) fn why_not(&self, pod: &Pod, node: &NodeName) -> Option<String> {
        let crowded = || (self.capacity.left(node).pods == 0).then(|| feasible::Unfit::Pods.to_string());
        let port = || self.port_taken(pod, node).map(|unfit| unfit.to_string());
        self.barred(pod, node).or_else(port).or_else(crowded)
    }

    /// A port that the pod takes of its node, and that another has on this one.
    pub(in crate::controller) fn port_taken(&self, pod: &Pod, node: &NodeName) -> Option<Unfit> {
        let ports = self.view.ports_of(&pod.at.uid)?;
        let taken = self.pods.ports.taken(node, ports, &pod.at.uid)?;
        Some(Unfit::Port { port: taken.port, protocol: taken.protocol.as_str() })
    }

    /// Why a pod cannot run on a node, however empty it is.
    pub(in crate::controller) fn barred(&self, pod: &Pod, node: &NodeName) -> Option<String> {
        let object = self.view.node(node).and_then(|state| state.object.as_deref());
        let Some(object): Option<&Node> = object else { return Some("is not there".to_owned()) };
        self.view.keeps_off(pod.demands.as_deref()?, object).map(|unfit| unfit.to_string())
    }

    pub(in crate::controller) fn explained(&mut self, part: &PodPart, explanation: &Explanation) -> Refused {
        let mut words = explanation.to_string();
        let ruled = self.ruled(&part.pod);
        if let (Some(pod), true) = (self.view.pod(&part.pod), explanation.skipped.nodes.not_allowed > 0) {
            let mut names = self.capacity.index.nodes().map(|view| view.name());
            let why =
                |name| self.why_not(pod, name).or_else(|| Some(self.why_apart(&ruled, name)?.to_string()));
            let first = names.find_map(|name| Some(format!("; node {name} {}", why(name)?)));
            words.push_str(&first.unwrap_or_default());
        }
        if explanation.skipped.gpus.not_selected.is_some() || explanation.skipped.gpus.failed.is_some() {
            let claims = part.claims.iter().filter_map(|key| self.view.claim(*key));
            let with = self.classes(claims).into_iter().filter(|(_, class)| !class.selectors.is_empty());
            if let Some((name, _)) = with.into_iter().next() {
                words.push_str(&format!("; the selectors of DeviceClass {name} count, too"));
            }
        }
        if let Shortage::Candidates { .. } = &explanation.shortage {
            words.push_str(&self.not_shared(part).unwrap_or_default());
        }
        if let (Shortage::Candidates { .. }, Some(left)) =
            (&explanation.shortage, explanation.skipped.gpus.not_selected.as_ref())
            && select::is_by_memory_capacity(&left.selector)
        {
            words.push_str(&format!("; {}", select::BY_TOTAL_MEMORY));
        }
        let reason = Reason::of(&explanation.shortage);
        Refused::new(part.pod.clone(), reason, words)
    }

    /// Words for the devices that the part's selectors choose and that no shares can be placed on, in its last way. None:
    /// there are none, or to look costs too much.
    fn not_shared(&mut self, part: &PodPart) -> Option<String> {
        let wants = &part.shape(part.ways().saturating_sub(1)).wants;
        let lists: SelectorLists = wants.iter().map(|want| Arc::clone(&want.selectors)).collect();
        let (found, ticks) = self.view.unshared_devices(&lists);
        self.capacity.index.pay(ticks);
        let found = found.filter(|found| !found.is_none())?;
        let selected = if lists.iter().all(|list| list.is_empty()) { "" } else { ", though selectors match" };
        Some(format!("; not shared{selected}: {found}"))
    }

    pub(in crate::controller) fn given(
        &self,
        node: &NodeName,
        wants: &Wants,
        grants: &[Vec<allocate::GpuGrant>],
    ) -> Vec<RequestGrant> {
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
        let given = wants.requests.iter().zip(grants).map(|(want, grants)| RequestGrant {
            request: want.request.clone(),
            devices: grants.iter().filter_map(device).collect(),
            tolerations: want.tolerations.as_written.to_vec(),
        });
        given.collect()
    }
}

/// Where no pod with these demands can run. To ask a node is paid for, once for all pods with the same demands.
fn barred_for(
    demands: &Arc<Demands>,
    view: &ClusterView,
    index: &mut Index,
    filter: &mut NodeFilterCache,
) -> Arc<BTreeSet<NodeName>> {
    let object = |name: &NodeName| view.node(name)?.object.as_deref();
    let is_barred = |name: &NodeName| object(name).is_none_or(|node| view.keeps_off(demands, node).is_some());
    let mut nodes = 0;
    let all = index.nodes().map(|node| node.name()).inspect(|_| nodes += 1);
    let barred = filter.by(demands, all, is_barred);
    index.pay(TERM_TICKS.saturating_mul(demands.terms()).saturating_mul(nodes));
    barred
}

/// Where others than the pod have a port that it takes of its node.
fn ports_taken(
    pod: &PodUid,
    view: &ClusterView,
    pods: &mut Pods,
    index: &mut Index,
) -> Arc<BTreeSet<NodeName>> {
    let Some(ports) = view.ports_of(pod) else { return Arc::default() };
    let (nodes, looked) = pods.ports.nodes_without(ports, pod);
    index.pay(TERM_TICKS.saturating_mul(looked));
    // Found for it alone.
    if looked > 1 {
        index.pay(KEPT_TICKS.saturating_mul(nodes.len() as u64));
    }
    nodes
}
