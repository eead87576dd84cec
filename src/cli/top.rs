//! `tranche top`: who has what of which GPU, all over the cluster, as the API server knows it. Live on a
//! terminal, once elsewhere.
//!
//! slices + claims → [`map`] → [`draw`], or JSON

mod draw;
mod map;
#[cfg(test)]
mod tests;

use std::io::{IsTerminal, stdout};
use std::time::Duration;

use clap::{Args, ValueEnum};

use super::reach::{ReachArgs, for_people, told};
use super::{Usage, output, print};
use crate::cluster::KubeCluster;

/// Before a picture: to the upper left corner; after each line: nothing of the old one; after it all: the rest.
const HOME: &str = "\x1b[H";
const CLEAR_LINE: &str = "\x1b[K\n";
const CLEAR_BELOW: &str = "\x1b[J";
/// Where nobody says how wide the terminal is.
const WIDTH: usize = 110;
const INTERVAL_MIN_S: f64 = 0.5;
/// Of nodes with GPUs, in words about one without.
const NODES_TOLD: usize = 8;

#[derive(Debug, Clone, Args)]
pub struct TopArgs {
    /// Print it once, also on a terminal.
    #[arg(long)]
    pub once: bool,
    /// Seconds between two looks.
    #[arg(long, default_value_t = 2.0)]
    pub interval: f64,
    /// Only this node.
    #[arg(long)]
    pub node: Option<String>,
    /// Only GPUs of which claims of this namespace have a part [default: all].
    #[arg(short, long)]
    pub namespace: Option<String>,
    /// How to show it.
    #[arg(short, long, value_enum, default_value = "map")]
    pub output: Output,
    #[command(flatten)]
    pub reach: ReachArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// A bar for each GPU.
    #[value(alias = "table")]
    Map,
    /// Everything, once.
    Json,
    /// The same.
    Yaml,
}

/// Looks and prints, until interrupted if it is live.
///
/// # Errors
/// The API server does not answer the first look; later ones are told and tried again.
pub async fn run(args: TopArgs) -> anyhow::Result<()> {
    let interval = args.interval;
    if !interval.is_finite() || interval < INTERVAL_MIN_S {
        anyhow::bail!(Usage(format!(
            "--interval {interval}: write a number of seconds, at least {INTERVAL_MIN_S}"
        )));
    }
    let cluster = args.reach.connect().await?;
    let live = !args.once && args.output == Output::Map && stdout().is_terminal();
    let mut picture = look(&cluster, &args, width()).await.map_err(|error| told(&cluster, error))?;
    if !live {
        return Ok(print(picture.as_bytes())?);
    }
    loop {
        let shown = draw::cut(&picture, height());
        let lines: String = shown.lines().map(|line| format!("{line}{CLEAR_LINE}")).collect();
        print(format!("{HOME}{lines}{CLEAR_BELOW}").as_bytes())?;
        tokio::time::sleep(Duration::from_secs_f64(interval)).await;
        picture = look(&cluster, &args, width())
            .await
            .unwrap_or_else(|error| format!("{picture}\n{:#}; tried again\n", told(&cluster, error)));
    }
}

/// One look, as it is printed, `width` columns wide.
///
/// # Errors
/// The API server does not answer, or does not let the caller look; or nothing is published for the node that was named.
pub async fn look(cluster: &KubeCluster, args: &TopArgs, width: usize) -> anyhow::Result<String> {
    let seen = cluster.survey().await.map_err(for_people)?;
    let mut map = map::map(&seen.slices, &seen.claims);
    if let Some(name) = &args.node {
        if !map.nodes.iter().any(|node| node.name == *name) {
            let others: Vec<&str> =
                map.nodes.iter().map(|node| node.name.as_str()).take(NODES_TOLD).collect();
            anyhow::bail!(
                "no GPUs are published for node {name}; nodes that have some: {}",
                match others[..] {
                    [] => "none; is `tranche node` running? (kubectl get resourceslices)".to_owned(),
                    _ => others.join(", "),
                }
            );
        }
        map.nodes.retain(|node| node.name == *name);
    }
    if let Some(namespace) = args.namespace.as_deref().filter(|namespace| !namespace.is_empty()) {
        map.keep_only(namespace);
        if map.nodes.is_empty() {
            anyhow::bail!(
                "no claim of namespace {namespace} has a part of a GPU; -n shows those of one namespace"
            );
        }
    }
    Ok(match args.output {
        Output::Json => output::json(&map)?,
        Output::Yaml => output::yaml(&map)?,
        Output::Map => draw::draw(&map, width),
    })
}

/// Lines of the terminal; where nobody says how many, all are printed.
fn height() -> usize {
    terminal_size::terminal_size().map_or(usize::MAX, |(_, height)| height.0.into())
}

fn width() -> usize {
    terminal_size::terminal_size().map_or(WIDTH, |(width, _)| width.0.into())
}
