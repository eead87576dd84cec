//! deploy/ and charts/ on a real API server: both forms are taken, a node's plugin can write what is
//! its own and nothing else, and the chart refuses what cannot work.

mod classes;
mod events;
mod pods;
mod reports;

use std::time::Duration;

use k8s_openapi::api::authentication::v1::{BoundObjectReference, TokenRequest, TokenRequestSpec};
use k8s_openapi::api::authorization::v1::SubjectAccessReview;
use k8s_openapi::api::core::v1::{Node, Pod, ServiceAccount};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceSlice};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::{Value, json};

use crate::rig::{Rig, root, wait_until};

const NAMESPACE: &str = "tranche-system";
/// A node without a kubelet, so that no plugin of the rig's own meddles with its slices.
const NODE: &str = "hollow";
/// deploy/, told to pull no image.
const PLAIN: &str = "tests/cluster/data/plain";
const LIMIT: Duration = Duration::from_secs(30);

fn apply_plain(rig: &Rig) {
    rig.on_end(&["kubectl", "delete", "-k", PLAIN, "--ignore-not-found", "--timeout=170s"]);
    rig.kubectl(&["apply", "-k", PLAIN]);
}

/// A Node object and a Pod of the plugin's service account on it.
async fn hollow_pod(rig: &Rig, admin: &Client) -> Pod {
    rig.on_end(&["kubectl", "delete", "node", NODE, "--ignore-not-found"]);
    rig.on_end(&["kubectl", "-n", NAMESPACE, "delete", "pod", NODE, "--force", "--ignore-not-found"]);
    let nodes: Api<Node> = Api::all(admin.clone());
    let node = json!({"metadata": {"name": NODE}});
    nodes.create(&PostParams::default(), &from(node)).await.expect("an administrator may create a Node");
    let pods: Api<Pod> = Api::namespaced(admin.clone(), NAMESPACE);
    let pod = json!({"metadata": {"name": NODE}, "spec": {
        "serviceAccountName": "tranche-node", "nodeName": NODE,
        "containers": [{"name": "node", "image": "docker.io/local/busybox:1"}]}});
    pods.create(&PostParams::default(), &from(pod)).await.expect("a pod may name its node")
}

fn from<T: serde::de::DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).expect("the test's own object is whole")
}

/// A token of the plugin's service account, bound as given.
async fn token(admin: &Client, bound: Option<BoundObjectReference>) -> String {
    let accounts: Api<ServiceAccount> = Api::namespaced(admin.clone(), NAMESPACE);
    let spec =
        TokenRequestSpec { bound_object_ref: bound, expiration_seconds: Some(600), ..Default::default() };
    let request = TokenRequest { spec: Some(spec), ..Default::default() };
    let answer = accounts.create_token_request("tranche-node", &PostParams::default(), &request).await;
    answer.expect("the API server gives a token").status.expect("with a status").token.expect("and a token")
}

fn bound_to(kind: &str, name: Option<String>, uid: Option<String>) -> Option<BoundObjectReference> {
    Some(BoundObjectReference { api_version: Some("v1".into()), kind: Some(kind.into()), name, uid })
}

/// What kubelet's token for the pod makes of the caller.
async fn plugin(rig: &Rig, admin: &Client) -> Client {
    let pod = hollow_pod(rig, admin).await;
    rig.client_with_token(&token(admin, bound_to("Pod", pod.metadata.name, pod.metadata.uid)).await).await
}

/// A slice of this plugin on its node, changed as JSON merge patches change.
fn slice(name: &str, change: Value) -> ResourceSlice {
    let mut slice = json!({
        "metadata": {"name": name, "labels": {"test": "deploy"}},
        "spec": {
            "driver": "gpu.nvidia.com", "nodeName": NODE,
            "pool": {"name": NODE, "generation": 1, "resourceSliceCount": 1},
            "devices": [{"name": "gpu-0", "attributes": {"type": {"string": "gpu"}}}]}});
    merge(&mut slice, change);
    from(slice)
}

fn merge(into: &mut Value, change: Value) {
    match (into, change) {
        (Value::Object(into), Value::Object(change)) => {
            for (key, value) in change {
                match value {
                    Value::Null => _ = into.remove(&key),
                    value => merge(into.entry(key).or_insert(Value::Null), value),
                }
            }
        }
        (into, change) => *into = change,
    }
}

/// The words of a refusal; a write that was let through ends the test.
fn refusal<T: std::fmt::Debug>(what: &str, outcome: kube::Result<T>) -> String {
    match outcome {
        Err(kube::Error::Api(status)) => status.message.clone(),
        other => panic!("{what}: not refused by the API server but {other:?}"),
    }
}

fn says(what: &str, said: &str, words: &str) {
    assert!(said.contains(words), "{what}: the refusal does not say {words:?} but: {said}");
}

/// A new policy takes a moment to be in force in the API server.
async fn policy_in_force(slices: &Api<ResourceSlice>) {
    let dry = PostParams { dry_run: true, ..PostParams::default() };
    let foreign = slice("not-yet", json!({"spec": {"nodeName": "node-x", "pool": {"name": "node-x"}}}));
    let refused = || async {
        let outcome = slices.create(&dry, &foreign).await;
        let said = outcome.err().map(|err| err.to_string()).unwrap_or_default();
        said.contains("ValidatingAdmissionPolicy").then_some(())
    };
    wait_until("the admission policy to be in force", LIMIT, refused).await;
}

/// The rig with the plain manifests, and the slices as the administrator and as the plugin write them.
async fn with_policy(rig: &Rig) -> (Api<ResourceSlice>, Api<ResourceSlice>) {
    apply_plain(rig);
    let admin = rig.client().await;
    rig.on_end(&["kubectl", "delete", "resourceslices", "-l", "test=deploy"]);
    let slices = Api::all(plugin(rig, &admin).await);
    policy_in_force(&slices).await;
    (Api::all(admin), slices)
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_node_writes_its_own_slices() {
    let rig = Rig::bare("a_node_writes_its_own_slices");
    let (_, slices) = with_policy(&rig).await;
    let create = PostParams::default();
    let mut own = slices.create(&create, &slice("own", json!({}))).await.expect("its own may be created");
    own.spec.pool.generation = 2;
    slices.replace("own", &create, &own).await.expect("its own may be replaced");
    let next = Patch::Merge(json!({"spec": {"pool": {"generation": 3}}}));
    own = slices.patch("own", &PatchParams::default(), &next).await.expect("its own may be patched");
    assert_eq!(own.spec.pool.generation, 3);
    slices.delete("own", &DeleteParams::default()).await.expect("its own may be deleted");
    let part = slice("part", json!({"spec": {"pool": {"name": "hollow/mig"}}}));
    slices.create(&create, &part).await.expect("a pool below the node's own may be written");
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_node_creates_no_slice_that_reaches_other_nodes() {
    let rig = Rig::bare("a_node_creates_no_slice_that_reaches_other_nodes");
    let (all, slices) = with_policy(&rig).await;
    let foreign = [
        (
            json!({"nodeName": "node-x", "pool": {"name": "node-x"}}),
            "node 'hollow' may write slices of that node only, not of 'node-x'",
        ),
        (json!({"nodeName": null, "allNodes": true}), "with spec.nodeName only"),
        (
            json!({"nodeName": null, "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [
            {"key": "metadata.name", "operator": "In", "values": [NODE]}]}]}}),
            "with spec.nodeName only",
        ),
        // The policy on newer servers; older ones do not know the field and miss spec.nodeName.
        (
            json!({"nodeName": null, "perDeviceNodeSelection": true, "devices": [{"name": "gpu-0", "nodeName": NODE}]}),
            "perDeviceNodeSelection",
        ),
        (json!({"driver": "gpu.example.com"}), "driver gpu.nvidia.com only"),
        (json!({"pool": {"name": "node-x"}}), "the pools 'hollow' and 'hollow/...' only, not of 'node-x'"),
        (json!({"pool": {"name": "hollow-2"}}), "not of 'hollow-2'"),
    ];
    for (spec, words) in foreign {
        let what = format!("create with {spec}");
        let said =
            refusal(&what, slices.create(&PostParams::default(), &slice("bad", json!({"spec": spec}))).await);
        says(&what, &said, words);
    }
    assert!(all.get_opt("bad").await.expect("slices may be read").is_none(), "a refused slice was stored");
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_node_neither_changes_nor_deletes_the_slices_of_others() {
    let rig = Rig::bare("a_node_neither_changes_nor_deletes_the_slices_of_others");
    let (all, slices) = with_policy(&rig).await;
    let (create, delete) = (PostParams::default(), DeleteParams::default());
    let others = slice("others", json!({"spec": {"nodeName": "node-x", "pool": {"name": "node-x"}}}));
    let others = all.create(&create, &others).await.expect("an administrator may write any slice");
    let driver = slice("foreign-driver", json!({"spec": {"driver": "gpu.example.com"}}));
    let driver = all.create(&create, &driver).await.expect("an administrator may write any slice");
    let steal = json!({"spec": {"pool": {"generation": 99}}});
    for (before, words) in [(others, "not of 'node-x'"), (driver, "driver gpu.nvidia.com only")] {
        let name = before.metadata.name.clone().expect("a stored object has a name");
        let said =
            refusal("patch", slices.patch(&name, &PatchParams::default(), &Patch::Merge(&steal)).await);
        says(&format!("patch of {name}"), &said, words);
        let mut changed = before.clone();
        changed.spec.devices = None;
        let said = refusal("replace", slices.replace(&name, &create, &changed).await);
        says(&format!("replacing {name}"), &said, words);
        says(&format!("deleting {name}"), &refusal("delete", slices.delete(&name, &delete).await), words);
        assert_eq!(all.get(&name).await.expect("it is still there"), before, "a refused write left a trace");
    }
    let said = refusal("delete of all", slices.delete_collection(&delete, &ListParams::default()).await);
    says("delete of all", &said, "cannot deletecollection");
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_token_that_names_no_node_writes_nothing() {
    let rig = Rig::bare("a_token_that_names_no_node_writes_nothing");
    with_policy(&rig).await;
    let admin = rig.client().await;
    let create = PostParams::default();

    let nobody: Api<ResourceSlice> = Api::all(rig.client_with_token(&token(&admin, None).await).await);
    let said = refusal("a token bound to nothing", nobody.create(&create, &slice("own", json!({}))).await);
    says("a token bound to nothing", &said, "names no node");

    let node: Node = Api::all(admin.clone()).get(NODE).await.expect("the Node is there");
    let bound = token(&admin, bound_to("Node", node.metadata.name, node.metadata.uid)).await;
    let slices: Api<ResourceSlice> = Api::all(rig.client_with_token(&bound).await);
    slices
        .create(&create, &slice("by-node-token", json!({})))
        .await
        .expect("a token bound to the Node names it");
}

/// A claim allocated to a GPU of the named node, as the scheduler would leave it.
async fn allocated_claim(admin: &Client, name: &str, node: &str) -> ResourceClaim {
    let claims: Api<ResourceClaim> = Api::namespaced(admin.clone(), NAMESPACE);
    let claim = json!({
        "metadata": {"name": name, "finalizers": ["resource.kubernetes.io/delete-protection"]},
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu.nvidia.com"}}]}}});
    let mut claim: ResourceClaim =
        claims.create(&PostParams::default(), &from(claim)).await.expect("a claim may be created");
    claim.status = from(json!({"allocation": {
        "allocationTimestamp": "2026-01-02T03:04:05Z",
        "devices": {"results": [
            {"request": "gpu", "driver": "gpu.nvidia.com", "pool": node, "device": "gpu-0"},
            {"request": "gpu", "driver": "nic.example.com", "pool": node, "device": "nic-0"}]},
        "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [
            {"key": "metadata.name", "operator": "In", "values": [node]}]}]}}}));
    claims.replace_status(name, &PostParams::default(), &claim).await.expect("an administrator may allocate")
}

/// Before 1.36 whoever may write a claim's status may write all of it: the same rights on newer
/// releases, so that the policy alone stands in the way.
fn give_the_rights_of_old(rig: &Rig) {
    let role = "tranche-test-old-rights";
    rig.on_end(&["kubectl", "delete", "clusterrole,clusterrolebinding", role, "--ignore-not-found"]);
    let verbs = "--verb=update,patch,arbitrary-node:update,arbitrary-node:patch";
    let resources = "--resource=resourceclaims.resource.k8s.io/binding,resourceclaims.resource.k8s.io/driver";
    rig.kubectl(&["create", "clusterrole", role, verbs, resources]);
    let account = format!("--serviceaccount={NAMESPACE}:tranche-node");
    rig.kubectl(&["create", "clusterrolebinding", role, &format!("--clusterrole={role}"), &account]);
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_node_writes_the_device_status_of_its_own_claims_and_nothing_else_of_a_claim() {
    let rig = Rig::bare("a_node_writes_the_device_status_of_its_own_claims");
    apply_plain(&rig);
    let admin = rig.client().await;
    rig.on_end(&["kubectl", "-n", NAMESPACE, "delete", "resourceclaims", "--all", "--wait=false"]);
    let here = allocated_claim(&admin, "here", NODE).await;
    allocated_claim(&admin, "elsewhere", "node-x").await;
    let by_plugin = plugin(&rig, &admin).await;
    policy_in_force(&Api::all(by_plugin.clone())).await;
    let claims: Api<ResourceClaim> = Api::namespaced(by_plugin, NAMESPACE);
    let merge = PatchParams::default();
    let devices = |driver: &str, device: &str, pool: &str| {
        Patch::Merge(
            json!({"status": {"devices": [{"driver": driver, "pool": pool, "device": device, "data": {"seen": true}}]}}),
        )
    };

    let told = claims.patch_status("here", &merge, &devices("gpu.nvidia.com", "gpu-0", NODE)).await;
    let told =
        told.expect("the device status of its own claim may be written").status.expect("with a status");
    assert_eq!(told.devices.expect("the entry was stored").len(), 1);
    refusal(
        "another node's claim",
        claims.patch_status("elsewhere", &merge, &devices("gpu.nvidia.com", "gpu-0", "node-x")).await,
    );

    give_the_rights_of_old(&rig);
    let take = Patch::Merge(json!({"status": {"allocation": null, "devices": null}}));
    let reserve =
        Patch::Merge(json!({"status": {"reservedFor": [{"resource": "pods", "name": "p", "uid": "u"}]}}));
    for (what, claim, change, words) in [
        (
            "another node's claim",
            "elsewhere",
            devices("gpu.nvidia.com", "gpu-0", "node-x"),
            "allocated to that node only",
        ),
        ("an allocation", "here", take, "not its allocation or reservation"),
        ("a reservation", "here", reserve, "not its allocation or reservation"),
        (
            "another driver's entry",
            "here",
            devices("nic.example.com", "nic-0", NODE),
            "devices of the driver gpu.nvidia.com only",
        ),
    ] {
        // The role, too, takes a moment: until then it is the authorizer that refuses.
        wait_until(&format!("the policy to refuse {what}"), LIMIT, || async {
            let said = refusal(what, claims.patch_status(claim, &merge, &change).await);
            said.contains(words).then_some(())
        })
        .await;
    }
    let after = claims.get("here").await.expect("claims may be read");
    assert_eq!(
        after.status.expect("it has a status").allocation,
        here.status.expect("it had a status").allocation
    );
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn the_node_plugin_may_do_what_it_needs_and_no_more() {
    let rig = Rig::bare("the_node_plugin_may_do_what_it_needs_and_no_more");
    apply_plain(&rig);
    let reviews: Api<SubjectAccessReview> = Api::all(rig.client().await);
    let can = async |verb: &str, what: &str| {
        let (resource, part) = what.split_once('/').unwrap_or((what, ""));
        let (resource, group) = resource.split_once('.').unwrap_or((resource, ""));
        let review = json!({"metadata": {}, "spec": {
            "user": format!("system:serviceaccount:{NAMESPACE}:tranche-node"),
            "groups": ["system:serviceaccounts", format!("system:serviceaccounts:{NAMESPACE}"), "system:authenticated"],
            "resourceAttributes": {
                "namespace": "default", "verb": verb, "group": group, "resource": resource, "subresource": part}}});
        let answer = reviews.create(&PostParams::default(), &from(review)).await.expect("it is reviewed");
        answer.status.expect("a review has an answer").allowed
    };
    // The authorizer knows new roles a moment later.
    let known = || async { can("get", "resourceclaims.resource.k8s.io").await.then_some(()) };
    wait_until("the plugin's role to be known", LIMIT, known).await;
    let slices = "resourceslices.resource.k8s.io";
    let claims = "resourceclaims.resource.k8s.io";
    let status = "resourceclaims.resource.k8s.io/status";
    for (verb, what) in [
        ("get", claims),
        ("get", slices),
        ("list", slices),
        ("watch", slices),
        ("create", slices),
        ("update", slices),
        ("patch", slices),
        ("delete", slices),
        ("get", "nodes"),
        ("patch", status),
        ("create", "events"),
    ] {
        assert!(can(verb, what).await, "the plugin needs to {verb} {what}");
    }
    for (verb, what) in [
        ("list", claims),
        ("watch", claims),
        ("create", claims),
        ("update", claims),
        ("patch", claims),
        ("delete", claims),
        ("deletecollection", slices),
        ("list", "nodes"),
        ("patch", "nodes"),
        ("update", "nodes"),
        ("get", "pods"),
        ("list", "pods"),
        ("get", "secrets"),
        ("create", "pods"),
        ("create", "deployments.apps"),
        ("patch", "resourceclaims.resource.k8s.io/binding"),
        ("arbitrary-node:patch", "resourceclaims.resource.k8s.io/driver"),
        ("impersonate", "users"),
        ("list", "events"),
        ("patch", "events"),
        ("delete", "events"),
        ("create", "events.events.k8s.io"),
    ] {
        assert!(!can(verb, what).await, "the plugin has no business to {verb} {what}");
    }
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn the_chart_installs_upgrades_and_leaves_nothing_behind() {
    let rig = Rig::bare("the_chart_installs_upgrades_and_leaves_nothing_behind");
    uninstall_at_end(&rig);
    let said = install(&rig, "tranche", NAMESPACE, &[]).expect("the chart can be installed");
    assert!(said.contains("rollout status daemonset/tranche-node"), "the notes say what to run next: {said}");

    let admin = rig.client().await;
    let pods: Api<Pod> = Api::namespaced(admin.clone(), NAMESPACE);
    let placed = wait_until("a pod of the DaemonSet on the node", LIMIT, || async {
        pods.list(&ListParams::default()).await.ok()?.items.into_iter().find(|pod| node_of(pod).is_some())
    })
    .await;
    assert!(matches!(node_of(&placed), Some("node-a" | "node-b")), "{:?}", node_of(&placed));
    let class: DeviceClass = Api::all(admin.clone()).get("gpu.nvidia.com").await.expect("the class is there");
    // Gone on servers that do not know it: then nothing else may have gone with it.
    let class = class.spec.expect("with a spec");
    let extended = class.extended_resource_name;
    assert!(extended.is_none() || extended.as_deref() == Some("nvidia.com/gpu"));
    assert_eq!(class.selectors.map_or(0, |selectors| selectors.len()), 1);
    // What only newer servers know is installed on those.
    let group = ["api-resources", "--api-group=admissionregistration.k8s.io", "-o", "name"];
    let known = rig.kubectl(&group).contains("mutatingadmissionpolicies");
    if known {
        rig.kubectl(&[
            "get",
            "mutatingadmissionpolicy/tranche-claims",
            "mutatingadmissionpolicybinding/tranche-claims",
        ]);
    }

    let told = rig.helm(&[
        "upgrade",
        "tranche",
        "charts/tranche",
        "-n",
        NAMESPACE,
        "--reuse-values",
        "--set",
        "node.logFormat=text",
    ]);
    told.expect("the release can be upgraded");
    let args = rig.kubectl(&[
        "-n",
        NAMESPACE,
        "get",
        "daemonset",
        "tranche-node",
        "-o",
        "jsonpath={..containers[0].args}",
    ]);
    assert!(args.contains("--log-format=text"), "the upgrade reached the DaemonSet: {args}");

    rig.helm(&["uninstall", "tranche", "-n", NAMESPACE, "--wait", "--timeout=170s"])
        .expect("it can be uninstalled");
    let mut kinds = "serviceaccounts,clusterroles,clusterrolebindings,daemonsets,pods,deviceclasses,\
                     validatingadmissionpolicies,validatingadmissionpolicybindings,configmaps,secrets"
        .to_owned();
    if known {
        kinds += ",mutatingadmissionpolicies,mutatingadmissionpolicybindings";
    }
    let left = ["get", &*kinds, "-A", "-l", "app.kubernetes.io/name=tranche", "-o", "name"];
    // A pod has its terminationGracePeriodSeconds.
    let grace = Duration::from_secs(90);
    let empty = || async { rig.kubectl(&left).trim().is_empty().then_some(()) };
    wait_until("everything to be gone", grace, empty).await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn the_chart_refuses_what_cannot_work() {
    let rig = Rig::bare("the_chart_refuses_what_cannot_work");
    uninstall_at_end(&rig);
    let admin = rig.client().await;

    // NVIDIA's DRA driver, by the program that its DaemonSet starts.
    let peer = root().join("tests/cluster/data/peer-daemonset.yaml");
    let peer = peer.to_str().expect("the path is UTF-8");
    rig.on_end(&["kubectl", "delete", "-f", peer, "--ignore-not-found"]);
    rig.kubectl(&["apply", "-f", peer]);
    let said = install(&rig, "tranche", NAMESPACE, &[]).expect_err("two drivers of one name cannot be");
    says(
        "beside NVIDIA's driver",
        &said,
        "NVIDIA's DRA driver runs in this cluster (DaemonSet default/peer-kubelet-plugin",
    );
    rig.kubectl(&["delete", "-f", peer]);

    // The device plugin, by what it makes of a node.
    rig.on_end(&["kubectl", "delete", "node", NODE, "--ignore-not-found"]);
    let nodes: Api<Node> = Api::all(admin);
    let node = json!({"metadata": {"name": NODE, "labels": {"kubernetes.io/os": "linux", "pool": "old"}}});
    nodes.create(&PostParams::default(), &from(node)).await.expect("an administrator may create a Node");
    let gpus =
        json!({"status": {"capacity": {"nvidia.com/gpu": "8"}, "allocatable": {"nvidia.com/gpu": "8"}}});
    nodes.patch_status(NODE, &PatchParams::default(), &Patch::Merge(gpus)).await.expect("and give it GPUs");
    let said = install(&rig, "tranche", NAMESPACE, &[]).expect_err("the GPUs would be handed out twice");
    says(
        "beside a device plugin",
        &said,
        "offers nvidia.com/gpu on 1 of the nodes that Tranche would run on (hollow)",
    );

    // Kept apart, both may be there; a second release never.
    let apart = ["--set-string", "node.nodeSelector.pool=new"];
    install(&rig, "tranche", NAMESPACE, &apart).expect("other nodes are no conflict");
    let said = install(&rig, "second", "elsewhere", &apart).expect_err("one release per cluster");
    says("a second release", &said, "belongs to the Helm release tranche in namespace tranche-system");
}

fn install(rig: &Rig, release: &str, namespace: &str, more: &[&str]) -> Result<String, String> {
    let never = ["--set", "image.pullPolicy=Never"];
    let args =
        [&["install", release, "charts/tranche", "-n", namespace, "--create-namespace"], &never[..]].concat();
    rig.helm(&[&args[..], more].concat())
}

fn uninstall_at_end(rig: &Rig) {
    rig.on_end(&[
        "kubectl",
        "delete",
        "namespace",
        NAMESPACE,
        "elsewhere",
        "--ignore-not-found",
        "--timeout=170s",
    ]);
    rig.on_end(&["helm", "uninstall", "tranche", "-n", NAMESPACE, "--ignore-not-found", "--wait"]);
}

fn node_of(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref()?.node_name.as_deref()
}
