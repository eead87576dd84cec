//! Two replicas: one works, and the other takes over.

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use serde_json::json;

use super::books::Auditor;
use super::{WAITS, create, create_hollow, share, wait_placed, wait_told};
use crate::test_cluster::{TestCluster, PATIENCE, SYSTEM, container_run, node_of};
use crate::hollow::{self, wait_bound, wait_node};
use crate::rig::wait_until;

/// Who holds the lease: a pod's name, and what tells its processes apart.
pub async fn leader(bed: &TestCluster) -> Option<String> {
    let lease = Api::<Lease>::namespaced(bed.client.clone(), SYSTEM).get("tranche-controller").await.ok()?;
    lease.spec?.holder_identity.filter(|holder| !holder.is_empty())
}

/// Ends the process that holds the lease as a power cut would.
pub async fn kill(bed: &TestCluster, holder: &str) {
    signal(bed, holder, "KILL").await;
}

async fn signal(bed: &TestCluster, holder: &str, signal: &str) {
    let (pod, _) = holder.rsplit_once('_').expect("a pod and a number");
    let pods: Api<Pod> = Api::namespaced(bed.client.clone(), SYSTEM);
    let node = node_of(&pods.get(pod).await.expect("the leader has a pod"));
    let script = format!(
        "for p in /proc/[0-9]*; do tr '\\0' '\\n' <$p/environ 2>/dev/null | grep -qx POD_NAME={pod} && kill -{signal} ${{p#/proc/}}; done; true"
    );
    bed.on_node(&node, &script);
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn when_the_leader_is_killed_the_other_goes_on_and_what_runs_runs_on() {
    let bed = super::bed("when_the_leader_is_killed_the_other_goes_on_and_what_runs_runs_on").await;
    create(&bed, "before", json!({"memory": "10Gi"})).await;
    let before = container_run(&bed.wait_ready("before").await);
    let first = wait_until("a leader", PATIENCE, || leader(&bed)).await;
    kill(&bed, &first).await;
    create(&bed, "after", json!({"memory": "10Gi"})).await;
    let second = || async { leader(&bed).await.filter(|leader| *leader != first) };
    wait_until("another leader", PATIENCE, second).await;
    bed.wait_ready("after").await;
    assert_eq!(wait_placed(&bed, "after").await, wait_placed(&bed, "before").await, "it knows who has what");
    assert_eq!(container_run(&bed.wait_ready("before").await), before);
    bed.end().await;
}

/// As a node that stood still, or a process without memory: it comes back in the belief that it leads.
#[tokio::test]
#[ignore = "needs a rig"]
async fn a_leader_that_was_frozen_writes_nothing_when_it_wakes() {
    let test = "a_leader_that_was_frozen_writes_nothing_when_it_wakes";
    let bed = super::bed_beside(test, 1).await;
    let auditor = Auditor::begin(&bed.client).await;
    let gpus = bed.published("hollow-0").await.len();
    let most = || share(json!({"fraction": "0.9"}));
    create_hollow(&bed, "before", most(), |_| {}).await;
    wait_node(&bed, "before").await;
    let first = wait_until("a leader", PATIENCE, || leader(&bed)).await;
    signal(&bed, &first, "STOP").await;
    let second = || async { leader(&bed).await.filter(|leader| *leader != first) };
    let second = wait_until("another leader", PATIENCE, second).await;
    // It knows of none of these: by its books there is room for all of them where the other places them.
    for nth in 1..gpus {
        create_hollow(&bed, &format!("meanwhile-{nth}"), most(), |_| {}).await;
    }
    wait_bound(&bed, gpus).await;
    create_hollow(&bed, "late", most(), |_| {}).await;
    signal(&bed, &first, "CONT").await;
    wait_told(&bed, "late", WAITS).await;
    super::end_hollow(&bed, "before").await;
    wait_node(&bed, "late").await;
    assert_eq!(leader(&bed).await, Some(second), "the lease stays where it went");
    println!("{} looks", auditor.end().await);
    hollow::end(bed).await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn an_upgrade_hands_over_without_a_wait() {
    let bed = super::bed("an_upgrade_hands_over_without_a_wait").await;
    wait_until("a leader", PATIENCE, || leader(&bed)).await;
    bed.rig.kubectl(&["-n", SYSTEM, "rollout", "restart", "deployment/tranche-controller"]);
    create(&bed, "during", json!({"memory": "10Gi"})).await;
    bed.wait_ready("during").await;
    bed.rig.kubectl(&["-n", SYSTEM, "rollout", "status", "deployment/tranche-controller", "--timeout=90s"]);
    bed.end().await;
}
