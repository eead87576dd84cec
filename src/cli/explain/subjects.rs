//! What is to be explained of what was named: of a pod its claims and what it asks for by its limits, of what makes pods
//! its pods that wait. Reads from the API server what only these objects tell.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;

use super::find::{self, NamedObject};
use super::pod::{self, Template};
use super::site::ClusterSite;
use crate::cluster::{CallError, KubeCluster, ToldEvent, Workload, WorkloadKind};
use crate::controller::explain::{Subject, quota};
use crate::model::names::PodUid;

/// Pods of one workload that are explained: they have the same template.
const PODS_MAX: usize = 3;

/// What is asked about.
#[derive(Default)]
pub struct Subjects {
    pub subjects: Vec<Subject>,
    /// What a pod needs and does not have.
    pub lacks: Vec<String>,
    pub remarks: Vec<String>,
    /// What was told of it.
    pub events: Vec<ToldEvent>,
}

impl Subjects {
    /// Of one of several pods.
    fn of(self, pod: &str) -> Self {
        let with = |all: Vec<String>| all.into_iter().map(|words| format!("pod {pod}: {words}")).collect();
        let told = |one: ToldEvent| ToldEvent { message: format!("pod {pod}: {}", one.message), ..one };
        Self {
            lacks: with(self.lacks),
            remarks: with(self.remarks),
            events: self.events.into_iter().map(told).collect(),
            ..self
        }
    }

    fn add(&mut self, other: Self) {
        self.subjects.extend(other.subjects);
        self.lacks.extend(other.lacks);
        self.remarks.extend(other.remarks);
        self.events.extend(other.events);
    }
}

/// # Errors
/// There is no such claim.
pub fn of_claim(site: &ClusterSite, named: &NamedObject) -> anyhow::Result<Subjects> {
    let claim = site.core.view.claim_named(&named.namespace, &named.name);
    let claim = claim.map(|claim| claim.key).ok_or_else(|| find::no_claim(&site.core.view, named))?;
    Ok(Subjects { subjects: vec![Subject::Claim(claim)], ..Subjects::default() })
}

/// # Errors
/// There is no such pod, or the API server does not answer.
pub async fn of_pod_named(
    cluster: &KubeCluster,
    site: &ClusterSite,
    named: &NamedObject,
) -> anyhow::Result<Subjects> {
    let object = match cluster.pod_named(&named.namespace, &named.name).await {
        Ok(object) => object,
        Err(CallError::NotFound { .. }) => return Err(find::no_pod(&site.core.view, named)),
        Err(error) => return Err(super::super::reach::for_people(error)),
    };
    of_pod(cluster, site, &object).await
}

/// The claims of a pod, and what it lacks.
async fn of_pod(cluster: &KubeCluster, site: &ClusterSite, object: &Pod) -> anyhow::Result<Subjects> {
    let meta = &object.metadata;
    let namespace = meta.namespace.as_deref().unwrap_or_default();
    let spec = object.spec.as_ref();
    let is_bound = spec.is_some_and(|spec| spec.node_name.as_ref().is_some_and(|node| !node.is_empty()));
    let told = told_of(cluster, namespace, meta.uid.as_deref().unwrap_or_default()).await?;
    let mut asked = Subjects {
        events: pod::worth_telling(&told, is_bound),
        remarks: pod::ends(object),
        ..Subjects::default()
    };
    if let Some(words) = pod::ended(object) {
        asked.remarks.insert(0, words);
        return Ok(asked);
    }
    let templates = looked_up(cluster, site, namespace, object).await?;
    asked.lacks = pod::lacks(object, &templates);
    let of_view = of_view(site, object);
    asked.add(of_view);
    let gates: Vec<&str> = spec
        .iter()
        .flat_map(|spec| spec.scheduling_gates.iter().flatten())
        .map(|gate| gate.name.as_str())
        .collect();
    if asked.subjects.is_empty() && !gates.is_empty() {
        asked.lacks.push(format!(
            "the pod has scheduling gates (spec.schedulingGates), and is not scheduled before whoever set them has taken \
             them away: {}",
            gates.join(", ")
        ));
    }
    if asked.subjects.is_empty() && asked.lacks.is_empty() {
        asked.remarks.push("the pod names no claim, so there is nothing to place for it".to_owned());
    }
    if site.quotas_denied && !asked.lacks.is_empty() {
        asked.remarks.push(format!(
            "you may not list resourcequotas in namespace {namespace}: whether one is used up is not known"
        ));
    }
    Ok(asked)
}

/// What the view knows of a pod: its claims, and its limits without one.
pub fn of_view(site: &ClusterSite, object: &Pod) -> Subjects {
    let mut asked = Subjects::default();
    let view = &site.core.view;
    let uid = PodUid::new(object.metadata.uid.clone().unwrap_or_default());
    let namespace = object.metadata.namespace.as_deref().unwrap_or_default();
    let pod = view.pod(&uid);
    for name in pod.iter().flat_map(|pod| &pod.requested.claims) {
        match view.claim_named(namespace, name) {
            Some(claim) => asked.subjects.push(Subject::Claim(claim.key)),
            None => {
                let why = pod.and_then(|pod| view.not_promised(pod));
                let words = || format!("claim {name}, which the pod names, does not exist; create it");
                asked.lacks.push(why.unwrap_or_else(words));
            }
        }
    }
    let status = object.status.as_ref().and_then(|status| status.extended_resource_claim_status.as_ref());
    let made = status.and_then(|status| view.claim_named(namespace, &status.resource_claim_name));
    match made {
        Some(claim) => asked.subjects.push(Subject::Claim(claim.key)),
        None if pod.is_some() && !site.listing.limits(object).is_empty() => {
            asked.subjects.push(Subject::Limits(uid));
        }
        None => {}
    }
    asked
}

/// The templates of which the pod has no claim yet.
async fn looked_up(
    cluster: &KubeCluster,
    site: &ClusterSite,
    namespace: &str,
    object: &Pod,
) -> anyhow::Result<BTreeMap<String, Template>> {
    let mut found = BTreeMap::new();
    for name in pod::templates(object) {
        let template = match cluster.template_named(namespace, &name).await {
            Ok(template) => {
                let spec = template.spec.and_then(|spec| spec.spec?.devices).unwrap_or_default();
                let usage = quota::of_claim(&spec, site.listing.classes());
                Template::There { full: quota::exceeded(site.listing.quotas(), &usage) }
            }
            Err(CallError::NotFound { .. }) => Template::Missing,
            Err(CallError::Forbidden { .. }) => Template::Unknown,
            Err(error) => return Err(super::super::reach::for_people(error)),
        };
        found.insert(name, template);
    }
    Ok(found)
}

/// Who may not list events is told none.
async fn told_of(cluster: &KubeCluster, namespace: &str, uid: &str) -> Result<Vec<ToldEvent>, CallError> {
    match cluster.told_of(namespace, uid).await {
        Err(CallError::Forbidden { .. }) => Ok(Vec::new()),
        told => told,
    }
}

/// The pods of a workload that wait, else its newest; or why it has none.
///
/// # Errors
/// There is no such workload, or the API server does not answer.
pub async fn of_workload(
    cluster: &KubeCluster,
    site: &ClusterSite,
    kind: WorkloadKind,
    named: &NamedObject,
) -> anyhow::Result<Subjects> {
    let for_people = super::super::reach::for_people;
    let workload = match cluster.workload(kind, &named.namespace, &named.name).await {
        Ok(workload) => workload,
        Err(CallError::NotFound { .. }) => {
            anyhow::bail!("there is no {} {} in namespace {}", named.kind, named.name, named.namespace)
        }
        Err(error) => return Err(for_people(error)),
    };
    let mut makers = cluster.makers(&named.namespace, &workload).await.map_err(for_people)?;
    makers.push(workload.clone());
    let (pods, more) = chosen(site, &makers);
    let mut asked = Subjects::default();
    for pod in &pods {
        let one = of_pod(cluster, site, pod).await?;
        asked.add(one.of(pod.metadata.name.as_deref().unwrap_or_default()));
    }
    if more > 0 {
        asked.remarks.push(format!("{more} more of its pods wait"));
    }
    if workload.suspended {
        asked.lacks.push(format!("{} {} is suspended (spec.suspend)", named.kind, named.name));
    }
    let failures: Vec<String> = makers.iter().flat_map(|maker| maker.failures.clone()).collect();
    let wants = workload.pods.unwrap_or(1);
    if pods.is_empty() && failures.is_empty() && !workload.suspended {
        match wants {
            0 => asked.remarks.push("it is to have no pods (spec.replicas is 0)".to_owned()),
            _ if kind == WorkloadKind::CronJob => {
                asked
                    .remarks
                    .push("no pod of its Jobs is there or waits; its schedule makes the next Job".to_owned());
            }
            _ => asked.lacks.push("none of its pods is there, or all have ended".to_owned()),
        }
    }
    for failure in failures {
        if !asked.lacks.contains(&failure) {
            asked.lacks.push(failure);
        }
    }
    for maker in &makers {
        let told = told_of(cluster, &named.namespace, &maker.uid).await?;
        asked.events.extend(pod::worth_telling(&told, false));
    }
    Ok(asked)
}

/// The pods to explain, and how many more wait.
fn chosen(site: &ClusterSite, makers: &[Workload]) -> (Vec<Pod>, usize) {
    let is_made = |pod: &&Pod| {
        let owners = pod.metadata.owner_references.iter().flatten();
        owners
            .filter(|owner| owner.controller == Some(true))
            .any(|owner| makers.iter().any(|one| one.uid == owner.uid))
    };
    let created = |pod: &&Pod| pod.metadata.creation_timestamp.as_ref().map(|time| time.0);
    let mut made: Vec<&Pod> = site.listing.pods().filter(is_made).collect();
    made.sort_by_key(created);
    let waits = |pod: &&&Pod| {
        let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref());
        node.unwrap_or_default().is_empty()
    };
    let waiting: Vec<Pod> = made.iter().filter(waits).map(|pod| (*pod).clone()).collect();
    match waiting.len() {
        0 => (made.last().map(|pod| (*pod).clone()).into_iter().collect(), 0),
        count => (waiting.into_iter().take(PODS_MAX).collect(), count.saturating_sub(PODS_MAX)),
    }
}
