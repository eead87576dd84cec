//! E9 to E11: what a client's own environment can change.

use anyhow::Result;
use serde_json::json;

use super::{mib, part};
use crate::limits::{COMPUTE, Limits, MEMORY, MIB, PIPE, within};
use crate::nvml::Mode;
use crate::protocol::{Allocator, DEVICE_UNAVAILABLE, Failure, MPS_CODES, Opened, Reply, Request, Stop};
use crate::stage::{Stage, no_foreign_daemon};
use crate::table::{Finding, Verdict};
use crate::tenant::Start;

type Env = Vec<(String, String)>;

/// How far a process came with an environment of its own making.
enum Attempt {
    Refused(Failure),
    /// Died, or no answer.
    Lost(String),
    Got {
        opened: Opened,
        bytes: u64,
        stop: Stop,
    },
}

impl Attempt {
    fn words(&self) -> String {
        match self {
            Self::Refused(failure) => format!("refused: {failure}"),
            Self::Lost(words) => words.clone(),
            Self::Got { opened, bytes, stop } => {
                format!("{} on {} multiprocessors; {}", mib(*bytes), opened.multiprocessors, stop.words())
            }
        }
    }

    fn got_in(&self) -> bool {
        matches!(self, Self::Got { .. })
    }
}

fn attempt(stage: &Stage, start: Start) -> Result<Attempt> {
    let mut tenant = stage.start(start)?;
    let opened = match tenant.try_ask(Request::Open)? {
        Ok(Reply::Opened(opened)) => opened,
        Ok(Reply::Failed(failure)) => return Ok(Attempt::Refused(failure)),
        Ok(other) => return tenant.unexpected(&other),
        Err(silence) => return Ok(Attempt::Lost(silence.to_string())),
    };
    let (bytes, stop) = tenant.grow(Allocator::Linear, stage.beyond(stage.memory()))?;
    Ok(Attempt::Got { opened, bytes, stop })
}

/// E9
pub fn around(stage: &mut Stage) -> Result<Vec<Finding>> {
    no_foreign_daemon()?;
    let empty = stage.folder().join("empty");
    std::fs::create_dir_all(&empty)?;
    let visible = stage.bare_env();
    let mut wrong = visible.clone();
    wrong.push((PIPE.to_owned(), empty.display().to_string()));
    let ways = [("no pipe variable", visible), ("empty pipe folder", wrong)];
    let mut findings = Vec::new();
    for (way, env) in &ways {
        let name = format!("{way}, DEFAULT");
        findings.push(part(&name, in_default_mode(stage, &name, env.clone()))?);
    }
    for (way, env) in &ways {
        for busy in [true, false] {
            let state = if busy { "MPS busy" } else { "MPS idle" };
            let name = format!("{way}, EXCLUSIVE_PROCESS, {state}");
            findings.push(part(&name, exclusive(stage, &name, env.clone(), busy))?);
        }
    }
    Ok(findings)
}

/// One that is no client of MPS, and nobody is to ask whether it is.
fn around_mps(env: Env) -> Start {
    Start { name: "e9".to_owned(), env, ..Start::default() }
}

/// As it would be without the mode that shares set: the reason why they set it.
fn in_default_mode(stage: &Stage, name: &str, env: Env) -> Result<Finding> {
    stage.serve_in(stage.limits, Mode::Default)?;
    let seen = attempt(stage, around_mps(env))?;
    let verdict = if seen.got_in() { Verdict::Observed } else { Verdict::Differs };
    let expected = "the whole GPU, without MPS: why shares need the other mode";
    Ok(Finding::new(name, expected, seen.words(), verdict))
}

/// `busy`: a server holds the GPU for another client. Idle, nobody does.
fn exclusive(stage: &Stage, name: &str, env: Env, busy: bool) -> Result<Finding> {
    stage.serve_in(stage.limits, Mode::ExclusiveProcess)?;
    let mut neighbour = None;
    if busy {
        let mut tenant = stage.tenant("e9-neighbour", stage.limits)?;
        tenant.open()?;
        neighbour = Some(tenant);
    }
    let seen = attempt(stage, around_mps(env))?;
    drop(neighbour);
    let code = match &seen {
        Attempt::Refused(failure) => Some(failure.code),
        _ => None,
    };
    // Another refusal would not be because of the mode.
    let by_mode = code == Some(DEVICE_UNAVAILABLE) || code.is_some_and(|code| MPS_CODES.contains(&code));
    let verdict = if seen.got_in() { Verdict::Leaks } else { Verdict::as_expected_if(by_mode) };
    let expected = format!("refused ({DEVICE_UNAVAILABLE}, device unavailable)");
    Ok(Finding::new(name, expected, seen.words(), verdict).with(json!({"code": code})))
}

/// E10
pub fn raised(stage: &mut Stage) -> Result<Vec<Finding>> {
    let big = stage.memory() + 4096;
    let uuid = stage.gpu.uuid.clone();
    let memory = |text: String| vec![(MEMORY, Some(text))];
    let changes = [
        ("memory raised by number", memory(format!("0={big}M"))),
        ("memory raised by UUID", memory(format!("{uuid}={big}M"))),
        ("memory raised by both", memory(format!("0={big}M,{uuid}={big}M"))),
        ("compute raised", vec![(COMPUTE, Some("100".to_owned()))]),
        ("both variables removed", vec![(MEMORY, None), (COMPUTE, None)]),
    ];
    changes.into_iter().map(|(name, changes)| part(name, changed(stage, name, &changes))).collect()
}

/// E11
pub fn invisible(stage: &mut Stage) -> Result<Vec<Finding>> {
    let (share, big) = (stage.memory(), stage.memory() + 4096);
    let nobody = "GPU-00000000-0000-0000-0000-000000000000";
    let texts = [
        ("visible and a foreign UUID", format!("0={share}M,{nobody}={big}M")),
        ("a foreign UUID only", format!("{nobody}={big}M")),
        ("visible and a foreign number", format!("0={share}M,7={big}M")),
        ("nonsense", "everything".to_owned()),
    ];
    texts.into_iter().map(|(name, text)| part(name, changed(stage, name, &[(MEMORY, Some(text))]))).collect()
}

/// A client whose variables differ from what it was given, under the share's daemon.
fn changed(stage: &Stage, part: &str, changes: &[(&str, Option<String>)]) -> Result<Finding> {
    stage.serve(stage.limits)?;
    let granted = multiprocessors(stage)?;
    let mut env = stage.env(stage.limits);
    for (name, value) in changes {
        env.retain(|(other, _)| other != name);
        env.extend(value.iter().map(|value| ((*name).to_owned(), value.clone())));
    }
    let seen = attempt(stage, stage.client("client", env))?;
    let verdict = match &seen {
        Attempt::Got { opened, bytes, .. } => {
            Verdict::holds_if(within(*bytes, stage.memory()) && opened.multiprocessors <= granted)
        }
        // Nothing was gained.
        Attempt::Refused(_) | Attempt::Lost(_) => Verdict::Holds,
    };
    let expected = format!("≤ {} MiB, ≤ {granted} multiprocessors, or refused", stage.memory());
    let figures = match &seen {
        Attempt::Got { opened, bytes, .. } => {
            json!({"mib": bytes / MIB, "multiprocessors": opened.multiprocessors, "granted": granted})
        }
        _ => json!({"granted": granted}),
    };
    Ok(Finding::new(part, expected, seen.words(), verdict).with(figures))
}

/// E39
pub fn elsewhere(stage: &mut Stage) -> Result<Vec<Finding>> {
    let share = stage.memory();
    let (number, uuid) = ("0".to_owned(), stage.gpu.uuid.clone());
    let ways = [
        ("the server's own limit, by number", Elsewhere::Server(number.clone())),
        ("the server's own limit, by UUID", Elsewhere::Server(uuid.clone())),
        ("the daemon's default, by UUID, too", Elsewhere::Default(uuid.clone())),
        ("the daemon's environment, by number", Elsewhere::Environment(format!("{number}={share}M"))),
        ("the daemon's environment, by UUID", Elsewhere::Environment(format!("{uuid}={share}M"))),
    ];
    ways.iter().map(|(name, way)| part(name, set_elsewhere(stage, name, way))).collect()
}

/// Where a memory limit is set besides the daemon's default by number. The text names the device.
enum Elsewhere {
    Server(String),
    Default(String),
    Environment(String),
}

/// A client with a broken limit variable, under a limit that is set in one more place.
fn set_elsewhere(stage: &Stage, name: &str, way: &Elsewhere) -> Result<Finding> {
    match way {
        Elsewhere::Environment(text) => {
            stage.serve_in_env(stage.limits, &[(MEMORY, text.clone())])?;
        }
        Elsewhere::Server(_) | Elsewhere::Default(_) => stage.serve(stage.limits)?,
    }
    if let Elsewhere::Default(device) = way {
        stage.daemon.ask(&format!("set_default_device_pinned_mem_limit {device} {}M", stage.memory()))?;
    }
    // Keeps the server.
    let mut neighbour = stage.tenant("e39-neighbour", stage.limits)?;
    neighbour.open()?;
    let mut said = String::new();
    if let Elsewhere::Server(device) = way {
        for server in stage.daemon.servers()? {
            let order = format!("set_device_pinned_mem_limit {server} {device} {}M", stage.memory());
            said = format!("the daemon said {:?}; ", stage.daemon.ask(&order)?);
        }
    }
    let mut env = stage.env(stage.limits);
    env.retain(|(other, _)| other != MEMORY);
    env.push((MEMORY.to_owned(), "everything".to_owned()));
    let seen = attempt(stage, stage.client("e39", env))?;
    let bytes = match &seen {
        Attempt::Got { bytes, .. } => *bytes,
        Attempt::Refused(_) | Attempt::Lost(_) => 0,
    };
    let verdict = Verdict::holds_if(within(bytes, stage.memory()));
    let expected = format!("≤ {} MiB, or refused", stage.memory());
    Ok(Finding::new(name, expected, format!("{said}{}", seen.words()), verdict).with(json!({"bytes": bytes})))
}

/// Of a client that does as it is told.
pub fn multiprocessors(stage: &Stage) -> Result<u32> {
    let mut tenant = stage.tenant("obedient", stage.limits)?;
    tenant.open().map(|opened| opened.multiprocessors)
}

/// What a client gets that sets no limits itself: bytes and multiprocessors.
pub fn without_variables(stage: &Stage) -> Result<(u64, u32)> {
    let mut tenant = stage.tenant("without-variables", Limits::default())?;
    let opened = tenant.open()?;
    let (bytes, _) = tenant.grow(Allocator::Linear, stage.beyond(stage.memory()))?;
    Ok((bytes, opened.multiprocessors))
}
