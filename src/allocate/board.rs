//! Scores that are kept: one board per shape and policy, one score per node. A decision renews the scores of
//! nodes that have changed since the board was last looked at, and takes the best.

use std::collections::BTreeMap;

use super::ask::Shape;
use super::facts::Choices;
use super::fit::Terms;
use super::fragment::Workload;
use super::index::Nodes;
use super::node::Node;
use super::score::{NO, Policy, Score, Scratch, rate};

/// Scores of all boards together: bounds the memory, about 20 bytes each.
const SCORES_MAX: usize = 1 << 20;
/// Boards that are kept in any case.
const BOARDS_MIN: usize = 16;
/// Nodes of which the best is known.
const BLOCK: usize = 64;

#[derive(Debug, Default)]
pub(super) struct Boards {
    kept: BTreeMap<(Policy, Shape), Board>,
    uses: u64,
    pub choices: Choices,
    pub scratch: Scratch,
}

#[derive(Debug)]
pub(super) struct Board {
    pub terms: Terms,
    scores: Vec<Score>,
    /// The node's version that was scored.
    versions: Vec<u32>,
    /// The best of each block.
    best: Vec<Score>,
    /// As far as changes were followed.
    at: u64,
    /// Of the targets.
    epoch: u64,
    used: u64,
}

impl Boards {
    /// The board for a shape, up to date.
    pub fn get(
        &mut self,
        nodes: &Nodes,
        workload: &Workload,
        policy: Policy,
        shape: &Shape,
    ) -> (&Board, &mut Scratch) {
        self.uses += 1;
        let key = (policy, shape.clone());
        if !self.kept.contains_key(&key) {
            let most = BOARDS_MIN.max(SCORES_MAX / nodes.all.len().max(1));
            if self.kept.len() >= most {
                let oldest = self.kept.iter().min_by_key(|(_, board)| board.used);
                let oldest = oldest.map(|(key, _)| key.clone());
                oldest.and_then(|key| self.kept.remove(&key));
            }
        }
        let board = self.kept.entry(key).or_insert_with(|| Board::empty(shape, nodes, &mut self.choices));
        board.used = self.uses;
        if board.terms.outdated(nodes) {
            *board = Board { used: board.used, ..Board::empty(shape, nodes, &mut self.choices) };
        }
        board.terms.follow(shape, nodes, &mut self.choices);
        board.follow(nodes, workload, policy, &mut self.scratch);
        (board, &mut self.scratch)
    }
}

impl Board {
    fn empty(shape: &Shape, nodes: &Nodes, choices: &mut Choices) -> Self {
        let terms = Terms::new(shape, nodes, choices);
        let (scores, versions, best) = (Vec::new(), Vec::new(), Vec::new());
        Self { terms, scores, versions, best, at: 0, epoch: u64::MAX, used: 0 }
    }

    fn follow(&mut self, nodes: &Nodes, workload: &Workload, policy: Policy, scratch: &mut Scratch) {
        let stale = policy == Policy::Fragmentation && self.epoch != workload.epoch;
        let behind = nodes.now() - self.at;
        let grown = self.scores.len() != nodes.all.len();
        let mut score = |node: &Option<Node>, terms: &Terms| match node {
            Some(node) => rate(policy, node, terms, &workload.targets, scratch),
            None => NO,
        };
        let version = |node: &Option<Node>| node.as_ref().map_or(0, |node| node.version);
        if stale || grown || self.at < nodes.forgotten || behind >= nodes.all.len() as u64 {
            self.scores.clear();
            self.scores.extend(nodes.all.iter().map(|node| score(node, &self.terms)));
            self.versions.clear();
            self.versions.extend(nodes.all.iter().map(version));
            self.best.clear();
            self.best.extend(self.scores.chunks(BLOCK).map(least));
        } else {
            let from = (self.at - nodes.forgotten) as usize;
            for &id in &nodes.changed[from..] {
                let id = id as usize;
                let (node, now) = (&nodes.all[id], version(&nodes.all[id]));
                // A node that went leaves no version behind.
                if self.versions[id] == now && node.is_some() {
                    continue;
                }
                self.versions[id] = now;
                self.scores[id] = score(node, &self.terms);
                let block = id / BLOCK;
                let end = self.scores.len().min((block + 1) * BLOCK);
                self.best[block] = least(&self.scores[block * BLOCK..end]);
            }
        }
        self.at = nodes.now();
        self.epoch = workload.epoch;
    }

    /// The best node among those allowed.
    pub fn best(&self, allowed: impl Fn(usize) -> bool) -> Option<usize> {
        let mut found = (NO, None);
        for (block, best) in self.best.iter().enumerate() {
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

fn least(scores: &[Score]) -> Score {
    scores.iter().copied().min().unwrap_or(NO)
}
