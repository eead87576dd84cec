//! E12, E13, E15: multiprocessors.

use std::collections::BTreeSet;

use anyhow::Result;
use serde_json::json;

use crate::limits::{Limits, expected_multiprocessors};
use crate::protocol::{Reply, Request};
use crate::stage::Stage;
use crate::table::{Finding, Verdict};
use crate::tenant::{PATIENCE, Tenant};

/// E12
pub fn rounding(stage: &mut Stage) -> Result<Vec<Finding>> {
    let open = Limits { compute: None, ..stage.limits };
    stage.serve(open)?;
    let granted = |percent: Option<u8>| {
        let mut tenant = stage.tenant("e12", Limits { compute: percent, ..open })?;
        tenant.open().map(|opened| opened.multiprocessors)
    };
    let all = granted(None)?;
    let percents: Vec<u8> = match stage.quick {
        true => vec![1, 2, 5, 10, 25, 33, 50, 75, 99, 100],
        false => (1..=100).collect(),
    };
    let mut table = Vec::new();
    for percent in percents {
        table.push((percent, granted(Some(percent))?));
    }
    let off: Vec<String> = table
        .iter()
        .filter(|(percent, got)| *got != expected_multiprocessors(all, *percent))
        .map(|(percent, got)| format!("{percent} % → {got}, not {}", expected_multiprocessors(all, *percent)))
        .collect();
    let more = table.iter().any(|(percent, got)| *got > 2 && got * 100 > all * u32::from(*percent));
    let some = table.iter().filter(|(percent, _)| [1, 10, 25, 50, 75, 99, 100].contains(percent));
    let some: Vec<String> = some.map(|(percent, got)| format!("{percent} % → {got}")).collect();
    let seen = format!(
        "of {all}: {}; {} of {} percentages differ{}",
        some.join(", "),
        off.len(),
        table.len(),
        off.first().map(|_| format!(" ({})", off[..off.len().min(5)].join("; "))).unwrap_or_default()
    );
    let verdict = if more { Verdict::Leaks } else { Verdict::as_expected_if(off.is_empty()) };
    let expected = "even numbers, rounded down, at least 2";
    let figures = json!({"multiprocessors": all, "table": table});
    Ok(vec![Finding::new("", expected, seen, verdict).with(figures)])
}

/// E13
pub fn whereabouts(stage: &mut Stage) -> Result<Vec<Finding>> {
    stage.serve(stage.limits)?;
    let mut first = stage.tenant("e13-first", stage.limits)?;
    let mut second = stage.tenant("e13-second", stage.limits)?;
    let granted = first.open()?.multiprocessors;
    second.open()?;
    let whole = expected_whole(granted, stage.limits.compute);
    first.tell(&Request::Where { blocks: 4 * whole, ms: 5 })?;
    let alone = ran_on(&mut first)?;
    let seen = format!("{} distinct of {granted} granted", alone.len());
    let verdict = Verdict::holds_if(alone.len() as u32 <= granted);
    let figures = json!({"granted": granted, "on": alone});
    let one = Finding::new("one tenant", format!("≤ {granted}"), seen, verdict).with(figures);

    for tenant in [&mut first, &mut second] {
        tenant.tell(&Request::Where { blocks: 2 * whole, ms: 100 })?;
    }
    let (a, b) = (ran_on(&mut first)?, ran_on(&mut second)?);
    let both = a.intersection(&b).count();
    let seen = format!("{} and {} distinct, {both} of them in common", a.len(), b.len());
    let verdict = Verdict::holds_if(a.len().max(b.len()) as u32 <= granted);
    let figures = json!({"granted": granted, "first": a, "second": b, "common": both});
    let expected = format!("each ≤ {granted}; MPS percentages do not keep them apart");
    let two = Finding::new("two tenants at once", expected, seen, verdict).with(figures);
    let partition = Finding::not_run("static partitions", "tranche does not use them (`-S` of CUDA 13.1)");
    Ok(vec![one, two, partition])
}

/// About how many the GPU has, from what a percentage came to.
fn expected_whole(granted: u32, compute: Option<u8>) -> u32 {
    (granted + 2) * 100 / u32::from(compute.unwrap_or(100))
}

fn ran_on(tenant: &mut Tenant) -> Result<BTreeSet<u32>> {
    match tenant.hear(PATIENCE)? {
        Ok(Reply::Ran { on }) => Ok(on.into_iter().collect()),
        Ok(other) => tenant.unexpected(&other),
        Err(silence) => anyhow::bail!("{}: {silence}", tenant.name),
    }
}

/// E15
pub fn four_processes(stage: &mut Stage) -> Result<Vec<Finding>> {
    let percent = stage.limits.compute.unwrap_or(25);
    let ms = if stage.quick { 1000 } else { 3000 };
    let open = Limits { compute: None, ..stage.limits };
    stage.serve(open)?;
    let mut alone = stage.tenant("e15-uncapped", open)?;
    alone.open()?;
    let uncapped = alone.work(ms)?;
    drop(alone);

    let capped = Limits { compute: Some(percent), ..stage.limits };
    stage.serve(capped)?;
    let mut tenants = Vec::new();
    let mut granted = 0;
    for number in 0..4 {
        let mut tenant = stage.tenant(&format!("e15-{number}"), capped)?;
        granted = tenant.open()?.multiprocessors;
        tenants.push(tenant);
    }
    let one = tenants[0].work(ms)?;
    for tenant in &mut tenants {
        tenant.tell(&Request::Work { ms })?;
    }
    let four: f64 = tenants.iter_mut().map(Tenant::worked).sum::<Result<f64>>()?;
    let part = |value: f64| 100.0 * value / uncapped;
    let figures = json!({"uncapped": uncapped, "one": one, "four": four, "granted": granted});
    let seen = format!("{:.1} % of the GPU's throughput on {granted} multiprocessors", part(one));
    let allowed = f64::from(percent) * 1.1 + 2.0;
    let single = Finding::new(
        "one process",
        format!("≤ {percent} % of the GPU"),
        seen,
        Verdict::holds_if(part(one) <= allowed),
    );
    let seen = format!("{:.1} % of the GPU's throughput together", part(four));
    let all = Finding::new(
        "four processes of one claim",
        format!(
            "≤ {percent} % of the GPU; MPS limits each process, so {} % is expected",
            (4 * u32::from(percent)).min(100)
        ),
        seen,
        Verdict::holds_if(part(four) <= allowed),
    );
    Ok(vec![single.with(figures.clone()), all.with(figures)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_whole_is_never_guessed_too_small() {
        for all in [40, 68, 108, 132, 188] {
            for percent in [1, 10, 25, 50, 100] {
                let granted = expected_multiprocessors(all, percent);
                assert!(expected_whole(granted, Some(percent)) >= all, "{percent} % of {all}");
            }
        }
    }
}
