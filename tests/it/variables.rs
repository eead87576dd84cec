//! Settings from the environment, as the program itself reads them.

use std::process::Command;

/// What the program says on standard error with these variables, and nothing else in its environment.
fn said(subcommand: &str, variables: &[(&str, &str)]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tranche"));
    command.arg(subcommand).env_clear().envs(variables.iter().copied());
    String::from_utf8(command.output().unwrap().stderr).unwrap()
}

#[test]
fn a_variable_is_read_by_its_old_name_unless_the_new_one_is_set() {
    let words = "--starvation-timeout (or TRANCHE_STARVATION_TIMEOUT): \"soon\" is not a valid duration";
    assert!(said("controller", &[("TRANCHE_STARVATION_TIMEOUT", "soon")]).contains(words));
    assert!(said("controller", &[("PATIENCE", "soon")]).contains(words));
    assert!(said("controller", &[("PATIENCE", "soon"), ("TRANCHE_STARVATION_TIMEOUT", "")]).contains(words));
    let both = said("controller", &[("PATIENCE", "soon"), ("TRANCHE_STARVATION_TIMEOUT", "5s")]);
    assert!(both.contains("--pod-name") && !both.contains("--starvation-timeout"), "{both}");
}

#[test]
fn the_log_names_the_new_variable_once() {
    // No folder can be made there, so that the program ends.
    let said = said("mps", &[("MPS_DIR", "/dev/null/mps"), ("TRANCHE_OPS_SOCKET", "off")]);
    let told = said.matches("environment variable MPS_DIR is now called TRANCHE_MPS_DIR").count();
    assert!(told == 1 && said.contains("cannot use the folder /dev/null/mps"), "{said}");
}
