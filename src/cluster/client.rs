//! The real API server. The only file that names a kube client, besides the events and the device status.

use std::ffi::OsStr;
use std::future::Future;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use futures::stream::{BoxStream, StreamExt};
use http::HeaderValue;
use http::header::USER_AGENT;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{Api, DeleteParams, GetParams, PartialObjectMeta, PostParams, Preconditions};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::core::NamespaceResourceScope;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Client, Config, Resource};
use thiserror::Error;
use tokio::sync::Semaphore;

use super::feed::{Which, list};
use super::guarded::{Known, Misfit, read};
use super::reader::{self, PAGES_MAX, Page, ReadError};
use super::{
    CALL_LIMIT, CallError, ClaimError, Cluster, SliceEvent, SliceRef, StoredSlice, events, read_claim,
};
use crate::model::claim::{AllocatedClaim, ClaimRef};
use crate::model::error_chain;
use crate::model::names::{DRIVER, NodeName};

/// Claims that are read at once. Each takes a connection of its own, whose TLS handshake costs both sides
/// more than waiting for one that is there.
pub const READS_AT_ONCE: usize = 8;

/// Who we are in `metadata.managedFields`.
pub(super) const FIELD_MANAGER: &str = "tranche";
/// In audit logs; what stands before the slash, in `managedFields` where no manager is named.
const OURSELVES: &str = concat!("tranche/", env!("CARGO_PKG_VERSION"));

/// How to reach the API server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Endpoint {
    /// With the pod's projected service-account token.
    InCluster,
    /// With a kubeconfig file and its current context. Several paths, separated by colons, are files that are merged:
    /// of each field the first file that has it counts, as with kubectl.
    Kubeconfig(PathBuf),
}

/// Why there is no client. Nothing has been asked of the API server yet.
#[derive(Debug, Error)]
pub enum ConnectError {
    #[error("not running in a pod with a service account; give --kubeconfig to run outside of the cluster")]
    InCluster(#[source] kube::config::InClusterError),
    #[error("kubeconfig {path} cannot be used; check the file and its current context", path = .path.display())]
    Kubeconfig {
        path: PathBuf,
        #[source]
        source: kube::config::KubeconfigError,
    },
    #[error("no client can be made for {url}; check its certificates and credentials")]
    Client {
        url: String,
        #[source]
        source: Box<kube::Error>,
    },
}

/// The API server, seen from one node.
#[derive(Clone)]
pub struct KubeCluster {
    client: Client,
    /// How the client was made; none: it was there already.
    config: Option<Arc<Config>>,
    node: NodeName,
    limit: Duration,
    /// Who may read a claim now.
    reads: Arc<Semaphore>,
}

impl KubeCluster {
    /// A client for `endpoint`. Connects at the first call.
    pub async fn connect(endpoint: &Endpoint, node: NodeName) -> Result<Self, ConnectError> {
        // Chosen here once, so that no other crate's default can be in force. Err: it is chosen already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mut config = match endpoint {
            Endpoint::InCluster => Config::incluster().map_err(ConnectError::InCluster)?,
            Endpoint::Kubeconfig(path) => from_file(path)
                .await
                .map_err(|source| ConnectError::Kubeconfig { path: path.clone(), source })?,
        };
        config.connect_timeout = Some(CALL_LIMIT);
        config.write_timeout = Some(CALL_LIMIT);
        config.headers.push((USER_AGENT, HeaderValue::from_static(OURSELVES)));
        let client = client(&config)?;
        Ok(Self { config: Some(Arc::new(config)), ..Self::with_client(client, node) })
    }

    /// The same with connections of its own, which are served by the thread that this is called on: those of another
    /// thread wait while that is busy.
    ///
    /// # Errors
    /// No client can be made.
    pub fn with_own_connections(&self) -> Result<Self, ConnectError> {
        let client = self.config.as_deref().map_or_else(|| Ok(self.client.clone()), client)?;
        Ok(Self { client, reads: Arc::new(Semaphore::new(READS_AT_ONCE)), ..self.clone() })
    }

    /// Uses a client that is there already.
    pub fn with_client(client: Client, node: NodeName) -> Self {
        let reads = Arc::new(Semaphore::new(READS_AT_ONCE));
        Self { client, config: None, node, limit: CALL_LIMIT, reads }
    }

    /// Another deadline per call than [`CALL_LIMIT`].
    pub fn with_limit(self, limit: Duration) -> Self {
        Self { limit, ..self }
    }

    /// A queue for events, and the task that posts them; it ends when the last sender is gone. A shorter deadline than
    /// [`CALL_LIMIT`] is not for them: nobody waits for an event.
    pub fn events(&self) -> (events::Events, impl Future<Output = ()> + Send + use<>) {
        events::queue(self.client.clone(), self.node.clone(), self.limit.max(CALL_LIMIT))
    }

    /// The claim that has this name now, whole, for people who ask what would become of it.
    pub async fn claim_named(&self, namespace: &str, name: &str) -> Result<ResourceClaim, CallError> {
        let what = || format!("GET resourceclaims {namespace}/{name}");
        call(self.limit, what, self.get(namespace, name)).await
    }

    /// The object of this name.
    pub(super) async fn get<K>(&self, namespace: &str, name: &str) -> Result<K, kube::Error>
    where
        K: Known + Resource<Scope = NamespaceResourceScope>,
    {
        let get = asked::<K>(namespace).get(name, &GetParams::default());
        self.ask(get).await
    }

    /// The object that a request is answered with.
    pub(super) async fn ask<K: Known>(
        &self,
        request: Result<http::Request<Vec<u8>>, kube::core::request::Error>,
    ) -> Result<K, kube::Error> {
        reader::object(&self.client, request.map_err(kube::Error::BuildRequest)?).await
    }

    pub(super) fn client(&self) -> Client {
        self.client.clone()
    }

    pub(super) fn node(&self) -> &NodeName {
        &self.node
    }

    /// The longest that one call may take.
    pub fn call_limit(&self) -> Duration {
        self.limit
    }

    pub(super) fn limit(&self) -> Duration {
        self.limit
    }

    fn all_slices(&self) -> Api<ResourceSlice> {
        Api::all(self.client.clone())
    }

    fn selector(&self) -> String {
        format!("spec.driver={DRIVER},spec.nodeName={}", self.node)
    }

    async fn read(&self, claim: &ClaimRef) -> Result<AllocatedClaim, ClaimError> {
        let what = || format!("GET resourceclaims {}/{}", claim.namespace, claim.name);
        let get = async {
            // Never closed; the deadline covers the wait.
            let _turn = self.reads.acquire().await;
            self.get::<ResourceClaim>(&claim.namespace, &claim.name).await
        };
        match call(self.limit, what, get).await {
            Ok(object) => read_claim::read(claim, &object),
            Err(CallError::NotFound { .. }) => Err(ClaimError::Gone { claim: claim.clone() }),
            Err(CallError::Unreadable { source, .. }) => Err(ClaimError::Malformed {
                claim: claim.clone(),
                field: "object".into(),
                problem: source.to_string().into(),
            }),
            Err(source) => Err(ClaimError::Call { claim: claim.clone(), source: Box::new(source) }),
        }
    }

    async fn list(&self) -> Result<Vec<StoredSlice>, CallError> {
        let mut all = Vec::new();
        let what = || format!("LIST resourceslices of node {}", self.node);
        let (which, add) = (Which::Fields(self.selector()), |slice| all.push(stored(slice)));
        self.each_object::<ResourceSlice>(&which, self.limit, what, add).await?;
        Ok(all)
    }

    /// Goes through a list, page by page, each within `limit`.
    pub(super) async fn each_object<K: Known>(
        &self,
        which: &Which,
        limit: Duration,
        what: impl Fn() -> String,
        mut each: impl FnMut(Result<K, Misfit<K>>),
    ) -> Result<(), CallError> {
        let mut next = String::new();
        for _ in 0..PAGES_MAX {
            let page = async {
                let mut page = Page::open(&self.client, list::<K>(which, &next)?).await?;
                while let Some(piece) = page.next().await? {
                    each(read(&piece));
                }
                Ok::<_, ReadError>(page.about())
            };
            let page = async { page.await.map_err(kube::Error::from) };
            next = call(limit, &what, page).await?.next;
            if next.is_empty() {
                break;
            }
        }
        Ok(())
    }

    async fn create(&self, slice: &ResourceSlice, how: PostParams) -> Result<ResourceSlice, CallError> {
        let meta = &slice.metadata;
        let name = || meta.name.as_ref().or(meta.generate_name.as_ref()).map_or("", String::as_str);
        let verb = if how.dry_run { "CREATE (dry run)" } else { "CREATE" };
        let what = || format!("{verb} resourceslices {}", name());
        call(self.limit, what, self.all_slices().create(&how, slice)).await
    }

    async fn delete(&self, slice: &SliceRef) -> Result<(), CallError> {
        let params = DeleteParams {
            preconditions: Some(Preconditions {
                uid: Some(slice.uid.clone()),
                resource_version: Some(slice.resource_version.clone()),
            }),
            ..DeleteParams::default()
        };
        let api = self.all_slices();
        let what = || format!("DELETE resourceslices {}", slice.name);
        match call(self.limit, what, api.delete(&slice.name, &params)).await {
            Ok(_) | Err(CallError::NotFound { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }
}

impl Cluster for KubeCluster {
    fn claim<'a>(&'a self, claim: &'a ClaimRef) -> BoxFuture<'a, Result<AllocatedClaim, ClaimError>> {
        Box::pin(self.read(claim))
    }

    fn node_uid(&self) -> BoxFuture<'_, Result<String, CallError>> {
        Box::pin(async move {
            let api = Api::<PartialObjectMeta<Node>>::all(self.client.clone());
            let what = || format!("GET nodes {}", self.node);
            let node = call(self.limit, what, api.get(self.node.as_str())).await?;
            node.metadata.uid.ok_or_else(|| CallError::Unreadable {
                what: what(),
                kind: "Node",
                source: "metadata.uid is missing".into(),
            })
        })
    }

    fn slices(&self) -> BoxFuture<'_, Result<Vec<StoredSlice>, CallError>> {
        Box::pin(self.list())
    }

    fn watch_slices(&self) -> BoxStream<'static, SliceEvent> {
        // Metadata is enough to know that something happened, and cannot fail to be read for what is in
        // a spec.
        let api = Api::<PartialObjectMeta<ResourceSlice>>::all(self.client.clone());
        let config = watcher::Config::default().fields(&self.selector());
        watcher(api, config).default_backoff().filter_map(|event| std::future::ready(told(event))).boxed()
    }

    fn create_slice<'a>(
        &'a self,
        slice: &'a ResourceSlice,
    ) -> BoxFuture<'a, Result<ResourceSlice, CallError>> {
        Box::pin(self.create(slice, post()))
    }

    fn try_slice<'a>(&'a self, slice: &'a ResourceSlice) -> BoxFuture<'a, Result<ResourceSlice, CallError>> {
        Box::pin(self.create(slice, PostParams { dry_run: true, ..post() }))
    }

    fn update_slice<'a>(
        &'a self,
        slice: &'a ResourceSlice,
    ) -> BoxFuture<'a, Result<ResourceSlice, CallError>> {
        Box::pin(async move {
            let api = self.all_slices();
            let name = slice.metadata.name.as_deref().unwrap_or_default();
            let what = || format!("UPDATE resourceslices {name}");
            call(self.limit, what, api.replace(name, &post(), slice)).await
        })
    }

    fn delete_slice<'a>(&'a self, slice: &'a SliceRef) -> BoxFuture<'a, Result<(), CallError>> {
        Box::pin(self.delete(slice))
    }
}

fn client(config: &Config) -> Result<Client, ConnectError> {
    Client::try_from(config.clone()).map_err(|source| ConnectError::Client {
        url: config.cluster_url.to_string(),
        source: Box::new(source),
    })
}

/// Requests for objects of a namespace.
pub(super) fn asked<K>(namespace: &str) -> kube::core::Request
where
    K: Known + Resource<Scope = NamespaceResourceScope>,
{
    kube::core::Request::new(K::url_path(&(), Some(namespace)))
}

async fn from_file(path: &Path) -> Result<Config, kube::config::KubeconfigError> {
    let parts = path.as_os_str().as_bytes().split(|byte| *byte == b':').filter(|part| !part.is_empty());
    let files: Vec<&Path> = parts.map(|part| Path::new(OsStr::from_bytes(part))).collect();
    // Of several, those that do not exist are passed over.
    let mut there = files.iter().filter(|file| files.len() == 1 || file.exists());
    let first = Kubeconfig::read_from(there.next().copied().unwrap_or(path))?;
    let kubeconfig = there.try_fold(first, |merged, file| merged.merge(Kubeconfig::read_from(file)?))?;
    Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await
}

pub(super) fn post() -> PostParams {
    PostParams { dry_run: false, field_manager: Some(FIELD_MANAGER.to_owned()) }
}

/// Waits for one call, at most `limit`, and says what went wrong in our words.
pub(super) async fn call<T>(
    limit: Duration,
    what: impl FnOnce() -> String,
    request: impl Future<Output = Result<T, kube::Error>>,
) -> Result<T, CallError> {
    match tokio::time::timeout(limit, request).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(error)) => Err(translate(what(), error)),
        Err(_) => Err(CallError::TimedOut { what: what(), limit }),
    }
}

fn translate(what: String, error: kube::Error) -> CallError {
    match error {
        kube::Error::Api(status) => {
            let message = status.message.clone();
            match status.code {
                // A 404 without the object's name says that the path is not served at all (an API server
                // without resource.k8s.io/v1, a proxy): that is no statement about the object.
                404 if status.details.as_ref().is_some_and(|details| !details.name.is_empty()) => {
                    CallError::NotFound { what, message }
                }
                409 => CallError::Conflict { what, message },
                401 | 403 => CallError::Forbidden { what, message },
                code => CallError::Refused { what, code, message },
            }
        }
        kube::Error::SerdeError(source) => {
            CallError::Unreadable { what, kind: "expected", source: Box::new(source) }
        }
        other => CallError::Unreachable { what, source: Box::new(other) },
    }
}

fn slice_ref(metadata: &ObjectMeta) -> SliceRef {
    SliceRef {
        name: metadata.name.clone().unwrap_or_default(),
        uid: metadata.uid.clone().unwrap_or_default(),
        resource_version: metadata.resource_version.clone().unwrap_or_default(),
    }
}

fn stored(item: Result<ResourceSlice, Misfit<ResourceSlice>>) -> StoredSlice {
    match item {
        Ok(slice) => StoredSlice::Readable(Box::new(slice)),
        Err(invalid) => {
            StoredSlice::Unreadable { slice: slice_ref(&invalid.rest.metadata), problem: invalid.problem }
        }
    }
}

/// `None`: nothing that anyone must act on.
fn told(event: watcher::Result<Event<PartialObjectMeta<ResourceSlice>>>) -> Option<SliceEvent> {
    match event {
        Ok(Event::InitDone) => Some(SliceEvent::Restarted),
        Ok(Event::Init | Event::InitApply(_)) => None,
        Ok(Event::Apply(slice)) => Some(SliceEvent::Stored(slice_ref(&slice.metadata))),
        Ok(Event::Delete(slice)) => Some(SliceEvent::Deleted(slice_ref(&slice.metadata))),
        Err(error) => Some(SliceEvent::Interrupted { problem: error_chain(&error) }),
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;
    use futures::future::join_all;
    use http::{Request, Response};
    use kube::client::Body;

    use super::*;
    use crate::cluster::ClaimState;
    use crate::model::names::ClaimUid;

    #[tokio::test]
    async fn several_kubeconfig_files_are_merged_and_the_first_counts() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let file = folder.path().join(name);
            std::fs::write(&file, text).unwrap();
            file.display().to_string()
        };
        let context = write(
            "context",
            "current-context: a\ncontexts: [{name: a, context: {cluster: c, user: u, namespace: ml}}]\n",
        );
        let cluster = |port: u16| {
            format!(
                "current-context: other\nclusters: [{{name: c, cluster: {{server: 'http://127.0.0.1:{port}'}}}}]\n\
                 users: [{{name: u, user: {{}}}}]\n"
            )
        };
        let (first, second) = (write("first", &cluster(1)), write("second", &cluster(2)));
        let missing = folder.path().join("missing").display().to_string();
        let config = from_file(Path::new(&format!("{context}:{missing}::{first}:{second}"))).await.unwrap();
        assert_eq!((config.cluster_url.port_u16(), config.default_namespace.as_str()), (Some(1), "ml"));
        assert!(from_file(Path::new(&missing)).await.is_err());
    }

    #[tokio::test]
    async fn a_burst_of_claims_is_read_a_few_at_a_time_and_all_are_answered() {
        let (service, mut server) = tower_test::mock::pair::<Request<Body>, Response<Body>>();
        let cluster = KubeCluster::with_client(Client::new(service, "default"), NodeName::new("node-a"));
        let claims: Vec<ClaimRef> = (0..3 * READS_AT_ONCE)
            .map(|n| ClaimRef { namespace: "ml".into(), name: format!("c{n}"), uid: ClaimUid::new("u") })
            .collect();
        let count = claims.len();
        let states =
            tokio::spawn(
                async move { join_all(claims.iter().map(|claim| cluster.claim_state(claim))).await },
            );
        let mut open = Vec::new();
        for answered in 0..count {
            while open.len() < READS_AT_ONCE.min(count - answered) {
                open.push(server.next_request().await.unwrap());
            }
            for _ in 0..100 {
                tokio::task::yield_now().await;
            }
            assert!(server.next_request().now_or_never().is_none(), "{} reads at once", open.len() + 1);
            let (request, answer) = open.remove(0);
            let name = request.uri().path().rsplit('/').next().unwrap();
            let status = format!(r#"{{"code":404,"reason":"NotFound","details":{{"name":"{name}"}}}}"#);
            answer.send_response(Response::builder().status(404).body(status.into_bytes().into()).unwrap());
        }
        let states = tokio::time::timeout(CALL_LIMIT, states).await.unwrap().unwrap();
        assert!(states.iter().all(|state| *state == ClaimState::Gone), "{states:?}");
    }
}
