//! What pods take of their nodes: of a gang's pods it is counted while the others are placed, and of other resources
//! than CPU and memory what the node has in all.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Value, json};

use super::cluster::{Cluster, object};
use super::scenes;
use crate::cluster::feed::{Change, WatchEvent};
use crate::controller::config::Rules;

const WAIT: Duration = Duration::from_secs(5);

/// Nodes with two GPUs each and so much room.
fn cluster(nodes: &[(&str, Value)]) -> Cluster {
    let mut cluster = Cluster::new(Rules::default());
    for (name, room) in nodes {
        cluster.put_node(name, 2);
        set_room(&mut cluster, name, room);
    }
    cluster.settle(WAIT);
    cluster
}

fn set_room(cluster: &mut Cluster, node: &str, room: &Value) {
    let known = cluster.nodes.get_mut(node).unwrap();
    known.status = Some(object(json!({"allocatable": room})));
    let known = known.clone();
    cluster.feed.push_back(Change::Node(WatchEvent::Stored(Box::new(known))));
}

/// Pods that want so many GPUs and a CPU each.
fn gang(cluster: &mut Cluster, names: &[&str], gpus: u32) {
    let size = names.len().to_string();
    let more = json!({"metadata": {"annotations": {"tranche.dev/gang": names[0], "tranche.dev/gang-size": size}},
        "spec": {"containers": [{"name": "main", "resources": {"requests": {"cpu": "1", "memory": "1Gi"}}}]}});
    for name in names {
        cluster.put_share(name, json!({"memory": "1Gi"}), gpus);
        cluster.put_pod(name, &[name], more.clone());
    }
    cluster.settle(WAIT);
    cluster.check();
}

fn places(cluster: &Cluster, names: &[&str]) -> Vec<Option<String>> {
    names.iter().map(|name| Some(cluster.place(name)?.0)).collect()
}

/// None of them has a place, nothing of it is kept, and the words say so much.
fn assert_refused(cluster: &mut Cluster, names: &[&str], words: &[&str]) {
    assert_eq!(places(cluster, names), vec![None; names.len()]);
    let (notes, _) = cluster.core.recorder.take();
    let said = |words: &&&str| notes.iter().any(|note| note.message.contains(**words));
    assert_eq!(words.iter().find(|words| !said(words)), None, "{notes:?}");
    for node in cluster.core.capacity.index.nodes() {
        let left = cluster.core.capacity.left(node.name());
        assert_eq!(node.cpu_milli(), (left.cpu_milli, left.cpu_milli));
        assert_eq!(node.memory(), (left.memory, left.memory));
        assert_eq!(node.pods(), (left.pods, left.pods));
    }
}

const TOGETHER: &str = "the gang's 2 pods do not fit together: beside 1 of them";
const CROWDED: &str = "1 node at the pod limit";

fn room(cpu: &str, pods: &str) -> Value {
    json!({"cpu": cpu, "memory": "256Gi", "pods": pods})
}

#[test]
fn a_gang_does_not_take_one_place_among_the_pods_twice() {
    for gpus in [1, 2] {
        // Where each wants two, the node has four: GPUs are not what is short.
        let mut cluster = cluster(&[("a", room("32", "1")), ("b", room("500m", "110"))]);
        let devices = (0..4).map(|minor| super::cluster::device("a", minor, true)).collect();
        cluster.put_slice("a", devices);
        let names = ["x", "y"];
        gang(&mut cluster, &names, gpus);
        assert_refused(&mut cluster, &names, &[TOGETHER, CROWDED]);
        set_room(&mut cluster, "a", &room("32", "2"));
        cluster.settle(WAIT);
        assert_eq!(places(&cluster, &names), [Some("a".to_owned()), Some("a".to_owned())], "{gpus} GPUs");
        cluster.check();
    }
}

#[test]
fn a_gang_with_several_gpus_each_does_not_take_the_same_cpu_or_memory_twice() {
    let less = json!({"cpu": "32", "memory": "1500Mi", "pods": "110"});
    for (scarce, words) in
        [(room("1500m", "110"), "without 1000m CPU"), (less, "without 1024 MiB of memory (most left is 476")]
    {
        let mut cluster = cluster(&[("a", scarce)]);
        let devices = (0..4).map(|minor| super::cluster::device("a", minor, true)).collect();
        cluster.put_slice("a", devices);
        let names = ["x", "y"];
        gang(&mut cluster, &names, 2);
        assert_refused(&mut cluster, &names, &[TOGETHER, words]);
        // One of them alone would fit, and so do both where the other has a node of its own.
        cluster.put_node("b", 2);
        cluster.settle(WAIT);
        let mut found = places(&cluster, &names);
        found.sort();
        assert_eq!(found, [Some("a".to_owned()), Some("b".to_owned())]);
        cluster.check();
    }
}

#[test]
fn a_pod_that_is_counted_on_its_node_finds_its_other_claims_there() {
    let mut cluster = cluster(&[("a", room("32", "2")), ("b", room("32", "110"))]);
    cluster.put_share("shared", json!({"memory": "1Gi"}), 1);
    cluster.put_pod("first", &["shared"], json!({}));
    cluster.settle(WAIT);
    let (node, _) = cluster.place("shared").unwrap();
    assert_eq!(node, "a");
    // It takes the last place as soon as it names the claim that is there.
    cluster.put_share("own", json!({"memory": "1Gi"}), 1);
    cluster.put_pod("second", &["shared", "own"], json!({}));
    cluster.settle(WAIT);
    assert_eq!(places(&cluster, &["own"]), [Some("a".to_owned())]);
    assert_eq!(cluster.core.capacity.left(&"a".into()).pods, 0);
    cluster.check();
}

/// A node has room, and so many of a resource that a device plugin offers.
fn offers(cluster: &mut Cluster, node: &str, resource: &str, count: u32) {
    let room = json!({"cpu": "32", "memory": "256Gi", "pods": "110", resource: count.to_string()});
    set_room(cluster, node, &room);
}

/// Forty nodes, of which the last has what the pod needs beside its share.
#[test]
fn a_pod_goes_at_once_where_the_other_resources_that_it_asks_for_are() {
    let mut cluster = scenes::cluster(40, 1);
    let asks = |count: u32| {
        json!({"spec": {"containers": [{"name": "main", "resources":
            {"requests": {"rdma/hca": count.to_string()}, "limits": {"rdma/hca": count.to_string()}}}]}})
    };
    cluster.put_share("a", json!({"memory": "10Gi"}), 1);
    cluster.put_pod("a", &["a"], asks(2));
    cluster.settle(scenes::LONG);
    assert_eq!(cluster.place("a"), None);
    let waiting = cluster.claim("a").metadata.annotations.clone().unwrap_or_default();
    assert!(waiting["tranche.dev/waiting"].contains("has 0 of rdma/hca, 2 are needed"), "{waiting:?}");
    // One is too few; its plugin comes to it later.
    offers(&mut cluster, "node-11", "rdma/hca", 1);
    cluster.settle(scenes::LONG);
    assert_eq!(cluster.place("a"), None);
    offers(&mut cluster, "node-39", "rdma/hca", 2);
    cluster.settle(scenes::SECOND);
    assert_eq!(cluster.place("a").map(|(node, _)| node), Some("node-39".to_owned()));
    cluster.check();
}

/// Devices that a DeviceClass gives by that name are nothing that a node says it has (KEP-5004).
#[test]
fn a_resource_that_is_given_by_claims_keeps_no_pod_off_a_node() {
    let mut cluster = scenes::cluster(1, 2);
    cluster.put_share("a", json!({"memory": "10Gi"}), 1);
    let by_name = |resource: &str| {
        json!({"spec": {"containers": [{"name": "main",
            "resources": {"requests": {resource: "1"}, "limits": {resource: "1"}}}]}})
    };
    cluster.put_pod("a", &["a"], by_name("nvidia.com/gpu"));
    cluster.settle(scenes::LONG);
    assert!(cluster.place("a").is_some());
    // A class that comes later gives another by its name.
    cluster.put_share("b", json!({"memory": "10Gi"}), 1);
    cluster.put_pod("b", &["b"], by_name("example.com/nic"));
    cluster.settle(scenes::LONG);
    assert_eq!(cluster.place("b"), None);
    cluster.put_class("nic.example.com", json!({}), json!({"extendedResourceName": "example.com/nic"}));
    cluster.settle(scenes::LONG);
    assert!(cluster.place("b").is_some());
}

/// What kube-scheduler alone looks at, such as a volume of one node, is met by the last of forty. Each node is tried
/// once, four seconds after the other, and the pod hears of that once a minute.
#[test]
fn no_node_that_refused_a_pod_is_tried_again_before_all_others_were() {
    let names: Vec<String> = (0..40).map(|nth| format!("node-{nth}")).collect();
    let room = json!({"cpu": "8", "memory": "64Gi", "pods": "110"});
    let mut cluster = cluster(&names.iter().map(|name| (name.as_str(), room.clone())).collect::<Vec<_>>());
    cluster.put_share("a", json!({"memory": "1Gi"}), 1);
    cluster.put_pod("a", &["a"], json!({}));
    let (mut tried, mut told, begin) = (Vec::new(), BTreeMap::<&str, usize>::new(), cluster.now);
    for _ in 0..60 {
        cluster.settle(Duration::from_secs(4));
        let Some((node, _)) = cluster.place("a") else { continue };
        if node == names[39] {
            break;
        }
        tried.push(node);
        let mut claim = cluster.claim("a").clone();
        claim.status.get_or_insert_default().allocation = None;
        cluster.store(claim);
        let (notes, _) = cluster.core.recorder.take();
        notes.iter().for_each(|note| *told.entry(note.reason).or_default() += 1);
    }
    assert_eq!(cluster.place("a").map(|(node, _)| node), Some(names[39].clone()), "{tried:?}");
    let mut once = tried.clone();
    once.sort();
    once.dedup();
    assert_eq!(once.len(), tried.len(), "{tried:?}");
    let minutes = (cluster.now - begin).as_secs() as usize / 60 + 1;
    assert_eq!(told.keys().collect::<Vec<_>>(), [&"GpuShareMoved", &"GpuSharePlaced"]);
    assert!(told.values().all(|count| *count <= minutes), "{told:?} while {} nodes were tried", tried.len());
    // It stays there, and hears of that.
    cluster.settle(Duration::from_secs(30));
    let (notes, _) = cluster.core.recorder.take();
    let last = notes.iter().rfind(|note| note.reason == "GpuSharePlaced").expect("it is told of its place");
    assert!(last.message.ends_with("on node node-39"), "{}", last.message);
    // That one refuses the pod, too: those before it come again, each after its time.
    let mut claim = cluster.claim("a").clone();
    claim.status.get_or_insert_default().allocation = None;
    cluster.store(claim);
    cluster.settle(Duration::from_secs(4));
    assert!(cluster.place("a").is_some_and(|(node, _)| node != names[39]), "{:?}", cluster.place("a"));
}
