//! Which pods have a device open or mapped, by the numbers of its node: whoever has a descriptor of it may have been
//! handed it by another process, and goes on using it after that one has ended.
//!
//! No file is opened: of a descriptor that seems to be a device, a reference is taken ([`descriptor`]). A descriptor that
//! names the place of a node alone (`O_PATH`) is no open device: anybody can have one who can make a node.
//!
//! What a look costs is bounded, because tenants say how many files they have, and how long each is waited for (while
//! another thread changes its mappings without end). Of each pod [`FILES_FIRST`] are looked at, for [`TIME_FIRST`] or its
//! part of half the time; then, of those that have more, [`FILES_MOST`], for equal parts of the time that is left; and
//! nothing once the look's time is over. So no pod hides another one's files behind its own. A look can also be held up for
//! good by a process (while another of its threads maps memory that its own file system does not bring) or by a file server
//! that does not answer. So it runs on a thread that its caller can leave ([`FileLook::steps`]); what was found until then
//! counts, and another look goes on from there ([`FileLook::after`]).
//!
//! What is listed may be gone when it is looked at, and elsewhere. A process in which that happens is looked at again, up to
//! [`TRIES`] times. Of pods with processes that had ended, those that they have by now are looked at, as they are listed, up
//! to [`LISTINGS`] times. A pod of which something was gone each time is told as unfinished. A program that starts others all
//! the time is so only if one ends within the moment between its being listed ([`numbered`]) and looked at, in each listing.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::cgroup::ProcessOwner;
pub use super::descriptor::DeviceNumber;
use super::descriptor::{self, DescriptorTable, Meaning, NoMeaning, device_at, have_one_table};
use super::numbered::numbered;
use super::process::{LocalProcesses, PodProcesses, Processes, is_gone};
use crate::model::names::PodUid;

/// Files, mappings and threads of a pod that are looked at before those of pods with more: 110 such pods take about 2 s.
const FILES_FIRST: usize = 10_000;
/// For how long at most.
const TIME_FIRST: Duration = Duration::from_millis(100);
/// Of a pod with more.
const FILES_MOST: usize = 1 << 20;
/// How often a process is looked at of which something was gone.
const TRIES: u32 = 8;
/// How often the processes of pods are listed again of which one had ended.
const LISTINGS: u32 = 3;
/// Processes that may end while one listing comes to them. A program that starts others all the time adds some to its end.
const ENDED_MOST: u32 = 64;
/// For processes that come while the others are listed.
const NEW_FOR: Duration = Duration::from_secs(1);
/// `CAP_SYS_ADMIN`
const SYS_ADMIN: u64 = 1 << 21;

/// What a look has found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OpenDevices {
    /// By pod, the processes that have a device open or mapped, each with the first that was found. Processes that an
    /// administrator has let administrate the node are left out.
    pub openers: BTreeMap<PodUid, BTreeMap<u32, DeviceNumber>>,
    /// Pods not all of whose files were looked at.
    pub unfinished: BTreeSet<PodUid>,
    /// Those of them that the look did not come to, because others held it up.
    pub unreached: BTreeSet<PodUid>,
}

impl OpenDevices {
    /// In words, why nobody knows who has a device open. None: the look came to all pods.
    pub fn not_reached(&self) -> Option<String> {
        let pods = self.unreached.len();
        (pods > 0)
            .then(|| format!("the open files of {pods} pods were not looked at: other pods held the look up"))
    }
}

/// One look at the files of pods' processes.
#[derive(Debug)]
pub struct FileLook {
    /// In the order in which they are looked at.
    pods: Vec<(PodUid, Vec<u32>)>,
    devices: BTreeSet<DeviceNumber>,
    skipped: BTreeSet<u32>,
    until: Instant,
    /// The process that is looked at, and how many files were.
    at: AtomicU32,
    steps: AtomicU64,
    progress: Mutex<SearchProgress>,
}

#[derive(Debug, Clone, Default)]
struct SearchProgress {
    found: OpenDevices,
    /// The pod that is looked at.
    at: Option<PodUid>,
}

impl FileLook {
    /// For these devices, at these pods' processes but those that hold looks up (`skipped`). Ends at `until`.
    pub fn new(
        pods: BTreeMap<PodUid, Vec<u32>>,
        devices: BTreeSet<DeviceNumber>,
        skipped: BTreeSet<u32>,
        until: Instant,
    ) -> Self {
        let all: BTreeSet<PodUid> = pods.keys().cloned().collect();
        let found = OpenDevices { unfinished: all.clone(), unreached: all, ..OpenDevices::default() };
        let progress = Mutex::new(SearchProgress { found, at: None });
        let (pods, at, steps) = (pods.into_iter().collect(), AtomicU32::new(0), AtomicU64::new(0));
        Self { pods, devices, skipped, until, at, steps, progress }
    }

    /// What is left of a look that was held up, until the same time. What that one found stays found. The pod that held it
    /// up comes last: it may have more such processes.
    pub fn after(held_up: &Self, skipped: BTreeSet<u32>) -> Self {
        let SearchProgress { found, at } = held_up.progress();
        let left = held_up.pods.iter().filter(|(pod, _)| found.unfinished.contains(pod));
        let mut pods: Vec<_> = left.cloned().collect();
        pods.sort_by_key(|(pod, _)| Some(pod) == at.as_ref());
        let progress = Mutex::new(SearchProgress { found, at: None });
        let (devices, until) = (held_up.devices.clone(), held_up.until);
        Self { pods, devices, skipped, until, at: AtomicU32::new(0), steps: AtomicU64::new(0), progress }
    }

    /// The process that is looked at; 0 before the first.
    pub fn at(&self) -> u32 {
        self.at.load(Ordering::SeqCst)
    }

    /// Grows as long as nothing holds the look up.
    pub fn steps(&self) -> u64 {
        self.steps.load(Ordering::SeqCst)
    }

    /// What was found until now.
    pub fn found(&self) -> OpenDevices {
        self.progress().found
    }

    /// Of a test's processes: one has a device open.
    #[cfg(test)]
    pub fn opened(&self, pod: &str, pid: u32, device: DeviceNumber) {
        self.note(|found| _ = found.openers.entry(pod.into()).or_default().insert(pid, device));
    }

    /// Of a test's processes: all have a device open.
    #[cfg(test)]
    pub fn opened_everywhere(&self, device: DeviceNumber) {
        for (pod, pids) in &self.pods {
            pids.iter().for_each(|pid| self.opened(pod.as_str(), *pid, device));
        }
    }

    /// Looks at a test's processes: at all of a pod, pod by pod.
    #[cfg(test)]
    pub fn each(&self, at: impl Fn(&Self, &PodUid, u32)) {
        for (pod, pids) in &self.pods {
            for pid in pids.iter().filter(|pid| !self.skipped.contains(pid)) {
                self.is_at(pod);
                self.stands_at(*pid);
                at(self, pod, *pid);
            }
        }
    }

    /// A process that holds looks up is not asked whose it is. One that is not in the look's pods may be of any of these.
    fn pass_over(&self, pid: u32, pods: &mut BTreeMap<PodUid, PodSearch<'_>>) {
        let owner = self.pods.iter().find(|(_, pids)| pids.contains(&pid)).map(|(pod, _)| pod);
        let concerned = pods.iter_mut().filter(|(pod, _)| owner.is_none_or(|owner| owner == *pod));
        concerned.for_each(|(_, search)| search.is_whole = false);
    }

    /// Of a test's processes: all of a pod were looked at.
    #[cfg(test)]
    pub fn looked_through(&self, pod: &PodUid) {
        self.finish(pod);
    }

    /// The look is at that process.
    pub(crate) fn stands_at(&self, pid: u32) {
        self.at.store(pid, Ordering::SeqCst);
    }

    fn is_at(&self, pod: &PodUid) {
        let mut progress = self.progress.lock().unwrap_or_else(PoisonError::into_inner);
        progress.found.unreached.remove(pod);
        progress.at = Some(pod.clone());
    }

    fn progress(&self) -> SearchProgress {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn note(&self, what: impl FnOnce(&mut OpenDevices)) {
        what(&mut self.progress.lock().unwrap_or_else(PoisonError::into_inner).found);
    }

    fn finish(&self, pod: &PodUid) {
        self.note(|found| _ = found.unfinished.remove(pod));
    }

    fn step(&self) {
        self.steps.fetch_add(1, Ordering::SeqCst);
    }
}

/// Looks at the processes of the look's pods.
pub(super) fn look_at_files(processes: &LocalProcesses, look: &FileLook) {
    let by_number = processes.numbers_as_we_do();
    let mut pods: Vec<_> = look.pods.iter().map(|(pod, pids)| (pod, pids)).collect();
    for most in [FILES_FIRST, FILES_MOST] {
        let (mut large, mut had_ended) = (Vec::new(), BTreeMap::new());
        let mut waiting = u32::try_from(pods.len()).unwrap_or(u32::MAX);
        for (pod, pids) in pods {
            let now = Instant::now();
            let Some(rest) = look.until.checked_duration_since(now).filter(|rest| !rest.is_zero()) else {
                return;
            };
            let part = match most {
                FILES_FIRST => TIME_FIRST.min(rest / 2 / waiting.max(1)),
                _ => rest / waiting.max(1),
            };
            waiting = waiting.saturating_sub(1);
            let mut search = PodSearch::new(processes, look, by_number, most, now + part);
            search.pod(pod, pids);
            match search.outcome() {
                SearchOutcome::Whole => look.finish(pod),
                SearchOutcome::HadEnded => _ = had_ended.insert(pod.clone(), search),
                SearchOutcome::Partly => large.push((pod, pids)),
            }
        }
        let waiting = u32::try_from(had_ended.len()).unwrap_or(u32::MAX).max(1);
        let each = match most {
            FILES_FIRST => TIME_FIRST,
            _ => look.until.saturating_duration_since(Instant::now()) / waiting,
        };
        let partly = list_again(processes, look, had_ended, each);
        large.extend(look.pods.iter().filter(|(pod, _)| partly.contains(pod)).map(|(pod, pids)| (pod, pids)));
        pods = large;
    }
}

/// Looks at what pods have by now of which a process had ended: it may have left a device to another one. Returns those that
/// have more than could be looked at in that time, `each`.
fn list_again(
    processes: &LocalProcesses,
    look: &FileLook,
    mut pods: BTreeMap<PodUid, PodSearch<'_>>,
    each: Duration,
) -> BTreeSet<PodUid> {
    let mut time: BTreeMap<_, _> = pods.keys().map(|pod| (pod.clone(), each)).collect();
    let mut partly = BTreeSet::new();
    for _ in 0..LISTINGS {
        if pods.is_empty() {
            break;
        }
        pods.values_mut().for_each(|search| search.has_ended = false);
        // A listing that breaks off says nothing about anybody.
        let Some(()) = look_as_listed(processes, look, &mut pods, &mut time) else { return partly };
        pods.retain(|pod, search| match search.outcome() {
            SearchOutcome::Whole => {
                look.finish(pod);
                false
            }
            SearchOutcome::HadEnded => true,
            SearchOutcome::Partly => {
                partly.insert(pod.clone());
                false
            }
        });
    }
    partly
}

/// Looks at the processes of these pods as they are listed, for the time that each pod has left. None: the listing could not
/// be read to its end.
fn look_as_listed(
    processes: &LocalProcesses,
    look: &FileLook,
    pods: &mut BTreeMap<PodUid, PodSearch<'_>>,
    time: &mut BTreeMap<PodUid, Duration>,
) -> Option<()> {
    let mut ended = 0;
    let mut listing = numbered(&processes.root, NEW_FOR).ok()?;
    for pid in listing.by_ref() {
        let begun = Instant::now();
        if begun >= look.until {
            return None;
        }
        look.step();
        let pid = pid.ok()?;
        if look.skipped.contains(&pid) {
            look.pass_over(pid, pods);
            continue;
        }
        look.stands_at(pid);
        let pod = match processes.owner(pid) {
            Ok(Some(ProcessOwner::Pod { pod, .. })) => Some(pod),
            Ok(Some(ProcessOwner::Hidden)) | Err(_) => Some(PodProcesses::UNTOLD.into()),
            Ok(Some(ProcessOwner::Host)) => continue,
            Ok(None) => None,
        };
        let has_ended = match pod {
            Some(pod) => {
                let (Some(search), Some(left)) = (pods.get_mut(&pod), time.get_mut(&pod)) else { continue };
                search.until = look.until.min(begun + *left);
                let is_there = search.also(&pod, pid);
                *left = left.saturating_sub(begun.elapsed());
                !is_there
            }
            // It may have been of any of them.
            None => {
                pods.values_mut().for_each(|search| search.has_ended = true);
                true
            }
        };
        ended += u32::from(has_ended);
        if ended >= ENDED_MOST {
            break;
        }
    }
    // What was not looked at may be of any of them.
    if ended >= ENDED_MOST || listing.is_cut() {
        pods.values_mut().for_each(|search| search.has_ended = true);
    }
    Some(())
}

/// Through one pod.
struct PodSearch<'a> {
    processes: &'a LocalProcesses,
    look: &'a FileLook,
    /// The numbers of processes are those of system calls.
    by_number: bool,
    left: usize,
    until: Instant,
    is_whole: bool,
    /// A process that was listed had ended.
    has_ended: bool,
    /// Processes that were looked at, with their starts.
    looked_at: BTreeSet<(u32, u64)>,
    missed: Missed,
}

/// What was not seen of a process.
#[derive(Debug, Default)]
struct Missed {
    /// Something was listed, and gone when it was looked at.
    vanished: bool,
    /// The kernel does not tell what one of its descriptors is.
    untold: bool,
}

/// What a search says of its pod.
enum SearchOutcome {
    Whole,
    /// But for processes that have ended.
    HadEnded,
    /// There is more than was looked at, or it cannot be looked at.
    Partly,
}

/// What a thread shows of the mappings of its process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mappings {
    /// One of the devices that are looked for.
    Device(DeviceNumber),
    /// Other files.
    Others,
    /// No file is mapped, or the thread has ended.
    Unseen,
}

impl<'a> PodSearch<'a> {
    fn new(
        processes: &'a LocalProcesses,
        look: &'a FileLook,
        by_number: bool,
        left: usize,
        until: Instant,
    ) -> Self {
        let (looked_at, missed) = (BTreeSet::new(), Missed::default());
        Self { processes, look, by_number, left, until, is_whole: true, has_ended: false, looked_at, missed }
    }

    fn outcome(&self) -> SearchOutcome {
        match (self.is_whole && self.left > 0, self.has_ended) {
            (false, _) => SearchOutcome::Partly,
            (true, true) => SearchOutcome::HadEnded,
            (true, false) => SearchOutcome::Whole,
        }
    }

    /// Notes who has a device open.
    fn pod(&mut self, pod: &PodUid, pids: &[u32]) {
        for &pid in pids {
            self.one(pod, pid);
            if self.left == 0 {
                return;
            }
        }
    }

    /// The same of a process that was listed just now, unless it was looked at. False: it had ended.
    fn also(&mut self, pod: &PodUid, pid: u32) -> bool {
        match self.processes.started(pid) {
            Ok(Some(started)) if self.looked_at.contains(&(pid, started)) => true,
            // What is left of one that nobody has waited for.
            Ok(None) if self.folder(pid).exists() => true,
            Ok(None) => {
                self.has_ended = true;
                false
            }
            Ok(Some(_)) | Err(_) => {
                self.one(pod, pid);
                self.folder(pid).exists()
            }
        }
    }

    fn one(&mut self, pod: &PodUid, pid: u32) {
        if self.look.skipped.contains(&pid) {
            self.is_whole = false;
            return;
        }
        self.look.is_at(pod);
        self.look.stands_at(pid);
        if !self.goes_on() {
            return;
        }
        let folder = self.folder(pid);
        let mut opened = None;
        for _ in 0..TRIES {
            self.missed = Missed::default();
            opened = self.process(&folder, pid);
            if opened.is_some() || !self.missed.vanished || self.left == 0 {
                break;
            }
        }
        let Missed { vanished, untold } = std::mem::take(&mut self.missed);
        let may_administrate = (opened.is_some() || untold) && may_administrate(&folder);
        // Asked last: what was seen before was that process's.
        let is_its = match self.processes.owner(pid) {
            Ok(Some(ProcessOwner::Pod { pod: owner, .. })) => owner == *pod,
            Ok(Some(ProcessOwner::Host) | None) => false,
            // It may see to that.
            Ok(Some(ProcessOwner::Hidden)) | Err(_) => true,
        };
        let started = self.processes.started(pid);
        let is_there = is_its && !matches!(started, Ok(None));
        match started {
            Ok(Some(started)) if is_its => _ = self.looked_at.insert((pid, started)),
            Ok(_) => self.has_ended = true,
            Err(_) => self.is_whole = false,
        }
        match opened.filter(|_| is_its && !may_administrate) {
            Some(device) => self.look.note(|found| {
                found.openers.entry(pod.clone()).or_default().insert(pid, device);
            }),
            None if is_there && !may_administrate => self.is_whole &= !vanished && !untold,
            None => {}
        }
    }

    fn folder(&self, pid: u32) -> PathBuf {
        self.processes.root.join(pid.to_string())
    }

    /// The first of the devices that the process has open or mapped. Threads may have tables of open files of their own:
    /// each table is looked at once. They have their mappings together; a first thread that has ended shows none.
    fn process(&mut self, folder: &Path, pid: u32) -> Option<DeviceNumber> {
        if let Some(device) = self.table(folder, DescriptorTable::Process(pid)) {
            return Some(device);
        }
        let mut mapped = self.mappings(folder);
        let mut last = pid;
        if let Mappings::Device(device) = mapped {
            return Some(device);
        }
        for thread in entries(&folder.join("task")) {
            if !self.goes_on() {
                return None;
            }
            let Some(thread) = self.listed(thread) else { continue };
            let Some(number) = name(&thread).and_then(|name| name.parse::<u32>().ok()) else { continue };
            if mapped == Mappings::Unseen && number != pid {
                // Not listed there, and to be found by its number: proc(5).
                let by_number = self.folder(number);
                mapped = self.mappings(&by_number);
                if let Mappings::Device(device) = mapped {
                    return Some(device);
                }
            }
            if number == pid || (self.by_number && have_one_table(last, number)) {
                continue;
            }
            if let Some(device) = self.table(&thread, DescriptorTable::Thread(number)) {
                return Some(device);
            }
            last = number;
        }
        None
    }

    fn table(&mut self, folder: &Path, table: DescriptorTable) -> Option<DeviceNumber> {
        for file in entries(&folder.join("fd")) {
            if !self.goes_on() {
                return None;
            }
            let Some(file) = self.listed(file) else { continue };
            let Some(device) = self.asked(&file) else { continue };
            // Simulated nodes have no driver that could open them.
            if self.processes.are_simulated() {
                return Some(device);
            }
            if let Some(number) = name(&file).and_then(|name| name.parse().ok())
                && let Some(device) = self.opened(table, number)
            {
                return Some(device);
            }
        }
        None
    }

    /// A device stays in use by its mappings after its descriptors are closed.
    fn mappings(&mut self, folder: &Path) -> Mappings {
        let mut found = Mappings::Unseen;
        for file in entries(&folder.join("map_files")) {
            if !self.goes_on() {
                break;
            }
            let Some(file) = self.listed(file) else { continue };
            if let Some(device) = self.asked(&file) {
                return Mappings::Device(device);
            }
            found = Mappings::Others;
        }
        found
    }

    /// Which of the devices a link of the process's leads to: the device, or its place alone.
    fn asked(&mut self, file: &Path) -> Option<DeviceNumber> {
        let asked = device_at(file);
        self.listed(asked)?.filter(|device| self.look.devices.contains(device))
    }

    /// The device is open, which the kernel allows nobody whose control group may not.
    fn opened(&mut self, table: DescriptorTable, number: i32) -> Option<DeviceNumber> {
        let meaning =
            if self.by_number { descriptor::meaning(table, number) } else { Err(NoMeaning::Untold) };
        match meaning {
            Ok(Meaning::Device(device)) if self.look.devices.contains(&device) => return Some(device),
            Ok(Meaning::Place) => {}
            // It was one of the devices a moment ago.
            Ok(Meaning::Device(_) | Meaning::Other) | Err(NoMeaning::Gone) => self.missed.vanished = true,
            Err(NoMeaning::Untold) => self.missed.untold = true,
        }
        None
    }

    /// False once the pod's files or its time are used up.
    fn goes_on(&mut self) -> bool {
        self.look.step();
        self.left = self.left.saturating_sub(1);
        if Instant::now() >= self.until {
            self.left = 0;
        }
        self.left > 0
    }

    /// What was asked about something that was listed.
    fn listed<T>(&mut self, asked: io::Result<T>) -> Option<T> {
        match asked {
            Ok(found) => Some(found),
            Err(error) => {
                self.missed.vanished |= is_gone(&error);
                self.is_whole &= is_gone(&error);
                None
            }
        }
    }
}

/// What is in a folder of a process, or why that cannot be listed.
fn entries(folder: &Path) -> impl Iterator<Item = io::Result<PathBuf>> + use<> {
    let (listed, problem) = match fs::read_dir(folder) {
        Ok(listed) => (Some(listed), None),
        Err(error) => (None, Some(Err(error))),
    };
    listed.into_iter().flatten().map(|entry| Ok(entry?.path())).chain(problem)
}

fn name(file: &Path) -> Option<&str> {
    file.file_name()?.to_str()
}

/// The process's container was given the capability `SYS_ADMIN` in the user namespace that we are in, the node's. The
/// bounding set says so for as long as the process lives, and nobody can add to it there (capabilities(7)). Whoever goes to
/// a user namespace of its own has all capabilities in it, and no way back: so the set is read first.
fn may_administrate(process: &Path) -> bool {
    let Ok(own) = fs::read_link("/proc/self/ns/user") else { return false };
    let status = fs::read(process.join("status")).unwrap_or_default();
    let is_of_node = || fs::read_link(process.join("ns/user")).is_ok_and(|namespace| namespace == own);
    has_sys_admin(&String::from_utf8_lossy(&status)) && is_of_node()
}

/// By proc_pid_status(5).
fn has_sys_admin(status: &str) -> bool {
    let bounds = status.lines().find_map(|line| line.strip_prefix("CapBnd:"));
    bounds.is_some_and(|bounds| u64::from_str_radix(bounds.trim(), 16).is_ok_and(|all| all & SYS_ADMIN != 0))
}

#[cfg(test)]
#[path = "open_devices/tests.rs"]
mod tests;
