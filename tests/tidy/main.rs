//! Keeps the architecture: imports between modules, crates that each may name, names of types, sizes, a few habits, and
//! links between pages. Reads text only. The plan is in `table`, the rules are in `rules`, `names`, `links` and
//! `controller`, and each has a test here that it fires. A rule that only gets in the way is to be dropped, with a line
//! that says why.

#![allow(clippy::expect_used)]

mod controller;
mod lexer;
mod links;
mod names;
mod rules;
mod selftest;
mod table;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use rules::{Finding, Source};

const TOP: &str = env!("CARGO_MANIFEST_DIR");
/// Where Rust files are looked at.
const RUST: &[&str] = &["src", "tests", "hack", "benches", "build.rs"];
/// Folders of tools and builds, not of the tree.
const SKIPPED: &[&str] = &["target", ".git", "node_modules"];

#[test]
fn the_architecture_is_kept() {
    let sources = sources();
    assert!(sources.len() > 30, "only {} Rust files found below {TOP}", sources.len());
    let mut findings: Vec<Finding> = sources.iter().flat_map(rules::check).collect();
    findings.extend(names::check(&sources));
    findings.extend(rules::unused(&sources.iter().flat_map(rules::edges).collect()));
    let all = files(Path::new(TOP));
    let mut pages = BTreeMap::new();
    for path in &all {
        // Not text: an image, an archive.
        let Ok(text) = fs::read_to_string(path) else { continue };
        findings.extend(rules::words(&below_top(path), &text));
        if path.extension().is_some_and(|extension| extension == "md") {
            pages.insert(below_top(path), text);
        }
    }
    let all = all.iter().map(|path| below_top(path)).collect();
    findings.extend(links::check(&pages, &all));
    let mut unneeded: BTreeSet<_> =
        table::EXCEPTIONS.iter().map(|one| (one.path, one.rule, one.reason)).collect();
    findings.retain(|finding| {
        let excepted =
            table::EXCEPTIONS.iter().find(|one| one.path == finding.path && one.rule == finding.rule);
        excepted.inspect(|one| _ = unneeded.remove(&(one.path, one.rule, one.reason))).is_none()
    });
    let list: Vec<String> = findings.iter().map(line).collect();
    assert!(findings.is_empty(), "{} findings:\n{}", list.len(), list.join("\n"));
    assert!(unneeded.is_empty(), "exceptions that are needed no longer, remove them: {unneeded:?}");
}

fn line(Finding { path, line, rule, words }: &Finding) -> String {
    format!("{path}:{line}: [{rule}] {words}")
}

fn sources() -> Vec<Source> {
    let mut read = Vec::new();
    let mut for_tests = BTreeSet::new();
    for top in RUST {
        for path in files(&Path::new(TOP).join(top)) {
            if path.extension().is_some_and(|extension| extension == "rs") {
                let text = fs::read_to_string(&path).expect("a Rust file is text");
                for_tests.extend(rules::test_files(&below_top(&path), &text));
                read.push((below_top(&path), text));
            }
        }
    }
    let source = |(path, text): (String, String)| {
        let only_for_tests =
            path.starts_with("tests/") || path.contains("/tests/") || for_tests.contains(&path);
        Source { path, text, only_for_tests }
    };
    read.into_iter().map(source).collect()
}

fn below_top(path: &Path) -> String {
    path.strip_prefix(TOP).expect("below the top").display().to_string()
}

/// All files at or below a path, without links and what git would ignore.
fn files(path: &Path) -> Vec<PathBuf> {
    if path.is_file() {
        return vec![path.to_owned()];
    }
    let entries = fs::read_dir(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let mut found = Vec::new();
    for entry in entries.map(|entry| entry.expect("an entry")) {
        let kind = entry.file_type().expect("a kind");
        let skipped = SKIPPED.iter().any(|name| entry.file_name() == *name);
        if kind.is_file() && !skipped {
            found.push(entry.path());
        } else if kind.is_dir() && !skipped {
            found.extend(files(&entry.path()));
        }
    }
    found.sort();
    found
}
