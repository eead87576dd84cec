//! What serving webhooks needs of the API server: the Secret that keeps their certificates, the CA that the
//! webhook configurations name, and the DeviceClasses, by which it is known whose a claim is.
//!
//! Configurations are written as they were read, but for `caBundle`, and only if nobody has changed them
//! since.

use std::collections::BTreeMap;

use futures::StreamExt;
use futures::stream::{BoxStream, select};
use k8s_openapi::ByteString;
use k8s_openapi::api::admissionregistration::v1::{
    MutatingWebhookConfiguration, ValidatingWebhookConfiguration,
};
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::api::resource::v1::DeviceClass;
use kube::api::{Api, ApiResource, DynamicObject, ListParams, PartialObjectMeta};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, watcher};
use kube::{Client, Resource};
use serde_json::{Value, json};

use super::client::{KubeCluster, call, post};
use super::{CALL_LIMIT, CallError};

/// Labels of what we make.
const LABELS: [(&str, &str); 2] =
    [("app.kubernetes.io/name", "tranche"), ("app.kubernetes.io/component", "controller")];

/// DeviceClasses that are read: of others it is not known whose they are.
const CLASSES_MAX: u32 = 500;

/// The API server, as whoever serves webhooks sees it.
#[derive(Clone)]
pub struct WebhookApi(Client);

/// A Secret's data, and which version of it.
#[derive(Debug, Clone, PartialEq)]
pub struct StoredSecret {
    pub data: BTreeMap<String, Vec<u8>>,
    secret: Box<Secret>,
}

/// The DeviceClasses that were read.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ReadClasses {
    pub classes: Vec<DeviceClass>,
    /// There are no others.
    pub is_all: bool,
}

/// A configuration as it was read.
#[derive(Debug, Clone)]
pub struct Configuration {
    of: ApiResource,
    object: DynamicObject,
}

impl WebhookApi {
    /// Uses the client of somebody who has one.
    pub fn of(cluster: &KubeCluster) -> Self {
        Self(cluster.client())
    }

    pub fn with_client(client: Client) -> Self {
        Self(client)
    }

    fn secrets(&self, namespace: &str) -> Api<Secret> {
        Api::namespaced(self.0.clone(), namespace)
    }

    /// None: there is no such Secret.
    pub async fn secret(&self, namespace: &str, name: &str) -> Result<Option<StoredSecret>, CallError> {
        let what = || format!("GET secrets {namespace}/{name}");
        found(call(CALL_LIMIT, what, self.secrets(namespace).get(name)).await.map(StoredSecret::from))
    }

    /// [`CallError::Conflict`]: somebody else was faster.
    pub async fn create_secret(
        &self,
        namespace: &str,
        name: &str,
        data: BTreeMap<String, Vec<u8>>,
    ) -> Result<StoredSecret, CallError> {
        let mut secret =
            Secret { type_: Some("Opaque".to_owned()), data: Some(encoded(data)), ..Secret::default() };
        secret.metadata.name = Some(name.to_owned());
        secret.metadata.labels =
            Some(LABELS.into_iter().map(|(key, value)| (key.to_owned(), value.to_owned())).collect());
        let what = || format!("CREATE secrets {namespace}/{name}");
        call(CALL_LIMIT, what, self.secrets(namespace).create(&post(), &secret)).await.map(StoredSecret::from)
    }

    /// [`CallError::Conflict`]: it is not any more what `stored` was.
    pub async fn replace_secret(
        &self,
        stored: &StoredSecret,
        data: BTreeMap<String, Vec<u8>>,
    ) -> Result<StoredSecret, CallError> {
        let mut secret = stored.secret.clone();
        secret.data.get_or_insert_default().extend(encoded(data));
        let name = secret.metadata.name.clone().unwrap_or_default();
        let namespace = secret.metadata.namespace.clone().unwrap_or_default();
        let what = || format!("UPDATE secrets {namespace}/{name}");
        let api = self.secrets(&namespace);
        call(CALL_LIMIT, what, api.replace(&name, &post(), &*secret)).await.map(StoredSecret::from)
    }

    /// The validating and the mutating configuration of this name, as far as they are there.
    pub async fn configurations(&self, name: &str) -> Result<Vec<Configuration>, CallError> {
        let kinds = [
            ApiResource::erase::<ValidatingWebhookConfiguration>(&()),
            ApiResource::erase::<MutatingWebhookConfiguration>(&()),
        ];
        let mut all = Vec::new();
        for of in kinds {
            let api: Api<DynamicObject> = Api::all_with(self.0.clone(), &of);
            let what = || format!("GET {} {name}", of.plural);
            let object = found(call(CALL_LIMIT, what, api.get(name)).await)?;
            all.extend(object.map(|object| Configuration { of: of.clone(), object }));
        }
        Ok(all)
    }

    /// Has the API server trust `bundle` (PEM) in all of the configuration's webhooks. False: it did already.
    pub async fn trust(&self, configuration: &Configuration, bundle: &[u8]) -> Result<bool, CallError> {
        let Some(changed) = configuration.trusting(bundle) else { return Ok(false) };
        let name = changed.metadata.name.clone().unwrap_or_default();
        let api: Api<DynamicObject> = Api::all_with(self.0.clone(), &configuration.of);
        let what = || format!("UPDATE {} {name}", configuration.of.plural);
        call(CALL_LIMIT, what, api.replace(&name, &post(), &changed)).await.map(|_| true)
    }

    /// Something happened to one of the configurations of this name, or may have.
    pub fn watch_configurations(&self, name: &str) -> BoxStream<'static, ()> {
        let config = watcher::Config::default().fields(&format!("metadata.name={name}"));
        select(
            self.watch::<ValidatingWebhookConfiguration>(config.clone()),
            self.watch::<MutatingWebhookConfiguration>(config),
        )
        .boxed()
    }

    fn watch<K>(&self, config: watcher::Config) -> BoxStream<'static, ()>
    where
        K: Resource<DynamicType = (), Scope = k8s_openapi::ClusterResourceScope>
            + Clone
            + std::fmt::Debug
            + Send
            + 'static,
    {
        let api = Api::<PartialObjectMeta<K>>::all(self.0.clone());
        // A failed watch is tried again with back-off; what was missed is seen at the next round.
        watcher(api, config).default_backoff().map(|_| ()).boxed()
    }

    /// Something happened to a DeviceClass, or may have.
    pub fn watch_classes(&self) -> BoxStream<'static, ()> {
        self.watch::<DeviceClass>(watcher::Config::default())
    }

    /// The DeviceClasses of the cluster; of very many, only the first by name.
    pub async fn device_classes(&self) -> Result<ReadClasses, CallError> {
        let what = || "LIST deviceclasses".to_owned();
        let api: Api<DeviceClass> = Api::all(self.0.clone());
        let params = ListParams::default().limit(CLASSES_MAX);
        let list = call(CALL_LIMIT, what, api.list(&params)).await?;
        let is_all = list.metadata.continue_.is_none_or(|next| next.is_empty());
        Ok(ReadClasses { classes: list.items, is_all })
    }
}

impl Configuration {
    /// None: it trusts it already.
    fn trusting(&self, bundle: &[u8]) -> Option<DynamicObject> {
        let encoded = json!(ByteString(bundle.to_vec()));
        let mut changed = self.object.clone();
        let webhooks = changed.data.get_mut("webhooks").and_then(Value::as_array_mut)?;
        for webhook in webhooks {
            if let Some(client) = webhook.get_mut("clientConfig").and_then(Value::as_object_mut) {
                client.insert("caBundle".to_owned(), encoded.clone());
            }
        }
        (changed.data != self.object.data).then_some(changed)
    }
}

impl From<Secret> for StoredSecret {
    fn from(secret: Secret) -> Self {
        let data = secret.data.iter().flatten().map(|(key, bytes)| (key.clone(), bytes.0.clone())).collect();
        Self { data, secret: Box::new(secret) }
    }
}

fn encoded(data: BTreeMap<String, Vec<u8>>) -> BTreeMap<String, ByteString> {
    data.into_iter().map(|(key, bytes)| (key, ByteString(bytes))).collect()
}

fn found<T>(answer: Result<T, CallError>) -> Result<Option<T>, CallError> {
    match answer {
        Ok(object) => Ok(Some(object)),
        Err(CallError::NotFound { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}
