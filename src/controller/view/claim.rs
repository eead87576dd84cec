//! A ResourceClaim, reduced to what placing needs.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::resource::v1::{AllocationResult, DeviceClaim, ResourceClaim};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::admission::{ShareClasses, claim_spec};
use crate::cluster::allocation::ClaimVersion;
use crate::cluster::read_claim;
use crate::controller::classes::{self, OurClasses, POLICY};
use crate::controller::view::class::{self, Classes};
use crate::controller::wants::{check_parameters, wants};
use crate::model::claim::{AllocatedClaim, ClaimKey, ClaimRef, PodRef};
use crate::model::error_chain;
use crate::model::names::{
    ClaimUid, DRIVER, DeviceName, HOLD_LABEL, NodeName, PodUid, PoolName, SHARED_CLASS,
};
use crate::params::{GrantedDevice, grant_of};
use crate::select::{CLAIM_ENTRIES_MAX, Toleration};

/// On a hold: its GPU.
pub const HOLD_NODE: &str = "tranche.dev/node";
pub const HOLD_DEVICE: &str = "tranche.dev/device";
/// On a hold: the version at which it was last looked around.
pub const LOOKED: &str = "tranche.dev/looked";
/// Why the claim waits, for people.
pub const WAITING: &str = "tranche.dev/waiting";
/// The version of the claim at which an unanswered write was given up.
pub const GIVEN_UP: &str = "tranche.dev/given-up";
/// What is kept of a claim is bounded, since whoever may create claims writes as much into them as the API server
/// takes. Of what it asks for: so many bytes, as JSON. One large selector has 10 KiB.
const ASKS_BYTES_MAX: usize = 64 << 10;
/// Classes of kube-scheduler's that are never ours.
const WHOLE_CLASS: &str = "gpu.nvidia.com";
const MIG_CLASS: &str = "mig.nvidia.com";
/// Finalizers, and their bytes together.
const FINALIZERS_MAX: usize = 64;
const FINALIZERS_BYTES_MAX: usize = 8 << 10;
/// Bytes of an annotation of ours. The words are ours, unless somebody else writes them.
const WORDS_BYTES_MAX: usize = 1 << 10;
/// Bytes of a UID that somebody other than the API server has written.
const UID_BYTES_MAX: usize = 128;

/// A GPU of the cluster. Pools have the names of their nodes.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GpuRef {
    pub node: NodeName,
    pub device: DeviceName,
}

impl std::fmt::Display for GpuRef {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.node, self.device)
    }
}

/// How a claim stands in the API.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Presence {
    /// It does not exist yet: the webhook promised it to this pod, and it is created once it has its place.
    Planned {
        pod: PodRef,
        name: String,
    },
    Exists(ClaimVersion),
}

impl Presence {
    /// None: it does not exist yet.
    pub fn resource_version(&self) -> Option<&str> {
        match self {
            Self::Planned { .. } => None,
            Self::Exists(at) => Some(&at.resource_version),
        }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub struct Claim {
    pub key: ClaimKey,
    pub at: Presence,
    pub meta: ClaimMeta,
    /// It is a hold of ours, for this GPU.
    pub hold: Option<GpuRef>,
    pub waiting: Option<String>,
    pub policy: Option<String>,
    /// What is read again when its classes change; none: they never do.
    pub(super) kept: Option<Arc<ResourceClaim>>,
    pub asks: Asks,
    pub allocation: Option<Allocation>,
    pub users: ReservedFor,
}

/// What the API server knows of any object.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ClaimMeta {
    pub created: Option<Timestamp>,
    /// It is being deleted.
    pub ending: bool,
    pub finalizers: Vec<String>,
    /// The pod that it was made for.
    pub owner: Option<PodUid>,
}

/// `status.reservedFor`.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ReservedFor {
    pub pods: Vec<PodUid>,
    /// Something other than a pod is there as well.
    pub others: bool,
}

/// What a claim asks for, as far as it matters here.
#[derive(Debug, Clone, PartialEq)]
pub enum Asks {
    /// At least one request of our class: ours to allocate, or to refuse.
    Shares(Arc<DeviceClaim>),
    /// Devices of other classes: the scheduler's to give.
    Scheduler(Arc<[class::Alternatives]>),
    /// Ours, and it cannot be placed: why, in words.
    Unreadable(String),
}

#[derive(Debug, Clone, PartialEq, Default)]
pub struct Allocation {
    /// None: usable on several nodes.
    pub node: Option<NodeName>,
    /// Devices of our driver.
    pub uses: Vec<(GpuRef, Use)>,
    /// The taints that it bears on a GPU; no entry: none.
    pub bears: BTreeMap<GpuRef, Vec<Toleration>>,
}

/// How an allocation uses a GPU.
#[derive(Debug, Clone, PartialEq)]
pub enum Use {
    /// Ours: kept for shares.
    Hold,
    /// Ours: a share with these numbers.
    Share(GrantedDevice),
    /// A share that the scheduler gave.
    Scheduled,
    /// For itself, or in a way that cannot be read.
    Whole,
    /// MIG devices of it that the scheduler gave: noted for their board.
    Cut(Vec<DeviceName>),
}

impl Use {
    pub fn is_ours(&self) -> bool {
        matches!(self, Self::Hold | Self::Share(_))
    }
}

impl Claim {
    pub fn namespace(&self) -> &str {
        match &self.at {
            Presence::Planned { pod, .. } => &pod.namespace,
            Presence::Exists(at) => &at.claim.namespace,
        }
    }

    pub fn name(&self) -> &str {
        match &self.at {
            Presence::Planned { name, .. } => name,
            Presence::Exists(at) => &at.claim.name,
        }
    }

    /// The version that is known; none: it does not exist yet.
    pub fn version(&self) -> Option<&ClaimVersion> {
        match &self.at {
            Presence::Planned { .. } => None,
            Presence::Exists(at) => Some(at),
        }
    }

    /// Ours to allocate: of our class.
    pub fn is_shares(&self) -> bool {
        matches!(self.asks, Asks::Shares(_) | Asks::Unreadable(_))
    }

    /// It does not exist yet: it is created once it has its place.
    pub fn is_planned(&self) -> bool {
        matches!(self.at, Presence::Planned { .. })
    }

    /// Allocated by a controller of ours, with nobody but us to answer for it.
    pub fn is_placed(&self) -> bool {
        self.is_shares() && self.allocation.is_some()
    }

    pub fn is_ending(&self) -> bool {
        self.meta.ending
    }

    pub fn is_reserved(&self) -> bool {
        !self.users.pods.is_empty() || self.users.others
    }
}

/// The claim that the webhook promised a pod, before it is created.
pub fn planned(key: ClaimKey, pod: &PodRef, (text, name): (&str, &str), classes: &ShareClasses) -> Claim {
    let spec = claim_spec(text, classes).map_err(|error| error_chain(&error));
    let asks = spec.map(|spec| Asks::Shares(Arc::new(spec.devices.unwrap_or_default())));
    Claim {
        key,
        at: Presence::Planned { pod: pod.clone(), name: name.to_owned() },
        meta: ClaimMeta { owner: Some(pod.uid.clone()), ..ClaimMeta::default() },
        hold: None,
        waiting: None,
        policy: None,
        kept: None,
        asks: asks.unwrap_or_else(Asks::Unreadable),
        allocation: None,
        users: ReservedFor::default(),
    }
}

pub fn reference(meta: &ObjectMeta) -> ClaimRef {
    ClaimRef {
        namespace: meta.namespace.clone().unwrap_or_default(),
        name: meta.name.clone().unwrap_or_default(),
        uid: ClaimUid::new(meta.uid.clone().unwrap_or_default()),
    }
}

pub fn version(meta: &ObjectMeta) -> ClaimVersion {
    let resource_version = meta.resource_version.clone().unwrap_or_default();
    ClaimVersion { claim: reference(meta), resource_version }
}

impl Claim {
    /// As the other version of the claim for the pods that name it: where they go and what they wait for does not change.
    pub fn is_same_for_pods(&self, other: &Self) -> bool {
        (self.is_planned(), self.is_ending()) == (other.is_planned(), other.is_ending())
            && self.hold == other.hold
            && self.asks == other.asks
            && self.allocation == other.allocation
            && self.users == other.users
    }

    /// What a planned claim is for is what this one asks for.
    pub fn keeps_promise_of(&self, planned: &Self, classes: &OurClasses) -> bool {
        match (&planned.asks, &self.asks) {
            (Asks::Shares(planned), Asks::Shares(made)) => wants(planned, classes) == wants(made, classes),
            _ => false,
        }
    }
}

/// `namespace`: that of our holds; elsewhere the label means nothing.
pub(super) fn read(key: ClaimKey, object: ResourceClaim, namespace: &str, classes: &Classes) -> Claim {
    let meta = &object.metadata;
    let at = version(meta);
    let claim = &at.claim;
    let labelled = meta.labels.as_ref().and_then(|labels| labels.get(HOLD_LABEL));
    let annotation =
        |name: &str| meta.annotations.as_ref().and_then(|all| all.get(name)).map(|text| words(text));
    let hold = || {
        let ours = claim.namespace == namespace && labelled.is_some_and(|value| value == "true");
        let (node, device) = (annotation(HOLD_NODE).filter(|_| ours)?, annotation(HOLD_DEVICE)?);
        Some(GpuRef { node: NodeName::new(node), device: DeviceName::new(device) })
    };
    let hold = hold();
    let status = object.status.as_ref();
    let reserved = || status.iter().flat_map(|status| status.reserved_for.iter().flatten());
    let (finalizers, too_many) = finalizers(meta);
    let asks = match (asks(&object, classes), too_many) {
        (Asks::Shares(_), Some(words)) => Asks::Unreadable(words),
        (asks, _) => asks,
    };
    Claim {
        key,
        meta: ClaimMeta {
            created: meta.creation_timestamp.as_ref().map(|time| time.0),
            ending: meta.deletion_timestamp.is_some(),
            finalizers,
            owner: owner(meta),
        },
        waiting: annotation(WAITING),
        policy: annotation(POLICY),
        allocation: status
            .and_then(|status| status.allocation.as_ref())
            .map(|one| allocation(claim, &object, &asks, one, hold.as_ref())),
        asks,
        users: ReservedFor {
            pods: reserved()
                .filter(|user| read_claim::is_pod(user))
                .map(|user| PodUid::new(&user.uid))
                .collect(),
            others: reserved().any(|user| !read_claim::is_pod(user)),
        },
        hold,
        at: Presence::Exists(at),
        kept: kept(object),
    }
}

/// What is read again when one of the claim's classes becomes ours, or ceases to be. None: they never do, or the claim
/// is larger than what is read of one for shares.
fn kept(mut object: ResourceClaim) -> Option<Arc<ResourceClaim>> {
    let fixed = |class: &str| [SHARED_CLASS, WHOLE_CLASS, MIG_CLASS].contains(&class);
    if object.spec.as_ref()?.devices.iter().flat_map(classes::names).all(fixed) {
        return None;
    }
    let meta = &mut object.metadata;
    (meta.labels, meta.managed_fields) = (None, None);
    if let Some(annotations) = &mut meta.annotations {
        annotations.retain(|name, _| [WAITING, POLICY].contains(&name.as_str()));
    }
    bound_parameters(&mut object);
    (json_bytes(&object) <= ASKS_BYTES_MAX).then(|| Arc::new(object))
}

/// Of parameters that are not what they should be, the first stay, for the words about them: others may be anything,
/// and take a hundred times their bytes.
fn bound_parameters(object: &mut ResourceClaim) {
    let devices = object.spec.as_mut().and_then(|spec| spec.devices.as_mut());
    let mut is_first = true;
    for one in devices.into_iter().flat_map(|devices| devices.config.iter_mut().flatten()) {
        let alone = DeviceClaim { config: Some(vec![one.clone()]), ..DeviceClaim::default() };
        let is_bad = check_parameters(&alone).is_err();
        if let Some(opaque) = one.opaque.as_mut().filter(|_| is_bad && !is_first) {
            opaque.parameters.0 = serde_json::Value::Null;
        }
        is_first &= !is_bad;
    }
}

/// A request of the claim is for devices of the class.
pub(super) fn names_class(object: &ResourceClaim, class: &str) -> bool {
    let devices = object.spec.as_ref().and_then(|spec| spec.devices.as_ref());
    devices.is_some_and(|devices| classes::names(devices).any(|name| name == class))
}

/// A claim of which only `rest` can be read: its name, and the devices that its allocation names. What was known of
/// it before stays, since neither what a claim asks for nor what it was given can change; without that, whatever it
/// names it uses in a way that nobody knows. It is not placed.
pub(super) fn unreadable(
    key: ClaimKey,
    rest: ResourceClaim,
    before: Option<&Claim>,
    problem: &str,
    (namespace, classes): (&str, &Classes),
) -> Claim {
    let fresh = read(key, rest, namespace, classes);
    let Some(before) = before else { return fresh };
    let gpus = |allocation: &Allocation| -> BTreeSet<GpuRef> {
        allocation.uses.iter().map(|(gpu, _)| gpu.clone()).collect()
    };
    let allocation = match (fresh.allocation, &before.allocation) {
        (Some(fresh), Some(known)) if gpus(&fresh) != gpus(known) => Some(fresh),
        (Some(fresh), None) => Some(fresh),
        (_, known) => known.clone(),
    };
    let asks = match &before.asks {
        Asks::Shares(_) => Asks::Unreadable(format!("it cannot be read: {problem}")),
        known => known.clone(),
    };
    let meta = ClaimMeta { ending: fresh.meta.ending, ..before.meta.clone() };
    Claim { at: fresh.at, meta, allocation, asks, kept: None, ..before.clone() }
}

/// The beginning of a text that people read.
fn words(text: &str) -> String {
    text[..text.floor_char_boundary(WORDS_BYTES_MAX)].to_owned()
}

/// Those of the claim, or, in words, that they are too many to be kept.
fn finalizers(meta: &ObjectMeta) -> (Vec<String>, Option<String>) {
    let all = meta.finalizers.as_deref().unwrap_or_default();
    if all.len() <= FINALIZERS_MAX && all.iter().map(String::len).sum::<usize>() <= FINALIZERS_BYTES_MAX {
        return (all.to_vec(), None);
    }
    let words = format!(
        "metadata.finalizers: there are {}; a claim with more than {FINALIZERS_MAX}, or with more than \
         {FINALIZERS_BYTES_MAX} bytes of them, is not placed",
        all.len()
    );
    (Vec::new(), Some(words))
}

fn owner(meta: &ObjectMeta) -> Option<PodUid> {
    let owners = meta.owner_references.iter().flatten();
    let mut pods = owners.filter(|owner| owner.kind == "Pod" && owner.controller == Some(true));
    pods.next().filter(|owner| owner.uid.len() <= UID_BYTES_MAX).map(|owner| PodUid::new(&owner.uid))
}

fn asks(object: &ResourceClaim, classes: &Classes) -> Asks {
    let Some(devices) = object.spec.as_ref().and_then(|spec| spec.devices.as_ref()) else {
        return Asks::Scheduler(Arc::default());
    };
    let requests = || devices.requests.iter().flatten();
    let weight = |selectors: &Option<Vec<_>>, tolerations: &Option<Vec<_>>| {
        1 + selectors.as_ref().map_or(0, Vec::len) + tolerations.as_ref().map_or(0, Vec::len)
    };
    let entries: usize = requests()
        .map(|request| {
            let exact = request.exactly.iter().map(|one| weight(&one.selectors, &one.tolerations));
            let subs = request.first_available.iter().flatten();
            exact.chain(subs.map(|one| weight(&one.selectors, &one.tolerations))).sum::<usize>()
        })
        .sum();
    let is_ours = classes::names(devices).any(|class| classes.ours().has(class))
        || is_granted(object, devices, classes);
    let bytes = json_bytes(devices);
    if is_ours && entries > CLAIM_ENTRIES_MAX {
        return Asks::Unreadable(format!(
            "spec.devices.requests: they have {entries} alternatives, selectors and tolerations in all, and \
             {CLAIM_ENTRIES_MAX} are read at most; write several claims"
        ));
    }
    match (is_ours, bytes > ASKS_BYTES_MAX) {
        (true, true) => Asks::Unreadable(format!(
            "spec.devices: it has {bytes} bytes, and {ASKS_BYTES_MAX} are read at most; write shorter selectors"
        )),
        // Parameters are kept only if they are what they should be: others may be anything.
        (true, false) => match check_parameters(devices) {
            Ok(()) => Asks::Shares(Arc::new(devices.clone())),
            Err(words) => Asks::Unreadable(words),
        },
        (false, true) => Asks::Scheduler([class::anything()].into()),
        (false, false) => {
            Asks::Scheduler(class::requests(devices.requests.as_deref().unwrap_or_default()).into())
        }
    }
}

/// A share of ours whose class is gone: nobody else can have granted it, since kube-scheduler needs the class.
fn is_granted(object: &ResourceClaim, devices: &DeviceClaim, classes: &Classes) -> bool {
    let allocated = object.status.as_ref().is_some_and(|status| status.allocation.is_some());
    let known = |class: &str| classes.has(class) || [WHOLE_CLASS, MIG_CLASS].contains(&class);
    if !allocated || classes::names(devices).any(known) {
        return false;
    }
    let claim = read_claim::read(&reference(&object.metadata), object);
    claim.is_ok_and(|claim| claim.results.iter().any(|one| matches!(grant_of(&claim, one), Ok(Some(_)))))
}

/// How many bytes it has as JSON.
fn json_bytes(object: &impl serde::Serialize) -> usize {
    struct Count(usize);
    impl std::io::Write for Count {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0 += bytes.len();
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let mut count = Count(0);
    // Neither the count nor our types can fail.
    let _ = serde_json::to_writer(&mut count, object);
    count.0
}

fn allocation(
    claim: &ClaimRef,
    object: &ResourceClaim,
    asks: &Asks,
    allocation: &AllocationResult,
    hold: Option<&GpuRef>,
) -> Allocation {
    // We grant nothing to claims of other classes: a grant there is somebody else's.
    let is_ours = matches!(asks, Asks::Shares(_) | Asks::Unreadable(_));
    let readable = is_ours.then(|| read_claim::read(claim, object).ok()).flatten();
    let results = allocation.devices.iter().flat_map(|devices| devices.results.iter().flatten());
    let mut found = Allocation { node: node(allocation), ..Allocation::default() };
    for result in results.filter(|result| result.driver == DRIVER && result.admin_access != Some(true)) {
        let device = DeviceName::new(&result.device);
        let granted = readable.as_ref().and_then(|claim| granted(claim, &result.request, &device));
        let gpu = GpuRef::new(PoolName::new(&result.pool).node(), &device);
        let how = match granted {
            _ if hold == Some(&gpu) => Use::Hold,
            Some(granted) => Use::Share(granted),
            None if result.share_id.is_some() => Use::Scheduled,
            None => Use::Whole,
        };
        if let Some(tolerations) = &result.tolerations {
            let bears = tolerations.iter().filter_map(Toleration::of).collect();
            found.bears.insert(gpu.clone(), bears);
        }
        let board = device.board().map(|board| GpuRef::new(&gpu.node, &board));
        found.uses.push((gpu, how));
        let Some(board) = board else { continue };
        match found.uses.iter_mut().find(|(known, _)| *known == board) {
            Some((_, Use::Cut(devices))) => devices.push(device),
            Some(_) => {}
            None => found.uses.push((board, Use::Cut(vec![device]))),
        }
    }
    found
}

fn granted(claim: &AllocatedClaim, request: &str, device: &DeviceName) -> Option<GrantedDevice> {
    let mut results = claim.results.iter();
    let result = results.find(|one| one.request.as_str() == request && one.device == *device)?;
    grant_of(claim, result).ok().flatten()
}

/// The node, if the allocation is for one: the exact form that the scheduler and we write.
fn node(allocation: &AllocationResult) -> Option<NodeName> {
    let [term] = allocation.node_selector.as_ref()?.node_selector_terms.as_slice() else { return None };
    let [field] = term.match_fields.as_deref()? else { return None };
    let [name] = field.values.as_deref()? else { return None };
    (field.key == "metadata.name" && field.operator == "In").then(|| NodeName::new(name))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::Classes;
    use crate::model::claim::ClaimKeys;

    #[test]
    fn what_means_nothing_to_pods_is_told_from_what_does() {
        let key = ClaimKeys::default().issue();
        let read = |metadata: Value, status: Value| {
            let mut object = json!({"metadata": {"namespace": "ml", "name": "c", "uid": "u"}, "status": status,
                "spec": {"devices": {"requests": [
                    {"name": "gpu", "exactly": {"deviceClassName": "shared.gpu.nvidia.com"}}]}}});
            object["metadata"].as_object_mut().unwrap().extend(metadata.as_object().unwrap().clone());
            super::read(key, serde_json::from_value(object).unwrap(), "system", &Classes::default())
        };
        let before = read(json!({"resourceVersion": "1"}), json!({}));
        for metadata in [
            json!({"resourceVersion": "2", "labels": {"a": "b"}}),
            json!({"annotations": {"tranche.dev/waiting": "for room", "tranche.dev/policy": "spread"}}),
            json!({"finalizers": ["example.com/f"]}),
        ] {
            assert!(read(metadata.clone(), json!({})).is_same_for_pods(&before), "{metadata}");
        }
        let ends = json!({"deletionTimestamp": "2026-01-01T00:00:00Z"});
        assert!(!read(ends, json!({})).is_same_for_pods(&before));
        let reserved = json!({"reservedFor": [{"resource": "pods", "name": "p", "uid": "p"}]});
        assert!(!read(json!({}), reserved).is_same_for_pods(&before));
        let allocated = json!({"allocation": {"devices": {"results": []}}});
        assert!(!read(json!({}), allocated).is_same_for_pods(&before));
    }
}
