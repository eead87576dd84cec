//! GPUs that are not alike: of several sizes in one cluster, kept free by a DeviceTaintRule. And the policy of a class.

use std::collections::BTreeSet;

use k8s_openapi::api::resource::v1::{DeviceClass, DeviceTaintRule};
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use super::{CLASS, NODE, create_hollow, share, wait_placed, wait_told};
use crate::hollow::{self, wait_node};
use crate::rig::skipped;
use crate::test_cluster::{TestCluster, from};

/// GPUs of a node that can be shared, at the least: one of them never fills up here.
const GPUS: usize = 7;

/// The memory that the controller grants a claim on each of its GPUs, in MiB.
pub(super) async fn granted_mib(cluster: &TestCluster, claim: &str) -> Value {
    wait_placed(cluster, claim).await;
    let stored =
        cluster.rig.kubectl(&["-n", &cluster.namespace, "get", "resourceclaim", claim, "-o", "json"]);
    let stored: Value = serde_json::from_str(&stored).expect("kubectl prints JSON");
    let configs = stored["status"]["allocation"]["devices"]["config"].as_array().expect("a grant").clone();
    let grant = configs.iter().map(|config| &config["opaque"]["parameters"]);
    grant.filter(|one| one["kind"] == "ShareGrant").cloned().collect()
}

/// Beside two nodes without a machine: the second has small GPUs.
pub(super) async fn bed_of_two_sizes(test: &str) -> TestCluster {
    let cluster = super::cluster(test).await;
    hollow::add_changed(&cluster, 2, NODE, |node, gpu| {
        let attributes = gpu.attributes.as_mut().expect("a GPU has attributes");
        if node == 1 {
            attributes.get_mut("grantableMemoryMiB").expect("it can be shared").int = Some(20_000);
            attributes.get_mut("productName").expect("it has a name").string = Some("NVIDIA L4".to_owned());
        }
    })
    .await;
    cluster
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn each_amount_goes_where_a_gpu_is_large_enough_and_a_fraction_is_of_the_gpu_it_is_on() {
    let test = "each_amount_goes_where_a_gpu_is_large_enough_and_a_fraction_is_of_the_gpu_it_is_on";
    let cluster = bed_of_two_sizes(test).await;
    create_hollow(&cluster, "large", share(json!({"memory": "20001Mi"})), |_| {}).await;
    create_hollow(&cluster, "none", share(json!({"memory": "4000Gi"})), |_| {}).await;
    let mut quarter = share(json!({"fraction": "0.25"}));
    let l4 = "device.attributes['gpu.nvidia.com'].productName == 'NVIDIA L4'";
    quarter["requests"][0]["exactly"]["selectors"] = json!([{"cel": {"expression": l4}}]);
    create_hollow(&cluster, "quarter", quarter, |_| {}).await;
    assert_eq!(wait_node(&cluster, "large").await, "hollow-0");
    assert_eq!(wait_node(&cluster, "quarter").await, "hollow-1");
    let granted = granted_mib(&cluster, "quarter").await.to_string();
    assert!(granted.contains("\"5000Mi\""), "{granted}");
    wait_told(&cluster, "none", "too small even idle").await;
    hollow::end(cluster).await;
}

/// The policy prefers the larger GPU. Of that one a fraction is more than the namespace may have.
#[tokio::test]
#[ignore = "needs a rig"]
async fn a_fraction_is_of_a_smaller_gpu_where_the_namespaces_bound_asks_for_it() {
    let test = "a_fraction_is_of_a_smaller_gpu_where_the_namespaces_bound_asks_for_it";
    let cluster = bed_of_two_sizes(test).await;
    let quarter = || share(json!({"fraction": "0.25"}));
    cluster.rig.on_end(&["kubectl", "annotate", "deviceclass", CLASS, "tranche.dev/policy-"]);
    cluster.rig.kubectl(&["annotate", "deviceclass", CLASS, "tranche.dev/policy=spread"]);
    create_hollow(&cluster, "unbounded", quarter(), |_| {}).await;
    assert_eq!(wait_node(&cluster, "unbounded").await, "hollow-0");
    super::end_hollow(&cluster, "unbounded").await;
    let bound = "tranche.dev/max-share-memory=9000Mi";
    cluster.rig.kubectl(&["annotate", "namespace", &cluster.namespace, bound]);
    create_hollow(&cluster, "bounded", quarter(), |_| {}).await;
    assert_eq!(wait_node(&cluster, "bounded").await, "hollow-1");
    let granted = granted_mib(&cluster, "bounded").await.to_string();
    assert!(granted.contains("\"5000Mi\""), "{granted}");
    create_hollow(&cluster, "one-more", quarter(), |_| {}).await;
    wait_told(&cluster, "one-more", "may have 9000 MiB of shares; 5000 are used").await;
    hollow::end(cluster).await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_gpu_that_a_rule_taints_takes_only_what_tolerates_it() {
    let test = "a_gpu_that_a_rule_taints_takes_only_what_tolerates_it";
    let cluster = super::cluster(test).await;
    let rules: Api<DeviceTaintRule> = Api::all(cluster.client.clone());
    let name = cluster.namespace.as_str();
    let rule: DeviceTaintRule = from(json!({"metadata": {"name": name}, "spec": {
        "deviceSelector": {"driver": "gpu.nvidia.com", "pool": "hollow-0"},
        "taint": {"key": "example.com/repair", "value": "fan", "effect": "NoSchedule"}}}));
    if let Err(error) = rules.create(&PostParams::default(), &rule).await {
        skipped(&format!("no DeviceTaintRules of resource.k8s.io/v1 here: {error}"));
        return cluster.end().await;
    }
    cluster.rig.on_end(&["kubectl", "delete", "devicetaintrule", name, "--ignore-not-found"]);
    // Before its GPUs: the controller hears of rules and of claims by two watches.
    hollow::add(&cluster, 1, NODE).await;
    create_hollow(&cluster, "plain", share(json!({"memory": "1Gi"})), |_| {}).await;
    wait_told(&cluster, "plain", "example.com/repair").await;
    let mut tolerant = share(json!({"memory": "1Gi"}));
    tolerant["requests"][0]["exactly"]["tolerations"] =
        json!([{"key": "example.com/repair", "operator": "Equal", "value": "fan", "effect": "NoSchedule"}]);
    create_hollow(&cluster, "tolerant", tolerant, |_| {}).await;
    assert_eq!(wait_node(&cluster, "tolerant").await, "hollow-0");
    rules.delete(name, &DeleteParams::default()).await.expect("a rule can be deleted");
    assert_eq!(wait_node(&cluster, "plain").await, "hollow-0");
    hollow::end(cluster).await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_class_says_by_which_policy_its_claims_are_placed() {
    let cluster = super::bed_beside("a_class_says_by_which_policy_its_claims_are_placed", 1).await;
    let classes: Api<DeviceClass> = Api::all(cluster.client.clone());
    let annotate = async |policy: Value| {
        let patch = Patch::Merge(json!({"metadata": {"annotations": {"tranche.dev/policy": policy}}}));
        classes.patch(CLASS, &PatchParams::default(), &patch).await.expect("a class can be annotated");
    };
    cluster.rig.on_end(&["kubectl", "annotate", "deviceclass", CLASS, "tranche.dev/policy-"]);
    create_hollow(&cluster, "first", share(json!({"memory": "4Gi"})), |_| {}).await;
    let first = wait_placed(&cluster, "first").await;
    // The controller hears of the class and of claims by two watches: until it has, the rule before holds.
    let next = async |name: String| {
        create_hollow(&cluster, &name, share(json!({"memory": "4Gi"})), |_| {}).await;
        wait_placed(&cluster, &name).await
    };
    annotate(json!("spread")).await;
    let mut used = vec![first.clone()];
    while used.len() < GPUS && used.iter().all(|device| *device == first) {
        used.push(next(format!("spread-{}", used.len())).await);
    }
    assert!(used.iter().any(|device| *device != first), "packed: {used:?}");
    annotate(json!(null)).await;
    let free = GPUS - used.iter().collect::<BTreeSet<_>>().len();
    let mut more = Vec::new();
    while more.len() < free && more.last().is_none_or(|device| !used.contains(device)) {
        more.push(next(format!("packed-{}", more.len())).await);
    }
    assert!(more.last().is_some_and(|device| used.contains(device)), "spread still: {used:?}, {more:?}");
    hollow::end(cluster).await;
}
