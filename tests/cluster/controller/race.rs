//! Pods for whole GPUs and for shares at once: no GPU serves both, and each pod gets its place in the end.

use std::collections::BTreeMap;

use futures::future::join_all;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::{DeleteParams, ListParams};
use serde_json::{Value, json};

use super::books::{Auditor, wait_settled};
use super::{NODE, create, share};
use crate::bed::Bed;
use crate::hollow::{self, on_hollow};
use crate::manifests::{as_nobody, claim, gpu, on, user_of};
use crate::rig::wait_until;

/// Rounds on hollow nodes; more with TRANCHE_ROUNDS. Each is as many races as there are nodes.
const ROUNDS: usize = 50;
const NODES: usize = 4;
/// Rounds with one pod more than there is room for.
const TIGHT_ROUNDS: usize = 5;
/// Rounds on the real node, where pods start and end.
const REAL_ROUNDS: usize = 2;

/// A pod of a race, and what its claim is for.
struct Runner {
    name: String,
    node: String,
    devices: Value,
}

/// As many as a node has room for: whole GPUs but for one, which two share. In no order.
fn runners(round: usize, node: &str, gpus: usize) -> Vec<Runner> {
    let one = |what: &str, nth: usize, devices: Value| Runner {
        name: format!("{what}-{round}-{node}-{nth}"),
        node: node.to_owned(),
        devices,
    };
    let mut runners: Vec<Runner> =
        (1..gpus).map(|nth| one("whole", nth, json!({"requests": [gpu("gpu")]}))).collect();
    for nth in 0..2 {
        let part = one("part", nth, share(json!({"fraction": "0.4"})));
        runners.insert(fastrand::usize(..=runners.len()), part);
    }
    runners
}

fn whole(round: usize, node: &str) -> Runner {
    let name = format!("whole-{round}-{node}");
    Runner { name, node: node.to_owned(), devices: json!({"requests": [gpu("gpu")]}) }
}

async fn start(bed: &Bed, runner: &Runner) {
    let name = &runner.name;
    bed.create(claim(name, runner.devices.clone())).await;
    let mut pod = on_hollow(as_nobody(user_of(name, name)));
    pod["spec"]["nodeSelector"] = json!({"kubernetes.io/hostname": runner.node});
    bed.create(pod).await;
}

#[tokio::test]
async fn on_many_nodes_whole_gpus_and_shares_race_and_no_gpu_serves_both() {
    let test = "on_many_nodes_whole_gpus_and_shares_race_and_no_gpu_serves_both";
    let Some(bed) = super::bed(test).await else { return };
    let rounds =
        std::env::var("TRANCHE_ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(ROUNDS);
    let (nodes, release) = (hollow::add(&bed, NODES, NODE).await, bed.release().await);
    let gpus = bed.published(&nodes[0]).await.len();
    assert!(gpus >= 2, "the node has {gpus} GPUs");
    let auditor = Auditor::begin(&bed.client).await;
    let begin = std::time::Instant::now();
    for round in 0..rounds {
        let runners = nodes.iter().flat_map(|node| runners(round, node, gpus)).collect::<Vec<_>>();
        join_all(runners.iter().map(|runner| start(&bed, runner))).await;
        hollow::wait_bound(&bed, runners.len()).await;
        // Before, a hold that lost stands by until the winner ends.
        if release >= 36 {
            wait_settled(&bed.client).await;
        }
        hollow::clear(&bed).await;
    }
    let looks = auditor.end().await;
    let took = begin.elapsed().as_secs_f64();
    println!("{} races in {rounds} rounds, {looks} looks, {took:.0} s", rounds * nodes.len());
    bed.end().await;
}

/// More than the node has room for: whoever comes too late is told so, and gets its place when there is one. In every
/// other round those for whole GPUs come a little before the others.
#[tokio::test]
async fn who_loses_a_race_for_the_last_gpu_waits_with_a_reason() {
    let test = "who_loses_a_race_for_the_last_gpu_waits_with_a_reason";
    let Some(bed) = super::bed_beside(test, 1).await else { return };
    let gpus = bed.published("hollow-0").await.len();
    let auditor = Auditor::begin(&bed.client).await;
    let mut rounds_lost = BTreeMap::new();
    for round in 0..TIGHT_ROUNDS {
        let mut runners = runners(round, "hollow-0", gpus);
        runners.push(Runner { name: format!("late-{round}"), ..whole(round, "hollow-0") });
        let (first, then): (Vec<&Runner>, Vec<_>) =
            runners.iter().partition(|runner| round % 2 == 0 || !runner.name.starts_with("part"));
        for these in [first, then] {
            join_all(these.into_iter().map(|runner| start(&bed, runner))).await;
        }
        // All whole ones, or the parts and all whole ones but one.
        hollow::wait_bound(&bed, gpus).await;
        let losers = async || {
            let mut losers = Vec::new();
            for runner in &runners {
                let pod = bed.api::<Pod>().get(&runner.name).await.ok()?;
                if pod.spec.is_none_or(|spec| spec.node_name.is_none()) {
                    losers.push(runner.name.clone());
                }
            }
            (runners.len() - losers.len() >= gpus).then_some(losers)
        };
        let is_told = async |name: &String| {
            let reasons = if name.starts_with("part") { super::WAITS } else { "FailedScheduling" };
            bed.events(name).await.into_iter().find(|event| event.starts_with(reasons))
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
        super::end_hollow(&bed, &winner.expect("some have won").name).await;
        hollow::wait_bound(&bed, runners.len() - 1).await;
        hollow::clear(&bed).await;
    }
    println!("{TIGHT_ROUNDS} races (by losers: {rounds_lost:?}), {} looks", auditor.end().await);
    hollow::end(bed).await;
}

#[tokio::test]
async fn whole_gpus_and_shares_race_and_no_gpu_serves_both() {
    let Some(bed) = super::bed("whole_gpus_and_shares_race_and_no_gpu_serves_both").await else { return };
    let gpus = bed.shareable(NODE).await.len();
    assert!(gpus >= 2, "the node has {gpus} GPUs");
    let auditor = Auditor::begin(&bed.client).await;
    for round in 0..REAL_ROUNDS {
        let whole: Vec<String> = (1..gpus).map(|nth| format!("whole-{round}-{nth}")).collect();
        let parts: Vec<String> = (0..2).map(|nth| format!("part-{round}-{nth}")).collect();
        let wholes = async {
            for name in &whole {
                bed.create(claim(name, json!({"requests": [gpu("gpu")]}))).await;
                bed.create(on(NODE, as_nobody(user_of(name, name)))).await;
            }
        };
        let shares = async {
            for name in &parts {
                create(&bed, name, json!({"fraction": "0.4"})).await;
            }
        };
        tokio::join!(wholes, shares);
        for name in whole.iter().chain(&parts) {
            bed.wait_ready(name).await;
        }
        let pods = bed.api::<k8s_openapi::api::core::v1::Pod>();
        pods.delete_collection(&DeleteParams::default(), &ListParams::default())
            .await
            .expect("pods can be deleted");
        for name in whole.iter().chain(&parts) {
            bed.gone(name).await;
        }
        bed.api::<ResourceClaim>()
            .delete_collection(&DeleteParams::default(), &ListParams::default())
            .await
            .expect("claims can be deleted");
    }
    println!("{REAL_ROUNDS} rounds, {} looks", auditor.end().await);
    bed.end().await;
}
