//! The cluster in memory.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::mem::discriminant;
use std::time::Duration;

use k8s_openapi::Metadata;
use k8s_openapi::api::core::v1::{Namespace, Node, PersistentVolume, Pod};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::resource::v1::{DeviceClass, DeviceTaintRule, ResourceClaim, ResourceSlice};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::{Value, json};

use crate::cluster::allocation::{ClaimVersion, Marks};
use crate::cluster::eviction::Eviction;
use crate::cluster::feed::{Change, WatchEvent};
use crate::cluster::pod_groups::{PodGroup, PodGroupApi};
use crate::controller::Moment;
use crate::controller::config::Rules;
use crate::controller::core::Core;
use crate::controller::grant;
use crate::controller::holds::ReleaseStep;
use crate::controller::view::GpuRef;
use crate::controller::view::claim::{HOLD_DEVICE, HOLD_NODE, LOOKED, version};
use crate::controller::write::{Failure, Write, WriteOutcome};
use crate::model::claim::PodRef;
use crate::model::names::{DRIVER, HOLD_LABEL, OPT_IN_LABEL, OPT_IN_VALUE, SHARED_CLASS};
use crate::model::share::Extent;
use crate::params::{Params, decode};
use crate::slices::ShareParts;

pub const NS: &str = "tranche-system";
const FINALIZER: &str = "resource.kubernetes.io/delete-protection";

/// Of objects that are watched, each on its own.
pub const KINDS: u8 = 10;

pub type Name = (String, String);

/// What shares have of each GPU, by node and device: MiB, percent of compute and slots.
type Shares = BTreeMap<(String, String), (u64, u32, u32)>;
/// Who else has each GPU.
type Others<'a> = BTreeMap<(String, String), Vec<&'a Name>>;

/// The API server, and the controller before it.
pub struct Cluster {
    pub core: Core,
    pub now: Moment,
    /// Of whatever was stored last.
    pub version: u64,
    made: u64,
    pub claims: BTreeMap<Name, ResourceClaim>,
    pub pods: BTreeMap<Name, Pod>,
    pub nodes: BTreeMap<String, Node>,
    pub slices: BTreeMap<String, ResourceSlice>,
    pub classes: BTreeMap<String, DeviceClass>,
    pub rules: BTreeMap<String, DeviceTaintRule>,
    /// Those that have opted in.
    pub namespaces: BTreeMap<String, Namespace>,
    pub groups: BTreeMap<(PodGroupApi, String), PodGroup>,
    pub budgets: BTreeMap<Name, PodDisruptionBudget>,
    pub volumes: BTreeMap<String, PersistentVolume>,
    /// Pods that were evicted, in order. They are there until somebody ends them.
    pub evicted: Vec<Name>,
    /// When each of them was.
    pub evicted_at: Vec<Moment>,
    /// Pods that were evicted to move them, and when.
    pub moved: Vec<(Moment, Name)>,
    /// What the controller has not been told yet.
    pub feed: VecDeque<Change>,
    /// What the controller wants written.
    pub writes: VecDeque<Write>,
    /// What came of writes, and the controller has not heard yet.
    pub answers: Vec<WriteOutcome>,
    /// The API server keeps share ids.
    pub keeps: bool,
    /// Each share of the nodes to come has an MPS daemon of its own.
    pub own_daemons: bool,
    /// GPUs as the scheduler's books have them where no share ids are kept: once, until any claim that named it
    /// ends.
    pub books: BTreeSet<(String, String)>,
    /// GPUs that are free in the books and somebody has.
    pub blind: BTreeSet<(String, String)>,
    ids: u64,
}

impl Cluster {
    pub fn new(rules: Rules) -> Self {
        let mut cluster = Self {
            core: Core::new(rules, NS),
            now: Duration::ZERO,
            version: 1,
            made: 0,
            claims: BTreeMap::new(),
            pods: BTreeMap::new(),
            nodes: BTreeMap::new(),
            slices: BTreeMap::new(),
            classes: BTreeMap::new(),
            rules: BTreeMap::new(),
            namespaces: BTreeMap::new(),
            groups: BTreeMap::new(),
            budgets: BTreeMap::new(),
            volumes: BTreeMap::new(),
            evicted: Vec::new(),
            evicted_at: Vec::new(),
            moved: Vec::new(),
            feed: VecDeque::new(),
            writes: VecDeque::new(),
            answers: Vec::new(),
            keeps: true,
            own_daemons: false,
            books: BTreeSet::new(),
            blind: BTreeSet::new(),
            ids: 0,
        };
        let gpu = "device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == 'gpu'";
        let spec =
            json!({"extendedResourceName": "nvidia.com/gpu", "selectors": [{"cel": {"expression": gpu}}]});
        cluster.put_class("gpu.nvidia.com", json!({}), spec);
        cluster.opt_in("ml");
        cluster.relist();
        cluster
    }

    fn stamp(&mut self, meta: &mut ObjectMeta) {
        self.version += 1;
        meta.resource_version = Some(self.version.to_string());
        if meta.uid.is_none() {
            self.made += 1;
            meta.uid = Some(format!("uid-{}", self.made));
        }
    }

    // Objects.

    pub fn put_node(&mut self, name: &str, gpus: u32) {
        self.put_node_object(name, json!({}));
        let mut devices: Vec<Value> = (0..gpus).map(|minor| device(name, minor, self.keeps)).collect();
        if self.own_daemons {
            devices.iter_mut().for_each(|device| merge(device, &own_daemons()));
        }
        self.put_slice(name, devices);
    }

    pub fn put_node_object(&mut self, name: &str, spec: Value) {
        let mut node: Node = object(json!({"metadata": {"name": name}, "spec": spec,
            "status": {"allocatable": {"cpu": "32", "memory": "256Gi", "pods": "110"}}}));
        self.stamp(&mut node.metadata);
        self.nodes.insert(name.to_owned(), node.clone());
        self.feed.push_back(Change::Node(WatchEvent::Stored(Box::new(node))));
    }

    pub fn put_slice(&mut self, node: &str, devices: Vec<Value>) {
        let mut slice: ResourceSlice = object(json!({"metadata": {"name": format!("{node}-slice")},
            "spec": {"driver": DRIVER, "nodeName": node, "devices": devices,
                "pool": {"name": node, "generation": self.version, "resourceSliceCount": 1}}}));
        self.stamp(&mut slice.metadata);
        self.slices.insert(node.to_owned(), slice.clone());
        self.feed.push_back(Change::Slice(WatchEvent::Stored(Box::new(slice))));
    }

    /// A volume of PersistentVolumeClaim `claim` of namespace `ml`, in this phase, on nodes with one of these labels.
    pub fn put_volume(&mut self, name: &str, claim: &str, phase: &str, required: Value) {
        let mut volume: PersistentVolume = object(json!({"metadata": {"name": name},
            "spec": {"claimRef": {"namespace": "ml", "name": claim}, "nodeAffinity": {"required": required}},
            "status": {"phase": phase}}));
        self.stamp(&mut volume.metadata);
        self.volumes.insert(name.to_owned(), volume.clone());
        self.feed.push_back(Change::Volume(WatchEvent::Stored(Box::new(volume))));
    }

    pub fn drop_volume(&mut self, name: &str) {
        let gone = self.volumes.remove(name).unwrap();
        self.feed.push_back(Change::Volume(WatchEvent::Deleted(Box::new(gone.metadata))));
    }

    pub fn drop_node(&mut self, name: &str) {
        if let Some(node) = self.nodes.remove(name) {
            self.feed.push_back(Change::Node(WatchEvent::Deleted(Box::new(node.metadata))));
        }
        if let Some(slice) = self.slices.remove(name) {
            self.feed.push_back(Change::Slice(WatchEvent::Deleted(Box::new(slice.metadata))));
        }
    }

    pub fn put_class(&mut self, name: &str, annotations: Value, spec: Value) {
        let class: DeviceClass =
            object(json!({"metadata": {"name": name, "annotations": annotations}, "spec": spec}));
        self.classes.insert(name.to_owned(), class.clone());
        self.feed.push_back(Change::Class(WatchEvent::Stored(Box::new(class))));
    }

    pub fn drop_class(&mut self, name: &str) {
        if let Some(class) = self.classes.remove(name) {
            self.feed.push_back(Change::Class(WatchEvent::Deleted(Box::new(class.metadata))));
        }
    }

    pub fn put_rule(&mut self, name: &str, spec: Value) {
        let rule: DeviceTaintRule = object(json!({"metadata": {"name": name}, "spec": spec}));
        self.rules.insert(name.to_owned(), rule.clone());
        self.feed.push_back(Change::TaintRule(WatchEvent::Stored(Box::new(rule))));
    }

    pub fn drop_rule(&mut self, name: &str) {
        if let Some(rule) = self.rules.remove(name) {
            self.feed.push_back(Change::TaintRule(WatchEvent::Deleted(Box::new(rule.metadata))));
        }
    }

    /// The namespace is given the label.
    pub fn opt_in(&mut self, name: &str) {
        self.change_namespace(name, |meta| {
            meta.labels = Some(BTreeMap::from([(OPT_IN_LABEL.to_owned(), OPT_IN_VALUE.to_owned())]));
        });
    }

    /// The label is taken away.
    pub fn opt_out(&mut self, name: &str) {
        self.change_namespace(name, |meta| meta.labels = None);
    }

    /// The namespace has these annotations, and no others.
    pub fn annotate(&mut self, name: &str, annotations: Value) {
        self.change_namespace(name, |meta| meta.annotations = Some(object(annotations)));
    }

    fn change_namespace(&mut self, name: &str, change: impl FnOnce(&mut ObjectMeta)) {
        let namespace = self.namespaces.entry(name.to_owned()).or_insert_with(|| Namespace {
            metadata: ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() },
            ..Namespace::default()
        });
        change(&mut namespace.metadata);
        let namespace = namespace.clone();
        self.feed.push_back(Change::Namespace(WatchEvent::Stored(Box::new(namespace))));
    }

    /// A claim of our class: `count` GPUs with this share.
    pub fn put_share(&mut self, name: &str, share: Value, count: u32) {
        self.put_claim(share_claim(name, &share, count));
    }

    /// The same, made for its owner.
    pub fn put_owned_share(&mut self, name: &str, share: Value, owner: Value) {
        let mut claim = share_claim(name, &share, 1);
        claim["metadata"]["ownerReferences"] = json!([owner]);
        self.put_claim(claim);
    }

    pub fn put_whole(&mut self, name: &str) {
        self.put_claim(json!({"metadata": {"name": name, "namespace": "ml"}, "spec": {"devices": {
            "requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu.nvidia.com", "count": 1}}]}}}));
    }

    pub fn put_claim(&mut self, claim: Value) {
        let claim: ResourceClaim = object(claim);
        self.store(claim);
    }

    /// A claim with one request `r` of the controller's class, whose alternatives have these amounts of memory.
    pub fn put_alternatives(&mut self, namespace: &str, name: &str, amounts: &[&str]) {
        let sub = |nth: usize| json!({"name": format!("s{nth}"), "deviceClassName": SHARED_CLASS});
        let subs: Vec<Value> = (0..amounts.len()).map(sub).collect();
        let config = |(nth, memory): (usize, &&str)| {
            let share = json!({"apiVersion": "tranche.dev/v1alpha1", "kind": "GpuShare", "memory": memory});
            json!({"requests": [format!("r/s{nth}")], "opaque": {"driver": DRIVER, "parameters": share}})
        };
        let config: Vec<Value> = amounts.iter().enumerate().map(config).collect();
        self.put_claim(json!({"metadata": {"name": name, "namespace": namespace}, "spec": {"devices": {
            "requests": [{"name": "r", "firstAvailable": subs}], "config": config}}}));
    }

    pub fn put_pod(&mut self, name: &str, claims: &[&str], more: Value) {
        let named: Vec<Value> =
            claims.iter().map(|one| json!({"name": one, "resourceClaimName": one})).collect();
        let mut pod = json!({"metadata": {"name": name, "namespace": "ml"},
            "spec": {"containers": [{"name": "main"}], "resourceClaims": named}, "status": {"phase": "Pending"}});
        crate::controller::tests::cluster::merge(&mut pod, &more);
        let pod: Pod = object(pod);
        self.store_pod(pod);
    }

    pub fn store_pod(&mut self, mut pod: Pod) {
        self.stamp(&mut pod.metadata);
        let meta = &pod.metadata;
        self.pods.insert((meta.namespace.clone().unwrap(), meta.name.clone().unwrap()), pod.clone());
        self.feed.push_back(Change::Pod(WatchEvent::Stored(Box::new(pod))));
    }

    pub fn store(&mut self, mut claim: ResourceClaim) -> ResourceClaim {
        self.stamp(&mut claim.metadata);
        let meta = &claim.metadata;
        let at = (meta.namespace.clone().unwrap(), meta.name.clone().unwrap());
        let before = self.claims.insert(at, claim.clone());
        self.account(before.as_ref(), Some(&claim));
        self.feed.push_back(Change::Claim(WatchEvent::Stored(Box::new(claim.clone()))));
        claim
    }

    /// The scheduler sees that a claim is allocated, or is not any more.
    fn account(&mut self, before: Option<&ResourceClaim>, after: Option<&ResourceClaim>) {
        let (old, new) = (before.map(counted).unwrap_or_default(), after.map(counted).unwrap_or_default());
        match (old.is_empty(), new.is_empty()) {
            (true, false) => {
                self.blind.retain(|gpu| !new.contains(gpu));
                self.books.extend(new);
            }
            (false, true) => {
                for gpu in old {
                    self.books.remove(&gpu);
                    let mut others = self.claims.iter().filter(|((namespace, _), _)| namespace != NS);
                    match others.any(|(_, claim)| counted(claim).contains(&gpu)) {
                        true => drop(self.blind.insert(gpu)),
                        false => drop(self.blind.remove(&gpu)),
                    }
                }
            }
            _ => {}
        }
    }

    // The controller-manager, and what users do.

    /// The pod ends: its claims are released, and deleted with it.
    pub fn drop_pod(&mut self, name: &str, with_claims: bool) {
        let Some(pod) = self.pods.remove(&("ml".to_owned(), name.to_owned())) else { return };
        self.feed.push_back(Change::Pod(WatchEvent::Deleted(Box::new(pod.metadata.clone()))));
        let uid = pod.metadata.uid.clone().unwrap();
        for claim in claims_of(&pod) {
            let at = ("ml".to_owned(), claim.clone());
            let Some(mut found) = self.claims.get(&at).cloned() else { continue };
            let status = found.status.get_or_insert_default();
            let users = status.reserved_for.get_or_insert_default();
            let before = users.len();
            users.retain(|user| user.uid != uid);
            if users.is_empty() && before > 0 {
                found.status = None;
            }
            if before > 0 {
                self.store(found);
            }
            if with_claims {
                self.drop_claim(&at);
            }
        }
    }

    /// Deleting a claim that nobody has reserved: the controller-manager clears it and lets it go.
    pub fn drop_claim(&mut self, at: &Name) {
        let reserved = |claim: &ResourceClaim| {
            let users = claim.status.as_ref().and_then(|status| status.reserved_for.as_ref());
            users.is_some_and(|users| !users.is_empty())
        };
        if self.claims.get(at).is_some_and(|claim| !reserved(claim)) {
            let claim = self.claims.remove(at).unwrap();
            self.account(Some(&claim), None);
            self.feed.push_back(Change::Claim(WatchEvent::Deleted(Box::new(claim.metadata))));
        }
    }

    // The watch.

    /// The controller's watches begin anew: what was on its way is in the lists.
    pub fn relist(&mut self) {
        (0..KINDS).for_each(|kind| self.relist_one(kind));
    }

    /// The watch of one kind begins anew; the others go on.
    pub fn relist_one(&mut self, kind: u8) {
        fn list<K: Clone>(
            feed: &mut VecDeque<Change>,
            all: impl Iterator<Item = K>,
            wrap: fn(WatchEvent<K>) -> Change,
        ) {
            let anew = wrap(WatchEvent::Anew);
            feed.retain(|change| discriminant(change) != discriminant(&anew));
            feed.push_back(anew);
            feed.extend(all.map(|one| wrap(WatchEvent::Listed(Box::new(one)))));
            feed.push_back(wrap(WatchEvent::Complete));
        }
        match kind {
            0 => list(&mut self.feed, self.pods.values().cloned(), Change::Pod),
            1 => list(&mut self.feed, self.nodes.values().cloned(), Change::Node),
            2 => list(&mut self.feed, self.claims.values().cloned(), Change::Claim),
            3 => list(&mut self.feed, self.slices.values().cloned(), Change::Slice),
            4 => list(&mut self.feed, self.rules.values().cloned(), Change::TaintRule),
            5 => list(&mut self.feed, self.namespaces.values().cloned(), Change::Namespace),
            6 => list(&mut self.feed, self.classes.values().cloned(), Change::Class),
            7 => list(&mut self.feed, self.budgets.values().cloned(), Change::Budget),
            8 => list(&mut self.feed, self.volumes.values().cloned(), Change::Volume),
            _ => self.relist_groups(),
        }
    }

    fn relist_groups(&mut self) {
        self.feed.retain(|change| !matches!(change, Change::PodGroup(..)));
        for api in PodGroupApi::ALL {
            self.feed.push_back(Change::PodGroup(api, WatchEvent::Anew));
            let of_api = self.groups.iter().filter(|((of, _), _)| *of == api);
            let listed = of_api.map(|(_, group)| WatchEvent::Listed(Box::new(group.clone())));
            self.feed.extend(listed.map(|one| Change::PodGroup(api, one)));
            self.feed.push_back(Change::PodGroup(api, WatchEvent::Complete));
        }
    }

    /// PodGroup `name` of namespace `ml`, as one of the APIs has it.
    pub fn put_group(&mut self, api: PodGroupApi, name: &str, object: Value) {
        let mut group: PodGroup = serde_json::from_value(object).unwrap();
        (group.metadata.name, group.metadata.namespace) = (Some(name.to_owned()), Some("ml".to_owned()));
        self.stamp(&mut group.metadata);
        self.groups.insert((api, name.to_owned()), group.clone());
        self.feed.push_back(Change::PodGroup(api, WatchEvent::Stored(Box::new(group))));
    }

    pub fn drop_group(&mut self, api: PodGroupApi, name: &str) {
        let gone = self.groups.remove(&(api, name.to_owned())).unwrap();
        self.feed.push_back(Change::PodGroup(api, WatchEvent::Deleted(Box::new(gone.metadata))));
    }

    pub fn deliver(&mut self, most: usize) {
        for _ in 0..most {
            let Some(change) = self.feed.pop_front() else { return };
            self.core.apply(change, self.now);
        }
    }

    /// The same, but no watch waits for those of other kinds: one of them is ahead. Now and then it repeats itself.
    pub fn deliver_one_kind(&mut self, most: usize, rng: &mut fastrand::Rng) {
        let Some(kind) = rng.choice(&self.feed).map(discriminant) else { return };
        for _ in 0..most {
            let Some(next) = self.feed.iter().position(|change| discriminant(change) == kind) else { return };
            let Some(change) = self.feed.remove(next) else { return };
            if rng.u8(0..16) == 0 {
                self.core.apply(change.clone(), self.now);
            }
            self.core.apply(change, self.now);
        }
    }

    /// Another controller begins to lead, and knows nothing.
    pub fn fail_over(&mut self, rules: Rules) {
        self.writes.clear();
        self.answers.clear();
        self.core = Core::new(rules, NS);
        self.relist();
    }

    pub fn round(&mut self) -> Option<Moment> {
        let mut next = self.ids;
        let round = self.core.round(self.now, &mut || {
            next += 1;
            format!("00000000-0000-4000-8000-{next:012}")
        });
        self.ids = next;
        self.writes.extend(round.writes);
        round.next
    }

    // The API server's side of writes.

    /// Does the next write. `lost`: it is done, but nobody hears of it.
    pub fn write(&mut self, lost: bool) {
        if let Some(write) = self.writes.pop_front() {
            let outcome = self.perform(write, lost);
            self.core.done(outcome, self.now);
        }
    }

    /// Of the next write, a hold or an allocation, what comes first: then the writer dies.
    pub fn write_half(&mut self) {
        match self.writes.pop_front() {
            Some(Write::Allocate { at, marks, .. }) => drop(self.mark(&at, &marks)),
            Some(Write::Hold(gpu, _)) => drop(self.make_hold(gpu.node.as_str(), gpu.device.as_str())),
            _ => {}
        }
    }

    /// Creates the claim that is to be created, but cannot allocate it; its answer comes before the watch does.
    pub fn create_without_allocation(&mut self) {
        let at = self.writes.iter().position(|write| matches!(write, Write::Create(..)));
        let Some(Write::Create(uid, claim, _)) = at.and_then(|at| self.writes.remove(at)) else {
            panic!("nothing is to be created")
        };
        let made = self.store(*claim);
        self.core.done(WriteOutcome::Created(uid, Ok(Box::new(made))), self.now);
    }

    /// Does any one of the writes.
    pub fn write_at(&mut self, at: usize, lost: bool) {
        self.writes.swap(0, at);
        self.write(lost);
    }

    /// Does any one of the writes; that it is done is heard of later, maybe after the watch has told.
    pub fn write_unheard(&mut self, at: usize, lost: bool) {
        self.writes.swap(0, at);
        if let Some(write) = self.writes.pop_front() {
            let outcome = self.perform(write, lost);
            self.answers.push(outcome);
        }
    }

    /// What came of a write is heard.
    pub fn hear(&mut self, at: usize) {
        let outcome = self.answers.swap_remove(at);
        self.core.done(outcome, self.now);
    }

    /// The next write is not done, for this reason.
    pub fn fail(&mut self, failure: Failure) {
        let Some(write) = self.writes.pop_front() else { return };
        let outcome = match write {
            Write::Hold(gpu, _) => WriteOutcome::Held(gpu, Err(failure)),
            Write::WatchBarrier(at) => WriteOutcome::BarrierWritten(at.claim.uid, Err(failure)),
            Write::Release(gpu, step) => {
                WriteOutcome::Released(gpu, step.at().claim.uid.clone(), Err(failure))
            }
            Write::Allocate { claim, .. } => WriteOutcome::Allocated(claim, Err(failure)),
            Write::Clear(claim, _) => WriteOutcome::Cleared(claim, Err(failure)),
            Write::Mark(claim, ..) => WriteOutcome::Marked(claim, Err(failure)),
            Write::Create(claim, ..) => WriteOutcome::Created(claim, Err(failure)),
            Write::Evict(pod) => WriteOutcome::Evicted(pod, Err(failure)),
            Write::Move(pod, _) => WriteOutcome::Moved(pod.uid, Err(failure)),
        };
        self.core.done(outcome, self.now);
    }

    fn perform(&mut self, write: Write, lost: bool) -> WriteOutcome {
        let hear = |result: Result<ResourceClaim, Failure>| match (result, lost) {
            (Ok(_), true) => Err(Failure::Silent("the answer was lost".to_owned())),
            (result, _) => result.map(Box::new),
        };
        match write {
            Write::Hold(gpu, parts) => {
                let made = self.hold(&gpu, parts);
                WriteOutcome::Held(gpu, hear(made))
            }
            Write::WatchBarrier(at) => {
                let text = at.resource_version.clone();
                let marks = Marks { finalizers: None, annotations: vec![(LOOKED.to_owned(), Some(text))] };
                let marked = self.mark(&at, &marks);
                WriteOutcome::BarrierWritten(at.claim.uid, hear(marked))
            }
            Write::Release(gpu, step) => {
                let uid = step.at().claim.uid.clone();
                let done = match step {
                    ReleaseStep::Clear(at) => self.allocate(&at, None),
                    ReleaseStep::Restore(at) => {
                        let made = grant::hold(&gpu.node, "gpu", gpu.device.as_str(), None);
                        self.allocate(&at, Some(made))
                    }
                    ReleaseStep::Delete(at) => {
                        let found = self.current(&at);
                        if found.is_ok() {
                            self.drop_claim(&(at.claim.namespace, at.claim.name));
                        }
                        found
                    }
                };
                WriteOutcome::Released(gpu, uid, hear(done).map(drop))
            }
            Write::Allocate { claim, at, marks, allocation } => {
                let stored = self.mark(&at, &marks).and_then(|marked| {
                    let at = version(&marked.metadata);
                    self.allocate(&at, Some(*allocation))
                });
                WriteOutcome::Allocated(claim, hear(stored))
            }
            Write::Clear(claim, at) => {
                let stored = self.allocate(&at, None);
                WriteOutcome::Cleared(claim, hear(stored))
            }
            Write::Mark(claim, at, marks) => {
                let stored = self.mark(&at, &marks);
                WriteOutcome::Marked(claim, hear(stored))
            }
            Write::Evict(pod) => {
                let done = self.evict(&pod, false);
                WriteOutcome::Evicted(
                    pod,
                    if lost { Err(Failure::Silent("lost".to_owned())) } else { Ok(done) },
                )
            }
            Write::Create(claim, object, allocation) => {
                let name =
                    (object.metadata.namespace.clone().unwrap(), object.metadata.name.clone().unwrap());
                if self.claims.contains_key(&name) {
                    return WriteOutcome::Created(claim, Err(Failure::Conflict));
                }
                let made = self.store(*object);
                let at = version(&made.metadata);
                let made = match allocation {
                    Some(allocation) => self.allocate(&at, Some(*allocation)),
                    None => Ok(made),
                };
                WriteOutcome::Created(claim, hear(made))
            }
            Write::Move(pod, _) => {
                let done = match self.evict(&pod, true) {
                    Eviction::Protected(words) => Err(Failure::Refused(words)),
                    Eviction::Evicted | Eviction::Gone => Ok(()),
                };
                WriteOutcome::Moved(pod.uid, done)
            }
        }
    }

    /// The pod is to end, unless a budget forbids it. Each that lets it go has one less to let go.
    fn evict(&mut self, at: &PodRef, is_move: bool) -> Eviction {
        let name = (at.namespace.clone(), at.name.clone());
        let Some(mut pod) = self.pods.get(&name).cloned() else { return Eviction::Gone };
        if pod.metadata.uid.as_deref() != Some(at.uid.as_str()) {
            return Eviction::Gone;
        }
        let labels = pod.metadata.labels.clone().unwrap_or_default();
        let is_meant = |budget: &PodDisruptionBudget| {
            let selector = budget.spec.as_ref().and_then(|spec| spec.selector.as_ref());
            let wanted = selector.and_then(|selector| selector.match_labels.as_ref()).into_iter().flatten();
            wanted.clone().count() > 0 && wanted.into_iter().all(|(key, text)| labels.get(key) == Some(text))
        };
        let budgets = self.budgets.iter().filter(|((ns, _), budget)| *ns == at.namespace && is_meant(budget));
        let budgets: Vec<(Name, PodDisruptionBudget)> =
            budgets.map(|(name, budget)| (name.clone(), budget.clone())).collect();
        for ((namespace, name), budget) in budgets {
            let allowed = budget.status.and_then(|status| status.disruptions_allowed).unwrap_or(0);
            if allowed == 0 {
                return Eviction::Protected(format!("budget {name}"));
            }
            let labels = json!(budget.spec.unwrap().selector.unwrap().match_labels);
            self.put_budget((&namespace, &name), labels, allowed - 1);
        }
        if pod.metadata.deletion_timestamp.is_none() {
            let ends = self.core.recorder.time_of(self.now + Duration::from_secs(30)).unwrap();
            pod.metadata.deletion_timestamp = Some(object(json!(ends.to_string())));
            match is_move {
                true => self.moved.push((self.now, name)),
                false => {
                    self.evicted.push(name);
                    self.evicted_at.push(self.now);
                }
            }
            self.store_pod(pod);
        }
        Eviction::Evicted
    }

    /// A budget of pods with these labels, which lets so many go.
    pub fn put_budget(&mut self, at: (&str, &str), labels: Value, allowed: i32) {
        let mut budget: PodDisruptionBudget = object(json!({"metadata": {"namespace": at.0, "name": at.1},
            "spec": {"selector": {"matchLabels": labels}}, "status": {"disruptionsAllowed": allowed,
                "currentHealthy": 1, "desiredHealthy": 1, "expectedPods": 1}}));
        self.stamp(&mut budget.metadata);
        self.budgets.insert((at.0.to_owned(), at.1.to_owned()), budget.clone());
        self.feed.push_back(Change::Budget(WatchEvent::Stored(Box::new(budget))));
    }

    /// Pods that were evicted and are still there.
    pub fn ending(&self) -> Vec<String> {
        let pods = self.pods.iter().filter(|(_, pod)| pod.metadata.deletion_timestamp.is_some());
        pods.map(|((_, name), _)| name.clone()).collect()
    }

    pub fn hold(&mut self, gpu: &GpuRef, parts: Option<ShareParts>) -> Result<ResourceClaim, Failure> {
        let mut claim = self.make_hold(gpu.node.as_str(), gpu.device.as_str())?;
        let made = grant::hold(&gpu.node, "gpu", gpu.device.as_str(), parts);
        claim.status.get_or_insert_default().allocation = Some(made);
        Ok(self.store(claim))
    }

    /// Without its allocation.
    fn make_hold(&mut self, node: &str, device: &str) -> Result<ResourceClaim, Failure> {
        let name = format!("hold.{device}.{node}");
        if self.claims.contains_key(&(NS.to_owned(), name.clone())) {
            return Err(Failure::Conflict);
        }
        let claim: ResourceClaim = object(json!({"metadata": {"name": name, "namespace": NS,
            "labels": {HOLD_LABEL: "true"}, "annotations": {HOLD_NODE: node, HOLD_DEVICE: device}},
            "spec": {"devices": {"requests": [
                {"name": "gpu", "exactly": {"deviceClassName": "gpu.nvidia.com", "count": 1}}]}}}));
        Ok(self.store(claim))
    }

    fn current(&self, at: &ClaimVersion) -> Result<ResourceClaim, Failure> {
        let found =
            self.claims.get(&(at.claim.namespace.clone(), at.claim.name.clone())).ok_or(Failure::Gone)?;
        let meta = found.metadata();
        if meta.uid.as_deref() != Some(at.claim.uid.as_str())
            || meta.resource_version.as_deref() != Some(&at.resource_version)
        {
            return Err(Failure::Conflict);
        }
        Ok(found.clone())
    }

    fn mark(&mut self, at: &ClaimVersion, marks: &Marks) -> Result<ResourceClaim, Failure> {
        let mut claim = self.current(at)?;
        if marks.is_empty() {
            return Ok(claim);
        }
        if let Some(finalizers) = &marks.finalizers {
            assert!(finalizers.iter().any(|one| one == FINALIZER));
            claim.metadata.finalizers = Some(finalizers.clone());
        }
        let annotations = claim.metadata.annotations.get_or_insert_default();
        for (name, text) in &marks.annotations {
            match text {
                Some(text) => drop(annotations.insert(name.clone(), text.clone())),
                None => drop(annotations.remove(name)),
            }
        }
        Ok(self.store(claim))
    }

    pub fn allocate(
        &mut self,
        at: &ClaimVersion,
        allocation: Option<k8s_openapi::api::resource::v1::AllocationResult>,
    ) -> Result<ResourceClaim, Failure> {
        let mut claim = self.current(at)?;
        let status = claim.status.get_or_insert_default();
        if status.allocation.is_some() && allocation.is_some() {
            return Err(Failure::Refused("status.allocation: field is immutable".to_owned()));
        }
        status.allocation = allocation;
        Ok(self.store(claim))
    }

    // What a test asks.

    pub fn claim(&self, name: &str) -> &ResourceClaim {
        &self.claims[&("ml".to_owned(), name.to_owned())]
    }

    /// Where a claim is: its node's name and the devices.
    pub fn place(&self, name: &str) -> Option<(String, Vec<String>)> {
        let claim = self.claims.get(&("ml".to_owned(), name.to_owned()))?;
        let results = results(claim);
        let (pool, _) = results.first()?;
        Some((pool.clone(), results.iter().map(|(_, device)| device.clone()).collect()))
    }

    pub fn holds(&self) -> Vec<String> {
        self.claims
            .keys()
            .filter(|(ns, name)| ns == NS && name.starts_with("hold."))
            .map(|(_, n)| n.clone())
            .collect()
    }

    /// Everything that is on its way arrives, until nothing more happens; time passes as it must, up to `limit`.
    pub fn settle(&mut self, limit: Duration) {
        let end = self.now + limit;
        loop {
            self.deliver(usize::MAX);
            while !self.answers.is_empty() {
                self.hear(0);
            }
            let next = self.round();
            if !self.writes.is_empty() {
                while !self.writes.is_empty() {
                    self.write(false);
                }
                continue;
            }
            if !self.feed.is_empty() {
                continue;
            }
            match next {
                Some(next) if next <= end => self.now = next.max(self.now + Duration::from_millis(1)),
                _ => break,
            }
        }
        self.now = self.now.max(end);
    }

    /// Who has what, as the API has it.
    fn used(&self) -> (Shares, Others<'_>) {
        let (mut shares, mut others) = (Shares::new(), Others::new());
        for (name, claim) in &self.claims {
            let hold = name.0 == NS;
            let grants = grants(claim);
            for (pool, device) in results(claim) {
                let gpu = (pool, device.clone());
                match grants.get(&device) {
                    Some(granted) => {
                        let sum = shares.entry(gpu).or_default();
                        let percent = granted.compute.map_or(0, |percent| u32::from(percent.get()));
                        *sum = (sum.0 + granted.memory.mib_ceil(), sum.1 + percent, sum.2 + granted.slots);
                    }
                    None if !hold => others.entry(gpu).or_default().push(name),
                    None => {}
                }
            }
        }
        (shares, others)
    }

    /// GPUs on which so many MiB and so much compute fit, as the API has them.
    pub fn open_for(&self, (mib, percent, blocks): (u64, u32, u32)) -> Vec<(String, String)> {
        let (shares, others) = self.used();
        // Shares of several GPUs with one daemon keep to themselves.
        let companies = self.claims.values().map(results).filter(|gpus| gpus.len() > 1 && !self.own_daemons);
        let together: BTreeSet<(String, String)> = companies.flatten().collect();
        let schedulable = |node: &String| {
            let spec = self.nodes.get(node).and_then(|node| node.spec.as_ref());
            spec.is_some_and(|spec| spec.unschedulable != Some(true))
        };
        let slices = self.slices.iter().filter(|(node, _)| schedulable(node));
        let gpus = slices.flat_map(|(node, slice)| {
            let devices = slice.spec.devices.iter().flatten();
            devices.map(|device| (node.clone(), device.name.clone()))
        });
        let fits = |gpu: &(String, String)| {
            let (memory, compute, slots) = shares.get(gpu).copied().unwrap_or_default();
            let room = memory + mib <= 80 << 10 && compute + percent <= 100 && slots + blocks <= 16;
            room && !others.contains_key(gpu) && !together.contains(gpu)
        };
        gpus.filter(fits).collect()
    }

    /// A controller that knows nothing, before an API server with the same objects.
    pub fn anew(&self, rules: Rules) -> Self {
        let mut other = Self::new(rules);
        (other.now, other.version, other.made, other.ids) = (self.now, self.version, self.made, self.ids);
        (other.claims, other.pods) = (self.claims.clone(), self.pods.clone());
        (other.nodes, other.slices) = (self.nodes.clone(), self.slices.clone());
        (other.classes, other.rules) = (self.classes.clone(), self.rules.clone());
        (other.keeps, other.own_daemons) = (self.keeps, self.own_daemons);
        (other.books, other.blind) = (self.books.clone(), self.blind.clone());
        (other.budgets, other.groups) = (self.budgets.clone(), self.groups.clone());
        other.volumes = self.volumes.clone();
        other.relist();
        other
    }

    /// What may never be, whatever happened.
    pub fn check(&self) {
        let (shares, others) = self.used();
        for (gpu, (memory, compute, slots)) in &shares {
            assert!(
                *memory <= 80 << 10 && *compute <= 100 && *slots <= 16,
                "{gpu:?}: {memory} {compute} {slots}"
            );
            assert!(!others.contains_key(gpu), "{gpu:?} has shares, and belongs to {:?}", others[gpu]);
            assert!(self.keeps || self.books.contains(gpu), "{gpu:?} has shares, and is in no book");
        }
        for (node, device) in self.blind.iter().filter(|_| !self.keeps) {
            let hold = self.claims.get(&(NS.to_owned(), format!("hold.{device}.{node}")));
            let open = hold.is_some_and(|hold| results(hold).is_empty());
            assert!(open, "{node}/{device} is in no book, and nobody can know");
        }
        let given = self.claims.values().flat_map(|claim| {
            let grants = grants(claim);
            let extent = move |gpu: &(String, String)| grants.get(&gpu.1).map(|grant| grant.extent);
            results(claim).into_iter().filter_map(move |gpu| Some((extent(&gpu)?, gpu)))
        });
        let given: Vec<(Extent, (String, String))> = given.collect();
        for (at, (extent, gpu)) in given.iter().enumerate() {
            let Extent::Mig(place) = extent else { continue };
            let meets = |(other, on): &&(Extent, (String, String))| {
                on == gpu
                    && !matches!(other, Extent::Mig(other) if !other.placement.overlaps(place.placement))
            };
            assert_eq!(given[at + 1..].iter().find(meets), None, "{gpu:?} is cut twice at {place:?}");
        }
        for (_, gpu) in given.iter().filter(|(extent, _)| *extent == Extent::Whole) {
            let grants = given.iter().filter(|(_, other)| other == gpu).count();
            assert_eq!(grants, 1, "{gpu:?} is given whole, and to others");
        }
        let companies: Vec<BTreeSet<(String, String)>> = self
            .claims
            .values()
            .filter(|claim| grants(claim).values().any(|grant| !matches!(grant.extent, Extent::Mig(_))))
            .map(|claim| results(claim).into_iter().collect())
            .collect();
        for one in companies.iter().filter(|gpus| gpus.len() > 1 && !self.own_daemons) {
            let meets = |other: &&BTreeSet<_>| *other != one && !other.is_disjoint(one);
            assert_eq!(companies.iter().find(meets), None, "meets {one:?}, and one GPU has one daemon");
        }
        for (gpu, names) in &others {
            assert!(names.len() == 1, "{gpu:?} belongs to {names:?}");
        }
        for (name, pod) in &self.pods {
            let nodes: BTreeSet<String> =
                claims_of(pod).iter().filter_map(|claim| Some(self.place(claim)?.0)).collect();
            assert!(nodes.len() <= 1, "the claims of {name:?} are on {nodes:?}");
        }
    }
}

pub fn device(node: &str, minor: u32, keeps: bool) -> Value {
    let mut device = json!({"name": format!("gpu-{minor}"),
        "attributes": {"type": {"string": "gpu"}, "uuid": {"string": format!("GPU-{node}-{minor}")},
            "productName": {"string": "NVIDIA H100 80GB HBM3"}, "isolation": {"string": "mps"},
            "grantableMemoryMiB": {"int": 81920}, "shareSlots": {"int": 16}, "processesPerSlot": {"int": 3}},
        "capacity": {"memory": {"value": "80Gi"}, "compute": {"value": "100"}, "shares": {"value": "16"}}});
    if keeps {
        device["allowMultipleAllocations"] = true.into();
    }
    device
}

/// What a GPU of whose shares each has a daemon of its own says besides.
pub fn own_daemons() -> Value {
    json!({"attributes": {"mpsDaemon": {"string": "share"}}})
}

pub fn object<K: serde::de::DeserializeOwned>(value: Value) -> K {
    serde_json::from_value(value).unwrap()
}

pub fn merge(to: &mut Value, from: &Value) {
    match (to, from) {
        (Value::Object(to), Value::Object(from)) => {
            for (key, value) in from {
                merge(to.entry(key).or_insert(Value::Null), value);
            }
        }
        (to, from) => *to = from.clone(),
    }
}

pub fn claims_of(pod: &Pod) -> Vec<String> {
    let claims = pod.spec.iter().flat_map(|spec| spec.resource_claims.iter().flatten());
    claims.filter_map(|claim| claim.resource_claim_name.clone()).collect()
}

fn share_claim(name: &str, share: &Value, count: u32) -> Value {
    let mut parameters = json!({"apiVersion": "tranche.dev/v1alpha1", "kind": "GpuShare"});
    parameters.as_object_mut().unwrap().extend(share.as_object().unwrap().clone());
    json!({"metadata": {"name": name, "namespace": "ml"}, "spec": {"devices": {
        "requests": [{"name": "gpu", "exactly": {"deviceClassName": SHARED_CLASS, "count": count}}],
        "config": [{"opaque": {"driver": DRIVER, "parameters": parameters}}]}}})
}

/// Node and device of each result.
pub fn results(claim: &ResourceClaim) -> Vec<(String, String)> {
    let allocation = claim.status.as_ref().and_then(|status| status.allocation.as_ref());
    let results = allocation.iter().flat_map(|one| &one.devices).flat_map(|one| one.results.iter().flatten());
    results.map(|one| (one.pool.trim_end_matches("/shares").to_owned(), one.device.clone())).collect()
}

/// What a claim has in the scheduler's books.
fn counted(claim: &ResourceClaim) -> Vec<(String, String)> {
    let allocation = claim.status.as_ref().and_then(|status| status.allocation.as_ref());
    let results = allocation.iter().flat_map(|one| &one.devices).flat_map(|one| one.results.iter().flatten());
    let published = results.filter(|one| !one.pool.ends_with("/shares"));
    published.map(|one| (one.pool.clone(), one.device.clone())).collect()
}

pub fn grants(claim: &ResourceClaim) -> BTreeMap<String, crate::params::GrantedDevice> {
    let allocation = claim.status.as_ref().and_then(|status| status.allocation.as_ref());
    let configs = allocation.iter().flat_map(|one| &one.devices).flat_map(|one| one.config.iter().flatten());
    let opaque = configs.filter(|one| one.source == "FromClass").filter_map(|one| one.opaque.as_ref());
    let grants = opaque.filter_map(|opaque| match decode(&opaque.parameters.0) {
        Ok(Params::Grant(grant)) => Some(grant.devices),
        _ => None,
    });
    grants.flatten().map(|device| (device.device.to_string(), device)).collect()
}
