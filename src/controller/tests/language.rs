//! What claims, their class, and taints may say, and what comes of it.

use std::time::Duration;

use serde_json::{Value, json};

use super::cluster::{Cluster, device};
use crate::controller::config::Rules;
use crate::controller::holds::HoldPace;
use crate::controller::view::Use;
use crate::model::names::{DRIVER, SHARED_CLASS};

/// Enough for a hold to settle; less than until what nobody binds is taken back.
const SOON: Duration = Duration::from_secs(3);

fn cluster(nodes: u32, gpus: u32) -> Cluster {
    let mut cluster = Cluster::new(Rules::default());
    (0..nodes).for_each(|node| cluster.put_node(&format!("node-{node}"), gpus));
    cluster.settle(SOON);
    cluster
}

fn parameters(share: &Value) -> Value {
    let mut parameters = json!({"apiVersion": "tranche.dev/v1alpha1", "kind": "GpuShare"});
    parameters.as_object_mut().unwrap().extend(share.as_object().unwrap().clone());
    json!({"driver": DRIVER, "parameters": parameters})
}

/// A pod with a claim of its own name, whose one request of our class has these fields.
fn pod(cluster: &mut Cluster, name: &str, annotations: Value, fields: Value) {
    let mut exactly = json!({"deviceClassName": SHARED_CLASS});
    exactly.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    cluster.put_claim(
        json!({"metadata": {"name": name, "namespace": "ml", "annotations": annotations}, "spec": {"devices": {
            "requests": [{"name": "gpu", "exactly": exactly}],
            "config": [{"opaque": parameters(&json!({"memory": "10Gi"}))}]}}}),
    );
    cluster.put_pod(name, &[name], json!({}));
    cluster.settle(SOON);
}

/// What has been said since this was last asked: events, and lines for the log.
fn said(cluster: &mut Cluster) -> String {
    let (notes, troubles) = cluster.core.recorder.take();
    notes.into_iter().map(|note| note.message).chain(troubles).collect::<Vec<_>>().join("\n")
}

const POLICY: &str = "tranche.dev/policy";

#[test]
fn the_claims_policy_goes_before_the_classs_and_that_before_the_controllers() {
    let mut cluster = cluster(2, 1);
    pod(&mut cluster, "a", json!({}), json!({}));
    pod(&mut cluster, "packed", json!({}), json!({}));
    assert_eq!(cluster.place("packed"), cluster.place("a"));
    cluster.put_class(SHARED_CLASS, json!({POLICY: "spread"}), json!({}));
    pod(&mut cluster, "spread", json!({}), json!({}));
    assert_ne!(cluster.place("spread"), cluster.place("a"));
    pod(&mut cluster, "again", json!({POLICY: "pack"}), json!({}));
    assert_eq!(cluster.place("again"), cluster.place("a"));
    cluster.put_class(SHARED_CLASS, json!({}), json!({}));
    pod(&mut cluster, "usual", json!({}), json!({}));
    assert_eq!(cluster.place("usual"), cluster.place("a"));
}

#[test]
fn a_policy_that_is_none_is_told_the_claims_author_and_stops_nobody_elses_claims() {
    let mut cluster = cluster(1, 1);
    cluster.put_class(SHARED_CLASS, json!({POLICY: "spred"}), json!({}));
    pod(&mut cluster, "a", json!({}), json!({}));
    assert!(cluster.place("a").is_some());
    let words = said(&mut cluster);
    assert!(words.contains("\"spred\"") && words.contains("until then it is pack"), "{words}");
    pod(&mut cluster, "b", json!({POLICY: "best"}), json!({}));
    assert_eq!(cluster.place("b"), None);
    let words = said(&mut cluster);
    assert!(
        words.contains("annotation tranche.dev/policy: \"best\" is not a valid policy; use pack, spread"),
        "{words}"
    );
}

fn bears(key: &str) -> Value {
    json!({"tolerations": [{"key": key, "operator": "Exists"}]})
}

#[test]
fn a_taint_of_a_slice_keeps_off_who_does_not_tolerate_it() {
    let mut cluster = cluster(1, 1);
    let mut gpu = device("node-0", 0, true);
    gpu["taints"] = json!([{"key": "gpu.nvidia.com/xid", "value": "63", "effect": "NoSchedule"},
        {"key": "note", "effect": "None"}]);
    cluster.put_slice("node-0", vec![gpu]);
    pod(&mut cluster, "a", json!({}), json!({}));
    assert_eq!(cluster.place("a"), None);
    let words = said(&mut cluster);
    assert!(words.contains("the first is gpu.nvidia.com/xid=63:NoSchedule"), "{words}");
    pod(&mut cluster, "b", json!({}), bears("gpu.nvidia.com/xid"));
    assert!(cluster.place("b").is_some());
    // Who evicts pods reads it there.
    let devices = cluster.claim("b").status.as_ref().unwrap().allocation.as_ref().unwrap().devices.as_ref();
    let results = devices.unwrap().results.as_ref().unwrap();
    assert_eq!(results[0].tolerations.as_ref().unwrap()[0].key.as_deref(), Some("gpu.nvidia.com/xid"));
    // What is not tolerated is taken back while nobody uses it; what is tolerated stays.
    cluster.put_slice("node-0", vec![device("node-0", 0, true)]);
    cluster.settle(SOON);
    assert!(cluster.place("a").is_some());
    cluster.put_rule(
        "r",
        json!({"deviceSelector": {}, "taint": {"key": "gpu.nvidia.com/xid", "effect": "NoExecute"}}),
    );
    cluster.settle(2 * SOON);
    assert_eq!((cluster.place("a"), cluster.place("b").is_some()), (None, true));
    cluster.check();
}

#[test]
fn taint_rules_mean_the_devices_that_they_select() {
    let taint = json!({"key": "repair", "value": "ticket-7", "effect": "NoSchedule"});
    let gpu = |node: u32, minor: u32| json!([format!("node-{node}"), [format!("gpu-{minor}")]]);
    for (selector, others) in [
        (json!(null), Some(gpu(0, 0))),
        (json!({"driver": "nic.example.com"}), Some(gpu(0, 0))),
        (json!({"device": "gpu-0"}), Some(gpu(0, 1))),
        (json!({"pool": "node-0", "device": "gpu-0"}), Some(gpu(0, 1))),
        (json!({"pool": "node-1"}), Some(gpu(0, 0))),
        (json!({"pool": "node-0"}), Some(gpu(1, 0))),
        (json!({"driver": DRIVER}), None),
    ] {
        let mut cluster = cluster(2, 2);
        cluster.put_rule("r", json!({"deviceSelector": selector, "taint": taint}));
        pod(&mut cluster, "a", json!({}), json!({}));
        assert_eq!(cluster.place("a").map(|place| json!(place)), others, "{selector}");
        cluster.fail_over(Rules::default());
        cluster.drop_rule("r");
        pod(&mut cluster, "b", json!({}), json!({}));
        assert!(cluster.place("a").is_some() && cluster.place("b").is_some(), "{selector}");
        cluster.check();
    }
}

#[test]
fn holds_in_advance_leave_tainted_gpus_alone() {
    let holds = HoldPace { ahead: 1, ..HoldPace::default() };
    let mut cluster = Cluster::new(Rules { holds, ..Rules::default() });
    cluster.put_node("node-0", 2);
    let taint = json!({"key": "repair", "effect": "NoSchedule"});
    cluster.put_rule("r", json!({"deviceSelector": {"device": "gpu-0"}, "taint": taint}));
    cluster.settle(SOON);
    assert_eq!(cluster.holds(), ["hold.gpu-1.node-0"]);
}

/// A pod with a claim of its own name: one request with these alternatives, each `memory` and `count`.
fn alternatives(cluster: &mut Cluster, name: &str, ways: &[(&str, &str, u32)], more: Value) {
    let sub = |(name, _, count): &(&str, &str, u32)| json!({"name": name, "deviceClassName": SHARED_CLASS, "count": count});
    let config = |(name, memory, _): &(&str, &str, u32)| json!({"requests": [format!("gpu/{name}")], "opaque": parameters(&json!({"memory": memory}))});
    let subs: Vec<Value> = ways.iter().map(sub).collect();
    let configs: Vec<Value> = ways.iter().map(config).collect();
    cluster.put_claim(json!({"metadata": {"name": name, "namespace": "ml"}, "spec": {"devices": {
        "requests": [{"name": "gpu", "firstAvailable": subs}], "config": configs}}}));
    cluster.put_pod(name, &[name], more);
}

/// The requests that a claim's results and its grant are for, and the memory that the node reads of it.
fn served(cluster: &Cluster, name: &str) -> (Vec<String>, Vec<u64>) {
    let Some(claim) = cluster.core.view.claim_named("ml", name) else { return (vec![], vec![]) };
    let uses = claim.allocation.iter().flat_map(|one| &one.uses);
    let mib = uses.filter_map(|(_, how)| match how {
        Use::Share(granted) => Some(granted.memory.mib_floor()),
        _ => None,
    });
    let status = cluster.claim(name).status.as_ref();
    let devices = status.and_then(|status| status.allocation.as_ref()?.devices.clone()).unwrap_or_default();
    let results = devices.results.unwrap_or_default();
    (results.into_iter().map(|result| result.request).collect(), mib.collect())
}

#[test]
fn the_first_alternative_that_fits_is_taken_and_named_in_result_and_grant() {
    let mut cluster = cluster(2, 1);
    let ways = [("large", "60Gi", 1), ("small", "20Gi", 1)];
    for (name, request, mib) in
        [("a", "gpu/large", 60), ("b", "gpu/large", 60), ("c", "gpu/small", 20), ("d", "gpu/small", 20)]
    {
        alternatives(&mut cluster, name, &ways, json!({}));
        cluster.settle(SOON);
        assert_eq!(served(&cluster, name), (vec![request.to_owned()], vec![mib << 10]), "{name}");
    }
    said(&mut cluster);
    alternatives(&mut cluster, "e", &ways, json!({}));
    cluster.settle(SOON);
    assert_eq!(cluster.place("e"), None);
    let words = said(&mut cluster);
    assert!(words.contains("none of 2 alternatives fits; the last needs 20480 MiB"), "{words}");
    cluster.check();
}

#[test]
fn several_small_gpus_may_stand_for_one_large_one_and_a_gang_takes_one_alternative() {
    let mut cluster = cluster(1, 2);
    alternatives(&mut cluster, "a", &[("one", "90Gi", 1), ("two", "45Gi", 2)], json!({}));
    cluster.settle(SOON);
    let (requests, mib) = served(&cluster, "a");
    assert_eq!((requests, mib), (vec!["gpu/two".to_owned(); 2], vec![45 << 10; 2]));
    cluster.drop_pod("a", true);
    cluster.settle(SOON);
    let gang = json!({"metadata": {"annotations": {"tranche.dev/gang": "g", "tranche.dev/gang-size": "3"}}});
    for name in ["x", "y", "z"] {
        alternatives(&mut cluster, name, &[("large", "60Gi", 1), ("small", "40Gi", 1)], gang.clone());
    }
    cluster.settle(2 * SOON);
    for name in ["x", "y", "z"] {
        assert_eq!(served(&cluster, name).0, ["gpu/small"], "{name}");
    }
    cluster.check();
}

#[test]
fn gpus_of_a_claim_differ_in_an_attribute_where_they_must() {
    let mut cluster = cluster(0, 0);
    cluster.put_node_object("node-0", json!({}));
    let rooted = |minor: u32, root: &str| {
        let mut gpu = device("node-0", minor, true);
        gpu["attributes"]["resource.kubernetes.io/pcieRoot"] = json!({"string": root});
        gpu
    };
    cluster.put_slice("node-0", vec![rooted(0, "pci0"), rooted(1, "pci0"), rooted(2, "pci1")]);
    for (name, kind, gpus, place) in [
        ("a", "distinctAttribute", 2, Some(vec!["gpu-0", "gpu-2"])),
        ("b", "distinctAttribute", 3, None),
        ("c", "matchAttribute", 2, None),
    ] {
        cluster.put_claim(json!({"metadata": {"name": name, "namespace": "ml"}, "spec": {"devices": {
            "requests": [{"name": "gpu", "exactly": {"deviceClassName": SHARED_CLASS, "count": gpus}}],
            "constraints": [{(kind): "resource.kubernetes.io/pcieRoot"}],
            "config": [{"opaque": parameters(&json!({"memory": "10Gi"}))}]}}}));
        cluster.put_pod(name, &[name], json!({}));
        cluster.settle(SOON);
        let devices = cluster.place(name).map(|(_, devices)| devices);
        assert_eq!(devices, place.map(|names| names.into_iter().map(str::to_owned).collect()), "{name}");
    }
    cluster.check();
}
