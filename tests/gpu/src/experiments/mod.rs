//! The experiments: what each does, what it needs, when it passes; and what it does when it runs.

mod bypass;
mod compute;
mod cost;
mod default_mode;
mod faults;
mod full_memory;
mod list;
mod memory;
mod orders;
mod python;
mod shared_memory;
mod slots;
mod two_daemons;
mod utilization;
mod watch;

use anyhow::{Result, bail};

use crate::nvml::Mode;
use crate::signals;
use crate::stage::Stage;
use crate::table::Finding;

pub use list::ALL;

pub struct Experiment {
    pub id: &'static str,
    pub title: &'static str,
    pub does: &'static str,
    pub needs: &'static str,
    pub passes: &'static str,
    /// As found: in DEFAULT mode.
    pub in_default: Applicability,
    /// As found: in EXCLUSIVE_PROCESS mode, where nobody has the card.
    pub in_exclusive: Applicability,
    /// With processes of others on the card.
    pub beside_others: Applicability,
    pub run: fn(&mut Stage) -> Result<Vec<Finding>>,
}

/// What becomes of an experiment on a card that stays as it was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Applicability {
    /// The same as in a share's own environment.
    Same,
    /// It runs, and its rows say this: they mean something else, or there are fewer.
    Means(&'static str),
    /// It does not run, for this reason.
    No(&'static str),
}

impl Applicability {
    /// As in the table of README.md.
    pub fn words(self) -> &'static str {
        match self {
            Self::Same => "yes",
            Self::Means(_) => "with a note",
            Self::No(_) => "no",
        }
    }
}

impl Experiment {
    /// The notes that its rows need, or why it is not run.
    fn applicability(
        &self,
        found: Option<Mode>,
        beside_others: bool,
    ) -> Result<Vec<&'static str>, &'static str> {
        let by_mode = match found {
            // The experiment sets the mode that it needs.
            None | Some(Mode::Prohibited | Mode::Other(_)) => Applicability::Same,
            Some(Mode::Default) => self.in_default,
            Some(Mode::ExclusiveProcess) => self.in_exclusive,
        };
        let by_others = if beside_others { self.beside_others } else { Applicability::Same };
        let mut notes = Vec::new();
        for applicability in [by_mode, by_others] {
            match applicability {
                Applicability::Same => {}
                Applicability::Means(note) => notes.push(note),
                Applicability::No(why) => return Err(why),
            }
        }
        Ok(notes)
    }
}

/// Runs one. What it fails at is its row.
pub fn findings(one: &Experiment, stage: &mut Stage) -> Vec<Finding> {
    let notes = match one.applicability(stage.found(), !stage.others.is_empty()) {
        Ok(notes) => notes,
        Err(why) => return vec![Finding::not_run("", why)],
    };
    let found = (one.run)(stage).unwrap_or_else(|error| vec![Finding::not_run("", format!("{error:#}"))]);
    let witnessed = stage.witnessed();
    let mark = |mut finding: Finding| {
        for note in &notes {
            finding = finding.noted(note);
        }
        if let Some(words) = witnessed.words() {
            finding = finding.noted(&words);
        }
        if witnessed.is_sure() { finding } else { finding.doubted() }
    };
    found.into_iter().map(mark).collect()
}

/// Those that are named, in the table's order; all if none is.
pub fn chosen(ids: &[String]) -> Result<Vec<&'static Experiment>> {
    for id in ids {
        if !ALL.iter().any(|one| one.id.eq_ignore_ascii_case(id)) {
            let known: Vec<_> = ALL.iter().map(|one| one.id).collect();
            bail!("there is no experiment {id}; there are {}", known.join(", "));
        }
    }
    let wanted = |one: &&Experiment| ids.is_empty() || ids.iter().any(|id| one.id.eq_ignore_ascii_case(id));
    Ok(ALL.iter().filter(wanted).collect())
}

/// What goes wrong in one part is that part's row; the other parts go on. A signal ends them all.
fn part(name: &str, found: Result<Finding>) -> Result<Finding> {
    signals::go_on()?;
    Ok(found.unwrap_or_else(|error| Finding::not_run(name, format!("{error:#}"))))
}

/// Whole MiB, for people.
fn mib(bytes: u64) -> String {
    format!("{} MiB", bytes / crate::limits::MIB)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_experiment_says_what_it_is() {
        for one in &ALL {
            assert!(one.id.starts_with('E') && one.id[1..].parse::<u8>().is_ok(), "{}", one.id);
            for text in [one.title, one.does, one.needs, one.passes] {
                assert!(!text.is_empty() && !text.contains('|'), "{}: {text}", one.id);
            }
        }
        let ids: std::collections::BTreeSet<_> = ALL.iter().map(|one| one.id).collect();
        assert_eq!(ids.len(), ALL.len());
    }

    #[test]
    fn experiments_are_chosen_by_name_in_any_case() {
        let ids = |names: &[&str]| -> Vec<&str> {
            let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
            chosen(&names).unwrap().iter().map(|one| one.id).collect()
        };
        assert_eq!(ids(&["e9", "E1"]), ["E1", "E9"]);
        assert_eq!(ids(&[]).len(), ALL.len());
        let words = chosen(&["E6".to_owned()]).err().unwrap().to_string();
        assert!(words.contains("no experiment E6") && words.contains("E28"), "{words}");
    }

    #[test]
    fn the_readme_says_of_every_experiment_whether_it_runs_as_found() {
        let readme = include_str!("../../README.md");
        for one in &ALL {
            let line = readme.lines().find(|line| line.starts_with(&format!("| {} |", one.id)));
            let line = line.unwrap_or_else(|| panic!("{} is missing in README.md", one.id));
            let end = format!("| {} | {} |", one.in_default.words(), one.in_exclusive.words());
            assert!(line.ends_with(&end), "{line} should end with {end}");
        }
    }

    #[test]
    fn what_is_not_asked_as_found_has_a_reason_and_what_means_something_else_a_note() {
        let of = |id: &str| ALL.iter().find(|one| one.id == id).unwrap();
        let (default, exclusive) = (Some(Mode::Default), Some(Mode::ExclusiveProcess));
        assert_eq!(of("E1").applicability(default, true), Ok(vec![]));
        for mode in [default, exclusive] {
            assert!(of("E23").applicability(mode, false).unwrap_err().contains("`tranche mps`"));
        }
        assert_eq!(of("E23").applicability(None, false), Ok(vec![]));
        assert!(of("E37").applicability(exclusive, false).is_err());
        assert_eq!(of("E37").applicability(default, false), Ok(vec![]));
        assert!(of("E9").applicability(default, false).unwrap()[0].contains("EXCLUSIVE_PROCESS"));
        assert!(of("E20").applicability(default, true).unwrap_err().contains("others"));
        assert_eq!(of("E15").applicability(exclusive, true).unwrap().len(), 1);
    }
}
