//! Pods that take ports of their nodes.

use serde_json::{Value, json};

use super::cluster::Cluster;
use super::scenes::{LONG, cluster};
use crate::controller::explain::{Answer, Listing, Subject, explain};

/// What the pod takes of its node.
fn with_ports(ports: Value) -> Value {
    json!({"spec": {"containers": [{"name": "main", "ports": ports}]}})
}

fn tcp(port: u16) -> Value {
    with_ports(json!([{"containerPort": 80, "hostPort": port}]))
}

/// A pod without a claim that is on a node.
fn daemon(cluster: &mut Cluster, name: &str, node: &str, ports: Value) {
    let mut pod = ports;
    pod["spec"]["nodeName"] = node.into();
    cluster.put_pod(name, &[], pod);
}

/// A pod with a share of its own name.
fn share(cluster: &mut Cluster, name: &str, ports: Value) {
    cluster.put_share(name, json!({"memory": "4Gi"}), 1);
    cluster.put_pod(name, &[name], ports);
}

fn node_of(cluster: &Cluster, name: &str) -> Option<String> {
    cluster.place(name).map(|(node, _)| node)
}

fn waiting(cluster: &Cluster, name: &str) -> String {
    let annotations = cluster.claim(name).metadata.annotations.clone().unwrap_or_default();
    annotations.get("tranche.dev/waiting").cloned().unwrap_or_default()
}

#[test]
fn a_pod_goes_where_its_ports_are_free_and_waits_where_there_is_no_such_node() {
    let mut cluster = cluster(2, 1);
    for (nth, node) in ["node-0", "node-1"].into_iter().enumerate() {
        daemon(&mut cluster, &format!("d{nth}"), node, tcp(7777));
    }
    daemon(&mut cluster, "web", "node-0", tcp(8080));
    share(&mut cluster, "other", tcp(8080));
    share(&mut cluster, "same", tcp(7777));
    cluster.settle(LONG);
    assert_eq!(node_of(&cluster, "other").as_deref(), Some("node-1"));
    assert_eq!(node_of(&cluster, "same"), None);
    let words = waiting(&cluster, "same");
    assert!(words.contains("node node-0 has host port 7777/TCP in use by another pod"), "{words}");
    cluster.drop_pod("d1", false);
    cluster.settle(LONG);
    assert_eq!(node_of(&cluster, "same").as_deref(), Some("node-1"));
    cluster.check();
}

/// Also of pods that have their places and are not bound yet.
#[test]
fn pods_with_one_port_get_a_node_each() {
    let mut cluster = cluster(3, 2);
    for nth in 0..4 {
        share(&mut cluster, &format!("s{nth}"), tcp(7777));
    }
    cluster.settle(LONG);
    let nodes: Vec<String> = (0..4).filter_map(|nth| node_of(&cluster, &format!("s{nth}"))).collect();
    let mut once = nodes.clone();
    once.sort();
    once.dedup();
    assert_eq!((nodes.len(), once.len()), (3, 3), "{nodes:?}");
    // Who has a place keeps it: its own port is not in its way.
    cluster.relist();
    cluster.settle(LONG);
    assert_eq!((0..4).filter_map(|nth| node_of(&cluster, &format!("s{nth}"))).collect::<Vec<_>>(), nodes);
    let first = (0..4).map(|nth| format!("s{nth}")).find(|name| node_of(&cluster, name).is_some()).unwrap();
    let last = (0..4).map(|nth| format!("s{nth}")).find(|name| node_of(&cluster, name).is_none()).unwrap();
    cluster.drop_pod(&first, true);
    cluster.settle(LONG);
    assert!(node_of(&cluster, &last).is_some());
    cluster.check();
}

#[test]
fn protocols_and_addresses_are_told_apart() {
    let mut cluster = cluster(1, 1);
    daemon(
        &mut cluster,
        "dns",
        "node-0",
        with_ports(json!([
        {"containerPort": 53, "hostPort": 53, "protocol": "UDP"},
        {"containerPort": 80, "hostPort": 80, "hostIP": "10.0.0.1"}])),
    );
    let of = |more: Value| {
        let mut port = json!({"containerPort": 80, "hostPort": 80});
        super::cluster::merge(&mut port, &more);
        with_ports(json!([port]))
    };
    for (name, ports, fits) in [
        ("protocol", of(json!({"hostPort": 53, "protocol": "TCP"})), true),
        ("same-protocol", of(json!({"hostPort": 53, "protocol": "UDP"})), false),
        ("address", of(json!({"hostIP": "10.0.0.2"})), true),
        ("same-address", of(json!({"hostIP": "10.0.0.1"})), false),
        ("all-addresses", of(json!({"hostIP": "0.0.0.0"})), false),
        ("no-host-port", with_ports(json!([{"containerPort": 53, "protocol": "UDP"}])), true),
    ] {
        share(&mut cluster, name, ports);
        cluster.settle(LONG);
        assert_eq!(node_of(&cluster, name).is_some(), fits, "{name}");
        cluster.drop_pod(name, true);
        cluster.settle(LONG);
    }
}

#[test]
fn who_asks_is_told_of_the_port() {
    let mut cluster = cluster(1, 1);
    daemon(&mut cluster, "d", "node-0", tcp(7777));
    share(&mut cluster, "same", tcp(7777));
    cluster.settle(LONG);
    let (mut core, listing): (_, Listing) = super::explain::listed(&mut cluster);
    let claim = Subject::Claim(core.view.claim_named("ml", "same").unwrap().key);
    let now = jiff::Timestamp::UNIX_EPOCH + jiff::SignedDuration::from_hours(24);
    let told = explain(&mut core, &listing, &[claim], now).remove(0);
    let Answer::Waits { nodes, .. } = told.answer else { panic!("{told:?}") };
    let words: Vec<String> = nodes.iter().map(|(node, verdict)| format!("{node} {verdict}")).collect();
    assert_eq!(words, ["node-0 has host port 7777/TCP in use by another pod"]);
    assert_eq!(nodes[0].1.kind().as_str(), "host-port");
}

/// A tenant could take all ports of a node from everybody, with pods that never run.
#[test]
fn pods_that_are_gated_take_no_ports_by_a_claim_of_another() {
    let mut cluster = cluster(1, 1);
    share(&mut cluster, "placed", json!({}));
    cluster.settle(LONG);
    let mut gated = tcp(8080);
    gated["spec"]["schedulingGates"] = json!([{"name": "example.com/budget"}]);
    cluster.put_pod("gated", &["placed"], gated);
    share(&mut cluster, "web", tcp(8080));
    cluster.settle(LONG);
    assert_eq!(node_of(&cluster, "web").as_deref(), Some("node-0"));
    cluster.check();
}
