//! MIG devices that are made for claims, on a node in a folder: what is refused, what is left alone, what comes back.

use std::fs;

use serde_json::json;
use tranche::ledger::{Placer, Step};
use tranche::model::gpu::Placement;
use tranche::model::mig::{MadeMig, MigPlace};
use tranche::model::quantity::Bytes;
use tranche::node::sweeper::Sweep;

use crate::site::{Claim, PluginRun, Site, uuid};

const ONE: &str = "gpu-3-mig-1g10gb-19-0";
const TWO: &str = "gpu-3-mig-2g20gb-14-0";

fn at(profile_id: u32, start: u32, size: u32) -> MigPlace {
    MigPlace { profile_id, placement: Placement { start, size } }
}

fn put(site: &Site, name: &str, device: &str) -> Claim {
    let claim = Claim::new(name, &[device]);
    site.api.put(&claim);
    claim
}

#[tokio::test]
async fn a_device_is_made_for_its_claim_and_ends_with_it() {
    let site = Site::carved();
    let plugin = site.start_plugin();
    let claim = put(&site, "a", ONE);
    plugin.prepared(&claim, "at first").await;
    assert_eq!(site.mig.all(), [(uuid(3), at(19, 0, 1))]);
    let record = &site.records()[0].intent;
    let [Step::MakeMig { made: Some(made), .. }, Step::WriteCdi { .. }] = &record.steps[..] else {
        panic!("{:?}", record.steps)
    };
    assert_eq!(
        (&made.uuid, &record.devices[0].uuid),
        (&site.mig.on(&uuid(3))[0].devices[0].uuid, &made.uuid)
    );
    let edits = site.edits(&claim).unwrap().to_string();
    assert!(edits.contains("/dev/nvidia-caps/nvidia-cap214") && edits.contains("nvidia-cap215"), "{edits}");
    plugin.prepared(&claim, "again").await;
    assert_eq!(site.mig.all().len(), 1);
    plugin.unprepare(&claim).await.unwrap();
    site.check_empty("released");
}

#[tokio::test]
async fn what_overlaps_is_refused_and_the_first_goes_on() {
    let site = Site::carved();
    let plugin = site.start_plugin();
    let (first, second) = (put(&site, "a", ONE), put(&site, "b", TWO));
    plugin.prepared(&first, "first").await;
    plugin.refused(&second, &[TWO, "in use by claim team/a"]).await;
    let beside = put(&site, "c", "gpu-3-mig-2g20gb-14-2");
    plugin.prepared(&beside, "beside").await;
    plugin.unprepare(&first).await.unwrap();
    plugin.prepared(&second, "once it is free").await;
    site.check("at the end");
}

#[tokio::test]
async fn an_instance_of_an_administrators_is_neither_used_nor_ended() {
    let site = Site::carved();
    let plugin = site.start_plugin();
    let theirs = site.mig.make(&uuid(3), at(19, 1, 1), 1);
    let claim = put(&site, "a", TWO);
    plugin.refused(&claim, &["there is a GPU instance already", "memory slices 1 to 1"]).await;
    assert_eq!(site.records(), [], "nothing says that it were ours");
    assert_eq!(site.mig.on(&uuid(3)), [theirs]);
    // Theirs takes the place of ours, which somebody has ended under a pod: it is not ended for it.
    site.mig.clear();
    plugin.prepared(&claim, "alone").await;
    site.mig.clear();
    let theirs = MadeMig { uuid: "MIG-theirs".into(), gpu_instance: 3, compute_instance: 0 };
    site.mig.put(&uuid(3), at(14, 0, 2), theirs);
    plugin.unprepare(&claim).await.unwrap();
    assert_eq!(site.mig.all(), [(uuid(3), at(14, 0, 2))]);
    assert_eq!(site.records(), []);
}

#[tokio::test]
async fn a_creation_that_never_began_takes_nobody_elses_instance_back() {
    let site = Site::carved();
    let plugin = site.start_plugin();
    let claim = put(&site, "a", ONE);
    site.mig.be_busy();
    plugin.refused(&claim, &["still busy"]).await;
    assert_eq!(site.records(), [], "nothing says that it were ours");
    assert_eq!(site.mig.all(), [(uuid(3), at(19, 0, 1))], "an administrator's");
}

#[tokio::test]
async fn a_device_that_somebody_ended_is_made_again() {
    let site = Site::carved();
    let plugin = site.start_plugin();
    let claim = put(&site, "a", ONE);
    plugin.prepared(&claim, "at first").await;
    site.mig.clear();
    plugin.prepared(&claim, "again").await;
    assert_eq!(site.mig.all(), [(uuid(3), at(19, 0, 1))]);
    site.check("made again");
}

/// A claim `a` of one MIG device whose pod runs as process 4711.
async fn running(site: &Site, plugin: &PluginRun) -> Claim {
    let pod = "0f1e2d3c-0000-4000-8000-000000000001";
    let claim = Claim::new("a", &[ONE]).reserved_for(&[pod]);
    site.api.put(&claim);
    plugin.prepared(&claim, "at first").await;
    site.runs(4711, pod);
    claim
}

/// Another driver was loaded, say. The pod's containers have the nodes of whatever is made at that place.
#[tokio::test]
async fn a_device_that_was_ended_under_its_pod_is_given_to_nobody_while_the_pod_runs() {
    for switched_off in [false, true] {
        let site = if switched_off { Site::whole_or_cut() } else { Site::carved() };
        let plugin = site.start_plugin();
        let claim = running(&site, &plugin).await;
        let (records, edits) = (site.records(), site.edits(&claim));
        site.mig.clear();
        if switched_off {
            site.mig.switch(&uuid(3), false);
        }
        let hook = site.path("driver/usr/bin/nvidia-cdi-hook");
        fs::create_dir_all(hook.parent().unwrap()).unwrap();
        fs::write(hook, "hook").unwrap();
        assert_eq!(plugin.sweep().await.unwrap(), Sweep { renewed: 1, ..Sweep::default() });
        assert_ne!(site.edits(&claim), edits, "its containers can start again");
        let same =
            |what: &str| assert_eq!((site.records(), site.mig.all()), (records.clone(), vec![]), "{what}");
        same("renewed");
        let other = put(&site, "b", TWO);
        plugin.refused(&other, &[TWO, "in use by claim team/a"]).await;
        // A second pod of the claim's.
        plugin
            .refused(&claim, &["was ended by somebody", "pods of the claim still run", "delete them"])
            .await;
        same("asked again");
        site.ends(4711);
        plugin.prepared(&claim, "once it has ended").await;
        assert_eq!(site.mig.all(), [(uuid(3), at(19, 0, 1))]);
        site.check("made again");
    }
}

#[tokio::test]
async fn a_device_whose_pod_still_runs_stays() {
    let site = Site::carved();
    let plugin = site.start_plugin();
    let claim = running(&site, &plugin).await;
    site.api.remove(&claim);
    plugin.sweep().await.unwrap();
    assert_eq!(site.mig.all().len(), 1, "whatever becomes of the claim");
    site.ends(4711);
    plugin.sweep().await.unwrap();
    site.check_empty("once it has ended");
}

#[tokio::test]
async fn seven_devices_are_made_on_one_board() {
    let site = Site::carved();
    let plugin = site.start_plugin();
    let claims: Vec<Claim> = (0..7)
        .map(|start| put(&site, &format!("c{start}"), &format!("gpu-3-mig-1g10gb-19-{start}")))
        .collect();
    for claim in &claims {
        plugin.prepared(claim, "seven on one board").await;
    }
    assert_eq!(site.mig.all().len(), 7);
    for claim in &claims[2..] {
        plugin.unprepare(claim).await.unwrap();
    }
    assert_eq!(site.mig.all(), [(uuid(3), at(19, 0, 1)), (uuid(3), at(19, 1, 1))]);
    let admin = Claim::new("admin", &["gpu-3-mig-1g10gb-19-5"]).admin();
    site.api.put(&admin);
    plugin.refused(&admin, &["is not there yet", "Administrative access"]).await;
    assert_eq!(site.mig.all().len(), 2);
}

/// By class shared.gpu.nvidia.com, which names the board: the controller chose the place.
fn shared(site: &Site, name: &str, place: MigPlace) -> Claim {
    let Placement { start, size } = place.placement;
    let mib = 9984 * u64::from(size);
    let claim = Claim::new(name, &["gpu-3"]).granted(mib, 0).carved(place.profile_id, start, size);
    let claim = claim.config(
        &[],
        json!({"apiVersion": "tranche.dev/v1alpha1", "kind": "GpuShare",
        "memory": "9Gi", "minimumIsolation": "mig"}),
    );
    site.api.put(&claim);
    claim
}

#[tokio::test]
async fn a_place_that_the_controller_chose_is_made_and_ends_as_one_that_was_allocated() {
    let site = Site::carved();
    let plugin = site.start_plugin();
    let claim = shared(&site, "a", at(19, 2, 1));
    plugin.prepared(&claim, "at first").await;
    assert_eq!(site.mig.all(), [(uuid(3), at(19, 2, 1))]);
    let record = site.records().remove(0).intent;
    let mig = record.devices[0].mig.clone().unwrap();
    assert_eq!(
        (mig.profile.as_str(), mig.place, record.devices[0].placer),
        ("1g.10gb", at(19, 2, 1), Placer::Controller)
    );
    assert_eq!(mig.asked.memory, Some(Bytes(9 << 30)));
    plugin.prepared(&claim, "again").await;
    assert_eq!((site.mig.all().len(), &site.records()[0].intent), (1, &record), "nothing is made twice");
    // Allocated anew, at another place.
    let again = shared(&site, "a", at(14, 4, 2));
    plugin.prepared(&again, "allocated anew").await;
    assert_eq!(site.mig.all(), [(uuid(3), at(14, 4, 2))]);
    site.check("allocated anew");
    plugin.unprepare(&again).await.unwrap();
    site.check_empty("released");
}

#[tokio::test]
async fn places_of_the_controller_and_of_the_scheduler_do_not_meet_on_a_board() {
    let site = Site::carved();
    let plugin = site.start_plugin();
    let ours = shared(&site, "ours", at(19, 0, 1));
    plugin.prepared(&ours, "first").await;
    let beside = shared(&site, "beside", at(19, 1, 1));
    plugin.prepared(&beside, "beside").await;
    let over = shared(&site, "over", at(14, 0, 2));
    plugin.refused(&over, &["in use by claim team/", "allocated twice"]).await;
    let theirs = put(&site, "theirs", "gpu-3-mig-2g20gb-14-4");
    plugin.refused(&theirs, &["MIG devices made of it", "that the controller placed"]).await;
    let none = shared(&site, "none", at(77, 0, 1));
    plugin.refused(&none, &["profile 77", "cannot be cut into", "19 (1g.10gb)"]).await;
    assert_eq!((site.mig.all().len(), site.records().len()), (2, 2));
    for claim in [&ours, &beside] {
        plugin.unprepare(claim).await.unwrap();
    }
    plugin.prepared(&theirs, "once the controller's are gone").await;
    let refused = &["MIG devices made of it", "team/theirs", "that the scheduler placed"];
    plugin.refused(&shared(&site, "late", at(19, 0, 1)), refused).await;
}
