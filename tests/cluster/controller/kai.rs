//! Pods with KAI's annotations, as far as their containers: what each of them finds.

use k8s_openapi::api::core::v1::{ContainerState, Pod};
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::{LogParams, PostParams};
use serde_json::{Value, json};

use super::groups::define;
use super::place::{env, grantable_mib};
use super::{create_hollow, results, share, wait_metric, wait_placed, wait_told};
use crate::hollow::{self, on_hollow};
use crate::manifests::{as_nobody, claim, container, gpu, pod, user_of};
use crate::rig::wait_until;
use crate::test_cluster::{PATIENCE, TestCluster};

const PIPE: &str = "CUDA_MPS_PIPE_DIRECTORY=/run/nvidia-mps";

async fn cluster(test: &str) -> TestCluster {
    let labels = json!({"tranche.dev/kai-annotations": "enabled"});
    super::alone(TestCluster::with_labels(test, labels).await)
}

/// Creates a pod with these containers and waits until it runs.
async fn run(cluster: &TestCluster, name: &str, annotations: Value, containers: &[&str]) {
    let containers: Vec<Value> = containers.iter().map(|name| container(name, json!([]))).collect();
    let mut pod = as_nobody(pod(name, json!([]), json!(containers)));
    pod["metadata"]["annotations"] = annotations;
    cluster.create(pod).await;
    cluster.wait_ready(name).await;
}

/// The claim that the pod was promised.
async fn claim_of(cluster: &TestCluster, pod: &str) -> String {
    let pod = cluster.api::<Pod>().get(pod).await.expect("the pod is there");
    let entries = pod.spec.and_then(|spec| spec.resource_claims).unwrap_or_default();
    entries.into_iter().find_map(|entry| entry.resource_claim_name).expect("the pod names a claim")
}

/// Ends the pod; its claim goes with it.
async fn end(cluster: TestCluster, pod: &str) {
    cluster.delete(pod).await;
    let left = || async {
        let claims = cluster.api::<ResourceClaim>();
        claims.list(&kube::api::ListParams::default()).await.ok()?.items.is_empty().then_some(())
    };
    wait_until("the claim to go with its pod", PATIENCE, left).await;
    cluster.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_fraction_limits_memory_and_compute_to_that_part_of_the_gpu() {
    let cluster = cluster("a_fraction_limits_memory_and_compute_to_that_part_of_the_gpu").await;
    run(&cluster, "quarter", json!({"gpu-fraction": "0.25"}), &["main"]).await;
    let device = wait_placed(&cluster, &claim_of(&cluster, "quarter").await).await;
    let mib = grantable_mib(&cluster, &device).await / 4;
    let memory = format!("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0={mib}M");
    assert_eq!(env(&cluster, "quarter"), ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25", &memory, PIPE]);
    assert_eq!(cluster.inside("quarter", "main").gpus.len(), 1);
    assert_eq!(cluster.exec("quarter", "main", "echo $GPU_PORTION").trim(), "0.25");
    end(cluster, "quarter").await;
}

/// The pod of KAI's documentation, field by field (docs/gpu-sharing), but for the scheduler's name and an image that is
/// here. It lists its GPUs and ends.
#[tokio::test]
#[ignore = "needs a rig"]
async fn the_pod_of_kais_documentation_runs_as_it_is_written() {
    let cluster = cluster("the_pod_of_kais_documentation_runs_as_it_is_written").await;
    let documented = json!({"apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "gpu-sharing", "labels": {"kai.scheduler/queue": "default-queue"},
            "annotations": {"gpu-fraction": "0.5"}},
        "spec": {"schedulerName": "default-scheduler", "automountServiceAccountToken": false, "containers": [{
            "name": "gpu-workload", "image": "docker.io/local/glibc:1", "imagePullPolicy": "Never",
            "command": ["nvidia-smi"], "args": ["-L"], "resources": {"limits": {"memory": "1Gi"}}}]}});
    cluster.create(documented).await;
    let claim = claim_of(&cluster, "gpu-sharing").await;
    let ended = || async {
        let status = cluster.api::<Pod>().get("gpu-sharing").await.ok()?.status?;
        let container = status.container_statuses?.into_iter().next()?;
        let ended = |state: Option<ContainerState>| Some(state?.terminated?.exit_code);
        ended(container.state).or_else(|| ended(container.last_state))
    };
    assert_eq!(wait_until("the container to end", PATIENCE, ended).await, 0);
    // It is started again, and has said nothing then for a moment.
    let said = || async {
        let said = cluster.api::<Pod>().logs("gpu-sharing", &LogParams::default()).await.ok()?;
        said.ends_with('\n').then_some(said)
    };
    let said = wait_until("its log", PATIENCE, said).await;
    let device = wait_placed(&cluster, &claim).await;
    let uuid = cluster.attribute(super::NODE, &device, "uuid").await;
    assert!(said.starts_with("GPU 0: ") && said.ends_with(&format!("(UUID: {uuid})\n")), "{said}");
    let half = grantable_mib(&cluster, &device).await / 2;
    let told = || async {
        let claims = cluster.api::<ResourceClaim>();
        let devices = claims.get(&claim).await.ok()?.status?.devices?;
        Some(devices.first()?.data.as_ref()?.0.clone())
    };
    let data = wait_until("the claim to say what was granted", PATIENCE, told).await;
    assert_eq!(
        (data["memoryMiB"].as_u64(), data["computePercent"].as_u64()),
        (Some(half), Some(50)),
        "{data}"
    );
    end(cluster, "gpu-sharing").await;
}

/// As it is written: with KAI's scheduler, of which the test does what it would do beside the claim. Nobody else binds it.
#[tokio::test]
#[ignore = "needs a rig"]
async fn a_pod_of_kais_scheduler_gets_its_claim_at_once_with_its_queue_and_its_limit() {
    let cluster =
        cluster("a_pod_of_kais_scheduler_gets_its_claim_at_once_with_its_queue_and_its_limit").await;
    let mut object = as_nobody(pod("main", json!([]), json!([container("main", json!([]))])));
    object["metadata"]["annotations"] = json!({"gpu-memory": "2000", "team": "a"});
    object["metadata"]["labels"] = json!({"kai.scheduler/queue": "default-queue"});
    object["spec"]["schedulerName"] = json!("kai-scheduler");
    cluster.create(object).await;
    let created = cluster.api::<Pod>().get("main").await.expect("the pod is there");
    let annotations = created.metadata.annotations.unwrap_or_default();
    assert_eq!(annotations.get("gpu-memory"), None, "KAI is not to serve it by itself");
    assert!(annotations.contains_key("tranche.dev/gpu-share") && annotations["team"] == "a");
    let name = claim_of(&cluster, "main").await;
    let claims = cluster.api::<ResourceClaim>();
    let there = || async { claims.get_opt(&name).await.ok()? };
    let claim = wait_until("the claim, which waits for nothing", PATIENCE, there).await;
    assert_eq!(claim.metadata.labels.unwrap_or_default()["kai.scheduler/queue"], "default-queue");
    assert_eq!(
        claim.status.and_then(|status| status.allocation),
        None,
        "nobody said how many start together"
    );
    // Who groups pods says so.
    let group = ["-n", &cluster.namespace, "annotate", "pod", "main"];
    cluster.rig.kubectl(&[&group[..], &["tranche.dev/gang=g", "tranche.dev/gang-size=1"]].concat());
    wait_placed(&cluster, &name).await;
    let binding = json!({"apiVersion": "v1", "kind": "Binding", "metadata": {"name": "main"},
        "target": {"apiVersion": "v1", "kind": "Node", "name": super::NODE}});
    let (pods, params) = (cluster.api::<Pod>(), PostParams::default());
    let bound = pods.create_subresource::<Value, Value>("binding", "main", &params, &binding).await;
    bound.expect("the pod can be bound");
    cluster.wait_ready("main").await;
    assert_eq!(env(&cluster, "main"), ["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=2000M", PIPE]);
    assert_eq!(cluster.inside("main", "main").gpus.len(), 1);
    end(cluster, "main").await;
}

/// What KAI's scheduler writes for its binder, in its documented fields.
async fn bind_request(cluster: &TestCluster, name: &str, spec: Value) {
    let object = json!({"apiVersion": "scheduling.run.ai/v1alpha2", "kind": "BindRequest",
        "metadata": {"name": name, "namespace": cluster.namespace}, "spec": spec, "status": {"phase": "Pending"}});
    let made = || async { cluster.try_create(object.clone(), false).await.ok() };
    wait_until(&format!("BindRequest {name} to be created"), PATIENCE, made).await;
}

/// KAI's scheduler has given all GPUs of the node but one to a pod, and its binder has written nothing yet.
#[tokio::test]
#[ignore = "needs a rig"]
async fn gpus_that_a_bind_request_names_are_taken_until_it_is_done() {
    let cluster = super::bed_beside("gpus_that_a_bind_request_names_are_taken_until_it_is_done", 1).await;
    let names: Vec<String> = cluster.published("hollow-0").await.into_iter().map(|gpu| gpu.name).collect();
    let (free, named) = names.split_last().expect("the node has GPUs");
    assert!(!named.is_empty(), "the node has two GPUs or more");
    define(&cluster, "scheduling.run.ai", "v1alpha2", "BindRequest").await;
    cluster.create(claim("whole", json!({"requests": [gpu("gpu")]}))).await;
    let mut whole = on_hollow(as_nobody(user_of("whole", "whole")));
    whole["spec"]["schedulerName"] = json!("kai-scheduler");
    cluster.create(whole).await;
    let result = |device: &String| json!({"request": "gpu", "driver": "gpu.nvidia.com", "pool": "hollow-0", "device": device});
    let results_of: Vec<Value> = named.iter().map(result).collect();
    let spec = json!({"podName": "whole", "selectedNode": "hollow-0", "resourceClaimAllocations": [
        {"name": "gpu", "allocation": {"devices": {"results": results_of}}}]});
    bind_request(&cluster, "whole", spec).await;
    // Whoever has heard of this one has heard of that.
    bind_request(&cluster, "unreadable", json!({"podName": 1})).await;
    wait_metric(&cluster, "tranche_controller_unreadable_objects", 1.0).await;
    create_hollow(&cluster, "first", share(json!({"fraction": "0.9"})), |_| {}).await;
    assert_eq!(wait_placed(&cluster, "first").await, *free);
    create_hollow(&cluster, "second", share(json!({"fraction": "0.9"})), |_| {}).await;
    wait_told(&cluster, "second", super::WAITS).await;
    let second = cluster.api::<ResourceClaim>().get("second").await.expect("the claim is there");
    assert_eq!(results(&second), [], "KAI's binder gives the other GPUs to a pod");
    let done = r#"{"status": {"phase": "Succeeded"}}"#;
    let patch = ["-n", &cluster.namespace, "patch", "bindrequest", "whole", "--type=merge", "-p", done];
    cluster.rig.kubectl(&patch);
    let second = wait_placed(&cluster, "second").await;
    assert!(named.contains(&second), "{second}");
    hollow::end(cluster).await;
}

/// The GPU has as many MiB as it has: no multiple of five is needed.
#[tokio::test]
#[ignore = "needs a rig"]
async fn five_fifths_of_a_gpu_run_on_one_gpu() {
    let cluster = cluster("five_fifths_of_a_gpu_run_on_one_gpu").await;
    let names = ["a", "b", "c", "d", "e"];
    for name in names {
        let mut pod = as_nobody(pod(name, json!([]), json!([container("main", json!([]))])));
        pod["metadata"]["annotations"] = json!({"gpu-fraction": "0.2"});
        cluster.create(pod).await;
    }
    let mut gpus = Vec::new();
    for name in names {
        cluster.wait_ready(name).await;
        gpus.push(cluster.inside(name, "main").gpus);
        let device = wait_placed(&cluster, &claim_of(&cluster, name).await).await;
        let mib = grantable_mib(&cluster, &device).await / 5;
        let memory = format!("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0={mib}M");
        assert_eq!(env(&cluster, name), ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=20", &memory, PIPE]);
    }
    assert!(gpus.iter().all(|gpu| *gpu == gpus[0]), "{gpus:?}");
    for name in &names[1..] {
        cluster.delete(name).await;
    }
    end(cluster, names[0]).await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_number_of_devices_gives_the_same_part_of_so_many_gpus() {
    let cluster = cluster("a_number_of_devices_gives_the_same_part_of_so_many_gpus").await;
    let annotations = json!({"gpu-fraction": "0.25", "gpu-fraction-num-devices": "2"});
    run(&cluster, "two", annotations, &["main"]).await;
    let device = wait_placed(&cluster, &claim_of(&cluster, "two").await).await;
    let mib = grantable_mib(&cluster, &device).await / 4;
    let memory = format!("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0={mib}M,1={mib}M");
    assert_eq!(env(&cluster, "two"), ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25", &memory, PIPE]);
    assert_eq!(cluster.inside("two", "main").gpus.len(), 2);
    end(cluster, "two").await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn the_container_that_is_named_has_the_share_and_no_other() {
    let cluster = cluster("the_container_that_is_named_has_the_share_and_no_other").await;
    let annotations = json!({"gpu-memory": "2000", "gpu-fraction-container-name": "main"});
    run(&cluster, "named", annotations, &["first", "main"]).await;
    assert_eq!(env(&cluster, "named"), ["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=2000M", PIPE]);
    assert_eq!(cluster.inside("named", "main").gpus.len(), 1);
    assert!(cluster.inside("named", "first").is_without_gpu());
    assert_eq!(cluster.exec("named", "first", "env | grep -E '^CUDA_MPS|^GPU_PORTION' || true"), "");
    end(cluster, "named").await;
}
