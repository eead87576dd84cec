//! The rules. Each looks at one file and says what is wrong, where, and what to do. What clippy can say is said by
//! `.clippy.toml` and `[lints]` of Cargo.toml instead: unwraps, long functions, tasks that nobody waits for.

use std::collections::BTreeSet;

use crate::lexer::{self, Halves, NamedPath, block_end};
use crate::table::{self, CLOCKS, FILE_LINES_MAX, MODULES, Module, OUTSIDE, Where};

/// A file below the top of the tree, e.g. `src/model/gpu.rs`.
pub struct Source {
    pub path: String,
    pub text: String,
    /// Declared under `#[cfg(test)]`, or below `tests/`.
    pub only_for_tests: bool,
}

#[derive(Debug, PartialEq, Eq)]
pub struct Finding {
    pub path: String,
    pub line: usize,
    pub rule: &'static str,
    pub words: String,
}

/// What the rules look at.
struct File<'a> {
    source: &'a Source,
    module: Option<&'static Module>,
    halves: Halves,
    shipped: Vec<NamedPath>,
}

/// Everything that is wrong with a Rust file.
pub fn check(source: &Source) -> Vec<Finding> {
    let code = lexer::code(&source.text);
    let halves = match source.only_for_tests {
        true => Halves { shipped: String::new(), tests: code },
        false => lexer::halves(&code),
    };
    let shipped = lexer::paths(&halves.shipped);
    let module = source.path.strip_prefix("src/").and_then(module_of);
    let file = File { source, module, halves, shipped };
    let mut found = Vec::new();
    for rule in [module_is_known, doc, imports, outside, clock, budget, sleep] {
        rule(&file, &mut found);
    }
    found
}

/// The other modules that a file of a module imports, each with the module's own name first.
pub fn edges(source: &Source) -> BTreeSet<(&'static str, &'static str)> {
    let module = source.path.strip_prefix("src/").and_then(module_of);
    let Some(module) = module.filter(|_| !source.only_for_tests) else { return BTreeSet::new() };
    let named = lexer::paths(&lexer::halves(&lexer::code(&source.text)).shipped);
    let others = named.iter().filter_map(|named| other(&named.path)).filter_map(table::find);
    others.filter(|other| other.name != module.name).map(|other| (module.name, other.name)).collect()
}

/// Imports that the table allows and nobody uses.
pub fn unused(used: &BTreeSet<(&'static str, &'static str)>) -> Vec<Finding> {
    let allowed = MODULES.iter().flat_map(|module| module.imports.iter().map(|other| (module.name, *other)));
    let stale = allowed.filter(|edge| !used.contains(edge));
    let finding = |(module, other)| Finding {
        path: "tests/tidy/table.rs".to_owned(),
        line: 1,
        rule: "edges",
        words: format!(
            "{module} may import {other} and does not: take {other} from its list here, and from \
             src/{module}/mod.rs"
        ),
    };
    stale.map(finding).collect()
}

/// The first part of a path behind `crate::`.
fn other(path: &str) -> Option<&str> {
    path.strip_prefix("crate::").and_then(|path| path.split("::").next())
}

fn module_of(below_src: &str) -> Option<&'static Module> {
    below_src.split_once('/').and_then(|(module, _)| table::find(module))
}

impl File<'_> {
    fn finding(&self, line: usize, rule: &'static str, words: impl Into<String>) -> Finding {
        Finding { path: self.source.path.clone(), line, rule, words: words.into() }
    }

    /// Layer 4 for main.rs, lib.rs and the like.
    fn layer(&self) -> u8 {
        self.module.map_or(4, |module| module.layer)
    }

    fn is_product(&self) -> bool {
        self.source.path.starts_with("src/")
    }
}

fn module_is_known(file: &File, found: &mut Vec<Finding>) {
    let below = file.source.path.strip_prefix("src/").and_then(|path| path.split_once('/'));
    if let (Some((name, _)), None) = (below, file.module) {
        let words = format!("module {name} has no place; add it to tests/tidy/table.rs and src/README.md");
        found.push(file.finding(1, "module", words));
    }
}

fn doc(file: &File, found: &mut Vec<Finding>) {
    let Some(module) = file.module else { return };
    if file.source.path != format!("src/{}/mod.rs", module.name) {
        return;
    }
    let doc: String = file.source.text.lines().take_while(|line| line.starts_with("//!")).collect();
    if doc.is_empty() {
        found.push(file.finding(
            1,
            "doc",
            "open the module with //! lines: what it is, what it may import and name",
        ));
    } else {
        match said(&doc, module) {
            None => found.push(file.finding(
                1,
                "doc",
                "say in the //! lines what the module may import (`May import: …. May name: ….`)",
            )),
            Some(said) => {
                let allowed: BTreeSet<&str> = module.imports.iter().copied().collect();
                let (more, less) = (listed(said.difference(&allowed)), listed(allowed.difference(&said)));
                if !more.is_empty() || !less.is_empty() {
                    let words = format!(
                        "the list behind `May import:` differs from tests/tidy/table.rs: here alone [{more}], there \
                         alone [{less}]"
                    );
                    found.push(file.finding(1, "doc", words));
                }
            }
        }
    }
}

fn listed<'a>(names: impl Iterator<Item = &'a &'a str>) -> String {
    names.copied().collect::<Vec<_>>().join(", ")
}

/// The modules that stand behind `May import`, up to the end of the sentence. `everything below but a, b`: all of lower
/// layers, and without these.
fn said(doc: &str, module: &Module) -> Option<BTreeSet<&'static str>> {
    let (_, list) = doc.split_once("May import").or_else(|| doc.split_once("may import"))?;
    let ends = [". ", ".//!", ";", "May "];
    let end = ends.iter().filter_map(|end| list.find(end)).min().unwrap_or(list.len());
    let words = |text: &str| {
        let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').filter_map(table::find);
        words.map(|found| found.name).collect::<BTreeSet<_>>()
    };
    Some(match list[..end].split_once("everything below") {
        None => words(&list[..end]),
        Some((_, but)) => {
            let but = words(but);
            let below = MODULES.iter().filter(|one| one.layer < module.layer).map(|one| one.name);
            below.filter(|name| !but.contains(name)).collect()
        }
    })
}

fn imports(file: &File, found: &mut Vec<Finding>) {
    let Some(module) = file.module else { return };
    // src/MODULE/mod.rs is one level deep, src/MODULE/x.rs two.
    let levels = file.source.path.matches('/').count() - usize::from(file.source.path.ends_with("/mod.rs"));
    for named in &file.shipped {
        let ups = named.path.split("::").take_while(|part| *part == "super").count();
        if ups >= levels {
            found.push(file.finding(
                named.line,
                "imports",
                format!("{}: write crate::… where a path leaves the module", named.path),
            ));
        }
        let Some(other) = other(&named.path) else { continue };
        if other != module.name && table::find(other).is_some() && !module.imports.contains(&other) {
            let allowed = module.imports.join(", ");
            let words = format!(
                "module {} may not import {other} (only: {allowed}); move the code to a module that may, or hand \
                 the value in",
                module.name
            );
            found.push(file.finding(named.line, "imports", words));
        }
    }
}

fn outside(file: &File, found: &mut Vec<Finding>) {
    if !file.is_product() {
        return;
    }
    let name = file.module.map_or("main", |module| module.name);
    for named in &file.shipped {
        for (path, place) in OUTSIDE {
            let below = named.path.strip_prefix(path);
            let is_it =
                below.is_some_and(|rest| rest.starts_with("::") || (rest.is_empty() && path.contains("::")));
            let (may, who) = match place {
                Where::Modules(modules) => (modules.contains(&name), modules.join(", ")),
                Where::FromLayer(layer) => (file.layer() >= *layer, format!("layers {layer} and up")),
            };
            if is_it && !may {
                let words = format!(
                    "{} is named in {name}, but {path} is for {who} only; let that module do it and pass on plain data",
                    named.path
                );
                found.push(file.finding(named.line, "outside", words));
            }
        }
    }
}

fn clock(file: &File, found: &mut Vec<Finding>) {
    if file.layer() > 1 {
        return;
    }
    for named in &file.shipped {
        if CLOCKS.iter().any(|clock| named.path.ends_with(clock)) {
            found.push(file.finding(
                named.line,
                "clock",
                format!("{}: a decision is given the time as an argument", named.path),
            ));
        }
    }
}

fn budget(file: &File, found: &mut Vec<Finding>) {
    let shipped = file.halves.shipped.lines();
    let tests = file.halves.tests.lines();
    // A line is for tests if the test half has code in it; blank ones count with the shipped half.
    let count = shipped.zip(tests).filter(|(_, test)| test.trim().is_empty()).count();
    if !file.source.only_for_tests && count > FILE_LINES_MAX {
        let words =
            format!("{count} lines without tests, at most {FILE_LINES_MAX}: split it by what it talks about");
        found.push(file.finding(1, "budget", words));
    }
}

const SLEEPS: [&str; 3] = ["thread::sleep", "time::sleep", "time::sleep_until"];

/// A pause is allowed in a helper that waits for a condition, and is named for it; and where the clock
/// is paused, because tokio's pauses then take no time.
fn sleep(file: &File, found: &mut Vec<Finding>) {
    let functions = all_functions(&file.halves.tests);
    let named = lexer::paths(&file.halves.tests);
    let paused = named.iter().any(|named| named.path == "start_paused");
    let is_sleep = |path: &str| SLEEPS.iter().any(|sleep| path.ends_with(sleep));
    let imported = named.iter().chain(&file.shipped).any(|named| is_sleep(&named.path));
    for NamedPath { line, path } in named {
        let innermost = functions.iter().rfind(|f| (f.first..=f.last).contains(&line));
        // Outside functions it is an import.
        let Some(function) = innermost else { continue };
        let takes_time = !paused || path.ends_with("thread::sleep");
        let pauses = is_sleep(&path) || (imported && path == "sleep");
        let waits = function.name.split('_').any(|word| ["wait", "until", "eventually"].contains(&word));
        if pauses && takes_time && !waits {
            let words = format!(
                "{path} in {}: a test that sleeps is slow or wrong; wait for a condition with a deadline, in a \
                 helper with `wait` or `until` in its name",
                function.name
            );
            found.push(file.finding(line, "sleep", words));
        }
    }
}

struct Function<'a> {
    name: &'a str,
    first: usize,
    last: usize,
}

/// Functions with bodies, in the order of their first lines.
fn all_functions(code: &str) -> Vec<Function<'_>> {
    let mut functions = Vec::new();
    for (at, _) in code.match_indices("fn ") {
        let before = at.checked_sub(1).map_or(b' ', |before| code.as_bytes()[before]);
        let name =
            code[at + 3..].split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or_default();
        // `fn(` of a type has no name.
        if lexer::is_word(before) || name.is_empty() {
            continue;
        }
        if let Some(open) = body(code.as_bytes(), at) {
            let line = |to: usize| code[..to].matches('\n').count() + 1;
            functions.push(Function { name, first: line(at), last: line(block_end(code.as_bytes(), open)) });
        }
    }
    functions
}

/// The opening brace of the function that starts here, if it has a body.
fn body(code: &[u8], start: usize) -> Option<usize> {
    let mut brackets = 0usize;
    for (at, byte) in code.iter().enumerate().skip(start) {
        match byte {
            b'(' | b'[' => brackets += 1,
            b')' | b']' => brackets = brackets.saturating_sub(1),
            b';' if brackets == 0 => return None,
            b'{' if brackets == 0 => return Some(at),
            _ => {}
        }
    }
    None
}

/// Words that must stand in no file of the tree, with what to do instead.
pub fn words(path: &str, text: &str) -> Vec<Finding> {
    // Written in two parts, so that this file may stand in the tree.
    let banned = concat!("/wo", "rk/");
    let starts_there = |line: &str| {
        let at_start =
            |at: usize| !line[..at].ends_with(|c: char| c.is_alphanumeric() || "._}$/-".contains(c));
        line.match_indices(banned).any(|(at, _)| at_start(at))
    };
    let mut found = Vec::new();
    for (at, line) in text.lines().enumerate() {
        if starts_there(line) {
            let words = "a path of one machine: write it relative to the top of the tree".to_owned();
            found.push(Finding { path: path.to_owned(), line: at + 1, rule: "words", words });
        }
    }
    found
}

/// Files that a file declares under `#[cfg(test)]`: `mod tests;` in src/a/b.rs is src/a/b/tests.rs.
pub fn test_files(path: &str, text: &str) -> Vec<String> {
    let folder = path.rsplit_once('/').map_or("", |(folder, _)| folder);
    let below = match path.strip_suffix("/mod.rs") {
        Some(module) => module.to_owned(),
        None => path.trim_end_matches(".rs").to_owned(),
    };
    let mut files = Vec::new();
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    for (at, _) in lines.iter().enumerate().filter(|(_, line)| **line == "#[cfg(test)]") {
        let mut named = None;
        for line in &lines[at + 1..] {
            if let Some(name) = line.strip_prefix("#[path = \"").and_then(|rest| rest.strip_suffix("\"]")) {
                named = Some(format!("{folder}/{name}"));
            } else if !line.starts_with("#[") {
                let module = line.rsplit(' ').next().and_then(|last| last.strip_suffix(';'));
                if let Some(module) = module.filter(|_| line.contains("mod ")) {
                    files.push(named.unwrap_or_else(|| format!("{below}/{module}.rs")));
                }
                break;
            }
        }
    }
    files
}
