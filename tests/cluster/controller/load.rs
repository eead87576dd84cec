//! Hundreds of pods at once: while the leader is killed and the API server restarts, and in peace.

use std::collections::BTreeSet;

use futures::stream::{self, StreamExt};
use k8s_openapi::api::core::v1::Event;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::ListParams;
use serde_json::{Value, json};

use super::books::Auditor;
use super::fail_over::{kill, leader};
use super::share;
use crate::hollow::{self, LONG, on_hollow};
use crate::manifests::{as_nobody, by_template, template};
use crate::rig::wait_until;
use crate::test_cluster::{PATIENCE, TestCluster};

const PODS: usize = 200;
const MANY: usize = 400;

async fn allocated(cluster: &TestCluster) -> Option<usize> {
    let claims = cluster.api::<ResourceClaim>().list(&ListParams::default()).await.ok()?.items;
    let allocated =
        |claim: &&ResourceClaim| claim.status.as_ref().is_some_and(|status| status.allocation.is_some());
    Some(claims.iter().filter(allocated).count())
}

async fn wait_allocated(cluster: &TestCluster, count: usize) {
    let enough = || async { (allocated(cluster).await? >= count).then_some(()) };
    wait_until(&format!("{count} claims to be allocated"), LONG, enough).await;
}

/// Creates an object, again and again while the API server is away.
async fn make(cluster: &TestCluster, object: Value) {
    let made = || async {
        let said = cluster.try_create(object.clone(), false).await;
        said.or_else(|said| if said.contains("AlreadyExists") { Ok(()) } else { Err(said) }).ok()
    };
    wait_until("an object to be created", LONG, made).await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn two_hundred_pods_are_placed_while_the_leader_dies_and_the_api_server_restarts() {
    let test = "two_hundred_pods_are_placed_while_the_leader_dies_and_the_api_server_restarts";
    let cluster = super::bed_beside(test, 4).await;
    let auditor = Auditor::begin(&cluster.client).await;
    let first = wait_until("a leader", PATIENCE, || leader(&cluster)).await;
    for (name, amount) in [("small", json!({"memory": "3Gi"})), ("tenth", json!({"fraction": "0.1"}))] {
        cluster.create(template(name, share(amount))).await;
    }
    let make = stream::iter(0..PODS).for_each_concurrent(8, |nth| {
        let template = if nth % 2 == 0 { "small" } else { "tenth" };
        make(&cluster, on_hollow(as_nobody(by_template(template, &format!("pod-{nth}")))))
    });
    let disturb = async {
        wait_allocated(&cluster, PODS / 5).await;
        kill(&cluster, &first).await;
        wait_allocated(&cluster, PODS / 2).await;
        cluster.rig.run(&["restart", "control", "apiserver"]);
    };
    tokio::join!(make, disturb);
    hollow::wait_bound(&cluster, PODS).await;
    let second = wait_until("a leader", PATIENCE, || leader(&cluster)).await;
    assert_ne!(first, second);
    println!("{} looks", auditor.end().await);
    hollow::end(cluster).await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn each_of_many_is_told_where_its_share_is() {
    let cluster = super::bed_beside("each_of_many_is_told_where_its_share_is", 4).await;
    cluster.create(template("small", share(json!({"memory": "1Gi"})))).await;
    let pod = |nth: usize| on_hollow(as_nobody(by_template("small", &format!("pod-{nth}"))));
    stream::iter(0..MANY).for_each_concurrent(8, |nth| make(&cluster, pod(nth))).await;
    hollow::wait_bound(&cluster, MANY).await;
    let placed = ListParams::default().fields("reason=GpuSharePlaced,involvedObject.kind=Pod");
    let told = || async {
        let events = cluster.api::<Event>().list(&placed).await.ok()?.items;
        let of: BTreeSet<_> = events.into_iter().filter_map(|event| event.involved_object.name).collect();
        (of.len() == MANY).then_some(())
    };
    wait_until(&format!("{MANY} pods to be told where their shares are"), PATIENCE, told).await;
    hollow::end(cluster).await;
}
