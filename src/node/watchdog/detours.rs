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
use crate::sharing::watch::Access;
use crate::supervisor::protocol::MpsClient;

/// How long a server may take to come up, and a daemon to answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long a process may owe it to others' daemons that its own was not asked.
const UNASKED: Duration = Duration::from_secs(120);
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
    /// Since when those of its daemons that have not answered have all been asked.
    asked_since: Option<Moment>,
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
    /// Since when the claim has had a process that is no client, and no server.
    serverless_since: Option<Moment>,
}

/// What the daemons of a process say of it.
enum Answer {
    /// It is a client.
    Named,
    /// All have answered, and none of them names it.
    Unnamed,
    /// Since when those that have not answered have all been asked.
    Missing { asked_since: Option<Moment> },
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

    /// Forgets daemons that serve nobody, and how long processes have gone around MPS that this look does not show: before
    /// anything follows for them, their daemons are asked anew. Who was a client is not forgotten.
    pub fn keep(&mut self, is_listed: impl Fn(&ProcessKey) -> bool, groups: &HashSet<&MpsGroup>) {
        for (process, route) in &mut self.processes {
            if !is_listed(process) {
                (route.bare_since, route.asked_since) = (None, None);
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
    ) -> Access {
        let route = self.processes.entry(process).or_default();
        match context {
            ContextKind::MpsClient => {
                if self.lists == ListTrust::Unproven {
                    self.lists = ListTrust::Proven;
                }
                *route = Route { servers: own.servers.clone(), ..Route::default() };
                self.note_servers(own, now);
                Access::Client
            }
            // Nothing that anybody has seen says how NVML lists a client that draws.
            ContextKind::ComputeOfUnknownKind | ContextKind::Graphics => Access::Other,
            ContextKind::Compute => {
                let since = *route.bare_since.get_or_insert(now);
                let lost_its_server = match route.servers.is_empty() {
                    true => may_have_lost_a_server(process, &own.servers, self.began),
                    false => route.servers.is_disjoint(&own.servers),
                };
                let awaits_server = self.note_servers(own, now);
                let is_around = match self.answer(process.pid, own, since) {
                    Answer::Named => false,
                    Answer::Unnamed => true,
                    Answer::Missing { asked_since } => self.has_waited(process, asked_since, (since, now)),
                };
                if is_around && !lost_its_server && !awaits_server {
                    Access::AroundMps
                } else {
                    Access::Other
                }
            }
        }
    }

    /// True while the claims have no server, and may be about to get one.
    fn note_servers(&mut self, own: &OwnDaemons<'_>, now: Moment) -> bool {
        let mut awaits = false;
        for group in &own.groups {
            let word = self.daemons.entry((*group).clone()).or_default();
            if own.servers.is_empty() {
                awaits |= now < *word.serverless_since.get_or_insert(now) + PATIENCE;
            } else {
                word.serverless_since = None;
            }
        }
        awaits
    }

    fn answer(&mut self, pid: u32, own: &OwnDaemons<'_>, since: Moment) -> Answer {
        let (mut told, mut asked_since) = (true, Some(since));
        for group in &own.groups {
            let word = self.daemons.entry((*group).clone()).or_default();
            // First, so that a daemon that has answered is asked no more.
            let answered = want(&mut word.question, since);
            if answered && word.clients.contains(&pid) {
                self.lists = ListTrust::Contradicted;
                return Answer::Named;
            }
            if !answered {
                asked_since = asked_since.zip(word.question.asked(since)).map(|(one, other)| one.max(other));
            }
            told &= answered;
        }
        if told { Answer::Unnamed } else { Answer::Missing { asked_since } }
    }

    /// True if the answers have been waited for long enough, and NVML's word counts.
    fn has_waited(
        &mut self,
        process: ProcessKey,
        asked_since: Option<Moment>,
        (since, now): (Moment, Moment),
    ) -> bool {
        let route = self.processes.entry(process).or_default();
        // The first time counts: daemons that do not answer are asked again and again.
        route.asked_since = route.asked_since.or(asked_since);
        let is_silent = route.asked_since.is_some_and(|asked| now >= asked + PATIENCE);
        (is_silent || now >= since + UNASKED) && self.lists == ListTrust::Proven
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
mod tests {
    use super::*;

    const SERVER: ProcessKey = ProcessKey { pid: 90, started: 1 };

    fn at(ms: u64) -> Moment {
        Moment::from_millis(ms)
    }

    fn group() -> MpsGroup {
        MpsGroup::new(["GPU-0".into()]).of_claim("c".into())
    }

    struct Case {
        detours: Detours,
        servers: Vec<ProcessKey>,
    }

    impl Case {
        fn new() -> Self {
            Self { detours: Detours::default(), servers: vec![SERVER] }
        }

        fn look(&mut self, ms: u64, pid: u32, context: ContextKind) -> Access {
            let group = group();
            let servers = self.servers.iter().copied().collect();
            let own = OwnDaemons { groups: vec![&group], servers };
            self.detours.access(ProcessKey { pid, started: 1 }, context, &own, at(ms))
        }

        fn bare(&mut self, ms: u64) -> Access {
            self.look(ms, 1, ContextKind::Compute)
        }

        /// The daemons to ask, which are asked.
        fn due(&mut self, ms: u64) -> Vec<MpsGroup> {
            let due = self.detours.due(at(ms));
            due.iter().for_each(|group| self.detours.put(group, at(ms)));
            due
        }

        /// Asks the daemon if it is to be asked; true if so.
        fn ask(&mut self, ms: u64, clients: Option<&[u32]>) -> bool {
            let due = self.due(ms);
            let client = |pid: &u32| MpsClient { server: SERVER.pid, pid: *pid };
            let clients = clients.map(|clients| clients.iter().map(client).collect::<Vec<_>>());
            if !due.is_empty() {
                self.detours.answered(&group(), at(ms), clients.as_deref());
            }
            due == [group()]
        }
    }

    #[test]
    fn who_is_in_neither_list_goes_around_mps_and_the_daemon_is_asked_once() {
        let mut case = Case::new();
        assert_eq!(case.look(0, 2, ContextKind::MpsClient), Access::Client);
        assert!(!case.ask(0, Some(&[])), "a client raises no question");
        assert_eq!(case.bare(0), Access::Other, "the daemon has not been asked");
        assert!(case.ask(0, Some(&[2])));
        assert_eq!(case.bare(250), Access::AroundMps);
        assert!(!case.ask(5000, Some(&[2])), "it is known");
        assert_eq!(case.bare(5000), Access::AroundMps);
        // It leaves the GPU and comes again: the daemon is asked anew.
        case.detours.keep(|process| process.pid == 2, &HashSet::from([&group()]));
        assert_eq!(case.bare(6000), Access::Other);
    }

    #[test]
    fn whom_the_daemon_names_is_left_alone() {
        let mut case = Case::new();
        case.bare(0);
        case.ask(0, Some(&[1]));
        for ms in [250, 500, 60_000] {
            assert_eq!(case.bare(ms), Access::Other);
        }
        // From now on this driver's list is not enough.
        case.look(60_000, 2, ContextKind::MpsClient);
        assert_eq!(case.look(60_250, 3, ContextKind::Compute), Access::Other);
        case.ask(60_250, None);
        assert_eq!(case.look(90_000, 3, ContextKind::Compute), Access::Other);
    }

    #[test]
    fn a_client_whose_server_has_gone_is_left_alone_and_one_that_left_it_is_not() {
        let mut case = Case::new();
        case.look(0, 1, ContextKind::MpsClient);
        assert_eq!(case.bare(250), Access::Other);
        case.ask(250, Some(&[]));
        assert_eq!(case.bare(500), Access::AroundMps, "the server is there: the program began anew");
        let mut case = Case::new();
        case.look(0, 1, ContextKind::MpsClient);
        case.servers = vec![ProcessKey { pid: 91, started: 7 }];
        for ms in [250, 500, 60_000] {
            assert_eq!(case.bare(ms), Access::Other, "the server is another one");
            case.ask(ms, Some(&[]));
        }
    }

    #[test]
    fn a_look_that_shows_nobody_makes_nobody_forget_who_lost_its_server() {
        for servers in [vec![ProcessKey { pid: 91, started: 7 }], Vec::new()] {
            let mut case = Case::new();
            case.look(0, 1, ContextKind::MpsClient);
            case.detours.keep(|_| false, &HashSet::from([&group()]));
            case.servers = servers;
            for ms in [250, 500, 60_000] {
                assert_eq!(case.bare(ms), Access::Other, "its server is gone");
                case.ask(ms, Some(&[]));
            }
        }
    }

    #[test]
    fn who_began_before_the_watchdog_and_before_its_claims_servers_is_left_alone() {
        let server = |started| vec![ProcessKey { pid: 90, started }];
        // Of a process that began at 1.
        for (began, servers, expected) in [
            (2, server(2), Access::Other),
            (2, Vec::new(), Access::Other),
            (2, server(1), Access::AroundMps),
            (2, [server(0), server(2)].concat(), Access::AroundMps),
            (1, server(2), Access::AroundMps),
            (1, Vec::new(), Access::AroundMps),
        ] {
            let mut case = Case { detours: Detours::since(began), servers };
            case.bare(0);
            case.ask(0, Some(&[]));
            assert_eq!(case.bare(10_000), expected, "{began} {:?}", case.servers);
        }
        // Whom this watchdog has seen as a client, it knows.
        let mut case = Case { detours: Detours::since(2), servers: server(2) };
        case.look(0, 1, ContextKind::MpsClient);
        case.bare(250);
        case.ask(250, Some(&[]));
        assert_eq!(case.bare(500), Access::AroundMps);
    }

    #[test]
    fn processes_are_forgotten_once_they_have_ended_and_a_few_are_checked_at_each_look() {
        let mut case = Case::new();
        let processes = u32::try_from(2 * CHECKS).unwrap() + 10;
        for pid in 0..processes {
            case.look(0, pid, ContextKind::MpsClient);
        }
        let checked: Vec<Vec<u32>> =
            (0..4).map(|_| case.detours.take_due(5).iter().map(|process| process.pid).collect()).collect();
        let most = u32::try_from(CHECKS).unwrap() + 5;
        let (first, second): (Vec<_>, Vec<_>) = ((0..most).collect(), (most..processes).collect());
        assert_eq!(checked[0], first);
        assert_eq!([checked[1].as_slice(), &checked[2]].concat(), second);
        assert_eq!(checked[3], first, "from the beginning");
        case.servers = vec![ProcessKey { pid: 91, started: 7 }];
        case.detours.forget(&[ProcessKey { pid: 1, started: 1 }]);
        for (pid, expected) in [(1, Access::AroundMps), (2, Access::Other)] {
            case.look(250, pid, ContextKind::Compute);
            case.ask(250 + 1000 * u64::from(pid), Some(&[]));
            assert_eq!(case.look(5000, pid, ContextKind::Compute), expected);
        }
    }

    #[test]
    fn a_claim_without_a_server_is_given_time_for_one_once() {
        let mut case = Case::new();
        case.servers.clear();
        case.bare(0);
        case.ask(0, Some(&[]));
        assert_eq!(case.bare(9_750), Access::Other, "it may wait for the server");
        assert_eq!(case.bare(10_000), Access::AroundMps);
        // Another process of the claim does not get as much again.
        case.look(11_000, 4, ContextKind::Compute);
        case.ask(11_000, Some(&[]));
        assert_eq!(case.look(11_250, 4, ContextKind::Compute), Access::AroundMps);
    }

    #[test]
    fn a_silent_daemon_excuses_nobody_for_long_where_clients_are_listed() {
        for is_listed in [false, true] {
            let mut case = Case::new();
            case.bare(0);
            case.ask(0, None);
            if is_listed {
                case.look(0, 2, ContextKind::MpsClient);
            }
            assert_eq!(case.bare(9_750), Access::Other);
            assert!(case.ask(9_750, None), "it is asked again and again");
            let expected = if is_listed { Access::AroundMps } else { Access::Other };
            assert_eq!(case.bare(10_000), expected);
        }
    }

    /// The daemon's question waits, because all threads are at daemons of others.
    #[test]
    fn a_daemon_that_could_not_be_asked_was_not_silent() {
        let mut case = Case::new();
        case.look(0, 2, ContextKind::MpsClient);
        let postponed = |case: &mut Case, ms| {
            let due = case.detours.due(at(ms));
            (due.len(), case.detours.postpone(&due, at(ms)))
        };
        case.bare(0);
        assert_eq!(postponed(&mut case, 0), (1, 1));
        assert_eq!(postponed(&mut case, 250), (1, 0), "it is counted once");
        assert_eq!(case.bare(30_000), Access::Other);
        // From the question on it is given as long as any other.
        assert!(case.ask(30_000, None));
        assert_eq!(case.bare(39_750), Access::Other);
        assert_eq!(postponed(&mut case, 39_750), (1, 1));
        assert_eq!(case.bare(40_000), Access::AroundMps, "it was asked, and said nothing");
        // Another process of the claim, for which it was not asked.
        assert_eq!(case.look(50_000, 3, ContextKind::Compute), Access::Other);
        assert_eq!(case.look(65_000, 3, ContextKind::Compute), Access::Other);
        assert!(case.ask(65_000, Some(&[3])));
        assert_eq!(case.look(65_250, 3, ContextKind::Compute), Access::Other, "it is a client");
    }

    #[test]
    fn busy_daemons_of_others_excuse_nobody_for_ever() {
        for is_listed in [false, true] {
            let mut case = Case::new();
            if is_listed {
                case.look(0, 2, ContextKind::MpsClient);
            }
            case.bare(0);
            for ms in [250, 60_000, 119_750] {
                assert_eq!(case.bare(ms), Access::Other);
                let due = case.detours.due(at(ms));
                case.detours.postpone(&due, at(ms));
            }
            let expected = if is_listed { Access::AroundMps } else { Access::Other };
            assert_eq!(case.bare(120_000), expected);
        }
    }

    /// As many as may are busy, and one after the other gives its place up, to whoever is next.
    #[test]
    fn who_waits_has_its_turn_in_order_and_daemons_that_are_always_busy_come_last() {
        const PLACES: usize = 2;
        let groups: Vec<MpsGroup> = (0..6)
            .map(|n| MpsGroup::new(["GPU-0".into()]).of_claim(format!("c{n}").as_str().into()))
            .collect();
        let mut detours = Detours::default();
        let mut now = 0;
        let look = |detours: &mut Detours, now: u64, which: &[usize]| {
            for n in which {
                let own = OwnDaemons { groups: vec![&groups[*n]], servers: BTreeSet::from([SERVER]) };
                let process = ProcessKey { pid: u32::try_from(*n).unwrap() + 1, started: 1 };
                detours.access(process, ContextKind::Compute, &own, at(now));
            }
            detours.due(at(now))
        };
        let place = |detours: &mut Detours, now: u64, due: &[MpsGroup], free: usize| -> Vec<usize> {
            let (asked, waiting) = due.split_at(free.min(due.len()));
            asked.iter().for_each(|group| detours.put(group, at(now)));
            detours.postpone(waiting, at(now));
            asked.iter().map(|one| groups.iter().position(|group| group == one).unwrap()).collect()
        };
        // 3 and 4 are busy, and go on to be.
        let due = look(&mut detours, now, &[3, 4]);
        assert_eq!(place(&mut detours, now, &due, PLACES), [3, 4]);
        now = 1000;
        let due = look(&mut detours, now, &[5, 3, 4]);
        assert!(place(&mut detours, now, &due, 0).is_empty());
        now = 2000;
        let due = look(&mut detours, now, &[0, 5, 3, 4]);
        assert!(place(&mut detours, now, &due, 0).is_empty());
        // One of them is given up, and wants to be asked again at once.
        now = 40_000;
        detours.answered(&groups[3], at(0), None);
        let due = look(&mut detours, now, &[0, 1, 2, 3, 4, 5]);
        assert_eq!(place(&mut detours, now, &due, 1), [5], "it has waited longest");
        now = 41_000;
        detours.answered(&groups[5], at(40_000), Some(&[]));
        detours.answered(&groups[4], at(0), None);
        let due = look(&mut detours, now, &[0, 1, 2, 3, 4, 5]);
        assert_eq!(place(&mut detours, now, &due, PLACES), [0, 1]);
        now = 42_000;
        detours.answered(&groups[0], at(41_000), Some(&[]));
        detours.answered(&groups[1], at(41_000), None);
        let due = look(&mut detours, now, &[0, 1, 2, 3, 4, 5]);
        assert_eq!(
            place(&mut detours, now, &due, PLACES),
            [2, 3],
            "those that are always busy are asked, too"
        );
    }

    #[test]
    fn where_nvml_does_not_tell_clients_nobody_goes_around_mps() {
        for context in [ContextKind::ComputeOfUnknownKind, ContextKind::Graphics] {
            let mut case = Case::new();
            assert_eq!(case.look(0, 1, context), Access::Other);
            assert!(!case.ask(0, Some(&[])));
            assert_eq!(case.look(60_000, 1, context), Access::Other);
        }
    }
}
