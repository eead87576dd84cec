//! Files that a person names: read whole, parsed into objects, each with its place in words for what is wrong with it.

use std::io::{self, ErrorKind, Read};
use std::path::Path;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::UsageError;
use crate::model::plain::in_plain_words;

/// More than any claim or state has.
const INPUT_BYTES_MAX: u64 = 16 * 1024 * 1024;
/// What standard input is called.
pub const STANDARD_INPUT: &str = "standard input";
/// Characters of a line that are shown.
const LINE_CHARS_MAX: usize = 80;

/// An object of a file.
#[derive(Debug, Clone)]
pub struct Document {
    pub value: Value,
    /// `pods.yaml`; of one of several documents `pods.yaml, document 2`, of a List's item also which.
    pub place: String,
}

impl Document {
    /// As `kind` has it; empty if it has none.
    pub fn kind(&self) -> &str {
        self.text("/kind")
    }

    /// The text at a place; empty if there is none.
    pub fn text(&self, pointer: &str) -> &str {
        self.value.pointer(pointer).and_then(Value::as_str).unwrap_or_default()
    }

    /// `claim.yaml: ResourceClaim "train"`: as far as it says.
    pub fn named(&self) -> String {
        match (self.kind(), self.text("/metadata/name")) {
            ("", _) => self.place.clone(),
            (kind, "") => format!("{}: {kind}", self.place),
            (kind, name) => format!("{}: {kind} {name:?}", self.place),
        }
    }

    /// What is wrong with it, after its name.
    pub fn wrong(&self, what: impl std::fmt::Display) -> UsageError {
        UsageError(format!("{}: {what}", self.named()))
    }

    /// # Errors
    /// The object does not fit the type; says which field.
    pub fn typed<K: DeserializeOwned>(&self) -> Result<K, UsageError> {
        typed(&self.value).map_err(|words| self.wrong(words))
    }
}

/// # Errors
/// The value does not fit the type: the path of the field, and what is wrong with it.
pub fn typed<K: DeserializeOwned>(value: &Value) -> Result<K, String> {
    serde_path_to_error::deserialize(value).map_err(|error| {
        let problem = in_plain_words(&error.inner().to_string());
        match error.path().to_string().as_str() {
            "." => problem,
            path => format!("{path}: {problem}"),
        }
    })
}

/// Paths of the fields of a value that its type does not have, as far as this release knows it: misspelt, or of a newer
/// Kubernetes.
pub fn unknown_fields<K: Serialize>(value: &Value, typed: &K) -> Vec<String> {
    let mut unknown = Vec::new();
    if let Ok(known) = serde_json::to_value(typed) {
        lacking(value, &known, "", &mut unknown);
    }
    unknown
}

fn lacking(value: &Value, known: &Value, at: &str, unknown: &mut Vec<String>) {
    let is_nothing = |value: &Value| match value {
        Value::Null => true,
        Value::Array(all) => all.is_empty(),
        Value::Object(all) => all.is_empty(),
        _ => false,
    };
    match (value, known) {
        (Value::Object(fields), Value::Object(known)) => {
            for (name, value) in fields {
                let at = if at.is_empty() { name.clone() } else { format!("{at}.{name}") };
                match known.get(name) {
                    Some(known) => lacking(value, known, &at, unknown),
                    None if is_nothing(value) => {}
                    None => unknown.push(at),
                }
            }
        }
        (Value::Array(items), Value::Array(known)) => {
            for (nth, (item, known)) in items.iter().zip(known).enumerate() {
                lacking(item, known, &format!("{at}[{nth}]"), unknown);
            }
        }
        _ => {}
    }
}

/// A file's text, or that of standard input if it is `-`; and what it is called.
///
/// # Errors
/// It cannot be read, or is no text.
pub fn input(path: &Path) -> Result<(String, String), UsageError> {
    match path.as_os_str().to_str() {
        Some("-") => Ok((limited(io::stdin().lock(), STANDARD_INPUT)?, STANDARD_INPUT.to_owned())),
        _ => Ok((read(path)?, path.display().to_string())),
    }
}

/// A file's text.
///
/// # Errors
/// As [`input`].
pub fn read(path: &Path) -> Result<String, UsageError> {
    let name = path.display().to_string();
    let file = std::fs::File::open(path).map_err(|error| unreadable(&name, &error))?;
    limited(file, &name)
}

fn limited(from: impl Read, name: &str) -> Result<String, UsageError> {
    let mut bytes = Vec::new();
    let read = from.take(INPUT_BYTES_MAX + 1).read_to_end(&mut bytes);
    if read.map_err(|error| unreadable(name, &error))? as u64 > INPUT_BYTES_MAX {
        return Err(UsageError(format!(
            "{name} is larger than {INPUT_BYTES_MAX} bytes: it is neither a claim, a pod nor a state"
        )));
    }
    text(bytes).map_err(|what| UsageError(format!("{name} {what}")))
}

/// The text of a file without the mark that some editors put first.
fn text(bytes: Vec<u8>) -> Result<String, &'static str> {
    if bytes.starts_with(&[0xff, 0xfe]) || bytes.starts_with(&[0xfe, 0xff]) {
        return Err("is text in UTF-16, as PowerShell writes it with >; save it as UTF-8");
    }
    let text = String::from_utf8(bytes);
    let text = text.ok().filter(|text| !text.contains('\0'));
    let text = text.ok_or("is not a text file (UTF-8); give a YAML or JSON file")?;
    Ok(text.strip_prefix('\u{feff}').map(str::to_owned).unwrap_or(text))
}

/// Why a file cannot be read.
pub fn unreadable(name: &str, error: &io::Error) -> UsageError {
    UsageError(match error.kind() {
        ErrorKind::NotFound => format!("the path {name:?} does not exist"),
        ErrorKind::IsADirectory => format!("{name} is a folder; give a file"),
        ErrorKind::InvalidData => format!("{name} is not a text file (UTF-8)"),
        ErrorKind::PermissionDenied => format!("cannot read {name}: you are not permitted to"),
        _ => format!("cannot read {name}: {}", cause(error)),
    })
}

/// An error of the system without its number.
pub fn cause(error: &io::Error) -> String {
    let words = error.to_string();
    let words = words.rsplit_once(" (os error ").map_or(words.as_str(), |(words, _)| words);
    match words.split_at_checked(1) {
        Some((first, rest)) => format!("{}{rest}", first.to_lowercase()),
        None => words.to_owned(),
    }
}

/// YAML or JSON as it stands in a file.
///
/// # Errors
/// It is neither; says where.
pub fn parse(text: &str, from: &str) -> Result<Value, UsageError> {
    if text.trim_start().starts_with('{') {
        return json(text, from);
    }
    // Strict, or the word Off would be no word but false.
    let options = serde_saphyr::options! { strict_booleans: true };
    serde_saphyr::from_str_with_options(text, options).map_err(|error| no_yaml(text, from, &error))
}

fn json(text: &str, from: &str) -> Result<Value, UsageError> {
    serde_json::from_str(text).map_err(|error| {
        UsageError(format!("{from} is not valid JSON: {}", in_plain_words(&error.to_string())))
    })
}

fn no_yaml(text: &str, from: &str, error: &serde_saphyr::Error) -> UsageError {
    let words = error.without_snippet().render_with_formatter(&serde_saphyr::UserMessageFormatter);
    let line =
        error.location().and_then(|at| text.lines().nth(usize::try_from(at.line()).ok()?.checked_sub(1)?));
    let shown = line.filter(|line| !line.trim().is_empty()).map_or(String::new(), |line| {
        let indented = line.len() - line.trim_start().len();
        let tab = line[..indented].contains('\t');
        let advice = if tab { "; a tab stands before it: YAML is indented with spaces" } else { "" };
        let line: String = line.trim().chars().take(LINE_CHARS_MAX).collect();
        format!(", in the line {line:?}{advice}")
    });
    UsageError(format!("{from} is not valid YAML: {words}{shown}"))
}

/// The objects of a file: one of JSON, or YAML documents; those of a List one by one.
///
/// # Errors
/// It is neither, or one of its documents is no object of Kubernetes; says which, or where.
pub fn documents(text: &str, from: &str) -> Result<Vec<Document>, UsageError> {
    let values = if text.trim_start().starts_with('{') {
        vec![json(text, from)?]
    } else {
        let options = serde_saphyr::options! { strict_booleans: true };
        serde_saphyr::from_multiple_with_options(text, options)
            .map_err(|error| no_yaml(text, from, &error))?
    };
    let values: Vec<Value> = values.into_iter().filter(|value| !value.is_null()).collect();
    if values.is_empty() {
        return Err(UsageError(match (from, text.trim().is_empty()) {
            (STANDARD_INPUT, true) => "nothing came on standard input".to_owned(),
            (_, true) => format!("{from} is empty"),
            (_, false) => format!("there is no object in {from}"),
        }));
    }
    let several = values.len() > 1;
    let mut documents = Vec::new();
    for (at, value) in values.into_iter().enumerate() {
        let place = if several { format!("{from}, document {}", at + 1) } else { from.to_owned() };
        let document = Document { value, place };
        document.is_an_object()?;
        let is_list = document.kind().ends_with("List") && document.value["items"].is_array();
        if !is_list {
            documents.push(document);
            continue;
        }
        for (at, item) in document.value["items"].as_array().into_iter().flatten().enumerate() {
            let item =
                Document { value: item.clone(), place: format!("{}, item {}", document.place, at + 1) };
            item.is_an_object()?;
            documents.push(item);
        }
    }
    Ok(documents)
}

impl Document {
    fn is_an_object(&self) -> Result<(), UsageError> {
        let place = &self.place;
        let is = match &self.value {
            Value::Object(_) if !self.kind().is_empty() => return Ok(()),
            Value::Object(_) => {
                return Err(UsageError(format!(
                    "{place}: kind is missing; an object of Kubernetes begins with apiVersion and kind"
                )));
            }
            Value::Array(_) => "a list",
            Value::String(_) => "a text",
            Value::Number(_) => "a number",
            Value::Bool(_) | Value::Null => "a word",
        };
        Err(UsageError(format!(
            "{place} is {is}, not an object of Kubernetes, which begins with apiVersion and kind"
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn words<T: std::fmt::Debug>(result: Result<T, UsageError>) -> String {
        result.unwrap_err().to_string()
    }

    #[test]
    fn yaml_and_json_are_told_apart_and_words_stay_words() {
        assert_eq!(parse("mig: Off\nuse: true", "f").unwrap(), json!({"mig": "Off", "use": true}));
        assert_eq!(parse(" {\"a\": 1}", "f").unwrap(), json!({"a": 1}));
        assert!(words(parse("{\"a\": ", "gpus.yaml")).starts_with("gpus.yaml is not valid JSON: it ends"));
        assert!(words(parse("a: [1", "gpus.yaml")).starts_with("gpus.yaml is not valid YAML: "));
    }

    #[test]
    fn each_object_knows_its_place() {
        let text = "# first\n---\nkind: Pod\n---\n---\nkind: List\nitems: [{kind: Job, metadata: {name: a}}, {kind: Job}]\n";
        let named: Vec<String> = documents(text, "f").unwrap().iter().map(Document::named).collect();
        assert_eq!(
            named,
            ["f, document 1: Pod", "f, document 2, item 1: Job \"a\"", "f, document 2, item 2: Job"]
        );
        assert_eq!(documents("kind: Pod", "f").unwrap()[0].named(), "f: Pod");
    }

    #[test]
    fn fields_that_a_type_does_not_have_are_found_wherever_they_stand() {
        let text = "kind: Pod\nspecs: 1\nmetadata: {name: a, label: {x: y}, labels: {}}\nspec:\n  containers:\n  - {name: m}\n  - {nam: n}\n";
        let value = parse(text, "f").unwrap();
        let pod: k8s_openapi::api::core::v1::Pod = typed(&value).unwrap();
        assert_eq!(unknown_fields(&value, &pod), ["metadata.label", "spec.containers[1].nam", "specs"]);
    }

    #[test]
    fn text_comes_without_the_mark_of_an_editor_and_only_as_utf_8() {
        assert_eq!(text(b"\xef\xbb\xbfkind: Pod\r\n".to_vec()).unwrap(), "kind: Pod\r\n");
        assert!(text(b"\xff\xfek\0i\0".to_vec()).unwrap_err().contains("UTF-16"));
        assert!(text(vec![0x7f, b'E', 0, 0xc3]).unwrap_err().contains("not a text file"));
        assert!(text(b"a\0b".to_vec()).unwrap_err().contains("not a text file"));
    }
}
