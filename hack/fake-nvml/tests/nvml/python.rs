//! A client that nobody here wrote: the vendor's Python binding.

use std::path::Path;
use std::process::Command;

use crate::rig::{Rig, built};

/// What the binding is answered by this library.
fn probe(library: &Path) -> serde_json::Value {
    let binding = std::env::var_os("NVML_BINDING").expect("NVML_BINDING is a folder with pynvml.py");
    let output = Command::new("python3")
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/probe.py"))
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
    for profile in ["t4", "a100-80gb", "h100", "h200", "b200", "l40s"] {
        let rig = Rig::new(&format!(r#"{{"profile":"{profile}","count":2,"driver_version":"615.10.01"}}"#));
        if !["t4", "l40s"].contains(&profile) {
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
