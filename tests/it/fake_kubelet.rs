//! A stand-in for kubelet: its plugin manager and its DRA manager, as seen from a plugin.
//!
//! It watches the registry directory, dials each socket as grpc-go does (percent-encoded path as
//! the `:authority`), asks GetInfo with kubelet's one second, picks the first version it knows,
//! connects to the endpoint, reports the outcome, and sends prepare and unprepare in batches.

#![allow(dead_code)] // shared with benches and crash tests, each of which uses a part

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio::time::{Instant, interval, sleep, timeout};
use tonic::Streaming;
use tonic::transport::{Channel, Endpoint, Uri};

use tranche::kubelet::pb::dra::{
    Claim, Device, NodePrepareResourcesRequest, NodePrepareResourcesResponse, NodeUnprepareResourcesRequest,
    NodeUnprepareResourcesResponse, dra_plugin_client::DraPluginClient as V1,
};
use tranche::kubelet::pb::dra_v1beta1::dra_plugin_client::DraPluginClient as V1beta1;
use tranche::kubelet::pb::health::{
    NodeWatchResourcesRequest, NodeWatchResourcesResponse,
    dra_resource_health_client::DraResourceHealthClient as HealthV1,
};
use tranche::kubelet::pb::health_v1alpha1::dra_resource_health_client::DraResourceHealthClient as HealthV1alpha1;
use tranche::kubelet::pb::registration::{
    InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse,
};

#[path = "raw_grpc.rs"]
pub mod raw_grpc;
use raw_grpc::{RawError, RawGrpc};

/// How long a test waits for something that should happen at once.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Between two looks at the registry directory.
const LOOK: Duration = Duration::from_millis(5);

const GET_INFO: &str = "/pluginregistration.Registration/GetInfo";
const NOTIFY: &str = "/pluginregistration.Registration/NotifyRegistrationStatus";

/// The services a release of kubelet knows.
#[derive(Debug, Clone, Copy)]
pub struct Release {
    pub dra: &'static [&'static str],
    pub health: &'static [&'static str],
}

/// Before v1: not supported by us, but it shows that v1beta1 works.
pub const V1_33: Release = Release { dra: &["v1beta1.DRAPlugin"], health: &[] };
pub const V1_34: Release =
    Release { dra: &["v1.DRAPlugin", "v1beta1.DRAPlugin"], health: &["v1alpha1.DRAResourceHealth"] };
pub const V1_37: Release = Release {
    dra: &["v1.DRAPlugin", "v1beta1.DRAPlugin"],
    health: &["v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth"],
};

/// A registered instance of a driver.
#[derive(Debug, Clone)]
pub struct Plugin {
    pub socket: PathBuf,
    pub info: PluginInfo,
    /// The chosen DRA service.
    pub dra: &'static str,
    /// The chosen health service, if there is a common one.
    pub health: Option<&'static str>,
    file: (u64, u64),
    channel: Channel,
}

/// What a batch of claims came to: devices by claim UID.
pub type Prepared = BTreeMap<String, Vec<Device>>;

pub struct FakeKubelet {
    plugins: watch::Sender<Vec<Plugin>>,
    /// Claims marked as prepared.
    prepared: Mutex<Prepared>,
    manager: AbortHandle,
}

impl FakeKubelet {
    /// Starts the plugin manager of kubelet 1.37 on a root directory, which it makes if need be.
    pub fn start(root: &Path) -> Self {
        Self::start_release(root, V1_37)
    }

    pub fn start_release(root: &Path, release: Release) -> Self {
        let registry = make_registry(root);
        let plugins = watch::Sender::new(Vec::new());
        let manager = tokio::spawn(manage(registry, release, plugins.clone())).abort_handle();
        Self { plugins, prepared: Mutex::default(), manager }
    }

    /// As a restart: nobody is registered, no claim is marked prepared, and the directory is scanned.
    pub fn restart(&self) {
        self.prepared.lock().unwrap().clear();
        self.plugins.send_replace(Vec::new());
    }

    /// The registered instances of all drivers, oldest first.
    pub fn plugins(&self) -> Vec<Plugin> {
        self.plugins.borrow().clone()
    }

    /// Waits until `count` instances of the driver are registered; the newest of them comes last.
    pub async fn instances(&self, driver: &str, count: usize) -> Vec<Plugin> {
        let mut changes = self.plugins.subscribe();
        let reached = changes.wait_for(|plugins| of(plugins, driver).len() == count);
        let Ok(plugins) = timeout(PATIENCE, reached).await else {
            panic!("never {count} instances of {driver}: {:?}", self.plugins());
        };
        of(&plugins.unwrap(), driver)
    }

    /// Waits until the driver is registered.
    pub async fn registered(&self, driver: &str) -> Plugin {
        self.instances(driver, 1).await.remove(0)
    }

    /// The instance that gets the calls: the newest.
    pub fn current(&self, driver: &str) -> Result<Plugin, String> {
        of(&self.plugins.borrow(), driver)
            .pop()
            .ok_or_else(|| format!("DRA driver {driver} is not registered"))
    }

    /// A pod's start: prepares, in one batch, the claims that are not marked prepared. Any error of
    /// any claim fails the batch, and none of it is marked.
    pub async fn prepare(&self, driver: &str, claims: &[Claim]) -> Result<Prepared, String> {
        let plugin = self.current(driver)?;
        let wanted: Vec<Claim> = {
            let prepared = self.prepared.lock().unwrap();
            claims.iter().filter(|claim| !prepared.contains_key(&claim.uid)).cloned().collect()
        };
        if !wanted.is_empty() {
            let answer = plugin.prepare(wanted.clone()).await.map_err(|status| status.to_string())?;
            let fresh = checked(&wanted, answer)?;
            self.prepared.lock().unwrap().extend(fresh);
        }
        let prepared = self.prepared.lock().unwrap();
        Ok(claims.iter().map(|claim| (claim.uid.clone(), prepared[&claim.uid].clone())).collect())
    }

    /// As the pod worker: the same batch again until it is prepared.
    pub async fn prepare_until_ready(&self, driver: &str, claims: &[Claim]) -> Prepared {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match self.prepare(driver, claims).await {
                Ok(prepared) => return prepared,
                Err(error) if Instant::now() > deadline => panic!("never prepared: {error}"),
                Err(_) => sleep(LOOK).await,
            }
        }
    }

    /// The last pod that uses these claims is gone.
    pub async fn unprepare(&self, driver: &str, claims: &[Claim]) -> Result<(), String> {
        let answer =
            self.current(driver)?.unprepare(claims.to_vec()).await.map_err(|status| status.to_string())?;
        for claim in claims {
            match answer.claims.get(&claim.uid) {
                None => return Err(format!("claim {} was skipped", claim.name)),
                Some(answer) if !answer.error.is_empty() => return Err(answer.error.clone()),
                Some(_) => drop(self.prepared.lock().unwrap().remove(&claim.uid)),
            }
        }
        Ok(())
    }
}

impl Drop for FakeKubelet {
    fn drop(&mut self) {
        self.manager.abort();
    }
}

impl Plugin {
    /// The bare call, with kubelet's time limit.
    pub async fn prepare(&self, claims: Vec<Claim>) -> Result<NodePrepareResourcesResponse, tonic::Status> {
        let request = limited(NodePrepareResourcesRequest { claims });
        let answer = match self.dra {
            "v1.DRAPlugin" => V1::new(self.channel.clone()).node_prepare_resources(request).await,
            _ => V1beta1::new(self.channel.clone()).node_prepare_resources(request).await,
        };
        answer.map(tonic::Response::into_inner)
    }

    pub async fn unprepare(
        &self,
        claims: Vec<Claim>,
    ) -> Result<NodeUnprepareResourcesResponse, tonic::Status> {
        let request = limited(NodeUnprepareResourcesRequest { claims });
        let answer = match self.dra {
            "v1.DRAPlugin" => V1::new(self.channel.clone()).node_unprepare_resources(request).await,
            _ => V1beta1::new(self.channel.clone()).node_unprepare_resources(request).await,
        };
        answer.map(tonic::Response::into_inner)
    }

    /// The health stream in the chosen version.
    pub async fn watch_health(&self) -> Result<Streaming<NodeWatchResourcesResponse>, tonic::Status> {
        let request = NodeWatchResourcesRequest {};
        let answer = match self.health {
            Some("v1.DRAResourceHealth") => {
                HealthV1::new(self.channel.clone()).node_watch_resources(request).await
            }
            Some(_) => HealthV1alpha1::new(self.channel.clone()).node_watch_resources(request).await,
            None => return Err(tonic::Status::unimplemented("no health service in common")),
        };
        answer.map(tonic::Response::into_inner)
    }
}

/// A claim as kubelet names it.
pub fn claim(uid: &str) -> Claim {
    Claim { namespace: "default".to_owned(), name: format!("claim-{uid}"), uid: uid.to_owned() }
}

/// The `:authority` that grpc-go (1.58 and later) makes of a socket's path.
pub fn authority(socket: &Path) -> String {
    let kept = |b: u8| b.is_ascii_alphanumeric() || b"-_.~!$&'()*+,;=:[]@".contains(&b);
    let path = socket.to_str().unwrap();
    path.bytes().map(|b| if kept(b) { char::from(b).to_string() } else { format!("%{b:02X}") }).collect()
}

/// One GetInfo call on a connection of its own.
pub async fn get_info(socket: &Path) -> Result<PluginInfo, RawError> {
    RawGrpc::connect(socket).await?.call(Some(&authority(socket)), GET_INFO, &InfoRequest {}).await
}

/// The same with any `:authority`, or none.
pub async fn get_info_as(socket: &Path, authority: Option<&str>) -> Result<PluginInfo, RawError> {
    RawGrpc::connect(socket).await?.call(authority, GET_INFO, &InfoRequest {}).await
}

fn make_registry(root: &Path) -> PathBuf {
    let registry = root.join("plugins_registry");
    fs::create_dir_all(&registry).unwrap();
    fs::create_dir_all(root.join("plugins")).unwrap();
    registry
}

fn limited<T>(message: T) -> tonic::Request<T> {
    let mut request = tonic::Request::new(message);
    request.set_timeout(Duration::from_secs(45));
    request
}

fn of(plugins: &[Plugin], driver: &str) -> Vec<Plugin> {
    plugins.iter().filter(|plugin| plugin.info.name == driver).cloned().collect()
}

/// Kubelet's checks of an answer: every asked claim, no other, no error.
fn checked(asked: &[Claim], answer: NodePrepareResourcesResponse) -> Result<Prepared, String> {
    let mut prepared = Prepared::new();
    for (uid, answer) in answer.claims {
        if !asked.iter().any(|claim| claim.uid == uid) {
            return Err(format!("answer for claim {uid}, which was not asked for"));
        }
        if !answer.error.is_empty() {
            return Err(format!("claim {uid}: {}", answer.error));
        }
        prepared.insert(uid, answer.devices);
    }
    match asked.iter().find(|claim| !prepared.contains_key(&claim.uid)) {
        Some(skipped) => Err(format!("claim {} was skipped", skipped.uid)),
        None => Ok(prepared),
    }
}

/// The plugin manager: brings what is registered in line with the sockets that are there.
async fn manage(registry: PathBuf, release: Release, plugins: watch::Sender<Vec<Plugin>>) {
    let mut look = interval(LOOK);
    loop {
        look.tick().await;
        let sockets = scan(&registry);
        plugins.send_if_modified(|plugins| {
            let before = plugins.len();
            plugins.retain(|plugin| sockets.get(&plugin.socket) == Some(&plugin.file));
            plugins.len() != before
        });
        for (socket, file) in sockets {
            if plugins.borrow().iter().any(|plugin| plugin.socket == socket) {
                continue;
            }
            let known = plugins.borrow().clone();
            if let Ok(plugin) = register(&socket, file, release, &known).await {
                plugins.send_modify(|plugins| plugins.push(plugin));
            }
        }
    }
}

/// Sockets by path, with device and inode, hidden names left out.
fn scan(registry: &Path) -> BTreeMap<PathBuf, (u64, u64)> {
    let Ok(entries) = fs::read_dir(registry) else { return BTreeMap::new() };
    entries
        .filter_map(Result::ok)
        .filter(|entry| !entry.file_name().to_string_lossy().starts_with('.'))
        .filter_map(|entry| Some((entry.path(), fs::symlink_metadata(entry.path()).ok()?)))
        .filter(|(_, meta)| meta.file_type().is_socket())
        .map(|(path, meta)| (path, (meta.dev(), meta.ino())))
        .collect()
}

/// Dial, ask, check, connect, report: an error is retried as long as the socket is there.
async fn register(
    socket: &Path,
    file: (u64, u64),
    release: Release,
    known: &[Plugin],
) -> Result<Plugin, String> {
    let words = |what: &str, error: &dyn std::fmt::Display| format!("{what} {socket:?}: {error}");
    let authority = authority(socket);
    let mut connection = timeout(Duration::from_secs(10), RawGrpc::connect(socket))
        .await
        .map_err(|late| words("dialing", &late))?
        .map_err(|error| words("dialing", &error))?;
    let asked = connection.call(Some(&authority), GET_INFO, &InfoRequest {});
    let info: PluginInfo = timeout(Duration::from_secs(1), asked)
        .await
        .map_err(|late| words("GetInfo on", &late))?
        .map_err(|error| words("GetInfo on", &error))?;
    let validated = validated(&info, release, known);
    let status = RegistrationStatus {
        plugin_registered: validated.is_ok(),
        error: validated.as_ref().err().cloned().unwrap_or_default(),
    };
    let told = connection.call(Some(&authority), NOTIFY, &status);
    let _: RegistrationStatusResponse = timeout(Duration::from_secs(5), told)
        .await
        .map_err(|late| words("telling", &late))?
        .map_err(|error| words("telling", &error))?;
    let (dra, health) = validated?;
    let channel = dial(PathBuf::from(&info.endpoint));
    Ok(Plugin { socket: socket.to_owned(), info, dra, health, file, channel })
}

/// The services to use, or why the plugin is refused.
fn validated(
    info: &PluginInfo,
    release: Release,
    known: &[Plugin],
) -> Result<(&'static str, Option<&'static str>), String> {
    if info.r#type != "DRAPlugin" {
        return Err(format!("no handler for plugin type {:?}", info.r#type));
    }
    if info.name.is_empty() || info.name.len() > 63 {
        return Err(format!("driver name {:?} is invalid", info.name));
    }
    if !Path::new(&info.endpoint).is_absolute() {
        return Err(format!("endpoint {:?} is no absolute path", info.endpoint));
    }
    if known.iter().any(|plugin| plugin.info.endpoint == info.endpoint) {
        return Err(format!("endpoint {} is already registered", info.endpoint));
    }
    let first = |known: &'static [&'static str]| {
        info.supported_versions.iter().find_map(|offered| known.iter().find(|version| *version == offered))
    };
    let dra = first(release.dra)
        .ok_or_else(|| format!("none of the plugin's versions {:?} is supported", info.supported_versions))?;
    Ok((dra, first(release.health).copied()))
}

/// A lazy connection that comes back by itself, as grpc-go's to a `unix:` target.
fn dial(endpoint: PathBuf) -> Channel {
    Endpoint::from_static("http://localhost").connect_with_connector_lazy(tower::service_fn(move |_: Uri| {
        let endpoint = endpoint.clone();
        async move { UnixStream::connect(endpoint).await.map(TokioIo::new) }
    }))
}
