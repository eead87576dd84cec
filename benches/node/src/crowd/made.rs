//! What a wave consists of: a namespace, a thousand claims and their pods.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use futures::{StreamExt, TryStreamExt, stream};
use k8s_openapi::api::core::v1::{Namespace, Pod};
use k8s_openapi::api::resource::v1::{DeviceClass, DeviceRequestAllocationResult, ResourceClaim};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Client;
use kube::api::{Api, DeleteParams, ListParams, PostParams};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::time::sleep;

use tranche::model::names::{DRIVER, SHARED_CLASS};

use crate::api::{self, FirstSeen, PATIENCE};

pub const CLAIMS: usize = 1_000;
pub const SHARE_GIB: u64 = 10;
/// Requests under way at once where claims and pods do not all come at the same moment; names of waves have it, too.
pub const MAKERS: usize = 32;
pub const LOOK: Duration = Duration::from_millis(100);
/// The longest wait for all claims of a wave.
pub const WAVE: Duration = Duration::from_secs(180);

/// Who binds the pods.
#[derive(Clone, Copy, PartialEq)]
pub enum Binder {
    KubeScheduler,
    /// Named by the pods, and not there.
    Nobody,
}

/// How fast claims and their pods are created.
#[derive(Clone, Copy, PartialEq)]
pub enum Pacing {
    /// All at the same moment.
    AtOnce,
    /// [`MAKERS`] at a time: no faster than they are answered.
    Paced,
}

/// A namespace in which pods can be made.
pub async fn open(client: &Client, namespace: &str) -> Result<()> {
    fresh(client, namespace).await?;
    api::until_account(client, namespace).await
}

/// Until there is none of those that `which` chooses.
pub async fn until_gone<K>(api: &Api<K>, which: ListParams, what: &str) -> Result<()>
where
    K: Clone + std::fmt::Debug + DeserializeOwned,
{
    let deadline = Instant::now() + WAVE;
    while !api.list_metadata(&which.clone().limit(1)).await?.items.is_empty() {
        if Instant::now() > deadline {
            bail!("{what} do not go");
        }
        sleep(LOOK).await;
    }
    Ok(())
}

/// Until the scheduler has tried every pod in vain.
pub async fn until_tried(client: &Client, namespace: &str) -> Result<()> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let all = |tried: &HashMap<String, Instant>| tried.len() == CLAIMS;
    let seen = FirstSeen::start(pods, "", tried).await?;
    seen.until_within(WAVE, "pods that cannot be scheduled", all).await?;
    Ok(())
}

/// The scheduler has tried the pod in vain.
fn tried(pod: &Pod) -> bool {
    let mut conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.any(|one| one.type_ == "PodScheduled" && one.status == "False")
}

/// The claims and their pods; when each claim was asked for.
pub async fn make(
    client: &Client,
    namespace: &str,
    devices: &Value,
    binder: Binder,
    asked: Pacing,
) -> Result<Vec<Instant>> {
    made_and(client, namespace, devices, binder, asked, |_, _| async { Ok(()) }).await
}

/// The same, and something is done with each claim as soon as its pod is there. It is given the claim's number.
pub async fn made_and<F>(
    client: &Client,
    namespace: &str,
    devices: &Value,
    binder: Binder,
    asked: Pacing,
    then: impl Fn(usize, ResourceClaim) -> F,
) -> Result<Vec<Instant>>
where
    F: Future<Output = Result<()>>,
{
    let claims: Api<ResourceClaim> = Api::namespaced(client.clone(), namespace);
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let all = (0..CLAIMS).map(|nth| {
        let (claims, pods, name, then) = (claims.clone(), pods.clone(), name(nth), &then);
        let claim = json!({"metadata": {"name": name}, "spec": {"devices": devices}});
        async move {
            let begun = Instant::now();
            let claim = claims.create(&PostParams::default(), &serde_json::from_value(claim)?).await?;
            pods.create(&PostParams::default(), &serde_json::from_value(pod(&name, binder))?).await?;
            then(nth, claim).await?;
            anyhow::Ok(begun)
        }
    });
    let at_once = if asked == Pacing::AtOnce { CLAIMS } else { MAKERS };
    stream::iter(all).buffered(at_once).try_collect().await
}

pub fn name(nth: usize) -> String {
    format!("c-{nth:04}")
}

fn pod(name: &str, binder: Binder) -> Value {
    let resources = json!({"requests": {"cpu": "100m", "memory": "128Mi"}, "claims": [{"name": "gpu"}]});
    let container = json!({"name": "main", "image": "docker.io/local/busybox:1", "resources": resources});
    let scheduler = if binder == Binder::Nobody { "nobody" } else { "default-scheduler" };
    json!({"metadata": {"name": name}, "spec": {
        "schedulerName": scheduler, "containers": [container],
        "resourceClaims": [{"name": "gpu", "resourceClaimName": name}]}})
}

/// spec.devices for the controller.
pub fn by_controller() -> Value {
    let parameters = json!({
        "apiVersion": "tranche.dev/v1alpha1", "kind": "GpuShare", "memory": format!("{SHARE_GIB}Gi")});
    json!({
        "requests": [{"name": "gpu", "exactly": {"deviceClassName": SHARED_CLASS}}],
        "config": [{"requests": ["gpu"], "opaque": {"driver": DRIVER, "parameters": parameters}}],
    })
}

/// The same for the scheduler.
pub fn by_scheduler(class: &str) -> Value {
    let capacity = json!({"requests": {"memory": format!("{SHARE_GIB}Gi")}});
    json!({"requests": [{"name": "gpu", "exactly": {"deviceClassName": class, "capacity": capacity}}]})
}

/// Another class for the same devices.
pub async fn copy_class(client: &Client, from: &str, to: &str) -> Result<()> {
    let api = Api::<DeviceClass>::all(client.clone());
    let spec = api.get(from).await?.spec;
    let metadata = ObjectMeta { name: Some(to.to_owned()), ..ObjectMeta::default() };
    api.create(&PostParams::default(), &DeviceClass { metadata, spec }).await?;
    Ok(())
}

/// If it is there.
pub async fn drop_class(client: &Client, name: &str) -> Result<()> {
    let api = Api::<DeviceClass>::all(client.clone());
    if api.get_opt(name).await?.is_some() {
        api.delete(name, &DeleteParams::default()).await?;
    }
    Ok(())
}

pub fn results(claim: &ResourceClaim) -> impl Iterator<Item = &DeviceRequestAllocationResult> {
    let allocation = claim.status.as_ref().and_then(|status| status.allocation.as_ref());
    let devices = allocation.and_then(|allocation| allocation.devices.as_ref());
    devices.into_iter().flat_map(|devices| devices.results.iter().flatten())
}

/// An empty namespace: what an earlier run has left of it goes first.
pub async fn fresh(client: &Client, name: &str) -> Result<()> {
    let api = Api::<Namespace>::all(client.clone());
    let deadline = Instant::now() + PATIENCE;
    while let Some(old) = api.get_opt(name).await? {
        if old.metadata.deletion_timestamp.is_none() {
            api.delete(name, &DeleteParams::default()).await?;
        }
        if Instant::now() > deadline {
            bail!("namespace {name} does not go");
        }
        sleep(LOOK).await;
    }
    let object = serde_json::from_value(json!({"metadata": {"name": name}}))?;
    api.create(&PostParams::default(), &object).await?;
    Ok(())
}

/// Until it has ended: what is deleted in it costs the API server as much as what the next wave makes.
pub async fn drop_namespace(client: &Client, name: &str) -> Result<()> {
    let api = Api::<Namespace>::all(client.clone());
    api.delete(name, &DeleteParams::default()).await?;
    let deadline = Instant::now() + WAVE;
    while api.get_opt(name).await?.is_some() {
        if Instant::now() > deadline {
            bail!("namespace {name} does not go");
        }
        sleep(LOOK).await;
    }
    Ok(())
}
