//! Pods of lower priority end for pods of higher priority: who, how many, and when nobody does.

use std::collections::BTreeSet;
use std::time::Duration;

use serde_json::{Value, json};

use super::cluster::{Cluster, merge};
use super::preempting_told::told;
use super::walk::bind;
use crate::cluster::events::Note;
use crate::cluster::feed::{Change, WatchEvent};
use crate::cluster::pod_groups::PodGroupApi;
use crate::controller::config::Rules;
use crate::controller::write::{Failure, Write};

const SECOND: Duration = Duration::from_secs(1);

pub(super) fn rules() -> Rules {
    let long = Duration::from_secs(100_000);
    Rules { unused: long, stuck: long, ..Rules::default() }
}

/// Nodes with so many GPUs of 80 GiB each.
pub(super) fn cluster(gpus: &[u32]) -> Cluster {
    let mut cluster = Cluster::new(rules());
    for (nth, gpus) in gpus.iter().enumerate() {
        cluster.put_node(&format!("node-{nth}"), *gpus);
    }
    cluster.settle(SECOND);
    cluster
}

/// A pod that asks for so much memory of a GPU. `more`: of the pod.
pub(super) fn ask(cluster: &mut Cluster, name: &str, gib: u32, priority: i32, more: &Value) {
    cluster.put_share(name, json!({"memory": format!("{gib}Gi")}), 1);
    let mut pod = json!({"spec": {"priority": priority}});
    merge(&mut pod, more);
    cluster.put_pod(name, &[name], pod);
}

/// One that runs.
pub(super) fn run(cluster: &mut Cluster, name: &str, gib: u32, priority: i32, more: &Value) {
    ask(cluster, name, gib, priority, more);
    cluster.settle(SECOND);
    bind(cluster, name);
    cluster.settle(SECOND);
    assert!(cluster.place(name).is_some(), "{name} runs");
}

pub(super) fn refused() -> Value {
    json!({"status": {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]}})
}

/// One that its scheduler has tried in vain.
pub(super) fn wait(cluster: &mut Cluster, name: &str, gib: u32, priority: i32) {
    ask(cluster, name, gib, priority, &refused());
    cluster.settle(SECOND);
}

pub(super) fn evicted(cluster: &Cluster) -> Vec<&str> {
    cluster.evicted.iter().map(|(_, name)| name.as_str()).collect()
}

/// Those that were evicted end.
pub(super) fn end(cluster: &mut Cluster) {
    for pod in cluster.ending() {
        cluster.drop_pod(&pod, true);
    }
    cluster.settle(SECOND);
}

fn notes(cluster: &mut Cluster) -> Vec<Note> {
    cluster.core.recorder.take().0
}

/// Moves were looked for every 50 ms for whom others end already, for as long as these took to end.
#[test]
fn no_round_comes_of_itself_while_others_end() {
    let mut cluster = cluster(&[2]);
    for name in ["a", "b", "c", "d"] {
        run(&mut cluster, name, 40, 0, &json!({}));
    }
    wait(&mut cluster, "high", 60, 10);
    assert_eq!(evicted(&cluster).len(), 2);
    cluster.settle(10 * SECOND);
    let next = cluster.round().map(|next| next.saturating_sub(cluster.now));
    assert!(next.is_none_or(|next| next >= SECOND), "{next:?}");
}

#[test]
fn as_many_as_it_takes_end_and_the_room_is_kept_until_then() {
    let mut cluster = cluster(&[2]);
    for (name, gib, priority) in [("a", 40, 0), ("b", 40, 0), ("c", 40, 5), ("d", 40, 5)] {
        run(&mut cluster, name, gib, priority, &json!({}));
    }
    notes(&mut cluster);
    wait(&mut cluster, "high", 60, 10);
    assert_eq!(evicted(&cluster), ["a", "b"], "the least important, though all are lower");
    let told = notes(&mut cluster);
    let preempted = told.iter().find(|note| note.reason == "Preempted").unwrap();
    assert!(preempted.message.starts_with("gives 40960 MiB of node-0/gpu-"), "{}", preempted.message);
    assert!(preempted.message.contains("to pod high, of priority 10; its own is 0"), "{}", preempted.message);
    let preempts = told.iter().find(|note| note.reason == "Preempting").unwrap();
    assert!(
        preempts.message.starts_with("2 pods of lower priority end for it on node node-0"),
        "{}",
        preempts.message
    );
    // Who comes meanwhile does not get what the first of them leaves.
    ask(&mut cluster, "late", 40, 0, &json!({}));
    cluster.drop_pod("a", true);
    cluster.settle(SECOND);
    assert_eq!(cluster.place("late"), None);
    assert_eq!(evicted(&cluster), ["a", "b"], "nobody else ends meanwhile");
    end(&mut cluster);
    assert!(cluster.place("high").is_some());
    bind(&mut cluster, "high");
    cluster.settle(SECOND);
    let counts = &cluster.core.reserves.evictions.preempting.counts();
    assert_eq!((counts.begun, counts.served, counts.in_vain), (1, 1, 0));
    assert_eq!(cluster.core.reserves.counts(), (0, 0), "nothing is kept any more");
}

/// It would hold the room as long as an unbound claim may, while who had others end waits.
#[test]
fn who_came_before_with_the_same_priority_does_not_get_what_others_end_for() {
    let mut cluster = cluster(&[1]);
    run(&mut cluster, "low", 60, 0, &json!({}));
    let volume = json!({"status": {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
        "message": "0/1 nodes are available: persistentvolumeclaim \"disk\" not found. not found"}]}});
    ask(&mut cluster, "blocked", 60, 10, &volume);
    cluster.settle(5 * SECOND);
    wait(&mut cluster, "high", 60, 10);
    assert_eq!(evicted(&cluster), ["low"]);
    end(&mut cluster);
    assert_eq!((cluster.place("blocked"), cluster.place("high").is_some()), (None, true));
    bind(&mut cluster, "high");
    cluster.settle(SECOND);
    assert_eq!(cluster.core.reserves.counts(), (0, 0), "nothing is kept any more");
}

#[test]
fn names_of_others_pods_are_nobodys_business() {
    let mut cluster = cluster(&[1]);
    run(&mut cluster, "low", 60, 0, &json!({}));
    notes(&mut cluster);
    let mut claim = serde_json::to_value(cluster.claim("low")).unwrap();
    claim["metadata"] = json!({"name": "secret", "namespace": "other"});
    claim.as_object_mut().unwrap().remove("status");
    cluster.put_claim(claim);
    let mut pod = json!({"metadata": {"name": "secret", "namespace": "other"}, "spec": {"priority": 9,
        "containers": [{"name": "main"}], "resourceClaims": [{"name": "g", "resourceClaimName": "secret"}]}});
    merge(&mut pod, &refused());
    cluster.store_pod(serde_json::from_value(pod).unwrap());
    cluster.settle(SECOND);
    assert_eq!(evicted(&cluster), ["low"]);
    let told = notes(&mut cluster);
    let preempted = told.iter().find(|note| note.reason == "Preempted").unwrap();
    assert!(
        preempted.message.contains("to a pod of another namespace, of priority 9"),
        "{}",
        preempted.message
    );
    assert!(!preempted.message.contains("secret"), "{}", preempted.message);
}

#[test]
fn nobody_ends_for_who_may_not_or_has_nothing_of_it() {
    type Case = (&'static str, fn(&mut Cluster), Value, u32, i32);
    let never = json!({"spec": {"preemptionPolicy": "Never"}, "status": refused()["status"]});
    let elsewhere = json!({"spec": {"nodeSelector": {"zone": "a"}}, "status": refused()["status"]});
    let gated = json!({"spec": {"schedulingGates": [{"name": "wait"}]}, "status": refused()["status"]});
    let cases: [Case; 8] = [
        ("its policy is Never", |_| {}, never, 60, 10),
        ("its scheduler has not tried it", |_| {}, json!({}), 60, 10),
        ("it has the same priority", |_| {}, refused(), 60, 5),
        ("it asks for more than a GPU has", |_| {}, refused(), 90, 10),
        ("no node is for it", |_| {}, elsewhere, 60, 10),
        ("it is gated", |_| {}, gated, 60, 10),
        (
            "its namespace may not have more",
            |cluster| cluster.annotate("ml", json!({"tranche.dev/max-share-memory": "100Gi"})),
            refused(),
            60,
            10,
        ),
        ("it is switched off", |cluster| cluster.core.rules.preemption = false, refused(), 60, 10),
    ];
    for (why, change, more, gib, priority) in cases {
        let mut cluster = cluster(&[1]);
        run(&mut cluster, "low", 60, 5, &json!({}));
        change(&mut cluster);
        ask(&mut cluster, "high", gib, priority, &more);
        cluster.settle(120 * SECOND);
        assert_eq!(evicted(&cluster), [""; 0], "{why}");
        assert_eq!(cluster.place("high"), None, "{why}");
    }
}

#[test]
fn marks_and_budgets_keep_pods() {
    for mark in [
        json!({"metadata": {"annotations": {"volcano.sh/preemptable": "false"}}}),
        json!({"metadata": {"labels": {"kai.scheduler/preemptibility": "non-preemptible"}}}),
    ] {
        let mut cluster = cluster(&[1]);
        run(&mut cluster, "low", 60, 0, &mark);
        wait(&mut cluster, "high", 60, 10);
        assert_eq!(evicted(&cluster), [""; 0], "{mark}");
    }
    let mut cluster = cluster(&[2]);
    let guarded = json!({"metadata": {"labels": {"app": "db"}}});
    run(&mut cluster, "db", 60, 0, &guarded);
    run(&mut cluster, "web", 60, 3, &json!({}));
    cluster.put_budget(("ml", "db"), json!({"app": "db"}), 0);
    wait(&mut cluster, "high", 60, 10);
    assert_eq!(evicted(&cluster), ["web"], "the budget keeps the less important one");
    end(&mut cluster);
    wait(&mut cluster, "higher", 60, 9);
    assert_eq!(evicted(&cluster), ["web"]);
    cluster.put_budget(("ml", "db"), json!({"app": "db"}), 1);
    cluster.settle(2 * SECOND);
    assert_eq!(evicted(&cluster), ["web", "db"], "as soon as it lets one go");
}

#[test]
fn where_budgets_are_not_seen_the_answer_counts_and_no_second_pod_ends_for_nothing() {
    let mut cluster = cluster(&[1]);
    let guarded = json!({"metadata": {"labels": {"app": "db"}}});
    run(&mut cluster, "db", 40, 0, &guarded);
    run(&mut cluster, "web", 40, 0, &json!({}));
    cluster.put_budget(("ml", "db"), json!({"app": "db"}), 0);
    cluster.feed.clear();
    wait(&mut cluster, "high", 80, 10);
    cluster.settle(20 * SECOND);
    assert!(!evicted(&cluster).contains(&"db"));
    assert!(evicted(&cluster).len() <= 1, "{:?}", evicted(&cluster));
    let tried = cluster.evicted.len();
    cluster.settle(40 * SECOND);
    assert_eq!(cluster.evicted.len(), tried, "and again and again nobody ends for nothing");
}

#[test]
fn a_gang_ends_down_to_its_minimum_or_whole_wherever_its_pods_are() {
    let volcano = |name: &str| json!({"metadata": {"annotations": {"scheduling.k8s.io/group-name": name}}});
    let start = |minimum: u32| {
        let mut cluster = cluster(&[1, 1]);
        cluster.put_group(PodGroupApi::Volcano, "gang", json!({"spec": {"minMember": minimum}}));
        for name in ["g1", "g2", "g3", "g4"] {
            ask(&mut cluster, name, 40, 0, &volcano("gang"));
        }
        cluster.settle(5 * SECOND);
        ["g1", "g2", "g3", "g4"].iter().for_each(|name| bind(&mut cluster, name));
        cluster.settle(SECOND);
        cluster
    };
    let mut elastic = start(3);
    wait(&mut elastic, "high", 40, 10);
    assert_eq!(evicted(&elastic).len(), 1, "it can do without one");
    end(&mut elastic);
    assert!(elastic.place("high").is_some());
    let mut whole = start(4);
    wait(&mut whole, "high", 40, 10);
    let all: BTreeSet<&str> = evicted(&whole).into_iter().collect();
    assert_eq!(all, BTreeSet::from(["g1", "g2", "g3", "g4"]), "with less than its minimum it is of no use");
}

#[test]
fn a_gang_that_waits_whole_has_others_end_on_one_node_if_it_fits_there() {
    let mut cluster = cluster(&[2, 2]);
    for (name, priority) in [("a", 1), ("b", 1), ("c", 0), ("d", 0)] {
        run(&mut cluster, name, 80, priority, &json!({}));
    }
    let of_gang = |more: &Value| {
        let mut pod =
            json!({"metadata": {"annotations": {"tranche.dev/gang": "g", "tranche.dev/gang-size": "3"}}});
        merge(&mut pod, more);
        pod
    };
    for name in ["g1", "g2", "g3"] {
        ask(&mut cluster, name, 30, 10, &of_gang(&refused()));
    }
    cluster.settle(5 * SECOND);
    let ended: BTreeSet<String> = evicted(&cluster).into_iter().map(str::to_owned).collect();
    assert_eq!(ended.len(), 2, "three need two GPUs, on one node: {ended:?}");
    end(&mut cluster);
    let places: Vec<_> = ["g1", "g2", "g3"].map(|name| cluster.place(name)).into_iter().collect();
    assert!(places.iter().all(Option::is_some), "{places:?}");
    ["g1", "g2", "g3"].iter().for_each(|name| bind(&mut cluster, name));
    cluster.settle(SECOND);
    let counts = &cluster.core.reserves.evictions.preempting.counts();
    assert_eq!((counts.begun, counts.served, counts.in_vain), (1, 1, 0));
    // One of which a pod may not have others end has nobody end.
    let mut other = self::cluster(&[1]);
    run(&mut other, "low", 80, 0, &json!({}));
    ask(&mut other, "h1", 30, 10, &of_gang(&refused()));
    ask(&mut other, "h2", 30, 10, &of_gang(&json!({})));
    ask(&mut other, "h3", 10, 10, &of_gang(&refused()));
    other.settle(5 * SECOND);
    assert_eq!(evicted(&other), [""; 0]);
}

#[test]
fn what_is_ending_anyway_comes_first_also_for_a_new_leader() {
    let mut cluster = cluster(&[1]);
    run(&mut cluster, "a", 40, 0, &json!({}));
    run(&mut cluster, "b", 40, 0, &json!({}));
    wait(&mut cluster, "high", 40, 10);
    assert_eq!(evicted(&cluster).len(), 1);
    cluster.fail_over(rules());
    cluster.settle(30 * SECOND);
    assert_eq!(evicted(&cluster).len(), 1, "the new leader sees that it ends");
    end(&mut cluster);
    assert!(cluster.place("high").is_some());
}

#[test]
fn a_pod_that_is_not_bound_makes_its_namespace_rest() {
    let mut cluster = cluster(&[4]);
    cluster.core.rules.stuck = Duration::from_secs(60);
    for nth in 0..4 {
        run(&mut cluster, &format!("low{nth}"), 80, 0, &json!({}));
    }
    // Its scheduler keeps it out for a reason that nobody here knows. Those that end come back with other names.
    ask(&mut cluster, "high", 80, 10, &refused());
    let mut minutes = Vec::new();
    for minute in 0..120 {
        cluster.settle(60 * SECOND);
        let ended = cluster.ending();
        minutes.extend(ended.iter().map(|_| minute));
        for name in ended {
            cluster.drop_pod(&name, true);
            let again = format!("{name}-again");
            ask(&mut cluster, &again, 80, 0, &json!({}));
        }
        cluster.settle(SECOND);
        let lows: Vec<String> =
            cluster.pods.keys().map(|(_, name)| name.clone()).filter(|n| n.starts_with("low")).collect();
        lows.iter().for_each(|name| bind(&mut cluster, name));
    }
    assert!(!minutes.is_empty() && minutes.len() <= 8, "evicted in the minutes {minutes:?}");
    assert!(cluster.core.reserves.evictions.preempting.counts().in_vain >= 1);
}

#[test]
fn after_the_rest_others_end_though_nothing_has_changed() {
    let mut cluster = cluster(&[2]);
    run(&mut cluster, "low1", 80, 0, &json!({}));
    run(&mut cluster, "low2", 80, 0, &json!({}));
    wait(&mut cluster, "first", 80, 10);
    assert_eq!(evicted(&cluster).len(), 1);
    // It is gone before it is bound, and so in vain. What it leaves goes to somebody else.
    cluster.drop_pod("first", true);
    ask(&mut cluster, "third", 80, 20, &json!({}));
    end(&mut cluster);
    assert!(cluster.place("third").is_some());
    wait(&mut cluster, "second", 80, 10);
    assert_eq!(evicted(&cluster).len(), 1, "the namespace rests");
    cluster.settle(90 * SECOND);
    assert_eq!(evicted(&cluster).len(), 2);
}

#[test]
fn an_eviction_that_is_not_answered_is_asked_for_again_and_one_that_is_refused_is_not() {
    let mut cluster = cluster(&[1]);
    run(&mut cluster, "low", 60, 0, &json!({}));
    ask(&mut cluster, "high", 60, 10, &refused());
    let evictions = |cluster: &mut Cluster| {
        for _ in 0..20 {
            cluster.deliver(usize::MAX);
            cluster.round();
            while cluster.writes.front().is_some_and(|write| !matches!(write, Write::Evict(_))) {
                cluster.write(false);
            }
            if !cluster.writes.is_empty() {
                return true;
            }
            cluster.now += SECOND / 4;
        }
        false
    };
    assert!(evictions(&mut cluster));
    cluster.fail(Failure::Silent("no answer".to_owned()));
    assert!(evictions(&mut cluster), "asked for again");
    cluster.fail(Failure::Refused("forbidden".to_owned()));
    assert!(!evictions(&mut cluster), "not at once");
    assert_eq!(evicted(&cluster), [""; 0]);
    assert_eq!(cluster.core.reserves.counts(), (0, 0), "nothing is kept for it");
}

#[test]
fn where_only_cpu_lacks_the_share_is_placed_and_the_scheduler_preempts() {
    let cpus = |cpus: u32| json!({"spec": {"containers": [{"name": "main", "resources": {"requests": {"cpu": cpus.to_string()}}}]}});
    let start = |more: Value, nodes: &[u32]| {
        let mut cluster = cluster(nodes);
        let mut with_gpus = cluster.nodes["node-0"].clone();
        with_gpus.metadata.labels = Some([("gpus".to_owned(), "yes".to_owned())].into());
        cluster.nodes.insert("node-0".to_owned(), with_gpus.clone());
        cluster.feed.push_back(Change::Node(WatchEvent::Stored(Box::new(with_gpus))));
        let mut low = cpus(30);
        merge(&mut low, &json!({"spec": {"nodeName": "node-0", "priority": 0}}));
        cluster.put_pod("low", &[], low);
        let mut high = cpus(8);
        merge(&mut high, &refused());
        merge(&mut high, &more);
        ask(&mut cluster, "high", 20, 10, &high);
        cluster.settle(5 * SECOND);
        assert_eq!(evicted(&cluster), [""; 0], "whom the scheduler preempts is up to it");
        cluster
    };
    let one = start(json!({}), &[1]);
    assert_eq!(one.place("high").unwrap().0, "node-0");
    assert_eq!(start(json!({"spec": {"schedulerName": "another"}}), &[1]).place("high"), None);
    // Where another node has the room, though no GPU, kube-scheduler preempts nobody.
    let mut two = start(json!({}), &[1, 0]);
    assert_eq!(two.place("high"), None);
    let told = told(&mut two, "high").unwrap();
    assert_eq!(told.prospect.as_str(), "other-nodes");
    assert_eq!(
        told.to_string(),
        "nobody ends for it: on node node-0 only CPU, memory or the number of pods lacks, and pods of lower priority have \
         it, but kube-scheduler preempts nobody there as long as another node has the room, such as node-1, with or \
         without GPUs: give the pod a nodeSelector that no such node meets"
    );
    let chosen = start(json!({"spec": {"nodeSelector": {"gpus": "yes"}}}), &[1, 0]);
    assert_eq!(chosen.place("high").unwrap().0, "node-0");
}

/// What has a place is no reason for anybody to end: the others of the gang need one beside it.
#[test]
fn a_gang_of_which_some_pods_have_room_has_others_end_for_the_rest() {
    for (priority, gpus, size, ends) in
        [(0, [1, 1], 2, 1), (20, [1, 1], 2, 0), (0, [1, 2], 3, 1), (0, [1, 1], 3, 0)]
    {
        let mut cluster = cluster(&gpus);
        run(&mut cluster, "low", 60, priority, &json!({}));
        let mut gang = json!({"metadata": {"annotations": {"tranche.dev/gang": "g"}}});
        gang["metadata"]["annotations"]["tranche.dev/gang-size"] = size.to_string().into();
        merge(&mut gang, &refused());
        let names: Vec<String> = (0..size).map(|nth| format!("g{nth}")).collect();
        names.iter().for_each(|name| ask(&mut cluster, name, 60, 10, &gang));
        cluster.settle(5 * SECOND);
        assert_eq!(evicted(&cluster).len(), ends, "{size} on {gpus:?}, beside priority {priority}");
        // What is free for the gang is kept as what comes free is.
        ask(&mut cluster, "late", 60, 0, &json!({}));
        cluster.settle(SECOND);
        assert_eq!(cluster.place("late").is_none(), ends > 0, "{size} on {gpus:?}");
        if ends > 0 {
            end(&mut cluster);
            let placed = names.iter().filter(|name| cluster.place(name).is_some()).count();
            assert_eq!(placed, size, "on {gpus:?}");
            names.iter().for_each(|name| bind(&mut cluster, name));
            cluster.settle(SECOND);
            let counts = &cluster.core.reserves.evictions.preempting.counts();
            assert_eq!((counts.begun, counts.served, counts.in_vain), (1, 1, 0));
            assert_eq!(cluster.core.reserves.counts(), (0, 0), "nothing is kept any more");
        }
        cluster.check();
    }
}

#[test]
fn a_gang_of_which_the_scheduler_refuses_one_pod_has_others_end() {
    let says = |reason: &str| {
        json!({"metadata": {"annotations": {"tranche.dev/gang": "g", "tranche.dev/gang-size": "2"}},
            "status": {"conditions": [{"type": "PodScheduled", "status": "False", "reason": reason}]}})
    };
    // Volcano's words.
    for (one, other, ends) in [
        ("Undetermined", "Unschedulable", 1),
        ("Schedulable", "Unschedulable", 1),
        ("Undetermined", "Undetermined", 0),
        ("SchedulerError", "Unschedulable", 0),
    ] {
        let mut cluster = cluster(&[1]);
        run(&mut cluster, "low", 60, 0, &json!({}));
        ask(&mut cluster, "one", 30, 10, &says(one));
        ask(&mut cluster, "two", 30, 10, &says(other));
        cluster.settle(5 * SECOND);
        assert_eq!(evicted(&cluster).len(), ends, "{one}, {other}");
    }
}
