//! Pods of lower priority end for a pod of higher priority whose share finds no room.

use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use serde_json::{Value, json};

use super::settings::set;
use super::{NODE, WAITS, share, wait_told};
use crate::manifests::{as_nobody, claim, gpu, user_of};
use crate::rig::wait_until;
use crate::test_cluster::{PATIENCE, TestCluster, is_ready};

/// Most of a GPU: two of these do not fit on one.
fn most() -> Value {
    share(json!({"fraction": "0.9"}))
}

/// A PriorityClass that goes with the test.
pub(super) fn class(cluster: &TestCluster, name: &str, value: i32, policy: &str) -> String {
    let class = format!("{}-{name}", cluster.namespace);
    cluster.rig.on_end(&["kubectl", "delete", "priorityclass", &class, "--ignore-not-found"]);
    let (value, policy) = (format!("--value={value}"), format!("--preemption-policy={policy}"));
    cluster.rig.kubectl(&["create", "priorityclass", &class, &value, &policy]);
    class
}

async fn create(cluster: &TestCluster, name: &str, class: Option<&str>) {
    create_changed(cluster, name, class, |_| {}).await;
}

async fn create_changed(
    cluster: &TestCluster,
    name: &str,
    class: Option<&str>,
    change: impl FnOnce(&mut Value),
) {
    cluster.create(claim(name, most())).await;
    let mut pod = as_nobody(user_of(name, name));
    pod["metadata"]["labels"] = json!({"name": name});
    if let Some(class) = class {
        pod["spec"]["priorityClassName"] = json!(class);
    }
    change(&mut pod);
    cluster.create(pod).await;
}

/// One pod of no class on each GPU of the node.
async fn fill(cluster: &TestCluster) -> Vec<String> {
    let gpus = cluster.shareable(NODE).await.len();
    let names: Vec<String> = (0..gpus).map(|nth| format!("low-{nth}")).collect();
    for name in &names {
        create(cluster, name, None).await;
    }
    cluster.wait_all_ready(&names).await;
    names
}

/// Those of the pods that run and are not ending.
async fn running(cluster: &TestCluster, names: &[String]) -> Vec<String> {
    let pods = cluster.api::<Pod>().list(&ListParams::default()).await.expect("pods").items;
    let run = pods.into_iter().filter(|pod| is_ready(pod) && pod.metadata.deletion_timestamp.is_none());
    run.filter_map(|pod| pod.metadata.name).filter(|name| names.contains(name)).collect()
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn as_many_pods_of_lower_priority_end_as_it_takes_and_no_budget_is_violated() {
    let test = "as_many_pods_of_lower_priority_end_as_it_takes_and_no_budget_is_violated";
    let cluster = super::cluster(test).await;
    let low = fill(&cluster).await;
    // All but the last are kept by a budget.
    let guarded = &low[..low.len() - 1];
    let expression = json!({"key": "name", "operator": "In", "values": guarded});
    cluster
        .create(
            json!({"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": {"name": "kept"},
            "spec": {"minAvailable": guarded.len(), "selector": {"matchExpressions": [expression]}}}),
        )
        .await;
    let never = class(&cluster, "never", 500, "Never");
    create(&cluster, "patient", Some(&never)).await;
    wait_told(&cluster, "patient", WAITS).await;
    wait_told(&cluster, "patient", "FailedScheduling").await;
    let urgent = class(&cluster, "urgent", 1000, "PreemptLowerPriority");
    // It waits for a volume that nobody makes: room would be of no use to it.
    create_changed(&cluster, "blocked", Some(&urgent), |pod| {
        pod["spec"]["volumes"] = json!([{"name": "disk", "persistentVolumeClaim": {"claimName": "disk"}}]);
    })
    .await;
    wait_told(&cluster, "blocked", "FailedScheduling").await;
    wait_told(&cluster, "blocked", WAITS).await;
    create(&cluster, "urgent", Some(&urgent)).await;
    let told = wait_told(&cluster, "urgent", "Preempting").await;
    assert!(told.contains("1 pod of lower priority ends for it"), "{told}");
    let of_blocked = cluster.events("blocked").await;
    assert!(!of_blocked.iter().any(|event| event.starts_with("Preempting")), "{of_blocked:?}");
    let last = low.last().expect("the node has GPUs");
    let told = wait_told(&cluster, last, "Preempted").await;
    assert!(told.contains("MiB of node-a/gpu-") && told.contains("of priority 1000; its own is 0"), "{told}");
    cluster.gone(last).await;
    cluster.wait_ready("urgent").await;
    assert_eq!(running(&cluster, &low).await, guarded, "no budget is violated");
    assert_eq!(running(&cluster, &["patient".to_owned()]).await, [""; 0], "nobody ends for it");
    super::wait_metric(&cluster, "tranche_controller_preempting_units", 0.0).await;
    cluster.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_held_gpu_is_emptied_and_given_back_for_a_pod_that_waits_for_a_whole_one() {
    let test = "a_held_gpu_is_emptied_and_given_back_for_a_pod_that_waits_for_a_whole_one";
    let cluster = super::cluster(test).await;
    let low = fill(&cluster).await;
    let urgent = class(&cluster, "urgent", 1000, "PreemptLowerPriority");
    cluster.create(claim("train", json!({"requests": [gpu("gpu")]}))).await;
    let mut pod = as_nobody(user_of("train", "train"));
    pod["spec"]["priorityClassName"] = json!(urgent);
    cluster.create(pod).await;
    let told = wait_told(&cluster, "train", "Preempting").await;
    assert!(
        told.contains("1 pod of lower priority ends for it")
            && told.contains("is given back to kube-scheduler once they have ended"),
        "{told}"
    );
    cluster.wait_ready("train").await;
    assert_eq!(running(&cluster, &low).await.len(), low.len() - 1, "nobody else ends");
    super::wait_metric(&cluster, "tranche_controller_preempting_units", 0.0).await;
    cluster.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn switched_off_whoever_waits_waits_for_room() {
    let cluster = super::cluster("switched_off_whoever_waits_waits_for_room").await;
    set(&cluster, "TRANCHE_PREEMPTION", "false", "true").await;
    let low = fill(&cluster).await;
    let urgent = class(&cluster, "urgent", 1000, "PreemptLowerPriority");
    create(&cluster, "urgent", Some(&urgent)).await;
    wait_told(&cluster, "urgent", WAITS).await;
    wait_told(&cluster, "urgent", "FailedScheduling").await;
    assert_eq!(running(&cluster, &low).await.len(), low.len());
    set(&cluster, "TRANCHE_PREEMPTION", "true", "true").await;
    cluster.wait_ready("urgent").await;
    let one_less = || async { (running(&cluster, &low).await.len() == low.len() - 1).then_some(()) };
    wait_until("one pod to have ended", PATIENCE, one_less).await;
    cluster.end().await;
}
