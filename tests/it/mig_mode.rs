//! A GPU that is given whole or cut, on a node in a folder: when its MIG mode is switched, and when it is not.

use std::time::Duration;

use tranche::model::gpu::Placement;
use tranche::model::mig::{MadeMig, MigPlace};

use crate::fake_mig::Refusal;
use crate::site::{Claim, Site, uuid};
use crate::stop_at::When;

const ONE: &str = "gpu-3-mig-1g10gb-19-0";
const TWO: &str = "gpu-3-mig-2g20gb-14-2";

fn put(site: &Site, name: &str, device: &str) -> Claim {
    let claim = Claim::new(name, &[device]);
    site.api.put(&claim);
    claim
}

fn at(profile_id: u32, start: u32, size: u32) -> MigPlace {
    MigPlace { profile_id, placement: Placement { start, size } }
}

fn is_on(site: &Site) -> bool {
    site.mig.is_on(&uuid(3))
}

#[tokio::test]
async fn an_idle_gpu_serves_whole_then_cut_then_whole_again() {
    let site = Site::whole_or_cut();
    let plugin = site.start_plugin();
    let whole = put(&site, "whole", "gpu-3");
    plugin.prepared(&whole, "whole at first").await;
    assert_eq!((is_on(&site), site.mig.switches()), (false, 0), "nothing to switch");
    let (one, two) = (put(&site, "one", ONE), put(&site, "two", TWO));
    plugin.refused(&one, &[ONE, "in use by claim team/whole"]).await;
    assert!(!is_on(&site), "not under a claim that has it whole");
    plugin.unprepare(&whole).await.unwrap();
    plugin.prepared(&one, "the first").await;
    plugin.prepared(&two, "the second").await;
    assert_eq!((is_on(&site), site.mig.switches()), (true, 1));
    assert_eq!(site.mig.all(), [(uuid(3), at(19, 0, 1)), (uuid(3), at(14, 2, 2))]);
    let again = put(&site, "again", "gpu-3");
    plugin.refused(&again, &["gpu-3", "in use by claim team/"]).await;
    plugin.unprepare(&one).await.unwrap();
    plugin.refused(&again, &["in use by claim team/two"]).await;
    plugin.unprepare(&two).await.unwrap();
    plugin.review_modes().await;
    assert!(is_on(&site), "kept for the next");
    plugin.prepared(&again, "whole at once").await;
    assert_eq!((is_on(&site), site.mig.switches()), (false, 2));
    plugin.prepared(&again, "and still").await;
    site.check("whole again");
    plugin.check("records before effects");
    plugin.unprepare(&again).await.unwrap();
    site.check_empty("in the end");
}

#[tokio::test]
async fn a_mode_that_nobody_needs_goes_off_after_a_while_also_over_a_restart() {
    let site = Site::whole_or_cut();
    let plugin = site.start_plugin();
    let one = put(&site, "one", ONE);
    plugin.prepared(&one, "at first").await;
    *site.keep.lock().unwrap() = Duration::ZERO;
    let impatient = site.start_plugin();
    impatient.review_modes().await;
    assert!(is_on(&site), "a claim has a MIG device of it");
    impatient.unprepare(&one).await.unwrap();
    plugin.review_modes().await;
    assert!(is_on(&site), "an hour has not passed");
    impatient.review_modes().await;
    assert!(!is_on(&site));
    site.check_empty("whole again");
    impatient.prepared(&one, "switched on anew").await;
    assert_eq!(site.mig.switches(), 3);
    impatient.check("records before effects");
}

#[tokio::test]
async fn a_mode_that_cannot_be_switched_refuses_the_claim_and_stays_as_it_was() {
    let site = Site::whole_or_cut();
    let plugin = site.start_plugin();
    let one = put(&site, "one", ONE);
    for (refusal, words) in [
        (Refusal::Running, "while processes run on it (process 4711)"),
        (Refusal::Reset, "at the next reset of the GPU only"),
    ] {
        site.mig.refuse(Some(refusal));
        plugin.refused(&one, &["switching the MIG mode of GPU-3 on", words]).await;
        assert_eq!((is_on(&site), site.records()), (false, vec![]));
        site.check_empty("refused");
    }
    site.mig.refuse(None);
    plugin.prepared(&one, "tried again").await;
    plugin.unprepare(&one).await.unwrap();
    // The way back.
    site.mig.refuse(Some(Refusal::Running));
    let whole = put(&site, "whole", "gpu-3");
    plugin.refused(&whole, &["switching the MIG mode of GPU-3 off", "process 4711"]).await;
    assert_eq!((is_on(&site), site.records()), (true, vec![]));
    site.mig.refuse(None);
    plugin.prepared(&whole, "tried again").await;
    assert!(!is_on(&site));
}

#[tokio::test]
async fn a_mode_that_somebody_else_switched_is_theirs() {
    let site = Site::whole_or_cut();
    *site.keep.lock().unwrap() = Duration::ZERO;
    let plugin = site.start_plugin();
    site.mig.switch(&uuid(3), true);
    let (one, whole) = (put(&site, "one", ONE), put(&site, "whole", "gpu-3"));
    plugin.refused(&whole, &["which somebody else has switched on"]).await;
    plugin.prepared(&one, "a device of it").await;
    plugin.unprepare(&one).await.unwrap();
    plugin.review_modes().await;
    assert_eq!((is_on(&site), site.mig.switches()), (true, 0), "never switched off");
    // Ours, until somebody switches it off and on again.
    site.mig.switch(&uuid(3), false);
    plugin.prepared(&one, "by us").await;
    site.mig.switch(&uuid(3), false);
    plugin.unprepare(&one).await.unwrap();
    plugin.review_modes().await;
    site.mig.switch(&uuid(3), true);
    plugin.review_modes().await;
    assert!(is_on(&site));
    plugin.refused(&whole, &["which somebody else has switched on"]).await;
}

/// The claim's device is gone with the mode; what somebody then makes is theirs, and so is the mode if it was seen off.
#[tokio::test]
async fn a_mode_that_is_switched_off_and_on_again_under_a_claim_is_theirs_once_it_was_seen_off() {
    for seen in [true, false] {
        let at_time = if seen { "seen off" } else { "between two looks" };
        let site = Site::whole_or_cut();
        *site.keep.lock().unwrap() = Duration::ZERO;
        let plugin = site.start_plugin();
        let one = put(&site, "one", ONE);
        plugin.prepared(&one, at_time).await;
        site.mig.switch(&uuid(3), false);
        if seen {
            plugin.review_modes().await;
            assert!(!is_on(&site), "nobody has asked for it");
        }
        site.mig.switch(&uuid(3), true);
        let theirs = |id| MadeMig { uuid: "MIG-theirs".into(), gpu_instance: id, compute_instance: 0 };
        site.mig.put(&uuid(3), at(19, 0, 1), theirs(3));
        site.mig.put(&uuid(3), at(14, 2, 2), theirs(4));
        let there = site.mig.all();
        plugin.review_modes().await;
        plugin.refused(&one, &["there is a GPU instance already", "memory slices 0 to 0"]).await;
        plugin.unprepare(&one).await.unwrap();
        assert_eq!((site.mig.all(), site.records()), (there.clone(), vec![]), "{at_time}: theirs stays");
        plugin.review_modes().await;
        assert_eq!((is_on(&site), site.mig.all()), (true, there), "{at_time}: not under instances of theirs");
        site.mig.clear();
        plugin.review_modes().await;
        assert_eq!(is_on(&site), seen, "{at_time}");
        let whole = put(&site, "whole", "gpu-3");
        if seen {
            plugin.refused(&whole, &["which somebody else has switched on"]).await;
        } else {
            plugin.prepared(&whole, at_time).await;
            site.check(at_time);
        }
    }
}

/// Without a device that somebody made, the claim gets another.
#[tokio::test]
async fn a_claim_whose_mode_was_switched_off_and_on_again_gets_its_device_again() {
    let site = Site::whole_or_cut();
    *site.keep.lock().unwrap() = Duration::ZERO;
    let plugin = site.start_plugin();
    let one = put(&site, "one", ONE);
    plugin.prepared(&one, "at first").await;
    site.mig.switch(&uuid(3), false);
    plugin.review_modes().await;
    site.mig.switch(&uuid(3), true);
    plugin.prepared(&one, "again").await;
    assert_eq!((site.mig.all(), site.mig.switches()), (vec![(uuid(3), at(19, 0, 1))], 1));
    plugin.unprepare(&one).await.unwrap();
    plugin.review_modes().await;
    assert_eq!((is_on(&site), site.mig.all(), site.records()), (true, vec![], vec![]), "the mode is theirs");
}

#[tokio::test]
async fn a_mode_that_is_switched_off_under_a_claim_is_switched_on_when_it_is_prepared_again() {
    let site = Site::whole_or_cut();
    let plugin = site.start_plugin();
    let one = put(&site, "one", ONE);
    plugin.prepared(&one, "at first").await;
    site.mig.switch(&uuid(3), false);
    plugin.prepared(&one, "again").await;
    assert_eq!((is_on(&site), site.mig.all().len()), (true, 1));
    site.check("made again");
}

/// Hopper's mode does not outlive a boot.
#[tokio::test]
async fn after_a_boot_nothing_is_ours_before_it_is_switched_on_anew() {
    let site = Site::whole_or_cut();
    *site.keep.lock().unwrap() = Duration::ZERO;
    let plugin = site.start_plugin();
    let one = put(&site, "one", ONE);
    plugin.prepared(&one, "at first").await;
    drop(plugin);
    site.reboot();
    let plugin = site.start_plugin();
    site.mig.switch(&uuid(3), true);
    plugin.review_modes().await;
    assert!(is_on(&site), "whatever sets the node up has switched it on");
    site.mig.switch(&uuid(3), false);
    plugin.prepared(&one, "after the boot").await;
    assert_eq!((is_on(&site), site.mig.switches()), (true, 2));
    plugin.unprepare(&one).await.unwrap();
    plugin.review_modes().await;
    assert!(!is_on(&site));
    site.check_empty("in the end");
}

#[tokio::test]
async fn what_the_controller_grants_of_a_whole_gpu_is_made_on_it() {
    let site = Site::whole_or_cut();
    let plugin = site.start_plugin();
    let claim = Claim::new("a", &["gpu-3"]).granted(9984, 0).carved(19, 2, 1);
    site.api.put(&claim);
    plugin.prepared(&claim, "at first").await;
    assert_eq!((is_on(&site), site.mig.all()), (true, vec![(uuid(3), at(19, 2, 1))]));
    let whole = put(&site, "whole", "gpu-3");
    plugin.refused(&whole, &["in use by claim team/a"]).await;
    plugin.prepared(&claim, "again").await;
    plugin.unprepare(&claim).await.unwrap();
    plugin.prepared(&whole, "then whole").await;
    assert!(!is_on(&site));
    site.check("whole");
    let share = Claim::new("share", &["gpu-3"]).share("2000Mi", "25");
    site.api.put(&share);
    plugin.refused(&share, &["gpu-3"]).await;
}

#[tokio::test]
async fn stopped_while_a_mode_goes_off() {
    for (index, when) in [(0, When::Before), (0, When::After), (1, When::Before), (1, When::After)] {
        let at = format!("{when:?} verb {index}");
        let site = Site::whole_or_cut();
        *site.keep.lock().unwrap() = Duration::ZERO;
        let plugin = site.start_plugin();
        let one = put(&site, "one", ONE);
        plugin.prepared(&one, &at).await;
        plugin.unprepare(&one).await.unwrap();
        plugin.host.stop_at(index, when);
        plugin.review_modes().await;
        assert!(plugin.host.stopped(), "{at}: ran through");
        plugin.check(&at);
        drop(plugin);
        site.check(&at);
        let plugin = site.start_plugin();
        plugin.review_modes().await;
        assert!(!is_on(&site), "{at}");
        // Nothing says any more that it were ours.
        site.mig.switch(&uuid(3), true);
        plugin.review_modes().await;
        assert!(is_on(&site), "{at}");
        site.mig.switch(&uuid(3), false);
        plugin.prepared(&put(&site, "whole", "gpu-3"), &at).await;
        site.check(&at);
    }
}
