//! E1 to E5: does the memory limit hold, whichever way memory is taken?

use anyhow::Result;
use serde_json::json;

use super::{mib, part};
use crate::limits::{Limits, usable, within};
use crate::protocol::{Allocator, Reply, Request, Stop};
use crate::stage::Stage;
use crate::table::{Finding, Verdict};
use crate::tenant::{PATIENCE, Tenant};

/// E1
pub fn ceiling(stage: &mut Stage) -> Result<Vec<Finding>> {
    stage.serve(stage.limits)?;
    let mut tenant = stage.tenant("e1", stage.limits)?;
    let opened = tenant.open()?;
    let (bytes, stop) = tenant.grow(Allocator::Linear, stage.beyond(stage.memory()))?;
    tenant.ask(Request::Touch)?;
    let counted = stage.counted(&[tenant.pid()])?;
    let lives = matches!(tenant.try_ask(Request::Info)?, Ok(Reply::Memory { .. }));
    let seen = format!(
        "{}; {}; {}; before it free {} of {}; NVML counts {}",
        mib(bytes),
        stop.words(),
        if lives { "lives on" } else { "the process is lost" },
        mib(opened.free),
        mib(opened.total),
        mib(counted),
    );
    let verdict = match within(bytes, stage.memory()) {
        false => Verdict::Leaks,
        true => Verdict::as_expected_if(stop.is_out_of_memory() && lives && usable(bytes, stage.memory())),
    };
    let figures = json!({
        "bytes": bytes, "free": opened.free, "total": opened.total, "nvml_bytes": counted, "lives": lives,
        "open_ms": opened.open_ms,
    });
    Ok(vec![Finding::new("", limit_words(stage.memory()), seen, verdict).with(figures)])
}

fn limit_words(mib: u64) -> String {
    format!("≤ {mib} MiB, out of memory, lives on")
}

/// E5
pub fn managed(stage: &mut Stage) -> Result<Vec<Finding>> {
    stage.serve(stage.limits)?;
    let mut tenant = stage.tenant("e5", stage.limits)?;
    tenant.open()?;
    let (_, before) = stage.nvml.memory(&stage.gpu.uuid)?;
    let (bytes, stop) = tenant.grow(Allocator::Managed, stage.beyond(stage.memory()))?;
    tenant.ask(Request::Touch)?;
    let counted = stage.counted(&[tenant.pid()])?;
    let (_, after) = stage.nvml.memory(&stage.gpu.uuid)?;
    let on_board = after.saturating_sub(before);
    let seen = format!(
        "{}; {}; written to by kernels: NVML counts {} for the process, and {} more on the board",
        mib(bytes),
        stop.words(),
        mib(counted),
        mib(on_board),
    );
    // What the limit does not stop, the watchdog must be able to see.
    let verdict = match (within(on_board, stage.memory()), counted >= on_board) {
        (true, _) => Verdict::Holds,
        (false, true) => Verdict::Differs,
        (false, false) => Verdict::Leaks,
    };
    let figures = json!({"bytes": bytes, "nvml_bytes": counted, "board_bytes": on_board});
    Ok(vec![Finding::new("", limit_words(stage.memory()), seen, verdict).with(figures)])
}

/// E2
pub fn four_processes(stage: &mut Stage) -> Result<Vec<Finding>> {
    let share = stage.memory();
    [("all of the share each", share), ("maxProcesses 4", share / 4)]
        .into_iter()
        .map(|(name, each)| part(name, four_with(stage, name, each)))
        .collect()
}

fn four_with(stage: &Stage, name: &str, each: u64) -> Result<Finding> {
    let share = stage.memory();
    let limits = Limits { memory: Some(each), ..stage.limits };
    stage.serve(limits)?;
    let mut tenants = open_all(stage, 4, limits)?;
    let most = stage.beyond(each);
    for tenant in &mut tenants {
        tenant.tell(&Request::Grow { way: Allocator::Linear, step: STEP, most, pause_ms: 0 })?;
    }
    let grown = tenants.iter_mut().map(Tenant::grown).collect::<Result<Vec<_>>>()?;
    let bytes: Vec<u64> = grown.iter().map(|(bytes, _)| *bytes).collect();
    let sum = bytes.iter().sum();
    let pids: Vec<u32> = tenants.iter().map(Tenant::pid).collect();
    let counted = stage.counted(&pids)?;
    let seen = format!("{} in all ({}); NVML counts {}", mib(sum), list(&bytes), mib(counted));
    let figures = json!({"bytes": bytes, "nvml_bytes": counted});
    let verdict = match within(sum, share) {
        false => Verdict::Leaks,
        true => Verdict::as_expected_if(bytes.iter().all(|one| *one > 0)),
    };
    Ok(Finding::new(name, format!("the sum ≤ {share} MiB"), seen, verdict).with(figures))
}

const STEP: u64 = crate::tenant::STEP;

fn open_all(stage: &Stage, count: usize, limits: Limits) -> Result<Vec<Tenant>> {
    let start = |number| {
        let mut tenant = stage.tenant(&format!("tenant{number}"), limits)?;
        tenant.open().map(|_| tenant)
    };
    (0..count).map(start).collect()
}

fn list(bytes: &[u64]) -> String {
    bytes.iter().map(|one| mib(*one)).collect::<Vec<_>>().join(", ")
}

/// E3
pub fn pools(stage: &mut Stage) -> Result<Vec<Finding>> {
    stage.serve(stage.limits)?;
    [("default pool", Allocator::Stream), ("a pool of its own", Allocator::Pool)]
        .into_iter()
        .map(|(name, way)| part(name, pool(stage, name, way)))
        .collect()
}

fn pool(stage: &Stage, name: &str, way: Allocator) -> Result<Finding> {
    let mut tenant = stage.tenant("e3", stage.limits)?;
    tenant.open()?;
    let (bytes, stop) = tenant.grow(way, stage.beyond(stage.memory()))?;
    tenant.ask(Request::Free)?;
    // What was trimmed away can be had again in another way.
    let (again, _) = tenant.grow(Allocator::Linear, stage.beyond(stage.memory()))?;
    let seen = format!("{}; {}; after free and trim {} again", mib(bytes), stop.words(), mib(again));
    let verdict = match within(bytes, stage.memory()) && within(again, stage.memory()) {
        false => Verdict::Leaks,
        true => Verdict::as_expected_if(
            stop.is_out_of_memory() && again + 2 * STEP >= bytes && usable(bytes, stage.memory()),
        ),
    };
    let expected = format!("{}; all of it free again", limit_words(stage.memory()));
    Ok(Finding::new(name, expected, seen, verdict).with(json!({"bytes": bytes, "again": again})))
}

/// E4
pub fn chunks(stage: &mut Stage) -> Result<Vec<Finding>> {
    stage.serve(stage.limits)?;
    let (share, most) = (stage.memory(), stage.beyond(stage.memory()));
    let mut first = stage.tenant("e4-first", stage.limits)?;
    first.open()?;
    let (bytes, stop) = first.grow(Allocator::Chunks, most)?;
    let verdict = match within(bytes, share) {
        false => Verdict::Leaks,
        true => Verdict::as_expected_if(stop.is_out_of_memory() && usable(bytes, share)),
    };
    let seen = format!("{}; {}", mib(bytes), stop.words());
    let mut findings = vec![
        Finding::new("created and mapped", limit_words(share), seen, verdict).with(json!({"bytes": bytes})),
    ];
    let name = "handed to a second process";
    findings.push(part(name, handed_over(stage, name, &mut first))?);
    Ok(findings)
}

/// The first hands all it has to a second, lets go, and takes again; the second takes beside what it got.
fn handed_over(stage: &Stage, part: &str, first: &mut Tenant) -> Result<Finding> {
    let (share, most) = (stage.memory(), stage.beyond(stage.memory()));
    let mut second = stage.tenant("e4-second", stage.limits)?;
    second.open()?;
    let socket = stage.folder().join("chunks.sock");
    // A run that was cut off may have left it.
    let _ = std::fs::remove_file(&socket);
    first.tell(&Request::Export { socket: socket.clone() })?;
    second.tell(&Request::Import { socket })?;
    if let Ok(Reply::Failed(failure)) = first.hear(PATIENCE)? {
        return Ok(Finding::not_run(part, failure.to_string()));
    }
    let (received, refusal) = match second.hear(PATIENCE)? {
        Ok(Reply::Imported { bytes, stop }) => (bytes, stop),
        Ok(other) => return second.unexpected(&other),
        Err(silence) => return Ok(Finding::not_run(part, silence.to_string())),
    };
    first.ask(Request::Free)?;
    let (again, _) = first.grow(Allocator::Chunks, most)?;
    let (own, _) = second.grow(Allocator::Chunks, most)?;
    let counted = stage.counted(&[first.pid(), second.pid()])?;
    let sum = again + received + own;
    let refused = match refusal {
        Stop::Enough => String::new(),
        Stop::Refused(failure) => format!(" ({failure})"),
    };
    let seen = format!(
        "second received {}{refused}, first took {} anew, second {} of its own: {} in all, NVML counts {}",
        mib(received),
        mib(again),
        mib(own),
        mib(sum),
        mib(counted)
    );
    let figures = json!({"received": received, "again": again, "own": own, "nvml_bytes": counted});
    let verdict = Verdict::holds_if(within(sum, 2 * share) && within(received + own, share));
    Ok(Finding::new(part, format!("second ≤ {share} MiB, both ≤ {} MiB", 2 * share), seen, verdict)
        .with(figures))
}
