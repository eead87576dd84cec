//! E37: what the daemon's limits are worth in DEFAULT mode.

use anyhow::Result;
use serde_json::json;

use super::{mib, part};
use crate::limits::{Limits, MIB, usable, within};
use crate::nvml::Mode;
use crate::protocol::{Allocator, Request};
use crate::stage::{Stage, no_foreign_daemon};
use crate::table::{Finding, Verdict};
use crate::tenant::{Start, Tenant};

/// A process with the GPU for itself.
struct Whole {
    multiprocessors: u32,
    per_second: f64,
}

/// What a process got.
struct Got {
    multiprocessors: u32,
    per_second: f64,
    bytes: u64,
    refusal: String,
    /// Bytes that NVML counts for it.
    counted: u64,
    listed: bool,
}

/// E37
pub fn bound(stage: &mut Stage) -> Result<Vec<Finding>> {
    stage.require(Mode::Default)?;
    let whole = whole(stage)?;
    let (client, round) = ("a client that sets no limits", "without CUDA_MPS_PIPE_DIRECTORY");
    let found = client_without_limits(stage, client, &whole);
    let findings = vec![part(client, found)?, part(round, around(stage, round, &whole))?];
    Ok(findings)
}

fn whole(stage: &Stage) -> Result<Whole> {
    stage.bare()?;
    let mut tenant = stage.bare_tenant("e37-whole")?;
    let multiprocessors = tenant.open()?.multiprocessors;
    Ok(Whole { multiprocessors, per_second: tenant.work(work_ms(stage))? })
}

fn work_ms(stage: &Stage) -> u64 {
    if stage.quick { 1000 } else { 3000 }
}

/// Computes, then takes all the memory that it gets.
fn takes_all(stage: &Stage, tenant: &mut Tenant) -> Result<Got> {
    let multiprocessors = tenant.open()?.multiprocessors;
    // Before the memory: a process that has reached its limit has no room for results.
    let per_second = tenant.work(work_ms(stage))?;
    let (bytes, stop) = tenant.grow(Allocator::Linear, stage.beyond(stage.memory()))?;
    tenant.ask(Request::Touch)?;
    Ok(Got {
        multiprocessors,
        per_second,
        bytes,
        refusal: stop.words(),
        counted: stage.counted(&[tenant.pid()])?,
        listed: stage.daemon.has_client(tenant.pid())?,
    })
}

fn client_without_limits(stage: &Stage, part: &str, whole: &Whole) -> Result<Finding> {
    stage.serve_in(stage.limits, Mode::Default)?;
    let mut tenant = stage.tenant("e37-client", Limits::default())?;
    let got = takes_all(stage, &mut tenant)?;
    let (share, percent) = (stage.memory(), stage.limits.compute.unwrap_or(100));
    let verdict = judged(&got, whole, share, percent);
    let expected = format!(
        "≤ {share} MiB and {percent} % of {} multiprocessors: the daemon's defaults",
        whole.multiprocessors
    );
    Ok(Finding::new(part, expected, got.words(whole), verdict).with(got.figures(whole)))
}

fn judged(got: &Got, whole: &Whole, share: u64, percent: u8) -> Verdict {
    // The least that MPS gives is two.
    let compute =
        got.multiprocessors <= 2 || got.multiprocessors * 100 <= whole.multiprocessors * u32::from(percent);
    match (got.listed, within(got.bytes, share) && compute) {
        // No client of MPS: its numbers tell nothing of the daemon's limits.
        (false, _) => Verdict::Differs,
        (true, false) => Verdict::Leaks,
        (true, true) => Verdict::as_expected_if(usable(got.bytes, share)),
    }
}

fn around(stage: &Stage, part: &str, whole: &Whole) -> Result<Finding> {
    no_foreign_daemon()?;
    stage.serve_in(stage.limits, Mode::Default)?;
    // Whether MPS lists this one decides nothing here: no witness.
    let env = stage.env(stage.limits);
    let mut neighbour = stage.start(Start { name: "e37-neighbour".to_owned(), env, ..Start::default() })?;
    neighbour.open()?;
    let mut tenant = stage.bare_tenant("e37-round")?;
    let got = takes_all(stage, &mut tenant)?;
    let share = stage.memory();
    // Not more than the limit would be a surprise.
    let verdict = if within(got.bytes, share) { Verdict::Differs } else { Verdict::Leaks };
    let expected =
        format!("goes round MPS beside a client of it: neither {share} MiB nor a percentage holds");
    let figures = got.figures(whole);
    Ok(Finding::new(part, expected, got.words(whole), verdict).with(figures))
}

impl Got {
    fn words(&self, whole: &Whole) -> String {
        format!(
            "{} ({}; NVML counts {}) on {} of {} multiprocessors, {:.1} % of the GPU's throughput; MPS {} it",
            mib(self.bytes),
            self.refusal,
            mib(self.counted),
            self.multiprocessors,
            whole.multiprocessors,
            100.0 * self.per_second / whole.per_second,
            if self.listed { "lists" } else { "does not list" },
        )
    }

    fn figures(&self, whole: &Whole) -> serde_json::Value {
        json!({
            "mib": self.bytes / MIB, "nvml_mib": self.counted / MIB, "multiprocessors": self.multiprocessors,
            "of_multiprocessors": whole.multiprocessors, "throughput": self.per_second / whole.per_second,
            "listed": self.listed,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_judged_only_of_a_client() {
        let whole = Whole { multiprocessors: 132, per_second: 1.0 };
        let got = |mib: u64, multiprocessors, listed| Got {
            multiprocessors,
            per_second: 0.25,
            bytes: mib * MIB,
            refusal: String::new(),
            counted: 0,
            listed,
        };
        let verdict = |got: Got| judged(&got, &whole, 2000, 25);
        assert_eq!(verdict(got(1900, 32, true)), Verdict::Holds);
        assert_eq!(verdict(got(100, 32, true)), Verdict::Differs);
        assert_eq!(verdict(got(4000, 32, true)), Verdict::Leaks);
        assert_eq!(verdict(got(1900, 132, true)), Verdict::Leaks);
        assert_eq!(verdict(got(4000, 132, false)), Verdict::Differs);
    }
}
