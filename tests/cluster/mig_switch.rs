//! The node plugin is killed, the node rebooted, and the driver loaded anew, while the MIG mode of a GPU is switched for
//! claims.

use std::fs;

use k8s_openapi::api::resource::v1::ResourceClaim;
use serde_json::json;

use crate::discovery::AtEnd;
use crate::manifests::{as_nobody, claim, gpu, of_gpu, parameters, user_of};
use crate::restarts::{DriverDaemon, OtherDriver, wait_run_again};
use crate::rig::wait_until;
use crate::shares::settings;
use crate::test_cluster::{PATIENCE, SOON, TestCluster, container_run};

const NODE: &str = "node-a";
/// Whole in other tests.
const BOARDS: [&str; 3] = ["4", "5", "6"];
/// One more, for kube-scheduler.
const BESIDE: &str = "3";
const ALL: [&str; 4] = [BOARDS[0], BOARDS[1], BOARDS[2], BESIDE];
const SWITCH: &str = "nvmlDeviceSetMigMode";
/// One record for each MIG mode that is on for claims.
const RECORDS: &str = "/var/lib/kubelet/plugins/gpu.nvidia.com/mig-modes";

/// Has these boards given whole or cut until the test ends; their UUIDs.
async fn whole_or_cut(cluster: &TestCluster, boards: &[&str]) -> Vec<String> {
    settings::set(cluster, &[&format!("--mig-on-demand={}", boards.join(",")), "--mig-keep=1h"]).await;
    let published = || async {
        let devices = cluster.published(NODE).await;
        let is = |board: &str| {
            let device = devices.iter().find(|one| one.name == format!("gpu-{board}"));
            device.and_then(|one| one.attributes.as_ref()?.get("migProfile19")).is_some()
        };
        boards.iter().all(|board| is(board)).then_some(())
    };
    wait_until("the GPUs, and what they can be cut into", PATIENCE, published).await;
    let mut uuids = Vec::new();
    for board in boards {
        assert!(!cluster.is_switched_on(NODE, board));
        uuids.push(cluster.attribute(NODE, &format!("gpu-{board}"), "uuid").await);
    }
    uuids
}

/// A claim for a MIG device with that memory, and a pod of its name that uses it.
async fn cut(cluster: &TestCluster, name: &str, memory: &str) {
    let fields = json!({"memory": memory, "minimumIsolation": "mig"});
    let devices = json!({"requests": [{"name": "gpu", "exactly": {"deviceClassName": "shared.gpu.nvidia.com"}}],
        "config": parameters("tranche.dev/v1alpha1", "GpuShare", fields)});
    cluster.create(claim(name, devices)).await;
    cluster.create(as_nobody(user_of(name, name))).await;
}

/// A claim for that GPU as a whole, and a pod of its name that uses it.
async fn whole(cluster: &TestCluster, name: &str, uuid: &str) {
    cluster.create(claim(name, json!({"requests": [of_gpu(uuid, gpu("gpu"))]}))).await;
    cluster.create(user_of(name, name)).await;
}

/// GPU instances on the board.
fn made(cluster: &TestCluster, board: &str) -> usize {
    let state = cluster.fake_state(NODE, board);
    let instances = state["mig"]["value"]["instances"].as_array().map_or(0, Vec::len);
    // What is there while MIG is on only.
    if cluster.is_switched_on(NODE, board) { instances } else { 0 }
}

fn records(cluster: &TestCluster) -> Vec<String> {
    cluster.files(NODE, RECORDS)
}

async fn wait_for(what: &str, is: impl Fn() -> bool) {
    wait_until(what, PATIENCE, || async { is().then_some(()) }).await;
}

/// Once before the driver has switched, and once after: NVML has not returned yet.
#[tokio::test]
#[ignore = "needs a rig"]
async fn a_plugin_that_is_killed_amid_a_switch_leaves_a_gpu_that_serves_whoever_asks() {
    let test = "a_plugin_that_is_killed_amid_a_switch_leaves_a_gpu_that_serves_whoever_asks";
    let cluster = TestCluster::of_env(test).await;
    let board = BOARDS[2];
    let faults = AtEnd(&cluster, &["clear"]);
    let undo = AtEnd(&cluster, &["set-mig", board, "off"]);
    let uuid = whole_or_cut(&cluster, &[board]).await.remove(0);
    let names = cluster.published_names(NODE).await;
    let is_on = || cluster.is_switched_on(NODE, board);
    let record = vec![format!("{uuid}.json")];
    assert_eq!(records(&cluster), [""; 0]);

    let delay = |done: &[&'static str]| {
        let words = [&["fault", SWITCH, "none", "--delay-ms", "25000", "--times", "1"], done].concat();
        cluster.fake(NODE, &words);
    };
    let kill = async || cluster.kill9(NODE, &cluster.plugin(NODE).await);

    delay(&[]);
    cut(&cluster, "before", "9000Mi").await;
    wait_for("the intent to switch MIG on", || records(&cluster) == record).await;
    assert!(!is_on(), "the driver is at it");
    kill().await;
    cluster.wait_ready("before").await;
    assert_eq!((made(&cluster, board), is_on(), records(&cluster)), (1, true, record.clone()));

    delay(&["--done"]);
    cluster.delete("before").await;
    whole(&cluster, "off", &uuid).await;
    wait_for("MIG to be off, of which nobody knows yet", || !is_on()).await;
    assert_eq!(records(&cluster), record, "nothing is forgotten before it is certain");
    kill().await;
    cluster.wait_ready("off").await;
    let inside = cluster.inside("off", "main");
    assert_eq!((inside.caps.len(), is_on(), records(&cluster)), (0, false, vec![]));
    assert_eq!(inside.gpus, [board.parse::<u32>().unwrap()]);

    delay(&["--done"]);
    cluster.delete("off").await;
    cut(&cluster, "after", "9000Mi").await;
    wait_for("MIG to be on, of which nobody knows yet", is_on).await;
    assert_eq!((made(&cluster, board), records(&cluster)), (0, record.clone()));
    kill().await;
    cluster.wait_ready("after").await;
    assert_eq!((made(&cluster, board), records(&cluster)), (1, record));
    assert_eq!(cluster.inside("after", "main").caps.len(), 2);

    cluster.delete("after").await;
    whole(&cluster, "last", &uuid).await;
    cluster.wait_ready("last").await;
    assert_eq!((is_on(), records(&cluster)), (false, vec![]));
    assert_eq!(cluster.published_names(NODE).await, names, "no GPU and no place is lost");
    cluster.delete("last").await;
    drop(undo);
    drop(faults);
    cluster.end().await;
}

/// One GPU has a MIG device of a pod, one is being switched on for another pod, one off for a third. Where counters are kept,
/// a fourth has one that kube-scheduler has given.
#[tokio::test]
#[ignore = "needs a rig"]
async fn a_reboot_amid_switches_and_with_mig_devices_brings_every_pod_back() {
    let test = "a_reboot_amid_switches_and_with_mig_devices_brings_every_pod_back";
    let cluster = TestCluster::of_env(test).await;
    let faults = AtEnd(&cluster, &["clear"]);
    let off: Vec<[&str; 3]> = BOARDS.iter().map(|board| ["set-mig", board, "off"]).collect();
    let undo: Vec<AtEnd> = off.iter().map(|words| AtEnd(&cluster, words)).collect();
    let counted = cluster.release().await >= 36;
    let beside = AtEnd(&cluster, &["set-mig", BESIDE, "off"]);
    let uuids = whole_or_cut(&cluster, if counted { &ALL[..] } else { &BOARDS[..] }).await;
    let names = cluster.published_names(NODE).await;
    let on = || -> Vec<usize> { (0..3).filter(|at| cluster.is_switched_on(NODE, BOARDS[*at])).collect() };

    let mut pods = vec!["living", "on", "off"];
    if counted {
        let own = "device.attributes['gpu.nvidia.com']";
        let is = format!("{own}.profile == '1g.10gb' && {own}.parentUUID == '{}'", uuids[3]);
        let request = json!({"name": "gpu", "exactly":
            {"deviceClassName": "mig.nvidia.com", "selectors": [{"cel": {"expression": is}}]}});
        cluster.create(claim("given", json!({"requests": [request]}))).await;
        cluster.create(user_of("given", "given")).await;
        cluster.wait_ready("given").await;
        pods.push("given");
    }
    // All of a GPU each, so that each is on a GPU of its own.
    cut(&cluster, "living", "70Gi").await;
    cluster.wait_ready("living").await;
    let [living] = on()[..] else { panic!("{:?}", on()) };
    cut(&cluster, "former", "70Gi").await;
    cluster.wait_ready("former").await;
    let former = on().into_iter().find(|at| *at != living).expect("another GPU");
    let last = (0..3).find(|at| ![living, former].contains(at)).expect("three GPUs");
    cluster.delete("former").await;
    cluster.fake(NODE, &["fault", SWITCH, "none", "--done", "--delay-ms", "100000", "--times", "2"]);
    whole(&cluster, "off", &uuids[former]).await;
    wait_for("MIG to go off for one pod", || on() == [living]).await;
    cut(&cluster, "on", "70Gi").await;
    let mut both = vec![living, last];
    both.sort_unstable();
    wait_for("MIG to go on for another", || on() == both).await;
    assert_eq!(records(&cluster).len(), pods.len());

    cluster.boot(NODE);
    let run = |pod: &str| {
        let pods = cluster.api::<k8s_openapi::api::core::v1::Pod>();
        let pod = pod.to_owned();
        async move { pods.get(&pod).await.ok() }
    };
    for ran in pods.iter().copied().filter(|pod| ["living", "given"].contains(pod)) {
        let booted = || async {
            let statuses = run(ran).await?.status?.container_statuses?;
            (statuses.first()?.restart_count >= 1).then_some(())
        };
        wait_until(&format!("pod {ran} to run again"), PATIENCE * 2, booted).await;
    }
    let all: Vec<String> = pods.iter().map(|pod| (*pod).to_owned()).collect();
    cluster.wait_all_ready(&all).await;
    let ours = [("living", living, 2), ("on", last, 2), ("off", former, 0)];
    for (pod, at, caps) in ours.into_iter().chain(counted.then_some(("given", 3, 2))) {
        let inside = cluster.inside(pod, "main");
        let minor: u32 = ALL[at].parse().unwrap();
        assert_eq!((&inside.gpus[..], inside.caps.len()), (&[minor][..], caps), "{pod}");
    }
    assert_eq!((on(), BOARDS.map(|board| made(&cluster, board)).iter().sum::<usize>()), (both, 2));
    assert_eq!(
        made(&cluster, BESIDE),
        usize::from(counted),
        "made again for the pod that kube-scheduler placed"
    );
    let same = || async { (cluster.published_names(NODE).await == names).then_some(()) };
    wait_until("the same devices to be published", PATIENCE, same).await;
    let records_of: Vec<String> = [living, last].iter().map(|at| format!("{}.json", uuids[*at])).collect();
    assert!(records_of.iter().all(|name| records(&cluster).contains(name)), "{:?}", records(&cluster));
    cluster.delete_all(&all).await;
    // Whole again, for whoever asks.
    whole(&cluster, "whole", &uuids[last]).await;
    cluster.wait_ready("whole").await;
    assert!(!on().contains(&last));
    cluster.delete("whole").await;
    drop(beside);
    drop(undo);
    drop(faults);
    cluster.end().await;
}

/// First its files change alone. Then MIG devices and MIG mode go with it, and pods stay: who lives on is told, who ends
/// leaves nothing behind, and the place is free for the next.
#[tokio::test]
#[ignore = "needs a rig"]
async fn another_driver_under_pods_with_mig_devices_is_told_and_frees_their_places() {
    const OTHER: &str = "550.163.02";
    let test = "another_driver_under_pods_with_mig_devices_is_told_and_frees_their_places";
    let cluster = TestCluster::of_env(test).await;
    let board = BOARDS[2];
    let undo = AtEnd(&cluster, &["set-mig", board, "off"]);
    let uuid = whole_or_cut(&cluster, &[board]).await.remove(0);
    let names = cluster.published_names(NODE).await;
    let is_on = || cluster.is_switched_on(NODE, board);
    let daemon = DriverDaemon::start(&cluster);
    for pod in ["living", "leaving"] {
        cut(&cluster, pod, "9000Mi").await;
    }
    let first = cluster.wait_ready("living").await;
    cluster.wait_ready("leaving").await;
    let before = cluster.inside("living", "main");
    assert_eq!((made(&cluster, board), before.caps.len()), (2, 2));

    // Only files of the driver change: the container has its device again.
    assert_eq!(cluster.exec("living", "main", DriverDaemon::SEEN).trim(), "there");
    drop(daemon);
    cluster.kill9(NODE, &first);
    cluster.kill9(NODE, &cluster.plugin(NODE).await);
    wait_run_again(&cluster, "living", &container_run(&first).0).await;
    assert_eq!(cluster.exec("living", "main", DriverDaemon::SEEN).trim(), "gone");
    assert_eq!((cluster.inside("living", "main"), made(&cluster, board)), (before, 2));
    let (living, before) = (cluster.wait_ready("living").await, cluster.inside("living", "main"));

    let driver = OtherDriver::unloaded(&cluster, OTHER);
    cluster.delete("leaving").await;
    driver.load();
    let healthy = || async {
        let claim = cluster.api::<ResourceClaim>().get("living").await.ok()?;
        let devices = serde_json::to_value(claim.status?.devices?).ok()?;
        let all = devices[0]["conditions"].as_array()?.clone();
        let found = all.into_iter().find(|one| one["type"] == "DeviceHealthy" && one["status"] == "False")?;
        let words = found["message"].as_str()?;
        words.contains("was ended by somebody").then(|| words.to_owned())
    };
    println!("told: {}", wait_until("the claim to be told", PATIENCE, healthy).await);
    let event = || async {
        // A look while no driver was loaded has told something else; of a kind there is one event in a while.
        let told = |one: &String| one.starts_with("DeviceUnhealthy");
        cluster.events("living").await.into_iter().find(told)
    };
    println!("{}", wait_until("the pod to have an event", SOON, event).await);
    let edits = || {
        let of = |name: &String| fs::read_to_string(cluster.host(NODE, "/var/run/cdi").join(name));
        cluster.files(NODE, "/var/run/cdi").iter().filter_map(|name| of(name).ok()).collect::<String>()
    };
    wait_for("the container edits to name the other driver's files", || edits().contains(OTHER)).await;
    let run = container_run(&cluster.wait_ready("living").await);
    assert_eq!(run, container_run(&living), "the living pod was disturbed");
    cluster.kill9(NODE, &living);
    wait_run_again(&cluster, "living", &run.0).await;
    assert_eq!(cluster.inside("living", "main"), before);
    assert_eq!((made(&cluster, board), is_on()), (0, false), "nothing is made under a pod that runs");

    // What nobody has any more is gone; the pod that lives on keeps the GPU from others, until it ends.
    let left = || cluster.files(NODE, "/var/lib/kubelet/plugins/gpu.nvidia.com/ledger").len();
    wait_for("the record of the pod that ended to go", || left() == 1).await;
    cut(&cluster, "next", "9000Mi").await;
    cluster.delete("living").await;
    cluster.wait_ready("next").await;
    assert_eq!((made(&cluster, board), is_on(), records(&cluster)), (1, true, vec![format!("{uuid}.json")]));
    assert_eq!(cluster.inside("next", "main").caps.len(), 2);
    cluster.delete("next").await;
    whole(&cluster, "whole", &uuid).await;
    cluster.wait_ready("whole").await;
    assert_eq!((is_on(), records(&cluster)), (false, vec![]));
    assert_eq!(cluster.published_names(NODE).await, names, "no GPU and no place is lost");
    cluster.delete("whole").await;
    drop(driver);
    drop(undo);
    cluster.end().await;
}
