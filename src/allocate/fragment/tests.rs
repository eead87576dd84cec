use proptest::prelude::*;

use super::*;
use crate::allocate::{Division, GpuGrant, GpuSpec, Index, NodeSpec, Part, Placement, ShareRoom};
use crate::model::names::{DeviceName, PodUid};
use crate::model::quantity::Bytes;
use crate::model::share::{DaemonScope, Extent, Isolation};

/// What is lost, as the first lines of the module say it: target by target, in wide numbers, with division.
fn plainly(index: &Index, node: &Node, (cpu, memory): (u64, u64), free: &[u64]) -> u64 {
    let total: u64 = free.iter().sum();
    let lost = |(shape, weight): &(Shape, u64)| {
        let need = |gpu: &Gpu| needs(&shape.wants[0], &index.nodes.classes[gpu.class as usize]).ok();
        let need = |gpu: &Gpu| need(gpu).map_or(u64::MAX, |(mib, _)| mib);
        let fitting = || node.gpus.iter().zip(free).filter(|(gpu, free)| **free >= need(gpu));
        let mib: u64 = fitting().map(|(_, free)| *free).sum();
        let asked = (shape.cpu_milli, shape.memory.mib_ceil());
        if cpu < asked.0 || memory < asked.1 || fitting().count() < shape.wants[0].gpus as usize {
            return total * weight;
        }
        let pods = (cpu / asked.0.max(1)).min(memory / asked.1.max(1));
        let fed =
            (pods + 1).saturating_mul(need(&node.gpus[0]).saturating_mul(u64::from(shape.wants[0].gpus)));
        (total - mib.min(fed)) * weight
    };
    index.workload.shapes.iter().map(lost).sum()
}

fn shapes() -> impl Strategy<Value = Vec<Shape>> {
    let part =
        prop_oneof![Just(Part::Whole), (1..120_u64).prop_map(|mib| Part::Memory(Bytes::from_mib(mib)))];
    let shape = (part, 1..4_u32, any::<bool>(), 0..9_u64, 0..5_u64);
    let shape = shape.prop_map(|(part, gpus, t4, cpu, memory)| {
        let products = if t4 { vec!["t4".to_owned()] } else { vec![] };
        let (cpu_milli, memory) = (cpu * 333, Bytes::from_mib(memory * 70));
        Shape { cpu_milli, memory, ..Shape::one(Want { part, products, ..Want::whole(gpus) }) }
    });
    proptest::collection::vec(shape, 1..40)
}

proptest! {
    #[test]
    fn what_is_lost_is_the_plain_sum(
        shapes in shapes(),
        room in (0..9_000_u64, 0..900_u64),
        taken in (0..3_000_u64, 0..300_u64),
        used in proptest::collection::vec(0..110_u64, 1..9),
        (at, more) in (0..8_usize, 0..100_u64),
    ) {
        let kinds = [("NVIDIA T4", 60), ("NVIDIA H100", 100)];
        let gpu = |nth: usize| GpuSpec {
            device: DeviceName::whole(nth as u32),
            product: kinds[nth / 3 % 2].0.to_owned(),
            division: Division::Shares(ShareRoom {
                memory: Bytes::from_mib(kinds[nth / 3 % 2].1),
                slots: 16,
                processes_per_slot: 3,
                isolation: Isolation::Mps,
                daemon: DaemonScope::Gpu,
            }),
            facts: std::sync::Arc::default(),
        };
        let mut index = Index::new();
        let gpus = (0..used.len()).map(gpu).collect();
        index.insert_node(&NodeSpec { name: "a".into(), cpu_milli: room.0, memory: Bytes::from_mib(room.1), gpus });
        shapes.iter().for_each(|shape| index.seen(shape));
        let grant = |(nth, used): (usize, &u64)| {
            let (device, memory) = (DeviceName::whole(nth as u32), Bytes::from_mib(*used));
            GpuGrant { want: 0, device, memory, compute: None, slots: 1, extent: Extent::Part }
        };
        let gpus = used.iter().enumerate().map(grant).collect();
        let placement = Placement { node: "a".into(), gpus, cpu_milli: 0, memory: Bytes(0), pods: 0 };
        index.apply(&PodUid::new("1"), &placement).unwrap();

        let (node, targets) = (index.nodes.all[0].as_ref().unwrap(), &index.workload.targets);
        let mut free: Vec<u64> = node.gpus.iter().map(Gpu::usable_mib).collect();
        let (mut tally, mut lost) = (Tally::default(), Lost::default());
        for _ in 0..2 {
            tally.count(targets, node, None);
            prop_assert_eq!(lost.of(targets, node, &mut tally), plainly(&index, node, room, &free));
        }
        tally.feed(targets, node, taken.0, taken.1);
        let room = (room.0.saturating_sub(taken.0), room.1.saturating_sub(taken.1));
        let at = at % used.len();
        let before = free[at];
        free[at] = before.saturating_sub(more);
        prop_assert_eq!(
            tally.lost_with(targets, node.gpus[at].class, before, free[at]),
            plainly(&index, node, room, &free)
        );
    }
}

#[test]
fn dividing_by_multiplying_is_exact() {
    let few = (1..400).step_by(7);
    for asked in few.chain([1_000, 4_096, 16_000, 128_000, 262_143, LEFT_MAX - 1, LEFT_MAX]) {
        let inverse = TargetDemand::of([asked as u64].into_iter()).inverses[0];
        for left in (0..=LEFT_MAX).step_by(asked as usize).flat_map(|left| [left - 1, left]).skip(1) {
            assert_eq!(times(left, inverse), left / asked, "{left} / {asked}");
        }
    }
}
