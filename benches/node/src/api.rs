//! The real API server: a node of our own making, claims that are allocated before the clock starts, and
//! standing watches that say when something was first seen.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use futures::{StreamExt, TryStreamExt, stream};
use k8s_openapi::api::core::v1::{Namespace, Node, Pod, ServiceAccount};
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Client, Resource};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio::time::{sleep, timeout};

use tranche::kubelet::pb::dra::Claim;
use tranche::model::names::DRIVER;

/// The node whose plugin is measured. It has no kubelet, so that nobody but us touches its slices.
pub const NODE: &str = "bench";
/// Claims with administrative access need a namespace that says so.
pub const NAMESPACE: &str = "bench";
/// The longest wait for anything.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// Between two looks at what should be there soon, where nothing is timed.
const LOOK: Duration = Duration::from_millis(50);
/// Requests under way at once while claims are made; nothing is timed meanwhile.
const MAKERS: usize = 16;

/// How a claim has its device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    Exclusive,
    /// Makes a record and container edits, and holds nothing: any number fits on a GPU.
    Admin,
    /// A part, as kube-scheduler gives it: memory in MiB, compute in percent, one block of client slots.
    Share {
        mib: u32,
        percent: u8,
    },
}

/// Makes the namespace and the node, if they are not there, and removes an earlier run's claims and pods.
pub async fn prepare(client: &Client) -> Result<()> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), NAMESPACE);
    // No kubelet sees to their end.
    pods.delete_collection(&DeleteParams::default().grace_period(0), &ListParams::default()).await?;
    let claims: Api<ResourceClaim> = Api::namespaced(client.clone(), NAMESPACE);
    claims.delete_collection(&DeleteParams::default(), &ListParams::default()).await?;
    let labels = json!({"resource.kubernetes.io/admin-access": "true"});
    create::<Namespace>(
        &Api::all(client.clone()),
        json!({"metadata": {"name": NAMESPACE, "labels": labels}}),
    )
    .await?;
    create::<Node>(&Api::all(client.clone()), json!({"metadata": {"name": NODE}})).await
}

async fn create<K>(api: &Api<K>, object: Value) -> Result<()>
where
    K: Resource + Clone + std::fmt::Debug + serde::Serialize + serde::de::DeserializeOwned,
{
    match api.create(&PostParams::default(), &serde_json::from_value(object)?).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Claims `PREFIX-0`, `PREFIX-1`, ..., one device each, in the order of `devices`, allocated.
pub async fn claims(
    client: &Client,
    prefix: &str,
    devices: Vec<String>,
    access: Access,
) -> Result<Vec<Claim>> {
    let api: Api<ResourceClaim> = Api::namespaced(client.clone(), NAMESPACE);
    let all = devices.into_iter().enumerate().map(|(number, device)| {
        let (api, name) = (api.clone(), format!("{prefix}-{number}"));
        async move { claim(&api, &name, &device, access).await.with_context(|| format!("claim {name}")) }
    });
    stream::iter(all).buffered(MAKERS).try_collect().await
}

/// Reserves each claim for a pod of its own on our node, which never runs; the pods' UIDs, in order.
pub async fn reserve(client: &Client, claims: &[Claim]) -> Result<Vec<String>> {
    let api: Api<ResourceClaim> = Api::namespaced(client.clone(), NAMESPACE);
    let pods: Api<Pod> = Api::namespaced(client.clone(), NAMESPACE);
    until_account(client, NAMESPACE).await?;
    let all = claims.iter().map(|claim| {
        let (api, pods, name) = (api.clone(), pods.clone(), claim.name.clone());
        async move { reserve_one(&api, &pods, &name).await.with_context(|| format!("pod of claim {name}")) }
    });
    stream::iter(all).buffered(MAKERS).try_collect().await
}

async fn reserve_one(api: &Api<ResourceClaim>, pods: &Api<Pod>, name: &str) -> Result<String> {
    let spec = json!({
        "nodeName": NODE,
        "tolerations": [{"operator": "Exists"}],
        "containers": [{"name": "main", "image": "docker.io/local/busybox:1"}],
    });
    let pod = serde_json::from_value(json!({"metadata": {"name": name}, "spec": spec}))?;
    let made = pods.create(&PostParams::default(), &pod).await?;
    let uid = made.metadata.uid.context("the API server gave no UID")?;
    let user = json!({"resource": "pods", "name": name, "uid": uid});
    let status = json!({"status": {"reservedFor": [user]}});
    api.patch_status(name, &PatchParams::default(), &Patch::Merge(status)).await?;
    Ok(uid)
}

/// Waits until the namespace's pods may be made.
pub async fn until_account(client: &Client, namespace: &str) -> Result<()> {
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), namespace);
    let there =
        kube::runtime::wait::await_condition(accounts, "default", |account: Option<&_>| account.is_some());
    timeout(PATIENCE, there).await.context("no default service account")??;
    Ok(())
}

async fn claim(api: &Api<ResourceClaim>, name: &str, device: &str, access: Access) -> Result<Claim> {
    let mut exactly = json!({"deviceClassName": DRIVER, "allocationMode": "ExactCount", "count": 1});
    let mut result = json!({"request": "gpu", "driver": DRIVER, "pool": NODE, "device": device});
    if access == Access::Admin {
        exactly["adminAccess"] = json!(true);
        result["adminAccess"] = json!(true);
    }
    if let Access::Share { mib, percent } = access {
        let (memory, compute) = (format!("{mib}Mi"), percent.to_string());
        exactly["capacity"] = json!({"requests": {"memory": memory, "compute": compute}});
        result["consumedCapacity"] = json!({"memory": memory, "compute": compute, "shares": "1"});
    }
    let object = json!({
        "metadata": {"name": name},
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}},
    });
    let made = api.create(&PostParams::default(), &serde_json::from_value(object)?).await?;
    let uid = made.metadata.uid.context("the API server gave no UID")?;
    if matches!(access, Access::Share { .. }) {
        // Any UUID that no other share has.
        result["shareID"] = json!(uid);
    }
    let field = json!({"key": "metadata.name", "operator": "In", "values": [NODE]});
    let status = json!({"status": {"allocation": {
        "devices": {"results": [result]},
        "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [field]}]},
    }}});
    api.patch_status(name, &PatchParams::default(), &Patch::Merge(status)).await?;
    Ok(Claim { namespace: NAMESPACE.to_owned(), name: name.to_owned(), uid })
}

/// When each object was first seen as wanted, by name; an object that is gone is forgotten.
pub struct FirstSeen {
    when: watch::Receiver<HashMap<String, Instant>>,
    watching: AbortHandle,
}

impl FirstSeen {
    /// Starts a watch and waits until it stands.
    pub async fn start<K>(api: Api<K>, fields: &str, wanted: fn(&K) -> bool) -> Result<Self>
    where
        K: Resource + Clone + std::fmt::Debug + serde::de::DeserializeOwned + Send + 'static,
        K::DynamicType: Default,
    {
        let (sender, when) = watch::channel(HashMap::new());
        let (stands, standing) = tokio::sync::oneshot::channel();
        let config = watcher::Config::default().fields(fields);
        let watching = tokio::spawn(async move {
            let mut stands = Some(stands);
            let mut events = watcher(api, config).boxed();
            while let Some(event) = events.next().await {
                let now = Instant::now();
                match event {
                    Ok(Event::Apply(object) | Event::InitApply(object)) if wanted(&object) => {
                        sender.send_modify(|when| {
                            when.entry(name(&object)).or_insert(now);
                        });
                    }
                    Ok(Event::Delete(object)) => {
                        sender.send_modify(|when| {
                            when.remove(&name(&object));
                        });
                    }
                    Ok(Event::InitDone) => drop(stands.take().map(|stands| stands.send(()))),
                    Ok(_) => {}
                    Err(error) => eprintln!("watch: {error}"),
                }
            }
        });
        timeout(PATIENCE, standing).await.context("the watch does not stand")??;
        Ok(Self { when, watching: watching.abort_handle() })
    }

    /// Waits until as many objects as `enough` wants were seen.
    pub async fn until(
        &self,
        what: &str,
        enough: impl FnMut(&HashMap<String, Instant>) -> bool,
    ) -> Result<HashMap<String, Instant>> {
        self.until_within(PATIENCE, what, enough).await
    }

    /// The same with a patience of its own.
    pub async fn until_within(
        &self,
        patience: Duration,
        what: &str,
        enough: impl FnMut(&HashMap<String, Instant>) -> bool,
    ) -> Result<HashMap<String, Instant>> {
        let mut when = self.when.clone();
        let seen = timeout(patience, when.wait_for(enough)).await;
        let seen = seen.with_context(|| format!("never seen: {what}"))?;
        Ok(seen.context("the watch ended")?.clone())
    }
}

impl Drop for FirstSeen {
    fn drop(&mut self) {
        self.watching.abort();
    }
}

fn name<K: Resource>(object: &K) -> String {
    object.meta().name.clone().unwrap_or_default()
}

/// Watches our node's slices; seen are those that list devices.
pub async fn watch_slices(client: &Client) -> Result<FirstSeen> {
    let wanted =
        |slice: &ResourceSlice| slice.spec.devices.as_ref().is_some_and(|devices| !devices.is_empty());
    let fields = format!("spec.nodeName={NODE},spec.driver={DRIVER}");
    FirstSeen::start(Api::<ResourceSlice>::all(client.clone()), &fields, wanted).await
}

/// The devices that our node's slices list, in their order, as soon as there are `count`.
pub async fn devices(client: &Client, count: usize) -> Result<Vec<String>> {
    let ours = ListParams::default().fields(&format!("spec.nodeName={NODE},spec.driver={DRIVER}"));
    let deadline = Instant::now() + PATIENCE;
    loop {
        let slices = Api::<ResourceSlice>::all(client.clone()).list(&ours).await?;
        let devices = slices.items.into_iter().flat_map(|slice| slice.spec.devices.unwrap_or_default());
        let names: Vec<String> = devices.map(|device| device.name).collect();
        if names.len() == count {
            return Ok(names);
        }
        if Instant::now() > deadline {
            bail!("{} devices are published, not {count}", names.len());
        }
        sleep(LOOK).await;
    }
}

/// Deletes our node's slices and waits until they are seen no more.
pub async fn delete_slices(client: &Client, seen: &FirstSeen) -> Result<()> {
    let api: Api<ResourceSlice> = Api::all(client.clone());
    let ours = ListParams::default().fields(&format!("spec.nodeName={NODE}"));
    api.delete_collection(&DeleteParams::default(), &ours).await?;
    seen.until("the slices' end", HashMap::is_empty).await.map(drop)
}

/// Watches a namespace's pods; seen are those that run.
pub async fn watch_pods(client: &Client, namespace: &str) -> Result<FirstSeen> {
    let running = |pod: &Pod| pod.status.as_ref().and_then(|s| s.phase.as_deref()) == Some("Running");
    FirstSeen::start(Api::<Pod>::namespaced(client.clone(), namespace), "", running).await
}

/// Removes our node, of which no kubelet ever tells anything.
pub async fn clear(client: &Client) -> Result<()> {
    Api::<Node>::all(client.clone()).delete(NODE, &DeleteParams::default()).await?;
    Ok(())
}

/// A client for the kubeconfig at `path`.
pub async fn client(path: &std::path::Path) -> Result<Client> {
    if rustls::crypto::ring::default_provider().install_default().is_err() {
        bail!("another TLS provider is in force");
    }
    let kubeconfig = kube::config::Kubeconfig::read_from(path)?;
    let config = kube::Config::from_custom_kubeconfig(kubeconfig, &Default::default()).await?;
    Ok(Client::try_from(config)?)
}
