//! Which devices a request means: the CEL expressions of DeviceClasses and claims, evaluated on a device's facts; and
//! taints with their tolerations.
//!
//! * [`DeviceFacts`]: what a ResourceSlice says of a device
//! * [`Selector`]: an expression, compiled once; [`Selector::matches`] says whether it chooses a device
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

mod eval;
mod expr;
mod facts;
mod function;
mod parse;
mod taint;
#[cfg(test)]
mod tests;
mod value;

use thiserror::Error;

pub use expr::{Reads, Seen};
pub use facts::{AttributeValue, DeviceFacts, QualifiedName};
pub use taint::{Effect, Taint, Toleration, untolerated};

/// The API server's limit.
pub const TEXT_BYTES_MAX: usize = 10 << 10;

/// A compiled expression.
#[derive(Debug, Clone)]
pub struct Selector {
    text: String,
    expr: expr::Expr,
}

/// Why an expression cannot be used, or says nothing about a device.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum SelectError {
    #[error("the selector has {0} bytes; {TEXT_BYTES_MAX} are the most")]
    TooLong(usize),
    /// In brackets, or in one row of operators.
    #[error("the selector {} is nested too deeply; split it into several selectors", quoted(text))]
    TooDeep { text: String },
    /// Line and column count from 1.
    #[error("the selector {} is no CEL, line {line}, column {column}: {words}", quoted(text))]
    Syntax { text: String, line: usize, column: usize, words: String },
    #[error("the selector {} cannot be evaluated here: {what}", quoted(text))]
    Unsupported { text: String, what: String },
    /// A mistake that shows on this device: kube-scheduler would stop at it.
    #[error("the selector {} fails: {what}", quoted(text))]
    Failed { text: String, what: String },
    #[error("the selector {} costs too much to evaluate; make it simpler", quoted(text))]
    TooCostly { text: String },
}

/// The expression for people; a long one is cut.
fn quoted(text: &str) -> String {
    const CHARS_MAX: usize = 300;
    match text.char_indices().nth(CHARS_MAX) {
        Some((end, _)) => format!("{:?}…", &text[..end]),
        None => format!("{text:?}"),
    }
}

impl Selector {
    /// # Errors
    /// It is too long, no CEL, or uses something that is not supported.
    pub fn compile(text: &str) -> Result<Self, SelectError> {
        let expr = parse::expression(text)?;
        Ok(Self { text: text.to_owned(), expr })
    }

    pub fn text(&self) -> &str {
        &self.text
    }

    /// True if it chooses the device.
    ///
    /// # Errors
    /// It names an attribute that the device lacks, compares what cannot be compared, gives something else than
    /// true or false, or costs too much.
    pub fn matches(&self, device: &DeviceFacts) -> Result<bool, SelectError> {
        eval::truth(&self.expr, device).map_err(|trouble| {
            let text = self.text.clone();
            match trouble {
                eval::Trouble::Fails(what) => SelectError::Failed { text, what },
                eval::Trouble::Costs => SelectError::TooCostly { text },
            }
        })
    }

    /// What of a device the answer depends on; devices that agree in it get the same answer.
    pub fn reads(&self) -> Reads {
        Reads::of(&self.expr)
    }
}
