//! Nodes without a machine (`rig hollow`), each with GPUs like those of a real node: pods are bound there and
//! never start, so that many of them cost little and end at once.

use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::resource::v1::{Device, ResourceClaim, ResourceSlice};
use kube::Api;
use kube::api::{DeleteParams, ListParams, PostParams};
use serde_json::{Value, json};

use crate::rig::{SLOWER, wait_until};
use crate::test_cluster::{SYSTEM, TestCluster, from};

/// Hundreds of pods may have to be bound, on two cores.
pub const LONG: std::time::Duration = std::time::Duration::from_secs(240);

/// Adds nodes `hollow-0` and so on, with the GPUs of `like` that can be shared. They go when the test ends.
pub async fn add(cluster: &TestCluster, count: usize, like: &str) -> Vec<String> {
    add_changed(cluster, count, like, |_, _| {}).await
}

/// The same, with the GPUs of the nth node changed.
pub async fn add_changed(
    cluster: &TestCluster,
    count: usize,
    like: &str,
    change: impl Fn(usize, &mut Device),
) -> Vec<String> {
    let names: Vec<String> = (0..count).map(|nth| format!("hollow-{nth}")).collect();
    end_holds(cluster, &names).await;
    let words = |verb: &'static str| {
        std::iter::once(verb).chain(names.iter().map(String::as_str)).collect::<Vec<_>>()
    };
    cluster.rig.on_end(&["kubectl", "delete", "resourceslices", "-l", "rig/hollow=yes"]);
    cluster.rig.on_end(&words("hollow-end"));
    cluster.rig.run(&words("hollow"));
    for (nth, name) in names.iter().enumerate() {
        add_gpus(cluster, name, like, |gpu| change(nth, gpu)).await;
    }
    names
}

/// A GPU that a share of an earlier test was on may be held still, on a node of the same name: it would be given first.
async fn end_holds(cluster: &TestCluster, nodes: &[String]) {
    let all = Api::<ResourceClaim>::namespaced(cluster.client.clone(), SYSTEM);
    let labelled = ListParams::default().labels("tranche.dev/hold=true");
    let left = async || {
        let held = all.list(&labelled).await.map(|list| list.items).unwrap_or_default();
        let names = held.into_iter().filter_map(|hold| hold.metadata.name);
        let is_theirs = |name: &String| nodes.iter().any(|node| name.ends_with(&format!(".{node}")));
        names.filter(is_theirs).collect::<Vec<_>>()
    };
    for hold in left().await {
        // The controller may be faster.
        let _ = all.delete(&hold, &DeleteParams::default()).await;
    }
    let gone = || async { left().await.is_empty().then_some(()) };
    wait_until("the holds of an earlier test to be gone", LONG, gone).await;
}

async fn add_gpus(cluster: &TestCluster, name: &str, like: &str, change: impl Fn(&mut Device)) {
    let node = Api::<Node>::all(cluster.client.clone()).get(name).await.expect("the hollow node is there");
    let mut devices = Vec::new();
    for mut device in cluster.published(like).await {
        let Some(attributes) = device.attributes.as_mut() else { continue };
        if attributes.contains_key("grantableMemoryMiB") {
            let uuid = attributes.get_mut("uuid").expect("a GPU has a UUID");
            uuid.string = Some(format!("GPU-{name}-{}", device.name));
            device.consumes_counters = None;
            device.taints = None;
            change(&mut device);
            devices.push(device);
        }
    }
    let owner = json!({"apiVersion": "v1", "kind": "Node", "name": name, "uid": node.metadata.uid});
    let slice: ResourceSlice = from(json!({
        "metadata": {"name": format!("{name}-gpus"), "labels": {"rig/hollow": "yes"}, "ownerReferences": [owner]},
        "spec": {"driver": "gpu.nvidia.com", "nodeName": name, "devices": devices,
                 "pool": {"name": name, "generation": 1, "resourceSliceCount": 1}}}));
    let slices: Api<ResourceSlice> = Api::all(cluster.client.clone());
    slices.create(&PostParams::default(), &slice).await.expect("a slice can be made");
}

/// The same pod, for hollow nodes only.
pub fn on_hollow(mut pod: Value) -> Value {
    pod["spec"]["tolerations"] = json!([{"key": "rig/hollow", "operator": "Exists"}]);
    pod["spec"]["nodeSelector"]["rig/hollow"] = json!("yes");
    pod["spec"]["terminationGracePeriodSeconds"] = json!(0);
    pod
}

/// How many of the test's pods have a node.
pub async fn bound(cluster: &TestCluster) -> Option<usize> {
    let pods = cluster.api::<Pod>().list(&ListParams::default()).await.ok()?.items;
    let bound = |pod: &&Pod| pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some());
    Some(pods.iter().filter(bound).count())
}

pub async fn wait_bound(cluster: &TestCluster, count: usize) {
    let done = || async { (bound(cluster).await? >= count).then_some(()) };
    let what = format!("{count} pods to have a node");
    // The events go with the test's namespace: whoever reads of a failure wants those of the pods that wait.
    if tokio::time::timeout(LONG * SLOWER, wait_until(&what, LONG * 2, done)).await.is_err() {
        let pods = cluster.api::<Pod>().list(&ListParams::default()).await.expect("pods can be listed").items;
        let waiting =
            pods.iter().filter(|pod| pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_none()));
        for name in waiting.filter_map(|pod| pod.metadata.name.as_deref()) {
            println!("{name} waits: {:#?}", cluster.events(name).await);
        }
        panic!("waited {:?} in vain for {what}", LONG * SLOWER);
    }
}

/// The node of a pod; waits until it has one.
pub async fn wait_node(cluster: &TestCluster, pod: &str) -> String {
    let node = || async { cluster.api::<Pod>().get_opt(pod).await.ok()??.spec?.node_name };
    wait_until(&format!("pod {pod} to have a node"), LONG, node).await
}

/// Ends all pods of the test and deletes its claims.
pub async fn clear(cluster: &TestCluster) {
    let now = DeleteParams::default().grace_period(0);
    let (pods, claims) = (cluster.api::<Pod>(), cluster.api::<ResourceClaim>());
    pods.delete_collection(&now, &ListParams::default()).await.expect("pods can be deleted");
    let gone = || async { pods.list(&ListParams::default()).await.ok()?.items.is_empty().then_some(()) };
    wait_until("the pods to be gone", LONG, gone).await;
    claims
        .delete_collection(&DeleteParams::default(), &ListParams::default())
        .await
        .expect("claims can be deleted");
    let gone = || async { claims.list(&ListParams::default()).await.ok()?.items.is_empty().then_some(()) };
    wait_until("the claims to be gone", LONG, gone).await;
}

/// Ends a test that had hollow nodes.
pub async fn end(cluster: TestCluster) {
    clear(&cluster).await;
    cluster.end().await;
}
