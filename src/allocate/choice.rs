//! Which GPUs a want's selectors choose.
//!
//! GPUs that agree in what the selectors read are looked at once. The answers are kept by the selectors' texts, so that
//! a new pod with known selectors costs nothing, and GPUs are sorted by what is read of them once for all selectors
//! that read the same.
//!
//! All of it is paid for, from what [`Choices::allow`] says, in ticks of [`crate::select::TICKS_PER_UNIT`]. Where that is
//! at an end, the work stops, and goes on from there the next time.
//!
//! A GPU on which a selector fails is not chosen, and a refusal tells of it; others may be. kube-scheduler gives up
//! the pod at the first such device that it meets, which depends on the order in which it looks. Selectors that cost
//! too much choose nothing, and nobody looks at them again while they are remembered.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::ask::AttributeConstraint;
use super::facts::{Column, Columns, Facts};
use crate::select::{DeviceFacts, QualifiedName, Reads, SelectError, Selector, TICKS_PER_UNIT};

/// Of all that is kept of selectors, in bytes: texts, compiled expressions, answers.
const KEPT_BYTES_MAX: usize = 32 << 20;
/// Of one list of selectors, compiled. All that a claim may have of text is less than that.
const LIST_BYTES_MAX: usize = 16 << 20;
/// Larger ones are compiled anew when there are new GPUs.
const COMPILED_BYTES_MAX: usize = 256 << 10;
/// Of all sorted GPUs, in bytes.
const SORTED_BYTES_MAX: usize = 16 << 20;
/// Kinds that new GPUs are compared with; of more kinds each is nearly its own.
const KINDS_COMPARED: usize = 256;
/// Of sorting one GPU, and of noting an answer for it.
const SORT_TICKS: u64 = 200;
const NOTE_TICKS: u64 = 1;

/// All selectors of a pod's claims may cost so much on all kinds of GPUs together, in units: so much in any case, and
/// so much for each kind that there is.
const POD_COST_MIN: u64 = 100_000_000;
const POD_COST_PER_KIND: u64 = 10_000;

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
    /// All facts were looked at. Those that were not are not chosen.
    pub complete: bool,
}

impl Choice {
    fn none() -> Self {
        Self { chosen: Arc::default(), failed: Arc::default(), words: None, complete: false }
    }

    /// Nothing is known against it.
    pub fn may_choose(&self, facts: u32) -> bool {
        self.chosen.has(facts) || self.failed.has(facts) || !self.complete
    }
}

/// What came of looking at the selectors of a pod's claims.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Studied {
    /// What they choose is known.
    Done,
    /// What was allowed is spent; the next time it goes on.
    NotYet,
    /// They cannot be used, whatever GPUs there are: why, and by which want of the shape if it is one.
    Refused { want: Option<usize>, words: String },
}

/// Answers that are kept, by the selectors' texts.
#[derive(Debug)]
pub(super) struct Choices {
    kept: BTreeMap<Arc<[String]>, SelectorList>,
    sorts: Sorts,
    columns: Columns,
    /// In bytes.
    weight: usize,
    uses: u64,
    /// Number of the first use since something was allowed: what was used since is not forgotten.
    since: u64,
    purse: Purse,
}

/// In ticks.
#[derive(Debug, Clone, Copy)]
struct Purse {
    left: u64,
    spent: u64,
    /// Something was left undone.
    short: bool,
    /// What a pod's selectors may cost in any case, in units.
    pod_cost_min: u64,
}

impl Purse {
    fn pay(&mut self, ticks: u64) {
        self.left = self.left.saturating_sub(ticks);
        self.spent = self.spent.saturating_add(ticks);
    }

    /// What evaluations of a pod's selectors may cost is exceeded: words for who wrote them.
    fn too_dear(&self, ticks: u64, kinds: u64) -> Option<String> {
        let most = self.pod_cost_min.saturating_add(POD_COST_PER_KIND.saturating_mul(kinds));
        (ticks / TICKS_PER_UNIT > most).then(|| {
            let some = if kinds == 1 { "kind of GPU" } else { "kinds of GPUs" };
            format!(
                "the selectors cost more than {most} on {kinds} {some} in all; write simpler selectors, or \
                 fewer"
            )
        })
    }

    /// Something more may be done. It is paid for afterwards, and may be dearer than what is left.
    fn is_open(&mut self) -> bool {
        self.short |= self.left == 0;
        self.left > 0
    }
}

impl Default for Choices {
    fn default() -> Self {
        let purse = Purse { left: u64::MAX, spent: 0, short: false, pod_cost_min: POD_COST_MIN };
        let (kept, sorts, columns) = (BTreeMap::new(), Sorts::default(), Columns::default());
        Self { kept, sorts, columns, weight: 0, uses: 0, since: 0, purse }
    }
}

impl Choices {
    /// From now on so many ticks may be spent.
    pub fn allow(&mut self, ticks: u64) {
        self.purse = Purse { left: ticks, spent: 0, short: false, ..self.purse };
        self.since = self.uses;
    }

    #[cfg(test)]
    pub fn weight(&self) -> usize {
        self.weight
    }

    #[cfg(test)]
    pub fn bound_pods(&mut self, units: u64) {
        self.purse.pod_cost_min = units;
    }

    /// The same answers for another index with the same facts. Nothing more is worked out there.
    pub fn beside(&self) -> Self {
        let purse = Purse { left: 0, spent: 0, short: false, ..self.purse };
        let (kept, columns) = (self.kept.clone(), self.columns.clone());
        Self { kept, columns, weight: self.weight, purse, ..Self::default() }
    }

    /// Other work than that of selectors is paid from the same purse.
    pub fn pay(&mut self, ticks: u64) {
        self.purse.pay(ticks);
    }

    /// The same; if not, something is left undone.
    pub fn is_open(&mut self) -> bool {
        self.purse.is_open()
    }

    /// Not all that was allowed is spent.
    pub fn has_left(&self) -> bool {
        self.purse.left > 0
    }

    /// What was spent since something was allowed, in ticks, and whether something was left undone for lack of more.
    pub fn spent(&self) -> (u64, bool) {
        (self.purse.spent, self.purse.short)
    }

    /// What all of the selectors together choose; none: there are no selectors.
    pub fn of(&mut self, texts: &Arc<[String]>, facts: &Facts) -> Option<Choice> {
        if texts.is_empty() {
            return None;
        }
        let mut choice = self.follow(texts, facts).choice.clone();
        choice.complete = self.kept.get(texts).is_some_and(|kept| kept.follows(facts));
        Some(choice)
    }

    /// What they choose, if all facts were looked at; nothing is worked out for it, or paid.
    pub fn known(&self, texts: &Arc<[String]>, facts: &Facts) -> Option<&Bits> {
        let kept = self.kept.get(texts).filter(|kept| kept.follows(facts))?;
        Some(&kept.choice.chosen)
    }

    /// The same for lists of a pod's wants, before they are used.
    pub fn study<'a>(&mut self, lists: impl Iterator<Item = &'a Arc<[String]>>, facts: &Facts) -> Studied {
        let (mut spent, mut kinds, mut told) = (0_u64, 0, Vec::new());
        for (want, texts) in lists.enumerate().filter(|(_, texts)| !texts.is_empty()) {
            let kept = self.follow(texts, facts);
            if let Some(words) = &kept.refused {
                return Studied::Refused { want: Some(want), words: words.to_string() };
            }
            let follows = kept.follows(facts);
            if !told.contains(&texts) {
                (spent, kinds) = (spent.saturating_add(kept.spent), kept.kinds.max(kinds));
                told.push(texts);
            }
            if let Some(words) = self.purse.too_dear(spent, kinds) {
                return Studied::Refused { want: None, words };
            }
            if !follows {
                return Studied::NotYet;
            }
        }
        Studied::Done
    }

    /// The same for the attributes that a pod's constraints are about.
    pub fn study_attributes(&mut self, alike: &[AttributeConstraint], facts: &Facts) -> Studied {
        for one in alike {
            if !self.columns.is_read(&one.attribute, facts) && !self.purse.is_open() {
                return Studied::NotYet;
            }
            self.column(&one.attribute, facts);
        }
        Studied::Done
    }

    /// The values of an attribute; none: no GPU has it. What is not read yet is read, and paid for.
    pub fn column(&mut self, attribute: &QualifiedName, facts: &Facts) -> Option<Column> {
        let (column, ticks) = self.columns.read(attribute, facts);
        self.purse.pay(ticks);
        column
    }

    fn follow(&mut self, texts: &Arc<[String]>, facts: &Facts) -> &mut SelectorList {
        self.uses += 1;
        let is_new = !self.kept.contains_key(texts);
        if is_new {
            self.make_room();
        }
        let Self { kept, sorts, weight, uses, purse, .. } = self;
        let kept = kept.entry(Arc::clone(texts)).or_default();
        kept.used = *uses;
        if is_new || !kept.follows(facts) {
            let before = kept.weight;
            kept.follow(texts, facts, sorts, purse);
            kept.weight = kept.weighs(texts);
            *weight = (*weight + kept.weight).saturating_sub(before);
        }
        kept
    }

    /// Of those that are heavier than most, the one that was not used for longest goes: a heavy one is not to drive out
    /// many light ones.
    fn make_room(&mut self) {
        while self.weight > KEPT_BYTES_MAX {
            let usual = self.weight / self.kept.len().max(1);
            let since = self.since;
            let old = self.kept.iter().filter(|(_, kept)| kept.used <= since && kept.weight >= usual);
            let Some((texts, weight)) =
                old.min_by_key(|(_, kept)| kept.used).map(|(texts, kept)| (Arc::clone(texts), kept.weight))
            else {
                return;
            };
            self.kept.remove(&texts);
            self.weight = self.weight.saturating_sub(weight);
        }
    }
}

/// A list of selectors.
#[derive(Debug, Clone)]
struct SelectorList {
    /// None: not all compiled yet, or forgotten again.
    selectors: Option<Arc<[Selector]>>,
    /// The first of them, while not all are.
    compiled: Vec<Selector>,
    reads: Option<Reads>,
    choice: Choice,
    /// They are no CEL, or cost too much: nothing is chosen.
    refused: Option<Arc<str>>,
    /// The facts up to here were looked at.
    state: (u64, usize),
    /// So many of the selectors have chosen the next of the facts.
    asked: usize,
    /// Ticks of evaluations since the numbers were given, and of how many kinds of GPUs.
    spent: u64,
    kinds: u64,
    weight: usize,
    used: u64,
}

impl Default for SelectorList {
    fn default() -> Self {
        Self {
            selectors: None,
            compiled: Vec::new(),
            reads: None,
            choice: Choice::none(),
            refused: None,
            state: (0, 0),
            asked: 0,
            spent: 0,
            kinds: 0,
            weight: 0,
            used: 0,
        }
    }
}

impl SelectorList {
    fn follows(&self, facts: &Facts) -> bool {
        self.state == facts.state()
    }

    fn weighs(&self, texts: &[String]) -> usize {
        let texts: usize = texts.iter().map(|text| text.len() + size_of::<String>()).sum();
        let selectors = self.selectors.iter().flat_map(|all| all.iter()).chain(&self.compiled);
        let compiled = selectors.map(Selector::weight).fold(0, usize::saturating_add);
        let words = self.refused.as_ref().map_or(0, |words| words.len());
        [texts, compiled, words, self.state.1 / 4, size_of::<Self>()]
            .into_iter()
            .fold(0, usize::saturating_add)
    }

    fn follow(&mut self, texts: &[String], facts: &Facts, sorts: &mut Sorts, purse: &mut Purse) {
        let (epoch, count) = facts.state();
        if self.state.0 != epoch {
            (self.choice, self.state, self.asked) = (Choice::none(), (epoch, 0), 0);
            (self.spent, self.kinds) = (0, 0);
        }
        if self.state.1 == count {
            return;
        }
        if self.refused.is_some() {
            return self.fail(facts, purse);
        }
        if self.selectors.is_none() && !self.compile(texts, facts, purse) {
            return;
        }
        let Some(selectors) = self.selectors.clone() else { return };
        let reads = self.reads.get_or_insert_with(|| {
            selectors.iter().fold(Reads::default(), |reads, one| reads.with(&one.reads()))
        });
        let Some(sorted) = sorts.by(reads, facts, purse) else { return };
        self.look(&selectors, facts, sorted, purse);
        if self.state.1 == count && self.weighs(texts) > COMPILED_BYTES_MAX {
            self.selectors = None;
        }
    }

    /// False: not all in this round, or not at all.
    fn compile(&mut self, texts: &[String], facts: &Facts, purse: &mut Purse) -> bool {
        for text in texts.iter().skip(self.compiled.len()) {
            if !purse.is_open() {
                return false;
            }
            purse.pay(Selector::cost_of_compiling(text));
            match Selector::compile(text) {
                Ok(selector) => {
                    purse.pay(selector.cost_of_patterns());
                    self.compiled.push(selector);
                }
                Err(error) => {
                    self.refuse(error.to_string(), facts, purse);
                    return false;
                }
            }
            let bytes = self.compiled.iter().map(Selector::weight).fold(0, usize::saturating_add);
            if bytes > LIST_BYTES_MAX {
                let words = "the selectors of a request take too much memory in all, patterns most of it; \
                             write simpler selectors, or fewer";
                self.refuse(words.to_owned(), facts, purse);
                return false;
            }
        }
        self.selectors = Some(std::mem::take(&mut self.compiled).into());
        true
    }

    fn look(&mut self, selectors: &[Selector], facts: &Facts, sorted: &Sorted, purse: &mut Purse) {
        for number in self.state.1..facts.all().len() {
            if let Some(words) = purse.too_dear(self.spent, self.kinds) {
                return self.refuse(words, facts, purse);
            }
            if !purse.is_open() {
                return;
            }
            // The first of its kind was looked at before, or is looked at now.
            let first = sorted.first_like(number);
            purse.pay(NOTE_TICKS);
            let (chosen, failed) = match first < number {
                true => (self.choice.chosen.has(first as u32), self.choice.failed.has(first as u32)),
                false => match self.one(selectors, &facts.all()[number], purse) {
                    None => return,
                    Some(Err(error)) if error.is_of_cost() => {
                        return self.refuse(error.to_string(), facts, purse);
                    }
                    Some(Err(error)) => {
                        self.choice.words.get_or_insert_with(|| error.to_string().into());
                        (false, true)
                    }
                    Some(Ok(chosen)) => (chosen, false),
                },
            };
            self.asked = 0;
            if chosen {
                Arc::make_mut(&mut self.choice.chosen).add(number);
            }
            if failed {
                Arc::make_mut(&mut self.choice.failed).add(number);
            }
            self.state.1 = number + 1;
        }
    }

    /// What the selectors say of a device: the first that does not choose it decides, as for kube-scheduler. None: not
    /// all of them in this round.
    fn one(
        &mut self,
        selectors: &[Selector],
        device: &DeviceFacts,
        purse: &mut Purse,
    ) -> Option<Result<bool, SelectError>> {
        self.kinds += u64::from(self.asked == 0);
        for selector in selectors.iter().skip(self.asked) {
            if !purse.is_open() {
                return None;
            }
            let (found, cost) = selector.look(device);
            purse.pay(cost);
            self.spent = self.spent.saturating_add(cost);
            if found != Ok(true) {
                return Some(found);
            }
            self.asked += 1;
        }
        Some(Ok(true))
    }

    fn refuse(&mut self, words: String, facts: &Facts, purse: &mut Purse) {
        let words: Arc<str> = words.into();
        self.choice = Choice { words: Some(Arc::clone(&words)), ..Choice::none() };
        (self.refused, self.selectors, self.compiled, self.state.1) = (Some(words), None, Vec::new(), 0);
        self.fail(facts, purse);
    }

    /// All of the facts, as far as they are not counted yet.
    fn fail(&mut self, facts: &Facts, purse: &mut Purse) {
        let count = facts.all().len();
        purse.pay(NOTE_TICKS * (count - self.state.1) as u64);
        let failed = Arc::make_mut(&mut self.choice.failed);
        (self.state.1..count).for_each(|number| failed.add(number));
        if self.choice.words.is_none() {
            self.choice.words.clone_from(&self.refused);
        }
        self.state.1 = count;
    }
}

/// Facts sorted by what is read of them, for each thing that was read lately.
#[derive(Debug, Default)]
struct Sorts {
    kept: BTreeMap<Reads, Sorted>,
    uses: u64,
}

#[derive(Debug, Default)]
struct Sorted {
    /// Of each fact the number of the first one like it.
    first: Vec<u32>,
    /// Of the first ones, as many as are compared with new facts.
    kinds: Vec<u32>,
    epoch: u64,
    used: u64,
}

impl Sorted {
    fn first_like(&self, number: usize) -> usize {
        self.first.get(number).map_or(number, |first| *first as usize)
    }

    /// Sorts what is new; true if all is sorted.
    fn follow(&mut self, reads: &Reads, facts: &Facts, purse: &mut Purse) -> bool {
        let (epoch, count) = facts.state();
        if self.epoch != epoch {
            *self = Self { epoch, used: self.used, ..Self::default() };
        }
        if self.first.len() == count {
            return true;
        }
        let all = facts.all();
        let mut known: BTreeMap<_, u32> =
            self.kinds.iter().map(|first| (reads.values_read(&all[*first as usize]), *first)).collect();
        for (number, one) in all.iter().enumerate().skip(self.first.len()) {
            if !purse.is_open() {
                return false;
            }
            purse.pay(SORT_TICKS);
            // Fewer than a u32 counts.
            let number = number as u32;
            let first = *known.entry(reads.values_read(one)).or_insert(number);
            if first == number && self.kinds.len() < KINDS_COMPARED {
                self.kinds.push(number);
            }
            self.first.push(first);
        }
        true
    }
}

impl Sorts {
    /// None: not yet.
    fn by(&mut self, reads: &Reads, facts: &Facts, purse: &mut Purse) -> Option<&Sorted> {
        self.uses += 1;
        if !self.kept.contains_key(reads) {
            let bytes: usize = self.kept.values().map(|sorted| size_of_val(&sorted.first[..])).sum();
            let oldest =
                self.kept.iter().min_by_key(|(_, sorted)| sorted.used).map(|(reads, _)| reads.clone());
            if let Some(oldest) = oldest.filter(|_| bytes > SORTED_BYTES_MAX) {
                self.kept.remove(&oldest);
            }
        }
        let sorted = self.kept.entry(reads.clone()).or_default();
        sorted.used = self.uses;
        sorted.follow(reads, facts, purse).then_some(&*sorted)
    }
}
