//! Victims on a node, against every set of them that there is.

use std::cmp::Reverse;

use super::*;
use crate::allocate::victims::{Candidate, Closed, EvictionSite, Freed, Rank, Victims};
use crate::model::names::NodeName;

const GPUS: u32 = 3;
const MIB: u64 = 100;

fn grant(gpu: u32, mib: u64, percent: u8) -> GpuGrant {
    GpuGrant {
        want: 0,
        device: DeviceName::whole(gpu),
        memory: Bytes::from_mib(mib),
        compute: Percent::try_from(percent).ok(),
        slots: 1,
        extent: Extent::Part,
    }
}

fn frees(grants: &[GpuGrant]) -> Freed {
    Freed {
        gpus: grants.iter().map(|grant| (grant.clone(), false)).collect(),
        cpu_milli: 1000,
        memory: Bytes::from_mib(1024),
        pods: 1,
    }
}

/// A node `n` with these shares on it; all of its CPU is left.
fn with_shares<'a>(gpus: u32, shares: impl Iterator<Item = &'a GpuGrant>) -> Index {
    let mut index = index(&[node("n", gpus, MIB)]);
    take(&mut index, shares);
    index
}

fn take<'a>(index: &mut Index, shares: impl Iterator<Item = &'a GpuGrant>) {
    for (nth, share) in shares.enumerate() {
        let place = Placement {
            node: "n".into(),
            gpus: vec![share.clone()],
            cpu_milli: 0,
            memory: Bytes(0),
            pods: 0,
        };
        index.apply(&PodUid::new(format!("p{nth}")), &place).unwrap();
    }
}

fn look_to_beat(
    index: &mut Index,
    shape: &Shape,
    candidates: &[Candidate],
    beat: Option<Rank>,
) -> Option<Victims> {
    let open = |_: &DeviceName| Closed { shut: false, groups: 0 };
    let node = NodeName::new("n");
    let site = EvictionSite { node: &node, closed: &open, soon: &[], candidates, budgets: &[], beat };
    let mut preemptor = index.preemptor(shape, false);
    index.victims(&mut preemptor, &site)
}

fn look(index: &mut Index, shape: &Shape, candidates: &[Candidate], budgets: &[u32]) -> Option<Victims> {
    let open = |_: &DeviceName| Closed { shut: false, groups: 0 };
    let node = NodeName::new("n");
    let site = EvictionSite { node: &node, closed: &open, soon: &[], candidates, budgets, beat: None };
    let mut preemptor = index.preemptor(shape, false);
    index.victims(&mut preemptor, &site)
}

fn sorted(mut candidates: Vec<Candidate>) -> Vec<Candidate> {
    candidates.sort_by_key(|one| (Reverse(one.priority), one.start));
    candidates
}

/// Priority, start, GPU and MiB.
type Holder = (i32, i64, u32, u64);
/// Who is there, how much is asked for, and who ends.
type Case = (&'static [Holder], u64, &'static [usize]);

#[test]
fn as_few_and_as_unimportant_ones_as_it_takes() {
    let cases: [Case; 7] = [
        (&[(5, 1, 0, 100), (1, 2, 1, 100), (3, 3, 2, 100)], 60, &[2]),
        // Of two with one priority the younger.
        (&[(1, 1, 0, 100), (1, 9, 1, 100)], 60, &[1]),
        // Two unimportant ones rather than an important one.
        (&[(5, 1, 0, 100), (1, 2, 1, 50), (1, 3, 1, 50)], 100, &[1, 2]),
        // The one that gives enough alone.
        (&[(2, 1, 0, 30), (1, 2, 0, 70)], 60, &[1]),
        (&[(1, 1, 0, 30), (2, 2, 0, 70)], 60, &[0]),
        (&[(1, 1, 0, 100)], 100, &[0]),
        (&[(1, 1, 0, 10), (1, 2, 0, 10), (1, 3, 0, 80)], 85, &[1, 2]),
    ];
    for (nth, (holders, asked, right)) in cases.into_iter().enumerate() {
        let gpus = holders.iter().map(|one| one.2).max().unwrap() + 1;
        let one = |(priority, start, gpu, mib): &Holder| {
            Candidate::one(*priority, *start, frees(&[grant(*gpu, *mib, 0)]))
        };
        let candidates = sorted(holders.iter().map(one).collect());
        let shares = candidates.iter().flat_map(|one| one.frees.gpus.iter().map(|(grant, _)| grant));
        let mut index = with_shares(gpus, shares);
        let found = look(&mut index, &mib(asked), &candidates, &[]);
        let found = found.map(|found| found.candidates);
        assert_eq!(found.as_deref(), Some(right), "case {nth}");
    }
}

#[test]
fn what_is_ending_anyway_is_enough_and_what_stays_is_not_counted() {
    let (ending, stays) = (grant(0, 60, 0), grant(0, 40, 0));
    let mut index = with_shares(1, [&ending, &stays].into_iter());
    let open = |_: &DeviceName| Closed { shut: false, groups: 0 };
    let node = NodeName::new("n");
    let soon = [frees(&[ending])];
    let site =
        EvictionSite { node: &node, closed: &open, soon: &soon, candidates: &[], budgets: &[], beat: None };
    let of = |index: &mut Index, asked: u64, site: &EvictionSite<'_>| {
        let mut preemptor = index.preemptor(&mib(asked), false);
        index.victims(&mut preemptor, site)
    };
    let found = of(&mut index, 60, &site).unwrap();
    assert_eq!((found.candidates, found.rank), (vec![], None));
    assert_eq!(of(&mut index, 61, &site), None);
    let shut = |_: &DeviceName| Closed { shut: true, groups: 0 };
    assert_eq!(
        of(&mut index, 60, &EvictionSite { closed: &shut, ..site }),
        None,
        "the GPU is somebody else's"
    );
}

#[test]
fn claims_of_several_gpus_open_theirs_and_want_them_for_themselves() {
    let pair = Freed { gpus: vec![(grant(0, 40, 0), true), (grant(1, 40, 0), true)], ..frees(&[]) };
    let single = frees(&[grant(2, 40, 0)]);
    let candidates = sorted(vec![Candidate::one(1, 1, pair.clone()), Candidate::one(2, 1, single.clone())]);
    let shares: Vec<GpuGrant> =
        pair.gpus.iter().chain(&single.gpus).map(|(grant, _)| grant.clone()).collect();
    let mut index = with_shares(3, shares.iter());
    let groups =
        |device: &DeviceName| Closed { shut: false, groups: u32::from(*device != DeviceName::whole(2)) };
    let node = NodeName::new("n");
    let site = EvictionSite {
        node: &node,
        closed: &groups,
        soon: &[],
        candidates: &candidates,
        budgets: &[],
        beat: None,
    };
    let mut of = |shape: &Shape, alone: bool| {
        let mut preemptor = index.preemptor(shape, alone);
        index.victims(&mut preemptor, &site).map(|found| found.candidates)
    };
    assert_eq!(of(&mib(60), false), Some(vec![]), "beside the single one there is room");
    assert_eq!(of(&mib(70), false), Some(vec![1]), "the pair's GPUs are open once it has ended");
    assert_eq!(of(&with(mib(10), |want| want.gpus = 2), true), Some(vec![1]));
    assert_eq!(of(&with(mib(10), |want| want.gpus = 3), true), Some(vec![0, 1]));
    // Where each claim has a daemon of its own, nobody has a GPU for itself.
    let mut spec = super::node("n", 3, MIB);
    for gpu in &mut spec.gpus {
        gpu.division = Division::Shares(ShareRoom { daemon: DaemonScope::Share, ..room(gpu) });
    }
    let mut own = super::index(&[spec]);
    take(&mut own, shares.iter());
    let open = |_: &DeviceName| Closed { shut: false, groups: 0 };
    let site = EvictionSite { closed: &open, ..site };
    for (amount, gpus, ended) in [(70, 2, vec![1]), (10, 3, vec![])] {
        let mut preemptor = own.preemptor(&with(mib(amount), |want| want.gpus = gpus), true);
        assert_eq!(own.victims(&mut preemptor, &site).map(|found| found.candidates), Some(ended));
    }
}

#[test]
fn a_gang_ends_whole_and_its_spare_pods_first() {
    // Three of priority 1, of which one may go alone, and a pod by itself.
    let rest = Candidate {
        pods: 3,
        sum: 3 * crate::allocate::victims::rank_of(1),
        ..Candidate::one(1, 1, frees(&[grant(0, 40, 0), grant(0, 40, 0)]))
    };
    let spare = Candidate { with: Some(1), ..Candidate::one(1, 5, frees(&[grant(0, 20, 0)])) };
    let other = Candidate::one(2, 1, frees(&[grant(1, 100, 0)]));
    let candidates = [other, rest, spare];
    let shares: Vec<GpuGrant> =
        candidates.iter().flat_map(|one| one.frees.gpus.iter().map(|(grant, _)| grant.clone())).collect();
    let mut index = with_shares(2, shares.iter());
    let mut of = |asked: u64| look(&mut index, &mib(asked), &candidates, &[]).unwrap();
    assert_eq!(of(20).candidates, [2]);
    let whole = of(30);
    assert_eq!(whole.candidates, [1], "whole, and its spare pod is not named twice");
    assert_eq!(whole.rank.unwrap().pods, 3);
    assert_eq!(of(100).candidates, [1]);
}

#[test]
fn no_budget_is_asked_for_more_than_it_has() {
    let one = |priority: i32, gpu: u32, mib: u64, budgets: &[usize]| Candidate {
        budgets: budgets.to_vec(),
        ..Candidate::one(priority, 1, frees(&[grant(gpu, mib, 0)]))
    };
    let candidates = [one(3, 1, 100, &[]), one(1, 0, 50, &[0]), one(1, 0, 50, &[0])];
    let shares: Vec<GpuGrant> =
        candidates.iter().flat_map(|one| one.frees.gpus.iter().map(|(grant, _)| grant.clone())).collect();
    let mut index = with_shares(2, shares.iter());
    let mut of = |asked: u64, allowed: u32| {
        look(&mut index, &mib(asked), &candidates, &[allowed]).map(|found| found.candidates)
    };
    assert_eq!(of(100, 2), Some(vec![1, 2]));
    assert_eq!(of(100, 1), Some(vec![0]), "an important one rather than a budget");
    assert_eq!(of(50, 1), Some(vec![2]));
    assert_eq!(of(50, 0), Some(vec![0]));
}

/// What a node has, and who may end there.
#[derive(Debug, Clone)]
struct Scene {
    stays: Vec<GpuGrant>,
    candidates: Vec<Candidate>,
    asked: u64,
    percent: u8,
    gpus: u32,
}

fn scene() -> impl Strategy<Value = Scene> {
    let share = || (0..GPUS, 5_u64..60, 0_u8..50);
    let candidate = (share(), prop::option::of(share()), 0_i32..4, 0_i64..6);
    let parts = (prop::collection::vec(share(), 0..4), prop::collection::vec(candidate, 0..8));
    (parts, 1_u64..100, 0_u8..80, 1_u32..=2).prop_map(|((stays, candidates), asked, percent, gpus)| {
        let mut left = vec![(MIB, 100_u64); GPUS as usize];
        let mut fit = |(gpu, mib, percent): (u32, u64, u8)| {
            let (free, compute) = &mut left[gpu as usize];
            if *free < mib || *compute < u64::from(percent) {
                return None;
            }
            (*free, *compute) = (*free - mib, *compute - u64::from(percent));
            Some(grant(gpu, mib, percent))
        };
        let stays = stays.into_iter().filter_map(&mut fit).collect();
        let mut made = Vec::new();
        for (first, second, priority, start) in candidates {
            let grants: Vec<GpuGrant> =
                [Some(first), second].into_iter().flatten().filter_map(&mut fit).collect();
            if !grants.is_empty() {
                made.push(Candidate::one(priority, start, frees(&grants)));
            }
        }
        Scene { stays, candidates: sorted(made), asked, percent, gpus }
    })
}

impl Scene {
    fn shape(&self) -> Shape {
        with(mib(self.asked), |want| {
            want.gpus = self.gpus;
            want.compute = Percent::try_from(self.percent).ok();
        })
    }

    /// It would fit if these ended.
    fn fits(&self, ended: u32) -> bool {
        let there = self.candidates.iter().enumerate().filter(|(at, _)| ended & (1 << at) == 0);
        let there =
            there.flat_map(|(_, one)| one.frees.gpus.iter().map(|(grant, _)| grant)).chain(&self.stays);
        let mut left = vec![(MIB, 100_u64); GPUS as usize];
        for grant in there {
            let gpu = (0..GPUS).find(|gpu| DeviceName::whole(*gpu) == grant.device).unwrap();
            left[gpu as usize].0 -= grant.memory.mib_ceil();
            left[gpu as usize].1 -= u64::from(grant.percent());
        }
        let serve =
            left.iter().filter(|(free, compute)| *free >= self.asked && *compute >= u64::from(self.percent));
        serve.count() >= self.gpus as usize
    }

    fn rank(&self, ended: u32) -> Option<Rank> {
        let all = || {
            self.candidates.iter().enumerate().filter(|(at, _)| ended & (1 << at) != 0).map(|(_, one)| one)
        };
        let highest = all().map(|one| one.priority).max()?;
        let start = all().filter(|one| one.priority == highest).map(|one| one.start).min()?;
        Some(Rank {
            highest,
            sum: all().map(|one| one.sum).sum(),
            pods: all().count() as u32,
            start: Reverse(start),
        })
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, ..ProptestConfig::default() })]

    #[test]
    fn every_set_of_victims_that_there_is_loses_as_much(scene in scene()) {
        let shares: Vec<GpuGrant> = scene.candidates.iter()
            .flat_map(|one| one.frees.gpus.iter().map(|(grant, _)| grant.clone()))
            .chain(scene.stays.iter().cloned()).collect();
        let mut index = with_shares(GPUS, shares.iter());
        let found = look(&mut index, &scene.shape(), &scene.candidates, &[]);
        let all = 1_u32 << scene.candidates.len();
        let sets: Vec<u32> = (0..all).filter(|ended| scene.fits(*ended)).collect();
        let Some(found) = found else {
            prop_assert_eq!(sets, Vec::<u32>::new(), "there was a set");
            return Ok(());
        };
        let ended = found.candidates.iter().fold(0_u32, |set, at| set | 1 << at);
        prop_assert!(scene.fits(ended));
        prop_assert_eq!(found.rank, scene.rank(ended));
        // As kube-scheduler has it: the most important one that may stay stays, then the next.
        let best = sets.iter().copied().min_by_key(|ended| {
            (0..scene.candidates.len()).map(|at| ended & (1 << at) != 0).collect::<Vec<bool>>()
        });
        prop_assert_eq!(Some(ended), best);
        // So nobody as important as the most important victim need have ended.
        let least = sets.iter().filter_map(|ended| scene.rank(*ended)).map(|rank| rank.highest).min();
        prop_assert!(ended == 0 || found.rank.map(|rank| rank.highest) == least);
        // Where as much or more is lost elsewhere the answer is the same, and where less is, there is none that is better.
        for highest in 0..4 {
            let beat = Rank::least(highest, 0);
            let again = look_to_beat(&mut index, &scene.shape(), &scene.candidates, Some(beat));
            match found.rank.is_none_or(|rank| rank.highest <= highest) {
                true => prop_assert_eq!(again.as_ref(), Some(&found)),
                false => prop_assert_eq!(again.as_ref(), None),
            }
        }
        // And of none of the victims it could have been done without.
        for at in &found.candidates {
            prop_assert!(!scene.fits(ended & !(1 << at)), "candidate {} need not have ended", at);
        }
    }
}
