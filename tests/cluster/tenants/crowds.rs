//! Claims and pods that are dear together: they wait, and nobody else does.

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::Api;
use kube::api::PostParams;
use serde_json::{Value, json};

use super::selectors::{CLASS, all_answer, holder, small_shares_are_placed, wait_told};
use super::tenant;
use crate::manifests::{as_nobody, claim, container, parameters, pod};
use crate::rig::wait_until;
use crate::test_cluster::{PATIENCE, TestCluster, from};

/// For all requests.
fn config() -> Value {
    let mut config = parameters("tranche.dev/v1alpha1", "GpuShare", json!({"memory": "1Mi"}));
    config[0].as_object_mut().expect("it is an entry").remove("requests");
    config
}

/// With 100 such claims a round took longer than victims waited, and began anew under the next leader.
#[tokio::test]
#[ignore = "needs a rig"]
async fn pods_that_name_many_claims_with_many_requests_stop_nobody() {
    let cluster = TestCluster::of_env("pods_that_name_many_claims_with_many_requests_stop_nobody").await;
    let quiet = format!("{}-quiet", cluster.namespace);
    cluster.rig.kubectl(&["create", "namespace", &quiet]);
    cluster.rig.on_end(&["kubectl", "delete", "namespace", &quiet, "--ignore-not-found", "--timeout=90s"]);
    let leader = wait_until("a controller to lead", PATIENCE, || holder(&cluster)).await;
    let before = wait_until("all controllers to answer", PATIENCE, || all_answer(&cluster)).await;
    let attacker = tenant(&cluster).await;
    let claims: Api<ResourceClaim> = Api::namespaced(attacker.clone(), &cluster.namespace);
    let alternatives: Vec<Value> =
        (0..8).map(|nth| json!({"name": format!("s{nth}"), "deviceClassName": CLASS})).collect();
    let either = ["a", "b"].map(|name| json!({"name": name, "firstAvailable": alternatives}));
    let plain: Vec<Value> = (0..32)
        .map(|nth| json!({"name": format!("r{nth}"), "exactly": {"deviceClassName": CLASS}}))
        .collect();
    let mut names = Vec::new();
    for nth in 0..=100 {
        let requests = if nth == 0 { json!(either) } else { json!(plain) };
        let name = format!("c{nth}");
        let object = claim(&name, json!({"requests": requests, "config": config()}));
        claims.create(&PostParams::default(), &from(object)).await.expect("the claim is admitted");
        names.push(name);
    }
    let pods: Api<Pod> = Api::namespaced(attacker.clone(), &cluster.namespace);
    for nth in 0..11 {
        let named = names.iter().map(|name| json!({"name": name, "resourceClaimName": name}));
        let object = as_nobody(pod(
            &format!("p{nth}"),
            named.collect(),
            json!([container("main", json!([{"name": "c0"}]))]),
        ));
        pods.create(&PostParams::default(), &from(object)).await.expect("the pod is admitted");
    }
    wait_told(&cluster, "p0", "have 3202 requests together; a pod is placed with at most 256").await;
    small_shares_are_placed(&cluster, &quiet, 3).await;
    let after = wait_until("all controllers to answer", PATIENCE, || all_answer(&cluster)).await;
    assert_eq!(after, before, "nobody was restarted");
    assert_eq!(holder(&cluster).await.as_ref(), Some(&leader), "the lease was never lost");
    cluster.rig.kubectl(&["-n", &quiet, "delete", "pods,resourceclaims", "--all", "--timeout=170s"]);
    cluster.end().await;
}
