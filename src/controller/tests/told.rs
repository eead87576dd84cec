//! What people are told, and what is tried again when the API server will not have it now.

use std::time::Duration;

use serde_json::{Value, json};

use super::cluster::{Cluster, NS, object};
use super::scenes::{LONG, MOMENT, SECOND, cluster, rules, share};
use super::walk::bind;
use crate::cluster::events::{EventSubject, Note};
use crate::controller::write::{Failure, Write};

const KAI: &str = "kai-gpu-share";

/// `pod: REASON words` of each event of a pod since this was last asked.
pub(super) fn told(cluster: &mut Cluster) -> Vec<String> {
    let of_pod = |note: Note| match note.subject {
        EventSubject::Pod { name, .. } => Some(format!("{name}: {} {}", note.reason, note.message)),
        _ => None,
    };
    cluster.core.recorder.take().0.into_iter().filter_map(of_pod).collect()
}

/// A pod whose claim is still to be created.
fn promised(cluster: &mut Cluster) {
    let share = json!({"share": {"apiVersion": "tranche.dev/v1alpha1", "kind": "GpuShare", "memory": "2000Mi"}, "count": 1});
    let more = json!({
        "metadata": {"annotations": {"tranche.dev/gpu-share": share.to_string()}},
        "spec": {"resourceClaims": [{"name": "gpu-share", "resourceClaimName": KAI}]}});
    cluster.put_pod("kai", &[], more);
}

fn exists(cluster: &Cluster) -> bool {
    cluster.claims.contains_key(&("ml".to_owned(), KAI.to_owned()))
}

/// Until the next write is of this kind; what comes before is done.
pub(super) fn until(cluster: &mut Cluster, is: impl Fn(&Write) -> bool) {
    for _ in 0..100 {
        cluster.deliver(usize::MAX);
        let next = cluster.round();
        match cluster.writes.front() {
            Some(write) if is(write) => return,
            Some(_) => cluster.write(false),
            None => cluster.now = next.unwrap_or(cluster.now + SECOND).max(cluster.now),
        }
    }
    panic!("such a write never comes");
}

fn gang_of(cluster: &mut Cluster, name: &str, size: &str) {
    cluster.put_share(name, json!({"memory": "10Gi"}), 1);
    let gang = json!({"metadata": {"annotations": {"tranche.dev/gang": "g", "tranche.dev/gang-size": size}}});
    cluster.put_pod(name, &[name], gang);
}

#[test]
fn a_promised_claim_that_meets_a_conflict_or_a_busy_server_is_created_later() {
    for failure in [Failure::Conflict, Failure::Busy("too many requests".to_owned())] {
        let mut cluster = cluster(1, 1);
        promised(&mut cluster);
        until(&mut cluster, |write| matches!(write, Write::Create(..)));
        cluster.fail(failure.clone());
        assert!(!exists(&cluster));
        cluster.settle(LONG);
        assert!(cluster.place(KAI).is_some(), "{failure:?}");
        cluster.check();
    }
}

#[test]
fn a_promised_claim_that_is_refused_is_told_to_its_pod_and_never_as_placed() {
    let mut cluster = cluster(1, 1);
    promised(&mut cluster);
    until(&mut cluster, |write| matches!(write, Write::Create(..)));
    cluster.fail(Failure::Refused("exceeded quota: shares".to_owned()));
    cluster.deliver(usize::MAX);
    cluster.round();
    assert_eq!(
        told(&mut cluster),
        ["kai: WaitingForGpuShare its claim cannot be created: exceeded quota: shares"]
    );
    // Nothing of it stays behind, and it is tried again.
    cluster.settle(Duration::from_secs(60));
    assert!(cluster.place(KAI).is_some());
    assert_eq!(told(&mut cluster), ["kai: GpuSharePlaced 2000 MiB of gpu-0 on node node-0"]);
}

#[test]
fn a_pod_is_told_of_its_place_once_that_stands_in_the_api() {
    let mut cluster = cluster(2, 1);
    share(&mut cluster, "a", "10Gi");
    cluster.settle(MOMENT);
    assert_eq!(told(&mut cluster), [""; 0], "its GPU has not settled");
    cluster.settle(LONG);
    let (node, _) = cluster.place("a").unwrap();
    assert_eq!(told(&mut cluster), [format!("a: GpuSharePlaced 10240 MiB of gpu-0 on node {node}")]);
}

#[test]
fn a_busy_server_is_no_refusal() {
    let mut cluster = cluster(1, 1);
    share(&mut cluster, "a", "10Gi");
    until(&mut cluster, |write| matches!(write, Write::Allocate { .. }));
    cluster.fail(Failure::Busy("too many requests".to_owned()));
    cluster.settle(3 * SECOND);
    assert!(cluster.place("a").is_some(), "it did not rest for long");
}

#[test]
fn an_answer_that_comes_after_its_claim_was_deleted_brings_nothing_back() {
    let mut cluster = cluster(1, 1);
    share(&mut cluster, "a", "79Gi");
    until(&mut cluster, |write| matches!(write, Write::Allocate { .. }));
    cluster.write_unheard(0, false);
    cluster.drop_pod("a", true);
    cluster.deliver(usize::MAX);
    cluster.hear(0);
    share(&mut cluster, "b", "79Gi");
    cluster.settle(LONG);
    assert!(cluster.place("b").is_some());
    cluster.check();
}

#[test]
fn an_answer_that_comes_after_the_list_that_its_claim_is_missing_from_misleads_for_no_longer_than_a_write() {
    let mut cluster = cluster(1, 1);
    share(&mut cluster, "a", "10Gi");
    until(&mut cluster, |write| matches!(write, Write::Hold(..)));
    cluster.write_unheard(0, false);
    cluster.drop_claim(&(NS.to_owned(), cluster.holds()[0].clone()));
    cluster.relist();
    cluster.deliver(usize::MAX);
    cluster.hear(0);
    cluster.settle(LONG);
    assert!(cluster.place("a").is_some(), "the GPU is taken anew");
    cluster.check();
}

#[test]
fn a_writer_that_dies_between_its_two_writes_leaves_a_claim_that_the_next_leader_places() {
    let mut cluster = cluster(1, 1);
    share(&mut cluster, "a", "10Gi");
    until(&mut cluster, |write| matches!(write, Write::Allocate { .. }));
    cluster.write_half();
    assert!(cluster.claim("a").metadata.finalizers.is_some());
    assert_eq!(cluster.place("a"), None);
    cluster.fail_over(rules());
    cluster.settle(LONG);
    assert!(cluster.place("a").is_some());
    cluster.check();
}

#[test]
fn who_waits_for_the_rest_of_its_gang_is_told() {
    let mut cluster = cluster(1, 1);
    gang_of(&mut cluster, "g0", "2");
    cluster.settle(LONG);
    let words = "the gang g has 1 of 2 pods ready; its pods are placed together once all are there";
    assert_eq!(told(&mut cluster), [format!("g0: WaitingForGpuShare {words}")]);
    let waiting = cluster.claim("g0").metadata.annotations.clone().unwrap_or_default();
    assert_eq!(waiting.get("tranche.dev/waiting").map(String::as_str), Some(words));
    gang_of(&mut cluster, "g1", "2");
    cluster.settle(LONG);
    assert!(cluster.place("g0").is_some() && cluster.place("g1").is_some());
}

#[test]
fn a_size_that_cannot_be_read_is_told_and_nothing_is_placed() {
    for size in ["three", "0", "-1", ""] {
        let mut cluster = cluster(1, 1);
        gang_of(&mut cluster, "g0", size);
        cluster.settle(LONG);
        assert_eq!(cluster.place("g0"), None);
        let told = told(&mut cluster).join("\n");
        let words = format!("tranche.dev/gang-size: {size:?} is no number of pods");
        assert!(told.contains(&words), "{told}");
    }
}

#[test]
fn a_member_that_is_made_anew_goes_to_its_gang_though_another_has_ended() {
    let mut cluster = cluster(1, 1);
    (0..3).for_each(|nth| gang_of(&mut cluster, &format!("g{nth}"), "3"));
    cluster.settle(LONG);
    (0..3).for_each(|nth| assert!(cluster.place(&format!("g{nth}")).is_some()));
    // One has done its work, another is replaced.
    cluster.drop_pod("g0", true);
    cluster.drop_pod("g1", true);
    gang_of(&mut cluster, "g1-again", "3");
    cluster.settle(LONG);
    assert!(cluster.place("g1-again").is_some());
}

#[test]
fn new_words_that_came_too_soon_are_told_later() {
    let mut cluster = cluster(1, 1);
    for (name, memory) in [("large", "60Gi"), ("small", "10Gi")] {
        share(&mut cluster, name, memory);
        cluster.settle(LONG);
        bind(&mut cluster, name);
    }
    share(&mut cluster, "a", "40Gi");
    cluster.settle(SECOND);
    let first = told(&mut cluster).pop().unwrap();
    // There is more room now, too little, and nothing happens after that.
    cluster.drop_pod("small", true);
    cluster.settle(SECOND);
    assert!(!told(&mut cluster).iter().any(|told| told.starts_with("a:")), "too soon");
    cluster.settle(Duration::from_secs(60));
    let second = told(&mut cluster).pop().unwrap();
    assert!(
        first.starts_with("a: Waiting") && second.starts_with("a: Waiting") && first != second,
        "{second}"
    );
    let waiting: &Value = &json!(cluster.claim("a").metadata.annotations);
    assert!(second.contains(waiting["tranche.dev/waiting"].as_str().unwrap()), "{waiting}");
}

#[test]
fn a_pod_that_had_its_place_for_a_moment_is_not_told_sooner_why_it_waits() {
    let mut cluster = cluster(1, 1);
    share(&mut cluster, "large", "60Gi");
    cluster.settle(LONG);
    bind(&mut cluster, "large");
    share(&mut cluster, "a", "40Gi");
    cluster.settle(SECOND);
    cluster.drop_pod("large", true);
    cluster.settle(5 * SECOND);
    assert!(cluster.place("a").is_some());
    // The scheduler takes it back.
    cluster.put_node_object("node-0", json!({"unschedulable": true}));
    let mut claim = cluster.claim("a").clone();
    claim.status.get_or_insert_default().allocation = None;
    cluster.store(claim);
    let waits = |cluster: &mut Cluster| {
        told(cluster).into_iter().filter(|told| told.starts_with("a: Waiting")).collect::<Vec<_>>()
    };
    cluster.settle(5 * SECOND);
    assert_eq!(waits(&mut cluster).len(), 1, "the first one alone");
    cluster.settle(Duration::from_secs(60));
    let later = waits(&mut cluster);
    assert!(later.len() == 1 && later[0].contains("node-0 is cordoned"), "{later:?}");
}

#[test]
fn words_that_could_not_be_written_on_a_claim_are_written_later() {
    let mut cluster = cluster(1, 1);
    share(&mut cluster, "a", "4000Gi");
    until(&mut cluster, |write| matches!(write, Write::Mark(..)));
    cluster.fail(Failure::Silent("no answer".to_owned()));
    cluster.settle(LONG);
    let waiting = cluster.claim("a").metadata.annotations.clone().unwrap_or_default();
    assert!(waiting.contains_key("tranche.dev/waiting"), "{waiting:?}");
}

#[test]
fn what_is_corrected_is_tried_again_though_nothing_else_happens() {
    let mut cluster = cluster(1, 1);
    cluster.put_node_object("node-0", json!({"taints": [{"key": "a", "effect": "NoSchedule"}]}));
    share(&mut cluster, "a", "10Gi");
    cluster.settle(LONG);
    assert_eq!(cluster.place("a"), None);
    let mut pod = cluster.pods[&("ml".to_owned(), "a".to_owned())].clone();
    pod.spec.get_or_insert_default().tolerations = Some(vec![object(json!({"operator": "Exists"}))]);
    cluster.store_pod(pod);
    cluster.settle(LONG);
    assert!(cluster.place("a").is_some(), "it tolerates the taint now");

    share(&mut cluster, "b", "10Gi");
    let annotated = |cluster: &mut Cluster, policy: &str| {
        let mut claim = cluster.claim("b").clone();
        let annotations = claim.metadata.annotations.get_or_insert_default();
        annotations.insert("tranche.dev/policy".to_owned(), policy.to_owned());
        cluster.store(claim);
    };
    annotated(&mut cluster, "best");
    let tolerant = json!({"spec": {"tolerations": [{"operator": "Exists"}]}});
    cluster.put_pod("b", &["b"], tolerant);
    cluster.settle(LONG);
    assert_eq!(cluster.place("b"), None);
    annotated(&mut cluster, "spread");
    cluster.settle(LONG);
    assert!(cluster.place("b").is_some(), "its policy is one now");
}
