//! Pods for whole GPUs and for shares at once: no GPU serves both, and each pod gets its place in the end.

use std::collections::BTreeMap;

use futures::future::join_all;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::{Api, DeleteParams, ListParams};
use serde_json::{Value, json};

use super::books::{Auditor, wait_settled};
use super::{NODE, create, share};
use crate::hollow::{self, on_hollow};
use crate::manifests::{as_nobody, claim, container, gpu, on, pod, user_of};
use crate::rig::wait_until;
use crate::test_cluster::{SYSTEM, TestCluster};

/// Rounds on hollow nodes; more with TRANCHE_ROUNDS. Each is as many races as there are nodes.
const ROUNDS: usize = 20;
const NODES: usize = 4;
/// Rounds with one pod more than there is room for.
const TIGHT_ROUNDS: usize = 5;
/// Rounds on the real node, where pods start and end.
const REAL_ROUNDS: usize = 2;

/// A pod of a race.
struct Runner {
    name: String,
    node: String,
    asks: Asks,
}

#[derive(Clone)]
enum Asks {
    Claim(Value),
    /// `nvidia.com/gpu` among its limits: the scheduler makes the claim as it binds the pod.
    Limit,
}

fn whole_gpu() -> Asks {
    Asks::Claim(json!({"requests": [gpu("gpu")]}))
}

/// As many as a node has room for: whole GPUs but for one, which two share. In no order. `whole`: how the others ask.
fn runners(round: usize, node: &str, gpus: usize, whole: impl Fn() -> Asks) -> Vec<Runner> {
    let one = |what: &str, nth: usize, asks: Asks| Runner {
        name: format!("{what}-{round}-{node}-{nth}"),
        node: node.to_owned(),
        asks,
    };
    let mut runners: Vec<Runner> = (1..gpus).map(|nth| one("whole", nth, whole())).collect();
    for nth in 0..2 {
        let part = one("part", nth, Asks::Claim(share(json!({"fraction": "0.4"}))));
        runners.insert(fastrand::usize(..=runners.len()), part);
    }
    runners
}

fn whole(round: usize, node: &str) -> Runner {
    Runner { name: format!("whole-{round}-{node}"), node: node.to_owned(), asks: whole_gpu() }
}

async fn start(cluster: &TestCluster, runner: &Runner) {
    let name = &runner.name;
    let mut pod = match &runner.asks {
        Asks::Claim(devices) => {
            cluster.create(claim(name, devices.clone())).await;
            user_of(name, name)
        }
        Asks::Limit => {
            let mut asks = container("main", json!([]));
            asks["resources"] = json!({"limits": {"nvidia.com/gpu": 1}});
            pod(name, json!([]), json!([asks]))
        }
    };
    pod = on_hollow(as_nobody(pod));
    pod["spec"]["nodeSelector"] = json!({"kubernetes.io/hostname": runner.node});
    cluster.create(pod).await;
}

fn holds(cluster: &TestCluster) -> (Api<ResourceClaim>, ListParams) {
    (Api::namespaced(cluster.client.clone(), SYSTEM), ListParams::default().labels("tranche.dev/hold"))
}

/// Until a GPU of the node is held.
async fn wait_held(cluster: &TestCluster, node: &str) {
    let (api, ours) = holds(cluster);
    let on_node = |hold: &ResourceClaim| {
        let annotations = hold.metadata.annotations.as_ref();
        annotations.is_some_and(|all| all.get("tranche.dev/node").is_some_and(|name| name == node))
    };
    let held = || async { api.list(&ours).await.ok()?.items.iter().any(on_node).then_some(()) };
    wait_until("a GPU to be held", hollow::LONG, held).await;
}

/// All GPUs are nobody's again: the next round takes them anew.
async fn let_go(cluster: &TestCluster) {
    let (api, ours) = holds(cluster);
    api.delete_collection(&DeleteParams::default(), &ours).await.expect("holds can be deleted");
    let gone = || async { api.list(&ours).await.ok()?.items.is_empty().then_some(()) };
    wait_until("the holds to be gone", hollow::LONG, gone).await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn on_many_nodes_whole_gpus_and_shares_race_and_no_gpu_serves_both() {
    let test = "on_many_nodes_whole_gpus_and_shares_race_and_no_gpu_serves_both";
    let cluster = super::cluster(test).await;
    let rounds =
        std::env::var("TRANCHE_ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(ROUNDS);
    let (nodes, release) = (hollow::add(&cluster, NODES, NODE).await, cluster.release().await);
    let gpus = cluster.published(&nodes[0]).await.len();
    assert!(gpus >= 2, "the node has {gpus} GPUs");
    let auditor = Auditor::begin(&cluster.client).await;
    let begin = std::time::Instant::now();
    // Limits are the scheduler's business from 1.36 on.
    let asks = || if release >= 36 && fastrand::bool() { Asks::Limit } else { whole_gpu() };
    for round in 0..rounds {
        let runners = nodes.iter().flat_map(|node| runners(round, node, gpus, asks)).collect::<Vec<_>>();
        // In every other round those for whole GPUs come while the holds settle.
        let (now, then): (Vec<&Runner>, Vec<_>) =
            runners.iter().partition(|runner| round % 2 == 0 || !runner.name.starts_with("whole"));
        let late = nodes.iter().map(|node| {
            let here = then.iter().filter(|runner| runner.node == *node);
            let starts = here.map(|runner| start(&cluster, runner)).collect::<Vec<_>>();
            async {
                if !starts.is_empty() {
                    wait_held(&cluster, node).await;
                }
                join_all(starts).await
            }
        });
        futures::join!(join_all(now.into_iter().map(|runner| start(&cluster, runner))), join_all(late));
        hollow::wait_bound(&cluster, runners.len()).await;
        // Before, a hold that lost stands by until the winner ends.
        if release >= 36 {
            wait_settled(&cluster.client).await;
        }
        hollow::clear(&cluster).await;
        let_go(&cluster).await;
    }
    let looks = auditor.end().await;
    let took = begin.elapsed().as_secs_f64();
    println!("{} races in {rounds} rounds, {looks} looks, {took:.0} s", rounds * nodes.len());
    cluster.end().await;
}

/// More than the node has room for: whoever comes too late is told so, and gets its place when there is one. In every
/// other round those for whole GPUs come a little before the others.
#[tokio::test]
#[ignore = "needs a rig"]
async fn who_loses_a_race_for_the_last_gpu_waits_with_a_reason() {
    let test = "who_loses_a_race_for_the_last_gpu_waits_with_a_reason";
    let cluster = super::bed_beside(test, 1).await;
    let gpus = cluster.published("hollow-0").await.len();
    let auditor = Auditor::begin(&cluster.client).await;
    let mut rounds_lost = BTreeMap::new();
    for round in 0..TIGHT_ROUNDS {
        let mut runners = runners(round, "hollow-0", gpus, whole_gpu);
        runners.push(Runner { name: format!("late-{round}"), ..whole(round, "hollow-0") });
        let (first, then): (Vec<&Runner>, Vec<_>) =
            runners.iter().partition(|runner| round % 2 == 0 || !runner.name.starts_with("part"));
        for these in [first, then] {
            join_all(these.into_iter().map(|runner| start(&cluster, runner))).await;
        }
        // All whole ones, or the parts and all whole ones but one.
        hollow::wait_bound(&cluster, gpus).await;
        let losers = async || {
            let mut losers = Vec::new();
            for runner in &runners {
                let pod = cluster.api::<Pod>().get(&runner.name).await.ok()?;
                if pod.spec.is_none_or(|spec| spec.node_name.is_none()) {
                    losers.push(runner.name.clone());
                }
            }
            (runners.len() - losers.len() >= gpus).then_some(losers)
        };
        let is_told = async |name: &String| {
            let reasons = if name.starts_with("part") { super::WAITS } else { "FailedScheduling" };
            cluster.events(name).await.into_iter().find(|event| event.starts_with(reasons))
        };
        // Until they are known for good, and each is told.
        let told = || async {
            let losers = losers().await?;
            let parts = losers.iter().filter(|name| name.starts_with("part")).count();
            let mut told = Vec::new();
            for loser in &losers {
                told.push(format!("{loser}: {}", is_told(loser).await?));
            }
            ((losers.len(), parts) == (1, 0) || (losers.len(), parts) == (2, 2)).then_some(told)
        };
        for told in wait_until("the losers to be told", hollow::LONG, told).await {
            println!("{}", told.chars().take(200).collect::<String>());
        }
        let lost = losers().await.expect("pods are there");
        *rounds_lost.entry(lost.len()).or_insert(0) += 1;
        // One GPU becomes free.
        let winner = runners.iter().find(|one| one.name.starts_with("whole") && !lost.contains(&one.name));
        super::end_hollow(&cluster, &winner.expect("some have won").name).await;
        hollow::wait_bound(&cluster, runners.len() - 1).await;
        hollow::clear(&cluster).await;
    }
    println!("{TIGHT_ROUNDS} races (by losers: {rounds_lost:?}), {} looks", auditor.end().await);
    hollow::end(cluster).await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn whole_gpus_and_shares_race_and_no_gpu_serves_both() {
    let cluster = super::cluster("whole_gpus_and_shares_race_and_no_gpu_serves_both").await;
    let gpus = cluster.shareable(NODE).await.len();
    assert!(gpus >= 2, "the node has {gpus} GPUs");
    let auditor = Auditor::begin(&cluster.client).await;
    for round in 0..REAL_ROUNDS {
        let whole: Vec<String> = (1..gpus).map(|nth| format!("whole-{round}-{nth}")).collect();
        let parts: Vec<String> = (0..2).map(|nth| format!("part-{round}-{nth}")).collect();
        let wholes = async {
            for name in &whole {
                cluster.create(claim(name, json!({"requests": [gpu("gpu")]}))).await;
                cluster.create(on(NODE, as_nobody(user_of(name, name)))).await;
            }
        };
        let shares = async {
            for name in &parts {
                create(&cluster, name, json!({"fraction": "0.4"})).await;
            }
        };
        tokio::join!(wholes, shares);
        for name in whole.iter().chain(&parts) {
            cluster.wait_ready(name).await;
        }
        let pods = cluster.api::<k8s_openapi::api::core::v1::Pod>();
        pods.delete_collection(&DeleteParams::default(), &ListParams::default())
            .await
            .expect("pods can be deleted");
        for name in whole.iter().chain(&parts) {
            cluster.gone(name).await;
        }
        cluster
            .api::<ResourceClaim>()
            .delete_collection(&DeleteParams::default(), &ListParams::default())
            .await
            .expect("claims can be deleted");
    }
    println!("{REAL_ROUNDS} rounds, {} looks", auditor.end().await);
    cluster.end().await;
}
