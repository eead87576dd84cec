//! `tranche explain` as somebody with a kubeconfig runs it: why pods wait that no share, or not only a share, is missing for;
//! and what a user is told who has the role `edit` in a namespace and none in the cluster.

use std::process::Command;
use std::time::Instant;

use k8s_openapi::api::resource::v1::Device;
use serde_json::{Value, json};

use super::{WAITS, create_hollow, share, wait_told};
use crate::hollow::{self, on_hollow};
use crate::manifests::{as_nobody, claim, container, gpu, pod, user_of};
use crate::rig::{SLOWER, wait_until};
use crate::test_cluster::{PATIENCE, SOON, TestCluster};

/// What it says, with its exit code.
struct Asker<'a> {
    cluster: &'a TestCluster,
    kubeconfig: String,
}

impl Asker<'_> {
    fn explain(&self, what: &[&str]) -> (String, Option<i32>) {
        let mut explain = Command::new(env!("CARGO_BIN_EXE_tranche"));
        let given = ["explain", "-n", &self.cluster.namespace, "--kubeconfig", &self.kubeconfig];
        let out = explain.args([&given[..], what].concat()).output().expect("the program can be run");
        let said = [out.stdout, out.stderr].concat();
        (String::from_utf8_lossy(&said).into_owned(), out.status.code())
    }

    /// Asks until all of these words are said, since answers of the API server and events come a moment later.
    async fn says(&self, what: &[&str], words: &[&str], code: i32) {
        let begin = Instant::now();
        let told = || async {
            let (said, exit) = self.explain(what);
            if words.iter().all(|words| said.contains(words)) && exit == Some(code) {
                return Some(());
            }
            assert!(
                begin.elapsed() < SOON * SLOWER,
                "no {words:?} with exit code {code}, but {exit:?}:\n{said}"
            );
            None
        };
        wait_until(&format!("{what:?} to be explained"), PATIENCE, told).await;
    }
}

fn asker(cluster: &TestCluster) -> Asker<'_> {
    Asker { cluster, kubeconfig: cluster.rig.run(&["kubeconfig"]).trim().to_owned() }
}

/// A pod for hollow nodes whose container asks for these resources.
fn asks(mut pod: Value, resources: Value) -> Value {
    pod["spec"]["containers"][0]["resources"] = resources;
    pod
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn pods_that_wait_for_something_else_than_a_share_are_told_what() {
    let test = "pods_that_wait_for_something_else_than_a_share_are_told_what";
    let cluster = super::bed_beside(test, 1).await;
    let asker = asker(&cluster);

    // Too much CPU, and a resource that no node has: the GPUs have room.
    let heavy = json!({"requests": {"cpu": "900"}});
    create_hollow(&cluster, "heavy", share(json!({"memory": "1Gi"})), |pod| {
        pod["spec"]["containers"][0]["resources"] = heavy;
    })
    .await;
    asker.says(&["pod/heavy"], &["hollow-0", "CPU: needs 900, "], 3).await;
    let fpga = json!({"limits": {"example.com/fpga": 1}});
    let never = as_nobody(asks(user_of("whole", "whole"), fpga));
    cluster.create(claim("whole", json!({"requests": [gpu("gpu")]}))).await;
    cluster.create(on_hollow(never)).await;
    asker.says(&["pod/whole"], &["the pod needs 1 example.com/fpga", "FailedScheduling"], 3).await;

    // A selector that no device matches, and a class that is not there.
    let none = "device.attributes['gpu.nvidia.com'].productName == 'none such'";
    let mut request = gpu("gpu");
    request["exactly"]["selectors"] = json!([{"cel": {"expression": none}}]);
    cluster.create(claim("odd", json!({"requests": [request]}))).await;
    cluster.create(on_hollow(as_nobody(user_of("odd", "odd")))).await;
    asker.says(&["pod/odd"], &["waits (selector)", &format!("no device matches selector {none:?}")], 3).await;
    let request = json!({"name": "gpu", "exactly": {"deviceClassName": "none.example.com"}});
    cluster.create(claim("classless", json!({"requests": [request]}))).await;
    cluster.create(on_hollow(as_nobody(user_of("classless", "classless")))).await;
    asker
        .says(&["classless"], &["waits (device-class)", "there is no DeviceClass none.example.com"], 3)
        .await;

    // All memory of a GPU, by what its shares can be granted, which is less; and by the attribute, as the words advise.
    let attribute = |device: &Device| device.attributes.as_ref()?.get("totalMemoryMiB")?.int;
    let total = cluster.shareable("hollow-0").await.iter().find_map(attribute).expect("its memory is told");
    let memory = format!("device.capacity['gpu.nvidia.com'].memory.compareTo(quantity('{total}Mi')) >= 0");
    let by_total = format!("device.attributes['gpu.nvidia.com'].totalMemoryMiB >= {total}");
    for (name, selector) in [("granted", &memory), ("total", &by_total)] {
        let mut request = gpu("gpu");
        request["exactly"]["selectors"] = json!([{"cel": {"expression": selector}}]);
        cluster.create(claim(name, json!({"requests": [request]}))).await;
        cluster.create(on_hollow(as_nobody(user_of(name, name)))).await;
    }
    let words =
        ["no device matches selector", "select by device.attributes['gpu.nvidia.com'].totalMemoryMiB"];
    asker.says(&["pod/granted"], &words, 3).await;
    hollow::wait_node(&cluster, "total").await;

    // A pod that asks by its limits, and gets no claim.
    let limited = |name: &str, gpus: u32| {
        let containers = json!([container("main", json!([]))]);
        let limits = json!({"limits": {"nvidia.com/gpu": gpus}});
        on_hollow(as_nobody(asks(pod(name, json!([]), containers), limits)))
    };
    cluster.create(limited("many", 64)).await;
    let words = ["Limits:     nvidia.com/gpu: 64", "waits (devices)", "needs 64 GPUs, fit: "];
    asker.says(&["pod/many"], &words, 3).await;
    cluster.create(limited("one", 1)).await;
    let made = "was made and allocated by kube-scheduler for the pod's limits nvidia.com/gpu: 1";
    asker.says(&["pod/one"], &[made, "the whole device"], 0).await;
    hollow::end(cluster).await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_full_quota_and_a_user_without_rights_are_told_apart_from_want_of_room() {
    let test = "a_full_quota_and_a_user_without_rights_are_told_apart_from_want_of_room";
    let cluster = super::bed_beside(test, 1).await;
    let asker = asker(&cluster);
    let kubectl = |args: &[&str]| cluster.rig.kubectl(&[&["-n", &cluster.namespace][..], args].concat());
    create_hollow(&cluster, "large", share(json!({"memory": "1000Gi"})), |_| {}).await;
    wait_told(&cluster, "large", WAITS).await;

    // The claim of a template, which the quota does not allow.
    let devices = "shared.gpu.nvidia.com.deviceclass.resource.k8s.io/devices";
    kubectl(&["create", "quota", "team", &format!("--hard={devices}=1")]);
    let used = || async {
        let used = kubectl(&["get", "resourcequota", "team", "-o", "jsonpath={.status.used}"]);
        used.contains(":\"1\"").then_some(())
    };
    wait_until("the quota to be counted", SOON, used).await;
    cluster.create(crate::manifests::template("small", share(json!({"memory": "1Gi"})))).await;
    cluster.create(on_hollow(as_nobody(crate::manifests::by_template("small", "over")))).await;
    let full = format!("ResourceQuota team: {devices}: 1 of 1 used, 1 needed");
    asker.says(&["pod/over"], &["from the template small yet: ", &full], 3).await;
    let file = std::env::temp_dir().join(format!("{}.json", cluster.namespace));
    let mut next = on_hollow(as_nobody(crate::manifests::by_template("small", "next")));
    next["metadata"]["namespace"] = json!(cluster.namespace);
    std::fs::write(&file, next.to_string()).expect("a file can be written");
    let path = file.display().to_string();
    let words = ["there is room now on node hollow-0", &format!("it cannot be created: {full}")];
    asker.says(&["-f", &path], &words, 3).await;
    kubectl(&["delete", "resourcequota", "team"]);
    asker.says(&["-f", &path], &["there is room now on node hollow-0"], 0).await;
    std::fs::remove_file(&file).expect("the file is there");

    // A deployment that gets no pod.
    kubectl(&["create", "quota", "none", "--hard=pods=0"]);
    kubectl(&["create", "deployment", "web", "--image=docker.io/local/busybox:1"]);
    let words = ["Deployment: ", "is forbidden: exceeded quota: none, requested: pods=1"];
    asker.says(&["deployment/web"], &words, 3).await;
    kubectl(&["delete", "deployment/web", "resourcequota/none"]);

    // The role edit in the namespace, and nothing in the cluster.
    kubectl(&["create", "serviceaccount", "dev"]);
    let dev = format!("--serviceaccount={}:dev", cluster.namespace);
    kubectl(&["create", "rolebinding", "dev", "--clusterrole=edit", &dev]);
    let token = kubectl(&["create", "token", "dev"]);
    let own = std::env::temp_dir().join(format!("{}.kubeconfig", cluster.namespace));
    std::fs::copy(&asker.kubeconfig, &own).expect("the kubeconfig can be copied");
    let config = format!("--kubeconfig={}", own.display());
    cluster.rig.kubectl(&[&config, "config", "set-credentials", "dev", &format!("--token={}", token.trim())]);
    cluster.rig.kubectl(&[&config, "config", "set-context", "--current", "--user=dev"]);
    let edit = Asker { cluster: &cluster, kubeconfig: own.display().to_string() };
    let words = [
        "waits (not-visible)",
        "you may not list nodes, resourceslices.resource.k8s.io",
        "ask for ClusterRole tranche-viewer",
        "the controller said: needs ",
    ];
    edit.says(&["pod/large"], &words, 3).await;
    cluster.create(claim("alone", share(json!({"memory": "1Gi"})))).await;
    edit.says(&["alone"], &["waits (no-pod)"], 3).await;
    let mut gated = as_nobody(user_of("alone", "gated"));
    gated["spec"]["schedulingGates"] = json!([{"name": "example.com/budget"}]);
    cluster.create(on_hollow(gated)).await;
    edit.says(&["pod/gated"], &["waits (gated)", "the scheduling gate example.com/budget"], 3).await;
    let (said, _) = edit.explain(&["pod/large"]);
    assert!(!said.contains("tranche-node"), "{said}");
    std::fs::remove_file(&own).expect("the file is there");
    hollow::end(cluster).await;
}
