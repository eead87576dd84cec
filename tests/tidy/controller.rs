//! Inside the controller: a module uses only modules that stand before it, and no struct is a bundle of everything.

use std::fs;
use std::path::Path;

use super::{TOP, files};
use crate::lexer;

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
    "gpus",
    "holds",
    "config",
    "metrics",
    "write",
    "capacity",
    "multi_gpu",
    "node_filter",
    "demand",
    "host_ports",
    "neighbours",
    "pods",
    "recorder",
    "purse",
    "holders",
    "looks",
    "preempt",
    "moves",
    "reserve",
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
const CORE_FIELDS_MAX: usize = 11;

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
        for (line, used) in used(&path, &text) {
            if place(&used).is_some_and(|used| used > own_place) {
                wrong.push(format!("{path}:{line}: {own} uses {used}, which stands behind it"));
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
        for (name, fields) in structs(&shipped(&text)) {
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
        path if path.starts_with("view/") => 11,
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

/// The code without its tests; lines stay where they are.
fn shipped(text: &str) -> String {
    lexer::halves(&lexer::code(text)).shipped
}

/// Modules of the controller that a file names, with the lines: by `crate::controller::`, by `super::` and within groups.
fn used(path: &str, text: &str) -> Vec<(usize, String)> {
    let named = lexer::paths(&shipped(text)).into_iter();
    named.filter_map(|named| Some((named.line, of_controller(path, &named.path)?))).collect()
}

/// The module of the controller that a path in a file names, if it names one; of `crate::controller::view::Gpu` and of
/// `super::view::PublishedGpu` in `queue.rs` it is `view`.
fn of_controller(file: &str, path: &str) -> Option<String> {
    if let Some(below) = path.strip_prefix("crate::controller::") {
        return below.split("::").next().map(str::to_owned);
    }
    let ups = path.split("::").take_while(|part| *part == "super").count();
    let below: Vec<&str> = path.split("::").skip(ups).collect();
    let file = file.trim_end_matches(".rs").trim_end_matches("/mod");
    let depth = file.split('/').count();
    // One that leads out of the module alone leaves it.
    (ups > 0 && ups == depth).then(|| below.first().map(|part| (*part).to_owned()))?
}

/// Names of structs of code, and how many fields each has, named or not.
fn structs(code: &str) -> Vec<(&str, usize)> {
    let mut found = Vec::new();
    for (at, word) in code.match_indices("struct ") {
        if at.checked_sub(1).is_some_and(|before| lexer::is_word(code.as_bytes()[before])) {
            continue;
        }
        let rest = &code[at + word.len()..];
        let name = rest.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').next().unwrap_or(rest);
        found.push((name, fields(&rest[name.len()..])));
    }
    found
}

/// How many fields the struct has of which this is all behind the name.
fn fields(behind: &str) -> usize {
    let bytes = behind.as_bytes();
    let (mut depth, mut body, mut fields, mut in_field) = (0usize, None, 0, false);
    for (at, byte) in bytes.iter().enumerate() {
        let is_arrow = *byte == b'>' && at > 0 && matches!(bytes[at - 1], b'-' | b'=');
        let opens = matches!(byte, b'{' | b'(') && body.is_none() && depth == 0;
        match byte {
            b';' if body.is_none() && depth == 0 => return 0,
            _ if opens => (body, depth) = (Some(byte), 1),
            b'{' | b'(' | b'[' | b'<' => depth += 1,
            b'}' | b')' | b']' | b'>' if !is_arrow => {
                depth = depth.saturating_sub(1);
                if body.is_some() && depth == 0 {
                    return fields + usize::from(in_field);
                }
            }
            b',' if depth == 1 && body.is_some() => {
                fields += usize::from(in_field);
                in_field = false;
            }
            // Attributes begin with `#`, and a field follows.
            _ if depth == 1 && body.is_some() && lexer::is_word(*byte) => in_field = true,
            _ => {}
        }
    }
    fields
}

#[test]
fn what_these_tests_read_is_read_right() {
    let names =
        |path: &str, text: &str| used(path, text).into_iter().map(|(_, name)| name).collect::<Vec<_>>();
    let text = "use crate::controller::view::claim::POLICY; // crate::controller::run\n";
    assert_eq!(names("queue.rs", text), ["view"]);
    let text = "fn of(gpu: &crate::controller::view::Gpu, by: crate::controller::Moment) {}";
    assert_eq!(names("queue.rs", text), ["view", "Moment"]);
    let grouped = "use crate::{model, controller::{view::{Gpu, claim}, run, steps::*}};\n";
    assert_eq!(names("queue.rs", grouped), ["view", "view", "run", "steps"]);
    // Which file it is decides what `super::` is.
    assert_eq!(names("queue.rs", "use super::run::Loop;"), ["run"]);
    assert_eq!(names("queue.rs", "use super::{run, writer::Writer};"), ["run", "writer"]);
    assert_eq!(names("steps/send.rs", "use super::run::Loop;"), [""; 0]);
    assert_eq!(names("steps/send.rs", "use super::super::run::Loop;"), ["run"]);
    assert_eq!(names("steps/mod.rs", "use super::run::Loop;"), ["run"]);
    assert_eq!(names("steps/moving/ground.rs", "use super::super::super::{lease, view};"), ["lease", "view"]);
    assert_eq!(used("queue.rs", "\n\nuse super::run;"), [(3, "run".to_owned())]);
    let tests = "fn f() {}\n#[cfg(test)]\nmod tests {\n    use crate::controller::run::Loop;\n}\n";
    assert_eq!(names("queue.rs", tests), [""; 0]);
    assert_eq!((module("steps/send.rs"), module("core.rs")), ("steps", "core"));
    let text = "/// One.\npub struct One {\n    /// Text: of it.\n    pub a: u8,\n    #[serde(rename = \"c\")]\n    \
                b: BTreeMap<u8, u8>,\n}\nstruct Two;\npub(in crate::controller) struct Three<'a, T>(pub &'a T, \
                Vec<(u8, u8)>);\npub(crate) struct Four {\n    a: fn(u8, u8) -> u8, b: [u8; 4],\n    c: u8\n}\n\
                fn f() {\n    struct Five<F: Fn(u8) -> u8> { f: F }\n}\nlet constructed = One { a, b };\n";
    assert_eq!(structs(&shipped(text)), [("One", 2), ("Two", 0), ("Three", 2), ("Four", 3), ("Five", 1)]);
}
