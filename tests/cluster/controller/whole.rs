//! Shares with the fraction 1: whole GPUs that the controller places, alone and without MPS.

use std::collections::BTreeSet;

use k8s_openapi::api::resource::v1::ResourceClaim;
use serde_json::{Value, json};

use super::place::env;
use super::{NODE, create, holds, share, wait_placed, wait_told};
use crate::manifests::{as_nobody, claim, user_of};
use crate::rig::wait_until;
use crate::test_cluster::{PATIENCE, TestCluster};

/// What the claim's first device is told to be in `status.devices`.
async fn data(cluster: &TestCluster, name: &str) -> Value {
    let told = || async {
        let devices = cluster.api::<ResourceClaim>().get(name).await.ok()?.status?.devices?;
        Some(devices.first()?.data.as_ref()?.0.clone())
    };
    wait_until(&format!("claim {name} to say what was granted"), PATIENCE, told).await
}

/// UUIDs of GPUs that an MPS daemon serves.
async fn served(cluster: &TestCluster) -> BTreeSet<String> {
    let state = cluster.mps_state(NODE).await;
    let daemons = state["daemons"].as_array().cloned().unwrap_or_default();
    let serving = daemons.iter().filter(|daemon| !daemon["phase"]["Serving"].is_null());
    let devices = serving.map(|daemon| daemon["group"].clone());
    devices.flat_map(|group| group.as_array().cloned().unwrap_or_default()).map(|one| text(&one)).collect()
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_pod_with_the_fraction_1_has_a_gpu_alone_and_without_mps() {
    let cluster = super::cluster("a_pod_with_the_fraction_1_has_a_gpu_alone_and_without_mps").await;
    create(&cluster, "small", json!({"memory": "2000Mi"})).await;
    cluster.wait_ready("small").await;
    let beside = wait_placed(&cluster, "small").await;
    create(&cluster, "all", json!({"fraction": "1"})).await;
    let mut two = share(json!({"fraction": "1"}));
    two["requests"][0]["exactly"]["count"] = json!(2);
    cluster.create(claim("two", two)).await;
    cluster.create(as_nobody(user_of("two", "two"))).await;
    for name in ["all", "two"] {
        cluster.wait_ready(name).await;
        assert_eq!(env(&cluster, name), [""; 0], "{name}");
    }
    let device = wait_placed(&cluster, "all").await;
    let pair = cluster.devices_of("two").await;
    let mut given: BTreeSet<&String> = pair.iter().collect();
    given.extend([&device, &beside]);
    assert_eq!(given.len(), 4, "{given:?}");
    let uuid = cluster.attribute(NODE, &device, "uuid").await;
    assert_eq!(cluster.inside("all", "main").gpus.len(), 1);
    assert_eq!(cluster.inside("two", "main").gpus.len(), 2);
    let held = holds(&cluster).await;
    assert!(given.iter().all(|device| held.contains(*device)), "{held:?}");
    let said = data(&cluster, "all").await;
    assert_eq!(
        (&said["exclusive"], &said["isolation"], &said["uuid"]),
        (&json!(true), &json!("whole"), &json!(uuid))
    );
    wait_told(&cluster, "all", "for this claim alone").await;

    // One daemon, that of the share; no other GPU is in EXCLUSIVE_PROCESS mode.
    let of_share = cluster.attribute(NODE, &beside, "uuid").await;
    assert_eq!(served(&cluster).await, BTreeSet::from([of_share.clone()]));
    assert_eq!(cluster.exclusive_boards(NODE).len(), 1);
    let explained = super::explain::explain(&cluster, &["claim/all"]).expect("it is placed");
    assert!(explained.contains("the whole GPU, for this claim alone"), "{explained}");

    // Shares go elsewhere, and come back once the pod has ended.
    let pinned = |name: &str| {
        let mut devices = share(json!({"memory": "1Gi"}));
        devices["requests"][0] = crate::manifests::of_gpu(&uuid, devices["requests"][0].clone());
        claim(name, devices)
    };
    cluster.create(pinned("back")).await;
    cluster.create(as_nobody(user_of("back", "back"))).await;
    wait_told(&cluster, "back", super::WAITS).await;
    create(&cluster, "next", json!({"memory": "1Gi"})).await;
    cluster.wait_ready("next").await;
    assert!(![&device, &pair[0], &pair[1]].contains(&&wait_placed(&cluster, "next").await));
    cluster.delete("all").await;
    cluster.rig.kubectl(&["-n", &cluster.namespace, "delete", "resourceclaim", "all"]);
    cluster.wait_ready("back").await;
    assert_eq!(wait_placed(&cluster, "back").await, device);
    assert!(served(&cluster).await.contains(&uuid));
    cluster.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_limit_beside_the_fraction_1_is_refused_with_its_path() {
    let cluster = super::cluster("a_limit_beside_the_fraction_1_is_refused_with_its_path").await;
    let limited = claim("limited", share(json!({"fraction": "1", "maxProcesses": 4})));
    let refused = || async { cluster.try_create(limited.clone(), true).await.err() };
    // The webhook may still be starting.
    let said = wait_until("the claim to be refused", PATIENCE, refused).await;
    assert!(said.contains("parameters.maxProcesses: limits a share, but the fraction 1"), "{said}");
    cluster.end().await;
}
