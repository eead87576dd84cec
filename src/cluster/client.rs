//! The real API server. The only file that names a kube client, besides the events and the device status.

use std::ffi::OsStr;
use std::future::Future;
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use http::HeaderValue;
use http::header::USER_AGENT;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::{GetParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::core::NamespaceResourceScope;
use kube::{Client, Config, Resource};
use thiserror::Error;
use tokio::sync::Semaphore;

use super::events::{self, ReportingInstance};
use super::feed::{Which, list};
use super::guarded::{Misfit, ReadKind, read};
use super::reader::{self, PAGES_MAX, Page, ReadError};
use super::{CALL_LIMIT, CallError, ClaimError, read_claim};
use crate::model::claim::{AllocatedClaim, ClaimRef};
use crate::model::error_chain;
use crate::model::plain::in_plain_words;

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
    /// With a kubeconfig file. Several paths, separated by colons, are files that are merged: of each field the first
    /// file that has it counts, as with kubectl. `context`: another one than the current.
    Kubeconfig { path: PathBuf, context: Option<String> },
}

impl From<PathBuf> for Endpoint {
    fn from(path: PathBuf) -> Self {
        Self::Kubeconfig { path, context: None }
    }
}

/// Whom to ask as, in place of oneself. The API server lets those do it who have the right `impersonate`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Impersonation {
    pub user: String,
    pub groups: Vec<String>,
    pub uid: Option<String>,
}

/// Why there is no client. Nothing has been asked of the API server yet.
#[derive(Debug, Error)]
pub enum ConnectError {
    #[error("not running in a pod with a service account; give --kubeconfig to run outside of the cluster")]
    InCluster(#[source] kube::config::InClusterError),
    #[error("kubeconfig {path} cannot be used: {problem}", path = .path.display())]
    Kubeconfig { path: PathBuf, problem: String },
    #[error("no client can be made for {url}; check its certificates and credentials")]
    Client {
        url: String,
        #[source]
        source: Box<kube::Error>,
    },
}

/// The API server.
#[derive(Clone)]
pub struct KubeCluster {
    client: Client,
    /// How the client was made; none: it was there already.
    config: Option<Arc<Config>>,
    limit: Duration,
    /// Who may read a claim now.
    reads: Arc<Semaphore>,
}

impl KubeCluster {
    /// A client for `endpoint`. Connects at the first call.
    pub async fn connect(endpoint: &Endpoint) -> Result<Self, ConnectError> {
        Self::connect_as(endpoint, None).await
    }

    /// The same as somebody else: what a kubeconfig says of that (`as`, `as-groups`) counts no more then.
    ///
    /// # Errors
    /// There is no endpoint, or no client can be made for it.
    pub async fn connect_as(
        endpoint: &Endpoint,
        impersonation: Option<&Impersonation>,
    ) -> Result<Self, ConnectError> {
        // Chosen here once, so that no other crate's default can be in force. Err: it is chosen already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mut config = match endpoint {
            Endpoint::InCluster => Config::incluster().map_err(ConnectError::InCluster)?,
            Endpoint::Kubeconfig { path, context } => from_file(path, context.as_deref())
                .await
                .map_err(|problem| ConnectError::Kubeconfig { path: path.clone(), problem })?,
        };
        if let Some(Impersonation { user, groups, uid }) = impersonation {
            let auth = &mut config.auth_info;
            auth.impersonate = Some(user.clone());
            auth.impersonate_groups = Some(groups.clone()).filter(|groups| !groups.is_empty());
            auth.impersonate_uid.clone_from(uid);
            auth.impersonate_user_extra = None;
        }
        config.connect_timeout = Some(CALL_LIMIT);
        config.write_timeout = Some(CALL_LIMIT);
        config.headers.push((USER_AGENT, HeaderValue::from_static(OURSELVES)));
        let client = client(&config)?;
        Ok(Self { config: Some(Arc::new(config)), ..Self::with_client(client) })
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
    pub fn with_client(client: Client) -> Self {
        let reads = Arc::new(Semaphore::new(READS_AT_ONCE));
        Self { client, config: None, limit: CALL_LIMIT, reads }
    }

    /// Another deadline per call than [`CALL_LIMIT`].
    pub fn with_limit(self, limit: Duration) -> Self {
        Self { limit, ..self }
    }

    /// Where the API server is; none: the client was there already.
    pub fn server(&self) -> Option<String> {
        self.config.as_deref().map(|config| config.cluster_url.to_string().trim_end_matches('/').to_owned())
    }

    /// A queue for events of this reporter, and the task that posts them; it ends when the last sender is gone. A shorter deadline than
    /// [`CALL_LIMIT`] is not for them: nobody waits for an event.
    pub fn events(
        &self,
        reporter: ReportingInstance,
    ) -> (events::Events, impl Future<Output = ()> + Send + use<>) {
        events::queue(self.client.clone(), reporter, self.limit.max(CALL_LIMIT))
    }

    /// The claim that has this name now, whole, for people who ask what would become of it.
    pub async fn claim_named(&self, namespace: &str, name: &str) -> Result<ResourceClaim, CallError> {
        let what = || format!("GET resourceclaims {namespace}/{name}");
        call(self.limit, what, self.get(namespace, name)).await
    }

    /// The object of this name.
    pub(super) async fn get<K>(&self, namespace: &str, name: &str) -> Result<K, kube::Error>
    where
        K: ReadKind + Resource<Scope = NamespaceResourceScope>,
    {
        let get = asked::<K>(namespace).get(name, &GetParams::default());
        self.ask(get).await
    }

    /// The object that a request is answered with.
    pub(super) async fn ask<K: ReadKind>(
        &self,
        request: Result<http::Request<Vec<u8>>, kube::core::request::Error>,
    ) -> Result<K, kube::Error> {
        reader::object(&self.client, request.map_err(kube::Error::BuildRequest)?).await
    }

    pub(super) fn client(&self) -> Client {
        self.client.clone()
    }

    /// The longest that one call may take.
    pub fn call_limit(&self) -> Duration {
        self.limit
    }

    pub(super) fn limit(&self) -> Duration {
        self.limit
    }

    /// The claim as it is allocated now, reduced to our driver's part (one GET).
    pub(super) async fn allocated(&self, claim: &ClaimRef) -> Result<AllocatedClaim, ClaimError> {
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

    /// Goes through a list, page by page, each within `limit`.
    pub(super) async fn each_object<K: ReadKind>(
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
    K: ReadKind + Resource<Scope = NamespaceResourceScope>,
{
    kube::core::Request::new(K::url_path(&(), Some(namespace)))
}

/// Err: what is wrong with it, in words.
async fn from_file(path: &Path, context: Option<&str>) -> Result<Config, String> {
    let parts = path.as_os_str().as_bytes().split(|byte| *byte == b':').filter(|part| !part.is_empty());
    let files: Vec<&Path> = parts.map(|part| Path::new(OsStr::from_bytes(part))).collect();
    // Of several, those that do not exist are passed over.
    let mut there = files.iter().filter(|file| files.len() == 1 || file.exists());
    let read = |file: &Path| Kubeconfig::read_from(file).map_err(|error| no_kubeconfig(&error));
    let first = read(there.next().copied().unwrap_or(path))?;
    let kubeconfig = there
        .try_fold(first, |merged, file| merged.merge(read(file)?).map_err(|error| no_kubeconfig(&error)))?;
    let named = context.or(kubeconfig.current_context.as_deref()).filter(|name| !name.is_empty());
    let contexts: Vec<&str> = kubeconfig.contexts.iter().map(|one| one.name.as_str()).collect();
    let listed = match contexts.as_slice() {
        [] => "it has no context at all".to_owned(),
        all => format!("its contexts are {}", all.join(", ")),
    };
    match named {
        None => return Err(format!("it has no current context; name one with --context: {listed}")),
        Some(name) if !contexts.contains(&name) => {
            return Err(format!("context {name:?} does not exist; {listed}"));
        }
        Some(_) => {}
    }
    let options = KubeConfigOptions { context: context.map(str::to_owned), ..KubeConfigOptions::default() };
    Config::from_custom_kubeconfig(kubeconfig, &options).await.map_err(|error| no_kubeconfig(&error))
}

fn no_kubeconfig(error: &KubeconfigError) -> String {
    match error {
        KubeconfigError::ReadConfig(cause, file) => match cause.kind() {
            ErrorKind::NotFound => format!("the path {file:?} does not exist"),
            ErrorKind::IsADirectory => format!("{} is a folder; give the file", file.display()),
            ErrorKind::InvalidData => format!("{} is not a text file (UTF-8)", file.display()),
            _ => format!("{} cannot be read: {cause}", file.display()),
        },
        KubeconfigError::Parse(cause) => {
            format!("it is not valid YAML of a kubeconfig: {}", in_one_line(cause))
        }
        KubeconfigError::LoadClusterOfContext(name) => {
            format!("the context names cluster {name:?}, which is not in its clusters")
        }
        KubeconfigError::MissingClusterUrl => "its cluster has no server".to_owned(),
        other => error_chain(other),
    }
}

/// What is wrong and where, without the picture of the lines around it.
fn in_one_line(error: &impl std::fmt::Display) -> String {
    let words = error.to_string();
    let first = words.lines().next().unwrap_or_default();
    in_plain_words(first.strip_prefix("error: ").unwrap_or(first))
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

#[cfg(test)]
mod tests {
    use super::*;

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
            "current-context: a\ncontexts: [{name: a, context: {cluster: c, user: u, namespace: ml}}, \
             {name: b, context: {cluster: c, user: u, namespace: team-b}}]\n",
        );
        let cluster = |port: u16| {
            format!(
                "current-context: other\nclusters: [{{name: c, cluster: {{server: 'http://127.0.0.1:{port}'}}}}]\n\
                 users: [{{name: u, user: {{}}}}]\n"
            )
        };
        let (first, second) = (write("first", &cluster(1)), write("second", &cluster(2)));
        let missing = folder.path().join("missing").display().to_string();
        let all = format!("{context}:{missing}::{first}:{second}");
        let config = from_file(Path::new(&all), None).await.unwrap();
        assert_eq!((config.cluster_url.port_u16(), config.default_namespace.as_str()), (Some(1), "ml"));
        let other = from_file(Path::new(&all), Some("b")).await.unwrap();
        assert_eq!(other.default_namespace, "team-b");
        let words = async |path: &str, context| from_file(Path::new(path), context).await.unwrap_err();
        assert_eq!(
            words(&all, Some("nowhere")).await,
            "context \"nowhere\" does not exist; its contexts are a, b"
        );
        assert_eq!(words(&missing, None).await, format!("the path {missing:?} does not exist"));
        let no_cluster = words(&context, None).await;
        assert_eq!(no_cluster, "the context names cluster \"c\", which is not in its clusters");
    }
}
