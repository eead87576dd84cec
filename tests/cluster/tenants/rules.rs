//! What a pod may not ask for beside its share, and what an annotation does not get.

use std::fs;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceClaimTemplate};
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::{Api, Client};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::manifests::{as_nobody, claim, container, pod, template};
use crate::rig::{root, wait_until};
use crate::test_cluster::{PATIENCE, SOON, TestCluster, from};
use crate::tried::{tried, tried_debugging};

/// charts/tranche/podrules.yaml.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Table {
    asks: Vec<Row>,
    env: Vec<Row>,
    visible_devices_left: Vec<Row>,
    capabilities: Vec<Row>,
    capabilities_left: Vec<Row>,
    host_path: Vec<Row>,
}

#[derive(Deserialize)]
struct Row {
    #[serde(alias = "path")]
    name: String,
    why: String,
    #[serde(default)]
    legal: String,
    /// `share`: only for what may be a share, or taken for one.
    #[serde(default)]
    counts: String,
}

fn table() -> Table {
    let text = fs::read_to_string(root().join("charts/tranche/podrules.yaml")).expect("the table is there");
    serde_saphyr::from_str(&text).expect("the table is whole")
}

/// A pod that keeps every rule, and asks for a device.
fn plain(name: &str) -> Value {
    let claims = json!([{"name": "gpu", "resourceClaimTemplateName": "share"}]);
    as_nobody(pod(name, claims, json!([container("main", json!([{"name": "gpu"}]))])))
}

/// As what a container comes: a field of the pod's spec, and the fields that it has by that.
const PLACES: [(&str, Option<&str>); 3] =
    [("containers", None), ("initContainers", None), ("initContainers", Some("Always"))];

/// The pod with one more container in this place, changed so.
fn with_container(place: (&str, Option<&str>), security: &Value, limits: &Value) -> Value {
    let mut pod = plain("tenant");
    let mut more = json!({"name": "more", "image": "docker.io/local/glibc:1", "imagePullPolicy": "Never",
        "securityContext": security, "resources": {"limits": limits}});
    if let Some(policy) = place.1 {
        more["restartPolicy"] = json!(policy);
    }
    match pod["spec"][place.0].as_array_mut() {
        Some(containers) => containers.push(more),
        None => pod["spec"][place.0] = json!([more]),
    }
    pod
}

fn adding(place: (&str, Option<&str>), capability: &str) -> Value {
    with_container(place, &json!({"capabilities": {"add": [capability]}}), &json!({}))
}

fn with_folder(path: &str, read_only: bool) -> Value {
    let mut pod = plain("tenant");
    pod["spec"]["volumes"] = json!([{"name": "v", "hostPath": {"path": path}}]);
    pod["spec"]["containers"][0]["volumeMounts"] =
        json!([{"name": "v", "mountPath": "/v", "readOnly": read_only}]);
    pod
}

/// Somebody who tries pods, none of which is stored.
struct Tenant {
    client: Client,
    namespace: String,
}

impl Tenant {
    fn new(client: &Client, namespace: &str) -> Self {
        Self { client: client.clone(), namespace: namespace.to_owned() }
    }

    async fn tried(&self, pod: &Value) -> Result<Vec<String>, String> {
        tried(&self.client, &self.namespace, pod).await
    }

    /// Refused in all of these words.
    async fn refused(&self, what: &str, pod: &Value, words: &[&str]) {
        let Err(said) = self.tried(pod).await else { panic!("{what}: admitted") };
        let missing: Vec<_> = words.iter().filter(|words| !said.contains(**words)).collect();
        assert!(missing.is_empty(), "{what}: the refusal lacks {missing:?}: {said}");
    }

    async fn admitted(&self, what: &str, pod: &Value) {
        self.tried(pod).await.unwrap_or_else(|said| panic!("{what}: {said}"));
    }

    /// Admitted without a word of ours.
    async fn left_alone(&self, what: &str, pod: &Value) {
        let said = self.tried(pod).await.unwrap_or_else(|said| panic!("{what}: {said}")).join("\n");
        assert!(!said.contains("of Tranche"), "{what}: {said}");
    }

    /// Admitted, with a warning by this rule and by no other.
    async fn warned(&self, what: &str, pod: &Value, rule: &str) {
        let said = self.tried(pod).await.unwrap_or_else(|said| panic!("{what}: {said}"));
        let ours: Vec<_> = said.iter().filter(|words| words.contains("of Tranche")).collect();
        let rule = format!("(rule podPolicy.{rule} of Tranche; ");
        assert!(ours.len() == 1 && ours.iter().all(|words| words.contains(&rule)), "{what}: {said:?}");
    }
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_tenants_pod_with_a_device_adds_no_capability_that_reaches_beyond_it() {
    let cluster =
        TestCluster::of_env("a_tenants_pod_with_a_device_adds_no_capability_that_reaches_beyond_it").await;
    let tenant = Tenant::new(&super::tenant(&cluster).await, &cluster.namespace);
    let table = table();
    for Row { name, why, .. } in &table.capabilities {
        let words = format!("container 'more' adds {name}, which {why}");
        for place in PLACES {
            let pod = adding(place, name);
            tenant.refused(name, &pod, &[&words, "rule podPolicy.capabilities", "pod-policy=exempt"]).await;
        }
        // As runtimes understand the names.
        for said in [name.to_lowercase(), format!("CAP_{name}"), format!("cap_{}", name.to_lowercase())] {
            tenant.refused(&said, &adding(PLACES[0], &said), &[&words]).await;
        }
        let mut own = adding(PLACES[0], name);
        own["spec"]["hostUsers"] = json!(false);
        tenant.admitted(&format!("{name} in a user namespace"), &own).await;
    }
    for Row { name, .. } in &table.capabilities_left {
        tenant.admitted(name, &adding(PLACES[0], name)).await;
    }
    let dropped =
        json!({"allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"], "add": ["CHOWN"]}});
    tenant.admitted("ALL dropped", &with_container(PLACES[0], &dropped, &json!({}))).await;
    let mut unmasked = with_container(PLACES[1], &json!({"procMount": "Unmasked"}), &json!({}));
    unmasked["spec"]["hostUsers"] = json!(false);
    let words = "container 'more' has securityContext.procMount: Unmasked";
    tenant.refused("procMount", &unmasked, &[words, "rule podPolicy.procMount"]).await;
    unmasked["spec"]["initContainers"][0]["securityContext"] = json!({"procMount": "Default"});
    tenant.admitted("procMount Default", &unmasked).await;
    cluster.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_tenants_pod_with_a_device_mounts_no_folder_that_leads_past_its_limits() {
    let cluster =
        TestCluster::of_env("a_tenants_pod_with_a_device_mounts_no_folder_that_leads_past_its_limits").await;
    let client = super::tenant(&cluster).await;
    let tenant = Tenant::new(&client, &cluster.namespace);
    let table = table();
    for Row { name, why, legal, .. } in &table.host_path {
        let path = name.replace('*', "0");
        let words = [&*format!("hostPath {path}"), "rule podPolicy.hostPath"];
        tenant.refused(name, &with_folder(&path, false), &words).await;
        tenant.refused(name, &with_folder(&path, true), &words).await;
        let reason = format!(", which {why}");
        tenant.refused(name, &with_folder(&format!("/.{path}//"), true), &words).await;
        let inside = format!("{path}/x");
        tenant
            .refused(&inside, &with_folder(&inside, true), &[&format!("hostPath {inside} reaches /")])
            .await;
        let mut parent = path.as_str();
        while let Some((above, _)) = parent.rsplit_once('/') {
            let folder = if above.is_empty() { "/" } else { above };
            tenant.refused(folder, &with_folder(folder, true), &["rule podPolicy.hostPath"]).await;
            parent = above;
        }
        if path.starts_with("/run/") {
            tenant.refused(name, &with_folder(&format!("/var{path}"), true), &[&reason]).await;
        }
        tenant.admitted(legal, &with_folder(legal, false)).await;
    }
    for legal in ["/mnt/data", "/home", "/usr/local/cuda", "/etc/localtime", "/tmp"] {
        tenant.admitted(legal, &with_folder(legal, false)).await;
    }
    // A volume of an administrator's may be any folder; a tenant has no such right.
    let volumes: Api<k8s_openapi::api::core::v1::PersistentVolume> = Api::all(client);
    let volume = json!({"metadata": {"name": "tenants"}, "spec": {"capacity": {"storage": "1Gi"},
        "accessModes": ["ReadWriteOnce"], "hostPath": {"path": "/"}}});
    let dry = PostParams { dry_run: true, ..PostParams::default() };
    let said = volumes.create(&dry, &from(volume)).await.expect_err("no volume of a tenant's").to_string();
    assert!(said.contains("forbidden"), "{said}");
    cluster.end().await;
}

/// The pod with this limit in one more container, and without its claim.
fn by_limits(place: (&str, Option<&str>), limit: &str, count: &str) -> Value {
    let mut pod = with_container(place, &json!({}), &json!({limit: count}));
    pod["spec"]["resourceClaims"] = json!(null);
    pod["spec"]["containers"][0]["resources"] = json!({});
    pod
}

/// The pod, with what this rule refuses in its first container.
fn against(pod: &Value, rule: &str) -> Value {
    let mut pod = pod.clone();
    let spec = &mut pod["spec"];
    let main = &mut spec["containers"][0];
    match rule {
        "env" => main["env"] = json!([{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]),
        "privileged" => {
            main["securityContext"] = json!({"privileged": true, "allowPrivilegeEscalation": true})
        }
        "capabilities" => main["securityContext"]["capabilities"] = json!({"add": ["SYS_ADMIN"]}),
        "procMount" => {
            main["securityContext"]["procMount"] = json!("Unmasked");
            spec["hostUsers"] = json!(false);
        }
        "hostNamespaces" => spec["hostPID"] = json!(true),
        "hostPath" => spec["volumes"] = json!([{"name": "v", "hostPath": {"path": "/run/containerd"}}]),
        _ => panic!("{rule}: what does it refuse?"),
    }
    pod
}

/// The rules that pods with whole GPUs are warned by.
const WARNED: [&str; 6] = ["env", "privileged", "capabilities", "procMount", "hostNamespaces", "hostPath"];

/// Whoever asks by a container's limits alone has whole devices: manifests that are older than DRA run as they are. A
/// claim beside the limits, or the class of shares among them, and the rules for shares count.
#[tokio::test]
#[ignore = "needs a rig"]
async fn a_tenants_pod_that_asks_by_limits_alone_is_warned_and_with_a_claim_it_is_refused() {
    let cluster = TestCluster::of_env(
        "a_tenants_pod_that_asks_by_limits_alone_is_warned_and_with_a_claim_it_is_refused",
    )
    .await;
    let client = super::tenant(&cluster).await;
    let tenant = Tenant::new(&client, &cluster.namespace);
    let with_claim = |mut pod: Value| {
        pod["spec"]["resourceClaims"] = plain("tenant")["spec"]["resourceClaims"].clone();
        pod
    };
    for Row { name, legal, counts, .. } in &table().asks {
        let limit = name.replace('*', "gpu.nvidia.com");
        for place in PLACES {
            let pod = by_limits(place, &limit, "1");
            for rule in WARNED {
                let what = format!("{limit} in {place:?} against {rule}");
                let (pod, words) = (against(&pod, rule), format!("rule podPolicy.{rule} "));
                if counts == "share" {
                    tenant.refused(&what, &pod, &[&words]).await;
                } else {
                    tenant.warned(&what, &pod, &format!("wholeGpus.{rule}")).await;
                }
                tenant.refused(&format!("{what} with a claim"), &with_claim(pod), &[&words]).await;
            }
            // Unchanged, as root.
            let mut pod = pod;
            for container in pod["spec"]["containers"].as_array_mut().into_iter().flatten() {
                container["securityContext"] = json!({});
            }
            pod["spec"]["securityContext"] = json!({});
            if counts == "share" {
                tenant.warned(&limit, &pod, "root").await;
            } else {
                tenant.left_alone(&limit, &pod).await;
            }
            tenant.warned(&format!("root with {limit} and a claim"), &with_claim(pod), "root").await;
        }
        for (limit, count) in [(limit.as_str(), "0"), (legal, "1")] {
            let pod = by_limits(PLACES[0], limit, count);
            for rule in WARNED {
                tenant.left_alone(&format!("{limit}: {count} and {rule}"), &against(&pod, rule)).await;
            }
        }
    }

    // A debug container has no limits: those of its pod count. By an administrator: `edit` may not bring one in.
    let pods: Api<Pod> = Api::namespaced(client, &cluster.namespace);
    let whole = by_limits(PLACES[0], "nvidia.com/gpu", "1");
    for (mut pod, name) in [(whole.clone(), "whole"), (with_claim(whole), "claim")] {
        pod["metadata"]["name"] = json!(name);
        pod["spec"]["schedulingGates"] = json!([{"name": "test.example/never"}]);
        pods.create(&PostParams::default(), &from(pod)).await.expect("it keeps every rule");
        let debug = |security: Value| {
            let container =
                json!({"name": "debug", "image": "docker.io/local/busybox:1", "securityContext": security});
            let (client, namespace) = (cluster.client.clone(), cluster.namespace.clone());
            async move { tried_debugging(&client, &namespace, name, &container).await }
        };
        for (security, rule) in [
            (json!({"privileged": true}), "privileged"),
            (json!({"capabilities": {"add": ["SYS_ADMIN"]}}), "capabilities"),
        ] {
            let said = match (name, debug(security).await) {
                ("whole", Ok(warnings)) => warnings.join("\n"),
                ("claim", Err(refusal)) => refusal,
                (_, said) => panic!("{name}: {said:?}"),
            };
            assert!(said.contains("container 'debug'"), "{said}");
            let rule = if name == "whole" { format!("wholeGpus.{rule} ") } else { format!("{rule} ") };
            assert!(said.contains(&format!("podPolicy.{rule}")), "{said}");
        }
        debug(json!({})).await.expect("a plain debug container may come in");
        pods.delete(name, &DeleteParams::default()).await.expect("it can be deleted");
        cluster.gone(name).await;
    }
    cluster.end().await;
}

/// A manifest names variables of the driver's.
#[tokio::test]
#[ignore = "needs a rig"]
async fn a_tenants_pod_sets_no_variable_that_would_lift_a_shares_limits() {
    let cluster = TestCluster::of_env("a_tenants_pod_sets_no_variable_that_would_lift_a_shares_limits").await;
    let tenant = Tenant::new(&super::tenant(&cluster).await, &cluster.namespace);
    let whole = by_limits(PLACES[0], "nvidia.com/gpu", "1");
    let setting = |pod: &Value, variable: Value| {
        let mut pod = pod.clone();
        pod["spec"]["containers"][0]["env"] = json!([variable]);
        pod
    };
    let table = table();
    for Row { name, legal, counts, .. } in &table.env {
        let variable = |name: &str| json!({"name": name.replace('*', "X"), "value": "all"});
        let words = format!("container 'main' sets {} in env", name.replace('*', "X"));
        let share = setting(&plain("tenant"), variable(name));
        tenant.refused(name, &share, &[&words, "rule podPolicy.env ", "pod-policy=exempt"]).await;
        let whole_gpu = setting(&whole, variable(name));
        if counts == "share" {
            tenant.left_alone(name, &whole_gpu).await;
        } else {
            tenant.warned(name, &whole_gpu, "wholeGpus.env").await;
        }
        for pod in [&plain("tenant"), &whole] {
            tenant.left_alone(legal, &setting(pod, variable(legal))).await;
        }
    }
    let visible = |rest: Value| {
        let mut variable = rest;
        variable["name"] = json!("NVIDIA_VISIBLE_DEVICES");
        variable
    };
    let mut left: Vec<Value> =
        table.visible_devices_left.iter().map(|row| json!({"value": row.name})).collect();
    left.push(json!({}));
    for variable in left {
        for pod in [&plain("tenant"), &whole] {
            tenant.left_alone(&variable.to_string(), &setting(pod, visible(variable.clone()))).await;
        }
    }
    let from_elsewhere = json!({"valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}});
    let mut asks: Vec<Value> =
        ["all", "0", "NONE", " none", "none,0", "$(X)"].iter().map(|value| json!({"value": value})).collect();
    asks.push(from_elsewhere);
    for variable in asks {
        let what = variable.to_string();
        let share = setting(&plain("tenant"), visible(variable.clone()));
        tenant.refused(&what, &share, &["sets NVIDIA_VISIBLE_DEVICES in env"]).await;
        tenant.warned(&what, &setting(&whole, visible(variable)), "wholeGpus.env").await;
    }
    cluster.end().await;
}

/// An administrator's label by which a namespace has no shares: claims for them are refused, and so the others are taken
/// for whole GPUs and devices of other drivers.
#[tokio::test]
#[ignore = "needs a rig"]
async fn where_no_claim_is_for_a_share_pods_with_claims_are_warned() {
    let test = "where_no_claim_is_for_a_share_pods_with_claims_are_warned";
    let labels = json!({"tranche.dev/pod-policy": "whole-gpus"});
    let cluster = TestCluster::with_labels(test, labels).await;
    let client = super::tenant(&cluster).await;
    let tenant = Tenant::new(&client, &cluster.namespace);
    let mut as_root = plain("tenant");
    as_root["spec"]["securityContext"] = json!({});
    tenant.left_alone("root", &as_root).await;
    for rule in WARNED {
        tenant.warned(rule, &against(&plain("tenant"), rule), &format!("wholeGpus.{rule}")).await;
    }

    let claims: Api<ResourceClaim> = Api::namespaced(client.clone(), &cluster.namespace);
    let templates: Api<ResourceClaimTemplate> = Api::namespaced(client, &cluster.namespace);
    let dry = PostParams { dry_run: true, ..PostParams::default() };
    let tried = async |requests: &Value| {
        let devices = json!({"requests": requests});
        let claim = claims.create(&dry, &from(claim("c", devices.clone()))).await.map(|_| ());
        let template = templates.create(&dry, &from(template("t", devices))).await.map(|_| ());
        [claim, template].map(|said| said.map_err(|error| error.to_string()))
    };
    let of =
        |class: &str, capacity: Value| json!({"name": "gpu", "deviceClassName": class, "capacity": capacity});
    let whole = of("gpu.nvidia.com", json!(null));
    let part = of("gpu.nvidia.com", json!({"requests": {"memory": "2Gi"}}));
    let slice = of("gpu.nvidia.com", json!({"requests": {"gpu.nvidia.com/compute": "25"}}));
    let shared = of("shared.gpu.nvidia.com", json!(null));
    let nic = of("nic.example.com", json!({"requests": {"bandwidth": "1Gi"}}));
    let exactly = |one: &Value| {
        let mut one = one.clone();
        one.as_object_mut().expect("an object").remove("name");
        json!({"name": "gpu", "exactly": one})
    };
    for asked in [&part, &slice, &shared] {
        let alternatives = json!({"name": "gpu", "firstAvailable": [whole, {
            "name": "part", "deviceClassName": asked["deviceClassName"], "capacity": asked["capacity"]}]});
        for requests in [json!([exactly(asked)]), json!([alternatives])] {
            for said in tried(&requests).await {
                let said = said.expect_err("a share is refused");
                assert!(said.contains("request 'gpu' asks for a part of a device"), "{said}");
            }
        }
    }
    for requests in [
        json!([exactly(&whole)]),
        json!([exactly(&nic)]),
        json!([{"name": "gpu", "firstAvailable": [whole]}]),
    ] {
        for said in tried(&requests).await {
            said.unwrap_or_else(|said| panic!("{requests}: {said}"));
        }
    }
    cluster.end().await;
}

/// What docs/isolation.md says of pods that ask for no device: they are Pod Security's to refuse, and are refused by its
/// level `baseline`. What that level lets through of a pod with a device is refused here, and the other way round.
#[tokio::test]
#[ignore = "needs a rig"]
async fn what_has_no_share_is_pod_securitys_to_refuse() {
    let cluster = TestCluster::of_env("what_has_no_share_is_pod_securitys_to_refuse").await;
    let tenant = Tenant::new(&super::tenant(&cluster).await, &cluster.namespace);
    let spec = |what: &str, with_device: bool| {
        let mut pod = plain("tenant");
        if !with_device {
            pod["spec"]["resourceClaims"] = json!(null);
            pod["spec"]["containers"][0]["resources"] = json!({});
        }
        let spec = &mut pod["spec"];
        let main = &mut spec["containers"][0];
        match what {
            "privileged" => {
                main["securityContext"] = json!({"privileged": true, "allowPrivilegeEscalation": true});
            }
            "capabilities" => main["securityContext"]["capabilities"] = json!({"add": ["SYS_ADMIN"]}),
            "NET_ADMIN" => main["securityContext"]["capabilities"] = json!({"add": ["NET_ADMIN"]}),
            "seccomp" => main["securityContext"]["seccompProfile"] = json!({"type": "Unconfined"}),
            "env" => main["env"] = json!([{"name": "CUDA_MPS_PIPE_DIRECTORY", "value": "/x"}]),
            "hostPID" | "hostIPC" | "hostNetwork" => spec[what] = json!(true),
            "runtime" => {
                spec["volumes"] = json!([{"name": "v", "hostPath": {"path": "/run/containerd"}}]);
            }
            _ => spec["volumes"] = json!([{"name": "v", "hostPath": {"path": "/mnt/data"}}]),
        }
        pod
    };
    let ours = ["privileged", "capabilities", "hostPID", "hostIPC", "runtime"];
    let theirs = ["NET_ADMIN", "seccomp", "hostNetwork", "data"];
    // As manifests had it before DRA: with a whole GPU such a pod reaches no more than without a device.
    let whole = |what: &str| {
        let mut pod = spec(what, false);
        pod["spec"]["containers"][0]["resources"] = json!({"limits": {"nvidia.com/gpu": "1"}});
        pod
    };
    for what in ours {
        tenant.refused(what, &spec(what, true), &["of Tranche"]).await;
        let said = tenant.tried(&whole(what)).await.unwrap_or_else(|said| panic!("{what}: {said}"));
        assert!(said.iter().any(|words| words.contains("rule podPolicy.wholeGpus.")), "{what}: {said:?}");
    }
    for what in theirs {
        tenant.admitted(what, &spec(what, true)).await;
    }
    for what in ours.into_iter().chain(theirs) {
        tenant.admitted(what, &spec(what, false)).await;
    }
    let label = "pod-security.kubernetes.io/enforce=baseline";
    cluster.rig.kubectl(&["label", "namespace", &cluster.namespace, label]);
    for what in ours.into_iter().chain(theirs) {
        tenant.refused(what, &spec(what, false), &["violates PodSecurity \\\"baseline"]).await;
        tenant.refused(what, &whole(what), &["violates PodSecurity \\\"baseline"]).await;
    }
    tenant.admitted("env", &spec("env", false)).await;
    tenant.refused("env", &spec("env", true), &["of Tranche"]).await;
    tenant.admitted("a share as such", &plain("tenant")).await;
    cluster.end().await;
}

/// A service account that may create pods and nothing else: no claims, no labels.
async fn who_may_create_pods(cluster: &TestCluster) -> Client {
    let user = format!("--serviceaccount={}:pods-only", cluster.namespace);
    let kubectl = |words: &[&str]| cluster.rig.kubectl(&[&["-n", &cluster.namespace], words].concat());
    kubectl(&["create", "serviceaccount", "pods-only"]);
    kubectl(&["create", "role", "pods-only", "--verb=create,get,list,delete", "--resource=pods"]);
    kubectl(&["create", "rolebinding", "pods-only", "--role=pods-only", &user]);
    let token = kubectl(&["create", "token", "pods-only", "--duration=1h"]);
    cluster.rig.client_with_token(token.trim()).await
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn an_annotation_gets_no_claim_where_no_administrator_has_said_so() {
    let cluster = TestCluster::of_env("an_annotation_gets_no_claim_where_no_administrator_has_said_so").await;
    let tenant = who_may_create_pods(&cluster).await;
    let claim = |name: &str| {
        json!({"metadata": {"name": name}, "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
            "spec": {"devices": {"requests": [
                {"name": "gpu", "exactly": {"deviceClassName": "shared.gpu.nvidia.com"}}]}}})
    };
    let own: Api<ResourceClaim> = Api::namespaced(tenant.clone(), &cluster.namespace);
    let said = own.create(&PostParams::default(), &from(claim("own"))).await;
    assert!(said.is_err_and(|error| error.to_string().contains("forbidden")), "no right to claims");

    let by_hand = |name: &str, share: Value| {
        let mut share = json!({"share": share, "count": 1});
        share["share"]["apiVersion"] = json!("tranche.dev/v1alpha1");
        share["share"]["kind"] = json!("GpuShare");
        let entry = json!([{"name": "gpu-share", "resourceClaimName": format!("{name}-gpu-share")}]);
        let containers = json!([container("main", json!([{"name": "gpu-share"}]))]);
        let mut pod = as_nobody(pod(name, entry, containers));
        pod["metadata"]["annotations"] = json!({"tranche.dev/gpu-share": share.to_string()});
        pod
    };
    let pods: Api<Pod> = Api::namespaced(tenant, &cluster.namespace);
    let create = PostParams::default();
    pods.create(&create, &from(by_hand("deputy", json!({"memory": "2000Mi"})))).await.expect("a pod");
    let told = || async {
        let events = cluster.events("deputy").await;
        events.into_iter().find(|event| event.contains("makes no claim here"))
    };
    let said = wait_until("an event that says why there is no claim", SOON, told).await;
    for words in [
        "WaitingForGpuShare: ",
        "tranche.dev/kai-annotations=enabled",
        &cluster.namespace,
        "create the claim",
    ] {
        assert!(said.contains(words), "{said}");
    }
    let claims =
        || async { cluster.api::<ResourceClaim>().list(&ListParams::default()).await.expect("claims").items };
    assert!(claims().await.is_empty(), "a claim was made for somebody who may make none");

    // The administrator's yes; what waited is served, and nothing that the webhook could not have asked for.
    cluster.rig.kubectl(&["label", "namespace", &cluster.namespace, "tranche.dev/kai-annotations=enabled"]);
    cluster.wait_ready("deputy").await;
    let greedy = by_hand("greedy", json!({"memory": "2000Mi", "maxProcesses": 40}));
    pods.create(&create, &from(greedy)).await.expect("a pod");
    let told = || async {
        cluster
            .events("greedy")
            .await
            .into_iter()
            .find(|event| event.contains("says more than memory or fraction"))
    };
    wait_until("an event that says that it asks for too much", SOON, told).await;

    // The label goes, the pod stays; the next one waits again.
    cluster.rig.kubectl(&["label", "namespace", &cluster.namespace, "tranche.dev/kai-annotations-"]);
    pods.create(&create, &from(by_hand("late", json!({"memory": "2000Mi"})))).await.expect("a pod");
    let told = || async {
        cluster.events("late").await.into_iter().find(|event| event.contains("makes no claim here"))
    };
    wait_until("an event of the pod that came too late", SOON, told).await;
    assert_eq!(claims().await.len(), 1);
    cluster.wait_ready("deputy").await;
    for name in ["deputy", "greedy", "late"] {
        cluster.delete(name).await;
    }
    let gone = || async { claims().await.is_empty().then_some(()) };
    wait_until("the claim to go with its pod", PATIENCE, gone).await;
    cluster.end().await;
}
