//! E38: a /dev/shm that is full. It is the daemon's own, in a mount namespace, and is filled through
//! /proc/PID/root; nothing outside is filled.

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::Path;

use anyhow::{Context, Result, bail};
use serde_json::json;

use super::part;
use super::shared_memory::{Attempt, attempt, seen_by, serve_with, told};
use crate::mounts::Shm;
use crate::protocol::{Reply, Request};
use crate::stage::Stage;
use crate::table::Finding;
use crate::tenant::Tenant;

/// Room enough for a client, and soon filled.
const SMALL: Shm = Shm::Few { kib: 16 << 10, files: 256 };
/// Starts the names of what fills it.
const FILL: &str = "fill-";
/// More of it would not be a small one.
const MOST: usize = 1 << 16;
/// The driver looks there for the name of a library to load; `tranche` makes it a folder.
const RESERVED: &str = "cuda_injection_path_shm";

/// Fills a folder; how many files that took.
type Fill = fn(&Path) -> Result<usize>;

/// E38
pub fn told_of(stage: &mut Stage) -> Result<Vec<Finding>> {
    let mut findings = Vec::new();
    for (name, fill) in [("full of bytes", bytes as Fill), ("full of files", empty_files)] {
        findings.push(part(name, while_full(stage, name, fill))?);
    }
    let name = "a folder in place of the library's name";
    findings.push(part(name, with_folder(stage, name))?);
    Ok(findings)
}

/// A client at work, one that comes while it is full, and one that comes when there is room again.
fn while_full(stage: &Stage, part: &str, fill: Fill) -> Result<Finding> {
    let daemon = serve_with(stage, &SMALL)?;
    let (shm, of) = (seen_by(daemon), Shm::Of { pid: daemon });
    let (first, before) = attempt(stage, "e38-before", Some(&of))?;
    let filled = fill(&shm)?;
    let goes_on = match first {
        Some(mut tenant) => work(&mut tenant)?,
        None => "it did not begin".to_owned(),
    };
    let (second, during) = attempt(stage, "e38-during", Some(&of))?;
    drop(second);
    make_room(&shm)?;
    let (third, after) = attempt(stage, "e38-after", Some(&of))?;
    drop(third);
    let words = format!(
        "the client at work: {}; then, with {filled} files: {goes_on}; a new one: {}; with room again: {}",
        before.words, during.words, after.words
    );
    Ok(told(part, words).with(figures(&before, &during, &after, &goes_on)))
}

fn figures(before: &Attempt, during: &Attempt, after: &Attempt, goes_on: &str) -> serde_json::Value {
    json!({"before": before, "goes_on": goes_on, "during": during, "after": after})
}

fn work(tenant: &mut Tenant) -> Result<String> {
    Ok(match tenant.try_ask(Request::Work { ms: 100 })? {
        Ok(Reply::Worked { .. }) => "goes on".to_owned(),
        Ok(Reply::Failed(failure)) => format!("fails: {failure}"),
        Ok(other) => return tenant.unexpected(&other),
        Err(silence) => silence.to_string(),
    })
}

fn with_folder(stage: &Stage, part: &str) -> Result<Finding> {
    let daemon = serve_with(stage, &SMALL)?;
    let folder = seen_by(daemon).join(RESERVED);
    fs::create_dir(&folder).with_context(|| format!("make {}", folder.display()))?;
    let (tenant, attempt) = attempt(stage, "e38-folder", Some(&Shm::Of { pid: daemon }))?;
    drop(tenant);
    Ok(told(part, format!("a client: {}", attempt.words)).with(json!({"client": attempt})))
}

/// One file, as large as it can be.
fn bytes(shm: &Path) -> Result<usize> {
    let path = shm.join(format!("{FILL}0"));
    let mut file = File::create(&path).with_context(|| format!("make {}", path.display()))?;
    let block = vec![0; 1 << 16];
    for _ in 0..MOST {
        match file.write_all(&block) {
            Ok(()) => {}
            Err(error) if is_full(&error) => return Ok(1),
            Err(error) => return Err(error).with_context(|| format!("write {}", path.display())),
        }
    }
    bail!("{} takes more than it should have room for", shm.display())
}

fn empty_files(shm: &Path) -> Result<usize> {
    for number in 0..MOST {
        let path = shm.join(format!("{FILL}{number}"));
        match File::create(&path) {
            Ok(_) => {}
            Err(error) if is_full(&error) => return Ok(number),
            Err(error) => return Err(error).with_context(|| format!("make {}", path.display())),
        }
    }
    bail!("{} takes more files than it should", shm.display())
}

fn is_full(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded)
}

fn make_room(shm: &Path) -> Result<()> {
    for entry in fs::read_dir(shm).with_context(|| format!("list {}", shm.display()))? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(FILL) {
            fs::remove_file(entry.path()).with_context(|| format!("remove {}", entry.path().display()))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_filled_it_goes() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["fill-0", "fill-17", "cuda.shm.0.1.1"] {
            fs::write(folder.path().join(name), "x").unwrap();
        }
        make_room(folder.path()).unwrap();
        let left: Vec<_> =
            fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, ["cuda.shm.0.1.1"]);
    }
}
