//! All that the controller knows and has decided, without any effect: changes and answers in, writes and words out.
//!
//! Time is an argument. Nothing that is not in the API is needed to begin anew: holds and grants are read from it.

mod answers;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use jiff::Timestamp;

use super::Moment;
use super::config::Rules;
use super::hold::{Holds, Loss, Phase};
use super::kept_off::KeptOff;
use super::life::Unused;
use super::plan::{Next, Plan, Plans, as_grant};
use super::purse::Purse;
use super::queue::{Queue, UnitKey, Waiter};
use super::reserve::Reserves;
use super::say::Says;
use super::stock::Stock;
use super::world::claim::POLICY;
use super::world::pod::Gang;
use super::world::{Claim, GpuRef, Need, News, Pod, Sought, Use, World};
use crate::allocate::Policy;
use crate::cluster::allocation::ClaimVersion;
use crate::cluster::feed::{Change, Seen};
use crate::feasible::{Room, why_not};
use crate::model::names::{ClaimUid, NodeName, PodUid, SHARED_CLASS};

/// Between a clearing and the next allocation of a claim: watchers that would see both as one change would miss
/// it (the scheduler's books follow only the coming and going of allocations).
const REST_AFTER_CLEARING: Duration = Duration::from_secs(1);
/// Before a write is repeated that nobody has answered.
const ASK_AGAIN: Duration = Duration::from_secs(2);
/// An object whose creation was not answered is seen by then, or never.
const NEVER_COMES: Duration = Duration::from_secs(10);
/// Before a claim is tried again that the API server would not have.
const AFTER_REFUSAL: Duration = Duration::from_secs(30);

#[derive(Debug)]
pub struct Core {
    pub rules: Rules,
    pub world: World,
    pub stock: Stock,
    pub(super) kept_off: KeptOff,
    pub holds: Holds,
    pub queue: Queue,
    pub plans: Plans,
    pub says: Says,
    pub reserves: Reserves,
    /// The time of day at moment 0, for words.
    pub zero: Timestamp,
    /// The lists are complete and what they showed was taken in.
    started: bool,
    /// Where pods take room.
    pub(super) assigned: BTreeMap<PodUid, (NodeName, Room)>,
    gangs: BTreeMap<UnitKey, BTreeSet<PodUid>>,
    /// GPUs that are held whenever they are free, and never given back.
    pub(super) for_good: BTreeSet<GpuRef>,
    /// Pods that wait for devices of the scheduler's, whole GPUs maybe.
    pub(super) whole: BTreeMap<PodUid, Vec<Need>>,
    /// GPUs to be looked at again.
    dirty: BTreeSet<GpuRef>,
    /// Claims with an allocation of ours that nobody has reserved.
    pub(super) unused: BTreeMap<ClaimUid, Unused>,
    /// When these were last looked at, and when they are to be again, if time alone is to bring it.
    pub(super) reviewed: Option<Moment>,
    pub(super) review_at: Option<Moment>,
    pub(super) not_before: BTreeMap<ClaimUid, Moment>,
    pub(super) purse: Purse,
    /// Claims that a write is under way for.
    pub(super) in_flight: BTreeSet<ClaimUid>,
    /// Claims whose plan was given up while their allocation was being written, or after its answer was lost: it
    /// may stand in the API soon, so that it counts until it is sure that it does not. None: its answer is still to
    /// come; else when to make sure.
    pub(super) doubtful: BTreeMap<ClaimUid, Option<Moment>>,
    /// Claims that were promised and are being created, by the UID that they have now.
    renamed: BTreeMap<ClaimUid, ClaimUid>,
    /// Allocations that are to be taken back.
    pub(super) to_clear: BTreeSet<ClaimUid>,
    /// Why claims wait, that is still to be written on them.
    pub(super) to_mark: BTreeMap<ClaimUid, String>,
    /// The same, being written.
    pub(super) marking: BTreeMap<ClaimUid, String>,
    /// After one could not be written: not before then.
    pub(super) marks_after: Option<Moment>,
    /// How long pods have waited for the claims that were allocated since this was last taken.
    pub placed_after: Vec<Duration>,
    /// GPUs that we use and somebody else names, too.
    conflicts: BTreeSet<GpuRef>,
    /// The mark of the look under way, once it was written.
    look: Option<ClaimVersion>,
    /// What pods without claims sought when that look began.
    pub(super) rivals: Sought,
}

impl Core {
    /// `namespace`: of the holds.
    pub fn new(rules: Rules, namespace: &str) -> Self {
        Self {
            world: World::new(namespace),
            stock: Stock::default(),
            kept_off: KeptOff::default(),
            holds: Holds::new(rules.holds),
            queue: Queue::new(rules.patience),
            plans: Plans::default(),
            says: Says::default(),
            reserves: Reserves::new(rules.patience.keep),
            zero: Timestamp::UNIX_EPOCH,
            started: false,
            assigned: BTreeMap::new(),
            gangs: BTreeMap::new(),
            for_good: BTreeSet::new(),
            whole: BTreeMap::new(),
            dirty: BTreeSet::new(),
            unused: BTreeMap::new(),
            reviewed: None,
            review_at: None,
            not_before: BTreeMap::new(),
            purse: Purse::default(),
            in_flight: BTreeSet::new(),
            doubtful: BTreeMap::new(),
            renamed: BTreeMap::new(),
            to_clear: BTreeSet::new(),
            to_mark: BTreeMap::new(),
            marking: BTreeMap::new(),
            marks_after: None,
            placed_after: Vec::new(),
            conflicts: BTreeSet::new(),
            look: None,
            rivals: Sought::default(),
            rules,
        }
    }

    /// GPUs that we use and somebody else names, too.
    pub fn conflicts(&self) -> &BTreeSet<GpuRef> {
        &self.conflicts
    }

    pub fn apply(&mut self, change: Change, now: Moment) {
        let listed = matches!(change, Change::Claim(Seen::Complete));
        for news in self.world.apply(change) {
            self.learn(news, now);
        }
        if listed {
            // Who has come and gone since the last news?
            self.holds.young_ones().iter().for_each(|gpu| self.spoiled(gpu, now));
        }
    }

    fn learn(&mut self, news: News, now: Moment) {
        match news {
            News::Claim { uid, before } => self.claim(&uid, before.as_deref(), now),
            News::ClaimMade { promised, uid } => self.made(&promised, &uid, now),
            News::ClaimGone(claim) => self.claim_gone(&claim, now),
            News::Pod { uid, demands_changed } => {
                self.pod(&uid, now);
                if demands_changed {
                    self.queue.again(&uid);
                }
            }
            News::PodGone(pod) => self.pod_gone(&pod, now),
            News::Node(name) => self.node(&name),
            News::Class => self.class(),
            News::OtherClass => self.note_all_needs(),
            News::Trouble(words) => self.says.trouble(words),
        }
    }

    fn class(&mut self) {
        self.stock.news();
        let said = self.world.class.policy.as_deref().map(str::parse::<Policy>);
        if let Some(Err(words)) = said {
            self.says.trouble(format!(
                "DeviceClass {SHARED_CLASS}: annotation {POLICY}: {words}; until then it is {}",
                self.rules.policy
            ));
        }
    }

    // Claims.

    fn claim(&mut self, uid: &ClaimUid, before: Option<&Claim>, now: Moment) {
        let Some(claim) = self.world.claims.get(uid) else { return };
        let named =
            before.into_iter().chain([claim]).flat_map(|one| &one.allocation).flat_map(|one| &one.uses);
        let others: Vec<GpuRef> =
            named.clone().filter(|(_, how)| !how.is_ours()).map(|(gpu, _)| gpu.clone()).collect();
        self.dirty.extend(named.map(|(gpu, _)| gpu.clone()));
        if let Some(gpu) = claim.hold.clone() {
            self.hold_changed(&gpu, now);
        }
        others.iter().for_each(|gpu| self.spoiled(gpu, now));
        let claim = &self.world.claims[uid];
        if claim.is_shares() {
            match (&claim.allocation, before.filter(|before| before.allocation.is_some())) {
                (Some(_), _) => self.allocated(uid, now),
                (None, Some(before)) => self.cleared(uid, before, now),
                (None, None) => {}
            }
        }
        self.review_users(uid, now);
        let claim = &self.world.claims[uid];
        if before.is_some_and(|before| before.policy != claim.policy) {
            self.world.pods_of(claim).for_each(|pod| self.queue.again(&pod.at.uid));
        }
    }

    /// What was decided for a claim that was promised is for the claim that there is now.
    fn made(&mut self, promised: &ClaimUid, uid: &ClaimUid, now: Moment) {
        self.plans.rename(promised, uid);
        self.stock.rename(promised, uid);
        if self.in_flight.remove(promised) {
            self.in_flight.insert(uid.clone());
            self.renamed.insert(promised.clone(), uid.clone());
        }
        if let Some(doubt) = self.doubtful.remove(promised) {
            self.doubtful.insert(uid.clone(), doubt);
        }
        if let Some(next @ Next::Newer { .. }) = self.plans.of_mut(uid).map(|planned| &mut planned.next) {
            *next = Next::From(now);
        }
    }

    fn allocated(&mut self, uid: &ClaimUid, now: Moment) {
        let claim = &self.world.claims[uid];
        let Some(allocation) = &claim.allocation else { return };
        let shares = allocation.uses.iter().filter_map(|(gpu, how)| match how {
            Use::Share(granted) => Some((gpu.clone(), as_grant(granted))),
            _ => None,
        });
        let (shares, node) = (shares.collect(), allocation.node.clone());
        match claim.is_reserved() {
            true => drop(self.unused.remove(uid)),
            false => drop(self.unused.entry(uid.clone()).or_insert(Unused::new(now))),
        }
        self.stock.set_grants(uid, shares);
        self.doubtful.remove(uid);
        let planned = self.plans.of_mut(uid).map(|planned| {
            planned.done = true;
            Some(&planned.node) == node.as_ref()
        });
        let is_done = |key: &UnitKey| {
            self.plans.get(key).is_some_and(|plan| plan.claims.values().all(|claim| claim.done))
        };
        match (planned, self.plans.key(uid).cloned()) {
            // Somebody else was first, and elsewhere.
            (Some(false), Some(key)) => self.cancel(&key, now),
            (Some(true), Some(key)) if is_done(&key) => {
                let Some(plan) = self.plans.remove(&key) else { return };
                self.tell_placed(&plan);
                self.placed_after.push(now.saturating_sub(plan.since));
            }
            _ => {}
        }
    }

    /// An allocation was taken away, by us or by somebody who did not like it.
    fn cleared(&mut self, uid: &ClaimUid, before: &Claim, now: Moment) {
        self.unused.remove(uid);
        let ours = self.to_clear.remove(uid);
        if self.plans.of(uid).is_none() {
            self.doubtful.remove(uid);
            self.stock.set_grants(uid, Vec::new());
        } else if let Some(key) = self.plans.key(uid).cloned() {
            self.cancel(&key, now);
        }
        self.not_before.insert(uid.clone(), now + REST_AFTER_CLEARING);
        let node = before.allocation.as_ref().and_then(|allocation| allocation.node.as_ref());
        let Some(node) = node.filter(|_| !ours) else { return };
        // Cleared because its users ended, or for the sake of a pod that cannot go there?
        let meant = |pod: &Pod| before.users.is_empty() || before.users.contains(&pod.at.uid);
        let refused = |pod: &&Pod| pod.node.is_none() && !pod.ending && meant(pod);
        for pod in self.world.pods_of(&self.world.claims[uid]).filter(refused) {
            self.queue.exclude(&pod.at.uid, node, now);
            self.says.refused(pod, node);
        }
    }

    fn claim_gone(&mut self, claim: &Claim, now: Moment) {
        let uid = claim.uid();
        self.dirty.extend(claim.allocation.iter().flat_map(|one| &one.uses).map(|(gpu, _)| gpu.clone()));
        if let Some(gpu) = &claim.hold {
            self.hold_changed(gpu, now);
        }
        let others = claim.allocation.iter().flat_map(|one| &one.uses).filter(|(_, how)| !how.is_ours());
        others.for_each(|(gpu, _)| self.spoiled(gpu, now));
        if let Some(key) = self.plans.key(uid).cloned() {
            self.cancel(&key, now);
        }
        // One that was promised may be created even now.
        if !claim.is_new() || !self.doubtful.contains_key(uid) {
            self.stock.set_grants(uid, Vec::new());
            self.doubtful.remove(uid);
        }
        self.unused.remove(uid);
        self.not_before.remove(uid);
        self.purse.dear.remove(uid);
        self.to_clear.remove(uid);
        let pods: Vec<PodUid> = self.world.pods_of(claim).map(|pod| pod.at.uid.clone()).collect();
        pods.iter().for_each(|pod| self.review(pod, now));
    }

    fn review_users(&mut self, uid: &ClaimUid, now: Moment) {
        let Some(claim) = self.world.claims.get(uid) else { return };
        let pods: Vec<PodUid> = self.world.pods_of(claim).map(|pod| pod.at.uid.clone()).collect();
        for pod in pods {
            self.recount(&pod);
            self.review(&pod, now);
        }
    }

    // Pods.

    fn pod(&mut self, uid: &PodUid, now: Moment) {
        if let Some(key @ UnitKey::Gang { .. }) = self.world.pods.get(uid).map(unit) {
            self.gangs.entry(key).or_default().insert(uid.clone());
        }
        self.recount(uid);
        self.review(uid, now);
        self.tell_unpromised(uid, now);
    }

    fn pod_gone(&mut self, pod: &Pod, now: Moment) {
        let uid = &pod.at.uid;
        let key = unit(pod);
        if let Some(members) = self.gangs.get_mut(&key) {
            members.remove(uid);
            if members.is_empty() {
                self.gangs.remove(&key);
            }
        }
        self.queue.forget(uid);
        self.says.forget(uid);
        self.whole.remove(uid);
        if self.plans.node_of(&key, uid).is_some() {
            self.cancel(&key, now);
        }
        self.recount(uid);
    }

    /// Where the pod takes room: on its node, or on the one that its claims are for.
    fn recount(&mut self, uid: &PodUid) {
        let place = self.world.pods.get(uid).and_then(|pod| Some((self.place_of(pod)?, pod.room)));
        if self.assigned.get(uid) == place.as_ref() {
            return;
        }
        if let Some((node, room)) = self.assigned.remove(uid) {
            self.stock.give_room(&node, room);
        }
        if let Some((node, room)) = place {
            self.stock.take_room(&node, room);
            self.assigned.insert(uid.clone(), (node, room));
        }
    }

    fn place_of(&self, pod: &Pod) -> Option<NodeName> {
        if let Some(node) = &pod.node {
            return Some(node.clone());
        }
        if let Some(node) = self.plans.node_of(&unit(pod), &pod.at.uid) {
            return Some(node.clone());
        }
        let claims = pod.claims.iter().filter_map(|name| self.world.claim_named(&pod.at.namespace, name));
        let placed = claims.filter(|claim| claim.is_placed());
        placed.filter_map(|claim| claim.allocation.as_ref()?.node.clone()).next()
    }

    /// Does the pod wait for us? Or for a whole GPU?
    fn review(&mut self, uid: &PodUid, now: Moment) {
        let Some(pod) = self.world.pods.get(uid) else { return };
        let claims = self.world.claims_of(pod);
        let open = |claim: &&Claim| {
            claim.is_shares() && claim.allocation.is_none() && !claim.ending && !self.is_decided(claim.uid())
        };
        let waits = pod.is_ready() && claims.as_ref().is_some_and(|claims| claims.iter().any(open));
        let (key, waiter) = (unit(pod), waiter(pod));
        match waits {
            true => self.queue.add(uid, key, waiter, now),
            false => self.queue.remove(uid),
        }
        self.note_needs(uid);
    }

    /// Something is under way for the claim already.
    pub(super) fn is_decided(&self, claim: &ClaimUid) -> bool {
        self.plans.of(claim).is_some() || self.doubtful.contains_key(claim)
    }

    /// Pods of a gang that have their place. Those that ask for no share (a launcher) are none of them.
    pub(super) fn placed(&self, key: &UnitKey) -> usize {
        let members = self.gangs.get(key).into_iter().flatten();
        let shares = |pod: &Pod| {
            let claims = self.world.claims_of(pod);
            claims.is_some_and(|claims| claims.iter().any(|claim| claim.is_shares()))
        };
        let stays = |pod: &&PodUid| self.world.pods.get(*pod).is_some_and(|pod| !pod.ending && shares(pod));
        let placed = |pod: &&PodUid| !self.queue.contains(pod) && self.assigned.contains_key(*pod);
        members.filter(stays).filter(placed).count()
    }

    // Plans.

    pub(super) fn adopt(&mut self, key: UnitKey, plan: Plan, now: Moment) {
        let (claims, pods): (Vec<_>, Vec<_>) =
            (plan.claims.keys().cloned().collect(), plan.pods.keys().cloned().collect());
        for (uid, claim) in &plan.claims {
            self.stock.set_grants(uid, claim.grants());
            claim.gpus().for_each(|gpu| self.holds.want(&gpu));
        }
        self.plans.insert(key, plan);
        pods.iter().for_each(|pod| self.recount(pod));
        claims.iter().for_each(|claim| self.review_users(claim, now));
    }

    /// Gives up what was decided for a unit and is not in the API yet. What is there of a gang is taken back.
    pub(super) fn cancel(&mut self, key: &UnitKey, now: Moment) {
        let Some(plan) = self.plans.remove(key) else { return };
        for (uid, planned) in &plan.claims {
            let claim = self.world.claims.get(uid);
            match claim.and_then(|claim| claim.allocation.as_ref()) {
                None if self.in_flight.contains(uid) || planned.lost => {
                    let due =
                        now + if claim.is_none_or(Claim::is_new) { NEVER_COMES } else { Duration::ZERO };
                    self.doubtful.insert(uid.clone(), (!self.in_flight.contains(uid)).then_some(due));
                }
                None => self.stock.set_grants(uid, Vec::new()),
                Some(_) if matches!(key, UnitKey::Gang { .. }) && !claim.is_some_and(Claim::is_reserved) => {
                    self.to_clear.insert(uid.clone());
                }
                Some(_) => {}
            }
        }
        for pod in plan.pods.keys() {
            self.recount(pod);
            self.review(pod, now);
        }
        let claims: Vec<ClaimUid> = plan.claims.into_keys().collect();
        claims.iter().for_each(|claim| self.review_users(claim, now));
    }

    // GPUs.

    fn node(&mut self, name: &NodeName) {
        let state = self.world.nodes.get(name);
        self.stock.set_node(name, state);
        let object = state.and_then(|state| state.object.as_deref());
        self.kept_off.judge(name, |demands| object.is_none_or(|node| why_not(demands, node).is_some()));
        let gpus = state.into_iter().flat_map(|state| state.gpus.keys());
        self.dirty.extend(gpus.map(|device| GpuRef::new(name, device)));
    }

    fn hold_changed(&mut self, gpu: &GpuRef, now: Moment) {
        self.dirty.insert(gpu.clone());
        if !self.started || matches!(self.holds.phase(gpu), Some(Phase::Writing | Phase::Leaving { .. })) {
            return;
        }
        let hold = self.world.holds.get(gpu).and_then(|uid| self.world.claims.get(uid));
        let stands = hold.is_some_and(|hold| hold.allocation.is_some() && !hold.ending);
        match (stands, self.holds.phase(gpu)) {
            (true, None) => self.holds.stray(gpu, now),
            (false, _) => {
                if self.holds.gone(gpu) {
                    self.says.trouble(format!("the hold of {gpu} was taken away by somebody else"));
                }
                if hold.is_some_and(|hold| !hold.ending) {
                    self.holds.stray(gpu, now);
                }
            }
            (true, Some(_)) => {}
        }
    }

    /// A young hold of the GPU is worth nothing, where the scheduler's books have a GPU once.
    fn spoiled(&mut self, gpu: &GpuRef, now: Moment) {
        if self.world.counts_once(gpu) && self.holds.spoil(gpu, now) {
            for key in self.plans.on(gpu) {
                self.cancel(&key, now);
            }
        }
    }

    /// The first time that everything is known: what stands in the API was decided by a leader before us.
    pub(super) fn start(&mut self, now: Moment) {
        if std::mem::replace(&mut self.started, true) {
            return;
        }
        let holds: Vec<(GpuRef, ClaimUid)> =
            self.world.holds.iter().map(|(gpu, uid)| (gpu.clone(), uid.clone())).collect();
        for (gpu, uid) in holds {
            let Some(claim) = self.world.claims.get(&uid) else { continue };
            match claim.allocation.is_some() && !claim.ending {
                true => {
                    let names = self.world.books.get(&gpu);
                    let shared =
                        names.is_some_and(|names| names.values().any(|how| matches!(how, Use::Share(_))));
                    // Nobody has seen who came and went since it was written.
                    match !shared && self.world.counts_once(&gpu) {
                        true => self.holds.stray(&gpu, now),
                        false => self.holds.found(&gpu, &claim.at.claim, shared, now),
                    }
                }
                false => self.holds.stray(&gpu, now),
            }
        }
        self.dirty.extend(self.world.books.keys().cloned());
        let of = |(name, state): (&NodeName, &super::world::NodeState)| {
            state.gpus.keys().map(|device| GpuRef::new(name, device)).collect::<Vec<_>>()
        };
        self.dirty.extend(self.world.nodes.iter().flat_map(of));
    }

    /// Looks again at the GPUs that something has happened to.
    pub(super) fn regard(&mut self, now: Moment) {
        self.dirty.extend(self.holds.take_changed());
        for gpu in std::mem::take(&mut self.dirty) {
            self.regard_one(&gpu, now);
        }
    }

    fn regard_one(&mut self, gpu: &GpuRef, now: Moment) {
        let names = self.world.books.get(gpu);
        let others = self.world.is_anothers(gpu);
        let shares: Vec<ClaimUid> = names
            .into_iter()
            .flatten()
            .filter(|(_, how)| matches!(how, Use::Share(_)))
            .map(|(uid, _)| uid.clone())
            .collect();
        match others && (self.holds.is_ours(gpu) || !shares.is_empty()) {
            true => self.contested(gpu, &shares, now),
            false => drop(self.conflicts.remove(gpu)),
        }
        if (!shares.is_empty() || self.stock.is_granted(gpu)) && !others && self.holds.phase(gpu).is_none() {
            self.holds.want(gpu);
        }
        let known = self.world.gpu(gpu);
        let named = |list: &[String]| known.is_some_and(|known| is_named(list, gpu, known));
        // One that was taken under other rules gets no more shares, and goes back after its last.
        let forbidden = named(&self.rules.never_hold);
        match !forbidden && named(&self.rules.always_hold) {
            true => {
                self.for_good.insert(gpu.clone());
                if !others && self.holds.phase(gpu).is_none() {
                    self.holds.want(gpu);
                }
            }
            false => drop(self.for_good.remove(gpu)),
        }
        let closed = others || known.is_none() || forbidden || !self.holds.is_open(gpu);
        self.stock.set_closed(gpu, closed);
    }

    /// Somebody else names a GPU of ours. Without shares we go; shares that nobody uses yet are taken back.
    fn contested(&mut self, gpu: &GpuRef, shares: &[ClaimUid], now: Moment) {
        for key in self.plans.on(gpu) {
            self.cancel(&key, now);
        }
        if shares.is_empty() {
            self.conflicts.remove(gpu);
            self.holds.lose(gpu, Loss::Race, now);
            return;
        }
        if self.conflicts.insert(gpu.clone()) {
            self.says.trouble(format!("{gpu} has shares of ours, and another claim names it"));
        }
        let unused =
            shares.iter().filter(|uid| self.world.claims.get(uid).is_some_and(|claim| !claim.is_reserved()));
        self.to_clear.extend(unused.cloned());
    }
}

/// The unit that a pod belongs to.
pub fn unit(pod: &Pod) -> UnitKey {
    match &pod.gang {
        Some(gang) => UnitKey::Gang { namespace: pod.at.namespace.clone(), name: gang.name.clone() },
        None => UnitKey::Pod(pod.at.uid.clone()),
    }
}

fn waiter(pod: &Pod) -> Waiter {
    Waiter { priority: pod.priority, created: pod.created, size: pod.gang.as_ref().and_then(Gang::pods) }
}

/// By the name of its node, its UUID or a part of its product's name.
fn is_named(list: &[String], gpu: &GpuRef, known: &super::world::Gpu) -> bool {
    let known = &known.grantable;
    let product = known.product.to_lowercase();
    list.iter().any(|one| {
        *one == gpu.node.as_str() || *one == known.gpu.as_str() || product.contains(&one.to_lowercase())
    })
}
