//! Pods whose volumes cannot be reached from everywhere.

use serde_json::{Value, json};

use super::cluster::Cluster;
use super::scenes::LONG;
use crate::cluster::feed::{Change, WatchEvent};
use crate::controller::config::Rules;
use crate::controller::explain::{Answer, Subject, explain};

pub(super) const ZONE: &str = "topology.kubernetes.io/zone";

fn in_zones(zones: &[&str]) -> Value {
    json!({"nodeSelectorTerms": [{"matchExpressions": [{"key": ZONE, "operator": "In", "values": zones}]}]})
}

/// Node `node-a` of zone a and so on, with one GPU each.
pub(super) fn cluster(zones: &[&str]) -> Cluster {
    let mut cluster = Cluster::new(Rules::default());
    zones.iter().for_each(|zone| put_node(&mut cluster, &format!("node-{zone}"), zone));
    cluster
}

pub(super) fn put_node(cluster: &mut Cluster, name: &str, zone: &str) {
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

pub(super) fn node_of(cluster: &Cluster, name: &str) -> Option<String> {
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
