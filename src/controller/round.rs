//! One round: everything that waits, against everything that there is. What comes out is a plan of writes with
//! every choice made.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;

use super::core::Core;
use super::grant::Given;
use super::plan::{Next, Plan, PlannedClaim};
use super::queue::{Gathering, Turn, UnitKey};
use super::say::{Reason, gathering, short};
use super::wants::{WAYS_MAX, Wants, combinations, wants};
use super::world::claim::POLICY;
use super::world::pod::{GANG_SIZE, GangSize};
use super::world::{Asks, Claim, GpuRef, Pod};
use super::write::Write;
use super::{Moment, apart, ask};
use crate::allocate::{self, Decision, Explanation, Nodes, PodAsk, Policy, Shape};
use crate::feasible;
use crate::model::names::{ClaimUid, NodeName, PodUid, RequestName};
use crate::params::GrantedDevice;

/// What a round comes to.
#[derive(Debug, Default)]
pub struct Round {
    pub writes: Vec<Write>,
    /// When time alone will bring something.
    pub next: Option<Moment>,
    pub decided: usize,
    pub refused: usize,
}

/// A pod's part of a decision: its open claims and the ways to serve them.
pub(super) struct Part {
    pub(super) pod: PodUid,
    claims: Vec<ClaimUid>,
    /// Best first; at least one.
    ways: Vec<Way>,
    pub(super) nodes: Nodes,
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

    /// A claim of it wants several GPUs, in one of the ways.
    pub(super) fn is_several(&self) -> bool {
        self.ways.iter().any(|way| ask::is_several(&way.shape))
    }

    /// What each way asks for, with claim and name of the request of each of its wants.
    pub(super) fn shapes(&self) -> impl Iterator<Item = (&Shape, Vec<(&ClaimUid, &RequestName)>)> {
        self.ways.iter().map(|way| {
            let mut requests = Vec::new();
            for (claim, wants) in self.claims.iter().zip(&way.wants) {
                requests.extend(wants.requests.iter().map(|want| (claim, &want.request)));
            }
            (&way.shape, requests)
        })
    }

    pub(super) fn claims(&self) -> &[ClaimUid] {
        &self.claims
    }

    pub(super) fn refused(&self, reason: Reason, words: String) -> Refused {
        Refused { pod: self.pod.clone(), reason, words }
    }

    /// As the allocator is asked for the last of the ways.
    pub(super) fn into_last_ask(mut self) -> PodAsk {
        let shape = self.ways.pop().map(|way| way.shape).unwrap_or_default();
        PodAsk { shape, nodes: self.nodes }
    }
}

/// Why a unit is not placed.
pub(super) struct Refused {
    pod: PodUid,
    pub(super) reason: Reason,
    pub(super) words: String,
}

impl Core {
    /// `ids`: a fresh UUID at each call, for shares.
    pub fn round(&mut self, now: Moment, ids: &mut dyn FnMut() -> String) -> Round {
        let mut round = Round::default();
        if !self.world.is_complete() {
            return round;
        }
        self.start(now);
        self.regard(now);
        self.live(now);
        if self.queue.expire(now) {
            self.stock.news();
        }
        self.decide(now, &mut round);
        let epoch = self.stock.epoch();
        self.make_way(now);
        self.keep(now, &mut round);
        self.send(now, &mut round, ids);
        self.regard(now);
        // What this round has set free is for the next.
        let more = self.stock.epoch() != epoch && !self.queue.is_empty();
        let again = (more || self.queue.has_left() || self.stock.index.spent().1).then_some(now);
        let due = [
            again,
            self.holds.next(now),
            self.queue.next(now),
            self.says.next(now),
            self.reserves.next(now),
            self.next_of_life(now),
        ];
        round.next = due.into_iter().flatten().min();
        round
    }

    // Decisions.

    fn decide(&mut self, now: Moment, round: &mut Round) {
        for uid in self.says.due(now) {
            self.queue.again(&uid);
            self.tell_unpromised(&uid, now);
        }
        for one in self.queue.gathering(|key| self.placed(key)) {
            self.tell_gathering(&one, now);
        }
        let mut waiting: Vec<UnitKey> = Vec::new();
        let turns = self.queue.turns(now, |key| self.placed(key));
        let mut keeping = self.begin_keeping(&turns, now);
        self.open_purse(&turns);
        for turn in turns {
            let epoch = self.stock.epoch();
            if turn.tried != Some(epoch) && self.may_try(&turn) {
                let placed = self.place_beside(&turn, now);
                self.pay(&turn);
                match placed {
                    Ok(true) => {
                        round.decided += 1;
                        self.no_longer_kept(&turn.key, now);
                        // Those before it have its priority, or a higher one.
                        waiting.iter().for_each(|key| self.queue.passed(key));
                        continue;
                    }
                    // It waits for something else than a decision.
                    Ok(false) => continue,
                    Err(refused) => {
                        round.refused += 1;
                        self.tell(&turn.pods, &refused, now);
                        self.queue.tried(&turn.key, epoch);
                    }
                }
            }
            if turn.starving {
                self.keep_for(&turn, &mut keeping, now);
            }
            waiting.push(turn.key);
        }
        self.close_purse();
        self.stock.lift_all();
    }

    /// True if the unit was placed, false if there is nothing to decide now.
    pub(super) fn place(&mut self, turn: &Turn, now: Moment) -> Result<bool, Refused> {
        let mut parts: Vec<Part> = Vec::new();
        for pod in &turn.pods {
            match self.part(pod, &parts, now)? {
                Some(part) => parts.push(part),
                None if matches!(turn.key, UnitKey::Gang { .. }) => {}
                None => return Ok(false),
            }
        }
        if parts.is_empty() {
            return Ok(false);
        }
        for part in &parts {
            if !self.study(part)? {
                self.queue.leave(&turn.key, true);
                return Ok(false);
            }
        }
        let (nth, decision) = self.first_way(&parts)?;
        let mut plan = Plan { pods: BTreeMap::new(), claims: BTreeMap::new(), since: turn.since };
        for (part, placement) in parts.iter().zip(&decision.placements) {
            let node = &placement.node;
            plan.pods.insert(part.pod.clone(), node.clone());
            let wants = &part.way(nth).wants;
            let given = ask::parts(wants, placement);
            for ((claim, wants), given) in part.claims.iter().zip(wants).zip(given) {
                let given = self.given(node, wants, &given);
                let planned = PlannedClaim {
                    node: node.clone(),
                    given,
                    next: Next::From(now),
                    lost: false,
                    done: false,
                };
                plan.claims.insert(claim.clone(), planned);
            }
        }
        parts.iter().for_each(|part| self.stock.index.seen(&part.way(nth).shape));
        self.adopt(turn.key.clone(), plan, now);
        Ok(true)
    }

    /// The first of the ways in which all of the parts can be served, and how.
    pub(super) fn first_way(&mut self, parts: &[Part]) -> Result<(usize, Decision), Refused> {
        let ways = parts.iter().map(|part| part.ways.len()).max().unwrap_or(1);
        let policy = parts[0].policy;
        let mut nth = 0;
        loop {
            let ask = |part: &Part| PodAsk { shape: part.way(nth).shape.clone(), nodes: part.nodes.clone() };
            let asks: Vec<PodAsk> = parts.iter().map(ask).collect();
            let decision = match asks.iter().any(|ask| ask::is_several(&ask.shape)) {
                false => allocate::decide(&mut self.stock.index, &asks, policy),
                true => apart::decide(&mut self.stock, &asks, policy),
            };
            nth += 1;
            match decision {
                Ok(decision) => return Ok((nth - 1, decision)),
                Err(_) if nth < ways => {}
                Err(explanation) => {
                    let mut refused = self.explained(&parts[0], &explanation);
                    if ways > 1 {
                        refused.words =
                            format!("none of {ways} alternatives fits; the last {}", refused.words);
                    }
                    return Err(refused);
                }
            }
        }
    }

    /// The ways to serve claims of a pod together, best first, the last claim's changing first.
    fn ways(&self, open: &[&Claim]) -> Result<Vec<Vec<Wants>>, String> {
        let mut each = Vec::new();
        for claim in open {
            match &claim.asks {
                Asks::Unreadable(words) if claim.is_new() => return Err(words.clone()),
                Asks::Unreadable(words) => return Err(format!("claim {}: {words}", claim.at.claim.name)),
                Asks::Shares(spec) => {
                    let ways = wants(spec, &self.world.class.config);
                    each.push(ways.map_err(|words| format!("claim {}: {words}", claim.at.claim.name))?);
                }
                Asks::Scheduler(_) => {}
            }
        }
        combinations(&each).ok_or_else(|| {
            format!("its claims have more than {WAYS_MAX} combinations of alternatives (firstAvailable); name fewer")
        })
    }

    /// None: nothing of the pod is to be decided now.
    pub(super) fn part(
        &mut self,
        uid: &PodUid,
        before: &[Part],
        now: Moment,
    ) -> Result<Option<Part>, Refused> {
        let barred = self.barred_nodes(uid);
        let Some(pod) = self.world.pods.get(uid) else { return Ok(None) };
        let Some(claims) = self.world.claims_of(pod) else { return Ok(None) };
        let taken = |claim: &Claim| before.iter().any(|part| part.claims.contains(claim.uid()));
        let open = |claim: &&&Claim| {
            claim.is_shares() && claim.allocation.is_none() && !self.is_decided(claim.uid()) && !taken(claim)
        };
        let open: Vec<&Claim> = claims.iter().filter(open).copied().collect();
        let rests = |claim: &&Claim| self.not_before.get(claim.uid()).is_some_and(|until| now < *until);
        if open.is_empty() || open.iter().any(rests) {
            return Ok(None);
        }
        let bad = |words| Refused { pod: uid.clone(), reason: Reason::Claim, words };
        if let Some(words) = open.iter().find_map(|claim| self.purse.dear.get(claim.uid())) {
            return Err(bad(words.clone()));
        }
        if let Some(GangSize::Unreadable(text)) = pod.gang.as_ref().map(|gang| &gang.size) {
            return Err(bad(format!(
                "{GANG_SIZE}: {text:?} is no number of pods; write how many the gang has"
            )));
        }
        // Where it is counted already, the pod needs no second place among the pods.
        let pods = if self.assigned.contains_key(uid) { 0 } else { pod.room.pods };
        let room = feasible::Room { pods, ..pod.room };
        let way = |wants: Vec<Wants>| Ok(Way { shape: ask::shape(&wants, room)?, wants });
        let ways: Result<Vec<Way>, String> =
            self.ways(&open).and_then(|all| all.into_iter().map(way).collect());
        let ways = ways.map_err(bad)?;
        let nodes = self.nodes(pod, &claims, barred, now);
        let policy = open.iter().find_map(|claim| claim.policy.as_deref());
        let policy = match policy {
            None => self.usual_policy(),
            Some(name) => name.parse().map_err(|words| bad(format!("annotation {POLICY}: {words}")))?,
        };
        let claims = open.iter().map(|claim| claim.uid().clone()).collect();
        Ok(Some(Part { pod: uid.clone(), claims, ways, nodes, policy }))
    }

    /// Of claims that do not say how their GPUs are to be chosen: what the class says, else what we were started with.
    fn usual_policy(&self) -> Policy {
        let said = self.world.class.policy.as_deref().and_then(|name| name.parse().ok());
        said.unwrap_or(self.rules.policy)
    }

    /// Where a pod may go: where its other claims are, else wherever the scheduler would let it.
    fn nodes(&self, pod: &Pod, claims: &[&Claim], barred: Arc<BTreeSet<NodeName>>, now: Moment) -> Nodes {
        let placed = |claim: &&Claim| {
            let stored = claim.allocation.as_ref().and_then(|allocation| allocation.node.clone());
            stored.or_else(|| self.plans.of(claim.uid()).map(|planned| planned.node.clone()))
        };
        let bound: BTreeSet<NodeName> =
            pod.node.iter().cloned().chain(claims.iter().filter_map(placed)).collect();
        if !bound.is_empty() {
            // Two places at once are none.
            return Nodes::Only(if bound.len() == 1 { bound } else { BTreeSet::new() });
        }
        let for_now = self.queue.excluded(&pod.at.uid, now).into_iter().cloned().collect();
        Nodes::Except(vec![Arc::new(for_now), self.stock.full(), barred])
    }

    /// Where the pod cannot run, however empty it is.
    pub(super) fn barred_nodes(&mut self, pod: &PodUid) -> Arc<BTreeSet<NodeName>> {
        let demands = self.world.pods.get(pod).and_then(|pod| pod.demands.as_ref());
        let Some(demands) = demands else { return Arc::default() };
        let object = |name: &NodeName| self.world.nodes.get(name)?.object.as_deref();
        let is_barred =
            |name: &NodeName| object(name).is_none_or(|node| feasible::why_not(demands, node).is_some());
        let all = self.stock.index.nodes().map(|view| view.name());
        self.kept_off.by(demands, all, is_barred)
    }

    /// Why a pod cannot be put on a node, whatever its GPUs; none: it can.
    pub(super) fn why_not(&self, pod: &Pod, node: &NodeName) -> Option<String> {
        let crowded = || (self.stock.left(node).pods == 0).then(|| feasible::Unfit::Pods.to_string());
        self.barred(pod, node).or_else(crowded)
    }

    /// Why a pod cannot run on a node, however empty it is.
    pub(super) fn barred(&self, pod: &Pod, node: &NodeName) -> Option<String> {
        let object = self.world.nodes.get(node).and_then(|state| state.object.as_deref());
        let Some(object): Option<&Node> = object else { return Some("is not there".to_owned()) };
        feasible::why_not(pod.demands.as_deref()?, object).map(|unfit| unfit.to_string())
    }

    fn explained(&self, part: &Part, explanation: &Explanation) -> Refused {
        let mut words = explanation.to_string();
        if let (Some(pod), true) = (self.world.pods.get(&part.pod), explanation.skipped.nodes_not_allowed > 0)
        {
            let mut names = self.stock.index.nodes().map(|view| view.name());
            let first = names.find_map(|name| Some(format!("; node {name} {}", self.why_not(pod, name)?)));
            words.push_str(&first.unwrap_or_default());
        }
        let reason = Reason::of(&explanation.shortage);
        Refused { pod: part.pod.clone(), reason, words }
    }

    fn given(&self, node: &NodeName, wants: &Wants, grants: &[Vec<allocate::GpuGrant>]) -> Vec<Given> {
        let device = |grant: &allocate::GpuGrant| {
            let gpu = self.world.gpu(&GpuRef::new(node, &grant.device))?;
            Some(GrantedDevice {
                device: grant.device.clone(),
                gpu: gpu.grantable.gpu.clone(),
                memory: grant.memory,
                compute: grant.compute,
                slots: grant.slots,
                isolation: gpu.grantable.isolation,
            })
        };
        let given = wants.requests.iter().zip(grants).map(|(want, grants)| Given {
            request: want.request.clone(),
            devices: grants.iter().filter_map(device).collect(),
            tolerations: want.tolerations.clone(),
        });
        given.collect()
    }

    /// Where its shares are, once they stand in the API.
    pub(super) fn tell_placed(&mut self, plan: &Plan) {
        for (uid, node) in &plan.pods {
            let Some(pod) = self.world.pods.get(uid) else { continue };
            let claims = self.world.claims_of(pod).into_iter().flatten();
            let planned = claims.filter_map(|claim| plan.claims.get(claim.uid()));
            let devices = planned.flat_map(|claim| &claim.given).flat_map(|given| &given.devices);
            let words: Vec<String> = devices
                .map(|device| format!("{} MiB of {}", device.memory.mib_floor(), device.device))
                .collect();
            self.says.placed(pod, format!("{} on node {node}", words.join(", ")));
        }
    }

    /// Why the webhook's annotation comes to nothing, if the pod has it and it does.
    pub(super) fn tell_unpromised(&mut self, uid: &PodUid, now: Moment) {
        let Some(pod) = self.world.pods.get(uid) else { return };
        if let Some(words) = self.world.not_promised(pod) {
            self.says.waiting(pod, Reason::Claim, &words, now);
        }
    }

    /// Tells the pods of a gang that not all of it is there.
    fn tell_gathering(&mut self, one: &Gathering, now: Moment) {
        let Gathering { name, pods, there, size } = one;
        let words = gathering(name, *there, &size.to_string());
        for uid in pods {
            let refused = Refused { pod: uid.clone(), reason: Reason::Gang, words: words.clone() };
            self.tell(std::slice::from_ref(uid), &refused, now);
        }
    }

    /// Tells all pods of a unit, each once: they wait together, whichever of them could not be placed.
    fn tell(&mut self, pods: &[PodUid], refused: &Refused, now: Moment) {
        let name = self.world.pods.get(&refused.pod).map(|pod| pod.at.name.as_str()).unwrap_or_default();
        let together = format!("it is placed together with pod {name}: {}", refused.words);
        for uid in pods {
            let words = if *uid == refused.pod { &refused.words } else { &together };
            let Some(pod) = self.world.pods.get(uid) else { continue };
            if !self.says.waiting(pod, refused.reason, words, now) {
                continue;
            }
            for claim in self.world.claims_of(pod).into_iter().flatten() {
                let open =
                    claim.is_shares() && claim.allocation.is_none() && !claim.ending && !claim.is_new();
                let text = short(words);
                if open && claim.waiting.as_ref() != Some(&text) {
                    self.says.about(claim, words);
                    self.to_mark.insert(claim.uid().clone(), text);
                }
            }
        }
    }
}
