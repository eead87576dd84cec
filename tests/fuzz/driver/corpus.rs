//! Inputs in the tree: tests/data/fuzz/TARGET/*, and pending.txt, the list of those that are put off.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::checks;
use super::meter::Fault;

const TOP: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/fuzz");
/// `TARGET/FILE REASON`, or `TARGET REASON`: no inputs are made for it, stored ones are tried.
const PENDING: &str = "pending.txt";

pub fn folder(target: &str) -> PathBuf {
    Path::new(TOP).join(target)
}

/// Stored inputs with their names, in order.
pub fn stored(target: &str) -> io::Result<Vec<(String, Vec<u8>)>> {
    inputs(&folder(target))
}

pub fn inputs(folder: &Path) -> io::Result<Vec<(String, Vec<u8>)>> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry?;
        found.push((entry.file_name().to_string_lossy().into_owned(), fs::read(entry.path())?));
    }
    found.sort();
    Ok(found)
}

/// Stores an input that shows a fault; the same input has the same name.
pub fn store(target: &str, word: &str, input: &[u8]) -> io::Result<PathBuf> {
    let path = folder(target).join(name(word, input));
    if checks::is_one(target) {
        return Ok(path);
    }
    fs::create_dir_all(folder(target))?;
    fs::write(&path, input)?;
    Ok(path)
}

pub fn store_fault(target: &str, fault: &Fault, input: &[u8]) -> io::Result<PathBuf> {
    store(target, fault.word(), input)
}

pub fn name(word: &str, input: &[u8]) -> String {
    format!("{word}-{:016x}", tranche::model::fnv1a(input.iter().copied()))
}

/// What is put off, and why: by target, or `target/file`.
pub fn pending() -> io::Result<BTreeMap<String, String>> {
    let text = match fs::read_to_string(Path::new(TOP).join(PENDING)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeMap::new()),
        text => text?,
    };
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    Ok(lines
        .map(|line| line.split_once(' ').unwrap_or((line, "")))
        .map(|(what, why)| (what.to_owned(), why.trim().to_owned()))
        .collect())
}
