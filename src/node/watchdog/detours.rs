//! Finds processes of shares that go around MPS, on GPUs whose shares have daemons of their own. These GPUs are in compute
//! mode DEFAULT, so that a process without `CUDA_MPS_PIPE_DIRECTORY` works on them without any server, on all
//! multiprocessors. Pure: the time and the answers are arguments.
//!
//! NVML lists an MPS client in two lists and any other process in one (H100, driver 580.159.04). Its word alone ends
//! nobody at once:
//!
//! | a process that NVML lists as no client | is |
//! |---|---|
//! | was a client, and the server of that time has gone since | left alone: the server's end took its contexts along |
//! | began before the watchdog, and its claim has no server on the GPU that is older | left alone: the same may have happened unseen |
//! | is named by its claim's daemon, asked after it was first seen so | left alone |
//! | has a claim whose server is not on the GPU, for 10 s since the claim was first seen so | left alone: it may wait for the server |
//! | has a claim whose daemon, asked after that, does not answer within 10 s | around MPS, if NVML is known to list clients on this node |
//! | has a claim whose daemon could not be asked for 2 min, because too many others were being asked | the same |
//! | otherwise, once the daemon has answered | around MPS |
//!
//! The daemon's silence does not excuse for ever, because a tenant can keep the daemon busy. Nor does it that nobody could be
//! asked: a tenant can keep many daemons busy, for 40 s at a time. Who waits for that has its turn in order, and daemons that
//! left their last question unanswered come after all others: 2 min are three rounds of daemons that are new to all this.
//!
//! The time of a claim without a server, and of a daemon that owes an answer or was not asked, begins anew when the claim has
//! had no process that NVML lists as no client for 2 min, and the first also when it has had a server for 30 s: a program that
//! leaves the GPU for a look, or goes on in another process, gains no time. Without an answer about it nobody is ended who has
//! been no client for less than 2 s.
//!
//! Who was a client is remembered for as long as the process lives. A look that does not show it proves nothing: NVML
//! fails now and then.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ops::Bound::{Excluded, Unbounded};
use std::time::Duration;

use super::knowledge::{QuestionState, want};
use crate::model::process::ProcessKey;
use crate::model::share::MpsGroup;
use crate::model::time::Moment;
use crate::nvml::ContextKind;
use crate::sharing::watch::ProcessAccess;
use crate::supervisor::protocol::MpsClient;

/// How long a server may take to come up, and a daemon to answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long a process may owe it to others' daemons that its own was not asked.
const UNASKED: Duration = Duration::from_secs(120);
/// A claim without processes that are no clients for so long is as one that never had any.
const PAUSE: Duration = Duration::from_secs(120);
/// A server that was there for so long without a break is given time again if it goes.
const STEADY: Duration = Duration::from_secs(30);
/// Before NVML's word alone ends a process, it has been no client for so long: its daemon may have been asked before that.
const NOTICED: Duration = Duration::from_secs(2);
/// At each look, of so many remembered processes beyond those that NVML lists it is asked whether they still live. So many
/// at once, because a tenant can have thousands that were clients once.
const CHECKS: usize = 64;

/// A process's claims that have a daemon of their own on the GPU.
pub(super) struct OwnDaemons<'a> {
    pub groups: Vec<&'a MpsGroup>,
    /// Their servers that NVML lists on the GPU at this look.
    pub servers: BTreeSet<ProcessKey>,
}

/// What is remembered from look to look.
#[derive(Debug, Default)]
pub(super) struct Detours {
    processes: BTreeMap<ProcessKey, Route>,
    /// The last of them that was checked.
    checked: Option<ProcessKey>,
    /// When the watchdog began to look, in clock ticks since the boot: who is older may have been a client before.
    began: u64,
    daemons: HashMap<MpsGroup, DaemonWord>,
    lists: ListTrust,
}

#[derive(Debug, Default)]
struct Route {
    /// Since when NVML has listed it as no client.
    bare_since: Option<Moment>,
    /// The servers that it may have had when it was last listed as a client.
    servers: BTreeSet<ProcessKey>,
}

/// What a daemon says of its clients.
#[derive(Debug, Default)]
struct DaemonWord {
    question: QuestionState,
    /// Since when the question has waited for room.
    waits_since: Option<Moment>,
    /// It did not answer the last question.
    is_silent: bool,
    clients: HashSet<u32>,
    /// When the question was first asked that it has not answered since.
    owes_since: Option<Moment>,
    /// When the claim was last seen to have a process that is no client.
    bare_at: Option<Moment>,
    /// Since when the claim has had such a process, and no server.
    serverless_since: Option<Moment>,
    /// Since when it has had a server at each look.
    served_since: Option<Moment>,
}

impl DaemonWord {
    /// The claim has a process that is no client.
    fn note_bare(&mut self, now: Moment) {
        if self.had_a_pause(now) {
            (self.owes_since, self.waits_since, self.serverless_since) = (None, None, None);
        }
        self.bare_at = Some(now);
    }

    fn had_a_pause(&self, now: Moment) -> bool {
        self.bare_at.is_none_or(|at| now >= at + PAUSE)
    }

    /// Who has been a process of the claim since then is judged without its answer.
    fn is_overdue(&self, since: Moment, now: Moment) -> bool {
        let owes = self.owes_since.filter(|_| self.question.was_asked(since));
        let is_silent = owes.is_some_and(|owes| now >= owes + PATIENCE);
        let is_unasked = self.waits_since.is_some_and(|waits| now >= waits + UNASKED);
        (is_silent || is_unasked) && now >= since + NOTICED
    }
}

/// What the daemons of a process say of it.
enum DaemonsAnswer {
    /// It is a client.
    Named,
    /// All have answered, and none of them names it.
    Unnamed,
    /// One of them may still answer.
    Due,
    /// Those that have not answered are overdue.
    Overdue,
}

/// Whether NVML's list of MPS clients may be believed where no daemon answers.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum ListTrust {
    /// No client was listed yet: this driver may list none.
    #[default]
    Unproven,
    Proven,
    /// A daemon has named a client that was not listed.
    Contradicted,
}

impl Detours {
    /// Of a watchdog that begins to look now: so many clock ticks after the boot.
    pub fn since(began: u64) -> Self {
        Self { began, ..Self::default() }
    }

    /// Forgets daemons that serve nobody, and since when processes have been no clients that this look does not show: before
    /// anything follows for them, their daemons are asked anew. Who was a client is not forgotten.
    pub fn keep(&mut self, is_listed: impl Fn(&ProcessKey) -> bool, groups: &HashSet<&MpsGroup>) {
        for (process, route) in &mut self.processes {
            if !is_listed(process) {
                route.bare_since = None;
            }
        }
        self.daemons.retain(|group, _| groups.contains(group));
    }

    /// Returns remembered processes that may have ended, others each time; NVML lists this many.
    pub fn take_due(&mut self, listed: usize) -> Vec<ProcessKey> {
        let after = self.checked.map_or(Unbounded, Excluded);
        let most = listed.saturating_add(CHECKS);
        let due: Vec<_> = self.processes.range((after, Unbounded)).map(|(key, _)| *key).take(most).collect();
        self.checked = due.last().copied().filter(|_| due.len() == most);
        due
    }

    /// Forgets processes that have ended.
    pub fn forget(&mut self, ended: &[ProcessKey]) {
        for process in ended {
            self.processes.remove(process);
        }
    }

    /// How the process of claims with these daemons works on the GPU. Questions that must be answered first are marked as
    /// wanted.
    pub fn access(
        &mut self,
        process: ProcessKey,
        context: ContextKind,
        own: &OwnDaemons<'_>,
        now: Moment,
    ) -> ProcessAccess {
        let route = self.processes.entry(process).or_default();
        match context {
            ContextKind::MpsClient => {
                if self.lists == ListTrust::Unproven {
                    self.lists = ListTrust::Proven;
                }
                *route = Route { servers: own.servers.clone(), ..Route::default() };
                self.awaits_server(own, now);
                ProcessAccess::Client
            }
            // Nothing that anybody has seen says how NVML lists a client that draws.
            ContextKind::ComputeOfUnknownKind | ContextKind::Graphics => ProcessAccess::Other,
            ContextKind::Compute => {
                let since = *route.bare_since.get_or_insert(now);
                let lost_its_server = match route.servers.is_empty() {
                    true => may_have_lost_a_server(process, &own.servers, self.began),
                    false => route.servers.is_disjoint(&own.servers),
                };
                for group in &own.groups {
                    self.daemons.entry((*group).clone()).or_default().note_bare(now);
                }
                let awaits_server = self.awaits_server(own, now);
                let is_around = match self.answer(process.pid, own, (since, now)) {
                    DaemonsAnswer::Named | DaemonsAnswer::Due => false,
                    DaemonsAnswer::Unnamed => true,
                    DaemonsAnswer::Overdue => self.lists == ListTrust::Proven,
                };
                if is_around && !lost_its_server && !awaits_server {
                    ProcessAccess::AroundMps
                } else {
                    ProcessAccess::Other
                }
            }
        }
    }

    /// True while the claims have no server, and may be about to get one.
    fn awaits_server(&mut self, own: &OwnDaemons<'_>, now: Moment) -> bool {
        let mut awaits = false;
        for group in &own.groups {
            let word = self.daemons.entry((*group).clone()).or_default();
            if own.servers.is_empty() {
                word.served_since = None;
                awaits |= now < *word.serverless_since.get_or_insert(now) + PATIENCE;
            } else if now >= *word.served_since.get_or_insert(now) + STEADY || word.had_a_pause(now) {
                // Not before: a tenant can have a server come and go.
                word.serverless_since = None;
            }
        }
        awaits
    }

    /// `since`: when the process was first seen to be no client.
    fn answer(&mut self, pid: u32, own: &OwnDaemons<'_>, (since, now): (Moment, Moment)) -> DaemonsAnswer {
        let (mut told, mut overdue) = (true, true);
        for group in &own.groups {
            let word = self.daemons.entry((*group).clone()).or_default();
            // First, so that a daemon that has answered is asked no more.
            let answered = want(&mut word.question, since);
            if answered && word.clients.contains(&pid) {
                self.lists = ListTrust::Contradicted;
                return DaemonsAnswer::Named;
            }
            overdue &= answered || word.is_overdue(since, now);
            told &= answered;
        }
        match (told, overdue) {
            (true, _) => DaemonsAnswer::Unnamed,
            (false, true) => DaemonsAnswer::Overdue,
            (false, false) => DaemonsAnswer::Due,
        }
    }

    /// Returns the daemons to ask for their clients now, none twice within a second, none that has still to answer. In the
    /// order of their turns, if there is no room for all.
    pub fn due(&self, now: Moment) -> Vec<MpsGroup> {
        let due = self.daemons.iter().filter(|(_, word)| word.question.is_due(now));
        let mut due: Vec<_> =
            due.map(|(group, word)| (word.is_silent, word.waits_since.unwrap_or(now), group)).collect();
        due.sort();
        due.into_iter().map(|(_, _, group)| group.clone()).collect()
    }

    /// This daemon is being asked.
    pub fn put(&mut self, group: &MpsGroup, now: Moment) {
        if let Some(word) = self.daemons.get_mut(group) {
            word.question.take_turn(now);
            word.waits_since = None;
            word.owes_since.get_or_insert(now);
        }
    }

    /// There is no room to ask these daemons. Returns for how many of them there was room, or no question, before.
    pub fn postpone(&mut self, groups: &[MpsGroup], now: Moment) -> u64 {
        let mut began = 0;
        for group in groups {
            if let Some(word) = self.daemons.get_mut(group)
                && word.waits_since.is_none()
            {
                word.waits_since = Some(now);
                began += 1;
            }
        }
        began
    }

    /// A daemon's answer; none: it said nothing.
    pub fn answered(&mut self, group: &MpsGroup, asked: Moment, clients: Option<&[MpsClient]>) {
        let Some(word) = self.daemons.get_mut(group) else { return };
        word.question.answered(clients.is_some().then_some(asked));
        word.is_silent = clients.is_none();
        if let Some(clients) = clients {
            word.owes_since = None;
            word.clients = clients.iter().map(|client| client.pid).collect();
        }
    }
}

/// True if nobody looked when the process may have been a client, and each server that the claims have now came after it.
/// A client is older than the server that followed its own.
fn may_have_lost_a_server(process: ProcessKey, servers: &BTreeSet<ProcessKey>, began: u64) -> bool {
    process.started < began && servers.iter().all(|server| process.started < server.started)
}

#[cfg(test)]
mod tests;
