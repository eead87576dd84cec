//! The environment variables that flags are read from. Each is named after its flag: those that only Tranche reads
//! begin with [`PREFIX`], those that Kubernetes and its tools have named keep that name.
//!
//! Until version 0.2, variables are also read by the names that they had before they got the prefix.

use std::ffi::OsStr;

use clap::Command;

const PREFIX: &str = "TRANCHE_";
/// Named by Kubernetes' tools and by habit.
const COMMON: [&str; 5] = ["KUBECONFIG", "NODE_NAME", "POD_NAME", "POD_NAMESPACE", "POD_UID"];

/// Each variable's old name and its name.
const RENAMED: [(&str, &str); 53] = [
    ("ALWAYS_HOLD", "TRANCHE_ALWAYS_HOLD"),
    ("BOOT_ID_FILE", "TRANCHE_BOOT_ID_FILE"),
    ("CDI_DIR", "TRANCHE_CDI_DIR"),
    ("CGROUP_ROOT", "TRANCHE_CGROUP_ROOT"),
    ("CHECK_INTERVAL", "TRANCHE_CHECK_INTERVAL"),
    ("DEPLOYMENT", "TRANCHE_DEPLOYMENT"),
    ("DEV_ROOT", "TRANCHE_DEV_ROOT"),
    ("DISCOVERY_INTERVAL", "TRANCHE_DISCOVERY_INTERVAL"),
    ("DRIVER_ROOT", "TRANCHE_DRIVER_ROOT"),
    ("DRIVER_ROOT_ON_HOST", "TRANCHE_DRIVER_ROOT_ON_HOST"),
    ("EXCLUSIVE_GPUS", "TRANCHE_EXCLUSIVE_GPUS"),
    ("HEALTH_ADDRESS", "TRANCHE_HEALTH_ADDRESS"),
    ("HOLD_AHEAD", "TRANCHE_HOLD_AHEAD"),
    ("KEEP", "TRANCHE_RESERVATION_DURATION"),
    ("KEEP_WARM", "TRANCHE_KEEP_WARM"),
    ("KUBELET_DIR", "TRANCHE_KUBELET_DIR"),
    ("LEASE_DURATION", "TRANCHE_LEASE_DURATION"),
    ("LEASE_NAME", "TRANCHE_LEASE_NAME"),
    ("LOG_FORMAT", "TRANCHE_LOG_FORMAT"),
    ("LOG_LEVEL", "TRANCHE_LOG_LEVEL"),
    ("MPS_CONTROL", "TRANCHE_MPS_CONTROL"),
    ("MPS_DIR", "TRANCHE_MPS_DIR"),
    ("MPS_MOUNTS", "TRANCHE_MPS_MOUNTS"),
    ("MPS_SERVER_MEMORY", "TRANCHE_MPS_SERVER_MEMORY"),
    ("NEVER_HOLD", "TRANCHE_NEVER_HOLD"),
    ("OPS_ADDRESS", "TRANCHE_OPS_ADDRESS"),
    ("OPS_SOCKET", "TRANCHE_OPS_SOCKET"),
    ("PASSES", "TRANCHE_MAX_OVERTAKES"),
    ("PATIENCE", "TRANCHE_STARVATION_TIMEOUT"),
    ("POLICY", "TRANCHE_POLICY"),
    ("PROCESSES_PER_SHARE", "TRANCHE_PROCESSES_PER_SHARE"),
    ("PROCESS_ROOT", "TRANCHE_PROCESS_ROOT"),
    ("PROC_ROOT", "TRANCHE_PROC_ROOT"),
    ("SETTLE", "TRANCHE_HOLD_SETTLE_DURATION"),
    ("SHM_FILES", "TRANCHE_SHM_FILES"),
    ("SHM_SIZE", "TRANCHE_SHM_SIZE"),
    ("STATE_DIR", "TRANCHE_STATE_DIR"),
    ("SWEEP_INTERVAL", "TRANCHE_SWEEP_INTERVAL"),
    ("SYSFS_ROOT", "TRANCHE_SYSFS_ROOT"),
    ("UNASKED", "TRANCHE_DEFAULT_REQUEST"),
    ("WATCHDOG", "TRANCHE_WATCHDOG"),
    ("WATCHDOG_GRACE", "TRANCHE_WATCHDOG_GRACE"),
    ("WATCHDOG_PERIOD", "TRANCHE_WATCHDOG_PERIOD"),
    ("WATCHDOG_PIDS", "TRANCHE_WATCHDOG_PIDS"),
    ("WEBHOOK_ADDRESS", "TRANCHE_WEBHOOK_ADDRESS"),
    ("WEBHOOK_CERTIFICATES", "TRANCHE_WEBHOOK_CERTIFICATES"),
    ("WEBHOOK_CERTIFICATE_LIFE", "TRANCHE_WEBHOOK_CERTIFICATE_LIFE"),
    ("WEBHOOK_CHECK_INTERVAL", "TRANCHE_WEBHOOK_CHECK_INTERVAL"),
    ("WEBHOOK_CLIENT_CA", "TRANCHE_WEBHOOK_CLIENT_CA"),
    ("WEBHOOK_CLIENT_NAMES", "TRANCHE_WEBHOOK_CLIENT_NAMES"),
    ("WEBHOOK_CONFIGURATION", "TRANCHE_WEBHOOK_CONFIGURATION"),
    ("WEBHOOK_NAMES", "TRANCHE_WEBHOOK_NAMES"),
    ("WEBHOOK_SECRET", "TRANCHE_WEBHOOK_SECRET"),
];

/// Name of the variable that a flag such as `--node-name` is read from.
pub fn of_flag(flag: &str) -> String {
    let name = flag.trim_start_matches('-').replace('-', "_").to_uppercase();
    match COMMON.contains(&name.as_str()) {
        true => name,
        false => format!("{PREFIX}{name}"),
    }
}

/// True if the environment has the variable, and a value in it: an empty value counts as not given.
pub fn is_set(name: &str) -> bool {
    std::env::var_os(name).is_some_and(|value| !value.is_empty())
}

/// The command, reading variables by their old names where only those are set.
pub fn read_old_names<F: Fn(&str) -> bool>(command: Command, is_set: &F) -> Command {
    let read = |arg: clap::Arg| match arg.get_env().and_then(renamed) {
        Some((old, new)) if is_set(old) && !is_set(new) => arg.env(old),
        _ => arg,
    };
    command.mut_args(read).mut_subcommands(|subcommand| read_old_names(subcommand, is_set))
}

/// A warning for each old name that is set and that concerns this command itself, its subcommands left out.
pub fn warnings(command: &Command, is_set: impl Fn(&str) -> bool) -> Vec<String> {
    let read: Vec<&OsStr> = command.get_arguments().filter_map(clap::Arg::get_env).collect();
    let concerned = RENAMED.iter().filter(|(old, new)| {
        let concerns = |name: &str| read.contains(&OsStr::new(name));
        is_set(old) && (concerns(old) || concerns(new))
    });
    concerned
        .map(|(old, new)| match is_set(new) {
            false => {
                format!("environment variable {old} is now called {new}; version 0.2 will not read {old}")
            }
            true => format!("environment variable {old} is ignored because {new} is set; remove {old}"),
        })
        .collect()
}

fn renamed(name: &OsStr) -> Option<(&'static str, &'static str)> {
    RENAMED.into_iter().find(|(_, new)| OsStr::new(new) == name)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use clap::{Arg, CommandFactory};

    use super::*;
    use crate::cli::Cli;

    /// All arguments of the command and of its subcommands.
    fn arguments(command: &Command) -> Vec<&Arg> {
        command.get_arguments().chain(command.get_subcommands().flat_map(arguments)).collect()
    }

    fn variable(arg: &Arg) -> Option<&str> {
        arg.get_env().map(|name| name.to_str().unwrap())
    }

    #[test]
    fn variables_are_named_after_their_flags() {
        let command = Cli::command();
        let arguments = arguments(&command);
        let with_variable = arguments.iter().filter_map(|arg| Some((arg.get_long()?, variable(arg)?)));
        let names: BTreeSet<&str> = with_variable
            .map(|(flag, name)| {
                assert_eq!(name, of_flag(&format!("--{flag}")));
                assert!(COMMON.contains(&name) || name.starts_with(PREFIX), "{name}");
                name
            })
            .collect();
        let renamed: BTreeSet<&str> = RENAMED.iter().map(|(_, new)| *new).collect();
        assert_eq!(renamed.len(), RENAMED.len(), "a variable has one old name");
        assert!(renamed.is_subset(&names), "{:?}", renamed.difference(&names));
    }

    #[test]
    fn old_names_are_read_unless_the_new_ones_are_set() {
        for (old, new) in RENAMED {
            let readers = |command: &Command, name: &str| {
                arguments(command).into_iter().filter(|arg| variable(arg) == Some(name)).count()
            };
            let count = readers(&Cli::command(), new);
            assert!(count > 0, "{new}");
            let command = read_old_names(Cli::command(), &|name: &str| name == old);
            assert_eq!((readers(&command, old), readers(&command, new)), (count, 0), "{old}");
            let command = read_old_names(Cli::command(), &|name: &str| name == old || name == new);
            assert_eq!((readers(&command, old), readers(&command, new)), (0, count), "{new} wins");
        }
    }

    #[test]
    fn each_old_name_is_told_once_and_only_to_those_who_read_it() {
        let command = Cli::command();
        let controller = command.find_subcommand("controller").unwrap();
        let told = |set: &[&str]| warnings(controller, |name| set.contains(&name));
        assert_eq!(
            told(&["PATIENCE", "SHM_SIZE", "POD_NAME", "TRANCHE_POLICY"]),
            [
                "environment variable PATIENCE is now called TRANCHE_STARVATION_TIMEOUT; version 0.2 will not read PATIENCE"
            ]
        );
        assert_eq!(
            told(&["PATIENCE", "TRANCHE_STARVATION_TIMEOUT"]),
            [
                "environment variable PATIENCE is ignored because TRANCHE_STARVATION_TIMEOUT is set; remove PATIENCE"
            ]
        );
        let only_old = read_old_names(Cli::command(), &|name: &str| name == "PATIENCE");
        let controller = only_old.find_subcommand("controller").unwrap();
        assert_eq!(warnings(controller, |name| name == "PATIENCE").len(), 1);
    }

    #[test]
    fn old_flags_are_understood() {
        for (subcommand, old) in [
            ("controller", "passes"),
            ("controller", "patience"),
            ("controller", "keep"),
            ("controller", "settle"),
            ("node", "unasked"),
        ] {
            let flag = format!("--{old}=x");
            let parsed = Cli::command().try_get_matches_from(["tranche", subcommand, &flag]);
            assert!(parsed.is_ok(), "{flag}");
            let help = Cli::command().find_subcommand_mut(subcommand).unwrap().render_long_help().to_string();
            assert!(!help.contains(&format!("--{old} ")), "{flag} is hidden");
        }
    }
}
