//! Two replicas: one works, and the other takes over.

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use serde_json::json;

use super::books::Auditor;
use super::{WAITS, create, create_hollow, share, wait_placed, wait_told};
use crate::hollow::{self, wait_bound, wait_node};
use crate::rig::wait_until;
use crate::test_cluster::{PATIENCE, SYSTEM, TestCluster, container_run, node_of};

/// Who holds the lease: a pod's name, and what tells its processes apart.
pub async fn leader(cluster: &TestCluster) -> Option<String> {
    let lease =
        Api::<Lease>::namespaced(cluster.client.clone(), SYSTEM).get("tranche-controller").await.ok()?;
    lease.spec?.holder_identity.filter(|holder| !holder.is_empty())
}

/// Ends the process that holds the lease as a power cut would.
pub async fn kill(cluster: &TestCluster, holder: &str) {
    signal(cluster, holder, "KILL").await;
}

async fn signal(cluster: &TestCluster, holder: &str, signal: &str) {
    let (pod, _) = holder.rsplit_once('_').expect("a pod and a number");
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), SYSTEM);
    let node = node_of(&pods.get(pod).await.expect("the leader has a pod"));
    let script = format!(
        "for p in /proc/[0-9]*; do tr '\\0' '\\n' <$p/environ 2>/dev/null | grep -qx POD_NAME={pod} && kill -{signal} ${{p#/proc/}}; done; true"
    );
    cluster.on_node(&node, &script);
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn when_the_leader_is_killed_the_other_goes_on_and_what_runs_runs_on() {
    let cluster = super::cluster("when_the_leader_is_killed_the_other_goes_on_and_what_runs_runs_on").await;
    create(&cluster, "before", json!({"memory": "10Gi"})).await;
    let before = container_run(&cluster.wait_ready("before").await);
    let first = wait_until("a leader", PATIENCE, || leader(&cluster)).await;
    kill(&cluster, &first).await;
    create(&cluster, "after", json!({"memory": "10Gi"})).await;
    let second = || async { leader(&cluster).await.filter(|leader| *leader != first) };
    wait_until("another leader", PATIENCE, second).await;
    cluster.wait_ready("after").await;
    assert_eq!(
        wait_placed(&cluster, "after").await,
        wait_placed(&cluster, "before").await,
        "it knows who has what"
    );
    assert_eq!(container_run(&cluster.wait_ready("before").await), before);
    cluster.end().await;
}

/// As a node that stood still, or a process without memory: it comes back in the belief that it leads.
#[tokio::test]
#[ignore = "needs a rig"]
async fn a_leader_that_was_frozen_writes_nothing_when_it_wakes() {
    let test = "a_leader_that_was_frozen_writes_nothing_when_it_wakes";
    let cluster = super::bed_beside(test, 1).await;
    let auditor = Auditor::begin(&cluster.client).await;
    let gpus = cluster.published("hollow-0").await.len();
    let most = || share(json!({"fraction": "0.9"}));
    create_hollow(&cluster, "before", most(), |_| {}).await;
    wait_node(&cluster, "before").await;
    let first = wait_until("a leader", PATIENCE, || leader(&cluster)).await;
    signal(&cluster, &first, "STOP").await;
    let second = || async { leader(&cluster).await.filter(|leader| *leader != first) };
    let second = wait_until("another leader", PATIENCE, second).await;
    // It knows of none of these: by its books there is room for all of them where the other places them.
    for nth in 1..gpus {
        create_hollow(&cluster, &format!("meanwhile-{nth}"), most(), |_| {}).await;
    }
    wait_bound(&cluster, gpus).await;
    create_hollow(&cluster, "late", most(), |_| {}).await;
    signal(&cluster, &first, "CONT").await;
    wait_told(&cluster, "late", WAITS).await;
    super::end_hollow(&cluster, "before").await;
    wait_node(&cluster, "late").await;
    assert_eq!(leader(&cluster).await, Some(second), "the lease stays where it went");
    println!("{} looks", auditor.end().await);
    hollow::end(cluster).await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn an_upgrade_hands_over_without_a_wait() {
    let cluster = super::cluster("an_upgrade_hands_over_without_a_wait").await;
    wait_until("a leader", PATIENCE, || leader(&cluster)).await;
    cluster.rig.kubectl(&["-n", SYSTEM, "rollout", "restart", "deployment/tranche-controller"]);
    create(&cluster, "during", json!({"memory": "10Gi"})).await;
    cluster.wait_ready("during").await;
    cluster.rig.kubectl(&[
        "-n",
        SYSTEM,
        "rollout",
        "status",
        "deployment/tranche-controller",
        "--timeout=170s",
    ]);
    cluster.end().await;
}
