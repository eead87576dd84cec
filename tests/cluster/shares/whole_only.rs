//! Where the API server keeps no shares (before Kubernetes 1.36, or with the gate off): whole GPUs, as ever.

use serde_json::{Value, json};

use crate::manifests::{claim, gpu, user_of};
use crate::rig::{skipped, wait_until};
use crate::test_cluster::{TestCluster, sum};

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_cluster_without_shares_is_offered_whole_gpus_and_no_update_loop() {
    let cluster =
        TestCluster::of_env("a_cluster_without_shares_is_offered_whole_gpus_and_no_update_loop").await;
    if cluster.release().await >= 36 {
        skipped("this cluster keeps shares");
        return;
    }
    let node = cluster.nodes[0].clone();
    for device in cluster.published(&node).await {
        let json = serde_json::to_value(&device).unwrap();
        assert!(json["allowMultipleAllocations"].is_null(), "{json}");
        let capacity = json["capacity"].as_object().unwrap();
        assert!(capacity.values().all(|one: &Value| one["requestPolicy"].is_null()), "{json}");
        if json["attributes"]["type"]["string"] == "gpu" {
            assert_eq!(capacity.keys().collect::<Vec<_>>(), ["memory"], "{json}");
            // What the controller places shares by.
            assert_eq!(json["attributes"]["isolation"]["string"], "mps", "{json}");
            assert!(json["attributes"]["grantableMemoryMiB"]["int"].as_u64() > Some(0), "{json}");
        }
    }
    let state = cluster.state(&node).await;
    let offered = state["slices"]["offered"].as_object().unwrap();
    let because = offered["gpu-0"]["controllerShares"]["because"].as_str().unwrap_or_default();
    assert!(because.contains("DRAConsumableCapacity"), "the state says why: {offered:?}");

    let (before, metrics) = (cluster.versions().await, cluster.metrics(&node).await);
    let looks = sum(&metrics, "tranche_discovery_looks_total");
    cluster.create(claim("whole", json!({"requests": [gpu("gpu")]}))).await;
    cluster.create(user_of("whole", "whole")).await;
    cluster.wait_ready("whole").await;
    assert_eq!(cluster.inside("whole", "main").gpus.len(), 1);
    assert_eq!(cluster.exec("whole", "main", "env | grep ^CUDA_MPS || true"), "");
    cluster.delete("whole").await;
    // A look at the GPUs is what could begin a loop.
    let looked = || async {
        (sum(&cluster.metrics(&node).await, "tranche_discovery_looks_total") > looks).then_some(())
    };
    wait_until("another look at the GPUs", std::time::Duration::from_secs(75), looked).await;
    assert_eq!(cluster.versions().await, before, "slices were written though nothing changed");
    cluster.end().await;
}
