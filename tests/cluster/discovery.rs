//! GPUs that change while the plugin runs, and what it says of them.

use std::fs;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use crate::controller;
use crate::manifests::{as_nobody, by_template, claim, gpu, on, parameters, template, time_slicing, user_of};
use crate::rig::{skipped, wait_until};
use crate::test_cluster::{PATIENCE, SOON, TestCluster, container_run, devices_of, minor_of};

const NODE: &str = "node-a";
const AILMENTS: &str = "/var/lib/kubelet/plugins/gpu.nvidia.com/ailments.json";
const STATE: &str = "/var/lib/kubelet/plugins/gpu.nvidia.com/ledger";
/// As hack/test-cluster.sh stages it.
const MIG: &str = "1g.10gb,1g.10gb,2g.20gb";

/// Puts the simulated node right when dropped, whatever became of the test.
pub struct AtEnd<'a>(pub &'a TestCluster, pub &'a [&'a str]);

impl Drop for AtEnd<'_> {
    fn drop(&mut self) {
        // Xids are remembered until a reset; who resets a board alone removes this.
        let _ = fs::remove_file(self.0.host(NODE, AILMENTS));
        if let Err(said) = self.0.try_fake(NODE, self.1) {
            println!("putting the node right: fake-nvml {:?}: {said}", self.1);
        }
    }
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn mig_devices_are_made_anew() {
    let cluster = TestCluster::of_env("mig_devices_are_made_anew").await;
    let before = cluster.published_names(NODE).await;
    let plugin = cluster.plugin(NODE).await;
    let undo = AtEnd(&cluster, &["set-mig", "7", MIG]);
    cluster.fake(NODE, &["set-mig", "7", "3g.40gb,2g.20gb"]);
    cluster.fake(NODE, &["event", "7", "mig-config"]);
    let changed = || async {
        let names = cluster.published_names(NODE).await;
        let has = |profile: &str| names.iter().any(|name| name.starts_with(&format!("gpu-7-mig-{profile}-")));
        (has("3g40gb") && has("2g20gb") && !has("1g10gb")).then_some(())
    };
    // At once, save that changes are written every 10 s at most.
    wait_until("the slices to have the new MIG devices", Duration::from_secs(15), changed).await;
    cluster.fake(NODE, &["set-mig", "7", MIG]);
    cluster.fake(NODE, &["event", "7", "mig-config"]);
    let back = || async { (cluster.published_names(NODE).await == before).then_some(()) };
    wait_until("the slices to be as they were", Duration::from_secs(15), back).await;
    assert_eq!(cluster.plugin(NODE).await.metadata.uid, plugin.metadata.uid, "without a restart");
    drop(undo);
    cluster.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_driver_that_is_not_loaded_empties_the_pool_and_says_why() {
    let cluster = TestCluster::of_env("a_driver_that_is_not_loaded_empties_the_pool_and_says_why").await;
    let before = cluster.published(NODE).await;
    let undo = AtEnd(&cluster, &["driver", "load"]);
    cluster.fake(NODE, &["driver", "unload"]);
    // One that starts without a driver offers nothing, and runs.
    cluster.kill9(NODE, &cluster.plugin(NODE).await);
    // One slice without devices; where kubelet has taken the plugin for gone, its slices are none for a while.
    let empty = || async {
        let slices = cluster.slices(NODE).await;
        let devices = slices.iter().flat_map(|slice| slice.spec.devices.iter().flatten()).count();
        (!slices.is_empty() && devices == 0).then_some(())
    };
    wait_until("the pool to be published empty, in a slice without devices", PATIENCE, empty).await;
    let state = cluster.state(NODE).await;
    let reason = state["slices"]["emptyBecause"].as_str().unwrap_or_default();
    assert!(reason.contains("the NVIDIA kernel module is not loaded"), "the state says why: {reason:?}");
    cluster.fake(NODE, &["driver", "load"]);
    let back = || async { (cluster.published(NODE).await == before).then_some(()) };
    wait_until("the devices to be back", Duration::from_secs(45), back).await;
    drop(undo);
    cluster.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_gpu_that_is_lost_stays_published_and_is_told_unhealthy() {
    let cluster = TestCluster::of_env("a_gpu_that_is_lost_stays_published_and_is_told_unhealthy").await;
    let before = cluster.published_names(NODE).await;
    cluster.create(claim("c", json!({"requests": [tolerant(gpu("gpu"))]}))).await;
    cluster.create(on(NODE, user_of("c", "p"))).await;
    cluster.wait_ready("p").await;
    let device = cluster.devices_of("c").await.remove(0);
    let board = minor_of(&device).to_string();
    let words = ["recover", board.as_str()];
    let undo = AtEnd(&cluster, &words);
    // Fallen off the bus: Xid 79 is the last that is heard of it.
    cluster.fake(NODE, &["xid", &board, "79"]);
    let heard = || async { cluster.state(NODE).await["ailments"][0]["words"].as_str().map(str::to_owned) };
    let words_of_xid = wait_until("the plugin to hear of the Xid", Duration::from_secs(10), heard).await;
    assert!(words_of_xid.starts_with("Xid 79"), "{words_of_xid}");
    cluster.fake(NODE, &["lose", &board]);
    let noticed = || async { health(&cluster, &board).await.filter(|health| health != "Healthy") };
    let reason = wait_until("the plugin to notice", Duration::from_secs(10), noticed).await;
    println!("told: {reason}");
    assert_eq!(cluster.published_names(NODE).await, before);
    if cluster.release().await >= 36 {
        let told = || async {
            let pod: Pod = cluster.api::<Pod>().get("p").await.ok()?;
            let status = serde_json::to_value(pod.status?.container_statuses?.first()?).ok()?;
            let resources = status["allocatedResourcesStatus"].as_array()?.clone();
            resources.iter().any(|one| one["resources"][0]["health"] == "Unhealthy").then_some(())
        };
        wait_until("the pod's status to say Unhealthy", PATIENCE, told).await;
        let tainted = || async { taints(&cluster, &device).await.contains(&LOST.to_owned()).then_some(()) };
        wait_until("the GPU to be tainted", PATIENCE, tainted).await;
    }
    // A claim on a broken GPU is released as any other.
    cluster.delete("p").await;
    cluster.wait_clean().await;
    cluster.fake(NODE, &["recover", &board]);
    let healthy = || async { health(&cluster, &board).await.filter(|health| health == "Healthy") };
    wait_until("the GPU to answer again", PATIENCE, healthy).await;
    drop(undo);
    wait_well(&cluster).await;
    cluster.end().await;
}

/// The cluster's own controller takes pods off a device with such a taint. Nothing is heard of an Xid here:
/// once a board has left the bus, NVML may not tell of it any more.
#[tokio::test]
#[ignore = "needs a rig"]
async fn a_pod_on_a_gpu_that_is_lost_is_evicted_and_another_gpu_is_given() {
    let cluster =
        TestCluster::of_env("a_pod_on_a_gpu_that_is_lost_is_evicted_and_another_gpu_is_given").await;
    if cluster.release().await < 36 {
        skipped("devices have no taints before Kubernetes 1.36");
        return;
    }
    cluster.create(template("one-gpu", json!({"requests": [gpu("gpu")]}))).await;
    cluster.create(on(NODE, by_template("one-gpu", "p"))).await;
    cluster.wait_ready("p").await;
    let device = devices_of(&cluster.claim_of("p").await).remove(0);
    let board = minor_of(&device).to_string();
    let words = ["recover", board.as_str()];
    let undo = AtEnd(&cluster, &words);
    cluster.fake(NODE, &["lose", &board]);
    cluster.gone("p").await;
    cluster.create(on(NODE, by_template("one-gpu", "q"))).await;
    cluster.wait_ready("q").await;
    assert_ne!(devices_of(&cluster.claim_of("q").await), [device]);
    drop(undo);
    wait_well(&cluster).await;
    cluster.end().await;
}

/// No reset has been seen: the board is not trusted because another process looks at it.
#[tokio::test]
#[ignore = "needs a rig"]
async fn an_xid_is_remembered_by_the_next_plugin_until_somebody_says_otherwise() {
    let test = "an_xid_is_remembered_by_the_next_plugin_until_somebody_says_otherwise";
    let cluster = TestCluster::of_env(test).await;
    if cluster.release().await < 36 {
        skipped("devices have no taints before Kubernetes 1.36");
        return;
    }
    let device = "gpu-0";
    let undo = AtEnd(&cluster, &["recover", "0"]);
    cluster.fake(NODE, &["xid", "0", "48"]);
    let ailing = || async { taints(&cluster, device).await.into_iter().find(|taint| taint.contains("=48:")) };
    let taint = wait_until("the GPU to be tainted", PATIENCE, ailing).await;
    assert!(taint.ends_with(":NoSchedule"), "{taint}");
    // It is written down a moment after it is told.
    let written = || async { cluster.host(NODE, AILMENTS).exists().then_some(()) };
    wait_until("the Xid to be written down", SOON, written).await;
    let plugin = cluster.plugin(NODE).await;
    cluster.kill9(NODE, &plugin);
    let restarted = || async {
        (container_run(cluster.plugins(NODE).await.first()?).1 > container_run(&plugin).1).then_some(())
    };
    wait_until("the plugin to be restarted", PATIENCE, restarted).await;
    cluster.registered(NODE, PATIENCE).await;
    let known = || async {
        let state = cluster.state(NODE).await;
        let looked = state["discovery"]["looks"].as_u64().is_some_and(|looks| looks > 0);
        looked.then(|| state["ailments"].clone())
    };
    let ailments = wait_until("its first look", PATIENCE, known).await;
    assert_eq!(ailments[0]["devices"], json!([device]), "{ailments}");
    assert_eq!(taints(&cluster, device).await, [taint]);
    drop(undo);
    wait_well(&cluster).await;
    cluster.end().await;
}

const LOST: &str = "gpu.nvidia.com/gpu-lost=79:NoExecute";

/// The same request, for devices whatever their taints.
fn tolerant(mut request: Value) -> Value {
    request["exactly"]["tolerations"] = json!([{"operator": "Exists"}]);
    request
}

/// `key=value:effect` of each taint of the device, as published.
async fn taints(cluster: &TestCluster, device: &str) -> Vec<String> {
    let devices = cluster.published(NODE).await.into_iter().filter(|one| one.name == device);
    let all = devices.flat_map(|one| one.taints.unwrap_or_default());
    all.map(|one| format!("{}={}:{}", one.key, one.value.unwrap_or_default(), one.effect)).collect()
}

/// Waits until nothing ails the node's devices, and none is told to.
pub async fn wait_well(cluster: &TestCluster) {
    let well = || async {
        let ailing = cluster.state(NODE).await["ailments"].as_array().is_some_and(|all| !all.is_empty());
        let tainted = cluster.published(NODE).await.into_iter().any(|device| device.taints.is_some());
        (!ailing && !tainted).then_some(())
    };
    wait_until("all devices to be well", PATIENCE, well).await;
}

/// Its setting cannot be put back: the pod ends all the same, the GPU stays taken until it is back.
#[tokio::test]
#[ignore = "needs a rig"]
async fn a_lost_gpu_with_a_time_slice_keeps_no_pod_from_ending() {
    let cluster = TestCluster::of_env("a_lost_gpu_with_a_time_slice_keeps_no_pod_from_ending").await;
    let mut sliced = time_slicing("Medium");
    sliced["requests"][0] = tolerant(sliced["requests"][0].take());
    cluster.create(claim("c", sliced)).await;
    cluster.create(on(NODE, user_of("c", "p"))).await;
    cluster.wait_ready("p").await;
    let board = minor_of(&cluster.devices_of("c").await[0]).to_string();
    let words = ["recover", board.as_str()];
    let undo = AtEnd(&cluster, &words);
    cluster.fake(NODE, &["xid", &board, "79"]);
    cluster.fake(NODE, &["lose", &board]);
    cluster.delete("p").await;
    assert_eq!(cluster.fake_state(NODE, &board)["time_slice"], 2, "nvidia-smi cannot reach it");
    assert!(cluster.files(NODE, "/var/run/cdi").is_empty(), "no container can be given the GPU any more");
    assert_eq!(cluster.files(NODE, STATE).len(), 1, "what is owed is recorded");
    cluster.fake(NODE, &["recover", &board]);
    // The sweeper goes on trying: every minute, and when the plugin starts.
    cluster.kill9(NODE, &cluster.plugin(NODE).await);
    cluster.wait_clean().await;
    assert_eq!(cluster.fake_state(NODE, &board)["time_slice"], 0);
    drop(undo);
    wait_well(&cluster).await;
    cluster.end().await;
}

/// What the plugin says of a board: Healthy, or why not.
async fn health(cluster: &TestCluster, board: &str) -> Option<String> {
    let state = cluster.state(NODE).await;
    let boards = state["inventory"]["Found"]["gpus"].as_array()?;
    let own =
        boards.iter().find(|one| one["minor"].as_u64().is_some_and(|minor| minor.to_string() == board))?;
    Some(own["health"].as_str().map_or_else(|| own["health"].to_string(), str::to_owned))
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn inspect_shows_the_devices() {
    let cluster = TestCluster::of_env("inspect_shows_the_devices").await;
    let plugin = cluster.plugin(NODE).await.metadata.name.unwrap();
    let said = cluster.rig.kubectl(&["-n", "tranche-system", "exec", &plugin, "--", "tranche", "inspect"]);
    for device in cluster.published(NODE).await {
        let attributes = device.attributes.unwrap_or_default();
        let uuid = attributes.get("uuid").and_then(|uuid| uuid.string.clone()).unwrap_or_default();
        assert!(said.contains(&device.name) || said.contains(&uuid), "{} is not in:\n{said}", device.name);
    }
    // In the other pods the same command tells what these do: the daemon of a share, and the GPU that is held for it.
    let config = parameters("tranche.dev/v1alpha1", "GpuShare", json!({"memory": "2000Mi"}));
    let request = json!({"name": "gpu", "exactly": {"deviceClassName": "shared.gpu.nvidia.com"}});
    cluster.create(claim("share", json!({"requests": [request], "config": config}))).await;
    cluster.create(on(NODE, as_nobody(user_of("share", "share")))).await;
    cluster.wait_ready("share").await;
    let device = cluster.devices_of("share").await.remove(0);
    let uuid = cluster.attribute(NODE, &device, "uuid").await;
    let inspect = |pod: &str| {
        cluster.rig.attempt(&["kubectl", "-n", "tranche-system", "exec", pod, "--", "tranche", "inspect"])
    };
    let serves = || async {
        let pod = cluster.pods_of("mps", NODE).await.first()?.metadata.name.clone()?;
        let said = inspect(&pod).ok()?;
        said.lines().any(|line| line.contains(&uuid) && line.contains("Serving (")).then_some(())
    };
    wait_until("tranche mps to tell of the share's daemon", PATIENCE, serves).await;
    let held = format!("{NODE}/{device}");
    let holds = || async {
        let said = inspect(&controller::leading_pod(&cluster).await?).ok()?;
        (said.contains("GPUS HELD") && said.lines().any(|line| line.starts_with(&held))).then_some(())
    };
    wait_until("the controller to tell of the GPU that it holds", PATIENCE, holds).await;
    cluster.end().await;
}
