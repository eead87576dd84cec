//! The controller is taken off the cluster: what it held is free, what runs goes on.

use std::fs;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::Api;
use kube::api::ListParams;
use serde_json::{Value, json};

use super::{create, holds, wait_placed};
use crate::manifests::{as_nobody, claim, gpu, of_gpu, user_of};
use crate::rig::wait_until;
use crate::test_cluster::{PATIENCE, SYSTEM, TestCluster, container_run};

const DEPLOYMENT: &str = "deployment/tranche-controller";

/// The Deployment as it was applied, without what the API server has added.
fn as_applied(cluster: &TestCluster) -> Value {
    let stored = cluster.rig.kubectl(&["-n", SYSTEM, "get", DEPLOYMENT, "-o", "json"]);
    let mut stored: Value = serde_json::from_str(&stored).expect("kubectl prints JSON");
    stored.as_object_mut().expect("an object").remove("status");
    let meta = stored["metadata"].as_object_mut().expect("an object has metadata");
    for field in ["resourceVersion", "uid", "generation", "creationTimestamp", "managedFields"] {
        meta.remove(field);
    }
    stored
}

async fn wait_none(cluster: &TestCluster, what: &str, labels: &str) {
    let list = ListParams::default().labels(labels);
    let (pods, claims) = (
        Api::<Pod>::namespaced(cluster.client.clone(), SYSTEM),
        Api::<ResourceClaim>::namespaced(cluster.client.clone(), SYSTEM),
    );
    let none = || async {
        let left = pods.list(&list).await.ok()?.items.len() + claims.list(&list).await.ok()?.items.len();
        (left == 0).then_some(())
    };
    wait_until(what, PATIENCE, none).await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn deleting_the_controller_frees_what_it_holds_and_what_runs_goes_on() {
    // Outlives the test cluster, whose end reads it.
    let files = tempfile::tempdir().expect("a folder can be made");
    let test = "deleting_the_controller_frees_what_it_holds_and_what_runs_goes_on";
    let cluster = super::cluster(test).await;
    create(&cluster, "runs", json!({"memory": "2000Mi"})).await;
    let before = container_run(&cluster.wait_ready("runs").await);
    let device = wait_placed(&cluster, "runs").await;
    let inside = cluster.inside("runs", "main");
    // One more GPU is held, and nobody has a share of it.
    create(&cluster, "ended", json!({"fraction": "0.99"})).await;
    cluster.wait_ready("ended").await;
    let idle = wait_placed(&cluster, "ended").await;
    cluster.delete("ended").await;
    cluster.rig.kubectl(&["-n", &cluster.namespace, "delete", "resourceclaim", "ended"]);
    let held = holds(&cluster).await;
    assert!(device != idle && held.contains(&device) && held.contains(&idle), "{held:?}");

    let file = files.path().join("deployment.json");
    fs::write(&file, as_applied(&cluster).to_string()).expect("it can be kept");
    let apply = ["kubectl", "apply", "-f", file.to_str().expect("its name is text")];
    let rollout = ["kubectl", "-n", SYSTEM, "rollout", "status", DEPLOYMENT, "--timeout=170s"];
    cluster.rig.on_end(&rollout);
    cluster.rig.on_end(&apply);
    cluster.rig.kubectl(&["-n", SYSTEM, "delete", DEPLOYMENT]);
    wait_none(&cluster, "the controllers to be gone", "app.kubernetes.io/component=controller").await;
    wait_none(&cluster, "the holds to be gone", "tranche.dev/hold").await;

    let gpus = cluster.shareable(super::NODE).await;
    let mut others = gpu("gpu");
    if cluster.release().await >= 36 {
        // All but that of the share, so that the one that was held is needed.
        others["exactly"]["count"] = json!(gpus.len() - 1);
    } else {
        // Older schedulers count a device once: with the hold they forget the share, and give its GPU away, too.
        println!(
            "not tried here: whole GPUs beside the share's on Kubernetes before 1.36; only the idle one is asked for"
        );
        let held = gpus.iter().find(|one| one.name == idle).expect("it is published");
        let uuid =
            held.attributes.as_ref().and_then(|all| all["uuid"].string.clone()).expect("it has a UUID");
        others = of_gpu(&uuid, others);
    }
    cluster.create(claim("others", json!({"requests": [others]}))).await;
    cluster.create(as_nobody(user_of("others", "others"))).await;
    cluster.wait_ready("others").await;
    let given = cluster.devices_of("others").await;
    assert!(given.contains(&idle) && !given.contains(&device), "{given:?}");
    assert_eq!(cluster.inside("runs", "main"), inside);
    assert_eq!(container_run(&cluster.wait_ready("runs").await), before);

    cluster.rig.run(&apply);
    cluster.rig.run(&rollout);
    create(&cluster, "after", json!({"memory": "2000Mi"})).await;
    cluster.wait_ready("after").await;
    assert_eq!(wait_placed(&cluster, "after").await, device, "packed beside it");
    assert_eq!(container_run(&cluster.wait_ready("runs").await), before);
    cluster.end().await;
}
