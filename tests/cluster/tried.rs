//! Pods and DeviceClasses that are tried and not stored: what the API server says to their author, warnings included.

use http::Request;
use kube::Client;
use kube::client::Body;
use serde_json::{Value, json};

/// What the API server says to a pod: Err is its refusal, Ok its warnings.
pub async fn tried(client: &Client, namespace: &str, pod: &Value) -> Result<Vec<String>, String> {
    let path = format!("/api/v1/namespaces/{namespace}/pods?dryRun=All");
    answer(client, Request::post(path).header("content-type", "application/json"), pod).await
}

/// The same for a DeviceClass.
pub async fn tried_class(client: &Client, class: &Value) -> Result<Vec<String>, String> {
    let path = "/apis/resource.k8s.io/v1/deviceclasses?dryRun=All";
    answer(client, Request::post(path).header("content-type", "application/json"), class).await
}

/// The same for a debug container in a pod that is there.
pub async fn tried_debugging(
    client: &Client,
    namespace: &str,
    pod: &str,
    container: &Value,
) -> Result<Vec<String>, String> {
    let path = format!("/api/v1/namespaces/{namespace}/pods/{pod}/ephemeralcontainers?dryRun=All");
    let request = Request::patch(path).header("content-type", "application/strategic-merge-patch+json");
    answer(client, request, &json!({"spec": {"ephemeralContainers": [container]}})).await
}

async fn answer(
    client: &Client,
    request: http::request::Builder,
    body: &Value,
) -> Result<Vec<String>, String> {
    let request = request.body(Body::from(body.to_string().into_bytes())).expect("a whole request");
    let answer = client.send(request).await.expect("the API server answers");
    let warnings = answer.headers().get_all("warning").iter();
    let warnings = warnings.map(|value| value.to_str().expect("text").to_owned()).collect();
    if answer.status().is_success() {
        return Ok(warnings);
    }
    let body = answer.into_body().collect_bytes().await.expect("a whole answer");
    Err(String::from_utf8_lossy(&body).into_owned())
}
