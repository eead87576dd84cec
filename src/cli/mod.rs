//! Flags and environment are read here, once, and handed on by value; answers are printed here.
//!
//! * [`args`]: what was typed
//! * [`variables`]: the environment variables it may be set in
//! * [`settings`]: what it means, or everything that is wrong with it
//! * [`controller`]: the controller's process
//! * [`inspect`]: how a running process is; [`state`]: what it says of itself, read back
//! * [`plan`]: what preparing a claim would do; [`manifest`]: the claim, from a file or the cluster
//! * [`top`]: who has what of which GPU, all over the cluster; [`reach`]: of which cluster
//! * [`explain`]: why a claim waits, or where it went
//! * [`rebalance`]: which pods would have to move for it
//! * [`as_controller`]: what the controller was told, for tools that decide as it does
//! * [`simulate`]: a trace of pods, replayed against the controller's allocator
//! * [`reading`]: files that a person names; [`output`]: answers for programs
//! * [`table`]: tables as kubectl prints them
//! * [`completion`]: scripts for shells
//!
//! May import: everything below but feasible, conditions, nvml, kubelet. May name: clap, clap_complete, anyhow,
//! comfy_table, k8s-openapi (as data), serde, serde_json, serde_path_to_error, serde_saphyr, strsim, terminal_size, thiserror.

pub mod args;
pub mod as_controller;
pub mod completion;
pub mod controller;
pub mod explain;
pub mod inspect;
pub mod manifest;
pub mod output;
pub mod plan;
pub mod reach;
pub mod reading;
pub mod rebalance;
pub mod settings;
pub mod simulate;
pub mod state;
pub mod table;
pub mod top;
mod variables;

use std::ffi::OsString;
use std::io::{self, ErrorKind, Write};
use std::path::Path;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};

use args::{ControllerArgs, LogArgs, MpsArgs, NodeArgs, WebhookRunArgs};

/// A mistake of the caller, as opposed to a failure (1).
pub const EXIT_USAGE: u8 = 2;
/// The answer is no: the claim would not be prepared.
pub const EXIT_REFUSED: u8 = 3;

/// What the caller got wrong, with what to do about it.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct UsageError(pub String);

/// Kubernetes DRA driver for NVIDIA GPUs, with enforced GPU shares.
#[derive(Debug, Parser)]
#[command(name = "tranche", version = version(), propagate_version = true)]
pub struct Cli {
    #[command(flatten)]
    pub log: LogArgs,
    #[command(subcommand)]
    pub command: Command,
    /// What to warn of in the environment, in words for the log.
    #[arg(skip)]
    pub warnings: Vec<String>,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the node plugin: publish this node's GPUs and prepare claims for kubelet.
    Node(Box<NodeArgs>),
    /// Supervise this node's MPS control daemons, one per shared GPU.
    Mps(Box<MpsArgs>),
    /// Place claims of class shared.gpu.nvidia.com across the cluster.
    Controller(Box<ControllerArgs>),
    /// Become an MPS control daemon; `mps` runs it.
    #[command(hide = true)]
    MpsLaunch { launch: String },
    /// Serve the webhooks and nothing else; `controller` serves them too.
    #[command(hide = true)]
    Webhook(Box<WebhookRunArgs>),
    /// Show what preparing a claim would do, without doing it.
    Plan(Box<plan::PlanArgs>),
    /// Show what this node has, publishes and has allocated, by asking the running node plugin.
    Inspect(inspect::InspectArgs),
    /// Show which claims have which part of each GPU in the cluster, as a live map.
    Top(top::TopArgs),
    /// Explain why a claim or a pod waits for its share of a GPU, or where it was placed.
    Explain(Box<explain::ExplainArgs>),
    /// Show which pods would have to move so that what waits for room finds some; with --apply, evict them.
    Rebalance(Box<rebalance::RebalanceArgs>),
    /// Replay a trace of pods against the controller's allocator: how much of the GPUs is allocated?
    Simulate(Box<simulate::SimulateArgs>),
    /// Print a completion script for a shell, or the program that completes `kubectl tranche`.
    #[command(after_help = completion::HELP)]
    Completion { shell: completion::Shell },
    /// Complete words of a command line, for kubectl.
    #[command(name = completion::SUBCOMMAND, hide = true, disable_help_flag = true)]
    Complete {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        words: Vec<String>,
    },
    /// Print version and commit.
    Version {
        /// How to print them.
        #[arg(short, long, value_enum, default_value = "text")]
        output: VersionOutput,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum VersionOutput {
    Text,
    Json,
    Yaml,
}

impl Command {
    /// A tool for people, who know the words of kubectl; the others run for good and write logs.
    pub fn is_tool(&self) -> bool {
        match self {
            Self::Node(_)
            | Self::Mps(_)
            | Self::Controller(_)
            | Self::MpsLaunch { .. }
            | Self::Webhook(_) => false,
            Self::Plan(_)
            | Self::Inspect(_)
            | Self::Top(_)
            | Self::Explain(_)
            | Self::Rebalance(_)
            | Self::Simulate(_)
            | Self::Completion { .. }
            | Self::Complete { .. }
            | Self::Version { .. } => true,
        }
    }
}

/// Version and commit, as they are printed.
///
/// # Errors
/// They cannot be written in that form.
pub fn told_version(output: VersionOutput) -> anyhow::Result<String> {
    let parts = serde_json::json!({"version": env!("CARGO_PKG_VERSION"), "commit": env!("TRANCHE_COMMIT")});
    match output {
        VersionOutput::Text => Ok(format!("tranche {}\n", version())),
        VersionOutput::Json => output::json(&parts),
        VersionOutput::Yaml => output::yaml(&parts),
    }
}

/// `0.1.0 (0123456789ab)`: the version and the commit that it was built from.
pub const fn version() -> &'static str {
    concat!(env!("CARGO_PKG_VERSION"), " (", env!("TRANCHE_COMMIT"), ")")
}

/// Parses a command line, the first argument being the program's own name. Installed as
/// `kubectl-tranche` the program calls itself `kubectl tranche` and is otherwise the same.
///
/// # Errors
/// clap's own, which prints itself: usage errors, but also `--help` and `--version`.
pub fn parse(args: impl IntoIterator<Item = OsString>) -> Result<Cli, clap::Error> {
    let args: Vec<OsString> = args.into_iter().collect();
    let command = command(args.first());
    let matches =
        variables::read_old_names(command.clone(), &variables::is_set).try_get_matches_from(args)?;
    let subcommand = matches.subcommand_name().and_then(|name| command.find_subcommand(name));
    let warned = [Some(&command), subcommand].into_iter().flatten();
    let warnings = warned.flat_map(|command| variables::warnings(command, variables::is_set)).collect();
    Ok(Cli { warnings, ..Cli::from_arg_matches(&matches)? })
}

/// The command under the name by which it was called.
fn command(called: Option<&OsString>) -> clap::Command {
    match called_as_plugin(called) {
        true => Cli::command().name("kubectl-tranche").bin_name("kubectl tranche"),
        false => Cli::command(),
    }
}

fn called_as_plugin(called: Option<&OsString>) -> bool {
    let stem = called.and_then(|name| Path::new(name).file_stem());
    stem.is_some_and(|stem| stem == "kubectl-tranche" || stem == "kubectl_tranche")
}

/// Prints an answer. A reader that has seen enough (`| head`) is no error.
///
/// # Errors
/// Standard output cannot be written.
pub fn print(answer: &[u8]) -> io::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(answer).and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        result => result,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Cli, clap::Error> {
        parse(line.split_whitespace().map(OsString::from))
    }

    #[test]
    fn the_commands_are_consistent() {
        Cli::command().debug_assert();
        command(Some(&"kubectl-tranche".into())).debug_assert();
    }

    #[test]
    fn as_a_kubectl_plugin_it_behaves_the_same_and_says_its_name() {
        for called in ["tranche", "/usr/local/bin/kubectl-tranche", "kubectl_tranche"] {
            let cli = parsed(&format!("{called} version")).unwrap();
            assert!(matches!(cli.command, Command::Version { .. }), "{called}");
        }
        let usage = parsed("/opt/kubectl-tranche node --nonsense").unwrap_err();
        assert!(usage.to_string().contains("Usage: kubectl tranche node"), "{usage}");
        assert_eq!(usage.exit_code(), i32::from(EXIT_USAGE));
    }

    #[test]
    fn log_flags_may_stand_anywhere() {
        let cli = parsed("tranche version --log-level debug").unwrap();
        assert_eq!(cli.log.log_level.as_deref(), Some("debug"));
    }

    #[test]
    fn the_version_names_the_commit() {
        let text = parsed("tranche --version").unwrap_err().to_string();
        assert!(text.starts_with("tranche 0.1.0 (") && text.trim_end().ends_with(')'), "{text}");
    }
}
