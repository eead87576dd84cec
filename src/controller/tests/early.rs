//! Beside schedulers that group pods: promised claims that are there before they have a place, and GPUs that KAI's binder
//! has not written yet.

use serde_json::{Value, json};

use super::cluster::{Cluster, object};
use super::scenes::{LONG, MOMENT, SECOND, cluster, share};
use crate::cluster::feed::{Change, WatchEvent};
use crate::cluster::pod_groups::PodGroupApi;
use crate::controller::write::Failure;

const CLAIM: &str = "kai-gpu-share";

/// A pod as the webhook leaves it.
fn put(cluster: &mut Cluster, scheduler: &str, more: Value) {
    let share = json!({"share": {"apiVersion": "tranche.dev/v1alpha1", "kind": "GpuShare", "fraction": "0.5"}, "count": 1});
    let mut pod = json!({
        "metadata": {"annotations": {"tranche.dev/gpu-share": share.to_string()},
            "labels": {"kai.scheduler/queue": "team-a"}},
        "spec": {"schedulerName": scheduler,
            "resourceClaims": [{"name": "gpu-share", "resourceClaimName": CLAIM}]}});
    super::cluster::merge(&mut pod, &more);
    cluster.put_pod("kai", &[], pod);
}

fn exists(cluster: &Cluster) -> bool {
    cluster.claims.contains_key(&("ml".to_owned(), CLAIM.to_owned()))
}

fn in_group() -> Value {
    json!({"metadata": {"annotations": {"pod-group-name": "g"}}})
}

#[test]
fn a_scheduler_that_groups_pods_finds_the_claim_before_it_has_a_place_and_its_queue_on_it() {
    for scheduler in ["kai-scheduler", "volcano"] {
        let mut cluster = cluster(1, 1);
        put(&mut cluster, scheduler, json!({}));
        cluster.settle(MOMENT);
        assert!(exists(&cluster), "{scheduler}");
        assert_eq!(cluster.place(CLAIM), None);
        let meta = &cluster.claim(CLAIM).metadata;
        let queue = meta.labels.as_ref().and_then(|labels| labels.get("kai.scheduler/queue"));
        assert_eq!(queue.map(String::as_str), Some("team-a"));
        assert_eq!(meta.owner_references.as_ref().map(Vec::len), Some(1), "it goes with the pod");
        // Nothing is placed before its PodGroup says how many start together.
        cluster.settle(LONG);
        assert_eq!(cluster.place(CLAIM), None);
        cluster.put_group(PodGroupApi::Kai, "g", json!({"spec": {"minMember": 1}}));
        let uid = cluster.claim(CLAIM).metadata.uid.clone();
        let mut pod = cluster.pods[&("ml".to_owned(), "kai".to_owned())].clone();
        let annotations = pod.metadata.annotations.get_or_insert_default();
        annotations.insert("pod-group-name".to_owned(), "g".to_owned());
        cluster.store_pod(pod);
        cluster.settle(LONG);
        assert!(cluster.place(CLAIM).is_some(), "{scheduler}");
        assert_eq!(cluster.claim(CLAIM).metadata.uid, uid, "made once");
        cluster.check();
    }
}

#[test]
fn kube_scheduler_finds_the_claim_with_its_place() {
    let mut cluster = cluster(1, 1);
    share(&mut cluster, "large", "79Gi");
    cluster.settle(LONG);
    put(&mut cluster, "default-scheduler", json!({}));
    cluster.settle(LONG);
    assert!(!exists(&cluster), "it would try the pod in vain");
    cluster.drop_pod("large", true);
    cluster.settle(LONG);
    assert!(cluster.place(CLAIM).is_some());
    assert_eq!(cluster.claim(CLAIM).metadata.labels, None, "KAI does not charge it");
}

#[test]
fn a_gated_pod_has_no_claim_yet() {
    let mut cluster = cluster(1, 1);
    put(&mut cluster, "volcano", json!({"spec": {"schedulingGates": [{"name": "example.com/wait"}]}}));
    cluster.settle(LONG);
    assert!(!exists(&cluster));
}

/// Whatever became of the first try, there is one claim at last, and it is placed.
#[test]
fn a_creation_that_failed_is_tried_again() {
    for failure in [
        Failure::Refused("exceeded quota: shares".to_owned()),
        Failure::Silent("no answer".to_owned()),
        Failure::Busy("too many requests".to_owned()),
        Failure::NotLeading,
    ] {
        let mut cluster = cluster(1, 1);
        cluster.put_group(PodGroupApi::Kai, "g", json!({"spec": {"minMember": 1}}));
        cluster.settle(MOMENT);
        put(&mut cluster, "kai-scheduler", in_group());
        super::told::until(&mut cluster, |write| {
            matches!(write, crate::controller::write::Write::Create(..))
        });
        let is_create = |write: &crate::controller::write::Write| {
            matches!(write, crate::controller::write::Write::Create(_, _, None))
        };
        let at = cluster.writes.iter().position(is_create).expect("created at once, without an allocation");
        cluster.writes.swap(0, at);
        cluster.fail(failure.clone());
        let (notes, _) = cluster.core.recorder.take();
        let told = notes.iter().any(|note| note.message.contains("exceeded quota"));
        assert_eq!(told, matches!(failure, Failure::Refused(_)), "{notes:?}");
        cluster.settle(SECOND);
        assert!(!exists(&cluster), "{failure:?}: not at once again");
        cluster.settle(LONG);
        cluster.settle(LONG);
        assert!(cluster.place(CLAIM).is_some(), "{failure:?}");
        cluster.check();
    }
}

/// KAI's scheduler has decided to give a GPU to the claim of a pod.
fn bind_request(cluster: &mut Cluster, pod: &str, phase: &str, device: &str) {
    let result = json!({"request": "gpu", "driver": "gpu.nvidia.com", "pool": "node-0", "device": device});
    let request = object(json!({"metadata": {"namespace": "ml", "name": format!("{pod}-1")},
        "spec": {"podName": pod, "selectedNode": "node-0", "resourceClaimAllocations": [
            {"name": "gpu", "allocation": {"devices": {"results": [result]}}}]},
        "status": {"phase": phase}}));
    cluster.feed.push_back(Change::BindRequest(WatchEvent::Stored(Box::new(request))));
}

/// The binder is slow: longer than any hold settles the claim does not name the GPU that is to be its own.
#[test]
fn a_gpu_that_kais_binder_has_not_written_yet_is_somebodys() {
    for (phase, taken) in [("Pending", true), ("", true), ("Failed", true), ("Succeeded", false)] {
        let mut cluster = cluster(1, 2);
        cluster.put_whole("whole");
        cluster.put_pod("whole", &["whole"], json!({"spec": {"schedulerName": "kai-scheduler"}}));
        bind_request(&mut cluster, "whole", phase, "gpu-0");
        share(&mut cluster, "small", "1Gi");
        share(&mut cluster, "large", "80Gi");
        cluster.settle(LONG);
        let at = |name: &str| cluster.place(name).map(|(_, devices)| devices[0].clone());
        let mut places = [at("small"), at("large")];
        places.sort();
        let both = [Some("gpu-0".to_owned()), Some("gpu-1".to_owned())];
        match taken {
            true => assert_eq!(places, [None, both[1].clone()], "{phase:?}"),
            false => assert_eq!(places, both, "{phase:?}"),
        }
        cluster.check();
    }
}

#[test]
fn a_bind_request_counts_as_long_as_its_pod_waits_and_is_there() {
    let mut cluster = cluster(1, 1);
    cluster.put_whole("whole");
    bind_request(&mut cluster, "whole", "Pending", "gpu-0");
    share(&mut cluster, "small", "1Gi");
    cluster.settle(LONG);
    assert!(cluster.place("small").is_some(), "its pod is gone: nobody will bind it");
    cluster.drop_pod("small", true);
    // A share of ours that KAI binds: its claim has the GPU already.
    cluster.put_share("ours", json!({"memory": "1Gi"}), 1);
    cluster.put_group(PodGroupApi::Kai, "g", json!({"spec": {"minMember": 1}}));
    let mut pod = in_group();
    pod["spec"] = json!({"schedulerName": "kai-scheduler"});
    cluster.put_pod("ours", &["ours"], pod);
    cluster.settle(5 * SECOND);
    assert!(cluster.place("ours").is_some());
    bind_request(&mut cluster, "ours", "Pending", "gpu-0");
    cluster.settle(5 * SECOND);
    share(&mut cluster, "beside", "1Gi");
    cluster.settle(5 * SECOND);
    assert!(cluster.place("ours").is_some() && cluster.place("beside").is_some());
    cluster.check();
}
