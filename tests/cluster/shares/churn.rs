//! Many shares come and go on all GPUs at once: at no time is more granted than there is, and nothing stays.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::time::Instant;

use futures::StreamExt;
use serde_json::{Value, json};

use super::{Board, bed};
use crate::bed::{Bed, failed_operations};
use crate::manifests::{as_nobody, by_template, of_gpu, share, template};

const PODS: usize = 50;
const WAVES: usize = 2;

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
async fn settled(bed: &Bed, boards: &[Board]) -> usize {
    let mut claims = 0;
    let node = &boards[0].node;
    let granted = granted(&bed.state(node).await, boards);
    for board in boards {
        let sum = &granted[&board.uuid];
        claims += sum.claims;
        if sum.claims == 0 {
            board.wait_rest_if_any(bed).await;
            continue;
        }
        assert!(board.is_exclusive(bed), "{} has shares", board.device);
        let daemon = board.daemon(bed).await.expect("it has a daemon");
        assert!(daemon["phase"]["Serving"].is_object(), "{daemon}");
        assert_eq!(daemon["limits"]["memory"], json!([sum.loosest << 20]), "{}: {sum:?}", board.device);
    }
    claims
}

impl Board {
    /// As [`Board::wait_rest`], also where there never was a daemon.
    async fn wait_rest_if_any(&self, bed: &Bed) {
        match self.daemon(bed).await {
            Some(_) => self.wait_rest(bed).await,
            None => assert!(!self.is_exclusive(bed), "{} has no daemon", self.device),
        }
    }
}

#[tokio::test]
async fn fifty_shares_come_and_go_on_all_gpus_at_once() {
    let Some(bed) = bed("fifty_shares_come_and_go_on_all_gpus_at_once").await else { return };
    let mut nodes = Vec::new();
    for node in &bed.nodes {
        nodes.push(Board::all(&bed, node).await);
    }
    nodes.retain(|boards| !boards.is_empty());
    let boards: Vec<&Board> = nodes.iter().flatten().collect();
    // Sizes that fill a board, so that many have to wait until others go.
    let sizes = ["1Gi", "12Gi", "20Gi", "3000Mi"];
    for (number, board) in boards.iter().enumerate() {
        for (which, size) in sizes.iter().enumerate() {
            let compute = if which % 2 == 0 { 0 } else { 20 };
            let request = of_gpu(&board.uuid, share(size, compute));
            bed.create(template(&format!("gpu-{number}-{which}"), json!({"requests": [request]}))).await;
        }
    }
    let mut failures = 0.0;
    for boards in &nodes {
        failures -= failed_operations(&bed.metrics(&boards[0].node).await);
    }
    let begin = Instant::now();
    let over = Cell::new(false);
    let waves = async {
        for wave in 0..WAVES {
            let names: Vec<String> = (0..PODS).map(|number| format!("w{wave}-{number}")).collect();
            for (number, name) in names.iter().enumerate() {
                let template =
                    format!("gpu-{}-{}", number % boards.len(), (number / boards.len() + wave) % sizes.len());
                let mut pod = as_nobody(by_template(&template, name));
                pod["spec"]["restartPolicy"] = json!("Never");
                pod["spec"]["terminationGracePeriodSeconds"] = json!(u8::from(number % 2 == 0));
                bed.create(pod).await;
            }
            let (stay, go) = names.split_at(PODS / 2);
            each(go, async |name| drop(bed.wait_ready(name).await)).await;
            each(stay, async |name| drop(bed.wait_ready(name).await)).await;
            println!("wave {wave}: all Ready after {:.1} s", begin.elapsed().as_secs_f64());
            let mut claims = 0;
            for boards in &nodes {
                claims += settled(&bed, boards).await;
            }
            assert_eq!(claims, PODS, "every pod has its claim in a ledger");
            each(go, async |name| bed.delete(name).await).await;
            for boards in &nodes {
                settled(&bed, boards).await;
            }
            each(stay, async |name| bed.delete(name).await).await;
            for boards in &nodes {
                assert_eq!(settled(&bed, boards).await, 0, "nothing is held");
            }
        }
        over.set(true);
    };
    futures::join!(waves, watch(&bed, &nodes, &over));
    println!("{} shares in {:.1} s", WAVES * PODS, begin.elapsed().as_secs_f64());
    bed.wait_clean().await;
    for boards in &nodes {
        failures += failed_operations(&bed.metrics(&boards[0].node).await);
    }
    assert_eq!(failures, 0.0, "operations that failed");
    bed.end().await;
}

async fn each(names: &[String], act: impl AsyncFn(&String)) {
    let acts = futures::stream::iter(names).map(|name| act(name));
    acts.buffer_unordered(PODS).collect::<Vec<()>>().await;
}

/// Looks at the ledgers without end, whatever is under way.
async fn watch(bed: &Bed, nodes: &[Vec<Board>], over: &Cell<bool>) {
    let mut ticks = tokio::time::interval(std::time::Duration::from_millis(200));
    while !over.get() {
        ticks.tick().await;
        for boards in nodes {
            granted(&bed.state(&boards[0].node).await, boards);
        }
    }
}
