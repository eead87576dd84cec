//! Which pods of a node could make room for what waits: arithmetic on what each GPU has and what each pod has of it.
//! What it lets through may still not do. What it leaves out does not, but for chains: pods that leave only so that those
//! that make room find a place on their own node.

use std::collections::BTreeMap;

use super::super::ask::PodAsk;
use super::super::fit::{Terms, WantTerms};
use super::super::index::Index;
use super::super::node::{COMPUTE_ALL, Gpu, Node, Placement};
use super::{LOOK_TICKS, MOVES_MAX, Mover};
use crate::model::names::{DeviceName, NodeName};
use crate::model::share::DaemonScope;

/// Of looking at one set of pods.
const SET_TICKS: u64 = 60;

/// What a search has cost, and what it may cost, in ticks.
pub(super) struct Meter {
    pub spent: u64,
    most: u64,
}

impl Meter {
    pub fn new(ticks: u64) -> Self {
        Self { spent: 0, most: ticks }
    }

    pub fn pay(&mut self, ticks: u64) {
        self.spent = self.spent.saturating_add(ticks);
    }

    pub fn is_spent(&self) -> bool {
        self.is_spent_with(0)
    }

    /// The same with what others have counted.
    pub fn is_spent_with(&self, more: u64) -> bool {
        self.spent.saturating_add(more) >= self.most
    }
}

/// What is in use of a GPU, or was given back.
#[derive(Debug, Clone, Copy, Default)]
struct UsedAmount {
    mib: u64,
    compute: u32,
    slots: u64,
}

impl UsedAmount {
    fn plus(self, other: Self) -> Self {
        Self {
            mib: self.mib.saturating_add(other.mib),
            compute: self.compute.saturating_add(other.compute),
            slots: self.slots.saturating_add(other.slots),
        }
    }

    fn minus(self, other: Self) -> Self {
        Self {
            mib: self.mib.saturating_sub(other.mib),
            compute: self.compute.saturating_sub(other.compute),
            slots: self.slots.saturating_sub(other.slots),
        }
    }

    fn is_none(self) -> bool {
        self.mib == 0 && self.slots == 0
    }
}

/// A GPU of a node.
struct Board {
    /// Place among the node's.
    at: usize,
    closed: bool,
    /// What waits has it for itself.
    alone: bool,
    all: UsedAmount,
    used: UsedAmount,
    /// Who has a part, by place in the site's pods.
    users: Vec<usize>,
    /// Of each want: what it needs here; none: it does not come here.
    needs: Vec<Option<UsedAmount>>,
}

impl Board {
    fn of(at: usize, gpu: &Gpu, wants: &[WantTerms], alone: bool) -> Self {
        let need = |want: &WantTerms| {
            // Moves make no room on GPUs that are cut into MIG devices.
            if gpu.cut.is_some() {
                return None;
            }
            let (mib, slots) = want.need(gpu)?;
            let slots = u64::from(slots);
            let compute = want.compute;
            (want.tolerates(gpu) && want.chooses(gpu)).then_some(UsedAmount { mib, compute, slots })
        };
        Self {
            at,
            closed: gpu.closed,
            alone: alone && gpu.daemon == DaemonScope::Gpu,
            all: UsedAmount { mib: gpu.memory_mib, compute: COMPUTE_ALL, slots: gpu.slots.into() },
            used: UsedAmount { mib: gpu.used_mib, compute: gpu.used_compute, slots: gpu.used_slots },
            users: Vec::new(),
            needs: wants.iter().map(need).collect(),
        }
    }

    /// The want fits once so much is given back. `opened`: a pod that closes it leaves.
    fn fits(&self, want: usize, back: UsedAmount, opened: bool) -> bool {
        let Some(need) = self.needs[want] else { return false };
        if self.closed && !opened {
            return false;
        }
        let used = self.used.minus(back);
        let all = used.plus(need);
        (!self.alone || used.is_none())
            && all.mib <= self.all.mib
            && all.compute <= self.all.compute
            && all.slots <= self.all.slots
    }
}

/// A pod of a site.
struct MovablePod {
    /// Place in the list of movers.
    mover: usize,
    /// Its parts, by place of the GPU.
    parts: Vec<(usize, UsedAmount)>,
    several: bool,
}

/// A node on which pods that leave could make room.
pub(super) struct MoveSite {
    pub node: NodeName,
    /// Fewer moves than that do not do.
    pub least: usize,
    boards: Vec<Board>,
    pods: Vec<MovablePod>,
    /// How many GPUs each want needs.
    gpus: Vec<usize>,
    /// CPU, memory in MiB and pods that are lacking.
    lacks: [u64; 3],
}

/// How many pods have to leave for a want, at least.
#[derive(Clone, Copy)]
struct Emptying {
    least: usize,
    /// On the GPUs that need the fewest, but for the last of them; and on that.
    beside: usize,
    last: usize,
}

impl Emptying {
    /// The same if one of the GPUs is one that so many have to leave.
    fn with(self, least: usize) -> usize {
        self.least.max(self.beside + least.max(self.last))
    }
}

/// All sites, and the MiB that what waits would get at most.
pub(super) fn sites(
    index: &mut Index,
    ask: &PodAsk,
    alone: bool,
    movers: &[Mover],
    meter: &mut Meter,
) -> (Vec<MoveSite>, u64) {
    let mut by_node: BTreeMap<&NodeName, Vec<usize>> = BTreeMap::new();
    for (at, mover) in movers.iter().enumerate() {
        by_node.entry(&mover.has.node).or_default().push(at);
    }
    let Index { nodes, score_tables, ids, .. } = index;
    let terms = Terms::new(&ask.shape, nodes, &mut score_tables.choices);
    let worth = |want: &WantTerms| {
        let most = want.needs.iter().flatten().map(|(mib, _)| *mib).max().unwrap_or(0);
        most.saturating_mul(want.gpus as u64)
    };
    let worth = terms.wants.iter().map(worth).fold(0, u64::saturating_add);
    let mut sites = Vec::new();
    for (name, of_node) in by_node.into_iter().filter(|(name, _)| ask.nodes.allow(name)) {
        meter.pay(LOOK_TICKS.saturating_mul(of_node.len() as u64));
        let Some(node) = ids.get(name).and_then(|id| nodes.all[*id].as_ref()) else { continue };
        let site = MoveSite::of(node, &terms, alone, movers, &of_node);
        sites.extend(site.filter(|site| site.least <= MOVES_MAX));
    }
    (sites, worth)
}

impl MoveSite {
    /// None: there is no room, whoever leaves.
    fn of(node: &Node, terms: &Terms, alone: bool, movers: &[Mover], of_node: &[usize]) -> Option<Self> {
        let boards = node.gpus.iter().enumerate();
        let mut boards: Vec<Board> =
            boards.map(|(at, gpu)| Board::of(at, gpu, &terms.wants, alone)).collect();
        let at = |device: &DeviceName| node.gpus.iter().position(|gpu| gpu.device == *device);
        let mut pods = Vec::with_capacity(of_node.len());
        let mut back = [0_u64; 3];
        for mover in of_node {
            let Mover { has, several } = &movers[*mover];
            let mut parts: Vec<(usize, UsedAmount)> = Vec::with_capacity(has.gpus.len());
            for grant in &has.gpus {
                let Some(at) = at(&grant.device) else { continue };
                let (mib, slots) = (grant.memory.mib_ceil(), grant.slots);
                parts.push((at, UsedAmount { mib, compute: grant.percent(), slots: slots.into() }));
                if boards[at].users.last() != Some(&pods.len()) {
                    boards[at].users.push(pods.len());
                }
            }
            for (sum, one) in back.iter_mut().zip(rooms(has)) {
                *sum = sum.saturating_add(one);
            }
            pods.push(MovablePod { mover: *mover, parts, several: *several });
        }
        let needed = [terms.cpu_milli, terms.memory_mib, terms.pods];
        let free = [node.free_cpu_milli(), node.free_memory_mib(), node.free_pods()];
        let lacks: [u64; 3] = std::array::from_fn(|nth| needed[nth].saturating_sub(free[nth]));
        if lacks.iter().zip(back).any(|(lack, back)| *lack > back) {
            return None;
        }
        let gpus = terms.wants.iter().map(|want| want.gpus).collect();
        let mut site = Self { node: node.name.clone(), least: 1, boards, pods, gpus, lacks };
        site.least = site.least()?;
        Some(site)
    }

    /// None: some want has too few GPUs, whoever leaves.
    fn least(&self) -> Option<usize> {
        self.wants()
            .map(|want| Some(self.emptying(want)?.least))
            .try_fold(1, |most, one| Some(most.max(one?)))
    }

    /// By their places; those that need GPUs.
    fn wants(&self) -> impl Iterator<Item = usize> {
        self.gpus.iter().enumerate().filter(|(_, gpus)| **gpus > 0).map(|(want, _)| want)
    }

    /// None: the want has too few GPUs, whoever leaves.
    fn emptying(&self, want: usize) -> Option<Emptying> {
        let gpus = self.gpus[want];
        let mut each: Vec<usize> =
            self.boards.iter().filter_map(|board| self.least_on(board, want)).collect();
        if each.len() < gpus {
            return None;
        }
        each.sort_unstable();
        let last = each[gpus - 1];
        // Who has parts of several GPUs leaves all of them at once.
        let spans = self.pods.iter().any(|pod| pod.parts.len() > 1);
        let least = if spans { last } else { each.iter().take(gpus).sum() };
        Some(Emptying { least, beside: if spans { 0 } else { least - last }, last })
    }

    /// So many of a GPU's users have to leave at least for a want. None: it does not fit even without all of them.
    fn least_on(&self, board: &Board, want: usize) -> Option<usize> {
        let closing = board.users.iter().filter(|user| self.pods[**user].several).count();
        let parts: Vec<UsedAmount> = board.users.iter().map(|user| self.part(*user, board.at)).collect();
        let all = parts.iter().fold(UsedAmount::default(), |sum, part| sum.plus(*part));
        if !board.fits(want, all, closing > 0) {
            return None;
        }
        let need = board.needs[want]?;
        let over = board.used.plus(need).minus(board.all);
        let count = |lacks: u64, of: fn(&UsedAmount) -> u64| {
            let mut each: Vec<u64> = parts.iter().map(of).collect();
            each.sort_unstable_by(|a, b| b.cmp(a));
            let (mut sum, mut count) = (0_u64, 0);
            for one in each {
                if sum >= lacks {
                    break;
                }
                (sum, count) = (sum.saturating_add(one), count + 1);
            }
            count
        };
        let over = match board.alone {
            true => board.used,
            false => over,
        };
        let by_amount = count(over.mib, |part| part.mib)
            .max(count(over.compute.into(), |part| part.compute.into()))
            .max(count(over.slots, |part| part.slots));
        Some(by_amount.max(usize::from(board.closed)))
    }

    /// What a user has of a board, all its shares there together.
    fn part(&self, user: usize, board: usize) -> UsedAmount {
        let parts = self.pods[user].parts.iter().filter(|(at, _)| *at == board);
        parts.fold(UsedAmount::default(), |sum, (_, part)| sum.plus(*part))
    }

    /// Tells each set of so many pods that could make room, with its MiB: `worth` at most. `alone`: for nobody else at the
    /// same time, who may need room on more GPUs.
    pub fn each_set(
        &self,
        movers: &[Mover],
        (size, alone): (usize, bool),
        worth: u64,
        meter: &mut Meter,
        tell: &mut dyn FnMut(u64, &[usize]),
    ) {
        let one_gpu = self.gpus.iter().sum::<usize>() == 1 && self.lacks == [0; 3];
        let wants: Vec<(usize, Emptying)> =
            self.wants().filter_map(|want| Some((want, self.emptying(want)?))).collect();
        let useful = |board: &&Board| {
            wants.iter().any(|(want, emptying)| {
                let needs = |least| if alone { emptying.with(least) } else { least };
                self.least_on(board, *want).is_some_and(|least| needs(least) <= size)
            })
        };
        let useful = self.boards.iter().filter(useful);
        let mut search = Choosing { site: self, movers, size, worth, meter, tell, chosen: Vec::new() };
        if one_gpu {
            // Only who has a part of that GPU makes room on it.
            for board in useful {
                search.from(&board.users, 0, 0);
            }
            return;
        }
        let mut users: Vec<usize> = match self.lacks {
            [0, 0, 0] => useful.flat_map(|board| board.users.iter().copied()).collect(),
            _ => (0..self.pods.len()).collect(),
        };
        users.sort_unstable();
        users.dedup();
        search.from(&users, 0, 0);
    }

    /// All wants fit, each by itself, once these have left.
    fn makes_room(&self, chosen: &[usize], movers: &[Mover]) -> bool {
        let mut back = [0_u64; 3];
        for pod in chosen {
            for (sum, one) in back.iter_mut().zip(rooms(&movers[self.pods[*pod].mover].has)) {
                *sum = sum.saturating_add(one);
            }
        }
        if self.lacks.iter().zip(back).any(|(lack, back)| *lack > back) {
            return false;
        }
        let given = |at: usize| {
            let parts = chosen.iter().flat_map(|pod| {
                let MovablePod { parts, several, .. } = &self.pods[*pod];
                parts.iter().filter(move |(of, _)| *of == at).map(|(_, part)| (*part, *several))
            });
            parts.fold((UsedAmount::default(), false), |(sum, opened), (part, several)| {
                (sum.plus(part), opened || several)
            })
        };
        self.gpus.iter().enumerate().filter(|(_, gpus)| **gpus > 0).all(|(want, gpus)| {
            let fits = |board: &&Board| {
                let (back, opened) = given(board.at);
                board.fits(want, back, opened)
            };
            self.boards.iter().filter(fits).take(*gpus).count() == *gpus
        })
    }
}

/// Sets of pods of a site.
struct Choosing<'a> {
    site: &'a MoveSite,
    movers: &'a [Mover],
    size: usize,
    worth: u64,
    meter: &'a mut Meter,
    tell: &'a mut dyn FnMut(u64, &[usize]),
    chosen: Vec<usize>,
}

impl Choosing<'_> {
    /// Of these from the `first` on, beside those that were chosen.
    fn from(&mut self, users: &[usize], first: usize, mib: u64) {
        if self.chosen.len() == self.size {
            self.meter.pay(SET_TICKS);
            if self.site.makes_room(&self.chosen, self.movers) {
                let set: Vec<usize> = self.chosen.iter().map(|pod| self.site.pods[*pod].mover).collect();
                (self.tell)(mib, &set);
            }
            return;
        }
        for at in first..users.len() {
            if self.meter.is_spent() {
                return;
            }
            let mib = mib.saturating_add(self.movers[self.site.pods[users[at]].mover].mib());
            if mib > self.worth {
                continue;
            }
            self.chosen.push(users[at]);
            self.from(users, at + 1, mib);
            self.chosen.pop();
        }
    }
}

/// What a pod takes of its node: CPU, MiB of memory, and a place among the pods.
fn rooms(has: &Placement) -> [u64; 3] {
    [has.cpu_milli, has.memory.mib_ceil(), has.pods]
}
