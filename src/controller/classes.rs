//! The DeviceClasses whose claims are ours to place: shared.gpu.nvidia.com, and those of administrators that carry its
//! mark (`select::placer`).

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::{DeviceClaim, DeviceClass, DeviceClassConfiguration};

use crate::model::names::{MOVABLE, RequestName, SHARED_CLASS};
use crate::select::chosen_by;

/// On a claim, or on a class for all claims without it: how GPUs are to be chosen: pack, spread or fragmentation.
pub const POLICY: &str = "tranche.dev/policy";

/// A class of ours, as far as it matters here.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct OurClass {
    pub config: Vec<DeviceClassConfiguration>,
    /// CEL, all must hold beside those of the claim.
    pub selectors: Vec<String>,
    /// The annotation, as it was written: how GPUs are chosen for claims that do not say so themselves.
    pub policy: Option<String>,
    /// Pods with shares of it may be moved, unless they say otherwise.
    pub movable: bool,
}

impl OurClass {
    pub fn of(object: &DeviceClass) -> Self {
        let annotations = object.metadata.annotations.as_ref();
        Self {
            config: object.spec.as_ref().and_then(|spec| spec.config.clone()).unwrap_or_default(),
            selectors: chosen_by(object),
            policy: annotations.and_then(|all| all.get(POLICY)).cloned(),
            movable: annotations.and_then(|all| all.get(MOVABLE)).is_some_and(|text| text == "true"),
        }
    }
}

/// By name. shared.gpu.nvidia.com is always among them.
#[derive(Debug, Clone, PartialEq)]
pub struct OurClasses(BTreeMap<String, OurClass>);

impl Default for OurClasses {
    fn default() -> Self {
        Self(BTreeMap::from([(SHARED_CLASS.to_owned(), OurClass::default())]))
    }
}

impl OurClasses {
    pub fn get(&self, name: &str) -> Option<&OurClass> {
        self.0.get(name)
    }

    pub fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    pub fn names(&self) -> impl Iterator<Item = &String> {
        self.0.keys()
    }

    /// True if it is another than before.
    pub fn set(&mut self, name: &str, class: OurClass) -> bool {
        if self.get(name) == Some(&class) {
            return false;
        }
        self.0.insert(name.to_owned(), class);
        true
    }

    /// True if it was there. The shipped class loses what it said.
    pub fn remove(&mut self, name: &str) -> bool {
        match name {
            SHARED_CLASS => self.set(name, OurClass::default()),
            name => self.0.remove(name).is_some(),
        }
    }

    /// Those of a claim that are ours, each once, in the order of its requests.
    pub fn of<'a>(&'a self, claim: &'a DeviceClaim) -> Vec<(&'a str, &'a OurClass)> {
        let mut found: Vec<(&str, &OurClass)> = Vec::new();
        for name in names(claim) {
            if let Some(class) = self.get(name).filter(|_| !found.iter().any(|(known, _)| *known == name)) {
                found.push((name, class));
            }
        }
        found
    }
}

/// The classes of a claim's requests and their alternatives.
pub fn names(claim: &DeviceClaim) -> impl Iterator<Item = &str> {
    claim.requests.iter().flatten().flat_map(|request| {
        let exactly = request.exactly.iter().map(|one| one.device_class_name.as_str());
        let alternatives = request.first_available.iter().flatten();
        exactly.chain(alternatives.map(|one| one.device_class_name.as_str()))
    })
}

/// The class of a request, or of one alternative of a request.
pub fn of_request<'a>(claim: &'a DeviceClaim, name: &RequestName) -> Option<&'a str> {
    claim.requests.iter().flatten().find_map(|request| {
        let exactly = request.exactly.iter().filter(|_| request.name == name.as_str());
        let exactly = exactly.map(|one| one.device_class_name.as_str());
        let alternatives = request.first_available.iter().flatten();
        let meant = alternatives.filter(|sub| format!("{}/{}", request.name, sub.name) == name.as_str());
        exactly.chain(meant.map(|one| one.device_class_name.as_str())).next()
    })
}
