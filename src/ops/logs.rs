//! One subscriber for the process. Logs go to standard error: standard output belongs to answers.
//!
//! What concerns one claim is logged within a span that has the fields `claim.uid`, `claim.namespace` and `claim.name`
//! (for a daemon `group`, for a review `request.uid`), so that the UID finds the whole way of a claim through a process.
//! Such spans have level error: no filter takes them away from lines that it lets through.

use std::error::Error;
use std::fmt;
use std::io;
use std::str::FromStr;

use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, Registry, fmt as layers, reload};

use super::OpsError;

/// How a log line is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// One JSON object per line, for collectors.
    Json,
    /// For people.
    Text,
}

/// Changes what is logged while the process runs.
#[derive(Debug, Clone)]
pub struct LogControl(reload::Handle<EnvFilter, Registry>);

/// Sets up logging for the whole process. To be called once.
///
/// # Errors
/// The filter is not understood, or logging had been set up before.
pub fn init(format: Format, filter: &str) -> Result<LogControl, OpsError> {
    init_to(io::stderr, format, filter)
}

/// [`init`] with another destination, which each line is given in one piece, by the thread that logs it.
///
/// # Errors
/// As [`init`].
pub fn init_to<W>(writer: W, format: Format, filter: &str) -> Result<LogControl, OpsError>
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    let (layer, control) = LogControl::new(filter)?;
    let lines = layers::layer().with_writer(writer);
    let lines = match format {
        Format::Json => lines.json().flatten_event(true).with_current_span(false).boxed(),
        Format::Text => lines.with_ansi(false).boxed(),
    };
    tracing_subscriber::registry().with(layer).with(lines).try_init().map_err(OpsError::LogTwice)?;
    Ok(control)
}

/// Is this a filter that [`init`] and [`LogControl::set`] would take?
///
/// # Errors
/// [`OpsError::LogFilter`] with what to write instead.
pub fn check(filter: &str) -> Result<(), OpsError> {
    parse(filter).map(drop)
}

impl LogControl {
    /// The filter as a layer, and the handle that changes it. [`init`] wants no more than that;
    /// tests build servers with it.
    pub fn new(filter: &str) -> Result<(reload::Layer<EnvFilter, Registry>, Self), OpsError> {
        let (layer, handle) = reload::Layer::new(parse(filter)?);
        Ok((layer, Self(handle)))
    }

    /// Replaces the filter. On an error the old one stays.
    pub fn set(&self, filter: &str) -> Result<(), OpsError> {
        self.0.reload(parse(filter)?).map_err(OpsError::LogReload)
    }

    /// The filter in force, in the words of [`LogControl::set`].
    pub fn current(&self) -> Result<String, OpsError> {
        self.0.with_current(ToString::to_string).map_err(OpsError::LogReload)
    }
}

/// The longest filter: to read one takes much longer than to write it.
const FILTER_BYTES_MAX: usize = 1 << 10;

/// A bare word that is no level would be taken for the name of a target and silence all others:
/// `verbose` must be refused, not obeyed.
fn parse(filter: &str) -> Result<EnvFilter, OpsError> {
    let refused = |source| OpsError::LogFilter { filter: filter.to_owned(), source };
    let is_level = |word: &str| !word.is_empty() && LevelFilter::from_str(word).is_ok();
    let understood =
        |word: &str| word.contains(['=', '[', ']']) || word.contains("::") || is_level(word.trim());
    // The parser of tracing-subscriber 0.3.23 panics at some text that is not ASCII.
    if !filter.is_ascii() || filter.len() > FILTER_BYTES_MAX || !filter.split(',').all(understood) {
        return Err(refused(None));
    }
    EnvFilter::try_new(filter).map_err(|error| refused(Some(error)))
}

/// An error with its sources, in one line: `cannot do x: file is gone: No such file`.
/// A source whose words the message before already ends with is not printed again.
pub struct Chain<'a>(pub &'a (dyn Error + 'static));

impl fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut said = self.0.to_string();
        f.write_str(&said)?;
        let mut next = self.0.source();
        while let Some(source) = next {
            let message = source.to_string();
            if !said.ends_with(&message) {
                write!(f, ": {message}")?;
                said = message;
            }
            next = source.source();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{message}")]
    struct Layered {
        message: &'static str,
        source: Option<Box<Layered>>,
    }

    fn chain(messages: &[&'static str]) -> Option<Box<Layered>> {
        let (&message, rest) = messages.split_first()?;
        Some(Box::new(Layered { message, source: chain(rest) }))
    }

    #[test]
    fn a_chain_is_printed_source_by_source_and_nothing_twice() {
        for (messages, printed) in [
            (vec!["cannot prepare"], "cannot prepare"),
            (vec!["cannot prepare", "disk is full"], "cannot prepare: disk is full"),
            (vec!["outer: disk is full", "disk is full", "errno 28"], "outer: disk is full: errno 28"),
        ] {
            let error = chain(&messages).unwrap();
            assert_eq!(Chain(&*error).to_string(), printed);
        }
    }

    #[test]
    fn levels_and_pairs_are_filters_and_a_misspelt_level_is_none() {
        for good in
            ["info", "DEBUG", "off", "info,tranche::node=debug", "warn,tranche::ops", "a[b{c=1}]=trace"]
        {
            assert!(check(good).is_ok(), "{good}");
        }
        for bad in ["", "\u{2028}[{", "verbose", "info,", "inof,tranche=debug", "tranche=loud"] {
            let words = check(bad).unwrap_err().to_string();
            assert!(words.contains("write a level"), "{bad}: {words}");
        }
    }

    #[test]
    fn a_refused_filter_leaves_the_old_one() {
        let (_layer, control) = LogControl::new("info").unwrap();
        assert!(control.set("verbose").is_err());
        assert_eq!(control.current().unwrap(), "info");
        control.set("debug").unwrap();
        assert_eq!(control.current().unwrap(), "debug");
    }
}
