//! Room that moves would make: who is told of it, what is kept once a pod leaves, and what the controller does by itself.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::resource::v1::ResourceClaimConsumerReference;
use serde_json::{Value, json};

use super::cluster::{Cluster, merge, object};
use super::explain::listed;
use crate::allocate::audit;
use crate::allocate::moves::SEARCH_TICKS;
use crate::cluster::events::EventSubject;
use crate::controller::config::{Consolidation, Mode, Rules};
use crate::controller::explain::rebalance::{Help, rebalance};
use crate::controller::explain::{Answer, Subject as Asked, explain};
use crate::controller::moves::Proposed;
use crate::controller::queue::{Patience, UnitKey};
use crate::controller::steps::moving::{MoveSearch, MoverFilter};
use crate::model::names::{DRIVER, SHARED_CLASS};

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);

fn rules(mode: Mode) -> Rules {
    let consolidation = Consolidation { mode, ..Consolidation::default() };
    let long = Duration::from_secs(100_000);
    let patience = Patience { passes: 10_000, time: long, ..Patience::default() };
    Rules { consolidation, patience, unused: long, stuck: long, ..Rules::default() }
}

/// Two nodes with two GPUs each.
fn cluster(mode: Mode) -> Cluster {
    let mut cluster = Cluster::new(rules(mode));
    cluster.put_node("a", 2);
    cluster.put_node("b", 2);
    cluster.settle(SECOND);
    cluster
}

/// A claim that a pod of its name has been made, and the pod: of the ReplicaSet that is named.
pub(super) fn put(cluster: &mut Cluster, name: &str, memory: &str, owner: &str, more: Value) {
    put_in(cluster, ("ml", name), (memory, 1), owner, more);
}

pub(super) fn put_in(cluster: &mut Cluster, at: (&str, &str), share: (&str, u32), owner: &str, more: Value) {
    let ((namespace, name), (memory, count)) = (at, share);
    let mut pod = json!({"metadata": {"name": name, "namespace": namespace, "ownerReferences": [
            {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": owner, "uid": owner, "controller": true}]},
        "spec": {"containers": [{"name": "main"}], "resourceClaims": [{"name": "gpu", "resourceClaimName": name}]},
        "status": {"phase": "Pending", "conditions": super::preempting::refused()["status"]["conditions"]}});
    merge(&mut pod, &more);
    cluster.store_pod(object(pod));
    let uid = cluster.pods[&(namespace.to_owned(), name.to_owned())].metadata.uid.clone();
    let parameters = json!({"apiVersion": "tranche.dev/v1alpha1", "kind": "GpuShare", "memory": memory});
    cluster.put_claim(json!({"metadata": {"name": name, "namespace": namespace, "ownerReferences": [
            {"apiVersion": "v1", "kind": "Pod", "name": name, "uid": uid, "controller": true}]},
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {
                "deviceClassName": SHARED_CLASS, "count": count}}],
            "config": [{"opaque": {"driver": DRIVER, "parameters": parameters}}]}}}));
}

/// kube-scheduler binds the pod where its claim is, and the controller-manager reserves the claim.
pub(super) fn bind(cluster: &mut Cluster, namespace: &str, name: &str) {
    cluster.settle(5 * SECOND);
    let at = (namespace.to_owned(), name.to_owned());
    let claim = cluster.claims.get(&at).cloned().expect("the claim is there");
    let node = super::cluster::results(&claim).first().map(|(pool, _)| pool.clone());
    let node = node.unwrap_or_else(|| panic!("{name} has no place"));
    let mut pod = cluster.pods[&at].clone();
    let mut bound = claim;
    bound.status.get_or_insert_default().reserved_for = Some(vec![ResourceClaimConsumerReference {
        resource: "pods".to_owned(),
        name: name.to_owned(),
        uid: pod.metadata.uid.clone().unwrap(),
        ..ResourceClaimConsumerReference::default()
    }]);
    cluster.store(bound);
    pod.spec.as_mut().unwrap().node_name = Some(node);
    cluster.store_pod(pod);
    cluster.settle(SECOND);
}

fn put_bound(cluster: &mut Cluster, name: &str, memory: &str) {
    put(cluster, name, memory, &format!("rs-{name}"), json!({}));
    bind(cluster, "ml", name);
}

/// No pod comes to the node meanwhile.
fn beside(cluster: &mut Cluster, node: &str, put: impl FnOnce(&mut Cluster)) {
    cluster.put_node_object(node, json!({"unschedulable": true}));
    cluster.settle(SECOND);
    put(cluster);
    cluster.put_node_object(node, json!({}));
    cluster.settle(SECOND);
}

/// GPUs of 80 GiB. Node a has 75 and 40 GiB in use, node b 75 and, by itself, `small`: 10 GiB, which would fit beside the 40.
pub(super) fn fragmented(mode: Mode, (namespace, more): (&str, Value)) -> Cluster {
    let mut cluster = cluster(mode);
    put_bound(&mut cluster, "most-1", "75Gi");
    put_bound(&mut cluster, "half", "40Gi");
    beside(&mut cluster, "a", |cluster| {
        put_bound(cluster, "most-2", "75Gi");
        put_in(cluster, (namespace, "small"), ("10Gi", 1), "rs-small", more.clone());
        if more["metadata"]["labels"].is_object() {
            put_in(cluster, (namespace, "small-2"), ("1Gi", 1), "rs-small", more);
        }
        bind(cluster, namespace, "small");
    });
    let places = ["most-1", "half", "most-2"].map(|name| cluster.place(name).unwrap());
    let nodes: Vec<&str> = places.iter().map(|(node, _)| node.as_str()).collect();
    assert_eq!(nodes, ["a", "a", "b"]);
    cluster
}

/// The pod says so itself.
pub(super) fn mark(value: &str) -> Value {
    json!({"metadata": {"annotations": {"tranche.dev/movable": value}}})
}

fn words_to(cluster: &mut Cluster, name: &str) -> Vec<String> {
    let (notes, _) = cluster.core.recorder.take();
    let is_its = |subject: &EventSubject| matches!(subject, EventSubject::Pod { name: of, .. } if of == name);
    notes.into_iter().filter(|note| is_its(&note.subject)).map(|note| note.message).collect()
}

/// The pod ends at last, and its owner has made another.
pub(super) fn end(cluster: &mut Cluster, name: &str, anew: &str, memory: &str) {
    put(cluster, anew, memory, &format!("rs-{name}"), json!({}));
    cluster.settle(SECOND);
    cluster.drop_pod(name, true);
    cluster.settle(5 * SECOND);
}

#[test]
fn who_waits_is_told_which_moves_would_make_room() {
    let mut cluster = fragmented(Mode::Propose, ("ml", json!({})));
    let source = cluster.place("small").unwrap();
    put(&mut cluster, "big", "75Gi", "rs-big", json!({}));
    cluster.settle(MINUTE);
    let told = words_to(&mut cluster, "big");
    let words = format!("; evict small (10240 MiB of {}); it fits a/", source.1[0]);
    let last = told.last().expect("it is told why it waits");
    assert!(last.contains(&words), "{told:?}");
    assert!(last.ends_with(&format!("; then this fits {}/{}", source.0, source.1[0])), "{last}");
    assert!(cluster.place("big").is_none() && cluster.place("small").is_some());
    assert_eq!(cluster.core.reserves.evictions.moves.counts().evictions, 0, "it is told, and nothing else");
    assert_eq!(audit(&cluster.core.capacity.index), vec![]);
    cluster.check();
}

#[test]
fn names_of_others_are_not_told() {
    let mut cluster = fragmented(Mode::Propose, ("secret", json!({})));
    put(&mut cluster, "big", "75Gi", "rs-big", json!({}));
    cluster.settle(MINUTE);
    let told = words_to(&mut cluster, "big");
    let last = told.last().expect("it is told why it waits");
    assert!(last.contains("moving 1 pod of other namespaces among them (10240 MiB)"), "{told:?}");
    assert!(!last.contains("secret") && !last.contains("small"), "{last}");
}

#[test]
fn what_has_begun_is_kept_for_whoever_has_begun_it() {
    let mut cluster = fragmented(Mode::Propose, ("ml", json!({})));
    let source = cluster.place("small").unwrap();
    put(&mut cluster, "big", "75Gi", "rs-big", json!({}));
    cluster.settle(MINUTE);
    // Somebody evicts it. Its owner makes another, which fits where it was, beside it.
    let mut small = cluster.pods[&("ml".to_owned(), "small".to_owned())].clone();
    small.metadata.deletion_timestamp = Some(object(json!("2026-01-01T00:00:00Z")));
    cluster.store_pod(small);
    end(&mut cluster, "small", "small-anew", "10Gi");
    assert_eq!(cluster.place("big"), Some(source.clone()));
    let moved = cluster.place("small-anew").expect("it has a place");
    assert_ne!(moved, source);
    assert_eq!(cluster.core.reserves.evictions.moves.counts().served, 1);
    cluster.check();
}

/// In another namespace it is another owner, whatever UID a pod names.
#[test]
fn a_pod_that_names_an_owner_of_another_namespace_gets_none_of_its_places() {
    let mut cluster = fragmented(Mode::Auto, ("ml", mark("true")));
    put(&mut cluster, "big", "75Gi", "rs-big", json!({}));
    cluster.settle(MINUTE);
    assert_eq!(cluster.core.reserves.evictions.moves.counts().evictions, 1);
    // It would fit beside `half`, where `small` is to go.
    put_in(&mut cluster, ("evil", "forged"), ("35Gi", 1), "rs-small", json!({}));
    cluster.settle(5 * SECOND);
    assert!(!is_placed(&cluster, ("evil", "forged")));
    end(&mut cluster, "small", "small-anew", "10Gi");
    assert!(cluster.place("small-anew").is_some() && cluster.place("big").is_some());
    cluster.check();
}

#[test]
fn the_controller_moves_what_is_marked_and_nothing_else() {
    for (mark, moves) in [(json!({}), false), (mark("false"), false), (mark("true"), true)] {
        let mut cluster = fragmented(Mode::Auto, ("ml", mark.clone()));
        let source = cluster.place("small").unwrap();
        put(&mut cluster, "big", "75Gi", "rs-big", json!({}));
        cluster.settle(MINUTE);
        let small = cluster.pods[&("ml".to_owned(), "small".to_owned())].clone();
        assert_eq!(small.metadata.deletion_timestamp.is_some(), moves, "{mark}");
        assert_eq!(cluster.core.reserves.evictions.moves.counts().evictions, u64::from(moves), "{mark}");
        if moves {
            end(&mut cluster, "small", "small-anew", "10Gi");
            assert_eq!(cluster.place("big"), Some(source));
            assert!(cluster.place("small-anew").is_some());
        }
        cluster.check();
    }
}

#[test]
fn a_namespace_or_a_class_marks_its_pods() {
    for by_class in [false, true] {
        let mut cluster = fragmented(Mode::Auto, ("ml", json!({})));
        let mark = json!({"tranche.dev/movable": "true"});
        match by_class {
            true => cluster.put_class(SHARED_CLASS, mark, json!({})),
            false => cluster.annotate("ml", mark),
        }
        put(&mut cluster, "big", "75Gi", "rs-big", json!({}));
        cluster.settle(MINUTE);
        let small = &cluster.pods[&("ml".to_owned(), "small".to_owned())];
        assert!(small.metadata.deletion_timestamp.is_some(), "by class: {by_class}");
    }
}

#[test]
fn nothing_moves_that_would_have_no_place_or_that_somebody_ties_down() {
    let affinity = json!({"spec": {"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution":
        [{"topologyKey": "kubernetes.io/hostname"}]}}}});
    let volume = json!({"spec": {"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]}});
    let urgent = json!({"spec": {"priority": 10}});
    let gang = json!({"metadata": {"labels": {"pod-group-name": "g"}, "annotations": {"tranche.dev/gang-size": "2"}}});
    let bare = json!({"metadata": {"ownerReferences": []}});
    let other = json!({"metadata": {"ownerReferences": [
        {"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "d", "uid": "d", "controller": true}]}});
    for mut more in [affinity, volume, urgent, gang, bare, other] {
        merge(&mut more, &mark("true"));
        let mut cluster = fragmented(Mode::Auto, ("ml", more.clone()));
        put(&mut cluster, "big", "75Gi", "rs-big", json!({}));
        cluster.settle(MINUTE);
        assert_eq!(cluster.core.reserves.evictions.moves.counts().evictions, 0, "{more}");
        cluster.check();
    }
    // There is no room for it elsewhere.
    let mut full = fragmented(Mode::Auto, ("ml", mark("true")));
    put_bound(&mut full, "more", "35Gi");
    assert_eq!(full.place("more"), full.place("half"));
    put(&mut full, "big", "75Gi", "rs-big", json!({}));
    full.settle(MINUTE);
    assert_eq!(full.core.reserves.evictions.moves.counts().evictions, 0);
}

#[test]
fn nobody_is_moved_for_a_pod_that_no_scheduler_has_tried_nor_twice_for_the_same() {
    let untried = json!({"spec": {"schedulerName": "nobody"}, "status": {"conditions": []}});
    let mut cluster = fragmented(Mode::Auto, ("ml", mark("true")));
    put(&mut cluster, "big", "75Gi", "rs-big", untried);
    cluster.settle(5 * MINUTE);
    assert_eq!(cluster.core.reserves.evictions.moves.counts().evictions, 0);
    // It has its share, and is never bound.
    let mut cluster = fragmented(Mode::Auto, ("ml", mark("true")));
    put(&mut cluster, "big", "75Gi", "rs-big", json!({}));
    cluster.settle(MINUTE);
    assert_eq!(cluster.core.reserves.evictions.moves.counts().evictions, 1);
    end(&mut cluster, "small", "small-anew", "10Gi");
    assert!(cluster.place("big").is_some());
    let big = UnitKey::Pod(
        cluster.pods[&("ml".to_owned(), "big".to_owned())].metadata.uid.as_deref().unwrap().into(),
    );
    assert!(cluster.core.reserves.evictions.moves.rests_for(&big, cluster.now));
    cluster.settle(10 * MINUTE);
    assert!(!cluster.core.reserves.evictions.moves.rests_for(&big, cluster.now));
}

/// What replaces the pod that was moved runs, beside the one for which that was done; and where it runs now there would
/// be room for another if it were moved again, to a node that has come.
fn moved_and_in_the_way_again(cluster: &mut Cluster, replacement: Value) {
    put(cluster, "small-anew", "10Gi", "rs-small", replacement);
    cluster.settle(SECOND);
    cluster.drop_pod("small", true);
    cluster.settle(5 * SECOND);
    bind(cluster, "ml", "small-anew");
    bind(cluster, "ml", "big");
    cluster.put_node("c", 1);
    put_bound(cluster, "sixty", "60Gi");
    cluster.drop_pod("half", true);
}

#[test]
fn an_owner_rests_and_an_hour_has_so_many_moves() {
    for (rest, per_hour, later) in [(10 * MINUTE, 30, 10 * MINUTE), (MINUTE, 1, 60 * MINUTE)] {
        let mut cluster = fragmented(Mode::Auto, ("ml", mark("true")));
        let mut rules = rules(Mode::Auto);
        (rules.consolidation.rest, rules.consolidation.per_hour) = (rest, per_hour);
        cluster.fail_over(rules);
        cluster.settle(SECOND);
        put(&mut cluster, "big", "75Gi", "rs-big", json!({}));
        cluster.settle(MINUTE);
        moved_and_in_the_way_again(&mut cluster, mark("true"));
        put(&mut cluster, "bigger", "75Gi", "rs-bigger", json!({}));
        cluster.settle(5 * MINUTE);
        assert_eq!(moved(&cluster), ["small"], "it was moved a moment ago");
        assert!(cluster.place("bigger").is_none());
        // Nothing happens but that the rest ends, or the hour.
        cluster.settle(later);
        assert_eq!(moved(&cluster), ["small", "small-anew"]);
        let between = cluster.moved[1].0 - cluster.moved[0].0;
        assert!((later..later + 5 * SECOND).contains(&between), "{between:?}");
    }
    // None in any hour.
    let mut none = fragmented(Mode::Auto, ("ml", mark("true")));
    none.core.rules.consolidation.per_hour = 0;
    put(&mut none, "big", "75Gi", "rs-big", json!({}));
    none.settle(MINUTE);
    assert_eq!(none.core.reserves.evictions.moves.counts().evictions, 0);
}

#[test]
fn a_refused_eviction_is_the_end_of_it_for_a_while() {
    let mut cluster = fragmented(Mode::Auto, ("ml", mark("true")));
    put(&mut cluster, "big", "75Gi", "rs-big", json!({}));
    let begin = cluster.now;
    while cluster.now < begin + MINUTE {
        cluster.deliver(usize::MAX);
        let next = cluster.round();
        while let Some(write) = cluster.writes.front() {
            match matches!(write, crate::controller::write::Write::Move(..)) {
                true => cluster.fail(crate::controller::write::Failure::Refused("a budget".to_owned())),
                false => cluster.write(false),
            }
        }
        cluster.now = next.unwrap_or(begin + MINUTE).max(cluster.now + Duration::from_millis(100));
    }
    assert_eq!(cluster.core.reserves.evictions.moves.counts().evictions, 1);
    let (_, troubles) = cluster.core.recorder.take();
    assert!(
        troubles.iter().any(|words| words.contains("pod ml/small is not moved: a budget")),
        "{troubles:?}"
    );
    // Nothing is kept any more: what fits in it may have it.
    put(&mut cluster, "sixty", "60Gi", "rs-sixty", json!({}));
    cluster.settle(10 * SECOND);
    assert_eq!(cluster.place("sixty"), cluster.place("small"));
}

/// Beside [`fragmented`]: `second`, 6 GiB on the GPU of `small`, of an owner of this kind. `big`, 79 GiB, needs both to leave.
fn two_in_the_way(kind: (&str, &str)) -> Cluster {
    let mut cluster = fragmented(Mode::Auto, ("ml", mark("true")));
    beside(&mut cluster, "a", |cluster| {
        let mut more = mark("true");
        more["metadata"]["ownerReferences"] = json!([
            {"apiVersion": kind.0, "kind": kind.1, "name": "second", "uid": "second", "controller": true}]);
        put(cluster, "second", "6Gi", "", more);
        bind(cluster, "ml", "second");
    });
    assert_eq!(cluster.place("second"), cluster.place("small"));
    cluster
}

fn label(cluster: &mut Cluster, name: &str) {
    let mut pod = cluster.pods[&("ml".to_owned(), name.to_owned())].clone();
    pod.metadata.labels = Some([("app".to_owned(), "x".to_owned())].into());
    cluster.store_pod(pod);
}

fn moved(cluster: &Cluster) -> Vec<&str> {
    cluster.moved.iter().map(|(_, (_, name))| name.as_str()).collect()
}

const REPLICA_SET: (&str, &str) = ("apps/v1", "ReplicaSet");

#[test]
fn nobody_moves_any_more_for_who_is_gone_or_has_its_place() {
    for is_gone in [true, false] {
        let mut cluster = two_in_the_way(REPLICA_SET);
        let source = cluster.place("small").unwrap();
        put(&mut cluster, "big", "79Gi", "rs-big", json!({}));
        let begin = cluster.now;
        while cluster.moved.is_empty() {
            assert!(cluster.now < begin + MINUTE, "nobody is moved");
            cluster.deliver(usize::MAX);
            let next = cluster.round();
            while !cluster.writes.is_empty() {
                cluster.write(false);
            }
            if cluster.moved.is_empty() {
                cluster.now = next.unwrap_or(cluster.now).max(cluster.now + Duration::from_millis(100));
            }
        }
        match is_gone {
            true => cluster.drop_pod("big", true),
            false => cluster.put_node("c", 1),
        }
        cluster.settle(5 * SECOND);
        assert_eq!(moved(&cluster), ["small"], "gone: {is_gone}");
        end(&mut cluster, "small", "small-anew", "10Gi");
        assert_eq!(cluster.place("small-anew").map(|(node, _)| node), Some("a".to_owned()));
        put(&mut cluster, "late", "60Gi", "rs-late", json!({}));
        cluster.settle(5 * SECOND);
        assert_eq!(cluster.place("late"), Some(source), "gone: {is_gone}");
        let counts = cluster.core.reserves.evictions.moves.counts();
        let (served, in_vain) = (u64::from(!is_gone), u64::from(is_gone));
        assert_eq!((counts.evictions, counts.served, counts.in_vain), (1, served, in_vain));
        cluster.check();
    }
}

/// What one leaves is of no use while another stays.
#[test]
fn nobody_moves_beside_a_pod_that_a_budget_keeps() {
    type Case = (&'static [&'static str], i32, &'static [&'static str]);
    let cases: [Case; 5] = [
        (&["second"], 0, &[]),
        (&["small", "second"], 0, &[]),
        (&["small", "second"], 1, &[]),
        (&["second"], 1, &["second", "small"]),
        (&["small"], 1, &["small", "second"]),
    ];
    for (guarded, allowed, moves) in cases {
        let mut cluster = two_in_the_way(REPLICA_SET);
        guarded.iter().for_each(|name| label(&mut cluster, name));
        cluster.put_budget(("ml", "keep"), json!({"app": "x"}), allowed);
        put(&mut cluster, "big", "79Gi", "rs-big", json!({}));
        cluster.settle(MINUTE);
        assert_eq!(moved(&cluster), moves, "{guarded:?}, {allowed} may go");
        if moves.is_empty() {
            let told = words_to(&mut cluster, "big");
            let last = told.last().expect("it is told why it waits");
            assert!(last.contains("evict "), "a person is told of it all the same: {last}");
        }
        cluster.put_budget(("ml", "keep"), json!({"app": "x"}), 2);
        cluster.settle(MINUTE);
        assert_eq!(moved(&cluster).len(), 2, "as soon as it lets them go: {guarded:?}, {allowed}");
    }
    // Of two budgets the API server lets no pod go.
    let mut cluster = two_in_the_way(REPLICA_SET);
    label(&mut cluster, "second");
    ["one", "other"].iter().for_each(|name| cluster.put_budget(("ml", name), json!({"app": "x"}), 1));
    put(&mut cluster, "big", "79Gi", "rs-big", json!({}));
    cluster.settle(MINUTE);
    assert_eq!(moved(&cluster), [""; 0]);
    // A Job may be at its last try, which shows only when it is asked for.
    let mut cluster = two_in_the_way(("batch/v1", "Job"));
    put(&mut cluster, "big", "79Gi", "rs-big", json!({}));
    cluster.settle(MINUTE);
    assert_eq!(moved(&cluster), ["second", "small"]);
}

#[test]
fn a_new_leader_lets_owners_rest_that_have_just_made_a_pod() {
    let mut cluster = fragmented(Mode::Auto, ("ml", mark("true")));
    put(&mut cluster, "big", "75Gi", "rs-big", json!({}));
    cluster.settle(MINUTE);
    let mut anew = mark("true");
    let made = cluster.core.recorder.time_of(cluster.now).unwrap();
    anew["metadata"]["creationTimestamp"] = made.to_string().into();
    moved_and_in_the_way_again(&mut cluster, anew);
    cluster.fail_over(rules(Mode::Auto));
    put(&mut cluster, "bigger", "75Gi", "rs-bigger", json!({}));
    cluster.settle(8 * MINUTE);
    assert_eq!(moved(&cluster), ["small"], "another of its owner was moved a moment ago");
    // Nothing happens but that this leader has led for as long as owners rest.
    cluster.settle(3 * MINUTE);
    assert_eq!(moved(&cluster), ["small", "small-anew"]);
}

/// A leader before it may have had pods moved for them.
#[test]
fn a_new_leader_moves_no_pods_for_those_that_waited_before_it_until_they_have_rested() {
    // The API server's clock, if it says when the pod was made, is so many seconds ahead; and whether it waits anew.
    for (ahead, again) in [(None, false), (Some(0), true), (Some(90), false)] {
        let mut cluster = fragmented(Mode::Auto, ("ml", mark("true")));
        let now = cluster.core.recorder.time_of(cluster.now).unwrap();
        let made = ahead.map(|ahead| (now + jiff::SignedDuration::from_secs(ahead)).to_string());
        let more = json!({"metadata": {"creationTimestamp": made}});
        put(&mut cluster, "big", "75Gi", "rs-big", more.clone());
        cluster.settle(SECOND);
        cluster.fail_over(rules(Mode::Auto));
        if again {
            cluster.drop_pod("big", true);
            cluster.settle(SECOND);
            put(&mut cluster, "big", "75Gi", "rs-big", more);
        }
        cluster.settle(9 * MINUTE);
        assert_eq!(moved(&cluster), [""; 0], "{ahead:?} {again}");
        // Nothing happens but that this leader has led for as long as they rest.
        cluster.settle(2 * MINUTE);
        assert_eq!(moved(&cluster), ["small"], "{ahead:?} {again}");
    }
}

#[test]
fn people_are_told_the_same_and_nothing_is_changed_by_it() {
    let mut cluster = fragmented(Mode::Propose, ("secret", json!({})));
    put(&mut cluster, "big", "75Gi", "rs-big", json!({}));
    put(&mut cluster, "huge", "79Gi", "rs-huge", json!({}));
    cluster.settle(SECOND);
    let (mut core, listing) = listed(&mut cluster);
    let claim = Asked::Claim(core.view.claim_named("ml", "big").unwrap().key);
    let told = explain(&mut core, &listing, &[claim], Timestamp::UNIX_EPOCH).remove(0);
    let Answer::Waits { moves: Some(moves), .. } = told.answer else { panic!("{told:?}") };
    assert_eq!(moves, "evict secret/small (10240 MiB of gpu-1); it fits a/gpu-1; then this fits b/gpu-1");
    let (mut core, listing) = listed(&mut cluster);
    let waits = rebalance(&mut core, &listing, None);
    let helps: Vec<&Help> = waits.iter().map(|one| &one.help).collect();
    assert!(matches!(helps[..], [Help::Moves(_), Help::None(_)]), "{helps:?}");
    assert_eq!((&waits[0].pods[0].name[..], &waits[0].claims[0]), ("big", &vec!["big".to_owned()]));
    assert_eq!(audit(&core.capacity.index), vec![], "as if it had been done");
    let (mut core, listing) = listed(&mut cluster);
    assert_eq!(rebalance(&mut core, &listing, Some("other")), vec![]);
}

#[test]
fn a_namespace_cannot_keep_places_again_and_again_by_ending_pods_of_its_own() {
    // Two have to leave; one of them does.
    let mut cluster = fragmented(Mode::Propose, ("ml", json!({})));
    let mut half = cluster.pods[&("ml".to_owned(), "half".to_owned())].clone();
    half.metadata.annotations = Some([("tranche.dev/movable".to_owned(), "false".to_owned())].into());
    cluster.store_pod(half);
    beside(&mut cluster, "a", |cluster| put_bound(cluster, "second", "6Gi"));
    assert_eq!(cluster.place("second"), cluster.place("small"));
    put(&mut cluster, "big", "79Gi", "rs-big", json!({}));
    cluster.settle(MINUTE);
    cluster.drop_pod("small", true);
    cluster.settle(SECOND);
    put(&mut cluster, "late", "60Gi", "rs-late", json!({}));
    cluster.settle(MINUTE);
    assert!(cluster.place("late").is_none() && cluster.place("big").is_none(), "it is kept");
    cluster.settle(3 * MINUTE);
    assert!(cluster.place("late").is_some(), "for three minutes");
    let before = cluster.core.reserves.evictions.moves.counts().in_vain;
    assert_eq!(before, 1);
    bind(&mut cluster, "ml", "late");
    cluster.drop_pod("late", true);
    cluster.settle(MINUTE);
    cluster.drop_pod("second", true);
    cluster.settle(SECOND);
    assert!(cluster.place("big").is_some(), "there is room at last");
}

#[test]
fn what_pods_of_lower_priority_leave_is_kept_for_no_move() {
    let mut cluster = fragmented(Mode::Propose, ("ml", json!({})));
    put(&mut cluster, "big", "75Gi", "rs-big", json!({}));
    cluster.settle(MINUTE);
    assert!(proposed(&mut cluster).is_some(), "it is told that small may move");
    for name in ["most-1", "half", "most-2"] {
        let mut pod = cluster.pods[&("ml".to_owned(), name.to_owned())].clone();
        pod.spec.as_mut().unwrap().priority = Some(20);
        cluster.store_pod(pod);
    }
    let tried =
        json!([{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no node"}]);
    let high = json!({"spec": {"priority": 10}, "status": {"conditions": tried}});
    put(&mut cluster, "high", "75Gi", "rs-high", high);
    cluster.settle(2 * SECOND);
    assert_eq!(cluster.ending(), ["small"], "it ends for the pod of higher priority");
    cluster.settle(5 * SECOND);
    cluster.drop_pod("small", true);
    cluster.settle(5 * SECOND);
    assert!(cluster.place("high").is_some() && cluster.place("big").is_none());
    let preemptions = &cluster.core.reserves.evictions.preempting.counts();
    assert_eq!((preemptions.begun, preemptions.in_vain), (1, 0));
    cluster.check();
}

#[test]
fn nobody_keeps_places_by_asking_for_them_and_going_away() {
    let mut cluster = fragmented(Mode::Propose, ("ml", json!({})));
    let mut second = cluster.pods[&("ml".to_owned(), "half".to_owned())].clone();
    second.metadata.annotations = Some([("tranche.dev/movable".to_owned(), "false".to_owned())].into());
    cluster.store_pod(second);
    beside(&mut cluster, "a", |cluster| put_bound(cluster, "second", "6Gi"));
    put(&mut cluster, "big", "79Gi", "rs-big", json!({}));
    cluster.settle(MINUTE);
    cluster.drop_pod("small", true);
    cluster.settle(SECOND);
    put_in(&mut cluster, ("other", "late"), ("60Gi", 1), "rs-late", json!({}));
    cluster.settle(5 * SECOND);
    assert!(!is_placed(&cluster, ("other", "late")), "it is kept for big");
    cluster.drop_pod("big", true);
    cluster.settle(5 * SECOND);
    assert!(is_placed(&cluster, ("other", "late")), "and no longer than big waits");
    assert_eq!(cluster.core.reserves.evictions.moves.counts().in_vain, 1);
}

fn is_placed(cluster: &Cluster, (namespace, name): (&str, &str)) -> bool {
    let claim = cluster.claims.get(&(namespace.to_owned(), name.to_owned()));
    claim.is_some_and(|claim| !super::cluster::results(claim).is_empty())
}

/// The first that waits, and what is proposed for it.
pub(super) fn proposed(cluster: &mut Cluster) -> Option<Proposed> {
    let turn =
        cluster.core.queue.turns(cluster.now, |_| crate::controller::gang::Placed::default()).remove(0);
    match cluster.core.propose(&turn, MoverFilter::Any, SEARCH_TICKS, cluster.now) {
        MoveSearch::Found(found) => Some(found),
        MoveSearch::Nothing => None,
        MoveSearch::Spent => panic!("spent"),
    }
}

#[test]
fn shares_of_several_gpus_move_together_and_make_room_for_such() {
    let mut cluster = cluster(Mode::Propose);
    cluster.put_node("c", 2);
    put_in(&mut cluster, ("ml", "pair"), ("10Gi", 2), "rs-pair", json!({}));
    bind(&mut cluster, "ml", "pair");
    let pair = cluster.place("pair").unwrap();
    put_bound(&mut cluster, "x", "60Gi");
    put_bound(&mut cluster, "y", "60Gi");
    beside(&mut cluster, "b", |cluster| put_bound(cluster, "z", "15Gi"));
    // A pair of GPUs is free nowhere: one node has the pair, one has two shares, one has one.
    put_in(&mut cluster, ("ml", "big"), ("72Gi", 2), "rs-big", json!({}));
    cluster.settle(5 * SECOND);
    let before = cluster.core.state();
    let epoch = cluster.core.capacity.epoch();
    let found = proposed(&mut cluster).expect("there are moves");
    assert_eq!(cluster.core.capacity.epoch(), epoch);
    assert_eq!((cluster.core.state(), audit(&cluster.core.capacity.index)), (before, vec![]));
    let names: Vec<&str> = found.moves.iter().map(|one| one.pod.name.as_str()).collect();
    assert_eq!((names, found.then[0].1.gpus.len()), (vec!["z"], 2), "{pair:?} {found:?}");
    let places: BTreeMap<_, _> = found.moves.iter().map(|one| (&one.pod.name, &one.to.node)).collect();
    assert!(places.values().all(|node| **node != found.node), "{places:?}");
}
