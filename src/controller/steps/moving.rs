//! Room that moves would make: what was found is told, what has begun is kept for, and where the controller is told to,
//! pods are moved.

mod ground;
mod words;

pub use words::{amount_of, spot, suggestion};

use std::collections::{BTreeMap, BTreeSet};

use crate::allocate::moves::{Mover, MovesFound, SEARCH_TICKS, WaitingUnit, search};
use crate::allocate::{Nodes, Placement, PodAsk};
use crate::controller::bounds::Amounts;
use crate::controller::config::Mode;
use crate::controller::core::Core;
use crate::controller::moves::{Move, Proposed};
use crate::controller::queue::{Turn, UnitKey};
use crate::controller::steps::bounded::of_places;
use crate::controller::steps::place::{PodPart, Refused};
use crate::controller::tracker::as_grant;
use crate::controller::view::movable::{OwnerKey, OwnerKind};
use crate::controller::view::{BudgetGuard, Claim, Pod, Use};
use crate::controller::write::{Round, Write};
use crate::controller::{Moment, ask};
use crate::model::claim::ClaimKey;
use crate::model::names::PodUid;
use crate::model::share::Extent;
use ground::{Ground, Who};

/// Whose pods are looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MoverFilter {
    /// Of all that somebody makes anew.
    Any,
    /// Of those that are marked, and whose owner does not rest.
    Marked,
}

/// What a search for moves came to.
#[derive(Debug, Clone, PartialEq)]
pub enum MoveSearch {
    Found(Proposed),
    Nothing,
    /// It cost more than it may.
    Spent,
}

impl Core {
    /// Before the units of a round have their turns.
    pub(in crate::controller) fn begin_moving(&mut self, now: Moment) {
        let queue = &self.queue;
        let over = self.reserves.evictions.moves.tidy(|key| queue.has(key), &self.rules.consolidation, now);
        let view = &self.view;
        let ends = |uid: &PodUid| view.pod(uid).is_none_or(|pod| pod.ending);
        let preempted = self.preempted();
        let begun = self.reserves.evictions.moves.notice(ends, &preempted, now);
        if over || begun {
            self.capacity.news();
        }
    }

    /// Sets aside what moves keep from a unit; how many places, to be lifted again.
    pub(in crate::controller) fn set_moves_aside(&mut self, turn: &Turn) -> usize {
        let owners: BTreeSet<OwnerKey> = turn.pods.iter().filter_map(|pod| self.view.owner_of(pod)).collect();
        let kept = self.reserves.evictions.moves.kept_from(&turn.key, turn.priority, &owners);
        let count = kept.len();
        kept.into_iter().for_each(|aside| self.capacity.set_aside(aside));
        count
    }

    /// Pods that are to end for others of higher priority.
    fn preempted(&self) -> BTreeSet<PodUid> {
        self.reserves.evictions.preempting.chosen().into_keys().cloned().collect()
    }

    /// A unit has its place.
    pub(in crate::controller) fn moved(&mut self, turn: &Turn) {
        let mut any = self.reserves.evictions.moves.served(&turn.key);
        for owner in turn.pods.iter().filter_map(|pod| self.view.owner_of(pod)).collect::<Vec<_>>() {
            any |= self.reserves.evictions.moves.arrived(&owner);
        }
        if any {
            self.capacity.news();
        }
    }

    /// A unit was refused: it may lack room that moves would make. What was found is told.
    pub(in crate::controller) fn suggest(&mut self, turn: &Turn, refused: &mut Refused) {
        let lacks = self.rules.consolidation.mode != Mode::Off && refused.reason.is_for_room();
        let Some(namespace) = self.namespace(turn).map(str::to_owned) else { return };
        self.reserves.evictions.moves.lacks_room(turn, &namespace, lacks);
        if let Some(found) = self.reserves.evictions.moves.of(&turn.key).filter(|_| lacks) {
            let words = suggestion(found, Some(&namespace));
            refused.words = format!("{}; {words}", refused.words);
        }
    }

    /// After the turns: searches for one unit, and moves pods for one.
    pub(in crate::controller) fn consolidate(&mut self, now: Moment, round: &mut Round) {
        let rules = self.rules.consolidation;
        if rules.mode == Mode::Off {
            return;
        }
        let epoch = self.capacity.epoch();
        let busy = self.busy();
        let is_busy = |unit: &UnitKey| busy.contains(unit);
        if let Some(turn) = self.reserves.evictions.moves.next_search(is_busy, epoch, now) {
            let found = self.search_paid(&turn, rules.mode, now);
            if self.reserves.evictions.moves.note(&turn.key, found, epoch, now) {
                // They are told of it in the next round.
                turn.pods.iter().for_each(|pod| self.queue.again(pod));
            }
        }
        // Nobody is moved for who would not be bound then.
        let is_meant = |turn: &Turn| {
            !is_busy(&turn.key)
                && self.is_tried(turn).is_ok()
                && !self.waited_before(turn, now)
                && self.is_still_allowed(turn)
        };
        if let Some(unit) = self.reserves.evictions.moves.next_beginning(&rules, is_meant, epoch, now) {
            self.reserves.evictions.moves.begin(&unit, rules.rest, now);
        }
        if let Some((pod, owner)) = self.reserves.evictions.moves.next_eviction(now) {
            round.writes.push(Write::Move(pod, owner));
        }
    }

    /// What was found for the unit is within the bounds of all whom it is about: they may have more by now.
    fn is_still_allowed(&self, turn: &Turn) -> bool {
        let found = self.reserves.evictions.moves.of(&turn.key);
        let (Some(found), Some(namespace)) = (found, self.namespace(turn)) else { return false };
        let moves = found.moves.iter().map(|one| (&one.pod.uid, of_places([&one.from]), &one.to));
        self.may_all_have((namespace, &turn.key), found.then.iter().map(|(_, place)| place), moves)
    }

    /// When there is something to do for moves.
    pub(in crate::controller) fn next_move(&mut self, epoch: u64, now: Moment) -> Option<Moment> {
        let busy = self.busy();
        let moves = &mut self.reserves.evictions.moves;
        moves.next(&self.rules.consolidation, |unit| busy.contains(unit), epoch, now)
    }

    /// Units for which others end.
    fn busy(&self) -> BTreeSet<UnitKey> {
        self.reserves.evictions.preempting.under_way().map(|(unit, _)| unit.clone()).collect()
    }

    /// The API server has answered to an eviction. `problem`: why the pod stays.
    pub(in crate::controller) fn move_answered(
        &mut self,
        pod: &PodUid,
        problem: Option<String>,
        now: Moment,
    ) {
        let Some(problem) = problem else { return };
        self.reserves.evictions.moves.refused(pod, self.rules.consolidation.rest, now);
        self.capacity.news();
        let name = self.view.pod(pod).map(|pod| format!("{}/{}", pod.at.namespace, pod.at.name));
        self.recorder.trouble(format!("pod {} is not moved: {problem}", name.unwrap_or_default()));
    }

    /// What the search costs the unit's namespace pays.
    fn search_paid(&mut self, turn: &Turn, mode: Mode, now: Moment) -> Option<Proposed> {
        let namespace = self.namespace(turn)?.to_owned();
        let ticks = self.purse.allowance(&namespace)?.min(SEARCH_TICKS);
        self.capacity.index.allow(ticks);
        let mut found = match mode {
            Mode::Auto => self.propose(turn, MoverFilter::Marked, ticks, now),
            Mode::Propose | Mode::Off => MoveSearch::Nothing,
        };
        if let MoveSearch::Found(found) = &mut found {
            self.heed_refusals(found);
        }
        let left = ticks.saturating_sub(self.capacity.index.spent().0);
        if found == MoveSearch::Nothing && left > 0 {
            found = self.propose(turn, MoverFilter::Any, left, now);
        }
        let (spent, _) = self.capacity.index.spent();
        self.purse.pay(&namespace, spent);
        match found {
            MoveSearch::Found(found) => Some(found),
            MoveSearch::Nothing | MoveSearch::Spent => None,
        }
    }

    /// Nobody leaves for nothing: pods whose eviction may be refused go first, those of a budget and of Jobs. Where a budget
    /// is asked for more pods than it lets go, it is told, and the controller does not begin it.
    fn heed_refusals(&self, found: &mut Proposed) {
        let mut asked: BTreeMap<String, (u32, u32)> = BTreeMap::new();
        let mut unsure = BTreeSet::new();
        for one in &found.moves {
            let Some(pod) = self.view.pod(&one.pod.uid) else { continue };
            let BudgetGuard::By(budgets) = self.view.budgets_of(pod).guard else { continue };
            if one.owner.kind == OwnerKind::Job || !budgets.is_empty() {
                unsure.insert(one.pod.uid.clone());
            }
            for (name, allowed) in budgets {
                asked.entry(name.to_owned()).or_insert((0, allowed)).0 += 1;
            }
        }
        found.moves.sort_by_key(|one| !unsure.contains(&one.pod.uid));
        found.marked &= asked.values().all(|(count, allowed)| count <= allowed);
    }

    /// What budgets say is another than before: other pods may end, and move.
    pub(super) fn budgets_changed(&mut self) {
        self.reserves.evictions.preempting.holders.news();
        if self.rules.consolidation.mode == Mode::Auto {
            self.reserves.evictions.moves.others_may_move();
        }
    }

    /// Searches for the least moves after which a unit would fit. Capacity is afterwards as before.
    pub(in crate::controller) fn propose(
        &mut self,
        turn: &Turn,
        whose: MoverFilter,
        ticks: u64,
        now: Moment,
    ) -> MoveSearch {
        // Where pods may go that must not be together is looked up one after another: not in this search.
        let parts = self.parts(turn, now).filter(|parts| !self.are_apart(parts));
        let (Some(parts), Some(namespace)) = (parts, self.namespace(turn).map(str::to_owned)) else {
            return MoveSearch::Nothing;
        };
        let (movers, who, cost) = self.movers(turn, whose, now);
        self.capacity.index.pay(cost);
        if cost > ticks {
            return MoveSearch::Spent;
        }
        if movers.is_empty() {
            return MoveSearch::Nothing;
        }
        let epoch = self.capacity.epoch();
        let ways = parts.iter().map(PodPart::ways).max().unwrap_or(1);
        let nodes: Vec<Nodes> =
            parts.iter().map(|part| self.nodes_then(&part.pod, &part.nodes, now)).collect();
        let mut outcome = MoveSearch::Nothing;
        for nth in 0..ways {
            if self.beyond_bounds_at_least(&parts, nth).is_some() {
                continue;
            }
            let ask = |(part, nodes): (&PodPart, &Nodes)| {
                let nth = nth.min(part.ways() - 1);
                PodAsk { shape: part.shape(nth).clone(), nodes: nodes.clone() }
            };
            let asks: Vec<PodAsk> = parts.iter().zip(&nodes).map(ask).collect();
            let alone = asks.iter().any(|ask| ask::is_several(&ask.shape));
            let waiting = WaitingUnit { asks, alone };
            let mut ground = Ground::new(self, (&namespace, &turn.key), &who);
            match search(&mut ground, &waiting, &movers, ticks / ways as u64) {
                MovesFound::Moves(found) => {
                    let named = |(at, to): &(usize, Placement)| {
                        Some(Move {
                            pod: self.view.pod(&who[*at].pod)?.at.clone(),
                            owner: self.view.origin(&who[*at].pod)?.owner.clone(),
                            from: movers[*at].has.clone(),
                            to: to.clone(),
                            alone: movers[*at].several,
                        })
                    };
                    let moves = found.moves.iter().filter_map(named).collect();
                    let pods = parts.iter().map(|part| part.pod.clone());
                    let (then, marked) = (pods.zip(found.then).collect(), whose == MoverFilter::Marked);
                    outcome = MoveSearch::Found(Proposed {
                        node: found.node,
                        moves,
                        then,
                        alone: waiting.alone,
                        marked,
                    });
                    break;
                }
                MovesFound::Spent => outcome = MoveSearch::Spent,
                MovesFound::Nothing => {}
            }
        }
        self.capacity.back_to(epoch);
        outcome
    }

    /// Who may move for the sake of a unit, and what it took to find out, in ticks.
    fn movers(&self, turn: &Turn, whose: MoverFilter, now: Moment) -> (Vec<Mover>, Vec<Who>, u64) {
        let maybe_moved = match whose {
            MoverFilter::Marked => self.maybe_moved(now),
            MoverFilter::Any => BTreeSet::new(),
        };
        let mut cost = 0;
        let own: BTreeSet<OwnerKey> = turn.pods.iter().filter_map(|pod| self.view.owner_of(pod)).collect();
        let preempted = self.preempted();
        let (mut movers, mut who) = (Vec::new(), Vec::new());
        for pod in self.view.pods().filter(|pod| !preempted.contains(&pod.at.uid)) {
            let Some(origin) = self.view.origin(&pod.at.uid) else { continue };
            let is_bound = pod.node.is_some() && !pod.ending && self.pods.has_place(&pod.at.uid);
            if !is_bound || pod.standing.priority > turn.priority || own.contains(&origin.owner.key()) {
                continue;
            }
            if origin.tie.is_some() || origin.mark == Some(false) {
                continue;
            }
            let rests = || {
                self.reserves.evictions.moves.rests(&origin.owner, now)
                    || maybe_moved.contains(&origin.owner.key())
            };
            if whose == MoverFilter::Marked && (rests() || !self.view.is_marked_movable(pod)) {
                continue;
            }
            // A pod of a gang is never taken from it.
            if let UnitKey::Gang { .. } = self.unit_of(pod) {
                continue;
            }
            // Its namespace has more than it may by now: the share would not be made anew.
            if !self.may_have(&pod.at.namespace, Amounts::default(), Amounts::default()) {
                continue;
            }
            let Some((has, claims, several)) = self.shares_alone(pod) else { continue };
            if whose == MoverFilter::Marked && !self.lets_go(pod, &mut cost) {
                continue;
            }
            movers.push(Mover { has, several });
            who.push(Who { pod: pod.at.uid.clone(), claims });
        }
        (movers, who, cost)
    }

    /// No budget keeps the pod: of several the API server lets no pod go.
    fn lets_go(&self, pod: &Pod, cost: &mut u64) -> bool {
        let budgets = self.view.budgets_of(pod);
        *cost = cost.saturating_add(budgets.ticks);
        match budgets.guard {
            BudgetGuard::By(all) => all.len() <= 1 && all.iter().all(|(_, allowed)| *allowed > 0),
            BudgetGuard::Stays => false,
        }
    }

    /// It waited before this leader began: another may have moved pods for it.
    fn waited_before(&self, turn: &Turn, now: Moment) -> bool {
        let Some(began) = self.reserves.evictions.moves.began(now) else { return false };
        if turn.since <= began {
            return true;
        }
        // Who was found late, or anew, may have waited all the same: the API server says when it was made.
        let at = self.recorder.time_of(began).map(|at| at.as_second());
        let created = |uid: &PodUid| self.view.pod(uid)?.created.map(|created| created.as_second());
        turn.pods.iter().filter_map(created).any(|created| at.is_some_and(|at| created <= at))
    }

    /// Owners that have made a pod a moment ago: another leader may have moved one of theirs. Once this one has led for as
    /// long as owners rest, it knows.
    fn maybe_moved(&self, now: Moment) -> BTreeSet<OwnerKey> {
        if self.reserves.evictions.moves.knows_who_rests(now) {
            return BTreeSet::new();
        }
        let Some(present) = self.recorder.time_of(now) else { return BTreeSet::new() };
        let rest = i64::try_from(self.rules.consolidation.rest.as_secs()).unwrap_or(i64::MAX);
        let is_young = |pod: &&Pod| {
            let age = pod.created.map(|created| present.as_second().saturating_sub(created.as_second()));
            age.is_some_and(|age| age < rest)
        };
        self.view.pods().filter(is_young).filter_map(|pod| self.view.owner_of(&pod.at.uid)).collect()
    }

    /// What a pod has, if that is shares of ours alone, of claims that end with it.
    fn shares_alone(&self, pod: &Pod) -> Option<(Placement, Vec<ClaimKey>, bool)> {
        let claims = self.view.claims_of(pod).filter(|claims| !claims.is_empty())?;
        let node = pod.node.as_ref()?;
        let is_own = |claim: &&Claim| {
            let users = &claim.users;
            claim.is_shares()
                && !claim.is_ending()
                && claim.meta.owner.as_ref() == Some(&pod.at.uid)
                && users.pods.iter().all(|user| *user == pod.at.uid)
                && !users.others
        };
        if !claims.iter().all(is_own) {
            return None;
        }
        let (mut gpus, mut several) = (Vec::new(), false);
        for claim in &claims {
            let allocation = claim.allocation.as_ref()?;
            let mut of_claim = BTreeMap::new();
            for (gpu, how) in &allocation.uses {
                let Use::Share(granted) = how else { return None };
                if gpu.node != *node {
                    return None;
                }
                let grant = as_grant(granted);
                // Whole GPUs have no MPS daemon in common.
                if grant.extent == Extent::Part && self.capacity.has_one_daemon(gpu) {
                    of_claim.insert(&gpu.device, ());
                }
                gpus.push(grant);
            }
            several |= of_claim.len() > 1;
        }
        let room = pod.room;
        let has = Placement {
            node: node.clone(),
            gpus,
            cpu_milli: room.cpu_milli,
            memory: room.memory,
            pods: room.pods,
        };
        Some((has, claims.iter().map(|claim| claim.key).collect(), several))
    }
}
