//! Who moves and who ends for a share at its namespace's bound: nobody for a place that the namespace may not have. On nodes
//! without a machine.

use k8s_openapi::api::resource::v1::ResourceClaim;
use serde_json::{Value, json};

use super::consolidation::{devices, end, fragmented, rebalance};
use super::kinds::{bed_of_two_sizes, granted_mib};
use super::preemption::class;
use super::{create_hollow, wait_told};
use crate::hollow::{self, wait_node};
use crate::manifests::parameters;
use crate::rig::wait_until;
use crate::test_cluster::{PATIENCE, TestCluster};

/// MiB of the first GPU of a node that can be granted.
async fn mib(cluster: &TestCluster, node: &str) -> i64 {
    let gpus = cluster.shareable(node).await;
    let gpu = gpus.iter().find(|gpu| gpu.name == "gpu-0").expect("there is a first GPU");
    gpu.attributes.as_ref().expect("it has attributes")["grantableMemoryMiB"].int.expect("a number")
}

fn set_bound(cluster: &TestCluster, mib: i64) {
    let bound = format!("tranche.dev/max-share-memory={mib}Mi");
    cluster.rig.kubectl(&["annotate", "namespace", &cluster.namespace, "--overwrite", &bound]);
}

/// Waits until a claim carries a reason to wait like this.
async fn wait_waiting(cluster: &TestCluster, claim: &str, is: impl Fn(&str) -> bool) {
    let found = || async {
        let annotations = cluster.api::<ResourceClaim>().get(claim).await.ok()?.metadata.annotations?;
        annotations.get("tranche.dev/waiting").filter(|words| is(words)).cloned()
    };
    println!("waits: {}", wait_until("the claim to carry another reason", PATIENCE, found).await);
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn nobody_is_to_move_for_a_share_that_the_namespace_may_not_have() {
    let test = "nobody_is_to_move_for_a_share_that_the_namespace_may_not_have";
    let cluster = super::bed_beside(test, 2).await;
    let gpu = mib(&cluster, "hollow-0").await;
    // Half of a GPU and a tenth are there, of what waits it is 0.95 of one.
    set_bound(&cluster, gpu + gpu * 6 / 10);
    let small = fragmented(&cluster, json!({})).await;
    let told = format!("; evict {small} (");
    wait_told(&cluster, "large", &told).await;
    wait_waiting(&cluster, "large", |words| words.contains(&told)).await;
    let (said, beside, code) = rebalance(&cluster, &[]);
    assert!(said.contains("moving 1 pod would make room for 1"), "{said}{beside}");
    assert_eq!(code, Some(3), "{said}{beside}");

    set_bound(&cluster, gpu + gpu / 2);
    wait_waiting(&cluster, "large", |words| !words.contains("evict ")).await;
    let (said, beside, code) = rebalance(&cluster, &[]);
    assert!(said.contains("1 pod or gang waits") && !said.contains("evict"), "{said}{beside}");
    assert_ne!(code, Some(3), "there is nothing to be applied: {said}{beside}");
    end(cluster).await;
}

/// A pod that only kube-scheduler binds to a hollow node, of this class.
async fn create_of_class(cluster: &TestCluster, name: &str, devices: Value, class: &str) {
    create_hollow(cluster, name, devices, |pod| pod["spec"]["priorityClassName"] = json!(class)).await;
}

/// The pod on the large GPU has the lowest priority and would be the first to end; but half of that GPU is over the bound.
#[tokio::test]
#[ignore = "needs a rig"]
async fn pods_end_on_the_gpu_of_which_the_namespace_may_have_the_share() {
    let cluster = bed_of_two_sizes("pods_end_on_the_gpu_of_which_the_namespace_may_have_the_share").await;
    let (large, small) = (mib(&cluster, "hollow-0").await, mib(&cluster, "hollow-1").await);
    assert!(large > 3 * small, "{large} {small}");
    let [lowest, low, high] = [("lowest", 1), ("low", 2), ("high", 1000)]
        .map(|(name, value)| class(&cluster, name, value, "PreemptLowerPriority"));
    create_of_class(&cluster, "on-large", devices("0.9", &["hollow-0"]), &lowest).await;
    create_of_class(&cluster, "on-small", devices("0.9", &["hollow-1"]), &low).await;
    assert_eq!(wait_node(&cluster, "on-large").await, "hollow-0");
    assert_eq!(wait_node(&cluster, "on-small").await, "hollow-1");
    // Beside what is there half of the small one, and not half of the large one.
    set_bound(&cluster, (large + small) * 9 / 10 + small);
    create_of_class(&cluster, "half", devices("0.5", &["hollow-0", "hollow-1"]), &high).await;
    let told = wait_told(&cluster, "half", "Preempting").await;
    assert!(told.contains("1 pod of lower priority ends for it"), "{told}");
    cluster.gone("on-small").await;
    assert_eq!(wait_node(&cluster, "half").await, "hollow-1");
    assert_eq!(wait_node(&cluster, "on-large").await, "hollow-0");
    hollow::end(cluster).await;
}

/// One of these parts of the first GPU of a node; the first of them is preferred.
fn either(ways: [(&str, &str); 2]) -> Value {
    let one = |(fraction, node): (&str, &str)| {
        let mut of = devices(fraction, &[node]);
        let mut request = of["requests"][0]["exactly"].take();
        request["name"] = json!(node);
        let mut config = parameters("tranche.dev/v1alpha1", "GpuShare", json!({"fraction": fraction}));
        config[0]["requests"] = json!([format!("gpu/{node}")]);
        (request, config[0].take())
    };
    let (requests, config): (Vec<Value>, Vec<Value>) = ways.map(one).into_iter().unzip();
    json!({"requests": [{"name": "gpu", "firstAvailable": requests}], "config": config})
}

/// For the first alternative somebody could end as well; it is over the bound.
#[tokio::test]
#[ignore = "needs a rig"]
async fn pods_end_for_the_alternative_that_the_namespace_may_have() {
    let test = "pods_end_for_the_alternative_that_the_namespace_may_have";
    let cluster = super::bed_beside(test, 2).await;
    let gpu = mib(&cluster, "hollow-0").await;
    let high = class(&cluster, "high", 1000, "PreemptLowerPriority");
    for node in ["hollow-0", "hollow-1"] {
        let name = format!("low-{node}");
        create_hollow(&cluster, &name, devices("0.5", &[node]), |_| {}).await;
        assert_eq!(wait_node(&cluster, &name).await, node);
    }
    // Beside the halves that are there 0.6 of a GPU, and not 0.9.
    set_bound(&cluster, gpu * 17 / 10);
    create_of_class(&cluster, "high", either([("0.9", "hollow-0"), ("0.6", "hollow-1")]), &high).await;
    wait_told(&cluster, "high", "Preempting").await;
    cluster.gone("low-hollow-1").await;
    assert_eq!(wait_node(&cluster, "high").await, "hollow-1");
    assert_eq!(wait_node(&cluster, "low-hollow-0").await, "hollow-0");
    let granted = granted_mib(&cluster, "high").await.to_string();
    let least = gpu * 6 / 10;
    let is_granted = |mib: i64| granted.contains(&format!("\"{mib}Mi\""));
    assert!((least..=least + 1).any(is_granted), "0.6 of {gpu} MiB: {granted}");
    hollow::end(cluster).await;
}
