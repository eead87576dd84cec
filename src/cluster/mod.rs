//! Edge to the API server: reads claims, reads and writes this node's ResourceSlices, tells claims' device
//! status, posts events.
//! Decides nothing: what to publish is decided in `slices`, what to do about a claim in `prepare`.
//!
//! Every call has a deadline ([`CALL_LIMIT`]) and there is no client-side rate limit: callers pace
//! themselves. Nothing is cached; a claim is read with a GET at each question (KEP-3063: the UID must be
//! compared with kubelet's). Only our own slices are ever written with a whole-object PUT, since a field
//! that these types do not know would be lost by it; and claims that JSON cannot write, byte for byte.
//!
//! * [`Cluster`]: a node's questions and writes; [`NodeCluster`]: the real API server for them; [`KubeCluster`]: the
//!   real API server for whatever belongs to no node
//! * [`read_claim`]: a ResourceClaim, reduced to our driver's part
//! * [`status`]: `status.devices` of claims, by server-side apply
//! * [`feed`]: everything that the controller follows, [`pod_groups`] of whoever groups pods and KAI's
//!   [`bind_requests`] among it; [`allocation`]: its writes to claims, `verbatim` those that no JSON can do; [`lease`]:
//!   its lease
//! * `reader`: lists, watches and objects as bytes, which tenants write: `cut` into one object at a time, of which
//!   `sieve` passes on what is wanted, for `guarded` to parse
//! * [`eviction`]: evictions of pods; `anew`: whether a Job bears one
//! * [`events`]: events on claims and pods, best effort
//! * [`Workload`]: what makes pods; with quotas, templates and events, for people who ask about one pod
//! * [`KubeCluster::node_pages`]: what node plugins answer, through the API server's pod proxy, for people who look at
//!   what is used
//! * [`webhooks`]: certificates, webhook configurations, the controller's class
//!
//! May import: model. May name: kube, k8s-openapi, rustls, fastrand, futures, http, jiff, prost, serde, tokio, serde_json, tracing.

pub mod allocation;
mod anew;
pub mod bind_requests;
mod client;
mod cut;
mod error;
pub mod events;
pub mod eviction;
pub mod feed;
mod guarded;
pub mod lease;
mod lookups;
pub mod makers;
mod mirror;
mod node;
pub mod pod_groups;
mod proxied;
pub mod read_claim;
mod reader;
mod sieve;
pub mod status;
mod survey;
pub mod verbatim;
pub mod webhooks;

use std::time::Duration;

use futures::future::BoxFuture;
use futures::stream::BoxStream;
use k8s_openapi::api::resource::v1::ResourceSlice;

pub use client::{ConnectError, Endpoint, Impersonation, KubeCluster};
pub use error::{CallError, ClaimError, ClaimState};
pub use lookups::{ToldEvent, Workload, WorkloadKind};
pub use node::{LABEL_MANAGER, NodeCluster};
pub use proxied::{NodePage, NodePlugin, PAGE_BYTES_MAX};
pub use survey::{Denied, Survey};

use crate::model::claim::{AllocatedClaim, ClaimRef};

/// The longest that one call may take.
pub const CALL_LIMIT: Duration = Duration::from_secs(5);

/// What the node asks of the API server.
pub trait Cluster: Send + Sync + 'static {
    /// The claim as it is allocated now, reduced to our driver's part (one GET).
    fn claim<'a>(&'a self, claim: &'a ClaimRef) -> BoxFuture<'a, Result<AllocatedClaim, ClaimError>>;

    /// What has become of a claim that this node holds something for (one GET).
    fn claim_state<'a>(&'a self, claim: &'a ClaimRef) -> BoxFuture<'a, ClaimState> {
        Box::pin(async move { ClaimState::from(self.claim(claim).await) })
    }

    /// The Node object's UID, for owner references.
    fn node_uid(&self) -> BoxFuture<'_, Result<String, CallError>>;

    /// All slices of this node and our driver, consistently (no stale cache).
    fn slices(&self) -> BoxFuture<'_, Result<Vec<StoredSlice>, CallError>>;

    /// What happens to those slices from now on, without end. An error is told and the watch goes on,
    /// with back-off.
    fn watch_slices(&self) -> BoxStream<'static, SliceEvent>;

    /// Creates a slice; the answer is what the API server stored, which may lack fields.
    fn create_slice<'a>(
        &'a self,
        slice: &'a ResourceSlice,
    ) -> BoxFuture<'a, Result<ResourceSlice, CallError>>;

    /// What the API server would store of a new slice (a dry run): nothing is stored.
    fn try_slice<'a>(&'a self, slice: &'a ResourceSlice) -> BoxFuture<'a, Result<ResourceSlice, CallError>>;

    /// Replaces a slice of ours. Its `metadata.resourceVersion` must be the stored one, else
    /// [`CallError::Conflict`].
    fn update_slice<'a>(
        &'a self,
        slice: &'a ResourceSlice,
    ) -> BoxFuture<'a, Result<ResourceSlice, CallError>>;

    /// Deletes a slice if it still is the one that was seen. One that is gone already counts as deleted.
    fn delete_slice<'a>(&'a self, slice: &'a SliceRef) -> BoxFuture<'a, Result<(), CallError>>;
}

/// A stored slice as it was seen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SliceRef {
    pub name: String,
    pub uid: String,
    pub resource_version: String,
}

/// A slice in the API server. One that does not fit our types (another version's, say) is still told by
/// name, so that it cannot hide.
#[derive(Debug, Clone)]
pub enum StoredSlice {
    Readable(Box<ResourceSlice>),
    Unreadable { slice: SliceRef, problem: String },
}

/// What a watch of this node's slices tells.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SliceEvent {
    /// The watch begins anew: anything may have happened before.
    Restarted,
    /// Created or changed.
    Stored(SliceRef),
    /// Deleted: by its name and UID.
    Deleted(SliceRef),
    /// The watch is interrupted; it is tried again.
    Interrupted { problem: String },
}
