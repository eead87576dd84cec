//! Who looks for victims at whose cost: what one tenant does keeps no other from having pods end, and makes nobody's
//! pods end in vain.

use std::collections::BTreeSet;
use std::time::Duration;

use serde_json::{Value, json};

use super::moving;
use super::preempting::{ask, cluster, end, evicted, refused, rules, run, wait};
use super::walk::bind;
use crate::allocate::Policy;
use crate::controller::config::Rules;
use crate::controller::tests::cluster::{Cluster, merge, object};
use crate::controller::write::{Failure, Write};

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);

fn refused_at(priority: i32) -> Value {
    let mut pod = json!({"spec": {"priority": priority}});
    merge(&mut pod, &refused());
    pod
}

#[test]
fn a_namespaces_bound_counts_the_room_for_which_pods_are_ending() {
    let mut cluster = cluster(&[2]);
    run(&mut cluster, "low1", 80, 0, &json!({}));
    run(&mut cluster, "low2", 80, 0, &json!({}));
    cluster.annotate("ml", json!({"tranche.dev/max-share-memory": "250Gi"}));
    wait(&mut cluster, "high1", 80, 10);
    wait(&mut cluster, "high2", 80, 10);
    cluster.settle(30 * SECOND);
    assert_eq!(evicted(&cluster).len(), 1, "the second would be beyond 250 GiB");
    end(&mut cluster);
    let high1 = cluster.place("high1").expect("it has what was freed");
    bind(&mut cluster, "high1");
    cluster.settle(30 * SECOND);
    assert_eq!(evicted(&cluster).len(), 2, "now its namespace may have it");
    end(&mut cluster);
    assert_ne!(cluster.place("high2").expect("there is room"), high1);
}

#[test]
fn a_bound_that_comes_later_keeps_those_who_have_not_ended_yet() {
    let mut cluster = cluster(&[1]);
    for (name, seconds) in [("slow", 3600), ("quick", 30)] {
        run(&mut cluster, name, 40, 0, &json!({"spec": {"terminationGracePeriodSeconds": seconds}}));
    }
    wait(&mut cluster, "high", 80, 10);
    assert_eq!(evicted(&cluster), ["slow"]);
    cluster.annotate("ml", json!({"tranche.dev/max-share-memory": "90Gi"}));
    cluster.settle(5 * SECOND);
    end(&mut cluster);
    cluster.settle(MINUTE);
    assert_eq!(evicted(&cluster), ["slow"], "nobody ends for who may not have the room any more");
    assert_eq!(cluster.core.reserves.evictions.preempting.under_way().count(), 0);
}

/// Whoever is given an hour would make all others on its GPU end in vain, one GPU after another.
#[test]
fn who_is_given_more_time_than_others_are_waited_for_ends_first() {
    let mut cluster = cluster(&[1]);
    run(&mut cluster, "quick", 70, 0, &json!({}));
    run(&mut cluster, "slow", 10, 0, &json!({"spec": {"terminationGracePeriodSeconds": 86_400}}));
    wait(&mut cluster, "high", 80, 10);
    cluster.settle(9 * MINUTE);
    assert_eq!(evicted(&cluster), ["slow"]);
    cluster.drop_pod("slow", true);
    cluster.settle(SECOND);
    assert_eq!(evicted(&cluster), ["slow", "quick"]);
    end(&mut cluster);
    assert!(cluster.place("high").is_some());
}

#[test]
fn selectors_that_name_too_much_keep_the_pods_of_their_namespace() {
    for (budgets, ends) in [(5, true), (6, false)] {
        let mut cluster = cluster(&[1]);
        run(&mut cluster, "low", 60, 0, &json!({}));
        for nth in 0..budgets {
            let labels: serde_json::Map<_, _> = (0..100).map(|one| (format!("l{one}"), json!("x"))).collect();
            cluster.put_budget(("ml", &format!("b{nth}")), labels.into(), 1);
        }
        wait(&mut cluster, "high", 60, 10);
        cluster.settle(MINUTE);
        assert_eq!(!evicted(&cluster).is_empty(), ends, "{budgets} budgets with 200 words each");
        let told = cluster.core.recorder.take().1;
        assert_eq!(told.iter().any(|words| words.contains("more than 1024 labels")), !ends, "{told:?}");
    }
}

#[test]
fn who_asks_in_vain_many_times_takes_no_look_of_another_namespace() {
    let mut cluster = cluster(&[2]);
    run(&mut cluster, "top", 80, 100, &json!({}));
    run(&mut cluster, "low", 60, -10, &json!({}));
    // Two GPUs come free for nobody.
    for nth in 0..40 {
        let name = format!("vain{nth}");
        cluster.put_share(&name, json!({"memory": "70Gi"}), 2);
        cluster.put_pod(&name, &[&name], refused_at(0));
    }
    cluster.opt_in("team");
    moving::put_in(&mut cluster, ("team", "one"), ("60Gi", 1), "rs", refused_at(0));
    cluster.deliver(usize::MAX);
    cluster.round();
    assert_eq!(cluster.core.reserves.evictions.preempting.counts().begun, 1);
    cluster.settle(SECOND);
    assert_eq!(evicted(&cluster), ["low"]);
}

#[test]
fn who_is_seen_ending_after_an_eviction_without_an_answer_is_told() {
    let mut cluster = cluster(&[1]);
    run(&mut cluster, "low", 60, 0, &json!({}));
    cluster.core.recorder.take();
    ask(&mut cluster, "high", 60, 10, &refused());
    let begin = cluster.now;
    while cluster.now < begin + 5 * SECOND {
        cluster.deliver(usize::MAX);
        let next = cluster.round();
        while let Some(write) = cluster.writes.front() {
            if !matches!(write, Write::Evict(_)) {
                cluster.write(false);
                continue;
            }
            cluster.fail(Failure::Silent("no answer".to_owned()));
            let mut low = cluster.pods[&("ml".to_owned(), "low".to_owned())].clone();
            let ends = cluster.core.recorder.time_of(cluster.now + 30 * SECOND).unwrap();
            low.metadata.deletion_timestamp = Some(object(json!(ends.to_string())));
            cluster.store_pod(low);
        }
        cluster.now = next.unwrap_or(begin + MINUTE).max(cluster.now + Duration::from_millis(100));
    }
    let told = cluster.core.recorder.take().0;
    assert!(told.iter().any(|note| note.reason == "Preempted"), "{told:?}");
}

#[test]
fn nodes_where_nobody_may_end_hide_no_other() {
    const NODES: usize = 130;
    let mut cluster = Cluster::new(Rules { policy: Policy::Spread, ..rules() });
    for nth in 0..NODES {
        cluster.put_node(&format!("node-{nth:03}"), 1);
    }
    cluster.settle(SECOND);
    run(&mut cluster, "low", 60, 5, &json!({}));
    cluster.put_budget(("ml", "small"), json!({"app": "small"}), 0);
    let label = json!({"metadata": {"labels": {"app": "small"}}});
    for nth in 1..NODES {
        run(&mut cluster, &format!("small{nth:03}"), 1, 0, &label);
    }
    let nodes: BTreeSet<String> =
        cluster.claims.keys().filter_map(|(_, name)| Some(cluster.place(name)?.0)).collect();
    assert_eq!(nodes.len(), NODES, "one on each");
    wait(&mut cluster, "high", 80, 10);
    cluster.settle(MINUTE);
    assert_eq!(evicted(&cluster), ["low"]);
}

/// They are more important, come first, and have no turn in which anybody could end.
#[test]
fn units_over_the_bound_of_their_namespace_take_no_look_of_another() {
    let mut cluster = cluster(&[1]);
    run(&mut cluster, "low", 60, -10, &json!({}));
    for nth in 0..6 {
        let namespace = format!("over{nth}");
        cluster.opt_in(&namespace);
        cluster.annotate(&namespace, json!({"tranche.dev/max-share-memory": "1Gi"}));
        moving::put_in(&mut cluster, (&namespace, "over"), ("60Gi", 1), "rs", refused_at(20));
    }
    cluster.opt_in("team");
    moving::put_in(&mut cluster, ("team", "one"), ("60Gi", 1), "rs", refused_at(10));
    cluster.settle(3 * SECOND);
    assert_eq!(evicted(&cluster), ["low"]);
}

/// What one look may cost is less than what looking at all nodes costs.
#[test]
fn a_look_goes_on_where_the_one_before_came_to() {
    const NODES: usize = 260;
    let mut cluster = Cluster::new(Rules { policy: Policy::Spread, ..rules() });
    for nth in 0..NODES {
        cluster.put_node(&format!("node-{nth:03}"), 1);
    }
    cluster.settle(SECOND);
    run(&mut cluster, "low", 60, 5, &json!({}));
    for (name, gib, priority) in [("small", 20, 0), ("top", 50, 100)] {
        for nth in 1..NODES {
            run(&mut cluster, &format!("{name}{nth:03}"), gib, priority, &json!({}));
        }
    }
    wait(&mut cluster, "high", 60, 10);
    // Nothing changes meanwhile.
    cluster.settle(30 * SECOND);
    assert_eq!(evicted(&cluster), ["low"]);
}

#[test]
fn pods_without_a_share_do_not_make_those_with_one_spare() {
    let gang = json!({"metadata": {"annotations": {"tranche.dev/gang": "g", "tranche.dev/gang-size": "2"}}});
    let mut cluster = cluster(&[1]);
    for name in ["w1", "w2"] {
        ask(&mut cluster, name, 30, 0, &gang);
    }
    cluster.settle(SECOND);
    ["w1", "w2"].into_iter().for_each(|name| bind(&mut cluster, name));
    let node = cluster.place("w1").expect("it runs").0;
    for name in ["h1", "h2", "h3"] {
        let mut helper = json!({"spec": {"nodeName": node}});
        merge(&mut helper, &gang);
        cluster.put_pod(name, &[], helper);
    }
    cluster.settle(SECOND);
    wait(&mut cluster, "high", 40, 10);
    cluster.settle(5 * SECOND);
    let ended: BTreeSet<&str> = evicted(&cluster).into_iter().collect();
    assert!(ended.is_superset(&BTreeSet::from(["w1", "w2"])), "whole, or not at all: {ended:?}");
}
