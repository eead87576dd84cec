//! Pods with KAI's annotations, as far as their containers: what each of them finds.

use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use super::place::{env, grantable_mib};
use super::wait_placed;
use crate::bed::{Bed, PATIENCE};
use crate::manifests::{as_nobody, container, pod};
use crate::rig::wait_until;

const PIPE: &str = "CUDA_MPS_PIPE_DIRECTORY=/run/nvidia-mps";

async fn bed(test: &str) -> Option<Bed> {
    let labels = json!({"tranche.dev/kai-annotations": "enabled"});
    Bed::with_labels(test, labels).await.and_then(super::alone)
}

/// Creates a pod with these containers and waits until it runs.
async fn run(bed: &Bed, name: &str, annotations: Value, containers: &[&str]) {
    let containers: Vec<Value> = containers.iter().map(|name| container(name, json!([]))).collect();
    let mut pod = as_nobody(pod(name, json!([]), json!(containers)));
    pod["metadata"]["annotations"] = annotations;
    bed.create(pod).await;
    bed.wait_ready(name).await;
}

/// The claim that the pod was promised.
async fn claim_of(bed: &Bed, pod: &str) -> String {
    let pod = bed.api::<Pod>().get(pod).await.expect("the pod is there");
    let entries = pod.spec.and_then(|spec| spec.resource_claims).unwrap_or_default();
    entries.into_iter().find_map(|entry| entry.resource_claim_name).expect("the pod names a claim")
}

/// Ends the pod; its claim goes with it.
async fn end(bed: Bed, pod: &str) {
    bed.delete(pod).await;
    let left = || async {
        let claims = bed.api::<k8s_openapi::api::resource::v1::ResourceClaim>();
        claims.list(&kube::api::ListParams::default()).await.ok()?.items.is_empty().then_some(())
    };
    wait_until("the claim to go with its pod", PATIENCE, left).await;
    bed.end().await;
}

#[tokio::test]
async fn a_fraction_limits_memory_and_compute_to_that_part_of_the_gpu() {
    let Some(bed) = bed("a_fraction_limits_memory_and_compute_to_that_part_of_the_gpu").await else { return };
    run(&bed, "quarter", json!({"gpu-fraction": "0.25"}), &["main"]).await;
    let device = wait_placed(&bed, &claim_of(&bed, "quarter").await).await;
    let mib = grantable_mib(&bed, &device).await.div_ceil(4);
    let memory = format!("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0={mib}M");
    assert_eq!(env(&bed, "quarter"), ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25", &memory, PIPE]);
    assert_eq!(bed.inside("quarter", "main").gpus.len(), 1);
    assert_eq!(bed.exec("quarter", "main", "echo $GPU_PORTION").trim(), "0.25");
    end(bed, "quarter").await;
}

#[tokio::test]
async fn a_number_of_devices_gives_the_same_part_of_so_many_gpus() {
    let Some(bed) = bed("a_number_of_devices_gives_the_same_part_of_so_many_gpus").await else { return };
    let annotations = json!({"gpu-fraction": "0.25", "gpu-fraction-num-devices": "2"});
    run(&bed, "two", annotations, &["main"]).await;
    let device = wait_placed(&bed, &claim_of(&bed, "two").await).await;
    let mib = grantable_mib(&bed, &device).await.div_ceil(4);
    let memory = format!("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0={mib}M,1={mib}M");
    assert_eq!(env(&bed, "two"), ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25", &memory, PIPE]);
    assert_eq!(bed.inside("two", "main").gpus.len(), 2);
    end(bed, "two").await;
}

#[tokio::test]
async fn the_container_that_is_named_has_the_share_and_no_other() {
    let Some(bed) = bed("the_container_that_is_named_has_the_share_and_no_other").await else { return };
    let annotations = json!({"gpu-memory": "2000", "gpu-fraction-container-name": "main"});
    run(&bed, "named", annotations, &["first", "main"]).await;
    assert_eq!(env(&bed, "named"), ["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=2000M", PIPE]);
    assert_eq!(bed.inside("named", "main").gpus.len(), 1);
    assert!(bed.inside("named", "first").is_without_gpu());
    assert_eq!(bed.exec("named", "first", "env | grep -E '^CUDA_MPS|^GPU_PORTION' || true"), "");
    end(bed, "named").await;
}
