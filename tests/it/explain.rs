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
const SHAPE: top::PictureStyle = top::PictureStyle { width: 82, reverse: false };

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
    let kinds = [
        "pods",
        "nodes",
        "resourceclaims",
        "resourceslices",
        "deviceclasses",
        "events",
        "leases",
        "resourceclaimtemplates",
        "deployments",
        "resourcequotas",
    ];
    let writes = || kinds.map(|kind| api.writes(kind));
    let before = writes();
    let now: Timestamp = NOW.parse().unwrap();
    let answer = match explain::look(&cluster(api), &args, now).await {
        Ok(report) => {
            format!("{}[exit {}]\n", explain::text(&report, args.output).unwrap(), report.exit_code())
        }
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
    let yaml = answered(&api, "explain ml/large -o yaml").await;
    let yaml: Value = serde_saphyr::from_str(yaml.strip_suffix("[exit 3]\n").unwrap()).unwrap();
    assert_eq!(yaml, json);
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

/// A GPU of node-m that is cut into MIG devices, of which somebody has made one by hand.
fn put_cut_board(api: &MockApi) {
    put_node(api, "node-m", 0, json!({}));
    let string = |value: &str| json!({"string": value});
    let board = json!({"name": "gpu-0", "attributes": {
            "type": string("mig-parent"), "uuid": string("GPU-node-m-0"), "isolation": string("mig"),
            "productName": string("NVIDIA H100 80GB HBM3"), "totalMemoryMiB": {"int": 81_559},
            "migProfile9": string("3g.40gb 3/2 40448 60 4@0,4"),
            "migProfile14": string("2g.20gb 2/3 20096 32 2@0,2,4"),
            "migProfile19": string("1g.10gb 1/7 9984 16 1@0,1,2,3,4,5,6"),
            "migInstances": string("14:2@0")},
        "capacity": {"memory": {"value": "81559Mi"}}});
    api.edit("resourceslices", |slice| {
        if slice["metadata"]["name"] == "node-m-slice" {
            slice["spec"]["devices"] = json!([board]);
        }
    });
    let mut hold = allocated(whole("hold.gpu-0.node-m"), "node-m", "gpu-0", None);
    hold["metadata"]["namespace"] = json!("tranche-system");
    hold["metadata"]["labels"] = json!({"tranche.dev/hold": "true"});
    hold["metadata"]["annotations"] = json!({"tranche.dev/node": "node-m", "tranche.dev/device": "gpu-0"});
    api.put("resourceclaims", hold);
}

#[tokio::test]
async fn claims_for_mig_devices_of_the_controllers_are_told_what_they_have_and_what_they_wait_for() {
    let api = busy();
    put_cut_board(&api);
    let asks = |name: &str, memory: &str| share(name, json!({"memory": memory, "minimumIsolation": "mig"}));
    for (name, profile, start) in [("small", 19, 6), ("double", 14, 4)] {
        let mib = if profile == 19 { "9984Mi" } else { "20096Mi" };
        let place = json!({"profile": profile, "start": start, "size": if profile == 19 { 1 } else { 2 }});
        let grant = json!({"device": "gpu-0", "gpu": "GPU-node-m-0", "memory": mib, "slots": 1,
            "isolation": "mig", "mig": place});
        let mut claim = allocated(asks(name, "9Gi"), "node-m", "gpu-0", Some(grant));
        claim["status"]["allocation"]["devices"]["results"][0]["pool"] = json!("node-m/shares");
        let pod = format!("with-{name}");
        let uid = format!("pod-{pod}");
        claim["status"]["reservedFor"] = json!([{"resource": "pods", "name": pod, "uid": uid}]);
        api.put("resourceclaims", claim);
        let claims = json!([{"name": "gpu", "resourceClaimName": name}]);
        api.put(
            "pods",
            json!({"metadata": {"name": pod, "namespace": "ml", "uid": uid}, "spec": {"nodeName": "node-m",
            "containers": [{"name": "main"}], "resourceClaims": claims}, "status": {"phase": "Running"}}),
        );
    }
    let placed = answered(&api, "explain ml/small").await;
    let expected = "\
Claim:      ml/small (10m old)
Pods:       with-small (on node-m, has reserved it)
Answer:     placed on node node-m
Devices:    gpu-0: a MIG device of 9984 MiB, for this claim alone
[exit 0]
";
    assert_eq!(placed, expected);
    api.put("resourceclaims", asks("waits", "30Gi"));
    put_pod(&api, "wants", &["waits"]);
    let waits = answered(&api, "explain ml/waits").await;
    let why = "needs a MIG device with 30720 MiB; the largest that node node-m/gpu-0 can still make has 20096 MiB (2g.20gb)";
    let verdict = "node-m   largest MIG device that can be made 20096 MiB of gpu-0, needs 30720 MiB\n";
    let answer = format!("Answer:     waits (memory)\nWhy:        {why}");
    has(&waits, &[&answer, verdict], 3);
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
        answered(&api, "explain pod web -n nowhere").await,
        "Error from server (NotFound): namespaces \"nowhere\" not found\n[exit 1]\n"
    );
    assert_eq!(
        answered(&api, "explain pod/run -n ml").await,
        "there is no pod run in namespace ml; similar there: runs\n[exit 1]\n"
    );
    api.fail(Verb::List, "resourceclaims", Failure::Broken);
    let words = answered(&api, "explain ml/large").await;
    assert!(words.starts_with("LIST resourceclaims: the API server cannot be reached"), "{words}");
    api.let_see_only("team");
    let words = answered(&api, "explain ml/large").await;
    let forbidden = "Error from server (Forbidden): resourceclaims is forbidden";
    assert!(words.starts_with(forbidden) && words.contains("ask for ClusterRole tranche-viewer"), "{words}");
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
        ("explain", "<CLAIM|NAMESPACE/CLAIM|KIND/NAME>"),
        ("explain a -f b", "cannot be used with"),
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

/// The classes that the chart installs.
fn put_classes(api: &MockApi) {
    let is = |kind: &str| {
        let cel = format!(
            "device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == '{kind}'"
        );
        json!([{"cel": {"expression": cel}}])
    };
    api.put(
        "deviceclasses",
        json!({"metadata": {"name": "gpu.nvidia.com"},
            "spec": {"selectors": is("gpu"), "extendedResourceName": "nvidia.com/gpu"}}),
    );
    api.put(
        "deviceclasses",
        json!({"metadata": {"name": "mig.nvidia.com"}, "spec": {"selectors": is("mig")}}),
    );
    api.put(
        "deviceclasses",
        json!({"metadata": {"name": "shared.gpu.nvidia.com"}, "spec": {"selectors": is("gpu")}}),
    );
}

fn put_quota(api: &MockApi, resource: &str, used: &str, hard: &str) {
    api.put(
        "resourcequotas",
        json!({"metadata": {"name": "team", "namespace": "ml"}, "spec": {"hard": {resource: hard}},
            "status": {"hard": {resource: hard}, "used": {resource: used}}}),
    );
}

/// A pod of one container with these resources, that names these claims.
fn put_pod_with(api: &MockApi, name: &str, claims: &[&str], resources: Value) {
    put_pod(api, name, claims);
    let pod = |pod: &mut Value| {
        if pod["metadata"]["name"] == *name {
            pod["spec"]["containers"] = json!([{"name": "main", "resources": resources}]);
        }
    };
    api.edit("pods", pod);
}

fn put_event(api: &MockApi, uid: &str, reason: &str, message: &str, at: &str) {
    api.put(
        "events",
        json!({"metadata": {"name": format!("{uid}.{reason}"), "namespace": "ml"}, "type": "Warning",
            "involvedObject": {"uid": uid}, "reason": reason, "message": message, "lastTimestamp": at}),
    );
}

/// As kube-scheduler gives a part of a GPU, or all of it, where GPUs are shared.
fn consumed(mut claim: Value, memory: &str, compute: &str) -> Value {
    let result = &mut claim["status"]["allocation"]["devices"]["results"][0];
    result["shareID"] = json!("6f0c1f2e-9f1a-4a53-8f7b-3d1c5a3f0b6e");
    result["consumedCapacity"] = json!({"memory": memory, "compute": compute, "shares": "1"});
    claim
}

#[track_caller]
fn has(said: &str, lines: &[&str], exit: u8) {
    for line in lines {
        assert!(said.contains(line), "{line:?} is not in\n{said}");
    }
    assert!(said.ends_with(&format!("[exit {exit}]\n")), "{said}");
}

#[tokio::test]
async fn a_quota_that_is_used_up_is_told_before_room_that_there_is() {
    let api = busy();
    put_classes(&api);
    let labels = json!({"tranche.dev/kai-annotations": "enabled"});
    api.put("namespaces", json!({"metadata": {"name": "ml", "labels": labels}}));
    let share = json!({"share": {"apiVersion": "tranche.dev/v1alpha1", "kind": "GpuShare", "fraction": "0.25"}, "count": 1});
    api.put(
        "pods",
        json!({"metadata": {"name": "kai", "namespace": "ml", "uid": "pod-kai",
            "annotations": {"tranche.dev/gpu-share": share.to_string()}},
        "spec": {"containers": [{"name": "main"}],
            "resourceClaims": [{"name": "gpu-share", "resourceClaimName": "kai-gpu-share-0a"}]}}),
    );
    let devices = "shared.gpu.nvidia.com.deviceclass.resource.k8s.io/devices";
    put_quota(&api, devices, "7", "8");
    has(&answered(&api, "explain pod/kai -n ml").await, &["there is room now on node node-a"], 0);
    put_quota(&api, devices, "8", "8");
    let scoped = json!({"metadata": {"name": "best-effort", "namespace": "ml"},
        "spec": {"scopes": ["BestEffort"], "hard": {devices: "0"}}});
    api.put("resourcequotas", scoped);
    let not_looked_at = "Note:       ResourceQuota best-effort has scopes, which are not looked at\n";
    let full = format!("ResourceQuota team: {devices}: 8 of 8 used, 1 needed");
    let said = answered(&api, "explain pod/kai -n ml").await;
    has(&said, &[not_looked_at], 3);
    assert!(!answered(&api, "explain ml/running").await.contains("has scopes"), "it has its place");
    has(
        &said,
        &["Answer:     waits (quota)\nWhy:        the controller may not create the claim: ", &full],
        3,
    );

    // A claim that kube-controller-manager is to make.
    let pod = json!({"metadata": {"name": "made", "namespace": "ml", "uid": "pod-made"}, "spec": {
        "containers": [{"name": "main"}], "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "share"}]}});
    api.put("pods", pod);
    let missing = "there is no ResourceClaimTemplate share in namespace ml; create it";
    has(&answered(&api, "explain pod/made -n ml").await, &[missing], 3);
    let template = crate::objects::share("share", json!({"memory": "1Gi"}))["spec"].clone();
    api.put(
        "resourceclaimtemplates",
        json!({"metadata": {"name": "share", "namespace": "ml"}, "spec": {"spec": template}}),
    );
    has(
        &answered(&api, "explain pod/made -n ml").await,
        &[&format!("from the template share yet: {full}")],
        3,
    );

    // One that kube-scheduler is to make.
    put_pod_with(
        &api,
        "limits",
        &[],
        json!({"limits": {"nvidia.com/gpu": "1"}, "requests": {"nvidia.com/gpu": "1"}}),
    );
    let devices = "gpu.nvidia.com.deviceclass.resource.k8s.io/devices";
    put_quota(&api, devices, "1", "1");
    let full = format!("ResourceQuota team: {devices}: 1 of 1 used, 1 needed");
    let said = answered(&api, "explain pod/limits -n ml").await;
    has(&said, &["Limits:     nvidia.com/gpu: 1 (kube-scheduler makes", "waits (quota)", &full], 3);
}

#[tokio::test]
async fn what_no_node_has_is_told_though_its_gpus_have_room() {
    let api = busy();
    put_classes(&api);
    let fpga = |count: &str| {
        let list = json!({"example.com/fpga": count});
        json!({"limits": list, "requests": list})
    };
    api.put("resourceclaims", share("small", json!({"memory": "1Gi"})));
    put_pod_with(&api, "small", &["small"], fpga("1"));
    let row = "node-a   example.com/fpga: needs 1, 0 left";
    let why = "Why:        the pod needs 1 example.com/fpga, and no node with room on its GPUs has any left";
    let said = answered(&api, "explain pod/small -n ml").await;
    has(&said, &["Answer:     waits (node-resources)\n", why, row], 3);
    // With a node that has it the share goes there.
    put_node(&api, "node-c", 1, json!({}));
    api.edit("nodes", |node| {
        if node["metadata"]["name"] == "node-c" {
            node["status"]["allocatable"]["example.com/fpga"] = json!("2");
        }
    });
    has(&answered(&api, "explain ml/small").await, &["there is room now on node node-c"], 0);
    put_pod_with(&api, "small", &["small"], fpga("3"));
    let said = answered(&api, "explain ml/small").await;
    has(&said, &["node node-c has most left: 2", "node-c   example.com/fpga: needs 3, 2 left"], 3);

    // Whole GPUs are looked at alike.
    api.put("resourceclaims", whole("big"));
    put_pod_with(&api, "big", &["big"], json!({"requests": {"cpu": "100"}}));
    let said = answered(&api, "explain pod/big -n ml").await;
    let row = "node-c   has 64000m of CPU left, 100000m are needed";
    has(&said, &["Answer:     waits (devices)", "of 3 nodes with such devices none takes the pod", row], 3);
    put_pod_with(&api, "big", &["big"], json!({"requests": {"memory": "1Ti"}}));
    has(&answered(&api, "explain pod/big -n ml").await, &["of memory left, 1048576 MiB are needed"], 3);
    put_pod_with(&api, "big", &["big"], fpga("2"));
    let said = answered(&api, "explain pod/big -n ml").await;
    has(
        &said,
        &["Answer:     there is room now\nHow:        kube-scheduler allocates it", "free on node-c"],
        0,
    );
}

#[tokio::test]
async fn a_whole_gpu_is_told_from_a_share_of_kube_schedulers() {
    let api = busy();
    put_classes(&api);
    let all = consumed(allocated(whole("train"), "node-a", "gpu-1", None), "80Gi", "0");
    api.put("resourceclaims", all);
    has(&answered(&api, "explain ml/train").await, &["Devices:    gpu-1: the whole device\n"], 0);
    api.put("resourceclaims", share("large", json!({"memory": "40Gi"})));
    put_pod(&api, "wants", &["large"]);
    has(&answered(&api, "explain ml/large").await, &["gpu-1: whole GPU of claim ml/train\n"], 3);
    let part = consumed(allocated(whole("train"), "node-a", "gpu-1", None), "20Gi", "25");
    api.put("resourceclaims", part);
    let words = "Devices:    gpu-1: 20480 MiB, 25 % of compute, a share that kube-scheduler allocated\n";
    has(&answered(&api, "explain ml/train").await, &[words], 0);
    has(
        &answered(&api, "explain ml/large").await,
        &["gpu-1: shared by kube-scheduler, with claim ml/train\n"],
        3,
    );
}

#[tokio::test]
async fn a_pod_that_asks_by_its_limits_is_explained_before_and_after_it_has_its_claim() {
    let api = busy();
    put_classes(&api);
    let gpus = |count: &str| {
        let list = json!({"nvidia.com/gpu": count});
        json!({"limits": list, "requests": list})
    };
    put_pod_with(&api, "limits", &[], gpus("1"));
    let said = answered(&api, "explain pod/limits -n ml").await;
    let limits = "Limits:     nvidia.com/gpu: 1 (kube-scheduler makes a claim of it as it binds the pod)\n";
    let rows = [
        "node-a   gpu-0: has a share of claim ml/running; gpu-1: whole GPU of claim ml/train\n",
        "node-b   is cordoned; tolerate node.kubernetes.io/unschedulable or uncordon it\n",
    ];
    has(&said, &[limits, "Answer:     waits (devices)\n", rows[0], rows[1]], 3);
    api.edit("nodes", |node| node["spec"] = json!({}));
    has(&answered(&api, "explain pod/limits -n ml").await, &["there is room now", "free on node-b"], 0);
    put_pod_with(&api, "limits", &[], gpus("3"));
    let said = answered(&api, "explain pod/limits -n ml").await;
    has(&said, &["nearest is node node-b: needs 3 GPUs, fit: gpu-0, gpu-1"], 3);

    let mut claim = allocated(whole("limits-extended-resources-x7"), "node-b", "gpu-0", None);
    claim["metadata"]["annotations"] = json!({"resource.kubernetes.io/extended-resource-claim": "true"});
    api.put("resourceclaims", claim);
    api.edit("pods", |pod| {
        if pod["metadata"]["name"] == "limits" {
            pod["spec"]["nodeName"] = json!("node-b");
            pod["status"]["extendedResourceClaimStatus"] = json!({
                "resourceClaimName": "limits-extended-resources-x7",
                "requestMappings": [{"containerName": "main", "resourceName": "nvidia.com/gpu", "requestName": "r"}]});
        }
    });
    let words = "was made and allocated by kube-scheduler for the pod's limits nvidia.com/gpu: 3\n";
    let said = answered(&api, "explain pod/limits -n ml").await;
    has(&said, &["Claim:      ml/limits-extended-resources-x7\n", words, "gpu-0: the whole device"], 0);
}

#[tokio::test]
async fn a_class_that_is_missing_and_a_selector_that_matches_nothing_are_named() {
    let api = busy();
    put_classes(&api);
    let mut claim = whole("odd");
    let exactly = |claim: &mut Value, class: &str, selectors: Value| {
        claim["spec"]["devices"]["requests"][0]["exactly"] =
            json!({"deviceClassName": class, "count": 1, "selectors": selectors});
    };
    exactly(&mut claim, "gpu.nvidia.con", json!([]));
    api.put("resourceclaims", claim.clone());
    put_pod(&api, "odd", &["odd"]);
    let words = "Answer:     waits (device-class)\nWhy:        request gpu: there is no DeviceClass gpu.nvidia.con; there are \
                 gpu.nvidia.com, mig.nvidia.com, shared.gpu.nvidia.com\n";
    has(&answered(&api, "explain pod/odd -n ml").await, &[words], 3);

    let product = "device.attributes['gpu.nvidia.com'].productName == 'NVIDIA B300'";
    exactly(&mut claim, "gpu.nvidia.com", json!([{"cel": {"expression": product}}]));
    api.put("resourceclaims", claim.clone());
    let words = format!(
        "Answer:     waits (selector)\nWhy:        request gpu: no device matches selector {product:?}; class \
         gpu.nvidia.com has 4 devices in the cluster\n"
    );
    has(&answered(&api, "explain pod/odd -n ml").await, &[&words], 3);

    let unknown = "device.attributes['gpu.nvidia.com'].colour == 'green'";
    exactly(&mut claim, "gpu.nvidia.com", json!([{"cel": {"expression": unknown}}]));
    api.put("resourceclaims", claim.clone());
    has(&answered(&api, "explain pod/odd -n ml").await, &["waits (selector)", "fails: "], 3);

    exactly(&mut claim, "mig.nvidia.com", json!([]));
    api.put("resourceclaims", claim.clone());
    let words = "request gpu: no device of class mig.nvidia.com is published in the cluster";
    has(&answered(&api, "explain pod/odd -n ml").await, &["waits (selector)", words], 3);

    // A selector that one node's devices match.
    let first = "device.attributes['gpu.nvidia.com'].uuid == 'GPU-node-a-1'";
    exactly(&mut claim, "gpu.nvidia.com", json!([{"cel": {"expression": first}}]));
    api.put("resourceclaims", claim.clone());
    let said = answered(&api, "explain pod/odd -n ml").await;
    has(&said, &["waits (devices)", "node-a   gpu-1: whole GPU of claim ml/train; gpu-0: not selected\n"], 3);

    // What shares can be granted is less than what the GPU has.
    api.edit("resourceslices", |slice| {
        for device in slice["spec"]["devices"].as_array_mut().unwrap() {
            device["attributes"]["totalMemoryMiB"] = json!({"int": 81_920});
            device["capacity"]["memory"] = json!({"value": "80791Mi"});
        }
    });
    let hint = "select by device.attributes['gpu.nvidia.com'].totalMemoryMiB\n";
    for (wanted, hinted) in [("80Gi", true), ("81Gi", false)] {
        let text = format!("device.capacity['gpu.nvidia.com'].memory.compareTo(quantity('{wanted}')) >= 0");
        exactly(&mut claim, "gpu.nvidia.com", json!([{"cel": {"expression": text}}]));
        api.put("resourceclaims", claim.clone());
        let said = answered(&api, "explain pod/odd -n ml").await;
        has(&said, &["waits (selector)", "no device matches selector"], 3);
        assert_eq!(said.contains(hint), hinted, "{wanted}: {said}");
    }
}

#[tokio::test]
async fn a_pod_whose_process_the_watchdog_ended_says_so() {
    let api = busy();
    let ended = "process 4711 was ended: the claim uses 70000 MiB of the 61440 MiB that it was granted on GPU-0. Ask for \
                 more memory, or use less";
    put_event(&api, "pod-runs", "ProcessEnded", ended, "2026-01-01T00:09:00Z");
    put_event(&api, "pod-runs", "FailedScheduling", "0/2 nodes are available", "2026-01-01T00:00:10Z");
    let killed = json!({"terminated": {"exitCode": 137, "reason": "Error"}});
    let status = |phase: &str, state: Value| {
        json!({"phase": phase, "containerStatuses": [
            {"name": "main", "restartCount": 2, "state": state, "lastState": killed}]})
    };
    let set = |phase: &'static str, state: Value| {
        api.edit("pods", |pod| pod["status"] = status(phase, state.clone()));
    };
    set("Running", json!({"running": {}}));
    let said = answered(&api, "explain pod/runs -n ml").await;
    let note = "Note:       container main ended with exit code 137, which is signal 9; it was started again 2 times\n";
    let event = format!("Event:      ProcessEnded, 60s ago: {ended}\n");
    has(&said, &["Answer:     placed on node node-a", note, &event], 0);
    assert!(!said.contains("FailedScheduling"), "it is bound: {said}");
    set("Failed", killed.clone());
    let said = answered(&api, "explain pod/runs -n ml").await;
    has(&said, &["the pod has ended (Failed): its devices were released", "exit code 137", &event], 0);
}

#[tokio::test]
async fn an_edit_user_is_told_what_can_be_told_and_whom_to_ask() {
    let api = busy();
    put_classes(&api);
    put_quota(&api, "pods", "1", "9");
    let mut claim = share("large", json!({"memory": "40Gi"}));
    claim["metadata"]["annotations"] = json!({"tranche.dev/waiting": "needs 40960 MiB; earlier words"});
    api.put("resourceclaims", claim);
    put_pod(&api, "wants", &["large"]);
    api.put("resourceclaims", share("held", json!({"memory": "1Gi"})));
    put_pod(&api, "held", &["held"]);
    api.edit("pods", |pod| {
        if pod["metadata"]["name"] == "held" {
            pod["spec"]["schedulingGates"] =
                json!([{"name": "example.com/budget"}, {"name": "example.com/day"}]);
        }
    });
    api.put("resourceclaims", whole("big"));
    put_pod(&api, "big", &["big"]);
    put_pod_with(&api, "limits", &[], json!({"limits": {"nvidia.com/gpu": "1"}}));
    put_event(
        &api,
        "pod-big",
        "FailedScheduling",
        "0/2 nodes are available: 2 cannot allocate",
        "2026-01-01T00:09:00Z",
    );
    api.let_see_only("ml");

    let denied = "you may not list nodes, resourceslices.resource.k8s.io, deviceclasses.resource.k8s.io, namespaces, \
                  resourceclaims.resource.k8s.io, pods in the whole cluster: ask for ClusterRole tranche-viewer";
    let unseen = "Answer:     waits (not-visible)\nWhy:        where there is room is not known: you may not list nodes, ";
    let said = answered(&api, "explain pod/wants -n ml").await;
    has(&said, &[unseen, "; the controller said: needs 40960 MiB; earlier words\n"], 3);
    has(&said, &[&format!("Note:       {denied}")], 3);
    assert!(!said.contains("tranche-node") && !said.contains("VERDICT"), "{said}");
    let said = answered(&api, "explain ml/running").await;
    has(&said, &["Answer:     placed on node node-a\nDevices:    gpu-0: 61440 MiB, 50 % of compute"], 0);
    let said = answered(&api, "explain pod/limits -n ml").await;
    has(
        &said,
        &["Limits:     nvidia.com/gpu: 1 (", "waits (not-visible)\nWhy:        kube-scheduler makes and"],
        3,
    );
    let gates =
        "pod held has the scheduling gates example.com/budget, example.com/day (spec.schedulingGates)";
    has(&answered(&api, "explain pod/held -n ml").await, &["waits (gated)", gates], 3);
    let said = answered(&api, "explain pod/big -n ml").await;
    let event = "Event:      FailedScheduling, 60s ago: 0/2 nodes are available: 2 cannot allocate\n";
    has(&said, &["waits (not-visible)\nWhy:        kube-scheduler allocates it; you may not list", event], 3);
    assert!(!said.contains("could not be read"), "whose the shipped classes are is known: {said}");

    let mut own = whole("own");
    own["spec"]["devices"]["requests"][0]["exactly"]["deviceClassName"] = json!("team-a-shares");
    api.put("resourceclaims", own);
    put_pod(&api, "own", &["own"]);
    let said = answered(&api, "explain pod/own -n ml").await;
    let unread = "Note:       DeviceClass team-a-shares could not be read, so whether the controller or kube-scheduler places \
                  such claims, and how much of a GPU they get, is not known: see kubectl auth can-i get deviceclasses.";
    has(&said, &[unread, denied], 3);
}

/// With the right to get classes, and none to list them.
#[tokio::test]
async fn classes_that_may_be_read_and_not_listed_are_asked_for_by_name() {
    let api = busy();
    let mark = tranche::select::NOT_FOR_THE_SCHEDULER;
    let config = json!([{"opaque": {"driver": DRIVER, "parameters": {"apiVersion": "tranche.dev/v1alpha1",
        "kind": "GpuShare", "memory": "1Gi"}}}]);
    api.put(
        "deviceclasses",
        json!({"metadata": {"name": "team-a-shares", "uid": "c"},
            "spec": {"selectors": [{"cel": {"expression": mark}}], "config": config}}),
    );
    let mut own = whole("own");
    own["spec"]["devices"]["requests"][0]["exactly"]["deviceClassName"] = json!("team-a-shares");
    api.put("resourceclaims", own);
    put_pod(&api, "own", &["own"]);
    api.fail(Verb::List, "deviceclasses", Failure::Status(403, "Forbidden"));
    let said = answered(&api, "explain pod/own -n ml").await;
    has(
        &said,
        &["Answer:     there is room now on node ", "you may not list deviceclasses.resource.k8s.io in"],
        0,
    );
    assert!(api.has_failed() && !said.contains("could not be read"), "{said}");
}

#[tokio::test]
async fn what_makes_pods_is_explained_by_its_pods_that_wait_else_by_its_newest() {
    let api = busy();
    put_classes(&api);
    api.put(
        "deployments",
        json!({"metadata": {"name": "web", "namespace": "ml", "uid": "d"}, "spec": {"replicas": 2}}),
    );
    let owned = |kind: &str, uid: &str| json!([{"apiVersion": "apps/v1", "kind": kind, "name": "o", "uid": uid, "controller": true}]);
    api.put(
        "replicasets",
        json!({"metadata": {"name": "web-5d", "namespace": "ml", "uid": "rs", "ownerReferences": owned("Deployment", "d")}}),
    );
    let none = answered(&api, "explain deployment/web -n ml").await;
    has(&none, &["Deployment: ml/web\n", "Lacks:      none of its pods is there, or all have ended\n"], 3);
    let full = "pods \"web-5d-x\" is forbidden: exceeded quota: team, requested: pods=1, used: pods=4, limited: pods=4";
    api.edit("replicasets", |set| {
        set["status"] = json!({"conditions": [
            {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": full}]});
    });
    let said = answered(&api, "explain deploy/web -n ml").await;
    has(&said, &[&format!("Lacks:      {full}\n")], 3);

    let put = |name: &str, created: &str, node: Value| {
        put_pod(&api, name, &[name]);
        api.edit("pods", |pod| {
            if pod["metadata"]["name"] == *name {
                pod["metadata"]["ownerReferences"] = owned("ReplicaSet", "rs");
                pod["metadata"]["creationTimestamp"] = json!(created);
                pod["spec"]["nodeName"] = node.clone();
            }
        });
    };
    api.put("resourceclaims", share("one", json!({"memory": "1Gi"})));
    api.put("resourceclaims", share("two", json!({"memory": "70Gi"})));
    put("one", "2026-01-01T00:01:00Z", Value::Null);
    put("two", "2026-01-01T00:02:00Z", json!("node-a"));
    let said = answered(&api, "explain deployment/web -n ml").await;
    has(&said, &["Claim:      ml/one ", "there is room now on node node-a"], 3);
    assert!(!said.contains("ml/two"), "it does not wait: {said}");
    put("one", "2026-01-01T00:01:00Z", json!("node-a"));
    let said = answered(&api, "explain rs/web-5d -n ml").await;
    assert!(said.contains("Claim:      ml/two ") && !said.contains("ml/one"), "the newest: {said}");

    api.put(
        "jobs",
        json!({"metadata": {"name": "fit", "namespace": "ml", "uid": "j"}, "spec": {"suspend": true}}),
    );
    has(
        &answered(&api, "explain job/fit -n ml").await,
        &["Job:        ml/fit", "job fit is suspended (spec.suspend)"],
        3,
    );

    api.put("cronjobs", json!({"metadata": {"name": "nightly", "namespace": "ml", "uid": "cj"}, "spec": {}}));
    let between = answered(&api, "explain cronjob nightly -n ml").await;
    has(
        &between,
        &["Cronjob:    ml/nightly", "no pod of its Jobs is there or waits; its schedule makes the next Job"],
        0,
    );
    api.put(
        "jobs",
        json!({"metadata": {"name": "nightly-1", "namespace": "ml", "uid": "j1", "ownerReferences": owned("CronJob", "cj")}}),
    );
    api.put("resourceclaims", share("three", json!({"memory": "1Gi"})));
    put("three", "2026-01-01T00:03:00Z", Value::Null);
    api.edit("pods", |pod| {
        if pod["metadata"]["name"] == "three" {
            pod["metadata"]["ownerReferences"] = owned("Job", "j1");
        }
    });
    let said = answered(&api, "explain cj/nightly -n ml").await;
    has(&said, &["Claim:      ml/three ", "there is room now on node node-a"], 0);
    api.edit("cronjobs", |job| job["spec"]["suspend"] = json!(true));
    let said = answered(&api, "explain cj/nightly -n ml").await;
    assert!(said.contains("cronjob nightly is suspended (spec.suspend)"), "{said}");
    let said = answered(&api, "explain sts/none -n ml").await;
    assert_eq!(said, "there is no statefulset none in namespace ml\n[exit 1]\n");
}

const FILE: &str = "\
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: share}
spec:
  spec:
    devices:
      requests: [{name: gpu, exactly: {deviceClassName: shared.gpu.nvidia.com}}]
      config: [{opaque: {driver: gpu.nvidia.com, parameters: {apiVersion: tranche.dev/v1alpha1, kind: GpuShare, memory: SIZE}}}]
---
apiVersion: v1
kind: Pod
metadata: {name: runs}
spec:
  containers: [{name: main, resources: {requests: {cpu: CPU}}}]
  resourceClaims: [{name: gpu, resourceClaimTemplateName: TEMPLATE}]
";

#[tokio::test]
async fn a_pod_of_a_file_is_explained_as_if_it_were_created_now() {
    let api = busy();
    put_classes(&api);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("pod.yaml");
    let asked = async |size: &str, cpu: &str, template: &str| {
        let text = FILE.replace("SIZE", size).replace("CPU", cpu).replace("TEMPLATE", template);
        std::fs::write(&path, text).unwrap();
        answered(&api, &format!("explain -n ml -f {}", path.display())).await
    };
    let first = format!("File:       {}, as if it were created now in ml\n", path.display());
    let said = asked("10Gi", "1", "share").await;
    has(
        &said,
        &[
            &first,
            "Claim:      ml/runs-gpu\nPods:       runs\nAnswer:     there is room now on node node-a\n",
        ],
        0,
    );
    has(
        &said,
        &["Note:       runs (in the cluster) counts as it is; the file's is asked about beside it\n"],
        0,
    );
    let said = asked("30Gi", "1", "share").await;
    has(&said, &["waits (memory)", "largest free 20480 MiB of gpu-0, needs 30720"], 3);
    has(&asked("10Gi", "100", "share").await, &["CPU: needs 100, 64 left"], 3);
    let said = asked("10Gi", "1", "other").await;
    has(
        &said,
        &["Lacks:      there is no ResourceClaimTemplate other in the file, nor in namespace ml\n"],
        3,
    );
    let template = share("other", json!({"memory": "1Gi"}))["spec"].clone();
    api.put(
        "resourceclaimtemplates",
        json!({"metadata": {"name": "other", "namespace": "ml"}, "spec": {"spec": template}}),
    );
    has(&asked("10Gi", "1", "other").await, &["Devices:    gpu-0: 1024 MiB"], 0);
    let none = answered(&api, "explain -f none.yaml").await;
    assert_eq!(none, "the path \"none.yaml\" does not exist\n[exit 1]\n");
    put_quota(&api, "pods", "4", "4");
    let said = asked("10Gi", "1", "share").await;
    has(&said, &["Lacks:      it cannot be created: ResourceQuota team: pods: 4 of 4 used, 1 needed\n"], 3);

    // A claim of the file beside the cluster's of the same name.
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "next", "namespace": "ml"},
        "spec": {"containers": [{"name": "main"}], "resourceClaims": [{"name": "gpu", "resourceClaimName": "running"}]}});
    api.remove("resourcequotas", "team");
    let claim = share("running", json!({"memory": "30Gi"}));
    std::fs::write(&path, json!({"kind": "List", "items": [pod, claim]}).to_string()).unwrap();
    let said = answered(&api, &format!("explain -f {}", path.display())).await;
    has(&said, &["waits (memory)", "running (in the cluster) counts as it is"], 3);
    std::fs::write(&path, pod.to_string()).unwrap();
    let said = answered(&api, &format!("explain -f {}", path.display())).await;
    has(&said, &["Claim:      ml/running (10m old)", "Answer:     placed on node node-a"], 0);
}

#[tokio::test]
async fn yaml_says_the_same_as_json() {
    let api = busy();
    let yaml = answered(&api, "explain ml/running -o yaml").await;
    has(&yaml, &["answer: placed\n", "device: gpu-0\n"], 0);
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
        top::look(&cluster(&api), &args, SHAPE).await.unwrap()
    };
    assert_eq!(looked("top --use=false").await, expected);
    let told = looked("top").await;
    let lack = "\nwhat is used is not known: no node plugin is ready in namespace tranche-system; ";
    assert!(told.starts_with(expected) && told.contains(lack), "{told}");
    let one = looked("top --node node-b").await;
    assert!(one.starts_with("1 node, 2 devices: 2 free") && !one.contains("node-a"), "{one}");
    let Command::Top(nope) = parsed("top --node nope") else { panic!() };
    let error = top::look(&cluster(&api), &nope, SHAPE).await.unwrap_err().to_string();
    assert_eq!(error, "no GPUs are published for node nope; nodes that have some: node-a, node-b");
    let json: Value = serde_json::from_str(&looked("top -o json").await).unwrap();
    assert_eq!(json["nodes"][0]["devices"][0]["claims"][0]["claim"], "running");
    let yaml: Value = serde_saphyr::from_str(&looked("top -o yaml").await).unwrap();
    assert_eq!(yaml, json);
    let own = looked("top -n ml").await;
    assert!(own.starts_with("1 node, 2 devices: 0 free") && !own.contains("node-b"), "{own}");
    let Command::Top(none) = parsed("top -n team") else { panic!() };
    let error = top::look(&cluster(&api), &none, SHAPE).await.unwrap_err().to_string();
    assert!(error.starts_with("no claim of namespace team has a part of a GPU"), "{error}");
}
