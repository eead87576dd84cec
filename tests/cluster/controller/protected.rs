//! Claims of the controller's class are protected from the beginning where the API server does it (since-1.36): the
//! controller has one write to do, and what is never placed can be deleted all the same.

use k8s_openapi::api::admissionregistration::v1::MutatingAdmissionPolicy;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::Api;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams};
use serde_json::{Value, json};

use super::books::Writes;
use super::{CLASS, create_waiting, share, wait_placed};
use crate::test_cluster::{TestCluster, PATIENCE};
use crate::manifests::{as_nobody, by_template, claim, gpu, template, user_of};
use crate::rig::wait_until;

pub const FINALIZER: &str = "resource.kubernetes.io/delete-protection";

/// Whether this API server can do it; then the policy is there.
pub async fn is_known(bed: &TestCluster) -> bool {
    let policies = Api::<MutatingAdmissionPolicy>::all(bed.client.clone());
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
async fn at_first(bed: &TestCluster, mut object: Value, finalizers: Value) -> Vec<String> {
    object["metadata"]["finalizers"] = finalizers;
    let name = object["metadata"]["name"].as_str().expect("a name").to_owned();
    bed.create(object).await;
    let stored = bed.api::<ResourceClaim>().get(&name).await.expect("the claim is there");
    stored.metadata.finalizers.unwrap_or_default()
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn claims_for_shares_are_protected_from_the_beginning_and_no_others() {
    let test = "claims_for_shares_are_protected_from_the_beginning_and_no_others";
    let bed = super::bed(test).await;
    if !is_known(&bed).await {
        return bed.end().await;
    }
    let little = share(json!({"memory": "1Gi"}));
    let mut chosen = little.clone();
    let options = json!([{"name": "a", "deviceClassName": CLASS}, {"name": "b", "deviceClassName": CLASS}]);
    chosen["requests"] = json!([{"name": "gpu", "firstAvailable": options}]);
    for (name, devices) in [("plain", &little), ("chosen", &chosen)] {
        assert_eq!(at_first(&bed, claim(name, devices.clone()), Value::Null).await, [FINALIZER], "{name}");
    }
    let others = json!(["example.com/theirs"]);
    let stored = at_first(&bed, claim("theirs", little.clone()), others).await;
    assert_eq!(stored, ["example.com/theirs", FINALIZER]);
    let stored = at_first(&bed, claim("twice", little.clone()), json!([FINALIZER])).await;
    assert_eq!(stored, [FINALIZER]);
    let whole = json!({"requests": [gpu("gpu")]});
    assert!(at_first(&bed, claim("whole", whole), Value::Null).await.is_empty());
    // Nobody ever used them: the controller-manager lets them go.
    let free = Patch::Merge(json!({"metadata": {"finalizers": [FINALIZER]}}));
    let claims = bed.api::<ResourceClaim>();
    claims.patch("theirs", &PatchParams::default(), &free).await.expect("its owner takes theirs away");
    for name in ["plain", "chosen", "theirs", "twice", "whole"] {
        claims.delete(name, &DeleteParams::default()).await.expect("it can be deleted");
    }
    let gone = || async { claims.list(&ListParams::default()).await.ok()?.items.is_empty().then_some(()) };
    wait_until("claims that nobody used to be gone", PATIENCE, gone).await;
    bed.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn the_controller_writes_only_the_status_of_a_protected_claim() {
    let bed = super::bed("the_controller_writes_only_the_status_of_a_protected_claim").await;
    if !is_known(&bed).await {
        return bed.end().await;
    }
    bed.create(claim("own", share(json!({"memory": "1Gi"})))).await;
    bed.create(as_nobody(user_of("own", "own"))).await;
    bed.create(template("part", share(json!({"fraction": "0.1"})))).await;
    bed.create(as_nobody(by_template("part", "made"))).await;
    for pod in ["own", "made"] {
        bed.wait_ready(pod).await;
    }
    wait_placed(&bed, "own").await;
    for stored in bed.api::<ResourceClaim>().list(&ListParams::default()).await.expect("claims").items {
        let writes = stored.metadata.managed_fields.unwrap_or_default();
        let whose =
            writes.iter().map(|one| (one.manager.as_deref().unwrap_or(""), one.subresource.as_deref()));
        let ours = whose.filter(|(manager, _)| *manager == "tranche").map(|(_, subresource)| subresource);
        assert_eq!(ours.collect::<Vec<_>>(), [Some("status")], "{writes:?}");
    }
    // One write for one claim: nobody else writes to one whose pod no scheduler looks at.
    let writes = Writes::begin(&bed.client, &bed.namespace, "counted").await;
    create_waiting(&bed, "counted", json!({"memory": "1Gi"})).await;
    let seen = || async { (writes.allocations() == 1).then_some(()) };
    wait_until("the allocation to be seen", PATIENCE, seen).await;
    assert_eq!(writes.all(), 2, "its creation and its allocation");
    bed.end().await;
}
