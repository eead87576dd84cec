//! Many pods, and nothing left of them.

use std::time::Instant;

use futures::future::join_all;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::DeleteParams;
use serde_json::json;

use crate::bed::{Bed, SOON, failed_operations, sum};
use crate::manifests::{by_template, gpu, template};
use crate::rig::wait_until;

const PODS: usize = 100;
const WAVE: usize = 8;

#[tokio::test]
async fn a_hundred_pods_leave_nothing_behind() {
    let Some(bed) = Bed::of_env("a_hundred_pods_leave_nothing_behind").await else { return };
    bed.create(template("one-gpu", json!({"requests": [gpu("gpu")]}))).await;
    let before = versions(&bed).await;
    let (mut writes, mut failures) = (0.0, 0.0);
    for node in &bed.nodes {
        let metrics = bed.metrics(node).await;
        writes += sum(&metrics, "tranche_slice_writes_total");
        failures += failed_operations(&metrics);
    }
    let begin = Instant::now();
    let all: Vec<String> = (0..PODS).map(|number| format!("p-{number}")).collect();
    for wave in all.chunks(if bed.nodes.len() > 1 { WAVE } else { 2 }) {
        join_all(wave.iter().map(|name| bed.create(by_template("one-gpu", name)))).await;
        join_all(wave.iter().map(|name| bed.ready(name))).await;
        let pods: Api<Pod> = bed.api();
        join_all(
            wave.iter().map(|name| async { pods.delete(name, &DeleteParams::default()).await.unwrap() }),
        )
        .await;
        join_all(wave.iter().map(|name| bed.gone(name))).await;
    }
    println!("{PODS} pods in {:.1} s", begin.elapsed().as_secs_f64());
    bed.is_clean().await;
    assert_eq!(versions(&bed).await, before, "slices were written though no device changed");
    for node in bed.nodes.clone() {
        let empty =
            || async { (sum(&bed.metrics(&node).await, "tranche_ledger_records{") == 0.0).then_some(()) };
        wait_until(&format!("the ledger of {node} to be told empty"), SOON, empty).await;
        let metrics = bed.metrics(&node).await;
        writes -= sum(&metrics, "tranche_slice_writes_total");
        failures -= failed_operations(&metrics);
    }
    assert_eq!((writes, failures), (0.0, 0.0), "slice writes and failed operations, negated");
    bed.end().await;
}

async fn versions(bed: &Bed) -> Vec<Option<String>> {
    let mut versions = Vec::new();
    for node in &bed.nodes {
        versions.extend(bed.slices(node).await.into_iter().map(|slice| slice.metadata.resource_version));
    }
    versions
}
