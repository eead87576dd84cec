//! A pod, reduced to what placing needs.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::core::v1 as core;

use crate::admission::{SHARE_ANNOTATION, UNCOUNTED};
use crate::controller::view::class;
use crate::controller::view::groups::{self, Gang, Grouping};
use crate::controller::view::movable::{self, Origin};
use crate::controller::view::neighbours::Alike;
use crate::controller::view::standing::Standing;
use crate::controller::view::volumes;
use crate::feasible::{self, Demands, HostPort, Resources, Terms};
use crate::model::claim::PodRef;
use crate::model::names::{NodeName, PodUid, WORKLOAD_ANNOTATION};

/// The webhook's entry in a pod's claims: the claim of that name is ours to create.
const SHARE_ENTRY: &str = "gpu-share";

/// Bytes of what the webhook makes of KAI's annotations: some hundred.
const SHARE_BYTES_MAX: usize = 4 << 10;
/// The name of kube-scheduler's usual profile.
pub(super) const DEFAULT_SCHEDULER: &str = "default-scheduler";
/// Bytes of a scheduler's name: it is a DNS subdomain.
const NAME_BYTES_MAX: usize = 253;

/// Claims of a pod. With more it is as if some were still to be made: it is never placed.
const CLAIMS_MAX: usize = 1024;

#[derive(Debug, Clone)]
pub struct Pod {
    pub at: PodRef,
    pub created: Option<Timestamp>,
    pub node: Option<NodeName>,
    pub ending: bool,
    /// Somebody does not want it to be scheduled yet.
    pub gated: bool,
    pub standing: Standing,
    pub requested: PodRequests,
    pub grouping: Grouping,
    /// What it takes of its node, or will take.
    pub room: Resources,
    /// Of its node, while it is not bound.
    pub demands: Option<Arc<Demands>>,
}

/// Which devices a pod asks for, in each of the ways that there are.
#[derive(Debug, Clone)]
pub struct PodRequests {
    /// Names of its claims.
    pub claims: Vec<String>,
    /// Some of its claims have no name yet: they are still to be made from their templates.
    pub unnamed: bool,
    /// By names among its containers' limits. Only of a pod without a node.
    pub resources: BTreeMap<String, u32>,
    /// What the webhook made of KAI's annotations, and the name of the claim that is to be made of it.
    pub share: Option<(String, String)>,
}

impl Pod {
    /// The gang that it is in.
    pub fn gang(&self) -> Option<&Gang> {
        self.grouping.gang.as_ref()
    }

    /// It may be placed now.
    pub fn is_ready(&self) -> bool {
        !self.ending && !self.gated && !self.requested.unnamed
    }
}

/// The pods that are known, also by the claims that they name.
#[derive(Debug, Default)]
pub(super) struct PodTable {
    all: BTreeMap<PodUid, Pod>,
    /// By (namespace, claim).
    users: BTreeMap<(String, String), ClaimPods>,
    /// Those that are not bound, by (namespace, PersistentVolumeClaim).
    with_volumes: BTreeMap<(String, String), BTreeSet<PodUid>>,
    /// Of those of which there is any of it.
    rest: BTreeMap<PodUid, PodExtras>,
    pub(super) alike: Alike,
}

/// What is known of few pods.
#[derive(Debug, Default)]
pub(super) struct PodExtras {
    /// Of one that somebody makes anew.
    pub origin: Option<Origin>,
    /// Of one that has demands: the PersistentVolumeClaims whose volumes have a part in these.
    pub volumes: Vec<String>,
    /// That it takes of its node, or will take.
    pub ports: Arc<[HostPort]>,
    /// What it requires of other pods.
    pub terms: Option<Arc<Terms>>,
}

impl PodExtras {
    pub fn of(object: &core::Pod, pod: &Pod) -> Self {
        let volumes = pod.demands.as_ref().map(|_| volumes::claims(object));
        let ports = object.spec.as_ref().map(HostPort::of).unwrap_or_default();
        let (origin, ports) = (movable::read(object, pod), ports.into());
        Self { origin, volumes: volumes.unwrap_or_default(), ports, terms: None }
    }

    fn is_empty(&self) -> bool {
        self.origin.is_none() && self.volumes.is_empty() && self.ports.is_empty() && self.terms.is_none()
    }
}

/// The pods that name a claim.
#[derive(Debug, Default)]
struct ClaimPods {
    pods: BTreeSet<PodUid>,
    /// How many of them are not gated.
    open: usize,
}

impl PodTable {
    pub fn get(&self, uid: &PodUid) -> Option<&Pod> {
        self.all.get(uid)
    }

    pub fn iter(&self) -> impl Iterator<Item = &Pod> + Clone {
        self.all.values()
    }

    /// Those that name this claim.
    pub fn naming<'a>(&'a self, namespace: &str, claim: &str) -> impl Iterator<Item = &'a Pod> + use<'a> {
        let users = self.users.get(&(namespace.to_owned(), claim.to_owned()));
        users.into_iter().flat_map(|users| &users.pods).filter_map(|uid| self.all.get(uid))
    }

    /// Pods name this claim, and all of them are gated.
    pub fn are_gated(&self, namespace: &str, claim: &str) -> bool {
        self.users.get(&(namespace.to_owned(), claim.to_owned())).is_some_and(|users| users.open == 0)
    }

    /// Those that are not bound and name this PersistentVolumeClaim.
    pub fn waiting_with(&self, claim: &(String, String)) -> impl Iterator<Item = &PodUid> {
        self.with_volumes.get(claim).into_iter().flatten()
    }

    pub fn set_demands(&mut self, uid: &PodUid, demands: Arc<Demands>) {
        if let Some(pod) = self.all.get_mut(uid) {
            pod.demands = Some(demands);
        }
    }

    pub fn origin(&self, uid: &PodUid) -> Option<&Origin> {
        self.rest.get(uid)?.origin.as_ref()
    }

    pub(super) fn rest(&self, uid: &PodUid) -> Option<&PodExtras> {
        self.rest.get(uid)
    }

    /// The PersistentVolumeClaims of one that has demands.
    pub fn volumes(&self, uid: &PodUid) -> &[String] {
        self.rest.get(uid).map_or(&[], |rest| &rest.volumes)
    }

    /// The ports that it takes of its node; none: it takes none.
    pub fn ports(&self, uid: &PodUid) -> Option<&Arc<[HostPort]>> {
        self.rest.get(uid).map(|rest| &rest.ports).filter(|ports| !ports.is_empty())
    }

    /// Adds a pod that was not there, or that was removed. What it has in common with others was taken from there.
    pub fn insert(&mut self, pod: Pod, rest: PodExtras) {
        for name in &pod.requested.claims {
            let at = (pod.at.namespace.clone(), name.clone());
            let users = self.users.entry(at).or_default();
            users.open += usize::from(users.pods.insert(pod.at.uid.clone()) && !pod.gated);
        }
        for claim in &rest.volumes {
            let at = (pod.at.namespace.clone(), claim.clone());
            self.with_volumes.entry(at).or_default().insert(pod.at.uid.clone());
        }
        if !rest.is_empty() {
            self.rest.insert(pod.at.uid.clone(), rest);
        }
        self.all.insert(pod.at.uid.clone(), pod);
    }

    pub fn remove(&mut self, uid: &PodUid) -> Option<Pod> {
        let pod = self.all.remove(uid)?;
        let rest = self.rest.remove(uid).unwrap_or_default();
        self.alike.release(&pod, &rest);
        for name in &pod.requested.claims {
            let at = (pod.at.namespace.clone(), name.clone());
            if let Some(users) = self.users.get_mut(&at) {
                users.open -= usize::from(users.pods.remove(uid) && !pod.gated);
                if users.pods.is_empty() {
                    self.users.remove(&at);
                }
            }
        }
        for claim in &rest.volumes {
            let at = (pod.at.namespace.clone(), claim.clone());
            if let Some(pods) = self.with_volumes.get_mut(&at) {
                pods.remove(uid);
                if pods.is_empty() {
                    self.with_volumes.remove(&at);
                }
            }
        }
        Some(pod)
    }
}

pub fn uid(meta: &k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta) -> PodUid {
    PodUid::new(meta.uid.clone().unwrap_or_default())
}

pub fn read(object: &core::Pod) -> Pod {
    let meta = &object.metadata;
    let spec = object.spec.as_ref();
    let node = spec.and_then(|spec| spec.node_name.as_deref()).filter(|name| !name.is_empty());
    let scheduler = spec.and_then(|spec| spec.scheduler_name.as_ref()).filter(|_| node.is_none());
    let scheduler = scheduler.filter(|name| *name != DEFAULT_SCHEDULER && name.len() <= NAME_BYTES_MAX);
    let (claims, unnamed) = claims(object);
    let waits = node.is_none() && (!claims.is_empty() || unnamed);
    let share = share(object);
    Pod {
        at: PodRef {
            namespace: meta.namespace.clone().unwrap_or_default(),
            name: meta.name.clone().unwrap_or_default(),
            uid: uid(meta),
        },
        created: meta.creation_timestamp.as_ref().map(|time| time.0),
        node: node.map(NodeName::new),
        ending: meta.deletion_timestamp.is_some(),
        gated: spec.is_some_and(|spec| spec.scheduling_gates.iter().flatten().next().is_some()),
        standing: Standing::of(object),
        grouping: Grouping {
            gang: groups::gang(object),
            scheduler: scheduler.cloned().unwrap_or_default(),
            queue: share.as_ref().filter(|_| node.is_none()).and_then(|_| groups::queue(object)),
        },
        requested: PodRequests {
            claims,
            unnamed,
            resources: spec.filter(|_| node.is_none()).map(class::resources).unwrap_or_default(),
            share,
        },
        room: match node {
            Some(_) => feasible::taken(object),
            None => spec.map(feasible::requests).unwrap_or_default(),
        },
        demands: spec.filter(|_| waits).map(|spec| Arc::new(Demands::of(spec))),
    }
}

/// The names of the pod's claims, each once, and whether some are still to come.
fn claims(object: &core::Pod) -> (Vec<String>, bool) {
    let statuses = || object.status.iter().flat_map(|status| status.resource_claim_statuses.iter().flatten());
    let (mut names, mut unnamed) = (Vec::new(), false);
    let entries = object.spec.as_ref().and_then(|spec| spec.resource_claims.as_deref()).unwrap_or_default();
    if entries.len() > CLAIMS_MAX {
        return (names, true);
    }
    for one in entries {
        let made = statuses().find(|status| status.name == one.name);
        match (&one.resource_claim_name, made) {
            (Some(name), _) => names.push(name.clone()),
            // A status without a name: the template asks for none.
            (None, Some(status)) => names.extend(status.resource_claim_name.clone()),
            (None, None) => unnamed = true,
        }
    }
    names.sort();
    names.dedup();
    (names, unnamed)
}

fn share(object: &core::Pod) -> Option<(String, String)> {
    let text = object.metadata.annotations.as_ref()?.get(SHARE_ANNOTATION)?;
    let mut entries = object.spec.as_ref()?.resource_claims.iter().flatten();
    let entry = entries.find(|one| one.name == SHARE_ENTRY)?;
    let is_counted = !object.metadata.annotations.as_ref()?.contains_key(WORKLOAD_ANNOTATION);
    let text = match text.len() <= SHARE_BYTES_MAX {
        _ if !is_counted => UNCOUNTED.to_owned(),
        true => text.clone(),
        // One that is too long is none that can be read.
        false => String::new(),
    };
    Some((text, entry.resource_claim_name.clone()?))
}
