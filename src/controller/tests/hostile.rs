//! What a tenant may write that costs more than the tenant's own: seen on a live cluster, each the first of its kind.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::cluster::{Cluster, merge, object};
use super::scenes::{LONG, MOMENT, cluster, put_kai, share};
use super::told::until;
use crate::controller::view::movable::OwnerKey;
use crate::controller::write::Write;
use crate::model::names::{DRIVER, NodeName, SHARED_CLASS};

const KAI: &str = "kai-gpu-share";

/// A claim of these requests, for 1 MiB each.
fn claim(cluster: &mut Cluster, namespace: &str, name: &str, requests: &[Value]) {
    let parameters = json!({"apiVersion": "tranche.dev/v1alpha1", "kind": "GpuShare", "memory": "1Mi"});
    cluster.put_claim(json!({"metadata": {"name": name, "namespace": namespace}, "spec": {"devices": {
        "requests": requests, "config": [{"opaque": {"driver": DRIVER, "parameters": parameters}}]}}}));
}

fn plain(count: usize) -> Vec<Value> {
    (0..count)
        .map(|n| json!({"name": format!("r{n}"), "exactly": {"deviceClassName": SHARED_CLASS}}))
        .collect()
}

fn either(count: usize, alternatives: usize) -> Vec<Value> {
    let of = |n: usize| json!({"name": format!("s{n}"), "deviceClassName": SHARED_CLASS});
    let all: Vec<Value> = (0..alternatives).map(of).collect();
    (0..count).map(|n| json!({"name": format!("r{n}"), "firstAvailable": all})).collect()
}

/// A pod that names these claims.
fn pod(cluster: &mut Cluster, namespace: &str, name: &str, claims: &[String]) {
    let named: Vec<Value> = claims.iter().map(|one| json!({"name": one, "resourceClaimName": one})).collect();
    cluster.store_pod(object(json!({"metadata": {"name": name, "namespace": namespace},
        "spec": {"containers": [{"name": "main"}], "resourceClaims": named}, "status": {"phase": "Pending"}})));
}

fn waits_because(cluster: &Cluster, namespace: &str, name: &str) -> String {
    let claim = &cluster.claims[&(namespace.to_owned(), name.to_owned())];
    let annotations = claim.metadata.annotations.clone().unwrap_or_default();
    annotations.get("tranche.dev/waiting").cloned().unwrap_or_default()
}

/// A thousand claims of 32 requests each in 64 combinations, all named by one pod, stopped the controller: the round
/// did not end.
#[test]
fn claims_of_a_pod_with_more_requests_than_any_pod_is_placed_with_are_refused_at_once() {
    let mut cluster = cluster(1, 2);
    claim(&mut cluster, "evil", "many", &either(2, 8));
    let mut names = vec!["many".to_owned()];
    for nth in 0..200 {
        let name = format!("c{nth}");
        claim(&mut cluster, "evil", &name, &plain(32));
        names.push(name);
    }
    (0..20).for_each(|nth| pod(&mut cluster, "evil", &format!("p{nth}"), &names));
    share(&mut cluster, "victim", "10Gi");
    let begin = Instant::now();
    cluster.settle(LONG);
    // Unoptimised and beside other tests; it was minutes for a single round.
    assert!(begin.elapsed() < Duration::from_secs(60), "{:?}", begin.elapsed());
    assert!(cluster.place("victim").is_some());
    let why = waits_because(&cluster, "evil", "c0");
    assert!(why.contains("have 6402 requests together; a pod is placed with at most 256"), "{why}");
}

/// Each claim that was created, changed or deleted had all pods that name it looked at, each with all of its claims.
#[test]
fn pods_that_name_many_claims_are_looked_at_once_a_round_however_many_of_these_change() {
    let (claims, pods, changes): (u64, u64, u64) = (200, 400, 40);
    let mut cluster = cluster(1, 2);
    let names: Vec<String> = (0..claims).map(|nth| format!("c{nth}")).collect();
    names.iter().for_each(|name| claim(&mut cluster, "evil", name, &plain(2)));
    for nth in 0..pods {
        pod(&mut cluster, "evil", &format!("p{nth}"), &names);
    }
    cluster.settle(LONG);
    let before = cluster.core.view.lookups();
    for nth in 0..changes {
        let name = &names[usize::try_from(nth).unwrap()];
        cluster.drop_claim(&("evil".to_owned(), name.clone()));
        claim(&mut cluster, "evil", name, &plain(2));
    }
    share(&mut cluster, "victim", "10Gi");
    cluster.deliver(usize::MAX);
    let heard = cluster.core.view.lookups() - before;
    assert!(heard < 2 * changes + claims, "{heard} look-ups for {changes} claims that were changed twice");
    cluster.round();
    let round = cluster.core.view.lookups() - before - heard;
    // All pods with all of their claims are 80,000, and that for each change 6,400,000. Those that have a turn are
    // looked at once more.
    assert!(round < 300_000, "{round} look-ups in the round");
    assert!(cluster.core.pods.has_marked(), "one round looks at a part of them");
    cluster.settle(LONG);
    assert!(cluster.place("victim").is_some());
    assert!(!cluster.core.pods.has_marked(), "the others were looked at in the rounds after that");
    let why = waits_because(&cluster, "evil", "c199");
    assert!(why.contains("have 400 requests together"), "{why}");
}

/// Each round asked of each pod of each gang that waits whether all of its claims were there.
#[test]
fn gangs_that_wait_are_counted_in_each_round_without_a_look_at_their_claims() {
    let mut cluster = cluster(1, 2);
    let names: Vec<String> = (0..100).map(|nth| format!("c{nth}")).collect();
    names.iter().for_each(|name| claim(&mut cluster, "evil", name, &plain(1)));
    for nth in 0..50 {
        let named: Vec<Value> =
            names.iter().map(|one| json!({"name": one, "resourceClaimName": one})).collect();
        let annotations = json!({"tranche.dev/gang": "g", "tranche.dev/gang-size": "60"});
        cluster.store_pod(object(json!({
            "metadata": {"name": format!("p{nth}"), "namespace": "evil", "annotations": annotations},
            "spec": {"containers": [{"name": "main"}], "resourceClaims": named},
            "status": {"phase": "Pending"}})));
    }
    cluster.settle(LONG);
    let before = cluster.core.view.lookups();
    for _ in 0..10 {
        cluster.round();
    }
    let rounds = cluster.core.view.lookups() - before;
    assert!(rounds < 5_000, "{rounds} look-ups in ten rounds: a gang of 50 pods with 100 claims each waits");
}

/// Whether a pod learns from others of its owner was looked up with all of its claims: for each pod of a unit at each try, and
/// for each pod that names a claim whose allocation was cleared.
#[test]
fn whether_pods_learn_from_their_siblings_is_not_looked_up_with_all_of_their_claims() {
    let mut cluster = cluster(1, 2);
    // Something is known of some owner's pods.
    let (owner, node) =
        (OwnerKey { namespace: "ml".to_owned(), uid: "rs".to_owned() }, NodeName::new("node-0"));
    let now = cluster.now;
    cluster.core.queue.refusals.siblings.note(&owner, &node, None, now);
    let names: Vec<String> = (0..100).map(|nth| format!("c{nth}")).collect();
    let owned = json!([{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "rs", "uid": "rs", "controller": true}]);
    let put_all = |cluster: &mut Cluster, namespace: &str, annotations: Value| {
        names.iter().for_each(|name| claim(cluster, namespace, name, &plain(1)));
        let named: Vec<Value> =
            names.iter().map(|one| json!({"name": one, "resourceClaimName": one})).collect();
        for nth in 0..50 {
            cluster.store_pod(object(json!({"metadata": {"name": format!("p{nth}"), "namespace": namespace,
                    "annotations": annotations, "ownerReferences": owned},
                "spec": {"containers": [{"name": "main"}], "resourceClaims": named},
                "status": {"phase": "Pending"}})));
        }
    };
    put_all(&mut cluster, "evil", json!({"tranche.dev/gang": "g"}));
    let mut first = serde_json::to_value(&cluster.claims[&("evil".to_owned(), "c0".to_owned())]).unwrap();
    merge(&mut first, &json!({"metadata": {"annotations": {"tranche.dev/policy": "nonsense"}}}));
    cluster.put_claim(first);
    cluster.settle(LONG);
    let why = waits_because(&cluster, "evil", "c1");
    assert!(why.contains("nonsense"), "the gang has a turn: {why}");
    let before = cluster.core.view.lookups();
    for _ in 0..10 {
        cluster.core.capacity.news();
        cluster.round();
    }
    let tries = cluster.core.view.lookups() - before;
    assert!(tries < 5_000, "{tries} look-ups in ten tries of a gang of 50 pods with 100 claims each");

    put_all(&mut cluster, "worse", json!({}));
    cluster.settle(LONG);
    let mut given = cluster.claims[&("worse".to_owned(), "c50".to_owned())].clone();
    given.status.get_or_insert_default().allocation = Some(object(json!({"devices": {"results": [
        {"request": "r0", "driver": DRIVER, "pool": "node-0", "device": "gpu-0"}]},
        "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [
            {"key": "metadata.name", "operator": "In", "values": ["node-0"]}]}]}})));
    let mut cleared = cluster.store(given);
    cluster.settle(MOMENT);
    let before = cluster.core.view.lookups();
    cleared.status.get_or_insert_default().allocation = None;
    cluster.store(cleared);
    cluster.deliver(usize::MAX);
    let heard = cluster.core.view.lookups() - before;
    assert!(heard < 1_000, "{heard} look-ups for one claim that 50 pods with 100 claims each name");
}

#[test]
fn requests_and_alternatives_of_a_pod_are_bounded_together() {
    let mut cluster = cluster(1, 8);
    let names: Vec<String> = (0..3).map(|nth| format!("c{nth}")).collect();
    claim(&mut cluster, "ml", "c0", &either(2, 8));
    claim(&mut cluster, "ml", "c1", &plain(32));
    claim(&mut cluster, "ml", "c2", &plain(31));
    pod(&mut cluster, "ml", "p", &names);
    cluster.settle(LONG);
    let why = waits_because(&cluster, "ml", "c1");
    assert!(
        why.contains("have 65 requests in 64 combinations") && why.contains("4096 are the most"),
        "{why}"
    );
    // One less is tried: it waits for another reason.
    claim(&mut cluster, "ml", "d0", &either(2, 8));
    claim(&mut cluster, "ml", "d1", &plain(32));
    claim(&mut cluster, "ml", "d2", &plain(30));
    pod(&mut cluster, "ml", "q", &["d0".to_owned(), "d1".to_owned(), "d2".to_owned()]);
    cluster.settle(LONG);
    let why = waits_because(&cluster, "ml", "d1");
    assert!(!why.is_empty() && !why.contains("combinations of alternatives"), "{why}");
}

/// A plan for a promised claim went over to whatever claim of its name somebody created first: it could neither be
/// written nor end, and kept its GPUs, whatever the namespace's quota.
#[test]
fn a_claim_of_the_promised_name_that_asks_for_something_else_inherits_no_plan() {
    for of_class in ["nothing.example.com", SHARED_CLASS] {
        let mut cluster = cluster(1, 1);
        put_kai(&mut cluster);
        until(&mut cluster, |write| matches!(write, Write::Create(..)));
        let parameters = json!({"apiVersion": "tranche.dev/v1alpha1", "kind": "GpuShare", "memory": "1Mi"});
        cluster.put_claim(json!({"metadata": {"name": KAI, "namespace": "ml"}, "spec": {"devices": {
            "requests": [{"name": "gpu", "exactly": {"deviceClassName": of_class, "count": 1}}],
            "config": [{"opaque": {"driver": DRIVER, "parameters": parameters}}]}}}));
        cluster.settle(LONG);
        cluster.check();
        // All of the GPU but what that claim itself asked for is there for others.
        share(&mut cluster, "victim", "79Gi");
        cluster.settle(LONG);
        assert!(cluster.place("victim").is_some(), "{of_class}");
    }
}

/// Each new name of a gang was remembered for good.
#[test]
fn a_pod_that_changes_its_gang_leaves_nothing_behind() {
    let mut cluster = cluster(1, 1);
    let gang = |cluster: &mut Cluster, name: &str, size: &str| {
        let annotations = json!({"tranche.dev/gang": name, "tranche.dev/gang-size": size});
        cluster.put_pod("p", &["p"], json!({"metadata": {"uid": "p", "annotations": annotations}}));
        cluster.settle(MOMENT);
    };
    cluster.put_share("p", json!({"memory": "10Gi"}), 1);
    (0..50).for_each(|nth| gang(&mut cluster, &format!("gang-{nth}"), "2"));
    assert_eq!(cluster.core.pods.gangs(), 1);
    // The plan of the gang that it was in does not outlive the change.
    gang(&mut cluster, "one", "1");
    until(&mut cluster, |write| matches!(write, Write::Allocate { .. }));
    gang(&mut cluster, "two", "2");
    cluster.settle(LONG);
    cluster.check();
    cluster.drop_pod("p", true);
    cluster.settle(LONG);
    assert_eq!(cluster.core.pods.gangs(), 0);
    share(&mut cluster, "victim", "79Gi");
    cluster.settle(LONG);
    assert!(cluster.place("victim").is_some());
}
