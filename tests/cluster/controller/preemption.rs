//! Pods of lower priority end for a pod of higher priority whose share finds no room.

use k8s_openapi::api::core::v1::{Node, Pod};
use kube::Api;
use kube::api::{DeleteParams, ListParams};
use serde_json::{Value, json};

use super::settings::set;
use super::{NODE, WAITS, share, wait_told};
use crate::hollow::{self, on_hollow, wait_node};
use crate::manifests::{as_nobody, claim, container, gpu, pod, user_of};
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

/// A pod for hollow nodes of this class, whose share is most of the first GPU of `hollow-0`, or of this one.
async fn create_on(
    cluster: &TestCluster,
    name: &str,
    gpu: usize,
    class: &str,
    change: impl FnOnce(&mut Value),
) {
    let mut devices = most();
    let text = format!("device.attributes['gpu.nvidia.com'].uuid == 'GPU-hollow-0-gpu-{gpu}'");
    devices["requests"][0]["exactly"]["selectors"] = json!([{"cel": {"expression": text}}]);
    let change = |pod: &mut Value| {
        pod["spec"]["priorityClassName"] = json!(class);
        change(pod);
    };
    super::create_hollow(cluster, name, devices, change).await;
}

/// A pod without a GPU that takes so much of `hollow-0`.
async fn create_without_gpu(cluster: &TestCluster, name: &str, cpu: &str) {
    let mut pod = on_hollow(as_nobody(pod(name, json!([]), json!([container("main", json!([]))]))));
    pod["spec"]["containers"][0]["resources"] = json!({"requests": {"cpu": cpu}});
    cluster.create(pod).await;
    assert_eq!(wait_node(cluster, name).await, "hollow-0");
}

/// The GPU is free, and pods without a GPU have the node's processors: the share is placed, and kube-scheduler ends one of
/// them once it looks at the pod again, here because another pod has ended.
#[tokio::test]
#[ignore = "needs a rig"]
async fn where_only_processors_lack_kube_scheduler_makes_room_for_the_share() {
    let test = "where_only_processors_lack_kube_scheduler_makes_room_for_the_share";
    let cluster = super::bed_beside(test, 1).await;
    let urgent = class(&cluster, "urgent", 1000, "PreemptLowerPriority");
    let node = Api::<Node>::all(cluster.client.clone()).get("hollow-0").await.expect("the node is there");
    let cpu = node.status.and_then(|status| status.allocatable).expect("it has room")["cpu"].0.clone();
    let cpu: u32 = cpu.parse().expect("whole processors");
    create_without_gpu(&cluster, "greedy", &(cpu - 1).to_string()).await;
    create_without_gpu(&cluster, "other", "100m").await;
    create_on(&cluster, "urgent", 0, &urgent, |pod| {
        pod["spec"]["containers"][0]["resources"]["requests"] = json!({"cpu": "2"});
    })
    .await;
    wait_told(&cluster, "urgent", "GpuSharePlaced").await;
    cluster
        .api::<Pod>()
        .delete("other", &DeleteParams::default().grace_period(0))
        .await
        .expect("it can be deleted");
    cluster.gone("greedy").await;
    assert_eq!(wait_node(&cluster, "urgent").await, "hollow-0");
    let told = cluster.events("urgent").await;
    assert!(!told.iter().any(|event| event.contains("of lower priority ends for it")), "{told:?}");
    hollow::end(cluster).await;
}

/// Two pods that start together at the least have a GPU each. One of the GPUs is wanted: both end, and their pods say why.
#[tokio::test]
#[ignore = "needs a rig"]
async fn a_gang_ends_whole_and_its_pods_have_the_condition_of_a_disruption() {
    let test = "a_gang_ends_whole_and_its_pods_have_the_condition_of_a_disruption";
    let cluster = super::bed_beside(test, 1).await;
    let [low, urgent] = [("low", 1), ("urgent", 1000)]
        .map(|(name, value)| class(&cluster, name, value, "PreemptLowerPriority"));
    let gang = ["gang-0", "gang-1"];
    for (nth, name) in gang.iter().enumerate() {
        create_on(&cluster, name, nth, &low, |pod| {
            pod["metadata"]["labels"] = json!({"pod-group-name": "train"});
            pod["metadata"]["annotations"] = json!({"tranche.dev/gang-size": "2"});
            // Nobody ends it before it is looked at.
            pod["spec"]["terminationGracePeriodSeconds"] = json!(600);
        })
        .await;
    }
    for name in gang {
        wait_node(&cluster, name).await;
    }
    create_on(&cluster, "urgent", 0, &urgent, |_| {}).await;
    let told = wait_told(&cluster, "urgent", "Preempting").await;
    assert!(told.contains("2 pods of lower priority end for it"), "{told}");
    for name in gang {
        let marked = || async {
            let pod = cluster.api::<Pod>().get(name).await.ok()?;
            pod.metadata.deletion_timestamp.as_ref()?;
            pod.status?.conditions?.into_iter().find(|one| one.type_ == "DisruptionTarget")
        };
        let condition = wait_until(&format!("pod {name} to be marked"), PATIENCE, marked).await;
        assert_eq!(condition.status, "True", "{condition:?}");
        super::end_hollow(&cluster, name).await;
    }
    assert_eq!(wait_node(&cluster, "urgent").await, "hollow-0");
    hollow::end(cluster).await;
}
