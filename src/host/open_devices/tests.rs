use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{OpenOptionsExt, symlink};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use nix::libc;
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
    /// Of the numbers that system calls take.
    fn new() -> Self {
        let shown = Self { dir: tempfile::tempdir().unwrap(), pids: PidNamespace::Host };
        symlink(std::process::id().to_string(), shown.dir.path().join("self")).unwrap();
        shown
    }

    /// What /proc tells of a process, as that of a pod, with the rights that a container has.
    fn add(&self, pid: u32, pod: &str) -> PathBuf {
        let folder = self.dir.path().join(pid.to_string());
        fs::create_dir_all(folder.join("ns")).unwrap();
        let real = PathBuf::from(format!("/proc/{pid}"));
        for name in ["fd", "map_files", "task", "stat"] {
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
    shown.add(full.0.id(), POD);
    shown.add(null.0.id(), OTHER);
    assert_eq!(shown.openers(FULL), BTreeMap::from([(PodUid::new(POD), vec![full.0.id()])]));
    // The other may have inherited that one, too.
    assert_eq!(shown.openers(NULL).get(&PodUid::new(OTHER)), Some(&vec![null.0.id()]));
    assert_eq!(shown.openers((195, 0)), BTreeMap::new());
    drop(full);
    assert_eq!(shown.openers(FULL), BTreeMap::new(), "it has ended");
}

/// Anybody who can make a node can have one: nobody could keep others off GPUs that way.
#[test]
fn the_place_of_a_device_is_not_the_device() {
    let mut shown = Shown::new();
    let place = Holding::file(place_of("/dev/full"));
    shown.add(place.0.id(), POD);
    assert_eq!(shown.openers(FULL), BTreeMap::new());
    shown.pids = PidNamespace::Own;
    assert_eq!(shown.openers(FULL).len(), 1, "simulated nodes can be had in no other way");
}

/// A test that runs in a process of its own, because others change what it measures. True: this is that process.
fn is_alone(name: &str) -> bool {
    const ALONE: &str = "TRANCHE_TEST_ALONE";
    if std::env::var_os(ALONE).is_some() {
        return true;
    }
    let name = format!("host::open_devices::tests::{name}");
    let mut test = Command::new(std::env::current_exe().unwrap());
    let told = test.args(["--exact", &name, "--nocapture"]).env(ALONE, "1").output().unwrap();
    let words = String::from_utf8_lossy(&told.stdout) + String::from_utf8_lossy(&told.stderr);
    assert!(told.status.success() && words.contains("1 passed"), "{words}");
    false
}

/// A process can have a descriptor mean the place of a device and another open file by turns: its number and its flags
/// were read one after the other, and a pod that never had the device kept it from everybody.
#[test]
fn whoever_changes_between_the_place_and_an_open_file_has_no_device_open() {
    flipped(&[place_of("/dev/tty"), File::open("/dev/null").unwrap()]);
}

/// What the kernel writes of an epoll in its `fdinfo` is as long as its owner likes.
#[test]
fn a_descriptor_of_many_words_costs_no_memory() {
    if !is_alone("a_descriptor_of_many_words_costs_no_memory") {
        return;
    }
    let files = [place_of("/dev/tty"), epoll(), File::open("/dev/null").unwrap()];
    // What the test needs itself.
    flipped(&files[..1]);
    fs::write("/proc/self/clear_refs", "5").unwrap();
    let before = most_memory();
    flipped(&files);
    let more = most_memory() - before;
    assert!(more < 4096, "{more} KiB");
}

/// Of this process since the last time that it was set back, in KiB.
fn most_memory() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse().unwrap()
}

/// With 200,000 items: each is a file by a number.
#[allow(unsafe_code)]
fn epoll() -> File {
    use std::os::fd::FromRawFd;
    // SAFETY: the kernel has made the descriptor, and nobody else has it.
    let made = |fd: i32| unsafe { File::from_raw_fd(fd) };
    // SAFETY: the call takes numbers and no pointers.
    let event = || made(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) });
    let files: Vec<_> = (0..400).map(|_| event()).collect();
    // SAFETY: as above.
    let epoll = made(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) });
    let numbers: Vec<_> = (0..500).map(|_| files[0].try_clone().unwrap()).collect();
    for file in &files {
        for number in &numbers {
            dup_onto(file, number);
            let mut event = libc::epoll_event { events: 0, u64: 0 };
            // SAFETY: both are open, and the event is read during the call.
            let added = unsafe {
                libc::epoll_ctl(epoll.as_raw_fd(), libc::EPOLL_CTL_ADD, number.as_raw_fd(), &raw mut event)
            };
            assert_eq!(added, 0);
        }
    }
    // They stay as long as their files do.
    files.into_iter().for_each(std::mem::forget);
    epoll
}

/// None of the files is an open device: looks at numbers that mean them by turns find none.
fn flipped(files: &[File]) {
    /// Nothing of this program's opens it.
    const TTY: DeviceNumber = (5, 0);
    let shown = Shown::new();
    shown.add(std::process::id(), POD);
    let changing: Vec<File> = (0..20).map(|_| files[0].try_clone().unwrap()).collect();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::SeqCst) {
                for file in files {
                    changing.iter().for_each(|one| dup_onto(file, one));
                }
            }
        });
        let looked = || shown.look(TTY).openers;
        let seen: Vec<_> = (0..200).map(|_| looked()).filter(|found| !found.is_empty()).collect();
        is_over.store(true, Ordering::SeqCst);
        assert!(seen.is_empty(), "{seen:?}");
    });
}

/// It is at another number by the time that the one at which it was listed is looked at.
#[test]
fn a_descriptor_that_moves_all_the_time_is_found_or_told() {
    if !is_alone("a_descriptor_that_moves_all_the_time_is_found_or_told") {
        return;
    }
    let shown = Shown::new();
    shown.add(std::process::id(), POD);
    let null = File::open("/dev/null").unwrap();
    let _before: Vec<_> = (0..300).map(|_| null.try_clone().unwrap()).collect();
    // Odd: it is not open yet, or on its way back.
    let (is_over, turns, moves) = (AtomicBool::new(false), AtomicU64::new(1), AtomicU64::new(0));
    let (missed, whole, found) = std::thread::scope(|scope| {
        scope.spawn(|| moved_on(&is_over, &turns, &moves));
        let (mut missed, mut whole, mut found) = (0, 0, 0);
        let end = Instant::now() + Duration::from_secs(60);
        while (whole < 20 || found < 1) && Instant::now() < end {
            let (before, still) = (turns.load(Ordering::SeqCst), moves.load(Ordering::SeqCst));
            let look = shown.look(FULL);
            found += usize::from(!look.openers.is_empty());
            let has_moved = moves.load(Ordering::SeqCst) != still;
            if has_moved && before % 2 == 0 && turns.load(Ordering::SeqCst) == before {
                whole += 1;
                missed += usize::from(look.openers.is_empty() && look.unfinished.is_empty());
            }
        }
        is_over.store(true, Ordering::SeqCst);
        (missed, whole, found)
    });
    assert!(whole >= 20 && found >= 1, "{whole} looks between two turns, {found} found it");
    assert_eq!(missed, 0, "of {whole} looks saw nothing of it");
}

/// Moves a descriptor up, number by number, and from the last back to the first: there it passes a look that goes up, too.
/// Such a turn is counted when it begins and when it has ended.
fn moved_on(is_over: &AtomicBool, turns: &AtomicU64, moves: &AtomicU64) {
    let mut file = File::open("/dev/full").unwrap();
    turns.fetch_add(1, Ordering::SeqCst);
    while !is_over.load(Ordering::SeqCst) {
        let more = file.as_raw_fd() + 1;
        let is_turn = u64::from(more >= 900);
        turns.fetch_add(is_turn, Ordering::SeqCst);
        file = duplicate(&file, if is_turn == 1 { 400 } else { more });
        turns.fetch_add(is_turn, Ordering::SeqCst);
        moves.fetch_add(1, Ordering::SeqCst);
        let moved = Instant::now();
        while moved.elapsed() < Duration::from_micros(100) {
            std::hint::spin_loop();
        }
    }
}

/// `F_DUPFD_CLOEXEC` of fcntl(2): at the first free number from this one on.
#[allow(unsafe_code)]
fn duplicate(file: &File, from: i32) -> File {
    use std::os::fd::FromRawFd;
    // SAFETY: the file is open, and the descriptor that the kernel makes is nobody else's.
    unsafe { File::from_raw_fd(libc::fcntl(file.as_raw_fd(), libc::F_DUPFD_CLOEXEC, from)) }
}

/// Ends `pid` once a look is at it, and shows the next one, of the same pod. The last one is the answer.
fn chained(shown: &Shown, look: &FileLook, is_over: &AtomicBool, mut pid: u32) -> u32 {
    let at = |pid: u32| shown.dir.path().join(pid.to_string());
    while !is_over.load(Ordering::SeqCst) {
        if look.at() == pid {
            fs::rename(at(pid), at(pid + 1)).unwrap();
            pid += 1;
        }
        std::hint::spin_loop();
    }
    pid
}

/// Each process of a chain of forks has what the last one had, which has ended by the time that it is looked at.
#[test]
fn a_pod_whose_processes_end_before_they_are_looked_at_is_told() {
    let shown = Shown::new();
    let full = Holding::file(File::open("/dev/full").unwrap());
    let mut pid = 1_000_000_000;
    let first = shown.dir.path().join(pid.to_string());
    let folder = shown.add(full.0.id(), POD);
    // Its one thread would be found by its true number.
    fs::remove_file(folder.join("task")).unwrap();
    fs::create_dir(folder.join("task")).unwrap();
    fs::rename(folder, first).unwrap();
    let processes = shown.processes();
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        let pods = processes.by_pod(until).unwrap().by_pod;
        let look = FileLook::new(pods, BTreeSet::from([FULL]), BTreeSet::new(), until);
        let is_over = AtomicBool::new(false);
        let last = std::thread::scope(|scope| {
            let chain = scope.spawn(|| chained(&shown, &look, &is_over, pid));
            look_at_files(&processes, &look);
            is_over.store(true, Ordering::SeqCst);
            chain.join().unwrap()
        });
        assert_eq!(look.found().unfinished, BTreeSet::from([PodUid::new(POD)]));
        // None ended under the look, if the processor was somebody else's meanwhile.
        if last > pid {
            return;
        }
        pid = last;
        assert!(Instant::now() < until, "no process ended while it was looked at");
    }
}

/// A process that is listed may have ended, which is nothing to tell, and may have left the device to another.
#[test]
fn what_a_process_that_has_ended_left_to_another_of_its_pod_is_found() {
    let shown = Shown::new();
    let [one, two] = [(), ()].map(|()| Holding::file(File::open("/dev/full").unwrap()));
    shown.add(one.0.id(), POD);
    let listed = shown.processes().by_pod(Instant::now() + Duration::from_secs(60)).unwrap().by_pod;
    let look = || {
        let until = Instant::now() + Duration::from_secs(60);
        let look = FileLook::new(listed.clone(), BTreeSet::from([FULL]), BTreeSet::new(), until);
        look_at_files(&shown.processes(), &look);
        look.found()
    };
    drop(one);
    assert_eq!(look(), OpenDevices::default(), "it is not there, and there is no other");
    shown.add(two.0.id(), POD);
    let found = look();
    let pids = found.openers.get(&PodUid::new(POD)).map(|pids| pids.keys().copied().collect());
    assert_eq!((pids, found.unfinished), (Some(vec![two.0.id()]), BTreeSet::new()));
}

/// Whether a descriptor is open is asked by the process's number: where numbers are others here, nobody is accused.
#[test]
fn what_the_kernel_does_not_tell_is_told_as_unfinished() {
    let shown = Shown::new();
    let (full, place) = (File::open("/dev/full").unwrap(), place_of("/dev/full"));
    let [full, place] = [full, place].map(Holding::file);
    shown.add(full.0.id(), POD);
    shown.add(place.0.id(), OTHER);
    fs::remove_file(shown.dir.path().join("self")).unwrap();
    let found = shown.look(FULL);
    assert_eq!(found.openers, BTreeMap::new());
    assert_eq!(found.unfinished, BTreeSet::from([PodUid::new(POD), PodUid::new(OTHER)]));
    assert_eq!(shown.look(ZERO), OpenDevices::default(), "neither has anything of the kind");
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
    let holding = [(), ()].map(|()| Holding::file(File::open("/dev/full").unwrap()));
    let mut pids = holding.each_ref().map(|one| one.0.id());
    pids.sort_unstable();
    let [folder, _] = pids.map(|pid| shown.add(pid, POD));
    let all = "Name:\tx\nCapEff:\t0000000000000000\nCapBnd:\t000001ffffffffff\n";
    fs::write(folder.join("status"), all).unwrap();
    let both = BTreeMap::from([(PodUid::new(POD), pids.to_vec())]);
    assert_eq!(shown.openers(FULL), both, "it may be root of a namespace of its own");
    symlink("user:[1]", folder.join("ns/user")).unwrap();
    assert_eq!(shown.openers(FULL), both, "it is");
    fs::remove_file(folder.join("ns/user")).unwrap();
    symlink(fs::read_link("/proc/self/ns/user").unwrap(), folder.join("ns/user")).unwrap();
    assert_eq!(shown.openers(FULL), BTreeMap::from([(PodUid::new(POD), vec![pids[1]])]));
    // A process can give itself a name of any lines, and no other rights.
    fs::write(folder.join("status"), "Name:\tx\\nCapBnd:\t000001ffffffffff\nCapBnd:\t00000000a80425fb\n")
        .unwrap();
    assert_eq!(shown.openers(FULL), both);
}

/// What a thread has open that has a table of files of its own, its process does not show.
#[test]
fn a_thread_hides_no_file_in_a_table_of_its_own() {
    if !is_alone("a_thread_hides_no_file_in_a_table_of_its_own") {
        return;
    }
    let own = std::process::id();
    let shown = Shown::new();
    shown.add(own, POD);
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
    if !is_alone("a_mapping_of_a_device_whose_descriptor_is_closed_is_found") {
        return;
    }
    let own = std::process::id();
    let shown = Shown::new();
    shown.add(own, POD);
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
    // These are nobody's numbers.
    fs::remove_file(shown.dir.path().join("self")).unwrap();
    let first = shown.dir.path().join("7");
    for name in ["fd", "map_files", "task/7", "task/8/fd", "task/9/fd", "ns"] {
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
    let processes = shown.processes();
    let until = Instant::now() + Duration::from_secs(60);
    let pods = processes.by_pod(until).unwrap().by_pod;
    let look = FileLook::new(pods.clone(), BTreeSet::from([URANDOM]), BTreeSet::new(), until);
    let mut search = PodSearch::new(&processes, &look, true, left, until);
    search.pod(&PodUid::new(POD), &pods[&PodUid::new(POD)]);
    if let SearchOutcome::Whole = search.outcome() {
        look.finish(&PodUid::new(POD));
    }
    look.found()
}

/// Opens one of the pipes that somebody reads, so that the reader goes on, and finds that the process may have the device.
fn let_go(pipes: &[PathBuf]) -> bool {
    use std::io::Write;
    let mut options = OpenOptions::new();
    options.write(true).custom_flags(libc::O_NONBLOCK);
    // Without a reader there is an error.
    let read = pipes.iter().find_map(|pipe| options.open(pipe).ok());
    read.is_some_and(|mut pipe| writeln!(pipe, "CapBnd:\t000001ffffffffff").is_ok())
}

/// Each of the first pod's processes takes longer than all of a pod's may: it is left for the second, and goes on afterwards.
#[test]
fn a_pod_whose_files_are_slow_hides_no_other_pod() {
    let shown = Shown::new();
    let full = || Holding::file(File::open("/dev/full").unwrap());
    let (slow, other) = ([(), (), ()].map(|()| full()), full());
    shown.add(other.0.id(), OTHER);
    let pipes = slow.each_ref().map(|one| {
        let folder = shown.add(one.0.id(), POD);
        symlink(fs::read_link("/proc/self/ns/user").unwrap(), folder.join("ns/user")).unwrap();
        fs::remove_file(folder.join("status")).unwrap();
        nix::unistd::mkfifo(&folder.join("status"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        folder.join("status")
    });
    let processes = shown.processes();
    let begun = Instant::now();
    let until = begun + Duration::from_secs(120);
    let pods = processes.by_pod(until).unwrap().by_pod;
    let of_first = pods[&PodUid::new(POD)].clone();
    let look = FileLook::new(pods, BTreeSet::from([FULL]), BTreeSet::new(), until);
    // No assertion in there: a thread that reads a pipe is waited for.
    let (mut first_reached, mut is_hidden) = (false, true);
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| processes.look_at_files(&look));
        let limit = begun + Duration::from_secs(20);
        let mut reached = None;
        while !first_reached && Instant::now() < limit {
            reached = reached.or_else(|| of_first.contains(&look.at()).then(Instant::now));
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
    assert!(first_reached, "the first process is not looked at");
    assert!(!is_hidden, "one pod hides the other: {:?}", look.found());
    assert_eq!(look.found().openers.len(), 1, "who may administrate the node is no opener");
    assert_eq!(look.found().unfinished, BTreeSet::new(), "it went on afterwards");
}

#[test]
fn files_without_number_cost_a_bounded_look_and_are_told() {
    let shown = Shown::new();
    let holding = Holding::file(File::open("/dev/urandom").unwrap());
    let pid = holding.0.id();
    shown.add(pid, POD);
    assert_eq!(searched(&shown, 1000).openers.len(), 1);
    let cut = searched(&shown, 1);
    assert_eq!(cut.unfinished, BTreeSet::from([PodUid::new(POD)]), "it may have more");
    let mut passed_over = look(&shown.processes(), URANDOM, &[pid]);
    assert_eq!(passed_over.unfinished.pop_first(), Some(PodUid::new(POD)));
    assert_eq!(passed_over.openers, BTreeMap::new());
    let over = FileLook::new(
        BTreeMap::from([(PodUid::new(POD), vec![pid])]),
        BTreeSet::from([URANDOM]),
        BTreeSet::new(),
        Instant::now(),
    );
    look_at_files(&shown.processes(), &over);
    assert_eq!((over.found().openers.len(), over.found().unfinished.len(), over.steps()), (0, 1, 0));
}

/// One that had ended let a pod's others count as looked through after a hundredth of the files that count.
#[test]
fn a_pod_of_which_a_process_has_ended_is_looked_through_as_far_as_others() {
    let mut shown = Shown::new();
    shown.pids = PidNamespace::Own;
    let holding = Holding::file(File::open("/dev/null").unwrap());
    let folder = shown.add(holding.0.id(), POD);
    fs::remove_file(folder.join("fd")).unwrap();
    fs::create_dir(folder.join("fd")).unwrap();
    for number in 0..=FILES_FIRST {
        symlink("/dev/null", folder.join(format!("fd/{number}"))).unwrap();
    }
    let until = Instant::now() + Duration::from_secs(60);
    let ended = BTreeMap::from([(PodUid::new(POD), vec![u32::MAX])]);
    let look = FileLook::new(ended, BTreeSet::from([FULL]), BTreeSet::new(), until);
    look_at_files(&shown.processes(), &look);
    assert_eq!(look.found(), OpenDevices::default());
}

/// Whoever goes to a user namespace of its own has all capabilities there.
#[test]
fn a_process_that_leaves_the_nodes_user_namespace_meanwhile_may_not_administrate_the_node() {
    let folder = tempfile::tempdir().unwrap();
    let (status, namespace) = (folder.path().join("status"), folder.path().join("ns/user"));
    fs::create_dir(folder.path().join("ns")).unwrap();
    symlink(fs::read_link("/proc/self/ns/user").unwrap(), &namespace).unwrap();
    nix::unistd::mkfifo(&status, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let leaves = std::thread::spawn(move || {
        // Opened once somebody reads it.
        let mut status = OpenOptions::new().write(true).open(status).unwrap();
        fs::remove_file(&namespace).unwrap();
        symlink("user:[1]", &namespace).unwrap();
        std::io::Write::write_all(&mut status, b"CapBnd:\t000001ffffffffff\n").unwrap();
    });
    assert!(!may_administrate(folder.path()));
    leaves.join().unwrap();
}

/// What was found and looked through before a look was held up counts, and the pod that held it up comes last.
#[test]
fn a_look_goes_on_where_the_one_before_was_held_up() {
    let pods = ["a", "b", "c"].into_iter().zip(1..).map(|(pod, pid)| (pod.into(), vec![pid])).collect();
    let (devices, until) = (BTreeSet::from([FULL]), Instant::now() + Duration::from_secs(60));
    let first = FileLook::new(pods, devices, BTreeSet::new(), until);
    first.opened("b", 2, FULL);
    first.finish(&"b".into());
    first.is_at(&"a".into());
    let second = FileLook::after(&first, BTreeSet::from([1]));
    assert_eq!(second.pods, [("c".into(), vec![3]), ("a".into(), vec![1])]);
    assert_eq!(second.found(), first.found());
    assert_eq!(second.found().unfinished, BTreeSet::from(["a".into(), "c".into()]));
}

/// Whose a process is, is asked of all of the node: one that does not answer is passed over, not the one before it.
#[test]
fn a_listing_that_is_held_up_says_by_whom() {
    const HANGS: u32 = 4000;
    let shown = Shown::new();
    let folder = shown.dir.path().join(HANGS.to_string());
    fs::create_dir(&folder).unwrap();
    let group = folder.join("cgroup");
    nix::unistd::mkfifo(&group, nix::sys::stat::Mode::from_bits_truncate(0o600)).unwrap();
    let processes = shown.processes();
    let (pod, other) = (PodUid::new(POD), PodUid::new(OTHER));
    // Where it stood, and what it came to once it was let go.
    let listed_again = |of: Option<&PodUid>, skipped: &[u32]| {
        let until = Instant::now() + Duration::from_secs(60);
        let pods = of.into_iter().map(|pod| (pod.clone(), vec![HANGS])).collect();
        let look = FileLook::new(pods, BTreeSet::from([ZERO]), skipped.iter().copied().collect(), until);
        let search =
            PodSearch { has_ended: true, ..PodSearch::new(&processes, &look, true, FILES_FIRST, until) };
        let searched = BTreeMap::from([(pod.clone(), search)]);
        thread::scope(|scope| {
            let listing = scope.spawn(|| list_again(&processes, &look, searched, Duration::from_secs(60)));
            let patience = Instant::now() + Duration::from_secs(20);
            while look.at() != HANGS && !listing.is_finished() && Instant::now() < patience {
                thread::yield_now();
            }
            let (at, was_over) = (look.at(), listing.is_finished());
            if !was_over {
                fs::write(&group, "0::/init.scope\n").unwrap();
            }
            (at, was_over, listing.join().unwrap())
        })
    };
    assert_eq!(listed_again(None, &[]), (HANGS, false, BTreeSet::new()));
    // The next look asks it nothing. It may be of any pod, unless it was listed.
    let partly = BTreeSet::from([pod.clone()]);
    for (of, found) in [(None, partly.clone()), (Some(&pod), partly), (Some(&other), BTreeSet::new())] {
        assert_eq!(listed_again(of, &[HANGS]), (0, true, found), "{of:?}");
    }
}
