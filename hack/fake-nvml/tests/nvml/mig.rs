//! MIG: what is there, making it, ending it.

use std::ptr;

use nvml_wrapper::error::NvmlError;
use nvml_wrapper_sys::bindings::*;

use crate::rig::Rig;

const NODE: &str = r#"{"profile":"h100","count":2,"gpus":{"1":{
    "mig":{"instances":[{"profile":"1g.10gb"},{"profile":"1g.10gb","placement":2},{"profile":"3g.40gb","compute":[2,1]}]},
    "processes":[{"pid":7,"used_mib":100,"gi":2,"ci":1},{"pid":8,"used_mib":50,"gi":7}]}}}"#;

#[test]
fn devices_are_listed_with_their_parts() {
    let rig = Rig::new(NODE);
    let nvml = rig.nvml();
    let parent = nvml.device_by_index(1).expect("gpu");
    let mode = parent.mig_mode().expect("mode");
    assert_eq!((mode.current, mode.pending), (1, 1));
    assert_eq!(parent.mig_device_count().expect("most"), 7);
    assert!(matches!(parent.utilization_rates(), Err(NvmlError::NotSupported)));

    let sys = rig.sys();
    let mut rows = Vec::new();
    for index in 0..7 {
        let mig = match parent.mig_device_by_index(index) {
            Ok(mig) => mig,
            Err(NvmlError::NotFound) => continue,
            Err(other) => panic!("{other}"),
        };
        assert!(mig.mig_is_mig_device_handle().expect("is mig"));
        let uuid = mig.uuid().expect("uuid");
        assert!(uuid.starts_with("MIG-") && uuid.len() == 40, "{uuid}");
        assert_eq!(nvml.device_by_uuid(uuid.as_str()).expect("by uuid").index().expect("index"), index);
        assert_eq!(mig.mig_parent_device().expect("parent").index().expect("index"), 1);
        assert!(matches!(mig.minor_number(), Err(NvmlError::NotSupported)));
        assert!(matches!(mig.compute_mode(), Err(NvmlError::NotSupported)));
        let attributes = mig.attributes().expect("attributes");
        let (mut gi, mut ci) = (0, 0);
        // SAFETY: a handle of the same library and valid pointers.
        unsafe {
            assert_eq!(sys.nvmlDeviceGetGpuInstanceId(mig.handle(), &mut gi), 0);
            assert_eq!(sys.nvmlDeviceGetComputeInstanceId(mig.handle(), &mut ci), 0);
        }
        let used = mig.memory_info().expect("memory").used >> 20;
        rows.push((
            gi,
            ci,
            mig.name().expect("name"),
            attributes.multiprocessor_count,
            attributes.memory_size_mb,
            used,
        ));
    }
    let name = |n: &str| format!("NVIDIA H100 80GB HBM3 MIG {n}");
    assert_eq!(
        rows,
        [
            (2, 0, name("2c.3g.40gb"), 32, 40448, 100),
            (2, 1, name("1c.3g.40gb"), 16, 40448, 100),
            (7, 0, name("1g.10gb"), 16, 9984, 50),
            (9, 0, name("1g.10gb"), 16, 9984, 0),
        ]
    );
    let whole = nvml.device_by_index(0).expect("gpu");
    assert!(matches!(whole.mig_device_by_index(0), Err(NvmlError::NotFound)));
}

#[test]
fn profiles_and_placements() {
    let rig = Rig::new(NODE);
    let nvml = rig.nvml();
    let gpu = nvml.device_by_index(0).expect("gpu");
    let small = gpu.profile_info(0).expect("1g");
    assert_eq!(
        (small.id, small.instance_count, small.multiprocessor_count, small.memory_size_mb),
        (19, 7, 16, 9984)
    );
    assert!(matches!(gpu.profile_info(5), Err(NvmlError::NotSupported)));
    assert!(matches!(gpu.profile_info(99), Err(NvmlError::InvalidArg)));

    let sys = rig.sys();
    let mut count = 0;
    // SAFETY: a live handle; room for what is told.
    unsafe {
        let h = gpu.handle();
        assert_eq!(sys.nvmlDeviceGetGpuInstancePossiblePlacements_v2(h, 9, ptr::null_mut(), &mut count), 0);
        assert_eq!(count, 2);
        let mut places = [nvmlGpuInstancePlacement_t { start: 99, size: 99 }; 2];
        assert_eq!(
            sys.nvmlDeviceGetGpuInstancePossiblePlacements_v2(h, 9, places.as_mut_ptr(), &mut count),
            0
        );
        assert_eq!(places.map(|p| (p.start, p.size)), [(0, 4), (4, 4)]);
        count = 1;
        assert_eq!(
            sys.nvmlDeviceGetGpuInstancePossiblePlacements_v2(h, 9, places.as_mut_ptr(), &mut count),
            7
        );
        assert_eq!(count, 2);
    }
}

#[test]
fn instances_are_made_and_ended() {
    let rig = Rig::new(r#"{"profile":"h100","count":1,"privileged":true}"#);
    let nvml = rig.nvml();
    let gpu = nvml.device_by_index(0).expect("gpu");
    let sys = rig.sys();
    let (mut gi, mut ci): (nvmlGpuInstance_t, nvmlComputeInstance_t) = (ptr::null_mut(), ptr::null_mut());
    let (mut left, mut status) = (0, 0);
    // SAFETY: handles of this library and valid pointers throughout.
    unsafe {
        let h = gpu.handle();
        assert_eq!(sys.nvmlDeviceCreateGpuInstance(h, 19, &mut gi), 3, "not in MIG mode");
        assert_eq!(
            sys.nvmlDeviceGetGpuInstanceRemainingCapacity(h, 19, &mut left),
            0,
            "it says what it could be"
        );
        assert_eq!(left, 7);
        assert_eq!(sys.nvmlDeviceSetMigMode(h, 1, &mut status), 0);
        assert_eq!(status, 0);
        assert_eq!(sys.nvmlDeviceGetGpuInstanceRemainingCapacity(h, 19, &mut left), 0);
        assert_eq!(left, 7);
        let place = nvmlGpuInstancePlacement_t { start: 4, size: 4 };
        assert_eq!(sys.nvmlDeviceCreateGpuInstanceWithPlacement(h, 9, &place, &mut gi), 0);
        let mut other = ptr::null_mut();
        assert_eq!(sys.nvmlDeviceCreateGpuInstanceWithPlacement(h, 9, &place, &mut other), 23, "taken");
        let wrong = nvmlGpuInstancePlacement_t { start: 1, size: 4 };
        assert_eq!(
            sys.nvmlDeviceCreateGpuInstanceWithPlacement(h, 9, &wrong, &mut other),
            2,
            "no such place"
        );
        assert_eq!(sys.nvmlDeviceGetGpuInstanceRemainingCapacity(h, 19, &mut left), 0);
        assert_eq!(left, 4);
        assert_eq!(
            gpu.mig_device_by_index(0).err().map(|e| matches!(e, NvmlError::NotFound)),
            Some(true),
            "no compute yet"
        );
        assert_eq!(sys.nvmlGpuInstanceCreateComputeInstance(gi, 2, &mut ci), 0);
        assert_eq!(sys.nvmlGpuInstanceCreateComputeInstance(gi, 0, &mut ci), 23, "all slices taken");
        let mut info: nvmlGpuInstanceInfo_t = std::mem::zeroed();
        assert_eq!(sys.nvmlGpuInstanceGetInfo(gi, &mut info), 0);
        assert_eq!((info.id, info.profileId, info.placement.start, info.placement.size), (2, 9, 4, 4));
        let mut profile: nvmlComputeInstanceProfileInfo_t = std::mem::zeroed();
        assert_eq!(sys.nvmlGpuInstanceGetComputeInstanceProfileInfo(gi, 2, 0, &mut profile), 0);
        assert_eq!((profile.id, profile.sliceCount, profile.multiprocessorCount), (2, 3, 60));
        let mig = gpu.mig_device_by_index(0).expect("now there");
        assert!(mig.name().expect("name").ends_with("MIG 3g.40gb"));

        rig.cli(&["process", "add", "0", "123", "10", "--gi", "2"]);
        assert_eq!(sys.nvmlDeviceSetMigMode(h, 0, &mut status), 0);
        assert_eq!(status, 19, "pending only");
        assert_eq!(sys.nvmlGpuInstanceDestroy(gi), 19, "a process runs");
        rig.cli(&["process", "remove", "0", "123"]);
        assert_eq!(sys.nvmlGpuInstanceDestroy(gi), 19, "it has a compute instance");
        let mut list = [ptr::null_mut(); 8];
        let mut count = 0;
        assert_eq!(sys.nvmlGpuInstanceGetComputeInstances(gi, 2, list.as_mut_ptr(), &mut count), 0);
        assert_eq!(count, 1);
        assert_eq!(sys.nvmlComputeInstanceDestroy(list[0]), 0);
        assert_eq!(sys.nvmlGpuInstanceDestroy(gi), 0);
        assert_eq!(sys.nvmlGpuInstanceGetInfo(gi, &mut info), 2, "gone");
        assert!(matches!(mig.uuid(), Err(NvmlError::InvalidArg)));
        assert_eq!(sys.nvmlDeviceSetMigMode(h, 0, &mut status), 0);
        assert_eq!(status, 0);
    }
    assert_eq!(gpu.mig_mode().expect("mode").current, 0);
}

#[test]
fn changes_need_root_and_the_operator_has_the_last_word() {
    let rig = Rig::new(r#"{"profile":"a100-80gb","privileged":false}"#);
    let nvml = rig.nvml();
    let gpu = nvml.device_by_index(0).expect("gpu");
    assert!(matches!(gpu.set_mig_mode_of(&rig, 1), Err(4)));
    rig.control(r#"{"profile":"a100-80gb","privileged":true}"#);
    assert_eq!(gpu.set_mig_mode_of(&rig, 1), Ok(16), "pending a reset");
    let mode = gpu.mig_mode().expect("mode");
    assert_eq!((mode.current, mode.pending), (0, 1));
    rig.cli(&["reset", "0"]);
    assert_eq!(gpu.mig_mode().expect("mode").current, 1);
    rig.cli(&["set-mig", "0", "off"]);
    assert_eq!(gpu.mig_mode().expect("mode").current, 0);
    rig.cli(&["set-mig", "0", "2g.20gb,2g.20gb,2g.20gb,1g.10gb"]);
    assert_eq!((0..7).filter(|i| gpu.mig_device_by_index(*i).is_ok()).count(), 4);
    rig.cli(&["set-mig", "0", "3g.40gb@4,2g.20gb/1+1"]);
    let names = (0..7).filter_map(|i| gpu.mig_device_by_index(i).ok()?.name().ok());
    let mut parts: Vec<String> =
        names.map(|name| name.rsplit(' ').next().unwrap_or_default().to_owned()).collect();
    parts.sort();
    assert_eq!(parts, ["1c.2g.20gb", "1c.2g.20gb", "3g.40gb"]);
}

/// Whoever says the same a second time does not mean what was made after the first.
#[test]
fn what_the_operator_has_overruled_does_not_come_back() {
    let rig = Rig::new(r#"{"profile":"h100","count":1,"privileged":true}"#);
    let nvml = rig.nvml();
    let gpu = nvml.device_by_index(0).expect("gpu");
    let sys = rig.sys();
    let left = || {
        let mut left = 0;
        // SAFETY: a handle of this library and a valid pointer.
        assert_eq!(unsafe { sys.nvmlDeviceGetGpuInstanceRemainingCapacity(gpu.handle(), 19, &mut left) }, 0);
        left
    };
    rig.cli(&["set-mig", "0", "on"]);
    let mut gi: nvmlGpuInstance_t = ptr::null_mut();
    // SAFETY: as above.
    assert_eq!(unsafe { sys.nvmlDeviceCreateGpuInstance(gpu.handle(), 19, &mut gi) }, 0);
    assert_eq!(left(), 6);
    rig.cli(&["log", "off"]);
    assert_eq!(left(), 6, "what is in force stays");
    rig.cli(&["set-mig", "0", "off"]);
    rig.cli(&["set-mig", "0", "on"]);
    assert_eq!(left(), 7);
}

/// The two ways in which a creation may go wrong although there is an instance: told wrongly, or late.
#[test]
fn an_instance_may_be_there_although_its_creation_failed() {
    let rig = Rig::new(r#"{"profile":"h100","privileged":true,"gpus":{"0":{"mig":{}}}}"#);
    let nvml = rig.nvml();
    let gpu = nvml.device_by_index(0).expect("gpu");
    let sys = rig.sys();
    let call = "nvmlDeviceCreateGpuInstanceWithPlacement";
    rig.cli(&["fault", call, "UNKNOWN", "--done", "--times", "1"]);
    let mut gi = ptr::null_mut();
    let create = |start, gi: &mut nvmlGpuInstance_t| {
        let place = nvmlGpuInstancePlacement_t { start, size: 1 };
        // SAFETY: a live handle and valid pointers.
        unsafe { sys.nvmlDeviceCreateGpuInstanceWithPlacement(gpu.handle(), 19, &place, gi) }
    };
    assert_eq!(create(2, &mut gi), 999);
    assert_eq!(create(2, &mut gi), 23, "it was made");
    rig.cli(&["fault", call, "none", "--done", "--delay-ms", "300"]);
    let begun = std::time::Instant::now();
    let seen = std::thread::scope(|threads| {
        let slow = threads.spawn(|| create(3, &mut ptr::null_mut()));
        let mut count = 0;
        while count < 2 && begun.elapsed().as_secs() < 10 {
            let mut list = [ptr::null_mut(); 8];
            // SAFETY: a live handle; room for the profile's most.
            unsafe { sys.nvmlDeviceGetGpuInstances(gpu.handle(), 19, list.as_mut_ptr(), &mut count) };
        }
        let seen = begun.elapsed();
        assert_eq!(slow.join().expect("no panic"), 0);
        assert_eq!(count, 2);
        seen
    });
    assert!(begun.elapsed().as_millis() >= 300 && seen < begun.elapsed(), "seen before it was told");
}

#[test]
fn a_reset_ends_instances_and_waits_for_programs() {
    let rig = Rig::new(
        r#"{"profile":"a30","privileged":true,"gpus":{"0":{"mig":{"instances":[{"profile":"1g.6gb"}]}}}}"#,
    );
    let nvml = rig.nvml();
    let gpu = nvml.device_by_index(0).expect("gpu");
    assert!(gpu.mig_device_by_index(0).is_ok());
    rig.cli(&["process", "add", "0", "123", "10"]);
    assert_eq!(gpu.set_mig_mode_of(&rig, 0), Ok(19), "in use");
    rig.cli(&["process", "remove", "0", "123"]);
    rig.cli(&["reset", "0"]);
    let mode = gpu.mig_mode().expect("mode");
    assert_eq!((mode.current, mode.pending), (0, 0));
    assert!(matches!(gpu.mig_device_by_index(0), Err(NvmlError::NotFound)));
}

trait SetMig {
    fn set_mig_mode_of(&self, rig: &Rig, mode: u32) -> Result<u32, u32>;
}

impl SetMig for nvml_wrapper::Device<'_> {
    fn set_mig_mode_of(&self, rig: &Rig, mode: u32) -> Result<u32, u32> {
        let mut status = 99;
        // SAFETY: a live handle and a valid pointer.
        match unsafe { rig.sys().nvmlDeviceSetMigMode(self.handle(), mode, &mut status) } {
            0 => Ok(status),
            code => Err(code),
        }
    }
}
