//! What is known of the GPUs, each kind once. Which of them selectors choose: [`super::choice`].

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::select::{AttributeValue, DeviceFacts, QualifiedName};

/// So many facts are kept before those of GPUs that have gone are forgotten.
const FACTS_MIN: usize = 4096;

/// Facts by number. A clone shares them until one of both learns something.
#[derive(Debug, Clone)]
pub(super) struct Facts {
    all: Arc<Vec<Arc<DeviceFacts>>>,
    numbers: Arc<BTreeMap<Arc<DeviceFacts>, u32>>,
    /// Attributes that any of them has.
    attributes: Arc<BTreeSet<QualifiedName>>,
    /// Grows when the numbers are given anew.
    epoch: u64,
    most: usize,
}

impl Default for Facts {
    fn default() -> Self {
        let (all, numbers, attributes) = (Arc::default(), Arc::default(), Arc::default());
        Self { all, numbers, attributes, epoch: 0, most: FACTS_MIN }
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
        for name in facts.attributes.keys() {
            if !self.attributes.contains(name) {
                Arc::make_mut(&mut self.attributes).insert(name.clone());
            }
        }
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
        (self.numbers, self.attributes) = (Arc::default(), Arc::default());
        self.epoch += 1;
        for number in numbers {
            *number = self.number(&old[*number as usize]);
        }
        self.most = FACTS_MIN.max(4 * self.all.len());
    }
}

/// Of reading an attribute of one GPU, in ticks of [`crate::select::TICKS_PER_UNIT`].
const READ_TICKS: u64 = 50;

/// The values of attributes as numbers: each attribute once, whoever asks for it.
#[derive(Debug, Clone, Default)]
pub(super) struct Columns(BTreeMap<QualifiedName, Column>);

/// The values of one attribute.
#[derive(Debug, Clone, Default)]
pub(super) struct Column {
    /// By number of the facts; 0: the attribute is missing, and so it is in facts that are not there.
    values: Arc<Vec<u32>>,
    /// The first of the facts with each value.
    firsts: Arc<Vec<u32>>,
    epoch: u64,
}

impl Columns {
    /// The attribute is read of all facts, or there is nothing to read.
    pub fn is_read(&self, attribute: &QualifiedName, facts: &Facts) -> bool {
        let (epoch, count) = facts.state();
        let known = self.0.get(attribute);
        !facts.attributes.contains(attribute)
            || known.is_some_and(|column| column.epoch == epoch && column.values.len() == count)
    }

    /// The values of all facts, and what it cost to read those that were not read yet, in ticks. None: no GPU has the
    /// attribute.
    pub fn read(&mut self, attribute: &QualifiedName, facts: &Facts) -> (Option<Column>, u64) {
        if !facts.attributes.contains(attribute) {
            return (None, 0);
        }
        // Those that no GPU has any more.
        if self.0.len() > facts.attributes.len() {
            self.0.retain(|name, _| facts.attributes.contains(name));
        }
        let column = self.0.entry(attribute.clone()).or_default();
        let ticks = column.follow(attribute, facts);
        (Some(column.clone()), ticks)
    }
}

impl Column {
    fn follow(&mut self, attribute: &QualifiedName, facts: &Facts) -> u64 {
        let (epoch, count) = facts.state();
        if self.epoch != epoch {
            *self = Self { epoch, ..Self::default() };
        }
        if self.values.len() == count {
            return 0;
        }
        let value = |number: usize| facts.all()[number].attributes.get(attribute);
        let (values, firsts) = (Arc::make_mut(&mut self.values), Arc::make_mut(&mut self.firsts));
        let known = firsts.iter().zip(1..).filter_map(|(first, nth)| Some((value(*first as usize)?, nth)));
        let mut known: BTreeMap<&AttributeValue, u32> = known.collect();
        let read = firsts.len() + count - values.len();
        for number in values.len()..count {
            // Fewer than a u32 counts: there are no more than GPUs.
            let next = known.len() as u32 + 1;
            let nth = value(number).map_or(0, |value| *known.entry(value).or_insert(next));
            if nth as usize > firsts.len() {
                firsts.push(number as u32);
            }
            values.push(nth);
        }
        READ_TICKS * read as u64
    }

    /// None: the GPU lacks the attribute.
    pub fn value(&self, facts: u32) -> Option<u32> {
        self.values.get(facts as usize).copied().filter(|value| *value > 0)
    }

    pub fn bytes(&self) -> usize {
        size_of_val(&self.values[..]) + size_of_val(&self.firsts[..])
    }
}
