//! Exported names.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use nvml_wrapper::error::NvmlError;

use crate::rig::{Rig, built, load};

fn exported(library: &Path) -> BTreeSet<String> {
    let file = std::fs::read(library).expect("the library");
    fake_nvml::strip::names(&file).expect("an ELF file")
}

/// `fake-nvml install` of this driver version.
fn installed(rig: &Rig, version: &str) -> PathBuf {
    let dir = rig.dir.join(version);
    rig.cli(&["install", "--lib", &built().to_string_lossy(), "--driver", version, &dir.to_string_lossy()]);
    dir.join("libnvidia-ml.so.1")
}

#[test]
fn the_library_as_built_exports_what_the_list_says() {
    let list: BTreeSet<String> =
        fake_nvml::driver::NAMES.iter().map(|(name, _)| (*name).to_owned()).collect();
    assert_eq!(exported(&built()), list);
}

#[test]
fn an_installed_library_exports_the_names_of_its_version() {
    let rig = Rig::new(r#"{"profile":"h100","driver_version":"550.163.01"}"#);
    for (version, series) in
        [("550.163.01", 550), ("555.42.06", 550), ("580.159.04", 580), ("615.10.01", 615)]
    {
        let names = fake_nvml::driver::NAMES.iter().filter(|(_, since)| *since <= series);
        let names: BTreeSet<String> = names.map(|(name, _)| (*name).to_owned()).collect();
        assert_eq!(exported(&installed(&rig, version)), names, "{version}");
    }
    let library = installed(&rig, "550.163.01");
    std::fs::copy(rig.dir.join("control.json"), library.with_file_name("control.json")).expect("copied");
    let nvml = load(&library).expect("initialised");
    let gpu = nvml.device_by_index(0).expect("gpu");
    assert!(gpu.uuid().is_ok() && gpu.memory_info().is_ok());
    // Looked up, and not called: as the driver's users do.
    // SAFETY: our own library, whose constructors do nothing.
    let looked_up = unsafe { libloading::Library::new(&library) }.expect("loaded");
    // SAFETY: nothing is called.
    let there = |name: &[u8]| unsafe { looked_up.get::<*const ()>(name).is_ok() };
    assert!(there(b"nvmlDeviceGetUUID") && !there(b"nvmlDeviceGetAddressingMode"));
}

#[test]
fn a_library_is_not_installed_for_a_version_that_is_none() {
    let rig = Rig::new(r#"{"profile":"h100"}"#);
    for version in ["", "new", "550.", "../550.1"] {
        let output = Command::new(env!("CARGO_BIN_EXE_fake-nvml"))
            .args(["install", "--driver", version, "--lib"])
            .arg(built())
            .arg(rig.dir.join("lib"))
            .output()
            .expect("started");
        let words = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && words.contains("is no driver version"), "{version:?}: {words}");
    }
    assert!(!rig.dir.join("lib").exists());
}

/// The library of NVIDIA's driver that the rig plays, in the rig's cache.
#[test]
#[ignore = "needs NVIDIA's driver in TRANCHE_TEST_DRIVER_ROOT: hack/test-unit.sh"]
fn the_real_library_has_every_name_that_the_installed_one_exports() {
    let root =
        std::env::var_os("TRANCHE_TEST_DRIVER_ROOT").expect("TRANCHE_TEST_DRIVER_ROOT is a driver root");
    let place = format!("usr/lib/{}-linux-gnu/nvidia/current/libnvidia-ml.so.1", std::env::consts::ARCH);
    let real = Path::new(&root).join(place).canonicalize().expect("the real library is there");
    let name = real.file_name().expect("a file").to_string_lossy().into_owned();
    let version = name.strip_prefix("libnvidia-ml.so.").expect("its name ends with its version");
    let rig = Rig::new(r#"{"profile":"h100"}"#);
    let (ours, theirs) = (exported(&installed(&rig, version)), exported(&real));
    assert_eq!(ours.difference(&theirs).collect::<Vec<_>>(), Vec::<&String>::new(), "not in {version}");
    assert!(ours.len() > 300, "{} names", ours.len());
    println!("{version}: {} names, of which ours lacks {}", theirs.len(), theirs.difference(&ours).count());
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
    assert!(!exported(&copy).contains("nvmlDeviceGetMemoryInfo_v2"));
    assert!(
        load(&rig.library()).and_then(|n| n.device_by_index(0)?.memory_info()).is_ok(),
        "the original has it"
    );
}
