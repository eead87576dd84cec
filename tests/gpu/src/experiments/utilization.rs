//! E36: whom NVML names when it is asked how busy processes are.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Result, bail};
use serde_json::json;

use super::part;
use crate::nvml::{Query, Sample};
use crate::protocol::Request;
use crate::signals;
use crate::stage::Stage;
use crate::table::{Finding, Verdict};
use crate::tenant::Tenant;

/// NVML has a new sample about every second, by what is published of it at the latest.
const MEASURED: Duration = Duration::from_secs(8);
const PERIOD: Duration = Duration::from_millis(250);
/// Processes compute a little longer than they are looked at.
const WORK_MS: u64 = 9000;

/// E36
pub fn by_process(stage: &mut Stage) -> Result<Vec<Finding>> {
    let bare = "a bare process";
    let mut findings = one_by_one(bare, a_bare_one(stage))?;
    findings.extend(one_by_one("two busy MPS clients and an idle one", clients(stage))?);
    Ok(findings)
}

/// A row for each of NVML's functions; one if there is nothing to tell.
fn one_by_one(name: &str, seen: Result<Seen>) -> Result<Vec<Finding>> {
    let seen = match seen {
        Ok(seen) => seen,
        Err(error) => return Ok(vec![part(name, Err(error))?]),
    };
    Ok(Query::ALL.iter().zip(&seen.answers).map(|(query, answer)| seen.row(name, *query, answer)).collect())
}

/// PID → samples and the highest percentage; or why NVML did not answer.
pub(super) type Answer = Result<BTreeMap<u32, Use>, String>;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
pub(super) struct Use {
    samples: u32,
    most: u32,
}

impl Use {
    pub(super) fn words(&self) -> String {
        format!("{} samples, at most {} %", self.samples, self.most)
    }
}

/// Who was there, and what NVML said, by its functions in the order of [`Query::ALL`].
struct Seen {
    busy: Vec<u32>,
    idle: Vec<u32>,
    servers: Vec<u32>,
    answers: Vec<Answer>,
}

impl Seen {
    fn row(&self, name: &str, query: Query, answer: &Answer) -> Finding {
        let part = format!("{name}, {}", query.name());
        let all = match answer {
            Ok(all) => all,
            Err(why) => return Finding::not_run(&part, why.as_str()),
        };
        let known: BTreeSet<u32> =
            [&self.busy, &self.idle, &self.servers].into_iter().flatten().copied().collect();
        let foreign: Vec<u32> = all.keys().copied().filter(|pid| !known.contains(pid)).collect();
        let words = format!(
            "{}: busy {}; idle {}; MPS servers {}; others {}",
            self.verdict(all),
            list(&self.busy, all),
            list(&self.idle, all),
            list(&self.servers, all),
            list(&foreign, all)
        );
        let figures = json!({
            "busy": self.busy, "idle": self.idle, "servers": self.servers, "by_pid": all,
            "seconds": MEASURED.as_secs(),
        });
        Finding::new(&part, "told, not judged", words, Verdict::Observed).with(figures)
    }

    /// Whose work NVML shows.
    fn verdict(&self, all: &BTreeMap<u32, Use>) -> &'static str {
        let works = |pid: &u32| all.get(pid).is_some_and(|one| one.most > 0);
        match (self.busy.iter().filter(|pid| works(pid)).count(), self.servers.iter().any(works)) {
            (0, false) => "nobody of them",
            (0, true) => "only the server",
            (count, false) if count == self.busy.len() => "each busy process",
            (count, true) if count == self.busy.len() => "each busy process, and the server",
            (_, false) => "some of the busy processes",
            (_, true) => "some of the busy processes, and the server",
        }
    }
}

fn list(pids: &[u32], all: &BTreeMap<u32, Use>) -> String {
    let one = |pid: &u32| match all.get(pid) {
        Some(found) => format!("{pid} {}", found.words()),
        None => format!("{pid} no sample"),
    };
    match pids.is_empty() {
        true => "none".to_owned(),
        false => pids.iter().map(one).collect::<Vec<_>>().join(", "),
    }
}

fn a_bare_one(stage: &Stage) -> Result<Seen> {
    stage.bare()?;
    let mut tenant = stage.bare_tenant("e36-bare")?;
    tenant.open()?;
    let answers = look_until_measured(stage, std::slice::from_mut(&mut tenant))?;
    Ok(Seen { busy: vec![tenant.pid()], idle: vec![], servers: vec![], answers })
}

fn clients(stage: &Stage) -> Result<Seen> {
    stage.serve(stage.limits)?;
    let mut busy = [stage.tenant("e36-first", stage.limits)?, stage.tenant("e36-second", stage.limits)?];
    for tenant in &mut busy {
        tenant.open()?;
    }
    let mut idle = stage.tenant("e36-idle", stage.limits)?;
    idle.open()?;
    let servers = stage.daemon.servers()?;
    let answers = look_until_measured(stage, &mut busy)?;
    Ok(Seen { busy: busy.iter().map(Tenant::pid).collect(), idle: vec![idle.pid()], servers, answers })
}

pub(super) fn look_until_measured(stage: &Stage, tenants: &mut [Tenant]) -> Result<Vec<Answer>> {
    let stamp = SystemTime::now().duration_since(UNIX_EPOCH)?.as_micros();
    let since = u64::try_from(stamp)?;
    for tenant in tenants.iter_mut() {
        tenant.tell(&Request::Work { ms: WORK_MS })?;
    }
    let begin = Instant::now();
    let mut watched = Query::ALL.map(|query| Watched { query, since, answer: Ok(BTreeMap::new()) });
    while begin.elapsed() < MEASURED {
        signals::go_on()?;
        std::thread::sleep(PERIOD);
        watched.iter_mut().for_each(|one| one.look(stage));
    }
    // Clocks may differ: then nothing is newer than the begin, and all that NVML keeps is an answer.
    for one in watched.iter_mut().filter(|one| one.answer.as_ref().is_ok_and(BTreeMap::is_empty)) {
        one.since = 0;
        one.look(stage);
    }
    for tenant in tenants {
        if tenant.worked()? <= 0.0 {
            bail!("{} did not compute", tenant.name);
        }
    }
    Ok(watched.into_iter().map(|one| one.answer).collect())
}

/// One function of NVML's, asked again and again.
struct Watched {
    query: Query,
    since: u64,
    answer: Answer,
}

impl Watched {
    fn look(&mut self, stage: &Stage) {
        let Ok(all) = &mut self.answer else { return };
        match stage.nvml.utilization(&stage.gpu.uuid, self.query, self.since) {
            Ok(samples) => self.since = add(all, &samples).unwrap_or(self.since),
            Err(error) => self.answer = Err(format!("{error:#}")),
        }
    }
}

/// The newest stamp, if there is a sample.
fn add(all: &mut BTreeMap<u32, Use>, samples: &[Sample]) -> Option<u64> {
    for sample in samples {
        let one = all.entry(sample.pid).or_default();
        one.samples += 1;
        one.most = one.most.max(sample.sm);
    }
    samples.iter().map(|sample| sample.stamp).max()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(answers: &[(u32, u32)]) -> (Seen, BTreeMap<u32, Use>) {
        let mut all = BTreeMap::new();
        let samples: Vec<_> =
            answers.iter().map(|(pid, sm)| Sample { pid: *pid, stamp: u64::from(*sm), sm: *sm }).collect();
        add(&mut all, &samples);
        (Seen { busy: vec![1, 2], idle: vec![3], servers: vec![9], answers: vec![] }, all)
    }

    #[test]
    fn whose_work_is_shown_is_said_in_words() {
        for (answers, expected) in [
            (&[][..], "nobody of them"),
            (&[(1, 0), (3, 0)], "nobody of them"),
            (&[(9, 97)], "only the server"),
            (&[(1, 48), (2, 47), (3, 0)], "each busy process"),
            (&[(1, 48), (2, 47), (9, 95)], "each busy process, and the server"),
            (&[(2, 47)], "some of the busy processes"),
        ] {
            let (seen, all) = seen(answers);
            assert_eq!(seen.verdict(&all), expected);
        }
    }

    #[test]
    fn a_row_names_those_who_are_not_ours() {
        let (seen, all) = seen(&[(1, 30), (1, 48), (77, 5)]);
        let row = seen.row("x", Query::Process, &Ok(all));
        assert!(row.observed.contains("busy 1 2 samples, at most 48 %, 2 no sample"), "{}", row.observed);
        assert!(row.observed.contains("others 77 1 samples, at most 5 %"), "{}", row.observed);
        let row = seen.row("x", Query::Processes, &Err("this driver has no such function".to_owned()));
        assert!(row.verdict.to_string().contains("no such function"));
    }
}
