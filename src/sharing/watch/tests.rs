//! Traces in virtual time: what is told, who is ended, and when.

use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

use super::*;

const PERIOD_MS: u64 = 250;

/// Claims with 2000 MiB each, 3 processes, one declared: "c" unless said otherwise.
struct Trace {
    watch: Watch,
    policy: WatchPolicy,
    now_ms: u64,
    declared: u64,
    told: Vec<String>,
}

fn trace() -> Trace {
    let policy = WatchPolicy { terminate: true, grace: Bytes::from_mib(64) };
    Trace { watch: Watch::default(), policy, now_ms: 0, declared: 1, told: Vec::new() }
}

/// A client of an MPS server; its PID is its start time too, so that a higher one is newer.
fn client(pid: u32, mib: u64) -> ObservedProcess {
    let process = ProcessKey { pid, started: pid.into() };
    ObservedProcess {
        process,
        used: Some(Bytes::from_mib(mib)),
        access: ProcessAccess::Client,
        pod: ProcessPod::Known("pod".into()),
    }
}

fn bare(pid: u32, mib: u64) -> ObservedProcess {
    ObservedProcess { access: ProcessAccess::Other, ..client(pid, mib) }
}

fn around(pid: u32, mib: u64) -> ObservedProcess {
    ObservedProcess { access: ProcessAccess::AroundMps, ..client(pid, mib) }
}

fn words(verdict: &Verdict) -> String {
    let mib =
        |n: &Numbers| format!("{}/{} peak {}", n.used.mib_floor(), n.limit.mib_floor(), n.peak.mib_floor());
    match verdict {
        Verdict::Over { numbers, .. } => format!("over {}", mib(numbers)),
        Verdict::Crowded { processes, allowed, .. } => format!("crowded {processes}/{allowed}"),
        Verdict::Recovered { from, numbers, lasted, .. } => {
            format!("recovered {from:?} after {}: {}", lasted.as_millis(), mib(numbers))
        }
        Verdict::Foreign { seen, .. } => format!("foreign {}", seen.process),
        Verdict::AroundMps { account_id, seen } => format!("around {:?} {}", account_id.claims, seen.process),
        Verdict::End { seen, how, .. } => format!("{how:?} {}", seen.process),
    }
}

impl Trace {
    fn claim(&self, name: &str) -> ClaimGrant {
        ClaimGrant {
            claim: name.into(),
            memory: Some(Bytes::from_mib(2000)),
            part: Some(Bytes::from_mib(2000 / self.declared)),
            processes: 3,
            pods: vec!["pod".into()],
        }
    }

    fn look(&mut self, accounts: Vec<Account>, foreign: Vec<ObservedProcess>) -> &mut Self {
        let look = BoardLook { gpu: "GPU-0".into(), accounts, foreign };
        let (verdicts, _) = self.watch.fold(&self.policy, Moment::from_millis(self.now_ms), &[look]);
        self.told.extend(verdicts.iter().map(|verdict| format!("{} {}", self.now_ms, words(verdict))));
        self.now_ms += PERIOD_MS;
        self
    }

    /// The look that confirms, 50 ms after the last; the next regular one is a period later.
    fn confirm(&mut self, accounts: Vec<Account>, foreign: Vec<ObservedProcess>) {
        self.now_ms = self.now_ms - PERIOD_MS + 50;
        let look = BoardLook { gpu: "GPU-0".into(), accounts, foreign };
        let verdicts = self.watch.confirm(&self.policy, Moment::from_millis(self.now_ms), &[look]);
        self.told.extend(verdicts.iter().map(|verdict| format!("{} {}", self.now_ms, words(verdict))));
        self.now_ms += PERIOD_MS;
    }

    fn see(&mut self, processes: &[ObservedProcess]) -> &mut Self {
        let account = Account { claims: vec![self.claim("c")], processes: processes.to_vec() };
        self.look(vec![account], vec![])
    }

    fn often(&mut self, looks: usize, processes: &[ObservedProcess]) {
        for _ in 0..looks {
            self.see(processes);
        }
    }

    fn foreign(&mut self, processes: &[ObservedProcess]) -> &mut Self {
        self.look(vec![], processes.to_vec())
    }

    /// One process that has this much at each look.
    fn grow(&mut self, mibs: &[u64]) -> &mut Self {
        mibs.iter().fold(self, |trace, mib| trace.see(&[client(1, *mib)]))
    }

    #[track_caller]
    fn tells(&mut self, expected: &[&str]) {
        assert_eq!(std::mem::take(&mut self.told), expected);
    }
}

#[test]
fn one_that_keeps_to_its_grant_is_left_in_peace() {
    trace().grow(&[0, 500, 1999, 2000, 2000, 1000]).tells(&[]);
}

#[test]
fn one_look_over_is_nothing_two_are_a_violation_and_two_back_are_the_end_of_it() {
    let mut trace = trace();
    trace.grow(&[2001, 2000, 2060, 2000]).tells(&[]);
    trace.grow(&[2010, 2064, 2030]).tells(&["1250 over 2064/2000 peak 2064"]);
    trace.grow(&[2000, 2001, 2000, 1990]).tells(&["2500 recovered Memory after 1250: 1990/2000 peak 2064"]);
}

#[test]
fn within_the_grace_nobody_is_ended_however_long() {
    let mut trace = trace();
    trace.grow(&[2064; 400]).tells(&["250 over 2064/2000 peak 2064"]);
}

#[test]
fn beyond_the_grace_the_client_is_terminated_and_killed_two_looks_later_if_the_daemon_did_nothing() {
    let mut trace = trace();
    trace.grow(&[1900, 3000, 3000]).tells(&["500 over 3000/2000 peak 3000", "500 Terminate 1"]);
    trace.grow(&[3000]).tells(&[]);
    trace.grow(&[3000]).tells(&["1000 Kill 1"]);
    trace.grow(&[3000; 19]).tells(&[]);
    trace.grow(&[3000]).tells(&["6000 Kill 1"]);
}

/// A read of /proc that hung, say. Twenty looks passed before it was tried again.
#[test]
fn a_kill_that_fails_is_ordered_again_at_the_next_look_and_then_less_and_less_often() {
    let mut trace = trace();
    let gpu = DeviceUuid::from("GPU-0");
    let process = client(1, 0).process;
    let fails = |trace: &mut Trace, how| trace.watch.end_failed(&gpu, process, how);
    trace.see(&[bare(1, 3000)]).see(&[bare(1, 3000)]);
    let mut passed = Vec::new();
    while passed.len() < 8 {
        assert_eq!(trace.told.pop().as_deref(), Some(&*format!("{} Kill 1", trace.now_ms - PERIOD_MS)));
        // It may be told more than once, by orders that were given before.
        (0..3).for_each(|_| fails(&mut trace, EndMethod::Kill));
        trace.told.clear();
        let from = trace.now_ms;
        while trace.told.is_empty() {
            trace.see(&[bare(1, 3000)]);
        }
        passed.push((trace.now_ms - from) / PERIOD_MS);
    }
    assert_eq!(passed, [1, 2, 4, 8, 16, 20, 20, 20]);
    // One that was signalled, and hangs in the kernel, begins anew.
    trace.told.clear();
    trace.often(19, &[bare(1, 3000)]);
    trace.tells(&[]);
    let again = [format!("{} Kill 1", trace.now_ms), format!("{} Kill 1", trace.now_ms + PERIOD_MS)];
    trace.see(&[bare(1, 3000)]).tells(&[&again[0]]);
    fails(&mut trace, EndMethod::Kill);
    trace.see(&[bare(1, 3000)]).tells(&[&again[1]]);
}

#[test]
fn a_daemon_that_fails_hurries_no_kill_and_what_nobody_ends_is_nothing() {
    let mut trace = trace();
    let process = client(1, 0).process;
    let fails = |trace: &mut Trace, gpu: &str, how| trace.watch.end_failed(&gpu.into(), process, how);
    fails(&mut trace, "GPU-0", EndMethod::Kill);
    trace.grow(&[3000, 3000]).tells(&["250 over 3000/2000 peak 3000", "250 Terminate 1"]);
    fails(&mut trace, "GPU-0", EndMethod::Terminate);
    fails(&mut trace, "GPU-1", EndMethod::Terminate);
    trace.grow(&[3000]).tells(&[]);
    trace.grow(&[3000]).tells(&["750 Kill 1"]);
    // The daemon's answer, which comes late, says nothing of the kill.
    fails(&mut trace, "GPU-0", EndMethod::Terminate);
    trace.grow(&[3000; 19]).tells(&[]);
    trace.grow(&[3000]).tells(&["5750 Kill 1"]);
    // Back within the grant: it may live.
    fails(&mut trace, "GPU-0", EndMethod::Kill);
    trace.grow(&[2000, 2000]);
    let told = std::mem::take(&mut trace.told);
    assert!(!told.iter().any(|line| line.contains("Kill")), "{told:?}");
}

#[test]
fn a_client_that_has_gone_is_not_killed_again() {
    let mut trace = trace();
    trace.grow(&[3000, 3000]).tells(&["250 over 3000/2000 peak 3000", "250 Terminate 1"]);
    trace.grow(&[0, 0, 0]).tells(&["750 recovered Memory after 500: 0/2000 peak 3000"]);
    // The daemon did not answer, but it shrank by itself.
    trace.grow(&[3000, 3000, 1500, 1500, 1500]);
    let told = std::mem::take(&mut trace.told);
    assert!(!told.iter().any(|line| line.contains("Kill")), "{told:?}");
}

#[test]
fn one_process_beyond_its_part_is_urgent_until_it_is_confirmed_and_many_within_theirs_are_not() {
    let mut trace = trace();
    assert!(!trace.grow(&[2064]).watch.is_urgent(), "within the grace");
    assert!(trace.grow(&[2065]).watch.is_urgent());
    assert!(!trace.grow(&[2065]).watch.is_urgent(), "it is being ended");
    trace.tells(&["250 over 2065/2000 peak 2065", "500 Terminate 1"]);
    assert!(!trace.grow(&[0]).watch.is_urgent());
    let many = [client(2, 2000), client(3, 2000)];
    assert!(!trace.see(&many).watch.is_urgent(), "each within what MPS lets it have");
    trace.policy.terminate = false;
    assert!(!trace.grow(&[9000]).watch.is_urgent(), "nobody is to be ended");
}

/// Claims "mine" and "neighbours" with these processes each.
fn two(trace: &Trace, mine: &[ObservedProcess], neighbours: &[ObservedProcess]) -> Vec<Account> {
    let account = |name: &str, processes: &[ObservedProcess]| Account {
        claims: vec![trace.claim(name)],
        processes: processes.to_vec(),
    };
    vec![account("mine", mine), account("neighbours", neighbours)]
}

#[test]
fn what_one_claim_does_brings_no_neighbour_nearer_to_its_end() {
    let mut trace = trace();
    // The neighbour's two processes hand over: for a moment both hold memory.
    let (broken, handing_over) = ([client(1, 9000)], [client(2, 1500), client(3, 1500)]);
    let accounts = two(&trace, &broken, &handing_over);
    trace.look(accounts.clone(), vec![bare(9, 100)]);
    trace.tells(&[]);
    trace.confirm(accounts, vec![bare(9, 100)]);
    trace.tells(&["50 over 9000/2000 peak 9000", "50 Terminate 1"]);
    // At the next regular look the neighbour is within its grant: nobody told of it, or of a foreign process.
    let accounts = two(&trace, &broken, &[client(3, 1500)]);
    trace.look(accounts, vec![]);
    trace.tells(&[]);
    // One that is being ended is killed after regular looks only, whoever else hurries.
    let accounts = two(&trace, &broken, &[client(4, 9000)]);
    trace.look(accounts.clone(), vec![]);
    trace.tells(&["550 Kill 1"]);
    assert!(trace.watch.is_urgent());
    trace.confirm(accounts, vec![]);
    trace.tells(&["600 over 9000/2000 peak 9000", "600 Terminate 4"]);
}

#[test]
fn a_board_that_does_not_answer_hurries_nobody_for_long() {
    let mut trace = trace();
    assert!(trace.grow(&[9000]).watch.is_urgent());
    assert_eq!(trace.watch.confirm(&trace.policy, Moment::from_millis(50), &[]), []);
    assert!(!trace.watch.is_urgent());
    trace.grow(&[9000]);
    trace.tells(&["250 over 9000/2000 peak 9000", "250 Terminate 1"]);
    trace.grow(&[0, 0]).grow(&[9000]);
    assert!(trace.watch.is_urgent());
    trace.watch.fold(&trace.policy, Moment::from_millis(60), &[]);
    assert!(!trace.watch.is_urgent(), "nor where the regular look is not answered");
}

#[test]
fn without_mps_it_is_killed_at_once() {
    let mut trace = trace();
    trace.see(&[bare(1, 3000)]).see(&[bare(1, 3000)]);
    trace.tells(&["250 over 3000/2000 peak 3000", "250 Kill 1"]);
}

#[test]
fn observing_ends_nobody() {
    let mut trace = trace();
    trace.policy.terminate = false;
    trace.grow(&[9000; 50]).foreign(&[bare(7, 100)]).foreign(&[bare(7, 100)]);
    trace.tells(&["250 over 9000/2000 peak 9000", "12750 foreign 7"]);
}

#[test]
fn the_one_over_its_part_goes_first_and_no_more_than_must() {
    let mut trace = trace();
    trace.declared = 2;
    let processes = [client(1, 1500), client(2, 900), client(3, 400)];
    trace.see(&processes).see(&processes);
    trace.tells(&["250 over 2800/2000 peak 2800", "250 Terminate 1"]);
}

#[test]
fn where_each_keeps_to_its_part_the_newest_go() {
    let mut trace = trace();
    let processes = [client(5, 1000), client(3, 1000), client(9, 700), client(7, 900)];
    trace.see(&processes).see(&processes);
    trace.tells(&["250 crowded 4/3", "250 over 3600/2000 peak 3600", "250 Terminate 9", "250 Terminate 7"]);
}

#[test]
fn while_one_goes_the_others_are_not_blamed_for_it() {
    let mut trace = trace();
    let stuck = [client(1, 1000), client(2, 5000)];
    trace.often(12, &stuck);
    trace.tells(&["250 over 6000/2000 peak 6000", "250 Terminate 2", "750 Kill 2"]);
    // Those that stay are judged by what they have themselves.
    let worse = [client(1, 2100), client(2, 5000)];
    trace.see(&worse).tells(&[]);
    trace.see(&worse).tells(&["3250 Terminate 1"]);
}

#[test]
fn a_pid_that_comes_again_is_another_process() {
    let mut trace = trace();
    trace.grow(&[3000, 3000]);
    trace.told.clear();
    let reborn = ObservedProcess { process: ProcessKey { pid: 1, started: 77 }, ..client(1, 3000) };
    trace.see(std::slice::from_ref(&reborn)).tells(&[]);
    trace.see(&[reborn]).tells(&["750 Terminate 1"]);
}

#[test]
fn too_many_processes_are_told_of_and_not_ended() {
    let mut trace = trace();
    let four: Vec<_> = (1..5).map(|pid| client(pid, 100)).collect();
    trace.often(9, &four);
    trace.tells(&["250 crowded 4/3"]);
    trace.see(&four[..3]).see(&four[..3]);
    trace.tells(&["2500 recovered Processes after 2250: 300/2000 peak 400"]);
}

#[test]
fn a_process_of_no_claim_is_ended_the_same_way() {
    let mut trace = trace();
    trace.foreign(&[bare(1, 0), client(2, 100)]).tells(&[]);
    let mut both = [bare(1, 0), client(2, 100)];
    trace.foreign(&both).tells(&["250 foreign 1", "250 Kill 1", "250 foreign 2", "250 Terminate 2"]);
    trace.foreign(&both).tells(&[]);
    trace.foreign(&both).tells(&["750 Kill 2"]);
    // It turns out to be somebody's.
    both[1].pod = ProcessPod::Known("pod".into());
    trace.see(&both[1..]).see(&both[1..]).tells(&[]);
}

#[test]
fn who_goes_around_mps_in_two_looks_in_a_row_is_told_of_and_ended() {
    let mut trace = trace();
    trace.see(&[around(1, 100), client(2, 100)]).see(&[client(1, 100), client(2, 100)]);
    trace.see(&[around(1, 100)]).tells(&[]);
    // The same PID, and another process.
    let reborn = ObservedProcess { process: ProcessKey { pid: 1, started: 77 }, ..around(1, 100) };
    trace.see(&[reborn]).see(&[]).tells(&[]);
    trace.often(2, &[around(1, 100), client(2, 100)]);
    trace.tells(&["1500 around [ClaimUid(\"c\")] 1", "1500 Kill 1"]);
    // It is told once, and killed again if it stays; its neighbour within the claim goes on.
    trace.often(25, &[around(1, 100), client(2, 100)]);
    trace.tells(&["6500 Kill 1"]);
}

#[test]
fn who_goes_around_mps_is_not_ended_twice_for_its_memory() {
    let mut trace = trace();
    let processes = [around(1, 3000), client(2, 100)];
    trace.often(6, &processes);
    trace.tells(&["250 around [ClaimUid(\"c\")] 1", "250 Kill 1", "250 over 3100/2000 peak 3100"]);
    trace.policy.terminate = false;
    trace.often(3, &[around(5, 100)]);
    let told = std::mem::take(&mut trace.told);
    assert!(told.iter().any(|line| line.ends_with("around [ClaimUid(\"c\")] 5")), "{told:?}");
    assert!(!told.iter().any(|line| line.contains("Kill")), "who is observed is not ended: {told:?}");
}

#[test]
fn claims_of_one_pod_share_their_grants_and_an_episode_outlives_a_change_of_company() {
    let mut trace = trace();
    let joint = |trace: &Trace, names: &[&str], mib| Account {
        claims: names.iter().map(|name| trace.claim(name)).collect(),
        processes: vec![client(1, mib)],
    };
    let two = joint(&trace, &["b", "a"], 3900);
    trace.look(vec![two.clone()], vec![]).look(vec![two], vec![]).tells(&[]);
    let one = joint(&trace, &["a"], 2050);
    trace.look(vec![one.clone()], vec![]).look(vec![one], vec![]);
    trace.tells(&["750 over 2050/2000 peak 3900"]);
    let two = joint(&trace, &["a", "b"], 2050);
    trace.look(vec![two.clone()], vec![]).look(vec![two], vec![]);
    trace.tells(&["1250 recovered Memory after 500: 2050/4000 peak 3900"]);
}

#[test]
fn what_is_not_counted_is_never_over() {
    let mut trace = trace();
    let mut account = Account { claims: vec![trace.claim("c")], processes: vec![client(1, 50_000)] };
    account.claims[0].memory = None;
    for _ in 0..9 {
        trace.look(vec![account.clone()], vec![]);
    }
    trace.tells(&[]);
    let unknown = ObservedProcess { used: None, ..client(2, 0) };
    let processes = [client(1, 3000), unknown];
    trace.see(&processes).see(&processes);
    let told = std::mem::take(&mut trace.told);
    assert_eq!(told[1..], ["2500 Terminate 1"], "who may hold nothing is not ended for it");
}

#[test]
fn a_board_that_does_not_answer_changes_nothing() {
    let mut trace = trace();
    trace.grow(&[3000]);
    let (verdicts, rows) = trace.watch.fold(&trace.policy, Moment::from_secs(10), &[]);
    assert_eq!((verdicts, rows), (vec![], vec![]));
    trace.now_ms = 20_000;
    trace.grow(&[3000]).tells(&["20000 over 3000/2000 peak 3000", "20000 Terminate 1"]);
    trace.watch.keep(&BTreeSet::new());
    assert!(trace.watch.boards.is_empty());
}

/// Allocations as fast programs make them, in MiB a second, looked at every 250 ms at any phase.
#[test]
fn from_crossing_to_the_first_action_it_takes_less_than_a_second() {
    for speed in [100, 1000, 20_000, 200_000] {
        for phase in 0..PERIOD_MS {
            let crossing_ms = ((2000 + 64 + 1) * 1000_u64).div_ceil(speed);
            let mut trace = trace();
            trace.now_ms = phase;
            while trace.told.iter().all(|line| !line.contains("Terminate")) {
                let mib = (trace.now_ms * speed / 1000).min(80_000);
                trace.grow(&[mib]);
                assert!(trace.now_ms < 60_000, "it is ended at last");
            }
            let acted_ms: u64 = trace.told.last().unwrap().split(' ').next().unwrap().parse().unwrap();
            assert!(acted_ms - crossing_ms < 2 * PERIOD_MS, "{speed} MiB/s: {acted_ms} - {crossing_ms}");
        }
    }
}

/// Nobody is ended unless two looks in a row were over grant and grace; and then somebody is.
fn ends_only_what_stays_beyond(looks: Vec<Vec<u64>>) -> Result<(), TestCaseError> {
    let mut trace = trace();
    let (mut beyond_before, mut quiet_before) = (false, true);
    for look in looks {
        let processes: Vec<ObservedProcess> = (1..).zip(look).map(|(pid, mib)| client(pid, mib)).collect();
        let total: u64 = processes.iter().filter_map(|seen| seen.used).map(|used| used.mib_floor()).sum();
        let beyond = total > 2064;
        // Nobody is being ended: all that is seen is judged.
        let board = trace.watch.boards.get(&DeviceUuid::from("GPU-0"));
        let quiet = board.is_none_or(|board| board.ending.is_empty());
        trace.see(&processes);
        let ended = trace.told.drain(..).any(|line| line.contains("Terminate"));
        prop_assert!(!ended || (beyond_before && beyond), "ended at {total} MiB");
        let due = beyond_before && beyond && quiet_before && quiet;
        prop_assert!(!due || ended, "nobody ended at {total} MiB");
        (beyond_before, quiet_before) = (beyond, quiet);
    }
    Ok(())
}

#[test]
fn one_that_grows_while_another_goes_is_judged_by_two_looks_too() {
    let looks = [vec![1403, 662], vec![0, 779, 1286], vec![700, 1365, 1], vec![655, 1410]];
    ends_only_what_stays_beyond(looks.to_vec()).unwrap();
}

proptest! {
    #[test]
    fn an_end_follows_two_looks_beyond_and_nothing_else(
        looks in prop::collection::vec(prop::collection::vec(0_u64..1500, 0..4), 1..40)
    ) {
        ends_only_what_stays_beyond(looks)?;
    }
}
