//! Pods that a node has refused, and others of their owner.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::cluster::{Cluster, device, merge};
use super::scenes::{LONG, SECOND};
use super::volumes::{ZONE, cluster, node_of, put_node};
use crate::controller::config::Rules;
use crate::model::names::MAX_SHARE_MEMORY;

/// What nobody reads, such as a volume that is not bound yet, often keeps a pod off all nodes of a zone.
#[test]
fn after_a_refusal_other_zones_are_tried_first_and_in_the_end_every_node() {
    for (taken, tries) in [("node-c0", 2), ("node-c2", 8)] {
        let mut cluster = Cluster::new(Rules::default());
        for zone in ["a", "b", "c"] {
            (0..3).for_each(|nth| put_node(&mut cluster, &format!("node-{zone}{nth}"), zone));
        }
        cluster.put_share("notebook", json!({"memory": "4Gi"}), 1);
        cluster.put_pod("notebook", &["notebook"], json!({}));
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
        super::moving::put(
            cluster,
            name,
            "30Gi",
            set,
            json!({"spec": {"volumes": json!([{"name": "home", "persistentVolumeClaim": {"claimName": name}}])}}),
        );
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

/// To keep each of its pods off the zone costs more than there is in a round.
#[test]
fn a_large_gang_that_was_refused_is_placed_again() {
    let mut cluster = Cluster::new(Rules::default());
    (0..40).for_each(|nth| put_node(&mut cluster, &format!("node-{nth}"), "a"));
    let names: Vec<String> = (0..20).map(|nth| format!("m{nth}")).collect();
    let member =
        json!({"metadata": {"annotations": {"tranche.dev/gang": "g", "tranche.dev/gang-size": "20"}}});
    for name in &names {
        super::moving::put(&mut cluster, name, "50Gi", "job", member.clone());
    }
    cluster.settle(LONG);
    for name in &names {
        refuse(&mut cluster, name);
    }
    cluster.core.purse.bound(20_000);
    cluster.settle(15 * LONG);
    let words = cluster.claim("m0").metadata.annotations.clone();
    assert!(names.iter().all(|name| node_of(&cluster, name).is_some()), "{words:?}");
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

/// What one pod meets keeps the others off, also where the zone is one and the pod itself has nowhere else to go.
#[test]
fn what_refused_a_pod_is_left_for_last_where_all_nodes_are_of_one_zone() {
    let mut cluster = Cluster::new(Rules::default());
    (0..4).for_each(|nth| put_node(&mut cluster, &format!("node-a{nth}"), "a"));
    replica(&mut cluster, "web-0", json!({"memory": "50Gi"}));
    let first = refuse(&mut cluster, "web-0");
    cluster.settle(4 * SECOND);
    let mut nodes = BTreeSet::new();
    for name in ["web-0", "web-1", "web-2"] {
        if name != "web-0" {
            replica(&mut cluster, name, json!({"memory": "50Gi"}));
        }
        nodes.insert(node_of(&cluster, name).expect("there is room"));
    }
    assert!(nodes.len() == 3 && !nodes.contains(&first), "{nodes:?}, not {first}");
    // One that needs more than there is anywhere takes nothing from what the others know.
    replica(&mut cluster, "huge", json!({"memory": "500Gi"}));
    cluster.drop_pod("web-2", true);
    cluster.settle(4 * SECOND);
    replica(&mut cluster, "web-3", json!({"memory": "50Gi"}));
    assert!(node_of(&cluster, "web-3").is_some_and(|node| node != first));
    replica(&mut cluster, "web-4", json!({"memory": "50Gi"}));
    assert_eq!(node_of(&cluster, "web-4"), Some(first));
    cluster.check();
}

/// Of alternatives the best that fits anywhere is taken, whatever others have met there.
#[test]
fn what_siblings_met_takes_no_better_alternative_from_others() {
    let mut cluster = Cluster::new(Rules::default());
    for (name, zone) in [("node-a0", "a"), ("node-a1", "a"), ("node-b0", "b")] {
        put_node(&mut cluster, name, zone);
    }
    cluster.put_share("other", json!({"memory": "40Gi"}), 1);
    cluster.put_pod("other", &["other"], json!({"spec": {"nodeName": "node-b0"}}));
    cluster.settle(LONG);
    let put = |cluster: &mut Cluster, name: &str| {
        cluster.put_alternatives("ml", name, &["60Gi", "20Gi"]);
        cluster.put_pod(name, &[name], json!({"metadata": {"ownerReferences": [owner()]}}));
        cluster.settle(4 * SECOND);
    };
    put(&mut cluster, "web-0");
    assert!(refuse(&mut cluster, "web-0").starts_with("node-a"));
    cluster.settle(4 * SECOND);
    put(&mut cluster, "web-1");
    assert!(node_of(&cluster, "web-1").is_some_and(|node| node.starts_with("node-a")));
    cluster.check();
}

/// A scheduler that is away says nothing of a node.
#[test]
fn a_share_that_nobody_binds_in_time_says_nothing_to_siblings() {
    let mut cluster = Cluster::new(Rules::default());
    (0..4).for_each(|nth| put_node(&mut cluster, &format!("node-a{nth}"), "a"));
    replica(&mut cluster, "web-0", json!({"memory": "50Gi"}));
    let first = node_of(&cluster, "web-0").expect("there is room");
    cluster.settle(90 * SECOND);
    assert_ne!(node_of(&cluster, "web-0"), Some(first.clone()), "it was moved");
    assert!(cluster.core.queue.refusals.siblings.is_empty());
    cluster.check();
}

fn owner() -> Value {
    json!({"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web", "uid": "web", "controller": true})
}

/// A replica of ReplicaSet `web` with a share of its own name.
fn replica(cluster: &mut Cluster, name: &str, share: Value) {
    cluster.put_share(name, share, 1);
    cluster.put_pod(name, &[name], json!({"metadata": {"ownerReferences": [owner()]}}));
    cluster.settle(4 * SECOND);
}

/// Half of the GPU that is left for last is less than the namespace may have, half of any other is more.
#[test]
fn a_gpu_that_is_left_for_last_is_taken_where_only_that_is_within_the_bound() {
    let mut cluster = Cluster::new(Rules::default());
    put_node(&mut cluster, "node-a", "a");
    let mut small = device("node-b", 0, true);
    merge(
        &mut small,
        &json!({"attributes": {"grantableMemoryMiB": {"int": 20_480}},
        "capacity": {"memory": {"value": "20Gi"}}}),
    );
    put_node(&mut cluster, "node-b", "b");
    cluster.put_slice("node-b", vec![small]);
    cluster.annotate("ml", json!({MAX_SHARE_MEMORY: "30Gi"}));
    let half = json!({"fraction": "0.5"});
    replica(&mut cluster, "web-0", half.clone());
    assert_eq!(refuse(&mut cluster, "web-0"), "node-b");
    replica(&mut cluster, "web-1", half);
    assert_eq!(node_of(&cluster, "web-1").as_deref(), Some("node-b"));
    cluster.check();
}

/// Where the namespace has what it may have, no other node would help.
#[test]
fn what_siblings_met_is_remembered_while_their_namespace_has_what_it_may_have() {
    let mut cluster = cluster(&["a", "b", "c"]);
    replica(&mut cluster, "web-0", json!({"memory": "50Gi"}));
    let first = refuse(&mut cluster, "web-0");
    cluster.settle(4 * SECOND);
    assert!(node_of(&cluster, "web-0").is_some_and(|node| node != first));
    cluster.annotate("ml", json!({MAX_SHARE_MEMORY: "60Gi"}));
    replica(&mut cluster, "web-1", json!({"memory": "50Gi"}));
    assert_eq!(node_of(&cluster, "web-1"), None);
    cluster.annotate("ml", json!({}));
    cluster.settle(LONG);
    assert!(node_of(&cluster, "web-1").is_some_and(|node| node != first), "{:?}", node_of(&cluster, "web-1"));
    cluster.check();
}
