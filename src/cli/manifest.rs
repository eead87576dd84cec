//! The claim that is asked about: a ResourceClaim from a file, standard input or the cluster.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim};
use serde::Serialize;
use serde_json::{Value, json};

use super::UsageError;
use super::reading::{Document, typed, unknown_fields};
use crate::admission::{self, KnownClasses, Problem};
use crate::cluster::{ClaimError, read_claim};
use crate::model::claim::{AllocatedClaim, ClaimRef};
use crate::model::names::{ClaimUid, DRIVER, PoolName, RequestName, SHARED_CLASS};
use crate::params::{self, GpuShare, Params, ShareSource};
use crate::select::Placer;

const API_VERSION: &str = "resource.k8s.io/v1";
const KIND: &str = "ResourceClaim";
const TEMPLATE: &str = "ResourceClaimTemplate";
const CLASS: &str = "DeviceClass";
/// The classes of whole GPUs, of which kube-scheduler gives parts by `capacity`, and of MIG devices.
const WHOLE_CLASS: &str = "gpu.nvidia.com";
const MIG_CLASS: &str = "mig.nvidia.com";
/// Stands in for the UID that only the API server gives.
const NO_UID: &str = "00000000-0000-0000-0000-000000000000";

/// Where to read the claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// `-` is standard input.
    File(PathBuf),
    Named {
        namespace: String,
        name: String,
    },
}

impl Source {
    /// `-`, a file's path, or if there is no file of that path `namespace/name`, or `name` where a namespace was given.
    ///
    /// # Errors
    /// It is none of them, or two namespaces are named.
    pub fn parse(
        text: &str,
        given: Option<&str>,
        exists: impl Fn(&Path) -> bool,
    ) -> Result<Self, UsageError> {
        if text == "-" || exists(Path::new(text)) {
            return Ok(Self::File(PathBuf::from(text)));
        }
        let word = |part: &str| {
            !part.is_empty() && part.bytes().all(|b| b.is_ascii_alphanumeric() || b"-.".contains(&b))
        };
        let file = [".yaml", ".yml", ".json"].iter().any(|ending| text.ends_with(ending));
        let named = match (text.split_once('/'), given) {
            _ if file => None,
            (Some((namespace, name)), _) if namespace != "." && namespace != ".." => Some((namespace, name)),
            (None, Some(namespace)) => Some((namespace, text)),
            _ => None,
        };
        match named.filter(|(namespace, name)| word(namespace) && word(name)) {
            Some((namespace, _)) if given.is_some_and(|given| given != namespace) => Err(UsageError(
                format!("--claim {text} and -n {} name two namespaces; give one", given.unwrap_or_default()),
            )),
            Some((namespace, name)) => {
                Ok(Self::Named { namespace: namespace.to_owned(), name: name.to_owned() })
            }
            None => Err(UsageError(format!(
                "--claim: there is no file {text:?}; give the path of a YAML or JSON file, - for standard input, \
                 or namespace/name for a claim in the cluster"
            ))),
        }
    }
}

/// A ResourceClaim that can be asked what preparing it would need.
#[derive(Debug, Clone)]
pub struct Manifest {
    pub claim: ClaimRef,
    object: Value,
    /// What the object is called in words about what is wrong with it.
    place: String,
    /// True if the object has no UID, as one that was never sent to an API server.
    pub without_uid: bool,
    /// The claim is one that a pod would get by a ResourceClaimTemplate of the claim's name.
    pub is_of_template: bool,
    /// What the DeviceClasses say; none: there was none to be read.
    pub classes: Option<KnownClasses>,
}

/// One request of a claim's spec, or one alternative of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RequestedDevices {
    pub request: String,
    pub device_class: String,
    /// A number, or `All`.
    pub count: String,
    pub selectors: Vec<String>,
    /// `name=quantity`.
    pub capacity: Vec<String>,
    pub admin_access: bool,
    pub access: RequestedAccess,
}

/// How a request is to have its devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum RequestedAccess {
    Admin,
    Exclusive,
    Share,
    /// A MIG device that the controller has made for the claim.
    #[serde(rename = "MIG")]
    Mig,
    /// A class of an administrator's own, which is not known here.
    #[serde(rename = "By its class")]
    ByClass,
}

impl RequestedAccess {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Admin => "Admin",
            Self::Exclusive => "Exclusive",
            Self::Share => "Share",
            Self::Mig => "MIG",
            Self::ByClass => "By its class",
        }
    }
}

/// None: a class of an administrator's own, which is not known here.
pub fn placer_of(class: &str) -> Option<Placer> {
    match class {
        SHARED_CLASS => Some(Placer::Controller),
        WHOLE_CLASS | MIG_CLASS => Some(Placer::Scheduler),
        _ => None,
    }
}

impl Manifest {
    /// The claims among these objects, and those that would be made from templates among them.
    ///
    /// # Errors
    /// There is none, or one cannot be asked.
    pub fn all(objects: Vec<Document>) -> Result<Vec<Self>, UsageError> {
        let kinds: BTreeSet<String> = objects.iter().map(|object| object.kind().to_owned()).collect();
        let ours: Vec<Document> =
            objects.into_iter().filter(|object| [KIND, TEMPLATE].contains(&object.kind())).collect();
        if ours.is_empty() {
            let kinds = Vec::from_iter(kinds).join(", ");
            return Err(UsageError(format!(
                "there are only objects of kind {kinds}, but a {KIND} or a {TEMPLATE} is needed"
            )));
        }
        ours.into_iter().map(Self::of).collect()
    }

    fn of(document: Document) -> Result<Self, UsageError> {
        if document.kind() != TEMPLATE {
            return Self::new(document);
        }
        let Document { value: object, .. } = &document;
        let is_shallow = object["spec"]["spec"].is_null() && !object["spec"]["devices"].is_null();
        if is_shallow {
            return Err(
                document.wrong("spec.devices belongs below spec.spec, the spec of the claims that it makes")
            );
        }
        let claim = json!({"apiVersion": object["apiVersion"], "kind": KIND, "spec": object["spec"]["spec"],
            "metadata": {"name": object["metadata"]["name"], "namespace": object["metadata"]["namespace"]}});
        let place = document.named();
        let claim = Self::new(Document { value: claim, ..document })?;
        Ok(Self { is_of_template: true, place, ..claim })
    }

    /// # Errors
    /// It is another kind of object, lacks a name, or does not fit its type.
    pub fn new(document: Document) -> Result<Self, UsageError> {
        let (version, kind) = (document.text("/apiVersion"), document.kind());
        if (version, kind) != (API_VERSION, KIND) {
            return Err(document.wrong(format!(
                "apiVersion is {version:?}, but a {KIND} of {API_VERSION} is needed: \
                 kubectl get resourceclaims.v1.resource.k8s.io NAME -o yaml"
            )));
        }
        let name = document.text("/metadata/name").to_owned();
        if name.is_empty() {
            return Err(document.wrong("metadata.name is missing"));
        }
        let namespace = Some(document.text("/metadata/namespace")).filter(|name| !name.is_empty());
        let namespace = namespace.unwrap_or("default").to_owned();
        let without_uid = document.text("/metadata/uid").is_empty();
        let place = document.named();
        let mut object = document.value;
        if without_uid {
            object["metadata"]["uid"] = json!(NO_UID);
        }
        let uid = ClaimUid::new(object.pointer("/metadata/uid").and_then(Value::as_str).unwrap_or_default());
        let claim = ClaimRef { namespace, name, uid };
        Ok(Self { claim, object, place, without_uid, is_of_template: false, classes: None })
    }

    /// As the node plugin reads it: with the same refusals.
    ///
    /// # Errors
    /// The outer one if the object does not fit the type, which no API server would have kept.
    pub fn allocated(&self) -> Result<Result<AllocatedClaim, ClaimError>, UsageError> {
        let object = typed(&self.object).map_err(|words| UsageError(format!("{}: {words}", self.place)))?;
        Ok(read_claim::read(&self.claim, &object))
    }

    /// What would be refused of the spec, each with the path of the field: by the webhook, and what is said once the claim
    /// waits or is prepared.
    pub fn problems(&self) -> Vec<String> {
        let at = if self.is_of_template { "spec.spec" } else { "spec" };
        let of = |classes: &KnownClasses| admission::problems(&self.object["spec"], at, classes);
        let whatever = of(&KnownClasses::default());
        // Of a class that was not read: the one that is shipped says nothing.
        let all = of(self.classes.as_ref().unwrap_or(&KnownClasses::of(&[])));
        let told = |one: &Problem| {
            let unless = match self.classes.is_none() && !whatever.contains(one) {
                true => format!(
                    " (unless DeviceClass {SHARED_CLASS} says it; put the class into the file as well)"
                ),
                false => String::new(),
            };
            format!("{} would be refused: {}{unless}", one.field, one.words)
        };
        all.iter().map(told).collect()
    }

    /// Paths of fields that a ResourceClaim does not have, as far as this release knows.
    pub fn unknown_fields(&self) -> Vec<String> {
        let object = typed::<ResourceClaim>(&self.object).ok();
        object.map_or_else(Vec::new, |object| unknown_fields(&self.object, &object))
    }

    /// What the spec asks for, alternatives one by one.
    pub fn asked(&self) -> Vec<RequestedDevices> {
        let mut asked = Vec::new();
        for request in array(&self.object, "/spec/devices/requests") {
            let name = word(request, "name");
            let alternatives = array(request, "/firstAvailable");
            match request.get("exactly") {
                Some(exactly) => asked.push(self.one(name.to_owned(), exactly)),
                None => asked.extend(
                    alternatives.iter().map(|sub| self.one(format!("{name}/{}", word(sub, "name")), sub)),
                ),
            }
        }
        asked
    }

    fn one(&self, request: String, spec: &Value) -> RequestedDevices {
        let count = match word(spec, "allocationMode") {
            "All" => "All".to_owned(),
            _ => spec.get("count").and_then(Value::as_u64).unwrap_or(1).to_string(),
        };
        let selectors = array(spec, "/selectors").iter();
        let selectors = selectors.filter_map(|selector| selector.pointer("/cel/expression")?.as_str());
        RequestedDevices {
            device_class: word(spec, "deviceClassName").to_owned(),
            count,
            selectors: selectors.map(|cel| cel.trim().to_owned()).collect(),
            capacity: capacity(spec)
                .map(|(name, quantity)| format!("{name}={}", quantity.unwrap_or("?")))
                .collect(),
            admin_access: spec.get("adminAccess") == Some(&Value::Bool(true)),
            access: self.access(&RequestName::new(request.as_str()), spec),
            request,
        }
    }

    fn access(&self, request: &RequestName, spec: &Value) -> RequestedAccess {
        if spec.get("adminAccess") == Some(&Value::Bool(true)) {
            return RequestedAccess::Admin;
        }
        let class = word(spec, "deviceClassName");
        match (placer_of(class), self.share(request, spec)) {
            (None, _) => RequestedAccess::ByClass,
            (Some(Placer::Scheduler | Placer::Doubtful), _) => {
                let is_part = class == WHOLE_CLASS && capacity(spec).next().is_some();
                if is_part { RequestedAccess::Share } else { RequestedAccess::Exclusive }
            }
            (Some(Placer::Controller), share) if share.is_mig() => RequestedAccess::Mig,
            (Some(Placer::Controller), share) if share.is_whole() => RequestedAccess::Exclusive,
            (Some(Placer::Controller), _) => RequestedAccess::Share,
        }
    }

    /// What the claim says of the request, in the last `GpuShare` that is meant for it and in the request's capacities.
    /// What is wrong with either is told by [`Self::problems`].
    fn share(&self, request: &RequestName, spec: &Value) -> GpuShare {
        let is_meant = |config: &&Value| {
            let mut selectors = array(config, "/requests").iter().filter_map(Value::as_str).peekable();
            selectors.peek().is_none() || selectors.any(|selector| request.is_meant_by(selector))
        };
        let configs = array(&self.object, "/spec/devices/config").iter().filter(is_meant);
        let of_ours = configs.filter(|config| config.pointer("/opaque/driver") == Some(&Value::from(DRIVER)));
        let mut shares =
            of_ours.filter_map(|config| match params::decode(config.pointer("/opaque/parameters")?) {
                Ok(Params::Share(share)) => Some(share),
                _ => None,
            });
        let said = shares.next_back();
        let amounts = capacity(spec).filter_map(|(name, quantity)| Some((name, quantity?)));
        let asked = params::asked(said.as_ref().map_or(ShareSource::Nowhere, ShareSource::ByClaim), amounts);
        asked.ok().or(said).unwrap_or_default()
    }

    /// The pool of our first result: the name of the node that was meant.
    pub fn pool(&self) -> Option<String> {
        let mut results = array(&self.object, "/status/allocation/devices/results").iter();
        let pool =
            results.find(|result| word(result, "driver") == DRIVER).map(|result| word(result, "pool"))?;
        (!pool.is_empty()).then(|| PoolName::new(pool).node().to_string())
    }

    /// `device of driver`, for results that other drivers serve.
    pub fn foreign(&self) -> Vec<String> {
        let results = array(&self.object, "/status/allocation/devices/results").iter();
        let foreign = results.filter(|result| word(result, "driver") != DRIVER);
        foreign.map(|result| format!("{} of {}", word(result, "device"), word(result, "driver"))).collect()
    }
}

/// What the DeviceClasses among these objects say of the controller's claims; none if there is no class.
///
/// # Errors
/// One does not fit its type.
pub fn classes(objects: &[Document]) -> Result<Option<KnownClasses>, UsageError> {
    let classes = objects.iter().filter(|object| object.kind() == CLASS);
    let classes: Vec<DeviceClass> = classes.map(Document::typed).collect::<Result<_, _>>()?;
    Ok((!classes.is_empty()).then(|| KnownClasses::of(&classes)))
}

/// Names of the request's capacities, with their quantities where they are texts.
fn capacity(spec: &Value) -> impl Iterator<Item = (&str, Option<&str>)> {
    let requests = spec.pointer("/capacity/requests").and_then(Value::as_object).into_iter().flatten();
    requests.map(|(name, quantity)| (name.as_str(), quantity.as_str()))
}

fn array<'a>(value: &'a Value, path: &str) -> &'a [Value] {
    value.pointer(path).and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default()
}

fn word<'a>(value: &'a Value, field: &str) -> &'a str {
    value.get(field).and_then(Value::as_str).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::super::reading::documents;
    use super::*;

    fn document(value: Value) -> Document {
        Document { value, place: "f".to_owned() }
    }

    fn words<T: std::fmt::Debug>(result: Result<T, UsageError>) -> String {
        result.unwrap_err().to_string()
    }

    #[test]
    fn a_claim_is_a_file_or_a_name() {
        let parsed = |text: &str, exists: bool| Source::parse(text, None, |_| exists);
        assert_eq!(parsed("-", false).unwrap(), Source::File("-".into()));
        assert_eq!(parsed("a/b", true).unwrap(), Source::File("a/b".into()));
        let named = Source::Named { namespace: "team".into(), name: "train".into() };
        assert_eq!(parsed("team/train", false).unwrap(), named);
        for wrong in ["claim.yaml", "team/claim.yaml", "./train", "../train", "a/b/c", "train", "/train", ""]
        {
            assert!(words(parsed(wrong, false)).contains("namespace/name"), "{wrong}");
        }
        let within = |text: &str| Source::parse(text, Some("team"), |_| false);
        assert_eq!((within("train").unwrap(), within("team/train").unwrap()), (named.clone(), named));
        assert!(words(within("ml/train")).contains("two namespaces"));
        assert!(words(within("claim.yaml")).contains("no file"));
    }

    #[test]
    fn another_kind_of_object_is_refused_with_what_to_do() {
        let old = json!({"apiVersion": "resource.k8s.io/v1beta1", "kind": KIND, "metadata": {"name": "a"}});
        let words = words(Manifest::new(document(old)));
        assert!(
            words.starts_with("f: ResourceClaim \"a\": apiVersion is \"resource.k8s.io/v1beta1\""),
            "{words}"
        );
        assert!(words.contains("kubectl get"), "{words}");
    }

    #[test]
    fn claims_and_templates_are_found_among_other_objects_and_in_lists() {
        let claim = |name: &str| json!({"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}});
        let list = json!({"kind": "List", "items": [claim("b"), {"kind": "Pod"}]});
        let file = format!(
            "# first\n---\nkind: Pod\n---\napiVersion: {API_VERSION}\nkind: {TEMPLATE}\n\
             metadata: {{name: t, namespace: ml}}\nspec: {{spec: {{devices: {{requests: [{{name: gpu, exactly: \
             {{deviceClassName: gpu.nvidia.com}}}}]}}}}}}\n---\n{list}\n---\n"
        );
        let found = Manifest::all(documents(&file, "f").unwrap()).unwrap();
        let seen: Vec<_> = found.iter().map(|one| (one.claim.to_string(), one.is_of_template)).collect();
        let of = |place: &str, by_template| (format!("{place} ({NO_UID})"), by_template);
        assert_eq!(seen, [of("ml/t", true), of("default/b", false)]);
        assert_eq!(found[0].asked()[0].device_class, "gpu.nvidia.com");
        let told = words(Manifest::all(documents("kind: Pod\n---\nkind: Job", "f").unwrap()));
        assert!(told.contains("only objects of kind Job, Pod"), "{told}");
    }

    #[test]
    fn what_does_not_fit_the_type_is_named_by_its_path() {
        let object = json!({"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "a"},
                            "status": {"allocation": {"devices": {"results": "none"}}}});
        let manifest = Manifest::new(document(object)).unwrap();
        assert!(manifest.without_uid);
        assert!(words(manifest.allocated()).contains("status.allocation.devices.results: "));
    }

    #[test]
    fn two_amounts_that_differ_are_told_with_both_numbers() {
        let asks = |mib: u32| {
            let share = json!({"apiVersion": "tranche.dev/v1alpha1", "kind": "GpuShare", "memory": format!("{mib}Mi")});
            let exactly =
                json!({"deviceClassName": SHARED_CLASS, "capacity": {"requests": {"memory": "2000Mi"}}});
            let spec = json!({"devices": {"requests": [{"name": "gpu", "exactly": exactly}],
                "config": [{"opaque": {"driver": DRIVER, "parameters": share}}]}});
            let object =
                json!({"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "a"}, "spec": spec});
            Manifest::new(document(object)).unwrap().problems()
        };
        assert_eq!(asks(2000), [""; 0]);
        let told = asks(1000);
        let words = "spec.devices.requests[0].exactly.capacity.requests[memory] would be refused: asks for 2000 MiB, but \
                     the claim's GpuShare says 1000 MiB; write the same in both, or remove one";
        assert_eq!(told, [words]);
    }

    #[test]
    fn requests_are_told_with_their_alternatives() {
        let object = json!({"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "a"}, "spec": {"devices": {
        "requests": [
            {"name": "gpu", "exactly": {
                "deviceClassName": "gpu.nvidia.com", "count": 2,
                "selectors": [{"cel": {"expression": "device.driver == 'x'\n"}}],
                "capacity": {"requests": {"memory": "10Gi"}}}},
            {"name": "any", "firstAvailable": [
                {"name": "mig", "deviceClassName": "mig.nvidia.com"},
                {"name": "all", "deviceClassName": "gpu.nvidia.com", "allocationMode": "All"}]},
        ]}}});
        let asked = Manifest::new(document(object)).unwrap().asked();
        let seen: Vec<_> = asked.iter().map(|a| (a.request.as_str(), a.count.as_str())).collect();
        assert_eq!(seen, [("gpu", "2"), ("any/mig", "1"), ("any/all", "All")]);
        assert_eq!(asked[0].selectors, ["device.driver == 'x'"]);
        assert_eq!(asked[0].capacity, ["memory=10Gi"]);
    }

    #[test]
    fn each_request_is_told_with_the_access_that_its_own_parameters_ask_for() {
        let share = |requests: Value, mut fields: Value| {
            fields["apiVersion"] = json!("tranche.dev/v1alpha1");
            fields["kind"] = json!("GpuShare");
            json!({"requests": requests, "opaque": {"driver": DRIVER, "parameters": fields}})
        };
        let shared = json!({"deviceClassName": SHARED_CLASS});
        let part = json!({"requests": {"memory": "2Gi"}});
        let object = json!({"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "a"}, "spec": {"devices": {
        "requests": [
            {"name": "share", "exactly": shared}, {"name": "mig", "exactly": shared}, {"name": "whole", "exactly": shared},
            {"name": "amount", "exactly": {"deviceClassName": SHARED_CLASS, "capacity": part}},
            {"name": "part", "exactly": {"deviceClassName": WHOLE_CLASS, "capacity": part}},
            {"name": "sized", "exactly": {"deviceClassName": MIG_CLASS, "capacity": part}},
            {"name": "own", "exactly": {"deviceClassName": "team"}},
            {"name": "look", "exactly": {"deviceClassName": WHOLE_CLASS, "adminAccess": true}}],
        "config": [
            share(json!([]), json!({"memory": "1Gi"})),
            share(json!(["mig"]), json!({"memory": "1Gi", "minimumIsolation": "mig"})),
            share(json!(["whole"]), json!({"fraction": "1", "minimumIsolation": "mig"})),
            share(json!(["amount"]), json!({"minimumIsolation": "mig"}))]}}});
        let asked = Manifest::new(document(object)).unwrap().asked();
        let seen: Vec<_> =
            asked.iter().map(|one| format!("{}: {}", one.request, one.access.as_str())).collect();
        assert_eq!(
            seen,
            [
                "share: Share",
                "mig: MIG",
                "whole: Exclusive",
                "amount: MIG",
                "part: Share",
                "sized: Exclusive",
                "own: By its class",
                "look: Admin"
            ]
        );
    }
}
