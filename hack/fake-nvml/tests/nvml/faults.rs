//! What goes wrong on demand.

use std::time::{Duration, Instant};

use nvml_wrapper::error::NvmlError;

use crate::rig::{Rig, load};

#[test]
fn a_fault_hits_one_call_of_one_board_some_times() {
    let rig = Rig::new(r#"{"profile":"h100","count":2}"#);
    let nvml = rig.nvml();
    let (a, b) = (nvml.device_by_index(0).expect("gpu"), nvml.device_by_index(1).expect("gpu"));
    rig.cli(&["fault", "nvmlDeviceGetMemoryInfo_v2", "UNKNOWN", "--gpu", "1", "--times", "2"]);
    assert!(a.memory_info().is_ok());
    assert!(matches!(b.memory_info(), Err(NvmlError::Unknown)));
    assert!(matches!(b.memory_info(), Err(NvmlError::Unknown)));
    assert!(b.memory_info().is_ok());
    assert!(b.uuid().is_ok());
    rig.cli(&["fault", "nvmlDeviceGetMemoryInfo_v2", "NVML_ERROR_TIMEOUT", "--after", "1"]);
    assert!(a.memory_info().is_ok());
    assert!(matches!(a.memory_info(), Err(NvmlError::Timeout)));
    rig.cli(&["clear"]);
    assert!(a.memory_info().is_ok());
}

#[test]
fn every_return_code_reaches_the_caller() {
    let rig = Rig::new(r#"{"profile":"t4"}"#);
    let nvml = rig.nvml();
    let gpu = nvml.device_by_index(0).expect("gpu");
    let sys = rig.sys();
    let mut minor = 0;
    for code in (1..=30).chain([999]) {
        rig.control(&format!(
            r#"{{"profile":"t4","faults":{{"nvmlDeviceGetMinorNumber":{{"return":"{code}"}}}}}}"#
        ));
        // SAFETY: a live handle and a valid pointer.
        assert_eq!(unsafe { sys.nvmlDeviceGetMinorNumber(gpu.handle(), &mut minor) }, code);
    }
}

#[test]
fn a_call_can_take_its_time_without_holding_up_others() {
    let rig = Rig::new(r#"{"profile":"t4","faults":{"nvmlDeviceGetUUID":{"delay_ms":400}}}"#);
    let nvml = rig.nvml();
    let gpu = nvml.device_by_index(0).expect("gpu");
    std::thread::scope(|scope| {
        let slow = scope.spawn(|| {
            let started = Instant::now();
            gpu.uuid().expect("uuid");
            started.elapsed()
        });
        std::thread::sleep(Duration::from_millis(50));
        let started = Instant::now();
        gpu.name().expect("name");
        assert!(started.elapsed() < Duration::from_millis(200));
        assert!(slow.join().expect("done") >= Duration::from_millis(400));
    });
}

#[test]
fn starting_can_fail_at_first() {
    let rig = Rig::new(
        r#"{"profile":"t4","faults":{"nvmlInit_v2":{"return":"LIB_RM_VERSION_MISMATCH","times":1}}}"#,
    );
    assert!(matches!(load(&rig.library()), Err(NvmlError::LibRmVersionMismatch)));
    assert!(load(&rig.library()).is_ok());
}

#[test]
fn a_function_can_be_missing() {
    let rig = Rig::new(r#"{"profile":"t4"}"#);
    let nvml = rig.nvml();
    let gpu = nvml.device_by_index(0).expect("gpu");
    rig.cli(&["missing", "nvmlDeviceGetMemoryInfo_v2"]);
    assert!(matches!(gpu.memory_info(), Err(NvmlError::FunctionNotFound)));
}

#[test]
fn nonsense_in_the_control_file_changes_nothing() {
    let rig = Rig::new(r#"{"profile":"h100","count":3}"#);
    let nvml = rig.nvml();
    for nonsense in [
        "{",
        "",
        "[]",
        r#"{"profile":"none"}"#,
        r#"{"profile":"h100","count":99}"#,
        r#"{"profile":"h100","cuont":1}"#,
        r#"{"profile":"h100","gpus":{"5":{}}}"#,
        r#"{"profile":"h100","faults":{"nvmlInit":{"return":"NO_SUCH"}}}"#,
        "\u{0}\u{1}",
    ] {
        rig.control(nonsense);
        assert_eq!(nvml.device_count().expect("count"), 3, "{nonsense:?}");
        assert!(nvml.device_by_index(2).is_ok(), "{nonsense:?}");
    }
    rig.control(r#"{"profile":"h100","count":3,"gpus":{"0":{"mig":{"instances":[{"profile":"9g.nonsense"}]},"memory_mib":18446744073709551615,"reserved_mib":18446744073709551615,"bus_id":"zz"}}}"#);
    assert!(nvml.device_by_index(0).and_then(|g| g.memory_info()).is_ok());
}

#[test]
fn calls_are_logged_on_demand() {
    let rig = Rig::new(r#"{"profile":"t4"}"#);
    let nvml = rig.nvml();
    rig.cli(&["log", "on"]);
    nvml.device_by_index(0).and_then(|g| g.uuid()).expect("uuid");
    rig.cli(&["log", "off"]);
    nvml.device_count().expect("count");
    let log = std::fs::read_to_string(rig.dir.join("calls.log")).expect("a log");
    assert!(log.contains(" nvmlDeviceGetUUID 0 SUCCESS "), "{log}");
    assert!(!log.contains("nvmlDeviceGetCount_v2"), "{log}");
}
