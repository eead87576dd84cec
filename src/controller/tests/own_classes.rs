//! DeviceClasses of administrators' own that are the controller's: selectors, configuration, policy; classes that
//! come, change and go.

use serde_json::{Value, json};

use super::cluster::{Cluster, device, results};
use super::scenes::{LONG, SECOND, cluster, settles_for};
use crate::model::names::{DRIVER, SHARED_CLASS};
use crate::select::NOT_FOR_THE_SCHEDULER;

const CLASS: &str = "team-a-shares";

fn cel(texts: &[&str]) -> Value {
    texts.iter().map(|text| json!({"cel": {"expression": text}})).collect()
}

fn share(fields: &Value) -> Value {
    let mut parameters = json!({"apiVersion": "tranche.dev/v1alpha1", "kind": "GpuShare"});
    super::cluster::merge(&mut parameters, fields);
    json!({"opaque": {"driver": DRIVER, "parameters": parameters}})
}

/// The class: these selectors beside the mark, and this share unless a claim says otherwise.
fn put_class(cluster: &mut Cluster, name: &str, selectors: &[&str], fields: &Value) {
    let selectors = cel(&[&[NOT_FOR_THE_SCHEDULER][..], selectors].concat());
    let config = if fields.is_null() { json!([]) } else { json!([share(fields)]) };
    cluster.put_class(name, json!({}), json!({"selectors": selectors, "config": config}));
}

fn is_product(name: &str) -> String {
    format!("device.attributes['gpu.nvidia.com'].productName == '{name}'")
}

/// A pod with a claim of its name: of each class one request, and of the claim's own a share.
fn put_pod(cluster: &mut Cluster, name: &str, classes: &[&str], fields: &Value) {
    let one = |(nth, class): (usize, &&str)| json!({"name": format!("r{nth}"), "exactly": {"deviceClassName": class}});
    let requests: Vec<Value> = classes.iter().enumerate().map(one).collect();
    let config = if fields.is_null() { json!([]) } else { json!([share(fields)]) };
    cluster.put_claim(json!({"metadata": {"name": name, "namespace": "ml"},
        "spec": {"devices": {"requests": requests, "config": config}}}));
    cluster.put_pod(name, &[name], json!({}));
}

/// Node `node-l40s` beside others.
fn with_l40s() -> Cluster {
    let mut cluster = cluster(1, 2);
    let mut other = device("node-l40s", 0, true);
    other["attributes"]["productName"]["string"] = "NVIDIA L40S".into();
    cluster.put_node_object("node-l40s", json!({}));
    cluster.put_slice("node-l40s", vec![other]);
    cluster.settle(SECOND);
    cluster
}

fn node(cluster: &Cluster, claim: &str) -> Option<String> {
    cluster.place(claim).map(|(node, _)| node.trim_end_matches("/shares").to_owned())
}

/// What shares have of memory, in the order of the results.
fn memory(cluster: &Cluster, claim: &str) -> Vec<String> {
    let allocation = cluster.claim(claim).status.as_ref().unwrap().allocation.as_ref().unwrap();
    let results = allocation.devices.iter().flat_map(|devices| devices.results.iter().flatten());
    results.map(|one| one.consumed_capacity.as_ref().unwrap()["memory"].0.clone()).collect()
}

fn waiting(cluster: &Cluster, claim: &str) -> String {
    let annotations = cluster.claim(claim).metadata.annotations.as_ref();
    annotations.and_then(|all| all.get("tranche.dev/waiting")).cloned().unwrap_or_default()
}

#[test]
fn a_share_of_the_class_goes_where_its_selectors_and_the_claims_meet_and_is_as_large_as_the_class_says() {
    let mut cluster = with_l40s();
    put_class(&mut cluster, CLASS, &[&is_product("NVIDIA L40S")], &json!({"memory": "3Gi", "compute": 20}));
    put_pod(&mut cluster, "by-class", &[CLASS], &Value::Null);
    put_pod(&mut cluster, "by-claim", &[CLASS], &json!({"memory": "5Gi"}));
    cluster.settle(LONG);
    assert_eq!(node(&cluster, "by-class").as_deref(), Some("node-l40s"));
    assert_eq!(node(&cluster, "by-claim").as_deref(), Some("node-l40s"));
    assert_eq!(memory(&cluster, "by-class"), ["3Gi"]);
    assert_eq!(memory(&cluster, "by-claim"), ["5Gi"], "the claim's own counts, as a whole");
    // The claim's selector as well: no GPU is both.
    let exactly =
        json!({"deviceClassName": CLASS, "selectors": cel(&[&is_product("NVIDIA H100 80GB HBM3")])});
    cluster.put_claim(json!({"metadata": {"name": "none", "namespace": "ml"},
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}}));
    cluster.put_pod("none", &["none"], json!({}));
    cluster.settle(LONG);
    assert_eq!(node(&cluster, "none"), None);
    let words = waiting(&cluster, "none");
    assert!(words.ends_with("the selectors of DeviceClass team-a-shares count, too"), "{words}");
    cluster.check();
}

#[test]
fn requests_of_two_classes_of_ours_each_have_what_their_class_says() {
    let mut cluster = with_l40s();
    put_class(&mut cluster, CLASS, &[&is_product("NVIDIA H100 80GB HBM3")], &json!({"memory": "3Gi"}));
    cluster.put_class(SHARED_CLASS, json!({}), json!({"config": [share(&json!({"memory": "7Gi"}))]}));
    put_pod(&mut cluster, "both", &[CLASS, SHARED_CLASS], &Value::Null);
    cluster.settle(LONG);
    assert_eq!(memory(&cluster, "both"), ["3Gi", "7Gi"]);
    let allocation = cluster.claim("both").status.as_ref().unwrap().allocation.as_ref().unwrap();
    let configs = allocation.devices.iter().flat_map(|devices| devices.config.iter().flatten());
    let of_classes: Vec<_> = configs
        .filter(|one| one.opaque.as_ref().is_some_and(|opaque| opaque.parameters.0["kind"] == "GpuShare"))
        .map(|one| (one.source.as_str(), one.requests.clone().unwrap_or_default()))
        .collect();
    let one = |name: &str| ("FromClass", vec![name.to_owned()]);
    assert_eq!(of_classes, [one("r0"), one("r1")], "as kube-scheduler would write it");
    cluster.check();
}

#[test]
fn a_class_that_comes_after_its_claim_or_is_made_ours_later_serves_it_then() {
    let mut cluster = cluster(1, 1);
    put_pod(&mut cluster, "early", &[CLASS], &json!({"memory": "2Gi"}));
    cluster.settle(LONG);
    assert_eq!(cluster.place("early"), None, "there is no such class");
    cluster.put_class(CLASS, json!({}), json!({"selectors": cel(&["device.driver == 'gpu.nvidia.com'"])}));
    cluster.settle(LONG);
    assert_eq!((cluster.place("early"), cluster.holds()), (None, vec![]), "it is kube-scheduler's");
    put_class(&mut cluster, CLASS, &[], &Value::Null);
    cluster.settle(LONG);
    assert!(cluster.place("early").is_some());
    // Back again: what is not placed yet is the scheduler's.
    put_pod(&mut cluster, "large", &[CLASS], &json!({"memory": "79Gi"}));
    cluster.settle(LONG);
    assert_eq!(cluster.place("large"), None, "no room");
    cluster.put_class(CLASS, json!({}), json!({"selectors": cel(&["device.driver == 'other.example.com'"])}));
    cluster.drop_pod("early", true);
    cluster.settle(LONG);
    assert_eq!(cluster.place("large"), None, "not ours any more");
    cluster.check();
}

#[test]
fn shares_outlive_their_class_also_for_the_next_leader() {
    let mut cluster = cluster(1, 1);
    put_class(&mut cluster, CLASS, &[], &Value::Null);
    put_pod(&mut cluster, "a", &[CLASS], &json!({"memory": "60Gi"}));
    cluster.settle(3 * SECOND);
    let place = cluster.place("a");
    assert!(place.is_some());
    cluster.drop_class(CLASS);
    cluster.settle(3 * SECOND);
    let mut next = cluster.anew(super::scenes::rules());
    for one in [&mut cluster, &mut next] {
        super::scenes::share(one, "b", "30Gi");
        one.settle(SECOND);
        assert_eq!(one.place("b"), None, "the share is counted");
        one.drop_claim(&("ml".to_owned(), "b".to_owned()));
        super::scenes::share(one, "c", "10Gi");
        one.settle(3 * SECOND);
        assert_eq!(one.place("c"), place, "beside it there is room");
        assert_eq!((one.place("a"), one.holds().len()), (place.clone(), 1));
        one.check();
    }
}

#[test]
fn a_class_that_is_not_meant_as_it_is_written_stays_the_schedulers_and_is_told() {
    let mut cluster = cluster(1, 1);
    let text = format!("{NOT_FOR_THE_SCHEDULER} || device.driver == 'gpu.nvidia.com'");
    cluster.put_class(CLASS, json!({}), json!({"selectors": cel(&[&text])}));
    put_pod(&mut cluster, "a", &[CLASS], &json!({"memory": "2Gi"}));
    cluster.settle(LONG);
    assert_eq!((cluster.place("a"), cluster.holds()), (None, vec![]), "kube-scheduler may give it a GPU");
    let (_, troubles) = cluster.core.recorder.take();
    let told =
        troubles.iter().filter(|words| words.starts_with("DeviceClass team-a-shares is kube-scheduler's"));
    assert_eq!(told.count(), 1, "{troubles:?}");
}

#[test]
fn nobody_waits_for_a_claim_of_our_classes_to_be_allocated_by_the_scheduler() {
    let mut cluster = cluster(1, 1);
    put_class(&mut cluster, CLASS, &[&is_product("NVIDIA T4")], &Value::Null);
    put_pod(&mut cluster, "w", &[CLASS], &json!({"memory": "2Gi"}));
    assert_eq!(settles_for(cluster), 2);
}

#[test]
fn the_policy_of_a_claims_own_class_counts() {
    let mut cluster = cluster(2, 1);
    put_pod(&mut cluster, "a", &[SHARED_CLASS], &json!({"memory": "2Gi"}));
    cluster.settle(LONG);
    let selectors = cel(&[NOT_FOR_THE_SCHEDULER]);
    cluster.put_class(CLASS, json!({"tranche.dev/policy": "spread"}), json!({"selectors": selectors}));
    put_pod(&mut cluster, "spread", &[CLASS], &json!({"memory": "2Gi"}));
    cluster.settle(LONG);
    assert_ne!(results(cluster.claim("spread")), []);
    assert_ne!(cluster.place("spread"), cluster.place("a"));
    put_pod(&mut cluster, "packed", &[SHARED_CLASS], &json!({"memory": "2Gi"}));
    cluster.settle(LONG);
    assert!(cluster.place("packed").is_some());
}
