//! What processes hold, nobody else is given: whatever the API server says of the claim, whoever is restarted.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::{OpenOptionsExt, symlink};
use std::path::PathBuf;
use std::process::{Child, Command};
use std::time::Duration;

use nix::fcntl::OFlag;
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use serde_json::{Value, json};
use tranche::cluster::Cluster;
use tranche::ledger::{Phase, Standing};
use tranche::model::names::PodUid;
use tranche::node::config::OpenDescriptors;
use tranche::node::sweeper::Sweep;

use crate::nvml::Node;
use crate::site::{Claim, NODE, Site};
use crate::stop_at::{EIO, Fault, Verb, When};

const POD: &str = "11111111-0000-4000-8000-000000000001";
const LATER: &str = "22222222-0000-4000-8000-000000000002";
const PID: u32 = 4711;

fn whole(name: &str) -> Claim {
    Claim::new(name, &["gpu-0"]).reserved_for(&[POD])
}

fn next() -> Claim {
    Claim::new("next", &["gpu-0"]).reserved_for(&[LATER])
}

fn withheld() -> Sweep {
    Sweep { withheld: 1, ..Sweep::default() }
}

/// A claim with one pod that runs.
async fn with_pod(claim: &Claim) -> Site {
    let site = Site::new();
    site.api.put(claim);
    site.start_plugin().prepared(claim, "before").await;
    site.runs(PID, POD);
    site
}

fn pods(site: &Site, claim: &Claim) -> Vec<PodUid> {
    let records = site.records().into_iter().filter(|record| record.intent.claim == claim.id());
    let mut pods: Vec<_> = records.flat_map(|record| record.intent.pods).map(|pod| pod.uid).collect();
    pods.sort();
    pods
}

#[tokio::test]
async fn a_claim_that_is_taken_away_under_its_pod_keeps_its_device_until_the_pod_has_ended() {
    let mine = whole("mine");
    let anew = whole("mine").uid("uid-anew");
    for (how, now) in [
        ("deleted", None),
        ("made anew under its name", Some(anew.clone())),
        ("not allocated any more", Some(mine.clone().with("/status", json!({})))),
        (
            "allocated on another node",
            Some(mine.clone().with("/status/allocation/devices/results/0/pool", json!("b"))),
        ),
    ] {
        let site = with_pod(&mine).await;
        let plugin = site.start_plugin();
        site.api.remove(&mine);
        if let Some(now) = &now {
            site.api.put(now);
        }
        site.api.put(&next());
        plugin.refused(&next(), &["in use by claim team/mine"]).await;
        assert_eq!(plugin.sweep().await.unwrap(), withheld(), "{how}");
        assert!(site.is_ready(&mine), "{how}");
        assert_eq!(site.files(), [""; 0], "{how}: a container that starts now would be given the GPU");
        plugin
            .refused(&next(), &["gpu-0 is not free yet", "process 4711 of pod team/pod-1111", "team/mine"])
            .await;
        if how.starts_with("made anew") {
            plugin.refused(&anew, &["gpu-0 is not free yet"]).await;
        }
        drop(plugin);
        // Another process of the plugin knows it as well.
        let plugin = site.start_plugin();
        plugin.refused(&next(), &["team/mine"]).await;
        assert_eq!(plugin.sweep().await.unwrap(), withheld(), "{how}");
        plugin.refused(&next(), &["process 4711"]).await;
        assert_eq!(plugin.preparer.executor.holders.withheld().borrow().len(), 1);
        site.ends(PID);
        assert_eq!(plugin.sweep().await.unwrap(), Sweep { released: 1, ..Sweep::default() }, "{how}");
        assert!(plugin.preparer.executor.holders.withheld().borrow().is_empty());
        site.check_empty(how);
        plugin.prepared(&next(), how).await;
    }
}

/// Kubelet unprepares when it has seen the pod end. What it did not see end holds the GPU still.
#[tokio::test]
async fn what_a_pod_leaves_running_holds_its_device_and_keeps_no_pod_from_ending() {
    let mine = whole("mine");
    let site = with_pod(&mine).await;
    let plugin = site.start_plugin();
    site.api.put(&next());
    plugin.unprepare(&mine).await.expect("the pod may go");
    assert_eq!(site.records()[0].phase, Phase::Releasing);
    assert_eq!(site.files(), [""; 0]);
    plugin.refused(&next(), &["gpu-0 is not free yet", "process 4711"]).await;
    plugin.refused(&mine, &["devices are still held", "process 4711"]).await;
    assert_eq!(plugin.sweep().await.unwrap(), withheld());
    // However often kubelet asks.
    plugin.unprepare(&mine).await.unwrap();
    site.ends(PID);
    assert_eq!(plugin.sweep().await.unwrap(), Sweep { rolled_back: 1, ..Sweep::default() });
    site.check_empty("swept");
    plugin.prepared(&next(), "free").await;
}

#[tokio::test]
async fn a_claim_that_comes_back_is_given_its_devices_again() {
    let mine = whole("mine");
    let site = with_pod(&mine).await;
    let plugin = site.start_plugin();
    let edits = site.edits(&mine);
    site.api.remove(&mine);
    assert_eq!(plugin.sweep().await.unwrap(), withheld());
    // The API server had been given an old backup, say.
    site.api.put(&mine);
    assert_eq!(plugin.sweep().await.unwrap(), Sweep { restored: 1, ..Sweep::default() });
    assert_eq!(site.edits(&mine), edits);
    assert!(plugin.preparer.executor.holders.withheld().borrow().is_empty());
}

/// Kubelet asks nothing for the second pod of a claim that is prepared.
#[tokio::test]
async fn a_pod_that_came_to_the_claim_later_holds_its_device_too() {
    let both = Claim::new("mine", &["gpu-0"]).reserved_for(&[POD, LATER]);
    let site = with_pod(&whole("mine")).await;
    let plugin = site.start_plugin();
    site.api.put(&both);
    site.runs(4712, LATER);
    assert_eq!(plugin.sweep().await.unwrap(), Sweep::default());
    assert_eq!(pods(&site, &both), [PodUid::new(POD), PodUid::new(LATER)]);
    assert!(site.is_ready(&both) && site.edits(&both).is_some());
    // The first has left the claim by the API server's word, and then by the node's.
    site.api.put(&Claim::new("mine", &["gpu-0"]).reserved_for(&[LATER]));
    plugin.sweep().await.unwrap();
    assert_eq!(pods(&site, &both).len(), 2);
    site.ends(PID);
    plugin.sweep().await.unwrap();
    assert_eq!(pods(&site, &both), [PodUid::new(LATER)]);
    site.api.remove(&both);
    assert_eq!(site.start_plugin().sweep().await.unwrap(), withheld());
    site.ends(4712);
    assert_eq!(plugin.sweep().await.unwrap(), Sweep { released: 1, ..Sweep::default() });
    site.check_empty("swept");
}

#[tokio::test]
async fn a_second_pod_that_kubelet_asks_for_is_recorded_before_it_is_answered() {
    let both = Claim::new("mine", &["gpu-0"]).reserved_for(&[POD, LATER]);
    let site = with_pod(&whole("mine")).await;
    site.api.put(&both);
    let plugin = site.start_plugin();
    plugin.host.faults(|_, verb| (verb == Verb::WriteRecord).then_some(Fault::Fails(EIO)));
    plugin.prepare(&both).await.unwrap_err();
    assert!(site.is_ready(&both) && site.edits(&both).is_some(), "what is there stays");
    plugin.host.no_faults();
    plugin.prepared(&both, "again").await;
    assert_eq!(pods(&site, &both), [PodUid::new(POD), PodUid::new(LATER)]);
    plugin.prepared(&both, "and again").await;
    plugin.check("at the end");
}

/// A pod that no sweep has seen yet, or one of a record from before pods were recorded: the driver shows it.
#[tokio::test]
async fn a_pod_that_only_the_driver_knows_holds_its_device() {
    let control = |pids: &[u32]| {
        let processes: Vec<_> =
            pids.iter().map(|pid| json!({"pid": pid, "used_mib": 5, "kind": "compute"})).collect();
        json!({"profile": "h100", "gpus": {"0": {"uuid": "GPU-0", "processes": processes}}})
    };
    let node = Node::with(control(&[PID]));
    let mine = Claim::new("mine", &["gpu-0"]);
    let mut site = Site::new();
    site.lists_root = node.path("root");
    site.api.put(&mine);
    let plugin = site.start_plugin();
    plugin.prepared(&mine, "before").await;
    site.runs(PID, POD);
    site.api.remove(&mine);
    assert_eq!(plugin.sweep().await.unwrap(), withheld());
    site.api.put(&next());
    plugin.refused(&next(), &["process 4711 of pod 11111111"]).await;
    node.set(control(&[]));
    assert_eq!(plugin.sweep().await.unwrap(), withheld(), "its control group is not empty");
    site.ends(PID);
    assert_eq!(plugin.sweep().await.unwrap(), Sweep { released: 1, ..Sweep::default() });
    site.check_empty("swept");
}

/// kill -9 at every step of the release, with the pod alive, and again once it has ended.
#[tokio::test]
async fn stopped_anywhere_the_device_stays_held_until_it_is_free() {
    let mine = whole("mine").interval("Long");
    for kubelet in [false, true] {
        for alive in [true, false] {
            for (index, when) in (0..8).flat_map(|index| [(index, When::Before), (index, When::After)]) {
                let at = format!("kubelet: {kubelet}, alive: {alive}, {when:?} verb {index}");
                let site = with_pod(&mine).await;
                site.api.remove(&mine);
                site.api.put(&next());
                if !alive {
                    site.ends(PID);
                }
                let plugin = site.start_plugin();
                plugin.host.stop_at(index, when);
                let preparer = plugin.preparer.clone();
                let (id, under) = (mine.id(), kubelet);
                let act = async move {
                    match under {
                        true => drop(preparer.release_one(&id).await),
                        false => {
                            tranche::node::sweeper::sweep(&preparer).await;
                        }
                    }
                };
                let _ = tokio::spawn(act).await;
                let stopped = plugin.host.stopped();
                drop(plugin);
                let plugin = site.start_plugin();
                if alive {
                    plugin.refused(&next(), &["team/mine"]).await;
                    assert_eq!(plugin.sweep().await.unwrap(), withheld(), "{at}");
                    plugin.refused(&next(), &["process 4711"]).await;
                    site.ends(PID);
                }
                plugin.sweep().await.unwrap();
                site.check_empty(&at);
                plugin.prepared(&next(), &at).await;
                plugin.check(&at);
                if !stopped {
                    break;
                }
            }
        }
    }
}

/// A share whose claim is gone keeps its memory and its daemon: the pod goes on undisturbed.
#[tokio::test]
async fn a_share_that_is_taken_away_under_its_pod_keeps_what_it_was_granted() {
    let mine = Claim::new("mine", &["gpu-0"]).share("60Gi", "25").reserved_for(&[POD]);
    let large = Claim::new("large", &["gpu-0"]).share("60Gi", "25").reserved_for(&[LATER]);
    let site = with_pod(&mine).await;
    let plugin = site.start_plugin();
    let kept = site.mps.kept();
    site.api.remove(&mine);
    site.api.put(&large);
    assert_eq!(plugin.sweep().await.unwrap(), withheld());
    assert_eq!(site.mps.kept(), kept);
    let small = Claim::new("small", &["gpu-0"]).share("10Gi", "25");
    site.api.put(&small);
    plugin.prepared(&small, "there is room for it").await;
    let words =
        ["gpu-0 finds no room", "claim team/mine (uid-mine) has ended", "process 4711 of pod team/pod-1111"];
    plugin.refused(&large, &words).await;
    // One that the other placer gave.
    let granted = Claim::new("granted", &["gpu-0"]).granted(1024, 10);
    site.api.put(&granted);
    plugin.refused(&granted, &["gpu-0"]).await;
    plugin.unprepare(&small).await.unwrap();
    plugin.refused(&granted, &["gpu-0 is not free yet", "process 4711 of pod team/pod-1111"]).await;
    site.ends(PID);
    assert_eq!(plugin.sweep().await.unwrap(), Sweep { released: 1, ..Sweep::default() });
    site.check_empty("swept");
    plugin.prepared(&large, "free").await;
}

pub const STRANGE: &str = "33333333-0000-4000-8000-000000000003";
const STRANGE_PID: u32 = 4712;

/// A real process, shown as one of a pod, that has a device node open: it was handed the descriptor.
pub struct Opener {
    child: Child,
    shown: PathBuf,
}

impl Opener {
    /// Only the node's place is open: no driver is asked.
    pub fn of(site: &Site, (major, minor): (u64, u64)) -> Self {
        let node = site.path(&format!("{major}-{minor}"));
        if !node.exists() {
            mknod(&node, SFlag::S_IFCHR, Mode::from_bits_truncate(0o600), makedev(major, minor)).unwrap();
        }
        let file = OpenOptions::new().read(true).custom_flags(OFlag::O_PATH.bits()).open(&node).unwrap();
        let child = Command::new("sleep").arg("600").stdin(file).spawn().unwrap();
        site.runs(STRANGE_PID, STRANGE);
        let shown = site.path(&format!("processes/{STRANGE_PID}"));
        for name in ["fd", "task"] {
            symlink(format!("/proc/{}/{name}", child.id()), shown.join(name)).unwrap();
        }
        Self { child, shown }
    }
}

impl Drop for Opener {
    fn drop(&mut self) {
        let _ = (self.child.kill(), self.child.wait());
        let removed = fs::remove_dir_all(&self.shown);
        assert!(removed.is_ok() || std::thread::panicking(), "{removed:?}");
    }
}

/// A tenant hands the descriptor of his GPU to a process of another pod, and ends the first.
#[tokio::test]
async fn a_gpu_that_a_strange_pod_has_open_is_held_by_that_pod() {
    let mine = whole("mine");
    for kubelet in [true, false] {
        let site = with_pod(&mine).await;
        let plugin = site.start_plugin();
        let opener = Opener::of(&site, (195, 0));
        site.api.put(&next());
        site.ends(PID);
        match kubelet {
            true => plugin.unprepare(&mine).await.expect("the pod may go"),
            false => site.api.remove(&mine),
        }
        assert_eq!(plugin.sweep().await.unwrap(), withheld(), "kubelet: {kubelet}");
        plugin.refused(&next(), &["gpu-0 is not free yet", "process 4712 of pod 33333333"]).await;
        // A new process of the plugin finds it as well.
        let plugin = site.start_plugin();
        assert_eq!(plugin.sweep().await.unwrap(), withheld(), "kubelet: {kubelet}");
        let held = plugin.preparer.executor.holders.withheld();
        let by = held.borrow().values().next().unwrap().holders();
        assert_eq!(by, format!("process 4712 of pod {STRANGE}, which has it open without a claim on it"));
        // Another GPU is free.
        let other = Claim::new("other", &["gpu-1"]).reserved_for(&[LATER]);
        site.api.put(&other);
        plugin.prepared(&other, "another GPU").await;
        drop(opener);
        let sweep = plugin.sweep().await.unwrap();
        assert_eq!(sweep.rolled_back + sweep.released, 1, "{sweep:?}");
        plugin.prepared(&next(), "free").await;
    }
}

/// The second try to remove them, in the same release, succeeds.
#[tokio::test]
async fn where_edits_are_not_removed_at_once_the_device_is_not_released_unseen() {
    let mine = whole("mine");
    for kubelet in [false, true] {
        let site = with_pod(&mine).await;
        site.api.remove(&mine);
        site.api.put(&next());
        let plugin = site.start_plugin();
        let failed = std::sync::atomic::AtomicBool::new(false);
        plugin.host.faults(move |_, verb| {
            let fails = verb == Verb::Remove && !failed.swap(true, std::sync::atomic::Ordering::SeqCst);
            fails.then_some(Fault::Fails(EIO))
        });
        match kubelet {
            true => _ = plugin.unprepare(&mine).await,
            false => _ = plugin.sweep().await,
        }
        plugin.refused(&next(), &["team/mine"]).await;
        assert_eq!(plugin.sweep().await.unwrap(), withheld(), "kubelet: {kubelet}");
        site.ends(PID);
        plugin.sweep().await.unwrap();
        plugin.prepared(&next(), "free").await;
    }
}

/// They are there, and nobody can tell.
pub fn hide_processes(site: &Site) {
    fs::rename(site.path("processes"), site.path("hidden")).unwrap();
}

pub fn show_processes(site: &Site) {
    fs::rename(site.path("hidden"), site.path("processes")).unwrap();
}

/// One read of /proc that does not come back is no reason to give away what was seen held a moment before.
#[tokio::test]
async fn a_look_that_fails_frees_nothing_that_was_seen_held() {
    let mine = whole("mine");
    for opened in [false, true] {
        let site = with_pod(&mine).await;
        let plugin = site.start_plugin();
        let opener = opened.then(|| Opener::of(&site, (195, 0)));
        if opened {
            site.ends(PID);
        }
        site.api.put(&next());
        plugin.unprepare(&mine).await.expect("the pod may go");
        for _ in 0..2 {
            hide_processes(&site);
            for _ in 0..2 {
                assert_eq!(plugin.sweep().await.unwrap(), withheld(), "opened: {opened}");
            }
            let pid = if opened { "process 4712" } else { "process 4711" };
            plugin
                .refused(&next(), &["gpu-0 is not free yet", pid, "this was seen before", "No such file"])
                .await;
            show_processes(&site);
            assert_eq!(plugin.sweep().await.unwrap(), withheld(), "opened: {opened}");
        }
        match opener {
            Some(opener) => drop(opener),
            None => site.ends(PID),
        }
        assert_eq!(plugin.sweep().await.unwrap(), Sweep { rolled_back: 1, ..Sweep::default() });
        plugin.prepared(&next(), "free").await;
    }
    // By whom nobody was ever seen, kubelet is believed: it would be asked for ever.
    let site = with_pod(&mine).await;
    let plugin = site.start_plugin();
    hide_processes(&site);
    site.api.remove(&mine);
    assert_eq!(plugin.sweep().await.unwrap(), withheld());
    plugin.unprepare(&mine).await.unwrap();
    site.check_empty("by kubelet's word");
}

/// It changes its control group's name once it was seen.
#[tokio::test]
async fn a_process_that_was_seen_and_hides_then_holds_its_device_still() {
    let mine = whole("mine");
    let site = with_pod(&mine).await;
    let plugin = site.start_plugin();
    plugin.unprepare(&mine).await.expect("the pod may go");
    hide(&site, PID);
    assert_eq!(plugin.sweep().await.unwrap(), withheld());
    site.ends(PID);
    assert_eq!(plugin.sweep().await.unwrap(), Sweep { rolled_back: 1, ..Sweep::default() });
}

/// A sweep keeps on trying, and a new process does.
#[tokio::test]
async fn where_edits_cannot_be_removed_nothing_is_undone_under_a_pod_whose_claim_was_taken_away() {
    let mine = Claim::new("mine", &["gpu-0"]).share("60Gi", "25").reserved_for(&[POD]);
    let site = with_pod(&mine).await;
    let plugin = site.start_plugin();
    let kept = site.mps.kept();
    site.api.remove(&mine);
    plugin.host.faults(|_, verb| (verb == Verb::Remove).then_some(Fault::Fails(EIO)));
    for _ in 0..3 {
        assert_eq!(plugin.sweep().await.unwrap(), withheld());
        assert!(site.is_ready(&mine) && site.edits(&mine).is_some());
        assert_eq!(site.mps.kept(), kept, "its servers go on");
        let told: Vec<_> = plugin.preparer.executor.holders.kept_from_others().into_values().collect();
        assert!(told.len() == 1 && told[0].contains("removing container edits"), "{told:?}");
    }
    drop(plugin);
    let plugin = site.start_plugin();
    assert_eq!(plugin.sweep().await.unwrap(), withheld());
    assert_eq!((site.mps.kept(), site.edits(&mine)), (kept, None));
    assert_eq!(
        plugin.preparer.executor.holders.kept_from_others().len(),
        1,
        "as what the API server took away"
    );
    site.ends(PID);
    assert_eq!(plugin.sweep().await.unwrap(), Sweep { released: 1, ..Sweep::default() });
    site.check_empty("swept");
}

/// A sweep that judged the claim before had to wait for the lane that kubelet's call held.
#[tokio::test]
async fn edits_of_a_claim_that_is_being_released_are_not_written_again() {
    let site = Site::with_whole_gpus(1);
    let plugin = site.start_plugin();
    let mine = Claim::new("mine", &["gpu-0"]).reserved_for(&[LATER]);
    site.api.put(&mine);
    plugin.prepared(&mine, "before").await;
    let _opener = Opener::of(&site, (195, 0));
    plugin.unprepare(&mine).await.expect("the pod may go");
    let record = site.records().remove(0);
    assert_eq!((record.phase, site.edits(&mine)), (Phase::Releasing, None));
    let allocated = site.api.claim(&mine.id()).await.unwrap();
    assert!(!plugin.preparer.renew(record, allocated).await.unwrap());
    assert_eq!(site.edits(&mine), None);
}

/// A record of before pods were recorded, or of a claim that was reserved for none.
#[tokio::test]
async fn a_gpu_of_a_claim_without_pods_is_held_by_a_strange_pod_too() {
    let mine = Claim::new("mine", &["gpu-0"]);
    let site = Site::new();
    site.api.put(&mine);
    let plugin = site.start_plugin();
    plugin.prepared(&mine, "before").await;
    let opener = Opener::of(&site, (195, 0));
    plugin.unprepare(&mine).await.unwrap();
    assert_eq!(site.files(), [""; 0]);
    assert_eq!(plugin.sweep().await.unwrap(), withheld());
    drop(opener);
    assert_eq!(plugin.sweep().await.unwrap(), Sweep { rolled_back: 1, ..Sweep::default() });
    site.check_empty("swept");
}

/// A control group below the pod's own, with a name that is longer than the kernel tells: reading it fails as here.
fn hide(site: &Site, pid: u32) {
    let group = site.path(&format!("processes/{pid}/cgroup"));
    fs::remove_file(&group).unwrap();
    symlink("x".repeat(300), &group).unwrap();
}

/// It may be of any pod. Kubelet knows of its own.
#[tokio::test]
async fn a_process_that_hides_its_pod_holds_what_it_has_open_and_what_nobody_knows_to_be_free() {
    let mine = whole("mine");
    let words = ["gpu-0 is not free yet", "process 4712 whose control group cannot be read"];
    for kubelet in [true, false] {
        let site = with_pod(&mine).await;
        let plugin = site.start_plugin();
        site.runs(STRANGE_PID + 1, LATER);
        hide(&site, STRANGE_PID + 1);
        site.api.put(&next());
        match kubelet {
            true => {
                plugin.unprepare(&mine).await.expect("the pod may go");
                plugin.refused(&next(), &["process 4711 of pod team/pod-1111"]).await;
                site.ends(PID);
                // What hides has no GPU open.
                assert_eq!(plugin.sweep().await.unwrap(), Sweep { rolled_back: 1, ..Sweep::default() });
            }
            false => {
                site.api.remove(&mine);
                site.ends(PID);
                assert_eq!(plugin.sweep().await.unwrap(), withheld());
                plugin.refused(&next(), &["gpu-0 is not free yet", "of process 4713; delete the pod"]).await;
                site.ends(STRANGE_PID + 1);
                assert_eq!(plugin.sweep().await.unwrap(), Sweep { released: 1, ..Sweep::default() });
            }
        }
        let opener = Opener::of(&site, (195, 0));
        hide(&site, STRANGE_PID);
        plugin.refused(&next(), &words).await;
        drop(opener);
        plugin.prepared(&next(), "free").await;
        let opener = Opener::of(&site, (195, 0));
        hide(&site, STRANGE_PID);
        plugin.unprepare(&next()).await.expect("the pod may go");
        assert_eq!(plugin.sweep().await.unwrap(), withheld());
        plugin.refused(&next(), &["devices are still held", words[1]]).await;
        drop(opener);
        assert_eq!(plugin.sweep().await.unwrap(), Sweep { rolled_back: 1, ..Sweep::default() });
        plugin.prepared(&next(), "free").await;
    }
}

/// One that was not there yet, or could not be seen, when the device was released.
#[tokio::test]
async fn what_a_strange_pod_has_open_is_given_to_nobody() {
    let mig = "gpu-2-mig-1g10gb-19-0";
    for (device, numbers) in [("gpu-0", (195, 0)), (mig, (237, 66)), (mig, (237, 67))] {
        let site = Site::new();
        let mine = Claim::new("mine", &[device]).reserved_for(&[POD]);
        site.api.put(&mine);
        let plugin = site.start_plugin();
        let opener = Opener::of(&site, numbers);
        let words =
            [device, "is not free yet", "process 4712 of pod 33333333", "has it open without a claim on it"];
        plugin.refused(&mine, &words).await;
        site.check_empty(device);
        drop(opener);
        plugin.prepared(&mine, device).await;
        // Once it is the claim's, its own pods may.
        let _own = Opener::of(&site, numbers);
        plugin.prepared(&mine, device).await;
    }
    // The node of a board is open in all that have a part of it, and a share is nobody's alone.
    let site = Site::new();
    let plugin = site.start_plugin();
    let _neighbours = [Opener::of(&site, (195, 2))];
    for claim in [Claim::new("part", &[mig]), Claim::new("share", &["gpu-0"]).share("10Gi", "25")] {
        site.api.put(&claim);
        plugin.prepared(&claim, "beside others").await;
    }
}

/// An administrator may have it told only, or not looked for.
#[tokio::test]
async fn where_open_descriptors_only_warn_the_gpu_is_given() {
    for policy in [OpenDescriptors::Warn, OpenDescriptors::Off] {
        let mine = whole("mine");
        let site = with_pod(&mine).await;
        *site.open_descriptors.lock().unwrap() = policy;
        let plugin = site.start_plugin();
        let _opener = Opener::of(&site, (195, 0));
        site.ends(PID);
        plugin.unprepare(&mine).await.unwrap();
        site.api.put(&next());
        plugin.prepared(&next(), "told of, and given").await;
        let warned = if policy == OpenDescriptors::Warn { 2.0 } else { 0.0 };
        assert_eq!(plugin.metric("tranche_open_device_findings_total"), warned);
    }
}

/// A pod that watches a GPU, with a claim for it, keeps nobody off it.
#[tokio::test]
async fn a_pod_with_administrative_access_may_have_a_gpu_open() {
    let watch = Claim::new("watch", &["gpu-0"]).admin().reserved_for(&[STRANGE]);
    let mine = whole("mine");
    let site = Site::new();
    for claim in [&watch, &mine] {
        site.api.put(claim);
    }
    let plugin = site.start_plugin();
    plugin.prepared(&watch, "at any time").await;
    let _opener = Opener::of(&site, (195, 0));
    plugin.prepared(&mine, "watched").await;
    plugin.unprepare(&mine).await.unwrap();
    site.api.put(&next());
    plugin.prepared(&next(), "watched").await;
}

/// The same claim on other devices: what its earlier pod holds is recorded apart, and held for nobody else.
#[tokio::test]
async fn a_claim_that_is_allocated_anew_leaves_its_old_device_held() {
    let mine = whole("mine");
    let site = with_pod(&mine).await;
    let plugin = site.start_plugin();
    let anew = Claim::new("mine", &["gpu-1"]).reserved_for(&[LATER]);
    site.api.put(&anew);
    site.api.put(&next());
    plugin.prepared(&anew, "on another GPU").await;
    assert!(site.path("ledger/uid-mine-owed-0.rec").exists(), "as earlier versions have it");
    plugin.refused(&next(), &["gpu-0 is not free yet", "process 4711"]).await;
    hide_processes(&site);
    assert_eq!(plugin.sweep().await.unwrap(), withheld());
    show_processes(&site);
    assert_eq!(plugin.sweep().await.unwrap(), withheld());
    plugin.refused(&next(), &["gpu-0 is not free yet", "process 4711"]).await;
    assert!(site.edits(&anew).is_some());
    site.ends(PID);
    plugin.sweep().await.unwrap();
    plugin.prepared(&next(), "free").await;
    assert_eq!(site.records().len(), 2);
    plugin.unprepare(&anew).await.unwrap();
    plugin.unprepare(&next()).await.unwrap();
    site.check_empty("at the end");
}

/// As versions before wrote it: its claim has a UID that is none.
#[tokio::test]
async fn what_a_claim_owes_by_an_earlier_versions_record_is_held_and_undone() {
    let site = Site::new();
    let anew = Claim::new("mine", &["gpu-1"]).reserved_for(&[LATER]);
    site.api.put(&anew);
    site.api.put(&next());
    let answer =
        json!({"requests": ["r0"], "pool": NODE, "device": "gpu-0", "cdi_ids": [], "share_id": null});
    let owed = json!({
        "version": 1,
        "claim": {"namespace": "team", "name": "mine", "uid": "uid-mine-owed-0"},
        "boot": site.boot(),
        "devices": [{"answer": answer, "uuid": "GPU-0", "gpu": "GPU-0", "mode": "Whole"}],
        "steps": [{"TimeSlice": {"gpu": "GPU-0", "level": 3}}],
        "pods": [{"namespace": "team", "name": "p", "uid": POD}],
    });
    let line = |entry: &Value| {
        let json = entry.to_string();
        format!("{:08x} {json}\n", crc32fast::hash(json.as_bytes()))
    };
    let file = site.path("ledger/uid-mine-owed-0.rec");
    fs::create_dir_all(site.path("ledger")).unwrap();
    fs::write(&file, [line(&owed), line(&json!("Releasing"))].concat()).unwrap();
    site.runs(PID, POD);

    let plugin = site.start_plugin();
    let record = site.records().remove(0);
    let (claim, standing) = (record.intent.claim.clone(), record.intent.standing);
    assert_eq!((claim, standing, record.phase), (anew.id(), Standing::Owed(0), Phase::Releasing));
    // The claim itself owes nothing of it.
    plugin.prepared(&anew, "on another GPU").await;
    assert_eq!(plugin.sweep().await.unwrap(), withheld());
    plugin.refused(&next(), &["gpu-0 is not free yet", "process 4711"]).await;
    site.ends(PID);
    assert_eq!(plugin.sweep().await.unwrap(), Sweep { rolled_back: 1, ..Sweep::default() });
    assert!(!file.exists());
    plugin.prepared(&next(), "free").await;
    plugin.unprepare(&anew).await.unwrap();
    plugin.unprepare(&next()).await.unwrap();
    site.check_empty("at the end");
}

/// What is withheld is free within moments, not a sweep later.
#[tokio::test]
async fn what_is_withheld_is_looked_at_again_soon() {
    let mine = whole("mine");
    let site = with_pod(&mine).await;
    let plugin = site.start_plugin();
    site.api.remove(&mine);
    let stop = tokio_util::sync::CancellationToken::new();
    let sweeper =
        tranche::node::sweeper::run(plugin.preparer.clone(), Duration::from_secs(3600), stop.clone());
    let sweeper = tokio::spawn(sweeper);
    let holders = &plugin.preparer.executor.holders;
    let mut now = holders.withheld();
    let limit = Duration::from_secs(60);
    tokio::time::timeout(limit, now.wait_for(|all| all.len() == 1)).await.unwrap().unwrap();
    site.ends(PID);
    tokio::time::timeout(limit, now.wait_for(|all| all.is_empty())).await.unwrap().unwrap();
    site.check_empty("looked at again");
    stop.cancel();
    sweeper.await.unwrap().unwrap();
}
