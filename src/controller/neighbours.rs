//! Which nodes other pods keep a pod off: where pods are that its terms are about, or whose terms are about it.
//!
//! Nothing but anti-affinity of pods that have a place is followed from the beginning. From the first time on that a pod
//! waits whose own terms are about others, all pods that have a place are: some 70 bytes each, beside its labels. How many
//! pods a rule is about on each node is counted once and then kept up with what changes ([`LOG_MAX`]), for as long as the
//! rule is remembered ([`RULES_MAX`]).

mod avoiders;
mod rules;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use crate::controller::view::ClusterView;
use crate::feasible::{Count, Demands, Judged, Namespaces, Node, PodLabels, Terms};
use crate::model::names::{NodeName, PodUid};
use avoiders::Avoiders;
use rules::NeighbourRule;

/// Changes that are remembered. Who has not looked since before that counts anew.
const LOG_MAX: usize = 4096;
/// Rules that are remembered, and those that pods of one namespace asked for. With more those of the namespace that has
/// most are forgotten.
const RULES_MAX: usize = 128;
const RULES_OF_NAMESPACE_MAX: usize = 32;

/// Of looking at one pod that a rule may be about, of each comparison, and of a node, in ticks of
/// [`crate::select::TICKS_PER_UNIT`].
const POD_TICKS: u64 = 5;
const COMPARE_TICKS: u64 = 10;
const NODE_TICKS: u64 = 10;
/// Of noting that a node is ruled out, in the same.
const KEPT_TICKS: u64 = 30;

/// Where a pod is, or is to be, and as whom.
#[derive(Debug, Clone, PartialEq)]
pub struct Neighbour {
    pub node: NodeName,
    pub labels: Arc<PodLabels>,
    pub is_bound: bool,
    pub is_ending: bool,
}

/// Who is to be placed.
pub struct Asker<'a> {
    pub namespace: &'a str,
    pub labels: &'a PodLabels,
    pub terms: Option<&'a Arc<Terms>>,
    pub demands: &'a Arc<Demands>,
    /// It starts together with others.
    pub together: bool,
}

#[derive(Debug)]
struct NeighbourChange {
    namespace: Arc<str>,
    pod: Neighbour,
    is_there: bool,
}

type Counts = BTreeMap<NodeName, Count>;

/// A rule, and which nodes it rules out.
#[derive(Debug, Clone)]
pub struct Ruled {
    pub judged: Arc<Judged>,
    pub nodes: Arc<BTreeSet<NodeName>>,
    /// As the nodes were then.
    seen: u64,
}

/// What is counted for a rule.
#[derive(Debug)]
struct Counted {
    /// Whose pods asked first.
    namespace: String,
    counts: Counts,
    /// How many changes are counted.
    upto: u64,
    ruled: Option<Ruled>,
}

#[derive(Debug, Default)]
pub struct Neighbours {
    /// By namespace. None: nobody has asked yet.
    all: Option<BTreeMap<Arc<str>, BTreeMap<PodUid, Neighbour>>>,
    avoiders: Avoiders,
    log: VecDeque<NeighbourChange>,
    /// Changes that are no longer in it.
    forgotten: u64,
    rules: BTreeMap<NeighbourRule, Counted>,
    /// How often nodes have changed.
    nodes: u64,
    stirred: Stirred,
}

/// Namespaces in which pods were bound, and have left a place or what a term is about, since this was last asked. That a
/// pod is placed lets no other find room that it did not find before.
#[derive(Debug, Default)]
pub struct Stirred {
    came: BTreeSet<Arc<str>>,
    left: BTreeSet<Arc<str>>,
}

impl Stirred {
    /// A pod with these terms may find room that it did not find before.
    pub fn concerns(&self, terms: &Terms) -> bool {
        let in_these = |namespaces: &Namespaces, all: &BTreeSet<Arc<str>>| match namespaces {
            Namespaces::All => !all.is_empty(),
            Namespaces::These(names) => names.iter().any(|name| all.contains(&**name)),
        };
        let in_either = |whom: &Namespaces| in_these(whom, &self.came) || in_these(whom, &self.left);
        terms.near.iter().any(|term| in_either(&term.whom.namespaces))
            || terms.apart.iter().any(|term| in_these(&term.whom.namespaces, &self.left))
            || terms.spread.iter().any(|one| in_either(&one.whom.namespaces))
    }

    pub fn is_none(&self) -> bool {
        self.came.is_empty() && self.left.is_empty()
    }
}

impl Neighbours {
    /// Those that have a place, where they are known.
    #[cfg(test)]
    pub fn all(&self) -> Option<Vec<(&str, &PodUid, &Neighbour)>> {
        assert!(self.all.iter().flatten().all(|(_, pods)| !pods.is_empty()), "a namespace of nobody is kept");
        let all = self.all.as_ref()?.iter();
        Some(all.flat_map(|(name, pods)| pods.iter().map(move |(uid, pod)| (&**name, uid, pod))).collect())
    }

    /// Pods that have a place are known.
    pub fn is_awake(&self) -> bool {
        self.all.is_some()
    }

    /// From now on all are known that have a place; these have one now.
    pub fn wake<'a>(&mut self, pods: impl Iterator<Item = (&'a str, &'a PodUid, Neighbour)>) {
        let mut all = BTreeMap::<Arc<str>, BTreeMap<PodUid, Neighbour>>::new();
        for (namespace, pod, neighbour) in pods {
            let of_namespace = match all.get_mut(namespace) {
                Some(known) => known,
                None => all.entry(namespace.into()).or_default(),
            };
            of_namespace.insert(pod.clone(), neighbour);
        }
        self.all = Some(all);
    }

    /// The pod is there now, in place of where it was. `terms`: what it requires of others.
    pub fn set(
        &mut self,
        namespace: &str,
        pod: &PodUid,
        place: Option<Neighbour>,
        terms: Option<&Arc<Terms>>,
    ) {
        let (came, left) = self.put(namespace, pod, place, terms);
        if let Some((name, _)) = self.all.as_ref().and_then(|all| all.get_key_value(namespace)) {
            self.stirred.came.extend(came.then(|| name.clone()));
            self.stirred.left.extend(left.then(|| name.clone()));
        } else if left {
            self.stirred.left.insert(namespace.into());
        }
    }

    /// As if the pod were there, until [`Self::set`] or this says otherwise: nobody is told.
    pub fn assume(
        &mut self,
        namespace: &str,
        pod: &PodUid,
        place: Option<Neighbour>,
        terms: Option<&Arc<Terms>>,
    ) {
        self.put(namespace, pod, place, terms);
    }

    /// Whether it has come somewhere, as one that is bound, and left.
    fn put(
        &mut self,
        namespace: &str,
        pod: &PodUid,
        place: Option<Neighbour>,
        terms: Option<&Arc<Terms>>,
    ) -> (bool, bool) {
        let terms = terms.filter(|terms| !terms.apart.is_empty());
        self.avoiders.set(namespace, pod, place.as_ref().zip(terms));
        self.note(namespace, pod, place)
    }

    /// Whether it has come somewhere, as one that is bound, and left.
    fn note(&mut self, namespace: &str, pod: &PodUid, place: Option<Neighbour>) -> (bool, bool) {
        let Some(all) = &mut self.all else { return (false, false) };
        let known = all.get(namespace).and_then(|pods| pods.get(pod));
        if known == place.as_ref() {
            return (false, false);
        }
        if !all.contains_key(namespace) {
            all.insert(namespace.into(), BTreeMap::new());
        }
        let Some((name, _)) = all.get_key_value(namespace) else { return (false, false) };
        let name = name.clone();
        let Some(pods) = all.get_mut(namespace) else { return (false, false) };
        let before = match &place {
            Some(place) => pods.insert(pod.clone(), place.clone()),
            None => pods.remove(pod),
        };
        if pods.is_empty() {
            all.remove(namespace);
        }
        let (came, left) = moved(before.as_ref(), place.as_ref());
        let left_one = before.map(|pod| NeighbourChange { namespace: name.clone(), pod, is_there: false });
        let came_one = place.map(|pod| NeighbourChange { namespace: name, pod, is_there: true });
        self.log.extend(left_one.into_iter().chain(came_one));
        while self.log.len() > LOG_MAX {
            self.log.pop_front();
            self.forgotten += 1;
        }
        (came, left)
    }

    /// Terms of pods that were not followed when they came to a place, as there were too many.
    pub fn take_unfollowed(&mut self) -> u64 {
        self.avoiders.take_unfollowed()
    }

    /// Once: there are such terms.
    pub fn has_unfollowed_to_tell(&mut self) -> bool {
        self.avoiders.has_unfollowed_to_tell()
    }

    /// A node has come, gone or changed.
    pub fn node_changed(&mut self) {
        self.nodes += 1;
    }

    /// What has happened since this was last asked.
    pub fn take_stirred(&mut self) -> Stirred {
        std::mem::take(&mut self.stirred)
    }

    /// What others have against the pod, and what it took to find out, in ticks. Those that rule nothing out are left out.
    pub fn of(&mut self, asker: &Asker<'_>, view: &ClusterView) -> (Vec<Ruled>, u64) {
        let mut ticks = 0;
        let mut found = Vec::new();
        for rule in NeighbourRule::of(asker) {
            found.push(self.ruled(rule, asker.namespace, view, &mut ticks));
        }
        let by_others = self.avoiders.judge(asker, view, &mut ticks);
        found.extend(by_others.into_iter().map(|judged| Ruled::of(judged, view, self.nodes, &mut ticks)));
        found.retain(|ruled| !ruled.nodes.is_empty());
        (found, ticks)
    }

    fn ruled(&mut self, rule: NeighbourRule, namespace: &str, view: &ClusterView, ticks: &mut u64) -> Ruled {
        let mut counted = match self.rules.remove(&rule) {
            Some(counted) if counted.upto >= self.forgotten => counted,
            _ => {
                self.make_room(namespace);
                *ticks += POD_TICKS * self.rules.len() as u64;
                self.counted(&rule, namespace, ticks)
            }
        };
        let from = usize::try_from(counted.upto - self.forgotten).unwrap_or(usize::MAX);
        let mut is_same = true;
        for change in self.log.iter().skip(from) {
            if !rule.looks_at(&change.namespace) {
                *ticks += POD_TICKS;
                continue;
            }
            *ticks += POD_TICKS + COMPARE_TICKS * rule.size();
            if rule.counts(&change.namespace, &change.pod) {
                is_same = false;
                match change.is_there {
                    true => add(&mut counted.counts, &change.pod.node, change.pod.is_bound),
                    false => take(&mut counted.counts, &change.pod.node, change.pod.is_bound),
                }
            }
        }
        counted.upto = self.forgotten + self.log.len() as u64;
        let known = counted.ruled.take().filter(|ruled| is_same && ruled.seen == self.nodes);
        let ruled = known.unwrap_or_else(|| {
            let judged = rule.judge(&counted.counts, view, ticks);
            Ruled::of(judged, view, self.nodes, ticks)
        });
        counted.ruled = Some(ruled.clone());
        self.rules.insert(rule, counted);
        ruled
    }

    /// Of all pods that have a place now.
    fn counted(&self, rule: &NeighbourRule, namespace: &str, ticks: &mut u64) -> Counted {
        let mut counts = Counts::new();
        let mut count = |name: &str, pods: &BTreeMap<PodUid, Neighbour>| {
            *ticks += (POD_TICKS + COMPARE_TICKS * rule.size()) * pods.len() as u64;
            for pod in pods.values().filter(|pod| rule.counts(name, pod)) {
                add(&mut counts, &pod.node, pod.is_bound);
            }
        };
        match (rule.namespaces(), &self.all) {
            (_, None) => {}
            (None, Some(all)) => all.iter().for_each(|(name, pods)| count(name, pods)),
            (Some(names), Some(all)) => {
                let known = names.iter().filter_map(|name| all.get_key_value(&**name));
                known.for_each(|(name, pods)| count(name, pods));
            }
        }
        let upto = self.forgotten + self.log.len() as u64;
        Counted { namespace: namespace.to_owned(), counts, upto, ruled: None }
    }

    /// Who asks for many rules has its own forgotten first.
    fn make_room(&mut self, namespace: &str) {
        let own = self.rules.values().filter(|counted| counted.namespace == namespace).count();
        if own >= RULES_OF_NAMESPACE_MAX {
            self.rules.retain(|_, counted| counted.namespace != namespace);
        }
        if self.rules.len() >= RULES_MAX {
            let mut of = BTreeMap::<&str, usize>::new();
            self.rules.values().for_each(|counted| *of.entry(&counted.namespace).or_default() += 1);
            let most = of.into_iter().max_by_key(|(_, rules)| *rules).map(|(name, _)| name.to_owned());
            self.rules.retain(|_, counted| most.as_ref() != Some(&counted.namespace));
        }
    }
}

impl Ruled {
    /// Of nodes with GPUs those that are ruled out.
    fn of(judged: Judged, view: &ClusterView, seen: u64, ticks: &mut u64) -> Self {
        let with_gpus = view.nodes().filter(|(_, state)| !state.gpus.is_empty());
        let mut looked = 0;
        let all = with_gpus.inspect(|_| looked += 1);
        let ruled_out =
            all.filter(|(_, state)| state.object.as_deref().is_some_and(|node| judged.rules_out(node)));
        let nodes: BTreeSet<NodeName> = ruled_out.map(|(name, _)| name.clone()).collect();
        *ticks += NODE_TICKS * looked + KEPT_TICKS * nodes.len() as u64;
        Self { judged: Arc::new(judged), nodes: Arc::new(nodes), seen }
    }
}

/// Whether others may find room since the pod has come, and since it has left.
fn moved(before: Option<&Neighbour>, now: Option<&Neighbour>) -> (bool, bool) {
    let is_same = |one: &Neighbour, other: &Neighbour| one.node == other.node && one.labels == other.labels;
    let was_bound = |now| before.is_some_and(|before| before.is_bound && is_same(before, now));
    let stays =
        |before: &Neighbour| now.is_some_and(|now| is_same(before, now) && before.is_ending == now.is_ending);
    let came = now.is_some_and(|now| now.is_bound && !was_bound(now));
    (came, before.is_some_and(|before| !stays(before)))
}

/// The nodes that are known, with what was counted there.
fn on<'a>(counts: &'a Counts, view: &'a ClusterView) -> impl Iterator<Item = (&'a Node, Count)> {
    counts.iter().filter_map(|(name, count)| Some((view.node(name)?.object.as_deref()?, *count)))
}

fn add(counts: &mut Counts, node: &NodeName, is_bound: bool) {
    let count = counts.entry(node.clone()).or_default();
    let of = if is_bound { &mut count.bound } else { &mut count.placed };
    *of = of.saturating_add(1);
}

fn take(counts: &mut Counts, node: &NodeName, is_bound: bool) {
    let Some(count) = counts.get_mut(node) else { return };
    let of = if is_bound { &mut count.bound } else { &mut count.placed };
    *of = of.saturating_sub(1);
    if count.is_none() {
        counts.remove(node);
    }
}
