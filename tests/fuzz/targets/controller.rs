//! Objects of all kinds, one after another, before the controller's core, and an API server that does its writes.
//!
//! An input is a script in JSON: `steps`, each of them one object as somebody stored it (`{"claim": {...}}`, and so
//! on), `{"gone": {"kind", "namespace", "name"}}`, `{"unreadable": ...}`, `{"anew": KIND}`, `{"wait": MILLIS}` or
//! `{"fail": WORD}` for the writes after it. With `"tenant": true` the API server's rules for people with the role
//! `edit` in one namespace apply: then, too, another namespace's pod must get its share if any GPU is free, and no GPU
//! is given twice. After each step the allocator's own audit must find nothing.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use fastrand::Rng;
use k8s_openapi::Metadata;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{AllocationResult, ResourceClaim};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tranche::allocate::{AuditFinding, audit};
use tranche::cluster::allocation::{ClaimVersion, Marks};
use tranche::cluster::eviction::Eviction;
use tranche::cluster::feed::{Change, WatchEvent};
use tranche::cluster::pod_groups::PodGroupApi;
use tranche::controller::config::Rules;
use tranche::controller::core::Core;
use tranche::controller::explain::{Listing, Subject, explain};
use tranche::controller::holds::ReleaseStep;
use tranche::controller::queue::Patience;
use tranche::controller::view::claim::{HOLD_DEVICE, HOLD_NODE, LOOKED};
use tranche::controller::write::{Failure, Write, WriteOutcome};
use tranche::model::names::{DRIVER, HOLD_LABEL};
use tranche::params::{self, Params};

use super::claims::{FIELDS, claim, granted, parameters, slice};
use super::jsons;
use crate::driver::json::change;
use crate::driver::mutate::Pool;
use crate::driver::{Form, Limits, Target};

const NS: &str = "tranche-system";
const EVIL: &str = "evil";
const STEPS_MAX: usize = 64;
/// Nine kinds, and PodGroups of each API.
const KINDS: u64 = 10 + PodGroupApi::ALL.len() as u64;
/// Rounds in which everything is to come to rest.
const ROUNDS_MAX: usize = 400;

type Name = (String, String);

pub fn targets() -> Vec<Target> {
    let limits = Limits { length: 64 << 10, millis: 4000, bytes: 32 << 20, per_byte: 1000 };
    vec![
        Target {
            name: "controller",
            seeds: || jsons(&scripts()),
            words: FIELDS,
            form: Form::MadeJson(|rng, pool| script(false, rng, pool)),
            limits,
            run: run_script,
        },
        Target {
            name: "unreadable-objects",
            seeds: || jsons(&scripts()),
            words: FIELDS,
            form: Form::MadeJson(|rng, pool| script(true, rng, pool)),
            limits,
            run: run_script,
        },
    ]
}

fn pod() -> Value {
    json!({"metadata": {"name": "p", "namespace": EVIL, "uid": "p-1", "creationTimestamp": "2026-01-01T00:00:00Z"}, "spec": {"containers": [{"name": "main",
        "resources": {"requests": {"cpu": "1", "memory": "1Gi"}}}], "priority": 0, "nodeSelector": {},
        "tolerations": [{"operator": "Exists"}], "affinity": {"nodeAffinity":
            {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchExpressions": [
                {"key": "zone", "operator": "NotIn", "values": ["a"]}]}]}}},
        "resourceClaims": [{"name": "gpu", "resourceClaimName": "a"}]}, "status": {"phase": "Pending"}})
}

fn promised() -> Value {
    let share = json!({"share": parameters()[1], "count": 1}).to_string();
    json!({"metadata": {"name": "k", "namespace": EVIL, "annotations": {"tranche.dev/gpu-share": share,
            "tranche.dev/gang": "g"}},
        "spec": {"containers": [{"name": "main"}],
            "resourceClaims": [{"name": "gpu-share", "resourceClaimName": "k-gpu-share"}]}})
}

fn whole() -> Value {
    let mut claim = claim();
    claim["metadata"]["name"] = "w".into();
    claim["spec"]["devices"] = json!({"requests": [{"name": "gpu",
        "exactly": {"deviceClassName": "gpu.nvidia.com", "count": 1}}]});
    claim
}

fn node(name: &str) -> Value {
    json!({"metadata": {"name": name, "uid": format!("n-{name}"), "labels": {"zone": "b"}},
        "spec": {"taints": [{"key": "odd", "effect": "PreferNoSchedule"}]},
        "status": {"allocatable": {"cpu": "32", "memory": "256Gi", "pods": "110"}}})
}

fn class() -> Value {
    let gpu = "device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == 'gpu'";
    json!({"metadata": {"name": "gpu.nvidia.com", "uid": "c-1"},
        "spec": {"extendedResourceName": "nvidia.com/gpu", "selectors": [{"cel": {"expression": gpu}}]}})
}

fn rule() -> Value {
    json!({"metadata": {"name": "r", "uid": "r-1"}, "spec": {"deviceSelector": {"driver": DRIVER, "pool": "node-1",
        "device": "gpu-0"}, "taint": {"key": "k", "effect": "NoSchedule"}}})
}

fn grouped() -> Value {
    let mut pod = pod();
    pod["metadata"]["name"] = "m".into();
    pod["metadata"]["annotations"] =
        json!({"scheduling.k8s.io/group-name": "g", "volcano.sh/task-spec": "t", "pod-group-name": "g"});
    pod["spec"]["schedulerName"] = "volcano".into();
    pod
}

fn group() -> Value {
    json!({"metadata": {"name": "g", "namespace": EVIL, "uid": "g-1"},
        "spec": {"minMember": 1, "minTaskMember": {"t": 1}, "minSubGroup": 1,
            "subGroups": [{"name": "t", "minMember": 1, "minSubGroup": 1, "parent": "u"}]},
        "status": {"phase": "Pending", "succeeded": 0, "schedulingConditions": [{"status": "True", "reasons": [{"reason": "OverLimit",
            "message": "x"}]}]}})
}

/// A namespace whose pods get claims for KAI's annotations, as an administrator has said, and what it may have.
fn opted_in() -> Value {
    json!({"metadata": {"name": EVIL, "uid": "ns-1", "labels": {"tranche.dev/kai-annotations": "enabled"},
        "annotations": {"tranche.dev/max-share-gpus": "3", "tranche.dev/max-share-memory": "20Gi"}}})
}

fn budget() -> Value {
    json!({"metadata": {"name": "pdb", "namespace": EVIL, "uid": "pdb-1", "generation": 1},
        "spec": {"minAvailable": 1, "maxUnavailable": "10%", "selector": {"matchLabels": {"app": "p"},
            "matchExpressions": [{"key": "app", "operator": "In", "values": ["p"]}]},
            "unhealthyPodEvictionPolicy": "AlwaysAllow"},
        "status": {"disruptionsAllowed": 0, "currentHealthy": 1, "desiredHealthy": 1, "expectedPods": 1,
            "observedGeneration": 1, "disruptedPods": {"p": "2026-01-01T00:00:00Z"}}})
}

/// KAI's binder is to give a pod's claim a device.
fn bind_request() -> Value {
    let results = json!([{"driver": DRIVER, "pool": "node-0", "device": "gpu-0", "request": "gpu"}]);
    json!({"metadata": {"name": "p", "namespace": EVIL, "uid": "b-1"}, "spec": {"podName": "p",
            "resourceClaimAllocations": [{"name": "gpu", "allocation": {"devices": {"results": results}}}]},
        "status": {"phase": "Pending"}})
}

/// A PodGroup of Kubernetes itself.
fn gang() -> Value {
    json!({"metadata": {"name": "g", "namespace": EVIL, "uid": "kg-1"},
        "spec": {"schedulingPolicy": {"gang": {"minCount": 2}}, "priority": 5,
            "podGroupTemplateRef": {"workload": {"workloadName": "w", "podGroupTemplateName": "t"}}},
        "status": {"conditions": [{"type": "PodGroupScheduled", "status": "False", "reason": "x"}]}})
}

fn in_gang() -> Value {
    let mut pod = pod();
    pod["metadata"]["name"] = "n".into();
    pod["metadata"]["labels"] = json!({"app": "p"});
    pod["spec"]["schedulingGroup"] = json!({"podGroupName": "g"});
    pod["spec"]["workloadRef"] = json!({"name": "w", "podGroup": "g"});
    pod
}

/// What a step may begin from.
fn templates() -> Vec<Value> {
    let hold = json!({"claim": {"metadata": {"name": "hold.gpu-0.node-0", "namespace": NS, "uid": "h-1",
        "labels": {HOLD_LABEL: "true"}, "annotations": {HOLD_NODE: "node-0", HOLD_DEVICE: "gpu-0"}}, "spec": {}}});
    vec![
        json!({"claim": claim()}),
        json!({"claim": claim()}),
        json!({"claim": granted()}),
        json!({"claim": whole()}),
        json!({"pod": pod()}),
        json!({"pod": pod()}),
        json!({"pod": promised()}),
        json!({"pod": grouped()}),
        json!({"volcano": group()}),
        json!({"kai": group()}),
        json!({"kubernetes": gang()}),
        json!({"kubernetes-alpha": gang()}),
        json!({"pod": in_gang()}),
        json!({"namespace": opted_in()}),
        json!({"namespace": opted_in()}),
        json!({"budget": budget()}),
        json!({"bind": bind_request()}),
        json!({"node": node("node-0")}),
        json!({"slice": slice()}),
        json!({"class": class()}),
        json!({"rule": rule()}),
        hold,
        json!({"gone": {"kind": "claim", "namespace": EVIL, "name": "a"}}),
        json!({"gone": {"kind": "pod", "namespace": EVIL, "name": "p"}}),
        json!({"gone": {"kind": "node", "name": "node-0"}}),
        json!({"gone": {"kind": "namespace", "name": EVIL}}),
        json!({"gone": {"kind": "bind", "namespace": EVIL, "name": "p"}}),
        json!({"gone": {"kind": "budget", "namespace": EVIL, "name": "pdb"}}),
        json!({"anew": 2}),
        json!({"wait": 3000}),
        json!({"fail": "silent"}),
    ]
}

fn scripts() -> Vec<Value> {
    let both = json!([{"claim": claim()}, {"pod": pod()}, {"wait": 3000}]);
    vec![
        json!({"tenant": true, "steps": both}),
        json!({"tenant": false, "steps": both}),
        json!({"tenant": true, "steps": [{"pod": promised()}, {"claim": whole()}, {"wait": 40000}]}),
        json!({"tenant": true, "opted-in": true, "steps": [{"pod": promised()}, {"wait": 3000}, {"budget": budget()}]}),
        json!({"tenant": false, "opted-in": true, "steps": [{"kubernetes": gang()}, {"pod": in_gang()}, {"bind": bind_request()},
            {"pod": promised()}, {"gone": {"kind": "pod", "namespace": EVIL, "name": "k"}}, {"wait": 3000}]}),
        json!({"tenant": false, "steps": templates()}),
        json!({"tenant": true, "steps": templates()}),
    ]
}

fn script(unreadable: bool, rng: &mut Rng, pool: &Pool) -> Value {
    let mut templates = templates();
    if unreadable {
        let meta = json!({"name": "odd", "namespace": EVIL, "uid": "o-1"});
        templates.extend(vec![json!({"unreadable": meta}); templates.len() / 2]);
    }
    let mut steps: Vec<Value> =
        (0..rng.usize(1..10)).filter_map(|_| rng.choice(&templates).cloned()).collect();
    for step in &mut steps {
        let renamed = rng.choice(["a", "b", "p", "q", "k"]).unwrap_or("a");
        if let Some(meta) =
            step.as_object_mut().and_then(|step| step.values_mut().next()?.get_mut("metadata"))
            && rng.bool()
        {
            meta["name"] = renamed.into();
        }
        for _ in 0..rng.usize(0..5) {
            change(step, pool, rng);
        }
    }
    let policy = rng.choice(["pack", "spread", "fragmentation"]);
    json!({"tenant": rng.bool(), "opted-in": rng.bool(), "impatient": rng.u8(0..4) == 0, "old": rng.u8(0..4) == 0, "policy": policy, "steps": steps})
}

fn run_script(input: &[u8]) {
    let Ok(script) = serde_json::from_slice::<Value>(input) else { return };
    let is = |field: &str| script[field] == true;
    let mut rules = Rules::default();
    if !is("impatient") {
        rules.patience = Patience { passes: u32::MAX, time: Duration::MAX, ..Patience::default() };
    }
    if let Some(policy) = script["policy"].as_str().and_then(|name| name.parse().ok()) {
        rules.policy = policy;
    }
    let mut api = Api::new(Core::new(rules, NS), is("tenant"), !is("old"));
    if is("opted-in") {
        api.store(opted_in(), Change::Namespace);
        api.deliver();
    }
    for step in script["steps"].as_array().into_iter().flatten().take(STEPS_MAX) {
        let Some((what, object)) = step.as_object().and_then(|step| step.iter().next()) else { continue };
        api.step(what, object);
        api.round();
        api.audit();
    }
    api.settle(Duration::from_secs(60));
    api.audit();
    if api.tenant {
        api.check();
        // While somebody waits for long, what is kept for him may be all that is free.
        if !is("impatient") {
            api.another_namespace_is_served();
        }
    }
    let claims = api.core.view.claims().map(|claim| Subject::Claim(claim.key));
    let pods = api.core.view.pods().map(|pod| Subject::Limits(pod.at.uid.clone()));
    let subjects: Vec<_> = claims.chain(pods).collect();
    for claim in api.claims.values() {
        api.listing.see(&Change::Claim(WatchEvent::Listed(Box::new(claim.clone()))));
    }
    for pod in api.pods.values() {
        api.listing.see(&Change::Pod(WatchEvent::Listed(Box::new(pod.clone()))));
    }
    let _ = explain(&mut api.core, &api.listing, &subjects, jiff::Timestamp::UNIX_EPOCH);
}

/// An API server of little understanding, and the core before it.
struct Api {
    core: Core,
    /// What explanations need beside it, but for claims and pods.
    listing: Listing,
    now: Duration,
    version: u64,
    made: u64,
    /// Only a person with the role `edit` in one namespace is at work.
    tenant: bool,
    claims: BTreeMap<Name, ResourceClaim>,
    pods: BTreeMap<Name, Pod>,
    feed: VecDeque<Change>,
    fail: Option<Failure>,
    /// Claims that had an allocation once.
    placed: BTreeSet<Name>,
    /// A step brought an allocation or a slice.
    forged: bool,
}

impl Api {
    /// `keeps`: the API server knows shares of devices.
    fn new(core: Core, tenant: bool, keeps: bool) -> Self {
        let mut api = Self {
            core,
            listing: Listing::new(EVIL),
            now: Duration::ZERO,
            version: 1,
            made: 0,
            tenant,
            claims: BTreeMap::new(),
            pods: BTreeMap::new(),
            feed: VecDeque::new(),
            fail: None,
            placed: BTreeSet::new(),
            forged: false,
        };
        (0..KINDS).for_each(|kind| api.list(kind, false));
        for name in ["node-0", "node-1"] {
            api.store(node(name), Change::Node);
            let mut slice = slice();
            slice["metadata"] = json!({"name": format!("{name}-slice"), "uid": format!("s-{name}")});
            slice["spec"]["nodeName"] = name.into();
            slice["spec"]["pool"]["name"] = name.into();
            for device in slice["spec"]["devices"].as_array_mut().into_iter().flatten() {
                device["attributes"]["uuid"]["string"] =
                    format!("GPU-{name}-{}", device["name"].as_str().unwrap_or_default()).into();
                if !keeps {
                    device["allowMultipleAllocations"] = Value::Null;
                }
            }
            api.store(slice, Change::Slice);
        }
        api.store(class(), Change::Class);
        (0..KINDS).for_each(|kind| api.list(kind, true));
        api.deliver();
        api
    }

    /// The list of one kind begins, or is complete.
    fn list(&mut self, kind: u64, complete: bool) {
        fn mark<K>(complete: bool) -> WatchEvent<K> {
            if complete { WatchEvent::Complete } else { WatchEvent::Anew }
        }
        self.feed.push_back(match kind {
            0 => Change::Pod(mark(complete)),
            1 => Change::Node(mark(complete)),
            2 => Change::Claim(mark(complete)),
            3 => Change::Slice(mark(complete)),
            4 => Change::Class(mark(complete)),
            5 => Change::TaintRule(mark(complete)),
            6 => Change::Namespace(mark(complete)),
            7 => Change::Budget(mark(complete)),
            8 => Change::BindRequest(mark(complete)),
            9 => Change::Volume(mark(complete)),
            _ => {
                let api = usize::try_from(kind - 10).ok().and_then(|nth| PodGroupApi::ALL.get(nth).copied());
                Change::PodGroup(api.unwrap_or(PodGroupApi::Kai), mark(complete))
            }
        });
    }

    fn step(&mut self, what: &str, object: &Value) {
        let text = |field: &str| object[field].as_str().unwrap_or_default().to_owned();
        self.forged |= !self.tenant
            && (matches!(what, "slice" | "bind") || object.pointer("/status/allocation").is_some());
        match what {
            "claim" => self.store_claim(object.clone()),
            "pod" => self.store_pod(object.clone()),
            "volcano" => {
                self.store_group(object.clone(), |seen| Change::PodGroup(PodGroupApi::Volcano, seen))
            }
            "kai" => self.store_group(object.clone(), |seen| Change::PodGroup(PodGroupApi::Kai, seen)),
            "kubernetes" => self
                .store_group(object.clone(), |seen| Change::PodGroup(PodGroupApi::KubernetesV1Beta1, seen)),
            "kubernetes-alpha" => self
                .store_group(object.clone(), |seen| Change::PodGroup(PodGroupApi::KubernetesV1Alpha3, seen)),
            "budget" => self.store_group(object.clone(), Change::Budget),
            "gone" => self.gone(&text("kind"), (text("namespace"), text("name"))),
            "wait" => self.now += Duration::from_millis(object.as_u64().unwrap_or_default().min(600_000)),
            "unreadable" => self.unreadable(object.clone()),
            "fail" => {
                self.fail = Some(match object.as_str() {
                    Some("silent") => Failure::Silent("no answer".to_owned()),
                    Some("gone") => Failure::Gone,
                    Some("busy") => Failure::Busy("too many requests".to_owned()),
                    Some("refused") => Failure::Refused("exceeded quota".to_owned()),
                    _ => Failure::Conflict,
                });
            }
            "anew" if !self.tenant || object == 2 => self.anew(),
            _ if self.tenant => {}
            "node" => self.store(object.clone(), Change::Node),
            "slice" => self.store(object.clone(), Change::Slice),
            "class" => self.store(object.clone(), Change::Class),
            "rule" => self.store(object.clone(), Change::TaintRule),
            "namespace" => self.store(object.clone(), Change::Namespace),
            "bind" => self.store(object.clone(), Change::BindRequest),
            _ => {}
        }
    }

    /// Stored as it is, or told as what cannot be read.
    fn store<K: DeserializeOwned + Default + Metadata<Ty = ObjectMeta>>(
        &mut self,
        object: Value,
        wrap: fn(WatchEvent<K>) -> Change,
    ) {
        let meta = serde_json::from_value::<ObjectMeta>(object["metadata"].clone());
        match (serde_json::from_value::<K>(object), meta) {
            (Ok(object), _) => self.feed.push_back(wrap(WatchEvent::Stored(Box::new(object)))),
            (Err(error), Ok(meta)) => {
                let mut rest = Box::new(K::default());
                *rest.metadata_mut() = meta;
                self.feed.push_back(wrap(WatchEvent::Unreadable {
                    rest,
                    listed: false,
                    problem: error.to_string(),
                }));
            }
            _ => self.feed.push_back(wrap(WatchEvent::Interrupted {
                problem: "no object".to_owned(),
                is_forbidden: false,
            })),
        }
    }

    /// Of the tenant's own namespace, if it is one.
    fn store_group<K: DeserializeOwned + Default + Metadata<Ty = ObjectMeta>>(
        &mut self,
        mut object: Value,
        wrap: fn(WatchEvent<K>) -> Change,
    ) {
        if self.tenant
            && let Some(meta) = object.get_mut("metadata").and_then(Value::as_object_mut)
        {
            meta.insert("namespace".to_owned(), EVIL.into());
        }
        self.store(object, wrap);
    }

    /// What the API server does to the metadata of whatever a tenant stores. False: it does not store this.
    fn stamp(&mut self, meta: &mut ObjectMeta, uid: Option<String>) -> bool {
        self.version += 1;
        if self.tenant {
            self.made += 1;
            meta.namespace = Some(EVIL.to_owned());
            meta.uid = Some(uid.unwrap_or_else(|| format!("uid-{}", self.made)));
            meta.deletion_timestamp = None;
            meta.resource_version = Some(self.version.to_string());
        }
        !self.tenant || meta.name.as_ref().is_some_and(|name| !name.is_empty() && name.len() < 254)
    }

    fn store_claim(&mut self, object: Value) {
        let mut claim: ResourceClaim = match serde_json::from_value(object.clone()) {
            Ok(claim) => claim,
            Err(_) if self.tenant => return,
            Err(_) => return self.store::<ResourceClaim>(object, Change::Claim),
        };
        let name = named(&claim.metadata);
        let known = self.claims.get(&if self.tenant { (EVIL.to_owned(), name.1.clone()) } else { name });
        if self.tenant {
            // Nobody but controllers writes the status, and what is asked for never changes.
            claim.status = known.and_then(|known| known.status.clone());
            claim.spec = known.map_or(claim.spec, |known| known.spec.clone());
        }
        let uid = known.and_then(|known| known.metadata.uid.clone());
        if self.stamp(&mut claim.metadata, uid) {
            self.put(claim);
        }
    }

    fn put(&mut self, claim: ResourceClaim) -> ResourceClaim {
        let name = named(&claim.metadata);
        if claim.status.as_ref().is_some_and(|status| status.allocation.is_some()) {
            self.placed.insert(name.clone());
        }
        self.claims.insert(name, claim.clone());
        self.feed.push_back(Change::Claim(WatchEvent::Stored(Box::new(claim.clone()))));
        claim
    }

    fn store_pod(&mut self, object: Value) {
        let mut pod: Pod = match serde_json::from_value(object.clone()) {
            Ok(pod) => pod,
            Err(_) if self.tenant => return,
            Err(_) => return self.store::<Pod>(object, Change::Pod),
        };
        let known = self.pods.get(&(EVIL.to_owned(), named(&pod.metadata).1));
        let uid = known.and_then(|known| known.metadata.uid.clone());
        if self.tenant {
            pod.status = None;
        }
        if self.stamp(&mut pod.metadata, uid) {
            self.pods.insert(named(&pod.metadata), pod.clone());
            self.feed.push_back(Change::Pod(WatchEvent::Stored(Box::new(pod))));
        }
    }

    fn unreadable(&mut self, meta: Value) {
        let Ok(mut meta) = serde_json::from_value::<ObjectMeta>(meta) else { return };
        if self.stamp(&mut meta, None) {
            let problem = "lone surrogate".to_owned();
            self.feed.push_back(Change::Claim(WatchEvent::Unreadable {
                rest: Box::new(ResourceClaim { metadata: meta, ..ResourceClaim::default() }),
                listed: false,
                problem,
            }));
        }
    }

    fn gone(&mut self, kind: &str, name: Name) {
        let name = if self.tenant { (EVIL.to_owned(), name.1) } else { name };
        let meta = ObjectMeta {
            name: Some(name.1.clone()),
            namespace: Some(name.0.clone()),
            ..ObjectMeta::default()
        };
        let meta = Box::new(meta);
        match kind {
            "claim" => {
                let meta = self.claims.remove(&name).map_or(meta, |claim| Box::new(claim.metadata));
                self.feed.push_back(Change::Claim(WatchEvent::Deleted(meta)));
            }
            "pod" => {
                let meta = self.pods.remove(&name).map_or(meta, |pod| Box::new(pod.metadata));
                self.feed.push_back(Change::Pod(WatchEvent::Deleted(meta)));
            }
            "budget" => self.feed.push_back(Change::Budget(WatchEvent::Deleted(meta))),
            _ if self.tenant => {}
            "slice" => self.feed.push_back(Change::Slice(WatchEvent::Deleted(meta))),
            "class" => self.feed.push_back(Change::Class(WatchEvent::Deleted(meta))),
            "namespace" => self.feed.push_back(Change::Namespace(WatchEvent::Deleted(meta))),
            "bind" => self.feed.push_back(Change::BindRequest(WatchEvent::Deleted(meta))),
            _ => self.feed.push_back(Change::Node(WatchEvent::Deleted(meta))),
        }
    }

    /// The watch of claims begins anew.
    fn anew(&mut self) {
        self.list(2, false);
        let all =
            self.claims.values().map(|claim| Change::Claim(WatchEvent::Listed(Box::new(claim.clone()))));
        self.feed.extend(all);
        self.list(2, true);
    }

    fn deliver(&mut self) {
        while let Some(change) = self.feed.pop_front() {
            if !matches!(change, Change::Claim(_) | Change::Pod(_)) {
                self.listing.see(&change);
            }
            self.core.apply(change, self.now);
        }
    }

    /// Everything arrives, one round is decided, and its writes are done. What they bring is for the next round:
    /// when that is to be, at the latest.
    fn round(&mut self) -> Option<Duration> {
        self.deliver();
        let made = &mut self.made;
        let round = self.core.round(self.now, &mut || {
            *made += 1;
            format!("00000000-0000-4000-8000-{made:012}")
        });
        let again = (!round.writes.is_empty()).then_some(self.now);
        for write in round.writes {
            let outcome = self.perform(write);
            self.deliver();
            self.core.done(outcome, self.now);
        }
        again.or(round.next)
    }

    fn settle(&mut self, limit: Duration) {
        let end = self.now + limit;
        for _ in 0..ROUNDS_MAX {
            match self.round() {
                Some(next) if next <= end => self.now = next.max(self.now + Duration::from_millis(10)),
                _ => break,
            }
        }
        self.now = self.now.max(end);
    }

    // The writes.

    fn perform(&mut self, write: Write) -> WriteOutcome {
        let boxed = |done: Result<ResourceClaim, Failure>| done.map(Box::new);
        match write {
            Write::Hold(gpu, _) => {
                let made = self.hold(gpu.node.as_str(), gpu.device.as_str());
                WriteOutcome::Held(gpu, boxed(made))
            }
            Write::WatchBarrier(at) => {
                let looked = vec![(LOOKED.to_owned(), Some(at.resource_version.clone()))];
                let done = self.mark(&at, &Marks { finalizers: None, annotations: looked });
                WriteOutcome::BarrierWritten(at.claim.uid, boxed(done))
            }
            Write::Release(gpu, step) => {
                let uid = step.at().claim.uid.clone();
                let done = match step {
                    ReleaseStep::Clear(at) => self.allocate(&at, None).map(drop),
                    ReleaseStep::Restore(at) => {
                        let made = of_hold(gpu.node.as_str(), gpu.device.as_str());
                        self.allocate(&at, Some(made)).map(drop)
                    }
                    ReleaseStep::Delete(at) => self.current(&at).map(|found| {
                        self.claims.remove(&named(&found.metadata));
                        self.feed.push_back(Change::Claim(WatchEvent::Deleted(Box::new(found.metadata))));
                    }),
                };
                WriteOutcome::Released(gpu, uid, done)
            }
            Write::Allocate { claim, at, marks, allocation } => {
                let done = self.mark(&at, &marks).and_then(|marked| {
                    let version = marked.metadata.resource_version.unwrap_or_default();
                    self.allocate(
                        &ClaimVersion { resource_version: version, ..at.clone() },
                        Some(*allocation),
                    )
                });
                WriteOutcome::Allocated(claim, boxed(done))
            }
            Write::Clear(claim, at) => {
                let done = self.allocate(&at, None);
                WriteOutcome::Cleared(claim, boxed(done))
            }
            Write::Mark(claim, at, marks) => {
                let done = self.mark(&at, &marks);
                WriteOutcome::Marked(claim, boxed(done))
            }
            // The pod stays: a budget.
            Write::Move(pod, _) => {
                WriteOutcome::Moved(pod.uid, Err(Failure::Refused("a budget protects it".to_owned())))
            }
            Write::Create(claim, object, allocation) => {
                let done = self.create(*object, allocation.map(|one| *one));
                WriteOutcome::Created(claim, boxed(done))
            }
            // It takes its time to end, and may never.
            Write::Evict(pod) => {
                let done = self.admit().map(|()| Eviction::Evicted);
                WriteOutcome::Evicted(pod, done)
            }
        }
    }

    /// Whether the next write is done at all.
    fn admit(&mut self) -> Result<(), Failure> {
        self.fail.take().map_or(Ok(()), Err)
    }

    fn create(
        &mut self,
        mut claim: ResourceClaim,
        allocation: Option<AllocationResult>,
    ) -> Result<ResourceClaim, Failure> {
        self.admit()?;
        if self.claims.contains_key(&named(&claim.metadata)) {
            return Err(Failure::Conflict);
        }
        self.made += 1;
        self.version += 1;
        claim.metadata.uid = Some(format!("uid-{}", self.made));
        claim.metadata.resource_version = Some(self.version.to_string());
        claim.status.get_or_insert_default().allocation = allocation;
        Ok(self.put(claim))
    }

    fn hold(&mut self, node: &str, device: &str) -> Result<ResourceClaim, Failure> {
        let claim = json!({"metadata": {"name": format!("hold.{device}.{node}"), "namespace": NS,
                "labels": {HOLD_LABEL: "true"}, "annotations": {HOLD_NODE: node, HOLD_DEVICE: device}},
            "spec": {"devices": {"requests": [
                {"name": "gpu", "exactly": {"deviceClassName": "gpu.nvidia.com", "count": 1}}]}}});
        self.create(serde_json::from_value(claim).unwrap(), Some(of_hold(node, device)))
    }

    fn current(&mut self, at: &ClaimVersion) -> Result<ResourceClaim, Failure> {
        self.admit()?;
        let name = (at.claim.namespace.clone(), at.claim.name.clone());
        let found = self.claims.get(&name).ok_or(Failure::Gone)?;
        let same = found.metadata.resource_version.as_deref().unwrap_or_default() == at.resource_version
            && found.metadata.uid.as_deref().unwrap_or_default() == at.claim.uid.as_str();
        if same { Ok(found.clone()) } else { Err(Failure::Conflict) }
    }

    fn changed(&mut self, mut claim: ResourceClaim) -> ResourceClaim {
        self.version += 1;
        claim.metadata.resource_version = Some(self.version.to_string());
        self.put(claim)
    }

    fn mark(&mut self, at: &ClaimVersion, marks: &Marks) -> Result<ResourceClaim, Failure> {
        let mut claim = self.current(at)?;
        if let Some(finalizers) = &marks.finalizers {
            claim.metadata.finalizers = Some(finalizers.clone());
        }
        let annotations = claim.metadata.annotations.get_or_insert_default();
        for (name, text) in &marks.annotations {
            match text {
                Some(text) => drop(annotations.insert(name.clone(), text.clone())),
                None => drop(annotations.remove(name)),
            }
        }
        Ok(self.changed(claim))
    }

    fn allocate(
        &mut self,
        at: &ClaimVersion,
        allocation: Option<AllocationResult>,
    ) -> Result<ResourceClaim, Failure> {
        let mut claim = self.current(at)?;
        let status = claim.status.get_or_insert_default();
        if status.allocation.is_some() && allocation.is_some() {
            return Err(Failure::Refused("status.allocation: field is immutable".to_owned()));
        }
        status.allocation = allocation;
        Ok(self.changed(claim))
    }

    // What must hold.

    /// Nothing is planned or granted beyond what there is, and the sums are right. Where a script has brought an
    /// allocation or a slice, only the sums are looked at: what it brought may be more than there is.
    fn audit(&self) {
        let forged = |finding: &AuditFinding| self.forged && !matches!(finding, AuditFinding::Count { .. });
        let found: Vec<_> =
            audit(&self.core.capacity.index).into_iter().filter(|finding| !forged(finding)).collect();
        assert!(found.is_empty(), "{found:?}");
    }

    /// No GPU is given twice, or beyond what it has.
    fn check(&self) {
        let mut used = BTreeMap::<Name, (u128, u128, BTreeSet<&Name>)>::new();
        for (name, claim) in self.claims.iter().filter(|(name, _)| name.0 != NS) {
            let grants = grants(claim);
            for gpu in gpus(claim) {
                let (memory, slots, whole) = used.entry(gpu.clone()).or_default();
                match grants.get(&gpu.1) {
                    Some(granted) => {
                        *memory += u128::from(granted.memory.mib_ceil());
                        *slots += u128::from(granted.slots);
                    }
                    None => drop(whole.insert(name)),
                }
            }
        }
        for (gpu, (memory, slots, whole)) in used {
            assert!(memory <= 80 << 10 && slots <= 16, "{gpu:?} has given {memory} MiB and {slots} slots");
            assert!(
                whole.is_empty(),
                "{gpu:?} was given whole to {whole:?}, which is not for this controller to do"
            );
        }
    }

    /// Somebody in another namespace asks for little, and gets it where there is a GPU that nobody has.
    fn another_namespace_is_served(&mut self) {
        let (tenant, name) =
            (std::mem::replace(&mut self.tenant, false), ("ml".to_owned(), "share".to_owned()));
        let mut small = claim();
        small["metadata"] =
            json!({"name": name.1, "namespace": name.0, "uid": "ml-c", "resourceVersion": "1"});
        small["spec"]["devices"]["requests"] =
            json!([{"name": "gpu", "exactly": {"deviceClassName": "shared.gpu.nvidia.com", "count": 1}}]);
        small["spec"]["devices"]["constraints"] = Value::Null;
        small["spec"]["devices"]["config"][0]["opaque"]["parameters"] =
            json!({"apiVersion": "tranche.dev/v1alpha1", "kind": "GpuShare", "memory": "1Gi"});
        self.store_claim(small);
        self.store_pod(json!({"metadata": {"name": "pod", "namespace": "ml", "uid": "ml-p"}, "spec": {
            "containers": [{"name": "main"}], "resourceClaims": [{"name": "gpu", "resourceClaimName": name.1}]},
            "status": {"phase": "Pending"}}));
        self.tenant = tenant;
        self.settle(Duration::from_secs(120));
        self.audit();
        let used: BTreeSet<Name> =
            self.claims.iter().filter(|(name, _)| name.0 != NS).flat_map(|(_, claim)| gpus(claim)).collect();
        let all = ["node-0", "node-1"].into_iter().flat_map(|node| ["gpu-0", "gpu-1"].map(|gpu| (node, gpu)));
        let free: Vec<_> =
            all.filter(|(node, gpu)| !used.contains(&((*node).to_owned(), (*gpu).to_owned()))).collect();
        if !free.is_empty() && !self.placed.contains(&name) {
            let claims: Vec<_> =
                self.core.view.claim_key(&"ml-c".into()).into_iter().map(Subject::Claim).collect();
            let why = explain(&mut self.core, &self.listing, &claims, jiff::Timestamp::UNIX_EPOCH);
            panic!(
                "a share of another namespace waits beside {free:?}: {:?}",
                why.first().map(|one| &one.answer)
            );
        }
    }
}

fn named(meta: &ObjectMeta) -> Name {
    (meta.namespace.clone().unwrap_or_default(), meta.name.clone().unwrap_or_default())
}

fn of_hold(node: &str, device: &str) -> AllocationResult {
    let allocation = json!({"devices": {"results": [
            {"driver": DRIVER, "pool": node, "device": device, "request": "gpu"}]},
        "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [
            {"key": "metadata.name", "operator": "In", "values": [node]}]}]}});
    serde_json::from_value(allocation).unwrap()
}

/// Node and device of each result.
fn gpus(claim: &ResourceClaim) -> Vec<Name> {
    let allocation = claim.status.as_ref().and_then(|status| status.allocation.as_ref());
    let results = allocation.iter().flat_map(|one| &one.devices).flat_map(|one| one.results.iter().flatten());
    results.map(|one| (one.pool.trim_end_matches("/shares").to_owned(), one.device.clone())).collect()
}

fn grants(claim: &ResourceClaim) -> BTreeMap<String, params::GrantedDevice> {
    let allocation = claim.status.as_ref().and_then(|status| status.allocation.as_ref());
    let configs = allocation.iter().flat_map(|one| &one.devices).flat_map(|one| one.config.iter().flatten());
    let opaque = configs.filter(|one| one.source == "FromClass").filter_map(|one| one.opaque.as_ref());
    let devices = opaque.filter_map(|opaque| match params::decode(&opaque.parameters.0) {
        Ok(Params::Grant(grant)) => Some(grant.devices),
        _ => None,
    });
    devices.flatten().map(|device| (device.device.to_string(), device)).collect()
}
