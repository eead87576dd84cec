//! Gangs as those mean them who put pods into groups: so many start together, the rest one by one.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::cluster::Cluster;
use super::scenes::{LONG, MOMENT, SECOND, cluster, rules, share};
use super::told::told;
use crate::cluster::feed::{Change, WatchEvent};
use crate::cluster::pod_groups::PodGroupApi;
use crate::controller::config::Rules;

/// A pod of a group, with a claim of its own name that takes most of a GPU.
fn member(cluster: &mut Cluster, name: &str, more: &Value) {
    cluster.put_share(name, json!({"memory": "50Gi"}), 1);
    cluster.put_pod(name, &[name], more.clone());
}

fn placed(cluster: &Cluster, prefix: &str) -> usize {
    let names: BTreeSet<&String> = cluster.claims.keys().map(|(_, name)| name).collect();
    names.into_iter().filter(|name| name.starts_with(prefix) && cluster.place(name).is_some()).count()
}

/// How pods name their group, and how that says how many start together.
fn ways(minimum: u32) -> Vec<(Value, PodGroupApi, Value)> {
    let annotation = |name: &str| json!({"metadata": {"annotations": {name: "g"}}});
    let members = json!({"spec": {"minMember": minimum}});
    let gang = json!({"spec": {"schedulingPolicy": {"gang": {"minCount": minimum}}}});
    let typed = json!({"spec": {"schedulingGroup": {"podGroupName": "g"}}});
    let volcano = |mut pod: Value| {
        super::cluster::merge(&mut pod, &json!({"spec": {"schedulerName": "volcano"}}));
        pod
    };
    vec![
        (volcano(annotation("scheduling.k8s.io/group-name")), PodGroupApi::Volcano, members.clone()),
        (annotation("scheduling.volcano.sh/group-name"), PodGroupApi::Volcano, members.clone()),
        (annotation("pod-group-name"), PodGroupApi::Kai, members),
        (typed.clone(), PodGroupApi::KubernetesV1Beta1, gang.clone()),
        (typed.clone(), PodGroupApi::KubernetesV1Alpha3, gang.clone()),
        (typed, PodGroupApi::KubernetesV1Alpha2, gang),
    ]
}

#[test]
fn so_many_start_together_as_the_podgroup_says_and_the_rest_one_by_one() {
    for (pod, api, group) in ways(2) {
        let mut cluster = cluster(2, 2);
        cluster.put_group(api, "g", group.clone());
        (0..5).for_each(|nth| member(&mut cluster, &format!("m{nth}"), &pod));
        cluster.settle(LONG);
        assert_eq!(placed(&cluster, "m"), 4, "{api:?}: four have room");
        cluster.check();
        cluster.put_node("node-2", 1);
        cluster.settle(LONG);
        assert_eq!(placed(&cluster, "m"), 5, "{api:?}: the last one comes by itself");
        cluster.check();
    }
}

#[test]
fn fewer_than_start_together_get_nothing() {
    for (pod, api, group) in ways(5) {
        let mut cluster = cluster(2, 2);
        cluster.put_group(api, "g", group.clone());
        (0..5).for_each(|nth| member(&mut cluster, &format!("m{nth}"), &pod));
        cluster.settle(LONG);
        assert_eq!(placed(&cluster, "m"), 0, "{api:?}: four have room, five start together");
        // Its owner changes its mind.
        let mut less = group.clone();
        let fields = ["/spec/minMember", "/spec/schedulingPolicy/gang/minCount"];
        fields.iter().filter_map(|at| less.pointer_mut(at).map(|one| *one = json!(4))).count();
        assert_ne!(less, group);
        cluster.put_group(api, "g", less);
        cluster.settle(LONG);
        assert_eq!(placed(&cluster, "m"), 4, "{api:?}");
        cluster.check();
    }
}

/// Volcano and KAI put every Deployment and Job into a group; Kubernetes has the policy `basic`.
#[test]
fn a_group_of_which_each_starts_by_itself_is_no_gang() {
    let basic = json!({"spec": {"schedulingPolicy": {"basic": {}}}});
    let ways = ways(1).into_iter().flat_map(|(pod, api, group)| {
        let kubernetes = group.pointer("/spec/schedulingPolicy").is_some();
        let second = kubernetes.then(|| (pod.clone(), api, basic.clone()));
        std::iter::once((pod, api, group)).chain(second)
    });
    for (pod, api, group) in ways {
        let mut cluster = cluster(1, 3);
        cluster.put_group(api, "g", group.clone());
        (0..5).for_each(|nth| member(&mut cluster, &format!("m{nth}"), &pod));
        cluster.settle(LONG);
        assert_eq!(placed(&cluster, "m"), 3, "{api:?} {group}");
        cluster.check();
    }
}

#[test]
fn the_annotation_says_how_many_start_together_too() {
    let mut cluster = cluster(2, 2);
    let gang = json!({"metadata": {"annotations": {"tranche.dev/gang": "g", "tranche.dev/gang-size": "2"}}});
    (0..5).for_each(|nth| member(&mut cluster, &format!("m{nth}"), &gang));
    cluster.settle(LONG);
    assert_eq!(placed(&cluster, "m"), 4);
    // Kueue counts all of a group.
    let mut kueue = super::scenes::cluster(2, 2);
    let group = json!({"metadata": {"labels": {"kueue.x-k8s.io/pod-group-name": "g"},
        "annotations": {"kueue.x-k8s.io/pod-group-total-count": "5"}}});
    (0..5).for_each(|nth| member(&mut kueue, &format!("m{nth}"), &group));
    kueue.settle(LONG);
    assert_eq!(placed(&kueue, "m"), 0, "four have room, five are one group");
    kueue.put_node("node-2", 1);
    kueue.settle(LONG);
    assert_eq!(placed(&kueue, "m"), 5);
}

/// Volcano tries them in that order, and binds none where one of the first has no share.
#[test]
fn the_first_of_volcanos_pods_are_those_with_the_lowest_numbers() {
    let pod = json!({"metadata": {"annotations": {"scheduling.k8s.io/group-name": "g"}}});
    let mut cluster = cluster(1, 3);
    cluster.put_group(PodGroupApi::Volcano, "g", json!({"spec": {"minMember": 2}}));
    for nth in (0..12).rev() {
        member(&mut cluster, &format!("g-w-{nth}"), &pod);
        cluster.settle(SECOND / 2);
    }
    cluster.settle(LONG);
    let first = ["g-w-0", "g-w-1", "g-w-2"].map(|name| cluster.place(name).is_some());
    assert_eq!((first, placed(&cluster, "g-w-")), ([true; 3], 3));
}

/// KAI tries the oldest first, of the same second the one with the lowest UID, and no other before that one is bound.
#[test]
fn the_first_of_kais_pods_are_the_oldest_whenever_they_come() {
    let pod = |created: &str| {
        json!({"metadata": {"annotations": {"pod-group-name": "g"}, "creationTimestamp": created},
            "spec": {"schedulerName": "kai-scheduler"}})
    };
    let seconds = |nth: usize| format!("2026-08-01T10:00:{nth:02}Z");
    let mut cluster = cluster(1, 5);
    cluster.put_group(PodGroupApi::Kai, "g", json!({"spec": {"minMember": 3}}));
    for nth in (0..7).rev() {
        member(&mut cluster, &format!("m{nth}"), &pod(&seconds(nth)));
        cluster.settle(SECOND / 2);
        assert_eq!(placed(&cluster, "m"), 0, "older ones may be still to come");
    }
    cluster.settle(3 * SECOND);
    let first = (0..5).map(|nth| cluster.place(&format!("m{nth}")).is_some());
    assert_eq!((first.collect::<Vec<_>>(), placed(&cluster, "m")), (vec![true; 5], 5));
    // Of another whose pods come for ever some start all the same.
    let mut endless = super::scenes::cluster(2, 5);
    endless.put_group(PodGroupApi::Kai, "g", json!({"spec": {"minMember": 3}}));
    for nth in 0..24 {
        member(&mut endless, &format!("m{nth}"), &pod(&seconds(nth)));
        endless.settle(SECOND / 2);
    }
    assert_eq!(placed(&endless, "m"), 10, "after 10 s it waits for no more");
}

/// Each of them starts by itself, so none is waited for, and the youngest come first here.
#[test]
fn a_pod_of_kais_gives_its_share_to_an_older_one_of_its_group_that_has_none() {
    let pod = |nth: usize| {
        let created = format!("2026-08-01T10:00:{nth:02}Z");
        let labels = json!({"batch.kubernetes.io/job-completion-index": nth.to_string()});
        json!({"metadata": {"annotations": {"pod-group-name": "g"}, "creationTimestamp": created, "labels": labels},
            "spec": {"schedulerName": "kai-scheduler"}})
    };
    let with = |cluster: &Cluster| {
        (0..7).filter(|nth| cluster.place(&format!("m{nth}")).is_some()).collect::<Vec<usize>>()
    };
    let mut cluster = cluster(1, 5);
    cluster.put_group(PodGroupApi::Kai, "g", json!({"spec": {"minMember": 1}}));
    for nth in (0..7).rev() {
        member(&mut cluster, &format!("m{nth}"), &pod(nth));
        cluster.settle(SECOND / 2);
    }
    assert_eq!(with(&cluster), [2, 3, 4, 5, 6]);
    cluster.settle(10 * SECOND);
    assert_eq!(with(&cluster), [0, 1, 2, 3, 4], "KAI binds none of them before the oldest");
    let words = told(&mut cluster).join("\n");
    assert!(
        words.contains("the allocation is taken back: an older pod of its group waits for the same"),
        "{words}"
    );
    cluster.check();
    // Who asks for something else may wait for something else.
    let mut other = super::scenes::cluster(1, 5);
    other.put_group(PodGroupApi::Kai, "g", json!({"spec": {"minMember": 1}}));
    for nth in (1..7).rev() {
        member(&mut other, &format!("m{nth}"), &pod(nth));
        other.settle(SECOND / 2);
    }
    assert_eq!(with(&other), [2, 3, 4, 5, 6]);
    other.drop_pod("m1", true);
    // Nor do those give way to it that it cannot follow.
    let listens = json!([{"name": "main", "ports": [{"containerPort": 80, "hostPort": 80}]}]);
    other.put_pod("web", &[], json!({"spec": {"nodeName": "node-0", "containers": listens}}));
    for keeps_it_off in
        [json!({"nodeSelector": {"kubernetes.io/hostname": "nowhere"}}), json!({"containers": listens})]
    {
        let mut elsewhere = pod(1);
        super::cluster::merge(&mut elsewhere, &json!({"spec": keeps_it_off}));
        member(&mut other, "m1", &elsewhere);
        other.settle(10 * SECOND);
        assert_eq!(with(&other), [2, 3, 4, 5, 6]);
        let words = told(&mut other).join("\n");
        assert!(!words.contains("taken back"), "{words}");
        other.drop_pod("m1", true);
    }
    other.put_share("m0", json!({"memory": "60Gi"}), 1);
    other.put_pod("m0", &["m0"], pod(0));
    other.settle(10 * SECOND);
    assert_eq!(with(&other), [2, 3, 4, 5, 6]);
}

#[test]
fn each_part_of_a_gang_has_its_number() {
    let of_volcano = |task: &str| json!({"metadata": {"annotations": {"scheduling.k8s.io/group-name": "g", "volcano.sh/task-spec": task}}});
    let of_kai = |part: &str| json!({"metadata": {"annotations": {"pod-group-name": "g"}, "labels": {"kai.scheduler/subgroup-name": part}}});
    let tasks = json!({"spec": {"minMember": 3, "minTaskMember": {"master": 1, "worker": 2}}});
    let groups = json!({"spec": {"minMember": 3, "subGroups": [
        {"name": "all"}, {"name": "master", "minMember": 1, "parent": "all"},
        {"name": "worker", "minMember": 2, "parent": "all"}]}});
    for (api, group) in [(PodGroupApi::Volcano, tasks), (PodGroupApi::Kai, groups)] {
        let pod = |part: &str| match api {
            PodGroupApi::Volcano => of_volcano(part),
            _ => of_kai(part),
        };
        let mut cluster = cluster(1, 3);
        cluster.put_group(api, "g", group);
        (0..4).for_each(|nth| member(&mut cluster, &format!("worker-{nth}"), &pod("worker")));
        cluster.settle(LONG);
        assert_eq!(placed(&cluster, "worker"), 0, "{api:?}: the master is missing");
        member(&mut cluster, "master", &pod("master"));
        cluster.settle(LONG);
        assert_eq!((placed(&cluster, "worker"), placed(&cluster, "master")), (2, 1), "{api:?}");
        cluster.check();
    }
}

/// A JobSet of KAI's whose jobs start in their order: the workers come once the leader runs.
#[test]
fn a_gang_that_needs_some_of_its_parts_starts_with_those_that_are_there() {
    let of = |part: &str| json!({"metadata": {"annotations": {"pod-group-name": "g"}, "labels": {"kai.scheduler/subgroup-name": part}}});
    let parts = json!([
        {"name": "leader", "minSubGroup": 1}, {"name": "leader-0", "minMember": 1, "parent": "leader"},
        {"name": "worker", "minSubGroup": 2}, {"name": "worker-0", "minMember": 2, "parent": "worker"},
        {"name": "worker-1", "minMember": 2, "parent": "worker"}]);
    for (needed, alone) in [(json!(1), 1), (json!(2), 0), (json!(null), 0)] {
        let mut cluster = cluster(1, 5);
        cluster.put_group(
            PodGroupApi::Kai,
            "g",
            json!({"spec": {"minSubGroup": needed, "subGroups": parts}}),
        );
        member(&mut cluster, "leader", &of("leader-0"));
        cluster.settle(LONG);
        assert_eq!(placed(&cluster, "leader"), alone, "{needed} of two parts are needed");
        (0..4).for_each(|nth| {
            member(&mut cluster, &format!("worker-{nth}"), &of(&format!("worker-{}", nth / 2)))
        });
        cluster.settle(LONG);
        assert_eq!((placed(&cluster, "leader"), placed(&cluster, "worker")), (1, 4), "{needed}");
        cluster.check();
    }
    // A part that needs none of its pods is no obstacle.
    let mut cluster = cluster(1, 2);
    let group = json!({"minSubGroup": 2, "subGroups": [{"name": "a", "minMember": 2}, {"name": "b", "minMember": 0}]});
    cluster.put_group(PodGroupApi::Kai, "g", json!({"spec": group}));
    (0..2).for_each(|nth| member(&mut cluster, &format!("a-{nth}"), &of("a")));
    cluster.settle(LONG);
    assert_eq!(placed(&cluster, "a"), 2);
}

#[test]
fn nothing_is_placed_for_a_scheduler_that_groups_pods_before_the_group_is_known() {
    let (by, group) = ("volcano", json!({"spec": {"minMember": 1}}));
    let mut pod = json!({"spec": {"schedulerName": by}});
    let mut cluster = cluster(1, 1);
    member(&mut cluster, "a", &pod);
    cluster.settle(LONG);
    assert_eq!(placed(&cluster, "a"), 0, "it has no group yet");
    let words = told(&mut cluster).join("\n");
    assert!(words.contains("scheduler volcano puts its pods into PodGroups"), "{words}");
    let uid = cluster.pods[&("ml".to_owned(), "a".to_owned())].metadata.uid.clone();
    pod["metadata"] = json!({"uid": uid, "annotations": {"scheduling.k8s.io/group-name": "g"}});
    cluster.put_pod("a", &["a"], pod.clone());
    cluster.settle(3 * LONG);
    assert_eq!(placed(&cluster, "a"), 0, "its group does not exist yet");
    let words = told(&mut cluster).join("\n");
    assert!(words.contains("PodGroup g, which the pod names, does not exist yet"), "{words}");
    cluster.put_group(PodGroupApi::Volcano, "g", group.clone());
    cluster.settle(SECOND);
    assert_eq!(placed(&cluster, "a"), 1);
    // Where the scheduler is not named, as where it is another, nobody waits.
    let mut other = Cluster::new(Rules { grouping_schedulers: vec!["batch".to_owned()], ..rules() });
    other.put_node("node-0", 1);
    member(&mut other, "a", &json!({"spec": {"schedulerName": by}}));
    other.settle(LONG);
    assert_eq!(placed(&other, "a"), 1);
}

/// The group is made anew while a pod of it waits.
#[test]
fn a_podgroup_that_goes_and_comes_again_is_heard() {
    let mut cluster = cluster(1, 1);
    let pod = json!({"metadata": {"annotations": {"scheduling.k8s.io/group-name": "g"}}, "spec": {"schedulerName": "volcano"}});
    cluster.put_group(PodGroupApi::Volcano, "g", json!({"spec": {"minMember": 2}}));
    member(&mut cluster, "a", &pod);
    cluster.settle(LONG);
    cluster.drop_group(PodGroupApi::Volcano, "g");
    cluster.settle(LONG);
    assert_eq!(placed(&cluster, "a"), 0);
    cluster.put_group(PodGroupApi::Volcano, "g", json!({"spec": {"minMember": 1}}));
    cluster.settle(LONG);
    assert_eq!(placed(&cluster, "a"), 1);
}

#[test]
fn podgroups_that_cannot_be_listed_keep_nobody_else_waiting() {
    let mut cluster = Cluster::new(rules());
    cluster.put_node("node-0", 2);
    cluster
        .feed
        .retain(|change| !matches!(change, Change::PodGroup(PodGroupApi::Volcano, WatchEvent::Complete)));
    member(&mut cluster, "a", &json!({"metadata": {"annotations": {"scheduling.k8s.io/group-name": "g"}}}));
    share(&mut cluster, "b", "10Gi");
    cluster.settle(LONG);
    assert_eq!((placed(&cluster, "a"), placed(&cluster, "b")), (0, 1));
    let words = told(&mut cluster).join("\n");
    assert!(words.contains("podgroups.scheduling.volcano.sh cannot be listed"), "{words}");
    // It is well again: there is no such group, and as many start together as there are.
    cluster.feed.push_back(Change::PodGroup(PodGroupApi::Volcano, WatchEvent::Anew));
    cluster.feed.push_back(Change::PodGroup(PodGroupApi::Volcano, WatchEvent::Complete));
    cluster.settle(LONG);
    assert_eq!(placed(&cluster, "a"), 1);
}

#[test]
fn a_podgroup_over_its_queues_limit_is_left_alone_until_it_is_not() {
    let over = json!({"spec": {"minMember": 1}, "status": {"schedulingConditions": [{
        "type": "UnschedulableOnNodePool", "status": "True",
        "reasons": [{"reason": "OverLimit", "message": "queue team-a has 2 of 2 GPUs"}]}]}});
    let pod = json!({"metadata": {"annotations": {"pod-group-name": "g"}}, "spec": {"schedulerName": "kai-scheduler"}});
    let mut cluster = cluster(1, 1);
    cluster.put_group(PodGroupApi::Kai, "g", over.clone());
    member(&mut cluster, "a", &pod);
    cluster.settle(LONG);
    assert_eq!(placed(&cluster, "a"), 0);
    let words = told(&mut cluster).join("\n");
    assert!(words.contains("kept out by its queue (OverLimit: queue team-a has 2 of 2 GPUs)"), "{words}");
    cluster.put_group(PodGroupApi::Kai, "g", json!({"spec": {"minMember": 1}}));
    cluster.settle(SECOND);
    assert_eq!(placed(&cluster, "a"), 1);
    // What it has stays its own, and what is said then is older than that.
    cluster.put_group(PodGroupApi::Kai, "g", over);
    cluster.settle(LONG);
    assert_eq!(placed(&cluster, "a"), 1);
}

/// Volcano tries no pod of it.
#[test]
fn a_podgroup_that_volcanos_queue_has_not_let_in_is_left_alone_until_it_is() {
    let group = |phase: &str| json!({"spec": {"minMember": 1}, "status": {"phase": phase}});
    for (scheduler, waits) in [("volcano", true), ("another", true), ("default-scheduler", false)] {
        let pod = json!({"metadata": {"annotations": {"scheduling.k8s.io/group-name": "g"}}, "spec": {"schedulerName": scheduler}});
        let mut cluster = cluster(1, 1);
        cluster.put_group(PodGroupApi::Volcano, "g", group("Pending"));
        member(&mut cluster, "a", &pod);
        cluster.settle(LONG);
        assert_eq!(placed(&cluster, "a"), usize::from(!waits), "{scheduler}");
        if waits {
            let words = told(&mut cluster).join("\n");
            assert!(words.contains("PodGroup g is kept out by its queue (its phase is Pending)"), "{words}");
        }
        cluster.put_group(PodGroupApi::Volcano, "g", group("Inqueue"));
        cluster.settle(SECOND);
        assert_eq!(placed(&cluster, "a"), 1, "{scheduler}");
        cluster.put_group(PodGroupApi::Volcano, "g", group("Pending"));
        cluster.settle(SECOND);
        assert_eq!(placed(&cluster, "a"), 1, "what it has stays its own");
    }
}

/// Of two gangs of four there is room for one. Their pods come two by two, in turns.
#[test]
fn of_two_gangs_whose_pods_come_in_turns_one_starts_whole() {
    for seed in 0..100 {
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut cluster = cluster(2, 2);
        for gang in ["a", "b"] {
            cluster.put_group(PodGroupApi::Volcano, gang, json!({"spec": {"minMember": 4}}));
        }
        let mut batches = vec![("a", 0), ("b", 0), ("a", 2), ("b", 2)];
        rng.shuffle(&mut batches);
        for (gang, first) in batches {
            let pod = json!({"metadata": {"annotations": {"scheduling.k8s.io/group-name": gang}},
                "spec": {"schedulerName": "volcano"}});
            (first..first + 2).for_each(|nth| member(&mut cluster, &format!("{gang}{nth}"), &pod));
            cluster.settle(rng.u32(0..160) * MOMENT);
        }
        cluster.settle(10 * SECOND);
        let mut both = [placed(&cluster, "a"), placed(&cluster, "b")];
        both.sort_unstable();
        assert_eq!(both, [0, 4], "seed {seed}");
        cluster.check();
    }
}

/// Somebody takes the share of one away before any of them is bound: it may not go where it was.
#[test]
fn a_gang_that_loses_a_member_before_any_is_bound_is_taken_back_whole() {
    for bound in [false, true] {
        let mut cluster = cluster(1, 2);
        cluster.put_group(PodGroupApi::Volcano, "g", json!({"spec": {"minMember": 2}}));
        let pod = json!({"metadata": {"annotations": {"scheduling.k8s.io/group-name": "g"}}});
        ["m0", "m1"].iter().for_each(|name| member(&mut cluster, name, &pod));
        cluster.settle(LONG);
        assert_eq!(placed(&cluster, "m"), 2);
        if bound {
            super::walk::bind(&mut cluster, "m1");
            cluster.settle(SECOND);
        }
        let mut claim = cluster.claim("m0").clone();
        claim.status.get_or_insert_default().allocation = None;
        cluster.store(claim);
        cluster.settle(5 * SECOND);
        // The node has refused m0 for a while, and there is no other.
        assert_eq!(placed(&cluster, "m"), usize::from(bound), "bound: {bound}");
        cluster.put_node("node-1", 2);
        cluster.settle(LONG);
        assert_eq!(placed(&cluster, "m"), 2, "bound: {bound}");
        cluster.check();
    }
}

/// Of four that start together three have done their work; the last one failed and is made anew.
#[test]
fn pods_that_have_done_their_work_count() {
    let mut cluster = cluster(1, 1);
    let group =
        json!({"spec": {"minMember": 4, "minTaskMember": {"a": 1, "b": 3}}, "status": {"succeeded": 3}});
    cluster.put_group(PodGroupApi::Volcano, "g", group);
    let pod = json!({"metadata": {"annotations": {"scheduling.k8s.io/group-name": "g"}}});
    member(&mut cluster, "m3-again", &pod);
    cluster.settle(LONG);
    assert_eq!(placed(&cluster, "m"), 1);
}

/// Its numbers are a tenant's words.
#[test]
fn numbers_without_sense_cost_their_own_gang_alone() {
    for spec in [
        json!({"minMember": i64::MAX}),
        json!({"minMember": i64::MIN}),
        json!({"minMember": 2, "minTaskMember": {"": i64::MAX, "b": i64::MAX}}),
        json!({"subGroups": [{"name": "a", "parent": "a", "minMember": -4}]}),
        json!({"minSubGroup": i64::MAX, "subGroups": [{"name": "a", "minMember": i64::MAX}, {"name": "a", "parent": "a"}]}),
    ] {
        for api in [PodGroupApi::Volcano, PodGroupApi::Kai] {
            let mut cluster = cluster(1, 2);
            cluster.put_group(api, "g", json!({"spec": spec}));
            for name in ["scheduling.k8s.io/group-name", "pod-group-name"] {
                let at = format!("m-{}", name.len());
                member(&mut cluster, &at, &json!({"metadata": {"annotations": {name: "g"}}}));
            }
            share(&mut cluster, "b", "10Gi");
            cluster.settle(LONG);
            assert_eq!(placed(&cluster, "b"), 1, "{api:?} {spec}");
            cluster.check();
        }
    }
}

/// Its queue is at its limit: wherever its share would be, nobody binds it.
#[test]
fn a_pod_that_its_scheduler_keeps_out_has_a_gpu_less_often_each_time() {
    for scheduler in ["volcano", "another"] {
        let mut cluster = cluster(4, 1);
        cluster.put_group(PodGroupApi::Volcano, "g", json!({"spec": {"minMember": 1}}));
        let pod = json!({"metadata": {"annotations": {"scheduling.k8s.io/group-name": "g"}},
            "spec": {"schedulerName": scheduler}});
        member(&mut cluster, "a", &pod);
        let mut had = Vec::new();
        for _ in 0..40 {
            cluster.settle(30 * SECOND);
            had.push(placed(&cluster, "a"));
        }
        let times: usize = had.iter().sum();
        let words = told(&mut cluster).join("\n");
        match scheduler {
            "volcano" => {
                assert!((4..20).contains(&times), "{had:?}");
                assert!(words.contains("volcano did not bind it to the share that it had"), "{words}");
                // Its queue has room again: its group says so.
                cluster.put_group(PodGroupApi::Volcano, "g", json!({"spec": {"minMember": 2}}));
                cluster.settle(MOMENT);
                cluster.put_group(PodGroupApi::Volcano, "g", json!({"spec": {"minMember": 1}}));
                cluster.settle(SECOND);
                assert_eq!(placed(&cluster, "a"), 1);
            }
            _ => assert!(times > 30, "it goes from node to node: {had:?}"),
        }
        cluster.check();
    }
}

/// KAI and Volcano count a launcher that asks for no GPU.
#[test]
fn a_launcher_without_a_share_counts_where_its_podgroup_counts_it() {
    let pod = |part: &str| {
        json!({"metadata": {"annotations": {"scheduling.k8s.io/group-name": "g", "volcano.sh/task-spec": part}},
            "spec": {"schedulerName": "volcano"}})
    };
    for group in [
        json!({"spec": {"minMember": 4}}),
        json!({"spec": {"minMember": 4, "minTaskMember": {"launcher": 1, "worker": 3}}}),
    ] {
        let mut cluster = cluster(1, 3);
        cluster.put_group(PodGroupApi::Volcano, "g", group.clone());
        (0..3).for_each(|nth| member(&mut cluster, &format!("worker-{nth}"), &pod("worker")));
        cluster.settle(LONG);
        assert_eq!(placed(&cluster, "worker"), 0, "{group}: the launcher is missing");
        cluster.put_pod("launcher", &[], pod("launcher"));
        cluster.settle(LONG);
        assert_eq!(placed(&cluster, "worker"), 3, "{group}");
        cluster.check();
    }
}

/// The numbers of Volcano's tasks count only where the minimum has room for all of them: it writes each task's replicas.
#[test]
fn a_minimum_below_the_sum_of_its_tasks_is_the_minimum() {
    let mut cluster = cluster(1, 3);
    let group = json!({"spec": {"minMember": 2, "minTaskMember": {"t": 4}}});
    cluster.put_group(PodGroupApi::Volcano, "g", group);
    let pod = json!({"metadata": {"annotations": {"scheduling.k8s.io/group-name": "g", "volcano.sh/task-spec": "t"}}});
    (0..4).for_each(|nth| member(&mut cluster, &format!("m{nth}"), &pod));
    cluster.settle(LONG);
    assert_eq!(placed(&cluster, "m"), 3);
}

/// Of three pods two start together; one of the three can run nowhere, or its claim cannot be read.
#[test]
fn who_can_be_placed_starts_without_who_cannot() {
    for (what, bad) in [
        ("too large", json!({"memory": "200Gi"})),
        ("a selector that no node has", json!({"memory": "50Gi"})),
        ("a claim that cannot be read", json!({"memory": "a lot"})),
    ] {
        let mut cluster = cluster(1, 2);
        cluster.put_group(PodGroupApi::Volcano, "g", json!({"spec": {"minMember": 2}}));
        let pod = json!({"metadata": {"annotations": {"scheduling.k8s.io/group-name": "g"}}});
        let mut first = pod.clone();
        first["spec"]["priority"] = json!(1);
        if what.starts_with("a selector") {
            first["spec"]["nodeSelector"] = json!({"zone": "nowhere"});
        }
        cluster.put_share("m0", bad, 1);
        cluster.put_pod("m0", &["m0"], first);
        ["m1", "m2"].iter().for_each(|name| member(&mut cluster, name, &pod));
        cluster.settle(LONG);
        assert_eq!(placed(&cluster, "m"), 2, "{what}");
        assert_eq!(cluster.place("m0"), None, "{what}");
        cluster.check();
    }
}

/// However often a tenant's group changes, its pods are looked at once in a round.
#[test]
fn a_group_that_changes_often_is_looked_at_once_in_a_round() {
    let mut cluster = cluster(1, 2);
    let pod = json!({"metadata": {"annotations": {"scheduling.k8s.io/group-name": "g"}}});
    ["m0", "m1"].iter().for_each(|name| member(&mut cluster, name, &pod));
    for nth in 0..50 {
        let minimum = if nth % 2 == 0 { 3 } else { 2 };
        cluster.put_group(PodGroupApi::Volcano, "g", json!({"spec": {"minMember": minimum}}));
    }
    cluster.deliver(usize::MAX);
    let regrouped = cluster.core.view.take_regrouped();
    assert_eq!(regrouped.len(), 2, "each of its pods once: {regrouped:?}");
}

#[test]
fn names_of_parts_that_no_object_can_have_are_not_kept() {
    let mut cluster = cluster(1, 1);
    let name = "t".repeat(300);
    let group = json!({"spec": {"minMember": 1, "minTaskMember": {name.as_str(): 1}}});
    cluster.put_group(PodGroupApi::Volcano, "g", group);
    let pod = json!({"metadata": {"annotations": {"scheduling.k8s.io/group-name": "g", "volcano.sh/task-spec": name}}});
    member(&mut cluster, "m", &pod);
    cluster.settle(LONG);
    assert_eq!(placed(&cluster, "m"), 1, "the number of all counts alone");
}
