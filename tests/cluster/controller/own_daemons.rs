//! Shares over several GPUs on a node of whose shares each has an MPS daemon of its own.

use std::collections::BTreeSet;

use serde_json::json;

use super::place::env;
use super::{NODE, create, share, wait_placed};
use crate::manifests::{as_nobody, claim, user_of};
use crate::rig::wait_until;
use crate::shares::settings::set;
use crate::test_cluster::{PATIENCE, TestCluster};

async fn own_daemons(cluster: &TestCluster) -> usize {
    cluster.files(NODE, "/run/tranche/mps").into_iter().filter(|folder| folder.starts_with("claim-")).count()
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn shares_of_several_gpus_meet_others_where_each_has_a_daemon_of_its_own() {
    let cluster =
        super::cluster("shares_of_several_gpus_meet_others_where_each_has_a_daemon_of_its_own").await;
    set(&cluster, &["--mps-daemon=share"]).await;
    let gpus: BTreeSet<String> = cluster.shareable(NODE).await.into_iter().map(|gpu| gpu.name).collect();
    let published = || async {
        let published = cluster.published(NODE).await;
        let shared = published.iter().filter(|one| gpus.contains(&one.name));
        let own = shared.filter(|one| {
            let daemon = one.attributes.as_ref().and_then(|all| all.get("mpsDaemon")?.string.as_deref());
            daemon == Some("share")
        });
        (own.count() == gpus.len()).then_some(())
    };
    wait_until("the attribute to say so", PATIENCE, published).await;
    create(&cluster, "one", json!({"memory": "2000Mi", "compute": 25})).await;
    cluster.wait_ready("one").await;
    let one = wait_placed(&cluster, "one").await;
    let mut all = share(json!({"memory": "1000Mi", "compute": 10}));
    all["requests"][0]["exactly"]["count"] = json!(gpus.len());
    cluster.create(claim("all", all)).await;
    cluster.create(as_nobody(user_of("all", "all"))).await;
    cluster.wait_ready("all").await;
    assert_eq!(cluster.devices_of("all").await.len(), gpus.len(), "beside {one}");
    let memory: Vec<String> = (0..gpus.len()).map(|nth| format!("{nth}=1000M")).collect();
    let memory = format!("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT={}", memory.join(","));
    let pipe = "CUDA_MPS_PIPE_DIRECTORY=/run/nvidia-mps";
    assert_eq!(env(&cluster, "all"), ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=10", &memory, pipe]);
    assert_eq!(own_daemons(&cluster).await, 2);
    // Whoever comes later finds all GPUs open.
    create(&cluster, "later", json!({"memory": "3000Mi"})).await;
    cluster.wait_ready("later").await;
    cluster.delete("all").await;
    let two = || async { (own_daemons(&cluster).await == 2).then_some(()) };
    wait_until("its daemon to be gone, and no other", PATIENCE, two).await;
    assert!(env(&cluster, "one").contains(&"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=2000M".to_owned()));
    cluster.end().await;
}
