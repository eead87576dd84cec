//! A client that nobody here wrote: the vendor's Python binding.

use std::path::Path;
use std::process::Command;

use crate::rig::{Rig, built};

/// What the binding is answered by this library.
fn probe(library: &Path) -> serde_json::Value {
    ask("probe.py", library)
}

/// What one of the scripts beside this folder prints about a library.
fn ask(script: &str, library: &Path) -> serde_json::Value {
    let binding = std::env::var_os("NVML_BINDING").expect("NVML_BINDING is a folder with pynvml.py");
    let output = Command::new("python3")
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(script))
        .arg(library)
        .env("PYTHONPATH", binding)
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .output()
        .expect("started");
    assert!(output.status.success(), "{}: {}", library.display(), String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

/// It looks each name up before it calls it.
#[test]
#[ignore = "needs python3 and NVML_BINDING: hack/test-unit.sh"]
fn the_python_binding_does_not_find_what_the_version_lacks() {
    let rig = Rig::new(r#"{"profile":"h100","driver_version":"550.163.01"}"#);
    rig.cli(&[
        "install",
        "--lib",
        &built().to_string_lossy(),
        "--driver",
        "550.163.01",
        &rig.dir.to_string_lossy(),
    ]);
    let answers = probe(&rig.library());
    assert_eq!(answers["driver"], "550.163.01");
    assert_eq!(answers["gpus"][0]["odd"]["memoryLimits"], "missing");
    let calls = &answers["gpus"][0]["calls"];
    assert!(calls["nvmlDeviceGetUUID"].as_str().is_some_and(|uuid| uuid.starts_with("GPU-")));
    assert!(calls["nvmlDeviceGetMemoryInfo"]["total"].as_u64().is_some_and(|bytes| bytes > 0), "{calls}");
}

#[test]
#[ignore = "needs python3 and NVML_BINDING: hack/test-unit.sh"]
fn the_python_binding_is_content() {
    for board in fake_nvml::board::BOARDS {
        let profile = board.key;
        let rig = Rig::new(&format!(r#"{{"profile":"{profile}","count":2,"driver_version":"615.10.01"}}"#));
        if board.mig_capable() {
            rig.cli(&["set-mig", "1", "on"]);
        }
        rig.cli(&["process", "add", "0", "42", "1000"]);
        let answers = probe(&rig.library());
        assert_eq!(answers["driver"], "615.10.01");
        assert_eq!(answers["count"], 2);
        let calls = &answers["gpus"][0]["calls"];
        assert!(calls["nvmlDeviceGetUUID"].as_str().is_some_and(|u| u.starts_with("GPU-")), "{profile}");
        assert_eq!(calls["nvmlDeviceGetComputeRunningProcesses"][0]["pid"], 42, "{profile}");
        // No call may crash or be one that the binding cannot read.
        for (name, answer) in calls.as_object().expect("calls") {
            assert!(
                !answer.as_str().is_some_and(|a| a.contains("error 25") && !name.contains("ProcessDetail")),
                "{profile} {name} {answer}"
            );
        }
    }
}

/// The boards' profiles as the vendor's guide lists them: name, MiB, instances, placements.
type Listed = (&'static str, u64, u64, &'static [[u64; 2]]);

const SEVENTHS: &[[u64; 2]] = &[[0, 1], [1, 1], [2, 1], [3, 1], [4, 1], [5, 1], [6, 1]];
const RTX: &[[u64; 2]] = &[[0, 3], [3, 3], [6, 3], [9, 3]];

fn guide() -> Vec<(&'static str, u64, usize, Vec<Listed>)> {
    let (double, two): (&[_], &[_]) = (&[[0, 2], [2, 2], [4, 2], [6, 2]], &[[0, 2], [2, 2], [4, 2]]);
    let (half, four, seven): (&[_], &[_], &[_]) = (&[[0, 4], [4, 4]], &[[0, 4]], &[[0, 8]]);
    let pending = 16;
    vec![
        (
            "a30",
            pending,
            5,
            vec![("MIG 1g.6gb", 5952, 4, &[[0, 1], [1, 1], [2, 1], [3, 1]]), ("MIG 4g.24gb", 24000, 1, four)],
        ),
        ("a100-40gb", pending, 7, vec![("MIG 1g.5gb", 4864, 7, SEVENTHS), ("MIG 3g.20gb", 19968, 2, half)]),
        (
            "a100-80gb",
            pending,
            7,
            vec![("MIG 1g.10gb", 9728, 7, SEVENTHS), ("MIG 1g.20gb", 19968, 4, double)],
        ),
        ("h100", 0, 7, vec![("MIG 2g.20gb", 20096, 3, two), ("MIG 7g.80gb", 81152, 1, seven)]),
        ("h200", 0, 7, vec![("MIG 3g.71gb", 71168, 2, half), ("MIG 4g.71gb", 71168, 1, four)]),
        ("b200", 0, 7, vec![("MIG 1g.23gb", 20992, 7, SEVENTHS), ("MIG 2g.45gb", 45312, 3, two)]),
        (
            "rtx-pro-6000",
            0,
            11,
            vec![("MIG 1g.24gb+gfx", 24192, 4, RTX), ("MIG 1g.24gb+me.all", 24192, 1, RTX)],
        ),
    ]
}

#[test]
#[ignore = "needs python3 and NVML_BINDING: hack/test-unit.sh"]
fn the_python_binding_carves_every_board_as_the_guide_says() {
    for (board, off, profiles, listed) in guide() {
        let rig =
            Rig::new(&format!(r#"{{"profile":"{board}","privileged":true,"gpus":{{"0":{{"mig":{{}}}}}}}}"#));
        let answers = ask("carve.py", &rig.library());
        let found = answers["profiles"].as_object().expect("profiles");
        assert_eq!(found.len(), profiles, "{board}: {answers}");
        for (name, row) in found {
            let of = row["of"].as_u64().expect("a number");
            assert_eq!(
                (row["made"].as_u64(), row["devices"].as_u64()),
                (Some(of), Some(of)),
                "{board} {name} {row}"
            );
            assert_eq!(
                (row["left"].as_u64(), &row["after"]),
                (Some(0), &serde_json::json!([0, of])),
                "{board} {name}"
            );
            // In use by its compute instance; no room; no such placement.
            assert_eq!(
                (&row["inUse"], &row["taken"], &row["odd"]),
                (&19.into(), &23.into(), &2.into()),
                "{board} {name}"
            );
            assert!(
                row["refused"].as_array().expect("a list").iter().all(|code| code == 23),
                "{board} {name} {row}"
            );
        }
        for (name, mib, of, places) in listed {
            let row = &found[name];
            assert_eq!((row["mib"].as_u64(), row["of"].as_u64()), (Some(mib), Some(of)), "{board} {name}");
            assert_eq!(row["places"], serde_json::json!(places), "{board} {name}");
        }
        assert_eq!(answers["missing"], 3, "{board}: no such profile");
        // Ampere waits for a reset.
        assert_eq!((answers["off"].as_u64(), &answers["mode"][1]), (Some(off), &0.into()), "{board}");
        assert_eq!(answers["mode"][0].as_u64(), Some(u64::from(off != 0)), "{board}");
        // Seen on an H100 with driver 580.159.04: a whole board says what it could be cut into.
        for (name, row) in found {
            let whole = &answers["whole"][name];
            assert_eq!((&whole["places"], &whole["left"]), (&row["places"], &row["of"]), "{board} {name}");
        }
    }
}

#[test]
#[ignore = "needs python3 and NVML_BINDING: hack/test-unit.sh"]
fn the_python_binding_is_told_how_busy_gpu_instances_are() {
    let ask = |profile: &str| {
        let instances = r#"{"instances":[{"profile":"1g.10gb"},{"profile":"2g.20gb"}]}"#;
        let rig = Rig::new(&format!(r#"{{"profile":"{profile}","gpus":{{"0":{{"mig":{instances}}}}}}}"#));
        let found = ask("gpm.py", &rig.library());
        assert_eq!(found["instances"].as_array().map(Vec::len), Some(2), "{profile}: {found}");
        found
    };
    // No process works; the other metric is none that is simulated.
    let idle = serde_json::json!([[0, 0.0], [3, 0.0]]);
    let hopper = ask("h100");
    assert_eq!((&hopper["supported"], &hopper["none"]), (&1.into(), &2.into()), "{hopper}");
    assert_eq!(hopper["instances"], serde_json::json!([idle, idle]));
    let ampere = ask("a100-80gb");
    assert_eq!((&ampere["supported"], &ampere["instances"]), (&0.into(), &serde_json::json!([3, 3])));
}
