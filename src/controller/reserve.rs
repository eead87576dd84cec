//! For whom a place is kept free, and for how long: what was passed for too long, a pod or a gang.
//!
//! Nobody knows when a share ends. So what is kept must not last:
//! * of each namespace one unit at a time. After one that got nothing its namespace rests as long as a time to keep,
//!   then twice as long, and so on; what got nothing less often than others of its namespace goes first
//! * of all units together a tenth of the GPUs that could serve the one that is to begin; more only by one unit alone.
//!   Where that is to be, nothing else begins before
//! * for a time to keep (`Patience::keep`), and again for as long whenever something of what is in the way ends, but
//!   five times as long at most. Then its nodes are open to all at least as long as anything was kept there, whoever
//!   may wait
//! * only what the unit would take of certain GPUs (`Aside`). Others are placed beside that. What would end in time is
//!   not let in: Kubernetes tells when a pod ends at the latest (`activeDeadlineSeconds`), never that what is in the
//!   way does not end at once
//! * where shares of its own namespace are in the way, it is kept from its own namespace alone; where whole GPUs of
//!   others are, not at all
//! * where pods of lower priority end for a unit, what they free is kept for it until then (`preempt`)
//!
//! * [`Reserves`]: who, where and until when; `choose`: what a unit would take once shares have ended; `turn`: what is
//!   kept while units have their turns

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde_json::{Value, json};

use crate::allocate::Placement;
use crate::controller::Moment;
use crate::controller::capacity::Aside;
use crate::controller::moves::Moves;
use crate::controller::preempt::Preempting;
use crate::controller::queue::UnitKey;
use crate::controller::view::GpuRef;
use crate::model::names::NodeName;
use crate::model::time::back_off;

/// What was looked for in vain is looked for again after so long.
const ANEW: Duration = Duration::from_secs(10);
/// Times to keep, however much of what is in the way ends meanwhile.
const TIMES_MAX: u32 = 5;
/// Times to keep that a namespace rests at most.
const RESTS_MAX: u32 = 16;
/// One in so many of the GPUs that could serve is kept, if not for one unit alone.
const PART: usize = 10;
/// Units at a time that something is kept for; as many that it is kept from their own namespaces for. Each costs a
/// decision whenever its nodes change.
const UNITS_MAX: usize = 16;

/// Whom something is kept for, and who rests.
#[derive(Debug)]
pub struct Reserves {
    keep: Duration,
    kept: BTreeMap<UnitKey, Reservation>,
    rests: BTreeMap<String, Rest>,
    /// Nodes on which nothing is kept before then.
    open: BTreeMap<NodeName, Moment>,
    /// How often units that still wait got nothing.
    vain: BTreeMap<UnitKey, u32>,
    looked: BTreeMap<UnitKey, UnservedUnit>,
    /// Units whose turn has come in this round: what is kept for them holds for all after them.
    in_force: Vec<UnitKey>,
    /// There is something new to tell.
    news: bool,
    pub evictions: Evictions,
    /// How often something was kept in vain, since this was last taken.
    in_vain: u64,
}

/// For whom other pods leave, and what is kept for whom because of that.
#[derive(Debug, Default)]
pub struct Evictions {
    pub preempting: Preempting,
    /// What others would leave, and leave.
    pub moves: Moves,
}

/// What is kept for a unit.
#[derive(Debug, Clone)]
pub(super) struct Reservation {
    pub namespace: String,
    /// As its own namespace knows it.
    pub name: String,
    pub aside: Aside,
    /// From its own namespace alone.
    pub own: bool,
    /// Pods of lower priority than this, the unit's own, end for it: whoever begins and ends that decides how long it is
    /// kept.
    pub preempted: Option<i32>,
    pub since: Moment,
    pub until: Moment,
    /// The least that was in the way so far.
    pub least: u64,
    /// How its nodes looked when it was chosen.
    pub seen: Vec<[u64; 3]>,
    /// Since when it would not fit there any more. A GPU that goes back to the scheduler is closed for a moment only.
    pub lost: Option<Moment>,
}

#[derive(Debug, Clone, Copy)]
struct Rest {
    times: u32,
    until: Moment,
}

/// A unit for which nothing could be kept.
#[derive(Debug, Clone, Copy)]
struct UnservedUnit {
    again: Moment,
    /// For what is kept for others, which is to end.
    in_line: bool,
}

impl Reserves {
    pub fn new(keep: Duration) -> Self {
        Self {
            keep,
            kept: BTreeMap::new(),
            rests: BTreeMap::new(),
            open: BTreeMap::new(),
            vain: BTreeMap::new(),
            looked: BTreeMap::new(),
            in_force: Vec::new(),
            news: false,
            evictions: Evictions::default(),
            in_vain: 0,
        }
    }

    /// Ends what is over, or for units that are not queued any more. True if anything was.
    pub(super) fn tidy(&mut self, queued: impl Fn(&UnitKey) -> bool, now: Moment) -> bool {
        self.in_force.clear();
        let over = self.kept.iter().filter(|(_, kept)| kept.preempted.is_none());
        let over = over.filter(|(key, kept)| kept.until <= now || !queued(key));
        let over: Vec<UnitKey> = over.map(|(key, _)| key.clone()).collect();
        over.iter().for_each(|key| self.end(key, now));
        let forget = self.keep.saturating_mul(RESTS_MAX);
        self.rests.retain(|_, rest| now < rest.until.saturating_add(forget));
        self.open.retain(|_, until| now < *until);
        self.vain.retain(|key, _| queued(key));
        self.looked.retain(|key, looked| now < looked.again && queued(key));
        !over.is_empty()
    }

    /// Of each namespace the unit that something may be kept for now. `starving`: units in order.
    pub(super) fn first<'a>(
        &self,
        starving: impl Iterator<Item = (&'a UnitKey, &'a str)>,
        now: Moment,
    ) -> BTreeMap<String, UnitKey> {
        let busy = self.kept.values().filter(|kept| kept.preempted.is_none());
        let busy: BTreeSet<&str> = busy.map(|kept| kept.namespace.as_str()).collect();
        let rests = |namespace: &str| self.rests.get(namespace).is_some_and(|rest| now < rest.until);
        let mut first: BTreeMap<String, (u32, &UnitKey)> = BTreeMap::new();
        for (key, namespace) in starving {
            if busy.contains(namespace) || rests(namespace) || self.looked.contains_key(key) {
                continue;
            }
            let vain = self.vain.get(key).copied().unwrap_or(0);
            if first.get(namespace).is_none_or(|(least, _)| vain < *least) {
                first.insert(namespace.to_owned(), (vain, key));
            }
        }
        first.into_iter().map(|(namespace, (_, key))| (namespace, key.clone())).collect()
    }

    /// So many GPUs may be kept beside what is kept, where so many could serve.
    pub(super) fn may_begin(&self, gpus: usize, serve: usize) -> bool {
        let kept = || self.kept.values().filter(|kept| !kept.own && kept.preempted.is_none());
        let all = kept().map(|kept| kept.aside.gpus().count()).sum::<usize>() + gpus;
        kept().count() == 0 || (all.saturating_mul(PART) <= serve && kept().count() < UNITS_MAX)
    }

    /// The same from its own namespace alone.
    pub(super) fn may_begin_own(&self) -> bool {
        self.kept.values().filter(|kept| kept.own).count() < UNITS_MAX
    }

    pub(super) fn begin(&mut self, key: &UnitKey, kept: Reservation) {
        self.looked.remove(key);
        self.kept.insert(key.clone(), kept);
        self.news = true;
    }

    /// When what begins now is over.
    pub(super) fn until(&self, now: Moment) -> Moment {
        now.saturating_add(self.keep)
    }

    /// It was chosen anew. Less is in the way than ever: it is kept for longer.
    pub(super) fn renew(
        &mut self,
        key: &UnitKey,
        aside: Aside,
        (lacking, seen): (u64, Vec<[u64; 3]>),
        now: Moment,
    ) {
        let Some(kept) = self.kept.get_mut(key) else { return };
        if lacking < kept.least {
            let last = kept.since.saturating_add(self.keep.saturating_mul(TIMES_MAX));
            kept.least = lacking;
            kept.until = kept.until.max(now.saturating_add(self.keep).min(last));
        }
        (kept.aside, kept.seen, kept.lost) = (aside, seen, None);
    }

    /// It would not fit on its nodes now. True if that has been so for long.
    pub(super) fn lose(&mut self, key: &UnitKey, now: Moment) -> bool {
        let Some(kept) = self.kept.get_mut(key) else { return false };
        *kept.lost.get_or_insert(now) + ANEW <= now
    }

    /// Nothing came of it. Its namespace and its nodes rest.
    pub(super) fn end(&mut self, key: &UnitKey, now: Moment) {
        let Some(kept) = self.kept.remove(key) else { return };
        self.over(&kept, now, self.keep);
        *self.vain.entry(key.clone()).or_default() += 1;
        let rest = self.rests.entry(kept.namespace).or_insert(Rest { times: 0, until: now });
        let longest = self.keep.saturating_mul(RESTS_MAX);
        rest.until = now.saturating_add(back_off(self.keep, rest.times + 1, longest));
        rest.times = rest.times.saturating_add(1).min(RESTS_MAX);
        self.in_vain += 1;
    }

    /// Something is kept for it for which pods of lower priority end.
    pub(super) fn is_preempted(&self, key: &UnitKey) -> bool {
        self.kept.get(key).is_some_and(|kept| kept.preempted.is_some())
    }

    /// What is kept for units of a namespace for which pods of lower priority end, but for one unit.
    pub(super) fn preempted_places<'a>(
        &'a self,
        namespace: &'a str,
        but: &'a UnitKey,
    ) -> impl Iterator<Item = &'a Placement> {
        let kept = self.kept.iter().filter(move |(key, kept)| {
            *key != but && kept.preempted.is_some() && kept.namespace == namespace
        });
        kept.flat_map(|(_, kept)| &kept.aside.places)
    }

    /// GPUs that are kept for units for which pods of lower priority end.
    pub(super) fn preempted_gpus(&self) -> BTreeSet<GpuRef> {
        let kept = self.kept.values().filter(|kept| kept.preempted.is_some());
        kept.flat_map(|kept| kept.aside.gpus()).map(|(gpu, _)| gpu).collect()
    }

    /// The same is kept until then.
    pub(super) fn keep_until(&mut self, key: &UnitKey, until: Moment) {
        if let Some(kept) = self.kept.get_mut(key).filter(|kept| kept.preempted.is_some()) {
            kept.until = until;
        }
    }

    /// Pods ended for it in vain, or it has what they had.
    pub(super) fn end_preempted(&mut self, key: &UnitKey) {
        if self.kept.get(key).is_some_and(|kept| kept.preempted.is_some()) {
            self.kept.remove(key);
        }
    }

    /// The unit has its place. True if something was kept for it.
    pub(super) fn served(&mut self, key: &UnitKey, now: Moment) -> bool {
        let Some(kept) = self.kept.remove(key) else { return false };
        if kept.preempted.is_some() {
            return true;
        }
        self.over(&kept, now, Duration::ZERO);
        if let Some(rest) = self.rests.get_mut(&kept.namespace) {
            rest.times = rest.times.saturating_sub(1);
        }
        true
    }

    /// Its nodes are open for at least so long.
    fn over(&mut self, kept: &Reservation, now: Moment, least: Duration) {
        // What waits in line may begin now.
        self.looked.clear();
        if kept.own {
            return;
        }
        // It may have been over for a moment.
        let long = kept.until.min(now).saturating_sub(kept.since);
        let until = now.saturating_add(long.max(least));
        for node in kept.aside.nodes() {
            let open = self.open.entry(node).or_insert(until);
            *open = until.max(*open);
        }
    }

    /// Nothing could be kept for it.
    pub(super) fn looked(&mut self, key: &UnitKey, in_line: bool, now: Moment) {
        // As soon as nodes are open no longer there may be a place.
        let opened = self.open.values().copied().filter(|until| *until > now).min();
        let again = (now + ANEW).min(opened.unwrap_or(Moment::MAX));
        self.looked.insert(key.clone(), UnservedUnit { again, in_line });
    }

    pub(super) fn is_in_line(&self, key: &UnitKey) -> bool {
        self.looked.get(key).is_some_and(|looked| looked.in_line)
    }

    /// Nothing may be kept on these nodes now.
    pub(super) fn open_nodes(&self) -> BTreeSet<NodeName> {
        self.open.keys().cloned().collect()
    }

    pub(super) fn of(&self, key: &UnitKey) -> Option<&Reservation> {
        self.kept.get(key)
    }

    /// What is kept for others, from everybody.
    pub(super) fn of_others(&self, key: &UnitKey) -> impl Iterator<Item = &Aside> {
        self.kept.iter().filter(move |(of, kept)| *of != key && !kept.own).map(|(_, kept)| &kept.aside)
    }

    /// From now on in this round it holds.
    pub(super) fn enforce(&mut self, key: &UnitKey) -> Option<&Reservation> {
        let kept = self.kept.get(key)?;
        self.in_force.push(key.clone());
        Some(kept)
    }

    /// It holds in this round already.
    pub(super) fn is_in_force(&self, key: &UnitKey) -> bool {
        self.in_force.contains(key)
    }

    /// What others end for counts as taken for units of the same priority, too, whose turns come before.
    pub(super) fn preempted_from(&self, key: &UnitKey, priority: i32) -> Vec<Aside> {
        let kept = self.kept.iter().filter(|(of, kept)| {
            *of != key && kept.preempted.is_some_and(|own| own >= priority) && !self.is_in_force(of)
        });
        kept.map(|(_, kept)| kept.aside.clone()).collect()
    }

    /// What is kept from pods of a namespace now.
    pub(super) fn kept_from(&self, namespace: &str) -> impl Iterator<Item = &Reservation> {
        let kept = self.in_force.iter().filter_map(|key| self.kept.get(key));
        kept.filter(move |kept| !kept.own || kept.namespace == namespace)
    }

    /// When time alone changes something.
    pub fn next(&mut self, now: Moment) -> Option<Moment> {
        let news = std::mem::take(&mut self.news).then_some(now);
        let rests = self.rests.values().map(|rest| rest.until);
        let looked = self.looked.values().map(|looked| looked.again);
        let lost = self.kept.values().filter_map(|kept| Some(kept.lost? + ANEW));
        let until = self.kept.values().filter(|kept| kept.preempted.is_none()).map(|kept| kept.until);
        let all = until.chain(lost).chain(rests).chain(looked);
        all.chain(self.open.values().copied()).filter(|due| *due > now).chain(news).min()
    }

    /// How often something was kept in vain since this was last called.
    pub fn take_in_vain(&mut self) -> u64 {
        std::mem::take(&mut self.in_vain)
    }

    /// Units that something is kept for, and on how many GPUs.
    pub fn counts(&self) -> (usize, usize) {
        let gpus: BTreeSet<GpuRef> =
            self.kept.values().flat_map(|kept| kept.aside.gpus()).map(|(gpu, _)| gpu).collect();
        (self.kept.len(), gpus.len())
    }

    /// For who asks the process.
    pub fn state(&self) -> Value {
        let kept = self.kept.values().map(|kept| {
            let gpus: BTreeSet<String> = kept.aside.gpus().map(|(gpu, _)| gpu.to_string()).collect();
            json!({"namespace": kept.namespace, "for": kept.name, "gpus": gpus,
                "fromItsNamespaceOnly": kept.own, "untilSecond": kept.until.as_secs()})
        });
        kept.collect()
    }
}
