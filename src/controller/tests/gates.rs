//! Pods that are gated ask for nothing, until the last of their gates is taken away.

use serde_json::{Value, json};

use super::cluster::Cluster;
use super::scenes::{LONG, SECOND, cluster, settles_for, share};
use super::told::until;
use crate::controller::write::Write;

const LIMITS: &str = "by limits";
const CLAIM: &str = "by claim";

/// Pod `w`, which asks for a whole GPU, as it is written: `gates` are its scheduling gates, `reason` is why it is
/// not scheduled.
fn put_whole_pod(cluster: &mut Cluster, how: &str, gates: &[&str], reason: Option<&str>) {
    let gates: Vec<Value> = gates.iter().map(|gate| json!({"name": gate})).collect();
    let mut more = json!({"spec": {"schedulingGates": gates}});
    if let Some(reason) = reason {
        more["status"] =
            json!({"conditions": [{"type": "PodScheduled", "status": "False", "reason": reason}]});
    }
    if let Some(before) = cluster.pods.get(&("ml".to_owned(), "w".to_owned())) {
        more["metadata"] = json!({"uid": before.metadata.uid});
    }
    let claims: &[&str] = if how == CLAIM { &["w"] } else { &[] };
    if how == LIMITS {
        more["spec"]["containers"] =
            json!([{"name": "main", "resources": {"limits": {"nvidia.com/gpu": "1"}}}]);
    } else if !cluster.claims.contains_key(&("ml".to_owned(), "w".to_owned())) {
        cluster.put_whole("w");
    }
    cluster.put_pod("w", claims, more);
}

#[test]
fn a_gated_pod_takes_no_idle_gpu_away_and_gets_it_once_it_is_refused_without_its_gates() {
    for how in [CLAIM, LIMITS] {
        let mut cluster = cluster(1, 1);
        share(&mut cluster, "a", "10Gi");
        cluster.settle(LONG);
        cluster.drop_pod("a", true);
        cluster.settle(SECOND);
        put_whole_pod(&mut cluster, how, &["example.com/budget"], Some("SchedulingGated"));
        cluster.settle(LONG);
        assert_eq!(cluster.holds().len(), 1, "{how}: it is gated");
        // The condition is the scheduler's, which has not looked at the pod yet.
        put_whole_pod(&mut cluster, how, &[], Some("SchedulingGated"));
        cluster.settle(LONG);
        assert_eq!(cluster.holds().len(), 1, "{how}: the scheduler has not tried it yet");
        put_whole_pod(&mut cluster, how, &[], Some("Unschedulable"));
        cluster.settle(SECOND);
        assert_eq!(cluster.holds(), [""; 0], "{how}: it waits for a GPU");
    }
}

#[test]
fn a_gated_pod_is_not_waited_for() {
    for how in [CLAIM, LIMITS] {
        let mut cluster = cluster(1, 1);
        put_whole_pod(&mut cluster, how, &["example.com/budget"], Some("SchedulingGated"));
        assert_eq!(settles_for(cluster), 2, "{how}");
    }
    let mut others = cluster(1, 1);
    put_whole_pod(&mut others, CLAIM, &["example.com/budget"], Some("SchedulingGated"));
    others.put_pod("x", &["w"], json!({}));
    assert!((80..=81).contains(&settles_for(others)), "another pod of the claim is not gated");
    let mut alone = cluster(1, 1);
    alone.put_whole("w");
    assert!((80..=81).contains(&settles_for(alone)), "nobody knows whose the claim is");
}

/// The scheduler may have given it the GPU before it knew of the hold.
#[test]
fn a_pod_that_loses_its_gates_while_a_hold_settles_is_waited_for() {
    for how in [CLAIM, LIMITS] {
        for after_the_look_began in [false, true] {
            let mut cluster = cluster(1, 1);
            put_whole_pod(&mut cluster, how, &["example.com/budget"], None);
            share(&mut cluster, "a", "10Gi");
            let written = |write: &Write| match after_the_look_began {
                true => matches!(write, Write::WatchBarrier(_)),
                false => matches!(write, Write::Hold(..)),
            };
            until(&mut cluster, written);
            cluster.write(false);
            put_whole_pod(&mut cluster, how, &[], None);
            cluster.settle(SECOND);
            assert_eq!(cluster.place("a"), None, "{how}, {after_the_look_began}: somebody may have the GPU");
            cluster.settle(2 * SECOND);
            assert!(cluster.place("a").is_some(), "{how}: nobody had it");
            cluster.check();
        }
    }
}

/// Two gates, of which one is taken away: it is as gated as before.
#[test]
fn one_gate_is_enough() {
    let mut cluster = cluster(1, 1);
    put_whole_pod(&mut cluster, CLAIM, &["a.example.com/x", "b.example.com/y"], Some("SchedulingGated"));
    put_whole_pod(&mut cluster, CLAIM, &["b.example.com/y"], Some("SchedulingGated"));
    assert_eq!(settles_for(cluster), 2);
}
