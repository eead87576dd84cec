use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{OpenOptionsExt, symlink};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::sync::mpsc;
use std::time::Duration;

use nix::sched::{CloneFlags, unshare};

use super::*;
use crate::host::PidNamespace;

const NULL: DeviceNumber = (1, 3);
const ZERO: DeviceNumber = (1, 5);
const FULL: DeviceNumber = (1, 7);
const RANDOM: DeviceNumber = (1, 8);
const URANDOM: DeviceNumber = (1, 9);

const POD: &str = "11111111-0000-4000-8000-000000000001";
const OTHER: &str = "22222222-0000-4000-8000-000000000002";

/// A process that has the file open as its input, and nothing else of note.
struct Holding(Child);

impl Holding {
    fn file(file: File) -> Self {
        let (out, err) = (Stdio::piped(), Stdio::piped());
        Self(Command::new("sleep").arg("600").stdin(file).stdout(out).stderr(err).spawn().unwrap())
    }
}

impl Drop for Holding {
    fn drop(&mut self) {
        let _ = (self.0.kill(), self.0.wait());
    }
}

fn place_of(path: &str) -> File {
    OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(path).unwrap()
}

/// A /proc of the test's making.
struct Shown {
    dir: tempfile::TempDir,
    pids: PidNamespace,
}

impl Shown {
    fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap(), pids: PidNamespace::Host }
    }

    /// What /proc tells of a real process, as that of a pod, with the rights that a container has.
    fn add(&self, pid: u32, of: u32, pod: &str) -> PathBuf {
        let folder = self.dir.path().join(pid.to_string());
        fs::create_dir_all(folder.join("ns")).unwrap();
        let real = PathBuf::from(format!("/proc/{of}"));
        for name in ["fd", "fdinfo", "map_files", "task", "stat"] {
            symlink(real.join(name), folder.join(name)).unwrap();
        }
        fs::write(folder.join("cgroup"), format!("0::/kubepods/burstable/pod{pod}/c\n")).unwrap();
        fs::write(folder.join("status"), "Name:\tx\nCapBnd:\t00000000a80425fb\n").unwrap();
        folder
    }

    fn processes(&self) -> LocalProcesses {
        LocalProcesses { root: self.dir.path().to_owned(), nvml_pids: self.pids }
    }

    fn look(&self, device: DeviceNumber) -> OpenDevices {
        look(&self.processes(), device, &[])
    }

    fn openers(&self, device: DeviceNumber) -> BTreeMap<PodUid, Vec<u32>> {
        let found = self.look(device);
        assert_eq!(found.unfinished, BTreeSet::new());
        found.openers.into_iter().map(|(pod, pids)| (pod, pids.into_keys().collect())).collect()
    }
}

fn look(processes: &LocalProcesses, device: DeviceNumber, skipped: &[u32]) -> OpenDevices {
    use crate::host::Processes;
    let until = Instant::now() + Duration::from_secs(60);
    let pods = processes.by_pod(until).unwrap().by_pod;
    let look = FileLook::new(pods, BTreeSet::from([device]), skipped.iter().copied().collect(), until);
    processes.look_at_files(&look);
    look.found()
}

#[test]
fn whoever_has_a_device_open_is_found_by_its_numbers_and_not_by_its_name() {
    let shown = Shown::new();
    let full = Holding::file(File::open("/dev/full").unwrap());
    let null = Holding::file(File::open("/dev/null").unwrap());
    shown.add(7, full.0.id(), POD);
    shown.add(8, null.0.id(), OTHER);
    assert_eq!(shown.openers(FULL), BTreeMap::from([(PodUid::new(POD), vec![7])]));
    // The other may have inherited that one, too.
    assert_eq!(shown.openers(NULL).get(&PodUid::new(OTHER)), Some(&vec![8]));
    assert_eq!(shown.openers((195, 0)), BTreeMap::new());
    drop(full);
    fs::remove_dir_all(shown.dir.path().join("7")).unwrap();
    assert_eq!(shown.openers(FULL), BTreeMap::new(), "it has ended");
}

/// Anybody who can make a node can have one: nobody could keep others off GPUs that way.
#[test]
fn the_place_of_a_device_is_not_the_device() {
    let mut shown = Shown::new();
    let place = Holding::file(place_of("/dev/full"));
    shown.add(7, place.0.id(), POD);
    assert_eq!(shown.openers(FULL), BTreeMap::new());
    shown.pids = PidNamespace::Own;
    assert_eq!(shown.openers(FULL).len(), 1, "simulated nodes can be had in no other way");
}

/// A process can have a descriptor mean the place of a device and another open file by turns: its number and its flags
/// were read one after the other, and a pod that never had the device kept it from everybody.
#[test]
fn whoever_changes_between_the_place_and_an_open_file_has_no_device_open() {
    /// Nothing of this program's opens it.
    const TTY: DeviceNumber = (5, 0);
    let shown = Shown::new();
    shown.add(7, std::process::id(), POD);
    let (place, null) = (place_of("/dev/tty"), File::open("/dev/null").unwrap());
    let changing: Vec<File> = (0..20).map(|_| null.try_clone().unwrap()).collect();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::SeqCst) {
                for file in [&place, &null] {
                    changing.iter().for_each(|one| dup_onto(file, one));
                }
            }
        });
        let seen: Vec<_> =
            (0..200).map(|_| shown.look(TTY).openers).filter(|found| !found.is_empty()).collect();
        is_over.store(true, Ordering::SeqCst);
        assert!(seen.is_empty(), "{seen:?}");
    });
}

/// `dup2(2)`: the second means the same as the first then.
#[allow(unsafe_code)]
fn dup_onto(file: &File, other: &File) {
    // SAFETY: both are open, and stay so.
    unsafe { libc::dup2(file.as_raw_fd(), other.as_raw_fd()) };
}

#[test]
fn a_process_that_may_administrate_the_node_is_left_out_and_no_other_of_its_pod() {
    let shown = Shown::new();
    let [one, two] = [(), ()].map(|()| Holding::file(File::open("/dev/full").unwrap()));
    let folder = shown.add(7, one.0.id(), POD);
    shown.add(9, two.0.id(), POD);
    let all = "Name:\tx\nCapEff:\t0000000000000000\nCapBnd:\t000001ffffffffff\n";
    fs::write(folder.join("status"), all).unwrap();
    let both = BTreeMap::from([(PodUid::new(POD), vec![7, 9])]);
    assert_eq!(shown.openers(FULL), both, "it may be root of a namespace of its own");
    symlink("user:[1]", folder.join("ns/user")).unwrap();
    assert_eq!(shown.openers(FULL), both, "it is");
    fs::remove_file(folder.join("ns/user")).unwrap();
    symlink(fs::read_link("/proc/self/ns/user").unwrap(), folder.join("ns/user")).unwrap();
    assert_eq!(shown.openers(FULL), BTreeMap::from([(PodUid::new(POD), vec![9])]));
    // A process can give itself a name of any lines, and no other rights.
    fs::write(folder.join("status"), "Name:\tx\\nCapBnd:\t000001ffffffffff\nCapBnd:\t00000000a80425fb\n")
        .unwrap();
    assert_eq!(shown.openers(FULL), both);
}

/// What a thread has open that has a table of files of its own, its process does not show.
#[test]
fn a_thread_hides_no_file_in_a_table_of_its_own() {
    let own = std::process::id();
    let shown = Shown::new();
    shown.add(own, own, POD);
    assert_eq!(shown.openers(RANDOM), BTreeMap::new());
    let (told, opened) = mpsc::channel();
    let (end, ended) = mpsc::channel::<()>();
    let thread = std::thread::spawn(move || {
        unshare(CloneFlags::CLONE_FILES).unwrap();
        let file = File::open("/dev/random").unwrap();
        told.send(()).unwrap();
        let _ = ended.recv();
        drop(file);
    });
    opened.recv().unwrap();
    assert_eq!(shown.openers(RANDOM).len(), 1);
    drop(end);
    thread.join().unwrap();
    assert_eq!(shown.openers(RANDOM), BTreeMap::new());
}

#[test]
#[allow(unsafe_code)]
fn a_mapping_of_a_device_whose_descriptor_is_closed_is_found() {
    let own = std::process::id();
    let shown = Shown::new();
    shown.add(own, own, POD);
    assert_eq!(shown.openers(ZERO), BTreeMap::new());
    let file = File::open("/dev/zero").unwrap();
    let (null, length) = (std::ptr::null_mut(), 4096);
    // SAFETY: the kernel chooses the place, and nothing is read there.
    let place = unsafe { libc::mmap(null, length, libc::PROT_READ, libc::MAP_PRIVATE, file.as_raw_fd(), 0) };
    assert_ne!(place, libc::MAP_FAILED);
    drop(file);
    assert_eq!(shown.openers(ZERO).len(), 1);
    // SAFETY: it was mapped above, and nobody has a reference into it.
    assert_eq!(unsafe { libc::munmap(place, length) }, 0);
    assert_eq!(shown.openers(ZERO), BTreeMap::new());
}

/// The memory of a process goes on after its first thread, whose files and mappings are shown no more.
#[test]
fn a_mapping_is_found_also_when_the_first_thread_has_ended() {
    let shown = Shown::new();
    let first = shown.dir.path().join("7");
    for name in ["fd", "map_files", "task/7", "task/8", "task/9", "ns"] {
        fs::create_dir_all(first.join(name)).unwrap();
    }
    fs::write(first.join("stat"), "7 (x) Z 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 77 0 0\n").unwrap();
    fs::write(first.join("cgroup"), format!("0::/kubepods/burstable/pod{POD}/c\n")).unwrap();
    // Another thread that has ended; and one that goes on, as /proc shows it: to who asks for its number.
    fs::create_dir_all(shown.dir.path().join("8/map_files")).unwrap();
    fs::create_dir_all(shown.dir.path().join("9/map_files")).unwrap();
    symlink("/dev/zero", shown.dir.path().join("9/map_files/7f00-7f01")).unwrap();
    assert_eq!(shown.openers(ZERO), BTreeMap::from([(PodUid::new(POD), vec![7])]));
    // What cannot be listed is told.
    fs::remove_dir_all(shown.dir.path().join("9/map_files")).unwrap();
    fs::write(shown.dir.path().join("9/map_files"), "").unwrap();
    assert_eq!(shown.look(ZERO).unfinished, BTreeSet::from([PodUid::new(POD)]));
}

/// The search of one pod with so many files left to look at.
fn searched(shown: &Shown, left: usize) -> OpenDevices {
    use crate::host::Processes;
    let processes = shown.processes();
    let until = Instant::now() + Duration::from_secs(60);
    let pods = processes.by_pod(until).unwrap().by_pod;
    let look = FileLook::new(pods, BTreeSet::from([URANDOM]), BTreeSet::new(), until);
    let search = Search { look: &look, left, until, is_whole: true, processes: &processes, by_number: false };
    if search.pod(&PodUid::new(POD), &[7]) {
        look.note(|found| found.unfinished.clear());
    }
    look.found()
}

/// Opens one of the pipes that somebody reads, so that the reader goes on, and finds that the file is no open device.
fn let_go(pipes: &[PathBuf]) -> bool {
    use std::io::Write;
    let mut options = OpenOptions::new();
    options.write(true).custom_flags(libc::O_NONBLOCK);
    // Without a reader there is an error.
    let read = pipes.iter().find_map(|pipe| options.open(pipe).ok());
    read.is_some_and(|mut pipe| writeln!(pipe, "flags:\t{:o}", libc::O_PATH).is_ok())
}

/// Each of the first pod's files takes longer than all of a pod's may: it is left for the second, and goes on afterwards.
#[test]
fn a_pod_whose_files_are_slow_hides_no_other_pod() {
    let shown = Shown::new();
    let [slow, other] = ["/dev/null", "/dev/full"].map(|path| Holding::file(File::open(path).unwrap()));
    let folder = shown.add(7, slow.0.id(), POD);
    shown.add(8, other.0.id(), OTHER);
    for name in ["fd", "fdinfo"] {
        fs::remove_file(folder.join(name)).unwrap();
        fs::create_dir(folder.join(name)).unwrap();
    }
    let pipes: Vec<_> = (0..3).map(|number| folder.join(format!("fdinfo/{number}"))).collect();
    for (number, pipe) in pipes.iter().enumerate() {
        symlink("/dev/full", folder.join(format!("fd/{number}"))).unwrap();
        nix::unistd::mkfifo(pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
    }
    use crate::host::Processes;
    let processes = shown.processes();
    let begun = Instant::now();
    let until = begun + Duration::from_secs(120);
    let pods = processes.by_pod(until).unwrap().by_pod;
    let look = FileLook::new(pods, BTreeSet::from([FULL]), BTreeSet::new(), until);
    // No assertion in there: a thread that reads a pipe is waited for.
    let (mut first_reached, mut is_hidden) = (false, true);
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| processes.look_at_files(&look));
        let limit = begun + Duration::from_secs(20);
        let mut reached = None;
        while !first_reached && Instant::now() < limit {
            reached = reached.or_else(|| (look.at() == 7).then(Instant::now));
            let is_late = reached.is_some_and(|at: Instant| at.elapsed() > TIME_FIRST);
            first_reached = is_late && let_go(&pipes);
            std::thread::yield_now();
        }
        while is_hidden && Instant::now() < limit {
            is_hidden = !look.found().openers.contains_key(&PodUid::new(OTHER));
            std::thread::yield_now();
        }
        while !thread.is_finished() {
            let_go(&pipes);
            std::thread::yield_now();
        }
    });
    assert!(first_reached, "the first file is not looked at");
    assert!(!is_hidden, "one pod hides the other: {:?}", look.found());
    assert_eq!(look.found().openers.len(), 1, "a place is no open device");
    assert_eq!(look.found().unfinished, BTreeSet::new(), "it went on afterwards");
}

#[test]
fn files_without_number_cost_a_bounded_look_and_are_told() {
    let shown = Shown::new();
    let holding = Holding::file(File::open("/dev/urandom").unwrap());
    shown.add(7, holding.0.id(), POD);
    assert_eq!(searched(&shown, 1000).openers.len(), 1);
    let cut = searched(&shown, 1);
    assert_eq!(cut.unfinished, BTreeSet::from([PodUid::new(POD)]), "it may have more");
    let mut passed_over = look(&shown.processes(), URANDOM, &[7]);
    assert_eq!(passed_over.unfinished.pop_first(), Some(PodUid::new(POD)));
    assert_eq!(passed_over.openers, BTreeMap::new());
    let over = FileLook::new(
        BTreeMap::from([(PodUid::new(POD), vec![7])]),
        BTreeSet::from([URANDOM]),
        BTreeSet::new(),
        Instant::now(),
    );
    look_at_files(&shown.processes(), &over);
    assert_eq!((over.found().openers.len(), over.found().unfinished.len(), over.steps()), (0, 1, 0));
}
