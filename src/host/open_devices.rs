//! Which pods have a device open or mapped, by the numbers of its node: whoever has a descriptor of it may have been
//! handed it by another process, and goes on using it after that one has ended.
//!
//! Nothing is opened. A descriptor that names the place of a node alone (`O_PATH`) is no open device: anybody can have one
//! who can make a node.
//!
//! What a look costs is bounded, because tenants say how many files they have, and how long each is waited for (while
//! another thread changes its mappings without end). Of each pod [`FILES_FIRST`] are looked at, for [`TIME_FIRST`]; then, of
//! those that have more, [`FILES_MOST`], for equal parts of the time that is left; and nothing once the look's time is over.
//! So no pod hides another one's files behind its own. A look can also be held up for good by
//! a process (while another of its threads maps memory that its own file system does not bring) or by a file server that
//! does not answer. So it runs on a thread that its caller can leave ([`FileLook::steps`]); what was found until then counts.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::CString;
use std::fs;
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use nix::libc;

use super::process::{LocalProcesses, is_gone};
use crate::model::names::PodUid;

/// Major and minor number of a character device.
pub type DeviceNumber = (u32, u32);

/// Files, mappings and threads of a pod that are looked at before those of pods with more: 110 such pods take about 2 s.
const FILES_FIRST: usize = 10_000;
/// For how long at most.
const TIME_FIRST: Duration = Duration::from_millis(100);
/// How often a descriptor is read that is told to be another file than the one at its number.
const READS: u32 = 8;
/// Of a pod with more.
const FILES_MOST: usize = 1 << 20;
/// `CAP_SYS_ADMIN`
const SYS_ADMIN: u64 = 1 << 21;
/// `enum kcmp_type`
const KCMP_FILES: libc::c_long = 2;

/// What a look has found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OpenDevices {
    /// By pod, the processes that have a device open or mapped, each with the first that was found. Processes that an
    /// administrator has let administrate the node are left out.
    pub openers: BTreeMap<PodUid, BTreeMap<u32, DeviceNumber>>,
    /// Pods not all of whose files were looked at.
    pub unfinished: BTreeSet<PodUid>,
}

/// One look at the files of pods' processes.
#[derive(Debug)]
pub struct FileLook {
    pods: BTreeMap<PodUid, Vec<u32>>,
    devices: BTreeSet<DeviceNumber>,
    skipped: BTreeSet<u32>,
    until: Instant,
    /// The process that is looked at, and how many files were.
    at: AtomicU32,
    steps: AtomicU64,
    found: Mutex<OpenDevices>,
}

impl FileLook {
    /// For these devices, at these pods' processes but those that hold looks up (`skipped`). Ends at `until`.
    pub fn new(
        pods: BTreeMap<PodUid, Vec<u32>>,
        devices: BTreeSet<DeviceNumber>,
        skipped: BTreeSet<u32>,
        until: Instant,
    ) -> Self {
        let unfinished = pods.keys().cloned().collect();
        let found = Mutex::new(OpenDevices { unfinished, ..OpenDevices::default() });
        Self { pods, devices, skipped, until, at: AtomicU32::new(0), steps: AtomicU64::new(0), found }
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
        self.found.lock().unwrap_or_else(PoisonError::into_inner).clone()
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

    /// Of a test's processes: the look is at that one.
    #[cfg(test)]
    pub fn stands_at(&self, pid: u32) {
        self.at.store(pid, Ordering::SeqCst);
    }

    fn note(&self, what: impl FnOnce(&mut OpenDevices)) {
        what(&mut self.found.lock().unwrap_or_else(PoisonError::into_inner));
    }

    fn step(&self) {
        self.steps.fetch_add(1, Ordering::SeqCst);
    }
}

/// Looks at the processes of the look's pods.
pub(super) fn look_at_files(processes: &LocalProcesses, look: &FileLook) {
    let by_number = processes.numbers_as_we_do();
    let mut pods: BTreeMap<_, _> = look.pods.iter().collect();
    for most in [FILES_FIRST, FILES_MOST] {
        let mut large = BTreeMap::new();
        let mut waiting = u32::try_from(pods.len()).unwrap_or(u32::MAX);
        for (pod, pids) in pods {
            let now = Instant::now();
            let Some(rest) = look.until.checked_duration_since(now).filter(|rest| !rest.is_zero()) else {
                return;
            };
            let part = if most == FILES_FIRST { TIME_FIRST } else { rest / waiting.max(1) };
            waiting = waiting.saturating_sub(1);
            let until = now + part.min(rest);
            let search = Search { look, left: most, until, is_whole: true, processes, by_number };
            if search.pod(pod, pids) {
                look.note(|found| _ = found.unfinished.remove(pod));
            } else {
                large.insert(pod, pids);
            }
        }
        pods = large;
    }
}

/// Through one pod.
struct Search<'a> {
    look: &'a FileLook,
    left: usize,
    until: Instant,
    is_whole: bool,
    processes: &'a LocalProcesses,
    /// The numbers of processes are those of system calls.
    by_number: bool,
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

impl Search<'_> {
    /// Notes who has a device open. False if there is more than was looked at.
    fn pod(mut self, pod: &PodUid, pids: &[u32]) -> bool {
        for &pid in pids {
            if self.look.skipped.contains(&pid) {
                self.is_whole = false;
                continue;
            }
            self.look.at.store(pid, Ordering::SeqCst);
            if !self.goes_on() {
                return false;
            }
            let folder = self.processes.root.join(pid.to_string());
            if let Some(device) = self.process(&folder, pid)
                && !may_administrate(&folder)
            {
                self.look.note(|found| {
                    found.openers.entry(pod.clone()).or_default().insert(pid, device);
                });
            }
            if self.left == 0 {
                return false;
            }
        }
        self.is_whole
    }

    /// The first of the devices that the process has open or mapped. Threads may have tables of open files of their own:
    /// each table is looked at once. They have their mappings together; a first thread that has ended shows none.
    fn process(&mut self, folder: &Path, pid: u32) -> Option<DeviceNumber> {
        if let Some(device) = self.table(folder) {
            return Some(device);
        }
        let mut mapped = self.mappings(folder);
        let mut last = pid;
        if let Mappings::Device(device) = mapped {
            return Some(device);
        }
        for thread in self.entries(&folder.join("task")) {
            if !self.goes_on() {
                return None;
            }
            let Some(number) = name(&thread).and_then(|name| name.parse::<u32>().ok()) else { continue };
            if mapped == Mappings::Unseen && number != pid {
                // Not listed there, and to be found by its number: proc(5).
                mapped = self.mappings(&self.processes.root.join(number.to_string()));
                if let Mappings::Device(device) = mapped {
                    return Some(device);
                }
            }
            if number == pid || (self.by_number && have_one_table(last, number)) {
                continue;
            }
            if let Some(device) = self.table(&thread) {
                return Some(device);
            }
            last = number;
        }
        None
    }

    fn table(&mut self, folder: &Path) -> Option<DeviceNumber> {
        for file in self.entries(&folder.join("fd")) {
            if !self.goes_on() {
                return None;
            }
            let Some(device) = self.asked(&file) else { continue };
            // Simulated nodes have no driver that could open them.
            if self.processes.are_simulated() || self.is_open(folder, &file) {
                return Some(device);
            }
        }
        None
    }

    /// A device stays in use by its mappings after its descriptors are closed.
    fn mappings(&mut self, folder: &Path) -> Mappings {
        let mut found = Mappings::Unseen;
        for file in self.entries(&folder.join("map_files")) {
            if !self.goes_on() {
                break;
            }
            if let Some(device) = self.asked(&file) {
                return Mappings::Device(device);
            }
            found = Mappings::Others;
        }
        found
    }

    fn asked(&self, file: &Path) -> Option<DeviceNumber> {
        let device = kernel_file(file)?.device?;
        self.look.devices.contains(&device).then_some(device)
    }

    /// More than the device's place is open, which the kernel allows nobody whose control group may not. A process can have
    /// its number mean the place and another open file by turns: what is said of the descriptor and what is said of the file
    /// must be of one file. A node that somebody made on a file system that tells other numbers of a file than the kernel has
    /// (overlay) is not found so: who sets out to hide has other ways, and nobody may keep others off a GPU without one.
    fn is_open(&self, folder: &Path, file: &Path) -> bool {
        let Some(name) = name(file) else { return false };
        let info = folder.join("fdinfo").join(name);
        for _ in 0..READS {
            let Some(descriptor) = Descriptor::read(&info).filter(|one| !one.is_place) else { return false };
            let Some(now) = kernel_file(file) else { return false };
            if !now.device.is_some_and(|device| self.look.devices.contains(&device)) {
                return false;
            }
            if descriptor.identity.is_none_or(|identity| identity == now.identity) {
                return true;
            }
        }
        false
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

    /// None, if there is no such folder any more.
    fn entries(&mut self, folder: &Path) -> impl Iterator<Item = std::path::PathBuf> + use<> {
        let listed = match fs::read_dir(folder) {
            Ok(entries) => Some(entries),
            Err(error) if is_gone(&error) => None,
            Err(_) => {
                self.is_whole = false;
                None
            }
        };
        // Whoever ends meanwhile has no more.
        listed.into_iter().flat_map(|entries| entries.map_while(Result::ok)).map(|entry| entry.path())
    }
}

fn name(file: &Path) -> Option<&str> {
    file.file_name()?.to_str()
}

/// Which file it is: the identifier of its mount, and its inode.
type FileIdentity = (u64, u64);

/// What the kernel knows of a file.
struct KernelFile {
    /// Of a character device.
    device: Option<DeviceNumber>,
    identity: FileIdentity,
}

/// The file is not opened, and a server of the file is not asked for what the kernel knows.
#[allow(unsafe_code)]
fn kernel_file(file: &Path) -> Option<KernelFile> {
    let path = CString::new(file.as_os_str().as_bytes()).ok()?;
    let mut found = MaybeUninit::<libc::statx>::zeroed();
    let flags = libc::AT_STATX_DONT_SYNC | libc::AT_NO_AUTOMOUNT;
    let mask = libc::STATX_TYPE | libc::STATX_INO | libc::STATX_MNT_ID;
    // SAFETY: the path ends with a null byte, and the place is as large as the call expects.
    let told = unsafe { libc::statx(libc::AT_FDCWD, path.as_ptr(), flags, mask, found.as_mut_ptr()) };
    if told != 0 {
        return None;
    }
    // SAFETY: all zeros is a value of the type, and the call has succeeded.
    let found = unsafe { found.assume_init() };
    let is_device = u32::from(found.stx_mode) & libc::S_IFMT == libc::S_IFCHR;
    let device = is_device.then_some((found.stx_rdev_major, found.stx_rdev_minor));
    Some(KernelFile { device, identity: (found.stx_mnt_id, found.stx_ino) })
}

/// What proc_pid_fdinfo(5) tells of a descriptor, all of the same file.
struct Descriptor {
    /// It names the file's place, and the file is not open (`O_PATH`).
    is_place: bool,
    /// None where the kernel does not tell (before 5.14).
    identity: Option<FileIdentity>,
}

impl Descriptor {
    fn read(info: &Path) -> Option<Self> {
        let text = fs::read_to_string(info).ok()?;
        let line = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
        let flags = u64::from_str_radix(line("flags:")?, 8).ok()?;
        let number = |name: &str| line(name)?.parse().ok();
        let identity = number("mnt_id:").zip(number("ino:"));
        Some(Self { is_place: flags & u64::from(libc::O_PATH.cast_unsigned()) != 0, identity })
    }
}

/// `kcmp(2)`. False where the kernel cannot tell.
#[allow(unsafe_code)]
fn have_one_table(one: u32, other: u32) -> bool {
    // SAFETY: the call takes numbers and no pointers.
    let order =
        unsafe { libc::syscall(libc::SYS_kcmp, one.cast_signed(), other.cast_signed(), KCMP_FILES, 0, 0) };
    order == 0
}

/// The process's container was given the capability `SYS_ADMIN` in the user namespace that we are in, the node's. The
/// bounding set says so for as long as the process lives, and nobody can add to it (capabilities(7)).
fn may_administrate(process: &Path) -> bool {
    let Ok(own) = fs::read_link("/proc/self/ns/user") else { return false };
    let is_of_node = fs::read_link(process.join("ns/user")).is_ok_and(|namespace| namespace == own);
    let status = || fs::read(process.join("status")).unwrap_or_default();
    is_of_node && has_sys_admin(&String::from_utf8_lossy(&status()))
}

/// By proc_pid_status(5).
fn has_sys_admin(status: &str) -> bool {
    let bounds = status.lines().find_map(|line| line.strip_prefix("CapBnd:"));
    bounds.is_some_and(|bounds| u64::from_str_radix(bounds.trim(), 16).is_ok_and(|all| all & SYS_ADMIN != 0))
}

#[cfg(test)]
#[path = "open_devices/tests.rs"]
mod tests;
