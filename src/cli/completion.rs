//! Completion scripts. For `kubectl tranche` the script completes the name `kubectl-tranche`.

use std::ffi::OsString;

use clap::ValueEnum;
use clap_complete::{Generator, shells};

use super::{Cli, called_as_plugin};

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Shell {
    Bash,
    Zsh,
    Fish,
}

/// The script for a shell, for the name by which the program was called.
pub fn script(shell: Shell, called: Option<&OsString>) -> Vec<u8> {
    let name = if called_as_plugin(called) { "kubectl-tranche" } else { "tranche" };
    match shell {
        Shell::Bash => generate(shells::Bash, name),
        Shell::Zsh => generate(shells::Zsh, name),
        Shell::Fish => generate(shells::Fish, name),
    }
}

fn generate(shell: impl Generator, name: &str) -> Vec<u8> {
    let mut script = Vec::new();
    let mut command = <Cli as clap::CommandFactory>::command();
    clap_complete::generate(shell, &mut command, name, &mut script);
    script
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scripts_know_the_flags_and_the_name() {
        for &shell in Shell::value_variants() {
            for name in ["tranche", "kubectl-tranche"] {
                let script = String::from_utf8(script(shell, Some(&name.into()))).unwrap();
                assert!(script.contains(name) && script.contains("driver-root"), "{shell:?} {name}");
            }
        }
    }
}
