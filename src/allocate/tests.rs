use proptest::prelude::*;

use super::*;
use crate::model::names::{DeviceName, PodUid};
use crate::model::quantity::Bytes;
use crate::model::share::{Isolation, Percent};

fn gpu(minor: u32, product: &str, mib: u64, isolation: Isolation) -> GpuSpec {
    let device = DeviceName::whole(minor);
    GpuSpec { device, product: product.to_owned(), memory: Bytes::from_mib(mib), slots: 16, isolation }
}

/// A node with equal GPUs on rung mps.
fn node(name: &str, gpus: u32, mib: u64) -> NodeSpec {
    let gpus = (0..gpus).map(|minor| gpu(minor, "NVIDIA H100", mib, Isolation::Mps)).collect();
    NodeSpec { name: name.into(), cpu_milli: 64_000, memory: Bytes::from_mib(256 << 10), gpus }
}

fn index(nodes: &[NodeSpec]) -> Index {
    let mut index = Index::new();
    nodes.iter().for_each(|node| index.insert_node(node));
    index
}

fn mib(mib: u64) -> Shape {
    Shape { gpus: 1, part: Part::Memory(Bytes::from_mib(mib)), cpu_milli: 1000, ..Shape::empty() }
}

/// Decides and applies; where the pod went.
fn put(index: &mut Index, pod: &str, shape: Shape, policy: Policy) -> String {
    index.seen(&shape);
    let decision = decide(index, &[shape.into()], policy).unwrap();
    index.apply(&PodUid::new(pod), &decision.placements[0]).unwrap();
    spot(&decision.placements[0])
}

fn spot(placement: &Placement) -> String {
    let devices: Vec<_> = placement.gpus.iter().map(|grant| grant.device.as_str()).collect();
    format!("{}/{}", placement.node, devices.join("+"))
}

fn refusal(index: &mut Index, pods: &[PodAsk]) -> String {
    decide(index, pods, Policy::Pack).unwrap_err().to_string()
}

#[test]
fn pack_fills_gpus_and_nodes_that_are_in_use() {
    let mut index = index(&[node("a", 2, 40_000), node("b", 2, 40_000)]);
    let pack = |index: &mut Index, pod: &str, shape| put(index, pod, shape, Policy::Pack);
    assert_eq!(pack(&mut index, "1", mib(20_000)), "a/gpu-0");
    assert_eq!(pack(&mut index, "2", mib(20_000)), "a/gpu-0", "the GPU in use");
    assert_eq!(pack(&mut index, "3", mib(30_000)), "a/gpu-1", "the node in use");
    assert_eq!(pack(&mut index, "4", mib(30_000)), "b/gpu-0");
    let pair = Shape { gpus: 2, part: Part::Whole, ..mib(0) };
    assert!(refusal(&mut index, &[pair.clone().into()]).contains("needs 2 GPUs of one node"));
    index.remove(&PodUid::new("4")).unwrap();
    assert_eq!(pack(&mut index, "5", pair), "b/gpu-0+gpu-1");
    assert_eq!(audit(&index), vec![]);
}

#[test]
fn spread_takes_what_is_emptiest() {
    let mut index = index(&[node("a", 2, 40_000), node("b", 2, 40_000)]);
    let spots: Vec<_> =
        (0..4).map(|n| put(&mut index, &n.to_string(), mib(10_000), Policy::Spread)).collect();
    assert_eq!(spots, ["a/gpu-0", "b/gpu-0", "a/gpu-1", "b/gpu-1"]);
}

#[test]
fn on_rung_mps_equal_sizes_stand_together() {
    let mut index = index(&[node("a", 2, 40_000)]);
    put(&mut index, "1", mib(10_000), Policy::Pack);
    put(&mut index, "2", mib(32_000), Policy::Pack);
    // 8,000 MiB are left beside the 32,000, 30,000 beside the 10,000.
    assert_eq!(put(&mut index, "3", mib(8_000), Policy::Pack), "a/gpu-1", "an exact fit is worth it");
    assert_eq!(put(&mut index, "4", mib(10_000), Policy::Pack), "a/gpu-0");
    let mut other = super::tests::index(&[node("a", 2, 40_000)]);
    put(&mut other, "1", mib(10_000), Policy::Pack);
    put(&mut other, "2", mib(18_000), Policy::Pack);
    put(&mut other, "3", mib(10_000), Policy::Pack);
    assert_eq!(spot(other.placement(&PodUid::new("3")).unwrap()), "a/gpu-0", "beside its like");
}

#[test]
fn fragmentation_keeps_whole_gpus_and_cpus_for_those_who_come() {
    // Pods that want a GPU and much CPU are expected; a small one without need of it comes.
    let mut rich = node("rich", 1, 40_000);
    rich.cpu_milli = 32_000;
    let mut poor = node("poor", 1, 40_000);
    poor.cpu_milli = 4_000;
    let mut index = index(&[rich, poor]);
    for _ in 0..10 {
        index.seen(&Shape { part: Part::Whole, cpu_milli: 16_000, ..mib(0) });
    }
    assert_eq!(put(&mut index, "1", mib(10_000), Policy::Fragmentation), "poor/gpu-0");
}

#[test]
fn a_fraction_is_of_the_gpu_that_is_chosen_and_products_choose() {
    let mut small = node("small", 1, 10_001);
    small.gpus[0].product = "Tesla T4".to_owned();
    let mut index = index(&[node("big", 1, 80_000), small]);
    let half = Shape { part: Part::Fraction("0.5".parse().unwrap()), ..mib(0) };
    let on = |index: &mut Index, products: &[&str]| {
        let products = products.iter().map(|part| (*part).to_owned()).collect();
        let pod = Shape { products, ..half.clone() };
        decide(index, &[pod.into()], Policy::Pack).map(|found| found.placements[0].clone())
    };
    let on_t4 = on(&mut index, &["t4"]).unwrap();
    assert_eq!((spot(&on_t4), on_t4.gpus[0].memory), ("small/gpu-0".to_owned(), Bytes::from_mib(5_001)));
    assert_eq!(on(&mut index, &["A100", "H100"]).unwrap().gpus[0].memory, Bytes::from_mib(40_000));
    let words = on(&mut index, &["B200"]).unwrap_err().to_string();
    assert_eq!(words, "needs 1 GPU; there is no candidate; left out: 2 GPUs of another product");
}

#[test]
fn a_refusal_says_what_is_short_and_where() {
    let mut index = index(&[node("a", 2, 30_000), node("b", 1, 30_000)]);
    for (pod, size) in [("1", 20_000), ("2", 11_568), ("3", 25_000)] {
        put(&mut index, pod, Shape { compute: Percent::try_from(60_u8).ok(), ..mib(size) }, Policy::Pack);
    }
    let shape = mib(20_480);
    assert_eq!(
        refusal(&mut index, &[shape.clone().into()]),
        "needs 20480 MiB; largest free on 3 candidate GPUs is 18432 MiB on node a/gpu-0"
    );
    let changed = |change: &dyn Fn(&mut Shape)| {
        let mut shape = mib(1000);
        change(&mut shape);
        shape
    };
    for (shape, words) in [
        (
            changed(&|shape| shape.compute = Percent::try_from(50_u8).ok()),
            "needs 50 % of compute; most free on 3",
        ),
        (changed(&|shape| shape.slots = 16), "needs 16 blocks of client slots; most free on 3"),
        (changed(&|shape| shape.part = Part::Whole), "needs a whole GPU; none of 3 candidates is idle"),
        (changed(&|shape| shape.part = Part::Memory(Bytes(1 << 40))), "left out: 3 GPUs too small even idle"),
        (
            changed(&|shape| shape.minimum_isolation = Isolation::Kernel),
            "3 GPUs below the isolation asked for",
        ),
        (
            changed(&|shape| shape.cpu_milli = 63_500),
            "2 nodes without 63500m CPU (most left is 63000m on node b)",
        ),
        (changed(&|shape| shape.memory = Bytes(1 << 40)), "2 nodes without 1048576 MiB of memory"),
        (changed(&|shape| shape.gpus = 3), "needs 3 GPUs of one node; the most that fit are 2 on node a"),
    ] {
        let refused = refusal(&mut index, &[shape.into()]);
        assert!(refused.contains(words), "{refused}\nshould say: {words}");
    }
    let only = PodAsk { nodes: Nodes::Only(["b".into()].into()), ..mib(16_000).into() };
    let refused = refusal(&mut index, &[only]);
    assert!(
        refused.contains("10000 MiB on node b/gpu-0; left out: 1 nodes that the pod may not"),
        "{refused}"
    );
    index.set_closed(&"a".into(), &DeviceName::whole(1), true).unwrap();
    assert!(refusal(&mut index, &[shape.into()]).contains("1 GPUs held by others"));
}

#[test]
fn nodes_that_a_pod_may_not_use_are_passed_over() {
    let mut index = index(&[node("a", 1, 10_000), node("b", 1, 10_000), node("c", 1, 10_000)]);
    let on = |index: &mut Index, nodes| {
        let pod = PodAsk { shape: mib(1000), nodes };
        spot(&decide(index, &[pod], Policy::Pack).unwrap().placements[0])
    };
    assert_eq!(on(&mut index, Nodes::Any), "a/gpu-0");
    assert_eq!(on(&mut index, Nodes::Except(["a".into()].into())), "b/gpu-0");
    assert_eq!(on(&mut index, Nodes::Only(["c".into()].into())), "c/gpu-0");
    index.remove_node(&"a".into());
    assert_eq!(on(&mut index, Nodes::Any), "b/gpu-0");
    index.set_room(&"b".into(), 500, Bytes::from_mib(1000)).unwrap();
    assert_eq!(on(&mut index, Nodes::Any), "c/gpu-0");
    index.insert_node(&node("a", 1, 10_000));
    assert_eq!(on(&mut index, Nodes::Any), "a/gpu-0");
}

#[test]
fn a_gang_is_placed_whole_or_not_at_all() {
    let mut index = index(&[node("a", 2, 40_000)]);
    let half: PodAsk = mib(20_000).into();
    let found = decide(&mut index, &vec![half.clone(); 4], Policy::Pack).unwrap();
    let spots: Vec<_> = found.placements.iter().map(spot).collect();
    assert_eq!(spots, ["a/gpu-0", "a/gpu-0", "a/gpu-1", "a/gpu-1"]);
    let refused = refusal(&mut index, &vec![half.clone(); 5]);
    assert!(
        refused.starts_with("the gang's 5 pods do not fit together: beside 4 of them, the next"),
        "{refused}"
    );
    assert!(decide(&mut index, &vec![half; 4], Policy::Pack).is_ok(), "nothing was kept");
    // In the order of asking, the small ones would stand in the large one's way.
    let mixed = [mib(20_000).into(), mib(20_000).into(), Shape { part: Part::Whole, ..mib(0) }.into()];
    let found = decide(&mut index, &mixed, Policy::Spread).unwrap();
    assert_eq!(found.placements[2].gpus[0].memory, Bytes::from_mib(40_000));
    assert_eq!(decide(&mut index, &[], Policy::Pack).unwrap().placements, vec![]);
}

#[test]
fn what_others_granted_too_much_is_recorded_and_found() {
    let mut index = index(&[node("a", 1, 10_000)]);
    let found = decide(&mut index, &[mib(6_000).into()], Policy::Pack).unwrap().placements.remove(0);
    index.apply(&PodUid::new("1"), &found).unwrap();
    assert_eq!(index.apply(&PodUid::new("1"), &found), Err(Unknown::Placed(PodUid::new("1"))));
    index.apply(&PodUid::new("2"), &found).unwrap();
    let words: Vec<_> = audit(&index).iter().map(Finding::to_string).collect();
    assert_eq!(words, ["a/gpu-0: 12000 MiB are granted of 10000; delete one of its claims"]);
    index.remove(&PodUid::new("2"));
    assert_eq!(audit(&index), vec![]);
    let nowhere = Placement { node: "z".into(), ..found };
    assert_eq!(index.apply(&PodUid::new("3"), &nowhere), Err(Unknown::Node("z".into())));
}

#[test]
fn placements_outlast_a_node_that_goes_and_comes_back() {
    let mut index = index(&[node("a", 1, 10_000)]);
    put(&mut index, "1", mib(6_000), Policy::Pack);
    index.remove_node(&"a".into());
    assert!(refusal(&mut index, &[mib(1).into()]).contains("no candidate"));
    index.insert_node(&node("a", 1, 10_000));
    assert!(
        refusal(&mut index, &[mib(6_000).into()]).contains("largest free on 1 candidate GPU is 4000 MiB")
    );
    index.insert_node(&node("a", 2, 10_000));
    assert_eq!(put(&mut index, "2", mib(6_000), Policy::Pack), "a/gpu-1");
}

/// What may happen to an index.
#[derive(Debug, Clone)]
enum Event {
    Pods(Vec<PodAsk>),
    Remove(usize),
    Room(usize, u64),
    Closed(usize, u32, bool),
    Node(usize, Option<u32>),
}

const NAMES: [&str; 5] = ["n0", "n1", "n2", "n3", "n4"];

fn shapes() -> impl Strategy<Value = PodAsk> {
    let part = prop_oneof![
        Just(Part::Whole),
        (1..120_u64).prop_map(|mib| Part::Memory(Bytes::from_mib(mib))),
        prop_oneof!["0\\.[1-9]"].prop_map(|text| Part::Fraction(text.parse().unwrap())),
    ];
    let rest = (0..3_u32, 0..3_u8, 1..4_u32, 0..4_usize, any::<bool>(), 0..5_usize, 0..4_u64);
    (part, rest).prop_map(|(part, (gpus, compute, slots, rung, product, only, cpu))| PodAsk {
        shape: Shape {
            gpus,
            part,
            compute: Percent::try_from(compute * 40).ok(),
            slots,
            minimum_isolation: Isolation::ALL[rung.min(2)],
            products: if product { vec!["t4".to_owned()] } else { vec![] },
            cpu_milli: cpu * 500,
            memory: Bytes::from_mib(cpu * 100),
        },
        nodes: if only == 0 { Nodes::Except([NAMES[1].into()].into()) } else { Nodes::Any },
    })
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let event = prop_oneof![
        6 => proptest::collection::vec(shapes(), 1..2).prop_map(Event::Pods),
        1 => proptest::collection::vec(shapes(), 2..4).prop_map(Event::Pods),
        3 => (0..40_usize).prop_map(Event::Remove),
        1 => (0..5_usize, 0..8_000_u64).prop_map(|(node, cpu)| Event::Room(node, cpu)),
        1 => (0..5_usize, 0..3_u32, any::<bool>()).prop_map(|(node, gpu, closed)| Event::Closed(node, gpu, closed)),
        1 => (0..5_usize, proptest::option::of(1..4_u32)).prop_map(|(node, gpus)| Event::Node(node, gpus)),
    ];
    proptest::collection::vec(event, 1..40)
}

fn mixed_node(nth: usize, gpus: u32) -> NodeSpec {
    let kinds = [("NVIDIA T4", 60, Isolation::Mps), ("NVIDIA H100", 100, Isolation::Kernel)];
    let kind = |minor: u32| kinds[(nth + (minor / 2) as usize) % 2];
    let one = |minor| gpu(minor, kind(minor).0, kind(minor).1, kind(minor).2);
    let gpus = (0..gpus).map(|minor| GpuSpec { slots: 4, ..one(minor) }).collect();
    NodeSpec { name: NAMES[nth].into(), cpu_milli: 6_000, memory: Bytes::from_mib(1_000), gpus }
}

/// Is there any place? Asked without any of the allocator's own code but the views.
fn brute_force(index: &Index, specs: &[Option<NodeSpec>], pod: &PodAsk) -> bool {
    let shape = &pod.shape;
    index.nodes().any(|node| {
        let spec = specs.iter().flatten().find(|spec| spec.name == *node.name()).unwrap();
        let fits = |(view, spec): (GpuView<'_>, &GpuSpec)| {
            let (all, free) = view.memory();
            let need = match shape.part {
                Part::Whole => all,
                Part::Memory(bytes) => bytes,
                Part::Fraction(fraction) => fraction.of(all),
            };
            let slots = if shape.part == Part::Whole { spec.slots } else { shape.slots };
            let product = shape.products.is_empty() || spec.product.to_lowercase().contains("t4");
            let compute = shape.compute.map_or(0, |percent| u32::from(percent.get()));
            let rung = spec.isolation >= shape.minimum_isolation;
            !view.closed()
                && product
                && rung
                && free >= need
                && view.slots() >= slots
                && view.compute() >= compute
        };
        let count = node.gpus().zip(&spec.gpus).filter(|pair| fits(*pair)).count();
        pod.nodes.allow(node.name())
            && node.cpu_milli().1 >= shape.cpu_milli
            && node.memory().1 >= shape.memory
            && count >= shape.gpus as usize
    })
}

/// Runs events on an index; everything that was decided.
fn play(events: &[Event], policy: Policy) -> Result<Vec<Result<Decision, Explanation>>, TestCaseError> {
    let mut specs: Vec<_> = (0..4).map(|nth| Some(mixed_node(nth, 2))).chain([None]).collect();
    let mut index = Index::new();
    specs.iter().flatten().for_each(|spec| index.insert_node(spec));
    let (mut log, mut live) = (Vec::new(), Vec::new());
    for (at, event) in events.iter().enumerate() {
        match event {
            Event::Pods(pods) => {
                pods.iter().for_each(|pod| index.seen(&pod.shape));
                let decision = decide(&mut index, pods, policy);
                if let [pod] = pods.as_slice() {
                    prop_assert_eq!(decision.is_ok(), brute_force(&index, &specs, pod), "{:?}", decision);
                }
                for (nth, placement) in decision.iter().flat_map(|decision| &decision.placements).enumerate()
                {
                    let uid = PodUid::new(format!("{at}-{nth}"));
                    index.apply(&uid, placement).unwrap();
                    live.push(uid);
                }
                log.push(decision);
            }
            Event::Remove(nth) if !live.is_empty() => {
                index.remove(&live.swap_remove(nth % live.len()));
            }
            Event::Remove(_) => {}
            Event::Room(node, cpu) => _ = index.set_room(&NAMES[*node].into(), *cpu, Bytes::from_mib(1_000)),
            Event::Closed(node, gpu, closed) => {
                _ = index.set_closed(&NAMES[*node].into(), &DeviceName::whole(*gpu), *closed);
            }
            Event::Node(nth, gpus) => {
                specs[*nth] = gpus.map(|gpus| mixed_node(*nth, gpus));
                match &specs[*nth] {
                    Some(spec) => index.insert_node(spec),
                    None => index.remove_node(&NAMES[*nth].into()),
                }
            }
        }
        prop_assert!(audit(&index).is_empty(), "{:?}", audit(&index));
    }
    Ok(log)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    /// Whatever happens: a pod is placed if and only if there is a place, no GPU is granted twice, and the
    /// same events end in the same decisions.
    #[test]
    fn decisions_are_complete_safe_and_repeatable(events in events(), policy in 0..3_usize) {
        let first = play(&events, Policy::ALL[policy])?;
        prop_assert_eq!(first, play(&events, Policy::ALL[policy])?);
    }

    /// A board that followed every change says the same as one that is new.
    #[test]
    fn kept_scores_are_those_of_a_fresh_look(shapes in proptest::collection::vec(shapes(), 1..30), policy in 0..3_usize) {
        let policy = Policy::ALL[policy];
        let mut kept = Index::new();
        let mut placed = Vec::new();
        (0..4).for_each(|nth| kept.insert_node(&mixed_node(nth, 3)));
        for (at, pod) in shapes.iter().enumerate() {
            let mut fresh = Index::new();
            (0..4).for_each(|nth| fresh.insert_node(&mixed_node(nth, 3)));
            // Replayed, so that both have seen the same pods.
            for (uid, shape, placement) in &placed {
                let _: &Shape = shape;
                fresh.seen(shape);
                if let Some(placement) = placement {
                    fresh.apply(uid, placement).unwrap();
                }
            }
            let decision = decide(&mut kept, std::slice::from_ref(pod), policy);
            prop_assert_eq!(&decision, &decide(&mut fresh, std::slice::from_ref(pod), policy));
            let uid = PodUid::new(at.to_string());
            let placement = decision.ok().map(|mut decision| decision.placements.remove(0));
            placement.iter().for_each(|placement| kept.apply(&uid, placement).unwrap());
            kept.seen(&pod.shape);
            placed.push((uid, pod.shape.clone(), placement));
        }
    }
}
