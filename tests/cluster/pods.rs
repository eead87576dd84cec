//! Pods that take GPUs, in every way that a manifest can ask for one: what their containers find.

use std::collections::BTreeSet;
use std::fs;
use std::time::Duration;

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::Api;
use kube::api::ListParams;
use serde_json::{Value, json};

use crate::manifests::{by_template, claim, container, gpu, on, pod, share, template, time_slicing, user_of};
use crate::rig::{skipped, wait_until};
use crate::test_cluster::{PATIENCE, SOON, TestCluster, container_run, devices_of, minor_of, node_of};

/// One whole GPU and nothing else.
fn has_only(cluster: &TestCluster, pod: &str, container: &str, device: &str) {
    let inside = cluster.inside(pod, container);
    assert_eq!(inside.visible, "void", "{pod}/{container}");
    assert_eq!(inside.gpus, [minor_of(device)], "{pod}/{container} was given {device}");
    assert!(inside.caps.is_empty(), "{pod}/{container} has MIG capabilities {:?}", inside.caps);
    assert!(inside.cuda, "{pod}/{container}: libcuda.so.1 does not load");
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn each_pod_of_a_deployment_has_a_gpu_of_its_own() {
    let cluster = TestCluster::of_env("each_pod_of_a_deployment_has_a_gpu_of_its_own").await;
    cluster.create(template("one-gpu", json!({"requests": [gpu("gpu")]}))).await;
    let mut spec = by_template("one-gpu", "")["spec"].take();
    spec["restartPolicy"] = json!("Always");
    cluster
        .create(json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "inference"},
        "spec": {"replicas": 4, "selector": {"matchLabels": {"app": "inference"}},
            "template": {"metadata": {"labels": {"app": "inference"}}, "spec": spec}}}))
        .await;
    let deployments: Api<Deployment> = cluster.api();
    let all_ready = || async {
        let status = deployments.get("inference").await.ok()?.status?;
        (status.ready_replicas == Some(4)).then_some(())
    };
    wait_until("four ready pods", PATIENCE, all_ready).await;
    let pods = cluster.api::<Pod>().list(&ListParams::default().labels("app=inference")).await.unwrap();
    let mut taken = BTreeSet::new();
    for pod in &pods.items {
        let name = pod.metadata.name.as_deref().unwrap();
        let device = devices_of(&cluster.claim_of(name).await).remove(0);
        has_only(&cluster, name, "main", &device);
        assert!(taken.insert((node_of(pod), device)), "two pods have one GPU: {taken:?}");
    }
    assert_eq!(taken.len(), 4);
    cluster.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_mig_pod_has_its_instance_and_no_other() {
    let cluster = TestCluster::of_env("a_mig_pod_has_its_instance_and_no_other").await;
    let selector =
        json!([{"cel": {"expression": "device.attributes['gpu.nvidia.com'].profile == '1g.10gb'"}}]);
    let request =
        json!({"name": "mig", "exactly": {"deviceClassName": "mig.nvidia.com", "selectors": selector}});
    cluster.create(template("small", json!({"requests": [request]}))).await;
    let mut taken = BTreeSet::new();
    for name in ["one", "two"] {
        cluster.create(by_template("small", name)).await;
        let node = node_of(&cluster.wait_ready(name).await);
        let device = devices_of(&cluster.claim_of(name).await).remove(0);
        assert!(device.starts_with("gpu-7-mig-1g10gb-"), "{device}");
        let inside = cluster.inside(name, "main");
        assert_eq!(
            (inside.visible.as_str(), &inside.gpus[..], inside.cuda),
            ("void", &[7][..], true),
            "{name}"
        );
        assert_eq!(inside.caps, capabilities(&cluster, &node, &device).await, "{name} was given {device}");
        taken.insert(inside.caps);
    }
    assert_eq!(taken.len(), 2, "two pods have one MIG device");
    cluster.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn nvidia_smi_in_a_container_names_its_devices_and_versions() {
    let cluster = TestCluster::of_env("nvidia_smi_in_a_container_names_its_devices_and_versions").await;
    let mig = json!({"name": "mig", "exactly": {"deviceClassName": "mig.nvidia.com"}});
    for (name, request) in [("whole", gpu("gpu")), ("part", mig)] {
        cluster.create(claim(name, json!({"requests": [request]}))).await;
        cluster.create(user_of(name, name)).await;
    }
    let node = node_of(&cluster.wait_ready("whole").await);
    let device = cluster.devices_of("whole").await.remove(0);
    let board = cluster.attribute(&node, &device, "uuid").await;
    let said = cluster.exec("whole", "main", "nvidia-smi -L");
    assert!(said.starts_with("GPU 0: ") && said.trim_end().ends_with(&format!("(UUID: {board})")), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
    let version = cluster.attribute(&node, &device, "driverVersion").await;
    let said = cluster.exec("whole", "main", "nvidia-smi --version");
    let told = said.lines().find_map(|line| line.strip_prefix("DRIVER version")?.split(": ").nth(1));
    let told = told.unwrap_or_else(|| panic!("{said}"));
    // An attribute has three numbers without leading zeros.
    let plain = told.split('.').map(|part| part.parse::<u32>().unwrap().to_string());
    assert_eq!(plain.collect::<Vec<_>>().join("."), version);

    let node = node_of(&cluster.wait_ready("part").await);
    let device = cluster.devices_of("part").await.remove(0);
    let (board, part) = (
        cluster.attribute(&node, &device, "parentUUID").await,
        cluster.attribute(&node, &device, "uuid").await,
    );
    let said = cluster.exec("part", "main", "nvidia-smi -L");
    let lines: Vec<_> = said.trim_end().lines().collect();
    assert_eq!(lines.len(), 2, "{said}");
    assert!(lines[0].ends_with(&format!("(UUID: {board})")), "{said}");
    assert!(lines[1].starts_with("  MIG ") && lines[1].ends_with(&format!("(UUID: {part})")), "{said}");
    cluster.end().await;
}

/// What the driver says are the minors of a MIG device: those of its GPU and its compute instance.
async fn capabilities(cluster: &TestCluster, node: &str, device: &str) -> Vec<u32> {
    let uuid = cluster.attribute(node, device, "uuid").await;
    let state = cluster.state(node).await;
    let boards = state["inventory"]["Found"]["gpus"].as_array().expect("the state tells the boards");
    let instances = boards.iter().filter_map(|board| board["mig"]["On"].as_array()).flatten();
    let own = instances.clone().find(|one| one["uuid"] == uuid.as_str()).expect("the board has the instance");
    let (gi, ci) = (&own["gpu_instance"], &own["compute_instance"]);
    let minors =
        fs::read_to_string(cluster.host(node, "/driver/proc/driver/nvidia-caps/mig-minors")).unwrap();
    let minor = |name: String| {
        let line = minors.lines().find_map(|line| line.strip_prefix(&name)?.strip_prefix(' '));
        line.and_then(|number| number.parse::<u32>().ok()).unwrap_or_else(|| panic!("no minor of {name}"))
    };
    vec![minor(format!("gpu7/gi{gi}/access")), minor(format!("gpu7/gi{gi}/ci{ci}/access"))]
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_container_that_does_not_ask_sees_no_gpu() {
    let cluster = TestCluster::of_env("a_container_that_does_not_ask_sees_no_gpu").await;
    cluster.create(claim("two", json!({"requests": [gpu("left"), gpu("right")]}))).await;
    let containers = json!([
        container("left", json!([{"name": "c", "request": "left"}])),
        container("right", json!([{"name": "c", "request": "right"}])),
        container("both", json!([{"name": "c"}])),
        container("none", json!([])),
    ]);
    cluster.create(pod("p", json!([{"name": "c", "resourceClaimName": "two"}]), containers)).await;
    cluster.wait_ready("p").await;
    let devices = cluster.devices_of("two").await;
    has_only(&cluster, "p", "left", &devices[0]);
    has_only(&cluster, "p", "right", &devices[1]);
    let mut minors: Vec<_> = devices.iter().map(|device| minor_of(device)).collect();
    minors.sort_unstable();
    assert_eq!(cluster.inside("p", "both").gpus, minors);
    let none = cluster.inside("p", "none");
    assert!(none.is_without_gpu(), "a container that references no claim finds {none:?}");
    cluster.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn several_gpus_and_alternatives() {
    let cluster = TestCluster::of_env("several_gpus_and_alternatives").await;
    let pair = json!({"name": "gpu", "exactly": {"deviceClassName": "gpu.nvidia.com", "count": 2}});
    cluster.create(claim("pair", json!({"requests": [pair]}))).await;
    let never =
        json!([{"cel": {"expression": "device.attributes['gpu.nvidia.com'].productName == 'none such'"}}]);
    let either = json!({"name": "gpu", "firstAvailable": [
        {"name": "best", "deviceClassName": "gpu.nvidia.com", "selectors": never},
        {"name": "any", "deviceClassName": "gpu.nvidia.com"}]});
    cluster.create(claim("either", json!({"requests": [either]}))).await;
    cluster.create(user_of("pair", "pair")).await;
    cluster.create(user_of("either", "either")).await;
    cluster.wait_ready("pair").await;
    let devices = cluster.devices_of("pair").await;
    let minors: BTreeSet<_> = devices.iter().map(|device| minor_of(device)).collect();
    let inside = cluster.inside("pair", "main");
    assert_eq!(inside.gpus.len(), 2, "count: 2 gives {inside:?}");
    assert_eq!(inside.gpus.into_iter().collect::<BTreeSet<_>>(), minors);
    cluster.wait_ready("either").await;
    has_only(&cluster, "either", "main", &cluster.devices_of("either").await[0]);
    cluster.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_manifest_from_before_dra_gets_its_gpu() {
    let cluster = TestCluster::of_env("a_manifest_from_before_dra_gets_its_gpu").await;
    if cluster.release().await < 36 {
        skipped("limits of nvidia.com/gpu become claims from Kubernetes 1.36 on");
        return;
    }
    let mut old = container("main", json!([]));
    old["resources"] = json!({"limits": {"nvidia.com/gpu": 1}});
    cluster.create(pod("old", json!([]), json!([old]))).await;
    cluster.wait_ready("old").await;
    let claims = cluster.api::<ResourceClaim>().list(&ListParams::default()).await.unwrap().items;
    assert_eq!(claims.len(), 1, "the scheduler makes one claim for it");
    has_only(&cluster, "old", "main", &devices_of(&claims[0])[0]);
    cluster.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_time_slice_is_set_while_the_claim_lives() {
    let cluster = TestCluster::of_env("a_time_slice_is_set_while_the_claim_lives").await;
    cluster.create(claim("sliced", time_slicing("Medium"))).await;
    cluster.create(user_of("sliced", "user")).await;
    let node = node_of(&cluster.wait_ready("user").await);
    let device = cluster.devices_of("sliced").await.remove(0);
    has_only(&cluster, "user", "main", &device);
    let board = minor_of(&device).to_string();
    assert_eq!(cluster.fake_state(&node, &board)["time_slice"], 2, "while the pod runs");
    cluster.delete("user").await;
    let back = || async { (cluster.fake_state(&node, &board)["time_slice"] == 0).then_some(()) };
    wait_until("the driver's own time slice to be back", SOON, back).await;
    cluster.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn an_administrator_looks_in_beside_a_user() {
    let labels = json!({"resource.kubernetes.io/admin-access": "true"});
    let cluster = TestCluster::with_labels("an_administrator_looks_in_beside_a_user", labels).await;
    let mut all = json!({"name": "all", "exactly": {
        "deviceClassName": "gpu.nvidia.com", "allocationMode": "All", "adminAccess": true}});
    let mut mine = gpu("gpu");
    if cluster.release().await >= 36 {
        // The scheduler (seen with 1.37.0) wants room for an administrator, too, where GPUs are shared: beside
        // one that is given whole there is none.
        mine = share("10Gi", 0);
        all["exactly"]["capacity"] = json!({"requests": {"memory": "1Mi"}});
    }
    cluster.create(claim("mine", json!({"requests": [mine]}))).await;
    cluster.create(on("node-a", user_of("mine", "user"))).await;
    let user = cluster.wait_ready("user").await;
    let mine = minor_of(&cluster.devices_of("mine").await[0]);
    cluster.create(claim("all", json!({"requests": [all]}))).await;
    cluster.create(on("node-a", user_of("all", "monitor"))).await;
    cluster.wait_ready("monitor").await;
    assert_eq!(
        cluster.inside("monitor", "main").gpus,
        (0..7).collect::<Vec<_>>(),
        "every whole GPU of the node"
    );
    assert_eq!(cluster.inside("user", "main").gpus, [mine]);
    cluster.delete("monitor").await;
    // The monitor's release took nothing from the user.
    assert_eq!(container_run(&cluster.wait_ready("user").await), container_run(&user));
    assert_eq!(cluster.inside("user", "main").gpus, [mine]);
    assert_eq!(claims_on(&cluster, "node-a").await, ["mine"]);
    cluster.end().await;
}

/// The claims in the ledger, once the monitor's is gone from it.
async fn claims_on(cluster: &TestCluster, node: &str) -> Vec<String> {
    let settled = || async {
        let state: Value = cluster.state(node).await;
        let claims =
            state["claims"].as_array()?.iter().filter_map(|one| one["name"].as_str().map(str::to_owned));
        let claims: Vec<_> = claims.collect();
        (claims.len() <= 1).then_some(claims)
    };
    wait_until("the monitor's claim to be released", Duration::from_secs(10), settled).await
}
