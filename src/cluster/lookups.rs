//! What people who ask about one pod want to know beside it: the quotas and templates of its namespace, what was told of
//! an object, and what makes its pods. Reads objects of one namespace, which a user with the role `view` may do.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment, ReplicaSet, StatefulSet};
use k8s_openapi::api::batch::v1::{CronJob, Job};
use k8s_openapi::api::core::v1::{Event, Namespace, ResourceQuota};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaimTemplate};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;
use kube::api::GetParams;
use kube::core::NamespaceResourceScope;

use super::client::{KubeCluster, call};
use super::error::CallError;
use super::feed::Which;
use super::guarded::{Misfit, ReadKind};

/// The longest that a page may take.
const PAGE_LIMIT: Duration = Duration::from_secs(20);
/// Objects of a list that are kept; more are passed over.
const KEPT_MAX: usize = 1000;

/// What makes pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WorkloadKind {
    Deployment,
    ReplicaSet,
    StatefulSet,
    DaemonSet,
    Job,
    CronJob,
}

impl WorkloadKind {
    pub const ALL: [Self; 6] =
        [Self::Deployment, Self::ReplicaSet, Self::StatefulSet, Self::DaemonSet, Self::Job, Self::CronJob];

    /// As `kind` has it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Deployment => "Deployment",
            Self::ReplicaSet => "ReplicaSet",
            Self::StatefulSet => "StatefulSet",
            Self::DaemonSet => "DaemonSet",
            Self::Job => "Job",
            Self::CronJob => "CronJob",
        }
    }

    /// By the words that kubectl takes before the slash: singular, plural or short.
    pub fn of(word: &str) -> Option<Self> {
        Some(match word {
            "deployment" | "deployments" | "deploy" => Self::Deployment,
            "replicaset" | "replicasets" | "rs" => Self::ReplicaSet,
            "statefulset" | "statefulsets" | "sts" => Self::StatefulSet,
            "daemonset" | "daemonsets" | "ds" => Self::DaemonSet,
            "job" | "jobs" => Self::Job,
            "cronjob" | "cronjobs" | "cj" => Self::CronJob,
            _ => return None,
        })
    }
}

/// An object that makes pods, as far as it tells why there are none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Workload {
    pub kind: WorkloadKind,
    pub name: String,
    pub uid: String,
    /// The UID of what it was made by.
    pub owner: Option<String>,
    /// How many pods it is to have; none: it does not say.
    pub pods: Option<i32>,
    pub suspended: bool,
    /// What it says of itself that went wrong: messages of the conditions `ReplicaFailure` and `Failed`.
    pub failures: Vec<String>,
}

/// An event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToldEvent {
    /// Of type Warning.
    pub is_warning: bool,
    pub reason: String,
    pub message: String,
    /// When it was told last.
    pub at: Option<Timestamp>,
}

impl KubeCluster {
    /// # Errors
    /// The API server does not answer, or does not let the caller look.
    pub async fn quotas(&self, namespace: &str) -> Result<Vec<ResourceQuota>, CallError> {
        self.listed(namespace, "").await
    }

    /// # Errors
    /// [`CallError::NotFound`]: there is none.
    pub async fn template_named(
        &self,
        namespace: &str,
        name: &str,
    ) -> Result<ResourceClaimTemplate, CallError> {
        let what = || format!("GET resourceclaimtemplates {namespace}/{name}");
        call(self.limit(), what, self.get(namespace, name)).await
    }

    /// What was told of the object with this UID, the newest last.
    ///
    /// # Errors
    /// As [`KubeCluster::quotas`].
    pub async fn told_of(&self, namespace: &str, uid: &str) -> Result<Vec<ToldEvent>, CallError> {
        let events: Vec<Event> = self.listed(namespace, &format!("involvedObject.uid={uid}")).await?;
        let mut told: Vec<ToldEvent> = events.into_iter().map(told).collect();
        told.sort_by_key(|one| one.at);
        Ok(told)
    }

    /// # Errors
    /// [`CallError::NotFound`]: there is none.
    pub async fn workload(
        &self,
        kind: WorkloadKind,
        namespace: &str,
        name: &str,
    ) -> Result<Workload, CallError> {
        match kind {
            WorkloadKind::Deployment => self.one::<Deployment>(namespace, name).await.map(deployment),
            WorkloadKind::ReplicaSet => self.one::<ReplicaSet>(namespace, name).await.map(replica_set),
            WorkloadKind::StatefulSet => self.one::<StatefulSet>(namespace, name).await.map(stateful_set),
            WorkloadKind::DaemonSet => self.one::<DaemonSet>(namespace, name).await.map(daemon_set),
            WorkloadKind::Job => self.one::<Job>(namespace, name).await.map(job),
            WorkloadKind::CronJob => self.one::<CronJob>(namespace, name).await.map(cron_job),
        }
    }

    /// What stands between a workload and its pods: the ReplicaSets of a Deployment, the Jobs of a CronJob.
    ///
    /// # Errors
    /// As [`KubeCluster::quotas`].
    pub async fn makers(&self, namespace: &str, of: &Workload) -> Result<Vec<Workload>, CallError> {
        let all: Vec<Workload> = match of.kind {
            WorkloadKind::Deployment => {
                self.listed(namespace, "").await?.into_iter().map(replica_set).collect()
            }
            WorkloadKind::CronJob => self.listed(namespace, "").await?.into_iter().map(job).collect(),
            WorkloadKind::ReplicaSet
            | WorkloadKind::StatefulSet
            | WorkloadKind::DaemonSet
            | WorkloadKind::Job => Vec::new(),
        };
        Ok(all.into_iter().filter(|one| one.owner.as_ref() == Some(&of.uid)).collect())
    }

    /// The DeviceClasses, by which it is known whose a claim is; of very many, only some.
    ///
    /// # Errors
    /// The caller may not list them, or the API server does not answer.
    pub async fn device_classes(&self) -> Result<Vec<DeviceClass>, CallError> {
        let mut all = Vec::new();
        let add = |object: Result<DeviceClass, Misfit<DeviceClass>>| {
            if all.len() < KEPT_MAX {
                all.extend(object.ok());
            }
        };
        self.each_object(&Which::All, PAGE_LIMIT, || "LIST deviceclasses".to_owned(), add).await?;
        Ok(all)
    }

    /// The DeviceClass of this name, which may be read by who may not list them.
    ///
    /// # Errors
    /// The caller may not read it, there is none, or the API server does not answer.
    pub async fn class_named(&self, name: &str) -> Result<DeviceClass, CallError> {
        let get = kube::core::Request::new(DeviceClass::url_path(&(), None)).get(name, &GetParams::default());
        call(self.limit(), || format!("GET deviceclasses {name}"), self.ask(get)).await
    }

    /// Whether there is such a namespace, as far as the caller may know: yes, unless the API server says no.
    pub async fn has_namespace(&self, name: &str) -> bool {
        !matches!(self.namespace(name).await, Err(CallError::NotFound { .. }))
    }

    /// The namespace itself, which whoever may look at it may read.
    pub(super) async fn namespace(&self, name: &str) -> Result<Namespace, CallError> {
        let get = kube::core::Request::new(Namespace::url_path(&(), None)).get(name, &GetParams::default());
        call(self.limit(), || format!("GET namespaces {name}"), self.ask(get)).await
    }

    async fn one<K>(&self, namespace: &str, name: &str) -> Result<K, CallError>
    where
        K: ReadKind + Resource<Scope = NamespaceResourceScope>,
    {
        let what = || format!("GET {} {namespace}/{name}", K::plural(&()));
        call(self.limit(), what, self.get(namespace, name)).await
    }

    async fn listed<K: ReadKind>(&self, namespace: &str, fields: &str) -> Result<Vec<K>, CallError> {
        let mut all = Vec::new();
        let which = Which::In { namespace: namespace.to_owned(), fields: fields.to_owned() };
        let what = || format!("LIST {} of namespace {namespace}", K::plural(&()));
        let add = |object: Result<K, Misfit<K>>| {
            if all.len() < KEPT_MAX {
                all.extend(object.ok());
            }
        };
        self.each_object(&which, PAGE_LIMIT, what, add).await?;
        Ok(all)
    }
}

fn told(event: Event) -> ToldEvent {
    let series = event.series.and_then(|series| series.last_observed_time).map(|time| time.0);
    let last = event.last_timestamp.map(|time| time.0);
    let first = event.event_time.map(|time| time.0);
    let made = event.metadata.creation_timestamp.map(|time| time.0);
    ToldEvent {
        is_warning: event.type_.as_deref() == Some("Warning"),
        reason: event.reason.unwrap_or_default(),
        message: event.message.unwrap_or_default(),
        at: series.or(last).or(first).or(made),
    }
}

fn workload(kind: WorkloadKind, meta: ObjectMeta, pods: Option<i32>) -> Workload {
    let owner = meta.owner_references.iter().flatten().find(|owner| owner.controller == Some(true));
    Workload {
        kind,
        owner: owner.map(|owner| owner.uid.clone()),
        name: meta.name.unwrap_or_default(),
        uid: meta.uid.unwrap_or_default(),
        pods,
        suspended: false,
        failures: Vec::new(),
    }
}

/// The messages of conditions that say that something failed: (type, status, message).
fn failures<'a>(
    conditions: impl Iterator<Item = (Option<&'a str>, Option<&'a str>, Option<&'a String>)>,
) -> Vec<String> {
    let failed = conditions.filter(|(type_, status, _)| {
        matches!(type_, Some("ReplicaFailure" | "Failed")) && *status == Some("True")
    });
    failed.filter_map(|(_, _, message)| message.cloned()).collect()
}

fn deployment(object: Deployment) -> Workload {
    let conditions = object.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let failures =
        failures(conditions.map(|one| (one.type_.as_deref(), one.status.as_deref(), one.message.as_ref())));
    Workload { failures, ..workload(WorkloadKind::Deployment, object.metadata, object.spec.replicas) }
}

fn replica_set(object: ReplicaSet) -> Workload {
    let conditions = object.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let failures =
        failures(conditions.map(|one| (one.type_.as_deref(), one.status.as_deref(), one.message.as_ref())));
    Workload { failures, ..workload(WorkloadKind::ReplicaSet, object.metadata, object.spec.replicas) }
}

fn stateful_set(object: StatefulSet) -> Workload {
    workload(WorkloadKind::StatefulSet, object.metadata, object.spec.replicas)
}

fn daemon_set(object: DaemonSet) -> Workload {
    workload(WorkloadKind::DaemonSet, object.metadata, None)
}

fn job(object: Job) -> Workload {
    let conditions = object.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let failures = failures(
        conditions.map(|one| (Some(one.type_.as_str()), Some(one.status.as_str()), one.message.as_ref())),
    );
    let suspended = object.spec.and_then(|spec| spec.suspend) == Some(true);
    Workload { failures, suspended, ..workload(WorkloadKind::Job, object.metadata, None) }
}

fn cron_job(object: CronJob) -> Workload {
    let suspended = object.spec.suspend == Some(true);
    Workload { suspended, ..workload(WorkloadKind::CronJob, object.metadata, None) }
}
