//! Pods that other pods keep off nodes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde_json::{Value, json};

use super::cluster::{Cluster, merge, object};
use super::preempting;
use super::scenes::{LONG, SECOND};
use crate::cluster::feed::{Change, WatchEvent};
use crate::controller::config::{Mode, Rules};
use crate::controller::explain::{Answer, Subject, explain};
use crate::controller::neighbours::{Asker, Neighbour, Neighbours};
use crate::feasible::{Demands, PodLabels, Terms};
use crate::model::names::{DRIVER, NodeName, PodUid, SHARED_CLASS};

const ZONE: &str = "topology.kubernetes.io/zone";
const HOST: &str = "kubernetes.io/hostname";

/// So many nodes in each of these zones, `node-a0` and so on, with two GPUs each.
fn cluster(zones: &[&str], nodes: usize) -> Cluster {
    let mut cluster = Cluster::new(Rules::default());
    for zone in zones {
        (0..nodes).for_each(|nth| put_node(&mut cluster, &format!("node-{zone}{nth}"), zone));
    }
    cluster
}

fn put_node(cluster: &mut Cluster, name: &str, zone: &str) {
    cluster.put_node(name, 2);
    let mut node = cluster.nodes[name].clone();
    let labels = [(ZONE.to_owned(), zone.to_owned()), (HOST.to_owned(), name.to_owned())];
    node.metadata.labels = Some(labels.into());
    cluster.nodes.insert(name.to_owned(), node.clone());
    cluster.feed.push_back(Change::Node(WatchEvent::Stored(Box::new(node))));
}

fn app(name: &str) -> Value {
    json!({"metadata": {"labels": {"app": name}}})
}

fn both(one: &Value, other: &Value) -> Value {
    let mut both = one.clone();
    merge(&mut both, other);
    both
}

fn term(key: &str, wanted: &str) -> Value {
    json!({"topologyKey": key, "labelSelector": {"matchLabels": {"app": wanted}}})
}

fn affinity(kind: &str, terms: Value) -> Value {
    json!({"spec": {"affinity": {kind: {"requiredDuringSchedulingIgnoredDuringExecution": terms}}}})
}

fn apart(key: &str, from: &str) -> Value {
    affinity("podAntiAffinity", json!([term(key, from)]))
}

fn near(key: &str, to: &str) -> Value {
    affinity("podAffinity", json!([term(key, to)]))
}

fn spread(key: &str, of: &str) -> Value {
    json!({"spec": {"topologySpreadConstraints": [{"topologyKey": key, "maxSkew": 1,
        "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {"matchLabels": {"app": of}}}]}})
}

fn gang(size: usize) -> Value {
    json!({"metadata": {"annotations": {"tranche.dev/gang": "g", "tranche.dev/gang-size": size.to_string()}}})
}

/// A pod with a share of its own name.
fn share(cluster: &mut Cluster, name: &str, pod: &Value) {
    cluster.put_share(name, json!({"memory": "4Gi"}), 1);
    cluster.put_pod(name, &[name], pod.clone());
}

/// The same, of any namespace.
fn share_in(cluster: &mut Cluster, namespace: &str, name: &str, pod: &Value) {
    let share = json!({"apiVersion": "tranche.dev/v1alpha1", "kind": "GpuShare", "memory": "1Mi"});
    cluster.put_claim(json!({"metadata": {"name": name, "namespace": namespace}, "spec": {"devices": {
        "requests": [{"name": "r", "exactly": {"deviceClassName": SHARED_CLASS}}],
        "config": [{"opaque": {"driver": DRIVER, "parameters": share}}]}}}));
    let of_it = json!({"metadata": {"name": name, "namespace": namespace}, "status": {"phase": "Pending"},
        "spec": {"containers": [{"name": "main"}], "resourceClaims": [{"name": "c", "resourceClaimName": name}]}});
    cluster.store_pod(object(both(&of_it, pod)));
}

/// A pod without a claim that is on a node.
fn other(cluster: &mut Cluster, name: &str, node: &str, pod: &Value) {
    cluster.put_pod(name, &[], both(pod, &json!({"spec": {"nodeName": node}})));
}

fn change(cluster: &mut Cluster, name: &str, more: &Value) {
    let pod = &cluster.pods[&("ml".to_owned(), name.to_owned())];
    let mut pod = serde_json::to_value(pod).unwrap();
    merge(&mut pod, more);
    cluster.store_pod(object(pod));
}

/// kube-scheduler binds those of these that have a place.
fn bind(cluster: &mut Cluster, names: &[String]) {
    for name in names {
        if let Some(node) = node_of(cluster, name) {
            change(cluster, name, &json!({"spec": {"nodeName": node}}));
        }
    }
    cluster.settle(LONG);
}

fn names(prefix: &str, count: usize) -> Vec<String> {
    (0..count).map(|nth| format!("{prefix}{nth}")).collect()
}

fn node_of(cluster: &Cluster, name: &str) -> Option<String> {
    cluster.place(name).map(|(node, _)| node)
}

/// The nodes of those that have a place.
fn nodes_of(cluster: &Cluster, names: &[String]) -> Vec<String> {
    names.iter().filter_map(|name| node_of(cluster, name)).collect()
}

/// How many of these nodes are in each zone.
fn by_zone(nodes: &[String]) -> Vec<usize> {
    let mut zones = BTreeMap::<&str, usize>::new();
    nodes.iter().for_each(|node| *zones.entry(&node[..6]).or_default() += 1);
    zones.into_values().collect()
}

fn waiting(cluster: &Cluster, name: &str) -> String {
    let annotations = cluster.claim(name).metadata.annotations.clone().unwrap_or_default();
    annotations.get("tranche.dev/waiting").cloned().unwrap_or_default()
}

/// How often the scheduler has refused a node.
fn refused(cluster: &mut Cluster) -> usize {
    let (notes, _) = cluster.core.recorder.take();
    notes.iter().filter(|note| note.reason == "GpuShareMoved").count()
}

#[test]
fn replicas_that_must_be_apart_get_a_node_each_at_once_and_one_more_waits() {
    let mut cluster = cluster(&["a", "b"], 4);
    let pod = both(&app("web"), &apart(HOST, "web"));
    let all = names("web-", 8);
    all.iter().for_each(|name| share(&mut cluster, name, &pod));
    cluster.deliver(usize::MAX);
    cluster.round();
    assert_eq!(cluster.core.tracker.planned_claims().count(), 8, "in one round");
    cluster.settle(LONG);
    let nodes: BTreeSet<String> = nodes_of(&cluster, &all).into_iter().collect();
    assert_eq!(nodes.len(), 8);
    assert_eq!(refused(&mut cluster), 0);
    bind(&mut cluster, &all);
    share(&mut cluster, "more", &pod);
    share(&mut cluster, "free", &app("db"));
    cluster.settle(LONG);
    assert!(node_of(&cluster, "free").is_some());
    assert_eq!(node_of(&cluster, "more"), None);
    let words = waiting(&cluster, "more");
    let why = "node node-a0 is in kubernetes.io/hostname=node-a0, where 1 pod matches the pod's required anti-affinity";
    assert!(words.contains(why), "{words}");
    // One that is ending is still there for kube-scheduler.
    let ends = json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}});
    change(&mut cluster, "web-0", &ends);
    cluster.settle(LONG);
    assert_eq!(node_of(&cluster, "more"), None);
    let freed = node_of(&cluster, "web-0");
    cluster.drop_pod("web-0", true);
    cluster.settle(LONG);
    assert_eq!(node_of(&cluster, "more"), freed);
    // What counted before is known to who begins anew.
    share(&mut cluster, "again", &pod);
    cluster.fail_over(Rules::default());
    cluster.settle(LONG);
    assert_eq!(node_of(&cluster, "again"), None);
    cluster.check();
}

/// In whatever order kube-scheduler binds them, none is refused.
#[test]
fn replicas_that_are_spread_come_to_each_zone_in_turn() {
    let mut cluster = cluster(&["a", "b", "c"], 2);
    let pod = both(&app("web"), &spread(ZONE, "web"));
    let all = names("web-", 7);
    all.iter().for_each(|name| share(&mut cluster, name, &pod));
    cluster.deliver(usize::MAX);
    cluster.round();
    assert_eq!(cluster.core.tracker.planned_claims().count(), 3);
    let again = cluster.core.round(cluster.now, &mut String::new);
    assert_eq!((again.decided, again.refused), (0, 0), "nobody is tried again before one is bound");
    cluster.writes.extend(again.writes);
    cluster.settle(LONG);
    assert_eq!(by_zone(&nodes_of(&cluster, &all)), [1, 1, 1], "none is bound yet");
    bind(&mut cluster, &all);
    assert_eq!(by_zone(&nodes_of(&cluster, &all)), [2, 2, 2]);
    bind(&mut cluster, &all);
    let mut zones = by_zone(&nodes_of(&cluster, &all));
    zones.sort_unstable();
    assert_eq!(zones, [2, 2, 3]);
    bind(&mut cluster, &all);
    assert_eq!(refused(&mut cluster), 0);
    // Who is ending counts no more.
    let fullest = all.iter().find(|name| {
        let nodes = nodes_of(&cluster, &all);
        let zone = |node: &String| node[..6].to_owned();
        let own = zone(&node_of(&cluster, name).unwrap());
        nodes.iter().filter(|node| zone(node) == own).count() == 2
    });
    let ending = fullest.unwrap().clone();
    change(&mut cluster, &ending, &json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}));
    let last = names("last-", 2);
    last.iter().for_each(|name| share(&mut cluster, name, &pod));
    cluster.settle(LONG);
    let zone = |name: &str| node_of(&cluster, name).map(|node| node[..6].to_owned());
    let zones: Vec<String> = last.iter().filter_map(|name| zone(name)).collect();
    assert_eq!(zones, [zone(&ending).unwrap()], "one is missing there, and none elsewhere");
    cluster.check();
}

#[test]
fn a_pod_waits_for_a_pod_that_it_must_be_near() {
    let mut cluster = cluster(&["a", "b", "c"], 2);
    share(&mut cluster, "worker", &near(ZONE, "db"));
    cluster.settle(LONG);
    assert_eq!(node_of(&cluster, "worker"), None);
    let words = waiting(&cluster, "worker");
    assert!(words.contains("where no pod runs that matches the pod's required affinity"), "{words}");
    // One that has its share and is not bound would not be found by kube-scheduler.
    let in_c = json!({"spec": {"nodeSelector": {ZONE: "c"}}});
    share(&mut cluster, "db", &both(&app("db"), &in_c));
    cluster.settle(LONG);
    assert!(node_of(&cluster, "db").is_some() && node_of(&cluster, "worker").is_none());
    bind(&mut cluster, &["db".to_owned()]);
    assert!(node_of(&cluster, "worker").is_some_and(|node| node.starts_with("node-c")));
    assert_eq!(refused(&mut cluster), 0);
    cluster.check();
}

#[test]
fn pods_that_must_be_near_one_another_are_where_the_first_is() {
    let mut cluster = cluster(&["a", "b", "c"], 1);
    let all = names("web-", 40);
    let pod = both(&app("web"), &near(ZONE, "web"));
    all.iter().for_each(|name| share(&mut cluster, name, &pod));
    cluster.settle(LONG);
    // Two GPUs with 16 blocks of client slots each.
    assert_eq!(by_zone(&nodes_of(&cluster, &all)), [32]);
    cluster.check();
}

#[test]
fn anti_affinity_of_others_counts_as_well() {
    let mut cluster = cluster(&["a", "b"], 1);
    other(&mut cluster, "shy", "node-a0", &apart(ZONE, "web"));
    share(&mut cluster, "web", &app("web"));
    share(&mut cluster, "db", &app("db"));
    cluster.settle(LONG);
    assert_eq!(node_of(&cluster, "web").as_deref(), Some("node-b0"));
    assert!(node_of(&cluster, "db").is_some());
    other(&mut cluster, "too-shy", "node-b0", &apart(HOST, "web"));
    share(&mut cluster, "late", &app("web"));
    cluster.settle(LONG);
    assert_eq!(node_of(&cluster, "late"), None);
    let words = waiting(&cluster, "late");
    assert!(words.contains("zone=a, where 1 pod has required anti-affinity to the pod"), "{words}");
    cluster.drop_pod("shy", false);
    cluster.settle(LONG);
    assert_eq!(node_of(&cluster, "late").as_deref(), Some("node-a0"));
    // Also of those that have their place and are not bound, in the same round.
    share(&mut cluster, "avoider", &both(&app("x"), &apart(ZONE, "y")));
    share(&mut cluster, "avoided", &app("y"));
    cluster.deliver(usize::MAX);
    cluster.round();
    cluster.settle(LONG);
    let (one, two) = (node_of(&cluster, "avoider"), node_of(&cluster, "avoided"));
    assert!(one.is_some() && two.is_some() && one != two, "{one:?} {two:?}");
    cluster.check();
}

/// Without a share of its own, by naming a claim that another pod runs with: kube-scheduler finds it nowhere, and it may
/// never be bound.
#[test]
fn a_pod_that_is_not_bound_keeps_no_pod_of_another_namespace_off() {
    let mut cluster = cluster(&["a"], 1);
    let theirs = |name: &str, more: Value| {
        let pod = json!({"metadata": {"name": name, "namespace": "else"},
            "spec": {"containers": [{"name": "main"}], "resourceClaims": [{"name": "c", "resourceClaimName": "held"}]},
            "status": {"phase": "Pending"}});
        object::<k8s_openapi::api::core::v1::Pod>(both(&pod, &more))
    };
    let share_of = json!({"apiVersion": "tranche.dev/v1alpha1", "kind": "GpuShare", "memory": "1Gi"});
    cluster.put_claim(json!({"metadata": {"name": "held", "namespace": "else"}, "spec": {"devices": {
        "requests": [{"name": "r", "exactly": {"deviceClassName": SHARED_CLASS}}],
        "config": [{"opaque": {"driver": DRIVER, "parameters": share_of}}]}}}));
    cluster.store_pod(theirs("runs", json!({})));
    cluster.settle(LONG);
    cluster.store_pod(theirs("runs", json!({"spec": {"nodeName": "node-a0"}})));
    let all = json!({"topologyKey": HOST, "labelSelector": {}, "namespaceSelector": {}});
    let avoids_all = affinity("podAntiAffinity", json!([all]));
    cluster.store_pod(theirs("never-bound", avoids_all.clone()));
    share(&mut cluster, "victim", &app("web"));
    cluster.settle(LONG);
    assert_eq!(node_of(&cluster, "victim").as_deref(), Some("node-a0"));
    // Once it is bound it does, as kube-scheduler has it.
    cluster.store_pod(theirs("never-bound", both(&avoids_all, &json!({"spec": {"nodeName": "node-a0"}}))));
    share(&mut cluster, "late", &app("web"));
    cluster.settle(LONG);
    assert_eq!(node_of(&cluster, "late"), None);
    cluster.check();
}

/// Nor by what the pod itself requires: kube-scheduler would bind it beside those that it finds nowhere.
#[test]
fn a_pod_of_another_namespace_that_is_not_bound_counts_for_no_term() {
    let mut cluster = cluster(&["a"], 1);
    let share_of = json!({"apiVersion": "tranche.dev/v1alpha1", "kind": "GpuShare", "memory": "1Gi"});
    cluster.put_claim(json!({"metadata": {"name": "theirs", "namespace": "else"}, "spec": {"devices": {
        "requests": [{"name": "r", "exactly": {"deviceClassName": SHARED_CLASS}}],
        "config": [{"opaque": {"driver": DRIVER, "parameters": share_of}}]}}}));
    let stranger = |more: Value| {
        let pod = json!({"metadata": {"name": "never-bound", "namespace": "else", "labels": {"app": "web"}},
            "spec": {"containers": [{"name": "main"}], "resourceClaims": [{"name": "c", "resourceClaimName": "theirs"}]},
            "status": {"phase": "Pending"}});
        object::<k8s_openapi::api::core::v1::Pod>(both(&pod, &more))
    };
    cluster.store_pod(stranger(json!({})));
    cluster.settle(SECOND);
    let anywhere = |key: &str| both(&term(key, "web"), &json!({"namespaceSelector": {}}));
    share(&mut cluster, "victim", &affinity("podAntiAffinity", json!([anywhere(ZONE)])));
    cluster.settle(SECOND);
    assert_eq!(node_of(&cluster, "victim").as_deref(), Some("node-a0"));
    // Those of its own namespace do, who have their places one after another.
    let apart = both(&app("web"), &affinity("podAntiAffinity", json!([anywhere(HOST)])));
    ["one", "two"].iter().for_each(|name| share(&mut cluster, name, &apart));
    cluster.settle(SECOND);
    let placed = ["one", "two"].iter().filter(|name| node_of(&cluster, name).is_some()).count();
    assert_eq!(placed, 1);
    // And whoever is bound.
    cluster.store_pod(stranger(json!({"spec": {"nodeName": "node-a0"}})));
    cluster.settle(SECOND);
    share(&mut cluster, "late", &affinity("podAntiAffinity", json!([anywhere(ZONE)])));
    cluster.settle(SECOND);
    assert_eq!(node_of(&cluster, "late"), None);
    cluster.check();
}

/// Others have to look through them.
#[test]
fn of_terms_about_pods_of_other_namespaces_so_many_are_followed() {
    let mut cluster = cluster(&["a", "b"], 1);
    for nth in 0..40 {
        let theirs = json!({"metadata": {"name": format!("p{nth}"), "namespace": "else"},
            "spec": {"containers": [{"name": "main"}], "nodeName": "node-a0"}, "status": {"phase": "Running"}});
        let web = json!({"topologyKey": HOST, "namespaces": ["ml"], "labelSelector": {"matchLabels": {"app": format!("app-{nth}")}}});
        let pod = both(&theirs, &affinity("podAntiAffinity", json!([web])));
        cluster.store_pod(object(pod));
    }
    let there = json!({"spec": {"nodeSelector": {HOST: "node-a0"}}});
    for (name, has_place) in [("app-0", false), ("app-31", false), ("app-39", true)] {
        share(&mut cluster, name, &both(&app(name), &there));
        cluster.settle(LONG);
        assert_eq!(node_of(&cluster, name).is_some(), has_place, "{name}");
    }
    let troubles = cluster.core.recorder.take().1;
    let told =
        troubles.iter().filter(|one| one.contains("too many different terms of anti-affinity")).count();
    assert_eq!(told, 1, "{troubles:?}");
    cluster.check();
}

/// The first of them alone would go where most is taken, and the others have no room there.
#[test]
fn a_gang_that_must_be_near_one_another_goes_where_there_is_room_for_all() {
    for key in [HOST, ZONE] {
        let own = both(&app("web"), &near(key, "web"));
        let to_launcher = both(&app("web"), &near(key, "launcher"));
        // Who comes first in the queue may be one that must be near another.
        for (launcher, others, at) in [
            (&own, &own, "m0"),
            (&app("launcher"), &to_launcher, "m0"),
            (&app("launcher"), &to_launcher, "m3"),
        ] {
            let mut cluster = cluster(&["a", "b", "c"], 1);
            cluster.put_share("used", json!({"memory": "70Gi"}), 1);
            cluster.put_pod("used", &["used"], json!({}));
            cluster.settle(LONG);
            bind(&mut cluster, &["used".to_owned()]);
            let all = names("m", 4);
            for name in &all {
                cluster.put_share(name, json!({"memory": "39Gi"}), 1);
                let pod = if name == at { launcher } else { others };
                cluster.put_pod(name, &[name], both(pod, &gang(4)));
            }
            cluster.settle(LONG);
            assert_eq!(by_zone(&nodes_of(&cluster, &all)), [4], "{key} {others} {at}");
            cluster.check();
        }
    }
}

/// Nodes whose GPUs are idle and cannot be had come first by what is left on them.
#[test]
fn a_gang_that_must_be_near_one_another_is_led_past_nodes_where_none_of_it_fits() {
    let mut cluster = cluster(&["a", "b"], 1);
    cluster.put_share("used", json!({"memory": "70Gi"}), 1);
    cluster.put_pod("used", &["used"], json!({}));
    cluster.settle(LONG);
    bind(&mut cluster, &["used".to_owned()]);
    for nth in 0..8 {
        let name = format!("node-full{nth}");
        cluster.put_node(&name, 4);
        let mut node = cluster.nodes[&name].clone();
        node.metadata.labels = Some([(HOST.to_owned(), name.clone())].into());
        let few = k8s_openapi::apimachinery::pkg::api::resource::Quantity("1m".to_owned());
        let status = node.status.get_or_insert_default();
        status.allocatable.get_or_insert_default().insert("cpu".to_owned(), few);
        cluster.nodes.insert(name.clone(), node.clone());
        cluster.feed.push_back(Change::Node(WatchEvent::Stored(Box::new(node))));
    }
    let all = names("m", 4);
    let of_cpu = json!({"spec": {"containers": [{"name": "main", "resources": {"requests": {"cpu": "1"}}}]}});
    for name in &all {
        cluster.put_share(name, json!({"memory": "39Gi"}), 1);
        let pod = both(&both(&app("web"), &near(HOST, "web")), &both(&of_cpu, &gang(4)));
        cluster.put_pod(name, &[name], pod);
    }
    cluster.settle(LONG);
    assert_eq!(nodes_of(&cluster, &all), vec!["node-b0"; 4]);
    cluster.check();
}

/// Wherever the first round comes to its end, maybe at the domain that is looked at last.
#[test]
fn a_gang_that_must_be_near_one_another_is_not_told_of_no_room_where_nobody_has_looked() {
    for ticks in (200..30_000).step_by(100) {
        let mut cluster = cluster(&["a", "b"], 2);
        cluster.put_share("used", json!({"memory": "10Gi"}), 1);
        cluster.put_pod("used", &["used"], json!({}));
        cluster.settle(LONG);
        bind(&mut cluster, &["used".to_owned()]);
        let all = names("m", 4);
        for name in &all {
            // Two claims: what their searches may take is bounded. Zone a has room for three such pods.
            let claims = ["x", "y"].map(|of| format!("{name}-{of}"));
            claims.iter().for_each(|claim| cluster.put_share(claim, json!({"memory": "39Gi"}), 1));
            let pod = both(&both(&app("web"), &near(ZONE, "web")), &gang(4));
            cluster.put_pod(name, &claims.each_ref().map(String::as_str), pod);
        }
        cluster.core.purse.bound(ticks);
        cluster.deliver(usize::MAX);
        cluster.round();
        cluster.core.purse.bound(1_000_000);
        cluster.settle(5 * SECOND);
        let of = |name: &String| node_of(&cluster, &format!("{name}-x"));
        let nodes: Vec<String> = all.iter().filter_map(of).collect();
        assert_eq!(by_zone(&nodes), [4], "{ticks} ticks: {nodes:?} {}", waiting(&cluster, "m0-x"));
    }
}

/// A pod that has nothing to do with it comes first, and most of the room is where they may not go.
#[test]
fn of_a_gang_those_that_must_be_near_one_another_are_led_to_where_they_may_go() {
    let mut cluster = cluster(&["a", "b"], 1);
    cluster.put_share("used", json!({"memory": "70Gi"}), 1);
    cluster.put_pod("used", &["used"], json!({}));
    cluster.settle(LONG);
    bind(&mut cluster, &["used".to_owned()]);
    (0..5).for_each(|nth| put_node(&mut cluster, &format!("node-0{nth}"), "0"));
    let in_zone = |operator: &str| {
        let terms = json!([{"matchExpressions": [{"key": ZONE, "operator": operator, "values": ["0"]}]}]);
        let required =
            json!({"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}});
        both(&json!({"spec": {"affinity": {"nodeAffinity": required}}}), &gang(5))
    };
    let worker = both(&both(&app("web"), &near(HOST, "web")), &in_zone("NotIn"));
    cluster.put_share("master", json!({"memory": "60Gi"}), 1);
    cluster.put_pod("master", &["master"], both(&app("master"), &in_zone("In")));
    let all = names("m", 4);
    for name in &all {
        cluster.put_share(name, json!({"memory": "39Gi"}), 1);
        cluster.put_pod(name, &[name], worker.clone());
    }
    cluster.settle(LONG);
    assert!(node_of(&cluster, "master").is_some());
    assert_eq!(nodes_of(&cluster, &all), vec!["node-b0"; 4]);
    cluster.check();
}

/// Whoever has the largest share comes first in a gang: here the worker.
#[test]
fn of_a_gang_pods_that_must_be_near_another_come_after_that_one() {
    let mut cluster = cluster(&["a", "b"], 1);
    let worker = both(&both(&app("worker"), &near(ZONE, "launcher")), &gang(3));
    cluster.put_share("worker-0", json!({"memory": "20Gi"}), 1);
    cluster.put_pod("worker-0", &["worker-0"], worker.clone());
    share(&mut cluster, "worker-1", &worker);
    cluster.settle(LONG);
    share(&mut cluster, "launcher", &both(&app("launcher"), &gang(3)));
    cluster.settle(LONG);
    let all = ["launcher", "worker-0", "worker-1"].map(|name| node_of(&cluster, name));
    assert!(all[0].is_some() && all.iter().all(|node| *node == all[0]), "{all:?}");
    cluster.check();
    // There is none: none of them starts.
    let mut without = super::neighbours::cluster(&["a", "b"], 1);
    let alone = both(&both(&app("worker"), &near(ZONE, "launcher")), &gang(2));
    ["w-0", "w-1"].into_iter().for_each(|name| share(&mut without, name, &alone));
    without.settle(LONG);
    assert_eq!(["w-0", "w-1"].map(|name| node_of(&without, name)), [None, None]);
    without.check();
}

/// A label can be changed: who had to stay apart need not any more.
#[test]
fn labels_that_change_and_pods_that_have_ended_are_noticed() {
    let mut cluster = cluster(&["a"], 1);
    other(&mut cluster, "web", "node-a0", &app("web"));
    share(&mut cluster, "shy", &apart(HOST, "web"));
    cluster.settle(LONG);
    assert_eq!(node_of(&cluster, "shy"), None);
    change(&mut cluster, "web", &app("other"));
    cluster.settle(SECOND);
    assert_eq!(node_of(&cluster, "shy").as_deref(), Some("node-a0"));
    // Its own, too.
    other(&mut cluster, "avoider", "node-a0", &apart(HOST, "x"));
    share(&mut cluster, "late", &app("x"));
    cluster.settle(LONG);
    assert_eq!(node_of(&cluster, "late"), None);
    change(&mut cluster, "late", &app("y"));
    cluster.settle(SECOND);
    assert_eq!(node_of(&cluster, "late").as_deref(), Some("node-a0"));
    other(&mut cluster, "done", "node-a0", &app("job"));
    change(&mut cluster, "done", &json!({"status": {"phase": "Succeeded"}}));
    share(&mut cluster, "next", &apart(HOST, "job"));
    cluster.settle(LONG);
    assert_eq!(node_of(&cluster, "next").as_deref(), Some("node-a0"));
    cluster.check();
}

/// kube-scheduler looks at labels of namespaces, which the controller does not know: it learns of such terms by refusals.
#[test]
fn terms_of_other_namespaces_count_where_they_are_named() {
    let mut cluster = cluster(&["a", "b"], 1);
    let theirs =
        object(json!({"metadata": {"name": "theirs", "namespace": "else", "labels": {"app": "web"}},
        "spec": {"containers": [{"name": "main"}], "nodeName": "node-a0"}, "status": {"phase": "Running"}}));
    cluster.store_pod(theirs);
    let with = |more: Value| affinity("podAntiAffinity", json!([both(&term(HOST, "web"), &more)]));
    for (name, more, node) in [
        ("own", json!({}), "node-a0"),
        ("named", json!({"namespaces": ["else"]}), "node-b0"),
        ("all", json!({"namespaceSelector": {}}), "node-b0"),
        (
            "by-name",
            json!({"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "else"}}}),
            "node-b0",
        ),
        ("by-label", json!({"namespaceSelector": {"matchLabels": {"team": "x"}}}), "node-a0"),
    ] {
        share(&mut cluster, name, &with(more));
        cluster.settle(LONG);
        assert_eq!(node_of(&cluster, name).as_deref(), Some(node), "{name}");
        cluster.drop_pod(name, true);
        cluster.settle(LONG);
    }
    let many: Vec<Value> =
        (0..200).map(|nth| term(HOST, &format!("web-{nth}"))).chain([term(HOST, "db")]).collect();
    other(&mut cluster, "db", "node-a0", &app("db"));
    share(&mut cluster, "long", &affinity("podAntiAffinity", json!(many)));
    cluster.settle(LONG);
    assert_eq!(node_of(&cluster, "long").as_deref(), Some("node-a0"), "as if it had none");
    let troubles = cluster.core.recorder.take().1;
    let told =
        troubles.iter().filter(|one| one.contains("pod ml/long: its required affinities to pods")).count();
    assert_eq!(told, 1, "{troubles:?}");
    cluster.check();
}

#[test]
fn pods_that_start_together_are_apart_from_each_other() {
    for (rule, zones) in [(apart(HOST, "web"), vec![2, 2]), (spread(ZONE, "web"), vec![2, 2])] {
        let mut cluster = cluster(&["a", "b"], 2);
        let pod = both(&both(&app("web"), &rule), &gang(4));
        let all = names("m", 4);
        all.iter().for_each(|name| share(&mut cluster, name, &pod));
        cluster.settle(LONG);
        let nodes = nodes_of(&cluster, &all);
        let mut found = by_zone(&nodes);
        found.sort_unstable();
        assert_eq!(found, zones, "{nodes:?}");
        if rule["spec"]["affinity"].is_object() {
            assert_eq!(nodes.iter().collect::<BTreeSet<_>>().len(), 4, "{nodes:?}");
        }
        cluster.check();
    }
    // One more than there are nodes: none starts.
    let mut cluster = cluster(&["a", "b"], 2);
    let pod = both(&both(&app("web"), &apart(HOST, "web")), &gang(5));
    let all = names("m", 5);
    all.iter().for_each(|name| share(&mut cluster, name, &pod));
    cluster.settle(LONG);
    assert_eq!(nodes_of(&cluster, &all).len(), 0);
    let words = waiting(&cluster, "m0");
    assert!(words.contains("what pods of its gang require of other pods"), "{words}");
    // What was only tried has left nothing behind.
    share(&mut cluster, "free", &both(&app("x"), &apart(HOST, "web")));
    cluster.settle(LONG);
    assert!(node_of(&cluster, "free").is_some());
    cluster.check();
}

#[test]
fn who_asks_is_told_of_the_pods_that_are_in_the_way() {
    let mut cluster = cluster(&["a", "b"], 1);
    other(&mut cluster, "web", "node-a0", &app("web"));
    other(&mut cluster, "shy", "node-b0", &apart(HOST, "late"));
    let mut pod = both(&app("late"), &apart(ZONE, "web"));
    share(&mut cluster, "apart", &pod);
    pod = both(&app("x"), &near(ZONE, "nobody"));
    share(&mut cluster, "near", &pod);
    other(&mut cluster, "first", "node-a0", &app("s"));
    other(&mut cluster, "second", "node-a0", &app("s"));
    share(
        &mut cluster,
        "spread",
        &both(
            &app("s"),
            &both(
                &spread(ZONE, "s"),
                &json!({"spec": {"nodeSelector": {ZONE: "a"},
        "topologySpreadConstraints": [{"topologyKey": ZONE, "maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule",
            "nodeAffinityPolicy": "Ignore", "labelSelector": {"matchLabels": {"app": "s"}}}]}}),
            ),
        ),
    );
    cluster.settle(LONG);
    let told = |cluster: &mut Cluster, name: &str| {
        let (mut core, listing) = super::explain::listed(cluster);
        let claim = Subject::Claim(core.view.claim_named("ml", name).unwrap().key);
        let now = jiff::Timestamp::UNIX_EPOCH + jiff::SignedDuration::from_hours(24);
        let told = explain(&mut core, &listing, &[claim], now).remove(0);
        let Answer::Waits { nodes, .. } = told.answer else { panic!("{name}: {told:?}") };
        nodes.iter().map(|(node, why)| format!("{node} {}: {why}", why.kind().as_str())).collect::<Vec<_>>()
    };
    assert_eq!(
        told(&mut cluster, "apart"),
        [
            "node-a0 pod-anti-affinity: is in topology.kubernetes.io/zone=a, where 1 pod matches the pod's required \
             anti-affinity",
            "node-b0 pod-anti-affinity: is in kubernetes.io/hostname=node-b0, where 1 pod has required anti-affinity to \
             the pod"
        ]
    );
    let near = told(&mut cluster, "near");
    let none = "pod-affinity: is in topology.kubernetes.io/zone=a, where no pod runs that matches the pod's required affinity";
    assert_eq!(near[0], format!("node-a0 {none}"));
    assert_eq!(
        told(&mut cluster, "spread")[0],
        "node-a0 topology-spread: is in topology.kubernetes.io/zone=a, which has 2 of the pods that \
         topologySpreadConstraints count; where fewest are bound are 0, and maxSkew is 1"
    );
}

/// Whatever happens between two looks, what is kept up with it equals what is counted anew.
#[test]
fn what_is_counted_along_equals_what_is_counted_anew() {
    let mut cluster = cluster(&["a", "b", "c"], 4);
    cluster.settle(SECOND);
    let view = &cluster.core.view;
    let labels = |text: &str| -> Arc<PodLabels> { Arc::new([("app", text)].into_iter().collect()) };
    let terms = |pod: &Value| {
        let spec = both(pod, &json!({"spec": {"containers": []}}))["spec"].clone();
        Arc::new(Terms::of(&object(spec), "ml", &labels("web")).unwrap())
    };
    let own = [
        apart(HOST, "web"),
        near(ZONE, "db"),
        spread(ZONE, "web"),
        both(&near(ZONE, "web"), &apart(ZONE, "db")),
    ];
    let own: Vec<Arc<Terms>> = own.iter().map(terms).collect();
    let shy = [terms(&apart(HOST, "web")), terms(&apart(ZONE, "db"))];
    let demands = Arc::new(Demands::of(&Default::default()));
    let mut rng = fastrand::Rng::with_seed(7);
    let mut kept = Neighbours::default();
    kept.wake(std::iter::empty());
    let mut all = BTreeMap::<PodUid, (&str, Neighbour, Option<Arc<Terms>>)>::new();
    for turn in 0..300 {
        // Now and then more than is remembered.
        let changes = if turn % 100 == 50 { 3000 } else { rng.usize(0..8) };
        for _ in 0..changes {
            let uid = PodUid::new(format!("p{}", rng.u8(0..40)));
            let namespace = if uid.as_str().ends_with('3') { "else" } else { "ml" };
            if rng.u8(0..4) == 0 {
                all.remove(&uid);
                kept.set(namespace, &uid, None, None);
                continue;
            }
            let place = Neighbour {
                node: NodeName::new(format!("node-{}{}", ["a", "b", "c"][rng.usize(0..3)], rng.u8(0..4))),
                labels: labels(["web", "db", "x"][rng.usize(0..3)]),
                is_bound: rng.bool(),
                is_ending: rng.u8(0..5) == 0,
            };
            let terms = (rng.u8(0..8) == 0).then(|| shy[rng.usize(0..2)].clone());
            kept.set(namespace, &uid, Some(place.clone()), terms.as_ref());
            all.insert(uid, (namespace, place, terms));
        }
        let mut anew = Neighbours::default();
        anew.wake(all.iter().map(|(uid, (namespace, place, _))| (*namespace, uid, place.clone())));
        for (uid, (namespace, place, terms)) in &all {
            anew.set(namespace, uid, Some(place.clone()), terms.as_ref());
        }
        for (own, app) in own.iter().flat_map(|own| [(own, "web"), (own, "db")]) {
            let labels = labels(app);
            let (terms, demands) = (Some(own), &demands);
            let asker = Asker { namespace: "ml", labels: &labels, terms, demands, together: false };
            let nodes = |of: &mut Neighbours| -> Vec<BTreeSet<NodeName>> {
                of.of(&asker, view).0.into_iter().map(|ruled| (*ruled.nodes).clone()).collect()
            };
            assert_eq!(nodes(&mut kept), nodes(&mut anew), "turn {turn}, {own:?}");
        }
    }
}

/// Each term of its own, in one namespace: they are paid for there, and cost nobody else.
#[test]
fn who_has_thousands_of_different_terms_stops_nobody_else() {
    let mut cluster = cluster(&["a", "b"], 4);
    cluster.core.purse.bound(400_000);
    let put = |cluster: &mut Cluster, namespace: &str, name: &str, of: &str, avoid: &str| {
        let mut terms: Vec<Value> = (0..10).map(|nth| term(ZONE, &format!("{avoid}-{nth}"))).collect();
        terms.push(term(HOST, of));
        share_in(cluster, namespace, name, &both(&app(of), &affinity("podAntiAffinity", json!(terms))));
    };
    for nth in 0..2_000 {
        let (name, app) = (format!("p{nth}"), format!("app-{}", nth % 3));
        put(&mut cluster, "evil", &name, &app, &format!("none-{nth}"));
    }
    put(&mut cluster, "victim", "small", "web", "nobody");
    cluster.deliver(usize::MAX);
    cluster.round();
    let planned = |cluster: &Cluster, namespace: &str| {
        let of = |claim: &_| cluster.core.view.claim(*claim).unwrap().namespace() == namespace;
        cluster.core.tracker.planned_claims().filter(of).count()
    };
    assert_eq!(planned(&cluster, "victim"), 1, "in the first round");
    let left = cluster.core.queue.left().count();
    assert!(left > 1_800, "{left} are left for later rounds");
    let spent = cluster.core.purse.spent_by("victim");
    assert!(spent < 20_000, "{spent} ticks");
    // Once all are known to wait, a second one has its place in the round in which it comes.
    cluster.settle(LONG);
    put(&mut cluster, "victim", "second", "web", "nobody");
    cluster.deliver(usize::MAX);
    cluster.round();
    cluster.settle(LONG);
    let claim = &cluster.claims[&("victim".to_owned(), "second".to_owned())];
    assert!(claim.status.as_ref().is_some_and(|status| status.allocation.is_some()));
    cluster.check();
}

/// Whom of one another they must be near is paid for before it is looked up.
#[test]
fn a_gang_of_many_with_different_terms_stops_nobody_else() {
    let mut cluster = cluster(&["a", "b"], 4);
    cluster.core.purse.bound(400_000);
    for nth in 0..100 {
        let name = format!("p{nth}");
        let terms: Vec<Value> = (0..16).map(|other| term(ZONE, &format!("none-{nth}-{other}"))).collect();
        let pod = both(&affinity("podAffinity", json!(terms)), &gang(100));
        share_in(&mut cluster, "evil", &name, &both(&app("web"), &pod));
    }
    share_in(&mut cluster, "victim", "small", &app("web"));
    cluster.deliver(usize::MAX);
    cluster.round();
    let of_victim = |claim: &_| cluster.core.view.claim(*claim).unwrap().namespace() == "victim";
    assert_eq!(cluster.core.tracker.planned_claims().filter(of_victim).count(), 1, "in the first round");
    // Each pod is compared with 1,600 terms of two entries.
    let spent = cluster.core.purse.spent_by("evil");
    assert!(spent >= 100 * 1_600 * 2 * 10, "{spent} ticks");
    cluster.settle(LONG);
    cluster.check();
}

/// Its name as a label.
fn label_node(cluster: &mut Cluster, name: &str) {
    let mut node = cluster.nodes[name].clone();
    node.metadata.labels = Some([(HOST.to_owned(), name.to_owned())].into());
    cluster.nodes.insert(name.to_owned(), node.clone());
    cluster.feed.push_back(Change::Node(WatchEvent::Stored(Box::new(node))));
}

#[test]
fn no_pod_moves_to_where_others_keep_it_off() {
    for is_kept_off in [false, true] {
        let mut cluster = super::moving::fragmented(Mode::Propose, ("ml", json!({})));
        ["a", "b"].into_iter().for_each(|node| label_node(&mut cluster, node));
        change(&mut cluster, "small", &app("small"));
        if is_kept_off {
            other(&mut cluster, "shy", "a", &apart(HOST, "small"));
        }
        cluster.settle(SECOND);
        super::moving::put(&mut cluster, "big", "75Gi", "rs-big", json!({}));
        cluster.settle(4 * LONG);
        let (notes, _) = cluster.core.recorder.take();
        let told = notes.iter().any(|note| note.message.contains("; evict small"));
        assert_eq!(told, !is_kept_off, "{notes:?}");
    }
}

#[test]
fn pods_end_where_those_that_stay_and_those_that_end_keep_nobody_off() {
    for (rule, ended) in [(json!({}), "low"), (apart(HOST, "web"), "higher")] {
        let mut cluster = preempting::cluster(&[1, 1]);
        ["node-0", "node-1"].into_iter().for_each(|node| label_node(&mut cluster, node));
        preempting::run(&mut cluster, "low", 80, 0, &app("web"));
        preempting::run(&mut cluster, "higher", 80, 1, &app("x"));
        preempting::ask(&mut cluster, "urgent", 40, 10, &both(&rule, &preempting::refused()));
        cluster.settle(SECOND);
        assert_eq!(preempting::evicted(&cluster), [ended]);
    }
}

#[test]
fn nobody_ends_for_pods_that_start_together_and_must_be_apart() {
    for (rule, ended) in [(json!({}), 1), (apart(HOST, "g"), 0), (spread(HOST, "g"), 0)] {
        let mut cluster = preempting::cluster(&[1]);
        label_node(&mut cluster, "node-0");
        preempting::run(&mut cluster, "low", 80, 0, &json!({}));
        let pod = both(&both(&app("g"), &rule), &both(&gang(2), &preempting::refused()));
        ["g0", "g1"].into_iter().for_each(|name| preempting::ask(&mut cluster, name, 30, 10, &pod));
        cluster.settle(LONG);
        assert_eq!(preempting::evicted(&cluster).len(), ended, "{rule}");
    }
}
