//! `tranche top`: who has what of which GPU, all over the cluster, as the API server knows it, and what is used of it, as
//! the node plugins do. Live on a terminal, once elsewhere.
//!
//! slices + claims → [`map`] ← [`bounds`] ← namespaces; the map ← [`used`] ← metrics of the node plugins; the map → [`draw`], or JSON

mod bounds;
mod draw;
pub(super) mod map;
#[cfg(test)]
mod tests;
pub mod used;

use std::collections::{BTreeMap, BTreeSet};
use std::io::{IsTerminal, stdout};
use std::time::Duration;

use clap::{Args, ValueEnum};

use super::reach::{ReachArgs, for_people, told};
use super::{UsageError, output, print};
use crate::cluster::{CallError, KubeCluster, PAGE_BYTES_MAX};
pub use draw::PictureStyle;
use map::Map;
use used::Uses;

/// Before a picture: to the upper left corner; after each line: nothing of the old one; after it all: the rest.
const HOME: &str = "\x1b[H";
const CLEAR_LINE: &str = "\x1b[K\n";
const CLEAR_BELOW: &str = "\x1b[J";
/// Where nobody says how wide the terminal is.
const WIDTH: usize = 110;
const INTERVAL_MIN_S: f64 = 0.5;
/// Of nodes with GPUs, in words about one without; of nodes that did not say what is used.
const NODES_TOLD: usize = 8;
/// Where a node plugin serves its metrics.
const METRICS: &str = "/metrics";

#[derive(Debug, Clone, Args)]
pub struct TopArgs {
    /// Print it once, also on a terminal.
    #[arg(long)]
    pub once: bool,
    /// Seconds between two looks.
    #[arg(long, default_value_t = 2.0)]
    pub interval: f64,
    /// Only this node; bounds of namespaces and what is used of them are of the whole cluster.
    #[arg(long)]
    pub node: Option<String>,
    /// Only GPUs of which claims of this namespace have a part [default: all].
    #[arg(short, long)]
    pub namespace: Option<String>,
    /// How to show it.
    #[arg(short, long, value_enum, default_value = "map")]
    pub output: TopOutput,
    /// Show what is used as well, as the node plugins measure it: needs the right to get pods/proxy in their namespace.
    #[arg(long = "use", value_name = "true|false", num_args = 0..=1, require_equals = true,
          default_value_t = true, default_missing_value = "true", action = clap::ArgAction::Set)]
    pub with_use: bool,
    /// Where the node plugins run.
    #[arg(long, value_name = "NAMESPACE", default_value = "tranche-system")]
    pub driver_namespace: String,
    #[command(flatten)]
    pub reach: ReachArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum TopOutput {
    /// A bar for each GPU.
    Map,
    /// A row for each pod, once.
    Table,
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
        anyhow::bail!(UsageError(format!(
            "--interval {interval}: write a number of seconds, at least {INTERVAL_MIN_S}"
        )));
    }
    let cluster = args.reach.connect().await?;
    let live = !args.once && args.output == TopOutput::Map && stdout().is_terminal();
    let shape = look_of_output;
    let mut picture = look(&cluster, &args, shape()).await.map_err(|error| told(&cluster, error))?;
    if !live {
        return Ok(print(picture.as_bytes())?);
    }
    loop {
        let shown = draw::cut(&picture, height());
        let lines: String = shown.lines().map(|line| format!("{line}{CLEAR_LINE}")).collect();
        print(format!("{HOME}{lines}{CLEAR_BELOW}").as_bytes())?;
        tokio::time::sleep(Duration::from_secs_f64(interval)).await;
        picture = look(&cluster, &args, shape())
            .await
            .unwrap_or_else(|error| format!("{picture}\n{:#}; tried again\n", told(&cluster, error)));
    }
}

/// One look, as it is printed.
///
/// # Errors
/// The API server does not answer, or does not let the caller look; or nothing is published for the node that was named.
pub async fn look(cluster: &KubeCluster, args: &TopArgs, shape: PictureStyle) -> anyhow::Result<String> {
    let (seen, namespaces) = tokio::join!(cluster.survey(), cluster.namespaces());
    let seen = seen.map_err(for_people)?;
    let mut map = map::map(&seen.slices, &seen.claims);
    match namespaces {
        Ok(namespaces) => map.namespaces = bounds::bounds(&namespaces, &seen.claims),
        Err(error) => map.lacks.push(format!("bounds of namespaces are not known: {}", for_people(error))),
    }
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
    if args.with_use {
        add_use(cluster, args, &mut map).await;
    }
    Ok(match args.output {
        TopOutput::Json => output::json(&map)?,
        TopOutput::Yaml => output::yaml(&map)?,
        TopOutput::Map => draw::draw(&map, shape),
        TopOutput::Table => draw::table(&map),
    })
}

/// Asks the nodes on the map of which something is given what is used of it. What cannot be read is a lack of the map,
/// never a failure.
async fn add_use(cluster: &KubeCluster, args: &TopArgs, map: &mut Map) {
    let namespace = &args.driver_namespace;
    let nodes: BTreeSet<String> = map.used_nodes().map(str::to_owned).collect();
    if nodes.is_empty() {
        return;
    }
    let plugins = match cluster.node_plugins(namespace, args.node.as_deref()).await {
        Ok(plugins) => plugins,
        Err(error) => return map.lacks.push(format!("what is used is not known: {}", why(error, namespace))),
    };
    let plugins: Vec<_> = plugins.into_iter().filter(|one| nodes.contains(&one.node)).collect();
    if plugins.is_empty() {
        let words = format!(
            "what is used is not known: no node plugin is ready in namespace {namespace}; if they run elsewhere, give \
             --driver-namespace"
        );
        return map.lacks.push(words);
    }
    let (mut uses, mut answered, mut silent) = (Uses::default(), BTreeSet::new(), BTreeSet::new());
    let (mut failed, mut cut) = (Vec::new(), Vec::new());
    for page in cluster.node_pages(namespace, plugins, METRICS).await {
        match page.answer {
            Err(error) => failed.push((page.node, why(error, namespace))),
            Ok((bytes, whole)) => {
                if !whole {
                    let most = PAGE_BYTES_MAX >> 20;
                    cut.push((
                        page.node.clone(),
                        format!("its metrics have more than {most} MiB; the rest is not read"),
                    ));
                }
                if !uses.read(&page.node, &String::from_utf8_lossy(&bytes)) && whole {
                    silent.insert(page.node.clone());
                }
                answered.insert(page.node);
            }
        }
    }
    uses.put_on(map, |node| answered.contains(node));
    // Of two plugins of a node, as during an update, one answer is enough, and one of them measures.
    failed.retain(|(node, _)| !answered.contains(node));
    failed.extend(cut);
    map.lacks.extend(grouped(failed));
    let mute = |node: &String| map.nodes.iter().any(|one| one.name == *node && !one.tells_use());
    let silent: Vec<String> = silent.into_iter().filter(mute).collect();
    if !silent.is_empty() {
        let nodes = listed(&silent);
        map.lacks.push(format!(
            "what is used on {nodes} is not measured: watchdog.action is off, or it has just begun"
        ));
    }
}

/// Why a page was not read, and which right is missing if one is.
fn why(error: CallError, namespace: &str) -> String {
    match error {
        CallError::Forbidden { message, .. } if message.contains("pods/proxy") => format!(
            "you may not get pods/proxy in namespace {namespace}; ask for Role tranche-use-viewer (kubectl -n {namespace} \
             create rolebinding tranche-use-viewer --role tranche-use-viewer --user NAME)"
        ),
        CallError::Refused { code, message, .. } => format!("status {code}: {}", message.trim()),
        CallError::TimedOut { limit, .. } => format!("no answer within {} s", limit.as_secs()),
        error => for_people(error).to_string(),
    }
}

/// Nodes with the same words in one line.
fn grouped(failed: Vec<(String, String)>) -> Vec<String> {
    let mut by_words: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (node, words) in failed {
        by_words.entry(words).or_default().push(node);
    }
    let line = |(words, mut nodes): (String, Vec<String>)| {
        nodes.sort();
        nodes.dedup();
        format!("what is used on {} is not known: {words}", listed(&nodes))
    };
    by_words.into_iter().map(line).collect()
}

/// The first of them, and how many more there are.
fn listed(nodes: &[String]) -> String {
    let first = nodes.iter().take(NODES_TOLD).map(String::as_str).collect::<Vec<_>>().join(", ");
    match nodes.len().saturating_sub(NODES_TOLD) {
        0 => first,
        more => format!("{first} and {more} more"),
    }
}

/// As a picture may look where it is printed once.
pub fn look_of_output() -> PictureStyle {
    PictureStyle { width: width(), reverse: reverse() }
}

/// A map as it is shown.
pub fn drawn(map: &Map, look: PictureStyle) -> String {
    draw::draw(map, look)
}

/// Whether letters may be set in reverse: on a terminal, unless somebody wants it plain (no-color.org).
fn reverse() -> bool {
    let is_set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    let is_dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb");
    stdout().is_terminal() && !is_set("NO_COLOR") && !is_dumb
}

/// Lines of the terminal; where nobody says how many, all are printed.
fn height() -> usize {
    terminal_size::terminal_size().map_or(usize::MAX, |(_, height)| height.0.into())
}

fn width() -> usize {
    terminal_size::terminal_size().map_or(WIDTH, |(width, _)| width.0.into())
}
