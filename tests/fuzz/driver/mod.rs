//! Runs targets: what is asked for, how inputs are made, what they may cost.
//!
//! * `args`: what is asked for; `parent`: a process for each target; `child`: one target's inputs, one after another
//! * `corpus`: inputs in the tree; `mutate`, `json`: inputs made of others; `cover`: which were worth keeping
//! * `meter`: time and memory of one input; `memory`: the allocator that counts; `pace`: how fast this machine is
//! * `checks`: targets that fail, so that it is known that failures are seen

pub mod args;
mod checks;
mod child;
mod corpus;
mod cover;
pub mod json;
pub mod memory;
pub mod meter;
pub mod mutate;
mod pace;
mod parent;

use std::process::ExitCode;

use args::{Args, Task};
use mutate::Pool;

/// Something that reads what others wrote.
pub struct Target {
    pub name: &'static str,
    /// Inputs to begin with: what is usual, in all its forms.
    pub seeds: fn() -> Vec<Vec<u8>>,
    /// Words that get further than random bytes.
    pub words: &'static [&'static str],
    pub form: Form,
    pub limits: Limits,
    /// Panics if something does not hold. What it prepares before [`meter::ready`] costs nothing.
    pub run: fn(&[u8]),
}

/// How inputs are made.
#[derive(Clone, Copy)]
pub enum Form {
    /// Bytes, mostly text.
    Text,
    /// JSON, now and then damaged.
    Json,
    /// A text of the target's own making; the other half of the inputs are mutated like [`Form::Text`].
    Made(fn(&mut fastrand::Rng) -> String),
    /// JSON of the target's own making, or mutated like [`Form::Json`].
    MadeJson(fn(&mut fastrand::Rng, &Pool) -> serde_json::Value),
}

/// What one input may cost. Time is that of an unoptimised program on a busy machine: some fifty times what is usual.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Length of an input.
    pub length: usize,
    pub millis: u64,
    /// Memory at the peak, beyond what was in use before: so much, and so much for each byte of input.
    pub bytes: usize,
    pub per_byte: usize,
}

impl Limits {
    /// For a parser whose answer is about as large as its input.
    pub const PARSER: Self = Self { length: 4 << 10, millis: 500, bytes: 256 << 10, per_byte: 64 };

    fn memory(&self, input: usize) -> usize {
        self.bytes + self.per_byte * input
    }
}

pub fn main(targets: &[Target]) -> ExitCode {
    let args = match Args::parse(std::env::args().skip(1)) {
        Ok(args) => args,
        Err(words) => {
            eprintln!("{words}");
            return ExitCode::from(2);
        }
    };
    let done = match &args.task {
        Task::Run => parent::run(targets, &args),
        Task::Child(name) if checks::is_one(name) => {
            let checks = checks::targets().map(|(target, _)| target);
            child::run(find(&checks, name), &args)
        }
        Task::Child(name) => child::run(find(targets, name), &args),
        Task::Replay(file) => {
            match targets.iter().find(|target| args.names.iter().any(|name| name == target.name)) {
                Some(target) => child::replay(target, file),
                None => Err("--replay FILE NAME: name the target whole".to_owned()),
            }
        }
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(words) => {
            eprintln!("{words}");
            ExitCode::from(2)
        }
    }
}

fn find<'a>(targets: &'a [Target], name: &str) -> &'a Target {
    targets.iter().find(|target| target.name == name).expect("the parent names targets that there are")
}
