//! The defaults that help texts name are the ones that flags have.

use clap::{Arg, CommandFactory};

use super::{log_and_controller, log_and_mps, log_and_node, log_and_webhook};
use crate::cli::{self, Cli, Command};

/// Defaults that are no value which could be given: without the flag something else is done.
const IN_WORDS: [&str; 7] = [
    "<driver-root>/dev if nvidiactl is there, else /dev",
    "any",
    "looked for below the driver root",
    "none",
    "none, everybody may call",
    "none, they are made and renewed here",
    "the port after --ops-address",
];

/// What each subcommand cannot do without.
const REQUIRED: [(&str, &[&str]); 4] = [
    ("node", &["--node-name=node-a"]),
    ("mps", &[]),
    ("controller", &["--pod-name=pod-a", "--pod-namespace=system"]),
    ("webhook", &["--pod-namespace=system"]),
];

/// What the help text of a flag says between `[default: ` and `]`.
fn default_in_help(arg: &Arg) -> Option<String> {
    let help = arg.get_help()?.to_string();
    let (_, default) = help.split_once("[default: ")?;
    let default = default.strip_suffix(']').unwrap_or_else(|| panic!("the default stands last: {help}"));
    Some(default.replace("<kubelet-dir>", "/var/lib/kubelet").replace("<namespace>", "system"))
}

/// The settings that a command line gives, as text.
fn settings(subcommand: &str, flags: &[&str]) -> String {
    let words = ["tranche", subcommand].into_iter().chain(flags.iter().copied());
    let Cli { log, command, .. } = cli::parse(words.map(Into::into)).unwrap_or_else(|said| panic!("{said}"));
    match command {
        Command::Node(args) => format!("{:#?}", log_and_node(log, *args).unwrap()),
        Command::Mps(args) => format!("{:#?}", log_and_mps(log, *args).unwrap()),
        Command::Controller(args) => format!("{:#?}", log_and_controller(log, *args).unwrap()),
        Command::Webhook(args) => format!("{:#?}", log_and_webhook(log, *args).unwrap()),
        other => panic!("{other:?} has no settings"),
    }
}

#[test]
fn a_default_in_a_help_text_is_what_the_flag_has() {
    let command = Cli::command();
    let mut compared = 0;
    for (subcommand, required) in REQUIRED {
        let usual = settings(subcommand, required);
        let own = command.find_subcommand(subcommand).unwrap();
        for arg in command.get_arguments().chain(own.get_arguments()) {
            let (Some(flag), Some(default)) = (arg.get_long(), default_in_help(arg)) else { continue };
            if IN_WORDS.contains(&default.as_str()) {
                continue;
            }
            let given = format!("--{flag}={default}");
            let flags: Vec<&str> = required.iter().copied().chain([given.as_str()]).collect();
            assert_eq!(settings(subcommand, &flags), usual, "{subcommand} {given}");
            compared += 1;
        }
    }
    assert!(compared >= 60, "only {compared} defaults were found");
}
