//! `status.devices` of claims (KEP-4817): what is stored, and our entries by server-side apply.
//!
//! One field manager per node: entries of other drivers, and of other nodes' plugins, are never touched.
//! The API server removes entries together with the allocation, so that nothing is to be removed here.

use futures::future::BoxFuture;
use k8s_openapi::api::resource::v1::{AllocatedDeviceStatus, ResourceClaim};
use kube::api::{Patch, PatchParams};
use serde_json::json;
use thiserror::Error;

use super::CallError;
use super::client::{asked, call};
use super::events::EventSubject;
use super::node::NodeCluster;
use crate::model::claim::ClaimRef;
use crate::model::names::{DRIVER, NodeName};

/// The synthetic resource that writing our entries needs a permission for.
const DRIVER_RULE: &str = "resourceclaims/driver";
/// The API server refuses longer names of managers.
const MANAGER_BYTES: usize = 128;

/// What the node reads and writes of a claim to tell people about it.
pub trait ClaimReports: Send + Sync + 'static {
    /// The claim's users and what its `status.devices` says of our devices (one GET).
    fn reported<'a>(&'a self, claim: &'a ClaimRef) -> BoxFuture<'a, Result<Reported, ReportError>>;

    /// Makes `entries` our entries of the claim's `status.devices` (one PATCH). Those that we wrote before
    /// and are not among them go.
    fn report<'a>(
        &'a self,
        claim: &'a ClaimRef,
        entries: &'a [AllocatedDeviceStatus],
    ) -> BoxFuture<'a, Result<(), ReportError>>;
}

/// What is there already.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Reported {
    /// The pods that the claim is reserved for: [`EventSubject::Pod`].
    pub pods: Vec<EventSubject>,
    /// Entries of our driver.
    pub entries: Vec<AllocatedDeviceStatus>,
}

/// Why a claim's device status was not read or not written. The claim itself works on regardless.
#[derive(Debug, Error)]
pub enum ReportError {
    #[error("claim {claim} is gone, or another has its name; nothing to report")]
    Gone { claim: ClaimRef },
    #[error("claim {claim} is no longer allocated; nothing to report")]
    NotAllocated { claim: ClaimRef },
    #[error(
        "status.devices of claim {claim} may not be read or written; the node plugin's ClusterRole needs get on \
         resourceclaims, patch on resourceclaims/status and, from Kubernetes 1.36 on, associated-node:patch on \
         {DRIVER_RULE} with the resource name {DRIVER}"
    )]
    Forbidden {
        claim: ClaimRef,
        #[source]
        source: Box<CallError>,
    },
    #[error(
        "the API server does not keep status.devices; turn on its feature gate DRAResourceClaimDeviceStatus \
         to see there what claims were granted"
    )]
    NotKept,
    #[error("status.devices of claim {claim} was not written; it will be tried again")]
    Call {
        claim: ClaimRef,
        #[source]
        source: Box<CallError>,
    },
}

impl ReportError {
    /// The kind, as a metric label.
    pub fn label(&self) -> &'static str {
        match self {
            Self::Gone { .. } => "gone",
            Self::NotAllocated { .. } => "not_allocated",
            Self::Forbidden { .. } => "forbidden",
            Self::NotKept => "not_kept",
            Self::Call { source, .. } => source.label(),
        }
    }

    fn of(claim: &ClaimRef, source: CallError) -> Self {
        let claim = claim.clone();
        match &source {
            CallError::NotFound { .. } => Self::Gone { claim },
            // Our object has the UID of the claim that is meant; the API server finds another's.
            CallError::Refused { code: 422, message, .. } if message.contains("metadata.uid") => {
                Self::Gone { claim }
            }
            // From 1.36 on, for lack of the second rule.
            CallError::Refused { code: 422, message, .. } if message.contains(DRIVER_RULE) => {
                Self::Forbidden { claim, source: Box::new(source) }
            }
            CallError::Forbidden { .. } => Self::Forbidden { claim, source: Box::new(source) },
            _ => Self::Call { claim, source: Box::new(source) },
        }
    }
}

impl ClaimReports for NodeCluster {
    fn reported<'a>(&'a self, claim: &'a ClaimRef) -> BoxFuture<'a, Result<Reported, ReportError>> {
        Box::pin(async move {
            let what = || format!("GET resourceclaims {}/{}", claim.namespace, claim.name);
            let object = call(self.api().limit(), what, self.api().get(&claim.namespace, &claim.name)).await;
            read(claim, object.map_err(|source| ReportError::of(claim, source))?)
        })
    }

    fn report<'a>(
        &'a self,
        claim: &'a ClaimRef,
        entries: &'a [AllocatedDeviceStatus],
    ) -> BoxFuture<'a, Result<(), ReportError>> {
        Box::pin(async move {
            let what = || format!("PATCH resourceclaims/status {}/{}", claim.namespace, claim.name);
            let apply = PatchParams::apply(&manager(self.node())).force();
            let ours = Patch::Apply(json!({
                "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
                "metadata": {"namespace": claim.namespace, "name": claim.name, "uid": claim.uid},
                "status": {"devices": entries},
            }));
            let claims = asked::<ResourceClaim>(&claim.namespace);
            let written = claims.patch_subresource("status", &claim.name, &apply, &ours);
            let stored = call(self.api().limit(), what, self.api().ask(written)).await;
            let stored = stored.map_err(|source| ReportError::of(claim, source))?;
            match entries.len() > of_ours(stored).len() {
                true => Err(ReportError::NotKept),
                false => Ok(()),
            }
        })
    }
}

fn manager(node: &NodeName) -> String {
    let mut name = format!("tranche-{node}");
    name.truncate(name.floor_char_boundary(MANAGER_BYTES));
    name
}

fn read(claim: &ClaimRef, object: ResourceClaim) -> Result<Reported, ReportError> {
    if object.metadata.uid.as_deref() != Some(claim.uid.as_str()) {
        return Err(ReportError::Gone { claim: claim.clone() });
    }
    let status = object.status.as_ref();
    if status.is_none_or(|status| status.allocation.is_none()) {
        return Err(ReportError::NotAllocated { claim: claim.clone() });
    }
    let users = status.and_then(|status| status.reserved_for.as_ref()).into_iter().flatten();
    let pods = users
        .filter(|user| user.resource == "pods" && user.api_group.as_deref().unwrap_or_default().is_empty())
        .map(|user| EventSubject::Pod {
            namespace: claim.namespace.clone(),
            name: user.name.clone(),
            uid: user.uid.clone(),
        })
        .collect();
    Ok(Reported { pods, entries: of_ours(object) })
}

fn of_ours(object: ResourceClaim) -> Vec<AllocatedDeviceStatus> {
    let entries = object.status.and_then(|status| status.devices).unwrap_or_default();
    entries.into_iter().filter(|entry| entry.driver == DRIVER).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_node_name_is_cut_to_what_a_manager_may_have() {
        assert_eq!(manager(&NodeName::new("node-a")), "tranche-node-a");
        assert_eq!(manager(&NodeName::new("n".repeat(253))).len(), 128);
    }
}
