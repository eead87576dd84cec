//! What users of NVIDIA's driver apply, in words of our own: the shapes that its demonstrations and its tests have,
//! as manifests in `data/nvidia`. What its containers find is what they find here.
//!
//! Elsewhere: pods that share a named claim (`sharing`), limits of `nvidia.com/gpu` and several GPUs in one request
//! (`pods`), MPS on a MIG device (`shares::grants`), parameters that nobody understands (`bad_input`).
//!
//! What NVIDIA's end-to-end specs do, and the test that stands for it:
//!
//! | scenario of theirs | here, or in a module beside |
//! |---|---|
//! | a pod with a GPU; pods with one each; a template for two containers | `whole_gpus_go_to_pods_and_containers_…` |
//! | two templates give different GPUs | the same |
//! | several pods, few and many, on one claim | `sharing` |
//! | a Job by template; a claim's life, and its GPU given again | `a_jobs_pods_see_their_gpu_and_give_it_back` |
//! | a Deployment whose pods have different GPUs | `a_kind_of_gpu_is_chosen_…`, `pods` |
//! | GPUs by architecture, product name, a version | `a_kind_of_gpu_is_chosen_…`, by CUDA capability, not driver |
//! | a request that no device meets; a product that is not there | its pod `elsewhere` |
//! | devices by memory | `mig_devices_are_found_…` by capacity; GPUs by `totalMemoryMiB`: `a_kind_of_gpu_is_chosen_…` |
//! | time slices, MPS, with two containers each | `one_claims_gpus_have_a_setting_each` |
//! | MIG devices that are there, with their attributes | `mig_devices_of_one_claim_…`, `mig_devices_are_found_…` |
//! | MIG devices that are made for claims | `mig` |
//! | `nvidia.com/gpu: 1` | `pods`; of a MIG profile `a_limit_of_a_mig_profile_gets_a_mig_device` |
//! | many pods come and go, and nothing stays | `churn` |
//! | two claims with memory of one GPU | `shares` |
//! | claims that share a GPU without an amount | `shares::settings` |
//! | shares by number; a Deployment for each MPS daemon; names of metrics | not applicable: Tranche has none of these |
//! | their chart, its objects, its upgrades, its log on a signal | not applicable |
//! | ComputeDomains | not applicable |
//! | their programs with CUDA, bandwidth of the bus | not applicable: simulated GPUs compute nothing |
//!
//! The tests of compute instances and of the administrator's monitor have no scenario of theirs.

use std::collections::BTreeSet;

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::ListParams;
use serde_json::json;

use crate::discovery::AtEnd;
use crate::manifests::{by_template, claim, gpu, of_gpu, on, template, user_of};
use crate::rig::{root, skipped, wait_until};
use crate::shares::{mps_env, wait_unschedulable};
use crate::test_cluster::{PATIENCE, SOON, TestCluster, devices_of, minor_of, node_of};

const NODE: &str = "node-a";

/// Applies a file of `data/nvidia` in the test's namespace. Its pods go to the node with MIG devices, whose numbers of
/// GPUs the tests tell apart, whatever other nodes there are.
fn apply(cluster: &TestCluster, file: &str) {
    let nodes = cluster.rig.kubectl(&["get", "nodes", "-o", "name"]);
    for other in nodes.lines().filter(|name| *name != format!("node/{NODE}")) {
        cluster.rig.on_end(&["kubectl", "uncordon", other]);
        cluster.rig.kubectl(&["cordon", other]);
    }
    let path = root().join("tests/cluster/data/nvidia").join(file);
    let path = path.to_str().expect("the repository's path is text");
    cluster.rig.kubectl(&["-n", &cluster.namespace, "apply", "-f", path]);
}

/// Device by request, of a claim that names its requests.
fn given(claim: &ResourceClaim, request: &str) -> String {
    let allocation = claim.status.as_ref().and_then(|status| status.allocation.as_ref());
    let results = allocation.and_then(|one| one.devices.as_ref()?.results.as_ref()).expect("it is allocated");
    let result = results.iter().find(|result| result.request == request);
    result.unwrap_or_else(|| panic!("nothing is given for {request}")).device.clone()
}

/// The GPUs of a container, which has nothing of MIG, and the variable that keeps older runtimes out.
fn whole(cluster: &TestCluster, pod: &str, container: &str) -> Vec<u32> {
    let inside = cluster.inside(pod, container);
    assert_eq!((inside.visible.as_str(), inside.cuda), ("void", true), "{pod}/{container}");
    assert!(inside.caps.is_empty(), "{pod}/{container}: {:?}", inside.caps);
    let listed = cluster.exec(pod, container, "nvidia-smi -L | grep -c '^GPU '");
    assert_eq!(listed.trim(), inside.gpus.len().to_string(), "nvidia-smi in {pod}/{container}");
    inside.gpus
}

/// One template for two pods, for two containers, and twice in one pod; two templates in one container.
#[tokio::test]
#[ignore = "needs a rig"]
async fn whole_gpus_go_to_pods_and_containers_as_their_claims_say() {
    let cluster = TestCluster::of_env("whole_gpus_go_to_pods_and_containers_as_their_claims_say").await;
    apply(&cluster, "whole.yaml");
    let pods = ["alone-1", "alone-2", "room-mates", "neighbours", "greedy"];
    cluster.wait_all_ready(&pods.map(str::to_owned)).await;
    let mut taken = Vec::new();
    for alone in ["alone-1", "alone-2"] {
        taken.extend(whole(&cluster, alone, "main"));
    }
    let shared = whole(&cluster, "room-mates", "left");
    assert_eq!(whole(&cluster, "room-mates", "right"), shared, "both containers have the pod's one claim");
    taken.extend(shared);
    for side in ["left", "right"] {
        let own = whole(&cluster, "neighbours", side);
        assert_eq!(own.len(), 1, "{side}");
        taken.extend(own);
    }
    let both = whole(&cluster, "greedy", "main");
    assert_eq!(both.len(), 2, "one of each claim");
    taken.extend(both);
    let distinct: BTreeSet<_> = taken.iter().collect();
    assert_eq!((taken.len(), distinct.len()), (7, 7), "each claim has a GPU of its own: {taken:?}");
    cluster.end().await;
}

/// `matchAttribute` on `parentUUID`: a claim's MIG devices are of one board, each for its own container.
#[tokio::test]
#[ignore = "needs a rig"]
async fn mig_devices_of_one_claim_have_one_parent_and_a_container_each() {
    let cluster = TestCluster::of_env("mig_devices_of_one_claim_have_one_parent_and_a_container_each").await;
    let before = cluster.published_names(NODE).await;
    // A second board, with a small one that would be taken first if the parent did not matter.
    let undo = AtEnd(&cluster, &["set-mig", "6", "off"]);
    cluster.fake(NODE, &["set-mig", "6", "1g.10gb"]);
    cluster.fake(NODE, &["event", "6", "mig-config"]);
    let second = || async {
        let names = cluster.published_names(NODE).await;
        names.iter().any(|name| name.starts_with("gpu-6-mig-1g10gb-")).then_some(())
    };
    wait_until("the second board's MIG device", SOON, second).await;
    apply(&cluster, "mig-together.yaml");
    cluster.wait_ready("family").await;
    let claim = cluster.claim_of("family").await;
    let (mut parents, mut caps) = (BTreeSet::new(), BTreeSet::new());
    for (container, request, profile) in
        [("a", "small-a", "1g10gb"), ("b", "small-b", "1g10gb"), ("c", "large", "2g20gb")]
    {
        let device = given(&claim, request);
        assert!(device.starts_with(&format!("gpu-7-mig-{profile}-")), "{request}: {device}");
        parents.insert(cluster.attribute(NODE, &device, "parentUUID").await);
        let inside = cluster.inside("family", container);
        assert_eq!((inside.visible.as_str(), &inside.gpus[..]), ("void", &[7][..]), "{container}");
        assert_eq!(inside.caps.len(), 2, "its own instance and no other: {container} has {:?}", inside.caps);
        caps.extend(inside.caps);
        let (uuid, said) = (
            cluster.attribute(NODE, &device, "uuid").await,
            cluster.exec("family", container, "nvidia-smi -L"),
        );
        let listed: Vec<_> = said.lines().filter(|line| line.contains("MIG ")).collect();
        assert!(listed.len() == 1 && listed[0].contains(&uuid), "{container} was given {uuid}:\n{said}");
    }
    assert_eq!((parents.len(), caps.len()), (1, 6), "{parents:?} {caps:?}");
    cluster.delete("family").await;

    cluster.create(by_template("too-many-of-one-board", "spread")).await;
    let said = wait_unschedulable(&cluster, "spread").await;
    assert!(said.contains("cannot allocate all claims"), "{said}");
    cluster.delete("spread").await;
    cluster.fake(NODE, &["set-mig", "6", "off"]);
    cluster.fake(NODE, &["event", "6", "mig-config"]);
    let back = || async { (cluster.published_names(NODE).await == before).then_some(()) };
    wait_until("the slices to be as they were", PATIENCE, back).await;
    drop(undo);
    cluster.end().await;
}

/// A GPU instance that is divided once more, as `nvidia-smi mig -cci` does: each part is a device, though all that their names
/// say of profile and placement is the same.
#[tokio::test]
#[ignore = "needs a rig"]
async fn compute_instances_of_one_gpu_instance_go_to_a_claim_each() {
    let cluster = TestCluster::of_env("compute_instances_of_one_gpu_instance_go_to_a_claim_each").await;
    let before = cluster.published_names(NODE).await;
    let undo = AtEnd(&cluster, &["set-mig", "6", "off"]);
    cluster.fake(NODE, &["set-mig", "6", "2g.20gb/1+1"]);
    cluster.fake(NODE, &["event", "6", "mig-config"]);
    let both = || async {
        let names = cluster.published_names(NODE).await;
        let parts: Vec<_> =
            names.into_iter().filter(|name| name.starts_with("gpu-6-mig-1c2g20gb-")).collect();
        <[String; 2]>::try_from(parts).ok()
    };
    let [one, other] = wait_until("both compute instances to be published", SOON, both).await;
    // The second has its number at the end.
    assert_eq!(other, format!("{one}-1"));
    let uuids = [cluster.attribute(NODE, &one, "uuid").await, cluster.attribute(NODE, &other, "uuid").await];
    assert_ne!(uuids[0], uuids[1]);
    for (pod, uuid) in ["first", "second"].into_iter().zip(&uuids) {
        let mut request = gpu("gpu");
        request["exactly"]["deviceClassName"] = json!("mig.nvidia.com");
        cluster.create(claim(pod, json!({"requests": [of_gpu(uuid, request)]}))).await;
        cluster.create(on(NODE, user_of(pod, pod))).await;
    }
    let mut capabilities = Vec::new();
    for (pod, device) in ["first", "second"].into_iter().zip([&one, &other]) {
        cluster.wait_ready(pod).await;
        assert_eq!(cluster.devices_of(pod).await, *std::slice::from_ref(device), "{pod}");
        let inside = cluster.inside(pod, "main");
        assert_eq!((&inside.gpus[..], inside.caps.len()), (&[6][..], 2), "{pod}");
        capabilities.push(inside.caps);
    }
    let shared = capabilities[0].iter().filter(|one| capabilities[1].contains(one)).count();
    assert_eq!(shared, 1, "the GPU instance's is both pods': {capabilities:?}");
    for pod in ["first", "second"] {
        cluster.delete(pod).await;
    }
    cluster.fake(NODE, &["set-mig", "6", "off"]);
    cluster.fake(NODE, &["event", "6", "mig-config"]);
    let back = || async { (cluster.published_names(NODE).await == before).then_some(()) };
    wait_until("the slices to be as they were", PATIENCE, back).await;
    drop(undo);
    cluster.end().await;
}

/// By `multiprocessors` and `memory`, with a MIG device's time slice.
#[tokio::test]
#[ignore = "needs a rig"]
async fn mig_devices_are_found_by_what_they_have() {
    let cluster = TestCluster::of_env("mig_devices_are_found_by_what_they_have").await;
    apply(&cluster, "mig-by-size.yaml");
    cluster.wait_ready("sized").await;
    let claim = cluster.claim_of("sized").await;
    for (request, profile) in [("small", "1g.10gb"), ("large", "2g.20gb")] {
        let device = given(&claim, request);
        assert_eq!(cluster.attribute(NODE, &device, "profile").await, profile, "{device}");
        let inside = cluster.inside("sized", request);
        assert_eq!((&inside.gpus[..], inside.caps.len()), (&[7][..], 2), "{request}");
        let said = cluster.exec("sized", request, "nvidia-smi -L");
        assert!(said.contains(&cluster.attribute(NODE, &device, "uuid").await), "{said}");
    }
    cluster.end().await;
}

/// An administrator's own DeviceClass with `extendedResourceName`, as a device plugin named its MIG devices.
#[tokio::test]
#[ignore = "needs a rig"]
async fn a_limit_of_a_mig_profile_gets_a_mig_device() {
    let cluster = TestCluster::of_env("a_limit_of_a_mig_profile_gets_a_mig_device").await;
    if cluster.release().await < 36 {
        skipped("limits become claims from Kubernetes 1.36 on");
        return;
    }
    cluster.rig.on_end(&["kubectl", "delete", "deviceclass", "small-mig.example.com", "--ignore-not-found"]);
    apply(&cluster, "mig-by-limits.yaml");
    cluster.wait_ready("by-limits").await;
    let claims = cluster.api::<ResourceClaim>().list(&ListParams::default()).await.unwrap().items;
    assert_eq!(claims.len(), 1, "the scheduler makes one claim for it");
    let device = devices_of(&claims[0]).remove(0);
    assert!(device.starts_with("gpu-7-mig-1g10gb-"), "{device}");
    let inside = cluster.inside("by-limits", "main");
    assert_eq!((inside.visible.as_str(), &inside.gpus[..], inside.caps.len()), ("void", &[7][..], 2));
    cluster.end().await;
}

/// Each container finds the setting of its own request, and the node what each board is set to.
#[tokio::test]
#[ignore = "needs a rig"]
async fn one_claims_gpus_have_a_setting_each() {
    let cluster = TestCluster::of_env("one_claims_gpus_have_a_setting_each").await;
    apply(&cluster, "settings.yaml");
    cluster.wait_ready("four").await;
    let claim = cluster.claim_of("four").await;
    let (sliced, served) = (minor_of(&given(&claim, "sliced")), minor_of(&given(&claim, "served")));
    assert_ne!(sliced, served);
    for (container, board) in
        [("sliced-1", sliced), ("sliced-2", sliced), ("served-1", served), ("served-2", served)]
    {
        assert_eq!(cluster.inside("four", container).gpus, [board], "{container}");
        let mps = [
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=50",
            "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=10240M",
            "CUDA_MPS_PIPE_DIRECTORY=/run/nvidia-mps",
        ];
        let expected: &[&str] = if board == served { &mps } else { &[] };
        assert_eq!(mps_env(&cluster, "four", container), expected, "{container}");
    }
    assert_eq!(cluster.exec("four", "served-1", "ls -A /run/nvidia-mps"), "control\nlog\n");
    // 3: Long.
    assert_eq!(cluster.fake_state(NODE, &sliced.to_string())["time_slice"], 3);
    assert_eq!(cluster.exclusive_boards(NODE), [served.to_string()], "MPS has its board alone, and no other");
    cluster.delete("four").await;
    let back = || async { (cluster.fake_state(NODE, &sliced.to_string())["time_slice"] == 0).then_some(()) };
    wait_until("the driver's own time slice to be back", SOON, back).await;
    cluster.end().await;
}

/// CEL on strings and versions, in a Deployment.
#[tokio::test]
#[ignore = "needs a rig"]
async fn a_kind_of_gpu_is_chosen_by_its_name_architecture_and_version() {
    let cluster = TestCluster::of_env("a_kind_of_gpu_is_chosen_by_its_name_architecture_and_version").await;
    apply(&cluster, "chosen.yaml");
    let both = || async {
        let status = cluster.api::<Deployment>().get("chosen").await.ok()?.status?;
        (status.ready_replicas == Some(2)).then_some(())
    };
    wait_until("both pods to be ready", PATIENCE, both).await;
    let pods = cluster.api::<Pod>().list(&ListParams::default().labels("app=chosen")).await.unwrap().items;
    let mut boards = BTreeSet::new();
    for pod in &pods {
        assert_eq!(node_of(pod), NODE, "the node with H100s");
        let gpus = whole(&cluster, pod.metadata.name.as_deref().unwrap(), "main");
        assert_eq!(cluster.fake_state(NODE, &gpus[0].to_string())["time_slice"], 3);
        boards.extend(gpus);
    }
    assert_eq!(boards.len(), 2, "{boards:?}");
    cluster.create(by_template("elsewhere", "elsewhere")).await;
    let said = wait_unschedulable(&cluster, "elsewhere").await;
    assert!(said.contains("cannot allocate all claims"), "{said}");
    cluster.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_jobs_pods_see_their_gpu_and_give_it_back() {
    let cluster = TestCluster::of_env("a_jobs_pods_see_their_gpu_and_give_it_back").await;
    apply(&cluster, "job.yaml");
    let done = || async {
        let status = cluster.api::<Job>().get("look").await.ok()?.status?;
        assert_eq!(status.failed.unwrap_or_default(), 0, "{status:?}");
        (status.succeeded == Some(3)).then_some(())
    };
    wait_until("three pods to have looked", PATIENCE, done).await;
    // They are there still, ended; nothing of them is on the node.
    cluster.wait_clean().await;
    let pods = cluster.api::<Pod>().list(&ListParams::default().labels("app=look")).await.unwrap().items;
    assert_eq!(pods.len(), 3);
    for pod in pods {
        let name = pod.metadata.name.unwrap();
        let said = cluster.rig.kubectl(&["-n", &cluster.namespace, "logs", &name]);
        let lines: Vec<_> = said.lines().collect();
        assert!(lines.len() == 1 && lines[0].starts_with("GPU 0: "), "{name} saw {said}");
    }
    cluster.rig.kubectl(&["-n", &cluster.namespace, "delete", "job", "look", "--timeout=170s"]);
    cluster.end().await;
}

/// Administrative access without a word of capacities, on a node whose GPUs are free; users come and go beside it.
#[tokio::test]
#[ignore = "needs a rig"]
async fn a_monitor_sees_all_gpus_and_keeps_none_from_users() {
    let labels = json!({"resource.kubernetes.io/admin-access": "true"});
    let cluster = TestCluster::with_labels("a_monitor_sees_all_gpus_and_keeps_none_from_users", labels).await;
    apply(&cluster, "monitor.yaml");
    cluster.wait_ready("monitor").await;
    assert_eq!(whole(&cluster, "monitor", "main"), (0..7).collect::<Vec<_>>(), "every whole GPU of the node");
    cluster.create(template("one", json!({"requests": [gpu("gpu")]}))).await;
    cluster.create(on(NODE, by_template("one", "user"))).await;
    cluster.wait_ready("user").await;
    assert_eq!(whole(&cluster, "user", "main").len(), 1);
    cluster.delete("monitor").await;
    assert_eq!(whole(&cluster, "user", "main").len(), 1);
    cluster.end().await;
}
