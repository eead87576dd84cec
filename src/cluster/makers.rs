//! What makes pods of a template (Jobs and others), as far as the controller creates a ResourceClaimTemplate for it: those
//! that the webhook has labelled. Only their metadata is asked for.

use futures::StreamExt;
use futures::stream::BoxStream;
use k8s_openapi::api::resource::v1::ResourceClaimTemplate;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{Api, ApiResource, DynamicObject, PartialObjectMeta};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};

use super::CallError;
use super::client::{KubeCluster, call, post};
use crate::model::names::{
    OPT_IN_LABEL, OPT_IN_VALUE, SHARE_ANNOTATION, TEMPLATE_ANNOTATION, TEMPLATE_LABEL,
};

/// A kind of object with a template of pods at `spec.template`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MakerKind {
    pub group: String,
    pub version: String,
    /// Such as `jobs`.
    pub plural: String,
    /// Such as `Job`.
    pub kind: String,
}

/// An object that names a template which is to be created for it.
#[derive(Debug, Clone, PartialEq)]
pub struct Maker {
    pub namespace: String,
    /// Of the object, as the owner of what is created.
    pub owner: OwnerReference,
    /// Name of the ResourceClaimTemplate.
    pub template: String,
    /// The share, as the webhook wrote it.
    pub share: String,
}

impl MakerKind {
    fn resource(&self) -> ApiResource {
        let (group, version) = (self.group.clone(), self.version.clone());
        let api_version = if group.is_empty() { version.clone() } else { format!("{group}/{version}") };
        ApiResource { group, version, api_version, kind: self.kind.clone(), plural: self.plural.clone() }
    }

    /// None: it names no template, is being deleted, or is not what a watch of it brings.
    fn maker(&self, object: PartialObjectMeta<DynamicObject>) -> Option<Maker> {
        let mut meta = object.metadata;
        let mut annotation = |name: &str| meta.annotations.as_mut().and_then(|all| all.remove(name));
        let (template, share) = (annotation(TEMPLATE_ANNOTATION)?, annotation(SHARE_ANNOTATION)?);
        let owner = OwnerReference {
            api_version: self.resource().api_version,
            kind: self.kind.clone(),
            name: meta.name?,
            uid: meta.uid?,
            ..OwnerReference::default()
        };
        let stays = meta.deletion_timestamp.is_none();
        stays.then_some(Maker { namespace: meta.namespace?, owner, template, share })
    }
}

impl KubeCluster {
    /// Those that are there, and those that come. A failed watch begins again.
    pub fn labelled_makers(&self, kind: &MakerKind) -> BoxStream<'static, Maker> {
        let api = Api::<PartialObjectMeta<DynamicObject>>::all_with(self.client(), &kind.resource());
        let config = watcher::Config::default().labels(&format!("{TEMPLATE_LABEL}=true"));
        let kind = kind.clone();
        let seen = watcher(api, config).default_backoff().filter_map(move |event| {
            let object = match event {
                Ok(Event::Apply(object) | Event::InitApply(object)) => kind.maker(object),
                Ok(Event::Delete(_) | Event::Init | Event::InitDone) | Err(_) => None,
            };
            std::future::ready(object)
        });
        seen.boxed()
    }

    /// Creates a template. One of its name that is there already counts as created.
    ///
    /// # Errors
    /// The API server does not answer, or will not have it.
    pub async fn create_template(&self, template: &ResourceClaimTemplate) -> Result<(), CallError> {
        let name = template.metadata.name.as_deref().unwrap_or_default();
        let namespace = template.metadata.namespace.as_deref().unwrap_or_default();
        let api = Api::<ResourceClaimTemplate>::namespaced(self.client(), namespace);
        let what = || format!("CREATE resourceclaimtemplates {namespace}/{name}");
        match call(self.limit(), what, api.create(&post(), template)).await {
            Ok(_) | Err(CallError::Conflict { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// An administrator lets us create claims in the namespace.
    ///
    /// # Errors
    /// As [`Self::create_template`].
    pub async fn has_opted_in(&self, namespace: &str) -> Result<bool, CallError> {
        let labels = self.namespace(namespace).await?.metadata.labels.unwrap_or_default();
        Ok(labels.get(OPT_IN_LABEL).is_some_and(|value| value == OPT_IN_VALUE))
    }
}
