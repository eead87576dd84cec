//! Hostile input for everything that reads what others wrote: each parser, the evaluator of selectors, and the
//! controller's core. No panic, and a bound of time and memory for each input.
//!
//!   cargo test --test fuzz                              a short run of all targets, always with the same seed
//!   cargo test --test fuzz -- NAME...                   targets with NAME in their names
//!   cargo test --test fuzz -- --seconds N --seed N      longer, or another way through
//!   cargo test --test fuzz -- --replay FILE NAME        one input, with what it costs
//!   cargo test --test fuzz -- --pending                 what is put off (tests/data/fuzz/pending.txt), too
//!
//! Each target runs in a process of its own, so that a stack or a memory that overflows is a fault like others. An
//! input that shows a fault is stored below tests/data/fuzz/TARGET, and from then on every run tries it first.
//!
//! * `driver`: makes inputs, runs them, measures; knows no target
//! * `targets`: what is run, by whose bytes it reads; a new parser is added there
//!
//! May name: the driver's public functions, what its parsers take (k8s-openapi, serde_json, prost, jiff), fastrand.

// A test may be long, spawn and measure; its pauses are looked at by tests/tidy.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::too_many_lines, clippy::disallowed_methods)]

mod driver;
mod targets;

use std::process::ExitCode;

use driver::memory::Counting;

#[global_allocator]
static MEMORY: Counting = Counting;

fn main() -> ExitCode {
    driver::main(&targets::all())
}
