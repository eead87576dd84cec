//! One claim and several pods, one name and several claims.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams};
use serde_json::json;

use crate::manifests::{claim, gpu, on, user_of};
use crate::rig::wait_until;
use crate::test_cluster::{TestCluster, container_run, minor_of, node_of, sum};

const PREPARED: &str = "tranche_claim_operation_duration_seconds_count{operation=\"prepare\"";

#[tokio::test]
#[ignore = "needs a rig"]
async fn pods_that_share_a_claim_share_its_gpu_to_the_last_of_them() {
    let cluster = TestCluster::of_env("pods_that_share_a_claim_share_its_gpu_to_the_last_of_them").await;
    cluster.create(claim("shared", json!({"requests": [gpu("gpu")]}))).await;
    cluster.create(user_of("shared", "first")).await;
    let node = node_of(&cluster.wait_ready("first").await);
    let minor = minor_of(&cluster.devices_of("shared").await[0]);
    let prepared = sum(&cluster.metrics(&node).await, PREPARED);
    cluster.create(user_of("shared", "second")).await;
    let second = cluster.wait_ready("second").await;
    assert_eq!(node_of(&second), node);
    assert_eq!(cluster.inside("second", "main").gpus, [minor]);
    // Kubelet knows that the claim is ready and does not ask again.
    assert_eq!(
        sum(&cluster.metrics(&node).await, PREPARED),
        prepared,
        "prepared once more for the second pod"
    );

    cluster.delete("first").await;
    cluster.create(user_of("shared", "third")).await;
    cluster.wait_ready("third").await;
    assert_eq!(cluster.inside("third", "main").gpus, [minor]);
    assert_eq!(
        container_run(&cluster.wait_ready("second").await),
        container_run(&second),
        "the second pod was disturbed"
    );
    assert_eq!(cluster.inside("second", "main").gpus, [minor]);
    cluster.delete("second").await;
    cluster.delete("third").await;
    cluster.wait_clean().await;
    cluster.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_claim_of_the_same_name_waits_for_the_old_pod_and_then_works() {
    let cluster = TestCluster::of_env("a_claim_of_the_same_name_waits_for_the_old_pod").await;
    let one = || claim("name", json!({"requests": [gpu("gpu")]}));
    cluster.create(one()).await;
    let mut slow = on("node-a", user_of("name", "old"));
    slow["spec"]["terminationGracePeriodSeconds"] = json!(6);
    slow["spec"]["containers"][0]["command"] = json!(["sh", "-c", "trap '' TERM; sleep 3600 & wait; wait"]);
    cluster.create(slow).await;
    cluster.wait_ready("old").await;
    let pods: Api<Pod> = cluster.api();
    let claims: Api<ResourceClaim> = cluster.api();
    let old = claims.get("name").await.unwrap().metadata.uid;
    pods.delete("old", &DeleteParams::default()).await.unwrap();
    claims.delete("name", &DeleteParams::default()).await.unwrap();
    // By force: the claim goes though the pod is still ending.
    let free = Patch::Merge(json!({"metadata": {"finalizers": null}}));
    claims.patch("name", &PatchParams::default(), &free).await.unwrap();
    let gone = || async { claims.get_opt("name").await.ok()?.is_none().then_some(()) };
    wait_until("the old claim to be gone", Duration::from_secs(5), gone).await;
    cluster.create(one()).await;
    cluster.create(on("node-a", user_of("name", "new"))).await;
    cluster.wait_ready("new").await;
    // Kubelet takes back what the old pod had before it lets the pod's object go.
    let runs = |pod: &Pod| {
        let statuses = pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten());
        statuses.filter_map(|one| one.state.as_ref()).any(|state| state.running.is_some())
    };
    let is_running = pods.get_opt("old").await.unwrap().is_some_and(|old| runs(&old));
    assert!(!is_running, "the old pod has ended before the new one runs");
    cluster.gone("old").await;
    assert_ne!(claims.get("name").await.unwrap().metadata.uid, old);
    assert_eq!(cluster.inside("new", "main").gpus, [minor_of(&cluster.devices_of("name").await[0])]);
    cluster.end().await;
}
