//! A small share keeps a large one out: who waits is told which move would make room, `tranche rebalance` shows it and does
//! it, and where the controller is told to, it does so by itself. On nodes without a machine.

use std::process::Command;

use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use serde_json::{Value, json};

use super::explain::why;
use super::{create_hollow, settings, share, wait_told};
use crate::hollow::{self, on_hollow, wait_node};
use crate::manifests::{as_nobody, by_template, template};
use crate::rig::{root, wait_until};
use crate::test_cluster::{PATIENCE, SYSTEM, TestCluster};

/// The first GPU of each of these nodes.
pub(super) fn devices(fraction: &str, nodes: &[&str]) -> Value {
    let uuids: Vec<String> = nodes.iter().map(|node| format!("'GPU-{node}-gpu-0'")).collect();
    let text = format!("device.attributes['gpu.nvidia.com'].uuid in [{}]", uuids.join(", "));
    let mut devices = share(json!({"fraction": fraction}));
    devices["requests"][0]["exactly"]["selectors"] = json!([{"cel": {"expression": text}}]);
    devices
}

/// A ReplicaSet of one pod with such a share; waits until the pod has a node.
async fn replica_set(cluster: &TestCluster, name: &str, fraction: &str, mark: Value) -> (String, String) {
    cluster.create(template(name, devices(fraction, &["hollow-0", "hollow-1"]))).await;
    let pod = on_hollow(as_nobody(by_template(name, name)));
    let labels = json!({"app": name});
    cluster
        .create(json!({"apiVersion": "apps/v1", "kind": "ReplicaSet", "metadata": {"name": name}, "spec": {
            "replicas": 1, "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels, "annotations": mark}, "spec": pod["spec"]}}}))
        .await;
    bound(cluster, name, "").await
}

/// Name and node of the pod of a ReplicaSet, another than `but`, once it has a node.
async fn bound(cluster: &TestCluster, set: &str, but: &str) -> (String, String) {
    let found = || async {
        let params = ListParams::default().labels(&format!("app={set}"));
        let pods = cluster.api::<Pod>().list(&params).await.ok()?.items;
        pods.into_iter().find_map(|pod| {
            let name = pod.metadata.name.filter(|name| name != but)?;
            Some((name, pod.spec?.node_name?))
        })
    };
    wait_until(&format!("a pod of ReplicaSet {set} to have a node"), PATIENCE, found).await
}

/// On hollow-0 half of the GPU is in use, on hollow-1 a tenth, by a pod that would fit beside the half. `large` waits. The
/// name of that pod.
pub(super) async fn fragmented(cluster: &TestCluster, mark: Value) -> String {
    let cordon = |verb: &str, node: &str| cluster.rig.kubectl(&[verb, node]);
    cordon("cordon", "hollow-1");
    let (_, node) = replica_set(cluster, "half", "0.5", json!({})).await;
    assert_eq!(node, "hollow-0");
    cordon("uncordon", "hollow-1");
    cordon("cordon", "hollow-0");
    let (small, node) = replica_set(cluster, "small", "0.1", mark).await;
    assert_eq!(node, "hollow-1");
    cordon("uncordon", "hollow-0");
    create_hollow(cluster, "large", devices("0.95", &["hollow-0", "hollow-1"]), |_| {}).await;
    small
}

/// `tranche rebalance` with these arguments: its answer, what it says beside, and its exit code.
pub(super) fn rebalance(cluster: &TestCluster, more: &[&str]) -> (String, String, Option<i32>) {
    let kubeconfig = cluster.rig.run(&["kubeconfig"]).trim().to_owned();
    let given = ["rebalance", "-n", &cluster.namespace, "--kubeconfig", &kubeconfig];
    let mut command = Command::new(env!("CARGO_BIN_EXE_tranche"));
    let out = command.args([&given[..], more].concat()).output().expect("the program can be run");
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    (text(out.stdout), text(out.stderr), out.status.code())
}

/// The large share runs where the small one was, and another small one beside the half.
async fn is_moved(cluster: &TestCluster, small: &str) {
    assert_eq!(wait_node(cluster, "large").await, "hollow-1");
    let (anew, node) = bound(cluster, "small", small).await;
    assert_eq!(node, "hollow-0", "{anew}");
}

/// Nobody makes pods anew any more.
pub(super) async fn end(cluster: TestCluster) {
    cluster.rig.kubectl(&["-n", &cluster.namespace, "delete", "replicasets", "--all"]);
    hollow::end(cluster).await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn what_waits_is_told_which_move_makes_room_and_a_person_makes_it() {
    let test = "what_waits_is_told_which_move_makes_room_and_a_person_makes_it";
    let cluster = super::bed_beside(test, 2).await;
    let (_, _, idle) = rebalance(&cluster, &[]);
    assert_eq!(idle, Some(0), "nothing waits");
    let small = fragmented(&cluster, json!({})).await;
    let told = wait_told(&cluster, "large", &format!("; evict {small} (")).await;
    assert!(told.contains("; it fits hollow-0/gpu-0; then this fits hollow-1/gpu-0"), "{told}");

    let said = why(&cluster, "large");
    assert!(
        said.contains(&format!("evict {small} (")) && said.contains("then this fits hollow-1/gpu-0"),
        "{said}"
    );

    let (said, beside, code) = rebalance(&cluster, &[]);
    assert_eq!(code, Some(3), "{said}{beside}");
    let namespace = &cluster.namespace;
    let evict = format!("  evict {namespace}/{small} (");
    for words in [
        "1 pod or gang waits for room; moving 1 pod would make room for 1.",
        &format!("\npod {namespace}/large\n"),
        &evict,
        "of ReplicaSet small); it fits hollow-0/gpu-0\n  then this fits hollow-1/gpu-0\n",
    ] {
        assert!(said.contains(words), "{words:?} is missing from\n{said}");
    }
    let (before, after) = said.split_once("\nAFTER\n").expect("there are two maps");
    let (large, moved) = (format!("{namespace}/large"), format!("{namespace}/{small}"));
    assert!(!before.split_once("\nBEFORE\n").expect("a map").1.contains(&large), "{said}");
    let (first, second) = after.split_once("\nhollow-1: ").expect("both nodes are drawn");
    assert!(first.contains(&moved) && second.contains(&large) && !second.contains(&moved), "{said}");

    // Nobody is there to be asked.
    let (_, said, code) = rebalance(&cluster, &["--apply"]);
    assert!(said.contains("give --yes") && code == Some(2), "{said}");
    let (_, said, code) = rebalance(&cluster, &["--apply", "--yes", "--timeout", "170s"]);
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains(&format!("{namespace}/large has its place on node hollow-1")), "{said}");
    is_moved(&cluster, &small).await;
    assert_eq!(rebalance(&cluster, &[]).2, Some(0), "nothing is left to be moved");
    end(cluster).await;
}

/// The controller's ClusterRole as the chart has it with `controller.consolidation: auto`.
fn may_evict(cluster: &TestCluster) {
    let chart = root().join("charts/tranche").display().to_string();
    let args = ["template", "tranche", &chart, "--namespace", SYSTEM, "--kube-version", "1.34.0", "--set"];
    let rendered = |value: &str| {
        let set = format!("controller.consolidation={value}");
        let more = [&set, "--show-only", "templates/controller.yaml"];
        let all = cluster.rig.helm(&[&args[..], &more].concat()).expect("the chart can be rendered");
        let is_role = |object: &&str| {
            object.contains("kind: ClusterRole\n") && object.contains("name: tranche-controller\n")
        };
        all.split("\n---\n").find(is_role).expect("there is a ClusterRole").to_owned()
    };
    let folder = tempfile::tempdir().expect("a folder can be made").keep();
    let [auto, usual] = ["auto", "propose"].map(|value| {
        let file = folder.join(format!("{value}.yaml"));
        std::fs::write(&file, rendered(value)).expect("a file can be written");
        file.display().to_string()
    });
    cluster.rig.on_end(&["kubectl", "replace", "-f", &usual]);
    cluster.rig.kubectl(&["replace", "-f", &auto]);
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn the_controller_moves_a_pod_that_is_marked_by_itself() {
    let test = "the_controller_moves_a_pod_that_is_marked_by_itself";
    let cluster = super::bed_beside(test, 2).await;
    may_evict(&cluster);
    // A new leader lets owners rest that have just made a pod.
    settings::set(&cluster, "TRANCHE_MOVE_REST", "1s", "10m").await;
    settings::set(&cluster, "TRANCHE_CONSOLIDATION", "auto", "propose").await;
    let small = fragmented(&cluster, json!({"tranche.dev/movable": "true"})).await;
    is_moved(&cluster, &small).await;
    super::wait_metric(&cluster, "tranche_controller_move_evictions_total", 1.0).await;
    end(cluster).await;
}
