//! What cannot be prepared is refused in words that a pod's author reads, and harms nobody else.

use std::fs;
use std::path::Path;

use k8s_openapi::api::core::v1::Pod;
use kube::api::DeleteParams;
use serde_json::{Value, json};

use crate::manifests::{claim, container, gpu, pod, user_of};
use crate::rig::{root, wait_until};
use crate::test_cluster::{PATIENCE, TestCluster, container_run, minor_of, node_of};

/// An object of the cluster, to be created again as it is.
fn stored(cluster: &TestCluster, [kind, name]: [&str; 2]) -> Value {
    let text = cluster.rig.kubectl(&["get", kind, name, "-o", "json"]);
    let mut object: Value = serde_json::from_str(&text).expect("kubectl writes JSON");
    let meta = object["metadata"].as_object_mut().expect("objects have metadata");
    meta.retain(|field, _| ["name", "labels", "annotations"].contains(&field.as_str()));
    object
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn an_unknown_field_is_named_with_its_path() {
    // Outlives the test cluster, whose end reads it.
    let files = tempfile::tempdir().expect("a folder can be made");
    let cluster = TestCluster::of_env("an_unknown_field_is_named_with_its_path").await;
    let parameters = json!({"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig",
        "sharing": {"strategy": "TimeSlicing", "timeSlicingConfig": {"intervall": "Medium"}}});
    let config = json!([{"opaque": {"driver": "gpu.nvidia.com", "parameters": parameters}}]);
    let typo = claim("typo", json!({"requests": [gpu("gpu")], "config": config}));
    let path = "spec.devices.config[0].opaque.parameters.sharing.timeSlicingConfig.intervall: unknown field";
    let refused =
        || async { cluster.try_create(typo.clone(), true).await.err().filter(|said| said.contains(path)) };
    wait_until("the webhook to refuse the claim", PATIENCE, refused).await;
    // While the webhook is away such a claim comes through, and the node says the same.
    let webhook = ["validatingwebhookconfiguration", "tranche"];
    let file = files.path().join("webhook.json");
    fs::write(&file, stored(&cluster, webhook).to_string()).expect("it can be kept");
    cluster.rig.on_end(&["kubectl", "create", "-f", file.to_str().expect("its name is text")]);
    cluster.rig.kubectl(&["delete", webhook[0], webhook[1]]);
    let through = || async { cluster.try_create(typo.clone(), false).await.ok() };
    wait_until("the claim to come through", PATIENCE, through).await;
    cluster.create(user_of("typo", "p")).await;
    cluster.wait_refused("p", &["sharing.timeSlicingConfig.intervall", "unknown field"]).await;
    // Nothing was begun, though the pod still waits.
    cluster.wait_clean().await;
    cluster.delete("p").await;
    cluster.end().await;
}

/// What whoever applies the object is told: kubectl prints the warnings of the API server.
fn warned(cluster: &TestCluster, folder: &Path, object: &Value) -> String {
    let file = folder.join("object.json");
    fs::write(&file, object.to_string()).expect("it can be kept");
    let file = file.to_str().expect("its name is text");
    cluster.rig.warnings(&["-n", &cluster.namespace, "create", "--dry-run=server", "-f", file])
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn whoever_applies_a_pod_that_would_get_no_gpu_is_told() {
    let files = tempfile::tempdir().expect("a folder can be made");
    let cluster = TestCluster::of_env("whoever_applies_a_pod_that_would_get_no_gpu_is_told").await;
    let annotated = |annotations: Value| {
        let mut pod = pod("p", json!([]), json!([container("main", json!([]))]));
        pod["metadata"]["annotations"] = annotations;
        pod
    };
    let limited = |limits: Value| {
        let mut pod = annotated(json!({}));
        pod["spec"]["containers"][0]["resources"] = json!({"limits": limits});
        pod
    };
    let mut unused = user_of("c", "p");
    unused["spec"]["containers"][0]["resources"] = json!({});
    let label = "tranche.dev/kai-annotations=enabled";
    for (object, words) in [
        (annotated(json!({"gpu-memory": "2000"})), label),
        (annotated(json!({"gpu-fraction": "0.5"})), label),
        (annotated(json!({"gpu-fracton": "0.5"})), "the annotation gpu-fracton means nothing"),
        (annotated(json!({"nvidia.com/gpu.memory": "8000Mi"})), "nvidia.com/gpu.memory means nothing"),
        (limited(json!({"nvidia.com/gpu.memory": "8000"})), "does not serve the limit nvidia.com/gpu.memory"),
        (unused, "no container names spec.resourceClaims 'c'"),
    ] {
        let pod = object.clone();
        let told = || {
            let said = warned(&cluster, files.path(), &pod);
            async move { said.contains(words).then_some(()) }
        };
        wait_until(&format!("the warning {words:?}"), PATIENCE, told).await;
        // What makes such pods is told, too.
        let template = json!({"metadata": {"labels": {"app": "p"}, "annotations": object["metadata"]["annotations"]},
            "spec": object["spec"]});
        let mut job = template.clone();
        job["spec"]["restartPolicy"] = json!("Never");
        let selector = json!({"matchLabels": {"app": "p"}});
        let mut running = template.clone();
        running["spec"]["restartPolicy"] = json!("Always");
        for owner in [
            json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "p"},
                "spec": {"selector": selector, "template": running}}),
            json!({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "p"}, "spec": {"template": job}}),
            json!({"apiVersion": "batch/v1", "kind": "CronJob", "metadata": {"name": "p"},
                "spec": {"schedule": "0 0 * * *", "jobTemplate": {"spec": {"template": job}}}}),
        ] {
            let said = warned(&cluster, files.path(), &owner);
            assert!(said.contains(words), "{}: {said}", owner["kind"]);
        }
    }
    // Nothing is said where all is well, or where another scheduler reads the annotation.
    let mut of_kai = annotated(json!({"gpu-fraction": "0.5"}));
    of_kai["spec"]["schedulerName"] = json!("kai-scheduler");
    for object in [annotated(json!({"team": "a"})), limited(json!({"cpu": "1"})), of_kai, user_of("c", "p")] {
        let said = warned(&cluster, files.path(), &object);
        assert!(!said.contains("tranche-hints"), "{said}");
    }
    cluster.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn examples_are_admitted_where_pod_security_is_restricted_without_a_warning() {
    let labels =
        json!({"pod-security.kubernetes.io/enforce": "restricted", "tranche.dev/kai-annotations": "enabled"});
    let test = "examples_are_admitted_where_pod_security_is_restricted_without_a_warning";
    let cluster = TestCluster::with_labels(test, labels).await;
    let folder = root().join("deploy/examples");
    let mut files: Vec<_> = fs::read_dir(folder)
        .expect("there are examples")
        .map(|entry| entry.expect("they can be listed").path())
        .collect();
    files.sort();
    assert!(files.len() >= 10, "{files:?}");
    for file in files {
        let file = file.to_str().expect("its name is text");
        let applied = ["-n", &cluster.namespace, "create", "--dry-run=server", "-f", file];
        let admitted = || {
            let said = cluster.rig.attempt_beside(&[&["kubectl"], &applied[..]].concat());
            async move { said.ok() }
        };
        // The webhook may still be starting.
        let said = wait_until(&format!("{file} to be admitted"), PATIENCE, admitted).await;
        assert_eq!(said, "", "{file}");
    }
    cluster.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_gpu_that_was_allocated_twice_stays_with_its_holder() {
    let cluster = TestCluster::of_env("a_gpu_that_was_allocated_twice_stays_with_its_holder").await;
    cluster.create(claim("holder", json!({"requests": [gpu("gpu")]}))).await;
    cluster.create(user_of("holder", "first")).await;
    let first = cluster.wait_ready("first").await;
    let (node, device) = (node_of(&first), cluster.devices_of("holder").await.remove(0));
    cluster.create_allocated("intruder", &node, &device).await;
    cluster.create(user_of("intruder", "second")).await;
    let holder = format!("{}/holder", cluster.namespace);
    cluster.wait_refused("second", &[&device, "in use by claim", &holder]).await;
    assert_eq!(
        container_run(&cluster.wait_ready("first").await),
        container_run(&first),
        "the holder was disturbed"
    );
    assert_eq!(cluster.inside("first", "main").gpus, [minor_of(&device)]);
    // Kubelet asks again and again: once the holder is gone, the other claim has its turn.
    cluster.delete("first").await;
    cluster.wait_ready("second").await;
    assert_eq!(cluster.inside("second", "main").gpus, [minor_of(&device)]);
    cluster.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_device_that_is_not_there_is_told_with_those_that_are() {
    let cluster = TestCluster::of_env("a_device_that_is_not_there_is_told_with_those_that_are").await;
    cluster.create_allocated("ghost", "node-a", "gpu-99").await;
    cluster.create(user_of("ghost", "p")).await;
    cluster.wait_refused("p", &["gpu-99", "does not have", "gpu-0, gpu-1"]).await;
    cluster.wait_clean().await;
    cluster.api::<Pod>().delete("p", &DeleteParams::default()).await.unwrap();
    cluster.gone("p").await;
    cluster.end().await;
}
