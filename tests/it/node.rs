//! What kubelet and the people behind it see when something is wrong: words for the claim concerned, no
//! other claim disturbed, nothing half prepared, and a clean state once the trouble is over.

use std::collections::BTreeMap;
use std::fs;
use std::future::Future;
use std::io::Write;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::future::join_all;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use serde_json::{Value, json};
use tranche::host::durable;
use tranche::inventory::Inventory;
use tranche::kubelet::Claims;
use tranche::model::error_chain;
use tranche::model::gpu::{Health, MigMode};
use tranche::node::sweeper::Sweep;

use crate::site::{Claim, PluginRun, Site, board, gpu_config, mig, uuid};
use crate::stop_at::{EIO, ENOSPC, Fault, Verb};

/// Longer than anything here takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

async fn soon<T>(what: &str, work: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, work).await.unwrap_or_else(|_| panic!("{what}: still waiting"))
}

fn contains(text: &str, words: &[&str], at: &str) {
    for word in words {
        assert!(text.contains(word), "{at}: {word:?} is not in: {text}");
    }
}

fn result(key: &str, value: Value) -> (String, Value) {
    (format!("/status/allocation/devices/results/0/{key}"), value)
}

fn gpu0() -> Claim {
    Claim::new("bad", &["gpu-0"])
}

/// Claims that cannot be prepared, and words that their pod's event must have.
fn bad_claims() -> Vec<(Claim, Vec<&'static str>)> {
    let with = |(pointer, value): (String, Value)| gpu0().with(&pointer, value);
    let mig_config = |sharing: Value| json!({"apiVersion": "resource.nvidia.com/v1beta1", "kind": "MigDeviceConfig", "sharing": sharing});
    let unknown = gpu_config(json!({"strategy": "TimeSlicing", "timeSlicing": {"interval": "Long"}}));
    let mps = gpu_config(json!({"strategy": "MPS", "mpsConfig": {"defaultActiveThreadPercentage": 0}}));
    let interval = json!({"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Long"}});
    let fine = gpu_config(interval.clone());
    let mut share = gpu0();
    share.0["status"]["allocation"]["devices"]["results"][0]["shareID"] = json!("abc");
    vec![
        (gpu0().config(&[], unknown), vec!["config[0]", "sharing.timeSlicing", "unknown field"]),
        (gpu0().config(&[], json!({"kind": "GpuConfig"})), vec!["config[0]", "apiVersion", "v1beta1"]),
        (gpu0().config(&["nope"], fine.clone()), vec!["\"nope\"", "does not have", "r0"]),
        (
            gpu0().config(&["r0"], mig_config(json!({"strategy": "MPS"}))),
            vec!["MigDeviceConfig", "GpuConfig", "gpu-0"],
        ),
        (gpu0().config(&[], mig_config(interval)), vec!["sharing.timeSlicingConfig", "unknown field"]),
        (gpu0().config(&[], mps), vec!["defaultActiveThreadPercentage", "1 to 100"]),
        (gpu0().interval("Forever"), vec!["interval", "Forever", "Short"]),
        // The good part of a claim is not held because of its bad part.
        (
            Claim::new("bad", &["gpu-0", "gpu-9"]),
            vec!["gpu-9", "this node does not have", "gpu-0", "delete the pods"],
        ),
        (with(result("pool", json!("node-b"))), vec!["pool node-b", "this is node node-a"]),
        (with(result("device", json!(""))), vec!["results[0].device", "is empty"]),
        (with(result("driver", json!("other.example.com"))), vec!["none of its devices"]),
        (with(("/status".into(), Value::Null)), vec!["not allocated", "status.allocation"]),
        (share, vec!["does not say how much memory"]),
        (gpu0().share("1Gi", "500m"), vec!["compute", "not a whole number of percent"]),
        (gpu0().share("0", "0"), vec!["no memory", "capacity.requests.memory"]),
    ]
}

#[tokio::test]
async fn a_bad_claim_is_refused_in_words_and_the_others_go_on() {
    let site = Site::new();
    let plugin = site.start_plugin();
    let running = Claim::new("running", &["gpu-2-mig-1g10gb-19-0"]);
    site.api.put(&running);
    plugin.prepared(&running, "at first").await;
    let before = site.edits(&running);
    for (number, (bad, words)) in bad_claims().into_iter().enumerate() {
        let at = format!("bad claim {number}");
        let good = Claim::new("good", &["gpu-1"]).uid(&format!("uid-good-{number}"));
        site.api.put(&bad);
        site.api.put(&good);
        let answers = plugin.preparer.prepare(vec![bad.id(), good.id()]).await;
        contains(answers[&bad.id().uid].as_ref().unwrap_err(), &words, &at);
        assert_eq!(answers[&good.id().uid].as_ref().unwrap()[0].cdi_ids, good.cdi_ids(), "{at}");
        assert!(site.edits(&bad).is_none(), "{at}");
        assert_eq!(site.records().len(), 2, "{at}");
        plugin.unprepare(&bad).await.unwrap();
        plugin.unprepare(&good).await.unwrap();
        assert_eq!(site.edits(&running), before, "{at}");
        assert!(site.is_ready(&running), "{at}");
    }
    plugin.check("I1");
    assert_eq!(plugin.metric("tranche_refused_double_allocations_total"), 0.0);
}

#[tokio::test]
async fn a_claim_that_is_gone_or_replaced_is_not_prepared() {
    let site = Site::new();
    let plugin = site.start_plugin();
    let claim = Claim::new("train", &["gpu-0"]);
    plugin.refused(&claim, &["team/train (uid-train)", "no longer exists"]).await;
    site.api.put(&claim.clone().uid("uid-of-another"));
    plugin.refused(&claim, &["was replaced", "uid-of-another"]).await;
    site.check_empty("refused");
}

#[tokio::test]
async fn an_unhealthy_gpu_is_given_to_administrators_only() {
    let site = Site::new();
    site.gpus.send_modify(|inventory| {
        let Inventory::Found(gpus) = inventory else { unreachable!() };
        gpus.gpus[0].health = Health::Unhealthy("XID 79, fallen off the bus".into());
    });
    let plugin = site.start_plugin();
    let claim = Claim::new("train", &["gpu-0"]);
    site.api.put(&claim);
    plugin.refused(&claim, &["gpu-0", "XID 79"]).await;
    let admin = Claim::new("doctor", &["gpu-0"]).admin();
    site.api.put(&admin);
    plugin.prepared(&admin, "admin").await;
}

#[tokio::test]
async fn a_device_allocated_twice_stays_with_its_first_claim() {
    let site = Site::new();
    let plugin = site.start_plugin();
    let (first, second) =
        (Claim::new("first", &["gpu-0"]).interval("Long"), Claim::new("second", &["gpu-1", "gpu-0"]));
    let admin = Claim::new("admin", &["gpu-0"]).admin();
    for claim in [&first, &second, &admin] {
        site.api.put(claim);
    }
    plugin.prepared(&first, "first").await;
    for tries in [1.0, 2.0] {
        plugin
            .refused(&second, &["gpu-0", "in use by claim team/first (uid-first)", "allocated twice"])
            .await;
        assert_eq!(plugin.metric("tranche_refused_double_allocations_total"), tries);
    }
    plugin.prepared(&admin, "administrators hold nothing").await;
    plugin.unprepare(&admin).await.unwrap();
    plugin.unprepare(&second).await.unwrap();
    assert!(site.is_ready(&first) && site.edits(&first).is_some());
    assert_eq!(site.time_slice(0), 3, "unpreparing the second must not touch the first's GPU");
    plugin.unprepare(&first).await.unwrap();
    plugin.prepared(&second, "the first is gone").await;
}

/// An administrator cuts a GPU that is in use.
#[tokio::test]
async fn parts_of_a_board_that_is_held_whole_are_not_given_away() {
    let site = Site::new();
    let plugin = site.start_plugin();
    let (whole, part) = (Claim::new("whole", &["gpu-1"]), Claim::new("part", &["gpu-1-mig-1g10gb-19-0"]));
    site.api.put(&whole);
    site.api.put(&part);
    plugin.prepared(&whole, "whole").await;
    site.gpus.send_modify(|inventory| {
        let Inventory::Found(gpus) = inventory else { unreachable!() };
        gpus.gpus[1] = board(1, MigMode::On(vec![mig(0)]));
    });
    plugin.refused(&part, &["in use by claim team/whole"]).await;
    plugin.unprepare(&whole).await.unwrap();
    site.check_empty("a device that is no more is released");
}

#[tokio::test]
async fn a_claim_replaced_under_its_name_waits_for_the_old_one() {
    let site = Site::new();
    let plugin = site.start_plugin();
    let old = Claim::new("train", &["gpu-0"]).uid("uid-old").interval("Long");
    let new = Claim::new("train", &["gpu-0"]).uid("uid-new");
    site.api.put(&old);
    plugin.prepared(&old, "old").await;
    site.api.put(&new);
    plugin.refused(&new, &["in use by claim team/train (uid-old)"]).await;
    assert!(site.edits(&old).is_some());
    assert_eq!(plugin.sweep().await.unwrap(), Sweep { released: 1, ..Sweep::default() });
    plugin.prepared(&new, "new").await;
    assert_eq!(site.time_slice(0), 0);
    // Kubelet comes late for the old one.
    plugin.unprepare(&old).await.unwrap();
    assert!(site.is_ready(&new) && site.edits(&new).is_some());
}

/// I9.
#[tokio::test]
async fn unpreparing_an_unknown_claim_succeeds() {
    let site = Site::new();
    let plugin = site.start_plugin();
    for uid in ["uid-never-seen", "odd_but.allowed", &"a".repeat(128)] {
        plugin.unprepare(&Claim::new("unknown", &["gpu-0"]).uid(uid)).await.unwrap();
    }
}

/// I6, from two pods that share a claim.
#[tokio::test]
async fn a_claim_asked_for_many_times_at_once_is_prepared_once() {
    let site = Site::new();
    let plugin = site.start_plugin();
    let claim = Claim::new("shared", &["gpu-0", "gpu-1"]);
    site.api.put(&claim);
    join_all((0..8).map(|_| plugin.prepared(&claim, "at once"))).await;
    let writes = plugin.host.log().iter().filter(|verb| **verb == Verb::WriteRecord).count();
    assert_eq!(writes, 1);
    site.check("at once");
}

/// Numbers in an order that looks random and is the same in each run.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.0 >> 33).unwrap() % sides
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hundred_claims_at_once_over_eight_gpus() {
    let site = Site::with_whole_gpus(8);
    let plugin = site.start_plugin();
    let mut dice = Dice(1);
    let holders: Mutex<BTreeMap<String, String>> = Mutex::default();
    let claims: Vec<Claim> = (0..100)
        .map(|n| {
            let first = dice.roll(8);
            let more = if n % 4 == 0 { vec![(first + 1 + dice.roll(7)) % 8] } else { vec![] };
            let devices: Vec<String> =
                [vec![first], more].concat().iter().map(|m| format!("gpu-{m}")).collect();
            Claim::new(&format!("c{n}"), &devices.iter().map(String::as_str).collect::<Vec<_>>())
        })
        .collect();
    claims.iter().for_each(|claim| site.api.put(claim));
    // Each asks until it had its GPUs once: as long as one holds a GPU, nobody else may.
    let one = |claim: &Claim| {
        let (plugin, holders, claim) = (&plugin, &holders, claim.clone());
        async move {
            let devices = loop {
                match plugin.prepare(&claim).await {
                    Ok(devices) => break devices,
                    // The others may take longer than anybody waits for a GPU's turn, on a slow machine.
                    Err(refusal) => {
                        let words = ["in use by claim", "is still being changed for another claim after"];
                        assert!(words.iter().any(|words| refusal.contains(words)), "refused: {refusal}");
                    }
                }
                tokio::task::yield_now().await;
            };
            let id = claim.id().uid.to_string();
            for device in &devices {
                let before = holders.lock().unwrap().insert(device.device.to_string(), id.clone());
                assert_eq!(before, None, "{} is given to {id} too", device.device);
            }
            tokio::task::yield_now().await;
            for device in &devices {
                holders.lock().unwrap().remove(device.device.as_str());
            }
            plugin.unprepare(&claim).await.unwrap();
        }
    };
    soon("all had their turn", join_all(claims.iter().map(one))).await;
    site.check_empty("all are done");
    plugin.check("I1");
}

/// Stops the driver's tool for one GPU until it is released.
fn gate(site: &Site, minor: u32) -> PathBuf {
    let path = site.path(&format!("driver/gpus/{}.gate", uuid(minor)));
    mkfifo(&path, Mode::S_IRWXU).unwrap();
    path
}

/// Returns when the tool waits at its gate. It is the only one to.
async fn at_gate(path: PathBuf) -> fs::File {
    let gate = path.clone();
    let open = move || fs::File::options().write(true).open(gate).unwrap();
    let gate = soon("the tool comes to its gate", tokio::task::spawn_blocking(open)).await.unwrap();
    fs::remove_file(path).unwrap();
    gate
}

fn release(mut gate: fs::File) {
    gate.write_all(b"go\n").unwrap();
}

#[tokio::test]
async fn a_slow_gpu_holds_up_no_other() {
    let site = Site::new();
    let plugin = Arc::new(site.start_plugin());
    let slow = Claim::new("slow", &["gpu-0"]).interval("Long");
    let others =
        [Claim::new("other", &["gpu-1"]).interval("Short"), Claim::new("part", &["gpu-2-mig-1g10gb-19-0"])];
    [&slow].into_iter().chain(&others).for_each(|claim| site.api.put(claim));
    let gate = gate(&site, 0);
    let (waiting, claim) = (plugin.clone(), slow.clone());
    let waiting = tokio::spawn(async move { waiting.prepared(&claim, "slow").await });
    let gate = at_gate(gate).await;
    for other in &others {
        soon("another GPU's claim", plugin.prepared(other, "other")).await;
        soon("another GPU's claim", plugin.unprepare(other)).await.unwrap();
    }
    assert!(!waiting.is_finished());
    release(gate);
    soon("the slow one", waiting).await.unwrap();
    assert_eq!(site.time_slice(0), 3);
}

/// A rolling update: the new process is there before the old one is gone.
#[tokio::test]
async fn what_one_process_prepared_the_other_knows() {
    let site = Site::new();
    let (old, new) = (site.start_plugin(), site.start_plugin());
    let (one, two) = (Claim::new("one", &["gpu-0"]), Claim::new("two", &["gpu-0"]));
    site.api.put(&one);
    site.api.put(&two);
    old.prepared(&one, "by the old").await;
    new.refused(&two, &["in use by claim team/one"]).await;
    new.prepared(&one, "again, by the new").await;
    new.unprepare(&one).await.unwrap();
    site.check_empty("released by the new");
    old.prepared(&two, "the old knows of the release").await;
    new.refused(&one, &["in use by claim team/two"]).await;
    new.unprepare(&two).await.unwrap();
    new.prepared(&one, "by the new").await;
    old.refused(&two, &["in use by claim team/one"]).await;
    site.check("two processes");
}

#[tokio::test]
async fn a_new_process_leaves_alone_what_the_old_one_is_at() {
    let site = Site::new();
    let old = Arc::new(site.start_plugin());
    let claim = Claim::new("train", &["gpu-0"]).interval("Long");
    site.api.put(&claim);
    let gate = gate(&site, 0);
    let (plugin, asked) = (old.clone(), claim.clone());
    let preparing = tokio::spawn(async move { plugin.prepared(&asked, "by the old").await });
    let gate = at_gate(gate).await;
    // It opens the ledger amid the preparation, and takes it for a crash's.
    let new = Arc::new(site.start_plugin());
    let plugin = new.clone();
    let sweeping = tokio::spawn(async move { plugin.sweep().await });
    release(gate);
    soon("prepared", preparing).await.unwrap();
    soon("swept", sweeping).await.unwrap();
    assert!(site.is_ready(&claim) && site.edits(&claim).is_some(), "taken back under its pod");
    assert_eq!(site.time_slice(0), 3);
}

#[tokio::test]
async fn a_release_that_the_old_process_could_not_finish_is_known_to_the_new() {
    let site = Site::new();
    let (old, new) = (site.start_plugin(), site.start_plugin());
    let claim = Claim::new("train", &["gpu-0"]).interval("Long");
    site.api.put(&claim);
    old.prepared(&claim, "old").await;
    new.prepared(&claim, "seen by the new").await;
    fs::write(site.path("driver/gpus/fail"), "the GPU is lost").unwrap();
    old.unprepare(&claim).await.expect("the pod may end");
    assert_eq!(site.edits(&claim), None, "nothing of it can be used");
    fs::remove_file(site.path("driver/gpus/fail")).unwrap();
    new.prepared(&claim, "by the new, from the start").await;
    old.sweep().await.unwrap();
    assert!(site.is_ready(&claim) && site.edits(&claim).is_some(), "taken back under its pod");
}

#[tokio::test]
async fn the_sweeper_looks_at_what_another_process_wrote() {
    let site = Site::new();
    let (old, new) = (site.start_plugin(), site.start_plugin());
    let (gone, kept) = (Claim::new("gone", &["gpu-0"]), Claim::new("kept", &["gpu-1"]));
    site.api.put(&gone);
    site.api.put(&kept);
    old.prepared(&gone, "old").await;
    old.prepared(&kept, "old").await;
    drop(old);
    site.api.remove(&gone);
    assert_eq!(new.sweep().await.unwrap(), Sweep { released: 1, ..Sweep::default() });
    assert_eq!(site.records().len(), 1);
    let third = site.start_plugin();
    third.unprepare(&kept).await.unwrap();
    site.api.remove(&kept);
    assert_eq!(new.sweep().await.unwrap(), Sweep::default(), "nothing is left to release");
}

/// I8: each kind of record that is not to be trusted stops the start, and is left as it was.
#[tokio::test]
async fn a_record_that_cannot_be_trusted_stops_the_start() {
    let site = Site::new();
    let claim = Claim::new("train", &["gpu-0"]);
    site.api.put(&claim);
    site.start_plugin().prepared(&claim, "before").await;
    let place = site.path("ledger/uid-train.rec");
    let good = fs::read(&place).unwrap();
    let mut flipped = good.clone();
    flipped[40] ^= 1;
    let newer = b"{\"version\":9}";
    let newer = [format!("{:08x} ", crc32fast::hash(newer)).as_bytes(), newer, b"\n"].concat();
    for (what, bytes, name, words) in [
        ("a flipped bit", flipped, "uid-train.rec", "line 1 does not match its checksum"),
        ("nothing in it", vec![], "uid-train.rec", "it is empty"),
        ("cut within the first line", good[..50].to_vec(), "uid-train.rec", "it is empty"),
        ("no record at all", b"hello\n".to_vec(), "uid-train.rec", "does not have the form"),
        ("a later release's", newer, "uid-train.rec", "format version 9"),
        ("another claim's", good.clone(), "uid-other.rec", "is that of claim uid-train"),
    ] {
        fs::remove_file(&place).ok();
        let place = site.path("ledger").join(name);
        fs::write(&place, &bytes).unwrap();
        let error = error_chain(&site.try_start_plugin().err().expect(what));
        contains(&error, &[words, place.to_str().unwrap(), "move it away and start again"], what);
        assert_eq!(fs::read(&place).unwrap(), bytes, "{what}");
        assert_eq!(durable::names(&site.path("ledger")).unwrap(), [name], "{what}");
        fs::remove_file(&place).unwrap();
    }
    fs::write(&place, &good).unwrap();
    fs::write(site.path("ledger/notes.txt"), "somebody's own").unwrap();
    site.start_plugin().prepared(&claim, "after").await;
}

/// The index is not trusted after it could not be read again, however often one asks.
#[tokio::test]
async fn a_record_damaged_while_running_stops_its_gpu_from_being_given_away() {
    let site = Site::new();
    let (old, new) = (site.start_plugin(), site.start_plugin());
    let (one, two) = (Claim::new("one", &["gpu-0"]), Claim::new("two", &["gpu-0"]));
    site.api.put(&one);
    site.api.put(&two);
    old.prepared(&one, "old").await;
    let place = site.path("ledger/uid-one.rec");
    let good = fs::read(&place).unwrap();
    fs::write(&place, &good[10..]).unwrap();
    for _ in 0..3 {
        new.refused(&two, &["uid-one.rec is damaged", "restore it"]).await;
    }
    assert_eq!(fs::read(&place).unwrap(), &good[10..]);
    assert!(site.edits(&two).is_none());
    fs::write(&place, &good).unwrap();
    new.refused(&two, &["in use by claim team/one"]).await;
}

/// Prepares with a fault; afterwards nothing is there, and without the fault all goes well.
async fn fails_cleanly(
    claim: &Claim,
    at: &str,
    words: &[&str],
    fault: impl Fn(usize, Verb) -> Option<Fault> + Send + 'static,
) {
    let site = Site::new();
    let plugin = site.start_plugin();
    let other = Claim::new("other", &["gpu-2-mig-1g10gb-19-1"]);
    site.api.put(claim);
    site.api.put(&other);
    plugin.prepared(&other, at).await;
    plugin.host.faults(fault);
    contains(&plugin.prepare(claim).await.expect_err(at), words, at);
    site.check(at);
    assert_eq!(site.records().len(), 1, "{at}: a record stays");
    assert_eq!(site.files().len(), 1, "{at}: {:?}", site.files());
    assert_eq!(site.time_slice(0), 0, "{at}");
    assert!(site.is_ready(&other) && site.edits(&other).is_some(), "{at}");
    plugin.host.no_faults();
    plugin.prepared(claim, at).await;
    plugin.unprepare(claim).await.unwrap();
    plugin.unprepare(&other).await.unwrap();
    site.check_empty(at);
    plugin.check(at);
}

fn sliced() -> Claim {
    Claim::new("train", &["gpu-0"]).interval("Long")
}

/// The record, the CDI file, three marks.
const WRITES: usize = 5;

async fn count_writes() -> usize {
    let site = Site::new();
    site.api.put(&sliced());
    let plugin = site.start_plugin();
    plugin.prepared(&sliced(), "counting").await;
    plugin.host.log().iter().filter(|verb| verb.divisible()).count()
}

#[tokio::test]
async fn a_full_disk_fails_the_claim_alone_whichever_write_meets_it() {
    assert_eq!(count_writes().await, WRITES);
    for full_after in 0..WRITES {
        let written = Mutex::new(0);
        let fault = move |_, verb: Verb| {
            let mut written = written.lock().unwrap();
            *written += usize::from(verb.divisible());
            (verb.divisible() && *written > full_after).then_some(Fault::Fails(ENOSPC))
        };
        let at = format!("full after {full_after} writes");
        fails_cleanly(&sliced(), &at, &["No space left on device"], fault).await;
    }
}

/// A disk that does what it is told and then reports an error: the record is there although its write failed.
#[tokio::test]
async fn a_write_that_is_not_confirmed_leaves_nothing() {
    for failing in 0..6 {
        let fault = move |index, verb: Verb| {
            (index == failing && verb.divisible()).then_some(Fault::DoneButFails(EIO))
        };
        // The time slice has an index too, and no such fault.
        if failing != 1 {
            let at = format!("verb {failing}");
            fails_cleanly(&sliced(), &at, &["Input/output error"], fault).await;
        }
    }
}

#[tokio::test]
async fn a_full_disk_keeps_no_pod_from_ending() {
    let site = Site::new();
    let plugin = site.start_plugin();
    site.api.put(&sliced());
    plugin.prepared(&sliced(), "before").await;
    plugin.host.faults(|_, verb| verb.divisible().then_some(Fault::Fails(ENOSPC)));
    plugin.unprepare(&sliced()).await.unwrap();
    site.check_empty("disk full");
    assert_eq!(site.time_slice(0), 0);
}

/// Undone on drop, also when the test fails.
struct ReadOnly(PathBuf);

impl ReadOnly {
    fn mount(path: PathBuf) -> Self {
        let none = None::<&str>;
        mount(Some(&path), &path, none, MsFlags::MS_BIND, none).expect("root may mount");
        let flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
        mount(none, &path, none, flags, none).expect("root may mount");
        Self(path)
    }
}

impl Drop for ReadOnly {
    fn drop(&mut self) {
        let _ = umount2(&self.0, MntFlags::MNT_DETACH);
    }
}

#[tokio::test]
#[ignore = "needs CAP_SYS_ADMIN"]
async fn a_read_only_cdi_folder_is_told_and_leaves_nothing() {
    let site = Site::new();
    let plugin = site.start_plugin();
    site.api.put(&sliced());
    let read_only = ReadOnly::mount(site.path("cdi"));
    plugin.refused(&sliced(), &["writing the container edits", "Read-only file system"]).await;
    site.check_empty("read-only");
    assert_eq!(site.time_slice(0), 0);
    plugin.unprepare(&sliced()).await.unwrap();
    drop(read_only);
    plugin.prepared(&sliced(), "writable again").await;
}

#[tokio::test]
async fn a_missing_driver_library_is_told_and_leaves_nothing() {
    let site = Site::new();
    let plugin = site.start_plugin();
    site.api.put(&sliced());
    let place = site.path("driver/usr/lib64/libcuda.so.550.163.01");
    let aside = site.path("aside");
    fs::rename(&place, &aside).unwrap();
    plugin.refused(&sliced(), &["libcuda.so", "install the driver"]).await;
    site.check_empty("no libcuda");
    assert_eq!(plugin.host.log(), []);
    // Another version than NVML's: an update without a reboot.
    let newer = site.path("driver/usr/lib64/libcuda.so.560.35.03");
    fs::rename(&aside, &newer).unwrap();
    plugin.refused(&sliced(), &["560.35.03", "550.163.01", "without a reboot"]).await;
    site.check_empty("another libcuda");
    fs::rename(&newer, &place).unwrap();
    plugin.prepared(&sliced(), "back").await;
}

/// I5: release reads only the ledger.
#[tokio::test]
async fn unpreparing_needs_no_api_server_no_nvml_and_no_driver() {
    let site = Site::new();
    let plugin = site.start_plugin();
    let claim = Claim::new("train", &["gpu-0", "gpu-1"]);
    site.api.put(&claim);
    plugin.prepared(&claim, "before").await;
    site.api.silent.store(true, Ordering::SeqCst);
    site.gpus.send_replace(Inventory::Unavailable { reason: "NVML: driver not loaded".into() });
    fs::remove_dir_all(site.path("driver")).unwrap();
    soon("unprepare", plugin.unprepare(&claim)).await.unwrap();
    site.check_empty("all gone");
    // A new process in the same misery.
    soon("unprepare", site.start_plugin().unprepare(&claim)).await.unwrap();
}

/// I10: every step is tried, every error told, and the GPU is nobody's until it is done.
#[tokio::test]
async fn a_release_tries_every_step_and_is_tried_again() {
    let site = Site::new();
    let plugin = site.start_plugin();
    let two = Claim::new("two", &["gpu-0", "gpu-1"]).interval("Long");
    let next = Claim::new("next", &["gpu-1"]);
    site.api.put(&two);
    site.api.put(&next);
    plugin.prepared(&two, "before").await;
    fs::write(site.path("driver/gpus/fail"), "GPU is lost").unwrap();
    plugin.host.faults(|_, verb| (verb == Verb::Remove).then_some(Fault::Fails(EIO)));
    let error = plugin.unprepare(&two).await.unwrap_err();
    contains(&error, &["GPU-0", "GPU-1", "GPU is lost", "container edits", "Input/output error"], "both");
    plugin.host.no_faults();
    plugin.unprepare(&two).await.expect("a GPU that is lost keeps no pod from ending");
    assert_eq!(site.files(), [""; 0], "what can be taken back is");
    plugin.refused(&next, &["in use by claim team/two"]).await;
    assert_eq!(plugin.sweep().await.unwrap(), Sweep { failed: 1, ..Sweep::default() });
    fs::remove_file(site.path("driver/gpus/fail")).unwrap();
    assert_eq!(plugin.sweep().await.unwrap(), Sweep { rolled_back: 1, ..Sweep::default() });
    site.check_empty("swept");
    assert_eq!((site.time_slice(0), site.time_slice(1)), (0, 0));
    plugin.prepared(&next, "free").await;
}

#[tokio::test]
async fn a_tool_that_fails_leaves_nothing() {
    let site = Site::new();
    let plugin = site.start_plugin();
    site.api.put(&sliced());
    let tool = site.path("driver/usr/bin/nvidia-smi");
    fs::rename(&tool, site.path("aside")).unwrap();
    plugin.refused(&sliced(), &["time slice of GPU-0", "nvidia-smi is not below the driver root"]).await;
    fs::rename(site.path("aside"), &tool).unwrap();
    // Whether something is left to be taken back is not known, so the record stays until it is sure.
    fs::write(site.path("driver/gpus/fail"), "insufficient permissions").unwrap();
    plugin.refused(&sliced(), &["time slice of GPU-0", "insufficient permissions", "tried again"]).await;
    fs::remove_file(site.path("driver/gpus/fail")).unwrap();
    plugin.unprepare(&sliced()).await.unwrap();
    site.check_empty("the tool works again");
}

#[tokio::test]
async fn a_silent_api_server_changes_nothing() {
    let site = Site::new();
    let claims = [sliced(), Claim::new("mig", &["gpu-2-mig-1g10gb-19-0"])];
    let plugin = site.start_plugin();
    for claim in &claims {
        site.api.put(claim);
        plugin.prepared(claim, "before").await;
        site.api.remove(claim);
    }
    site.api.silent.store(true, Ordering::SeqCst);
    let plugin = site.start_plugin();
    assert_eq!(plugin.sweep().await.unwrap(), Sweep::default());
    for claim in &claims {
        assert!(site.is_ready(claim) && site.edits(claim).is_some());
        plugin.refused(claim, &["could not be read", "no route to host"]).await;
    }
    assert_eq!(site.time_slice(0), 3);
    site.api.silent.store(false, Ordering::SeqCst);
    assert_eq!(plugin.sweep().await.unwrap(), Sweep { released: 2, ..Sweep::default() });
    site.check_empty("it speaks again");
}

#[tokio::test]
async fn the_sweeper_puts_back_what_somebody_deleted() {
    let site = Site::new();
    let plugin = site.start_plugin();
    site.api.put(&sliced());
    plugin.prepared(&sliced(), "before").await;
    let edits = site.edits(&sliced());
    fs::remove_file(site.path("cdi").join(&site.files()[0])).unwrap();
    assert_eq!(plugin.sweep().await.unwrap(), Sweep { restored: 1, ..Sweep::default() });
    assert_eq!(site.edits(&sliced()), edits);
    assert_eq!(site.time_slice(0), 3);
    assert_eq!(plugin.sweep().await.unwrap(), Sweep::default());
    assert_eq!(plugin.metric("tranche_sweeper_repairs_total{kind=\"restored\"}"), 1.0);
}

/// Writes the driver's libraries as another version's installer would, NVML's word included.
fn upgrade_driver(site: &Site, version: &str) {
    let libraries = site.path("driver/usr/lib64");
    for file in durable::names(&libraries).unwrap() {
        let (stem, _) = file.split_once(".so.").unwrap();
        fs::rename(libraries.join(&file), libraries.join(format!("{stem}.so.{version}"))).unwrap();
    }
    site.gpus.send_modify(|inventory| {
        let Inventory::Found(gpus) = inventory else { panic!("{inventory:?}") };
        gpus.driver.driver = version.to_owned();
    });
}

/// Everything on the host that a claim's container edits name.
fn named_by(edits: &Value) -> Vec<String> {
    let entries = edits["devices"].as_array().unwrap().iter().map(|device| &device["containerEdits"]);
    let mounts =
        entries.chain([&edits["containerEdits"]]).filter_map(|edits| edits["mounts"].as_array()).flatten();
    mounts.map(|mount| mount["hostPath"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn container_edits_follow_the_drivers_files_within_a_boot() {
    let site = Site::new();
    let socket = site.path("driver/run/nvidia-persistenced/socket");
    fs::create_dir_all(socket.parent().unwrap()).unwrap();
    let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let mut plugin = site.start_plugin();
    let claims = [sliced(), Claim::new("share", &["gpu-1"]).share("2000Mi", "25")];
    for claim in &claims {
        site.api.put(claim);
        plugin.prepared(claim, "before").await;
        let named = named_by(&site.edits(claim).unwrap());
        assert!(named.iter().any(|path| path.ends_with("nvidia-persistenced/socket")), "{named:?}");
        assert!(named.iter().any(|path| path.ends_with("libcuda.so.550.163.01")), "{named:?}");
    }
    let renewed = Sweep { renewed: 2, ..Sweep::default() };
    let all_there = || {
        for claim in &claims {
            let named = named_by(&site.edits(claim).unwrap());
            let missing: Vec<_> = named.iter().filter(|path| !site.path(&path[1..]).exists()).collect();
            assert!(missing.is_empty(), "{missing:?}");
        }
    };
    // A service that is stopped.
    drop(listener);
    fs::remove_file(&socket).unwrap();
    assert_eq!(plugin.sweep().await.unwrap(), renewed);
    all_there();
    assert_eq!(plugin.sweep().await.unwrap(), Sweep::default());
    // Another driver, noticed by the sweeper of this process, and by kubelet's call to the next.
    upgrade_driver(&site, "550.163.02");
    assert_eq!(plugin.sweep().await.unwrap(), renewed);
    all_there();
    assert_eq!(plugin.metric("tranche_sweeper_repairs_total{kind=\"renewed\"}"), 4.0);
    upgrade_driver(&site, "560.35.03");
    drop(plugin);
    plugin = site.start_plugin();
    for claim in &claims {
        plugin.prepared(claim, "after the upgrade").await;
    }
    all_there();
    assert_eq!(plugin.sweep().await.unwrap(), Sweep::default());
    for claim in &claims {
        plugin.unprepare(claim).await.unwrap();
    }
}

async fn wait_named(site: &Site, version: &str) {
    let named = || named_by(&site.edits(&sliced()).unwrap());
    while !named().iter().any(|path| path.ends_with(version)) {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Not a sweep later: a container may start at any moment.
#[tokio::test]
async fn container_edits_name_the_files_of_another_driver_as_soon_as_it_is_found() {
    let site = Site::new();
    let plugin = site.start_plugin();
    site.api.put(&sliced());
    plugin.prepared(&sliced(), "before").await;
    let stop = tokio_util::sync::CancellationToken::new();
    let sweeper =
        tranche::node::sweeper::run(plugin.preparer.clone(), Duration::from_secs(3600), stop.clone());
    let sweeper = tokio::spawn(sweeper);
    // The first may be seen by the sweep at the start.
    for version in ["550.163.02", "560.35.03"] {
        upgrade_driver(&site, version);
        let named = tokio::time::timeout(Duration::from_secs(30), wait_named(&site, version));
        named.await.expect(version);
    }
    stop.cancel();
    sweeper.await.unwrap().unwrap();
}

#[tokio::test]
async fn container_edits_follow_the_toolkits_hook_the_sockets_and_the_numbers_of_device_nodes() {
    let site = Site::new();
    let plugin = site.start_plugin();
    let claims = [sliced(), Claim::new("share", &["gpu-1"]).share("2000Mi", "25")];
    for claim in &claims {
        site.api.put(claim);
        plugin.prepared(claim, "before").await;
    }
    let each = |what: &str, holds: &dyn Fn(&Value) -> bool| {
        for claim in &claims {
            let edits = site.edits(claim).unwrap();
            assert!(holds(&edits), "{what}: {edits}");
        }
    };
    let renewed = async |what: &str, holds: &dyn Fn(&Value) -> bool| {
        assert_eq!(plugin.sweep().await.unwrap(), Sweep { renewed: 2, ..Sweep::default() }, "{what}");
        each(what, holds);
        assert_eq!(plugin.sweep().await.unwrap(), Sweep::default(), "{what}");
    };
    // A service that begins later.
    let socket = site.path("driver/run/nvidia-fabricmanager/socket");
    let has_socket =
        |edits: &Value| named_by(edits).iter().any(|path| path.ends_with("fabricmanager/socket"));
    each("without the fabric manager", &|edits| !has_socket(edits));
    fs::create_dir_all(socket.parent().unwrap()).unwrap();
    let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    renewed("the fabric manager begins", &has_socket).await;
    drop(listener);
    fs::remove_file(&socket).unwrap();
    renewed("it ends", &|edits| !has_socket(edits)).await;
    // The toolkit comes, moves and goes.
    let hook = |at: &'static str| {
        let host = format!("/driver/{at}");
        move |edits: &Value| {
            let hooks = edits["containerEdits"]["hooks"].as_array().cloned().unwrap_or_default();
            !hooks.is_empty() && hooks.iter().all(|hook| hook["path"] == *host)
        }
    };
    let (first, second) = ("usr/bin/nvidia-cdi-hook", "usr/local/nvidia/toolkit/nvidia-cdi-hook");
    each("without a hook", &|edits| edits["containerEdits"]["hooks"].is_null());
    for place in [first, second] {
        fs::create_dir_all(site.path("driver").join(place).parent().unwrap()).unwrap();
    }
    fs::write(site.path("driver").join(first), "hook").unwrap();
    renewed("the hook appears", &hook(first)).await;
    fs::rename(site.path("driver").join(first), site.path("driver").join(second)).unwrap();
    renewed("it moves", &hook(second)).await;
    fs::remove_file(site.path("driver").join(second)).unwrap();
    renewed("it goes", &|edits| edits["containerEdits"]["hooks"].is_null()).await;
    // The kernel's module is loaded again, under another number.
    let uvm = |major: u32| {
        move |edits: &Value| {
            let nodes = edits["containerEdits"]["deviceNodes"].as_array().cloned().unwrap_or_default();
            nodes.iter().any(|node| node["path"] == "/dev/nvidia-uvm" && node["major"] == major)
        }
    };
    each("as the kernel numbers it", &uvm(511));
    let devices = b"Character devices:\n195 nvidia\n237 nvidia-caps\n509 nvidia-uvm\n";
    fs::write(site.path("driver/proc/devices"), devices).unwrap();
    renewed("another major number", &uvm(509)).await;
}

#[tokio::test]
async fn container_edits_that_cannot_be_written_again_are_told_and_tried_again() {
    let site = Site::new();
    let plugin = site.start_plugin();
    site.api.put(&sliced());
    plugin.prepared(&sliced(), "before").await;
    let edits = site.edits(&sliced());
    let (place, aside) = (site.path("driver/usr/lib64/libcuda.so.550.163.01"), site.path("aside"));
    fs::rename(&place, &aside).unwrap();
    let reported = plugin.preparer.reporter.dropped();
    assert_eq!(plugin.sweep().await.unwrap(), Sweep { failed: 1, ..Sweep::default() });
    assert_eq!(plugin.preparer.reporter.dropped(), reported + 1, "the health of its GPU");
    plugin.refused(&sliced(), &["libcuda.so", "install the driver"]).await;
    assert_eq!(site.edits(&sliced()), edits, "what was written stays");
    assert!(site.is_ready(&sliced()));
    fs::rename(&aside, &place).unwrap();
    assert_eq!(plugin.sweep().await.unwrap(), Sweep::default());
    plugin.prepared(&sliced(), "back").await;
}

/// The files of another boot may name devices that are others by now, and its time slices are gone.
#[tokio::test]
async fn a_reboot_is_noticed_where_the_cdi_folder_outlives_it() {
    for swept in [false, true] {
        let site = Site::new();
        site.api.put(&sliced());
        site.start_plugin().prepared(&sliced(), "before").await;
        site.reboot_with_lasting_edits();
        assert_eq!(site.time_slice(0), 0);
        let plugin = site.start_plugin();
        if swept {
            assert_eq!(plugin.sweep().await.unwrap(), Sweep { restored: 1, ..Sweep::default() });
        } else {
            plugin.prepared(&sliced(), "after").await;
        }
        assert_eq!(site.time_slice(0), 3, "swept: {swept}");
        assert!(site.is_ready(&sliced()) && site.edits(&sliced()).is_some());
    }
}

#[tokio::test]
async fn what_kubelet_releases_under_the_sweepers_eyes_stays_released() {
    let site = Site::new();
    let plugin = Arc::new(site.start_plugin());
    let claim = Claim::new("train", &["gpu-0"]).share("10Gi", "0");
    site.api.put(&claim);
    plugin.prepared(&claim, "kubelet").await;
    let (other, ended) = (plugin.clone(), claim.clone());
    // The claim outlives its pod by a moment.
    site.api.meanwhile(async move { other.unprepare(&ended).await.unwrap() });
    assert_eq!(plugin.sweep().await.unwrap(), Sweep::default());
    site.check_empty("after the sweep");
}

#[tokio::test]
async fn what_kubelet_prepares_anew_under_the_sweepers_eyes_stays_prepared() {
    let site = Site::new();
    let plugin = Arc::new(site.start_plugin());
    let before = Claim::new("train", &["gpu-0"]);
    site.api.put(&before);
    plugin.prepared(&before, "as it was first allocated").await;
    site.api.put(&before.clone().with("/status", json!({})));
    let anew = Claim::new("train", &["gpu-1"]);
    let (other, api, again) = (plugin.clone(), site.api.clone(), anew.clone());
    site.api.meanwhile(async move {
        api.put(&again);
        other.prepared(&again, "as it is allocated now").await;
    });
    assert_eq!(plugin.sweep().await.unwrap(), Sweep::default());
    assert!(site.is_ready(&anew) && site.edits(&anew).is_some(), "taken back under its pod");
}

#[tokio::test]
async fn the_sweeper_clears_our_orphans_and_nobody_elses_files() {
    let site = Site::new();
    let plugin = site.start_plugin();
    site.api.put(&sliced());
    plugin.prepared(&sliced(), "before").await;
    let own = site.files().remove(0);
    let put = |name: &str| fs::write(site.path("cdi").join(name), "{}").unwrap();
    let theirs = [
        ".tranche-tmp-nvidia.yaml",
        "k8s.gpu.nvidia.com-claim_theirs.yaml",
        "k8s.other.example.com-claim_uid-gone.json",
        "nvidia.yaml",
    ];
    theirs.into_iter().for_each(put);
    // One that cannot be removed keeps nothing else from being cleared.
    fs::create_dir(site.path("cdi/k8s.gpu.nvidia.com-claim_a-folder.json")).unwrap();
    put("k8s.gpu.nvidia.com-claim_uid-gone.json");
    put(".tranche-tmp-k8s.gpu.nvidia.com-claim_uid-gone.json");
    site.age_temporaries();
    put(".tranche-tmp-k8s.gpu.nvidia.com-claim_uid-young.json");
    assert_eq!(plugin.sweep().await.unwrap().orphans_removed, 2);
    let mut left = theirs.map(str::to_owned).to_vec();
    left.push(".tranche-tmp-k8s.gpu.nvidia.com-claim_uid-young.json".into());
    left.push("k8s.gpu.nvidia.com-claim_a-folder.json".into());
    left.push(own);
    left.sort();
    assert_eq!(site.files(), left);
}

/// Allocated, cleared and allocated anew, with other settings, before kubelet unprepared it.
#[tokio::test]
async fn settings_of_an_earlier_allocation_do_not_stay() {
    let site = Site::new();
    let plugin = site.start_plugin();
    site.api.put(&sliced());
    plugin.prepared(&sliced(), "before").await;
    fs::remove_file(site.path("cdi").join(&site.files()[0])).unwrap();
    let anew = Claim::new("train", &["gpu-0"]);
    site.api.put(&anew);
    plugin.prepared(&anew, "anew").await;
    assert_eq!(site.time_slice(0), 0);
    site.check("anew");
    let moved = Claim::new("train", &["gpu-1"]);
    site.api.put(&moved);
    plugin.prepared(&moved, "moved").await;
    let other = Claim::new("other", &["gpu-0"]);
    site.api.put(&other);
    plugin.prepared(&other, "the first GPU is free").await;
}

/// A claim waits for the first look at the GPUs instead of failing.
#[tokio::test]
async fn a_claim_waits_for_the_first_look() {
    let site = Site::new();
    let known = site.gpus.send_replace(Inventory::Unknown);
    let plugin = Arc::new(site.start_plugin());
    site.api.put(&sliced());
    let (asked, claim): (Arc<PluginRun>, Claim) = (plugin.clone(), sliced());
    let waiting = tokio::spawn(async move { asked.prepared(&claim, "waited").await });
    tokio::task::yield_now().await;
    assert!(!waiting.is_finished());
    site.gpus.send_replace(known);
    soon("the first look", waiting).await.unwrap();
}
