//! Many pods, and nothing left of them.

use std::time::Instant;

use futures::StreamExt;
use serde_json::json;

use crate::test_cluster::{TestCluster, SOON, failed_operations, sum};
use crate::manifests::{by_template, gpu, template};
use crate::rig::wait_until;

const PODS: usize = 100;
const AT_ONCE: usize = 8;

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_hundred_pods_leave_nothing_behind() {
    let bed = TestCluster::of_env("a_hundred_pods_leave_nothing_behind").await;
    bed.create(template("one-gpu", json!({"requests": [gpu("gpu")]}))).await;
    let before = bed.versions().await;
    let (mut writes, mut failures) = (0.0, 0.0);
    for node in &bed.nodes {
        writes += bed.slice_writes(node).await;
        failures += failed_operations(&bed.metrics(node).await);
    }
    let begin = Instant::now();
    let lives = futures::stream::iter(0..PODS).map(|number| live(&bed, format!("p-{number}")));
    lives.buffer_unordered(AT_ONCE).collect::<Vec<()>>().await;
    println!("{PODS} pods in {:.1} s", begin.elapsed().as_secs_f64());
    bed.wait_clean().await;
    assert_eq!(bed.versions().await, before, "slices were written though no device changed");
    for node in bed.nodes.clone() {
        let empty =
            || async { (sum(&bed.metrics(&node).await, "tranche_ledger_records{") == 0.0).then_some(()) };
        wait_until(&format!("the ledger of {node} to be told empty"), SOON, empty).await;
        writes -= bed.slice_writes(&node).await;
        failures -= failed_operations(&bed.metrics(&node).await);
    }
    assert_eq!((writes, failures), (0.0, 0.0), "slice writes and failed operations, negated");
    bed.end().await;
}

/// A pod comes, is Ready, and goes.
async fn live(bed: &TestCluster, name: String) {
    bed.create(by_template("one-gpu", &name)).await;
    bed.wait_ready(&name).await;
    bed.delete(&name).await;
}
