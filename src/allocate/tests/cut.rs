//! MIG devices that are made for pods, over several GPUs and nodes.

use super::*;
use crate::allocate::victims::{Candidate, Closed, EvictionSite, Freed};
use crate::model::gpu::{MigCapacity, Placement as Run};
use crate::model::mig::{MigPlace, MigProfile};
use crate::model::names::NodeName;
use crate::params::Fraction;

mod walk;

/// Of a profile: id, name, compute slices, how many fit, MiB, where it may begin, memory slices.
type Row = (u32, &'static str, u32, u32, u64, &'static [u32], u32);

const H100: &[Row] = &[
    (0, "7g.80gb", 7, 1, 81_152, &[0], 8),
    (5, "4g.40gb", 4, 1, 40_448, &[0], 4),
    (9, "3g.40gb", 3, 2, 40_448, &[0, 4], 4),
    (14, "2g.20gb", 2, 3, 20_096, &[0, 2, 4], 2),
    (15, "1g.20gb", 1, 4, 20_096, &[0, 2, 4, 6], 2),
    (19, "1g.10gb", 1, 7, 9_984, &[0, 1, 2, 3, 4, 5, 6], 1),
];

const RTX_PRO_6000: &[Row] = &[
    (0, "4g.96gb", 4, 1, 97_280, &[0], 12),
    (5, "2g.48gb", 2, 2, 48_512, &[0, 6], 6),
    (14, "1g.24gb", 1, 4, 24_192, &[0, 3, 6, 9], 3),
];

fn place(id: u32, start: u32) -> MigPlace {
    let row = H100.iter().find(|row| row.0 == id).unwrap();
    MigPlace { profile_id: id, placement: Run { start, size: row.6 } }
}

fn profiles(rows: &[Row]) -> Arc<[MigProfile]> {
    let profile = |(id, name, slices, most, mib, starts, size): &Row| MigProfile {
        id: *id,
        name: (*name).to_owned(),
        slices: *slices,
        most: *most,
        capacity: MigCapacity { memory: Bytes::from_mib(*mib), ..MigCapacity::default() },
        placements: starts.iter().map(|start| Run { start: *start, size: *size }).collect(),
    };
    rows.iter().map(profile).collect()
}

fn board(minor: u32, rows: &[Row], foreign: &[MigPlace]) -> GpuSpec {
    let board =
        MigBoard { profiles: profiles(rows), foreign: foreign.to_vec(), parts: None, given_whole: false };
    GpuSpec { division: Division::Mig(board), ..gpu(minor, "NVIDIA H100", 1, Isolation::Mps) }
}

/// A node with so many boards, cut, and shared ones behind them.
fn cut_node(name: &str, cut: u32, shared: u32) -> NodeSpec {
    let all = node(name, cut + shared, 80_000);
    let gpus = (0..cut).map(|minor| board(minor, H100, &[]));
    NodeSpec { gpus: gpus.chain(all.gpus.iter().skip(cut as usize).cloned()).collect(), ..all }
}

fn mig(part: Part, percent: u8) -> Shape {
    let compute = Percent::try_from(percent).ok();
    Shape::one(Want { part, compute, minimum_isolation: Isolation::Mig, ..Want::whole(1) })
}

fn of_mib(mib: u64) -> Shape {
    mig(Part::Memory(Bytes::from_mib(mib)), 0)
}

fn of_fraction(text: &str) -> Shape {
    let fraction: Fraction = text.parse().unwrap();
    let share = GpuShare {
        amount: Some(Amount::Fraction(fraction)),
        minimum_isolation: Some(Isolation::Mig),
        ..GpuShare::default()
    };
    Shape::one(Want::of(&share, 1))
}

/// The profile and where it begins, with the GPU, and what a grant says beside.
fn made(index: &Index, pod: &str) -> Vec<(String, u32, u32)> {
    let placement = index.placement(&PodUid::new(pod)).unwrap();
    let one = |grant: &GpuGrant| {
        let Extent::Mig(at) = grant.extent else { panic!("{grant:?}") };
        assert_eq!((grant.compute, grant.slots), (None, 1));
        (format!("{}/{}", placement.node, grant.device), at.profile_id, at.placement.start)
    };
    placement.gpus.iter().map(one).collect()
}

fn one(index: &Index, pod: &str) -> (String, u32, u32) {
    made(index, pod).remove(0)
}

fn at(gpu: &str, id: u32, start: u32) -> (String, u32, u32) {
    (gpu.to_owned(), id, start)
}

#[test]
fn seven_small_ones_fill_a_board_and_the_eighth_is_told_what_is_left() {
    let mut index = index(&[cut_node("a", 1, 0)]);
    for nth in 0..7 {
        assert_eq!(put(&mut index, &nth.to_string(), of_mib(9_000), Policy::Pack), "a/gpu-0");
    }
    assert_eq!(index.placement(&PodUid::new("0")).unwrap().gpus[0].memory, Bytes::from_mib(9_984));
    assert_eq!(audit(&index), vec![]);
    let words = refusal(&mut index, &[of_mib(9_000).into()]);
    assert_eq!(words, "needs a MIG device with 9000 MiB; 1 candidate GPU can make no more");
    let small = (0..7).find(|nth| one(&index, &nth.to_string()).2 == 5).unwrap();
    index.remove(&PodUid::new(small.to_string())).unwrap();
    let words = refusal(&mut index, &[of_mib(20_480).into()]);
    assert_eq!(
        words,
        "needs a MIG device with 20480 MiB; the largest that node a/gpu-0 can still make has 9984 MiB (1g.10gb)"
    );
    assert_eq!(put(&mut index, "again", of_mib(1), Policy::Pack), "a/gpu-0");
    assert_eq!(one(&index, "again"), at("a/gpu-0", 19, 5));
}

#[test]
fn an_amount_is_the_smallest_profile_that_suffices() {
    let three_and_four = |index: &mut Index| {
        put(index, "3g", of_mib(40_000), Policy::Pack);
        put(index, "4g", mig(Part::Memory(Bytes::from_mib(1)), 50), Policy::Pack);
        [one(index, "3g"), one(index, "4g")]
    };
    let mut both = index(&[cut_node("a", 1, 0)]);
    assert_eq!(three_and_four(&mut both), [at("a/gpu-0", 9, 4), at("a/gpu-0", 5, 0)]);
    // Halves of a board: NVML's figures of two of them are more than that of the whole.
    for (fraction, id) in [("0.125", 19), ("0.14", 15), ("0.25", 14), ("0.375", 9), ("0.5", 5), ("0.6", 0)] {
        let mut index = index(&[cut_node("a", 1, 0)]);
        put(&mut index, "p", of_fraction(fraction), Policy::Pack);
        assert_eq!(one(&index, "p").1, id, "{fraction}");
    }
    let large = refusal(&mut both, &[of_mib(100_000).into()]);
    assert_eq!(
        large,
        "needs 1 GPU; there is no candidate; left out: 1 GPU too small even idle (largest 81152 MiB, asked 100000)"
    );
}

#[test]
fn shares_and_whole_gpus_stay_off_what_is_cut_and_mig_devices_off_the_rest() {
    let mut index = index(&[cut_node("a", 1, 1)]);
    for (nth, shape) in [mib(1000), whole(1)].into_iter().enumerate() {
        assert_eq!(put(&mut index, &nth.to_string(), shape, Policy::Spread), "a/gpu-1");
        index.remove(&PodUid::new(nth.to_string())).unwrap();
    }
    for (policy, nth) in Policy::ALL.into_iter().zip(0..) {
        let pod = format!("mig-{nth}");
        assert_eq!(put(&mut index, &pod, of_mib(9_000), policy), "a/gpu-0");
    }
    assert!(
        put(&mut index, "all", of_fraction("1"), Policy::Pack).ends_with("gpu-1"),
        "whole, not of a board"
    );
    let words = refusal(&mut index, &[mib(1000).into()]);
    assert!(words.contains("1 GPU cut into MIG devices, which minimumIsolation mig asks for"), "{words}");
    let mut none = super::index(&[node("a", 2, 80_000)]);
    let words = refusal(&mut none, &[mig(Part::Memory(Bytes::from_mib(20_480)), 30).into()]);
    assert!(
        words.starts_with(
            "needs a MIG device with 20480 MiB and 30 % of its multiprocessors, and no GPU of the cluster is set to"
        ),
        "{words}"
    );
}

#[test]
fn boards_that_are_cut_already_are_taken_first_and_large_profiles_kept() {
    let mut packed = index(&[cut_node("a", 2, 0), cut_node("b", 2, 0)]);
    let spots: Vec<_> =
        (0..3).map(|nth| put(&mut packed, &nth.to_string(), of_mib(9_000), Policy::Pack)).collect();
    assert_eq!(spots, ["a/gpu-0"; 3]);
    // No 3g is left beside a 4g: it goes to a board of its own rather than to none.
    assert_eq!(put(&mut packed, "4g", of_fraction("0.5"), Policy::Pack), "a/gpu-0");
    assert_eq!(put(&mut packed, "3g", of_mib(40_000), Policy::Pack), "a/gpu-1", "the node in use");
    let mut spread = index(&[cut_node("a", 2, 0), cut_node("b", 2, 0)]);
    let spots: Vec<_> =
        (0..4).map(|nth| put(&mut spread, &nth.to_string(), of_mib(9_000), Policy::Spread)).collect();
    assert_eq!(spots, ["a/gpu-0", "b/gpu-0", "a/gpu-1", "b/gpu-1"]);
    // A board with somebody's instance on it is cut already.
    let mut foreign = cut_node("a", 2, 0);
    foreign.gpus[1] = board(1, H100, &[place(19, 6)]);
    let mut index = index(&[foreign]);
    assert_eq!(put(&mut index, "p", of_mib(9_000), Policy::Pack), "a/gpu-1");
    assert_eq!(put(&mut index, "q", of_mib(80_000), Policy::Pack), "a/gpu-0");
}

#[test]
fn a_pod_may_have_several() {
    let mut index = index(&[cut_node("a", 2, 1)]);
    // Of one claim on different boards; of two claims on one.
    let pair = with(of_mib(9_000), |want| want.gpus = 2);
    assert_eq!(put(&mut index, "pair", pair.clone(), Policy::Pack), "a/gpu-0+gpu-1");
    let second = Want { claim: 1, ..of_mib(40_000).wants[0].clone() };
    let two = Shape { wants: vec![of_mib(40_000).wants[0].clone(), second], ..Shape::default() };
    assert_eq!(
        put(&mut index, "two", two.clone(), Policy::Pack),
        "a/gpu-0+gpu-1",
        "a 3g and a 1g leave no 3g"
    );
    index.remove(&PodUid::new("two")).unwrap();
    let four = Want { claim: 1, ..of_fraction("0.5").wants[0].clone() };
    let both = Shape { wants: vec![of_mib(9_000).wants[0].clone(), four], ..Shape::default() };
    put(&mut index, "both", both, Policy::Pack);
    let made = made(&index, "both");
    assert_eq!(made.len(), 2);
    assert_eq!(audit(&index), vec![]);
    // With a share beside.
    let share = Want { claim: 1, ..mib(1000).wants[0].clone() };
    let mixed = Shape { wants: vec![of_mib(9_000).wants[0].clone(), share], ..Shape::default() };
    let spot = put(&mut index, "mixed", mixed, Policy::Fragmentation);
    assert!(spot.ends_with("+gpu-2"), "{spot}");
    let five = with(of_mib(9_000), |want| want.gpus = 3);
    let words = refusal(&mut index, &[five.into()]);
    assert!(words.contains("needs 3 GPUs of one node"), "{words}");
}

/// Seven devices that may be on any of eight unlike boards, and one that may be on one of them only, which is the cheapest
/// for all: thousands of ways go wrong before one goes well.
#[test]
fn what_fits_in_few_of_thousands_of_ways_is_given_up_in_words_that_do_not_say_that_it_is_impossible() {
    let eight = |boards: [&[MigPlace]; 8]| {
        let mut spec = cut_node("a", 8, 0);
        for (nth, foreign) in boards.into_iter().enumerate() {
            let product = if nth == 7 { "NVIDIA H100 last" } else { "NVIDIA H100" };
            spec.gpus[nth] = GpuSpec { product: product.to_owned(), ..board(nth as u32, H100, foreign) };
        }
        index(&[spec])
    };
    let alone: [[MigPlace; 1]; 7] = std::array::from_fn(|start| [place(19, start as u32)]);
    // A 1g that loses nothing else: of all boards it is the cheapest.
    let six = [place(19, 0), place(19, 2), place(19, 3), place(19, 4), place(19, 5), place(15, 6)];
    let any = of_mib(9_000).wants[0].clone();
    let last = Want { products: vec!["last".to_owned()], ..any.clone() };
    let shape = |any_of: usize| Shape {
        wants: std::iter::repeat_n(any.clone(), any_of).chain([last.clone()]).collect(),
        ..Shape::default()
    };
    let unlike = |last| eight(std::array::from_fn(|nth| if nth == 7 { last } else { &alone[nth][..] }));
    let words = refusal(&mut unlike(&six), &[shape(7).into()]);
    assert!(
        words.contains(
            "needs 8 GPUs of one node for 8 requests; each fits somewhere, but no node was found that has"
        ),
        "{words}"
    );
    // Boards that are alike are tried once, and fewer requests leave fewer ways.
    let like = |last| eight(std::array::from_fn(|nth| if nth == 7 { last } else { &alone[0][..] }));
    assert!(put(&mut like(&six), "p", shape(7), Policy::Pack).ends_with("gpu-7"));
    assert!(put(&mut unlike(&six), "p", shape(3), Policy::Pack).ends_with("gpu-7"));
}

#[test]
fn two_claims_of_a_pod_meet_on_a_board_only_where_both_have_a_place() {
    let mut index = index(&[cut_node("a", 1, 0)]);
    let half = |claim| Want { claim, ..of_mib(40_000).wants[0].clone() };
    let halves = Shape { wants: vec![half(0), half(1)], ..Shape::default() };
    assert_eq!(put(&mut index, "p", halves.clone(), Policy::Pack), "a/gpu-0+gpu-0");
    let starts: Vec<u32> = made(&index, "p").iter().map(|one| one.2).collect();
    assert!(starts == [4, 0] || starts == [0, 4], "{starts:?}");
    index.remove(&PodUid::new("p")).unwrap();
    put(&mut index, "small", of_mib(1), Policy::Pack);
    let words = refusal(&mut index, &[halves.into()]);
    assert!(
        words.contains(
            "for 2 requests; each fits somewhere, but no node was found that has room for all at once"
        ),
        "{words}"
    );
    // A gang: one after another.
    let gang: Vec<PodAsk> = (0..7).map(|_| of_mib(9_000).into()).collect();
    assert!(decide(&mut index, &gang, Policy::Pack).is_err());
    assert_eq!(decide(&mut index, &gang[..6], Policy::Pack).unwrap().placements.len(), 6);
}

#[test]
fn a_pod_ends_for_a_more_important_one_where_its_device_is_in_the_way() {
    let mut index = index(&[cut_node("n", 1, 0)]);
    for (nth, shape) in [of_mib(40_000), of_mib(9_000), of_mib(9_000)].into_iter().enumerate() {
        put(&mut index, &nth.to_string(), shape, Policy::Pack);
    }
    let frees = |nth: usize| {
        let gpus = index.placement(&PodUid::new(nth.to_string())).unwrap().gpus.clone();
        Freed { gpus: gpus.into_iter().map(|grant| (grant, false)).collect(), ..Freed::default() }
    };
    let candidates: Vec<Candidate> = (0..3).map(|nth| Candidate::one(1, nth as i64, frees(nth))).collect();
    let node = NodeName::new("n");
    let open = |_: &DeviceName| Closed { shut: false, groups: 0 };
    let site = EvictionSite {
        node: &node,
        closed: &open,
        soon: &[],
        candidates: &candidates,
        budgets: &[],
        beat: None,
    };
    let mut preemptor = index.preemptor(&of_fraction("0.5"), false);
    let victims = index.victims(&mut preemptor, &site).unwrap();
    assert_eq!(victims.candidates, [1, 2], "a 4g stands beside a 3g");
    assert_eq!(victims.placement.gpus[0].extent, Extent::Mig(place(5, 0)));
    let mut all = index.preemptor(&of_mib(80_000), false);
    assert_eq!(index.victims(&mut all, &site).unwrap().candidates, [0, 1, 2]);
}

#[test]
fn what_is_granted_twice_is_found() {
    let grant = |extent| GpuGrant {
        want: 0,
        device: "gpu-0".into(),
        memory: Bytes::from_mib(1000),
        compute: None,
        slots: 1,
        extent,
    };
    let of = |extents: &[Extent]| {
        let mut index = index(&[cut_node("a", 1, 0)]);
        for (nth, extent) in extents.iter().enumerate() {
            let gpus = vec![grant(*extent)];
            let placement = Placement { node: "a".into(), gpus, cpu_milli: 0, memory: Bytes(0), pods: 0 };
            index.apply(&PodUid::new(nth.to_string()), &placement).unwrap();
        }
        let free = index.nodes().next().unwrap().gpus().next().unwrap().memory().1;
        (audit(&index), free.mib_floor())
    };
    let (two, four) = (Extent::Mig(place(9, 4)), Extent::Mig(place(5, 0)));
    assert_eq!(of(&[two, four]), (vec![], 0));
    let node = || ("a".into(), "gpu-0".into());
    let (findings, _) = of(&[two, Extent::Mig(place(19, 6))]);
    let (node_name, device) = node();
    assert_eq!(findings, [AuditFinding::Overlap { node: node_name, device, grants: 2 }]);
    let (findings, free) = of(&[two, Extent::Part]);
    let (node_name, device) = node();
    assert_eq!(findings, [AuditFinding::NoMig { node: node_name, device, grants: 2 }]);
    assert_eq!(free, 0, "nothing goes beside what is no MIG device");
}

#[test]
fn what_is_there_twice_goes_once() {
    // Somebody's instance stands where we have granted one, and ours goes.
    let mut spec = cut_node("a", 1, 0);
    let mut index = index(std::slice::from_ref(&spec));
    put(&mut index, "p", of_mib(80_000), Policy::Pack);
    spec.gpus[0] = board(0, H100, &[place(0, 0)]);
    index.insert_node(&spec);
    index.remove(&PodUid::new("p")).unwrap();
    assert!(decide(&mut index, &[of_mib(1).into()], Policy::Pack).is_err());
    assert_eq!(audit(&index), vec![]);
    spec.gpus[0] = board(0, H100, &[]);
    index.insert_node(&spec);
    assert_eq!(put(&mut index, "q", of_mib(80_000), Policy::Pack), "a/gpu-0");
}
