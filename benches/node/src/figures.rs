//! Samples, what they come to, and the two ways of telling: a table, and one flat object.

use std::fmt::Write as _;
use std::time::Duration;

use serde_json::{Map, Value, json};

/// Milliseconds, in the order in which they were measured.
#[derive(Debug, Clone, Default)]
pub struct Samples(Vec<f64>);

impl Samples {
    pub fn push(&mut self, took: Duration) {
        self.0.push(took.as_secs_f64() * 1e3);
    }

    /// Each sample less the one of `other` that was taken beside it.
    pub fn less(&self, other: &Self) -> Self {
        Self(self.0.iter().zip(&other.0).map(|(mine, theirs)| mine - theirs).collect())
    }

    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// The nearest rank: the value that `share` (0 to 1) of the samples do not exceed.
    pub fn at(&self, share: f64) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        let rank = (share * sorted.len() as f64).ceil() as usize;
        sorted.get(rank.clamp(1, sorted.len().max(1)) - 1).copied().unwrap_or(f64::NAN)
    }

    pub fn p50(&self) -> f64 {
        self.at(0.5)
    }
    pub fn p99(&self) -> f64 {
        self.at(0.99)
    }
    pub fn max(&self) -> f64 {
        self.at(1.0)
    }
}

impl Extend<Duration> for Samples {
    fn extend<T: IntoIterator<Item = Duration>>(&mut self, all: T) {
        all.into_iter().for_each(|took| self.push(took));
    }
}

/// Everything that was measured.
#[derive(Debug, Default)]
pub struct Report {
    rows: Vec<[String; 9]>,
    tables: Vec<String>,
    notes: Vec<String>,
    figures: Map<String, Value>,
}

const HEAD: [&str; 9] = ["what", "n", "min", "p50", "p90", "p99", "max", "target", "NVIDIA's driver *"];

impl Report {
    /// A row of a table: figures in ms.
    pub fn samples(&mut self, what: &str, samples: &Samples, target: &str, peer: &str) {
        let shown = [0.0, 0.5, 0.9, 0.99, 1.0].map(|share| rounded(samples.at(share)).to_string());
        let [min, p50, p90, p99, max] = shown;
        eprintln!("-- {what}: n {}, p50 {p50}, max {max}", samples.count());
        let (target, peer) = (target.to_owned(), peer.to_owned());
        self.rows.push([what.to_owned(), samples.count().to_string(), min, p50, p90, p99, max, target, peer]);
    }

    /// A row with one figure.
    pub fn single(&mut self, what: &str, value: f64, target: &str, peer: &str) {
        let none = String::new;
        let (what, target, peer) = (what.to_owned(), target.to_owned(), peer.to_owned());
        self.rows.push([
            what,
            "1".to_owned(),
            none(),
            rounded(value).to_string(),
            none(),
            none(),
            none(),
            target,
            peer,
        ]);
    }

    /// A table of its own; words stand to the left of their columns, figures to the right.
    pub fn table_of(&mut self, head: &[&str], rows: &[Vec<String>]) {
        let head = head.iter().map(|cell| (*cell).to_owned()).collect();
        let all: Vec<Vec<String>> = std::iter::once(head).chain(rows.iter().cloned()).collect();
        let is_words = |cell: &String| cell.parse::<f64>().is_err() && !cell.is_empty();
        let is_left = |column: usize| all.iter().skip(1).any(|row| is_words(&row[column]));
        self.tables.push(aligned(&all, is_left));
    }

    /// A figure under its stable name.
    pub fn figure(&mut self, name: &str, value: f64) {
        self.figures.insert(name.to_owned(), json!(rounded(value)));
    }

    pub fn note(&mut self, words: impl Into<String>) {
        self.notes.push(words.into());
    }

    /// Adds what another report has, behind this one's.
    pub fn append(&mut self, other: Self) {
        self.rows.extend(other.rows);
        self.tables.extend(other.tables);
        self.notes.extend(other.notes);
        self.figures.extend(other.figures);
    }

    /// For people.
    pub fn table(&self) -> String {
        let head = HEAD.map(str::to_owned);
        let rows: Vec<Vec<String>> =
            std::iter::once(&head).chain(&self.rows).map(|row| row.to_vec()).collect();
        let mut text = self.tables.join("\n");
        if !self.rows.is_empty() {
            text.push_str(&aligned(&rows, |column| matches!(column, 0 | 7 | 8)));
        }
        for note in &self.notes {
            let _ = writeln!(text, "{note}");
        }
        text
    }

    /// For programs: beside the figures of a run before, unless this one has them too.
    pub fn json(&self, before: Option<Map<String, Value>>) -> Value {
        let mut figures = before.unwrap_or_default();
        figures.extend(self.figures.clone());
        Value::Object(figures)
    }
}

fn aligned(rows: &[Vec<String>], is_left: impl Fn(usize) -> bool) -> String {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..rows.first().map_or(0, Vec::len)).map(width).collect();
    let mut text = String::new();
    for row in rows {
        for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
            // Writing to a String cannot fail.
            let _ = match is_left(column) {
                true => write!(text, "{cell:<width$}  "),
                false => write!(text, "{cell:>width$}  "),
            };
        }
        text.truncate(text.trim_end().len());
        text.push('\n');
    }
    text
}

/// Three digits after the point: a microsecond, a KiB.
pub fn rounded(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}
