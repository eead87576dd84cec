//! MIG devices that the controller chose on a board that is carved for claims.

use super::*;
use crate::ledger::{HeldMig, MigAsked};
use crate::model::mig::{MadeMig, MigPlace, MigProfile, PossibleMig};

fn at(profile_id: u32, start: u32, size: u32) -> MigPlace {
    MigPlace { profile_id, placement: Placement { start, size } }
}

/// gpu-3 is carved for claims: 1g.10gb and 2g.20gb.
fn gpus(foreign: &[MigPlace], made: Vec<MigDevice>) -> NodeGpus {
    let profile = |id, name: &str, starts: &[u32], size| MigProfile {
        id,
        name: name.to_owned(),
        slices: size,
        most: 7,
        capacity: MigCapacity { memory: Bytes::from_mib(9984 * u64::from(size)), ..MigCapacity::default() },
        placements: starts.iter().map(|start| Placement { start: *start, size }).collect(),
    };
    let profiles = [profile(19, "1g.10gb", &[0, 1, 2, 3], 1), profile(14, "2g.20gb", &[0, 2], 2)];
    let places = PossibleMig::all(&"GPU-3".into(), &profiles);
    let cut = OnDemand { places, foreign: foreign.to_vec(), made, ..OnDemand::default() };
    let mut gpus = node_gpus();
    gpus.gpus.push(gpu(3, MigMode::OnDemand(cut)));
    gpus
}

/// The controller's, of gpu-3. `fields` of its GpuShare.
fn carved(uid: &str, place: MigPlace, mib: u64, fields: serde_json::Value) -> AllocatedClaim {
    let mut claim = granted(uid, result("gpu", "gpu-3"), mib, 0);
    let Placement { start, size } = place.placement;
    let part = &mut claim.configs[0].parameters["devices"][0];
    part["mig"] = json!({"profile": place.profile_id, "start": start, "size": size});
    part["isolation"] = json!("mig");
    claim.configs.push(gpu_share(fields));
    claim
}

/// What is recorded before the instance is made.
fn unmade(gpus: &NodeGpus, claim: &AllocatedClaim, held: &[Intent]) -> Result<Intent, Refusal> {
    let (node, pool, sharing) =
        (NodeName::from("node-a"), PoolName::from("node-a"), SharingPolicy::default());
    let site = Site { node: &node, pool: &pool, gpus, sharing: &sharing, held };
    let targets = targets(claim, site)?;
    Ok(to_make(claim, &targets, &BootId::from("boot")).expect("an instance is to be made"))
}

fn refused(refusal: Result<Intent, Refusal>) -> String {
    crate::model::error_chain(&refusal.expect_err("it is refused"))
}

#[test]
fn a_place_that_the_controller_chose_is_made_as_if_it_were_allocated() {
    let asked = json!({"memory": "9Gi", "compute": 10, "minimumIsolation": "mig", "maxProcesses": 4});
    let ours = unmade(&gpus(&[], vec![]), &carved("c1", at(19, 2, 1), 9984, asked), &[]).unwrap();
    let mut allocated = claim("c1", vec![result("gpu", "gpu-3-mig-1g10gb-19-2")]);
    let theirs = unmade(&gpus(&[], vec![]), &allocated, &[]).unwrap();
    assert_eq!((&ours.steps, &ours.devices[0].uuid), (&theirs.steps, &theirs.devices[0].uuid));
    let device = &ours.devices[0];
    assert_eq!(
        (device.mode, device.placer, &device.gpu),
        (HoldMode::Mig, Placer::Controller, &"GPU-3".into())
    );
    assert_eq!(device.answer.device, "gpu-3".into(), "kubelet knows it by its result");
    let asked =
        MigAsked { memory: Some(Bytes(9 << 30)), fraction: None, compute: Percent::try_from(10_u8).ok() };
    assert_eq!(device.mig, Some(HeldMig { profile: "1g.10gb".into(), place: at(19, 2, 1), asked }));
    allocated.configs.push(gpu_share(json!({"minimumIsolation": "mig"})));
    let told = unmade(&gpus(&[], vec![]), &allocated, &[]).unwrap().devices[0].mig.clone().unwrap();
    assert!(told.asked.is_nothing() && told.place == at(19, 2, 1));
}

#[test]
fn once_it_is_made_the_container_gets_that_instance() {
    let capacity = MigCapacity { memory: Bytes::from_mib(9984), ..MigCapacity::default() };
    let made = MigDevice { gpu_instance: 7, capacity, ..mig(2) };
    let gpus = gpus(&[], vec![made.clone()]);
    let ours = carved("c1", at(19, 2, 1), 9984, json!({"fraction": "0.1"}));
    let (node, pool, sharing) =
        (NodeName::from("node-a"), PoolName::from("node-a"), SharingPolicy::default());
    let site = Site { node: &node, pool: &pool, gpus: &gpus, sharing: &sharing, held: &[] };
    let targets = targets(&ours, site).unwrap();
    assert_eq!(to_make(&ours, &targets, &BootId::from("boot")), None);
    let mut driver = driver();
    let node = |node: DriverNode| {
        let path = format!("/dev/{node}");
        let host = HostPath { inside: path.clone().into(), host: path.clone() };
        (node, DeviceNode { container: path, host, major: 195, minor: 9, state: DeviceNodeState::Present })
    };
    driver.nodes.0.extend(
        [
            DriverNode::Gpu { minor: 3 },
            DriverNode::GpuInstance { gpu: 3, instance: 7 },
            DriverNode::ComputeInstance { gpu: 3, instance: 7, compute: 0 },
        ]
        .map(node),
    );
    let boot = BootId::from("boot");
    let plan = plan(&ours, &targets, site, Facts { boot: &boot, driver: &driver, mps_dir: "/run" }).unwrap();
    let step = MadeMig { uuid: made.uuid.clone(), gpu_instance: 7, compute_instance: 0 };
    let expected = Step::MakeMig { gpu: "GPU-3".into(), place: at(19, 2, 1), made: Some(step) };
    assert_eq!(plan.intent.steps[0], expected);
    assert_eq!(plan.intent.devices[0].uuid, made.uuid);
    assert_eq!(plan.intent.devices[0].mig.as_ref().unwrap().asked.fraction.as_deref(), Some("0.1"));
    assert!(plan.cdi.content.contains("claim=c1-gpu-3") || plan.cdi.content.contains("c1-gpu-3"));
}

#[test]
fn what_the_board_cannot_be_cut_into_is_refused_in_words() {
    let board = gpus(&[], vec![]);
    let whole = node_gpus();
    let ours = |place| carved("c1", place, 9984, json!({}));
    let mut on_whole = ours(at(19, 0, 1));
    on_whole.results[0].device = "gpu-1".into();
    on_whole.configs[0].parameters["devices"][0]["device"] = json!("gpu-1");
    on_whole.configs[0].parameters["devices"][0]["gpu"] = json!("GPU-1");
    let mut shared = ours(at(19, 0, 1));
    shared.results[0] = share("gpu", "gpu-3", 9984, 0);
    let mut elsewhere = ours(at(19, 0, 1));
    elsewhere.configs[0].parameters["devices"][0]["gpu"] = json!("GPU-1");
    for (claim, word) in [
        (
            ours(at(99, 0, 1)),
            "profile 99 at memory slice 0 (1 of them) of gpu-3, which that GPU cannot be cut into (it has 14 (2g.20gb), 19 (1g.10gb))",
        ),
        (ours(at(14, 1, 2)), "(it has 2 from 0, 2 from 2)"),
        (ours(at(14, 0, 1)), "cannot be cut into"),
        (
            carved("c1", at(19, 0, 1), 9985, json!({})),
            "granted 9985 MiB, but the MIG device of gpu-3 that it chose has 9984 MiB",
        ),
        (on_whole, "gpu-1, which is not carved for claims here"),
        (shared, "has it as a share beside"),
        (elsewhere, "another GPU of this node now than gpu-3 (GPU-3)"),
        (claim("c1", vec![result("gpu", "gpu-3")]), "is given to nobody as it is"),
        (granted("c1", result("gpu", "gpu-3"), 2000, 0), "MIG mode"),
    ] {
        let words = refused(unmade(&board, &claim, &[]));
        assert!(words.contains(word), "{word:?} is not in: {words}");
    }
    assert!(refused(unmade(&whole, &ours(at(19, 0, 1)), &[])).contains("which this node does not have"));
}

#[test]
fn what_overlaps_and_who_else_chooses_places_there_is_refused() {
    let gpus = gpus(&[], vec![]);
    let first = unmade(&gpus, &carved("c1", at(19, 0, 1), 9984, json!({})), &[]).unwrap();
    let held = [first];
    let over = unmade(&gpus, &carved("c2", at(14, 0, 2), 9984, json!({})), &held);
    assert!(over.as_ref().is_err_and(Refusal::is_double_allocation));
    assert!(refused(over).contains("gpu-3 is in use by claim team/claim-c1"));
    assert!(unmade(&gpus, &carved("c2", at(14, 2, 2), 9984, json!({})), &held).is_ok(), "beside it");
    let theirs = claim("c2", vec![result("gpu", "gpu-3-mig-2g20gb-14-2")]);
    let words = refused(unmade(&gpus, &theirs, &held));
    assert!(words.contains("team/claim-c1") && words.contains("that the controller placed"), "{words}");
    let held = [unmade(&gpus, &theirs, &[]).unwrap()];
    let words = refused(unmade(&gpus, &carved("c3", at(19, 0, 1), 9984, json!({})), &held));
    assert!(words.contains("team/claim-c2") && words.contains("that the scheduler placed"), "{words}");
    // What stands elsewhere does not matter.
    let whole = planned(&claim("c4", vec![result("gpu", "gpu-1")]), &[]).unwrap().intent;
    assert!(unmade(&gpus, &theirs, &[whole]).is_ok());
}

#[test]
fn a_board_that_is_to_be_used_otherwise_takes_no_new_claims_and_keeps_those_that_it_has() {
    let mut gpus = gpus(&[], vec![]);
    let ours = carved("c1", at(19, 0, 1), 9984, json!({}));
    let held = [unmade(&gpus, &ours, &[]).unwrap()];
    gpus.gpus[3].health = Health::Changing("it is to be whole".into());
    let theirs = claim("c2", vec![result("gpu", "gpu-3-mig-2g20gb-14-2")]);
    let words = refused(unmade(&gpus, &theirs, &held));
    assert!(words.contains("takes no new claims: it is to be whole. Delete the pod"), "{words}");
    assert!(unmade(&gpus, &ours, &held).is_ok(), "made again");
    assert!(planned_on(&gpus, &claim("c3", vec![result("gpu", "gpu-0")]), &held).is_ok());
}

#[test]
fn a_record_is_of_the_grant_as_long_as_its_place_is() {
    let gpus = gpus(&[], vec![]);
    let ours = |place| carved("c1", place, 9984, json!({}));
    let mut intent = unmade(&gpus, &ours(at(19, 0, 1)), &[]).unwrap();
    assert!(as_recorded(&ours(at(19, 0, 1)), &intent));
    assert!(!as_recorded(&ours(at(19, 1, 1)), &intent));
    assert!(!as_recorded(&granted("c1", result("gpu", "gpu-3"), 9984, 0), &intent));
    intent.devices[0].placer = Placer::Scheduler;
    assert!(!as_recorded(&ours(at(19, 0, 1)), &intent));
}

#[test]
fn administrators_see_the_board_and_hold_nothing() {
    let mut admin = claim("c1", vec![result("gpu", "gpu-3")]);
    admin.results[0].access = Access::Admin;
    let (node, pool, sharing) =
        (NodeName::from("node-a"), PoolName::from("node-a"), SharingPolicy::default());
    let gpus = gpus(&[], vec![]);
    let site = Site { node: &node, pool: &pool, gpus: &gpus, sharing: &sharing, held: &[] };
    let targets = targets(&admin, site).unwrap();
    assert_eq!(to_make(&admin, &targets, &BootId::from("boot")), None);
    assert_eq!(nodes(&targets), [crate::cdi::CdiNodes::Whole { minor: 3 }]);
}
