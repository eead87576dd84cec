//! Trials that need more than their namespace's part of a round. Whoever comes while enough is left of the round has that.
//! One in each round may go beyond what is left, and it is the namespace that has gone without the longest: the order in
//! which units are tried is for others to choose, who have older ones.

use std::collections::{BTreeSet, VecDeque};

#[derive(Debug, Default)]
pub struct Overdraft {
    /// Namespaces that went without, in this order.
    waiting: VecDeque<String>,
    /// For whom the round's is kept. None: whoever comes first, while anything is left.
    first: Option<String>,
    /// Somebody had it in this round.
    drawn: bool,
}

impl Overdraft {
    /// A round begins among these namespaces. Who was first in the last one and did not ask is first no longer.
    pub fn open(&mut self, due: &BTreeSet<String>) {
        if self.first.is_some() && self.waiting.front() == self.first.as_ref() {
            self.waiting.pop_front();
        }
        self.waiting.retain(|namespace| due.contains(namespace));
        self.first = self.waiting.front().cloned();
        self.drawn = false;
    }

    /// May the namespace spend so much at once, with so much `left` of the round, in ticks?
    pub fn grants(&mut self, namespace: &str, needs: u64, left: u64) -> bool {
        let is_first = self.first.as_ref().map_or(left > 0, |first| first == namespace);
        let draws = needs > left && !self.drawn && is_first;
        let granted = needs <= left || draws;
        self.drawn |= draws;
        if granted {
            self.waiting.retain(|waiting| waiting != namespace);
        } else if !self.waiting.iter().any(|waiting| waiting == namespace) {
            self.waiting.push_back(namespace.to_owned());
        }
        granted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn due(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn who_went_without_the_longest_comes_first_whatever_is_left() {
        let mut overdraft = Overdraft::default();
        overdraft.open(&due(&["a", "b", "c"]));
        assert!(overdraft.grants("a", 9, 10) && overdraft.grants("b", 9, 1));
        assert!(!overdraft.grants("c", 9, 1), "one of them goes beyond what is left");
        assert!(!overdraft.grants("a", 9, 0));
        overdraft.open(&due(&["a", "b", "c"]));
        assert!(!overdraft.grants("b", 9, 8) && overdraft.grants("b", 9, 9), "what is left is for all");
        assert!(overdraft.grants("c", 9, 0));
        assert!(!overdraft.grants("c", 9, 0), "once in a round");
        overdraft.open(&due(&["b", "c"]));
        assert!(overdraft.grants("c", 9, 0), "who does not wait any more is not waited for");
    }

    #[test]
    fn who_is_first_and_does_not_ask_keeps_nobody_out() {
        let mut overdraft = Overdraft::default();
        overdraft.open(&due(&["a", "b"]));
        assert!(!overdraft.grants("a", 9, 0) && !overdraft.grants("b", 9, 0));
        for _ in 0..2 {
            overdraft.open(&due(&["a", "b"]));
        }
        assert!(overdraft.grants("b", 9, 0));
    }
}
