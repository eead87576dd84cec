//! Measures the node plugin: prepare and unprepare through its socket, of whole GPUs and of shares, the watchdog,
//! start, idle, and pods on a real cluster.
//! `hack/bench.sh` sets everything up and says where it is by the environment.
//!
//! Nothing here asserts on a time: the table says what was measured and what is aimed at.

use std::env;
use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};

mod api;
mod bench;
mod calls;
#[path = "../../../tests/it/fake_kubelet.rs"]
#[allow(clippy::unwrap_used, clippy::expect_used)]
mod fake_kubelet;
mod figures;
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

async fn run() -> Result<()> {
    let work = path("BENCH_WORK")?;
    let setting = Setting {
        tranche: path("BENCH_TRANCHE")?,
        driver_root: path("BENCH_DRIVER_ROOT")?,
        fake_nvml: path("BENCH_FAKE_NVML")?,
        kubeconfig: path("KUBECONFIG")?,
        work,
    };
    let machine = machine::describe(&setting.work);
    let client = api::client(&setting.kubeconfig).await?;
    api::prepare(&client).await?;
    let mut report = Report::default();
    report.note(machine);
    report.note(NOTES);
    let parts =
        env::var("BENCH_PARTS").unwrap_or_else(|_| "start latency shares watchdog idle pods".to_owned());
    let wanted = |part: &str| parts.split_whitespace().any(|wanted| wanted == part);
    if wanted("start") {
        start::measure(&setting, &client, &mut report).await.context("start")?;
    }
    if wanted("latency") {
        latency::measure(&setting, &client, &mut report).await.context("latency")?;
    }
    if wanted("shares") {
        shares::measure(&setting, &client, &mut report).await.context("shares")?;
    }
    if wanted("watchdog") {
        watchdog::measure(&setting, &client, &mut report).await.context("watchdog")?;
    }
    // A process's own time and memory do not depend on what runs beside it: the pods come meanwhile.
    let (mut of_idle, mut of_pods) = (Report::default(), Report::default());
    let idle = async {
        if wanted("idle") {
            start::idle(&setting, &client, &mut of_idle).await.context("idle")
        } else {
            Ok(())
        }
    };
    let pods = async {
        if wanted("pods") { pods::measure(&client, &mut of_pods).await.context("pods") } else { Ok(()) }
    };
    tokio::try_join!(idle, pods)?;
    api::clear(&client).await?;
    report.append(of_idle);
    report.append(of_pods);
    let size = fs::metadata(&setting.tranche)?.len() as f64 / f64::from(1 << 20);
    report.single("stripped binary, MiB", size, "14.3 (15 MB)", "55.8");
    report.figure("binary_mib", size);

    println!("{}", report.table());
    let json = path("BENCH_JSON")?;
    fs::write(&json, format!("{:#}\n", report.json())).with_context(|| json.display().to_string())
}

fn path(variable: &str) -> Result<PathBuf> {
    let value = env::var_os(variable);
    Ok(value.with_context(|| format!("{variable} is not set; run hack/bench.sh"))?.into())
}
