//! The pods of a file, with the claims and templates of its other documents: asked about as if they were created now,
//! beside all that the cluster has. Reads the file; creates nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Container, Pod, PodResourceClaimStatus, PodSpec};
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceClaimTemplate};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference, Time};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::super::UsageError;
use super::super::reading::{Document, documents, input, typed, unknown_fields};
use crate::cluster::WorkloadKind;
use crate::cluster::feed::{Change, WatchEvent};
use crate::controller::explain::quota::{self, QuotaUsage};
use crate::controller::view::class::OtherClass;

const CLAIM_VERSION: &str = "resource.k8s.io/v1";
/// What is appended to the names of the cluster's objects that a file has objects of the same name as.
const IN_CLUSTER: &str = " (in the cluster)";

/// The objects of a file that matter.
#[derive(Debug, Default)]
pub struct FileObjects {
    pub namespace: String,
    pub pods: Vec<Pod>,
    claims: BTreeMap<String, ResourceClaim>,
    templates: BTreeMap<String, ResourceClaimTemplate>,
    /// What the answer is not about.
    remarks: Vec<String>,
}

impl FileObjects {
    /// Reads a file, or standard input if it is `-`. `namespace`: what was given; none: what `default` says, where an
    /// object does not say itself.
    ///
    /// # Errors
    /// It cannot be read, or there is no pod in it.
    pub fn read(
        path: &Path,
        namespace: Option<&str>,
        default: impl FnOnce() -> String,
    ) -> Result<Self, UsageError> {
        let (text, from) = input(path)?;
        Self::of(documents(&text, &from)?, &from, namespace, default)
    }

    /// # Errors
    /// As [`FileObjects::read`].
    pub fn of(
        objects: Vec<Document>,
        from: &str,
        namespace: Option<&str>,
        default: impl FnOnce() -> String,
    ) -> Result<Self, UsageError> {
        let mut found = Self::default();
        let mut namespaces = BTreeSet::new();
        for object in objects {
            let kind = object.kind().to_owned();
            let is_workload = WorkloadKind::ALL.iter().any(|one| one.as_str() == kind);
            if !is_workload && !["Pod", "ResourceClaim", "ResourceClaimTemplate"].contains(&kind.as_str()) {
                continue;
            }
            namespaces
                .extend(Some(object.text("/metadata/namespace").to_owned()).filter(|own| !own.is_empty()));
            is_of_version(&object)?;
            match kind.as_str() {
                "ResourceClaim" => {
                    let claim: ResourceClaim = found.typed(&object)?;
                    found.claims.insert(named(&object)?, claim);
                }
                "ResourceClaimTemplate" => {
                    let template: ResourceClaimTemplate = found.typed(&object)?;
                    found.templates.insert(named(&object)?, template);
                }
                "Pod" => {
                    let pod = found.typed(&object)?;
                    found.pods.push(pod);
                }
                _ => {
                    found.remarks.extend(one_of_many(&object.value, &kind));
                    let pod = found.typed_template(&object, &kind)?;
                    found.pods.push(pod);
                }
            }
        }
        if found.pods.is_empty() {
            return Err(UsageError(format!(
                "there is no Pod in {from}, nor a {}",
                WorkloadKind::ALL.map(WorkloadKind::as_str).join(", ")
            )));
        }
        found.names_are_distinct(from)?;
        found.remarks.extend(found.pods.iter().filter_map(unknown_priority));
        namespaces.extend(namespace.map(str::to_owned));
        if namespaces.len() > 1 {
            let all: Vec<String> = namespaces.into_iter().collect();
            return Err(UsageError(format!(
                "{from}: several namespaces are named: {}; ask about one at a time",
                all.join(", ")
            )));
        }
        found.namespace = namespaces.pop_first().unwrap_or_else(default);
        Ok(found)
    }

    /// The object; what it has that its type has not is remarked.
    fn typed<K: DeserializeOwned + Serialize>(&mut self, object: &Document) -> Result<K, UsageError> {
        let typed = object.typed()?;
        self.remark(object, "", unknown_fields(&object.value, &typed));
        Ok(typed)
    }

    /// The pod that a Deployment, a Job and so on would make.
    fn typed_template(&mut self, object: &Document, kind: &str) -> Result<Pod, UsageError> {
        let below = if kind == "CronJob" { "spec.jobTemplate.spec.template" } else { "spec.template" };
        let pod = of_template(&object.value, below);
        let typed: Pod = typed(&pod).map_err(|words| object.wrong(format!("{below}.{words}")))?;
        self.remark(object, below, unknown_fields(&pod, &typed));
        Ok(typed)
    }

    fn remark(&mut self, object: &Document, below: &str, unknown: Vec<String>) {
        let dot = if below.is_empty() { "" } else { "." };
        let words = |field: String| {
            format!("{}: unknown field \"{below}{dot}{field}\": is it misspelt?", object.named())
        };
        self.remarks.extend(unknown.into_iter().map(words));
    }

    /// The claims of two pods of one name would be one.
    fn names_are_distinct(&self, from: &str) -> Result<(), UsageError> {
        let mut names = BTreeSet::new();
        let name = |pod: &Pod| pod.metadata.name.clone().or(pod.metadata.generate_name.clone());
        match self.pods.iter().filter_map(name).find(|name| !names.insert(name.clone())) {
            None => Ok(()),
            Some(name) => Err(UsageError(format!(
                "{from}: two of its objects make pods named {name}; ask about one at a time"
            ))),
        }
    }

    /// What the answer is not about, in words.
    pub fn remarks(&self) -> &[String] {
        &self.remarks
    }

    /// Templates that its pods name and that the file lacks.
    pub fn missing_templates(&self) -> BTreeSet<String> {
        let entries = self.pods.iter().flat_map(entries);
        let named = entries.filter_map(|(_, _, template)| template);
        named.filter(|template| !self.templates.contains_key(*template)).map(str::to_owned).collect()
    }

    /// The objects as the cluster would have them: claims made of their templates, what the API server fills in.
    /// `found`: templates of the cluster. What the pods lack, in words.
    pub fn complete(
        &mut self,
        found: &BTreeMap<String, ResourceClaimTemplate>,
        at: Timestamp,
    ) -> Vec<String> {
        let mut lacks = Vec::new();
        let Self { namespace, pods, claims, templates, .. } = self;
        for (nth, pod) in pods.iter_mut().enumerate() {
            let prefix = pod.metadata.generate_name.clone();
            let name = pod.metadata.name.clone().or(prefix).unwrap_or_else(|| format!("pod-{nth}"));
            let uid = format!("file-pod-{nth}");
            let made = |entry: &str| format!("{}-{entry}", name.trim_end_matches('-'));
            for (entry, _, template) in entries(&pod.clone()) {
                let Some(template) = template else { continue };
                let Some(object) = templates.get(template).or_else(|| found.get(template)) else {
                    lacks.push(format!(
                        "there is no ResourceClaimTemplate {template} in the file, nor in namespace {namespace}"
                    ));
                    continue;
                };
                let spec = object.spec.clone().unwrap_or_default();
                let metadata =
                    ObjectMeta { owner_references: Some(vec![owner(&name, &uid)]), ..ObjectMeta::default() };
                claims.insert(made(entry), ResourceClaim { metadata, spec: spec.spec, status: None });
                let statuses =
                    pod.status.get_or_insert_default().resource_claim_statuses.get_or_insert_default();
                statuses.push(PodResourceClaimStatus {
                    name: entry.to_owned(),
                    resource_claim_name: Some(made(entry)),
                });
            }
            pod.metadata.namespace = Some(namespace.clone());
            pod.metadata.name = Some(name.trim_end_matches('-').to_owned());
            pod.metadata.uid = Some(uid);
            // Last of those of its priority.
            pod.metadata.creation_timestamp = Some(Time(at));
            pod.spec.as_mut().map(fill_in);
        }
        for (nth, (name, claim)) in claims.iter_mut().enumerate() {
            claim.metadata.namespace = Some(namespace.clone());
            claim.metadata.name = Some(name.clone());
            claim.metadata.uid = Some(format!("file-claim-{nth}"));
            claim.status = None;
        }
        lacks
    }

    pub fn has_claim(&self, name: &str) -> bool {
        self.claims.contains_key(name)
    }

    /// What creating all of it would add to the quotas of the namespace.
    pub fn usage(&self, classes: &BTreeMap<String, OtherClass>) -> QuotaUsage {
        let claims = self.claims.values().filter_map(|claim| claim.spec.as_ref()?.devices.as_ref());
        let claims = claims.map(|devices| quota::of_claim(devices, classes));
        let pods = self.pods.iter().filter_map(|pod| pod.spec.as_ref()).map(quota::of_pod);
        claims.chain(pods).fold(QuotaUsage::default(), QuotaUsage::plus)
    }

    /// A change that the cluster tells of, its object under another name if the file has one of its name. True: it
    /// was renamed.
    pub fn stand_aside(&self, change: &mut Change) -> bool {
        match change {
            Change::Claim(WatchEvent::Listed(claim)) => {
                let meta = &mut claim.metadata;
                let same = meta.namespace.as_ref() == Some(&self.namespace)
                    && meta.name.as_ref().is_some_and(|name| self.claims.contains_key(name));
                if same && let Some(name) = &mut meta.name {
                    name.push_str(IN_CLUSTER);
                }
                same
            }
            Change::Pod(WatchEvent::Listed(pod)) => self.rename_pod(pod),
            _ => false,
        }
    }

    fn rename_pod(&self, pod: &mut Pod) -> bool {
        if pod.metadata.namespace.as_ref() != Some(&self.namespace) {
            return false;
        }
        let of_spec = pod.spec.iter_mut().flat_map(|spec| spec.resource_claims.iter_mut().flatten());
        let statuses =
            pod.status.iter_mut().flat_map(|status| status.resource_claim_statuses.iter_mut().flatten());
        let names = of_spec
            .filter_map(|entry| entry.resource_claim_name.as_mut())
            .chain(statuses.filter_map(|status| status.resource_claim_name.as_mut()));
        for name in names.filter(|name| self.claims.contains_key(*name)) {
            name.push_str(IN_CLUSTER);
        }
        let same = self.pods.iter().any(|own| own.metadata.name == pod.metadata.name);
        if same && let Some(name) = &mut pod.metadata.name {
            name.push_str(IN_CLUSTER);
        }
        same
    }

    /// Its objects, as if they were stored now.
    pub fn changes(&self) -> impl Iterator<Item = Change> {
        let claim = |claim: &ResourceClaim| Change::Claim(WatchEvent::Stored(Box::new(claim.clone())));
        let pod = |pod: &Pod| Change::Pod(WatchEvent::Stored(Box::new(pod.clone())));
        self.claims.values().map(claim).chain(self.pods.iter().map(pod))
    }
}

/// Of each of the pod's entries the name, the claim and the template.
fn entries(pod: &Pod) -> impl Iterator<Item = (&str, Option<&str>, Option<&str>)> {
    let entries = pod.spec.iter().flat_map(|spec| spec.resource_claims.iter().flatten());
    entries.map(|one| {
        (one.name.as_str(), one.resource_claim_name.as_deref(), one.resource_claim_template_name.as_deref())
    })
}

fn named(object: &Document) -> Result<String, UsageError> {
    match object.text("/metadata/name") {
        "" => Err(object.wrong("metadata.name is missing")),
        name => Ok(name.to_owned()),
    }
}

/// Other versions of claims have other fields, which would count as not there.
fn is_of_version(object: &Document) -> Result<(), UsageError> {
    let version = object.text("/apiVersion");
    let is_claim = ["ResourceClaim", "ResourceClaimTemplate"].contains(&object.kind());
    match is_claim && !version.is_empty() && version != CLAIM_VERSION {
        true => Err(object.wrong(format!("apiVersion is {version:?}, but {CLAIM_VERSION} is needed"))),
        false => Ok(()),
    }
}

/// Where a workload makes several pods.
fn one_of_many(object: &Value, kind: &str) -> Option<String> {
    let (spec, field) = match kind {
        "CronJob" => (&object["spec"]["jobTemplate"]["spec"], "parallelism"),
        "Job" => (&object["spec"], "parallelism"),
        _ => (&object["spec"], "replicas"),
    };
    let pods = spec[field].as_u64().filter(|pods| *pods > 1)?;
    let name = object["metadata"]["name"].as_str().unwrap_or_default();
    Some(format!("{kind} {name} makes {pods} pods; the answer is about one of them"))
}

fn unknown_priority(pod: &Pod) -> Option<String> {
    let spec = pod.spec.as_ref().filter(|spec| spec.priority.is_none())?;
    let class = spec.priority_class_name.as_ref()?;
    Some(format!("PriorityClass {class} is not looked up; the pod counts as one of priority 0"))
}

/// The pod that would be made of the template at that path.
fn of_template(object: &Value, below: &str) -> Value {
    let template = below.split('.').fold(object, |value, field| &value[field]);
    let mut metadata = template["metadata"].clone();
    if !metadata.is_object() {
        metadata = json!({});
    }
    metadata["name"] = object["metadata"]["name"].clone();
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]})
}

fn owner(name: &str, uid: &str) -> OwnerReference {
    OwnerReference {
        api_version: "v1".to_owned(),
        kind: "Pod".to_owned(),
        name: name.to_owned(),
        uid: uid.to_owned(),
        controller: Some(true),
        ..OwnerReference::default()
    }
}

/// What is limited and not requested is requested as it is limited. The pod waits for its node.
fn fill_in(spec: &mut PodSpec) {
    let fill = |container: &mut Container| {
        let Some(resources) = &mut container.resources else { return };
        let Some(limits) = resources.limits.clone() else { return };
        let requests = resources.requests.get_or_insert_default();
        for (name, limit) in limits {
            requests.entry(name).or_insert(limit);
        }
    };
    spec.containers.iter_mut().chain(spec.init_containers.iter_mut().flatten()).for_each(fill);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Result<FileObjects, UsageError> {
        FileObjects::of(documents(text, "f")?, "f", None, || "team".to_owned())
    }

    const FILE: &str = "\
kind: ResourceClaimTemplate
metadata: {name: share}
spec: {spec: {devices: {requests: [{name: gpu, exactly: {deviceClassName: shared.gpu.nvidia.com}}]}}}
---
kind: Service
metadata: {name: s, namespace: elsewhere}
---
kind: Deployment
metadata: {name: web}
spec:
  template:
    spec:
      containers: [{name: main, resources: {limits: {cpu: 2, nvidia.com/gpu: 1}, requests: {cpu: 1}}}]
      resourceClaims: [{name: gpu, resourceClaimTemplateName: share}, {name: far, resourceClaimTemplateName: far}]
";

    #[test]
    fn claims_are_made_of_templates_and_requests_of_limits() {
        let mut file = of(FILE).unwrap();
        assert_eq!(file.namespace, "team");
        assert_eq!(Vec::from_iter(file.missing_templates()), ["far"]);
        let lacks = file.complete(&BTreeMap::new(), Timestamp::UNIX_EPOCH);
        assert_eq!(lacks, ["there is no ResourceClaimTemplate far in the file, nor in namespace team"]);
        assert!(file.has_claim("web-gpu") && !file.has_claim("web-far"));
        let pod = &file.pods[0];
        assert_eq!(pod.metadata.name.as_deref(), Some("web"));
        let spec = pod.spec.as_ref().unwrap();
        let requests = spec.containers[0].resources.as_ref().unwrap().requests.as_ref().unwrap();
        assert_eq!((requests["cpu"].0.as_str(), requests["nvidia.com/gpu"].0.as_str()), ("1", "1"));
    }

    #[test]
    fn what_the_answer_is_not_about_is_said() {
        let text = "\
kind: Job
metadata: {name: train}
spec: {parallelism: 4, template: {spec: {containers: [], priorityClassName: high}}}
";
        assert_eq!(
            of(text).unwrap().remarks(),
            [
                "Job train makes 4 pods; the answer is about one of them",
                "PriorityClass high is not looked up; the pod counts as one of priority 0"
            ]
        );
        assert_eq!(of(FILE).unwrap().remarks(), [""; 0]);
    }

    #[test]
    fn what_is_no_pod_of_one_namespace_is_refused() {
        let words = |text: &str| of(text).unwrap_err().to_string();
        assert!(words("kind: Service\nmetadata: {name: s}").starts_with("there is no Pod in f"));
        let two = "kind: Pod\nmetadata: {name: a, namespace: x}\n---\nkind: Pod\nmetadata: {name: b, namespace: y}\n";
        assert!(words(two).contains("several namespaces are named: x, y"));
        assert!(
            words("kind: Pod\nspec: {containers: none}").contains("f: Pod: spec.containers: must be a list")
        );
        let twins = "kind: Pod\nmetadata: {name: web}\n---\nkind: Deployment\nmetadata: {name: web}\nspec: {template: {}}\n";
        assert!(words(twins).contains("two of its objects make pods named web"), "{}", words(twins));
        assert!(words("kind: Service\nmetadata: {name: s}").contains("nor a Deployment, ReplicaSet"));
        assert!(
            words("kind: ResourceClaim\nspec: {}").contains("f: ResourceClaim: metadata.name is missing")
        );
    }
}
