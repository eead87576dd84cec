use std::io;
use std::sync::mpsc::{Receiver, channel};

use super::*;
use crate::host::cgroup::ProcessOwner;
use crate::host::{End, EndError, ManagedMemory, PodProcesses};
use crate::model::process::ProcessKey;

/// Looks at the first so many processes stand still until they are let go. The last one has a device open.
struct Standing {
    still: Vec<u32>,
    let_go: Mutex<Receiver<()>>,
    opener: u32,
}

impl Processes for Standing {
    fn started(&self, _: u32) -> io::Result<Option<u64>> {
        Ok(None)
    }
    fn now(&self) -> io::Result<u64> {
        Ok(0)
    }
    fn owner(&self, _: u32) -> io::Result<Option<ProcessOwner>> {
        Ok(None)
    }
    fn uses_gpu(&self, _: u32) -> io::Result<bool> {
        Ok(false)
    }
    fn managed_memory(&self, _: u32) -> io::Result<ManagedMemory> {
        Ok(ManagedMemory::Untold)
    }
    fn by_pod(&self, _: Instant) -> io::Result<PodProcesses> {
        Ok(PodProcesses::default())
    }
    fn look_at_files(&self, look: &FileLook) {
        look.each(|look, pod, pid| {
            if self.still.contains(&pid) {
                let _ = self.let_go.lock().unwrap().recv();
            }
            if pid == self.opener {
                look.opened(pod.as_str(), pid, (195, 0));
            }
        });
    }
    fn are_all_shown(&self) -> bool {
        true
    }
    fn pids_are_the_hosts(&self) -> bool {
        true
    }
    fn end(&self, _: ProcessKey) -> Result<End, EndError> {
        Ok(End::Gone)
    }
}

fn pods() -> ByPod {
    BTreeMap::from([("first".into(), vec![1]), ("second".into(), vec![2])])
}

fn looks(policy: OpenDescriptors) -> FileLooks {
    standing(policy, &[], channel().1)
}

/// Of processes of which looks at these stand still; the one behind them is the opener.
fn standing(policy: OpenDescriptors, still: &[u32], let_go: Receiver<()>) -> FileLooks {
    let opener = still.last().map_or(2, |last| last + 1);
    let processes = Arc::new(Standing { still: still.to_vec(), let_go: Mutex::new(let_go), opener });
    let looks = FileLooks::new(processes, policy, FileLookCounts::default());
    FileLooks { stall: Duration::from_secs(1), ..looks }
}

fn until_none_stands(looks: &FileLooks) {
    let ended = Instant::now() + Duration::from_secs(20);
    while !locked(&looks.stuck).is_empty() {
        assert!(Instant::now() < ended, "a look that was let go is still taken for one that stands");
        thread::yield_now();
    }
}

#[test]
fn a_process_that_holds_a_look_up_is_left_and_the_others_are_looked_at() {
    let (let_go, held_up) = channel();
    let looks = standing(OpenDescriptors::Withhold, &[1], held_up);
    let devices = BTreeSet::from([(195, 0)]);
    let found = looks.openers(pods(), &devices).unwrap().openers;
    assert_eq!(found.keys().collect::<Vec<_>>(), [&PodUid::new("second")]);
    assert_eq!(looks.counts.strangers.get(), 1);
    assert_eq!(looks.counts.unfinished.get(), 2, "neither was looked through");
    assert_eq!(locked(&looks.stuck).len(), 1);
    drop(let_go);
    until_none_stands(&looks);
}

/// Each holds a look up for as long as it is waited for: all the time was spent on the first pod, look by look.
#[test]
fn a_pod_with_many_processes_that_hold_looks_up_hides_no_other_pod() {
    let (let_go, held_up) = channel();
    let looks = standing(OpenDescriptors::Withhold, &[1, 2, 3], held_up);
    let looks = FileLooks { limit: Duration::from_secs(3), ..looks };
    let pods = BTreeMap::from([("first".into(), vec![1, 2, 3]), ("second".into(), vec![4])]);
    let found = looks.openers(pods, &BTreeSet::from([(195, 0)])).unwrap().openers;
    assert_eq!(found.keys().collect::<Vec<_>>(), [&PodUid::new("second")]);
    drop(let_go);
    until_none_stands(&looks);
}

/// Looks that begin at the same time all stand at the same process before the first of them is left.
#[test]
fn who_holds_many_looks_up_counts_once_and_nobody_looks_at_eight_such() {
    let looks = looks(OpenDescriptors::Withhold);
    let devices = BTreeSet::from([(195, 0)]);
    let at = |pid: u32| {
        let look = FileLook::new(pods(), devices.clone(), BTreeSet::new(), Instant::now());
        look.stands_at(pid);
        Arc::new(look)
    };
    locked(&looks.stuck).extend((0..STUCK_MAX).map(|_| at(1)));
    assert_eq!(looks.openers(pods(), &devices).unwrap().openers.len(), 1, "the ninth look passes it over");
    assert_eq!(looks.counts.unmade.get(), 0);
    // As many processes as that: nobody looks any more, and says so.
    locked(&looks.stuck).extend((3..=8).map(at));
    assert_eq!(looks.openers(pods(), &devices).unwrap().openers.len(), 1);
    locked(&looks.stuck).push(at(9));
    let words = looks.openers(pods(), &devices).unwrap_err();
    assert!(words.contains("8 processes hold up 15 looks"), "{words}");
    assert_eq!(looks.counts.unmade.get(), 1);
    assert_eq!(
        looks.openers(ByPod::new(), &devices),
        Ok(OpenDevices::default()),
        "there is nothing to look at"
    );
    // Threads are bounded, too.
    locked(&looks.stuck).retain(|look| look.at() == 1);
    locked(&looks.stuck).extend((STUCK_MAX..STUCK_THREADS_MAX).map(|_| at(1)));
    looks.openers(pods(), &devices).unwrap_err();
    assert_eq!(looks.counts.unmade.get(), 2);
}

#[test]
fn who_is_only_to_warn_gives_the_device_and_counts() {
    let looks = looks(OpenDescriptors::Warn);
    assert!(looks.is_on() && looks.openers(pods(), &BTreeSet::from([(195, 0)])).unwrap().openers.is_empty());
    assert_eq!(looks.counts.strangers.get(), 1);
}

#[test]
fn a_warning_names_few_of_many_openers() {
    let all = |pod: u32| (PodUid::new(format!("{pod}")), (0..30_000).map(|pid| (pid, (195, 0))).collect());
    let words = in_words((0..110).map(all).collect());
    assert!(words.contains("29992 more of pod 0") && words.len() < 2000, "{words}");
}
