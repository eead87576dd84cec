//! MIG instances made and ended through a library: the fake one, loaded as the real one is.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use tranche::inventory::{Claimed, ClaimedPart, Inventory, Look};
use tranche::model::claim::ClaimRef;
use tranche::model::gpu::{Health, MigDevice, MigMode, MigSwitch, OnDemand, Placement};
use tranche::model::mig::{MigPlace, MigProfile};
use tranche::model::names::DeviceUuid;
use tranche::node::discovery::{CarvedPlaces, Discovery, LookTiming};
use tranche::nvml::{
    FiguresSubject, Gpus, Load, MigCarver, MigError, MigHolder, MigInstances, ModeError, ProcessWatch,
};

use crate::nvml::Node;

const DEADLINE: Duration = Duration::from_secs(20);
/// For several looks.
const PATIENCE: Duration = Duration::from_secs(120);
/// NVML's ids on an H100.
const ONE: u32 = 19;
const THREE: u32 = 9;

fn at(profile_id: u32, start: u32, size: u32) -> MigPlace {
    MigPlace { profile_id, placement: Placement { start, size } }
}

fn control(faults: Value, processes: Value) -> Value {
    let mig = json!({"mig": {}, "processes": processes});
    let gpus = json!({"0": mig, "1": {"mig": {"instances": [{"profile": "1g.10gb", "placement": 0}]}}});
    json!({"profile": "h100", "count": 3, "privileged": true, "gpus": gpus, "faults": faults})
}

/// GPU 0 is in MIG mode and empty, GPU 1 has an instance of somebody else's, GPU 2 is whole.
struct Boards {
    node: Node,
    carver: MigCarver,
    uuids: Vec<DeviceUuid>,
}

impl Boards {
    fn new() -> Self {
        Self::within(DEADLINE)
    }

    fn within(limit: Duration) -> Self {
        let node = Node::with(control(json!({}), json!([])));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let look = runtime.block_on(node.nvml().look(Load::Keep)).unwrap();
        let uuids = look.gpus.gpus.into_iter().map(|gpu| gpu.uuid).collect();
        let carver = MigCarver::new(node.path("root").into(), limit);
        Self { node, carver, uuids }
    }

    fn faults(&self, faults: Value) {
        self.node.set(control(faults, json!([])));
    }

    fn places(&self, gpu: usize) -> Vec<MigPlace> {
        self.carver.instances(&self.uuids[gpu]).unwrap().into_iter().map(|one| one.place).collect()
    }
}

#[test]
fn every_board_says_what_it_can_be_cut_into() {
    for (board, names, eighth) in [
        ("a30", "1g.6gb 2g.12gb 4g.24gb 1g.6gb+me 2g.12gb+me", (0, 1)),
        ("a100-40gb", "1g.5gb 2g.10gb 3g.20gb 4g.20gb 7g.40gb 1g.5gb+me 1g.10gb", (0, 1)),
        ("h100", "1g.10gb 2g.20gb 3g.40gb 4g.40gb 7g.80gb 1g.10gb+me 1g.20gb", (0, 1)),
        (
            "rtx-pro-6000",
            "1g.24gb 2g.48gb 4g.96gb 1g.24gb+me 1g.24gb+gfx 2g.48gb+gfx 4g.96gb+gfx 1g.24gb-me 2g.48gb-me \
             1g.24gb+me.all 2g.48gb+me.all",
            (0, 3),
        ),
    ] {
        let node = Node::with(json!({"profile": board, "gpus": {"0": {"mig": {}, "uuid": "GPU-one"}}}));
        let carver = MigCarver::new(node.path("root").into(), DEADLINE);
        let profiles = carver.profiles(&DeviceUuid::new("GPU-one")).unwrap();
        let found: Vec<&str> = profiles.iter().map(|profile| profile.name.as_str()).collect();
        assert_eq!(found, names.split(' ').collect::<Vec<_>>(), "{board}");
        let first = profiles[0].placements[0];
        assert_eq!((first.start, first.size), eighth, "{board}");
        assert_eq!(
            profiles.iter().filter(|profile| profile.is_plain()).count(),
            names.split(' ').filter(|n| n.ends_with("gb")).count()
        );
    }
    let boards = Boards::new();
    let profiles = boards.carver.profiles(&boards.uuids[0]).unwrap();
    let three: &MigProfile = profiles.iter().find(|profile| profile.id == THREE).unwrap();
    assert_eq!((three.slices, three.most, three.capacity.multiprocessors), (3, 2, 60));
    assert_eq!(three.placements, [Placement { start: 0, size: 4 }, Placement { start: 4, size: 4 }]);
    assert_eq!(three.capacity.memory.mib_floor(), 40_448);
}

#[test]
fn an_instance_is_made_at_its_place_found_and_ended() {
    let boards = Boards::new();
    let (gpu, carver) = (&boards.uuids[0], &boards.carver);
    let made = carver.make(gpu, at(THREE, 4, 4)).unwrap();
    assert!(made.uuid.as_str().starts_with("MIG-"), "{}", made.uuid);
    let small = carver.make(gpu, at(ONE, 1, 1)).unwrap();
    let found = carver.instances(gpu).unwrap();
    assert_eq!(found.iter().map(|one| one.place).collect::<Vec<_>>(), [at(ONE, 1, 1), at(THREE, 4, 4)]);
    assert_eq!((&found[0].devices[..], &found[1].devices[..]), (&[small][..], &[made.clone()][..]));
    assert_eq!((found[1].id, made.compute_instance), (made.gpu_instance, 0));

    assert!(carver.end(gpu, at(THREE, 4, 4), Some(&made.uuid)).unwrap());
    assert!(!carver.end(gpu, at(THREE, 4, 4), Some(&made.uuid)).unwrap(), "it is gone");
    assert_eq!(boards.places(0), [at(ONE, 1, 1)]);
    let again = carver.make(gpu, at(THREE, 4, 4)).unwrap();
    assert_eq!(again.gpu_instance, made.gpu_instance, "NVML gives its ids again");
}

#[test]
fn what_cannot_be_made_is_told_and_leaves_nothing() {
    let boards = Boards::new();
    let (zero, one, whole) = (&boards.uuids[0], &boards.uuids[1], &boards.uuids[2]);
    let refused = |gpu: &DeviceUuid, place| {
        let error = boards.carver.make(gpu, place).unwrap_err();
        assert!(error.made_nothing(), "{error}");
        error
    };
    // Somebody else's instance, at that very place or across it.
    for place in [at(ONE, 0, 1), at(THREE, 0, 4)] {
        let error = refused(one, place);
        assert!(matches!(&error, MigError::Taken { by, .. } if *by == at(ONE, 0, 1)), "{error}");
        assert!(error.to_string().contains("memory slices 0 to 0 (profile 19)"), "{error}");
    }
    assert!(matches!(refused(zero, at(ONE, 7, 1)), MigError::NoPlacement { .. }));
    assert!(matches!(refused(zero, at(4711, 0, 1)), MigError::NoProfile { .. }));
    assert!(matches!(refused(whole, at(ONE, 0, 1)), MigError::Off { .. }));
    // One instance with media extensions and no more, though slices are free.
    boards.carver.make(zero, at(20, 0, 1)).unwrap();
    assert!(matches!(refused(zero, at(20, 1, 1)), MigError::NoRoom { .. }));
    assert_eq!((boards.places(0), boards.places(1)), (vec![at(20, 0, 1)], vec![at(ONE, 0, 1)]));
}

#[test]
fn an_instance_that_is_not_ours_is_not_ended() {
    let boards = Boards::new();
    let (gpu, carver) = (&boards.uuids[1], &boards.carver);
    let other = DeviceUuid::new("MIG-of-ours-that-was-here-before");
    assert!(!carver.end(gpu, at(ONE, 0, 1), Some(&other)).unwrap());
    assert!(!carver.end(gpu, at(THREE, 0, 4), None).unwrap(), "another profile");
    assert_eq!(boards.places(1), [at(ONE, 0, 1)]);
}

#[test]
fn an_instance_in_use_is_ended_once_its_process_has() {
    let boards = Boards::new();
    let (gpu, carver) = (&boards.uuids[1], &boards.carver);
    let found = carver.instances(gpu).unwrap();
    let process = json!([{"pid": 42, "used_mib": 10, "gi": found[0].id}]);
    let mut busy = control(json!({}), json!([]));
    busy["gpus"]["1"]["processes"] = process;
    boards.node.set(busy);
    let error = carver.end(gpu, at(ONE, 0, 1), None).unwrap_err();
    assert!(
        matches!(error, MigError::InUse { .. }) && error.to_string().contains("once that process has"),
        "{error}"
    );
    boards.faults(json!({}));
    assert!(carver.end(gpu, at(ONE, 0, 1), None).unwrap());
}

#[test]
fn what_a_failed_creation_leaves_is_found_by_its_place() {
    for (call, done) in [
        ("nvmlDeviceCreateGpuInstanceWithPlacement", true),
        ("nvmlGpuInstanceCreateComputeInstance", false),
        ("nvmlGpuInstanceCreateComputeInstance", true),
        ("nvmlDeviceGetMigDeviceHandleByIndex", false),
    ] {
        let boards = Boards::new();
        let gpu = &boards.uuids[0];
        boards.faults(json!({call: {"return": "UNKNOWN", "done": done}}));
        let error = boards.carver.make(gpu, at(THREE, 0, 4)).unwrap_err();
        assert!(!error.made_nothing() && error.to_string().contains(call), "{call}: {error}");
        boards.faults(json!({}));
        assert_eq!(boards.places(0), [at(THREE, 0, 4)], "{call} {done}");
        assert!(boards.carver.end(gpu, at(THREE, 0, 4), None).unwrap(), "{call}");
        assert_eq!(boards.places(0), [], "{call}");
    }
}

#[test]
fn a_slow_creation_delays_neither_other_boards_nor_looks_and_is_taken_back() {
    const SLOW: u64 = 12_000;
    let boards = Boards::within(Duration::from_secs(2));
    let (slow, other) = (&boards.uuids[0], &boards.uuids[1]);
    // The library is loaded by now: of the time that a creation has, none goes to that.
    assert_eq!(boards.places(0), []);
    let call = "nvmlDeviceCreateGpuInstanceWithPlacement";
    boards.faults(json!({call: {"delay_ms": SLOW, "gpu": 0, "done": true}}));
    let begun = Instant::now();
    let error = boards.carver.make(slow, at(THREE, 0, 4)).unwrap_err();
    assert!(matches!(error, MigError::Slow { .. }) && error.to_string().contains(call), "{error}");

    // Meanwhile another board is carved, and all are looked at.
    let patient = MigCarver::new(boards.node.path("root").into(), DEADLINE);
    patient.make(other, at(ONE, 3, 1)).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let look = runtime.block_on(boards.node.nvml().look(Load::Keep)).unwrap();
    assert_eq!(look.gpus.gpus.len(), 3);
    assert!(begun.elapsed() < Duration::from_millis(SLOW), "the slow call was waited for");

    // Undoing waits behind it, then finds what came late.
    let undone = loop {
        match boards.carver.end(slow, at(THREE, 0, 4), None) {
            Err(MigError::Slow { .. } | MigError::Busy { .. }) if begun.elapsed() < 2 * DEADLINE => {}
            other => break other,
        }
    };
    assert!(begun.elapsed() >= Duration::from_millis(SLOW), "nothing can be said before it is back");
    // The first of those that waited ended it.
    assert!(!undone.unwrap(), "ended by the question that had not waited long enough");
    assert_eq!(boards.places(0), []);
}

#[test]
fn what_fails_before_anything_is_created_has_made_nothing() {
    for call in
        ["nvmlInit_v2", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetMigMode", "nvmlDeviceGetGpuInstances"]
    {
        let boards = Boards::new();
        boards.faults(json!({call: {"return": "UNKNOWN"}}));
        let error = boards.carver.make(&boards.uuids[0], at(THREE, 0, 4)).unwrap_err();
        assert!(error.made_nothing() && error.to_string().contains(call), "{call}: {error}");
    }
}

/// GPU 0 of a node is carved on demand, and has a GPU instance that is no device.
/// A selector is a UUID, a minor number, or a part of a product's name.
#[test]
fn boards_to_be_cut_are_chosen_by_product_too() {
    let gpus = json!({"0": {"mig": {}}, "1": {"mig": {}}});
    for (selector, chosen) in [("H100", [true, true]), ("H200", [false, false]), ("1", [false, true])] {
        let node = Node::with(json!({"profile": "h100", "count": 2, "gpus": gpus}));
        let nvml = node.nvml_carving(DEADLINE, vec![selector.parse().unwrap()]);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let found = runtime.block_on(nvml.look(Load::Keep)).unwrap().gpus.gpus;
        let cut: Vec<bool> = found.iter().map(|gpu| matches!(gpu.mig, MigMode::OnDemand(_))).collect();
        assert_eq!(cut, chosen, "{selector}");
    }
}

fn looked_at(faults: Value) -> Look {
    let instances = json!([{"profile": "1g.10gb", "placement": 0, "compute": []}]);
    let gpus = json!({"0": {"uuid": "GPU-one", "mig": {"instances": instances}}});
    let node = Node::with(json!({"profile": "h100", "count": 1, "gpus": gpus, "faults": faults}));
    let nvml = node.nvml_carving(DEADLINE, vec!["GPU-one".parse().unwrap()]);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(nvml.look(Load::Keep)).unwrap()
}

#[test]
fn an_instance_that_goes_while_it_is_looked_at_is_not_there() {
    for code in ["NOT_FOUND", "INVALID_ARGUMENT"] {
        let look = looked_at(json!({"nvmlGpuInstanceGetInfo": {"return": code}}));
        assert!(look.failed.is_empty(), "{:?}", look.failed);
        let MigMode::OnDemand(cut) = &look.gpus.gpus[0].mig else { panic!("{:?}", look.gpus) };
        assert_eq!((cut.places.len(), cut.foreign.len()), (25, 0), "{code}");
    }
}

#[test]
fn a_profile_that_does_not_tell_its_placements_is_left_out() {
    let call = "nvmlDeviceGetGpuInstancePossiblePlacements_v2";
    let look = looked_at(json!({call: {"return": "UNKNOWN", "times": 1}}));
    assert!(look.failed.is_empty(), "{:?}", look.failed);
    let MigMode::OnDemand(cut) = &look.gpus.gpus[0].mig else { panic!("{:?}", look.gpus) };
    assert_eq!((cut.places.len(), cut.foreign.len()), (18, 1), "all but the seven of the first profile");
    assert!(look.left_out.iter().any(|line| line.contains(call)), "{:?}", look.left_out);
}

#[test]
fn a_board_that_does_not_say_what_can_be_made_of_it_is_told_as_it_is() {
    for (call, code) in [
        ("nvmlDeviceGetGpuInstancePossiblePlacements_v2", "FUNCTION_NOT_FOUND"),
        ("nvmlDeviceGetGpuInstancePossiblePlacements_v2", "UNKNOWN"),
        ("nvmlDeviceGetGpuInstances", "UNKNOWN"),
    ] {
        let look = looked_at(json!({call: {"return": code}}));
        assert!(look.failed.is_empty(), "{:?}", look.failed);
        assert_eq!(look.gpus.gpus[0].mig, MigMode::On(Vec::new()), "{call} {code}");
        let told = |line: &String| line.contains("GPU-one") && line.contains(call);
        assert!(look.left_out.iter().any(told), "{call} {code}: {:?}", look.left_out);
    }
}

/// As the node's ledger would know them.
#[derive(Debug)]
struct Ours(Vec<(DeviceUuid, MigPlace, Option<DeviceUuid>)>);

impl CarvedPlaces for Ours {
    fn claimed(&self) -> Vec<Claimed> {
        let one = |(gpu, place, device): &(DeviceUuid, MigPlace, Option<DeviceUuid>)| Claimed {
            gpu: gpu.clone(),
            claim: ClaimRef { namespace: "team".into(), name: "a".into(), uid: "uid-a".into() },
            what: ClaimedPart::Made { place: *place, device: device.clone() },
        };
        self.0.iter().map(one).collect()
    }
}

#[tokio::test]
async fn a_board_that_is_carved_on_demand_is_told_with_what_it_can_be_and_whose_instances_it_has() {
    let instances = json!([{"profile": "1g.10gb", "placement": 0}, {"profile": "3g.40gb", "placement": 4}]);
    let gpu = |uuid: &str| json!({"uuid": uuid, "mig": {"instances": instances}});
    let gpus = json!({"0": gpu("GPU-one"), "1": gpu("GPU-two"), "2": {"uuid": "GPU-three"}});
    let node = Node::with(json!({"profile": "h100", "count": 3, "gpus": gpus}));
    let nvml = node.nvml_carving(DEADLINE, vec!["GPU-one".parse().unwrap(), "2".parse().unwrap()]);
    let policy = LookTiming { every: Duration::from_secs(3600), ..LookTiming::default() };
    let (discovery, found) = Discovery::new(Arc::new(nvml), policy, tokio::sync::mpsc::channel(1).1);
    let ours = Ours(vec![
        (DeviceUuid::new("GPU-one"), at(THREE, 4, 4), None),
        (DeviceUuid::new("GPU-two"), at(ONE, 0, 1), None),
    ]);
    let wanted = vec!["GPU-one".parse().unwrap(), "2".parse().unwrap()];
    let stop = CancellationToken::new();
    tokio::spawn(discovery.with_carved(Arc::new(ours), wanted).run(stop.clone()));
    let mut inventory = found.inventory.clone();
    let known = inventory.wait_for(|inventory| matches!(inventory, Inventory::Found(_)));
    let Inventory::Found(gpus) = tokio::time::timeout(DEADLINE, known).await.unwrap().unwrap().clone() else {
        unreachable!()
    };
    let MigMode::OnDemand(cut) = &gpus.gpus[0].mig else { panic!("{:?}", gpus.gpus[0].mig) };
    assert_eq!((cut.places.len(), &cut.foreign[..], cut.devices.len()), (25, &[at(ONE, 0, 1)][..], 1));
    let names: Vec<_> = gpus.gpus[0].devices().iter().map(|device| device.name().to_string()).collect();
    assert_eq!(names.len(), 26, "one for each place, whoever is there, and the board");
    assert_eq!(names[..2], ["gpu-0", "gpu-0-mig-1g10gb-19-0"], "what is there comes first");
    assert!(matches!(&gpus.gpus[1].mig, MigMode::On(devices) if devices.len() == 2), "not asked for");
    assert_eq!(gpus.gpus[2].mig, MigMode::Off, "MIG is never switched on");
    stop.cancel();
}

/// A driver that tells of no profiles while the mode is off.
#[tokio::test]
async fn a_board_whose_mig_mode_is_switched_off_under_a_claim_tells_what_the_claim_has_lost() {
    let control = |gpu: Value, faults: Value| json!({"profile": "h100", "count": 1, "gpus": {"0": gpu}, "faults": faults});
    let instances = json!([{"profile": "1g.10gb", "placement": 0}, {"profile": "3g.40gb", "placement": 4}]);
    let node = Node::with(control(json!({"uuid": "GPU-one", "mig": {"instances": instances}}), json!({})));
    let wanted = vec!["GPU-one".parse().unwrap()];
    let nvml = node.nvml_carving(DEADLINE, wanted.clone());
    let look = nvml.look(Load::Keep).await.unwrap();
    let MigMode::OnDemand(before) = &look.gpus.gpus[0].mig else { panic!("{look:?}") };
    let mine = before.devices.iter().find(|mig| MigPlace::of(mig) == at(THREE, 4, 4)).unwrap().uuid.clone();
    let ours = Ours(vec![("GPU-one".into(), at(THREE, 4, 4), Some(mine.clone()))]);
    let policy = LookTiming { every: Duration::from_millis(100), ..LookTiming::default() };
    let (discovery, found) = Discovery::new(Arc::new(nvml), policy, tokio::sync::mpsc::channel(1).1);
    let stop = CancellationToken::new();
    tokio::spawn(discovery.with_carved(Arc::new(ours), wanted).run(stop.clone()));
    let mut inventory = found.inventory.clone();
    let mut until = async |is_so: fn(&OnDemand) -> bool| {
        let is_so = |inventory: &Inventory| match inventory {
            Inventory::Found(gpus) => matches!(&gpus.gpus[0].mig, MigMode::OnDemand(cut) if is_so(cut)),
            _ => false,
        };
        let known = tokio::time::timeout(PATIENCE, inventory.wait_for(is_so)).await.expect("it is published");
        let Inventory::Found(gpus) = known.unwrap().clone() else { unreachable!() };
        gpus.gpus[0].clone()
    };
    until(|cut| cut.foreign == [at(ONE, 0, 1)] && cut.missing.is_empty()).await;
    let call = "nvmlDeviceGetGpuInstancePossiblePlacements_v2";
    node.set(control(json!({"uuid": "GPU-one"}), json!({call: {"return": "FUNCTION_NOT_FOUND"}})));
    let gone = until(|cut| cut.switch.is_off()).await;
    assert_eq!(gone.missing().iter().map(|one| &one.uuid).collect::<Vec<_>>(), [&mine]);
    let MigMode::OnDemand(cut) = &gone.mig else { panic!("{gone:?}") };
    assert_eq!((cut.places.len(), cut.foreign.len(), cut.devices.len()), (before.places.len(), 0, 0));
    assert!(matches!(&gone.health, Health::Changing(_)), "{:?}", gone.health);
    stop.cancel();
}

#[test]
fn a_mode_is_switched_where_nothing_is_on_the_board_and_read_back() {
    let boards = Boards::new();
    let (gpu, carver) = (&boards.uuids[2], &boards.carver);
    assert!(!carver.mode(gpu).unwrap());
    carver.set_mode(gpu, true).unwrap();
    carver.set_mode(gpu, true).unwrap();
    assert!(carver.mode(gpu).unwrap());
    carver.make(gpu, at(THREE, 0, 4)).unwrap();
    let error = carver.set_mode(gpu, false).unwrap_err();
    assert!(matches!(error, MigError::Mode(ModeError::Cut { count: 1, .. })), "{error}");
    assert!(carver.end(gpu, at(THREE, 0, 4), None).unwrap());
    carver.set_mode(gpu, false).unwrap();
    assert!(!carver.mode(gpu).unwrap());

    let mut busy = control(json!({}), json!([]));
    busy["gpus"]["2"] =
        json!({"processes": [{"pid": 42, "used_mib": 10}, {"pid": 7, "used_mib": 1, "kind": "graphics"}]});
    boards.node.set(busy);
    let error = carver.set_mode(gpu, true).unwrap_err();
    assert!(matches!(error, MigError::Mode(ModeError::Running { .. })), "{error}");
    assert!(error.to_string().contains("7, 42"), "{error}");
    boards.faults(json!({"nvmlDeviceSetMigMode": {"return": "UNKNOWN", "times": 1}}));
    assert!(carver.set_mode(gpu, true).unwrap_err().to_string().contains("nvmlDeviceSetMigMode"));
    assert!(!carver.mode(gpu).unwrap());
    carver.set_mode(gpu, true).unwrap();
}

#[test]
fn a_mode_that_waits_for_a_reset_is_taken_back() {
    let gpus = json!({"0": {"uuid": "GPU-one"}});
    let node = Node::with(json!({"profile": "a100-80gb", "privileged": true, "gpus": gpus}));
    let (carver, gpu) = (MigCarver::new(node.path("root").into(), DEADLINE), DeviceUuid::new("GPU-one"));
    let error = carver.set_mode(&gpu, true).unwrap_err();
    assert!(matches!(error, MigError::Mode(ModeError::Reset { .. })), "{error}");
    let state = std::fs::read_to_string(node.path("root/usr/lib64/state.json")).unwrap_or_default();
    assert!(!state.contains("\"pending\":true"), "nothing waits for a reset: {state}");
    let none = Node::with(json!({"profile": "t4", "privileged": true, "gpus": gpus}));
    let carver = MigCarver::new(none.path("root").into(), DEADLINE);
    let error = carver.set_mode(&gpu, true).unwrap_err();
    assert!(matches!(error, MigError::Mode(ModeError::None { .. })), "{error}");
}

#[test]
fn a_whole_board_says_what_it_could_be_cut_into_and_whose_its_mode_is() {
    let look = |profile: &str, switches: bool, faults: Value| {
        let gpus = json!({"0": {"uuid": "GPU-one"}});
        let node = Node::with(json!({"profile": profile, "count": 1, "gpus": gpus, "faults": faults}));
        let nvml = node.nvml_with(DEADLINE, vec!["GPU-one".parse().unwrap()], switches);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(nvml.look(Load::Keep)).unwrap()
    };
    // Without our switching it, and on Ampere, which waits for a reset, the mode is its administrator's.
    for (profile, switches, switch, places) in [
        ("h100", true, MigSwitch::Off, 25),
        ("h200", true, MigSwitch::Off, 25),
        ("rtx-pro-6000", true, MigSwitch::Off, 30),
        ("h100", false, MigSwitch::OffByOthers, 25),
        ("a100-80gb", true, MigSwitch::OffByOthers, 25),
        ("a30", true, MigSwitch::OffByOthers, 13),
    ] {
        let found = look(profile, switches, json!({}));
        let MigMode::OnDemand(cut) = &found.gpus.gpus[0].mig else { panic!("{profile}: {:?}", found.gpus) };
        assert_eq!((cut.switch, cut.places.len(), cut.foreign.len()), (switch, places, 0), "{profile}");
    }
    for profile in ["t4", "l40s"] {
        assert_eq!(look(profile, true, json!({})).gpus.gpus[0].mig, MigMode::Off, "{profile} cannot be cut");
    }
    let call = "nvmlDeviceGetGpuInstancePossiblePlacements_v2";
    let older = look("h100", true, json!({call: {"return": "FUNCTION_NOT_FOUND"}}));
    assert_eq!(older.gpus.gpus[0].mig, MigMode::Off, "a driver that cannot tell");
    // What is not known is not taken for a GPU that is shared.
    let failed = look("h100", true, json!({call: {"return": "UNKNOWN"}}));
    assert_eq!((failed.gpus.gpus.len(), failed.failed.len()), (0, 1), "{failed:?}");
    // A board that its administrator has switched off is shared whatever it says of MIG.
    let whole = look("h100", false, json!({call: {"return": "UNKNOWN"}}));
    assert_eq!(whole.gpus.gpus[0].mig, MigMode::Off);
}

/// Between two questions, as GPU performance monitoring has it.
#[test]
fn how_busy_a_mig_device_is_is_told_where_there_are_samples_of_it_alone() {
    let told = |profile: &str, instances: Value, more: Value| {
        let at =
            |gi: u64, busy: u64| json!({"pid": 4_000_000 + gi, "used_mib": 10, "gi": gi, "sm_util": busy});
        let with = |processes: Value| {
            let gpu = json!({"uuid": "GPU-one", "mig": {"instances": instances}, "processes": processes});
            let mut control = json!({"profile": profile, "count": 1, "gpus": {"0": gpu}});
            control.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            control
        };
        let node = Node::with(with(json!([])));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let found = runtime.block_on(node.nvml().look(Load::Keep)).unwrap().gpus;
        let MigMode::On(devices) = &found.gpus[0].mig else { panic!("no MIG devices: {found:?}") };
        let of = |(claim, pod): (&str, &str)| {
            let holder = Some(MigHolder { claim: claim.into(), pod: Some(pod.into()) });
            let mig =
                |mig: &MigDevice| FiguresSubject::Mig { uuid: mig.uuid.clone(), holder: holder.clone() };
            devices.iter().map(mig).collect::<Vec<_>>()
        };
        let (first, last) = (devices[0].gpu_instance, devices[devices.len() - 1].gpu_instance);
        let watch = ProcessWatch::new(node.path("root").into(), DEADLINE);
        let ask = |holder: (&str, &str)| {
            let figures = runtime.block_on(watch.figures(of(holder))).unwrap();
            figures.into_iter().map(|(_, figures)| figures.busy_percent).collect::<Vec<_>>()
        };
        assert!(ask(("a", "p")).iter().all(Option::is_none), "between what, nobody knows yet");
        node.set(with(json!([at(first.into(), 40), at(last.into(), 7)])));
        let busy = ask(("a", "p"));
        assert!(
            ask(("b", "p")).iter().all(Option::is_none),
            "what an earlier claim did is none of this one's"
        );
        assert!(ask(("b", "q")).iter().all(Option::is_none), "nor what the claim's pod before did");
        node.set(with(json!([])));
        (busy, ask(("b", "q")))
    };
    let two = json!([{"profile": "1g.10gb"}, {"profile": "2g.20gb"}]);
    let (busy, idle) = told("h100", two.clone(), json!({}));
    assert_eq!(busy, [Some(40), Some(7)]);
    assert_eq!(idle, [Some(0), Some(0)]);
    // Samples are of a GPU instance, which two devices have together here.
    let halves = json!([{"profile": "2g.20gb", "compute": [1, 1]}]);
    assert_eq!(told("h100", halves, json!({})).0, [None, None]);
    assert_eq!(told("a100-80gb", two.clone(), json!({})).0, [None, None], "Ampere has no samples");
    let missing = json!({"missing": ["nvmlGpmMigSampleGet"]});
    assert_eq!(told("h100", two.clone(), missing).0, [None, None], "nor has an old driver");
    let failing = json!({"faults": {"nvmlGpmMetricsGet": {"return": "UNKNOWN"}}});
    assert_eq!(told("h100", two, failing).0, [None, None]);
}
