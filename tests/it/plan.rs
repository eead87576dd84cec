//! `tranche plan` as a person calls it. Each folder below tests/data/plan is a case: `expected.txt` holds
//! commands (`$ tranche ...`) that run in it, each followed by what they print, standard error after
//! standard output, and by `[exit N]`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

fn cases() -> Vec<PathBuf> {
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/plan");
    let mut cases: Vec<_> = fs::read_dir(top).unwrap().map(|entry| entry.unwrap().path()).collect();
    cases.sort();
    cases
}

/// Runs one command line of a script in the case's folder.
fn run(line: &str, folder: &Path) -> String {
    let args = line.strip_prefix("$ tranche ").expect("a command begins with $ tranche").split(' ');
    let output = Command::new(env!("CARGO_BIN_EXE_tranche"))
        .args(args)
        .current_dir(folder)
        .env_clear()
        .output()
        .unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    let code = output.status.code().expect("it ends by itself");
    format!("{line}\n{}{}[exit {code}]\n", text(output.stdout), text(output.stderr))
}

#[test]
fn each_case_is_answered_as_written() {
    let cases = cases();
    assert!(cases.len() >= 9, "the cases are missing");
    let mut wrong = Vec::new();
    for case in cases {
        let expected = fs::read_to_string(case.join("expected.txt")).unwrap();
        let commands = expected.lines().filter(|line| line.starts_with("$ "));
        let seen: Vec<_> = commands.map(|line| run(line, &case)).collect();
        assert!(!seen.is_empty(), "{} has no command", case.display());
        if seen.join("\n") != expected {
            wrong.push(format!("-- {} answers:\n{}", case.display(), seen.join("\n")));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn nobody_to_ask_is_told_with_what_to_do() {
    let case = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/plan/whole-gpu");
    // Nothing can listen at port 0.
    let seen = run("$ tranche plan --claim claim.yaml --address 127.0.0.1:0", &case);
    assert!(seen.contains("nothing answers at 127.0.0.1:0"), "{seen}");
    assert!(seen.ends_with("[exit 1]\n"), "{seen}");
}
