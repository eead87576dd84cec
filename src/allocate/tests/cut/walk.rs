//! Random instances made and ended, over several boards, against a model that knows nothing but arrays of slices.
//! `TRANCHE_STEPS`: how many steps.

use std::collections::BTreeMap;

use super::*;

const STEPS: u64 = 6_000;

/// What is on a board of the model: instances by their rows, and whose they are.
#[derive(Debug, Clone, Default)]
struct Board {
    /// Row, start; none: nobody's of ours.
    instances: Vec<(usize, u32, Option<u64>)>,
}

impl Board {
    fn can(&self, rows: &[Row], row: usize, start: u32) -> bool {
        let (.., size) = rows[row];
        let run = |row: usize, start: u32| start..start + rows[row].6;
        let apart = |(other, at, _): &(usize, u32, Option<u64>)| {
            let (one, other) = (run(row, start), run(*other, *at));
            one.end <= other.start || other.end <= one.start
        };
        let slices: u32 = self.instances.iter().map(|(row, ..)| rows[*row].2).sum();
        let all = rows.iter().map(|row| row.2).max().unwrap();
        let same = self.instances.iter().filter(|(other, ..)| *other == row).count();
        size > 0
            && rows[row].5.contains(&start)
            && self.instances.iter().all(apart)
            && slices + rows[row].2 <= all
            && same < rows[row].3 as usize
    }

    fn free(&self, rows: &[Row], row: usize) -> Option<u32> {
        rows[row].5.iter().copied().find(|start| self.can(rows, row, *start))
    }

    /// Memory and compute slices of the largest that can still be made.
    fn largest(&self, rows: &[Row]) -> (u32, u32) {
        let possible = (0..rows.len()).filter(|row| self.free(rows, *row).is_some());
        possible.map(|row| (rows[row].6, rows[row].2)).max().unwrap_or_default()
    }
}

struct Dice(u64);

impl Dice {
    fn roll(&mut self, most: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % most.max(1)
    }
}

const NODES: [&str; 3] = ["a", "b", "c"];
const BOARDS: usize = 2;

struct Walk {
    rows: &'static [Row],
    index: Index,
    /// By node, then by board.
    boards: Vec<Board>,
    live: BTreeMap<u64, Placement>,
    dice: Dice,
    /// Since the last change of what is not ours.
    better: usize,
    made: usize,
    refused: usize,
}

impl Walk {
    fn spec(&self, node: usize) -> NodeSpec {
        let of = |nth: usize| {
            let foreign = self.boards[node * BOARDS + nth].instances.iter().filter(|one| one.2.is_none());
            let foreign: Vec<MigPlace> = foreign.map(|(row, start, _)| self.place(*row, *start)).collect();
            board(nth as u32, self.rows, &foreign)
        };
        let gpus = (0..BOARDS).map(of).collect();
        NodeSpec { name: NODES[node].into(), cpu_milli: 1000, memory: Bytes::from_mib(1000), gpus }
    }

    fn place(&self, row: usize, start: u32) -> MigPlace {
        MigPlace { profile_id: self.rows[row].0, placement: Run { start, size: self.rows[row].6 } }
    }

    /// The number of the board, the row and the start of a grant.
    fn read(&self, placement: &Placement, grant: &GpuGrant) -> (usize, usize, u32) {
        let node = NODES.iter().position(|name| *name == placement.node.as_str()).unwrap();
        let nth: usize = grant.device.as_str().strip_prefix("gpu-").unwrap().parse().unwrap();
        let Extent::Mig(at) = grant.extent else { panic!("{grant:?}") };
        let row = self.rows.iter().position(|row| row.0 == at.profile_id).unwrap();
        assert_eq!((at.placement.size, grant.memory.mib_floor()), (self.rows[row].6, self.rows[row].4));
        (node * BOARDS + nth, row, at.placement.start)
    }

    fn largest(&self, boards: &[Board]) -> (u32, u32) {
        boards.iter().map(|board| board.largest(self.rows)).max().unwrap()
    }

    fn carve(&mut self, step: u64) {
        let mib = self.dice.roll(100_000) as u64 + 1;
        let percent = [0, 0, 10, 30, 60][self.dice.roll(5)];
        let policy = Policy::ALL[self.dice.roll(3)];
        let gpus = 1 + u32::from(self.dice.roll(12) == 0);
        let shape = with(mig(Part::Memory(Bytes::from_mib(mib)), percent), |want| want.gpus = gpus);
        self.index.seen(&shape);
        let slices = self.rows.iter().map(|row| row.2).max().unwrap();
        let enough = |row: &usize| {
            let row = &self.rows[*row];
            row.4 >= mib && row.2 * 100 >= u32::from(percent) * slices
        };
        let mut enough: Vec<usize> = (0..self.rows.len()).filter(enough).collect();
        enough.sort_by_key(|row| (self.rows[*row].6, self.rows[*row].2));
        let first_of =
            |board: &Board| enough.iter().find_map(|row| Some((*row, board.free(self.rows, *row)?)));
        let first = self.boards.iter().position(|board| first_of(board).is_some());
        let decision = decide(&mut self.index, &[shape.into()], policy);
        let Ok(decision) = decision else {
            let fitting = |node: usize| {
                let boards = &self.boards[node * BOARDS..][..BOARDS];
                boards.iter().filter(|board| first_of(board).is_some()).count()
            };
            let most = (0..NODES.len()).map(fitting).max().unwrap();
            assert!(most < gpus as usize, "step {step}: {mib} MiB, {percent} % for {gpus}: there is room");
            self.refused += 1;
            return;
        };
        let placement = &decision.placements[0];
        let mut after = self.boards.clone();
        for grant in &placement.gpus {
            let (at, row, start) = self.read(placement, grant);
            assert!(enough.contains(&row), "step {step}: {grant:?} for {mib} MiB, {percent} %");
            assert!(after[at].can(self.rows, row, start), "step {step}: {grant:?} on {:?}", after[at]);
            assert_eq!(Some(row), first_of(&after[at]).map(|one| one.0), "the smallest that suffices");
            after[at].instances.push((row, start, Some(step)));
        }
        if policy != Policy::Spread && gpus == 1 {
            let first = first.unwrap();
            let mut naive = self.boards.clone();
            let (row, start) = first_of(&naive[first]).unwrap();
            naive[first].instances.push((row, start, None));
            let (ours, theirs) = (self.largest(&after), self.largest(&naive));
            assert!(ours >= theirs, "step {step}: {ours:?}, first fit {theirs:?}");
            self.better += usize::from(ours > theirs);
        }
        self.boards = after;
        self.index.apply(&PodUid::new(step.to_string()), placement).unwrap();
        self.live.insert(step, placement.clone());
        self.made += 1;
    }

    fn release(&mut self) {
        let all: Vec<u64> = self.live.keys().copied().collect();
        let Some(pod) = all.get(self.dice.roll(all.len())).copied() else { return };
        assert_eq!(self.index.remove(&PodUid::new(pod.to_string())), self.live.remove(&pod));
        self.boards.iter_mut().for_each(|board| board.instances.retain(|one| one.2 != Some(pod)));
    }

    /// Somebody makes an instance, or ends one.
    fn foreign(&mut self) {
        let at = self.dice.roll(self.boards.len());
        let own = self.boards[at].instances.iter().position(|one| one.2.is_none());
        match own.filter(|_| self.dice.roll(3) > 0) {
            Some(own) => drop(self.boards[at].instances.remove(own)),
            None => {
                let row = self.dice.roll(self.rows.len());
                let starts = self.rows[row].5;
                let start = starts[self.dice.roll(starts.len())];
                if self.boards[at].can(self.rows, row, start) {
                    self.boards[at].instances.push((row, start, None));
                }
            }
        }
        let spec = self.spec(at / BOARDS);
        self.index.insert_node(&spec);
    }

    /// Another controller reads all of it anew, grants before GPUs or the other way round.
    fn crash(&mut self) {
        let mut index = Index::new();
        (0..NODES.len()).for_each(|node| index.insert_node(&self.spec(node)));
        for (pod, placement) in &self.live {
            index.apply(&PodUid::new(pod.to_string()), placement).unwrap();
        }
        self.index = index;
    }

    fn check(&self, step: u64) {
        assert_eq!(audit(&self.index), vec![], "step {step}");
        for (node, view) in self.index.nodes().enumerate() {
            for (nth, gpu) in view.gpus().enumerate() {
                let (size, slices) = self.boards[node * BOARDS + nth].largest(self.rows);
                let row = self.rows.iter().find(|row| (row.6, row.2) == (size, slices));
                assert_eq!(gpu.memory().1.mib_floor(), row.map_or(0, |row| row.4), "step {step}");
            }
        }
    }
}

#[test]
fn whatever_is_made_and_ended_nothing_overlaps_or_leaks_and_large_profiles_stay_possible() {
    let steps = std::env::var("TRANCHE_STEPS").ok().and_then(|text| text.parse().ok()).unwrap_or(STEPS);
    for rows in [H100, RTX_PRO_6000] {
        let boards = vec![Board::default(); NODES.len() * BOARDS];
        let (index, live, dice) = (Index::new(), BTreeMap::new(), Dice(17));
        let mut walk = Walk { rows, index, boards, live, dice, better: 0, made: 0, refused: 0 };
        walk.crash();
        for step in 0..steps / 2 {
            match walk.dice.roll(20) {
                0..=8 => walk.carve(step),
                9..=16 => walk.release(),
                17..=18 => walk.foreign(),
                _ => walk.crash(),
            }
            walk.check(step);
        }
        let Walk { better, made, refused, .. } = walk;
        assert!(made as u64 > steps / 10 && refused > 100 && better > 10, "{made}, {refused}, {better}");
        println!("{made} made, {refused} refused, better than first fit {better} times");
        let pods: Vec<u64> = walk.live.keys().copied().collect();
        for pod in pods {
            walk.index.remove(&PodUid::new(pod.to_string()));
        }
        walk.boards.iter_mut().for_each(|board| board.instances.clear());
        (0..NODES.len()).for_each(|node| walk.index.insert_node(&walk.spec(node)));
        walk.check(steps);
        let all = walk.index.nodes().flat_map(|node| node.gpus().collect::<Vec<_>>());
        assert!(all.into_iter().all(|gpu| gpu.memory().0 == gpu.memory().1), "nothing is left behind");
    }
}
