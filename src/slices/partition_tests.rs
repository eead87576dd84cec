//! What the scheduler may allocate by the published counters is what NVML lets be made.

use serde_json::json;

use super::super::content::tests::{gpu, mig, node_gpus, whole};
use super::*;
use crate::model::gpu::{MigCapacity, NodeGpus, Placement};
use crate::model::mig::MigProfile;
use crate::model::names::NodeName;
use crate::slices::{Counters, PublishOptions, SliceContent, desired, violations};

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
    gpu.mig = MigMode::OnDemand(OnDemand { places, foreign: foreign.to_vec(), devices, made: Vec::new() });
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
        [(25, 0), (0, 1)]
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
    assert!(!attributes.contains_key("uuid"), "nobody knows it yet");
    let capacity = device["capacity"].as_object().unwrap();
    assert!(
        capacity.contains_key("memory") && !capacity.keys().any(|name| name.starts_with("memorySlice")),
        "{capacity:?}"
    );
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
    assert_eq!(names[..3], ["1g10gb-19-6", "1g10gb-me-20-6", "1g10gb-19-5"]);
    assert_eq!(names[14..18], ["1g20gb-15-6", "1g20gb-15-4", "2g20gb-14-4", "1g20gb-15-2"]);
    assert_eq!(names[21..], ["3g40gb-9-4", "3g40gb-9-0", "4g40gb-5-0", "7g80gb-0-0"]);
}

#[test]
fn where_counters_are_dropped_only_what_is_there_is_published() {
    let one = MigPlace { profile_id: 19, placement: Placement { start: 2, size: 1 } };
    let slices = published(vec![carved(0, &[one]), gpu(1)], Counters::NotKept);
    let names: Vec<_> =
        slices.iter().flat_map(|slice| &slice.devices).map(|device| device.name.as_str()).collect();
    assert_eq!(names, ["gpu-0-mig-1g10gb-19-2", "gpu-1"]);
    assert!(slices.iter().all(|slice| slice.counters.is_empty()));
}

#[test]
fn sixteen_boards_take_slices_of_at_most_64_devices_and_8_sets() {
    let slices = published((0..16).map(|minor| carved(minor, &[])).collect(), Counters::Kept);
    let sizes: Vec<_> = slices.iter().map(|slice| (slice.devices.len(), slice.counters.len())).collect();
    assert_eq!(sizes, [(64, 0), (64, 0), (64, 0), (64, 0), (64, 0), (64, 0), (16, 0), (0, 8), (0, 8)]);
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
    assert_eq!(slices[0].devices.len(), 25, "what cannot be had now stays listed: it may be allocated");
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
