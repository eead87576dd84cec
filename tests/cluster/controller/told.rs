//! Why something waits, in the words of its cause; and that it goes on when the cause is gone. On nodes without a
//! machine.

use k8s_openapi::api::resource::v1::ResourceClaim;
use serde_json::{Value, json};

use super::explain::{has_row, why};
use super::{create_hollow, results, share, wait_told};
use crate::hollow::{self, on_hollow, wait_bound, wait_node};
use crate::manifests::{as_nobody, claim, user_of};

fn little() -> Value {
    share(json!({"memory": "4Gi"}))
}

/// Required node affinity of one term with one requirement.
fn affinity(key: &str, operator: &str, values: &[&str]) -> Value {
    let one = json!({"key": key, "operator": operator, "values": values});
    let terms = json!({"nodeSelectorTerms": [{"matchExpressions": [one]}]});
    json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}})
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_claim_follows_its_pods_node_affinity_and_is_told_when_no_node_has_it() {
    let test = "a_claim_follows_its_pods_node_affinity_and_is_told_when_no_node_has_it";
    let cluster = super::bed_beside(test, 2).await;
    create_hollow(&cluster, "first", little(), |_| {}).await;
    let first = wait_node(&cluster, "first").await;
    let not_there = affinity("kubernetes.io/hostname", "NotIn", &[&first]);
    create_hollow(&cluster, "apart", little(), |pod| pod["spec"]["affinity"] = not_there).await;
    assert_ne!(wait_node(&cluster, "apart").await, first);

    let rack = affinity("example.com/rack", "In", &["7"]);
    create_hollow(&cluster, "rack", little(), |pod| pod["spec"]["affinity"] = rack).await;
    wait_told(&cluster, "rack", "nodes that the pod may not run on").await;
    let words = "required node affinity; of the last, example.com/rack In [7] fails: the label is missing";
    let said = why(&cluster, "pod/rack");
    assert!(has_row(&said, "hollow-", words), "{said}");
    cluster.rig.kubectl(&["label", "node", "hollow-1", "example.com/rack=7"]);
    assert_eq!(wait_node(&cluster, "rack").await, "hollow-1");
    hollow::end(cluster).await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_claim_keeps_off_nodes_whose_taint_its_pod_does_not_tolerate_and_is_told() {
    let test = "a_claim_keeps_off_nodes_whose_taint_its_pod_does_not_tolerate_and_is_told";
    let cluster = super::bed_beside(test, 1).await;
    cluster.rig.kubectl(&["taint", "node", "hollow-0", "example.com/repair=fan:NoSchedule"]);
    create_hollow(&cluster, "plain", little(), |_| {}).await;
    wait_told(&cluster, "plain", "nodes that the pod may not run on").await;
    let words = "has the taint example.com/repair=fan:NoSchedule, which the pod does not tolerate";
    let said = why(&cluster, "pod/plain");
    assert!(has_row(&said, "hollow-0", words), "{said}");
    let tolerate = |pod: &mut Value| {
        pod["spec"]["tolerations"] = json!([{"operator": "Exists"}]);
    };
    create_hollow(&cluster, "tolerant", little(), tolerate).await;
    assert_eq!(wait_node(&cluster, "tolerant").await, "hollow-0");
    cluster.rig.kubectl(&["taint", "node", "hollow-0", "example.com/repair-"]);
    assert_eq!(wait_node(&cluster, "plain").await, "hollow-0");
    hollow::end(cluster).await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_pod_for_which_no_node_has_the_cpu_is_told_how_much_is_left() {
    let cluster = super::bed_beside("a_pod_for_which_no_node_has_the_cpu_is_told_how_much_is_left", 2).await;
    let with_cpu = |cpu: &'static str| {
        move |pod: &mut Value| pod["spec"]["containers"][0]["resources"]["requests"] = json!({"cpu": cpu})
    };
    create_hollow(&cluster, "busy", little(), with_cpu("40")).await;
    let busy = wait_node(&cluster, "busy").await;
    // The GPU's neighbour would go there, and there is no CPU.
    create_hollow(&cluster, "beside", little(), with_cpu("30")).await;
    let other = wait_node(&cluster, "beside").await;
    assert_ne!(other, busy);
    create_hollow(&cluster, "more", little(), with_cpu("40")).await;
    let words = format!("2 nodes without 40000m CPU (most left is 34000m on node {other})");
    wait_told(&cluster, "more", &words).await;
    super::end_hollow(&cluster, "busy").await;
    assert_eq!(wait_node(&cluster, "more").await, busy);
    hollow::end(cluster).await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn more_gpus_than_any_node_has_are_told_with_what_there_is() {
    let cluster = super::bed_beside("more_gpus_than_any_node_has_are_told_with_what_there_is", 2).await;
    let gpus = cluster.published("hollow-0").await.len();
    let of = |count: usize| {
        let mut devices = little();
        devices["requests"][0]["exactly"]["count"] = json!(count);
        devices
    };
    create_hollow(&cluster, "many", of(gpus + 1), |_| {}).await;
    let words = format!("needs {} GPUs of one node; at most {gpus} fit, on node hollow-", gpus + 1);
    wait_told(&cluster, "many", &words).await;
    create_hollow(&cluster, "all", of(gpus), |_| {}).await;
    wait_node(&cluster, "all").await;
    hollow::end(cluster).await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn every_policy_is_known_and_what_is_none_is_told() {
    let test = "every_policy_is_known_and_what_is_none_is_told";
    let cluster = super::bed_beside(test, 1).await;
    for (name, policy) in [("good", "fragmentation"), ("bad", "best")] {
        let mut claim = claim(name, little());
        claim["metadata"]["annotations"] = json!({"tranche.dev/policy": policy});
        cluster.create(claim).await;
        cluster.create(on_hollow(as_nobody(user_of(name, name)))).await;
    }
    wait_node(&cluster, "good").await;
    wait_told(
        &cluster,
        "bad",
        "annotation tranche.dev/policy: \"best\" is not a valid policy; use pack, spread or",
    )
    .await;
    cluster.rig.kubectl(&[
        "-n",
        &cluster.namespace,
        "annotate",
        "resourceclaim/bad",
        "--overwrite",
        "tranche.dev/policy=pack",
    ]);
    wait_node(&cluster, "bad").await;
    hollow::end(cluster).await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn the_names_that_others_give_gangs_are_known() {
    let cluster = super::bed_beside("the_names_that_others_give_gangs_are_known", 1).await;
    let names =
        [("labels", "scheduling.volcano.sh/group-name"), ("annotations", "scheduling.k8s.io/group-name")];
    for (nth, (field, key)) in names.into_iter().enumerate() {
        let of_gang = |pod: &mut Value| {
            pod["metadata"]["annotations"] = json!({"tranche.dev/gang-size": "2"});
            pod["metadata"][field][key] = json!(format!("train-{nth}"));
        };
        let [one, alone, two] = ["one", "alone", "two"].map(|name| format!("{name}-{nth}"));
        create_hollow(&cluster, &one, little(), of_gang).await;
        create_hollow(&cluster, &alone, little(), |_| {}).await;
        wait_node(&cluster, &alone).await;
        let waits = cluster.api::<ResourceClaim>().get(&one).await.expect("the claim is there");
        assert!(results(&waits).is_empty(), "{key}: placed before its gang is there");
        create_hollow(&cluster, &two, little(), of_gang).await;
        wait_bound(&cluster, 3 * (nth + 1)).await;
        println!("by {key}");
    }
    hollow::end(cluster).await;
}
