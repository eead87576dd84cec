//! Claims whose parameters stand in the API with white space, as Python's clients write them: no JSON client can
//! change their metadata.

use http::{Request, header};
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceClaimTemplate};
use kube::api::{Patch, PatchParams};
use kube::{Error, Resource};
use serde_json::{Value, json};

use super::{share, wait_placed};
use crate::bed::{Bed, PATIENCE};
use crate::manifests::{as_nobody, by_template, claim, template, user_of};
use crate::rig::wait_until;

/// Creates an object with white space between its tokens.
async fn create_spaced<K: Resource<DynamicType = ()>>(bed: &Bed, object: Value) {
    let body = serde_json::to_vec_pretty(&object).expect("it is JSON");
    let post = Request::post(K::url_path(&(), Some(&bed.namespace)));
    let post = post.header(header::CONTENT_TYPE, "application/json").body(body).expect("a request");
    bed.client.request::<Value>(post).await.expect("it can be created");
}

#[tokio::test]
async fn claims_written_with_white_space_are_placed_and_protected_like_others() {
    let test = "claims_written_with_white_space_are_placed_and_protected_like_others";
    let Some(bed) = super::bed(test).await else { return };
    create_spaced::<ResourceClaim>(&bed, claim("spaced", share(json!({"memory": "2000Mi"})))).await;
    let claims = bed.api::<ResourceClaim>();
    let patch = Patch::Merge(json!({"metadata": {"labels": {"a": "b"}}}));
    let refused = claims.patch("spaced", &PatchParams::default(), &patch).await;
    assert!(
        matches!(&refused, Err(Error::Api(status)) if status.code == 422),
        "not what is tried here: {refused:?}"
    );

    bed.create(as_nobody(user_of("spaced", "spaced"))).await;
    bed.wait_ready("spaced").await;
    wait_placed(&bed, "spaced").await;
    let env = bed.exec("spaced", "main", "env | grep ^CUDA_MPS_PINNED || true");
    assert_eq!(env.trim(), "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=2000M");
    // It outlives its deletion while the pod runs.
    let stored = claims.get("spaced").await.expect("it is there");
    assert_eq!(stored.metadata.finalizers, Some(vec!["resource.kubernetes.io/delete-protection".to_owned()]));

    create_spaced::<ResourceClaim>(&bed, claim("big", share(json!({"memory": "4000Gi"})))).await;
    bed.create(as_nobody(user_of("big", "big"))).await;
    let noted =
        || async { claims.get("big").await.ok()?.metadata.annotations?.remove("tranche.dev/waiting") };
    println!("told: {}", wait_until("the claim to say why it waits", PATIENCE, noted).await);

    create_spaced::<ResourceClaimTemplate>(&bed, template("part", share(json!({"fraction": "0.1"})))).await;
    bed.create(as_nobody(by_template("part", "templated"))).await;
    bed.wait_ready("templated").await;
    bed.end().await;
}
