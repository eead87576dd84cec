//! Parse, set up logging, run one subcommand, say how it went with the exit code.

use std::process::ExitCode;

use tranche::cli::settings::{self, LogSettings};
use tranche::cli::{
    self, Cli, Command, EXIT_USAGE, completion, explain, inspect, plan, rebalance, simulate, top,
};
use tranche::daemon::launch::{Launch, SUBCOMMAND};
use tranche::ops::OpsError;
use tranche::ops::logs::{self, LogControl};

/// File work; more would only add stacks. The node plugin has [`tranche::node::BLOCKING_THREADS_MAX`].
const BLOCKING_THREADS_MAX: usize = 8;
const THREAD_STACK_BYTES: usize = 512 * 1024;

/// How kubectl begins what the API server said.
const FROM_SERVER: &str = "Error from server";

fn main() -> ExitCode {
    let args: Vec<_> = std::env::args_os().collect();
    let cli = match cli::parse(args.iter().cloned()) {
        Ok(cli) => cli,
        Err(usage) => {
            // Help goes to standard output, mistakes to standard error. A closed one cannot be told.
            let _ = usage.print();
            return ExitCode::from(u8::try_from(usage.exit_code()).unwrap_or(EXIT_USAGE));
        }
    };
    let is_tool = cli.command.is_tool();
    match run(cli, args.first()) {
        Ok(code) => code,
        Err(error) => {
            let words = logs::Chain(error.as_ref()).to_string();
            match is_tool {
                true if words.starts_with(FROM_SERVER) => eprintln!("{words}"),
                true => eprintln!("error: {words}"),
                false => eprintln!("tranche: {words}"),
            }
            let usage = error.is::<settings::BadSettings>() || error.is::<cli::UsageError>();
            if usage { ExitCode::from(EXIT_USAGE) } else { ExitCode::FAILURE }
        }
    }
}

fn run(cli: Cli, called: Option<&std::ffi::OsString>) -> anyhow::Result<ExitCode> {
    let Cli { log, command, warnings } = cli;
    match command {
        Command::Node(args) => {
            let (log, node) = settings::log_and_node(log, *args)?;
            let control = start_logs(&log, &warnings)?;
            let runtime = runtime_with(tranche::node::BLOCKING_THREADS_MAX)?;
            runtime.block_on(tranche::node::run(node, control))?;
        }
        Command::Mps(args) => {
            let (log, mps) = settings::log_and_mps(log, *args)?;
            let control = start_logs(&log, &warnings)?;
            runtime()?.block_on(tranche::mps::run(mps, control))?;
        }
        Command::Webhook(args) => {
            let (log, webhook) = settings::log_and_webhook(log, *args)?;
            let control = start_logs(&log, &warnings)?;
            runtime()?.block_on(tranche::webhook::run(webhook, control))?;
        }
        Command::Controller(args) => {
            let (log, controller) = settings::log_and_controller(log, *args)?;
            let control = start_logs(&log, &warnings)?;
            runtime()?.block_on(cli::controller::run(controller, control))?;
        }
        Command::MpsLaunch { launch } => return Err(become_daemon(&launch)),
        Command::Plan(args) => return Ok(runtime()?.block_on(plan::run(*args))?.into()),
        Command::Inspect(args) => cli::print(inspect::answer(&args)?.as_bytes())?,
        Command::Top(args) => runtime()?.block_on(top::run(args))?,
        Command::Explain(args) => return Ok(runtime()?.block_on(explain::run(*args))?.into()),
        Command::Rebalance(args) => return Ok(runtime()?.block_on(rebalance::run(*args))?.into()),
        Command::Simulate(args) => simulate::run(&args)?,
        Command::Completion { shell } => cli::print(&completion::script(shell, called))?,
        Command::Complete { words } => cli::print(completion::answer(&words).as_bytes())?,
        Command::Version { output } => cli::print(cli::told_version(output)?.as_bytes())?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Sets up logging, and logs what was wrong with the environment.
fn start_logs(settings: &LogSettings, warnings: &[String]) -> Result<LogControl, OpsError> {
    let control = logs::init(settings.format, &settings.filter)?;
    for warning in warnings {
        tracing::warn!("{warning}");
    }
    Ok(control)
}

/// Returns only if it failed.
fn become_daemon(launch: &str) -> anyhow::Error {
    let launch: Launch = match serde_json::from_str(launch) {
        Ok(launch) => launch,
        Err(error) => {
            return cli::UsageError(format!("{SUBCOMMAND} is for `tranche mps` only: {error}")).into();
        }
    };
    for words in launch.leave_cgroups() {
        eprintln!("{words}");
    }
    launch.enter().into()
}

fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    runtime_with(BLOCKING_THREADS_MAX)
}

/// One thread for everything that waits: a node has little to compute, and each further thread
/// costs memory on every node.
fn runtime_with(blocking_threads: usize) -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(blocking_threads)
        .thread_stack_size(THREAD_STACK_BYTES)
        .build()
}
