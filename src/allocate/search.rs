//! GPUs for several wants at once, on one node. GPUs of one claim are different ones, those of an [`super::AttributeConstraint`]
//! agree in its attribute or all differ in it, and two claims may meet on one GPU if it holds both.

use std::cmp::Reverse;

use super::ask::Rule;
use super::fit::{Picked, Terms, WantTerms};
use super::mig::Carving;
use super::node::{Gpu, Node};
use crate::model::mig::MigPlace;

/// Tries per node. Wants that fit in many ways are found at once; it ends a search for what does not fit.
const STEPS_MAX: u32 = 2_000;
/// The same once a decision has none left, and what it has for all nodes together.
const STEPS_MIN: u32 = 40;
const STEPS_OF_DECISION: u32 = 200_000;
/// What the outlook of a GPU that is cut counts for, in tries.
const OUTLOOK_STEPS: u32 = 4;
/// In ticks of [`crate::select::TICKS_PER_UNIT`], for each GPU: of looking whether one want might fit at all, and of
/// looking whether it fits beside the others, each constraint that it is in on top.
const FITS_TICKS: u64 = 1;
const OPTION_TICKS: u64 = 5;
/// The same of serving a want, of a try, of comparing two GPUs, and of an outlook.
const SERVE_TICKS: u64 = 20;
const TRY_TICKS: u64 = 20;
const TWINS_TICKS: u64 = 4;
const OUTLOOK_TICKS: u64 = 320;

/// What searches have cost so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct SearchCost {
    /// They bound the searches of a decision.
    pub steps: u32,
    /// They are to be paid.
    pub ticks: u64,
}

/// One GPU for one want.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Pick {
    pub cost: u64,
    pub picked: Picked,
    pub mib: u64,
    slots: u32,
}

/// What a GPU would have left, and what is taken of it, in MiB.
#[derive(Debug, Clone, Copy)]
pub(super) struct Fit {
    pub left: u64,
    pub mib: u64,
    /// The MIG device that is made for it, of a GPU that is cut.
    pub carving: Option<Carving>,
}

type Cost<'a> = &'a dyn Fn(&Gpu, Fit) -> u64;

/// The first way to serve all wants, cheapest GPUs first. `tried`: what the decision has tried on other nodes; this
/// search is added.
pub(super) fn run(node: &Node, terms: &Terms, cost: Cost<'_>, tried: &mut SearchCost) -> Option<Vec<Pick>> {
    let size = node.gpus.len() as u64 * terms.wants.len() as u64;
    tried.ticks = tried.ticks.saturating_add(SERVE_TICKS + FITS_TICKS * size);
    let fits = |want: &WantTerms| node.gpus.iter().filter(|gpu| want.left(gpu).is_some()).count();
    if terms.wants.iter().any(|want| want.gpus > 0 && fits(want) < want.gpus) {
        return None;
    }
    // The largest first: they have the least choice.
    let mut order: Vec<usize> = (0..terms.wants.len()).collect();
    let size = |at: usize| node.gpus.iter().map(|gpu| terms.wants[at].mib(gpu)).max();
    order.sort_by_cached_key(|at| Reverse(size(*at)));
    let order: Vec<usize> = order.into_iter().flat_map(|at| vec![at; terms.wants[at].gpus]).collect();
    let extra = vec![Extra::default(); node.gpus.len()];
    let values = vec![Vec::new(); terms.alike.len()];
    let most = STEPS_MAX.min(STEPS_OF_DECISION.saturating_sub(tried.steps).max(STEPS_MIN));
    let (tries, picks) = (SearchCost::default(), Vec::new());
    let mut search = NodeSearch { node, terms, cost, order, extra, values, picks, tries, outlooks: 0, most };
    let found = search.serve(0);
    let outlooks = search.outlooks.saturating_mul(OUTLOOK_STEPS);
    tried.steps = tried.steps.saturating_add(search.tries.steps).saturating_add(outlooks);
    let ticks = OUTLOOK_TICKS * u64::from(search.outlooks) + search.tries.ticks;
    tried.ticks = tried.ticks.saturating_add(ticks);
    found.then_some(search.picks)
}

/// What the picks so far take of a GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Extra {
    mib: u64,
    compute: u32,
    slots: u32,
    claims: Vec<u32>,
    /// MIG devices that are made of it.
    places: Vec<MigPlace>,
    /// Beside as many of these as it stands here, from 1: what would be made next of each profile, once somebody asks.
    outlooks: Outlooks,
}

/// It follows from the rest: nobody is another for it.
#[derive(Debug, Clone, Default)]
struct Outlooks(Vec<Option<Vec<Option<Carving>>>>);

impl PartialEq for Outlooks {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for Outlooks {}

struct NodeSearch<'a> {
    node: &'a Node,
    terms: &'a Terms,
    cost: Cost<'a>,
    /// Places of wants, one per GPU.
    order: Vec<usize>,
    extra: Vec<Extra>,
    /// By alike: the values of the picks so far that it is for.
    values: Vec<Vec<u32>>,
    picks: Vec<Pick>,
    tries: SearchCost,
    /// Outlooks that were made.
    outlooks: u32,
    most: u32,
}

impl NodeSearch<'_> {
    /// Serves what is left of the order from `nth` on.
    fn serve(&mut self, nth: usize) -> bool {
        let Some(&want) = self.order.get(nth) else { return true };
        // Each want and each constraint is asked of two GPUs that are compared.
        let of_want = self.terms.constraints_of(want).len() as u64;
        let of_twins = TWINS_TICKS + (self.terms.wants.len() + self.terms.columns.len()) as u64;
        self.tries.ticks += SERVE_TICKS + self.node.gpus.len() as u64 * (OPTION_TICKS + of_want);
        let mut options: Vec<Pick> =
            (0..self.node.gpus.len()).filter_map(|gpu| self.option(want, gpu)).collect();
        options.sort_unstable_by_key(|pick| (pick.cost, pick.picked.gpu));
        // GPUs of one want in one order only.
        let last = self.picks.last().filter(|last| last.picked.want == want);
        let last = last.map(|last| (last.cost, last.picked.gpu));
        let mut failed: Vec<usize> = Vec::new();
        for pick in options {
            let gpu = pick.picked.gpu;
            if last.is_some_and(|last| (pick.cost, gpu) < last) {
                continue;
            }
            self.tries.ticks += of_twins * failed.len() as u64;
            if failed.iter().any(|other| self.twins(*other, gpu)) {
                continue;
            }
            self.tries.steps += 1;
            self.tries.ticks += TRY_TICKS + of_want;
            if self.tries.steps > self.most {
                return false;
            }
            self.take(pick);
            if self.serve(nth + 1) {
                return true;
            }
            self.give(pick);
            failed.push(gpu);
        }
        false
    }

    /// The GPU for the want, if it fits beside the picks so far.
    fn option(&mut self, at: usize, gpu: usize) -> Option<Pick> {
        let (terms, node) = (self.terms, self.node);
        let (want, board) = (&terms.wants[at], &node.gpus[gpu]);
        let extra = &mut self.extra[gpu];
        if extra.claims.contains(&want.claim) {
            return None;
        }
        let (fit, slots) = match &board.cut {
            None => share(want, extra, board)?,
            Some(cut) => {
                // Open to it, and none of the picks so far in the way.
                want.carving(board, cut)?;
                let enough = want.enough(board);
                let carving = match extra.outlooks.0.last_mut() {
                    None => cut.next(enough),
                    Some(outlook) => {
                        let outlook = outlook.get_or_insert_with(|| {
                            self.outlooks += 1;
                            cut.outlook_beside(&extra.places)
                        });
                        enough.iter().find_map(|at| outlook.get(*at).copied().flatten())
                    }
                }?;
                let left = cut.left(carving, board.memory_mib).saturating_sub(extra.mib);
                (Fit { left, mib: cut.mib(carving.place), carving: Some(carving) }, 1)
            }
        };
        for &constraint in terms.constraints_of(at) {
            let (rule, value) = terms.asked(constraint, board.facts);
            let (value, values) = (value?, &self.values[constraint]);
            let fits = match rule {
                Rule::Same => values.first().is_none_or(|other| *other == value),
                Rule::Different => !values.contains(&value),
            };
            if !fits {
                return None;
            }
        }
        let picked = Picked { gpu, want: at, place: fit.carving.map(|carving| carving.place) };
        Some(Pick { cost: (self.cost)(board, fit), picked, mib: fit.mib, slots })
    }

    fn take(&mut self, pick: Pick) {
        let Picked { gpu, want: at, place } = pick.picked;
        let (want, board) = (&self.terms.wants[at], &self.node.gpus[gpu]);
        let extra = &mut self.extra[gpu];
        extra.mib = extra.mib.saturating_add(pick.mib);
        extra.compute = extra.compute.saturating_add(want.compute);
        extra.slots = extra.slots.saturating_add(pick.slots);
        extra.claims.push(want.claim);
        extra.places.extend(place);
        extra.outlooks.0.extend(place.map(|_| None));
        for &constraint in self.terms.constraints_of(at) {
            self.values[constraint].extend(self.terms.asked(constraint, board.facts).1);
        }
        self.picks.push(pick);
    }

    /// Undoes the last `take`.
    fn give(&mut self, pick: Pick) {
        self.picks.pop();
        let Picked { gpu, want: at, place } = pick.picked;
        for &constraint in self.terms.constraints_of(at) {
            self.values[constraint].pop();
        }
        let extra = &mut self.extra[gpu];
        extra.claims.pop();
        if place.is_some() {
            extra.places.pop();
            extra.outlooks.0.pop();
        }
        extra.mib -= pick.mib;
        extra.compute -= self.terms.wants[at].compute;
        extra.slots -= pick.slots;
    }

    /// Equal in all that matters: where one did not help, the other will not.
    fn twins(&self, one: usize, other: usize) -> bool {
        let (a, b) = (&self.node.gpus[one], &self.node.gpus[other]);
        let state = |gpu: &Gpu| (gpu.class, gpu.closed, gpu.free_mib(), gpu.free_compute(), gpu.free_slots());
        let instances = |gpu: &'_ Gpu| gpu.cut.as_ref().map(|cut| cut.instances().to_vec());
        state(a) == state(b)
            && instances(a) == instances(b)
            && self.extra[one] == self.extra[other]
            && self.terms.wants.iter().all(|want| want.chooses(a) == want.chooses(b))
            && self.terms.wants.iter().all(|want| want.tolerates(a) == want.tolerates(b))
            && self.terms.columns.iter().all(|column| column.value(a.facts) == column.value(b.facts))
    }
}

/// A share, or all of a GPU.
fn share(want: &WantTerms, extra: &Extra, board: &Gpu) -> Option<(Fit, u32)> {
    let left = want.left(board)?.checked_sub(extra.mib)?;
    let (mib, slots) = want.need(board)?;
    let (all_slots, compute) =
        (slots.saturating_add(extra.slots), want.compute.saturating_add(extra.compute));
    let fits = board.free_slots() >= all_slots && board.free_compute() >= compute;
    fits.then_some((Fit { left, mib, carving: None }, slots))
}
