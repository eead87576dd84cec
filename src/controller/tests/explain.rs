//! What people are told who ask about a claim.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

use super::cluster::{Cluster, NS, device};
use crate::controller::Moment;
use crate::controller::classes::POLICY;
use crate::controller::config::Rules;
use crate::controller::core::Core;
use crate::controller::explain::{Answer, Because, Explained, Listing, Origin, Subject, explain};
use crate::controller::view::claim::WAITING;
use crate::model::names::{DRIVER, SHARED_CLASS};

const LONG: Duration = Duration::from_secs(20);

fn cluster(nodes: u32, gpus: u32) -> Cluster {
    let mut cluster = Cluster::new(Rules::default());
    (0..nodes).for_each(|node| cluster.put_node(&format!("node-{node}"), gpus));
    cluster
}

/// A pod with a claim of its own name.
fn share(cluster: &mut Cluster, name: &str, share: Value) {
    cluster.put_share(name, share, 1);
    cluster.put_pod(name, &[name], json!({}));
}

fn asked(cluster: &mut Cluster, name: &str) -> Explained {
    let unheard = std::mem::take(&mut cluster.feed);
    let (mut core, listing) = listed(cluster);
    cluster.feed = unheard;
    let claim = Subject::Claim(core.view.claim_named("ml", name).unwrap().key);
    let now = Timestamp::UNIX_EPOCH + SignedDuration::from_hours(24);
    explain(&mut core, &listing, &[claim], now).remove(0)
}

/// All that the cluster has, for somebody who asks about namespace ml.
pub fn listed(cluster: &mut Cluster) -> (Core, Listing) {
    cluster.relist();
    let (mut core, mut listing) = (Core::new(Rules::default(), NS), Listing::new("ml"));
    for change in cluster.feed.drain(..) {
        listing.see(&change);
        core.apply(change, Moment::ZERO);
    }
    (core, listing)
}

/// Where it is, or would be: node and devices; and what is said beside.
fn place(answer: &Answer) -> (String, Vec<String>, Vec<String>) {
    let (place, words) = match answer {
        Answer::Placed { place, remarks } => (place, remarks),
        Answer::Would { place, holdups } => (place, holdups),
        other => panic!("it has no place: {other:?}"),
    };
    let devices = place.devices.iter().map(|part| part.gpu.device.to_string());
    (place.node.as_ref().unwrap().to_string(), devices.collect(), words.clone())
}

/// Why it waits, in words, and each node's verdict.
fn wait(answer: &Answer) -> (Because, String, Vec<String>) {
    match answer {
        Answer::Waits { because, words, nodes, .. } => {
            let nodes = nodes.iter().map(|(node, verdict)| format!("{node} {verdict}"));
            (*because, words.clone(), nodes.collect())
        }
        other => panic!("it does not wait: {other:?}"),
    }
}

#[test]
fn what_would_be_done_is_what_the_controller_then_does() {
    let mut cluster = cluster(3, 2);
    for (nth, memory) in ["10Gi", "75Gi", "60Gi", "20Gi", "79Gi"].into_iter().enumerate() {
        let name = format!("s{nth}");
        share(&mut cluster, &name, json!({"memory": memory}));
        let told = asked(&mut cluster, &name);
        assert!(matches!(told.answer, Answer::Would { .. }), "{told:?}");
        let (node, devices, _) = place(&told.answer);
        cluster.settle(LONG);
        assert_eq!(cluster.place(&name), Some((node.clone(), devices.clone())), "{name}");
        let told = asked(&mut cluster, &name);
        assert!(matches!(told.answer, Answer::Placed { .. }), "{told:?}");
        assert_eq!((place(&told.answer).0, place(&told.answer).1), (node, devices));
    }
}

#[test]
fn a_gpu_that_is_nobodys_is_taken_first() {
    let mut cluster = cluster(1, 1);
    share(&mut cluster, "first", json!({"memory": "10Gi"}));
    let (_, _, holdups) = place(&asked(&mut cluster, "first").answer);
    assert_eq!(
        holdups,
        [
            "node-0/gpu-0 is nobody's yet: the controller takes it first, by a claim of its own that settles for 0.05 s, or \
             2 s while the scheduler may be giving that GPU to somebody"
        ]
    );
    cluster.settle(LONG);
    share(&mut cluster, "second", json!({"memory": "10Gi"}));
    assert_eq!(place(&asked(&mut cluster, "second").answer).2, [""; 0]);
    let mut claim = cluster.claim("second").clone();
    claim.metadata.annotations = Some([(WAITING.to_owned(), "needs more".to_owned())].into());
    cluster.store(claim);
    let (_, _, holdups) = place(&asked(&mut cluster, "second").answer);
    assert!(holdups[0].starts_with("the controller said otherwise"), "{holdups:?}");
}

#[test]
fn who_waits_hears_the_controllers_words_and_each_nodes() {
    let mut cluster = cluster(6, 2);
    share(&mut cluster, "small", json!({"memory": "70Gi"}));
    cluster.settle(LONG);
    let (small, _) = cluster.place("small").unwrap();
    assert_eq!(small, "node-0");
    cluster.put_node_object("node-1", json!({"unschedulable": true}));
    cluster.put_node_object("node-2", json!({"taints": [{"key": "maintenance", "effect": "NoSchedule"}]}));
    cluster.put_slice(
        "node-3",
        vec![{
            let mut sick = device("node-3", 0, true);
            sick["taints"] = json!([{"key": "gpu.nvidia.com/xid", "effect": "NoExecute"}]);
            sick
        }],
    );
    cluster.put_node_object("cpu-only", json!({}));
    let mut weak = device("node-5", 0, true);
    weak["attributes"]["grantableMemoryMiB"] = json!({"int": 1000});
    cluster.put_slice("node-5", vec![weak]);
    for (node, devices) in [("node-0", &["gpu-1"][..]), ("node-4", &["gpu-0", "gpu-1"])] {
        for gpu in devices {
            let name = format!("whole-{node}-{gpu}");
            cluster.put_whole(&name);
            let mut claim = cluster.claim(&name).clone();
            let made = crate::controller::grant::hold(&node.into(), "gpu", gpu, None);
            claim.status.get_or_insert_default().allocation = Some(made);
            cluster.store(claim);
        }
    }
    share(&mut cluster, "large", json!({"memory": "20Gi"}));
    cluster.settle(LONG);
    let (because, words, nodes) = wait(&asked(&mut cluster, "large").answer);
    assert_eq!(because.as_str(), "memory");
    assert_eq!(cluster.claim("large").metadata.annotations.as_ref().unwrap()[WAITING], words);
    assert!(
        words.starts_with(
            "needs 20480 MiB; largest free on 1 candidate GPU is 10240 MiB on node node-0/gpu-0"
        )
    );
    assert_eq!(
        nodes,
        [
            "cpu-only no GPU that shares can be placed on",
            "node-0 largest free 10240 MiB of gpu-0, needs 20480; gpu-1: whole GPU of claim ml/whole-node-0-gpu-1",
            "node-1 is cordoned; tolerate node.kubernetes.io/unschedulable or uncordon it",
            "node-2 has the taint maintenance:NoSchedule, which the pod does not tolerate",
            "node-3 gpu-0: has the taint gpu.nvidia.com/xid:NoExecute, which is not tolerated",
            "node-4 gpu-0: whole GPU of claim ml/whole-node-4-gpu-0; gpu-1: whole GPU of claim ml/whole-node-4-gpu-1",
            "node-5 too small even idle: 1000 MiB of gpu-0, needs 20480",
        ]
    );
}

#[test]
fn compute_slots_cpu_and_selectors_are_told_with_their_numbers() {
    let mut cluster = cluster(1, 1);
    share(&mut cluster, "busy", json!({"memory": "1Gi", "compute": 90}));
    cluster.settle(LONG);
    share(&mut cluster, "fast", json!({"memory": "1Gi", "compute": 20}));
    assert_eq!(
        wait(&asked(&mut cluster, "fast").answer).2,
        ["node-0 most compute free 10 % of gpu-0, needs 20 %"]
    );
    cluster.put_share("wide", json!({"memory": "1Gi"}), 2);
    cluster.put_pod("wide", &["wide"], json!({}));
    let (because, _, nodes) = wait(&asked(&mut cluster, "wide").answer);
    assert_eq!(because.as_str(), "candidates");
    assert_eq!(
        nodes,
        [
            "node-0 needs 2 GPUs, none fits; gpu-0: has other shares, and a claim of several GPUs has them for itself"
        ]
    );
    cluster.put_share("heavy", json!({"memory": "1Gi"}), 1);
    let container = json!({"name": "main", "resources": {"requests": {"cpu": "32500m"}}});
    cluster.put_pod("heavy", &["heavy"], json!({"spec": {"containers": [container]}}));
    assert_eq!(wait(&asked(&mut cluster, "heavy").answer).2, ["node-0 CPU: needs 32.5, 32 left"]);
    cluster.put_share("choosy", json!({"memory": "1Gi"}), 1);
    let mut claim = cluster.claim("choosy").clone();
    let select = |text: &str| serde_json::from_value(json!([{"cel": {"expression": text}}])).unwrap();
    let exactly = |claim: &mut k8s_openapi::api::resource::v1::ResourceClaim, text: &str| {
        let devices = claim.spec.as_mut().unwrap().devices.as_mut().unwrap();
        devices.requests.as_mut().unwrap()[0].exactly.as_mut().unwrap().selectors = Some(select(text));
    };
    exactly(&mut claim, "device.attributes['gpu.nvidia.com'].type == 'mig'");
    let claim = cluster.store(claim);
    cluster.put_pod("choosy", &["choosy"], json!({}));
    assert_eq!(
        wait(&asked(&mut cluster, "choosy").answer).2,
        ["node-0 no GPU matches selector \"device.attributes['gpu.nvidia.com'].type == 'mig'\""]
    );
    let mut claim = claim;
    exactly(&mut claim, "device.attributes['gpu.nvidia.com'].nothing == 1");
    cluster.store(claim);
    let nodes = wait(&asked(&mut cluster, "choosy").answer).2;
    assert!(nodes[0].starts_with("node-0 gpu-0: the selector ") && nodes[0].contains("fails"), "{nodes:?}");
}

#[test]
fn what_goes_first_is_counted_before_it() {
    let mut cluster = cluster(1, 1);
    share(&mut cluster, "late", json!({"memory": "40Gi"}));
    cluster.put_share("urgent", json!({"memory": "60Gi"}), 1);
    cluster.put_pod("urgent", &["urgent"], json!({"spec": {"priority": 10}}));
    let (because, words, nodes) = wait(&asked(&mut cluster, "late").answer);
    assert_eq!(because.as_str(), "memory");
    assert!(words.contains("is 20480 MiB on node node-0/gpu-0"), "{words}");
    assert_eq!(nodes, ["node-0 largest free 20480 MiB of gpu-0, needs 40960"]);
    let told = asked(&mut cluster, "late").answer;
    let goes_first = "1 pod or gang gets its share first, by priority and age";
    assert!(matches!(&told, Answer::Waits { first: Some(first), .. } if first == goes_first), "{told:?}");
    share(&mut cluster, "little", json!({"memory": "1Gi"}));
    let (_, _, holdups) = place(&asked(&mut cluster, "little").answer);
    assert_eq!(holdups[0], goes_first);
}

#[test]
fn devices_that_are_not_shared_are_counted_where_no_gpu_matches() {
    let mut cluster = cluster(1, 1);
    let whole_only = |minor: u32| {
        let mut whole = device("node-1", minor, true);
        whole["attributes"]["productName"]["string"] = json!("NVIDIA GB10");
        whole["attributes"].as_object_mut().unwrap().remove("grantableMemoryMiB");
        whole
    };
    let without_memory = |minor: u32| {
        let mut device = whole_only(minor);
        device["capacity"].as_object_mut().unwrap().remove("memory");
        device
    };
    let mut mig = whole_only(9);
    mig["attributes"]["type"]["string"] = json!("mig");
    cluster.put_node("node-1", 0);
    let mut other = whole_only(3);
    other["attributes"]["productName"]["string"] = json!("Tesla T4");
    cluster.put_slice("node-1", vec![whole_only(0), whole_only(1), without_memory(2), mig.clone(), other]);
    let selector = "device.attributes['gpu.nvidia.com'].productName == 'NVIDIA GB10'";
    share_with(&mut cluster, "small", selector);
    let counted = "; not shared, though selectors match: 1 MIG device, 1 GPU whose memory is not known, 2 GPUs kept from \
                   sharing (sharing.exclusiveGPUs, ";
    let (because, words, _) = wait(&asked(&mut cluster, "small").answer);
    assert_eq!(because.as_str(), "candidates");
    assert!(words.contains(counted), "{words}");
    // Of the other product there are others.
    share_with(&mut cluster, "t4", "device.attributes['gpu.nvidia.com'].productName == 'Tesla T4'");
    let (_, words, _) = wait(&asked(&mut cluster, "t4").answer);
    assert!(words.contains("; not shared, though selectors match: 1 GPU kept from sharing "), "{words}");
    share_with(&mut cluster, "l4", "device.attributes['gpu.nvidia.com'].productName == 'NVIDIA L4'");
    let (_, words, _) = wait(&asked(&mut cluster, "l4").answer);
    assert!(!words.contains("not shared"), "{words}");
    // They are gone, or shared now.
    cluster.put_slice("node-1", vec![whole_only(0), device("node-1", 1, true)]);
    let (_, words, _) = wait(&asked(&mut cluster, "small").answer);
    assert!(words.contains("though selectors match: 1 GPU kept from sharing "), "{words}");
    cluster.put_slice("node-1", vec![device("node-1", 0, true)]);
    let (_, words, _) = wait(&asked(&mut cluster, "small").answer);
    assert!(!words.contains("not shared"), "{words}");
}

#[test]
fn who_selects_by_the_capacity_of_memory_is_told_of_the_total() {
    let mut cluster = cluster(1, 1);
    let hint = "totalMemoryMiB";
    let by = |wanted: &str| {
        format!("device.capacity['gpu.nvidia.com'].memory.isGreaterThan(quantity('{wanted}'))")
    };
    share_with(&mut cluster, "large", &by("80Gi"));
    let (because, words, _) = wait(&asked(&mut cluster, "large").answer);
    assert!(because.as_str() == "candidates" && words.contains(hint), "{words}");
    share_with(&mut cluster, "other", "device.attributes['gpu.nvidia.com'].productName == 'memory'");
    let (_, words, _) = wait(&asked(&mut cluster, "other").answer);
    assert!(!words.contains(hint), "{words}");
}

/// A claim for 1 GiB of a GPU that the selector chooses, and its pod.
fn share_with(cluster: &mut Cluster, name: &str, selector: &str) {
    let parameters = json!({"apiVersion": "tranche.dev/v1alpha1", "kind": "GpuShare", "memory": "1Gi"});
    let exactly = json!({"deviceClassName": SHARED_CLASS, "selectors": [{"cel": {"expression": selector}}]});
    cluster.put_claim(json!({"metadata": {"name": name, "namespace": "ml"}, "spec": {"devices": {
        "requests": [{"name": "gpu", "exactly": exactly}],
        "config": [{"opaque": {"driver": DRIVER, "parameters": parameters}}]}}}));
    cluster.put_pod(name, &[name], json!({}));
}

#[test]
fn a_promised_claim_is_told_of_before_it_exists() {
    let mut cluster = cluster(1, 1);
    let promise = |memory: &str| {
        let share = json!({"share": {"apiVersion": "tranche.dev/v1alpha1", "kind": "GpuShare", "memory": memory}, "count": 1});
        json!({"metadata": {"annotations": {"tranche.dev/gpu-share": share.to_string()}},
               "spec": {"resourceClaims": [{"name": "gpu-share", "resourceClaimName": "kai-gpu-share"}]}})
    };
    cluster.put_pod("kai", &[], promise("2000Mi"));
    let told = asked(&mut cluster, "kai-gpu-share");
    assert!(told.origin == Origin::Promised && told.pods[0].name == "kai");
    assert!(matches!(told.answer, Answer::Would { .. }), "{told:?}");
    cluster.put_pod("kai", &[], promise("100Gi"));
    let told = asked(&mut cluster, "kai-gpu-share");
    assert_eq!(wait(&told.answer).2, ["node-0 too small even idle: 81920 MiB of gpu-0, needs 102400"]);
    cluster.put_pod("kai", &[], promise("much"));
    let told = asked(&mut cluster, "kai-gpu-share");
    assert!(matches!(&told.answer, Answer::Refused { words } if words.contains("memory")), "{told:?}");
}

#[test]
fn what_is_to_come_before_a_turn_is_told() {
    let mut cluster = cluster(1, 1);
    cluster.put_share("alone", json!({"memory": "1Gi"}), 1);
    assert_eq!(wait(&asked(&mut cluster, "alone").answer).0, Because::NoPod);
    let spec = |name: &str, claims: &[&str], more: Value, cluster: &mut Cluster| {
        cluster.put_share(name, json!({"memory": "1Gi"}), 1);
        cluster.put_pod(name, claims, more);
    };
    spec("gated", &["gated"], json!({"spec": {"schedulingGates": [{"name": "g"}]}}), &mut cluster);
    assert_eq!(wait(&asked(&mut cluster, "gated").answer).0, Because::Gated);
    spec("half", &["half", "other"], json!({}), &mut cluster);
    let (because, words, _) = wait(&asked(&mut cluster, "half").answer);
    assert_eq!(
        (because, words.contains("the claim other, which does not exist")),
        (Because::OtherClaims, true)
    );
    let gang = json!({"metadata": {"annotations": {"tranche.dev/gang": "g", "tranche.dev/gang-size": "3"}}});
    spec("one", &["one"], gang, &mut cluster);
    let (because, words, _) = wait(&asked(&mut cluster, "one").answer);
    assert_eq!((because, words.contains("1 of 3 pods")), (Because::Gang, true), "{words}");
}

#[test]
fn a_gang_without_a_size_has_its_turn_and_hears_that_it_does_not_fit_together() {
    let mut cluster = cluster(1, 1);
    let gang = json!({"metadata": {"annotations": {"tranche.dev/gang": "g"}}});
    for name in ["g0", "g1"] {
        cluster.put_share(name, json!({"memory": "50Gi"}), 1);
        cluster.put_pod(name, &[name], gang.clone());
    }
    let (_, words, nodes) = wait(&asked(&mut cluster, "g1").answer);
    assert!(words.starts_with("the gang's 2 pods do not fit together"), "{words}");
    assert_eq!(nodes, ["node-0 has room for this pod alone"]);
}

#[test]
fn what_can_never_be_placed_is_refused_with_the_field() {
    let mut cluster = cluster(1, 1);
    share(&mut cluster, "none", json!({"memory": "0"}));
    cluster.put_share("lonely", json!({"fraction": "1.5"}), 1);
    for (name, field) in [("none", "parameters.memory"), ("lonely", "parameters.fraction")] {
        let told = asked(&mut cluster, name).answer;
        assert!(matches!(&told, Answer::Refused { words } if words.contains(field)), "{told:?}");
    }
    share(&mut cluster, "odd", json!({"memory": "1Gi"}));
    let mut claim = cluster.claim("odd").clone();
    claim.metadata.annotations = Some([(POLICY.to_owned(), "best".to_owned())].into());
    cluster.store(claim);
    let told = asked(&mut cluster, "odd").answer;
    assert!(matches!(&told, Answer::Refused { words } if words.contains(POLICY)), "{told:?}");
    cluster.put_share("even", json!({"memory": "1Gi"}), 1);
    cluster.put_pod("pair", &["even", "odd"], json!({}));
    assert_eq!(wait(&asked(&mut cluster, "even").answer).0.as_str(), "claim");
    // Its neighbour waits for it.
    cluster.put_share("good", json!({"memory": "1Gi"}), 1);
    cluster.put_pod("both", &["good", "none"], json!({}));
    let (because, words, _) = wait(&asked(&mut cluster, "good").answer);
    assert_eq!(because.as_str(), "claim");
    assert!(words.starts_with("claim none: "), "{words}");
}

#[test]
fn claims_of_others_are_told_whose_they_are() {
    let mut cluster = cluster(1, 3);
    share(&mut cluster, "a", json!({"memory": "1Gi"}));
    cluster.settle(LONG);
    cluster.put_whole("whole");
    let Answer::NotOurs { place: None, words } = asked(&mut cluster, "whole").answer else { panic!() };
    assert!(words.contains("of 3 shareable GPUs that its requests choose 2 are nobody's"), "{words}");
    let mut claim = cluster.claim("whole").clone();
    let made = crate::controller::grant::hold(&"node-0".into(), "gpu", "gpu-2", None);
    claim.status.get_or_insert_default().allocation = Some(made);
    cluster.store(claim);
    let Answer::NotOurs { place: Some(place), .. } = asked(&mut cluster, "whole").answer else { panic!() };
    assert_eq!(place.devices[0].gpu.to_string(), "node-0/gpu-2");
    cluster.put_claim(json!({"metadata": {"name": "nic", "namespace": "ml"}, "spec": {"devices": {
        "requests": [{"name": "nic", "exactly": {"deviceClassName": "nic.example.com"}}]}}}));
    let Answer::NotOurs { words, .. } = asked(&mut cluster, "nic").answer else { panic!() };
    assert!(words.starts_with("asks for no device of class shared.gpu.nvidia.com"), "{words}");
    let driver = json!([{"cel": {"expression": "device.driver == 'nic.example.com'"}}]);
    cluster.put_class("nic.example.com", json!({}), json!({"selectors": driver}));
    let Answer::NotOurs { words, .. } = asked(&mut cluster, "nic").answer else { panic!() };
    assert!(words.starts_with("asks for no device of class shared.gpu.nvidia.com"), "{words}");
}

#[test]
fn a_gpu_that_is_kept_for_shares_and_has_none_counts_as_free_for_who_wants_all_of_it() {
    let mut cluster = cluster(1, 1);
    share(&mut cluster, "a", json!({"memory": "1Gi"}));
    cluster.settle(LONG);
    cluster.put_whole("whole");
    cluster.put_pod("whole", &["whole"], json!({}));
    let (because, words, nodes) = wait(&asked(&mut cluster, "whole").answer);
    assert_eq!(because, Because::Devices, "{words}");
    assert_eq!(nodes, ["node-0 gpu-0: has a share of claim ml/a"]);
    super::walk::bind(&mut cluster, "a");
    cluster.drop_pod("a", true);
    let Answer::Open { words, nodes } = asked(&mut cluster, "whole").answer else { panic!() };
    assert_eq!(nodes, ["node-0".into()]);
    assert!(words.contains("on GPUs that the controller keeps for shares and that have none"), "{words}");
}

#[test]
fn a_hold_tells_whose_shares_it_keeps_its_gpu_for() {
    let mut cluster = cluster(1, 1);
    share(&mut cluster, "a", json!({"memory": "1Gi"}));
    cluster.settle(LONG);
    let (mut core, listing) = listed(&mut cluster);
    let claim = Subject::Claim(core.view.claim_named(NS, "hold.gpu-0.node-0").unwrap().key);
    let told = explain(&mut core, &listing, &[claim], Timestamp::UNIX_EPOCH).remove(0);
    let Answer::Hold { words, .. } = told.answer else { panic!() };
    assert_eq!(words, "keeps node-0/gpu-0 for shares that the controller places; it has claim ml/a");
}

#[test]
fn a_place_that_is_not_used_says_why() {
    let mut cluster = cluster(2, 1);
    share(&mut cluster, "a", json!({"memory": "1Gi"}));
    cluster.settle(LONG);
    let (node, _, remarks) = place(&asked(&mut cluster, "a").answer);
    assert!(remarks[0].contains(&format!("kube-scheduler is to bind the pod to node {node}")), "{remarks:?}");
    cluster.put_node_object(&node, json!({"unschedulable": true}));
    let (_, _, remarks) = place(&asked(&mut cluster, "a").answer);
    assert!(remarks[0].contains("is cordoned"), "{remarks:?}");
    cluster.put_node_object(&node, json!({}));
    super::walk::bind(&mut cluster, "a");
    let told = asked(&mut cluster, "a");
    assert_eq!(place(&told.answer).2, [""; 0], "it runs");
    assert!(told.pods[0].reserved && told.pods[0].node.is_some());
    cluster.put_whole("whole");
    let mut claim = cluster.claim("whole").clone();
    let made = crate::controller::grant::hold(&node.as_str().into(), "gpu", "gpu-0", None);
    claim.status.get_or_insert_default().allocation = Some(made);
    cluster.store(claim);
    let (_, _, remarks) = place(&asked(&mut cluster, "a").answer);
    assert!(remarks[0].contains("is also named by claim ml/whole: it is given twice"), "{remarks:?}");
}
