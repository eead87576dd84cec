//! What a board is used for, by its configuration, what NVML shows, and what claims have of it.

use super::*;
use crate::inventory::tests::{gpu, look};
use crate::inventory::{Inventory, InventoryTracker};
use crate::model::gpu::{MigCapacity, Placement};
use crate::model::mig::{MigProfile, PossibleMig};

fn at(start: u32) -> MigPlace {
    MigPlace { profile_id: 19, placement: Placement { start, size: 1 } }
}

fn mig(start: u32) -> MigDevice {
    MigDevice {
        uuid: DeviceUuid::new(format!("MIG-{start}")),
        profile: "1g.10gb".into(),
        gpu_instance: 7 + start,
        compute_instance: 0,
        profile_id: 19,
        placement: at(start).placement,
        capacity: MigCapacity::default(),
    }
}

/// GPU-0 in MIG mode, carved, with instances that begin there.
fn board(starts: &[u32]) -> Gpu {
    let profile = MigProfile {
        id: 19,
        name: "1g.10gb".into(),
        slices: 1,
        most: 7,
        capacity: MigCapacity::default(),
        placements: (0..7).map(|start| at(start).placement).collect(),
    };
    let mut gpu = gpu(0);
    gpu.mig = MigMode::OnDemand(OnDemand {
        places: PossibleMig::all(&gpu.uuid, &[profile]),
        foreign: starts.iter().map(|start| at(*start)).collect(),
        devices: starts.iter().map(|start| mig(*start)).collect(),
        ..OnDemand::default()
    });
    gpu
}

fn claimed(name: &str, what: ClaimedPart) -> Claimed {
    let claim = ClaimRef { namespace: "team".into(), name: name.into(), uid: name.into() };
    Claimed { gpu: gpu(0).uuid, claim, what }
}

fn made(start: u32) -> Claimed {
    claimed("made", ClaimedPart::Made { place: at(start), device: Some(mig(start).uuid) })
}

fn around(all: &[Claimed]) -> ClaimedAround {
    ClaimedAround { before: all.to_vec(), after: all.to_vec(), ..ClaimedAround::default() }
}

fn settled(mut gpu: Gpu, claims: &ClaimedAround, wanted: bool) -> Gpu {
    settle(&mut gpu, claims, wanted);
    gpu
}

fn cut(gpu: &Gpu) -> &OnDemand {
    let MigMode::OnDemand(cut) = &gpu.mig else { panic!("{:?}", gpu.mig) };
    cut
}

fn changing(gpu: &Gpu) -> &str {
    let Health::Changing(words) = &gpu.health else { panic!("{:?}", gpu.health) };
    words
}

#[test]
fn what_was_made_for_claims_is_told_from_what_was_not() {
    let gpu = settled(board(&[0, 3]), &around(&[made(0)]), true);
    assert_eq!((&cut(&gpu).foreign[..], cut(&gpu).devices.len()), (&[at(3)][..], 1));
    assert_eq!((gpu.missing(), &gpu.health), (&[][..], &Health::Healthy));
    // It comes or goes while NVML is asked.
    let one = claimed("coming", ClaimedPart::Made { place: at(3), device: None });
    let coming = ClaimedAround { before: vec![made(0)], after: vec![one], ..ClaimedAround::default() };
    assert_eq!(cut(&settled(board(&[0, 3]), &coming, true)).foreign, []);
}

#[test]
fn an_instance_that_somebody_ended_is_missing_and_one_that_was_not_there_yet_is_not() {
    let gone = settled(board(&[]), &around(&[made(0)]), true);
    let missing = MissingMig { place: at(0), uuid: "MIG-0".into() };
    assert_eq!(gone.missing(), std::slice::from_ref(&missing));
    assert!(missing.words().contains("MIG-0") && missing.words().contains("Delete the pod"));
    let other = claimed("made", ClaimedPart::Made { place: at(0), device: Some("MIG-other".into()) });
    assert_eq!(settled(board(&[0]), &around(&[other]), true).missing().len(), 1, "another is in its place");
    for (before, after) in [(vec![], vec![made(0)]), (vec![made(0)], vec![])] {
        let claims = ClaimedAround { before, after, ..ClaimedAround::default() };
        assert_eq!(settled(board(&[]), &claims, true).missing(), []);
    }
    let unmade = claimed("made", ClaimedPart::Made { place: at(0), device: None });
    assert_eq!(settled(board(&[]), &around(&[unmade]), true).missing(), []);
}

#[test]
fn a_board_that_is_not_to_be_carved_any_more_is_until_its_last_claim_has_gone() {
    let kept = settled(board(&[0, 3]), &around(&[made(0)]), false);
    assert_eq!(cut(&kept).foreign, [at(3)]);
    let words = changing(&kept);
    assert!(words.contains("does not name it any more") && words.contains("team/made"), "{words}");
    assert_eq!(kept.health.problem(), None, "it works");
    let after = settled(board(&[3]), &ClaimedAround::default(), false);
    assert_eq!((after.mig, after.health), (MigMode::On(vec![mig(3)]), Health::Healthy));
}

#[test]
fn a_board_that_is_to_be_carved_now_is_once_claims_of_before_have_gone() {
    let one = claimed("before", ClaimedPart::Static);
    let kept = settled(board(&[0, 3]), &around(&[one]), true);
    assert_eq!(kept.mig, MigMode::On(vec![mig(0), mig(3)]));
    let words = changing(&kept);
    assert!(words.contains("names it now") && words.contains("team/before"), "{words}");
    let after = settled(board(&[0, 3]), &ClaimedAround::default(), true);
    assert_eq!((cut(&after).foreign.len(), after.health.clone()), (2, Health::Healthy));
}

#[test]
fn mig_that_was_switched_off_under_claims_is_told_with_those_claims() {
    let mut off = gpu(0);
    off.mig = MigMode::Off;
    let many: Vec<Claimed> =
        (0..5).map(|n| claimed(&format!("c{n}"), ClaimedPart::Made { place: at(n), device: None })).collect();
    let told = settled(off.clone(), &around(&many), true);
    let words = changing(&told);
    assert!(words.contains("MIG was switched off") && words.contains("and 2 more"), "{words}");
    assert_eq!(told.mig, MigMode::Off);
    let other = Claimed { gpu: "GPU-other".into(), ..made(0) };
    assert_eq!(settled(off, &around(&[other]), true).health, Health::Healthy);
    let mut ill = board(&[0]);
    ill.health = Health::Unhealthy("it fails".into());
    assert!(
        matches!(settled(ill, &around(&[made(0)]), false).health, Health::Unhealthy(_)),
        "the worse is told"
    );
}

/// The same board, whose MIG mode is ours to switch.
fn switchable(switch: MigSwitch, starts: &[u32]) -> Gpu {
    let mut gpu = board(starts);
    if let MigMode::OnDemand(cut) = &mut gpu.mig {
        cut.switch = switch;
    }
    gpu
}

fn with_ours(claims: ClaimedAround) -> ClaimedAround {
    ClaimedAround { switched: [gpu(0).uuid].into(), ..claims }
}

#[test]
fn a_mode_that_we_switched_on_is_no_change_of_use() {
    let none = ClaimedAround::default();
    let off = settled(switchable(MigSwitch::Off, &[]), &none, true);
    assert_eq!(off, switchable(MigSwitch::Off, &[]));
    // As NVML shows it once the mode is on: what the ledger says makes the difference.
    let on = settled(board(&[]), &with_ours(none.clone()), true);
    assert_eq!(on, switchable(MigSwitch::On, &[]));
    assert_eq!(settled(board(&[]), &none, true), board(&[]), "an administrator's");
    let names = |gpu: &Gpu| gpu.devices().iter().map(|one| one.name().to_string()).collect::<Vec<_>>();
    assert_eq!(names(&on), names(&off));
    assert!(on.is_whole_or_cut() && off.is_whole_or_cut() && !board(&[]).is_whole_or_cut());
    // With a claim's device and one of somebody else's.
    let both = settled(board(&[0, 3]), &with_ours(around(&[made(0)])), true);
    assert_eq!((both.health.clone(), both.is_whole_or_cut()), (Health::Healthy, true));
    let MigMode::OnDemand(cut) = &both.mig else { panic!("{:?}", both.mig) };
    assert_eq!(cut.foreign, [at(3)]);
}

#[test]
fn a_mode_that_is_switched_off_under_claims_is_told_and_takes_no_device_away() {
    let after = settled(switchable(MigSwitch::Off, &[]), &with_ours(around(&[made(0)])), true);
    let Health::Changing(words) = &after.health else { panic!("{:?}", after.health) };
    assert!(
        words.contains("switched off while claims had MIG devices") && words.contains("team/made"),
        "{words}"
    );
    assert!(after.is_whole_or_cut());
    assert_eq!(after.missing().len(), 1);
    // Only about to be made, or gone meanwhile.
    let planned = claimed("made", ClaimedPart::Made { place: at(0), device: None });
    for (before, after) in
        [(vec![planned.clone()], vec![made(0)]), (vec![made(0)], vec![]), (vec![], vec![planned])]
    {
        let claims = ClaimedAround { before, after, ..ClaimedAround::default() };
        assert_eq!(settled(switchable(MigSwitch::Off, &[]), &claims, true).health, Health::Healthy);
    }
}

#[test]
fn places_of_claims_stay_published_on_a_board_that_its_administrator_switched_off() {
    let off = || switchable(MigSwitch::OffByOthers, &[]);
    for wanted in [true, false] {
        let after = settled(off(), &around(&[made(0)]), wanted);
        let Health::Changing(words) = &after.health else { panic!("{:?}", after.health) };
        assert!(
            words.contains("switched off while claims had MIG devices") && words.contains("team/made"),
            "{words}"
        );
        assert_eq!(after.missing().iter().map(|one| one.place).collect::<Vec<_>>(), [at(0)]);
        let names = |gpu: &Gpu| gpu.devices().iter().map(|one| one.name()).collect::<Vec<_>>();
        assert_eq!(names(&after), names(&board(&[])));
        assert!(!after.is_whole_or_cut(), "nobody gets the whole board meanwhile");
        // About to be made when the mode went off: nothing is made, and nothing else may come there.
        let planned = claimed("made", ClaimedPart::Made { place: at(0), device: None });
        let after = settled(off(), &around(&[planned]), wanted);
        assert!(matches!(after.health, Health::Changing(_)) && after.missing().is_empty());
        // Whole, and in shares, once no claim has a part of it.
        let share = around(&[claimed("share", ClaimedPart::Share)]);
        for none in [ClaimedAround::default(), share] {
            let after = settled(off(), &none, wanted);
            assert_eq!((after.mig, after.health), (MigMode::Off, Health::Healthy));
        }
    }
}

/// Whoever it is then counted as: the claims' devices are gone, and what is in their places is somebody else's.
#[test]
fn a_mode_that_is_switched_off_and_on_again_under_claims_is_told_to_each_of_them() {
    let claims = around(&[made(0), made(3)]);
    for claims in [claims.clone(), with_ours(claims)] {
        let mut after = board(&[0, 5]);
        if let MigMode::OnDemand(cut) = &mut after.mig {
            cut.devices[0].uuid = "MIG-theirs".into();
        }
        let after = settled(after, &claims, true);
        let missing: Vec<_> = after.missing().iter().map(|one| (one.place, one.uuid.as_str())).collect();
        assert_eq!(missing, [(at(0), "MIG-0"), (at(3), "MIG-3")]);
        assert_eq!((&cut(&after).foreign[..], &after.health), (&[at(5)][..], &Health::Healthy));
    }
}

#[test]
fn a_board_that_is_not_named_any_more_is_whole_once_nothing_is_cut_off_it() {
    let none = with_ours(ClaimedAround::default());
    for mig in [board(&[]).mig, MigMode::On(Vec::new()), switchable(MigSwitch::Off, &[]).mig] {
        let after = settled(Gpu { mig, ..gpu(0) }, &none, false);
        assert_eq!((after.mig, after.health), (MigMode::Off, Health::Healthy));
    }
    let kept = settled(board(&[0]), &with_ours(around(&[made(0)])), false);
    assert!(
        kept.is_whole_or_cut()
            && matches!(&kept.health, Health::Changing(words) if words.contains("any more"))
    );
}

#[test]
fn a_board_whose_shares_are_in_use_stays_shared_until_they_have_gone() {
    let claims = around(&[claimed("share", ClaimedPart::Share)]);
    let after = settled(switchable(MigSwitch::Off, &[]), &claims, true);
    assert_eq!(after.mig, MigMode::Off);
    let Health::Changing(words) = &after.health else { panic!("{:?}", after.health) };
    assert!(words.contains("shares of before: team/share"), "{words}");
    let shared = settled(Gpu { mig: MigMode::Off, ..gpu(0) }, &claims, true);
    assert_eq!(shared.health, Health::Healthy, "without --mig-keep a shared board is as it was");
}

/// The board after these looks, one after the other, as discovery folds them.
fn after(looks: &[(Gpu, &ClaimedAround)]) -> Gpu {
    let known = looks.iter().fold(InventoryTracker::default(), |known, (gpu, claims)| {
        let mut gpu = gpu.clone();
        known.keep_places(&mut gpu);
        settle(&mut gpu, claims, true);
        known.fold(Ok(look(vec![gpu]))).0
    });
    let Inventory::Found(node) = known.inventory() else { panic!("{known:?}") };
    node.gpus[0].clone()
}

/// MIG was switched off under claims, and the board does not tell any more what it can be cut into.
#[test]
fn places_of_a_board_whose_use_changes_stay_though_nvml_tells_them_no_more() {
    let (claims, none) = (around(&[made(0)]), ClaimedAround::default());
    let switched = with_ours(claims.clone());
    let off = || Gpu { mig: MigMode::Off, ..gpu(0) };
    let ours = || switchable(MigSwitch::Off, &[]);
    for (carved, claims) in [(board(&[0, 3]), &claims), (board(&[0, 3]), &switched), (ours(), &switched)] {
        let kept = after(&[(carved.clone(), claims), (off(), claims), (off(), claims)]);
        assert_eq!(cut(&kept).places, cut(&carved).places);
        assert!(changing(&kept).contains("MIG was switched off"), "{kept:?}");
        // Nothing is left of what was there, and each claim is told.
        assert_eq!((&cut(&kept).foreign[..], &cut(&kept).devices[..]), (&[][..], &[][..]));
        assert_eq!(kept.missing(), [MissingMig { place: at(0), uuid: "MIG-0".into() }]);
        assert!(
            cut(&kept).switch.is_off() && !kept.is_whole_or_cut(),
            "the mode is seen off, and is not ours"
        );
        let left = after(&[(carved, claims), (off(), claims), (off(), &none)]);
        assert_eq!((left.mig, left.health), (MigMode::Off, Health::Healthy), "once nobody has a part of it");
    }
    assert_eq!(after(&[(off(), &claims)]).mig, MigMode::Off, "a new process knows nothing of before");
}

/// Another instance of the plugin gives a share of it while this one already offers it whole or cut.
#[test]
fn a_board_that_is_shared_meanwhile_is_not_cut_any_more() {
    let (none, share) = (ClaimedAround::default(), around(&[claimed("share", ClaimedPart::Share)]));
    let ours = || switchable(MigSwitch::Off, &[]);
    for looks in
        [vec![(ours(), &none), (ours(), &share)], vec![(ours(), &none), (ours(), &share), (ours(), &share)]]
    {
        let shared = after(&looks);
        assert_eq!(shared.mig, MigMode::Off);
        assert!(changing(&shared).contains("shares of before"), "{shared:?}");
    }
    assert_eq!(after(&[(ours(), &share), (ours(), &none)]).mig, ours().mig);
}
