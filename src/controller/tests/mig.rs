//! GPUs that are cut into MIG devices: who places on them, what a claim is given, what its pod is told.

use serde_json::{Value, json};

use super::cluster::{Cluster, grants, merge, results};
use super::scenes::{LONG, rules, share};
use super::walk::bind;
use crate::cluster::events::{EventSubject, Note};
use crate::model::names::SHARED_CLASS;
use crate::model::share::Extent;

/// A GPU as a node in MIG mode publishes it. `scheduled`: the API server keeps counters, and kube-scheduler may cut it too.
fn board(node: &str, minor: u32, scheduled: bool) -> Value {
    let mut device = json!({"name": format!("gpu-{minor}"), "attributes": {
        "type": {"string": "mig-parent"}, "uuid": {"string": format!("GPU-{node}-{minor}")},
        "productName": {"string": "NVIDIA H100 80GB HBM3"}, "isolation": {"string": "mig"},
        "totalMemoryMiB": {"int": 81_559}, "multiprocessors": {"int": 132},
        "migProfile0": {"string": "7g.80gb 7/1 81152 132 8@0"},
        "migProfile5": {"string": "4g.40gb 4/1 40448 64 4@0"},
        "migProfile9": {"string": "3g.40gb 3/2 40448 60 4@0,4"},
        "migProfile14": {"string": "2g.20gb 2/3 20096 32 2@0,2,4"},
        "migProfile15": {"string": "1g.20gb 1/4 20096 26 2@0,2,4,6"},
        "migProfile19": {"string": "1g.10gb 1/7 9984 16 1@0,1,2,3,4,5,6"}},
        "capacity": {"memory": {"value": "81559Mi"}}});
    if scheduled {
        device["consumesCounters"] = json!([{"counterSet": format!("gpu-{minor}-counter-set"),
            "counters": {"memory-slice-0": {"value": "1"}}}]);
    }
    device
}

fn cluster(boards: u32, keeps: bool) -> Cluster {
    let mut cluster = Cluster::new(rules());
    cluster.keeps = keeps;
    let mig = "device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == 'mig'";
    cluster.put_class("mig.nvidia.com", json!({}), json!({"selectors": [{"cel": {"expression": mig}}]}));
    cluster.put_node_object("node-0", json!({}));
    put_boards(&mut cluster, boards, &json!({}));
    cluster
}

fn put_boards(cluster: &mut Cluster, boards: u32, more: &Value) {
    let keeps = cluster.keeps;
    let one = |minor| {
        let mut board = board("node-0", minor, keeps);
        merge(&mut board, more);
        board
    };
    cluster.put_slice("node-0", (0..boards).map(one).collect());
}

/// A pod with a claim for a MIG device.
fn mig(cluster: &mut Cluster, name: &str, mut fields: Value, count: u32) {
    fields["minimumIsolation"] = json!("mig");
    cluster.put_share(name, fields, count);
    cluster.put_pod(name, &[name], json!({}));
}

/// Of a claim: each device, with the profile and where it begins.
fn made(cluster: &Cluster, name: &str) -> Vec<(String, u32, u32)> {
    let claim = cluster.claim(name);
    let of = |(device, grant): (String, crate::params::GrantedDevice)| match grant.extent {
        Extent::Mig(at) => (device, at.profile_id, at.placement.start),
        other => panic!("{other:?}"),
    };
    grants(claim).into_iter().map(of).collect()
}

fn told(cluster: &mut Cluster, words: &str) {
    let (notes, _) = cluster.core.recorder.take();
    assert!(notes.iter().any(|note| note.message.contains(words)), "{notes:#?}");
}

/// kube-scheduler gives a claim a MIG device.
fn scheduler_cuts(cluster: &mut Cluster, name: &str, device: &str) {
    cluster.put_claim(json!({"metadata": {"name": name, "namespace": "ml"}, "spec": {"devices": {
        "requests": [{"name": "mig", "exactly": {"deviceClassName": "mig.nvidia.com"}}]}},
        "status": {"allocation": {"devices": {"results": [
            {"request": "mig", "driver": "gpu.nvidia.com", "pool": "node-0", "device": device}]}}}}));
}

#[test]
fn a_claim_names_its_board_and_the_grant_says_which_mig_device() {
    for keeps in [true, false] {
        let mut cluster = cluster(1, keeps);
        mig(&mut cluster, "a", json!({"memory": "9Gi", "compute": 10, "maxProcesses": 4}), 1);
        cluster.settle(LONG);
        assert_eq!(cluster.place("a"), Some(("node-0".to_owned(), vec!["gpu-0".to_owned()])));
        assert_eq!(cluster.holds(), ["hold.gpu-0.node-0"]);
        told(&mut cluster, "a MIG device of 9984 MiB of gpu-0 on node node-0");
        let allocation = cluster.claim("a").status.as_ref().unwrap().allocation.as_ref().unwrap();
        let devices = serde_json::to_value(allocation.devices.as_ref().unwrap()).unwrap();
        assert_eq!(
            devices["results"],
            json!([{"request": "gpu", "driver": "gpu.nvidia.com", "pool": "node-0/shares", "device": "gpu-0"}]),
            "whatever the API server keeps"
        );
        let grant = &devices["config"][0]["opaque"]["parameters"]["devices"][0];
        assert_eq!(
            *grant,
            json!({"device": "gpu-0", "gpu": "GPU-node-0-0", "memory": "9984Mi", "slots": 1, "isolation": "mig",
                "mig": {"profile": 19, "start": 6, "size": 1}})
        );
        cluster.check();
    }
}

#[test]
fn seven_small_ones_or_a_3g_and_a_4g_and_a_new_leader_knows_them() {
    let mut cluster = cluster(2, true);
    for nth in 0..7 {
        mig(&mut cluster, &format!("s{nth}"), json!({"memory": "9000Mi"}), 1);
    }
    cluster.settle(LONG);
    let gpus: Vec<String> =
        (0..7).flat_map(|nth| made(&cluster, &format!("s{nth}"))).map(|one| one.0).collect();
    assert_eq!(gpus, ["gpu-0"; 7]);
    assert_eq!(cluster.holds().len(), 1, "the other board is nobody's");
    mig(&mut cluster, "three", json!({"memory": "40000Mi"}), 1);
    mig(&mut cluster, "four", json!({"fraction": "0.5"}), 1);
    cluster.settle(LONG);
    assert_eq!(made(&cluster, "three"), [("gpu-1".to_owned(), 9, 4)]);
    assert_eq!(made(&cluster, "four"), [("gpu-1".to_owned(), 5, 0)]);
    cluster.fail_over(rules());
    cluster.settle(LONG);
    mig(&mut cluster, "more", json!({"memory": "20Gi"}), 1);
    cluster.settle(LONG);
    assert_eq!(cluster.place("more"), None);
    told(&mut cluster, "needs a MIG device with 20480 MiB; 2 candidate GPUs can make no more");
    cluster.check();
    assert_eq!(cluster.core.overcommitted(), 0);
    cluster.drop_pod("s0", true);
    mig(&mut cluster, "late", json!({"memory": "20Gi"}), 1);
    cluster.settle(LONG);
    let (notes, _) = cluster.core.recorder.take();
    let last = notes.iter().rev().find(|note| note.message.contains("needs a MIG device"));
    let words = &last.unwrap_or_else(|| panic!("{notes:#?}")).message;
    assert!(
        words.contains("the largest that node node-0/gpu-0 can still make has 9984 MiB (1g.10gb)"),
        "{words}"
    );
    cluster.drop_pod("three", true);
    cluster.settle(LONG);
    // Which board is of no matter: what nobody uses is placed anew after a while.
    assert_eq!(made(&cluster, "more")[0].1, 9);
    cluster.check();
}

#[test]
fn shares_and_whole_gpus_stay_off_boards_that_are_cut() {
    let mut cluster = cluster(1, true);
    share(&mut cluster, "share", "1Gi");
    cluster.put_share("whole", json!({"fraction": "1", "minimumIsolation": "mig"}), 1);
    cluster.put_pod("whole", &["whole"], json!({}));
    cluster.settle(LONG);
    assert_eq!((cluster.place("share"), cluster.place("whole")), (None, None));
    told(&mut cluster, "1 GPU cut into MIG devices, which minimumIsolation mig asks for");
    assert!(cluster.holds().is_empty());
    cluster.put_node("node-1", 1);
    mig(&mut cluster, "large", json!({"memory": "100Gi"}), 1);
    cluster.settle(LONG);
    assert_eq!(cluster.place("share").map(|at| at.0).as_deref(), Some("node-1"));
    assert_eq!(cluster.place("large"), None);
    told(
        &mut cluster,
        "1 GPU too small even idle (largest 81152 MiB, asked 102400), 1 GPU below the isolation",
    );
}

#[test]
fn a_selector_chooses_the_board_that_is_cut() {
    let mut cluster = cluster(0, true);
    let mut boards: Vec<Value> = (0..2).map(|minor| board("node-0", minor, true)).collect();
    merge(&mut boards[1], &json!({"attributes": {"productName": {"string": "NVIDIA H200"}}}));
    cluster.put_slice("node-0", boards);
    let mut ask = |name: &str, selector: &str, memory: &str| {
        let parameters = json!({"apiVersion": "tranche.dev/v1alpha1", "kind": "GpuShare", "memory": memory,
            "minimumIsolation": "mig"});
        let exactly =
            json!({"deviceClassName": SHARED_CLASS, "selectors": [{"cel": {"expression": selector}}]});
        cluster.put_claim(json!({"metadata": {"name": name, "namespace": "ml"}, "spec": {"devices": {
            "requests": [{"name": "gpu", "exactly": exactly}],
            "config": [{"opaque": {"driver": "gpu.nvidia.com", "parameters": parameters}}]}}}));
        cluster.put_pod(name, &[name], json!({}));
        cluster.settle(LONG);
        if cluster.place(name).is_some() {
            bind(&mut cluster, name);
        }
    };
    let product = |name: &str| format!("device.attributes['gpu.nvidia.com'].productName == '{name}'");
    let h200 = product("NVIDIA H200");
    ask("a", &h200, "9Gi");
    ask("all", &h200, "70Gi");
    ask("b", &product("NVIDIA H100 80GB HBM3"), "9Gi");
    ask("none", &product("NVIDIA A100"), "9Gi");
    assert_eq!((made(&cluster, "a")[0].0.as_str(), made(&cluster, "b")[0].0.as_str()), ("gpu-1", "gpu-0"));
    // The other board has room: it is not looked at.
    assert_eq!((cluster.place("all"), cluster.place("none")), (None, None));
    let (notes, _) = cluster.core.recorder.take();
    let last = |pod: &str| {
        let of_pod = |note: &&Note| matches!(&note.subject, EventSubject::Pod { name, .. } if name == pod);
        notes.iter().rev().find(of_pod).unwrap_or_else(|| panic!("{pod}: {notes:#?}")).message.clone()
    };
    for (pod, words) in [
        (
            "all",
            "the largest that node node-0/gpu-1 can still make has 40448 MiB (4g.40gb); left out: 1 GPU that a",
        ),
        ("none", "there is no candidate; left out: 2 GPUs that a selector leaves out"),
    ] {
        assert!(last(pod).contains(words), "{pod}: {}", last(pod));
    }
    cluster.check();
}

#[test]
fn a_board_whose_use_changes_takes_no_new_claim() {
    let mut cluster = cluster(1, true);
    mig(&mut cluster, "first", json!({"memory": "9Gi"}), 1);
    cluster.settle(LONG);
    bind(&mut cluster, "first");
    let before = made(&cluster, "first");
    let taint = json!({"taints": [{"key": "gpu.nvidia.com/use-changes", "effect": "NoSchedule"}]});
    put_boards(&mut cluster, 1, &taint);
    mig(&mut cluster, "late", json!({"memory": "9Gi"}), 1);
    cluster.settle(LONG);
    assert_eq!((made(&cluster, "first"), cluster.place("late")), (before, None));
    told(&mut cluster, "the first is gpu.nvidia.com/use-changes:NoSchedule");
}

/// As a node with --mig-keep publishes it.
#[test]
fn a_gpu_that_is_given_whole_or_cut_is_given_whole_by_the_scheduler_only_and_the_pod_is_told_so() {
    for keeps in [true, false] {
        let mut cluster = cluster(0, keeps);
        put_boards(&mut cluster, 2, &json!({"attributes": {"type": {"string": "gpu"}}}));
        cluster.put_share("whole", json!({"fraction": "1"}), 1);
        cluster.put_pod("whole", &["whole"], json!({}));
        share(&mut cluster, "share", "1Gi");
        cluster.settle(LONG);
        assert_eq!((cluster.place("whole"), cluster.place("share"), cluster.holds()), (None, None, vec![]));
        let (notes, _) = cluster.core.recorder.take();
        let told = |words: &str| notes.iter().filter(|note| note.message.contains(words)).count();
        assert!(
            told("2 GPUs given whole or cut (mig.keep), which only kube-scheduler gives whole") > 0,
            "{notes:#?}"
        );
        assert!(told("2 GPUs cut into MIG devices, which minimumIsolation mig asks for") > 0, "{notes:#?}");
        mig(&mut cluster, "cut", json!({"memory": "9Gi"}), 1);
        cluster.settle(LONG);
        assert_eq!(made(&cluster, "cut").len(), 1);
    }
}

#[test]
fn where_no_board_is_cut_the_pod_is_told_so() {
    let mut cluster = super::scenes::cluster(1, 2);
    mig(&mut cluster, "a", json!({"memory": "20Gi"}), 1);
    cluster.settle(LONG);
    told(
        &mut cluster,
        "needs a MIG device with 20480 MiB, and no GPU of the cluster is set to be cut into MIG devices",
    );
}

#[test]
fn a_board_of_which_kube_scheduler_cuts_is_not_ours_while_that_lasts() {
    let mut cluster = cluster(2, true);
    scheduler_cuts(&mut cluster, "theirs", "gpu-0-mig-1g10gb-19-0");
    mig(&mut cluster, "a", json!({"memory": "9Gi"}), 1);
    cluster.settle(LONG);
    assert_eq!(made(&cluster, "a")[0].0, "gpu-1");
    mig(&mut cluster, "pair", json!({"memory": "9Gi"}), 2);
    cluster.settle(LONG);
    assert_eq!(cluster.place("pair"), None);
    told(&mut cluster, "1 GPU not open to shares");
    cluster.drop_claim(&("ml".to_owned(), "theirs".to_owned()));
    cluster.settle(LONG);
    assert_eq!(made(&cluster, "pair").len(), 2);
    cluster.check();
}

/// A MIG device that somebody made by hand takes its own place of a board, whoever gives it to whom.
#[test]
fn an_instance_made_by_hand_takes_its_own_place_and_no_more() {
    for keeps in [true, false] {
        let mut cluster = cluster(1, keeps);
        put_boards(&mut cluster, 1, &json!({"attributes": {"migInstances": {"string": "9:4@4"}}}));
        scheduler_cuts(&mut cluster, "theirs", "gpu-0-mig-3g40gb-9-4");
        mig(&mut cluster, "a", json!({"memory": "9Gi"}), 1);
        cluster.settle(LONG);
        assert_eq!(made(&cluster, "a"), [("gpu-0".to_owned(), 19, 0)]);
        // One that is given after ours takes nothing from us, even if nobody uses ours yet.
        cluster.drop_claim(&("ml".to_owned(), "theirs".to_owned()));
        mig(&mut cluster, "b", json!({"memory": "15Gi"}), 1);
        cluster.settle(LONG);
        let before = (made(&cluster, "a"), made(&cluster, "b"));
        scheduler_cuts(&mut cluster, "theirs", "gpu-0-mig-3g40gb-9-4");
        cluster.settle(LONG);
        assert_eq!((made(&cluster, "a"), made(&cluster, "b")), before);
        assert_eq!(cluster.holds(), ["hold.gpu-0.node-0"]);
        assert!(cluster.core.holds.gpus.contested().is_empty());
        // The board is not there for a moment.
        cluster.put_slice("node-0", Vec::new());
        cluster.settle(LONG);
        put_boards(&mut cluster, 1, &json!({"attributes": {"migInstances": {"string": "9:4@4"}}}));
        cluster.settle(LONG);
        assert_eq!((made(&cluster, "a"), made(&cluster, "b")), before);
        cluster.check();
    }
}

#[test]
fn a_claim_with_an_instance_made_by_hand_and_another_is_kube_schedulers() {
    let mut cluster = cluster(1, true);
    put_boards(&mut cluster, 1, &json!({"attributes": {"migInstances": {"string": "9:4@4"}}}));
    let result = |device: &str| json!({"request": "mig", "driver": "gpu.nvidia.com", "pool": "node-0", "device": device});
    cluster.put_claim(json!({"metadata": {"name": "theirs", "namespace": "ml"}, "spec": {"devices": {
        "requests": [{"name": "mig", "exactly": {"deviceClassName": "mig.nvidia.com", "count": 2}}]}},
        "status": {"allocation": {"devices": {"results":
            [result("gpu-0-mig-3g40gb-9-4"), result("gpu-0-mig-1g10gb-19-0")]}}}}));
    mig(&mut cluster, "a", json!({"memory": "9Gi"}), 1);
    cluster.settle(LONG);
    assert_eq!(cluster.place("a"), None);
    told(&mut cluster, "1 GPU not open to shares");
}

#[test]
fn a_hold_that_kube_scheduler_crossed_is_withdrawn() {
    let mut cluster = cluster(2, true);
    mig(&mut cluster, "a", json!({"memory": "9Gi"}), 1);
    cluster.deliver(usize::MAX);
    cluster.round();
    cluster.write(false);
    assert_eq!(cluster.holds(), ["hold.gpu-0.node-0"]);
    scheduler_cuts(&mut cluster, "theirs", "gpu-0-mig-3g40gb-9-4");
    cluster.settle(LONG);
    assert_eq!(made(&cluster, "a")[0].0, "gpu-1");
    cluster.check();
}

/// Whoever waits for a MIG device of kube-scheduler's may have been given one of this board a moment ago.
#[test]
fn who_may_be_given_a_mig_device_of_the_board_is_waited_for() {
    let settles = |scheduled: bool, selector: &str| {
        let mut cluster = cluster(1, scheduled);
        cluster.put_claim(json!({"metadata": {"name": "other", "namespace": "ml"}, "spec": {"devices": {
            "requests": [{"name": "mig", "exactly": {"deviceClassName": "mig.nvidia.com",
                "selectors": [{"cel": {"expression": selector}}]}}]}}}));
        mig(&mut cluster, "a", json!({"memory": "9Gi"}), 1);
        let mut tenths = 0;
        while cluster.place("a").is_none() {
            assert!(tenths < 100, "it waits for ever");
            cluster.settle(std::time::Duration::from_millis(100));
            tenths += 1;
        }
        tenths
    };
    let any = settles(false, "true");
    assert!(settles(true, "true") > any, "{any}");
    assert!(settles(true, "device.attributes['gpu.nvidia.com'].profile == '1g.10gb'") > any);
    let other = "device.attributes['gpu.nvidia.com'].productName == 'NVIDIA A100'";
    assert_eq!(settles(true, other), any);
}

#[test]
fn an_idle_board_is_given_back_to_who_waits_for_a_mig_device_of_kube_schedulers() {
    let mut cluster = cluster(1, true);
    mig(&mut cluster, "a", json!({"memory": "9Gi"}), 1);
    cluster.settle(LONG);
    cluster.drop_pod("a", true);
    cluster.settle(std::time::Duration::from_secs(1));
    assert_eq!(cluster.holds().len(), 1);
    cluster.put_claim(json!({"metadata": {"name": "other", "namespace": "ml"}, "spec": {"devices": {
        "requests": [{"name": "mig", "exactly": {"deviceClassName": "mig.nvidia.com"}}]}}}));
    let refused = json!({"status": {"conditions": [
        {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]}});
    cluster.put_pod("other", &["other"], refused);
    cluster.settle(std::time::Duration::from_secs(2));
    assert!(cluster.holds().is_empty());
}

#[test]
fn instances_of_others_are_in_the_way_and_what_is_not_understood_is_not_cut() {
    let mut cluster = cluster(1, false);
    put_boards(&mut cluster, 1, &json!({"attributes": {"migInstances": {"string": "19:1@3 77:4@4"}}}));
    mig(&mut cluster, "a", json!({"memory": "15Gi"}), 1);
    mig(&mut cluster, "b", json!({"memory": "15Gi"}), 1);
    cluster.settle(LONG);
    let placed: Vec<&str> = ["a", "b"].into_iter().filter(|name| cluster.place(name).is_some()).collect();
    assert_eq!(placed.len(), 1);
    assert_eq!(made(&cluster, placed[0]), [("gpu-0".to_owned(), 15, 0)]);
    told(&mut cluster, "the largest that node node-0/gpu-0 can still make has 9984 MiB (1g.10gb)");
    put_boards(&mut cluster, 1, &json!({"attributes": {"migInstances": {"string": "?"}}}));
    mig(&mut cluster, "c", json!({"memory": "1Gi"}), 1);
    cluster.settle(LONG);
    assert_eq!(cluster.place("c"), None);
    put_boards(&mut cluster, 1, &json!({"attributes": {"migInstances": {"string": "77:4@4"}}}));
    cluster.settle(LONG);
    assert_eq!(made(&cluster, "c"), [("gpu-0".to_owned(), 19, 2)]);
    cluster.check();
}

/// MIG devices need no MPS daemon: those of one claim do not keep other claims off their boards.
#[test]
fn mig_devices_of_several_boards_are_no_group() {
    let mut cluster = cluster(2, true);
    mig(&mut cluster, "pair", json!({"memory": "9Gi"}), 2);
    mig(&mut cluster, "other", json!({"memory": "9Gi"}), 1);
    mig(&mut cluster, "again", json!({"memory": "9Gi"}), 2);
    cluster.settle(LONG);
    for name in ["pair", "other", "again"] {
        assert!(cluster.place(name).is_some(), "{name}");
    }
    // One pod with shares of several GPUs and a MIG device.
    cluster.put_node("node-1", 2);
    let mut devices: Vec<Value> =
        (0..2).map(|minor| super::cluster::device("node-0", minor + 2, true)).collect();
    devices.extend((0..2).map(|minor| board("node-0", minor, true)));
    cluster.put_slice("node-0", devices);
    cluster.put_share("shares", json!({"memory": "1Gi"}), 2);
    cluster.put_share("device", json!({"memory": "9Gi", "minimumIsolation": "mig"}), 1);
    cluster.put_pod("both", &["shares", "device"], json!({}));
    cluster.settle(LONG);
    assert_eq!(cluster.place("shares").map(|at| at.1.len()), Some(2));
    assert_eq!(made(&cluster, "device").len(), 1);
    let shares = results(cluster.claim("shares"));
    assert!(shares.iter().all(|(_, gpu)| gpu == "gpu-2" || gpu == "gpu-3"), "{shares:?}");
    let share_ids = |name: &str| {
        let allocation = cluster.claim(name).status.as_ref().unwrap().allocation.as_ref().unwrap();
        let results = allocation.devices.as_ref().unwrap().results.as_ref().unwrap();
        results.iter().filter(|one| one.share_id.is_some()).count()
    };
    assert_eq!((share_ids("shares"), share_ids("device")), (2, 0));
    cluster.check();
}

#[test]
fn bounds_of_a_namespace_count_what_is_given() {
    let mut cluster = cluster(1, true);
    cluster.annotate("ml", json!({"tranche.dev/max-share-memory": "24Gi"}));
    mig(&mut cluster, "a", json!({"memory": "15Gi"}), 1);
    mig(&mut cluster, "b", json!({"memory": "4Gi"}), 1);
    cluster.settle(LONG);
    let placed = ["a", "b"].into_iter().filter(|name| cluster.place(name).is_some()).count();
    assert_eq!(placed, 1, "20096 MiB are given for 15 GiB, and 9984 MiB for 4");
    told(&mut cluster, "namespace ml may have 24576 MiB of shares");
}

#[test]
fn a_more_important_pod_gets_the_place_of_a_less_important_one() {
    let mut cluster = cluster(1, true);
    for (nth, bytes) in ["40000Mi", "9000Mi", "9000Mi"].into_iter().enumerate() {
        mig(&mut cluster, &format!("p{nth}"), json!({"memory": bytes}), 1);
    }
    cluster.settle(LONG);
    let before = made(&cluster, "p0");
    cluster.put_share("vip", json!({"fraction": "0.5", "minimumIsolation": "mig"}), 1);
    cluster.put_pod("vip", &["vip"], json!({"spec": {"priority": 1000}}));
    cluster.settle(LONG);
    cluster.check();
    assert_eq!(made(&cluster, "p0"), before);
}
