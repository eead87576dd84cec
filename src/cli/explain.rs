//! `tranche explain`: why a claim waits, or where it went, decided by the very code that the controller runs, over
//! what the API server says now. Needs no running controller, and writes nothing.
//!
//! what was named ([`find`], [`file`]) + all objects ([`site`]) → what is asked ([`subjects`]) → `controller::explain` →
//! [`draw`], or [`report`] as JSON

mod carried;
mod classes;
mod draw;
mod file;
mod find;
mod pod;
mod report;
pub(super) mod site;
mod subjects;
#[cfg(test)]
mod tests;

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use jiff::Timestamp;

use super::as_controller::AsControllerArgs;
use super::reach::{ReachArgs, for_people, told};
use super::{EXIT_REFUSED, output, print};
use crate::cluster::lease::LeaseName;
use crate::cluster::{CallError, KubeCluster};
use crate::controller::config::Rules;
use crate::controller::explain::{Answer, Because, Origin, explain, quota};
use file::FileObjects;
use find::ExplainTarget;
use report::{ExplainReport, ExplainedClaim, Leader};
use site::ClusterSite;
use subjects::Subjects;

#[derive(Debug, Clone, Args)]
#[command(
    after_help = "Exit codes: 0 the claim has its share, or there is room for it now; 3 it waits or is refused; \
                  2 a mistake in what was given; 1 there is no such claim or pod, or the API server did not answer."
)]
pub struct ExplainArgs {
    /// A claim; pod/NAME for the claims of a pod, including those that the webhook plans for it, and for what it asks
    /// for by its limits; deployment/, job/, cronjob/, statefulset/, replicaset/ or daemonset/NAME for the pods of it that
    /// wait, else its newest.
    #[arg(value_name = "CLAIM|NAMESPACE/CLAIM|KIND/NAME", required_unless_present = "filename")]
    pub what: Option<String>,
    /// The name, where the kind stands before it by itself: pod NAME is pod/NAME.
    #[arg(value_name = "NAME", requires = "what")]
    pub name: Option<String>,
    /// Would the pods of this file fit now? A YAML or JSON file, - for standard input; claims and templates come from
    /// the file, those that it lacks from the cluster. Nothing is created.
    #[arg(short, long, value_name = "FILE", conflicts_with = "what")]
    pub filename: Option<PathBuf>,
    /// Its namespace [default: the kubeconfig's].
    #[arg(short, long)]
    pub namespace: Option<String>,
    /// How to show it.
    #[arg(short, long, value_enum, default_value = "table")]
    pub output: ExplainOutput,
    #[command(flatten)]
    pub controller: AsControllerArgs,
    /// The controller's --preemption, if that is another one.
    #[arg(long, default_value = "true", action = clap::ArgAction::Set, value_name = "true|false")]
    pub preemption: bool,
    /// The controller's lease.
    #[arg(long, value_name = "NAME", default_value = "tranche-controller")]
    pub lease_name: String,
    #[command(flatten)]
    pub reach: ReachArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ExplainOutput {
    /// Nodes with the same verdict in one line.
    Table,
    /// A line for each node.
    Wide,
    /// Everything.
    Json,
    /// The same.
    Yaml,
}

/// Prints the answer; its exit code.
///
/// # Errors
/// What was given means nothing ([`super::UsageError`]), there is nothing of that name, or the API server does not answer.
pub async fn run(args: ExplainArgs) -> anyhow::Result<u8> {
    ExplainTarget::parse(&args)?;
    let cluster = args.reach.connect().await?;
    let report = look(&cluster, &args, Timestamp::now()).await.map_err(|error| told(&cluster, error))?;
    print(text(&report, args.output)?.as_bytes())?;
    Ok(report.exit_code())
}

/// The report as it is printed.
///
/// # Errors
/// It cannot be written as YAML.
pub fn text(report: &ExplainReport, output: ExplainOutput) -> anyhow::Result<String> {
    Ok(match output {
        ExplainOutput::Json => output::json(&report.json())?,
        ExplainOutput::Yaml => output::yaml(&report.json())?,
        ExplainOutput::Table => draw::draw(report, draw::Rows::Grouped),
        ExplainOutput::Wide => draw::draw(report, draw::Rows::Each),
    })
}

/// Asks the API server, and the controller's core. `at`: the time of day.
///
/// # Errors
/// As [`run`].
pub async fn look(cluster: &KubeCluster, args: &ExplainArgs, at: Timestamp) -> anyhow::Result<ExplainReport> {
    let target = ExplainTarget::parse(args)?;
    let mut named = target.at(|| cluster.default_namespace());
    let (file, lacks) = match &target {
        ExplainTarget::File { namespace, path } => {
            let default = || cluster.default_namespace();
            let mut file = FileObjects::read(path, namespace.as_deref(), default)?;
            let names = file.missing_templates();
            let found = site::templates(cluster, &file.namespace, &names).await.map_err(for_people)?;
            let lacks = file.complete(&found, at);
            named.namespace.clone_from(&file.namespace);
            (Some(file), lacks)
        }
        ExplainTarget::Claim { .. } | ExplainTarget::Pod { .. } | ExplainTarget::Workload { .. } => {
            (None, Vec::new())
        }
    };
    let site =
        ClusterSite::read(cluster, (&args.controller, rules(args)), &named.namespace, file.as_ref()).await;
    let mut site = site.map_err(for_people)?;
    let asked = match (&target, &file) {
        (ExplainTarget::File { .. }, Some(file)) => Ok(of_file(&site, file)),
        (ExplainTarget::Workload { kind, .. }, _) => {
            subjects::of_workload(cluster, &site, *kind, &named).await
        }
        (ExplainTarget::Pod { .. }, _) => subjects::of_pod_named(cluster, &site, &named).await,
        (ExplainTarget::Claim { .. } | ExplainTarget::File { .. }, _) => subjects::of_claim(&site, &named),
    };
    let mut asked = match asked {
        Err(_) if is_missing(cluster, &site, &named.namespace).await => {
            anyhow::bail!("Error from server (NotFound): namespaces {:?} not found", named.namespace)
        }
        asked => asked?,
    };
    asked.lacks.extend(lacks);
    let mut told = Vec::new();
    for explained in explain(&mut site.core, &site.listing, &asked.subjects, at) {
        let is_of_file = file.as_ref().is_some_and(|file| file.has_claim(&explained.name));
        let carried = match explained.origin {
            Origin::Exists if !is_of_file => {
                carried::read(cluster, &explained.namespace, &explained.name).await?
            }
            Origin::Exists | Origin::Promised | Origin::Limits => Vec::new(),
        };
        told.push(ExplainedClaim { explained, carried });
    }
    let has_place = |told: &ExplainedClaim| matches!(told.explained.answer, Answer::Placed { .. });
    if file.is_some() || !told.iter().all(has_place) || !asked.lacks.is_empty() {
        asked.remarks.extend(quota::not_looked_at(site.listing.quotas()));
    }
    let waits = |told: &ExplainedClaim| {
        matches!(&told.explained.answer, Answer::Would { .. })
            || matches!(&told.explained.answer, Answer::Waits { because: Because::Short(_), .. })
    };
    let leader = match told.iter().any(waits) {
        true => Some(leader(cluster, args).await),
        false => None,
    };
    let Subjects { lacks, mut remarks, events, .. } = asked;
    remarks.extend(site.remarks);
    Ok(ExplainReport { named, told, leader, lacks, remarks, events, at })
}

/// Nothing is in the namespace, and the API server says that it does not exist.
async fn is_missing(cluster: &KubeCluster, site: &ClusterSite, namespace: &str) -> bool {
    let has_pod = || site.core.view.pods().any(|pod| pod.at.namespace == namespace);
    let has_claim = || site.core.view.claims().any(|claim| claim.namespace() == namespace);
    !has_pod() && !has_claim() && !cluster.has_namespace(namespace).await
}

/// The pods of a file: their claims, and whether the namespace's quotas let them be created.
fn of_file(site: &ClusterSite, file: &FileObjects) -> Subjects {
    let mut asked = Subjects::default();
    asked.remarks.extend(file.remarks().iter().cloned());
    for pod in &file.pods {
        let of_pod = subjects::of_view(site, pod);
        asked.subjects.extend(of_pod.subjects);
        asked.lacks.extend(of_pod.lacks);
        asked.lacks.extend(pod::kai_in_file(pod));
    }
    let usage = file.usage(site.listing.classes());
    let full = quota::exceeded(site.listing.quotas(), &usage);
    asked.lacks.extend(full.into_iter().map(|words| format!("it cannot be created: {words}")));
    if site.quotas_denied {
        let words = format!(
            "you may not list resourcequotas in namespace {}: they are not looked at",
            file.namespace
        );
        asked.remarks.push(words);
    }
    if asked.subjects.is_empty() && asked.lacks.is_empty() {
        asked.remarks.push("it names no claim, so there is nothing to place for it".to_owned());
    }
    let beside = |name: &String| format!("{name} counts as it is; the file's is asked about beside it");
    asked.remarks.extend(site.in_cluster.iter().map(beside));
    asked
}

fn rules(args: &ExplainArgs) -> Rules {
    Rules { preemption: args.preemption, ..args.controller.rules() }
}

/// Who places claims, if anybody does.
async fn leader(cluster: &KubeCluster, args: &ExplainArgs) -> Leader {
    let at =
        LeaseName { namespace: args.controller.controller_namespace.clone(), name: args.lease_name.clone() };
    match cluster.lease(&at).await {
        Ok(Some(lease)) => Leader::Stored { at, lease },
        Ok(None) => Leader::None { at },
        Err(CallError::Forbidden { .. }) => {
            Leader::Unknown { words: format!("you may not read the lease {}/{}", at.namespace, at.name) }
        }
        Err(error) => Leader::Unknown { words: error.to_string() },
    }
}

impl ExplainReport {
    /// 0: everything has its place, or could have it.
    pub fn exit_code(&self) -> u8 {
        let well = |told: &ExplainedClaim| match &told.explained.answer {
            Answer::Placed { .. } | Answer::Would { .. } | Answer::Hold { .. } | Answer::Open { .. } => true,
            Answer::NotOurs { place, .. } => place.is_some(),
            Answer::Waits { .. } | Answer::Refused { .. } => false,
        };
        match self.told.iter().all(well) && self.lacks.is_empty() {
            true => 0,
            false => EXIT_REFUSED,
        }
    }
}
