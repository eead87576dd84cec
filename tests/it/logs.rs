//! The log of a process, as a collector reads it: one JSON object per line.

use std::fs;
use std::io::{self, Write};
use std::sync::{Mutex, PoisonError};
use std::thread::{self, ThreadId};

use serde_json::Value;
use tranche::ops::logs::{Format, init_to};

use crate::site::{Claim, Site};

const NAME: &str = "own-log-line";
const UID: &str = "uid-own-log-line";

/// Lines of all tests of this process, each with the thread that has logged it.
static LINES: Mutex<Vec<(ThreadId, String)>> = Mutex::new(Vec::new());

struct Lines;

impl Write for Lines {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(line).into_owned();
        // Those of other tests are not kept.
        if text.contains(NAME) {
            LINES.lock().unwrap_or_else(PoisonError::into_inner).push((thread::current().id(), text));
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn lines() -> Vec<(ThreadId, Value)> {
    let lines = LINES.lock().unwrap_or_else(PoisonError::into_inner);
    lines.iter().map(|(thread, line)| (*thread, serde_json::from_str(line).unwrap())).collect()
}

/// The claim's UID by the spans of a line.
fn uid(line: &Value) -> Option<&str> {
    line["spans"].as_array()?.iter().find_map(|span| span["claim.uid"].as_str())
}

/// Lines of a module within a span.
fn of(target: &str, span: &str) -> Vec<(ThreadId, Value)> {
    let is = |line: &Value| line["target"] == target && line["spans"][0]["name"] == span;
    lines().into_iter().filter(|(_, line)| is(line)).collect()
}

fn messages(lines: &[(ThreadId, Value)]) -> Vec<&str> {
    lines.iter().filter_map(|(_, line)| line["message"].as_str()).collect()
}

/// How many lines there are, none of which is of the calling thread.
fn elsewhere(lines: &[(ThreadId, Value)]) -> usize {
    assert!(lines.iter().all(|(thread, _)| *thread != thread::current().id()), "{lines:?}");
    lines.len()
}

#[tokio::test]
async fn all_lines_of_a_claim_carry_its_uid_the_sweepers_and_those_of_the_executors_thread_too() {
    init_to(|| Lines, Format::Json, "info,tranche::node=debug").unwrap();
    let (site, claim) = (Site::new(), Claim::new(NAME, &["gpu-0"]).interval("Long"));
    site.api.put(&claim);
    let plugin = site.start_plugin();
    plugin.prepared(&claim, "logged").await;
    plugin.unprepare(&claim).await.unwrap();

    for (span, told) in [("prepare", "claim prepared"), ("unprepare", "claim released")] {
        assert_eq!(messages(&of("tranche::node::preparer", span)), [told]);
        // The time slice and the container edits.
        assert_eq!(elsewhere(&of("tranche::node::executor", span)), 2);
    }

    // The sweeper writes container edits that somebody removed, and takes back what the API server does not know any more.
    plugin.prepared(&claim, "logged again").await;
    fs::remove_file(site.path("cdi").join(&site.files()[0])).unwrap();
    assert_eq!(plugin.sweep().await.unwrap().restored, 1);
    assert_eq!(elsewhere(&of("tranche::node::executor", "sweep")), 1);
    site.api.remove(&claim);
    assert_eq!(plugin.sweep().await.unwrap().released, 1);
    assert_eq!(elsewhere(&of("tranche::node::executor", "sweep")), 3);
    assert_eq!(messages(&of("tranche::node::sweeper", "sweep")), ["nothing should use this any longer"]);

    let lines = lines();
    let strangers: Vec<&Value> =
        lines.iter().map(|(_, line)| line).filter(|line| uid(line) != Some(UID)).collect();
    assert!(strangers.is_empty(), "{strangers:?}");
    for (_, line) in &lines {
        let span = &line["spans"][0];
        assert_eq!((&span["claim.namespace"], &span["claim.name"]), (&"team".into(), &NAME.into()), "{line}");
    }
}
