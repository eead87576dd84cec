//! Scores that are kept: one board per shape and policy, one score per node. A decision renews the scores of
//! nodes that have changed since the board was last looked at, and takes the best.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::ask::Shape;
use super::choice::Choices;
use super::fit::Terms;
use super::fragment::Workload;
use super::index::Nodes;
use super::node::Node;
use super::score::{NO, Policy, Score, Scratch, rate};
use super::search::STEP_TICKS;

/// Scores of all boards together: bounds the memory, 16 bytes each.
const SCORES_MAX: usize = 1 << 20;
/// Boards that are kept in any case.
const BOARDS_MIN: usize = 16;
/// Nodes of which the best is known.
const BLOCK: usize = 64;

/// Changes that a board may miss before others' decisions bring it forward, a little each: else the pod that comes
/// after a long while pays for all of them.
const MISSED_MAX: u64 = 128;
/// Scores that a decision renews for boards of others.
const AHEAD_SCORES: usize = 64;
/// Of a score, in ticks of [`crate::select::TICKS_PER_UNIT`].
const SCORE_TICKS: u64 = 15;
/// A board that was not used for so many decisions per board in use is left alone.
const IDLE_MAX: u64 = 8;

type Key = (Policy, Shape);

#[derive(Debug, Default)]
pub(super) struct Boards {
    kept: BTreeMap<Arc<Key>, Board>,
    /// How far boards in use have followed: the furthest behind first.
    in_use: BTreeSet<(u64, Arc<Key>)>,
    uses: u64,
    pub choices: Choices,
    pub scratch: Scratch,
}

#[derive(Debug)]
pub(super) struct Board {
    pub terms: Terms,
    scores: Vec<Score>,
    /// The best of each block, and whether it must be looked for again.
    best: Vec<(Score, bool)>,
    /// The first change that was not followed.
    at: u64,
    /// Of the targets.
    epoch: u64,
    used: u64,
}

impl Boards {
    pub fn with(choices: Choices) -> Self {
        Self { choices, ..Self::default() }
    }

    /// The board for a shape, up to date.
    pub fn get(
        &mut self,
        nodes: &Nodes,
        workload: &Workload,
        policy: Policy,
        shape: &Shape,
    ) -> (&Board, &mut Scratch) {
        self.uses += 1;
        self.bring_forward(nodes, workload);
        let key = Arc::new((policy, shape.clone()));
        if !self.kept.contains_key(&key) {
            self.make_room(nodes);
        }
        let Self { kept, in_use, choices, scratch, .. } = self;
        let board = kept.entry(Arc::clone(&key)).or_insert_with(|| Board::empty(shape, nodes, choices));
        let (known, at) = (board.used > 0, board.at);
        if board.terms.outdated(nodes) {
            *board = Board::empty(shape, nodes, choices);
        }
        board.used = self.uses;
        let was_complete = board.terms.is_complete();
        board.terms.follow(shape, nodes, choices);
        let scores = if !was_complete || board.stale(nodes, workload, policy) {
            board.renew(nodes, workload, policy, scratch);
            nodes.all.len()
        } else {
            board.follow(nodes, workload, policy, scratch, usize::MAX)
        };
        choices.pay(SCORE_TICKS * scores as u64);
        choices.pay(STEP_TICKS * u64::from(std::mem::take(&mut scratch.tried)));
        // A shape that came once may never come again.
        if known {
            in_use.remove(&(at, Arc::clone(&key)));
            in_use.insert((board.at, key));
        }
        (board, scratch)
    }

    fn make_room(&mut self, nodes: &Nodes) {
        let most = BOARDS_MIN.max(SCORES_MAX / nodes.all.len().max(1));
        if self.kept.len() >= most {
            let oldest = self.kept.iter().min_by_key(|(_, board)| board.used);
            let oldest = oldest.map(|(key, board)| (board.at, Arc::clone(key)));
            if let Some(oldest) = oldest {
                self.in_use.remove(&oldest);
                self.kept.remove(&oldest.1);
            }
        }
    }

    /// Lets boards that are in use, and have missed much, follow a little.
    fn bring_forward(&mut self, nodes: &Nodes, workload: &Workload) {
        let Self { kept, in_use, uses, choices, scratch } = self;
        let idle_max = IDLE_MAX * in_use.len() as u64;
        let mut left = AHEAD_SCORES;
        while left > 0 && in_use.first().is_some_and(|(at, _)| nodes.now() - at >= MISSED_MAX) {
            let Some((_, key)) = in_use.pop_first() else { return };
            let (policy, shape) = &*key;
            // Others are left alone until they are used again.
            let can_follow = |board: &&mut Board| {
                *uses - board.used <= idle_max
                    && nodes.since(board.at).is_some()
                    && !board.terms.outdated(nodes)
                    && !board.stale(nodes, workload, *policy)
            };
            let Some(board) = kept.get_mut(&key).filter(can_follow) else { continue };
            board.terms.follow(shape, nodes, choices);
            if !board.terms.is_complete() {
                continue;
            }
            left -= board.follow(nodes, workload, *policy, scratch, left);
            in_use.insert((board.at, key));
        }
    }
}

impl Board {
    fn empty(shape: &Shape, nodes: &Nodes, choices: &mut Choices) -> Self {
        let terms = Terms::new(shape, nodes, choices);
        Self { terms, scores: Vec::new(), best: Vec::new(), at: 0, epoch: 0, used: 0 }
    }

    /// Not one score can be kept.
    fn stale(&self, nodes: &Nodes, workload: &Workload, policy: Policy) -> bool {
        self.scores.len() != nodes.all.len()
            || policy == Policy::Fragmentation && self.epoch != workload.targets.epoch
    }

    fn renew(&mut self, nodes: &Nodes, workload: &Workload, policy: Policy, scratch: &mut Scratch) {
        self.scores.clear();
        self.scores.extend(nodes.all.iter().map(|node| score(node, &self.terms, workload, policy, scratch)));
        self.best.clear();
        self.best.extend(self.scores.chunks(BLOCK).map(|scores| (least(scores), false)));
        (self.at, self.epoch) = (nodes.now(), workload.targets.epoch);
    }

    /// Renews the scores of nodes that changed, the earliest changes first, until so many are renewed; how many were.
    fn follow(
        &mut self,
        nodes: &Nodes,
        workload: &Workload,
        policy: Policy,
        scratch: &mut Scratch,
        most: usize,
    ) -> usize {
        let mut changed = std::mem::take(&mut scratch.changed);
        changed.clear();
        let changed_at = |id: usize| nodes.all[id].as_ref().map(|node| node.changed_at);
        if let Some(changes) = nodes.since(self.at) {
            self.at = nodes.now();
            for (number, id) in changes {
                if changed.len() >= most {
                    self.at = number;
                    break;
                }
                // Of several changes of a node only the last counts.
                if changed_at(id).is_none_or(|at| at == number) {
                    changed.push((id, self.scores[id]));
                }
            }
        } else {
            let missed = (0..nodes.all.len()).filter(|id| changed_at(*id).is_none_or(|at| at >= self.at));
            changed.extend(missed.map(|id| (id, self.scores[id])));
            self.at = nodes.now();
        }
        // Old scores have been read beforehand: so memory is waited for once, not at each node.
        for &(id, old) in &changed {
            self.put(id, old, score(&nodes.all[id], &self.terms, workload, policy, scratch));
        }
        for (best, scores) in self.best.iter_mut().zip(self.scores.chunks(BLOCK)).filter(|(best, _)| best.1) {
            *best = (least(scores), false);
        }
        scratch.changed = changed;
        scratch.changed.len()
    }

    fn put(&mut self, id: usize, old: Score, score: Score) {
        self.scores[id] = score;
        let (best, unsure) = &mut self.best[id / BLOCK];
        *unsure |= old == *best && score > old;
        *best = score.min(*best);
    }

    /// The best node among those allowed.
    pub fn best(&self, allowed: impl Fn(usize) -> bool) -> Option<usize> {
        let mut found = (NO, None);
        for (block, (best, _)) in self.best.iter().enumerate() {
            if *best >= found.0 {
                continue;
            }
            for (at, score) in self.scores.iter().enumerate().skip(block * BLOCK).take(BLOCK) {
                if *score < found.0 && allowed(at) {
                    found = (*score, Some(at));
                }
            }
        }
        found.1
    }
}

fn score(
    node: &Option<Node>,
    terms: &Terms,
    workload: &Workload,
    policy: Policy,
    scratch: &mut Scratch,
) -> Score {
    node.as_ref().map_or(NO, |node| rate(policy, node, terms, &workload.targets, scratch))
}

fn least(scores: &[Score]) -> Score {
    scores.iter().copied().min().unwrap_or(NO)
}
