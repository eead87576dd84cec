//! A cache of scores: one table for each shape and policy, with one score for each node. A decision computes the scores
//! of nodes again that have changed since the table was last used, and takes the best.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::ask::Shape;
use super::choice::Choices;
use super::fit::Terms;
use super::fragment::Workload;
use super::index::Nodes;
use super::node::Node;
use super::score::{DOES_NOT_FIT, Policy, Score, Scratch, rate};
use super::search::SearchCost;

/// The most scores of all tables together: bounds the memory, 16 bytes each.
const SCORES_MAX: usize = 1 << 20;
/// Tables that are kept whatever their scores take.
const TABLES_MIN: usize = 16;
/// The most bytes of all shapes together, and of what is worked out of them, scores aside.
const SHAPES_BYTES_MAX: usize = 32 << 20;
/// Nodes of which the best is known.
const BLOCK: usize = 64;

/// Changes that a table may miss before decisions for other shapes update it, a little each; otherwise the first pod
/// after a long time would pay for all of them.
const MISSED_MAX: u64 = 128;
/// Scores that a decision computes for the tables of other shapes, of which each has one want.
const AHEAD_SCORES: usize = 64;
/// Of a score, in ticks of [`crate::select::TICKS_PER_UNIT`]. What a search for several wants takes is on top.
const SCORE_TICKS: u64 = 15;
/// Of finding the table of a shape, for each of its wants and constraints.
const SHAPE_TICKS: u64 = 10;
/// A table that was not used for so many decisions per table in use is not updated.
const IDLE_MAX: u64 = 8;

type Key = (Policy, Shape);

#[derive(Debug, Default)]
pub(super) struct ScoreTables {
    kept: BTreeMap<Arc<Key>, ScoreTable>,
    /// The tables in use by the last change that they include, the oldest first.
    in_use: BTreeSet<(u64, Arc<Key>)>,
    uses: u64,
    /// Bytes of all shapes.
    weight: usize,
    pub choices: Choices,
    pub scratch: Scratch,
}

#[derive(Debug)]
pub(super) struct ScoreTable {
    pub terms: Terms,
    scores: Vec<Score>,
    /// The best of each block, and whether it must be looked for again.
    best: Vec<(Score, bool)>,
    /// The first change that was not followed.
    at: u64,
    /// Of the targets.
    epoch: u64,
    used: u64,
    /// Bytes of its shape.
    weight: usize,
}

impl ScoreTables {
    pub fn with(choices: Choices) -> Self {
        Self { choices, ..Self::default() }
    }

    /// Returns the table of a shape, up to date. Of several wants at once it is empty if what is allowed was spent before
    /// all nodes were looked at: then something was left undone, and it begins anew the next time.
    pub fn get(
        &mut self,
        nodes: &Nodes,
        workload: &Workload,
        policy: Policy,
        shape: &Shape,
    ) -> (&ScoreTable, &mut Scratch) {
        self.uses += 1;
        self.bring_forward(nodes, workload);
        let key = Arc::new((policy, shape.clone()));
        self.choices.pay(SHAPE_TICKS * (shape.wants.len() + shape.alike.len()) as u64);
        if !self.kept.contains_key(&key) {
            let table = ScoreTable::empty(shape, nodes, &mut self.choices);
            self.make_room(nodes, table.weight);
            self.weight = self.weight.saturating_add(table.weight);
            self.kept.insert(Arc::clone(&key), table);
        }
        let Self { kept, in_use, choices, scratch, .. } = self;
        let table = kept.entry(Arc::clone(&key)).or_insert_with(|| ScoreTable::empty(shape, nodes, choices));
        let (known, at) = (table.used > 0, table.at);
        if table.terms.outdated(nodes) {
            let weight = table.weight;
            *table = ScoreTable { weight, ..ScoreTable::empty(shape, nodes, choices) };
        }
        table.used = self.uses;
        let was_complete = table.terms.is_complete();
        table.terms.follow(shape, nodes, choices);
        scratch.tried = SearchCost::default();
        let scores = if !was_complete || table.stale(nodes, workload, policy) {
            table.renew(nodes, workload, policy, (&mut *scratch, &mut *choices))
        } else {
            table.follow(nodes, workload, policy, (&mut *scratch, &mut *choices), usize::MAX)
        };
        choices.pay(SCORE_TICKS * scores as u64);
        // A shape that came once may never come again.
        if known {
            in_use.remove(&(at, Arc::clone(&key)));
            in_use.insert((table.at, key));
        }
        (table, scratch)
    }

    /// Tables, and bytes of their shapes.
    #[cfg(test)]
    pub fn kept(&self) -> (usize, usize) {
        (self.kept.len(), self.weight)
    }

    /// For one more, of so many bytes.
    fn make_room(&mut self, nodes: &Nodes, weight: usize) {
        let most = TABLES_MIN.max(SCORES_MAX / nodes.all.len().max(1));
        let is_full = |kept: usize, weighs: usize| kept >= most || weighs + weight > SHAPES_BYTES_MAX;
        while !self.kept.is_empty() && is_full(self.kept.len(), self.weight) {
            let oldest = self.kept.iter().min_by_key(|(_, table)| table.used);
            let oldest = oldest.map(|(key, table)| (table.at, Arc::clone(key)));
            let Some(oldest) = oldest else { return };
            self.in_use.remove(&oldest);
            if let Some(table) = self.kept.remove(&oldest.1) {
                self.weight = self.weight.saturating_sub(table.weight);
            }
        }
    }

    /// Updates tables that are in use and have missed many changes, a little each time.
    fn bring_forward(&mut self, nodes: &Nodes, workload: &Workload) {
        let Self { kept, in_use, uses, choices, scratch, .. } = self;
        let idle_max = IDLE_MAX * in_use.len() as u64;
        let mut left = AHEAD_SCORES;
        while left > 0 && in_use.first().is_some_and(|(at, _)| nodes.now() - at >= MISSED_MAX) {
            let Some((_, key)) = in_use.pop_first() else { return };
            let (policy, shape) = &*key;
            // Others are left alone until they are used again.
            let can_follow = |table: &&mut ScoreTable| {
                *uses - table.used <= idle_max
                    && nodes.since(table.at).is_some()
                    && !table.terms.outdated(nodes)
                    // What others search is theirs to pay.
                    && table.terms.single().is_some()
                    && !table.stale(nodes, workload, *policy)
            };
            let Some(table) = kept.get_mut(&key).filter(can_follow) else { continue };
            table.terms.follow(shape, nodes, choices);
            if !table.terms.is_complete() {
                continue;
            }
            left -= table.follow(nodes, workload, *policy, (&mut *scratch, &mut *choices), left);
            in_use.insert((table.at, key));
        }
    }
}

impl ScoreTable {
    fn empty(shape: &Shape, nodes: &Nodes, choices: &mut Choices) -> Self {
        let terms = Terms::new(shape, nodes, choices);
        let weight = shape.weight(nodes.classes.len()).saturating_add(terms.weight());
        Self { terms, scores: Vec::new(), best: Vec::new(), at: 0, epoch: 0, used: 0, weight }
    }

    /// Not one score can be kept.
    fn stale(&self, nodes: &Nodes, workload: &Workload, policy: Policy) -> bool {
        self.scores.len() != nodes.all.len() || self.epoch != workload.epoch(policy)
    }

    /// How many scores were computed; all, unless what is allowed was spent.
    fn renew(
        &mut self,
        nodes: &Nodes,
        workload: &Workload,
        policy: Policy,
        (scratch, choices): (&mut Scratch, &mut Choices),
    ) -> usize {
        self.clear();
        for (computed, node) in nodes.all.iter().enumerate() {
            if !self.goes_on(computed, choices) {
                return computed;
            }
            let score = score(node, &self.terms, workload, policy, scratch);
            self.scores.push(score);
            choices.pay(std::mem::take(&mut scratch.tried.ticks));
        }
        self.best.extend(self.scores.chunks(BLOCK).map(|scores| (least(scores), false)));
        (self.at, self.epoch) = (nodes.now(), workload.epoch(policy));
        self.scores.len()
    }

    /// Not one score can be kept.
    fn clear(&mut self) {
        self.scores.clear();
        self.best.clear();
    }

    /// After so many scores: a search of several wants is paid for, and ends where nothing is left to pay it from. The
    /// table is empty then.
    fn goes_on(&mut self, computed: usize, choices: &mut Choices) -> bool {
        let goes_on = computed == 0 || self.terms.single().is_some() || choices.is_open();
        if !goes_on {
            self.clear();
        }
        goes_on
    }

    /// Renews the scores of nodes that changed, the earliest changes first, until so many are renewed; how many were.
    fn follow(
        &mut self,
        nodes: &Nodes,
        workload: &Workload,
        policy: Policy,
        (scratch, choices): (&mut Scratch, &mut Choices),
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
        for (computed, &(id, old)) in changed.iter().enumerate() {
            if !self.goes_on(computed, choices) {
                break;
            }
            self.put(id, old, score(&nodes.all[id], &self.terms, workload, policy, scratch));
            choices.pay(std::mem::take(&mut scratch.tried.ticks));
        }
        for (best, scores) in self.best.iter_mut().zip(self.scores.chunks(BLOCK)).filter(|(best, _)| best.1) {
            *best = (least(scores), false);
        }
        scratch.changed = changed;
        scratch.changed.len()
    }

    /// It has the scores of all nodes.
    pub fn is_whole(&self, nodes: &Nodes) -> bool {
        self.scores.len() == nodes.all.len()
    }

    fn put(&mut self, id: usize, old: Score, score: Score) {
        self.scores[id] = score;
        let (best, unsure) = &mut self.best[id / BLOCK];
        *unsure |= old == *best && score > old;
        *best = score.min(*best);
    }

    /// The best node among those allowed.
    pub fn best(&self, allowed: impl Fn(usize) -> bool) -> Option<usize> {
        let mut found = (DOES_NOT_FIT, None);
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
    node.as_ref().map_or(DOES_NOT_FIT, |node| rate(policy, node, terms, &workload.targets, scratch))
}

fn least(scores: &[Score]) -> Score {
    scores.iter().copied().min().unwrap_or(DOES_NOT_FIT)
}
