//! What the runs came to.

use std::fmt::Write as _;
use std::time::Duration;

use serde_json::{Value, json};

use super::paper;
use super::replay::Series;
use crate::cli::table;

#[derive(Debug)]
pub struct SimulationReport {
    /// Name of the set of pods.
    pub pods: String,
    pub load: f64,
    pub all: Vec<Series>,
}

/// Mean, least and most of all orders.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Spread {
    pub mean: f64,
    pub min: f64,
    pub max: f64,
}

impl Spread {
    fn of(values: impl Iterator<Item = f64>) -> Option<Self> {
        let values: Vec<f64> = values.collect();
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        let min = values.iter().copied().reduce(f64::min)?;
        Some(Self { mean, min, max: values.iter().copied().reduce(f64::max)? })
    }
}

impl Series {
    /// When so many percent had been requested; none: it never came to that.
    pub fn at(&self, percent: usize) -> Option<Spread> {
        let whole = self.runs.iter().all(|run| run.allocated.len() >= percent);
        let values = self.runs.iter().filter_map(|run| run.allocated.get(percent.checked_sub(1)?).copied());
        if whole { Spread::of(values) } else { None }
    }

    pub fn end(&self) -> Spread {
        Spread::of(self.runs.iter().map(|run| run.last())).unwrap_or(Spread { mean: 0.0, min: 0.0, max: 0.0 })
    }

    /// The time that this share (0 to 1) of decisions did not exceed, in µs.
    fn took(&self, share: f64) -> f64 {
        let mut took: Vec<Duration> = self.runs.iter().flat_map(|run| run.took.iter().copied()).collect();
        micros_at(&mut took, share)
    }
}

/// The nearest rank, in µs.
pub fn micros_at(took: &mut [Duration], share: f64) -> f64 {
    took.sort_unstable();
    let rank = (share * took.len() as f64).ceil() as usize;
    took.get(rank.max(1) - 1).map_or(0.0, |took| took.as_secs_f64() * 1e6)
}

impl SimulationReport {
    fn percent(&self) -> usize {
        (self.load * 100.0).round() as usize
    }

    /// Loads on the way at which the table stops.
    fn stops(&self) -> Vec<usize> {
        [90, 100].into_iter().filter(|stop| *stop < self.percent()).collect()
    }

    pub fn text(&self) -> String {
        let stops = self.stops();
        let mut header: Vec<String> = vec!["POLICY".to_owned()];
        header.extend(stops.iter().map(|stop| format!("AT {stop} %")));
        header.push(format!("AT {} %", self.percent()));
        header.extend(["LEAST", "MOST", "P50 µs", "P99 µs"].map(str::to_owned));
        let rows = self.all.iter().map(|series| {
            let end = series.end();
            let mut row = vec![series.scheduler.to_string()];
            row.extend(stops.iter().map(|stop| number(series.at(*stop).map(|spread| spread.mean))));
            row.extend([end.mean, end.min, end.max].map(|percent| number(Some(percent))));
            row.extend([0.5, 0.99].map(|share| format!("{:.1}", series.took(share))));
            row
        });
        let header: Vec<&str> = header.iter().map(String::as_str).collect();
        let seeds = self.all.first().map_or(0, |series| series.runs.len());
        let mut text = format!(
            "{}: percent of GPUs allocated when so many percent were requested, mean of {seeds} orders\n\n{}",
            self.pods,
            table::render(&header, rows)
        );
        text.push_str(&self.beside());
        text
    }

    /// The paper's figures, where there are any.
    fn beside(&self) -> String {
        let results: Vec<_> =
            paper::results(&self.pods).filter(|(load, _)| *load as usize <= self.percent()).collect();
        if results.is_empty() {
            return String::new();
        }
        let mut header = vec!["PAPER".to_owned()];
        header.extend(results.iter().map(|(load, _)| format!("AT {load} %")));
        let header: Vec<&str> = header.iter().map(String::as_str).collect();
        let rows = paper::POLICIES.iter().enumerate().map(|(at, name)| {
            let cells = results.iter().map(|(_, results)| number(Some(results[at])));
            [(*name).to_owned()].into_iter().chain(cells).collect::<Vec<_>>()
        });
        format!("\n{}\n{}\n", table::render(&header, rows), paper::SOURCE)
    }

    /// One object per line.
    /// One JSON object per policy and line.
    pub fn json_lines(&self) -> String {
        self.objects().iter().map(|object| format!("{object}\n")).collect()
    }

    /// The same in one object, its fields named as those of Kubernetes are.
    pub fn document(&self) -> Value {
        let camel = |name: &String| {
            let mut words = name.split('_');
            let first = words.next().unwrap_or_default().to_owned();
            words.fold(first, |name, word| format!("{name}{}{}", word[..1].to_uppercase(), &word[1..]))
        };
        let renamed = |object: Value| match object {
            Value::Object(fields) => {
                fields.iter().map(|(name, value)| (camel(name), value.clone())).collect()
            }
            other => other,
        };
        json!({"policies": self.objects().into_iter().map(renamed).collect::<Vec<Value>>()})
    }

    /// One for each policy.
    fn objects(&self) -> Vec<Value> {
        let mut objects = Vec::new();
        for series in &self.all {
            let end = series.end();
            let mut object = json!({
                "pods": self.pods,
                "policy": series.scheduler.as_str(),
                "load": self.load,
                "seeds": series.runs.len(),
                "allocated_percent": end.mean,
                "allocated_percent_min": end.min,
                "allocated_percent_max": end.max,
                "decision_p50_us": series.took(0.5),
                "decision_p99_us": series.took(0.99),
                "paper_best_percent": paper::best(&self.pods, self.percent()),
            });
            for stop in self.stops() {
                let mean = series.at(stop).map(|spread| spread.mean);
                object[format!("allocated_percent_at_{stop}")] = json!(mean);
                object[format!("paper_best_percent_at_{stop}")] = json!(paper::best(&self.pods, stop));
            }
            objects.push(object);
        }
        objects
    }

    pub fn csv(&self) -> String {
        let mut text =
            "policy,load_percent,allocated_percent,allocated_percent_min,allocated_percent_max\n".to_owned();
        for series in &self.all {
            for percent in 1..self.percent() {
                if let Some(Spread { mean, min, max }) = series.at(percent) {
                    let _ = writeln!(text, "{},{percent},{mean:.3},{min:.3},{max:.3}", series.scheduler);
                }
            }
            let Spread { mean, min, max } = series.end();
            let _ = writeln!(text, "{},{},{mean:.3},{min:.3},{max:.3}", series.scheduler, self.percent());
        }
        text
    }
}

fn number(percent: Option<f64>) -> String {
    table::or_none(percent.map(|percent| format!("{percent:.2}")))
}
