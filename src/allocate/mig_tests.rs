//! Placement of MIG instances against a model that knows nothing but an array of slices.

use super::*;
use crate::model::gpu::{MigCapacity, Placement};

/// As NVML tells it: id, name, compute slices, most, MiB, [CE, DEC, ENC, JPEG, OFA], starts, size.
type Row = (u32, &'static str, u32, u32, u64, [u32; 5], &'static [u32], u32);

const H100: &[Row] = &[
    (19, "1g.10gb", 1, 7, 9_984, [1, 1, 0, 1, 0], &[0, 1, 2, 3, 4, 5, 6], 1),
    (20, "1g.10gb+me", 1, 1, 9_984, [1, 1, 0, 1, 1], &[0, 1, 2, 3, 4, 5, 6], 1),
    (15, "1g.20gb", 1, 4, 20_096, [1, 1, 0, 1, 0], &[0, 2, 4, 6], 2),
    (14, "2g.20gb", 2, 3, 20_096, [2, 2, 0, 2, 0], &[0, 2, 4], 2),
    (9, "3g.40gb", 3, 2, 40_448, [3, 3, 0, 3, 0], &[0, 4], 4),
    (5, "4g.40gb", 4, 1, 40_448, [4, 4, 0, 4, 0], &[0], 4),
    (0, "7g.80gb", 7, 1, 81_152, [8, 7, 0, 7, 1], &[0], 8),
];

const RTX_PRO_6000: &[Row] = &[
    (14, "1g.24gb", 1, 4, 24_192, [1, 1, 1, 1, 0], &[0, 3, 6, 9], 3),
    (65, "1g.24gb+me.all", 1, 1, 24_192, [1, 4, 4, 4, 1], &[0, 3, 6, 9], 3),
    (67, "1g.24gb-me", 1, 4, 24_192, [1, 0, 0, 0, 0], &[0, 3, 6, 9], 3),
    (5, "2g.48gb", 2, 2, 48_512, [2, 2, 2, 2, 0], &[0, 6], 6),
    (66, "2g.48gb-me", 2, 2, 48_512, [2, 0, 0, 0, 0], &[0, 6], 6),
    (0, "4g.96gb", 4, 1, 97_280, [4, 4, 4, 4, 1], &[0], 12),
];

fn profiles(rows: &[Row]) -> Vec<MigProfile> {
    let profile = |row: &Row| {
        let (
            id,
            name,
            slices,
            most,
            mib,
            [copy_engines, decoders, encoders, jpeg_engines, ofa_engines],
            starts,
            size,
        ) = *row;
        let memory = Bytes::from_mib(mib);
        let capacity = MigCapacity {
            memory,
            multiprocessors: slices * 16,
            copy_engines,
            decoders,
            encoders,
            jpeg_engines,
            ofa_engines,
        };
        let placements = starts.iter().map(|start| Placement { start: *start, size }).collect();
        MigProfile { id, name: name.to_owned(), slices, most, capacity, placements }
    };
    rows.iter().map(profile).collect()
}

fn ask(mib: u64, percent: u32) -> MigAsk {
    MigAsk { amount: Amount::Memory(Bytes::from_mib(mib)), percent }
}

#[test]
fn the_smallest_profile_that_suffices_is_given() {
    let all = profiles(H100);
    let empty = MigLayout::new(&all, []);
    for (mib, percent, expected) in [
        (1, 0, "1g.10gb"),
        (9_984, 14, "1g.10gb"),
        (9_985, 0, "1g.20gb"),
        (9_985, 20, "2g.20gb"),
        (1, 28, "2g.20gb"),
        (1, 29, "3g.40gb"),
        (20_097, 0, "3g.40gb"),
        (40_448, 50, "4g.40gb"),
        (40_449, 0, "7g.80gb"),
        (1, 100, "7g.80gb"),
    ] {
        let choice = empty.choose(ask(mib, percent)).unwrap();
        assert_eq!(choice.profile.name, expected, "{mib} MiB, {percent} %");
    }
    let words = empty.choose(ask(90_000, 0)).unwrap_err().to_string();
    assert!(words.contains("90000 MiB") && words.contains("7g.80gb with 81152 MiB"), "{words}");
    assert_eq!(MigLayout::new(&[], []).choose(ask(1, 0)), Err(NoMig::NoProfiles));
}

#[test]
fn a_larger_profile_serves_where_the_smallest_has_no_room() {
    let all = profiles(H100);
    let place = |profile_id, start, size| MigPlace { profile_id, placement: Placement { start, size } };
    // 2g at 0, 2 and 4 leave a 1g at 6, and a double one there.
    let mut full = MigLayout::new(&all, [place(14, 0, 2), place(14, 2, 2), place(14, 4, 2)]);
    assert_eq!(full.choose(ask(1, 0)).unwrap().profile.name, "1g.10gb");
    full.add(place(19, 6, 1));
    let words = full.choose(ask(1, 0)).unwrap_err().to_string();
    assert!(words.contains("1g.10gb, 1g.20gb, 2g.20gb"), "{words}");
    assert!(full.remove(place(14, 2, 2)) && !full.remove(place(14, 2, 2)));
    // An instance of a profile that NVML does not list any more takes its slices all the same.
    let foreign = MigLayout::new(&all, [place(77, 0, 4)]);
    assert_eq!(foreign.choose(ask(40_000, 0)).unwrap().place.placement, Placement { start: 4, size: 4 });
}

#[test]
fn small_instances_are_put_where_large_ones_cannot_be() {
    let all = profiles(H100);
    let mut layout = MigLayout::new(&all, []);
    let mut starts = Vec::new();
    for _ in 0..7 {
        let choice = layout.choose(ask(1, 0)).unwrap();
        starts.push(choice.place.placement.start);
        layout.add(choice.place);
        // A 4g stays possible as long as there is any way, then a 2g: each half of the board is filled in turn.
        let largest = layout.largest().map_or(0, |profile| profile.slices);
        assert_eq!(largest, [4, 4, 4, 2, 2, 1, 0][starts.len() - 1], "{starts:?}");
    }
    assert_eq!(
        layout.choose(ask(1, 0)).unwrap_err(),
        NoMig::NoRoom { profiles: "1g.10gb, 1g.20gb, 2g.20gb, 3g.40gb, 4g.40gb, 7g.80gb".to_owned() }
    );
    let first = MigLayout::new(&all, []).choose(ask(40_000, 0)).unwrap();
    assert_eq!(first.place.placement.start, 4, "beside a 3g there is room for a 4g only at 0");
}

#[test]
fn engines_are_counted_too() {
    let all = profiles(RTX_PRO_6000);
    let mut layout = MigLayout::new(&all, []);
    let media = all.iter().find(|profile| profile.name == "1g.24gb+me.all").unwrap();
    layout.add(layout.place(media).unwrap().place);
    let count = |name: &str| layout.free(all.iter().find(|profile| profile.name == name).unwrap()).count();
    assert_eq!((count("1g.24gb"), count("1g.24gb-me"), count("2g.48gb-me")), (0, 3, 1));
    assert!(matches!(layout.choose(ask(1, 0)), Err(NoMig::NoRoom { .. })), "a suffix is for who names it");
}

/// The model: which slice is whose, and counts.
struct Brute<'a> {
    rows: &'a [Row],
    /// By memory slice: the number of the instance.
    slices: Vec<Option<usize>>,
    instances: Vec<Option<(usize, u32)>>,
}

impl<'a> Brute<'a> {
    fn new(rows: &'a [Row]) -> Self {
        let most = rows.iter().flat_map(|row| row.6.iter().map(|start| start + row.7)).max().unwrap();
        Self { rows, slices: vec![None; most as usize], instances: Vec::new() }
    }

    fn can(&self, row: usize, start: u32) -> bool {
        let (_, _, slices, most, _, engines, starts, size) = self.rows[row];
        let run = start as usize..(start + size) as usize;
        let live = || self.instances.iter().flatten().map(|(row, _)| &self.rows[*row]);
        let all = |of: &dyn Fn(&Row) -> u32| self.rows.iter().map(of).max().unwrap();
        let sum = |of: &dyn Fn(&Row) -> u32| live().map(of).sum::<u32>();
        starts.contains(&start)
            && self.slices[run].iter().all(Option::is_none)
            && sum(&|row| row.2) + slices <= all(&|row| row.2)
            && (0..5).all(|e| sum(&|row| row.5[e]) + engines[e] <= all(&|row| row.5[e]))
            && live().filter(|other| other.0 == self.rows[row].0).count() < most as usize
    }

    fn make(&mut self, row: usize, start: u32) {
        assert!(self.can(row, start), "{} at {start}: {:?}", self.rows[row].1, self.slices);
        let number = self.instances.len();
        for slice in start..start + self.rows[row].7 {
            self.slices[slice as usize] = Some(number);
        }
        self.instances.push(Some((row, start)));
    }

    fn end(&mut self, number: usize) -> (usize, u32) {
        let gone = self.instances[number].take().unwrap();
        self.slices.iter_mut().filter(|slice| **slice == Some(number)).for_each(|slice| *slice = None);
        gone
    }

    fn free(&self, row: usize) -> Vec<u32> {
        self.rows[row].6.iter().copied().filter(|start| self.can(row, *start)).collect()
    }

    /// Memory and compute slices of the largest profile that can still be made.
    fn largest(&self) -> (u32, u32) {
        let possible = (0..self.rows.len()).filter(|row| !self.free(*row).is_empty());
        possible.map(|row| (self.rows[row].7, self.rows[row].2)).max().unwrap_or_default()
    }

    fn after(&self, row: usize, start: u32) -> (u32, u32) {
        let mut then =
            Brute { rows: self.rows, slices: self.slices.clone(), instances: self.instances.clone() };
        then.make(row, start);
        then.largest()
    }
}

/// A small generator, so that the walk is the same each time.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, most: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % most.max(1)
    }
}

/// 10^5 instances made for asks, made by somebody else anywhere, and ended: nothing overlaps, what is refused has no
/// room, and the largest profile that stays possible is never smaller than after a first fit.
#[test]
fn whatever_is_made_and_ended_nothing_overlaps_and_large_profiles_stay_possible() {
    let mut dice = Dice(17);
    for rows in [H100, RTX_PRO_6000] {
        let all = profiles(rows);
        let (mut brute, mut layout) = (Brute::new(rows), MigLayout::new(&all, []));
        let (mut made, mut better) = (0, 0);
        for step in 0..50_000 {
            let live: Vec<usize> =
                (0..brute.instances.len()).filter(|number| brute.instances[*number].is_some()).collect();
            let place = |row: usize, start: u32| MigPlace {
                profile_id: rows[row].0,
                placement: Placement { start, size: rows[row].7 },
            };
            match dice.roll(10) {
                0..=3 if !live.is_empty() => {
                    let (row, start) = brute.end(live[dice.roll(live.len())]);
                    assert!(layout.remove(place(row, start)), "step {step}");
                }
                4 => {
                    let row = dice.roll(rows.len());
                    let free = brute.free(row);
                    if !free.is_empty() {
                        let start = free[dice.roll(free.len())];
                        brute.make(row, start);
                        layout.add(place(row, start));
                    }
                }
                _ => {
                    let memory = Bytes::from_mib(dice.roll(100_000) as u64 + 1);
                    let asked = ask(memory.mib_floor(), dice.roll(80) as u32);
                    let chosen = layout.choose(asked);
                    let slices = rows.iter().map(|row| row.2).max().unwrap();
                    let enough = |row: &&Row| {
                        row.1.ends_with("gb")
                            && Bytes::from_mib(row.4) >= memory
                            && row.2 * 100 >= asked.percent * slices
                    };
                    let room =
                        |row: &Row| !brute.free(rows.iter().position(|r| r.0 == row.0).unwrap()).is_empty();
                    let mut fitting: Vec<&Row> = rows.iter().filter(enough).filter(|row| room(row)).collect();
                    fitting.sort_by_key(|row| (row.7, row.2));
                    let Ok(chosen) = chosen else {
                        assert!(fitting.is_empty(), "step {step}: {asked:?} could have {:?}", fitting[0]);
                        continue;
                    };
                    let row = rows.iter().position(|row| row.0 == chosen.profile.id).unwrap();
                    assert_eq!(
                        (rows[row].7, rows[row].2),
                        (fitting[0].7, fitting[0].2),
                        "step {step}: {asked:?}"
                    );
                    let start = chosen.place.placement.start;
                    let (ours, first) = (brute.after(row, start), brute.after(row, brute.free(row)[0]));
                    assert!(
                        ours >= first,
                        "step {step}: {asked:?} at {start}: {ours:?}, first fit {first:?}"
                    );
                    better += usize::from(ours > first);
                    made += 1;
                    brute.make(row, start);
                    layout.add(chosen.place);
                }
            }
            assert_eq!(layout.instances().len(), brute.instances.iter().flatten().count(), "step {step}");
            let largest = layout.largest().map(|profile| (profile.placements[0].size, profile.slices));
            assert_eq!(largest.unwrap_or_default(), brute.largest(), "step {step}");
            // Ended ones are forgotten now and then, so that a step stays cheap.
            if brute.instances.len() > 64 {
                let live: Vec<_> = brute.instances.iter().flatten().copied().collect();
                brute = Brute::new(rows);
                live.into_iter().for_each(|(row, start)| brute.make(row, start));
            }
        }
        assert!(made > 5_000, "{made} made");
        assert!(better > 100 || rows.len() == RTX_PRO_6000.len(), "first fit was as good but for {better}");
    }
}
