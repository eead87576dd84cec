//! The least moves that make room for what waits: pods of one node that leave, and find a place elsewhere at once.
//!
//! * [`search`]: fewest pods, then least MiB; never more MiB than what waits gets
//! * [`Ground`]: what pods leave and come to; [`OfIndex`]: an index by itself
//! * `site`: which pods of a node could make room, by arithmetic alone
//!
//! What arithmetic leaves over is tried on the ground itself: the pods leave, what waits is placed, then each of
//! those that left. The ground is afterwards as before. What may be tried is bounded, in ticks of
//! [`crate::select::TICKS_PER_UNIT`].

mod site;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use super::ask::{Nodes, PodAsk, Shape};
use super::decide::places;
use super::index::{Index, PlacementKey};
use super::node::Placement;
use super::score::Policy;
use crate::model::names::NodeName;
use site::Meter;

/// Pods that move at a time, at most.
pub const MOVES_MAX: usize = 4;
/// Of a search, in ticks.
pub const SEARCH_TICKS: u64 = 40_000_000;
/// Of one try on the ground, beside what the index counts.
const TRY_TICKS: u64 = 20_000;
/// Of looking at one pod of one node.
const LOOK_TICKS: u64 = 100;
/// Sets of pods that are kept to be tried, of each size: those with the least MiB.
const SETS_MAX: usize = 4096;
/// Pods that ask the same were tried so often in vain: they fit nowhere.
const FAILURES_MAX: u32 = 16;

/// A pod that may be moved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mover {
    /// What it has now.
    pub has: Placement,
    /// Its GPUs are closed to all others while it is there.
    pub several: bool,
}

impl Mover {
    /// MiB of GPU memory, all its shares together.
    pub fn mib(&self) -> u64 {
        mib(&self.has)
    }
}

/// What waits: a pod, or pods that start together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WaitingUnit {
    pub asks: Vec<PodAsk>,
    /// It has its GPUs for itself.
    pub alone: bool,
}

/// What pods leave and come to.
pub trait Ground {
    fn index(&mut self) -> &mut Index;
    /// As the pod asks that is made anew; none: it is not to be moved.
    fn ask(&mut self, mover: usize) -> Option<PodAsk>;
    /// What it has is free from now on.
    fn leave(&mut self, mover: usize);
    /// It is back.
    fn come_back(&mut self, mover: usize);
    /// Where these would go, all of them. None: one of them fits nowhere.
    fn places(&mut self, asks: &[PodAsk]) -> Option<Vec<Placement>>;
    /// All may have this: what waits these places, and each of those that move, by its place in the list, the one that it comes
    /// to.
    fn allows(&self, moves: &[(usize, Placement)], then: &[Placement]) -> bool;
    /// These places are taken from now on. `alone`: with all of their GPUs.
    fn take(&mut self, places: &[Placement], alone: bool);
    /// What was taken last is free again.
    fn free(&mut self);
}

/// Who moves where, and what comes after them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Proposal {
    /// The node that they leave, or on which they make room for one another.
    pub node: NodeName,
    /// By their places in the list of movers, with the place that there is for each.
    pub moves: Vec<(usize, Placement)>,
    /// Where what waits goes then, in the order in which it was asked for.
    pub then: Vec<Placement>,
}

/// What a search came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MovesFound {
    Moves(Proposal),
    /// There are no such moves.
    Nothing,
    /// What the search may cost is spent.
    Spent,
}

/// Why a set of pods does not do.
enum Vain {
    /// One of them is not to be moved.
    Fixed,
    /// What waits would not fit.
    NoRoom,
    /// They have more than what waits gets.
    Worth,
    /// One of them would fit nowhere.
    Homeless,
    /// Somebody would have more than is allowed.
    Bound,
}

/// Searches for the least moves. What waits does not fit as it is. `ticks`: what it may cost; it is paid from what the
/// index is allowed.
pub fn search(ground: &mut impl Ground, waiting: &WaitingUnit, movers: &[Mover], ticks: u64) -> MovesFound {
    let mut meter = Meter::new(ticks);
    let found = look(ground, waiting, movers, &mut meter);
    ground.index().pay(meter.spent);
    found
}

fn look(ground: &mut impl Ground, waiting: &WaitingUnit, movers: &[Mover], meter: &mut Meter) -> MovesFound {
    let before = ground.index().spent().0;
    let Some(hard) = hardest(ground, waiting) else { return MovesFound::Nothing };
    let (sites, worth) = site::sites(ground.index(), &hard.ask, waiting.alone, movers, meter);
    (0..hard.others).for_each(|_| ground.free());
    let mut tries = MoveTrials { waiting, movers, failed: BTreeMap::new(), asks: BTreeMap::new() };
    for size in 1..=MOVES_MAX {
        let mut sets = Sets::default();
        for (at, site) in sites.iter().enumerate().filter(|(_, site)| site.least <= size) {
            let of = (size, waiting.asks.len() == 1);
            site.each_set(movers, of, worth, meter, &mut |mib, set| sets.add(mib, at, set));
            if meter.is_spent() {
                return MovesFound::Spent;
            }
        }
        let mut of_site: BTreeMap<usize, u32> = BTreeMap::new();
        for (_, at, set) in sets.in_order() {
            let vain = of_site.entry(at).or_default();
            if *vain >= FAILURES_MAX || tries.is_hopeless(&set) {
                continue;
            }
            meter.pay(TRY_TICKS);
            match tries.on(ground, &sites[at].node, &set) {
                Ok(proposal) => return MovesFound::Moves(proposal),
                Err(Vain::NoRoom) => *vain += 1,
                Err(Vain::Fixed | Vain::Worth | Vain::Homeless | Vain::Bound) => {}
            }
            if meter.is_spent_with(ground.index().spent().0.saturating_sub(before)) {
                return MovesFound::Spent;
            }
        }
    }
    MovesFound::Nothing
}

/// The pod of what waits that finds no place beside the others, and how many of these are placed for now.
struct Hardest {
    ask: PodAsk,
    others: usize,
}

/// None: all of them fit.
fn hardest(ground: &mut impl Ground, waiting: &WaitingUnit) -> Option<Hardest> {
    if let [ask] = waiting.asks.as_slice() {
        return Some(Hardest { ask: ask.clone(), others: 0 });
    }
    let mut order: Vec<&PodAsk> = waiting.asks.iter().collect();
    order.sort_by_key(|ask| Reverse(ask.shape.gpus()));
    for (others, ask) in order.iter().enumerate() {
        match ground.places(std::slice::from_ref(*ask)) {
            Some(places) => ground.take(&places, waiting.alone),
            None => return Some(Hardest { ask: (*ask).clone(), others }),
        }
    }
    order.iter().for_each(|_| ground.free());
    // One by one they fit where all at once they do not.
    order.first().map(|ask| Hardest { ask: (*ask).clone(), others: 0 })
}

/// MiB of GPU memory of a place.
fn mib(place: &Placement) -> u64 {
    place.gpus.iter().map(|grant| grant.memory.mib_ceil()).fold(0, u64::saturating_add)
}

/// Sets of pods to be tried: MiB, site, pods. The ones with the least MiB are kept.
#[derive(Default)]
struct Sets(BinaryHeap<(u64, usize, Vec<usize>)>);

impl Sets {
    fn add(&mut self, mib: u64, site: usize, set: &[usize]) {
        if self.0.len() >= SETS_MAX {
            if self.0.peek().is_some_and(|(most, ..)| *most <= mib) {
                return;
            }
            self.0.pop();
        }
        self.0.push((mib, site, set.to_vec()));
    }

    fn in_order(self) -> Vec<(u64, usize, Vec<usize>)> {
        self.0.into_sorted_vec()
    }
}

/// What is tried on the ground.
struct MoveTrials<'a> {
    waiting: &'a WaitingUnit,
    movers: &'a [Mover],
    /// How often pods that ask so found no place together.
    failed: BTreeMap<Vec<Shape>, u32>,
    asks: BTreeMap<usize, Option<PodAsk>>,
}

impl MoveTrials<'_> {
    /// Pods that ask the same were tried often enough.
    fn is_hopeless(&self, set: &[usize]) -> bool {
        if self.failed.is_empty() {
            return false;
        }
        let shapes = self.shapes(set);
        shapes.is_some_and(|shapes| self.failed.get(&shapes).is_some_and(|times| *times >= FAILURES_MAX))
    }

    /// None: what one of them asks is not known yet.
    fn shapes(&self, set: &[usize]) -> Option<Vec<Shape>> {
        let shape = |mover: &usize| Some(self.asks.get(mover)?.as_ref()?.shape.clone());
        let mut shapes: Vec<Shape> = set.iter().map(shape).collect::<Option<_>>()?;
        shapes.sort();
        Some(shapes)
    }

    fn on(&mut self, ground: &mut impl Ground, node: &NodeName, set: &[usize]) -> Result<Proposal, Vain> {
        let mut asks = Vec::with_capacity(set.len());
        for mover in set {
            let ask = self.asks.entry(*mover).or_insert_with(|| ground.ask(*mover));
            asks.push((*mover, ask.clone().ok_or(Vain::Fixed)?));
        }
        if self.is_hopeless(set) {
            return Err(Vain::Homeless);
        }
        set.iter().for_each(|mover| ground.leave(*mover));
        let found = self.placed(ground, node, asks);
        set.iter().rev().for_each(|mover| ground.come_back(*mover));
        if let (Err(Vain::Homeless), Some(shapes)) = (&found, self.shapes(set)) {
            *self.failed.entry(shapes).or_default() += 1;
        }
        found
    }

    /// What waits first, then those that left, the largest first.
    fn placed(
        &self,
        ground: &mut impl Ground,
        node: &NodeName,
        mut asks: Vec<(usize, PodAsk)>,
    ) -> Result<Proposal, Vain> {
        let waiting = self.waiting;
        let then = match waiting.asks.as_slice() {
            [ask] if ask.nodes.allow(node) => {
                let here = Nodes::Only([node.clone()].into());
                ground.places(&[PodAsk { shape: ask.shape.clone(), nodes: here }])
            }
            asks => ground.places(asks),
        };
        // Who leaves changes nothing about that.
        let then = then.filter(|then| ground.allows(&[], then)).ok_or(Vain::NoRoom)?;
        let moved = asks.iter().map(|(mover, _)| self.movers[*mover].mib()).fold(0, u64::saturating_add);
        if moved > then.iter().map(mib).fold(0, u64::saturating_add) {
            return Err(Vain::Worth);
        }
        ground.take(&then, waiting.alone);
        asks.sort_by_key(|(mover, ask)| Reverse((ask.shape.gpus(), self.movers[*mover].mib())));
        let mut moves = Vec::with_capacity(asks.len());
        for (mover, ask) in &asks {
            let Some(place) = ground.places(std::slice::from_ref(ask)).and_then(|mut all| all.pop()) else {
                break;
            };
            ground.take(std::slice::from_ref(&place), self.movers[*mover].several);
            moves.push((*mover, place));
        }
        (0..=moves.len()).for_each(|_| ground.free());
        if moves.len() < asks.len() {
            return Err(Vain::Homeless);
        }
        if !ground.allows(&moves, &then) {
            return Err(Vain::Bound);
        }
        moves.sort_by_key(|(mover, _)| *mover);
        Ok(Proposal { node: node.clone(), moves, then })
    }
}

/// An index by itself: pods that have their places under these keys, and what each asks.
pub struct OfIndex<'a> {
    index: &'a mut Index,
    policy: Policy,
    pods: &'a [(PlacementKey, PodAsk)],
    away: BTreeMap<usize, Placement>,
    taken: Vec<usize>,
}

impl<'a> OfIndex<'a> {
    /// `pods`: of the movers, in their order.
    pub fn new(index: &'a mut Index, policy: Policy, pods: &'a [(PlacementKey, PodAsk)]) -> Self {
        Self { index, policy, pods, away: BTreeMap::new(), taken: Vec::new() }
    }
}

impl Ground for OfIndex<'_> {
    fn index(&mut self) -> &mut Index {
        self.index
    }

    fn ask(&mut self, mover: usize) -> Option<PodAsk> {
        self.pods.get(mover).map(|(_, ask)| ask.clone())
    }

    fn leave(&mut self, mover: usize) {
        let key = self.pods.get(mover).map(|(key, _)| key.clone());
        if let Some(had) = key.and_then(|key| self.index.remove(key)) {
            self.away.insert(mover, had);
        }
    }

    fn come_back(&mut self, mover: usize) {
        if let (Some(had), Some((key, _))) = (self.away.remove(&mover), self.pods.get(mover)) {
            // Unknown: the node has not changed meanwhile.
            let _ = self.index.apply(key.clone(), &had);
        }
    }

    fn places(&mut self, asks: &[PodAsk]) -> Option<Vec<Placement>> {
        places(self.index, asks, self.policy)
    }

    fn allows(&self, _: &[(usize, Placement)], _: &[Placement]) -> bool {
        true
    }

    fn take(&mut self, places: &[Placement], _: bool) {
        let depth = self.taken.len();
        self.taken.push(places.len());
        for (nth, place) in places.iter().enumerate() {
            let _ = self.index.apply(PlacementKey::Kept { depth, nth }, place);
        }
    }

    fn free(&mut self) {
        let Some(count) = self.taken.pop() else { return };
        for nth in 0..count {
            self.index.remove(PlacementKey::Kept { depth: self.taken.len(), nth });
        }
    }
}
