//! Boards that come back as others: one was replaced, the node's machine moved, or somebody cut one into MIG devices.

use std::fs;
use std::path::PathBuf;

use k8s_openapi::api::resource::v1::ResourceClaim;
use serde_json::{Value, json};

use super::{NODE, create, wait_placed};
use crate::discovery::AtEnd;
use crate::manifests::{as_nobody, claim, gpu, user_of};
use crate::rig::wait_until;
use crate::test_cluster::{PATIENCE, TestCluster, minor_of};

/// What the node is made of, as it was; put back at the end.
struct Boards {
    path: PathBuf,
    before: String,
}

impl Boards {
    fn of(cluster: &TestCluster) -> Self {
        let path = cluster.host(NODE, "/run/fake-nvml/control.json");
        Self { before: fs::read_to_string(&path).expect("the node has simulated GPUs"), path }
    }

    /// Other boards stand where these were, from now on.
    fn replace(&self, minors: &[u32]) {
        let mut control: Value = serde_json::from_str(&self.before).expect("it is JSON");
        for minor in minors {
            control["gpus"][minor.to_string()]["uuid"] = json!(uuid(*minor));
        }
        self.write(&control.to_string());
    }

    fn write(&self, text: &str) {
        let fresh = self.path.with_extension("fresh");
        fs::write(&fresh, text).and_then(|()| fs::rename(&fresh, &self.path)).expect("it can be written");
    }
}

impl Drop for Boards {
    fn drop(&mut self) {
        self.write(&self.before);
    }
}

fn uuid(minor: u32) -> String {
    format!("GPU-77777777-0000-4000-8000-00000000000{minor}")
}

/// What a claim's condition says while its device is not healthy.
async fn wait_gone(cluster: &TestCluster, name: &str) -> String {
    let told = || async {
        let claim = cluster.api::<ResourceClaim>().get(name).await.ok()?;
        let claim = serde_json::to_value(claim).ok()?;
        let conditions = claim["status"]["devices"][0]["conditions"].as_array()?.clone();
        let mut unhealthy = conditions.into_iter().filter(|one| one["status"] == "False");
        let found = unhealthy.find(|one| one["type"] == "DeviceHealthy")?;
        found["message"].as_str().map(str::to_owned)
    };
    wait_until(&format!("claim {name} to be told that its GPU is gone"), PATIENCE, told).await
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_share_and_a_whole_gpu_whose_boards_were_replaced_are_told_so_and_the_next_pods_run_on_the_new_ones()
 {
    let test = "a_share_and_a_whole_gpu_whose_boards_were_replaced_are_told_so_and_the_next_pods_run_on_the_new_ones";
    let cluster = super::cluster(test).await;
    let boards = Boards::of(&cluster);
    create(&cluster, "share", json!({"memory": "2000Mi"})).await;
    cluster.create(claim("whole", json!({"requests": [gpu("gpu")]}))).await;
    cluster.create(as_nobody(user_of("whole", "whole"))).await;
    for pod in ["share", "whole"] {
        cluster.wait_ready(pod).await;
    }
    let devices = [wait_placed(&cluster, "share").await, cluster.devices_of("whole").await.remove(0)];
    let before = [
        cluster.attribute(NODE, &devices[0], "uuid").await,
        cluster.attribute(NODE, &devices[1], "uuid").await,
    ];
    boards.replace(&devices.each_ref().map(|device| minor_of(device)));
    for (claim, uuid) in ["share", "whole"].into_iter().zip(&before) {
        let words = wait_gone(&cluster, claim).await;
        let gone = format!("{uuid} is not on the node any more: a GPU was replaced");
        assert!(words.contains(&gone) && words.contains("Delete the pods that use the claim"), "{words}");
        let told = || async {
            let events = cluster.events(claim).await;
            events.into_iter().find(|event| event.starts_with("DeviceUnhealthy") && event.contains(&gone))
        };
        println!("{}", wait_until("the pod to have an event", PATIENCE, told).await);
    }
    // As the words advise.
    for pod in ["share", "whole"] {
        cluster.delete(pod).await;
        cluster.create(as_nobody(user_of(pod, pod))).await;
    }
    for pod in ["share", "whole"] {
        cluster.wait_ready(pod).await;
        let device = cluster.devices_of(pod).await.remove(0);
        let found = cluster.inside(pod, "main").gpus;
        assert_eq!(found, [minor_of(&device)], "{pod}");
    }
    for pod in ["share", "whole"] {
        cluster.delete(pod).await;
    }
    drop(boards);
    for (device, uuid) in devices.iter().zip(&before) {
        let back = || async { (cluster.attribute(NODE, device, "uuid").await == *uuid).then_some(()) };
        wait_until(&format!("{device} to be as it was"), PATIENCE, back).await;
    }
    cluster.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_share_whose_gpu_was_cut_into_mig_devices_is_told_so_and_the_next_pod_runs_on_another() {
    let test = "a_share_whose_gpu_was_cut_into_mig_devices_is_told_so_and_the_next_pod_runs_on_another";
    let cluster = super::cluster(test).await;
    create(&cluster, "share", json!({"memory": "2000Mi"})).await;
    cluster.wait_ready("share").await;
    let device = wait_placed(&cluster, "share").await;
    let uuid = cluster.attribute(NODE, &device, "uuid").await;
    let board = minor_of(&device).to_string();
    let off = ["set-mig", &board, "off"];
    let undo = AtEnd(&cluster, &off);
    cluster.fake(NODE, &["set-mig", &board, "1g.10gb,2g.20gb"]);
    let words = wait_gone(&cluster, "share").await;
    let gone = format!("{uuid} is not on the node any more: its GPU is divided otherwise now (MIG)");
    assert!(words.contains(&gone) && words.contains("Delete the pods that use the claim"), "{words}");
    // As the words advise.
    cluster.delete("share").await;
    cluster.create(as_nobody(user_of("share", "share"))).await;
    cluster.wait_ready("share").await;
    let other = wait_placed(&cluster, "share").await;
    assert_ne!(other, device);
    assert_eq!(cluster.inside("share", "main").gpus, [minor_of(&other)]);
    cluster.delete("share").await;
    drop(undo);
    let back = || async { cluster.published_names(NODE).await.contains(&device).then_some(()) };
    wait_until(&format!("{device} to be as it was"), PATIENCE, back).await;
    cluster.end().await;
}
