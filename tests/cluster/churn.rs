//! Many pods, and nothing left of them.

use std::time::Instant;

use futures::StreamExt;
use serde_json::json;

use crate::manifests::{by_template, gpu, template};
use crate::rig::wait_until;
use crate::test_cluster::{SOON, TestCluster, failed_operations, sum};

const PODS: usize = 100;
const AT_ONCE: usize = 8;

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_hundred_pods_leave_nothing_behind() {
    let cluster = TestCluster::of_env("a_hundred_pods_leave_nothing_behind").await;
    cluster.create(template("one-gpu", json!({"requests": [gpu("gpu")]}))).await;
    let before = cluster.versions().await;
    let (mut writes, mut failures) = (0.0, 0.0);
    for node in &cluster.nodes {
        writes += cluster.slice_writes(node).await;
        failures += failed_operations(&cluster.metrics(node).await);
    }
    let begin = Instant::now();
    let lives = futures::stream::iter(0..PODS).map(|number| live(&cluster, format!("p-{number}")));
    lives.buffer_unordered(AT_ONCE).collect::<Vec<()>>().await;
    println!("{PODS} pods in {:.1} s", begin.elapsed().as_secs_f64());
    cluster.wait_clean().await;
    assert_eq!(cluster.versions().await, before, "slices were written though no device changed");
    for node in cluster.nodes.clone() {
        let empty =
            || async { (sum(&cluster.metrics(&node).await, "tranche_ledger_records{") == 0.0).then_some(()) };
        wait_until(&format!("the ledger of {node} to be told empty"), SOON, empty).await;
        writes -= cluster.slice_writes(&node).await;
        failures -= failed_operations(&cluster.metrics(&node).await);
    }
    assert_eq!((writes, failures), (0.0, 0.0), "slice writes and failed operations, negated");
    cluster.end().await;
}

/// A pod comes, is Ready, and goes.
async fn live(cluster: &TestCluster, name: String) {
    cluster.create(by_template("one-gpu", &name)).await;
    cluster.wait_ready(&name).await;
    cluster.delete(&name).await;
}
