//! A running plugin on the real API server, and its claims prepared one at a time.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use kube::Client;

use tranche::cluster::{Cluster, Endpoint, KubeCluster, NodeCluster};
use tranche::kubelet::pb::dra::Claim;
use tranche::model::claim::ClaimRef;
use tranche::model::names::{ClaimUid, NodeName};

use crate::api::{self, Access, NODE};
use crate::calls::Socket;
use crate::fake_kubelet::FakeKubelet;
use crate::figures::Samples;
use crate::plugin::{Process, Setting};

/// A running plugin that is registered, and whose slices are there.
pub struct Bench<'a> {
    pub client: &'a Client,
    /// The driver's own client, in this process.
    cluster: NodeCluster,
    pub plugin: Process,
    pub socket: Socket,
    pub folder: PathBuf,
    pub devices: Vec<String>,
    _kubelet: FakeKubelet,
}

/// How a plugin is started.
pub struct Start<'a> {
    /// Its folder's name. What an earlier plugin left there is taken over.
    pub folder: &'a str,
    pub gpus: &'a Path,
    /// Devices that it is to publish.
    pub devices: usize,
    /// Arguments beside the usual ones.
    pub more: Vec<String>,
}

impl<'a> Bench<'a> {
    pub async fn start(setting: &Setting, client: &'a Client, start: Start<'_>) -> Result<Self> {
        let slices = api::watch_slices(client).await?;
        api::delete_slices(client, &slices).await?;
        let folder = setting.folder(start.folder)?;
        let kubelet = FakeKubelet::start(&folder);
        let plugin = setting.start(&folder, start.gpus, &start.more)?;
        let socket = Socket::registered(&kubelet).await?;
        let devices = api::devices(client, start.devices).await.with_context(|| plugin.last_words())?;
        let endpoint = Endpoint::from(setting.kubeconfig.clone());
        let cluster = NodeCluster::new(KubeCluster::connect(&endpoint).await?, NodeName::new(NODE));
        Ok(Self { client, cluster, plugin, socket, folder, devices, _kubelet: kubelet })
    }

    /// Claims on the node's devices, one after the other.
    pub async fn claims(&self, prefix: &str, count: usize, access: Access) -> Result<Vec<Claim>> {
        let devices = self.devices.iter().cycle().take(count).cloned().collect();
        api::claims(self.client, prefix, devices, access).await
    }

    /// Claims on one device, all of them.
    pub async fn claims_on_first(&self, prefix: &str, count: usize, access: Access) -> Result<Vec<Claim>> {
        let devices = self.devices.iter().take(1).cycle().take(count).cloned().collect();
        api::claims(self.client, prefix, devices, access).await
    }

    /// For each claim: GET, prepare, a sync of the same kind, unprepare.
    pub async fn one_at_a_time(&self, claims: &[Claim]) -> Result<Took> {
        let mut took = Took::default();
        for claim in claims {
            took.get.push(self.get(claim).await?);
            took.prepare.push(self.socket.prepare(claim).await?);
            took.synced.push(synced(&self.folder)?);
            took.unprepare.push(self.socket.unprepare(claim).await?);
        }
        Ok(took)
    }

    pub async fn get(&self, claim: &Claim) -> Result<Duration> {
        let uid = ClaimUid::new(&claim.uid);
        let claim = ClaimRef { namespace: claim.namespace.clone(), name: claim.name.clone(), uid };
        let begun = Instant::now();
        self.cluster.claim(&claim).await?;
        Ok(begun.elapsed())
    }
}

#[derive(Default)]
pub struct Took {
    pub get: Samples,
    pub prepare: Samples,
    pub synced: Samples,
    pub unprepare: Samples,
}

/// The least that a durable record costs on this disk, without us.
fn synced(folder: &Path) -> Result<Duration> {
    let (temp, file) = (folder.join("probe.tmp"), folder.join("probe"));
    let begun = Instant::now();
    let mut probe = File::create(&temp)?;
    probe.write_all(&[b'x'; 1024])?;
    probe.sync_data()?;
    fs::rename(&temp, &file)?;
    File::open(folder)?.sync_all()?;
    let took = begun.elapsed();
    fs::remove_file(file)?;
    Ok(took)
}
