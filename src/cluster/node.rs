//! The API server, seen from one node: the slices and the Node object are that node's, and so are the entries of a
//! claim's `status.devices` ([`super::status`]).

use std::collections::BTreeMap;
use std::future::Future;

use futures::future::BoxFuture;
use futures::stream::{BoxStream, StreamExt};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::ResourceSlice;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{Api, DeleteParams, PartialObjectMeta, Patch, PatchParams, PostParams, Preconditions};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use serde_json::json;

use super::client::{KubeCluster, call, post};
use super::events::{Events, ReportingInstance};
use super::feed::Which;
use super::guarded::Misfit;
use super::{CallError, ClaimError, Cluster, SliceEvent, SliceRef, StoredSlice};
use crate::model::claim::{AllocatedClaim, ClaimRef};
use crate::model::error_chain;
use crate::model::names::{DRIVER, NodeName};

/// Who sets the node's labels, in `metadata.managedFields`.
pub const LABEL_MANAGER: &str = "tranche-node-labels";

/// A client of the API server that reads and writes what belongs to one node.
#[derive(Clone)]
pub struct NodeCluster {
    api: KubeCluster,
    node: NodeName,
}

impl NodeCluster {
    pub fn new(api: KubeCluster, node: NodeName) -> Self {
        Self { api, node }
    }

    pub(super) fn api(&self) -> &KubeCluster {
        &self.api
    }

    pub(super) fn node(&self) -> &NodeName {
        &self.node
    }

    /// A queue for events that this node reports, and the task that posts them ([`KubeCluster::events`]).
    pub fn events(&self) -> (Events, impl Future<Output = ()> + Send + use<>) {
        self.api.events(ReportingInstance::from(&self.node))
    }

    /// Makes these our labels of the Node object, by server-side apply (one PATCH). Those that we have set before and that
    /// are not among them go, unless somebody else has set them as well.
    ///
    /// # Errors
    /// [`CallError::Conflict`]: somebody else has set one of them to another value; nothing is changed then.
    pub async fn set_labels(&self, labels: &BTreeMap<&'static str, String>) -> Result<(), CallError> {
        let what = || format!("PATCH nodes {}", self.node);
        let ours = Patch::Apply(json!({
            "apiVersion": "v1", "kind": "Node",
            "metadata": {"name": self.node.as_str(), "labels": labels},
        }));
        let (api, apply) = (Api::<Node>::all(self.api.client()), PatchParams::apply(LABEL_MANAGER));
        call(self.api.limit(), what, api.patch_metadata(self.node.as_str(), &apply, &ours)).await.map(|_| ())
    }

    fn all_slices(&self) -> Api<ResourceSlice> {
        Api::all(self.api.client())
    }

    fn selector(&self) -> String {
        format!("spec.driver={DRIVER},spec.nodeName={}", self.node)
    }

    async fn list(&self) -> Result<Vec<StoredSlice>, CallError> {
        let mut all = Vec::new();
        let what = || format!("LIST resourceslices of node {}", self.node);
        let (which, add) = (Which::Fields(self.selector()), |slice| all.push(stored(slice)));
        self.api.each_object::<ResourceSlice>(&which, self.api.limit(), what, add).await?;
        Ok(all)
    }

    async fn create(&self, slice: &ResourceSlice, how: PostParams) -> Result<ResourceSlice, CallError> {
        let meta = &slice.metadata;
        let name = || meta.name.as_ref().or(meta.generate_name.as_ref()).map_or("", String::as_str);
        let verb = if how.dry_run { "CREATE (dry run)" } else { "CREATE" };
        let what = || format!("{verb} resourceslices {}", name());
        call(self.api.limit(), what, self.all_slices().create(&how, slice)).await
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
        match call(self.api.limit(), what, api.delete(&slice.name, &params)).await {
            Ok(_) | Err(CallError::NotFound { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }
}

impl Cluster for NodeCluster {
    fn claim<'a>(&'a self, claim: &'a ClaimRef) -> BoxFuture<'a, Result<AllocatedClaim, ClaimError>> {
        Box::pin(self.api.allocated(claim))
    }

    fn node_uid(&self) -> BoxFuture<'_, Result<String, CallError>> {
        Box::pin(async move {
            let api = Api::<PartialObjectMeta<Node>>::all(self.api.client());
            let what = || format!("GET nodes {}", self.node);
            let node = call(self.api.limit(), what, api.get(self.node.as_str())).await?;
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
        let api = Api::<PartialObjectMeta<ResourceSlice>>::all(self.api.client());
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
            call(self.api.limit(), what, api.replace(name, &post(), slice)).await
        })
    }

    fn delete_slice<'a>(&'a self, slice: &'a SliceRef) -> BoxFuture<'a, Result<(), CallError>> {
        Box::pin(self.delete(slice))
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
    use kube::Client;
    use kube::client::Body;

    use super::*;
    use crate::cluster::client::READS_AT_ONCE;
    use crate::cluster::{CALL_LIMIT, ClaimState};
    use crate::model::names::ClaimUid;

    #[tokio::test]
    async fn a_burst_of_claims_is_read_a_few_at_a_time_and_all_are_answered() {
        let (service, mut server) = tower_test::mock::pair::<Request<Body>, Response<Body>>();
        let cluster =
            NodeCluster::new(KubeCluster::with_client(Client::new(service, "default")), "node-a".into());
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
