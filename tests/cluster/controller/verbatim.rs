//! Claims whose parameters stand in the API with white space, as Python's clients write them: no JSON client can
//! change their metadata.

use http::{Request, header};
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceClaimTemplate};
use kube::api::{Patch, PatchParams};
use kube::{Error, Resource};
use serde_json::{Value, json};

use super::protected::{FINALIZER, is_known};
use super::{share, wait_placed};
use crate::manifests::{as_nobody, by_template, claim, template, user_of};
use crate::rig::wait_until;
use crate::test_cluster::{PATIENCE, TestCluster};

/// Creates an object with white space between its tokens.
async fn create_spaced<K: Resource<DynamicType = ()>>(cluster: &TestCluster, object: Value) {
    let body = serde_json::to_vec_pretty(&object).expect("it is JSON");
    let post = Request::post(K::url_path(&(), Some(&cluster.namespace)));
    let post = post.header(header::CONTENT_TYPE, "application/json").body(body).expect("a request");
    cluster.client.request::<Value>(post).await.expect("it can be created");
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn claims_written_with_white_space_are_placed_and_protected_like_others() {
    let test = "claims_written_with_white_space_are_placed_and_protected_like_others";
    let cluster = super::cluster(test).await;
    let claims = cluster.api::<ResourceClaim>();
    let patch = Patch::Merge(json!({"metadata": {"labels": {"a": "b"}}}));
    let mut finalizers = Value::Null;
    if is_known(&cluster).await {
        // What the policy has changed is stored without white space. What needs no change it leaves alone.
        create_spaced::<ResourceClaim>(&cluster, claim("neat", share(json!({"memory": "2000Mi"})))).await;
        claims.patch("neat", &PatchParams::default(), &patch).await.expect("it can be changed");
        finalizers = json!([FINALIZER]);
    }
    let spaced = |name: &str, amount: Value| {
        let mut spaced = claim(name, share(amount));
        spaced["metadata"]["finalizers"] = finalizers.clone();
        spaced
    };
    create_spaced::<ResourceClaim>(&cluster, spaced("spaced", json!({"memory": "2000Mi"}))).await;
    let refused = claims.patch("spaced", &PatchParams::default(), &patch).await;
    assert!(
        matches!(&refused, Err(Error::Api(status)) if status.code == 422),
        "not what is tried here: {refused:?}"
    );

    cluster.create(as_nobody(user_of("spaced", "spaced"))).await;
    cluster.wait_ready("spaced").await;
    wait_placed(&cluster, "spaced").await;
    let env = cluster.exec("spaced", "main", "env | grep ^CUDA_MPS_PINNED || true");
    assert_eq!(env.trim(), "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=2000M");
    // It outlives its deletion while the pod runs.
    let stored = claims.get("spaced").await.expect("it is there");
    assert_eq!(stored.metadata.finalizers, Some(vec![FINALIZER.to_owned()]));

    create_spaced::<ResourceClaim>(&cluster, spaced("big", json!({"memory": "4000Gi"}))).await;
    cluster.create(as_nobody(user_of("big", "big"))).await;
    let noted =
        || async { claims.get("big").await.ok()?.metadata.annotations?.remove("tranche.dev/waiting") };
    println!("told: {}", wait_until("the claim to say why it waits", PATIENCE, noted).await);

    create_spaced::<ResourceClaimTemplate>(&cluster, template("part", share(json!({"fraction": "0.1"}))))
        .await;
    cluster.create(as_nobody(by_template("part", "templated"))).await;
    cluster.wait_ready("templated").await;
    cluster.end().await;
}
