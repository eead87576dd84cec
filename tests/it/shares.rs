//! Shares on a node, placed by the scheduler or by the controller: each claim has its own limits, the daemon is as loose as its loosest claim and no
//! looser, no board is granted twice, and a supervisor that fails fails the claim and nothing else.

use std::collections::BTreeMap;
use std::pin::pin;
use std::time::Duration;

use tranche::inventory::Inventory;
use tranche::ledger::Phase;
use tranche::model::names::DeviceUuid;
use tranche::model::quantity::Bytes;
use tranche::model::share::{MpsGroup, Percent};

use crate::fake_mps::Trouble;
use crate::site::{Claim, PluginRun, Site, gpu_config};
use crate::stop_at::{Verb, When};

fn share(name: &str, memory: &str, compute: &str) -> Claim {
    Claim::new(name, &["gpu-0"]).share(memory, compute)
}

/// MiB and percent that gpu-0's daemon gives each client; none without a daemon.
fn served(site: &Site) -> Option<(Option<u64>, Option<u8>)> {
    let kept = site.mps.kept();
    let (exclusive, limits) = kept.get(&MpsGroup::new([DeviceUuid::from("GPU-0")]))?;
    assert!(exclusive);
    Some((limits.memory[0].map(Bytes::mib_floor), limits.compute.map(Percent::get)))
}

fn put(site: &Site, claims: &[&Claim]) {
    claims.iter().for_each(|claim| site.api.put(claim));
}

async fn prepared(plugin: &PluginRun, claims: &[&Claim]) {
    for claim in claims {
        plugin.prepared(claim, "prepare").await;
    }
}

fn env(site: &Site, claim: &Claim) -> Vec<String> {
    let edits = site.edits(claim).expect("container edits");
    let env = edits["devices"][0]["containerEdits"]["env"].as_array().expect("variables").clone();
    env.iter().map(|line| line.as_str().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn the_daemon_follows_the_claims_that_come_and_go() {
    let site = Site::new();
    let plugin = site.start_plugin();
    let (small, large, open) =
        (share("small", "2000Mi", "25"), share("large", "10Gi", "50"), share("open", "1Gi", "0"));
    put(&site, &[&small, &large, &open]);
    for (claim, after) in
        [(&small, (Some(2000), Some(25))), (&large, (Some(10240), Some(50))), (&open, (Some(10240), None))]
    {
        plugin.prepared(claim, "prepare").await;
        assert_eq!(served(&site), Some(after));
    }
    assert!(env(&site, &small).contains(&"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=2000M".to_owned()));
    assert!(env(&site, &large).contains(&"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=10240M".to_owned()));
    for (claim, after) in
        [(&large, Some((Some(2000), None))), (&open, Some((Some(2000), Some(25)))), (&small, None)]
    {
        plugin.unprepare(claim).await.unwrap();
        assert_eq!(served(&site), after);
    }
    site.check_empty("at the end");
}

#[tokio::test]
async fn what_does_not_fit_is_refused_and_the_others_go_on() {
    let site = Site::new();
    let plugin = site.start_plugin();
    let (first, second, whole) =
        (share("first", "60Gi", "25"), share("second", "30Gi", "25"), Claim::new("whole", &["gpu-0"]));
    put(&site, &[&first, &second, &whole]);
    prepared(&plugin, &[&first]).await;
    plugin.refused(&second, &["share of 30720 MiB does not fit", "61440 of 81408 MiB", "1 other"]).await;
    plugin.refused(&whole, &["in use by claim team/first"]).await;
    assert!(site.is_ready(&first));
    assert_eq!(served(&site), Some((Some(61440), Some(25))));
    assert_eq!(plugin.metric("tranche_refused_double_allocations_total"), 2.0);
    // With the first gone there is room.
    plugin.unprepare(&first).await.unwrap();
    prepared(&plugin, &[&second]).await;
}

#[tokio::test]
async fn without_a_supervisor_nothing_is_granted_and_nothing_is_left() {
    let site = Site::new();
    let plugin = site.start_plugin();
    let claim = share("share", "2000Mi", "25");
    put(&site, &[&claim]);
    site.mps.trouble(Some(Trouble::Refuses("the daemon does not start")));
    plugin.refused(&claim, &["setting up MPS for GPU-0", "the daemon does not start"]).await;
    // Its own undo needs the supervisor as well, and is owed until it answers.
    assert_eq!(site.files(), [""; 0]);
    site.mps.trouble(None);
    assert_eq!(plugin.sweep().await.unwrap().failed, 0);
    site.check_empty("after the sweep");
    prepared(&plugin, &[&claim]).await;
    assert!(site.is_ready(&claim));
}

#[tokio::test]
async fn a_node_without_a_supervisor_says_so_and_keeps_nothing() {
    let site = Site::new();
    let plugin = site.start_plugin();
    let claim = share("share", "2000Mi", "25");
    put(&site, &[&claim]);
    site.mps.trouble(Some(Trouble::Away));
    plugin.refused(&claim, &["`tranche mps` does not answer", "is its DaemonSet running here?"]).await;
    site.check_empty("the memory of the board is not held");
}

#[tokio::test]
async fn a_pod_ends_while_the_supervisor_is_away_and_the_limit_is_tightened_later() {
    let site = Site::new();
    let plugin = site.start_plugin();
    let (small, large) = (share("small", "2000Mi", "25"), share("large", "70Gi", "50"));
    let next = share("next", "60Gi", "25");
    put(&site, &[&small, &large, &next]);
    prepared(&plugin, &[&small, &large]).await;
    site.mps.trouble(Some(Trouble::Refuses("restarting")));
    plugin.unprepare(&large).await.unwrap();
    assert!(site.edits(&large).is_none(), "no new container can use it");
    site.mps.trouble(None);
    // What is owed still counts: the board is not given twice.
    plugin.refused(&next, &["does not fit"]).await;
    assert_eq!(plugin.sweep().await.unwrap().failed, 0);
    assert_eq!(served(&site), Some((Some(2000), Some(25))));
    prepared(&plugin, &[&next]).await;
}

/// Claims of another GPU come and go. Each takes the same steps as any that begins before it, so that this one has come as
/// far as the wait for its GPU by then, however slow the machine is.
async fn others(site: &Site, plugin: &PluginRun) {
    for name in ["a", "b", "c", "d", "e"] {
        let other = Claim::new(name, &["gpu-1"]);
        put(site, &[&other]);
        prepared(plugin, &[&other]).await;
        plugin.unprepare(&other).await.unwrap();
    }
}

/// Kubelet need not wait for the daemon, and whoever is given the GPU next does.
#[tokio::test]
async fn kubelet_is_answered_before_the_daemon_rests_and_the_next_claim_waits_for_it() {
    let site = Site::new();
    let plugin = site.start_plugin();
    let (first, next) = (share("first", "2000Mi", "25"), Claim::new("next", &["gpu-0"]));
    put(&site, &[&first, &next]);
    prepared(&plugin, &[&first]).await;
    let stall = site.mps.stall();
    let answer = tokio::time::timeout(Duration::from_secs(20), plugin.released(&first)).await;
    answer.expect("kubelet is answered while the daemon stalls").unwrap();
    assert!(site.edits(&first).is_none(), "no new container can use it");
    assert_eq!(site.records()[0].phase, Phase::Releasing, "what is owed is on the disk");
    assert!(served(&site).is_some(), "the daemon serves still");
    let mut waits = pin!(plugin.prepare(&next));
    tokio::select! {
        biased;
        early = &mut waits => panic!("the GPU was given away before its daemon had come to rest: {early:?}"),
        () = others(&site, &plugin) => {}
    }
    assert!(site.edits(&next).is_none());
    drop(stall);
    waits.await.unwrap();
    assert_eq!(served(&site), None);
    assert_eq!(site.records().len(), 1, "of the next claim alone");
}

/// What follows kubelet's answer is done by the next start, if this one does not come to it: kubelet asks no more.
#[tokio::test]
async fn a_release_that_was_answered_and_cut_off_is_finished_by_the_next_start() {
    for when in [When::Before, When::After] {
        let site = Site::new();
        let plugin = site.start_plugin();
        let first = share("first", "2000Mi", "25");
        put(&site, &[&first]);
        prepared(&plugin, &[&first]).await;
        plugin.host.stop_at_next(Verb::Rest, when);
        plugin.released(&first).await.unwrap();
        plugin.settle(vec![DeviceUuid::from("GPU-0")]).await;
        assert!(plugin.host.stopped(), "{when:?}");
        assert_eq!(site.records()[0].phase, Phase::Releasing, "{when:?}");
        drop(plugin);
        // Claim and pod are there still, as far as the API server knows.
        let plugin = site.start_plugin();
        let swept = plugin.sweep().await.unwrap();
        assert_eq!((swept.rolled_back, swept.failed), (1, 0), "{when:?}: {swept:?}");
        site.check_empty(&format!("{when:?}"));
    }
}

/// Its GPU was lost under it: the claim is allocated anew, on the same node.
#[tokio::test]
async fn what_a_claim_owes_one_gpu_keeps_it_from_no_other() {
    let site = Site::new();
    let plugin = site.start_plugin();
    let before = share("moved", "2000Mi", "25");
    put(&site, &[&before]);
    prepared(&plugin, &[&before]).await;
    site.mps.trouble(Some(Trouble::Lost("GPU-0")));
    plugin.unprepare(&before).await.unwrap();
    plugin.refused(&before, &["an earlier attempt was cut off", "GPU-0 is lost"]).await;
    let after = Claim::new("moved", &["gpu-1"]).share("2000Mi", "25");
    site.api.put(&after);
    prepared(&plugin, &[&after]).await;
    assert!(site.is_ready(&after));
    // The lost one is nobody else's until it is right again; then nothing is left of it.
    let all = share("all", "78Gi", "25");
    put(&site, &[&all]);
    plugin.refused(&all, &["does not fit"]).await;
    drop(plugin);
    // Known to the next process, too.
    let plugin = site.start_plugin();
    assert_eq!(plugin.sweep().await.unwrap().failed, 2, "what is owed, and the daemon");
    site.mps.trouble(None);
    assert_eq!(plugin.sweep().await.unwrap().failed, 0);
    prepared(&plugin, &[&all]).await;
    for claim in [&after, &all] {
        plugin.unprepare(claim).await.unwrap();
    }
    site.check_empty("at the end");
}

#[tokio::test]
async fn a_daemon_that_was_lost_comes_back() {
    let site = Site::new();
    let plugin = site.start_plugin();
    let claim = share("share", "2000Mi", "25");
    put(&site, &[&claim]);
    prepared(&plugin, &[&claim]).await;
    site.mps.forget_all();
    assert_eq!(plugin.sweep().await.unwrap().daemons, 1);
    assert_eq!(served(&site), Some((Some(2000), Some(25))));
    site.mps.forget_all();
    prepared(&plugin, &[&claim]).await;
    assert_eq!(served(&site), Some((Some(2000), Some(25))), "by the next call of kubelet's");
}

#[tokio::test]
async fn a_daemon_that_nobody_needs_is_left_to_rest() {
    let site = Site::new();
    let plugin = site.start_plugin();
    let claim = share("share", "2000Mi", "25");
    put(&site, &[&claim]);
    prepared(&plugin, &[&claim]).await;
    drop(plugin);
    // The ledger of another node, say: nothing is known of the claim.
    for file in std::fs::read_dir(site.path("ledger")).unwrap() {
        std::fs::remove_file(file.unwrap().path()).unwrap();
    }
    site.api.remove(&claim);
    let plugin = site.start_plugin();
    assert_eq!(plugin.sweep().await.unwrap().daemons, 1);
    site.check_empty("after the sweep");
}

#[tokio::test]
async fn a_restart_of_the_plugin_asks_nothing_of_live_daemons() {
    let site = Site::new();
    let claim = share("share", "2000Mi", "25");
    put(&site, &[&claim]);
    prepared(&site.start_plugin(), &[&claim]).await;
    let plugin = site.start_plugin();
    assert_eq!(plugin.sweep().await.unwrap().daemons, 0);
    assert!(!plugin.host.log().iter().any(|verb| matches!(verb, Verb::Keep | Verb::Rest)));
}

#[tokio::test]
async fn a_claim_shares_its_own_gpus_by_mps_as_with_nvidias_driver() {
    let site = Site::new();
    let plugin = site.start_plugin();
    let mps = gpu_config(serde_json::json!({"strategy": "MPS", "mpsConfig": {
        "defaultActiveThreadPercentage": 50, "defaultPinnedDeviceMemoryLimit": "10Gi"}}));
    let claim = Claim::new("mine", &["gpu-0"]).config(&[], mps);
    put(&site, &[&claim]);
    prepared(&plugin, &[&claim]).await;
    assert_eq!(served(&site), Some((Some(10240), Some(50))));
    plugin
        .refused(
            &{
                let other = share("other", "1Gi", "0");
                site.api.put(&other);
                other
            },
            &["in use by claim"],
        )
        .await;
    plugin.unprepare(&claim).await.unwrap();
    site.check_empty("at the end");
}

/// A part of gpu-0 that the controller gave, as an API server before 1.36 keeps it.
fn granted(name: &str, mib: u64, compute: u8) -> Claim {
    Claim::new(name, &["gpu-0"]).granted(mib, compute)
}

const MEMORY: &str = "opaque/parameters/devices/0/memory";
const GPU: &str = "opaque/parameters/devices/0/gpu";

#[tokio::test]
async fn the_controllers_shares_are_served_like_any_other_with_and_without_share_ids() {
    let site = Site::new();
    let bare = granted("bare", 2000, 25);
    let counted = granted("counted", 10_240, 50).share("10Gi", "50");
    put(&site, &[&bare, &counted]);
    let plugin = site.start_plugin();
    prepared(&plugin, &[&bare, &counted]).await;
    assert_eq!(served(&site), Some((Some(10_240), Some(50))));
    for (claim, line) in [(&bare, "=0=2000M"), (&counted, "=0=10240M")] {
        let line = format!("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT{line}");
        assert!(env(&site, claim).contains(&line), "{line}");
    }
    // A restart knows them from the ledger, answers the same, and asks nothing of the daemon but what it is.
    let plugin = site.start_plugin();
    assert_eq!(plugin.sweep().await.unwrap().daemons, 0);
    prepared(&plugin, &[&bare, &counted]).await;
    assert_eq!(served(&site), Some((Some(10_240), Some(50))));
    // A boot loses the daemon and the files, and kubelet asks again.
    drop(plugin);
    site.reboot();
    let plugin = site.start_plugin();
    prepared(&plugin, &[&bare, &counted]).await;
    assert_eq!(served(&site), Some((Some(10_240), Some(50))));
    plugin.unprepare(&counted).await.unwrap();
    assert_eq!(served(&site), Some((Some(2000), Some(25))));
    plugin.unprepare(&bare).await.unwrap();
    site.check_empty("at the end");
}

/// Two GPUs that the controller gave whole: as kube-scheduler's, and no MPS daemon starts for them.
#[tokio::test]
async fn what_the_controller_gives_whole_has_no_daemon_and_nobody_else_gets_a_part_of_it() {
    let site = Site::new();
    let plugin = site.start_plugin();
    let whole = || Claim::new("whole", &["gpu-0", "gpu-1"]).granted(81_408, 100).whole();
    let (claim, part) = (whole(), granted("part", 1, 5));
    put(&site, &[&claim, &part]);
    prepared(&plugin, &[&claim]).await;
    assert_eq!(site.mps.kept(), BTreeMap::new());
    let edits = site.edits(&claim).expect("container edits").to_string();
    assert!(!edits.contains("CUDA_MPS") && edits.contains("/dev/nvidia1"), "{edits}");
    plugin.refused(&part, &["in use by claim team/whole"]).await;
    assert_eq!(plugin.metric("tranche_refused_double_allocations_total"), 1.0);
    // A restart, and a boot, know it from the ledger.
    drop(plugin);
    site.reboot();
    let plugin = site.start_plugin();
    plugin.refused(&part, &["in use by claim team/whole"]).await;
    prepared(&plugin, &[&claim]).await;
    plugin.unprepare(&claim).await.unwrap();
    site.check_empty("shares may come");
    // The other way round.
    prepared(&plugin, &[&part]).await;
    plugin.refused(&claim, &["in use by claim team/part"]).await;
    plugin.unprepare(&part).await.unwrap();
    site.check_empty("at the end");
}

/// A share that is all of its GPU, from before shares of the fraction 1 were whole GPUs: its daemon stays until it ends,
/// and the next allocation of the same claim has none.
#[tokio::test]
async fn a_share_of_all_of_a_gpu_goes_on_with_its_daemon_until_it_is_allocated_anew() {
    let site = Site::new();
    let plugin = site.start_plugin();
    let before = granted("all", 81_408, 100);
    put(&site, &[&before]);
    prepared(&plugin, &[&before]).await;
    drop(plugin);
    let plugin = site.start_plugin();
    assert_eq!(plugin.sweep().await.unwrap().failed, 0);
    prepared(&plugin, &[&before]).await;
    assert_eq!(served(&site), Some((Some(81_408), Some(100))));
    let after = granted("all", 81_408, 100).whole();
    put(&site, &[&after]);
    prepared(&plugin, &[&after]).await;
    assert_eq!(served(&site), None);
    plugin.unprepare(&after).await.unwrap();
    site.check_empty("at the end");
}

#[tokio::test]
async fn what_the_controller_grants_twice_is_refused_with_who_has_it() {
    let site = Site::new();
    let plugin = site.start_plugin();
    let (first, second) = (granted("first", 60 << 10, 25), granted("second", 30 << 10, 25));
    put(&site, &[&first, &second]);
    prepared(&plugin, &[&first]).await;
    plugin.refused(&second, &["share of 30720 MiB does not fit", "61440 of 81408 MiB", "1 other"]).await;
    assert_eq!(plugin.metric("tranche_refused_double_allocations_total"), 1.0);
    plugin.unprepare(&first).await.unwrap();
    prepared(&plugin, &[&second]).await;
}

#[tokio::test]
async fn scheduler_and_controller_never_share_one_board() {
    let site = Site::new();
    let plugin = site.start_plugin();
    let (ours, theirs) = (granted("ours", 2000, 25), share("theirs", "2000Mi", "25"));
    let whole = Claim::new("whole", &["gpu-0"]);
    put(&site, &[&ours, &theirs, &whole]);
    prepared(&plugin, &[&ours]).await;
    plugin.refused(&theirs, &["come from the scheduler and from the controller", "team/ours"]).await;
    plugin.refused(&whole, &["in use by claim team/ours"]).await;
    assert_eq!(served(&site), Some((Some(2000), Some(25))));
    assert!(site.is_ready(&ours));
    plugin.unprepare(&ours).await.unwrap();
    prepared(&plugin, &[&theirs]).await;
    // Who placed it is known after a restart as well.
    let plugin = site.start_plugin();
    plugin.refused(&ours, &["claim team/theirs", "that the scheduler placed"]).await;
    plugin.unprepare(&theirs).await.unwrap();
    prepared(&plugin, &[&whole]).await;
    plugin.refused(&ours, &["in use by claim team/whole"]).await;
    assert_eq!(plugin.metric("tranche_refused_double_allocations_total"), 2.0);
}

#[tokio::test]
async fn a_grant_that_is_not_the_controllers_is_refused_and_leaves_nothing() {
    let site = Site::new();
    let plugin = site.start_plugin();
    let good = || granted("claim", 2000, 25);
    for (claim, words) in [
        (good().tampered(GPU, "GPU-1".into()), ["granted a share of GPU-1", "than gpu-0 (GPU-0)"]),
        (good().tampered("source", "FromClaim".into()), ["config[0]", "never a part of a claim"]),
        (good().tampered(MEMORY, "100Gi".into()), ["102400 MiB does not fit", "81408 MiB"]),
        (good().tampered(MEMORY, "1000".into()), ["devices[0].memory", "whole number of MiB"]),
        (good().tampered("requests", serde_json::json!([])), ["config[0]", "names no request"]),
        (good().share("1Gi", "25"), ["counts 1073741824 bytes", "says 2097152000"]),
    ] {
        put(&site, &[&claim]);
        plugin.refused(&claim, &words).await;
        site.check_empty(words[0]);
    }
    put(&site, &[&good()]);
    prepared(&plugin, &[&good()]).await;
}

/// The node's boards are others, as after a VM has moved: gpu-0 is not the board any more that it was.
fn replace_boards(site: &Site) {
    site.gpus.send_modify(|inventory| {
        let Inventory::Found(gpus) = inventory else { panic!("{inventory:?}") };
        for gpu in &mut gpus.gpus {
            gpu.uuid = DeviceUuid::new(format!("GPU-new-{}", gpu.minor));
        }
    });
}

#[tokio::test]
async fn a_share_whose_board_was_replaced_is_prepared_on_the_one_that_has_its_name() {
    let site = Site::with_whole_gpus(2);
    let plugin = site.start_plugin();
    let (ours, whole) = (granted("ours", 2000, 25), Claim::new("whole", &["gpu-1"]));
    put(&site, &[&ours, &whole]);
    prepared(&plugin, &[&ours, &whole]).await;
    drop(plugin);
    site.reboot();
    replace_boards(&site);
    let plugin = site.start_plugin();
    prepared(&plugin, &[&ours, &whole]).await;
    let kept = site.mps.kept();
    let group = MpsGroup::new([DeviceUuid::from("GPU-new-0")]);
    assert_eq!(kept.keys().collect::<Vec<_>>(), [&group]);
    assert_eq!(kept[&group].1.memory[0].map(Bytes::mib_floor), Some(2000));
    let more = granted("more", 80 << 10, 25);
    put(&site, &[&more]);
    plugin.refused(&more, &["81920 MiB does not fit", "2000 of 81408 MiB"]).await;
    for claim in [&ours, &whole] {
        plugin.unprepare(claim).await.unwrap();
    }
    site.check_empty("at the end");
}

#[tokio::test]
async fn a_running_share_outlives_a_grant_that_was_changed() {
    let site = Site::new();
    let plugin = site.start_plugin();
    let claim = granted("claim", 2000, 25);
    put(&site, &[&claim]);
    prepared(&plugin, &[&claim]).await;
    let (records, edits) = (site.records(), site.edits(&claim));
    for (field, value) in [(MEMORY, "100Gi"), (GPU, "GPU-1"), ("source", "FromClaim")] {
        put(&site, &[&granted("claim", 2000, 25).tampered(field, value.into())]);
        plugin.refused(&claim, &[]).await;
        assert_eq!((site.records(), site.edits(&claim)), (records.clone(), edits.clone()), "{field}");
        assert_eq!(served(&site), Some((Some(2000), Some(25))), "{field}");
    }
    // Cleared and allocated anew, with other numbers that can be granted.
    put(&site, &[&granted("claim", 3000, 50)]);
    prepared(&plugin, &[&claim]).await;
    assert_eq!(served(&site), Some((Some(3000), Some(50))));
    assert!(env(&site, &claim).contains(&"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=3000M".to_owned()));
}

#[tokio::test]
async fn one_claim_on_several_gpus_has_one_daemon_for_the_group() {
    let site = Site::new();
    let plugin = site.start_plugin();
    let both = Claim::new("both", &["gpu-0", "gpu-1"]).granted(2000, 25);
    let alone = granted("alone", 1000, 25);
    put(&site, &[&both, &alone]);
    prepared(&plugin, &[&both]).await;
    let kept = site.mps.kept();
    let group = MpsGroup::new([DeviceUuid::from("GPU-0"), DeviceUuid::from("GPU-1")]);
    let (_, limits) = &kept[&group];
    assert_eq!(limits.memory, [Some(Bytes::from_mib(2000)); 2]);
    let line = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=2000M,1=2000M".to_owned();
    assert!(env(&site, &both).contains(&line));
    plugin.refused(&alone, &["one MPS daemon", "team/both"]).await;
    plugin.unprepare(&both).await.unwrap();
    site.check_empty("at the end");
}
