//! One thing happens at a time.

use std::time::Duration;

use k8s_openapi::api::resource::v1::ResourceClaim;
use serde_json::{Value, json};

use super::cluster::{Cluster, NS, device, object};
use super::told::until;
use crate::cluster::feed::{Change, WatchEvent};
use crate::controller::config::Rules;
use crate::controller::holds::HoldPace;
use crate::controller::view::GpuRef;
use crate::controller::write::{Failure, Write};
use crate::model::names::SHARED_CLASS;

pub(super) const SECOND: Duration = Duration::from_secs(1);
/// Less than a hold settles.
pub(super) const MOMENT: Duration = Duration::from_millis(25);
pub(super) const LONG: Duration = Duration::from_secs(20);

pub(super) fn rules() -> Rules {
    Rules {
        holds: HoldPace { keep_warm: Duration::from_secs(600), ..HoldPace::default() },
        ..Rules::default()
    }
}

pub(super) fn cluster(nodes: u32, gpus: u32) -> Cluster {
    let mut cluster = Cluster::new(rules());
    (0..nodes).for_each(|node| cluster.put_node(&format!("node-{node}"), gpus));
    cluster.settle(SECOND);
    cluster
}

fn gpu(node: &str, device: &str) -> GpuRef {
    GpuRef { node: node.into(), device: device.into() }
}

/// A pod with a claim of its own name.
pub(super) fn share(cluster: &mut Cluster, name: &str, memory: &str) {
    cluster.put_share(name, json!({"memory": memory}), 1);
    cluster.put_pod(name, &[name], json!({}));
}

/// The scheduler gives a GPU to a claim that waits for it, or that comes now.
fn whole_claim_takes(cluster: &mut Cluster, name: &str, node: &str, device: &str) {
    if !cluster.claims.contains_key(&("ml".to_owned(), name.to_owned())) {
        cluster.put_whole(name);
    }
    let mut claim = cluster.claim(name).clone();
    let made = crate::controller::grant::hold(&node.into(), "gpu", device, None);
    claim.status.get_or_insert_default().allocation = Some(made);
    cluster.store(claim);
}

#[test]
fn the_first_share_of_a_gpu_waits_for_it_to_settle_and_the_second_for_nothing() {
    let mut cluster = cluster(1, 1);
    share(&mut cluster, "a", "10Gi");
    cluster.settle(MOMENT);
    assert_eq!(cluster.holds(), ["hold.gpu-0.node-0"]);
    assert_eq!(cluster.place("a"), None, "not settled yet");
    cluster.settle(2 * MOMENT);
    assert!(cluster.place("a").is_some());
    share(&mut cluster, "b", "10Gi");
    cluster.settle(Duration::ZERO);
    assert_eq!(cluster.place("b"), cluster.place("a"));
    cluster.check();
}

/// One request of a claim by hand.
fn put_request(cluster: &mut Cluster, name: &str, request: Value) {
    let mut named = json!({"name": "it"});
    super::cluster::merge(&mut named, &request);
    cluster.put_claim(
        json!({"metadata": {"name": name, "namespace": "ml"}, "spec": {"devices": {"requests": [named]}}}),
    );
}

/// How long the first share of the only GPU waits, in tenths of a second.
pub(super) fn settles_for(mut cluster: Cluster) -> u32 {
    share(&mut cluster, "a", "10Gi");
    let mut tenths = 0;
    while cluster.place("a").is_none() {
        assert!(tenths < 100, "it waits for ever");
        cluster.settle(MOMENT);
        tenths += 1;
    }
    cluster.check();
    tenths
}

#[test]
fn whoever_may_be_given_the_gpu_by_now_is_waited_for() {
    let limits = |name: &str| json!({"spec": {"containers": [{"name": "main", "resources": {"limits": {name: "1"}}}]}});
    type Comes = fn(&mut Cluster);
    let rivals: [(&str, Comes); 6] = [
        ("a claim", |cluster| cluster.put_whole("w")),
        ("a claim that is being deleted", |cluster| {
            let deleted = "2026-01-01T00:00:00Z";
            let spec = json!({"devices": {"requests": [{"name": "it", "exactly": {"deviceClassName": "gpu.nvidia.com"}}]}});
            cluster.put_claim(json!({"metadata": {"name": "w", "namespace": "ml", "deletionTimestamp": deleted}, "spec": spec}));
        }),
        ("a class that nobody has told of", |cluster| {
            put_request(cluster, "w", json!({"exactly": {"deviceClassName": "new.example.com"}}));
        }),
        ("an alternative", |cluster| {
            put_request(
                cluster,
                "w",
                json!({"firstAvailable": [
                {"name": "part", "deviceClassName": SHARED_CLASS}, {"name": "all", "deviceClassName": "gpu.nvidia.com"}]}),
            );
        }),
        ("a selector that nobody here can follow", |cluster| {
            let cel = json!([{"cel": {"expression": "device.nonsense('x')"}}]);
            put_request(
                cluster,
                "w",
                json!({"exactly": {"deviceClassName": "gpu.nvidia.com", "selectors": cel}}),
            );
        }),
        ("one that lost its allocation", |cluster| {
            whole_claim_takes(cluster, "w", "node-9", "gpu-0");
            let mut claim = cluster.claim("w").clone();
            claim.status = None;
            cluster.store(claim);
        }),
    ];
    for (what, rival) in rivals {
        let mut cluster = cluster(1, 1);
        rival(&mut cluster);
        assert!((80..=81).contains(&settles_for(cluster)), "{what}");
    }
    let mut by_limits = cluster(1, 1);
    by_limits.put_pod("w", &[], limits("nvidia.com/gpu"));
    assert!((80..=81).contains(&settles_for(by_limits)), "a pod without a claim");
}

#[test]
fn who_cannot_be_given_the_gpu_is_not_waited_for() {
    let limits = json!({"spec": {"nodeName": "node-9",
        "containers": [{"name": "main", "resources": {"limits": {"nvidia.com/gpu": "1"}}}]}});
    let mut cluster = cluster(1, 1);
    let others = json!({"selectors": [{"cel": {"expression": "device.driver == 'nic.example.com'"}}]});
    cluster.put_class("nic.example.com", json!({}), others);
    put_request(&mut cluster, "nic", json!({"exactly": {"deviceClassName": "nic.example.com"}}));
    let t4 =
        json!([{"cel": {"expression": "device.attributes['gpu.nvidia.com'].productName == 'Tesla T4'"}}]);
    put_request(
        &mut cluster,
        "t4",
        json!({"exactly": {"deviceClassName": "gpu.nvidia.com", "selectors": t4}}),
    );
    let look = json!({"exactly": {"deviceClassName": "gpu.nvidia.com", "adminAccess": true}});
    put_request(&mut cluster, "monitor", look);
    whole_claim_takes(&mut cluster, "elsewhere", "node-9", "gpu-0");
    cluster.put_share("without-a-pod", json!({"memory": "1Gi"}), 1);
    cluster.put_pod("bound", &[], limits);
    assert_eq!(settles_for(cluster), 2);
}

#[test]
fn a_pod_without_a_claim_that_was_bound_during_the_look_is_waited_for() {
    let mut cluster = cluster(1, 1);
    let limits = json!([{"name": "main", "resources": {"limits": {"nvidia.com/gpu": "1"}}}]);
    cluster.put_pod("w", &[], json!({"spec": {"containers": limits}}));
    share(&mut cluster, "a", "10Gi");
    until(&mut cluster, |write| matches!(write, Write::WatchBarrier(_)));
    cluster.write(false);
    whole_claim_takes(&mut cluster, "w", "node-0", "gpu-0");
    let claim = cluster.feed.split_off(1);
    let mut pod = cluster.pods[&("ml".to_owned(), "w".to_owned())].clone();
    pod.spec.get_or_insert_default().node_name = Some("node-0".to_owned());
    cluster.store_pod(pod);
    // The watch of pods is ahead of that of claims, which has brought the mark.
    cluster.deliver(2);
    cluster.round();
    assert!(cluster.writes.is_empty(), "somebody may have it");
    cluster.feed.extend(claim);
    cluster.settle(LONG);
    assert_eq!((cluster.place("a"), cluster.holds()), (None, vec![]), "the GPU is another's");
    cluster.check();
}

#[test]
fn a_hold_of_ours_that_is_being_written_is_nobody_to_wait_for() {
    let mut cluster = cluster(1, 2);
    share(&mut cluster, "a", "79Gi");
    share(&mut cluster, "b", "79Gi");
    cluster.deliver(usize::MAX);
    cluster.round();
    assert!(matches!(*cluster.writes.make_contiguous(), [Write::Hold(..), Write::Hold(..)]));
    cluster.write_half();
    cluster.settle(3 * MOMENT);
    let placed = ["a", "b"].into_iter().filter(|name| cluster.place(name).is_some()).count();
    assert_eq!((placed, cluster.holds().len()), (1, 2), "for one the GPU is not ours yet");
}

#[test]
fn what_the_scheduler_decided_before_a_hold_may_come_late() {
    let mut cluster = cluster(1, 1);
    cluster.put_whole("w");
    share(&mut cluster, "a", "10Gi");
    cluster.settle(19 * MOMENT);
    assert_eq!(cluster.holds().len(), 1);
    whole_claim_takes(&mut cluster, "w", "node-0", "gpu-0");
    cluster.settle(LONG);
    assert_eq!((cluster.place("a"), cluster.holds()), (None, vec![]), "the GPU is another's");
    cluster.check();
}

#[test]
fn once_the_scheduler_has_decided_nobody_is_waited_for_any_more() {
    let mut cluster = cluster(2, 1);
    cluster.put_whole("w");
    share(&mut cluster, "a", "10Gi");
    cluster.settle(SECOND);
    let held = cluster.holds()[0].rsplit('.').next().unwrap().to_owned();
    let other = if held == "node-0" { "node-1" } else { "node-0" };
    whole_claim_takes(&mut cluster, "w", other, "gpu-0");
    cluster.drop_claim(&(NS.to_owned(), format!("hold.gpu-0.{held}")));
    cluster.settle(4 * MOMENT);
    assert_eq!(cluster.place("a").map(|place| place.0), Some(held), "taken anew");
    cluster.check();
}

#[test]
fn a_hold_that_lost_its_race_is_withdrawn_and_the_share_goes_elsewhere() {
    let mut cluster = cluster(2, 1);
    cluster.put_whole("whole");
    share(&mut cluster, "a", "10Gi");
    cluster.settle(SECOND);
    let taken = cluster.holds()[0].rsplit('.').next().unwrap().to_owned();
    whole_claim_takes(&mut cluster, "whole", &taken, "gpu-0");
    cluster.settle(LONG);
    let (node, _) = cluster.place("a").unwrap();
    assert_ne!(node, taken);
    assert_eq!(cluster.holds(), [format!("hold.gpu-0.{node}")]);
    cluster.check();
}

#[test]
fn what_the_watch_has_not_told_yet_is_waited_for_by_the_look() {
    let mut cluster = cluster(1, 1);
    cluster.put_whole("whole");
    share(&mut cluster, "a", "10Gi");
    cluster.settle(SECOND);
    whole_claim_takes(&mut cluster, "whole", "node-0", "gpu-0");
    let late = std::mem::take(&mut cluster.feed);
    cluster.now += LONG;
    cluster.round();
    assert!(matches!(cluster.writes[0], Write::WatchBarrier(_)));
    cluster.write(false);
    // The mark is behind what is late.
    let mark = std::mem::replace(&mut cluster.feed, late);
    cluster.round();
    assert_eq!(cluster.place("a"), None);
    cluster.feed.extend(mark);
    cluster.settle(LONG);
    assert_eq!((cluster.place("a"), cluster.holds()), (None, vec![]), "the GPU is another's");
    cluster.check();
}

#[test]
fn a_look_that_fails_is_taken_again() {
    let mut cluster = cluster(1, 1);
    share(&mut cluster, "a", "10Gi");
    cluster.settle(MOMENT);
    cluster.now += MOMENT;
    cluster.round();
    assert!(matches!(cluster.writes[0], Write::WatchBarrier(_)));
    cluster.fail(Failure::Silent("no answer".to_owned()));
    assert_eq!(cluster.place("a"), None);
    cluster.settle(3 * SECOND);
    assert!(cluster.place("a").is_some());
}

#[test]
fn a_hold_whose_answer_was_lost_is_deleted_and_the_gpu_tried_again() {
    let mut cluster = cluster(1, 1);
    share(&mut cluster, "a", "10Gi");
    cluster.deliver(9);
    cluster.round();
    assert!(matches!(cluster.writes[0], Write::Hold(..)));
    cluster.write(true);
    assert_eq!(cluster.holds().len(), 1);
    cluster.settle(LONG);
    assert!(cluster.place("a").is_some());
    cluster.check();
}

#[test]
fn idle_holds_are_given_back_after_a_while_and_at_once_for_a_whole_gpu() {
    let mut cluster = cluster(1, 2);
    share(&mut cluster, "a", "10Gi");
    share(&mut cluster, "b", "75Gi");
    cluster.settle(LONG);
    assert_eq!(cluster.holds().len(), 2);
    cluster.drop_pod("a", true);
    cluster.settle(SECOND);
    assert_eq!(cluster.holds().len(), 2, "kept warm");
    cluster.put_whole("whole");
    let waits = json!({"status": {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]}});
    cluster.put_pod("whole", &["whole"], waits);
    cluster.settle(SECOND);
    assert_eq!(cluster.holds().len(), 1, "a pod waits for a whole GPU");
    cluster.drop_pod("b", true);
    cluster.drop_pod("whole", true);
    cluster.settle(Duration::from_secs(700));
    assert_eq!(cluster.holds(), [""; 0]);
}

#[test]
fn a_step_of_a_hold_that_is_given_back_is_tried_again_if_it_fails_and_not_at_once() {
    let refused = || Failure::Refused("not by this webhook".to_owned());
    for failure in [Failure::Conflict, refused(), Failure::Silent("no answer".to_owned())] {
        let mut cluster = cluster(1, 1);
        share(&mut cluster, "a", "10Gi");
        cluster.settle(LONG);
        cluster.drop_pod("a", true);
        until(&mut cluster, |write| matches!(write, Write::Release(..)));
        cluster.fail(failure.clone());
        let next = cluster.round().unwrap();
        assert_eq!((cluster.writes.len(), cluster.holds().len()), (0, 1), "{failure:?}");
        cluster.now = next;
        cluster.settle(LONG);
        assert_eq!(cluster.holds(), [""; 0], "{failure:?}");
        cluster.check();
    }
}

#[test]
fn however_a_whole_gpu_is_asked_for_an_idle_one_is_given_back() {
    let waits = json!({"type": "PodScheduled", "status": "False", "reason": "Unschedulable"});
    let option = json!({"name": "whole", "deviceClassName": "gpu.nvidia.com"});
    let other = json!({"name": "other", "deviceClassName": "nic.example.com"});
    let first = json!({"requests": [{"name": "gpu", "firstAvailable": [other, option]}]});
    for asks in [None, Some(json!({"nvidia.com/gpu": "1"}))] {
        let mut cluster = cluster(1, 1);
        share(&mut cluster, "a", "10Gi");
        cluster.settle(LONG);
        cluster.drop_pod("a", true);
        cluster.settle(SECOND);
        assert_eq!(cluster.holds().len(), 1, "kept warm");
        let mut more = json!({"status": {"conditions": [waits]}});
        let mut claims = vec!["first"];
        match asks {
            None => cluster.put_claim(
                json!({"metadata": {"name": "first", "namespace": "ml"}, "spec": {"devices": first}}),
            ),
            Some(limits) => {
                claims.clear();
                more["spec"] = json!({"containers": [{"name": "c", "resources": {"limits": limits}}]});
            }
        }
        cluster.put_pod("whole", &claims, more);
        cluster.settle(SECOND);
        assert_eq!(cluster.holds(), [""; 0], "{claims:?}");
    }
}

/// Holds of node-0 and node-1 in advance, one of them wanted by a pod that the scheduler has refused.
fn given_back(class: &Value, request: &Value, limits: &Value) -> Vec<String> {
    let mut rules = rules();
    rules.holds.ahead = 2;
    let mut cluster = Cluster::new(rules);
    cluster.put_class("ours.example.com", json!({}), class.clone());
    cluster.put_node("node-0", 1);
    let mut other = super::cluster::device("node-1", 0, true);
    other["attributes"]["productName"]["string"] = "NVIDIA L40S".into();
    cluster.put_node_object("node-1", json!({}));
    cluster.put_slice("node-1", vec![other]);
    cluster.settle(LONG);
    let before = cluster.holds();
    assert_eq!(before, ["hold.gpu-0.node-0", "hold.gpu-0.node-1"], "in advance");
    let requests = if request.is_null() { vec![] } else { vec![json!({"name": "gpu", "exactly": request})] };
    cluster.put_claim(json!({"metadata": {"name": "whole", "namespace": "ml"},
        "spec": {"devices": {"requests": requests}}}));
    let waits = json!({"type": "PodScheduled", "status": "False", "reason": "Unschedulable"});
    let containers = json!([{"name": "c", "resources": {"limits": limits}}]);
    let more = json!({"status": {"conditions": [waits]}, "spec": {"containers": containers}});
    cluster.put_pod("whole", &["whole"], more);
    cluster.settle(SECOND);
    let after = cluster.holds();
    before.into_iter().filter(|hold| !after.contains(hold)).collect()
}

#[test]
fn an_idle_gpu_is_given_back_if_the_class_and_the_request_choose_it() {
    let cel = |text: &str| json!([{"cel": {"expression": text}}]);
    let product = |name: &str| format!("device.attributes['gpu.nvidia.com'].productName == '{name}'");
    let gpu = |name: &str| cel(&format!("device.driver == 'gpu.nvidia.com' && {}", product(name)));
    let l40s = json!({"selectors": gpu("NVIDIA L40S"), "extendedResourceName": "example.com/l40s"});
    let ours = json!({"deviceClassName": "ours.example.com"});
    let (first, second) = (["hold.gpu-0.node-0"], ["hold.gpu-0.node-1"]);
    let none: [&str; 0] = [];
    assert_eq!(given_back(&l40s, &ours, &json!({})), second, "a class of the administrator's own");
    let other = json!({"selectors": cel("device.driver == 'nic.example.com'")});
    assert_eq!(given_back(&other, &ours, &json!({})), none, "no GPU at all");
    let mine = json!({"deviceClassName": "gpu.nvidia.com", "selectors": cel(&product("NVIDIA L40S"))});
    assert_eq!(given_back(&other, &mine, &json!({})), second, "the request's selectors");
    let two = json!({"deviceClassName": "gpu.nvidia.com", "count": 2});
    assert_eq!(given_back(&other, &two, &json!({})), [first, second].concat(), "as many as are asked for");
    let all = json!({"deviceClassName": "gpu.nvidia.com", "allocationMode": "All"});
    assert_eq!(given_back(&other, &all, &json!({})), [first, second].concat(), "all of them");
    let look = json!({"deviceClassName": "gpu.nvidia.com", "adminAccess": true});
    assert_eq!(given_back(&other, &look, &json!({})), none, "takes nothing away from others");
    let unknown = json!({"deviceClassName": "unknown.example.com"});
    assert_eq!(given_back(&other, &unknown, &json!({})), none, "a class that is not there");
    for name in ["example.com/l40s", "deviceclass.resource.kubernetes.io/ours.example.com"] {
        assert_eq!(given_back(&l40s, &Value::Null, &json!({name: "1"})), second, "{name}");
    }
    assert_eq!(
        given_back(&l40s, &Value::Null, &json!({"example.com/fpga": "1"})),
        none,
        "another's resource"
    );
}

#[test]
fn a_class_that_comes_later_gives_way_to_who_waits_for_it() {
    let mut rules = rules();
    rules.holds.ahead = 1;
    let mut cluster = Cluster::new(rules);
    cluster.put_node("node-0", 1);
    cluster.settle(LONG);
    assert_eq!(cluster.holds().len(), 1, "in advance");
    cluster.put_claim(json!({"metadata": {"name": "whole", "namespace": "ml"}, "spec": {"devices": {
        "requests": [{"name": "gpu", "exactly": {"deviceClassName": "late.example.com"}}]}}}));
    let waits = json!({"type": "PodScheduled", "status": "False", "reason": "Unschedulable"});
    cluster.put_pod("whole", &["whole"], json!({"status": {"conditions": [waits]}}));
    cluster.settle(LONG);
    assert_eq!(cluster.holds().len(), 1, "there is no such class");
    let selectors = json!([{"cel": {"expression": "device.driver == 'gpu.nvidia.com'"}}]);
    cluster.put_class("late.example.com", json!({}), json!({"selectors": selectors}));
    cluster.settle(SECOND);
    assert_eq!(cluster.holds(), [""; 0]);
}

#[test]
fn holds_in_advance_are_taken_and_kept() {
    let mut rules = rules();
    rules.holds.ahead = 2;
    rules.holds.keep_warm = SECOND;
    let mut cluster = Cluster::new(rules);
    cluster.put_node("cordoned", 4);
    cluster.put_node_object("cordoned", json!({"unschedulable": true}));
    cluster.put_node("node-0", 4);
    cluster.settle(LONG);
    assert_eq!(cluster.holds(), ["hold.gpu-0.node-0", "hold.gpu-1.node-0"]);
    share(&mut cluster, "a", "10Gi");
    cluster.settle(Duration::ZERO);
    assert!(cluster.place("a").is_some(), "a GPU was ready");
    cluster.settle(LONG);
    assert_eq!(cluster.holds().len(), 3, "two more are idle");
}

#[test]
fn none_is_kept_in_advance_on_a_node_that_takes_no_pods_any_more() {
    let mut rules = rules();
    rules.holds.ahead = 2;
    let mut cluster = Cluster::new(rules);
    cluster.put_node("node-0", 4);
    cluster.settle(LONG);
    assert_eq!(cluster.holds(), ["hold.gpu-0.node-0", "hold.gpu-1.node-0"]);
    cluster.put_node("node-1", 4);
    cluster.put_node_object("node-0", json!({"unschedulable": true}));
    cluster.settle(SECOND * 5);
    let both = ["hold.gpu-0.node-0", "hold.gpu-0.node-1", "hold.gpu-1.node-0", "hold.gpu-1.node-1"];
    assert_eq!(cluster.holds(), both, "others are ready at once, and these kept warm");
    cluster.settle(SECOND * 700);
    assert_eq!(cluster.holds(), ["hold.gpu-0.node-1", "hold.gpu-1.node-1"]);
}

#[test]
fn a_new_leader_reads_who_holds_what_and_writes_nothing() {
    let mut cluster = cluster(1, 2);
    share(&mut cluster, "a", "10Gi");
    share(&mut cluster, "b", "75Gi");
    cluster.settle(LONG);
    cluster.fail_over(rules());
    cluster.deliver(usize::MAX);
    cluster.round();
    assert_eq!(cluster.writes, []);
    share(&mut cluster, "c", "70Gi");
    cluster.settle(Duration::ZERO);
    assert_eq!(cluster.place("c"), cluster.place("a"), "there is room beside a, and the GPU is held");
    cluster.check();
}

#[test]
fn a_hold_that_was_never_allocated_is_deleted_by_the_next_leader() {
    let mut cluster = cluster(1, 1);
    cluster.hold(&GpuRef::new(&"node-0".into(), &"gpu-0".into()), None).unwrap();
    let at = (NS.to_owned(), "hold.gpu-0.node-0".to_owned());
    let mut claim = cluster.claims[&at].clone();
    claim.status = None;
    cluster.store(claim);
    cluster.fail_over(rules());
    cluster.settle(SECOND);
    assert_eq!(cluster.holds(), [""; 0]);
}

#[test]
fn a_hold_that_somebody_deletes_under_shares_is_taken_again() {
    let mut cluster = cluster(1, 1);
    share(&mut cluster, "a", "10Gi");
    cluster.settle(LONG);
    cluster.drop_claim(&(NS.to_owned(), "hold.gpu-0.node-0".to_owned()));
    cluster.settle(LONG);
    assert_eq!(cluster.holds().len(), 1);
    share(&mut cluster, "b", "10Gi");
    cluster.settle(LONG);
    assert!(cluster.place("b").is_some());
    cluster.check();
}

#[test]
fn an_allocation_that_the_scheduler_takes_back_is_planned_elsewhere_and_not_at_once_there_again() {
    let mut cluster = cluster(2, 1);
    share(&mut cluster, "a", "10Gi");
    cluster.settle(LONG);
    let (first, _) = cluster.place("a").unwrap();
    let mut claim = cluster.claim("a").clone();
    claim.status = None;
    cluster.store(claim);
    cluster.settle(Duration::ZERO);
    assert_eq!(cluster.place("a"), None, "the scheduler's books are left a moment");
    cluster.settle(5 * SECOND);
    let (second, _) = cluster.place("a").unwrap();
    assert_ne!(first, second);
    // And there as well: the first is open again after a while.
    let mut claim = cluster.claim("a").clone();
    claim.status = None;
    cluster.store(claim);
    cluster.settle(3 * SECOND);
    assert_eq!(cluster.place("a"), None, "both are left out");
    cluster.settle(10 * SECOND);
    assert!(cluster.place("a").is_some());
}

#[test]
fn an_allocation_that_nobody_uses_is_taken_back() {
    let mut cluster = cluster(1, 1);
    share(&mut cluster, "a", "10Gi");
    cluster.settle(LONG);
    cluster.drop_pod("a", false);
    cluster.settle(LONG);
    assert!(cluster.place("a").is_some(), "not at once");
    cluster.settle(LONG);
    assert_eq!(cluster.place("a"), None);
}

/// What comes of the write that takes it back, or that nothing does, is heard last.
#[test]
fn what_is_planned_and_given_up_while_an_allocation_is_taken_back_is_planned_again() {
    for lost in [false, true] {
        let mut cluster = cluster(1, 1);
        share(&mut cluster, "a", "10Gi");
        cluster.settle(LONG);
        cluster.put_node_object("node-0", json!({"unschedulable": true}));
        until(&mut cluster, |write| matches!(write, Write::Clear(..)));
        cluster.write_unheard(0, lost);
        cluster.put_node_object("node-0", json!({}));
        cluster.deliver(usize::MAX);
        cluster.now += LONG;
        cluster.round();
        assert_eq!(cluster.core.tracker.plans(), 1);
        cluster.drop_pod("a", false);
        cluster.deliver(usize::MAX);
        cluster.round();
        assert_eq!((cluster.core.tracker.plans(), cluster.writes.len()), (0, 0));
        cluster.hear(0);
        cluster.put_pod("a", &["a"], json!({}));
        cluster.settle(LONG);
        assert!(cluster.place("a").is_some(), "the answer was lost: {lost}");
        cluster.check();
    }
}

#[test]
fn a_pod_leaves_a_node_that_is_cordoned_or_gone_or_without_its_gpu_before_it_was_bound() {
    let trouble: [fn(&mut Cluster, &str); 4] = [
        |cluster, node| cluster.put_node_object(node, json!({"unschedulable": true})),
        |cluster, node| cluster.drop_node(node),
        |cluster, node| cluster.put_slice(node, vec![device(node, 7, true)]),
        |cluster, node| {
            let mut sick = device(node, 0, true);
            sick["taints"] = json!([{"key": "gpu.nvidia.com/xid", "effect": "NoExecute"}]);
            cluster.put_slice(node, vec![sick]);
        },
    ];
    for (nth, happens) in trouble.into_iter().enumerate() {
        let mut cluster = cluster(2, 1);
        share(&mut cluster, "a", "10Gi");
        cluster.settle(LONG);
        let (first, _) = cluster.place("a").unwrap();
        happens(&mut cluster, &first);
        cluster.settle(LONG);
        let (second, _) = cluster.place("a").unwrap_or_else(|| panic!("trouble {nth}"));
        assert_ne!(first, second, "trouble {nth}");
    }
}

#[test]
fn a_bound_pod_stays_whatever_becomes_of_its_node() {
    let mut cluster = cluster(2, 1);
    share(&mut cluster, "a", "10Gi");
    cluster.settle(LONG);
    let place = cluster.place("a");
    super::walk::bind(&mut cluster, "a");
    cluster.put_node_object(&place.as_ref().unwrap().0, json!({"unschedulable": true}));
    cluster.settle(Duration::from_secs(300));
    assert_eq!(cluster.place("a"), place);
}

#[test]
fn where_no_share_ids_are_kept_shares_do_not_name_the_device_in_its_own_pool() {
    let mut cluster = Cluster::new(rules());
    cluster.keeps = false;
    cluster.put_node("node-0", 1);
    share(&mut cluster, "a", "10Gi");
    share(&mut cluster, "b", "10Gi");
    cluster.settle(LONG);
    let allocation = cluster.claim("a").status.as_ref().unwrap().allocation.clone().unwrap();
    let result = allocation.devices.unwrap().results.unwrap().remove(0);
    assert_eq!((result.pool.as_str(), result.device.as_str()), ("node-0/shares", "gpu-0"));
    assert_eq!(cluster.place("b"), cluster.place("a"));
    cluster.fail_over(rules());
    share(&mut cluster, "c", "61Gi");
    cluster.settle(LONG);
    assert_eq!(cluster.place("c"), None, "both are counted");
    cluster.check();
}

#[test]
fn priority_goes_first_and_then_age() {
    let mut cluster = cluster(1, 1);
    for (name, priority, created) in [("old", 0, 1), ("young", 0, 2), ("urgent", 10, 3)] {
        cluster.put_share(name, json!({"memory": "60Gi"}), 1);
        let created = format!("2026-01-01T00:00:0{created}Z");
        cluster.put_pod(
            name,
            &[name],
            json!({"metadata": {"creationTimestamp": created}, "spec": {"priority": priority}}),
        );
    }
    cluster.settle(LONG);
    assert!(cluster.place("urgent").is_some());
    cluster.drop_pod("urgent", true);
    cluster.settle(LONG);
    assert!(cluster.place("old").is_some() && cluster.place("young").is_none());
}

/// A large share of this priority waits while small ones of priority 0 come and go.
fn is_not_passed_for_ever(priority: i32) {
    let mut cluster = cluster(1, 1);
    for nth in 0..4 {
        share(&mut cluster, &format!("s{nth}"), "20Gi");
    }
    cluster.settle(LONG);
    cluster.put_share("large", json!({"memory": "60Gi"}), 1);
    cluster.put_pod("large", &["large"], json!({"spec": {"priority": priority}}));
    // One small share ends each time, and another comes.
    for nth in 4..200 {
        cluster.drop_pod(&format!("s{}", nth - 4), true);
        share(&mut cluster, &format!("s{nth}"), "20Gi");
        cluster.settle(SECOND);
        if cluster.place("large").is_some() {
            cluster.check();
            return;
        }
    }
    panic!("the large share was passed for ever");
}

#[test]
fn a_large_share_is_not_passed_for_ever_by_small_ones() {
    is_not_passed_for_ever(0);
}

#[test]
fn a_large_share_is_not_passed_for_ever_by_less_urgent_ones() {
    is_not_passed_for_ever(10);
}

/// Shares of 20 GiB come, and end when six others have come, one each second, until `over`; true if it was.
fn small_ones_come_and_go(
    cluster: &mut Cluster,
    times: std::ops::Range<usize>,
    over: impl Fn(&Cluster) -> bool,
) -> bool {
    for nth in times {
        if let Some(gone) = nth.checked_sub(6) {
            cluster.drop_pod(&format!("small-{gone}"), true);
        }
        share(cluster, &format!("small-{nth}"), "20Gi");
        cluster.settle(SECOND);
        cluster.check();
        if over(cluster) {
            return true;
        }
    }
    false
}

#[test]
fn a_gang_is_not_passed_for_ever_by_small_ones() {
    let mut cluster = cluster(2, 1);
    small_ones_come_and_go(&mut cluster, 0..6, |_| false);
    let gang = json!({"metadata": {"annotations": {"tranche.dev/gang": "g", "tranche.dev/gang-size": "2"}}});
    for name in ["g0", "g1"] {
        cluster.put_share(name, json!({"memory": "60Gi"}), 1);
        cluster.put_pod(name, &[name], gang.clone());
    }
    let whole = |cluster: &Cluster| cluster.place("g0").is_some() && cluster.place("g1").is_some();
    assert!(small_ones_come_and_go(&mut cluster, 6..200, whole), "the gang was passed for ever");
}

/// Whatever waits without hope is passed by all others: nothing is kept free for it.
#[test]
fn what_can_never_be_placed_holds_nobody_up() {
    let gang = json!({"metadata": {"annotations": {"tranche.dev/gang": "g", "tranche.dev/gang-size": "3"}}});
    let much = |cpu: &str| json!({"spec": {"containers": [{"name": "main", "resources": {"requests": {"cpu": cpu}}}]}});
    for (hopeless, more) in [(vec!["a", "b", "c"], gang), (vec!["a"], much("33")), (vec!["a"], much("32"))] {
        let mut cluster = cluster(2, 1);
        // What others keep of each node does not end with the shares.
        for nth in 0..2 {
            let mut agent = much("1");
            agent["spec"]["nodeName"] = json!(format!("node-{nth}"));
            cluster.put_pod(&format!("agent-{nth}"), &[], agent);
        }
        for name in &hopeless {
            cluster.put_share(name, json!({"memory": "60Gi"}), 1);
            cluster.put_pod(name, &[name], more.clone());
        }
        assert!(!small_ones_come_and_go(&mut cluster, 0..100, |_| false));
        assert!(cluster.place("small-99").is_some(), "{more}");
        assert!(hopeless.iter().all(|name| cluster.place(name).is_none()));
    }
}

/// A pod to which the webhook promised a claim.
pub(super) fn put_kai(cluster: &mut Cluster) {
    let share = json!({"share": {"apiVersion": "tranche.dev/v1alpha1", "kind": "GpuShare", "memory": "2000Mi"}, "count": 1});
    let more = json!({
        "metadata": {"annotations": {"tranche.dev/gpu-share": share.to_string()}},
        "spec": {"resourceClaims": [{"name": "gpu-share", "resourceClaimName": "kai-gpu-share"}]}});
    cluster.put_pod("kai", &[], more);
}

#[test]
fn a_promised_claim_is_created_once_it_has_its_place_and_is_allocated() {
    let mut cluster = cluster(1, 1);
    put_kai(&mut cluster);
    cluster.settle(MOMENT);
    assert!(
        !cluster.claims.contains_key(&("ml".to_owned(), "kai-gpu-share".to_owned())),
        "not before it has a GPU"
    );
    cluster.settle(LONG);
    assert!(cluster.place("kai-gpu-share").is_some());
    let meta = cluster.claim("kai-gpu-share").metadata.clone();
    let owner = &meta.owner_references.unwrap()[0];
    assert_eq!((owner.kind.as_str(), owner.name.as_str(), owner.controller), ("Pod", "kai", Some(true)));
    assert_eq!(meta.finalizers.unwrap().len(), 1);
    cluster.fail_over(rules());
    cluster.settle(LONG);
    share_fits(&mut cluster, "beside", "70Gi");
}

#[test]
fn a_promised_claim_that_somebody_deletes_is_created_again() {
    let mut cluster = cluster(1, 1);
    put_kai(&mut cluster);
    cluster.settle(LONG);
    let first = cluster.claim("kai-gpu-share").metadata.uid.clone();
    cluster.drop_claim(&("ml".to_owned(), "kai-gpu-share".to_owned()));
    cluster.settle(LONG);
    assert!(cluster.place("kai-gpu-share").is_some());
    assert_ne!(cluster.claim("kai-gpu-share").metadata.uid, first);
    cluster.check();
}

/// What is heard late of the first creation says nothing of the second.
#[test]
fn a_promised_claim_that_is_deleted_before_its_creation_is_heard_of_is_created_again() {
    let mut cluster = cluster(1, 1);
    put_kai(&mut cluster);
    let creates = |write: &Write| matches!(write, Write::Create(..));
    until(&mut cluster, creates);
    let at = cluster.writes.iter().position(creates).unwrap();
    cluster.write_unheard(at, false);
    cluster.deliver(usize::MAX);
    cluster.drop_claim(&("ml".to_owned(), "kai-gpu-share".to_owned()));
    until(&mut cluster, creates);
    let at = cluster.writes.iter().position(creates).unwrap();
    cluster.writes.swap(0, at);
    cluster.fail(Failure::Silent("no answer".to_owned()));
    cluster.hear(0);
    cluster.settle(LONG);
    assert!(cluster.place("kai-gpu-share").is_some());
    cluster.check();
}

/// There are two of one name as long as nobody has told that the first is gone.
#[test]
fn a_planned_claim_makes_way_for_one_of_its_name_that_was_known_before() {
    let mut cluster = cluster(1, 1);
    put_kai(&mut cluster);
    cluster.deliver(usize::MAX);
    let claim = |uid: &str| -> Box<ResourceClaim> {
        let meta = json!({"name": "kai-gpu-share", "namespace": "ml", "uid": uid, "resourceVersion": "5"});
        Box::new(object(json!({"metadata": meta, "spec": {}})))
    };
    let tell = |cluster: &mut Cluster, event| cluster.core.apply(Change::Claim(event), cluster.now);
    let known = |cluster: &Cluster| -> Vec<bool> {
        let named = cluster.core.view.claims().filter(|claim| claim.name() == "kai-gpu-share");
        named.map(|claim| claim.is_planned()).collect()
    };
    tell(&mut cluster, WatchEvent::Stored(claim("first")));
    tell(&mut cluster, WatchEvent::Stored(claim("second")));
    tell(&mut cluster, WatchEvent::Deleted(Box::new(claim("second").metadata)));
    assert_eq!(known(&cluster), [false, true]);
    tell(&mut cluster, WatchEvent::Stored(claim("first")));
    assert_eq!(known(&cluster), [false]);
    assert!(!cluster.core.view.claim_named("ml", "kai-gpu-share").unwrap().is_planned());
    tell(&mut cluster, WatchEvent::Deleted(Box::new(claim("first").metadata)));
    cluster.settle(LONG);
    assert!(cluster.place("kai-gpu-share").is_some());
}

#[test]
fn a_promised_claim_is_placed_though_its_plan_was_given_up_and_its_allocation_failed_while_it_was_created() {
    let mut cluster = cluster(2, 1);
    put_kai(&mut cluster);
    until(&mut cluster, |write| matches!(write, Write::Create(..)));
    // Whoever names both GPUs takes the one that was planned.
    for node in ["node-0", "node-1"] {
        whole_claim_takes(&mut cluster, &format!("whole-{node}"), node, "gpu-0");
    }
    cluster.deliver(usize::MAX);
    cluster.round();
    assert_eq!(cluster.core.tracker.plans(), 0);
    cluster.create_without_allocation();
    for node in ["node-0", "node-1"] {
        cluster.drop_claim(&("ml".to_owned(), format!("whole-{node}")));
    }
    cluster.settle(LONG);
    assert!(cluster.place("kai-gpu-share").is_some());
    cluster.check();
}

/// A pod that was created in this second.
fn share_made_at(cluster: &mut Cluster, name: &str, second: u32) {
    cluster.put_share(name, json!({"memory": "10Gi"}), 1);
    let created = format!("2026-01-01T00:00:{second:02}Z");
    cluster.put_pod(name, &[name], json!({"metadata": {"creationTimestamp": created}}));
}

#[test]
fn a_pod_whose_claim_is_deleted_does_not_wait_for_room_any_more() {
    let mut cluster = cluster(1, 1);
    share(&mut cluster, "most", "75Gi");
    share_made_at(&mut cluster, "waits", 0);
    cluster.settle(LONG);
    assert_eq!(cluster.core.waiting().values().sum::<usize>(), 1);
    let named = |cluster: &Cluster| {
        let pods = cluster.core.longest_waiting().into_iter();
        pods.map(|(labels, _)| (labels.namespace, labels.pod, labels.reason)).collect::<Vec<_>>()
    };
    assert_eq!(named(&cluster), [("ml".to_owned(), "waits".to_owned(), "memory")]);
    cluster.drop_claim(&("ml".to_owned(), "waits".to_owned()));
    cluster.settle(SECOND);
    assert_eq!(cluster.core.waiting().values().sum::<usize>(), 0);
    assert_eq!(named(&cluster), []);
}

#[test]
fn of_many_pods_that_wait_those_are_named_that_wait_the_longest() {
    let mut cluster = cluster(1, 1);
    share(&mut cluster, "most", "75Gi");
    for nth in (0..60).rev() {
        share_made_at(&mut cluster, &format!("waits-{nth:02}"), nth);
    }
    cluster.settle(LONG);
    let named: Vec<_> = cluster.core.longest_waiting().into_iter().map(|(labels, _)| labels.pod).collect();
    let expected: Vec<_> = (0..50).map(|nth| format!("waits-{nth:02}")).collect();
    assert_eq!(named, expected);
}

fn share_fits(cluster: &mut Cluster, name: &str, memory: &str) {
    share(cluster, name, memory);
    cluster.settle(LONG);
    assert!(cluster.place(name).is_some());
    cluster.check();
}

#[test]
fn a_gang_is_placed_together_or_not_at_all() {
    let mut cluster = cluster(2, 1);
    let gang = json!({"metadata": {"annotations": {"tranche.dev/gang": "g", "tranche.dev/gang-size": "3"}}});
    for nth in 0..3 {
        let name = format!("g{nth}");
        cluster.put_share(&name, json!({"memory": "50Gi"}), 1);
        cluster.put_pod(&name, &[&name], gang.clone());
    }
    cluster.settle(LONG);
    assert!((0..3).all(|nth| cluster.place(&format!("g{nth}")).is_none()), "two would fit, three do not");
    for name in ["g0", "g1", "g2"] {
        let waiting = cluster.claim(name).metadata.annotations.clone().unwrap_or_default();
        let words = waiting.get("tranche.dev/waiting").map(String::as_str).unwrap_or_default();
        assert!(words.contains("the gang's 3 pods do not fit together"), "{name}: {words}");
    }
    cluster.put_node("node-2", 1);
    cluster.settle(LONG);
    assert!((0..3).all(|nth| cluster.place(&format!("g{nth}")).is_some()));
    cluster.check();
}

/// However the group is named: by Volcano's, KAI's or Kubernetes' own means. Nobody says how many there are.
#[test]
fn each_way_to_name_a_group_makes_a_gang() {
    for more in [
        json!({"metadata": {"annotations": {"scheduling.k8s.io/group-name": "g"}}}),
        json!({"metadata": {"annotations": {"pod-group-name": "g"}}}),
        json!({"metadata": {"labels": {"scheduling.volcano.sh/group-name": "g"}}}),
        json!({"spec": {"schedulingGroup": {"podGroupName": "g"}}}),
    ] {
        let mut cluster = cluster(2, 1);
        for nth in 0..3 {
            let name = format!("g{nth}");
            cluster.put_share(&name, json!({"memory": "50Gi"}), 1);
            cluster.put_pod(&name, &[&name], more.clone());
        }
        cluster.settle(LONG);
        assert!(
            (0..3).all(|nth| cluster.place(&format!("g{nth}")).is_none()),
            "{more}: two would fit, three do not"
        );
        cluster.put_node("node-2", 1);
        cluster.settle(LONG);
        assert!((0..3).all(|nth| cluster.place(&format!("g{nth}")).is_some()), "{more}");
    }
}

#[test]
fn a_launcher_without_a_share_is_no_part_of_its_gang() {
    let mut cluster = cluster(2, 1);
    let gang = json!({"metadata": {"annotations": {"tranche.dev/gang": "g", "tranche.dev/gang-size": "3"}}});
    let mut bound = gang.clone();
    bound["spec"] = json!({"nodeName": "node-0"});
    cluster.put_pod("launcher", &[], bound);
    for nth in 0..3 {
        let name = format!("g{nth}");
        cluster.put_share(&name, json!({"memory": "50Gi"}), 1);
        cluster.put_pod(&name, &[&name], gang.clone());
        cluster.settle(LONG);
        let placed = (0..=nth).filter(|nth| cluster.place(&format!("g{nth}")).is_some()).count();
        assert_eq!(placed, 0, "two would fit, three do not");
    }
    cluster.put_node("node-2", 1);
    cluster.settle(LONG);
    assert!((0..3).all(|nth| cluster.place(&format!("g{nth}")).is_some()));
    cluster.check();
}

#[test]
fn processes_are_placed_where_there_are_client_slots_for_them() {
    let mut cluster = cluster(1, 2);
    for nth in 0..4 {
        let name = format!("p{nth}");
        cluster.put_share(&name, json!({"memory": "1Gi", "maxProcesses": 24}), 1);
        cluster.put_pod(&name, &[&name], json!({}));
    }
    cluster.settle(LONG);
    let mut gpus: Vec<String> = (0..4).flat_map(|nth| cluster.place(&format!("p{nth}")).unwrap().1).collect();
    gpus.sort();
    assert_eq!(gpus, ["gpu-0", "gpu-0", "gpu-1", "gpu-1"], "eight blocks of sixteen each");
    cluster.check();
    cluster.put_share("more", json!({"memory": "1Gi", "maxProcesses": 4}), 1);
    cluster.put_pod("more", &["more"], json!({}));
    cluster.put_share("most", json!({"memory": "1Gi", "maxProcesses": 60}), 1);
    cluster.put_pod("most", &["most"], json!({}));
    cluster.settle(LONG);
    for (name, words) in
        [("more", "needs 2 blocks of client slots"), ("most", "fewer client slots than maxProcesses")]
    {
        let waiting = cluster.claim(name).metadata.annotations.clone().unwrap_or_default();
        assert!(waiting["tranche.dev/waiting"].contains(words), "{name}: {waiting:?}");
    }
}

#[test]
fn a_claim_with_room_goes_before_the_words_of_many_without() {
    let mut cluster = cluster(1, 1);
    share(&mut cluster, "held", "1Gi");
    cluster.settle(LONG);
    for nth in 0..100 {
        share(&mut cluster, &format!("large-{nth}"), "90Gi");
    }
    share(&mut cluster, "small", "1Gi");
    cluster.deliver(usize::MAX);
    cluster.round();
    let is_mark = |write: &Write| matches!(write, Write::Mark(..));
    assert!(
        cluster.writes.iter().any(|write| matches!(write, Write::Allocate { .. })),
        "{:?}",
        cluster.writes
    );
    assert!(cluster.writes.iter().filter(|write| is_mark(write)).count() < 20);
    cluster.settle(LONG);
    assert!(cluster.place("small").is_some());
    for nth in 0..100 {
        let annotations = cluster.claim(&format!("large-{nth}")).metadata.annotations.clone();
        assert!(annotations.is_some_and(|all| all.contains_key("tranche.dev/waiting")), "{nth}");
    }
}

#[test]
fn a_gang_that_is_not_all_there_waits() {
    let mut cluster = cluster(1, 1);
    cluster.put_share("g0", json!({"memory": "10Gi"}), 1);
    let gang = json!({"metadata": {"annotations": {"tranche.dev/gang": "g", "tranche.dev/gang-size": "2"}}});
    cluster.put_pod("g0", &["g0"], gang.clone());
    cluster.settle(LONG);
    assert_eq!(cluster.place("g0"), None);
    cluster.put_share("g1", json!({"memory": "10Gi"}), 1);
    cluster.put_pod("g1", &["g1"], gang);
    cluster.settle(LONG);
    assert!(cluster.place("g0").is_some() && cluster.place("g1").is_some());
}

#[test]
fn shares_of_several_gpus_do_not_meet_shares_of_one() {
    let mut cluster = cluster(1, 4);
    share(&mut cluster, "one", "10Gi");
    cluster.settle(LONG);
    for name in ["pair", "same"] {
        cluster.put_share(name, json!({"memory": "10Gi"}), 2);
        cluster.put_pod(name, &[name], json!({}));
        cluster.settle(LONG);
    }
    share(&mut cluster, "other", "10Gi");
    cluster.settle(LONG);
    let (one, pair) = (cluster.place("one").unwrap(), cluster.place("pair").unwrap());
    assert!(!pair.1.contains(&one.1[0]), "{one:?} {pair:?}");
    assert_eq!(cluster.place("same"), Some(pair), "in the same company");
    assert_eq!(cluster.place("other"), Some(one));
    // Once the pair has ended, its GPUs are anyone's.
    cluster.drop_pod("pair", true);
    cluster.drop_pod("same", true);
    cluster.put_share("three", json!({"memory": "75Gi"}), 3);
    cluster.put_pod("three", &["three"], json!({}));
    cluster.settle(LONG);
    assert!(cluster.place("three").is_some());
    cluster.check();
}

#[test]
fn a_pod_with_shares_of_several_gpus_and_of_one_has_them_apart() {
    let mut cluster = cluster(1, 3);
    cluster.put_share("two", json!({"memory": "10Gi"}), 2);
    cluster.put_share("one", json!({"fraction": "0.5"}), 1);
    cluster.put_pod("both", &["two", "one"], json!({}));
    cluster.settle(LONG);
    let (two, one) = (cluster.place("two").unwrap().1, cluster.place("one").unwrap().1);
    assert!(!two.contains(&one[0]), "{two:?} {one:?}");
}

#[test]
fn two_pods_of_one_claim_go_to_one_node() {
    let mut cluster = cluster(2, 1);
    cluster.put_share("a", json!({"memory": "10Gi"}), 1);
    cluster.put_pod("one", &["a"], json!({}));
    cluster.put_pod("two", &["a"], json!({}));
    cluster.settle(LONG);
    assert!(cluster.place("a").is_some());
    assert!(cluster.core.queue.is_empty());
}

#[test]
fn somebody_who_names_a_gpu_of_ours_is_noticed_and_what_does_not_run_yet_moves() {
    let mut cluster = cluster(2, 1);
    share(&mut cluster, "runs", "10Gi");
    share(&mut cluster, "waits", "10Gi");
    cluster.settle(LONG);
    let (node, _) = cluster.place("runs").unwrap();
    super::walk::bind(&mut cluster, "runs");
    whole_claim_takes(&mut cluster, "whole", &node, "gpu-0");
    cluster.settle(LONG);
    assert_eq!(cluster.core.holds.gpus.contested().iter().collect::<Vec<_>>(), [&gpu(&node, "gpu-0")]);
    assert_eq!(cluster.core.overcommitted(), 1, "what the gauge shows");
    assert_ne!(cluster.place("waits").unwrap().0, node);
    assert_eq!(cluster.place("runs").unwrap().0, node, "nobody takes a running pod's GPU");
}

#[test]
fn a_forged_grant_counts_as_somebody_else() {
    // By parameters of the claim's own, or in a claim that is not of our class.
    for source in ["FromClaim", "FromClass"] {
        let mut cluster = cluster(1, 1);
        let share = json!({"apiVersion": "tranche.dev/v1alpha1", "kind": "ShareGrant", "devices": [
            {"device": "gpu-0", "gpu": "GPU-node-0-0", "memory": "1Gi", "slots": 1, "isolation": "mps"}]});
        cluster.put_whole("forged");
        let mut claim = cluster.claim("forged").clone();
        let mut made = crate::controller::grant::hold(&"node-0".into(), "gpu", "gpu-0", None);
        made.devices.as_mut().unwrap().config = Some(vec![object(json!({"source": source,
            "requests": ["gpu"], "opaque": {"driver": "gpu.nvidia.com", "parameters": share}}))]);
        claim.status.get_or_insert_default().allocation = Some(made);
        cluster.store(claim);
        share_waits(&mut cluster);
    }
}

fn share_waits(cluster: &mut Cluster) {
    share(cluster, "a", "10Gi");
    cluster.settle(LONG);
    assert_eq!(cluster.place("a"), None);
    assert_eq!(cluster.holds(), [""; 0]);
}

#[test]
fn a_gpu_that_must_never_be_held_is_not() {
    for never in ["node-0", "h100", "GPU-node-0-0"] {
        let mut cluster = Cluster::new(Rules { never_hold: vec![never.to_owned()], ..rules() });
        cluster.put_node("node-0", 1);
        share_waits(&mut cluster);
    }
}

#[test]
fn a_gpu_that_was_held_when_it_became_forbidden_gets_no_more_shares_and_goes_back_after_its_last() {
    let mut cluster = cluster(1, 1);
    share_fits(&mut cluster, "early", "10Gi");
    cluster.fail_over(Rules { never_hold: vec!["node-0".to_owned()], ..rules() });
    share(&mut cluster, "late", "10Gi");
    cluster.settle(LONG);
    assert!(cluster.place("early").is_some() && cluster.place("late").is_none());
    cluster.drop_pod("early", true);
    cluster.settle(Duration::from_secs(700));
    assert_eq!((cluster.place("late"), cluster.holds()), (None, vec![]));
    cluster.check();
}

#[test]
fn gpus_of_the_administrators_choice_are_held_for_good() {
    let always_hold = vec!["GPU-node-0-0".to_owned(), "node-1".to_owned()];
    let mut cluster =
        Cluster::new(Rules { always_hold, never_hold: vec!["GPU-node-1-0".to_owned()], ..rules() });
    // One of them is somebody else's at first.
    cluster.put_node("node-0", 2);
    whole_claim_takes(&mut cluster, "whole", "node-0", "gpu-0");
    cluster.put_node("node-1", 2);
    cluster.settle(LONG);
    assert_eq!(cluster.holds(), ["hold.gpu-1.node-1"]);
    cluster.drop_claim(&("ml".to_owned(), "whole".to_owned()));
    cluster.settle(Duration::from_secs(700));
    assert_eq!(cluster.holds(), ["hold.gpu-0.node-0", "hold.gpu-1.node-1"]);
    // Not after the last share, and not for who wants it whole.
    share_fits(&mut cluster, "a", "70Gi");
    cluster.drop_pod("a", true);
    let waits = json!({"status": {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]}});
    cluster.put_whole("wants");
    cluster.put_pod("wants", &["wants"], waits);
    cluster.settle(Duration::from_secs(700));
    assert_eq!(cluster.holds(), ["hold.gpu-0.node-0", "hold.gpu-1.node-1"]);
    cluster.check();
}

/// The hold has settled, the look has ended, and what comes next is to be written.
fn to_the_allocation(cluster: &mut Cluster) {
    cluster.now += SECOND;
    cluster.round();
    cluster.write(false);
    cluster.deliver(1);
    cluster.round();
}

#[test]
fn a_claim_that_changes_under_the_writer_is_tried_in_its_new_version() {
    let mut cluster = cluster(1, 1);
    share(&mut cluster, "a", "10Gi");
    cluster.settle(MOMENT);
    to_the_allocation(&mut cluster);
    assert!(matches!(cluster.writes[0], Write::Allocate { .. }));
    let mut claim = cluster.claim("a").clone();
    claim.metadata.labels = Some([("touched".to_owned(), "yes".to_owned())].into());
    cluster.store(claim);
    cluster.write(false);
    assert_eq!(cluster.place("a"), None);
    cluster.settle(SECOND);
    assert!(cluster.place("a").is_some());
}

/// An API server's own conflict brings a newer version; somebody else's admission may answer with one for nothing.
#[test]
fn a_claim_that_meets_a_conflict_and_does_not_change_is_tried_again() {
    let mut cluster = cluster(1, 1);
    share(&mut cluster, "a", "10Gi");
    cluster.settle(MOMENT);
    to_the_allocation(&mut cluster);
    for _ in 0..3 {
        assert!(matches!(cluster.writes[0], Write::Allocate { .. }));
        cluster.fail(Failure::Conflict);
        let next = cluster.round();
        assert_eq!(
            (cluster.writes.len(), cluster.place("a")),
            (0, None),
            "a newer version may be on its way"
        );
        cluster.now = next.unwrap();
        cluster.round();
    }
    cluster.settle(MOMENT);
    assert!(cluster.place("a").is_some());
    cluster.check();
}

#[test]
fn an_answer_that_was_lost_does_no_harm() {
    let mut cluster = cluster(1, 1);
    share(&mut cluster, "a", "10Gi");
    cluster.settle(MOMENT);
    to_the_allocation(&mut cluster);
    cluster.write(true);
    assert!(cluster.place("a").is_some());
    cluster.settle(LONG);
    share(&mut cluster, "b", "71Gi");
    cluster.settle(LONG);
    assert_eq!(cluster.place("b"), None, "a counts once, and it counts");
    cluster.check();
}

/// While the API server is away for a moment the lease cannot be renewed, and nothing is written; then it can again.
#[test]
fn what_was_not_sent_while_the_lease_was_in_doubt_is_sent_later() {
    let mut cluster = cluster(1, 1);
    share(&mut cluster, "a", "10Gi");
    cluster.settle(MOMENT);
    to_the_allocation(&mut cluster);
    assert!(matches!(cluster.writes[0], Write::Allocate { .. }));
    cluster.fail(Failure::NotLeading);
    assert_eq!(cluster.place("a"), None);
    cluster.settle(LONG);
    assert!(cluster.place("a").is_some(), "nothing but time has passed");
    cluster.check();
}

#[test]
fn a_list_that_is_older_than_our_own_writes_takes_nothing_back() {
    let mut cluster = cluster(1, 2);
    share(&mut cluster, "first", "30Gi");
    cluster.settle(LONG);
    // The watch is silent while its list is under way: only answers tell of what is written now.
    let list = cluster.claims.values().cloned().map(|claim| WatchEvent::Listed(Box::new(claim)));
    let list: Vec<_> = std::iter::once(WatchEvent::Anew).chain(list).collect();
    list.into_iter().for_each(|seen| cluster.core.apply(Change::Claim(seen), cluster.now));
    for name in ["made", "more"] {
        let share = json!({"share": {"apiVersion": "tranche.dev/v1alpha1", "kind": "GpuShare", "memory": "30Gi"}, "count": 1});
        let more = json!({"metadata": {"annotations": {"tranche.dev/gpu-share": share.to_string()}},
            "spec": {"resourceClaims": [{"name": "gpu-share", "resourceClaimName": name}]}});
        cluster.put_pod(name, &[], more);
        cluster.deliver(1);
        cluster.round();
        while !cluster.writes.is_empty() {
            cluster.write(false);
        }
        cluster.feed.clear();
    }
    assert!(cluster.place("made").is_some(), "beside the first");
    assert_eq!(cluster.holds().len(), 2, "for the second of them");
    cluster.core.apply(Change::Claim(WatchEvent::Complete), cluster.now);
    assert!(cluster.core.view.claim_named("ml", "made").is_some());
    assert_eq!(cluster.core.view.holds().count(), 2);
    share(&mut cluster, "b", "60Gi");
    cluster.settle(LONG);
    assert!(cluster.place("more").is_some());
    assert_eq!(cluster.place("b"), None, "no GPU has room for it");
    cluster.check();
}

#[test]
fn a_claim_that_cannot_be_read_keeps_what_it_names_and_nothing_else() {
    let mut cluster = cluster(1, 2);
    cluster.put_whole("strange");
    cluster.settle(SECOND);
    let unreadable = |cluster: &mut Cluster, rest: ResourceClaim| {
        let problem = "a field of a later release".to_owned();
        let seen = WatchEvent::Unreadable { rest: Box::new(rest), listed: false, problem };
        cluster.core.apply(Change::Claim(seen), cluster.now);
    };
    let mut rest = cluster.claim("strange").clone();
    rest.spec = None;
    unreadable(&mut cluster, rest.clone());
    // Nothing of its own is known of the other one, but the GPU that it names.
    let allocation = json!({"devices": {"results": [
        {"driver": "gpu.nvidia.com", "pool": "node-0", "device": "gpu-0", "request": "r"}]}});
    let other = json!({"metadata": {"namespace": "ml", "name": "other", "uid": "other", "resourceVersion": "1"},
        "status": {"allocation": allocation}});
    unreadable(&mut cluster, serde_json::from_value(other.clone()).unwrap());
    assert_eq!(cluster.core.view.unreadables(), 2);
    share(&mut cluster, "a", "10Gi");
    cluster.settle(LONG);
    let (_, devices) = cluster.place("a").expect("one GPU is left");
    assert_eq!(devices, ["gpu-1"]);
    share(&mut cluster, "b", "75Gi");
    cluster.settle(LONG);
    assert_eq!(cluster.place("b"), None, "the other GPU is named");
    let metadata = serde_json::from_value(other["metadata"].clone()).unwrap();
    cluster.core.apply(Change::Claim(WatchEvent::Deleted(metadata)), cluster.now);
    cluster.settle(LONG);
    assert!(cluster.place("b").is_some());
    assert_eq!(cluster.core.view.unreadables(), 1);
}

/// Who goes by what is consumed alone sees that nothing is left of a GPU that is held.
#[test]
fn a_hold_names_all_that_the_scheduler_gives_parts_of() {
    for keeps in [true, false] {
        let mut cluster = Cluster::new(rules());
        cluster.keeps = keeps;
        cluster.put_node("node-0", 1);
        share(&mut cluster, "a", "10Gi");
        cluster.settle(LONG);
        assert!(cluster.place("a").is_some());
        let device = &cluster.slices["node-0"].spec.devices.as_ref().unwrap()[0];
        let published =
            ["memory", "shares"].map(|name| device.capacity.as_ref().unwrap()[name].value.clone());
        let hold = &cluster.claims[&(NS.to_owned(), "hold.gpu-0.node-0".to_owned())];
        let allocation = hold.status.as_ref().and_then(|status| status.allocation.as_ref()).unwrap();
        let result = &allocation.devices.as_ref().unwrap().results.as_ref().unwrap()[0];
        assert_eq!(result.share_id, None, "it has the device, and no part of it");
        let consumed = result.consumed_capacity.clone();
        let all = ["memory", "shares"].map(str::to_owned).into_iter().zip(published).collect();
        assert_eq!(consumed, keeps.then_some(all));
        cluster.check();
    }
}
