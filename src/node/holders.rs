//! Which processes still use a claim's devices, as the node sees it, whatever the API server says of the claim.
//!
//! A user who may edit a claim can remove its finalizers and delete it under a running pod. So a claim that is gone,
//! replaced or no longer allocated is released only when no process of its pods runs. The pods are those of the
//! claim's ledger record; the processes are those in the pods' control groups, the pause process among them. The
//! container edits are removed before the processes are listed, so that no new container gets the device meanwhile.
//!
//! A process can hand a descriptor of a device to one of another pod, which goes on using it. So a whole GPU is free only
//! when no other pod has its device node open either, and a device that is a claim's alone is given only then.
//!
//! A device that is not free yet is withheld: its record stays, so that no other claim gets the device; the device is
//! tainted, its pods get an event, and the processes are listed again every [`AGAIN`]. A share taints its board only if
//! its claim was taken away, not if kubelet has ended its pod. What no record names is [`super::unclaimed`]'s.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::watch;

use super::file_looks::{ByPod, FileLooks, Openers};
use super::unclaimed::UnclaimedDevices;
use crate::host::cgroup::ProcessOwner;
use crate::host::device_nodes::NVIDIA_MAJOR;
use crate::host::{DeviceNumber, Processes};
use crate::inventory::FaultLocation;
use crate::ledger::{HeldDevice, HoldMode, Record, RecordKey};
use crate::model::claim::{ClaimRef, PodRef};
use crate::model::names::{ClaimUid, DeviceName, PodUid};

/// Between two looks at what is withheld.
pub const AGAIN: Duration = Duration::from_secs(2);
/// Pods, and processes of each, that are named; of more the number is told.
const NAMED: usize = 8;

/// A pod with processes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// Its name is empty where only its control group is known.
    pub pod: PodRef,
    pub pids: Vec<u32>,
    pub hold: Hold,
}

/// Why a pod's processes keep a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hold {
    /// The pod had it by the claim, and they run.
    Runs,
    /// They have it open, without a claim on it.
    HasOpen,
}

/// A claim whose devices are not free, though nobody should have them any more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Withheld {
    pub key: RecordKey,
    pub claim: ClaimRef,
    pub cause: ReleaseCause,
    pub devices: Vec<HeldDevice>,
    /// Or why that cannot be told.
    pub by: Result<Vec<Holder>, String>,
}

/// Who causes a release: whether the devices are free is believed accordingly.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReleaseCause {
    /// Kubelet, which has seen the claim's pods end.
    Kubelet,
    /// The state of the API server, which does not prove that the pods have ended.
    Api,
    /// The claim gets the same devices again, for the same pods.
    Anew,
}

/// Looks at the node's processes, and keeps what is withheld.
pub struct Holders {
    processes: Arc<dyn Processes>,
    files: FileLooks,
    own_pod: Option<PodUid>,
    /// One look serves all who asked before it began.
    last: Mutex<Option<(Instant, Arc<ByPod>)>>,
    withheld: watch::Sender<BTreeMap<RecordKey, Withheld>>,
    unclaimed: UnclaimedDevices,
}

impl Holders {
    pub fn new(processes: Arc<dyn Processes>, own_pod: Option<PodUid>, files: FileLooks) -> Self {
        let withheld = watch::Sender::new(BTreeMap::new());
        let unclaimed = UnclaimedDevices::default();
        Self { processes, files, own_pod, last: Mutex::default(), withheld, unclaimed }
    }

    /// False: nobody looks at who has a device open.
    pub fn looks_at_files(&self) -> bool {
        self.files.is_on()
    }

    /// The pods among these that have processes. Blocks its thread.
    ///
    /// # Errors
    /// In words, if the node's processes cannot be seen.
    pub fn of(&self, pods: &[PodRef]) -> Result<Vec<Holder>, String> {
        if pods.is_empty() {
            return Ok(Vec::new());
        }
        let now = self.look()?;
        let holder = |pod: &PodRef| {
            Some(Holder { pod: pod.clone(), pids: now.get(&pod.uid)?.clone(), hold: Hold::Runs })
        };
        Ok(pods.iter().filter_map(holder).collect())
    }

    /// The pods, but ours and these, that have one of these devices open and were not let administrate the node; `among`:
    /// of these alone, as far as their processes are theirs still. Blocks its thread while all open files of the other
    /// pods are looked at ([`FileLooks`]).
    ///
    /// # Errors
    /// In words, if nobody can look.
    pub fn openers(
        &self,
        devices: &BTreeSet<DeviceNumber>,
        rightful: &[PodRef],
        among: Option<&[Holder]>,
    ) -> Result<Openers, String> {
        if devices.is_empty() || !self.looks_at_files() {
            return Ok(Openers::new());
        }
        let look = || self.look().inspect_err(|_| self.files.count_unmade());
        let mut pods = (*look()?).clone();
        if let Some(known) = among {
            // A number may be that of another's process now.
            pods.retain(|pod, pids| {
                pids.retain(|pid| known.iter().any(|one| one.pod.uid == *pod && one.pids.contains(pid)));
                !pids.is_empty()
            });
        }
        pods.retain(|pod, _| {
            Some(pod) != self.own_pod.as_ref() && !rightful.iter().any(|known| known.uid == *pod)
        });
        self.files.openers(pods, devices)
    }

    /// The same, of devices that are to be free. Who could not look keeps nobody off them. Those are looked at first who
    /// had them open the last time.
    pub fn openers_again(
        &self,
        devices: &BTreeSet<DeviceNumber>,
        rightful: &[PodRef],
        known: &[Holder],
    ) -> Vec<Holder> {
        let known: Vec<_> = known.iter().filter(|one| one.hold == Hold::HasOpen).cloned().collect();
        let look = |among: Option<&[Holder]>| match self.openers(devices, rightful, among) {
            Ok(found) => holders_of(found),
            Err(problem) => {
                tracing::warn!(
                    problem,
                    "who else has a GPU open cannot be told, and it is given all the same"
                );
                Vec::new()
            }
        };
        let still = if known.is_empty() { Vec::new() } else { look(Some(&known)) };
        if still.is_empty() { look(None) } else { still }
    }

    fn check_shown(&self) -> Result<(), String> {
        let words = "the node's processes cannot be seen from here; give the plugin the host's PID namespace \
                     (hostPID: true)";
        if self.processes.are_all_shown() { Ok(()) } else { Err(words.to_owned()) }
    }

    fn look(&self) -> Result<Arc<ByPod>, String> {
        self.check_shown()?;
        let asked = Instant::now();
        // What a panic leaves behind is an older look.
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, found)) = last.as_ref().filter(|(began, _)| *began >= asked) {
            return Ok(found.clone());
        }
        let began = Instant::now();
        let found = self.processes.by_pod().map_err(|error| format!("cannot look at processes: {error}"))?;
        let found = Arc::new(found);
        *last = Some((began, found.clone()));
        Ok(found)
    }

    /// The pods of these processes, ours left out. Blocks its thread.
    pub fn pods_of(&self, pids: &[u32]) -> Vec<PodUid> {
        if !self.processes.pids_are_the_hosts() {
            return Vec::new();
        }
        let owner = |pid: &u32| match self.processes.owner(*pid) {
            Ok(Some(ProcessOwner::Pod { pod, .. })) => Some(pod),
            _ => None,
        };
        let mut pods: Vec<_> =
            pids.iter().filter_map(owner).filter(|pod| Some(pod) != self.own_pod.as_ref()).collect();
        pods.sort();
        pods.dedup();
        pods
    }

    /// What keeps a record's devices from being free; none: nothing does. `rightful`: pods that have the devices by other
    /// claims.
    pub fn hold(&self, record: &Record, cause: ReleaseCause, rightful: &[PodRef]) -> Option<Withheld> {
        let devices = record.intent.devices.iter().filter(|held| held.mode != HoldMode::Admin);
        let devices: Vec<_> = devices.cloned().collect();
        if devices.is_empty() || cause == ReleaseCause::Anew {
            return None;
        }
        let (key, claim) = (record.intent.key(), record.intent.claim.clone());
        let by = self.of(&record.intent.pods).map(|by| match by.is_empty() {
            true => {
                let known = self.withheld_of(&key).and_then(|before| before.by.ok()).unwrap_or_default();
                self.openers_again(&whole_gpus(&devices), rightful, &known)
            }
            false => by,
        });
        match by {
            Ok(by) if by.is_empty() => None,
            Err(problem) if cause == ReleaseCause::Kubelet => {
                tracing::debug!(%claim, problem, "kubelet's word is taken that the pods have ended");
                None
            }
            by => Some(Withheld { key, claim, cause, devices, by }),
        }
    }

    /// By device, why nobody new is to get it.
    pub fn kept_from_others(&self) -> BTreeMap<FaultLocation, String> {
        let mut kept = by_device(&self.withheld.borrow());
        for (location, words) in self.unclaimed.changes().borrow().by_location() {
            let told = kept.entry(location).or_default();
            *told = if told.is_empty() { words } else { format!("{told}; {words}") };
        }
        kept
    }

    /// What no record names.
    pub fn unclaimed(&self) -> &UnclaimedDevices {
        &self.unclaimed
    }

    /// What is withheld, by record.
    pub fn withheld(&self) -> watch::Receiver<BTreeMap<RecordKey, Withheld>> {
        self.withheld.subscribe()
    }

    /// What is withheld by a record.
    pub fn withheld_of(&self, key: &RecordKey) -> Option<Withheld> {
        self.withheld.borrow().get(key).cloned()
    }

    /// What is withheld by a claim, or what it owes; of several records the one with this device.
    pub fn withheld_by(&self, claim: &ClaimUid, device: &DeviceName) -> Option<Withheld> {
        let all = self.withheld.borrow();
        let of_claim = || all.values().filter(|one| one.claim.uid == *claim);
        of_claim().find(|one| one.has(device)).or_else(|| of_claim().next()).cloned()
    }

    /// A claim of which the device, or a share of it, is withheld.
    pub fn withheld_on(&self, device: &DeviceName) -> Option<Withheld> {
        let all = self.withheld.borrow();
        all.values().find(|one| one.has(device)).cloned()
    }

    pub fn withhold(&self, what: &Withheld) {
        self.withheld
            .send_if_modified(|all| all.insert(what.key.clone(), what.clone()).as_ref() != Some(what));
    }

    /// What the record names is held by right, or by nobody any more.
    pub fn settle(&self, key: &RecordKey) {
        self.withheld.send_if_modified(|all| all.remove(key).is_some());
    }

    /// Forgets records that are no more: another process has released them.
    pub fn keep(&self, recorded: impl Fn(&RecordKey) -> bool) {
        self.withheld.send_if_modified(|all| {
            let before = all.len();
            all.retain(|key, _| recorded(key));
            all.len() != before
        });
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named: Vec<_> = self.pids.iter().take(NAMED).map(u32::to_string).collect();
        let word = if self.pids.len() == 1 { "process" } else { "processes" };
        write!(f, "{word} {}", named.join(", "))?;
        if self.pids.len() > NAMED {
            write!(f, " and {} more", self.pids.len() - NAMED)?;
        }
        match self.pod.name.as_str() {
            "" => write!(f, " of pod {}", self.pod.uid)?,
            _ => write!(f, " of pod {}", self.pod)?,
        }
        match self.hold {
            Hold::Runs => Ok(()),
            Hold::HasOpen => write!(f, ", which has it open without a claim on it"),
        }
    }
}

/// Which devices, and who holds them.
impl fmt::Display for Withheld {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let devices = self.devices.iter().map(|held| format!("{} ({})", held.answer.device, held.uuid));
        write!(f, "{}: {}", devices.collect::<Vec<_>>().join(", "), self.holders())
    }
}

impl Withheld {
    fn has(&self, device: &DeviceName) -> bool {
        self.devices.iter().any(|held| held.answer.device == *device)
    }

    /// Who holds the devices, in words.
    pub fn holders(&self) -> String {
        let by = match &self.by {
            Ok(by) => by,
            Err(problem) => return problem.clone(),
        };
        listed(by)
    }
}

/// In words, of many the first.
pub(super) fn listed(by: &[Holder]) -> String {
    let mut words: Vec<_> = by.iter().take(NAMED).map(Holder::to_string).collect();
    if by.len() > NAMED {
        words.push(format!("processes of {} more pods", by.len() - NAMED));
    }
    words.join("; ")
}

/// Of pods of which nothing but the control group is known.
pub(super) fn holders_of(found: Openers) -> Vec<Holder> {
    let of = |uid| PodRef { namespace: String::new(), name: String::new(), uid };
    let holder = |(pod, pids): (PodUid, BTreeMap<u32, _>)| Holder {
        pod: of(pod),
        pids: pids.into_keys().collect(),
        hold: Hold::HasOpen,
    };
    found.into_iter().map(holder).collect()
}

/// The device nodes of the whole GPUs among these, by the minor numbers in their names.
fn whole_gpus(devices: &[HeldDevice]) -> BTreeSet<DeviceNumber> {
    let whole = devices.iter().filter(|held| held.mode == HoldMode::Whole);
    whole.filter_map(|held| Some((NVIDIA_MAJOR, held.answer.device.minor()?))).collect()
}

/// Of a board that is carved: whatever may be made over it would find it there.
pub(super) fn location(held: &HeldDevice) -> FaultLocation {
    match &held.mig {
        Some(mig) => FaultLocation::Slices(held.gpu.clone(), mig.place.placement),
        None => FaultLocation::Device(held.uuid.clone()),
    }
}

/// By device, why nobody new is to get it. Of a device with several claims [`NAMED`] are told. The share of a pod that
/// kubelet has ended keeps nobody off the device: its processes end within moments, at each pod that is deleted without a
/// grace period.
fn by_device(withheld: &BTreeMap<RecordKey, Withheld>) -> BTreeMap<FaultLocation, String> {
    let mut found = BTreeMap::<FaultLocation, Vec<String>>::new();
    for one in withheld.values() {
        let keeps_off = |held: &&HeldDevice| match held.mode {
            HoldMode::Share(_) => one.cause == ReleaseCause::Api,
            HoldMode::Whole | HoldMode::Mig => true,
            HoldMode::Admin => false,
        };
        for held in one.devices.iter().filter(keeps_off) {
            let what = match held.mode {
                HoldMode::Share(_) => "its share of it",
                HoldMode::Whole | HoldMode::Mig | HoldMode::Admin => "it",
            };
            let holders = one.holders();
            let words =
                format!("claim {} has ended or was taken away, but {what} is held: {holders}", one.claim);
            let told = found.entry(location(held)).or_default();
            // A claim may have several shares of one board.
            if told.last() != Some(&words) {
                told.push(words);
            }
        }
    }
    let told = |words: Vec<String>| match words.len().checked_sub(NAMED) {
        None | Some(0) => words.join("; "),
        Some(more) => format!("{}; and {more} more claims", words[..NAMED].join("; ")),
    };
    found.into_iter().map(|(device, words)| (device, told(words))).collect()
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::host::{End, EndError, FileLook, ManagedMemory};
    use crate::ledger::Phase;
    use crate::model::process::ProcessKey;
    use crate::node::config::OpenDescriptors;
    use crate::node::metrics::FileLookCounts;

    fn holder(name: &str, pids: &[u32]) -> Holder {
        let pod = PodRef { namespace: "team".into(), name: name.into(), uid: "uid".into() };
        Holder { pod, pids: pids.to_vec(), hold: Hold::Runs }
    }

    /// Processes of one pod, or of a node that cannot be seen.
    struct Fake {
        shown: bool,
        looks: AtomicUsize,
        /// Each process that is looked at has the device open.
        open: Option<DeviceNumber>,
    }

    impl Processes for Fake {
        fn started(&self, _: u32) -> io::Result<Option<u64>> {
            Ok(Some(1))
        }
        fn now(&self) -> io::Result<u64> {
            Ok(2)
        }
        fn owner(&self, _: u32) -> io::Result<Option<ProcessOwner>> {
            Ok(Some(ProcessOwner::Pod { pod: "uid".into(), container: None }))
        }
        fn uses_gpu(&self, _: u32) -> io::Result<bool> {
            Ok(true)
        }
        fn managed_memory(&self, _: u32) -> io::Result<ManagedMemory> {
            unimplemented!("the watchdog asks, holders do not")
        }
        fn by_pod(&self) -> io::Result<BTreeMap<PodUid, Vec<u32>>> {
            self.looks.fetch_add(1, Ordering::SeqCst);
            Ok(BTreeMap::from([("uid".into(), vec![7])]))
        }
        fn look_at_files(&self, look: &FileLook) {
            if let Some(device) = self.open {
                look.opened_everywhere(device);
            }
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

    fn holders(processes: &Arc<Fake>, own: Option<PodUid>) -> Holders {
        let files = FileLooks::new(processes.clone(), OpenDescriptors::Withhold, FileLookCounts::default());
        Holders::new(processes.clone(), own, files)
    }

    fn record(mode: HoldMode, pod: &str) -> Record {
        let mut record = Record { intent: crate::ledger::tests::intent(), phase: Phase::Ready };
        record.intent.devices[0].mode = mode;
        record.intent.pods = vec![PodRef { namespace: "team".into(), name: "p".into(), uid: pod.into() }];
        record
    }

    #[test]
    fn a_device_is_held_by_its_pods_processes_and_by_nobody_elses() {
        let processes = Arc::new(Fake { shown: true, looks: AtomicUsize::new(0), open: None });
        let holders = holders(&processes, Some("ours".into()));
        for cause in [ReleaseCause::Api, ReleaseCause::Kubelet] {
            let held = holders.hold(&record(HoldMode::Whole, "uid"), cause, &[]).unwrap();
            assert_eq!(held.holders(), "process 7 of pod team/p (uid)");
            assert_eq!(holders.hold(&record(HoldMode::Whole, "other"), cause, &[]), None);
            assert_eq!(holders.hold(&record(HoldMode::Admin, "uid"), cause, &[]), None, "it holds nothing");
        }
        assert_eq!(holders.hold(&record(HoldMode::Whole, "uid"), ReleaseCause::Anew, &[]), None);
        assert_eq!(holders.pods_of(&[7, 8]), [PodUid::new("uid")]);
        let looks = processes.looks.load(Ordering::SeqCst);
        // Whoever has a whole GPU open is looked for in any case.
        let mut none = record(HoldMode::Mig, "uid");
        none.intent.pods.clear();
        assert_eq!(holders.hold(&none, ReleaseCause::Api, &[]), None);
        assert_eq!(processes.looks.load(Ordering::SeqCst), looks, "nobody is to be looked for");
    }

    #[test]
    fn where_processes_cannot_be_seen_kubelet_is_believed_and_the_api_server_is_not() {
        let holders = holders(&Arc::new(Fake { shown: false, looks: AtomicUsize::new(0), open: None }), None);
        assert_eq!(holders.hold(&record(HoldMode::Whole, "uid"), ReleaseCause::Kubelet, &[]), None);
        let held = holders.hold(&record(HoldMode::Whole, "uid"), ReleaseCause::Api, &[]).unwrap();
        assert!(held.holders().contains("hostPID"), "{held}");
        assert_eq!(holders.files.unmade(), 0, "it was not asked who has the GPU open");
        holders.openers(&BTreeSet::from([(195, 0)]), &[], None).unwrap_err();
        assert_eq!(holders.files.unmade(), 1);
        assert_eq!(holders.pods_of(&[7]), [] as [PodUid; 0], "the numbers may mean others");
    }

    /// A process of the host has the number of one that had a GPU open: it may, and must not keep the GPU withheld.
    #[test]
    fn whoever_has_the_number_of_an_opener_now_is_not_taken_for_it() {
        let processes = Arc::new(Fake { shown: true, looks: AtomicUsize::new(0), open: Some((195, 0)) });
        let holders = holders(&processes, None);
        let known = |pids: &[u32]| Holder { hold: Hold::HasOpen, ..holder("", pids) };
        let again = |known: &[Holder], rightful: &[PodRef]| {
            holders.openers_again(&BTreeSet::from([(195, 0)]), rightful, known)
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
        let by = Ok(vec![holder("train-0", &[7]); 20]);
        let key = RecordKey::Claim(claim.uid.clone());
        let words = Withheld { key, claim, cause: ReleaseCause::Api, devices: Vec::new(), by }.to_string();
        assert!(words.ends_with("processes of 12 more pods") && words.len() < 1024, "{words}");
    }
}
