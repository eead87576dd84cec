//! The decision for a pod, or for all pods of a gang.

use std::cmp::Reverse;

use super::ask::{PodAsk, Shape};
use super::explain::{Explanation, Shortage, Skipped, explain};
use super::fit::placement;
use super::index::Index;
use super::node::Placement;
use super::score::{DOES_NOT_FIT, Policy, rate};

/// Where the pods go, in the order in which they were asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    pub placements: Vec<Placement>,
}

/// Chooses node and GPUs for each pod: all pods, or none. Whoever acts on it calls [`Index::apply`]; the index
/// itself stays as it is, save for scores that it keeps.
///
/// A single pod is placed wherever there is a place for it. Pods of a gang are placed one after another, the
/// largest first: a gang that only fits in a cleverer order is refused.
///
/// # Errors
/// A pod does not fit: why not, with numbers, as of the pods placed before it. Or [`Shortage::Unsearched`].
pub fn decide(index: &mut Index, pods: &[PodAsk], policy: Policy) -> Result<Decision, Explanation> {
    let why = |index: &mut Index, pod: &PodAsk, gang, end| match end {
        End::Searched => explain(index, pod, gang),
        End::Spent => unsearched(pod, gang),
    };
    all(index, pods, policy, why).map(|placements| Decision { placements })
}

/// Why it was not searched to its end.
fn unsearched(pod: &PodAsk, gang: (usize, usize)) -> Explanation {
    let shortage = Shortage::Unsearched { wants: pod.shape.wants.len() };
    Explanation { gang, shortage, skipped: Skipped::default() }
}

/// How a decision has ended that found no place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Searched,
    /// What was allowed was spent before that.
    Spent,
}

/// The same without an explanation, which costs more than the decision. [`Index::spent`] says whether it was searched to
/// its end.
pub fn places(index: &mut Index, pods: &[PodAsk], policy: Policy) -> Option<Vec<Placement>> {
    all(index, pods, policy, |_, _, _, _| ()).ok()
}

/// `why`: of the pod that does not fit, when so many of all are placed.
fn all<E>(
    index: &mut Index,
    pods: &[PodAsk],
    policy: Policy,
    why: impl Fn(&mut Index, &PodAsk, (usize, usize), End) -> E,
) -> Result<Vec<Placement>, E> {
    if let [pod] = pods {
        let found = place(index, pod, policy).map(|(_, placement)| placement);
        return Ok(vec![found.map_err(|end| why(index, pod, (0, 1), end))?]);
    }
    let order = in_order(index, pods);
    let mut placed: Vec<(usize, usize, Placement)> = Vec::with_capacity(pods.len());
    let mut refused = None;
    for at in order {
        let goes_on = placed.is_empty() || index.score_tables.choices.is_open();
        let found = if goes_on { place(index, &pods[at], policy) } else { Err(End::Spent) };
        match found {
            Ok((id, placement)) => {
                index.nodes.take(id, &placement);
                placed.push((at, id, placement));
            }
            Err(end) => {
                refused = Some(why(index, &pods[at], (placed.len(), pods.len()), end));
                break;
            }
        }
    }
    for (_, id, placement) in &placed {
        index.nodes.give(*id, placement);
    }
    placed.sort_by_key(|(at, ..)| *at);
    let placements = placed.into_iter().map(|(.., placement)| placement).collect();
    refused.map_or(Ok(placements), Err)
}

/// In which order pods of a gang are placed: the largest first.
pub fn in_order(index: &Index, pods: &[PodAsk]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..pods.len()).collect();
    let largest = index.nodes.classes.iter().map(|class| class.memory_mib).max().unwrap_or(0);
    let part = |shape: &Shape| shape.wants.iter().map(|want| want.part.mib(largest)).max();
    let size = |pod: &PodAsk| (pod.shape.gpus(), part(&pod.shape), pod.shape.cpu_milli);
    order.sort_by_key(|at| Reverse(size(&pods[*at])));
    order
}

/// The best place for one pod, and the number of its node.
fn place(index: &mut Index, pod: &PodAsk, policy: Policy) -> Result<(usize, Placement), End> {
    let Index { nodes, workload, score_tables, .. } = index;
    let (table, scratch) = score_tables.get(nodes, workload, policy, &pod.shape);
    if !table.is_whole(nodes) {
        return Err(End::Spent);
    }
    let name = |id: usize| nodes.all[id].as_ref().map(|node| &node.name);
    let best = table.best(|id| name(id).is_some_and(|name| pod.nodes.allow(name)));
    let found = best.and_then(|id| {
        let node = nodes.all[id].as_ref()?;
        let fits = rate(policy, node, &table.terms, &workload.targets, scratch) != DOES_NOT_FIT;
        fits.then(|| (id, placement(&pod.shape, &table.terms, node, &scratch.picked)))
    });
    let ticks = scratch.tried.ticks;
    score_tables.choices.pay(ticks);
    found.ok_or(End::Searched)
}
