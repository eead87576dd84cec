//! E28: what MPS and the limits take away from a program that has the GPU for itself.

use anyhow::Result;
use serde_json::json;

use super::python;
use crate::limits::{Limits, MIB};
use crate::protocol::{Reply, Request, Spread};
use crate::stage::Stage;
use crate::table::{Finding, Verdict};
use crate::tenant::Tenant;

/// Kept back for the driver and the MPS server: what is left is a share of all there is.
const RESERVE_MIB: u64 = 2048;
/// By how much the throughput may be lower.
const BUDGET: f64 = 0.02;

struct Seen {
    launch: Spread,
    alloc: Spread,
    per_second: f64,
    tflops: Result<f64, String>,
}

/// E28
pub fn layers(stage: &mut Stage) -> Result<Vec<Finding>> {
    stage.bare()?;
    let bare = look(stage, stage.bare_tenant("e28-bare")?, &stage.bare_env())?;
    let all = Limits { memory: Some((stage.gpu.total / MIB).saturating_sub(RESERVE_MIB)), compute: None };
    stage.serve(all)?;
    let shared = look(stage, stage.tenant("e28-share", all)?, &stage.env(all))?;

    let launch = Finding::new(
        "launch and wait",
        "told, not judged",
        format!(
            "p50 {} µs, p99 {} µs",
            pair(bare.launch.p50, shared.launch.p50),
            pair(bare.launch.p99, shared.launch.p99)
        ),
        Verdict::Observed,
    )
    .with(json!({"bare": bare.launch, "share": shared.launch}));
    let alloc = Finding::new(
        "allocate and free 4 KiB",
        "told, not judged",
        format!(
            "p50 {} µs, p99 {} µs",
            pair(bare.alloc.p50, shared.alloc.p50),
            pair(bare.alloc.p99, shared.alloc.p99)
        ),
        Verdict::Observed,
    )
    .with(json!({"bare": bare.alloc, "share": shared.alloc}));
    let mut findings =
        vec![launch, alloc, throughput("multiply-adds", bare.per_second / 1e12, shared.per_second / 1e12)];
    findings.push(match (bare.tflops, shared.tflops) {
        (Ok(bare), Ok(shared)) => throughput("matrix products in PyTorch", bare, shared),
        (Err(why), _) | (_, Err(why)) => Finding::not_run("matrix products in PyTorch", why),
    });
    Ok(findings)
}

fn pair(bare: f64, shared: f64) -> String {
    format!("{bare:.1} bare, {shared:.1} as a share")
}

fn throughput(part: &str, bare: f64, shared: f64) -> Finding {
    let lost = 1.0 - shared / bare;
    let seen = format!("{bare:.2} T/s bare, {shared:.2} as a share: {:+.2} %", -100.0 * lost);
    let verdict = Verdict::as_expected_if(lost <= BUDGET);
    Finding::new(part, "within 2 % of bare", seen, verdict).with(json!({"bare": bare, "share": shared}))
}

fn look(stage: &Stage, mut tenant: Tenant, env: &[(String, String)]) -> Result<Seen> {
    tenant.open()?;
    let (launch, alloc) = match tenant.ask(Request::Latency { rounds: 2000 })? {
        Reply::Took { launch, alloc } => (launch, alloc),
        other => return tenant.unexpected(&other),
    };
    let ms = if stage.quick { 1000 } else { 3000 };
    // The best of three: a clock that is still rising is no cost of ours.
    let mut per_second = 0.0_f64;
    for _ in 0..3 {
        per_second = per_second.max(tenant.work(ms)?);
    }
    drop(tenant);
    let tflops = python::torch().and_then(|()| python::products(env).map_err(|error| format!("{error:#}")));
    Ok(Seen { launch, alloc, per_second, tflops })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_percent_is_the_budget() {
        assert_eq!(throughput("x", 100.0, 98.5).verdict, Verdict::Holds);
        assert_eq!(throughput("x", 100.0, 103.0).verdict, Verdict::Holds);
        let over = throughput("x", 100.0, 97.0);
        assert_eq!(over.verdict, Verdict::Differs);
        assert!(over.observed.contains("-3.00 %"), "{}", over.observed);
    }
}
