//! Memory limits by cgroup, of driver series 615.

use std::ffi::{CString, c_char, c_void};

use crate::rig::Rig;

#[repr(C)]
struct Limits {
    name_space: *const c_char,
    soft: u64,
    hard: u64,
    used: u64,
}

type Call = unsafe extern "C" fn(*mut c_void, *mut Limits) -> u32;

fn calls(rig: &Rig) -> (libloading::Library, Call, Call) {
    // SAFETY: our own library; the types are those of the functions.
    unsafe {
        let library = libloading::Library::new(rig.library()).expect("loaded");
        let set = *library.get::<Call>(b"nvmlDeviceSetMemoryLimits_v1").expect("set");
        let get = *library.get::<Call>(b"nvmlDeviceGetMemoryLimits_v1").expect("get");
        (library, set, get)
    }
}

#[test]
fn limits_are_set_read_and_cleared() {
    let rig = Rig::new(
        r#"{"profile":"h100","driver_version":"615.10.01","privileged":true,"gpus":{"0":{"processes":[
            {"pid":1,"used_mib":10,"cgroup":"/kubepods/a"},{"pid":2,"used_mib":5,"cgroup":"/kubepods/a/b"},
            {"pid":3,"used_mib":7,"cgroup":"/kubepods/ab"}]}}}"#,
    );
    let nvml = rig.nvml();
    let gpu = nvml.device_by_index(0).expect("gpu");
    let (_library, set, get) = calls(&rig);
    let path = CString::new("/sys/fs/cgroup/kubepods/a").expect("a path");
    let mut limits = Limits { name_space: path.as_ptr(), soft: 0, hard: 1 << 30, used: 0 };
    // SAFETY: a live handle, and a struct as large as either call wants.
    unsafe {
        let h = gpu.handle().cast();
        assert_eq!(get(h, &mut limits), 6, "none yet");
        assert_eq!(set(h, &mut limits), 0);
        limits.hard = 0;
        assert_eq!(get(h, &mut limits), 0);
        assert_eq!((limits.soft, limits.hard, limits.used >> 20), (0, 1 << 30, 15));
        limits.hard = u64::MAX;
        assert_eq!(set(h, &mut limits), 0);
        assert_eq!(get(h, &mut limits), 6, "cleared");
        limits.name_space = std::ptr::null();
        assert_eq!(set(h, &mut limits), 2);
        rig.cli(&["set-mig", "0", "on"]);
        limits.name_space = path.as_ptr();
        assert_eq!(set(h, &mut limits), 3, "not in MIG mode");
    }
}

#[test]
fn older_drivers_do_not_have_them() {
    let rig = Rig::new(r#"{"profile":"h100","driver_version":"610.01"}"#);
    let nvml = rig.nvml();
    let gpu = nvml.device_by_index(0).expect("gpu");
    let (_library, set, get) = calls(&rig);
    let mut limits = Limits { name_space: std::ptr::null(), soft: 0, hard: 0, used: 0 };
    // SAFETY: as above.
    unsafe {
        assert_eq!(set(gpu.handle().cast(), &mut limits), 13);
        assert_eq!(get(gpu.handle().cast(), &mut limits), 13);
    }
}
