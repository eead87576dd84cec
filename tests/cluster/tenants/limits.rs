//! What a pod gets that asks by its containers' limits alone: the rules for pods take it for one without a share.

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim};
use kube::Api;
use kube::api::{ListParams, PostParams};
use serde_json::json;

use crate::manifests::{as_nobody, container, parameters, pod};
use crate::rig::wait_until;
use crate::test_cluster::{PATIENCE, TestCluster, from, node_of};

const OWN: &str = "limits.example.com";

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_limit_gets_a_whole_gpu_and_never_a_share() {
    let cluster = TestCluster::of_env("a_limit_gets_a_whole_gpu_and_never_a_share").await;
    let pods: Api<Pod> = Api::namespaced(super::tenant(&cluster).await, &cluster.namespace);
    let create = async |name: &str, limit: &str| {
        let mut main = container("main", json!([]));
        main["resources"] = json!({"limits": {limit: "1"}});
        let pod = as_nobody(pod(name, json!([]), json!([main])));
        pods.create(&PostParams::default(), &from(pod)).await.expect("it keeps every rule");
    };
    for (name, limit) in
        [("old", "nvidia.com/gpu"), ("class", "deviceclass.resource.kubernetes.io/gpu.nvidia.com")]
    {
        create(name, limit).await;
        let node = node_of(&cluster.wait_ready(name).await);
        let gpus = cluster.inside(name, "main").gpus;
        assert_eq!(gpus.len(), 1, "{limit} is one GPU");
        let told = cluster.exec(name, "main", "env");
        assert!(!told.contains("CUDA_MPS_"), "{limit}: {told}");
        let board = cluster.fake_state(&node, &gpus[0].to_string());
        assert_ne!(board["compute_mode"]["value"], 3, "{limit}: no MPS daemon has the GPU: {board}");
    }

    // An administrator's class that says how much: nothing limits a device that is given whole.
    let classes = Api::<DeviceClass>::all(cluster.client.clone());
    let text = "device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == 'gpu'";
    let mut config = parameters("tranche.dev/v1alpha1", "GpuShare", json!({"memory": "2000Mi"}));
    config[0].as_object_mut().expect("an object").remove("requests");
    let class = json!({"metadata": {"name": OWN}, "spec": {"extendedResourceName": "example.com/part",
        "selectors": [{"cel": {"expression": text}}], "config": config}});
    cluster.rig.on_end(&["kubectl", "delete", "deviceclass", OWN]);
    classes.create(&PostParams::default(), &from(class)).await.expect("a class can be made");
    create("part", "example.com/part").await;
    cluster.wait_refused("part", &["GpuShare.memory limits a share", "is given whole"]).await;

    // The class of shares: kube-scheduler finds no device of it, and makes no claim that the controller could place.
    create("shared", "deviceclass.resource.kubernetes.io/shared.gpu.nvidia.com").await;
    let told = || async {
        cluster.events("shared").await.into_iter().find(|event| event.starts_with("FailedScheduling"))
    };
    wait_until("kube-scheduler to say that it finds none", PATIENCE, told).await;
    let claims = cluster.api::<ResourceClaim>().list(&ListParams::default()).await.expect("claims").items;
    let of_shared = claims
        .iter()
        .filter(|claim| claim.metadata.owner_references.iter().flatten().any(|owner| owner.name == "shared"));
    assert_eq!(of_shared.count(), 0);
    cluster.end().await;
}
