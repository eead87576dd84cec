//! The defaults that help texts name are the ones that flags have, and the chart's schema takes no value that a flag
//! refuses.

use clap::{Arg, CommandFactory};
use regex::Regex;
use serde_json::Value;

use super::controller::lease_time;
use super::{interval, log_and_controller, log_and_mps, log_and_node, log_and_webhook};
use crate::cli::{self, Cli, Command};

/// Defaults that are no value which could be given: without the flag something else is done.
const IN_WORDS: [&str; 8] = [
    "never",
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

/// The values of the chart that are times, and the least and the most of each that is taken.
const TIMES: [(&str, &str, &str); 8] = [
    ("/watchdog/period", "100ms", "24h"),
    ("/mps/keepWarm", "100ms", "24h"),
    ("/controller/leaseDuration", "5s", "5m"),
    ("/controller/holds/settle", "100ms", "24h"),
    ("/controller/holds/keepWarm", "100ms", "24h"),
    ("/controller/moves/rest", "100ms", "24h"),
    ("/controller/reservationDuration", "100ms", "24h"),
    ("/controller/starvationTimeout", "100ms", "24h"),
];

/// Times of one and of two units, around all bounds.
fn times() -> Vec<String> {
    let around = |bound: u32| bound.saturating_sub(1)..=bound + 1;
    let bounds = [9, 60, 99, 100, 999, 1000, 1440, 9999, 10_000, 80_000, 86_400, 99_999, 86_400_000];
    let numbers: Vec<u32> = (0..=400).chain(bounds.into_iter().flat_map(around)).collect();
    let one = numbers.iter().flat_map(|number| ["ms", "s", "m", "h"].map(|unit| format!("{number}{unit}")));
    let pairs = [("h", "m"), ("h", "s"), ("m", "s"), ("s", "ms"), ("m", "m")];
    let two = pairs.into_iter().flat_map(|(first, second)| {
        let more = |a: &u32| [0, 1, 30, 59, 60, 500].map(|b| format!("{a}{first}{b}{second}"));
        numbers.iter().flat_map(more).collect::<Vec<_>>()
    });
    one.chain(two).chain(["", "60", "1.5s", "1d", "s"].map(str::to_owned)).collect()
}

#[test]
fn the_charts_schema_takes_no_time_that_a_flag_refuses() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/charts/tranche/values.schema.json");
    let schema: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let times = times();
    for (value, least, most) in TIMES {
        let place = value.replace('/', "/properties/");
        let own = schema.pointer(&place).unwrap_or_else(|| panic!("the schema has no {place}"));
        let own =
            own["$ref"].as_str().map_or(own, |path| schema.pointer(path.trim_start_matches('#')).unwrap());
        let pattern = Regex::new(own["pattern"].as_str().unwrap()).unwrap();
        let is_taken = |time: &str| match value {
            "/controller/leaseDuration" => lease_time(time).is_ok(),
            _ => interval(time).is_ok(),
        };
        let wrong = times.iter().filter(|time| pattern.is_match(time) && !is_taken(time));
        assert_eq!(wrong.collect::<Vec<_>>(), [""; 0], "{value}");
        for usual in [least, "5s", "60s", "90s", "1m", "1m30s", "5m", most] {
            assert!(pattern.is_match(usual) && is_taken(usual), "{value}: {usual}");
        }
    }
}
