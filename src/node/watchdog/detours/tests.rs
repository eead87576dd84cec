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

    fn look(&mut self, ms: u64, pid: u32, context: ContextKind) -> ProcessAccess {
        let group = group();
        let servers = self.servers.iter().copied().collect();
        let own = OwnDaemons { groups: vec![&group], servers };
        self.detours.access(ProcessKey { pid, started: 1 }, context, &own, at(ms))
    }

    fn bare(&mut self, ms: u64) -> ProcessAccess {
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
    assert_eq!(case.look(0, 2, ContextKind::MpsClient), ProcessAccess::Client);
    assert!(!case.ask(0, Some(&[])), "a client raises no question");
    assert_eq!(case.bare(0), ProcessAccess::Other, "the daemon has not been asked");
    assert!(case.ask(0, Some(&[2])));
    assert_eq!(case.bare(250), ProcessAccess::AroundMps);
    assert!(!case.ask(5000, Some(&[2])), "it is known");
    assert_eq!(case.bare(5000), ProcessAccess::AroundMps);
    // It leaves the GPU and comes again: the daemon is asked anew.
    case.detours.keep(|process| process.pid == 2, &HashSet::from([&group()]));
    assert_eq!(case.bare(6000), ProcessAccess::Other);
}

#[test]
fn whom_the_daemon_names_is_left_alone() {
    let mut case = Case::new();
    case.bare(0);
    case.ask(0, Some(&[1]));
    for ms in [250, 500, 60_000] {
        assert_eq!(case.bare(ms), ProcessAccess::Other);
    }
    // From now on this driver's list is not enough.
    case.look(60_000, 2, ContextKind::MpsClient);
    assert_eq!(case.look(60_250, 3, ContextKind::Compute), ProcessAccess::Other);
    case.ask(60_250, None);
    assert_eq!(case.look(90_000, 3, ContextKind::Compute), ProcessAccess::Other);
}

#[test]
fn a_client_whose_server_has_gone_is_left_alone_and_one_that_left_it_is_not() {
    let mut case = Case::new();
    case.look(0, 1, ContextKind::MpsClient);
    assert_eq!(case.bare(250), ProcessAccess::Other);
    case.ask(250, Some(&[]));
    assert_eq!(case.bare(500), ProcessAccess::AroundMps, "the server is there: the program began anew");
    let mut case = Case::new();
    case.look(0, 1, ContextKind::MpsClient);
    case.servers = vec![ProcessKey { pid: 91, started: 7 }];
    for ms in [250, 500, 60_000] {
        assert_eq!(case.bare(ms), ProcessAccess::Other, "the server is another one");
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
            assert_eq!(case.bare(ms), ProcessAccess::Other, "its server is gone");
            case.ask(ms, Some(&[]));
        }
    }
}

#[test]
fn who_began_before_the_watchdog_and_before_its_claims_servers_is_left_alone() {
    let server = |started| vec![ProcessKey { pid: 90, started }];
    // Of a process that began at 1.
    for (began, servers, expected) in [
        (2, server(2), ProcessAccess::Other),
        (2, Vec::new(), ProcessAccess::Other),
        (2, server(1), ProcessAccess::AroundMps),
        (2, [server(0), server(2)].concat(), ProcessAccess::AroundMps),
        (1, server(2), ProcessAccess::AroundMps),
        (1, Vec::new(), ProcessAccess::AroundMps),
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
    assert_eq!(case.bare(500), ProcessAccess::AroundMps);
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
    for (pid, expected) in [(1, ProcessAccess::AroundMps), (2, ProcessAccess::Other)] {
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
    assert_eq!(case.bare(9_750), ProcessAccess::Other, "it may wait for the server");
    assert_eq!(case.bare(10_000), ProcessAccess::AroundMps);
    // Another process of the claim does not get as much again.
    case.look(11_000, 4, ContextKind::Compute);
    case.ask(11_000, Some(&[]));
    assert_eq!(case.look(11_250, 4, ContextKind::Compute), ProcessAccess::AroundMps);
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
        assert_eq!(case.bare(9_750), ProcessAccess::Other);
        assert!(case.ask(9_750, None), "it is asked again and again");
        let expected = if is_listed { ProcessAccess::AroundMps } else { ProcessAccess::Other };
        assert_eq!(case.bare(10_000), expected);
    }
}

#[test]
fn another_process_and_a_look_without_any_gain_no_time() {
    let mut case = Case::new();
    case.look(0, 2, ContextKind::MpsClient);
    let groups = group();
    let keep = |case: &mut Case| case.detours.keep(|_| false, &HashSet::from([&groups]));
    for (ms, pid) in [(0, 3), (5_000, 4), (9_750, 5)] {
        assert_eq!(case.look(ms, pid, ContextKind::Compute), ProcessAccess::Other);
        case.ask(ms, None);
        keep(&mut case);
    }
    assert_eq!(
        case.look(10_000, 6, ContextKind::Compute),
        ProcessAccess::Other,
        "it was not asked of this one"
    );
    case.ask(10_000, None);
    case.ask(10_750, None);
    assert_eq!(case.look(11_750, 6, ContextKind::Compute), ProcessAccess::Other, "it was seen for a moment");
    assert_eq!(case.look(12_000, 6, ContextKind::Compute), ProcessAccess::AroundMps);
    keep(&mut case);
    // After a while in which there was none it begins anew.
    case.look(132_000, 7, ContextKind::Compute);
    case.ask(132_000, None);
    assert_eq!(case.look(141_750, 7, ContextKind::Compute), ProcessAccess::Other);
    assert_eq!(case.look(142_000, 7, ContextKind::Compute), ProcessAccess::AroundMps);
}

#[test]
fn a_server_that_comes_and_goes_gains_no_time() {
    let mut case = Case::new();
    let server = case.servers.clone();
    for ms in [0, 5_000, 9_000] {
        case.servers.clear();
        assert_eq!(case.bare(ms), ProcessAccess::Other, "it may wait for the server");
        case.ask(ms, Some(&[2]));
        // Its own, with a client.
        case.servers.clone_from(&server);
        case.look(ms + 250, 2, ContextKind::MpsClient);
    }
    case.servers.clear();
    assert_eq!(case.bare(10_000), ProcessAccess::AroundMps);
    // One that was there for a while is given time.
    case.servers = server;
    for ms in [11_000, 41_000] {
        case.look(ms, 2, ContextKind::MpsClient);
    }
    case.servers.clear();
    case.look(42_000, 9, ContextKind::Compute);
    case.ask(42_000, Some(&[]));
    assert_eq!(case.look(51_750, 9, ContextKind::Compute), ProcessAccess::Other);
    assert_eq!(case.look(52_000, 9, ContextKind::Compute), ProcessAccess::AroundMps);
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
    assert_eq!(case.bare(30_000), ProcessAccess::Other);
    // From the question on it is given as long as any other.
    assert!(case.ask(30_000, None));
    assert_eq!(case.bare(39_750), ProcessAccess::Other);
    assert_eq!(postponed(&mut case, 39_750), (1, 1));
    assert_eq!(case.bare(40_000), ProcessAccess::AroundMps, "it was asked, and said nothing");
    // Another process of the claim, for which it was not asked.
    assert_eq!(case.look(50_000, 3, ContextKind::Compute), ProcessAccess::Other);
    assert_eq!(case.look(65_000, 3, ContextKind::Compute), ProcessAccess::Other);
    assert!(case.ask(65_000, Some(&[3])));
    assert_eq!(case.look(65_250, 3, ContextKind::Compute), ProcessAccess::Other, "it is a client");
}

#[test]
fn busy_daemons_of_others_excuse_nobody_for_ever() {
    for is_listed in [false, true] {
        let mut case = Case::new();
        if is_listed {
            case.look(0, 2, ContextKind::MpsClient);
        }
        case.bare(0);
        for ms in [0, 60_000, 119_750] {
            assert_eq!(case.bare(ms), ProcessAccess::Other);
            let due = case.detours.due(at(ms));
            case.detours.postpone(&due, at(ms));
        }
        let expected = if is_listed { ProcessAccess::AroundMps } else { ProcessAccess::Other };
        assert_eq!(case.bare(120_000), expected);
    }
}

/// As many as may are busy, and one after the other gives its place up, to whoever is next.
#[test]
fn who_waits_has_its_turn_in_order_and_daemons_that_are_always_busy_come_last() {
    const PLACES: usize = 2;
    let groups: Vec<MpsGroup> =
        (0..6).map(|n| MpsGroup::new(["GPU-0".into()]).of_claim(format!("c{n}").as_str().into())).collect();
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
    assert_eq!(place(&mut detours, now, &due, PLACES), [2, 3], "those that are always busy are asked, too");
}

#[test]
fn where_nvml_does_not_tell_clients_nobody_goes_around_mps() {
    for context in [ContextKind::ComputeOfUnknownKind, ContextKind::Graphics] {
        let mut case = Case::new();
        assert_eq!(case.look(0, 1, context), ProcessAccess::Other);
        assert!(!case.ask(0, Some(&[])));
        assert_eq!(case.look(60_000, 1, context), ProcessAccess::Other);
    }
}
