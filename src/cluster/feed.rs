//! Everything that the controller follows, as one stream of changes that begins anew after each interruption.

use std::collections::VecDeque;
use std::time::Duration;

use futures::stream::{self, BoxStream, StreamExt, select_all};
use k8s_openapi::api::core::v1::{Namespace, Node, PersistentVolume, Pod};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::resource::v1::{DeviceClass, DeviceTaintRule, ResourceClaim, ResourceSlice};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Client;
use kube::api::{ListParams, WatchParams};
use tokio::time::Instant;

use super::KubeCluster;
use super::bind_requests::BindRequest;
use super::guarded::{Misfit, ReadKind, read};
use super::pod_groups::{
    Kai, KubernetesV1Alpha2, KubernetesV1Alpha3, KubernetesV1Beta1, Of, PodGroup, PodGroupApi, Served,
    Volcano, of_any,
};
use super::reader::{PAGE, PAGES_MAX, Page, ReadError, Watch, WatchItem, version_of};
use crate::model::error_chain;
use crate::model::names::DRIVER;
use crate::model::time::back_off;

/// Pods that have ended use nothing: they leave the watch as if they were deleted.
pub(super) const LIVE_PODS: &str = "status.phase!=Succeeded,status.phase!=Failed";

/// After so long the API server is to end a watch, so that one whose connection has died unnoticed does too.
const WATCH: Duration = Duration::from_secs(290);
/// So much longer is waited for its end.
const WATCH_GRACE: Duration = Duration::from_secs(5);
/// The first pause after a failure; each further one is twice as long, up to the last.
const FIRST_PAUSE: Duration = Duration::from_millis(800);
const LAST_PAUSE: Duration = Duration::from_secs(30);
/// A watch that ends sooner and has brought nothing has failed.
const TOO_SOON: Duration = Duration::from_secs(1);

/// What happened to an object of one of the kinds.
#[derive(Debug, Clone)]
pub enum Change {
    Pod(WatchEvent<Pod>),
    Node(WatchEvent<Node>),
    Claim(WatchEvent<ResourceClaim>),
    Slice(WatchEvent<ResourceSlice>),
    Class(WatchEvent<DeviceClass>),
    TaintRule(WatchEvent<DeviceTaintRule>),
    Namespace(WatchEvent<Namespace>),
    PodGroup(PodGroupApi, WatchEvent<PodGroup>),
    BindRequest(WatchEvent<BindRequest>),
    Budget(WatchEvent<PodDisruptionBudget>),
    Volume(WatchEvent<PersistentVolume>),
}

/// What a watch tells of the objects of a kind, or of itself.
#[derive(Debug, Clone)]
pub enum WatchEvent<K> {
    /// A list of everything begins.
    Anew,
    /// One object of that list.
    Listed(Box<K>),
    /// The list is complete: what it did not name is gone.
    Complete,
    Stored(Box<K>),
    Deleted(Box<ObjectMeta>),
    /// It is there, but does not fit our types. `listed`: it belongs to the list.
    Unreadable {
        /// What can be read: its name at least, and of a claim the devices that its allocation names. Without a UID
        /// nobody knows which object it is.
        rest: Box<K>,
        listed: bool,
        problem: String,
    },
    /// The watch is interrupted; it is tried again.
    Interrupted {
        problem: String,
        /// Not to be had: the API server lets us see none of the kind.
        is_forbidden: bool,
    },
}

impl KubeCluster {
    /// Pods that have not ended, nodes, claims, device classes, taint rules, the slices of our driver, namespaces,
    /// PodDisruptionBudgets and PersistentVolumes if they may be seen, PodGroups of every API that has some, and KAI's
    /// BindRequests. Each list is consistent: nothing older than the moment at which it was asked for.
    ///
    /// API servers before 1.37 serve no taint rules of version v1, and PodGroups and BindRequests are served where their
    /// scheduler is installed: elsewhere there are none, and it is asked again.
    pub fn feed(&self) -> BoxStream<'static, Change> {
        let slices = format!("spec.driver={DRIVER}");
        let client = || self.client();
        select_all([
            Follower::new(client(), Which::Fields(LIVE_PODS.to_owned())).changes(Change::Pod),
            Follower::new(client(), Which::All).changes(Change::Node),
            Follower::new(client(), Which::All).changes(Change::Claim),
            Follower::new(client(), Which::Fields(slices)).changes(Change::Slice),
            Follower::new(client(), Which::All).changes(Change::Class),
            Follower { may_lack: Lack::ServedOrSeen, ..Follower::new(client(), Which::All) }
                .changes(Change::TaintRule),
            Follower::new(client(), Which::All).changes(Change::Namespace),
            Follower { may_lack: Lack::ServedOrSeen, ..Follower::new(client(), Which::All) }
                .changes(Change::Budget),
            Follower { may_lack: Lack::ServedOrSeen, ..Follower::new(client(), Which::All) }
                .changes(Change::Volume),
            self.pod_groups::<Volcano>(PodGroupApi::Volcano),
            self.pod_groups::<Kai>(PodGroupApi::Kai),
            self.pod_groups::<KubernetesV1Beta1>(PodGroupApi::KubernetesV1Beta1),
            self.pod_groups::<KubernetesV1Alpha3>(PodGroupApi::KubernetesV1Alpha3),
            self.pod_groups::<KubernetesV1Alpha2>(PodGroupApi::KubernetesV1Alpha2),
            Follower { may_lack: Lack::ServedOrSeen, ..Follower::new(client(), Which::All) }
                .changes(Change::BindRequest),
        ])
        .boxed()
    }

    fn pod_groups<S: Served>(&self, api: PodGroupApi) -> BoxStream<'static, Change> {
        let follower = Follower::<Of<S>>::new(self.client(), Which::All);
        Follower { may_lack: Lack::Served, ..follower }
            .changes(move |seen| Change::PodGroup(api, of_any(seen)))
    }
}

/// Which objects of a kind are asked for.
#[derive(Debug, Clone)]
pub(super) enum Which {
    All,
    /// Those that a field selector is true of.
    Fields(String),
    /// Those of a namespace, and of these the ones that a field selector is true of; empty: all.
    In {
        namespace: String,
        fields: String,
    },
}

impl Which {
    /// Of fields.
    fn selector(&self) -> Option<String> {
        match self {
            Self::All => None,
            Self::Fields(fields) | Self::In { fields, .. } => {
                Some(fields.clone()).filter(|all| !all.is_empty())
            }
        }
    }

    fn namespace(&self) -> Option<&str> {
        match self {
            Self::In { namespace, .. } => Some(namespace),
            Self::All | Self::Fields(_) => None,
        }
    }
}

/// The kind is not served, or not to us: then there are none that anybody could be meant by.
const NOT_SERVED: u16 = 404;
const FORBIDDEN: u16 = 403;
/// What is asked for is history, or no version at all: the list must be read anew.
const EXPIRED: [Option<u16>; 2] = [Some(410), Some(400)];

/// How far a follower has read.
enum Position {
    /// A list is to begin.
    Anew,
    /// So many pages of it were read; the next one begins at `next`.
    Pages {
        read: usize,
        next: String,
        version: String,
    },
    Page {
        read: usize,
        page: Box<Page>,
        version: String,
    },
    /// A watch is to begin at this version.
    Watch {
        version: String,
    },
    Watching {
        watch: Box<Watch>,
        version: String,
        since: Instant,
        brought: bool,
    },
}

/// What may be missing for a kind, so that there is none of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lack {
    Nothing,
    /// The API server may not serve it.
    Served,
    /// The same, or it may not let us see it.
    ServedOrSeen,
}

/// Lists a kind, watches it from there, and begins again when it must.
struct Follower<K> {
    client: Client,
    which: Which,
    may_lack: Lack,
    /// A list was read to its end.
    listed: bool,
    at: Position,
    /// In a row.
    failures: u32,
    due: VecDeque<WatchEvent<K>>,
}

impl<K: ReadKind> Follower<K> {
    fn new(client: Client, which: Which) -> Self {
        let due = VecDeque::new();
        Self { client, which, may_lack: Lack::Nothing, listed: false, at: Position::Anew, failures: 0, due }
    }

    fn changes(self, wrap: impl Fn(WatchEvent<K>) -> Change + Send + 'static) -> BoxStream<'static, Change> {
        let events = stream::unfold(self, |mut follower: Self| async move {
            let seen = follower.next().await;
            Some((seen, follower))
        });
        events.map(wrap).boxed()
    }

    async fn next(&mut self) -> WatchEvent<K> {
        loop {
            if let Some(seen) = self.due.pop_front() {
                return seen;
            }
            if let Err(error) = self.step().await {
                self.failed(&error);
            }
        }
    }

    /// One step on; on an error it is not done. What is seen by it is due.
    async fn step(&mut self) -> Result<(), ReadError> {
        match &mut self.at {
            Position::Anew => {
                rest(self.failures).await;
                self.due.push_back(WatchEvent::Anew);
                self.at = Position::Pages { read: 0, next: String::new(), version: String::new() };
            }
            Position::Pages { read: PAGES_MAX.., .. } => return Err(ReadError::Endless),
            Position::Pages { read, next, version } => {
                let list = list::<K>(&self.which, next)?;
                let page = Box::new(Page::open(&self.client, list).await?);
                self.at = Position::Page { read: *read + 1, page, version: std::mem::take(version) };
            }
            Position::Page { page, .. } => match page.next().await? {
                Some(piece) => self.due.push_back(seen(read(&piece), true)),
                None => self.turn_page(),
            },
            Position::Watch { version } => {
                rest(self.failures).await;
                let watch = watch::<K>(&self.which, version)?;
                let watch = Box::new(Watch::open(&self.client, watch, WATCH + WATCH_GRACE).await?);
                let version = std::mem::take(version);
                self.at = Position::Watching { watch, version, since: Instant::now(), brought: false };
            }
            Position::Watching { watch, version, brought, .. } => {
                let told = watch.next().await?;
                if told.is_some() {
                    (*brought, self.failures) = (true, 0);
                }
                match told {
                    Some(WatchItem::Stored(piece)) => {
                        version_of(&piece.bytes).into_iter().for_each(|fresh| *version = fresh);
                        self.due.push_back(seen(read(&piece), false));
                    }
                    Some(WatchItem::Deleted(piece)) => {
                        version_of(&piece.bytes).into_iter().for_each(|fresh| *version = fresh);
                        let object = read::<K>(&piece).unwrap_or_else(|misfit| misfit.rest);
                        self.due.push_back(WatchEvent::Deleted(Box::new(object.metadata().clone())));
                    }
                    Some(WatchItem::Bookmark(fresh)) => *version = fresh,
                    None => self.watch_again(),
                }
            }
        }
        Ok(())
    }

    /// The page was read to its end.
    fn turn_page(&mut self) {
        let Position::Page { read, page, version } = std::mem::replace(&mut self.at, Position::Anew) else {
            return;
        };
        let about = page.about();
        // All pages are of one version: that of the first.
        let version = if version.is_empty() { about.resource_version } else { version };
        if about.next.is_empty() {
            (self.failures, self.listed) = (0, true);
            self.due.push_back(WatchEvent::Complete);
            self.at = Position::Watch { version };
        } else {
            self.at = Position::Pages { read, next: about.next, version };
        }
    }

    /// The watch has ended without an error.
    fn watch_again(&mut self) {
        let Position::Watching { version, since, brought, .. } =
            std::mem::replace(&mut self.at, Position::Anew)
        else {
            return;
        };
        self.failures = if brought || since.elapsed() >= TOO_SOON { 0 } else { self.failures + 1 };
        self.at = Position::Watch { version };
    }

    fn failed(&mut self, error: &ReadError) {
        self.failures = self.failures.saturating_add(1);
        let code = error.code();
        let at = std::mem::replace(&mut self.at, Position::Anew);
        let lacks = match code {
            Some(NOT_SERVED) => self.may_lack != Lack::Nothing,
            // What has been seen is not gone because a right is.
            Some(FORBIDDEN) => self.may_lack == Lack::ServedOrSeen && !self.listed,
            _ => false,
        };
        if let (Position::Watch { version } | Position::Watching { version, .. }, true) =
            (at, !lacks && !EXPIRED.contains(&code))
        {
            self.at = Position::Watch { version };
        }
        if lacks {
            self.due.extend([WatchEvent::Anew, WatchEvent::Complete]);
        }
        let is_forbidden = code == Some(FORBIDDEN);
        if !lacks || is_forbidden {
            self.due.push_back(WatchEvent::Interrupted { problem: error_chain(error), is_forbidden });
        }
    }
}

/// The pause after so many failures in a row. It differs a little each time, so that those who failed together do not
/// come again together.
async fn rest(failures: u32) {
    if failures > 0 {
        let pause = back_off(FIRST_PAUSE, failures, LAST_PAUSE);
        tokio::time::sleep(pause.mul_f64(0.75 + 0.5 * fastrand::f64())).await;
    }
}

/// A page of a list, the first if `next` is empty.
pub(super) fn list<K: ReadKind>(which: &Which, next: &str) -> Result<http::Request<Vec<u8>>, kube::Error> {
    let mut params = ListParams::default().limit(PAGE);
    params.field_selector = which.selector();
    if !next.is_empty() {
        params = params.continue_token(next);
    }
    let request = kube::core::Request::new(K::url_path(&(), which.namespace())).list(&params);
    request.map_err(kube::Error::BuildRequest)
}

fn watch<K: ReadKind>(which: &Which, version: &str) -> Result<http::Request<Vec<u8>>, kube::Error> {
    let mut params = WatchParams::default().timeout(u32::try_from(WATCH.as_secs()).unwrap_or(u32::MAX));
    params.field_selector = which.selector();
    let request = kube::core::Request::new(K::url_path(&(), which.namespace())).watch(&params, version);
    request.map_err(kube::Error::BuildRequest)
}

/// An object, as it is seen.
pub(super) fn seen<K>(object: Result<K, Misfit<K>>, listed: bool) -> WatchEvent<K> {
    match object {
        Ok(object) if listed => WatchEvent::Listed(Box::new(object)),
        Ok(object) => WatchEvent::Stored(Box::new(object)),
        Err(Misfit { rest, problem }) => WatchEvent::Unreadable { rest: Box::new(rest), listed, problem },
    }
}
