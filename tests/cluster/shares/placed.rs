//! Shares that our controller placed, also where the API server keeps nothing of shares: the amount stands in
//! the allocation's configuration. Here a test writes what the controller would, into claims of a class that the
//! controller leaves alone.

use serde_json::{Value, json};

use super::{Board, limits, mps_env};
use crate::manifests::{allocation, as_nobody, gpu, parameters, user_of};
use crate::test_cluster::{TestCluster, minor_of};

/// The status of a claim that was given so much of the board; `uuid`: of the board that is claimed to be meant.
fn placed(board: &Board, uuid: &str, memory: &str, compute: u32) -> Value {
    let device = json!({"device": board.device, "gpu": uuid, "memory": memory, "compute": compute,
        "slots": 1, "isolation": "mps"});
    let mut config = parameters("tranche.dev/v1alpha1", "ShareGrant", json!({"devices": [device]}));
    config[0]["source"] = json!("FromClass");
    let mut status = allocation(&board.node, &board.device);
    status["allocation"]["devices"]["config"] = config;
    status
}

/// A GPU that can be shared: by what it publishes where the API server keeps nothing of shares.
async fn board(cluster: &TestCluster) -> Board {
    let device = cluster.published(super::NODE).await.into_iter().find(|one| one.name == "gpu-0").unwrap();
    let attributes = device.attributes.unwrap();
    let grantable = attributes["grantableMemoryMiB"].int.expect("the controller is told what there is");
    Board {
        node: super::NODE.to_owned(),
        uuid: attributes["uuid"].string.clone().unwrap(),
        device: device.name,
        grantable_mib: grantable.try_into().unwrap(),
    }
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn what_our_controller_places_is_enforced_on_every_release() {
    let cluster = TestCluster::of_env("what_our_controller_places_is_enforced_on_every_release").await;
    let board = board(&cluster).await;
    for (name, memory, compute) in [("small", "2000Mi", 25), ("large", "10Gi", 50)] {
        cluster.create_with_status(name, gpu("gpu"), placed(&board, &board.uuid, memory, compute)).await;
        cluster.create(as_nobody(user_of(name, name))).await;
        cluster.wait_ready(name).await;
        assert_eq!(cluster.inside(name, "main").gpus, [minor_of(&board.device)], "{name}");
    }
    let pipe = "CUDA_MPS_PIPE_DIRECTORY=/run/nvidia-mps";
    let expected = |percent: u32, mib: u32| {
        let memory = format!("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0={mib}M");
        [format!("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE={percent}"), memory, pipe.to_owned()]
    };
    assert_eq!(mps_env(&cluster, "small", "main"), expected(25, 2000));
    assert_eq!(mps_env(&cluster, "large", "main"), expected(50, 10_240));
    assert_eq!(board.limits(&cluster), limits("10G", "50.0"));
    assert!(board.is_exclusive(&cluster));

    // More than there is, and for a board that has another name now. One that is not on the node any more is stood in
    // for by the one that has its name.
    let most = format!("{}Mi", board.grantable_mib);
    cluster.create_with_status("all", gpu("gpu"), placed(&board, &board.uuid, &most, 1)).await;
    cluster.create(as_nobody(user_of("all", "all"))).await;
    cluster.wait_refused("all", &[&format!("{} MiB", board.grantable_mib), "12240"]).await;
    let published = cluster.published(&board.node).await;
    let uuids = published.iter().filter_map(|one| one.attributes.as_ref()?.get("uuid")?.string.clone());
    let another = uuids.into_iter().find(|uuid| uuid.starts_with("GPU-") && *uuid != board.uuid);
    let another = another.expect("the node has another board");
    cluster.create_with_status("other", gpu("gpu"), placed(&board, &another, "1Gi", 1)).await;
    cluster.create(as_nobody(user_of("other", "other"))).await;
    cluster.wait_refused("other", &[&another, &board.uuid]).await;
    cluster.create_with_status("moved", gpu("gpu"), placed(&board, "GPU-of-yesterday", "1Gi", 1)).await;
    cluster.create(as_nobody(user_of("moved", "moved"))).await;
    cluster.wait_ready("moved").await;
    assert_eq!(mps_env(&cluster, "moved", "main"), expected(1, 1024));
    cluster.delete("moved").await;

    cluster.delete("large").await;
    board.wait_limits(&cluster, &limits("1G", "25.0")).await;
    cluster.delete("small").await;
    cluster.delete("all").await;
    cluster.delete("other").await;
    cluster.wait_clean().await;
    board.wait_rest(&cluster).await;
    cluster.end().await;
}

/// Only who may write an allocation's class entries grants: what a claim's author writes is no grant.
#[tokio::test]
#[ignore = "needs a rig"]
async fn nobody_grants_himself_a_share() {
    let cluster = TestCluster::of_env("nobody_grants_himself_a_share").await;
    let board = board(&cluster).await;
    let mut status = placed(&board, &board.uuid, "2000Mi", 25);
    status["allocation"]["devices"]["config"][0]["source"] = json!("FromClaim");
    cluster.create_with_status("own", gpu("gpu"), status).await;
    cluster.create(as_nobody(user_of("own", "own"))).await;
    cluster.wait_refused("own", &["ShareGrant"]).await;
    cluster.delete("own").await;
    cluster.wait_clean().await;
    cluster.end().await;
}
