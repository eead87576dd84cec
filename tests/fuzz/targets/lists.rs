//! The reader of lists: an answer of the API server, whose objects tenants have written.

use http::{Request, Response};
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::Client;
use kube::client::Body;
use serde_json::{Map, Value, json};
use tranche::cluster::KubeCluster;

use super::claims::FIELDS;
use super::jsons;
use crate::driver::meter::ready;
use crate::driver::{Form, Limits, Target};

pub fn targets() -> Vec<Target> {
    vec![Target {
        name: "list",
        seeds: || {
            let claim = |name: &str, parameters: Value| {
                json!({"metadata": {"name": name, "namespace": "ml", "uid": name, "managedFields": [{}]},
                    "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "c"}}],
                        "config": [{"opaque": {"driver": "nic.example.com", "parameters": parameters}}]}}})
            };
            let list = json!({"kind": "ResourceClaimList", "metadata": {"resourceVersion": "7"},
                "items": [claim("a", json!({"x": [[[]]]})), claim("b", json!("\u{e9}\n\\"))]});
            jsons(&[list, json!({"items": []}), json!({"items": null, "metadata": {"continue": ""}})])
        },
        words: FIELDS,
        form: Form::Json,
        limits: Limits { length: 32 << 10, millis: 2000, bytes: 2 << 20, per_byte: 100 },
        run: list,
    }]
}

/// What serde can read whole is read whole here, too; the rest costs nobody anything.
fn list(input: &[u8]) {
    let body = input.to_vec();
    let service = tower::service_fn(move |request: Request<Body>| {
        // Slices are listed beside the claims; pages come but once.
        let is_asked = request.uri().path().ends_with("/resourceclaims")
            && !request.uri().query().unwrap_or_default().contains("continue=");
        let body = if is_asked { body.clone() } else { br#"{"items":[]}"#.to_vec() };
        async move { Ok::<_, std::io::Error>(Response::new(Body::from(body))) }
    });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let _entered = runtime.enter();
    let cluster = KubeCluster::with_client(Client::new(service, "default"));
    ready();
    let found = runtime.block_on(cluster.survey());
    let Some(count) = readable(input) else { return };
    assert_eq!(found.expect("it is a list").claims.len(), count);
}

/// How many claims are in a list that nobody can read in two ways.
fn readable(input: &[u8]) -> Option<usize> {
    let text = std::str::from_utf8(input).ok()?;
    let twice = |name: &str| text.matches(name).count() > 1;
    if twice("items")
        || twice("continue")
        || twice("resourceVersion")
        || text.matches("metadata").count() > 64
        || text.contains('\\')
    {
        return None;
    }
    let list: Value = serde_json::from_str(text).ok()?;
    let about = list.get("metadata").map_or(Some(Map::new()), |about| about.as_object().cloned())?;
    let text =
        |name: &str| about.get(name).map_or(Some(""), |text| text.as_str().or(text.is_null().then_some("")));
    if text("resourceVersion").is_none() || text("continue") != Some("") {
        return None;
    }
    let items = list.get("items")?.as_array()?;
    let read = |item: &Value| serde_json::from_value::<ResourceClaim>(item.clone()).is_ok();
    items.iter().all(|item| item.is_object() && read(item)).then_some(items.len())
}
