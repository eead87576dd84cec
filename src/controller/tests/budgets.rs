//! What one namespace's selectors may cost, and what the others have of it.

use std::time::Duration;

use serde_json::{Value, json};

use super::cluster::{Cluster, object};
use crate::controller::config::Rules;
use crate::model::claim::ClaimKey;
use crate::model::names::{DRIVER, SHARED_CLASS};

const SOON: Duration = Duration::from_secs(3);

fn cluster(nodes: u32) -> Cluster {
    let mut cluster = Cluster::new(Rules::default());
    (0..nodes).for_each(|node| cluster.put_node(&format!("node-{node}"), 4));
    cluster.settle(SOON);
    cluster
}

/// A pod with a claim of its own name, for 1 GiB, whose requests have these selectors.
fn pod(cluster: &mut Cluster, namespace: &str, name: &str, requests: &[Vec<String>]) {
    let request = |(nth, selectors): (usize, &Vec<String>)| {
        let selectors: Vec<Value> =
            selectors.iter().map(|text| json!({"cel": {"expression": text}})).collect();
        json!({"name": format!("r{nth}"),
            "exactly": {"deviceClassName": SHARED_CLASS, "count": 1, "selectors": selectors}})
    };
    let requests: Vec<Value> = requests.iter().enumerate().map(request).collect();
    let share = json!({"apiVersion": "tranche.dev/v1alpha1", "kind": "GpuShare", "memory": "1Gi"});
    cluster.put_claim(json!({"metadata": {"name": name, "namespace": namespace}, "spec": {"devices": {
        "requests": requests, "config": [{"opaque": {"driver": DRIVER, "parameters": share}}]}}}));
    cluster.store_pod(object(json!({"metadata": {"name": name, "namespace": namespace},
        "spec": {"containers": [{"name": "main"}], "resourceClaims": [{"name": "c", "resourceClaimName": name}]},
        "status": {"phase": "Pending"}})));
}

fn is_placed(cluster: &Cluster, namespace: &str, name: &str) -> bool {
    let claim = &cluster.claims[&(namespace.to_owned(), name.to_owned())];
    claim.status.as_ref().is_some_and(|status| status.allocation.is_some())
}

fn waiting(cluster: &Cluster, namespace: &str, name: &str) -> String {
    let claim = &cluster.claims[&(namespace.to_owned(), name.to_owned())];
    let annotations = claim.metadata.annotations.clone().unwrap_or_default();
    annotations.get("tranche.dev/waiting").cloned().unwrap_or_default()
}

fn loops(levels: u32, body: &str) -> String {
    let ten = "[0,1,2,3,4,5,6,7,8,9]";
    (0..levels).fold(body.to_owned(), |inner, nth| format!("{ten}.all(i{nth}, {inner})"))
}

#[test]
fn a_claim_that_costs_too_much_waits_with_the_number_and_is_not_looked_at_again() {
    let mut cluster = cluster(2);
    pod(&mut cluster, "a", "dear", &[vec![], vec![loops(7, "true")]]);
    pod(&mut cluster, "b", "small", &[vec![]]);
    cluster.settle(SOON);
    assert!(is_placed(&cluster, "b", "small") && !is_placed(&cluster, "a", "dear"));
    let words = waiting(&cluster, "a", "dear");
    assert!(words.starts_with("request r1: the selector"), "{words}");
    let (notes, _) = cluster.core.recorder.take();
    let said = |note: &crate::cluster::events::Note| note.message.contains("costs more than 2000000");
    assert!(notes.iter().any(said), "{notes:?}");
    // Everything is tried again when something changes; this is not looked at.
    for nth in 0..3 {
        cluster.put_node(&format!("more-{nth}"), 1);
        pod(&mut cluster, "b", &format!("small-{nth}"), &[vec![]]);
        let begun = std::time::Instant::now();
        cluster.settle(SOON);
        assert!(begun.elapsed() < Duration::from_secs(20));
        assert!(is_placed(&cluster, "b", &format!("small-{nth}")));
    }
    assert_eq!(cluster.core.purse.dear_claims(), 1);
    cluster.drop_claim(&("a".to_owned(), "dear".to_owned()));
    cluster.settle(SOON);
    assert_eq!(cluster.core.purse.dear_claims(), 0);
    cluster.check();
}

/// More work than a round may do, of one namespace; the other has its share in the first round.
#[test]
fn what_a_round_does_not_come_to_is_for_the_next_and_no_namespace_waits_for_another() {
    let mut cluster = cluster(8);
    cluster.core.purse.bound(1_000_000);
    for nth in 0..30 {
        let text = loops(3, &format!("device.driver != 'x{nth}'"));
        pod(&mut cluster, "a", &format!("p{nth}"), &[vec![text]]);
    }
    pod(&mut cluster, "b", "small", &[vec!["device.driver != 'b'".to_owned()]]);
    pod(&mut cluster, "b", "wrong", &[vec!["device.driver =".to_owned()]]);
    cluster.deliver(usize::MAX);
    let next = cluster.round();
    assert_eq!(next, Some(cluster.now), "there is more to do");
    let decided = |cluster: &Cluster, namespace: &str| {
        let of_namespace =
            |claim: &ClaimKey| cluster.core.view.claim(*claim).unwrap().namespace() == namespace;
        cluster.core.tracker.planned_claims().filter(of_namespace).count()
    };
    assert_eq!(decided(&cluster, "b"), 1);
    let first = decided(&cluster, "a");
    assert!((1..15).contains(&first), "{first}");
    let mut rounds = 1;
    while decided(&cluster, "a") < 30 {
        cluster.round();
        rounds += 1;
        assert!(rounds < 40, "{} after {rounds} rounds", decided(&cluster, "a"));
    }
    cluster.settle(SOON);
    assert!((0..30).all(|nth| is_placed(&cluster, "a", &format!("p{nth}"))), "after {rounds} rounds");
    assert!(is_placed(&cluster, "b", "small"));
    assert!(
        waiting(&cluster, "b", "wrong")
            .contains("request r0: the selector \"device.driver =\" is not valid CEL")
    );
    assert!(!cluster.core.queue.has_left());
    cluster.check();
}

/// What cannot be placed is tried in turns, too: nothing is starved by those that are tried again and again.
#[test]
fn what_is_tried_in_vain_does_not_keep_others_of_its_namespace_from_being_tried() {
    let mut cluster = cluster(8);
    cluster.core.purse.bound(3_000);
    for nth in 0..20 {
        let own = format!("device.driver != 'x{nth}'");
        let none = "device.attributes['gpu.nvidia.com'].productName == 'none'".to_owned();
        pod(&mut cluster, "a", &format!("vain{nth}"), &[vec![own, none]]);
    }
    pod(&mut cluster, "a", "small", &[vec!["device.driver != 'y'".to_owned()]]);
    for nth in 0..60 {
        // News at each round: whatever was tried is due again.
        cluster.core.capacity.news();
        cluster.deliver(usize::MAX);
        cluster.round();
        while !cluster.writes.is_empty() {
            cluster.write(false);
        }
        while !cluster.answers.is_empty() {
            cluster.hear(0);
        }
        cluster.now += Duration::from_millis(100);
        if is_placed(&cluster, "a", "small") {
            return;
        }
        assert!(nth < 59, "it is never tried");
    }
}

#[test]
fn selectors_of_a_claim_have_a_length_together() {
    let mut cluster = cluster(1);
    let long = format!("device.driver != '{}'", "x".repeat(10_000));
    pod(&mut cluster, "a", "long", &[vec![long.clone(); 14], vec![long; 14]]);
    cluster.settle(SOON);
    let words = waiting(&cluster, "a", "long");
    assert!(words.contains("spec.devices: it has"), "{words}");
    assert!(words.contains("65536 are read at most; write shorter selectors"), "{words}");
    let long = format!("device.driver != '{}'", "x".repeat(10_000));
    let short = format!("device.driver != '{}'", "x".repeat(2_000));
    pod(&mut cluster, "a", "long2", &[vec![long.clone(); 3], vec![long.clone(), long.clone(), long, short]]);
    cluster.settle(SOON);
    let words = waiting(&cluster, "a", "long2");
    assert!(words.contains("spec.devices.requests: the selectors of the claim have"), "{words}");
    assert!(words.contains("the limit is 61440"), "{words}");
}

#[test]
fn requests_of_a_claim_have_a_number_of_entries_together() {
    let mut cluster = cluster(1);
    let selectors = |count: usize| vec!["true".to_owned(); count];
    pod(&mut cluster, "a", "many", &vec![selectors(32); 16]);
    cluster.settle(SOON);
    let words = waiting(&cluster, "a", "many");
    assert!(
        words.contains("they have 528 alternatives, selectors and tolerations in all, and 512 are"),
        "{words}"
    );
    pod(&mut cluster, "a", "fewer", &vec![selectors(31); 2]);
    cluster.settle(SOON);
    assert!(is_placed(&cluster, "a", "fewer"), "{}", waiting(&cluster, "a", "fewer"));
}

fn is_decided(cluster: &Cluster, namespace: &str) -> usize {
    let of_namespace = |claim: &ClaimKey| cluster.core.view.claim(*claim).unwrap().namespace() == namespace;
    cluster.core.tracker.planned_claims().filter(of_namespace).count()
}

/// A pod whose claim's request has alternatives with these amounts.
fn with_alternatives(cluster: &mut Cluster, namespace: &str, name: &str, amounts: &[&str]) {
    cluster.put_alternatives(namespace, name, amounts);
    cluster.store_pod(object(json!({"metadata": {"name": name, "namespace": namespace},
        "spec": {"containers": [{"name": "main"}], "resourceClaims": [{"name": "c", "resourceClaimName": name}]},
        "status": {"phase": "Pending"}})));
}

/// Each alternative is a decision of its own. Who has many goes on where the last round stopped.
#[test]
fn alternatives_that_a_round_does_not_come_to_are_tried_in_the_next() {
    let mut cluster = cluster(8);
    cluster.core.purse.bound(4_200);
    let last_fits = ["500Gi", "501Gi", "502Gi", "503Gi", "504Gi", "505Gi", "506Gi", "1Gi"];
    with_alternatives(&mut cluster, "a", "many", &last_fits);
    with_alternatives(&mut cluster, "c", "none", &last_fits[..7]);
    pod(&mut cluster, "b", "small", &[vec![]]);
    cluster.deliver(usize::MAX);
    cluster.round();
    assert_eq!((is_decided(&cluster, "a"), is_decided(&cluster, "b")), (0, 1), "after one round");
    cluster.settle(SOON);
    assert!(is_placed(&cluster, "a", "many") && is_placed(&cluster, "b", "small"));
    let words = waiting(&cluster, "c", "none");
    assert!(words.contains("none of 7 alternatives fits; the last"), "{words}");
    assert!(!cluster.core.queue.has_left());
    cluster.check();
}

/// Asking each node whether it meets what a pod demands is paid for like selectors are.
#[test]
fn long_affinities_are_paid_for_by_their_namespace() {
    let mut cluster = cluster(8);
    cluster.core.purse.bound(40_000);
    for nth in 0..3 {
        let name = format!("long{nth}");
        pod(&mut cluster, "a", &name, &[vec![]]);
        let values: Vec<String> = (0..300).map(|value| format!("{nth}-{value}")).collect();
        let terms = json!([{"matchExpressions": [{"key": "zone", "operator": "NotIn", "values": values}]}]);
        let mut long = cluster.pods[&("a".to_owned(), name)].clone();
        long.spec.get_or_insert_default().affinity = Some(object(json!({"nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}})));
        cluster.store_pod(long);
    }
    pod(&mut cluster, "b", "small", &[vec![]]);
    cluster.deliver(usize::MAX);
    cluster.round();
    assert_eq!((is_decided(&cluster, "a"), is_decided(&cluster, "b")), (1, 1), "after one round");
    cluster.settle(SOON);
    assert!((0..3).all(|nth| is_placed(&cluster, "a", &format!("long{nth}"))));
    cluster.check();
}

#[test]
fn a_gang_has_a_number_of_alternatives_together() {
    let mut cluster = cluster(1);
    let share = json!({"apiVersion": "tranche.dev/v1alpha1", "kind": "GpuShare", "memory": "1Mi"});
    let config = json!([{"opaque": {"driver": DRIVER, "parameters": share}}]);
    for (gang, pods) in [("small", 4), ("large", 5)] {
        for nth in 0..pods {
            let name = format!("{gang}{nth}");
            let sub = |name: &str| json!({"name": name, "deviceClassName": SHARED_CLASS});
            let request = |nth: usize| match nth {
                0..6 => json!({"name": format!("r{nth}"), "firstAvailable": [sub("x"), sub("y")]}),
                _ => json!({"name": format!("r{nth}"), "exactly": {"deviceClassName": SHARED_CLASS}}),
            };
            let requests: Vec<Value> = (0..32).map(request).collect();
            let plain: Vec<Value> = (6..38).map(request).collect();
            for (claim, requests) in [(name.clone(), requests), (format!("{name}-b"), plain)] {
                cluster
                    .put_claim(json!({"metadata": {"name": claim, "namespace": "a"}, "spec": {"devices": {
                    "requests": requests, "config": config}}}));
            }
            cluster.store_pod(object(json!({"metadata": {"name": name, "namespace": "a", "annotations": {
                    "tranche.dev/gang": gang, "tranche.dev/gang-size": pods.to_string()}},
                "spec": {"containers": [{"name": "main"}], "resourceClaims": [
                    {"name": "c", "resourceClaimName": name},
                    {"name": "d", "resourceClaimName": format!("{name}-b")}]},
                "status": {"phase": "Pending"}})));
        }
    }
    cluster.settle(SOON);
    let all =
        |gang: &str| (0..5).map(|nth| waiting_if_any(&cluster, &format!("{gang}{nth}"))).collect::<String>();
    assert!(all("large").contains("have more than 16384 requests together"), "{}", all("large"));
    assert!(!all("small").contains("16384"), "{}", all("small"));
}

fn waiting_if_any(cluster: &Cluster, name: &str) -> String {
    let is_there = cluster.claims.contains_key(&("a".to_owned(), name.to_owned()));
    if is_there { waiting(cluster, "a", name) } else { String::new() }
}
