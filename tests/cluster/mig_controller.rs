//! MIG devices that the controller chooses for an amount: made on the node for the claim, and ended with it.

use futures::StreamExt;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use serde_json::{Value, json};

use crate::discovery::AtEnd;
use crate::manifests::{as_nobody, claim, gpu, of_gpu, parameters, user_of};
use crate::rig::wait_until;
use crate::shares::{metrics, settings};
use crate::test_cluster::{PATIENCE, SYSTEM, TestCluster, failed_operations, is_ready, sum};

const NODE: &str = "node-a";
/// Whole in other tests.
const BOARD: &str = "6";
const CREATE: &str = "nvmlDeviceCreateGpuInstanceWithPlacement";

/// Puts the board into MIG mode, and has the plugin carve it until the test ends.
async fn carve(cluster: &TestCluster) {
    cluster.fake(NODE, &["set-mig", BOARD, "on"]);
    settings::set(cluster, &[&format!("--mig-on-demand={BOARD}")]).await;
    let published = || async {
        let devices = cluster.published(NODE).await;
        let board = devices.into_iter().find(|device| device.name == format!("gpu-{BOARD}"))?;
        (board.attributes?.get("type")?.string.as_deref() == Some("mig-parent")).then_some(())
    };
    wait_until("the board that is cut", PATIENCE, published).await;
}

/// Has the board given whole or cut until the test ends; its UUID.
async fn whole_or_cut(cluster: &TestCluster) -> String {
    settings::set(cluster, &[&format!("--mig-on-demand={BOARD}"), "--mig-keep=1h"]).await;
    let device = format!("gpu-{BOARD}");
    let published = || async {
        let devices = cluster.published(NODE).await;
        let attributes = devices.into_iter().find(|one| one.name == device)?.attributes?;
        attributes.contains_key("migProfile19").then_some(())
    };
    wait_until("the GPU, and what it can be cut into", PATIENCE, published).await;
    assert_eq!(cluster.attribute(NODE, &device, "type").await, "gpu");
    cluster.attribute(NODE, &device, "uuid").await
}

/// A claim for a MIG device of our controller's, and a pod of its name that uses it.
async fn ask_for(cluster: &TestCluster, name: &str, mut amount: Value) {
    amount["minimumIsolation"] = json!("mig");
    let config = parameters("tranche.dev/v1alpha1", "GpuShare", amount);
    let devices = json!({"requests": [{"name": "gpu", "exactly": {"deviceClassName": "shared.gpu.nvidia.com"}}],
        "config": config});
    cluster.create(claim(name, devices)).await;
    cluster.create(as_nobody(user_of(name, name))).await;
}

/// GPU instances that are on the board: where they begin, and NVML's ids of their profiles: 19 is 1g.10gb, 15 1g.20gb, 9
/// 3g.40gb, 5 4g.40gb.
fn made(cluster: &TestCluster) -> Vec<(u64, u64)> {
    let state = cluster.fake_state(NODE, BOARD);
    let instances = state["mig"]["value"]["instances"].as_array().cloned().unwrap_or_default();
    let number = |one: &Value, name: &str| one[name].as_u64().unwrap_or_default();
    let mut all: Vec<_> =
        instances.iter().map(|one| (number(one, "start"), number(one, "profile"))).collect();
    all.sort_unstable();
    all
}

async fn wait_made(cluster: &TestCluster, what: &str, wanted: usize) {
    let seen = || async { (made(cluster).len() == wanted).then_some(()) };
    wait_until(what, PATIENCE, seen).await;
}

async fn wait_told(cluster: &TestCluster, pod: &str, words: &str) {
    let told = || async {
        let events = cluster.events(pod).await;
        events.iter().any(|event| event.contains(words)).then_some(())
    };
    wait_until(&format!("the event {words:?} of pod {pod}"), PATIENCE, told).await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn the_controller_fills_a_board_by_memory_and_by_fraction() {
    let cluster = TestCluster::of_env("the_controller_fills_a_board_by_memory_and_by_fraction").await;
    let undo = AtEnd(&cluster, &["set-mig", BOARD, "off"]);
    carve(&cluster).await;
    let small: Vec<String> = (0..7).map(|nth| format!("small-{nth}")).collect();
    for name in &small {
        ask_for(&cluster, name, json!({"memory": "9000Mi"})).await;
    }
    cluster.wait_all_ready(&small).await;
    let starts: Vec<u64> = made(&cluster).into_iter().map(|(start, _)| start).collect();
    assert_eq!(starts, [0, 1, 2, 3, 4, 5, 6]);
    for name in &small {
        let inside = cluster.inside(name, "main");
        assert_eq!((&inside.gpus[..], inside.caps.len()), (&[6][..], 2), "{name}");
        let claim = cluster.api::<ResourceClaim>().get(name).await.expect("the claim is there");
        let allocation = claim.status.and_then(|status| status.allocation).and_then(|one| one.devices);
        let results = allocation.and_then(|devices| devices.results).unwrap_or_default();
        let of = |pool: &str, id: Option<&String>| (pool.to_owned(), id.cloned());
        let seen: Vec<_> = results.iter().map(|one| of(&one.pool, one.share_id.as_ref())).collect();
        assert_eq!(seen, [(format!("{NODE}/shares"), None)], "{name}");
    }
    ask_for(&cluster, "eighth", json!({"memory": "9000Mi"})).await;
    wait_told(&cluster, "eighth", "needs a MIG device with 9000 MiB").await;
    ask_for(&cluster, "impossible", json!({"memory": "500Gi"})).await;
    wait_told(&cluster, "impossible", "too small even idle").await;
    cluster.delete_all(&["impossible".to_owned(), "small-3".to_owned()]).await;
    cluster.wait_ready("eighth").await;
    let rest: Vec<String> =
        small.into_iter().filter(|name| name != "small-3").chain(["eighth".to_owned()]).collect();
    cluster.delete_all(&rest).await;
    wait_made(&cluster, "the board to be empty", 0).await;

    ask_for(&cluster, "half", json!({"fraction": "0.5"})).await;
    ask_for(&cluster, "three", json!({"memory": "30Gi"})).await;
    let both = ["half".to_owned(), "three".to_owned()];
    cluster.wait_all_ready(&both).await;
    assert_eq!(made(&cluster), [(0, 5), (4, 9)]);
    cluster.delete_all(&both).await;
    wait_made(&cluster, "the board to be empty again", 0).await;

    let mixed = [("a", "30Gi"), ("b", "15Gi"), ("c", "4Gi"), ("d", "4Gi")];
    for (name, memory) in mixed {
        ask_for(&cluster, name, json!({"memory": memory})).await;
    }
    let mixed: Vec<String> = mixed.iter().map(|(name, _)| (*name).to_owned()).collect();
    cluster.wait_all_ready(&mixed).await;
    let mut profiles: Vec<u64> = made(&cluster).into_iter().map(|(_, profile)| profile).collect();
    profiles.sort_unstable();
    assert_eq!(profiles, [9, 15, 19, 19]);
    metrics::are_of_their_own_mig_devices(&cluster, [("d", "d"), ("b", "b")]).await;
    cluster.delete_all(&mixed[..3]).await;
    wait_made(&cluster, "the board to be empty in the end", 0).await;
    drop(undo);
    cluster.end().await;
}

/// Seven at once have a device; an eighth waits until one is made for it on what another leaves.
const AT_ONCE: usize = 8;

#[tokio::test]
#[ignore = "needs a rig"]
async fn many_pods_of_the_controllers_leave_nothing_behind() {
    let test = "many_pods_of_the_controllers_leave_nothing_behind";
    let cluster = TestCluster::of_env(test).await;
    let everywhere = std::env::var_os("TRANCHE_EVERYWHERE").is_some();
    let pods = if everywhere || cluster.release().await < 36 { 200 } else { 32 };
    let undo = AtEnd(&cluster, &["set-mig", BOARD, "off"]);
    carve(&cluster).await;
    let before = failed_operations(&cluster.metrics(NODE).await);
    let life = async |number: usize| {
        let name = format!("p-{number}");
        let memory = ["9000Mi", "9000Mi", "15Gi"][number % 3];
        ask_for(&cluster, &name, json!({"memory": memory})).await;
        cluster.wait_all_ready(std::slice::from_ref(&name)).await;
        cluster.delete(&name).await;
    };
    futures::stream::iter(0..pods).map(life).buffer_unordered(AT_ONCE).collect::<Vec<()>>().await;
    cluster.wait_clean().await;
    wait_made(&cluster, "the board to be empty", 0).await;
    let metrics = cluster.metrics(NODE).await;
    assert_eq!(sum(&metrics, "tranche_mig_creation_failures_total"), 0.0);
    assert_eq!(failed_operations(&metrics) - before, 0.0, "no try failed");
    drop(undo);
    cluster.end().await;
}

/// The instance is there, NVML has not said so yet, and the plugin dies; then kubelet is started anew as well.
#[tokio::test]
#[ignore = "needs a rig"]
async fn the_plugin_and_kubelet_may_end_while_the_controllers_device_is_made() {
    let test = "the_plugin_and_kubelet_may_end_while_the_controllers_device_is_made";
    let cluster = TestCluster::of_env(test).await;
    let undo = AtEnd(&cluster, &["set-mig", BOARD, "off"]);
    let faults = AtEnd(&cluster, &["clear"]);
    carve(&cluster).await;
    for (name, kubelet) in [("plugins", false), ("both", true)] {
        cluster.fake(NODE, &["fault", CREATE, "none", "--done", "--delay-ms", "20000", "--times", "1"]);
        ask_for(&cluster, name, json!({"memory": "9000Mi"})).await;
        wait_made(&cluster, "an instance that nobody knows of yet", 1).await;
        if kubelet {
            cluster.rig.run(&["restart", NODE, "kubelet"]);
        }
        cluster.kill9(NODE, &cluster.plugin(NODE).await);
        cluster.wait_ready(name).await;
        assert_eq!(made(&cluster).len(), 1, "{name}: one for the pod");
        assert_eq!(cluster.inside(name, "main").caps.len(), 2, "{name}");
        cluster.delete(name).await;
        wait_made(&cluster, "the board to be empty", 0).await;
    }
    drop(faults);
    drop(undo);
    cluster.end().await;
}

/// A tool on the host has each MIG device open, and NVML ends none.
#[tokio::test]
#[ignore = "needs a rig"]
async fn the_place_of_a_device_that_cannot_be_ended_is_given_to_nobody_until_it_is() {
    let test = "the_place_of_a_device_that_cannot_be_ended_is_given_to_nobody_until_it_is";
    let cluster = TestCluster::of_env(test).await;
    let undo = AtEnd(&cluster, &["set-mig", BOARD, "off"]);
    let faults = AtEnd(&cluster, &["clear"]);
    carve(&cluster).await;
    ask_for(&cluster, "first", json!({"memory": "9000Mi"})).await;
    cluster.wait_ready("first").await;
    let [(start, 19)] = made(&cluster)[..] else { panic!("{:?}", made(&cluster)) };
    cluster.fake(NODE, &["fault", "nvmlGpuInstanceDestroy", "IN_USE"]);
    cluster.delete("first").await;
    let avoided = || async {
        let devices = cluster.published(NODE).await;
        let board = devices.into_iter().find(|device| device.name == format!("gpu-{BOARD}"))?;
        Some(board.attributes?.get("migAvoided").and_then(|one| one.string.clone()))
    };
    let told = || async { (avoided().await?? == format!("19:1@{start}")).then_some(()) };
    wait_until("the place to be avoided", PATIENCE, told).await;
    ask_for(&cluster, "second", json!({"memory": "9000Mi"})).await;
    cluster.wait_ready("second").await;
    let starts: Vec<u64> = made(&cluster).into_iter().map(|(start, _)| start).collect();
    assert!(starts.len() == 2 && starts.contains(&start), "{starts:?}");
    cluster.fake(NODE, &["clear"]);
    // The sweeper tries every minute.
    wait_made(&cluster, "the first device to be ended", 1).await;
    let free = || async { avoided().await?.is_none().then_some(()) };
    wait_until("the place to be given again", PATIENCE, free).await;
    cluster.delete("second").await;
    wait_made(&cluster, "the board to be empty", 0).await;
    drop(faults);
    drop(undo);
    cluster.end().await;
}

/// By kube-scheduler whole, by the controller cut, by kube-scheduler whole again.
#[tokio::test]
#[ignore = "needs a rig"]
async fn an_idle_gpu_is_given_whole_and_cut_by_the_controller() {
    let cluster = TestCluster::of_env("an_idle_gpu_is_given_whole_and_cut_by_the_controller").await;
    let undo = AtEnd(&cluster, &["set-mig", BOARD, "off"]);
    let uuid = whole_or_cut(&cluster).await;
    let is_on = || cluster.is_switched_on(NODE, BOARD);
    for name in ["whole", "again"] {
        cluster.create(claim(name, json!({"requests": [of_gpu(&uuid, gpu("gpu"))]}))).await;
    }
    cluster.create(user_of("whole", "whole")).await;
    cluster.wait_ready("whole").await;
    assert!(!is_on());
    ask_for(&cluster, "small", json!({"memory": "9000Mi"})).await;
    wait_told(&cluster, "small", "1 GPU not open to shares").await;
    cluster.delete("whole").await;
    cluster.wait_ready("small").await;
    for (name, memory) in [("double", "15Gi"), ("half", "30Gi")] {
        ask_for(&cluster, name, json!({"memory": memory})).await;
    }
    let cut = ["small", "double", "half"].map(str::to_owned);
    cluster.wait_all_ready(&cut).await;
    assert_eq!((made(&cluster).len(), is_on()), (3, true));
    cluster.create(user_of("again", "again")).await;
    cluster.delete_all(&cut).await;
    cluster.wait_ready("again").await;
    assert_eq!((made(&cluster).len(), is_on()), (0, false));
    cluster.delete("again").await;
    drop(undo);
    cluster.end().await;
}

/// Whose pod of the two has come up first, ours or kube-scheduler's.
async fn first_of(cluster: &TestCluster, names: [&str; 2]) -> usize {
    let pods = cluster.api::<Pod>();
    let ready = async |name: &str| pods.get_opt(name).await.ok().flatten().is_some_and(|pod| is_ready(&pod));
    let either = || async {
        let ready = [ready(names[0]).await, ready(names[1]).await];
        ready.iter().position(|one| *one).map(|first| (first, ready))
    };
    let (first, ready) = wait_until(&format!("one of {names:?}"), PATIENCE, either).await;
    assert_ne!(ready, [true; 2], "{names:?}: one GPU");
    first
}

/// Both ask at the same time for a GPU that nobody has.
#[tokio::test]
#[ignore = "needs a rig"]
async fn of_a_whole_gpu_and_a_mig_device_that_race_for_one_gpu_each_gets_the_gpu_in_turn() {
    let test = "of_a_whole_gpu_and_a_mig_device_that_race_for_one_gpu_each_gets_the_gpu_in_turn";
    let cluster = TestCluster::of_env(test).await;
    let undo = AtEnd(&cluster, &["set-mig", BOARD, "off"]);
    let uuid = whole_or_cut(&cluster).await;
    let mut won = [0; 2];
    for round in 0..5 {
        let names = ["whole", "cut"].map(|name| format!("{name}-{round}"));
        let [whole, cut] = [names[0].as_str(), names[1].as_str()];
        let ask_whole = async {
            cluster.create(claim(whole, json!({"requests": [of_gpu(&uuid, gpu("gpu"))]}))).await;
            cluster.create(user_of(whole, whole)).await;
        };
        tokio::join!(ask_whole, ask_for(&cluster, cut, json!({"memory": "9000Mi"})));
        let first = first_of(&cluster, [whole, cut]).await;
        // While the mode is off, the fake's file tells the instances of an earlier test.
        let is_on = || cluster.is_switched_on(NODE, BOARD);
        let cut_into = || if is_on() { made(&cluster).len() } else { 0 };
        assert_eq!((is_on(), cut_into()), (first == 1, first), "round {round}");
        cluster.delete(&names[first]).await;
        let second = 1 - first;
        cluster.wait_ready(&names[second]).await;
        assert_eq!((is_on(), cut_into()), (second == 1, second), "round {round}, the other");
        cluster.delete(&names[second]).await;
        won[first] += 1;
    }
    println!("first was the whole GPU {} times, the MIG device {} times", won[0], won[1]);
    drop(undo);
    cluster.end().await;
}

/// Where taints are kept the controller looks elsewhere; where they are not, the node says no.
#[tokio::test]
#[ignore = "needs a rig"]
async fn a_board_that_is_not_to_be_cut_any_more_takes_no_new_claim_of_the_controllers() {
    let test = "a_board_that_is_not_to_be_cut_any_more_takes_no_new_claim_of_the_controllers";
    let cluster = TestCluster::of_env(test).await;
    let undo = AtEnd(&cluster, &["set-mig", BOARD, "off"]);
    carve(&cluster).await;
    ask_for(&cluster, "small", json!({"memory": "9000Mi"})).await;
    cluster.wait_ready("small").await;
    settings::set(&cluster, &["--mig-on-demand=0"]).await;
    let said = || async {
        let plugin = cluster.plugin(NODE).await.metadata.name?;
        let inspect = ["-n", SYSTEM, "exec", plugin.as_str(), "--", "tranche", "inspect"];
        let said = cluster.rig.attempt(&[&["kubectl"], &inspect[..]].concat()).ok()?;
        said.contains("takes no new claims: --mig-on-demand does not name it any more").then_some(())
    };
    wait_until("the plugin to say that the GPU takes no new claims", PATIENCE, said).await;
    if cluster.release().await >= 36 {
        let drained = || async {
            let devices = cluster.published(NODE).await;
            let board = devices.into_iter().find(|device| device.name == format!("gpu-{BOARD}"))?;
            let mut taints = board.taints.iter().flatten();
            taints.any(|taint| taint.key == "gpu.nvidia.com/use-changes").then_some(())
        };
        wait_until("the GPU to be drained", PATIENCE, drained).await;
    }
    ask_for(&cluster, "late", json!({"memory": "9000Mi"})).await;
    if cluster.release().await >= 36 {
        wait_told(&cluster, "late", "use-changes").await;
    } else {
        let why = "takes no new claims: --mig-on-demand does not name it any more";
        println!("{}", cluster.wait_refused("late", &[why]).await);
    }
    assert_eq!(made(&cluster).len(), 1, "the first pod has its device");
    cluster.delete_all(&["late", "small"].map(str::to_owned)).await;
    wait_made(&cluster, "the board to be empty", 0).await;
    drop(undo);
    cluster.end().await;
}

/// Shares first: the GPU is cut once they have gone.
#[tokio::test]
#[ignore = "needs a rig"]
async fn a_board_that_comes_to_be_cut_is_once_its_shares_have_gone() {
    let cluster = TestCluster::of_env("a_board_that_comes_to_be_cut_is_once_its_shares_have_gone").await;
    let undo = AtEnd(&cluster, &["set-mig", BOARD, "off"]);
    let uuid = cluster.attribute(NODE, &format!("gpu-{BOARD}"), "uuid").await;
    // With a function of Kubernetes' strings library, which the controller evaluates.
    let is = format!("device.attributes['gpu.nvidia.com'].uuid.lowerAscii() == '{}'", uuid.to_lowercase());
    let request = json!({"name": "gpu", "exactly": {"deviceClassName": "shared.gpu.nvidia.com",
        "selectors": [{"cel": {"expression": is}}]}});
    let devices = json!({"requests": [request],
        "config": parameters("tranche.dev/v1alpha1", "GpuShare", json!({"memory": "2000Mi"}))});
    cluster.create(claim("share", devices.clone())).await;
    cluster.create(as_nobody(user_of("share", "share"))).await;
    cluster.wait_ready("share").await;
    settings::set(&cluster, &[&format!("--mig-on-demand={BOARD}"), "--mig-keep=1h"]).await;
    let why = format!("claims have shares of before: {}/share", cluster.namespace);
    let said = || async {
        let plugin = cluster.plugin(NODE).await.metadata.name?;
        let inspect = ["-n", SYSTEM, "exec", plugin.as_str(), "--", "tranche", "inspect"];
        let said = cluster.rig.attempt(&[&["kubectl"], &inspect[..]].concat()).ok()?;
        said.contains(&why).then_some(())
    };
    wait_until("the plugin to say what the GPU waits for", PATIENCE, said).await;
    cluster.create(claim("more", devices)).await;
    cluster.create(as_nobody(user_of("more", "more"))).await;
    if cluster.release().await >= 36 {
        wait_told(&cluster, "more", "use-changes").await;
    } else {
        println!("{}", cluster.wait_refused("more", &["takes no new claims", &why]).await);
    }
    cluster.delete("more").await;
    ask_for(&cluster, "late", json!({"memory": "9000Mi"})).await;
    wait_told(&cluster, "late", "no GPU of the cluster is set to be cut into MIG devices on demand").await;
    assert!(made(&cluster).is_empty() && !cluster.is_switched_on(NODE, BOARD), "the share has its GPU");
    cluster.delete("share").await;
    cluster.wait_ready("late").await;
    assert_eq!(made(&cluster).len(), 1);
    cluster.delete("late").await;
    wait_made(&cluster, "the board to be empty", 0).await;
    drop(undo);
    cluster.end().await;
}
