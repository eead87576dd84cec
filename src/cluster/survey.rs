//! Everything about the driver's devices at one moment, for people who look at all of the cluster.
//!
//! * [`KubeCluster::survey`]: slices and claims, at once
//! * [`KubeCluster::tour`]: all that the controller follows, object by object

use k8s_openapi::api::core::v1::{Namespace, Node, Pod};
use k8s_openapi::api::resource::v1::{DeviceClass, DeviceTaintRule, ResourceClaim, ResourceSlice};
use kube::Resource;
use kube::api::{Api, ListParams};
use serde::de::DeserializeOwned;

use super::client::{KubeCluster, call};
use super::error::CallError;
use super::feed::{Change, LIVE_PODS, Seen, opted_in};
use super::guarded::Guarded;
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

    /// Lists what [`KubeCluster::feed`] follows, once, and tells of it in the same words: each list begins, names
    /// its objects and is complete. Pods come last: they are most, and none is kept here.
    ///
    /// # Errors
    /// The API server does not answer, or does not let the caller look.
    pub async fn tour(&self, mut each: impl FnMut(Change)) -> Result<(), CallError> {
        let all = ListParams::default;
        let ours = all().fields(&format!("spec.driver={DRIVER}"));
        self.through::<Node>(all(), |seen| each(Change::Node(seen))).await?;
        self.through::<ResourceSlice>(ours, |seen| each(Change::Slice(seen))).await?;
        self.through::<DeviceClass>(all(), |seen| each(Change::Class(seen))).await?;
        match self.through::<DeviceTaintRule>(all(), |seen| each(Change::TaintRule(seen))).await {
            // Not served, or not for the caller to see: as if there were none.
            Err(CallError::Refused { code: 404, .. } | CallError::Forbidden { .. }) => {
                each(Change::TaintRule(Seen::Complete));
            }
            result => result?,
        }
        let opted_in = all().labels(&opted_in());
        match self.through::<Namespace>(opted_in, |seen| each(Change::Namespace(seen))).await {
            // The caller is told; all but claims that are only promised can be looked at.
            Err(error @ CallError::Forbidden { .. }) => {
                each(Change::Namespace(Seen::Interrupted { problem: error.to_string() }));
            }
            result => result?,
        }
        self.through::<ResourceClaim>(all(), |seen| each(Change::Claim(seen))).await?;
        self.through::<Pod>(all().fields(LIVE_PODS), |seen| each(Change::Pod(seen))).await
    }

    async fn through<K>(&self, params: ListParams, mut each: impl FnMut(Seen<K>)) -> Result<(), CallError>
    where
        K: Resource<DynamicType = ()> + Clone + DeserializeOwned + std::fmt::Debug,
    {
        let api = Api::<Guarded<K>>::all(self.client());
        let mut params = params.limit(PAGE);
        each(Seen::Anew);
        for _ in 0..PAGES_MAX {
            let page = call(self.limit(), || format!("LIST {}", K::plural(&())), api.list(&params)).await?;
            for object in page.items {
                each(match object.0 {
                    Ok(object) => Seen::Listed(Box::new(object)),
                    Err(invalid) => Seen::Unreadable {
                        meta: Box::new(invalid.metadata),
                        listed: true,
                        problem: invalid.problem,
                    },
                });
            }
            match page.metadata.continue_.filter(|next| !next.is_empty()) {
                Some(next) => params = params.continue_token(&next),
                None => break,
            }
        }
        each(Seen::Complete);
        Ok(())
    }

    /// The pod that has this name now, ended or not.
    ///
    /// # Errors
    /// [`CallError::NotFound`]: there is none.
    pub async fn pod_named(&self, namespace: &str, name: &str) -> Result<Pod, CallError> {
        let api = Api::<Pod>::namespaced(self.client(), namespace);
        call(self.limit(), || format!("GET pods {namespace}/{name}"), api.get(name)).await
    }

    /// The namespace that is meant where none is named: the kubeconfig's, or the pod's own.
    pub fn default_namespace(&self) -> String {
        self.client().default_namespace().to_owned()
    }
}
