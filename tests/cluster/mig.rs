//! MIG devices that are made for claims and end with them, placed by kube-scheduler with the counters of KEP-4815.

use std::collections::BTreeSet;
use std::time::Instant;

use futures::StreamExt;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::Device;
use serde_json::{Map, Value, json};

use crate::discovery::AtEnd;
use crate::manifests::{
    allocation, as_nobody, by_template, claim, container, gpu, of_gpu, on, parameters, pod, template, user_of,
};
use crate::monitoring::apply;
use crate::rig::wait_until;
use crate::shares::{metrics, mps_env, settings, wait_unschedulable};
use crate::test_cluster::{PATIENCE, SYSTEM, TestCluster, devices_of, failed_operations, is_ready, sum};

const NODE: &str = "node-a";
/// Whole in other tests.
const BOARD: &str = "6";
const CREATE: &str = "nvmlDeviceCreateGpuInstanceWithPlacement";

/// Puts the board into MIG mode, and has the plugin carve it until the test ends.
async fn carve(cluster: &TestCluster) {
    cluster.fake(NODE, &["set-mig", BOARD, "on"]);
    settings::set(cluster, &[&format!("--mig-on-demand={BOARD}")]).await;
    let published = || async {
        let names = cluster.published_names(NODE).await;
        let of_board = names.iter().filter(|name| name.starts_with(&format!("gpu-{BOARD}-mig-"))).count();
        // NVML's placements of an H100: 7 and 7 of 1g, 4 of 1g double, 3 of 2g, 2 of 3g, one each of 4g and 7g.
        (of_board == 25).then_some(())
    };
    wait_until("all that can be made of the board", PATIENCE, published).await;
    assert_eq!(made(cluster), [0_u64; 0], "nothing of an earlier test is on it");
}

/// A template for one MIG device of the board.
async fn ask_for(cluster: &TestCluster, name: &str, profile: &str) {
    let board = cluster.attribute(NODE, &format!("gpu-{BOARD}-mig-7g80gb-0-0"), "parentUUID").await;
    cluster.create(template(name, json!({"requests": [of_profile(&board, profile)]}))).await;
}

/// A request for one MIG device of that profile, of the board with that UUID.
fn of_profile(board: &str, profile: &str) -> Value {
    let own = "device.attributes['gpu.nvidia.com']";
    let is = format!("{own}.profile == '{profile}' && {own}.parentUUID == '{board}'");
    json!({"name": "gpu", "exactly": {"deviceClassName": "mig.nvidia.com", "selectors": [{"cel": {"expression": is}}]}})
}

/// GPU instances that are on the board: their first memory slices.
fn made(cluster: &TestCluster) -> Vec<u64> {
    let state = cluster.fake_state(NODE, BOARD);
    let instances = state["mig"]["value"]["instances"].as_array().cloned().unwrap_or_default();
    let mut starts: Vec<_> = instances.iter().map(|one| one["start"].as_u64().unwrap()).collect();
    starts.sort_unstable();
    starts
}

async fn wait_made(cluster: &TestCluster, what: &str, wanted: impl Fn(&[u64]) -> bool) {
    let seen = || async { wanted(&made(cluster)).then_some(()) };
    wait_until(what, PATIENCE, seen).await;
}

/// Another driver on the node, whose pool and counters have the names of ours, and a claim that has all of what it counts.
async fn put_stranger(cluster: &TestCluster) {
    let (driver, set) = ("gpu.example.com", format!("gpu-{BOARD}-counter-set"));
    let one = |name: String| (name, json!({"value": "1"}));
    let mut counters: Map<String, Value> = (0..7).map(|nth| one(format!("memory-slice-{nth}"))).collect();
    counters.insert("compute-slices".to_owned(), json!({"value": "7"}));
    let slice = |name: &str, field: &str, content: Value| {
        let mut spec = json!({"driver": driver, "nodeName": NODE,
            "pool": {"name": NODE, "generation": 1, "resourceSliceCount": 2}});
        spec[field] = content;
        json!({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": name}, "spec": spec})
    };
    let all = json!({"name": "all", "capacity": {"memory": {"value": "1Gi"}},
        "consumesCounters": [{"counterSet": set, "counters": counters}]});
    let names = ["stranger-counters", "stranger-devices"];
    let slices = [
        slice(names[0], "sharedCounters", json!([{"name": set, "counters": counters}])),
        slice(names[1], "devices", json!([all])),
    ];
    let delete = ["kubectl", "delete", "resourceslices", names[0], names[1], "--ignore-not-found"];
    cluster.rig.on_end(&delete);
    apply(cluster, &json!({"apiVersion": "v1", "kind": "List", "items": slices}).to_string(), false);
    let mut status = allocation(NODE, "all");
    status["allocation"]["devices"]["results"][0]["driver"] = json!(driver);
    cluster.create_with_status("stranger", gpu("gpu"), status).await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn seven_small_devices_are_made_on_one_board_and_then_two_large_ones() {
    let test = "seven_small_devices_are_made_on_one_board_and_then_two_large_ones";
    let cluster = TestCluster::of_env(test).await;
    let undo = AtEnd(&cluster, &["set-mig", BOARD, "off"]);
    carve(&cluster).await;
    assert_eq!(made(&cluster), [0; 0], "nothing is made before it is asked for");
    // Counters belong to a pool of one driver: seven fit all the same.
    put_stranger(&cluster).await;
    ask_for(&cluster, "small", "1g.10gb").await;
    let names: Vec<String> = (0..7).map(|n| format!("small-{n}")).collect();
    for name in &names {
        cluster.create(on(NODE, by_template("small", name))).await;
    }
    cluster.wait_all_ready(&names).await;
    assert_eq!(made(&cluster), [0, 1, 2, 3, 4, 5, 6]);
    let (mut devices, mut caps) = (BTreeSet::new(), BTreeSet::new());
    for name in &names {
        devices.extend(devices_of(&cluster.claim_of(name).await));
        let inside = cluster.inside(name, "main");
        assert_eq!(
            (inside.visible.as_str(), &inside.gpus[..], inside.caps.len()),
            ("void", &[6][..], 2),
            "{name}"
        );
        caps.extend(inside.caps);
    }
    assert_eq!((devices.len(), caps.len()), (7, 14), "an instance of its own for each: {devices:?}");

    cluster.create(on(NODE, by_template("small", "eighth"))).await;
    println!("beside them: {}", wait_unschedulable(&cluster, "eighth").await);
    cluster.delete("small-3").await;
    cluster.wait_ready("eighth").await;
    let rest: Vec<String> =
        names.into_iter().filter(|name| name != "small-3").chain(["eighth".to_owned()]).collect();
    cluster.delete_all(&rest).await;
    wait_made(&cluster, "the board to be empty", |starts| starts.is_empty()).await;

    for (name, profile) in [("three", "3g.40gb"), ("four", "4g.40gb")] {
        ask_for(&cluster, name, profile).await;
        cluster.create(on(NODE, by_template(name, name))).await;
    }
    cluster.wait_all_ready(&["three".to_owned(), "four".to_owned()]).await;
    assert_eq!(made(&cluster), [0, 4]);
    cluster.delete_all(&["three".to_owned(), "four".to_owned()]).await;
    wait_made(&cluster, "the board to be empty again", |starts| starts.is_empty()).await;
    drop(undo);
    cluster.end().await;
}

/// As with devices that are there already: two of one board for a container each, one for two containers by time or MPS.
#[tokio::test]
#[ignore = "needs a rig"]
async fn containers_of_a_pod_have_devices_of_their_own_or_share_one() {
    let test = "containers_of_a_pod_have_devices_of_their_own_or_share_one";
    let cluster = TestCluster::of_env(test).await;
    let undo = AtEnd(&cluster, &["set-mig", BOARD, "off"]);
    carve(&cluster).await;
    let of_profile = |name: &str, profile: &str| {
        let own = "device.attributes['gpu.nvidia.com']";
        // What is made for claims has no UUID yet.
        let is = format!("{own}.profile == '{profile}' && !('uuid' in {own})");
        json!({"name": name, "exactly":
            {"deviceClassName": "mig.nvidia.com", "selectors": [{"cel": {"expression": is}}]}})
    };
    let configs = |requests: &[&str], sharing: Value| {
        let fields = json!({"sharing": sharing});
        let mut config = parameters("resource.nvidia.com/v1beta1", "MigDeviceConfig", fields);
        config[0]["requests"] = json!(requests);
        config
    };
    let pod_with = |name: &str, uses: [Value; 2]| {
        let [left, right] = uses;
        let containers = json!([container("left", json!([left])), container("right", json!([right]))]);
        as_nobody(pod(name, json!([{"name": "c", "resourceClaimName": name}]), containers))
    };
    let same = json!([{"requests": ["small", "half"], "matchAttribute": "gpu.nvidia.com/parentUUID"}]);
    let requests = json!([of_profile("small", "1g.10gb"), of_profile("half", "3g.40gb")]);
    let sliced = configs(&["small"], json!({"strategy": "TimeSlicing"}));
    let devices = json!({"requests": requests, "constraints": same, "config": sliced});
    cluster.create(claim("apart", devices)).await;
    let uses = ["small", "half"].map(|request| json!({"name": "c", "request": request}));
    cluster.create(pod_with("apart", uses)).await;
    cluster.wait_ready("apart").await;
    let caps = ["left", "right"].map(|side| cluster.inside("apart", side).caps);
    assert!(caps.iter().all(|caps| caps.len() == 2) && caps[0] != caps[1], "{caps:?}");
    assert_eq!(made(&cluster).len(), 2);

    let mps = json!({"defaultActiveThreadPercentage": 50, "defaultPinnedDeviceMemoryLimit": "4Gi"});
    for (name, sharing, variables) in [
        ("by-time", json!({"strategy": "TimeSlicing"}), 0),
        ("by-mps", json!({"strategy": "MPS", "mpsConfig": mps}), 3),
    ] {
        let devices =
            json!({"requests": [of_profile("gpu", "2g.20gb")], "config": configs(&["gpu"], sharing)});
        cluster.create(claim(name, devices)).await;
        cluster.create(pod_with(name, [json!({"name": "c"}), json!({"name": "c"})])).await;
        cluster.wait_ready(name).await;
        let caps = ["left", "right"].map(|side| cluster.inside(name, side).caps);
        assert!(caps[0].len() == 2 && caps[0] == caps[1], "{name}: {caps:?}");
        for side in ["left", "right"] {
            assert_eq!(mps_env(&cluster, name, side).len(), variables, "{name}/{side}");
        }
        assert_eq!(made(&cluster).len(), 3, "{name}");
        cluster.delete(name).await;
        wait_made(&cluster, "the shared device to be ended", |starts| starts.len() == 2).await;
    }
    cluster.delete("apart").await;
    wait_made(&cluster, "the board to be empty", |starts| starts.is_empty()).await;
    drop(undo);
    cluster.end().await;
}

/// The instance is there, NVML has not said so yet, and the plugin dies.
#[tokio::test]
#[ignore = "needs a rig"]
async fn a_plugin_that_is_killed_amid_a_creation_leaves_no_instance_behind() {
    let test = "a_plugin_that_is_killed_amid_a_creation_leaves_no_instance_behind";
    let cluster = TestCluster::of_env(test).await;
    let undo = AtEnd(&cluster, &["set-mig", BOARD, "off"]);
    let faults = AtEnd(&cluster, &["clear"]);
    carve(&cluster).await;
    ask_for(&cluster, "small", "1g.10gb").await;
    cluster.fake(NODE, &["fault", CREATE, "none", "--done", "--delay-ms", "20000", "--times", "1"]);
    cluster.create(on(NODE, by_template("small", "unlucky"))).await;
    wait_made(&cluster, "an instance that nobody knows of yet", |starts| starts.len() == 1).await;
    cluster.kill9(NODE, &cluster.plugin(NODE).await);
    cluster.wait_ready("unlucky").await;
    assert_eq!(made(&cluster).len(), 1, "the one that was half made is gone, or is the pod's");
    assert_eq!(cluster.inside("unlucky", "main").caps.len(), 2);
    cluster.delete("unlucky").await;
    wait_made(&cluster, "the board to be empty", |starts| starts.is_empty()).await;
    drop(faults);
    drop(undo);
    cluster.end().await;
}

/// Seven at once have a device; an eighth waits until one is made for it on what another leaves.
const AT_ONCE: usize = 7;

#[tokio::test]
#[ignore = "needs a rig"]
async fn many_pods_with_a_device_of_their_own_leave_nothing_behind() {
    let test = "many_pods_with_a_device_of_their_own_leave_nothing_behind";
    let cluster = TestCluster::of_env(test).await;
    const PODS: usize = 200;
    let undo = AtEnd(&cluster, &["set-mig", BOARD, "off"]);
    carve(&cluster).await;
    ask_for(&cluster, "small", "1g.10gb").await;
    let before = failed_operations(&cluster.metrics(NODE).await);
    let begin = Instant::now();
    let life = async |number: usize| {
        let name = format!("p-{number}");
        cluster.create(on(NODE, by_template("small", &name))).await;
        cluster.wait_ready(&name).await;
        cluster.delete(&name).await;
    };
    futures::stream::iter(0..PODS).map(life).buffer_unordered(AT_ONCE).collect::<Vec<()>>().await;
    println!("{PODS} pods in {:.1} s", begin.elapsed().as_secs_f64());
    cluster.wait_clean().await;
    wait_made(&cluster, "the board to be empty", |starts| starts.is_empty()).await;
    let metrics = cluster.metrics(NODE).await;
    assert_eq!(sum(&metrics, "tranche_mig_creation_failures_total"), 0.0);
    assert_eq!(failed_operations(&metrics) - before, 0.0, "no try failed");
    assert_eq!(sum(&metrics, "tranche_ailments{"), 0.0);
    drop(undo);
    cluster.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn kubelet_and_the_plugin_may_end_while_a_device_is_made() {
    let test = "kubelet_and_the_plugin_may_end_while_a_device_is_made";
    let cluster = TestCluster::of_env(test).await;
    let undo = AtEnd(&cluster, &["set-mig", BOARD, "off"]);
    let faults = AtEnd(&cluster, &["clear"]);
    carve(&cluster).await;
    ask_for(&cluster, "small", "1g.10gb").await;
    for (name, kubelet) in [("kubelets", true), ("both", false)] {
        cluster.fake(NODE, &["fault", CREATE, "none", "--done", "--delay-ms", "15000", "--times", "1"]);
        cluster.create(on(NODE, by_template("small", name))).await;
        wait_made(&cluster, "an instance that nobody knows of yet", |starts| starts.len() == 1).await;
        cluster.rig.run(&["restart", NODE, "kubelet"]);
        if !kubelet {
            cluster.kill9(NODE, &cluster.plugin(NODE).await);
        }
        cluster.wait_ready(name).await;
        assert_eq!(made(&cluster).len(), 1, "{name}: one for the pod");
        assert_eq!(cluster.inside(name, "main").caps.len(), 2, "{name}");
        cluster.delete(name).await;
        wait_made(&cluster, "the board to be empty", |starts| starts.is_empty()).await;
    }
    drop(faults);
    drop(undo);
    cluster.end().await;
}

/// What the pod's claim is told of a device that is not healthy any more.
async fn wait_unhealthy(cluster: &TestCluster, pod: &str) -> String {
    let told = || async {
        let claim = serde_json::to_value(cluster.claim_of(pod).await).unwrap();
        let conditions = claim["status"]["devices"][0]["conditions"].as_array()?.clone();
        let found =
            conditions.into_iter().find(|one| one["type"] == "DeviceHealthy" && one["status"] == "False")?;
        found["message"].as_str().map(str::to_owned)
    };
    wait_until("the claim to be told", PATIENCE, told).await
}

/// What is published of the board.
async fn of_board(cluster: &TestCluster) -> Vec<Device> {
    let mut devices = cluster.published(NODE).await;
    devices.retain(|device| device.name.starts_with(&format!("gpu-{BOARD}")));
    devices
}

fn is_drained(device: &Device) -> bool {
    device.taints.iter().flatten().any(|taint| taint.key == "gpu.nvidia.com/use-changes")
}

/// An administrator resets the board, and with it goes what was made.
#[tokio::test]
#[ignore = "needs a rig"]
async fn a_device_that_is_ended_by_hand_under_its_pod_is_told_to_everybody_concerned() {
    let test = "a_device_that_is_ended_by_hand_under_its_pod_is_told_to_everybody_concerned";
    let cluster = TestCluster::of_env(test).await;
    let undo = AtEnd(&cluster, &["set-mig", BOARD, "off"]);
    carve(&cluster).await;
    ask_for(&cluster, "small", "1g.10gb").await;
    cluster.create(on(NODE, by_template("small", "p"))).await;
    cluster.wait_ready("p").await;
    cluster.fake(NODE, &["reset", BOARD]);
    cluster.fake(NODE, &["event", BOARD, "mig-config"]);
    let words = wait_unhealthy(&cluster, "p").await;
    assert!(words.contains("was ended by somebody"), "{words}");
    let event =
        || async { cluster.events("p").await.into_iter().find(|one| one.starts_with("DeviceUnhealthy")) };
    println!("{}", wait_until("the pod to have an event", PATIENCE, event).await);
    let health = || async {
        let pod: Pod = cluster.api::<Pod>().get("p").await.ok()?;
        let status = serde_json::to_value(pod.status?.container_statuses?.first()?).ok()?;
        let resources = status["allocatedResourcesStatus"].as_array()?.clone();
        resources.iter().any(|one| one["resources"][0]["health"] == "Unhealthy").then_some(())
    };
    wait_until("kubelet to show it", PATIENCE, health).await;
    // The next pod gets one that is there.
    cluster.delete("p").await;
    cluster.create(on(NODE, by_template("small", "next"))).await;
    cluster.wait_ready("next").await;
    assert_eq!(made(&cluster).len(), 1);
    cluster.delete("next").await;
    wait_made(&cluster, "the board to be empty", |starts| starts.is_empty()).await;
    drop(undo);
    cluster.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_board_that_is_not_to_be_carved_any_more_is_until_its_last_pod_has_gone() {
    let test = "a_board_that_is_not_to_be_carved_any_more_is_until_its_last_pod_has_gone";
    let cluster = TestCluster::of_env(test).await;
    let undo = AtEnd(&cluster, &["set-mig", BOARD, "off"]);
    carve(&cluster).await;
    ask_for(&cluster, "small", "1g.10gb").await;
    cluster.create(on(NODE, by_template("small", "p"))).await;
    cluster.wait_ready("p").await;
    settings::set(&cluster, &["--mig-on-demand=0"]).await;
    let changing = || async {
        let name = format!("gpu-{BOARD}");
        of_board(&cluster).await.iter().any(|one| one.name == name && is_drained(one)).then_some(())
    };
    wait_until("the board to be drained", PATIENCE, changing).await;
    let plugin = cluster.plugin(NODE).await.metadata.name.unwrap();
    let said = cluster.rig.kubectl(&["-n", SYSTEM, "exec", &plugin, "--", "tranche", "inspect"]);
    assert!(said.contains("takes no new claims: --mig-on-demand does not name it any more"), "{said}");
    cluster.create(on(NODE, by_template("small", "late"))).await;
    println!("beside it: {}", wait_unschedulable(&cluster, "late").await);
    assert_eq!(made(&cluster).len(), 1, "the pod has its device");
    cluster.delete("late").await;
    cluster.delete("p").await;
    wait_made(&cluster, "the board to be empty", |starts| starts.is_empty()).await;
    cluster.fake(NODE, &["event", BOARD, "mig-config"]);
    let anew = || async { of_board(&cluster).await.is_empty().then_some(()) };
    wait_until("the board to be published as it is: in MIG mode, without devices", PATIENCE, anew).await;
    drop(undo);
    cluster.end().await;
}

/// What an administrator made by hand before.
#[tokio::test]
#[ignore = "needs a rig"]
async fn a_board_that_comes_to_be_carved_is_once_claims_of_before_have_gone() {
    let cluster =
        TestCluster::of_env("a_board_that_comes_to_be_carved_is_once_claims_of_before_have_gone").await;
    let undo = AtEnd(&cluster, &["set-mig", BOARD, "off"]);
    cluster.fake(NODE, &["set-mig", BOARD, "1g.10gb"]);
    cluster.fake(NODE, &["event", BOARD, "mig-config"]);
    let by_hand = || async {
        let devices = of_board(&cluster).await;
        matches!(&devices[..], [one] if one.name.starts_with(&format!("gpu-{BOARD}-mig-")))
            .then(|| devices[0].name.clone())
    };
    let device = wait_until("the MIG device that was made by hand", PATIENCE, by_hand).await;
    let board = cluster.attribute(NODE, &device, "parentUUID").await;
    for (name, profile) in [("theirs", "1g.10gb"), ("two", "2g.20gb")] {
        cluster.create(template(name, json!({"requests": [of_profile(&board, profile)]}))).await;
    }
    cluster.create(on(NODE, by_template("theirs", "p"))).await;
    cluster.wait_ready("p").await;
    settings::set(&cluster, &[&format!("--mig-on-demand={BOARD}")]).await;
    let drained = || async { of_board(&cluster).await.iter().all(is_drained).then_some(()) };
    wait_until("the MIG device to be drained", PATIENCE, drained).await;
    let plugin = cluster.plugin(NODE).await.metadata.name.unwrap();
    let said = cluster.rig.kubectl(&["-n", SYSTEM, "exec", &plugin, "--", "tranche", "inspect"]);
    let why = format!("claims have MIG devices of before: {}/p", cluster.namespace);
    assert!(said.contains(&why), "{said}");
    cluster.create(on(NODE, by_template("two", "late"))).await;
    println!("until it is carved: {}", wait_unschedulable(&cluster, "late").await);
    // The fake lists what was made by hand once somebody makes more.
    assert_eq!(made(&cluster), [0_u64; 0], "nothing is made beside the pod's device");
    cluster.delete("p").await;
    cluster.wait_ready("late").await;
    assert_eq!(made(&cluster).len(), 2, "what was made by hand stays");
    cluster.delete("late").await;
    wait_made(&cluster, "what was made for the pod to be gone", |starts| starts.len() == 1).await;
    drop(undo);
    cluster.end().await;
}

/// By hand, on a GPU whose mode is not ours to switch.
#[tokio::test]
#[ignore = "needs a rig"]
async fn a_board_whose_mig_mode_somebody_switches_off_is_whole_once_its_pods_have_gone() {
    let test = "a_board_whose_mig_mode_somebody_switches_off_is_whole_once_its_pods_have_gone";
    let cluster = TestCluster::of_env(test).await;
    let undo = AtEnd(&cluster, &["set-mig", BOARD, "off"]);
    carve(&cluster).await;
    ask_for(&cluster, "small", "1g.10gb").await;
    let uuid = cluster.attribute(NODE, &format!("gpu-{BOARD}"), "uuid").await;
    let cut = of_board(&cluster).await.len();
    cluster.create(on(NODE, by_template("small", "p"))).await;
    cluster.wait_ready("p").await;
    cluster.fake(NODE, &["set-mig", BOARD, "off"]);
    cluster.fake(NODE, &["event", BOARD, "mig-config"]);
    let drained = || async {
        let devices = of_board(&cluster).await;
        (devices.len() == cut && devices.iter().all(is_drained)).then_some(())
    };
    wait_until("all that the GPU was cut into to be drained, the device of p among it", PATIENCE, drained)
        .await;
    let words = wait_unhealthy(&cluster, "p").await;
    assert!(words.contains("was ended by somebody while its claim has it"), "{words}");
    cluster.create(claim("whole", json!({"requests": [of_gpu(&uuid, gpu("gpu"))]}))).await;
    cluster.create(on(NODE, user_of("whole", "whole"))).await;
    println!("beside what is gone: {}", wait_unschedulable(&cluster, "whole").await);
    cluster.delete("p").await;
    // Not before the record has gone: this look finds the GPU free.
    cluster.wait_clean().await;
    cluster.fake(NODE, &["event", BOARD, "mig-config"]);
    cluster.wait_ready("whole").await;
    let inside = cluster.inside("whole", "main");
    assert_eq!((&inside.gpus[..], inside.caps.len()), (&[6][..], 0));
    let devices = of_board(&cluster).await;
    assert!(devices.len() == 1 && !is_drained(&devices[0]), "{devices:?}");
    cluster.delete("whole").await;
    drop(undo);
    cluster.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_place_at_which_no_device_can_be_made_is_tainted_and_so_is_all_of_a_board_that_fails() {
    let test = "a_place_at_which_no_device_can_be_made_is_tainted_and_so_is_all_of_a_board_that_fails";
    let cluster = TestCluster::of_env(test).await;
    let undo = AtEnd(&cluster, &["set-mig", BOARD, "off"]);
    carve(&cluster).await;
    let tainted = |devices: &[Device], key: &str| {
        devices.iter().filter(|one| one.taints.iter().flatten().any(|taint| taint.key == key)).count()
    };
    let clear = AtEnd(&cluster, &["clear"]);
    cluster.fake(NODE, &["fault", CREATE, "UNKNOWN", "--gpu", BOARD]);
    ask_for(&cluster, "half", "4g.40gb").await;
    cluster.create(on(NODE, by_template("half", "p"))).await;
    let not_made =
        || async { (tainted(&of_board(&cluster).await, "gpu.nvidia.com/mig-not-made") == 1).then_some(()) };
    wait_until("the one place of that size to be tainted", PATIENCE, not_made).await;
    let told = || async { cluster.events("p").await.into_iter().find(|event| event.contains(CREATE)) };
    println!("{}", wait_until("the pod to be told", PATIENCE, told).await);
    drop(clear);
    cluster.wait_ready("p").await;
    let made_now =
        || async { (tainted(&of_board(&cluster).await, "gpu.nvidia.com/mig-not-made") == 0).then_some(()) };
    wait_until("the taint to be gone once a device is made there", PATIENCE, made_now).await;
    let well = AtEnd(&cluster, &["recover", BOARD]);
    cluster.fake(NODE, &["xid", BOARD, "48"]);
    let all = || async {
        let devices = of_board(&cluster).await;
        (tainted(&devices, "gpu.nvidia.com/xid") == devices.len()).then_some(())
    };
    wait_until("all that can be made of the board to be tainted", PATIENCE, all).await;
    let words = wait_unhealthy(&cluster, "p").await;
    assert!(words.contains("48"), "{words}");
    cluster.delete("p").await;
    drop(well);
    let none = || async { (tainted(&of_board(&cluster).await, "gpu.nvidia.com/xid") == 0).then_some(()) };
    wait_until("the taints to be gone", PATIENCE, none).await;
    drop(undo);
    cluster.end().await;
}

/// kube-scheduler wants the counters for it, too (kubernetes/kubernetes 140729). docs/mig.md tells it: who reads that has to
/// hear if it comes to be otherwise.
#[tokio::test]
#[ignore = "needs a rig"]
async fn administrative_access_to_all_gpus_waits_while_one_is_cut() {
    let labels = json!({"resource.kubernetes.io/admin-access": "true"});
    let test = "administrative_access_to_all_gpus_waits_while_one_is_cut";
    let cluster = TestCluster::with_labels(test, labels).await;
    let undo = AtEnd(&cluster, &["set-mig", BOARD, "off"]);
    settings::set(&cluster, &[&format!("--mig-on-demand={BOARD}"), "--mig-keep=1h"]).await;
    let published = || async { (of_board(&cluster).await.len() == 26).then_some(()) };
    wait_until("the GPU, and all that can be made of it", PATIENCE, published).await;
    ask_for(&cluster, "small", "1g.10gb").await;
    cluster.create(on(NODE, by_template("small", "p"))).await;
    cluster.wait_ready("p").await;
    let all = json!({"name": "gpu", "exactly": {"deviceClassName": "gpu.nvidia.com", "allocationMode": "All",
        "adminAccess": true}});
    cluster.create(claim("monitor", json!({"requests": [all]}))).await;
    cluster.create(on(NODE, user_of("monitor", "monitor"))).await;
    println!("beside a MIG device: {}", wait_unschedulable(&cluster, "monitor").await);
    cluster.delete("p").await;
    cluster.wait_ready("monitor").await;
    cluster.delete("monitor").await;
    drop(undo);
    cluster.end().await;
}

/// A whole GPU that nobody has is a whole GPU, three MIG devices of different sizes, and a whole GPU again.
#[tokio::test]
#[ignore = "needs a rig"]
async fn an_idle_gpu_is_given_whole_then_cut_then_whole_again() {
    let test = "an_idle_gpu_is_given_whole_then_cut_then_whole_again";
    let cluster = TestCluster::of_env(test).await;
    let undo = AtEnd(&cluster, &["set-mig", BOARD, "off"]);
    settings::set(&cluster, &[&format!("--mig-on-demand={BOARD}"), "--mig-keep=1h"]).await;
    let board = format!("gpu-{BOARD}");
    let is_on = || cluster.is_switched_on(NODE, BOARD);
    let published = || async {
        let names = cluster.published_names(NODE).await;
        let of_board =
            names.iter().filter(|name| **name == board || name.starts_with(&format!("{board}-mig-")));
        (of_board.count() == 26).then_some(names)
    };
    let names = wait_until("the GPU, and all that can be made of it", PATIENCE, published).await;
    assert_eq!(cluster.attribute(NODE, &board, "type").await, "gpu");
    assert!(!is_on());
    let uuid = cluster.attribute(NODE, &board, "uuid").await;
    cluster.create(template("whole", json!({"requests": [of_gpu(&uuid, gpu("gpu"))]}))).await;
    for (name, profile) in [("small", "1g.10gb"), ("double", "2g.20gb"), ("half", "3g.40gb")] {
        ask_for(&cluster, name, profile).await;
    }

    cluster.create(on(NODE, by_template("whole", "whole"))).await;
    cluster.wait_ready("whole").await;
    let inside = cluster.inside("whole", "main");
    assert_eq!((&inside.gpus[..], inside.caps.len(), is_on()), (&[6][..], 0, false));
    cluster.create(on(NODE, by_template("small", "small"))).await;
    println!("beside a whole GPU: {}", wait_unschedulable(&cluster, "small").await);
    cluster.delete("whole").await;
    cluster.wait_ready("small").await;
    for name in ["double", "half"] {
        cluster.create(on(NODE, by_template(name, name))).await;
    }
    let cut = ["small", "double", "half"].map(str::to_owned);
    cluster.wait_all_ready(&cut).await;
    assert_eq!((made(&cluster).len(), is_on()), (3, true));
    for name in &cut {
        let inside = cluster.inside(name, "main");
        assert_eq!((&inside.gpus[..], inside.caps.len()), (&[6][..], 2), "{name}");
    }
    assert_eq!(cluster.published_names(NODE).await, names, "whatever the mode is");

    cluster.create(on(NODE, by_template("whole", "again"))).await;
    println!("beside MIG devices: {}", wait_unschedulable(&cluster, "again").await);
    let claim = async |pod: &str| cluster.claim_of(pod).await.metadata.name.unwrap();
    let (of_small, of_double) = (claim("small").await, claim("double").await);
    metrics::are_of_their_own_mig_devices(&cluster, [("small", &of_small), ("double", &of_double)]).await;
    cluster.delete_all(&cut[1..]).await;
    cluster.wait_ready("again").await;
    assert_eq!((made(&cluster).len(), is_on()), (0, false), "off for the pod that has it whole");
    assert_eq!(cluster.published_names(NODE).await, names);
    cluster.delete("again").await;

    // Both at once: one has it, the other gets it later.
    cluster.create(on(NODE, by_template("whole", "first"))).await;
    cluster.create(on(NODE, by_template("small", "second"))).await;
    let either = || async {
        let pods = cluster.api::<Pod>();
        let ready =
            async |name: &str| pods.get_opt(name).await.ok().flatten().is_some_and(|pod| is_ready(&pod));
        let ready = [ready("first").await, ready("second").await];
        ready.contains(&true).then_some(ready)
    };
    let ready = wait_until("one of both", PATIENCE, either).await;
    let (has, waits) = if ready[0] { ("first", "second") } else { ("second", "first") };
    println!("has it: {has}; waits: {}", wait_unschedulable(&cluster, waits).await);
    cluster.delete(has).await;
    cluster.wait_ready(waits).await;
    assert_eq!(is_on(), waits == "second");
    cluster.delete(waits).await;
    drop(undo);
    cluster.end().await;
}
