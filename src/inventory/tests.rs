use proptest::prelude::*;

use super::*;
use crate::model::gpu::{
    DriverVersions, Gpu, Health, Memory, MigCapacity, MigDevice, MigMode, Pci, Placement,
};
use crate::model::quantity::Bytes;

pub fn gpu(minor: u32) -> Gpu {
    Gpu {
        uuid: DeviceUuid::new(format!("GPU-{minor:08}")),
        minor,
        product_name: "NVIDIA H100 80GB HBM3".to_owned(),
        brand: "Nvidia".to_owned(),
        architecture: "Hopper".to_owned(),
        compute_capability: (9, 0),
        memory: Memory::Known { total: Bytes::from_mib(81_559), reserved: Bytes::from_mib(551) },
        multiprocessors: Some(132),
        addressing_mode: None,
        pci: Pci { bus_id: format!("0000:{minor:02x}:00.0"), root: None, numa_node: None },
        mig: MigMode::Off,
        health: Health::Healthy,
    }
}

fn mig(uuid: &str, start: u32) -> MigDevice {
    MigDevice {
        uuid: uuid.into(),
        profile: "1g.10gb".to_owned(),
        gpu_instance: 7 + start,
        compute_instance: 0,
        profile_id: 19,
        placement: Placement { start, size: 1 },
        capacity: MigCapacity::default(),
    }
}

fn failed(index: u32, uuid: Option<DeviceUuid>, lost: bool) -> FailedGpu {
    FailedGpu { index, uuid, reason: "it fails".to_owned(), lost }
}

pub fn look(gpus: Vec<Gpu>) -> Look {
    let driver = DriverVersions { driver: "580.159.04".to_owned(), cuda: "13.0".to_owned() };
    Look { gpus: NodeGpus { driver, gpus }, ..Look::default() }
}

fn fold_all(looks: impl IntoIterator<Item = Result<Look, String>>) -> (InventoryTracker, Vec<Change>) {
    looks.into_iter().fold((InventoryTracker::default(), Vec::new()), |(known, _), look| known.fold(look))
}

fn found(known: &InventoryTracker) -> Vec<(u32, bool)> {
    match known.inventory() {
        Inventory::Found(node) => {
            node.gpus.iter().map(|gpu| (gpu.minor, gpu.health == Health::Healthy)).collect()
        }
        other => panic!("{other:?}"),
    }
}

fn printed(changes: &[Change]) -> String {
    changes.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}

#[test]
fn without_a_library_the_reason_is_told_once() {
    let (known, changes) = InventoryTracker::default().fold(Err("no libnvidia-ml.so.1".to_owned()));
    assert_eq!(known.inventory(), &Inventory::Unavailable { reason: "no libnvidia-ml.so.1".to_owned() });
    assert_eq!(printed(&changes), "no GPUs can be offered: no libnvidia-ml.so.1");
    let (_, again) = known.fold(Err("no libnvidia-ml.so.1".to_owned()));
    assert_eq!(again, []);
}

#[test]
fn a_known_gpu_that_cannot_be_read_stays_and_is_unhealthy() {
    for uuid in [Some(gpu(1).uuid), None] {
        let broken = Look { failed: vec![failed(1, uuid, false)], ..look(vec![gpu(0), gpu(2)]) };
        let (mut known, mut changes) = fold_all([Ok(look(vec![gpu(0), gpu(1), gpu(2)])), Ok(broken.clone())]);
        assert_eq!(found(&known), [(0, true), (1, false), (2, true)]);
        assert_eq!(printed(&changes), "GPU 1 (GPU-00000001) is unhealthy: it fails");
        for _ in 0..20 {
            (known, changes) = known.fold(Ok(broken.clone()));
        }
        assert_eq!((found(&known).len(), changes.as_slice()), (3, [].as_slice()));
        let (known, changes) = known.fold(Ok(look(vec![gpu(0), gpu(1), gpu(2)])));
        assert_eq!(found(&known), [(0, true), (1, true), (2, true)]);
        assert_eq!(printed(&changes), "GPU 1 (GPU-00000001) is healthy again");
    }
}

#[test]
fn a_gpu_that_never_said_who_it_is_is_left_out_with_words() {
    let broken = Look { failed: vec![failed(1, None, true)], ..look(vec![gpu(0)]) };
    let (known, changes) = fold_all([Ok(broken)]);
    assert_eq!(found(&known), [(0, true)]);
    assert_eq!(known.left_out(), ["the GPU at NVML index 1: it fails"]);
    assert!(printed(&changes).contains("left out: the GPU at NVML index 1: it fails"));
}

/// Pods on a lost GPU are evicted: nothing is called so that may be another one.
#[test]
fn a_gpu_is_lost_only_where_nvml_says_so_of_it_for_sure() {
    let all = || Ok(look((0..4).map(gpu).collect()));
    let lost = |failed: Vec<FailedGpu>, seen: &[u32]| -> Vec<u32> {
        let (known, _) =
            fold_all([all(), Ok(Look { failed, ..look(seen.iter().copied().map(gpu).collect()) })]);
        let Inventory::Found(node) = known.inventory() else { panic!("{known:?}") };
        let lost = node.gpus.iter().filter(|gpu| matches!(gpu.health, Health::Lost(_)));
        lost.map(|gpu| gpu.minor).collect()
    };
    let (one, two) = (Some(gpu(1).uuid), Some(gpu(2).uuid));
    assert_eq!(lost(vec![failed(1, one.clone(), true)], &[0, 2, 3]), [1]);
    assert_eq!(lost(vec![failed(1, None, true)], &[0, 2, 3]), [1]);
    assert_eq!(lost(vec![failed(1, None, true), failed(2, None, true)], &[0, 3]), [1, 2]);
    assert_eq!(
        lost(vec![failed(1, None, true), failed(2, two, false)], &[0, 3]),
        [1],
        "the other has its own"
    );
    assert_eq!(
        lost(vec![failed(1, None, true), failed(2, None, false)], &[0, 3]),
        [0; 0],
        "which of the two?"
    );
    assert_eq!(lost(vec![failed(1, None, true)], &[0, 3]), [0; 0], "one is lost, one is not listed: which?");
    assert_eq!(lost(vec![failed(1, one, false)], &[0, 2, 3]), [0; 0]);
}

#[test]
fn a_gpu_that_is_no_longer_counted_goes_after_two_looks() {
    let (known, changes) = fold_all([Ok(look(vec![gpu(0), gpu(1)])), Ok(look(vec![gpu(0)]))]);
    assert_eq!(found(&known), [(0, true), (1, false)]);
    assert!(printed(&changes).contains("GPU 1 (GPU-00000001) is unhealthy"));
    let (gone, changes) = known.fold(Ok(look(vec![gpu(0)])));
    assert_eq!(found(&gone), [(0, true)]);
    assert_eq!(printed(&changes), "GPU 1 (GPU-00000001) is gone");
    let (back, _) = known.fold(Ok(look(vec![gpu(0), gpu(1)])));
    assert_eq!(found(&back), [(0, true), (1, true)]);
}

#[test]
fn another_board_in_the_same_place_takes_the_name_at_once() {
    let replacement = Gpu { uuid: "GPU-new".into(), ..gpu(1) };
    let (known, changes) = fold_all([Ok(look(vec![gpu(0), gpu(1)])), Ok(look(vec![gpu(0), replacement]))]);
    assert_eq!(found(&known), [(0, true), (1, true)]);
    assert!(printed(&changes).starts_with("GPU 1 (GPU-00000001) is gone\nGPU 1 (GPU-new, "), "{changes:?}");
}

#[test]
fn looks_that_fail_are_forgiven_then_unhealthy_then_nothing_is_offered() {
    let (mut known, _) = fold_all([Ok(look(vec![gpu(0), gpu(1)]))]);
    for failures in 1..=FORGET_AFTER {
        let (next, changes) = known.fold(Err("Timeout".to_owned()));
        if failures < UNHEALTHY_AFTER {
            assert_eq!((found(&next), changes.as_slice()), (vec![(0, true), (1, true)], [].as_slice()));
        } else if failures < FORGET_AFTER {
            assert_eq!(found(&next), [(0, false), (1, false)]);
            assert_eq!(changes.len(), if failures == UNHEALTHY_AFTER { 2 } else { 0 });
        } else {
            assert_eq!(next.inventory(), &Inventory::Unavailable { reason: "Timeout".to_owned() });
            assert_eq!(printed(&changes), "no GPUs can be offered: Timeout");
        }
        known = next;
    }
    let (known, changes) = known.fold(Ok(look(vec![gpu(0)])));
    assert_eq!((found(&known), changes.len()), (vec![(0, true)], 1));
}

#[test]
fn two_devices_of_one_name_or_uuid_become_one_and_words() {
    let same_minor = Gpu { uuid: "GPU-x".into(), pci: Pci::default(), ..gpu(0) };
    let same_uuid = Gpu { uuid: gpu(0).uuid, ..gpu(3) };
    let two_slices =
        Gpu { mig: MigMode::On(vec![mig("MIG-b", 1), mig("MIG-a", 1), mig("MIG-c", 0)]), ..gpu(5) };
    let (known, _) = fold_all([Ok(look(vec![two_slices, same_uuid, gpu(0), same_minor]))]);
    assert_eq!(found(&known), [(0, true), (3, true), (5, true)]);
    assert_eq!(
        known.left_out(),
        [
            "GPU-00000000: another device is already called gpu-0",
            "MIG-b: another device is already called gpu-5-mig-1g10gb-19-1",
        ]
    );
}

#[test]
fn mig_devices_that_come_and_go_are_told_by_profile_and_place() {
    let before = Gpu { mig: MigMode::On(vec![mig("MIG-a", 0), mig("MIG-b", 1)]), ..gpu(0) };
    let after = Gpu { mig: MigMode::On(vec![mig("MIG-b", 1), mig("MIG-c", 2)]), ..gpu(0) };
    let (_, changes) = fold_all([Ok(look(vec![before])), Ok(look(vec![after]))]);
    assert_eq!(printed(&changes), "MIG devices of GPU 0 (GPU-00000000): new 1g.10gb@2, gone 1g.10gb@0");
}

#[test]
fn another_driver_is_a_change() {
    let mut newer = look(vec![gpu(0)]);
    newer.gpus.driver.driver = "615.10.01".to_owned();
    let (_, changes) = fold_all([Ok(look(vec![gpu(0)])), Ok(newer)]);
    assert_eq!(printed(&changes), "driver 580.159.04 was replaced by 615.10.01");
}

/// Looks in which anything may collide, be missing or fail.
fn any_look() -> impl Strategy<Value = Result<Look, String>> {
    let any_gpu = (0..6_u32, 0..6_u32, proptest::collection::vec((0..4_u32, 0..5_u32), 0..4)).prop_map(
        |(minor, uuid, migs)| Gpu {
            uuid: DeviceUuid::new(format!("GPU-{uuid}")),
            mig: match migs.is_empty() {
                true => MigMode::Off,
                false => MigMode::On(
                    migs.iter().map(|(uuid, start)| mig(&format!("MIG-{minor}-{uuid}"), *start)).collect(),
                ),
            },
            ..gpu(minor)
        },
    );
    let any_failed = (0..6_u32, proptest::option::of(0..6_u32)).prop_map(|(index, uuid)| FailedGpu {
        index,
        uuid: uuid.map(|uuid| DeviceUuid::new(format!("GPU-{uuid}"))),
        reason: format!("failure {index}"),
        lost: index % 2 == 0,
    });
    prop_oneof![
        4 => (proptest::collection::vec(any_gpu, 0..6), proptest::collection::vec(any_failed, 0..3))
            .prop_map(|(gpus, failed)| Ok(Look { failed, ..look(gpus) })),
        1 => Just(Err("no driver".to_owned())),
    ]
}

proptest! {
    #[test]
    fn a_look_that_stays_the_same_changes_nothing(looks in proptest::collection::vec(any_look(), 1..6)) {
        let last = looks.last().cloned().unwrap();
        let (mut known, _) = fold_all(looks);
        for _ in 0..=FORGET_AFTER {
            known = known.fold(last.clone()).0;
        }
        let (again, changes) = known.fold(last);
        prop_assert_eq!(again.inventory(), known.inventory());
        prop_assert_eq!(changes, vec![]);
    }

    #[test]
    fn the_order_in_which_nvml_lists_gpus_does_not_matter(
        first in any_look(), second in any_look(), seed in any::<prop::sample::Index>(),
    ) {
        let turned = second.clone().map(|mut look| {
            let gpus = &mut look.gpus.gpus;
            if !gpus.is_empty() {
                let by = seed.index(gpus.len());
                gpus.rotate_left(by);
            }
            look
        });
        let (a, changes_a) = fold_all([first.clone(), second]);
        let (b, changes_b) = fold_all([first, turned]);
        prop_assert_eq!(a.inventory(), b.inventory());
        prop_assert_eq!(changes_a, changes_b);
    }

    #[test]
    fn names_are_unique_and_sorted(looks in proptest::collection::vec(any_look(), 1..6)) {
        let (known, _) = fold_all(looks);
        if let Inventory::Found(node) = known.inventory() {
            prop_assert!(node.gpus.is_sorted_by(|a, b| a.minor < b.minor));
            let listed: usize = node.gpus.iter().map(|gpu| gpu.devices().len()).sum();
            prop_assert_eq!(node.devices().len(), listed);
        }
    }

    #[test]
    fn one_bad_look_never_drops_a_gpu(good in any_look(), bad in any_look()) {
        let (before, _) = fold_all([good]);
        let (after, _) = before.fold(bad);
        if let (Inventory::Found(old), Inventory::Found(new)) = (before.inventory(), after.inventory()) {
            for gpu in &old.gpus {
                let kept = new.gpus.iter().any(|g| g.uuid == gpu.uuid);
                let replaced = new.gpus.iter().any(|g| g.minor == gpu.minor);
                prop_assert!(kept || replaced, "{} is gone", gpu.uuid);
            }
        }
    }
}
