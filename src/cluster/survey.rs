//! Everything about the driver's devices at one moment, for people who look at all of the cluster.
//!
//! * [`KubeCluster::survey`]: slices and claims, at once; [`KubeCluster::namespaces`]: what namespaces may have
//! * [`KubeCluster::tour`]: all that the controller follows, object by object

use std::time::Duration;

use k8s_openapi::api::core::v1::{Namespace, Node, PersistentVolume, Pod};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::resource::v1::{DeviceClass, DeviceTaintRule, ResourceClaim, ResourceSlice};

use super::client::{KubeCluster, call};
use super::error::CallError;
use super::feed::{Change, LIVE_PODS, WatchEvent, Which, seen};
use super::guarded::{Misfit, ReadKind};
use super::pod_groups::{
    Kai, KubernetesV1Alpha2, KubernetesV1Alpha3, KubernetesV1Beta1, PodGroupApi, Served, Volcano, of_any,
};
use crate::model::names::DRIVER;

/// The longest that a page may take: its objects may be as large as the API server takes them.
const PAGE_LIMIT: Duration = Duration::from_secs(60);

/// A kind that the caller may not list in the whole cluster: its plural, with its group, as RBAC names it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Denied(String);

impl Denied {
    pub fn of<K: kube::Resource<DynamicType = ()>>() -> Self {
        let group = K::group(&());
        Self(if group.is_empty() {
            K::plural(&()).into_owned()
        } else {
            format!("{}.{group}", K::plural(&()))
        })
    }
}

impl std::fmt::Display for Denied {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

fn or_denied<K: ReadKind>(listed: Result<(), CallError>) -> Result<Option<Denied>, CallError> {
    match listed {
        Ok(()) => Ok(None),
        Err(CallError::Forbidden { .. }) => Ok(Some(Denied::of::<K>())),
        Err(error) => Err(error),
    }
}

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

    /// All namespaces, with what their annotations say of bounds.
    ///
    /// # Errors
    /// The API server does not answer, or does not let the caller look.
    pub async fn namespaces(&self) -> Result<Vec<Namespace>, CallError> {
        self.all(Which::All).await
    }

    /// Of one that does not fit what can be read: its name, and of a claim the devices that it names.
    async fn all<K: ReadKind>(&self, which: Which) -> Result<Vec<K>, CallError> {
        let mut all = Vec::new();
        let what = || format!("LIST {}", K::plural(&()));
        let add = |object: Result<K, Misfit<K>>| all.push(object.unwrap_or_else(|misfit| misfit.rest));
        self.each_object(&which, PAGE_LIMIT, what, add).await?;
        Ok(all)
    }

    /// Lists what [`KubeCluster::feed`] follows, once, and tells of it in the same words: each list begins, names
    /// its objects and is complete. Pods come last: they are most, and none is kept here.
    ///
    /// Returns the kinds that the caller may not list in the whole cluster. Of pods and claims those of `namespace` are
    /// told of then, and of namespaces `namespace` alone; of the other kinds nothing is told.
    ///
    /// # Errors
    /// The API server does not answer, or does not let the caller look at `namespace` either.
    pub async fn tour(
        &self,
        namespace: &str,
        mut each: impl FnMut(Change),
    ) -> Result<Vec<Denied>, CallError> {
        let here = |fields: &str| Which::In { namespace: namespace.to_owned(), fields: fields.to_owned() };
        let ours = Which::Fields(format!("spec.driver={DRIVER}"));
        let mut denied = Vec::new();
        let nodes = self.through::<Node>(Which::All, |seen| each(Change::Node(seen))).await;
        denied.extend(or_denied::<Node>(nodes)?);
        let slices = self.through::<ResourceSlice>(ours, |seen| each(Change::Slice(seen))).await;
        denied.extend(or_denied::<ResourceSlice>(slices)?);
        let classes = self.through::<DeviceClass>(Which::All, |seen| each(Change::Class(seen))).await;
        denied.extend(or_denied::<DeviceClass>(classes)?);
        match self.through::<DeviceTaintRule>(Which::All, |seen| each(Change::TaintRule(seen))).await {
            // Not served, or not for the caller to see: as if there were none.
            Err(CallError::Refused { code: 404, .. } | CallError::Forbidden { .. }) => {
                each(Change::TaintRule(WatchEvent::Complete));
            }
            result => result?,
        }
        let namespaces = self.through::<Namespace>(Which::All, |seen| each(Change::Namespace(seen))).await;
        if let Some(kind) = or_denied::<Namespace>(namespaces)? {
            denied.push(kind);
            match self.namespace(namespace).await {
                Ok(own) => each(Change::Namespace(WatchEvent::Listed(Box::new(own)))),
                Err(CallError::Forbidden { .. } | CallError::NotFound { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        match self.through::<PersistentVolume>(Which::All, |seen| each(Change::Volume(seen))).await {
            // As if every node could reach them.
            Ok(()) | Err(CallError::Forbidden { .. }) => {}
            Err(error) => return Err(error),
        }
        self.tour_budgets(&mut each).await?;
        self.tour_groups::<Volcano>(PodGroupApi::Volcano, namespace, &mut each).await?;
        self.tour_groups::<Kai>(PodGroupApi::Kai, namespace, &mut each).await?;
        self.tour_groups::<KubernetesV1Beta1>(PodGroupApi::KubernetesV1Beta1, namespace, &mut each).await?;
        self.tour_groups::<KubernetesV1Alpha3>(PodGroupApi::KubernetesV1Alpha3, namespace, &mut each).await?;
        self.tour_groups::<KubernetesV1Alpha2>(PodGroupApi::KubernetesV1Alpha2, namespace, &mut each).await?;
        let claims = self.through::<ResourceClaim>(Which::All, |seen| each(Change::Claim(seen))).await;
        if let Some(kind) = or_denied::<ResourceClaim>(claims)? {
            denied.push(kind);
            self.through::<ResourceClaim>(here(""), |seen| each(Change::Claim(seen))).await?;
        }
        let live = Which::Fields(LIVE_PODS.to_owned());
        let pods = self.through::<Pod>(live, |seen| each(Change::Pod(seen))).await;
        if let Some(kind) = or_denied::<Pod>(pods)? {
            denied.push(kind);
            self.through::<Pod>(here(LIVE_PODS), |seen| each(Change::Pod(seen))).await?;
        }
        Ok(denied)
    }

    /// PodDisruptionBudgets. Where the caller may not list them, the list is never complete.
    async fn tour_budgets(&self, each: &mut impl FnMut(Change)) -> Result<(), CallError> {
        each(Change::Budget(WatchEvent::Anew));
        let what = || "LIST poddisruptionbudgets".to_owned();
        let add = |object| each(Change::Budget(seen::<PodDisruptionBudget>(object, true)));
        match self.each_object(&Which::All, PAGE_LIMIT, what, add).await {
            Ok(()) => each(Change::Budget(WatchEvent::Complete)),
            Err(CallError::Forbidden { .. }) => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// PodGroups of one API, of the whole cluster or of `namespace` alone; none where they are not served. Where the
    /// caller may list neither, the list is never complete.
    async fn tour_groups<S: Served>(
        &self,
        api: PodGroupApi,
        namespace: &str,
        each: &mut impl FnMut(Change),
    ) -> Result<(), CallError> {
        let here = Which::In { namespace: namespace.to_owned(), fields: String::new() };
        each(Change::PodGroup(api, WatchEvent::Anew));
        for which in [Which::All, here] {
            let what = || format!("LIST podgroups.{}", api.group());
            let add = |object| each(Change::PodGroup(api, of_any::<S>(seen(object, true))));
            match self.each_object(&which, PAGE_LIMIT, what, add).await {
                Ok(()) | Err(CallError::Refused { code: 404, .. } | CallError::NotFound { .. }) => {
                    each(Change::PodGroup(api, WatchEvent::Complete));
                    return Ok(());
                }
                Err(CallError::Forbidden { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    async fn through<K: ReadKind>(
        &self,
        which: Which,
        mut each: impl FnMut(WatchEvent<K>),
    ) -> Result<(), CallError> {
        each(WatchEvent::Anew);
        let of = match &which {
            Which::In { namespace, .. } => format!(" of namespace {namespace}"),
            Which::All | Which::Fields(_) => String::new(),
        };
        let what = || format!("LIST {}{of}", K::plural(&()));
        let listed = self.each_object(&which, PAGE_LIMIT, what, |object| each(seen(object, true))).await;
        if let Ok(()) | Err(CallError::Forbidden { .. }) = listed {
            each(WatchEvent::Complete);
        }
        listed
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
