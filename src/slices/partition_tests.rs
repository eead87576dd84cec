//! What the scheduler may allocate by the published counters is what NVML lets be made.

use std::collections::BTreeSet;

use serde_json::json;

use super::super::content::tests::{gpu, mig, node_gpus, whole};
use super::*;
use crate::inventory::{DeviceFaults, FaultLocation, Inventory, Xid};
use crate::model::gpu::{Health, Memory, MigCapacity, MigSwitch, NodeGpus, Placement};
use crate::model::mig::MigProfile;
use crate::model::names::{DeviceName, NodeName};
use crate::slices::{
    BoardParts, Counters, Grantable, PublishOptions, SliceContent, Taint, desired, taints, unseen_parents,
    violations,
};

/// Of an H100: id, name, slices, most, [CE, DEC, JPEG, OFA], starts, size.
type Row = (u32, &'static str, u32, u32, [u32; 4], &'static [u32], u32);
const H100: &[Row] = &[
    (19, "1g.10gb", 1, 7, [1, 1, 1, 0], &[0, 1, 2, 3, 4, 5, 6], 1),
    (20, "1g.10gb+me", 1, 1, [1, 1, 1, 1], &[0, 1, 2, 3, 4, 5, 6], 1),
    (15, "1g.20gb", 1, 4, [1, 1, 1, 0], &[0, 2, 4, 6], 2),
    (14, "2g.20gb", 2, 3, [2, 2, 2, 0], &[0, 2, 4], 2),
    (9, "3g.40gb", 3, 2, [3, 3, 3, 0], &[0, 4], 4),
    (5, "4g.40gb", 4, 1, [4, 4, 4, 0], &[0], 4),
    (0, "7g.80gb", 7, 1, [8, 7, 7, 1], &[0], 8),
];

fn carved(minor: u32, foreign: &[MigPlace]) -> Gpu {
    let profile = |row: &Row| {
        let (id, name, slices, most, [copy_engines, decoders, jpeg_engines, ofa_engines], starts, size) =
            *row;
        let capacity = MigCapacity {
            memory: crate::model::quantity::Bytes::from_mib(9_984 * u64::from(size)),
            multiprocessors: 16 * slices,
            copy_engines,
            decoders,
            encoders: 0,
            jpeg_engines,
            ofa_engines,
        };
        let placements = starts.iter().map(|start| Placement { start: *start, size }).collect();
        MigProfile { id, name: name.to_owned(), slices, most, capacity, placements }
    };
    let profiles: Vec<_> = H100.iter().map(profile).collect();
    let mut gpu = gpu(minor);
    let devices = foreign.iter().map(|place| mig(place.placement.start, place.placement.size)).collect();
    let places = PossibleMig::all(&gpu.uuid, &profiles);
    gpu.mig =
        MigMode::OnDemand(OnDemand { places, foreign: foreign.to_vec(), devices, ..OnDemand::default() });
    gpu
}

fn published(gpus: Vec<Gpu>, counters: Counters) -> Vec<SliceContent> {
    let gpus = NodeGpus { gpus, ..node_gpus(0) };
    let slices = desired(&gpus, &NodeName::new("n"), PublishOptions { counters, ..whole() });
    assert_eq!(violations(&slices), []);
    slices
}

#[test]
fn every_possible_instance_is_a_device_that_consumes_its_part_of_the_board() {
    let slices = published(vec![carved(3, &[])], Counters::Kept);
    assert_eq!(
        slices.iter().map(|slice| (slice.devices.len(), slice.counters.len())).collect::<Vec<_>>(),
        [(26, 0), (0, 1)],
        "the board itself is one"
    );
    let device = slices[0].devices.iter().find(|device| device.name == "gpu-3-mig-2g20gb-14-4").unwrap();
    let device = serde_json::to_value(device).unwrap();
    let count = |n: u32| json!({"value": n.to_string()});
    assert_eq!(
        device["consumesCounters"],
        json!([{"counterSet": "gpu-3-counter-set", "counters": {
            "compute-slices": count(2), "copy-engines": count(2), "decoders": count(2), "jpeg-engines": count(2),
            "memory-slice-4": count(1), "memory-slice-5": count(1)}}])
    );
    let attributes = device["attributes"].as_object().unwrap();
    assert_eq!(
        (&attributes["profile"], &attributes["type"]),
        (&json!({"string": "2g.20gb"}), &json!({"string": "mig"}))
    );
    // NVIDIA's names, all of them, and ours; no UUID, which nobody knows yet, and no memory slices as capacities.
    let keys =
        |map: &serde_json::Map<String, serde_json::Value>| map.keys().cloned().collect::<BTreeSet<_>>();
    let named = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<_>>();
    let (of_nvidia, ours) = (
        [
            "type",
            "parentUUID",
            "profile",
            "productName",
            "brand",
            "architecture",
            "cudaComputeCapability",
            "driverVersion",
            "cudaDriverVersion",
            "addressingMode",
            "resource.kubernetes.io/pciBusID",
            "resource.kubernetes.io/pcieRoot",
            "resource.kubernetes.io/numaNode",
        ],
        ["isolation", "totalMemoryMiB"],
    );
    assert_eq!(keys(attributes), named(&[&of_nvidia[..], &ours].concat()));
    let engines = ["copyEngines", "decoders", "encoders", "jpegEngines", "ofaEngines"];
    let amounts = [&engines[..], &["memory", "multiprocessors"]].concat();
    assert_eq!(keys(device["capacity"].as_object().unwrap()), named(&amounts));
    let set = serde_json::to_value(&slices[1].counters[0]).unwrap();
    assert_eq!(set["name"], "gpu-3-counter-set");
    let counters = set["counters"].as_object().unwrap();
    assert_eq!((&counters["compute-slices"], &counters["copy-engines"]), (&count(7), &count(8)));
    assert_eq!(counters.keys().filter(|name| name.starts_with("memory-slice-")).count(), 8);
}

/// The scheduler takes the first that fits.
#[test]
fn the_smallest_come_first_and_from_the_end_of_the_board() {
    let slices = published(vec![carved(0, &[])], Counters::Kept);
    let names: Vec<_> =
        slices[0].devices.iter().map(|device| device.name.trim_start_matches("gpu-0-mig-")).collect();
    assert_eq!(names[..4], ["gpu-0", "1g10gb-19-6", "1g10gb-me-20-6", "1g10gb-19-5"]);
    assert_eq!(names[15..19], ["1g20gb-15-6", "1g20gb-15-4", "2g20gb-14-4", "1g20gb-15-2"]);
    assert_eq!(names[22..], ["3g40gb-9-4", "3g40gb-9-0", "4g40gb-5-0", "7g80gb-0-0"]);
}

#[test]
fn where_counters_are_dropped_only_what_is_there_and_the_board_is_published() {
    let one = MigPlace { profile_id: 19, placement: Placement { start: 2, size: 1 } };
    let slices = published(vec![carved(0, &[one]), gpu(1)], Counters::NotKept);
    let names: Vec<_> =
        slices.iter().flat_map(|slice| &slice.devices).map(|device| device.name.as_str()).collect();
    assert_eq!(names, ["gpu-0", "gpu-0-mig-1g10gb-19-2", "gpu-1"]);
    assert!(slices.iter().all(|slice| slice.counters.is_empty()));
    assert_eq!(slices[0].devices[0].consumes_counters, None);
}

#[test]
fn the_board_itself_is_for_who_chooses_places_and_leaves_nothing_beside_it() {
    let foreign = MigPlace { profile_id: 19, placement: Placement { start: 2, size: 1 } };
    let slices = published(vec![carved(3, &[foreign])], Counters::Kept);
    let board = slices[0].devices.iter().find(|device| device.name == "gpu-3").unwrap();
    assert_eq!(board.allow_multiple_allocations, None);
    let attributes = board.attributes.as_ref().unwrap();
    let string = |name: &str| attributes.get(name).and_then(|one| one.string.as_deref());
    for (name, value) in [
        ("type", "mig-parent"),
        ("uuid", "GPU-00000000-0000-0000-0000-000000000003"),
        ("isolation", "mig"),
        ("productName", "NVIDIA H100 80GB HBM3"),
        ("migProfile9", "3g.40gb 3/2 39936 48 4@0,4"),
        ("migProfile15", "1g.20gb 1/4 19968 16 2@0,2,4,6"),
        ("migInstances", "19:1@2"),
    ] {
        assert_eq!(string(name), Some(value), "{name}");
    }
    assert_eq!((string("migProfile20"), string("parentUUID")), (None, None));
    assert_eq!(attributes["totalMemoryMiB"].int, Some(81_920));
    assert_eq!(board.capacity.as_ref().unwrap()["memory"].value.0, "80Gi");
    let taken = &board.consumes_counters.as_ref().unwrap()[0];
    let mut left = slices[1].counters[0].counters.clone();
    left.retain(|_, counter| counter.value.0 != "0");
    assert_eq!((&taken.counter_set, &taken.counters), (&slices[1].counters[0].name, &left));
    assert!(!taken.counters.contains_key("memory-slice-2"), "that is somebody else's");
    assert_eq!(taken.counters["compute-slices"].value.0, "6");
}

/// The same board, whose MIG mode is ours to switch.
fn whole_or_cut(minor: u32, switch: MigSwitch, foreign: &[MigPlace]) -> Gpu {
    let mut gpu = carved(minor, foreign);
    if let MigMode::OnDemand(cut) = &mut gpu.mig {
        cut.switch = switch;
    }
    gpu
}

#[test]
fn a_board_that_is_given_whole_or_cut_is_a_whole_gpu_that_leaves_nothing_beside_it() {
    for counters in [Counters::Kept, Counters::NotKept] {
        let off = published(vec![whole_or_cut(3, MigSwitch::Off, &[])], counters);
        assert_eq!(
            off,
            published(vec![whole_or_cut(3, MigSwitch::On, &[])], counters),
            "whatever the mode is"
        );
        let board = off[0].devices.iter().find(|device| device.name == "gpu-3").unwrap();
        assert_eq!(board.allow_multiple_allocations, None, "no shares beside counters");
        let text =
            |name: &str| board.attributes.as_ref().unwrap().get(name).and_then(|one| one.string.clone());
        assert_eq!(
            (text("type").as_deref(), text("uuid").as_deref()),
            (Some("gpu"), Some("GPU-00000000-0000-0000-0000-000000000003"))
        );
        let read = Grantable::of(board).unwrap();
        let BoardParts::Mig(parts) = &read.parts else { panic!("{read:?}") };
        assert_eq!((parts.board.profiles.len(), parts.keeps_counters), (6, counters == Counters::Kept));
        let devices: usize = off.iter().map(|slice| slice.devices.len()).sum();
        assert_eq!(devices, if counters == Counters::Kept { 26 } else { 1 });
        let consumed = board.consumes_counters.as_ref().map(|all| all[0].counters.clone());
        assert_eq!(consumed, off.get(1).map(|slice| without_zero(slice.counters[0].counters.clone())));
    }
}

fn without_zero(mut counters: BTreeMap<String, Counter>) -> BTreeMap<String, Counter> {
    counters.retain(|_, counter| counter.value.0 != "0");
    counters
}

/// Somebody made one by hand while the mode was on.
#[test]
fn with_an_instance_of_others_on_it_a_board_is_not_given_whole() {
    let foreign = MigPlace { profile_id: 19, placement: Placement { start: 2, size: 1 } };
    let slices = published(vec![whole_or_cut(0, MigSwitch::On, &[foreign])], Counters::Kept);
    let set = &slices[1].counters[0].counters;
    let board = slices[0].devices.iter().find(|device| device.name == "gpu-0").unwrap();
    let consumed = &board.consumes_counters.as_ref().unwrap()[0].counters;
    assert_eq!((&*consumed["memory-slice-2"].value.0, &*set["memory-slice-2"].value.0), ("1", "0"));
}

/// An API server refuses a consumption without counters.
#[test]
fn a_board_of_which_nothing_is_left_consumes_nothing() {
    let all = MigPlace { profile_id: 0, placement: Placement { start: 0, size: 8 } };
    let slices = published(vec![carved(0, &[all])], Counters::Kept);
    assert_eq!(
        (slices[0].devices[0].name.as_str(), &slices[0].devices[0].consumes_counters),
        ("gpu-0", &None)
    );
}

#[test]
fn a_board_that_cannot_say_all_of_itself_is_left_out_and_told() {
    let many: Vec<_> = (0..20)
        .map(|start| MigPlace { profile_id: 1_000_000, placement: Placement { start, size: 1 } })
        .collect();
    let mut unknown = carved(1, &[]);
    unknown.memory = Memory::Unknown;
    let boards = vec![carved(0, &many), unknown, carved(2, &[])];
    let gpus = NodeGpus { gpus: boards.clone(), ..node_gpus(0) };
    let slices = published(boards, Counters::NotKept);
    let names: Vec<_> = slices[0].devices.iter().map(|device| device.name.as_str()).collect();
    assert!(!names.contains(&"gpu-0") && !names.contains(&"gpu-1") && names.contains(&"gpu-2"), "{names:?}");
    let told = unseen_parents(&gpus);
    assert!(told.len() == 2 && told[0].contains("GPU-00000000-0000-0000-0000-000000000000"), "{told:?}");
}

fn tainted(gpus: &NodeGpus, device_faults: &DeviceFaults) -> Vec<String> {
    let of = |(name, all): (DeviceName, Vec<Taint>)| {
        let words: Vec<_> = all.iter().map(|one| format!("{}={}", one.key, one.value)).collect();
        format!("{} {}", name, words.join(" "))
    };
    taints(gpus, device_faults).into_iter().map(of).collect()
}

#[test]
fn what_is_wrong_with_a_board_taints_all_of_it_and_with_memory_slices_what_has_them() {
    let mut gpus = NodeGpus { gpus: vec![carved(0, &[])], ..node_gpus(0) };
    let uuid = gpus.gpus[0].uuid.clone();
    let xid = |gpu_instance| Xid { gpu: uuid.clone(), code: 48, gpu_instance };
    let board = DeviceFaults::default().with_xid(&xid(None), 1);
    assert_eq!(tainted(&gpus, &board).len(), 26);
    // The ledger knows whose instance it is.
    let placement = Placement { start: 6, size: 1 };
    let at = DeviceFaults::default().with_xid_at(&xid(Some(9)), Some(placement), 1);
    let expected = [
        "gpu-0",
        "gpu-0-mig-1g10gb-19-6",
        "gpu-0-mig-1g10gb-me-20-6",
        "gpu-0-mig-1g20gb-15-6",
        "gpu-0-mig-3g40gb-9-4",
        "gpu-0-mig-7g80gb-0-0",
    ];
    assert_eq!(tainted(&gpus, &at), expected.map(|name| format!("{name} gpu.nvidia.com/xid=48")));
    let none = DeviceFaults::default().with_xid(&xid(Some(9)), 1);
    assert_eq!(tainted(&gpus, &none), [""; 0], "an instance of somebody else's");
    let place = FaultLocation::Device("GPU-00000000-0000-0000-0000-000000000000-mig-19-6".into());
    let unmade = DeviceFaults::default().with_unmade(&[(place, "no room".to_owned())].into(), 1);
    assert_eq!(tainted(&gpus, &unmade), ["gpu-0-mig-1g10gb-19-6 gpu.nvidia.com/mig-not-made="]);
    // The controller sees the board alone.
    let told = |faults: &DeviceFaults| {
        let (counters, taints) = (Counters::Kept, &taints(&gpus, faults));
        let slices = desired(&gpus, &NodeName::new("n"), PublishOptions { counters, taints, ..whole() });
        let board = slices[0].devices.iter().find(|device| device.name == "gpu-0").unwrap();
        board.attributes.as_ref().unwrap().get("migAvoided").and_then(|one| one.string.clone())
    };
    assert_eq!((told(&unmade).as_deref(), told(&DeviceFaults::default())), (Some("19:1@6"), None));
    // What could not be ended keeps off what has its slices, and not the board.
    let unended = |start, size| {
        let taken = FaultLocation::Taken(uuid.clone(), Placement { start, size });
        unmade.with_unended(&[(taken, "in use".to_owned())].into(), 1)
    };
    let taken: Vec<_> = expected[1..].iter().map(|name| format!("{name} gpu.nvidia.com/mig-not-")).collect();
    let seen = tainted(&gpus, &unended(6, 1).with_unmade(&[].into(), 1));
    assert!(
        seen.len() == 5 && seen.iter().zip(&taken).all(|(seen, name)| *seen == format!("{name}ended=")),
        "{seen:?}"
    );
    assert_eq!(told(&unended(6, 1)).as_deref(), Some("19:1@6"), "once");
    assert_eq!(told(&unended(2, 2)).as_deref(), Some("19:1@2 19:1@3 19:1@6"));
    assert_eq!(told(&unended(0, 8)).as_deref(), Some("19:1@0 19:1@1 19:1@2 19:1@3 19:1@4 19:1@5 19:1@6"));
    let kept = unended(6, 1);
    assert_eq!(kept.with_facts(&Inventory::Found(gpus.clone()), &[], 5), kept, "a look says nothing of it");
    let kept = unmade.with_facts(&Inventory::Found(gpus.clone()), &[], 5);
    assert_eq!(kept, unmade, "a look says nothing of it");
    assert_eq!(unmade.with_unmade(&[].into(), 2), DeviceFaults::default());
    gpus.gpus[0].health = Health::Changing("it is to be whole".into());
    let changing = tainted(&gpus, &DeviceFaults::default());
    assert!(changing.len() == 26 && changing[0] == "gpu-0 gpu.nvidia.com/use-changes=", "{changing:?}");
}

/// The whole GPU would be refused on the node, and its pod would wait there.
#[test]
fn what_could_not_be_ended_keeps_pods_off_the_whole_gpu() {
    let gpus = NodeGpus { gpus: vec![whole_or_cut(0, MigSwitch::On, &[])], ..node_gpus(0) };
    let taken = FaultLocation::Taken(gpus.gpus[0].uuid.clone(), Placement { start: 6, size: 1 });
    let unended = DeviceFaults::default().with_unended(&[(taken, "in use".to_owned())].into(), 1);
    let seen = tainted(&gpus, &unended);
    assert!(seen.len() == 6 && seen[0] == "gpu-0 gpu.nvidia.com/mig-not-ended=", "{seen:?}");
}

#[test]
fn sixteen_boards_take_slices_of_at_most_64_devices_and_8_sets() {
    let slices = published((0..16).map(|minor| carved(minor, &[])).collect(), Counters::Kept);
    let sizes: Vec<_> = slices.iter().map(|slice| (slice.devices.len(), slice.counters.len())).collect();
    assert_eq!(sizes, [(64, 0), (64, 0), (64, 0), (64, 0), (64, 0), (64, 0), (32, 0), (0, 8), (0, 8)]);
}

#[test]
fn an_instance_of_somebody_elses_is_used_as_it_is_and_takes_its_part() {
    let foreign = MigPlace { profile_id: 19, placement: Placement { start: 2, size: 1 } };
    let slices = published(vec![carved(0, &[foreign])], Counters::Kept);
    let named: Vec<_> =
        slices[0].devices.iter().filter(|device| device.name == "gpu-0-mig-1g10gb-19-2").collect();
    assert_eq!(named.len(), 1);
    assert_eq!(named[0].consumes_counters, None, "it is there whatever else is allocated");
    assert!(named[0].attributes.as_ref().unwrap().contains_key("uuid"));
    let left = &slices[1].counters[0].counters;
    assert_eq!(
        (left["memory-slice-2"].value.0.as_str(), left["compute-slices"].value.0.as_str()),
        ("0", "6")
    );
    assert_eq!(slices[0].devices.len(), 26, "what cannot be had now stays listed: it may be allocated");
}

#[test]
fn a_board_with_more_slices_than_counters_is_left_out() {
    let mut odd = carved(0, &[]);
    if let MigMode::OnDemand(cut) = &mut odd.mig {
        cut.places[0].place.placement.size = u32::MAX;
    }
    assert_eq!(published(vec![odd, gpu(1)], Counters::Kept)[0].devices.len(), 1);
}

/// The scheduler's arithmetic, and beside it an array of slices.
#[test]
fn counters_allow_what_fits_on_the_board_and_nothing_else() {
    let board = carved(0, &[]);
    let MigMode::OnDemand(cut) = &board.mig else { unreachable!() };
    let value = |counter: &Counter| counter.value.0.parse::<u32>().unwrap();
    let all: BTreeMap<String, u32> =
        counter_set(&board).unwrap().counters.iter().map(|(name, one)| (name.clone(), value(one))).collect();
    let row = |place: &PossibleMig| H100.iter().find(|row| row.0 == place.place.profile_id).unwrap();
    let mut state = 5_u64;
    let (mut had, mut refused) = (Vec::<&PossibleMig>::new(), 0);
    for _ in 0..20_000 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let roll = (state >> 33) as usize;
        if roll.is_multiple_of(3) && !had.is_empty() {
            had.swap_remove((roll / 3) % had.len());
            continue;
        }
        let place = &cut.places[(roll / 3) % cut.places.len()];
        let mut used = BTreeMap::<String, u32>::new();
        for one in had.iter().copied().chain([place]) {
            for (name, counter) in consumption(&board, one).counters {
                *used.entry(name).or_default() += value(&counter);
            }
        }
        let allowed = used.iter().all(|(name, count)| *count <= all[name]);
        let overlaps = had.iter().any(|one| one.place.placement.overlaps(place.place.placement));
        let sum = |of: &dyn Fn(&Row) -> u32| {
            had.iter().copied().chain([place]).map(|one| of(row(one))).sum::<u32>()
        };
        let most = had.iter().filter(|one| one.place.profile_id == place.place.profile_id).count();
        let fits = !overlaps
            && sum(&|row| row.2) <= 7
            && sum(&|row| row.4[1]) <= 7
            && sum(&|row| row.4[3]) <= 1
            && most < row(place).3 as usize;
        assert_eq!(allowed, fits, "{place:?} beside {had:?}");
        if allowed {
            had.push(place);
        } else {
            refused += 1;
        }
    }
    assert!(refused > 1_000, "{refused}");
}
