//! Completion: scripts for shells, and for `kubectl tranche` the words that kubectl asks for.
//!
//! kubectl completes the words of a plugin by running `kubectl_complete-NAME` with the words so far, the last of which is
//! to be completed. The answer has a word in each line and ends with a line of flags, as Cobra's `__complete` answers.

use std::ffi::OsString;

use clap::{Arg, Command, CommandFactory, ValueEnum, ValueHint};
use clap_complete::{Generator, shells};

use super::{Cli, called_as_plugin};

/// The hidden subcommand that answers kubectl.
pub const SUBCOMMAND: &str = "__complete";
pub const HELP: &str = "To complete `kubectl tranche`, put the program that `completion kubectl` prints on your PATH:\n\n  \
                        kubectl tranche completion kubectl > kubectl_complete-tranche\n  \
                        chmod +x kubectl_complete-tranche && sudo mv kubectl_complete-tranche /usr/local/bin/";
/// The program `kubectl_complete-tranche`, as the release archives have it.
const FOR_KUBECTL: &str = include_str!("../../hack/release/kubectl_complete-tranche");

/// Nothing but these words may follow (Cobra's ShellCompDirectiveNoFileComp).
const NO_FILES: u8 = 4;
/// Files may follow (ShellCompDirectiveDefault).
const FILES: u8 = 0;
/// No blank stands behind the word (ShellCompDirectiveNoSpace), and no files.
const NO_SPACE: u8 = 2 + NO_FILES;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Shell {
    Bash,
    Zsh,
    Fish,
    /// The program that kubectl runs to complete `kubectl tranche`, in any shell.
    Kubectl,
}

/// The script for a shell, for the name by which the program was called.
pub fn script(shell: Shell, called: Option<&OsString>) -> Vec<u8> {
    let name = if called_as_plugin(called) { "kubectl-tranche" } else { "tranche" };
    match shell {
        Shell::Bash => generate(shells::Bash, name),
        Shell::Zsh => generate(shells::Zsh, name),
        Shell::Fish => generate(shells::Fish, name),
        Shell::Kubectl => FOR_KUBECTL.as_bytes().to_vec(),
    }
}

fn generate(shell: impl Generator, name: &str) -> Vec<u8> {
    let mut script = Vec::new();
    let mut command = <Cli as CommandFactory>::command();
    clap_complete::generate(shell, &mut command, name, &mut script);
    script
}

/// What may stand in place of the last word, for kubectl. A word and what it is about are told apart by a tab.
pub fn answer(words: &[String]) -> String {
    let mut root = Cli::command();
    root.build();
    let (last, before) = words.split_last().map_or(("", &[][..]), |(last, before)| (last.as_str(), before));
    let (command, awaited) = position(&root, before);
    let (candidates, flags) = match awaited {
        Some(arg) => values(arg, ""),
        None => match last.split_once('=') {
            Some((flag, _)) if flag.starts_with("--") => match flag_of(command, flag) {
                Some(arg) => values(arg, &format!("{flag}=")),
                None => (Vec::new(), NO_FILES),
            },
            _ if last.starts_with('-') => (flags(command), NO_FILES),
            _ => operands(command),
        },
    };
    let fitting = candidates.iter().filter(|(word, _)| word.starts_with(last));
    let lines: String = fitting
        .map(|(word, about)| match about.is_empty() {
            true => format!("{word}\n"),
            false => format!("{word}\t{about}\n"),
        })
        .collect();
    format!("{lines}:{flags}\n")
}

/// The command that the words lead to, and the flag whose value comes next.
fn position<'a>(root: &'a Command, words: &[String]) -> (&'a Command, Option<&'a Arg>) {
    let (mut command, mut awaited) = (root, None);
    for word in words {
        if awaited.take().is_some() {
            continue;
        }
        if word.starts_with('-') {
            awaited = flag_of(command, word).filter(|arg| arg.get_action().takes_values());
        } else if let Some(below) = command.find_subcommand(word) {
            command = below;
        }
    }
    (command, awaited)
}

fn flag_of<'a>(command: &'a Command, word: &str) -> Option<&'a Arg> {
    command.get_arguments().find(|arg| match word.strip_prefix("--") {
        Some(long) => {
            arg.get_long() == Some(long)
                || arg.get_visible_aliases().is_some_and(|aliases| aliases.contains(&long))
        }
        None => word
            .strip_prefix('-')
            .is_some_and(|short| arg.get_short().map(String::from).as_deref() == Some(short)),
    })
}

type Candidates = (Vec<(String, String)>, u8);

fn values(arg: &Arg, before: &str) -> Candidates {
    let possible = arg.get_possible_values();
    if possible.is_empty() {
        let is_path = !matches!(arg.get_value_hint(), ValueHint::Unknown | ValueHint::Other);
        let is_path =
            is_path || arg.get_value_names().is_some_and(|names| names.iter().any(|name| is_file(name)));
        return (Vec::new(), if is_path { FILES } else { NO_FILES });
    }
    let visible = possible.iter().filter(|value| !value.is_hide_set());
    let told = visible.map(|value| {
        let about = value.get_help().map(|help| first_line(&help.to_string())).unwrap_or_default();
        (format!("{before}{}", value.get_name()), about)
    });
    (told.collect(), NO_FILES)
}

fn is_file(name: &str) -> bool {
    ["FILE", "DIR", "PATH"].iter().any(|one| name.starts_with(one))
}

fn flags(command: &Command) -> Vec<(String, String)> {
    let visible = command.get_arguments().filter(|arg| !arg.is_hide_set());
    let told = visible.filter_map(|arg| {
        let about = arg.get_help().map(|help| first_line(&help.to_string())).unwrap_or_default();
        Some((format!("--{}", arg.get_long()?), about))
    });
    told.collect()
}

/// Subcommands, or what stands in the first place behind one.
fn operands(command: &Command) -> Candidates {
    let below: Vec<&Command> = command.get_subcommands().filter(|one| !one.is_hide_set()).collect();
    if !below.is_empty() {
        let about =
            |one: &Command| one.get_about().map(|about| first_line(&about.to_string())).unwrap_or_default();
        return (below.iter().map(|one| (one.get_name().to_owned(), about(one))).collect(), NO_FILES);
    }
    if command.get_name() == "explain" {
        let kinds = crate::cluster::WorkloadKind::ALL.map(crate::cluster::WorkloadKind::as_str);
        let kinds = ["pod", "resourceclaim"].into_iter().chain(kinds);
        return (kinds.map(|kind| (format!("{}/", kind.to_lowercase()), String::new())).collect(), NO_SPACE);
    }
    command.get_positionals().next().map_or((Vec::new(), NO_FILES), |arg| values(arg, ""))
}

fn first_line(text: &str) -> String {
    text.lines().next().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scripts_know_the_flags_and_the_name() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            for name in ["tranche", "kubectl-tranche"] {
                let script = String::from_utf8(script(shell, Some(&name.into()))).unwrap();
                assert!(script.contains(name) && script.contains("driver-root"), "{shell:?} {name}");
            }
        }
        assert!(script(Shell::Kubectl, None).starts_with(b"#!/bin/sh\nexec kubectl-tranche __complete"));
    }

    fn words(line: &str) -> (Vec<String>, String) {
        let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
        let answer = answer(&words);
        let mut lines: Vec<String> =
            answer.lines().map(|line| line.split('\t').next().unwrap_or_default().to_owned()).collect();
        let flags = lines.pop().unwrap();
        (lines, flags)
    }

    #[test]
    fn kubectl_is_told_commands_flags_and_values() {
        let (commands, flags) = words("");
        assert!(
            ["top", "explain", "plan"].iter().all(|one| commands.contains(&(*one).to_owned())),
            "{commands:?}"
        );
        assert!(!commands.iter().any(|one| one.starts_with("__") || one == "mps-launch"), "{commands:?}");
        assert_eq!(flags, ":4");
        assert_eq!(words("expl"), (vec!["explain".to_owned()], ":4".to_owned()));
        let of = |all: &[&str]| all.iter().map(|one| (*one).to_owned()).collect::<Vec<_>>();
        assert_eq!(words("top --cont"), (of(&["--context"]), ":4".to_owned()));
        assert_eq!(words("top -o "), (of(&["map", "table", "json", "yaml"]), ":4".to_owned()));
        assert_eq!(words("top --output=j"), (of(&["--output=json"]), ":4".to_owned()));
        assert_eq!(words("explain stat"), (of(&["statefulset/"]), ":6".to_owned()));
        assert_eq!(words("explain -f po"), (of(&[]), ":0".to_owned()));
        assert_eq!(words("plan --filename c"), (of(&[]), ":0".to_owned()));
        assert_eq!(words("top --node n"), (of(&[]), ":4".to_owned()));
        assert_eq!(words("completion "), (of(&["bash", "zsh", "fish", "kubectl"]), ":4".to_owned()));
        assert_eq!(words("inspect "), (of(&["state", "ready", "metrics", "log-level"]), ":4".to_owned()));
    }
}
