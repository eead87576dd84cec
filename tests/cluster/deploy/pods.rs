//! The rules for pods with claims: what is refused, what is warned of, and what is left alone.

use k8s_openapi::api::admissionregistration::v1::ValidatingAdmissionPolicy;
use k8s_openapi::api::core::v1::{Namespace, Pod};
use kube::Client;
use kube::api::{Api, ListParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use super::{LIMIT, apply_plain, from, install, merge, refusal, says, uninstall_at_end, wait_until};
use crate::rig::Rig;
use crate::tried::tried;

const EXEMPT: &str = "pod-policy-exempt";

/// A pod with a claim that keeps every rule, changed as JSON merge patches change.
fn pod(change: Value) -> Value {
    let mut pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "tenant"},
        "spec": {
            "securityContext": {"runAsNonRoot": true, "runAsUser": 1000},
            "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "share"}],
            "containers": [container(json!({}))],
        },
    });
    merge(&mut pod, change);
    pod
}

fn container(change: Value) -> Value {
    let mut container = json!({
        "name": "main", "image": "docker.io/local/busybox:1",
        "securityContext": {"allowPrivilegeEscalation": false},
        "resources": {"claims": [{"name": "gpu"}]},
    });
    merge(&mut container, change);
    container
}

fn with_container(change: Value) -> Value {
    pod(json!({"spec": {"containers": [container(change)]}}))
}

fn with_volume(path: &str) -> Value {
    pod(json!({"spec": {"volumes": [{"name": "v", "hostPath": {"path": path}}]}}))
}

/// The same pod with a limit in its first container in place of its claim.
fn by_limits(limit: &str, mut pod: Value) -> Value {
    pod["spec"]["resourceClaims"] = json!(null);
    pod["spec"]["containers"][0]["resources"] = json!({"limits": {limit: "1"}});
    pod
}

/// New policies take a moment to be in force, each its own.
async fn in_force(client: &Client) {
    let one_of_each = [
        with_container(json!({"env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]})),
        with_container(json!({"securityContext": {"privileged": true, "allowPrivilegeEscalation": true}})),
        pod(json!({"spec": {"hostPID": true}})),
        with_container(json!({"securityContext": {"capabilities": {"add": ["SYS_ADMIN"]}}})),
        pod(json!({"spec": {"hostUsers": false,
            "containers": [container(json!({"securityContext": {"procMount": "Unmasked"}}))]}})),
        with_volume("/dev"),
    ];
    for pod in one_of_each {
        let refused = || async { tried(client, "default", &pod).await.is_err().then_some(()) };
        wait_until("the rules for pods to be in force", LIMIT, refused).await;
        let pod = by_limits("nvidia.com/gpu", pod);
        let warned =
            || async { tried(client, "default", &pod).await.is_ok_and(|w| !w.is_empty()).then_some(()) };
        wait_until("the rules for whole GPUs to be in force", LIMIT, warned).await;
    }
    let root = with_container(json!({"securityContext": {"allowPrivilegeEscalation": null}}));
    let warned =
        || async { tried(client, "default", &root).await.is_ok_and(|w| !w.is_empty()).then_some(()) };
    wait_until("the warning about root", LIMIT, warned).await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_pod_with_a_claim_may_not_lift_its_limits() {
    let rig = Rig::bare("a_pod_with_a_claim_may_not_lift_its_limits");
    apply_plain(&rig);
    let client = rig.client().await;
    in_force(&client).await;

    let env = |name: &str, value: &str| json!({"env": [{"name": name, "value": value}]});
    let init = |change: Value| {
        let mut init = container(change);
        init["name"] = json!("init");
        pod(json!({"spec": {"initContainers": [init]}}))
    };
    let privileged = json!({"securityContext": {"privileged": true, "allowPrivilegeEscalation": true}});
    for (what, pod, words) in [
        (
            "a pipe of its own",
            with_container(env("CUDA_MPS_PIPE_DIRECTORY", "/tmp/none")),
            "container 'main' sets CUDA_MPS_PIPE_DIRECTORY in env",
        ),
        (
            "a limit of its own",
            with_container(env("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "0=80G")),
            "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT in env",
        ),
        (
            "all GPUs",
            with_container(env("NVIDIA_VISIBLE_DEVICES", "all")),
            "sets NVIDIA_VISIBLE_DEVICES in env",
        ),
        (
            "all GPUs, from elsewhere",
            with_container(json!({"env": [{"name": "NVIDIA_VISIBLE_DEVICES",
                "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}}]})),
            "sets NVIDIA_VISIBLE_DEVICES",
        ),
        ("an init container", init(env("CUDA_MPS_LOG_DIRECTORY", "/x")), "sets CUDA_MPS_LOG_DIRECTORY"),
        ("a privileged container", with_container(privileged.clone()), "securityContext.privileged: true"),
        ("a privileged init container", init(privileged), "securityContext.privileged: true"),
        ("the host's processes", pod(json!({"spec": {"hostPID": true}})), "spec.hostPID:"),
        (
            "both of the host's namespaces",
            pod(json!({"spec": {"hostPID": true, "hostIPC": true}})),
            "spec.hostPID and spec.hostIPC:",
        ),
        ("the host's root", with_volume("/"), "hostPath / reaches"),
        ("/dev", with_volume("/dev/"), "hostPath /dev reaches"),
        ("a device node", with_volume("/dev/nvidia0"), "hostPath /dev/nvidia0 reaches"),
        ("a device node, written oddly", with_volume("//dev/./nvidiactl"), "hostPath /dev/nvidiactl reaches"),
        ("a device node by another name", with_volume("/dev/char/195:0"), "hostPath /dev/char/195:0 reaches"),
        ("the daemons' folder", with_volume("/run/tranche/mps"), "hostPath /run/tranche/mps reaches"),
        ("another name of it", with_volume("/var/run/tranche"), "hostPath /var/run/tranche reaches"),
        ("a folder that has it", with_volume("/run"), "hostPath /run reaches"),
        ("an MPS daemon's pipe", with_volume("/run/nvidia-mps"), "hostPath /run/nvidia-mps reaches"),
        (
            "kubelet's plugins",
            with_volume("/var/lib/kubelet/plugins/gpu.nvidia.com/ledger"),
            "hostPath /var/lib/kubelet/plugins/",
        ),
        ("kubelet's folder", with_volume("/var/lib/kubelet"), "hostPath /var/lib/kubelet reaches"),
        ("CDI files", with_volume("/var/run/cdi"), "hostPath /var/run/cdi reaches"),
        ("a way round", with_volume("/proc/1/root/dev"), "hostPath /proc/1/root/dev reaches"),
        (
            "control groups",
            with_volume("/sys/fs/cgroup"),
            "reaches /sys/fs/cgroup, which says which device nodes",
        ),
    ] {
        let said = tried(&client, "default", &pod).await.expect_err(what);
        says(what, &said, words);
        says(what, &said, "tranche.dev/pod-policy=exempt");
    }
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn what_lifts_no_limit_is_admitted_and_root_is_warned_of() {
    let rig = Rig::bare("what_lifts_no_limit_is_admitted_and_root_is_warned_of");
    apply_plain(&rig);
    let client = rig.client().await;
    in_force(&client).await;

    let everything = json!({"spec": {
        "hostPID": true, "resourceClaims": null, "securityContext": null,
        "volumes": [{"name": "dev", "hostPath": {"path": "/dev"}}],
        "containers": [{"name": "main", "image": "i", "securityContext": {"privileged": true},
            "env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]}]}});
    let void = json!({"env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"},
        {"name": "CUDA_VISIBLE_DEVICES", "value": "0"}]});
    let as_root = pod(json!({"spec": {"securityContext": null, "containers":
        [container(json!({"securityContext": null}))]}}));
    let own_user = json!({"spec": {"securityContext": null,
        "containers": [container(json!({"securityContext": {"runAsNonRoot": true}}))]}});
    let namespaced = json!({"spec": {"hostUsers": false, "securityContext": null, "containers":
        [{"name": "main", "image": "i", "resources": {"claims": [{"name": "gpu"}]}}]}});
    for (what, pod) in [
        ("a pod that keeps every rule", pod(json!({}))),
        ("a pod without claims", pod(everything)),
        ("nothing to see", with_container(void)),
        ("other folders of the host", with_volume("/dev/hugepages")),
        ("a name that only begins like one", with_volume("/run/tranche-cache")),
        ("data of the host", with_volume("/mnt/data")),
        ("a container that is not root by its own word", pod(own_user)),
        ("root in a user namespace", pod(namespaced)),
        ("root with a whole GPU", by_limits("nvidia.com/gpu", as_root)),
    ] {
        let warnings = tried(&client, "default", &pod).await.unwrap_or_else(|said| panic!("{what}: {said}"));
        assert!(warnings.is_empty(), "{what}: {warnings:?}");
    }
    let as_root = json!({"spec": {"securityContext": null}});
    let container_as_root = json!({"securityContext": {"runAsUser": 0, "runAsNonRoot": false}});
    for (what, pod) in [
        ("root by default", pod(as_root)),
        ("root by the container's word", with_container(container_as_root)),
        ("root by a setuid file", with_container(json!({"securityContext": null}))),
    ] {
        let warnings = tried(&client, "default", &pod).await.unwrap_or_else(|said| panic!("{what}: {said}"));
        let said = warnings.join("\n");
        says(
            what,
            &said,
            "container 'main' may run as root: if one of this pod's claims is a share of a GPU, root",
        );
        says(what, &said, "runAsNonRoot: true and allowPrivilegeEscalation: false, or spec.hostUsers: false");
    }
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_namespace_can_be_exempted_and_a_debug_container_is_no_way_in() {
    let rig = Rig::bare("a_namespace_can_be_exempted");
    apply_plain(&rig);
    let client = rig.client().await;
    in_force(&client).await;
    let create = PostParams::default();

    rig.on_end(&["kubectl", "delete", "namespace", EXEMPT, "--ignore-not-found", "--timeout=170s"]);
    let namespaces: Api<Namespace> = Api::all(client.clone());
    let labels = json!({"tranche.dev/pod-policy": "exempt"});
    let namespace = json!({"metadata": {"name": EXEMPT, "labels": labels}});
    namespaces.create(&create, &from(namespace)).await.expect("an administrator makes a namespace");
    let root =
        with_container(json!({"securityContext": {"privileged": true, "allowPrivilegeEscalation": true}}));
    let admitted = || async { tried(&client, EXEMPT, &root).await.is_ok_and(|w| w.is_empty()).then_some(()) };
    wait_until("the exempt namespace to be left alone", LIMIT, admitted).await;

    // The pod waits for a template that there never is.
    let pods: Api<Pod> = Api::namespaced(client.clone(), "default");
    rig.on_end(&["kubectl", "delete", "pod", "tenant", "--force", "--ignore-not-found"]);
    pods.create(&create, &from(pod(json!({})))).await.expect("the pod keeps every rule");
    let debug = |change: Value| {
        let mut container = json!({"name": "debug", "image": "docker.io/local/busybox:1"});
        merge(&mut container, change);
        Patch::Strategic(json!({"spec": {"ephemeralContainers": [container]}}))
    };
    let dry = PatchParams { dry_run: true, ..PatchParams::default() };
    let patch = |change: Value| {
        let (pods, dry, patch) = (pods.clone(), dry.clone(), debug(change));
        async move { pods.patch_subresource("ephemeralcontainers", "tenant", &dry, &patch).await }
    };
    patch(json!({})).await.expect("a plain debug container may come in");
    let said = refusal("privileged", patch(json!({"securityContext": {"privileged": true}})).await);
    says("a privileged debug container", &said, "container 'debug' has securityContext.privileged: true");
    let env = json!({"env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]});
    says("all GPUs", &refusal("all GPUs", patch(env).await), "container 'debug' sets NVIDIA_VISIBLE_DEVICES");
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn every_rule_is_understood_and_can_be_switched() {
    let rig = Rig::bare("every_rule_is_understood_and_can_be_switched");
    uninstall_at_end(&rig);
    let off = ["env", "privileged", "hostPath"].map(|rule| format!("podPolicy.{rule}=off")).join(",");
    let set = [
        "--set",
        &off,
        "--set",
        "podPolicy.hostNamespaces=Warn,podPolicy.root=Deny",
        "--set",
        "podPolicy.wholeGpus.capabilities=Deny,podPolicy.wholeGpus.procMount=off,podPolicy.extendedResources={example.com/gpu}",
    ];
    install(&rig, "tranche", super::NAMESPACE, &set).expect("the chart can be installed");
    let client = rig.client().await;
    let root = pod(json!({"spec": {"securityContext": null}}));
    let refused = || async { tried(&client, "default", &root).await.err() };
    let said = wait_until("root to be refused", LIMIT, refused).await;
    says("root", &said, "container 'main' may run as root");
    let host = pod(json!({"spec": {"hostPID": true}}));
    let warned =
        || async { tried(&client, "default", &host).await.ok().filter(|warnings| !warnings.is_empty()) };
    let warnings = wait_until("the warning", LIMIT, warned).await;
    says("hostPID", &warnings.join("\n"), "spec.hostPID");
    let adding = with_container(json!({"securityContext": {"capabilities": {"add": ["SYS_ADMIN"]}}}));
    let refused =
        || async { tried(&client, "default", &by_limits("example.com/gpu", adding.clone())).await.err() };
    let said = wait_until("a whole GPU's pod to be refused", LIMIT, refused).await;
    says("capabilities", &said, "rule podPolicy.wholeGpus.capabilities of Tranche");
    for pod in [&with_volume("/dev"), &root] {
        let said = tried(&client, "default", &by_limits("example.com/gpu", pod.clone())).await;
        assert!(said.as_ref().is_ok_and(Vec::is_empty), "{said:?}");
    }
    tried(&client, "default", &with_volume("/dev")).await.expect("a rule that is off refuses nothing");
    let env = json!({"env": [{"name": "CUDA_MPS_PIPE_DIRECTORY", "value": "/x"}]});
    tried(&client, "default", &with_container(env)).await.expect("a rule that is off refuses nothing");
    rig.helm(&["uninstall", "tranche", "-n", super::NAMESPACE, "--wait", "--timeout=170s"])
        .expect("it can be uninstalled");

    // The API server's own look at all of them: an expression that does not fit the types would be told.
    apply_plain(&rig);
    let policies: Api<ValidatingAdmissionPolicy> = Api::all(client.clone());
    let labelled = ListParams::default().labels("app.kubernetes.io/name=tranche");
    let checked = || async {
        let all = policies.list(&labelled).await.ok()?.items;
        let status = |one: &ValidatingAdmissionPolicy| one.status.clone().and_then(|s| s.type_checking);
        (all.len() >= 15 && all.iter().all(|one| status(one).is_some())).then_some(all)
    };
    for policy in wait_until("the policies' type check", LIMIT, checked).await {
        let warnings =
            policy.status.and_then(|status| status.type_checking).and_then(|t| t.expression_warnings);
        assert!(warnings.is_none(), "{:?}: {warnings:?}", policy.metadata.name);
    }
}
