//! Everything about the driver's devices at one moment, for people who look at all of the cluster.
//!
//! * [`KubeCluster::survey`]: slices and claims, at once
//! * [`KubeCluster::tour`]: all that the controller follows, object by object

use std::time::Duration;

use k8s_openapi::api::core::v1::{Namespace, Node, Pod};
use k8s_openapi::api::resource::v1::{DeviceClass, DeviceTaintRule, ResourceClaim, ResourceSlice};

use super::client::{KubeCluster, call};
use super::error::CallError;
use super::feed::{Change, LIVE_PODS, WatchEvent, Which, opted_in, seen};
use super::guarded::{Known, Misfit};
use crate::model::names::DRIVER;

/// The longest that a page may take: its objects may be as large as the API server takes them.
const PAGE_LIMIT: Duration = Duration::from_secs(60);

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
        let ours = format!("spec.driver={DRIVER}");
        let (slices, claims) = tokio::try_join!(self.all(Which::Fields(ours)), self.all(Which::All))?;
        Ok(Survey { slices, claims })
    }

    /// Of one that does not fit what can be read: its name, and of a claim the devices that it names.
    async fn all<K: Known>(&self, which: Which) -> Result<Vec<K>, CallError> {
        let mut all = Vec::new();
        let what = || format!("LIST {}", K::plural(&()));
        let add = |object: Result<K, Misfit<K>>| all.push(object.unwrap_or_else(|misfit| misfit.rest));
        self.each_object(&which, PAGE_LIMIT, what, add).await?;
        Ok(all)
    }

    /// Lists what [`KubeCluster::feed`] follows, once, and tells of it in the same words: each list begins, names
    /// its objects and is complete. Pods come last: they are most, and none is kept here.
    ///
    /// # Errors
    /// The API server does not answer, or does not let the caller look.
    pub async fn tour(&self, mut each: impl FnMut(Change)) -> Result<(), CallError> {
        let ours = format!("spec.driver={DRIVER}");
        self.through::<Node>(Which::All, |seen| each(Change::Node(seen))).await?;
        self.through::<ResourceSlice>(Which::Fields(ours), |seen| each(Change::Slice(seen))).await?;
        self.through::<DeviceClass>(Which::All, |seen| each(Change::Class(seen))).await?;
        match self.through::<DeviceTaintRule>(Which::All, |seen| each(Change::TaintRule(seen))).await {
            // Not served, or not for the caller to see: as if there were none.
            Err(CallError::Refused { code: 404, .. } | CallError::Forbidden { .. }) => {
                each(Change::TaintRule(WatchEvent::Complete));
            }
            result => result?,
        }
        match self.through::<Namespace>(Which::Labels(opted_in()), |seen| each(Change::Namespace(seen))).await
        {
            // The caller is told; all but claims that are only promised can be looked at.
            Err(error @ CallError::Forbidden { .. }) => {
                each(Change::Namespace(WatchEvent::Interrupted { problem: error.to_string() }));
            }
            result => result?,
        }
        self.through::<ResourceClaim>(Which::All, |seen| each(Change::Claim(seen))).await?;
        self.through::<Pod>(Which::Fields(LIVE_PODS.to_owned()), |seen| each(Change::Pod(seen))).await
    }

    async fn through<K: Known>(
        &self,
        which: Which,
        mut each: impl FnMut(WatchEvent<K>),
    ) -> Result<(), CallError> {
        each(WatchEvent::Anew);
        let what = || format!("LIST {}", K::plural(&()));
        self.each_object(&which, PAGE_LIMIT, what, |object| each(seen(object, true))).await?;
        each(WatchEvent::Complete);
        Ok(())
    }

    /// The pod that has this name now, ended or not.
    ///
    /// # Errors
    /// [`CallError::NotFound`]: there is none.
    pub async fn pod_named(&self, namespace: &str, name: &str) -> Result<Pod, CallError> {
        call(self.limit(), || format!("GET pods {namespace}/{name}"), self.get(namespace, name)).await
    }

    /// The namespace that is meant where none is named: the kubeconfig's, or the pod's own.
    pub fn default_namespace(&self) -> String {
        self.client().default_namespace().to_owned()
    }
}
