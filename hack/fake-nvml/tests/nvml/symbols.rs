//! Exported names.

use std::collections::BTreeSet;
use std::process::Command;

use nvml_wrapper::error::NvmlError;

use crate::rig::{Rig, built, load};

#[test]
fn the_library_exports_what_the_list_says() {
    let list: BTreeSet<String> = include_str!("../../names.txt")
        .lines()
        .filter(|l| !l.starts_with('#') && !l.is_empty())
        .filter_map(|l| l.split(' ').next().map(str::to_owned))
        .collect();
    let file = std::fs::read(built()).expect("the library");
    let exported = fake_nvml::strip::names(&file).expect("an ELF file");
    assert_eq!(exported.difference(&list).filter(|n| n.starts_with("nvml")).count(), 0);
    assert_eq!(list.difference(&exported).collect::<Vec<_>>(), Vec::<&String>::new());
}

#[test]
fn a_stub_says_that_it_cannot() {
    let rig = Rig::new(r#"{"profile":"h100"}"#);
    let sys = rig.sys();
    // SAFETY: stubs look at no argument.
    unsafe {
        assert_eq!(sys.nvmlDeviceResetApplicationsClocks(std::ptr::null_mut()), 1);
        let _nvml = rig.nvml();
        assert_eq!(sys.nvmlDeviceResetApplicationsClocks(std::ptr::null_mut()), 3);
    }
}

#[test]
fn names_can_be_taken_away_for_good() {
    let rig = Rig::new(r#"{"profile":"h100"}"#);
    let copy = rig.dir.join("older.so");
    let status = Command::new(env!("CARGO_BIN_EXE_fake-nvml"))
        .arg("strip-symbols")
        .arg(rig.library())
        .arg(&copy)
        .args(["nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetMPSComputeRunningProcesses_v3"])
        .status()
        .expect("started");
    assert!(status.success());
    let nvml = load(&copy).expect("initialised");
    let gpu = nvml.device_by_index(0).expect("gpu");
    assert!(matches!(gpu.memory_info(), Err(NvmlError::FailedToLoadSymbol(_))));
    assert!(matches!(gpu.mps_running_compute_processes(), Err(NvmlError::FailedToLoadSymbol(_))));
    assert!(gpu.uuid().is_ok());
    assert!(
        load(&rig.library()).and_then(|n| n.device_by_index(0)?.memory_info()).is_ok(),
        "the original has it"
    );
}
