//! Answers for programs: the same structure as JSON or as YAML.

use serde::Serialize;

/// Indented, with a line end.
///
/// # Errors
/// The value has keys that are no text.
pub fn json(value: &(impl Serialize + ?Sized)) -> anyhow::Result<String> {
    Ok(format!("{}\n", serde_json::to_string_pretty(value)?))
}

/// One document, with a line end; fields in the order of the JSON.
///
/// # Errors
/// As [`json`].
pub fn yaml(value: &(impl Serialize + ?Sized)) -> anyhow::Result<String> {
    let text = serde_saphyr::to_string(&value)?;
    Ok(if text.ends_with('\n') { text } else { format!("{text}\n") })
}
