//! What claims, their class, and taints may say, and what comes of it.

use std::time::Duration;

use serde_json::{Value, json};

use super::cluster::Cluster;
use crate::controller::config::Rules;
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
