//! What reading and deciding cost, who pays for them, and where they go on.

use std::collections::BTreeSet;
use std::time::Duration;

use serde_json::{Value, json};

use super::cluster::{Cluster, object};
use super::scenes::{LONG, cluster, share};
use crate::controller::queue::Patience;
use crate::model::names::{DRIVER, PodUid, SHARED_CLASS};

/// Of a claim that a pod names.
const LOOK_UP: u64 = 5;

fn claim(cluster: &mut Cluster, name: &str, memory: &str, requests: &[Value], constraints: &[Value]) {
    let parameters = json!({"apiVersion": "tranche.dev/v1alpha1", "kind": "GpuShare", "memory": memory});
    cluster.put_claim(json!({"metadata": {"name": name, "namespace": "evil"}, "spec": {"devices": {
        "requests": requests, "constraints": constraints,
        "config": [{"opaque": {"driver": DRIVER, "parameters": parameters}}]}}}));
}

fn plain(count: usize) -> Vec<Value> {
    let of = |n: usize| json!({"name": format!("r{n}"), "exactly": {"deviceClassName": SHARED_CLASS}});
    (0..count).map(of).collect()
}

fn either(count: usize, alternatives: usize) -> Vec<Value> {
    let of = |n: usize| json!({"name": format!("s{n}"), "deviceClassName": SHARED_CLASS});
    let all: Vec<Value> = (0..alternatives).map(of).collect();
    (0..count).map(|n| json!({"name": format!("e{n}"), "firstAvailable": all})).collect()
}

fn product(names: &[&str]) -> Value {
    match names {
        [] => json!({"matchAttribute": "gpu.nvidia.com/productName"}),
        _ => json!({"matchAttribute": "gpu.nvidia.com/productName", "requests": names}),
    }
}

fn pod(cluster: &mut Cluster, name: &str, claims: &[String], more: Value) {
    let named: Vec<Value> = claims.iter().map(|one| json!({"name": one, "resourceClaimName": one})).collect();
    let mut pod = json!({"metadata": {"name": name, "namespace": "evil", "uid": name},
        "spec": {"containers": [{"name": "main"}], "resourceClaims": named}, "status": {"phase": "Pending"}});
    super::cluster::merge(&mut pod, &more);
    cluster.store_pod(object(pod));
}

fn waits_because(cluster: &Cluster, name: &str) -> String {
    let claim = &cluster.claims[&("evil".to_owned(), name.to_owned())];
    let annotations = claim.metadata.annotations.clone().unwrap_or_default();
    annotations.get("tranche.dev/waiting").cloned().unwrap_or_default()
}

fn is_placed(cluster: &Cluster, name: &str) -> bool {
    let claim = &cluster.claims[&("evil".to_owned(), name.to_owned())];
    claim.status.as_ref().is_some_and(|status| status.allocation.is_some())
}

/// Reads what a pod asks for: whether it can be read, and what that cost.
fn read(cluster: &mut Cluster, pod: &str) -> (Result<(), String>, u64) {
    cluster.core.capacity.index.allow(u64::MAX);
    let part = cluster.core.part(&PodUid::new(pod), &BTreeSet::new(), cluster.now);
    let part = part.map(|part| assert!(part.is_some())).map_err(|refused| refused.words);
    (part, cluster.core.capacity.index.spent().0)
}

/// 8,192 constraints of one pod took 27 MB for each of its shapes on 800 GPUs.
#[test]
fn constraints_of_a_pod_name_a_number_of_requests_together() {
    let mut cluster = cluster(1, 8);
    let names: Vec<String> = (0..9).map(|nth| format!("c{nth}")).collect();
    names.iter().for_each(|name| claim(&mut cluster, name, "1Mi", &plain(1), &vec![product(&[]); 32]));
    pod(&mut cluster, "many", &names, json!({}));
    share(&mut cluster, "victim", "10Gi");
    cluster.settle(LONG);
    let why = waits_because(&cluster, "c0");
    assert!(
        why.contains("the constraints of its claims name 288 requests, each counted as often as it is named")
            && why.contains("at most 256: write fewer constraints"),
        "{why}"
    );
    assert!(cluster.place("victim").is_some());
    // As many as there may be, and what is said again counts once where GPUs are looked for.
    let names: Vec<String> = (0..8).map(|nth| format!("d{nth}")).collect();
    names.iter().for_each(|name| claim(&mut cluster, name, "1Mi", &plain(1), &vec![product(&[]); 32]));
    pod(&mut cluster, "fewer", &names, json!({}));
    cluster.settle(LONG);
    assert!(names.iter().all(|name| is_placed(&cluster, name)), "{}", waits_because(&cluster, "d0"));
    cluster.check();
}

/// A pod whose claims were refused paid nothing, however much was read of them before.
#[test]
fn a_pod_that_is_refused_for_its_claims_has_paid_for_what_was_read() {
    let mut cluster = cluster(1, 8);
    claim(&mut cluster, "one", "1Mi", &either(2, 8), &[]);
    claim(&mut cluster, "other", "1Mi", &either(2, 8), &[]);
    pod(&mut cluster, "both", &["one".to_owned(), "other".to_owned()], json!({}));
    claim(&mut cluster, "wrong", "1Mi", &plain(32), &[json!({"requests": ["r0"]})]);
    pod(&mut cluster, "bad", &["wrong".to_owned()], json!({}));
    let constraints = vec![product(&["e0", "e1", "r2", "r3", "r4", "r5", "r6", "r7"]); 32];
    claim(&mut cluster, "dear", "1Mi", &[either(2, 8), plain(32).split_off(2)].concat(), &constraints);
    pod(&mut cluster, "large", &["dear".to_owned()], json!({}));
    cluster.deliver(usize::MAX);
    // What is too much is counted, and not read.
    let (found, spent) = read(&mut cluster, "both");
    assert!(found.unwrap_err().contains("more than 64 combinations of alternatives"));
    assert!((1..500).contains(&spent), "{spent}");
    let (found, spent) = read(&mut cluster, "bad");
    assert!(found.unwrap_err().contains("constraints[0]: must have either"));
    assert!(spent > 32 * 50, "{spent}");
    // It is not read again.
    let (found, again) = read(&mut cluster, "bad");
    assert!(found.unwrap_err().contains("constraints[0]: must have either"));
    assert_eq!((again, cluster.core.purse.dear_claims()), (LOOK_UP, 1));
    // Each name of each constraint is compared with each request, in each combination.
    let (found, spent) = read(&mut cluster, "large");
    assert_eq!(found, Ok(()));
    assert!(spent > 64 * 32 * (50 + 2 * 256), "{spent}");
}

/// Pods of a gang, each with claims of its own of different sizes, which are a little more than a node has, so that no
/// search is short.
fn hard_gang(cluster: &mut Cluster, pods: usize, claims: usize) {
    for nth in 0..pods {
        let names: Vec<String> = (0..claims).map(|claim| format!("h{nth}-{claim}")).collect();
        for (at, name) in names.iter().enumerate() {
            claim(cluster, name, &format!("{}Mi", 35_000 + 10 * at + nth), &plain(1), &[]);
        }
        let cpu = format!("{}m", 100 + nth);
        pod(
            cluster,
            &format!("h{nth}"),
            &names,
            json!({
            "metadata": {"annotations": {"tranche.dev/gang": "hard", "tranche.dev/gang-size": "2"}},
            "spec": {"containers": [{"name": "main", "resources": {"requests": {"cpu": cpu}}}]}}),
        );
    }
}

/// Each pod of a gang that did not fit was tried by itself, in one round, however long that took.
#[test]
fn a_gang_is_tried_pod_by_pod_as_far_as_each_round_goes() {
    const ROUND: u64 = 200_000;
    let mut cluster = cluster(3, 4);
    cluster.core.purse.bound(ROUND);
    hard_gang(&mut cluster, 8, 9);
    share(&mut cluster, "victim", "10Gi");
    cluster.deliver(usize::MAX);
    let (mut most, mut rounds, mut sum) = (0, 0, 0);
    loop {
        let next = cluster.round();
        if rounds == 0 {
            let claims = cluster.core.tracker.planned_claims().count();
            assert_eq!(claims, 1, "the other namespace's is placed in the first round");
        }
        let spent = cluster.core.purse.spent_by("evil");
        (most, sum, rounds) = (most.max(spent), sum + spent, rounds + 1);
        if next.is_none_or(|next| next > cluster.now) || rounds > 300 {
            break;
        }
    }
    assert!(sum > 3 * ROUND, "{sum} in {rounds} rounds: it is more than a round's");
    assert!(most < 2 * ROUND, "{most} in one round");
    assert!(rounds < 300, "it does not end");
    cluster.settle(LONG);
    let why = waits_because(&cluster, "h0-0");
    assert!(
        why.contains(
            "for 9 requests; each fits somewhere, but no node was found that has room for all at once"
        ),
        "{why}"
    );
    assert!(cluster.place("victim").is_some());
    cluster.check();
}

/// A decision that takes more than a round's work is refused, and not begun again and again.
#[test]
fn a_decision_that_takes_more_than_a_round_is_refused_with_what_to_do() {
    const ROUND: u64 = 10_000;
    let mut cluster = cluster(3, 4);
    cluster.core.purse.bound(ROUND);
    let names: Vec<String> = (0..9).map(|nth| format!("c{nth}")).collect();
    for (nth, name) in names.iter().enumerate() {
        claim(&mut cluster, name, &format!("{}Mi", 35_000 + 10 * nth), &plain(1), &[]);
    }
    pod(&mut cluster, "hard", &names, json!({}));
    cluster.deliver(usize::MAX);
    let mut rounds = 0;
    while cluster.round().is_some_and(|next| next <= cluster.now) {
        rounds += 1;
        assert!(rounds < 100, "it does not end");
    }
    cluster.settle(LONG);
    let why = waits_because(&cluster, "c0");
    assert!(why.contains("it takes too long to try all ways to place 9 requests on one node"), "{why}");
}

/// The trial of a gang began again with all of its pods whenever the round was spent before fewer were tried.
#[test]
fn a_gang_that_starts_with_fewer_goes_on_with_them_in_the_next_round() {
    let mut cluster = cluster(2, 1);
    for nth in 0..4 {
        let amounts = ["500Gi", "501Gi", "502Gi", "503Gi", "504Gi", "505Gi", "506Gi", "60Gi"];
        let name = format!("g{nth}");
        cluster.put_alternatives("evil", &name, &amounts);
        let gang =
            json!({"metadata": {"annotations": {"tranche.dev/gang": "g", "tranche.dev/gang-size": "2"}}});
        pod(&mut cluster, &name, std::slice::from_ref(&name), gang);
    }
    cluster.deliver(usize::MAX);
    // Enough to read what they ask for, and for one step or another of what follows.
    let reading: u64 = (0..4).map(|nth| read(&mut cluster, &format!("g{nth}")).1).sum();
    cluster.core.purse.bound(reading + 500);
    let mut rounds = 0;
    while cluster.core.tracker.planned_claims().count() == 0 {
        rounds += 1;
        assert!(rounds < 50, "it does not end");
        cluster.round();
    }
    assert!(rounds > 2, "all at once in {rounds}");
    cluster.settle(LONG);
    let placed = (0..4).filter(|nth| is_placed(&cluster, &format!("g{nth}"))).count();
    assert_eq!(placed, 2, "two have room, and two are enough: {}", waits_because(&cluster, "g0"));
    cluster.check();
}

/// Rounds that come to nothing are over in milliseconds, and are no time to pay in.
#[test]
fn who_owes_time_is_not_waited_for_by_looking_again_and_again() {
    let mut cluster = cluster(3, 4);
    hard_gang(&mut cluster, 2, 9);
    cluster.deliver(usize::MAX);
    cluster.round();
    cluster.core.purse.pay("evil", 5 * 100_000_000);
    claim(&mut cluster, "late", "1Gi", &plain(1), &[]);
    pod(&mut cluster, "late", &["late".to_owned()], json!({}));
    cluster.deliver(usize::MAX);
    // The debt shows in the next round.
    cluster.now += Duration::from_millis(10);
    let next = cluster.round().unwrap();
    assert!(!is_placed(&cluster, "late"));
    assert!(next > cluster.now + Duration::from_secs(1), "{:?}", next - cluster.now);
    cluster.settle(LONG);
    assert!(is_placed(&cluster, "late"));
}

/// Pods of a gang that each demand something else of nodes. `claims`: the name of each one's claim.
fn demanding_gang(cluster: &mut Cluster, pods: usize, claims: impl Fn(usize) -> String) {
    for nth in 0..pods {
        let term = |at: usize| {
            let expression =
                json!({"key": format!("zone-{nth}"), "operator": "NotIn", "values": [at.to_string()]});
            json!({"matchExpressions": [expression]})
        };
        let terms: Vec<Value> = (0..100).map(term).collect();
        let affinity = json!({"nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}});
        let annotations = json!({"tranche.dev/gang": "x", "tranche.dev/gang-size": "2"});
        let gang = json!({"metadata": {"annotations": annotations}, "spec": {"affinity": affinity}});
        pod(cluster, &format!("x{nth}"), &[claims(nth)], gang);
    }
}

/// In no round, and also while room is kept for it. `name`: of the claim of which `why` is told in the end.
fn spends_no_more_than_it_may(cluster: &mut Cluster, (name, why): (&str, &str)) {
    const ROUND: u64 = 200_000;
    cluster.core.purse.bound(ROUND);
    cluster.core.queue.patience = Patience { passes: 0, time: Duration::ZERO, ..Patience::default() };
    share(cluster, "victim", "10Gi");
    cluster.deliver(usize::MAX);
    for nth in 0..60 {
        cluster.core.capacity.news();
        cluster.round();
        let spent = cluster.core.purse.spent_by("evil");
        assert!(spent < 2 * ROUND, "{spent} in round {nth}");
        cluster.now += Duration::from_secs(3);
    }
    cluster.settle(LONG);
    assert!(cluster.place("victim").is_some());
    let told = waits_because(cluster, name);
    assert!(told.contains(why), "{told}");
}

/// Of a gang whose pods are all refused each was asked of all nodes, in one round.
#[test]
fn a_gang_of_pods_that_each_demand_something_else_spends_no_more_than_its_namespace_may() {
    let mut dear = cluster(20, 1);
    claim(&mut dear, "dear", "1Mi", &either(3, 8), &[]);
    demanding_gang(&mut dear, 100, |_| "dear".to_owned());
    spends_no_more_than_it_may(&mut dear, ("dear", "more than 64 combinations of alternatives"));

    let mut wrong = cluster(20, 1);
    let mut requests = plain(1);
    requests[0]["exactly"]["selectors"] = json!([{"cel": {"expression": "device.driver =="}}]);
    (0..100).for_each(|nth| claim(&mut wrong, &format!("c{nth}"), "1Mi", &requests, &[]));
    demanding_gang(&mut wrong, 100, |nth| format!("c{nth}"));
    spends_no_more_than_it_may(&mut wrong, ("c0", "is not valid CEL"));

    let mut large = cluster(20, 1);
    (0..100).for_each(|nth| claim(&mut large, &format!("c{nth}"), "900Gi", &plain(1), &[]));
    demanding_gang(&mut large, 100, |nth| format!("c{nth}"));
    spends_no_more_than_it_may(&mut large, ("c0", "too many different node affinities"));
}

/// What came while a trial went on over rounds was looked at by none of its steps that were done already, and by no
/// trial after that.
#[test]
fn room_that_comes_while_a_unit_is_being_tried_is_found() {
    let mut cluster = cluster(1, 1);
    share(&mut cluster, "there", "70Gi");
    cluster.settle(LONG);
    cluster.put_alternatives(
        "evil",
        "a",
        &["60Gi", "500Gi", "501Gi", "502Gi", "503Gi", "504Gi", "505Gi", "506Gi"],
    );
    pod(&mut cluster, "a", &["a".to_owned()], json!({}));
    cluster.deliver(usize::MAX);
    let reading = read(&mut cluster, "a").1;
    cluster.core.purse.bound(reading + 1);
    cluster.round();
    assert!(cluster.core.queue.has_left(), "it goes on in the next round");
    cluster.drop_pod("there", true);
    // Until it is refused, if it is: nothing else happens.
    cluster.settle(LONG);
    assert!(is_placed(&cluster, "a"), "{}", waits_because(&cluster, "a"));
}

/// Where reading took all that a unit may spend, its selectors were never looked at, in no round.
#[test]
fn a_unit_whose_reading_takes_its_part_of_a_round_is_given_more() {
    let mut cluster = cluster(1, 8);
    let selectors = json!([{"cel": {"expression": "device.driver == 'gpu.nvidia.com'"}}]);
    let mut requests = plain(4);
    requests[0]["exactly"]["selectors"] = selectors;
    claim(&mut cluster, "long", "1Mi", &requests, &vec![product(&[]); 64]);
    pod(&mut cluster, "long", &["long".to_owned()], json!({}));
    cluster.deliver(usize::MAX);
    let reading = read(&mut cluster, "long").1;
    // Others wait in as many namespaces that each has less than that.
    for nth in 0..40 {
        let namespace = format!("other-{nth}");
        cluster.put_alternatives(&namespace, "much", &["900Gi"]);
        let named = json!([{"name": "c", "resourceClaimName": "much"}]);
        cluster.store_pod(object(json!({"metadata": {"name": "much", "namespace": namespace},
            "spec": {"containers": [{"name": "main"}], "resourceClaims": named}, "status": {"phase": "Pending"}})));
    }
    cluster.deliver(usize::MAX);
    cluster.core.purse.bound(20 * reading);
    for _ in 0..100 {
        // News in each round: whoever was tried is due again.
        cluster.core.capacity.news();
        cluster.round();
        if cluster.core.tracker.planned_claims().count() > 0 {
            return;
        }
        cluster.now += Duration::from_millis(100);
    }
    panic!("its selectors are never looked at: {}", waits_because(&cluster, "long"));
}
