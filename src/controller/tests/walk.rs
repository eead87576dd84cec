//! Anything happens, in any order. Of three walks one moves pods that are marked as movable.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZero;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaimConsumerReference;
use serde_json::{Value, json};

use super::cluster::{Cluster, KINDS, claims_of, results};
use crate::cluster::pod_groups::PodGroupApi;
use crate::controller::config::{Consolidation, Mode, Rules};
use crate::controller::holds::HoldPace;
use crate::controller::preempt::EVICTIONS_OF_NAMESPACE_MAX;
use crate::controller::queue::{Lacks, Patience};
use crate::controller::view::GpuRef;
use crate::controller::write::Failure;
use crate::model::names::PodUid;

/// `TRANCHE_STEPS`: how many steps, in walks of 2,000; `TRANCHE_SEED`: of the first walk.
fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().and_then(|text| text.parse().ok())
}

/// Of the things that happen those after which the controller learns everything again.
const BEGINS_ANEW: Range<u8> = 53..55;

/// Longer than anything that a scheduler decides takes to become visible.
const SETTLE: Duration = Duration::from_secs(2);

fn rules() -> Rules {
    let holds = HoldPace { settle: SETTLE, keep_warm: Duration::from_secs(10), ..HoldPace::default() };
    Rules { holds, ..Rules::default() }
}

/// A share that nobody binds is taken back in this time, and what was in doubt is known.
const CALM: Duration = Duration::from_secs(150);

/// Of 40 s: after so many nothing happens any more, unless something happens for ever.
const TICKS_MAX: u32 = 1000;

/// So often that it shows, and never more often than that.
const MOVES: Consolidation = Consolidation { mode: Mode::Auto, per_hour: 4, rest: Duration::from_secs(60) };

/// The scheduler binds the pod where its claims are, and reserves them.
pub fn bind(cluster: &mut Cluster, name: &str) {
    let at = ("ml".to_owned(), name.to_owned());
    let Some(mut pod) = cluster.pods.get(&at).cloned() else { return };
    let names = claims_of(&pod);
    let Some(places) = names.iter().map(|claim| cluster.place(claim)).collect::<Option<Vec<_>>>() else {
        return;
    };
    let Some((node, _)) = places.first().cloned() else { return };
    let open =
        cluster.nodes.get(&node).is_some_and(|node| node.spec.as_ref().unwrap().unschedulable != Some(true));
    let spec = pod.spec.as_mut().unwrap();
    if !open || spec.node_name.is_some() {
        return;
    }
    spec.node_name = Some(node);
    let uid = pod.metadata.uid.clone().unwrap();
    for claim in names {
        let mut claim = cluster.claim(&claim).clone();
        let users = claim.status.get_or_insert_default().reserved_for.get_or_insert_default();
        users.push(ResourceClaimConsumerReference {
            resource: "pods".to_owned(),
            name: name.to_owned(),
            uid: uid.clone(),
            ..ResourceClaimConsumerReference::default()
        });
        cluster.store(claim);
    }
    cluster.store_pod(pod);
}

/// A scheduler's decision that is on its way to the API server.
struct Decided {
    claim: String,
    node: String,
    device: String,
    lands: Duration,
}

/// What a pod on its own needs of one GPU.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Ask {
    mib: u64,
    percent: u32,
    /// Blocks of client slots.
    slots: u32,
    priority: u8,
}

impl Ask {
    fn amounts(self) -> (u64, u32, u32) {
        (self.mib, self.percent, self.slots)
    }
}

/// A pod that somebody makes anew, and that may be moved.
#[derive(Debug, Clone)]
struct Replica {
    share: Value,
    ask: Ask,
    owner: String,
}

/// How a gang says how many of its pods start together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Gang {
    /// By annotation.
    Sized,
    /// By their PodGroups.
    Volcano,
    Kai,
}

const OURS: &str = "tranche.dev/gang";
const OURS_SIZE: &str = "tranche.dev/gang-size";
const VOLCANOS: &str = "scheduling.k8s.io/group-name";
const KAIS: &str = "pod-group-name";

/// Pods of a gang that are not ending.
#[derive(Debug, Clone, Default)]
struct Members {
    placed: Vec<String>,
    waiting: Vec<String>,
    is_bound: bool,
}

struct Walk {
    cluster: Cluster,
    /// By the pod's name.
    replicas: BTreeMap<String, Replica>,
    /// When another controller began to lead, which knows nothing of what was moved before.
    led: Vec<Duration>,
    rules: Rules,
    /// Of pods that are in no gang and want one GPU.
    asks: BTreeMap<String, Ask>,
    rng: fastrand::Rng,
    decided: Vec<Decided>,
    made: u32,
}

impl Walk {
    fn new(seed: u64) -> Self {
        let mut rules = rules();
        if seed % 3 == 2 {
            rules.consolidation = MOVES;
        }
        if seed % 3 == 1 {
            rules.patience = Patience { passes: u32::MAX, time: Duration::MAX, ..Patience::default() };
        }
        let mut cluster = Cluster::new(rules.clone());
        cluster.keeps = seed.is_multiple_of(2);
        cluster.own_daemons = seed % 8 >= 6;
        for node in 0..3 {
            cluster.put_node(&format!("node-{node}"), 2);
        }
        let rng = fastrand::Rng::with_seed(seed);
        Self {
            cluster,
            replicas: BTreeMap::new(),
            led: Vec::new(),
            rules,
            asks: BTreeMap::new(),
            rng,
            decided: Vec::new(),
            made: 0,
        }
    }

    fn pod(&mut self) -> Option<String> {
        let names: Vec<&String> = self.cluster.pods.keys().map(|(_, name)| name).collect();
        self.rng.choice(names).cloned()
    }

    fn node(&mut self) -> String {
        format!("node-{}", self.rng.u8(0..3))
    }

    fn step(&mut self) {
        let what = self.rng.u8(0..100);
        self.happens(what);
    }

    fn happens(&mut self, what: u8) {
        let before = self.cluster.version;
        match what {
            0..9 => self.create_share(),
            9 => self.create_gang(),
            10..12 => self.create_promised(),
            12..16 => self.create_whole(),
            16..30 => self.schedule(),
            30..40 => {
                if let Some(pod) = self.pod() {
                    bind(&mut self.cluster, &pod);
                }
            }
            40..46 => {
                if let Some(pod) = self.pod() {
                    let with_claims = self.rng.bool();
                    self.cluster.drop_pod(&pod, with_claims);
                }
            }
            46..48 => self.drop_any_claim(),
            48..50 => self.clear_any(),
            50 => self.change_group(),
            51 => {
                let (node, cordoned) = (self.node(), self.rng.bool());
                if self.cluster.nodes.contains_key(&node) {
                    self.cluster.put_node_object(&node, json!({"unschedulable": cordoned}));
                }
            }
            52 => {
                let node = self.node();
                match self.cluster.nodes.contains_key(&node) {
                    true => self.cluster.drop_node(&node),
                    false => self.cluster.put_node(&node, 2),
                }
            }
            53 => match self.rng.bool() {
                true => self.cluster.relist(),
                false => self.cluster.relist_one(self.rng.u8(0..KINDS)),
            },
            54 => {
                self.led.push(self.cluster.now);
                self.cluster.fail_over(self.rules.clone());
            }
            55 => self.cluster.fail(Failure::Silent("no answer".to_owned())),
            56 => {
                let refused = Failure::Refused("exceeded quota: shares".to_owned());
                let busy = Failure::Busy("too many requests".to_owned());
                let failure = self.rng.choice([Failure::NotLeading, Failure::Conflict, refused, busy]);
                failure.into_iter().for_each(|failure| self.cluster.fail(failure));
            }
            57..76 => self.write(),
            76..80 => {
                if !self.cluster.answers.is_empty() {
                    let at = self.rng.usize(0..self.cluster.answers.len());
                    self.cluster.hear(at);
                }
            }
            80..92 => {
                // Now and then it catches up: else the lists that begin anew would soon be all that it ever has.
                match self.rng.u8(0..8) {
                    0 => self.cluster.deliver(usize::MAX),
                    _ => self.cluster.deliver_one_kind(self.rng.usize(0..12), &mut self.rng),
                }
                self.cluster.round();
            }
            92..95 => self.find_unschedulable(),
            95 | 96 => {
                if let Some(pod) = self.rng.choice(self.cluster.ending()) {
                    self.end_pod(&pod);
                }
            }
            _ => {
                self.cluster.now += Duration::from_millis(self.rng.u64(0..1500));
                // A decision becomes visible long before a hold has settled.
                self.land(false);
                self.cluster.round();
            }
        }
        if self.cluster.version != before {
            self.cluster.check();
            self.check_evicted();
            self.check_moved();
            self.cluster.core.check_neighbours();
            // From some time on, also of who has begun to lead since.
            if self.cluster.version.is_multiple_of(16) {
                self.cluster.core.wake_neighbours();
            }
        }
    }

    /// A pod that was told to end has ended. Where it has an owner, that makes another.
    fn end_pod(&mut self, name: &str) {
        self.cluster.drop_pod(name, true);
        if let Some(replica) = self.replicas.remove(name) {
            self.create_replica(replica);
        }
    }

    fn create_replica(&mut self, replica: Replica) {
        self.made += 1;
        let name = format!("r{}", self.made);
        let Replica { share, ask, owner } = &replica;
        let owned = json!({"spec": {"priority": ask.priority}, "metadata": {
            "annotations": {"tranche.dev/movable": "true"}, "ownerReferences": [{"apiVersion": "apps/v1",
                "kind": "ReplicaSet", "name": owner, "uid": owner, "controller": true}]}});
        self.cluster.put_pod(&name, &[&name], owned);
        let pod = &self.cluster.pods[&("ml".to_owned(), name.clone())];
        let owner = json!({"apiVersion": "v1", "kind": "Pod", "name": name, "uid": pod.metadata.uid,
            "controller": true});
        self.cluster.put_owned_share(&name, share.clone(), owner);
        self.asks.insert(name.clone(), *ask);
        self.replicas.insert(name, replica);
    }

    /// What was moved may be moved, was not moved too often, and nobody of a gang was.
    fn check_moved(&self) {
        let hour = Duration::from_secs(3600);
        let moved = &self.cluster.moved;
        assert!(moved.is_empty() || self.rules.consolidation.mode == Mode::Auto, "{moved:?}");
        for (nth, (at, (_, name))) in moved.iter().enumerate() {
            assert!(name.starts_with('r'), "{name} is no pod that may be moved");
            let within = moved[..nth].iter().filter(|(before, _)| *before + hour > *at).count();
            let leaders = 1 + self.led.iter().filter(|led| **led + hour > *at).count();
            let most = MOVES.per_hour as usize * leaders;
            assert!(within < most, "{} pods were moved in an hour, under {leaders} leaders", within + 1);
        }
    }

    /// The scheduler has tried a pod that waits in vain: from now on others may end for it.
    fn find_unschedulable(&mut self) {
        let waiting: Vec<String> = self.waiting().into_iter().collect();
        let Some(name) = self.rng.choice(waiting) else { return };
        let Some(mut pod) = self.cluster.pods.get(&("ml".to_owned(), name)).cloned() else { return };
        let condition = json!([{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]);
        pod.status.get_or_insert_default().conditions = serde_json::from_value(condition).unwrap();
        self.cluster.store_pod(pod);
    }

    /// Who was evicted gave way to somebody: there are no more of them than others could have asked for.
    fn check_evicted(&self) {
        let minute = Duration::from_secs(60);
        let evicted = &self.cluster.evicted_at;
        for (nth, at) in evicted.iter().enumerate() {
            let within = evicted[..nth].iter().filter(|before| **before + minute > *at).count() + 1;
            let leaders = 1 + self.led.iter().filter(|led| **led + minute > *at).count();
            let most = EVICTIONS_OF_NAMESPACE_MAX * leaders;
            assert!(within <= most, "{within} pods were evicted in a minute, under {leaders} leaders");
        }
        for name in &self.cluster.evicted {
            let lowest = self.asks.get(&name.1).is_none_or(|ask| ask.priority == 0);
            assert!(lowest, "{name:?} has the highest priority that there is");
        }
    }

    fn create_share(&mut self) {
        self.made += 1;
        let name = format!("p{}", self.made);
        let (mut share, mib, percent) = match self.rng.u8(0..5) {
            0 => (json!({"fraction": "0.25"}), 20 << 10, 25),
            1 => (json!({"memory": "30Gi", "compute": 40}), 30 << 10, 40),
            2 => (json!({"memory": "79Gi"}), 79 << 10, 0),
            3 => (json!({"fraction": "1"}), 80 << 10, 100),
            _ => {
                let mib = self.rng.u64(24..20_000);
                (json!({"memory": format!("{mib}Mi")}), mib, 0)
            }
        };
        let whole = share["fraction"] == "1";
        let several = self.rng.u8(0..4) == 0 && !whole;
        let processes = if several { self.rng.u32(1..=24) } else { 1 };
        if processes > 1 {
            share["maxProcesses"] = processes.into();
        }
        let moves = self.rules.consolidation.mode == Mode::Auto;
        if moves && !whole && self.rng.bool() {
            let slots = processes.div_ceil(3);
            let ask = Ask { mib, percent, slots, priority: self.rng.u8(0..2) };
            let owner = format!("rs{}", self.made);
            return self.create_replica(Replica { share, ask, owner });
        }
        let gpus = if self.rng.u8(0..8) == 0 { 2 } else { 1 };
        self.cluster.put_share(&name, share, gpus);
        let priority = self.rng.u8(0..2);
        let mut more = json!({"spec": {"priority": priority}});
        if self.rng.u8(0..5) == 0 {
            let name = format!("g{}", self.made / 3);
            more["metadata"]["annotations"] = match self.rng.bool() {
                true => json!({"tranche.dev/gang": name}),
                false => {
                    more["spec"]["schedulerName"] = self.rng.choice(["volcano", "another"]).into();
                    json!({"scheduling.k8s.io/group-name": name})
                }
            };
            self.put_group(&name);
        } else if gpus == 1 {
            let slots = if whole { 16 } else { processes.div_ceil(3) };
            self.asks.insert(name.clone(), Ask { mib, percent, slots, priority });
        }
        self.cluster.put_pod(&name, &[&name], more);
    }

    /// Pods of one gang, of which so many start together. Most of them come at once.
    fn create_gang(&mut self) {
        self.made += 1;
        let (kind, name) = (self.gang_kind(), format!("t{}", self.made));
        let pods = self.rng.u8(2..=4);
        let minimum = self.rng.u8(1..=pods);
        for _ in 0..pods {
            let mib = self.rng.u64(10_000..60_000);
            self.create_member(kind, &name, minimum, mib);
            if self.rng.u8(0..4) == 0 {
                self.cluster.now += Duration::from_millis(self.rng.u64(0..1500));
                self.cluster.round();
            }
        }
    }

    fn gang_kind(&mut self) -> Gang {
        self.rng.choice([Gang::Sized, Gang::Volcano, Gang::Kai]).expect("there are some")
    }

    /// A pod of a gang.
    fn create_member(&mut self, kind: Gang, gang: &str, minimum: u8, mib: u64) {
        self.made += 1;
        let name = format!("{gang}-{}", self.made);
        let group = json!({"spec": {"minMember": minimum}});
        let more = match kind {
            Gang::Sized => {
                json!({"metadata": {"annotations": {OURS: gang, OURS_SIZE: minimum.to_string()}}})
            }
            Gang::Volcano => {
                self.cluster.put_group(PodGroupApi::Volcano, gang, group);
                json!({"metadata": {"annotations": {VOLCANOS: gang}}, "spec": {"schedulerName": "volcano"}})
            }
            Gang::Kai => {
                self.cluster.put_group(PodGroupApi::Kai, gang, group);
                json!({"metadata": {"annotations": {KAIS: gang}}, "spec": {"schedulerName": "kai-scheduler"}})
            }
        };
        self.cluster.put_share(&name, json!({"memory": format!("{mib}Mi")}), 1);
        self.cluster.put_pod(&name, &[&name], more);
    }

    /// The gang of a pod, and how many of its pods start together. None: it is in none, or nobody says.
    fn gang_of(&self, pod: &Pod) -> Option<(Gang, String, usize)> {
        let annotations = pod.metadata.annotations.as_ref()?;
        if let (Some(name), Some(size)) = (annotations.get(OURS), annotations.get(OURS_SIZE)) {
            return Some((Gang::Sized, name.clone(), size.parse().ok()?));
        }
        [(Gang::Volcano, VOLCANOS, PodGroupApi::Volcano), (Gang::Kai, KAIS, PodGroupApi::Kai)]
            .into_iter()
            .find_map(|(kind, annotation, api)| {
                let name = annotations.get(annotation)?;
                let group = self.cluster.groups.get(&(api, name.clone()))?;
                Some((kind, name.clone(), usize::try_from(group.spec.min_member?).ok()?))
            })
    }

    /// Gangs of which somebody says how many start together: their pods, in all and with a place, and whether the scheduler
    /// has bound one of them.
    fn gangs(&self) -> BTreeMap<(Gang, String, usize), Members> {
        let mut gangs: BTreeMap<_, Members> = BTreeMap::new();
        for ((_, name), pod) in &self.cluster.pods {
            let Some(gang) = self.gang_of(pod).filter(|_| pod.metadata.deletion_timestamp.is_none()) else {
                continue;
            };
            let members = gangs.entry(gang).or_default();
            members.is_bound |= pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some());
            let claims = claims_of(pod);
            match claims.iter().any(|claim| self.cluster.place(claim).is_some()) {
                true => members.placed.push(name.clone()),
                false => members.waiting.push(name.clone()),
            }
        }
        gangs
    }

    /// When nothing has happened for a while: of a gang that has not started as many pods have places as start together, or
    /// none.
    fn gangs_are_whole(&self) {
        for (gang @ (_, _, minimum), members) in self.gangs() {
            let whole = members.placed.is_empty() || members.placed.len() >= minimum || members.is_bound;
            assert!(whole, "{gang:?} has places for a part of it: {members:?}");
        }
    }

    /// Gangs whose pods come in turns, and more of them than there is room for. Whatever has room starts whole within
    /// 15 s, and the others start as soon as those before them have ended.
    fn gangs_take_turns(&mut self) {
        const GIB: u64 = 60;
        self.clear();
        let mut coming = Vec::new();
        for _ in 0..self.rng.u8(3..6) {
            self.made += 1;
            let (kind, name, pods) = (self.gang_kind(), format!("u{}", self.made), self.rng.u8(2..=5));
            let minimum = self.rng.u8(2..=pods);
            coming.extend((0..pods).map(|_| (kind, name.clone(), minimum)));
        }
        self.rng.shuffle(&mut coming);
        for (kind, name, minimum) in coming {
            self.create_member(kind, &name, minimum, GIB << 10);
            self.cluster.settle(Duration::from_millis(self.rng.u64(0..1500)));
        }
        while !self.cluster.pods.is_empty() {
            self.cluster.settle(Duration::from_secs(15));
            self.cluster.check();
            self.gangs_are_whole();
            let gangs = self.gangs();
            let started: Vec<Members> =
                gangs.values().filter(|members| !members.placed.is_empty()).cloned().collect();
            assert!(!started.is_empty(), "all GPUs are free, and no gang starts: {gangs:?}");
            let is_kept = self.cluster.core.reserves.counts() != (0, 0);
            if !is_kept && started.iter().any(|members| !members.waiting.is_empty()) {
                let open = self.cluster.open_for((GIB << 10, 0, 1));
                assert_eq!(open, [], "pods of a gang that has started wait: {gangs:?}");
            }
            for members in started {
                members
                    .placed
                    .iter()
                    .chain(&members.waiting)
                    .for_each(|pod| self.cluster.drop_pod(pod, true));
            }
        }
    }

    fn put_group(&mut self, name: &str) {
        let minimum = self.rng.u8(1..4);
        self.cluster.put_group(PodGroupApi::Volcano, name, json!({"spec": {"minMember": minimum}}));
    }

    /// Its owner wants another minimum, or it goes.
    fn change_group(&mut self) {
        let groups: Vec<(PodGroupApi, String)> = self.cluster.groups.keys().cloned().collect();
        let Some((api, name)) = self.rng.choice(groups) else { return };
        match self.rng.bool() {
            true => {
                let minimum = self.rng.u8(1..4);
                self.cluster.put_group(api, &name, json!({"spec": {"minMember": minimum}}));
            }
            false => self.cluster.drop_group(api, &name),
        }
    }

    fn create_promised(&mut self) {
        self.made += 1;
        let name = format!("k{}", self.made);
        let share = json!({"share": {"apiVersion": "tranche.dev/v1alpha1", "kind": "GpuShare", "fraction": "0.5"}, "count": 1});
        let claim = format!("{name}-gpu-share");
        let mut more = json!({
            "metadata": {"annotations": {"tranche.dev/gpu-share": share.to_string()}},
            "spec": {"resourceClaims": [{"name": "gpu-share", "resourceClaimName": claim}]}});
        // Then the claim is created before it has a place.
        if self.rng.u8(0..3) == 0 {
            let group = format!("g{}", self.made / 3);
            more["metadata"]["annotations"]["scheduling.k8s.io/group-name"] = json!(group);
            more["spec"]["schedulerName"] = json!("volcano");
            self.put_group(&group);
        } else {
            self.asks.insert(name.clone(), Ask { mib: 40 << 10, percent: 50, slots: 1, priority: 0 });
        }
        self.cluster.put_pod(&name, &[], more);
    }

    fn create_whole(&mut self) {
        self.made += 1;
        let name = format!("w{}", self.made);
        self.cluster.put_whole(&name);
        let waits = json!({"spec": {"priority": self.rng.u8(0..2)},
            "status": {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]}});
        self.cluster.put_pod(&name, &[&name], waits);
    }

    /// The scheduler gives a whole GPU to a claim, by what it sees now; the write lands later.
    fn schedule(&mut self) {
        let open =
            self.cluster.claims.iter().filter(|((ns, name), claim)| {
                ns == "ml" && name.starts_with('w') && results(claim).is_empty()
            });
        let open: Vec<String> = open.map(|((_, name), _)| name.clone()).collect();
        let Some(claim) = self.rng.choice(open) else { return };
        if self.decided.iter().any(|one| one.claim == claim) {
            return;
        }
        let cluster = &self.cluster;
        let named: Vec<(String, String)> = match cluster.keeps {
            true => cluster.claims.values().flat_map(results).collect(),
            // A GPU that somebody got while the clearing of a hold was on its way is in no book until the hold is
            // allocated again: a moment of which the scheduler makes nothing here, since nothing but the scheduler
            // itself could close it. The cluster's check sees to it that there is no other such moment.
            false => cluster.books.union(&cluster.blind).cloned().collect(),
        };
        let named =
            named.into_iter().chain(self.decided.iter().map(|one| (one.node.clone(), one.device.clone())));
        let named: Vec<(String, String)> = named.collect();
        let nodes = self.cluster.slices.keys().cloned();
        let gpus = nodes.flat_map(|node| (0..2).map(move |minor| (node.clone(), format!("gpu-{minor}"))));
        let free: Vec<(String, String)> = gpus.filter(|gpu| !named.contains(gpu)).collect();
        if let Some((node, device)) = self.rng.choice(free) {
            let lands = self.cluster.now + Duration::from_millis(self.rng.u64(0..400));
            self.decided.push(Decided { claim, node, device, lands });
        }
    }

    fn land(&mut self, all: bool) {
        let now = self.cluster.now;
        let (landing, waiting): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.decided).into_iter().partition(|one| all || one.lands <= now);
        self.decided = waiting;
        for one in landing {
            let at = ("ml".to_owned(), one.claim.clone());
            let Some(mut claim) = self.cluster.claims.get(&at).cloned() else { continue };
            if results(&claim).is_empty() {
                let made =
                    crate::controller::grant::hold(&one.node.as_str().into(), "gpu", &one.device, None);
                claim.status.get_or_insert_default().allocation = Some(made);
                self.cluster.store(claim);
            }
        }
    }

    fn write(&mut self) {
        if self.cluster.writes.is_empty() {
            return;
        }
        let at = self.rng.usize(0..self.cluster.writes.len().min(4));
        let lost = self.rng.u8(0..20) == 0;
        match self.rng.u8(0..4) {
            0 => self.cluster.write_unheard(at, lost),
            _ => self.cluster.write_at(at, lost),
        }
    }

    fn drop_any_claim(&mut self) {
        let names = self.cluster.claims.keys().filter(|(ns, _)| ns == "ml");
        let names: Vec<_> = names.cloned().collect();
        if let Some(name) = self.rng.choice(names) {
            self.cluster.drop_claim(&name);
        }
    }

    /// The scheduler's PostFilter, or an administrator, takes an allocation away.
    fn clear_any(&mut self) {
        let unreserved = self.cluster.claims.iter().filter(|((ns, _), claim)| {
            let users = claim.status.as_ref().and_then(|status| status.reserved_for.as_ref());
            ns == "ml" && !results(claim).is_empty() && users.is_none_or(Vec::is_empty)
        });
        let names: Vec<_> = unreserved.map(|(name, _)| name.clone()).collect();
        if let Some(name) = self.rng.choice(names) {
            let mut claim = self.cluster.claims[&name].clone();
            claim.status = None;
            self.cluster.store(claim);
        }
    }

    /// Pods without a place that wait for their share.
    fn waiting(&self) -> BTreeSet<String> {
        let cluster = &self.cluster;
        let waits = |name: &String, pod: &Pod| {
            let there = |claim: &String| {
                name.starts_with('k') || cluster.claims.contains_key(&("ml".to_owned(), claim.clone()))
            };
            let claims = claims_of(pod);
            let placed = claims.iter().all(|claim| cluster.place(claim).is_some());
            !name.starts_with('w') && !placed && claims.iter().all(there)
        };
        let pods = cluster.pods.iter().filter(|((_, name), pod)| waits(name, pod));
        pods.map(|((_, name), _)| name.clone()).collect()
    }

    /// The scheduler binds what is placed, until for long nothing has happened: no node is closed to a pod any more.
    fn rest(&mut self) {
        while !self.cluster.feed.is_empty() {
            self.cluster.deliver_one_kind(self.rng.usize(0..4), &mut self.rng);
            self.cluster.round();
        }
        let (mut quiet, mut ticks) = (Duration::ZERO, 0);
        // Longer than a pod is left out that its scheduler did not bind.
        while quiet < Duration::from_secs(600) {
            let tick = Duration::from_secs(40);
            self.cluster.settle(tick);
            quiet += tick;
            for pod in self.cluster.ending() {
                self.end_pod(&pod);
                quiet = Duration::ZERO;
            }
            ticks += 1;
            assert!(ticks < TICKS_MAX, "pods end again and again: {:?}", self.cluster.moved);
            let pods: Vec<String> = self.cluster.pods.keys().map(|(_, name)| name.clone()).collect();
            for pod in pods {
                let before = self.cluster.version;
                bind(&mut self.cluster, &pod);
                if self.cluster.version != before {
                    quiet = Duration::ZERO;
                }
            }
        }
        self.cluster.check();
        self.check_moved();
        self.check_evicted();
        self.gangs_are_whole();
    }

    /// Who waits has no place: as the API has it, and for a controller that has missed nothing.
    fn waits_in_need(&self) {
        let cluster = &self.cluster;
        let gathering = self.gathering();
        let waiting: BTreeSet<String> = self.waiting().difference(&gathering).cloned().collect();
        // What is kept for a pod that has been passed for too long is no place for those after it.
        let mut kept: BTreeSet<GpuRef> = BTreeSet::new();
        let mut kept_before: BTreeMap<PodUid, BTreeSet<GpuRef>> = BTreeMap::new();
        for turn in cluster.core.queue.turns(cluster.now, |key| cluster.core.placed(key)) {
            kept_before.extend(turn.pods.iter().map(|pod| (pod.clone(), kept.clone())));
            let of = cluster.core.reserves.of(&turn.key);
            kept.extend(of.into_iter().flat_map(|kept| kept.aside.gpus()).map(|(gpu, _)| gpu));
        }
        for name in &waiting {
            let pod = &cluster.pods[&("ml".to_owned(), name.clone())];
            let Some(ask) = self.asks.get(name) else { continue };
            let uid = PodUid::new(pod.metadata.uid.as_deref().unwrap_or_default());
            let none = BTreeSet::new();
            let kept = kept_before.get(&uid).unwrap_or(&none);
            let mut open = cluster.open_for(ask.amounts());
            let at = |node: &str, device: &str| GpuRef { node: node.into(), device: device.into() };
            open.retain(|(node, device)| !kept.contains(&at(node, device)));
            assert_eq!(open, [], "{name} waits, though {ask:?} is free");
        }
        let mut other = cluster.anew(self.rules.clone());
        other.settle(Duration::from_secs(25));
        for name in waiting {
            let claims = claims_of(&cluster.pods[&("ml".to_owned(), name.clone())]);
            let place = claims.iter().find_map(|claim| other.place(claim));
            // What is kept is counted as it would be taken, so that it may be in the way anywhere.
            let allowed = place.is_none() || !kept.is_empty();
            let why = cluster.core.queue.gathering(cluster.now, |key| cluster.core.placed(key));
            assert!(allowed, "{name} waits ({why:?}), and another controller places it: {place:?}");
        }
    }

    /// Pods that wait for others of their gang, or for their group.
    fn gathering(&self) -> BTreeSet<String> {
        let core = &self.cluster.core;
        let all = core.queue.gathering(self.cluster.now, |key| core.placed(key));
        let lack = all.into_iter().filter(|one| !matches!(one.lacks, Lacks::Paused(_)));
        let pods = lack.flat_map(|one| one.pods).filter_map(|uid| Some(core.view.pod(&uid)?.at.name.clone()));
        pods.collect()
    }

    /// Every group lets its pods start one by one.
    fn let_all_groups_go(&mut self) {
        let pods: Vec<Pod> = self.cluster.pods.values().cloned().collect();
        for mut pod in pods {
            let Some(annotations) = pod.metadata.annotations.as_mut() else { continue };
            let group = json!({"spec": {"minMember": 1}});
            if let Some(size) = annotations.get_mut(OURS_SIZE) {
                *size = "1".to_owned();
                self.cluster.store_pod(pod);
            } else if let Some(name) = annotations.get(VOLCANOS) {
                self.cluster.put_group(PodGroupApi::Volcano, name, group);
            } else if let Some(name) = annotations.get(KAIS) {
                self.cluster.put_group(PodGroupApi::Kai, name, group);
            }
        }
        self.rest();
        self.waits_in_need();
    }

    /// Once those before them have ended, who waits has a place.
    fn drain(&mut self) {
        self.let_all_groups_go();
        self.replicas.clear();
        loop {
            let waiting = self.waiting();
            let gone = self.cluster.pods.keys().filter(|(_, name)| !waiting.contains(name));
            let gone: Vec<String> = gone.map(|(_, name)| name.clone()).collect();
            gone.iter().for_each(|pod| self.cluster.drop_pod(pod, true));
            if waiting.is_empty() {
                return;
            }
            let whole = self.cluster.claims.keys().filter(|(_, name)| name.starts_with('w'));
            let whole: Vec<_> = whole.cloned().collect();
            whole.iter().for_each(|claim| self.cluster.drop_claim(claim));
            self.rest();
            self.waits_in_need();
            let still = self.waiting();
            assert!(still.len() < waiting.len(), "{waiting:?} wait, and all GPUs are free");
            let asks = |of: &BTreeSet<String>| -> Vec<Ask> {
                of.iter().filter_map(|name| self.asks.get(name)).copied().collect()
            };
            let placed: Vec<Ask> = asks(&waiting.difference(&still).cloned().collect());
            for ask in asks(&still) {
                let lower = |one: &&Ask| one.priority < ask.priority && one.amounts() == ask.amounts();
                assert_eq!(placed.iter().find(lower), None, "goes before {ask:?}");
            }
        }
    }

    /// All pods end, and nobody makes them anew.
    fn clear(&mut self) {
        let pods: Vec<String> = self.cluster.pods.keys().map(|(_, name)| name.clone()).collect();
        pods.iter().for_each(|pod| self.cluster.drop_pod(pod, true));
        let claims: Vec<_> = self.cluster.claims.keys().filter(|(ns, _)| ns == "ml").cloned().collect();
        claims.iter().for_each(|claim| self.cluster.drop_claim(claim));
        self.replicas.clear();
        self.rest();
    }

    /// Each GPU has a large pod and a small one that may be moved. Some of the large ones go, and what comes wants whole
    /// GPUs: small ones are in the way.
    fn fragment(&mut self) {
        self.clear();
        let large: Vec<String> = (0..6).map(|_| self.create_plain(60, 1)).collect();
        self.rest();
        for _ in 0..6 {
            let ask = Ask { mib: 15 << 10, percent: 0, slots: 1, priority: 0 };
            let owner = format!("rs{}", self.made);
            self.create_replica(Replica { share: json!({"memory": "15Gi"}), ask, owner });
        }
        self.rest();
        for pod in large {
            if self.rng.bool() {
                self.cluster.drop_pod(&pod, true);
            }
        }
        for _ in 0..self.rng.u8(1..3) {
            // Nobody ends for it.
            self.create_plain(79, 0);
        }
        self.rest();
        self.waits_in_need();
    }

    /// A pod by itself that asks for so many GiB, and that its scheduler has tried.
    fn create_plain(&mut self, gib: u64, priority: u8) -> String {
        self.made += 1;
        let name = format!("p{}", self.made);
        self.cluster.put_share(&name, json!({"memory": format!("{gib}Gi")}), 1);
        let waits = json!({"spec": {"priority": priority},
            "status": {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]}});
        self.cluster.put_pod(&name, &[&name], waits);
        self.asks.insert(name.clone(), Ask { mib: gib << 10, percent: 0, slots: 1, priority });
        name
    }

    /// Everything calms down: what can be placed is placed, and nothing is left behind.
    fn end(&mut self) {
        for _ in 0..100 {
            let what = self.rng.u8(0..100);
            // Not what would heal what was missed.
            if !BEGINS_ANEW.contains(&what) {
                self.happens(what);
            }
        }
        self.land(true);
        // In which the scheduler binds nothing.
        let calm = Duration::from_secs(self.rng.u64(0..300));
        self.cluster.settle(calm);
        self.cluster.check();
        if calm >= CALM {
            self.gangs_are_whole();
        }
        self.rest();
        self.waits_in_need();
        for node in 0..3 {
            self.cluster.put_node(&format!("node-{node}"), 2);
        }
        self.rest();
        if self.rules.consolidation.mode == Mode::Auto {
            (0..2).for_each(|_| self.fragment());
        }
        assert!(
            self.cluster.keeps || self.cluster.blind.is_empty(),
            "{:?} is in no book",
            self.cluster.blind
        );
        self.waits_in_need();
        self.drain();
        self.gangs_take_turns();
        let claims: Vec<_> = self.cluster.claims.keys().filter(|(ns, _)| ns == "ml").cloned().collect();
        claims.iter().for_each(|claim| self.cluster.drop_claim(claim));
        self.cluster.settle(Duration::from_secs(1200));
        assert_eq!(self.cluster.holds(), [""; 0], "holds are given back");
        assert!(self.cluster.core.queue.is_empty());
        for node in self.cluster.core.capacity.index.nodes() {
            for gpu in node.gpus() {
                assert_eq!(
                    gpu.memory().0,
                    gpu.memory().1,
                    "{}/{} is counted as used",
                    node.name(),
                    gpu.device()
                );
            }
            assert_eq!(node.cpu_milli().0, node.cpu_milli().1);
        }
    }
}

#[test]
fn whatever_happens_no_gpu_is_given_twice_and_nothing_is_left_behind() {
    let (walks, steps) = match number("TRANCHE_STEPS") {
        Some(steps) => (steps.div_ceil(2000), 2000),
        None => (12, 600),
    };
    let first = number("TRANCHE_SEED").unwrap_or(0);
    let (walked, evicted, moved) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    let failed = Mutex::new(Vec::new());
    let threads = std::thread::available_parallelism().map_or(1, NonZero::get);
    std::thread::scope(|scope| {
        let walking = || {
            while let Some(nth) = Some(walked.fetch_add(1, Ordering::Relaxed)).filter(|nth| *nth < walks) {
                let seed = first + nth;
                let mut walk = Walk::new(seed);
                let run = std::panic::AssertUnwindSafe(|| {
                    (0..steps).for_each(|_| walk.step());
                    walk.end();
                    evicted.fetch_add(walk.cluster.evicted.len() as u64, Ordering::Relaxed);
                    moved.fetch_add(walk.cluster.moved.len() as u64, Ordering::Relaxed);
                });
                if std::panic::catch_unwind(run).is_err() {
                    eprintln!("the walk with seed {seed} failed");
                    failed.lock().unwrap().push(seed);
                }
                if walks >= 50 && (nth + 1) % 50 == 0 {
                    eprintln!("{} of {walks} walks of {steps} steps", nth + 1);
                }
            }
        };
        (0..threads).for_each(|_| drop(scope.spawn(walking)));
    });
    let (evicted, moved) = (evicted.into_inner(), moved.into_inner());
    assert!(walks < 10 || evicted > 0, "nobody was evicted in {walks} walks");
    assert!(walks < 10 || moved > 0, "nobody was moved in {walks} walks");
    assert_eq!(failed.into_inner().unwrap(), [0; 0], "seeds of {walks} walks of {steps} steps");
}
