//! E35: what MPS needs of /dev/shm. Daemons and clients get one of their own in a mount namespace, which is
//! looked at through /proc/PID/root; nothing is mounted outside.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::statvfs::statvfs;
use serde::Serialize;
use serde_json::json;

use super::part;
use crate::mounts::Shm;
use crate::mps::wait_until;
use crate::protocol::{Reply, Request};
use crate::signals;
use crate::stage::Stage;
use crate::table::{Finding, Verdict};
use crate::tenant::{Start, Tenant};

const SHM: &str = "/dev/shm";
/// As `tranche` gives it to each GPU.
const USUAL: Shm = Shm::Empty { kib: 64 << 10 };
/// For an answer: a process that lost its memory may hang.
const PATIENCE: Duration = Duration::from_secs(30);
/// No further sizes are tried after it.
const ENOUGH: Duration = Duration::from_secs(240);
/// Names of files in a row; all of them are in the figures.
const NAMED: usize = 6;

/// E35
pub fn needed(stage: &mut Stage) -> Result<Vec<Finding>> {
    let whole = "the machine's";
    let own = "the daemon's own, which the clients see";
    let small = "the daemon's own, small";
    let (first, works) = on_the_machine(stage, whole)?;
    if !works {
        // Whatever is changed about /dev/shm, it tells nothing then.
        bail!("no client works with the machine's /dev/shm, either: {}", first.observed);
    }
    let mut findings = vec![first, part(own, of_the_daemon(stage, own))?];
    for (name, shm) in
        [("the client's own, empty", USUAL), ("the client's own, empty and read-only", Shm::ReadOnly)]
    {
        findings.push(part(name, of_the_client(stage, name, &shm))?);
    }
    findings.push(part(small, small_ones(stage, small))?);
    Ok(findings)
}

/// What is in a /dev/shm.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct Contents {
    /// Name → bytes that the file takes.
    files: BTreeMap<String, u64>,
    /// What the file system counts, with files that have no name any more; not where others use it, too.
    bytes: Option<u64>,
    inodes: Option<u64>,
}

impl Contents {
    /// All that is in a file system of its own.
    fn of(folder: &Path) -> Result<Self> {
        let system = statvfs(folder).with_context(|| format!("ask for the use of {}", folder.display()))?;
        // c_ulong, which is not u64 everywhere.
        #[allow(clippy::useless_conversion)]
        let (bytes, inodes) = (
            u64::from(system.blocks().saturating_sub(system.blocks_free()))
                * u64::from(system.fragment_size()),
            u64::from(system.files().saturating_sub(system.files_free())),
        );
        // The folder itself is one.
        Ok(Self { files: files(folder)?, bytes: Some(bytes), inodes: Some(inodes.saturating_sub(1)) })
    }

    /// What is new in one that others use, too.
    fn new_in(folder: &Path, before: &BTreeMap<String, u64>) -> Result<Self> {
        let mut files = files(folder)?;
        files.retain(|name, _| !before.contains_key(name));
        Ok(Self { files, bytes: None, inodes: None })
    }

    fn words(&self) -> String {
        let sum: u64 = self.files.values().sum();
        let mut names: Vec<_> =
            self.files.iter().take(NAMED).map(|(name, bytes)| format!("{name} {}", kib(*bytes))).collect();
        if self.files.len() > NAMED {
            names.push("...".to_owned());
        }
        let mut words = match names.is_empty() {
            true => "no file".to_owned(),
            false => format!("{} in {} files ({})", kib(sum), self.files.len(), names.join(", ")),
        };
        if let (Some(bytes), Some(inodes)) = (self.bytes, self.inodes) {
            words += &format!(", used {} and {inodes} inodes", kib(bytes));
        }
        words
    }
}

/// Bytes on the file system by name, folders included.
fn files(folder: &Path) -> Result<BTreeMap<String, u64>> {
    let entries = fs::read_dir(folder).with_context(|| format!("list {}", folder.display()))?;
    // A file that is gone meanwhile takes nothing.
    let size = |entry: &fs::DirEntry| entry.metadata().map(|data| data.blocks() * 512).unwrap_or(0);
    let entries = entries.collect::<std::io::Result<Vec<_>>>()?;
    Ok(entries.iter().map(|entry| (entry.file_name().to_string_lossy().into_owned(), size(entry))).collect())
}

fn kib(bytes: u64) -> String {
    format!("{} KiB", bytes.div_ceil(1024))
}

/// As that process sees it.
pub(super) fn seen_by(pid: u32) -> PathBuf {
    Path::new("/proc").join(pid.to_string()).join("root").join(SHM.trim_start_matches('/'))
}

/// What of /dev/shm a process has in its memory, deleted files included.
fn mapped(pid: u32) -> String {
    let maps = match fs::read_to_string(format!("/proc/{pid}/maps")) {
        Ok(maps) => maps,
        Err(error) => return format!("not to be seen ({error})"),
    };
    let names = mapped_names(&maps);
    if names.is_empty() { "nothing".to_owned() } else { names.into_iter().collect::<Vec<_>>().join(", ") }
}

fn mapped_names(maps: &str) -> std::collections::BTreeSet<String> {
    let name = |line: &str| line.split_once("/dev/shm/").map(|(_, name)| name.to_owned());
    maps.lines().filter_map(name).collect()
}

/// How far a process came.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Attempt {
    /// It computed, and MPS lists it as a client.
    pub(super) works: bool,
    pub(super) words: String,
}

impl Attempt {
    fn failed(words: impl Into<String>) -> Self {
        Self { works: false, words: words.into() }
    }
}

/// The tenant is there as long as it may still have something in /dev/shm.
pub(super) fn attempt(stage: &Stage, name: &str, shm: Option<&Shm>) -> Result<(Option<Tenant>, Attempt)> {
    let env = stage.env(stage.limits);
    // Here each process is asked about by itself: no witness.
    let mut tenant =
        stage.start(Start { name: name.to_owned(), env, shm: shm.cloned(), ..Start::default() })?;
    tenant.tell(&Request::Open)?;
    let opened = match tenant.hear(PATIENCE)? {
        Ok(Reply::Opened(opened)) => opened,
        Ok(Reply::Failed(failure)) => return Ok((None, Attempt::failed(format!("refused: {failure}")))),
        Ok(other) => return tenant.unexpected(&other),
        Err(silence) => return Ok((None, Attempt::failed(silence.to_string()))),
    };
    tenant.tell(&Request::Work { ms: 100 })?;
    match tenant.hear(PATIENCE)? {
        Ok(Reply::Worked { .. }) => {}
        Ok(Reply::Failed(failure)) => return Ok((None, Attempt::failed(format!("opened, then {failure}")))),
        Ok(other) => return tenant.unexpected(&other),
        Err(silence) => return Ok((None, Attempt::failed(format!("opened, then {silence}")))),
    }
    let many = format!("computes on {} multiprocessors", opened.multiprocessors);
    let attempt = match stage.daemon.has_client(tenant.pid()) {
        Ok(true) => Attempt { works: true, words: format!("{many} as a client of MPS") },
        Ok(false) => Attempt::failed(format!("{many}, but MPS does not list it: it went round")),
        Err(error) => Attempt::failed(format!("{many}; whether as a client of MPS is not known: {error:#}")),
    };
    Ok((Some(tenant), attempt))
}

/// One client, then four, then none.
struct Rounds {
    one: Attempt,
    /// None: not tried, because one did not work.
    four: Option<Vec<Attempt>>,
    /// With no, one and four clients, and when they have ended.
    contents: Vec<(&'static str, Contents)>,
    mapped: String,
}

impl Rounds {
    fn all_work(&self) -> bool {
        self.one.works && self.four.iter().flatten().filter(|attempt| attempt.works).count() == 3
    }

    fn words(&self) -> String {
        let contents: Vec<_> =
            self.contents.iter().map(|(when, contents)| format!("{when}: {}", contents.words())).collect();
        let four = match &self.four {
            None => "more were not tried".to_owned(),
            Some(rest) => {
                let works = rest.iter().filter(|attempt| attempt.works).count();
                let why = rest.iter().find(|attempt| !attempt.works);
                let why = why.map(|attempt| format!(" ({})", attempt.words)).unwrap_or_default();
                format!("{works} of 3 more work{why}")
            }
        };
        format!("the first client: {}; {four}; {}; {}", self.one.words, contents.join("; "), self.mapped)
    }

    fn figures(&self) -> serde_json::Value {
        let contents: BTreeMap<_, _> =
            self.contents.iter().map(|(when, contents)| (*when, contents)).collect();
        json!({"one": self.one, "four": self.four, "contents": contents})
    }
}

/// Clients of the daemon that serves now; `look` tells what is in the daemon's /dev/shm.
fn rounds(stage: &Stage, shm: Option<&Shm>, look: &dyn Fn() -> Result<Contents>) -> Result<Rounds> {
    let mut contents = vec![("without clients", look()?)];
    let (first, one) = attempt(stage, "e35-0", shm)?;
    contents.push(("with one", look()?));
    let servers: Vec<_> = stage.daemon.family().into_iter().map(mapped).collect();
    let mapped = format!(
        "mapped by the client: {}, by servers: {}",
        first.as_ref().map_or_else(|| "it is gone".to_owned(), |tenant| mapped(tenant.pid())),
        if servers.is_empty() { "there is none".to_owned() } else { servers.join(", ") }
    );
    let mut tenants: Vec<Tenant> = first.into_iter().collect();
    let mut four = None;
    if one.works {
        let mut rest = Vec::new();
        for number in 1..4 {
            let (tenant, attempt) = attempt(stage, &format!("e35-{number}"), shm)?;
            tenants.extend(tenant);
            rest.push(attempt);
        }
        contents.push(("with four", look()?));
        four = Some(rest);
    }
    // Together, or each end is waited for alone.
    tenants.iter_mut().for_each(Tenant::let_go);
    drop(tenants);
    // What a server still does for a client that has ended is soon done; what is there then is left over.
    let none = || stage.daemon.clients().ok().filter(Vec::is_empty);
    let when = match wait_until(Duration::from_secs(5), none) {
        Ok(_) => "when they have ended",
        Err(_) => "when they have ended (MPS still lists some)",
    };
    contents.push((when, look()?));
    Ok(Rounds { one, four, contents, mapped })
}

/// No namespace is needed for this one: it runs where the others cannot. Told with it: does a client work?
fn on_the_machine(stage: &Stage, part: &str) -> Result<(Finding, bool)> {
    stage.end_daemon()?;
    let before = files(Path::new(SHM))?;
    stage.serve(stage.limits)?;
    let look = || Contents::new_in(Path::new(SHM), &before);
    let seen = rounds(stage, None, &look)?;
    stage.end_daemon()?;
    let left = look()?;
    let words = format!("{}; when the daemon has ended: {}", seen.words(), left.words());
    let figures = json!({"rounds": seen.figures(), "left": left, "before": before.len()});
    Ok((told(part, words).with(figures), seen.one.works))
}

fn of_the_daemon(stage: &Stage, part: &str) -> Result<Finding> {
    let daemon = serve_with(stage, &USUAL)?;
    let seen = rounds(stage, Some(&Shm::Of { pid: daemon }), &|| Contents::of(&seen_by(daemon)))?;
    Ok(told(part, seen.words() + user_namespace(daemon)).with(seen.figures()))
}

/// Said where it is so: it may matter to MPS.
fn user_namespace(pid: u32) -> &'static str {
    let of = |who: &str| fs::read_link(Path::new("/proc").join(who).join("ns/user")).ok();
    match of("self") == of(&pid.to_string()) {
        true => "",
        false => "; the daemon is in a user namespace, because root may not mount here",
    }
}

fn of_the_client(stage: &Stage, part: &str, shm: &Shm) -> Result<Finding> {
    let daemon = serve_with(stage, &USUAL)?;
    let (tenant, attempt) = attempt(stage, "e35-own", Some(shm))?;
    let theirs = Contents::of(&seen_by(daemon))?;
    let own = tenant.as_ref().map(|tenant| Contents::of(&seen_by(tenant.pid()))).transpose()?;
    let words = format!(
        "the client: {}; in its own: {}; in the daemon's: {}{}",
        attempt.words,
        own.as_ref().map_or_else(|| "not seen, it is gone".to_owned(), Contents::words),
        theirs.words(),
        user_namespace(daemon)
    );
    Ok(told(part, words).with(json!({"client": attempt, "own": own, "daemon": theirs})))
}

fn small_ones(stage: &Stage, part: &str) -> Result<Finding> {
    let sizes: &[u64] = match stage.quick {
        true => &[4, 64, 1 << 10, 64 << 10],
        false => &[4, 16, 64, 256, 1 << 10, 4 << 10, 16 << 10, 64 << 10],
    };
    let begin = Instant::now();
    let (mut words, mut figures) = (Vec::new(), Vec::new());
    let (mut one, mut four, mut answered) = (None, None, false);
    for size in sizes {
        if begin.elapsed() > ENOUGH {
            words.push(format!("{size} KiB and more: not tried within {} s", ENOUGH.as_secs()));
            break;
        }
        let seen = with_size(stage, *size);
        // A daemon that does not start is an answer, too; a signal is none.
        signals::go_on()?;
        match seen {
            Ok(seen) => {
                answered = true;
                words.push(format!("{size} KiB: {}", seen.words()));
                figures.push(json!({"kib": size, "rounds": seen.figures()}));
                one = one.or(seen.one.works.then_some(*size));
                four = four.or(seen.all_work().then_some(*size));
            }
            Err(error) => {
                words.push(format!("{size} KiB: {error:#}"));
                figures.push(json!({"kib": size, "error": format!("{error:#}")}));
            }
        }
        if four.is_some() {
            break;
        }
    }
    if !answered {
        bail!(words.join("; "));
    }
    let enough = |size: Option<u64>| size.map_or("no size".to_owned(), |size| format!("{size} KiB"));
    let words =
        format!("enough for one client: {}, for four: {}; {}", enough(one), enough(four), words.join("; "));
    Ok(told(part, words).with(json!({"one_kib": one, "four_kib": four, "sizes": figures})))
}

fn with_size(stage: &Stage, kib: u64) -> Result<Rounds> {
    let daemon = serve_with(stage, &Shm::Empty { kib })?;
    rounds(stage, Some(&Shm::Of { pid: daemon }), &|| Contents::of(&seen_by(daemon)))
}

/// The daemon's PID.
pub(super) fn serve_with(stage: &Stage, shm: &Shm) -> Result<u32> {
    stage.serve_with(stage.limits, shm)?;
    stage.daemon.pid().context("the daemon's process")
}

pub(super) fn told(part: &str, words: String) -> Finding {
    Finding::new(part, "told, not judged", words, Verdict::Observed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_new_counts_where_others_have_files_too() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("theirs"), [1; 5000]).unwrap();
        let before = files(folder.path()).unwrap();
        fs::write(folder.path().join("cuda.shm"), [1; 4096]).unwrap();
        let new = Contents::new_in(folder.path(), &before).unwrap();
        assert_eq!(new.files.keys().collect::<Vec<_>>(), ["cuda.shm"]);
        assert!(new.words().contains("in 1 files (cuda.shm "), "{}", new.words());
        assert_eq!(
            Contents::new_in(folder.path(), &files(folder.path()).unwrap()).unwrap().words(),
            "no file"
        );
    }

    #[test]
    fn mapped_files_are_found_by_their_folder() {
        let maps = "7f00-7f01 rw-s 00000000 00:15 12  /dev/shm/cuda.shm.0.1.1 (deleted)\n\
                    7f01-7f02 rw-s 00000000 00:15 12  /dev/shm/cuda.shm.0.1.1 (deleted)\n\
                    7f02-7f03 r--p 00000000 00:15 13  /usr/lib/libcuda.so.1\n";
        assert_eq!(mapped_names(maps).into_iter().collect::<Vec<_>>(), ["cuda.shm.0.1.1 (deleted)"]);
    }
}
