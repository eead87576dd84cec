//! Slices of our driver that are no node's, by which the controller mirrors the cluster's products.

use k8s_openapi::api::rbac::v1::ClusterRole;
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::api::{Api, DeleteParams, PartialObjectMeta, Preconditions};

use super::CallError;
use super::client::{KubeCluster, call, post};
use super::feed::Which;
use super::guarded::Misfit;
use crate::model::names::{DRIVER, MIRROR_LABEL};

/// Slices of this kind that are read; nobody makes as many.
const SLICES_MAX: usize = 1000;

impl KubeCluster {
    /// Those that carry the label. Of one that cannot be read, its name.
    ///
    /// # Errors
    /// The API server does not answer, or does not let the caller look.
    pub async fn mirror_slices(&self) -> Result<Vec<ResourceSlice>, CallError> {
        let mut all = Vec::new();
        let what = || "LIST resourceslices of no node".to_owned();
        let add = |slice: Result<ResourceSlice, Misfit<ResourceSlice>>| {
            let slice = slice.unwrap_or_else(|misfit| misfit.rest);
            let labels = slice.metadata.labels.as_ref();
            if labels.is_some_and(|all| all.contains_key(MIRROR_LABEL)) && all.len() < SLICES_MAX {
                all.push(slice);
            }
        };
        let which = Which::Fields(format!("spec.driver={DRIVER},spec.nodeName="));
        self.each_object(&which, self.limit(), what, add).await?;
        Ok(all)
    }

    /// Creates a slice, or writes over the version that it names.
    ///
    /// # Errors
    /// [`CallError::Conflict`]: somebody else was first.
    pub async fn write_slice(&self, slice: &ResourceSlice, is_there: bool) -> Result<(), CallError> {
        let name = slice.metadata.name.as_deref().unwrap_or_default();
        let api = Api::<ResourceSlice>::all(self.client());
        let what = || format!("{} resourceslices {name}", if is_there { "UPDATE" } else { "CREATE" });
        match is_there {
            true => call(self.limit(), what, api.replace(name, &post(), slice)).await.map(drop),
            false => call(self.limit(), what, api.create(&post(), slice)).await.map(drop),
        }
    }

    /// Deletes a slice if it still is the one that was seen. One that is gone already counts as deleted.
    ///
    /// # Errors
    /// As [`Self::mirror_slices`].
    pub async fn delete_slice(&self, slice: &ResourceSlice) -> Result<(), CallError> {
        let name = slice.metadata.name.as_deref().unwrap_or_default();
        let preconditions = Preconditions { uid: slice.metadata.uid.clone(), resource_version: None };
        let params = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
        let api = Api::<ResourceSlice>::all(self.client());
        let what = || format!("DELETE resourceslices {name}");
        match call(self.limit(), what, api.delete(name, &params)).await {
            Ok(_) | Err(CallError::NotFound { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// UID of a ClusterRole, for owner references; none if there is no such role.
    ///
    /// # Errors
    /// As [`Self::mirror_slices`].
    pub async fn cluster_role_uid(&self, name: &str) -> Result<Option<String>, CallError> {
        let api = Api::<PartialObjectMeta<ClusterRole>>::all(self.client());
        match call(self.limit(), || format!("GET clusterroles {name}"), api.get(name)).await {
            Ok(found) => Ok(found.metadata.uid),
            Err(CallError::NotFound { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }
}
