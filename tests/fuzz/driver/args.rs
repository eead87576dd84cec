//! What is asked for on the command line.

use std::path::PathBuf;
use std::time::Duration;

const USAGE: &str = "[NAME...] [--seconds N] [--seed N] [--pending] [--replay FILE]";
/// In `make test`: with two at a time, all targets together take a quarter of a minute, on a busy machine one.
const SHORT: Duration = Duration::from_millis(1200);

pub struct Args {
    pub task: Task,
    /// Of targets, or parts of them; none: all.
    pub names: Vec<String>,
    /// For each target, of a processor.
    pub time: Duration,
    pub seed: u64,
    /// Try what is put off, too.
    pub pending: bool,
}

pub enum Task {
    Run,
    /// One target, for a parent that waits.
    Child(String),
    Replay(PathBuf),
}

impl Args {
    /// Flags of cargo's own test runner that mean nothing here are passed over.
    pub fn parse(args: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut found = Self { task: Task::Run, names: Vec::new(), time: SHORT, seed: 1, pending: false };
        let mut args = args;
        while let Some(arg) = args.next() {
            let mut value = || args.next().ok_or_else(|| format!("{arg} needs a value: {USAGE}"));
            let number =
                |text: String| text.parse::<u64>().map_err(|_| format!("{arg} {text}: write a whole number"));
            match arg.as_str() {
                "--seconds" => found.time = Duration::from_secs(number(value()?)?),
                "--millis" => found.time = Duration::from_millis(number(value()?)?),
                "--seed" => found.seed = number(value()?)?,
                "--pending" => found.pending = true,
                "--replay" => found.task = Task::Replay(value()?.into()),
                "--child" => found.task = Task::Child(value()?),
                "--nocapture" | "--no-capture" | "--include-ignored" | "--ignored" | "--quiet" | "-q" => {}
                other if other.starts_with("--test-threads") || other.starts_with("--skip=") => {}
                other if other.starts_with('-') => return Err(format!("{other} is not known: {USAGE}")),
                name => found.names.push(name.to_owned()),
            }
        }
        Ok(found)
    }

    pub fn wants(&self, name: &str) -> bool {
        self.names.is_empty() || self.names.iter().any(|part| name.contains(part.as_str()))
    }
}
