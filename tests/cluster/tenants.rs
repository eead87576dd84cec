//! What a tenant may try who has nothing but the role `edit` in a namespace, and what everybody else must not notice.

mod crowds;
mod doors;
mod feed;
mod limits;
mod release;
mod reserve;
mod rules;
mod selectors;
mod shm;

use k8s_openapi::api::authentication::v1::{TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::ServiceAccount;
use kube::api::PostParams;
use kube::{Api, Client};

use crate::test_cluster::TestCluster;

/// A client with the credentials of a service account of the test's own namespace whose role is `edit` there.
#[allow(dead_code, reason = "the tests that follow are tenants")]
pub async fn tenant(cluster: &TestCluster) -> Client {
    let user = format!("--serviceaccount={}:tenant", cluster.namespace);
    cluster.rig.kubectl(&["-n", &cluster.namespace, "create", "serviceaccount", "tenant"]);
    cluster.rig.kubectl(&[
        "-n",
        &cluster.namespace,
        "create",
        "rolebinding",
        "tenant",
        "--clusterrole=edit",
        &user,
    ]);
    let accounts: Api<ServiceAccount> = Api::namespaced(cluster.client.clone(), &cluster.namespace);
    let spec = TokenRequestSpec { expiration_seconds: Some(3600), ..TokenRequestSpec::default() };
    let request = TokenRequest { spec: Some(spec), ..TokenRequest::default() };
    let answer = accounts.create_token_request("tenant", &PostParams::default(), &request).await;
    let token = answer.ok().and_then(|answer| answer.status?.token).expect("the API server gives a token");
    cluster.rig.client_with_token(&token).await
}
