//! What claims, their class, and taints may say, and what comes of it.

use std::time::Duration;

use serde_json::{Value, json};

use super::cluster::{Cluster, device};
use crate::controller::config::Rules;
use crate::controller::hold::Pace;
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
    let (notes, troubles) = cluster.core.says.take();
    notes.into_iter().map(|note| note.message).chain(troubles).collect::<Vec<_>>().join("\n")
}

const POLICY: &str = "tranche.dev/policy";

#[test]
fn the_claims_policy_goes_before_the_classs_and_that_before_the_controllers() {
    let mut cluster = cluster(2, 1);
    pod(&mut cluster, "a", json!({}), json!({}));
    pod(&mut cluster, "packed", json!({}), json!({}));
    assert_eq!(cluster.place("packed"), cluster.place("a"));
    cluster.put_class(json!({POLICY: "spread"}));
    pod(&mut cluster, "spread", json!({}), json!({}));
    assert_ne!(cluster.place("spread"), cluster.place("a"));
    pod(&mut cluster, "again", json!({POLICY: "pack"}), json!({}));
    assert_eq!(cluster.place("again"), cluster.place("a"));
    cluster.put_class(json!({}));
    pod(&mut cluster, "usual", json!({}), json!({}));
    assert_eq!(cluster.place("usual"), cluster.place("a"));
}

#[test]
fn a_policy_that_is_none_is_told_the_claims_author_and_stops_nobody_elses_claims() {
    let mut cluster = cluster(1, 1);
    cluster.put_class(json!({POLICY: "spred"}));
    pod(&mut cluster, "a", json!({}), json!({}));
    assert!(cluster.place("a").is_some());
    let words = said(&mut cluster);
    assert!(words.contains("\"spred\"") && words.contains("until then it is pack"), "{words}");
    pod(&mut cluster, "b", json!({POLICY: "best"}), json!({}));
    assert_eq!(cluster.place("b"), None);
    let words = said(&mut cluster);
    assert!(
        words.contains("annotation tranche.dev/policy: \"best\" is no policy; use pack, spread"),
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
    let holds = Pace { ahead: 1, ..Pace::default() };
    let mut cluster = Cluster::new(Rules { holds, ..Rules::default() });
    cluster.put_node("node-0", 2);
    let taint = json!({"key": "repair", "effect": "NoSchedule"});
    cluster.put_rule("r", json!({"deviceSelector": {"device": "gpu-0"}, "taint": taint}));
    cluster.settle(SOON);
    assert_eq!(cluster.holds(), ["hold.gpu-1.node-0"]);
}
