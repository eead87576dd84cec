//! What is done for a unit that finds no room, or why nobody ends for it: for people who ask. Nothing is begun.

use std::collections::{BTreeMap, BTreeSet};

use crate::allocate::Placement;
use crate::controller::Moment;
use crate::controller::core::Core;
use crate::controller::preempt::VICTIMS_MAX;
use crate::controller::purse::BESIDE;
use crate::controller::queue::Turn;
use crate::controller::steps::preempting::search::{Budgets, Nobody, VictimSearch, VictimsFound};
use crate::controller::steps::preempting::{TOGETHER_MAX, Unable, kept_words};
use crate::controller::view::{BudgetGuard, Pod};
use crate::model::claim::PodRef;
use crate::model::names::{NodeName, PodUid};

/// What looking for pods that could end may cost.
pub(super) const TICKS: u64 = BESIDE;
/// Pods that are named in a row.
const NAMES_MAX: usize = 8;

/// What becomes of preemption for a unit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Prospect {
    /// These pods end. `then`: in words, what it has of that.
    Ends {
        node: NodeName,
        pods: Vec<PodRef>,
        then: String,
    },
    /// kube-scheduler ends pods there: its share is placed.
    Scheduler {
        node: NodeName,
    },
    /// What ends anyway is enough.
    Soon {
        node: NodeName,
    },
    /// A whole GPU is free there, or on its way back to kube-scheduler.
    Free {
        node: NodeName,
    },
    /// The controller has nobody end for anybody.
    Off,
    /// A pod of it has `preemptionPolicy: Never`.
    Never {
        pod: PodRef,
    },
    NotTried {
        pod: PodRef,
    },
    /// By its scheduler's words it waits for something else than room.
    WaitsForOther {
        pod: PodRef,
    },
    /// More pods start together than others end for.
    TooMany {
        pods: usize,
    },
    /// So many pods would have to end on the node where the least is lost.
    Victims {
        node: NodeName,
        pods: usize,
    },
    /// Pods of lower priority make room on the node, and these budgets keep them.
    Budgets {
        node: NodeName,
        pods: Vec<PodRef>,
        budgets: Vec<String>,
    },
    /// Its namespace may not have more, in words.
    Bound(String),
    /// Only CPU, memory or the number of pods lacks on the node, and kube-scheduler preempts nobody there, since the other
    /// node has the room.
    OtherNode {
        node: NodeName,
        other: NodeName,
    },
    /// No pods of lower priority make room on one node. `any`: there are some with shares.
    Nobody {
        any: bool,
    },
    /// Looking at all nodes would cost more than it may.
    Spent,
}

impl Prospect {
    /// One word for programs.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Ends { .. } => "ends",
            Self::Scheduler { .. } => "scheduler-preempts",
            Self::Soon { .. } => "ends-anyway",
            Self::Free { .. } => "free",
            Self::Off => "off",
            Self::Never { .. } => "never",
            Self::NotTried { .. } => "not-tried",
            Self::WaitsForOther { .. } => "waits-for-other",
            Self::TooMany { .. } => "too-many-together",
            Self::Victims { .. } => "too-many",
            Self::Budgets { .. } => "budget",
            Self::Bound(_) => "namespace-bound",
            Self::OtherNode { .. } => "other-nodes",
            Self::Nobody { .. } => "nobody",
            Self::Spent => "unknown",
        }
    }

    /// Where pods end, or would.
    pub fn node(&self) -> Option<&NodeName> {
        match self {
            Self::Ends { node, .. }
            | Self::Scheduler { node }
            | Self::Soon { node }
            | Self::Free { node }
            | Self::Victims { node, .. }
            | Self::OtherNode { node, .. }
            | Self::Budgets { node, .. } => Some(node),
            _ => None,
        }
    }

    /// Pods that end, or that budgets keep.
    pub fn pods(&self) -> &[PodRef] {
        match self {
            Self::Ends { pods, .. } | Self::Budgets { pods, .. } => pods,
            _ => &[],
        }
    }

    /// PodDisruptionBudgets that are in the way, by namespace and name.
    pub fn budgets(&self) -> &[String] {
        match self {
            Self::Budgets { budgets, .. } => budgets,
            _ => &[],
        }
    }
}

impl std::fmt::Display for Prospect {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Ends { node, pods, then } => {
                let some = if pods.len() == 1 { "pod" } else { "pods" };
                let (count, names) = (pods.len(), named(pods));
                write!(
                    f,
                    "the controller ends {count} {some} of lower priority for it on node {node}: {names}; "
                )?;
                return f.write_str(then);
            }
            Self::Scheduler { node } => {
                return write!(
                    f,
                    "on node {node} only CPU, memory or the number of pods lacks, and pods of lower priority have it: the \
                     controller places the share there, and kube-scheduler preempts them"
                );
            }
            _ => f.write_str("nobody ends for it: ")?,
        }
        match self {
            Self::Ends { .. } | Self::Scheduler { .. } => Ok(()),
            Self::Soon { node } => write!(f, "what is ending on node {node} makes room"),
            Self::Free { node } => write!(f, "node {node} has a GPU that is free, or is given back just now"),
            Self::Off => f.write_str("preemption is off (the controller's --preemption)"),
            Self::Never { pod } => write!(f, "pod {} has preemptionPolicy: Never", pod.name),
            Self::NotTried { pod } => {
                write!(f, "the scheduler of pod {} has not tried it in vain yet (PodScheduled)", pod.name)
            }
            Self::WaitsForOther { pod } => {
                write!(
                    f,
                    "by what kube-scheduler says, pod {} waits for something else than a GPU, CPU or memory (message of \
                     PodScheduled)",
                    pod.name
                )
            }
            Self::TooMany { pods } => {
                write!(f, "{pods} pods start together; others end for {TOGETHER_MAX} at most")
            }
            Self::Victims { node, pods } => {
                write!(f, "{pods} pods would have to end on node {node}; {VICTIMS_MAX} are the most")
            }
            Self::Budgets { node, pods, budgets } => {
                let some = if budgets.len() == 1 { "keeps" } else { "keep" };
                let (names, pods) = (budgets.join(", "), named(pods));
                write!(f, "PodDisruptionBudget {names} {some} pods of lower priority on node {node}: {pods}")
            }
            Self::Bound(words) => f.write_str(words),
            Self::OtherNode { node, other } => write!(
                f,
                "on node {node} only CPU, memory or the number of pods lacks, and pods of lower priority have it, but \
                 kube-scheduler preempts nobody there as long as another node has the room, such as {other}, with or \
                 without GPUs: give the pod a nodeSelector that no such node meets"
            ),
            Self::Nobody { any: false } => f.write_str("no pod of lower priority has a share"),
            Self::Nobody { any: true } => {
                f.write_str("on no node that takes it do pods of lower priority make room by ending")
            }
            Self::Spent => f.write_str("looking for pods that could cost more than it may"),
        }
    }
}

fn named(pods: &[PodRef]) -> String {
    let one = |pod: &PodRef| format!("{}/{}", pod.namespace, pod.name);
    let names: Vec<String> = pods.iter().take(NAMES_MAX).map(one).collect();
    match pods.len().saturating_sub(NAMES_MAX) {
        0 => names.join(", "),
        more => format!("{} and {more} more", names.join(", ")),
    }
}

impl Core {
    /// What would be done for a unit that was refused for want of room. None: it is of the lowest priority that there is,
    /// or it does not wait for room.
    pub(in crate::controller) fn prospect(&mut self, turn: &Turn, now: Moment) -> Option<Prospect> {
        let pods = || turn.pods.iter().filter_map(|uid| self.view.pod(uid));
        let priority = pods().map(|pod| pod.standing.priority).min()?;
        self.refresh_holders();
        let any = self.reserves.evictions.preempting.holders.least(priority).next().is_some();
        if !any {
            let nobody = (priority > 0).then_some(Prospect::Nobody { any });
            return self.prospect_without_shares(turn, now).or(nobody);
        }
        if !self.rules.preemption {
            return Some(Prospect::Off);
        }
        let asker = match self.asker(turn) {
            Ok(asker) => asker,
            Err(Unable::Gone) => return None,
            Err(Unable::TooMany(pods)) => return Some(Prospect::TooMany { pods }),
            Err(Unable::Never(pod)) => return Some(Prospect::Never { pod }),
            Err(Unable::NotTried(pod)) => return Some(Prospect::NotTried { pod }),
            Err(Unable::WaitsForOther(pod)) => return Some(Prospect::WaitsForOther { pod }),
        };
        let wanted = self.wanted(turn, now)?;
        let (nodes, ticks, without) = (&wanted.nodes[..], TICKS, BTreeSet::new());
        let budgets = Budgets::Kept;
        let (unit, without) = (Some(&turn.key), &without);
        let mut look =
            VictimSearch { nodes, asker: &asker, unit, beside: &[], budgets, without, ticks, from: 0, now };
        self.capacity.index.allow(ticks);
        let (found, _) = self.find_with_places(&wanted, &look);
        let kept = |place: &Placement| format!("it is kept {}", kept_words(place));
        let prospect = match found {
            Ok(found) => self.prospect_for(found, look.budgets, kept),
            Err(nobody) => {
                self.capacity.index.allow(ticks);
                if let Some((node, other)) = self.room_beside_others(&wanted, &look) {
                    self.capacity.index.allow(u64::MAX);
                    return Some(Prospect::OtherNode { node, other });
                }
                look.budgets = Budgets::Passed;
                match (self.find_with_places(&wanted, &look).0, nobody) {
                    (Ok(found @ VictimsFound::Victims { .. }), _) => {
                        self.prospect_for(found, look.budgets, kept)
                    }
                    (Err(Nobody::Until(_)), _) | (_, Nobody::Until(_)) => Prospect::Spent,
                    (Ok(_) | Err(Nobody::Anywhere), Nobody::Anywhere) => Prospect::Nobody { any },
                }
            }
        };
        // What others are told is not bounded by what this has cost.
        self.capacity.index.allow(u64::MAX);
        Some(prospect)
    }

    /// No pod of lower priority has a share. Those that have CPU, memory or places among the pods are kube-scheduler's to
    /// preempt.
    fn prospect_without_shares(&mut self, turn: &Turn, now: Moment) -> Option<Prospect> {
        let asker = self.asker(turn).ok().filter(|_| self.rules.preemption)?;
        let wanted = self.wanted(turn, now)?;
        let (nodes, without) = (&wanted.nodes[..], BTreeSet::new());
        let budgets = Budgets::Kept;
        let (unit, without, ticks) = (Some(&turn.key), &without, TICKS);
        let look =
            VictimSearch { nodes, asker: &asker, unit, beside: &[], budgets, without, ticks, from: 0, now };
        self.capacity.index.allow(TICKS);
        let prospect = match self.find(&wanted, &look) {
            Ok(VictimsFound::Room { place, .. }) => Some(Prospect::Scheduler { node: place.node }),
            _ => {
                let beside = self.room_beside_others(&wanted, &look);
                beside.map(|(node, other)| Prospect::OtherNode { node, other })
            }
        };
        self.capacity.index.allow(u64::MAX);
        prospect
    }

    /// What a search has found.
    pub(super) fn prospect_for(
        &self,
        found: VictimsFound,
        budgets: Budgets,
        then: impl FnOnce(&Placement) -> String,
    ) -> Prospect {
        match found {
            VictimsFound::Soon(node) => Prospect::Soon { node },
            VictimsFound::Free(node) => Prospect::Free { node },
            VictimsFound::Bound(words) => Prospect::Bound(words),
            VictimsFound::Room { place, .. } => Prospect::Scheduler { node: place.node },
            VictimsFound::Victims { place, victims } if budgets == Budgets::Passed => {
                self.kept_by_budgets(&place, &victims)
            }
            VictimsFound::Victims { place, victims } if victims.len() > VICTIMS_MAX => {
                Prospect::Victims { node: place.node, pods: victims.len() }
            }
            VictimsFound::Victims { place, victims } => {
                Prospect::Ends { pods: self.refs(&victims), then: then(&place), node: place.node }
            }
        }
    }

    fn refs(&self, pods: &[PodUid]) -> Vec<PodRef> {
        pods.iter().filter_map(|uid| self.view.pod(uid)).map(|pod| pod.at.clone()).collect()
    }

    /// Which budgets keep these pods, or one of them.
    fn kept_by_budgets(&self, place: &Placement, victims: &[PodUid]) -> Prospect {
        let mut asked: BTreeMap<String, (u32, u32)> = BTreeMap::new();
        let mut names: BTreeSet<String> = BTreeSet::new();
        let mut kept = Vec::new();
        let pods: Vec<&Pod> = victims.iter().filter_map(|uid| self.view.pod(uid)).collect();
        for pod in pods {
            match self.view.budgets_of(pod).guard {
                BudgetGuard::By(budgets) if budgets.is_empty() => continue,
                // Of several the API server lets no pod go.
                BudgetGuard::By(budgets) if budgets.len() > 1 => {
                    names.extend(budgets.iter().map(|(name, _)| (*name).to_owned()));
                }
                BudgetGuard::By(budgets) => {
                    for (name, allowed) in budgets {
                        asked.entry(name.to_owned()).or_insert((0, allowed)).0 += 1;
                    }
                }
                BudgetGuard::Stays => drop(names.insert(format!("one of namespace {}", pod.at.namespace))),
            }
            kept.push(pod.at.clone());
        }
        let short = asked.into_iter().filter(|(_, (count, allowed))| count > allowed);
        names.extend(short.map(|(name, _)| name));
        Prospect::Budgets { node: place.node.clone(), pods: kept, budgets: names.into_iter().collect() }
    }
}
