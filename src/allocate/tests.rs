use std::collections::BTreeMap;
use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::model::names::{DeviceName, PodUid};
use crate::model::quantity::Bytes;
use crate::model::share::{DaemonScope, Extent, Isolation, Percent};
use crate::params::{Amount, GpuShare};
use crate::select::{AttributeValue, DeviceFacts, Effect, QualifiedName, Taint, Toleration};

mod cut;
mod moves;
mod prices;
mod scores;
mod selectors;
mod sought;
mod victims;

fn gpu(minor: u32, product: &str, mib: u64, isolation: Isolation) -> GpuSpec {
    let device = DeviceName::whole(minor);
    let room = ShareRoom {
        memory: Bytes::from_mib(mib),
        slots: 16,
        processes_per_slot: 3,
        isolation,
        daemon: DaemonScope::Gpu,
    };
    GpuSpec { device, product: product.to_owned(), division: Division::Shares(room), facts: Arc::default() }
}

fn room(spec: &GpuSpec) -> ShareRoom {
    match &spec.division {
        Division::Shares(room) => *room,
        Division::Mig(_) => panic!("{spec:?}"),
    }
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
    let want = Want { part: Part::Memory(Bytes::from_mib(mib)), ..Want::whole(1) };
    Shape { cpu_milli: 1000, ..Shape::one(want) }
}

/// One pod that wants so many whole GPUs.
fn whole(gpus: u32) -> Shape {
    Shape { cpu_milli: 1000, ..Shape::one(Want::whole(gpus)) }
}

fn with(mut shape: Shape, change: impl FnOnce(&mut Want)) -> Shape {
    change(&mut shape.wants[0]);
    shape
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
    let pair = whole(2);
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
        index.seen(&Shape { cpu_milli: 16_000, ..whole(1) });
    }
    assert_eq!(put(&mut index, "1", mib(10_000), Policy::Fragmentation), "poor/gpu-0");
}

#[test]
fn a_fraction_is_of_the_gpu_that_is_chosen_and_products_choose() {
    let mut small = node("small", 1, 10_001);
    small.gpus[0].product = "Tesla T4".to_owned();
    let mut index = index(&[node("big", 1, 80_000), small]);
    let half = with(mib(0), |want| want.part = Part::Fraction("0.5".parse().unwrap()));
    let on = |index: &mut Index, products: &[&str]| {
        let products = products.iter().map(|part| (*part).to_owned()).collect();
        let pod = with(half.clone(), |want| want.products = products);
        decide(index, &[pod.into()], Policy::Pack).map(|found| found.placements[0].clone())
    };
    let on_t4 = on(&mut index, &["t4"]).unwrap();
    assert_eq!((spot(&on_t4), on_t4.gpus[0].memory), ("small/gpu-0".to_owned(), Bytes::from_mib(5_000)));
    assert_eq!(on(&mut index, &["A100", "H100"]).unwrap().gpus[0].memory, Bytes::from_mib(40_000));
    let words = on(&mut index, &["B200"]).unwrap_err().to_string();
    assert_eq!(words, "needs 1 GPU; there is no candidate; left out: 2 GPUs of another product");
}

#[test]
fn a_refusal_says_what_is_short_and_where() {
    let mut index = index(&[node("a", 2, 30_000), node("b", 1, 30_000)]);
    for (pod, size) in [("1", 20_000), ("2", 11_568), ("3", 25_000)] {
        let shape = with(mib(size), |want| want.compute = Percent::try_from(60_u8).ok());
        put(&mut index, pod, shape, Policy::Pack);
    }
    let shape = mib(20_480);
    assert_eq!(
        refusal(&mut index, &[shape.clone().into()]),
        "needs 20480 MiB; largest free on 3 candidate GPUs is 18432 MiB on node a/gpu-0"
    );
    let changed = |change: &dyn Fn(&mut Want)| with(mib(1000), change);
    for (shape, words) in [
        (
            changed(&|want| want.compute = Percent::try_from(50_u8).ok()),
            "needs 50 % of compute; most free on 3",
        ),
        (changed(&|want| want.processes = 46), "needs 16 blocks of client slots; most free on 3"),
        (changed(&|want| want.part = Part::Whole), "needs a whole GPU; none of 3 candidates is idle"),
        (changed(&|want| want.part = Part::Memory(Bytes(1 << 40))), "left out: 3 GPUs too small even idle"),
        (changed(&|want| want.minimum_isolation = Isolation::Kernel), "3 GPUs below the isolation asked for"),
        (
            Shape { cpu_milli: 63_500, ..mib(1000) },
            "2 nodes without 63500m CPU (most left is 63000m on node b)",
        ),
        (Shape { memory: Bytes(1 << 40), ..mib(1000) }, "2 nodes without 1048576 MiB of memory"),
        (changed(&|want| want.gpus = 3), "needs 3 GPUs of one node; at most 2 fit, on node a"),
    ] {
        let refused = refusal(&mut index, &[shape.into()]);
        assert!(refused.contains(words), "{refused}\nshould say: {words}");
    }
    let only = PodAsk { nodes: Nodes::Only(["b".into()].into()), ..mib(16_000).into() };
    let refused = refusal(&mut index, &[only]);
    assert!(
        refused.contains("10000 MiB on node b/gpu-0; left out: 1 node that the pod may not"),
        "{refused}"
    );
    index.set_closed(&"a".into(), &DeviceName::whole(1), true).unwrap();
    assert!(refusal(&mut index, &[shape.into()]).contains("1 GPU not open to shares"));
}

/// Boards as they are published, few of them a multiple of anything.
#[test]
fn as_many_equal_fractions_as_make_a_whole_fit_on_one_gpu() {
    for total in [14_399, 44_959, 80_496, 80_791, 142_646, 1_009] {
        for (text, count) in
            [("0.5", 2), ("0.333333333", 3), ("0.25", 4), ("0.2", 5), ("0.125", 8), ("0.1", 10)]
        {
            let share =
                GpuShare { amount: Some(Amount::Fraction(text.parse().unwrap())), ..GpuShare::default() };
            let mut index = index(&[node("a", 1, total)]);
            for nth in 0..count {
                put(&mut index, &nth.to_string(), Shape::one(Want::of(&share, 1)), Policy::Pack);
            }
            let gpu = index.nodes().next().unwrap().gpus().next().unwrap();
            let left = gpu.memory().1.mib_floor();
            assert!(left <= count, "{count} of {text} of {total} MiB: {left} MiB are left");
        }
    }
}

#[test]
fn a_share_takes_as_many_blocks_as_hold_its_processes() {
    let mut index = index(&[node("a", 1, 80_000)]);
    for (nth, (processes, left)) in [(1, 15), (3, 14), (4, 12), (36, 0)].into_iter().enumerate() {
        put(&mut index, &nth.to_string(), with(mib(1000), |want| want.processes = processes), Policy::Pack);
        let gpu = index.nodes().next().unwrap().gpus().next().unwrap();
        assert_eq!(gpu.slots(), left, "after a share for {processes} processes");
    }
    assert!(refusal(&mut index, &[mib(1000).into()]).contains("needs 1 block of client slots"));
    let many = with(mib(1000), |want| want.processes = 49);
    assert!(
        refusal(&mut index, &[many.into()])
            .contains("1 GPU with fewer client slots than maxProcesses, even idle")
    );
}

#[test]
fn less_than_a_mib_for_each_process_is_no_share() {
    let mut index = index(&[node("a", 1, 1000)]);
    let fraction = |text: &str, processes| {
        with(mib(1), |want| (want.part, want.processes) = (Part::Fraction(text.parse().unwrap()), processes))
    };
    for shape in [fraction("0.000999999", 1), fraction("0.003", 4)] {
        let refused = refusal(&mut index, &[shape.into()]);
        assert!(
            refused.contains("1 GPU of which the share is less than 1 MiB for each process"),
            "{refused}"
        );
    }
    put(&mut index, "1", fraction("0.001", 1), Policy::Pack);
    put(&mut index, "2", fraction("0.004", 4), Policy::Pack);
}

#[test]
fn nodes_that_a_pod_may_not_use_are_passed_over() {
    let mut index = index(&[node("a", 1, 10_000), node("b", 1, 10_000), node("c", 1, 10_000)]);
    let on = |index: &mut Index, nodes| {
        let pod = PodAsk { shape: mib(1000), nodes };
        spot(&decide(index, &[pod], Policy::Pack).unwrap().placements[0])
    };
    assert_eq!(on(&mut index, Nodes::Any), "a/gpu-0");
    assert_eq!(on(&mut index, Nodes::Except(vec![Arc::new(["a".into()].into())])), "b/gpu-0");
    assert_eq!(on(&mut index, Nodes::Only(["c".into()].into())), "c/gpu-0");
    index.remove_node(&"a".into());
    assert_eq!(on(&mut index, Nodes::Any), "b/gpu-0");
    index.set_room(&"b".into(), 500, Bytes::from_mib(1000), 110).unwrap();
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
    let mixed = [mib(20_000).into(), mib(20_000).into(), whole(1).into()];
    let found = decide(&mut index, &mixed, Policy::Spread).unwrap();
    assert_eq!(found.placements[2].gpus[0].memory, Bytes::from_mib(40_000));
    assert_eq!(decide(&mut index, &[], Policy::Pack).unwrap().placements, vec![]);
}

#[test]
fn pods_of_a_gang_count_among_those_of_their_node() {
    let mut index = index(&[node("a", 2, 40_000), node("b", 2, 40_000)]);
    let room = |index: &mut Index, name: &str, cpu_milli, pods| {
        index.set_room(&name.into(), cpu_milli, Bytes::from_mib(1000), pods).unwrap();
    };
    let pod: PodAsk = Shape { pods: 1, ..mib(1_000) }.into();
    room(&mut index, "a", 64_000, 1);
    room(&mut index, "b", 500, 110);
    for policy in Policy::ALL {
        let refused = decide(&mut index, &vec![pod.clone(); 4], policy).unwrap_err().to_string();
        assert_eq!(
            refused,
            "the gang's 4 pods do not fit together: beside 1 of them, the next needs 1 GPU; there is no candidate; \
             left out: 1 node at the pod limit, 1 node without 1000m CPU (most left is 500m on \
             node b)"
        );
        // It is as if they had never been there.
        assert_eq!(
            spot(&decide(&mut index, std::slice::from_ref(&pod), policy).unwrap().placements[0]),
            "a/gpu-0"
        );
    }
    // Where there is room for the others elsewhere, they go there.
    room(&mut index, "b", 64_000, 1);
    let found = decide(&mut index, &vec![pod.clone(); 2], Policy::Pack).unwrap();
    assert_eq!(found.placements.iter().map(spot).collect::<Vec<_>>(), ["a/gpu-0", "b/gpu-0"]);
    // A pod that is counted on its node already asks for no place there.
    put(&mut index, "1", pod.shape.clone(), Policy::Pack);
    assert_eq!(put(&mut index, "2", mib(1_000), Policy::Pack), "a/gpu-0");
    // News of the GPUs change nothing about it, and what has gone makes way.
    index.insert_node(&node("a", 2, 20_000));
    let only = PodAsk { nodes: Nodes::Only(["a".into()].into()), ..pod.clone() };
    assert!(refusal(&mut index, std::slice::from_ref(&only)).contains("1 node at the pod limit"));
    index.remove(&PodUid::new("1"));
    assert!(decide(&mut index, &[only], Policy::Pack).is_ok());
}

#[test]
fn what_others_granted_too_much_is_recorded_and_found() {
    let mut index = index(&[node("a", 1, 10_000)]);
    let found = decide(&mut index, &[mib(6_000).into()], Policy::Pack).unwrap().placements.remove(0);
    index.apply(&PodUid::new("1"), &found).unwrap();
    assert_eq!(index.apply(&PodUid::new("1"), &found), Err(Unknown::Placed((&PodUid::new("1")).into())));
    index.apply(&PodUid::new("2"), &found).unwrap();
    let words: Vec<_> = audit(&index).iter().map(AuditFinding::to_string).collect();
    assert_eq!(words, ["a/gpu-0: 12000 MiB are granted, and the device has 10000; delete one of its claims"]);
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

fn name(text: &str) -> QualifiedName {
    QualifiedName::of(text, "gpu.nvidia.com")
}

/// The same node, with attributes by GPU.
fn tell(mut node: NodeSpec, attributes: &[&[(&str, &str)]]) -> NodeSpec {
    for (gpu, attributes) in node.gpus.iter_mut().zip(attributes) {
        let value = |text: &str| AttributeValue::String(text.to_owned());
        let uuid = value(&format!("GPU-{}-{}", node.name, gpu.device));
        let attributes = attributes.iter().map(|(key, text)| (name(key), value(text)));
        gpu.facts = Arc::new(DeviceFacts {
            driver: "gpu.nvidia.com".to_owned(),
            attributes: attributes.chain([(name("uuid"), uuid)]).collect(),
            ..DeviceFacts::default()
        });
    }
    node
}

fn selecting(texts: &[&str]) -> Shape {
    with(mib(1000), |want| want.selectors = texts.iter().map(|text| (*text).to_owned()).collect())
}

const IS_GPU: &str = "device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == 'gpu'";
const IS_HOPPER: &str = "device.attributes['gpu.nvidia.com'].architecture == 'Hopper'";

#[test]
fn selectors_choose_gpus_and_a_refusal_counts_those_left_out() {
    let (old, new) =
        ([("type", "gpu"), ("architecture", "Volta")], [("type", "gpu"), ("architecture", "Hopper")]);
    let mut index = index(&[
        tell(node("a", 3, 10_000), &[&old, &old, &[("type", "mig")]]),
        tell(node("b", 2, 10_000), &[&old, &new]),
    ]);
    assert_eq!(put(&mut index, "1", selecting(&[IS_GPU]), Policy::Pack), "b/gpu-0");
    for policy in Policy::ALL {
        assert_eq!(put(&mut index, policy.as_str(), selecting(&[IS_GPU, IS_HOPPER]), policy), "b/gpu-1");
    }
    let none = selecting(&[IS_GPU, "device.attributes['gpu.nvidia.com'].architecture == 'Blackwell'"]);
    assert_eq!(
        refusal(&mut index, &[none.into()]),
        "needs 1 GPU; there is no candidate; left out: 5 GPUs that a selector leaves out \
         (\"device.attributes['gpu.nvidia.com'].architecture == 'Blackwell'\", the last of 2; they are NVIDIA H100)"
    );
    let large = with(selecting(&[IS_HOPPER]), |want| want.part = Part::Whole);
    assert_eq!(
        refusal(&mut index, &[large.into()]),
        "needs a whole GPU; none of 1 candidate is idle; left out: 3 GPUs that a selector leaves out \
         (\"device.attributes['gpu.nvidia.com'].architecture == 'Hopper'\"; they are NVIDIA H100), 1 GPU \
         on which the selector \"device.attributes['gpu.nvidia.com'].architecture == 'Hopper'\" fails: the device \
         has no attribute architecture in the domain gpu.nvidia.com"
    );
    let wrong = refusal(&mut index, &[selecting(&["device.drivr == 'x'"]).into()]);
    assert!(
        wrong.contains("5 GPUs on which the selector \"device.drivr == 'x'\" cannot be evaluated"),
        "{wrong}"
    );
}

#[test]
fn selectors_follow_what_slices_say() {
    let mut index = index(&[tell(node("a", 1, 10_000), &[&[("type", "gpu")]])]);
    let on = |index: &mut Index, shape: &Shape| {
        decide(index, &[shape.clone().into()], Policy::Pack).map(|found| spot(&found.placements[0])).ok()
    };
    let (gpu, hopper) = (selecting(&[IS_GPU]), selecting(&[IS_HOPPER]));
    assert_eq!(on(&mut index, &hopper), None);
    index.insert_node(&tell(node("b", 1, 10_000), &[&[("type", "mig"), ("architecture", "Hopper")]]));
    assert_eq!(on(&mut index, &hopper).as_deref(), Some("b/gpu-0"));
    assert_eq!(on(&mut index, &gpu).as_deref(), Some("a/gpu-0"));
    index.insert_node(&tell(node("a", 1, 10_000), &[&[("type", "vfio")]]));
    assert_eq!(on(&mut index, &gpu), None);
    // More facts than are kept: those that are gone are forgotten, and the answers stay right.
    for nth in 0..6_000 {
        let other = nth.to_string();
        index.insert_node(&tell(node("a", 1, 10_000), &[&[("type", "gpu"), ("other", &other)]]));
    }
    assert_eq!(on(&mut index, &gpu).as_deref(), Some("a/gpu-0"));
    assert_eq!(on(&mut index, &hopper).as_deref(), Some("b/gpu-0"));
    assert!(index.nodes.facts.state().1 < 6_000);
}

/// GPUs 0 and 2 on one PCIe root, 1 and 3 on another, 4 on none.
fn rooted(name: &str, mib: u64) -> NodeSpec {
    let (one, other) =
        ([("resource.kubernetes.io/pcieRoot", "x")], [("resource.kubernetes.io/pcieRoot", "y")]);
    tell(node(name, 5, mib), &[&one, &other, &one, &other, &[]])
}

fn alike(wants: &[usize]) -> Vec<AttributeConstraint> {
    vec![AttributeConstraint {
        rule: Rule::Same,
        attribute: name("resource.kubernetes.io/pcieRoot"),
        wants: wants.to_vec(),
    }]
}

#[test]
fn gpus_agree_in_an_attribute_where_they_must() {
    let mut index = index(&[rooted("a", 10_000)]);
    let pair = |mib_each| Shape { alike: alike(&[0]), ..with(mib(mib_each), |want| want.gpus = 2) };
    put(&mut index, "1", mib(9_000), Policy::Pack);
    for policy in Policy::ALL {
        let found = decide(&mut index, &[pair(5_000).into()], policy).unwrap();
        assert_eq!(spot(&found.placements[0]), "a/gpu-1+gpu-3", "{policy}: beside gpu-0 there is no room");
    }
    assert_eq!(put(&mut index, "2", pair(1_000), Policy::Pack), "a/gpu-0+gpu-2", "GPUs in use first");
    let three = Shape { alike: alike(&[0]), ..with(mib(100), |want| want.gpus = 3) };
    assert_eq!(
        refusal(&mut index, &[three.into()]),
        "needs 3 GPUs of one node; no node has so many with the same resource.kubernetes.io/pcieRoot"
    );
    let apart = |gpus| {
        let mut shape = Shape { alike: alike(&[0]), ..with(mib(100), |want| want.gpus = gpus) };
        shape.alike[0].rule = Rule::Different;
        shape
    };
    assert_eq!(put(&mut index, "3", apart(2), Policy::Pack), "a/gpu-1+gpu-2", "one of each root");
    assert_eq!(
        refusal(&mut index, &[apart(3).into()]),
        "needs 3 GPUs of one node; no node has so many with a different resource.kubernetes.io/pcieRoot each"
    );
}

#[test]
fn all_claims_of_a_pod_find_their_place_on_one_node() {
    let mut index = index(&[rooted("a", 10_000), node("b", 1, 10_000)]);
    let want =
        |claim, mib, gpus| Want { claim, part: Part::Memory(Bytes::from_mib(mib)), ..Want::whole(gpus) };
    let place = |index: &mut Index, wants: &[Want], alike: Vec<AttributeConstraint>| {
        let shape = Shape { wants: wants.to_vec(), alike, ..Shape::default() };
        let found = decide(index, &[shape.into()], Policy::Pack).map_err(|refused| refused.to_string())?;
        let grants = found.placements[0].gpus.iter();
        let words: Vec<_> = grants
            .map(|grant| format!("{}={}@{}", grant.want, grant.memory.mib_floor(), grant.device))
            .collect();
        Ok::<_, String>(format!("{} {}", found.placements[0].node, words.join(" ")))
    };
    // Two requests of one claim never share a GPU; two claims do, where that packs best.
    let one = place(&mut index, &[want(0, 4_000, 1), want(0, 5_000, 1)], vec![]);
    assert_eq!(one.unwrap(), "a 1=5000@gpu-0 0=4000@gpu-1");
    let two = place(&mut index, &[want(0, 4_000, 1), want(1, 5_000, 1)], vec![]);
    assert_eq!(two.unwrap(), "b 0=4000@gpu-0 1=5000@gpu-0");
    let full = place(&mut index, &[want(0, 6_000, 1), want(1, 5_000, 1)], vec![]);
    assert_eq!(full.unwrap(), "a 0=6000@gpu-0 1=5000@gpu-1");
    let tied = place(&mut index, &[want(0, 6_000, 1), want(0, 9_000, 1)], alike(&[0, 1]));
    assert_eq!(tied.unwrap(), "a 1=9000@gpu-0 0=6000@gpu-2");
    let many = place(&mut index, &[want(0, 1_000, 3), Want { claim: 1, ..Want::whole(3) }], vec![]);
    assert_eq!(
        many.unwrap_err(),
        "needs 6 GPUs of one node for 2 requests; each fits somewhere, but no node was found that has room for all at once"
    );
    let large = place(&mut index, &[want(0, 1_000, 1), want(1, 20_000, 1)], vec![]);
    assert_eq!(
        large.unwrap_err(),
        "needs 1 GPU; there is no candidate; left out: 6 GPUs too small even idle (largest 10000 MiB, asked 20000)"
    );
}

#[test]
fn tainted_gpus_are_for_those_who_bear_it() {
    let mut index = index(&[node("a", 2, 10_000)]);
    index.set_taints(&"a".into(), &DeviceName::whole(0), &taints(1)).unwrap();
    let bearing = |mib_each| with(mib(mib_each), |want| want.tolerations = [toleration("a")].into());
    put(&mut index, "1", mib(8_000), Policy::Pack);
    assert_eq!(
        refusal(&mut index, &[mib(9_000).into()]),
        "needs 9000 MiB; largest free on 1 candidate GPU is 2000 MiB on node a/gpu-1; left out: 1 GPU with a taint \
         that the request does not tolerate (the first is a=1:NoSchedule)"
    );
    assert_eq!(put(&mut index, "2", bearing(9_000), Policy::Pack), "a/gpu-0");
    // Taints that come and go leave nothing behind.
    (0..500)
        .for_each(|nth| index.set_taints(&"a".into(), &DeviceName::whole(1), &taints(3 * nth + 2)).unwrap());
    assert!(decide(&mut index, &[bearing(1_000).into()], Policy::Pack).is_ok());
    assert!(decide(&mut index, &[mib(1_000).into()], Policy::Pack).is_err());
    index.set_taints(&"a".into(), &DeviceName::whole(1), &[]).unwrap();
    // They stay where the node is told of again.
    index.insert_node(&node("a", 2, 20_000));
    assert_eq!(put(&mut index, "3", mib(9_000), Policy::Pack), "a/gpu-1");
    index.set_taints(&"a".into(), &DeviceName::whole(0), &[]).unwrap();
    assert_eq!(put(&mut index, "4", mib(11_000), Policy::Pack), "a/gpu-0");
}

/// What may happen to an index.
#[derive(Debug, Clone)]
enum Event {
    Pods(Vec<PodAsk>),
    Remove(usize),
    /// Thousandths of a CPU, pods.
    Room(usize, u64, u64),
    Closed(usize, u32, bool),
    /// A set of [`taints`].
    Tainted(usize, u32, usize),
    Node(usize, Option<u32>),
}

/// Sets of taints: none, one, two; many come and go.
fn taints(nth: usize) -> Vec<Taint> {
    let one = |key: &str, effect| Taint { key: key.to_owned(), value: nth.to_string(), effect };
    let all = [one("a", Effect::NoSchedule), one("b", Effect::NoExecute)];
    all[..nth % 3].to_vec()
}

fn toleration(key: &str) -> Toleration {
    let api = serde_json::from_value(serde_json::json!({"key": key, "operator": "Exists"})).unwrap();
    Toleration::of(&api).unwrap()
}

/// Whoever may create claims decides how long a shape is.
#[test]
fn what_is_kept_of_long_shapes_is_bounded_in_bytes() {
    let mut index = index(&[node("a", 1, 80_000)]);
    for nth in 0..100_u64 {
        let long = with(mib(nth + 1), |want| {
            want.tolerations =
                (0..8).map(|one| toleration(&format!("{one}{}", "x".repeat(125_000)))).collect();
        });
        assert!(places(&mut index, &[PodAsk::from(long)], Policy::Pack).is_some());
    }
    let (tables, bytes) = index.score_tables.kept();
    assert!((20..=33).contains(&tables) && bytes <= 32 << 20, "{tables} tables, {bytes} bytes");
    for nth in 0..100_u64 {
        assert!(places(&mut index, &[PodAsk::from(mib(nth + 1))], Policy::Pack).is_some());
    }
    assert!(index.score_tables.kept().0 > 100, "short ones take no room");
}

const NAMES: [&str; 5] = ["n0", "n1", "n2", "n3", "n4"];

fn shapes() -> impl Strategy<Value = PodAsk> {
    let part = prop_oneof![
        Just(Part::Whole),
        (1..120_u64).prop_map(|mib| Part::Memory(Bytes::from_mib(mib))),
        prop_oneof!["0\\.[1-9]"].prop_map(|text| Part::Fraction(text.parse().unwrap())),
    ];
    let rest = (0..3_u32, 0..3_u8, 0..15_u32, 0..4_usize, any::<bool>(), 0..5_usize, 0..4_u64);
    let tolerates = prop_oneof![Just(&[][..]), Just(&["a"][..]), Just(&["b", "a"][..])];
    let pods = prop_oneof![1 => Just(0), 4 => Just(1)];
    (part, rest, tolerates, pods).prop_map(
        |(part, (gpus, compute, processes, rung, product, only, cpu), tolerates, pods)| PodAsk {
            shape: Shape {
                cpu_milli: cpu * 500,
                memory: Bytes::from_mib(cpu * 100),
                pods,
                ..Shape::one(Want {
                    part,
                    compute: Percent::try_from(compute * 40).ok(),
                    processes,
                    minimum_isolation: Isolation::ALL[rung.min(2)],
                    products: if product { vec!["t4".to_owned()] } else { vec![] },
                    tolerations: tolerates.iter().copied().map(toleration).collect(),
                    ..Want::whole(gpus)
                })
            },
            nodes: if only == 0 {
                Nodes::Except(vec![Arc::new([NAMES[1].into()].into())])
            } else {
                Nodes::Any
            },
        },
    )
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let event = prop_oneof![
        6 => proptest::collection::vec(shapes(), 1..2).prop_map(Event::Pods),
        1 => proptest::collection::vec(shapes(), 2..4).prop_map(Event::Pods),
        3 => (0..40_usize).prop_map(Event::Remove),
        1 => (0..5_usize, 0..8_000_u64, 0..6_u64).prop_map(|(node, cpu, pods)| Event::Room(node, cpu, pods)),
        1 => (0..5_usize, 0..3_u32, any::<bool>()).prop_map(|(node, gpu, closed)| Event::Closed(node, gpu, closed)),
        2 => (0..5_usize, 0..3_u32, 0..200_usize).prop_map(|(node, gpu, set)| Event::Tainted(node, gpu, set)),
        1 => (0..5_usize, proptest::option::of(1..4_u32)).prop_map(|(node, gpus)| Event::Node(node, gpus)),
    ];
    proptest::collection::vec(event, 1..40)
}

fn mixed_node(nth: usize, gpus: u32) -> NodeSpec {
    let kinds = [("NVIDIA T4", 60, Isolation::Mps), ("NVIDIA H100", 100, Isolation::Kernel)];
    let kind = |minor: u32| kinds[(nth + (minor / 2) as usize) % 2];
    let one = |minor| gpu(minor, kind(minor).0, kind(minor).1, kind(minor).2);
    let four = |spec: GpuSpec| {
        let division = Division::Shares(ShareRoom { slots: 4, ..room(&spec) });
        GpuSpec { division, ..spec }
    };
    let gpus = (0..gpus).map(|minor| four(one(minor))).collect();
    NodeSpec { name: NAMES[nth].into(), cpu_milli: 6_000, memory: Bytes::from_mib(1_000), gpus }
}

/// The third may have few pods.
fn four_nodes() -> Index {
    let mut index = Index::new();
    (0..4).for_each(|nth| index.insert_node(&mixed_node(nth, 3)));
    index.set_room(&NAMES[2].into(), 6_000, Bytes::from_mib(1_000), 2).unwrap();
    index
}

/// Is there any place? Asked without any of the allocator's own code but the views.
fn brute_force(
    index: &Index,
    specs: &[Option<NodeSpec>],
    tainted: &BTreeMap<(usize, u32), usize>,
    pods_left: &[u64],
    pod: &PodAsk,
) -> bool {
    let (shape, want) = (&pod.shape, &pod.shape.wants[0]);
    index.nodes().any(|node| {
        let spec = specs.iter().flatten().find(|spec| spec.name == *node.name()).unwrap();
        let nth = NAMES.iter().position(|name| *name == node.name().as_str()).unwrap();
        let fits = |(minor, (view, spec)): (usize, (GpuView<'_>, &GpuSpec))| {
            let (all, free) = view.memory();
            let taints = tainted.get(&(nth, minor as u32)).map_or(0, |set| set % 3);
            let need = match want.part {
                Part::Whole => all,
                Part::Memory(bytes) => bytes,
                Part::Fraction(fraction) => fraction.of(all),
            };
            let slots = match want.part {
                Part::Whole => room(spec).slots,
                // Blocks are added until they hold the processes.
                _ => (1..).find(|blocks| blocks * room(spec).processes_per_slot >= want.processes).unwrap(),
            };
            let enough = need >= Bytes::from_mib(u64::from(want.processes.max(1)));
            let product = want.products.is_empty() || spec.product.to_lowercase().contains("t4");
            let compute = want.compute.map_or(0, |percent| u32::from(percent.get()));
            let rung = room(spec).isolation >= want.minimum_isolation;
            !view.closed()
                && want.tolerations.len() >= taints
                && product
                && rung
                && free >= need
                && enough
                && view.slots() >= slots
                && view.compute() >= compute
        };
        let count = node.gpus().zip(&spec.gpus).enumerate().filter(|pair| fits(*pair)).count();
        pod.nodes.allow(node.name())
            && node.cpu_milli().1 >= shape.cpu_milli
            && node.memory().1 >= shape.memory
            && pods_left[nth] >= shape.pods
            && count >= want.gpus as usize
    })
}

/// How many pods each node may still have.
fn pods_left(most: &BTreeMap<usize, u64>, live: &[(PodUid, Placement)]) -> Vec<u64> {
    let left = |(nth, name): (usize, &&str)| {
        let there = live.iter().filter(|(_, placement)| placement.node.as_str() == *name);
        let there: u64 = there.map(|(_, placement)| placement.pods).sum();
        most.get(&nth).map_or(u64::MAX, |most| *most).saturating_sub(there)
    };
    NAMES.iter().enumerate().map(left).collect()
}

/// CPU, memory and pods of all pods of a decision together are there.
fn has_room(index: &Index, pods_left: &[u64], decision: &Decision) -> bool {
    index.nodes().all(|node| {
        let nth = NAMES.iter().position(|name| *name == node.name().as_str()).unwrap();
        let here = || decision.placements.iter().filter(|placement| placement.node == *node.name());
        here().map(|one| one.cpu_milli).sum::<u64>() <= node.cpu_milli().1
            && Bytes(here().map(|one| one.memory.0).sum()) <= node.memory().1
            && here().map(|one| one.pods).sum::<u64>() <= pods_left[nth]
    })
}

/// Runs events on an index; everything that was decided.
fn play(events: &[Event], policy: Policy) -> Result<Vec<Result<Decision, Explanation>>, TestCaseError> {
    let mut specs: Vec<_> = (0..4).map(|nth| Some(mixed_node(nth, 2))).chain([None]).collect();
    let mut index = Index::new();
    specs.iter().flatten().for_each(|spec| index.insert_node(spec));
    let (mut log, mut live, mut tainted) = (Vec::new(), Vec::new(), BTreeMap::new());
    let mut most: BTreeMap<usize, u64> = BTreeMap::new();
    for (at, event) in events.iter().enumerate() {
        match event {
            Event::Pods(pods) => {
                pods.iter().for_each(|pod| index.seen(&pod.shape));
                let decision = decide(&mut index, pods, policy);
                let left = pods_left(&most, &live);
                if let [pod] = pods.as_slice() {
                    prop_assert_eq!(
                        decision.is_ok(),
                        brute_force(&index, &specs, &tainted, &left, pod),
                        "{:?}",
                        decision
                    );
                }
                let fits = decision.as_ref().map_or(true, |decision| has_room(&index, &left, decision));
                prop_assert!(fits, "{left:?} pods left: {decision:?}");
                for (nth, placement) in decision.iter().flat_map(|decision| &decision.placements).enumerate()
                {
                    let uid = PodUid::new(format!("{at}-{nth}"));
                    index.apply(&uid, placement).unwrap();
                    live.push((uid, placement.clone()));
                }
                log.push(decision);
            }
            Event::Remove(nth) if !live.is_empty() => {
                index.remove(&live.swap_remove(nth % live.len()).0);
            }
            Event::Remove(_) => {}
            Event::Room(node, cpu, pods) => {
                let done = index.set_room(&NAMES[*node].into(), *cpu, Bytes::from_mib(1_000), *pods);
                done.into_iter().for_each(|()| _ = most.insert(*node, *pods));
            }
            Event::Closed(node, gpu, closed) => {
                _ = index.set_closed(&NAMES[*node].into(), &DeviceName::whole(*gpu), *closed);
            }
            Event::Tainted(node, gpu, set) => {
                let done = index.set_taints(&NAMES[*node].into(), &DeviceName::whole(*gpu), &taints(*set));
                done.into_iter().for_each(|()| _ = tainted.insert((*node, *gpu), *set));
            }
            Event::Node(nth, gpus) => {
                tainted.retain(|(node, gpu), _| node != nth || gpus.is_some_and(|gpus| *gpu < gpus));
                most.retain(|node, _| node != nth || gpus.is_some());
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

/// A pod with up to three wants, of two claims, perhaps with GPUs that must be alike.
fn several() -> impl Strategy<Value = Shape> {
    let want = (0..2_u32, 1..3_u32, 0..3_u64, any::<bool>(), any::<bool>());
    let want = want.prop_map(|(claim, gpus, third, t4, tolerates)| Want {
        claim,
        tolerations: if tolerates { vec![toleration("a")] } else { vec![] }.into(),
        part: if third == 0 { Part::Whole } else { Part::Memory(Bytes::from_mib(third * 30)) },
        products: if t4 { vec!["t4".to_owned()] } else { vec![] },
        ..Want::whole(gpus)
    });
    let rule = prop_oneof![Just(None), Just(Some(Rule::Same)), Just(Some(Rule::Different))];
    (proptest::collection::vec(want, 1..4), rule).prop_map(|(wants, rule)| {
        let all: Vec<usize> = (0..wants.len()).filter(|at| wants[*at].claim == 0).collect();
        let alike =
            rule.map(|rule| AttributeConstraint { rule, ..alike(&all).remove(0) }).into_iter().collect();
        Shape { wants, alike, ..Shape::default() }
    })
}

/// The GPU that has a taint where several wants are tried.
const TAINTED: usize = 3;

/// Is there any way to serve what is left of the wants? Tries every GPU for each.
fn any_way(node: &NodeSpec, shape: &Shape, free: &mut Vec<u64>, chosen: &mut Vec<(usize, usize)>) -> bool {
    let order = shape.wants.iter().enumerate().flat_map(|(at, want)| vec![at; want.gpus as usize]);
    let order: Vec<usize> = order.collect();
    let Some(&at) = order.get(chosen.len()) else { return true };
    let want = &shape.wants[at];
    for gpu in 0..node.gpus.len() {
        let spec = &node.gpus[gpu];
        let all = room(spec).memory.mib_floor();
        let need = if let Part::Memory(bytes) = want.part { bytes.mib_floor() } else { all };
        let product = want.products.is_empty() || spec.product.contains("T4");
        let borne = gpu != TAINTED || !want.tolerations.is_empty();
        let other = chosen
            .iter()
            .all(|(want, taken)| shape.wants[*want].claim != shape.wants[at].claim || *taken != gpu);
        let root = |gpu: usize| node.gpus[gpu].facts.attributes.get(&name("resource.kubernetes.io/pcieRoot"));
        let tied = |at: usize| shape.alike.iter().any(|alike| alike.wants.contains(&at));
        let same = !tied(at)
            || root(gpu).is_some()
                && chosen.iter().all(|(want, taken)| {
                    let same = shape.alike[0].rule == Rule::Same;
                    !tied(*want) || (root(*taken) == root(gpu)) == same
                });
        if product && borne && other && same && free[gpu] >= need {
            free[gpu] -= need;
            chosen.push((at, gpu));
            let found = any_way(node, shape, free, chosen);
            chosen.pop();
            free[gpu] += need;
            if found {
                return true;
            }
        }
    }
    false
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
        let mut kept = four_nodes();
        let mut placed = Vec::new();
        for (at, pod) in shapes.iter().enumerate() {
            let mut fresh = four_nodes();
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

    /// Pods with several wants, too, are placed if and only if there is a way.
    #[test]
    fn several_wants_are_served_if_there_is_a_way(
        shape in several(),
        used in proptest::collection::vec(0..70_u64, 5),
        policy in 0..3_usize,
    ) {
        let mut spec = rooted("a", 60);
        for gpu in &mut spec.gpus[..2] {
            let division = Division::Shares(ShareRoom { memory: Bytes::from_mib(90), ..room(gpu) });
            (gpu.product, gpu.division) = ("NVIDIA T4".to_owned(), division);
        }
        let mut index = index(std::slice::from_ref(&spec));
        index.set_taints(&"a".into(), &spec.gpus[TAINTED].device, &taints(1)).unwrap();
        let mut free = Vec::new();
        for (nth, used) in used.iter().enumerate() {
            let all = room(&spec.gpus[nth]).memory.mib_floor();
            let used = used.min(&all) / 30 * 30;
            free.push(all - used);
            let (device, memory) = (spec.gpus[nth].device.clone(), Bytes::from_mib(used));
            let grant = GpuGrant { want: 0, device, memory, compute: None, slots: 0, extent: Extent::Part };
            let placement = Placement { node: "a".into(), gpus: vec![grant], cpu_milli: 0, memory: Bytes(0), pods: 0 };
            index.apply(&PodUid::new(nth.to_string()), &placement).unwrap();
        }
        let decision = decide(&mut index, &[shape.clone().into()], Policy::ALL[policy]);
        prop_assert_eq!(decision.is_ok(), any_way(&spec, &shape, &mut free, &mut Vec::new()), "{:?}", decision);
        for placement in decision.iter().flat_map(|decision| &decision.placements) {
            for (at, want) in shape.wants.iter().enumerate() {
                prop_assert_eq!(placement.gpus.iter().filter(|grant| grant.want == at).count(), want.gpus as usize);
            }
            index.apply(&PodUid::new("pod"), placement).unwrap();
            prop_assert!(audit(&index).is_empty());
        }
    }
}

/// What can be granted of a GPU may change under a claim that has it whole.
#[test]
fn nothing_goes_beside_a_whole_gpu_whatever_its_numbers_are() {
    let mut index = index(&[node("a", 2, 10_000)]);
    let all = GpuShare { amount: Some(Amount::Fraction("1".parse().unwrap())), ..GpuShare::default() };
    assert_eq!(put(&mut index, "all", Shape::one(Want::of(&all, 1)), Policy::Pack), "a/gpu-0");
    let mut larger = node("a", 2, 20_000);
    let more = |gpu: &mut GpuSpec| gpu.division = Division::Shares(ShareRoom { slots: 32, ..room(gpu) });
    larger.gpus.iter_mut().for_each(more);
    index.insert_node(&larger);
    for name in ["x", "y"] {
        assert_eq!(put(&mut index, name, mib(9_000), Policy::Spread), "a/gpu-1");
    }
    assert!(decide(&mut index, &[mib(9_000).into()], Policy::Spread).is_err());
    assert_eq!(audit(&index), []);
    // Somebody else gives a part of the same GPU.
    let mut at = index.placement(&PodUid::new("all")).unwrap().clone();
    at.gpus[0] = GpuGrant {
        memory: Bytes::from_mib(1),
        slots: 1,
        compute: None,
        extent: Extent::Part,
        ..at.gpus[0].clone()
    };
    index.apply(&PodUid::new("forged"), &at).unwrap();
    let findings = audit(&index);
    assert!(matches!(findings[..], [AuditFinding::Whole { grants: 2, .. }]), "{findings:?}");
}

/// Whatever somebody forged, and however often.
#[test]
fn grants_beyond_all_numbers_are_found_and_not_added_up_beyond_them() {
    let mut index = index(&[node("a", 1, 10_000)]);
    for nth in 0..3 {
        let grant = GpuGrant {
            want: 0,
            device: DeviceName::whole(0),
            memory: Bytes(u64::MAX),
            compute: Percent::try_from(100_u8).ok(),
            slots: u32::MAX,
            extent: Extent::Part,
        };
        let placement = Placement {
            node: "a".into(),
            gpus: vec![grant],
            cpu_milli: u64::MAX,
            memory: Bytes(u64::MAX),
            pods: u64::MAX,
        };
        index.apply(&PodUid::new(format!("p{nth}")), &placement).unwrap();
    }
    let findings = audit(&index);
    let is = |one: &AuditFinding, what: fn(&AuditFinding) -> bool| what(one);
    assert!(
        findings
            .iter()
            .any(|one| is(one, |one| matches!(one, AuditFinding::Slots { granted: 12_884_901_885, .. })))
    );
    assert!(findings.iter().any(|one| is(one, |one| matches!(one, AuditFinding::Memory { .. }))));
    assert!(
        !findings.iter().any(|one| is(one, |one| matches!(one, AuditFinding::Count { .. }))),
        "{findings:?}"
    );
    assert!(decide(&mut index, &[mib(1).into()], Policy::Pack).is_err());
}

/// Who has forged it deletes it again: the others' shares are there as before.
#[test]
fn a_grant_beyond_all_numbers_takes_nothing_of_others_along_when_it_goes() {
    let mut index = index(&[node("a", 1, 10_000)]);
    let placement = |memory, slots, cpu_milli| Placement {
        node: "a".into(),
        gpus: vec![GpuGrant {
            want: 0,
            device: DeviceName::whole(0),
            memory,
            compute: None,
            slots,
            extent: Extent::Part,
        }],
        cpu_milli,
        memory,
        pods: 1,
    };
    index.apply(&"runs".into(), &placement(Bytes::from_mib(4_000), 1, 1_000)).unwrap();
    let left = |index: &Index| {
        let node = index.nodes().next().unwrap();
        let gpu = node.gpus().next().unwrap();
        (gpu.memory().1, gpu.slots(), node.cpu_milli().1, node.memory().1, node.pods().1)
    };
    let before = left(&index);
    for nth in 0..3 {
        index
            .apply(&format!("forged-{nth}").as_str().into(), &placement(Bytes(u64::MAX), u32::MAX, u64::MAX))
            .unwrap();
    }
    assert!(!audit(&index).is_empty());
    for nth in 0..3 {
        index.remove(&format!("forged-{nth}").as_str().into());
    }
    assert_eq!(left(&index), before);
    assert_eq!(audit(&index), []);
}
