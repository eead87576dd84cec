//! E27: a daemon for each of two shares of one GPU. Each server is a context of its own, so that the GPU takes turns
//! between them: what that costs, and what it keeps from the neighbour.

use anyhow::{Context, Result, bail};
use nix::sys::signal::Signal;
use serde_json::json;

use super::faults::{opens, works};
use super::utilization::{Use, look_until_measured};
use super::{mib, part};
use crate::limits::{Limits, usable, within};
use crate::mps::Daemon;
use crate::nvml::{Mode, Query};
use crate::protocol::{Allocator, Reply, Request};
use crate::stage::Stage;
use crate::table::{Finding, Verdict};
use crate::tenant::Tenant;

/// A kernel that is surely still running when its process is ended.
const LONG_MS: u64 = 8000;
const TRIALS: u32 = 5;

/// The daemon of the second share; it ends with the experiment.
struct Second(Daemon);

impl Second {
    fn serve(stage: &Stage, limits: Limits) -> Result<Self> {
        let second = Self(stage.second_daemon()?);
        second.0.quit()?;
        second.0.start(&stage.gpu.uuid, limits)?;
        Ok(second)
    }

    /// A process of the second share, once it is a client for sure.
    fn tenant(&self, stage: &Stage, name: &str, limits: Limits) -> Result<Tenant> {
        let mut tenant = stage.tenant_of(&self.0, name, limits)?;
        tenant.open()?;
        if !self.0.has_client(tenant.pid())? {
            bail!("{name} is no client of the second daemon");
        }
        Ok(tenant)
    }
}

impl Drop for Second {
    fn drop(&mut self) {
        if let Err(error) = self.0.quit() {
            eprintln!(
                "gpu-check: the second MPS daemon could not be ended: {error:#}; run `gpu-check restore`"
            );
        }
    }
}

#[derive(Clone, Copy)]
enum End {
    /// SIGKILL while a kernel of so many milliseconds runs.
    Kill(u64),
    /// SIGTERM then, which the tenant does not handle.
    Term,
    /// It writes to an address that belongs to nobody.
    Stray,
}

/// E27
pub fn apart(stage: &mut Stage) -> Result<Vec<Finding>> {
    stage.require(Mode::Default)?;
    let mut findings = vec![part("limits", limits_of_both(stage))?];
    for (name, end, trials) in [
        ("SIGKILL in a kernel of 100 ms", End::Kill(100), TRIALS),
        ("SIGKILL in a kernel of 2 s", End::Kill(2000), TRIALS),
        ("SIGTERM in a kernel of 8 s", End::Term, 2),
        ("an illegal write", End::Stray, 2),
    ] {
        findings.push(part(name, ended(stage, name, end, trials))?);
    }
    for (name, percent) in [("throughput at 50 % each", 50), ("throughput without a limit", 100)] {
        findings.push(part(name, throughput(stage, name, percent))?);
    }
    findings.push(part("launches beside a busy neighbour", launches(stage))?);
    match utilization(stage) {
        Ok(rows) => findings.extend(rows),
        Err(error) => findings.push(part("utilisation", Err(error))?),
    }
    Ok(findings)
}

/// Both daemons have their own limits, and their tenants take all they get at once.
fn limits_of_both(stage: &Stage) -> Result<Finding> {
    let half = Limits { memory: Some(stage.memory() / 2), ..stage.limits };
    let (before, _) = stage.nvml.memory(&stage.gpu.uuid)?;
    stage.serve(stage.limits)?;
    let second = Second::serve(stage, half)?;
    // What the clients say of themselves is no limit here: the daemons' defaults are.
    let mut first = stage.tenant("e27-first", Limits::default())?;
    first.open()?;
    let mut other = second.tenant(stage, "e27-second", Limits::default())?;
    let servers = [stage.daemon.servers()?, second.0.servers()?].concat();
    let of_servers = stage.counted(&servers)?;
    let (one, _) = first.grow(Allocator::Linear, stage.beyond(stage.memory()))?;
    let (two, _) = other.grow(Allocator::Linear, stage.beyond(stage.memory()))?;
    let (full, _) = stage.nvml.memory(&stage.gpu.uuid)?;
    let holds = within(one, stage.memory()) && within(two, stage.memory() / 2);
    let seen = format!(
        "{} of {} MiB and {} of {} MiB; NVML counts {} for {} servers, {} more on the board than before",
        mib(one),
        stage.memory(),
        mib(two),
        stage.memory() / 2,
        mib(of_servers),
        servers.len(),
        mib(full.saturating_sub(before))
    );
    let verdict = match holds && usable(one, stage.memory()) && usable(two, stage.memory() / 2) {
        true => Verdict::Holds,
        false => Verdict::holds_if(holds),
    };
    let expected = "each daemon's tenants have that daemon's limit";
    let figures =
        json!({"first": one, "second": two, "servers": of_servers, "board": full - before.min(full)});
    Ok(Finding::new("limits", expected, seen, verdict).with(figures))
}

/// A tenant of the second daemon ends; the neighbour is the first daemon's.
fn ended(stage: &Stage, name: &str, end: End, trials: u32) -> Result<Finding> {
    let (mut spared, mut seen) = (0, String::new());
    for _ in 0..trials {
        stage.serve(stage.limits)?;
        let second = Second::serve(stage, stage.limits)?;
        let mut neighbour = stage.tenant("e27-neighbour", stage.limits)?;
        neighbour.open()?;
        let mut sibling = second.tenant(stage, "e27-sibling", stage.limits)?;
        let mut victim = second.tenant(stage, "e27-victim", stage.limits)?;
        match end {
            End::Kill(ms) => {
                victim.ask(Request::Spin { ms })?;
                victim.kill()?;
            }
            End::Term => {
                victim.ask(Request::Spin { ms: LONG_MS })?;
                victim.signal(Signal::SIGTERM)?;
            }
            End::Stray => drop(victim.try_ask(Request::Stray)?),
        }
        let (neighbours, goes_on) = works(&mut neighbour)?;
        let (siblings, _) = works(&mut sibling)?;
        let (news, starts) = opens(&mut stage.tenant("e27-new", stage.limits)?)?;
        spared += u32::from(goes_on && starts);
        if seen.is_empty() || !(goes_on && starts) {
            seen = format!(
                "neighbour {neighbours}; its daemon's new client {news}; the other client of the victim's daemon {siblings}"
            );
        }
    }
    let seen = format!("neighbour spared {spared} of {trials} times; {seen}");
    let expected = "the other daemon's tenant goes on, a new one starts";
    Ok(Finding::new(name, expected, seen, Verdict::holds_if(spared == trials))
        .with(json!({"spared": spared, "trials": trials})))
}

/// Two at once, as parts of one that has the GPU's daemon for itself without a limit.
fn throughput(stage: &Stage, name: &str, percent: u8) -> Result<Finding> {
    let ms = if stage.quick { 1000 } else { 3000 };
    let open = Limits { compute: None, ..stage.limits };
    let limits = Limits { compute: Some(percent), ..stage.limits };
    stage.serve(open)?;
    let mut alone = stage.tenant("e27-alone", open)?;
    alone.open()?;
    alone.work(ms)?;
    let whole = alone.work(ms)?;
    drop(alone);

    stage.serve(limits)?;
    let mut two = [stage.tenant("e27-a", limits)?, stage.tenant("e27-b", limits)?];
    for tenant in &mut two {
        tenant.open()?;
    }
    let together = both(&mut two, ms)?;
    drop(two);

    stage.serve(limits)?;
    let second = Second::serve(stage, limits)?;
    let mut first = stage.tenant("e27-a", limits)?;
    first.open()?;
    let mut two = [first, second.tenant(stage, "e27-b", limits)?];
    let apart = both(&mut two, ms)?;
    let part = |value: f64| 100.0 * value / whole;
    let seen = format!(
        "one daemon: {:.1} % and {:.1} % of the GPU's throughput; two daemons: {:.1} % and {:.1} %",
        part(together[0]),
        part(together[1]),
        part(apart[0]),
        part(apart[1])
    );
    let figures = json!({"whole": whole, "one_daemon": together, "two_daemons": apart, "percent": percent});
    Ok(Finding::new(name, "told, not judged", seen, Verdict::Observed).with(figures))
}

fn both(two: &mut [Tenant; 2], ms: u64) -> Result<[f64; 2]> {
    for tenant in two.iter_mut() {
        tenant.tell(&Request::Work { ms })?;
    }
    let [a, b] = two;
    Ok([a.worked()?, b.worked()?])
}

/// How long a launch takes that meets a neighbour's kernels.
fn launches(stage: &Stage) -> Result<Finding> {
    let half = Limits { compute: Some(50), ..stage.limits };
    stage.serve(half)?;
    let mut neighbour = stage.tenant("e27-busy", half)?;
    neighbour.open()?;
    let mut tenant = stage.tenant("e27-quick", half)?;
    tenant.open()?;
    let alone = latency(&mut tenant)?;
    neighbour.tell(&Request::Work { ms: LONG_MS })?;
    let together = latency(&mut tenant)?;
    neighbour.worked()?;
    drop((neighbour, tenant));

    stage.serve(half)?;
    let second = Second::serve(stage, half)?;
    let mut tenant = stage.tenant("e27-quick", half)?;
    tenant.open()?;
    let mut neighbour = second.tenant(stage, "e27-busy", half)?;
    neighbour.tell(&Request::Work { ms: LONG_MS })?;
    let apart = latency(&mut tenant)?;
    let seen = format!(
        "p50 and p99 of a launch: {:.1} and {:.1} µs alone, {:.1} and {:.1} µs beside a client of the same daemon, {:.1} and {:.1} µs beside one of another",
        alone.p50, alone.p99, together.p50, together.p99, apart.p50, apart.p99
    );
    let figures = json!({"alone": alone, "one_daemon": together, "two_daemons": apart});
    Ok(Finding::new("launches beside a busy neighbour", "told, not judged", seen, Verdict::Observed)
        .with(figures))
}

fn latency(tenant: &mut Tenant) -> Result<crate::protocol::Spread> {
    match tenant.ask(Request::Latency { rounds: 500 })? {
        Reply::Took { launch, .. } => Ok(launch),
        other => tenant.unexpected(&other),
    }
}

/// One share computes, the other has a context and does nothing.
fn utilization(stage: &Stage) -> Result<Vec<Finding>> {
    stage.serve(stage.limits)?;
    let second = Second::serve(stage, stage.limits)?;
    let mut idle = stage.tenant("e27-idle", stage.limits)?;
    idle.open()?;
    let mut busy = [second.tenant(stage, "e27-busy", stage.limits)?];
    let server = |daemon: &Daemon| daemon.servers()?.first().copied().context("a server");
    let (of_idle, of_busy) = (server(&stage.daemon)?, server(&second.0)?);
    let answers = look_until_measured(stage, &mut busy)?;
    let rows = Query::ALL.iter().zip(answers).map(|(query, answer)| {
        let part = format!("utilisation, {}", query.name());
        let all = match answer {
            Ok(all) => all,
            Err(why) => return Finding::not_run(&part, why),
        };
        let most = |pid: u32| all.get(&pid).map_or_else(|| "no sample".to_owned(), Use::words);
        let seen = format!(
            "the busy share's server: {}, its client: {}; the idle share's server: {}, its client: {}",
            most(of_busy),
            most(busy[0].pid()),
            most(of_idle),
            most(idle.pid())
        );
        Finding::new(&part, "told, not judged", seen, Verdict::Observed).with(json!({"by_pid": all}))
    });
    Ok(rows.collect())
}
