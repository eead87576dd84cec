//! The claim that is asked about: a ResourceClaim from a file, standard input or the cluster.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::{Value, json};

use super::Usage;
use crate::cluster::{ClaimError, read_claim};
use crate::model::claim::{AllocatedClaim, ClaimRef};
use crate::model::names::{ClaimUid, DRIVER, PoolName};

const API_VERSION: &str = "resource.k8s.io/v1";
const KIND: &str = "ResourceClaim";
const TEMPLATE: &str = "ResourceClaimTemplate";
/// Stands in for the UID that only the API server gives.
const NO_UID: &str = "00000000-0000-0000-0000-000000000000";

/// Where to read the claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    File(PathBuf),
    Stdin,
    Named { namespace: String, name: String },
}

impl Source {
    /// `-`, a file's path, or `namespace/name` if there is no file of that path.
    ///
    /// # Errors
    /// It is none of them.
    pub fn parse(text: &str, exists: impl Fn(&Path) -> bool) -> Result<Self, Usage> {
        if text == "-" {
            return Ok(Self::Stdin);
        }
        if exists(Path::new(text)) {
            return Ok(Self::File(PathBuf::from(text)));
        }
        let word = |part: &str| {
            !part.is_empty() && part.bytes().all(|b| b.is_ascii_alphanumeric() || b"-.".contains(&b))
        };
        let file = [".yaml", ".yml", ".json"].iter().any(|ending| text.ends_with(ending));
        match text.split_once('/') {
            Some((namespace, name))
                if !file && word(namespace) && word(name) && namespace != "." && namespace != ".." =>
            {
                Ok(Self::Named { namespace: namespace.to_owned(), name: name.to_owned() })
            }
            _ => Err(Usage(format!(
                "--claim: there is no file {text:?}; give the path of a YAML or JSON file, - for standard input, \
                 or namespace/name for a claim in the cluster"
            ))),
        }
    }
}

/// YAML or JSON as it stands in a file.
///
/// # Errors
/// It is neither; says where.
pub fn parse(text: &str, from: &str) -> Result<Value, Usage> {
    let broken = |problem: String| Usage(format!("{from} is neither YAML nor JSON: {problem}"));
    if text.trim_start().starts_with('{') {
        return serde_json::from_str(text).map_err(|error| broken(error.to_string()));
    }
    // Strict, or the word Off would be no word but false.
    let options = serde_saphyr::options! { strict_booleans: true };
    serde_saphyr::from_str_with_options(text, options).map_err(|error| broken(error.to_string()))
}

/// The objects of a file: one of JSON, or YAML documents; those of a List one by one.
///
/// # Errors
/// It is neither; says where.
pub fn documents(text: &str, from: &str) -> Result<Vec<Value>, Usage> {
    let objects = if text.trim_start().starts_with('{') {
        vec![parse(text, from)?]
    } else {
        let options = serde_saphyr::options! { strict_booleans: true };
        serde_saphyr::from_multiple_with_options(text, options)
            .map_err(|error| Usage(format!("{from} is neither YAML nor JSON: {error}")))?
    };
    let is_list = |object: &Value| word(object, "kind").ends_with("List") && object["items"].is_array();
    let items = |object: Value| match is_list(&object) {
        true => array(&object, "/items").to_vec(),
        false => vec![object],
    };
    Ok(objects.into_iter().flat_map(items).filter(|object| !object.is_null()).collect())
}

/// A ResourceClaim that can be asked what preparing it would need.
#[derive(Debug, Clone)]
pub struct Manifest {
    pub claim: ClaimRef,
    object: Value,
    /// True if the object has no UID, as one that was never sent to an API server.
    pub without_uid: bool,
    /// The claim is one that a pod would get by a ResourceClaimTemplate of the claim's name.
    pub is_of_template: bool,
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
}

impl Manifest {
    /// The claims among these objects, and those that would be made from templates among them.
    ///
    /// # Errors
    /// There is none, or one cannot be asked.
    pub fn all(objects: Vec<Value>) -> Result<Vec<Self>, Usage> {
        let kind = |object: &Value| word(object, "kind").to_owned();
        let kinds: BTreeSet<String> = objects.iter().map(kind).collect();
        let is_ours = |object: &Value| [KIND, TEMPLATE].contains(&word(object, "kind"));
        let ours: Vec<Value> = objects.into_iter().filter(is_ours).collect();
        if ours.is_empty() {
            let found = match kinds.len() {
                0 => "there is no object".to_owned(),
                _ => format!("there are only objects of kind {}", Vec::from_iter(kinds).join(", ")),
            };
            return Err(Usage(format!("{found}, but a {KIND} or a {TEMPLATE} is needed")));
        }
        ours.into_iter().map(Self::of).collect()
    }

    fn of(object: Value) -> Result<Self, Usage> {
        if word(&object, "kind") != TEMPLATE {
            return Self::new(object);
        }
        let claim = json!({"apiVersion": object["apiVersion"], "kind": KIND, "spec": object["spec"]["spec"],
            "metadata": {"name": object["metadata"]["name"], "namespace": object["metadata"]["namespace"]}});
        Ok(Self { is_of_template: true, ..Self::new(claim)? })
    }

    /// # Errors
    /// It is another kind of object, or lacks a name.
    pub fn new(mut object: Value) -> Result<Self, Usage> {
        let text = |object: &Value, path: &str| {
            object.pointer(path).and_then(Value::as_str).unwrap_or_default().to_owned()
        };
        let (version, kind) = (text(&object, "/apiVersion"), text(&object, "/kind"));
        if (version.as_str(), kind.as_str()) != (API_VERSION, KIND) {
            return Err(Usage(format!(
                "the claim is a {kind:?} of {version:?}, but a {KIND} of {API_VERSION} is needed: \
                 kubectl get resourceclaims.v1.resource.k8s.io NAME -o yaml"
            )));
        }
        let name = text(&object, "/metadata/name");
        if name.is_empty() {
            return Err(Usage("the claim's metadata.name is missing".to_owned()));
        }
        let namespace = Some(text(&object, "/metadata/namespace")).filter(|name| !name.is_empty());
        let without_uid = text(&object, "/metadata/uid").is_empty();
        if without_uid {
            object["metadata"]["uid"] = json!(NO_UID);
        }
        let claim = ClaimRef {
            namespace: namespace.unwrap_or_else(|| "default".to_owned()),
            name,
            uid: ClaimUid::new(text(&object, "/metadata/uid")),
        };
        Ok(Self { claim, object, without_uid, is_of_template: false })
    }

    /// As the node plugin reads it: with the same refusals.
    ///
    /// # Errors
    /// The outer one if the object does not fit the type, which no API server would have kept.
    pub fn allocated(&self) -> Result<Result<AllocatedClaim, ClaimError>, Usage> {
        let object = serde_path_to_error::deserialize(&self.object).map_err(|error| {
            Usage(format!(
                "the claim is not a valid {KIND} of {API_VERSION}: {}: {}",
                error.path(),
                error.inner()
            ))
        })?;
        Ok(read_claim::read(&self.claim, &object))
    }

    /// What the spec asks for, alternatives one by one.
    pub fn asked(&self) -> Vec<RequestedDevices> {
        let mut asked = Vec::new();
        for request in array(&self.object, "/spec/devices/requests") {
            let name = word(request, "name");
            let alternatives = array(request, "/firstAvailable");
            match request.get("exactly") {
                Some(exactly) => asked.push(one(name.to_owned(), exactly)),
                None => asked
                    .extend(alternatives.iter().map(|sub| one(format!("{name}/{}", word(sub, "name")), sub))),
            }
        }
        asked
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

    /// Our parameters in the spec, with their place.
    pub fn parameters(&self) -> Vec<(String, &Value)> {
        let configs = array(&self.object, "/spec/devices/config").iter().enumerate();
        let ours =
            configs.filter(|(_, config)| config.pointer("/opaque/driver").is_some_and(|d| d == DRIVER));
        ours.filter_map(|(index, config)| {
            let place = format!("spec.devices.config[{index}].opaque.parameters");
            config.pointer("/opaque/parameters").map(|parameters| (place, parameters))
        })
        .collect()
    }
}

fn one(request: String, spec: &Value) -> RequestedDevices {
    let count = match word(spec, "allocationMode") {
        "All" => "All".to_owned(),
        _ => spec.get("count").and_then(Value::as_u64).unwrap_or(1).to_string(),
    };
    let selectors =
        array(spec, "/selectors").iter().filter_map(|selector| selector.pointer("/cel/expression")?.as_str());
    let capacity = spec.pointer("/capacity/requests").and_then(Value::as_object).into_iter().flatten();
    RequestedDevices {
        request,
        device_class: word(spec, "deviceClassName").to_owned(),
        count,
        selectors: selectors.map(|cel| cel.trim().to_owned()).collect(),
        capacity: capacity
            .map(|(name, quantity)| format!("{name}={}", quantity.as_str().unwrap_or("?")))
            .collect(),
        admin_access: spec.get("adminAccess") == Some(&Value::Bool(true)),
    }
}

fn array<'a>(value: &'a Value, path: &str) -> &'a [Value] {
    value.pointer(path).and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default()
}

fn word<'a>(value: &'a Value, field: &str) -> &'a str {
    value.get(field).and_then(Value::as_str).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words<T: std::fmt::Debug>(result: Result<T, Usage>) -> String {
        result.unwrap_err().to_string()
    }

    #[test]
    fn a_claim_is_a_file_or_a_name() {
        let parsed = |text: &str, exists: bool| Source::parse(text, |_| exists);
        assert_eq!(parsed("-", false).unwrap(), Source::Stdin);
        assert_eq!(parsed("a/b", true).unwrap(), Source::File("a/b".into()));
        let named = Source::Named { namespace: "team".into(), name: "train".into() };
        assert_eq!(parsed("team/train", false).unwrap(), named);
        for wrong in ["claim.yaml", "team/claim.yaml", "./train", "../train", "a/b/c", "train", "/train", ""]
        {
            assert!(words(parsed(wrong, false)).contains("namespace/name"), "{wrong}");
        }
    }

    #[test]
    fn yaml_and_json_are_told_apart_and_words_stay_words() {
        assert_eq!(parse("mig: Off\nuse: true", "f").unwrap(), json!({"mig": "Off", "use": true}));
        assert_eq!(parse(" {\"a\": 1}", "f").unwrap(), json!({"a": 1}));
        for broken in ["{\"a\": ", "a: [1"] {
            assert!(words(parse(broken, "gpus.yaml")).starts_with("gpus.yaml is neither"), "{broken}");
        }
    }

    #[test]
    fn another_kind_of_object_is_refused_with_what_to_do() {
        let template = json!({"apiVersion": API_VERSION, "kind": "ResourceClaimTemplate"});
        let words = words(Manifest::new(template));
        assert!(words.contains("\"ResourceClaimTemplate\"") && words.contains("kubectl get"), "{words}");
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
        assert!(words(Manifest::all(documents("", "f").unwrap())).contains("there is no object"));
    }

    #[test]
    fn what_does_not_fit_the_type_is_named_by_its_path() {
        let object = json!({"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "a"},
                            "status": {"allocation": {"devices": {"results": "none"}}}});
        let manifest = Manifest::new(object).unwrap();
        assert!(manifest.without_uid);
        assert!(words(manifest.allocated()).contains("status.allocation.devices.results: "));
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
        let asked = Manifest::new(object).unwrap().asked();
        let seen: Vec<_> = asked.iter().map(|a| (a.request.as_str(), a.count.as_str())).collect();
        assert_eq!(seen, [("gpu", "2"), ("any/mig", "1"), ("any/all", "All")]);
        assert_eq!(asked[0].selectors, ["device.driver == 'x'"]);
        assert_eq!(asked[0].capacity, ["memory=10Gi"]);
    }
}
