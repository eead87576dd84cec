//! Inside the controller: a module uses only modules that stand before it, and no struct is a bundle of everything.

use std::fs;
use std::path::Path;

use super::{TOP, files};

/// In this order: what the API has told; owners of state, which do not know one another; all of them together; steps;
/// what runs the steps, and what has effects.
const ORDER: &[&str] = &[
    "gang",
    "requests",
    "classes",
    "wants",
    "bounds",
    "view",
    "queue",
    "grant",
    "ask",
    "holds",
    "config",
    "metrics",
    "write",
    "capacity",
    "multi_gpu",
    "node_filter",
    "demand",
    "gpus",
    "pods",
    "purse",
    "holders",
    "looks",
    "preempt",
    "moves",
    "reserve",
    "recorder",
    "tracker",
    "core",
    "steps",
    "round",
    "status",
    "explain",
    "pending",
    "backlog",
    "lease",
    "mirror",
    "templates",
    "writer",
    "run",
];
/// Fields of a struct.
const FIELDS_MAX: usize = 10;
/// Owners of state, and what goes between them.
const CORE_FIELDS_MAX: usize = 15;

#[test]
fn inside_the_controller_modules_use_only_what_stands_before_them() {
    let mut wrong = Vec::new();
    let mut known = 0;
    for (path, text) in controller() {
        let own = module(&path);
        let Some(own_place) = place(own) else {
            wrong.push(format!("{path}: module {own} has no place in the order"));
            continue;
        };
        known += 1;
        for (nth, line) in product(&text).lines().enumerate() {
            for used in used(line) {
                if place(used).is_some_and(|used| used > own_place) {
                    wrong.push(format!("{path}:{}: {own} uses {used}, which stands behind it", nth + 1));
                }
            }
        }
    }
    assert!(known >= ORDER.len(), "only {known} files");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn no_struct_of_the_controller_has_grown_beyond_its_purpose() {
    let mut wrong = Vec::new();
    for (path, text) in controller() {
        for (name, fields) in structs(product(&text)) {
            let most = if name == "Core" { CORE_FIELDS_MAX } else { most(&path) };
            if fields > most {
                wrong.push(format!("{path}: struct {name} has {fields} fields; {most} are the most"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// What the API has told is as wide as the API, and a set of metrics as what is measured.
fn most(path: &str) -> usize {
    match path {
        "metrics.rs" => 12,
        path if path.starts_with("view/") => 14,
        _ => FIELDS_MAX,
    }
}

/// Files of the controller, below its folder, but for its tests.
fn controller() -> Vec<(String, String)> {
    let top = Path::new(TOP).join("src/controller");
    let read = |path: &Path| {
        let below = path.strip_prefix(&top).expect("below the controller").display().to_string();
        (below, fs::read_to_string(path).expect("a Rust file is text"))
    };
    let all = files(&top);
    all.iter()
        .map(|path| read(path))
        .filter(|(path, _)| !path.starts_with("tests/") && path != "mod.rs")
        .collect()
}

/// `steps/send.rs` and `steps.rs` are of module `steps`.
fn module(path: &str) -> &str {
    path.split(['/', '.']).next().unwrap_or(path)
}

fn place(module: &str) -> Option<usize> {
    ORDER.iter().position(|one| *one == module)
}

/// Without the tests at its end.
fn product(text: &str) -> &str {
    text.split_once("\n#[cfg(test)]\nmod tests").map_or(text, |(product, _)| product)
}

/// Modules of the controller that a line names by their full path.
fn used(line: &str) -> impl Iterator<Item = &str> {
    let code = line.split_once("//").map_or(line, |(code, _)| code);
    let paths = code.split("crate::controller::").skip(1);
    paths.map(|rest| rest.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').next().unwrap_or(rest))
}

/// Names of structs with named fields, and how many fields each has.
fn structs(text: &str) -> Vec<(&str, usize)> {
    let mut found = Vec::new();
    let mut open: Option<(&str, usize)> = None;
    for line in text.lines() {
        match &mut open {
            None => {
                let declared = line.trim_start_matches("pub ").trim_start_matches("pub(super) ");
                let name = declared.strip_prefix("struct ").filter(|_| line.ends_with('{'));
                open = name.map(|rest| (rest.split([' ', '<']).next().unwrap_or(rest), 0));
            }
            Some(ended) if line == "}" => {
                found.push(*ended);
                open = None;
            }
            Some((_, fields)) => {
                let field =
                    line.strip_prefix("    ").filter(|field| !field.starts_with([' ', '/', '#', '}']));
                *fields += usize::from(field.is_some_and(|field| field.contains(": ")));
            }
        }
    }
    found
}

#[test]
fn what_these_tests_read_is_read_right() {
    assert_eq!(
        used("use crate::controller::view::claim::POLICY; // crate::controller::run").collect::<Vec<_>>(),
        ["view"]
    );
    assert_eq!(used("fn of(gpu: &crate::controller::view::Gpu, by: crate::controller::Moment)").count(), 2);
    assert_eq!((module("steps/send.rs"), module("core.rs")), ("steps", "core"));
    let text = "/// One.\npub struct One {\n    /// Text: of it.\n    pub a: u8,\n    b: BTreeMap<u8, u8>,\n}\nstruct Two;\n";
    assert_eq!(structs(text), [("One", 2)]);
    assert_eq!(product("a\n#[cfg(test)]\nmod tests {\n}\n"), "a");
}
