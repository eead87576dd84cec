//! `tranche explain`: why a claim waits, or where it went, decided by the very code that the controller runs, over
//! what the API server says now. Needs no running controller, and writes nothing.
//!
//! what was named ([`find`]) + all objects → `controller::explain` → [`draw`], or [`report`] as JSON

mod carried;
mod draw;
mod find;
mod report;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;

use clap::{Args, ValueEnum};
use jiff::Timestamp;

use super::reach::ReachArgs;
use super::{EXIT_REFUSED, print};
use crate::allocate::Policy;
use crate::cluster::feed::{Change, WatchEvent};
use crate::cluster::lease::LeaseName;
use crate::cluster::{CallError, KubeCluster};
use crate::controller::config::Rules;
use crate::controller::core::Core;
use crate::controller::explain::{Answer, Because, explain};
use crate::model::claim::ClaimKey;
use crate::model::names::HOLD_LABEL;
use crate::model::time::Moment;
use find::{Named, Target};
use report::{ExplainedClaim, Leader, Report};

#[derive(Debug, Clone, Args)]
#[command(
    after_help = "Exit codes: 0 the claim has its share, or there is room for it now; 3 it waits or is refused; \
                  2 a mistake in what was given; 1 there is no such claim or pod, or the API server did not answer."
)]
pub struct ExplainArgs {
    /// A claim, or pod/NAME for the claims of a pod, including those that the webhook plans for it.
    #[arg(value_name = "CLAIM|NAMESPACE/CLAIM|pod/POD")]
    pub what: String,
    /// Its namespace [default: the kubeconfig's].
    #[arg(short, long)]
    pub namespace: Option<String>,
    /// How to show it.
    #[arg(short, long, value_enum, default_value = "table")]
    pub output: Output,
    /// The controller's --policy, if that is another one.
    #[arg(long, default_value = "pack", value_parser = ["pack", "spread", "fragmentation"])]
    pub policy: String,
    /// The controller's --never-hold, if it has one.
    #[arg(long, value_name = "LIST")]
    pub never_hold: Option<String>,
    /// Where the controller runs: its lease and the claims with which it takes GPUs.
    #[arg(long, value_name = "NAMESPACE", default_value = "tranche-system")]
    pub controller_namespace: String,
    /// The controller's lease.
    #[arg(long, value_name = "NAME", default_value = "tranche-controller")]
    pub lease_name: String,
    #[command(flatten)]
    pub reach: ReachArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// Nodes with the same verdict in one line.
    Table,
    /// A line for each node.
    Wide,
    /// Everything.
    Json,
}

/// Prints the answer; its exit code.
///
/// # Errors
/// What was given means nothing ([`super::Usage`]), there is nothing of that name, or the API server does not answer.
pub async fn run(args: ExplainArgs) -> anyhow::Result<u8> {
    Target::parse(&args)?;
    let cluster = KubeCluster::connect(&args.reach.endpoint()?).await?;
    let report = look(&cluster, &args, Timestamp::now()).await?;
    print(text(&report, args.output).as_bytes())?;
    Ok(report.exit_code())
}

/// The report as it is printed.
pub fn text(report: &Report, output: Output) -> String {
    match output {
        Output::Json => format!("{:#}\n", report.json()),
        Output::Table => draw::draw(report, draw::Rows::Grouped),
        Output::Wide => draw::draw(report, draw::Rows::Each),
    }
}

/// Asks the API server, and the controller's core. `at`: the time of day.
///
/// # Errors
/// As [`run`].
pub async fn look(cluster: &KubeCluster, args: &ExplainArgs, at: Timestamp) -> anyhow::Result<Report> {
    let target = Target::parse(args)?;
    let named = target.at(|| cluster.default_namespace());
    let mut core = Core::new(rules(args), &args.controller_namespace);
    let mut holders = BTreeSet::new();
    cluster
        .tour(|change| {
            holders.extend(holder(&change));
            core.apply(change, Moment::ZERO);
        })
        .await?;
    let asked = match &target {
        Target::Claim { .. } => Subjects { claims: vec![found(&core, &named)?], ..Subjects::default() },
        Target::Pod { .. } => of_pod(cluster, &core, &named).await?,
    };
    let Subjects { claims, lacks, mut remarks } = asked;
    let (_, troubles) = core.recorder.take();
    remarks.extend(troubles);
    remarks.extend(elsewhere(&holders, &args.controller_namespace));
    let mut told = Vec::new();
    for explained in explain(&mut core, &claims, at) {
        let carried = match explained.promised {
            true => Vec::new(),
            false => carried::read(cluster, &explained.namespace, &explained.name).await?,
        };
        told.push(ExplainedClaim { explained, carried });
    }
    let waits = |told: &ExplainedClaim| {
        matches!(&told.explained.answer, Answer::Would { .. })
            || matches!(&told.explained.answer, Answer::Waits { because: Because::Short(_), .. })
    };
    let leader = match told.iter().any(waits) {
        true => Some(leader(cluster, args).await),
        false => None,
    };
    Ok(Report { named, told, leader, lacks, remarks, at })
}

fn rules(args: &ExplainArgs) -> Rules {
    let usual = Rules::default();
    let policy = Policy::ALL.into_iter().find(|policy| policy.as_str() == args.policy);
    let never = args.never_hold.iter().flat_map(|list| list.split(',')).map(str::trim);
    Rules {
        policy: policy.unwrap_or(usual.policy),
        never_hold: never.filter(|one| !one.is_empty()).map(str::to_owned).collect(),
        ..usual
    }
}

/// The namespace of a claim that looks like a hold.
fn holder(change: &Change) -> Option<String> {
    let Change::Claim(WatchEvent::Listed(claim)) = change else { return None };
    let labels = claim.metadata.labels.as_ref()?;
    labels.get(HOLD_LABEL).is_some_and(|value| value == "true").then(|| claim.metadata.namespace.clone())?
}

fn elsewhere(holders: &BTreeSet<String>, namespace: &str) -> Option<String> {
    let other = holders.iter().find(|one| *one != namespace).filter(|_| !holders.contains(namespace))?;
    Some(format!(
        "claims in namespace {other} are labelled {HOLD_LABEL}, and none in {namespace}: if the controller runs in \
         {other}, give --controller-namespace {other}; otherwise the GPUs of these claims count as taken by \
         others here"
    ))
}

fn found(core: &Core, named: &Named) -> anyhow::Result<ClaimKey> {
    let claim = core.view.claim_named(&named.namespace, &named.name);
    claim.map(|claim| claim.key).ok_or_else(|| find::no_claim(&core.view, named))
}

/// What is asked about.
#[derive(Default)]
struct Subjects {
    claims: Vec<ClaimKey>,
    /// What a pod needs and does not have.
    lacks: Vec<String>,
    remarks: Vec<String>,
}

/// Those of a pod's claims that are there, and words about the others.
async fn of_pod(cluster: &KubeCluster, core: &Core, named: &Named) -> anyhow::Result<Subjects> {
    let object = match cluster.pod_named(&named.namespace, &named.name).await {
        Ok(object) => object,
        Err(CallError::NotFound { .. }) => return Err(find::no_pod(&core.view, named)),
        Err(error) => return Err(error.into()),
    };
    if let Some(words) = find::ended(&object) {
        return Ok(Subjects { remarks: vec![words], ..Subjects::default() });
    }
    let mut asked = Subjects { lacks: find::lacks(&object), ..Subjects::default() };
    let mut pods = core.view.pods();
    let pod = pods.find(|pod| pod.at.namespace == named.namespace && pod.at.name == named.name);
    for name in pod.iter().flat_map(|pod| &pod.claims) {
        match core.view.claim_named(&named.namespace, name) {
            Some(claim) => asked.claims.push(claim.key),
            None => {
                let why = pod.and_then(|pod| core.view.not_promised(pod));
                let words = || format!("claim {name}, which the pod names, does not exist; create it");
                asked.lacks.push(why.unwrap_or_else(words));
            }
        }
    }
    if asked.claims.is_empty() && asked.lacks.is_empty() {
        asked.remarks.push("the pod names no claim, so there is nothing to place for it".to_owned());
    }
    Ok(asked)
}

/// Who places claims, if anybody does.
async fn leader(cluster: &KubeCluster, args: &ExplainArgs) -> Leader {
    let at = LeaseName { namespace: args.controller_namespace.clone(), name: args.lease_name.clone() };
    match cluster.lease(&at).await {
        Ok(Some(lease)) => Leader::Stored { at, lease },
        Ok(None) => Leader::None { at },
        Err(error) => Leader::Unknown { words: error.to_string() },
    }
}

impl Report {
    /// 0: everything has its place, or could have it.
    pub fn exit_code(&self) -> u8 {
        let well = |told: &ExplainedClaim| match &told.explained.answer {
            Answer::Placed { .. } | Answer::Would { .. } | Answer::Hold { .. } => true,
            Answer::NotOurs { place, .. } => place.is_some(),
            Answer::Waits { .. } | Answer::Refused { .. } => false,
        };
        match self.told.iter().all(well) && self.lacks.is_empty() {
            true => 0,
            false => EXIT_REFUSED,
        }
    }
}
