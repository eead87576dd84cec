//! `tranche plan`: what preparing a claim would do here, without doing it. Decided by the very code that
//! the node plugin runs; only the printing is its own.
//!
//! claim ([`super::manifest`]) + node ([`site`]) → [`decide`] → [`report`]

mod decide;
mod driver;
mod report;
mod site;
mod why;

use std::io::{self, Read};
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};

use super::manifest::{Manifest, Source, documents};
use super::reach::ReachArgs;
use super::{EXIT_REFUSED, Usage, inspect};
use crate::cluster::KubeCluster;
use report::Verdict;

/// More than any claim or state has.
const INPUT_BYTES_MAX: u64 = 16 * 1024 * 1024;

#[derive(Debug, Clone, Args)]
#[command(
    after_help = "Exit codes: 0 all claims would be prepared, 3 one would be refused or is not allocated yet, \
                        2 a mistake in what was given, 1 the node plugin or the API server did not answer."
)]
pub struct PlanArgs {
    /// The ResourceClaim: a YAML or JSON file, - for standard input, or the name of one in the cluster. Of a file with
    /// several objects all claims are planned, and the claims that its ResourceClaimTemplates would give to pods.
    #[arg(long, value_name = "FILE|NAMESPACE/NAME")]
    pub claim: String,
    /// The node's GPUs, from a file: what `tranche inspect -o json` prints, or its `inventory` alone
    /// [default: ask the running node plugin].
    #[arg(long, value_name = "FILE")]
    pub gpus: Option<PathBuf>,
    #[command(flatten)]
    pub place: inspect::PluginAddress,
    /// A folder of ledger records: the claims that hold devices already
    /// [default: those in the state].
    #[arg(long, value_name = "DIR")]
    pub ledger: Option<PathBuf>,
    /// The node's name [default: the state's, else the one that the allocation names].
    #[arg(long)]
    pub node: Option<String>,
    /// What to print.
    #[arg(short, long, value_enum, default_value = "text")]
    pub output: Output,
    #[command(flatten)]
    pub driver: DriverArgs,
    #[command(flatten)]
    pub reach: ReachArgs,
}

/// Where to look for the driver's files, for a CDI file that is complete.
#[derive(Debug, Clone, Args)]
pub struct DriverArgs {
    /// Root of the driver's files [default: do not look; the CDI file lacks what would be found].
    #[arg(long, value_name = "DIR")]
    pub driver_root: Option<PathBuf>,
    /// The same directory's path on the host.
    #[arg(long, value_name = "DIR", default_value = "/")]
    pub driver_root_on_host: PathBuf,
    /// The host's root, to look for NVIDIA's container toolkit in, where the driver root is another [default: none].
    #[arg(long, value_name = "DIR")]
    pub toolkit_root: Option<PathBuf>,
    /// Directory of the device nodes [default: <driver-root>/dev if nvidiactl is there, else /dev].
    #[arg(long, value_name = "DIR")]
    pub dev_root: Option<PathBuf>,
    /// The host's /proc.
    #[arg(long, value_name = "DIR", default_value = "/proc")]
    pub proc_root: PathBuf,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// For people.
    Text,
    /// For programs.
    Json,
    /// The CDI file alone, as it would be written.
    Cdi,
}

/// Prints the plan or the refusal; the answer is the exit code.
///
/// # Errors
/// What was given cannot be read ([`Usage`]), or somebody who was asked does not answer.
pub async fn run(args: PlanArgs) -> anyhow::Result<u8> {
    let mut reports = Vec::new();
    for manifest in manifests(&args).await? {
        let site = site::find(&args, &manifest)?;
        reports.push(decide::decide(&manifest, &site, &args.driver)?);
    }
    match (args.output, reports.as_slice()) {
        (Output::Text, all) => {
            let texts: Vec<String> = all.iter().map(|report| report.text()).collect();
            super::print(texts.join("\n").as_bytes())?;
        }
        (Output::Json, [one]) => print_json(one)?,
        (Output::Json, all) => print_json(all)?,
        (Output::Cdi, [one]) => {
            eprint!("{}", one.remarks());
            super::print(one.cdi_file().as_bytes())?;
        }
        (Output::Cdi, all) => anyhow::bail!(Usage(format!(
            "--claim has {} claims, and -o cdi prints the file of one; give a file with one of them",
            all.len()
        ))),
    }
    let is_planned = |report: &report::Report| matches!(report.verdict, Verdict::Planned { .. });
    Ok(if reports.iter().all(is_planned) { 0 } else { EXIT_REFUSED })
}

fn print_json(value: &(impl serde::Serialize + ?Sized)) -> anyhow::Result<()> {
    Ok(super::print(format!("{}\n", serde_json::to_string_pretty(value)?).as_bytes())?)
}

async fn manifests(args: &PlanArgs) -> anyhow::Result<Vec<Manifest>> {
    let objects = match Source::parse(&args.claim, Path::exists)? {
        Source::File(path) => documents(&read(&path)?, &path.display().to_string())?,
        Source::Stdin => documents(&limited(io::stdin().lock(), "standard input")?, "standard input")?,
        Source::Named { namespace, name } => {
            let endpoint = args.reach.endpoint()?;
            let cluster = KubeCluster::connect(&endpoint).await?;
            vec![serde_json::to_value(cluster.claim_named(&namespace, &name).await?)?]
        }
    };
    Ok(Manifest::all(objects)?)
}

/// A file's text.
pub(super) fn read(path: &Path) -> Result<String, Usage> {
    let file = std::fs::File::open(path);
    let file = file.map_err(|error| Usage(format!("cannot read {}: {error}", path.display())))?;
    limited(file, &path.display().to_string())
}

/// The same of what is open already.
pub(super) fn limited(from: impl Read, name: &str) -> Result<String, Usage> {
    let mut text = String::new();
    match from.take(INPUT_BYTES_MAX + 1).read_to_string(&mut text) {
        Ok(read) if read as u64 <= INPUT_BYTES_MAX => Ok(text),
        Ok(_) => Err(Usage(format!(
            "{name} is larger than {INPUT_BYTES_MAX} bytes: it is neither a claim, a pod nor a state"
        ))),
        Err(error) => Err(Usage(format!("cannot read {name}: {error}"))),
    }
}
