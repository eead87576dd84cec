//! Everything that the controller follows, as one stream of changes that begins anew after each interruption.

use futures::stream::{BoxStream, StreamExt, select_all};
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceSlice};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;
use kube::api::Api;
use kube::core::DeserializeGuard;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use serde::de::DeserializeOwned;

use super::KubeCluster;
use crate::model::error_chain;
use crate::model::names::DRIVER;

/// Pods that have ended use nothing: they leave the watch as if they were deleted.
const LIVE_PODS: &str = "status.phase!=Succeeded,status.phase!=Failed";

/// What happened to an object of one of the kinds.
#[derive(Debug, Clone)]
pub enum Change {
    Pod(Seen<Pod>),
    Node(Seen<Node>),
    Claim(Seen<ResourceClaim>),
    Slice(Seen<ResourceSlice>),
    Class(Seen<DeviceClass>),
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
    /// Pods that have not ended, nodes, claims, device classes, and the slices of our driver. Each list is
    /// consistent: nothing older than the moment at which it was asked for.
    pub fn feed(&self) -> BoxStream<'static, Change> {
        let all = watcher::Config::default;
        let slices = all().fields(&format!("spec.driver={DRIVER}"));
        select_all([
            follow(Api::all(self.client()), all().fields(LIVE_PODS), Change::Pod),
            follow(Api::all(self.client()), all(), Change::Node),
            follow(Api::all(self.client()), all(), Change::Claim),
            follow(Api::all(self.client()), slices, Change::Slice),
            follow(Api::all(self.client()), all(), Change::Class),
        ])
        .boxed()
    }
}

fn follow<K>(
    api: Api<DeserializeGuard<K>>,
    config: watcher::Config,
    wrap: fn(Seen<K>) -> Change,
) -> BoxStream<'static, Change>
where
    K: Resource + Clone + std::fmt::Debug + DeserializeOwned + Send + 'static,
    K::DynamicType: Default,
{
    watcher(api, config).default_backoff().map(move |event| wrap(seen(event))).boxed()
}

fn seen<K: Resource>(event: watcher::Result<Event<DeserializeGuard<K>>>) -> Seen<K> {
    match event {
        Ok(Event::Init) => Seen::Anew,
        Ok(Event::InitDone) => Seen::Complete,
        Ok(Event::InitApply(DeserializeGuard(Ok(object)))) => Seen::Listed(Box::new(object)),
        Ok(Event::Apply(DeserializeGuard(Ok(object)))) => Seen::Stored(Box::new(object)),
        Ok(Event::InitApply(DeserializeGuard(Err(invalid)))) => {
            Seen::Unreadable { meta: Box::new(invalid.metadata), listed: true, problem: invalid.error }
        }
        Ok(Event::Apply(DeserializeGuard(Err(invalid)))) => {
            Seen::Unreadable { meta: Box::new(invalid.metadata), listed: false, problem: invalid.error }
        }
        Ok(Event::Delete(DeserializeGuard(Ok(object)))) => Seen::Deleted(Box::new(object.meta().clone())),
        Ok(Event::Delete(DeserializeGuard(Err(invalid)))) => Seen::Deleted(Box::new(invalid.metadata)),
        Err(error) => Seen::Interrupted { problem: error_chain(&error) },
    }
}
