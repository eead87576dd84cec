use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::Receiver;
use std::sync::{Mutex, PoisonError};

use super::*;
use crate::host::{End, EndError, FileLook, ManagedMemory};
use crate::ledger::Phase;
use crate::model::process::ProcessKey;
use crate::model::quantity::Bytes;
use crate::node::config::OpenDescriptors;
use crate::node::metrics::FileLookCounts;

fn holder(name: &str, pids: &[u32]) -> Holder {
    let pod = PodRef { namespace: "team".into(), name: name.into(), uid: "uid".into() };
    Holder { pod, pids: pids.to_vec(), hold: Hold::Runs }
}

/// Processes of one pod, or of a node that cannot be seen.
#[derive(Default)]
pub(in crate::node) struct Fake {
    pub shown: bool,
    pub looks: AtomicUsize,
    pub file_looks: AtomicUsize,
    /// The first listing, or question whose a process is or what it has mapped, is held up until this lets it go.
    pub held_up: Mutex<Option<Receiver<()>>>,
    /// Each process that is looked at has the device open.
    pub open: Option<DeviceNumber>,
    /// Processes whose control groups cannot be read.
    pub untold: Vec<u32>,
    /// There are more processes than can be listed in time.
    pub crowded: AtomicBool,
    /// Processes that have come since the listing began are not all in it.
    pub cut: AtomicBool,
    /// Nobody's files can be looked through.
    pub unfinished: AtomicBool,
    /// A look comes to nobody's files.
    pub stalled: AtomicBool,
}

impl Fake {
    fn wait_until_let_go(&self) {
        let held_up = self.held_up.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(held_up) = held_up {
            let _ = held_up.recv();
        }
    }
}

impl Processes for Fake {
    fn started(&self, _: u32) -> io::Result<Option<u64>> {
        Ok(Some(1))
    }
    fn now(&self) -> io::Result<u64> {
        Ok(2)
    }
    fn owner(&self, _: u32) -> io::Result<Option<ProcessOwner>> {
        self.wait_until_let_go();
        Ok(Some(ProcessOwner::Pod { pod: "uid".into(), container: None }))
    }
    fn uses_gpu(&self, _: u32) -> io::Result<bool> {
        Ok(true)
    }
    fn managed_memory(&self, _: u32) -> io::Result<ManagedMemory> {
        self.wait_until_let_go();
        Ok(ManagedMemory::Mapped(Bytes::from_mib(7)))
    }
    fn by_pod(&self, until: Instant) -> io::Result<PodProcesses> {
        assert!(until <= Instant::now() + LIST_LIMIT);
        self.looks.fetch_add(1, Ordering::SeqCst);
        self.wait_until_let_go();
        let by_pod = BTreeMap::from([("uid".into(), vec![7])]);
        let found =
            PodProcesses { by_pod, untold: self.untold.clone(), is_cut: self.cut.load(Ordering::SeqCst) };
        if self.crowded.load(Ordering::SeqCst) { Err(io::ErrorKind::TimedOut.into()) } else { Ok(found) }
    }
    fn look_at_files(&self, look: &FileLook) {
        self.file_looks.fetch_add(1, Ordering::SeqCst);
        if let Some(device) = self.open {
            look.opened_everywhere(device);
        }
        if self.stalled.load(Ordering::SeqCst) {
            return;
        }
        let is_whole = !self.unfinished.load(Ordering::SeqCst);
        look.each(|look, pod, _| {
            if is_whole {
                look.looked_through(pod);
            }
        });
    }
    fn are_all_shown(&self) -> bool {
        self.shown
    }
    fn pids_are_the_hosts(&self) -> bool {
        self.shown
    }
    fn end(&self, _: ProcessKey) -> Result<End, EndError> {
        Ok(End::Gone)
    }
}

pub(in crate::node) fn holders(processes: &Arc<Fake>, own: Option<PodUid>) -> Holders {
    let files = FileLooks::new(processes.clone(), OpenDescriptors::Withhold, FileLookCounts::default());
    Holders::new(processes.clone(), own, files)
}

/// Nobody can look at files any more, or everybody can again.
pub(in crate::node) fn hold_up_looks(holders: &Holders, held_up: bool) {
    holders.files.hold_up(held_up);
}

fn record(mode: HoldMode, pod: &str) -> Record {
    let mut record = Record { intent: crate::ledger::tests::intent(), phase: Phase::Ready };
    record.intent.devices[0].mode = mode;
    record.intent.pods = vec![PodRef { namespace: "team".into(), name: "p".into(), uid: pod.into() }];
    record
}

#[test]
fn a_device_is_held_by_its_pods_processes_and_by_nobody_elses() {
    let processes = Arc::new(Fake { shown: true, ..Fake::default() });
    let holders = holders(&processes, Some("ours".into()));
    for cause in [ReleaseCause::Api, ReleaseCause::Kubelet] {
        let held = holders.hold(&record(HoldMode::Whole, "uid"), cause, true, &[]).unwrap();
        assert_eq!(held.holders(), "process 7 of pod team/p (uid)");
        assert_eq!(holders.hold(&record(HoldMode::Whole, "other"), cause, true, &[]), None);
        assert_eq!(holders.hold(&record(HoldMode::Admin, "uid"), cause, true, &[]), None, "it holds nothing");
    }
    assert_eq!(holders.hold(&record(HoldMode::Whole, "uid"), ReleaseCause::Anew, true, &[]), None);
    assert_eq!(holders.pods_of(vec![7, 8]), [PodUid::new("uid")]);
    let looks = processes.looks.load(Ordering::SeqCst);
    // Whoever has a whole GPU open is looked for in any case.
    let mut none = record(HoldMode::Mig, "uid");
    none.intent.pods.clear();
    assert_eq!(holders.hold(&none, ReleaseCause::Api, true, &[]), None);
    assert_eq!(processes.looks.load(Ordering::SeqCst), looks, "nobody is to be looked for");
}

#[test]
fn where_processes_cannot_be_seen_kubelet_is_believed_and_the_api_server_is_not() {
    let holders = holders(&Arc::new(Fake::default()), None);
    assert_eq!(holders.hold(&record(HoldMode::Whole, "uid"), ReleaseCause::Kubelet, true, &[]), None);
    let held = holders.hold(&record(HoldMode::Whole, "uid"), ReleaseCause::Api, true, &[]).unwrap();
    assert!(held.holders().contains("hostPID"), "{held}");
    assert_eq!(holders.files.unmade(), 1, "who has the GPU open could not be told to kubelet");
    holders.openers(&BTreeSet::from([(195, 0)]), &[]).unwrap_err();
    assert_eq!(holders.files.unmade(), 2);
    assert_eq!(holders.pods_of(vec![7]), [] as [PodUid; 0], "the numbers may mean others");
}

fn pod_ref(uid: &str) -> PodRef {
    PodRef { namespace: "team".into(), name: "p".into(), uid: uid.into() }
}

/// A pod that hides one process keeps what it has; other pods' claims are kept only from whom kubelet knows nothing of.
#[test]
fn a_process_that_hides_may_be_any_pods_but_for_kubelet() {
    let processes = Arc::new(Fake { shown: true, untold: (9..29).collect(), ..Fake::default() });
    let holders = holders(&processes, None);
    let hold = |pod, cause| holders.hold(&record(HoldMode::Whole, pod), cause, true, &[]);
    for cause in [ReleaseCause::Api, ReleaseCause::Kubelet] {
        assert_eq!(hold("uid", cause).unwrap().holders(), "process 7 of pod team/p (uid)");
    }
    let words = hold("other", ReleaseCause::Api).unwrap().holders();
    let named = "of processes 9, 10, 11, 12, 13, 14, 15, 16 and 12 more; delete the pod that has these";
    assert!(words.contains(named) && words.len() < 512, "{words}");
    assert_eq!(hold("other", ReleaseCause::Kubelet), None);
    let all = [pod_ref("uid"), pod_ref("other")];
    let mut of_both = record(HoldMode::Whole, "uid");
    of_both.intent.pods = all.to_vec();
    assert_eq!(holders.running(&of_both, true).unwrap().len(), 1);
    assert_eq!(holders.left_of(&all), all, "neither is known to have ended");
}

/// Kubelet's word is about its pods, not about what they have handed on.
#[test]
fn a_gpu_that_a_process_has_open_which_hides_is_given_to_nobody() {
    let open = Some((195, 0));
    let processes = Arc::new(Fake { shown: true, untold: vec![9], open, ..Fake::default() });
    let holders = holders(&processes, None);
    let rightful = [pod_ref("uid")];
    let held =
        holders.hold(&record(HoldMode::Whole, "other"), ReleaseCause::Kubelet, true, &rightful).unwrap();
    let words = "process 9 whose control group cannot be read, which has it open without a claim on it";
    assert_eq!(held.holders(), words);
    assert_eq!(holders.hold(&record(HoldMode::Mig, "other"), ReleaseCause::Kubelet, true, &rightful), None);
    let opened = BTreeSet::from([(195, 0)]);
    let found = holders_of(holders.openers(&opened, &rightful).unwrap().openers);
    let seen = (false, Instant::now());
    assert_eq!(holders.openers_again(&opened, &rightful, &found, seen), Holding::by(found));
}

fn stranger(pids: &[u32]) -> Holder {
    has_open(("uid".into(), pids.to_vec()))
}

/// Nobody could keep others off GPUs by files that nobody can look through, or by more processes than can be listed.
#[test]
fn who_had_a_device_open_has_it_until_a_look_could_tell_and_nobody_else_is_supposed_to() {
    let processes = Arc::new(Fake { shown: true, ..Fake::default() });
    let holders = holders(&processes, None);
    let at = |devices: &BTreeSet<DeviceNumber>, known: &[Holder], before| {
        holders.openers_again(devices, &[], known, (before, Instant::now()))
    };
    let again = |known: &[Holder], before| at(&BTreeSet::from([(195, 0)]), known, before);
    let words = |found: &Holding| (found.holders.clone(), found.untold.is_some(), found.before);
    let both = [stranger(&[7, 9]), has_open(("gone".into(), vec![10]))];
    assert_eq!(again(&both, true), Holding::default());
    // Of the processes that were seen one is there still.
    processes.unfinished.store(true, Ordering::SeqCst);
    let found = again(&both, false);
    assert_eq!(words(&found), (vec![stranger(&[7])], true, false));
    assert!(found.to_string().contains("process 7 of pod uid, which has it open"), "{found}");
    assert!(found.to_string().contains("seen before") && found.to_string().contains(NOT_ALL_LOOKED_AT));
    let found = again(&[stranger(&[9])], true);
    assert_eq!(
        words(&found),
        (vec![stranger(&[7])], true, false),
        "it may have handed it to another of its pod"
    );
    // It hid its pod when it was seen.
    let found = again(&[has_open((PodProcesses::UNTOLD.into(), vec![7, 8]))], false);
    assert_eq!(words(&found), (vec![stranger(&[7])], true, false));
    assert_eq!(at(&BTreeSet::new(), &both, true), Holding::default());
    processes.unfinished.store(false, Ordering::SeqCst);
    processes.crowded.store(true, Ordering::SeqCst);
    let found = again(&both, false);
    assert_eq!(words(&found), (both.to_vec(), true, false));
    assert!(found.to_string().contains("timed out"), "{found}");
    assert_eq!(again(&[], false), Holding::default());
    let ran = Holder { hold: Hold::Runs, ..stranger(&[7]) };
    assert_eq!(again(&[ran], false), Holding::default(), "that was settled by a listing");
    let found = again(&[], true);
    assert_eq!(words(&found), (vec![], true, true));
    assert!(found.to_string().contains("when this driver was started again"), "{found}");
    processes.crowded.store(false, Ordering::SeqCst);
    // The look is held up before it comes to the pod to which it may have been handed.
    processes.stalled.store(true, Ordering::SeqCst);
    let gone = [has_open(("gone".into(), vec![10]))];
    let found = again(&gone, false);
    assert_eq!(words(&found), (gone.to_vec(), true, false));
    assert!(found.to_string().contains("other pods held the look up"), "{found}");
    assert_eq!(again(&[], false), Holding::default(), "nobody was seen to have it open");
    processes.stalled.store(false, Ordering::SeqCst);
    assert_eq!(again(&both, true), Holding::default());
}

fn withheld_by(holders: &Holders, record: &Record, by: Vec<Holder>) {
    let (key, claim, devices) = (record.intent.key(), record.intent.claim.clone(), kept_devices(record));
    let by = Holding::by(by);
    holders.withhold(&Withheld { key, claim, cause: ReleaseCause::Kubelet, devices, by });
}

/// A tenant's pod hands the descriptor to another one, has processes hold up the looks at files, and ends.
#[test]
fn who_had_a_device_open_and_ended_may_have_handed_it_on() {
    let processes = Arc::new(Fake { shown: true, ..Fake::default() });
    let holders = holders(&processes, None);
    let record = record(HoldMode::Whole, "other");
    let gone = has_open(("gone".into(), vec![10]));
    let hold = || holders.hold(&record, ReleaseCause::Kubelet, true, &[]);
    let devices = BTreeSet::from([(195, 0)]);
    let again = |rightful: &[PodRef]| {
        let seen = (true, Instant::now());
        holders.openers_again(&devices, rightful, std::slice::from_ref(&gone), seen)
    };
    withheld_by(&holders, &record, vec![gone.clone()]);
    hold_up_looks(&holders, true);
    for _ in 0..3 {
        let held = hold().expect("nobody can tell that the GPU is closed");
        assert_eq!((&held.by.holders[..], held.by.before), (std::slice::from_ref(&gone), false));
        let words = held.holders();
        assert!(words.contains("process 10 of pod gone") && words.contains("8 processes hold up"), "{words}");
        holders.withhold(&held);
        assert_eq!(again(&[]), held.by);
    }
    assert!(again(&[pod_ref("gone")]).before, "whoever has it by right is no opener");
    let nobody = holders.openers_again(&devices, &[], &[], (false, Instant::now()));
    assert_eq!(
        nobody,
        Holding::default(),
        "looks that cannot be made keep nobody off a device by themselves"
    );
    hold_up_looks(&holders, false);
    assert_eq!(hold(), None);
    assert_eq!(again(&[]), Holding::default());
}

/// They seemed to have ended, as those do whose control groups cannot be read.
#[test]
fn who_has_a_device_open_is_known_still_when_the_claims_own_pods_run_again() {
    let processes = Arc::new(Fake { shown: true, ..Fake::default() });
    let holders = holders(&processes, None);
    let gone = has_open(("gone".into(), vec![10]));
    let record = record(HoldMode::Whole, "uid");
    withheld_by(&holders, &record, vec![gone.clone()]);
    let held = holders.hold(&record, ReleaseCause::Kubelet, true, &[]).unwrap();
    let own = Holder { pod: record.intent.pods[0].clone(), pids: vec![7], hold: Hold::Runs };
    assert_eq!(held.by, Holding::by(vec![own.clone(), gone.clone()]));
    let held = holders.hold(&record, ReleaseCause::Kubelet, true, &[pod_ref("gone")]).unwrap();
    assert_eq!(held.by, Holding::by(vec![own]), "it has the GPU by right");
}

/// Kubelet waits for it, and each listing may wait for another one and take its time.
#[test]
fn a_release_lists_the_processes_twice_at_most() {
    let processes = Arc::new(Fake { shown: true, ..Fake::default() });
    let holders = holders(&processes, None);
    let record = record(HoldMode::Whole, "other");
    withheld_by(&holders, &record, vec![has_open(("gone".into(), vec![10]))]);
    assert_eq!(holders.hold(&record, ReleaseCause::Kubelet, true, &[]), None);
    assert_eq!(processes.looks.load(Ordering::SeqCst), 2);
}

/// The claims of a start are judged by looks that may fail, too.
#[test]
fn what_an_earlier_process_withheld_is_not_released_unseen() {
    let processes = Arc::new(Fake { shown: true, crowded: true.into(), ..Fake::default() });
    let holders = holders(&processes, None);
    let record = record(HoldMode::Whole, "other");
    let hold = || holders.hold(&record, ReleaseCause::Kubelet, true, &[]);
    holders.unclaimed().remember(record.intent.devices.iter().map(location).collect());
    let held = hold().unwrap();
    assert!(held.by.before && held.holders().contains("timed out"), "{held}");
    holders.withhold(&held);
    // It is known by the record from now on.
    holders.unclaimed().remember(BTreeSet::new());
    assert_eq!(hold(), Some(held));
    processes.crowded.store(false, Ordering::SeqCst);
    assert_eq!(hold(), None);
}

#[test]
fn where_processes_cannot_be_listed_in_time_kubelet_is_believed_and_the_api_server_is_not() {
    let processes = Arc::new(Fake { shown: true, crowded: true.into(), ..Fake::default() });
    let holders = holders(&processes, None);
    assert_eq!(holders.hold(&record(HoldMode::Whole, "uid"), ReleaseCause::Kubelet, true, &[]), None);
    assert_eq!(holders.files.unmade(), 1, "nobody looked who has the GPU open");
    let held = holders.hold(&record(HoldMode::Whole, "uid"), ReleaseCause::Api, true, &[]).unwrap();
    assert!(held.holders().contains("timed out"), "{held}");
    assert_eq!(holders.left_of(&[pod_ref("uid")]), [pod_ref("uid")]);
}

/// Whoever starts processes all the time may have one that is not in the listing.
#[test]
fn who_is_not_in_a_listing_that_was_cut_short_may_be_there() {
    let processes = Arc::new(Fake { shown: true, cut: true.into(), ..Fake::default() });
    let holders = holders(&processes, None);
    let device: DeviceNumber = (NVIDIA_MAJOR, 3);
    let hold = |pod, cause| holders.hold(&record(HoldMode::Mig, pod), cause, true, &[]);
    let held = hold("other", ReleaseCause::Api).unwrap().holders();
    assert!(held.contains("not all processes"), "{held}");
    assert_eq!(hold("other", ReleaseCause::Kubelet), None, "kubelet's word counts");
    assert_eq!(hold("uid", ReleaseCause::Kubelet).unwrap().holders(), "process 7 of pod team/p (uid)");
    let all = [pod_ref("uid"), pod_ref("other")];
    assert_eq!(holders.left_of(&all), all, "neither is known to have ended");
    let problem = holders.openers_of_all(&[device].into(), &[]).unwrap_err();
    assert!(problem.contains("not all processes"), "{problem}");
    assert_eq!(holders.files.unmade(), 1);
    processes.cut.store(false, Ordering::SeqCst);
    assert_eq!(hold("other", ReleaseCause::Api), None);
    assert_eq!(holders.left_of(&all), all[..1]);
    assert!(holders.openers_of_all(&[device].into(), &[]).unwrap().openers.is_empty());
}

/// 48 shares that are taken away under their pods cost as many listings, one after the other.
#[test]
fn one_listing_is_enough_for_all_that_is_withheld_and_none_for_what_may_be_in_use() {
    let processes = Arc::new(Fake { shown: true, ..Fake::default() });
    let holders = holders(&processes, None);
    let share = |name: &str| {
        let mut record = record(HoldMode::Mig, "uid");
        record.intent.claim.uid = name.into();
        record
    };
    let records = ["a", "b", "c"].map(share);
    let look = |record: &Record, in_use| {
        let before = processes.looks.load(Ordering::SeqCst);
        let withheld = holders.hold(record, ReleaseCause::Api, in_use, &[]).unwrap();
        holders.withhold(&withheld);
        processes.looks.load(Ordering::SeqCst) - before
    };
    let all = |in_use| records.each_ref().map(|record| look(record, in_use));
    let go = holders.look_at_withheld();
    assert_eq!(all(false), [1, 1, 1], "none was withheld: containers could get the devices until now");
    drop(go);
    assert_eq!(all(false), [1, 1, 1], "nobody looks at all of them");
    let go = holders.look_at_withheld();
    assert_eq!(all(false), [1, 0, 0]);
    assert_eq!(all(true), [1, 1, 1], "containers could get the devices again until now");
    // One was given to its pods again, and taken away again.
    holders.settle(&records[1].intent.key());
    assert_eq!(all(false), [0, 1, 0]);
    drop(go);
    let _go = holders.look_at_withheld();
    assert_eq!(all(false), [1, 0, 0], "the last look is over");
}

/// A look at all that is withheld begins while one of it is given to its pods again.
#[test]
fn what_is_settled_is_not_in_a_look_that_had_begun() {
    let processes = Arc::new(Fake { shown: true, ..Fake::default() });
    let holders = holders(&processes, None);
    let withheld = holders.hold(&record(HoldMode::Mig, "uid"), ReleaseCause::Api, true, &[]).unwrap();
    let begin = std::sync::Barrier::new(2);
    for _ in 0..20_000 {
        holders.withhold(&withheld);
        std::thread::scope(|scope| {
            let look = scope.spawn(|| {
                begin.wait();
                std::mem::forget(holders.look_at_withheld());
            });
            begin.wait();
            holders.settle(&withheld.key);
            look.join().unwrap();
        });
        let in_it = holders.looked_at().as_ref().is_some_and(|(_, all)| all.contains(&withheld.key));
        assert!(!in_it, "its containers could get the devices since that look had begun");
    }
}

#[test]
fn go_by_go_each_has_its_turn() {
    let first = |turn| in_turn(vec!["a", "b", "c"], turn)[0];
    assert_eq!([0, 2, 4, 6].map(first), ["a", "c", "b", "a"]);
    assert!(in_turn(Vec::<u32>::new(), 7).is_empty());
    assert_eq!(in_turn(vec![1, 2, 3], 1), [2, 3, 1]);
}

/// A process of the host has the number of one that had a GPU open: it may, and must not keep the GPU withheld.
#[test]
fn whoever_has_the_number_of_an_opener_now_is_not_taken_for_it() {
    let processes = Arc::new(Fake { shown: true, open: Some((195, 0)), ..Fake::default() });
    let holders = holders(&processes, None);
    let known = |pids: &[u32]| Holder { hold: Hold::HasOpen, ..holder("", pids) };
    let again = |known: &[Holder], rightful: &[PodRef]| {
        let seen = (false, Instant::now());
        holders.openers_again(&BTreeSet::from([(195, 0)]), rightful, known, seen).holders
    };
    let pod = PodRef { namespace: String::new(), name: String::new(), uid: "uid".into() };
    assert_eq!(again(&[known(&[7, 9])], &[]), [Holder { pod: pod.clone(), ..known(&[7]) }]);
    let mut gone = known(&[9]);
    gone.pod.uid = "gone".into();
    assert_eq!(again(&[gone], &[pod]), []);
}

#[test]
fn holders_are_named_with_their_numbers_and_not_without_end() {
    assert_eq!(holder("train-0", &[7]).to_string(), "process 7 of pod team/train-0 (uid)");
    assert_eq!(holder("", &[7, 8]).to_string(), "processes 7, 8 of pod uid");
    let stranger = Holder { hold: Hold::HasOpen, ..holder("", &[7]) };
    assert_eq!(stranger.to_string(), "process 7 of pod uid, which has it open without a claim on it");
    let many: Vec<u32> = (1..=500).collect();
    let words = holder("train-0", &many).to_string();
    assert_eq!(words, "processes 1, 2, 3, 4, 5, 6, 7, 8 and 492 more of pod team/train-0 (uid)");
    let claim = ClaimRef { namespace: "team".into(), name: "c".into(), uid: "u".into() };
    let by = Holding::by(vec![holder("train-0", &[7]); 20]);
    let key = RecordKey::Claim(claim.uid.clone());
    let words = Withheld { key, claim, cause: ReleaseCause::Api, devices: Vec::new(), by }.to_string();
    assert!(words.ends_with("processes of 12 more pods") && words.len() < 1024, "{words}");
}
