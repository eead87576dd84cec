//! Selectors that cost more than they may: their claims wait, and nobody else does.

use std::time::{Duration, Instant};

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::PostParams;
use kube::{Api, Client};
use serde_json::{Value, json};

use super::tenant;
use crate::manifests::{as_nobody, claim, parameters, user_of};
use crate::rig::{SLOWER, wait_until};
use crate::test_cluster::{PATIENCE, SYSTEM, TestCluster, ask, from};

pub(super) const CLASS: &str = "shared.gpu.nvidia.com";
/// Another namespace's shares are placed within seconds, one after the other, whatever the tenant does. The first takes
/// the GPU before, which is several rounds, each of which may cost all that a round may.
pub(super) async fn small_shares_are_placed(cluster: &TestCluster, namespace: &str, count: usize) {
    for nth in 0..count {
        let limit = Duration::from_secs(if nth == 0 { 20 } else { 10 });
        let name = format!("small-{nth}");
        let begun = Instant::now();
        let share = json!({"requests": [{"name": "gpu", "exactly": {"deviceClassName": CLASS}}],
            "config": parameters("tranche.dev/v1alpha1", "GpuShare", json!({"memory": "1Gi"}))});
        create(&cluster.client, namespace, &name, share).await;
        let claims: Api<ResourceClaim> = Api::namespaced(cluster.client.clone(), namespace);
        let placed = || async { claims.get(&name).await.ok()?.status?.allocation.map(|_| ()) };
        wait_until(&format!("{name} to be placed"), PATIENCE, placed).await;
        println!("{name} was placed after {:?}", begun.elapsed());
        assert!(begun.elapsed() < limit * SLOWER, "{name} was placed after {:?}", begun.elapsed());
    }
}
/// True on every GPU, and not known before there is one.
const GUARD: &str = "has(device.attributes['gpu.nvidia.com'].uuid)";

/// Ten of the last, in a list, for so many levels; the last one is compared with itself.
fn nested(levels: u8) -> String {
    let ten = |of: &str| format!("[{}]", [of; 10].join(","));
    let name = |nth: u8| char::from(b'a' + nth).to_string();
    let last = name(levels - 1);
    (0..levels).rev().fold(format!("{last} == {last}"), |body, nth| {
        let of = if nth == 0 { "1".to_owned() } else { name(nth - 1) };
        format!("[{}].all({}, {body})", ten(&of), name(nth))
    })
}

/// A text of 64 bytes, doubled until it has a MiB, and a list of it a thousand times.
fn swollen() -> String {
    let list = format!("[{}].size() == 1000", vec!["v"; 1000].join(","));
    let doubling = (0..14).fold(list, |inner, _| format!("cel.bind(v, v + v, {inner})"));
    format!("cel.bind(v, '{}', {doubling})", "x".repeat(64))
}

fn loops(levels: u32, body: &str) -> String {
    let ten = "[0,1,2,3,4,5,6,7,8,9]";
    (0..levels).fold(body.to_owned(), |inner, nth| format!("{ten}.all(i{nth}, {inner})"))
}

/// Requests of 1 GiB with these selectors.
fn devices(requests: &[Vec<String>]) -> Value {
    let request = |(nth, selectors): (usize, &Vec<String>)| {
        let cel = |text: &String| json!({"cel": {"expression": format!("{GUARD} && {text}")}});
        let selectors: Vec<Value> = selectors.iter().map(cel).collect();
        json!({"name": format!("r{nth}"), "exactly": {"deviceClassName": CLASS, "selectors": selectors}})
    };
    let requests: Vec<Value> = requests.iter().enumerate().map(request).collect();
    let mut config = parameters("tranche.dev/v1alpha1", "GpuShare", json!({"memory": "1Gi"}));
    // For all of them.
    config[0].as_object_mut().expect("it is an entry").remove("requests");
    json!({"requests": requests, "config": config})
}

/// Creates a claim and a pod that uses it.
async fn create(client: &Client, namespace: &str, name: &str, devices: Value) {
    let claims: Api<ResourceClaim> = Api::namespaced(client.clone(), namespace);
    claims.create(&PostParams::default(), &from(claim(name, devices))).await.expect("the claim is admitted");
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let pod = from(as_nobody(user_of(name, name)));
    pods.create(&PostParams::default(), &pod).await.expect("the pod is admitted");
}

/// Who holds the controller's lease.
pub(super) async fn holder(cluster: &TestCluster) -> Option<String> {
    let leases: Api<Lease> = Api::namespaced(cluster.client.clone(), SYSTEM);
    let lease = leases.get("tranche-controller").await.ok()?;
    lease.spec?.holder_identity.filter(|holder| !holder.is_empty())
}

/// Name and restarts of each of the controller's containers, and whether it answers. An update's old pods, which may
/// take a while to end, are not among them.
pub(super) async fn controllers(cluster: &TestCluster) -> Vec<(String, i32, bool)> {
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), SYSTEM);
    let list = pods.list(&Default::default()).await.expect("pods can be listed").items;
    let is_ours = |pod: &Pod| {
        pod.metadata.deletion_timestamp.is_none()
            && pod.metadata.name.as_deref().is_some_and(|name| name.starts_with("tranche-controller"))
    };
    let told = |pod: Pod| {
        let statuses = pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten());
        let restarts = statuses.map(|status| status.restart_count).sum();
        let answers = ask(&pod, "/healthz").is_some_and(|answer| answer.contains("ok"));
        (pod.metadata.name.clone().unwrap_or_default(), restarts, answers)
    };
    list.into_iter().filter(is_ours).map(told).collect()
}

/// The same, once each answers: on a busy machine one may take longer than a question waits.
pub(super) async fn all_answer(cluster: &TestCluster) -> Option<Vec<(String, i32, bool)>> {
    let all = controllers(cluster).await;
    (!all.is_empty() && all.iter().all(|(.., answers)| *answers)).then_some(all)
}

pub(super) async fn wait_told(cluster: &TestCluster, pod: &str, words: &str) {
    let told = || async { cluster.events(pod).await.into_iter().find(|event| event.contains(words)) };
    let told = wait_until(&format!("pod {pod} to be told: {words}"), PATIENCE, told).await;
    println!("told: {}", told.chars().take(300).collect::<String>());
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn dear_selectors_wait_and_the_shares_of_another_namespace_do_not() {
    let cluster = TestCluster::of_env("dear_selectors_wait_and_the_shares_of_another_namespace_do_not").await;
    let quiet = format!("{}-quiet", cluster.namespace);
    cluster.rig.kubectl(&["create", "namespace", &quiet]);
    cluster.rig.on_end(&["kubectl", "delete", "namespace", &quiet, "--ignore-not-found", "--timeout=90s"]);
    let leader = wait_until("a controller to lead", PATIENCE, || holder(&cluster)).await;
    let before = wait_until("all controllers to answer", PATIENCE, || all_answer(&cluster)).await;
    let attacker = tenant(&cluster).await;
    let one = |text: String| devices(&[vec![text]]);
    create(&attacker, &cluster.namespace, "nested", one(nested(12))).await;
    create(&attacker, &cluster.namespace, "swollen", one(swollen())).await;
    // One claim, 8 requests with 32 selectors each.
    let many = |nth: usize| (0..32).map(|at| loops(4, &format!("i0 != {}", 100 * nth + at + 10))).collect();
    create(&attacker, &cluster.namespace, "many", devices(&(0..8).map(many).collect::<Vec<_>>())).await;
    for nth in 0..20 {
        let own = loops(3, &format!("i0 != {}", nth + 10));
        create(&attacker, &cluster.namespace, &format!("own-{nth}"), one(format!("false && true || !{own}")))
            .await;
    }
    small_shares_are_placed(&cluster, &quiet, 5).await;
    wait_told(&cluster, "nested", "costs more than 2000000 on one device").await;
    wait_told(&cluster, "many", "in all; write simpler selectors, or fewer").await;
    // What the API server has of memory, we have.
    let claims: Api<ResourceClaim> = cluster.api();
    let placed = || async { claims.get("swollen").await.ok()?.status?.allocation.map(|_| ()) };
    wait_until("swollen to be placed", PATIENCE, placed).await;
    let after = wait_until("all controllers to answer", PATIENCE, || all_answer(&cluster)).await;
    assert_eq!(after, before, "nobody was restarted");
    assert_eq!(holder(&cluster).await.as_ref(), Some(&leader), "the lease was never lost");
    cluster.rig.kubectl(&["-n", &quiet, "delete", "pods,resourceclaims", "--all", "--timeout=170s"]);
    cluster.end().await;
}
