//! Everything about the driver's devices at one moment, for people who look at all of the cluster.

use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use kube::Resource;
use kube::api::{Api, ListParams};
use serde::de::DeserializeOwned;

use super::client::{KubeCluster, call};
use super::error::CallError;
use crate::model::names::DRIVER;

/// Objects that are asked for at once; more come in further pages.
const PAGE: u32 = 500;
/// A list that has no end after so many pages is none.
const PAGES_MAX: usize = 1000;

/// Slices of our driver, and all claims.
#[derive(Debug, Clone, Default)]
pub struct Survey {
    pub slices: Vec<ResourceSlice>,
    pub claims: Vec<ResourceClaim>,
}

impl KubeCluster {
    /// Lists slices and claims of the whole cluster.
    ///
    /// # Errors
    /// The API server does not answer, or does not let the caller look.
    pub async fn survey(&self) -> Result<Survey, CallError> {
        let ours = ListParams::default().fields(&format!("spec.driver={DRIVER}"));
        let (slices, claims) = tokio::try_join!(self.all(ours), self.all(ListParams::default()))?;
        Ok(Survey { slices, claims })
    }

    async fn all<T>(&self, params: ListParams) -> Result<Vec<T>, CallError>
    where
        T: Resource<DynamicType = ()> + Clone + DeserializeOwned + std::fmt::Debug,
    {
        let api = Api::<T>::all(self.client());
        let (mut all, mut params) = (Vec::new(), params.limit(PAGE));
        for _ in 0..PAGES_MAX {
            let page = call(self.limit(), || format!("LIST {}", T::plural(&())), api.list(&params)).await?;
            all.extend(page.items);
            match page.metadata.continue_.filter(|next| !next.is_empty()) {
                Some(next) => params = params.continue_token(&next),
                None => break,
            }
        }
        Ok(all)
    }
}
