use proptest::prelude::*;

use super::*;
use crate::model::gpu::Placement;
use crate::model::mig::{MadeMig, MigPlace};
use crate::model::names::{ClaimUid, DeviceName, PoolName};
use crate::model::quantity::Bytes;
use crate::model::share::{Isolation, Percent};

pub fn intent() -> Intent {
    Intent {
        claim: ClaimRef { namespace: "team".into(), name: "train".into(), uid: ClaimUid::from("c-1") },
        boot: BootId::from("boot-1"),
        devices: vec![HeldDevice {
            answer: PreparedDevice {
                requests: vec!["gpu".into()],
                pool: PoolName::from("node-a"),
                device: DeviceName::whole(3),
                cdi_ids: vec!["k8s.gpu.nvidia.com/claim=c-1-gpu-3".into()],
                share_id: None,
            },
            uuid: DeviceUuid::from("GPU-3"),
            gpu: DeviceUuid::from("GPU-3"),
            mode: HoldMode::Whole,
            placer: Placer::Scheduler,
            mig: None,
        }],
        steps: vec![
            Step::TimeSlice { gpu: DeviceUuid::from("GPU-3"), level: 2 },
            Step::WriteCdi { file: "k8s.gpu.nvidia.com-claim_c-1.json".into() },
        ],
        pods: Vec::new(),
        standing: Standing::Current,
    }
}

fn bytes(marks: &[Mark]) -> Vec<u8> {
    let mut bytes = encode_intent(&intent()).unwrap();
    for mark in marks {
        bytes.extend(encode_mark(*mark).unwrap());
    }
    bytes
}

#[test]
fn a_record_reads_back_as_it_was_written() {
    for (marks, phase, undone) in [
        (&[][..], Phase::Applying(0), 1),
        (&[Mark::Applied(0)], Phase::Applying(1), 2),
        (&[Mark::Applied(0), Mark::Applied(1)], Phase::Applying(2), 2),
        (&[Mark::Applied(0), Mark::Applied(1), Mark::Ready], Phase::Ready, 2),
        (&[Mark::Applied(0), Mark::Releasing], Phase::Releasing, 2),
        (&[Mark::Applied(usize::MAX)], Phase::Applying(usize::MAX), 2),
    ] {
        let decoded = decode(&bytes(marks)).unwrap();
        assert_eq!(decoded.record.intent, intent());
        assert_eq!(decoded.record.phase, phase);
        assert_eq!(decoded.record.undo().count(), undone, "{marks:?}");
    }
}

#[test]
fn what_a_claim_owes_is_written_as_the_first_release_did() {
    let mut owed = intent();
    owed.standing = Standing::Owed(7);
    let bytes = encode_intent(&owed).unwrap();
    let text = String::from_utf8(bytes.clone()).unwrap();
    assert!(text.contains(r#""uid":"c-1-owed-7""#) && !text.contains("standing"), "{text}");
    assert_eq!(decode(&bytes).unwrap().record.intent, owed);
    assert_eq!(owed.key().to_string(), "c-1-owed-7");
    assert!(!owed.is_current_of(&"c-1".into()) && intent().is_current_of(&"c-1".into()));
    // What only looks like it is a claim's own.
    for uid in ["c-1-owed-", "c-1-owed-07", "c-1-owed-x", "-owed-1", "c-1-owed-99999999999"] {
        let mut odd = intent();
        odd.claim.uid = uid.into();
        let read = decode(&encode_intent(&odd).unwrap()).unwrap().record.intent;
        assert_eq!(read, odd, "{uid}");
    }
    let mut twice = intent();
    twice.claim.uid = "c-1-owed-1-owed-2".into();
    let read = decode(&encode_intent(&twice).unwrap()).unwrap().record.intent;
    assert_eq!((read.claim.uid.as_str(), read.standing), ("c-1-owed-1", Standing::Owed(2)));
}

#[test]
fn the_first_releases_files_stay_readable() {
    // Written by hand in the format of version 1; must be read by every later release.
    let file = include_bytes!("../../tests/data/ledger/v1-ready.rec");
    let decoded = decode(file).unwrap();
    assert_eq!(decoded.record.intent, intent());
    assert_eq!(decoded.record.phase, Phase::Ready);
}

/// A share as the controller places it on a cluster that keeps no share ids.
fn controllers_share() -> Intent {
    let mut intent = intent();
    let device = &mut intent.devices[0];
    let memory = Bytes::from_mib(2000);
    let compute = Percent::try_from(25_u8).ok();
    device.mode =
        HoldMode::Share(Grant { memory, compute, slots: 1, processes: 2, isolation: Isolation::Mps });
    device.placer = Placer::Controller;
    let needs = MpsLimits { memory: vec![Some(Bytes::from_mib(1000))], compute };
    let group = MpsGroup::new([DeviceUuid::from("GPU-3")]);
    intent.steps[0] = Step::Mps { group, exclusive: true, needs };
    intent
}

#[test]
fn a_share_of_the_controllers_is_read_back_as_such() {
    let file = include_bytes!("../../tests/data/ledger/v1-controllers-share.rec");
    let decoded = decode(file).unwrap();
    assert_eq!(decoded.record.intent, controllers_share());
    assert_eq!(
        encode_intent(&controllers_share()).unwrap(),
        file.split_inclusive(|b| *b == b'\n').next().unwrap()
    );
}

#[test]
fn what_the_scheduler_placed_is_written_as_before_there_was_a_controller() {
    let line = String::from_utf8(encode_intent(&intent()).unwrap()).unwrap();
    assert!(!line.contains("placer"), "an older release can read it: {line}");
}

fn pod(uid: &str) -> PodRef {
    PodRef { namespace: "team".into(), name: "train-0".into(), uid: uid.into() }
}

#[test]
fn the_pods_of_a_claim_are_read_back_and_change_nothing_else() {
    let intent = Intent { pods: vec![pod("p-1")], ..intent() };
    let file = include_bytes!("../../tests/data/ledger/v1-with-pods.rec");
    let record = decode(file).unwrap().record;
    assert_eq!((&record.intent, record.phase), (&intent, Phase::Ready));
    assert_eq!(encode_intent(&intent).unwrap(), file.split_inclusive(|b| *b == b'\n').next().unwrap());
    assert!(intent.holds_as(&self::intent()) && intent != self::intent());
}

/// A MIG device that was made for its claim.
fn made_mig() -> Intent {
    let mut intent = intent();
    let device = &mut intent.devices[0];
    (device.uuid, device.mode) = ("MIG-1".into(), HoldMode::Mig);
    device.answer.device = DeviceName::mig(3, "1g.10gb", 19, 0);
    device.answer.cdi_ids = vec!["k8s.gpu.nvidia.com/claim=c-1-gpu-3-mig-1g10gb-19-0".into()];
    let place = MigPlace { profile_id: 19, placement: Placement { start: 0, size: 1 } };
    let made = MadeMig { uuid: "MIG-1".into(), gpu_instance: 7, compute_instance: 0 };
    intent.steps[0] = Step::MakeMig { gpu: "GPU-3".into(), place, made: Some(made) };
    intent
}

#[test]
fn a_mig_device_that_was_made_is_read_back_as_such() {
    let file = include_bytes!("../../tests/data/ledger/v1-made-mig.rec");
    let record = decode(file).unwrap().record;
    assert_eq!((&record.intent, record.phase), (&made_mig(), Phase::Ready));
    assert_eq!(encode_intent(&made_mig()).unwrap(), file.split_inclusive(|b| *b == b'\n').next().unwrap());
}

#[test]
fn of_too_many_pods_the_latest_are_kept() {
    let pods: Vec<_> = (0..PODS_MOST).map(|nth| pod(&format!("p-{nth}"))).collect();
    let intent = Intent { pods, ..intent() };
    let with = intent.pods_with(&[pod("p-7"), pod("new")]);
    assert_eq!((with.len(), &with[0], with.last()), (PODS_MOST, &pod("p-1"), Some(&pod("new"))));
    assert!(encode_intent(&Intent { pods: with, ..intent }).unwrap().len() < 1 << 20);
}

#[test]
fn each_phase_is_read_back_from_its_mark() {
    for phase in [Phase::Applying(0), Phase::Applying(2), Phase::Ready, Phase::Releasing] {
        let marks: Vec<_> = phase.mark().into_iter().collect();
        assert_eq!(decode(&bytes(&marks)).unwrap().record.phase, phase);
    }
}

#[test]
fn shares_of_both_placers_on_one_board_are_found() {
    let one = Record { intent: controllers_share(), phase: Phase::Ready };
    let mut two = one.clone();
    two.intent.claim.uid = ClaimUid::from("c-2");
    assert_eq!(audit([&one, &two]), []);
    two.intent.devices[0].placer = Placer::Scheduler;
    assert_eq!(audit([&one, &two]).len(), 1);
}

#[test]
fn a_later_version_is_refused_with_its_number() {
    let json = r#"{"version":7,"claim":{}}"#;
    let text = format!("{:08x} {json}\n", crc32fast::hash(json.as_bytes()));
    assert_eq!(decode(text.as_bytes()), Err(Damage::Version(7)));
    assert_eq!(decode(b""), Err(Damage::Empty));
    assert_eq!(decode(b"nonsense\n"), Err(Damage::Shape { line: 1 }));
    assert_eq!(decode(b"nonsense without an end"), Err(Damage::Empty));
}

#[test]
fn two_claims_on_one_board_are_found() {
    let one = Record { intent: intent(), phase: Phase::Ready };
    let mut two = one.clone();
    two.intent.claim.uid = ClaimUid::from("c-2");
    assert_eq!(audit([&one]), []);
    assert_eq!(audit([&one, &two]).len(), 1);
    two.intent.devices[0].mode = HoldMode::Admin;
    assert_eq!(audit([&one, &two]), []);
    two.intent.devices[0].mode = HoldMode::Mig;
    two.intent.devices[0].uuid = DeviceUuid::from("MIG-1");
    assert_eq!(audit([&one, &two]).len(), 1, "a MIG device of a board that is held whole");
}

proptest! {
    /// An append that a crash cut off anywhere leaves the record as it was before it.
    #[test]
    fn a_cut_off_append_is_dropped(cut in 0_usize..200) {
        let whole = bytes(&[Mark::Applied(0)]);
        let more = encode_mark(Mark::Applied(1)).unwrap();
        let cut = cut % more.len();
        let mut torn = whole.clone();
        torn.extend(&more[..cut]);
        let decoded = decode(&torn).unwrap();
        prop_assert_eq!(decoded.valid_len, whole.len());
        prop_assert_eq!(decoded.record.phase, Phase::Applying(1));
    }

    /// A flipped bit is either found, or in a torn tail.
    #[test]
    fn a_flipped_bit_is_found(at in 0_usize..2000, bit in 0_u8..8) {
        let whole = bytes(&[Mark::Applied(0), Mark::Applied(1), Mark::Ready]);
        let mut damaged = whole.clone();
        let at = at % damaged.len();
        damaged[at] ^= 1 << bit;
        if damaged[at] == b'\n' || whole[at] == b'\n' {
            return Ok(()); // moves the line ends: covered by the torn-tail rule
        }
        // A checksum digit may change its case and still mean the same number.
        if let Ok(decoded) = decode(&damaged) {
            prop_assert_eq!(decoded, decode(&whole).unwrap());
        }
    }

    #[test]
    fn reading_never_panics(garbage in proptest::collection::vec(any::<u8>(), 0..300)) {
        let _ = decode(&garbage);
    }
}

#[test]
fn a_mig_instance_is_read_back_before_and_after_it_is_made() {
    use crate::model::gpu::Placement;
    use crate::model::mig::{MadeMig, MigPlace};
    let place = |start| MigPlace { profile_id: 19, placement: Placement { start, size: 1 } };
    let made = MadeMig { uuid: "MIG-1".into(), gpu_instance: 7, compute_instance: 0 };
    let carved = |claim: &str, start, made: Option<MadeMig>| {
        let mut intent = intent();
        intent.claim.uid = claim.into();
        intent.devices.clear();
        intent.steps = vec![Step::MakeMig { gpu: "GPU-3".into(), place: place(start), made }];
        intent
    };
    for one in [carved("c-1", 0, None), carved("c-1", 0, Some(made))] {
        assert_eq!(decode(&encode_intent(&one).unwrap()).unwrap().record.intent, one);
        assert_eq!(
            one.places().map(|(gpu, at)| (gpu.as_str(), at)).collect::<Vec<_>>(),
            [("GPU-3", place(0))]
        );
    }
    let record = |intent| Record { intent, phase: Phase::Ready };
    let apart = [record(carved("c-1", 0, None)), record(carved("c-2", 1, None))];
    assert_eq!(audit(&apart), []);
    let over = [record(carved("c-1", 0, None)), record(carved("c-2", 0, None))];
    assert_eq!(audit(&over).len(), 1);
}
