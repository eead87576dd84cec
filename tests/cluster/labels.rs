//! The node's labels: what they say of simulated GPUs, whom they make way for, how they go, and what the node plugin may
//! write of Nodes.

use std::collections::BTreeMap;
use std::fs;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Event, Node};
use kube::api::{Api, ListParams, Patch, PatchParams};
use serde_json::{Value, json};

use crate::discovery::AtEnd;
use crate::manifests::{as_nobody, claim, gpu, user_of};
use crate::rig::{root, wait_until};
use crate::test_cluster::{PATIENCE, SYSTEM, TestCluster};

const NODE: &str = "node-a";
const SET: &str = "tranche-node";
const KEYS: [&str; 4] = ["product", "count", "memory", "present"];
const LIMIT: Duration = Duration::from_secs(60);
/// The right and the policy, which the manifests of the rig lack.
const PARTS: [&str; 2] = ["rbac", "policy"];

/// Gives the node plugin's account what the chart gives it for labels, until the test ends.
fn give_the_right(cluster: &TestCluster) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for part in PARTS {
        let show = format!("templates/{part}.yaml");
        let template = [
            "template",
            "tranche",
            "charts/tranche",
            "-n",
            SYSTEM,
            "--kube-version",
            "1.37.0",
            "--show-only",
            &show,
        ];
        let with_labels = [&template[..], &["--set", "nodeLabels=true"]].concat();
        let file = folder.path().join(part);
        fs::write(&file, cluster.rig.helm(&with_labels).unwrap()).unwrap();
        let plain = root().join("deploy").join(format!("{part}.yaml"));
        cluster.rig.on_end(&["kubectl", "apply", "-f", plain.to_str().unwrap()]);
        cluster.rig.kubectl(&["apply", "-f", file.to_str().unwrap()]);
    }
    let policy = "validatingadmissionpolicy/tranche-node-labels";
    let binding = "validatingadmissionpolicybinding/tranche-node-labels";
    cluster.rig.on_end(&["kubectl", "delete", policy, binding, "--ignore-not-found"]);
    folder
}

/// The node plugins with this flag, and no older ones.
async fn set(cluster: &TestCluster, before: &[String], flag: &str) {
    let args: Vec<String> = before.iter().cloned().chain([flag.to_owned()]).collect();
    cluster.rig.kubectl(&["-n", SYSTEM, "patch", "daemonset", SET, "-p", &with_args(&args)]);
    cluster.rig.run(&["kubectl", "-n", SYSTEM, "rollout", "status", "daemonset", SET, "--timeout=170s"]);
    let alone = || async { (cluster.plugins(NODE).await.len() == 1).then_some(()) };
    wait_until("the old plugin to be gone", PATIENCE, alone).await;
}

fn with_args(args: &[String]) -> String {
    let containers = json!([{"name": "node", "args": args}]);
    json!({"spec": {"template": {"spec": {"containers": containers}}}}).to_string()
}

fn args(cluster: &TestCluster) -> Vec<String> {
    let text = cluster.rig.kubectl(&["-n", SYSTEM, "get", "daemonset", SET, "-o", "json"]);
    let stored: Value = serde_json::from_str(&text).expect("a DaemonSet is JSON");
    serde_json::from_value(stored["spec"]["template"]["spec"]["containers"][0]["args"].clone()).unwrap()
}

/// The node's labels of these four.
async fn labels(nodes: &Api<Node>) -> BTreeMap<String, String> {
    let all = nodes.get(NODE).await.expect("the node is there").metadata.labels.unwrap_or_default();
    let ours = |key: &str| Some((key.to_owned(), all.get(&format!("nvidia.com/gpu.{key}"))?.clone()));
    KEYS.into_iter().filter_map(ours).collect()
}

async fn wait_labels(nodes: &Api<Node>, what: &str, wanted: &BTreeMap<String, String>) {
    wait_until(what, LIMIT, || async { (labels(nodes).await == *wanted).then_some(()) }).await;
}

/// Has the node plugin look again at what the node has.
fn look_again(cluster: &TestCluster, mig: &str) {
    cluster.fake(NODE, &["set-mig", "6", mig]);
    cluster.fake(NODE, &["event", "6", "mig-config"]);
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_node_is_labelled_by_its_gpus_and_makes_way_for_whoever_labels_it_already() {
    let test = "a_node_is_labelled_by_its_gpus_and_makes_way_for_whoever_labels_it_already";
    let cluster = TestCluster::of_env(test).await;
    let nodes: Api<Node> = Api::all(cluster.client.clone());
    assert_eq!(labels(&nodes).await, BTreeMap::new(), "off by default");
    let before = args(&cluster);
    for node in ["node-a", "node-b"] {
        let keys = KEYS.map(|key| format!("nvidia.com/gpu.{key}-"));
        let [product, count, memory, present] = keys.each_ref().map(String::as_str);
        let words =
            ["kubectl", "label", "node", "-l", &format!("kubernetes.io/hostname={node}"), product, count];
        cluster.rig.on_end(&[&words[..], &[memory, present]].concat());
    }
    let rollout = ["kubectl", "-n", SYSTEM, "rollout", "status", "daemonset", SET, "--timeout=170s"];
    cluster.rig.on_end(&rollout);
    cluster.rig.on_end(&["kubectl", "-n", SYSTEM, "patch", "daemonset", SET, "-p", &with_args(&before)]);
    let _rights = give_the_right(&cluster);

    // Somebody else is there first: nothing is changed, and the plugin's pod says so.
    let others = "nvidia.com/gpu.product=by-somebody-else";
    cluster.rig.kubectl(&["label", "node", NODE, others]);
    set(&cluster, &before, "--node-labels=on").await;
    let told = || async {
        let events = Api::<Event>::namespaced(cluster.client.clone(), SYSTEM);
        let of = |event: &&Event| event.reason.as_deref() == Some("NodeLabelsConflict");
        let events = events.list(&ListParams::default()).await.ok()?.items;
        let name = cluster.plugin(NODE).await.metadata.name;
        events.iter().filter(of).find(|event| event.involved_object.name == name)?.message.clone()
    };
    let told = wait_until("the conflict to be told", LIMIT, told).await;
    assert!(
        told.contains("left alone") && told.contains(".metadata.labels.nvidia.com/gpu.product"),
        "{told}"
    );
    let theirs = BTreeMap::from([("product".to_owned(), "by-somebody-else".to_owned())]);
    assert_eq!(labels(&nodes).await, theirs, "none of the others is set beside it");

    // They leave: the labels are ours at the next look.
    cluster.rig.kubectl(&["label", "node", NODE, "nvidia.com/gpu.product-"]);
    let undo = AtEnd(&cluster, &["set-mig", "6", "off"]);
    look_again(&cluster, "1g.10gb");
    let ours =
        [("product", "NVIDIA-H100-80GB-HBM3"), ("count", "8"), ("memory", "81559"), ("present", "true")];
    let ours: BTreeMap<String, String> =
        ours.into_iter().map(|(key, value)| (key.to_owned(), value.to_owned())).collect();
    wait_labels(&nodes, "the node to be labelled", &ours).await;

    // What chooses nodes by them finds this one: an affinity, as files made for feature discovery have it.
    let is = json!({"key": "nvidia.com/gpu.product", "operator": "In", "values": ["NVIDIA-H100-80GB-HBM3"]});
    let chosen = json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution":
        {"nodeSelectorTerms": [{"matchExpressions": [is]}]}}});
    cluster.create(claim("chosen", json!({"requests": [gpu("gpu")]}))).await;
    let mut pod = as_nobody(user_of("chosen", "chosen"));
    pod["spec"]["affinity"] = chosen;
    cluster.create(pod).await;
    let placed = cluster.wait_ready("chosen").await.spec.and_then(|spec| spec.node_name);
    assert_eq!(placed.as_deref(), Some(NODE));
    cluster.delete("chosen").await;

    // Somebody takes one over: it stays theirs.
    cluster.rig.kubectl(&["label", "node", NODE, "--overwrite", others]);
    let conflicts = || async {
        let metrics = cluster.metrics(NODE).await;
        let line = metrics.lines().find(|line| line.starts_with("tranche_node_label_conflicts_total "))?;
        line.rsplit(' ').next()?.parse::<f64>().ok()
    };
    let so_far = conflicts().await.expect("conflicts are counted");
    look_again(&cluster, "off");
    let again = || async { conflicts().await.filter(|count| *count > so_far) };
    wait_until("another conflict to be counted", LIMIT, again).await;
    let both = BTreeMap::from_iter(ours.clone().into_iter().chain(theirs.clone()));
    assert_eq!(labels(&nodes).await, both);
    drop(undo);

    // Those that are ours are taken away on request, and theirs stay.
    set(&cluster, &before, "--node-labels=remove").await;
    wait_labels(&nodes, "our labels to be gone", &theirs).await;
    cluster.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn the_node_plugin_writes_four_labels_of_its_own_node_and_nothing_else() {
    let test = "the_node_plugin_writes_four_labels_of_its_own_node_and_nothing_else";
    let cluster = TestCluster::of_env(test).await;
    let plugin = cluster.plugin(NODE).await.metadata;
    let (name, uid) = (plugin.name.unwrap(), plugin.uid.unwrap());
    let token = ["-n", SYSTEM, "create", "token", SET, "--bound-object-kind=Pod"];
    let bound = [format!("--bound-object-name={name}"), format!("--bound-object-uid={uid}")];
    let token = cluster.rig.kubectl(&[&token[..], &bound.each_ref().map(String::as_str)].concat());
    let nodes: Api<Node> = Api::all(cluster.rig.client_with_token(token.trim()).await);
    let dry = PatchParams { dry_run: true, ..PatchParams::default() };
    let tried = async |node: &str, change: &Value| {
        nodes.patch(node, &dry, &Patch::Merge(change)).await.map_err(|error| error.to_string())
    };
    let label = |key: &str| json!({"metadata": {"labels": {key: "x"}}});
    let own = label("nvidia.com/gpu.product");
    let said = tried(NODE, &own).await.unwrap_err();
    assert!(said.contains("cannot patch resource \"nodes\""), "not without nodeLabels: {said}");

    let _rights = give_the_right(&cluster);
    cluster.rig.on_end(&["kubectl", "delete", "node", "labels-other", "--ignore-not-found"]);
    let other: Node = serde_json::from_value(json!({"metadata": {"name": "labels-other"}})).unwrap();
    let admin: Api<Node> = Api::all(cluster.client.clone());
    admin.create(&kube::api::PostParams::default(), &other).await.unwrap();
    let refusals = [
        ("labels-other", own.clone(), "may label that node only, not 'labels-other'"),
        (NODE, label("node-role.kubernetes.io/control-plane"), "and no other label"),
        (NODE, label("nvidia.com/gpu.family"), "and no other label"),
        (NODE, json!({"metadata": {"labels": {"kubernetes.io/hostname": null}}}), "and no other label"),
        (NODE, json!({"spec": {"unschedulable": true}}), "labels of a node only"),
        (NODE, json!({"spec": {"taints": [{"key": "a", "effect": "NoSchedule"}]}}), "labels of a node only"),
        (NODE, json!({"metadata": {"annotations": {"a": "b"}}}), "labels of a node only"),
        (NODE, json!({"metadata": {"finalizers": ["a.example/b"]}}), "labels of a node only"),
    ];
    for (node, change, words) in &refusals {
        let refused =
            || async { tried(node, change).await.err().filter(|said| said.contains(words)).map(|_| ()) };
        wait_until(&format!("{change} of {node} to be refused with {words:?}"), LIMIT, refused).await;
    }
    for key in KEYS {
        tried(NODE, &label(&format!("nvidia.com/gpu.{key}")))
            .await
            .unwrap_or_else(|said| panic!("{key}: {said}"));
    }
    cluster.end().await;
}
