//! The controller's writes to claims: a hold, a finalizer, an allocation, and their end. Each names the version
//! that it is meant for, so that a claim that somebody else changed is never written over, and each touches only
//! what it is about: of the metadata single fields, or the status.

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::resource::v1::{AllocationResult, ResourceClaim, ResourceClaimStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::PartialObjectMeta;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use serde_json::{Map, Value, json};

use super::CallError;
use super::client::{KubeCluster, asked, call};
use super::reader::answer;
use crate::model::claim::ClaimRef;

/// A claim as it was when the decision about it was made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimVersion {
    pub claim: ClaimRef,
    pub resource_version: String,
}

/// What is written into a claim's metadata. Annotations are changed one by one, finalizers as a list.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Marks {
    /// All finalizers that the claim is to have; none: as they are.
    pub finalizers: Option<Vec<String>>,
    /// By name; no text: taken away.
    pub annotations: Vec<(String, Option<String>)>,
}

impl Marks {
    pub fn is_empty(&self) -> bool {
        self.finalizers.is_none() && self.annotations.is_empty()
    }
}

impl KubeCluster {
    /// Creates a claim; the answer is what the API server stored.
    pub async fn create_claim(&self, claim: &ResourceClaim) -> Result<ResourceClaim, CallError> {
        let (namespace, name) = (claim.metadata.namespace.as_deref(), claim.metadata.name.as_deref());
        let (namespace, name) = (namespace.unwrap_or_default(), name.unwrap_or_default());
        let what = || format!("CREATE resourceclaims {namespace}/{name}");
        let create = async {
            let body = serde_json::to_vec(claim).map_err(kube::Error::SerdeError)?;
            self.ask(asked::<ResourceClaim>(namespace).create(&PostParams::default(), body)).await
        };
        call(self.limit(), what, create).await
    }

    /// Writes metadata of a claim.
    pub async fn mark_claim(&self, at: &ClaimVersion, marks: &Marks) -> Result<ResourceClaim, CallError> {
        let mut metadata = precondition(at);
        if let Some(finalizers) = &marks.finalizers {
            metadata.insert("finalizers".into(), json!(finalizers));
        }
        if !marks.annotations.is_empty() {
            let annotations: Map<String, Value> =
                marks.annotations.iter().map(|(name, text)| (name.clone(), json!(text))).collect();
            metadata.insert("annotations".into(), annotations.into());
        }
        let patch = Patch::Merge(json!({"metadata": metadata}));
        let what = || format!("PATCH resourceclaims {}/{}", at.claim.namespace, at.claim.name);
        let written = asked::<ResourceClaim>(&at.claim.namespace).patch(
            &at.claim.name,
            &PatchParams::default(),
            &patch,
        );
        match call(self.limit(), what, self.ask(written)).await {
            // Perhaps for the way in which its parameters are written.
            Err(CallError::Refused { code: 422, .. }) => self.mark_verbatim(at, marks).await,
            answer => answer,
        }
    }

    /// Writes or clears the allocation of a claim; the answer is what the API server stored, which may lack
    /// fields. All else in a claim's status is about its allocation, and goes with it.
    ///
    /// The status as a whole: the same as a patch of it took the API server a fifth more of its time.
    pub async fn set_allocation(
        &self,
        at: &ClaimVersion,
        allocation: Option<&AllocationResult>,
    ) -> Result<ResourceClaim, CallError> {
        let status =
            ResourceClaimStatus { allocation: allocation.cloned(), ..ResourceClaimStatus::default() };
        let metadata = ObjectMeta {
            namespace: Some(at.claim.namespace.clone()),
            name: Some(at.claim.name.clone()),
            uid: Some(at.claim.uid.to_string()),
            resource_version: Some(at.resource_version.clone()),
            ..ObjectMeta::default()
        };
        // Of what is no status the API server keeps what it has.
        let claim = ResourceClaim { metadata, spec: None, status: Some(status) };
        let what = || format!("PUT resourceclaims/status {}/{}", at.claim.namespace, at.claim.name);
        let write = async {
            let body = serde_json::to_vec(&claim).map_err(kube::Error::SerdeError)?;
            let claims = asked::<ResourceClaim>(&at.claim.namespace);
            self.ask(claims.replace_subresource("status", &at.claim.name, &PostParams::default(), body)).await
        };
        call(self.limit(), what, write).await
    }

    /// Deletes a claim if it still is as it was seen. One that is gone already counts as deleted.
    pub async fn delete_claim(&self, at: &ClaimVersion) -> Result<(), CallError> {
        let (uid, resource_version) = (at.claim.uid.to_string(), at.resource_version.clone());
        let preconditions = Preconditions { uid: Some(uid), resource_version: Some(resource_version) };
        let params = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
        let what = || format!("DELETE resourceclaims {}/{}", at.claim.namespace, at.claim.name);
        // Answered with the claim or a status, neither of which is read.
        let claims = asked::<ResourceClaim>(&at.claim.namespace);
        let delete = async {
            let delete = claims.delete(&at.claim.name, &params).map_err(kube::Error::BuildRequest)?;
            answer(&self.client(), delete).await.map(drop)
        };
        match call(self.limit(), what, delete).await {
            Ok(()) | Err(CallError::NotFound { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// UID of a Deployment, for owner references; none if there is no such Deployment.
    pub async fn deployment_uid(&self, namespace: &str, name: &str) -> Result<Option<String>, CallError> {
        let api = Api::<PartialObjectMeta<Deployment>>::namespaced(self.client(), namespace);
        let what = || format!("GET deployments {namespace}/{name}");
        match call(self.limit(), what, api.get(name)).await {
            Ok(found) => Ok(found.metadata.uid),
            Err(CallError::NotFound { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

fn precondition(at: &ClaimVersion) -> Map<String, Value> {
    let mut metadata = Map::new();
    metadata.insert("uid".into(), at.claim.uid.as_str().into());
    metadata.insert("resourceVersion".into(), at.resource_version.as_str().into());
    metadata
}
