//! Two departments on four nodes of eight GPUs: research uses what is idle, production goes first, and what research has in
//! pieces is put together for who asks for more than a piece. With whole GPUs, and with shares of which one fits on a GPU.
//! On nodes without a machine.

use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use serde_json::json;

use super::consolidation::rebalance;
use super::preemption::class;
use super::{create_hollow, share, wait_told};
use crate::hollow::{LONG, on_hollow, wait_node};
use crate::manifests::{as_nobody, by_template, template};
use crate::rig::wait_until;
use crate::test_cluster::TestCluster;

const NODES: usize = 4;

/// A ReplicaSet of one pod, as a department makes its pods anew.
async fn replica_set(cluster: &TestCluster, department: &str, name: &str, class: &str) {
    let mut pod = on_hollow(as_nobody(by_template("piece", name)));
    pod["spec"]["priorityClassName"] = json!(class);
    let labels = json!({"app": name, "department": department});
    cluster
        .create(json!({"apiVersion": "apps/v1", "kind": "ReplicaSet", "metadata": {"name": name, "labels": {"department": department}},
            "spec": {"replicas": 1, "selector": {"matchLabels": {"app": name}},
            "template": {"metadata": {"labels": labels}, "spec": pod["spec"]}}}))
        .await;
}

/// Names and nodes of the department's pods that have a node, and how many wait.
async fn pods(cluster: &TestCluster, department: &str) -> Option<(Vec<(String, String)>, usize)> {
    let params = ListParams::default().labels(&format!("department={department}"));
    let pods = cluster.api::<Pod>().list(&params).await.ok()?.items;
    let (mut bound, mut waiting) = (Vec::new(), 0);
    for pod in pods.into_iter().filter(|pod| pod.metadata.deletion_timestamp.is_none()) {
        match pod.spec.and_then(|spec| spec.node_name) {
            Some(node) => bound.push((pod.metadata.name.unwrap_or_default(), node)),
            None => waiting += 1,
        }
    }
    Some((bound, waiting))
}

/// Waits until so many of the department's pods have a node, and so many wait.
async fn wait_pods(cluster: &TestCluster, department: &str, want: (usize, usize)) -> Vec<(String, String)> {
    let reached = || async {
        let (bound, waiting) = pods(cluster, department).await?;
        ((bound.len(), waiting) == want).then_some(bound)
    };
    let what = format!("{} pods of {department} to have a node, and {} to wait", want.0, want.1);
    wait_until(&what, LONG, reached).await
}

async fn demo(test: &str, fraction: &str) {
    let cluster = super::bed_beside(test, NODES).await;
    let gpus = cluster.shareable("hollow-0").await.len();
    let all = gpus * NODES;
    let (research, production) = (
        class(&cluster, "research", 100, "PreemptLowerPriority"),
        class(&cluster, "production", 1000, "PreemptLowerPriority"),
    );
    cluster.create(template("piece", share(json!({"fraction": fraction})))).await;
    for nth in 0..all {
        replica_set(&cluster, "research", &format!("research-{nth}"), &research).await;
    }
    let before = wait_pods(&cluster, "research", (all, 0)).await;

    // Production goes first, and takes no more than it needs.
    for nth in 0..NODES {
        replica_set(&cluster, "production", &format!("production-{nth}"), &production).await;
    }
    wait_pods(&cluster, "production", (NODES, 0)).await;
    let bound = wait_pods(&cluster, "research", (all - NODES, NODES)).await;
    super::wait_metric(&cluster, "tranche_controller_preempting_units", 0.0).await;
    // Pods that were made anew have other names.
    let stayed = bound.iter().filter(|pod| before.contains(pod)).count();
    assert_eq!(stayed, all - NODES, "one pod ended for each: {before:?}, then {bound:?}");

    // What production gives back, research has again.
    cluster.rig.kubectl(&["-n", &cluster.namespace, "delete", "replicasets", "-l", "department=production"]);
    let bound = wait_pods(&cluster, "research", (all, 0)).await;

    // One GPU of each node comes free, and somebody wants two of one node.
    for nth in 0..NODES {
        let node = format!("hollow-{nth}");
        let (pod, _) = bound.iter().find(|(_, on)| *on == node).expect("each node is full");
        let set = pod.rsplit_once('-').expect("a ReplicaSet's pod is named after it").0;
        cluster.rig.kubectl(&["-n", &cluster.namespace, "delete", "replicaset", set]);
    }
    wait_pods(&cluster, "research", (all - NODES, 0)).await;
    let mut two = share(json!({"fraction": fraction}));
    two["requests"][0]["exactly"]["count"] = json!(2);
    create_hollow(&cluster, "two", two, |pod| pod["spec"]["priorityClassName"] = json!(research)).await;
    wait_told(&cluster, "two", "; evict ").await;
    let (said, beside, code) = rebalance(&cluster, &[]);
    assert_eq!(code, Some(3), "{said}{beside}");
    assert!(said.contains("moving 1 pod would make room for 1."), "{said}");
    let (_, said, code) = rebalance(&cluster, &["--apply", "--yes", "--timeout", "170s"]);
    assert_eq!(code, Some(0), "{said}");
    wait_node(&cluster, "two").await;
    wait_pods(&cluster, "research", (all - NODES, 0)).await;
    super::consolidation::end(cluster).await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn departments_share_whole_gpus_by_priority_and_pieces_are_put_together() {
    demo("departments_share_whole_gpus_by_priority_and_pieces_are_put_together", "1").await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn departments_share_gpus_in_shares_by_priority_and_pieces_are_put_together() {
    demo("departments_share_gpus_in_shares_by_priority_and_pieces_are_put_together", "0.6").await;
}
