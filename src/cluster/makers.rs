//! What makes pods of a template (Jobs and others), as far as the controller creates a ResourceClaimTemplate for it: those
//! that the webhook has labelled. Anybody who may create such an object can label it, so that they are read as all that
//! tenants write: metadata alone, one object at a time, and of it a few short texts.

use std::collections::VecDeque;
use std::time::Duration;

use futures::stream::{self, BoxStream, StreamExt};
use k8s_openapi::api::resource::v1::ResourceClaimTemplate;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::api::{Api, ApiResource, DynamicObject, ListParams, WatchParams};
use kube::{Client, Resource};
use tracing::warn;

use super::CallError;
use super::client::{KubeCluster, call, post};
use super::cut::Piece;
use super::reader::{Page, ReadError, Watch, WatchItem, version_of};
use super::sieve::{Keep, sieve};
use crate::model::error_chain;
use crate::model::names::{
    OPT_IN_LABEL, OPT_IN_VALUE, SHARE_ANNOTATION, TEMPLATE_ANNOTATION, TEMPLATE_LABEL,
};
use crate::model::time::back_off;

/// Objects that are asked for at once.
const PAGE: u32 = 100;
/// Bytes of a share as the webhook writes it: some hundred. One that is longer is none of the webhook's.
const SHARE_BYTES_MAX: usize = 4 << 10;
/// Bytes of an object's name.
const NAME_BYTES_MAX: usize = 253;
/// After so long the API server is to end a watch; so much longer is waited for its end.
const WATCH: Duration = Duration::from_secs(290);
const WATCH_GRACE: Duration = Duration::from_secs(5);
/// The pause after a failure, and the longest after many.
const FIRST_PAUSE: Duration = Duration::from_millis(800);
const LAST_PAUSE: Duration = Duration::from_secs(30);
const KEEP: Keep = Keep::Only(&[(
    "metadata",
    Keep::Only(&[
        ("name", Keep::All),
        ("namespace", Keep::All),
        ("uid", Keep::All),
        ("deletionTimestamp", Keep::All),
        ("annotations", Keep::Only(&[(TEMPLATE_ANNOTATION, Keep::All), (SHARE_ANNOTATION, Keep::All)])),
    ]),
)]);

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

/// What is told of such objects.
#[derive(Debug, Clone, PartialEq)]
pub enum MakerChange {
    Stored(Maker),
    /// The object of this UID is gone, being deleted, or names no template any more.
    Gone(String),
    /// Nobody can tell which object it is.
    Unreadable,
}

#[derive(serde::Deserialize)]
struct Bare {
    metadata: ObjectMeta,
}

impl MakerKind {
    fn resource(&self) -> ApiResource {
        let (group, version) = (self.group.clone(), self.version.clone());
        let api_version = if group.is_empty() { version.clone() } else { format!("{group}/{version}") };
        ApiResource { group, version, api_version, kind: self.kind.clone(), plural: self.plural.clone() }
    }

    fn change(&self, piece: &Piece, is_deleted: bool) -> MakerChange {
        self.read(piece, is_deleted).unwrap_or(MakerChange::Unreadable)
    }

    fn read(&self, piece: &Piece, is_deleted: bool) -> Option<MakerChange> {
        let wanted = sieve(&piece.bytes, KEEP).ok()?;
        let mut meta = serde_json::from_slice::<Bare>(&wanted).ok()?.metadata;
        let uid = meta.uid.take()?;
        let mut annotation = |name: &str| meta.annotations.as_mut().and_then(|all| all.remove(name));
        let (template, share) = (annotation(TEMPLATE_ANNOTATION), annotation(SHARE_ANNOTATION));
        let stays = !is_deleted && meta.deletion_timestamp.is_none();
        let short = |text: Option<String>, most| text.filter(|text| text.len() <= most);
        let found = short(template, NAME_BYTES_MAX).zip(short(share, SHARE_BYTES_MAX));
        let Some(((template, share), (name, namespace))) =
            found.zip(meta.name.zip(meta.namespace)).filter(|_| stays)
        else {
            return Some(MakerChange::Gone(uid));
        };
        let owner = OwnerReference {
            api_version: self.resource().api_version,
            kind: self.kind.clone(),
            name,
            uid,
            ..OwnerReference::default()
        };
        Some(MakerChange::Stored(Maker { namespace, owner, template, share }))
    }
}

/// How far has been read.
enum Position {
    /// The next page of a list begins at `next`.
    List {
        next: String,
        version: String,
    },
    Watch {
        version: String,
    },
}

impl Position {
    const ANEW: Self = Self::List { next: String::new(), version: String::new() };
}

struct Followed {
    client: Client,
    kind: MakerKind,
    at: Position,
    watch: Option<Watch>,
    failures: u32,
    due: VecDeque<MakerChange>,
}

impl Followed {
    async fn next(&mut self) -> MakerChange {
        loop {
            if let Some(change) = self.due.pop_front() {
                return change;
            }
            let Err(error) = self.step().await else { continue };
            self.watch = None;
            warn!(
                error = error_chain(&error),
                kind = self.kind.kind,
                "the watch of what makes pods is interrupted"
            );
            // What is asked for may be history.
            if let (Position::List { .. }, _) | (_, Some(400 | 404 | 410)) = (&self.at, error.code()) {
                self.at = Position::ANEW;
            }
            self.failures = self.failures.saturating_add(1);
            let pause = back_off(FIRST_PAUSE, self.failures, LAST_PAUSE);
            tokio::time::sleep(pause.mul_f64(0.75 + 0.5 * fastrand::f64())).await;
        }
    }

    /// One page, or one item of the watch.
    async fn step(&mut self) -> Result<(), ReadError> {
        if let Some(watch) = &mut self.watch {
            let item = watch.next().await?;
            self.failures = 0;
            return self.take_in(item);
        }
        let labels = format!("{TEMPLATE_LABEL}=true");
        match &mut self.at {
            Position::List { next, version } => {
                let mut params = ListParams::default().labels(&labels).limit(PAGE);
                if !next.is_empty() {
                    params = params.continue_token(next);
                }
                let mut page =
                    Page::open(&self.client, request(&self.kind, |to| to.list_metadata(&params))?).await?;
                while let Some(piece) = page.next().await? {
                    self.due.push_back(self.kind.change(&piece, false));
                }
                let about = page.about();
                let version =
                    if version.is_empty() { about.resource_version } else { std::mem::take(version) };
                self.at = match about.next.is_empty() {
                    true => Position::Watch { version },
                    false => Position::List { next: about.next, version },
                };
            }
            Position::Watch { version } => {
                let seconds = u32::try_from(WATCH.as_secs()).unwrap_or(u32::MAX);
                let params = WatchParams::default().labels(&labels).timeout(seconds);
                let asked = request(&self.kind, |to| to.watch_metadata(&params, version))?;
                self.watch = Some(Watch::open(&self.client, asked, WATCH + WATCH_GRACE).await?);
            }
        }
        Ok(())
    }

    fn take_in(&mut self, item: Option<WatchItem>) -> Result<(), ReadError> {
        let fresh = match item {
            Some(WatchItem::Stored(piece)) => {
                self.due.push_back(self.kind.change(&piece, false));
                version_of(&piece.bytes)
            }
            Some(WatchItem::Deleted(piece)) => {
                self.due.push_back(self.kind.change(&piece, true));
                version_of(&piece.bytes)
            }
            Some(WatchItem::Bookmark(fresh)) => Some(fresh),
            None => {
                self.watch = None;
                None
            }
        };
        if let Some(fresh) = fresh {
            self.at = Position::Watch { version: fresh };
        }
        Ok(())
    }
}

fn request(
    kind: &MakerKind,
    of: impl FnOnce(&kube::core::Request) -> Result<http::Request<Vec<u8>>, kube::core::request::Error>,
) -> Result<http::Request<Vec<u8>>, kube::Error> {
    let to = kube::core::Request::new(DynamicObject::url_path(&kind.resource(), None));
    of(&to).map_err(kube::Error::BuildRequest)
}

impl KubeCluster {
    /// Those that are there, and those that come and go. A failed watch begins again; what went meanwhile is not told.
    pub fn labelled_makers(&self, kind: &MakerKind) -> BoxStream<'static, MakerChange> {
        let (client, kind) = (self.client(), kind.clone());
        let at = Position::ANEW;
        let followed = Followed { client, kind, at, watch: None, failures: 0, due: VecDeque::new() };
        let changes = stream::unfold(followed, |mut followed| async move {
            let change = followed.next().await;
            Some((change, followed))
        });
        changes.boxed()
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
            // A quota that is being counted is a conflict, too.
            Err(CallError::Conflict { message, .. }) if message.contains("already exists") => Ok(()),
            result => result.map(|_| ()),
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

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn job() -> MakerKind {
        let text = str::to_owned;
        MakerKind { group: text("batch"), version: text("v1"), plural: text("jobs"), kind: text("Job") }
    }

    fn seen(more: &Value, is_deleted: bool) -> MakerChange {
        let mut object = json!({"metadata": {"name": "train", "namespace": "ml", "uid": "u",
            "annotations": {TEMPLATE_ANNOTATION: "train-gpu-share", SHARE_ANNOTATION: "{}"}}});
        for (name, value) in more.as_object().unwrap() {
            object["metadata"][name] = value.clone();
        }
        job().change(&Piece { bytes: object.to_string().into_bytes(), whole: true }, is_deleted)
    }

    #[test]
    fn a_job_names_its_template_whatever_else_it_says() {
        let mut deep = json!({});
        (0..500).for_each(|_| deep = json!({"f:a": deep.take()}));
        for more in [json!({}), json!({"managedFields": [{"fieldsV1": deep}], "labels": {"a": "b"}})] {
            let MakerChange::Stored(maker) = seen(&more, false) else { panic!("{more}") };
            assert_eq!((maker.namespace.as_str(), maker.template.as_str()), ("ml", "train-gpu-share"));
            assert_eq!((maker.owner.api_version.as_str(), maker.owner.uid.as_str()), ("batch/v1", "u"));
        }
    }

    #[test]
    fn what_the_webhook_would_not_have_written_is_as_good_as_gone() {
        let gone = MakerChange::Gone("u".to_owned());
        let annotations = |template: String, share: String| json!({"annotations": {TEMPLATE_ANNOTATION: template, SHARE_ANNOTATION: share}});
        assert_eq!(seen(&annotations("t".to_owned(), " ".repeat(SHARE_BYTES_MAX + 1)), false), gone);
        assert_eq!(seen(&annotations("t".repeat(NAME_BYTES_MAX + 1), "{}".to_owned()), false), gone);
        assert_eq!(seen(&json!({"annotations": {}}), false), gone);
        assert_eq!(seen(&json!({"deletionTimestamp": "2026-01-01T00:00:00Z"}), false), gone);
        assert_eq!(seen(&json!({}), true), gone);
        assert_eq!(seen(&json!({"uid": null}), false), MakerChange::Unreadable);
    }
}
