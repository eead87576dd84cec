//! What the API server has told: claims, pods, nodes and GPUs, and who names which GPU. Tells what has changed by
//! it, and decides nothing.

mod bind_requests;
mod budgets;
pub mod claim;
mod claims;
pub mod class;
mod gpu_users;
pub mod groups;
pub mod movable;
mod namespaces;
mod needs;
mod neighbours;
pub mod node;
pub mod pod;
mod pools;
mod promised;
mod standing;
mod unreadable;
pub mod unshared;
mod volumes;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::resource::v1::{DeviceClass, DeviceTaintRule, ResourceClaim};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

pub use claim::{Allocation, Asks, Claim, GpuRef, Presence, Use};
pub use class::{Need, Sought};
pub use gpu_users::Sight;
pub use groups::Gang;
pub use node::{NodeState, PublishedGpu, Slice, TaintRule};
pub use pod::Pod;
pub use standing::Tried;

use bind_requests::BindRequests;
pub use budgets::BudgetGuard;
use budgets::Budgets;
use claims::ClaimTable;
use class::Classes;
use groups::PodGroups;
use namespaces::Namespaces;
use pod::PodTable;
use pools::Pools;
use volumes::Volumes;

use crate::admission::ShareClasses;
use crate::cluster::feed::{Change, WatchEvent};
use crate::cluster::pod_groups::PodGroupApi;
use crate::controller::classes::OurClasses;
use crate::feasible::{self, Demands, HostPort, Node, Unfit};
use crate::model::claim::ClaimKey;
use crate::model::names::{ClaimUid, NodeName, PodUid};

/// What a change came to.
#[derive(Debug, Clone, PartialEq)]
pub enum News {
    /// As it was before; what it is now the view tells. None: it is new.
    Claim {
        key: ClaimKey,
        before: Option<Box<Claim>>,
    },
    ClaimGone(Box<Claim>),
    Pod {
        uid: PodUid,
        /// It may run elsewhere now.
        demands_changed: bool,
    },
    PodGone(Box<Pod>),
    Node(NodeName),
    /// One of ours, or one that was.
    Class(String),
    /// One that the scheduler gives devices of.
    OtherClass,
    /// What the shares of this namespace may come to.
    Bounds(String),
    /// PodDisruptionBudgets are others now, or let others go.
    Budgets,
    /// Something that somebody should look at.
    Trouble(String),
}

impl PartialEq for Pod {
    fn eq(&self, other: &Self) -> bool {
        self.at == other.at
    }
}

#[derive(Debug, Default)]
pub struct ClusterView {
    /// Of our holds.
    namespace: String,
    claims: ClaimTable,
    pods: PodTable,
    nodes: BTreeMap<NodeName, NodeState>,
    pools: Pools,
    classes: Classes,
    namespaces: Namespaces,
    optional: Optional,
    lists: Lists,
    /// Objects whose present state does not fit our types.
    unreadable: BTreeSet<(Kind, String)>,
}

/// What is there only where its API is served and may be seen. Nothing waits for it, but for volumes where they may be.
#[derive(Debug, Default)]
struct Optional {
    groups: PodGroups,
    bind_requests: BindRequests,
    budgets: Budgets,
    volumes: Volumes,
}

/// What the list under way has named, by kind; and which kinds have had one.
#[derive(Debug, Default)]
struct Lists {
    under_way: BTreeMap<Kind, BTreeSet<String>>,
    /// Lists with an object of which not even the name could be read: it may be any.
    doubtful: BTreeSet<Kind>,
    complete: BTreeSet<Kind>,
    /// Kinds that we may not see, and how often in a row that was said.
    forbidden: BTreeMap<Kind, u32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Pods,
    Nodes,
    Claims,
    Slices,
    Classes,
    TaintRules,
    Namespaces,
    PodGroups(PodGroupApi),
    BindRequests,
    Budgets,
    Volumes,
}

/// A kind that was refused so often in a row is not for us to see: with growing pauses in between these are some 12 s, in
/// which an API server that has just started reads its roles.
const FORBIDDEN_TIMES: u32 = 5;

/// What has to be known before anything is decided. Of namespaces see [`ClusterView::is_complete`]; who is in a PodGroup
/// waits for PodGroups alone. Of a kind that may not be seen the feed tells that there is none.
const NEEDED: [Kind; 7] =
    [Kind::Pods, Kind::Nodes, Kind::Claims, Kind::Slices, Kind::Classes, Kind::TaintRules, Kind::Volumes];

impl ClusterView {
    /// `grouping`: schedulers that put every pod into a PodGroup.
    pub fn new(namespace: &str, grouping: &[String]) -> Self {
        let optional = Optional { groups: PodGroups::new(grouping), ..Optional::default() };
        Self { namespace: namespace.to_owned(), optional, ..Self::default() }
    }

    /// The classes of the claims that the webhook promises.
    pub fn promising(mut self, classes: ShareClasses) -> Self {
        self.classes.promised = classes;
        self
    }

    /// True once every kind that is needed has been listed: before that nothing is known of what is missing.
    pub fn is_complete(&self) -> bool {
        // Where we may not see namespaces, none has opted in and none has bounds, and all others go on.
        let Lists { complete, forbidden, .. } = &self.lists;
        let refused = forbidden.get(&Kind::Namespaces).is_some_and(|times| *times >= FORBIDDEN_TIMES);
        let namespaces = refused || complete.contains(&Kind::Namespaces);
        namespaces && NEEDED.iter().all(|kind| complete.contains(kind))
    }

    pub fn apply(&mut self, change: Change) -> Vec<News> {
        match change {
            Change::Pod(seen) => self.follow(Kind::Pods, seen, Self::set_pod, Self::drop_pod),
            Change::Node(seen) => self.follow(Kind::Nodes, seen, Self::set_node, Self::drop_node),
            Change::Claim(WatchEvent::Unreadable { rest, problem, .. }) => {
                self.set_unreadable(&rest, &problem)
            }
            Change::Claim(seen) => self.follow(Kind::Claims, seen, Self::set_claim, Self::drop_claim),
            Change::Slice(seen) => self.follow(Kind::Slices, seen, Self::set_slice, Self::drop_slice),
            Change::Class(seen) => self.follow_classes(seen),
            Change::TaintRule(seen) => self.follow(Kind::TaintRules, seen, Self::set_rule, Self::drop_rule),
            Change::Namespace(seen) => self.follow_namespaces(seen),
            Change::PodGroup(api, seen) => self.follow_groups(api, seen),
            Change::BindRequest(seen) => self.follow_bind_requests(seen),
            Change::Budget(seen) => self.follow(Kind::Budgets, seen, Self::set_budget, Self::drop_budget),
            Change::Volume(seen) => self.follow(Kind::Volumes, seen, Self::set_volume, Self::drop_volume),
        }
    }

    fn follow<K>(
        &mut self,
        kind: Kind,
        seen: WatchEvent<K>,
        set: impl Fn(&mut Self, K) -> Vec<News>,
        drop: impl Fn(&mut Self, &str) -> Vec<News>,
    ) -> Vec<News>
    where
        K: k8s_openapi::Metadata<Ty = ObjectMeta>,
    {
        match seen {
            WatchEvent::Anew => {
                self.lists.doubtful.remove(&kind);
                self.lists.under_way.insert(kind, BTreeSet::new());
                Vec::new()
            }
            WatchEvent::Listed(object) => {
                self.listed(kind, object.metadata());
                self.readable(kind, object.metadata());
                set(self, *object)
            }
            WatchEvent::Stored(object) => {
                // The answer to a write of ours may be newer than the list that is under way.
                self.listed(kind, object.metadata());
                self.readable(kind, object.metadata());
                set(self, *object)
            }
            WatchEvent::Deleted(meta) => {
                self.readable(kind, &meta);
                self.end(kind, &key(kind, &meta), &drop)
            }
            WatchEvent::Complete => {
                let Some(named) = self.lists.under_way.remove(&kind) else { return Vec::new() };
                self.lists.complete.insert(kind);
                self.lists.forbidden.remove(&kind);
                if self.lists.doubtful.remove(&kind) {
                    return Vec::new();
                }
                self.unreadable.retain(|(of, key)| *of != kind || named.contains(key));
                let gone = self.keys(kind).into_iter().filter(|key| !named.contains(key));
                gone.collect::<Vec<_>>().iter().flat_map(|key| self.end(kind, key, &drop)).collect()
            }
            WatchEvent::Unreadable { rest, problem, .. } => {
                self.unreadable(kind, rest.metadata(), &problem).into_iter().collect()
            }
            WatchEvent::Interrupted { problem, is_forbidden } => {
                if is_forbidden {
                    *self.lists.forbidden.entry(kind).or_default() += 1;
                }
                vec![News::Trouble(format!("the watch of {kind:?} is interrupted: {problem}"))]
            }
        }
    }

    fn end(&mut self, kind: Kind, key: &str, drop: &impl Fn(&mut Self, &str) -> Vec<News>) -> Vec<News> {
        if kind == Kind::Claims {
            self.claims.note_gone(ClaimUid::new(key));
        }
        drop(self, key)
    }

    fn listed(&mut self, kind: Kind, meta: &ObjectMeta) {
        if let Some(named) = self.lists.under_way.get_mut(&kind) {
            named.insert(key(kind, meta));
        }
    }

    fn keys(&self, kind: Kind) -> Vec<String> {
        match kind {
            Kind::Pods => self.pods.iter().map(|pod| pod.at.uid.to_string()).collect(),
            Kind::Claims => self.claims.uids().map(ClaimUid::to_string).collect(),
            Kind::Nodes => {
                let known = self.nodes.iter().filter(|(_, node)| node.object.is_some());
                known.map(|(name, _)| name.to_string()).collect()
            }
            Kind::Slices => self.pools.slices().cloned().collect(),
            Kind::Classes => self.classes.names().collect(),
            Kind::TaintRules => self.pools.rules().cloned().collect(),
            Kind::Namespaces => {
                let Namespaces { opted_in, movable, bounds, .. } = &self.namespaces;
                opted_in.iter().chain(movable).chain(bounds.keys()).cloned().collect()
            }
            Kind::PodGroups(api) => self.optional.groups.keys(api).cloned().collect(),
            Kind::BindRequests => self.optional.bind_requests.keys().cloned().collect(),
            Kind::Budgets => self.optional.budgets.keys().cloned().collect(),
            Kind::Volumes => self.optional.volumes.names().map(str::to_owned).collect(),
        }
    }

    // Claims.

    fn set_claim(&mut self, object: ResourceClaim) -> Vec<News> {
        let key = self.claims.key_for(&claim::reference(&object.metadata));
        let mut fresh = claim::read(key, object, &self.namespace, &self.classes);
        let planned = self.claims.get(key).filter(|known| known.is_planned());
        // Anybody may create a claim of the name that was promised: what was planned is not given to it.
        if planned.is_some_and(|planned| !fresh.keeps_promise_of(planned, self.classes())) {
            fresh.key = self.claims.new_key();
        }
        self.put_claim(fresh)
    }

    /// A claim of which only a part can be read.
    fn set_unreadable(&mut self, rest: &ResourceClaim, problem: &str) -> Vec<News> {
        let trouble = self.unreadable(Kind::Claims, &rest.metadata, problem);
        let reference = claim::reference(&rest.metadata);
        if reference.uid.as_str().is_empty() {
            return trouble.into_iter().collect();
        }
        let before = self.claims.key(&reference.uid);
        let key = before.unwrap_or_else(|| self.claims.new_key());
        let before = before.and_then(|key| self.claims.get(key));
        let fresh = claim::unreadable(key, rest.clone(), before, problem, (&self.namespace, &self.classes));
        trouble.into_iter().chain(self.put_claim(fresh)).collect()
    }

    fn put_claim(&mut self, fresh: Claim) -> Vec<News> {
        let key = fresh.key;
        let known = self.claims.get(key).and_then(|known| known.at.resource_version());
        let version = fresh.at.resource_version();
        if known.is_some_and(|known| version.is_some_and(|fresh| is_older(fresh, known))) {
            return Vec::new();
        }
        // A planned claim whose name another has that was known before.
        let lost = self.claims.named(fresh.namespace(), fresh.name());
        let lost = lost.filter(|claim| claim.is_planned() && claim.key != key).map(|claim| claim.key);
        let lost = lost.and_then(|key| self.claims.remove(key));
        let before = self.claims.remove(key).map(Box::new);
        self.claims.insert(fresh);
        let lost = lost.map(|lost| News::ClaimGone(Box::new(lost)));
        lost.into_iter().chain([News::Claim { key, before }]).collect()
    }

    fn drop_claim(&mut self, uid: &str) -> Vec<News> {
        let key = self.claims.key(&ClaimUid::new(uid));
        let Some(gone) = key.and_then(|key| self.claims.remove(key)) else { return Vec::new() };
        // The pod that it was promised may still want it.
        let pods: Vec<PodUid> = self.pods_of(&gone).map(|pod| pod.at.uid.clone()).collect();
        pods.iter().for_each(|pod| self.promise(pod));
        vec![News::ClaimGone(Box::new(gone))]
    }

    /// The claim was there, and was deleted.
    pub fn is_gone(&self, uid: &ClaimUid) -> bool {
        self.claims.is_gone(uid)
    }

    pub fn claim(&self, key: ClaimKey) -> Option<&Claim> {
        self.claims.get(key)
    }

    /// Of a claim that is known to exist.
    pub fn claim_key(&self, uid: &ClaimUid) -> Option<ClaimKey> {
        self.claims.key(uid)
    }

    pub fn claims(&self) -> impl Iterator<Item = &Claim> + Clone {
        self.claims.iter()
    }

    pub fn claim_named(&self, namespace: &str, name: &str) -> Option<&Claim> {
        self.claims.named(namespace, name)
    }

    /// A pod's claims; none if one of them is not there.
    pub fn claims_of(&self, pod: &Pod) -> Option<Vec<&Claim>> {
        pod.requested.claims.iter().map(|name| self.claim_named(&pod.at.namespace, name)).collect()
    }

    #[cfg(test)]
    pub fn lookups(&self) -> u64 {
        self.claims.lookups()
    }

    /// The pods that name a claim.
    pub fn pods_of<'a>(&'a self, claim: &Claim) -> impl Iterator<Item = &'a Pod> + use<'a> {
        self.pods.naming(claim.namespace(), claim.name())
    }

    // Pods.

    pub fn pod(&self, uid: &PodUid) -> Option<&Pod> {
        self.pods.get(uid)
    }

    pub fn pods(&self) -> impl Iterator<Item = &Pod> + Clone {
        self.pods.iter()
    }

    /// The ports that a pod takes of its node. None: it takes none.
    pub fn ports_of(&self, uid: &PodUid) -> Option<&Arc<[HostPort]>> {
        self.pods.ports(uid)
    }

    fn set_pod(&mut self, object: k8s_openapi::api::core::v1::Pod) -> Vec<News> {
        let mut fresh = pod::read(&object);
        let mut rest = pod::PodExtras::of(&object, &fresh);
        if let Some(demands) = fresh.demands.take() {
            let demands = Arc::unwrap_or_clone(demands);
            fresh.demands = Some(Arc::new(self.with_volumes(demands, &fresh.at.namespace, &rest.volumes)));
        }
        let uid = fresh.at.uid.clone();
        let before = self.forget_pod(&uid);
        let mut told = Vec::new();
        told.extend(volumes::left_out(&fresh, before.as_ref().and_then(|before| before.demands.as_deref())));
        match neighbours::terms(&object, &fresh) {
            Ok(terms) => rest.terms = terms,
            Err(long) => told.extend(neighbours::too_large(&fresh, long).filter(|_| before.is_none())),
        }
        told.extend(self.pods.keep_alike(&mut fresh, &mut rest));
        let demands_changed = before.is_some_and(|before| {
            let is_other = before.standing.labels != fresh.standing.labels;
            before.demands != fresh.demands || (is_other && fresh.demands.is_some())
        });
        self.namespaces.asks(&fresh);
        self.optional.groups.joins(&fresh);
        self.pods.insert(fresh, rest);
        self.promise(&uid);
        [News::Pod { uid, demands_changed }].into_iter().chain(told).collect()
    }

    fn drop_pod(&mut self, uid: &str) -> Vec<News> {
        let Some(gone) = self.forget_pod(&PodUid::new(uid)) else { return Vec::new() };
        let planned =
            gone.requested.share.as_ref().and_then(|(_, name)| self.claim_named(&gone.at.namespace, name));
        // Another pod may name the claim that was promised to a first one.
        let theirs = |claim: &&Claim| claim.is_planned() && claim.meta.owner.as_ref() == Some(&gone.at.uid);
        let planned = planned.filter(theirs).map(|claim| claim.key);
        let planned = planned.and_then(|key| self.claims.remove(key));
        let claim = planned.map(|claim| News::ClaimGone(Box::new(claim)));
        [News::PodGone(Box::new(gone))].into_iter().chain(claim).collect()
    }

    fn forget_pod(&mut self, uid: &PodUid) -> Option<Pod> {
        let pod = self.pods.remove(uid)?;
        self.namespaces.asks_no_more(&pod);
        self.optional.groups.leaves(&pod);
        Some(pod)
    }

    // Nodes and their GPUs.

    /// How many devices that no shares can be placed on these selectors choose, and what it cost to find out, in ticks.
    /// None: it would have cost too much.
    pub fn unshared_devices(&mut self, lists: &unshared::SelectorLists) -> (Option<unshared::Unshared>, u64) {
        self.pools.unshared(lists)
    }

    pub fn node(&self, name: &NodeName) -> Option<&NodeState> {
        self.nodes.get(name)
    }

    pub fn zone_of(&self, node: &NodeName) -> Option<&str> {
        self.node(node)?.object.as_ref()?.zone()
    }

    pub fn nodes(&self) -> impl Iterator<Item = (&NodeName, &NodeState)> {
        self.nodes.iter()
    }

    /// Why a pod cannot run on a node, however empty it is.
    pub fn keeps_off(&self, pod: &Demands, node: &Node) -> Option<Unfit> {
        let by_claim = |name: &str| class::of_resource(name, self.classes.others()).is_some();
        feasible::why_not(pod, node).or_else(|| feasible::lacking(pod, node, by_claim))
    }

    fn set_node(&mut self, object: k8s_openapi::api::core::v1::Node) -> Vec<News> {
        let name = NodeName::new(object.metadata.name.clone().unwrap_or_default());
        let mut fresh = feasible::Node::of(&object);
        // Itself as it was, or one whose name is next to its own.
        let known = self.nodes.range(..=&name).next_back().or_else(|| self.nodes.range(&name..).next());
        if let Some(like) = known.and_then(|(_, state)| state.object.as_deref()) {
            fresh.share(like);
        }
        let state = self.nodes.entry(name.clone()).or_default();
        if state.object.as_deref() == Some(&fresh) {
            return Vec::new();
        }
        state.object = Some(Arc::new(fresh));
        vec![News::Node(name)]
    }

    fn drop_node(&mut self, name: &str) -> Vec<News> {
        let name = NodeName::new(name);
        let Some(state) = self.nodes.get_mut(&name) else { return Vec::new() };
        state.object = None;
        if state.gpus.is_empty() {
            self.nodes.remove(&name);
        }
        vec![News::Node(name)]
    }

    fn set_slice(&mut self, object: k8s_openapi::api::resource::v1::ResourceSlice) -> Vec<News> {
        let nodes = self.pools.set_slice(object);
        nodes.into_iter().flat_map(|node| self.set_gpus(node)).collect()
    }

    fn drop_slice(&mut self, name: &str) -> Vec<News> {
        let node = self.pools.drop_slice(name);
        node.map(|node| self.set_gpus(node)).unwrap_or_default()
    }

    fn set_gpus(&mut self, node: NodeName) -> Vec<News> {
        let gpus = self.pools.gpus(&node);
        let state = self.nodes.entry(node.clone()).or_default();
        if state.gpus == gpus {
            return Vec::new();
        }
        state.gpus = gpus;
        if state.gpus.is_empty() && state.object.is_none() {
            self.nodes.remove(&node);
        }
        vec![News::Node(node)]
    }

    fn set_rule(&mut self, object: DeviceTaintRule) -> Vec<News> {
        if self.pools.set_rule(object) { self.set_all_gpus() } else { Vec::new() }
    }

    fn drop_rule(&mut self, name: &str) -> Vec<News> {
        if self.pools.drop_rule(name) { self.set_all_gpus() } else { Vec::new() }
    }

    fn set_all_gpus(&mut self) -> Vec<News> {
        let nodes: Vec<NodeName> = self.pools.nodes().cloned().collect();
        nodes.into_iter().flat_map(|node| self.set_gpus(node)).collect()
    }

    pub fn gpu(&self, gpu: &GpuRef) -> Option<&PublishedGpu> {
        self.nodes.get(&gpu.node)?.gpus.get(&gpu.device).map(|gpu| &**gpu)
    }

    // Classes.

    /// Ours.
    pub fn classes(&self) -> &OurClasses {
        self.classes.ours()
    }

    fn set_class(&mut self, object: DeviceClass) -> Vec<News> {
        let news = self.classes.set(&object);
        let name = object.metadata.name.as_deref().unwrap_or_default();
        let news = self.read_again(news, name);
        self.promise_again(news, name)
    }

    fn drop_class(&mut self, name: &str) -> Vec<News> {
        let news = self.classes.remove(name);
        let news = self.read_again(news, name);
        self.promise_again(news, name)
    }

    /// Claims of a class that has come, changed or gone may be ours now, or no longer.
    fn read_again(&mut self, mut news: Vec<News>, class: &str) -> Vec<News> {
        if news.is_empty() {
            return news;
        }
        let named = |claim: &&Claim| claim.kept.as_ref().is_some_and(|kept| claim::names_class(kept, class));
        let named: Vec<ClaimKey> = self.claims.iter().filter(named).map(|claim| claim.key).collect();
        for key in named {
            let Some(known) = self.claims.get(key) else { continue };
            let Some(kept) = known.kept.as_deref().cloned() else { continue };
            let fresh = claim::read(key, kept, &self.namespace, &self.classes);
            if (&fresh.asks, &fresh.allocation) != (&known.asks, &known.allocation) {
                news.extend(self.put_claim(fresh));
            }
        }
        news
    }
}

/// Identity of an object among those of its kind: pods and claims by UID, since names come again.
fn key(kind: Kind, meta: &ObjectMeta) -> String {
    let part = match kind {
        Kind::Pods | Kind::Claims => &meta.uid,
        Kind::Nodes | Kind::Slices | Kind::Classes | Kind::TaintRules | Kind::Namespaces | Kind::Volumes => {
            &meta.name
        }
        // By which pods name them: they are of their namespace.
        Kind::PodGroups(_) | Kind::BindRequests | Kind::Budgets => return groups::key_of(meta),
    };
    part.clone().unwrap_or_default()
}

/// An answer to a write of ours may overtake the watch; what the watch then brings is old. Versions that are no
/// numbers cannot be compared: the later arrival counts.
fn is_older(fresh: &str, known: &str) -> bool {
    match (fresh.parse::<u64>(), known.parse::<u64>()) {
        (Ok(fresh), Ok(known)) => fresh < known,
        _ => false,
    }
}

fn same_pod(uid: PodUid) -> News {
    News::Pod { uid, demands_changed: false }
}
