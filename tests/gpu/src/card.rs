//! What may be done about the card's compute mode, and who else is on the card.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;

use anyhow::{Result, bail};

use crate::guard::Guard;
use crate::limits::MIB;
use crate::nvml::Mode;

/// The compute mode is read by this; it has no way to set one.
pub type ReadMode = Box<dyn Fn() -> Result<Mode>>;

/// Whose setting the compute mode is.
pub enum ComputeMode {
    /// As it was found, and so it stays: nothing in here can set it.
    AsFound { mode: Mode, read: ReadMode },
    /// Set as an experiment needs it, put back by the guard.
    Settable(Guard),
}

impl ComputeMode {
    pub fn as_found(read: ReadMode) -> Result<Self> {
        Ok(Self::AsFound { mode: read()?, read })
    }

    /// The mode that stays, if it does.
    pub fn found(&self) -> Option<Mode> {
        match self {
            Self::AsFound { mode, .. } => Some(*mode),
            Self::Settable(_) => None,
        }
    }

    /// For a daemon with a share's limits: `tranche` sets EXCLUSIVE_PROCESS; as found, any mode will do.
    pub fn for_share(&self) -> Result<()> {
        match self {
            Self::AsFound { .. } => self.unchanged(),
            Self::Settable(guard) => guard.set(Mode::ExclusiveProcess),
        }
    }

    /// For a process without MPS that has the GPU for itself.
    pub fn for_bare(&self) -> Result<()> {
        match self {
            Self::AsFound { .. } => self.unchanged(),
            Self::Settable(guard) => guard.set(Mode::Default),
        }
    }

    /// An error where the mode is another one and stays.
    pub fn require(&self, wanted: Mode) -> Result<()> {
        match self {
            Self::AsFound { mode, .. } if *mode != wanted => bail!(
                "asks about {wanted} mode; the card was found in {mode} mode and stays in it \
                 (--may-set-compute-mode sets it)"
            ),
            Self::AsFound { .. } => self.unchanged(),
            Self::Settable(guard) => guard.set(wanted),
        }
    }

    /// The mode is nobody's of ours: another program may change it meanwhile.
    pub fn unchanged(&self) -> Result<()> {
        let Self::AsFound { mode, read } = self else { return Ok(()) };
        match read()? {
            now if now == *mode => Ok(()),
            now => {
                bail!("the card was found in {mode} mode and is in {now} mode now, set by another program")
            }
        }
    }
}

/// The card before anything is done to it.
pub struct Found<'a> {
    pub mig: bool,
    pub mode: Mode,
    /// Whether the compute mode may be set.
    pub may_set: bool,
    /// Bytes of the card's memory that nobody uses.
    pub free: u64,
    /// Bytes that the experiments take at most.
    pub wanted: u64,
    pub others: &'a [Other],
}

impl Found<'_> {
    /// Why no experiment can be asked of this card, if so.
    pub fn obstacle(&self) -> Option<String> {
        let Self { mode, free, wanted, others, .. } = self;
        let who = words(others);
        if self.mig {
            return Some(
                "the card is in MIG mode, which is left as it is; the experiments are for a whole GPU"
                    .to_owned(),
            );
        }
        if self.may_set {
            let used = format!("the card is used by {who}: end them, or name another card (--gpu)");
            return (!others.is_empty()).then_some(used);
        }
        match mode {
            Mode::Default | Mode::ExclusiveProcess => {}
            Mode::Prohibited => return Some(format!("the card is in {mode} mode: no process may use it")),
            Mode::Other(_) => {
                return Some(format!("the card is in compute {mode}, of which nothing is known"));
            }
        }
        if others.is_empty() {
            return None;
        }
        if *mode == Mode::ExclusiveProcess {
            return Some(format!("the card is in {mode} mode and held by {who}"));
        }
        (free < wanted).then(|| {
            format!(
                "{who} would have to go without: the experiments take up to {} MiB, {} are free; \
                 ask for a smaller share (--memory)",
                wanted / MIB,
                free / MIB
            )
        })
    }
}

/// A process of somebody else's on the card.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Other {
    pub pid: u32,
    pub name: String,
    pub bytes: u64,
}

/// Who is on the card, as NVML lists it: PID → bytes.
pub fn others(listed: &BTreeMap<u32, u64>) -> Vec<Other> {
    let name = |pid: u32| {
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        // NVML's numbers are the host's: in a container they may name nobody, or somebody else.
        if name.is_empty() {
            "a process that is not seen from here".to_owned()
        } else {
            name.trim().to_owned()
        }
    };
    listed.iter().map(|(pid, bytes)| Other { pid: *pid, name: name(*pid), bytes: *bytes }).collect()
}

/// `PID 12 (python3, 300 MiB), ...`, or nobody.
pub fn words(others: &[Other]) -> String {
    let mut text = String::new();
    for Other { pid, name, bytes } in others {
        let comma = if text.is_empty() { "" } else { ", " };
        // Writing to a String cannot fail.
        let _ = write!(text, "{comma}PID {pid} ({name}, {} MiB)", bytes / MIB);
    }
    if text.is_empty() { "nobody".to_owned() } else { text }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::rc::Rc;

    use super::*;

    fn found(mode: Mode) -> (ComputeMode, Rc<Cell<Mode>>) {
        let board = Rc::new(Cell::new(mode));
        let read = board.clone();
        (ComputeMode::as_found(Box::new(move || Ok(read.get()))).unwrap(), board)
    }

    #[test]
    fn as_found_a_share_and_a_bare_process_take_the_mode_that_is_there() {
        for mode in [Mode::Default, Mode::ExclusiveProcess] {
            let (card, board) = found(mode);
            card.for_share().unwrap();
            card.for_bare().unwrap();
            card.require(mode).unwrap();
            drop(card);
            assert_eq!(board.get(), mode);
        }
    }

    #[test]
    fn as_found_what_needs_another_mode_is_refused_with_the_reason() {
        let (card, board) = found(Mode::Default);
        let words = card.require(Mode::ExclusiveProcess).unwrap_err().to_string();
        assert!(words.contains("found in DEFAULT") && words.contains("--may-set-compute-mode"), "{words}");
        assert_eq!(board.get(), Mode::Default);
    }

    #[test]
    fn a_mode_that_somebody_else_changes_is_noticed() {
        let (card, board) = found(Mode::Default);
        board.set(Mode::ExclusiveProcess);
        for answer in [card.for_share(), card.for_bare(), card.require(Mode::Default), card.unchanged()] {
            let words = answer.unwrap_err().to_string();
            assert!(words.contains("is in EXCLUSIVE_PROCESS mode now"), "{words}");
        }
    }

    #[test]
    fn a_card_on_which_nothing_can_be_asked_is_told_with_the_reason() {
        let neighbour = [Other { pid: 7, name: "trainer".to_owned(), bytes: 300 * MIB }];
        let found = |mode, may_set, others| Found { mig: false, mode, may_set, free: 10, wanted: 20, others };
        let told = |found: Found<'_>| found.obstacle().unwrap_or_default();
        for mode in [Mode::Default, Mode::ExclusiveProcess] {
            assert_eq!(told(found(mode, false, &[])), "");
            assert!(told(Found { mig: true, ..found(mode, false, &[]) }).contains("MIG mode"));
            assert!(told(found(mode, true, &neighbour)).contains("used by PID 7 (trainer, 300 MiB)"));
        }
        assert!(told(found(Mode::Prohibited, false, &[])).contains("PROHIBITED"));
        assert_eq!(told(found(Mode::Prohibited, true, &[])), "");
        assert!(told(found(Mode::Other(1), false, &[])).contains("mode 1"));
        assert!(told(found(Mode::ExclusiveProcess, false, &neighbour)).contains("held by PID 7"));
        assert!(told(found(Mode::Default, false, &neighbour)).contains("--memory"));
        assert_eq!(told(Found { free: 30, ..found(Mode::Default, false, &neighbour) }), "");
    }

    #[test]
    fn others_are_named_as_far_as_they_are_seen() {
        let me = std::process::id();
        let listed = BTreeMap::from([(me, 300 * MIB), (u32::MAX, 0)]);
        let text = words(&others(&listed));
        assert!(text.starts_with(&format!("PID {me} (")) && text.contains(", 300 MiB)"), "{text}");
        assert!(text.contains("not seen from here"), "{text}");
        assert_eq!(words(&[]), "nobody");
    }

    /// Every NVML function that this program names reads, but for one, which is named in one file only.
    #[test]
    fn no_other_function_that_changes_a_card_is_named_in_this_program() {
        let mut setters = Vec::new();
        let mut folders = vec![std::path::PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("src")];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    folders.push(path);
                    continue;
                }
                let text = fs::read_to_string(&path).unwrap();
                // The only way to a function of NVML is its name as a C string.
                for (at, _) in text.match_indices("c\"nvml") {
                    let name: String = text[at + 2..].chars().take_while(|c| *c != '"').collect();
                    let harmless = ["nvmlInit_v2", "nvmlShutdown"].contains(&name.as_str())
                        || name.starts_with("nvmlDeviceGet")
                        || name.starts_with("nvmlSystemGet");
                    if !harmless && !name.is_empty() && path.file_name().unwrap() != "card.rs" {
                        setters.push((path.file_name().unwrap().to_owned(), name));
                    }
                }
                let program = ["nvidia", "smi"].join("-");
                assert!(!text.contains(&format!("Command::new(\"{program}")), "{}", path.display());
            }
        }
        assert_eq!(setters, [("setter.rs".into(), "nvmlDeviceSetComputeMode".to_owned())]);
    }
}
