//! For whom pods of lower priority end, which of them, and how far that has come. Nobody ends in vain for ever:
//! * one set of pods at a time for each pod or gang, and nothing more before they are gone
//! * so many evictions in a minute, for all and for the pods of one namespace
//! * where nothing came of it, since the pod was not bound, the namespace that asked rests, longer each time; the pod or
//!   gang alone where a pod was given more time to end than is waited for
//! * a pod or gang for which others ended in vain rests by itself, longer each time, whoever else of its namespace is bound
//! * a pod that the API server does not let go is left alone for a while
//! * who is given more time to end than others are waited for ends first, and the others once it has ended
//!
//! A pod that waits for a whole GPU of kube-scheduler's is such a unit, too: its GPU is given back once shares there have
//! ended ([`Goal::Whole`]).
//!
//! Of what was begun a new leader knows what the API shows: pods that are ending, which count as free before any other
//! ends.
//!
//! ```text
//!          all evictions are asked for, one after another        its share is decided         bound
//! (found) ───────────────────→ Evicting ────────────────────────→ Placed ──────────────────→ (served)
//!                                 │ time over, refused               │ taken back, gone
//!                                 └────────→ (in vain) ←─────────────┘
//! ```

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use crate::cluster::eviction::Eviction;
use crate::controller::Moment;
use crate::controller::holders::Holders;
use crate::controller::looks::{LookedUnit, Looks};
use crate::controller::queue::UnitKey;
use crate::controller::view::GpuRef;
use crate::controller::write::Failure;
use crate::model::claim::PodRef;
use crate::model::names::PodUid;
use crate::model::time::back_off;

/// Evictions in a minute, for all.
pub const EVICTIONS_MAX: usize = 240;
/// The same for pods of one namespace.
pub const EVICTIONS_OF_NAMESPACE_MAX: usize = 60;
const MINUTE: Duration = Duration::from_secs(60);
/// Pods that end for one.
pub const VICTIMS_MAX: usize = 32;
/// Units at a time for which others end.
const UNDER_WAY_MAX: usize = 32;
/// Of one namespace.
const UNDER_WAY_OF_NAMESPACE_MAX: usize = 8;
/// First rest of a namespace for which pods ended in vain; doubled each time, up to the last.
const REST_FIRST: Duration = Duration::from_secs(60);
const REST_LAST: Duration = Duration::from_secs(3600);
/// The same of the pod or gang itself: nobody here knows what it really waits for.
const REST_LAST_OF_UNIT: Duration = Duration::from_secs(21_600);
/// After so long without one it begins anew.
const FORGET: Duration = Duration::from_secs(7200);
/// A unit that was put off is looked at again after so long.
const PUT_OFF: Duration = Duration::from_secs(5);
/// A pod that was not let go is left alone for so long.
const SPARED: Duration = Duration::from_secs(30);
/// The same where the API server refused, for whatever reason.
const SPARED_LONG: Duration = Duration::from_secs(600);
/// An eviction that was not answered is asked for again.
const AGAIN: Duration = Duration::from_secs(2);

/// What pods end for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Goal {
    /// The unit's shares are placed in their room.
    Share,
    /// These GPUs are given back to kube-scheduler, and take no shares until then.
    Whole(BTreeSet<GpuRef>),
}

/// Whom pods end for.
#[derive(Debug)]
pub struct Preemption {
    pub namespace: String,
    /// Of the unit, when it began.
    pub pods: Vec<PodUid>,
    pub goal: Goal,
    pub victims: Vec<Victim>,
    pub since: Moment,
    /// All of them are to have ended by then.
    pub until: Moment,
    pub stage: PreemptionStage,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PreemptionStage {
    Evicting,
    /// Its share is decided, or its claim has its GPU.
    Placed,
}

/// A pod that ends for another.
#[derive(Debug, Clone)]
pub struct Victim {
    pub at: PodRef,
    /// What it is told.
    pub words: String,
    /// It is given more time to end than others are waited for: nobody else ends before it has.
    pub slow: bool,
    /// Its eviction was asked for, and nobody knows whether that was done.
    pub unsure: bool,
    pub step: EvictionStep,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EvictionStep {
    /// Not before then.
    ToAsk(Moment),
    Asked,
    Ends,
}

/// Why a unit has nobody end for it now, though somebody could.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PutOff {
    /// Too many evictions in a minute.
    Rate,
    /// So much was begun already.
    UnderWay,
    /// It takes too many pods.
    Victims,
    /// What ended before for its namespace did so in vain.
    Rests,
    /// Its namespace has spent its part of the round before all nodes were looked at.
    Spent,
}

impl PutOff {
    pub const ALL: [Self; 5] = [Self::Rate, Self::UnderWay, Self::Victims, Self::Rests, Self::Spent];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Rate => "rate",
            Self::UnderWay => "under-way",
            Self::Victims => "victims",
            Self::Rests => "rests",
            Self::Spent => "spent",
        }
    }
}

/// What a look came to.
#[derive(Debug, Clone, Copy, Default)]
pub struct LookOutcome {
    /// Who could end was found, and does not end now.
    pub put_off: Option<PutOff>,
    /// It came to so many nodes, and there are more.
    pub left_at: Option<usize>,
}

/// How often, since this was last taken.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PreemptionCounts {
    pub begun: u64,
    pub served: u64,
    pub in_vain: u64,
    pub put_off: BTreeMap<PutOff, u64>,
}

/// What follows from an answer.
#[derive(Debug, PartialEq, Eq)]
pub enum EvictionResult {
    Nothing,
    /// The pod ends, and is told these words.
    Ends(PodRef, String),
    /// It does not end: nothing more is done for this unit now.
    Stays {
        unit: UnitKey,
        words: String,
    },
}

#[derive(Debug, Clone, Copy)]
struct Rest {
    times: u32,
    until: Moment,
}

impl Rest {
    fn none(now: Moment) -> Self {
        Self { times: 0, until: now }
    }

    /// From now on, twice as long as the time before.
    fn again(&mut self, last: Duration, now: Moment) {
        self.until = now.saturating_add(back_off(REST_FIRST, self.times + 1, last));
        self.times = self.times.saturating_add(1).min(16);
    }
}

#[derive(Debug, Default)]
pub struct Preempting {
    pub holders: Holders,
    under_way: BTreeMap<UnitKey, Preemption>,
    rests: BTreeMap<String, Rest>,
    /// Of units for which pods ended in vain.
    unit_rests: BTreeMap<UnitKey, Rest>,
    /// Evictions of the last minute: when, and for which namespace.
    asked: VecDeque<(Moment, String)>,
    /// What those pods are told whose eviction nobody has answered yet. The answer may come after the pod's end, and after
    /// what the pod ended for is over.
    unanswered: BTreeMap<PodUid, String>,
    pub looks: Looks,
    spared: BTreeMap<PodUid, Moment>,
    counts: PreemptionCounts,
}

impl Preempting {
    /// What was counted since this was last called.
    pub fn take_counts(&mut self) -> PreemptionCounts {
        std::mem::take(&mut self.counts)
    }

    #[cfg(test)]
    pub fn counts(&self) -> &PreemptionCounts {
        &self.counts
    }

    /// The unit may be looked at now: nothing is under way for it, and something has changed since it was last looked at.
    pub fn may_look(&self, key: &UnitKey, epoch: u64, now: Moment) -> bool {
        let present = (self.holders.version(), epoch);
        self.looks.is_due(key, present, now) && !self.under_way.contains_key(key)
    }

    /// A unit of this namespace was looked at.
    pub fn looked(&mut self, (key, namespace): (&UnitKey, &str), epoch: u64, look: LookOutcome, now: Moment) {
        let again = look.put_off.map(|why| match (why, self.rests_until(key, namespace, now)) {
            (PutOff::Rests, Some(until)) => until,
            _ => now + PUT_OFF,
        });
        // A look in several parts knows of what was there when it began.
        let known = self.looks.begun(key).unwrap_or((self.holders.version(), epoch));
        self.looks
            .note((key, namespace), LookedUnit { known, at: now, again, from: look.left_at.unwrap_or(0) });
    }

    /// A unit of this namespace was to be looked at, and was not.
    pub fn passed_over(&mut self, (key, namespace): (&UnitKey, &str), epoch: u64, now: Moment) {
        let (known, from) = ((self.holders.version(), epoch), self.looks.from(key));
        self.looks.note((key, namespace), LookedUnit { known, at: now, again: Some(now + PUT_OFF), from });
    }

    /// The unit or its namespace rests until then.
    fn rests_until(&self, key: &UnitKey, namespace: &str, now: Moment) -> Option<Moment> {
        let both = [self.rests.get(namespace), self.unit_rests.get(key)];
        both.into_iter().flatten().map(|rest| rest.until).max().filter(|until| now < *until)
    }

    /// Whether so many pods may end for a unit of this namespace now.
    ///
    /// # Errors
    /// Why they may not. That is counted.
    pub fn may_begin(
        &mut self,
        key: &UnitKey,
        namespace: &str,
        victims: usize,
        now: Moment,
    ) -> Result<(), PutOff> {
        while self.asked.front().is_some_and(|(at, _)| *at + MINUTE <= now) {
            self.asked.pop_front();
        }
        // What was begun and is not asked for yet will be.
        let open = |of: Option<&str>| {
            let all = self.under_way.values().filter(|one| of.is_none_or(|of| one.namespace == of));
            let to_ask = |one: &&Victim| matches!(one.step, EvictionStep::ToAsk(_));
            all.flat_map(|one| &one.victims).filter(to_ask).count()
        };
        let own = self.asked.iter().filter(|(_, of)| of == namespace).count() + open(Some(namespace));
        let all = self.asked.len() + open(None);
        let units = self.under_way.values().filter(|one| one.stage == PreemptionStage::Evicting);
        let own_units = units.clone().filter(|one| one.namespace == namespace).count();
        let put_off = if self.rests_until(key, namespace, now).is_some() {
            PutOff::Rests
        } else if victims > VICTIMS_MAX {
            PutOff::Victims
        } else if own_units >= UNDER_WAY_OF_NAMESPACE_MAX || units.count() >= UNDER_WAY_MAX {
            PutOff::UnderWay
        } else if own + victims > EVICTIONS_OF_NAMESPACE_MAX || all + victims > EVICTIONS_MAX {
            PutOff::Rate
        } else {
            return Ok(());
        };
        Err(self.put_off(put_off))
    }

    /// Counts it.
    pub fn put_off(&mut self, why: PutOff) -> PutOff {
        *self.counts.put_off.entry(why).or_default() += 1;
        why
    }

    pub fn begin(&mut self, key: UnitKey, preemption: Preemption) {
        self.counts.begun += 1;
        self.under_way.insert(key, preemption);
    }

    pub fn is_under_way(&self, key: &UnitKey) -> bool {
        self.under_way.contains_key(key)
    }

    pub fn under_way(&self) -> impl Iterator<Item = (&UnitKey, &Preemption)> {
        self.under_way.iter()
    }

    /// The GPU is to be given back once shares there have ended.
    pub fn gives_back(&self, gpu: &GpuRef) -> bool {
        let evicting = self.under_way.values().filter(|one| one.stage == PreemptionStage::Evicting);
        evicting.into_iter().any(|one| matches!(&one.goal, Goal::Whole(gpus) if gpus.contains(gpu)))
    }

    /// The GPUs that are to be given back for a unit.
    pub fn gpus_for(&self, key: &UnitKey) -> Vec<GpuRef> {
        match self.under_way.get(key).map(|one| &one.goal) {
            Some(Goal::Whole(gpus)) => gpus.iter().cloned().collect(),
            Some(Goal::Share) | None => Vec::new(),
        }
    }

    /// It goes on until then.
    pub fn set_until(&mut self, key: &UnitKey, until: Moment) {
        if let Some(one) = self.under_way.get_mut(key) {
            one.until = until;
        }
    }

    /// One of the pods does not end. Those that are ending do so in vain.
    pub fn stop(&mut self, key: &UnitKey, now: Moment) {
        let ends = |one: &Preemption| one.victims.iter().any(|victim| victim.step == EvictionStep::Ends);
        match self.under_way.get(key).is_some_and(ends) {
            true => self.in_vain(key, now),
            false => drop(self.under_way.remove(key)),
        }
    }

    /// Units for which pods are ending.
    pub fn evicting(&self) -> usize {
        self.under_way.values().filter(|one| one.stage == PreemptionStage::Evicting).count()
    }

    pub fn placed(&mut self, key: &UnitKey) {
        if let Some(one) = self.under_way.get_mut(key) {
            one.stage = PreemptionStage::Placed;
            one.victims.clear();
        }
    }

    /// These pods of the unit have the room, and those that it was for go on waiting. Nobody else ends for these meanwhile.
    pub fn went_to(&mut self, key: &UnitKey, pods: Vec<PodUid>) {
        match (pods.is_empty(), self.under_way.get_mut(key)) {
            (true, _) => drop(self.under_way.remove(key)),
            (false, Some(one)) => one.pods = pods,
            (false, None) => {}
        }
        self.placed(key);
    }

    /// The pod is to end for another, or was not let go a moment ago.
    pub fn is_spared(&self, pod: &PodUid, now: Moment) -> bool {
        self.spared.get(pod).is_some_and(|until| now < *until)
    }

    /// Pods that are to end for others, each with whom it ends for.
    pub fn chosen(&self) -> BTreeMap<&PodUid, &UnitKey> {
        let all = self.under_way.iter();
        all.flat_map(|(key, one)| one.victims.iter().map(move |victim| (&victim.at.uid, key))).collect()
    }

    /// It was bound.
    pub fn served(&mut self, key: &UnitKey) {
        if let Some(one) = self.under_way.remove(key) {
            self.counts.served += 1;
            self.rests.remove(&one.namespace);
            self.unit_rests.remove(key);
        }
    }

    /// Nothing came of it.
    pub fn in_vain(&mut self, key: &UnitKey, now: Moment) {
        let Some(one) = self.under_way.remove(key) else { return };
        self.counts.in_vain += 1;
        self.rests.entry(one.namespace).or_insert(Rest::none(now)).again(REST_LAST, now);
        self.unit_rests.entry(key.clone()).or_insert(Rest::none(now)).again(REST_LAST_OF_UNIT, now);
    }

    /// Nothing came of it in time, since a pod was given more time to end than is waited for: that is nothing that the
    /// namespace could help, and the unit itself rests.
    pub fn outlived(&mut self, key: &UnitKey, now: Moment) {
        if self.under_way.remove(key).is_some() {
            self.counts.in_vain += 1;
            self.unit_rests.entry(key.clone()).or_insert(Rest::none(now)).again(REST_LAST_OF_UNIT, now);
        }
    }

    /// Forgets what is over.
    pub fn tidy(&mut self, is_queued: impl Fn(&UnitKey) -> bool, now: Moment) {
        self.rests.retain(|_, rest| now < rest.until.saturating_add(FORGET));
        self.unit_rests.retain(|_, rest| now < rest.until.saturating_add(FORGET));
        self.spared.retain(|_, until| now < *until);
        self.looks.tidy(is_queued, now);
    }

    /// Evictions to be asked for now: of each unit one after another, so that nobody else ends for it where one may not.
    /// `is_there`: the pod has not ended yet.
    pub fn due(&mut self, is_there: impl Fn(&PodUid) -> bool, now: Moment) -> Vec<PodRef> {
        let mut due = Vec::new();
        for one in self.under_way.values_mut().filter(|one| one.stage == PreemptionStage::Evicting) {
            if one.victims.iter().any(|victim| victim.step == EvictionStep::Asked) {
                continue;
            }
            let waits = |victim: &Victim| {
                victim.slow && victim.step == EvictionStep::Ends && is_there(&victim.at.uid)
            };
            let is_waiting = one.victims.iter().any(waits);
            let next = one.victims.iter_mut().find(|victim| matches!(victim.step, EvictionStep::ToAsk(_)));
            let next = next.filter(|victim| victim.slow || !is_waiting);
            if let Some(victim) =
                next.filter(|victim| matches!(victim.step, EvictionStep::ToAsk(at) if at <= now))
            {
                victim.step = EvictionStep::Asked;
                self.asked.push_back((now, one.namespace.clone()));
                self.unanswered.insert(victim.at.uid.clone(), victim.words.clone());
                due.push(victim.at.clone());
            }
        }
        due
    }

    /// What became of an eviction.
    pub fn answered(
        &mut self,
        pod: &PodRef,
        result: Result<Eviction, Failure>,
        now: Moment,
    ) -> EvictionResult {
        let asked = |victim: &&mut Victim| victim.at.uid == pod.uid && victim.step == EvictionStep::Asked;
        let found = self
            .under_way
            .iter_mut()
            .find_map(|(key, one)| one.victims.iter_mut().find(asked).map(|victim| (key.clone(), victim)));
        let words = self.unanswered.remove(&pod.uid);
        let is_done = match &result {
            Ok(Eviction::Evicted) => true,
            Ok(Eviction::Gone) => found.as_ref().is_some_and(|(_, victim)| victim.unsure),
            Ok(Eviction::Protected(_)) | Err(_) => false,
        };
        if let (true, Some(words)) = (is_done, words) {
            if let Some((_, victim)) = found {
                victim.step = EvictionStep::Ends;
            }
            return EvictionResult::Ends(pod.clone(), words);
        }
        let Some((unit, victim)) = found else { return EvictionResult::Nothing };
        let (long, words) = match result {
            Ok(Eviction::Evicted | Eviction::Gone) => {
                victim.step = EvictionStep::Ends;
                return EvictionResult::Nothing;
            }
            Err(
                failure @ (Failure::Silent(_) | Failure::Busy(_) | Failure::Conflict | Failure::NotLeading),
            ) => {
                victim.unsure |= matches!(failure, Failure::Silent(_));
                victim.step = EvictionStep::ToAsk(now + AGAIN);
                return EvictionResult::Nothing;
            }
            Ok(Eviction::Protected(words)) => (SPARED, words),
            Err(failure @ (Failure::Refused(_) | Failure::Gone)) => (SPARED_LONG, failure.words()),
        };
        self.spared.insert(pod.uid.clone(), now + long);
        EvictionResult::Stays { unit, words }
    }

    /// When time alone changes something.
    pub fn next(&self, epoch: u64, now: Moment) -> Option<Moment> {
        let victims = self.under_way.values().flat_map(|one| &one.victims);
        let due = victims.filter_map(|victim| match victim.step {
            EvictionStep::ToAsk(at) => Some(at),
            EvictionStep::Asked | EvictionStep::Ends => None,
        });
        let until =
            self.under_way.values().filter(|one| one.stage == PreemptionStage::Evicting).map(|one| one.until);
        let rests = self.rests.values().chain(self.unit_rests.values()).map(|rest| rest.until);
        let looks = self.looks.next((self.holders.version(), epoch), now);
        due.chain(until).chain(rests).filter(|due| *due > now).chain(looks).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Moment = Duration::from_secs(1000);
    const IS_THERE: fn(&PodUid) -> bool = |_| true;

    fn pod(name: &str) -> PodRef {
        PodRef { namespace: "ml".into(), name: name.into(), uid: name.into() }
    }

    fn unit(name: &str) -> UnitKey {
        UnitKey::Pod(name.into())
    }

    fn preemption(namespace: &str, victims: &[&str]) -> Preemption {
        let victim = |name: &&str| Victim {
            at: pod(name),
            words: format!("{name} ends"),
            slow: false,
            unsure: false,
            step: EvictionStep::ToAsk(NOW),
        };
        Preemption {
            namespace: namespace.to_owned(),
            pods: vec!["high".into()],
            goal: Goal::Share,
            victims: victims.iter().map(victim).collect(),
            since: NOW,
            until: NOW + MINUTE,
            stage: PreemptionStage::Evicting,
        }
    }

    #[test]
    fn pods_end_one_after_another_and_none_more_once_one_is_protected() {
        let mut all = Preempting::default();
        all.begin(unit("high"), preemption("ml", &["a", "b", "c"]));
        assert_eq!(all.due(IS_THERE, NOW), [pod("a")]);
        assert_eq!(all.due(IS_THERE, NOW), [], "one at a time");
        assert_eq!(
            all.answered(&pod("a"), Ok(Eviction::Evicted), NOW),
            EvictionResult::Ends(pod("a"), "a ends".into())
        );
        assert_eq!(all.due(IS_THERE, NOW), [pod("b")]);
        let silent = Err(Failure::Silent("no answer".into()));
        assert_eq!(all.answered(&pod("b"), silent, NOW), EvictionResult::Nothing);
        assert_eq!((all.due(IS_THERE, NOW), all.next(0, NOW)), (vec![], Some(NOW + AGAIN)));
        assert_eq!(all.due(IS_THERE, NOW + AGAIN), [pod("b")]);
        let words = "a budget".to_owned();
        let told = all.answered(&pod("b"), Ok(Eviction::Protected(words.clone())), NOW + AGAIN);
        assert_eq!(told, EvictionResult::Stays { unit: unit("high"), words });
        all.in_vain(&unit("high"), NOW + AGAIN);
        assert_eq!(all.due(IS_THERE, NOW + AGAIN), []);
        assert!(all.is_spared(&"b".into(), NOW + AGAIN) && !all.is_spared(&"b".into(), NOW + AGAIN + SPARED));
    }

    #[test]
    fn who_was_evicted_is_told_so_though_the_answer_comes_after_all_is_over() {
        for over in [Preempting::placed, Preempting::served] {
            let mut all = Preempting::default();
            all.begin(unit("high"), preemption("ml", &["a"]));
            assert_eq!(all.due(IS_THERE, NOW), [pod("a")]);
            over(&mut all, &unit("high"));
            let told = all.answered(&pod("a"), Ok(Eviction::Evicted), NOW);
            assert_eq!(told, EvictionResult::Ends(pod("a"), "a ends".into()));
            assert_eq!(all.answered(&pod("a"), Ok(Eviction::Evicted), NOW), EvictionResult::Nothing, "once");
        }
    }

    #[test]
    fn who_was_evicted_without_an_answer_is_told_so_once_it_is_seen_ending() {
        let mut all = Preempting::default();
        all.begin(unit("high"), preemption("ml", &["a", "b"]));
        assert_eq!(all.due(IS_THERE, NOW), [pod("a")]);
        all.answered(&pod("a"), Err(Failure::Silent("no answer".into())), NOW);
        assert_eq!(all.due(IS_THERE, NOW + AGAIN), [pod("a")]);
        let told = all.answered(&pod("a"), Ok(Eviction::Gone), NOW + AGAIN);
        assert_eq!(told, EvictionResult::Ends(pod("a"), "a ends".into()));
        // Somebody else ends the other.
        assert_eq!(all.due(IS_THERE, NOW + AGAIN), [pod("b")]);
        assert_eq!(all.answered(&pod("b"), Ok(Eviction::Gone), NOW + AGAIN), EvictionResult::Nothing);
        assert!(all.unanswered.is_empty());
    }

    #[test]
    fn nobody_ends_before_who_is_given_more_time_has_ended() {
        let mut all = Preempting::default();
        let mut slow = preemption("ml", &["a", "b", "c"]);
        slow.victims[0].slow = true;
        slow.victims[1].slow = true;
        all.begin(unit("high"), slow);
        for name in ["a", "b"] {
            assert_eq!(all.due(IS_THERE, NOW), [pod(name)]);
            all.answered(&pod(name), Ok(Eviction::Evicted), NOW);
        }
        assert_eq!(all.due(IS_THERE, NOW), []);
        assert_eq!(all.due(|uid| uid.as_str() == "b", NOW), []);
        assert_eq!(all.due(|uid| uid.as_str() == "c", NOW), [pod("c")]);
        all.outlived(&unit("high"), NOW);
        assert_eq!(all.may_begin(&unit("high"), "ml", 1, NOW), Err(PutOff::Rests));
        assert_eq!(all.may_begin(&unit("other"), "ml", 1, NOW), Ok(()));
    }

    #[test]
    fn a_namespace_rests_longer_each_time_until_one_of_its_pods_is_bound() {
        let mut all = Preempting::default();
        let mut now = NOW;
        for seconds in [60, 120, 240, 480, 960, 1920, 3600, 3600] {
            all.begin(unit("high"), preemption("ml", &["a"]));
            all.in_vain(&unit("high"), now);
            assert_eq!(all.may_begin(&unit("new"), "ml", 1, now), Err(PutOff::Rests));
            assert_eq!(all.may_begin(&unit("new"), "other", 1, now), Ok(()));
            now += Duration::from_secs(seconds);
            assert_eq!(all.may_begin(&unit("new"), "ml", 1, now), Ok(()), "after {seconds} s");
        }
        all.begin(unit("high"), preemption("ml", &["a"]));
        all.placed(&unit("high"));
        all.served(&unit("high"));
        all.begin(unit("high"), preemption("ml", &["a"]));
        all.in_vain(&unit("high"), now);
        assert_eq!(all.may_begin(&unit("new"), "ml", 1, now + REST_FIRST), Ok(()));
        assert_eq!((all.counts.served, all.counts.in_vain), (1, 9));
    }

    #[test]
    fn a_unit_rests_longer_each_time_whoever_else_of_its_namespace_is_bound() {
        let mut all = Preempting::default();
        let mut now = NOW;
        for seconds in [60, 120, 240, 480, 960, 1920, 3840, 7680, 15_360, 21_600, 21_600] {
            all.begin(unit("high"), preemption("ml", &["a"]));
            all.in_vain(&unit("high"), now);
            all.begin(unit("served"), preemption("ml", &["b"]));
            all.served(&unit("served"));
            assert_eq!(all.may_begin(&unit("other"), "ml", 1, now), Ok(()));
            let until = now + Duration::from_secs(seconds);
            for at in [now, until - Duration::from_secs(1)] {
                assert_eq!(all.may_begin(&unit("high"), "ml", 1, at), Err(PutOff::Rests), "{seconds} s");
            }
            let look = LookOutcome { put_off: Some(PutOff::Rests), left_at: None };
            all.looked((&unit("high"), "ml"), 0, look, now);
            assert!(!all.may_look(&unit("high"), 1, until - Duration::from_secs(1)));
            assert!(all.may_look(&unit("high"), 1, until));
            all.tidy(|_| true, until);
            now = until;
            assert_eq!(all.may_begin(&unit("high"), "ml", 1, now), Ok(()), "after {seconds} s");
        }
        all.tidy(|_| true, now + FORGET);
        assert!(all.unit_rests.is_empty());
    }

    #[test]
    fn evictions_are_so_many_in_a_minute_for_a_namespace_and_for_all() {
        let mut all = Preempting::default();
        let mut asked = 0;
        let mut refused = BTreeSet::new();
        for nth in 0..100 {
            let key = unit(&format!("u{nth}"));
            match all.may_begin(&key, "ml", 10, NOW) {
                Ok(()) => {
                    let names: Vec<String> = (0..10).map(|one| format!("p{nth}-{one}")).collect();
                    let names: Vec<&str> = names.iter().map(String::as_str).collect();
                    all.begin(key.clone(), preemption("ml", &names));
                    while let [pod] = &all.due(IS_THERE, NOW)[..] {
                        asked += 1;
                        all.answered(pod, Ok(Eviction::Evicted), NOW);
                    }
                    all.placed(&key);
                    all.served(&key);
                }
                Err(why) => drop(refused.insert(why)),
            }
        }
        assert_eq!((asked, refused), (EVICTIONS_OF_NAMESPACE_MAX, BTreeSet::from([PutOff::Rate])));
        assert_eq!(all.may_begin(&unit("new"), "other", 10, NOW), Ok(()));
        assert_eq!(all.may_begin(&unit("new"), "other", VICTIMS_MAX + 1, NOW), Err(PutOff::Victims));
        assert_eq!(all.may_begin(&unit("new"), "ml", 10, NOW + MINUTE), Ok(()));
        assert_eq!(all.counts.put_off[&PutOff::Rate], 94);
    }
}
