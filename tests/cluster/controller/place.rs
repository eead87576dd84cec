//! What is placed, and what is told of what cannot be.

use k8s_openapi::api::resource::v1::Device;
use serde_json::{Value, json};

use super::{create, holds, share, wait_placed, wait_told};
use crate::manifests::{as_nobody, claim, container, pod, user_of};
use crate::rig::wait_until;
use crate::test_cluster::{PATIENCE, TestCluster, sum};

/// Bytes.
const MIB: f64 = 1_048_576.0;

/// What MPS is told in the container `main`.
pub fn env(cluster: &TestCluster, pod: &str) -> Vec<String> {
    let mut env: Vec<_> =
        cluster.exec(pod, "main", "env | grep ^CUDA_MPS || true").lines().map(str::to_owned).collect();
    env.sort();
    env
}

pub async fn grantable_mib(cluster: &TestCluster, device: &str) -> u64 {
    let published = cluster.published(super::NODE).await.into_iter().find(|one| one.name == device).unwrap();
    let mib = published.attributes.unwrap()["grantableMemoryMiB"].int.expect("a shareable GPU says how much");
    u64::try_from(mib).unwrap()
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_part_by_memory_and_one_by_fraction_share_a_gpu_under_their_limits() {
    let cluster = super::cluster("a_part_by_memory_and_one_by_fraction_share_a_gpu_under_their_limits").await;
    create(&cluster, "small", json!({"memory": "2000Mi"})).await;
    cluster.wait_ready("small").await;
    let device = wait_placed(&cluster, "small").await;
    assert!(holds(&cluster).await.contains(&device));
    // The same GPU, by a selector.
    let published = cluster.published(super::NODE).await.into_iter().find(|one| one.name == device).unwrap();
    let uuid = published.attributes.unwrap()["uuid"].string.clone().unwrap();
    let mut quarter = share(json!({"fraction": "0.25"}));
    quarter["requests"][0] = crate::manifests::of_gpu(&uuid, quarter["requests"][0].clone());
    cluster.create(claim("quarter", quarter)).await;
    cluster.create(as_nobody(user_of("quarter", "quarter"))).await;
    cluster.wait_ready("quarter").await;
    assert_eq!(wait_placed(&cluster, "quarter").await, device);

    let pipe = "CUDA_MPS_PIPE_DIRECTORY=/run/nvidia-mps";
    assert_eq!(env(&cluster, "small"), ["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=2000M", pipe]);
    let mib = grantable_mib(&cluster, &device).await / 4;
    let memory = format!("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0={mib}M");
    assert_eq!(env(&cluster, "quarter"), ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25", &memory, pipe]);
    assert_eq!(cluster.inside("small", "main").gpus, cluster.inside("quarter", "main").gpus);
    let told = wait_told(&cluster, "small", "GpuSharePlaced").await;
    assert!(told.contains("2000 MiB"), "{told}");
    cluster.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn the_metrics_tell_what_was_placed_what_waits_and_what_room_is_left() {
    let test = "the_metrics_tell_what_was_placed_what_waits_and_what_room_is_left";
    let cluster = super::cluster(test).await;
    let counts = ["decisions_total", "refusals_total", "decision_seconds_count", "placed_seconds_count"]
        .map(|name| format!("tranche_controller_{name}"));
    let read = async || {
        let metrics = super::metrics(&cluster).await;
        counts.clone().map(|name| sum(&metrics, &name))
    };
    let before = read().await;
    create(&cluster, "big", json!({"memory": "4000Gi"})).await;
    super::wait_told(&cluster, "big", "too small even idle").await;
    super::wait_metric(&cluster, "tranche_controller_waiting{reason=\"candidates\"}", 1.0).await;
    create(&cluster, "quarter", json!({"fraction": "0.25"})).await;
    cluster.wait_ready("quarter").await;
    let granted = grantable_mib(&cluster, &wait_placed(&cluster, "quarter").await).await / 4;

    let mut all = Vec::new();
    for device in cluster.shareable(super::NODE).await {
        all.push(grantable_mib(&cluster, &device.name).await);
    }
    let left = (all.iter().sum::<u64>() - granted) as f64;
    super::wait_metric(&cluster, "tranche_controller_node_free_bytes{node=\"node-a\"}", left * MIB).await;
    let largest = *all.iter().max().expect("the node has GPUs") as f64;
    super::wait_metric(&cluster, "tranche_controller_node_largest_bytes{node=\"node-a\"}", largest * MIB)
        .await;
    super::wait_metric(&cluster, "tranche_controller_node_stranded_bytes{node=\"node-a\"}", 0.0).await;
    let more = || async {
        let now = read().await;
        now.iter().zip(before).all(|(now, before)| *now > before).then_some(())
    };
    wait_until("the counts to grow", PATIENCE, more).await;

    // All of the compute gone, what is left of the GPU is of no use.
    create(&cluster, "rest", json!({"memory": "1Gi", "compute": 75})).await;
    cluster.wait_ready("rest").await;
    assert_eq!(wait_placed(&cluster, "rest").await, wait_placed(&cluster, "quarter").await, "packed");
    let of_gpu = largest - granted as f64 - 1024.0;
    super::wait_metric(&cluster, "tranche_controller_node_stranded_bytes{node=\"node-a\"}", of_gpu * MIB)
        .await;
    cluster.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn several_gpus_and_several_claims_of_a_pod_are_of_one_node() {
    let cluster = super::cluster("several_gpus_and_several_claims_of_a_pod_are_of_one_node").await;
    let mut two = share(json!({"memory": "10Gi"}));
    two["requests"][0]["exactly"]["count"] = json!(2);
    two["constraints"] = json!([{"requests": ["gpu"], "matchAttribute": "gpu.nvidia.com/productName"}]);
    cluster.create(claim("two", two)).await;
    cluster.create(claim("one", share(json!({"fraction": "0.5", "compute": 10})))).await;
    let claims =
        json!([{"name": "two", "resourceClaimName": "two"}, {"name": "one", "resourceClaimName": "one"}]);
    let containers =
        json!([container("left", json!([{"name": "two"}])), container("right", json!([{"name": "one"}]))]);
    cluster.create(as_nobody(pod("both", claims, containers))).await;
    cluster.wait_ready("both").await;
    assert_eq!(cluster.inside("both", "left").gpus.len(), 2);
    assert_eq!(cluster.inside("both", "right").gpus.len(), 1);
    cluster.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn what_cannot_be_placed_is_told_with_numbers_on_pod_and_claim() {
    let cluster = super::cluster("what_cannot_be_placed_is_told_with_numbers_on_pod_and_claim").await;
    let grantable = |device: &Device| device.attributes.as_ref()?.get("grantableMemoryMiB")?.int;
    let largest = cluster.shareable(super::NODE).await.iter().filter_map(grantable).max();
    let largest = largest.expect("the node has GPUs to share");
    create(&cluster, "big", json!({"memory": "4000Gi"})).await;
    let numbers = format!("too small even idle (largest {largest} MiB, asked 4096000)");
    let told = || async {
        let events = cluster.events("big").await;
        events.into_iter().find(|event| event.starts_with("WaitingForGpuShare") && event.contains(&numbers))
    };
    wait_until(&format!("an event that says {numbers}"), PATIENCE, told).await;
    let noted = || async {
        let claim = cluster.api::<k8s_openapi::api::resource::v1::ResourceClaim>().get("big").await.ok()?;
        claim.metadata.annotations?.get("tranche.dev/waiting").cloned()
    };
    let text = wait_until("the claim to say why it waits", PATIENCE, noted).await;
    assert!(text.contains("GPU"), "{text}");
    cluster.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_pod_with_kais_annotations_gets_its_share_and_gives_it_back() {
    let labels = json!({"tranche.dev/kai-annotations": "enabled"});
    let test = "a_pod_with_kais_annotations_gets_its_share_and_gives_it_back";
    let cluster = super::alone(TestCluster::with_labels(test, labels).await);
    let mut kai = as_nobody(pod("gpu-sharing", json!([]), json!([container("main", json!([]))])));
    kai["metadata"]["annotations"] = json!({"gpu-memory": "2000"});
    cluster.create(kai).await;
    cluster.wait_ready("gpu-sharing").await;
    assert_eq!(env(&cluster, "gpu-sharing")[0], "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=2000M");
    cluster.delete("gpu-sharing").await;
    let left = || async {
        let (claims, all) = (
            cluster.api::<k8s_openapi::api::resource::v1::ResourceClaim>(),
            kube::api::ListParams::default(),
        );
        claims.list(&all).await.ok()?.items.is_empty().then_some(())
    };
    wait_until("the claim to go with its pod", PATIENCE, left).await;
    cluster.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_claim_by_template_is_placed_for_each_pod() {
    let cluster = super::cluster("a_claim_by_template_is_placed_for_each_pod").await;
    cluster.create(crate::manifests::template("part", share(json!({"fraction": "0.1"})))).await;
    for name in ["a", "b", "c"] {
        cluster.create(as_nobody(crate::manifests::by_template("part", name))).await;
    }
    let mut gpus: Vec<Value> = Vec::new();
    for name in ["a", "b", "c"] {
        cluster.wait_ready(name).await;
        gpus.push(json!(cluster.inside(name, "main").gpus));
    }
    assert!(gpus.iter().all(|gpu| *gpu == gpus[0]), "packed: {gpus:?}");
    cluster.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn the_first_alternative_that_fits_is_taken() {
    let cluster = super::cluster("the_first_alternative_that_fits_is_taken").await;
    let config = |name: &str, memory: &str| {
        let amount = json!({"memory": memory});
        let mut config = crate::manifests::parameters("tranche.dev/v1alpha1", "GpuShare", amount)[0].clone();
        config["requests"] = json!([format!("gpu/{name}")]);
        config
    };
    let alternatives = ["large", "small"].map(|name| json!({"name": name, "deviceClassName": super::CLASS}));
    let devices = json!({"requests": [{"name": "gpu", "firstAvailable": alternatives}],
        "config": [config("large", "4000Gi"), config("small", "3Gi")]});
    cluster.create(claim("either", devices)).await;
    cluster.create(as_nobody(user_of("either", "either"))).await;
    cluster.wait_ready("either").await;
    assert_eq!(env(&cluster, "either")[0], "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=3072M");
    cluster.end().await;
}

/// As docs/controller.md tells users of quotas.
#[tokio::test]
#[ignore = "needs a rig"]
async fn a_quota_counts_the_shares_of_a_namespace() {
    let cluster = super::cluster("a_quota_counts_the_shares_of_a_namespace").await;
    let key = format!("{}.deviceclass.resource.k8s.io/devices", super::CLASS);
    let hard = json!({key.as_str(): "1"});
    cluster.create(json!({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "one"}, "spec": {"hard": hard}}))
        .await;
    let counted = || async {
        let quota = cluster.api::<k8s_openapi::api::core::v1::ResourceQuota>().get("one").await.ok()?;
        quota.status?.hard?.contains_key(&key).then_some(())
    };
    wait_until("the quota to be counted", PATIENCE, counted).await;
    // Whoever admits claims has heard of it, too.
    let mut two = share(json!({"memory": "1Gi"}));
    two["requests"][0]["exactly"]["count"] = json!(2);
    let two = claim("two", two);
    let refused = || async {
        cluster.try_create(two.clone(), true).await.err()?.contains("exceeded quota").then_some(())
    };
    wait_until("the quota to be in force", PATIENCE, refused).await;
    create(&cluster, "first", json!({"memory": "1Gi"})).await;
    cluster.wait_ready("first").await;
    let second = claim("second", share(json!({"memory": "1Gi"})));
    let refused = cluster.try_create(second, false).await.expect_err("the quota is used up");
    assert!(refused.contains("exceeded quota") && refused.contains(&key), "{refused}");
    cluster.rig.kubectl(&["-n", &cluster.namespace, "delete", "resourcequota", "one"]);
    cluster.end().await;
}
