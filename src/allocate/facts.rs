//! What is known of the GPUs, each kind once. Which of them selectors choose: [`super::choice`].

use std::collections::BTreeMap;
use std::sync::Arc;

use super::ask::{AttributeConstraint, Rule};
use crate::select::{AttributeValue, DeviceFacts};

/// So many facts are kept before those of GPUs that have gone are forgotten.
const FACTS_MIN: usize = 4096;

/// Facts by number. A clone shares them until one of both learns something.
#[derive(Debug, Clone)]
pub(super) struct Facts {
    all: Arc<Vec<Arc<DeviceFacts>>>,
    numbers: Arc<BTreeMap<Arc<DeviceFacts>, u32>>,
    /// Grows when the numbers are given anew.
    epoch: u64,
    most: usize,
}

impl Default for Facts {
    fn default() -> Self {
        Self { all: Arc::default(), numbers: Arc::default(), epoch: 0, most: FACTS_MIN }
    }
}

impl Facts {
    pub fn number(&mut self, facts: &Arc<DeviceFacts>) -> u32 {
        if let Some(number) = self.numbers.get(facts) {
            return *number;
        }
        // Fewer than a u32 counts: there are no more than GPUs, and some that have gone.
        let number = self.all.len() as u32;
        Arc::make_mut(&mut self.all).push(Arc::clone(facts));
        Arc::make_mut(&mut self.numbers).insert(Arc::clone(facts), number);
        number
    }

    pub fn all(&self) -> &[Arc<DeviceFacts>] {
        &self.all
    }

    /// Worth to be told apart from an earlier look: facts have been added, or numbers given anew.
    pub fn state(&self) -> (u64, usize) {
        (self.epoch, self.all.len())
    }

    pub fn crowded(&self) -> bool {
        self.all.len() > self.most
    }

    /// Forgets all but what these numbers stand for, and gives them new ones.
    pub fn renumber<'a>(&mut self, numbers: impl Iterator<Item = &'a mut u32>) {
        let old = std::mem::take(&mut self.all);
        self.numbers = Arc::default();
        self.epoch += 1;
        for number in numbers {
            *number = self.number(&old[*number as usize]);
        }
        self.most = FACTS_MIN.max(4 * self.all.len());
    }
}

/// An [`AttributeConstraint`], with the attribute's values as numbers.
#[derive(Debug, Clone)]
pub(super) struct ConstraintTerms {
    pub rule: Rule,
    pub wants: Vec<usize>,
    /// By number of the facts; 0: the attribute is missing.
    values: Vec<u32>,
}

impl ConstraintTerms {
    pub fn new(alike: &AttributeConstraint, facts: &Facts) -> Self {
        let mut numbers: BTreeMap<&AttributeValue, u32> = BTreeMap::new();
        let mut values = Vec::with_capacity(facts.all().len());
        for one in facts.all() {
            // Fewer than a u32 counts: there are no more than GPUs.
            let next = numbers.len() as u32 + 1;
            let value = one.attributes.get(&alike.attribute);
            values.push(value.map_or(0, |value| *numbers.entry(value).or_insert(next)));
        }
        Self { rule: alike.rule, wants: alike.wants.clone(), values }
    }

    /// None: the GPU lacks the attribute.
    pub fn value(&self, facts: u32) -> Option<u32> {
        self.values.get(facts as usize).copied().filter(|value| *value > 0)
    }
}
