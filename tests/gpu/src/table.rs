//! What was seen, as a table for people and as JSON.

use std::fmt;

use anyhow::Result;
use serde_json::{Value, json};

/// What an experiment came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// As it must be.
    Holds,
    /// A limit was passed, or a neighbour was hurt.
    Leaks,
    /// No limit was passed, but it is not as expected: read the numbers.
    Differs,
    /// Told, not judged.
    Observed,
    NotRun(String),
}

impl Verdict {
    pub fn holds_if(holds: bool) -> Self {
        if holds { Self::Holds } else { Self::Leaks }
    }

    pub fn as_expected_if(expected: bool) -> Self {
        if expected { Self::Holds } else { Self::Differs }
    }

    fn word(&self) -> &'static str {
        match self {
            Self::Holds => "holds",
            Self::Leaks => "leaks",
            Self::Differs => "differs",
            Self::Observed => "observed",
            Self::NotRun(_) => "not run",
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotRun(why) => write!(f, "not run: {why}"),
            other => f.write_str(other.word()),
        }
    }
}

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq)]
pub struct Finding {
    /// What of the experiment; empty where there is only one.
    pub part: String,
    pub expected: String,
    pub observed: String,
    pub verdict: Verdict,
    /// The numbers behind it, for machines.
    pub figures: Value,
    /// What must be known to read the row aright, e.g. that it was seen in another mode than shares have.
    pub notes: Vec<String>,
}

impl Finding {
    pub fn new(
        part: &str,
        expected: impl Into<String>,
        observed: impl Into<String>,
        verdict: Verdict,
    ) -> Self {
        Self {
            part: part.to_owned(),
            expected: expected.into(),
            observed: observed.into(),
            verdict,
            figures: Value::Null,
            notes: Vec::new(),
        }
    }

    pub fn not_run(part: &str, why: impl Into<String>) -> Self {
        Self::new(part, "", "", Verdict::NotRun(why.into()))
    }

    pub fn with(mut self, figures: Value) -> Self {
        self.figures = figures;
        self
    }

    /// Nothing needs a note where nothing was seen.
    pub fn noted(mut self, note: &str) -> Self {
        if !matches!(self.verdict, Verdict::NotRun(_)) {
            self.notes.push(note.to_owned());
        }
        self
    }

    /// It is not sure that the processes were bound by a limit at all: so none was passed.
    pub fn doubted(mut self) -> Self {
        if self.verdict == Verdict::Leaks {
            self.verdict = Verdict::Differs;
        }
        self
    }

    pub fn observed_and_notes(&self) -> String {
        let notes = self.notes.iter().map(|note| format!(" (note: {note})"));
        self.observed.clone() + &notes.collect::<String>()
    }
}

/// Where and when.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Circumstances {
    pub gpu: String,
    pub driver: String,
    pub kernel: String,
    pub date: String,
    /// The share and who made its environment.
    pub share: String,
    /// The compute mode, and whether it was found or set.
    pub mode: String,
    /// Processes that were on the card before.
    pub others: String,
}

#[derive(Debug)]
pub struct Report {
    circumstances: Circumstances,
    rows: Vec<(&'static str, &'static str, Finding)>,
}

impl Report {
    pub fn new(circumstances: Circumstances) -> Self {
        Self { circumstances, rows: Vec::new() }
    }

    pub fn add(&mut self, id: &'static str, title: &'static str, findings: Vec<Finding>) {
        self.rows.extend(findings.into_iter().map(|finding| (id, title, finding)));
    }

    pub fn markdown(&self) -> String {
        let Circumstances { gpu, driver, kernel, date, share, mode, others } = &self.circumstances;
        let mut text = format!(
            "| GPU | compute mode | others on it | driver | kernel | date | share |\n\
             |---|---|---|---|---|---|---|\n| {} |\n\n",
            [gpu, mode, others, driver, kernel, date, share].map(|cell| cell_of(cell)).join(" | ")
        );
        text.push_str("| # | experiment | expected | observed | verdict |\n|---|---|---|---|---|\n");
        for (id, title, finding) in &self.rows {
            let what = match finding.part.as_str() {
                "" => (*title).to_owned(),
                part => format!("{title}: {part}"),
            };
            let cells = [(*id).to_owned(), what, finding.expected.clone(), finding.observed_and_notes()];
            let cells = cells.map(|cell| cell_of(&cell)).join(" | ");
            text.push_str(&format!("| {cells} | {} |\n", cell_of(&finding.verdict.to_string())));
        }
        text
    }

    pub fn json(&self) -> Result<String> {
        let Circumstances { gpu, driver, kernel, date, share, mode, others } = &self.circumstances;
        let row = |(id, title, finding): &(&str, &str, Finding)| {
            let why = match &finding.verdict {
                Verdict::NotRun(why) => Value::from(why.as_str()),
                _ => Value::Null,
            };
            json!({
                "id": id, "title": title, "part": finding.part, "expected": finding.expected,
                "observed": finding.observed, "verdict": finding.verdict.word(), "why": why,
                "figures": finding.figures, "notes": finding.notes,
            })
        };
        let rows: Vec<Value> = self.rows.iter().map(row).collect();
        let all = json!({
            "gpu": gpu, "mode": mode, "others": others, "driver": driver, "kernel": kernel, "date": date, "share": share,
            "rows": rows,
        });
        Ok(serde_json::to_string_pretty(&all)?)
    }

    /// How many rows have each verdict.
    pub fn sum(&self) -> String {
        let count =
            |word: &str| self.rows.iter().filter(|(_, _, finding)| finding.verdict.word() == word).count();
        let words = ["holds", "leaks", "differs", "observed", "not run"]
            .map(|word| format!("{} {word}", count(word)));
        words.join(", ")
    }
}

/// A line break or a bar would end the cell.
fn cell_of(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "\\|")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        let gpu = "NVIDIA H200".to_owned();
        let mut report = Report::new(Circumstances { gpu, ..Circumstances::default() });
        let seen =
            Finding::new("a", "≤ 2000 MiB", "1936 | MiB\nalive", Verdict::Holds).with(json!({"mib": 1936}));
        report.add("E1", "ceiling", vec![seen, Finding::not_run("b", "no PyTorch")]);
        report
    }

    #[test]
    fn a_table_has_a_row_for_each_finding_and_cells_stay_whole() {
        let text = report().markdown();
        assert!(text.contains("| NVIDIA H200 |"), "{text}");
        assert!(text.contains("| E1 | ceiling: a | ≤ 2000 MiB | 1936 \\| MiB alive | holds |"), "{text}");
        assert!(text.contains("| E1 | ceiling: b |  |  | not run: no PyTorch |"), "{text}");
        let bars = |line: &str| line.replace("\\|", "").matches('|').count();
        assert!(text.lines().skip(4).all(|line| bars(line) == 6), "{text}");
    }

    #[test]
    fn json_has_the_numbers_and_the_reason() {
        let all: Value = serde_json::from_str(&report().json().unwrap()).unwrap();
        assert_eq!(all["rows"][0]["figures"]["mib"], 1936);
        assert_eq!(all["rows"][1]["verdict"], "not run");
        assert_eq!(all["rows"][1]["why"], "no PyTorch");
    }

    #[test]
    fn a_note_is_in_the_row_unless_nothing_was_run() {
        let mut report = report();
        let seen = Finding::new("c", "refused", "it got in", Verdict::Leaks).noted("in DEFAULT mode");
        report.add("E9", "round", vec![seen.doubted(), Finding::not_run("d", "why").noted("unused")]);
        let text = report.markdown();
        assert!(text.contains("| refused | it got in (note: in DEFAULT mode) | differs |"), "{text}");
        assert!(!text.contains("unused"), "{text}");
        let all: Value = serde_json::from_str(&report.json().unwrap()).unwrap();
        assert_eq!(all["rows"][2]["notes"], json!(["in DEFAULT mode"]));
    }

    #[test]
    fn verdicts_are_counted() {
        assert_eq!(report().sum(), "1 holds, 0 leaks, 0 differs, 0 observed, 1 not run");
    }
}
