//! Who is taken for whom, and what must have been said before.

use super::super::shares::tests::board;
use super::*;
use crate::model::quantity::Bytes;
use crate::model::share::{Grant, Isolation, MpsGroup};

const POD: &str = "pod-of-a";

/// Milliseconds after the watchdog began.
fn at(ms: u64) -> Moment {
    Moment::from_millis(ms)
}

fn claim(name: &str) -> ClaimRef {
    ClaimRef { namespace: "team".into(), name: name.into(), uid: name.into() }
}

/// A GPU with shares of claims a and b, served by MPS.
fn device() -> WatchedDevice {
    let memory = Bytes::from_mib(1000);
    let grant = Grant { memory, compute: None, slots: 1, processes: 1, isolation: Isolation::Mps };
    WatchedDevice {
        shares: vec![(claim("a"), grant), (claim("b"), grant)],
        admins: vec![claim("admin")],
        groups: BTreeSet::from([MpsGroup::new(["GPU-0".into()])]),
        ..board("gpu-0", "GPU-0")
    }
}

fn process(pid: u32, owner: ProcessOwner) -> KnownProcess {
    KnownProcess { process: ProcessKey { pid, started: 1 }, owner, believed: true }
}

fn in_pod(pid: u32, pod: &str) -> KnownProcess {
    process(pid, ProcessOwner::Pod { pod: pod.into(), container: None })
}

fn users(pods: &[&str]) -> Option<ClaimUsers> {
    let pod = |uid: &&str| PodRef { namespace: "team".into(), name: "p".into(), uid: (*uid).into() };
    Some(ClaimUsers { pods: pods.iter().map(pod).collect(), others: false })
}

/// Everything was asked at this time, and answered: claim a has a pod, an administrator another.
fn informed(at_ms: u64) -> Knowledge {
    let mut knowledge = Knowledge::new(Some("our-pod".into()));
    knowledge.keep(device().claims());
    knowledge.users_answered(&"a".into(), at(at_ms), users(&[POD]));
    knowledge.users_answered(&"b".into(), at(at_ms), users(&[]));
    knowledge.users_answered(&"admin".into(), at(at_ms), users(&["pod-of-admin"]));
    knowledge.ledger_answered(at(at_ms), true);
    knowledge.servers_answered(at(at_ms), Some(servers()));
    knowledge
}

fn servers() -> Servers {
    let processes = BTreeMap::from([(ProcessKey { pid: 77, started: 1 }, None)]);
    Servers { processes, pods: BTreeSet::from(["pod-of-mps".into()]) }
}

fn owner(knowledge: &mut Knowledge, known: &KnownProcess, now_ms: u64) -> ProcessStanding {
    knowledge.note_processes([known].into_iter(), at(now_ms));
    knowledge.owner(&device(), known)
}

#[test]
fn each_process_is_somebodys_or_foreign() {
    let knowledge = &mut informed(1000);
    assert_eq!(owner(knowledge, &in_pod(1, POD), 500), ProcessStanding::Claim);
    assert_eq!(owner(knowledge, &in_pod(2, "pod-of-admin"), 500), ProcessStanding::Exempt);
    assert_eq!(owner(knowledge, &in_pod(3, "our-pod"), 500), ProcessStanding::Exempt);
    assert_eq!(owner(knowledge, &in_pod(4, "pod-of-mps"), 500), ProcessStanding::Exempt);
    assert_eq!(
        owner(knowledge, &process(77, ProcessOwner::Host), 500),
        ProcessStanding::Exempt,
        "an MPS server"
    );
    assert_eq!(owner(knowledge, &in_pod(std::process::id(), "strange"), 500), ProcessStanding::Exempt);
    assert_eq!(owner(knowledge, &in_pod(5, "strange"), 500), ProcessStanding::Foreign);
    assert_eq!(owner(knowledge, &process(6, ProcessOwner::Host), 500), ProcessStanding::Foreign);
    let reborn =
        KnownProcess { process: ProcessKey { pid: 77, started: 2 }, ..process(77, ProcessOwner::Host) };
    assert_eq!(
        owner(knowledge, &reborn, 500),
        ProcessStanding::Foreign,
        "the server's PID is not the server"
    );
}

#[test]
fn an_answer_from_before_it_was_seen_makes_nobody_foreign() {
    let knowledge = &mut informed(1000);
    let late = in_pod(5, "strange");
    assert_eq!(owner(knowledge, &late, 1001), ProcessStanding::Unknown);
    let question = knowledge.questions([&device()].into_iter(), at(1001));
    let wanted = vec![claim("a"), claim("admin"), claim("b")];
    assert_eq!(question, Questions { claims: wanted, ledger: true, servers: true });
    assert_eq!(knowledge.questions([&device()].into_iter(), at(1001)), Questions::default(), "once");
    for name in ["a", "b", "admin"] {
        assert_eq!(owner(knowledge, &late, 1100), ProcessStanding::Unknown, "{name} may have it");
        knowledge.users_answered(&name.into(), at(1001), users(&[]));
    }
    knowledge.ledger_answered(at(1001), true);
    assert_eq!(owner(knowledge, &late, 1100), ProcessStanding::Unknown, "it may be a server");
    knowledge.servers_answered(at(1001), Some(servers()));
    assert_eq!(owner(knowledge, &late, 1100), ProcessStanding::Foreign);
}

#[test]
fn silence_is_no_fact_and_is_asked_again_once_a_second() {
    let knowledge = &mut informed(1000);
    let late = in_pod(5, "strange");
    owner(knowledge, &late, 2000);
    let mut asked_at = Vec::new();
    for now_ms in (2000..6000).step_by(250) {
        assert_eq!(owner(knowledge, &late, now_ms), ProcessStanding::Unknown);
        let question = knowledge.questions([&device()].into_iter(), at(now_ms));
        if question.claims.contains(&claim("a")) {
            asked_at.push(now_ms);
            knowledge.users_answered(&"a".into(), at(now_ms), None);
        }
        if question.ledger {
            knowledge.ledger_answered(at(now_ms), false);
        }
        if question.servers {
            knowledge.servers_answered(at(now_ms), None);
        }
    }
    assert_eq!(asked_at, [2000, 3000, 4000, 5000]);
    assert_eq!(owner(knowledge, &in_pod(1, POD), 6000), ProcessStanding::Claim, "what was known stays known");
}

#[test]
fn a_claim_for_more_than_pods_makes_no_pod_foreign() {
    let knowledge = &mut informed(1000);
    knowledge.users_answered(
        &"b".into(),
        at(1000),
        Some(ClaimUsers { others: true, ..ClaimUsers::default() }),
    );
    assert_eq!(owner(knowledge, &in_pod(5, "strange"), 500), ProcessStanding::Unknown);
    assert_eq!(
        owner(knowledge, &process(6, ProcessOwner::Host), 500),
        ProcessStanding::Foreign,
        "but a host's process is"
    );
}

/// It would be on nobody's account. What the API server says, or does not, names nobody who hides.
#[test]
fn who_hides_his_pod_is_a_stranger_on_every_gpu() {
    let hidden = process(5, ProcessOwner::Hidden);
    for device in [device(), whole()] {
        // No process was seen in a pod, and the API server is silent.
        let mut knowledge = Knowledge::new(None);
        knowledge.keep(device.claims());
        knowledge.note_processes([&hidden].into_iter(), at(500));
        assert_eq!(knowledge.owner(&device, &hidden), ProcessStanding::Unknown);
        knowledge.ledger_answered(at(1000), true);
        knowledge.servers_answered(at(1000), Some(Servers::default()));
        assert_eq!(knowledge.owner(&device, &hidden), ProcessStanding::Foreign);
        let not_believed = KnownProcess { believed: false, ..hidden.clone() };
        assert_eq!(
            knowledge.owner(&device, &not_believed),
            ProcessStanding::Unknown,
            "the number may mean another"
        );
        let us =
            KnownProcess { process: ProcessKey { pid: std::process::id(), started: 1 }, ..hidden.clone() };
        assert_eq!(knowledge.owner(&device, &us), ProcessStanding::Exempt);
    }
    let knowledge = &mut informed(1000);
    let server = process(77, ProcessOwner::Hidden);
    assert_eq!(owner(knowledge, &server, 500), ProcessStanding::Exempt);
}

#[test]
fn a_host_process_is_judged_only_where_pods_can_be_told() {
    let mut blind = Knowledge::new(None);
    blind.keep(device().claims());
    blind.ledger_answered(at(1000), true);
    blind.servers_answered(at(1000), Some(Servers::default()));
    let lone = process(6, ProcessOwner::Host);
    assert_eq!(owner(&mut blind, &lone, 500), ProcessStanding::Unknown, "perhaps all look like this here");
    blind.note_processes([&lone, &in_pod(9, "any")].into_iter(), at(600));
    assert_eq!(owner(&mut blind, &lone, 700), ProcessStanding::Foreign);
    let not_believed = KnownProcess { believed: false, ..process(8, ProcessOwner::Host) };
    assert_eq!(owner(&mut blind, &not_believed, 700), ProcessStanding::Unknown, "it holds no device file");
}

#[test]
fn a_deleted_pod_stays_the_claims_until_its_processes_are_gone() {
    let knowledge = &mut informed(1000);
    let ending = in_pod(1, POD);
    knowledge.note_processes([&ending].into_iter(), at(500));
    knowledge.users_answered(&"a".into(), at(1500), users(&["next"]));
    assert_eq!(owner(knowledge, &ending, 1600), ProcessStanding::Claim);
    knowledge.note_processes([].into_iter(), at(1700));
    knowledge.users_answered(&"a".into(), at(1800), users(&["next"]));
    let pods: Vec<_> = knowledge.pods(&"a".into()).iter().map(|pod| pod.uid.as_str()).collect();
    assert_eq!(pods, ["next"]);
}

#[test]
fn every_claim_is_asked_about_once_at_the_start() {
    let mut fresh = Knowledge::new(None);
    let devices = [device(), device()];
    let question = fresh.questions(devices.iter(), at(0));
    assert_eq!(question.claims.len(), 3, "each once, on however many devices");
    assert!(!question.ledger && !question.servers);
    fresh.keep([].into_iter());
    assert_eq!(fresh.pods(&"a".into()), []);
}

/// A GPU that claim a has for itself, beside an administrator's.
fn whole() -> WatchedDevice {
    WatchedDevice { shares: Vec::new(), alone: vec![claim("a")], groups: BTreeSet::new(), ..device() }
}

fn owner_of_whole(knowledge: &mut Knowledge, known: &KnownProcess, now_ms: u64) -> ProcessStanding {
    knowledge.note_processes([known].into_iter(), at(now_ms));
    knowledge.owner(&whole(), known)
}

#[test]
fn on_a_whole_gpu_pods_without_a_claim_are_strangers_and_the_host_is_not() {
    let mut knowledge = informed(100);
    for (known, expected) in [
        (in_pod(1, POD), ProcessStanding::Exempt),
        (in_pod(2, "pod-of-admin"), ProcessStanding::Exempt),
        (in_pod(3, "stranger"), ProcessStanding::Foreign),
        (process(4, ProcessOwner::Host), ProcessStanding::Exempt),
    ] {
        assert_eq!(owner_of_whole(&mut knowledge, &known, 50), expected, "{known:?}");
    }
    // Nobody has been asked about a pod that comes now.
    assert_eq!(owner_of_whole(&mut knowledge, &in_pod(5, "newcomer"), 200), ProcessStanding::Unknown);
}

#[test]
fn a_pod_that_the_ledger_names_is_no_stranger_though_its_claim_is_gone() {
    for device in [whole(), device()] {
        let mut knowledge = informed(100);
        let pod = PodRef { namespace: "team".into(), name: "p".into(), uid: "recorded".into() };
        knowledge.record(HashMap::from([("a".into(), vec![pod])]));
        // Gone by the API server's word, before the pod is seen and after.
        for at_ms in [100, 200] {
            knowledge.users_answered(&"a".into(), at(at_ms), Some(ClaimUsers::default()));
            let known = in_pod(7, "recorded");
            knowledge.note_processes([&known].into_iter(), at(at_ms));
            let owner = knowledge.owner(&device, &known);
            assert_eq!(
                owner,
                if device.is_alone() { ProcessStanding::Exempt } else { ProcessStanding::Claim }
            );
            assert_eq!(knowledge.pods(&"a".into()).len(), 1, "its memory is counted");
        }
        knowledge.note_processes([].into_iter(), at(300));
        knowledge.users_answered(&"a".into(), at(300), Some(ClaimUsers::default()));
        assert_eq!(knowledge.pods(&"a".into()), [], "and no longer than it runs");
    }
}

fn pod_named(uid: &str) -> PodRef {
    PodRef { namespace: "team".into(), name: "p".into(), uid: uid.into() }
}

#[test]
fn a_whole_gpu_asks_the_api_server_about_strangers_only() {
    let mut knowledge = Knowledge::new(None);
    knowledge.keep(whole().claims());
    knowledge.record(HashMap::from([("a".into(), vec![pod_named(POD)])]));
    assert_eq!(knowledge.named_pods(&"a".into()), [pod_named(POD)], "the ledger names it");
    assert_eq!(knowledge.questions([whole()].iter(), at(0)), Questions::default());
    let known = in_pod(7, "stranger");
    assert_eq!(owner_of_whole(&mut knowledge, &known, 10), ProcessStanding::Unknown);
    let question = knowledge.questions([whole()].iter(), at(10));
    assert_eq!(
        (question.claims, question.ledger, question.servers),
        (vec![claim("a"), claim("admin")], true, false)
    );
}

#[test]
fn a_claim_with_several_pods_is_asked_about_now_and_then_so_that_those_which_went_are_not_shown() {
    let mut knowledge = Knowledge::new(None);
    knowledge.keep(whole().claims());
    knowledge.record(HashMap::from([("a".into(), vec![pod_named(POD), pod_named("other")])]));
    let mut asked_at = Vec::new();
    for second in 0..150 {
        let now = second * 1000;
        if knowledge.questions([whole()].iter(), at(now)).claims.contains(&claim("a")) {
            asked_at.push(second);
            let pods: &[&str] = if second < 100 { &[POD, "other"] } else { &[POD] };
            knowledge.users_answered(&"a".into(), at(now), users(pods));
        }
    }
    assert_eq!(asked_at, [0, 60, 120]);
    assert_eq!(knowledge.named_pods(&"a".into()).len(), 1);
}

#[test]
fn servers_are_known_by_pid_and_start_time() {
    let knowledge = informed(1000);
    assert!(knowledge.is_server(&process(77, ProcessOwner::Host)));
    assert!(!knowledge.is_server(&process(78, ProcessOwner::Host)));
}

#[test]
fn the_supervisor_is_asked_about_a_server_that_came_later_until_it_names_it() {
    let knowledge = &mut informed(1000);
    let asks = |knowledge: &mut Knowledge, pid: u32, now_ms: u64| {
        assert_eq!(owner(knowledge, &in_pod(pid, "pod-of-mps"), now_ms), ProcessStanding::Exempt);
        knowledge.questions([device()].iter(), at(now_ms)).servers
    };
    assert!(!asks(knowledge, 77, 2000), "it is known");
    assert!(asks(knowledge, 78, 2000));
    // The supervisor had not seen it itself.
    knowledge.servers_answered(at(2000), Some(servers()));
    assert!(!asks(knowledge, 78, 2250), "once in a second");
    assert!(asks(knowledge, 78, 3000));
    let mut servers = servers();
    servers.processes.insert(ProcessKey { pid: 78, started: 1 }, Some("a".into()));
    knowledge.servers_answered(at(3000), Some(servers));
    assert!(!asks(knowledge, 78, 4000));
    assert_eq!(knowledge.served_claim(&in_pod(78, "pod-of-mps")), Some(&"a".into()));
}
