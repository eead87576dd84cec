//! Which gang a pod is in, by the names that those who group pods have for it; and their PodGroups, which say how many
//! pods of a gang start together.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1 as core;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::cluster::feed::WatchEvent;
use crate::cluster::pod_groups::{PodGroup, PodGroupApi, PodGroupSpec, PodGroupStatus, SubGroup};
use crate::controller::gang::{Minimum, Need, Obstacle};
use crate::controller::view::{Claim, ClusterView, Kind, News, Pod};
use crate::model::claim::ClaimKey;
use crate::model::names::PodUid;

/// The pods of a gang start together.
pub const GANG: &str = "tranche.dev/gang";
/// How many of its pods start together at least; none: what its PodGroup says, else all that are there when no more have
/// come for a while.
pub const GANG_SIZE: &str = "tranche.dev/gang-size";

/// Volcano's names: its API's and the older one.
const OF_VOLCANO: [&str; 2] = ["scheduling.k8s.io/group-name", "scheduling.volcano.sh/group-name"];
const TASK_OF_VOLCANO: &str = "volcano.sh/task-spec";
const OF_KAI: &str = "pod-group-name";
/// On pods, and on claims that are no template's: the queue of KAI's that they are charged to.
pub const QUEUE_OF_KAI: &str = "kai.scheduler/queue";
const SUBGROUP_OF_KAI: &str = "kai.scheduler/subgroup-name";
const OF_KUEUE: &str = "kueue.x-k8s.io/pod-group-name";
const COUNT_OF_KUEUE: &str = "kueue.x-k8s.io/pod-group-total-count";

/// Bytes of a gang's name, and of what stands in place of its size. Names of objects have at most 253.
const NAME_BYTES_MAX: usize = 253;
/// Parts of a gang. Of a PodGroup with more the number of pods in all counts alone.
const PARTS_MAX: usize = 64;
/// Bytes of what a PodGroup's status says that are told.
const WORDS_BYTES_MAX: usize = 200;

/// Volcano's phase of a PodGroup that its queue has not let in.
const PENDING: &str = "Pending";
const IS_PENDING: &str = "its phase is Pending";
/// The reasons of KAI's with which its queue keeps a PodGroup out, room or not.
const KEPT_OUT: [&str; 2] = ["OverLimit", "NonPreemptibleOverQuota"];

/// Whose word it is that pods belong together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Family {
    /// The annotation `tranche.dev/gang`.
    Ours,
    Volcano,
    Kai,
    Kubernetes,
    Kueue,
}

impl Family {
    /// Where its PodGroups are served; the first that has one counts.
    fn apis(self) -> &'static [PodGroupApi] {
        match self {
            Self::Ours | Self::Kueue => &[],
            Self::Volcano => &[PodGroupApi::Volcano],
            Self::Kai => &[PodGroupApi::Kai],
            Self::Kubernetes => &[
                PodGroupApi::KubernetesV1Beta1,
                PodGroupApi::KubernetesV1Alpha3,
                PodGroupApi::KubernetesV1Alpha2,
            ],
        }
    }

    fn of(api: PodGroupApi) -> Self {
        match api {
            PodGroupApi::Volcano => Self::Volcano,
            PodGroupApi::Kai => Self::Kai,
            PodGroupApi::KubernetesV1Beta1
            | PodGroupApi::KubernetesV1Alpha3
            | PodGroupApi::KubernetesV1Alpha2 => Self::Kubernetes,
        }
    }
}

/// Who starts a pod, and with which others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grouping {
    pub gang: Option<Gang>,
    /// Who is to bind it; empty: kube-scheduler by its usual name, or it is bound.
    pub scheduler: String,
    /// KAI's, of a pod that is promised a claim and has no node.
    pub queue: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gang {
    pub family: Family,
    pub name: String,
    pub size: GangSize,
    /// The pod's part of it: Volcano's task, KAI's subgroup.
    pub part: Option<String>,
}

/// What the pod itself says of how many start together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GangSize {
    NotSaid,
    /// `counts_all`: those that ask for no share as well.
    Pods {
        pods: usize,
        counts_all: bool,
    },
    /// What stands there instead of a number.
    Unreadable {
        name: &'static str,
        text: String,
    },
}

/// The queue of KAI's that a pod is charged to.
pub(super) fn queue(object: &core::Pod) -> Option<String> {
    let queue = object.metadata.labels.as_ref()?.get(QUEUE_OF_KAI)?;
    (queue.len() <= NAME_BYTES_MAX).then(|| queue.clone())
}

/// The gang that a pod says it is in. Of several names the first counts: ours, Volcano's, KAI's, Kueue's, Kubernetes'.
pub(super) fn gang(object: &core::Pod) -> Option<Gang> {
    let meta = &object.metadata;
    let text = |name: &str| {
        let annotation = meta.annotations.as_ref().and_then(|all| all.get(name));
        annotation.or_else(|| meta.labels.as_ref().and_then(|all| all.get(name)))
    };
    let typed = object.spec.as_ref().and_then(|spec| spec.scheduling_group.as_ref());
    let typed = typed.and_then(|group| group.pod_group_name.as_ref());
    let named = |family: Family, name: &str| Some((family, text(name)?));
    let (family, name) = named(Family::Ours, GANG)
        .or_else(|| OF_VOLCANO.into_iter().find_map(|name| named(Family::Volcano, name)))
        .or_else(|| named(Family::Kai, OF_KAI))
        .or_else(|| named(Family::Kueue, OF_KUEUE))
        .or_else(|| Some((Family::Kubernetes, typed?)))?;
    if !(1..=NAME_BYTES_MAX).contains(&name.len()) {
        return None;
    }
    let part = match family {
        Family::Volcano => text(TASK_OF_VOLCANO),
        Family::Kai => text(SUBGROUP_OF_KAI),
        Family::Ours | Family::Kubernetes | Family::Kueue => None,
    };
    let part = part.filter(|part| part.len() <= NAME_BYTES_MAX).cloned();
    let count = (family == Family::Kueue).then_some(COUNT_OF_KUEUE);
    let size = [Some(GANG_SIZE), count].into_iter().flatten().find_map(|name| Some(size(name, text(name)?)));
    Some(Gang { family, name: name.clone(), size: size.unwrap_or(GangSize::NotSaid), part })
}

fn size(name: &'static str, text: &str) -> GangSize {
    match text.parse() {
        Ok(pods) if pods > 0 => GangSize::Pods { pods, counts_all: name == COUNT_OF_KUEUE },
        _ => GangSize::Unreadable { name, text: text[..text.floor_char_boundary(NAME_BYTES_MAX)].to_owned() },
    }
}

/// What a PodGroup says.
#[derive(Debug, PartialEq, Eq)]
struct PodGroupTerms {
    minimum: Minimum,
    /// Its queue has not let it in: Volcano does not try its pods.
    pending: bool,
}

/// What PodGroups say, and who is in them.
#[derive(Debug, Default)]
pub(super) struct PodGroups {
    /// Schedulers that put every pod into a PodGroup.
    grouping: BTreeSet<String>,
    /// By namespace and name, as one text.
    said: BTreeMap<PodGroupApi, BTreeMap<String, PodGroupTerms>>,
    members: BTreeMap<(Family, String), BTreeSet<PodUid>>,
    /// Gangs of which something else is said than before.
    changed: BTreeSet<(Family, String)>,
    /// Claims that were promised to pods of schedulers that group pods; some of them may exist by now.
    promised: BTreeSet<ClaimKey>,
}

impl PodGroups {
    /// `grouping`: schedulers that put every pod into a PodGroup.
    pub fn new(grouping: &[String]) -> Self {
        Self { grouping: grouping.iter().cloned().collect(), ..Self::default() }
    }

    pub fn joins(&mut self, pod: &Pod) {
        if let Some(at) = at(pod) {
            self.members.entry(at).or_default().insert(pod.at.uid.clone());
        }
    }

    pub fn leaves(&mut self, pod: &Pod) {
        let Some(at) = at(pod) else { return };
        if let Some(members) = self.members.get_mut(&at) {
            members.remove(&pod.at.uid);
            if members.is_empty() {
                self.members.remove(&at);
            }
        }
    }

    /// The names of PodGroups that are known.
    pub fn keys(&self, api: PodGroupApi) -> impl Iterator<Item = &String> {
        self.said.get(&api).into_iter().flat_map(BTreeMap::keys)
    }

    fn note_all(&mut self, api: PodGroupApi) {
        let of_api = self.members.keys().filter(|(family, _)| *family == Family::of(api));
        self.changed.extend(of_api.cloned());
    }
}

/// A gang that may have a PodGroup.
fn at(pod: &Pod) -> Option<(Family, String)> {
    let gang = pod.gang().filter(|gang| !gang.family.apis().is_empty())?;
    Some((gang.family, key(&pod.at.namespace, &gang.name)))
}

/// How a PodGroup is found.
pub(super) fn key(namespace: &str, name: &str) -> String {
    format!("{namespace}/{name}")
}

impl ClusterView {
    pub(super) fn follow_groups(&mut self, api: PodGroupApi, seen: WatchEvent<PodGroup>) -> Vec<News> {
        let kind = Kind::PodGroups(api);
        let known = self.lists.complete.contains(&kind);
        let set = |view: &mut Self, group: PodGroup| view.set_group(api, &group);
        let drop = |view: &mut Self, key: &str| view.drop_group(api, key);
        let news = self.follow(kind, seen, set, drop);
        // Only now is it known of which gangs there is no PodGroup.
        if !known && self.lists.complete.contains(&kind) {
            self.optional.groups.note_all(api);
        }
        news
    }

    fn set_group(&mut self, api: PodGroupApi, object: &PodGroup) -> Vec<News> {
        let key = key_of(&object.metadata);
        let fresh = PodGroupTerms {
            minimum: minimum(api, &object.spec, &object.status),
            pending: api == PodGroupApi::Volcano && object.status.phase.as_deref() == Some(PENDING),
        };
        let said = self.optional.groups.said.entry(api).or_default();
        if said.get(&key) != Some(&fresh) {
            said.insert(key.clone(), fresh);
            self.optional.groups.changed.insert((Family::of(api), key));
        }
        Vec::new()
    }

    fn drop_group(&mut self, api: PodGroupApi, key: &str) -> Vec<News> {
        if self.optional.groups.said.get_mut(&api).and_then(|said| said.remove(key)).is_some() {
            self.optional.groups.changed.insert((Family::of(api), key.to_owned()));
        }
        Vec::new()
    }

    /// Pods of gangs of which something else is said than when this was last asked: each once, however often it was said.
    pub fn take_regrouped(&mut self) -> Vec<PodUid> {
        let changed = std::mem::take(&mut self.optional.groups.changed);
        let members = changed.iter().filter_map(|at| self.optional.groups.members.get(at));
        members.flatten().cloned().collect()
    }

    /// A claim was promised to the pod, and is not created yet.
    pub(super) fn note_promised(&mut self, claim: ClaimKey, pod: &PodUid) {
        if self.pod(pod).is_some_and(|pod| self.is_grouped(pod)) {
            self.optional.groups.promised.insert(claim);
        }
    }

    /// Claims that are created before they have a place: those of pods whose scheduler puts every pod into a PodGroup.
    /// Volcano forgets a pod that names a claim which is not there, until the pod changes. kube-scheduler tries a pod as
    /// soon as its claim is there: for that it is created with its place.
    pub fn wanted_early(&mut self) -> Vec<ClaimKey> {
        let claims = &self.claims;
        self.optional.groups.promised.retain(|claim| claims.get(*claim).is_some_and(Claim::is_planned));
        let is_open = |claim: &&ClaimKey| {
            let owner = claims.get(**claim).and_then(|claim| claim.meta.owner.as_ref());
            owner.and_then(|pod| self.pods.get(pod)).is_some_and(|pod| !pod.ending && !pod.gated)
        };
        self.optional.groups.promised.iter().filter(is_open).copied().collect()
    }

    /// The pod's scheduler puts every pod into a PodGroup.
    pub fn is_grouped(&self, pod: &Pod) -> bool {
        self.optional.groups.grouping.contains(&pod.grouping.scheduler)
    }

    /// How many pods of a pod's gang start together at least: what the pod says, else what its PodGroup says. Where its
    /// scheduler puts every pod into a PodGroup, nothing starts before that one is known.
    pub fn minimum(&self, pod: &Pod) -> Minimum {
        let grouped = self.is_grouped(pod);
        let scheduler = || pod.grouping.scheduler.clone();
        let Some(gang) = pod.gang() else {
            return match grouped {
                true => Minimum::None(Obstacle::NoGroup { scheduler: scheduler() }),
                false => Minimum::ONE,
            };
        };
        if let GangSize::Pods { pods, counts_all } = gang.size {
            let need = Need::new(pods, BTreeMap::new());
            return Minimum::Pods(if counts_all { need.of_all() } else { need });
        }
        let apis = gang.family.apis();
        let key = key(&pod.at.namespace, &gang.name);
        if let Some(said) = apis.iter().find_map(|api| self.optional.groups.said.get(api)?.get(&key)) {
            // kube-scheduler binds its pods whatever Volcano says of their group.
            return match said.pending && !pod.grouping.scheduler.is_empty() {
                true => Minimum::None(Obstacle::Refused { words: IS_PENDING.to_owned() }),
                false => said.minimum.clone(),
            };
        }
        let unlisted = |api: &&PodGroupApi| !self.lists.complete.contains(&Kind::PodGroups(**api));
        match apis.iter().find(unlisted) {
            Some(api) => Minimum::None(Obstacle::NotListed { api: api.group() }),
            None if grouped && !apis.is_empty() => {
                Minimum::None(Obstacle::NoObject { scheduler: scheduler() })
            }
            None => Minimum::AllThere,
        }
    }
}

pub(super) fn key_of(meta: &ObjectMeta) -> String {
    key(meta.namespace.as_deref().unwrap_or_default(), meta.name.as_deref().unwrap_or_default())
}

fn minimum(api: PodGroupApi, spec: &PodGroupSpec, status: &PodGroupStatus) -> Minimum {
    if let Some(words) = kept_out(status) {
        return Minimum::None(Obstacle::Refused { words });
    }
    let (pods, parts) = match api {
        PodGroupApi::Volcano => {
            let tasks = spec.min_task_member.iter().flatten();
            (number(spec.min_member), tasks.map(|(task, pods)| (task.clone(), number(Some(*pods)))).collect())
        }
        PodGroupApi::Kai => of_kai(spec),
        PodGroupApi::KubernetesV1Beta1
        | PodGroupApi::KubernetesV1Alpha3
        | PodGroupApi::KubernetesV1Alpha2 => {
            let gang = spec.scheduling_policy.as_ref().and_then(|policy| policy.gang.as_ref());
            (number(gang.map(|gang| gang.min_count)), BTreeMap::new())
        }
    };
    let succeeded = number(status.succeeded);
    let together = parts.values().fold(0, |sum: usize, pods| sum.saturating_add(*pods));
    let too_much = parts.len() > PARTS_MAX || parts.keys().any(|part| part.len() > NAME_BYTES_MAX);
    // Volcano has its tasks' numbers count only where the minimum has room for all of them. Of pods that have done their
    // work nobody says which part they were.
    let alone = too_much || succeeded > 0 || (api == PodGroupApi::Volcano && pods < together);
    let parts = if alone { BTreeMap::new() } else { parts };
    Minimum::Pods(Need::new(pods.saturating_sub(succeeded).max(1), parts).of_all())
}

/// How many pods of a PodGroup of KAI's start together, and how many of which subgroups. Whatever has subgroups wants
/// all of them, or `minSubGroup` of them. Which ones nobody says then: as many pods count as the smallest of them want.
fn of_kai(spec: &PodGroupSpec) -> (usize, BTreeMap<String, usize>) {
    // A name stands for one subgroup, so that whatever has a subgroup as a part is a tree.
    let all: BTreeMap<&str, &SubGroup> =
        spec.sub_groups.iter().flatten().map(|one| (one.name.as_str(), one)).collect();
    let mut below: BTreeMap<Option<&str>, Vec<&str>> = BTreeMap::new();
    for (name, one) in &all {
        below.entry(one.parent.as_deref()).or_default().push(*name);
    }
    // Each behind what it is a part of, and whether it is wanted whatever becomes of others.
    let mut order = vec![(None, true)];
    let mut next = 0;
    while let Some((of, wanted)) = order.get(next).copied() {
        next += 1;
        let parts = below.get(&of).map_or(&[][..], Vec::as_slice);
        let wanted = wanted && enough(spec, &all, of) >= parts.len();
        order.extend(parts.iter().map(|part| (Some(*part), wanted)));
    }
    let (mut counts, mut parts) = (BTreeMap::new(), BTreeMap::new());
    for (of, wanted) in order.into_iter().rev() {
        let count = match (below.get(&of), of.and_then(|name| all.get(name))) {
            (None, Some(leaf)) => {
                let pods = number(leaf.min_member);
                if wanted {
                    parts.insert(leaf.name.clone(), pods);
                }
                pods
            }
            (inner, _) => {
                let inner = inner.into_iter().flatten();
                let mut inner: Vec<usize> =
                    inner.filter_map(|part| counts.get(&Some(*part)).copied()).collect();
                inner.sort_unstable();
                inner.truncate(enough(spec, &all, of));
                inner.into_iter().fold(0, usize::saturating_add)
            }
        };
        counts.insert(of, count);
    }
    (number(spec.min_member).max(counts.get(&None).copied().unwrap_or(0)), parts)
}

/// How many of its subgroups a subgroup of KAI's wants, or the PodGroup itself.
fn enough(spec: &PodGroupSpec, all: &BTreeMap<&str, &SubGroup>, of: Option<&str>) -> usize {
    let said = match of {
        Some(name) => all.get(name).and_then(|one| one.min_sub_group),
        None => spec.min_sub_group,
    };
    said.map_or(usize::MAX, |said| number(Some(said)))
}

/// Not below zero.
fn number(pods: Option<i64>) -> usize {
    pods.and_then(|pods| usize::try_from(pods).ok()).unwrap_or(0)
}

/// Why its queue does not let it start.
fn kept_out(status: &PodGroupStatus) -> Option<String> {
    let holds = status.scheduling_conditions.iter().flatten();
    let mut reasons = holds
        .filter(|one| one.status.as_deref() == Some("True"))
        .flat_map(|one| one.reasons.iter().flatten());
    let found = reasons.find(|one| one.reason.as_deref().is_some_and(|reason| KEPT_OUT.contains(&reason)))?;
    let reason = found.reason.as_deref().unwrap_or_default();
    let message = found.message.as_deref().unwrap_or_default();
    let message = &message[..message.floor_char_boundary(WORDS_BYTES_MAX.min(message.len()))];
    Some(format!("{reason}: {message}"))
}
