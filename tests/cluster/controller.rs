//! The controller beside the real scheduler: shares that it places, GPUs that it takes and gives back.

mod asks;
mod books;
mod bounds;
mod consolidation;
mod departments;
mod explain;
mod explained;
mod fail_over;
mod groups;
mod harm;
mod kai;
mod kinds;
mod life;
mod load;
mod nodes;
mod own_class;
mod own_daemons;
mod place;
mod preemption;
mod protected;
mod quota;
mod race;
mod replaced;
mod settings;
mod starving;
mod together;
mod told;
mod uninstall;
mod verbatim;
mod whole;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::Api;
use kube::api::{DeleteParams, ListParams};
use serde_json::{Value, json};

use crate::hollow;
use crate::manifests::{as_nobody, user_of};
use crate::rig::wait_until;
use crate::test_cluster::{PATIENCE, SYSTEM, TestCluster, ask, sum};

const NODE: &str = "node-a";
const CLASS: &str = "shared.gpu.nvidia.com";
/// The event of a pod whose claim cannot be placed now.
const WAITS: &str = "WaitingForGpuShare";

/// A test cluster on which only one node takes pods: where something goes is then said beforehand.
async fn cluster(test: &str) -> TestCluster {
    alone(TestCluster::of_env(test).await)
}

/// The same, with nodes without a machine (`hollow-0` and so on) beside it that have the same GPUs.
async fn bed_beside(test: &str, nodes: usize) -> TestCluster {
    let cluster = cluster(test).await;
    hollow::add(&cluster, nodes, NODE).await;
    cluster
}

fn alone(cluster: TestCluster) -> TestCluster {
    for node in cluster.nodes.iter().filter(|node| *node != NODE) {
        cluster.rig.on_end(&["kubectl", "uncordon", node]);
        cluster.rig.kubectl(&["cordon", node]);
    }
    cluster
}

/// spec.devices of a claim for a share of one GPU, such as `{"memory": "2000Mi"}`.
fn share(amount: Value) -> Value {
    let config = crate::manifests::parameters("tranche.dev/v1alpha1", "GpuShare", amount);
    json!({"requests": [{"name": "gpu", "exactly": {"deviceClassName": CLASS}}], "config": config})
}

/// A claim and a pod of its name that uses it.
async fn create(cluster: &TestCluster, name: &str, amount: Value) {
    cluster.create(crate::manifests::claim(name, share(amount))).await;
    cluster.create(as_nobody(user_of(name, name))).await;
}

/// A claim, and a pod of its name, changed, for nodes without a machine.
async fn create_hollow(cluster: &TestCluster, name: &str, devices: Value, change: impl FnOnce(&mut Value)) {
    cluster.create(crate::manifests::claim(name, devices)).await;
    let mut pod = hollow::on_hollow(as_nobody(user_of(name, name)));
    change(&mut pod);
    cluster.create(pod).await;
}

/// No two such pods of the test can be on one node.
fn keep_apart(pod: &mut Value) {
    pod["metadata"]["labels"]["apart"] = json!("yes");
    let others =
        json!({"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"apart": "yes"}}});
    pod["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"] =
        json!([others]);
}

/// The same, and only kube-scheduler knows it: the term chooses the test's namespace by its labels, in a way that the
/// controller does not read.
fn keep_apart_unseen(namespace: &str, pod: &mut Value) {
    keep_apart(pod);
    let required =
        &mut pod["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"];
    required[0]["namespaceSelector"] = json!({"matchLabels": {"kubernetes.io/metadata.name": namespace},
        "matchExpressions": [{"key": "kubernetes.io/metadata.name", "operator": "Exists"}]});
}

/// A PriorityClass that goes with the test: more urgent than what has none, and that ends nobody's pods.
fn urgent_class(cluster: &TestCluster) -> String {
    let class = format!("{}-urgent", cluster.namespace);
    cluster.rig.on_end(&["kubectl", "delete", "priorityclass", &class, "--ignore-not-found"]);
    cluster.rig.kubectl(&["create", "priorityclass", &class, "--value=1000", "--preemption-policy=Never"]);
    class
}

/// Ends a pod at once, and the claim of its name.
async fn end_hollow(cluster: &TestCluster, name: &str) {
    let now = DeleteParams::default().grace_period(0);
    cluster.api::<Pod>().delete(name, &now).await.expect("it can be deleted");
    cluster.gone(name).await;
    cluster.api::<ResourceClaim>().delete(name, &DeleteParams::default()).await.expect("it can be deleted");
    let gone = || async { cluster.api::<ResourceClaim>().get_opt(name).await.ok()?.is_none().then_some(()) };
    wait_until(&format!("claim {name} to be gone"), PATIENCE, gone).await;
}

/// What a pod is told in these words; waits until it is.
async fn wait_told(cluster: &TestCluster, pod: &str, words: &str) -> String {
    let told = || async { cluster.events(pod).await.into_iter().find(|event| event.contains(words)) };
    let told = wait_until(&format!("pod {pod} to be told: {words}"), PATIENCE, told).await;
    println!("told: {told}");
    told
}

/// A pod that no scheduler looks at.
async fn create_waiting(cluster: &TestCluster, name: &str, amount: Value) {
    cluster.create(crate::manifests::claim(name, share(amount))).await;
    let mut pod = as_nobody(user_of(name, name));
    pod["spec"]["schedulerName"] = json!("nobody");
    cluster.create(pod).await;
}

/// The pod of the controller that places.
pub async fn leading_pod(cluster: &TestCluster) -> Option<String> {
    let leader = fail_over::leader(cluster).await?;
    leader.rsplit_once('_').map(|(pod, _)| pod.to_owned())
}

/// What the controller that places tells of itself.
pub async fn metrics(cluster: &TestCluster) -> String {
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), SYSTEM);
    let told = || async {
        let pod = leading_pod(cluster).await?;
        let metrics = ask(&pods.get(&pod).await.ok()?, "/metrics")?;
        (sum(&metrics, "tranche_controller_leading") == 1.0).then_some(metrics)
    };
    wait_until("the leader's metrics", PATIENCE, told).await
}

/// Waits until the leader's metric has this value.
async fn wait_metric(cluster: &TestCluster, name: &str, value: f64) {
    let there = || async { (sum(&metrics(cluster).await, name) == value).then_some(()) };
    wait_until(&format!("{name} to be {value}"), PATIENCE, there).await;
}

/// The GPUs of the node that are held. Those of nodes that other tests had may be held for a while.
async fn holds(cluster: &TestCluster) -> Vec<String> {
    let all = Api::<ResourceClaim>::namespaced(cluster.client.clone(), SYSTEM);
    let held = all.list(&ListParams::default().labels("tranche.dev/hold=true")).await.expect("holds").items;
    let of_node = |hold: &&ResourceClaim| {
        hold.metadata.name.as_ref().is_some_and(|name| name.ends_with(&format!(".{NODE}")))
    };
    let here = held.iter().filter(of_node);
    here.flat_map(results).map(|(device, _)| device).collect()
}

/// The same without those beside a claim that was given these devices. Before 1.36 a hold is given back in two steps;
/// the scheduler may be faster than the second, and then the hold stands by until the claim ends.
async fn holds_beside(cluster: &TestCluster, given: &[String]) -> Vec<String> {
    let mut holds = holds(cluster).await;
    if cluster.release().await < 36 {
        holds.retain(|device| !given.contains(device));
    }
    holds
}

/// The devices of an allocation, and whether each is a share of the controller's.
fn results(claim: &ResourceClaim) -> Vec<(String, bool)> {
    let allocation = claim.status.as_ref().and_then(|status| status.allocation.as_ref());
    let devices = allocation.and_then(|allocation| allocation.devices.as_ref());
    let configs = devices.iter().flat_map(|devices| devices.config.iter().flatten());
    let granted = configs
        .filter_map(|config| config.opaque.as_ref())
        .any(|opaque| opaque.parameters.0["kind"] == "ShareGrant");
    let results = devices.iter().flat_map(|devices| devices.results.iter().flatten());
    results.map(|result| (result.device.clone(), granted)).collect()
}

/// Where the claim is; waits until it is somewhere.
async fn wait_placed(cluster: &TestCluster, claim: &str) -> String {
    let placed = || async {
        let claim = cluster.api::<ResourceClaim>().get(claim).await.ok()?;
        results(&claim).first().map(|(device, _)| device.clone())
    };
    wait_until(&format!("claim {claim} to be placed"), PATIENCE, placed).await
}

async fn wait_not_placed(cluster: &TestCluster, claim: &str) {
    let open = || async {
        let claim = cluster.api::<ResourceClaim>().get(claim).await.ok()?;
        results(&claim).is_empty().then_some(())
    };
    wait_until(&format!("the allocation of claim {claim} to be taken back"), PATIENCE, open).await
}
