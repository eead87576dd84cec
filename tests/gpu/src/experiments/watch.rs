//! E25, E26: what a watchdog can see through NVML, and how fast it can act.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use super::{mib, part};
use crate::limits::{MIB, tolerance};
use crate::nvml::List;
use crate::protocol::{Allocator, Reply, Request};
use crate::signals;
use crate::stage::Stage;
use crate::table::{Finding, Verdict};
use crate::tenant::{STEP, Start, Tenant};

const HELD: u64 = 256 << 20;
/// As the node looks.
const PERIOD: Duration = Duration::from_millis(250);
/// And once more so soon after a look that found something.
const CONFIRM: Duration = Duration::from_millis(50);
const DEADLINE: Duration = Duration::from_secs(120);
const REACTION_S: f64 = 0.5;

/// E25
pub fn lists(stage: &mut Stage) -> Result<Vec<Finding>> {
    let bare = "a bare process";
    let mut findings = vec![part(bare, a_bare_one(stage, bare))?];
    let client = "an MPS client";
    let found = a_client(stage).and_then(|tenant| listed(stage, client, tenant.pid()));
    findings.push(part(client, found)?);
    let found = a_client(stage).and_then(|tenant| servers(stage, tenant.pid()));
    findings.push(part("the MPS server", found)?);
    let inside = "an MPS client in a PID namespace";
    findings.push(part(inside, a_namespaced_one(stage, inside))?);
    findings.push(Finding::not_run("a graphics process", "none of ours draws"));
    Ok(findings)
}

fn a_client(stage: &Stage) -> Result<Tenant> {
    stage.serve(stage.limits)?;
    let mut client = stage.tenant("e25-client", stage.limits)?;
    holds(&mut client).map(|()| client)
}

fn a_bare_one(stage: &Stage, name: &str) -> Result<Finding> {
    stage.bare()?;
    let mut bare = stage.bare_tenant("e25-bare")?;
    holds(&mut bare)?;
    listed(stage, name, bare.pid())
}

/// Its number on the host is that of the child of `unshare`.
fn a_namespaced_one(stage: &Stage, name: &str) -> Result<Finding> {
    stage.serve(stage.limits)?;
    let mut tenant = stage.start(Start {
        name: "e25-namespace".to_owned(),
        env: stage.env(stage.limits),
        pid_namespace: true,
        ..Start::default()
    })?;
    holds(&mut tenant)?;
    let parent = tenant.pid();
    let children = fs::read_to_string(format!("/proc/{parent}/task/{parent}/children"))
        .context("the child of unshare")?;
    let pid = children.split_whitespace().next().context("unshare has no child")?.parse()?;
    listed(stage, name, pid)
}

fn holds(tenant: &mut Tenant) -> Result<()> {
    tenant.open()?;
    tenant.grow(Allocator::Linear, HELD).map(drop)
}

/// Where a process that holds [`HELD`] bytes is named.
fn listed(stage: &Stage, part: &str, pid: u32) -> Result<Finding> {
    let mut named = Vec::new();
    let mut enough = false;
    let mut figures = serde_json::Map::new();
    for list in List::ALL {
        let all = match stage.nvml.processes(&stage.gpu.uuid, list) {
            Ok(all) => all,
            Err(error) => {
                named.push(format!("{}: {error:#}", list.name()));
                continue;
            }
        };
        figures.insert(list.name().to_owned(), json!(all));
        if let Some(bytes) = all.get(&pid) {
            enough |= bytes.is_some_and(|bytes| bytes >= HELD);
            named.push(format!("{}: {}", list.name(), bytes.map_or("bytes unknown".to_owned(), mib)));
        } else if !all.is_empty() {
            named.push(format!("{}: not it, but {:?}", list.name(), all.keys().collect::<Vec<_>>()));
        }
    }
    let seen = if named.is_empty() { "in no list".to_owned() } else { named.join("; ") };
    let expected = format!("its host PID with ≥ {} in a list", mib(HELD));
    Ok(Finding::new(part, expected, seen, Verdict::as_expected_if(enough)).with(Value::Object(figures)))
}

/// Are a client's bytes counted a second time for the server?
fn servers(stage: &Stage, client: u32) -> Result<Finding> {
    let all = stage.nvml.merged(&stage.gpu.uuid)?;
    let servers = stage.daemon.servers()?;
    let bytes: u64 = servers.iter().filter_map(|server| all.get(server)).sum();
    let known = stage.daemon.clients()?.iter().any(|(_, pid)| *pid == client);
    let (_, used) = stage.nvml.memory(&stage.gpu.uuid)?;
    let sum: u64 = all.values().sum();
    let seen = format!(
        "servers {servers:?} with {}; all processes {}, the board {}; MPS {} the client by its host PID",
        mib(bytes),
        mib(sum),
        mib(used),
        if known { "knows" } else { "does not know" },
    );
    let verdict = Verdict::as_expected_if(known && bytes < HELD * 2);
    let figures = json!({"server_bytes": bytes, "sum": sum, "board": used});
    Ok(Finding::new("the MPS server", "its own memory, not its clients'", seen, verdict).with(figures))
}

/// E26
pub fn reaction(stage: &mut Stage) -> Result<Vec<Finding>> {
    let mut findings = Vec::new();
    for (name, pause_ms) in [("fast growth", 0), ("slow growth (16 MiB in 40 ms)", 40)] {
        findings.push(part(name, reaction_to(stage, name, pause_ms))?);
    }
    findings.push(part("cost of a look", cost_of_looking(stage))?);
    Ok(findings)
}

fn reaction_to(stage: &Stage, part: &str, pause_ms: u64) -> Result<Finding> {
    stage.serve(stage.limits)?;
    let share = stage.memory();
    let allowed = (share + tolerance(share)) * MIB;
    let mut tenants = [stage.tenant("e26-first", stage.limits)?, stage.tenant("e26-second", stage.limits)?];
    for tenant in &mut tenants {
        tenant.open()?;
    }
    for tenant in &mut tenants {
        tenant.tell(&Request::Grow {
            way: Allocator::Linear,
            step: STEP,
            most: stage.beyond(share),
            pause_ms,
        })?;
    }
    let pids = tenants.each_ref().map(Tenant::pid);
    let begin = Instant::now();
    let (mut most, mut looks_over) = (0, 0);
    // Twice in a row over the sum, as the node has it.
    let mut crossed = begin;
    while looks_over < 2 {
        signals::go_on()?;
        if begin.elapsed() > DEADLINE {
            bail!("the two processes did not pass {share} MiB; the most was {}", mib(most));
        }
        wait_for(if looks_over == 0 { PERIOD } else { CONFIRM });
        let sum = stage.counted(&pids)?;
        most = most.max(sum);
        looks_over = if sum > allowed { looks_over + 1 } else { 0 };
        if looks_over == 1 {
            crossed = Instant::now();
        }
    }
    let said = stage.daemon.terminate(pids[1])?;
    // What `terminate_client` alone frees: nothing, as long as the process lives.
    let after_terminate = stage.counted(&pids)?;
    tenants[1].kill()?;
    let below = loop {
        signals::go_on()?;
        let sum = stage.counted(&pids)?;
        most = most.max(sum);
        if sum <= allowed {
            break crossed.elapsed().as_secs_f64();
        }
        if crossed.elapsed() > DEADLINE {
            bail!(
                "terminate_client ({said}) and SIGKILL did not free the memory within {} s",
                DEADLINE.as_secs()
            );
        }
        wait_for(Duration::from_millis(10));
    };
    let (neighbour, goes_on) = goes_on(&mut tenants[0])?;
    let over = most.saturating_sub(share * MIB);
    let seen = format!(
        "below again {below:.2} s after the first look over it ({} right after terminate_client); at most {} over; \
         the other process {neighbour}",
        mib(after_terminate),
        mib(over)
    );
    let expected = format!("≤ {REACTION_S} s, the other process goes on");
    let figures = json!({
        "seconds": below,
        "overshoot_bytes": over,
        "period_ms": PERIOD.as_millis() as u64,
        "after_terminate_bytes": after_terminate,
    });
    let verdict = Verdict::as_expected_if(below <= REACTION_S && goes_on);
    Ok(Finding::new(part, expected, seen, verdict).with(figures))
}

/// The process that was not ended has its answer to [`Request::Grow`] to give first.
fn goes_on(tenant: &mut Tenant) -> Result<(String, bool)> {
    tenant.grown()?;
    Ok(match tenant.try_ask(Request::Work { ms: 200 })? {
        Ok(Reply::Worked { .. }) => ("goes on".to_owned(), true),
        Ok(Reply::Failed(failure)) => (format!("has {failure}"), false),
        Ok(other) => return tenant.unexpected(&other),
        Err(silence) => (silence.to_string(), false),
    })
}

fn cost_of_looking(stage: &Stage) -> Result<Finding> {
    stage.serve(stage.limits)?;
    let counts: &[usize] = if stage.quick { &[1, 10] } else { &[1, 10, 40] };
    let mut tenants: Vec<Tenant> = Vec::new();
    let mut costs = Vec::new();
    for count in counts {
        while tenants.len() < *count {
            let mut tenant = stage.tenant(&format!("e26-{}", tenants.len()), stage.limits)?;
            tenant.open()?;
            tenants.push(tenant);
        }
        let begin = Instant::now();
        for _ in 0..50 {
            stage.nvml.merged(&stage.gpu.uuid)?;
        }
        costs.push((*count, begin.elapsed().as_secs_f64() * 1e6 / 50.0));
    }
    tenants.iter_mut().for_each(Tenant::let_go);
    let words: Vec<String> =
        costs.iter().map(|(count, micros)| format!("{count} clients: {micros:.0} µs")).collect();
    let worst = costs.iter().map(|(_, micros)| *micros).fold(0.0, f64::max);
    let seen = format!(
        "{} for a look; at one each 250 ms at most {:.2} % of a core",
        words.join(", "),
        worst / 2500.0
    );
    let verdict = Verdict::as_expected_if(worst < 20_000.0);
    Ok(Finding::new("cost of a look", "< 20 ms", seen, verdict).with(json!({"micros": costs})))
}

fn wait_for(time: Duration) {
    std::thread::sleep(time);
}
