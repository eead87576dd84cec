//! Everything that the controller follows, as one stream of changes that begins anew after each interruption.

use futures::stream::{self, BoxStream, StreamExt, select_all};
use k8s_openapi::api::core::v1::{Namespace, Node, Pod};
use k8s_openapi::api::resource::v1::{DeviceClass, DeviceTaintRule, ResourceClaim, ResourceSlice};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;
use kube::api::Api;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use serde::de::DeserializeOwned;

use super::KubeCluster;
use super::guarded::Guarded;
use crate::model::error_chain;
use crate::model::names::{DRIVER, OPT_IN_LABEL, OPT_IN_VALUE};

/// Pods that have ended use nothing: they leave the watch as if they were deleted.
pub(super) const LIVE_PODS: &str = "status.phase!=Succeeded,status.phase!=Failed";

/// What happened to an object of one of the kinds.
#[derive(Debug, Clone)]
pub enum Change {
    Pod(Seen<Pod>),
    Node(Seen<Node>),
    Claim(Seen<ResourceClaim>),
    Slice(Seen<ResourceSlice>),
    Class(Seen<DeviceClass>),
    TaintRule(Seen<DeviceTaintRule>),
    /// One that has opted in.
    Namespace(Seen<Namespace>),
}

#[derive(Debug, Clone)]
pub enum Seen<K> {
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
        meta: Box<ObjectMeta>,
        listed: bool,
        problem: String,
    },
    /// The watch is interrupted; it is tried again.
    Interrupted {
        problem: String,
    },
}

impl KubeCluster {
    /// Pods that have not ended, nodes, claims, device classes, taint rules, the slices of our driver, and the
    /// namespaces that have opted in. Each list is consistent: nothing older than the moment at which it was asked for.
    ///
    /// API servers before 1.37 serve no taint rules of version v1: there are none then, and it is asked again.
    pub fn feed(&self) -> BoxStream<'static, Change> {
        let all = watcher::Config::default;
        let slices = all().fields(&format!("spec.driver={DRIVER}"));
        select_all([
            follow(Api::all(self.client()), all().fields(LIVE_PODS), Change::Pod),
            follow(Api::all(self.client()), all(), Change::Node),
            follow(Api::all(self.client()), all(), Change::Claim),
            follow(Api::all(self.client()), slices, Change::Slice),
            follow(Api::all(self.client()), all(), Change::Class),
            taint_rules(Api::all(self.client())),
            follow(Api::all(self.client()), all().labels(&opted_in()), Change::Namespace),
        ])
        .boxed()
    }
}

/// A namespace that loses the label leaves the list, as if it were deleted.
pub(super) fn opted_in() -> String {
    format!("{OPT_IN_LABEL}={OPT_IN_VALUE}")
}

fn follow<K>(
    api: Api<Guarded<K>>,
    config: watcher::Config,
    wrap: fn(Seen<K>) -> Change,
) -> BoxStream<'static, Change>
where
    K: Resource + Clone + std::fmt::Debug + DeserializeOwned + Send + 'static,
    K::DynamicType: Default,
{
    watcher(api, config).default_backoff().map(move |event| wrap(seen(event))).boxed()
}

/// The kind is not served, or not to us: then there are none that anybody could be meant by.
const NOT_SERVED: u16 = 404;
const FORBIDDEN: u16 = 403;

fn taint_rules(api: Api<Guarded<DeviceTaintRule>>) -> BoxStream<'static, Change> {
    let none = || vec![Seen::Anew, Seen::Complete];
    let changes = move |event: watcher::Result<_>| match event.as_ref().err().and_then(refused) {
        Some(NOT_SERVED) => none(),
        Some(FORBIDDEN) => none().into_iter().chain([seen(event)]).collect(),
        _ => vec![seen(event)],
    };
    let events = watcher(api, watcher::Config::default()).default_backoff();
    events.flat_map(move |event| stream::iter(changes(event)).map(Change::TaintRule)).boxed()
}

/// The status with which a list or a watch was refused.
fn refused(error: &watcher::Error) -> Option<u16> {
    match error {
        watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status)) => Some(status.code),
        _ => None,
    }
}

fn seen<K: Resource>(event: watcher::Result<Event<Guarded<K>>>) -> Seen<K> {
    match event {
        Ok(Event::Init) => Seen::Anew,
        Ok(Event::InitDone) => Seen::Complete,
        Ok(Event::InitApply(Guarded(Ok(object)))) => Seen::Listed(Box::new(object)),
        Ok(Event::Apply(Guarded(Ok(object)))) => Seen::Stored(Box::new(object)),
        Ok(Event::InitApply(Guarded(Err(invalid)))) => {
            Seen::Unreadable { meta: Box::new(invalid.metadata), listed: true, problem: invalid.problem }
        }
        Ok(Event::Apply(Guarded(Err(invalid)))) => {
            Seen::Unreadable { meta: Box::new(invalid.metadata), listed: false, problem: invalid.problem }
        }
        Ok(Event::Delete(Guarded(Ok(object)))) => Seen::Deleted(Box::new(object.meta().clone())),
        Ok(Event::Delete(Guarded(Err(invalid)))) => Seen::Deleted(Box::new(invalid.metadata)),
        Err(error) => Seen::Interrupted { problem: error_chain(&error) },
    }
}
