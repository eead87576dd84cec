//! DeviceClasses: ours; and those of others, with what pods want of them: devices that kube-scheduler gives.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Container, PodSpec};
use k8s_openapi::api::resource::v1::{DeviceClaim, DeviceClass, DeviceRequest, ExactDeviceRequest};

use crate::admission::ShareClasses;
use crate::controller::classes::{OurClass, OurClasses};
use crate::controller::requests::{exact, expressions};
use crate::controller::view::News;
use crate::select::{NOT_FOR_THE_SCHEDULER, Placer, Toleration, placer};

/// Before the name of a class: the class's devices among a container's limits (KEP-5004). Every class has it.
const RESOURCE_PREFIX: &str = "deviceclass.resource.kubernetes.io/";

#[derive(Debug, Default)]
pub(super) struct Classes {
    ours: OurClasses,
    others: BTreeMap<String, OtherClass>,
    /// Those of claims that the webhook promises.
    pub promised: ShareClasses,
}

impl Classes {
    pub fn ours(&self) -> &OurClasses {
        &self.ours
    }

    pub fn others(&self) -> &BTreeMap<String, OtherClass> {
        &self.others
    }

    pub fn names(&self) -> impl Iterator<Item = String> {
        self.others.keys().chain(self.ours.names()).cloned()
    }

    /// There is one of this name.
    pub fn has(&self, name: &str) -> bool {
        self.ours.has(name) || self.others.contains_key(name)
    }

    pub fn set(&mut self, object: &DeviceClass) -> Vec<News> {
        let name = object.metadata.name.clone().unwrap_or_default();
        let placer = placer(object);
        if placer == Placer::Controller {
            let before = self.others.remove(&name).map(|_| News::OtherClass);
            let now = self.ours.set(&name, OurClass::of(object)).then_some(News::Class(name));
            return before.into_iter().chain(now).collect();
        }
        let before = self.ours.remove(&name).then(|| News::Class(name.clone()));
        let class = OtherClass::of(object);
        let known = self.others.insert(name.clone(), class.clone());
        let now = (known.as_ref() != Some(&class)).then_some(News::OtherClass);
        let doubt = (placer == Placer::Doubtful && now.is_some()).then(|| News::Trouble(doubtful(&name)));
        before.into_iter().chain(now).chain(doubt).collect()
    }

    pub fn remove(&mut self, name: &str) -> Vec<News> {
        let ours = self.ours.remove(name).then(|| News::Class(name.to_owned()));
        let others = self.others.remove(name).map(|_| News::OtherClass);
        ours.into_iter().chain(others).collect()
    }
}

/// Words for who wrote a class that is not the controller's, and may be meant to be.
pub fn doubtful(name: &str) -> String {
    format!(
        "DeviceClass {name} is kube-scheduler's, though a selector names the type placed-by-controller: if it is to be \
         the controller's, make this a selector of its own: {NOT_FOR_THE_SCHEDULER}"
    )
}

#[derive(Debug, Clone, PartialEq)]
pub struct OtherClass {
    pub selectors: Vec<String>,
    /// It may be meant to be ours.
    pub is_doubtful: bool,
    /// What its devices are called among a container's limits, if not only by the class's name.
    resource: Option<String>,
}

/// A request of a claim: one of these is to be given.
pub type Alternatives = Vec<Choice>;

/// Devices of a class.
#[derive(Debug, Clone, PartialEq)]
pub struct Choice {
    class: String,
    selectors: Vec<String>,
    tolerations: Vec<Toleration>,
    devices: u32,
    /// It does not say how much of each (`capacity.requests`).
    whole: bool,
}

/// What a pod waits for: so many devices, each of one of these kinds.
#[derive(Debug, Clone, PartialEq)]
pub struct Need {
    pub kinds: Vec<DeviceKind>,
    pub devices: u32,
    /// All of each device.
    pub whole: bool,
}

#[derive(Debug, Clone, PartialEq)]
pub struct DeviceKind {
    /// CEL of the class and of the request: all must choose the device.
    pub selectors: Arc<[String]>,
    pub tolerations: Vec<Toleration>,
}

impl OtherClass {
    pub fn of(object: &DeviceClass) -> Self {
        let spec = object.spec.as_ref();
        Self {
            selectors: expressions(spec.and_then(|spec| spec.selectors.as_deref())),
            is_doubtful: placer(object) == Placer::Doubtful,
            resource: spec.and_then(|spec| spec.extended_resource_name.clone()),
        }
    }

    /// `spec.extendedResourceName`.
    pub fn resource(&self) -> Option<&str> {
        self.resource.as_deref()
    }
}

/// The requests that take devices away from others: one for a look at devices in use does not.
pub fn requests(all: &[DeviceRequest]) -> Vec<Alternatives> {
    let choices = |request: &DeviceRequest| -> Alternatives {
        let exactly = request.exactly.iter().filter(|one| one.admin_access != Some(true)).map(choice);
        let alternatives = request.first_available.iter().flatten().map(|sub| choice(&exact(sub)));
        exactly.chain(alternatives).collect()
    };
    all.iter().map(choices).filter(|choices| !choices.is_empty()).collect()
}

fn choice(one: &ExactDeviceRequest) -> Choice {
    Choice {
        class: one.device_class_name.clone(),
        selectors: expressions(one.selectors.as_deref()),
        tolerations: one.tolerations.iter().flatten().filter_map(Toleration::of).collect(),
        devices: devices(one.allocation_mode.as_deref(), one.count),
        whole: one.capacity.iter().all(|capacity| capacity.requests.iter().flatten().next().is_none()),
    }
}

/// A request that is not told apart from any other: of a class that nobody knows.
pub fn anything() -> Alternatives {
    vec![Choice {
        class: String::new(),
        selectors: Vec::new(),
        tolerations: Vec::new(),
        devices: 1,
        whole: false,
    }]
}

/// All that there are: more than anybody has.
fn devices(mode: Option<&str>, count: Option<i64>) -> u32 {
    match mode {
        Some("All") => u32::MAX,
        _ => u32::try_from(count.unwrap_or(1)).unwrap_or(1),
    }
}

/// What a pod's containers ask for without a claim, by name (KEP-5004): the scheduler makes the claim as it binds
/// the pod.
pub fn resources(spec: &PodSpec) -> BTreeMap<String, u32> {
    let of = |container: &Container| {
        let limits = container.resources.iter().flat_map(|resources| resources.limits.iter().flatten());
        // Names without a domain are the kubelet's own.
        let extended = limits.filter(|(name, _)| name.contains('/'));
        let amounts = extended.filter_map(|(name, amount)| Some((name.clone(), amount.0.parse().ok()?)));
        amounts.filter(|(_, amount)| *amount > 0).collect::<Vec<(String, u32)>>()
    };
    let mut all: BTreeMap<String, u32> = BTreeMap::new();
    for (name, amount) in spec.containers.iter().flat_map(of) {
        let sum = all.entry(name).or_default();
        *sum = sum.saturating_add(amount);
    }
    for (name, amount) in spec.init_containers.iter().flatten().flat_map(of) {
        let most = all.entry(name).or_default();
        *most = amount.max(*most);
    }
    all
}

/// What a request comes to. None: its classes are not known.
pub fn need(request: &Alternatives, classes: &BTreeMap<String, OtherClass>) -> Option<Need> {
    let kind = |choice: &Choice| {
        let selectors = selectors(choice, classes)?;
        Some(DeviceKind { selectors, tolerations: choice.tolerations.clone() })
    };
    let kinds: Vec<DeviceKind> = request.iter().filter_map(kind).collect();
    let devices = request.iter().map(|choice| choice.devices).max()?;
    let whole = request.iter().all(|choice| choice.whole);
    (!kinds.is_empty()).then_some(Need { kinds, devices, whole })
}

/// The kinds of devices that somebody may be given by the scheduler just now.
#[derive(Debug, Clone, PartialEq)]
pub enum Sought {
    /// Somebody waits for nobody knows what.
    Anything,
    /// By the CEL of class and request: all of a list must choose the device.
    Chosen(BTreeSet<Arc<[String]>>),
}

impl Default for Sought {
    fn default() -> Self {
        Self::Chosen(BTreeSet::new())
    }
}

impl Sought {
    pub fn and(&mut self, other: Self) {
        match other {
            Self::Anything => *self = Self::Anything,
            Self::Chosen(kinds) => kinds.into_iter().for_each(|kind| self.add(Some(kind))),
        }
    }

    /// None: of a class that is not known.
    pub fn add(&mut self, selectors: Option<Arc<[String]>>) {
        match (self, selectors) {
            (Self::Chosen(kinds), Some(selectors)) => drop(kinds.insert(selectors)),
            (sought @ Self::Chosen(_), None) => *sought = Self::Anything,
            (Self::Anything, _) => {}
        }
    }
}

/// The CEL that chooses the devices of a choice. None: its class is not known.
pub fn selectors(choice: &Choice, classes: &BTreeMap<String, OtherClass>) -> Option<Arc<[String]>> {
    let class = &classes.get(&choice.class)?.selectors;
    Some(class.iter().chain(&choice.selectors).cloned().collect())
}

/// It can be given all that it asks for without anything of our classes.
pub fn goes_without(claim: &DeviceClaim, ours: &OurClasses) -> bool {
    let other = |request: &DeviceRequest| {
        let exactly = request.exactly.iter().map(|one| &one.device_class_name);
        let alternatives = request.first_available.iter().flatten().map(|sub| &sub.device_class_name);
        exactly.chain(alternatives).any(|name| !ours.has(name))
    };
    claim.requests.iter().flatten().all(other)
}

/// The class that a name among limits stands for, and the class's name. None: it stands for no class's devices.
pub fn named_of_resource<'a>(
    name: &str,
    classes: &'a BTreeMap<String, OtherClass>,
) -> Option<(&'a String, &'a OtherClass)> {
    let by_prefix = || classes.get_key_value(name.strip_prefix(RESOURCE_PREFIX)?);
    let by_name = || classes.iter().find(|(_, class)| class.resource.as_deref() == Some(name));
    by_prefix().or_else(by_name)
}

/// The same without the name.
pub fn of_resource<'a>(name: &str, classes: &'a BTreeMap<String, OtherClass>) -> Option<&'a OtherClass> {
    named_of_resource(name, classes).map(|(_, class)| class)
}

/// The same as a need.
pub fn need_of_resource(name: &str, devices: u32, classes: &BTreeMap<String, OtherClass>) -> Option<Need> {
    let selectors = of_resource(name, classes)?.selectors.clone().into();
    Some(Need { kinds: vec![DeviceKind { selectors, tolerations: Vec::new() }], devices, whole: true })
}
