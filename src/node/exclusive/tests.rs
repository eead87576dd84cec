use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::*;
use crate::model::names::PodUid;
use crate::node::holders::tests::{Fake, hold_up_looks, holders};
use crate::node::holding::has_open;

fn wanted(minor: u32, known: &[&str]) -> WantedDevice {
    WantedDevice {
        device: DeviceName::new(format!("gpu-{minor}")),
        location: FaultLocation::Device(DeviceUuid::new(format!("GPU-{minor}"))),
        numbers: vec![(195, minor)],
        known: known.iter().map(|pod| has_open(((*pod).into(), vec![7]))).collect(),
    }
}

fn fake(open: Option<DeviceNumber>) -> Arc<Fake> {
    Arc::new(Fake { shown: true, open, ..Fake::default() })
}

fn words(found: Result<Openers, Refusal>) -> String {
    found.expect_err("it is not known to be free").to_string()
}

/// With eight GPUs that a pod with a million files had open, a claim for all of them took eight looks of 5 s each, with all
/// lanes held.
#[test]
fn a_claim_for_many_devices_that_were_open_costs_one_look_at_who_had_them() {
    let all: Vec<WantedDevice> = (0..8).map(|minor| wanted(minor, &["uid"])).collect();
    for (open, looks) in [(Some((195, 3)), 1), (None, 2)] {
        let processes = fake(open);
        let found = holders(&processes, None).openers_of(&all, &[]).unwrap();
        assert_eq!(found.contains_key(&PodUid::new("uid")), open.is_some());
        let made = [&processes.looks, &processes.file_looks].map(|made| made.load(Ordering::SeqCst));
        assert_eq!(made, [looks, looks], "{open:?}");
    }
}

#[test]
fn a_device_that_was_open_is_given_to_nobody_until_a_look_could_be_made() {
    let processes = fake(None);
    let holders = holders(&processes, None);
    let devices = [wanted(0, &[]), wanted(1, &["gone"])];
    hold_up_looks(&holders, true);
    let refused = words(holders.openers_of(&devices, &[]));
    let told = ["gpu-1", "process 7 of pod gone", "seen before", "8 processes hold up"];
    assert!(told.iter().all(|part| refused.contains(part)), "{refused}");
    // Of the first nobody has seen anything.
    assert_eq!(holders.openers_of(&devices[..1], &[]), Ok(Openers::new()));
    // It was held when an earlier process ended.
    holders.unclaimed().remember(BTreeSet::from([devices[0].location.clone()]));
    let refused = words(holders.openers_of(&devices[..1], &[]));
    assert!(refused.contains("gpu-0") && refused.contains("started again"), "{refused}");
    hold_up_looks(&holders, false);
    // Some processes hold the look up, before it comes to all pods.
    processes.stalled.store(true, Ordering::SeqCst);
    let refused = words(holders.openers_of(&devices[1..], &[]));
    assert!(refused.contains("gpu-1") && refused.contains("were not looked at"), "{refused}");
    processes.stalled.store(false, Ordering::SeqCst);
    assert_eq!(holders.openers_of(&devices, &[]), Ok(Openers::new()));
}

#[test]
fn who_had_a_device_open_and_was_not_looked_through_is_told_of_that_device() {
    let processes = fake(None);
    let holders = holders(&processes, None);
    let devices = [wanted(0, &[]), wanted(1, &["gone"]), wanted(2, &["uid"])];
    processes.unfinished.store(true, Ordering::SeqCst);
    let refused = words(holders.openers_of(&devices, &[]));
    assert!(refused.contains("gpu-2") && refused.contains("process 7 of pod uid"), "{refused}");
    assert!(!refused.contains("pod gone"), "{refused}");
    // Not the listing, either.
    processes.crowded.store(true, Ordering::SeqCst);
    let refused = words(holders.openers_of(&devices, &[]));
    assert!(refused.contains("gpu-1") && refused.contains("timed out"), "{refused}");
}
