//! A client that nobody here wrote: the vendor's Python binding.

use std::process::Command;

use crate::rig::Rig;

#[test]
#[ignore = "needs python3 and NVML_BINDING: hack/test-unit.sh"]
fn the_python_binding_is_content() {
    let binding = std::env::var_os("NVML_BINDING").expect("NVML_BINDING is a folder with pynvml.py");
    for profile in ["t4", "a100-80gb", "h100", "h200", "b200", "l40s"] {
        let rig = Rig::new(&format!(r#"{{"profile":"{profile}","count":2,"driver_version":"615.10.01"}}"#));
        if !["t4", "l40s"].contains(&profile) {
            rig.cli(&["set-mig", "1", "on"]);
        }
        rig.cli(&["process", "add", "0", "42", "1000"]);
        let output = Command::new("python3")
            .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/probe.py"))
            .arg(rig.library())
            .env("PYTHONPATH", &binding)
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .output()
            .expect("started");
        assert!(output.status.success(), "{profile}: {}", String::from_utf8_lossy(&output.stderr));
        let answers: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
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
