//! The kubectl plugin as its archive has it, under the real kubectl, and whose cluster its commands ask.

use std::fs;
use std::process::Command;

use serde_json::json;

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

/// The kubeconfig of somebody who works with another cluster at the moment, which cannot be reached.
#[test]
#[ignore = "needs a rig"]
fn each_command_asks_the_cluster_of_the_context_that_is_named() {
    let rig = Rig::staged("each_command_asks_the_cluster_of_the_context_that_is_named");
    let mut config: serde_json::Value =
        serde_json::from_str(&rig.kubectl(&["config", "view", "--raw", "--minify", "-o", "json"])).unwrap();
    let own = config["current-context"].as_str().unwrap().to_owned();
    let list = |what: &str| config[what].as_array().unwrap().clone();
    let (mut clusters, mut contexts) = (list("clusters"), list("contexts"));
    clusters.push(json!({"name": "elsewhere", "cluster": {"server": "https://127.0.0.1:1"}}));
    let user = contexts[0]["context"]["user"].clone();
    contexts.push(json!({"name": "elsewhere", "context": {"cluster": "elsewhere", "user": user}}));
    config["clusters"] = clusters.into();
    config["contexts"] = contexts.into();
    config["current-context"] = json!("elsewhere");
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(&file, config.to_string()).unwrap();
    let said = |words: &[&str]| {
        let mut tranche = Command::new(env!("CARGO_BIN_EXE_tranche"));
        let out = tranche.args(words).env("KUBECONFIG", file.path()).output().unwrap();
        let text = String::from_utf8([out.stdout, out.stderr].concat()).unwrap();
        (out.status.code(), text)
    };
    let commands: [(&[&str], &str); 4] = [
        (&["top", "-o", "yaml"], "grantableMiB: "),
        (&["top"], "devices"),
        (&["rebalance", "-o", "yaml"], "waiting:"),
        (&["explain", "pod/nobody"], "no pod nobody"),
    ];
    for (words, expected) in commands {
        let (_, there) = said(&[words, &["--context", &own]].concat());
        assert!(there.contains(expected), "{words:?}: {there}");
        let (code, elsewhere) = said(words);
        assert!(code != Some(0) && elsewhere.contains("127.0.0.1:1"), "{words:?}: {elsewhere}");
    }
    let (code, typo) = said(&["top", "--context", "nowhere"]);
    assert_eq!(code, Some(2), "{typo}");
    assert!(typo.contains("context \"nowhere\" does not exist; its contexts are"), "{typo}");
}
