//! One name, one thing: a type that is called like those of two other files is told apart by its path alone, and a
//! reader of one line does not see that.

use std::collections::{BTreeMap, BTreeSet};

use crate::lexer;
use crate::rules::{Finding, Source};

/// Files that may define a type of one name: the two sides of a boundary often have the same thing.
const FILES_MAX: usize = 2;
const KEYWORDS: [&str; 5] = ["struct", "enum", "trait", "union", "type"];

/// Names of types that too many files of the product define: a finding for each of these files.
pub fn check(sources: &[Source]) -> Vec<Finding> {
    let mut by_name: BTreeMap<String, BTreeMap<&str, usize>> = BTreeMap::new();
    for source in sources.iter().filter(|source| source.path.starts_with("src/") && !source.only_for_tests) {
        for (line, name) in defined(&source.text) {
            by_name.entry(name).or_default().entry(&source.path).or_insert(line);
        }
    }
    let repeated = by_name.into_iter().filter(|(_, files)| files.len() > FILES_MAX);
    repeated.flat_map(|(name, files)| of_name(&name, &files)).collect()
}

fn of_name(name: &str, files: &BTreeMap<&str, usize>) -> Vec<Finding> {
    let all: BTreeSet<&str> = files.keys().copied().collect();
    let finding = |(path, line): (&&str, &usize)| {
        let others: Vec<&str> = all.iter().filter(|other| *other != path).copied().collect();
        let words = format!(
            "{name} is the name of a type here and in {}; at most {FILES_MAX} files may define one: say in the name what \
             this one is, as in ReviewVerdict or HoldPhase",
            others.join(", ")
        );
        Finding { path: (*path).to_owned(), line: *line, rule: "names", words }
    };
    files.iter().map(finding).collect()
}

/// The types that a file defines outside of its tests, with their lines. What traits call their parts is not the file's
/// to choose.
fn defined(text: &str) -> Vec<(usize, String)> {
    let code = lexer::halves(&lexer::code(text)).shipped;
    let mut found = Vec::new();
    for keyword in KEYWORDS {
        for (at, _) in code.match_indices(keyword) {
            let behind = &code[at + keyword.len()..];
            let is_word = at.checked_sub(1).is_none_or(|before| !is_part_of_word(code.as_bytes()[before]));
            let name: String =
                behind.trim_start().chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '_').collect();
            let is_type =
                behind.starts_with(char::is_whitespace) && name.starts_with(|c: char| c.is_uppercase());
            if is_word && is_type && !(keyword == "type" && is_associated(&code, at)) {
                found.push((code[..at].matches('\n').count() + 1, name));
            }
        }
    }
    found
}

/// As in a word, or in a raw identifier such as `r#type`.
fn is_part_of_word(byte: u8) -> bool {
    lexer::is_word(byte) || byte == b'#'
}

/// The innermost braces around this place are those of an `impl` or a `trait`.
fn is_associated(code: &str, at: usize) -> bool {
    let mut depth = 0;
    for (open, byte) in code.bytes().enumerate().take(at).collect::<Vec<_>>().into_iter().rev() {
        match byte {
            b'}' => depth += 1,
            b'{' if depth > 0 => depth -= 1,
            b'{' => {
                let from = code[..open].rfind([';', '{', '}']).map_or(0, |end| end + 1);
                let head: Vec<String> =
                    lexer::paths(&code[from..open]).into_iter().map(|named| named.path).collect();
                let is = |word: &str| head.iter().any(|one| one == word);
                return (is("impl") || is("trait")) && !is("fn");
            }
            _ => {}
        }
    }
    false
}

#[test]
fn a_name_that_three_files_give_to_types_is_found_in_each() {
    let source = |path: &str, text: &str| Source {
        path: path.to_owned(),
        text: text.to_owned(),
        only_for_tests: path.starts_with("tests/"),
    };
    let two = [source("src/a/x.rs", "pub struct Look;"), source("src/b/x.rs", "\nenum Look { One }")];
    let with = |third: Source| {
        let [a, b] = &two;
        let copy = |one: &Source| source(&one.path, &one.text);
        let found = check(&[copy(a), copy(b), third]);
        found.into_iter().map(|one| format!("{}:{}", one.path, one.line)).collect::<Vec<_>>()
    };
    for text in [
        "type Look<'a> = &'a str;",
        "trait Look {}",
        "fn f() {\n    struct Look(u8);\n}",
        "fn f() -> impl Sized {\n    type Look = u8;\n}",
    ] {
        let found = with(source("src/c/x.rs", text));
        assert_eq!(found.len(), 3, "{text}: {found:?}");
        assert_eq!(found[..2], ["src/a/x.rs:1", "src/b/x.rs:2"]);
    }
    for text in [
        "struct Other;",
        "impl Has for One {\n    type Look = u8;\n}",
        "pub trait Has<T> {\n    fn f() {}\n    type Look;\n}",
        "enum Kind { Look }",
        "// struct Look;",
        "#[cfg(test)]\nmod tests {\n    struct Look;\n}",
    ] {
        assert_eq!(with(source("src/c/x.rs", text)), [""; 0], "{text}");
    }
    assert_eq!(with(source("src/a/x.rs", "struct Look;")), [""; 0], "one file twice");
    assert_eq!(with(source("tests/it/x.rs", "struct Look;")), [""; 0]);
    let words = check(&[
        source("src/a/x.rs", "struct Look;"),
        source("src/b/x.rs", "struct Look;"),
        source("src/c/x.rs", "struct Look;"),
    ]);
    assert!(words[1].words.contains("here and in src/a/x.rs, src/c/x.rs;"), "{}", words[1].words);
}
