//! What a parser says of a value that does not fit, in the words of those who write YAML and JSON. Pure.

/// Types without a sign, with the largest number that fits.
const UNSIGNED: [(&str, &str); 5] = [
    ("u8", "255"),
    ("u16", "65535"),
    ("u32", "4294967295"),
    ("u64", "18446744073709551615"),
    ("usize", "18446744073709551615"),
];

/// ``invalid type: string "2", expected u32`` → `must be a whole number from 0 to 4294967295, not the string "2"`; unknown
/// and missing fields, words that are not known, and where it stands in the same way. What else is said stays as it is.
pub fn in_plain_words(problem: &str) -> String {
    let (said, at) = match problem.rsplit_once(" at line ") {
        Some((said, place)) => match place.split_once(" column ") {
            Some((line, column)) if [line, column].iter().all(|text| is_number(text)) => {
                (said, format!(" (line {line}, column {column})"))
            }
            _ => (problem, String::new()),
        },
        None => (problem, String::new()),
    };
    format!("{}{at}", sentence(said).unwrap_or_else(|| said.to_owned()))
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

fn sentence(said: &str) -> Option<String> {
    if let Some(rest) = said.strip_prefix("missing field `") {
        return Some(format!("the field {:?} is missing", rest.strip_suffix('`')?));
    }
    if let Some(rest) = said.strip_prefix("duplicate field `") {
        return Some(format!("the field {:?} is there twice", rest.strip_suffix('`')?));
    }
    if let Some(rest) = said.strip_prefix("unknown field `") {
        let (field, expected) = rest.split_once("`, ")?;
        let advice = alternatives(expected).map_or(String::new(), |words| format!("; use {words}"));
        return Some(format!("unknown field {field:?}{advice}"));
    }
    if let Some(rest) = said.strip_prefix("unknown variant `") {
        let (variant, expected) = rest.split_once("`, ")?;
        let advice = alternatives(expected).map_or(String::new(), |words| format!("; use {words}"));
        return Some(format!("{variant:?} is not known{advice}"));
    }
    let rest = said.strip_prefix("invalid type: ").or_else(|| said.strip_prefix("invalid value: "));
    if let Some(rest) = rest {
        let (found, expected) = rest.rsplit_once(", expected ")?;
        return Some(format!("must be {}, not {}", wanted(expected), given(found)));
    }
    syntax(said).map(str::to_owned)
}

/// Names between backquotes, as one would say them.
fn alternatives(expected: &str) -> Option<String> {
    let names: Vec<&str> = expected.split('`').skip(1).step_by(2).collect();
    let (last, others) = names.split_last()?;
    Some(match others {
        [] => (*last).to_owned(),
        others => format!("{} or {last}", others.join(", ")),
    })
}

fn wanted(expected: &str) -> String {
    if let Some((_, most)) = UNSIGNED.iter().find(|(name, _)| *name == expected) {
        return format!("a whole number from 0 to {most}");
    }
    match expected {
        "i8" | "i16" | "i32" | "i64" | "isize" => "a whole number".to_owned(),
        "f32" | "f64" => "a number".to_owned(),
        "string" | "a string" => "a string".to_owned(),
        "bool" | "a boolean" => "true or false".to_owned(),
        "a map" | "map" => "a mapping (lines of name: value)".to_owned(),
        "a sequence" | "sequence" => "a list (lines that begin with -)".to_owned(),
        name => match name.strip_prefix("struct ").unwrap_or(name) {
            name if is_type(name) => {
                format!("a mapping (lines of name: value) with the fields of {}", spoken(name))
            }
            other => other.to_owned(),
        },
    }
}

/// A Rust type's name: one word that begins with a capital.
fn is_type(name: &str) -> bool {
    name.starts_with(|first: char| first.is_ascii_uppercase())
        && name.chars().all(|c| c.is_ascii_alphanumeric())
}

/// `RawSharing` is our own name for what the field is called.
fn spoken(name: &str) -> String {
    match name.strip_prefix("Raw") {
        Some(own) if !own.is_empty() => format!("{}{}", own[..1].to_lowercase(), &own[1..]),
        _ => name.to_owned(),
    }
}

fn given(found: &str) -> String {
    let inside = |prefix: &str| found.strip_prefix(prefix)?.strip_suffix('`');
    match found {
        "map" => "a mapping".to_owned(),
        "sequence" => "a list".to_owned(),
        "null" | "unit value" | "unit" | "Option value" => "nothing".to_owned(),
        string if string.starts_with("string ") => format!("the {string}"),
        number => match inside("integer `").or_else(|| inside("floating point `")) {
            Some(number) => format!("the number {number}"),
            None => inside("boolean `").unwrap_or(number).to_owned(),
        },
    }
}

/// What serde_json says of text that is no JSON.
fn syntax(said: &str) -> Option<&'static str> {
    Some(match said {
        "EOF while parsing a value" | "EOF while parsing an object" | "EOF while parsing a list" => {
            "it ends before its last bracket; was it cut?"
        }
        "EOF while parsing a string" => "it ends within a string; was it cut?",
        "key must be a string" => "the name of a field must stand in double quotes",
        "trailing comma" => "a comma stands before a closing bracket; remove it",
        "trailing characters" => "something stands behind the end of the object",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_is_told_without_names_of_rust() {
        for (said, plain) in [
            (
                r#"invalid type: string "2", expected u32"#,
                r#"must be a whole number from 0 to 4294967295, not the string "2""#,
            ),
            (
                "invalid value: integer `-1`, expected u32",
                "must be a whole number from 0 to 4294967295, not the number -1",
            ),
            ("invalid type: integer `5`, expected a string", "must be a string, not the number 5"),
            (
                "invalid type: floating point `1.5`, expected i32",
                "must be a whole number, not the number 1.5",
            ),
            (
                "invalid type: boolean `true`, expected a string at line 3 column 5",
                "must be a string, not true (line 3, column 5)",
            ),
            (
                r#"invalid type: string "none", expected a sequence"#,
                r#"must be a list (lines that begin with -), not the string "none""#,
            ),
            ("invalid type: map, expected a boolean", "must be true or false, not a mapping"),
            (
                "invalid type: sequence, expected a map",
                "must be a mapping (lines of name: value), not a list",
            ),
            (
                "invalid type: null, expected PodSpec",
                "must be a mapping (lines of name: value) with the fields of PodSpec, not nothing",
            ),
            (
                "invalid type: sequence, expected struct RawSharing",
                "must be a mapping (lines of name: value) with the fields of sharing, not a list",
            ),
            (
                r#"invalid type: string "a, expected b", expected i64"#,
                r#"must be a whole number, not the string "a, expected b""#,
            ),
            ("missing field `spec` at line 3 column 5", r#"the field "spec" is missing (line 3, column 5)"#),
            (
                "unknown field `memroy`, expected one of `memory`, `fraction`, `compute`",
                r#"unknown field "memroy"; use memory, fraction or compute"#,
            ),
            ("unknown field `a`, expected `b` or `c`", r#"unknown field "a"; use b or c"#),
            ("unknown field `a`, there are no fields", r#"unknown field "a""#),
            ("unknown variant `x`, expected `y`", r#""x" is not known; use y"#),
            ("duplicate field `a`", r#"the field "a" is there twice"#),
            (
                "EOF while parsing an object at line 1 column 9",
                "it ends before its last bracket; was it cut? (line 1, column 9)",
            ),
            ("expected `,` or `}` at line 2 column 1", "expected `,` or `}` (line 2, column 1)"),
            ("the API server is at line x", "the API server is at line x"),
            ("0 is out of range; write 1 to 60", "0 is out of range; write 1 to 60"),
        ] {
            assert_eq!(in_plain_words(said), plain);
        }
    }
}
