//! Pods whose volumes cannot be reached from everywhere.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::cluster::Cluster;
use super::scenes::{LONG, SECOND};
use crate::cluster::feed::{Change, WatchEvent};
use crate::controller::config::Rules;
use crate::controller::explain::{Answer, Subject, explain};

const ZONE: &str = "topology.kubernetes.io/zone";

fn in_zones(zones: &[&str]) -> Value {
    json!({"nodeSelectorTerms": [{"matchExpressions": [{"key": ZONE, "operator": "In", "values": zones}]}]})
}

/// Node `node-a` of zone a and so on, with one GPU each.
fn cluster(zones: &[&str]) -> Cluster {
    let mut cluster = Cluster::new(Rules::default());
    zones.iter().for_each(|zone| put_node(&mut cluster, &format!("node-{zone}"), zone));
    cluster
}

fn put_node(cluster: &mut Cluster, name: &str, zone: &str) {
    cluster.put_node(name, 1);
    let mut node = cluster.nodes[name].clone();
    node.metadata.labels = Some([(ZONE.to_owned(), zone.to_owned())].into());
    cluster.nodes.insert(name.to_owned(), node.clone());
    cluster.feed.push_back(Change::Node(WatchEvent::Stored(Box::new(node))));
}

/// A pod with a share of its own name, and these volumes.
fn notebook(cluster: &mut Cluster, name: &str, volumes: Value) {
    cluster.put_share(name, json!({"memory": "4Gi"}), 1);
    cluster.put_pod(name, &[name], json!({"spec": {"volumes": volumes}}));
}

fn of_claim(claim: &str) -> Value {
    json!([{"name": "home", "persistentVolumeClaim": {"claimName": claim}}])
}

fn node_of(cluster: &Cluster, name: &str) -> Option<String> {
    cluster.place(name).map(|(node, _)| node)
}

/// How often the scheduler has refused a node.
fn refused(cluster: &mut Cluster) -> usize {
    let (notes, _) = cluster.core.recorder.take();
    notes.iter().filter(|note| note.reason == "GpuShareMoved").count()
}

#[test]
fn a_pod_goes_to_the_zone_of_its_bound_volume() {
    let mut cluster = cluster(&["a", "b", "c"]);
    cluster.put_volume("pv-0", "home", "Bound", in_zones(&["c"]));
    cluster.put_volume("pv-1", "ephemeral-scratch", "Bound", in_zones(&["b"]));
    notebook(&mut cluster, "by-claim", of_claim("home"));
    notebook(&mut cluster, "ephemeral", json!([{"name": "scratch", "ephemeral": {}}]));
    notebook(&mut cluster, "free", json!([{"name": "empty", "emptyDir": {}}]));
    cluster.settle(LONG);
    assert_eq!(node_of(&cluster, "by-claim").as_deref(), Some("node-c"));
    assert_eq!(node_of(&cluster, "ephemeral").as_deref(), Some("node-b"));
    assert!(node_of(&cluster, "free").is_some());
    assert_eq!(refused(&mut cluster), 0);
    cluster.check();
}

/// A volume of one namespace's claim says nothing of another's, nor does one that is bound to no claim any more.
#[test]
fn volumes_of_others_and_of_the_past_demand_nothing() {
    let mut cluster = cluster(&["a"]);
    cluster.put_volume("pv-0", "home", "Released", in_zones(&["b"]));
    cluster.put_volume("pv-1", "other", "Bound", in_zones(&["b"]));
    let mut foreign = cluster.volumes["pv-1"].clone();
    let claim = foreign.spec.get_or_insert_default().claim_ref.get_or_insert_default();
    (claim.namespace, claim.name) = (Some("else".to_owned()), Some("home".to_owned()));
    cluster.volumes.insert("pv-1".to_owned(), foreign);
    cluster.relist();
    notebook(&mut cluster, "notebook", of_claim("home"));
    cluster.settle(LONG);
    assert_eq!(node_of(&cluster, "notebook").as_deref(), Some("node-a"));
    // Of two that say they are this claim's nobody knows which one is.
    cluster.put_volume("pv-2", "twice", "Bound", in_zones(&["b"]));
    cluster.put_volume("pv-3", "twice", "Bound", in_zones(&["c"]));
    notebook(&mut cluster, "twice", of_claim("twice"));
    cluster.settle(LONG);
    assert_eq!(node_of(&cluster, "twice").as_deref(), Some("node-a"));
}

#[test]
fn a_pod_waits_for_a_node_that_reaches_its_volume_and_is_told_of_it() {
    let mut cluster = cluster(&["a"]);
    cluster.put_volume("pv-0", "home", "Bound", in_zones(&["b"]));
    notebook(&mut cluster, "notebook", of_claim("home"));
    cluster.settle(LONG);
    assert_eq!(node_of(&cluster, "notebook"), None);
    let words = cluster.claim("notebook").metadata.annotations.clone().unwrap_or_default();
    let words = words.get("tranche.dev/waiting").cloned().unwrap_or_default();
    let why = "node node-a cannot reach the volume of the PersistentVolumeClaim home: \
               topology.kubernetes.io/zone In [b] fails: it is \"a\"";
    assert!(words.contains(why), "{words}");
    // The volume is made anew elsewhere.
    cluster.drop_volume("pv-0");
    cluster.settle(LONG);
    assert_eq!(node_of(&cluster, "notebook").as_deref(), Some("node-a"));
    cluster.check();
}

/// Also who asks about a pod that the controller does not place.
#[test]
fn who_asks_is_told_of_the_volume() {
    let mut cluster = cluster(&["a"]);
    cluster.put_volume("pv-0", "home", "Bound", in_zones(&["b"]));
    notebook(&mut cluster, "notebook", of_claim("home"));
    cluster.put_claim(json!({"metadata": {"name": "whole", "namespace": "ml"}, "spec": {"devices": {
        "requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu.nvidia.com", "count": 1}}]}}}));
    cluster.put_pod("whole", &["whole"], json!({"spec": {"volumes": of_claim("home")}}));
    cluster.settle(LONG);
    for name in ["notebook", "whole"] {
        let (mut core, listing) = super::explain::listed(&mut cluster);
        let claim = Subject::Claim(core.view.claim_named("ml", name).unwrap().key);
        let now = jiff::Timestamp::UNIX_EPOCH + jiff::SignedDuration::from_hours(24);
        let told = explain(&mut core, &listing, &[claim], now).remove(0);
        let Answer::Waits { nodes, .. } = told.answer else { panic!("{name}: {told:?}") };
        let words: Vec<String> = nodes.iter().map(|(node, verdict)| format!("{node} {verdict}")).collect();
        let why = "node-a cannot reach the volume of the PersistentVolumeClaim home: \
                   topology.kubernetes.io/zone In [b] fails: it is \"a\"";
        assert_eq!(words, [why], "{name}");
        assert_eq!(nodes[0].1.kind().as_str(), "volume");
    }
}

/// The claim is bound while its pod waits: also what is kept of pods with equal demands is another then.
#[test]
fn a_volume_that_is_bound_later_counts_from_then_on() {
    let mut cluster = cluster(&["a", "b"]);
    for zone in ["a", "b"] {
        let name = format!("large-{zone}");
        cluster.put_share(&name, json!({"memory": "79Gi"}), 1);
        cluster.put_pod(&name, &[&name], json!({}));
    }
    cluster.settle(LONG);
    let mut waiting = |name: &str, claim: &str| {
        cluster.put_share(name, json!({"memory": "79Gi"}), 1);
        cluster.put_pod(name, &[name], json!({"spec": {"volumes": of_claim(claim)}}));
    };
    waiting("first", "one");
    waiting("second", "two");
    cluster.settle(LONG);
    assert_eq!((node_of(&cluster, "first"), node_of(&cluster, "second")), (None, None));
    cluster.put_volume("pv-1", "one", "Bound", in_zones(&["b"]));
    cluster.put_volume("pv-2", "two", "Bound", in_zones(&["a"]));
    cluster.settle(LONG);
    for zone in ["a", "b"] {
        cluster.drop_pod(&format!("large-{zone}"), true);
    }
    cluster.settle(LONG);
    assert_eq!(node_of(&cluster, "first").as_deref(), Some("node-b"));
    assert_eq!(node_of(&cluster, "second").as_deref(), Some("node-a"));
    assert_eq!(refused(&mut cluster), 0);
    // What the volume demands can be changed, too.
    cluster.put_volume("pv-3", "three", "Bound", in_zones(&["nowhere"]));
    notebook(&mut cluster, "third", of_claim("three"));
    cluster.settle(LONG);
    assert_eq!(node_of(&cluster, "third"), None);
    cluster.drop_pod("first", true);
    cluster.put_volume("pv-3", "three", "Bound", in_zones(&["b", "c"]));
    cluster.settle(LONG);
    assert_eq!(node_of(&cluster, "third").as_deref(), Some("node-b"));
    cluster.check();
}

#[test]
fn who_may_not_see_volumes_places_as_if_there_were_none() {
    let mut cluster = cluster(&["a", "b"]);
    cluster.feed.retain(|change| !matches!(change, Change::Volume(_)));
    let forbidden = WatchEvent::Interrupted { problem: "forbidden".to_owned(), is_forbidden: true };
    // As the feed tells it.
    for seen in [WatchEvent::Anew, WatchEvent::Complete, forbidden] {
        cluster.feed.push_back(Change::Volume(seen));
    }
    notebook(&mut cluster, "notebook", of_claim("home"));
    cluster.settle(LONG);
    assert!(node_of(&cluster, "notebook").is_some());
}

#[test]
fn demands_of_volumes_are_held_to_limits_and_told() {
    let mut cluster = cluster(&["a"]);
    let names: Vec<String> = (0..400).map(|nth| format!("zone-{nth}")).collect();
    let many: Vec<&str> = names.iter().map(String::as_str).collect();
    cluster.put_volume("pv-0", "home", "Bound", in_zones(&many));
    notebook(&mut cluster, "notebook", of_claim("home"));
    // Each has what a volume may, and six have more than a pod may.
    for nth in 0..6 {
        let claim = format!("c{nth}");
        cluster.put_volume(&format!("pv-c{nth}"), &claim, "Bound", in_zones(&many[nth..nth + 190]));
    }
    let volumes: Vec<Value> = (0..6)
        .map(|nth| json!({"name": "v", "persistentVolumeClaim": {"claimName": format!("c{nth}")}}))
        .collect();
    notebook(&mut cluster, "many", json!(volumes));
    cluster.settle(LONG);
    assert_eq!(node_of(&cluster, "notebook").as_deref(), Some("node-a"), "as if it had none");
    assert_eq!(node_of(&cluster, "many"), None);
    let troubles = cluster.core.recorder.take().1;
    let told = |words: &str| troubles.iter().filter(|one| one.contains(words)).count();
    assert_eq!(told("PersistentVolume pv-0: its node affinity has"), 1, "{troubles:?}");
    assert_eq!(told("pod ml/many: 2 of its volumes"), 1, "{troubles:?}");
}

/// What nobody reads, such as a volume that is not bound yet, often keeps a pod off all nodes of a zone.
#[test]
fn after_a_refusal_other_zones_are_tried_first_and_in_the_end_every_node() {
    for (taken, tries) in [("node-c0", 2), ("node-c2", 8)] {
        let mut cluster = Cluster::new(Rules::default());
        for zone in ["a", "b", "c"] {
            (0..3).for_each(|nth| put_node(&mut cluster, &format!("node-{zone}{nth}"), zone));
        }
        notebook(&mut cluster, "notebook", json!([]));
        let mut refused = Vec::new();
        for _ in 0..30 {
            cluster.settle(4 * SECOND);
            let Some(node) = node_of(&cluster, "notebook") else { continue };
            // Of the first the whole zone takes it.
            if node == taken || (taken == "node-c0" && node.starts_with("node-c")) {
                break;
            }
            refused.push(node);
            let mut claim = cluster.claim("notebook").clone();
            claim.status.get_or_insert_default().allocation = None;
            cluster.store(claim);
        }
        let place = node_of(&cluster, "notebook").unwrap_or_default();
        assert!(place.starts_with("node-c"), "{place:?} after {refused:?}");
        let mut once = refused.clone();
        once.sort();
        once.dedup();
        assert_eq!(once.len(), refused.len(), "{refused:?}");
        assert!(refused.len() <= tries, "{refused:?}");
        let zones = |nodes: &[String]| nodes.iter().map(|node| node[..6].to_owned()).collect::<BTreeSet<_>>();
        let first = refused.len().min(3);
        assert_eq!(zones(&refused[..first]).len(), first, "{refused:?}");
    }
}

/// kube-scheduler clears the allocation: its pod cannot be on that node.
fn refuse(cluster: &mut Cluster, name: &str) -> String {
    let node = node_of(cluster, name).unwrap_or_else(|| panic!("{name} has no place"));
    let mut claim = cluster.claim(name).clone();
    claim.status.get_or_insert_default().allocation = None;
    cluster.store(claim);
    node
}

/// Pods of one ReplicaSet are of one template: what one of them has met spares the others the tries.
#[test]
fn what_refused_a_pod_is_left_for_last_for_its_siblings_too() {
    let mut cluster = Cluster::new(Rules::default());
    (0..4).for_each(|nth| put_node(&mut cluster, &format!("node-a{nth}"), "a"));
    (0..2).for_each(|nth| put_node(&mut cluster, &format!("node-b{nth}"), "b"));
    let put = |cluster: &mut Cluster, name: &str, set: &str| {
        super::moving::put(cluster, name, "30Gi", set, json!({"spec": {"volumes": of_claim(name)}}));
        cluster.settle(4 * SECOND);
        node_of(cluster, name)
    };
    // The first is refused by a node of zone a, and goes to zone b. Two fit on a GPU.
    let first = put(&mut cluster, "web-0", "web").expect("there is room");
    assert!(first.starts_with("node-a"), "{first}");
    assert_eq!(refuse(&mut cluster, "web-0"), first);
    cluster.settle(4 * SECOND);
    let of_zone = |node: &str| node[..6].to_owned();
    assert_eq!(node_of(&cluster, "web-0").as_deref().map(of_zone).as_deref(), Some("node-b"));
    let others: Vec<String> =
        (1..10).map(|nth| put(&mut cluster, &format!("web-{nth}"), "web").expect("there is room")).collect();
    // Zone b, then the zone of who refused, and who refused last of all.
    assert!(others[..3].iter().all(|node| of_zone(node) == "node-b"), "{others:?}");
    assert!(others[3..].iter().all(|node| of_zone(node) == "node-a" && *node != first), "{others:?}");
    assert_eq!(put(&mut cluster, "web-10", "web"), Some(first.clone()));
    // What others of the namespace met says nothing of this one.
    assert_eq!(put(&mut cluster, "other-0", "other"), Some(first));
    cluster.check();
}

/// A pod that only one node takes is there after a try in each of the other zones, whatever others of its owner met there.
#[test]
fn what_siblings_met_costs_nobody_more_tries() {
    let mut cluster = Cluster::new(Rules::default());
    put_node(&mut cluster, "node-a0", "a");
    for zone in ["b", "c"] {
        (0..4).for_each(|nth| put_node(&mut cluster, &format!("node-{zone}{nth}"), zone));
    }
    let put = |cluster: &mut Cluster, name: &str| {
        super::moving::put(cluster, name, "10Gi", "web", json!({}));
        cluster.settle(4 * SECOND);
    };
    put(&mut cluster, "web-0");
    assert_eq!(refuse(&mut cluster, "web-0"), "node-a0");
    put(&mut cluster, "web-1");
    let mut refused = Vec::new();
    for _ in 0..30 {
        cluster.settle(4 * SECOND);
        match node_of(&cluster, "web-1") {
            Some(node) if node == "node-a0" => break,
            Some(_) => refused.push(refuse(&mut cluster, "web-1")),
            None => {}
        }
    }
    assert_eq!(node_of(&cluster, "web-1").as_deref(), Some("node-a0"), "{refused:?}");
    assert_eq!(refused.iter().map(|node| &node[..6]).collect::<Vec<_>>(), ["node-b", "node-c"]);
    cluster.check();
}

/// Of a gang that may start with fewer no fewer start, and none waits for room beside them that there is elsewhere.
#[test]
fn what_siblings_met_keeps_no_gang_from_where_it_fits() {
    let mut cluster = cluster(&["a", "b"]);
    super::moving::put(&mut cluster, "web-0", "10Gi", "web", json!({}));
    cluster.settle(4 * SECOND);
    let first = refuse(&mut cluster, "web-0");
    cluster.settle(4 * SECOND);
    let term = json!([{"topologyKey": ZONE, "labelSelector": {"matchLabels": {"app": "web"}}}]);
    let member = json!({"metadata": {"labels": {"app": "web"},
            "annotations": {"tranche.dev/gang": "g", "tranche.dev/gang-size": "2"}},
        "spec": {"affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": term}}}});
    let names = ["m0", "m1", "m2", "m3"];
    for name in names {
        super::moving::put(&mut cluster, name, "20Gi", "web", member.clone());
    }
    cluster.settle(LONG);
    let nodes = names.map(|name| node_of(&cluster, name));
    assert_eq!(nodes, [(); 4].map(|()| Some(first.clone())), "the other has room for three");
    cluster.check();
}

/// It is forgotten after a while.
#[test]
fn what_siblings_met_is_forgotten() {
    let mut cluster = Cluster::new(Rules::default());
    (0..2).for_each(|nth| put_node(&mut cluster, &format!("node-a{nth}"), "a"));
    let put = |cluster: &mut Cluster, name: &str| {
        super::moving::put(cluster, name, "30Gi", "web", json!({}));
        cluster.settle(4 * SECOND);
        node_of(cluster, name)
    };
    let first = put(&mut cluster, "web-0").expect("there is room");
    refuse(&mut cluster, "web-0");
    cluster.drop_pod("web-0", true);
    cluster.settle(660 * SECOND);
    assert_eq!(put(&mut cluster, "web-1"), Some(first));
}
