//! Claims of the controller's class are protected from the beginning where the API server does it (since-1.36): the
//! controller has one write to do, and what is never placed can be deleted all the same.

use k8s_openapi::api::admissionregistration::v1::MutatingAdmissionPolicy;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::Api;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams};
use serde_json::{Value, json};

use super::books::Writes;
use super::{CLASS, create_waiting, share, wait_placed};
use crate::manifests::{as_nobody, by_template, claim, gpu, template, user_of};
use crate::rig::wait_until;
use crate::test_cluster::{PATIENCE, TestCluster};

pub const FINALIZER: &str = "resource.kubernetes.io/delete-protection";

/// Whether this API server can do it; then the policy is there.
pub async fn is_known(cluster: &TestCluster) -> bool {
    let policies = Api::<MutatingAdmissionPolicy>::all(cluster.client.clone());
    match policies.list(&ListParams::default()).await {
        Ok(there) => {
            let names = there.items.iter().filter_map(|policy| policy.metadata.name.as_deref());
            assert_eq!(names.collect::<Vec<_>>(), ["tranche-claims"]);
            true
        }
        Err(kube::Error::Api(status)) if status.code == 404 => {
            println!(
                "not tried here: this API server has no MutatingAdmissionPolicy v1; the controller protects claims"
            );
            false
        }
        Err(other) => panic!("policies cannot be listed: {other}"),
    }
}

/// Finalizers of a claim as it was stored at first.
async fn at_first(cluster: &TestCluster, mut object: Value, finalizers: Value) -> Vec<String> {
    object["metadata"]["finalizers"] = finalizers;
    let name = object["metadata"]["name"].as_str().expect("a name").to_owned();
    cluster.create(object).await;
    let stored = cluster.api::<ResourceClaim>().get(&name).await.expect("the claim is there");
    stored.metadata.finalizers.unwrap_or_default()
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn claims_for_shares_are_protected_from_the_beginning_and_no_others() {
    let test = "claims_for_shares_are_protected_from_the_beginning_and_no_others";
    let cluster = super::cluster(test).await;
    if !is_known(&cluster).await {
        return cluster.end().await;
    }
    let little = share(json!({"memory": "1Gi"}));
    let mut chosen = little.clone();
    let options = json!([{"name": "a", "deviceClassName": CLASS}, {"name": "b", "deviceClassName": CLASS}]);
    chosen["requests"] = json!([{"name": "gpu", "firstAvailable": options}]);
    for (name, devices) in [("plain", &little), ("chosen", &chosen)] {
        assert_eq!(
            at_first(&cluster, claim(name, devices.clone()), Value::Null).await,
            [FINALIZER],
            "{name}"
        );
    }
    let others = json!(["example.com/theirs"]);
    let stored = at_first(&cluster, claim("theirs", little.clone()), others).await;
    assert_eq!(stored, ["example.com/theirs", FINALIZER]);
    let stored = at_first(&cluster, claim("twice", little.clone()), json!([FINALIZER])).await;
    assert_eq!(stored, [FINALIZER]);
    let whole = json!({"requests": [gpu("gpu")]});
    assert!(at_first(&cluster, claim("whole", whole), Value::Null).await.is_empty());
    // Nobody ever used them: the controller-manager lets them go.
    let free = Patch::Merge(json!({"metadata": {"finalizers": [FINALIZER]}}));
    let claims = cluster.api::<ResourceClaim>();
    claims.patch("theirs", &PatchParams::default(), &free).await.expect("its owner takes theirs away");
    for name in ["plain", "chosen", "theirs", "twice", "whole"] {
        claims.delete(name, &DeleteParams::default()).await.expect("it can be deleted");
    }
    let gone = || async { claims.list(&ListParams::default()).await.ok()?.items.is_empty().then_some(()) };
    wait_until("claims that nobody used to be gone", PATIENCE, gone).await;
    cluster.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn the_controller_writes_only_the_status_of_a_protected_claim() {
    let cluster = super::cluster("the_controller_writes_only_the_status_of_a_protected_claim").await;
    if !is_known(&cluster).await {
        return cluster.end().await;
    }
    cluster.create(claim("own", share(json!({"memory": "1Gi"})))).await;
    cluster.create(as_nobody(user_of("own", "own"))).await;
    cluster.create(template("part", share(json!({"fraction": "0.1"})))).await;
    cluster.create(as_nobody(by_template("part", "made"))).await;
    for pod in ["own", "made"] {
        cluster.wait_ready(pod).await;
    }
    wait_placed(&cluster, "own").await;
    for stored in cluster.api::<ResourceClaim>().list(&ListParams::default()).await.expect("claims").items {
        let writes = stored.metadata.managed_fields.unwrap_or_default();
        let whose =
            writes.iter().map(|one| (one.manager.as_deref().unwrap_or(""), one.subresource.as_deref()));
        let ours = whose.filter(|(manager, _)| *manager == "tranche").map(|(_, subresource)| subresource);
        assert_eq!(ours.collect::<Vec<_>>(), [Some("status")], "{writes:?}");
    }
    // One write for one claim: nobody else writes to one whose pod no scheduler looks at.
    let writes = Writes::begin(&cluster.client, &cluster.namespace, "counted").await;
    create_waiting(&cluster, "counted", json!({"memory": "1Gi"})).await;
    let seen = || async { (writes.allocations() == 1).then_some(()) };
    wait_until("the allocation to be seen", PATIENCE, seen).await;
    assert_eq!(writes.all(), 2, "its creation and its allocation");
    cluster.end().await;
}
