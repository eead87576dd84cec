//! BindRequests of KAI-Scheduler (`scheduling.run.ai/v1alpha2`): what its scheduler has decided for a pod, and what its
//! binder writes a moment later. Only what tells which devices are meant. The API is optional.

use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::resource::v1::DeviceAllocationResult;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Deserialize;

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct BindRequest {
    pub metadata: ObjectMeta,
    pub spec: BindRequestSpec,
    pub status: BindRequestStatus,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct BindRequestSpec {
    /// Of the same namespace.
    pub pod_name: Option<String>,
    pub resource_claim_allocations: Option<Vec<ClaimAllocation>>,
}

/// What a claim of the pod is to get.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ClaimAllocation {
    pub allocation: Option<Allocation>,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Allocation {
    pub devices: Option<DeviceAllocationResult>,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct BindRequestStatus {
    /// `Pending`, `Succeeded`, or `Failed`, which is tried again until KAI's scheduler takes the request back.
    pub phase: Option<String>,
}

impl BindRequest {
    /// The binder has written everything.
    pub fn is_done(&self) -> bool {
        self.status.phase.as_deref() == Some("Succeeded")
    }
}

impl k8s_openapi::Resource for BindRequest {
    const API_VERSION: &'static str = "scheduling.run.ai/v1alpha2";
    const GROUP: &'static str = "scheduling.run.ai";
    const KIND: &'static str = "BindRequest";
    const VERSION: &'static str = "v1alpha2";
    const URL_PATH_SEGMENT: &'static str = "bindrequests";
    type Scope = NamespaceResourceScope;
}

impl k8s_openapi::Metadata for BindRequest {
    type Ty = ObjectMeta;

    fn metadata(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn metadata_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}
