//! How long the controller's allocator takes for one decision, and how full it packs a public trace: both by
//! `tranche simulate`, so that it is the release binary's own code that is measured. No cluster is needed.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, Result, bail};
use futures::{StreamExt, TryStreamExt, stream};
use serde_json::Value;
use tokio::process::Command;

use crate::figures::{Report, rounded};

/// For the default policy at 1,000 nodes, µs.
const TARGET: &str = "p99 100";
/// For who ends for a pod that fits nowhere, at 1,000 nodes, µs.
const PREEMPT_TARGET: &str = "p99 1000";
/// How many random orders of each set.
const SEEDS: &str = "10";
const LOAD: &str = "1.3";
/// Sets that are replayed at once: one per processor would leave none for what else runs.
const AT_ONCE: usize = 2;
const NODES: &str = "openb_node_list_gpu_node.csv";
const PODS: &str = "openb_pod_list_";

/// One decision, at 100, 1,000 and 5,000 nodes.
pub async fn measure(tranche: &Path, report: &mut Report) -> Result<()> {
    let mut rows = Vec::new();
    for one in objects(tranche, &["simulate", "--bench", "--json"]).await? {
        if one["mig"] == true {
            for name in ["mig_gpus_used", "mig_gpus_first_fit"] {
                report.figure(name, number(&one, name)?);
            }
            continue;
        }
        let nodes = one["nodes"].as_u64().context("no nodes")?;
        if one["preempt"] == true {
            let (p50, p99) = (number(&one, "p50_us")?, number(&one, "p99_us")?);
            report.figure(&format!("preempt_{nodes}_nodes_p99_us"), p99);
            let mut row = vec![format!("preempt, {nodes} nodes × 8 GPUs"), "pack".to_owned()];
            row.extend([p50, p99, number(&one, "most_us")?].map(|micros| rounded(micros).to_string()));
            row.extend([String::new(), String::new(), PREEMPT_TARGET.to_owned()]);
            rows.push(row);
            continue;
        }
        let policy = one["policy"].as_str().context("no policy")?;
        let selectors = one["selectors"] == true;
        let (p50, p99) = (number(&one, "p50_us")?, number(&one, "p99_us")?);
        let plain = policy == "pack" && !selectors;
        if plain {
            report.figure(&format!("decide_{nodes}_nodes_p50_us"), p50);
            report.figure(&format!("decide_{nodes}_nodes_p99_us"), p99);
        } else if !selectors {
            report.figure(&format!("decide_{nodes}_nodes_{policy}_p99_us"), p99);
        }
        let more = if selectors { ", two selectors" } else { "" };
        let mut row = vec![format!("decide, {nodes} nodes × 8 GPUs"), format!("{policy}{more}")];
        row.extend([p50, p99].map(|micros| rounded(micros).to_string()));
        for key in ["most_us", "new_p50_us", "new_p99_us"] {
            row.push(rounded(number(&one, key)?).to_string());
        }
        row.push(if plain && nodes == 1_000 { TARGET.to_owned() } else { String::new() });
        rows.push(row);
    }
    let head = ["µs", "policy", "p50", "p99", "most", "new template: p50", "new template: p99", "target"];
    report.table_of(&head, &rows);
    report.note(
        "One decision of the allocator while pods of 64 templates come and go on a cluster that is about full; \
         each figure is the least of several rounds.",
    );
    Ok(())
}

/// The sets of the public trace in the folder `data`, by every policy.
pub async fn pack(tranche: &Path, data: Option<&Path>, report: &mut Report) -> Result<()> {
    let Some(folder) = data.map(|data| data.join("openb")) else {
        eprintln!("bench: SKIPPED packing: TRANCHE_DATA names no folder with openb/");
        return Ok(());
    };
    let sets = sets(&folder)?;
    let all = sets.iter().map(|set| replay(tranche, &folder, set));
    let all: Vec<Vec<Value>> = stream::iter(all).buffered(AT_ONCE).try_collect().await?;
    let mut rows = Vec::new();
    for (set, objects) in sets.iter().zip(all) {
        for one in &objects {
            rows.push(row(set, one)?);
        }
        let ours = objects.iter().filter(|one| one["policy"] != "kube-default");
        let best = ours.filter_map(|one| one["allocated_percent"].as_f64()).reduce(f64::max);
        report.figure(&format!("packing_percent_{set}"), best.context("nothing was replayed")?);
    }
    let head = [
        "GPUs allocated, %",
        "policy",
        "at 100 % load",
        "paper's best",
        "at 130 % load",
        "least",
        "most",
        "paper's best",
    ];
    report.table_of(&head, &rows);
    report.note(
        "Trace and paper: \"Beware of Fragmentation\", USENIX ATC 2023; means of 10 orders. kube-default is a model \
         of kube-scheduler's default.",
    );
    Ok(())
}

fn row(set: &str, one: &Value) -> Result<Vec<String>> {
    let text = |key: &str| one[key].as_f64().map(|percent| format!("{percent:.2}")).unwrap_or_default();
    let policy = one["policy"].as_str().context("no policy")?;
    let mut row = vec![set.to_owned(), policy.to_owned()];
    row.extend(
        [
            "allocated_percent_at_100",
            "paper_best_percent_at_100",
            "allocated_percent",
            "allocated_percent_min",
            "allocated_percent_max",
            "paper_best_percent",
        ]
        .map(text),
    );
    Ok(row)
}

/// The names of the sets that are there.
fn sets(folder: &Path) -> Result<Vec<String>> {
    let entries = std::fs::read_dir(folder).with_context(|| folder.display().to_string())?;
    let names = entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
    let names: Vec<String> = names.collect::<Result<_>>()?;
    let sets = names.iter().filter_map(|name| name.strip_prefix(PODS)?.strip_suffix(".csv"));
    let mut sets: Vec<String> = sets.map(str::to_owned).collect();
    sets.sort();
    if sets.is_empty() {
        bail!("{} has no {PODS}*.csv", folder.display());
    }
    Ok(sets)
}

async fn replay(tranche: &Path, folder: &Path, set: &str) -> Result<Vec<Value>> {
    let text = |path: PathBuf| path.to_string_lossy().into_owned();
    let (nodes, pods) = (text(folder.join(NODES)), text(folder.join(format!("{PODS}{set}.csv"))));
    let args = ["--nodes", &nodes, "--pods", &pods, "--load", LOAD, "--seeds", SEEDS];
    objects(tranche, &[&["simulate", "--json"], &args[..]].concat()).await
}

/// What `tranche` prints, one object per line.
async fn objects(tranche: &Path, args: &[&str]) -> Result<Vec<Value>> {
    let mut command = Command::new(tranche);
    command.args(args).stdin(Stdio::null()).kill_on_drop(true);
    let output = command.output().await.with_context(|| tranche.display().to_string())?;
    if !output.status.success() {
        bail!("tranche {}: {}", args.join(" "), String::from_utf8_lossy(&output.stderr));
    }
    let text = String::from_utf8(output.stdout)?;
    text.lines().map(|line| Ok(serde_json::from_str(line)?)).collect()
}

fn number(object: &Value, key: &str) -> Result<f64> {
    object[key].as_f64().with_context(|| format!("no {key} in {object}"))
}
