//! `tranche simulate` as a person or a script calls it: on a small trace of its own.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

const NODES: &str = "sn,cpu_milli,memory_mib,gpu,model\n\
                     big-1,64000,262144,4,B\nbig-2,64000,262144,4,B\nsmall,6000,32768,2,S\n";
const PODS: &str = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec\n\
                    whole,8000,8192,1,1000,\nhalf,2000,4096,1,500,\nmost,2000,4096,1,700,\nrest,2000,4096,1,300,\n";

fn simulate(folder: &Path, more: &[&str]) -> Output {
    fs::write(folder.join("nodes.csv"), NODES).unwrap();
    fs::write(folder.join("pods.csv"), PODS).unwrap();
    Command::new(env!("CARGO_BIN_EXE_tranche"))
        .args(["simulate", "--nodes", "nodes.csv", "--pods", "pods.csv"])
        .args(more)
        .current_dir(folder)
        .env_clear()
        .output()
        .unwrap()
}

fn objects(output: &Output) -> Vec<Value> {
    assert!(output.status.success(), "{output:?}");
    let text = std::str::from_utf8(&output.stdout).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn json_is_one_object_per_policy_and_csv_and_svg_are_written() {
    let folder = tempfile::tempdir().unwrap();
    let files = ["--csv", "out.csv", "--svg", "out.svg"];
    let all = objects(&simulate(
        folder.path(),
        &[&["--seeds", "2", "--load", "1.2", "--json"][..], &files].concat(),
    ));
    let policies: Vec<&str> = all.iter().map(|one| one["policy"].as_str().unwrap()).collect();
    assert_eq!(policies, ["pack", "spread", "fragmentation", "kube-default"]);
    for one in &all {
        assert_eq!((one["load"].as_f64(), one["seeds"].as_u64()), (Some(1.2), Some(2)), "{one}");
        let percent = |key: &str| one[key].as_f64().unwrap_or_else(|| panic!("{key} is missing: {one}"));
        let (least, mean, most) = (
            percent("allocated_percent_min"),
            percent("allocated_percent"),
            percent("allocated_percent_max"),
        );
        assert!(0.0 < least && least <= mean && mean <= most && most <= 100.0, "{one}");
    }
    let csv = fs::read_to_string(folder.path().join("out.csv")).unwrap();
    assert!(policies.iter().all(|policy| csv.contains(&format!("\n{policy},120,"))), "{csv}");
    let svg = fs::read_to_string(folder.path().join("out.svg")).unwrap();
    assert_eq!(svg.matches("<polyline").count(), policies.len());
}

#[test]
fn one_policy_and_its_seeds_can_be_named_and_a_mistake_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let one = objects(&simulate(folder.path(), &["--policy", "spread", "--json"]));
    assert_eq!(one.len(), 1);
    assert_eq!(
        (one[0]["policy"].as_str(), one[0]["load"].as_f64(), one[0]["seeds"].as_u64()),
        (Some("spread"), Some(1.3), Some(10))
    );
    let refused = simulate(folder.path(), &["--policy", "best"]);
    let words = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        !refused.status.success() && words.contains("pack, spread, fragmentation, kube-default"),
        "{words}"
    );
}

/// The files as docs/controller.md has them.
#[test]
fn gpus_are_cut_as_a_file_of_profiles_says() {
    let folder = tempfile::tempdir().unwrap();
    let page = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/controller.md")).unwrap();
    let example = |header: &str| {
        let from = page.find(header).unwrap_or_else(|| panic!("docs/controller.md has no {header}"));
        let lines = page[from..].lines().map(str::trim).take_while(|line| !line.is_empty() && *line != "```");
        lines.collect::<Vec<_>>().join("\n")
    };
    for (name, header) in
        [("nodes.csv", "sn,cpu_milli,"), ("pods.csv", "name,cpu_milli,"), ("profiles.csv", "model,profile,")]
    {
        fs::write(folder.path().join(name), example(header)).unwrap();
    }
    let run = |more: &[&str]| {
        Command::new(env!("CARGO_BIN_EXE_tranche"))
            .args(["simulate", "--nodes", "nodes.csv", "--pods", "pods.csv", "--load", "1", "--json"])
            .args(more)
            .current_dir(folder.path())
            .env_clear()
            .output()
            .unwrap()
    };
    for one in objects(&run(&["--mig-profiles", "profiles.csv"])) {
        assert!(one["allocated_percent"].as_f64().unwrap() > 50.0, "{one}");
    }
    let refused = run(&[]);
    let words = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        refused.status.code() == Some(2) && words.contains("field mig_gpus: --mig-profiles does not say"),
        "{words}"
    );
}
