//! Which devices a request means: the CEL expressions of DeviceClasses and claims, evaluated on a device's facts; and
//! taints with their tolerations.
//!
//! * [`DeviceFacts`]: what a ResourceSlice says of a device
//! * [`Selector`]: an expression, compiled once; [`Selector::matches`] says whether it chooses a device
//! * [`placer()`]: whether a DeviceClass is the controller's
//! * [`Taint`], [`Toleration`]: what keeps claims off a device, and what a request bears
//!
//! The rules are kube-scheduler's (KEP-4381): one variable `device` with `driver`, `attributes[domain].name`,
//! `capacity[domain].name` and `allowMultipleAllocations`; an unknown domain is an empty map, an unknown name is an
//! error, which the claim is told. Of CEL's functions those are there that `function` lists; an expression that uses
//! another is refused when it is compiled, with words: nothing is ever guessed.
//!
//! `parse` is the only file that knows the CEL crate, and takes its parser alone: its evaluator has no quantities,
//! no versions, no `cel.bind`, no empty map for an unknown domain, and no bound on what an evaluation may cost.
//!
//! May import: model. May name: cel, k8s-openapi (as data only), regex, semver,
//! thiserror.

mod cost;
mod eval;
mod expr;
mod facts;
mod function;
mod parse;
mod pattern;
mod placer;
mod strings;
mod taint;
#[cfg(test)]
mod tests;
mod value;

use thiserror::Error;

pub use cost::{COST_MAX, MEMORY_MIB_MAX, TICKS_PER_UNIT};
pub use expr::{Reads, ValuesRead};
pub use facts::{AttributeValue, BY_TOTAL_MEMORY, DeviceFacts, QualifiedName, is_by_memory_capacity};
pub use placer::{NOT_FOR_THE_SCHEDULER, Placer, TYPE_OF_SHARES, chosen_by, placer};
pub use taint::{Effect, Taint, Toleration, untolerated};

/// The API server's limit.
pub const TEXT_BYTES_MAX: usize = 10 << 10;

/// Of all selectors of a claim together. The API server has no limit for them but that of an object.
pub const CLAIM_BYTES_MAX: usize = 60 << 10;
/// Of a claim's requests or their alternatives, with their selectors and tolerations, in all: each takes several times
/// its text in the controller's memory.
pub const CLAIM_ENTRIES_MAX: usize = 512;
/// Of the requests that the constraints of a pod's claims name, each counted as often as it is named.
pub const CONSTRAINED_MAX: usize = 256;

/// About what the parser takes; patterns come on top.
const COMPILE_TICKS_PER_BYTE: u64 = 50;
const COMPILED_BYTES_PER_BYTE: usize = 40;
/// Of a pattern's weight: a class such as `\w` has 1,000.
const PATTERN_BYTES_PER_WEIGHT: usize = 64;
const PATTERN_TICKS_PER_WEIGHT: u64 = 40;

/// A compiled expression.
#[derive(Debug, Clone)]
pub struct Selector {
    text: String,
    expr: expr::Expr,
    patterns_weight: u64,
}

/// Why an expression cannot be used, or says nothing about a device.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum SelectError {
    #[error("the selector has {0} bytes; the limit is {TEXT_BYTES_MAX}")]
    TooLong(usize),
    /// In brackets, or in one row of operators.
    #[error("the selector {} is nested too deeply; split it into several selectors", quoted(text))]
    TooDeep { text: String },
    /// Line and column count from 1.
    #[error("the selector {} is not valid CEL, line {line}, column {column}: {words}", quoted(text))]
    Syntax { text: String, line: usize, column: usize, words: String },
    #[error("the selector {} cannot be evaluated here: {what}", quoted(text))]
    Unsupported { text: String, what: String },
    /// A mistake that shows on this device: kube-scheduler would stop at it.
    #[error("the selector {} fails: {what}", quoted(text))]
    Failed { text: String, what: String },
    /// On one device, in the API server's units.
    #[error(
        "the selector {} costs more than {COST_MAX} on one device, counting each element that is compared or copied; \
         make it simpler",
        quoted(text)
    )]
    TooCostly { text: String },
    #[error(
        "the selector {} takes more than {MEMORY_MIB_MAX} MiB of memory on one device; make it simpler",
        quoted(text)
    )]
    TooLarge { text: String },
}

/// The expression for people; a long one is cut.
fn quoted(text: &str) -> String {
    const CHARS_MAX: usize = 300;
    match text.char_indices().nth(CHARS_MAX) {
        Some((end, _)) => format!("{:?}…", &text[..end]),
        None => format!("{text:?}"),
    }
}

impl SelectError {
    /// No device is chosen or not chosen by it: it takes too much.
    pub fn is_of_cost(&self) -> bool {
        matches!(self, Self::TooCostly { .. } | Self::TooLarge { .. })
    }
}

impl Selector {
    /// # Errors
    /// It is too long, no CEL, or uses something that is not supported.
    pub fn compile(text: &str) -> Result<Self, SelectError> {
        let (expr, patterns_weight) = parse::expression(text)?;
        Ok(Self { text: text.to_owned(), expr, patterns_weight })
    }

    pub fn text(&self) -> &str {
        &self.text
    }

    /// What it costs to compile a text, in ticks, whether or not it is CEL: as much as is counted before it is done.
    pub fn cost_of_compiling(text: &str) -> u64 {
        COMPILE_TICKS_PER_BYTE * text.len() as u64
    }

    /// What it has cost to compile its patterns, in ticks.
    pub fn cost_of_patterns(&self) -> u64 {
        self.patterns_weight.saturating_mul(PATTERN_TICKS_PER_WEIGHT)
    }

    /// What the compiled expression takes of memory, about, in bytes.
    pub fn weight(&self) -> usize {
        let patterns = usize::try_from(self.patterns_weight).unwrap_or(usize::MAX);
        let patterns = patterns.saturating_mul(PATTERN_BYTES_PER_WEIGHT);
        self.text.len().saturating_mul(COMPILED_BYTES_PER_BYTE).saturating_add(patterns)
    }

    /// True if it chooses the device.
    ///
    /// # Errors
    /// It names an attribute that the device lacks, compares what cannot be compared, gives something else than
    /// true or false, or costs too much.
    pub fn matches(&self, device: &DeviceFacts) -> Result<bool, SelectError> {
        self.look(device).0
    }

    /// The same, and what it has cost, in ticks: [`TICKS_PER_UNIT`].
    pub fn look(&self, device: &DeviceFacts) -> (Result<bool, SelectError>, u64) {
        let (found, cost) = eval::truth(&self.expr, device, u64::MAX);
        (found.map_err(|trouble| self.error(trouble)), cost)
    }

    /// The same for so many ticks at most. None: they are spent, and would have been more.
    pub fn look_within(&self, device: &DeviceFacts, most: u64) -> (Option<Result<bool, SelectError>>, u64) {
        let (found, cost) = eval::truth(&self.expr, device, most);
        let is_cut = matches!(found, Err(eval::Trouble::Costs)) && most < COST_MAX * TICKS_PER_UNIT;
        ((!is_cut).then(|| found.map_err(|trouble| self.error(trouble))), cost)
    }

    fn error(&self, trouble: eval::Trouble) -> SelectError {
        let text = self.text.clone();
        match trouble {
            eval::Trouble::Fails(what) => SelectError::Failed { text, what },
            eval::Trouble::Costs => SelectError::TooCostly { text },
            eval::Trouble::Swells => SelectError::TooLarge { text },
        }
    }

    /// What of a device the answer depends on; devices that agree in it get the same answer.
    pub fn reads(&self) -> Reads {
        Reads::of(&self.expr)
    }
}
