//! Measures the node plugin: prepare and unprepare through its socket, of whole GPUs and of shares, the watchdog,
//! start, idle, and pods on a real cluster; and the controller: its decisions, how full it packs, and claims end to
//! end.
//! `hack/bench.sh` sets everything up and says where it is by the environment.
//!
//! Nothing here asserts on a time: the table says what was measured and what is aimed at.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};

mod api;
mod bench;
mod calls;
mod crowd;
mod decide;
#[path = "../../../tests/it/fake_kubelet.rs"]
#[allow(clippy::unwrap_used, clippy::expect_used)]
mod fake_kubelet;
mod figures;
mod hollow;
mod latency;
mod machine;
mod plugin;
mod pods;
mod shares;
mod start;
mod watchdog;

use figures::Report;
use plugin::Setting;

const NOTES: &str = "
*  NVIDIA's gpu-kubelet-plugin, client rate limit raised, whole GPUs (live claims: shared ones): measured on
   another day on a like machine with 2 cores. Memory converted to MiB.
** The live claims have administrative access, which makes records and container edits and holds no GPU; the
   timed claims are whole GPUs.
*** Fifteen shares with four processes each, on every GPU; processor time less that of the plugin with the
   watchdog off. The processes are real, the list of them is the simulated NVML's. The reaction is the time until
   a process is dead that takes too much; the period is 250 ms, and two looks in a row must say so.
Prepare is timed by the caller, through the socket, durable ledger and the claim's GET included. GET, prepare,
sync and unprepare take turns, claim by claim. Times in ms.";

#[tokio::main]
async fn main() -> ExitCode {
    match run().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Parts that measure the node plugin.
const OF_NODE: [&str; 6] = ["start", "latency", "shares", "watchdog", "idle", "pods"];
/// And the controller.
const OF_CONTROLLER: [&str; 3] = ["decide", "packing", "controller"];

/// The parts that are to be measured now.
struct Parts(String);

impl Parts {
    fn of_env() -> Result<Self> {
        let parts = env::var("BENCH_PARTS").context("BENCH_PARTS is not set; run hack/bench.sh")?;
        let known = |part: &&str| OF_NODE.contains(part) || OF_CONTROLLER.contains(part);
        match parts.split_whitespace().find(|part| !known(part)) {
            Some(part) => bail!("no part {part:?}; there are: {OF_CONTROLLER:?} and {OF_NODE:?}"),
            None => Ok(Self(parts)),
        }
    }

    fn want(&self, part: &str) -> bool {
        self.0.split_whitespace().any(|wanted| wanted == part)
    }
}

async fn run() -> Result<()> {
    let parts = Parts::of_env()?;
    let mut report = Report::default();
    let work = path("BENCH_WORK")?;
    report.note(machine::describe(&work));
    of_controller(&parts, &work, &mut report).await?;
    if OF_NODE.iter().any(|part| parts.want(part)) {
        of_node(&parts, work, &mut report).await?;
    }
    println!("{}", report.table());
    let json = path("BENCH_JSON")?;
    // What was measured before, for the same file.
    let before = fs::read(&json).ok().and_then(|text| serde_json::from_slice(&text).ok());
    fs::write(&json, format!("{:#}\n", report.json(before))).with_context(|| json.display().to_string())
}

async fn of_controller(parts: &Parts, work: &Path, report: &mut Report) -> Result<()> {
    let tranche = path("BENCH_TRANCHE")?;
    if parts.want("decide") {
        decide::measure(&tranche, report).await.context("decide")?;
    }
    if parts.want("packing") {
        let data = env::var_os("TRANCHE_DATA").map(PathBuf::from);
        decide::pack(&tranche, data.as_deref(), report).await.context("packing")?;
    }
    if parts.want("controller") {
        let place = crowd::Paths {
            tranche,
            kubeconfig: path("KUBECONFIG")?,
            work: work.to_owned(),
            audit: path("BENCH_AUDIT")?,
        };
        let client = api::client(&place.kubeconfig).await?;
        crowd::measure(&place, &client, report).await.context("controller")?;
    }
    Ok(())
}

async fn of_node(parts: &Parts, work: PathBuf, report: &mut Report) -> Result<()> {
    let setting = Setting {
        tranche: path("BENCH_TRANCHE")?,
        driver_root: path("BENCH_DRIVER_ROOT")?,
        fake_nvml: path("BENCH_FAKE_NVML")?,
        kubeconfig: path("KUBECONFIG")?,
        work,
    };
    let client = api::client(&setting.kubeconfig).await?;
    api::prepare(&client).await?;
    report.note(NOTES);
    if parts.want("start") {
        start::measure(&setting, &client, report).await.context("start")?;
    }
    if parts.want("latency") {
        latency::measure(&setting, &client, report).await.context("latency")?;
    }
    if parts.want("shares") {
        shares::measure(&setting, &client, report).await.context("shares")?;
    }
    if parts.want("watchdog") {
        watchdog::measure(&setting, &client, report).await.context("watchdog")?;
    }
    // A process's own time and memory do not depend on what runs beside it: the pods come meanwhile.
    let (mut of_idle, mut of_pods) = (Report::default(), Report::default());
    let idle = async {
        if parts.want("idle") {
            start::idle(&setting, &client, &mut of_idle).await.context("idle")
        } else {
            Ok(())
        }
    };
    let pods = async {
        if parts.want("pods") { pods::measure(&client, &mut of_pods).await.context("pods") } else { Ok(()) }
    };
    tokio::try_join!(idle, pods)?;
    api::clear(&client).await?;
    report.append(of_idle);
    report.append(of_pods);
    let size = fs::metadata(&setting.tranche)?.len() as f64 / f64::from(1 << 20);
    report.single("stripped binary, MiB", size, "14.3 (15 MB)", "55.8");
    report.figure("binary_mib", size);
    Ok(())
}

fn path(variable: &str) -> Result<PathBuf> {
    let value = env::var_os(variable);
    Ok(value.with_context(|| format!("{variable} is not set; run hack/bench.sh"))?.into())
}
