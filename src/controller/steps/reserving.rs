//! What is kept while units have their turns, one after another: who comes later goes beside what is kept for who
//! came before.

mod choose;

use std::collections::{BTreeMap, BTreeSet};

use crate::controller::Moment;
use crate::controller::capacity::{Aside, Capacity};
use crate::controller::core::Core;
use crate::controller::queue::{Turn, UnitKey};
use crate::controller::recorder::{KEPT_FOR, Reason};
use crate::controller::reserve::Reservation;
use crate::controller::steps::place::Refused;
use crate::controller::steps::reserving::choose::Within;
use crate::model::names::NodeName;

/// Units that are looked for a place in a round, at most.
const CHOICES_MAX: u32 = 4;

/// What a round knows of keeping.
#[derive(Debug)]
pub struct Keeping {
    /// By namespace.
    first: BTreeMap<String, UnitKey>,
    emptied: Option<Capacity>,
    choices: u32,
    /// Somebody waits in line: nothing begins before.
    in_line: bool,
}

impl Core {
    pub(in crate::controller) fn begin_keeping(&mut self, turns: &[Turn], now: Moment) -> Keeping {
        let (queue, demand) = (&self.queue, &self.pods.demand);
        let waits = |key: &UnitKey| match key {
            UnitKey::Pod(pod) => queue.has(key) || demand.contains(pod),
            UnitKey::Gang { .. } => queue.has(key),
        };
        self.reserves.evictions.preempting.tidy(waits, now);
        if self.reserves.tidy(|key| queue.has(key), now) {
            self.capacity.news();
        }
        let starving = turns.iter().filter(|turn| turn.starving);
        let starving = starving.filter_map(|turn| Some((&turn.key, self.namespace(turn)?)));
        let first = self.reserves.first(starving, now);
        Keeping { first, emptied: None, choices: CHOICES_MAX, in_line: false }
    }

    pub(in crate::controller) fn namespace(&self, turn: &Turn) -> Option<&str> {
        turn.pods.first().and_then(|pod| self.view.pod(pod)).map(|pod| pod.at.namespace.as_str())
    }

    /// Places a unit beside what is kept for those before it.
    pub(in crate::controller) fn place_beside(&mut self, turn: &Turn, now: Moment) -> Result<bool, Refused> {
        let namespace = self.namespace(turn).unwrap_or_default().to_owned();
        let own = self.reserves.kept_from(&namespace).find(|kept| kept.own).map(|kept| kept.aside.clone());
        let preempted = self.reserves.preempted_from(&turn.key, turn.priority);
        let more: Vec<Aside> = own.into_iter().chain(preempted).collect();
        more.iter().for_each(|aside| self.set_aside(aside));
        let moves = self.set_moves_aside(turn);
        let placed = self.place(turn, now);
        for _ in 0..moves + more.len() {
            self.capacity.lift();
        }
        let Err(mut refused) = placed else { return placed };
        if !matches!(refused.reason, Reason::Claim | Reason::Bound)
            && let Some(words) = self.words_of_kept(&namespace)
            && self.fits_otherwise(turn, now)
        {
            refused.words = format!("{}; {words}", refused.words);
            refused.reason = Reason::Reserved;
        }
        if let Some(kept) = self.reserves.of(&turn.key) {
            let from = if kept.own { " by its own namespace, whose shares are in the way," } else { "" };
            refused.words = format!("{KEPT_FOR}{from} {}; {}", self.until(kept), refused.words);
        }
        self.suggest(turn, &mut refused);
        Err(refused)
    }

    /// Until [`Self::back_to_usual`] all that is kept from the unit counts as taken, also where others have it yet: what
    /// they leave is for whoever it is kept for. What was set aside so far.
    pub(super) fn set_all_aside(&mut self, turn: &Turn, namespace: &str) -> Vec<Aside> {
        let usual = self.capacity.lift_all();
        let kept: Vec<Aside> = self.reserves.kept_from(namespace).map(|kept| kept.aside.clone()).collect();
        kept.into_iter().for_each(|aside| self.capacity.set_aside(aside));
        self.set_moves_aside(turn);
        usual
    }

    /// The same of all that is kept for others, in force or not, after the turns of a round.
    pub(super) fn set_aside_for_others(&mut self, key: &UnitKey, priority: i32) -> Vec<Aside> {
        let usual = self.capacity.lift_all();
        let kept: Vec<Aside> = self.reserves.of_others(key).cloned().collect();
        let moves = self.reserves.evictions.moves.kept_from(key, priority, &BTreeSet::new());
        kept.into_iter().chain(moves).for_each(|aside| self.capacity.set_aside(aside));
        usual
    }

    pub(super) fn back_to_usual(&mut self, usual: Vec<Aside>) {
        self.capacity.lift_all();
        usual.into_iter().for_each(|aside| self.capacity.set_aside(aside));
    }

    /// A unit, as its own namespace knows it.
    pub(super) fn name_of(&self, key: &UnitKey) -> String {
        match key {
            UnitKey::Gang { name, .. } => format!("gang {name}"),
            UnitKey::Pod(uid) => {
                format!("pod {}", self.view.pod(uid).map_or("", |pod| pod.at.name.as_str()))
            }
        }
    }

    /// It would fit if nothing were kept.
    fn fits_otherwise(&mut self, turn: &Turn, now: Moment) -> bool {
        let aside = self.capacity.lift_all();
        let fits = self.parts(turn, now).is_some_and(|parts| self.first_way(&parts).is_some());
        aside.into_iter().for_each(|aside| self.capacity.set_aside(aside));
        fits
    }

    /// What is kept from pods of a namespace. None: nothing is.
    fn words_of_kept(&self, namespace: &str) -> Option<String> {
        let mut kept = self.reserves.kept_from(namespace);
        let first = kept.next()?;
        // Names of others' pods are nobody's business.
        let whom = match first.namespace == namespace {
            true => first.name.as_str(),
            false => "a pod of another namespace",
        };
        let more = match kept.count() {
            0 => String::new(),
            more => format!(", and for {more} more"),
        };
        Some(format!("kept for {whom}, which goes first, {}{more}", self.until(first)))
    }

    /// What is kept, and until when.
    pub(in crate::controller) fn until(&self, kept: &Reservation) -> String {
        let (mut gpus, mut mib) = (BTreeSet::new(), 0);
        for (gpu, grant) in kept.aside.gpus() {
            mib += grant.memory.mib_ceil();
            gpus.insert(gpu);
        }
        let first = gpus.first().map(ToString::to_string).unwrap_or_default();
        let gpus = match gpus.len() {
            1 => first,
            count => format!("{count} GPUs, {first} and others"),
        };
        let until = self.recorder.time_of(kept.until);
        let until = until.map_or_else(|| "for good".to_owned(), |until| format!("until {until}"));
        format!("{until}: {mib} MiB of {gpus}")
    }

    /// Keeps a place for a unit that has been passed for too long and still waits, if there is one to be kept.
    pub(in crate::controller) fn keep_for(&mut self, turn: &Turn, keeping: &mut Keeping, now: Moment) {
        match self.reserves.of(&turn.key).is_some() {
            true => self.look_anew(turn, now),
            false => self.begin_for(turn, keeping, now),
        }
        let kept = self.reserves.enforce(&turn.key).filter(|kept| !kept.own);
        if let Some(aside) = kept.map(|kept| kept.aside.clone()) {
            self.set_aside(&aside);
        }
    }

    /// Others end for the unit, which is not tried now: what they leave is kept from those after it.
    pub(in crate::controller) fn hold_preempted(&mut self, turn: &Turn, keeping: &mut Keeping, now: Moment) {
        if self.reserves.is_preempted(&turn.key) && !self.reserves.is_in_force(&turn.key) {
            self.keep_for(turn, keeping, now);
        }
    }

    pub(in crate::controller) fn set_aside(&mut self, aside: &Aside) {
        let aside = self.capacity.beside(aside);
        self.capacity.set_aside(aside);
    }

    /// The unit has its place.
    pub(in crate::controller) fn no_longer_kept(&mut self, key: &UnitKey, now: Moment) {
        if self.reserves.served(key, now) {
            self.capacity.news();
        }
    }

    /// Its nodes may have changed: other GPUs there may be nearer to being free.
    fn look_anew(&mut self, turn: &Turn, now: Moment) {
        let Some(kept) = self.reserves.of(&turn.key).filter(|kept| kept.preempted.is_none()) else { return };
        let (before, nodes) = (kept.aside.clone(), kept.aside.nodes());
        let stays = (!kept.own).then(|| kept.namespace.clone());
        let seen = self.looks(&nodes);
        let may_pay = self.namespace(turn).is_some_and(|own| self.purse.allowance(own).is_some());
        if (kept.seen == seen && kept.lost.is_none()) || !may_pay {
            return;
        }
        match self.choose_again(turn, stays.as_deref(), now) {
            Some(aside) => {
                if aside != before {
                    self.capacity.news();
                }
                let lacking = self.lacking(&aside);
                self.reserves.renew(&turn.key, aside, (lacking, seen), now);
            }
            None if self.reserves.lose(&turn.key, now) => {
                self.reserves.end(&turn.key, now);
                self.capacity.news();
            }
            None => {}
        }
    }

    fn begin_for(&mut self, turn: &Turn, keeping: &mut Keeping, now: Moment) {
        if self.reserves.is_in_line(&turn.key) {
            keeping.in_line = true;
        }
        let Some(namespace) = self.namespace(turn).map(str::to_owned) else { return };
        let may_pay = self.purse.allowance(&namespace).is_some();
        let is_first = keeping.first.get(&namespace) == Some(&turn.key);
        if !is_first || keeping.in_line || keeping.choices == 0 || !may_pay {
            return;
        }
        keeping.choices -= 1;
        let open = self.reserves.open_nodes();
        let stays = Some(namespace.as_str());
        let found = self.choose(turn, Within { stays, but: &open }, &mut keeping.emptied, now);
        let found = match found {
            Some((aside, serve)) if self.reserves.may_begin(aside.gpus().count(), serve) => {
                Some((aside, false))
            }
            Some(_) => {
                keeping.in_line = true;
                self.reserves.looked(&turn.key, true, now);
                return;
            }
            None => self.keep_from_its_own(turn, &namespace, &open, keeping, now).map(|aside| (aside, true)),
        };
        match found {
            Some((aside, own)) => self.begin_with(turn, &namespace, aside, own, now),
            // Another of the namespace may begin.
            None => {
                keeping.first.remove(&namespace);
                self.reserves.looked(&turn.key, false, now);
            }
        }
    }

    /// What is in the way are nodes that are open to all for now, or else shares of its own namespace: these alone are
    /// kept off.
    fn keep_from_its_own(
        &mut self,
        turn: &Turn,
        namespace: &str,
        open: &BTreeSet<NodeName>,
        keeping: &mut Keeping,
        now: Moment,
    ) -> Option<Aside> {
        let none = BTreeSet::new();
        let emptied = &mut keeping.emptied;
        let (stays, but) = (Some(namespace), &none);
        if !open.is_empty() && self.choose(turn, Within { stays, but }, emptied, now).is_some() {
            return None;
        }
        if !self.reserves.may_begin_own() {
            return None;
        }
        self.choose(turn, Within { stays: None, but }, emptied, now).map(|(aside, _)| aside)
    }

    /// `own`: what is kept off are shares of its own namespace.
    fn begin_with(&mut self, turn: &Turn, namespace: &str, aside: Aside, own: bool, now: Moment) {
        let name = self.name_of(&turn.key);
        let kept = Reservation {
            namespace: namespace.to_owned(),
            name,
            own,
            since: now,
            until: self.reserves.until(now),
            least: self.lacking(&aside),
            seen: self.looks(&aside.nodes()),
            lost: None,
            preempted: None,
            aside,
        };
        self.reserves.begin(&turn.key, kept);
        // They are told of it in the next round.
        turn.pods.iter().for_each(|pod| self.queue.again(pod));
    }
}
