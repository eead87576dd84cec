//! `tranche plan`: what preparing a claim would do here, without doing it. Decided by the very code that
//! the node plugin runs; only the printing is its own.
//!
//! claim ([`super::manifest`]) + node ([`site`]) → [`decide`] → [`report`]

mod decide;
mod driver;
mod report;
mod site;
mod why;

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};

use super::manifest::{self, Manifest, Source};
use super::reach::{ReachArgs, told};
use super::reading::{Document, documents, input};
use super::{EXIT_REFUSED, UsageError, inspect, output};
use crate::cluster::{CallError, KubeCluster};
use report::PlanResult;

#[derive(Debug, Clone, Args)]
#[command(
    after_help = "Exit codes: 0 all claims would be prepared, 3 one would be refused or is not allocated yet, \
                        2 a mistake in what was given, 1 the node plugin or the API server did not answer."
)]
pub struct PlanArgs {
    /// The ResourceClaim: a YAML or JSON file, - for standard input, or the name of one in the cluster. Of a file with
    /// several objects all claims are planned, and the claims that its ResourceClaimTemplates would give to pods.
    #[arg(short = 'f', long, visible_alias = "filename", value_name = "FILE|NAMESPACE/NAME")]
    pub claim: String,
    /// The claim's namespace, where --claim is the name of one in the cluster alone.
    #[arg(short, long)]
    pub namespace: Option<String>,
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
    pub output: PlanOutput,
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
    /// The folder of NVIDIA's container toolkit on the host, below the toolkit root, or else below the driver root; it is
    /// looked at first [default: none].
    #[arg(long, value_name = "DIR")]
    pub toolkit_dir: Option<PathBuf>,
    /// Directory of the device nodes [default: <driver-root>/dev if nvidiactl is there, else /dev].
    #[arg(long, value_name = "DIR")]
    pub dev_root: Option<PathBuf>,
    /// The host's /proc.
    #[arg(long, value_name = "DIR", default_value = "/proc")]
    pub proc_root: PathBuf,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PlanOutput {
    /// For people.
    #[value(alias = "table")]
    Text,
    /// For programs.
    Json,
    /// The same.
    Yaml,
    /// The CDI file alone, as it would be written.
    Cdi,
}

/// Prints the plan or the refusal; the answer is the exit code.
///
/// # Errors
/// What was given cannot be read ([`UsageError`]), or somebody who was asked does not answer.
pub async fn run(args: PlanArgs) -> anyhow::Result<u8> {
    let mut reports = Vec::new();
    for manifest in manifests(&args).await? {
        let site = site::find(&args, &manifest)?;
        reports.push(decide::decide(&manifest, &site, &args.driver)?);
    }
    match (args.output, reports.as_slice()) {
        (PlanOutput::Text, all) => {
            let texts: Vec<String> = all.iter().map(|report| report.text()).collect();
            super::print(texts.join("\n").as_bytes())?;
        }
        (PlanOutput::Json, [one]) => super::print(output::json(one)?.as_bytes())?,
        (PlanOutput::Json, all) => super::print(output::json(all)?.as_bytes())?,
        (PlanOutput::Yaml, [one]) => super::print(output::yaml(one)?.as_bytes())?,
        (PlanOutput::Yaml, all) => super::print(output::yaml(all)?.as_bytes())?,
        (PlanOutput::Cdi, [one]) => {
            eprint!("{}", one.remarks());
            super::print(one.cdi_file().as_bytes())?;
        }
        (PlanOutput::Cdi, all) => anyhow::bail!(UsageError(format!(
            "--claim has {} claims, and -o cdi prints the file of one; give a file with one of them",
            all.len()
        ))),
    }
    let is_planned = |report: &report::PlanReport| matches!(report.verdict, PlanResult::Planned { .. });
    Ok(if reports.iter().all(is_planned) { 0 } else { EXIT_REFUSED })
}

async fn manifests(args: &PlanArgs) -> anyhow::Result<Vec<Manifest>> {
    let given = args.namespace.as_deref().filter(|namespace| !namespace.is_empty());
    let objects = match Source::parse(&args.claim, given, Path::exists)? {
        Source::File(path) => {
            let (text, from) = input(&path)?;
            documents(&text, &from)?
        }
        Source::Named { namespace, name } => {
            let cluster = args.reach.connect().await?;
            of_cluster(&cluster, &namespace, &name).await.map_err(|error| told(&cluster, error))?
        }
    };
    let classes = manifest::classes(&objects)?;
    let mut manifests = Manifest::all(objects)?;
    manifests.iter_mut().for_each(|manifest| manifest.classes = classes.clone());
    Ok(manifests)
}

/// The claim, and the DeviceClasses as far as the caller may read them.
async fn of_cluster(cluster: &KubeCluster, namespace: &str, name: &str) -> anyhow::Result<Vec<Document>> {
    let claim = cluster.claim_named(namespace, name).await.map_err(|error| match error {
        CallError::NotFound { message, .. } => {
            anyhow::anyhow!("Error from server (NotFound): {message} in namespace {namespace}")
        }
        other => other.into(),
    })?;
    let classes = cluster.device_classes().await.unwrap_or_default();
    let mut all = vec![serde_json::to_value(claim)?];
    all.extend(classes.iter().map(serde_json::to_value).collect::<Result<Vec<_>, _>>()?);
    let place = format!("namespace {namespace}");
    Ok(all.into_iter().map(|value| Document { value, place: place.clone() }).collect())
}
