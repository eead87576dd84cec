//! `tranche rebalance`: which pods would have to move so that what waits finds room, decided by the controller's own code
//! over what the API server says now; with `--apply`, those pods are evicted.
//!
//! all objects ([`site`](super::explain::site)) → `controller::explain::rebalance` → [`after`]: the map of GPUs before and
//! after → [`draw`], or JSON; [`apply`]: the evictions

mod after;
mod apply;
mod draw;
#[cfg(test)]
mod tests;

use std::time::Duration;

use clap::{Args, ValueEnum};
use serde_json::{Value, json};

use super::as_controller::AsControllerArgs;
use super::explain::site::ClusterSite;
use super::reach::{ReachArgs, for_people, told};
use super::top::map::{Map, map};
use super::top::{PictureStyle, look_of_output};
use super::{EXIT_REFUSED, UsageError, output, print, settings};
use crate::allocate::Placement;
use crate::cluster::KubeCluster;
use crate::controller::explain::may_not;
use crate::controller::explain::rebalance::{Help, HelpedUnit, rebalance};
use crate::controller::moves::Proposed;

#[derive(Debug, Clone, Args)]
#[command(
    after_help = "Exit codes: 0 nothing is to be moved, or with --apply all has moved and what waited runs; 3 moves are \
                  proposed, or with --apply not all of it was done; 2 a mistake in what was given; 1 the API server did \
                  not answer."
)]
pub struct RebalanceArgs {
    /// Only what waits in this namespace; pods of any namespace may be moved for it [default: all].
    #[arg(short, long)]
    pub namespace: Option<String>,
    /// How to show it.
    #[arg(short, long, value_enum, default_value = "map")]
    pub output: RebalanceOutput,
    /// Evict the pods, after a question: needs the right to create pods/eviction. PodDisruptionBudgets are kept.
    #[arg(long)]
    pub apply: bool,
    /// Do not ask.
    #[arg(short, long, requires = "apply")]
    pub yes: bool,
    /// How long to wait for each pod to end, and for each that waits to start, with --apply.
    #[arg(long, value_name = "DURATION", default_value = "5m")]
    pub timeout: String,
    #[command(flatten)]
    pub controller: AsControllerArgs,
    #[command(flatten)]
    pub reach: ReachArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum RebalanceOutput {
    /// Sentences, and the nodes in question as maps of their GPUs, before and after.
    Map,
    /// Everything.
    Json,
    /// The same.
    Yaml,
}

/// What waits, what would help it, and the nodes in question.
#[derive(Debug)]
pub struct RebalanceReport {
    pub waits: Vec<HelpedUnit>,
    pub before: Map,
    pub after: Map,
}

impl RebalanceReport {
    pub fn proposed(&self) -> impl Iterator<Item = (&HelpedUnit, &Proposed)> {
        self.waits.iter().filter_map(|one| match &one.help {
            Help::Moves(found) => Some((one, found)),
            Help::Fits | Help::None(_) | Help::Spent(_) | Help::Later => None,
        })
    }

    /// 3: moves are proposed.
    pub fn exit_code(&self) -> u8 {
        if self.proposed().next().is_some() { EXIT_REFUSED } else { 0 }
    }

    pub fn json(&self) -> Value {
        json!({
            "waiting": self.waits.iter().map(waits).collect::<Vec<_>>(),
            "before": self.before,
            "after": self.after,
        })
    }
}

/// Looks, prints, and acts if it is told to; the exit code.
///
/// # Errors
/// What was given means nothing ([`UsageError`]), the caller may not look, or the API server does not answer.
pub async fn run(args: RebalanceArgs) -> anyhow::Result<u8> {
    let timeout =
        settings::interval(&args.timeout).map_err(|words| UsageError(format!("--timeout {words}")))?;
    let cluster = args.reach.connect().await?;
    let report = look(&cluster, &args).await.map_err(|error| told(&cluster, error))?;
    print(text(&report, &args, look_of_output())?.as_bytes())?;
    match args.apply && report.exit_code() != 0 {
        true => apply::apply(&cluster, &report, &args, timeout).await,
        false => Ok(report.exit_code()),
    }
}

/// The report as it is printed.
///
/// # Errors
/// It cannot be written as YAML.
pub fn text(report: &RebalanceReport, args: &RebalanceArgs, look: PictureStyle) -> anyhow::Result<String> {
    Ok(match args.output {
        RebalanceOutput::Json => output::json(&report.json())?,
        RebalanceOutput::Yaml => output::yaml(&report.json())?,
        RebalanceOutput::Map => draw::draw(report, args.apply, look),
    })
}

/// Asks the API server, and the controller's core.
///
/// # Errors
/// As [`run`].
pub async fn look(cluster: &KubeCluster, args: &RebalanceArgs) -> anyhow::Result<RebalanceReport> {
    let namespace = args.namespace.clone().filter(|namespace| !namespace.is_empty());
    let listed = namespace.clone().unwrap_or_else(|| cluster.default_namespace());
    let site = ClusterSite::read(cluster, (&args.controller, args.controller.rules()), &listed, None).await;
    let mut site = site.map_err(for_people)?;
    if let denied @ [_, ..] = site.listing.denied() {
        anyhow::bail!("{}: who could move is not known", may_not(denied));
    }
    let seen = cluster.survey().await.map_err(for_people)?;
    let waits = rebalance(&mut site.core, &site.listing, namespace.as_deref());
    let all = map(&seen.slices, &seen.claims);
    let (before, after) = after::maps(&all, &waits);
    Ok(RebalanceReport { waits, before, after })
}

fn waits(one: &HelpedUnit) -> Value {
    let names = one.pods.iter().zip(&one.claims);
    let pods = names
        .map(|(pod, claims)| json!({"namespace": pod.namespace, "name": pod.name, "claims": claims}))
        .collect::<Vec<_>>();
    let (help, why, found) = match &one.help {
        Help::Fits => ("fits", None, None),
        Help::Moves(found) => ("moves", None, Some(found)),
        Help::None(why) => ("none", Some(why), None),
        Help::Spent(why) => ("unknown", Some(why), None),
        Help::Later => ("not-looked-at", None, None),
    };
    let moves = found.map(|found| {
        let moves = found.moves.iter().map(|one| {
            json!({"namespace": one.pod.namespace, "pod": one.pod.name, "uid": one.pod.uid,
                "owner": {"kind": one.owner.kind.as_str(), "name": one.owner.name},
                "from": place(&one.from), "to": place(&one.to)})
        });
        let then = found.then.iter().map(|(_, place)| self::place(place));
        json!({"moves": moves.collect::<Vec<_>>(), "then": then.collect::<Vec<_>>()})
    });
    json!({"gang": one.gang, "pods": pods, "help": help, "why": why, "proposal": moves})
}

fn place(place: &Placement) -> Value {
    let gpus = place.gpus.iter().map(|grant| {
        json!({"device": grant.device, "memoryMiB": grant.memory.mib_ceil(),
            "computePercent": grant.compute.map(|percent| percent.get())})
    });
    json!({"node": place.node, "gpus": gpus.collect::<Vec<_>>()})
}

/// Between two looks at a pod that is waited for.
const LOOK_EVERY: Duration = Duration::from_secs(1);
