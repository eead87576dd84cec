//! The kubectl plugin as its archive has it, under the real kubectl.

use std::fs;
use std::process::Command;

use crate::rig::{Rig, root};

fn run(command: &mut Command) -> String {
    let out = command.output().unwrap();
    assert!(out.status.success(), "{command:?}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).unwrap()
}

#[test]
#[ignore = "needs a rig"]
fn kubectl_completes_the_words_of_an_unpacked_archive() {
    let _rig = Rig::staged("kubectl_completes_the_words_of_an_unpacked_archive");
    let (folder, unpacked) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut pack = Command::new(root().join("hack/release/plugin.sh"));
    // The program itself, unoptimised, would take a minute to pack.
    let program = folder.path().join("program");
    fs::write(&program, format!("#!/bin/sh\nexec {} \"$@\"\n", env!("CARGO_BIN_EXE_tranche"))).unwrap();
    let archive = run(pack.args(["1.2.3", "amd64"]).arg(&program).arg(folder.path()));
    run(Command::new("tar").args(["-xzf", archive.trim()]).arg("-C").arg(unpacked.path()));
    assert!(fs::metadata(unpacked.path().join("kubectl_complete-tranche")).unwrap().is_file());
    let path = format!("{}:{}", unpacked.path().display(), std::env::var("PATH").unwrap());
    let kubectl = |words: &[&str]| {
        let mut kubectl = Command::new(root().join("hack/rig/rig"));
        let rig = std::env::var("TRANCHE_RIG").unwrap();
        run(kubectl.arg("kubectl").args(words).env("PATH", &path).env("RIG_NAME", rig).current_dir(root()))
    };
    let commands = kubectl(&["__complete", "tranche", ""]);
    assert!(commands.contains("explain\t") && commands.contains("top\t"), "{commands}");
    // No words of its own come behind top: an answer without words, and without files.
    assert_eq!(kubectl(&["__complete", "tranche", "top", ""]), ":4\n");
    let flags = kubectl(&["__complete", "tranche", "top", "--as"]);
    assert!(flags.contains("--as\t") && flags.contains("--as-group\t"), "{flags}");
    assert!(kubectl(&["__complete", "tranche", "top", "-o", ""]).contains("table\t"));
    assert!(kubectl(&["tranche", "version"]).starts_with("tranche "));
}
