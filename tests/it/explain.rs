//! `tranche explain` and `tranche top` as a person calls them, against an API server in memory: what is printed, with
//! the exit code, and that nothing is written.

use std::ffi::OsString;
use std::process::Command as Process;

use jiff::Timestamp;
use serde_json::{Value, json};
use tranche::cli::{self, Command, explain, top};
use tranche::cluster::KubeCluster;

use crate::mock_api::{Failure, MockApi, Verb};
use crate::objects::{put_node, share};

const NOW: &str = "2026-01-01T00:10:00Z";
const DRIVER: &str = "gpu.nvidia.com";

fn cluster(api: &MockApi) -> KubeCluster {
    KubeCluster::with_client(api.client())
}

fn parsed(line: &str) -> Command {
    let words = format!("tranche {line}");
    cli::parse(words.split(' ').map(OsString::from)).unwrap().command
}

/// What the command prints, and its exit code; nothing may be written by it.
async fn answered(api: &MockApi, line: &str) -> String {
    let Command::Explain(args) = parsed(line) else { panic!("{line}") };
    let kinds = ["pods", "nodes", "resourceclaims", "resourceslices", "deviceclasses", "events", "leases"];
    let writes = || kinds.map(|kind| api.writes(kind));
    let before = writes();
    let now: Timestamp = NOW.parse().unwrap();
    let answer = match explain::look(&cluster(api), &args, now).await {
        Ok(report) => format!("{}[exit {}]\n", explain::text(&report, args.output), report.exit_code()),
        Err(error) => format!("{error:#}\n[exit 1]\n"),
    };
    assert_eq!(writes(), before, "{line} writes");
    answer
}

fn put_pod(api: &MockApi, name: &str, claims: &[&str]) {
    let claims: Vec<Value> =
        claims.iter().map(|one| json!({"name": one, "resourceClaimName": one})).collect();
    api.put("pods", json!({"metadata": {"name": name, "namespace": "ml", "uid": format!("pod-{name}")},
        "spec": {"containers": [{"name": "main"}], "resourceClaims": claims}, "status": {"phase": "Pending"}}));
}

/// On one node with these devices; a share if it has a grant.
fn allocated(mut claim: Value, node: &str, device: &str, grant: Option<Value>) -> Value {
    let config = grant.map(|grant| {
        json!([{"source": "FromClass", "requests": ["gpu"], "opaque": {"driver": DRIVER, "parameters": {
            "apiVersion": "tranche.dev/v1alpha1", "kind": "ShareGrant", "devices": [grant]}}}])
    });
    claim["status"] = json!({"allocation": {
        "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [
            {"key": "metadata.name", "operator": "In", "values": [node]}]}]},
        "devices": {"config": config, "results": [
            {"request": "gpu", "driver": DRIVER, "pool": node, "device": device}]}}});
    claim
}

fn whole(name: &str) -> Value {
    json!({"metadata": {"name": name, "namespace": "ml", "uid": name}, "spec": {"devices": {
        "requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu.nvidia.com", "count": 1}}]}}})
}

/// node-a with a share of 60 GiB and a whole GPU given away, node-b cordoned; a controller that leads.
fn busy() -> MockApi {
    let api = MockApi::new();
    put_node(&api, "node-a", 2, json!({}));
    put_node(&api, "node-b", 2, json!({"unschedulable": true}));
    let grant = json!({"device": "gpu-0", "gpu": "GPU-node-a-0", "memory": "60Gi", "compute": 50, "slots": 1,
        "isolation": "mps"});
    let mut running =
        allocated(share("running", json!({"memory": "60Gi", "compute": 50})), "node-a", "gpu-0", Some(grant));
    running["status"]["reservedFor"] = json!([{"resource": "pods", "name": "runs", "uid": "pod-runs"}]);
    running["status"]["allocation"]["allocationTimestamp"] = json!("2026-01-01T00:01:00Z");
    running["status"]["devices"] = json!([{"driver": DRIVER, "pool": "node-a", "device": "gpu-0", "conditions": [
        {"type": "Ready", "status": "True", "reason": "Prepared", "message": "prepared",
         "lastTransitionTime": "2026-01-01T00:08:30Z"}]}]);
    api.put("resourceclaims", running);
    api.put("pods", json!({"metadata": {"name": "runs", "namespace": "ml", "uid": "pod-runs"},
        "spec": {"nodeName": "node-a", "containers": [{"name": "main"}],
            "resourceClaims": [{"name": "gpu", "resourceClaimName": "running"}]}, "status": {"phase": "Running"}}));
    let mut hold = allocated(whole("hold.gpu-0.node-a"), "node-a", "gpu-0", None);
    hold["metadata"]["namespace"] = json!("tranche-system");
    hold["metadata"]["labels"] = json!({"tranche.dev/hold": "true"});
    hold["metadata"]["annotations"] = json!({"tranche.dev/node": "node-a", "tranche.dev/device": "gpu-0"});
    api.put("resourceclaims", hold);
    api.put("resourceclaims", allocated(whole("train"), "node-a", "gpu-1", None));
    api.put(
        "leases",
        json!({"metadata": {"name": "tranche-controller", "namespace": "tranche-system"},
        "spec": {"holderIdentity": "tranche-controller-7c9_00ab", "leaseDurationSeconds": 10,
            "renewTime": "2026-01-01T00:09:58.000000Z"}}),
    );
    api
}

#[tokio::test]
async fn who_waits_sees_the_event_and_each_node() {
    let api = busy();
    let mut claim = share("large", json!({"memory": "40Gi"}));
    claim["metadata"]["annotations"] = json!({"tranche.dev/waiting": "needs 40960 MiB; earlier words"});
    api.put("resourceclaims", claim);
    put_pod(&api, "wants", &["large"]);
    let expected = "\
Claim:      ml/large (10m old)
Pods:       wants
Answer:     waits (memory)
Why:        needs 40960 MiB; largest free on 1 candidate GPU is 20480 MiB on node node-a/gpu-0; left out: 1 GPU not open to shares, 1 node that the pod may not run on; node node-b is cordoned; tolerate node.kubernetes.io/unschedulable or uncordon it
Controller: tranche-controller-7c9 leads, last sign of life 2s ago
On it:      tranche.dev/waiting: needs 40960 MiB; earlier words

NODE     VERDICT
node-a   largest free 20480 MiB of gpu-0, needs 40960; gpu-1: whole GPU of claim ml/train
node-b   is cordoned; tolerate node.kubernetes.io/unschedulable or uncordon it
[exit 3]
";
    assert_eq!(answered(&api, "explain large -n ml").await, expected);
    assert_eq!(answered(&api, "explain ml/large").await, expected);
    let of_pod = answered(&api, "explain pod/wants -n ml").await;
    assert_eq!(of_pod, format!("Pod:        ml/wants\n\n{expected}"));
    let json = answered(&api, "explain ml/large -o json").await;
    let json: Value = serde_json::from_str(json.strip_suffix("[exit 3]\n").unwrap()).unwrap();
    let claim = &json["claims"][0];
    assert_eq!((&claim["answer"], &claim["because"]), (&json!("waits"), &json!("memory")));
    assert_eq!(
        claim["nodes"][1],
        json!({"node": "node-b", "kind": "cordoned",
               "verdict": "is cordoned; tolerate node.kubernetes.io/unschedulable or uncordon it"})
    );
}

#[tokio::test]
async fn where_a_claim_is_and_where_it_would_be() {
    let api = busy();
    api.put(
        "namespaces",
        json!({"metadata": {"name": "ml", "labels": {"tranche.dev/kai-annotations": "enabled"}}}),
    );
    let placed = "\
Claim:      ml/running (10m old)
Pods:       runs (on node-a, has reserved it)
Answer:     placed on node node-a
Devices:    gpu-0: 61440 MiB, 50 % of compute, isolation mps
On it:      status.allocation, 9m ago: was written
            Ready of gpu-0, 90s ago: True (Prepared): prepared
[exit 0]
";
    assert_eq!(answered(&api, "explain ml/running").await, placed);
    let share = json!({"share": {"apiVersion": "tranche.dev/v1alpha1", "kind": "GpuShare", "fraction": "0.25"}, "count": 1});
    api.put(
        "pods",
        json!({"metadata": {"name": "kai", "namespace": "ml", "uid": "pod-kai",
            "annotations": {"tranche.dev/gpu-share": share.to_string()}},
        "spec": {"containers": [{"name": "main"}],
            "resourceClaims": [{"name": "gpu-share", "resourceClaimName": "kai-gpu-share-0a"}]}}),
    );
    let promised = "\
Pod:        ml/kai

Claim:      ml/kai-gpu-share-0a (planned for its pod; created once it has a place)
Pods:       kai
Answer:     there is room now on node node-a
Devices:    gpu-0: 20480 MiB, 25 % of compute, isolation mps
Controller: tranche-controller-7c9 leads, last sign of life 2s ago
[exit 0]
";
    assert_eq!(answered(&api, "explain pod/kai -n ml").await, promised);
    api.edit("namespaces", |namespace| namespace["metadata"]["labels"] = json!({}));
    let unlabelled = answered(&api, "explain pod/kai -n ml").await;
    let words =
        "labelled tranche.dev/kai-annotations=enabled, and ml is none; create the claim kai-gpu-share-0a";
    assert!(unlabelled.contains(words) && unlabelled.ends_with("[exit 3]\n"), "{unlabelled}");
    api.edit("namespaces", |namespace| {
        namespace["metadata"]["labels"] = json!({"tranche.dev/kai-annotations": "enabled"});
    });
    api.remove("leases", "tranche-controller");
    let nobody = answered(&api, "explain pod/kai -n ml").await;
    assert!(
        nobody.contains("Controller: no controller leads, so nothing is placed: there is no lease"),
        "{nobody}"
    );
}

#[tokio::test]
async fn what_is_not_the_controllers_or_can_never_be_is_said() {
    let api = busy();
    let train = answered(&api, "explain ml/train").await;
    let expected = "\
Claim:      ml/train
Answer:     not the controller's to place; it is placed on node node-a
Why:        was allocated by kube-scheduler
Devices:    gpu-1: the whole device
[exit 0]
";
    assert_eq!(train, expected);
    let hold = answered(&api, "explain hold.gpu-0.node-a -n tranche-system").await;
    assert!(
        hold.contains("keeps node-a/gpu-0 for shares that the controller places; it has claim ml/running")
    );
    api.put("resourceclaims", share("bad", json!({"memory": "1Gi", "fraction": "0.5"})));
    put_pod(&api, "bad", &["bad", "forgotten"]);
    let bad = answered(&api, "explain pod/bad -n ml").await;
    assert!(bad.contains("Answer:     refused: it can never be placed as it is\n"), "{bad}");
    assert!(bad.contains("Why:        spec.devices.config[0].opaque.parameters."), "{bad}");
    assert!(
        bad.contains("Lacks:      claim forgotten, which the pod names, does not exist; create it\n"),
        "{bad}"
    );
    assert!(bad.ends_with("[exit 3]\n"), "{bad}");
    put_pod(&api, "plain", &[]);
    let plain = answered(&api, "explain pod/plain -n ml").await;
    assert_eq!(
        plain,
        "Pod:        ml/plain\nNote:       the pod names no claim, so there is nothing to place for it\n[exit 0]\n"
    );
}

#[tokio::test]
async fn failures_say_what_was_asked_for() {
    let api = busy();
    assert_eq!(
        answered(&api, "explain traim -n ml").await,
        "there is no claim traim in namespace ml; similar there: train\n[exit 1]\n"
    );
    assert_eq!(
        answered(&api, "explain pod/run -n ml").await,
        "there is no pod run in namespace ml; similar there: runs\n[exit 1]\n"
    );
    api.fail(Verb::List, "pods", Failure::Status(403, "Forbidden"));
    let words = answered(&api, "explain ml/large").await;
    assert!(words.starts_with("LIST pods: forbidden (as the test wants)"), "{words}");
}

#[tokio::test]
async fn a_controller_elsewhere_is_noticed() {
    let api = busy();
    let other = answered(&api, "explain ml/running --controller-namespace other").await;
    assert!(other.contains("give --controller-namespace tranche-system"), "{other}");
}

#[test]
fn usage_is_told_without_a_cluster() {
    for (line, words) in [
        ("explain a/b/c", "has too many parts"),
        ("explain ml/a -n team", "name two namespaces"),
        ("explain a --policy best", "[possible values: pack, spread, fragmentation]"),
    ] {
        let output =
            Process::new(env!("CARGO_BIN_EXE_tranche")).args(line.split(' ')).env_clear().output().unwrap();
        let told = String::from_utf8(output.stderr).unwrap();
        assert!(told.contains(words), "{line}: {told}");
        assert_eq!(output.status.code(), Some(2), "{line}");
    }
}

#[tokio::test]
async fn top_shows_who_has_what() {
    let api = busy();
    let expected = "\
2 nodes, 4 devices: 2 free, 184320 MiB left in shares, 81920 MiB at most on one GPU

node-a: 2 devices, 1 whole, 1 in shares, 0 free
  gpu-0                  [AAAAAAAAAAAAAAA.....] 61440 of 81920 MiB   held
    A ml/runs (claim running)                  61440 MiB, 50 %
  gpu-1                  [####################] claim ml/train

node-b: 2 devices, 0 whole, 0 in shares, 2 free
  gpu-0                  [....................] 0 of 81920 MiB
  gpu-1                  [....................] 0 of 81920 MiB
";
    let looked = async |line: &str| {
        let Command::Top(args) = parsed(line) else { panic!("{line}") };
        top::look(&cluster(&api), &args, 82).await.unwrap()
    };
    assert_eq!(looked("top").await, expected);
    let one = looked("top --node node-b").await;
    assert!(one.starts_with("1 node, 2 devices: 2 free") && !one.contains("node-a"), "{one}");
    let Command::Top(nope) = parsed("top --node nope") else { panic!() };
    let error = top::look(&cluster(&api), &nope, 82).await.unwrap_err().to_string();
    assert_eq!(error, "no GPUs are published for node nope; nodes that have some: node-a, node-b");
    let json: Value = serde_json::from_str(&looked("top -o json").await).unwrap();
    assert_eq!(json["nodes"][0]["devices"][0]["claims"][0]["claim"], "running");
}
