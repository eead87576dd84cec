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
    let bed = super::bed_beside(test, 2).await;
    create_hollow(&bed, "first", little(), |_| {}).await;
    let first = wait_node(&bed, "first").await;
    let not_there = affinity("kubernetes.io/hostname", "NotIn", &[&first]);
    create_hollow(&bed, "apart", little(), |pod| pod["spec"]["affinity"] = not_there).await;
    assert_ne!(wait_node(&bed, "apart").await, first);

    let rack = affinity("example.com/rack", "In", &["7"]);
    create_hollow(&bed, "rack", little(), |pod| pod["spec"]["affinity"] = rack).await;
    wait_told(&bed, "rack", "nodes that the pod may not run on").await;
    let words = "required node affinity; of the last, example.com/rack In [7] fails: the label is missing";
    let said = why(&bed, "pod/rack");
    assert!(has_row(&said, "hollow-", words), "{said}");
    bed.rig.kubectl(&["label", "node", "hollow-1", "example.com/rack=7"]);
    assert_eq!(wait_node(&bed, "rack").await, "hollow-1");
    hollow::end(bed).await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_claim_keeps_off_nodes_whose_taint_its_pod_does_not_tolerate_and_is_told() {
    let test = "a_claim_keeps_off_nodes_whose_taint_its_pod_does_not_tolerate_and_is_told";
    let bed = super::bed_beside(test, 1).await;
    bed.rig.kubectl(&["taint", "node", "hollow-0", "example.com/repair=fan:NoSchedule"]);
    create_hollow(&bed, "plain", little(), |_| {}).await;
    wait_told(&bed, "plain", "nodes that the pod may not run on").await;
    let words = "has the taint example.com/repair=fan:NoSchedule, which the pod does not tolerate";
    let said = why(&bed, "pod/plain");
    assert!(has_row(&said, "hollow-0", words), "{said}");
    let tolerate = |pod: &mut Value| {
        pod["spec"]["tolerations"] = json!([{"operator": "Exists"}]);
    };
    create_hollow(&bed, "tolerant", little(), tolerate).await;
    assert_eq!(wait_node(&bed, "tolerant").await, "hollow-0");
    bed.rig.kubectl(&["taint", "node", "hollow-0", "example.com/repair-"]);
    assert_eq!(wait_node(&bed, "plain").await, "hollow-0");
    hollow::end(bed).await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_pod_for_which_no_node_has_the_cpu_is_told_how_much_is_left() {
    let bed = super::bed_beside("a_pod_for_which_no_node_has_the_cpu_is_told_how_much_is_left", 2).await;
    let with_cpu = |cpu: &'static str| {
        move |pod: &mut Value| pod["spec"]["containers"][0]["resources"]["requests"] = json!({"cpu": cpu})
    };
    create_hollow(&bed, "busy", little(), with_cpu("40")).await;
    let busy = wait_node(&bed, "busy").await;
    // The GPU's neighbour would go there, and there is no CPU.
    create_hollow(&bed, "beside", little(), with_cpu("30")).await;
    let other = wait_node(&bed, "beside").await;
    assert_ne!(other, busy);
    create_hollow(&bed, "more", little(), with_cpu("40")).await;
    let words = format!("2 nodes without 40000m CPU (most left is 34000m on node {other})");
    wait_told(&bed, "more", &words).await;
    super::end_hollow(&bed, "busy").await;
    assert_eq!(wait_node(&bed, "more").await, busy);
    hollow::end(bed).await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn more_gpus_than_any_node_has_are_told_with_what_there_is() {
    let bed = super::bed_beside("more_gpus_than_any_node_has_are_told_with_what_there_is", 2).await;
    let gpus = bed.published("hollow-0").await.len();
    let of = |count: usize| {
        let mut devices = little();
        devices["requests"][0]["exactly"]["count"] = json!(count);
        devices
    };
    create_hollow(&bed, "many", of(gpus + 1), |_| {}).await;
    let words = format!("needs {} GPUs of one node; the most that fit are {gpus} on node hollow-", gpus + 1);
    wait_told(&bed, "many", &words).await;
    create_hollow(&bed, "all", of(gpus), |_| {}).await;
    wait_node(&bed, "all").await;
    hollow::end(bed).await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn every_policy_is_known_and_what_is_none_is_told() {
    let test = "every_policy_is_known_and_what_is_none_is_told";
    let bed = super::bed_beside(test, 1).await;
    for (name, policy) in [("good", "fragmentation"), ("bad", "best")] {
        let mut claim = claim(name, little());
        claim["metadata"]["annotations"] = json!({"tranche.dev/policy": policy});
        bed.create(claim).await;
        bed.create(on_hollow(as_nobody(user_of(name, name)))).await;
    }
    wait_node(&bed, "good").await;
    wait_told(&bed, "bad", "annotation tranche.dev/policy: \"best\" is no policy; use pack, spread or").await;
    bed.rig.kubectl(&[
        "-n",
        &bed.namespace,
        "annotate",
        "resourceclaim/bad",
        "--overwrite",
        "tranche.dev/policy=pack",
    ]);
    wait_node(&bed, "bad").await;
    hollow::end(bed).await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn the_names_that_others_give_gangs_are_known() {
    let bed = super::bed_beside("the_names_that_others_give_gangs_are_known", 1).await;
    let names =
        [("labels", "scheduling.volcano.sh/group-name"), ("annotations", "scheduling.k8s.io/group-name")];
    for (nth, (field, key)) in names.into_iter().enumerate() {
        let of_gang = |pod: &mut Value| {
            pod["metadata"]["annotations"] = json!({"tranche.dev/gang-size": "2"});
            pod["metadata"][field][key] = json!(format!("train-{nth}"));
        };
        let [one, alone, two] = ["one", "alone", "two"].map(|name| format!("{name}-{nth}"));
        create_hollow(&bed, &one, little(), of_gang).await;
        create_hollow(&bed, &alone, little(), |_| {}).await;
        wait_node(&bed, &alone).await;
        let waits = bed.api::<ResourceClaim>().get(&one).await.expect("the claim is there");
        assert!(results(&waits).is_empty(), "{key}: placed before its gang is there");
        create_hollow(&bed, &two, little(), of_gang).await;
        wait_bound(&bed, 3 * (nth + 1)).await;
        println!("by {key}");
    }
    hollow::end(bed).await;
}
