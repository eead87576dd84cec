//! Bytes of a record: one line per entry, each `<crc32 of the JSON, 8 hex digits> <JSON>\n`.
//!
//! The first line is the intent with the format's version, written to a new file in one go. Marks are
//! appended. A record of what a claim owes has the claim's UID with `-owed-` and a number behind it, as the first release
//! wrote it ([`super::Standing`]). The checksum covers the bytes as written, so a field that a later version adds harms nothing.
//! A last line without its newline is an append that a crash cut off: it is dropped and said so. Any other
//! damage is an error; a damaged record is never overwritten.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::{Intent, Mark, Phase, Record};

/// The version that this code writes, and the only one that it reads.
const VERSION: u32 = 1;
/// No honest record comes near: a claim has at most 32 results.
const SIZE_MAX: usize = 1 << 20;

/// Why a record cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Damage {
    #[error("it is empty")]
    Empty,
    #[error("it is larger than {SIZE_MAX} bytes")]
    TooLarge,
    #[error("line {line} does not have the form '<crc32> <json>'")]
    Shape { line: usize },
    #[error("line {line} does not match its checksum")]
    Checksum { line: usize },
    #[error("line {line} is not understood ({problem})")]
    Content { line: usize, problem: String },
    #[error("it was written in format version {0}, which this release does not read")]
    Version(u32),
}

/// A record, and how many of the bytes are whole lines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decoded {
    pub record: Record,
    /// Where the next mark goes; less than the file's length if an append was cut off.
    pub valid_len: usize,
}

#[derive(Serialize, Deserialize)]
struct Header<T> {
    version: u32,
    #[serde(flatten)]
    intent: T,
}

/// The first line: a whole new record in phase `Applying(0)`.
pub fn encode_intent(intent: &Intent) -> Result<Vec<u8>, serde_json::Error> {
    line(&Header { version: VERSION, intent: intent.as_written() })
}

/// A line to append.
pub fn encode_mark(mark: Mark) -> Result<Vec<u8>, serde_json::Error> {
    line(&mark)
}

fn line(entry: &impl Serialize) -> Result<Vec<u8>, serde_json::Error> {
    let json = serde_json::to_string(entry)?;
    Ok(format!("{:08x} {json}\n", crc32fast::hash(json.as_bytes())).into_bytes())
}

/// Reads a record back.
pub fn decode(bytes: &[u8]) -> Result<Decoded, Damage> {
    if bytes.len() > SIZE_MAX {
        return Err(Damage::TooLarge);
    }
    let valid_len = bytes.iter().rposition(|b| *b == b'\n').map_or(0, |last| last + 1);
    let mut lines = bytes[..valid_len].split_inclusive(|b| *b == b'\n').enumerate();
    let (_, first) = lines.next().ok_or(Damage::Empty)?;
    let intent = intent(verified(1, first)?)?;
    let mut phase = Phase::Applying(0);
    for (index, text) in lines {
        let json = verified(index + 1, text)?;
        let mark: Mark = serde_json::from_str(json).map_err(|e| content(index + 1, &e))?;
        phase = match mark {
            Mark::Applied(step) => Phase::Applying(step.saturating_add(1)),
            Mark::Ready => Phase::Ready,
            Mark::Releasing => Phase::Releasing,
        };
    }
    Ok(Decoded { record: Record { intent, phase }, valid_len })
}

fn intent(json: &str) -> Result<Intent, Damage> {
    #[derive(Deserialize)]
    struct Version {
        version: u32,
    }
    let Version { version } = serde_json::from_str(json).map_err(|e| content(1, &e))?;
    if version != VERSION {
        return Err(Damage::Version(version));
    }
    serde_json::from_str::<Header<Intent>>(json).map(|h| h.intent.interpreted()).map_err(|e| content(1, &e))
}

fn verified(line: usize, text: &[u8]) -> Result<&str, Damage> {
    let text = std::str::from_utf8(text).map_err(|_| Damage::Shape { line })?.trim_end_matches('\n');
    let (sum, json) = text.split_once(' ').ok_or(Damage::Shape { line })?;
    if sum.len() != 8 {
        return Err(Damage::Shape { line });
    }
    let sum = u32::from_str_radix(sum, 16).map_err(|_| Damage::Shape { line })?;
    if sum != crc32fast::hash(json.as_bytes()) {
        return Err(Damage::Checksum { line });
    }
    Ok(json)
}

fn content(line: usize, error: &serde_json::Error) -> Damage {
    Damage::Content { line, problem: error.to_string() }
}
