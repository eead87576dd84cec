//! E19, E20, E22, E23: what one tenant's end, or the daemon's, does to the others.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::sys::signal::Signal;
use serde_json::json;

use super::bypass::without_variables;
use super::{mib, part};
use crate::limits::within;
use crate::mps;
use crate::protocol::{Reply, Request};
use crate::stage::Stage;
use crate::table::{Finding, Verdict};
use crate::tenant::Tenant;

/// A kernel that is surely still running when its process is ended.
const LONG_MS: u64 = 8000;
/// For a neighbour's answer: it may have to wait for the long kernel.
const NEIGHBOUR: Duration = Duration::from_secs(25);
const RECOVERY: Duration = Duration::from_secs(30);

/// How a tenant ends while its neighbour has a context.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    /// SIGKILL while a kernel of so many milliseconds runs.
    Kill(u64),
    /// SIGTERM then, which the tenant does not handle.
    Term,
    /// An ordinary exit then.
    Exit,
    /// SIGKILL after everything launched is done.
    KillIdle,
    /// SIGKILL while one short kernel follows the other.
    KillBusy,
    /// `terminate_client`, then SIGKILL, while a kernel of 8 s runs.
    Terminate,
    /// The same while one short kernel follows the other.
    TerminateBusy,
}

/// How often the neighbour may be lucky.
const TRIALS: u32 = 5;

/// E19
pub fn killed(stage: &mut Stage) -> Result<Vec<Finding>> {
    [
        ("SIGKILL in a kernel of 10 ms", End::Kill(10), TRIALS),
        ("SIGKILL in a kernel of 100 ms", End::Kill(100), TRIALS),
        ("SIGKILL in a kernel of 500 ms", End::Kill(500), TRIALS),
        ("SIGKILL in a kernel of 1 s", End::Kill(1000), TRIALS),
        ("SIGKILL in a kernel of 2 s", End::Kill(2000), TRIALS),
        ("SIGKILL in a kernel of 8 s", End::Kill(LONG_MS), 1),
        ("SIGTERM", End::Term, 1),
        ("an ordinary exit", End::Exit, 1),
        ("SIGKILL with nothing running", End::KillIdle, TRIALS),
        ("SIGKILL among short kernels", End::KillBusy, TRIALS),
        ("terminate_client, then SIGKILL", End::Terminate, TRIALS),
        ("terminate_client, then SIGKILL, among short kernels", End::TerminateBusy, TRIALS),
    ]
    .into_iter()
    .map(|(name, end, trials)| part(name, killed_by(stage, name, end, trials)))
    .collect()
}

fn killed_by(stage: &Stage, name: &str, end: End, trials: u32) -> Result<Finding> {
    let (mut spared, mut seen, mut figures) = (0, String::new(), Vec::new());
    for _ in 0..trials {
        let (goes_on, words, figure) = one_end(stage, end)?;
        spared += u32::from(goes_on);
        figures.push(figure);
        // What is told is a case in which the neighbour was hurt, if there is one.
        if seen.is_empty() || !goes_on {
            seen = words;
        }
    }
    let seen = format!("neighbour spared {spared} of {trials} times; {seen}");
    let verdict = Verdict::holds_if(spared == trials);
    let expected = "the neighbour goes on, a new client starts";
    Ok(Finding::new(name, expected, seen, verdict).with(json!(figures)))
}

/// Whether neighbour and newcomer were spared; in words; in figures.
fn one_end(stage: &Stage, end: End) -> Result<(bool, String, serde_json::Value)> {
    stage.serve(stage.limits)?;
    let mut neighbour = stage.tenant("e19-neighbour", stage.limits)?;
    neighbour.open()?;
    let mut victim = stage.tenant("e19-victim", stage.limits)?;
    victim.open()?;
    match end {
        End::KillBusy | End::TerminateBusy => {
            victim.tell(&Request::Work { ms: LONG_MS })?;
            // In the midst of it, not at its beginning.
            let _ = victim.hear(Duration::from_millis(300))?;
        }
        End::KillIdle => drop(victim.work(200)?),
        End::Kill(ms) => drop(victim.ask(Request::Spin { ms })?),
        End::Term | End::Exit | End::Terminate => drop(victim.ask(Request::Spin { ms: LONG_MS })?),
    }
    let said = if matches!(end, End::Terminate | End::TerminateBusy) {
        let said = stage.daemon.terminate(victim.pid()).unwrap_or_else(|error| format!("{error:#}"));
        format!("terminate_client said {said:?}; ")
    } else {
        String::new()
    };
    match end {
        End::Term => victim.signal(Signal::SIGTERM)?,
        End::Exit => victim.let_go(),
        _ => victim.kill()?,
    }
    let begin = Instant::now();
    let (neighbours, goes_on) = works(&mut neighbour)?;
    let answered = begin.elapsed().as_secs_f64();
    let mut new = stage.tenant("e19-new", stage.limits)?;
    let (news, starts) = opens(&mut new)?;
    let states = states(stage);
    let words = format!("{said}neighbour {neighbours} after {answered:.1} s; new client {news}; {states}");
    let figures = json!({"neighbour_s": answered, "neighbour": goes_on, "new_client": starts});
    Ok((goes_on && starts, words, figures))
}

pub(super) fn works(tenant: &mut Tenant) -> Result<(String, bool)> {
    tenant.tell(&Request::Work { ms: 200 })?;
    Ok(match tenant.hear(NEIGHBOUR)? {
        Ok(Reply::Worked { .. }) => ("goes on".to_owned(), true),
        Ok(Reply::Failed(failure)) => (format!("has {failure}"), false),
        Ok(other) => return tenant.unexpected(&other),
        Err(silence) => (silence.to_string(), false),
    })
}

pub(super) fn opens(tenant: &mut Tenant) -> Result<(String, bool)> {
    tenant.tell(&Request::Open)?;
    Ok(match tenant.hear(NEIGHBOUR)? {
        Ok(Reply::Opened(opened)) => (format!("opens in {:.0} ms", opened.open_ms), true),
        Ok(Reply::Failed(failure)) => (format!("is refused: {failure}"), false),
        Ok(other) => return tenant.unexpected(&other),
        Err(silence) => (silence.to_string(), false),
    })
}

/// What the daemon says of its servers.
fn states(stage: &Stage) -> String {
    let servers = stage.daemon.servers().unwrap_or_default();
    let state = |server: &u32| {
        let state = stage.daemon.ask(&format!("get_server_status {server}"));
        state.unwrap_or_else(|error| format!("{error:#}"))
    };
    match servers.is_empty() {
        true => "no server".to_owned(),
        false => format!("servers {}", servers.iter().map(state).collect::<Vec<_>>().join(", ")),
    }
}

/// E20
pub fn stray(stage: &mut Stage) -> Result<Vec<Finding>> {
    stage.serve(stage.limits)?;
    let mut neighbour = stage.tenant("e20-neighbour", stage.limits)?;
    neighbour.open()?;
    let mut culprit = stage.tenant("e20-culprit", stage.limits)?;
    culprit.open()?;
    let fault = match culprit.try_ask(Request::Stray)? {
        Ok(Reply::Failed(failure)) => failure.to_string(),
        Ok(other) => format!("{other:?}"),
        Err(silence) => silence.to_string(),
    };
    let (neighbours, goes_on) = works(&mut neighbour)?;
    let states_then = states(stage);
    let blast = Finding::new(
        "neighbour",
        "it dies with the culprit: MPS's nature, and why it is said in the docs",
        format!("culprit: {fault}; neighbour {neighbours}; {states_then}"),
        Verdict::as_expected_if(!goes_on),
    )
    .with(json!({"neighbour": goes_on}));
    neighbour.let_go();
    drop((culprit, neighbour));
    Ok(vec![blast, part("recovery", serves_again(stage))?])
}

/// Our recovery: all clients end, then new ones are let in.
fn serves_again(stage: &Stage) -> Result<Finding> {
    let begin = Instant::now();
    let mut attempts = 0;
    let (words, works) = loop {
        attempts += 1;
        let mut tenant = stage.tenant("e20-after", stage.limits)?;
        let (words, opened) = opens(&mut tenant)?;
        if opened || begin.elapsed() > RECOVERY {
            break (words, opened);
        }
    };
    let seconds = begin.elapsed().as_secs_f64();
    let seen = format!(
        "a new client {words} {seconds:.1} s after the last one ended, {attempts} attempts; {}",
        states(stage)
    );
    let verdict = Verdict::as_expected_if(works && seconds < RECOVERY.as_secs_f64());
    let figures = json!({"seconds": seconds, "attempts": attempts});
    Ok(Finding::new("recovery", "serves again within 30 s", seen, verdict).with(figures))
}

/// E22
pub fn daemon_dies(stage: &mut Stage) -> Result<Vec<Finding>> {
    stage.serve(stage.limits)?;
    let (_, granted) = without_variables(stage)?;
    let mut tenant = stage.tenant("e22", stage.limits)?;
    tenant.open()?;
    let daemon = stage.daemon.pid().context("the daemon's process")?;
    let servers = stage.daemon.family();
    let begin = Instant::now();
    mps::end(daemon)?;
    let (lives, _) = works(&mut tenant)?;
    let left = servers.iter().filter(|server| mps::is_mps(**server)).count();
    let mut findings = Vec::new();
    if stage.supervisor.is_none() {
        let mut new = stage.tenant("e22-meanwhile", stage.limits)?;
        let (news, opened) = opens(&mut new)?;
        let seen =
            format!("a new client {news}; the live one {lives}; {left} of {} servers live", servers.len());
        let verdict = Verdict::holds_if(!opened);
        findings.push(Finding::new("while there is no daemon", "no new client gets the GPU", seen, verdict));
    }
    tenant.let_go();
    drop(tenant);
    match &stage.supervisor {
        Some(supervisor) => {
            let uuid = stage.gpu.uuid.as_str();
            let again = || supervisor.serving(uuid).ok().flatten().filter(|pid| *pid != u64::from(daemon));
            mps::wait_until(RECOVERY, again).context("the supervisor starts the daemon again")?;
        }
        None => {
            servers.into_iter().try_for_each(mps::end)?;
            stage.daemon.start(&stage.gpu.uuid, stage.limits)?;
        }
    }
    let seconds = begin.elapsed().as_secs_f64();
    let (bytes, multiprocessors) = without_variables(stage)?;
    let who = if stage.supervisor.is_some() { "`tranche mps`" } else { "this program" };
    let seen = format!(
        "{who} had it serve again after {seconds:.1} s; a client without variables gets {} and {multiprocessors} multiprocessors",
        mib(bytes)
    );
    let verdict = Verdict::holds_if(within(bytes, stage.memory()) && multiprocessors <= granted);
    let expected = format!("≤ {} MiB and {granted} multiprocessors for the first new client", stage.memory());
    findings.push(
        Finding::new("after it was started again", expected, seen, verdict).with(json!({"seconds": seconds})),
    );
    Ok(findings)
}

/// E23
pub fn supervisor_restarts(stage: &mut Stage) -> Result<Vec<Finding>> {
    if stage.supervisor.is_none() {
        return Ok(vec![Finding::not_run("", "needs the driver's supervisor: --tranche PATH")]);
    }
    stage.serve(stage.limits)?;
    let (_, granted) = without_variables(stage)?;
    let mut tenant = stage.tenant("e23", stage.limits)?;
    tenant.open()?;
    let before = stage.daemon.pid();
    stage.supervisor.as_mut().context("the supervisor")?.restart()?;
    let (lives, goes_on) = works(&mut tenant)?;
    let same = stage.daemon.pid() == before;
    let (bytes, multiprocessors) = without_variables(stage)?;
    let seen = format!(
        "the client {lives}; {}; a new client without variables gets {} and {multiprocessors} multiprocessors",
        if same { "the same daemon" } else { "another daemon" },
        mib(bytes)
    );
    let kept = within(bytes, stage.memory()) && multiprocessors <= granted;
    let expected = format!("goes on; ≤ {} MiB and {granted} multiprocessors", stage.memory());
    Ok(vec![Finding::new("", expected, seen, Verdict::holds_if(goes_on && same && kept))])
}
