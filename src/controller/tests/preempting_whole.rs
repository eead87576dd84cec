//! Shares on one held GPU end for a pod of higher priority that waits for a whole GPU of kube-scheduler's.

use std::collections::BTreeSet;
use std::time::Duration;

use serde_json::{Value, json};

use super::cluster::{Cluster, merge};
use super::preempting::{ask, cluster, end, evicted, refused, run, wait};
use super::preempting_told::told;
use super::walk::bind;
use crate::cluster::pod_groups::PodGroupApi;
use crate::controller::config::Rules;

const SECOND: Duration = Duration::from_secs(1);

/// A pod that kube-scheduler found no whole GPU for.
fn whole(cluster: &mut Cluster, name: &str, priority: i32, more: &Value) {
    cluster.put_whole(name);
    let mut pod = json!({"spec": {"priority": priority}});
    merge(&mut pod, &refused());
    merge(&mut pod, more);
    cluster.put_pod(name, &[name], pod);
    cluster.settle(SECOND);
}

/// kube-scheduler gives the pod a GPU that nobody names, if there is one, and binds it.
fn schedule(cluster: &mut Cluster, name: &str) -> Option<(String, String)> {
    let named: Vec<(String, String)> = cluster.claims.values().flat_map(super::cluster::results).collect();
    let gpus =
        cluster.slices.keys().flat_map(|node| (0..4).map(move |nth| (node.clone(), format!("gpu-{nth}"))));
    let there = |cluster: &Cluster, gpu: &(String, String)| {
        let devices = cluster.slices[&gpu.0].spec.devices.iter().flatten();
        devices.into_iter().any(|device| device.name == gpu.1)
    };
    let free =
        gpus.collect::<Vec<_>>().into_iter().find(|gpu| !named.contains(gpu) && there(cluster, gpu))?;
    let mut claim = cluster.claim(name).clone();
    let made = crate::controller::grant::hold(&free.0.as_str().into(), "gpu", &free.1, None);
    claim.status.get_or_insert_default().allocation = Some(made);
    cluster.store(claim);
    bind(cluster, name);
    cluster.settle(SECOND);
    Some(free)
}

fn counts(cluster: &Cluster) -> (u64, u64, u64) {
    let counts = &cluster.core.reserves.evictions.preempting.counts();
    (counts.begun, counts.served, counts.in_vain)
}

#[test]
fn the_least_gpu_is_emptied_takes_no_shares_meanwhile_and_is_given_back() {
    for keeps in [true, false] {
        let mut cluster = Cluster::new(super::preempting::rules());
        cluster.keeps = keeps;
        cluster.put_node("node-0", 2);
        cluster.settle(SECOND);
        for (name, gib, priority) in [("a", 30, 0), ("b", 30, 1), ("c", 70, 5)] {
            run(&mut cluster, name, gib, priority, &json!({}));
        }
        let (_, emptied) = cluster.place("a").unwrap();
        assert_eq!(cluster.place("b").unwrap().1, emptied, "a and b are on one GPU");
        cluster.core.recorder.take();
        whole(&mut cluster, "train", 10, &json!({}));
        let ended: BTreeSet<&str> = evicted(&cluster).into_iter().collect();
        assert_eq!(ended, BTreeSet::from(["a", "b"]), "c is more important");
        let notes = cluster.core.recorder.take().0;
        let note = |reason: &str| notes.iter().find(|note| note.reason == reason).unwrap().message.clone();
        assert_eq!(
            note("Preempting"),
            format!(
                "2 pods of lower priority end for it on node node-0: {} takes no other shares, and is given back to \
                 kube-scheduler once they have ended",
                emptied[0]
            )
        );
        let told = note("Preempted");
        assert!(told.starts_with("gives 30720 MiB of node-0/gpu-"), "{told}");
        assert!(told.contains(" to pod train, of priority 10; its own is "), "{told}");
        // What would fit there waits, of whatever priority.
        ask(&mut cluster, "late", 20, 20, &json!({}));
        cluster.settle(2 * SECOND);
        assert_eq!(cluster.place("late"), None);
        assert_eq!(schedule(&mut cluster, "train"), None, "the GPU is held as long as shares are there");
        end(&mut cluster);
        cluster.settle(SECOND);
        let got = schedule(&mut cluster, "train");
        assert_eq!(got, Some(("node-0".to_owned(), emptied[0].clone())), "{keeps}");
        cluster.check();
        cluster.settle(60 * SECOND);
        assert_eq!((counts(&cluster), evicted(&cluster).len()), ((1, 1, 0), 2));
    }
}

#[test]
fn nobody_ends_for_who_is_served_otherwise_or_may_not() {
    type Case = (&'static str, fn(&mut Cluster), Value, i32);
    let never = json!({"spec": {"preemptionPolicy": "Never"}});
    let elsewhere = json!({"spec": {"nodeSelector": {"zone": "a"}}});
    let gated = json!({"spec": {"schedulingGates": [{"name": "wait"}]}});
    let cases: [Case; 8] = [
        ("its policy is Never", |_| {}, never, 10),
        ("it has the same priority", |_| {}, json!({}), 5),
        ("no node is for it", |_| {}, elsewhere, 10),
        ("it is gated", |_| {}, gated, 10),
        ("it is switched off", |cluster| cluster.core.rules.preemption = false, json!({}), 10),
        ("another GPU is free", |cluster| cluster.put_node("node-1", 1), json!({}), 10),
        (
            "a budget keeps it",
            |cluster| cluster.put_budget(("ml", "keep"), json!({"app": "x"}), 0),
            json!({}),
            10,
        ),
        (
            "the claim has another user",
            |cluster| {
                cluster.put_pod("beside", &["low"], json!({"spec": {"nodeName": "node-0", "priority": 5}}));
            },
            json!({}),
            10,
        ),
    ];
    for (why, change, more, priority) in cases {
        let mut cluster = cluster(&[1]);
        run(&mut cluster, "low", 60, 5, &json!({"metadata": {"labels": {"app": "x"}}}));
        change(&mut cluster);
        cluster.settle(SECOND);
        whole(&mut cluster, "train", priority, &more);
        cluster.settle(30 * SECOND);
        assert_eq!(evicted(&cluster), [""; 0], "{why}");
    }
    // A GPU that is held for good is never given back.
    let always_hold = vec!["node-0".to_owned()];
    let mut cluster = Cluster::new(Rules { always_hold, ..super::preempting::rules() });
    cluster.put_node("node-0", 1);
    cluster.settle(SECOND);
    run(&mut cluster, "low", 60, 5, &json!({}));
    whole(&mut cluster, "train", 10, &json!({}));
    cluster.settle(30 * SECOND);
    assert_eq!(evicted(&cluster), [""; 0]);
}

/// How many whole GPUs a gang gets is up to its scheduler, and where its queue keeps it out it gets none.
#[test]
fn no_gpu_is_emptied_for_a_gang_nor_for_whom_its_queue_keeps_out() {
    let of = |name: &str| json!({"metadata": {"annotations": {name: "g"}}});
    let by = |scheduler: &str, name: &str| {
        let mut pod = of(name);
        merge(&mut pod, &json!({"spec": {"schedulerName": scheduler}}));
        pod
    };
    let mut sized = of("tranche.dev/gang");
    sized["metadata"]["annotations"]["tranche.dev/gang-size"] = "3".into();
    let over = json!({"spec": {"minMember": 1}, "status": {"schedulingConditions": [{
        "type": "UnschedulableOnNodePool", "status": "True", "reasons": [{"reason": "OverLimit", "message": "full"}]}]}});
    let pending = json!({"spec": {"minMember": 1}, "status": {"phase": "Pending"}});
    let (kai, volcano) = ("pod-group-name", "scheduling.k8s.io/group-name");
    type Case = (&'static str, Option<(PodGroupApi, Value)>, Value, usize);
    let cases: [Case; 7] = [
        ("its gang needs three", None, sized, 0),
        ("nobody knows how many its gang needs", None, of("tranche.dev/gang"), 0),
        ("KAI's group is over its limit", Some((PodGroupApi::Kai, over)), by("kai-scheduler", kai), 0),
        ("Volcano's is Pending", Some((PodGroupApi::Volcano, pending)), by("volcano", volcano), 0),
        (
            "Volcano's starts with two",
            Some((PodGroupApi::Volcano, json!({"spec": {"minMember": 2}}))),
            by("volcano", volcano),
            0,
        ),
        ("it is in no group yet", None, json!({"spec": {"schedulerName": "volcano"}}), 0),
        (
            "each of them starts by itself",
            Some((PodGroupApi::Volcano, json!({"spec": {"minMember": 1}}))),
            by("volcano", volcano),
            1,
        ),
    ];
    for (why, group, more, ends) in cases {
        let mut cluster = cluster(&[2]);
        for name in ["a", "b"] {
            run(&mut cluster, name, 60, 5, &json!({}));
        }
        if let Some((api, group)) = group {
            cluster.put_group(api, "g", group);
        }
        whole(&mut cluster, "train-1", 10, &more);
        assert_eq!(told(&mut cluster, "train-1").is_some(), ends > 0, "{why}");
        if ends == 0 {
            whole(&mut cluster, "train-2", 10, &more);
        }
        cluster.settle(120 * SECOND);
        assert_eq!(evicted(&cluster).len(), ends, "{why}");
    }
}

#[test]
fn one_gpu_is_emptied_for_each_and_none_for_who_asks_for_a_part_or_for_several() {
    let mut cluster = cluster(&[3]);
    for name in ["a", "b", "c"] {
        run(&mut cluster, name, 70, 0, &json!({}));
    }
    let request = |name: &str, exactly: Value| {
        json!({"metadata": {"name": name, "namespace": "ml"}, "spec": {"devices": {"requests": [
            {"name": "gpu", "exactly": exactly}]}}})
    };
    let several = json!({"deviceClassName": "gpu.nvidia.com", "count": 2});
    let part =
        json!({"deviceClassName": "gpu.nvidia.com", "count": 1, "capacity": {"requests": {"memory": "8Gi"}}});
    for (name, exactly) in [("several", several), ("part", part)] {
        cluster.put_claim(request(name, exactly));
        let mut pod = refused();
        merge(&mut pod, &json!({"spec": {"priority": 10}}));
        cluster.put_pod(name, &[name], pod);
        cluster.settle(5 * SECOND);
    }
    assert_eq!(evicted(&cluster), [""; 0]);
    whole(&mut cluster, "first", 10, &json!({}));
    whole(&mut cluster, "second", 10, &json!({}));
    assert_eq!(evicted(&cluster).len(), 2, "{:?}", evicted(&cluster));
    // Shares go beside that: others end for them on the GPU that is left.
    wait(&mut cluster, "high", 60, 10);
    assert_eq!(evicted(&cluster).len(), 3);
    end(&mut cluster);
    cluster.settle(SECOND);
    assert!(cluster.place("high").is_some());
    assert!(schedule(&mut cluster, "first").is_some() && schedule(&mut cluster, "second").is_some());
    cluster.check();
    bind(&mut cluster, "high");
    cluster.settle(SECOND);
    assert_eq!(counts(&cluster), (3, 3, 0));
}

#[test]
fn a_pod_that_is_not_bound_to_the_gpu_that_was_emptied_makes_its_namespace_rest() {
    let mut cluster = cluster(&[2]);
    run(&mut cluster, "a", 70, 0, &json!({}));
    run(&mut cluster, "b", 70, 0, &json!({}));
    whole(&mut cluster, "train", 10, &json!({}));
    assert_eq!(evicted(&cluster).len(), 1);
    end(&mut cluster);
    // kube-scheduler keeps it out, and the GPU that was given back goes to another pod of lower priority.
    cluster.settle(2 * SECOND);
    whole(&mut cluster, "other", 0, &json!({}));
    assert!(schedule(&mut cluster, "other").is_some());
    cluster.settle(20 * SECOND);
    assert_eq!((counts(&cluster), evicted(&cluster).len()), ((1, 0, 0), 1), "it waits for half a minute");
    cluster.settle(25 * SECOND);
    assert_eq!((counts(&cluster), evicted(&cluster).len()), ((1, 0, 1), 1), "the namespace rests");
    cluster.settle(60 * SECOND);
    assert_eq!(evicted(&cluster).len(), 2, "and then another ends");
    // It goes away: the GPU is for shares again.
    cluster.drop_pod("train", true);
    end(&mut cluster);
    cluster.settle(20 * SECOND);
    ask(&mut cluster, "late", 20, 0, &json!({}));
    cluster.settle(10 * SECOND);
    assert!(cluster.place("late").is_some());
}

#[test]
fn a_pod_that_has_a_gpu_elsewhere_meanwhile_has_nobody_else_end() {
    let mut cluster = cluster(&[1]);
    run(&mut cluster, "a", 30, 0, &json!({}));
    run(&mut cluster, "b", 30, 0, &json!({}));
    cluster.put_node_object("node-1", json!({}));
    cluster.put_whole("train");
    let mut pod = json!({"spec": {"priority": 10}});
    merge(&mut pod, &refused());
    cluster.put_pod("train", &["train"], pod);
    cluster.deliver(usize::MAX);
    cluster.round();
    cluster.put_node("node-1", 1);
    assert!(schedule(&mut cluster, "train").is_some_and(|(node, _)| node == "node-1"));
    cluster.settle(10 * SECOND);
    assert!(evicted(&cluster).len() <= 1, "{:?}", evicted(&cluster));
    let preempting = &cluster.core.reserves.evictions.preempting;
    assert_eq!((preempting.counts().served, preempting.under_way().count()), (1, 0));
    ask(&mut cluster, "late", 10, 0, &json!({}));
    cluster.settle(5 * SECOND);
    assert!(cluster.place("late").is_some(), "the GPU is open to shares again");
}

#[test]
fn nobody_ends_for_who_waits_for_what_nobody_knows() {
    for (other, ends) in [(None, 1), (Some("gpu.nvidia.cm"), 0), (Some("missing"), 0)] {
        let mut cluster = cluster(&[1]);
        run(&mut cluster, "low", 60, 5, &json!({}));
        if let Some(class) = other.filter(|other| *other != "missing") {
            cluster.put_claim(json!({"metadata": {"name": "other", "namespace": "ml"}, "spec": {"devices": {
                "requests": [{"name": "x", "exactly": {"deviceClassName": class}}]}}}));
        }
        cluster.put_whole("train");
        let mut pod = json!({"spec": {"priority": 10}});
        merge(&mut pod, &refused());
        let claims = ["train", "other"];
        cluster.put_pod("train", &claims[..if other.is_some() { 2 } else { 1 }], pod);
        cluster.settle(5 * SECOND);
        assert_eq!(evicted(&cluster).len(), ends, "{other:?}");
    }
}

#[test]
fn an_emptied_gpu_is_given_back_for_who_had_others_end() {
    let mut cluster = cluster(&[1, 1]);
    for name in ["a", "b"] {
        run(&mut cluster, name, 60, 5, &json!({}));
    }
    // Waits for longer, has nobody end, and its UID comes first.
    whole(&mut cluster, "a-low", 1, &json!({}));
    whole(&mut cluster, "z-high", 10, &json!({}));
    let order = cluster.core.by_priority();
    let names: Vec<_> = order.iter().map(|uid| cluster.core.view.pod(uid).unwrap().at.name.clone()).collect();
    assert_eq!(names, ["z-high", "a-low"]);
    assert_eq!(evicted(&cluster).len(), 1);
    end(&mut cluster);
    cluster.settle(5 * SECOND);
    assert_eq!(cluster.holds().len(), 1, "the other GPU stays held");
    let freed = schedule(&mut cluster, "z-high").expect("one was given back");
    assert_eq!(
        cluster.holds(),
        [format!("hold.gpu-0.{}", if freed.0 == "node-0" { "node-1" } else { "node-0" })]
    );
    cluster.settle(60 * SECOND);
    assert_eq!(
        (schedule(&mut cluster, "a-low"), evicted(&cluster).len()),
        (None, 1),
        "nobody ends for a-low"
    );
    assert_eq!(counts(&cluster), (1, 1, 0));
}

#[test]
fn who_asks_is_told_of_whole_gpus_too() {
    let mut cluster = cluster(&[1]);
    run(&mut cluster, "low", 60, 5, &json!({"metadata": {"labels": {"app": "x"}}}));
    cluster.put_budget(("ml", "keep"), json!({"app": "x"}), 0);
    whole(&mut cluster, "train", 10, &json!({}));
    let kept = told(&mut cluster, "train").unwrap();
    assert_eq!(
        kept.to_string(),
        "nobody ends for it: PodDisruptionBudget ml/keep keeps pods of lower priority on node node-0: ml/low"
    );
    cluster.core.rules.preemption = false;
    cluster.put_budget(("ml", "keep"), json!({"app": "x"}), 1);
    cluster.settle(SECOND);
    let ends = told(&mut cluster, "train").unwrap();
    assert_eq!(
        ends.to_string(),
        "the controller ends 1 pod of lower priority for it on node node-0: ml/low; gpu-0 is given back to \
         kube-scheduler then"
    );
    whole(&mut cluster, "low-too", 5, &json!({}));
    let nobody = told(&mut cluster, "low-too").unwrap();
    assert_eq!(nobody.to_string(), "nobody ends for it: no pod of lower priority has a share");
}

#[test]
fn nobody_ends_for_who_waits_for_something_else_than_room_until_that_is_over() {
    let says = |reason: &str, message: &str| {
        json!({"status": {"conditions": [
            {"type": "PodScheduled", "status": "False", "reason": reason, "message": message}]}})
    };
    let volume = "0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims. preemption: 0/1 nodes are \
                  available: 1 Preemption is not helpful for scheduling.";
    let affinity = "0/1 nodes are available: 1 node(s) didn't match pod affinity rules.";
    let error = "running PreBind plugin \"DynamicResources\": the claim has changed";
    for (reason, message) in [
        ("Unschedulable", volume),
        ("Unschedulable", affinity),
        ("SchedulerError", error),
        ("SchedulingGated", ""),
        ("Mine", ""),
    ] {
        let mut cluster = cluster(&[1]);
        run(&mut cluster, "low", 60, 5, &json!({}));
        whole(&mut cluster, "train", 10, &says(reason, message));
        ask(&mut cluster, "share", 60, 10, &says(reason, message));
        cluster.settle(30 * SECOND);
        assert_eq!(evicted(&cluster), [""; 0], "{reason}: {message}");
        if reason == "Unschedulable" {
            for name in ["train", "share"] {
                assert_eq!(
                    told(&mut cluster, name).unwrap().to_string(),
                    format!(
                        "nobody ends for it: by what kube-scheduler says, pod {name} waits for something else than a \
                         GPU, CPU or memory (message of PodScheduled)"
                    )
                );
            }
        }
        cluster.drop_pod("share", true);
        let mut pod = json!({"spec": {"priority": 10}});
        merge(&mut pod, &says("Unschedulable", "0/1 nodes are available: 1 cannot allocate all claims."));
        pod["metadata"] = json!({"uid": cluster.pods[&("ml".to_owned(), "train".to_owned())].metadata.uid});
        cluster.put_pod("train", &["train"], pod);
        cluster.settle(5 * SECOND);
        assert_eq!(evicted(&cluster), ["low"], "{reason}: {message}");
    }
}

/// Pods of one tenant name the same claims, and whoever may create claims decides how long these are.
#[test]
fn what_a_claim_asks_for_is_kept_once_however_many_pods_name_it() {
    let mut cluster = cluster(&[1]);
    let claims: Vec<String> = (0..3).map(|nth| format!("c{nth}")).collect();
    let names: Vec<&str> = claims.iter().map(String::as_str).collect();
    names.iter().for_each(|name| cluster.put_whole(name));
    for nth in 0..20 {
        cluster.put_pod(&format!("p{nth}"), &names, refused());
    }
    cluster.settle(SECOND);
    assert_eq!(cluster.core.pods.demand.pods().count(), 20);
    assert_eq!(cluster.core.pods.demand.kept(), (3, 3));
    (0..20).for_each(|nth| cluster.drop_pod(&format!("p{nth}"), true));
    for nth in 0..200 {
        let name = format!("one{nth}");
        whole(&mut cluster, &name, 0, &json!({}));
        cluster.drop_pod(&name, true);
    }
    cluster.settle(SECOND);
    let (needs, claims) = cluster.core.pods.demand.kept();
    assert!(needs == 0 && claims <= 64, "{claims} claims are remembered");
}
