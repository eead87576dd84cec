//! `tranche simulate`: replays a trace of pods against the controller's own allocator, as the authors of
//! "Beware of Fragmentation" (USENIX ATC 2023) did: pods in random order until so much of the cluster's GPUs is
//! requested, none leaves, and what counts is how much of the GPUs is allocated in the end.
//!
//! files ([`trace`], [`profiles`], read by [`rows`]) → runs ([`replay`], [`baseline`] for what a scheduler without scores for devices does)
//! → [`report`], beside the [`paper`]'s figures, and [`plot`]

mod baseline;
mod bench;
mod paper;
mod plot;
pub mod profiles;
mod replay;
mod report;
mod rows;
#[cfg(test)]
mod tests;
pub mod trace;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};

use super::reading::{cause, unreadable};
use super::{UsageError, output};
use profiles::Profiles;
use replay::{Scheduler, Series};
use report::SimulationReport;
use trace::Trace;

#[derive(Debug, Clone, Args)]
pub struct SimulateArgs {
    /// The cluster's nodes: CSV with the columns sn, cpu_milli, memory_mib, gpu, model, and mig_gpus if some of the
    /// GPUs are cut into MIG devices on demand.
    #[arg(long, value_name = "FILE", required_unless_present = "bench")]
    pub nodes: Option<PathBuf>,
    /// The pods: CSV with the columns name, cpu_milli, memory_mib, num_gpu, gpu_milli, gpu_spec if GPUs are
    /// chosen by model, and isolation (mig, or nothing) if some ask for MIG devices.
    #[arg(long, value_name = "FILE", required_unless_present = "bench")]
    pub pods: Option<PathBuf>,
    /// What GPUs can be cut into: CSV with the columns model, profile, compute_slices, memory_mib,
    /// memory_slices, fit, starts.
    #[arg(long, value_name = "FILE")]
    pub mig_profiles: Option<PathBuf>,
    /// Until how much of the cluster's GPUs is requested: 1 is all of them.
    #[arg(long, default_value_t = 1.3)]
    pub load: f64,
    /// pack, spread, fragmentation, or kube-default, a model of kube-scheduler [default: all].
    #[arg(long)]
    pub policy: Option<String>,
    /// How many random orders.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub seeds: u32,
    /// How to print it.
    #[arg(short, long, value_enum, default_value = "table")]
    pub output: SimulateOutput,
    /// Print one JSON object per policy and line.
    #[arg(long, conflicts_with = "output")]
    pub json: bool,
    /// Write what is allocated at each percent of load.
    #[arg(long, value_name = "FILE")]
    pub csv: Option<PathBuf>,
    /// Draw the same.
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Measure decisions at 100, 1,000 and 5,000 nodes instead, with selectors and without.
    #[arg(long, hide = true)]
    pub bench: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum SimulateOutput {
    /// For people.
    #[value(alias = "text")]
    Table,
    /// For programs: all policies in one object.
    Json,
    /// The same.
    Yaml,
}

/// After this time it says on standard error how far it is.
const SILENT: Duration = Duration::from_secs(2);
const LOAD_MAX: f64 = 10.0;

/// Replays and prints.
///
/// # Errors
/// A file or an argument is not what it should be ([`UsageError`]), or an output cannot be written.
pub fn run(args: &SimulateArgs) -> anyhow::Result<()> {
    if args.bench {
        return Ok(super::print(bench::run(args.json).as_bytes())?);
    }
    let schedulers = schedulers(args.policy.as_deref())?;
    if !(args.load > 0.0 && args.load <= LOAD_MAX) {
        return Err(
            UsageError(format!("--load {}: write a number above 0, up to {LOAD_MAX}", args.load)).into()
        );
    }
    let trace = read(args)?;
    let all = schedulers.iter().map(|scheduler| replay_all(&trace, *scheduler, args)).collect();
    let report = SimulationReport { pods: set(args), load: args.load, all };
    if let Some(path) = &args.csv {
        write(path, &report.csv())?;
    }
    if let Some(path) = &args.svg {
        write(path, &plot::svg(&report))?;
    }
    let text = match args.output {
        SimulateOutput::Table if args.json => report.json_lines(),
        SimulateOutput::Table => report.text(),
        SimulateOutput::Json => output::json(&report.document())?,
        SimulateOutput::Yaml => output::yaml(&report.document())?,
    };
    Ok(super::print(text.as_bytes())?)
}

fn schedulers(name: Option<&str>) -> Result<Vec<Scheduler>, UsageError> {
    match name {
        None => Ok(Scheduler::all()),
        Some(name) => Ok(vec![name.parse().map_err(|words| UsageError(format!("--policy: {words}")))?]),
    }
}

fn read(args: &SimulateArgs) -> anyhow::Result<Trace> {
    let text = |path: &Path| {
        let name = path.display().to_string();
        let text = fs::read_to_string(path).map_err(|error| unreadable(&name, &error))?;
        Ok::<_, UsageError>((name, text))
    };
    let (Some(nodes), Some(pods)) = (&args.nodes, &args.pods) else {
        return Err(UsageError("--nodes and --pods are needed".to_owned()).into());
    };
    let profiles = match &args.mig_profiles {
        None => Profiles::default(),
        Some(path) => {
            let (name, text) = text(path)?;
            Profiles::read(&name, &text).map_err(|bad| UsageError(bad.to_string()))?
        }
    };
    let ((nodes_name, nodes), (pods_name, pods)) = (text(nodes)?, text(pods)?);
    let trace = Trace {
        nodes: trace::nodes(&nodes_name, &nodes, &profiles).map_err(|bad| UsageError(bad.to_string()))?,
        pods: trace::pods(&pods_name, &pods).map_err(|bad| UsageError(bad.to_string()))?,
    };
    if trace.capacity_milli() == 0 {
        return Err(UsageError(format!("{nodes_name} has no GPU")).into());
    }
    if trace.pods.iter().all(|pod| pod.milli() == 0) {
        return Err(UsageError(format!(
            "{pods_name} has no pod that asks for a GPU: no load is ever reached"
        ))
        .into());
    }
    Ok(trace)
}

fn replay_all(trace: &Trace, scheduler: Scheduler, args: &SimulateArgs) -> Series {
    let start = Instant::now();
    let mut runs = Vec::new();
    for seed in 0..args.seeds {
        runs.push(replay::run(trace, scheduler, args.load, seed));
        if start.elapsed() > SILENT {
            eprintln!("{scheduler}: {} of {} orders done", seed + 1, args.seeds);
        }
    }
    Series { scheduler, runs }
}

/// The set's name, by which the paper's figures are found.
fn set(args: &SimulateArgs) -> String {
    let stem = args.pods.as_deref().and_then(Path::file_stem);
    stem.map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default()
}

fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    fs::write(path, text)
        .map_err(|error| anyhow::anyhow!("cannot write {}: {}", path.display(), cause(&error)))
}
