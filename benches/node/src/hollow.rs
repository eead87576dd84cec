//! Nodes that nobody runs: Node objects that are Ready, and the slices that the driver would publish for them. Pods
//! are bound to them and stay there.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use futures::{StreamExt, TryStreamExt, stream};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::ResourceSlice;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::Client;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep};

use tranche::model::gpu::{DriverVersions, Gpu, Health, Memory, MigMode, NodeGpus, Pci};
use tranche::model::names::{DRIVER, DeviceUuid, NodeName};
use tranche::model::quantity::Bytes;
use tranche::sharing::SharingPolicy;
use tranche::slices::{BoardParts, Counters, Grantable, Offer, PublishOptions, ShareParts, Taints, desired};

use crate::api::PATIENCE;

pub const GPUS: u32 = 8;
const LABEL: &str = "tranche-bench=hollow";
const LEASES: &str = "kube-node-lease";
/// The node lifecycle controller takes a node for dead after 50 s without a sign of life.
const RENEW: Duration = Duration::from_secs(20);
const LOOK: Duration = Duration::from_millis(100);
const AT_ONCE: usize = 16;

/// So many nodes with H100s; their leases are renewed as long as this lives.
pub struct Hollow {
    client: Client,
    /// By (node, device): what can be granted of it.
    pub gpus: BTreeMap<(String, String), ShareParts>,
    renewing: AbortHandle,
}

impl Hollow {
    /// Makes them, and waits until pods may be bound to them.
    pub async fn make(client: &Client, count: usize) -> Result<Self> {
        let names: Vec<String> = (0..count).map(|nth| format!("hollow-{nth:03}")).collect();
        remove(client).await?;
        // First: a node of this name that was there before may be taken for dead at once.
        renew(client, &names).await?;
        let all = names.iter().enumerate().map(|(nth, name)| one(client, nth, name));
        let slices: Vec<ResourceSlice> = stream::iter(all).buffer_unordered(AT_ONCE).try_collect().await?;
        let mut gpus = BTreeMap::new();
        for slice in slices {
            let node = slice.spec.node_name.context("a slice without a node")?;
            for device in slice.spec.devices.into_iter().flatten() {
                let parts = Grantable::of(&device).map(|grantable| grantable.parts);
                let Some(BoardParts::Shares(shares)) = parts else { bail!("a GPU that cannot be shared") };
                gpus.insert((node.clone(), device.name), shares);
            }
        }
        let (of_task, leases) = (client.clone(), names.clone());
        let renewing = tokio::spawn(async move {
            loop {
                sleep(RENEW).await;
                if let Err(error) = renew(&of_task, &leases).await {
                    eprintln!("hollow nodes: {error:#}");
                }
            }
        });
        let made = Self { client: client.clone(), gpus, renewing: renewing.abort_handle() };
        made.until_ready(count).await?;
        Ok(made)
    }

    /// New nodes have a taint until the node lifecycle controller has seen that they are Ready.
    async fn until_ready(&self, count: usize) -> Result<()> {
        let (api, ours) = (Api::<Node>::all(self.client.clone()), ListParams::default().labels(LABEL));
        let deadline = Instant::now() + PATIENCE;
        let is_free =
            |node: &Node| node.spec.as_ref().and_then(|spec| spec.taints.as_ref()).is_none_or(Vec::is_empty);
        loop {
            let nodes = api.list(&ours).await?.items;
            if nodes.iter().filter(|node| is_free(node)).count() == count {
                return Ok(());
            }
            if Instant::now() > deadline {
                bail!("the hollow nodes keep their taints; does the controller-manager run?");
            }
            // Taken for dead meanwhile: a kubelet would say that it is not.
            for node in nodes.iter().filter(|node| !is_ready(node)) {
                let (name, status) = (node.metadata.name.as_deref().unwrap_or_default(), json!([ready()]));
                let patch = Patch::Merge(json!({"status": {"conditions": status}}));
                api.patch_status(name, &PatchParams::default(), &patch).await?;
            }
            sleep(LOOK).await;
        }
    }

    pub async fn end(self) -> Result<()> {
        self.renewing.abort();
        remove(&self.client).await
    }
}

impl Drop for Hollow {
    fn drop(&mut self) {
        self.renewing.abort();
    }
}

/// Whatever there is of hollow nodes.
async fn remove(client: &Client) -> Result<()> {
    let (ours, all) = (ListParams::default().labels(LABEL), DeleteParams::default());
    Api::<ResourceSlice>::all(client.clone()).delete_collection(&all, &ours).await?;
    Api::<Node>::all(client.clone()).delete_collection(&all, &ours).await?;
    Api::<Lease>::namespaced(client.clone(), LEASES).delete_collection(&all, &ours).await?;
    Ok(())
}

fn ready() -> Value {
    json!({"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "hollow"})
}

fn is_ready(node: &Node) -> bool {
    let mut conditions = node.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.any(|one| one.type_ == "Ready" && one.status == "True")
}

async fn one(client: &Client, nth: usize, name: &str) -> Result<ResourceSlice> {
    let room = json!({"cpu": "128", "memory": "1Ti", "pods": "110"});
    let node = json!({
        "metadata": {"name": name, "labels": {
            "tranche-bench": "hollow", "kubernetes.io/hostname": name, "kubernetes.io/os": "linux"}},
        "status": {"capacity": room, "allocatable": room, "conditions": [ready()]},
    });
    let made = PostParams::default();
    Api::<Node>::all(client.clone()).create(&made, &serde_json::from_value(node)?).await?;
    let policy = SharingPolicy::default();
    let how =
        PublishOptions { offer: Offer::Shares(&policy), taints: &Taints::new(), counters: Counters::NotKept };
    let mut contents = desired(&h100s(nth), &NodeName::new(name), how);
    let content = contents.pop().context("no slice is to be published")?;
    let slice = json!({
        "metadata": {"name": format!("{name}-{DRIVER}"), "labels": {"tranche-bench": "hollow"}},
        "spec": {
            "driver": DRIVER,
            "nodeName": name,
            "pool": {"name": content.pool, "generation": 1, "resourceSliceCount": 1},
            "devices": content.devices,
        },
    });
    Ok(Api::<ResourceSlice>::all(client.clone()).create(&made, &serde_json::from_value(slice)?).await?)
}

/// As NVML tells of them.
fn h100s(node: usize) -> NodeGpus {
    let gpu = |minor: u32| Gpu {
        uuid: DeviceUuid::new(format!("GPU-{node:08x}-0000-4000-8000-{minor:012}")),
        minor,
        product_name: "NVIDIA H100 80GB HBM3".to_owned(),
        brand: "Nvidia".to_owned(),
        architecture: "Hopper".to_owned(),
        compute_capability: (9, 0),
        memory: Memory::Known { total: Bytes::from_mib(81_559), reserved: Bytes::from_mib(551) },
        multiprocessors: Some(132),
        addressing_mode: Some("HMM".to_owned()),
        pci: Pci {
            bus_id: format!("0000:{:02x}:00.0", 0x1a + minor),
            root: Some("pci0000:15".to_owned()),
            numa_node: Some(minor / 4),
        },
        mig: MigMode::Off,
        health: Health::Healthy,
    };
    let driver = DriverVersions { driver: "550.163.01".to_owned(), cuda: "12.4".to_owned() };
    NodeGpus { driver, gpus: (0..GPUS).map(gpu).collect() }
}

/// A sign of life of each, as kubelet gives it.
async fn renew(client: &Client, names: &[String]) -> Result<()> {
    let api: Api<Lease> = Api::namespaced(client.clone(), LEASES);
    let now = MicroTime(k8s_openapi::jiff::Timestamp::now());
    let renewed = names.iter().cloned().map(|name| {
        let lease = json!({
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": name, "labels": {"tranche-bench": "hollow"}},
            "spec": {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": now},
        });
        let api = api.clone();
        async move { api.patch(&name, &PatchParams::apply("bench").force(), &Patch::Apply(lease)).await }
    });
    stream::iter(renewed).buffer_unordered(AT_ONCE).try_for_each(|_| async { Ok(()) }).await?;
    Ok(())
}
