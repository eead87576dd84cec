//! Many shares come and go on all GPUs at once: at no time is more granted than there is, and nothing stays.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::time::Instant;

use k8s_openapi::api::core::v1::Event;
use kube::api::ListParams;
use serde_json::{Value, json};

use super::{Board, cluster};
use crate::manifests::{as_nobody, by_template, of_gpu, share, template};
use crate::rig::wait_until;
use crate::test_cluster::{PATIENCE, SOON, TestCluster, failed_operations, sum};

const PODS: usize = 50;
/// Percent of a GPU's memory and of its compute: of the pods that come first, in turn, and of those that come
/// later, which need the room of others.
const FIRST: [(u64, u32); 4] = [(2, 0), (10, 20), (22, 0), (4, 20)];
const LATER: (u64, u32) = (24, 0);

/// What the ledger has of one board.
#[derive(Debug, Default)]
struct Granted {
    mib: u64,
    compute: u64,
    slots: u64,
    /// The most that one process of a claim may have, in MiB.
    loosest: u64,
    claims: usize,
}

/// Checks one look at a node's ledger: sums within what there is. By UUID.
fn granted(state: &Value, boards: &[Board]) -> BTreeMap<String, Granted> {
    let mut all: BTreeMap<String, Granted> =
        boards.iter().map(|board| (board.uuid.clone(), Granted::default())).collect();
    for claim in state["claims"].as_array().into_iter().flatten() {
        for held in claim["intent"]["devices"].as_array().into_iter().flatten() {
            let uuid = held["gpu"].as_str().unwrap();
            let grant = &held["mode"]["Share"];
            let number = |name: &str| grant[name].as_u64().unwrap_or_default();
            let board = all.get_mut(uuid).expect("only boards that are shared are held");
            let mib = number("memory") >> 20;
            board.mib += mib;
            board.compute += number("compute");
            board.slots += number("slots");
            board.loosest = board.loosest.max(mib / number("processes").max(1));
            board.claims += 1;
        }
    }
    for board in boards {
        let sum = &all[&board.uuid];
        assert!(sum.mib <= board.grantable_mib, "{board:?}: {sum:?}");
        assert!(sum.compute <= 100 && sum.slots <= 16, "{board:?}: {sum:?}");
    }
    all
}

/// When nothing is under way: each board that has shares is for MPS alone, its daemon as loose as the loosest
/// share; each other board is anyone's, its daemon at rest.
async fn settled(cluster: &TestCluster, nodes: &[Vec<Board>]) -> usize {
    let mut claims = 0;
    for boards in nodes {
        claims += settled_on(cluster, &boards[0].node, boards).await;
    }
    claims
}

async fn settled_on(cluster: &TestCluster, node: &str, boards: &[Board]) -> usize {
    let mut claims = 0;
    let granted = granted(&cluster.state(node).await, boards);
    for board in boards {
        let sum = &granted[&board.uuid];
        claims += sum.claims;
        if sum.claims == 0 {
            board.wait_rest_if_any(cluster).await;
            continue;
        }
        assert!(board.is_exclusive(cluster), "{} has shares", board.device);
        let loosest = json!([sum.loosest << 20]);
        let serves = || async {
            let daemon = board.daemon(cluster).await?;
            (daemon["phase"]["Serving"].is_object() && daemon["limits"]["memory"] == loosest).then_some(())
        };
        wait_until(&format!("{} to be served with {loosest} at most", board.device), SOON, serves).await;
    }
    claims
}

impl Board {
    /// As [`Board::wait_rest`], also where there never was a daemon.
    async fn wait_rest_if_any(&self, cluster: &TestCluster) {
        match self.daemon(cluster).await {
            Some(_) => self.wait_rest(cluster).await,
            None => assert!(!self.is_exclusive(cluster), "{} has no daemon", self.device),
        }
    }
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn fifty_shares_come_and_go_on_all_gpus_at_once() {
    let Some(cluster) = cluster("fifty_shares_come_and_go_on_all_gpus_at_once").await else { return };
    let mut nodes = Vec::new();
    for node in &cluster.nodes {
        nodes.push(Board::all(&cluster, node).await);
    }
    nodes.retain(|boards| !boards.is_empty());
    let boards: Vec<&Board> = nodes.iter().flatten().collect();
    for (number, board) in boards.iter().enumerate() {
        for (which, (memory, compute)) in FIRST.into_iter().chain([LATER]).enumerate() {
            let memory = format!("{}Mi", board.grantable_mib * memory / 100);
            let request = of_gpu(&board.uuid, share(&memory, compute));
            cluster.create(template(&format!("gpu-{number}-{which}"), json!({"requests": [request]}))).await;
        }
    }
    let before = told(&cluster, &nodes).await;
    let begin = Instant::now();
    let over = Cell::new(false);
    let in_turn = |number: usize| (number % boards.len(), number / boards.len() % FIRST.len());
    let later = |number: usize| (number % boards.len(), FIRST.len());
    let waves = async {
        let first = names("first", PODS);
        let (stay, go) = first.split_at(PODS - PODS / 4);
        start(&cluster, &first, 1, in_turn).await;
        println!("{PODS} shares are Ready after {:.1} s", begin.elapsed().as_secs_f64());
        assert_eq!(settled(&cluster, &nodes).await, PODS, "every pod has its claim in a ledger");
        // What goes makes room for others at once.
        let second = names("second", PODS / 4);
        futures::join!(cluster.delete_all(go), start(&cluster, &second, 0, later));
        assert_eq!(settled(&cluster, &nodes).await, PODS);
        as_before(&before, &told(&cluster, &nodes).await, 0.0);
        // Without a grace period pods are gone from the API server before their containers are, and their
        // shares are given away at once: those wait until there is room. Kubelet may release a share, too, while
        // processes of its pod run: then it stays granted until they have ended.
        let third = names("third", PODS / 4);
        futures::join!(cluster.delete_all(&second), start(&cluster, &third, 1, later));
        wait_held(&cluster, &nodes, PODS).await;
        assert_eq!(settled(&cluster, &nodes).await, PODS);
        cluster.delete_all(stay).await;
        cluster.delete_all(&third).await;
        assert_eq!(settled(&cluster, &nodes).await, 0, "nothing is held");
        over.set(true);
    };
    futures::join!(waves, watch(&cluster, &nodes, &over));
    println!("{} shares in {:.1} s", PODS + PODS / 4 + PODS / 4, begin.elapsed().as_secs_f64());
    cluster.wait_clean().await;
    let after = told(&cluster, &nodes).await;
    as_before(&before, &after, after.refused + after.withheld - before.refused - before.withheld);
    cluster.end().await;
}

/// No operation failed but those that were `refused`, no slice was written, and nobody was told of anything bad. On a
/// machine that is too busy for an MPS daemon to answer in time, its GPU is tainted until it does: then the sums of
/// [`granted`], which hold at all times, are all that is asked for.
fn as_before(before: &Told, after: &Told, refused: f64) {
    if let [slow, ..] = &after.slow[..] {
        println!("an MPS daemon was too slow {} times: {slow}", after.slow.len());
        return;
    }
    assert_eq!(after.failed - before.failed, refused, "failed operations");
    // A claim of a pod that was deleted without a grace period is gone before its container is. If the sweeper comes in
    // between, it takes the claim for one that was taken away, and taints the GPU until the container has ended.
    match after.swept > before.swept {
        true => println!("the sweeper came between a pod's end and its container's"),
        false => assert_eq!(after.slices, before.slices, "written though no device changed"),
    }
    assert_eq!(after.bad, [""; 0]);
}

/// Waits until so many claims are in the ledgers: what kubelet ends may be there for a while after its pod is gone.
async fn wait_held(cluster: &TestCluster, nodes: &[Vec<Board>], count: usize) {
    let held = || async {
        let mut claims = 0;
        for boards in nodes {
            let state = cluster.state(&boards[0].node).await;
            claims += granted(&state, boards).values().map(|board| board.claims).sum::<usize>();
        }
        (claims == count).then_some(())
    };
    wait_until(&format!("{count} claims to be held"), PATIENCE, held).await;
}

/// What nobody may be told of while all is well.
const BAD: [&str; 4] = ["MpsUnhealthy", "DeviceUnhealthy", "GrantExceeded", "ProcessEnded"];

const WITHHELD: &str =
    "tranche_claim_operation_duration_seconds_count{operation=\"unprepare\",result=\"not_yet\"}";
/// Deadlines of the daemon's start, of its answers and of its limits, in the words that they are missed with.
const SLOW: [&str; 3] =
    ["did not answer within", "did not go into the background within", "its limits are not in force"];

/// What the plugins of all nodes have counted, and written, and what events tell.
#[derive(Debug, Default)]
struct Told {
    failed: f64,
    /// For want of room.
    refused: f64,
    /// Released while processes of the pod ran.
    withheld: f64,
    /// Put right by the sweeper.
    swept: f64,
    slices: Vec<Option<String>>,
    slow: Vec<String>,
    bad: Vec<String>,
}

async fn told(cluster: &TestCluster, nodes: &[Vec<Board>]) -> Told {
    let mut told = Told { slices: cluster.versions().await, ..Told::default() };
    for event in cluster.api::<Event>().list(&ListParams::default()).await.expect("events") {
        let message = event.message.unwrap_or_default();
        if SLOW.iter().any(|words| message.contains(words)) {
            told.slow.push(message);
        } else if event.reason.is_some_and(|reason| BAD.contains(&reason.as_str())) {
            told.bad.push(message);
        }
    }
    for boards in nodes {
        let metrics = cluster.metrics(&boards[0].node).await;
        told.failed += failed_operations(&metrics);
        told.refused += sum(&metrics, "tranche_refused_double_allocations_total");
        told.withheld += sum(&metrics, WITHHELD);
        told.swept += sum(&metrics, "tranche_sweeper_repairs_total");
    }
    told
}

fn names(wave: &str, count: usize) -> Vec<String> {
    (0..count).map(|number| format!("{wave}-{number}")).collect()
}

/// Starts a pod of each name, with the board and the size that its number has, and waits until all run.
async fn start(cluster: &TestCluster, names: &[String], grace: u32, of: impl Fn(usize) -> (usize, usize)) {
    for (number, name) in names.iter().enumerate() {
        let (board, size) = of(number);
        let template = format!("gpu-{board}-{size}");
        let mut pod = as_nobody(by_template(&template, name));
        pod["spec"]["restartPolicy"] = json!("Never");
        pod["spec"]["terminationGracePeriodSeconds"] = json!(grace);
        cluster.create(pod).await;
    }
    cluster.wait_all_ready(names).await;
}

/// Looks at the ledgers without end, whatever is under way.
async fn watch(cluster: &TestCluster, nodes: &[Vec<Board>], over: &Cell<bool>) {
    let mut ticks = tokio::time::interval(std::time::Duration::from_millis(200));
    while !over.get() {
        ticks.tick().await;
        for boards in nodes {
            granted(&cluster.state(&boards[0].node).await, boards);
        }
    }
}
