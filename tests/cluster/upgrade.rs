//! The plugin is replaced on every node while pods come and go: nobody may notice. And the GPUs' driver is replaced under
//! it, as the GPU Operator does it.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{Event, Pod};
use kube::Api;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use crate::manifests::{by_template, claim, gpu, on, template, user_of};
use crate::restarts::{OtherDriver, wait_edits_renewed, wait_run_again};
use crate::rig::{SLOWER, root, wait_until};
use crate::test_cluster::{
    PATIENCE, SYSTEM, TestCluster, ask, container_run, failed_operations, from, minor_of,
};

/// From one new pod to the next.
const EVERY: Duration = Duration::from_millis(300);
/// More pods than this at once would only wait for GPUs.
const AT_ONCE: usize = 8;
/// How long pods come and go before and after the roll-over.
const MARGIN: Duration = Duration::from_secs(3);

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_rollout_under_load_fails_no_pod() {
    let cluster = TestCluster::of_env("a_rollout_under_load_fails_no_pod").await;
    cluster.create(template("one-gpu", json!({"requests": [gpu("gpu")]}))).await;
    let over = Cell::new(false);
    let (load, failed) = futures::join!(load(&cluster, &over), async {
        let failed = roll(&cluster).await;
        over.set(true);
        failed
    });
    println!("{} pods, the slowest Ready after {:.1} s", load.pods, load.slowest.as_secs_f64());
    assert!(load.pods >= 12, "only {} pods came and went: that is no load", load.pods);
    assert_eq!(failed, BTreeMap::new(), "operations that failed, by plugin pod");
    let events = cluster.api::<Event>().list(&ListParams::default()).await.unwrap().items;
    let bad: Vec<_> = events
        .into_iter()
        .filter(|event| event.reason.as_deref() == Some("FailedPrepareDynamicResources"))
        .map(|event| event.message)
        .collect();
    assert!(bad.is_empty(), "{} failed prepares: {bad:#?}", bad.len());
    cluster.end().await;
}

struct Load {
    pods: usize,
    slowest: Duration,
}

/// Starts a pod every 300 ms and deletes it when it is Ready, until `over`.
async fn load(cluster: &TestCluster, over: &Cell<bool>) -> Load {
    let mut lives = FuturesUnordered::new();
    let mut ticks = tokio::time::interval(EVERY);
    let mut load = Load { pods: 0, slowest: Duration::ZERO };
    loop {
        tokio::select! {
            _ = ticks.tick(), if !over.get() => {
                if lives.len() < AT_ONCE {
                    lives.push(life(cluster, format!("p-{}", load.pods)));
                    load.pods += 1;
                }
            }
            Some(took) = lives.next() => load.slowest = load.slowest.max(took),
            else => return load,
        }
    }
}

/// A pod's life; how long it took to be Ready.
async fn life(cluster: &TestCluster, name: String) -> Duration {
    let pods: Api<Pod> = cluster.api();
    let begin = Instant::now();
    pods.create(&PostParams::default(), &from(by_template("one-gpu", &name)))
        .await
        .expect("a pod can be created");
    cluster.wait_ready(&name).await;
    let took = begin.elapsed();
    pods.delete(&name, &DeleteParams::default()).await.expect("a pod can be deleted");
    cluster.gone(&name).await;
    took
}

/// Replaces every plugin; returns what failed in any of them, old or new.
async fn roll(cluster: &TestCluster) -> BTreeMap<String, u64> {
    let sets: Api<DaemonSet> = Api::namespaced(cluster.client.clone(), SYSTEM);
    // What tests before this one had refused is not counted.
    let mut before = BTreeMap::new();
    for node in &cluster.nodes {
        let name = cluster.plugin(node).await.metadata.name.unwrap_or_default();
        before.insert(name, failed_operations(&cluster.metrics(node).await) as u64);
    }
    let mut failed = BTreeMap::new();
    watch_until(cluster, &mut failed, MARGIN).await;
    let now = json!({"spec": {"template": {"metadata": {"annotations": {"rolled-at": format!("{:?}", Instant::now())}}}}});
    let set = sets.patch("tranche-node", &PatchParams::default(), &Patch::Merge(now)).await.unwrap();
    let (begin, generation) = (Instant::now(), set.metadata.generation);
    loop {
        watch_until(cluster, &mut failed, Duration::from_millis(200)).await;
        let Some(status) = sets.get("tranche-node").await.unwrap().status else { continue };
        let all = status.desired_number_scheduled;
        let done = status.observed_generation == generation
            && status.updated_number_scheduled == Some(all)
            && status.number_available == Some(all);
        if done && on_all(cluster).await == all as usize {
            break;
        }
        assert!(begin.elapsed() < PATIENCE * SLOWER, "the roll-over does not end: {status:?}");
    }
    println!("rolled over in {:.1} s", begin.elapsed().as_secs_f64());
    watch_until(cluster, &mut failed, MARGIN).await;
    failed.retain(|pod, count| before.get(pod) != Some(count));
    failed
}

/// How many plugins there are, old ones included.
async fn on_all(cluster: &TestCluster) -> usize {
    let mut count = 0;
    for node in &cluster.nodes {
        count += cluster.plugins(node).await.len();
    }
    count
}

/// Asks every plugin for its failures, again and again: an old one takes its figures with it.
async fn watch_until(cluster: &TestCluster, failed: &mut BTreeMap<String, u64>, time: Duration) {
    let end = Instant::now() + time;
    loop {
        for node in &cluster.nodes {
            for pod in &cluster.plugins(node).await {
                let count = ask(pod, "/metrics").map_or(0.0, |text| failed_operations(&text)) as u64;
                if count > 0 {
                    failed.insert(pod.metadata.name.clone().unwrap_or_default(), count);
                }
            }
        }
        if Instant::now() >= end {
            return;
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

const NODE: &str = "node-a";
/// By which NVIDIA's driver manager takes what uses the driver from a node, and gives it back. The Operator sets it.
const LABEL: &str = "nvidia.com/gpu.deploy.client";

/// Labels the nodes and runs Tranche on that label, in the words of docs/install.md, until the test ends.
fn run_on_the_label(cluster: &TestCluster) {
    const SELECTOR: &str = r"node.nodeSelector.nvidia\.com/gpu\.deploy\.client=true";
    let docs = std::fs::read_to_string(root().join("docs/install.md")).expect("it is there");
    for words in [LABEL, &format!("--set-string '{SELECTOR}'")] {
        assert!(docs.contains(words), "docs/install.md does not say {words}");
    }
    let rig = &cluster.rig;
    // From the last to the first: what follows is put right before the label goes, by which it runs.
    rig.on_end(&["kubectl", "label", "nodes", "--all", &format!("{LABEL}-")]);
    let mps = ["-l", "app.kubernetes.io/component=mps"];
    rig.on_end(&[&["kubectl", "-n", SYSTEM, "delete", "pods", "--timeout=90s"], &mps[..]].concat());
    let rollout = ["-n", SYSTEM, "rollout", "status", "daemonset", "tranche-node", "--timeout=120s"];
    rig.on_end(&[&["kubectl"], &rollout[..]].concat());
    rig.kubectl(&["label", "nodes", "--all", &format!("{LABEL}=true")]);
    let list = rig.helm(&["list", "-n", SYSTEM, "-o", "json"]).expect("helm can list");
    let releases: Value = serde_json::from_str(&list).expect("helm's list is JSON");
    match releases[0]["revision"].as_str() {
        Some(revision) => {
            rig.on_end(&["helm", "rollback", "tranche", revision, "-n", SYSTEM]);
            let upgrade = ["upgrade", "tranche", "charts/tranche", "-n", SYSTEM, "--reuse-values"];
            rig.helm(&[&upgrade[..], &["--set-string", SELECTOR]].concat()).expect("the chart takes it");
        }
        // Staged by plain manifests: what the chart makes of the value.
        None => {
            let patch = |value: Value| {
                json!({"spec": {"template": {"spec": {"nodeSelector": {LABEL: value}}}}}).to_string()
            };
            for set in ["tranche-node", "tranche-mps"] {
                let words = ["-n", SYSTEM, "patch", "daemonset", set, "--type=merge", "-p"];
                rig.on_end(&[&["kubectl"], &words[..], &[&patch(Value::Null)]].concat());
                rig.kubectl(&[&words[..], &[&patch(json!("true"))]].concat());
            }
        }
    }
    rig.kubectl(&rollout);
}

/// By the label alone Tranche leaves the node and comes back. A pod that does nothing with its GPU lives on, and its
/// container starts again with the files of the new driver.
#[tokio::test]
#[ignore = "needs a rig"]
async fn the_driver_is_replaced_as_the_gpu_operator_does_it() {
    const OTHER: &str = "550.163.02";
    let cluster = TestCluster::of_env("the_driver_is_replaced_as_the_gpu_operator_does_it").await;
    run_on_the_label(&cluster);
    cluster.create(claim("living", json!({"requests": [gpu("gpu")]}))).await;
    cluster.create(on(NODE, user_of("living", "living"))).await;
    let living = cluster.wait_ready("living").await;
    let device = cluster.devices_of("living").await.remove(0);

    let pause = |value: &str| {
        cluster.rig.kubectl(&["label", "node", NODE, &format!("{LABEL}={value}"), "--overwrite"]);
    };
    pause("paused-for-driver-upgrade");
    let left = || async {
        let of = async |component: &str| cluster.pods_of(component, NODE).await.len();
        (of("node").await + of("mps").await == 0).then_some(())
    };
    wait_until("tranche-node and tranche-mps to leave the node", PATIENCE, left).await;
    let driver = OtherDriver::unloaded(&cluster, OTHER);
    cluster.create(claim("late", json!({"requests": [gpu("gpu")]}))).await;
    cluster.create(on(NODE, user_of("late", "late"))).await;
    driver.load();
    pause("true");

    cluster.plugin(NODE).await;
    cluster.pod_of("mps", NODE).await;
    let published = || async {
        let found = cluster.published(NODE).await.into_iter().find(|one| one.name == device)?;
        let version = found.attributes?.get("driverVersion")?.version.clone()?;
        (version == "550.163.2").then_some(())
    };
    wait_until("the new driver's version to be published", PATIENCE, published).await;
    wait_edits_renewed(&cluster, "living").await;
    let run = container_run(&cluster.wait_ready("living").await);
    assert_eq!(run, container_run(&living), "the living pod was disturbed");
    cluster.kill9(NODE, &living);
    wait_run_again(&cluster, "living", &run.0).await;
    cluster.wait_ready("late").await;
    let late = cluster.devices_of("late").await.remove(0);
    for (pod, device) in [("living", &device), ("late", &late)] {
        let inside = cluster.inside(pod, "main");
        assert_eq!((&inside.gpus[..], inside.cuda), (&[minor_of(device)][..], true), "{pod}");
        let files = cluster.exec(pod, "main", "cat /proc/self/mountinfo");
        assert!(files.contains(OTHER) && !files.contains("550.163.01"), "{pod}: {files}");
    }
    cluster.delete_all(&["living", "late"].map(str::to_owned)).await;
    drop(driver);
    cluster.end().await;
}
