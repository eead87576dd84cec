//! Two processes see one node.

use std::path::PathBuf;
use std::process::Command;

use nvml_wrapper::enum_wrappers::device::ComputeMode;

use crate::rig::{Rig, load};

const LIBRARY: &str = "FAKE_NVML_TEST_LIBRARY";

/// Run by the test below in a process of its own; on its own it does nothing.
#[test]
fn the_other_process() {
    let Some(library) = std::env::var_os(LIBRARY) else { return };
    let nvml = load(&PathBuf::from(library)).expect("initialised");
    let mut gpu = nvml.device_by_index(0).expect("gpu");
    assert_eq!(gpu.compute_mode().expect("mode"), ComputeMode::ExclusiveProcess);
    gpu.set_compute_mode(ComputeMode::Prohibited).expect("set");
}

#[test]
fn what_one_sets_the_other_sees() {
    let rig = Rig::new(r#"{"profile":"h100","privileged":true}"#);
    let nvml = rig.nvml();
    let mut gpu = nvml.device_by_index(0).expect("gpu");
    gpu.set_compute_mode(ComputeMode::ExclusiveProcess).expect("set");
    let status = Command::new(std::env::current_exe().expect("own path"))
        .args(["shared::the_other_process", "--exact"])
        .env(LIBRARY, rig.library())
        .output()
        .expect("started");
    assert!(status.status.success(), "{}", String::from_utf8_lossy(&status.stdout));
    assert_eq!(gpu.compute_mode().expect("mode"), ComputeMode::Prohibited);
}

#[test]
fn many_at_once_lose_nothing() {
    let rig = Rig::new(r#"{"profile":"h100","count":16,"privileged":true}"#);
    let nvml = rig.nvml();
    std::thread::scope(|scope| {
        for index in 0..16 {
            let nvml = &nvml;
            scope.spawn(move || {
                let mut gpu = nvml.device_by_index(index).expect("gpu");
                for mode in [ComputeMode::Prohibited, ComputeMode::Default, ComputeMode::ExclusiveProcess] {
                    gpu.set_compute_mode(mode).expect("set");
                }
            });
        }
    });
    for index in 0..16 {
        assert_eq!(
            nvml.device_by_index(index).and_then(|g| g.compute_mode()).expect("mode"),
            ComputeMode::ExclusiveProcess
        );
    }
}
