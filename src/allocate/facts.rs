//! What is known of the GPUs, each kind once, and which of them a want's selectors choose.
//!
//! Selectors are looked at once for all GPUs that agree in what they read; the answers are kept by their texts, so
//! that a new pod with known selectors costs nothing.
//!
//! A GPU on which a selector fails is not chosen, and a refusal tells of it; others may be. kube-scheduler gives up
//! the pod at the first such device that it meets, which depends on the order in which it looks.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::ask::{Alike, Rule};
use crate::select::{AttributeValue, DeviceFacts, Reads, SelectError, Selector};

/// Lists of selectors whose answers are kept: bounds the memory, two bits per GPU each.
const CHOICES_MAX: usize = 256;
/// So many facts are kept before those of GPUs that have gone are forgotten.
const FACTS_MIN: usize = 4096;

/// Facts by number.
#[derive(Debug)]
pub(super) struct Facts {
    all: Vec<Arc<DeviceFacts>>,
    numbers: BTreeMap<Arc<DeviceFacts>, u32>,
    /// Grows when the numbers are given anew.
    epoch: u64,
    most: usize,
}

impl Default for Facts {
    fn default() -> Self {
        Self { all: Vec::new(), numbers: BTreeMap::new(), epoch: 0, most: FACTS_MIN }
    }
}

impl Facts {
    pub fn number(&mut self, facts: &Arc<DeviceFacts>) -> u32 {
        if let Some(number) = self.numbers.get(facts) {
            return *number;
        }
        // Fewer than a u32 counts: there are no more than GPUs, and some that have gone.
        let number = self.all.len() as u32;
        self.all.push(Arc::clone(facts));
        self.numbers.insert(Arc::clone(facts), number);
        number
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
        self.numbers.clear();
        self.epoch += 1;
        for number in numbers {
            *number = self.number(&old[*number as usize]);
        }
        self.most = FACTS_MIN.max(4 * self.all.len());
    }
}

/// A set of numbers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Bits(Vec<u64>);

impl Bits {
    pub fn has(&self, number: u32) -> bool {
        self.0.get(number as usize / 64).is_some_and(|word| word >> (number % 64) & 1 == 1)
    }

    fn add(&mut self, number: usize) {
        let word = number / 64;
        if self.0.len() <= word {
            self.0.resize(word + 1, 0);
        }
        self.0[word] |= 1 << (number % 64);
    }
}

/// What a list of selectors says of the facts.
#[derive(Debug, Clone)]
pub(super) struct Choice {
    pub chosen: Arc<Bits>,
    /// Where a selector fails: not chosen.
    pub failed: Arc<Bits>,
    /// The first failure.
    pub words: Option<Arc<str>>,
}

/// Answers that are kept, by the selectors' texts.
#[derive(Debug, Default)]
pub(super) struct Choices {
    kept: BTreeMap<Vec<String>, Kept>,
    uses: u64,
}

#[derive(Debug)]
struct Kept {
    selectors: Result<Vec<Selector>, SelectError>,
    reads: Reads,
    choice: Choice,
    state: (u64, usize),
    used: u64,
}

impl Choices {
    /// What all of the selectors together choose; none: there are no selectors.
    pub fn of(&mut self, texts: &[String], facts: &Facts) -> Option<Choice> {
        if texts.is_empty() {
            return None;
        }
        self.uses += 1;
        if !self.kept.contains_key(texts) {
            if self.kept.len() >= CHOICES_MAX {
                let oldest = self.kept.iter().min_by_key(|(_, kept)| kept.used);
                let oldest = oldest.map(|(texts, _)| texts.clone());
                oldest.and_then(|texts| self.kept.remove(&texts));
            }
            self.kept.insert(texts.to_vec(), Kept::new(texts));
        }
        let kept = self.kept.get_mut(texts)?;
        kept.used = self.uses;
        kept.follow(facts);
        Some(kept.choice.clone())
    }
}

impl Kept {
    fn new(texts: &[String]) -> Self {
        let selectors: Result<Vec<_>, _> = texts.iter().map(|text| Selector::compile(text)).collect();
        let all = selectors.as_deref().unwrap_or_default();
        let reads = all.iter().fold(Reads::default(), |reads, one| reads.with(&one.reads()));
        Self { selectors, reads, choice: Choice::none(), state: (0, 0), used: 0 }
    }

    fn follow(&mut self, facts: &Facts) {
        let (epoch, count) = facts.state();
        if self.state.0 != epoch {
            (self.choice, self.state) = (Choice::none(), (epoch, 0));
        }
        let from = self.state.1;
        self.state.1 = count;
        if from == count {
            return;
        }
        let Self { selectors, reads, choice, .. } = self;
        let (chosen, failed) = (Arc::make_mut(&mut choice.chosen), Arc::make_mut(&mut choice.failed));
        let mut known = BTreeMap::new();
        for (number, one) in facts.all.iter().enumerate().skip(from) {
            let found = known.entry(reads.seen(one)).or_insert_with(|| all_match(selectors, one));
            match found {
                Ok(true) => chosen.add(number),
                Ok(false) => {}
                Err(error) => {
                    failed.add(number);
                    choice.words.get_or_insert_with(|| error.to_string().into());
                }
            }
        }
    }
}

impl Choice {
    fn none() -> Self {
        Self { chosen: Arc::default(), failed: Arc::default(), words: None }
    }
}

/// The first that does not choose the device decides, as for kube-scheduler.
fn all_match(
    selectors: &Result<Vec<Selector>, SelectError>,
    device: &DeviceFacts,
) -> Result<bool, SelectError> {
    for selector in selectors.as_ref().map_err(SelectError::clone)? {
        if !selector.matches(device)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// An [`Alike`], with the attribute's values as numbers.
#[derive(Debug, Clone)]
pub(super) struct AlikeTerms {
    pub rule: Rule,
    pub wants: Vec<usize>,
    /// By number of the facts; 0: the attribute is missing.
    values: Vec<u32>,
}

impl AlikeTerms {
    pub fn new(alike: &Alike, facts: &Facts) -> Self {
        let mut numbers: BTreeMap<&AttributeValue, u32> = BTreeMap::new();
        let mut values = Vec::with_capacity(facts.all.len());
        for one in &facts.all {
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
