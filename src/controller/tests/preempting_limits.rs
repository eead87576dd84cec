//! What does not count as free where pods end for others, whom nobody ends for, and who does not rest for it.

use std::collections::BTreeSet;
use std::time::Duration;

use serde_json::{Value, json};

use super::cluster::{Cluster, merge, object};
use super::moving;
use super::preempting::{ask, cluster, end, evicted, refused, run, wait};
use super::walk::bind;
use crate::cluster::pod_groups::PodGroupApi;
use crate::controller::config::Mode;
use crate::controller::queue::UnitKey;
use crate::controller::view::groups::Family;
use crate::controller::write::{Failure, Write};

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);

/// The pod is ending, and is to have ended after so long.
pub(super) fn ends_in(cluster: &mut Cluster, name: &str, time: Duration) {
    let mut pod = cluster.pods[&("ml".to_owned(), name.to_owned())].clone();
    let ends = cluster.core.recorder.time_of(cluster.now + time).unwrap();
    pod.metadata.deletion_timestamp = Some(object(json!(ends.to_string())));
    cluster.store_pod(pod);
    cluster.settle(SECOND);
}

fn of_gang(size: u32) -> Value {
    let mut pod = json!({"metadata": {"annotations": {"tranche.dev/gang": "g",
        "tranche.dev/gang-size": size.to_string()}}});
    merge(&mut pod, &refused());
    pod
}

#[test]
fn a_promised_claim_stands_for_a_try_of_kube_scheduler_alone() {
    for (scheduler, tried, ends) in [
        ("default-scheduler", false, true),
        ("another", false, false),
        ("another", true, true),
        ("volcano", false, false),
    ] {
        let mut cluster = cluster(&[1]);
        run(&mut cluster, "low", 60, 0, &json!({}));
        let share = json!({"share": {"apiVersion": "tranche.dev/v1alpha1", "kind": "GpuShare",
            "fraction": "0.5"}, "count": 1});
        let mut pod = json!({"metadata": {"annotations": {"tranche.dev/gpu-share": share.to_string()}},
            "spec": {"schedulerName": scheduler, "priority": 10,
                "resourceClaims": [{"name": "gpu-share", "resourceClaimName": "high-gpu-share"}]}});
        if tried {
            merge(&mut pod, &refused());
        }
        cluster.put_pod("high", &[], pod);
        cluster.settle(30 * SECOND);
        assert_eq!(!cluster.evicted.is_empty(), ends, "{scheduler}, tried: {tried}");
    }
}

#[test]
fn what_others_leave_is_kept_while_the_unit_waits_for_something_else() {
    let mut cluster = cluster(&[1]);
    run(&mut cluster, "a", 40, 0, &json!({}));
    run(&mut cluster, "b", 40, 0, &json!({}));
    cluster.put_group(PodGroupApi::Volcano, "g", json!({"spec": {"minMember": 1}}));
    let share = json!({"share": {"apiVersion": "tranche.dev/v1alpha1", "kind": "GpuShare",
        "fraction": "0.9"}, "count": 1});
    let mut pod = json!({"metadata": {"annotations": {"tranche.dev/gpu-share": share.to_string(),
            "scheduling.k8s.io/group-name": "g"}},
        "spec": {"schedulerName": "volcano", "priority": 10,
            "resourceClaims": [{"name": "gpu-share", "resourceClaimName": "high-gpu-share"}]}});
    merge(&mut pod, &refused());
    cluster.put_pod("high", &[], pod);
    cluster.deliver(usize::MAX);
    cluster.round();
    // Its claim, which its scheduler has to see, is not made: it is tried again later, and nothing is decided meanwhile.
    let mut refusals = 0;
    while let Some(write) = cluster.writes.front() {
        match write {
            Write::Create(..) => {
                refusals += 1;
                cluster.fail(Failure::Refused("exceeded quota: claims".to_owned()));
            }
            _ => cluster.write(false),
        }
    }
    assert_eq!(refusals, 1);
    cluster.settle(SECOND);
    assert_eq!(evicted(&cluster).len(), 2, "both end for it");
    cluster.drop_pod("a", true);
    ask(&mut cluster, "late", 20, 0, &json!({}));
    cluster.settle(2 * SECOND);
    assert!(!cluster.claims.contains_key(&("ml".to_owned(), "high-gpu-share".to_owned())), "it rests yet");
    assert_eq!(cluster.place("late"), None, "what the first has left is kept");
}

#[test]
fn what_ends_much_later_or_frees_nothing_is_not_waited_for() {
    let mut cluster = cluster(&[2]);
    run(&mut cluster, "slow", 60, 0, &json!({}));
    run(&mut cluster, "low", 60, 5, &json!({}));
    ends_in(&mut cluster, "slow", 60 * MINUTE);
    wait(&mut cluster, "high", 60, 10);
    assert_eq!(evicted(&cluster), ["low"], "nobody waits for an hour");
    // Another pod goes on with its claim.
    let mut cluster = self::cluster(&[2]);
    run(&mut cluster, "shared", 60, 0, &json!({}));
    run(&mut cluster, "low", 60, 5, &json!({}));
    let node = cluster.place("shared").unwrap().0;
    cluster.put_pod("beside", &["shared"], json!({"spec": {"nodeName": node}}));
    ends_in(&mut cluster, "shared", 30 * SECOND);
    wait(&mut cluster, "high", 60, 10);
    assert_eq!(evicted(&cluster), ["low"], "its end leaves nothing");
    // What is near is waited for, whatever marks it has.
    let mut cluster = self::cluster(&[2]);
    let mark = json!({"metadata": {"annotations": {"volcano.sh/preemptable": "false"}}});
    run(&mut cluster, "near", 60, 0, &mark);
    run(&mut cluster, "low", 60, 5, &json!({}));
    ends_in(&mut cluster, "near", 5 * MINUTE);
    wait(&mut cluster, "high", 60, 10);
    assert_eq!(evicted(&cluster), [""; 0]);
}

#[test]
fn no_namespace_rests_for_a_victim_that_takes_its_time() {
    let mut cluster = cluster(&[2]);
    run(&mut cluster, "slow", 60, 0, &json!({}));
    run(&mut cluster, "low", 60, 5, &json!({}));
    wait(&mut cluster, "high", 60, 10);
    assert_eq!(evicted(&cluster), ["slow"]);
    ends_in(&mut cluster, "slow", 60 * MINUTE);
    cluster.settle(9 * MINUTE);
    assert_eq!(evicted(&cluster), ["slow"], "its room is kept for ten minutes");
    wait(&mut cluster, "other", 60, 10);
    cluster.settle(SECOND);
    assert_eq!(evicted(&cluster), ["slow", "low"], "then another ends, for whoever is next");
}

#[test]
fn a_gang_that_loses_a_pod_while_others_end_for_it_is_not_taken_for_placed() {
    let mut cluster = cluster(&[2]);
    run(&mut cluster, "a", 80, 0, &json!({}));
    run(&mut cluster, "b", 80, 0, &json!({}));
    for name in ["g1", "g2", "g3"] {
        ask(&mut cluster, name, 30, 10, &of_gang(3));
    }
    cluster.settle(5 * SECOND);
    assert_eq!(evicted(&cluster).len(), 2);
    cluster.drop_pod("g2", true);
    end(&mut cluster);
    cluster.settle(2 * MINUTE);
    let preempting = &cluster.core.reserves.evictions.preempting;
    assert_eq!((preempting.counts().in_vain, preempting.under_way().count()), (1, 0));
    assert_eq!(cluster.core.reserves.counts(), (0, 0), "nothing is kept for it any more");
    wait(&mut cluster, "late", 60, 0);
    assert!(cluster.place("late").is_some());
}

#[test]
fn what_ends_for_one_is_not_what_another_waits_for() {
    let mut cluster = cluster(&[2]);
    run(&mut cluster, "low1", 80, 0, &json!({}));
    run(&mut cluster, "low2", 80, 0, &json!({}));
    wait(&mut cluster, "high1", 80, 10);
    assert_eq!(evicted(&cluster).len(), 1);
    wait(&mut cluster, "high2", 80, 10);
    assert_eq!(evicted(&cluster).len(), 2);
    end(&mut cluster);
    for name in ["high1", "high2"] {
        assert!(cluster.place(name).is_some(), "{name}");
        bind(&mut cluster, name);
    }
    cluster.settle(SECOND);
    assert_eq!(cluster.core.reserves.evictions.preempting.counts().served, 2);
    // What the first of them leaves over is waited for.
    let mut cluster = self::cluster(&[2]);
    run(&mut cluster, "low1", 80, 0, &json!({}));
    run(&mut cluster, "low2", 80, 0, &json!({}));
    wait(&mut cluster, "high1", 20, 10);
    wait(&mut cluster, "high2", 40, 10);
    assert_eq!(evicted(&cluster).len(), 1, "{:?}", evicted(&cluster));
    end(&mut cluster);
    assert!(cluster.place("high1").is_some() && cluster.place("high2").is_some());
}

#[test]
fn nodes_where_too_many_would_have_to_end_do_not_win() {
    let mut cluster = cluster(&[4, 4]);
    cluster.put_node_object("node-1", json!({"unschedulable": true}));
    cluster.settle(SECOND);
    for nth in 0..40 {
        run(&mut cluster, &format!("small{nth}"), 8, 0, &json!({}));
    }
    cluster.put_node_object("node-1", json!({}));
    cluster.settle(SECOND);
    for nth in 0..4 {
        run(&mut cluster, &format!("large{nth}"), 80, 5, &json!({}));
    }
    cluster.put_share("high", json!({"memory": "80Gi"}), 4);
    let mut high = json!({"spec": {"priority": 10}});
    merge(&mut high, &refused());
    cluster.put_pod("high", &["high"], high);
    cluster.settle(30 * SECOND);
    let ended: BTreeSet<&str> = evicted(&cluster).into_iter().collect();
    let large = BTreeSet::from(["large0", "large1", "large2", "large3"]);
    assert_eq!(ended, large, "more important than each of the 40, but not too many");
}

#[test]
fn more_budgets_than_are_kept_keep_all_pods_of_their_namespace() {
    let mut cluster = cluster(&[1]);
    run(&mut cluster, "low", 60, 0, &json!({}));
    for nth in 0..66 {
        cluster.put_budget(("ml", &format!("b{nth}")), json!({"app": format!("a{nth}")}), 1);
    }
    wait(&mut cluster, "high", 60, 10);
    cluster.settle(MINUTE);
    assert_eq!(evicted(&cluster), [""; 0]);
    let told = cluster.core.recorder.take().1;
    let told: Vec<&String> = told.iter().filter(|words| words.contains("PodDisruptionBudgets")).collect();
    assert_eq!(told.len(), 1, "{told:?}");
    assert!(told[0].starts_with("namespace ml has more than 64 PodDisruptionBudgets"), "{told:?}");
}

#[test]
fn a_budget_with_a_selector_that_is_too_large_keeps_all_pods_it_could_be_about() {
    let mut cluster = cluster(&[1]);
    run(&mut cluster, "low", 60, 0, &json!({}));
    let labels: Value =
        (0..200).map(|nth| (format!("l{nth}"), json!("x"))).collect::<serde_json::Map<_, _>>().into();
    cluster.put_budget(("ml", "large"), labels, 1);
    wait(&mut cluster, "high", 60, 10);
    cluster.settle(MINUTE);
    assert_eq!(evicted(&cluster), [""; 0]);
}

#[test]
fn what_moves_make_room_for_goes_to_who_has_a_higher_priority() {
    for (priority, is_higher) in [(10, true), (0, false)] {
        let mut cluster = moving::fragmented(Mode::Auto, ("ml", moving::mark("true")));
        let source = cluster.place("small").unwrap();
        moving::put(&mut cluster, "big", "75Gi", "rs-big", json!({}));
        cluster.settle(MINUTE);
        assert_eq!(cluster.core.reserves.evictions.moves.counts().evictions, 1);
        wait(&mut cluster, "other", 75, priority);
        moving::end(&mut cluster, "small", "small-anew", "10Gi");
        assert!(cluster.place("small-anew").is_some_and(|place| place != source));
        let (first, second) = if is_higher { ("other", "big") } else { ("big", "other") };
        assert_eq!((cluster.place(first), cluster.place(second)), (Some(source), None), "{priority}");
        assert_eq!(evicted(&cluster), [""; 0], "there is room for it");
        cluster.check();
    }
}

/// Of a gang that has what it needs two more wait, one of which its scheduler has not tried yet.
#[test]
fn room_that_another_of_the_gang_takes_was_not_made_in_vain() {
    let mut cluster = cluster(&[3]);
    let mut more = json!({"metadata": {"annotations": {"scheduling.k8s.io/group-name": "g"}}});
    cluster.put_group(PodGroupApi::Volcano, "g", json!({"spec": {"minMember": 2}}));
    ["g1", "g2"].iter().for_each(|name| ask(&mut cluster, name, 60, 10, &more));
    cluster.settle(5 * SECOND);
    ["g1", "g2"].iter().for_each(|name| bind(&mut cluster, name));
    run(&mut cluster, "low", 60, 0, &json!({}));
    ask(&mut cluster, "x1", 60, 10, &more);
    cluster.settle(SECOND);
    merge(&mut more, &refused());
    ask(&mut cluster, "x2", 60, 10, &more);
    cluster.settle(2 * SECOND);
    assert_eq!(evicted(&cluster), ["low"]);
    end(&mut cluster);
    assert_eq!((cluster.place("x1").is_some(), cluster.place("x2")), (true, None));
    let key = UnitKey::Gang { namespace: "ml".to_owned(), family: Family::Volcano, name: "g".to_owned() };
    let preempting = &cluster.core.reserves.evictions.preempting;
    assert!(preempting.is_under_way(&key), "whether x1 is bound decides");
    cluster.settle(20 * SECOND);
    bind(&mut cluster, "x1");
    cluster.settle(2 * MINUTE);
    let preempting = &mut cluster.core.reserves.evictions.preempting;
    assert_eq!((preempting.counts().served, preempting.counts().in_vain), (1, 0));
    assert_eq!(preempting.may_begin(&key, "ml", 1, cluster.now), Ok(()));
    assert_eq!(cluster.core.reserves.counts(), (0, 0), "nothing is kept");
    assert_eq!(evicted(&cluster), ["low"]);
}
